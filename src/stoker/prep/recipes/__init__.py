"""Recipes for public logs, by name: ``stoker.recipes.criteo(preset="nvt")`` is a Recipe."""

from __future__ import annotations

from collections.abc import Callable

from stoker.base.checks import near
from stoker.base.errors import ConfigError
from stoker.prep.recipe import Recipe

# Imported here and not on first use: importing the module `criteo` later would put the module in the
# function's place.
from stoker.prep.recipes.avazu import avazu
from stoker.prep.recipes.criteo import criteo
from stoker.prep.recipes.ebnerd import ebnerd
from stoker.prep.recipes.globo import globo
from stoker.prep.recipes.movielens import movielens
from stoker.prep.recipes.online_retail import online_retail
from stoker.prep.recipes.taobao import taobao
from stoker.prep.recipes.trivago import trivago

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
