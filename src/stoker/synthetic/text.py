"""Lines of text from columns of numbers, a whole block at once.

Every field is rendered into a fixed-width matrix of bytes in which 0 stands for "nothing"; the fields of a
line lie side by side, and one pass over the block drops the zeros. That writes some hundred MB of text a
second on one core.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bytes", "chosen", "constant", "hex8", "joined", "whole"]

Bytes = NDArray[np.uint8]  # [n, width], 0 where there is nothing


def _words(*texts: str) -> NDArray[np.uint32]:
    """Texts of at most 4 bytes, with zero bytes before them, as words of 4 bytes."""
    return np.frombuffer("".join(text.rjust(4, "\0") for text in texts).encode(), dtype=np.uint32)


# 0..9999 without leading zeros, then with them, then one empty text
_DIGITS = _words(*map(str, range(10_000)), *(f"{number:04}" for number in range(10_000)), "")
_NIBBLES = _words(*(f"{number:04x}" for number in range(65_536)))
_EMPTY = 20_000


def whole(values: NDArray, missing: NDArray[np.bool_] | None = None) -> Bytes:
    """Whole numbers of any sign in decimal; nothing where ``missing``."""
    sign = values < 0
    rest = np.abs(values).astype(np.int64)
    groups = max(1, -(-len(str(int(rest.max(initial=0)))) // 4))
    out = np.empty((len(values), groups), dtype=np.uint32)
    for group in range(groups - 1, -1, -1):
        higher = rest // 10_000
        index = rest - higher * 10_000
        index += 10_000 * (higher > 0)
        if group < groups - 1:
            index[rest == 0] = _EMPTY
        out[:, group] = _DIGITS[index]
        rest = higher
    if missing is not None:
        out[missing] = 0
        sign = sign & ~missing
    text = out.view(np.uint8)
    if not sign.any():
        return text
    return np.concatenate([np.where(sign, np.uint8(45), np.uint8(0))[:, None], text], axis=1)


def hex8(values: NDArray[np.uint32], missing: NDArray[np.bool_] | None = None) -> Bytes:
    """Eight hexadecimal digits; nothing where ``missing``."""
    out = np.empty((len(values), 2), dtype=np.uint32)
    out[:, 0] = _NIBBLES[values >> np.uint32(16)]
    out[:, 1] = _NIBBLES[values & np.uint32(0xFFFF)]
    if missing is not None:
        out[missing] = 0
    return out.view(np.uint8)


def chosen(texts: Sequence[str], index: NDArray[np.int64]) -> Bytes:
    """``texts[index]``, for a short list of texts."""
    table = np.array([text.encode() for text in texts])  # of a fixed width, with zero bytes behind
    return table.view(np.uint8).reshape(len(texts), -1)[index]


def constant(text: str, rows: int) -> Bytes:
    """The same text in every row."""
    return np.broadcast_to(np.frombuffer(text.encode(), dtype=np.uint8), (rows, len(text.encode())))


def joined(fields: Sequence[Bytes], separator: str) -> tuple[Bytes, list[int]]:
    """Fields side by side with separators between and a line feed at the end, and where each field starts."""
    rows = len(fields[0])
    mark, end = constant(separator, rows), constant("\n", rows)
    columns = [column for field in fields for column in (field, mark)]
    ends = np.cumsum([column.shape[1] for column in columns])
    return np.concatenate([*columns[:-1], end], axis=1), [0, *ends[1:-1:2].tolist()]
