"""Tables of equal width, pooling, type and strategy: one storage, one address space, one kernel call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stoker.ops import AddressSpace, BackendName, Bags, Rounding, get_backend
from stoker.ops.reference import derive_key
from stoker.ops.space import make_space
from stoker.optim import RowOptimizer
from stoker.tables.config import DTYPES, Strategy, TableConfig
from stoker.tables.storage import DeviceRows, Rows, Storage

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
        self.storage: Storage = DeviceRows(
            self.space.num_rows, self.dim, DTYPES[first.dtype], dict(optimizer.state), device
        )
        self.tick = 0  # row updates done; drives schedules, bias correction and rounding
        for index, table in enumerate(tables):
            begin, stop = self.space.table_range(index)
            key = derive_key(seed, "init", table.name)
            self.backend.init_rows(self.storage.weight[begin:stop], key, 0, table.scale)

    def lookup(self, bags: Bags) -> Tensor:
        """Pooled rows [B, F, D] float32."""
        return self.backend.lookup(self.storage.weight, self.space, bags)

    def update(self, bags: Bags, grad: Tensor) -> None:
        """One optimizer step on every distinct row of ``bags``, given the gradient [B, F, D] of the lookup."""
        keys: tuple[int, ...] = ()
        if self.storage.weight.dtype == torch.bfloat16:
            keys = tuple(derive_key(self.seed, "round", table.name, self.tick) for table in self.tables)
        self.backend.update(
            self.storage.weight,
            self.storage.state,
            self.space,
            bags,
            grad,
            self.optimizer.rule(self.tick),
            Rounding(keys),
        )
        self.tick += 1

    def weight_gradient(self, bags: Bags, grad: Tensor) -> Tensor:
        """Gradient of the per-sample weights [L]."""
        return self.backend.weight_gradient(self.storage.weight, self.space, bags, grad)

    def set_optimizer(self, optimizer: RowOptimizer) -> None:
        """Change the optimizer; its state starts anew unless the kind stays the same."""
        same = optimizer.kind == self.optimizer.kind
        self.optimizer = optimizer
        if not same:
            fresh = DeviceRows(
                0, self.dim, self.storage.weight.dtype, dict(optimizer.state), self.storage.weight.device
            )
            self.storage.state = {
                name: torch.zeros((self.storage.num_rows, *tensor.shape[1:]), device=tensor.device)
                for name, tensor in fresh.state.items()
            }
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
        self.storage.write(begin + start, rows)

    def to(self, device: torch.device) -> None:
        """Move to ``device`` and take the back end that fits there."""
        self.backend = get_backend(self.backend_name, device)
        self.storage.to(device)
