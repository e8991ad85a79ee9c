"""What commands share: options and what their words mean, printed results, and messages in the words of a command.

The library names its parameters (``batch_size``), the command line its options (``--batch-size``): messages of
:class:`stoker.base.errors.StokerError` are put into the words of the command that was called.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from stoker.base.errors import ConfigError, DataError, SchemaError, StokerError
from stoker.base.picture import Grid
from stoker.base.settings import Settings, choices_of, default_of, hints_of, options_of
from stoker.base.units import format_count, format_size
from stoker.training.settings import PARTS, RowOptimizerName


def option(panel: str | None, text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """An option in a panel of the help; ``default`` is that of Typer: ``...`` where it must be given."""
    return typer.Option(default, *names, help=text, rich_help_panel=panel, **more)


def alternatives(names: Sequence[str]) -> str:
    """Return "a, b or c"."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def import_model(path: str | None) -> str | None:
    """Import what ``--import`` names; return the name of the model."""
    if path is None:
        return None
    from stoker.models import import_model as register

    return register(path).name


#: Kinds of row optimizers, for help texts.
ROW_OPTIMIZERS = alternatives(get_args(RowOptimizerName))

DataArgument = Annotated[Path, typer.Argument(help="Directory that stoker prepare wrote, or its URL.")]
RunArgument = Annotated[Path, typer.Argument(help="Run directory; it is only read.")]
Import = Annotated[
    str | None,
    option(
        "Model",
        "Model class of your own, as package.module:Class; looked for in the current directory too.",
        "--import",
        metavar="PATH",
        default=...,
        callback=import_model,
    ),
]
Data = Annotated[Path | None, typer.Option(help="Dataset; default: the run's own.")]
Dim = Annotated[int, option("Rows", "Columns of every table.", "--dim", "--embedding-dim", default=...)]
Dtype = Annotated[str, option("Rows", "Of the tables: float32 or bfloat16.", default=...)]
Optimizer = Annotated[str, option("Rows", f"Its state is with its row: {ROW_OPTIMIZERS}.", default=...)]
Overwrite = Annotated[bool, option("Results", "Replace a dataset that is there.", "--overwrite", default=...)]
Plot = Annotated[Path | None, option("Results", "File to write the curve to, as .png (needs matplotlib).", default=...)]
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


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def takes(
    *wanted: type[Settings] | str, of_run: Sequence[type[Settings] | str] = (), without: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options for settings; it gets those that were given as ``settings``, in place of which they stand.
    Where it trains or loads a model, ``--import`` goes with them.

    Args:
        wanted: classes of settings, or names of single ones. A parameter of the command replaces the one of its name.
        of_run: settings of a run that is there already, whose values are their defaults.
        without: names of settings that are left out.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        mine = _parameters(function)
        made = {
            each.name: each
            for default, several in (("the run's own", of_run), (None, wanted))
            for part, item in _declared(several)
            if item.name not in mine and item.name not in without
            for each in _options_for(part, item, default)
        }
        if of_run or "model" in made:
            made = {"imported": inspect.Parameter("imported", _KEYWORD, default=None, annotation=Import), **made}
        parameters: list[inspect.Parameter] = []
        for each in mine.values():
            parameters += made.values() if each.name == "settings" else [each]

        def command(**given: Any) -> None:
            settings = {name: given.pop(name) for name in made}
            function(**given, settings=read_settings(settings))

        # What typer looks at.
        command.__doc__ = function.__doc__
        command.__signature__ = inspect.Signature([each.replace(kind=_KEYWORD) for each in parameters])  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters by name, their annotations as types."""
    hints = get_type_hints(function, include_extras=True)
    found = inspect.signature(function).parameters
    return {name: each.replace(annotation=hints[name]) for name, each in found.items()}


def _declared(several: Sequence[type[Settings] | str]) -> Iterator[tuple[type[Settings], Field[Any]]]:
    """Yield settings with the classes that declare them."""
    known = {item.name: (part, item) for part in PARTS for item in fields(part)}
    for each in several:
        yield from [known[each]] if isinstance(each, str) else [(each, item) for item in fields(each)]


def _options_for(part: Any, item: Field[Any], default: str | None) -> Iterator[inspect.Parameter]:
    """Yield the options for a setting, one but for those of the model."""
    if item.name == "model_options":
        yield from _parameters(own_options).values()
        return
    hint, names = hints_of(part)[item.name], options_of(item)
    kind: Any = next((kind for kind in (bool, int, float) if hint in (kind, kind | None)), str)
    if kind is bool:
        names = (f"{names[0]}/--no-{names[0].removeprefix('--')}",)
    text = _help(part, item, default)
    if get_origin(hint) is Mapping:
        kind = list[str]
        text = f"{text.removesuffix('.')}; may be repeated."
    made = option(part.panel, text, *names, metavar=_METAVARS.get(item.name))
    yield inspect.Parameter(item.name, _KEYWORD, default=made, annotation=kind | None)


def _help(part: Any, item: Field[Any], default: str | None) -> str:
    """Return the help of a setting, with its choices and its default."""
    text, value = item.metadata["help"], default_of(item)
    if choices := choices_of(part, item.name):
        first, _, more = text.partition(".")
        text = f"{first}: {alternatives(choices)}.{more}"
    if default is None:
        default = item.metadata["unset"] if value is None else "on" if value is True else ""
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            default = f"{value:g}" if isinstance(value, float) else f"{value}"
    return f"{text} (default: {default})" if default else text


def read_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were given, as the library takes them."""
    found = {name: value for name, value in given.items() if value not in (None, [])}
    if (own := found.pop("imported", None)) is not None and "model" in given:
        found.setdefault("model", own)
    if options := {name: found.pop(name) for name in _parameters(own_options) if name in found}:
        found["model_options"] = own_options(**options)
    return {name: _READ[name](value) if name in _READ else value for name, value in found.items()}


def own_options(
    bottom: str | None = option("Model", "DLRM: bottom layers. (default: 512-256-64); TBSM: of a step's place."),
    top: str | None = option("Model", "DLRM: top layers. (default: 512-256); TBSM: last layers. (default: 60)"),
    hidden: str | None = option("Model", "DeepFM, DCN, DIN, tabular: layers of the MLP."),
    model_option: list[str] | None = option("Model", "Any other option of the model, as name=value; may be repeated."),
) -> dict[str, Any]:
    """Return ``model_options`` from the options that stand for it."""
    sizes = {"bottom": bottom, "top": top, "hidden": hidden}
    chosen: dict[str, Any] = {name: _sizes(text) for name, text in sizes.items() if isinstance(text, str)}
    return chosen | dict(map(_name_value, model_option if isinstance(model_option, list) else []))


def own_numbers(texts: list[str]) -> dict[str, int]:
    """Return ``TABLE=K`` texts as a mapping."""
    found = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if not name or not value.isdecimal():
            raise ConfigError(f"--tt-own {text!r} is not TABLE=K. Write for example --tt-own user=2.")
        found[name] = int(value)
    return found


def _ratio_and_floor(text: str) -> tuple[float, float]:
    try:
        ratio, floor = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--row-cow-clip {text!r} is not r,zeta. Write for example --row-cow-clip 1,1e-5.") from error
    return ratio, floor


_READ: dict[str, Callable[[Any], Any]] = {"tt_own": own_numbers, "row_cow_clip": _ratio_and_floor}
_METAVARS = {"row_cow_clip": "R,ZETA", "tt_own": "TABLE=K"}


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


def printed(record: Any, as_json: bool) -> bool:
    """Print a record as JSON if that is asked for; return whether it is."""
    if as_json:
        print(json.dumps(record))
    return as_json


def say(text: str, style: str = "", *, error: bool = False) -> None:
    """Print a line as it is, however long; on standard error if it is an ``error``."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=error).print(Text(text, style=style), soft_wrap=True)


class _Cells(Formatter):
    """Formats cells: None as "-"; sizes by ``{0[bytes]:size}`` or ``:MiB``, counts by ``{0[rows]:count}``."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "-"
        if format_spec in _UNITS:
            return _UNITS[format_spec](value)
        return str(super().format_field(value, format_spec))


_UNITS: dict[str, Callable[[Any], str]] = {
    "size": format_size, "MiB": lambda mib: format_size(mib * 2**20), "count": format_count,
}  # fmt: skip


def show_rows(title: str | None, columns: Mapping[str, str], rows: Iterable[Any], **looks: Any) -> None:
    """Print a table; ``columns`` has the format of each heading's cells, such as "{0[share]:.1%}" or, of the second
    value of a tuple, "{1:,}"."""
    cells = (
        [_Cells().format(form, *(row if isinstance(row, tuple) else (row,))) for form in columns.values()]
        for row in rows
    )
    show_table(title, [*columns], cells, **looks)


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


def show_grids(grids: Iterable[Grid]) -> None:
    """Print tables of a result; their first columns are never wrapped."""
    for grid in grids:
        show_table(grid.title or None, grid.headings, grid.rows, left=grid.left, whole=(0,))


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
