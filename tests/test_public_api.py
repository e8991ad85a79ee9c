"""The front door: names, import time, and what importing needs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker.base.picture import Grid
from stoker.tables.slots.slotted import make_residency
from stoker.testing import make_dataset
from stoker.training.files.checkpoint import Checkpoint


def test_public_names_are_sorted_and_exist():
    assert stoker.__all__ == sorted(set(stoker.__all__))
    for name in stoker.__all__:
        assert getattr(stoker, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = stoker.nonsense


def test_public_names_are_documented():
    for name in stoker.__all__:
        value = getattr(stoker, name)
        if callable(value):
            assert value.__doc__, f"stoker.{name} has no docstring"


def test_results_print_as_one_line_and_as_a_table_in_notebooks(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", rows=1500, num_embeddings=(300, 20, 10))
    small = {"embedding_dim": 4, "model_options": {"bottom": (8,), "top": (8,)}, "batch_size": 32, "threads": 1}
    run = {**small, "steps": 8, "eval_every": 4, "tensorboard": False, "display": "quiet"}
    a, b = (stoker.train(data, out=tmp_path / name, row_lr=lr, **run) for name, lr in (("a", 0.01), ("b", 0.02)))
    found = {
        "dlrm after 8 steps, valid AUC": a,
        "150 scores, mean": stoker.predict(a.model, data.test),
        "DLRM at step 8": stoker.load(tmp_path / "a" / "checkpoints" / "step_000000008"),
        "auc on validation rows: a": stoker.compare(a.run, b.run),
        "identical over 2 steps": stoker.verify(a.run, steps=2, begin="start"),
        "samples/s; training waited": stoker.trace(a.run, steps=2, begin="start"),
        "the settings": stoker.find_lr(data, lr_steps=20, trial_steps=2, **small),
        "average 0.5000": stoker.baseline(data),
        "belady is best": stoker.replay(data, slots=150, batch_size=32),
        "on the device": stoker.plan(a.model.tables, device_memory="1GiB", optimizer=stoker.Adagrad(lr=0.1)),
        "rows are hot": stoker.profile(data, device_memory="1KiB"),
    }
    for words, result in found.items():
        line = str(result)
        assert line == repr(result)
        assert words in line
        assert len(line) < 250 + len(str(tmp_path))
        assert "\n" not in line
        assert result.summary() in result.report()
        html = result._repr_html_()
        assert html.startswith("<p>")
        if not isinstance(result, Checkpoint):
            assert html.count("<tr>") > 1
            assert len(result.report().splitlines()) > 4
            heading = result.grids()[0].headings[-1]
            assert heading in result.report()


def test_values_print_as_one_line(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", rows=1500, num_embeddings=(300, 20, 10))
    stream = data.train.batches(128, seed=0)
    tables = stoker.EmbeddingTables(
        stoker.tables_for(data.schema, 4), optimizer=stoker.SGD(lr=0.1), placement=stoker.Cached(slots=200)
    )
    stage = stoker.stage(stream, tables, lookahead=2)
    residency = make_residency([0, 300], 10)
    plan = residency.plan_now(np.array([1, 5]))
    found = {
        "train 1,200": data,
        "FeatureSpec(4 dense columns, 3 features, 3 tables with 330 rows)": data.schema,
        "rows=1,200": data.train,
        "'train', 128 rows a batch, at batch 1 of 10 in epoch 0": stream,
        "dense [128, 4], ids [128, 3], labels [128]; cpu": next(iter(stream)),
        "1 in flight, at step 0": stage,
        "2 rows, 2 fetched, 0 written back": plan,
    }
    for words, value in found.items():
        assert words in repr(value)
        assert "\n" not in repr(value)
        assert len(repr(value)) < 150 + len(str(tmp_path))


def test_text_in_a_table_of_a_notebook_is_escaped() -> None:
    html = Grid(["<b>", "n"], [["a & b", "1"]], "x < y").html()
    assert "<caption>x &lt; y</caption>" in html
    assert '<th style="text-align: left">&lt;b&gt;</th>' in html
    assert '<td style="text-align: right">1</td>' in html
    assert "a &amp; b" in html


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_little():
    """What takes long to import is loaded where it is used: torch with the first name, the rest by few commands."""
    heavy = {"torch", "numpy", "numba", "polars", "pyarrow", "scipy", "rich", "typer", "tensorboard", "yaml"}
    code = f"""
        import sys
        import stoker
        print(sorted({heavy} & set(sys.modules)))
        print(len([name for name in sys.modules if name.startswith("stoker")]))
        from stoker import DLRM, Dataset, evaluate, save, train
        print(sorted({heavy} - {{"torch", "numpy"}} & set(sys.modules)))
        print("stoker.prep" in sys.modules, "stoker.rewrite" in sys.modules, "stoker.cli" in sys.modules)
    """
    heavy_at_first, modules, *rest = run(code).splitlines()
    assert heavy_at_first == "[]"
    assert int(modules) < 10
    assert rest == ["[]", "False False False"]


def test_a_command_looks_for_garbage_as_usual_once_all_is_imported():
    code = """
        import gc
        from stoker.cli import _collect_rarely

        usual = gc.get_threshold()
        _collect_rarely()
        import decimal, fractions, http.client, xml.dom.minidom
        rare = gc.get_threshold()
        kept = [[] for _ in range(160_000)]  # collects three times: the last import is before the second
        print(usual == gc.get_threshold() < rare, gc.callbacks)
        _collect_rarely()
        gc.set_threshold(0)  # as a module of the user may
        gc.collect(), gc.collect()
        print(gc.get_threshold()[0], gc.callbacks)
    """
    assert run(code).splitlines() == ["True []", "0 []"]
