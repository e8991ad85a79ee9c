"""Recipes for public logs, by name: ``stoker.recipes.criteo(preset="nvt")`` is a Recipe."""

from __future__ import annotations

from collections.abc import Callable

from stoker.base.checks import near
from stoker.base.errors import ConfigError
from stoker.prep.recipe import Recipe
from stoker.prep.recipes.ads import avazu, criteo, movielens
from stoker.prep.recipes.lists import ebnerd, globo, trivago
from stoker.prep.recipes.shops import online_retail, taobao

_RECIPES: dict[str, Callable[..., Recipe]] = {
    build.__name__.replace("_", "-"): build
    for build in (criteo, avazu, taobao, trivago, movielens, online_retail, globo, ebnerd)
}

__all__ = [
    "avazu", "criteo", "ebnerd", "get", "globo", "movielens", "names", "online_retail", "taobao", "trivago",
]  # fmt: skip


def names() -> list[str]:
    """Return recipe names as the command line takes them."""
    return list(_RECIPES)


def get(name: str, preset: str | None = None) -> Recipe:
    """Return the recipe called ``name`` (dashes or underscores); an unknown one raises :class:`ConfigError`."""
    build = _RECIPES.get(name.replace("_", "-").lower())
    if build is None:
        raise ConfigError(
            f"there is no recipe {name!r}. Recipes: {', '.join(names())}.{near(name, names())} "
            "For your own log pass a schema file (.toml or .yaml)."
        )
    return build().with_preset(preset)
