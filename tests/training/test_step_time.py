"""The measured time of a step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from small_runs import ROW, SMALL

from stoker.dataset.split import Split
from stoker.optim import Constant
from stoker.testing import make_dataset
from stoker.training import TrainConfig, step_time
from stoker.training.placing import place_run


def test_what_happens_once_is_no_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, calls, now = Split.check_rows, [], [0.0]

    def slow(self: Any, start: int, stop: int) -> None:
        calls.append(start)
        if len(calls) == 1:
            now[0] += 2.0
        check(self, start, stop)

    def tick() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr(Split, "check_rows", slow)
    monkeypatch.setattr(step_time.time, "perf_counter", tick)
    monkeypatch.setattr(step_time, "_SECONDS", 0.05)
    settings = {name: value for name, value in SMALL.items() if name != "display"}
    measured = step_time.measure_step(TrainConfig(**settings), make_dataset(tmp_path / "d", rows=1000))
    assert calls
    assert 0 < measured.read < 0.1
    assert measured.train > 0


@pytest.mark.slow
def test_a_step_is_measured_in_the_groups_of_its_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "_SECONDS", 0.05)
    data = make_dataset(tmp_path / "d", rows=1000)
    rows = sum(data.schema.num_embeddings.values())
    settings = {name: value for name, value in SMALL.items() if name != "display"}
    config = TrainConfig(**settings, device_memory=str(rows * ROW // 2))
    placement = place_run(config, data, config.make_row_optimizer(Constant()))
    assert placement is not None
    assert not placement.resident
    found: list[list[str]] = []

    class Watched(step_time._Trained):
        """As if models behind slots did nothing but move rows."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append([type(group.storage).__name__ for group in self.model.embeddings.groups])
            self.slotted = "SlottedRows" in found[-1]

        def _moved(self) -> float:
            return time.perf_counter() if self.slotted else super()._moved()

    monkeypatch.setattr(step_time, "_Trained", Watched)
    measured = step_time.measure_step(config, data, placement)
    plain = found[0][0]
    assert found[0] == [plain] != ["SlottedRows"]
    assert sorted(found[1]) == sorted(plain if g.strategy == "device" else "SlottedRows" for g in placement.groups)
    assert abs(measured.slotted) < 1e-4 < measured.train  # the placement counts moving, so it is not counted here
