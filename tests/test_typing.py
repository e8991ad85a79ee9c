"""Type checkers and editors see every public name, and the settings of runs and models."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

import stoker
import stoker.dataset.split
from stoker.base import settings
from stoker.models.base import ModelArguments, ModelSettings
from stoker.testing import make_dataset
from stoker.training.settings import MACHINE, PARTS, RESUMABLE

ROOT = Path(stoker.__file__).parent


def test_typed_names_are_the_lazy_ones() -> None:
    docstring, *imports = ast.parse((ROOT / "__init__.pyi").read_text()).body
    assert isinstance(docstring, ast.Expr)
    typed = {}
    for node in imports:
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        for alias in node.names:
            assert alias.asname == alias.name, "only names with an alias are exported"
            module = importlib.import_module(str(node.module))
            typed[alias.name] = getattr(module, alias.name, None) or importlib.import_module(
                f"{module.__name__}.{alias.name}"
            )
    assert set(stoker.__all__) == set(typed)
    for name, value in typed.items():
        assert getattr(stoker, name) is value


def test_settings_of_runs_are_the_fields_of_their_parts() -> None:
    names = [field.name for part in PARTS for field in dataclasses.fields(part)]
    assert names == [field.name for field in dataclasses.fields(stoker.TrainConfig)]
    assert len(names) == len(set(names)), "each is declared once"
    assert all(field.metadata["help"] for field in dataclasses.fields(stoker.TrainConfig))
    assert set(names) > RESUMABLE > MACHINE


def test_settings_of_models_are_the_arguments_of_the_base() -> None:
    assert typing.get_type_hints(ModelSettings) == typing.get_type_hints(ModelArguments)
    assert [*typing.get_type_hints(ModelArguments)] == [field.name for field in dataclasses.fields(ModelArguments)]
    model = stoker.DLRM(stoker.FeatureSpec.from_sizes(1, [3]), bottom=(4,), top=(4,), embedding_dim=4)
    with pytest.raises(TypeError, match="embeding_dim"):
        stoker.DLRM(model.spec, embeding_dim=4)  # type: ignore[call-arg]


def test_arguments_of_a_class_are_those_of_the_function(tmp_path: Path) -> None:
    assert doctest.testmod(settings).failed == 0
    shown = inspect.signature(stoker.train).parameters
    assert [*shown][:3] == ["dataset", "config", "model"]
    assert set(shown) > {field.name for field in dataclasses.fields(stoker.TrainConfig)}
    assert [*inspect.signature(stoker.dataset.split.Split.batches).parameters][:3] == ["self", "batch_size", "seed"]
    with pytest.raises(TypeError, match=r"find_lr takes no argument 'lr_step'. Did you mean 'lr_steps'?"):
        stoker.find_lr(tmp_path, lr_step=5)
    with pytest.raises(stoker.ConfigError, match=r"train takes no argument 'epoch'. Did you mean 'epochs'?"):
        stoker.train(tmp_path, out=tmp_path / "run", epoch=5)
    with pytest.raises(stoker.ConfigError, match=r"stage takes no argument 'look_ahead'. Did you mean 'lookahead'?"):
        stoker.stage([], torch.nn.Identity(), look_ahead=5)  # type: ignore[call-arg]


def test_names_that_settings_had_before_still_work(tmp_path: Path) -> None:
    before = {"foresight": True, "dense_dtype": "bfloat16"}
    config = stoker.TrainConfig.from_dict(before)
    assert (config.epoch_lookahead, config.matmul) == (True, "bf16")
    assert stoker.TrainConfig().replace(**before) == config
    with pytest.warns(FutureWarning, match="explain: 'foresight' is now called 'epoch_lookahead'"):
        stoker.explain(make_dataset(tmp_path / "data", rows=100), foresight=True)
    with pytest.warns(FutureWarning, match="replay: 'dim' is now called 'embedding_dim'"):
        found = stoker.replay([[0], [1]], device_memory=1024, dim=4, row_optimizer="sgd", strategies=["lru"])
    assert found.row_bytes == 16
    with pytest.raises(stoker.ConfigError, match="explain takes no argument 'foresight'"):
        stoker.explain(tmp_path, foresight=True, epoch_lookahead=True)


# A line that ends in "# wrong: CODE" must be reported with that code, every other line must not.
_PROGRAM = """
from pathlib import Path

import dataclasses
import stoker
from stoker import DLRM, train
from stoker import Trainer  # wrong: attr-defined

