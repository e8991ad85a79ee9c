"""Derived features: declared as values, fitted on training rows, applied to any rows.

Features are computed in the order of their list. Each may read raw columns and the outputs of earlier features. The
dense and categorical columns of the schema may read any of them. A feature is a frozen dataclass; in a schema file it
is a ``[[feature]]`` with ``kind = "..."``. docs/features.md has a table of them.

>>> import polars as pl
>>> from stoker import features as f
>>> rows = pl.DataFrame({"item": ["a", "b", "a"], "clicked": [1, 0, 0]})
>>> fitted = f.fit([f.CountEncoding(by=("item",))], rows, label="clicked")
>>> fitted.apply(pl.DataFrame({"item": ["a", "c"]})).collect().to_dict(as_series=False)
{'item': ['a', 'c'], 'count_item': [2, 0]}
"""

from __future__ import annotations

import warnings
from typing import Any

from stoker.prep.features.base import KINDS, Derivation, RowLocal, RowSteps, check_features, feature_from_dict
from stoker.prep.features.fitted import CountEncoding, Fittable, FittedTable, MeanTargetEncoding, Merge, Properties
from stoker.prep.features.past import Difference, History, Past, PastCount, Previous, Rank, SinceLast
from stoker.prep.features.pipeline import Fitted, fit, fit_apply
from stoker.prep.features.rows import (
    Constrain,
    Cross,
    Divide,
    Equal,
    Keep,
    Mask,
    Match,
    Pairs,
    Split,
    Subtract,
    TimeParts,
)

__all__ = [
    "KINDS", "Constrain", "CountEncoding", "Cross", "Derivation", "Difference", "Divide", "Equal", "Fittable",
    "Fitted", "FittedTable", "History", "Keep", "Mask", "Match", "MeanTargetEncoding", "Merge", "Pairs", "Past",
    "PastCount", "Previous", "Properties", "Rank", "RowLocal", "RowSteps", "SinceLast", "Split", "Subtract",
    "TimeParts", "check_features", "feature_from_dict", "fit", "fit_apply",
]  # fmt: skip

_FORMER = {"Learned": Fittable, "LearnedTable": FittedTable}  # names of before


def __getattr__(name: str) -> Any:
    if name not in _FORMER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    now = _FORMER[name]
    warnings.warn(f"stoker.features.{name} is now called {now.__name__}.", FutureWarning, stacklevel=2)
    return now
