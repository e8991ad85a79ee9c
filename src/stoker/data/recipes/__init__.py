"""Recipes for public logs, by name: ``stoker.recipes.criteo(preset="nvt")`` is a Recipe."""

from __future__ import annotations

from collections.abc import Callable

from stoker.data.recipe import Recipe

# Imported here and not on first use: importing the module `criteo` later would put the module in the
# function's place.
from stoker.data.recipes.avazu import avazu
from stoker.data.recipes.criteo import criteo
from stoker.data.recipes.ebnerd import ebnerd
from stoker.data.recipes.globo import globo
from stoker.data.recipes.movielens import movielens
from stoker.data.recipes.online_retail import online_retail
from stoker.data.recipes.taobao import taobao
from stoker.data.recipes.trivago import trivago
from stoker.data.schema_check import near
from stoker.errors import ConfigError

__all__ = [
    "avazu",
    "criteo",
    "ebnerd",
    "get",
    "globo",
    "movielens",
    "names",
    "online_retail",
    "taobao",
    "trivago",
]

_RECIPES: dict[str, Callable[..., Recipe]] = {
    "criteo": criteo,
    "avazu": avazu,
    "taobao": taobao,
    "trivago": trivago,
    "movielens": movielens,
    "online-retail": online_retail,
    "globo": globo,
    "ebnerd": ebnerd,
}


def names() -> list[str]:
    """Recipe names as the command line takes them."""
    return list(_RECIPES)


def get(name: str, preset: str | None = None) -> Recipe:
    """The recipe called ``name`` (dashes or underscores); an unknown one raises :class:`ConfigError`."""
    build = _RECIPES.get(name.replace("_", "-").lower())
    if build is None:
        raise ConfigError(
            f"there is no recipe {name!r}. Recipes: {', '.join(names())}.{near(name, names())} "
            "For your own log pass a schema file (.toml or .yaml)."
        )
    return build().with_preset(preset)
