"""Tables that grow, under every placement, against rows in a dictionary."""

from __future__ import annotations

import copy
import json
import pickle
import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import EFFORT, numbers, scaled
from growing import Reference
from placed import Pairs
from ranked import on_threads
from safetensors.torch import load_file
from torch import Tensor

import stoker
from stoker import Batch, Cached, Device, EmbeddingTables, Grow, HostPipelined, HotCold, Mapped, TableConfig, optim
from stoker.base.errors import ConfigError
from stoker.tables import Ranks
from stoker.tables.growing.ids import InitialRows
from stoker.tables.ranks import share as shares
from stoker.training.files.segments import join

PROGRAMS = 120
OPTIMIZERS = (
    optim.SGD(lr=0.1), optim.Adagrad(lr=0.1), optim.RowWiseAdagrad(lr=0.1), optim.Adam(lr=0.05), optim.FTRL(lr=0.1),
    optim.MomentumSGD(lr=0.1),
)  # fmt: skip


def initial_rows(table: TableConfig, seed: int, ids: list[int]) -> Tensor:
    return InitialRows([table], seed).make(np.zeros(len(ids), np.int64), np.array(ids), table.embedding_dim)


def test_the_kernel_of_new_rows_equals_their_definition(monkeypatch):
    tables = [TableConfig(name=f"t{i}", num_embeddings=10 ** (i + 1), embedding_dim=5) for i in range(3)]
    new, random = InitialRows(tables, 3), np.random.default_rng(0)
    given = np.sort(random.integers(0, 3, 500)), random.integers(-(2**63), 2**63 - 1, 500)
    found = [new.make(*given, dim) for dim in (1, 5, 16)]
    monkeypatch.setattr("stoker.tables.growing.ids.HAVE_NUMBA", False)
    assert all(torch.equal(each, new.make(*given, each.shape[1])) for each in found)


def strategies(random: np.random.Generator, folder: Path) -> dict[str, Any]:
    """One of each kind, of a size that most batches fit."""
    slots = int(random.integers(12, 30))
    return {
        "device": Device(),
        "mapped": Mapped(path=str(folder)),
        "cached": Cached(slots=slots),
        "hot": HotCold(hot={"user": 2, "item": 1}, slots=slots),
        "pipelined": HostPipelined(slots=slots),
        "file": Cached(slots=slots, home="file", path=str(folder)),
        "in place": HostPipelined(slots=slots, home="file", path=str(folder), writes="in-place"),
        "tier": Cached(slots=slots, home="file", path=str(folder), host_memory="16KiB"),
        "own": Cached(slots=slots, home=Pairs.kind),
        "few": Cached(slots=3),  # batches are chunked
    }


class ByHand:
    """Rows in a dictionary for each table, stepped by tables of one row a raw id that were known beforehand.

    A raw id that comes back gets another one, and lookups without a row have one of their own.
    """

    def __init__(self, tables: list[TableConfig], optimizer: Any, lives: dict[str, int], seed: int) -> None:
        self.known = {table.name: Reference(table.num_embeddings, table.grow or Grow()) for table in tables}
        self.tables, self.seed = tables, seed
        wide = [
            TableConfig(
                name=t.name, num_embeddings=lives[t.name], embedding_dim=t.embedding_dim, features=t.features,
                pooling=t.pooling, init_scale=t.scale,
            )
            for t in tables
        ]  # fmt: skip
        self.made = EmbeddingTables(wide, optimizer=optimizer, seed=seed)
        self.next = dict.fromkeys(self.known, 1)
        self.life: dict[str, dict[int, int]] = {name: {0: 0} for name in self.known}  # row -> the one that has it now

    def rows(self, ids: Tensor, time: int | None, *, trains: bool) -> Tensor:
        """Raw ids [B, F], one feature a table, as rows of these tables."""
        out = ids.clone()
        for column, table in enumerate(self.tables):
            name, keys = table.name, ids[:, column].tolist()
            known = self.known[name]
            rows, born = known.look_up(keys, time) if trains else (known.find(keys), {})
            for row, key in sorted(born.items()):
                fresh = self.life[name][row] = self.next[name]
                self.next[name] += 1
                self.made.write(name, fresh, initial_rows(table, self.seed, [key]))
            out[:, column] = torch.tensor([self.life[name][row] for row in rows])
        return out


