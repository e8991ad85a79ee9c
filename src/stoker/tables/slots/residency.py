"""Which row is in which slot, and which is evicted: only integers, so that plans can be printed, replayed and tested.

N rows of a backing store share C slots. Batches are announced by their distinct rows before they are planned; a plan
makes one batch resident. The row whose next use is farthest is evicted. The next use is its first announced use;
without one, the *hint* that came with its last announced use; without a hint, it is farther than any other. Among
equals the rarest is evicted first: ids are ordered by frequency, so that is the larger row number within its table,
then the later table (Belady's rule within the window; cDLRM section 4, BagPipe; with exact hints Belady's rule itself,
1966).

Legend: N rows, C slots, U distinct rows of a batch, T tables.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import nlargest

import numpy as np
import numpy.typing as npt

from stoker.base.errors import ConfigError

Ints = npt.NDArray[np.int64]
Hints = npt.NDArray[np.int32]
Places = npt.NDArray[np.int32]
NEVER = 2**62  # step of the next use of a row without a known one
FARTHEST = 2**24  # largest hint in batches; later uses are equally far
#: After this many plans every writeback of a plan has landed; links guarantee it.
LANDED = 8
#: Largest share of the directory of rows that has records. At most half full, it is searched in a cache line or two: a
#: plan takes 0.6 to 0.8 of the time, for 1.5 times the bytes. So where these bytes are few (rows in flight), or not
#: those of slots (on a GPU), it is roomy.
FULL, ROOMY = 0.75, 0.5


def known_bytes(distinct: float, lookups: float) -> float:
    """Return the bytes that a batch takes while it waits: its rows, their entries in the window, and its lookups."""
    return 24 * distinct + 12 * lookups


def check_hints(rows: Ints, upcoming: Hints | None) -> None:
    """Raise ConfigError if there are not as many hints as rows."""
    if upcoming is not None and len(upcoming) != len(rows):
        raise ConfigError(
            f"next uses of {len(upcoming):,} rows are known for a batch that has {len(rows):,}: the stream did not "
            "give the same batches twice. Leave epoch_lookahead out, or give a stream that repeats itself."
        )


@dataclass(frozen=True, kw_only=True)
class SlotPlan:
    """The moves that make one batch resident. Evictions come before fetches; each row occurs once."""

    number: int  # links run plans in this order
    slots: Ints  # [U] slot of each distinct row of the batch
    fetch_rows: Ints  # [F] rows from the backing store to slots
    fetch_slots: Ints  # [F]
    evict_rows: Ints  # [E] changed rows to write back
    evict_slots: Ints  # [E]
    fence: int  # the fetch must wait until the writebacks of this plan and earlier ones have landed; -1: none

    def __repr__(self) -> str:
        counts = f"{len(self.slots):,} rows, {len(self.fetch_rows):,} fetched, {len(self.evict_rows):,} written back"
        return f"SlotPlan({self.number}: {counts}, fence {self.fence})"

    @property
    def hits(self) -> int:
        """Rows that were in their slots already."""
        return len(self.slots) - len(self.fetch_rows)


@dataclass
class _RowRecord:
    """The reference's record of a row in a slot or in the window."""

    slot: int = -1
    uses: deque[tuple[int, int]] = field(default_factory=deque)  # announced steps, rising, each with its hint
    hint: int = NEVER  # step of the next use after the announced ones, while the row is in its slot
    evicted_by: int = -1  # the plan that evicted it after a change, while the writeback may be in flight

    @property
    def next_use(self) -> int:
        return self.uses[0][0] if self.uses else self.hint


