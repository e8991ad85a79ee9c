"""``stoker train`` and ``stoker find-lr``, and the options of training, which other commands share."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from stoker.base.errors import ConfigError
from stoker.base.progress import Bars
from stoker.base.remote import url_of
from stoker.base.units import format_count, plural, quoted
from stoker.cli.options import (
    MEMORY_FOR_ROWS,
    ROW_OPTIMIZERS,
    BatchSize,
    DataArgument,
    Json,
    OneObject,
    check_new_files,
    import_model,
    model_options,
    option,
    say,
    show_table,
)

if TYPE_CHECKING:
    from stoker.training import TrainResult
    from stoker.training.tools.find_lr import Finding

_MODEL, _OPTIMIZER, _RUN, _MEMORY, _MACHINE = "Model", "Optimization", "Run", "Memory", "Machine"
_TEST = "Range test"
_WIDTH, _HEIGHT = 64, 12  # of a curve: it fits a terminal of 80


def train(
    dataset: Annotated[Path | None, typer.Argument(help="Directory that stoker prepare wrote.")] = None,
    out: Path | None = option(_RUN, "Run directory to make, or a URL."),
    resume: Path | None = option(_RUN, "Run directory or URL to continue, to the bit."),
    model: str | None = option(_MODEL, "dlrm, deepfm, dcn, tbsm, din or tabular. (default: dlrm)"),
    imported: str | None = option(
        _MODEL, "Model class of your own, as package.module:Class.", "--import", metavar="PATH"
    ),
    embedding_dim: int | None = option(_MODEL, "Columns of every table. (default: 16)", "--embedding-dim", "--dim"),
    bottom: str | None = option(_MODEL, "DLRM: bottom layers. (default: 512-256-64); TBSM: of a step's place."),
    top: str | None = option(_MODEL, "DLRM: top layers. (default: 512-256); TBSM: last layers. (default: 60)"),
    hidden: str | None = option(_MODEL, "DeepFM, DCN, DIN, tabular: layers of the MLP."),
    model_option: list[str] | None = option(_MODEL, "Any other option of the model, as name=value; may be repeated."),
    pooling: str | None = option(_MODEL, "Of sequence features: mean, sum or max. (default: mean)"),
    dtype: str | None = option(_MODEL, "Of the tables: float32 or bfloat16."),
    tt_rank: int | None = option(
        _MODEL, "Large tables as tensor trains of this rank: another, smaller model.", "--tt-rank"
    ),
    tt_rows: int | None = option(_MODEL, "Rows from which on a table is large. (default: 1000000)", "--tt-rows"),
    tt_cores: int | None = option(_MODEL, "Cores of each, 2 to 4. (default: 3)", "--tt-cores"),
    tt_own: list[str] | None = option(
        _MODEL,
        "TABLE=K: instead, K numbers of its own for each row and one core for all, as users need; may be repeated.",
        "--tt-own",
    ),
    dense_dtype: str | None = option(_MODEL, "Of the dense part: float32 or bfloat16."),
    compile: bool | None = option(_MODEL, "Compile the dense part.", "--compile/--no-compile"),
    batch_size: str | None = option(
        _OPTIMIZER, "Examples, or auto: doubled from the base batch size while that pays. (default: 2048)"
    ),
    epochs: int | None = option(_OPTIMIZER, "Passes over the data. (default: 1)"),
    steps: int | None = option(_OPTIMIZER, "Batches in all, instead of epochs."),
    seed: int | None = option(_OPTIMIZER, "Of initial values and order. (default: 0)"),
    batch_order: str | None = option(
        _OPTIMIZER, "auto, shuffled or hot-cold. (default: auto: hot-cold on a classified dataset)"
    ),
    swap_rate: float | None = option(_OPTIMIZER, "R of the hot-cold schedule at the start, 1 to 100. (default: 50)"),
    schedule_rows: int | None = option(
        _OPTIMIZER, "First validation rows whose loss drives that schedule. (default: 8192)"
    ),
    shuffle_memory: str | None = option(_OPTIMIZER, "Rows shuffled at a time. (default: 1GiB)"),
    row_optimizer: str | None = option(_OPTIMIZER, f"{ROW_OPTIMIZERS}. (default: rowwise_adagrad)"),
    row_lr: float | None = option(_OPTIMIZER, "Learning rate of the rows."),
    row_weight_decay: float | None = option(
        _OPTIMIZER, "L2 of touched rows; of adamw and lamb decoupled from the moments."
    ),
    row_momentum: float | None = option(_OPTIMIZER, "Of momentum_sgd. (default: 0.9)"),
    row_nesterov: bool | None = option(
        _OPTIMIZER, "Of momentum_sgd: Nesterov's momentum.", "--row-nesterov/--no-row-nesterov"
    ),
    row_beta: float | None = option(_OPTIMIZER, "Of ftrl: smooths the first steps. (default: 1)"),
    row_l1: float | None = option(_OPTIMIZER, "Of ftrl: the larger, the more weights are 0."),
    row_l2: float | None = option(
        _OPTIMIZER, "Of ftrl: L2 of the weights. Of lamb: of touched rows, through its moments."
    ),
    row_clip_value: float | None = option(_OPTIMIZER, "Largest element of a row's gradient."),
    row_clip_norm: float | None = option(_OPTIMIZER, "Largest norm of a row's gradient."),
    row_cow_clip: str | None = option(
        _OPTIMIZER, "CowClip of the rows' gradients: r,zeta, such as 1,1e-5.", metavar="R,ZETA"
    ),
    dense_optimizer: str | None = option(_OPTIMIZER, "sgd, adagrad, adam or lamb. (default: adam)"),
    dense_lr: float | None = option(_OPTIMIZER, "Learning rate of the dense part."),
    dense_weight_decay: float | None = option(_OPTIMIZER, "L2 of the dense part."),
    dense_clip_norm: float | None = option(_OPTIMIZER, "Largest norm of the dense gradient."),
    min_trust: float | None = option(_OPTIMIZER, "Of lamb: least trust ratio. (default: 0)"),
    max_trust: float | None = option(_OPTIMIZER, "Of lamb: largest trust ratio. (default: 10)"),
    lr_scaling: str | None = option(
        _OPTIMIZER,
        "Of learning rates with the batch size: none, sqrt, linear or cowclip (rows keep theirs). (default: none)",
    ),
    base_batch_size: int | None = option(_OPTIMIZER, "Examples that the learning rates are meant for. (default: 2048)"),
    schedule: str | None = option(
        _OPTIMIZER, "constant, linear, cosine, polynomial, step or one-cycle. (default: constant)"
    ),
    cycle_rise: float | None = option(_OPTIMIZER, "Share of the steps that one-cycle rises. (default: 0.25)"),
    warmup: int | None = option(_OPTIMIZER, "Steps of linear warm-up. (default: 0)"),
    dense_warmup: int | None = option(_OPTIMIZER, "The same for the dense part alone. (default: 0)"),
    decay_steps: int | None = option(_OPTIMIZER, "Steps of decay. (default: to the end)"),
    eval_every: int | None = option(_RUN, "Steps between evaluations. (default: an epoch)"),
    valid_rows: int | None = option(_RUN, "First so many validation rows only."),
    metric: str | None = option(
        _RUN, "What is best: auc, log_loss; with groups also mrr, ndcg, hr, group_auc. (default: auc)"
    ),
    ranking_k: int | None = option(_RUN, "Places of a list that ndcg and hr look at. (default: 10)"),
    patience: int | None = option(_RUN, "Evaluations without a better metric before stopping."),
    save_every: int | None = option(_RUN, "Steps between checkpoints. (default: eval-every)"),
    checkpoint_minutes: float | None = option(
        _RUN, "Minutes between checkpoints besides those; 0: none by time. (default: 5)"
    ),
    keep_last: int | None = option(_RUN, "Checkpoints kept beside the best. (default: 2)"),
    log_every: int | None = option(_RUN, "Steps between lines of metrics.jsonl. (default: 50)"),
    tensorboard: bool | None = option(_RUN, "Write TensorBoard events.", "--tensorboard/--no-tensorboard"),
    data_memory: str | None = option(
        _RUN, "For a copy of the training rows in fast memory. (default: auto, see docs/training.md)"
    ),
    device_memory: str | None = option(_MEMORY, f"{MEMORY_FOR_ROWS}; others lie at home. (default: all)"),
    host_memory: str | None = option(
        _MEMORY, "For rows at home; beyond, they lie in a file. (default: 80% of what is available)"
    ),
    home_path: str | None = option(_MEMORY, "Directory of that file. (default: the temporary one)", "--home"),
    strategy: str | None = option(
        _MEMORY,
        "Of tables that do not fit: auto, cached, hot-cold or host-pipelined. (default: auto, what moves least)",
    ),
    lookahead: int | None = option(_MEMORY, "Batches whose ids are known, beyond those in flight. (default: 64)"),
    foresight: bool | None = option(
        _MEMORY,
        "Read the ids of an epoch first: every next use is known, the fewest rows move.",
        "--foresight/--no-foresight",
    ),
    in_flight: int | None = option(
        _MEMORY, "Batches whose rows are on the device; no more than fit. (default: adapts)"
    ),
    spill: str | None = option(_MEMORY, "Batches with more rows than fit: work in parts, or refuse. (default: parts)"),
    device: str | None = option(_MACHINE, "auto, cpu or cuda."),
    backend: str | None = option(_MACHINE, "Kernels of the tables: auto, reference, cpu or triton."),
    threads: int | None = option(_MACHINE, "CPU threads."),
    json_lines: Json = False,
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
    if (own := import_model(imported)) is not None and model is None and resume is None:
        given["model"] = own
    settings = train_settings(given)

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


def show_metrics(title: str, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table with a row for each metric and a column for each set of rows."""
    k = next((int(k) for metrics in columns.values() if (k := metrics.get("ranking_k"))), None)
    rows = []
    for name, words in metric_names(k).items():
        values = [metrics.get(name) for metrics in columns.values()]
        rows.append([words, *("-" if value is None else f"{value:.4f}" for value in values)])
    counted = {"rows": "rows"} | ({} if k is None else {"lists with a positive": "ranked_groups"})
    for words, name in counted.items():
        rows.append([words, *(f"{int(metrics.get(name) or 0):,}" for metrics in columns.values())])
    show_table(title, ["", *columns], rows)


