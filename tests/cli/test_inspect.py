"""stoker inspect and stoker doctor, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from stoker.cli import inspect as command
from stoker.cli import machine
from stoker.data.dataset import Dataset
from stoker.errors import DataError, StokerError
from stoker.testing import make_dataset


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    application = typer.Typer()
    command.register(application)
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
    counts = dataset.counts["C1"]
    assert table["rows"] == 500
    assert table["accesses"] == 800
    assert table["oov_share"] == pytest.approx(int(counts[0]) / 800)
    assert table["hot_1_percent"] == pytest.approx(int(counts[1:6].sum()) / 800)
    assert table["hot_10_percent"] == pytest.approx(int(counts[1:51].sum()) / 800)
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


def test_the_recipe_is_named_as_people_say_it(app: typer.Typer, tmp_path: Path) -> None:
    from stoker.data.prepare import run_prepare
    from stoker.data.synthetic import write

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
            "describes a 'soup'",
        ),
    ],
)
def test_anything_else(app: typer.Typer, tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "x")
    with pytest.raises(StokerError, match=message):
        run(app, "inspect", tmp_path / "x")


def test_checkpoint(app: typer.Typer, dataset: Dataset, tmp_path: Path) -> None:
    from stoker.models import DLRM
    from stoker.training.checkpoint import save

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


def test_doctor(app: typer.Typer) -> None:
    found = json.loads(run(app, "doctor", "--json"))
    assert found["ok"]
    assert found["system"]["cores"] >= 1
    assert found["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found["backends"]["cpu"]["name"] in ("cpu", "reference")
    assert found["bandwidth"]["copy"] > found["bandwidth"]["gather_64_byte_rows"] > 0
    text = run(app, "doctor", "--no-measure")
    assert "training can run here" in text
    assert "memory rates" not in text


def test_doctor_in_a_bare_environment(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0", "numpy": "2.0", "safetensors": "0.5"}
    monkeypatch.setattr(machine, "_version", versions.get)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    found = machine.examine(measure=False)
    assert found["ok"]
    assert any("pip install numba" in text for text in found["advice"])
    assert any("pip install pyyaml" in text for text in found["advice"])
    assert any("apt install g++" in text for text in found["advice"])
    assert "could be better" in run(app, "doctor", "--no-measure")


def test_doctor_when_training_cannot_run(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    import stoker.ops

    def broken(*_: object) -> None:
        raise RuntimeError("no kernels")

    monkeypatch.setattr(stoker.ops, "get_backend", broken)
    result = CliRunner().invoke(app, ["doctor", "--no-measure"])
    assert result.exit_code == 1
    assert "no kernels" in result.output
