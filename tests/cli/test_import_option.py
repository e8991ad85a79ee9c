"""``--import package.module:Class``: models of one's own at the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calling import output
from torch import nn

import stoker
from stoker.base.errors import ConfigError
from stoker.models import DLRM, MODELS, import_model
from stoker.models.registry import class_path
from stoker.testing import make_dataset

SMALL = ["--dim", 4, "--batch-size", 64, "--backend", "reference", "--no-tensorboard"]
MODULE = '''
import torch
import stoker
from stoker.models.layers import dense_generator, linear

class Wide(stoker.RecModel):
    """One linear layer."""

    name = "own-wide"

    def __init__(self, spec, **settings):
        super().__init__(spec, **settings)
        width = len(spec.dense) + len(spec.features) * self.embedding_dim
        self.last = linear(width, 1, dense_generator(self.seed, "wide"))
        self.to(self.device)

    def dense_part(self, dense, embedded):
        return self.last(torch.cat([dense, embedded.flatten(1)], dim=1)).squeeze(1)

class Same(stoker.DLRM):
    pass

class Nameless(stoker.RecModel):
    def dense_part(self, dense, embedded):
        return dense

class Unfinished(stoker.RecModel):
    name = "unfinished"

class Plain(torch.nn.Module):
    pass

def build():
    pass
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a package of models, where commands are called."""
    folder = tmp_path / "own_models_of_tests"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "wide.py").write_text(MODULE)
    (folder / "broken.py").write_text("import nowhere_to_be_found\n")
    (folder / "raising.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    models = dict(MODELS)
    yield tmp_path
    forget(models)


def forget(models: dict[str, Any]) -> None:
    """As in a new process."""
    for name in [name for name in sys.modules if name.startswith("own_models_of_tests")]:
        del sys.modules[name]
    MODELS.clear()
    MODELS.update(models)


@pytest.mark.slow
def test_a_model_of_ones_own_from_training_to_scores(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_dataset(here / "data", rows=600)
    path, models = "own_models_of_tests.wide:Wide", dict(MODELS)
    code, _, err = output(capsys, "train", "data", "--import", path, "--out", "run", *SMALL)
    assert code == 0, err
    assert json.loads((here / "run" / "config.json").read_text())["model_class"] == path
    checkpoint = next((here / "run" / "checkpoints").iterdir())

    commands: dict[str, list[Any]] = {
        "evaluate": ["run"], "predict": ["run", "--out", "scores.csv"], "verify": ["run", "--steps", 3],
        "trace": ["run", "--steps", 3], "train": ["--resume", "run", "--epochs", 2],
    }  # fmt: skip
    for command, arguments in commands.items():
        forget(models)
        code, _, err = output(capsys, command, *arguments)
        assert code == 2
        assert f"'own-wide', unknown here. This run was trained with {path}: give --import {path}" in " ".join(
            err.split()
        )
        code, _, err = output(capsys, command, *arguments, "--import", path)
        assert code == 0, err
    forget(models)
    with pytest.raises(ValueError, match=rf"unknown here.*import_model\('{path}'\)"):
        stoker.load(checkpoint)
    with pytest.raises(ValueError, match=rf"unknown here.*import_model\('{path}'\)"):
        stoker.verify(here / "run", steps=3)
    assert import_model(path) is import_model(path)
    assert type(stoker.load(checkpoint).model).__name__ == "Wide"
    code, _, err = output(capsys, "inspect", "run")
    assert code == 0, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("own_models_of_tests.wide", "'own_models_of_tests.wide' does not name a class. Write package.module:Class"),
        ("nowhere.wide:Wide", "there is no module 'nowhere', neither in the current directory"),
        ("own_models_of_tests.deep:Wide", "there is no module 'own_models_of_tests.deep'"),
        ("own_models_of_tests.broken:Wide", "cannot be imported: it needs nowhere_to_be_found, which is not installed"),
        ("own_models_of_tests.raising:Wide", "cannot be imported: ZeroDivisionError: division by zero"),
        ("own_models_of_tests.wide:Wild", "has no 'Wild'. Its models: Wide, Same, Nameless, Unfinished."),
        ("own_models_of_tests.wide:Plain", "is a class Plain, not a subclass of stoker.RecModel"),
        ("own_models_of_tests.wide:build", "is a function, not a subclass of stoker.RecModel"),
        ("own_models_of_tests.wide:Unfinished", "does not define dense_part"),
        ("own_models_of_tests.wide:Nameless", "has no name. Give the class one: name = 'nameless'"),
        ("own_models_of_tests.wide:Same", "has the name 'dlrm', which is that of stoker.models.dlrm:DLRM"),
    ],
)
def test_what_cannot_be_imported_is_said_by_name(
    here: Path, capsys: pytest.CaptureFixture[str], path: str, words: str
) -> None:
    before = dict(MODELS)
    with pytest.raises(ConfigError) as caught:
        import_model(path)
    assert words in str(caught.value)
    assert before == MODELS
    code, _, err = output(capsys, "evaluate", "run", "--import", path)
    assert code == 2
    assert " ".join(words.split()) in " ".join(err.split())


def test_a_checkpoint_of_a_module_says_how_to_load_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = stoker.TableConfig(name="a", num_embeddings=9, embedding_dim=2)
    tables = stoker.EmbeddingTables([table], optimizer=stoker.Adagrad(lr=0.1))
    net = nn.ModuleDict({"tables": tables, "head": nn.Linear(2, 1)})
    sgd = torch.optim.SGD(net["head"].parameters(), lr=0.1)
    stoker.save("own", net, {"main": sgd}, extra_state={"epoch": 3})
    for command, more in (("evaluate", []), ("predict", ["--out", "scores.csv"])):
        code, _, err = output(capsys, command, "own", *more)
        assert code == 2
        assert "own holds a ModuleDict, a module that only your own code can build." in " ".join(err.split())
    code, out, err = output(capsys, "inspect", "own")
    assert code == 0, err
    for words in ("class=ModuleDict", "tables adagrad, main SGD", "epoch", "tables.a"):
        assert words in out
    assert json.loads(output(capsys, "inspect", "own", "--json")[1])["optimizers"] == {"main": "SGD"}


def test_paths_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Local:
        pass

    assert class_path(DLRM) == "stoker.models.dlrm:DLRM"
    assert class_path(Local) is None
    monkeypatch.chdir(tmp_path)
    script = type("A", (), {"__module__": "__main__", "__qualname__": "A"})
    for main, path in (
        ({"__spec__": None, "__file__": str(tmp_path / "scripts" / "fit.py")}, "scripts.fit:A"),
        ({"__spec__": None, "__file__": "/elsewhere/fit.py"}, "fit:A"),
        ({"__spec__": SimpleNamespace(name="package.fit")}, "package.fit:A"),
        ({"__spec__": SimpleNamespace(name="package.__main__")}, "package.__main__:A"),
        ({}, None),  # a notebook
    ):
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**main))
        assert class_path(script) == path
