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


def _four_digits() -> NDArray[np.uint32]:
    """Texts of 0..9999 without leading zeros, then with them, then one empty text, each 4 bytes."""
    numbers = np.arange(10_000)
    digits = np.stack([numbers // 1000, numbers // 100 % 10, numbers // 10 % 10, numbers % 10], axis=1) + 48
    leading = np.stack([numbers >= 1000, numbers >= 100, numbers >= 10, numbers >= 0], axis=1)
    texts = np.concatenate([np.where(leading, digits, 0), digits, np.zeros((1, 4), dtype=np.int64)])
    return np.ascontiguousarray(texts.astype(np.uint8)).view(np.uint32).ravel()


def _four_nibbles() -> NDArray[np.uint32]:
    """The 4-byte hexadecimal texts of 0..65535."""
    numbers = np.arange(65_536)
    nibbles = np.stack([numbers >> 12, numbers >> 8 & 15, numbers >> 4 & 15, numbers & 15], axis=1)
    letters = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)[nibbles]
    return np.ascontiguousarray(letters).view(np.uint32).ravel()


_DIGITS = _four_digits()
_NIBBLES = _four_nibbles()
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
    raw = [text.encode() for text in texts]
    table = np.zeros((len(raw), max(1, max(map(len, raw)))), dtype=np.uint8)
    for row, text in enumerate(raw):
        table[row, : len(text)] = np.frombuffer(text, dtype=np.uint8)
    return table[index]


def constant(text: str, rows: int) -> Bytes:
    """The same text in every row."""
    return np.broadcast_to(np.frombuffer(text.encode(), dtype=np.uint8), (rows, len(text.encode())))


def joined(fields: Sequence[Bytes], separator: str) -> tuple[Bytes, list[int]]:
    """Fields side by side with separators between and a line feed at the end, and where each field starts."""
    mark = np.frombuffer(separator.encode(), dtype=np.uint8)
    rows = fields[0].shape[0]
    width = sum(field.shape[1] for field in fields) + len(mark) * (len(fields) - 1) + 1
    block = np.empty((rows, width), dtype=np.uint8)
    starts, at = [], 0
    for number, field in enumerate(fields):
        if number:
            block[:, at : at + len(mark)] = mark
            at += len(mark)
        starts.append(at)
        block[:, at : at + field.shape[1]] = field
        at += field.shape[1]
    block[:, at] = ord("\n")
    return block, starts
