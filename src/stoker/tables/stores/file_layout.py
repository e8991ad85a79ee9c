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

    num_records: int  # P
    record: int  # bytes
    per_block: int  # records
    block: int  # bytes, whole pages

    @classmethod
    def of(cls, num_records: int, num_bytes: int) -> Layout:
        """The layout for P records of ``num_bytes``."""
        record = num_bytes + -num_bytes % 4
        least = -(-record // PAGE)
        pages = least
        for candidate in range(least, least + _WASTE):
            idle, best = candidate * PAGE % record, pages * PAGE % record
            if idle * pages < best * candidate:
                pages = candidate
            if idle * _WASTE <= candidate * PAGE:
                break
        return cls(num_records, record, pages * PAGE // record, pages * PAGE)

    @property
    def file_bytes(self) -> int:
        """Length of the file: all blocks, and one page that is never written.

        Without that page a file cut short could grow back to its length by a store to its end, and the rows between
        would read as zeros; with it the length stays wrong for good.
        """
        return -(-self.num_records // self.per_block) * self.block + PAGE

    def offset(self, position: int) -> int:
        """Where a record begins, in bytes."""
        return position // self.per_block * self.block + position % self.per_block * self.record


def plan_reads(
    at: np.ndarray, nowhere: int, per_block: int, block: int, record: int, span: int, starts: np.ndarray
) -> int:
    """Cut ascending positions ``at`` [n] into runs; run r is ``starts[r]:starts[r + 1]``. Returns the number of runs.

    A run is either of records that are ``nowhere`` yet, or of records in the same or the next page, at most ``span``
    bytes in whole pages: what lies between them is cheaper to read than to skip.
    """
    n = len(at)
    runs = 0
    i = 0
    while i < n:
        starts[runs] = i
        runs += 1
        begin = i
        first = at[i]
        offset = first // per_block * block + first % per_block * record
        page = offset // PAGE
        end = offset + record
        i += 1
        while i < n:
            if (at[i] == nowhere) != (first == nowhere):
                break
            if first == nowhere:
                if i - begin >= INITIAL_RUN:
                    break
            else:
                offset = at[i] // per_block * block + at[i] % per_block * record
                far = offset // PAGE > (end - 1) // PAGE + 1
                if far or (offset + record + PAGE - 1) // PAGE * PAGE - page * PAGE > span:
                    break
                end = offset + record
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
