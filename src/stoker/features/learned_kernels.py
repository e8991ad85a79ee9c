"""Loops over rows for learned features."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

__all__ = ["add_at", "count_at", "fold_totals", "smoothed_means"]

_jit: Any = nb.njit(nogil=True, cache=True)


@_jit
def add_at(sums, places, values):  # type: ignore[no-untyped-def]
    """``sums[places[i]] += values[i]``, one after the other: the same bits however rows come in batches."""
    for i in range(places.size):
        sums[places[i]] += values[i]


@_jit
def count_at(counts, places):  # type: ignore[no-untyped-def]
    """``counts[places[i]] += 1``."""
    for i in range(places.size):
        counts[places[i]] += 1


@_jit
def fold_totals(sums, counts, key_sums, key_counts, fold_sums, fold_counts):  # type: ignore[no-untyped-def]
    """Totals of each key and of each fold, of ``sums`` and ``counts`` [keys * folds]."""
    width = fold_sums.size
    for key in range(key_sums.size):
        for fold in range(width):
            at = key * width + fold
            key_sums[key] += sums[at]
            key_counts[key] += counts[at]
            fold_sums[fold] += sums[at]
            fold_counts[fold] += counts[at]


@_jit
def smoothed_means(rows, folds, train, sums, counts, own_sums, own_counts, mean, others, smoothing, out):  # type: ignore[no-untyped-def]
    """Encodings of rows whose keys are ``rows`` of the learned table, -1 for a key that it does not have.

    A training row leaves out its own fold: ``own_sums`` and ``own_counts`` [keys * folds], ``others`` [folds].
    """
    width = others.size
    for i in range(rows.size):
        total, count, prior = 0.0, np.int64(0), mean
        row = rows[i]
        if row >= 0:
            total, count = sums[row], counts[row]
        if train[i]:
            prior = others[folds[i]]
            if row >= 0:
                at = row * width + folds[i]
                total -= own_sums[at]
                count -= own_counts[at]
        weight = count + smoothing
        out[i] = (total + smoothing * prior) / weight if weight > 0 else prior
