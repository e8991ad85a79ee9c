"""Runs with the means for large batches: they go on to the bit, lie anywhere, and refuse what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import HALF, ROWS, SMALL, assert_same_run, checkpoint_files, records

import stoker
from stoker.base.errors import ConfigError
from stoker.base.files import seal
from stoker.testing import make_dataset

RUN: dict[str, Any] = {**SMALL, "steps": 20, "save_every": 10, "log_every": 1}
MEANS: dict[str, dict[str, Any]] = {
    "dense lamb, one cycle": {"dense_optimizer": "lamb", "schedule": "one-cycle", "dense_weight_decay": 0.01},
    "row lamb": {"row_optimizer": "lamb", "row_lr": 0.1, "row_weight_decay": 0.01},
    "row lamb, bfloat16": {"row_optimizer": "lamb", "row_lr": 0.1, "dtype": "bfloat16", "max_trust": 3.0},
    "row lamb, tensor train": {
        "row_optimizer": "lamb",
        "row_lr": 0.1,
        "tt_rank": 3,
        "tt_rows": 500,
        "backend": "reference",
    },
    "cow clip": {"row_optimizer": "adam", "row_cow_clip": (1.0, 1e-3), "lr_scaling": "cowclip", "base_batch_size": 8},
    "dense warm-up": {"dense_optimizer": "sgd", "schedule": "linear", "dense_warmup": 15},
    "scaled": {"lr_scaling": "sqrt", "base_batch_size": 8, "row_optimizer": "adam", "warmup": 5},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> stoker.Dataset:
    return make_dataset(tmp_path_factory.mktemp("large") / "d", rows=1500, num_embeddings=ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("means", MEANS)
def test_a_run_goes_on_to_the_bit_from_anywhere(data: stoker.Dataset, tmp_path: Path, means: str) -> None:
    given = {**RUN, **MEANS[means]}
    stoker.train(data, out=tmp_path / "whole", **given)
    # The length of the run is part of a schedule, so it is stopped by a checkpoint that is taken away.
    stoker.train(data, out=tmp_path / "parts", device_memory=HALF, **given)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    for path in (tmp_path / "parts/checkpoints/step_000000020").rglob("*"):
        if path.is_file():
            path.unlink()
    stoker.train(resume=tmp_path / "parts", device_memory="all", display="quiet")
    assert checkpoint_files(tmp_path / "parts", 20) == checkpoint_files(tmp_path / "whole", 20)
    assert stoker.verify(tmp_path / "parts", steps=10, begin=10).identical


def test_one_cycle_and_scaling_reach_both_rates(data: stoker.Dataset, tmp_path: Path) -> None:
    stoker.train(
        data, out=tmp_path / "run", **RUN, schedule="one-cycle", lr_scaling="cowclip", base_batch_size=2, row_lr=0.5,
        dense_lr=0.01,
    )  # fmt: skip
    lines = records(tmp_path / "run", "train")
    assert max(line["row_lr"] for line in lines) == pytest.approx(0.5, rel=0.02)
    assert max(line["dense_lr"] for line in lines) == pytest.approx(0.04, rel=0.02)
    assert lines[0]["row_lr"] == pytest.approx(0.5 / 25)
    assert lines[-1]["row_lr"] == pytest.approx(0.5 / 1e5)


def test_the_dense_rate_warms_up_alone(data: stoker.Dataset, tmp_path: Path) -> None:
    stoker.train(data, out=tmp_path / "run", **RUN, dense_warmup=10, row_lr=0.5, dense_lr=0.01)
    lines = records(tmp_path / "run", "train")
    assert [line["row_lr"] for line in lines] == [0.5] * 20
    assert [line["dense_lr"] for line in lines] == pytest.approx([0.001 * min(step, 10) for step in range(1, 21)])


def test_it_warms_up_on_top_of_the_schedule() -> None:
    config = stoker.TrainConfig(schedule="linear", dense_warmup=4)
    schedule = config.make_schedule(10)
    assert [config.dense_factor(schedule, step) for step in (0, 3, 5)] == pytest.approx([0.25, 0.7, 0.5])


def test_cow_clip_and_tensor_trains_are_refused_together(data: stoker.Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no ids to count"):
        stoker.train(data, out=tmp_path / "run", **RUN, row_cow_clip=(1.0, 1e-5), tt_rank=3, tt_rows=500)


@pytest.mark.parametrize("clip", [(0.0, 0.0), (1.0, -1.0), (1.0,)])
def test_cow_clip_out_of_range(clip: Any) -> None:
    with pytest.raises(ConfigError, match="cow_clip"):
        stoker.TrainConfig(row_cow_clip=clip)


def test_the_rule_of_scaling_cannot_change_in_a_run(data: stoker.Dataset, tmp_path: Path) -> None:
    stoker.train(data, out=tmp_path / "run", **RUN)
    with pytest.raises(ConfigError, match="lr_scaling='none'"):
        stoker.train(resume=tmp_path / "run", lr_scaling="sqrt", display="quiet")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dense_warmup": 1}, "the warm-up of 1 step is not shorter than the run of 1 step"),
        ({"base_batch_size": 64}, "base_batch_size is ignored: without lr_scaling"),
        ({"cycle_rise": 0.5}, "cycle_rise is ignored: only the schedule one-cycle"),
        ({"row_l1": 0.1, "row_momentum": 0.5}, "row_l1 and row_momentum are ignored: row optimizer rowwise_adagrad"),
        ({"min_trust": 0.1, "max_trust": 2.0}, "min_trust and max_trust are ignored: only lamb"),
    ],
)
def test_settings_without_effect_are_told(
    data: stoker.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], words: str
) -> None:
    stoker.train(data, out=tmp_path / "run", **{**RUN, "display": "plain", "steps": 1}, **settings)
    assert words in " ".join(capsys.readouterr().err.split())


def test_defaults_of_before_in_an_old_run_are_not_called_ignored(
    data: stoker.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stoker.train(data, out=tmp_path / "run", **{**RUN, "steps": 1})
    file = tmp_path / "run" / "config.json"
    values = json.loads(file.read_text())
    values["settings"] |= {"schedule_rows": 8192, "lookahead": 64, "in_flight": 2}
    file.write_text(json.dumps(seal(values)))
    stoker.train(resume=tmp_path / "run", steps=2, display="plain")
    said = " ".join(capsys.readouterr().err.split())
    assert "in_flight is ignored" in said
    assert "schedule rows" not in said
