"""The range test for learning rates: what it sees, suggests, shows and leaves alone."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import HALF, ROWS, SMALL

import stoker
from stoker.base.errors import ConfigError
from stoker.cli.train import curve
from stoker.cli.train import find_lr as command
from stoker.cli.train import train as train_command
from stoker.dataset.manifest import write_manifest
from stoker.testing import make_dataset
from stoker.training.replica import throwaway
from stoker.training.settings import OrderConfig, RateConfig, RunConfig
from stoker.training.tools.find_lr import Finding, Trial, find_lr

SETTINGS: dict[str, Any] = {
    **{k: v for k, v in SMALL.items() if k != "display"},
    "batch_size": 128,
    "backend": "reference",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> stoker.Dataset:
    return make_dataset(tmp_path_factory.mktemp("lr") / "d", rows=3000, num_embeddings=ROWS)


@pytest.fixture(scope="module")
def finding(data: stoker.Dataset) -> Finding:
    return find_lr(data, lr_steps=150, low=0.01, high=300.0, trial_steps=20, **SETTINGS)


def made(losses: list[float], **changes: Any) -> Finding:
    factors = tuple(10 ** (-3 + 6 * at / (len(losses) - 1)) for at in range(len(losses)))
    given = {"which": "both", "batch_size": 1, "row_lr": 0.5, "dense_lr": 0.1, "diverged": False, **changes}
    return Finding(factors=factors, losses=tuple(losses), smoothed=tuple(losses), **given)


@pytest.mark.slow
def test_passes_are_counted(data: stoker.Dataset, finding: Finding) -> None:
    assert finding.epochs == pytest.approx(len(finding.losses) * 128 / len(data.train))
    assert f"{finding.epochs:.0f} times" in finding.warnings[0]


def test_rates_rise_evenly_and_the_loss_falls_before_it_rises(finding: Finding) -> None:
    steps = [b / a for a, b in zip(finding.factors, finding.factors[1:], strict=False)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert finding.factors[0] == pytest.approx(0.01)
    assert finding.minimum is not None
    assert finding.smoothed[finding.minimum] < finding.smoothed[5] - 0.01
    assert finding.steepest is not None
    assert finding.steepest < finding.minimum
    found = {rule: finding.rates(factor) for rule, factor in finding.candidates.items()}
    assert found["steepest"]["row_lr"] / 0.05 == pytest.approx(found["steepest"]["dense_lr"] / 1e-3)
    assert found["minimum / 10"]["row_lr"] == pytest.approx(0.05 * finding.factors[finding.minimum] / 10)


@pytest.mark.slow
@pytest.mark.parametrize(("row_lr", "dense_lr"), [(5e-4, 1e-5), (0.3, 5e-3), (1e4, 1e3)])
def test_what_is_suggested_is_no_worse_than_the_settings(
    data: stoker.Dataset, tmp_path: Path, row_lr: float, dense_lr: float
) -> None:
    settings = {**SETTINGS, "batch_size": 32, "row_lr": row_lr, "dense_lr": dense_lr}
    found = find_lr(data, lr_steps=100, low=1.0, high=1e4, trial_steps=75, **settings)
    if not found.trials:
        assert not found.suggestions
        return
    runs = [settings, *({**settings, **rates} for rates in found.suggestions.values())]
    best = {trial.rule: trial for trial in found.trials}
    losses = []
    for number, (rule, given) in enumerate(zip(["settings", *found.suggestions], runs, strict=True)):
        result = stoker.train(data, out=tmp_path / str(number), display="quiet", **given)
        losses.append(result.valid["log_loss"])
        assert result.step == found.trial_steps, "a trial is as long as the run"
        assert losses[-1] == pytest.approx(best[rule].loss, rel=1e-5)
    assert losses[1:] == sorted(losses[1:]), "the best comes first"
    assert all(loss < losses[0] for loss in losses[1:])
    if row_lr < 1e-3:
        assert found.suggestions, "rates a hundredth of the usual ones are beaten"


@pytest.mark.slow
def test_a_trial_counts_its_best_epoch_as_a_run_does(tmp_path: Path) -> None:
    """Else rates that learn fast and then overfit lose by epochs that a run would not keep."""
    data = make_dataset(tmp_path / "d", rows=1500, num_embeddings=ROWS)
    given = {**SETTINGS, "batch_size": 16, "epochs": 3, "patience": 3, "metric": "log_loss"}
    settings = {**given, "row_lr": 1.0, "dense_lr": 0.05}
    found = find_lr(data, lr_steps=60, low=0.1, high=1000.0, **settings)
    assert len(found.trials) == 3
    for number, trial in enumerate(found.trials):
        rates = found.rates(trial.factor)
        result = stoker.train(data, out=tmp_path / str(number), display="quiet", **{**given, **rates})
        assert result.step == found.trial_steps
        assert result.valid["log_loss"] == pytest.approx(trial.loss, rel=1e-5)


def test_only_what_is_surely_better_is_suggested() -> None:
    trials = [("settings", 1.0, 0.0, 0.0), ("steepest", 0.1, -0.03, 0.02), ("minimum / 10", 3.0, -0.03, 0.01)]
    found = made([1.0] * 20, trials=tuple(
        Trial(rule=rule, factor=factor, loss=0.5 + change, change=change, error=error)
        for rule, factor, change, error in trials
    ))  # fmt: skip
    assert found.suggestions == {"minimum / 10": {"row_lr": 1.5, "dense_lr": pytest.approx(0.3)}}


@pytest.mark.slow
def test_without_validation_rows_trials_are_judged_by_the_batches_behind_them(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "d", rows=2000, num_embeddings=ROWS)
    empty = {name: {"rows": 0, "positives": 0, "shards": []} for name in ("valid", "test")}
    write_manifest(data.path, {**data.manifest, "splits": {**data.manifest["splits"], **empty}})
    given = {**SETTINGS, "batch_size": 16, "row_lr": 5e-4, "dense_lr": 1e-5}
    found = find_lr(data.path, lr_steps=60, low=1.0, high=1e4, trial_steps=30, **given)
    assert found.held_out == 3 * 16
    assert [trial.rule for trial in found.trials] == ["settings", "steepest", "minimum / 10"]
    assert found.suggestions


def test_smoothing_is_a_mean_of_the_past_without_its_bias(finding: Finding) -> None:
    for at in (0, 7, len(finding.losses) - 1):
        weights = [0.9 ** (at - k) for k in range(at + 1)]
        mean = sum(w * loss for w, loss in zip(weights, finding.losses, strict=False)) / sum(weights)
        assert finding.smoothed[at] == pytest.approx(mean)


def test_it_finds_the_bend_of_a_known_curve() -> None:
    steps = 121
    losses = [1.0 - 1 / (1 + math.exp(-(at - 60) / 4)) + max(0, at - 90) * 0.02 for at in range(steps)]
    found = made(losses)
    assert found.steepest == pytest.approx(60, abs=1)
    assert found.minimum == 90
    assert found.candidates["steepest"] == pytest.approx(1.0, rel=0.15)


def test_what_does_not_fall_suggests_nothing() -> None:
    assert made([1.0 + at for at in range(40)]).candidates == {}


def test_what_makes_a_suggestion_doubtful() -> None:
    bend = [2.0 - math.exp(-(((at - 60) / 25) ** 2)) for at in range(80)]
    assert made(bend, epochs=1.0).warnings == ()
    [often] = made(bend, epochs=43.3).warnings
    assert "43 times" in often
    [falling] = made([2.0 - at / 100 for at in range(80)]).warnings
    assert "still fell" in falling
    assert made([2.0 - at / 100 for at in range(80)], diverged=True).warnings == ()


def test_rows_and_dense_part_have_schedules_of_their_own(data: stoker.Dataset) -> None:
    config = stoker.TrainConfig(**SETTINGS, dense_lr=0.4, row_lr=0.2, dense_warmup=3, epochs=1)  # which is not for it
    falling = stoker.StepDecay(every=1, gamma=0.5)
    for dense, rows in ((falling, None), (None, falling)):
        with throwaway(data, config, 3, dense, rows) as (replica, batches):
            rates = []
            for batch in batches:
                replica.step(batch)
                rates.append(replica.dense.param_groups[0]["lr"])
        assert rates == pytest.approx([0.4, 0.2, 0.1] if dense else [0.4] * 3)
        assert replica.model.embeddings.optimizer.schedule == (rows or stoker.Constant())


@pytest.mark.slow
@pytest.mark.parametrize(("which", "names"), [("rows", {"row_lr"}), ("dense", {"dense_lr"})])
def test_one_rate_may_stand_still(data: stoker.Dataset, which: Any, names: set[str]) -> None:
    found = find_lr(data, lr_steps=20, which=which, low=0.1, high=50, **SETTINGS)
    assert set(found.rates(1.0)) == names


@pytest.mark.slow
def test_it_is_a_function_of_its_settings_wherever_rows_lie(data: stoker.Dataset, finding: Finding) -> None:
    placed = find_lr(data, lr_steps=150, low=0.01, high=300.0, trial_steps=20, device_memory=HALF, **SETTINGS)
    assert placed.losses == finding.losses
    assert placed.trials == finding.trials


@pytest.mark.slow
def test_generators_and_files_are_left_alone(data: stoker.Dataset, tmp_path: Path) -> None:
    before, there = torch.get_rng_state(), sorted(data.path.rglob("*"))
    find_lr(data, lr_steps=20, home_path=str(tmp_path / "home"), device_memory=HALF, **SETTINGS)
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(data.path.rglob("*")) == there


@pytest.mark.slow
def test_it_ends_where_the_loss_leaves_all_bounds(data: stoker.Dataset) -> None:
    found = find_lr(data, lr_steps=60, high=1e9, row_optimizer="sgd", dense_optimizer="sgd", **SETTINGS)
    assert found.diverged
    assert len(found.losses) < 60


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr_steps": 5}, "at least 20"),
        ({"low": 1.0, "high": 0.5}, "Give 0 < low < high"), ({"which": "x"}, "'rows'"),
        ({"smoothing": 1.0}, "weight of earlier steps"),
        ({"row_lr": 0.0}, "stays 0"), ({"no_such": 1}, "takes no argument"),
    ],
)  # fmt: skip
def test_what_cannot_work(data: stoker.Dataset, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_lr(data, **{**SETTINGS, **options})


def test_the_curve_in_characters_marks_its_suggestions(finding: Finding) -> None:
    lines = curve(finding).splitlines()
    assert len(lines) == 14
    assert max(map(len, lines)) <= 80
    assert lines[12].index("s") < lines[12].index("m")
    assert f"{min(finding.smoothed):.4f}" in lines[11]


@pytest.mark.slow
def test_a_picture(finding: Finding, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    finding.plot(tmp_path / "lr.png")
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert finding.figure().axes[0].get_xlabel() == f"dense_lr (row_lr: times {finding.row_lr / finding.dense_lr:g})"
    with pytest.raises(ConfigError, match=r"\.png"):
        finding.plot(tmp_path / "lr.pdf")


def test_plain_values(finding: Finding) -> None:
    again = json.loads(json.dumps(finding.to_dict(), allow_nan=False))
    assert again["suggestions"] == finding.suggestions


def test_its_options_are_those_of_train() -> None:
    import inspect

    mine, theirs = (set(inspect.signature(each).parameters) for each in (command, train_command))
    own = {item.name for part in (OrderConfig, RateConfig, RunConfig) for item in dataclasses.fields(part)}
    shared = {"batch_size", "seed", "shuffle_memory", "data_memory", "lr_scaling", "base_batch_size"}
    assert theirs - mine == own - shared | {"out", "resume", "why", "json_lines", "ranks"}  # why: --explain
