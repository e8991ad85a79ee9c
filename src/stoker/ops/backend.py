"""The contract between tables and kernels, and its definition in plain PyTorch.

A back end has no state but scratch memory. It works on one group: a weight matrix [C, D], its state, and the
address space of the group's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from stoker.ops import lamb, reference
from stoker.ops.lamb import Touched
from stoker.ops.rule import RowRule
from stoker.ops.space import AddressSpace, Bags, Parts, Rounding, SlotSpace


class Backend:
    """Forward and fused backward of a group: the definition, in plain PyTorch on any device.

    Subclasses equal it to the bit on one device. They override the methods that they do faster.
    """

    name = "reference"
    joins = False  # whether it has lookup_parts() and update_parts()

    def lookup(self, weight: Tensor, space: AddressSpace, bags: Bags) -> Tensor:
        """Return the pooled rows [B, F, D] float32.

        Raises:
            IndexError: an id is outside its table.
        """
        space.check(bags.ids, bags.offsets)
        rows = reference.addresses(bags.ids, space.on(weight.device).bases, bags.offsets)
        pooled = reference.lookup(weight, rows, bags.offsets, bags.weights, mean=bags.mean)
        return pooled.view(-1, len(space.features), weight.shape[1])

    def update(
        self, weight: Tensor, state: dict[str, Tensor], space: AddressSpace, bags: Bags, grad: Tensor, rule: RowRule,
        rounding: Rounding,
    ) -> None:  # fmt: skip
        """Sum the gradients [B, F, D] of each distinct row in order of occurrence and update it once, in place.

        With ``bags.shards``, the sums of shards are added by their tree (:mod:`stoker.ops.tree`).
        """
        dim = weight.shape[1]
        rows = reference.addresses(bags.ids, space.on(weight.device).bases, bags.offsets)
        distinct, total = reference.distinct_gradients(
            rows, bags.offsets, bags.weights, grad.reshape(-1, dim), mean=bags.mean, shards=bags.shards
        )
        bits = rounding.bits(distinct, dim, space) if weight.dtype == torch.bfloat16 else None
        counts = torch.unique(rows, return_counts=True)[1] if rule.counts else None
        reference.update_rows(weight, state, distinct, total, rule, rounding=bits, counts=counts)

    def step_rows(self, weight: Tensor, state: dict[str, Tensor], rows: Tensor, grad: Tensor, rule: RowRule) -> None:
        """Update distinct ``rows`` [n] of one table in place by their gradients [n, D], which may be overwritten."""
        bags = Bags(rows.view(-1, 1), distinct=True)
        self.update(weight, state, _space_of(len(weight)), bags, grad.unsqueeze(1), rule, Rounding(()))

    def check_offsets(self, offsets: Tensor, count: int, most: Sequence[int], check: Callable[[], None]) -> None:
        """Call ``check``, which raises ValueError for bad offsets; or only if they are bad, at once or later.

        Args:
            offsets: [B * F + 1] int64; they must rise from 0 to ``count``.
            count: L.
            most: [F] the most ids in a bag of each feature.
            check: waits for the device.
        """
        check()

    def lookup_parts(self, parts: Parts, space: AddressSpace, bags: Bags, shape: tuple[int, ...]) -> Tensor:
        """Return the pooled rows of all parts, each in its places of an example; ``space`` is of all their tables."""
        raise NotImplementedError

    def update_parts(
        self, parts: Parts, space: AddressSpace, bags: Bags, grad: Tensor, rule: RowRule, rounding: Rounding
    ) -> None:
        """Update the rows of all parts, given the gradient of what :meth:`lookup_parts` returned."""
        raise NotImplementedError

    def steps(self, rule: RowRule, *, sharded: bool = False) -> bool:
        """Return True if :meth:`update_parts` knows ``rule``, of which a row's step depends on no other row.

        ``sharded``: with sums over logical shards.
        """
        return True

    def init_rows(self, out: Tensor, key: int, start: int, scale: float) -> None:
        """Fill ``out`` [rows, D] with rows ``start..`` of a fresh table (:func:`stoker.ops.reference.init_rows`)."""
        chunk = max(1, 2**22 // out.shape[1])
        for begin in range(0, len(out), chunk):
            stop = min(begin + chunk, len(out))
            values = reference.init_rows(key, start + begin, start + stop, out.shape[1], scale)
            out[begin:stop] = values.to(out.dtype)

    def lamb_direct(
        self, weight: Tensor, state: dict[str, Tensor], found: Touched, grad: Tensor, rule: RowRule
    ) -> tuple[Tensor, list[int]]:
        """Return :func:`stoker.ops.lamb.direct` and the directions' sum of squares for each of T tables.

        It may overwrite ``grad``.
        """
        directions = lamb.direct(weight, state, found, grad, rule)
        return directions, lamb.squares(directions, found.table, found.tables)

    def lamb_move(
        self, weight: Tensor, found: Touched, directions: Tensor, ratios: list[float], rule: RowRule,
        rounding: Rounding, space: AddressSpace,
    ) -> list[int]:  # fmt: skip
        """Step along the directions: see :func:`stoker.ops.lamb.move`."""

        def random(some: Tensor) -> Tensor:
            return rounding.bits(some, weight.shape[1], space)

        return lamb.move(weight, found, directions, ratios, rule, random)

    def synchronize(self) -> None:
        """Wait for the device, and raise the errors that it reports late, such as an id outside its table."""
        return None

    def weight_gradient(self, weight: Tensor, space: AddressSpace, bags: Bags, grad: Tensor) -> Tensor:
        """Return the gradient of the per-sample weights [L]."""
        rows = reference.addresses(bags.ids, space.on(weight.device).bases, bags.offsets)
        return reference.per_sample_weight_gradient(weight, rows, bags.offsets, grad.reshape(-1, weight.shape[1]))


@lru_cache(maxsize=1024)
def _space_of(rows: int) -> SlotSpace:
    """Return a space for rows that are known to exist; a device gets its limits once."""
    return SlotSpace(names=("rows",), rows=(rows,), features=("rows",), table_of=(0,), slots=rows)
