"""Build dataclasses from plain values, and check them; errors name the place and the key, and the nearest name."""

from __future__ import annotations

import math
import os
import tomllib
import types
import typing
from collections.abc import Callable, Hashable, Iterator, KeysView, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from decimal import Decimal
from difflib import get_close_matches
from functools import cache, partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn

from stoker.base.errors import ConfigError, SchemaError, errors_as, install, require

_LONGEST = 60  # characters of a value in a message
Build = Callable[[Any, str], Any]  # (plain value, place) -> object


def fail(where: str, key: str, problem: str) -> NoReturn:
    """Raise the error for ``key`` of ``where``."""
    raise SchemaError(f"{where}: {key} {problem}.")


def near(name: object, allowed: Sequence[str]) -> str:
    """Return ``" Did you mean 'x'?"`` if an allowed name is close, else nothing."""
    close = get_close_matches(str(name), allowed, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def choice(where: str, key: str, value: object, allowed: Sequence[str], also: str = "") -> None:
    """Refuse a value that is not among the allowed ones."""
    if value not in allowed:
        listed = ", ".join(allowed) + (f", {also}" if also else "")
        raise SchemaError(f"{where}: {key} {value!r} is not one of: {listed}.{near(value, allowed)}")


def positive(where: str, key: str, value: int | None, *, least: int = 1) -> None:
    """Refuse a whole number below ``least``; None passes."""
    if value is not None and value < least:
        fail(where, key, f"{value} is below {least}")


def read_mapping(path: Path) -> dict[str, Any]:
    """Read the top-level table of a TOML or YAML file."""
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise SchemaError(f"{path}: a schema file ends in .toml, .yaml or .yml.")
    with errors_as(SchemaError, f"{path}: cannot be read", "To draft one: stoker init LOG", (OSError, ValueError)):
        text = path.read_text(encoding="utf-8")
    parse, error = tomllib.loads, ValueError
    if path.suffix != ".toml":
        yaml = require("yaml", "a schema in YAML needs", f"{install('yaml')}, or write TOML.")
        parse, error = yaml.safe_load, yaml.YAMLError
    with errors_as(SchemaError, f"{path}: is not well-formed", caught=(ValueError, error)):
        values = parse(text)
    if values is None or values == {}:
        raise SchemaError(f"{path}: is empty. A schema names at least the label and one column of features.")
    if not isinstance(values, dict):
        raise SchemaError(f"{path}: must be a table of keys, found {type(values).__name__}.")
    return values


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    """Return the types of all fields or arguments, but not those of a class with names that only a checker knows."""
    found: dict[str, Any] = {}
    for each in reversed(getattr(kind, "__mro__", (kind,))):
        try:
            found |= typing.get_type_hints(each)
        except NameError:
            found = {name: hint for name, hint in found.items() if name not in vars(each).get("__annotations__", ())}
    return found


def build_part(cls: type[Any], values: Any, where: str, special: Mapping[str, Build] | None = None) -> Any:
    """Build one dataclass and the dataclasses in it from plain values; SchemaError names ``where``.

    ``special`` has functions that build the values of some keys.
    """
    allowed = [item.name for item in fields(cls) if item.compare]
    if not isinstance(values, Mapping):
        raise SchemaError(f"{where}: must be a table with the keys {', '.join(allowed)}; found {values!r}.")
    for key in values:
        if key not in allowed:
            raise SchemaError(f"{where}: unknown key {key!r}. Allowed: {', '.join(allowed)}.{near(key, allowed)}")
    for item in fields(cls):
        if item.default is MISSING and item.default_factory is MISSING and item.name not in values:
            raise SchemaError(f"{where}: the key {item.name!r} is missing.")
    hints = hints_of(cls)  # type: ignore[arg-type]
    built = {key: _value(hints[key], value, where, key, (special or {}).get(key)) for key, value in values.items()}
    try:
        return cls(**built)
    except SchemaError as error:
        raise SchemaError(f"{where}: {str(error).removeprefix(where.rpartition(': ')[2] + ': ')}") from None


def _value(hint: Any, value: Any, where: str, key: str, build: Build | None) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        part = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
        if not (isinstance(part, type) and is_dataclass(part)):
            continue
        build = build or partial(build_part, part)
        if part is kind:
            return build(value, f"{where}: {key}")
        if not isinstance(value, list | tuple):
            raise SchemaError(f"{where}: {key} must be a list of tables, written [[{key}]] in TOML.")
        return tuple(build(item, f"{where}: {key}[{index}]") for index, item in enumerate(value))
    if (problem := _problem(value, hint)) is not None:
        raise SchemaError(f"{where}: {key} {problem}.")
    return value


_Check = tuple[str, Callable[[Any], bool]]  # the expected type, in words, and a check of a value


def _is(*kinds: type) -> Callable[[Any], bool]:
    """Return a check for the type of a value; true and false are not numbers."""
    return lambda value: isinstance(value, kinds) and isinstance(value, bool) == (bool in kinds)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Sequence) and not isinstance(value, str) and all(map(fits, value))


def _object_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(map(_is(str), value)) and all(map(fits, value.values()))


def _any_of(tests: Sequence[Callable[[Any], bool]], value: Any) -> bool:
    return any(fits(value) for fits in tests)


def _each_of(tests: Sequence[Callable[[Any], bool]], value: Any) -> bool:
    listed = isinstance(value, list | tuple) and len(value) == len(tests)
    return listed and all(fits(each) for fits, each in zip(tests, value, strict=True))


