"""Tables of equal width, pooling, type and strategy: one storage, one address space, one kernel call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stoker.base.timeline import spanned
from stoker.ops import AddressSpace, BackendName, Rounding, get_backend
from stoker.ops.reference import addresses, derive_key
from stoker.ops.space import slot_space
from stoker.optim import RowOptimizer
from stoker.tables.config import DTYPES, Slotted, Strategy, TableConfig
from stoker.tables.layers import SUM, Layers
from stoker.tables.lookups import Lookups
from stoker.tables.parts import by_examples, by_rows
from stoker.tables.replicas import Replicas
from stoker.tables.slots.slotted import TooFewSlots, make_slotted
from stoker.tables.storage import DeviceRows, Lease, Rows, Storage

__all__ = ["TableGroup"]


class TableGroup:
    """Forward, fused backward and canonical access for the tables of one group.

    Legend: B examples, P positions of this group's features, D columns.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        space: AddressSpace,
        *,
        optimizer: RowOptimizer,
        strategy: Strategy,
        seed: int,
        device: torch.device,
        backend: BackendName,
    ) -> None:
        first = tables[0]
        self.tables = tuple(tables)
        self.stored = self.tables  # what files hold, readable and writable by name
        self.dim = first.embedding_dim
        self.optimizer = optimizer
        self.strategy = strategy
        self.seed = seed
        self.backend_name = backend
        self.backend = get_backend(backend, device)
        self.space = space
        self.storage: Storage = self._make_storage(optimizer, device)
        self.version = 0  # changes of the rows, of whatever kind
        self.tick = 0  # row updates done; drives schedules, bias correction and rounding
        self.layers = Layers()  # norms of the tables, for optimizers that need them
        self.replicas: Replicas | None = None  # ranks whose rows are updated together

    def _make_storage(self, optimizer: RowOptimizer, device: torch.device) -> Storage:
        dtype = DTYPES[self.tables[0].dtype]
        state: dict[str, str] = dict(optimizer.state)
        if isinstance(self.strategy, Slotted):
            return make_slotted(self.strategy, self.tables, self.space, self.seed, state, device)
        storage = DeviceRows(self.space.num_rows, self.dim, dtype, state, device)
        for index, table in enumerate(self.tables):
            begin, stop = self.space.table_range(index)
            key = derive_key(self.seed, "init", table.name)
            self.backend.init_rows(storage.weight[begin:stop], key, 0, table.scale)
        return storage

    def acquire(self, lookups: Lookups) -> Lease | None:
        """The right to work on a batch's rows; None if it has too many for the slots, and is worked on in parts.

        Raises:
            IndexError: an id lies outside its table.
            TooFewSlots: the batch does not fit, and the user chose to refuse such batches.
        """
        try:
            return self.storage.acquire(*lookups)
        except TooFewSlots:
            if isinstance(self.strategy, Slotted) and self.strategy.spill == "parts":
                return None
            raise

    @spanned("lookup")
    def lookup(self, lookups: Lookups, lease: Lease | None) -> Tensor:
        """Pooled rows [B, P, D] float32."""
        if (lease := self._begin(lookups, lease)) is None:
            return by_examples(self._lookup, self.storage, lookups)
        try:
            return self._lookup(lease)
        finally:
            lease.end()

    def _begin(self, lookups: Lookups, lease: Lease | None) -> Lease | None:
        """The lease, or a new one where its rows may have left, begun; None as in :meth:`acquire`."""
        while lease is not None and not lease.begin():
            lease = self.acquire(lookups)
        return lease

    def _lookup(self, lease: Lease) -> Tensor:
        return self.backend.lookup(self.storage.weight, lease.space, lease.bags)

    @spanned("update")
    def update(self, lookups: Lookups, grad: Tensor, lease: Lease | None) -> None:
        """One optimizer step on every distinct row of a batch, given the gradient [B, P, D] of its lookup.

        The lease is over afterwards.
        """
        keys: tuple[int, ...] = ()
        if self.storage.weight.dtype == torch.bfloat16:
            keys = tuple(derive_key(self.seed, "round", table.name, self.tick) for table in self.tables)
        rule = self.optimizer.rule(self.tick)
        self.version += 1

        def work(lease: Lease) -> None:
            self.backend.update(
                self.storage.weight, self.storage.state, lease.space, lease.bags, grad, rule, lease.rounding(keys)
            )

        lease = self._begin(lookups, lease)
        if rule.kind == "lamb":
            self.layers.update(self, lookups, grad, lease, rule, keys)
        elif lease is None:
            by_rows(work, self.storage, lookups)
        else:
            work(lease)
        if lease is not None:
            lease.release(changed=True)
        self.tick += 1

    def weight_gradient(self, lookups: Lookups, grad: Tensor, lease: Lease | None) -> Tensor:
        """Gradient of the per-sample weights [L]."""

        def work(lease: Lease, grad: Tensor) -> Tensor:
            return self.backend.weight_gradient(self.storage.weight, lease.space, lease.bags, grad)

        if (lease := self._begin(lookups, lease)) is None:
            return by_examples(work, self.storage, lookups, grad)
        try:
            return work(lease, grad)
        finally:
            lease.end()

    def gradient_norm_squared(self, lookups: Lookups, grad: Tensor) -> float:
        """The sum of squares of the gradients of all distinct rows, duplicates summed first."""
        bags, space = lookups
        if not bags.ids.numel():
            return 0.0
        wanted = addresses(bags.ids, space.bases.to(bags.ids.device), bags.offsets)
        distinct, inverse = torch.unique(wanted, return_inverse=True)
        sums = torch.zeros(len(distinct), self.dim, device=grad.device)
        places = replace(bags, ids=inverse.view(bags.ids.shape))
        self.backend.update(sums, {}, slot_space(space, len(distinct)), places, grad, SUM, Rounding(()))
        return float(sums.double().square().sum())

    def set_optimizer(self, optimizer: RowOptimizer) -> None:
        """Change the optimizer; its state starts anew unless the kind stays the same."""
        same = optimizer.kind == self.optimizer.kind
        self.optimizer = optimizer
        if not same:
            self.layers.forget()
            self.storage.reset_state(dict(optimizer.state))
            self.tick = 0

    def table_index(self, name: str) -> int:
        """Position of a table in this group."""
        return self.space.names.index(name)

    def read(self, name: str, chunk_rows: int) -> Iterator[tuple[int, Rows]]:
        """The rows of one table in chunks of (first row within the table, rows)."""
        self.backend.synchronize()  # rows are leaving the device: a late complaint must come before them
        begin, stop = self.space.table_range(self.table_index(name))
        for start in range(begin, stop, chunk_rows):
            yield start - begin, self.storage.read(start, min(start + chunk_rows, stop))

    def write(self, name: str, start: int, rows: Rows) -> None:
        """Replace rows of one table, from its row ``start`` on."""
        begin, stop = self.space.table_range(self.table_index(name))
        if begin + start + len(rows.weight) > stop:
            raise IndexError(
                f"rows {start} to {start + len(rows.weight)} do not fit table {name!r} of {stop - begin} rows"
            )
        self.layers.forget()
        self.version += 1
        self.storage.write(begin + start, rows)

    def to(self, device: torch.device) -> None:
        """Move to ``device`` and take the back end that fits there."""
        self.backend = get_backend(self.backend_name, device)
        self.storage.to(device)
