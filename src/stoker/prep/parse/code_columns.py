"""Codes of features in as few bits as hold them, in a form that one kernel takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["CodeColumns", "code_type"]

_TYPES = (np.uint8, np.uint16, np.uint32)  # their places here tell kernels which one it is


def code_type(most: int) -> np.dtype[Any]:
    """The type of codes up to ``most``."""
    return np.dtype(next(dtype for dtype in _TYPES if most <= np.iinfo(dtype).max))


class CodeColumns:
    """F columns [n] of types that :func:`code_type` gives.

    Args:
        columns: the codes of each.
    """

    def __init__(self, columns: Sequence[Any]) -> None:
        self._held = [np.ascontiguousarray(column) for column in columns]  # what the addresses are of
        self.addresses = np.array([column.__array_interface__["data"][0] for column in self._held], np.uintp)
        self.types = np.array([_TYPES.index(column.dtype.type) for column in self._held], np.int64)
        self.rows = len(self._held[0]) if self._held else 0
