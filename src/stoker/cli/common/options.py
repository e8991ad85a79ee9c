"""Options that several commands have, and what their words mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from stoker.base.errors import ConfigError

__all__ = [
    "Backend",
    "BatchSize",
    "Bottom",
    "Budget",
    "Data",
    "DataArgument",
    "Device",
    "DeviceMemory",
    "Dtype",
    "EmbeddingDim",
    "Foresight",
    "Hidden",
    "HomePath",
    "HostMemory",
    "Import",
    "InFlight",
    "Json",
    "Lookahead",
    "Model",
    "ModelOption",
    "OneObject",
    "RowOptimizer",
    "RunArgument",
    "Spill",
    "Start",
    "Strategy",
    "Threads",
    "Top",
    "begin_at",
    "cow_clip",
    "import_model",
    "model_options",
    "option",
    "own_numbers",
    "rerun_settings",
    "train_settings",
]

_MODEL, _OPTIMIZER, _MEMORY, _MACHINE = "Model", "Optimization", "Memory", "Machine"


def option(panel: str | None, text: str, *names: str, **more: Any) -> Any:
    """An option in a panel of the help."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


DataArgument = Annotated[Path, typer.Argument(help="Directory that stoker prepare wrote, or its URL.")]
RunArgument = Annotated[Path, typer.Argument(help="Run directory; it is only read.")]
Import = Annotated[
    str | None,
    typer.Option(
        "--import",
        help="Model class of your own, as package.module:Class; looked for in the current directory too.",
        metavar="PATH",
    ),
]
Data = Annotated[Path | None, typer.Option(help="Dataset; default: the run's own.")]

Model = Annotated[str | None, option(_MODEL, "dlrm, deepfm, dcn, tbsm, din or tabular. (default: dlrm)")]
EmbeddingDim = Annotated[
    int | None, option(_MODEL, "Columns of every table. (default: 16)", "--embedding-dim", "--dim")
]
Bottom = Annotated[str | None, option(_MODEL, "DLRM: bottom layers. (default: 512-256-64); TBSM: of a step's place.")]
Top = Annotated[str | None, option(_MODEL, "DLRM: top layers. (default: 512-256); TBSM: last layers. (default: 60)")]
Hidden = Annotated[str | None, option(_MODEL, "DeepFM, DCN, DIN, tabular: layers of the MLP.")]
ModelOption = Annotated[
    list[str] | None, option(_MODEL, "Any other option of the model, as name=value; may be repeated.")
]
Dtype = Annotated[str | None, option(_MODEL, "Of the tables: float32 or bfloat16.")]
TTRank = Annotated[
    int | None, option(_MODEL, "Large tables as tensor trains of this rank: another, smaller model.", "--tt-rank")
]
TTRows = Annotated[int | None, option(_MODEL, "Rows from which on a table is large. (default: 1000000)", "--tt-rows")]
TTCores = Annotated[int | None, option(_MODEL, "Cores of each, 2 to 4. (default: 3)", "--tt-cores")]
TTOwn = Annotated[
    list[str] | None,
    option(
        _MODEL,
        "TABLE=K: instead, K numbers of its own for each row and one core for all, as users need; may be repeated.",
        "--tt-own",
    ),
]
BatchSize = Annotated[int | None, option(_OPTIMIZER, "Examples. (default: 2048)")]
#: Kinds of row optimizers, for help texts.
ROW_OPTIMIZERS = "sgd, momentum_sgd, adagrad, rowwise_adagrad, adam, adamw, ftrl or lamb"
RowOptimizer = Annotated[str | None, option(_OPTIMIZER, f"{ROW_OPTIMIZERS}. (default: rowwise_adagrad)")]

