"""``stoker.trace`` and the spans under it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from small_runs import FILE, SMALL

import stoker
from stoker.base.errors import ConfigError
from stoker.base.timeline import Recorder, Span, span, spanned
from stoker.testing import make_dataset
from stoker.training.placing import STAGES
from stoker.training.tools.trace import stage_times


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = make_dataset(tmp_path_factory.mktemp("data") / "d", rows=2000, num_embeddings=(600, 300, 40))
    out = tmp_path_factory.mktemp("runs") / "a"
    stoker.train(data, out=out, steps=40, save_every=10, eval_every=40, device_memory="2KiB", **SMALL)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("home", ["memory", "file", None])
def test_a_timeline_of_a_run(run: Path, tmp_path: Path, home: str | None) -> None:
    settings: dict[str, Any] = {} if home else {"device_memory": "all"}
    if home == "file":
        settings = {**FILE, "home_path": str(tmp_path), "device_memory": "9KiB"}
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    found = stoker.trace(
        run, steps=12, out=tmp_path / "t.json", begin="start", epoch_lookahead=home == "memory", **settings
    )
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert (found.begin, found.steps, found.examples) == (5, 12, 12 * 32)

    stages = {stage.name: stage for stage in found.stages}
    wanted = {"read", "forward", "lookup", "backward", "update", "dense", "step"}
    assert wanted <= set(stages)
    assert ({"plan", "fetch", "writeback"} <= set(stages)) == (home is not None)
    assert ("epoch_lookahead" in stages) == (home == "memory")
    for name in ("forward", "backward", "dense", "step"):
        assert stages[name].count == 12
    assert list(stages) == [name for name in STAGES if name in stages]
    # On the training thread each moment belongs to one stage, and the stages fill its steps.
    main = next(one.thread for one in found.spans if one.name == "step")
    alone = [one for one in found.spans if one.thread == main]
    mine, _ = stage_times(alone, found.threads, main, int(found.seconds * 1e9))
    steps = sum(one.end - one.start for one in alone if one.name == "step") / 1e9
    assert sum(stage.seconds for stage in mine) == pytest.approx(steps)
    assert steps <= found.seconds
    for stage in found.stages:
        assert stage.share == pytest.approx(stage.seconds / found.seconds)
        assert 0 <= stage.stall_seconds <= found.seconds
    assert sum(stage.stall_seconds for stage in found.stages) == pytest.approx(found.stall_seconds)
    stalls = sum(one.end - one.start for one in alone if one.name == "stall") / 1e9
    assert found.stall_seconds == pytest.approx(stalls)
    assert ("stoker-stage" in found.threads) == (home == "file")
    assert ("stoker-writeback" in found.threads) == (home == "file")

    written = json.loads((tmp_path / "t.json").read_text())
    events = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(found.spans)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    last = max(event["ts"] + event["dur"] for event in events)
    assert steps * 1e6 - 1 <= last <= found.seconds * 1e6 + 1
    assert [event["args"]["step"] for event in events if event["name"] == "step"] == list(range(5, 17))
    named = {event["tid"]: event["args"]["name"] for event in written["traceEvents"] if event["name"] == "thread_name"}
    assert set(named) >= {event["tid"] for event in events}
    assert "training" in named.values()
    assert json.loads(json.dumps(found.to_dict()))["stages"]["forward"]["count"] == 12


def test_it_begins_where_asked_and_ends_with_the_run(run: Path) -> None:
    assert stoker.trace(run, steps=3).begin == 35, "five steps after the newest checkpoint with eight left"
    short = stoker.trace(run, steps=30, begin=30)
    assert (short.begin, short.steps, short.out) == (35, 5, None)
    with pytest.raises(ConfigError, match="takes no argument"):
        stoker.trace(run, seed=3)


def test_the_last_steps_of_a_run_read_ahead_like_others(run: Path) -> None:
    found = stoker.trace(run, steps=5, begin=30, device_memory="17KiB")
    assert found.begin + found.steps == 40
    counts = {stage.name: stage.count for stage in found.stages}
    assert counts["read"] == counts["forward"] == 5


def test_stalls_go_to_what_was_done_meanwhile() -> None:
    """Training waits 100 ns for a thread that fetches for 60 of them, and fetches for 20 more by itself."""
    spans = [
        Span("step", 0, 0, 1000, 7),
        Span("stall", 0, 100, 200, None),
        Span("fetch", 1, 50, 160, None),
        Span("writeback", 2, 100, 200, None),
        Span("forward", 0, 200, 700, None),
        Span("attention", 0, 400, 500, None),
        Span("stall", 0, 300, 350, None),
        Span("plan", 0, 310, 340, None),
        Span("fetch", 0, 315, 335, None),
    ]
    stages, stalled = stage_times(spans, ["MainThread", "stoker-stage", "stoker-writeback"], 0, 1000)
    found = {stage.name: (round(stage.seconds * 1e9), round(stage.stall_seconds * 1e9)) for stage in stages}
    assert found == {
        "plan": (10, 10),
        "fetch": (130, 80),
        "forward": (350, 0),
        "writeback": (100, 0),
        "stall": (120, 60),
        "step": (400, 0),
        "attention": (100, 0),
    }
    assert round(stalled * 1e9) == 150
    assert {stage.name: stage.share for stage in stages}["fetch"] == pytest.approx(0.13)


def test_spans_are_recorded_only_while_somebody_listens() -> None:
    @spanned("called")
    def work(value: int) -> int:
        """Doubles."""
        return 2 * value

    with span("before"):
        assert work(2) == 4
    with Recorder() as recorder:
        thread = threading.Thread(target=work, args=(1,), name="beside")
        with span("outer", 3), span("inner"):
            work(1)
            thread.start()
            thread.join()
        with pytest.raises(RuntimeError, match="another timeline"), Recorder():
            pass
        with pytest.raises(ZeroDivisionError), span("broken"):
            _ = 1 // 0
    with span("after"):
        work(1)
    assert [one.name for one in recorder.spans] == ["called", "called", "inner", "outer", "broken"]
    assert recorder.threads == ["MainThread", "beside"]
    by_name = {one.name: one for one in recorder.spans}
    assert by_name["outer"].step == 3
    assert by_name["outer"].start <= by_name["inner"].start <= by_name["inner"].end <= by_name["outer"].end
    assert work.__doc__ == "Doubles."


def test_many_threads_lose_no_span() -> None:
    def work() -> None:
        for _ in range(200):
            with span("x"):
                pass

    with Recorder() as recorder:
        threads = [threading.Thread(target=work, name=f"w{i}") for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(recorder.spans) == 1600
    assert sorted(recorder.threads) == [f"w{i}" for i in range(8)]


def test_an_idle_span_makes_nothing_and_reads_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.base.timeline.time", None)
    nothing = span("x")
    with nothing, span("y", step=3) as inside:
        assert inside is None
    assert span("z") is nothing
