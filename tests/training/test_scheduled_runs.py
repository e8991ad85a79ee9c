"""Runs on a classified dataset: hot and cold batches by the schedule, the same numbers wherever rows lie."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import EFFORT
from killing import Server, kill_numbers
from small_runs import FILE, HALF, ROWS, SMALL, TENTH, assert_same_run, checkpoint_files, records

import stoker
from stoker.base.errors import CheckpointError, ConfigError
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import read_manifest, write_manifest
from stoker.rewrite.classified import write_classified
from stoker.testing import make_dataset
from stoker.training import Interrupted, TrainConfig, loop, replica, scheduled
from stoker.training.defaults import complete
from stoker.training.files.rundir import RunDirectory
from stoker.training.replica import Replica
from stoker.training.scheduled import run_stream

HOT = {"C1": 150, "C2": 120, "C3": 10}
SETTINGS: dict[str, Any] = {
    **SMALL, "epochs": 2, "save_every": 30, "log_every": 10, "schedule_rows": 1, "keep_last": 3,
}  # fmt: skip
PLACED: list[dict[str, Any]] = [
    {}, {"epoch_lookahead": True}, FILE, {"strategy": "hot-cold", "device_memory": HALF},
    {"strategy": "host-pipelined"},
]  # fmt: skip
IDS = ["memory", "epoch lookahead", "file", "hot rows stay", "transit only"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=4000, num_embeddings=ROWS, sequence={1: 3})


@pytest.fixture(scope="module")
def data(plain: Dataset) -> Dataset:
    out = plain.path.with_name("classified")
    write_classified(plain, out, hot_rows=HOT, profile_hash="a", profile={})
    made = Dataset(out)
    assert 700 < len(made.hot) < 2500
    return made


@pytest.fixture(scope="module")
def batches(data: Dataset) -> dict[str, int]:
    return {"cold": -(-len(data.cold) // 32), "hot": -(-len(data.hot) // 32)}


@pytest.fixture(scope="module")
def resident(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "resident"
    stoker.train(data, out=out, **SETTINGS)
    return out


def decisions(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in ("time", "seconds")} for line in records(run, "schedule")]


def assert_same_schedule(run: Path, other: Path) -> None:
    assert decisions(run) == decisions(other)
    assert_same_run(run, other)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[float]]]:
    """Kind and dense values of each batch that is trained."""
    found: list[tuple[str, list[float]]] = []
    real = stoker.RecModel.loss

    def loss(self: stoker.RecModel, batch: stoker.Batch) -> torch.Tensor:
        assert batch.offsets is not None
        limits = torch.tensor(list(HOT.values())).repeat(len(batch)).repeat_interleave(batch.offsets.diff())
        hot = [
            bool((batch.ids[a:b] < limits[a:b]).all())
            for a, b in zip(batch.offsets[:-1:3].tolist(), batch.offsets[3::3].tolist(), strict=True)
        ]
        assert len(set(hot)) == 1, "a batch is all hot, or none of it is"
        found.append(("hot" if hot[0] else "cold", batch.dense[:, 0].tolist()))
        return real(self, batch)

    monkeypatch.setattr(stoker.RecModel, "loss", loss)
    return found


def scripted(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """The test loss at the first swaps; then it stays."""
    left = iter(losses)
    monkeypatch.setattr(loop, "swap_loss", lambda *given, **named: next(left, losses[-1]))


@pytest.mark.slow
def test_cold_and_hot_batches_follow_the_schedule(
    data: Dataset, batches: dict[str, int], tmp_path: Path, trained: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [0.9, 0.8, 0.7, 0.6, 0.5])
    result = stoker.train(data, out=tmp_path / "run", **SETTINGS)
    cold, hot = batches["cold"], batches["hot"]
    kinds = [kind for kind, _ in trained]
    first = -(-cold // 2), -(-hot // 2), cold // 2, hot // 2
    expected = [kind for kind, count in zip(("cold", "hot") * 2, first, strict=True) for _ in range(count)]
    assert kinds[: cold + hot] == expected
    # The fifth loss, behind the first cold segment of the second epoch, doubles the rate: all that is left, hot first.
    assert kinds[cold + hot :] == ["cold"] * first[0] + ["hot"] * hot + ["cold"] * (cold - first[0])
    assert [(line["rate_before"], line["rate_after"]) for line in decisions(tmp_path / "run")][:5] == [
        (50, 50), (50, 50), (50, 50), (50, 50), (50, 100),
    ]  # fmt: skip
    assert result.epochs == 2
    assert result.step == 2 * (cold + hot)


@pytest.mark.slow
def test_an_epoch_trains_on_every_row_once_and_in_another_order(
    data: Dataset, tmp_path: Path, trained: list[Any]
) -> None:
    stoker.train(data, out=tmp_path / "run", **SETTINGS, swap_rate=1)
    half = len(trained) // 2
    rows = Counter(float(value) for shard in data.train.shards for value in shard.dense[:, 0])
    epochs = [[value for _, values in part for value in values] for part in (trained[:half], trained[half:])]
    assert [Counter(values) for values in epochs] == [rows, rows]
    assert epochs[0] != epochs[1]


@pytest.mark.slow
def test_records_say_what_was_decided(resident: Path, batches: dict[str, int]) -> None:
    found = decisions(resident)
    assert [line["swap"] for line in found] == list(range(1, len(found) + 1))
    assert found[0]["step"] == -(-batches["cold"] // 2)
    assert set(found[0]) == {"kind", "step", "epoch", "swap", "after", "loss", "rate_before", "rate_after", "why"}
    assert [line["after"] for line in found[:4]] == ["cold", "hot", "cold", "hot"]
    assert all(0 < line["loss"] < 2 for line in found)


def test_the_loss_is_that_of_the_first_validation_rows(data: Dataset, resident: Path, tmp_path: Path) -> None:
    swap = decisions(resident)[0]
    settings = {name: value for name, value in SETTINGS.items() if name != "epochs"}
    result = stoker.train(data, out=tmp_path / "run", **settings, steps=swap["step"])
    assert swap["loss"] == stoker.evaluate(result.model, data.valid, rows=1)["log_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "placed"),  # the lowest rate, of the most swaps, with two of them, and all in a whole campaign
    [(rate, placed) for rate in (50, 1) for placed in PLACED if rate == 50 or EFFORT >= 1 or placed in PLACED[2:4]],
    ids=[f"{rate}-{name}" for rate in (50, 1) for name in IDS if rate == 50 or EFFORT >= 1 or name in IDS[2:4]],
)  # fmt: skip
def test_placement_changes_no_number(
    data: Dataset, resident: Path, tmp_path: Path, placed: dict[str, Any], rate: float
) -> None:
    settings = {**SETTINGS, "swap_rate": rate}
    if rate != 50:
        stoker.train(data, out=tmp_path / "resident", **settings)
        resident = tmp_path / "resident"
    result = stoker.train(data, out=tmp_path / "run", **settings, **{"device_memory": TENTH, **placed})
    result.model.embeddings.close()
    assert_same_schedule(tmp_path / "run", resident)
    assert all(0 <= line["stall_share"] <= 1 for line in records(tmp_path / "run", "train"))
    assert any(line["stage_seconds"].get("fetch") for line in records(tmp_path / "run", "train"))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals, which this system lacks")
@pytest.mark.parametrize(
    "placed", [{}, {"device_memory": TENTH}, pytest.param({"device_memory": TENTH, **FILE}, marks=pytest.mark.slow)]
)
def test_a_run_stopped_anywhere_goes_on_to_the_bit(
    data: Dataset, resident: Path, tmp_path: Path, placed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of segments, at their ends, and while the test loss is measured."""
    swaps = [line["step"] for line in decisions(resident)]
    steps = iter([7, swaps[0], swaps[1] - 1, swaps[2], swaps[3] + 1])
    real, calls, wanted = stoker.RecModel.loss, Counter[str](), [next(steps)]

    def loss(self: stoker.RecModel, batch: stoker.Batch) -> torch.Tensor:
        if batch.step + 1 == wanted[0]:
            wanted[0] = next(steps, 10**9)
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, batch)

    def measured(*given: Any, **named: Any) -> float:
        calls["measured"] += 1
        if calls["measured"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return scheduled.swap_loss(*given, **named)

    monkeypatch.setattr(stoker.RecModel, "loss", loss)
    monkeypatch.setattr(loop, "swap_loss", measured)
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        stoker.train(data, out=out, **SETTINGS, **placed)
    for _ in range(20):
        try:
            result = stoker.train(resume=out, display="quiet")
            break
        except Interrupted:
            continue
    result.model.embeddings.close()
    assert wanted[0] == 10**9
    assert decisions(out) == decisions(resident), "each swap is recorded once"
    assert checkpoint_files(out, result.step) == checkpoint_files(resident, result.step)


@pytest.mark.slow
def test_a_run_that_is_made_longer_decides_at_its_old_end(data: Dataset, resident: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stoker.train(data, out=out, **{**SETTINGS, "epochs": 1})
    stoker.train(resume=out, epochs=2, steps=None, display="quiet")
    assert decisions(out) == decisions(resident)
    last = RunDirectory(out).steps()[-1]
    ours, theirs = (
        {k: v for k, v in checkpoint_files(run, last).items() if k.startswith("tables")} for run in (out, resident)
    )
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork") or os.name != "posix", reason="needs os.fork, which this system lacks")
def test_killed_anywhere_it_resumes_to_the_identical_checkpoints(data: Dataset, tmp_path: Path, resident: Path) -> None:
    placed = {"device_memory": TENTH, "home_path": str(tmp_path / "home"), **FILE}
    with Server(tmp_path, data.path, out=tmp_path / "first", **SETTINGS, **placed) as server:
        whole = server.run(data.path, out=tmp_path / "whole", **SETTINGS, **placed)
        for number in kill_numbers(4):
            out = tmp_path / f"run{number}"
            chance = random.Random(number)
            when = {"after": chance.uniform(0.1, 0.95) * whole.seconds} if number % 2 else {
                "event": chance.choice(("step", "rename", "staging")), "number": chance.randrange(30), "delay": 1e-4,
            }  # fmt: skip
            server.run(data.path, out=out, **SETTINGS, **placed, **when)
            if not (out / "config.json").exists():
                shutil.rmtree(out, ignore_errors=True)
                ended = server.run(data.path, out=out, **SETTINGS, **placed)
            else:
                ended = server.run(resume=out, display="quiet", **({"device_memory": None} if number % 3 else {}))
            assert ended.signal == 0, ended.messages
            assert decisions(out) == decisions(resident), when
            assert checkpoint_files(out) == checkpoint_files(resident), when


@pytest.mark.slow
@pytest.mark.parametrize("begin", [pytest.param("start", marks=pytest.mark.slow), 60])
def test_verify_and_trace_replay_the_schedule(
    data: Dataset, tmp_path: Path, trained: list[Any], monkeypatch: pytest.MonkeyPatch, begin: str | int
) -> None:
    """With the decisions that the run took, at swaps on the way."""
    out = tmp_path / "run"
    settings = {**SETTINGS, "keep_last": 9, "swap_rate": 4}
    result = stoker.train(data, out=out, **settings, device_memory=TENTH)
    result.model.embeddings.close()
    ours, first = list(trained), 0 if begin == "start" else int(begin)
    swaps = decisions(out)
    measured: list[float] = []

    def noted(*given: Any, **named: Any) -> float:
        measured.append(scheduled.swap_loss(*given, **named))
        return measured[-1]

    monkeypatch.setattr(replica, "swap_loss", noted)
    steps = 45
    expected = [line["loss"] for line in swaps if first < line["step"] <= first + steps]
    assert len(expected) > 3
    trained.clear()
    found = stoker.verify(out, begin=begin, steps=steps)  # type: ignore[arg-type]
    assert found.identical, str(found.difference)
    assert trained[0::2] == trained[1::2] == ours[first : first + steps]
    assert measured[0::2] == measured[1::2] == expected
    trained.clear()
    traced = stoker.trace(out, begin=begin, steps=steps - 5)  # type: ignore[arg-type]
    assert traced.steps == steps - 5
    assert trained == ours[first : first + steps]
    assert next(stage for stage in traced.stages if stage.name == "swap").count > 0


@pytest.mark.slow
def test_the_clock_counts_the_test_loss(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slow(*given: Any, **named: Any) -> float:
        now[0] += 10.0
        return scheduled.swap_loss(*given, **named)

    def step(self: Replica, *given: Any) -> Any:
        now[0] += 1.0
        return train_on(self, *given)

    train_on = Replica.step
    monkeypatch.setattr(loop, "swap_loss", slow)
    monkeypatch.setattr(Replica, "step", step)
    monkeypatch.setattr("stoker.training.ends.analyse", lambda *given, **named: {})  # it measures until a time is over
    monkeypatch.setattr("stoker.training.progress.time.perf_counter", lambda: now[0])
    result = stoker.train(data, out=tmp_path / "run", **SETTINGS, swap_rate=1)
    found = records(tmp_path / "run", "schedule")
    assert len(found) > 20
    assert {line["seconds"] for line in found} == {10.0}
    rows = 2 * len(data.train)
    assert result.samples_per_second == pytest.approx(rows / (result.step + 10 * len(found)), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1, 50])
def test_test_losses_read_at_most_a_row_for_each_fifty_trained(data: Dataset, tmp_path: Path, rate: float) -> None:
    stoker.train(data, out=tmp_path / "run", **{**SETTINGS, "schedule_rows": 20, "swap_rate": rate})
    found = decisions(tmp_path / "run")
    assert all(50 * 20 * line["swap"] <= 32 * line["step"] for line in found)
    assert len(found) == (6 if rate == 1 else 5), "others are left out, and the rate stays"


def test_hot_and_cold_rows_share_the_shuffle_memory(data: Dataset) -> None:
    config = stoker.TrainConfig(batch_size=32, epochs=1, shuffle_memory=str(data.train.bytes // 4))
    streams = run_stream(config, data).streams  # type: ignore[union-attr]
    pools = {kind: stream.state_dict()["pool_rows"] for kind, stream in streams.items()}
    assert pools == pytest.approx({"cold": len(data.cold) // 4, "hot": len(data.hot) // 4}, abs=20)


def test_rows_of_a_test_loss_by_default(data: Dataset) -> None:
    config = TrainConfig(batch_order="hot-cold")
    assert complete(config, data).schedule_rows == 256, "at least"
    assert complete(config.replace(schedule_rows=9), data).schedule_rows == 9
    assert complete(config.replace(batch_order="shuffled"), data).schedule_rows is None


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1, 50])
def test_the_schedule_prints_ten_lines_an_epoch_at_most(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    if rate == 1:
        monkeypatch.setattr(loop, "swap_loss", lambda *_, **__: 0.7)  # never falls: the rate stays the lowest
    settings = {**SETTINGS, "swap_rate": rate, "batch_size": 16 if rate == 1 else 32, "display": "plain"}
    stoker.train(data, out=tmp_path / "run", **settings)
    lines = [line for line in capsys.readouterr().err.splitlines() if "  schedule  " in line]
    swaps = decisions(tmp_path / "run")
    epochs = [sum(math.ceil(one["epoch"]) == number for one in swaps) for number in (1, 2)]
    if rate == 50:
        assert len(lines) == len(swaps), "few swaps are all shown"
        return
    assert min(epochs) > 40
    assert 10 <= len(lines) <= 20
    assert int(lines[0].split()[1].replace(",", "")) == swaps[0]["step"], "the first is shown"
    left_out = sum(int(found[1]) for line in lines if (found := re.search(r"\((\d+) swaps? before", line)))
    assert len(swaps) - 10 <= len(lines) + left_out <= len(swaps), "a line tells how many there were since the last"


@pytest.mark.slow
def test_a_classified_dataset_may_be_shuffled(data: Dataset, tmp_path: Path) -> None:
    stoker.train(data, out=tmp_path / "run", **{**SETTINGS, "epochs": 1}, batch_order="shuffled")
    assert not decisions(tmp_path / "run")
    result = stoker.train(resume=tmp_path / "run", epochs=2, display="quiet")
    assert result.step == 2 * len(data.train) / 32


@pytest.mark.slow
def test_a_run_goes_on_with_the_settings_it_was_given(data: Dataset, tmp_path: Path) -> None:
    given = {name: value for name, value in SETTINGS.items() if name != "display"}
    config = TrainConfig.from_dict(given)
    assert config.batch_order == "auto"
    stoker.train(data, config.replace(epochs=1), out=tmp_path / "run", display="quiet")
    result = stoker.train(resume=tmp_path / "run", config=config, display="quiet")
    assert result.epochs == 2
    assert RunDirectory(tmp_path / "run").read("config.json")["settings"]["batch_order"] == "hot-cold"


def test_the_order_is_the_runs(data: Dataset, plain: Dataset, resident: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch_order='hot-cold'"):
        stoker.train(resume=resident, batch_order="shuffled")
    with pytest.raises(ConfigError, match=r"needs a classified dataset.*stoker classify"):
        stoker.train(plain, resume=resident, display="quiet", epochs=3)
    for name in ("swap_rate", "schedule_rows"):
        with pytest.raises(ConfigError, match=name):
            stoker.train(resume=resident, **{name: 20})
    other = tmp_path / "other"
    write_classified(plain, other, hot_rows={**HOT, "C1": 200}, profile_hash="b", profile={})
    with pytest.raises(CheckpointError, match="other rows"):
        stoker.train(other, resume=resident, display="quiet", epochs=3)


def test_what_the_schedule_needs(plain: Dataset, data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a classified dataset.*stoker classify"):
        stoker.train(plain, out=tmp_path / "run", **SETTINGS, batch_order="hot-cold")
    for values in ({"batch_order": "sorted"}, {"swap_rate": 0.5}, {"swap_rate": 101}, {"schedule_rows": 0}):
        with pytest.raises(ConfigError, match=next(iter(values))):
            TrainConfig(**values)  # type: ignore[arg-type]
    bare = tmp_path / "bare"
    shutil.copytree(data.path, bare)
    manifest = read_manifest(bare)
    write_manifest(bare, {**manifest, "splits": {k: v for k, v in manifest["splits"].items() if k != "valid"}})
    with pytest.raises(ConfigError, match=r"no validation rows, whose loss the schedule.*'shuffled'"):
        stoker.train(bare, out=tmp_path / "run", **SETTINGS)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("hot", [0, 1000])
def test_rows_of_one_kind_only_never_swap(plain: Dataset, tmp_path: Path, hot: int) -> None:
    limits = {table: min(hot, size) for table, size in plain.schema.num_embeddings.items()}
    if not hot:
        limits["C3"] = 0
    write_classified(plain, tmp_path / "d", hot_rows=limits, profile_hash="c", profile={})
    result = stoker.train(tmp_path / "d", out=tmp_path / "run", **SETTINGS)
    assert result.step == 2 * len(plain.train) / 32
    assert not decisions(tmp_path / "run")


@pytest.mark.slow
def test_a_resident_run_that_ignored_its_strategy_is_verified_by_another(plain: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "hot"
    write_classified(plain, out, hot_rows=dict(zip(HOT, ROWS, strict=True)), profile_hash="b", profile={})  # all hot
    stoker.train(out, out=tmp_path / "run", **{**SETTINGS, "epochs": 1}, strategy="hot-cold")
    assert stoker.verify(tmp_path / "run", steps=5).identical
    with pytest.raises(ConfigError, match="strategy 'hot-cold' does not work"):
        stoker.verify(tmp_path / "run", steps=5, strategy="hot-cold")
