"""The ``stoker`` command. Commands load when they are used, so that help is quick and needs few packages."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from stoker.base.compiling import listening

__all__ = ["COMMANDS", "app", "main"]

#: command -> module whose ``register(app)`` defines it, in the order of the help.
COMMANDS = {
    "init": "stoker.cli.init",
    "schema": "stoker.cli.schema",
    "prepare": "stoker.cli.prepare",
    "synthetic": "stoker.cli.synthetic",
    "train": "stoker.cli.train",
    "find-lr": "stoker.cli.tools.find_lr",
    "evaluate": "stoker.cli.scoring",
    "predict": "stoker.cli.scoring",
    "plan": "stoker.cli.plan",
    "profile": "stoker.cli.profile",
    "classify": "stoker.cli.classify",
    "reorder": "stoker.cli.reorder",
    "replay": "stoker.cli.replay",
    "verify": "stoker.cli.tools.verify",
    "trace": "stoker.cli.tools.trace",
    "compare": "stoker.cli.tools.compare",
    "inspect": "stoker.cli.inspect",
    "doctor": "stoker.cli.inspect",
}


class _LazyGroup(TyperGroup):
    """Looks commands up in :data:`COMMANDS` and imports their modules only then."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        if cmd_name not in COMMANDS:
            return None
        part = typer.Typer()
        part.callback()(_nothing)  # with a callback it stays a group, even of one command
        try:
            importlib.import_module(COMMANDS[cmd_name]).register(part)
        except ImportError as error:
            _register_missing(part, cmd_name, error)
        group: Any = typer.main.get_command(part)
        return group.commands.get(cmd_name)

    # typer would end at a Ctrl-C without a word.
    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        try:
            return super().make_context(*arguments, **settings)
        except KeyboardInterrupt as stop:
            raise _Stopped from stop

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise _Stopped from stop


class _Stopped(Exception):
    """Ctrl-C, on its way to :func:`main`."""


def _nothing() -> None: ...


def _register_missing(app: typer.Typer, name: str, error: ImportError) -> None:
    """A command whose module cannot be imported: it says so when it is called."""
    package = (error.name or str(error)).split(".")[0]

    def refuse() -> None:
        from stoker.base.errors import DependencyError

        raise DependencyError(f"stoker {name} needs {package}, which is not installed. Run: pip install {package}")

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name, help=f"(needs {package}, which is not installed)", context_settings=settings)(refuse)


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from stoker.base.version import __version__

        typer.echo(f"stoker {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks. May stand anywhere in the line."),
) -> None:
    """Trains recommendation models from raw click logs.

    \b
    stoker prepare criteo 'day_*.gz' --out data/criteo
    stoker train data/criteo --model dlrm --out runs/a
    stoker evaluate runs/a
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit.

    Exit codes: 0 done, 1 a mistake of ours, 2 one of the user's, 128 + n stopped by signal n.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if "" in arguments:
        _fail("an argument is empty (''). Give it a value, or leave it out.", 2)
    with _noting_interrupts() as interrupts, _plain_warnings(), listening(lambda line: _say(line, "dim")):
        try:
            app(arguments, prog_name="stoker")
        except (Exception, KeyboardInterrupt) as error:
            from stoker.cli.common.wording import interruption

            stop = interruption(error)
            if stop or interrupts:
                _say(str(stop or "") or "interrupted", "yellow")
                raise SystemExit(getattr(stop, "exit_code", 128 + signal.SIGINT)) from None
            if debug:
                raise
            _explain(error, _options(arguments))


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Say warnings of ours in words, without the line of code that gave them."""
    show, ours = warnings.showwarning, str(Path(__file__).parents[1])

    def say(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, UserWarning) and filename.startswith(ours + os.sep):
            _say(f"warning: {message}", "yellow")
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = say
    try:
        yield
    finally:
        warnings.showwarning = show


@contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    """The list of Ctrl-C that came so far: packages that are being imported may swallow one and fail of what it left
    undone."""
    seen: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler and current_thread() is main_thread()
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield seen
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _options(arguments: list[str]) -> dict[str, str]:
    """Parameter name -> option, of the command that was called."""
    name = next((argument for argument in arguments if argument in COMMANDS), None)
    if name is None:
        return {}
    group: Any = typer.main.get_command(app)
    command = group.get_command(typer.Context(group, info_name="stoker"), name)
    return {p.name: p.opts[0] for p in command.params if p.param_type_name == "option"}


def _explain(error: BaseException, options: dict[str, str]) -> NoReturn:
    from stoker.base.errors import StokerError
    from stoker.cli.common.wording import message_of

    if isinstance(error, StokerError):
        _fail(message_of(error, options), 2)
    if isinstance(error, OSError):
        _fail(f"{error.filename or 'the operating system'}: {error.strerror or error}.", 2)
    if isinstance(error, MemoryError) or any(w in str(error) for w in ("can't allocate memory", "out of memory")):
        smaller = [options[name] for name in ("embedding_dim", "dim", "batch_size") if name in options]
        remedy = f"Lower {' or '.join(smaller)}, or free some memory." if smaller else "Free some memory."
        if budget := options.get("device_memory"):
            remedy = f"Give a smaller {budget}: other rows then lie at home (stoker plan shows where). Or: {remedy}"
        _fail(f"out of memory: {str(error).rstrip('.')}. {remedy}", 2)
    _fail(
        f"{type(error).__name__}: {error}\nThis is a mistake in Stoker. Run it again with --debug and "
        "report what it prints.",
        1,
    )


def _fail(message: str, code: int) -> NoReturn:
    _say(f"error: {message}", "red")
    raise SystemExit(code)


def _say(message: str, style: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(message, style=style), soft_wrap=True)
