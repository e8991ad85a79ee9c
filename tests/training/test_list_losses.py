"""Batches of whole lists, and losses over lists: against plain definitions, and in runs."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import FILE, SMALL, assert_same_run, records

import stoker
from stoker.base.errors import CheckpointError, ConfigError
from stoker.dataset.order import GroupOrder
from stoker.ops.loss import list_loss
from stoker.testing import make_dataset

_ROW = st.tuples(st.floats(-30, 30), st.integers(0, 1), st.integers(0, 4))


def by_hand(kind: str, rows: list[tuple[float, int, int]]) -> float:
    """The definitions, list by list and pair by pair."""
    found = []
    for group in sorted({row[2] for row in rows}):
        good, bad = ([score for score, label, g in rows if g == group and label == one] for one in (1, 0))
        if kind == "softmax" and good:
            top = max(good + bad)
            total = top + math.log(sum(math.exp(score - top) for score in good + bad))
            found.append(sum(total - score for score in good) / len(good))
        elif kind == "bpr" and good and bad:
            found.append(sum(np.logaddexp(0, n - p) for p in good for n in bad) / (len(good) * len(bad)))
    return float(np.mean(found)) if found else 0.0


def columns(rows: list[tuple[float, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = sorted(rows, key=lambda row: row[2])
    logits = torch.tensor([row[0] for row in rows], dtype=torch.float64, requires_grad=True)
    _, groups = np.unique([row[2] for row in rows], return_inverse=True)
    return logits, torch.tensor([float(row[1]) for row in rows]), torch.from_numpy(groups)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax", "bpr"])
@settings(deadline=None, max_examples=40)
@given(rows=st.lists(_ROW, min_size=1, max_size=14))
def test_losses_equal_the_definitions(kind: str, rows: list[tuple[float, int, int]]) -> None:
    logits, labels, groups = columns(rows)
    loss = list_loss(kind, logits, labels, groups)
    assert loss.item() == pytest.approx(by_hand(kind, rows), rel=1e-9, abs=1e-12)
    assert torch.autograd.gradcheck(lambda x: list_loss(kind, x, labels, groups), logits, atol=1e-6)


@pytest.mark.parametrize("kind", ["softmax", "bpr"])
def test_extreme_and_missing(kind: str) -> None:
    logits = torch.tensor([3e38, -3e38, 0.0], requires_grad=True)
    labels, groups = torch.tensor([0.0, 1.0, 0.0]), torch.zeros(3, dtype=torch.int64)
    list_loss(kind, logits * 1e-8, labels, groups).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert list_loss(kind, logits, torch.tensor([0.0, 1.0, math.nan]), groups).isnan()  # never a negative row


@given(st.lists(st.integers(0, 9), max_size=80), st.integers(1, 40), st.integers(0, 3))
def test_batches_hold_whole_groups(groups: list[int], size: int, epoch: int) -> None:
    numbers = np.array(groups, np.int32)
    try:
        order = GroupOrder(numbers, size).shuffle(7, epoch)
    except ConfigError:
        assert 4 * max(Counter(groups).values()) > size  # what the message asks for is always enough
        return
    batches = [order.batch(index) for index in range(order.count)]
    assert sorted(row for rows, _ in batches for row in rows.tolist()) == list(range(len(groups)))
    seen: set[int] = set()
    for rows, within in batches:
        assert 0 < len(rows) <= size
        mine = numbers[rows]
        assert not seen & set(mine.tolist())
        seen |= set(mine.tolist())
        starts = np.flatnonzero(np.diff(mine, prepend=-1))
        assert len(starts) == len(set(mine.tolist()))
        assert within.tolist() == (np.cumsum(np.diff(mine, prepend=-1) != 0) - 1).tolist()


def test_rows_of_a_group_are_in_the_order_of_the_file() -> None:
    groups = np.random.default_rng(0).integers(0, 40, 1000).astype(np.int32)  # too many for luck
    order = GroupOrder(groups, 400).shuffle(0, 0)
    for rows, numbers in map(order.batch, range(order.count)):
        assert (np.diff(rows)[np.diff(numbers) == 0] > 0).all()


def test_batches_are_as_few_as_the_largest_group_allows() -> None:
    groups = np.repeat(np.arange(4), 2).astype(np.int32)
    assert [GroupOrder(groups, size).count for size in (3, 5, 9)] == [4, 2, 1]


def test_streams(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", rows=400, group_rows=4)
    stream = data.train.batches(64, seed=1, whole_groups=True)
    first, second = ([batch.labels.sum() for batch in stream if batch.labels is not None] for _ in range(2))
    assert len(first) == len(second) == len(stream)
    assert first != second
    stream.load_state_dict({**stream.state_dict(), "epoch": 0, "position": 3})
    resumed = [batch.labels.sum() for batch in stream if batch.labels is not None]
    assert resumed == first[3:]
    for options in ({"prefetch": 2, "reuse": True}, {"data_memory": "1GiB"}):
        again = data.train.batches(64, seed=1, whole_groups=True, **options)
        assert [batch.labels.sum() for batch in again if batch.labels is not None] == first
    with pytest.raises(CheckpointError, match="whole_groups"):
        data.train.batches(64, seed=1).load_state_dict(stream.state_dict())
    for options, said in (({"world_size": 2}, "not divided"), ({"shuffle_memory": "1KiB"}, "one pool")):
        with pytest.raises(ConfigError, match=said):
            data.train.batches(64, seed=1, whole_groups=True, **options)
    with pytest.raises(ConfigError, match="the largest group has"):
        data.train.batches(4, whole_groups=True)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["softmax", "bpr"])
def test_placed_runs_equal_resident_ones(tmp_path: Path, loss: str) -> None:
    data = make_dataset(tmp_path / "data", rows=600, group_rows=4)
    whole: dict[str, Any] = {**SMALL, "batch_size": 64, "epochs": 2, "loss": loss}
    stoker.train(data, out=tmp_path / "resident", **whole)
    small = {"device_memory": "8KiB"}
    placed: tuple[dict[str, Any], ...] = (small, {**small, "strategy": "host-pipelined"}, {**FILE, **small})
    for number, budget in enumerate(placed):
        stoker.train(data, out=tmp_path / str(number), **whole, **budget)
        assert_same_run(tmp_path / "resident", tmp_path / str(number))
    stoker.train(data, out=tmp_path / "half", **{**whole, "epochs": 1})
    stoker.train(resume=tmp_path / "half", epochs=2, display="quiet")
    assert records(tmp_path / "half", "test")[-1]["mrr"] == records(tmp_path / "resident", "test")[-1]["mrr"]


def test_refusals(tmp_path: Path) -> None:
    plain = make_dataset(tmp_path / "plain", rows=200)
    with pytest.raises(ConfigError, match="without a group column"):
        stoker.train(plain, out=tmp_path / "run", **SMALL, epochs=1, loss="bpr")
    with pytest.raises(ConfigError, match="shards, or ranks, would cut"):
        stoker.TrainConfig(loss="softmax", shards=8)
    model = stoker.DLRM(plain.schema, embedding_dim=4, bottom=(4,), top=(4,))
    model.objective = "softmax"
    with pytest.raises(ConfigError, match="does not say which rows"):
        model.loss(next(iter(plain.train.batches(8))))


@pytest.mark.parametrize("kind", ["softmax", "bpr"])
def test_rows_of_a_list_may_be_scattered(kind: str) -> None:
    random = torch.Generator().manual_seed(0)
    groups = torch.randint(0, 7, (40,), generator=random).sort().values
    labels = torch.randint(0, 2, (40,), generator=random).float()
    order = torch.randperm(40, generator=random)
    in_order = torch.randn(40, generator=random).requires_grad_()
    scattered = in_order.detach()[order].requires_grad_()
    wanted = list_loss(kind, in_order, labels, groups)
    found = list_loss(kind, scattered, labels[order], groups[order])
    torch.testing.assert_close(found, wanted)
    wanted.backward()
    found.backward()
    assert in_order.grad is not None
    torch.testing.assert_close(scattered.grad, in_order.grad[order])
