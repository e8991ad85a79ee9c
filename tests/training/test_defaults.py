"""Batch size, epochs and patience follow the number of training rows; what is given wins."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.base.files import seal
from stoker.testing import make_dataset
from stoker.training import defaults
from stoker.training.defaults import batch_for, complete, epochs_for

MODEL: dict[str, Any] = {"embedding_dim": 4, "model_options": {"bottom": (8,), "top": (8,)}, "tensorboard": False}


@pytest.fixture(autouse=True)
def ten_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "EPOCHS", 10)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> stoker.Dataset:
    path = tmp_path_factory.mktemp("defaults") / "data"
    return make_dataset(path, rows=12_800, num_embeddings=(9000, 8000, 7000))  # learnt by heart soon


def without_valid(data: stoker.Dataset, path: Path) -> stoker.Dataset:
    """The dataset without its validation rows."""
    manifest = json.loads((data.path / "manifest.json").read_text())
    manifest["splits"]["valid"] = {"rows": 0, "positives": 0, "shards": []}
    path.mkdir()
    for file in data.path.iterdir():
        (path / file.name).symlink_to(file)
    (path / "manifest.json").unlink()
    (path / "manifest.json").write_text(json.dumps(seal(manifest)))
    return stoker.Dataset(path)


def test_an_epoch_has_eighty_batches_where_bounds_allow_it() -> None:
    for rows in (6_000, 10_000, 79_999, 150_000):
        size = batch_for(rows)
        assert size & (size - 1) == 0
        assert 80 <= rows / size < 160 or size == 64
    assert [batch_for(rows) for rows in (1, 5_000, 10**6, 10**9)] == [64, 64, 2048, 2048]


def test_small_logs_have_several_epochs_and_large_ones_one() -> None:
    found = [epochs_for(rows, validated=True) for rows in (1, 10_000, 400_000, 10**6, 2 * 10**6, 10**7)]
    assert found == [10, 10, 10, 4, 2, 1]
    assert epochs_for(10_000, validated=False) == 1


@pytest.mark.slow
def test_a_run_says_and_keeps_its_defaults(
    data: stoker.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = stoker.train(data, out=tmp_path / "run", row_lr=0.5, display="plain", **MODEL)
    printed = capsys.readouterr()
    line = "10,240 training rows: batch 128, up to 10 epochs, stops after 2 evaluations without improvement"
    assert line in printed.out + printed.err
    kept = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    assert [kept[name] for name in ("batch_size", "epochs", "patience")] == [128, 10, 2]
    assert result.stopped_early
    assert result.best_step == result.step - 2 * 80  # the best epoch is kept, two more were tried
    assert stoker.load(tmp_path / "run").step == result.best_step


def test_what_is_given_wins(data: stoker.Dataset) -> None:
    def found(**settings: Any) -> list[int | None]:
        config = complete(stoker.TrainConfig(**settings), data)
        return [config.batch_size, config.epochs, config.patience]

    assert found() == [128, 10, 2]
    assert found(batch_size=32) == [32, 10, 2]
    assert found(epochs=3) == [128, 3, None]
    assert found(steps=500) == [128, 1, None]
    assert found(patience=7) == [128, 10, 7]
    assert found(eval_every=20) == [128, 10, 8]  # of two epochs, 80 steps each
    assert found(batch_size=32, epochs=1, patience=1) == [32, 1, 1]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> stoker.Dataset:
    return make_dataset(tmp_path_factory.mktemp("wide") / "data", rows=1_000, num_embeddings=(20,) * 12)


def options(data: stoker.Dataset, **settings: Any) -> tuple[Any, Any]:
    config = complete(stoker.TrainConfig(**settings), data)
    assert config == complete(config, data)
    return config.model_options, config.row_options


def test_a_small_wide_log_gets_linear_terms(
    wide: stoker.Dataset, data: stoker.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = wide.manifest["splits"]["train"]["positives"] / 800
    assert options(wide) == ({"linear": share}, {})
    assert options(wide, batch_size=50, epochs=2, dense_lr=0.01) == ({"linear": share}, {})
    assert stoker.explain(wide)["model_options"].value == {"linear": share}
    assert options(data) == ({}, {})  # 7 columns
    for name, value in {"EXAMPLES": 7_999, "WIDE": 17, "ROWS_A_WEIGHT": 3.4}.items():  # 244 weights
        with monkeypatch.context() as change:
            change.setattr(defaults, name, value)
            assert options(wide) == ({}, {})


def test_rows_of_a_small_log_with_a_rare_label_get_an_eps(
    data: stoker.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = data.manifest["splits"]["train"]
    for positives in (1024, 10_240 - 1024):
        monkeypatch.setitem(train, "positives", positives)
        assert options(data) == ({}, {"eps": 0.1 / 128})
        assert options(data, batch_size=50) == ({}, {"eps": 0.1 / 50})
        assert stoker.explain(data)["row_options"].value == {"eps": 0.1 / 128}
    for positives in (0, 1025, 10_240 - 1025, 10_240):
        monkeypatch.setitem(train, "positives", positives)
        assert options(data) == ({}, {})


@pytest.mark.parametrize(
    "given",
    [
        {"model": "dcn"}, {"model_options": {"linear": None}}, {"row_options": {"eps": 1e-8}}, {"row_lr": 0.05},
        {"row_optimizer": "adam"},
    ],
)  # fmt: skip
def test_what_is_given_keeps_its_meaning_on_a_small_log(
    given: dict[str, Any], wide: stoker.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(wide.manifest["splits"]["train"], "positives", 20)
    assert options(wide) == ({"linear": 20 / 800}, {"eps": 0.1 / 64})
    assert options(wide, **given) == (given.get("model_options", {}), given.get("row_options", {}))


def test_a_wide_run_says_its_linear_terms_and_resumes_with_a_whole_configuration(
    wide: stoker.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stoker.train(wide, out=tmp_path / "run", steps=2, tensorboard=False, display="plain")
    printed = capsys.readouterr()
    assert "800 training rows: batch 64, linear terms" in printed.out + printed.err
    again = stoker.train(resume=tmp_path / "run", config=stoker.TrainConfig(steps=4), display="quiet")
    assert again.step == 4
    assert again.model.config()["linear"] == wide.manifest["splits"]["train"]["positives"] / 800


def test_without_validation_rows_there_is_one_epoch(data: stoker.Dataset, tmp_path: Path) -> None:
    config = complete(stoker.TrainConfig(), without_valid(data, tmp_path / "data"))
    assert [config.batch_size, config.epochs, config.patience] == [128, 1, None]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_own(data: stoker.Dataset, tmp_path: Path) -> None:
    stoker.train(data, out=tmp_path / "run", epochs=1, display="quiet", **MODEL)
    again = stoker.train(
        resume=tmp_path / "run", config=stoker.TrainConfig(**MODEL), epochs=2, display="quiet"
    )  # fmt: skip
    assert again.epochs == 2
    kept = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    assert [kept[name] for name in ("batch_size", "epochs", "patience")] == [128, 2, None]


@pytest.mark.slow
def test_find_lr_and_runs_use_the_same_batch(data: stoker.Dataset) -> None:
    found = stoker.find_lr(data, lr_steps=20, trial_steps=20, **{k: v for k, v in MODEL.items() if k != "tensorboard"})
    assert found.batch_size == 128


def test_explain_tells_what_train_takes(data: stoker.Dataset, tmp_path: Path) -> None:
    found = stoker.explain(data, row_lr=0.2)
    stoker.train(data, out=tmp_path / "run", row_lr=0.2, steps=1, display="quiet")
    kept = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    told = {reason.setting: reason.value for reason in found.reasons}
    for name in ("model", "embedding_dim", "batch_size", "metric", "row_optimizer", "row_lr", "dense_optimizer"):
        assert told[name] == kept[name]
    assert {name: reason.given for name in told if (reason := found[name]).given} == {"row_lr": True}
    assert found["row_lr"].why == "given"
    assert "1,280 validation rows" in found["patience"].why
    assert found["epochs"].value == 10
    assert found["threads"].value == torch.get_num_threads()
    assert {field.name for field in fields(stoker.TrainConfig)} - told.keys() == {"steps"}  # there are epochs
    assert all(reason.why for reason in found.reasons)
    first, rest = (str(grid) for grid in found.grids())
    assert "row-lr" in first
    assert "row-lr" not in rest
    assert "checkpoint-minutes" in rest


def test_explain_follows_what_is_given_and_missing(data: stoker.Dataset, tmp_path: Path) -> None:
    assert stoker.explain(data, epochs=3)["patience"].why == "epochs or steps are given"
    assert stoker.explain(data, steps=30)["steps"].why == "given"
    usual = stoker.explain(data)
    assert (usual["eval_every"].value, usual["eval_every"].why[:9]) == ("an epoch", "80 steps,")
    assert "patience may end the run" in usual["schedule"].why
    assert usual["batch_order"].why == "the dataset is not classified"
    assert usual["device_memory"].value == "all"
    own = stoker.explain(data, batch_size=3000, dense_lr=0.5, device_memory="1GiB", compile=True, epochs=1)
    assert own["eval_every"].why.startswith("4 steps,"), "the last batch is a small one"
    assert stoker.explain(data, eval_every=7)["eval_every"].value == 7
    assert (own["dense_lr"].value, own["device_memory"].value) == (0.5, "1GiB")
    assert own["schedule"].why == "rates that stay; --schedule has others"
    first, rest = own.grids()
    assert ["compile", "yes", "given"] in first.rows
    assert ["model-options", "not set", "each model has its own"] in rest.rows
    bare = stoker.explain(without_valid(data, tmp_path / "data"))
    assert bare["epochs"].value == 1
    assert "without validation rows" in bare["epochs"].why
    assert bare["patience"].why == "it needs validation rows, and there are none"
