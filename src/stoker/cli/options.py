"""What commands share: options, printed results, and error messages that name options.

A message of the library names a parameter (``batch_size``). The command line shows it with the option
(``--batch-size``) instead.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from functools import partial
from pathlib import Path
from string import Formatter
from textwrap import wrap
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from stoker.base.checks import hints_of
from stoker.base.errors import ConfigError, DataError, SchemaError, StokerError
from stoker.base.picture import Grid
from stoker.base.remote import with_urls
from stoker.base.settings import Settings, choices_of, default_of, options_of
from stoker.base.units import format_count, format_size
from stoker.training.settings import PARTS


def option(panel: str | None, text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Return an option in a panel of the help; the default ``...`` makes it required, as in Typer."""
    return typer.Option(default, *names, help=text, rich_help_panel=panel, **more)


def alternatives(names: Sequence[str], word: str = "or") -> str:
    """Return "a, b or c"."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def import_model(path: str | None) -> str | None:
    """Import the class that ``--import`` names; return the name of the model."""
    if path is None:
        return None
    from stoker.models import import_model as register

    return register(path).name


DataArgument = Annotated[Path, typer.Argument(help="Directory that stoker prepare wrote, or its URL.")]
RunArgument = Annotated[Path, typer.Argument(help="Run directory. The command only reads it.")]
Import = Annotated[
    str | None,
    option(
        "Model",
        "Your own model class, as package.module:Class. The current directory is searched too.",
        "--import",
        metavar="PATH",
        default=...,
        callback=import_model,
    ),
]
Data = Annotated[Path | None, typer.Option(help="Dataset. (default: that of the run)")]
MovedData = Annotated[Path | None, typer.Option("--data", help="Dataset of the run, if it was moved.")]
NewDataset = Annotated[Path, option("Results", "New dataset directory.", default=...)]
Overwrite = Annotated[bool, option("Results", "Replace an existing dataset.", "--overwrite", default=...)]
Plot = Annotated[Path | None, option("Results", "Draw the curve to this .png file (needs matplotlib).", default=...)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
StartOption = Annotated[
    str | None,
    typer.Option(
        "--from", help="Step of a checkpoint, or start. (default: the newest checkpoint with that many steps before it)"
    ),
]


def begin_at(text: str | None) -> int | Literal["start"] | None:
    """Return the step of ``--from``."""
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
    """Replace the parameter ``settings`` of a command by an option for each setting.

    The command gets the options that the user gave, as one dict. A command with a model also gets ``--import``.

    Args:
        wanted: classes of settings, or names of settings. A parameter of the command wins over a setting of its name.
        of_run: settings whose default is the value in the run.
        without: settings to leave out.
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

        # Typer reads these.
        command.__doc__ = function.__doc__
        command.__signature__ = inspect.Signature([each.replace(kind=_KEYWORD) for each in parameters])  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters by name, with types for annotations."""
    hints = get_type_hints(function, include_extras=True)
    found = inspect.signature(function).parameters
    return {name: each.replace(annotation=hints[name]) for name, each in found.items()}


def _declared(several: Sequence[type[Settings] | str]) -> Iterator[tuple[type[Settings], Field[Any]]]:
    """Yield each setting with the class that declares it."""
    known = {item.name: (part, item) for part in PARTS for item in fields(part)}
    for each in several:
        yield from [known[each]] if isinstance(each, str) else ((each, item) for item in fields(each) if item.metadata)


def _options_for(part: Any, item: Field[Any], default: str | None) -> Iterator[inspect.Parameter]:
    """Yield the options for a setting: one, but several for ``model_options``."""
    if item.name == "model_options":
        yield from _parameters(own_options).values()
        return
    hint, names = hints_of(part)[item.name], options_of(item)
    kind: Any = next((kind for kind in (bool, int, float) if hint in (kind, kind | None)), str)
    if kind is bool and not item.metadata["options"]:
        names = (f"{names[0]}/--no-{names[0].removeprefix('--')}",)
    text = _help(part, item, default)
    if any(get_origin(each) is Sequence for each in (hint, *get_args(hint))):
        kind = list[str]
    if get_origin(hint) is Mapping:
        kind = list[str]
        text = f"{text.removesuffix('.')}. Repeatable."
    made = option(item.metadata["panel"] or part.panel or None, text, *names, metavar=_METAVARS.get(item.name))
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
    """Return the given settings, as the library takes them."""
    found = {name: value for name, value in given.items() if value not in (None, [])}
    if (own := found.pop("imported", None)) is not None and "model" in given:
        found.setdefault("model", own)
    if options := {name: found.pop(name) for name in _parameters(own_options) if name in found}:
        found["model_options"] = own_options(**options)
    return {name: _READ[name](value) if name in _READ else value for name, value in found.items()}


def own_options(
    bottom: str | None = option(
        "Model", "Bottom layers of DLRM (default: 512-256-64), or of TBSM for the position of a step."
    ),
    top: str | None = option("Model", "Top layers of DLRM (default: 512-256), or last layers of TBSM (default: 60)."),
    hidden: str | None = option("Model", "Layers of the MLP of DeepFM, DCN, DIN, SASRec and tabular."),
    model_option: list[str] | None = option("Model", "Any other option of the model, as name=value. Repeatable."),
) -> dict[str, Any]:
    """Return ``model_options`` from the options of the command line."""
    sizes = {"bottom": bottom, "top": top, "hidden": hidden}
    chosen: dict[str, Any] = {name: _sizes(name, text) for name, text in sizes.items() if isinstance(text, str)}
    return chosen | _name_values("--model-option", model_option if isinstance(model_option, list) else [])


def own_numbers(texts: list[str]) -> dict[str, int]:
    """Return ``TABLE=K`` texts as a mapping."""
    found = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if not name or not value.isdecimal():
            raise ConfigError(f"--tt-own {text!r} is not TABLE=K. Write for example --tt-own user=2.")
        found[name] = int(value)
    return found


def _name_values(option: str, texts: list[str]) -> dict[str, Any]:
    return dict(_name_value(option, text) for text in texts)


def _ratio_and_floor(text: str) -> tuple[float, float]:
    try:
        ratio, floor = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--row-cow-clip {text!r} is not r,zeta. Write for example --row-cow-clip 1,1e-5.") from error
    return ratio, floor


_READ: dict[str, Callable[[Any], Any]] = {
    "tt_own": own_numbers,
    "row_cow_clip": _ratio_and_floor,
    "row_options": partial(_name_values, "--row-option"),
}
_METAVARS = {"row_cow_clip": "R,ZETA", "row_options": "NAME=VALUE", "tt_own": "TABLE=K"}


def _sizes(name: str, text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*([-,][1-9]\d*)*", text):
        raise ConfigError(f"--{name} {text!r} is not a list of layer sizes. Write for example 512-256-64.")
    return [int(part) for part in re.split("[-,]", text)]


def _name_value(option: str, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{option} {text!r} lacks a value. Write for example {option} rank=32.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def check_new_files(*paths: Path | None, plot: Path | None = None) -> list[Path]:
    """Return the files to write. Refuse, before any work, a file that exists or cannot be made."""
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
    """Print a record as JSON if the user asked for it; return True if so."""
    if as_json:
        print(json.dumps(record))
    return as_json


_COMMAND = re.compile(r"\b(stoker|pip|iconv|tr|tensorboard) ")


def say(text: str, style: str = "", *, error: bool = False) -> None:
    """Print a line, with URLs in place of local copies: in a terminal broken between words, if it has no command."""
    from rich.console import Console
    from rich.text import Text

    console, text = Console(stderr=error), with_urls(text)
    # Not is_terminal, which FORCE_COLOR makes true of a pipe. COLUMNS may be 0.
    if console.file.isatty() and not _COMMAND.search(text):
        whole: Any = dict.fromkeys(("break_long_words", "break_on_hyphens"), False)
        text = "\n".join(line for each in text.split("\n") for line in wrap(each, console.width or 80, **whole) or [""])
    with console.capture() as line:
        console.print(Text(text, style=style), soft_wrap=True)
    print(line.get(), end="", file=sys.stderr if error else console.file, flush=True)  # stderr is Rich's, above bars


class _Cells(Formatter):
    """Format cells: None as "-", sizes by ``{0[bytes]:size}``, counts by ``{0[rows]:count}``."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "-"
        if format_spec in _UNITS:
            return _UNITS[format_spec](value)
        return str(super().format_field(value, format_spec))


