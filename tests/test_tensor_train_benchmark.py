"""The tensor-train bars' own inputs, reference and check."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import fork_contestants
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import tensor_train_workload as workload
from benchmarks.harness import Run, WrongResult
from benchmarks.peers.tt_tools import cores_of, left_by
from benchmarks.rounds import Contestant, work
from benchmarks.tensor_train import SETS, VARIANTS, contestants, footprint, published_shape
from benchmarks.tensor_train_workload import Case, check, equal_rows, ids_file
from stoker.ops.tt.lookup import rows_by_definition

QUICK = Run.of(quick=True)
CASE = Case(rows=3000, dim=16, rank=6)


class Counted:
    """Stands for Globo's dataset."""

    def __init__(self, path: Path) -> None:
        self.path = path


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A skew of ten ids, batches of 50, and a cache of its own."""
    save_file({"article": np.array([0, 1, 700, 3, 5, 90, 1, 1, 1, 1, 1])}, tmp_path / "counts.safetensors")
    monkeypatch.setattr(workload, "CACHE", tmp_path)
    monkeypatch.setattr(workload, "POOL", 3)
    monkeypatch.setattr(workload, "BATCH", 50)
    monkeypatch.setattr(workload, "globo", lambda run: Counted(tmp_path))
    workload.reference.cache_clear()
    return tmp_path


def test_row_factors_hold_the_rows() -> None:
    for rows in (1, 26, 27, 28, 999_999, 10_131_227):
        factors = equal_rows(rows)
        assert int(np.prod(factors)) >= rows
        assert max(factors) - min(factors) <= 1


def test_published_footprints_come_out_of_the_published_shape() -> None:
    """EL-Rec's own table sizes are not known to the last row, so within a few percent."""
    kaggle, dim = SETS["Kaggle"]
    assert footprint(kaggle, dim, published_shape) / 2**20 == pytest.approx(147.7, rel=0.05)
    assert footprint([10], 16, published_shape) == 640


def test_ids_follow_the_counts_in_frequency_order(small: Path) -> None:
    ids = np.load(ids_file("article", 3000, QUICK))
    assert ids.shape == (3, 50)
    share = float((ids < 300).mean())  # the first of ten ids that occur
    assert share == pytest.approx(700 / 804, abs=0.1)
    permuted = np.load(ids_file("article", 3000, QUICK, permuted=True))
    assert len(np.unique(permuted)) == len(np.unique(ids))
    assert not np.array_equal(permuted, ids)


@pytest.mark.parametrize("which", ["ours", "published"])
def test_the_reference_is_the_definition(small: Path, which: str) -> None:
    shape = CASE.shape(which)
    file = ids_file(CASE.of, CASE.rows, QUICK)
    looked, changes = workload.reference(CASE, which, file)
    given = cores_of({"rows": list(shape.rows), "cols": list(shape.cols), "ranks": list(shape.ranks)})
    cores = [torch.from_numpy(core).double() for core in given]
    ids = torch.from_numpy(np.load(file)[0])
    assert np.allclose(looked, rows_by_definition(cores, ids, shape).numpy(), atol=1e-5)
    assert [change.shape for change in changes] == [core.shape for core in given]


def worked(small: Path, script: str, options: dict[str, Any]) -> Path:
    results = small / "results"
    results.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        fork_contestants(patch)
        return left_of(results, script, options)


def left_of(results: Path, script: str, options: dict[str, Any]) -> Path:
    case = CASE.config(QUICK) | {"permuted": str(ids_file(CASE.of, CASE.rows, QUICK, permuted=True))}
    config: dict[str, Any] = {"cases": [case], "quick": True}
    lines = work(Contestant(label=script, script=script, options=options), config | {"results": str(results)})
    assert {line["case"] for line in lines if line["event"] == "timed"} == {
        f"{CASE.name}, lookup",
        f"{CASE.name}, backward",
    }
    return results / left_by(CASE.name)


@pytest.mark.parametrize(
    ("script", "options"),
    # Every other one: the benchmark checks each of them.
    [(player.script, player.options) for player in contestants() if player.environment is None][::2],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value),
)
def test_contestants_leave_what_the_reference_says(small: Path, script: str, options: dict[str, Any]) -> None:
    left = worked(small, script, options)
    check("x", CASE, options["shape"], QUICK, left)
    kept = dict(np.load(left))
    kept["change1"][0] += 1e-3
    np.savez(left, **kept)
    with pytest.raises(WrongResult, match="change1"):
        check("x", CASE, options["shape"], QUICK, left)


@pytest.mark.parametrize("label", list(VARIANTS)[:: len(VARIANTS) - 1])  # the benchmark checks each of them
def test_a_step_without_a_part_is_still_the_step(small: Path, label: str) -> None:
    parts = VARIANTS[label]
    left = worked(small, "stoker_tt_parts.py", {"shape": "ours", "parts": parts})
    check(label, CASE, "ours", QUICK, left, permuted=bool(parts.get("permuted")))
