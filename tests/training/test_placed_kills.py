"""kill -9 at random moments of a placed run, each followed by a resume that ends in the identical checkpoints.

`make kills KILLS=500` kills five hundred runs; the suite a few, so that it stays quick.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killing import EVENTS, Ended, Server, kill_numbers
from small_runs import FILE, ROWS, SMALL, checkpoint_files, files

from stoker.dataset.dataset import Dataset
from stoker.testing import make_dataset

ROW = 2 * 4 + 2 * 4 * 4  # bytes: 4 bfloat16 columns and the two moments of Adam
QUARTER = str(sum(ROWS) * ROW // 4)
SETTINGS: dict[str, Any] = {
    **SMALL, "epochs": 1, "eval_every": 35, "save_every": 12, "log_every": 10, "keep_last": 3,
    "row_optimizer": "adam", "dtype": "bfloat16", "schedule": "cosine", "dense_clip_norm": 1.0,
}  # fmt: skip
PLACED: dict[str, dict[str, Any]] = {
    "memory": {"device_memory": QUARTER},
    "memory, in flight": {"device_memory": QUARTER, "in_flight": 2, "lookahead": 5},
    "file": {"device_memory": QUARTER, **FILE},
    "mapped": {"device_memory": QUARTER, "strategy": "mapped"},
}
CLOCK = "clock"
KILLED: list[bool] = []  # of the trials so far

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork") or os.name != "posix", reason="needs os.fork, which this system lacks"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=4000, num_embeddings=ROWS, sequence={1: 4})


@pytest.fixture(scope="module")
def server(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with Server(folder, data.path, out=folder / "run", **SETTINGS, **PLACED["file"]) as running:
        yield running


@pytest.fixture(scope="module")
def whole(data: Dataset, server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How undisturbed runs end, by placement; for many kills of two the quicker, as a busy machine may hold one up."""
    folder = tmp_path_factory.mktemp("whole")
    times = 2 if len(kill_numbers(12)) > 10 else 1
    runs = {
        name: [start(server, data, folder / f"{name}{n}", folder / "home", name) for n in range(times)]
        for name in PLACED
    }
    return {name: min(each, key=lambda ended: ended.seconds) for name, each in runs.items()}


@pytest.fixture(scope="module")
def resident(data: Dataset, server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The checkpoints of a run that has all rows on the device."""
    out = tmp_path_factory.mktemp("resident") / "run"
    assert server.run(data.path, out=out, **SETTINGS).signal == 0
    return checkpoint_files(out)


def start(server: Server, data: Dataset, out: Path, home: Path, name: str, **kill: Any) -> Ended:
    return server.run(data.path, out=out, home_path=home, **SETTINGS, **PLACED[name], **kill)


def events_of(name: str) -> list[str]:
    """The kinds of moments of a placement: mapped rows do not move."""
    return [event for event in EVENTS if name != "mapped" or event not in ("staging", "writeback")]


def draw(number: int, whole: dict[str, Ended]) -> tuple[str, str, dict[str, Any]]:
    """(placement, kind of moment, when to kill) of one trial. Half of the kills come by the clock."""
    chance = random.Random(number)
    name = list(PLACED)[number % len(PLACED)]
    events = events_of(name)
    kind = CLOCK if number // len(PLACED) % 2 else events[number % len(events)]
    ended = whole[name]
    if kind == CLOCK:
        return name, kind, {"after": chance.uniform(0.1, 0.95) * ended.seconds}
    return name, kind, {
        "event": kind, "number": chance.randrange(ended.events[kind]), "delay": chance.choice((0, 1e-4, 1e-3)),
    }  # fmt: skip


@pytest.mark.parametrize("number", kill_numbers(12))
def test_killed_anywhere_it_resumes_to_the_identical_checkpoints(
    data: Dataset, server: Server, whole: dict[str, Ended], resident: dict[str, bytes], tmp_path: Path, number: int
) -> None:
    name, kind, when = draw(number, whole)
    out, home = tmp_path / "run", tmp_path / "home"
    ended = start(server, data, out, home, name, **when)
    KILLED.append(ended.killed)
    assert ended.killed or kind == CLOCK or when["delay"] > 0, f"{name}, {when}: the run was not killed"
    if not (out / "config.json").exists():  # killed before it was a run: nothing to resume
        after = name
        shutil.rmtree(out, ignore_errors=True)
        ended = start(server, data, out, home, name)
    else:
        after = list(PLACED)[(number + number // len(PLACED)) % len(PLACED)]  # also under another placement
        ended = server.run(
            resume=out, display="quiet", home_path=home, **{"host_memory": None, "strategy": "auto", **PLACED[after]}
        )
    assert ended.signal == 0, ended.messages
    found = checkpoint_files(out)
    assert set(found) == set(resident)
    for file, content in resident.items():
        assert found[file] == content, f"{name}, {kind} {when}: {file}"
    if "host_memory" in PLACED[after]:
        assert not list(home.glob("*")), "a killed run's file of rows is removed by the next home there"


@pytest.fixture(scope="module")
def loops(data: Dataset, server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, dict[str, bytes]]:
    """How a loop of one's own ends undisturbed, placed, and the last checkpoint of one with all rows on the device."""
    folder = tmp_path_factory.mktemp("loops")
    assert server.run(data.path, out=folder / "resident", home=None, loop=True).signal == 0
    (folder / "home").mkdir()
    ended = server.run(data.path, out=folder / "placed", home=folder / "home", loop=True)
    return ended, files(folder / "resident" / "final")


@pytest.mark.parametrize("number", [number for number in kill_numbers(12) if number % 4 == 0])
def test_a_loop_of_ones_own_killed_anywhere_ends_with_the_identical_checkpoint(
    data: Dataset, server: Server, loops: tuple[Ended, dict[str, bytes]], tmp_path: Path, number: int
) -> None:
    """Killed twice: staged, with accumulation, a scaler, and evaluation inside."""
    whole, resident = loops
    chance = random.Random(number)
    out, home = tmp_path / "run", tmp_path / "home"
    home.mkdir()
    for _ in range(2):
        server.run(data.path, out=out, home=home, loop=True, after=chance.uniform(0.1, 0.9) * whole.seconds)
    if not (out / "final").exists():
        ended = server.run(data.path, out=out, home=home if number % 8 else None, loop=True)
        assert ended.signal == 0, ended.messages
    found = files(out / "final")
    assert found == resident


def test_every_kind_of_moment_is_met(whole: dict[str, Ended]) -> None:
    kinds = {draw(number, whole)[1] for number in range(50)}
    assert kinds == {CLOCK, *EVENTS}
    for name, ended in whole.items():
        assert ended.signal == 0
        assert all(ended.events[event] > 5 for event in events_of(name)), name
    assert len(KILLED) < 10 or sum(KILLED) >= 0.7 * len(KILLED), "runs end before they are killed: make them longer"
