"""The fastest residency that this machine can run."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np

from stoker.tables.slots.residency import Ints, ReferenceResidency, Residency, Shape

__all__ = ["make_residency"]


def make_residency(
    first_row: Sequence[int] | Ints, slots: int, *, transient: bool = False, fast: bool | None = None
) -> Residency:
    """The fastest residency that is installed.

    Args:
        first_row: [T + 1] first address of each table.
        slots: C.
        transient: every row leaves after its last use in flight.
        fast: True or False picks Numba or plain Python.
    """
    shape = Shape(first_row=np.asarray(first_row, np.int64), slots=slots, transient=transient)
    if fast is None:
        fast = importlib.util.find_spec("numba") is not None
    if not fast:
        return ReferenceResidency(shape)
    from stoker.tables.slots.fast_residency import FastResidency

    return FastResidency(shape)