_NARROW = 4  # cells of a column of texts in a table
_UNITS: dict[str, Callable[[Any], str]] = {
    "size": format_size, "MiB": lambda mib: format_size(mib * 2**20), "count": format_count,
}  # fmt: skip


def show_rows(title: str | None, columns: Mapping[str, str], rows: Iterable[Any], **looks: Any) -> None:
    """Print a table; ``columns`` maps each heading to the format of its cells.

    A format is, for example, "{0[share]:.1%}", or "{1:,}" for the second value of a tuple.
    """
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
    """Print a table; align columns ``left`` to the left, and never wrap columns ``whole``."""
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table, whole = Table(title=title, title_justify="left", **looks), set(whole)
    for place, heading in enumerate(headings):
        side: Any = "left" if place in left else "right"
        table.add_column(Text(heading), justify=side, no_wrap=place in whole, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    if table.__rich_measure__(console, console.options.update(width=10_000)).maximum > console.width:
        table.box, table.padding, table.pad_edge = SIMPLE_HEAD, (0, 1, 0, 0), False  # fewer cells break
        widths = {}
        for place, column in enumerate(table.columns):
            texts = [str(text) for text in column.cells]
            if column.justify == "right" and not any(" " in text for text in texts):  # numbers: only the heading breaks
                widths[place] = max(map(cell_len, [*texts, *str(column.header).split()]))
        if sum(widths.values()) + len(table.columns) + _NARROW * (len(table.columns) - len(widths)) <= console.width:
            for place, width in widths.items():  # else others would vanish
                table.columns[place].width = width
        needs = table.__rich_measure__(console, console.options.update(width=10_000))
        if needs.minimum > console.width or console.width < needs.maximum <= console.width + len(table.columns):
            table.padding = (0, 0)
    console.print(table)


def show_grids(grids: Iterable[Grid]) -> None:
    """Print tables of a result; their first columns are never wrapped."""
    for grid in grids:
        show_table(grid.title or None, grid.headings, grid.rows, left=grid.left, whole=(0,))


def with_options(message: str, options: Mapping[str, str], settings: Iterable[str] = ()) -> str:
    """Return a message with options in place of parameter names (parameter name -> option).

    ``settings``: names to replace besides those with an underscore, which are never English words.
    """
    names = [name for name in options if "_" in name or name in set(settings)]
    if not names:
        return message
    # Not inside a path, a quotation or an option; not the noun in "3 epochs". A switch of the library is name=True.
    pattern = rf"(?<![\w./\\'\"-])(?<!\d )({'|'.join(map(re.escape, names))})(?:=True)?(?![\w/\\'\"(-]|\.\w)"
    return re.sub(pattern, lambda found: options[found[1]], message)


def message_of(error: StokerError, options: Mapping[str, str]) -> str:
    """Return the message of an error, with options in place of parameter names.

    A file may have a column of the same name. So an error about a file is changed only for the settings it carries.
    """
    settings = error.settings
    if isinstance(error, DataError | SchemaError):
        options = {name: option for name, option in options.items() if name in settings}
    elif first := re.match(r"(?:\w+: )?(\w+)(?= is |: | ')", str(error)):  # the subject, as in "steps is 0"
        settings = (*settings, first[1])
    return with_options(str(error), options, settings)


def interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the Ctrl-C that caused an error, or None: packages wrap it in their own errors during import."""
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
