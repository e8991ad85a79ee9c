"""The search for the settings of extreme batches: what it turns, how far it goes, and which rows it never sees."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import stoker
from benchmarks import extreme_search
from benchmarks.extreme_search import Untested, main, search
from stoker.testing import make_dataset


def _hill(settings: dict[str, Any]) -> float:
    """Highest at row_lr 0.04, row_weight_decay 8e-4 and (0.01, 1e-6)."""
    ratio, floor = settings["row_cow_clip"]
    return -(
        abs(settings["row_lr"] / 0.04 - 1) + abs(settings["row_weight_decay"] / 8e-4 - 1) + abs(ratio / 0.01 - 1)
        + abs(floor / 1e-6 - 1)
    )  # fmt: skip


def test_it_climbs_and_stays_within_its_trials() -> None:
    tried: list[dict[str, Any]] = []

    def value_of(settings: dict[str, Any]) -> float:
        tried.append(settings)
        return _hill(settings)

    begin = {"row_lr": 0.01, "row_weight_decay": 1e-4, "row_cow_clip": [1.0, 1e-4], "epochs": 3}
    found, value = search(begin, value_of, 60)
    assert value == pytest.approx(0.0, abs=1e-6)
    assert found == {"row_lr": 0.04, "row_weight_decay": 8e-4, "row_cow_clip": [0.01, 1e-6], "epochs": 3}
    tried.clear()
    assert search(begin, value_of, 5)[1] == max(map(_hill, tried))
    assert len(tried) == 5
    assert len({json.dumps(each) for each in tried}) == 5


@pytest.fixture
def small_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stoker.Dataset:
    data = make_dataset(tmp_path / "d", rows=600, num_embeddings=(50, 20))
    case = extreme_search.CASES["movielens"]
    monkeypatch.setitem(vars(case), "open", lambda run: data)
    monkeypatch.setitem(vars(case), "settings", {"model": "dlrm", "epochs": 1})
    monkeypatch.setitem(vars(case), "small", {"row_lr": 0.01})
    monkeypatch.setattr(extreme_search, "SMALL", 64)
    monkeypatch.setattr(extreme_search, "CACHE", tmp_path)
    return data


def test_the_test_rows_are_not_there(small_case: stoker.Dataset) -> None:
    assert "test" in small_case.splits
    assert set(Untested(small_case.path).splits) == {"train", "valid"}


@pytest.mark.slow
def test_every_trial_is_kept_and_none_is_trained_again(
    small_case: stoker.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    given = ["movielens", "small", "--trials", "2", "--log", str(log)]
    assert main(given) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["settings"]["row_lr"] for line in lines] == [0.01, 0.02]
    assert {line["batch_size"] for line in lines} == {64}
    top = max(line["auc"][0] for line in lines)
    assert f"best: {top:.5f}" in capsys.readouterr().out
    assert main(["--table", "--log", str(log)]) == 0
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("|")]
    assert cells[1:5] == ["64", "small", f"{top:.4f}", "2"]
    assert main(given) == 0
    assert log.read_text().count("\n") == 2


def test_the_bars_own_seeds_are_refused(small_case: stoker.Dataset, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="the bars' own"):
        main(["movielens", "small", "--seeds", "4", "100", "--log", str(tmp_path / "log.jsonl")])
