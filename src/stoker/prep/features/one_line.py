"""A feature in one line, and how a model reads what it makes where nobody says otherwise."""

from __future__ import annotations

import json
import shlex
import types
import typing
from collections.abc import Mapping
from typing import Any

from stoker.base.checks import choice
from stoker.base.errors import SchemaError
from stoker.prep.features.base import KINDS, Derivation, RowSteps, feature_from_dict
from stoker.prep.features.merge import Merge
from stoker.prep.features.past import History

__all__ = ["feature_from_text", "feature_of", "model_columns"]

_TEXT: dict[str, Any] = {"type": "string"}
_BUCKET: dict[str, Any] = {"type": "int"}
_SCALED: dict[str, Any] = {"transforms": ("zscore",)}
_COUNT: dict[str, Any] = {"transforms": ("log1p", "zscore")}
_MAYBE: dict[str, Any] = {"fill": "median", "null_flag": True, **_SCALED}  # a number that is often missing
#: by kind, for all that it makes: settings of a categorical column (with a type) or of a dense one; else scaled
_READ_AS: dict[str, dict[str, Any]] = {
    "constrain": _TEXT, "mask": _TEXT, "split": _TEXT, "previous": _TEXT, "cross": _BUCKET, "time_parts": _BUCKET,
    "match": {}, "equal": {}, "properties": {}, "count": _COUNT, "past_count": _COUNT,
    "difference": _MAYBE, "subtract": _MAYBE, "divide": _MAYBE, "since_last": {**_MAYBE, **_COUNT},
}  # fmt: skip


def feature_from_text(text: str) -> Derivation:
    """A feature from its kind and its settings, such as ``mean_target by=city,item folds=10``.

    Lists are separated by commas; a value with blanks is quoted as in a shell.

    Raises:
        SchemaError: no such kind or setting, or a value of the wrong type or out of range.
    """
    where = f"feature {text!r}"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SchemaError(f"{where}: {str(error).lower()}. Close the quotes.") from None
    if not words:
        raise SchemaError("a feature is empty. Give a kind and settings: mean_target by=city,item")
    choice(where, "kind", words[0], sorted(KINDS))
    hints = typing.get_type_hints(KINDS[words[0]])
    values: dict[str, Any] = {"kind": words[0]}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            raise SchemaError(f"{where}: {word!r} is no setting. Write key=value, without blanks around the sign.")
        if key in values:
            raise SchemaError(f"{where}: {key} is given twice.")
        values[key] = _value(value, hints.get(key, str))
    return feature_from_dict(values, where)


def _value(text: str, hint: Any) -> Any:
    """What the text says where a value of this type is wanted; the text itself where it says nothing such."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if any(typing.get_origin(kind) is tuple for kind in allowed):
        return text.split(",") if text else []
    if str in allowed:
        return text
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def feature_of(given: Derivation | Mapping[str, Any] | str) -> Derivation:
    """A feature from itself, from plain values with a ``kind``, or from one line."""
    if isinstance(given, Derivation):
        return given
    return feature_from_text(given) if isinstance(given, str) else feature_from_dict(given, "feature")


def model_columns(feature: Derivation) -> dict[str, dict[str, Any]]:
    """Output -> settings of the column by which a model reads it: dense, or categorical where there is a type, or a
    sequence where there is a length, too."""
    if isinstance(feature, RowSteps):
        return {}
    if isinstance(feature, Merge):
        texts = len(feature.columns)
        return {name: _TEXT if place < texts else _MAYBE for place, name in enumerate(feature.outputs)}
    if isinstance(feature, History):
        return {feature.name: {**_TEXT, "max_length": feature.length}}
    return dict.fromkeys(feature.outputs, _READ_AS.get(feature.kind, _SCALED))
