"""The ``stoker`` command. A command loads when it is used, so that help is quick and needs few packages."""

from __future__ import annotations

import gc
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
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from stoker.base.checks import near
from stoker.base.device import contending
from stoker.base.errors import ConfigError, DependencyError, StokerError, missing_package
from stoker.base.progress import listening
from stoker.base.settings import RENAMED
from stoker.cli import ranks
from stoker.cli.options import interruption, message_of, say

#: Panel of the help -> its commands, each after its module in ``stoker.cli``.
PANELS = {
    "Data": ("prepare:init", "prepare:schema", "prepare:prepare", "prepare:synthetic", "runs:baseline"),
    "Training and scores": ("train:train", "train:find-lr", "runs:evaluate", "runs:predict"),
    "Daily updates and serving": ("live:update", "live:rollback", "live:compact", "serve:export", "serve:serve"),
    "Tables larger than memory": (
        "place:plan", "rewrite:profile", "rewrite:classify", "rewrite:reorder", "place:replay", "runs:verify",
    ),
    "Runs and this machine": ("runs:trace", "runs:report", "runs:compare", "inspect:inspect", "inspect:doctor"),
}  # fmt: skip
#: Command -> its module and its panel, in the order of the help.
COMMANDS = {
    name: (f"stoker.cli.{module}", panel)
    for panel, several in PANELS.items()
    for module, name in (each.split(":") for each in several)
}
_HELP_ALONE = ("init", "prepare")  # show their help if they are called without arguments
_COMPUTING = ("train", "find-lr", "evaluate", "predict", "update", "verify", "trace", "baseline")  # matrix products


class _NarrowHelp:
    """A command whose help has short columns, so that the texts have room in a terminal of 80 characters."""

    def get_params(self, ctx: typer.Context) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        for each in self.get_params(ctx):
            if each.secondary_opts:
                each.opts, each.secondary_opts = [f"--[no-]{each.opts[0].removeprefix('--')}"], []
        super().format_help(ctx, formatter)  # type: ignore[misc]


class _Command(_NarrowHelp, TyperCommand):  # type: ignore[misc]
    pass


