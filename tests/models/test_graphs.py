"""CUDA graphs of the dense part, with a recorder that repeats the work in place of a capture."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stoker import DLRM, SGD, Batch, ConfigError, FeatureSpec
from stoker.models.base import RecModel
from stoker.ops import graphs

SPEC = FeatureSpec.from_sizes(3, [20, 30])


def repeat(work: Callable[[], Any], stream: None) -> tuple[Any, Callable[[], None]]:
    """Do what a graph does: a run writes its results to where the first ones are."""
    results = work()

    def run() -> None:
        with torch.enable_grad():
            again = work()
        for held, new in zip(results, again, strict=True):
            held.data.copy_(new)

    return results, run


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "capture", repeat)


def batch(number: int, size: int) -> Batch:
    g = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 20, (size, 2), generator=g)
    return Batch(dense=torch.randn(size, 3, generator=g), ids=ids, labels=torch.rand(size, generator=g).round())


def model_of(matmul: Any = "fp32", *, replayed: bool) -> RecModel:
    model = DLRM(SPEC, embedding_dim=8, bottom=(16,), top=(16, 8), optimizer=SGD(lr=0.1), matmul=matmul)
    if replayed:
        model._compiled = graphs.DenseGraphs(model, model.dense_part, model.dense_parameters)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["fp32", "bf16"])
def test_training_is_the_same(matmul: str) -> None:
    losses = []
    for replayed in (False, True):
        model = model_of(matmul, replayed=replayed)
        dense = torch.optim.Adam(model.dense_parameters(), lr=0.01)
        for number, size in enumerate([32, 32, 32, 7, 32, 7, 7, 32]):
            loss = model.loss(batch(number, size))
            loss.backward()  # type: ignore[no-untyped-call]
            dense.step()
            dense.zero_grad()
            losses.append(loss.detach())
        model.eval()
        losses.append(model(batch(9, 32)).sum().detach())
    half = len(losses) // 2
    assert torch.equal(torch.stack(losses[:half]), torch.stack(losses[half:]))


def test_gradients_add_up_over_batches() -> None:
    found = []
    for replayed in (False, True):
        model = model_of(replayed=replayed)
        for number in range(4):
            model.loss(batch(number, 16)).backward()  # type: ignore[no-untyped-call]
        found.append(torch.cat([each.grad.flatten() for each in model.dense_parameters() if each.grad is not None]))
    assert torch.equal(*found)


def test_a_second_forward_before_backward_is_refused() -> None:
    model = model_of(replayed=True)
    for _ in range(2):
        model.loss(batch(0, 16)).backward()  # type: ignore[no-untyped-call]
    first, second = model.loss(batch(1, 16)), model.loss(batch(2, 16))
    with pytest.raises(RuntimeError, match="a second forward pass came before this backward"):
        first.backward()  # type: ignore[no-untyped-call]
    second.backward()  # type: ignore[no-untyped-call]


def test_parameters_that_moved_are_recorded_anew() -> None:
    models = [model_of(replayed=replayed) for replayed in (False, True)]
    for number in range(6):
        losses = []
        for model in models:
            if number == 3:
                for parameter in model.dense_parameters():
                    parameter.data = parameter.data * 0.5
            loss = model.loss(batch(number, 16))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        assert torch.equal(*losses)


def test_without_a_gpu_graphs_are_refused() -> None:
    with pytest.raises(ConfigError, match="CUDA graphs need a model on a GPU; this one is on cpu"):
        model_of(replayed=False).graph_dense()
