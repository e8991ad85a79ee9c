"""``stoker train``, ``stoker evaluate`` and ``stoker predict``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from stoker.training import TrainResult

__all__ = ["HomePath", "HostMemory", "InFlight", "Lookahead", "Spill", "model_options", "register"]

_MODEL, _OPTIMIZER, _RUN, _MEMORY, _MACHINE = "Model", "Optimization", "Run", "Memory", "Machine"

_LOOKAHEAD = 64  # batches, while scoring

Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_MACHINE)]
Backend = Annotated[
    str | None,
    typer.Option(help="Kernels of the tables: auto, reference, cpu or triton.", rich_help_panel=_MACHINE),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", rich_help_panel=_MACHINE)]


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


DeviceMemory = Annotated[
    str | None,
    _option(_MEMORY, "For rows and their optimizer state, such as 4GiB; others lie at home. (default: all)"),
]
HostMemory = Annotated[
    str | None, _option(_MEMORY, "For rows at home; beyond, they lie in a file. (default: 80% of what is available)")
]
HomePath = Annotated[str | None, _option(_MEMORY, "Directory of that file. (default: the temporary one)", "--home")]
Lookahead = Annotated[int | None, _option(_MEMORY, "Batches whose ids are known in advance. (default: 64)")]
InFlight = Annotated[int | None, _option(_MEMORY, "Batches whose rows are on the device. (default: adapts)")]
Spill = Annotated[
    str | None, _option(_MEMORY, "Batches with more rows than fit: work in parts, or refuse. (default: parts)")
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("train")(train)
    app.command("evaluate")(evaluate)
    app.command("predict")(predict)


def train(
    dataset: Annotated[Path | None, typer.Argument(help="Directory that stoker prepare wrote.")] = None,
    out: Annotated[Path | None, _option(_RUN, "Run directory to make.")] = None,
    resume: Annotated[Path | None, _option(_RUN, "Run directory to continue, to the bit.")] = None,
    model: Annotated[str | None, _option(_MODEL, "dlrm, deepfm or dcn. (default: dlrm)")] = None,
    embedding_dim: Annotated[
        int | None, _option(_MODEL, "Columns of every table. (default: 16)", "--embedding-dim", "--dim")
    ] = None,
    bottom: Annotated[str | None, _option(_MODEL, "DLRM: bottom layers. (default: 512-256-64)")] = None,
    top: Annotated[str | None, _option(_MODEL, "DLRM: top layers. (default: 512-256)")] = None,
    hidden: Annotated[str | None, _option(_MODEL, "DeepFM, DCN: layers of the MLP.")] = None,
    model_option: Annotated[
        list[str] | None, _option(_MODEL, "Any other option of the model, as name=value; may be repeated.")
    ] = None,
    pooling: Annotated[str | None, _option(_MODEL, "Of sequence features: mean or sum. (default: mean)")] = None,
    dtype: Annotated[str | None, _option(_MODEL, "Of the tables: float32 or bfloat16.")] = None,
    dense_dtype: Annotated[str | None, _option(_MODEL, "Of the dense part: float32 or bfloat16.")] = None,
    compile: Annotated[bool | None, _option(_MODEL, "Compile the dense part.", "--compile/--no-compile")] = None,
    batch_size: Annotated[int | None, _option(_OPTIMIZER, "Examples. (default: 2048)")] = None,
    epochs: Annotated[int | None, _option(_OPTIMIZER, "Passes over the data. (default: 1)")] = None,
    steps: Annotated[int | None, _option(_OPTIMIZER, "Batches in all, instead of epochs.")] = None,
    seed: Annotated[int | None, _option(_OPTIMIZER, "Of initial values and order. (default: 0)")] = None,
    shuffle_memory: Annotated[str | None, _option(_OPTIMIZER, "Rows shuffled at a time. (default: 1GiB)")] = None,
    row_optimizer: Annotated[
        str | None, _option(_OPTIMIZER, "sgd, adagrad, rowwise_adagrad or adam. (default: rowwise_adagrad)")
    ] = None,
    row_lr: Annotated[float | None, _option(_OPTIMIZER, "Learning rate of the rows.")] = None,
    row_weight_decay: Annotated[float | None, _option(_OPTIMIZER, "L2 of touched rows.")] = None,
    row_clip_value: Annotated[float | None, _option(_OPTIMIZER, "Largest element of a row's gradient.")] = None,
    row_clip_norm: Annotated[float | None, _option(_OPTIMIZER, "Largest norm of a row's gradient.")] = None,
    dense_optimizer: Annotated[str | None, _option(_OPTIMIZER, "sgd, adagrad or adam. (default: adam)")] = None,
    dense_lr: Annotated[float | None, _option(_OPTIMIZER, "Learning rate of the dense part.")] = None,
    dense_weight_decay: Annotated[float | None, _option(_OPTIMIZER, "L2 of the dense part.")] = None,
    dense_clip_norm: Annotated[float | None, _option(_OPTIMIZER, "Largest norm of the dense gradient.")] = None,
    schedule: Annotated[
        str | None, _option(_OPTIMIZER, "constant, linear, cosine, polynomial or step. (default: constant)")
    ] = None,
    warmup: Annotated[int | None, _option(_OPTIMIZER, "Steps of linear warm-up. (default: 0)")] = None,
    decay_steps: Annotated[int | None, _option(_OPTIMIZER, "Steps of decay. (default: to the end)")] = None,
    eval_every: Annotated[int | None, _option(_RUN, "Steps between evaluations. (default: an epoch)")] = None,
    valid_rows: Annotated[int | None, _option(_RUN, "First so many validation rows only.")] = None,
    metric: Annotated[str | None, _option(_RUN, "What is best: auc or log_loss. (default: auc)")] = None,
    patience: Annotated[int | None, _option(_RUN, "Evaluations without a better metric before stopping.")] = None,
    save_every: Annotated[int | None, _option(_RUN, "Steps between checkpoints. (default: eval-every)")] = None,
    keep_last: Annotated[int | None, _option(_RUN, "Checkpoints kept beside the best. (default: 2)")] = None,
    log_every: Annotated[int | None, _option(_RUN, "Steps between lines of metrics.jsonl. (default: 50)")] = None,
    tensorboard: Annotated[
        bool | None, _option(_RUN, "Write TensorBoard events.", "--tensorboard/--no-tensorboard")
    ] = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    home_path: HomePath = None,
    lookahead: Lookahead = None,
    in_flight: InFlight = None,
    spill: Spill = None,
    device: Device = None,
    backend: Backend = None,
    threads: Threads = None,
    json_lines: Json = False,
) -> None:
    """Train a model on a prepared dataset, or continue a run.

    Ctrl-C and SIGTERM end the run after the step under way and write a checkpoint.

    \b
    stoker train data/criteo --out runs/a
    stoker train data/criteo --out runs/b --model dcn --dim 32 --epochs 2 --patience 3 --eval-every 1000
    stoker train --resume runs/a --epochs 3
    stoker train data/criteo --out runs/c --dim 64 --device-memory 4GiB
    """
    given = dict(locals())
    for name in ("dataset", "out", "resume", "json_lines", "bottom", "top", "hidden", "model_option"):
        given.pop(name)
    settings = {name: value for name, value in given.items() if value is not None}
    if options := model_options(bottom, top, hidden, model_option):
        settings["model_options"] = options

    from stoker.training import Interrupted
    from stoker.training import train as run_training

    try:
        result = run_training(dataset, out=out, resume=resume, display="json" if json_lines else "auto", **settings)
    except Interrupted as stopped:
        typer.secho(str(stopped), err=True, fg="yellow")
        raise typer.Exit(stopped.exit_code) from None
    if json_lines:
        record = {name: value for name, value in vars(result).items() if name not in ("run", "model")}
        print(json.dumps({"kind": "result", "run": str(result.run), **record}))
    else:
        _show_result(result)


def model_options(bottom: str | None, top: str | None, hidden: str | None, others: list[str] | None) -> dict[str, Any]:
    """The model's own settings, from options of the command line."""
    options: dict[str, Any] = {
        name: _sizes(value) for name, value in (("bottom", bottom), ("top", top), ("hidden", hidden)) if value
    }
    return options | dict(_name_value(text) for text in others or [])