def draw(seed: int, folder: Path) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    grows = [
        Grow(
            admit=int(random.choice([1, 1, 2])), ttl=None if random.random() < 0.5 else int(random.integers(1, 10)),
            evict=[None, "lru", "lfu"][int(random.integers(3))],
        )
        for _ in range(3)
    ]  # fmt: skip
    dims = (4, 4, 4) if random.random() < 0.5 else (4, 8, 4)
    tables = [
        TableConfig(name=name, num_embeddings=int(random.integers(4, 40)), embedding_dim=dim, grow=grow)
        for name, dim, grow in zip(("user", "item", "shop"), dims, grows, strict=True)
    ]
    count, steps = int(random.choice([8, 30])), int(random.integers(4, 16))
    values = random.integers(-(2**63), 2**63, count)
    values[0] = 0
    batches = []
    for step in range(steps):
        ids = values[(count * random.random((int(random.integers(1, 9)), 3)) ** 1.5).astype(int)]
        batches.append(Batch(dense=torch.zeros(len(ids), 0), ids=torch.from_numpy(ids), step=step, time=3 * step))
    found = strategies(random, folder)
    return {
        "tables": tables, "batches": batches, "optimizer": OPTIMIZERS[int(random.integers(len(OPTIMIZERS)))],
        "strategy": found[list(found)[seed % len(found)]], "staged": random.random() < 0.8,
        "lookahead": [None, 0, 3, 50][int(random.integers(4))], "in_flight": int(random.integers(1, 4)),
        "background": bool(random.random() < 0.3), "peeks": set(random.integers(0, steps, 3).tolist()),
        "skips": set(random.integers(0, 4 * steps, 2).tolist()),
        "sides": set(random.integers(0, 3 * steps, 2).tolist()),
        "ends": int(random.integers(1, 2 * steps)), "timed": bool(random.random() < 0.3), "random": random,
    }  # fmt: skip


class Trial:
    """A random loop over tables, placed and perhaps staged, and by hand."""

    def __init__(self, seed: int, folder: Path, **change: Any) -> None:
        self.seed, self.folder, self.case = seed, folder, draw(seed, folder) | change
        self.tables, self.batches = self.case["tables"], self.case["batches"]
        optimizer, lives = self.case["optimizer"], 2 + 2 * sum(len(each.ids) for each in self.batches)
        self.made = EmbeddingTables(self.tables, optimizer=optimizer, placement=self.case["strategy"], seed=seed)
        self.byhand = ByHand(self.tables, optimizer, {table.name: lives for table in self.tables}, seed)

    def check(self, batch: Batch, *, trains: bool) -> None:
        """Look a batch up, and perhaps train on it."""
        rows = self.byhand.rows(batch.ids, batch.time, trains=trains)
        with nullcontext() if trains else torch.no_grad():
            out, wanted = self.made(batch.ids, time=batch.time), self.byhand.made(rows)
        assert torch.equal(out, wanted), (self.seed, batch.step)
        if trains:
            gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(batch.step))
            out.backward(gradient)
            wanted.backward(gradient)

    def fresh(self, step: int) -> Batch:
        """A batch in memory of its own."""
        batch = self.batches[step % len(self.batches)]
        time = batch.time if self.case["timed"] else None
        return Batch(dense=batch.dense, ids=batch.ids.clone(), step=batch.step, time=time)

    def train(self, first: int) -> int:
        """Train from a batch on, perhaps not to the end; return the next one."""
        case, made = self.case, self.made
        stream: Any = [self.fresh(step) for step in range(first, len(self.batches))]
        if case["staged"]:
            stream = stoker.stage(
                stream, made, lookahead=case["lookahead"], in_flight=case["in_flight"], background=case["background"]
            )
        for batch in stream:
            if batch.step in case["skips"]:
                continue
            if batch.step in case["peeks"]:
                self.check(self.fresh(7 * batch.step), trains=False)
            if batch.step in case["sides"]:
                self.check(self.fresh(5 * batch.step), trains=True)
            self.check(batch, trains=True)
            if batch.step == case["ends"]:
                return batch.step + 1
        return len(self.batches)

    def check_rows(self) -> None:
        """Compare the raw ids, and the rows that have one, with their state."""
        for table in self.tables:
            name, known = table.name, self.byhand.known[table.name]
            raw = self.made.raw.raw_ids(name).tolist()
            owner = {entry[0]: key for key, entry in known.rows.entries.items()}
            assert raw == [owner.get(row, 0) for row in range(len(raw))]
            [(_, own)] = self.made.read(name, len(raw))
            [(_, others)] = self.byhand.made.read(name, 10**9)
            for row in (0, *owner):
                life = self.byhand.life[name][row]
                for one, other in zip(own.tensors, others.tensors, strict=True):
                    assert torch.equal(one[row], other[life]), (self.seed, name, row)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
