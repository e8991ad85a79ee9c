"""Logs for the tests of recipes: generated ones, and the real ones where they are present."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import polars as pl
import pytest

from stoker import synthetic
from stoker.prep.recipe import Recipe

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("STOKER_DATA", ROOT.parent / "shared" / "data"))
RETAIL = ROOT / "data" / "online_retail" / "invoices.parquet"


def real(*names: str) -> list[Path]:
    files = [SHARED / name for name in names]
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        pytest.skip(f"the data set is not on this machine: {missing[0]}")
    return files


def derived(recipe: Recipe, frames: Mapping[str, pl.DataFrame | pl.LazyFrame]) -> pl.DataFrame:
    assert recipe.derive is not None
    return recipe.derive({name: frame.lazy() for name, frame in frames.items()}, recipe.schema()).collect(
        engine="streaming"
    )


def generated(folder: Path, recipe: str, rows: int, **settings: float) -> list[Path]:
    """A generated log, as the files a user would name."""
    suffix = {"movielens": "", "ebnerd": "", "online-retail": ".parquet", "globo": ".parquet"}.get(recipe, ".csv")
    out = folder / f"log{suffix}"
    synthetic.write(recipe, rows, out, **settings)
    return sorted(out.iterdir()) if out.is_dir() else [out]
