"""Build dataclasses from plain values; errors name the place and the key, and suggest the nearest name."""

from __future__ import annotations

import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

from stoker.base.errors import SchemaError, errors_as, install, require

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
    with errors_as(SchemaError, f"{path}: cannot be read as UTF-8 text", caught=(OSError, UnicodeDecodeError)):
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
    """Return the types of all fields."""
    return typing.get_type_hints(kind)


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
        raise SchemaError(f"{where}: {error}") from None


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
    if not any(_matches(value, kind) for kind in kinds):
        raise SchemaError(f"{where}: {key} must be {' or '.join(map(_word, kinds))}, found {value!r}.")
    return value


def _matches(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if typing.get_origin(kind) is not None:
        return isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values())
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def _word(kind: Any) -> str:
    plain = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "nothing"}
    return plain.get(kind) or ("a list of texts" if typing.get_origin(kind) is tuple else "a table of texts")
