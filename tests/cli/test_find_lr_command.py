"""``stoker find-lr`` and ``--batch-size auto`` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calling import SIZES, call, output

from stoker.dataset.dataset import Dataset
from stoker.testing import make_dataset

QUICK = [*SIZES, "--backend", "reference", "--threads", 1]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=2000)


@pytest.mark.slow
def test_a_person_sees_a_curve_and_rates(data: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "find-lr", data.path, "--batch-size", 64, "--lr-steps", 40, "--high", 50, *QUICK)
    assert code == 0
    for word in ("40 steps of 64", "s: steepest", "--row-lr", "--dense-lr"):
        assert word in out


@pytest.mark.slow
def test_a_script_reads_one_object(data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    plot = tmp_path / "lr.png"
    given = ["--which", "rows", "--row-cow-clip", "1,1e-3", "--json", "--plot", plot]
    code, out, _ = output(capsys, "find-lr", data.path, "--batch-size", 64, "--lr-steps", 30, *given, *QUICK)
    assert code == 0
    found = json.loads(out)
    assert 20 < len(found["losses"]) <= 30  # fewer where the loss leaves all bounds
    assert [trial["rule"] for trial in found["trials"]] == ["settings", "steepest", "minimum / 10"]
    assert found["suggestions"] == {one["rule"]: {"row_lr": one["row_lr"]} for one in found["trials"] if one["better"]}
    assert plot.exists()
    code, _, err = output(capsys, "find-lr", data.path, *given, *QUICK)
    assert code == 2
    assert "exists" in err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--batch-size", "auto"], "--batch-size is 'auto'. Give a whole number."),
        (["--row-cow-clip", "1"], "is not r,zeta"),
        (["--row-cow-clip", "0,0"], "clip every gradient to 0"),
        (["--row-lr", "0"], "stays 0"),
    ],
)
def test_mistakes_are_explained(
    data: Dataset, capsys: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    code, _, err = output(capsys, "find-lr", data.path, *given, *QUICK)
    assert code == 2
    assert words in " ".join(err.split())


def test_a_batch_size_that_is_none(data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "train", data.path, "--out", tmp_path / "a", "--batch-size", "many", *QUICK)
    assert code == 2
    assert "neither a whole number nor auto" in " ".join(err.split())


@pytest.mark.slow
def test_auto_batch_size_is_chosen_once(data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "a"
    given = ["--batch-size", "auto", "--base-batch-size", 20, "--lr-scaling", "sqrt", "--no-tensorboard"]
    code, _, err = output(capsys, "train", data.path, "--out", run, *given, *QUICK)
    assert code == 0
    kept = json.loads((run / "config.json").read_text())
    size = kept["settings"]["batch_size"]
    assert size in (20, 40, 80, 160)
    assert kept["batch_size_chosen"]["batch_size"] == size
    assert f"batch size {size:,} was chosen" in " ".join(err.split())
    assert call("train", "--resume", run, "--epochs", 2, "--batch-size", "auto") == 0
    again = json.loads((run / "config.json").read_text())
    assert again["settings"]["batch_size"] == size
    assert again["batch_size_chosen"] == kept["batch_size_chosen"]