_KNOWN: dict[Any, _Check] = {
    int: ("a whole number", _is(Integral)),
    float: ("a number", _is(Real)),
    str: ("a text", _is(str)),
    bool: ("true or false", _is(bool)),
    type(None): ("null", _is(type(None))),
    Sequence[int]: ("a list of whole numbers such as [64, 32]", _list_of(_is(Integral))),
    Sequence[float]: ("a list of numbers such as [0.5, 1]", _list_of(_is(Real))),
    Sequence[str]: ('a list of texts such as ["a", "b"]', _list_of(_is(str))),
    Mapping[str, Any]: ('an object such as {"a": 1}', _object_of(lambda _: True)),
    Mapping[str, int]: ('an object of whole numbers such as {"a": 1}', _object_of(_is(Integral))),
    Mapping[str, str]: ('an object of texts such as {"a": "b"}', _object_of(_is(str))),
}


@cache  # an optimizer whose rate changes is made anew in each step
def expected(hint: Any) -> _Check | None:
    """Return what values of a type hint are, in words, and a check; None for a hint that is not known here."""
    origin, given = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, given)), lambda value: any(value == each for each in given)
    if origin is tuple and ... in given:
        return _KNOWN.get(Sequence[given[0]])  # type: ignore[valid-type]
    if origin is tuple or origin in (typing.Union, types.UnionType):
        known = [check for each in given if (check := expected(each)) is not None]
        if len(known) < len(given) or not given:
            return None
        words, tests = zip(*known, strict=True)
        if origin is tuple:
            alike = len(words) == 2 and words[0] == words[1]
            said = f"two {words[0][2:]}s" if alike else f"a list of {' and '.join(words)}"
            return said, partial(_each_of, tests)
        return " or ".join(words), partial(_any_of, tests)
    if isinstance(hint, type) and is_dataclass(hint):
        return f"a {hint.__name__}", partial(lambda kind, value: isinstance(value, kind), hint)
    return _KNOWN.get(hint)


def _problem(value: Any, hint: Any) -> str | None:
    """Return why a value is not of the type of a hint; None if it is, or the hint is not known."""
    known = expected(hint) if isinstance(hint, Hashable) else None
    if known is None or known[1](value):
        return None
    if isinstance(value, str) and known[0].startswith("'"):
        return f"{value!r} is unknown: choose {known[0]}"
    return f"must be {known[0]}, found {value!r}"


def wrong_argument(given: Mapping[str, Any], hints: Mapping[str, Any]) -> str:
    """Return which argument has another type than its hint, in words; empty if none has, or a hint is not known."""
    for name, value in given.items():
        hint = hints.get(name, Any)
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        words, tests = zip(*map(_kind, typing.get_args(hint) if union else (hint,)), strict=True)
        if not _any_of(tests, value):
            shown = repr(value)
            shown = shown if len(shown) < _LONGEST and "\n" not in shown else f"an object of {type(value).__name__}"
            return f"{name} must be {' or '.join(words)}, found {shown}"
    return ""


def _kind(hint: Any) -> _Check:
    """Return what :func:`expected` does, and of any class its objects; a hint that is not known fits every value."""
    known = expected(hint) if isinstance(hint, Hashable) else None
    kind = typing.get_origin(hint) or hint
    if known is None and isinstance(kind, type) and kind is not Any and not getattr(kind, "_is_protocol", False):
        return f"a {'list' if kind is Sequence else kind.__name__}", _is(kind)
    return known or ("", lambda _: True)


def typed(value: Any, hint: Any) -> Any:
    """Return a value of the type that a hint declares: numbers of NumPy as Python's, a path as text.

    Raises:
        TypeError: it has another type; the message goes on after a name.
    """
    if isinstance(value, os.PathLike) and str in (typing.get_args(hint) or [hint]):
        value = os.fspath(value)
    value = _plain(value)
    if (problem := _problem(value, hint)) is None:
        return value
    if isinstance(value, float) and value.is_integer() and _problem(int(value), hint) is None:
        return int(value)  # as in steps=1e5
    raise TypeError(problem)


def _plain(value: Any) -> Any:
    value = tuple(value) if isinstance(value, KeysView | Iterator) else value  # a set has no order
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    value = value.item() if getattr(value, "shape", None) == () else value  # of NumPy or torch
    if isinstance(value, int | float) or not isinstance(value, Real | Decimal):
        return value
    number = float(value)
    return int(value if isinstance(value, Integral) else number) if number.is_integer() else number


def checked(name: str, value: Any, hint: Any) -> Any:
    """Return :func:`typed`; raise ConfigError for a value of another type."""
    try:
        return typed(value, hint)
    except TypeError as error:
        raise ConfigError(f"{name} {error}.") from None


def check_types(made: Any, owner: str) -> None:
    """Raise ConfigError for a field of a frozen dataclass that has another type than its default and its hint."""
    hints = hints_of(type(made))  # type: ignore[arg-type]
    for item in fields(made):
        value, hint = getattr(made, item.name, item.default), hints.get(item.name)  # a subclass may set one later
        if value is not item.default and type(value) is not hint:
            object.__setattr__(made, item.name, checked(f"{owner}: {item.name}", value, hint))


def check_not_negative(owner: str, **values: float | None) -> None:
    """Raise ConfigError for a value that is negative or not finite; None passes."""
    for name, value in values.items():
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"{owner}({name}={value}) must be finite and not negative.")
