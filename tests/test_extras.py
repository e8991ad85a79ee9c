"""What the base install lacks: a line says what to install where it is missed, and nothing else is lost."""

from __future__ import annotations

import doctest
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.base.errors import EXTRAS, DependencyError
from stoker.base.files import seal
from stoker.cli import main
from stoker.testing import make_dataset
from stoker.training.files import logs

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SMALL: dict[str, Any] = {"embedding_dim": 4, "model_options": {"bottom": (8,), "top": (8,)}, "batch_size": 64}
PLAIN = {"display": "plain", "backend": "reference", "threads": 1}


@pytest.fixture(autouse=True)
def base_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what only extras install."""
    for module in list(sys.modules):
        if module.split(".")[0] in EXTRAS or module.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, module)
    for module in EXTRAS:
        monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture
def data(tmp_path: Path) -> stoker.Dataset:
    make_dataset(tmp_path / "data", rows=300, num_dense=2, num_embeddings=[20, 10], seed=0)
    return stoker.Dataset(tmp_path / "data")


class Recorder:
    """Keeps what a logger gets."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert not self.closed
        self.seen.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


def test_extras_are_those_of_the_project() -> None:
    names = {"confluent_kafka": "confluent-kafka", "yaml": "pyyaml"}
    for module, extra in EXTRAS.items():
        listed = [re.split("[<>=]", each)[0] for each in PROJECT["optional-dependencies"][extra]]
        assert names.get(module, module) in listed
        assert not any(each.startswith((module, names.get(module, module))) for each in PROJECT["dependencies"])
    assert PROJECT["optional-dependencies"]["all"] == [f"stoker[{','.join(sorted({*EXTRAS.values()}))}]"]


def test_a_run_without_tensorboard_writes_its_metrics_and_says_once_what_to_install(
    data: stoker.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stoker.train(data, out=tmp_path / "run", steps=5, **SMALL, **PLAIN)
    err = capsys.readouterr().err
    assert err.count("pip install 'stoker[tensorboard]'") == 1
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size
    assert not (tmp_path / "run" / "tensorboard").exists()
    # Whoever has a logger, or wants no events, need not know.
    stoker.train(data, out=tmp_path / "own", steps=5, loggers=[Recorder()], **SMALL, **PLAIN)
    stoker.train(data, out=tmp_path / "none", steps=5, tensorboard=False, **SMALL, **PLAIN)
    assert "tensorboard" not in capsys.readouterr().err


def test_who_asks_for_tensorboard_is_told_before_anything_is_written(
    data: stoker.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", str(data.path), "--out", str(tmp_path / "run"), "--tensorboard"])
    assert caught.value.code
    err = capsys.readouterr().err
    assert "pip install 'stoker[tensorboard]'" in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()
    with pytest.raises(DependencyError, match=r"stoker\[tensorboard\]"):
        stoker.train(data, stoker.TrainConfig(tensorboard=True), out=tmp_path / "run")
    # A run that was started where it is installed goes on where it is not.
    stoker.train(data, out=tmp_path / "run", steps=2, **SMALL, **PLAIN)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["settings"]["tensorboard"] = True
    (tmp_path / "run" / "config.json").write_text(json.dumps(seal(config)))
    assert stoker.train(resume=tmp_path / "run", steps=4, display="quiet").step == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["prepare", "schema.yaml", "log.csv", "--out", "out"], "yaml"),
        (["prepare", "schema.toml", "log.csv.zst", "--out", "out"], "zstd"),
        (["init", "log.csv.zst", "--out", "new.toml"], "zstd"),
        (["prepare", "criteo", "s3://bucket/day_0.tsv", "--out", "out"], "remote"),
        (["synthetic", "criteo", "--rows", "100", "--out", "log.tsv.zst"], "zstd"),
    ],
)
def test_a_command_names_what_to_install(
    command: list[str], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = '[label]\ncolumn = "label"\n[[categorical]]\nname = "item"\n[split]\ntrain = 1.0\nvalid = 0.0\ntest = 0.0\n'
    Path("schema.toml").write_text(text)
    Path("schema.yaml").write_text("label: {column: label}\ncategorical: [{name: item}]\n")
    Path("log.csv").write_text("label,item\n1,a\n0,b\n")
    Path("log.csv.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert f"pip install 'stoker[{extra}]'" in " ".join((out + err).split())
    assert "Traceback" not in out + err
    assert len(err.strip().splitlines()) <= 3
    assert "not well-formed" not in err
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not (tmp_path / "log.tsv.zst").exists()


def test_the_base_install_prepares_trains_and_evaluates(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("label,item\n" + "".join(f"{n % 2},{'abc'[n % 3]}\n" for n in range(300)))
    schema = stoker.Schema.from_dict({"label": {"column": "label"}, "categorical": [{"name": "item"}]})
    data = stoker.prepare(schema, tmp_path / "log.csv", out=tmp_path / "data")
    result = stoker.train(data, out=tmp_path / "run", steps=3, **{**SMALL, **PLAIN, "display": "quiet"})
    assert stoker.evaluate(result.model, data.test)["auc"] is not None


def test_a_logger_gets_the_figures_of_every_record_and_is_closed(data: stoker.Dataset, tmp_path: Path) -> None:
    mine = Recorder()
    stoker.train(
        data, out=tmp_path / "run", steps=6, log_every=2, loggers=[mine], **{**SMALL, **PLAIN, "display": "quiet"}
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in mine.seen] == [line["step"] for line in lines]
    for (_, values), line in zip(mine.seen, lines, strict=True):
        numbers = {f"{line['kind']}/{name}": each for name, each in line.items() if isinstance(each, int | float)}
        del numbers[f"{line['kind']}/step"]
        assert values == numbers
    assert {name.split("/")[0] for _, values in mine.seen for name in values} == {"train", "valid", "test"}
    assert mine.closed == 1


def test_the_example_of_a_logger_runs() -> None:
    found = doctest.testmod(logs)
    assert (found.failed, found.attempted) == (0, 4)


def test_a_logger_that_fails_ends_the_run_and_all_are_closed(data: stoker.Dataset, tmp_path: Path) -> None:
    class Broken(Recorder):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError("no network")

    broken, other = Broken(), Recorder()
    with pytest.raises(OSError, match="no network"):
        stoker.train(data, out=tmp_path / "run", loggers=[broken, other], **{**SMALL, **PLAIN, "display": "quiet"})
    assert (broken.closed, other.closed) == (1, 1)


@pytest.mark.parametrize("name", ["prepare", "draft_schema", "Scorer", "export", "update"])
def test_a_name_that_needs_polars_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_polars(module: str) -> Any:
        raise ModuleNotFoundError("No module named 'polars'", name="polars")

    monkeypatch.delitem(vars(stoker), name, raising=False)
    monkeypatch.setattr("stoker.base.errors.importlib.import_module", without_polars)
    with pytest.raises(DependencyError, match=rf"stoker\.{name} needs polars, .*pip install polars"):
        getattr(stoker, name)


def test_a_command_that_finds_a_package_missing_late_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_polars(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'polars'", name="polars")

    monkeypatch.setattr("typer.Typer.__call__", without_polars)
    with pytest.raises(SystemExit) as caught:
        main(["init", "log.csv"])
    assert caught.value.code == 2
    assert "this command needs polars, which is not installed. Run: pip install polars" in capsys.readouterr().err
