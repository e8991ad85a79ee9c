"""Tables as the layers of LAMB: the norm of each, and an update in two passes over the rows of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from stoker.ops.backend import Backend
from stoker.ops.lamb import Touched, direct, move, squares, touched, trust_ratios
from stoker.ops.rule import RowRule
from stoker.ops.space import AddressSpace, Bags, Rounding, slot_space
from stoker.tables.config import TableConfig
from stoker.tables.lease import Lease
from stoker.tables.lookups import Lookups
from stoker.tables.parts import by_rows
from stoker.tables.storage import Rows, Storage

__all__ = ["SUM", "Layers", "gradients", "update_core"]

SUM = RowRule(kind="sgd", lr=1.0)  # rows of zeros become minus the sums of their gradients


class _Group(Protocol):
    """What is needed of a group of tables."""

    tables: tuple[TableConfig, ...]
    dim: int
    storage: Storage
    backend: Backend

    def read(self, name: str, chunk_rows: int) -> Iterator[tuple[int, Rows]]: ...


_READ = 2**25  # bytes of rows looked at together


class Layers:
    """The sum of squares of each table of a group, exact (:mod:`stoker.ops.lamb`).

    It is a function of the rows: kept up to date by the changes of touched rows, found again from all of them after
    they were replaced. So it need not be stored, and no placement, order of work or restart can change it.
    """

    def __init__(self) -> None:
        self._squares: list[int] | None = None

    def forget(self) -> None:
        """Rows were replaced: look at all of them before the next update."""
        self._squares = None

    def squares(self, group: _Group) -> list[int]:
        """Of each table, in units of 2^-80."""
        if self._squares is None:
            chunk = max(1, _READ // (4 * group.dim))
            self._squares = [
                sum(squares(rows.weight)[0] for _, rows in group.read(table.name, chunk)) for table in group.tables
            ]
        return self._squares

    def update(
        self,
        group: _Group,
        lookups: Lookups,
        grad: Tensor,
        lease: Lease | None,
        rule: RowRule,
        keys: tuple[int, ...],
    ) -> None:
        """One step. A first pass moves the moments and measures, a second moves the rows.

        Args:
            group: whose tables these are.
            lookups: the batch.
            grad: [B, P, D].
            lease: on its rows; None: it has too many for the slots, and each pass works on them in parts.
            rule: constants.
            keys: of the random bits, see :meth:`Lease.rounding`.
        """
        group.backend.synchronize()  # a device that found a bad id late must say so before rows are addressed by it
        squares_of = self.squares(group)
        storage, backend = group.storage, group.backend
        lengths = [0] * len(squares_of)

        def measure(lease: Lease) -> tuple[Touched, Tensor]:
            found = touched(lease.bags, lease.space)
            summed = gradients(backend, found, lease.space, lease.bags, grad)
            counts = None if rule.cow_ratio == math.inf else found.counts
            directions, more = backend.lamb_direct(
                storage.weight, storage.state, found.rows, found.table, len(lengths), summed, rule, counts
            )
            _add(lengths, more)
            return found, directions

        def measure_part(lease: Lease) -> None:
            measure(lease)

        def step(lease: Lease, found: Touched, directions: Tensor, ratios: list[float]) -> None:
            grown = backend.lamb_move(
                storage.weight, found.rows, found.table, directions, ratios, rule, lease.rounding(keys), lease.space
            )
            _add(squares_of, grown)

        def step_again(lease: Lease) -> None:
            found = touched(lease.bags, lease.space)
            directions, _ = backend.lamb_direct(  # the moments have moved
                storage.weight, storage.state, found.rows, found.table, len(lengths), None, rule, None
            )
            step(lease, found, directions, ratios)

        try:
            if lease is not None:
                found, directions = measure(lease)
                step(lease, found, directions, trust_ratios(squares_of, lengths, rule))
            else:
                by_rows(measure_part, storage, lookups)
                ratios = trust_ratios(squares_of, lengths, rule)
                by_rows(step_again, storage, lookups)
        except BaseException:
            self.forget()
            raise


def update_core(weight: Tensor, state: dict[str, Tensor], digits: Tensor, grad: Tensor, rule: RowRule) -> None:
    """The same for a core of a tensor train, a layer of its own that lies on the device.

    Args:
        weight: [n_k, width] float32, the core.
        state: its moments.
        digits: [n] int64, distinct slices.
        grad: [n, width].
        rule: constants.
    """
    directions = direct(weight, state, digits, grad, rule)
    ratios = trust_ratios(squares(weight), squares(directions), rule)
    move(weight, digits, torch.zeros_like(digits), directions, ratios, rule, torch.zeros_like)


def _add(totals: list[int], more: Sequence[int]) -> None:
    for index, value in enumerate(more):
        totals[index] += value


def gradients(backend: Backend, found: Touched, space: AddressSpace, bags: Bags, grad: Tensor) -> Tensor:
    """The gradient of each distinct row [U, D] float32, summed in order of occurrence by the back end's own kernel."""
    dim = grad.shape[2]
    sums = torch.zeros(len(found.rows), dim, dtype=torch.float32, device=grad.device)
    small = slot_space(space, len(found.rows))
    ids = found.which.to(torch.int32)
    backend.update(sums, {}, small, Bags(ids, bags.offsets, bags.weights, bags.mean), grad, SUM, Rounding(()))
    return torch.sub(0.0, sums, out=sums)  # not negated: a sum of 0 is +0
