"""One level of the prefixes that a batch's rows have in common."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one level, in order of their digit; nodes of one digit in order of their prefix."""

    digit: Tensor  # [P] int64, ascending
    parent: Tensor | None  # [P] int64, the node of the level before; None in the first level
    digits: list[int]  # the distinct digits
    start: list[int]  # [len(digits) + 1] where their nodes begin
    by_prefix: Tensor  # [P] int64, the nodes in order of their prefix: those of a parent lie together
    children: Tensor | None  # [nodes of the level before, in order of their prefix] int64, how many each has
