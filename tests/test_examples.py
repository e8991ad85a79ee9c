"""Every example and the model in docs/adding_a_model.md run as they stand."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import polars as pl
import pytest
from processes import run_python

from stoker.models import MODELS
from stoker.testing import make_dataset

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHORTER = {"demo": ["--short"]}  # the same commands; two epochs take minutes
# Stand-ins for packages that are not installed here; their calls have the signatures of mlflow 3.17 and wandb 0.31.
FAKES = {
    "mlflow": """
import contextlib, types
@contextlib.contextmanager
def start_run(run_id=None, experiment_id=None, run_name=None):
    yield types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    print("finished")
def log_params(params, synchronous=None, run_id=None):
    print("params", params["batch_size"])
def log_metrics(metrics, step=None, synchronous=None, run_id=None, timestamp=None):
    print("figures", step, *metrics)
""",
    "wandb": """
class Run:
    id = "r1"
    def __enter__(self):
        return self
    def __exit__(self, kind, error, trace):
        print("finished")
    def define_metric(self, name, step_metric=None, step_sync=None):
        assert step_metric == "batches"
    def log(self, data, step=None, commit=None):
        print("figures", data["batches"], *data)
def init(entity=None, project=None, *, config=None, name=None):
    print("params", config["batch_size"])
    return Run()
""",
}


def demo_of_few_customers(script: Path, folder: Path) -> Path:
    """Copy the demo to a place with the customers of one number in 120."""
    log = Path("data", "online_retail", "invoices.parquet")
    for path in (Path("examples"), log.parent):
        (folder / path).mkdir(parents=True)
    rows = pl.read_parquet(ROOT / log)
    rows.filter(rows["CustomerID"].cast(pl.Float64) % 120 == 0).write_parquet(folder / log)
    return Path(shutil.copy(script, folder / "examples"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    assert len(example.read_text().splitlines()) < 80
    for name, source in FAKES.items():
        (tmp_path / f"{name}.py").write_text(source)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = [example, *SHORTER.get(example.stem, [])]
    if example.stem == "demo":
        command[0] = demo_of_few_customers(example, tmp_path)
        if hasattr(os, "fork"):
            command.insert(0, Path(__file__).with_name("forking.py"))
    done = run_python("-W", "error", *command, TMPDIR=str(tmp_path), STOKER_DATA=str(tmp_path), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    if example.stem.startswith("log_to_"):
        lines = done.stdout.splitlines()
        assert lines[0] == "params 256"
        assert sum(line.startswith("figures ") and "train/loss" in line for line in lines) == 7
        assert sum(line.startswith("figures 126 ") and "test/auc" in line for line in lines) == 1
        assert lines[-2] == "finished"


@pytest.mark.slow
def test_the_models_in_the_guide_train_and_load(tmp_path: Path) -> None:
    import stoker

    page = (ROOT / "docs" / "adding_a_model.md").read_text(encoding="utf-8")
    sources = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(sources) == 2
    for source in sources:
        exec(source, {"__name__": "guide"})
    try:
        data = make_dataset(tmp_path / "d", rows=4000)
        result = stoker.train(
            data, out=tmp_path / "run", model="wide", model_options={"scale": 0.5}, epochs=4, row_lr=0.2,
            batch_size=64, display="quiet", backend="reference", tensorboard=False,
        )  # fmt: skip
        assert result.test["auc"] > 0.8
        assert stoker.load(tmp_path / "run").model.config()["scale"] == 0.5
        log = tmp_path / "log.csv"
        stoker.synthetic.write("taobao", 20_000, log)
        touches = stoker.prepare("taobao", log, out=tmp_path / "touches")
        result = stoker.train(
            touches, out=tmp_path / "history", model="recency", row_optimizer="adagrad", row_lr=0.1, epochs=4,
            batch_size=64, display="quiet", tensorboard=False,
        )  # fmt: skip
        assert result.valid["auc"] > 0.6
        assert stoker.load(tmp_path / "history").model.history == {"item": "items", "category": "categories"}
    finally:
        del MODELS["wide"], MODELS["recency"]
