"""Settings as frozen dataclasses: each is declared once, with its default, meaning and range.

Checks, the options of the command line, and their help come from the declaration.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial, wraps
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Literal,
    NoReturn,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    get_origin,
)

from stoker.base.checks import hints_of, near, typed, wrong_argument
from stoker.base.errors import ArgumentError, ConfigError
from stoker.base.units import parse_setting

_LARGEST = 2**63 - 1  # kernels count in 64 bits
#: names that settings had before, which files and scripts may still have, and their names now
RENAMED = {"dense_dtype": "matmul", "foresight": "epoch_lookahead"}
#: names of settings, and why they have no effect
Useless = Iterator[tuple[tuple[str, ...], str]]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S")


class _Notes(TypedDict, total=False):
    unset: str  # what a default of None stands for, in words
    least: float | None  # least number, finite
    most: float | None  # largest number
    parse: Callable[[Any], float] | None  # reads a text such as "4GiB"; limits are of the number
    resumable: bool  # a resumed run may change it
    options: tuple[str, ...]  # names of its option; empty: its name with hyphens
    panel: str  # of the command line's help; empty: that of the class
    choices: Callable[[], Iterable[str]]  # names of a registry; other values are not looked up


_NOTHING = _Notes(unset="", least=None, most=None, parse=None, resumable=False, options=(), panel="", choices=tuple)


def setting(default: Any, help: str, **notes: Unpack[_Notes]) -> Any:
    """Declare a field of :class:`Settings`.

    Args:
        default: its default, or a function without arguments that makes it.
        help: its meaning; the values of a ``Literal`` are added to the first sentence.
        notes: ``unset``, ``least``, ``most``, ``parse``, ``resumable``, ``options``, ``panel`` and ``choices``.
    """
    metadata = {"help": help, **_NOTHING, **notes}
    assert len(metadata) == len(_NOTHING) + 1, f"setting has no argument {sorted(set(notes) - set(_NOTHING))}"
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def like(owner: type[Settings], name: str, **notes: Unpack[_Notes]) -> Any:
    """Declare a field as another class declares it, but for these ``notes``."""
    item = owner.__dataclass_fields__[name]
    return field(default=item.default, metadata={**item.metadata, **notes})


def with_arguments_of(kind: Callable[_P, object]) -> Callable[[Callable[..., _R]], Callable[_P, _R]]:
    """Give a function the arguments of a class: people, editors and type checkers see the fields of the class.

    The function gets only the arguments of the call, without the defaults of the class.

    >>> @dataclass(kw_only=True)
    ... class Volume:
    ...     length: float
    ...     width: float = 1.0
    >>> @with_arguments_of(Volume)
    ... def measure(**given):
    ...     return Volume(**given)
    >>> inspect.signature(measure)
    <Signature (*, length: 'float', width: 'float' = 1.0)>
    >>> measure(lenth=2.0)
    Traceback (most recent call last):
    stoker.base.errors.ArgumentError: measure takes no argument 'lenth'. Did you mean 'length'?
    """
    return partial(_with_signature, kind, [*inspect.signature(kind).parameters.values()])


def checked_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Name the nearest argument where a call names an unknown one; accept a name of before, with a warning."""
    return with_arguments_of(function)(function)


def method_with_arguments_of(
    kind: Callable[_P, object],
) -> Callable[[Callable[Concatenate[_S, ...], _R]], Callable[Concatenate[_S, _P], _R]]:
    """Do the same for a method, whose ``self`` comes first."""
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return partial(_with_signature, kind, [itself, *inspect.signature(kind).parameters.values()])


