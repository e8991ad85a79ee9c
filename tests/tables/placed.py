"""Random training runs, placed and resident, for the exactness tests and the soak.

A case is drawn from a seed: tables, pooling, types, optimizers, batches, capacities, lookahead, depth, and a link that
delivers late and out of order. Slots start as NaN, so that a row nobody fetched cannot pass for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from stoker import Batch, Cached, EmbeddingTables, HostPipelined, HotCold, TableConfig, optim, stage
from stoker.tables.residency import LANDED
from stoker.tables.slotted import SlottedRows
from stoker.tables.storage import Rows
from stoker.tables.transfer import QueuedLink

__all__ = ["Case", "Rereadable", "SlowLink", "Watch", "draw", "placed_run", "resident_run", "same"]


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

    def close(self):
        self.drain()


@dataclass
class Case:
    """One random training run."""

    seed: int
    tables: list[TableConfig]
    optimizer: Any
    batches: list[Batch]
    grads: list[torch.Tensor]
    strategy: Any
    staged: bool
    lookahead: int
    in_flight: int
    background: bool
    slow: bool
    integers: bool
    backend: str = "auto"
    device: str = "cpu"
    peeks: set[int] = field(default_factory=set)  # steps after which another batch is looked up without training
    steps: dict[str, int] = field(default_factory=dict)  # features that are not pooled
    foresight: bool = False

    @property
    def transit(self) -> int:
        """Slots that rows share."""
        hot = self.strategy.hot_rows if isinstance(self.strategy, HotCold) else {}
        return self.strategy.slots - sum(hot.values())


def draw(seed: int, *, backend: str = "auto", integers: bool = False) -> Case:
    """The case of a seed."""
    random = np.random.default_rng(seed)
    # Each width and rule is a kernel to compile: the plain back end takes the variety.
    dim = 4 if backend == "auto" else int(random.choice([1, 2, 3, 4, 8, 16, 17]))
    dtype = "bfloat16" if not integers and random.random() < 0.25 else "float32"
    pooling = "mean" if random.random() < 0.3 and not integers else "sum"
    tables, features = [], 0
    for index in range(int(random.integers(1, 4))):
        owned = int(random.integers(1, 3))
        names = tuple(f"f{features + i}" for i in range(owned))
        features += owned
        tables.append(
            TableConfig(
                name=f"t{index}", num_embeddings=int(random.integers(1, 60)), embedding_dim=dim, features=names,
                pooling=pooling if random.random() < 0.8 else "sum", dtype=dtype,
            )
        )  # fmt: skip
    rules = [
        optim.SGD(lr=0.5), optim.Adagrad(lr=0.1), optim.RowWiseAdagrad(lr=0.1), optim.Adam(lr=0.05),
        optim.SGD(lr=0.5, weight_decay=0.1), optim.Adagrad(lr=0.1, clip_norm=0.5),
        optim.RowWiseAdagrad(lr=0.1, clip_value=0.3), optim.AdamW(lr=0.05, weight_decay=0.5),
        optim.MomentumSGD(lr=0.2, nesterov=True), optim.FTRL(lr=0.1, l1=0.1),
    ]  # fmt: skip
    optimizer = optim.SGD(lr=1.0) if integers else rules[int(random.integers(4 if backend == "auto" else len(rules)))]
    limits = {name: table.num_embeddings for table in tables for name in table.features}
    order = [name for table in tables for name in table.features]
    jagged = random.random() < 0.6
    weighted = jagged and all(table.pooling == "sum" for table in tables) and random.random() < 0.4 and not integers
    steps = {name: int(random.integers(3, 6)) for name in order if jagged and random.random() < 0.2}
    positions = features + sum(steps.values()) - len(steps)
    batches, grads, largest = [], [], 1
    for step in range(int(random.integers(1, 14))):
        size = int(random.integers(1, 9))
        lengths = random.integers(0, 4, size * features) if jagged else np.ones(size * features, np.int64)
        ids = []
        for bag, length in enumerate(lengths):
            limit = limits[order[bag % features]]
            ids.append(np.minimum(random.zipf(1.3, length) - 1, limit - 1))
        flat = torch.from_numpy(np.concatenate(ids).astype(np.int64 if random.random() < 0.5 else np.int32))
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)) if jagged else None
        grad = (
            random.integers(-3, 4, (size, positions, dim))
            if integers
            else random.standard_normal((size, positions, dim))
        )
        batches.append(
            Batch(
                dense=torch.zeros(size, 1), ids=flat if jagged else flat.view(size, features), offsets=offsets,
                weights=torch.from_numpy(random.standard_normal(len(flat)).astype(np.float32)) if weighted else None,
                step=step,
            )
        )  # fmt: skip
        grads.append(torch.from_numpy(grad.astype(np.float32)))
        largest = max(largest, len(np.unique(flat.numpy())) * features)
    total = sum(table.num_embeddings for table in tables)
    # Every regime: a few slots (batches come in parts), about a batch, several batches, all rows.
    slots = int(
        random.integers(max(1, features * 3), max(2, features * 3) + int(total * random.choice([0.1, 0.5, 1.2])) + 1)
    )
    kind = random.choice([Cached, HostPipelined, HotCold], p=[0.55, 0.2, 0.25])
    options: dict[str, Any] = {"slots": slots, "home": "file" if random.random() < 0.15 else "memory"}
    options["writes"] = "append" if random.random() < 0.5 else "in-place"
    if kind is HotCold:
        # Hot rows leave room for an example in transit; some tables have none, others only hot ones.
        most = max(0, slots - 3 * features) // len(tables)
        hot = {table.name: int(random.integers(0, min(most, table.num_embeddings) + 1)) for table in tables}
        kind, options = (HotCold, options | {"hot": hot}) if any(hot.values()) else (HostPipelined, options)
    return Case(
        seed=seed, tables=tables, optimizer=optimizer, batches=batches, grads=grads,
        strategy=kind(**options), staged=random.random() < 0.8, lookahead=int(random.integers(0, 12)),
        in_flight=int(random.integers(1, 5)), background=random.random() < 0.3, slow=random.random() < 0.6,
        integers=integers, backend=backend, peeks={s for s in range(14) if random.random() < 0.15},
        steps=steps, foresight=random.random() < 0.3,
    )  # fmt: skip


class Rereadable:
    """Batches that can be read twice, in epochs of three."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def rest_of_epoch(self, step: int, *, ids_only: bool) -> list[Batch]:
        return self.batches[step : step // 3 * 3 + 3]


def build(case: Case, placement: Any) -> EmbeddingTables:
    tables = EmbeddingTables(
        case.tables, optimizer=case.optimizer, seed=case.seed % 7, placement=placement, device=case.device,
        backend=case.backend, steps=case.steps,  # type: ignore[arg-type]
    )  # fmt: skip
    if case.integers:
        for table in case.tables:
            rows = torch.arange(table.num_embeddings * table.embedding_dim).view(table.num_embeddings, -1) % 13 - 6.0
            state = next(tables.read(table.name))[1].state
            tables.write(table.name, 0, Rows(rows, {n: torch.zeros(len(rows), *t.shape[1:]) for n, t in state.items()}))
    return tables


def outcome(tables: EmbeddingTables, case: Case) -> dict[str, torch.Tensor]:
    """All rows and states, copied."""
    found = {}
    for table in case.tables:
        for start, rows in tables.read(table.name, 7):
            found[f"{table.name}.{start}"] = rows.weight.cpu().clone()
            for name, tensor in rows.state.items():
                found[f"{table.name}.{start}.{name}"] = tensor.cpu().clone()
    return found


def train(tables: EmbeddingTables, case: Case, feed: Iterator[Batch]) -> list[torch.Tensor]:
    """Pooled outputs of every step, with one update each."""
    pooled = []
    for batch, grad in zip(feed, case.grads, strict=True):
        batch, grad = batch.to(case.device), grad.to(case.device)
        weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
        out = tables(batch.ids, batch.offsets, weights)
        pooled.append(out.detach().clone())
        other = case.batches[(batch.step + 3) % len(case.batches)].to(case.device)
        # Between forward and backward the rows of the batch hold their slots: both must fit.
        early = batch.ids.numel() + other.ids.numel() <= case.transit
        if batch.step in case.peeks and early:
            pooled.append(peek(tables, other))
        out.backward(grad.reshape(out.shape))
        if batch.step in case.peeks and not early:
            pooled.append(peek(tables, other))
        if weights is not None:
            pooled.append(weights.grad.clone())
    return pooled


def peek(tables: EmbeddingTables, batch: Batch) -> torch.Tensor:
    """A lookup on demand, without training, in the middle of everything."""
    with torch.no_grad():
        return tables(batch.ids, batch.offsets, batch.weights).clone()


Watch = Callable[[EmbeddingTables], list[torch.Tensor]]


def resident_run(case: Case, watch: Watch | None = None) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """``watch`` may note other outputs than those of the tables' calls."""
    tables = build(case, None)
    seen = None if watch is None else watch(tables)
    pooled = train(tables, case, iter(case.batches))
    return pooled if seen is None else seen, outcome(tables, case)


def slots_of(tables: EmbeddingTables) -> list[SlottedRows]:
    return [group.storage for group in tables.groups if isinstance(group.storage, SlottedRows)]


def placed_run(
    case: Case, alter: Callable[[SlottedRows], None] | None = None, watch: Watch | None = None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The same run behind slots. ``alter`` may exchange or break parts of a storage."""
    tables = build(case, case.strategy)
    random = np.random.default_rng(case.seed + 1)
    for storage in slots_of(tables):
        rows = storage.read(0, storage.num_rows)
        for tensor in (storage.transit.weight, *storage.transit.state.values()):
            tensor.fill_(math.nan)
        if case.integers:
            storage.write(0, rows)
        if case.slow:
            link = SlowLink(storage.home, storage.transit, storage.stats, random=random)
            storage._link = link
        if alter is not None:
            alter(storage)
    seen = None if watch is None else watch(tables)
    feed: Any = iter(case.batches)
    if case.staged:
        background = case.background and not case.slow
        feed = iter(
            stage(
                Rereadable(case.batches), tables, lookahead=case.lookahead, in_flight=case.in_flight,
                background=background, foresight=case.foresight,
            )
        )  # fmt: skip
    pooled = train(tables, case, feed)
    found = outcome(tables, case)
    tables.close()
    return pooled if seen is None else seen, found


def same(
    a: tuple[list[torch.Tensor], dict[str, torch.Tensor]], b: tuple[list[torch.Tensor], dict[str, torch.Tensor]]
) -> bool:
    """To the bit."""
    return (
        len(a[0]) == len(b[0])
        and all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
        and a[1].keys() == b[1].keys()
        and all(torch.equal(a[1][key], b[1][key]) for key in a[1])
    )
