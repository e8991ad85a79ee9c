"""Compressed tables inside :class:`stoker.EmbeddingTables`: cores on the device instead of rows.

A core is a table: row ``i`` of core k is the slice ``G_k[i]``, so slices have optimizer state, and are updated and
stored like rows. The distinct rows of a batch are computed once (:mod:`stoker.ops.tt.lookup`); then they are a small
table for the ordinary kernels.

Legend: B examples, F features of the table, D columns, U distinct rows of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.base.timeline import spanned
from stoker.ops import AddressSpace, Backend, Bags, RowRule
from stoker.ops.lamb import Touched, direct, move, squares, trust_ratios
from stoker.ops.reference import addresses, bag_of, factors, update_rows
from stoker.ops.tree import Shards
from stoker.ops.tt.lookup import Values, expand, fill_core, gradients, sum_places
from stoker.ops.tt.shape import TTShape
from stoker.ops.tt.trie import SumOrder, Trie, build_trie, sums_into
from stoker.optim import RowOptimizer
from stoker.tables.config import TableConfig, TensorTrain
from stoker.tables.group import TableGroup
from stoker.tables.lookups import Lookups, roomy_space
from stoker.tables.shards import ShardSums, row_gradients, square_sum
from stoker.tables.storage import DeviceRows, Lease, Rows, Storage

_COLUMNS, _LEAST = 64, 16  # columns of a slice that a kernel updates together


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

    def __init__(self, shape: TTShape, state: dict[str, str], device: torch.device) -> None:
        self.shape, self.state = shape, {}  # the cores have the state, not the rows
        self.cores = [
            DeviceRows(rows, left * width, torch.float32, state, device) for rows, left, width in shape.core_shapes
        ]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The first core, which has the device and type of all."""
        return self.cores[0].weight

    @property
    def fast_bytes(self) -> int:
        return sum(core.fast_bytes for core in self.cores)

    def slices(self) -> list[Tensor]:
        """Return each core as [n_k, r_{k-1}, m_k * r_k]."""
        return [core.weight.view(size) for core, size in zip(self.cores, self.shape.core_shapes, strict=True)]

    @property
    def reads_ids(self) -> bool:
        return self.weight.device.type != "cpu"

    def acquire(self, bags: Bags, space: AddressSpace) -> Lease:
        """Find the rows of a batch and their trie, on the host: ids on a GPU make the host wait."""
        ids, offsets = bags.ids.cpu(), None if bags.offsets is None else bags.offsets.cpu()
        space.check(ids, offsets)
        distinct, inverse = torch.unique(addresses(ids, space.bases, offsets), return_inverse=True)
        trie = build_trie(distinct, self.shape, self.weight)
        places = trie.places[inverse]
        sums = sums_into(places, trie.count) if self.reads_ids else None
        return Lease(bags, space, token=_Wanted(trie, places.view(ids.shape), sums))

    def reset_state(self, state: dict[str, str]) -> None:
        for core in self.cores:
            core.reset_state(state)

    def rows_of(self, distinct: Tensor) -> Tensor:
        """Return the rows [U, D] at ``distinct`` [U] int64, ascending."""
        trie, _ = build_trie(distinct, self.shape, self.weight).on(self.weight.device)
        return trie.in_order(expand(self.slices(), trie).rows)

    def read(self, start: int, stop: int) -> Rows:
        return Rows(self.rows_of(torch.arange(start, stop, device="cpu")), {})

    def gather(self, rows: npt.NDArray[np.int64]) -> Rows:
        distinct, inverse = torch.unique(torch.from_numpy(rows), return_inverse=True)
        return Rows(self.rows_of(distinct)[inverse.to(self.weight.device)], {})

    def write(self, start: int, rows: Rows) -> None:
        raise ConfigError(
            "rows of a tensor-train table cannot be replaced one by one: they share its cores. Write the cores "
            "(EmbeddingTables.stored), or compress a dense table with TTEmbeddingBag.from_dense."
        )

    def scatter(self, rows: npt.NDArray[np.int64], values: Rows) -> None:
        self.write(0, values)

    def to(self, device: torch.device) -> None:
        for core in self.cores:
            core.to(device)


class _Wanted(NamedTuple):
    """The rows of a batch, all on the host."""

    trie: Trie
    places: Tensor  # of the ids, in their shape: of the row of each
    sums: SumOrder | None  # for a GPU: of the ids [L] into their places


@dataclass(frozen=True)
class _Expanded:
    """The results of a lookup, for its backward, on the device of the cores."""

    version: int  # of the cores
    wanted: _Wanted
    trie: Trie
    values: Values
    bags: Bags  # places among the rows
    space: AddressSpace
    sums: SumOrder | None


