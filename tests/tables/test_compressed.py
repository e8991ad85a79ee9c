"""EmbeddingTables with tensor-train tables among others: equal to plain autograd through the rows' definition."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import start_ranks
from torch import Tensor, nn

import stoker
from stoker import EmbeddingTables, TableConfig, TensorTrain
from stoker.base.errors import ConfigError
from stoker.dataset.batch import Batch
from stoker.ops.reference import update_rows
from stoker.ops.tt.lookup import digits_of, fill_core, rows_by_definition
from stoker.ops.tt.shape import TTShape
from stoker.tables import Replicas
from stoker.tables.storage import Rows

DIM = 8  # as in tests/tables/placed.py, which takes the same kernels
SHAPE = TTShape((5, 3, 4), (1, 2, 4), (4, 3))  # 60 rows, of which 57 are there
TRAINS = {"big": TensorTrain(shape=SHAPE), "wide": TensorTrain(rank=3, cores=2)}
SIZES = {"big": 57, "small": 9, "wide": 40, "other": 30}
OWNED = {"big": ("x", "y"), "small": ("u",), "wide": ("z",), "other": ("v", "w")}
ORDER = ("u", "x", "v", "z", "y", "w")  # tables apart from each other, features of one too
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "cached": {name: stoker.Cached(slots=22) for name in ("small", "other")},
    "pipelined": {"other": stoker.HostPipelined(slots=26)},
    "hot and cold": {name: stoker.HotCold(hot={"small": 4, "other": 5}, slots=30) for name in ("small", "other")},
    "in parts": {"other": stoker.Cached(slots=5)},
}
# Where a gradient is nothing but rounding, sqrt(v) must not make a step of it.
OPTIMIZERS: dict[str, Any] = {
    "sgd": stoker.SGD(lr=0.05),
    "adagrad": stoker.Adagrad(lr=0.05, eps=1e-3),
    "rowwise": stoker.RowWiseAdagrad(lr=0.05, eps=1e-3),
    "adam": stoker.Adam(lr=0.02, eps=1e-3),
    "ftrl": stoker.FTRL(lr=0.05, l1=1e-3),
    "decay": stoker.SGD(lr=0.05, weight_decay=0.1, clip_value=0.7, schedule=stoker.StepDecay(every=2, gamma=0.3)),
    "clipped": stoker.Adagrad(lr=0.05, eps=1e-3, clip_norm=1.0),
}


def configs(pooling: str = "sum", names: tuple[str, ...] = tuple(SIZES)) -> list[TableConfig]:
    return [
        TableConfig(
            name=name, num_embeddings=SIZES[name], embedding_dim=DIM, features=OWNED[name], init_scale=0.8,
            pooling="mean" if pooling == "mean" and name in ("big", "other") else "sum",
        )
        for name in names
    ]  # fmt: skip


def make(
    where: str = "device",
    optimizer: str = "sgd",
    pooling: str = "sum",
    names: tuple[str, ...] = tuple(SIZES),
    **options: Any,
) -> EmbeddingTables:
    own = {feature for name in names for feature in OWNED[name]}
    placement = {name: each for name, each in {**TRAINS, **PLACEMENTS[where]}.items() if name in names}
    given = {"features": [name for name in ORDER if name in own], "seed": 4, "backend": "reference", **options}
    return EmbeddingTables(
        configs(pooling, names), optimizer=OPTIMIZERS[optimizer], placement=placement, **given
    )  # fmt: skip


def draw(step: int, kind: str, count: int = 6) -> Batch:
    """One-hot, jagged or empty; ids are skewed so that rows repeat within bags, features and steps."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.ones(count * 6, dtype=torch.int64)
    if kind != "one-hot":
        lengths = torch.randint(0, 4, (count * 6,), generator=generator) * (kind != "empty")
    limits = torch.tensor([SIZES[{f: t for t in OWNED for f in OWNED[t]}[name]] for name in ORDER])
    limits = limits.repeat(count).repeat_interleave(lengths)
    ids = (torch.rand(len(limits), generator=generator) ** 2 * limits).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    weights = torch.randn(len(ids), generator=generator) if kind == "weighted" else None
    if kind == "one-hot":
        return Batch(dense=torch.zeros(count, 0), ids=ids.view(count, 6), step=step)
    return Batch(dense=torch.zeros(count, 0), ids=ids, offsets=offsets, weights=weights, step=step)


