"""``stoker classify`` through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from calling import SMALL, output

import stoker
from stoker.base.errors import DataError
from stoker.dataset.dataset import Dataset
from stoker.rewrite import classified as hot_cold
from stoker.testing import make_dataset

BUDGET = ("--device-memory", "8KiB", "--dim", 4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=3000, num_embeddings=(600, 300, 10)).path


@pytest.mark.slow
def test_it_profiles_classifies_and_says_so(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "hot"
    code, said, _ = output(capsys, "classify", data, *BUDGET, "--out", out)
    made = Dataset(out)
    assert code == 0
    share = len(made.hot) / len(made.train)
    assert "2,400 training rows classified in" in said
    assert f"by profile {made.hot_cold['profile_hash'][:16]}, " in said  # type: ignore[index]
    assert all(len(line) <= 80 for line in said.splitlines() if str(out) not in line)  # no terminal breaks the hash
    assert f"hot: {len(made.hot):,} rows ({share:.2%})" in said
    assert said.index("expected in an epoch") < said.index("classified in"), "before it works"
    assert f"cold: {len(made.cold):,} rows ({1 - share:.2%})" in said
    code, said, _ = output(capsys, "classify", data, *BUDGET, "--out", out)
    assert code == 0
    assert "already classified" in said
    code, _, error = output(capsys, "classify", data, "--device-memory", "12KiB", "--dim", 4, "--out", out)
    assert code == 2
    assert "classified by another profile" in error
    assert "--overwrite" in error
    code, said, _ = output(
        capsys, "classify", data, "--device-memory", "12KiB", "--dim", 4, "--out", out, "--overwrite", "--json"
    )
    found = json.loads(said)
    assert (code, found["reused"], found["hot"]) == (0, False, len(Dataset(out).hot))


def test_by_a_profile_that_was_saved(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hot = tmp_path / "hot.json"
    output(capsys, "profile", data, *BUDGET, "--out", hot)
    code, _, _ = output(capsys, "classify", data, "--profile", hot, "--out", tmp_path / "out")
    assert code == 0
    assert Dataset(tmp_path / "out").hot_cold["profile_hash"] == json.loads(hot.read_text())["hash"]  # type: ignore[index]
    code, _, error = output(capsys, "classify", data, "--profile", hot, *BUDGET, "--out", tmp_path / "other")
    assert code == 2
    assert "--profile has its own --device-memory, --model" in error


@pytest.mark.slow
def test_a_run_on_it_shows_the_schedule(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, run = tmp_path / "hot", tmp_path / "run"
    output(capsys, "classify", data, *BUDGET, "--out", out)
    code, _, shown = output(capsys, "train", out, "--out", run, *SMALL, "--swap-rate", 20, "--schedule-rows", 2)
    assert code == 0
    assert "batches an epoch, swapped by the test loss, at first at R(20)" in shown
    assert "after cold batches; R(20): the first loss" in shown
    code, said, _ = output(capsys, "inspect", out)
    assert code == 0
    assert "hot training rows" in said
    lines = [" ".join(line.split()) for line in said.splitlines()]
    profile = Dataset(out).hot_cold["profile_hash"][:16]  # type: ignore[index]
    assert f"made by stoker classify, Stoker {stoker.__version__}, by profile {profile}" in lines
    assert f"from {data}" in lines
    assert any(line.startswith("prepared by stoker.testing") for line in lines)
    code, said, _ = output(capsys, "inspect", run)
    cold, hot = (-(-len(split) // 64) for split in (Dataset(out).cold, Dataset(out).hot))
    assert code == 0
    assert f"cold batch {cold} of {cold}" in said
    assert f"hot batch {hot} of {hot}" in said
    code, _, error = output(capsys, "train", data, "--out", tmp_path / "b", *SMALL, "--batch-order", "hot-cold")
    assert code == 2
    assert "--batch-order 'hot-cold' needs a classified dataset" in error
    code, _, error = output(capsys, "train", out, "--out", tmp_path / "b", *SMALL, "--swap-rate", 0.5)
    assert code == 2
    assert "--swap-rate is 0.5" in error


@pytest.mark.slow
def test_settings_of_the_schedule_without_one(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, shown = output(capsys, "train", data, "--out", tmp_path / "run", *SMALL, "--swap-rate", 20)
    assert code == 0
    assert "swap_rate is ignored" in shown


def test_what_a_killed_one_left_names_the_remedy(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        shutil.copytree(tmp_path / "hot.tmp", tmp_path / "left.tmp")  # what a kill at this place leaves
        raise DataError("killed")

    monkeypatch.setattr(hot_cold, "write_manifest", killed)
    output(capsys, "classify", data, *BUDGET, "--out", tmp_path / "hot")
    assert not (tmp_path / "hot.tmp").exists()
    for command in (("inspect",), ("train", "--out", tmp_path / "run")):
        code, _, error = output(capsys, *command, tmp_path / "left.tmp")
        assert code == 2
        assert "Run the same stoker classify command again" in " ".join(error.split())
        assert "stoker prepare" not in error
