"""Replicas over gloo: ranks that train on shares of a batch hold the rows of one process that trains on all of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import start_ranks
from torch import Tensor

import stoker
from stoker.base.errors import ConfigError
from stoker.ops.loss import binary_cross_entropy
from stoker.tables import EmbeddingTables, Replicas, TableConfig

STEPS, ROWS, DIM = 6, (50, 7), 4
PLACEMENTS: dict[str, Any] = {
    "device": None,
    "cached": stoker.Cached(slots=24),
    "hot and cold": stoker.HotCold(hot={"a": 6, "b": 7}, slots=40),
}
OPTIMIZERS = {
    "sgd": stoker.SGD(lr=1.0), "adagrad": stoker.Adagrad(lr=0.5), "lamb": stoker.LAMB(lr=0.5, cow_clip=(1.0, 0.5)),
}  # fmt: skip


def tables(placement: Any, optimizer: Any, device: str = "cpu") -> EmbeddingTables:
    """Rows of small integers, so that every sum is exact."""
    made = EmbeddingTables(
        [
            TableConfig(name="a", num_embeddings=ROWS[0], embedding_dim=DIM, features=("x", "y")),
            TableConfig(name="b", num_embeddings=ROWS[1], embedding_dim=DIM, features=("z",)),
        ],
        optimizer=optimizer, placement=placement, backend="reference", device=device,
    )  # fmt: skip
    for table, rows in (("a", ROWS[0]), ("b", ROWS[1])):
        old = next(iter(made.read(table)))[1]
        weight = torch.arange(rows * DIM, dtype=torch.float32).view(rows, DIM) % 5
        made.write(table, 0, type(old)(weight, {name: tensor.clone() for name, tensor in old.state.items()}))
    return made


def share(step: int, rank: int, size: int, *, jagged: bool, even: bool) -> dict[str, Tensor | None]:
    """What a rank has of a batch of 16: ids of three features, and the gradient of its loss."""
    count = 16 // size if even else (16 - 4 * (size - 1) if rank == 0 else 4)
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 4, (count * 3,), generator=generator) if jagged else torch.ones(count * 3).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    limits = torch.tensor([ROWS[0], ROWS[0], ROWS[1]]).repeat(count).repeat_interleave(lengths)
    ids = (torch.rand(len(limits), generator=generator) ** 2 * limits).long()
    weights = torch.randint(1, 4, (len(ids),), generator=generator).float() if jagged else None
    grad = torch.randint(-4, 5, (count, 3, DIM), generator=generator).float() * 16
    if not jagged:
        return {"ids": ids.view(count, 3), "offsets": None, "weights": None, "grad": grad}
    return {"ids": ids, "offsets": offsets, "weights": weights, "grad": grad}


def together(shares: list[dict[str, Any]]) -> dict[str, Any]:
    """The batch of all ranks, and the gradient of the mean over all its examples."""
    counts = [len(each["grad"]) for each in shares]
    grads = [each["grad"] * (count / sum(counts)) for each, count in zip(shares, counts, strict=True)]
    found = {"ids": torch.cat([each["ids"] for each in shares]), "grad": torch.cat(grads)}
    if shares[0]["offsets"] is None:
        return {**found, "offsets": None, "weights": None}
    lengths = torch.cat([each["offsets"].diff() for each in shares])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return {**found, "offsets": offsets, "weights": torch.cat([each["weights"] for each in shares])}


def step_of(made: EmbeddingTables, part: dict[str, Any]) -> None:
    made(part["ids"], part["offsets"], part["weights"]).backward(part["grad"])


def rows_of(made: EmbeddingTables) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in made.state_dict().items()}


CASES = [
    *((where, rule, jagged, True) for where in PLACEMENTS for rule in ("sgd", "adagrad") for jagged in (False, True)),
    ("cached", "lamb", True, True),
    ("hot and cold", "lamb", False, False),
    ("device", "sgd", True, False),
    ("cached", "sgd", False, False),
]


def model_of(seed: int = 0) -> stoker.DLRM:
    spec = stoker.FeatureSpec.from_sizes(2, [40, 9])
    return stoker.DLRM(spec, embedding_dim=4, bottom=(8,), top=(8,), seed=seed, optimizer=stoker.Adagrad(lr=0.1))


def batch_of(step: int, count: int, begin: int = 0) -> stoker.Batch:
    generator = torch.Generator().manual_seed(step)
    dense, ids = torch.rand(32, 2, generator=generator), torch.randint(0, 9, (32, 2), generator=generator)
    labels = (ids.sum(1) % 2).float()
    part = slice(begin, begin + count)
    return stoker.Batch(dense=dense[part], ids=ids[part], labels=labels[part], step=step)


def train_model(model: stoker.DLRM, replicas: Replicas | None, parts: list[tuple[int, int]]) -> dict[str, Tensor]:
    dense = torch.optim.SGD(model.dense_parameters(), lr=0.1)
    for step in range(8):
        begin, count = parts[replicas.rank if replicas else 0]
        batch = batch_of(step, count, begin)
        binary_cross_entropy(model(batch), batch.labels).backward()
        if replicas:
            replicas.average(model.dense_parameters(), len(batch))
        dense.step()
        dense.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def worker(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    replicas = Replicas()
    found: dict[Any, Any] = {}
    for case in CASES:
        placement, optimizer, jagged, even = case
        made = tables(PLACEMENTS[placement], OPTIMIZERS[optimizer])
        made.replicate(replicas)
        for step in range(STEPS):
            step_of(made, share(step, rank, size, jagged=jagged, even=even))
        found[case] = rows_of(made)
    model = model_of()
    model.embeddings.replicate(replicas)
    found["model"] = train_model(model, replicas, [(0, 20), (20, 12)])
    try:
        other = model_of(seed=rank)
        other.embeddings.replicate(replicas)
    except ConfigError as error:
        found["error"] = str(error)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(worker, 2, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_replicas_hold_the_rows_of_one_process(ranks: list[dict[Any, Any]], case: Any) -> None:
    placement, optimizer, jagged, even = case
    alone = tables(PLACEMENTS[placement], OPTIMIZERS[optimizer])
    for step in range(STEPS):
        step_of(alone, together([share(step, rank, 2, jagged=jagged, even=even) for rank in range(2)]))
    expected = rows_of(alone)
    assert expected["tick"] == STEPS
    for found in ranks:
        assert found[case].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[case][name], value), name


def test_a_model_in_two_processes_trains_as_one(ranks: list[dict[Any, Any]]) -> None:
    expected = train_model(model_of(), None, [(0, 32)])
    untrained = model_of().state_dict()
    for name, value in expected.items():
        assert torch.equal(ranks[0]["model"][name], ranks[1]["model"][name]), name
        torch.testing.assert_close(ranks[0]["model"][name], value, rtol=1e-4, atol=1e-6)
    assert any(not torch.allclose(untrained[name], value) for name, value in expected.items() if "weight" in name)


def test_ranks_that_do_not_start_alike_are_refused(ranks: list[dict[Any, Any]]) -> None:
    for found in ranks:
        assert "of rank 1 is not that of rank 0" in found["error"]
        assert "same seed" in found["error"]


def test_replicas_need_a_process_group() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        Replicas()


class _GpuOnly:
    """A group of one rank that carries tensors of a GPU only, as nccl does; a GPU's tensors are marked CPU tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        to = Tensor.to

        def moved(tensor: Tensor, device: Any, *rest: Any, **more: Any) -> Tensor:
            if isinstance(device, torch.dtype) or torch.device(device).type != "cuda":
                return to(tensor, device, *rest, **more)
            copy = tensor.clone()
            copy.on_gpu = True  # type: ignore[attr-defined]
            return copy

        def all_gather(found: list[Tensor], value: Tensor, group: Any, async_op: bool) -> Any:
            if not hasattr(value, "on_gpu"):
                raise RuntimeError("No backend type associated with device type cpu")
            found[0].copy_(value)
            return SimpleNamespace(wait=lambda: None)

        monkeypatch.setattr(Tensor, "to", moved)
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        monkeypatch.setattr(dist, "all_gather", all_gather)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_group_of_gpus_compares_rows_of_the_host(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tables(PLACEMENTS[placement], OPTIMIZERS["sgd"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _GpuOnly(monkeypatch)
        made.replicate(Replicas())
    finally:
        dist.destroy_process_group()
    assert made.ranks is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_replicas_over_nccl(placement: str, tmp_path: Path) -> None:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        made = tables(PLACEMENTS[placement], OPTIMIZERS["adagrad"], "cuda")
        alone = tables(PLACEMENTS[placement], OPTIMIZERS["adagrad"], "cuda")
        made.replicate(Replicas())
        part = {name: None if t is None else t.cuda() for name, t in share(0, 0, 1, jagged=True, even=True).items()}
        for each in (made, alone):
            step_of(each, part)
    finally:
        dist.destroy_process_group()
    expected = rows_of(alone)
    assert all(torch.equal(value, expected[name]) for name, value in rows_of(made).items())


def test_a_stream_of_each_rank_is_a_share_of_the_joint_batch(tmp_path: Path) -> None:
    from stoker.testing import make_dataset

    data = make_dataset(tmp_path / "d", rows=200)
    joint = list(data.train.batches(32, seed=3))
    parts = [list(data.train.batches(16, seed=3, rank=rank, world_size=2)) for rank in range(2)]
    for whole, first, second in zip(joint, *parts, strict=True):
        assert torch.equal(whole.ids, torch.cat([first.ids, second.ids]))