_FOR = "For rows and their optimizer state, such as 4GiB"
DeviceMemory = Annotated[str | None, option(_MEMORY, f"{_FOR}; others lie at home. (default: all)")]
#: The same where a run has one already.
Budget = Annotated[str | None, option(_MEMORY, f"{_FOR}. (default: the run's own)")]
HostMemory = Annotated[
    str | None, option(_MEMORY, "For rows at home; beyond, they lie in a file. (default: 80% of what is available)")
]
HomePath = Annotated[str | None, option(_MEMORY, "Directory of that file. (default: the temporary one)", "--home")]
Strategy = Annotated[
    str | None,
    option(
        _MEMORY,
        "Of tables that do not fit: auto, cached, hot-cold or host-pipelined. (default: auto, what moves least)",
    ),
]
Lookahead = Annotated[int | None, option(_MEMORY, "Batches whose ids are known, beyond those in flight. (default: 64)")]
Foresight = Annotated[
    bool | None,
    option(
        _MEMORY,
        "Read the ids of an epoch first: every next use is known, the fewest rows move.",
        "--foresight/--no-foresight",
    ),
]
InFlight = Annotated[
    int | None, option(_MEMORY, "Batches whose rows are on the device; no more than fit. (default: adapts)")
]
Spill = Annotated[
    str | None, option(_MEMORY, "Batches with more rows than fit: work in parts, or refuse. (default: parts)")
]

Device = Annotated[str | None, option(_MACHINE, "auto, cpu or cuda.")]
Backend = Annotated[str | None, option(_MACHINE, "Kernels of the tables: auto, reference, cpu or triton.")]
Threads = Annotated[int | None, option(_MACHINE, "CPU threads.")]

Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts.")]
OneObject = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

Start = Annotated[
    str | None,
    typer.Option(
        "--from", help="Step of a checkpoint, or start. (default: the newest one with so many steps before it)"
    ),
]


def begin_at(text: str | None) -> int | Literal["start"] | None:
    """What ``--from`` means."""
    if text is None:
        return None
    if text == "start":
        return "start"
    try:
        return int(text.replace(",", "").replace("_", ""))
    except ValueError as error:
        raise ConfigError(f"--from {text!r} is neither a step nor start. Write for example --from 1000.") from error


def cow_clip(text: str) -> tuple[float, float]:
    """What ``--row-cow-clip`` means."""
    try:
        ratio, floor = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--row-cow-clip {text!r} is not r,zeta. Write for example --row-cow-clip 1,1e-5.") from error
    return ratio, floor


def import_model(path: str | None) -> str | None:
    """Import what ``--import`` names; the name of the model."""
    if path is None:
        return None
    from stoker.models import import_model as register

    return register(path).name


def rerun_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments of a command that replace settings of a run gone over again."""
    from stoker.training.config import MACHINE

    return {name: given[name] for name in sorted(MACHINE) if given[name] is not None}


def train_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Those options of ``stoker train`` that were given, as fields of ``TrainConfig``."""
    settings = {name: value for name, value in given.items() if value is not None}
    own = [settings.pop(name, None) for name in ("bottom", "top", "hidden", "model_option")]
    if "batch_size" in settings:
        settings["batch_size"] = _examples(settings["batch_size"])
    if "row_cow_clip" in settings:
        settings["row_cow_clip"] = cow_clip(settings["row_cow_clip"])
    if settings.get("tt_own"):
        settings["tt_own"] = own_numbers(settings["tt_own"])
    if chosen := model_options(*own):
        settings["model_options"] = chosen
    return settings


def _examples(text: str | int) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"--batch-size {text!r} is neither a whole number nor auto.") from error


def model_options(bottom: str | None, top: str | None, hidden: str | None, others: list[str] | None) -> dict[str, Any]:
    """The model's own settings."""
    options: dict[str, Any] = {
        name: _sizes(value) for name, value in (("bottom", bottom), ("top", top), ("hidden", hidden)) if value
    }
    return options | dict(_name_value(text) for text in others or [])


def own_numbers(texts: list[str]) -> dict[str, int]:
    """``TABLE=K`` texts as a mapping."""
    found = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if not name or not value.isdecimal():
            raise ConfigError(f"--tt-own {text!r} is not TABLE=K. Write for example --tt-own user=2.")
        found[name] = int(value)
    return found


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", "-").split("-")]
    except ValueError as error:
        raise ConfigError(f"layer sizes {text!r} are not numbers. Write for example 512-256-64.") from error


def _name_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--model-option {text!r} lacks a value. Write for example --model-option rank=32.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
