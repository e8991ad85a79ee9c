"""The predicted gain of hot and cold batches, against batches of a classified dataset."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker.dataset.batch import Batch
from stoker.rewrite.classified import HotGain, predict_gain
from stoker.testing import make_dataset


def moved(batches: Iterable[Batch], limits: np.ndarray, row_bytes: int) -> int:
    """Bytes of the cold rows of each batch, both ways; rows of the batch before are in their slots still."""
    total, before = 0, set[tuple[int, int]]()
    for batch in batches:
        table, ids = np.broadcast_to(np.arange(len(limits)), batch.ids.shape), batch.ids.numpy()
        cold = ids >= limits
        rows = set(zip(table[cold].tolist(), ids[cold].tolist(), strict=True))
        total += len(rows ^ before)
        before = rows
    return row_bytes * total


@pytest.mark.parametrize("budget", ["6KiB", "12KiB"])
def test_the_prediction_is_near_what_batches_need(tmp_path: Path, budget: str) -> None:
    data = make_dataset(tmp_path / "d", rows=5000, num_embeddings=(600, 300, 10))
    found = stoker.profile(data, device_memory=budget, embedding_dim=4)
    made = stoker.classify(data, found, tmp_path / "hot")
    limits, size = np.array(list(found.hot_rows.values())), found.tables[0].row_bytes
    gain = predict_gain(data, found, 100, device="cpu")
    assert gain.steps == 40
    shuffled, hot_cold = (
        moved((batch for split in splits for batch in split.batches(100, seed=1)), limits, size)
        for splits in ([data.train], [made.hot, made.cold])
    )
    assert gain.shuffled == pytest.approx(shuffled, rel=0.05)
    assert gain.hot_cold == pytest.approx(hot_cold, rel=0.05)
    assert gain.saved == pytest.approx(1 - hot_cold / shuffled, abs=0.03)


def test_rows_that_all_fit_move_nothing(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "d", rows=500)
    gain = predict_gain(data, stoker.profile(data, device_memory="1MiB"))
    assert (gain.shuffled, gain.hot_cold, gain.saved) == (0, 0, 0.0)
    assert "gain nothing" in gain.lines()[-1]


@pytest.mark.parametrize(
    ("hot_cold", "device", "words"),
    [(99, "cuda", "gain nothing"), (90, "cpu", "hardly gain"), (90, "cuda", "if training waits for rows")],
)
def test_the_words(hot_cold: int, device: str, words: str) -> None:
    lines = HotGain(batch_size=65536, steps=123456, shuffled=100, hot_cold=hot_cold, device=device).lines()
    assert words in lines[-1]
    assert all(len(line) <= 80 for line in lines)
