"""Rows held in memory give the batches that files give, and copies to a GPU run one ahead."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "training"))

from small_runs import SMALL, assert_same_run

import stoker
from stoker.base.errors import ConfigError
from stoker.dataset.batch import Batch
from stoker.dataset.gather import NumpyGather, ResidentRows, new_tensor
from stoker.dataset.shards import Shard
from stoker.dataset.split import copied_ahead, resident_bytes
from stoker.testing import make_dataset

KINDS: dict[str, dict[str, Any]] = {
    "one-hot": {},
    "no dense, wide ids": {"num_dense": 0, "id_type": "int64"},
    "sequences": {"sequence": {1: 4}},
}


def dataset(path: Path, kind: str) -> stoker.Dataset:
    return make_dataset(path, rows=1500, shard_rows=256, **KINDS[kind])


def tensors(batch: Batch) -> list[torch.Tensor]:
    found = (batch.dense, batch.ids, batch.offsets, batch.labels)
    return [tensor.clone() for tensor in found if tensor is not None]


def assert_equal(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"seed": 3}, {"seed": 3, "limit": 700, "shuffle_memory": "16KiB"}], ids=str)
def test_held_batches_equal_those_from_files(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    split = dataset(tmp_path / "d", kind).train
    plain = split.batches(64, **settings)
    held = split.batches(64, **settings, data_memory=resident_bytes(split, plain.rows))
    assert held.resident
    assert not plain.resident
    assert not split.batches(64, **settings, data_memory=resident_bytes(split, plain.rows) - 1).resident
    for _ in range(2):
        for ours, theirs in zip(held, plain, strict=True):
            assert ours.step == theirs.step
            assert_equal(tensors(ours), tensors(theirs))
    assert held.state_dict() == plain.state_dict()
    assert_equal(tensors(next(iter(held.rest_of_epoch()))), tensors(next(iter(plain.rest_of_epoch()))))


@pytest.mark.parametrize("compiled", [True, False], ids=["numba", "torch"])  # the latter on a GPU, and without Numba
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_on_a_device_equal_those_from_files(
    kind: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setitem(sys.modules, "stoker.dataset.kernels", None)
    split = dataset(tmp_path / "d", kind).train
    held = ResidentRows(split.shards, len(split), torch.device("cpu"), threads=2)
    plain = NumpyGather(split.shards, split.starts)
    order = np.random.default_rng(0).permutation(len(split))
    for rows in (np.array([5]), order[:0], order[:300], order, np.arange(250, 260)):
        ours, theirs = held(rows, new_tensor), plain(rows, new_tensor)
        assert ours.keys() == theirs.keys()
        assert_equal([ours[name] for name in theirs], theirs.values())


def test_a_batch_is_one_gather_of_packed_rows(tmp_path: Path) -> None:
    split = dataset(tmp_path / "d", "one-hot").train
    width = len(split.schema.features) + len(split.schema.dense) + 1
    assert resident_bytes(split, 10) == 10 * 4 * width
    batch = next(iter(split.batches(7, data_memory="1GiB")))
    for tensor in batch.tensors().values():
        assert tensor.is_contiguous()  # sums over strided memory may have other bits
    wide = dataset(tmp_path / "wide", "no dense, wide ids").train
    width = 2 * len(wide.schema.features) + 1
    assert resident_bytes(wide, 10) == 10 * 4 * (width + width % 2)


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (256, 1), (257, 2), (512, 2), (1200, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_row_is_resident_that_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rows: int, count: int
) -> None:
    split, released = dataset(tmp_path / "d", kind).train, list[Any]()
    monkeypatch.setattr(Shard, "release", lambda shard: released.append(shard))
    resident = ResidentRows(split.shards, rows, torch.device("cpu"))
    assert released == split.shards[:count]
    expected = NumpyGather(split.shards, split.starts)(np.arange(rows), new_tensor)
    found = resident(np.arange(rows), new_tensor)
    assert_equal([found[name] for name in expected], expected.values())


def test_held_rows_do_not_need_their_files(tmp_path: Path) -> None:
    split = dataset(tmp_path / "d", "one-hot").train
    expected = [tensors(batch) for batch in split.batches(64)]
    stream = split.batches(64, data_memory="1GiB")
    for _ in stream:
        pass
    for shard in split.shards:
        with shard.path.open("r+b") as file:  # the very pages that are mapped
            file.seek(4096)
            file.write(bytes(2048))
    changed = [tensors(batch) for batch in split.batches(64)]
    assert not all(all(map(torch.equal, *pair)) for pair in zip(changed, expected, strict=True)), "nothing was changed"
    for batch, other in zip(stream, expected, strict=True):
        assert_equal(tensors(batch), other)


@pytest.mark.slow
def test_runs_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = dataset(tmp_path / "d", "sequences")
    settings = {**SMALL, "display": "plain"}
    stoker.train(data, out=tmp_path / "a", **settings)
    assert "cached in memory" not in capsys.readouterr().err
    stoker.train(data, out=tmp_path / "b", **settings, data_memory="1MiB")
    assert "1,200 training rows cached in memory" in capsys.readouterr().err
    assert_same_run(tmp_path / "a", tmp_path / "b")
    stoker.train(data, out=tmp_path / "c", **settings, data_memory="1KiB")
    assert "a data memory of 1KiB is too small for the training rows" in capsys.readouterr().err
    stoker.train(data, out=tmp_path / "e", **settings, data_memory="1MiB", device_memory="20KiB")
    assert_same_run(tmp_path / "a", tmp_path / "e")
    with pytest.raises(ConfigError, match="data_memory"):
        stoker.TrainConfig(data_memory="plenty")


class _Event:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name


class _Stream:
    """Stands for a CUDA stream: writes down what is asked of it."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.count = log, 0

    def record_event(self) -> _Event:
        self.count += 1
        return _Event(self.log, f"copy {self.count - 1}")

    def wait_event(self, event: _Event) -> None:
        self.log.append(f"wait for {event.name}")


def test_copies_run_one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU in the tests: this is the order of what is asked of one."""
    log: list[str] = []
    beside, working = _Stream(log), _Stream(log)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: beside)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: working)
    monkeypatch.setattr(Batch, "to", lambda self, device, non_blocking: log.append(f"start {self.step}") or self)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: log.append("record"))

    def made() -> Iterator[Batch]:
        for step in range(3):
            yield Batch(dense=torch.zeros(1, 1), ids=torch.zeros(1, 1), step=step)

    for batch in copied_ahead(made(), torch.device("cuda")):
        log.append(f"train {batch.step}")
    assert [entry for entry in log if entry != "record"] == [
        "start 0", "start 1", "wait for copy 0", "train 0", "start 2", "wait for copy 1", "train 1",
        "wait for copy 2", "train 2",
    ]  # fmt: skip
    assert log.count("record") == 6