class Plain:
    """The same tables in the plainest PyTorch: all rows from the cores, bags one by one, gradients from autograd."""

    def __init__(self, tables: EmbeddingTables) -> None:
        self.tables, self.tick = tables.tables, 0
        self.steps, self.optimizer, self.features = tables.steps, tables.optimizer, tables.features
        self.stored = {table.name: tables.rows(table.name) for table in tables.stored}
        self.state = {
            table.name: {name: value.clone() for name, value in next(iter(tables.read(table.name)))[1].state.items()}
            for table in tables.stored
        }
        self.shapes = {name: TRAINS[name].shape_of(t) for t in tables.tables for name in [t.name] if name in TRAINS}
        self.used: dict[str, list[Tensor]] = {}

    def cores(self, name: str) -> list[str]:
        return [f"{name}.core{place}" for place in range(1, len(self.shapes[name].rows) + 1)]

    def rows(self, leaves: dict[str, Tensor], table: TableConfig) -> Tensor:
        if table.name not in self.shapes:
            return leaves[table.name]
        shape = self.shapes[table.name]
        cores = [leaves[name].view(size) for name, size in zip(self.cores(table.name), shape.core_shapes, strict=True)]
        return rows_by_definition(cores, torch.arange(table.num_embeddings), shape)

    def pooled(self, leaves: dict[str, Tensor], batch: Batch, weights: Tensor | None) -> Tensor:
        rows = {feature: self.rows(leaves, table) for table in self.tables for feature in table.features}
        mean = {feature: table.pooling == "mean" for table in self.tables for feature in table.features}
        offsets, ids = batch.offsets, batch.ids.reshape(-1)
        if offsets is None:
            offsets = torch.arange(len(ids) + 1)
        self.used = {table.name: [] for table in self.tables}
        owner = {feature: table.name for table in self.tables for feature in table.features}
        found: list[Tensor] = []
        for bag, (begin, stop) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
            name = self.features[bag % len(self.features)]
            mine = ids[begin:stop]
            self.used[owner[name]].append(mine)
            values = rows[name][mine]
            if weights is not None:
                values = values * weights[begin:stop, None]
            if name in self.steps:
                found += [values.new_zeros(DIM)] * (self.steps[name] - len(mine)) + list(values)
            elif len(mine):
                found.append(values.mean(0) if mean[name] else values.sum(0))
            else:
                found.append(values.new_zeros(DIM))
        return torch.stack(found).view(-1, len(found) * len(self.features) // (len(offsets) - 1), DIM)

    def lookup(self, batch: Batch) -> Tensor:
        return self.pooled(self.stored, batch, batch.weights)

    def step(self, batch: Batch, grad: Tensor) -> Tensor | None:
        """One backward and one update; the gradient of the weights."""
        leaves = {name: value.clone().requires_grad_() for name, value in self.stored.items()}
        weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
        self.pooled(leaves, batch, weights).backward(grad)
        rule = self.optimizer.rule(self.tick)
        for table in self.tables:
            ids = torch.cat(self.used[table.name])
            names, numbers = [table.name], [ids]
            if table.name in self.shapes:
                names, numbers = self.cores(table.name), digits_of(ids, self.shapes[table.name])
            for name, touched in zip(names, numbers, strict=True):
                distinct = torch.unique(touched)
                gradient = leaves[name].grad
                assert gradient is not None
                update_rows(self.stored[name], self.state[name], distinct, gradient[distinct], rule)
        self.tick += 1
        return None if weights is None else weights.grad


def near(tables: EmbeddingTables, plain: Plain, tolerance: float = 2e-4) -> None:
    for name, value in plain.stored.items():
        torch.testing.assert_close(tables.rows(name), value, rtol=tolerance, atol=tolerance)
        state = next(iter(tables.read(name)))[1].state
        for kind, expected in plain.state[name].items():
            torch.testing.assert_close(state[kind], expected, rtol=tolerance, atol=tolerance)
    assert tables.tick == plain.tick


def gradient(batch: Batch, step: int, positions: int = 6) -> Tensor:
    count = len(batch.dense)
    return torch.randn(count, positions, DIM, generator=torch.Generator().manual_seed(100 + step))


def call(tables: EmbeddingTables, batch: Batch, weights: Tensor | None = None) -> Tensor:
    return tables(batch.ids, batch.offsets, batch.weights if weights is None else weights)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("kind", ["one-hot", "jagged", "weighted"])
def test_lookup_and_update_equal_the_definition(where, kind, staged, backend):
    pooling, optimizer = ("sum" if kind == "weighted" else "mean"), "adagrad"
    tables = make(where, optimizer, pooling, backend=backend)
    plain, batches = Plain(tables), [draw(step, kind) for step in range(5)]
    feed = stoker.stage(batches, tables, lookahead=3) if staged else batches
    for step, batch in enumerate(feed):
        weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
        out = call(tables, batch, weights)
        torch.testing.assert_close(out, plain.lookup(batch), rtol=1e-3, atol=1e-4)
        out.backward(gradient(batch, step))
        wanted = plain.step(batch, gradient(batch, step))
        if weights is not None:
            torch.testing.assert_close(weights.grad, wanted, rtol=1e-3, atol=1e-4)
    near(tables, plain)
    tables.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_works_on_slices(optimizer, backend):
    tables = make("device", optimizer, backend=backend)
    plain = Plain(tables)
    for step in range(6):
        batch = draw(step, "jagged")
        call(tables, batch).backward(gradient(batch, step))
        plain.step(batch, gradient(batch, step))
    near(tables, plain, 1e-3)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_exact_on_small_integers(backend):
    """Sums that float32 holds exactly leave nothing to tolerances."""
    tables = EmbeddingTables(
        configs(), optimizer=stoker.SGD(lr=1.0), features=ORDER, placement=TRAINS, backend=backend
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for table in tables.stored:
        weight = torch.randint(-1, 2, (table.num_embeddings, table.embedding_dim), generator=generator).float()
        tables.write(table.name, 0, Rows(weight, {}))
    plain = Plain(tables)
    for step in range(2):
        batch = draw(step, "jagged", 4)
        grad = torch.randint(-1, 2, (4, 6, DIM), generator=generator).float()
        out = call(tables, batch)
        assert torch.equal(out, plain.lookup(batch))
        out.backward(grad)
        plain.step(batch, grad)
        assert max(float(value.abs().max()) for value in plain.stored.values()) < 2**20
        for name, value in plain.stored.items():
            assert torch.equal(tables.rows(name), value), name


def trained(tables: EmbeddingTables, kind: str, steps: int = 4, *, stage: bool = False) -> dict[str, Tensor]:
    batches = [draw(step, kind) for step in range(steps)]
    for batch in stoker.stage(batches, tables, lookahead=2) if stage else batches:
        call(tables, batch).backward(gradient(batch, batch.step))
    return {name: value.clone() for name, value in tables.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["one-hot", "jagged", "weighted"])
def test_back_ends_give_the_same_bits(optimizer, kind):
    """Products are torch's in both; sums, updates and pooling are promised to the bit."""
    pooling = "sum" if kind == "weighted" else "mean"
    first, second = (trained(make("device", optimizer, pooling, backend=name), kind) for name in ("reference", "cpu"))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("rank", [16, 32])
def test_back_ends_give_the_same_bits_in_pieces(rank):
    """Slices as wide as kernels are compiled for."""
    found = []
    for backend in ("reference", "cpu"):
        table = TableConfig(name="t", num_embeddings=3000, embedding_dim=16, init_scale=0.5)
        tables = EmbeddingTables(
            [table], optimizer=stoker.Adam(lr=0.05), placement=TensorTrain(rank=rank), backend=backend
        )  # fmt: skip
        assert any(core.embedding_dim % 64 == 0 for core in tables.stored)
        for step in range(3):
            ids = torch.randint(0, 3000, (64, 1), generator=torch.Generator().manual_seed(step))
            tables(ids).square().sum().backward()
        found.append(tables.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("kind", ["one-hot", "jagged"])
def test_other_tables_are_to_the_bit_what_they_are_alone(where, kind):
    """Neither a tensor-train table beside them nor where they lie changes a bit of the others, nor of the cores."""
    expected = trained(make("device", "adam"), kind)
    assert all(
        torch.equal(value, expected[name]) for name, value in trained(make(where, "adam"), kind, stage=True).items()
    )
    others = ("small", "other")
    alone = make("device", "adam", names=others)
    keep = [place for place, name in enumerate(ORDER) if name in alone.features]
    for step in range(4):
        batch = draw(step, kind)
        ids, offsets = batch.ids, batch.offsets
        if offsets is None:
            ids = ids[:, keep]
        else:
            bags = [batch.ids[b:e] for b, e in zip(offsets.tolist(), offsets.tolist()[1:], strict=False)]
            bags = [bag for place, bag in enumerate(bags) if place % 6 in keep]
            ids, offsets = torch.cat(bags), torch.tensor([0, *map(len, bags)]).cumsum(0)
        alone(ids, offsets).backward(gradient(batch, step)[:, keep])
    for name, value in alone.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("staged", [False, True])
def test_features_kept_step_by_step(staged):
    tables = make("cached", "adagrad", steps={"x": 3, "w": 4})
    plain, batches = Plain(tables), [draw(step, "jagged") for step in range(4)]
    for step, batch in enumerate(stoker.stage(batches, tables) if staged else batches):
        out = call(tables, batch)
        assert out.shape == (6, 11, DIM)
        torch.testing.assert_close(out, plain.lookup(batch), rtol=1e-3, atol=1e-4)
        out.backward(gradient(batch, step, 11))
        plain.step(batch, gradient(batch, step, 11))
    near(tables, plain)
    tables.close()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_backward_after_the_cores_have_changed_is_refused(backend):
    """Its gradient depends on the cores as they were, as PyTorch says of parameters that were changed in place."""
    tables = make("device", "sgd", backend=backend)
    batches = [draw(step, "weighted") for step in range(2)]
    outs = [call(tables, batch) for batch in batches]
    outs[0].backward(gradient(batches[0], 0))
    before = {name: value.clone() for name, value in tables.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"changed between this forward and its backward.*join the losses"):
        outs[1].backward(gradient(batches[1], 1))
    assert all(torch.equal(value, before[name]) for name, value in tables.state_dict().items())


def test_a_second_backward_through_one_graph_is_refused():
    tables, batch = make("device", "adagrad"), draw(0, "jagged")
    out = call(tables, batch)
    out.backward(gradient(batch, 0), retain_graph=True)
    with pytest.raises(RuntimeError, match="changed between"):
        out.backward(gradient(batch, 0))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_batches_without_ids(backend):
    tables = make("device", "adam", backend=backend)
    before = {name: value.clone() for name, value in tables.state_dict().items()}
    out = call(tables, draw(0, "empty"))
    assert torch.equal(out, torch.zeros(6, 6, DIM))
    out.sum().backward()
    for name, value in tables.state_dict().items():
        assert torch.equal(value, before[name]) or name == "tick"
    assert {group.tick for group in tables.groups} == {1}
    none = tables(torch.zeros(0, 6, dtype=torch.int64))
    assert none.shape == (0, 6, DIM)
    plain = Plain(tables)
    plain.tick = 1
    call(tables, draw(1, "jagged")).backward(gradient(draw(1, "jagged"), 1))
    plain.step(draw(1, "jagged"), gradient(draw(1, "jagged"), 1))
    near(tables, plain)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_narrow_ids_are_ids(backend):
    found = []
    for kind in (torch.int64, torch.int32):
        tables, batch = make(backend=backend), draw(1, "jagged")
        tables(batch.ids.to(kind), batch.offsets).backward(gradient(batch, 1))
        found.append(tables.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("wrong", [57, 59, -1, 2**40])
@pytest.mark.parametrize("kind", ["one-hot", "jagged"])
def test_ids_outside_the_table(backend, wrong, kind):
    """The cores have rows 57 to 59, the table does not."""
    tables, batch = make(backend=backend), draw(0, kind)
    before = {name: value.clone() for name, value in tables.state_dict().items()}
    ids = batch.ids.clone()
    if kind == "one-hot":
        ids[4, ORDER.index("y")] = wrong
        example = 4
    else:
        ends = batch.offsets.tolist()
        example = next(b for b in range(6) if ends[b * 6 + 5] > ends[b * 6 + 4])
        ids[ends[example * 6 + 4]] = wrong
    with pytest.raises(IndexError, match=rf"example {example} has id {wrong} in feature 'y'.*'big'"):
        tables(ids, batch.offsets)
    assert all(torch.equal(value, before[name]) for name, value in tables.state_dict().items())


def test_looking_up_changes_nothing():
    tables, batch = make("device", "adam"), draw(3, "jagged")
    before = trained(tables, "jagged")
    with torch.no_grad():
        out = call(tables, batch)
    call(tables, batch)  # and a forward that is never followed by a backward
    assert not out.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in tables.state_dict().items())
    torch.testing.assert_close(out, Plain(tables).lookup(batch), rtol=1e-3, atol=1e-4)


# ---- reading, writing, copying


def test_what_is_stored():
    tables = make()
    assert [table.name for table in tables.stored] == [
        "big.core1", "big.core2", "big.core3", "small", "wide.core1", "wide.core2", "other",
    ]  # fmt: skip
    sizes = [(table.num_embeddings, table.embedding_dim) for table in tables.stored[:3]]
    assert sizes == [(5, 1 * 4), (3, 4 * 6), (4, 3 * 4)]
    assert set(tables.state_dict()) == {*(f"{table.name}.weight" for table in tables.stored), "tick"}
    assert len({table.name: table for table in make("device", names=("small",)).stored}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 2, 10, 1000])
def test_rows_and_cores_read_by_name(chunk):
    tables = make("device", "adam")
    trained(tables, "jagged")
    plain = Plain(tables)
    for table in tables.tables:
        read = list(tables.read(table.name, chunk))
        assert [start for start, _ in read] == list(range(0, table.num_embeddings, chunk))
        expected = plain.rows(plain.stored, table)
        torch.testing.assert_close(torch.cat([rows.weight for _, rows in read]), expected, rtol=1e-4, atol=1e-5)
    for table in tables.stored:
        read = list(tables.read(table.name, chunk))
        assert torch.equal(torch.cat([rows.weight for _, rows in read]), plain.stored[table.name])
        for name, value in plain.state[table.name].items():
            assert torch.equal(torch.cat([rows.state[name] for _, rows in read]), value)


def test_rows_gathered_by_address():
    storage, rows = make().groups[0].storage, make().rows("big")
    wanted = torch.tensor([56, 3, 3, 0, 20])
    torch.testing.assert_close(storage.gather(wanted.numpy()).weight, rows[wanted], rtol=1e-5, atol=1e-6)
    assert storage.gather(wanted[:0].numpy()).weight.shape == (0, DIM)


def test_cores_are_written_by_name():
    tables = make("device", "adam")
    core = tables.stored[1]
    before = {name: value.clone() for name, value in tables.state_dict().items()}
    values = torch.full((2, core.embedding_dim), 2.5)
    state = {"exp_avg": values * 2, "exp_avg_sq": values * 3}
    tables.write(core.name, 1, Rows(values, state))
    for name, value in tables.state_dict().items():
        expected = before[name].clone()
        if name.startswith("big.core2."):
            kind = name.rpartition(".")[2]
            expected[1:3] = values if kind == "weight" else state[kind]
        assert torch.equal(value, expected), name
    with pytest.raises(IndexError, match=r"big\.core2"):
        tables.write(core.name, 2, Rows(values, state))
    with pytest.raises(ConfigError, match="one by one"):
        tables.write("big", 0, Rows(torch.zeros(1, DIM), {}))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_backward_after_a_core_was_written_is_refused(place):
    tables = make("device", "sgd", names=("big",))
    out = tables(torch.tensor([[1, 2], [30, 2]]))
    core = tables.stored[place]
    tables.write(core.name, 0, Rows(torch.ones(core.num_embeddings, core.embedding_dim), {}))
    with pytest.raises(RuntimeError, match="changed between"):
        out.backward(torch.ones(2, 2, DIM))


def through_pickle(tables: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(tables, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_state_dict(tables: Any) -> Any:
    file = io.BytesIO()
    torch.save(tables.state_dict(), file)
    file.seek(0)
    made = make("cached", "adam", seed=99)
    made.load_state_dict(torch.load(file, weights_only=True))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_state_dict])
@pytest.mark.parametrize("where", ["device", "cached"])
def test_copies_are_whole_and_their_own(copied, where):
    tables = make(where, "adam")
    before = trained(tables, "jagged")
    other = copied(tables)
    assert {t.name for t in other.stored} == {t.name for t in tables.stored}
    batch = draw(50, "jagged")
    call(other, batch).backward(gradient(batch, 50))
    assert all(torch.equal(value, before[name]) for name, value in tables.state_dict().items())
    call(tables, batch).backward(gradient(batch, 50))
    first, second = tables.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert any(not torch.equal(value, before[name]) for name, value in first.items() if "core" in name)


def test_state_that_does_not_fit():
    tables = make()
    state = tables.state_dict()
    missing = {name: value for name, value in state.items() if name != "big.core2.weight"}
    with pytest.raises(RuntimeError, match=r"big\.core2\.weight"):
        make().load_state_dict(missing)
    with pytest.raises(RuntimeError, match=r"big\.core1"):
        make().load_state_dict({**state, "big.core1.weight": torch.zeros(6, 4)})


def test_a_change_of_optimizer():
    tables = make("device", "sgd")
    trained(tables, "jagged")
    tables.optimizer = OPTIMIZERS["adagrad"]
    plain, batch = Plain(tables), draw(9, "jagged")
    assert all(
        value.shape == plain.stored[name].shape and not value.any()
        for name, kept in plain.state.items()
        for value in kept.values()
    )
    call(tables, batch).backward(gradient(batch, 9))
    plain.step(batch, gradient(batch, 9))
    near(tables, plain)


def test_fresh_cores_do_not_depend_on_their_neighbours():
    together, alone = make(), make(names=("big",))
    for place, table in enumerate(alone.stored):
        assert torch.equal(together.rows(table.name), alone.rows(table.name))
        core = torch.empty(SHAPE.core_shapes[place])
        fill_core(core, 4, "big", SHAPE, place, 0.8)
        assert torch.equal(alone.rows(table.name), core.flatten(1))
    trained_rows = torch.stack([make(names=("big",), seed=seed).rows("big") for seed in range(60)])
    assert trained_rows.square().mean().item() == pytest.approx(0.8**2 / 3, rel=0.1)


def test_refusals():
    table = TableConfig(name="t", num_embeddings=50, embedding_dim=4)
    for wrong in ({"rank": 0}, {"rank": (2, 2, 2)}, {"cores": 1}, {"cores": 5}):
        with pytest.raises(ConfigError, match=r"rank|cores"):
            TensorTrain(**wrong)

    def build(table: TableConfig, **options: Any) -> EmbeddingTables:
        return EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1), placement=TensorTrain(**options))

    with pytest.raises(ConfigError, match="bfloat16"):
        build(TableConfig(name="t", num_embeddings=50, embedding_dim=4, dtype="bfloat16"))
    with pytest.raises(ConfigError, match="50 x 4"):
        build(table, shape=TTShape((7, 7), (2, 2), (3,)))
    with pytest.raises(ConfigError, match="50 x 4"):
        build(table, shape=TTShape((8, 8), (2, 3), (3,)))
    with pytest.raises(ConfigError, match="init_scale"):
        build(TableConfig(name="t", num_embeddings=50, embedding_dim=4, init_scale=0.0))


