"""What commands share: options and what their words mean, printed results, and messages in the words of a command.

The library names its parameters (``batch_size``), the command line its options (``--batch-size``): messages of
:class:`stoker.base.errors.StokerError` are put into the words of the command that was called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from stoker.base.errors import ConfigError, DataError, SchemaError, StokerError


def option(panel: str | None, text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """An option in a panel of the help; ``default`` is that of Typer: ``...`` where it must be given."""
    return typer.Option(default, *names, help=text, rich_help_panel=panel, **more)


#: Kinds of row optimizers, for help texts.
ROW_OPTIMIZERS = "sgd, momentum_sgd, adagrad, rowwise_adagrad, adam, adamw, ftrl or lamb"
MEMORY_FOR_ROWS = "For rows and their optimizer state, such as 4GiB"

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
#: Where a run has a budget already.
Budget = Annotated[
    str | None, typer.Option(help=f"{MEMORY_FOR_ROWS}. (default: the run's own)", rich_help_panel="Memory")
]
BatchSize = Annotated[int | None, typer.Option(help="Examples. (default: 2048)", rich_help_panel="Optimization")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a dataset that is there.", rich_help_panel="Results")
]
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
    if text is None or text == "start":
        return text  # type: ignore[return-value]
    try:
        return int(text.replace(",", "").replace("_", ""))
    except ValueError as error:
        raise ConfigError(f"--from {text!r} is neither a step nor start. Write for example --from 1000.") from error


def import_model(path: str | None) -> str | None:
    """Import what ``--import`` names; return the name of the model."""
    if path is None:
        return None
    from stoker.models import import_model as register

    return register(path).name


def model_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the model's own among them, ``bottom`` and so on, as ``model_options``."""
    sizes = {name: settings.pop(name, None) for name in ("bottom", "top", "hidden")}
    chosen: dict[str, Any] = {name: _sizes(text) for name, text in sizes.items() if text}
    chosen |= dict(_name_value(text) for text in settings.pop("model_option", None) or [])
    if settings.get("tt_own"):
        settings["tt_own"] = own_numbers(settings["tt_own"])
    return {**settings, "model_options": chosen} if chosen else settings


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


def check_new_files(*paths: Path | None, plot: Path | None = None) -> list[Path]:
    """Return the files that are wanted; refuse those that exist or cannot be made, before the work for them."""
    from stoker.base.files import check_target
    from stoker.base.picture import check_plot

    if plot is not None:
        check_plot(plot)
    wanted = [path for path in (*paths, plot) if path is not None]
    for path in wanted:
        if path.exists():
            raise ConfigError(f"{path} exists. Choose another name, or delete it first.")
        check_target(path)
    return wanted


def say(text: str, style: str = "", *, error: bool = False) -> None:
    """Print a line as it is, however long; on standard error if it is an ``error``."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=error).print(Text(text, style=style), soft_wrap=True)


def show_table(
    title: str | None,
    headings: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    left: Sequence[int] = (0,),
    whole: Iterable[int] = (),
    **looks: Any,
) -> None:
    """Print a table; columns ``left`` are aligned to the left, and columns ``whole`` are never wrapped."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table, whole = Table(title=title, title_justify="left", **looks), set(whole)
    for place, heading in enumerate(headings):
        side: Any = "left" if place in left else "right"
        table.add_column(Text(heading), justify=side, no_wrap=place in whole, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    Console().print(table)


def with_options(message: str, options: Mapping[str, str], settings: Iterable[str] = ()) -> str:
    """The message with options in place of parameter names.

    Args:
        message: what the library says.
        options: parameter name -> option, of the command that was called.
        settings: names to replace besides those with an underscore, which are no words of English.
    """
    names = [name for name in options if "_" in name or name in set(settings)]
    if not names:
        return message
    # Not inside a path, a quotation or an option; not the noun in "3 epochs". A switch of the library is name=True.
    pattern = rf"(?<![\w./\\'\"-])(?<!\d )({'|'.join(map(re.escape, names))})(?:=True)?(?![\w/\\'\"(-]|\.\w)"
    return re.sub(pattern, lambda found: options[found[1]], message)


def message_of(error: StokerError, options: Mapping[str, str]) -> str:
    """An error in the words of the command line. Files have columns and keys of their own, so only the parameters
    that an error about a file carries are replaced there."""
    if isinstance(error, DataError | SchemaError):
        options = {name: option for name, option in options.items() if name in error.settings}
    return with_options(str(error), options, error.settings)


def interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """The Ctrl-C behind an error, however often wrapped: packages turn it into errors of theirs while imported."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        if isinstance(found, KeyboardInterrupt):
            return found
        seen.add(id(found))
        waiting += [found.__cause__, found.__context__]
    return None
