"""The measured time of a step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL

from stoker.data import reader
from stoker.testing import make_dataset
from stoker.training import TrainConfig, step_time


def test_what_happens_once_is_no_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, calls = reader.ShardChecks.before, []

    def slow(self: Any, start: int, stop: int) -> None:
        calls.append(start)
        if len(calls) == 1:
            time.sleep(2)
        check(self, start, stop)

    monkeypatch.setattr(reader.ShardChecks, "before", slow)
    monkeypatch.setattr(step_time, "_SECONDS", 0.05)
    settings = {name: value for name, value in SMALL.items() if name != "display"}
    measured = step_time.measure_step(TrainConfig(**settings), make_dataset(tmp_path / "d", rows=1000))
    assert calls
    assert 0 < measured.read < 0.1
    assert measured.train > 0
