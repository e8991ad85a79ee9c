"""How a table is cut into tensor-train cores: factors of its rows and columns, and ranks.

The order of the columns' factors changes neither the bytes, but for rounding, nor the rows that the cores can express.
It changes the work: every later product carries the columns of the first cores along. So the search puts the columns
into the last core unless that takes more bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from stoker.base.errors import ConfigError

_ROWS = 4096  # distinct rows of the batch whose work is counted, uniform over the table
_SPREAD = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0)  # factors to try, relative to the one with the fewest bytes
_SLACK = 1.1  # most bytes of the chosen shape over the fewest


@dataclass(frozen=True, slots=True)
class TTShape:
    """Factors and ranks of a tensor-train table with d cores.

    Raises:
        ConfigError: numbers that do not fit together.
    """

    rows: tuple[int, ...]  # [d] n_k; their product is at least the table's rows
    cols: tuple[int, ...]  # [d] m_k; their product is its columns
    ranks: tuple[int, ...]  # [d - 1] r_k

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "ranks"):  # a list, as from JSON, would make it unhashable
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.rows) < 2 or len(self.cols) != len(self.rows) or len(self.ranks) != len(self.rows) - 1:
            raise ConfigError(
                f"row factors {self.rows}, column factors {self.cols} and ranks {self.ranks} do not fit together: give "
                "d factors of the rows, d of the columns and d - 1 ranks, with d at least 2."
            )
        if min(*self.rows, *self.cols, *self.ranks) < 1:
            raise ConfigError(f"factors and ranks must be at least 1: {self.rows}, {self.cols}, {self.ranks}.")

    @property
    def dim(self) -> int:
        """D."""
        return math.prod(self.cols)

    @property
    def capacity(self) -> int:
        """Rows that can be addressed; no id reaches those behind the table's last."""
        return math.prod(self.rows)

    @property
    def core_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """[d] (n_k, r_{k-1}, m_k * r_k)."""
        before, behind = (1, *self.ranks), (*self.ranks, 1)
        return tuple(
            (rows, left, cols * right)
            for rows, cols, left, right in zip(self.rows, self.cols, before, behind, strict=True)
        )

    @property
    def own(self) -> bool:
        """Whether every row has a slice of its own in the first of two cores, and all rows share the other."""
        return len(self.rows) == 2 and self.rows[0] > self.rows[1] == self.cols[0] == 1

    @property
    def num_parameters(self) -> int:
        """Values in all cores."""
        return sum(math.prod(core) for core in self.core_shapes)

    def work(self, distinct: int = _ROWS) -> float:
        """Count the multiplications for ``distinct`` rows drawn uniformly, with shared prefixes computed once."""
        total, prefixes, carried = 0.0, 1, 1
        for place, (rows, left, width) in enumerate(self.core_shapes):
            prefixes *= rows
            nodes = prefixes * -math.expm1(-distinct / prefixes)
            if place:
                total += nodes * carried * left * width
            carried *= self.cols[place]
        return total


def factorize(num_embeddings: int, dim: int, rank: int | Sequence[int], cores: int = 3) -> TTShape:
    """Return the shape with the least work among those with close to the fewest bytes.

    Args:
        num_embeddings: rows of the table.
        dim: its columns.
        rank: one number for all ranks, or each; a rank larger than its neighbours can use is lowered.
        cores: d, 2 to 4.

    Raises:
        ConfigError: numbers out of their range.
    """
    if num_embeddings < 1 or dim < 1:
        raise ConfigError(f"a table of {num_embeddings} rows and {dim} columns has nothing to factorize.")
    if not 2 <= cores <= 4:
        raise ConfigError(f"a tensor train has 2 to 4 cores, not {cores}.")
    ranks = (rank,) * (cores - 1) if isinstance(rank, int) else tuple(rank)
    if len(ranks) != cores - 1 or min(ranks) < 1:
        raise ConfigError(f"rank {rank} does not fit {cores} cores: give one number, or {cores - 1}, each at least 1.")
    return _search(num_embeddings, dim, ranks)


@lru_cache(maxsize=1024)
def _search(num_embeddings: int, dim: int, ranks: tuple[int, ...]) -> TTShape:
    found = [
        (_count(rows, cols, useful), rows, cols, useful)
        for cols in _ordered_factors(dim, len(ranks) + 1)
        for rows in _row_factors(num_embeddings, cols, ranks)
        for useful in [_cut(rows, cols, ranks)]
    ]
    least = min(found)[0]
    near = [TTShape(*factors) for count, *factors in found if count <= _SLACK * least]
    return min(near, key=lambda shape: (shape.work(min(_ROWS, num_embeddings)), shape.num_parameters, shape.cols))


def _ordered_factors(value: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (value,)
        return
    for first in range(1, value + 1):
        if value % first == 0:
            yield from ((first, *rest) for rest in _ordered_factors(value // first, count - 1))


def _row_factors(total: int, cols: Sequence[int], ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield factors of the rows around those with the fewest bytes, where all cores are equally large."""
    before, behind = (1, *ranks), (*ranks, 1)
    slices = [left * col * right for left, col, right in zip(before, cols, behind, strict=True)]
    wanted = _balanced(total, slices)
    near = [sorted({max(1, round(want * factor)) for factor in _SPREAD}) for want in wanted[1:]]
    for rest in itertools.product(*near):
        yield (-(-total // math.prod(rest)), *rest)


def _balanced(total: int, slices: Sequence[int]) -> list[float]:
    """Return the real factors of ``total``, at least 1 each, that minimise the sum of factor * slice."""
    free, found = set(range(len(slices))), [1.0] * len(slices)
    while free:
        size = (total * math.prod(slices[place] for place in free)) ** (1 / len(free))
        small = {place for place in free if size < slices[place]}
        if not small:
            for place in free:
                found[place] = size / slices[place]
            return found
        free -= small
    return found


def _cut(rows: Sequence[int], cols: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """Lower each rank to what either side of its cut can use."""
    left, right, found = 1, math.prod(rows) * math.prod(cols), []
    for row, col, rank in zip(rows, cols, ranks, strict=False):
        left, right = left * row * col, right // (row * col)
        found.append(min(rank, left, right))
    return tuple(found)


def _count(rows: Sequence[int], cols: Sequence[int], ranks: Sequence[int]) -> int:
    """Count the values in all cores, as :attr:`TTShape.num_parameters` does."""
    total, before = 0, 1
    for row, col, behind in zip(rows, cols, (*ranks, 1), strict=True):
        total, before = total + row * before * col * behind, behind
    return total


@dataclass(frozen=True)
class Level:
    """The nodes of one level, in order of their digit; nodes of one digit in order of their prefix."""

    digit: Tensor  # [P] int64, ascending
    parent: Tensor | None  # [P] int64, place of the parent among the values before; None in the first level
    digits: Tensor  # [n] int64, the distinct digits
    start: Tensor  # [n + 1] int64, where their nodes begin
    by_prefix: Tensor  # [P] int64, the nodes in order of their prefix: siblings are adjacent
    children: Tensor | None  # [nodes of the level before, in order of their prefix] int64, how many each has
