"""The tables under DistributedDataParallel, FSDP and fully_shard: two processes over gloo, started once.

Rows and gradients are small integers and powers of two, so that sums are exact and ranks are compared with one process
to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import start_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import stoker
from stoker import EmbeddingTables, Replicas, TableConfig
from stoker.tables.storage import Rows

ROWS, DIM, STEPS, BATCH = 24, 4, 3, 4
CPU = torch.device("cpu")


class Model(nn.Module):
    """Tables, a linear layer, and gradients that are integers."""

    def __init__(self, placement: Any = None, **options: Any) -> None:
        super().__init__()
        configs = [
            TableConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, pooling=pooling, **options)
            for name, pooling in (("a", "sum"), ("b", options.pop("pooling", "sum")))
        ]
        self.tables = EmbeddingTables(configs, optimizer=stoker.SGD(lr=0.5), placement=placement)
        for name in "ab":
            self.tables.write(name, 0, Rows(torch.arange(ROWS * DIM).view(ROWS, DIM) % 5 - 2.0, {}))
        self.head = nn.Linear(2 * DIM, 1, bias=False)
        nn.init.ones_(self.head.weight)

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        return self.head(self.tables(ids, offsets).flatten(1)).squeeze(1)

    def found(self) -> dict[str, Tensor]:
        return {"a": self.tables.rows("a"), "b": self.tables.rows("b"), "head": self.head.weight.detach().clone()}


def whole(step: int, jagged: bool) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """The batches of both ranks: ids, offsets and targets. Rank 1 has longer bags than rank 0."""
    found = []
    for rank in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        target = torch.randint(-2, 3, (BATCH,), generator=generator).float() * 8
        if not jagged or rank == 0 == step:  # one rank gives offsets, the other does not
            found.append((torch.randint(0, ROWS, (BATCH, 2), generator=generator), None, target))
            continue
        lengths = torch.randint(0, 3 + 2 * rank, (BATCH * 2,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        found.append((torch.randint(0, ROWS, (int(offsets[-1]),), generator=generator), offsets, target))
    return found


def train(model: nn.Module, inner: Model, take: Callable[[int], Any], how: str) -> None:
    """Some steps. One process has both batches and halves the loss, as ranks average."""
    rows = inner.tables.as_optimizer() if how in ("optimizer", "scaler") else None
    dense = torch.optim.SGD(inner.head.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=how == "scaler")

    def backward(step: int) -> None:
        parts = take(step)
        total = sum((model(ids, offsets) * target).mean() for ids, offsets, target in parts) / len(parts)
        scaler.scale(total).backward()

    for step in range(STEPS):
        if how == "accumulate":
            with inner.tables.accumulate():
                backward(step)
                backward(step + STEPS)
        else:
            backward(step)
        if rows is not None:
            scaler.unscale_(rows)
            scaler.unscale_(dense)
            inner.norm = float(nn.utils.clip_grad_norm_(inner.parameters(), 2.0**20))  # type: ignore[assignment]
            scaler.step(rows)
            rows.zero_grad()
        scaler.step(dense)
        scaler.update()
        dense.zero_grad()


#: How rows step, where they are, how the second table pools, its padding, and whether bags have many ids.
CASES: list[tuple[str, str, str, int | None, bool]] = [
    ("backward", "device", "sum", None, False),
    ("accumulate", "cached", "sum", None, True),
    ("optimizer", "cached", "mean", 3, True),
    ("scaler", "file", "max", 3, True),
]
PLACEMENTS = {"device": None, "cached": stoker.Cached(slots=20), "file": stoker.Cached(slots=40, home="file")}


def model_of(case: tuple[str, str, str, int | None, bool]) -> Model:
    _, where, pooling, padding, _ = case
    return Model(PLACEMENTS[where], pooling=pooling, padding_idx=padding)


def attempt(found: dict[Any, Any], name: str, work: Callable[[], Any]) -> None:
    try:
        found[name] = work()
    except stoker.ConfigError as error:
        found[name] = str(error)


def wrapped(found: dict[Any, Any], rank: int, name: str, wrap: Callable[[Model], nn.Module], **options: Any) -> None:
    """Steps of a wrapped model; an error by name, if there is one."""

    def work() -> dict[str, Tensor]:
        inner = Model()
        if options.get("replicate", True):
            inner.tables.replicate(options.get("replicas", Replicas()))
        model = wrap(inner)
        dense = torch.optim.SGD([p for p in model.parameters() if p is not inner.tables.handle], lr=0.5)
        for step in range(STEPS):
            ids, offsets, target = whole(step, False)[rank]
            (model(ids, offsets) * target).mean().backward()
            dense.step()
            dense.zero_grad()
        return {name: inner.tables.rows(name) for name in "ab"}

    attempt(found, name, work)


def shard_head(model: Model) -> Model:
    fully_shard(model.head)
    return model


def shard_all_but_tables(model: Model) -> Model:
    fully_shard(model, ignored_params={model.tables.handle})
    return model


def fsdp_head(model: Model) -> Model:
    model.head = FullyShardedDataParallel(model.head, device_id=CPU)  # type: ignore[assignment]
    return model


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found: dict[Any, Any] = {}
    for case in CASES:
        inner = model_of(case)
        inner.tables.replicate(Replicas())
        model = DistributedDataParallel(inner)
        train(model, inner, lambda step, jagged=case[4]: [whole(step, jagged)[rank]], case[0])
        found[case] = inner.found()
    wrapped(found, rank, "not replicated", DistributedDataParallel, replicate=False)
    wrapped(found, rank, "on its own", DistributedDataParallel, replicas=None)
    wrapped(found, rank, "static graph", lambda model: DistributedDataParallel(model, static_graph=True))
    wrapped(found, rank, "FSDP of the dense part", fsdp_head)
    wrapped(
        found, rank, "FSDP that ignores the tables",
        lambda model: FullyShardedDataParallel(model, device_id=CPU, ignored_modules=[model.tables]),
    )  # fmt: skip
    wrapped(found, rank, "FSDP", lambda m: FullyShardedDataParallel(m, device_id=CPU, use_orig_params=True))
    wrapped(found, rank, "fully_shard of the dense part", shard_head)
    wrapped(found, rank, "fully_shard that ignores the handle", shard_all_but_tables)
    wrapped(found, rank, "fully_shard", fully_shard)
    attempt(found, "on its own, two backwards", lambda: accumulate_alone(rank))
    attempt(found, "on its own, averaged by the loop", average_all)
    attempt(found, "own optimizer", lambda: train_bag(rank, stoker.SGD(lr=0.5)))
    attempt(found, "TTEmbeddingBag", lambda: train_bag(rank, None))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def average_all() -> None:
    """A loop that averages the gradients of all parameters itself, with that of the handle."""
    model = Model()
    model.tables.replicate(None)
    rows = model.tables.as_optimizer()
    model(torch.tensor([[1, 2]])).sum().backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= 2
    rows.step()


def accumulate_alone(rank: int) -> Tensor:
    """Two backwards in each step of the rows, whose gradient is of another size on each rank."""
    inner = Model()
    inner.tables.replicate(None)
    model, rows = DistributedDataParallel(inner), inner.tables.as_optimizer()
    for _ in range(STEPS):
        for row in range(2):
            (model(torch.tensor([[row, row]])) * 4.0**rank).sum().backward()
        inner.tables.handle.grad.mul_(0.5)  # type: ignore[union-attr]
        rows.step()
        rows.zero_grad()
    return inner.tables.rows("a")


def train_bag(rank: int, optimizer: Any) -> Tensor:
    bag = stoker.TTEmbeddingBag(100, 8, rank=4, seed=0, optimizer=optimizer)
    model = bag if optimizer else DistributedDataParallel(bag)
    model(torch.tensor([[1 + rank, 5]])).sum().backward()
    torch.optim.SGD(bag.parameters(), lr=0.5).step()
    return torch.cat([core.detach().flatten() for core in bag.cores])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    start_ranks(worker, str(folder))
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


def same(ranks: list[dict[Any, Any]], name: Any, expected: dict[str, Tensor]) -> None:
    for found in ranks:
        assert not isinstance(found[name], str), found[name]
        for each, value in expected.items():
            if each in found[name]:
                assert torch.equal(found[name][each], value), each


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_ranks_under_ddp_are_one_process(ranks: list[dict[Any, Any]], case: Any) -> None:
    """Also where one rank gives offsets and the other does not, and bags are of other lengths."""
    alone = model_of(case)
    train(alone, alone, lambda step: whole(step, case[4]), case[0])
    expected = alone.found()
    assert not torch.equal(expected["b"], model_of(case).tables.rows("b"))
    assert alone.tables.tick == STEPS
    same(ranks, case, expected)


def test_ddp_without_replicate_is_refused_on_every_rank(ranks: list[dict[Any, Any]]) -> None:
    for found in ranks:
        assert "this is one of 2 ranks" in found["not replicated"]
        assert "tables.replicate(stoker.Replicas())" in found["not replicated"]


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    model = Model()
    train(model, model, lambda step: whole(step, False), "backward")
    return {name: model.tables.rows(name) for name in "ab"}


def test_ranks_with_rows_of_their_own(ranks: list[dict[Any, Any]], alone: dict[str, Tensor]) -> None:
    first, second = (found["on its own"] for found in ranks)
    for name, value in alone.items():
        assert not torch.equal(first[name], second[name])
        assert not torch.equal(first[name], value)


def test_rows_of_each_rank_accumulate_their_own_gradients(ranks: list[dict[Any, Any]]) -> None:
    """DistributedDataParallel averages the gradient of the handle, which is not theirs alone."""
    for rank, found in enumerate(ranks):
        expected = Model().tables.rows("a")
        expected[:2] -= 0.5 * STEPS * 0.5 * 4.0**rank
        assert torch.equal(found["on its own, two backwards"], expected)


def test_gradients_of_rows_of_each_rank_that_a_loop_averages_are_refused(ranks: list[dict[Any, Any]]) -> None:
    """They were multiplied by the ratio of the norms."""
    for found in ranks:
        assert "was changed by more than a factor" in found["on its own, averaged by the loop"]


@pytest.mark.parametrize(
    "name",
    [
        "static graph", "FSDP of the dense part", "FSDP that ignores the tables", "fully_shard of the dense part",
        "fully_shard that ignores the handle",
    ],
)  # fmt: skip
def test_dense_parts_may_be_wrapped_and_sharded(
    ranks: list[dict[Any, Any]], alone: dict[str, Tensor], name: str
) -> None:
    same(ranks, name, alone)


@pytest.mark.parametrize("name", ["FSDP", "fully_shard"])
def test_sharding_the_handle_is_refused_on_every_rank(ranks: list[dict[Any, Any]], name: str) -> None:
    for found in ranks:
        assert "(tables.handle) was replaced, by FSDP, fully_shard" in found[name]
        assert "ignored_params={tables.handle}" in found[name]


def test_a_tensor_train_bag_under_ddp(ranks: list[dict[Any, Any]]) -> None:
    bag = stoker.TTEmbeddingBag(100, 8, rank=4, seed=0)
    (sum(bag(torch.tensor([[1 + rank, 5]])).sum() for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
    torch.optim.SGD(bag.parameters(), lr=0.5).step()
    for found in ranks:
        cores = torch.cat([core.detach().flatten() for core in bag.cores])
        torch.testing.assert_close(found["TTEmbeddingBag"], cores, rtol=1e-5, atol=1e-6)
        assert "this is one of 2 ranks" in found["own optimizer"]
        assert "Make the bag without optimizer" in found["own optimizer"]
