"""Features that are derived from the columns of a log, declared as values, fitted on training rows.

One row's way: raw columns, then the features in the order of their list, each of which may read raw columns and the
outputs of earlier ones, then the schema's dense and categorical columns, which may take any of them as source. A
feature is a frozen dataclass; the same declaration stands in a schema file as ``[[feature]]`` with ``kind = "..."``.
docs/features.md has a table of them. Polars, pyarrow and Numba load when rows are worked on.
"""

from __future__ import annotations

from stoker.prep.features.base import KINDS, Derivation, RowLocal, RowSteps, check_features, feature_from_dict
from stoker.prep.features.learned import (
    CountEncoding,
    Learned,
    LearnedTable,
    MeanTargetEncoding,
    Merge,
    Properties,
)
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
    "KINDS", "Constrain", "CountEncoding", "Cross", "Derivation", "Difference", "Divide", "Equal", "Fitted",
    "History", "Keep", "Learned", "LearnedTable", "Mask", "Match", "MeanTargetEncoding", "Merge", "Pairs", "Past",
    "PastCount", "Previous", "Properties", "Rank", "RowLocal", "RowSteps", "SinceLast", "Split", "Subtract",
    "TimeParts", "check_features", "feature_from_dict", "fit", "fit_apply",
]  # fmt: skip
