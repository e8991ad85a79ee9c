"""How rows lie in a home file, and which of them are moved by one system call.

The planning functions are plain Python over integers and arrays; Numba compiles the same source in ``file_kernels``.

Legend: N rows, n rows of one call. A *record* is a row's weights, then its state tensors. A *run* is a piece of the
sorted rows of one call that is handled at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["INITIAL_RUN", "PAGE", "Layout", "plan_reads", "plan_writes"]

PAGE = 4096  # bytes of a page; direct input and output is in whole ones
INITIAL_RUN = 64  # rows that are computed, not read, by one thread at a time
_WASTE = 8  # at most one part in so many of a block lies idle


@dataclass(frozen=True)
class Layout:
    """Records lie in blocks of whole pages, and none straddles two blocks.

    A record of up to about 500 bytes then lies within one page: 15 rows of 260 bytes to a page waste 5 %, where
    padding to a power of two would waste half the disk, and packing without gaps would make every sixteenth row
    cost two pages. Where pages fit records badly, a block has as many pages as it takes to waste at most an eighth.
    """

    num_rows: int  # N
    record: int  # bytes
    per_block: int  # records
    block: int  # bytes, whole pages

    @classmethod
    def of(cls, num_rows: int, row_bytes: int) -> Layout:
        """The layout for N rows of ``row_bytes``."""
        record = row_bytes + -row_bytes % 4
        least = -(-record // PAGE)
        pages = least
        for candidate in range(least, least + _WASTE):
            idle, best = candidate * PAGE % record, pages * PAGE % record
            if idle * pages < best * candidate:
                pages = candidate
            if idle * _WASTE <= candidate * PAGE:
                break
        return cls(num_rows, record, pages * PAGE // record, pages * PAGE)

    @property
    def file_bytes(self) -> int:
        """Length of the file: all blocks, and one page that is never written.

        Without that page a file cut short could grow back to its length by a store to its end, and the rows between
        would read as zeros; with it the length stays wrong for good.
        """
        return -(-self.num_rows // self.per_block) * self.block + PAGE

    def offset(self, row: int) -> int:
        """Where a row's record begins, in bytes."""
        return row // self.per_block * self.block + row % self.per_block * self.record


def plan_reads(
    rows: np.ndarray, words: np.ndarray, per_block: int, block: int, record: int, span: int, starts: np.ndarray
) -> int:
    """Cut ascending ``rows`` [n] into runs; run r is ``starts[r]:starts[r + 1]``. Returns the number of runs.

    A run is either of rows that the home does not hold (a clear bit in ``words``), or of held rows in the same or the
    next page, at most ``span`` bytes in whole pages: what lies between them is cheaper to read than to skip.
    """
    n = len(rows)
    runs = 0
    i = 0
    while i < n:
        starts[runs] = i
        runs += 1
        begin = i
        row = rows[i]
        held = (words[row >> 6] >> (row & 63)) & 1
        at = row // per_block * block + row % per_block * record
        page = at // PAGE
        end = at + record
        i += 1
        while i < n:
            row = rows[i]
            if (words[row >> 6] >> (row & 63)) & 1 != held:
                break
            if held:
                at = row // per_block * block + row % per_block * record
                if at // PAGE > (end - 1) // PAGE + 1 or (at + record + PAGE - 1) // PAGE * PAGE - page * PAGE > span:
                    break
                end = at + record
            elif i - begin >= INITIAL_RUN:
                break
            i += 1
    starts[runs] = n
    return runs


def plan_writes(rows: np.ndarray, per_block: int, block: int, span: int, whole: bool, starts: np.ndarray) -> int:
    """Cut ascending ``rows`` [n] into runs as :func:`plan_reads` does, for writing.

    A run is of consecutive rows; or, where ``whole`` blocks are written, of all rows of one block or several adjacent
    ones, so that no two runs share a block. At most ``span`` bytes in whole blocks.
    """
    n = len(rows)
    runs = 0
    i = 0
    while i < n:
        starts[runs] = i
        runs += 1
        first = rows[i] // per_block
        i += 1
        while i < n:
            last, this = rows[i - 1] // per_block, rows[i] // per_block
            full = this > last and (this - first + 1) * block > span
            if full or (this > last + 1 if whole else rows[i] != rows[i - 1] + 1):
                break
            i += 1
    starts[runs] = n
    return runs
