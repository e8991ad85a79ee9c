"""The loading benchmark compares equal batches, and notices rows that are not held."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import loading, reader
from benchmarks.harness import Run, WrongResult
from stoker.dataset.split import Split
from stoker.testing import make_dataset

QUICK = Run.of(quick=True, rounds=2)


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Split:
    data = make_dataset(tmp_path / "d", rows=4000, num_dense=13, num_embeddings=[1000] * 26)
    monkeypatch.setattr(loading, "BATCH", 64)
    monkeypatch.setattr(reader, "dataset", lambda run: data)
    return data.train


@pytest.mark.slow
def test_times_follow_equal_batches(split: Split) -> None:
    found = loading.items(QUICK)
    assert found.value > 0  # not 1: tests compare no times
    assert {"files, mapped", "held in main memory"} <= set(found.data["ours"])
    rows = loading._rows(split, 4 * 64)
    loading.check(split, rows)
    with pytest.raises(WrongResult, match="files, mapped, batch 0: dense differs"):
        loading.check(split, rows[::-1])


def test_whole_batch_loaders_give_equal_batches(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "BATCHES", (64, 512))
    found = loading.batches(QUICK)
    assert set(found.data["ratios"]) == {"batch 64", "batch 512"}
    assert found.value == min(found.data["ratios"].values())
    assert len(found.data["by batch"]["batch 64"]) == 4

    def reversed_rows(given: Split, batch: int) -> dict[str, object]:
        loaders = whole_batch_loaders(given, batch)
        first = next(iter(loaders["index_select, one matrix"]()))
        return {"wrong": lambda: iter([[tensor.flip(0) for tensor in first]] * len(given.batches(batch)))}

    whole_batch_loaders = loading.whole_batch_loaders
    monkeypatch.setattr(loading, "whole_batch_loaders", reversed_rows)
    with pytest.raises(WrongResult, match="wrong, batch 0 of 64: dense differs from ours"):
        loading.batches(QUICK)


def test_memory_of_rows_that_are_not_held_is_no_result(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "resident_memory", lambda: 0)
    with pytest.raises(WrongResult, match="they are not held"):
        loading.shuffle(QUICK)
