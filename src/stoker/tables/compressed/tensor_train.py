"""Compressed tables inside :class:`stoker.EmbeddingTables`: cores on the device instead of rows.

A core is a table: row ``i`` of core k is the slice ``G_k[i]``, so slices have optimizer state, and are updated and
stored like rows. The distinct rows of a batch are computed once (:mod:`stoker.ops.tt.lookup`); then they are a small
table for the ordinary kernels.

Legend: B examples, F features of the table, D columns, U distinct rows of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.base.timeline import spanned
from stoker.ops import AddressSpace, Backend, Bags, RowRule
from stoker.ops.lamb import Touched, direct, move, squares, trust_ratios
from stoker.ops.reference import addresses, update_rows
from stoker.ops.space import slot_space
from stoker.ops.tt.lookup import Trie, build_trie, expand, fill_core, gradients
from stoker.ops.tt.shape import TTShape
from stoker.optim import RowOptimizer
from stoker.tables.config import TableConfig, TensorTrain
from stoker.tables.group import TableGroup, row_gradients
from stoker.tables.lookups import Lookups
from stoker.tables.storage import DeviceRows, Lease, Rows, Storage

__all__ = ["CompressedGroup", "TensorTrainCores", "check_cores", "core_tables", "stored_tables", "update_slices"]

_PIECE, _LEAST = 64, 16  # columns of a slice that a kernel updates together


def core_tables(table: TableConfig, shape: TTShape) -> tuple[TableConfig, ...]:
    """Return the cores of a table as tables, with a slice in each row."""
    return tuple(
        TableConfig(name=f"{table.name}.core{place}", num_embeddings=rows, embedding_dim=left * width)
        for place, (rows, left, width) in enumerate(shape.core_shapes, 1)
    )


def stored_tables(tables: Sequence[TableConfig], trains: Mapping[str, TensorTrain]) -> tuple[TableConfig, ...]:
    """Return the stored form of ``tables``: each table, or its cores if it is named in ``trains``."""
    found: list[TableConfig] = []
    for table in tables:
        train = trains.get(table.name)
        found += (table,) if train is None else core_tables(table, train.shape_of(table))
    return tuple(found)


class TensorTrainCores(Storage):
    """The cores of one table, all on the device. Rows are computed when they are read."""

    def __init__(self, shape: TTShape, num_rows: int, state: dict[str, str], device: torch.device) -> None:
        self.shape, self._num_rows = shape, num_rows
        self.cores = [
            DeviceRows(rows, left * width, torch.float32, state, device) for rows, left, width in shape.core_shapes
        ]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The first core, which has the device and type of all."""
        return self.cores[0].weight

    @property
    def state(self) -> dict[str, Tensor]:  # type: ignore[override]
        """Empty: the cores have the state, not the rows."""
        return {}

    @property
    def num_rows(self) -> int:
        return self._num_rows

    @property
    def fast_bytes(self) -> int:
        return sum(core.fast_bytes for core in self.cores)

    def slices(self) -> list[Tensor]:
        """Return each core as [n_k, r_{k-1}, m_k * r_k]."""
        return [core.weight.view(size) for core, size in zip(self.cores, self.shape.core_shapes, strict=True)]

    def acquire(self, bags: Bags, space: AddressSpace) -> Lease:
        space.check(bags.ids, bags.offsets)
        return Lease(bags, space)

    def reset_state(self, state: dict[str, str]) -> None:
        for core in self.cores:
            core.reset_state(state)

    def rows_of(self, distinct: Tensor) -> Tensor:
        """Return the rows [U, D] at ``distinct`` [U] int64, ascending."""
        trie = build_trie(distinct, self.shape)
        return trie.in_order(expand(self.slices(), trie)[-1].view(-1, self.shape.dim))

    def read(self, start: int, stop: int) -> Rows:
        return Rows(self.rows_of(torch.arange(start, stop, device=self.weight.device)), {})

    def gather(self, rows: npt.NDArray[np.int64]) -> Rows:
        distinct, inverse = torch.unique(torch.from_numpy(rows).to(self.weight.device), return_inverse=True)
        return Rows(self.rows_of(distinct)[inverse], {})

    def write(self, start: int, rows: Rows) -> None:
        raise ConfigError(
            "rows of a tensor-train table cannot be replaced one by one: they share its cores. Write the cores "
            "(EmbeddingTables.stored), or compress a dense table with TTEmbeddingBag.from_dense."
        )

    def to(self, device: torch.device) -> None:
        for core in self.cores:
            core.to(device)


@dataclass(frozen=True)
class _Expanded:
    """The results of a lookup, for its backward."""

    version: int  # of the cores
    trie: Trie
    values: list[Tensor]
    rows: Tensor  # [U, D] in the last level's order
    bags: Bags  # places among them
    space: AddressSpace


