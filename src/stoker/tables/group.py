"""Tables of equal width, pooling, type and strategy: one storage, one address space, one kernel call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stoker.ops import AddressSpace, BackendName, Bags, get_backend
from stoker.ops.reference import derive_key
from stoker.ops.space import make_space
from stoker.optim import RowOptimizer
from stoker.tables.config import DTYPES, Slotted, Strategy, TableConfig
from stoker.tables.layers import Layers
from stoker.tables.lease import Lease
from stoker.tables.parts import by_examples, by_rows
from stoker.tables.replicas import Replicas
from stoker.tables.slotted import TooFewSlots, make_slotted
from stoker.tables.storage import DeviceRows, Rows, Storage
from stoker.timeline import spanned

__all__ = ["TableGroup"]


class TableGroup:
    """Forward, fused backward and canonical access for the tables of one group.

    Legend: B examples, F features of this group, D columns.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        features: Sequence[str],
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
        self.mean = first.pooling == "mean"
        self.optimizer = optimizer
        self.strategy = strategy
        self.seed = seed
        self.backend_name = backend
        self.backend = get_backend(backend, device)
        self.space: AddressSpace = make_space(
            [table.name for table in tables],
            [table.num_embeddings for table in tables],
            [table.features for table in tables],
            features,
        )
        self.storage: Storage = self._make_storage(optimizer, device)
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

    def acquire(self, bags: Bags) -> Lease | None:
        """The right to work on a batch's rows; None if it has too many for the slots, and is worked on in parts.

        Raises:
            TooFewSlots: and the user chose to refuse such batches.
        """
        try:
            return self.storage.acquire(bags, self.space)
        except TooFewSlots:
            if isinstance(self.strategy, Slotted) and self.strategy.spill == "parts":
                return None
            raise

    @spanned("lookup")
    def lookup(self, bags: Bags, lease: Lease | None) -> Tensor:
        """Pooled rows [B, F, D] float32."""
        if lease is None:
            return by_examples(self._lookup, self.storage, self.space, bags)
        return self._lookup(lease)

    def _lookup(self, lease: Lease) -> Tensor:
        return self.backend.lookup(self.storage.weight, lease.space, lease.bags)

    @spanned("update")
    def update(self, bags: Bags, grad: Tensor, lease: Lease | None) -> None:
        """One optimizer step on every distinct row of ``bags``, given the gradient [B, F, D] of the lookup.

        The lease is over afterwards. With replicas the rows are those of all ranks' batches.
        """
        if self.replicas is not None:
            if lease is not None:
                lease.release(changed=False)
            bags, grad = self.replicas.joint(bags, grad)
            lease = self.acquire(bags)
        keys: tuple[int, ...] = ()
        if self.storage.weight.dtype == torch.bfloat16:
            keys = tuple(derive_key(self.seed, "round", table.name, self.tick) for table in self.tables)
        rule = self.optimizer.rule(self.tick)

        def work(lease: Lease) -> None:
            self.backend.update(
                self.storage.weight, self.storage.state, lease.space, lease.bags, grad, rule, lease.rounding(keys)
            )

        if lease is not None and lease.over:  # a second backward through the same graph
            lease = self.acquire(bags)
        if rule.kind == "lamb":
            self.layers.update(self, bags, grad, lease, rule, keys)
        elif lease is None:
            by_rows(work, self.storage, self.space, bags)
        else:
            work(lease)
        if lease is not None:
            lease.release(changed=True)
        self.tick += 1

    def weight_gradient(self, bags: Bags, grad: Tensor, lease: Lease | None) -> Tensor:
        """Gradient of the per-sample weights [L]."""

        def work(lease: Lease, grad: Tensor) -> Tensor:
            return self.backend.weight_gradient(self.storage.weight, lease.space, lease.bags, grad)

        if lease is None or lease.over:
            return by_examples(work, self.storage, self.space, bags, grad)
        return work(lease, grad)

    def set_optimizer(self, optimizer: RowOptimizer) -> None:
        """Change the optimizer; its state starts anew unless the kind stays the same."""
        same = optimizer.kind == self.optimizer.kind
        self.optimizer = optimizer
        self.layers.forget()
        if not same:
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
        self.storage.write(begin + start, rows)

    def to(self, device: torch.device) -> None:
        """Move to ``device`` and take the back end that fits there."""
        self.backend = get_backend(self.backend_name, device)
        self.storage.to(device)