def test_a_placement_and_a_stage_change_nothing(first: int, tmp_path: Path) -> None:
    for seed in numbers(PROGRAMS)[first::4]:
        trial = Trial(seed, tmp_path)
        following = trial.train(0)
        trial.made = again(trial.case["random"], trial.made, tmp_path)
        trial.train(following)
        trial.check_rows()
        trial.made.close()


COMBINED = (
    *OPTIMIZERS, optim.Adam(lr=0.05, cow_clip=(0.2, 1e-3)), optim.Adagrad(lr=0.1, clip_value=0.1, weight_decay=0.1),
    optim.SGD(lr=0.1, clip_norm=0.5), optim.LAMB(lr=0.1),
)  # fmt: skip


@pytest.mark.slow
def test_each_combination_works_to_the_bit_or_is_refused_before_training(tmp_path: Path) -> None:
    """Rows by each optimizer under each placement, of each dtype, with padding_idx or not."""
    places = strategies(np.random.default_rng(0), tmp_path) | {"tensor train": stoker.TensorTrain(rank=2)}
    works, refused = [], 0
    for optimizer, place, dtype, padding in product(COMBINED, places, ("float32", "bfloat16"), (None, 0)):
        wrong = {
            "bfloat16": dtype == "bfloat16", "padding_idx": padding is not None,
            "LAMB": isinstance(optimizer, optim.LAMB), "tensor train": place == "tensor train",
        }  # fmt: skip
        if not any(wrong.values()):
            works.append((optimizer, places[place]))
            continue
        options: Any = {"num_embeddings": 9, "embedding_dim": 4, "grow": Grow(), "dtype": dtype, "padding_idx": padding}
        with pytest.raises(ConfigError, match="|".join(word for word, given in wrong.items() if given)):
            EmbeddingTables(
                [TableConfig(name=name, **options) for name in ("user", "item")],
                optimizer=optimizer, placement=places[place],
            )  # fmt: skip
        refused += 1
    assert (len(works), refused) == (90, 350)
    # A seventh of them, so that each optimizer and each placement is among them; campaigns do more.
    for seed in range(0, 90, max(1, round(7 * 0.125 / EFFORT))):
        optimizer, placement = works[seed]
        trial = Trial(seed, tmp_path, optimizer=optimizer, strategy=placement)
        trial.train(0)
        trial.check_rows()
        trial.made.close()


def again(random: np.random.Generator, made: EmbeddingTables, folder: Path) -> EmbeddingTables:
    """The same tables, or a copy by one of the ways to copy them, under any placement."""
    way = str(random.choice(["", "deepcopy", "pickle", "state_dict", "placed"]))
    if way == "":
        return made
    if way == "deepcopy":
        found = copy.deepcopy(made)
    elif way == "pickle":
        found = pickle.loads(pickle.dumps(made))
    else:
        arguments = made._made_with()
        if way == "placed":
            chosen = strategies(random, folder)
            arguments["placement"] = chosen[str(random.choice(list(chosen)))]
        found = EmbeddingTables(**arguments)
        found.load_state_dict(copy.deepcopy(made.state_dict()))
    made.close()
    found.train()
    return found


def make(grow: Grow, rows: int = 20, **options: Any) -> EmbeddingTables:
    table = TableConfig(name="item", num_embeddings=rows, embedding_dim=4, grow=grow)
    return EmbeddingTables([table], optimizer=optim.Adagrad(lr=0.1), **options)


