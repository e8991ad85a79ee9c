"""The choice of a batch size, with measurements made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import ROWS, SMALL

import stoker
from stoker.base.errors import ConfigError
from stoker.testing import make_dataset
from stoker.training import TrainConfig, replica, step_time
from stoker.training.step_time import choose_batch_size

CONFIG = TrainConfig(
    base_batch_size=8, **{name: value for name, value in SMALL.items() if name not in ("display", "batch_size")}
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> stoker.Dataset:
    return make_dataset(tmp_path_factory.mktemp("auto") / "d", rows=4000, num_embeddings=ROWS)


def measured(monkeypatch: pytest.MonkeyPatch, rates: dict[int, Any]) -> list[int]:
    """Answers instead of measurements: examples/s, (examples/s, bytes), or an error."""
    asked: list[int] = []

    def answer(data: stoker.Dataset, config: TrainConfig) -> tuple[float, int]:
        asked.append(config.batch_size)
        found = rates[config.batch_size]
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, tuple) else (found, 0)

    monkeypatch.setattr(step_time, "_measure", answer)
    return asked


@pytest.mark.parametrize(
    ("rates", "chosen", "why"),
    [
        ({8: 100, 16: 150, 32: 157}, 16, "gains +4.7 %"),
        ({8: 100, 16: 90}, 8, "gains -10.0 %"),
        ({8: 100, 16: 106, 32: 112, 64: 118, 128: 125, 256: 140}, 256, "fewer than 10 batches"),
        ({8: 100, 16: torch.OutOfMemoryError("CUDA out of memory. Tried")}, 8, "does not fit (CUDA out of memory)"),
        ({8: 100, 16: ConfigError("too few slots. Do")}, 8, "does not fit (too few slots)"),
        ({8: 100, 16: (200, 2**60)}, 16, "would need about"),
    ],
)
def test_it_doubles_while_that_pays(
    data: stoker.Dataset, monkeypatch: pytest.MonkeyPatch, rates: dict[int, Any], chosen: int, why: str
) -> None:
    asked = measured(monkeypatch, rates)
    choice = choose_batch_size(data, CONFIG)
    assert choice.batch_size == chosen
    assert why in choice.reason
    assert asked == sorted(rates)
    assert f"{chosen:,}" in str(choice)


def test_other_mistakes_are_not_taken_for_memory(data: stoker.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, {8: 100, 16: RuntimeError("shapes do not match")})
    with pytest.raises(RuntimeError, match="shapes"):
        choose_batch_size(data, CONFIG)


def test_few_rows_begin_with_smaller_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = make_dataset(tmp_path / "few", rows=50)
    asked = measured(monkeypatch, {4: 100})
    assert choose_batch_size(few, CONFIG).batch_size == 4
    assert asked == [4]


@pytest.mark.slow
def test_a_real_measurement_leaves_nothing_behind(data: stoker.Dataset) -> None:
    before = torch.get_rng_state()
    rate, grown = step_time._measure(data, CONFIG.replace(batch_size=64, backend="reference"))
    assert rate > 0
    assert grown >= 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("settings", "resident"), [({"data_memory": "1GiB"}, True), ({}, False)])
def test_rows_lie_where_the_run_will_have_them(
    data: stoker.Dataset, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], resident: bool
) -> None:
    streams: list[Any] = []

    def noted(*given: Any, **options: Any) -> Any:
        streams.append(open_stream(*given, **options))
        return streams[-1]

    open_stream = replica.open_stream
    monkeypatch.setattr(replica, "open_stream", noted)
    config = CONFIG.replace(batch_size=64, backend="reference", device="cpu", **settings)
    with replica.throwaway(data, config, 3) as (model, batches):
        losses = [float(model.step(batch)) for batch in batches]
    assert len(losses) == 3
    assert [stream.resident for stream in streams] == [resident]
    with replica.throwaway(data, config.replace(data_memory="0"), 3) as (model, batches):
        assert [float(model.step(batch)) for batch in batches] == losses


def test_learning_rates_follow_what_was_chosen(
    data: stoker.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(monkeypatch, {8: 100, 16: 200, 32: 400, 64: 401})
    given = {**SMALL, "batch_size": "auto", "base_batch_size": 8, "steps": 1, "row_lr": 0.1}
    result = stoker.train(data, out=tmp_path / "a", lr_scaling="sqrt", **given)
    assert result.model.embeddings.optimizer.lr == pytest.approx(0.2)
    stoker.train(data, out=tmp_path / "b", **{**given, "display": "plain"})
    assert "the learning rates are meant for batches of 8" in " ".join(capsys.readouterr().err.split())


def test_settings_hold_a_number() -> None:
    with pytest.raises(ConfigError, match="whole number"):
        TrainConfig(batch_size="auto")