def test_a_table_with_the_name_of_a_core():
    tables = [TableConfig(name=name, num_embeddings=50, embedding_dim=4) for name in ("t", "t.core2")]
    for placement in ({"t": TensorTrain()}, TensorTrain()):
        with pytest.raises(ConfigError, match=r"t\.core2.*Rename"):
            EmbeddingTables(tables, optimizer=stoker.SGD(lr=0.1), placement=placement)


def test_lists_do_as_tuples():
    """As JSON and TOML give them."""
    table = TableConfig(name="t", num_embeddings=50, embedding_dim=4)
    for train in (TensorTrain(rank=[2, 3]), TensorTrain(shape=TTShape([4, 13], [2, 2], [3]))):  # type: ignore[arg-type]
        made = EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1), placement=train)
        assert made(torch.tensor([[49]])).shape == (1, 1, 4)


# ---- replicas


def share(step: int, rank: int, count: int) -> tuple[Batch, Tensor]:
    batch = draw(10 * step + rank, "weighted", count)
    return batch, gradient(batch, 10 * step + rank)


COUNTS = {"even": (4, 4), "uneven": (5, 2)}
SHARDS = {"even": 2, "uneven": 1}  # a shard is a half of the batch, so uneven shares are none


def joint(step: int, counts: tuple[int, ...]) -> tuple[Batch, Tensor]:
    parts = [share(step, rank, count) for rank, count in enumerate(counts)]
    lengths = torch.cat([batch.offsets.diff() for batch, _ in parts])
    batch = Batch(
        dense=torch.zeros(sum(counts), 0), ids=torch.cat([batch.ids for batch, _ in parts]),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        weights=torch.cat([batch.weights for batch, _ in parts]),
    )  # fmt: skip
    return batch, torch.cat([grad * (len(grad) / sum(counts)) for _, grad in parts])


