"""Recipes for public logs, by name.

Every public function of a module of this folder that returns a :class:`Recipe` is one: a new recipe is one file here.

>>> import stoker
>>> stoker.recipes.criteo(preset="nvt").schema().dense_names[:2]
('I1', 'I2')
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stoker.base.checks import near
from stoker.base.errors import ConfigError
from stoker.prep.recipe import OWN_SCHEMA, RawInput, Recipe
from stoker.prep.recipes.ads import avazu, criteo, movielens
from stoker.prep.recipes.lists import ebnerd, globo, trivago
from stoker.prep.recipes.shops import online_retail, taobao
from stoker.prep.source_format import SourceFormat

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


def known(file: str, columns: Sequence[str], source: SourceFormat) -> Recipe | None:
    """Return the recipe for a raw file of this name, with these columns and in this format; None if none fits.

    If the file has no header (``source.columns``), only separator and number of columns tell; fewer than ten are no
    sign, unless the separator is a rare one.
    """
    for recipe in (build() for build in _RECIPES.values()):
        first, lines = recipe.input_of(file), recipe.schema().source
        raw = recipe.inputs[first] if first else RawInput(format=lines, columns=dict.fromkeys(lines.columns, "string"))
        like, rare = raw.format, len(raw.columns) >= 10 or len(raw.format.separator or "") > 1
        if source.columns:
            same = rare and (len(like.columns), like.separator) == (len(columns), source.separator)
        else:
            same = len(raw.columns) >= 4 and set(raw.columns) <= set(columns)
        if same:
            return recipe
    return None


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