def test_known_beforehand_or_not_and_in_any_order() -> None:
    """Rows by raw id equal those of a table whose raw ids had rows from the beginning, in another order."""
    random = np.random.default_rng(0)
    raw = random.integers(-(2**63), 2**63, 300)
    batches = [torch.from_numpy(random.choice(raw, (64, 1))) for _ in range(20)]
    grown = make(Grow(evict=None), 400, placement=Cached(slots=80))
    known = EmbeddingTables(
        [TableConfig(name="item", num_embeddings=400, embedding_dim=4)], optimizer=optim.Adagrad(lr=0.1)
    )
    row_of = {raw_id: row for row, raw_id in enumerate(random.permutation(raw).tolist(), 50)}
    known.write("item", 50, initial_rows(grown.tables[0], 0, list(row_of)))
    for ids in stoker.stage(batches, grown, lookups=lambda ids: ids):
        rows = torch.tensor([[row_of[each]] for each in ids.flatten().tolist()])
        for made, wanted in ((grown, ids), (known, rows)):
            made(wanted).square().mean().backward()
    [(_, one)], [(_, other)] = grown.read("item", 400), known.read("item", 400)
    mine = grown.raw_ids("item").tolist()
    assert len({each for each in mine if each}) == len({each for ids in batches for each in ids.flatten().tolist()})
    for row, raw_id in enumerate(mine):
        if raw_id:
            for a, b in zip(one.tensors, other.tensors, strict=True):
                assert torch.equal(a[row], b[row_of[raw_id]])


def test_lookups_that_do_not_train_give_no_rows() -> None:
    made = make(Grow())
    made(torch.tensor([[5], [7]])).sum().backward()
    before = made.raw_ids("item")
    assert before.tolist() == [0, 5, 7] + [0] * 17
    with torch.no_grad():
        assert torch.equal(made(torch.tensor([[9]]))[0, 0], made.rows("item")[0])
    made.eval()
    made(torch.tensor([[9], [11]]))
    made.train()
    made.freeze("item")
    made(torch.tensor([[13]])).sum().backward()
    made.unfreeze()
    made.requires_grad_(False)
    made(torch.tensor([[15]]))
    assert torch.equal(made.raw_ids("item"), before)


def test_a_full_table_without_eviction_counts_what_it_refuses() -> None:
    made = make(Grow(evict=None), 3)
    made(torch.tensor([[1], [2], [3], [3], [0]])).sum().backward()
    assert made.raw_ids("item").tolist() == [0, 1, 2]
    assert made.raw.refused == 2


def test_an_evaluation_that_is_staged_sees_the_last_batch_that_trained() -> None:
    made, ids = make(Grow(admit=2), placement=Cached(slots=12)), torch.arange(1, 7).view(-1, 1)
    stream = stoker.stage([ids.clone() for _ in range(4)], made, lookups=lambda ids: ids, lookahead=9)
    for step, batch in enumerate(stream):
        made.eval()
        for other in stoker.stage([ids.clone(), ids.clone()], made, lookups=lambda ids: ids):
            out = made(other)
            known = made.raw_ids("item")[1:7].tolist()
            assert known == ([1, 2, 3, 4, 5, 6] if step > 1 else [0] * 6)
            assert torch.equal(out[:, 0], made.rows("item")[torch.arange(1, 7) if step > 1 else torch.zeros(6).long()])
        made.train()
        made(batch).sum().backward()


def test_a_repeated_forward_finds_the_same_rows() -> None:
    """An id that is admitted within a batch has row 0 before, also when torch.utils.checkpoint repeats the lookup."""
    found = []
    for repeats in (False, True):
        made, head = make(Grow(admit=2)), torch.nn.Parameter(torch.ones(4))
        ids = torch.tensor([[4], [4], [4]])

        def loss(ids: Tensor, made: Any = made, head: Any = head) -> Tensor:
            return (made(ids)[:, 0] * head).pow(3).sum()

        for _ in range(2):
            value = torch.utils.checkpoint.checkpoint(loss, ids, use_reentrant=False) if repeats else loss(ids)
            value.backward()
        found.append((head.grad, made.rows("item"), made.raw_ids("item"), next(iter(made.raw.read("item")))))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [Cached(slots=30), HostPipelined(slots=30)])
