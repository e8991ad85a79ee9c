"""``stoker reorder`` through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calling import SMALL, output

import stoker
from stoker.dataset.dataset import Dataset
from stoker.testing import make_dataset

ASKED = ("--window", 64, "--hot", 0.05, "--table", "C1", "--table", "C2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=3000, num_embeddings=(600, 300, 10)).path


@pytest.mark.slow
def test_it_reorders_and_says_what_it_is_good_for(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, said, _ = output(capsys, "reorder", data, *ASKED, "--out", out)
    assert code == 0
    assert "reordered in" in said
    assert "blocks of 128 ids that 64 rows touch" in said
    assert "C1 (600 rows): in order of the log" in said
    code, said, _ = output(capsys, "reorder", data, *ASKED, "--out", out)
    assert (code, "already reordered" in said) == (0, True)
    code, _, error = output(capsys, "reorder", data, *ASKED, "--spread", "inf", "--out", out)
    assert code == 2
    assert "reordered with other settings" in error
    assert "--overwrite" in error
    code, said, _ = output(capsys, "reorder", data, *ASKED, "--spread", "inf", "--out", out, "--overwrite", "--json")
    found = json.loads(said)
    assert (code, found["reused"], set(found["tables"])) == (0, False, {"C1", "C2"})
    assert found["tables"]["C1"]["rows"] == 600
    assert Dataset(out).reordered["settings"]["spread"] == "inf"  # type: ignore[index]


def test_inspect_says_so(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    output(capsys, "reorder", data, *ASKED, "--out", out)
    code, said, _ = output(capsys, "inspect", out)
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert code == 0
    order = Dataset(out).reordered["hash"][:16]  # type: ignore[index]
    assert f"reordered stoker reorder, Stoker {stoker.__version__}, bisect, C1 and C2, order {order}" in lines
    assert any(line.startswith("made by stoker.testing") for line in lines)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--method", "leiden"), "Choose one of 'bisect'"),
        (("--spread", "nan"), "at least 1"),
        (("--hot", "-1"), "share of the accesses"),
        (("--table", "C9"), "no table C9"),
        ((), "nothing to gain. Pass --table to reorder them"),
    ],
)
def test_mistakes_are_explained(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], said: str
) -> None:
    code, _, error = output(capsys, "reorder", data, *given, "--out", tmp_path / "out")
    assert code == 2
    assert said in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_of_the_source_is_not_scored_on_other_ids(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output(capsys, "reorder", data, *ASKED, "--out", tmp_path / "out")
    assert output(capsys, "train", data, "--out", tmp_path / "run", *SMALL)[0] == 0
    code, _, error = output(capsys, "evaluate", tmp_path / "run", "--data", tmp_path / "out")
    assert code == 2
    assert "its ids stand for other values" in error
    assert output(capsys, "train", tmp_path / "out", "--out", tmp_path / "own", *SMALL)[0] == 0
    assert output(capsys, "evaluate", tmp_path / "own")[0] == 0
