"""``stoker train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.base.remote import url_of
from stoker.cli.common import options
from stoker.cli.common.options import option

if TYPE_CHECKING:
    from stoker.training import TrainResult

__all__ = ["metric_names", "metrics_table", "register"]

_MODEL, _OPTIMIZER, _RUN = "Model", "Optimization", "Run"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("train")(train)


def train(
    dataset: Annotated[Path | None, typer.Argument(help="Directory that stoker prepare wrote.")] = None,
    out: Annotated[Path | None, option(_RUN, "Run directory to make, or a URL.")] = None,
    resume: Annotated[Path | None, option(_RUN, "Run directory or URL to continue, to the bit.")] = None,
    model: options.Model = None,
    imported: Annotated[
        str | None, option(_MODEL, "Model class of your own, as package.module:Class.", "--import", metavar="PATH")
    ] = None,
    embedding_dim: options.EmbeddingDim = None,
    bottom: options.Bottom = None,
    top: options.Top = None,
    hidden: options.Hidden = None,
    model_option: options.ModelOption = None,
    pooling: Annotated[str | None, option(_MODEL, "Of sequence features: mean, sum or max. (default: mean)")] = None,
    dtype: options.Dtype = None,
    tt_rank: options.TTRank = None,
    tt_rows: options.TTRows = None,
    tt_cores: options.TTCores = None,
    tt_own: options.TTOwn = None,
    dense_dtype: Annotated[str | None, option(_MODEL, "Of the dense part: float32 or bfloat16.")] = None,
    compile: Annotated[bool | None, option(_MODEL, "Compile the dense part.", "--compile/--no-compile")] = None,
    batch_size: Annotated[
        str | None,
        option(_OPTIMIZER, "Examples, or auto: doubled from the base batch size while that pays. (default: 2048)"),
    ] = None,
    epochs: Annotated[int | None, option(_OPTIMIZER, "Passes over the data. (default: 1)")] = None,
    steps: Annotated[int | None, option(_OPTIMIZER, "Batches in all, instead of epochs.")] = None,
    seed: Annotated[int | None, option(_OPTIMIZER, "Of initial values and order. (default: 0)")] = None,
    batch_order: Annotated[
        str | None, option(_OPTIMIZER, "auto, shuffled or hot-cold. (default: auto: hot-cold on a classified dataset)")
    ] = None,
    swap_rate: Annotated[
        float | None, option(_OPTIMIZER, "R of the hot-cold schedule at the start, 1 to 100. (default: 50)")
    ] = None,
    schedule_rows: Annotated[
        int | None, option(_OPTIMIZER, "First validation rows whose loss drives that schedule. (default: 8192)")
    ] = None,
    shuffle_memory: Annotated[str | None, option(_OPTIMIZER, "Rows shuffled at a time. (default: 1GiB)")] = None,
    row_optimizer: options.RowOptimizer = None,
    row_lr: Annotated[float | None, option(_OPTIMIZER, "Learning rate of the rows.")] = None,
    row_weight_decay: Annotated[
        float | None, option(_OPTIMIZER, "L2 of touched rows; of adamw and lamb decoupled from the moments.")
    ] = None,
    row_momentum: Annotated[float | None, option(_OPTIMIZER, "Of momentum_sgd. (default: 0.9)")] = None,
    row_nesterov: Annotated[
        bool | None, option(_OPTIMIZER, "Of momentum_sgd: Nesterov's momentum.", "--row-nesterov/--no-row-nesterov")
    ] = None,
    row_beta: Annotated[float | None, option(_OPTIMIZER, "Of ftrl: smooths the first steps. (default: 1)")] = None,
    row_l1: Annotated[float | None, option(_OPTIMIZER, "Of ftrl: the larger, the more weights are 0.")] = None,
    row_l2: Annotated[
        float | None, option(_OPTIMIZER, "Of ftrl: L2 of the weights. Of lamb: of touched rows, through its moments.")
    ] = None,
    row_clip_value: Annotated[float | None, option(_OPTIMIZER, "Largest element of a row's gradient.")] = None,
    row_clip_norm: Annotated[float | None, option(_OPTIMIZER, "Largest norm of a row's gradient.")] = None,
    row_cow_clip: Annotated[
        str | None, option(_OPTIMIZER, "CowClip of the rows' gradients: r,zeta, such as 1,1e-5.", metavar="R,ZETA")
    ] = None,
    dense_optimizer: Annotated[str | None, option(_OPTIMIZER, "sgd, adagrad, adam or lamb. (default: adam)")] = None,
    dense_lr: Annotated[float | None, option(_OPTIMIZER, "Learning rate of the dense part.")] = None,
    dense_weight_decay: Annotated[float | None, option(_OPTIMIZER, "L2 of the dense part.")] = None,
    dense_clip_norm: Annotated[float | None, option(_OPTIMIZER, "Largest norm of the dense gradient.")] = None,
    min_trust: Annotated[float | None, option(_OPTIMIZER, "Of lamb: least trust ratio. (default: 0)")] = None,
    max_trust: Annotated[float | None, option(_OPTIMIZER, "Of lamb: largest trust ratio. (default: 10)")] = None,
    lr_scaling: Annotated[
        str | None,
        option(
            _OPTIMIZER,
            "Of learning rates with the batch size: none, sqrt, linear or cowclip (rows keep theirs). (default: none)",
        ),
    ] = None,
    base_batch_size: Annotated[
        int | None, option(_OPTIMIZER, "Examples that the learning rates are meant for. (default: 2048)")
    ] = None,
    schedule: Annotated[
        str | None,
        option(_OPTIMIZER, "constant, linear, cosine, polynomial, step or one-cycle. (default: constant)"),
    ] = None,
    cycle_rise: Annotated[
        float | None, option(_OPTIMIZER, "Share of the steps that one-cycle rises. (default: 0.25)")
    ] = None,
    warmup: Annotated[int | None, option(_OPTIMIZER, "Steps of linear warm-up. (default: 0)")] = None,
    dense_warmup: Annotated[int | None, option(_OPTIMIZER, "The same for the dense part alone. (default: 0)")] = None,
    decay_steps: Annotated[int | None, option(_OPTIMIZER, "Steps of decay. (default: to the end)")] = None,
    eval_every: Annotated[int | None, option(_RUN, "Steps between evaluations. (default: an epoch)")] = None,
    valid_rows: Annotated[int | None, option(_RUN, "First so many validation rows only.")] = None,
    metric: Annotated[
        str | None,
        option(_RUN, "What is best: auc, log_loss; with groups also mrr, ndcg, hr, group_auc. (default: auc)"),
    ] = None,
    ranking_k: Annotated[int | None, option(_RUN, "Places of a list that ndcg and hr look at. (default: 10)")] = None,
    patience: Annotated[int | None, option(_RUN, "Evaluations without a better metric before stopping.")] = None,
    save_every: Annotated[int | None, option(_RUN, "Steps between checkpoints. (default: eval-every)")] = None,
    checkpoint_minutes: Annotated[
        float | None, option(_RUN, "Minutes between checkpoints besides those; 0: none by time. (default: 5)")
    ] = None,
    keep_last: Annotated[int | None, option(_RUN, "Checkpoints kept beside the best. (default: 2)")] = None,
    log_every: Annotated[int | None, option(_RUN, "Steps between lines of metrics.jsonl. (default: 50)")] = None,
    tensorboard: Annotated[
        bool | None, option(_RUN, "Write TensorBoard events.", "--tensorboard/--no-tensorboard")
    ] = None,
    data_memory: Annotated[
        str | None,
        option(_RUN, "For a copy of the training rows in fast memory. (default: auto, see docs/training.md)"),
    ] = None,
    device_memory: options.DeviceMemory = None,
    host_memory: options.HostMemory = None,
    home_path: options.HomePath = None,
    strategy: options.Strategy = None,
    lookahead: options.Lookahead = None,
    foresight: options.Foresight = None,
    in_flight: options.InFlight = None,
    spill: options.Spill = None,
    device: options.Device = None,
    backend: options.Backend = None,
    threads: options.Threads = None,
    json_lines: options.Json = False,
) -> None:
    """Train a model on a prepared dataset, or continue a run.

    Ctrl-C and SIGTERM end the run after the step under way and write a checkpoint.

    \b
    stoker train data/criteo --out runs/a
    stoker train data/criteo --out runs/b --model dcn --dim 32 --epochs 2 --patience 3 --eval-every 1000
    stoker train --resume runs/a --epochs 3
    stoker train data/criteo --out runs/c --dim 64 --device-memory 4GiB
    stoker train data/criteo --out runs/f --tt-rank 32 --tt-own C7=2
    stoker train data/criteo-hot --out runs/d --swap-rate 25
    stoker train data/globo --out runs/e --device-memory 256MiB --host-memory 1GiB --home /fast --foresight
    """
    given = dict(locals())
    for name in ("dataset", "out", "resume", "json_lines", "imported"):
        given.pop(name)
    if (own := options.import_model(imported)) is not None and model is None and resume is None:
        given["model"] = own
    settings = options.train_settings(given)

    from stoker.training import train as run_training

    result = run_training(dataset, out=out, resume=resume, display="json" if json_lines else "auto", **settings)
    place = url_of(resume if out is None else out) or str(result.run)
    if json_lines:
        record = {name: value for name, value in vars(result).items() if name not in ("run", "model")}
        print(json.dumps({"kind": "result", "run": place, **record}))
    else:
        _show_result(result, place)


_NAMES = {
    "auc": "AUC",
    "log_loss": "log loss",
    "normalized_entropy": "normalized entropy",
    "accuracy": "accuracy",
    "calibration": "calibration",
}
_RANKING_NAMES = {"mrr": "MRR", "ndcg": "nDCG@{k}", "hr": "hit rate@{k}", "group_auc": "group AUC"}


def metric_names(k: int | str | None) -> dict[str, str]:
    """Metric -> how it is called, ranking metrics at ``k`` among them; None: without those."""
    ranking = {} if k is None else {name: words.format(k=k) for name, words in _RANKING_NAMES.items()}
    return _NAMES | ranking


def metrics_table(columns: dict[str, dict[str, float | None]], title: str | None = None) -> Any:
    """A table with a row for each metric and a column for each set of rows."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    k = next((int(k) for metrics in columns.values() if (k := metrics.get("ranking_k"))), None)
    for name, words in metric_names(k).items():
        values = [metrics.get(name) for metrics in columns.values()]
        table.add_row(words, *("-" if value is None else f"{value:.4f}" for value in values))
    table.add_row("rows", *(f"{int(metrics.get('rows') or 0):,}" for metrics in columns.values()))
    if k is not None:
        lists = (f"{int(metrics.get('ranked_groups') or 0):,}" for metrics in columns.values())
        table.add_row("lists with a positive", *lists)
    return table