class CompressedGroup(TableGroup):
    """One tensor-train table; arguments as for :class:`TableGroup`."""

    storage: TensorTrainCores

    def _make_storage(self, optimizer: RowOptimizer, device: torch.device) -> Storage:
        [table] = self.tables
        assert isinstance(self.strategy, TensorTrain)
        check_cores(optimizer, f"table {table.name!r}")
        shape = self.strategy.shape_of(table)
        storage = TensorTrainCores(shape, dict(optimizer.state), device)
        for place, core in enumerate(storage.cores):
            fill_core(core.weight, self.seed, table.name, shape, place, table.scale)
        self.stored = core_tables(table, shape)
        return storage

    def check_optimizer(self, optimizer: RowOptimizer) -> None:
        check_cores(optimizer, f"table {self.tables[0].name!r}")

    def _expanded(self, lease: Lease) -> _Expanded:
        """Return the results of the lookup, computed again if the cores have changed since."""
        found: _Wanted | _Expanded | None = lease.token
        if not isinstance(found, _Expanded) or found.version != self.version:
            wanted = found.wanted if isinstance(found, _Expanded) else found
            wanted = wanted or self.storage.acquire(lease.bags, lease.space).token
            trie, (places, sums) = wanted.trie.on(self.storage.weight.device, (wanted.places, wanted.sums))
            values = expand(self.storage.slices(), trie)
            bags, space = lease.bags._replace(ids=places), roomy_space(lease.space, trie.count)
            found = lease.token = _Expanded(self.version, wanted, trie, values, bags, space, sums)
        return found

    def _rows_of(self, lease: Lease) -> tuple[Tensor, AddressSpace, Bags]:
        found = self._expanded(lease)
        return found.values.rows, found.space, found.bags

    @spanned("update")
    def update(self, lookups: Lookups, grad: Tensor, lease: Lease | None) -> None:
        assert lease is not None
        if lookups.bags.ids.numel():
            found = self._expanded(lease)
            self._update(found, self._row_sums(found, grad, lookups.bags.shards))
            lease.token = found.wanted  # the values are of the cores before
        self.tick += 1

    @spanned("update")
    def step(self, rows: Tensor, grads: Tensor, counts: Tensor) -> None:
        for _, lease, _ in self._row_blocks(rows):  # one, or none if there are no rows
            found = self._expanded(lease)
            self._update(found, found.trie.from_order(grads))
        self.tick += 1

    def _update(self, found: _Expanded, sums: Tensor) -> None:
        """Update the cores, given the gradient of each row [places, D]."""
        rule = self.optimizer.rule(self.tick)
        slices = self._slices(found, sums)
        self._note_change(slice(None))
        for core, (digits, wanted) in zip(self.storage.cores, slices, strict=True):
            update_slices(self.backend, core.weight, core.state, digits, wanted.flatten(1), rule)

    def _note_change(self, changed: Lookups | Tensor | slice) -> None:
        super()._note_change(slice(None))  # each row depends on all cores, which are small

    def _slices(self, found: _Expanded, sums: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return for each core the distinct slices and their gradients, from those of the rows [places, D]."""
        return gradients(self.storage.slices(), found.trie, found.values, sums)

    def _row_sums(self, found: _Expanded, grad: Tensor, shards: Shards | None) -> Tensor:
        """Sum the gradient of each row in order of occurrence, over ``shards`` by their tree: [places, D]."""
        bags, rows = found.bags._replace(shards=shards), found.values.rows
        sums = found.sums
        if sums is None or shards is not None:
            return row_gradients(self.backend, len(rows), found.space, bags, bags.ids, grad)
        order, flat = sums.order, grad.reshape(-1, rows.shape[1]).to(rows.dtype)
        parts = factors(len(order), bags.offsets, bags.weights, bags.mean)
        if bags.offsets is not None:
            sums = sums._replace(order=bag_of(bags.offsets, len(order))[order])
        return sum_places(flat, sums, None if parts is None else parts[order])

    def gradient_norm_squared(self, lookups: Lookups, grad: Tensor) -> float:
        """Return the sum of squares of the gradients of the cores."""
        lease = self.acquire(lookups)
        assert lease is not None
        found = self._expanded(lease)
        slices = self._slices(found, self._row_sums(found, grad, lookups.bags.shards))
        return sum(square_sum(each, lookups.bags.shards) for _, each in slices)

    def norm_squared(self, found: ShardSums) -> float:
        for _, lease, _ in self._row_blocks(found.sums.rows):
            own = self._expanded(lease)
            slices = self._slices(own, own.trie.from_order(found.sums.values))
            return sum(square_sum(each, Shards((0,))) for _, each in slices)
        return 0.0

    def place(self, name: str) -> tuple[Storage, int, int]:
        """Return the place of a core's slices by its name, or of the table's rows, which are computed, by its."""
        for table, core in zip(self.stored, self.storage.cores, strict=True):
            if table.name == name:
                return core, 0, table.num_embeddings
        return super().place(name)


def check_cores(optimizer: RowOptimizer, what: str) -> None:
    """Raise ConfigError for what is not a row optimizer, or cannot work on slices of cores."""
    if not isinstance(optimizer, RowOptimizer):
        raise ConfigError(
            f"the optimizer of {what} is a {type(optimizer).__name__}; cores that step inside backward need one such "
            "as stoker.SGD(lr=0.1). For one of torch, leave it out: cores are then parameters."
        )
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
        found = Touched(digits, torch.zeros_like(digits), 1, torch.arange(len(digits), device="cpu"))
        directions = direct(weight, state, found, grad, rule)
        move(
            weight, found, directions, trust_ratios(squares(weight), squares(directions), rule), rule, torch.zeros_like
        )
        return
    width = weight.shape[1]
    columns = math.gcd(width, _COLUMNS)
    if not rule.elementwise or columns < _LEAST:
        update_rows(weight, state, digits, grad, rule)
        return
    # Kernels are compiled for a width; for that of a whole slice this would take long.
    blocks = width // columns
    ids = torch.add(torch.arange(blocks, device=digits.device), digits.unsqueeze(1), alpha=blocks)
    states = {name: tensor.view(-1, columns) for name, tensor in state.items()}
    backend.step_rows(weight.view(-1, columns), states, ids.view(-1), grad.reshape(-1, columns), rule)
