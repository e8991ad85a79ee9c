"""Numba kernels that find hot rows. Import this module only where Numba is installed.

Legend: n rows, F features, L ids in all.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stoker.ops.codegen.jit import jit

__all__ = ["bag_mask", "one_hot_mask"]

Ints = npt.NDArray[np.integer]


@jit
def one_hot_mask(
    ids: Ints,  # [n, F]
    limits: npt.NDArray[np.int64],  # [F] first cold id
    mask: npt.NDArray[np.bool_],  # [n], filled
) -> None:
    """Rows with one id per feature."""
    for row in range(ids.shape[0]):
        hot = True
        for feature in range(ids.shape[1]):
            if ids[row, feature] >= limits[feature]:
                hot = False
                break
        mask[row] = hot


@jit
def bag_mask(
    ids: Ints,  # [L]
    lengths: npt.NDArray[np.int32],  # [n, F]
    row_offsets: npt.NDArray[np.int64],  # [n + 1]
    limits: npt.NDArray[np.int64],  # [F] first cold id
    mask: npt.NDArray[np.bool_],  # [n], filled
) -> None:
    """Rows with a bag of ids per feature."""
    for row in range(lengths.shape[0]):
        hot = True
        first = row_offsets[row]
        for feature in range(lengths.shape[1]):
            last = first + lengths[row, feature]
            for place in range(first, last):
                if ids[place] >= limits[feature]:
                    hot = False
                    break
            if not hot:
                break
            first = last
        mask[row] = hot
