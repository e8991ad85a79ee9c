"""``benchmarks/gpu.py`` where no GPU is: it runs from end to end, and shows no time for wrong numbers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu, gpu_dlrm, gpu_managed, gpu_placed
from benchmarks.gpu_dlrm import Contest, Workload, same_rows
from benchmarks.gpu_tools import Clock, Setting
from benchmarks.harness import Bar, NotRun, Outcome, Run, WrongResult, judge
from stoker import Cached
from stoker.tables.storage import Rows

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
TINY = Setting(device=CPU, effort="tiny")
triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed here"
)


@triton
@pytest.mark.slow
def test_a_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    """As a user starts it: a script, from any folder."""
    script, kept = str(ROOT / "benchmarks" / "gpu.py"), tmp_path / "gpu.json"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, script, "--device", "cpu", "--tiny", "--json", str(kept)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stdout + done.stderr  # managed memory needs a GPU
    found = json.loads(kept.read_text())
    assert {"cores", "versions", "slug"} <= set(found["machine"])
    assert found["effort"] == "tiny"
    assert found["date"]
    parts = {bar["name"]: bar for bar in found["bars"]}
    assert {name: bar["status"] for name, bar in parts.items()} == {
        "gpu-limits": "ok",
        "gpu-kernels": "ok",
        "gpu-fbgemm": "not run",
        "gpu-placed": "ok",
        "gpu-managed": "not run",
    }
    assert all(rate > 0 for rate in parts["gpu-limits"]["data"]["gb_s"].values())
    assert parts["gpu-kernels"]["data"]["checks"] >= 10
    placed = parts["gpu-placed"]["data"]
    assert placed["planner"] == ("plain Python" if importlib.util.find_spec("numba") is None else "Numba")
    assert placed["fast_bytes"][gpu_placed.MINE] < 0.06 * placed["fast_bytes"][gpu_placed.BASE]
    (case,) = placed["cases"].values()
    assert all(0 < stats["hits"] < stats["rows"] for stats in case["per_step"])
    assert all(stats["fetched_bytes"] > 0 and stats["written_bytes"] > 0 for stats in case["per_step"])
    for said in ("rows are planned by", "staging alone ms", "equal to the bit", "Triton kernels against the memory"):
        assert said in done.stdout


def contest(**settings: Any) -> tuple[Workload, Contest]:
    workload = Workload.make(TINY)
    models = {"all": workload.model(), "cached": workload.model(Cached(fraction=0.05))}
    return workload, Contest(workload, models, Clock(60.0))


@pytest.mark.slow
def test_another_row_is_noticed() -> None:
    workload, both = contest()
    both.rounds(32, 1, 1.0)
    assert same_rows(both.models, workload.batch(0, 32)) > 100
    (index, table), *_ = ((i, t) for i, t in enumerate(both.models["all"].tables) if t.num_embeddings == 3_000)
    row = int(workload.batch(0, 32).ids[0, index])
    state = {"sum": torch.zeros(1)}
    both.models["cached"].embeddings.write(table.name, row, Rows(torch.full((1, 8), 0.5), state))
    with pytest.raises(WrongResult, match=r"cached: .* of row [\d,]+ is not that of all"):
        same_rows(both.models, workload.batch(0, 32))
    with pytest.raises(WrongResult, match=r"cached: loss .* at step 0 of the round"):
        both.rounds(32, 1, 1.0)


@pytest.mark.slow
def test_every_step_is_compared_and_time_ends_rounds() -> None:
    workload, both = contest()
    warm, timed = workload.steps(32)
    found = both.rounds(32, 3, 0.0)
    assert [len(results) for results in found.values()] == [1, 1]
    assert len(found["cached"][0].losses) == warm + timed
    assert found["all"][0].stats["fetched_bytes"] == 0.0
    assert found["cached"][0].transferred > 0
    seconds, fetched = both.staged_alone("cached", 32)
    assert seconds > 0
    assert fetched > 0


def test_hot_batches_go_through_the_most_frequent_rows() -> None:
    workload = Workload.make(TINY)
    slots = sum(workload.sizes) // 20
    seen = torch.cat([batch.ids for batch in workload.hot(slots)])
    distinct = [torch.unique(seen[:, feature]) for feature in range(seen.shape[1])]
    assert all(torch.equal(ids, torch.arange(len(ids))) for ids in distinct)
    assert 0.9 * slots < sum(len(ids) for ids in distinct) <= slots


def test_full_size_and_what_a_missing_numba_leaves_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for found in (object(), None):
        monkeypatch.setattr(gpu_dlrm.importlib.util, "find_spec", lambda name, found=found: found)
        made.append(Workload.make(Setting(device=CPU, effort="full")))
    whole, small = made
    assert whole.gigabytes > 40
    assert whole.batches == (8192, 32768)
    assert sum(small.sizes) < sum(whole.sizes) / 50
    assert "plain Python" in small.title
    assert "plain Python" not in whole.title


def test_managed_memory_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotRun, match="CUDA device"):
        gpu_managed.measure(TINY)
    monkeypatch.setattr(gpu_managed, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**10))
    with pytest.raises(NotRun, match=r"2\.0 GB of managed memory are more than 90 % of the 1\.0 GB free"):
        gpu_managed.ManagedMemory(2 * 10**9, torch.device("cuda", 0))


@triton
def test_a_wrong_kernel_hides_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_kernels

    def check(*_: Any) -> tuple[gpu_kernels.Checks, list[int]]:
        checks = gpu_kernels.Checks()
        checks.equal("lookup", torch.zeros(2), torch.tensor([0.0, 1e-7]))
        return checks, []

    monkeypatch.setattr(gpu_kernels, "interpreted", lambda: True)
    monkeypatch.setattr(gpu_kernels, "check", check)
    with pytest.raises(WrongResult, match=r"lookup: 1 of 2 values differ"):
        gpu_kernels.measure(TINY)


def test_ratio_of_cached_to_managed() -> None:
    def part(name: str, ratios: dict[str, Any]) -> Any:
        outcome = Outcome(value=1.0, data={"ratios": ratios})
        return judge(Bar(name=name, group="gpu", title="t", must=0.0, run=lambda _: outcome), Run())

    placed = part("gpu-placed", {"8192": (0.96, 0.9, 1.0), "32768": (0.9, 0.9, 0.9)})
    assert gpu.against_managed([placed]) == {}
    assert gpu.against_managed([placed, part("gpu-managed", {"8192": (0.24, 0.2, 0.3)})]) == {"8192": 4.0}


def test_parts_are_left_out_by_name() -> None:
    assert [bar.name for bar in gpu.bars(TINY, ["kernels", "fbgemm", "managed"])] == ["gpu-limits", "gpu-placed"]
    assert all(bar.must == 0 for bar in gpu.bars(TINY, []))
    (placed,) = gpu.bars(Setting(device=CPU, effort="full"), ["limits", "kernels", "fbgemm", "managed"])
    assert placed.must == (0.0 if importlib.util.find_spec("numba") is None else 0.95)
