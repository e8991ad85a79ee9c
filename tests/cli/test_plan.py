"""``stoker plan``, and the memory options of train, evaluate and predict, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calling import SIZES, SMALL, call, output

from stoker.base import progress
from stoker.dataset.dataset import Dataset
from stoker.placement import placement as placement_module
from stoker.placement.profile import Profile
from stoker.testing import make_dataset
from stoker.training import step_time
from stoker.training.step_time import StepTime

ROW = 4 * 4 + 4  # bytes
PROFILE = Profile(
    row_bytes=ROW, fetch=1e6, store=1e6, plan_row=1e-6, plan_miss=1e-6, plan_lookup=1e-8, file_cold=1e4,
    file_warm=1e5, file_store=1e5,
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=4000, num_embeddings=(3000, 200, 10))


@pytest.fixture(scope="module")
def run(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "a"
    assert call("train", data.path, "--out", out, *SMALL) == 0
    return out


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that need not be measured, and a model that is for a few steps."""
    monkeypatch.setattr(placement_module, "measure_profile", lambda **_: PROFILE)
    monkeypatch.setattr(step_time, "_SECONDS", 0.0)


@pytest.mark.slow
def test_a_script_reads_one_object(
    data: Dataset, capsys: pytest.CaptureFixture[str], quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("plan", data.path, *SIZES, "--batch-size", "64", "--device-memory", "20KiB")
    monkeypatch.setattr(progress, "QUIET_SECONDS", 1e9)  # a measurement may take seconds, and says nothing meanwhile
    monkeypatch.setattr(step_time, "_SECONDS", 0.01)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "measuring steps" in output(capsys, *asked)[2], "a person sees what takes so long"
    code, out, err = output(capsys, *asked, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    groups = {group["strategy"]: group for group in found["groups"]}
    assert groups["device"]["tables"] == ["C2", "C3"]
    cached = groups["cached"]
    assert cached["tables"] == ["C1"]
    assert cached["slots"] == 20 * 2**10 // ROW - 210
    assert cached["home"] == "memory"
    assert 0 < cached["hit_rate"] < 1
    assert cached["fetched_mib"] > 0
    step = found["step_seconds"]
    assert step["resident"] == pytest.approx(step["read"] + step["train"])
    assert step["placed"] == pytest.approx(step["read"] + step["slotted"] + cached["seconds"])
    assert found["seconds"] == cached["seconds"] > 0
    assert cached["seconds"] == pytest.approx(cached["plan_seconds"] + cached["move_seconds"])
    parts = {"the model": step["slotted"], "reading": step["read"], "planning": cached["plan_seconds"]}
    parts["moving rows"] = cached["move_seconds"]
    assert found["bound"] == max(parts, key=parts.__getitem__)


def test_a_person_sees_a_table(data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], quick: None) -> None:
    memory = ["--device-memory", "20KiB", "--host-memory", "10KiB", "--home", tmp_path / "home"]
    code, out, err = output(capsys, "plan", data.path, *SIZES, "--batch-size", "64", *memory)
    assert code == 0, err
    text = " ".join(out.split())
    for words in (
        "placement: ",
        "device",
        "home",
        "more than host_memory 10.0 KiB",
        "mapped: the page cache can hold the file of",
        "expected step: ",
        "ms the model",
        ", bound by ",
    ):
        assert words in text
    assert str(tmp_path / "home") in out.replace("\n", "")
    assert not (tmp_path / "home").exists(), "planning makes no home"
    code, out, err = output(capsys, "plan", data.path, *SIZES, "--device-memory", "all")
    assert "3 tables on the device, with all rows" in out
    code, out, err = output(capsys, "plan", data.path, *SIZES)
    assert code == 0, err
    assert "3 tables on the device, with all rows" in out


@pytest.mark.slow
def test_a_table_over_the_host_memory_gets_a_ram_tier_and_trains_to_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    data = make_dataset(tmp_path / "d", rows=2000, num_embeddings=(20_000, 100)).path
    memory = ["--device-memory", "60KiB", "--host-memory", "300KiB", "--home", tmp_path / "home"]
    memory += ["--strategy", "cached"]
    code, out, err = output(capsys, "plan", data, *SIZES, "--batch-size", "64", *memory)
    assert code == 0, err
    assert "behind 300.0 KiB of memory" in " ".join(out.split())
    assert "cached in main memory" in out
    code, out, _ = output(capsys, "plan", data, *SIZES, "--batch-size", "64", *memory, "--json")
    assert {group["home"]: group["cache_bytes"] for group in json.loads(out)["groups"]} == {
        None: 0,
        "file": 300 * 2**10,
    }
    for name, options in (("resident", []), ("nested", memory)):
        assert call("train", data, "--out", tmp_path / name, *SMALL, *options) == 0
    written = [
        {path.name: path.read_bytes() for path in (tmp_path / name / "checkpoints").glob("*/tables/*")}
        for name in ("resident", "nested")
    ]
    assert written[0] == written[1] != {}


@pytest.mark.slow
def test_strategies_are_weighed_and_can_be_chosen(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    asked = ["plan", data.path, *SIZES, "--batch-size", "64", "--device-memory", "20KiB"]
    _, out, _ = output(capsys, *asked)
    said = next(line for line in out.splitlines() if line.startswith("rows planned and moved a step: "))
    assert " MiB in " in said
    _, out, _ = output(capsys, *asked, "--json")
    found = json.loads(out)
    assert found["choice"] == said
    assert set(found["moved_mib"]) == {"cached", "hot-cold", "host-pipelined"}
    code, out, err = output(capsys, *asked, "--strategy", "hot-cold")
    assert code == 0, err
    assert "hot-cold, as requested" in out
    assert "of them hot" in out
    code, _, err = output(capsys, *asked, "--strategy", "warm")
    assert code == 2
    assert "strategy 'warm' is unknown" in " ".join(err.split())


@pytest.mark.slow
def test_this_machine_and_model_are_measured(data: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output(capsys, "plan", data.path, *SIZES, "--device-memory", "20KiB", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["seconds"] > 0
    assert found["step_seconds"]["train"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("epoch_lookahead", [False, True])
def test_what_is_planned_is_what_is_trained(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], quick: None, epoch_lookahead: bool
) -> None:
    window = ["--epoch-lookahead", "--lookahead", "2"] if epoch_lookahead else ["--lookahead", "16"]
    budget = ["--device-memory", "20KiB", *window, "--in-flight", "2"]
    _, out, _ = output(capsys, "plan", data.path, *SIZES, "--batch-size", "64", *budget, "--json")
    expected = next(group for group in json.loads(out)["groups"] if group["home"])
    code, out, err = output(
        capsys, "train", data.path, "--out", tmp_path / "a", *SMALL, *budget, "--log-every", "50", "--json"
    )
    assert code == 0, err
    record = json.loads(out.splitlines()[0])
    assert record["kind"] == "train"
    assert record["hit_rate"] == pytest.approx(expected["hit_rate"], abs=0.05)  # of a small cache
    assert record["fetched_mib_per_step"] == pytest.approx(expected["fetched_mib"], rel=0.2)
    settings = json.loads((tmp_path / "a" / "config.json").read_text())["settings"]
    assert (settings["device_memory"], settings["in_flight"]) == ("20KiB", 2)
    assert (settings["lookahead"], settings["epoch_lookahead"]) == ((2, True) if epoch_lookahead else (16, False))
    assert call("train", "--resume", tmp_path / "a", "--epochs", "2", "--device-memory", "all") == 0


def test_an_option_works_by_the_name_it_had_before(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    budget = ["--device-memory", "20KiB", "--batch-size", "64", "--json"]
    _, now, _ = output(capsys, "plan", data.path, *SIZES, *budget, "--epoch-lookahead")
    code, before, err = output(capsys, "plan", data.path, *SIZES, *budget, "--foresight")
    assert (code, json.loads(before)["groups"]) == (0, json.loads(now)["groups"])
    assert "warning: --foresight is now called --epoch-lookahead." in err
    code, _, err = output(
        capsys, "train", data.path, "--out", tmp_path / "a", "--no-foresight", "--dense-dtype=bfloat16"
    )
    assert code == 2
    assert "--no-foresight is now called --no-epoch-lookahead" in err
    assert "--dense-dtype is now called --matmul" in err
    assert "Choose one of 'fp32', 'tf32', 'bf16'" in err


@pytest.mark.slow
def test_a_rank_is_planned(data: Dataset, capsys: pytest.CaptureFixture[str], quick: None) -> None:
    asked = ["plan", data.path, *SIZES, "--batch-size", "64", "--device-memory", "20KiB"]
    found = [json.loads(output(capsys, *asked, *more, "--json")[1]) for more in ([], ["--ranks", "2"])]
    one, two = (sum(group["rows"] for group in each["groups"]) for each in found)
    assert (one, two) == (3210, 1605)
    sent = found[1]["sent_bytes"]
    assert sent["total"] == pytest.approx(sum(size for name, size in sent.items() if name != "total"))
    assert sent["rows"] == 4 * sent["ids"] > 0, "4 columns of 4 bytes"
    assert "sent_bytes" not in found[0]
    code, out, err = output(capsys, *asked, "--ranks", "2")
    assert code == 0, err
    assert ", one of 2 ranks" in out
    assert "at 10 Gbit/s" in out
    code, _, err = output(capsys, *asked, "--ranks", "2", "--allow-compression")
    assert code == 2
    assert "--allow-compression" in err


@pytest.mark.slow
def test_a_model_larger_than_memory_is_scored(
    run: Path, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet as pq

    _, out, _ = output(capsys, "evaluate", run, "--json")
    budget = ["--device-memory", "8KiB", "--host-memory", "10KiB", "--home", tmp_path / "home"]
    code, placed, err = output(capsys, "evaluate", run, "--json", *budget)
    assert code == 0, err
    assert json.loads(placed) == json.loads(out)
    for name, memory in (("a", []), ("b", ["--device-memory", "8KiB"])):
        assert call("predict", run, "--out", tmp_path / f"{name}.parquet", "--batch-size", "64", *memory) == 0
    assert pq.read_table(tmp_path / "a.parquet").equals(pq.read_table(tmp_path / "b.parquet"))


@pytest.mark.slow
def test_mistakes_are_one_paragraph(
    data: Dataset, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        "smallest budget that works": ["plan", data.path, "--device-memory", "10"],
        "is not a number with a unit": ["plan", data.path, "--device-memory", "lots"],
        "there is no dataset": ["plan", tmp_path / "none"],
        "'wide' is unknown": ["plan", data.path, "--model", "wide"],
        "spill 'never' is unknown": ["train", data.path, "--out", tmp_path / "x", "--spill", "never"],
        "is too little": ["evaluate", run, "--device-memory", "10"],
    }
    for words, arguments in cases.items():
        code, out, err = output(capsys, *arguments)
        assert (code, out) == (2, ""), words
        assert words in " ".join(err.split())
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("device", "disk_seconds", "seconds", "bound"),
    [("cpu", 0.020, 0.031, "moving rows"), ("cpu", 0.0, 0.041, "moving rows"), ("cuda", 0.0, 0.031, "moving rows")],
    ids=[
        "a disk is waited for beside training",
        "a processor does one thing after the other",
        "a GPU trains meanwhile",
    ],
)
def test_what_a_step_adds_up_to(device: str, disk_seconds: float, seconds: float, bound: str) -> None:
    costs = {"resident": False, "seconds": 0.030, "plan_seconds": 0.007, "disk_seconds": disk_seconds}
    placement: Any = SimpleNamespace(**costs, workload=SimpleNamespace(device=torch.device(device)))
    step = StepTime(read=0.001, train=0.008, slotted=0.010)
    assert step.placed(placement) == pytest.approx(seconds)
    assert step.resident == pytest.approx(0.009)
    assert step.bound(placement) == bound
    assert sum(step.parts(placement).values()) == pytest.approx(0.041)
    placement.plan_seconds = 0.029
    assert step.bound(placement) == "planning"
    # A GPU hides the rest while it trains, as long as that is shorter.
    slow = StepTime(read=0.001, train=0.008, slotted=0.032)
    placement.plan_seconds, placement.seconds = 0.0, 0.030
    assert slow.bound(placement) == "the model"
    between = StepTime(read=0.020, train=0.008, slotted=0.025)
    placement.plan_seconds, placement.seconds = 0.010, 0.020
    assert between.bound(placement) == ("reading" if device == "cuda" else "the model")


def test_tables_are_cut_to_the_memory_of_a_measurement(data: Dataset) -> None:
    spec = step_time._cut(data.schema, 128 * 2**20 // 100)
    assert sum(spec.num_embeddings.values()) <= 100
    assert spec.num_embeddings["C3"] == 10
    assert step_time._cut(data.schema, 1) == data.schema