def run(tables: EmbeddingTables, feed: Any) -> dict[str, Tensor]:
    for step in range(4):
        batch, grad = feed(step)
        call(tables, batch).backward(grad)
    return {name: value.clone() for name, value in tables.state_dict().items()}


def worker(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    found = {}
    for name, counts in COUNTS.items():
        tables = make("cached", "adam", shards=SHARDS[name])
        tables.replicate(Replicas())
        found[name] = run(tables, lambda step, count=counts[rank]: share(step, rank, count))
    try:
        make("device", seed=rank).replicate(Replicas())
    except ConfigError as error:
        found["error"] = str(error)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_replicas_hold_the_cores_of_one_process(tmp_path: Path) -> None:
    start_ranks(worker, 2, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, counts in COUNTS.items():
        expected = run(make("cached", "adam", shards=SHARDS[name]), lambda step, counts=counts: joint(step, counts))
        for found in ranks:
            assert found[name].keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(found[name][key], ranks[0][name][key]), key
                if name == "even":
                    assert torch.equal(found[name][key], value), key
                else:
                    torch.testing.assert_close(found[name][key], value, rtol=1e-4, atol=1e-5)
    assert all("'big.core1'" in found["error"] for found in ranks)


@pytest.mark.parametrize("rank", [2.5, "8", None, (2, 2.5)])
def test_a_rank_that_is_no_whole_number_is_refused_by_name(rank: Any) -> None:
    for make in (lambda: stoker.TTEmbeddingBag(100, 8, rank=rank), lambda: TensorTrain(rank=rank)):
        with pytest.raises(stoker.ConfigError, match="rank must be a whole number or a list of whole numbers"):
            make()


def test_ranks_of_numpy_are_numbers_that_files_take() -> None:
    assert json.dumps(TensorTrain(rank=np.int64(4)).rank) == "4"  # type: ignore[arg-type]
    assert json.dumps(TensorTrain(rank=(np.int64(4), 5)).rank) == "[4, 5]"  # type: ignore[arg-type]
