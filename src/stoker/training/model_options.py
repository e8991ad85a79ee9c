"""Whether a model's own options have the type that its constructor asks for, before anything is built of them."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin

from stoker.base.errors import ConfigError
from stoker.models import RecModel

__all__ = ["check_options", "own_options"]

_Check = tuple[str, Callable[[Any], bool]]  # what is expected, in words, and whether a value is that

_PLAIN: dict[Any, _Check] = {
    int: ("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    str: ("a text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    type(None): ("null", lambda value: value is None),
}
_LISTS = {
    int: "a list of whole numbers such as [64, 32]",
    float: "a list of numbers such as [0.5, 1]",
    str: 'a list of texts such as ["a", "b"]',
}


def own_options(model: type[RecModel]) -> list[str]:
    """Options of a model that not every model has."""
    common = inspect.signature(RecModel.__init__).parameters
    own = inspect.signature(model.__init__).parameters
    return [name for name, found in own.items() if name not in common and found.kind is not found.VAR_KEYWORD]


def check_options(model: type[RecModel], options: Mapping[str, Any]) -> None:
    """Compare options with the annotations of the model's constructor and of those that it passes settings on to.

    An option without an annotation, or with one that is not known here, may have any value.

    Raises:
        ConfigError: naming the option, its value and what is expected.
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
    except (NameError, TypeError):  # names that exist for type checkers only
        return {}


def _expected(hint: Any) -> _Check | None:
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, given = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, given)), lambda value: any(value == each for each in given)
    if origin in (Union, types.UnionType):
        several = [_expected(each) for each in given]
        known = [each for each in several if each is not None]
        if len(known) < len(several):
            return None
        return " or ".join(words for words, _ in known), lambda value: any(fits(value) for _, fits in known)
    if origin is Sequence and given[0] in _LISTS:
        fits = _PLAIN[given[0]][1]
        return _LISTS[
            given[0]
        ], lambda value: isinstance(value, Sequence) and not isinstance(value, str) and all(map(fits, value))
    if origin is Mapping and given == (str, int):
        whole = _PLAIN[int][1]
        return (
            'an object of whole numbers such as {"a": 1}',
            lambda value: (
                isinstance(value, Mapping)
                and all(isinstance(key, str) and whole(number) for key, number in value.items())
            ),
        )
    if origin is Mapping and given == (str, str):
        return (
            'an object of texts such as {"a": "b"}',
            lambda value: (
                isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair)
            ),
        )
    return None