def _with_signature(kind: Any, parameters: list[inspect.Parameter], function: Callable[..., Any]) -> Any:
    single = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    more = any(each.kind == each.VAR_KEYWORD for each in parameters)
    name, known = function.__qualname__.removesuffix(".__init__"), [each.name for each in parameters]
    former: dict[str, str] = getattr(kind, "FORMER", {})  # names that its arguments had before
    returned = inspect.signature(function).return_annotation
    signature = inspect.Signature(parameters, return_annotation=returned)

    @wraps(function)
    def call(*values: Any, **given: Any) -> Any:
        for argument in given:
            now = (RENAMED | former).get(argument)
            if argument not in known and now in known and now not in given:
                warnings.warn(f"{name}: {argument!r} is now called {now!r}.", FutureWarning, stacklevel=2)
            elif argument not in known and not more:
                hint = getattr(kind, "INSTEAD", {}).get(argument) or near(argument, known)
                raise ArgumentError(f"{name} takes no argument {argument!r}.{hint}")
        given = renamed({former.get(argument, argument): value for argument, value in given.items()})
        try:
            signature.bind(*values, **given)
        except TypeError as error:
            raise ArgumentError(f"{name}: {error}.") from None
        try:
            return function(*values, **given)
        except Exception as error:  # of Python itself, about a type that fits no hint, which explains it better
            wrong, bound = "", signature.bind(*values, **given).arguments
            plain = type(error).__module__ == "builtins" and not str(error).endswith(".")
            if plain or isinstance(error, ArgumentError):
                with suppress(Exception):  # hints and objects of other code may be odd
                    wrong = wrong_argument({name: bound[name] for name in single if name in bound}, hints_of(kind))
            if not wrong:
                raise
            raise ArgumentError(f"{name}: {wrong}.") from error

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def default_of(item: Field[Any]) -> Any:
    """Return the default of a setting."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def options_of(item: Field[Any]) -> tuple[str, ...]:
    """Return the names of the option for a setting, such as ``--batch-size``."""
    return item.metadata["options"] or (f"--{item.name.replace('_', '-')}",)


def choices_of(kind: Any, name: str) -> tuple[str, ...]:
    """Return the values that a ``Literal`` setting or one with ``choices`` may have, in their order; else nothing."""
    hint, item = hints_of(kind)[name], kind.__dataclass_fields__[name]
    named = tuple(item.metadata["choices"]()) if item.metadata else ()
    return named or (get_args(hint) if get_origin(hint) is Literal else ())


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run or a model from a file, or of a call, by the names that they have now.

    >>> renamed({"dense_dtype": "bfloat16", "seed": 0})
    {'matmul': 'bf16', 'seed': 0}
    """
    found = {RENAMED.get(name, name): value for name, value in values.items()}
    if (old := values.get("dense_dtype")) is not None:
        found["matmul"] = {"float32": "fp32", "bfloat16": "bf16"}.get(old, old)
    return found


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of all settings; :func:`setting` declares a field, and creating an object checks them."""

    panel: ClassVar[str] = ""

    def __init_subclass__(cls, *, panel: str = "") -> None:
        cls.panel = panel  # of the command line's help

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.metadata:
                self._check_field(item)

    def _check_field(self, item: Field[Any]) -> None:
        """Raise ConfigError for a value out of its range."""
        name, value, limits = item.name, getattr(self, item.name), item.metadata
        choices = choices_of(type(self), name)
        plain = item.type == "str" and is_dataclass(value)  # an object that a name stands for
        named = limits["choices"] is not tuple and not plain  # else types are checked below
        if choices and (named or isinstance(value, str)) and value not in choices:
            self._refuse(f"{name} {value!r} is unknown. Choose one of {', '.join(map(repr, choices))}.", name)
        default = default_of(item)
        if type(value) is type(default) and value == default:
            return
        least, most, parse = limits["least"], limits["most"], limits["parse"]
        # Python may give an object, such as a SplitRule, where the command line has its text.
        if limits["choices"] is tuple and not is_dataclass(value):
            try:
                value = typed(value, None if parse else hints_of(type(self))[name])  # type: ignore[arg-type]
            except TypeError as error:
                self._refuse(f"{name} {error}.", name)
            self._set(name, value)
        if value is None:
            return
        number = value if parse is None else parse_setting(name, parse, value)
        if isinstance(number, int) and abs(number) > _LARGEST:
            bound = f"most {_LARGEST}" if number > 0 else f"least {-_LARGEST}"
            self._refuse(f"{name} is {value}; it must be at {bound}.", name)
        if most is not None and not least <= value <= most:
            self._refuse(f"{name} is {value:.9g}; it must be {least:g} to {most:g}.", name)
        if least is not None and not least <= number < math.inf:
            zero = "be finite and not negative" if isinstance(value, float) else "not be negative"
            must = (f"be at least {least:g}" + (", or left out" if default_of(item) is None else "")) if least else zero
            self._refuse(f"{name} is {value}; it must {must}.", name)

    def _refuse(self, message: str, *names: str) -> NoReturn:
        raise ConfigError(message, settings=names)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def useless(self) -> Useless:
        """Yield settings that have no effect because of others, and why."""
        yield from ()

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return which of these settings differ from their defaults."""
        known = {item.name: item for item in fields(self)}
        return [name for name in names if getattr(self, name) != default_of(known[name])]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the settings with these values, which may have names of before."""
        known, values = [item.name for item in fields(cls)], renamed(values)
        if unknown := sorted(set(values) - set(known)):
            hint = near(unknown[0], known)
            raise ConfigError(f"settings {unknown} do not exist.{hint} Known are: {', '.join(sorted(known))}.")
        return cls(**values)

    @classmethod
    def taken_from(cls, values: dict[str, Any]) -> Self:
        """Return the settings with those of the values that are of this class, and remove them from ``values``."""
        return cls(**{item.name: values.pop(item.name) for item in fields(cls) if item.name in values})

    def replace(self, **changes: Any) -> Self:
        """Return the settings with ``changes``."""
        self.from_dict(changes)
        return replace(self, **renamed(changes))