class CompressedGroup(TableGroup):
    """One tensor-train table; arguments as for :class:`TableGroup`."""

    storage: TensorTrainCores

    def _make_storage(self, optimizer: RowOptimizer, device: torch.device) -> Storage:
        [table] = self.tables
        assert isinstance(self.strategy, TensorTrain)
        check_cores(optimizer, f"table {table.name!r}")
        shape = self.strategy.shape_of(table)
        storage = TensorTrainCores(shape, table.num_embeddings, dict(optimizer.state), device)
        for place, core in enumerate(storage.cores):
            fill_core(core.weight, self.seed, table.name, shape, place, table.scale)
        self.stored = core_tables(table, shape)
        return storage

    def set_optimizer(self, optimizer: RowOptimizer) -> None:
        check_cores(optimizer, f"table {self.tables[0].name!r}")
        super().set_optimizer(optimizer)

    def _expand(self, bags: Bags, space: AddressSpace) -> _Expanded:
        shape = self.storage.shape
        wanted = addresses(bags.ids, space.bases.to(bags.ids.device), bags.offsets)
        distinct, inverse = torch.unique(wanted, return_inverse=True)
        trie = build_trie(distinct, shape)
        values = expand(self.storage.slices(), trie)
        places = trie.levels[-1].by_prefix[inverse].view(bags.ids.shape)
        rows = values[-1].view(-1, shape.dim)
        return _Expanded(self.version, trie, values, rows, replace(bags, ids=places), slot_space(space, len(distinct)))

    def _expanded(self, lease: Lease) -> _Expanded:
        """Return the results of the lookup, computed again if the cores have changed since."""
        if lease.token is None or lease.token.version != self.version:
            lease.token = self._expand(lease.bags, lease.space)
        found: _Expanded = lease.token
        return found

    def _lookup(self, lease: Lease) -> Tensor:
        found = self._expanded(lease)
        return self.backend.lookup(found.rows, found.space, found.bags)

    @spanned("update")
    def update(self, lookups: Lookups, grad: Tensor, lease: Lease | None) -> None:
        assert lease is not None
        if lookups.bags.ids.numel():
            slices = self._slices(self._expanded(lease), grad)
            rule = self.optimizer.rule(self.tick)
            self.version += 1
            for core, (digits, wanted) in zip(self.storage.cores, slices, strict=True):
                update_slices(self.backend, core.weight, core.state, digits, wanted.flatten(1), rule)
        lease.token = None
        self.tick += 1

    def _slices(self, found: _Expanded, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return for each core the distinct slices and their gradients."""
        sums = row_gradients(self.backend, len(found.rows), found.space, found.bags, found.bags.ids, grad)
        return gradients(self.storage.slices(), found.trie, found.values, sums)

    def gradient_norm_squared(self, lookups: Lookups, grad: Tensor) -> float:
        """Return the sum of squares of the gradients of the cores."""
        lease = self.acquire(lookups)
        assert lease is not None
        return sum(float(each.double().square().sum()) for _, each in self._slices(self._expanded(lease), grad))

    def _weight_gradient(self, lease: Lease, grad: Tensor) -> Tensor:
        found = self._expanded(lease)
        return self.backend.weight_gradient(found.rows, found.space, found.bags, grad)

    def place(self, name: str) -> tuple[Storage, int, int]:
        """Return the place of a core's slices by its name, or of the table's rows, which are computed, by its."""
        for table, core in zip(self.stored, self.storage.cores, strict=True):
            if table.name == name:
                return core, 0, table.num_embeddings
        return super().place(name)


def check_cores(optimizer: RowOptimizer, what: str) -> None:
    """Raise ConfigError for an optimizer that cannot work on slices of cores."""
    if optimizer.cow_clip is not None:
        raise ConfigError(
            f"{what} is a tensor train, whose cores have no ids to count, so CowClip cannot clip them. Leave "
            "cow_clip out, or clip the norm of a slice's gradient with clip_norm.",
            settings=("row_cow_clip", "tt_rank"),
        )


def update_slices(
    backend: Backend, weight: Tensor, state: dict[str, Tensor], digits: Tensor, grad: Tensor, rule: RowRule
) -> None:
    """Update the slices of a core at distinct ``digits`` [n] in place, with their gradient ``grad`` [n, width].

    The core is ``weight`` [n_k, width], its ``state`` by name [n_k, width] or [n_k].
    """
    if rule.definition.scope == "table":  # a core is one layer
        found = Touched(digits, torch.zeros_like(digits), 1, torch.arange(len(digits)))
        directions = direct(weight, state, found, grad, rule)
        move(
            weight, found, directions, trust_ratios(squares(weight), squares(directions), rule), rule, torch.zeros_like
        )
        return
    width = weight.shape[1]
    piece = math.gcd(width, _PIECE)
    if not rule.elementwise or piece < _LEAST:
        update_rows(weight, state, digits, grad, rule)
        return
    # Kernels are compiled for a width; for that of a whole slice this would take long.
    pieces = width // piece
    ids = digits.unsqueeze(1) * pieces + torch.arange(pieces, device=digits.device)
    states = {name: tensor.view(-1, piece) for name, tensor in state.items()}
    backend.step_rows(weight.view(-1, piece), states, ids.view(-1), grad.reshape(-1, piece), rule)
