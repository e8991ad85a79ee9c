"""Check that a model's own options have the types of its constructor, before anything is built."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin

from stoker.base.errors import ConfigError
from stoker.models.base import RecModel

_Check = tuple[str, Callable[[Any], bool]]  # the expected type, in words, and a check of a value


def _is(*kinds: type) -> Callable[[Any], bool]:
    """Return a check for the type of a value; true and false are not numbers."""
    return lambda value: isinstance(value, kinds) and isinstance(value, bool) == (bool in kinds)


def _list_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is(*kinds), value))


def _object_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and _list_of(str)([*value]) and _list_of(*kinds)([*value.values()])


_KNOWN: dict[Any, _Check] = {
    int: ("a whole number", _is(Integral)),
    float: ("a number", _is(Real)),
    str: ("a text", _is(str)),
    bool: ("true or false", _is(bool)),
    type(None): ("null", _is(type(None))),
    Sequence[int]: ("a list of whole numbers such as [64, 32]", _list_of(Integral)),
    Sequence[float]: ("a list of numbers such as [0.5, 1]", _list_of(Real)),
    Sequence[str]: ('a list of texts such as ["a", "b"]', _list_of(str)),
    Mapping[str, int]: ('an object of whole numbers such as {"a": 1}', _object_of(Integral)),
    Mapping[str, str]: ('an object of texts such as {"a": "b"}', _object_of(str)),
}


def own_options(model: type[RecModel]) -> list[str]:
    """Return the options of a model that not every model has."""
    common = inspect.signature(RecModel.__init__).parameters
    own = inspect.signature(model.__init__).parameters
    return [name for name, found in own.items() if name not in common and found.kind is not found.VAR_KEYWORD]


def check_options(model: type[RecModel], options: Mapping[str, Any]) -> None:
    """Compare options with the annotations of the model's constructor and of the constructors that it calls.

    An option without an annotation, or with an unknown one, may have any value.

    Raises:
        ConfigError: names the option, its value and the expected type.
    """
    hints: dict[str, Any] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, RecModel) and "__init__" in vars(kind):
            hints |= _hints(kind.__init__)
    for name, value in options.items():
        expected = _expected(hints.get(name))
        if expected is not None and not expected[1](value):
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"option {name} of model {model.name!r} is {shown!r}, expected {expected[0]}.")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # names that only type checkers import
        return {}


def _expected(hint: Any) -> _Check | None:
    origin, given = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, given)), lambda value: any(value == each for each in given)
    if origin in (Union, types.UnionType):
        known = [check for each in given if (check := _expected(each)) is not None]
        if len(known) < len(given):
            return None
        return " or ".join(words for words, _ in known), lambda value: any(fits(value) for _, fits in known)
    return _KNOWN.get(hint) if isinstance(hint, Hashable) else None