data = stoker.Dataset("data/criteo")
stoker.prepare("criteo", "day_*.tsv", out="data/criteo", threads=2)
stoker.prepare("criteo", "day_*.tsv", outt="data/criteo")  # wrong: call-arg
stoker.nonsense  # wrong: attr-defined
result = train(data, out="runs/a", epochs=2, batch_size="auto", home_path=Path("spill"), row_optimizer="adam")
print(result.run / "x", result.test["auc"])
result.tset  # wrong: attr-defined
train(data, out="runs/a", epoch=2)  # wrong: call-arg
train(data, out="runs/a", epochs="two")  # wrong: arg-type
train(data, out="runs/a", batch_size="large")  # wrong: arg-type
train(data, out="runs/a", row_optimizer="adma")  # wrong: arg-type
train(data, stoker.TrainConfig(lookahead=4), resume="runs/a", display="plain")
stoker.TrainConfig(look_ahead=4)  # wrong: call-arg
dataclasses.replace(stoker.TrainConfig(threads=2), thread=2)  # wrong: call-arg
stoker.find_lr(data, lr_steps=50, dense_lr=0.1)
stoker.find_lr(data, stoker.TrainConfig(dense_lr="high"), which="rows")  # wrong: arg-type
stoker.verify("runs/a", steps=3, device_memory="1GiB")
stoker.verify("runs/a", steps="all")  # wrong: arg-type
stoker.trace("runs/a", in_flight=3)
stoker.trace("runs/a", inflight=3)  # wrong: call-arg
model = DLRM(data.schema, embedding_dim=16, bottom=(64, 16), optimizer=stoker.RowWiseAdagrad(lr=0.02))
DLRM(data.schema, embeding_dim=16)  # wrong: call-arg
stoker.DIN(data.schema, history={"item": "items"}, activation="dice", seed=1)
stoker.DIN(data.schema, activation="dics")  # wrong: arg-type
stoker.TBSM(data.schema, pooling="min")  # wrong: arg-type
stoker.SGD(learning_rate=0.1)  # wrong: call-arg
stoker.EmbeddingTables(model.tables, optimizer=stoker.SGD(lr=0.1), sede=1)  # wrong: call-arg
stoker.TTEmbeddingBag(100, 8, rank="x")  # wrong: arg-type
stoker.plan(model.tables, device_memory="4GiB", strateggy="auto")  # wrong: call-arg
stoker.replay(data, windows=3)  # wrong: call-arg
stoker.save("a", model, overwrit=True)  # wrong: call-arg
stoker.synthetic.write("criteo", "10k", "a.tsv", sead=1)  # wrong: call-arg
for staged in stoker.stage(data.train.batches(8192, seed=0), model.embeddings, lookahead=64):
    model.loss(staged).backward()
data.train.batches(8192, sed=0)  # wrong: call-arg
stoker.stage(data.train.batches(8192), model.embeddings, look_ahead=64)  # wrong: call-arg
for batch in data.train.batches(8192):
    batch.label  # wrong: attr-defined
placement = stoker.plan(model.tables, data.counts, optimizer=stoker.SGD(lr=0.1), device_memory="4GiB")
placement["C3"] = stoker.TensorTrain(rank=32)
stoker.TensorTrain(rank="32")  # wrong: arg-type
stoker.recipes.criteo(preset="nvt")
stoker.recipes.criterion()  # wrong: attr-defined
stoker.evaluate(model, data.valid, k=5)["auc"] + 1.0
stoker.evaluate(data.valid, model)  # wrong: arg-type
stoker.load("runs/a").model.predict(batch)
stoker.load("runs/a").modle  # wrong: attr-defined
"""

# What other packages know is not asked here: reading torch takes mypy a quarter of a minute.
_CONFIGURATION = """
[mypy]
follow_imports = silent
disable_error_code = import-untyped,import-not-found
[mypy-torch.*,numpy.*,polars.*,pyarrow.*,numba.*,llvmlite.*,rich.*,typer.*,safetensors.*,tensorboard.*,matplotlib.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_mypy_reports_misspellings(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("needs mypy. Run: pip install mypy")
    (tmp_path / "program.py").write_text(_PROGRAM)
    (tmp_path / "mypy.ini").write_text(_CONFIGURATION)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", os.devnull, "program.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert not done.stderr
    reported: dict[int, set[str]] = {}
    for line in done.stdout.splitlines():
        place, _, text = line.partition(": error: ")
        if text:
            name, number = place.split(":")[:2]
            assert name == "program.py", line
            reported.setdefault(int(number), set()).add(text.rpartition("[")[2].rstrip("]"))
    lines = dict(enumerate(_PROGRAM.splitlines(), 1))
    wrong = {line: {line.partition("# wrong: ")[2]} for line in lines.values() if "# wrong: " in line}
    assert {lines[number]: codes for number, codes in reported.items()} == wrong
