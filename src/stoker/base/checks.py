"""Reading schema files with errors that name the file and the key and suggest the nearest allowed one."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from stoker.base.errors import DependencyError, SchemaError

_LISTS = ("dense", "categorical", "sequence", "feature")

__all__ = ["build_part", "build_schema", "choice", "fail", "near", "positive", "read_mapping"]


def fail(where: str, key: str, problem: str) -> NoReturn:
    """Raise the error for ``key`` of ``where``."""
    raise SchemaError(f"{where}: {key} {problem}.")


def near(name: object, allowed: Sequence[str]) -> str:
    """``" Did you mean 'x'?"`` where an allowed name is close, else nothing."""
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
    """Top-level table of a TOML or YAML file."""
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise SchemaError(f"{path}: a schema file ends in .toml, .yaml or .yml.")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SchemaError(f"{path}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SchemaError(f"{path}: is not UTF-8 text (byte {error.start}).") from error
    try:
        values = _parse_toml(text) if path.suffix == ".toml" else _parse_yaml(text)
    except ValueError as error:
        raise SchemaError(f"{path}: is not well-formed: {error}") from error
    if values is None or values == {}:
        raise SchemaError(f"{path}: is empty. A schema names at least the label and one column of features.")
    if not isinstance(values, dict):
        raise SchemaError(f"{path}: must be a table of keys, found {type(values).__name__}.")
    return values


def _parse_toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


def _parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise DependencyError("YAML schema files need PyYAML: pip install pyyaml, or write TOML.") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from error


def build_schema(
    cls: type[Any],
    values: Mapping[str, Any],
    parts: Mapping[str, Any],
    where: str,
    rule_keys: Mapping[str, Sequence[str]],
) -> Any:
    """Build the schema class from plain values, part by part, with ``where`` before every message."""
    _check_keys(cls, values, where)
    built: dict[str, Any] = {}
    for key, value in values.items():
        part = parts.get(key)
        if part is None:
            built[key] = value
        elif key in _LISTS and not isinstance(value, list | tuple):
            raise SchemaError(f"{where}: {key} must be a list of tables, written [[{key}]] in TOML.")
        elif key == "feature":
            built[key] = tuple(part(item, f"{where}: feature[{index}]") for index, item in enumerate(value))
        elif key in ("dense", "categorical", "sequence"):
            built[key] = tuple(build_part(part, item, f"{where}: {key}[{index}]") for index, item in enumerate(value))
        else:
            if key == "label" and isinstance(value, str):
                value = {"column": value}
            if key == "split" and isinstance(value, Mapping):
                _check_rule_keys(value, f"{where}: split", rule_keys)
            built[key] = build_part(part, value, f"{where}: {key}")
    _check_types(cls, {k: v for k, v in built.items() if k not in parts}, where)
    return _construct(cls, built, where)


def _check_rule_keys(value: Mapping[str, Any], where: str, rule_keys: Mapping[str, Sequence[str]]) -> None:
    # A complete dictionary (from a manifest) repeats every default; only a file that names one rule's key
    # under another rule is a mistake worth stopping for.
    rule = value.get("rule", "hash")
    all_keys = {key for keys in rule_keys.values() for key in keys}
    if rule not in rule_keys or all_keys <= {*value, "column"}:
        return
    foreign = sorted((set(value) & all_keys) - set(rule_keys[rule]))
    if foreign:
        raise SchemaError(
            f"{where}: {foreign[0]} does not belong to rule {rule!r}, which takes: {', '.join(rule_keys[rule])}."
        )


def build_part(cls: type[Any], value: Any, where: str) -> Any:
    """Build one dataclass from plain values; SchemaError names ``where``."""
    if not isinstance(value, Mapping):
        raise SchemaError(f"{where}: must be a table with the keys {', '.join(_names(cls))}; found {value!r}.")
    _check_keys(cls, value, where)
    _check_types(cls, value, where)
    return _construct(cls, value, where)


def _construct(cls: Callable[..., Any], values: Mapping[str, Any], where: str) -> Any:
    try:
        return cls(**values)
    except SchemaError as error:
        raise SchemaError(f"{where}: {error}") from None


def _names(cls: type[Any]) -> list[str]:
    return [item.name for item in fields(cls)]


def _check_keys(cls: type[Any], values: Mapping[str, Any], where: str) -> None:
    allowed = _names(cls)
    for key in values:
        if key not in allowed:
            raise SchemaError(f"{where}: unknown key {key!r}. Allowed: {', '.join(allowed)}.{near(key, allowed)}")
    for item in fields(cls):
        if item.default is MISSING and item.default_factory is MISSING and item.name not in values:
            raise SchemaError(f"{where}: the key {item.name!r} is missing.")


def _check_types(cls: type[Any], values: Mapping[str, Any], where: str) -> None:
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        hint = hints[key]
        allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if not any(_matches(value, kind) for kind in allowed):
            words = " or ".join("nothing" if kind is type(None) else _word(kind) for kind in allowed)
            raise SchemaError(f"{where}: {key} must be {words}, found {value!r}.")


def _matches(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if origin is not None:
        return isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values())
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _word(kind: Any) -> str:
    plain = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}.get(kind)
    return plain or ("a list of texts" if typing.get_origin(kind) is tuple else "a table of texts")
