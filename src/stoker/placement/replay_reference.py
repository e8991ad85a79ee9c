"""Cache strategies on a trace of batches, in plain Python: the definition that the fast simulation equals.

A step needs the distinct rows of its batch. Rows that are in one of the C slots are hits, the others are misses.
Each miss takes a free slot or, if there is none, the slot of a victim: a resident row that no batch in flight
uses. Batches ``t - in_flight + 1 .. t`` are in flight at step t. A victim is dirty, because training updated it, so it
is written back.

Legend: T steps, C slots, W batches whose ids are known ahead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from stoker.base.errors import ConfigError
from stoker.tables.slots.residency import known_bytes
from stoker.tables.slots.window import Ahead

Row = tuple[int, int]  # (id within its table, position of the table): the greater one is rarer and is evicted first
Kind = Literal["lru", "lfu", "lookahead", "adaptive", "pinned", "belady", "hot-cold", "host-pipelined"]
_PLAIN: tuple[Kind, ...] = ("lru", "lfu", "adaptive", "pinned", "belady", "hot-cold", "host-pipelined")


@dataclass(frozen=True, kw_only=True)
class CacheStrategy:
    """Which resident row is evicted when a slot is needed.

    * ``lru``: the one whose last use is longest ago.
    * ``lfu``: the one that the fewest batches have used so far, counted over the whole trace.
    * ``lookahead``: the one whose next use is farthest. Only the next ``window`` batches are known, and a row in none
      of them counts as infinitely far (Balasubramanian et al., cDLRM, 2021, section 3).
    * ``adaptive``: the same with as many batches known as evictions need, within ``memory``
      (:mod:`stoker.tables.slots.window`): what a cache over a file or URL does that is not told how far to look ahead.
    * ``pinned``: the same, and the first ids of tables are pinned (``Cached(hot=...)``).
    * ``belady``: the same with all batches known. No strategy has fewer misses (Belady 1966).
    * ``hot-cold``: hot rows are pinned once fetched, and the others are as in ``host-pipelined``. Hot are the rows that
      the most batches of the trace use, as many as leave slots for the other rows in flight (FAE, 2022).
    * ``host-pipelined``: no cache. A row is evicted as soon as no batch in flight uses it.

    Among equals, the greater id is evicted first (it is the rarer one), then the later table.
    """

    kind: Kind
    window: int = 0  # batches known ahead; for lookahead only
    memory: float = math.inf  # bytes for known batches; for adaptive and pinned only

    @property
    def name(self) -> str:
        """The name that users write, such as ``lookahead-64``."""
        return f"lookahead-{self.window}" if self.kind == "lookahead" else self.kind

    @classmethod
    def parse(cls, text: str) -> CacheStrategy:
        """Return the strategy of a :attr:`name`.

        Raises:
            ConfigError: no such strategy, or a lookahead under 1.
        """
        for kind in _PLAIN:
            if text == kind:
                return cls(kind=kind)
        word, _, number = text.partition("-")
        if word == "lookahead" and number.isdecimal() and int(number) >= 1:
            return cls(kind="lookahead", window=int(number))
        raise ConfigError(
            f"strategy {text!r} is unknown. Choose among {', '.join(_PLAIN)} and lookahead-W, where W is the number of "
            "batches known ahead, at least 1 (lookahead-64 for example)."
        )


class Counts(NamedTuple):
    """Hits and misses of a strategy over a trace."""

    hits: int  # distinct rows of batches that were resident
    lookups_hit: int  # occurrences of those
    misses: int  # distinct rows of batches that were fetched
    compulsory: int  # misses of rows never used before
    written_back: int  # evicted rows, without those resident at the end


def replay_reference(
    batches: Sequence[Mapping[Row, int]], slots: int, strategy: CacheStrategy, *, in_flight: int = 1,
    pinned: frozenset[Row] = frozenset(),
) -> Counts:  # fmt: skip
    """Simulate one strategy, slowly, in code that is short enough to check by reading.

    Args:
        batches: for each step, its distinct rows and how often each occurs.
        slots: C.
        strategy: which row is evicted.
        in_flight: batches whose rows may not be evicted, including the current one.
        pinned: rows that are never evicted; each takes one of the slots from the start.

    Raises:
        ConfigError: a step whose rows in flight exceed the slots.
    """
    resident: set[Row] = set()
    last_use: dict[Row, int] = {}
    uses: Counter[Row] = Counter()
    hits = lookups_hit = misses = compulsory = written_back = 0

    hot = _hot_rows(batches, slots, in_flight) if strategy.kind == "hot-cold" else set(pinned)
    fixed = {"lookahead": strategy.window, "belady": len(batches)}
    ahead, known, size = Ahead(fixed.get(strategy.kind)), 0, 0.0  # how far to look; batches known; bytes of those left

    def rank(row: Row, step: int) -> tuple[float, Row]:
        """Return the rank of a resident row; the highest one is evicted first."""
        if strategy.kind == "lru":
            return -last_use[row], row
        if strategy.kind == "lfu":
            return -uses[row], row
        return next_use(row, step), row

    def next_use(row: Row, step: int) -> float:
        return next((distance for distance, batch in enumerate(batches[step + 1 : known]) if row in batch), math.inf)

    def bytes_of(batch: Mapping[Row, int]) -> float:
        cold = {row: count for row, count in batch.items() if row not in hot}
        return known_bytes(len(cold), sum(batch.values()))

    for step, batch in enumerate(batches):
        while known < len(batches) and known - step <= ahead.batches:
            if known - step > in_flight and size >= strategy.memory:
                break
            size += bytes_of(batches[known])
            known += 1
        kept: set[Row] = set().union(*batches[max(0, step - in_flight + 1) : step + 1])
        room = slots - len(pinned)
        if len(kept - pinned) > room:
            raise ConfigError(f"step {step} has {len(kept):,} rows in flight, but there are {slots:,} slots.")
        found, missing = batch.keys() & resident, batch.keys() - resident
        leaving = sorted(resident - kept - hot, key=partial(rank, step=step), reverse=True)
        if strategy.kind not in ("hot-cold", "host-pipelined"):
            leaving = leaving[: max(0, len(missing - pinned) + len(resident - pinned) - room)]
        hits += len(found)
        lookups_hit += sum(batch[row] for row in found)
        misses += len(missing)
        compulsory += len(missing - last_use.keys())
        written_back += len(leaving)
        resident = (resident - set(leaving)) | missing
        for row in batch:
            last_use[row] = step
            uses[row] += 1
        idle = any(next_use(row, step) == math.inf for row in resident - kept - hot)
        ahead.judge(idle and len(resident - pinned) == room, known - step - 1)
        size -= bytes_of(batch)
    return Counts(hits, lookups_hit, misses, compulsory, written_back)


def _hot_rows(batches: Sequence[Mapping[Row, int]], slots: int, in_flight: int) -> set[Row]:
    """Return as many of the most used rows as leave slots for the other rows in flight."""
    uses = Counter(row for batch in batches for row in batch)
    order = sorted(uses, key=lambda row: (-uses[row], row))
    flights = [set().union(*batches[max(0, step - in_flight + 1) : step + 1]) for step in range(len(batches))]
    for count in range(min(len(order), slots), 0, -1):
        hot = set(order[:count])
        if count + max(len(flight - hot) for flight in flights) <= slots:
            return hot
    return set()
