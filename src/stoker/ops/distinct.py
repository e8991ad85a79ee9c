"""The distinct rows of a batch, and which of them each lookup wants.

Legend: B examples, F features, L ids, U distinct rows, T tables.
"""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.ops.backend import Bags
from stoker.ops.reference import addresses
from stoker.ops.space import AddressSpace

__all__ = ["distinct_rows"]

_HAVE_NUMBA = importlib.util.find_spec("numba") is not None
_local = threading.local()


def distinct_rows(bags: Bags, space: AddressSpace) -> tuple[npt.NDArray[np.int64], Tensor]:
    """Addresses [U] of the distinct rows, and for each id (same shape) which of them it is, int32.

    The order of the rows is unspecified. ``bags`` must lie on the CPU.

    Raises:
        IndexError: an id lies outside its table.
    """
    if not _HAVE_NUMBA:
        space.check(bags.ids, bags.offsets)
        found, inverse = torch.unique(addresses(bags.ids, space.bases, bags.offsets), return_inverse=True)
        return found.numpy(), inverse.to(torch.int32).view(bags.ids.shape)
    from stoker.ops.distinct_kernels import number_rows

    count = bags.ids.numel()
    ids = bags.ids.contiguous().reshape(-1).numpy()
    jagged = bags.offsets is not None
    offsets = bags.offsets.contiguous().numpy() if bags.offsets is not None else np.zeros(1, np.int64)
    start, features, first, sizes = _tables(space)
    # A table has at most every id; the hash is emptied again by whoever filled it.
    size = 1 << max(4, (2 * count).bit_length())
    keys, numbers = _scratch(size)
    rows = np.empty(count, np.int64)
    inverse_ids = np.empty(count, np.int32)
    found = number_rows(ids, offsets, jagged, start, features, first, sizes, keys, numbers, rows, inverse_ids)
    if found < 0:
        keys.fill(-1)
        space.check(bags.ids, bags.offsets)
    return rows[:found].copy(), torch.from_numpy(inverse_ids).view(bags.ids.shape)


def _scratch(size: int) -> tuple[Any, Any]:
    """A hash table of this thread, all -1, and a value for each of its places."""
    held: tuple[Any, Any] | None = getattr(_local, "held", None)
    if held is None or len(held[0]) < size:
        held = _local.held = (np.full(size, -1, np.int64), np.empty(size, np.int32))
    return held


def _tables(space: AddressSpace) -> tuple[Any, ...]:
    """Features by table: where each table's begin, the features, first address and rows of each table."""
    known: tuple[Any, ...] | None = getattr(space, "_by_table", None)
    if known is None:
        tables = np.asarray(space.table_of, np.int64)
        features = np.argsort(tables, kind="stable").astype(np.int64)
        start = np.searchsorted(tables[features], np.arange(len(space.rows) + 1)).astype(np.int64)
        known = (start, features, np.ascontiguousarray(space.first_row), np.asarray(space.rows, np.int64))
        object.__setattr__(space, "_by_table", known)
    return known