def _show_result(result: TrainResult, run: str) -> None:
    columns = {name: metrics for name, metrics in (("valid", result.valid), ("test", result.test)) if metrics}
    if columns:
        step = result.step if result.best_step is None else result.best_step
        show_metrics(f"{result.model.name} at step {step:,} of {result.step:,}", columns)
    if result.samples_per_second:
        say(f"{format_count(result.samples_per_second)} samples/s while training")
    say(f"run: {run}")
    say("next: " + "\n      ".join(_next(result, run)))


def _next(result: TrainResult, run: str) -> list[str]:
    """Commands worth trying after a run."""
    scored = "" if result.test else " --split valid" if result.valid else " --split train"  # predict takes test unasked
    commands = [f"stoker predict {quoted(run)}{scored} --out scores.parquet"]
    if not result.stopped_early and result.best_step in (None, result.step):  # longer training may still help
        commands.append(f"stoker train --resume {quoted(run)} --epochs {int(result.epochs) + 1}")
    if (events := result.run / "tensorboard").is_dir():
        commands.append(f"tensorboard --logdir {quoted(events)}")
    return commands


def train_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Those options of ``stoker train`` that were given, as fields of ``TrainConfig``."""
    settings = model_options({name: value for name, value in given.items() if value is not None})
    size = settings.get("batch_size")
    if size not in (None, "auto"):
        try:
            settings["batch_size"] = int(size)
        except ValueError as error:
            raise ConfigError(f"--batch-size {size!r} is neither a whole number nor auto.") from error
    if (clip := settings.get("row_cow_clip")) is not None:
        try:
            ratio, floor = (float(part) for part in clip.split(","))
        except ValueError as error:
            example = "Write for example --row-cow-clip 1,1e-5."
            raise ConfigError(f"--row-cow-clip {clip!r} is not r,zeta. {example}") from error
        settings["row_cow_clip"] = ratio, floor
    return settings


def takes(*names: str, **own: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options of ``stoker train``, which it takes as ``**given``; keyword-only options follow them.

    Args:
        names: parameters of :func:`train`.
        own: their types, where they are not those of :func:`train`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        shared = _parameters(train)
        mine = list(_parameters(function).values())
        parameters = [each for each in mine if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        shared |= {name: shared[name].replace(annotation=kind, default=None) for name, kind in own.items()}
        parameters += [shared[name] for name in names]
        parameters += [each for each in mine if each.kind is inspect.Parameter.KEYWORD_ONLY]

        def command(**given: Any) -> None:
            function(**given)

        # What typer looks at.
        command.__doc__ = function.__doc__
        keyword = inspect.Parameter.KEYWORD_ONLY
        command.__signature__ = inspect.Signature([each.replace(kind=keyword) for each in parameters])  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    """By name, with annotations that are no text any more."""
    hints = get_type_hints(function, include_extras=True)
    found = inspect.signature(function).parameters
    return {name: each.replace(annotation=hints[name]) for name, each in found.items()}


# An endless test without evaluation and checkpoints has no use for the others.
_WITHOUT = frozenset(
    {
        "dataset", "out", "resume", "batch_size", "epochs", "steps", "batch_order", "swap_rate", "schedule_rows",
        "ranking_k", "schedule", "cycle_rise", "warmup", "dense_warmup", "decay_steps", "eval_every", "valid_rows",
        "metric", "patience", "save_every", "checkpoint_minutes", "keep_last", "log_every", "tensorboard", "json_lines",
    }
)  # fmt: skip


@takes(*(name for name in inspect.signature(train).parameters if name not in _WITHOUT))
def find_lr(
    dataset: DataArgument,
    lr_steps: int = option(_TEST, "Batches to train on.", default=200),
    low: float = option(_TEST, "First factor on the learning rates.", default=1e-3),
    high: float = option(_TEST, "Last factor.", default=1e3),
    which: str = option(_TEST, "Rates that rise: both, rows or dense.", default="both"),
    smoothing: float = option(_TEST, "Weight of the past in the smoothed loss.", default=0.9),
    trial_steps: int | None = option(_TEST, "Batches of each trial. (default: 5 times lr-steps, an epoch at most)"),
    batch_size: BatchSize = None,
    plot: Path | None = option("Results", "File to write the curve to, as .png (needs matplotlib)."),
    as_json: OneObject = False,
    **given: Any,
) -> None:
    """Find learning rates: raise them from step to step and see where the loss falls.

    Trains a model that is thrown away. Both rates are multiplied by a factor
    that rises evenly on a logarithmic scale. The rates where the smoothed loss
    falls fastest, and a tenth of those where it is least, are then tried
    against those of the settings: suggested is what does better on held-out rows.

    \b
    stoker find-lr data/criteo
    stoker find-lr data/criteo --batch-size 65536 --dense-optimizer lamb --row-optimizer lamb
    stoker find-lr data/criteo --which rows --dense-lr 0.001 --lr-steps 400 --plot lr.png
    """
    written = check_new_files(plot=plot)
    from stoker.training.tools.find_lr import find_lr as run

    settings = train_settings({"batch_size": batch_size, **given})
    with Bars(quiet=as_json) as bars:
        found = run(
            dataset, lr_steps=lr_steps, low=low, high=high, which=which, smoothing=smoothing,  # type: ignore[arg-type]
            trial_steps=trial_steps, progress=lambda done, total: bars("steps", done, total), **settings,
        )  # fmt: skip
    if plot is not None:
        found.plot(plot)
    if as_json:
        typer.echo(json.dumps({"dataset": str(dataset), **found.to_dict()}))
        return
    _show_finding(dataset, found)
    for path in written:
        say(f"wrote {path}")


def _show_finding(dataset: Path, found: Finding) -> None:
    base = found.rates(1.0)
    say(
        f"{dataset}: {len(found.losses)} steps of {found.batch_size:,}, factors {found.factors[0]:g} to "
        f"{found.factors[-1]:.3g} on {', '.join(f'{name} {value:g}' for name, value in base.items())}"
        + (", ended where the loss left all bounds" if found.diverged else "")
    )
    if len(found.smoothed) > 1:
        say(curve(found))
    if not found.candidates:
        if found.diverged:
            say("the loss left all bounds before it fell: lower --low and --high")
        else:
            say("the loss did not fall: lower --low, raise --high, or give more --lr-steps")
    if found.trials:
        rows = plural(found.held_out, "row")
        say(f"log loss on {rows} that trials of {plural(found.trial_steps, 'step')} at constant rates had not seen:")
    for trial in found.trials:
        change = "" if trial.rule == "settings" else f" ({trial.change:+.4f} ± {trial.error:.4f})"
        say(f"{trial.rule:>12}: {_options(found.rates(trial.factor))}  {trial.loss:.4f}{change}")
    if found.suggestions:
        say(f"   suggested: {_options(next(iter(found.suggestions.values())))}")
    elif found.trials:
        say("   suggested: the rates of the settings; no other did better")
    for text in found.warnings:
        say(f"note: {text}", "yellow")


def _options(rates: dict[str, float]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value:.2g}" for name, value in rates.items())


def curve(found: Finding) -> str:
    """The smoothed loss by factor, in characters; columns of the suggestions are marked below."""
    steps = len(found.smoothed)
    width = min(_WIDTH, steps)
    columns = [found.smoothed[min(steps - 1, column * steps // width)] for column in range(width)]
    # What lies above where it began is cut off: the end of the curve would squeeze its bend.
    low, high = min(columns), max(columns[: max(1, width // 3)])
    span = (high - low) or 1.0
    rows = [[" "] * width for _ in range(_HEIGHT)]
    for column, value in enumerate(columns):
        level = round((min(value, high) - low) / span * (_HEIGHT - 1))
        rows[_HEIGHT - 1 - level][column] = "•" if value <= high else "˙"
    lines = [f"{high:8.4f} " + "".join(rows[0])]
    lines += [" " * 9 + "".join(row) for row in rows[1:-1]] + [f"{low:8.4f} " + "".join(rows[-1])]
    marks = [" "] * width
    for at, mark in ((found.steepest, "s"), (found.minimum, "m")):
        if at is not None:
            marks[min(width - 1, at * width // steps)] = mark
    lines.append(" " * 9 + "".join(marks).rstrip())
    lines.append(" " * 9 + "learning rates, rising; s: steepest, m: minimum")
    return "\n".join(lines)