def _sizes(text: str) -> list[int]:
    from stoker.errors import ConfigError

    try:
        return [int(part) for part in text.replace(",", "-").split("-")]
    except ValueError as error:
        raise ConfigError(f"layer sizes {text!r} are not numbers. Write for example 512-256-64.") from error


def _name_value(text: str) -> tuple[str, Any]:
    from stoker.errors import ConfigError

    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--model-option {text!r} lacks a value. Write for example --model-option rank=32.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


_NAMES = {
    "auc": "AUC",
    "log_loss": "log loss",
    "normalized_entropy": "normalized entropy",
    "accuracy": "accuracy",
    "calibration": "calibration",
}


def _table(columns: dict[str, dict[str, float | None]], title: str | None = None) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, words in _NAMES.items():
        values = [metrics.get(name) for metrics in columns.values()]
        table.add_row(words, *("-" if value is None else f"{value:.4f}" for value in values))
    table.add_row("rows", *(f"{int(metrics.get('rows') or 0):,}" for metrics in columns.values()))
    return table


def _show_result(result: TrainResult) -> None:
    from rich.console import Console

    from stoker.units import format_count

    console = Console()
    columns = {name: metrics for name, metrics in (("valid", result.valid), ("test", result.test)) if metrics}
    if columns:
        step = result.step if result.best_step is None else result.best_step
        console.print(_table(columns, f"{result.model.name} at step {step:,} of {result.step:,}"))
    if result.samples_per_second:
        console.print(f"{format_count(result.samples_per_second)} samples/s while training", highlight=False)
    console.print(f"run: {result.run}", highlight=False, soft_wrap=True)
    console.print(
        f"next: stoker predict {result.run} --out scores.parquet\n"
        f"      stoker train --resume {result.run} --epochs 2\n"
        f"      tensorboard --logdir {result.run}/tensorboard",
        highlight=False,
        soft_wrap=True,
    )


