"""Write a schema as TOML. What equals its default is left out, so that a person can read the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from stoker.prep.features.base import Derivation
from stoker.prep.schema import RULE_KEYS, Schema, SplitRule

__all__ = ["entries", "schema_toml", "toml_key", "toml_value"]

_TABLES = ("source", "label", "timestamp", "split")
_LISTS = ("dense", "categorical", "sequence", "feature")
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def schema_toml(schema: Schema) -> str:
    """Return a schema as TOML text; loading the text gives an equal schema with an equal hash."""
    parts = [_lines({name: value for name, value in entries(schema).items() if name not in (*_TABLES, *_LISTS)})]
    for name in _TABLES:
        part = getattr(schema, name)
        if part is not None and (values := entries(part)):
            parts.append([f"[{name}]", *_lines(values)])
    for name in _LISTS:
        parts += [[f"[[{name}]]", *_lines(entries(part))] for part in getattr(schema, name)]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def entries(part: Any) -> dict[str, Any]:
    """Return the keys of a schema, or of a part of one, that differ from their defaults."""
    values: dict[str, Any] = {"kind": part.kind} if isinstance(part, Derivation) else {}
    values |= {item.name: getattr(part, item.name) for item in fields(part) if _differs(item, getattr(part, item.name))}
    if isinstance(part, SplitRule):
        rule = {"rule": part.rule} if values else {}
        if set(values) - {"rule", *RULE_KEYS[part.rule]}:  # a key of another rule is allowed only among all keys
            values = {item.name: getattr(part, item.name) for item in fields(part)}
        values = rule | values
    return {key: "" if value is None else value for key, value in values.items() if value is not None or key == "quote"}


def _differs(item: Field[Any], value: Any) -> bool:
    default: object = item.default
    if item.default_factory is not MISSING:
        default = item.default_factory()
    return repr(value) != repr(default)  # 0 and 0.0 have different hashes


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{toml_key(key)} = {toml_value(value)}" for key, value in values.items()]


def toml_key(key: str) -> str:
    """Return a key, quoted where TOML needs it."""
    return key if _BARE.fullmatch(key) else toml_value(key)


def toml_value(value: object) -> str:
    """Return a text, number, truth value, list or table in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{toml_key(str(key))} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return _wrapped([toml_value(item) for item in value])
    return repr(value)


def _wrapped(items: list[str]) -> str:
    line = f"[{', '.join(items)}]"
    return line if len(line) <= 100 else "[\n" + "".join(f"    {row}\n" for row in _rows(items)) + "]"


def _rows(items: list[str]) -> Iterator[str]:
    row = ""
    for item in items:
        if row and len(row) + len(item) > 100:
            yield row.rstrip()
            row = ""
        row += f"{item}, "
    yield row.rstrip()