def test_tables_that_are_frozen_in_turn_give_the_rows_of_their_ids_when_staged(placement: Any) -> None:
    """Freezing changes which raw ids of the batches ahead get rows."""

    def outputs(seed: int, where: Any, *, staged: bool) -> list[Tensor]:
        configs = [
            TableConfig(name="a", num_embeddings=5, embedding_dim=2, grow=Grow(ttl=1)),
            TableConfig(name="b", num_embeddings=9, embedding_dim=2),
        ]
        tables = EmbeddingTables(configs, optimizer=optim.SGD(lr=1.0), placement=where)
        generator = torch.Generator().manual_seed(seed)
        stream = [torch.randint(1, 9, (2, 2), generator=generator) for _ in range(8)]
        found = []
        for step, ids in enumerate(
            stoker.stage(stream, tables, lookahead=4, lookups=lambda each: each) if staged else stream
        ):
            tables.unfreeze()
            tables.freeze("ab"[step % 2])
            out = tables(ids)
            found.append(out.detach().clone())
            out.square().sum().backward()
        return found

    for seed in range(6):
        for one, other in zip(outputs(seed, None, staged=False), outputs(seed, placement, staged=True), strict=True):
            assert torch.equal(one, other), seed


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_know_the_raw_ids_that_wait(copied: Any) -> None:
    made = make(Grow(admit=2))
    made(torch.tensor([[5]])).sum().backward()
    other = copied(made)
    other(torch.tensor([[5]])).sum().backward()
    assert (5 in other.raw_ids("item").tolist(), 5 in made.raw_ids("item").tolist()) == (True, False)


@pytest.mark.usefixtures("no_cycle_is_found")
def test_rows_go_with_the_last_reference_to_their_tables() -> None:
    """A process that updates a run every night would have the rows of many nights otherwise, in memory or in files."""
    made = make(Grow())
    made(torch.tensor([[5]])).sum().backward()
    storage = weakref.ref(made.groups[0].storage)
    del made
    assert storage() is None


def test_a_gradient_of_a_row_that_has_another_raw_id_now_is_refused() -> None:
    made = make(Grow(), 3)
    first = made(torch.tensor([[1], [2]]))
    made(torch.tensor([[3]])).sum().backward()  # evicts 1
    with pytest.raises(ConfigError, match="1 further lookups"):
        first.sum().backward()

    def accumulate(*ids: int) -> None:
        with made.accumulate():
            for each in ids:
                made(torch.tensor([[each]])).sum().backward()

    with pytest.raises(ConfigError, match="another raw id"):
        accumulate(1, 4, 5)
    accumulate(5, 5)


def test_gradients_of_before_a_load_are_refused() -> None:
    table = TableConfig(name="t", num_embeddings=9, embedding_dim=2, grow=Grow())
    tables, other = (EmbeddingTables([table], optimizer=optim.SGD(lr=1.0)) for _ in range(2))
    other(torch.tensor([[7], [8]])).sum().backward()
    out = tables(torch.tensor([[300]])).sum()
    tables.load_state_dict(other.state_dict())
    before = tables.rows("t")
    with pytest.raises(ConfigError, match="or after a load, and a row may be another raw id's"):
        out.backward()
    assert torch.equal(tables.rows("t"), before)
    tables(torch.tensor([[300]])).sum().backward()
    weights = {name: value for name, value in other.state_dict().items() if not name.endswith(("raw_ids", "waiting"))}
    with pytest.raises(RuntimeError, match="rows of tables that grow need their raw ids"):
        tables.load_state_dict(weights, strict=False)