def _show_result(result: TrainResult, run: str) -> None:
    from rich.console import Console

    from stoker.base.units import format_count

    console = Console()
    columns = {name: metrics for name, metrics in (("valid", result.valid), ("test", result.test)) if metrics}
    if columns:
        step = result.step if result.best_step is None else result.best_step
        console.print(metrics_table(columns, f"{result.model.name} at step {step:,} of {result.step:,}"))
    if result.samples_per_second:
        console.print(f"{format_count(result.samples_per_second)} samples/s while training", highlight=False)
    console.print(f"run: {run}", highlight=False, soft_wrap=True)
    console.print("next: " + "\n      ".join(_next(result, run)), highlight=False, soft_wrap=True)


def _next(result: TrainResult, run: str) -> list[str]:
    """Commands worth trying after a run."""
    from stoker.base.units import quoted

    scored = "" if result.test else " --split valid" if result.valid else " --split train"  # predict takes test unasked
    commands = [f"stoker predict {quoted(run)}{scored} --out scores.parquet"]
    if not result.stopped_early and result.best_step in (None, result.step):  # longer training may still help
        commands.append(f"stoker train --resume {quoted(run)} --epochs {int(result.epochs) + 1}")
    if (events := result.run / "tensorboard").is_dir():
        commands.append(f"tensorboard --logdir {quoted(events)}")
    return commands
