"""Recipes for public logs, by name: ``stoker.recipes.criteo(preset="nvt")`` is a Recipe."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from stoker.data.schema_check import near
from stoker.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.data.recipe import Recipe

__all__ = ["get", "names"]

_FUNCTIONS = ("criteo",)  # module and function of the same name, in the order of listings


def names() -> list[str]:
    """Recipe names as the command line takes them."""
    return [name.replace("_", "-") for name in _FUNCTIONS]


def get(name: str, preset: str | None = None) -> Recipe:
    """The recipe called ``name`` (dashes or underscores); an unknown one raises :class:`ConfigError`."""
    function = name.replace("-", "_").lower()
    if function not in _FUNCTIONS:
        raise ConfigError(
            f"there is no recipe {name!r}. Recipes: {', '.join(names())}.{near(name, names())} "
            "For your own log pass a schema file (.toml or .yaml)."
        )
    return _function(function)().with_preset(preset)


def _function(name: str) -> Callable[..., Recipe]:
    return cast("Callable[..., Recipe]", getattr(import_module(f"{__name__}.{name}"), name))


def __getattr__(name: str) -> Callable[..., Recipe]:
    if name in _FUNCTIONS:
        return _function(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
