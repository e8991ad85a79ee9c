"""Which rows of a shard are hot: those whose ids are all hot rows of their tables (FAE, VLDB 2022, section 4.2).

Hot rows of a table are its ids below a limit, as ids are given by falling frequency. The out-of-vocabulary id 0 is a
row like the others. All ids of a sequence count; an empty one is hot.

Two forms with equal results: plain NumPy (the definition), and Numba kernels where Numba is installed.

Legend: n rows of the shard, F features, L ids in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stoker.base.errors import DataError
from stoker.dataset.shards import Shard
from stoker.dataset.spec import FeatureSpec

__all__ = ["HotMask", "NumbaHotMask", "NumpyHotMask", "make_hot_mask"]

Mask = npt.NDArray[np.bool_]

_IDS = 2**20  # looked at together


class HotMask(Protocol):
    """A shard in, which of its rows are hot out."""

    def __call__(self, shard: Shard) -> Mask:
        """[n] bool. Ids must lie in their tables and lengths within the shard (:mod:`stoker.dataset.integrity`)."""
        ...


def make_hot_mask(schema: FeatureSpec, hot_rows: Mapping[str, int]) -> HotMask:
    """The fastest form that this machine can run.

    Args:
        schema: of the shards.
        hot_rows: table -> H; its ids below H are hot.

    Raises:
        DataError: other tables than the schema's, or more hot rows than a table has.
    """
    try:
        import stoker.rewrite.hot_mask_cpu  # noqa: F401
    except ImportError:
        return NumpyHotMask(schema, hot_rows)
    return NumbaHotMask(schema, hot_rows)


def _limits(schema: FeatureSpec, hot_rows: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """H of each feature's table, [F]."""
    if set(hot_rows) != set(schema.num_embeddings):
        differ = sorted(set(hot_rows) ^ set(schema.num_embeddings))
        raise DataError(
            f"hot rows and dataset differ in the tables {', '.join(differ)}. Profile the dataset that is classified."
        )
    for table, rows in schema.num_embeddings.items():
        if not 0 <= hot_rows[table] <= rows:
            raise DataError(
                f"table {table} has {rows:,} rows, so {hot_rows[table]:,} of them cannot be hot. Profile the dataset "
                "that is classified."
            )
    return np.array([hot_rows[feature.table] for feature in schema.features], np.int64)


class NumpyHotMask:
    """The definition, in NumPy."""

    def __init__(self, schema: FeatureSpec, hot_rows: Mapping[str, int]) -> None:
        self._limits = _limits(schema, hot_rows)

    def __call__(self, shard: Shard) -> Mask:
        """See :class:`HotMask`."""
        mask = np.empty(shard.rows, np.bool_)
        ids = shard.ids
        step = max(1, _IDS * shard.rows // max(1, ids.size))  # rows
        for start in range(0, shard.rows, step):
            stop = min(start + step, shard.rows)
            if shard.lengths is None or shard.row_offsets is None:
                mask[start:stop] = (ids[start:stop] < self._limits).all(axis=1)
                continue
            ends = shard.row_offsets[start : stop + 1]
            limits = np.repeat(np.tile(self._limits, stop - start), shard.lengths[start:stop].reshape(-1))
            cold = np.concatenate(([0], np.cumsum(ids[ends[0] : ends[-1]] >= limits)))  # up to each id
            mask[start:stop] = np.diff(cold[ends - ends[0]]) == 0
        return mask


class NumbaHotMask:
    """The same through Numba; releases the interpreter lock."""

    def __init__(self, schema: FeatureSpec, hot_rows: Mapping[str, int]) -> None:
        from stoker.rewrite import hot_mask_cpu

        self._kernels: Any = hot_mask_cpu
        self._limits = _limits(schema, hot_rows)

    def __call__(self, shard: Shard) -> Mask:
        """See :class:`HotMask`."""
        mask = np.empty(shard.rows, np.bool_)
        if shard.lengths is None:
            self._kernels.one_hot_mask(shard.ids, self._limits, mask)
        else:
            self._kernels.bag_mask(shard.ids, shard.lengths, shard.row_offsets, self._limits, mask)
        return mask
