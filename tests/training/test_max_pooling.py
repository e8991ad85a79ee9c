"""Models with pooling="max", from Python and from the command line; placements that are no strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import assert_same_run, records

import stoker
from stoker.cli import main
from stoker.dataset.dataset import Dataset
from stoker.testing import make_dataset

OPTIONS: dict[str, Any] = {
    "pooling": "max", "batch_size": 32, "epochs": 1, "embedding_dim": 4, "display": "quiet", "tensorboard": False,
    "model_options": {"bottom": (8,), "top": (8,)},
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=400, num_embeddings=(400, 20), sequence={0: 4})


def test_a_run_with_max_pooling_is_the_same_from_every_placement(data: Dataset, tmp_path: Path) -> None:
    stoker.train(data, out=tmp_path / "resident", **OPTIONS)
    stoker.train(data, out=tmp_path / "placed", device_memory="4KiB", **OPTIONS)
    assert_same_run(tmp_path / "resident", tmp_path / "placed")
    assert 0 < records(tmp_path / "placed", "train")[-1]["hit_rate"] < 1
    model = stoker.load(tmp_path / "resident").model
    assert model.config()["pooling"] == "max"
    batch = next(iter(data.valid.batches(16)))
    pooled = model.embeddings(batch.ids, batch.offsets)
    rows, bag = model.embeddings.rows("C1"), batch.ids[batch.offsets[0] : batch.offsets[1]]
    assert torch.equal(pooled[0, 0], rows[bag].amax(0) if len(bag) else torch.zeros(4))


def test_max_pooling_on_the_command_line(data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--dim", "4", "--bottom", "8", "--top", "8", "--batch-size", "64", "--no-tensorboard"]
    with pytest.raises(SystemExit) as done:
        main(["train", str(data.path), "--out", str(tmp_path / "run"), "--pooling", "max", *sizes])
    assert not done.value.code
    assert stoker.load(tmp_path / "run").model.pooling == "max"
    with pytest.raises(SystemExit) as failed:
        main(["train", str(data.path), "--out", str(tmp_path / "other"), "--pooling", "min", *sizes])
    assert failed.value.code
    assert "Choose one of 'sum', 'mean', 'max'" in capsys.readouterr().err


@pytest.mark.parametrize("placement", ["cached", {"C1": "cached"}])
def test_a_model_says_what_a_placement_is(data: Dataset, placement: Any) -> None:
    with pytest.raises(stoker.ConfigError, match=r"'cached', which is not a strategy. Give .*Cached\(fraction=0.1\)"):
        stoker.DLRM(data.schema, placement=placement)


@pytest.mark.parametrize("placement", ["cached", stoker.Cached(fraction=0.1)])
def test_train_says_what_it_takes_instead_of_a_placement(data: Dataset, tmp_path: Path, placement: Any) -> None:
    with pytest.raises(stoker.ConfigError, match=r"device_memory='4GiB', and strategy='cached'"):
        stoker.train(data, out=tmp_path / "run", placement=placement)
