"""Which raw id has which row. Steps may run ahead of training, and the result does not depend on how far.

A lookup that trains is a step. Steps that a stage does ahead keep a journal. So the state after the last lookup
that trained remains available, to a checkpoint or a lookup that does not train, and steps whose batch never trains are
undone.

Legend: T tables that grow, L lookups of a batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.errors import CheckpointError, ConfigError
from stoker.dataset.spec import Grow
from stoker.ops import Bags
from stoker.ops.reference import bag_lengths, counter_bits, derive_key, uniform
from stoker.ops.space import HAVE_NUMBA
from stoker.tables.config import TableConfig
from stoker.tables.growing.state import (
    ADMIT,
    BASE,
    BORN,
    CHANGED,
    COUNT,
    FIRST,
    FREE,
    HEAP,
    KEY,
    LFU,
    LIVE,
    LRU,
    MAP,
    MASK,
    POLICY,
    REFUSED,
    SIZE,
    SWEEPS,
    TOP,
    TOUCHED,
    TTL,
    UNKNOWN,
    USED,
    Pools,
    Work,
)  # fmt: skip
from stoker.tables.lookups import equal_ids

Ints = npt.NDArray[np.int64]
T = TypeVar("T")
_POLICIES = {None: 0, "lru": LRU, "lfu": LFU}
_CHANGES = 7  # of entries that one lookup may cause: both pools free, evict and fill one, and a raw id moves
_LEAST = 64  # places of the smallest map
RAW_BYTES = 40  # of an entry in files: five numbers


class Newborn(NamedTuple):
    """Rows that are reset, by table and row."""

    tables: Ints  # [n] numbers of tables that grow
    rows: Ints  # [n]
    ids: Ints  # [n] raw ids


class InitialRows:
    """The rows that raw ids of tables start from: uniform, as all initial rows.

    A row depends on (seed, table name, raw id), not on when the id came or which row it got.
    """

    def __init__(self, tables: Sequence[TableConfig], seed: int) -> None:
        self._keys = np.array([derive_key(seed, "grow", table.name) for table in tables], np.int64)
        self._scales = np.array([table.scale for table in tables], np.float32)

    def make(self, tables: Ints, ids: Ints, dim: int) -> Tensor:
        """Return rows [n, D] float32 for the raw ids [n] of the tables of these numbers [n]."""
        if HAVE_NUMBA:
            rows = torch.empty(len(ids), dim, dtype=torch.float32, device="cpu")
            _kernels().born(self._keys, self._scales, tables, ids, rows.numpy())
            return rows
        keys, scales = torch.from_numpy(self._keys[tables]), torch.from_numpy(self._scales[tables])
        each = counter_bits(keys, torch.from_numpy(ids))
        return uniform(each.unsqueeze(1), torch.arange(dim, device="cpu")) * scales.unsqueeze(1)


@dataclass(slots=True, eq=False)
class Grown:
    """A lookup, and the rows of its raw ids."""

    raw: Bags  # as given
    time: int | None
    frozen: frozenset[str]  # tables that do not grow meanwhile
    call: Bags  # ids are rows
    births: Newborn
    refused: int = 0  # lookups that found no free row
    trains: bool = True  # else nothing grew
    changes: Ints | None = None  # the journal of a step that is ahead of training
    touches: Ints | None = None
    clock: tuple[int, ...] = ()  # before that step; after it while it is undone
    moved: bool = False  # whether it was done again, with other rows
    taken: bool = False  # whether its batch has trained, or never will
    mine: slice = field(default_factory=lambda: slice(None))  # of several ranks: the own ids in the batch of all
    said: int | None = None  # of several ranks: the time that this one has given

    @property
    def bytes(self) -> int:
        """Bytes of the journal."""
        return sum(0 if each is None else each.nbytes for each in (self.changes, self.touches))


_NOBODY = Newborn(*np.empty((3, 0), np.int64))


class GrowingIds:
    """The raw ids of all growing tables of one :class:`stoker.EmbeddingTables`."""

    def __init__(self, tables: Sequence[TableConfig], features: Sequence[str]) -> None:
        self.tables = [table for table in tables if table.grow is not None]
        self.names = [table.name for table in self.tables]
        self.features = len(features)
        owner = {name: number for number, table in enumerate(self.tables) for name in table.features}
        self._owner = np.array([owner.get(name, -1) for name in features], np.int64)  # [F]
        self.lock = threading.RLock()
        self._ahead: deque[Grown] = deque()  # steps whose batch has not trained, in order
        self._undone = False  # whether these are undone
        self.refused = 0  # lookups in training that found no free row
        #: returns what is called when rows may have got other raw ids
        self.loaded: Callable[[], Callable[[], None] | None] = lambda: None
        # Of the last batch without offsets, what _where returned; of the last step, its memory.
        self._places: tuple[int, tuple[npt.NDArray[np.int32], Ints, Ints, int]] | None = None
        self._buffers: dict[str, Ints] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all raw ids."""
        grows = [table.grow or Grow() for table in self.tables]
        sizes: list[int] = []
        for table, grow in zip(self.tables, grows, strict=True):
            waiting = table.num_embeddings if grow.candidates is None else grow.candidates
            sizes += [table.num_embeddings, waiting if grow.admit > 1 else 0]
        pools = np.zeros((len(sizes), 13), np.int64)
        pools[:, SIZE] = sizes
        pools[1:, BASE] = np.cumsum(sizes)[:-1]
        pools[::2, FIRST] = pools[::2, TOP] = 1  # row 0 is for raw ids without a row
        pools[:, FREE] = pools[:, HEAP] = UNKNOWN
        for column, name in ((TTL, "ttl"), (ADMIT, "admit")):
            values = [getattr(grow, name) for grow in grows]
            pools[:, column] = np.repeat([UNKNOWN if value is None else value for value in values], 2)
        pools[::2, POLICY] = [_POLICIES[grow.evict] for grow in grows]
        pools[1::2, POLICY] = LRU
        total = sum(sizes)
        evicts = total if pools[:, POLICY][pools[:, SIZE] > 0].any() else 1
        self._clock = np.zeros(3, np.int64)  # time now, steps, whether times are given
        self.base: int | None = None  # the step of the checkpoint since which changes count; None: all has changed
        self._ahead.clear()
        self._undone = False
        self._state = Pools(  # memory is taken as entries are used
            pools, np.zeros((total, 4), np.int64), np.zeros(0, np.int32), np.zeros(total, np.int32),
            np.zeros(evicts, np.int32), np.zeros(evicts, np.int32), np.zeros((evicts, 2), np.int64),
        )  # fmt: skip
        self._remap(np.zeros(len(sizes), np.int64))

    def _remap(self, more: Ints) -> None:
        """Make larger maps, if one lacks room for ``more`` [P] keys in a pool; they are at most a quarter full."""
        pools = self._state.pools
        places, wanted = pools[:, MASK] + 1, 4 * np.minimum(pools[:, LIVE] + more, pools[:, SIZE])
        if len(self._state.slots) and (wanted <= places).all():
            return
        least = np.maximum(np.where(wanted > places, wanted, 0), np.maximum(places, _LEAST))
        sizes = np.left_shift(1, np.ceil(np.log2(least)).astype(np.int64))
        pools[:, MASK] = sizes - 1
        pools[:, MAP] = np.cumsum(sizes) - sizes
        self._state = self._state._replace(slots=np.zeros(int(sizes.sum()), np.int32))
        _quietly(_kernels().make_maps, self._state)

    def ahead(self, call: Bags, time: int | None, frozen: frozenset[str], *, grows: bool) -> Grown:
        """Do the next step before its batch trains, for :meth:`take`; without ``grows``, :meth:`find` the rows."""
        with self.lock:
            if not grows:
                return Grown(call, time, frozen, self.find(call), _NOBODY, trains=False, clock=tuple(self.clock))
            self._show(committed=False)
            grown = self._step(call, time, frozen, keeps=True)
            self._ahead.append(grown)
            return grown

    def take(self, grown: Grown | None, call: Bags, time: int | None, frozen: frozenset[str]) -> tuple[Grown, bool]:
        """Do the step of a batch that trains now, or use what was done ahead; return it, and if ``grown``'s rows hold.

        Steps ahead of it are done again if another batch trains first.
        """
        with self.lock:
            fits = grown is not None and (grown.time, grown.frozen) == (time, frozen)
            if grown is not None and fits and self._ahead and self._ahead[0] is grown:
                self._show(committed=False)
                self._ahead.popleft()
                fits = not grown.moved
            else:
                own = () if grown is None else (grown,)
                found = self._between(own, lambda: self._step(call, time, frozen, keeps=False))
                fits = grown is not None and not grown.moved and _same(grown.call, found.call)
                grown = found
            self.refused += grown.refused
            grown.taken, grown.changes, grown.touches = True, None, None
            return grown, fits

    def forget(self, gone: Collection[Grown]) -> None:
        """Undo steps that were done ahead: their batches never train."""
        with self.lock:
            if any(each is one for each in self._ahead for one in gone):
                self._between(gone, lambda: None)
            for grown in gone:
                grown.taken = True

    def _between(self, gone: Collection[Grown], work: Callable[[], T]) -> T:
        """Return ``work()``, done before the steps ahead; do these again, but for those that are gone."""
        self._show(committed=True)
        kept = [each for each in self._ahead if all(each is not one for one in gone)]
        self._ahead.clear()
        self._undone = False
        found = work()
        for grown in gone:
            grown.taken = True
        for each in kept:
            again = self._step(each.raw, each.time, each.frozen, keeps=True)
            each.moved = each.moved or not _same(each.call, again.call)
            each.call, each.births, each.refused = again.call, again.births, again.refused
            each.changes, each.touches, each.clock = again.changes, again.touches, again.clock
            self._ahead.append(each)
        return found

    def find(self, call: Bags) -> Bags:
        """Return rows for raw ids, 0 for those without one, as after the last batch that trained."""
        with self.lock:
            self._show(committed=True)
            work = self._work(call, keeps=False)
            self._run(work, np.arange(len(self.tables)), grows=False)
            return call._replace(ids=torch.from_numpy(work.out).view(call.ids.shape))

    def _show(self, *, committed: bool) -> None:
        """Undo the steps ahead, or do them again."""
        if not self._ahead or self._undone == committed:
            self._undone = self._undone and bool(self._ahead)
            return
        for grown in reversed(self._ahead) if committed else self._ahead:
            assert grown.changes is not None
            assert grown.touches is not None
            _quietly(_kernels().swap, self._state, grown.changes, grown.touches, committed)
            clock = tuple(self._clock.tolist())
            self._clock[:] = grown.clock
            grown.clock = clock
        self._state.pools[:, FREE] = self._state.pools[:, HEAP] = UNKNOWN
        self._undone = committed

    def _tick(self, time: int | None) -> None:
        """Move the clock to the next step."""
        _, step, timed = self._clock.tolist()
        if step and bool(timed) != (time is not None):
            raise ConfigError(
                f"step {step:,} {'has no time, but those before it had' if timed else 'has a time, but none before it'}"
                f". Give a time with every lookup of tables that grow ({', '.join(self.names[:3])}), for a "
                "stage as the fourth value of lookups= or as an attribute of the batch; or give none."
            )
        self._clock[1] = step + 1
        self._clock[2] = time is not None
        self._clock[0] = step + 1 if time is None else max(time, int(self._clock[0]) if step else time)

    def _where(self, call: Bags) -> tuple[npt.NDArray[np.int32], Ints, Ints, int]:
        """Return the places of the lookups of each table, in order, and where those of each begin [T + 1].

        Then where the journal of each table begins, for changes and touches [T, 2], and the room for changes.
        """
        count = len(self.tables)
        if call.offsets is None:
            batch = call.ids.shape[0]
            if self._places is None or self._places[0] != batch:
                rows = np.arange(batch, dtype=np.int32)[:, None] * np.int32(self.features)
                own = [np.flatnonzero(self._owner == table).astype(np.int32) for table in range(count)]
                where = [(rows + columns).reshape(-1) for columns in own]
                starts = np.concatenate([[0], np.cumsum([len(each) for each in where])]).astype(np.int64)
                self._places = batch, (np.concatenate(where).astype(np.int32), starts, *self._journal(starts))
            return self._places[1]
        lengths = bag_lengths(call.offsets).numpy()
        table = np.repeat(np.tile(self._owner, len(lengths) // max(1, self.features)), lengths).astype(np.int16)
        order = np.argsort(table, kind="stable").astype(np.int32)
        starts = np.searchsorted(table[order], np.arange(count + 1)).astype(np.int64)
        return order, starts, *self._journal(starts)

    def _journal(self, starts: Ints) -> tuple[Ints, int]:
        room = _CHANGES * np.diff(starts) + (-(-self._state.pools[:, SIZE] // SWEEPS)).reshape(-1, 2).sum(1)
        return np.stack([np.cumsum(room) - room, starts[:-1]], 1), int(room.sum())

    def _work(self, call: Bags, *, keeps: bool) -> Work:
        """Return a step with memory for what it finds."""
        where, starts, firsts, room = self._where(call)
        size = int(starts[-1])
        births, made, unknown = (self._buffer(name, size) for name in ("births", "made", "unknown"))
        changes = self._buffer("changes", 6 * room * keeps).reshape(-1, 6)
        touches = self._buffer("touches", 5 * size * keeps).reshape(-1, 5)
        ids = _numpy(call.ids)
        if size - starts[0] < len(ids):  # tables that do not grow keep their ids
            out = ids.copy()
        else:  # rows of 32 bits are half the memory for all that reads them
            out = np.empty(len(ids), np.int32 if self._state.pools[:, SIZE].max() < 2**31 else np.int64)
        return Work(
            ids, where, starts, out, self._clock, births, made, unknown, changes, touches,
            firsts, keeps, np.zeros((len(firsts), 4), np.int64),
        )  # fmt: skip

    def _buffer(self, name: str, size: int) -> Ints:
        """Return memory of the last step: fresh pages, and NumPy's huge ones, take longer than a step."""
        if name not in self._buffers or len(self._buffers[name]) < size:
            self._buffers[name] = torch.empty(size, dtype=torch.int64, device="cpu").numpy()
        return self._buffers[name][:size]

    def _step(self, call: Bags, time: int | None, frozen: frozenset[str], *, keeps: bool) -> Grown:
        clock = tuple(self._clock.tolist())
        work = self._work(call, keeps=keeps)
        self._tick(time)
        self._remap(np.repeat(np.diff(work.starts), 2))
        idle = np.array([name in frozen for name in self.names])
        self._run(work, np.flatnonzero(~idle), grows=True)
        if idle.any():
            self._run(work, np.flatnonzero(idle), grows=False)
        counts, births = work.counts, _NOBODY
        if total := int(counts[:, BORN].sum()):
            begins = np.repeat(work.starts[:-1] - (counts[:, BORN].cumsum() - counts[:, BORN]), counts[:, BORN])
            tables = np.repeat(np.arange(len(counts)), counts[:, BORN])
            base = self._state.pools[2 * tables, BASE]
            places = base + work.births[begins + np.arange(total)]
            places.sort()  # the pools of the tables are in their order
            births = Newborn(tables, places - base, self._state.entries[places, KEY])
        rows = call._replace(ids=torch.from_numpy(work.out).view(call.ids.shape))
        grown = Grown(call, time, frozen, rows, births, int(counts[:, REFUSED].sum()), clock=clock)
        if keeps:
            grown.changes, grown.touches = (
                np.concatenate([each[a : a + n] for a, n in zip(first.tolist(), counts[:, k].tolist(), strict=True)])
                for each, first, k in (
                    (work.changes, work.firsts[:, 0], CHANGED), (work.touches, work.firsts[:, 1], TOUCHED)
                )
            )  # fmt: skip
        return grown

    def _run(self, work: Work, tables: Ints, *, grows: bool) -> None:
        if HAVE_NUMBA:
            _kernels().RUN.run(*work, *self._state, tables, grows, np.zeros(1, np.int64))
            return
        for table in tables.tolist():
            _quietly(_kernels().step_table if grows else _kernels().find_table, self._state, work, table)

    def raw_ids(self, name: str) -> Tensor:
        """Return the raw id of each row of a table [num_embeddings] int64, 0 for a row without one."""
        with self.lock:
            self._show(committed=True)
            base, size = self._state.pools[2 * self.names.index(name), [BASE, SIZE]].tolist()
            return torch.from_numpy(self._state.entries[base : base + size, KEY].copy())

    @property
    def clock(self) -> list[int]:
        """The time of the last step that trained, the number of these steps, and whether they had times."""
        with self.lock:
            self._show(committed=True)
            return self._clock.tolist()

    def read(
        self, name: str, *, waiting: bool = False, chunk: int = 2**20, since: int | None = None
    ) -> Iterator[Tensor]:
        """Yield the entries of a table as after the last batch that trained: [n, 5] int64 in order of the rows.

        An entry is a row, its raw id, its count, the step of its last use, and the time of that use. ``waiting``: those
        of raw ids that wait for admission; their rows are places in the list of these. ``since``: only entries that
        changed after this step, with those that were freed, whose raw id and count are 0.
        """
        with self.lock:
            self._show(committed=True)
            base, top = self._state.pools[2 * self.names.index(name) + waiting, [BASE, TOP]].tolist()
            yield from _chunks(self._state.entries[base : base + top], chunk, since)

    def load(self, clock: Sequence[int], chunks: Mapping[tuple[str, bool], Iterable[Tensor]]) -> None:
        """Replace everything by what :attr:`clock` and :meth:`read` returned, by table and ``waiting``.

        After a CheckpointError, for entries that are not those of such tables, the tables have no raw ids.
        """
        if (forget := self.loaded()) is not None:
            forget()
        with self.lock:
            self.clear()
            pools, entries = self._state.pools, self._state.entries
            for (name, waiting), parts in chunks.items():
                m = 2 * self.names.index(name) + waiting
                base, size, top = pools[m, [BASE, SIZE, FIRST]].tolist()
                for part in (each.numpy() for each in parts if len(each)):
                    rows, free = part[:, 0], part[:, 2] == 0
                    fine = part.shape[1:] == (5,) and rows[0] >= pools[m, FIRST] and rows[-1] < size
                    fine = fine and (np.diff(rows) > 0).all() and (part[:, 2] >= 0).all()
                    if not fine or (free != (part[:, 1] == 0)).any():
                        self.clear()
                        raise CheckpointError(
                            f"the raw ids of table {name!r} do not fit its {size:,} rows: rows must rise, and have a "
                            "raw id other than 0 and a count. The files are damaged, or of another table."
                        )
                    entries[base + rows] = part[:, 1:]
                    top = max(top, int(rows[-1]) + 1)
                pools[m, TOP] = top
                keys = entries[base : base + top, KEY][entries[base : base + top, COUNT] > 0]
                pools[m, LIVE] = len(keys)
                if len(np.unique(keys)) < len(keys):
                    self.clear()
                    raise CheckpointError(f"a raw id of table {name!r} has two rows. The files are damaged.")
            self._clock[:] = list(clock)
            self._state = self._state._replace(slots=np.zeros(0, np.int32))  # so that maps are made
            self._remap(np.zeros(len(pools), np.int64))


def _chunks(entries: Ints, chunk: int, since: int | None = None) -> Iterator[Tensor]:
    """Yield entries [n, 4] that are live, or changed after a step, with their rows: [.., 5], a chunk at a time."""
    for start in range(0, len(entries), chunk):
        part = entries[start : start + chunk]
        found = np.flatnonzero(part[:, COUNT] > 0 if since is None else part[:, USED] > since)
        if len(found):
            yield torch.from_numpy(np.concatenate([(found + start)[:, None], part[found]], 1))


def merged(parts: Iterable[Tensor], chunk: int) -> Iterator[Tensor]:
    """Yield what :meth:`GrowingIds.read` would, from parts of which later ones replace earlier ones."""
    known = np.zeros((0, 4), np.int64)
    for part in (each.numpy() for each in parts if len(each)):
        if (more := int(part[-1, 0]) + 1 - len(known)) > 0:
            known = np.concatenate([known, np.zeros((more, 4), np.int64)])
        known[part[:, 0]] = part[:, 1:]
    yield from _chunks(known, chunk)


def _same(one: Bags, other: Bags) -> bool:
    return equal_ids(one.ids, other.ids)


def _numpy(ids: Tensor) -> Ints:
    found: Ints = ids.contiguous().reshape(-1).to(torch.int64).numpy()
    return found


def _kernels() -> Any:
    """Return the kernels; without tables that grow, Numba is not imported for them."""
    from stoker.tables.growing import kernels

    return kernels


def _quietly(work: Any, *given: Any) -> None:
    """Call a kernel; without Numba its 64-bit numbers wrap, of which NumPy warns."""
    with np.errstate(over="ignore"):
        work(*given)


def growing_ids(tables: Sequence[TableConfig], features: Sequence[str]) -> GrowingIds | None:
    """Return the raw ids of the tables that grow; None if none does."""
    return GrowingIds(tables, features) if any(table.grow is not None for table in tables) else None
