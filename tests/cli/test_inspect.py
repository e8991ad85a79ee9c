"""stoker inspect and stoker doctor, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from stoker import Schema
from stoker.base import progress
from stoker.base.errors import DataError, StokerError
from stoker.base.files import seal
from stoker.cli import app as application
from stoker.cli import machine
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import write_counts
from stoker.testing import make_dataset


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    return application


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(
        tmp_path_factory.mktemp("d"), rows=1000, shard_rows=300, sequence={2: 3}, num_embeddings=(500, 30, 7)
    )


def run(app: typer.Typer, *arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_dataset_as_json(app: typer.Typer, dataset: Dataset) -> None:
    found = json.loads(run(app, "inspect", dataset.path, "--json", "--verify"))
    assert found["splits"]["train"]["rows"] == 800
    assert found["splits"]["train"]["positives"] == dataset.train.positives
    assert found["splits"]["train"]["shards"] == 3
    assert found["verified_files"] == 6
    assert found["bytes"] == sum(p.stat().st_size for p in dataset.path.rglob("*.safetensors"))
    table = found["tables"][0]
    counts, known = dataset.counts["C1"], dataset.counts["C1"][1:].sort(descending=True).values
    assert table["rows"] == 500
    assert table["accesses"] == 800
    assert table["oov_share"] == pytest.approx(int(counts[0]) / 800)
    assert table["hot_1_percent"] == pytest.approx(int(known[:5].sum()) / 800)
    assert table["hot_10_percent"] == pytest.approx(int(known[:50].sum()) / 800)
    assert found["tables"][2]["max_length"] == 3
    (batch,) = dataset.train.batches(800)
    column = found["dense"][1]
    assert column["mean"] == pytest.approx(float(batch.dense[:, 1].mean()), abs=1e-6)
    assert column["min"] == float(batch.dense[:, 1].min())
    assert column["rows"] == 800


def test_dataset_as_text(app: typer.Typer, dataset: Dataset) -> None:
    text = run(app, "inspect", dataset.path)
    for expected in ("train", "800", "C3 (up to 3)", "top 10 %", "I4", "testing"):
        assert expected in text
    assert "verified" not in text


@pytest.mark.slow
def test_the_recipe_is_named_as_people_say_it(app: typer.Typer, tmp_path: Path) -> None:
    from stoker.prep.prepare import run_prepare
    from stoker.synthetic import write

    write("criteo", 30, tmp_path / "log.tsv", scale=0.001)
    (tmp_path / "own.toml").write_text(
        'name = "shop"\nlabel = "a"\n[[dense]]\nname = "b"\n[split]\ntrain = 1.0\nvalid = 0.0\ntest = 0.0\n'
    )
    (tmp_path / "own.csv").write_text("a,b\n1,2\n0,3\n")
    run_prepare("criteo", tmp_path / "log.tsv", out=tmp_path / "known", preset="nvt")
    run_prepare(tmp_path / "own.toml", tmp_path / "own.csv", out=tmp_path / "own")
    known, own = (run(app, "inspect", tmp_path / name, "--verify") for name in ("known", "own"))
    assert "recipe           criteo, preset nvt\n" in known
    assert "made by          stoker prepare criteo --preset nvt, Stoker" in known
    assert "recipe           shop, a schema of your own\n" in own
    assert "{" not in known + own
    assert "verified: checksums are right, 3 files\n" in own


def test_hashed_tables_show_the_skew_of_their_rows(app: typer.Typer, tmp_path: Path) -> None:
    """Ids of hash buckets do not follow the count: the first rows are not the most popular."""
    from stoker.prep.prepare import run_prepare

    (tmp_path / "own.toml").write_text(
        'label = "a"\n[[categorical]]\nname = "b"\nhash_buckets = 100\n[split]\ntrain = 1.0\nvalid = 0.0\ntest = 0.0\n'
    )
    rows = [f"{i % 2},x{i % 30 if i % 2 else 77}" for i in range(1000)]
    (tmp_path / "own.csv").write_text("\n".join(["a,b", *rows]) + "\n")
    run_prepare(tmp_path / "own.toml", tmp_path / "own.csv", out=tmp_path / "own")
    (table,) = json.loads(run(app, "inspect", tmp_path / "own", "--json"))["tables"]
    assert table["hot_1_percent"] >= 0.5
    assert table["hot_10_percent"] > table["hot_1_percent"]
    assert table["top_counts"][0] >= 500


def test_tables_stand_in_natural_order_and_fit_80_columns(app: typer.Typer, tmp_path: Path) -> None:
    path = make_dataset(tmp_path, rows=50, num_embeddings=(9,) * 12).path
    manifest = json.loads((path / "manifest.json").read_text())
    found = manifest["features"]["num_embeddings"]
    manifest["features"]["num_embeddings"] = {
        name: found[name] for name in sorted(found)
    }  # as a preparation leaves them
    large = torch.tensor([14_120_000, 12_300_000, 11_110_000, 5, 4, 3, 2, 1, 0])
    manifest["files"]["counts.safetensors"] = write_counts(path, {name: large.clone() for name in found})
    (path / "manifest.json").write_text(json.dumps(seal(manifest)))
    names = [table["table"] for table in json.loads(run(app, "inspect", path, "--json"))["tables"]]
    assert names == [f"C{i}" for i in range(1, 13)]
    text = CliRunner().invoke(app, ["inspect", str(path)], env={"COLUMNS": "80"}).output
    shown = text.split("Tables")[1].split("Dense")[0].splitlines()
    assert any("accesses" in line and "top 10 %" in line for line in shown)
    assert len([line for line in shown if line.startswith("│")]) == 12


def test_the_times_of_every_split_are_shown_where_the_manifest_has_them(app: typer.Typer, tmp_path: Path) -> None:
    from stoker.prep.prepare import run_prepare

    (tmp_path / "own.toml").write_text(
        'label = "a"\n[[dense]]\nname = "b"\n[timestamp]\ncolumn = "when"\ntype = "datetime"\n'
        '[split]\nrule = "time"\ntrain = 0.5\nvalid = 0.5\ntest = 0.0\n'
    )
    days = ["2017-03-07T10:15:00.5+02:00", "20170301", "2017-03-02", "2017-03-06"]
    (tmp_path / "own.csv").write_text("a,b,when\n" + "".join(f"1,2,{day}\n" for day in days))
    run_prepare(tmp_path / "own.toml", tmp_path / "own.csv", out=tmp_path / "own")
    shown = run(app, "inspect", tmp_path / "own").split("Times of the rows")[1].splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown if line.startswith("│")]
    assert cells[:2] == [
        ["train", "2017-03-01T00:00:00Z", "2017-03-02T00:00:00Z"],
        ["valid", "2017-03-06T00:00:00Z", "2017-03-07T08:15:00.500000Z"],
    ]
    assert cells[2][0] != "test", "a split without rows has no times"
    manifest = json.loads((tmp_path / "own" / "manifest.json").read_text())
    for split in manifest["splits"].values():  # as earlier versions wrote it
        split.pop("time", None)
    (tmp_path / "own" / "manifest.json").write_text(json.dumps(seal(manifest)))
    assert "Times of the rows" not in run(app, "inspect", tmp_path / "own", "--verify")
    assert "time" not in json.loads(run(app, "inspect", tmp_path / "own", "--json"))["splits"]["train"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "factor", "kind"), [("seconds", 1, "int"), ("milliseconds", 1000, "int"), ("seconds", 1.0, "float")]
)
def test_numbers_of_times_are_shown_as_dates(
    app: typer.Typer, tmp_path: Path, unit: str, factor: float, kind: str
) -> None:
    from stoker.prep.prepare import run_prepare

    schema = {
        "label": "a", "dense": [{"name": "b"}], "timestamp": {"column": "when", "type": kind},
        "split": {"rule": "time", "train": 0.5, "valid": 0.5, "test": 0.0},
    }  # fmt: skip
    for name, first in (("times", 1_488_326_400), ("years", 2017)):
        whens = [first * (factor if name == "times" else 1) + day for day in range(4)]
        (tmp_path / "own.csv").write_text("a,b,when\n" + "".join(f"1,2,{when}\n" for when in whens))
        run_prepare(Schema.from_dict(schema), tmp_path / "own.csv", out=tmp_path / name)
    shown = run(app, "inspect", tmp_path / "times")
    assert f"Times of the rows, as {unit} since 1970" in shown
    assert f"{1_488_326_400 * factor} = 2017-03-01T00:00:00Z" in shown
    assert "1970" not in run(app, "inspect", tmp_path / "years"), "years are not times since 1970"


@pytest.mark.slow
def test_a_dataset_of_a_file_that_broke_off_says_so(app: typer.Typer, tmp_path: Path) -> None:
    import gzip

    from stoker.prep.prepare import run_prepare
    from stoker.synthetic import write

    write("criteo", 2000, tmp_path / "log.tsv", scale=0.001)
    packed = gzip.compress((tmp_path / "log.tsv").read_bytes())
    (tmp_path / "cut.tsv.gz").write_bytes(packed[: len(packed) // 2])
    report = run_prepare("criteo", tmp_path / "cut.tsv.gz", out=tmp_path / "out")
    assert f"cut.tsv.gz ends early at line {report.lines:,}" in run(app, "inspect", tmp_path / "out")


def test_damage_is_reported(app: typer.Typer, tmp_path: Path) -> None:
    path = make_dataset(tmp_path, rows=50).path
    shard = path / "train" / "00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    run(app, "inspect", path)
    with pytest.raises(DataError, match="was altered"):
        run(app, "inspect", path, "--verify")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "neither a dataset nor a checkpoint nor a run"),
        (lambda path: path.write_text("x"), "neither a dataset"),
        (lambda path: (path / "train").mkdir(parents=True), "preparation was interrupted"),
        (lambda path: (path / ".work").mkdir(parents=True), "preparation was interrupted"),
        (lambda path: (path.mkdir(), (path / "manifest.json").write_text("{")), "cannot be read"),
        (
            lambda path: (path.mkdir(), (path / "manifest.json").write_text('{"kind": "soup"}')),
            "is of kind 'soup'",
        ),
    ],
)
def test_anything_else(app: typer.Typer, tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "x")
    with pytest.raises(StokerError, match=message):
        run(app, "inspect", tmp_path / "x")


def test_checkpoint(app: typer.Typer, dataset: Dataset, tmp_path: Path) -> None:
    from stoker.models import DLRM
    from stoker.training.files.checkpoint import save

    model = DLRM(dataset.schema, embedding_dim=4, bottom=(8,), top=(8,))
    save(tmp_path / "step", model, stream=dataset.train.batches(100, seed=1), step=3)
    found = json.loads(run(app, "inspect", tmp_path / "step", "--json", "--verify"))
    assert found["step"] == 3
    assert [table["num_embeddings"] for table in found["tables"]] == [500, 30, 7]
    assert found["verified_files"] == found["files"] == 4
    text = run(app, "inspect", tmp_path / "step")
    assert "batch 0 of 8" in text
    shard = next((tmp_path / "step" / "tables").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(StokerError, match=shard.name):
        run(app, "inspect", tmp_path / "step", "--verify")


def test_a_run_lists_its_checkpoints(app: typer.Typer, dataset: Dataset, tmp_path: Path) -> None:
    from stoker.models import DLRM
    from stoker.training.files.checkpoint import save

    model = DLRM(dataset.schema, embedding_dim=4, bottom=(8,), top=(8,))
    run_path = tmp_path / "r"
    run_path.mkdir()
    (run_path / "config.json").write_text("{}")
    scores = {3: 0.7, 6: 0.8, 9: 0.6}
    for step, auc in scores.items():
        best = max((s for s in scores if s <= step), key=scores.__getitem__)
        extra = {"progress": {"latest": {"step": step, "valid": {"auc": auc}}}, "best": {"step": best}}
        place = run_path / "checkpoints" / f"step_{step:09d}"
        save(place, model, stream=dataset.train.batches(100, seed=1), step=step, extra=extra)
    found = json.loads(run(app, "inspect", run_path, "--json"))
    assert found["step"] == 6
    assert [(c["step"], c["metric"], c["value"], c["best"], c["last"]) for c in found["checkpoints"]] == [
        (3, "auc", 0.7, False, False), (6, "auc", 0.8, True, False), (9, "auc", 0.6, False, True),
    ]  # fmt: skip
    assert found["checkpoints"][1]["bytes"] == found["bytes"]
    text = run(app, "inspect", run_path)
    assert "auc 0.7000" in text
    assert "best, shown below" in text
    assert "Checkpoints" not in run(app, "inspect", run_path / "checkpoints" / "step_000000009")
    shard = next((run_path / "checkpoints" / "step_000000006" / "tables").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(StokerError, match=r"cut short or altered\. .*step_000000009"):
        run(app, "inspect", run_path, "--verify")


@pytest.mark.slow
def test_doctor(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 1e9)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.1)
    found = json.loads(run(app, "doctor", "--json"))
    assert found["ok"]
    assert found["system"]["cores"] >= 1
    assert found["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found["backends"]["cpu"]["name"] in ("cpu", "reference")
    assert found["bandwidth"]["copy"] > found["bandwidth"]["gather_64_byte_rows"] > 0
    assert found["trial"]["samples_per_second"] > 0
    assert 0 < found["trial"]["share_of_rows"] <= 1
    assert found["verdict"].endswith(f"so the limit is {found['trial']['bound']}")
    assert found["trial"]["bound"] in found["trial"]["placed_seconds"]
    for part in ("can train models with", "of rows in memory", "samples/s at batch 2,048", "% of a step"):
        assert part in found["verdict"]
    text = run(app, "doctor")
    shown = [line for line in text.splitlines() if "measuring" in line]
    assert any("measuring steps: 0 of 1 (0%)" in line for line in shown), shown
    text = "\n".join(line for line in text.splitlines() if line not in shown)
    assert max(map(len, text.splitlines())) <= 100
    assert "\na DLRM with 26 tables of dim 16 trains on " in text
    text = run(app, "doctor", "--no-measure")
    assert "\nthis machine can train models with" in text
    assert "samples/s" not in text
    assert "memory rates" not in text


def test_doctor_in_a_bare_environment(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0", "numpy": "2.0", "safetensors": "0.5"}
    monkeypatch.setattr(machine, "_version", versions.get)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    found = machine.examine(measure=False)
    assert found["ok"]
    assert any("pip install numba" in text for text in found["advice"])
    assert found["extras"]["schemas in YAML"] == "pip install 'stoker[yaml]'"
    assert any("apt install g++" in text for text in found["advice"])
    text = run(app, "doctor", "--no-measure")
    assert "could be better" in text
    assert "stoker[zstd]" in text


def test_doctor_when_training_cannot_run(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    import stoker.ops

    def broken(*_: object) -> None:
        raise RuntimeError("no kernels")

    monkeypatch.setattr(stoker.ops, "get_backend", broken)
    result = CliRunner().invoke(app, ["doctor", "--no-measure"])
    assert result.exit_code == 1
    assert "no kernels" in result.output
    assert "this machine cannot train yet" in result.output
