"""Tables whose rows are divided among ranks: row i is with rank i % R, as its local row i // R.

A rank asks the owners for the distinct rows of its lookups, pools them itself, and sends the sums of their gradients
back. The owner adds up what all ranks send, by the tree over shards, and steps each row once. It may keep its rows
under any placement. Ids that fall by frequency divide rows and accesses evenly.

A stage asks some batches ahead (:meth:`DividedGroup.ask`), so an owner brings what other ranks will look up into fast
memory, too.

Legend: R ranks, U distinct rows of a lookup, D columns, T tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.ops import AddressSpace, Bags
from stoker.ops.distinct import distinct_rows
from stoker.ops.reference import addresses
from stoker.ops.space import make_space
from stoker.ops.tree import Node, tree_sum
from stoker.optim import RowOptimizer
from stoker.tables.config import Slotted, Strategy, TableConfig
from stoker.tables.group import TableGroup
from stoker.tables.lookups import Lookups, roomy_space
from stoker.tables.ranks.sums import packed, sends_names, unpacked
from stoker.tables.ranks.transport import Ranks, checksum
from stoker.tables.shards import joined_sums, row_gradients, shard_sums
from stoker.tables.slots.slotted import SlottedRows
from stoker.tables.storage import DeviceRows, Lease, Rows, Storage
from stoker.tables.stores.home import Initial


class OwnedGroup(TableGroup):
    """The rows of a divided group that this rank owns; arguments as for :class:`TableGroup`, with all rows."""

    def __init__(self, ranks: Ranks, tables: Sequence[TableConfig], *, strategy: Strategy, **given: Any) -> None:
        self.ranks, self.part = ranks, (ranks.rank, ranks.size)
        # A table of fewer rows than ranks has a row on each that is never used; it is 0.
        counts = {table.name: self._count(table.num_embeddings) for table in tables}
        own = [
            replace(
                table, num_embeddings=max(1, counts[table.name]),
                init_scale=table.scale if counts[table.name] else 0.0,
                padding_idx=None, features=(table.name,), grow=None,
            )
            for table in tables
        ]  # fmt: skip
        if isinstance(strategy, Slotted) and strategy.hot:
            strategy = replace(
                strategy, hot={name: max(min(1, rows), self._count(rows)) for name, rows in strategy.hot_rows.items()}
            )
        names = [table.name for table in tables]
        space = make_space(names, [table.num_embeddings for table in own], [[name] for name in names], names)
        super().__init__(own, space, strategy=strategy, **given)

    def _count(self, rows: int) -> int:
        """Return how many of the first ``rows`` rows of a table are with this rank."""
        rank, ranks = self.part
        return (rows - rank + ranks - 1) // ranks

    def _init_rows(self, out: Tensor, key: int, scale: float) -> None:
        rank, ranks = self.part
        step = max(1, 2**20 // (ranks * self.dim))
        for start in range(0, len(out), step):
            part = out[start : start + step]
            rows = part.new_empty(len(part) * ranks, self.dim)
            self.backend.init_rows(rows, key, start * ranks, scale)
            part.copy_(rows[rank::ranks])

    def _make_storage(self, optimizer: RowOptimizer, device: torch.device) -> Storage:
        storage = super()._make_storage(optimizer, device)
        if isinstance(storage, DeviceRows) and storage.weight.dtype == torch.bfloat16:  # whose random bits need them
            labels = Initial.of(self.tables, self.seed, self.part).label(np.arange(storage.num_rows))
            table, row = (torch.from_numpy(each).to(device) for each in labels)
            storage.labels = table, row
        return storage

    def _over_ranks(self, totals: list[int]) -> list[int]:
        return self.ranks.sums("add norms of tables", totals)

    def rows_at(self, wanted: Tensor, lease: Lease | None) -> Tensor:
        """Return the weights [n, D] of the addresses ``wanted`` [n], ascending; ``lease``: on them, if they fit."""
        storage = self.storage
        if lease is None or not lease.begin():
            assert isinstance(storage, SlottedRows)
            storage.stats.on_demand += len(wanted)
            return storage.gather(wanted.cpu().numpy()).weight
        try:
            if isinstance(storage, SlottedRows):
                storage.hand_out(lease)
            bags = lease.bags
            at = addresses(bags.ids, lease.space.on(bags.ids.device).bases, bags.offsets)
            return storage.weight[at]
        finally:
            lease.end()


class _Told(NamedTuple):
    """What the ranks told each other about a lookup."""

    lookups: Lookups  # of this rank, in the order of what it asked for
    counts: list[int]  # rows that it wants of each rank
    wanted: list[Tensor]  # rows that each rank wants of it
    notes: list[int]  # what each rank said with its question


@dataclass(eq=False)
class Asked:
    """The rows of a lookup: what this rank asked the owners for, and what all ranks asked it for."""

    bags: Bags  # of this rank, in the order of what it asked for
    space: AddressSpace  # of ``bags``
    rows: Tensor  # [n] addresses among its own rows that some rank wants, ascending
    places: list[Tensor]  # of each rank: the place in ``rows`` of what it wants
    owned: Lookups  # of ``rows``
    counts: list[int]  # rows that this rank wants of each
    notes: list[int]  # what each rank said with its question
    lease: Lease | None = None  # on ``rows``; None: nobody has brought them yet, or they do not fit
    version: int = -1
    values: Tensor | None = None  # [U, D] the rows of the lookup, as they were at that version

    def release(self) -> None:
        """End the lease of the owner."""
        if self.lease is not None:
            self.lease.release(changed=False)


class DividedGroup(TableGroup):
    """Tables of a group divided among ranks; arguments as for :class:`TableGroup`. All ranks call the same methods."""

    def __init__(self, ranks: Ranks, tables: Sequence[TableConfig], space: AddressSpace, **given: Any) -> None:
        self.ranks, self._given = ranks, given
        self._name = f"table {tables[0].name!r}"
        super().__init__(tables, space, **given)

    def _make_storage(self, optimizer: RowOptimizer, device: torch.device) -> Storage:
        self.own = OwnedGroup(self.ranks, self.tables, **self._given)
        return self.own.storage

    def set_optimizer(self, optimizer: RowOptimizer) -> None:
        same = optimizer.kind == self.optimizer.kind
        self.own.set_optimizer(optimizer)
        self.optimizer = optimizer
        self.tick = self.tick if same else 0

    # ---- addresses

    def _local(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the table of each address, and the row in it."""
        first = self.space.on(rows.device).first_row
        table = torch.searchsorted(first, rows, right=True) - 1
        return table, rows - first[table]

    def _owned(self, rows: Tensor) -> Tensor:
        """Return the addresses among the own rows of addresses that are with this rank."""
        table, local = self._local(rows)
        return self.own.space.on(rows.device).first_row[table] + local // self.ranks.size

    def _by_owner(self, rows: Tensor) -> tuple[Tensor, list[int]]:
        """Return the order of ``rows`` by owner, and how many each has."""
        owner = self._local(rows)[1] % self.ranks.size
        return torch.argsort(owner, stable=True), torch.bincount(owner, minlength=self.ranks.size).tolist()

    # ---- lookups

    def acquire(self, lookups: Lookups) -> Lease:
        found, size = list[Asked](), self.dim * self.storage.weight.itemsize
        with self.ranks.whole(f"look up {self._name}"):
            told = self._tell(f"ask for rows of {self._name}", lookups)

            def sent() -> list[Tensor]:
                found.append(self._heard(told))
                return self._sent(found[0])

            sizes = [size * len(each) for each in told.wanted]
            values = self.ranks.agreed(f"send rows of {self._name}", sent, sizes, [size * each for each in told.counts])
        found[0].values, found[0].version = torch.cat(values), self.version
        return self.lease_of(found[0], None)

    def lease_of(self, asked: Asked, lease: Lease | None) -> Lease:
        """Return the lease on what :meth:`ask` found; ``lease``: on its own rows, if they were brought."""
        if lease is not None:
            lease.use(asked.owned.bags)
        asked.lease = lease
        return Lease(asked.bags, asked.space, token=asked, give_back=lambda token, changed: token.release())

    def ask(self, lookups: Lookups, note: int = 0) -> Asked:
        """Tell the owners which rows a batch looks up, and hear which of the own rows all ranks look up, and a note."""
        told = self._tell(f"ask for rows ahead, {self._name}", lookups, note)
        with self.ranks.guard():
            return self._heard(told)

    def _tell(self, work: str, lookups: Lookups, note: int = 0) -> _Told:
        ranks, bags = self.ranks, lookups.bags
        with ranks.guard():
            found, which = distinct_rows(bags.cpu(), lookups.space)
            order, counts = self._by_owner(rows := torch.from_numpy(found))
            place = torch.empty_like(order)
            place[order] = torch.arange(len(order), device="cpu")
            ids = place[which.long()].to(torch.int32).to(bags.ids.device)
            wide = torch.int64 if self.space.num_rows >= 2**31 else torch.int32
            parts = list(rows[order].to(wide).split(counts))
        wanted, notes = ranks.exchange_noted(work, parts, [note])
        return _Told(Lookups(bags._replace(ids=ids), lookups.space), counts, wanted, [each for [each] in notes])

    def _heard(self, told: _Told) -> Asked:
        """Find out which of the own rows are wanted."""
        rows, inverse = torch.unique(torch.cat(told.wanted).long(), return_inverse=True)
        mine = self._owned(rows)
        places = list(inverse.split([len(each) for each in told.wanted]))
        owned = self.own.lookups_of(mine.to(self.storage.weight.device))
        space = roomy_space(told.lookups.space, sum(told.counts))
        return Asked(told.lookups.bags, space, mine, places, owned, told.counts, told.notes)

    def _rows_of(self, lease: Lease) -> tuple[Tensor, AddressSpace, Bags]:
        """Return the rows of a lookup [U, D], from their owners."""
        asked: Asked = lease.token
        if asked.values is None or asked.version != self.version:
            with self.ranks.guard():
                sent = self._sent(asked)
            asked.values = torch.cat(self.ranks.exchange(f"send rows of {self._name}", sent))
            asked.version = self.version
        return asked.values, lease.space, lease.bags

    def _sent(self, asked: Asked) -> list[Tensor]:
        """Return the own rows that each rank wants."""
        if asked.lease is None:
            asked.lease = self.own.acquire(asked.owned)
        rows = self.own.rows_at(asked.rows, asked.lease)
        return [rows[each.to(rows.device)] for each in asked.places]

    # ---- steps

    def step_together(
        self, ranks: Ranks, lookups: Lookups, grad: Tensor, tree: range, lease: Lease | None, said: Sequence[int]
    ) -> None:  # fmt: skip
        self.own.tick = self.tick
        if lease is None or lease.over or sends_names(ranks.size, len(tree)):
            self._step_named(ranks, lookups, grad, tree, said)
        else:
            self._step_asked(ranks, lookups, grad, len(tree) // ranks.size, lease.token, said)
        if lease is not None:
            lease.release(changed=True)
        self.version += 1
        self.tick += 1

    def _send(self, work: str, parts: Sequence[Tensor], said: Sequence[int]) -> list[Tensor]:
        """Do :meth:`Ranks.exchange` for a step, of which all ranks say the same."""
        found, notes = self.ranks.exchange_noted(f"{work}, {self._name}", parts, said)
        self.ranks.check_step(work, notes)
        return found

    def _step_named(
        self, ranks: Ranks, lookups: Lookups, grad: Tensor, tree: range, said: Sequence[int]
    ) -> None:  # fmt: skip
        shards = lookups.bags.shards
        assert shards is not None
        with ranks.guard():
            own = shard_sums(self.backend, lookups, grad, shards)
            order, counts = self._by_owner(own.sums.rows)
            parts = list(packed(own)[order].split(counts))
        found = torch.cat(self._send("send gradients", parts, said))
        with ranks.guard():
            sums, occurs = joined_sums(unpacked(found), tree)
            self.own.step(self._owned(sums.rows), sums.values, occurs)

    def _step_asked(
        self, ranks: Ranks, lookups: Lookups, grad: Tensor, size: int, asked: Asked, said: Sequence[int]
    ) -> None:  # fmt: skip
        """Step the rows of a lookup, of which each rank has a node of ``size`` shards: their names are not sent."""
        with ranks.guard():
            which, count = asked.bags.ids, sum(asked.counts)
            values = row_gradients(self.backend, count, lookups.space, lookups.bags, which, grad)
            occurs = torch.bincount(which.view(-1), minlength=count)
            sent = torch.cat([occurs.to(torch.int32).view(-1, 1), values.view(torch.int32)], dim=1)
        found = self._send("send gradients as asked", list(sent.split(asked.counts)), said)
        with ranks.guard():
            sums, total = dict[Node, Tensor](), torch.zeros(len(asked.rows), dtype=torch.int64, device="cpu")
            for rank, (places, data) in enumerate(zip(asked.places, found, strict=True)):
                # A sum is never -0, so 0 instead of a row that a rank has not looked up changes no bit.
                part = torch.zeros(len(asked.rows), self.dim, dtype=torch.float32, device="cpu")
                sums[Node(rank * size, size)] = part.index_copy_(0, places, data[:, 1:].view(torch.float32))
                total.index_add_(0, places, data[:, 0].long())
            whole = tree_sum(sums, Node(0, ranks.size * size))
            assert whole is not None
            self.own.step(asked.rows, whole, total)

    def start_anew(self, rows: Tensor, weight: Tensor) -> None:
        mine = self._local(rows)[1] % self.ranks.size == self.ranks.rank
        self.version += 1
        if bool(mine.any()):
            self.own.start_anew(self._owned(rows[mine]), weight[mine])

    # ---- contents

    def read(self, name: str, chunk_rows: int, to: int | None = None) -> Iterator[tuple[int, Rows]]:
        """Yield all rows of one table, on every rank or only on rank ``to``: all of them read together."""
        table = self.space.names.index(name)
        ranks = self.ranks.size
        total = self.space.rows[table]
        storage, begin, _ = self.own.place(name)
        chunk = -(-chunk_rows // ranks)
        for start in range(0, -(-total // ranks), chunk):
            with self.ranks.guard():
                stop = min(start + chunk, self.own._count(total))
                rows = storage.read(begin + start, begin + max(start, stop))
            first, last = start * ranks, min((start + chunk) * ranks, total)

            def joined(mine: Tensor, count: int = last - first) -> Tensor:
                if to is None:
                    found = self.ranks.gather(f"read {self._name}", mine.detach())
                else:
                    parts = [mine.detach() if rank == to else mine.detach()[:0] for rank in range(ranks)]
                    found = self.ranks.exchange(f"read {self._name}", parts)
                    if to != self.ranks.rank:
                        return mine[:0]
                whole = mine.new_empty(count, *mine.shape[1:])
                for place, each in enumerate(found):
                    whole[place::ranks] = each
                return whole

            yield first, rows.map(joined)

    def write(self, name: str, start: int, rows: Rows | Tensor) -> None:
        """Replace rows of one table: each rank is given all of them, and writes its own."""
        rank, ranks = self.own.part
        weight = rows.weight if isinstance(rows, Rows) else rows
        given = checksum(rows.tensors if isinstance(rows, Rows) else [rows], name, start)
        self.ranks.check_equal(f"what was written from row {start} of {name!r} on", given, f"write {self._name}")
        total = self.space.rows[self.space.names.index(name)]
        if start < 0 or start + len(weight) > total:
            raise IndexError(f"rows {start} to {start + len(weight)} do not fit table {name!r} of {total} rows")
        skip = (rank - start) % ranks
        own = rows[skip::ranks]
        self.version += 1
        if len(own.weight if isinstance(own, Rows) else own):
            self.own.write(name, (start + skip) // ranks, own)

    def spread(self, name: str, start: int, rows: Rows | None) -> None:
        """Do :meth:`write` for rows that only the first rank has: each gets its own. The others give None."""
        rank, ranks = self.own.part
        storage, begin, _ = self.own.place(name)
        given = storage.read(begin, begin) if rows is None else rows
        given = Rows(given.weight, {state: given.state[state] for state in sorted(given.state)})
        firsts = [(each - start) % ranks for each in range(ranks)]

        def own(whole: Tensor) -> Tensor:
            # A slice of one row may keep the stride of several, which view(dtype) refuses.
            parts = [whole[first::ranks].clone(memory_format=torch.contiguous_format) for first in firsts]
            return self.ranks.exchange(f"write {self._name}", parts)[0]

        mine = given.map(own)
        self.version += 1
        if len(mine.weight):
            self.own.write(name, (start + firsts[rank]) // ranks, mine)

    def to(self, device: torch.device) -> None:
        raise ConfigError(f"tables whose rows are divided among ranks must be on the CPU; {device} does not work yet.")
