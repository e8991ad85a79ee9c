"""Recipes for public logs, by name.

Every public function of a module of this folder that returns a :class:`Recipe` is one: a new recipe is one file here.

>>> import stoker
>>> stoker.recipes.criteo(preset="nvt").schema().dense_names[:2]
('I1', 'I2')
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from stoker.base.checks import near
from stoker.base.errors import ConfigError
from stoker.prep.recipe import OWN_SCHEMA, Recipe
from stoker.prep.recipes.ads import avazu, criteo, movielens
from stoker.prep.recipes.lists import ebnerd, globo, trivago
from stoker.prep.recipes.shops import online_retail, taobao

_RECIPES: dict[str, Callable[..., Recipe]] = {
    name.replace("_", "-"): build
    for module in (importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__))
    for name, build in vars(module).items()
    if getattr(build, "__module__", "") == module.__name__
    and not name.startswith("_")
    and getattr(build, "__annotations__", {}).get("return") in ("Recipe", Recipe)
}

if not TYPE_CHECKING:  # type checkers know those that are imported above

    def __getattr__(name: str) -> Any:
        if (build := _RECIPES.get(name.replace("_", "-"))) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return build


__all__ = ["avazu", "criteo", "ebnerd", "get", "globo", "movielens", "names", "online_retail", "taobao", "trivago"]


def lookups(manifest: Mapping[str, Any], files: Iterable[str]) -> set[str]:
    """Return those of the names of files that, to the recipe of a dataset, describe users or items."""
    made: Any = manifest.get("recipe")
    known = isinstance(made, Mapping) and made["preset"] != OWN_SCHEMA and made["name"] in names()
    return set(get(made["name"]).lookups(files)) if known else set()


def names() -> list[str]:
    """Return the names of all recipes, as the command line takes them."""
    return list(_RECIPES)


def get(name: str, preset: str | None = None) -> Recipe:
    """Return the recipe called ``name`` (dashes or underscores); raise :class:`ConfigError` if it does not exist."""
    build = _RECIPES.get(name.replace("_", "-").lower())
    if build is None:
        raise ConfigError(
            f"there is no recipe {name!r}. Recipes: {', '.join(names())}.{near(name, names())} "
            "For your own log pass a schema file (.toml or .yaml)."
        )
    return build().with_preset(preset)