class _LazyGroup(_NarrowHelp, TyperGroup):  # type: ignore[misc]
    """A group of commands that imports the module of a command when it is called."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        if cmd_name not in COMMANDS:
            return None
        module, panel = COMMANDS[cmd_name]
        part = typer.Typer(add_completion=False)
        try:
            command = getattr(importlib.import_module(module), cmd_name.replace("-", "_"))
            looks: dict[str, Any] = {"no_args_is_help": cmd_name in _HELP_ALONE, "rich_help_panel": panel}
            part.command(cmd_name, cls=_Command, **looks)(command)
        except ImportError as error:
            _register_missing(part, cmd_name, (error.name or str(error)).split(".")[0])
        return typer.main.get_command(part)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            known = near(args[0], list(COMMANDS))
            raise ConfigError(f"there is no command {args[0]!r}.{known} stoker --help lists the commands.")
        return super().resolve_command(ctx, args)

    # Typer ends at a Ctrl-C without a message.
    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        try:
            return super().make_context(*arguments, **settings)
        except KeyboardInterrupt as stop:
            raise _Stopped from stop

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        typed = list(ctx.args)
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            raise _with_value(error, typed) from error
        except KeyboardInterrupt as stop:
            raise _Stopped from stop


def _with_value(error: typer.BadParameter, typed: list[str]) -> Exception:
    """Return the error of an option with the value that the user typed, which Typer leaves out."""
    for place, argument in enumerate(typed):
        name, equals, value = argument.partition("=")
        if name in getattr(error.param, "opts", ()):
            value = value if equals else "".join(typed[place + 1 : place + 2])
            return ConfigError(f"{name} is {value!r}. {error.message.rstrip('.')}.")
    return error


class _Stopped(Exception):
    """Ctrl-C, on its way to :func:`main`."""


def _register_missing(app: typer.Typer, name: str, package: str) -> None:
    """Add a command that names the missing package when it is called."""

    def refuse() -> None:
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
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks of errors. Can be anywhere in the command."),
) -> None:
    """Train recommendation models from raw click logs.

    \b
    stoker train clicks.csv --out run
    stoker prepare criteo 'day_*.gz' --out data/criteo
    stoker train data/criteo --model dlrm --out runs/a
    stoker evaluate runs/a
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit.

    Exit codes: 0 success, 1 error in Stoker, 2 error of the user, 128 + n stopped by signal n.
    """
    if arguments is None:  # it is the whole process
        _collect_rarely()
        arguments = sys.argv[1:]
    debug = "--debug" in arguments
    arguments = [_current(argument) for argument in arguments if argument != "--debug"]
    ranks.typed[:] = arguments
    if "" in arguments:
        _fail("an argument is empty (''). Give it a value, or leave it out.", 2)
    if arguments and arguments[0] in _COMPUTING and not {"-h", "--help"} & set(arguments):
        _yield_cores()
    told = listening(lambda line: say(line, "dim", error=True) if ranks.speaks() else None)
    with _noting_interrupts() as interrupts, _plain_warnings(), told:
        try:
            app(arguments, prog_name="stoker")
        except (Exception, KeyboardInterrupt) as error:
            stop = interruption(error)
            speaks = ranks.speaks(KeyboardInterrupt() if interrupts else stop or error)
            if stop or interrupts:
                if speaks:
                    say(str(stop or "") or "interrupted", "yellow", error=True)
                raise SystemExit(getattr(stop, "exit_code", 128 + signal.SIGINT)) from None
            if not speaks:
                raise SystemExit(ranks.exit_code(error)) from None
            if debug:
                raise
            error = missing_package(error, "this command") if isinstance(error, Exception) else error
            _explain(error, _options(arguments), ranks.exit_code(error))


def _collect_rarely() -> None:
    """Look for garbage less often until 50,000 objects came without an import: packages keep what they make.

    Looking through it takes an eighth of a short command.
    """
    usual, rare, known = gc.get_threshold(), 50_000, 0

    def after(phase: str, _: dict[str, int]) -> None:
        nonlocal known
        if phase == "stop":
            if len(sys.modules) == known:
                if gc.get_threshold()[0] == rare:  # a module of the user may have set another
                    gc.set_threshold(*usual)
                gc.callbacks.remove(after)
            known = len(sys.modules)

    gc.set_threshold(rare, 100, 100)
    gc.callbacks.append(after)


def _yield_cores() -> None:
    """Let OpenMP's threads sleep while they wait for each other, if other programs use the cores.

    By default they spin, for milliseconds, on a core that the awaited one may need. On idle cores that is quicker.
    """
    if "torch" in sys.modules or {"OMP_WAIT_POLICY", "RANK"} & set(os.environ):  # torch reads the policy once
        return
    if others := contending():
        os.environ["OMP_WAIT_POLICY"] = "passive"
        say(f"other programs use {others:.1f} cores: threads sleep while they wait", "dim", error=True)


def _current(argument: str) -> str:
    """Return an argument, with the name that its option has now; say so if it had another one before."""
    typed, equals, value = argument.partition("=")
    for old, new in RENAMED.items():
        for prefix in ("--", "--no-"):
            if typed == prefix + old.replace("_", "-"):
                now = prefix + new.replace("_", "-")
                say(f"warning: {typed} is now called {now}.", "yellow", error=True)
                return now + equals + value
    return argument


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings of this package as a message, without the line of code that raised them."""
    show, ours = warnings.showwarning, str(Path(__file__).parents[1])

    def plain(message: Warning | str, category: type[Warning], filename: str, *more: Any, **others: Any) -> None:
        if issubclass(category, UserWarning) and filename.startswith(ours + os.sep):
            say(f"warning: {message}", "yellow", error=True)
        else:
            show(message, category, filename, *more, **others)

    warnings.showwarning = plain
    try:
        yield
    finally:
        warnings.showwarning = show


@contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    """Collect every Ctrl-C in a list.

    A package that is being imported may swallow a Ctrl-C and then fail because its import is incomplete.
    """
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
    """Return the options of the called command by parameter, as typed; none for a parameter that names a value, too."""
    name = next((argument for argument in arguments if argument in COMMANDS), None)
    if name is None:
        return {}
    group: Any = typer.main.get_command(app)
    command = group.get_command(typer.Context(group, info_name="stoker"), name)
    typed = {argument.partition("=")[0] for argument in arguments}
    return {
        p.name: next((name for name in p.opts if name in typed), p.opts[0])
        for p in command.params
        if p.param_type_name == "option" and p.name not in arguments
    }


def _explain(error: BaseException, options: dict[str, str], code: int) -> NoReturn:
    if isinstance(error, StokerError):
        _fail(message_of(error, options), code)
    if isinstance(error, OSError):
        _fail(f"{error.filename or 'the operating system'}: {error.strerror or error}.", 2)
    if isinstance(error, MemoryError) or any(w in str(error) for w in ("can't allocate memory", "out of memory")):
        smaller = [options[name] for name in ("embedding_dim", "dim", "batch_size") if name in options]
        remedy = f"Lower {' or '.join(smaller)}, or free some memory." if smaller else "Free some memory."
        if budget := options.get("device_memory"):
            remedy = f"Give a smaller {budget}: fewer rows are then in fast memory (see stoker plan). Or: {remedy}"
        _fail(f"out of memory: {str(error).rstrip('.')}. {remedy}", 2)
    _fail(
        f"{type(error).__name__}: {error}\nThis is an error in Stoker. Run the command again with --debug and "
        "report what it prints.",
        1,
    )


def _fail(message: str, code: int) -> NoReturn:
    say(f"error: {message}", "red", error=True)
    raise SystemExit(code)
