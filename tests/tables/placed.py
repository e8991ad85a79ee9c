"""Random training runs, placed and resident, for the exactness tests and the soak.

A case is drawn from a seed: tables, pooling, types, optimizers, batches, capacities, lookahead, depth, a program of
what is done with them (tests/tables/programs.py), and a link that delivers late and out of order. Slots start as
NaN, so that a row nobody fetched cannot pass for one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from bags import Bags
from programs import LONGEST, Round, Run, Turn, draw_rounds

from stoker import Batch, Cached, EmbeddingTables, HostPipelined, HotCold, Mapped, TableConfig, optim
from stoker.tables.links.transfer import QueuedLink
from stoker.tables.slots.residency import LANDED, Residency
from stoker.tables.slots.sharded import ShardedResidency
from stoker.tables.slots.slotted import SlottedRows
from stoker.tables.storage import Rows
from stoker.tables.stores.block_home import BlockHome
from stoker.tables.stores.registry import register_store

__all__ = ["Case", "Found", "SlowLink", "Watch", "bag_run", "difference", "draw", "placed_run", "resident_run", "same"]


class Pairs(BlockHome):
    """A store of one's own: blocks of a few rows in a dictionary."""

    kind = "pairs"
    block_bytes = 700

    def __init__(self, initial, state):
        super().__init__(initial, state)
        self.known: dict[int, bytes] = {}

    def load(self, blocks):
        return [self.known[block] for block in blocks]

    def save(self, blocks):
        self.known.update(blocks)


register_store("pairs", Pairs)


class SlowLink(QueuedLink):
    """A link whose copies complete at random moments, in any order, but never after they must.

    Writebacks wait in a list and land one by one at random; fetched values are taken at once but reach their slots
    later, at the latest when the batch is used. Only the fence keeps a fetch from reading an old row.
    """

    def __init__(self, *given: Any, random: np.random.Generator) -> None:
        super().__init__(*given)
        self.random = random
        self.on_the_way: list[tuple[int, np.ndarray, Rows]] = []
        self.arriving: list[tuple[np.ndarray, Rows]] = []

    def write_back(self, number, rows, slots):
        self.ready()  # a slot that is still being filled cannot be written home
        self.on_the_way.append((number, rows.copy(), self._copy(slots)))

    def settle(self, plan):
        needed = [n for n, _, _ in self.on_the_way if n <= max(plan.fence, plan.number - LANDED)]
        for number in self.random.permutation(needed).tolist():
            self.land(number)
        while self.on_the_way and self.random.random() < 0.3:
            self.land(self.on_the_way[int(self.random.integers(len(self.on_the_way)))][0])

    def land(self, number):
        for job in [job for job in self.on_the_way if job[0] == number]:
            self.home.store(job[1], job[2], None)
            self.on_the_way.remove(job)

    def fetch(self, rows, slots):
        if any(np.isin(slots, earlier).any() for earlier, _ in self.arriving):
            self.ready()  # two copies into one slot keep their order, as on any stream
        values = self.home.empty(len(rows))
        self.home.fetch(rows, values, None)
        self.arriving.append((slots.copy(), values))

    def ready(self, ticket=None):
        order = self.random.permutation(len(self.arriving))
        for index in order:
            slots, values = self.arriving[index]
            at = torch.from_numpy(slots)
            self.slots.weight[at] = values.weight
            for name, tensor in values.state.items():
                self.slots.state[name][at] = tensor
        self.arriving.clear()

    def drain(self):
        self.ready()
        while self.on_the_way:
            self.land(self.on_the_way[int(self.random.integers(len(self.on_the_way)))][0])

    def close(self, *, drain=True):
        if drain:
            self.drain()


@dataclass
class Case:
    """One random training run."""

    seed: int
    tables: list[TableConfig]
    optimizer: Any
    batches: list[Batch]
    strategy: Any
    staged: bool
    lookahead: int | None
    in_flight: int
    background: bool
    slow: bool
    integers: bool
    backend: str = "auto"
    device: str = "cpu"
    peeks: set[int] = field(default_factory=set)  # steps in which another batch is looked up without training
    steps: dict[str, int] = field(default_factory=dict)  # features that are not pooled
    epoch_lookahead: bool = False
    include_last_offset: bool = True
    mode: str = "backward"  # when rows step; or "optimizer", or "scaler": when step() says so
    scale: float = 1.0  # of gradients
    autocast: bool = False
    compiled: bool = False  # whether calls are of torch.compile
    shards: int = 1  # of a batch
    lags: bool = False  # whether kernels run later: what they read may not be changed by the host
    rounds: list[Round] = field(default_factory=list)

    @property
    def transit(self) -> int:
        """Slots that rows share."""
        return self.strategy.slots - sum(self.strategy.hot_rows.values())

    def target(self, seed: int, shape: torch.Size) -> torch.Tensor:
        """The gradient of an output."""
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        if self.integers:
            return torch.randint(-3, 4, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)


