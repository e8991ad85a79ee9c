"""Shards that are computed at once: the bits of one after the other, or they are not computed at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import stoker
from stoker import Batch
from stoker.ops import by_shard, mlp
from stoker.ops.tree import Shards, shard_bounds, shards_of
from stoker.tables.shards import one_thread
from stoker.training.ranks import together
from stoker.training.ranks.sharded import ShardedLoss

SPEC = stoker.FeatureSpec.from_sizes(num_dense=5, num_embeddings=[50, 20, 30])
WIDE: dict[str, tuple[type[stoker.RecModel], dict[str, Any]]] = {
    "dlrm": (stoker.DLRM, {"bottom": (200, 24), "top": (300, 130)}),
    "linear": (stoker.DLRM, {"bottom": (200, 24), "top": (300, 130), "linear": 0.2}),
    "no dense": (stoker.DLRM, {"top": (300, 130)}),
    "dcn": (stoker.DCN, {"rank": 7, "hidden": (300, 40)}),
    "full": (stoker.DCN, {"rank": None, "cross_layers": 2, "hidden": (300,), "structure": "stacked"}),
    "deepfm": (stoker.DeepFM, {"hidden": (300, 40)}),
    "two-tower": (stoker.TwoTower, {"item": ("C1",), "hidden": (300,), "width": 40}),
}


def spec_of(name: str) -> stoker.FeatureSpec:
    return stoker.FeatureSpec.from_sizes(num_dense=0, num_embeddings=[50, 20, 30]) if name == "no dense" else SPEC


def batch_of(rows: int, seed: int, spec: stoker.FeatureSpec = SPEC) -> Batch:
    random = torch.Generator().manual_seed(seed)
    return Batch(
        dense=torch.randn(rows, len(spec.dense), generator=random),
        ids=torch.stack([torch.randint(0, n, (rows,), generator=random) for n in (50, 20, 30)], dim=1),
        labels=torch.randint(0, 2, (rows,), generator=random).float(),
    )


def trained(name: str, batches: Sequence[Batch], **more: Any) -> tuple[list[Tensor], ShardedLoss]:
    kind, options = WIDE[name]
    model = kind(spec_of(name), embedding_dim=8, optimizer=stoker.SGD(lr=0.5), **options, **more)
    model.embeddings.shards = 8
    loss_of, found = ShardedLoss(model), []
    with one_thread():
        for batch in batches:
            loss = loss_of(batch)
            loss.backward()
            found += [loss.detach(), *(each.grad for each in model.dense_parameters() if each.grad is not None)]
            model.zero_grad()
    return [*found, *model.embeddings.state_dict().values()], loss_of


def bits(tensors: Sequence[Tensor]) -> list[bytes]:
    """Bytes, since no not-a-number equals itself."""
    return [each.numpy().tobytes() for each in tensors]


@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["fp32", "bf16"])
@pytest.mark.parametrize("name", WIDE)
def test_shards_at_once_have_the_bits_of_one_after_the_other(
    name: str, matmul: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [batch_of(rows, seed, spec_of(name)) for seed, rows in enumerate((512, 2048, 300, 512))]
    found, loss_of = trained(name, batches, matmul=matmul)
    tried = loss_of._together._same
    assert {key[:2] for key in tried} >= {(8, 64), (8, 256)}, "two sizes of batches have equal shards"
    monkeypatch.setattr(together, "_MOST", 1)
    alone, loss_of = trained(name, batches, matmul=matmul)
    assert not loss_of._together._same
    assert bits(found) == bits(alone)


def test_another_type_of_weights_needs_another_trial() -> None:
    """Layers of bfloat16 take torch's operations, which compute one shard after the other."""
    model = stoker.DLRM(SPEC, embedding_dim=8, optimizer=stoker.SGD(lr=0.5), bottom=(200, 24), top=(300, 130))
    model.embeddings.shards = 8
    loss_of = ShardedLoss(model)
    with one_thread(), torch.autocast("cpu", torch.bfloat16):
        loss_of(batch_of(512, 0)).backward()
        for each in model.dense_parameters():
            each.data, each.grad = each.data.bfloat16(), None
        loss_of(batch_of(512, 1)).backward()
    assert model.embeddings.tick == 2
    tried = loss_of._together._same.items()
    assert {same for key, same in tried if key[-1] == frozenset([torch.bfloat16])} == {False}


@pytest.mark.slow
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_values_that_are_not_finite_change_no_other_bits(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(512, 0)
    batch.dense[100, 2] = value
    found, _ = trained("dlrm", [batch])
    monkeypatch.setattr(together, "_MOST", 1)
    alone, _ = trained("dlrm", [batch])
    assert bits(found) == bits(alone)


def test_a_trial_notices_sums_over_several_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(512, 0)
    wanted, _ = trained("dlrm", [batch])
    whole = lambda sums, shards, *rows: sums(*rows)  # noqa: E731
    monkeypatch.setattr(mlp, "sums_by_shard", whole)
    found, loss_of = trained("dlrm", [batch])
    assert loss_of._together._same
    assert not any(loss_of._together._same.values())
    assert bits(found) == bits(wanted)
    monkeypatch.setattr(together, "_try", lambda *given: True)
    assert bits(trained("dlrm", [batch])[0]) != bits(wanted), "so the comparison above can fail"


class Subclass(stoker.DLRM):
    """May do anything with its rows."""


def test_only_models_that_are_known_are_tried() -> None:
    model = Subclass(SPEC, embedding_dim=8)
    model.embeddings.shards = 8
    loss_of = ShardedLoss(model)
    loss_of(batch_of(512, 0))
    assert not loss_of._together._same


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_nodes_cover_the_shards_of_every_rank(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, options = WIDE["dlrm"]
    able = together.Together(kind(SPEC, embedding_dim=8, **options))
    monkeypatch.setattr(able, "_fits", lambda size, *given: size < 8)
    bounds, sizes = shard_bounds(2048, 16), set()
    with one_thread():
        for rank in range(ranks):
            mine = shards_of(rank, ranks, 16)
            shards = Shards(tuple(each - bounds[mine.start] for each in bounds[mine.start : mine.stop + 1]), mine.start)
            nodes = able.nodes(shards, [], None)  # type: ignore[arg-type]
            assert [at for node in nodes for at in range(node.start, node.start + node.size)] == list(mine)
            assert all(node.start % node.size == 0 for node in nodes)
            sizes |= {node.size for node in nodes}
    assert max(sizes) == {1: 4, 2: 4, 3: 4, 5: 4, 8: 2}[ranks]


def test_sums_by_shard_are_those_of_the_tree() -> None:
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(64)[:, None].remainder(7)
    [found] = by_shard.sums_by_shard(lambda part: [part.sum(0)], 4, x)
    a, b, c, d = (part.sum(0) for part in x.chunk(4))
    assert torch.equal(found, (a + b) + (c + d))
    assert not torch.equal(found, x.sum(0))


def test_hooks_of_layers_are_called_as_before() -> None:
    model, seen = stoker.DCN(SPEC, embedding_dim=8, rank=2, hidden=(8,)), []
    model.last.register_forward_hook(lambda *given: seen.append(given[2].shape))
    model.predict(batch_of(3, 0))
    assert seen == [(3, 1)]
