"""Tables of equal width, pooling, type and strategy: one storage, one address space, one kernel call.

A batch with more distinct rows than slots is chunked; the bits are the same. A lookup is chunked by examples: every bag
is in one chunk. An update is chunked by rows: each row still gets the sum over the whole batch, in order of occurrence,
and one step.

Where all rows are resident, several groups are one call of the kernels (:class:`Joint`): on a CPU a lookup or an update
of one group takes 60 microseconds of calls, on a GPU each group sorts its ids, and everywhere outputs are copied twice.

Legend: B examples, P positions of this group's features, L ids, U distinct rows, D columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.base.timeline import spanned
from stoker.ops import AddressSpace, BackendName, Bags, Part, Parts, Rounding, RowRule, get_backend
from stoker.ops.lamb import Touched, squares, touched, trust_ratios
from stoker.ops.reference import addresses, derive_key, update_rows
from stoker.ops.space import make_space
from stoker.ops.tree import Shards
from stoker.optim import RowOptimizer
from stoker.tables.changes import mark, mark_lookups
from stoker.tables.config import DTYPES, Mapped, Slotted, Strategy, TableConfig
from stoker.tables.exported import Exported
from stoker.tables.lookups import Lookups, Splitter, copy_ids, examples_of, keep_lookups
from stoker.tables.ranks.sums import shared_sums
from stoker.tables.ranks.transport import Ranks
from stoker.tables.shards import ShardSums, row_gradients, shard_sums, square_sum
from stoker.tables.slots.residency import Ints
from stoker.tables.slots.slotted import SlottedRows, TooFewSlots, make_slotted
from stoker.tables.storage import DeviceRows, Lease, MappedRows, Rows, Storage

_READ = 2**25  # bytes of a chunk of rows


class TableGroup:
    """Forward, fused backward and canonical access for the tables of one group.

    For optimizers that scale steps by the norm of a table (LAMB), the changes of touched rows update each table's sum
    of squares exactly (:mod:`stoker.ops.lamb`). After rows were replaced, it is computed again from all rows. So it
    need not be stored, and no placement, order of work or restart can change it.
    """

    part = (0, 1)  # the rows are every second number'th row of their tables, from the first number on

    def __init__(
        self, tables: Sequence[TableConfig], space: AddressSpace, *, optimizer: RowOptimizer, strategy: Strategy,
        seed: int, device: torch.device, backend: BackendName,
    ) -> None:  # fmt: skip
        first = tables[0]
        self.tables = tuple(tables)
        self.stored = self.tables  # the contents of files, readable and writable by name
        self.dim = first.embedding_dim
        self.optimizer = optimizer
        self.strategy = strategy
        self.seed = seed
        self.backend_name = backend
        self.backend = get_backend(backend, device)
        self.space = space
        self.storage: Storage = self._make_storage(optimizer, device)
        self.version = 0  # changes of the rows, of any kind
        self.tick = 0  # row updates done; drives schedules, bias correction and rounding
        self.marks: Tensor | None = None  # a byte a row if changes are tracked (:mod:`stoker.tables.changes`)
        self._squares: list[int] | None = None  # of each table, in units of 2^-80; None: not known

    def _make_storage(self, optimizer: RowOptimizer, device: torch.device) -> Storage:
        dtype = DTYPES[self.tables[0].dtype]
        state: dict[str, str] = dict(optimizer.state)
        if isinstance(self.strategy, Slotted):
            return make_slotted(self.strategy, self.tables, self.space, self.seed, state, device, self.part)
        if isinstance(self.strategy, Exported):
            return self.strategy.open(self.tables, self.space, device)
        rows = self.space.num_rows, self.dim, dtype, state, device
        at = self.strategy
        storage = MappedRows(*rows, at.path) if isinstance(at, Mapped) else DeviceRows(*rows)
        for index, table in enumerate(self.tables):
            begin, stop = self.space.table_range(index)
            key = derive_key(self.seed, "init", table.name)
            self._init_rows(storage.weight[begin:stop], key, table.scale)
        return storage

    def _init_rows(self, out: Tensor, key: int, scale: float) -> None:
        """Fill ``out`` with the initial rows of a table."""
        self.backend.init_rows(out, key, 0, scale)

    def acquire(self, lookups: Lookups) -> Lease | None:
        """Return a lease on a batch's rows; None if it has more than the slots hold, and must be chunked.

        Raises:
            IndexError: an id is outside its table.
            TooFewSlots: the batch does not fit, and ``spill`` is "refuse".
        """
        self.storage.check_process()
        try:
            return self.storage.acquire(*lookups)
        except TooFewSlots:
            if self._chunks:
                return None
            raise

    @property
    def _chunks(self) -> bool:
        """Whether batches with too many rows are chunked."""
        return isinstance(self.strategy, Slotted) and self.strategy.spill == "parts"

    @spanned("lookup")
    def lookup(self, lookups: Lookups, lease: Lease | None) -> Tensor:
        """Return pooled rows [B, P, D] float32."""
        return self._read(self.backend.lookup, lookups, lease)

    def _read(self, work: Callable[..., Tensor], lookups: Lookups, lease: Lease | None, *each: Tensor) -> Tensor:
        """Return ``work(weight, space, bags, *each)``, which changes no row; ``each`` has a first dimension of B."""
        if (lease := self._begin(lookups, lease)) is None:
            return self._by_examples(work, lookups, *each)
        try:
            return work(*self._rows_of(lease), *each)
        finally:
            lease.end()

    def _rows_of(self, lease: Lease) -> tuple[Tensor, AddressSpace, Bags]:
        """Return the weights of a lease's rows, and their space and bags there, for a kernel that reads them."""
        return self.storage.weight, lease.space, lease.bags

    def _begin(self, lookups: Lookups, lease: Lease | None) -> Lease | None:
        """Begin the lease, or a new one if its rows may have left, and return it; None as in :meth:`acquire`."""
        while lease is not None and not lease.begin():
            lease = self.acquire(lookups)
        return lease

    @spanned("update")
    def update(self, lookups: Lookups, grad: Tensor, lease: Lease | None) -> None:
        """Take one optimizer step on every distinct row of a batch, given the gradient [B, P, D] of its lookup.

        This ends the lease.
        """
        keys = self.rounding_keys()
        rule = self.optimizer.rule(self.tick)
        lease, layers = self._begin(lookups, lease), rule.definition.scope == "table"
        if lease is None and layers:
            found = shard_sums(self.backend, lookups, grad, lookups.bags.shards)
            self.step(found.sums.rows, found.sums.values, found.counts)
            return
        self._note_change(lookups)

        def work(lease: Lease) -> None:
            self.backend.update(
                self.storage.weight, self.storage.state, lease.space, lease.bags, grad, rule, lease.rounding(keys)
            )

        if lease is None:
            self._by_rows(work, lookups)
        else:
            if lookups.bags.shards is not None:
                lease.bags = lease.bags._replace(shards=lookups.bags.shards)
            lease.touched = True
            if layers:
                self._update_layers(grad, lease, rule, keys)
            else:
                work(lease)
            lease.release(changed=True)
        self.tick += 1

    def _note_change(self, changed: Lookups | Tensor | slice) -> None:
        """Count a change of the rows, and mark those of some lookups, addresses [n] or a slice of addresses."""
        self.storage.check_process()
        self.version += 1
        if self.marks is None:
            return
        if isinstance(changed, slice):
            self.marks[changed] = 1
        elif isinstance(changed, Lookups):
            mark_lookups(self.marks, *changed)
        else:
            mark(self.marks, changed)

    def step_together(
        self, ranks: Ranks, lookups: Lookups, grad: Tensor, tree: range, lease: Lease | None, said: Sequence[int]
    ) -> None:  # fmt: skip
        """Do :meth:`update` for the batch of all ranks, of which this one has ``lookups``, with their shards.

        Args:
            ranks: all call this.
            lookups: as for :meth:`update`.
            grad: [B, P, D].
            tree: the shards of all ranks.
            lease: as for :meth:`update`.
            said: what this rank says of its step (:func:`stoker.tables.ranks.alike.said`).
        """
        found = self.sums_of(ranks, lookups, grad, tree, said)
        self.step(found.sums.rows, found.sums.values, found.counts)
        if lease is not None:  # which a stage made for the rows of all ranks
            lease.release(changed=True)

    def sums_of(
        self, ranks: Ranks, lookups: Lookups, grad: Tensor, tree: range, said: Sequence[int]
    ) -> ShardSums:  # fmt: skip
        """Return the sum of the gradient of each row over the examples of all ranks; arguments of step_together."""
        shards = lookups.bags.shards
        assert shards is not None
        with ranks.guard():
            own = shard_sums(self.backend, lookups, grad, shards)
        return shared_sums(ranks, own, tree, f"table {self.tables[0].name!r}", said)

    @spanned("update")
    def step(self, rows: Tensor, grads: Tensor, counts: Tensor) -> None:
        """Take one optimizer step on distinct rows, given the sums of their gradients: :meth:`update` for others' sums.

        Args:
            rows: [U] int64 addresses, ascending.
            grads: [U, D] float32, which may be overwritten.
            counts: [U] int64, how often each row occurs in the batch, for CowClip.

        Raises:
            TooFewSlots: the rows do not fit, and ``spill`` is "refuse".
        """
        keys, rule = self.rounding_keys(), self.optimizer.rule(self.tick)
        self._note_change(rows)
        if rule.definition.scope == "table":
            self._step_layers(rows, grads, counts, rule, keys)
        else:
            for part, lease, at in self._row_blocks(rows):
                weight, state = self.storage.weight, self.storage.state
                if rule.counts or weight.dtype != torch.float32:
                    bits = lease.rounding(keys).bits(at, self.dim, lease.space) if keys else None
                    update_rows(weight, state, at, grads[part], rule, rounding=bits, counts=counts[part])
                else:
                    self.backend.step_rows(weight, state, at, grads[part], rule)
        self.tick += 1

    def _step_layers(self, rows: Tensor, grads: Tensor, counts: Tensor, rule: RowRule, keys: tuple[int, ...]) -> None:
        """Do :meth:`step` for LAMB, in the passes of :meth:`_update_layers`."""
        table = torch.searchsorted(self.space.on(rows.device).first_row, rows, right=True) - 1
        squares_of, storage, backend = self.squares(), self.storage, self.backend
        lengths, directions = [0] * len(squares_of), torch.empty_like(grads)
        try:
            for part, _, at in self._row_blocks(rows):
                found = Touched(at, table[part], len(squares_of), torch.arange(len(at), device="cpu"), counts[part])
                directions[part], more = backend.lamb_direct(storage.weight, storage.state, found, grads[part], rule)
                _add(lengths, more)
            ratios = trust_ratios(self._over_ranks(squares_of), self._over_ranks(lengths), rule)
            for part, lease, at in self._row_blocks(rows):
                found = Touched(at, table[part], len(squares_of), torch.arange(len(at), device="cpu"))
                rounding = lease.rounding(keys)
                _add(squares_of, backend.lamb_move(
                    storage.weight, found, directions[part], ratios, rule, rounding, lease.space
                ))  # fmt: skip
        except BaseException:
            self._squares = None
            raise

    def _over_ranks(self, totals: list[int]) -> list[int]:
        """Return the sums over the rows of all ranks."""
        return totals

    @cached_property
    def _by_table(self) -> AddressSpace:
        """Return the space in which each table is a feature."""
        names = self.space.names
        return make_space(names, self.space.rows, [[name] for name in names], names)

    def _row_blocks(self, rows: Tensor) -> Iterator[tuple[slice, Lease, Tensor]]:
        """Yield blocks of distinct ``rows`` [U] that fit: which, a lease on them, and where they are in memory."""
        if isinstance(self.storage, DeviceRows):  # a row is where its address says
            yield slice(None), self.storage.acquire(Bags(rows), self._by_table), rows
            return
        blocks = self._blocks(
            self._by_table, len(rows), len(rows), lambda start, stop: self.lookups_of(rows[start:stop]).bags
        )
        for start, stop, lease in blocks:
            lease.touched = True
            yield slice(start, stop), lease, lease.bags.ids.to(torch.int64).reshape(-1)  # slots, of all tables
            lease.release(changed=True)

    def lookups_of(self, rows: Tensor) -> Lookups:
        """Return the lookups of distinct ``rows`` [U], ascending."""
        if rows.device.type == "cpu":  # of few rows torch takes several times as long
            at, begins = rows.numpy(), self._by_table.first_row
            ends = np.searchsorted(at, begins)
            own = torch.from_numpy(at - np.repeat(begins[:-1], np.diff(ends)))
            return Lookups(Bags(own, torch.from_numpy(ends)), self._by_table)
        first = self._by_table.on(rows.device).first_row
        offsets = torch.searchsorted(rows, first)
        local = rows - torch.repeat_interleave(first[:-1], offsets.diff(), output_size=len(rows))
        return Lookups(Bags(local, offsets), self._by_table)

    def rounding_keys(self) -> tuple[int, ...]:
        """Return the keys of the random bits of the next update, one a table; () if rows are not bfloat16."""
        if self.storage.weight.dtype != torch.bfloat16:
            return ()
        return tuple(derive_key(self.seed, "round", table.name, self.tick) for table in self.tables)

    def weight_gradient(self, lookups: Lookups, grad: Tensor, lease: Lease | None) -> Tensor:
        """Return the gradient of the per-sample weights [L]."""
        return self._read(self.backend.weight_gradient, lookups, lease, grad)

    def gradient_norm_squared(self, lookups: Lookups, grad: Tensor) -> float:
        """Return the sum of squares of the gradients of all distinct rows, duplicates summed first."""
        bags, space = lookups
        if not bags.ids.numel():
            return 0.0
        wanted = addresses(bags.ids, space.bases.to(bags.ids.device), bags.offsets)
        distinct, inverse = torch.unique(wanted, return_inverse=True)  # a norm needs no counts
        sums = row_gradients(self.backend, len(distinct), space, bags, inverse.view(bags.ids.shape), grad)
        return square_sum(sums, bags.shards)

    def norm_squared(self, found: ShardSums) -> float:
        """Return :meth:`gradient_norm_squared` of gradients that are summed already."""
        return square_sum(found.sums.values, Shards((0,)))

    def start_anew(self, rows: Tensor, weight: Tensor) -> None:
        """Replace distinct rows [U], ascending, by initial ones [U, D] float32, with optimizer state of zero.

        Raises:
            TooFewSlots: the rows do not fit, and ``spill`` is "refuse".
        """
        self._note_change(rows)
        for part, _, at in self._row_blocks(rows):
            self.storage.weight[at] = weight[part].to(self.storage.weight)
            for state in self.storage.state.values():
                state[at] = 0.0

    def check_optimizer(self, optimizer: RowOptimizer) -> None:
        """Raise an error for an optimizer that the rows cannot change to."""
        if optimizer.kind != self.optimizer.kind and isinstance(self.storage, SlottedRows):
            self.storage.reset_state(dict(optimizer.state))  # which refuses

    def set_optimizer(self, optimizer: RowOptimizer) -> None:
        """Change the optimizer; its state is reset unless the kind remains the same."""
        same = optimizer.kind == self.optimizer.kind
        self.optimizer = optimizer
        if not same:
            self._squares = None
            self._note_change(slice(None))
            self.storage.reset_state(dict(optimizer.state))
            self.tick = 0

    def squares(self) -> list[int]:
        """Return the sum of squares of each table, in units of 2^-80."""
        if self._squares is None:
            chunk = max(1, _READ // (4 * self.dim))
            self._squares = [
                sum(squares(rows.weight)[0] for _, rows in self.read(table.name, chunk)) for table in self.tables
            ]
        return self._squares

    def _update_layers(self, grad: Tensor, lease: Lease, rule: RowRule, keys: tuple[int, ...]) -> None:
        """Take one step of LAMB: a first pass updates moments and measures norms, a second updates rows."""
        self.backend.synchronize()  # a device that reports a bad id late must do so before its rows are addressed
        squares_of, storage, backend = self.squares(), self.storage, self.backend
        try:
            found = touched(lease.bags, lease.space)
            summed = row_gradients(backend, len(found.rows), lease.space, lease.bags, found.which.to(torch.int32), grad)
            directions, lengths = backend.lamb_direct(storage.weight, storage.state, found, summed, rule)
            ratios, rounding = trust_ratios(squares_of, lengths, rule), lease.rounding(keys)
            _add(squares_of, backend.lamb_move(storage.weight, found, directions, ratios, rule, rounding, lease.space))
        except BaseException:
            self._squares = None
            raise

    def _by_examples(self, work: Callable[..., Tensor], lookups: Lookups, *each: Tensor) -> Tensor:
        """Join what :meth:`_read` returns for blocks of examples that fit."""
        bags, features = lookups.bags, len(lookups.space.features)
        batch = bags.batch_size(features)
        done: list[Tensor] = []
        blocks = self._blocks(lookups.space, batch, batch, lambda start, stop: examples_of(bags, features, start, stop))
        for start, stop, lease in blocks:
            done.append(work(*self._rows_of(lease), *(tensor[start:stop] for tensor in each)).clone())
            lease.release(changed=False)
        return torch.cat(done)

    def _by_rows(self, work: Callable[[Lease], object], lookups: Lookups) -> None:
        """Call ``work(lease)`` for blocks of distinct rows that fit, each row with all its lookups, in order."""
        storage = self.storage
        assert isinstance(storage, SlottedRows)
        bags = lookups.bags.cpu()
        rows, which, _ = storage.distinct(bags, lookups.space)
        number = which.reshape(-1).numpy()

        def lookups_of(start: int, stop: int) -> Bags:
            # Pinned rows, which have no number, go with the first block.
            return keep_lookups(bags, torch.from_numpy((number < stop) & (number >= start) if start else number < stop))

        size = max(1, min(len(rows), storage.available))
        for _, _, lease in self._blocks(lookups.space, len(rows), size, lookups_of):
            lease.touched = True
            work(lease)
            lease.release(changed=True)

    def _blocks(
        self, space: AddressSpace, count: int, size: int, bags_of: Callable[[int, int], Bags]
    ) -> Iterator[tuple[int, int, Lease]]:
        """Yield (start, stop, lease on the rows of ``bags_of(start, stop)``, begun) for blocks of 0..count that fit."""
        start = 0
        while start < count:
            stop = min(start + size, count)
            try:
                lease = self.storage.acquire(bags_of(start, stop), space)
            except TooFewSlots as error:
                if not self._chunks:
                    raise
                if size == 1:
                    raise TooFewSlots(error.needed, error.slots, error.hot, spill=True) from None
                size = max(1, min(stop - start, 2 * (stop - start) * error.slots // error.needed) // 2)
                continue
            if lease.begin():  # else another thread took its slots
                yield start, stop, lease
                start = stop

    def place(self, name: str) -> tuple[Storage, int, int]:
        """Return where a table is: its storage, its first row there, and the row after its last."""
        self.storage.check_process()
        return self.storage, *self.space.table_range(self.space.names.index(name))

    def read(self, name: str, chunk_rows: int) -> Iterator[tuple[int, Rows]]:
        """Yield the rows of one table in chunks of (first row within the table, rows)."""
        self.backend.synchronize()  # before rows leave the device, it must report late errors
        storage, begin, stop = self.place(name)
        for start in range(begin, stop, chunk_rows):
            yield start - begin, storage.read(start, min(start + chunk_rows, stop))

    def write(self, name: str, start: int, rows: Rows | Tensor) -> None:
        """Replace rows of one table, from its row ``start`` on; weights alone keep the state."""
        storage, begin, stop = self.place(name)
        weight = rows.weight if isinstance(rows, Rows) else rows
        if start < 0 or begin + start + len(weight) > stop:
            raise IndexError(f"rows {start} to {start + len(weight)} do not fit table {name!r} of {stop - begin} rows")
        if not isinstance(rows, Rows):
            if weight.shape[1:] != (storage.weight.shape[1],):
                raise ValueError(f"weights [n, {storage.weight.shape[1]}] are expected, not {list(weight.shape)}.")
            rows = storage.read(begin + start, begin + start + len(weight))
            rows = Rows(weight.to(rows.weight.dtype), rows.state)
        self._squares = None
        self._note_change(slice(begin + start, begin + start + len(weight)))
        storage.write(begin + start, rows)

    def gather(self, name: str, rows: Ints) -> Rows:
        """Copy ``rows`` [n] of one table from wherever they are."""
        self.backend.synchronize()
        storage, begin, _ = self.place(name)
        return storage.gather(begin + rows)

    def scatter(self, name: str, rows: Ints, values: Rows) -> None:
        """Replace distinct ``rows`` [n] of one table, with their state."""
        storage, begin, _ = self.place(name)
        self._squares = None
        self._note_change(torch.from_numpy(begin + rows))
        storage.scatter(begin + rows, values)

    def replace(self, rows: Tensor, values: Rows) -> None:
        """Replace the rows at distinct addresses ``rows`` [n] int64, ascending, with their state."""
        self._squares = None
        self._note_change(rows)
        self.storage.scatter(rows.numpy(), values)

    def to(self, device: torch.device) -> None:
        """Move to ``device`` and take the back end that fits there."""
        self.backend = get_backend(self.backend_name, device)
        self.storage.to(device)


def _add(totals: list[int], more: Sequence[int]) -> None:
    for index, value in enumerate(more):
        totals[index] += value


class Joint:
    """Lookups and updates of all groups at once."""

    def __init__(self, groups: Sequence[TableGroup], splitter: Splitter) -> None:
        self.groups = groups
        self.marks: Tensor | None = None  # of the rows of all groups, as :attr:`TableGroup.marks`
        self._output_shape: Callable[[int], tuple[Any, ...]] = splitter.output_shape
        tables = [table for group in groups for table in group.tables]
        self.space = make_space(
            [table.name for table in tables], [table.num_embeddings for table in tables],
            [table.features for table in tables], splitter.features,
        )  # fmt: skip
        widths = {feature: table.embedding_dim for table in tables for feature in table.features}
        starts = list(itertools.accumulate((widths[name] for name in splitter.features), initial=0))
        columns = [tuple(map(splitter.features.index, each.features)) for each in splitter.groups]
        self._places = [(mine, tuple(starts[column] for column in mine)) for mine in columns]
        self._means = [each.pooling == "mean" for each in splitter.groups]
        self.locate()

    def locate(self) -> None:
        """Find the rows and states again, after one of them was replaced."""
        self._parts = Parts(
            Part(group.storage.weight, group.storage.state, group.space, *places, mean)
            for group, places, mean in zip(self.groups, self._places, self._means, strict=True)
        )

    def rule(self, sharded: bool) -> RowRule | None:
        """Return the rule of a step; None if a row's depends on others, or the kernels do not know it, ``sharded``."""
        first = self.groups[0]
        rule = first.optimizer.rule(first.tick)
        return rule if rule.definition.scope == "row" and first.backend.steps(rule, sharded=sharded) else None

    @staticmethod
    def kept(call: Bags) -> Bags:
        """Copy what the caller may change between a lookup, which has brought it into a cache, and its backward."""
        offsets = None if call.offsets is None else copy_ids(call.offsets)
        weights = None if call.weights is None else call.weights.clone()
        return Bags(copy_ids(call.ids), offsets, weights, call.mean)

    @spanned("lookup")
    def lookup(self, call: Bags) -> Tensor:
        """Return the pooled rows [B, P, D], or [B, sum of D], of a call that the splitter has checked."""
        for group in self.groups:
            group.storage.check_process()
        shape = self._output_shape(call.batch_size(len(self.space.features)))
        return self.groups[0].backend.lookup_parts(self._parts, self.space, call, shape)

    @spanned("update")
    def update(self, lookups: Lookups, grad: Tensor, rule: RowRule) -> None:
        """Take one optimizer step on every distinct row of a call, given the gradient of :meth:`lookup`'s result."""
        first = self.groups[0]
        keys = first.rounding_keys()  # (): no group rounds
        if keys:
            keys = tuple(key for group in self.groups for key in group.rounding_keys())
        for group in self.groups:
            group.storage.check_process()
            group.version += 1
        if self.marks is not None:
            mark_lookups(self.marks, *lookups)
        first.backend.update_parts(self._parts, lookups.space, lookups.bags, grad, rule, Rounding(keys))


def joint_of(groups: Sequence[TableGroup], splitter: Splitter) -> Joint | None:
    """Return the groups as one; None for one group, and if one of them needs separate work."""
    plain = len(groups) > 1 and all(
        type(group) is TableGroup and isinstance(group.storage, DeviceRows) and group.backend.joins
        and lookups.is_plain and group.storage.weight.dtype == groups[0].storage.weight.dtype
        for group, lookups in zip(groups, splitter.groups, strict=True)
    )  # fmt: skip
    return Joint(groups, splitter) if plain else None
