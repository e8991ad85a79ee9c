"""Cache strategies on a trace of batches, in plain Python: the definition that :func:`stoker.replay` equals.

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
from functools import partial

from stoker.base.errors import ConfigError
from stoker.placement.replay import CacheStrategy, HitCounts
from stoker.tables.slots.residency import known_bytes
from stoker.tables.slots.window import Ahead

__all__ = ["Row", "replay_reference"]

Row = tuple[int, int]  # (id within its table, position of the table): the greater one is rarer and is evicted first


def replay_reference(
    batches: Sequence[Mapping[Row, int]], slots: int, strategy: CacheStrategy, *, in_flight: int = 1,
    pinned: frozenset[Row] = frozenset(),
) -> HitCounts:  # fmt: skip
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
    return HitCounts(hits, lookups_hit, misses, compulsory, written_back)


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
