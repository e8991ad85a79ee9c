"""stoker.compare: figures, settings, data and curves of runs, whatever state they are in."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, records
from typer.testing import CliRunner

import stoker
from stoker.base.errors import ConfigError, DataError
from stoker.base.files import seal
from stoker.cli import app
from stoker.testing import make_dataset
from stoker.training.files.rundir import RunDirectory
from stoker.training.tools.compare import curves, text_plot

RUN: dict[str, Any] = {**SMALL, "epochs": 2, "eval_every": 25}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets d and e (another column, other rows, groups), and runs: a and b on d, other on e."""
    root = tmp_path_factory.mktemp("compare")
    data = make_dataset(root / "d", rows=2000, num_embeddings=(60, 30, 10))
    other = make_dataset(root / "e", rows=1000, num_embeddings=(60, 30, 12, 5), num_dense=3, group_rows=5)
    stoker.train(data, out=root / "runs" / "a", **RUN)
    stoker.train(
        data, out=root / "runs" / "b", **{**RUN, "row_lr": 0.5, "model_options": {"bottom": (8,), "top": (4,)}}
    )
    stoker.train(other, out=root / "runs" / "other", **{**RUN, "metric": "mrr"})
    return root


@pytest.mark.slow
def test_figures_and_settings(made: Path) -> None:
    found = stoker.compare(made / "runs" / "a", made / "runs" / "b")
    assert [run.name for run in found.runs] == ["a", "b"]
    assert found.settings == {"row_lr": (None, 0.5), "model_options.top": ([8], [4])}
    assert found.data == found.notes == ()
    assert found.metric == "auc"
    for run in found.runs:
        report = RunDirectory(run.path).read("report.json")
        assert run.finished
        assert (run.best_step, run.step) == (report["best_step"], report["step"])
        assert run.valid == report["valid"]
        assert run.test == report["test"]
        assert [record["auc"] for record in run.curve] == [record["auc"] for record in records(run.path, "valid")]
    assert json.loads(json.dumps(found.to_dict()))["settings"]["row_lr"] == [None, 0.5]


def test_other_data_and_another_metric_are_told(made: Path) -> None:
    found = stoker.compare(made / "runs" / "a", made / "runs" / "other")
    [text] = found.data
    assert "only other has C4" in text
    assert "only a has I4" in text
    assert "rows of tables: C3 10 and 12" in text
    assert "groups by nothing and by group" in text
    assert "training rows: 1,600 and 800" in text
    notes = " | ".join(found.notes)
    assert "best checkpoints are chosen by different metrics: a by auc; other by mrr" in notes
    assert re.search(r"test figures of a and other are from other rows: 200 rows with \d+ positive and 100", notes)
    assert found.metric == "auc", "what both have"
    asked = stoker.compare(made / "runs" / "a", made / "runs" / "other", metric="mrr")
    assert "no mrr was recorded for a" in " | ".join(asked.notes)
    assert list(curves(asked)) == ["other"]


def test_same_rows_with_another_feature(made: Path, tmp_path: Path) -> None:
    """What a loop of feature engineering compares: the same lines of the log, prepared otherwise."""
    counts = json.loads((made / "d" / "manifest.json").read_text())["splits"]["test"]
    for name, seed in (("same", 0), ("other", 1)):
        make_dataset(tmp_path / name / "d", rows=2000, num_dense=4, num_embeddings=(60, 30, 10), seed=seed)
        manifest = tmp_path / name / "d" / "manifest.json"
        values = json.loads(manifest.read_text())
        for key in ("valid", "test"):  # as another column would
            values["splits"][key]["shards"][0]["sha256"] = "0" * 64
        values["splits"]["test"]["positives"] = counts["positives"]
        values["schema_hash"] = "1" * 64
        manifest.write_text(json.dumps(seal(values)))
        run = tmp_path / name / "run"
        shutil.copytree(made / "runs" / "a", run)
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(seal({**config, "dataset": str(manifest.parent)})))
    found = stoker.compare(made / "runs" / "a", tmp_path / "same" / "run")
    assert "the same columns, prepared in another way" in found.data[0]
    notes = " | ".join(found.notes)
    assert "rows of a and run" not in notes, "the same labels in the same order: figures compare"
    assert "was prepared again after run was trained" in notes
    notes = " | ".join(stoker.compare(made / "runs" / "a", tmp_path / "other" / "run").notes)
    assert "test rows of a and run are equal in number and positives, but not in order" in notes


def test_unfinished_and_broken_runs(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "killed"
    shutil.copytree(made / "runs" / "b", run)
    (run / "report.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["kind"] != "test"][:2]
    (run / "metrics.jsonl").write_text("\n".join([*kept, lines[-1][:25]]))  # half a line
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(seal({**config, "dataset": str(tmp_path / "gone")})))
    goes_on = tmp_path / "goes_on"
    shutil.copytree(made / "runs" / "b", goes_on)
    with (goes_on / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"kind": "train", "step": 150, "epoch": 3.0, "loss": 0.5, "samples_per_second": 1.0}) + "\n"
        )
    found = stoker.compare(made / "runs" / "a", run, goes_on)
    assert [one.finished for one in found.runs] == [True, False, False]
    assert found.runs[1].test == {}
    notes = " | ".join(found.notes)
    assert re.search(r"killed is not finished \(step \d+\): it has no test figures yet", notes)
    assert "goes_on was resumed (step 150): its test figures are from its earlier end, at step 100" in notes
    assert "the dataset of killed cannot be read" in notes
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(made / "runs" / "a" / "config.json", begun)
    found = stoker.compare(made / "runs" / "a", begun)
    assert "begun was not evaluated on validation rows" in " | ".join(found.notes)
    assert found.runs[1].valid == {}


