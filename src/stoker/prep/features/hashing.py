"""A hash of values that is the same on every machine, in every version and for every number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from stoker.prep.parse.dictionaries import splitmix, text_hashes

__all__ = ["ABSENT", "JOINT", "hash_texts", "row_folds", "stable_hash", "text_of"]

JOINT, ABSENT = "\x1f", "\x00"  # between texts, and for a missing one


def hash_texts(series: pl.Series, seed: int = 0) -> pl.Series:
    """UInt64 [n]: FNV-1a of UTF-8 bytes, finished by splitmix64, as ``hash_buckets`` of texts; missing: 0."""
    return pl.Series(text_hashes(series, seed))


def text_of(column: str) -> pl.Expr:
    """The texts of a column, missing where it is; NaN is missing."""

    def texts(series: pl.Series) -> pl.Series:
        return (series.fill_nan(None) if series.dtype.is_float() else series).cast(pl.String)

    return pl.col(column).map_batches(texts, return_dtype=pl.String, is_elementwise=True)


def stable_hash(columns: Sequence[str], seed: int = 0) -> pl.Expr:
    """Hash of the texts of some columns."""
    joined = pl.concat_str([text_of(name).fill_null(ABSENT) for name in columns], separator=JOINT, ignore_nulls=False)
    return joined.map_batches(lambda s: hash_texts(s, seed), return_dtype=pl.UInt64, is_elementwise=True)


def row_folds(column: str, seed: int, folds: int) -> pl.Expr:
    """splitmix64 of a column of whole numbers, as rows are split and sampled, modulo ``folds``; Int32."""
    mixed: Any = splitmix(np.array([seed], np.uint64))[0]

    def fold(series: pl.Series) -> pl.Series:
        hashes = splitmix(series.cast(pl.Int64).to_numpy().view(np.uint64) ^ mixed)
        return pl.Series((hashes % np.uint64(folds)).astype(np.int32))

    return pl.col(column).map_batches(fold, return_dtype=pl.Int32, is_elementwise=True)
