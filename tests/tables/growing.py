"""What tables that grow do, in plain Python: one dictionary a pool, and searches through all of it."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from stoker import Grow
from stoker.tables.growing.state import SWEEPS

__all__ = ["Pool", "Reference"]


class Pool:
    """Entries by raw id: [row, count, step of the last use, its time]."""

    def __init__(self, first: int, size: int, evict: str | None, ttl: int | None) -> None:
        self.size, self.evict, self.ttl = size, evict, ttl
        self.entries: dict[int, list[int]] = {}
        self.free = list(range(first, size))
        heapify(self.free)

    def remove(self, key: int) -> None:
        heappush(self.free, self.entries.pop(key)[0])

    def get(self, key: int, now: int) -> list[int] | None:
        entry = self.entries.get(key)
        if entry is not None and self.ttl is not None and now - entry[3] > self.ttl:
            self.remove(key)
            return None
        return entry

    def sweep(self, now: int, step: int) -> None:
        quota = -(-self.size // SWEEPS)
        looked = {(step * quota + i) % self.size for i in range(quota)} if self.size else set()
        for key in [key for key, entry in self.entries.items() if entry[0] in looked]:
            self.get(key, now)

    def add(self, key: int, count: int, now: int, step: int) -> list[int] | None:
        old = {key: entry for key, entry in self.entries.items() if entry[2] != step}
        if not self.free and self.evict and old:
            by = (1, 2, 0) if self.evict == "lfu" else (2, 0)
            self.remove(min(old, key=lambda key: [old[key][i] for i in by]))
        if not self.free:
            return None
        self.entries[key] = [heappop(self.free), count, step, now]
        return self.entries[key]


class Reference:
    """One table."""

    def __init__(self, rows: int, grow: Grow) -> None:
        waiting = rows if grow.candidates is None else grow.candidates
        self.grow, self.rows = grow, Pool(1, rows, grow.evict, grow.ttl)
        self.waiting = Pool(0, waiting if grow.admit > 1 else 0, "lru", grow.ttl)
        self.now = self.step = 0

    def find(self, keys: list[int]) -> list[int]:
        """Rows without a step."""
        ttl, known = self.grow.ttl, self.rows.entries
        fresh = {key for key in keys if key in known and (ttl is None or self.now - known[key][3] <= ttl)}
        return [known[key][0] if key in fresh else 0 for key in keys]

    def look_up(self, keys: list[int], time: int | None = None) -> tuple[list[int], dict[int, int]]:
        """The rows of a batch that trains, and the raw ids of rows that start anew."""
        self.step += 1
        self.now = self.step if time is None else time if self.step == 1 else max(self.now, time)
        now, step, born = self.now, self.step, {}
        self.rows.sweep(now, step)
        self.waiting.sweep(now, step)
        found = [self.rows.get(key, now) if key else None for key in keys]
        for entry in found:
            if entry and (self.grow.evict or self.grow.ttl is not None):
                entry[1:] = [entry[1] + 1, step, now]
        for place, key in enumerate(keys):
            if key == 0 or found[place]:
                continue
            if entry := self.rows.entries.get(key):
                entry[1] += 1
            else:
                count = self.count(key, now, step)
                entry = self.rows.add(key, count, now, step) if count >= self.grow.admit else None
                if entry:
                    born[entry[0]] = key
                    if key in self.waiting.entries:
                        self.waiting.remove(key)
            found[place] = entry
        return [entry[0] if entry else 0 for entry in found], born

    def count(self, key: int, now: int, step: int) -> int:
        """Lookups of a raw id so far."""
        if self.grow.admit == 1:
            return 1
        if entry := self.waiting.get(key, now):
            entry[1:] = [entry[1] + 1, step, now]
        return (entry or self.waiting.add(key, 1, now, step) or [0, 0])[1]