def test_a_run_of_an_earlier_version_is_on_the_same_data(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "runs" / "b", tmp_path / "b")
    for path in (tmp_path / "b" / "checkpoints").glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["extra"]["dataset"]["fitted_hash"]
        path.write_text(json.dumps(manifest))
    assert stoker.compare(made / "runs" / "a", tmp_path / "b").notes == ()


def test_a_run_whose_records_are_gone_has_its_figures(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "runs" / "b", tmp_path / "b")
    (tmp_path / "b" / "metrics.jsonl").unlink()
    found = stoker.compare(made / "runs" / "a", tmp_path / "b")
    [whole] = [run for run in stoker.compare(made / "runs" / "a", made / "runs" / "b").runs if run.name == "b"]
    gone = found.runs[1]
    assert (gone.finished, gone.step, gone.best_step) == (True, whole.step, whole.best_step)
    assert (gone.valid, gone.test, gone.samples_per_second) == (whole.valid, whole.test, whole.samples_per_second)
    [note] = found.notes
    assert note.endswith("metrics.jsonl holds no evaluation: the figures of b are its report's, without curves")
    assert list(curves(found)) == ["a"]


def test_a_report_that_is_none(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "runs" / "b", tmp_path / "b")
    (tmp_path / "b" / "report.json").write_text("{}")
    with pytest.raises(DataError, match=r"report\.json is not what a run writes"):
        stoker.compare(made / "runs" / "a", tmp_path / "b")


def test_mistakes_are_told(made: Path, tmp_path: Path) -> None:
    a = made / "runs" / "a"
    with pytest.raises(ConfigError, match="name at least two"):
        stoker.compare(a)
    with pytest.raises(ConfigError, match="is named twice"):
        stoker.compare(a, made / "runs" / "b", a)
    with pytest.raises(ConfigError, match="is a dataset, not a run directory"):
        stoker.compare(a, made / "d")
    with pytest.raises(ConfigError, match="metric 'ctr' is unknown"):
        stoker.compare(a, made / "runs" / "b", metric="ctr")


def test_names_are_as_short_as_tells_them_apart(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "runs" / "a", tmp_path / "x" / "a")
    assert [run.name for run in stoker.compare(made / "runs" / "a", tmp_path / "x" / "a").runs] == ["runs/a", "x/a"]


def test_curves_in_characters() -> None:
    drawn = text_plot(
        {"one": [(0.0, 0.0), (2.0, 2.0)], "two": [(1.0, 0.0)]}, {"one": "a", "two": "b"}, width=5, height=3
    )
    assert drawn.splitlines() == [
        "2.0000 |   aa",
        "       |  a",
        "0.0000 |aab",
        "       +-----",
        "        0epoch2",
    ]  # fmt: skip
    assert "0.5000" in text_plot({"one": [(1.0, 0.5)]}, {"one": "a"})


@pytest.mark.slow
def test_one_evaluation_is_no_curve(made: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(made / "runs" / name, tmp_path / name)
        kept = [records(tmp_path / name, "valid")[-1], *records(tmp_path / name, "test")]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    shown = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")], env={"COLUMNS": "140"})
    assert shown.exit_code == 0, shown.output
    assert "no curves of auc: each run has at most one evaluation" in shown.output
    assert "epoch  " not in shown.output
    asked = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--metric", "mrr"]
    shown = CliRunner().invoke(app, asked, env={"COLUMNS": "140"})
    assert "no curves: no run has mrr of validation rows" in shown.output
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed here")
    losses, metric = stoker.compare(tmp_path / "a", tmp_path / "b").figure().axes
    assert "no records" in losses.texts[0].get_text()
    assert not metric.texts


def test_data_beneath_the_working_directory_is_named_from_there(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    [text] = stoker.compare("runs/a", "runs/other").data
    assert text.startswith("other (e) against a (d): ")


@pytest.mark.slow
def test_the_command(made: Path, tmp_path: Path) -> None:
    runs = [str(made / "runs" / name) for name in ("a", "b", "other")]
    shown = CliRunner().invoke(app, ["compare", *runs], env={"COLUMNS": "140"})
    assert shown.exit_code == 0, shown.output
    for words in (
        "Best validation figures",
        "Test figures",
        "Settings that differ",
        "row_lr",
        "data: other",
        "a a   b b",
    ):
        assert words in shown.output
    auc = RunDirectory(runs[1]).read("report.json")["test"]["auc"]
    assert f"{auc:.4f}" in shown.output
    narrow = CliRunner().invoke(app, ["compare", *runs], env={"COLUMNS": "50"}).output
    assert "a a\nb b\nc other\n" in narrow
    assert re.search(r"^┃ +┃ +a ┃ +b ┃ +c ┃$", narrow, re.MULTILINE)
    told = json.loads(CliRunner().invoke(app, ["compare", *runs, "--json"]).output)
    assert [run["name"] for run in told["runs"]] == ["a", "b", "other"]
    beside = [*runs[:2], str(made / "d")]  # a dataset next to them, as runs/* finds after stoker train LOG
    assert json.loads(CliRunner().invoke(app, ["compare", *beside, "--json"]).output)["runs"] == told["runs"][:2]
    assert CliRunner().invoke(app, ["compare", *beside[1:]]).exit_code != 0
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed here")
    shown = CliRunner().invoke(app, ["compare", *runs, "--plot", str(tmp_path / "curves.png")])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert CliRunner().invoke(app, ["compare", *runs, "--plot", str(tmp_path / "curves.jpg")]).exit_code != 0