def draw(seed: int, *, backend: str = "auto", integers: bool = False) -> Case:
    """The case of a seed."""
    random = np.random.default_rng(seed)
    # Each width and rule is a kernel to compile: the plain back end takes the variety.
    dims = [4, 8] if backend == "auto" else [1, 2, 3, 4, 8, 16, 17]
    dim, widths = int(random.choice(dims)), random.random() < 0.2
    dtype = "bfloat16" if not integers and random.random() < 0.25 else "float32"
    if backend == "auto" and dtype == "bfloat16":
        dim, widths = dims[1], False
    pooling = str(
        random.choice(
            ["sum", "max"] if integers else ["sum", "mean", "max"], p=[0.8, 0.2] if integers else [0.6, 0.25, 0.15]
        )
    )
    tables, features = [], 0
    same_rows = int(random.integers(1, 60)) if random.random() < 0.3 else 0
    for index in range(int(random.integers(1, 4))):
        owned = int(random.integers(1, 3))
        names = tuple(f"f{features + i}" for i in range(owned))
        features += owned
        rows = same_rows or int(random.integers(1, 60))
        tables.append(
            TableConfig(
                name=f"t{index}", num_embeddings=rows, embedding_dim=int(random.choice(dims)) if widths else dim,
                features=names, pooling=pooling if random.random() < 0.8 else "sum", dtype=dtype,
                padding_idx=int(random.integers(-1, 2)) % rows if random.random() < 0.15 else None,
            )
        )  # fmt: skip
    rules = [
        optim.SGD(lr=0.5), optim.Adagrad(lr=0.1), optim.RowWiseAdagrad(lr=0.1), optim.Adam(lr=0.05),
        optim.SGD(lr=0.5, weight_decay=0.1), optim.Adagrad(lr=0.1, clip_norm=0.5),
        optim.RowWiseAdagrad(lr=0.1, clip_value=0.3), optim.AdamW(lr=0.05, weight_decay=0.5),
        optim.MomentumSGD(lr=0.2, nesterov=True), optim.FTRL(lr=0.1, l1=0.1),
    ]  # fmt: skip
    rule = int(random.integers(4 if backend == "auto" else len(rules)))
    if backend == "auto":  # again fewer kernels, by two rules for each width, and by ids of one type below
        rule = 3 if dtype == "bfloat16" else rule % 2 + 2 * all(table.embedding_dim == dims[1] for table in tables)
    optimizer = optim.SGD(lr=1.0) if integers else rules[rule]
    limits = {name: table.num_embeddings for table in tables for name in table.features}
    order = [name for table in tables for name in table.features]
    jagged = random.random() < 0.6
    weighted = jagged and all(table.pooling == "sum" for table in tables) and random.random() < 0.4
    steps = {name: int(random.integers(3, 6)) for name in order if jagged and random.random() < 0.2}
    last = not jagged or random.random() < 0.8
    batches, largest = [], 1
    for step in range(int(random.integers(1, 14))):
        size = int(random.integers(1, 9))
        lengths = random.integers(0, 4, size * features) if jagged else np.ones(size * features, np.int64)
        ids = []
        for bag, length in enumerate(lengths):
            limit = limits[order[bag % features]]
            ids.append(np.minimum(random.zipf(1.3, length) - 1, limit - 1))
        wide = random.random() < 0.5 or backend == "auto"
        flat = torch.from_numpy(np.concatenate(ids).astype(np.int64 if wide else np.int32))
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)) if jagged else None
        if offsets is not None and not last:
            offsets = offsets[:-1]
        weights = None
        if weighted:
            drawn = random.integers(-2, 3, len(flat)) if integers else random.standard_normal(len(flat))
            weights = torch.from_numpy(drawn.astype(np.float32))
        batches.append(
            Batch(
                dense=torch.zeros(size, 1), ids=flat if jagged else flat.view(size, features), offsets=offsets,
                weights=weights, step=step,
            )
        )  # fmt: skip
        largest = max(largest, len(np.unique(flat.numpy())) * features)
    total = sum(table.num_embeddings for table in tables)
    # Every regime: a few slots (batches come in parts), about a batch, several batches, all rows.
    slots = int(
        random.integers(max(1, features * 3), max(2, features * 3) + int(total * random.choice([0.1, 0.5, 1.2])) + 1)
    )
    kind = random.choice([Cached, HostPipelined, HotCold], p=[0.55, 0.2, 0.25])
    options: dict[str, Any] = {"slots": slots, "home": "file" if random.random() < 0.15 else "memory"}
    options["writes"] = "append" if random.random() < 0.5 else "in-place"
    if options["home"] == "file" and seed % 2:  # behind a RAM tier of some blocks; no draw, so that seeds keep theirs
        options["host_memory"] = 9_000 + 4096 * (seed % 5)
        options["home"] = "file" if seed % 3 else "pairs"
    if kind is HotCold:
        # Hot rows leave room for an example in transit; some tables have none, others only hot ones.
        most = max(0, slots - 3 * features) // len(tables)
        hot = {table.name: int(random.integers(0, min(most, table.num_embeddings) + 1)) for table in tables}
        kind, options = (HotCold, options | {"hot": hot}) if any(hot.values()) else (HostPipelined, options)
    if kind is Cached and seed % 3 == 1:  # again no draw
        most = (1 + seed % 2) * max(0, slots - 3 * features) // (2 * len(tables))
        options["hot"] = {table.name: min(most, table.num_embeddings) for table in tables[seed % 2 :]}
    staged, lookahead = random.random() < 0.8, int(random.integers(0, 12))
    if seed % 4 == 1:  # it adapts, within a memory that may be too small for it; no draw either
        options["window"] = 300 * (seed % 7)
    case = Case(
        seed=seed, tables=tables, optimizer=optimizer, batches=batches,
        strategy=kind(**options), staged=staged, lookahead=None if "window" in options else lookahead,
        in_flight=int(random.integers(1, 5)), background=random.random() < 0.3, slow=random.random() < 0.6,
        integers=integers, backend=backend, peeks={s for s in range(14) if random.random() < 0.15},
        steps=steps, epoch_lookahead=random.random() < 0.3, include_last_offset=last,
        mode=str(random.choice(["backward", "optimizer", "scaler"], p=[0.7, 0.15, 0.15])),
        scale=0.25 if random.random() < 0.1 else 1.0, autocast=random.random() < 0.1,
        shards=(1, 2, 8)[seed // 4 % 3],
    )  # fmt: skip
    case.rounds += draw_rounds(random, len(batches), len(tables), case.mode)
    return reconcile(case)


def reconcile(case: Case) -> Case:
    """The case without what its parts cannot do together."""
    acts = [act for each in case.rounds for part in each.turns for act in (*part.before, *part.between, *part.after)]
    freezes = any(act[0] == "freeze" for act in acts)
    alike = len({table.num_embeddings for table in case.tables}) == 1 and not case.steps

    def acts_of(given: tuple[Any, ...]) -> tuple[Any, ...]:
        # A scaler steps for gradients of zeros, which frozen bags have, and not for none, which frozen tables have.
        apart = case.integers and case.mode == "scaler"
        return tuple(act for act in given if not (apart and act[0] == "freeze"))

    def turn(each: Turn) -> Turn:
        each = replace(each, before=acts_of(each.before), between=acts_of(each.between), after=acts_of(each.after))
        if case.integers:  # bags would not notice: they cut ids in pieces
            each = replace(each, late="")
        if case.lags:
            each = replace(each, reuse=False)
        if case.compiled:  # torch refuses a second backward, and looks at ids as a whole
            each = replace(each, late="", backward=each.backward.replace("twice", ""))
        if case.integers and not alike and each.lookup == "other offsets":
            each = replace(each, lookup="")
        return each

    def one(each: Round) -> Round:
        turns = tuple(turn(part) for part in each.turns)
        # A scaler finds infinity in the gradient of bags that are frozen; frozen tables have none.
        ends = "" if case.integers and freezes and each.ends == "overflow" else each.ends
        return Round(turns, ends, 0.0 if case.integers else each.clip)

    return replace(case, rounds=[one(each) for each in case.rounds])


def starting_rows(table: TableConfig) -> torch.Tensor:
    """Small integers."""
    return torch.arange(table.num_embeddings * table.embedding_dim).view(table.num_embeddings, -1) % 13 - 6.0


def build(case: Case, placement: Any) -> EmbeddingTables:
    tables = EmbeddingTables(
        case.tables, optimizer=case.optimizer, seed=case.seed % 7, placement=placement, device=case.device,
        backend=case.backend, steps=case.steps, include_last_offset=case.include_last_offset,  # type: ignore[arg-type]
        shards=case.shards,
    )  # fmt: skip
    if case.integers:
        for table in case.tables:
            rows, state = starting_rows(table), next(tables.read(table.name))[1].state
            tables.write(table.name, 0, Rows(rows, {n: torch.zeros(len(rows), *t.shape[1:]) for n, t in state.items()}))
    return tables


def outcome(tables: Any, case: Case) -> dict[str, torch.Tensor]:
    """All rows and states, copied."""
    found = {}
    for table in case.tables:
        for start, rows in tables.read(table.name, 7):
            found[f"{table.name}.{start}"] = rows.weight.cpu().clone()
            for name, tensor in rows.state.items():
                found[f"{table.name}.{start}.{name}"] = tensor.cpu().clone()
    return found


Watch = Callable[[EmbeddingTables], list[torch.Tensor]]


@dataclass
class Found:
    """What a run showed."""

    values: list[torch.Tensor]
    notes: list[Any]
    rows: dict[str, torch.Tensor]


def carry_out(case: Case, tables: Any, watch: Watch | None, *, background: bool = False) -> Found:
    """Run the program, and look at the rows. ``watch`` may note other outputs than those of the tables' calls."""
    seen = None if watch is None else watch(tables)
    run = Run(case, tables, background)
    run()
    return Found(run.values if seen is None else seen, run.notes, outcome(tables, case))


def resident_run(case: Case, watch: Watch | None = None) -> Found:
    return carry_out(case, build(case, None), watch)


def bag_run(case: Case) -> Found:
    """With nn.EmbeddingBag and torch.optim.SGD, on integers: every sum is exact."""
    bags = Bags(
        case.tables, case.steps, lr=case.optimizer.lr, include_last_offset=case.include_last_offset
    )  # fmt: skip
    for table in case.tables:
        bags.write(table.name, 0, Rows(starting_rows(table), {}))
    return carry_out(case, bags, None)


def slots_of(tables: EmbeddingTables) -> list[SlottedRows]:
    return [group.storage for group in tables.groups if isinstance(group.storage, SlottedRows)]


def plain(made: ShardedResidency) -> list[Residency]:
    """Return residencies in plain Python for the shards of one."""
    return [Residency(each.first_row, each.slots, transient=made.transient) for each in made.shards]


def divide(storage: SlottedRows, case: Case) -> None:
    """Plan in shards, if each has the slots that an example needs at most."""
    least = 2 + LONGEST * sum(len(table.features) for table in case.tables)
    shards = next((shards for shards in (4, 2) if case.transit >= shards * least), 1)
    if shards > 1 and storage.num_slots < storage.num_rows:
        storage.residency = ShardedResidency(
            storage.space.first_row, len(storage.transit.weight), transient=storage.residency.transient, shards=shards
        )
        if case.seed % 2 == 0:
            storage.residency.shards = plain(storage.residency)
        storage.move_by(storage._link)


def placed_run(case: Case, alter: Callable[[SlottedRows], None] | None = None, watch: Watch | None = None) -> Found:
    """The same run behind slots. ``alter`` may exchange or break parts of a storage."""
    mapped = case.seed % 16 == 7 and alter is None and case.device == "cpu"
    tables = build(case, Mapped() if mapped else case.strategy)
    random = np.random.default_rng(case.seed + 1)
    for storage in slots_of(tables):
        rows = storage.read(0, storage.num_rows)
        for tensor in (storage.transit.weight, *storage.transit.state.values()):
            tensor.fill_(math.nan)
        if case.integers:
            storage.write(0, rows)
        if case.slow:
            link = SlowLink(storage.home, storage.transit, storage.stats, random=random)
            storage.move_by(link)
        if case.seed % 5 == 2:
            divide(storage, case)
        if alter is not None:
            alter(storage)
    finders = (0, 1, 3)[case.seed // 5 % 3]  # threads that find distinct rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["stoker.tables.stage"], "_finders", lambda threads: finders)
        found = carry_out(case, tables, watch, background=case.background and not case.slow)
    tables.close()
    return found


def same(a: Found, b: Found) -> bool:
    """To the bit."""
    return difference(a, b) == ""


def difference(a: Found, b: Found, *, by: str = "message") -> str:
    """The first thing in which two runs differ, or nothing; errors may be compared by their "kind" alone."""
    seen = [[note.split(":")[0] if by == "kind" and isinstance(note, str) else note for note in each.notes]
            for each in (a, b)]  # fmt: skip
    if seen[0] != seen[1]:
        return f"notes: {seen[0]} and {seen[1]}"
    if len(a.values) != len(b.values):
        return f"{len(a.values)} and {len(b.values)} values"
    for number, (one, other) in enumerate(zip(a.values, b.values, strict=True)):
        if not equal(one, other):
            return f"value {number}: {one} and {other}"
    if a.rows.keys() != b.rows.keys():
        return f"rows {a.rows.keys()} and {b.rows.keys()}"
    for name, one in a.rows.items():
        if not equal(one, b.rows[name]):
            return f"rows {name}: {one} and {b.rows[name]}"
    return ""


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit, where neither is NaN, wherever they are."""
    one, other = one.cpu(), other.cpu()
    return torch.equal(one, other) or (
        one.shape == other.shape
        and torch.equal(one.nan_to_num(7.25), other.nan_to_num(7.25))
        and torch.equal(one.isnan(), other.isnan())
    )