class Residency:
    """The page table of one group and its rule of eviction.

    A batch goes through ``announce`` (its rows are known), ``plan`` (they get slots) and ``release`` (its update is
    done; rows of no other batch in flight may be evicted). Batches are planned in the order of their announcement.

    This class is in plain Python: the definition, which runs where Numba is missing.
    :class:`stoker.tables.slots.fast_residency.FastResidency` makes the same plans.

    Args:
        first_row: [T + 1] first address of each table; the last is N.
        slots: C.
        transient: every row is evicted at the first plan after its last use in flight, whatever batches are announced,
            in the order in which slots were released.
    """

    def __init__(self, first_row: Ints, slots: int, *, transient: bool) -> None:
        self.first_row, self.slots, self.transient = first_row, slots, transient
        self.load = ROOMY if transient else FULL
        self.landing = LANDED  # plans until the writebacks of a plan have landed; 0: before its own fetches
        self.plans = 0  # made so far
        self.row_in_slot: Ints = np.full(slots, -1, np.int64)
        self._window: deque[tuple[int, int, Ints]] = deque()  # step, rows announced before it, rows
        self._step = self._entries = 0  # batches and rows announced so far
        self._leaving: deque[tuple[int, Ints]] = deque()  # plan, rows that it evicted
        self._hinted = False  # whether there were hints since the last ``cancel``
        self._rows_since = self._batches_since = 0  # announced since the last search for outdated hints
        self._prepare()

    def _prepare(self) -> None:
        """Create the records of rows and slots."""
        self._rows: dict[int, _RowRecord] = {}
        self._unused = list(range(self.slots - 1, -1, -1))
        self._users = [0] * self.slots
        self._changed: set[int] = set()
        self._parked: dict[int, None] = {}  # slots that may be given up, in order of their release

    def set_up(self, landing: int, *, roomy: bool = False) -> None:
        """Set after how many plans writebacks have landed, and whether memory is roomy, before the first plan."""
        self.landing = landing
        if roomy:
            self.load = ROOMY

    def announce(self, rows: Ints, upcoming: Hints | None = None) -> None:
        """Record that another batch will use the distinct addresses ``rows`` [U].

        Args:
            rows: the addresses.
            upcoming: [U] batches from this one until the next use of each row, 0 where none is known. A hint is valid
                from the plan of the batch until that use is announced, for rows that remain in their slots. A wrong
                hint costs misses and nothing else; a hint whose step has passed is dropped later.

        Raises:
            ConfigError: the number of hints is not that of rows.
        """
        check_hints(rows, upcoming)
        self._hinted = self._hinted or upcoming is not None
        if self._hinted:
            # A scan of all slots is cheap next to entering as many rows.
            self._rows_since += len(rows)
            self._batches_since += 1
            if self._rows_since >= self.slots or self._batches_since >= FARTHEST:
                self._rows_since = self._batches_since = 0
                self._forget_before(self._window[0][0] if self._window else self._step)
        rows = np.ascontiguousarray(rows, np.int64)
        if not self.transient:
            self._enter(rows, upcoming)
        self._window.append((self._step, self._entries, rows))
        self._step += 1
        self._entries += len(rows)

    def plan(self) -> SlotPlan | None:
        """Give slots to the first announced batch without a plan; None, and no change, if too few are free."""
        _, begin, rows = self._window[0]
        made = self._plan(rows, -1 if self.transient else begin)
        if made is not None:
            self._window.popleft()
        return made

    def plan_now(self, rows: Ints) -> SlotPlan | None:
        """Give slots to a batch that was not announced, before those that were."""
        return self._plan(np.ascontiguousarray(rows, np.int64), -1)

    def batch_bytes(self, distinct: float, lookups: float) -> float:
        """Return the bytes that an announced batch takes until its plan, with its lookups."""
        return known_bytes(distinct, lookups)

    def fits(self, rows: Ints) -> bool:
        """Return True if a plan for ``rows`` would find enough slots now."""
        slots = [item.slot for row in rows.tolist() if (item := self._rows.get(row)) is not None and item.slot >= 0]
        return len(rows) - len(slots) <= self.free - sum(slot in self._parked for slot in slots)

    def skip(self) -> None:
        """Drop the first announced batch without a plan, but not its hints."""
        _, begin, rows = self._window.popleft()
        if not self.transient:
            self._skip(rows, begin)

    def cancel(self) -> None:
        """Drop the announced batches without a plan, and all hints."""
        self._forget_all()
        self._window.clear()
        self._hinted = False

    @property
    def announced(self) -> int:
        """Announced batches without a plan."""
        return len(self._window)

    def rows_in(self, slots: Ints) -> Ints:
        """Return the address in each slot; -1 in an empty one."""
        return self.row_in_slot[slots]

    def _local(self, row: int) -> tuple[int, int]:
        table = int(np.searchsorted(self.first_row, row, side="right")) - 1
        return row - int(self.first_row[table]), table

    def _enter(self, rows: Ints, upcoming: Hints | None) -> None:
        """Record the uses of a batch after those announced."""
        hints = [0] * len(rows) if upcoming is None else upcoming.tolist()
        for row, until in zip(rows.tolist(), hints, strict=True):
            hint = self._step + min(until, FARTHEST) if until > 0 else NEVER
            self._rows.setdefault(row, _RowRecord()).uses.append((self._step, hint))

    def _forget_before(self, step: int) -> None:
        """Drop hints of steps before ``step``, the first announced one: no use came then."""
        for item in self._rows.values():
            if item.hint < step:
                item.hint = NEVER

    def _plan(self, wanted: Ints, begin: int) -> SlotPlan | None:
        """Give slots to a batch that was announced as the rows ``begin`` on of all; -1: its uses were not entered."""
        rows: list[int] = wanted.tolist()
        known = [self._rows.get(row, _RowRecord()) for row in rows]
        kept = {item.slot for item in known if item.slot >= 0}
        missing = sum(item.slot < 0 for item in known)
        candidates = [slot for slot in self._parked if slot not in kept]
        if missing > len(self._unused) + len(candidates):
            return None
        number, self.plans = self.plans, self.plans + 1
        for slot in kept:
            self._parked.pop(slot, None)
        fence = max((item.evicted_by for item in known if item.slot < 0), default=-1)

        def far(slot: int) -> tuple[int, int, int]:
            row = int(self.row_in_slot[slot])
            return (self._rows[row].next_use, *self._local(row))

        victims = candidates if self.transient else nlargest(max(0, missing - len(self._unused)), candidates, key=far)
        evict_rows, evict_slots = [], []
        evicted = []
        for slot in victims:
            row = int(self.row_in_slot[slot])
            self.row_in_slot[slot] = -1
            del self._parked[slot]
            self._rows[row].slot, self._rows[row].hint = -1, NEVER
            evicted.append(row)
            if slot in self._changed:
                self._changed.discard(slot)
                self._rows[row].evicted_by = number
                evict_rows.append(row)
                evict_slots.append(slot)
        given_up = deque(victims)  # slots that are filled after the empty ones, in order of eviction
        fetch_rows, fetch_slots, slots = [], [], []
        for row, item in zip(rows, known, strict=True):
            self._rows[row] = item
            if begin >= 0:
                _, item.hint = item.uses.popleft()
            if item.slot < 0:
                item.slot, item.evicted_by = self._unused.pop() if self._unused else given_up.popleft(), -1
                self.row_in_slot[item.slot] = row
                fetch_rows.append(row)
                fetch_slots.append(item.slot)
            self._users[item.slot] += 1
            slots.append(item.slot)
        self._unused.extend(reversed(given_up))
        self._leaving.append((number, np.array(evicted, np.int64)))
        while self._leaving and self._leaving[0][0] <= number - self.landing:
            landed, gone = self._leaving.popleft()
            for row in gone.tolist():
                gone_row = self._rows.get(row)
                if gone_row is not None and gone_row.evicted_by == landed:
                    gone_row.evicted_by = -1
                    self._drop(row)
        for row in evicted:
            self._drop(row)
        return SlotPlan(
            number=number, slots=np.array(slots, np.int64), fetch_rows=np.array(fetch_rows, np.int64),
            fetch_slots=np.array(fetch_slots, np.int64), evict_rows=np.array(evict_rows, np.int64),
            evict_slots=np.array(evict_slots, np.int64), fence=fence,
        )  # fmt: skip

    def _drop(self, row: int) -> None:
        """Drop the bookkeeping of a row that is neither resident nor announced nor being written back."""
        item = self._rows.get(row)
        if item is not None and item.slot < 0 and not item.uses and item.evicted_by < 0:
            del self._rows[row]

    def release(self, slots: Ints, *, changed: bool) -> None:
        """Take back the ``slots`` of a planned batch; ``changed``: its rows must be stored when they are evicted."""
        for slot in slots.tolist():
            self._users[slot] -= 1
            if changed:
                self._changed.add(slot)
            if self._users[slot] == 0:
                self._parked[slot] = None

    def _skip(self, rows: Ints, begin: int) -> None:
        for row in rows.tolist():
            item = self._rows[row]
            _, hint = item.uses.popleft()
            if item.slot >= 0:
                item.hint = hint
            self._drop(row)

    def _forget_all(self) -> None:
        for row, item in list(self._rows.items()):
            item.uses.clear()
            item.hint = NEVER
            self._drop(row)

    def take_changed(self) -> Ints:
        """Return the slots of changed rows, to store them; all count as unchanged from now on."""
        slots = np.array(sorted(self._changed), np.int64)
        self._changed.clear()
        return slots

    def mark_changed(self, slots: Ints) -> None:
        """Mark the rows in ``slots`` as changed again: they could not be stored."""
        self._changed.update(slots.tolist())

    @property
    def free(self) -> int:
        """Slots that a plan could use now."""
        return len(self._unused) + len(self._parked)

    @property
    def guesses(self) -> bool:
        """True if the last plan may have evicted another row than Belady's rule, as it could not know the next uses.

        Rows without a known use remain in slots, so it had to choose among such rows. A plan that has used them all up
        chose among known uses: a longer window would have changed nothing.
        """
        idle = (self._rows[int(self.row_in_slot[slot])].next_use == NEVER for slot in self._parked)
        return not self._unused and not self.transient and any(idle)