def evaluate(
    run: Annotated[Path, typer.Argument(help="Run directory (its best checkpoint is taken) or checkpoint.")],
    data: Annotated[Path | None, typer.Option(help="Dataset; default: the run's own.")] = None,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    rows: Annotated[int | None, typer.Option(help="The first so many rows only.")] = None,
    batch_size: Annotated[int, typer.Option(help="Examples at a time.")] = 8192,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    home_path: HomePath = None,
    device: Device = None,
    backend: Backend = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Evaluate a trained model.

    \b
    stoker evaluate runs/a
    stoker evaluate runs/a/checkpoints/step_000001000 --split valid --json
    """
    from stoker.training.evaluation import evaluate as run_evaluation
    from stoker.training.evaluation import finite

    memory = {"device_memory": device_memory, "host_memory": host_memory, "home_path": home_path}
    loaded, dataset = _open(run, data, device, backend, threads, memory, batch_size)
    metrics = finite(
        run_evaluation(loaded.model, dataset.split(split), rows=rows, batch_size=batch_size, lookahead=_LOOKAHEAD)
    )
    if as_json:
        print(json.dumps({"checkpoint": str(loaded.path), "step": loaded.step, "split": split, **metrics}))
        return
    from rich.console import Console

    console = Console()
    console.print(_table({split: metrics}, f"{loaded.model.name} at step {loaded.step:,}"))
    console.print(f"checkpoint: {loaded.path}", highlight=False, soft_wrap=True)


def predict(
    run: Annotated[Path, typer.Argument(help="Run directory (its best checkpoint is taken) or checkpoint.")],
    out: Annotated[Path, typer.Option(help="Parquet file to write: row, label, score.")],
    data: Annotated[Path | None, typer.Option(help="Dataset; default: the run's own.")] = None,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    rows: Annotated[int | None, typer.Option(help="The first so many rows only.")] = None,
    batch_size: Annotated[int, typer.Option(help="Examples at a time.")] = 8192,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    home_path: HomePath = None,
    device: Device = None,
    backend: Backend = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write a score for every row of a split to a Parquet file.

    \b
    stoker predict runs/a --out scores.parquet
    stoker predict runs/a --data data/criteo --split valid --out scores.parquet
    """
    from stoker.training.evaluation import predict as run_prediction

    memory = {"device_memory": device_memory, "host_memory": host_memory, "home_path": home_path}
    loaded, dataset = _open(run, data, device, backend, threads, memory, batch_size)
    count = run_prediction(
        loaded.model, dataset.split(split), out, rows=rows, batch_size=batch_size, lookahead=_LOOKAHEAD
    )
    if as_json:
        print(json.dumps({"checkpoint": str(loaded.path), "step": loaded.step, "out": str(out), "rows": count}))
    else:
        typer.echo(f"{count:,} scores of {loaded.path} in {out}")


def _open(
    run: Path,
    data: Path | None,
    device: str | None,
    backend: Any,
    threads: int | None,
    memory: dict[str, str | None],
    batch_size: int,
) -> Any:
    from stoker.data.dataset import Dataset
    from stoker.device import resolve_device
    from stoker.training.checkpoint import load, read_manifest
    from stoker.training.evaluation import check_dataset
    from stoker.training.placing import place_saved
    from stoker.training.rundir import find_checkpoint, find_dataset

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    checkpoint = find_checkpoint(run)
    dataset = Dataset(find_dataset(checkpoint) if data is None else data)
    on = resolve_device(device)
    placement = place_saved(
        read_manifest(checkpoint), dataset, **memory, batch_size=batch_size, lookahead=_LOOKAHEAD, device=on
    )
    loaded = load(checkpoint, device=on, backend=backend or "auto", placement=placement)
    check_dataset(dataset, loaded.model, loaded.manifest["extra"].get("dataset"))
    return loaded, dataset
