"""Raw ids and their rows, against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from campaigns import numbers, scaled
from growing import Pool, Reference
from numpy.random import Generator

from stoker import Grow, TableConfig
from stoker.ops import Bags
from stoker.tables.growing import ids as growing_ids_module
from stoker.tables.growing import kernels
from stoker.tables.growing.ids import GrowingIds, Grown
from stoker.tables.growing.state import LIVE, MASK

NOBODY: frozenset[str] = frozenset()
STREAMS = 1_000  # make soak does five times as many
Wanted = tuple[list[int], dict[str, dict[int, int]]]  # rows, and births of each table: row -> raw id


def entries_of(pool: Pool) -> list[list[int]]:
    """Row, raw id, count, step and time of each entry, by row."""
    return sorted([entry[0], key, *entry[1:]] for key, entry in pool.entries.items())


def draw_tables(random: Generator) -> list[TableConfig]:
    found = []
    for number in range(int(random.integers(1, 4))):
        admit = int(random.choice([1, 1, 2, 3]))
        grow = Grow(
            admit=admit,
            ttl=None if random.random() < 0.5 else int(random.integers(0, 12)),
            evict=[None, "lru", "lfu"][int(random.integers(3))],
            candidates=None if random.random() < 0.5 else int(random.integers(1, 8)),
        )
        features = tuple(f"t{number}f{i}" for i in range(int(random.integers(1, 3))))
        rows = int(random.choice([2, 4, 9, 17, 40]))
        found.append(TableConfig(name=f"t{number}", num_embeddings=rows, embedding_dim=4, features=features, grow=grow))
    if random.random() < 0.3:
        found.insert(
            int(random.integers(len(found) + 1)), TableConfig(name="static", num_embeddings=9, embedding_dim=4)
        )
    return found


class Stream:
    """A random stream, the raw ids of the library, and a dictionary for each table."""

    def __init__(self, seed: int) -> None:
        self.random = random = np.random.default_rng(seed)
        self.tables = draw_tables(random)
        self.features = [name for table in self.tables for name in table.features]
        random.shuffle(self.features)
        self.raw = GrowingIds(self.tables, self.features)
        self.known = {t.name: Reference(t.num_embeddings, t.grow) for t in self.tables if t.grow is not None}
        self.owner = {name: table.name for table in self.tables for name in table.features}
        count = int(random.choice([3, 12, 60]))
        self.values = (
            random.integers(-(2**63), 2**63, count) if random.random() < 0.5 else np.arange(count) - count // 2
        )
        self.timed, self.time = random.random() < 0.4, int(random.integers(-50, 50))
        self.jagged = random.random() < 0.4

    def batch(self) -> tuple[Bags, int | None]:
        random, count = self.random, len(self.features)
        rows = int(random.integers(0, 9))
        lengths = random.integers(0, 4, rows * count) if self.jagged else np.ones(rows * count, np.int64)
        owner = [self.owner[self.features[bag % count]] for bag in np.repeat(np.arange(rows * count), lengths)]
        skewed = (len(self.values) * random.random(len(owner)) ** 2).astype(int)
        ids = np.array(
            [7 if of == "static" else self.values[at] for of, at in zip(owner, skewed, strict=True)], np.int64
        )
        self.time += int(random.integers(-1, 4))
        time = self.time if self.timed else None
        if not self.jagged:
            return Bags(torch.from_numpy(ids).view(rows, count)), time
        return Bags(torch.from_numpy(ids), torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))), time

    def expect(
        self, call: Bags, time: int | None, *, trains: bool = True
    ) -> tuple[list[int], dict[str, dict[int, int]]]:
        """The rows, and the births of each table."""
        count, ids = len(self.features), call.ids.reshape(-1).tolist()
        bags = (
            np.arange(len(ids))
            if call.offsets is None
            else np.repeat(np.arange(len(call.offsets) - 1), call.offsets.diff())
        )
        owner = [self.owner[self.features[bag % count]] for bag in bags]
        out, births = list(ids), {}
        for name, known in self.known.items():
            places = [place for place, of in enumerate(owner) if of == name]
            keys = [ids[place] for place in places]
            rows, births[name] = known.look_up(keys, time) if trains else (known.find(keys), {})
            for place, row in zip(places, rows, strict=True):
                out[place] = row
        return out, births

    def check(self, grown: Grown, wanted: tuple[list[int], dict[str, dict[int, int]]]) -> None:
        assert grown.call.ids.reshape(-1).tolist() == wanted[0]
        names = [self.raw.names[at] for at in grown.births.tables.tolist()]
        born = list(zip(names, grown.births.rows.tolist(), grown.births.ids.tolist(), strict=True))
        assert born == [(name, *each) for name in self.raw.names for each in sorted(wanted[1][name].items())]

    def check_state(self) -> None:
        pools = self.raw._state.pools
        assert (4 * pools[:, LIVE] <= pools[:, MASK] + 1).all(), "a search in a fuller map takes long, or never ends"
        for name, known in self.known.items():
            for waiting, pool in enumerate((known.rows, known.waiting)):
                assert [
                    e for part in self.raw.read(name, waiting=bool(waiting), chunk=5) for e in part.tolist()
                ] == entries_of(pool)


def run(seed: int) -> None:
    """Train on batches, some of them done ahead, some dropped, looked up by others, saved and loaded."""
    stream = Stream(seed)
    random, raw = stream.random, stream.raw
    ahead: list[tuple[Grown, Bags, int | None]] = []
    wild = float(random.choice([0.0, 0.0, 0.15]))
    for _ in range(int(random.integers(1, 25))):
        while len(ahead) < random.integers(0, 5):
            call, time = stream.batch()
            ahead.append((raw.ahead(call, time, NOBODY, grows=True), call, time))
        if random.random() < 0.3:
            call, _ = stream.batch()
            assert raw.find(call).ids.reshape(-1).tolist() == stream.expect(call, None, trains=False)[0]
        if random.random() < 0.2:
            stream.check_state()
        if random.random() < wild:
            raw.forget([each for each, *_ in ahead[:2]])
            del ahead[:2]
        if random.random() < wild:  # a batch that was not staged comes between
            call, time = stream.batch()
            stream.check(raw.take(None, call, time, NOBODY)[0], stream.expect(call, time))
        if random.random() < wild / 2:
            other = GrowingIds(stream.tables, stream.features)
            both = [(name, waiting) for name in raw.names for waiting in (False, True)]
            other.load(raw.clock, {of: raw.read(of[0], waiting=of[1], chunk=3) for of in both})
            raw.forget([each for each, *_ in ahead])
            ahead.clear()
            stream.raw = raw = other
        grown, call, time = ahead.pop(0) if ahead else (None, *stream.batch())
        found, fits = raw.take(grown, call, time, NOBODY)
        wanted = stream.expect(call, time)
        stream.check(found, wanted)
        assert fits == (grown is not None and grown.call.ids.equal(found.call.ids) and not grown.moved)
    stream.check_state()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
def test_rows_are_those_of_a_dictionary(first: int) -> None:
    for seed in numbers(STREAMS)[first::4]:
        run(seed)


def test_loops_without_numba_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_ids_module, "HAVE_NUMBA", False)
    monkeypatch.setattr(kernels, "prefetch", lambda array, place: None)
    for name, kernel in list(vars(kernels).items()):
        if hasattr(kernel, "py_func"):
            monkeypatch.setattr(kernels, name, kernel.py_func)
    for seed in range(20_000, 20_000 + scaled(40)):
        run(seed)