def test_steps_have_times_or_not() -> None:
    made = make(Grow(ttl=10))
    made(torch.tensor([[1]]), time=100).sum().backward()
    with pytest.raises(ConfigError, match="step 1 has no time"):
        made(torch.tensor([[1]]))
    made(torch.tensor([[2]]), time=110).sum().backward()
    made(torch.tensor([[2]]), time=90).sum().backward()  # the clock does not go back
    assert made.raw_ids("item")[1:3].tolist() == [1, 2]
    made(torch.tensor([[1]]), time=111).sum().backward()  # 1 begins again
    assert [entry[:3] for entry in next(iter(made.raw.read("item"))).tolist()] == [[1, 1, 1], [2, 2, 2]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"padding_idx": 1}, "padding_idx"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"num_embeddings": 1}, "row 0"),
        ({"num_embeddings": 2**31}, "2,147,483,647"),
    ],
)
def test_tables_that_cannot_grow(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TableConfig(**{"name": "item", "num_embeddings": 9, "embedding_dim": 4, "grow": Grow(), **change})


@pytest.mark.slow
def test_what_does_not_go_with_growing() -> None:
    table = TableConfig(name="item", num_embeddings=9, embedding_dim=4, grow=Grow())
    for options, words in (
        ({"optimizer": optim.LAMB(lr=0.1)}, "LAMB"),
        ({"placement": stoker.TensorTrain(rank=2)}, "tensor train"),
    ):
        with pytest.raises(ConfigError, match=words):
            EmbeddingTables([table], **{"optimizer": optim.SGD(lr=0.1), **options})
    made = make(Grow(), placement=Cached(slots=5))
    with pytest.raises(ConfigError, match="epoch_lookahead"):
        stoker.stage([], made, epoch_lookahead=True)
    with pytest.raises(ConfigError, match=r"torch\.compile"):
        torch.compile(lambda ids: made(ids) * 2, backend="eager")(torch.tensor([[1]]))
    for wrong, words in (({"admit": 0}, "admit is 0"), ({"ttl": -1}, "ttl is -1"), ({"evict": "fifo"}, "'fifo'")):
        with pytest.raises(ConfigError, match=words):
            Grow(**wrong)
    with pytest.raises(ConfigError, match="does not grow"):
        EmbeddingTables(
            [TableConfig(name="a", num_embeddings=2, embedding_dim=2)], optimizer=optim.SGD(lr=1.0)
        ).raw_ids("a")


class Net(torch.nn.Module):
    def __init__(self, placement: Any, grow: Grow | None) -> None:
        super().__init__()
        tables = [TableConfig(name="shop", num_embeddings=9, embedding_dim=4)]
        tables.append(TableConfig(name="item", num_embeddings=30, embedding_dim=4, grow=grow))
        self.tables = EmbeddingTables(tables, optimizer=optim.Adam(lr=0.1), placement=placement)
        self.head = torch.nn.Linear(4, 1)


def steps(net: Net, batches: list[Tensor]) -> None:
    for ids in stoker.stage(batches, net.tables, lookups=lambda ids: ids):
        net.head(net.tables(ids).sum(1)).square().mean().backward()


def test_a_checkpoint_goes_on_to_the_bit_under_another_placement(tmp_path: Path) -> None:
    random, grow = np.random.default_rng(0), Grow(admit=2, ttl=6, evict="lfu")
    batches = [torch.from_numpy(np.stack([random.integers(0, 9, 8), random.zipf(1.3, 8)], 1)) for _ in range(30)]
    torch.manual_seed(0)
    whole = Net(Device(), grow)
    steps(whole, batches[:20])
    path = stoker.save(tmp_path / "a", whole, shard_bytes=200)
    assert len(list(path.glob("tables/*.raw_ids.*"))) > 1
    assert list(path.glob("tables/*.waiting.*"))
    rest = Net(Cached(slots=20, home="file", path=str(tmp_path)), grow)
    stoker.load(path, rest, extra_state={})
    for net in (whole, rest):
        steps(net, batches[20:])
    for name, value in whole.state_dict().items():
        assert torch.equal(value, rest.state_dict()[name]), name
    with pytest.raises(stoker.CheckpointError, match=r"grows in .*, but does not"):
        stoker.load(path, Net(Device(), None))
    plain = Net(Device(), None)
    with pytest.raises(stoker.CheckpointError, match=r"does not in .*, but grows"):
        stoker.load(stoker.save(tmp_path / "b", plain), rest)


def test_a_base_and_segments_are_a_whole_checkpoint(tmp_path: Path) -> None:
    random, grow = np.random.default_rng(1), Grow(admit=2, ttl=2, evict="lru")
    batches = [torch.from_numpy(np.stack([random.integers(0, 9, 8), random.zipf(1.2, 8)], 1)) for _ in range(30)]
    torch.manual_seed(0)
    net = Net(Cached(slots=24), grow)
    stoker.track_changes(net)
    steps(net, batches[:10])
    path, freed = stoker.save(tmp_path / "0", net), 0
    for number in (1, 2, 3):
        steps(net, batches[6 * number + 4 : 6 * number + 10])
        path = stoker.save(tmp_path / str(number), net, parent=path)
        last = json.loads((path / "manifest.json").read_text())
        assert not any(entry.get("whole") for entry in last["tables"])
        files = [*last["tables"][1]["raw_ids"], *last["tables"][1]["waiting"]]
        freed += sum(int((load_file(path / file)["entries"][:, 2] == 0).sum()) for file in files)
    assert freed  # those that expired are in a segment
    whole = stoker.save(tmp_path / "whole", net)
    other = Net(Device(), grow)
    stoker.load(path, other)
    for name, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    join(path)
    made, wanted = (json.loads((each / "manifest.json").read_text()) for each in (path, whole))
    for key in ("files", "tables", "format_version"):
        assert made[key] == wanted[key]
    stoker.track_changes(other)
    stoker.load(path, other)
    other.tables.load_state_dict(other.tables.state_dict())  # all may have changed
    path = stoker.save(tmp_path / "4", other, parent=path)
    assert json.loads((path / "manifest.json").read_text())["tables"][1]["whole"]
    stoker.load(path, other)


def test_a_segment_has_the_raw_ids_of_steps_with_times(tmp_path: Path) -> None:
    """Which changed is told by steps, whatever the unit of the times."""
    made, other = make(Grow(admit=1)), make(Grow(admit=1))
    stoker.track_changes(made)
    path = None
    for number in (1, 2, 3):
        made(torch.tensor([[number], [7]]), time=10**9 + number).sum().backward()
        path = stoker.save(tmp_path / str(number), made, parent=path)
    assert path is not None
    stoker.load(path, other)
    assert other.raw_ids("item").tolist() == made.raw_ids("item").tolist()
    assert torch.equal(other.rows("item"), made.rows("item"))
    last = json.loads((path / "manifest.json").read_text())["tables"][0]["raw_ids"]
    assert [load_file(path / file)["entries"][:, 1].tolist() for file in last] == [[7, 3]]


def test_raw_ids_of_before_a_load_are_not_in_a_segment_after_it(tmp_path: Path) -> None:
    fresh, made, other = (make(Grow(admit=1)) for _ in range(3))
    stoker.track_changes(made)
    made(torch.tensor([[5], [6], [7]])).sum().backward()
    path = stoker.save(tmp_path / "a", made)
    made.load_state_dict(fresh.state_dict())
    made(torch.tensor([[8]])).sum().backward()
    path = stoker.save(tmp_path / "b", made, parent=path)
    for _ in range(2):
        stoker.load(path, other)
        assert other.raw_ids("item").tolist() == made.raw_ids("item").tolist() == [0, 8, *[0] * 18]
        join(path)


def test_a_model_is_built_again_from_its_checkpoint(tmp_path: Path) -> None:
    spec = stoker.FeatureSpec.from_sizes(1, [30, 9])
    spec = stoker.FeatureSpec(
        dense=spec.dense, features=spec.features, num_embeddings=spec.num_embeddings, grow={"C1": Grow(admit=2)}
    )
    assert stoker.FeatureSpec.from_dict(spec.to_dict()) == spec
    model = stoker.DLRM(spec, embedding_dim=4, bottom=(4,), top=(4,))
    ids = torch.tensor([[10**15, 1], [10**15, 2], [-3, 3]])
    batch = Batch(dense=torch.zeros(3, 1), ids=ids, labels=torch.tensor([0.0, 1.0, 1.0]))
    model.loss(batch).backward()
    stoker.save(tmp_path / "a", model)
    found = stoker.load(tmp_path / "a").model
    assert found.embeddings.raw_ids("C1").tolist() == [0, 10**15, *[0] * 28]
    assert torch.equal(found.predict(batch), model.predict(batch))


@pytest.mark.parametrize("change", ["twice", "above", "zero", "falling", "no count"])
def test_raw_ids_that_cannot_be_are_refused(change: str) -> None:
    made = make(Grow(admit=1))
    made(torch.tensor([[5], [6], [7]])).sum().backward()
    state = made.state_dict()
    entries = state["item.raw_ids"] = state["item.raw_ids"].clone()
    place, column, value = {
        "twice": (1, 1, 5), "above": (2, 0, 20), "zero": (0, 0, 0), "falling": (1, 0, 1), "no count": (1, 2, 0),
    }[change]  # fmt: skip
    entries[place, column] = value
    with pytest.raises(RuntimeError, match="has two rows" if change == "twice" else "do not fit its 20 rows"):
        made.load_state_dict(state)


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "dynamic_ids.md"
    if not page.exists():
        pytest.skip("docs/ is not beside these tests: not a checkout")
    (block,) = page.read_text(encoding="utf-8").split("```python\n")[1:]
    exec(block.split("```")[0], {})
    assert capsys.readouterr().out == "tensor([               0, 8414207365114298,                0])\n"


def share_of(batch: Batch, ranks: Ranks | None) -> Batch:
    """The examples of a rank, in bags of two ids for each third example."""
    lengths = torch.ones(len(batch.ids), 3, dtype=torch.int64)
    lengths[::3, 1] = 2
    ids = batch.ids.flatten().repeat_interleave(lengths.flatten())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    whole = Batch(dense=batch.dense, ids=ids, offsets=offsets, step=batch.step, time=batch.time)
    return whole if ranks is None else shares.share_of(whole, ranks, 8)


@pytest.mark.slow
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_number_of_ranks_changes_nothing(count: int, divided: bool, tmp_path: Path) -> None:
    for seed in range(count, count + 3 * max(1, scaled(PROGRAMS) // 12), 3):
        case = draw(seed, tmp_path)

        def train(ranks: Ranks | None, seed: int = seed, case: Any = case) -> dict[str, Tensor]:
            place: Any = Device()
            if ranks is not None:  # replicas may differ, owners not
                random = np.random.default_rng(seed if divided else seed + ranks.rank)
                (folder := tmp_path / f"{seed}-{ranks.rank}").mkdir()
                places = strategies(random, folder)
                place = places[list(places)[int(random.integers(9))]]  # all but "few", in which no example fits
            options: Any = {"ranks": ranks} if divided and ranks is not None else {}
            made = EmbeddingTables(
                case["tables"], optimizer=case["optimizer"], placement=place, seed=seed, shards=8, **options
            )
            if ranks is not None and not divided:
                made.replicate(ranks)
            ahead = {name: case[name] for name in ("lookahead", "in_flight", "background")}

            def fresh(step: int) -> Batch:
                batch = case["batches"][step % len(case["batches"])]
                return replace(batch, ids=batch.ids.clone(), time=batch.time if case["timed"] else None)

            def lookups(batch: Batch) -> tuple[Any, ...]:
                return batch.ids, batch.offsets, None, batch.time

            def learn(batch: Batch) -> None:
                out = made(batch.ids, batch.offsets, time=batch.time)
                shape = len(case["batches"][batch.step].ids), *out.shape[1:]
                gradient = torch.randn(shape, generator=torch.Generator().manual_seed(batch.step))
                whole = Batch(dense=gradient.flatten(1), ids=torch.zeros(shape[0], 0, dtype=torch.int64))
                mine = whole if ranks is None else shares.share_of(whole, ranks, 8)
                out.backward(mine.dense.view(out.shape))

            stream: Any = (share_of(fresh(step), ranks) for step in range(len(case["batches"])))
            for batch in stoker.stage(stream, made, lookups=lookups, **ahead) if case["staged"] else stream:
                if batch.step in case["skips"]:
                    continue
                if batch.step in case["peeks"]:
                    with torch.no_grad():
                        made(*lookups(share_of(fresh(7 * batch.step), ranks))[:2])
                if batch.step in case["sides"]:
                    learn(share_of(fresh(5 * batch.step), ranks))
                learn(batch)
            found = {name: value.clone() for name, value in made.state_dict().items()}
            found |= {f"raw ids of {table.name}": made.raw_ids(table.name) for table in case["tables"]}
            made.close()
            return found

        wanted = train(None)
        for found in on_threads(count, train):
            for name, value in wanted.items():
                assert torch.equal(found[name], value), (seed, name)
