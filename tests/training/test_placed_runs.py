"""Runs whose rows come and go: the same files as with all rows on the device, interrupted or not."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import FILE, HALF, ROW, ROWS, SMALL, TENTH, assert_same_run, checkpoint_files, records

import stoker
from stoker.base.errors import ConfigError
from stoker.base.timeline import Recorder, Span
from stoker.dataset.dataset import Dataset
from stoker.tables.slots.epoch_lookahead import Recording
from stoker.tables.slots.slotted import SlottedRows
from stoker.testing import make_dataset
from stoker.training import Interrupted, TrainConfig, TrainResult
from stoker.training.display import Display
from stoker.training.files.rundir import RunDirectory
from stoker.training.placing import STAGES, Epochs, StageTotals
from stoker.training.tools.trace import stage_times

SETTINGS: dict[str, Any] = {
    **SMALL, "epochs": 2, "eval_every": 70, "save_every": 30, "log_every": 10,
}  # fmt: skip

SHORT = {name: value for name, value in SETTINGS.items() if name != "epochs"}  # for runs of so many steps


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=4000, num_embeddings=ROWS, sequence={1: 4})


@pytest.fixture(scope="module")
def resident(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "resident"
    stoker.train(data, out=out, **SETTINGS)
    return out


@pytest.fixture(scope="module", params=[{}, FILE], ids=["memory", "file"])
def tenth(
    request: pytest.FixtureRequest, data: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainResult]:
    """The same run with a tenth of the rows in fast memory, in both ways to stage: in line, and by threads (file)."""
    out = tmp_path_factory.mktemp("runs") / "tenth"
    result = stoker.train(data, out=out, **SETTINGS, **request.param, device_memory=TENTH)
    yield result
    result.model.embeddings.close()


def is_slotted(result: TrainResult) -> bool:
    return any(isinstance(group.storage, SlottedRows) for group in result.model.embeddings.groups)


@pytest.mark.slow
def test_a_placed_run_ends_with_the_files_of_a_resident_one(resident: Path, tenth: TrainResult) -> None:
    assert is_slotted(tenth)
    assert_same_run(tenth.run, resident)


@pytest.mark.slow
def test_other_windows_end_with_the_same_files(data: Dataset, resident: Path, tmp_path: Path) -> None:
    window = {"in_flight": 3, "lookahead": 5, "spill": "refuse"}
    home = {**FILE, "home_path": str(tmp_path / "home")}
    result = stoker.train(data, out=tmp_path / "run", **SETTINGS, **window, **home, device_memory=HALF)
    assert is_slotted(result)
    assert_same_run(tmp_path / "run", resident)
    assert list((tmp_path / "home").glob("*"))
    result.model.embeddings.close()
    assert not list((tmp_path / "home").glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("home", [{}, pytest.param(FILE, marks=pytest.mark.slow)], ids=["memory", "file"])
def test_knowing_all_next_uses_fetches_less_and_ends_with_the_same_files(
    data: Dataset, resident: Path, tmp_path: Path, home: dict[str, Any]
) -> None:
    settings = {**SETTINGS, **home, "device_memory": HALF, "in_flight": 1, "lookahead": 2}
    stoker.train(data, out=tmp_path / "a", **settings, epoch_lookahead=True).model.embeddings.close()
    stoker.train(data, out=tmp_path / "b", **settings).model.embeddings.close()
    assert_same_run(tmp_path / "a", resident)
    ours, theirs = (records(tmp_path / name, "train") for name in "ab")
    assert all("epoch_lookahead" in line["stage_seconds"] for line in ours)
    assert not any("epoch_lookahead" in line["stage_seconds"] for line in theirs)
    moved = [sum(line["fetched_mib_per_step"] for line in lines) for lines in (ours, theirs)]
    assert moved[0] < 0.97 * moved[1]


@pytest.mark.slow
def test_a_ram_tier_over_a_file_ends_with_the_files_of_a_resident_run(tmp_path: Path) -> None:
    """Also where it is stopped and goes on, and under another nesting."""
    data = make_dataset(tmp_path / "d", rows=4000, num_embeddings=(20_000, 8_000))
    settings = {**SMALL, "save_every": 25, "eval_every": 50, "log_every": 10}
    stoker.train(data, out=tmp_path / "resident", **settings, steps=100)
    placed = {**FILE, "device_memory": "60KiB", "host_memory": "400KiB", "home_path": str(tmp_path / "home")}
    result = stoker.train(data, out=tmp_path / "nested", **settings, **placed, steps=60)
    homes = [group.storage.home for group in result.model.embeddings.groups if hasattr(group.storage, "home")]
    assert [home.kind for home in homes] == ["memory over file"]
    assert homes[0].num_frames < len(homes[0]._frame_of), "blocks came and went"
    assert (homes[0]._frame_of > 0).any()
    result.model.embeddings.close()
    other = {"host_memory": "500KiB", "in_flight": 3, "lookahead": 5, "epoch_lookahead": True}
    stoker.train(resume=tmp_path / "nested", steps=100, display="quiet", **other).model.embeddings.close()
    assert checkpoint_files(tmp_path / "nested", 100) == checkpoint_files(tmp_path / "resident", 100)
    assert not list((tmp_path / "home").glob("*"))


@pytest.mark.slow
def test_a_run_stopped_in_an_epoch_goes_on_with_epoch_lookahead(data: Dataset, resident: Path, tmp_path: Path) -> None:
    """And back: it is a setting that may change."""
    out = tmp_path / "run"
    short = {**SHORT, "device_memory": TENTH}
    for steps, known in ((37, False), (90, True), (130, False), (200, True)):
        to = {"out": out} if steps == 37 else {"resume": out}
        first = data if steps == 37 else None
        given = short if steps == 37 else {"display": "quiet"}
        stoker.train(first, **to, **{**given, "steps": steps, "epoch_lookahead": known}).model.embeddings.close()
    reference, last = checkpoint_files(resident, 200), checkpoint_files(out, 200)
    assert last
    assert all(reference[name] == content for name, content in last.items() if "manifest" not in name)


@pytest.mark.slow
def test_progress_of_a_recording_is_shown(data: Dataset, tmp_path: Path) -> None:
    class Watching(Display):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int, int, str]] = []

        def work(self, what: str, done: int, total: int, *, unit: str = "bytes") -> None:
            self.seen.append((what, done, total, unit))

    shown = Watching()
    settings = {**SHORT, "steps": 103, "device_memory": TENTH, "epoch_lookahead": True, "display": shown}
    stoker.train(data, out=tmp_path / "run", **settings).model.embeddings.close()
    done = [(what, total) for what, done, total, unit in shown.seen if unit == "batches" and done == total]
    assert done == [("reading ids of the epoch", 100), ("linking next uses", 100), ("reading ids of the epoch", 3),
                    ("linking next uses", 3)]  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals, which this system lacks")
def test_a_stop_does_not_wait_for_a_recording(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = Recording.add

    def add(self: Recording, rows: Any) -> None:
        read.append(len(rows))
        if len(read) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, rows)

    monkeypatch.setattr(Recording, "add", add)
    with pytest.raises(Interrupted):
        stoker.train(data, out=tmp_path / "run", **SETTINGS, device_memory=TENTH, epoch_lookahead=True)
    assert RunDirectory(tmp_path / "run").steps() == [1]
    assert len(read) <= 4


def strategies(result: TrainResult) -> set[str]:
    return {type(group.strategy).__name__ for group in result.model.embeddings.groups} - {"Device"}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hot-cold", "host-pipelined"])
def test_other_strategies_end_with_the_same_files(data: Dataset, resident: Path, tmp_path: Path, strategy: str) -> None:
    result = stoker.train(data, out=tmp_path / "run", **SETTINGS, device_memory=HALF, strategy=strategy)
    assert strategies(result) == {"HotCold" if strategy == "hot-cold" else "HostPipelined"}
    assert_same_run(tmp_path / "run", resident)
    result.model.embeddings.close()
    assert stoker.verify(tmp_path / "run", steps=4).identical


@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy(data: Dataset, resident: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = stoker.train(data, out=out, steps=70, **SHORT, device_memory=HALF, strategy="hot-cold")
    second = stoker.train(resume=out, display="quiet", steps=140, strategy="cached")
    last = stoker.train(resume=out, display="quiet", steps=200, strategy="hot-cold", host_memory="1KiB")
    assert [strategies(result) for result in (first, second, last)] == [{"HotCold"}, {"Cached"}, {"HotCold"}]
    reference, kept = checkpoint_files(resident, 200), checkpoint_files(out, 200)
    assert len(kept) > 1
    assert all(reference[name] == content for name, content in kept.items() if "manifest" not in name)


@pytest.mark.slow
def test_a_budget_that_holds_all_rows_makes_the_run_resident(data: Dataset, resident: Path, tmp_path: Path) -> None:
    result = stoker.train(data, out=tmp_path / "run", **SETTINGS, device_memory="1GiB")
    assert not is_slotted(result)
    assert_same_run(tmp_path / "run", resident)


@pytest.mark.slow
def test_a_run_goes_on_under_another_budget(data: Dataset, resident: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stoker.train(data, out=out, steps=45, **SHORT, device_memory=TENTH)
    stoker.train(resume=out, display="quiet", steps=95, device_memory=None)
    stoker.train(resume=out, display="quiet", steps=150, device_memory=HALF, **FILE)
    last = stoker.train(resume=out, display="quiet", steps=200, device_memory=TENTH, strategy="mapped")
    assert last.step == 200
    reference, kept = checkpoint_files(resident, 200), checkpoint_files(out, 200)
    assert kept
    assert all(reference[name] == content for name, content in kept.items() if "manifest" not in name)
    ours, theirs = (json.loads(found["manifest.json"]) for found in (kept, reference))
    assert ours["stream"] == theirs["stream"]
    assert ours["extra"]["settings"] == theirs["extra"]["settings"]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals, which this system lacks")
@pytest.mark.parametrize("budget", [{"device_memory": TENTH}, {"device_memory": HALF, **FILE}])
def test_a_stopped_run_resumed_under_another_budget_is_whole(
    data: Dataset, resident: Path, tmp_path: Path, budget: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = stoker.RecModel.loss
    calls = iter(range(10**9))

    def loss(self: stoker.RecModel, batch: stoker.Batch) -> torch.Tensor:
        if next(calls) in (37, 99):
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, batch)

    monkeypatch.setattr(stoker.RecModel, "loss", loss)
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        stoker.train(data, out=out, **SETTINGS, **budget)
    assert RunDirectory(out).steps() == [30, 38], "the step under way was finished, and what was staged is not counted"
    with pytest.raises(Interrupted):
        stoker.train(resume=out, display="quiet", device_memory=None)
    stoker.train(resume=out, display="quiet", **budget, lookahead=2)
    assert checkpoint_files(out, 200)["manifest.json"] == checkpoint_files(resident, 200)["manifest.json"]
    assert checkpoint_files(out, 200) == checkpoint_files(resident, 200)


def test_records_tell_what_moved(resident: Path, tenth: TrainResult) -> None:
    lines = records(tenth.run, "train")
    assert lines
    # Threads: training; over a file also staging and writing back.
    threads = 1 if json.loads((tenth.run / "config.json").read_text())["settings"]["host_memory"] is None else 3
    for line in lines:
        assert 0 <= line["hit_rate"] < 1
        assert line["fetched_mib_per_step"] > 0
        assert 0 < line["stall_share"] < 1
        stages = line["stage_seconds"]
        assert {"read", "plan", "fetch", "forward", "lookup", "backward", "update", "dense", "writeback"} <= set(stages)
        assert all(seconds > 0 for seconds in stages.values())
        assert sum(stages.values()) <= threads * 10 * line["seconds_per_step"]
    assert "hit_rate" not in records(resident, "train")[0]


def test_totals_leave_a_timeline_of_the_callers_alone(data: Dataset, tmp_path: Path) -> None:
    with Recorder() as mine:
        settings = {**SHORT, "steps": 20, "device_memory": TENTH}
        stoker.train(data, out=tmp_path / "run", **settings).model.embeddings.close()
    assert any(span.name == "fetch" for span in mine.spans)
    assert records(tmp_path / "run", "train")[0]["stage_seconds"] == {}


@settings(max_examples=scaled(100), deadline=None)
@given(st.data())
def test_totals_are_those_of_the_whole_timeline(draw: st.DataObject) -> None:
    """The time of every stage without those inside it, from the spans in the order in which they end."""
    spans: list[Span] = []
    names = [name for name in STAGES if name != "stall"]

    def inside(begin: int, end: int, depth: int) -> None:
        while begin < end and len(spans) < 60:
            start = draw.draw(st.integers(begin, end))
            stop = draw.draw(st.integers(start, end))
            if depth < 4 and draw.draw(st.booleans()):
                inside(start + 1, stop - 1, depth + 1)
            spans.append(Span(draw.draw(st.sampled_from(names)), 0, start, stop, None))
            begin = stop + 1

    inside(0, 1000, 0)
    totals = StageTotals()
    for one in spans:
        totals.add(one.name, one.start, one.end, None)
    expected = {stage.name: stage.seconds for stage in stage_times(spans, ["main"], 0, 1000)[0]}
    assert totals.seconds() == pytest.approx({name: expected.get(name, 0.0) for name in STAGES})


def test_threads_that_have_ended_share_one_counter_of_stages() -> None:
    totals = StageTotals()
    for number in range(5):  # as the threads of stages, of which a hot-cold run has thousands
        thread = threading.Thread(target=totals.add, args=("plan", 0, 10**9, None))
        thread.start()
        thread.join()
        assert totals.seconds()["plan"] == number + 1
    totals.add("plan", 0, 10**9, None)
    assert totals.seconds()["plan"] == 6
    assert len(totals._totals) == 2, "of this thread, and of all that have ended"


@pytest.mark.slow
def test_evaluation_is_no_part_of_what_moved(data: Dataset, tmp_path: Path) -> None:
    found = []
    for name, every in (("a", 5), ("b", 1000)):
        settings = {**SHORT, "steps": 40, "eval_every": every, "log_every": 40, "save_every": 40}
        stoker.train(
            data, out=tmp_path / name, **settings, device_memory=str(sum(ROWS) * ROW - ROW)
        ).model.embeddings.close()
        lines = records(tmp_path / name, "train")
        steps = [
            line["step"] - before for line, before in zip(lines, [0, *(line["step"] for line in lines)], strict=False)
        ]
        found.append(sum(line["fetched_mib_per_step"] * n for line, n in zip(lines, steps, strict=True)))
    assert found[0] <= found[1]  # validation rows brought some of the training rows; none of them are counted


def test_the_facts_name_the_placement(data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**SHORT, "display": "plain", "steps": 2}
    stoker.train(data, out=tmp_path / "a", **settings, device_memory=TENTH, **FILE).model.embeddings.close()
    err = capsys.readouterr().err
    assert "910 rows, 17.8 KiB with optimizer state" in err
    assert "placement: 10.0% of 910 rows in fast memory" in err
    assert "all rows in a file" in err
    stoker.train(data, out=tmp_path / "b", **settings, host_memory="1GiB", epoch_lookahead=True)
    assert "host_memory and epoch_lookahead are ignored: without device_memory" in capsys.readouterr().err


def test_budgets_are_refused_before_anything_is_made(data: Dataset, tmp_path: Path) -> None:
    for wrong, words in (
        ({"device_memory": "30"}, "smallest budget that works"),
        ({"device_memory": TENTH, "spill": "refuse"}, "smallest budget that works"),
        ({"device_memory": "much"}, "not a number with a unit"),
        ({"spill": "never"}, "spill 'never' is unknown"),
        ({"strategy": "hot"}, "strategy 'hot' is unknown. Choose one of 'auto', 'cached', 'hot-cold'"),
        ({"lookahead": -1}, "must not be negative"),
        ({"in_flight": 0}, "must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            stoker.train(data, out=tmp_path / "run", **SETTINGS, **wrong)
    assert not (tmp_path / "run").exists()
    assert TrainConfig(device_memory="all").device_memory is None


def test_a_position_is_what_an_unstaged_stream_would_have(data: Dataset) -> None:
    stream, other = (data.train.batches(512, seed=3) for _ in range(2))
    epochs = Epochs(stream, 3 * len(stream) + 2)
    batches = iter(epochs)
    for _ in range(5):
        next(batches)  # read ahead
    steps = [0]
    states = [other.state_dict()]
    for batch in Epochs(other, 3 * len(other) + 2):
        steps.append(batch.step + 1)
        states.append(other.state_dict())
    assert steps == list(range(3 * len(other) + 3))
    assert [epochs.state_dict(step) for step in steps] == states
    assert len(other) == 7


def test_a_stage_and_its_stream_agree_on_the_position(data: Dataset) -> None:
    model = stoker.DLRM(data.schema, embedding_dim=4, bottom=(8,), top=(8,), placement=stoker.Cached(fraction=0.9))
    plain, stream = (data.train.batches(512, seed=1) for _ in range(2))
    staged = stoker.stage(stream, model, lookahead=4)
    for batch, same in zip(staged, plain, strict=True):
        assert torch.equal(batch.ids, same.ids)
        assert staged.state_dict() == plain.state_dict()
        model.loss(batch).backward()


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_scores_of_a_model_that_does_not_fit(
    data: Dataset, resident: Path, tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    home = {"home": "file", "path": str(tmp_path / "home")} if background else {}
    model = stoker.load(resident, placement=stoker.Cached(slots=60, spill="refuse", **home)).model
    whole = stoker.load(resident).model
    expected = stoker.evaluate(whole, data.test)
    assert stoker.evaluate(model, data.test) == expected
    assert stoker.evaluate(model, data.test, lookahead=8) == expected
    stoker.predict(whole, data.test, tmp_path / "whole.parquet", batch_size=64)
    stoker.predict(model, data.test, tmp_path / "placed.parquet", batch_size=64, lookahead=8)
    assert pq.read_table(tmp_path / "placed.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))
    assert model.embeddings.groups[0].strategy.spill == "refuse"
    model.embeddings.close()


class _OnGpu(torch.Tensor):
    """A tensor that NumPy cannot read until it is on the CPU."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.numpy:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        found = super().__torch_function__(function, types, args, kwargs or {})
        return found.as_subclass(torch.Tensor) if function is torch.Tensor.cpu else found


@pytest.mark.slow
def test_scores_of_batches_whose_labels_are_on_a_gpu(
    data: Dataset, resident: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As :func:`stoker.stage` hands them out, for a model on a GPU."""
    import pyarrow.parquet as pq

    from stoker.training.scores import evaluation

    def staged(stream: Any, *rest: Any, **more: Any) -> Any:
        for batch in stoker.stage(stream, *rest, **more):
            yield replace(batch, labels=batch.labels.as_subclass(_OnGpu))

    model = stoker.load(resident, placement=stoker.Cached(fraction=0.9)).model
    stoker.predict(model, data.test, tmp_path / "cpu.parquet", lookahead=8)
    monkeypatch.setattr(evaluation, "stage", staged)
    stoker.predict(model, data.test, tmp_path / "gpu.parquet", lookahead=8)
    assert pq.read_table(tmp_path / "gpu.parquet").equals(pq.read_table(tmp_path / "cpu.parquet"))
