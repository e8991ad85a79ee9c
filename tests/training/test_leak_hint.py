"""A hint where metrics are too good to be true."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import stoker
from stoker.base.errors import ConfigError
from stoker.training.notes import leak_hint


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "categorical"])
def test_the_column_that_reveals_the_label_is_named(tmp_path: Path, kind: str) -> None:
    draw = np.random.default_rng(0)
    label = draw.integers(2, size=2000)
    paid = label * 5 + draw.integers(4, size=2000)
    log = pl.DataFrame({"clicked": label, "item": draw.integers(50, size=2000), "paid": paid})
    schema = stoker.Schema.from_dict(
        {"label": "clicked", "categorical": [{"name": "item", "type": "int"}], kind: [{"name": "paid"}]}
        if kind == "dense"
        else {"label": "clicked", "categorical": [{"name": name, "type": "int"} for name in ("item", "paid")]}
    )
    data = stoker.prepare(schema, log)
    stoker.train(data, out=tmp_path / "run", epochs=6, display="quiet", row_lr=0.2)
    said = leak_hint(data, {"auc": 0.995}, "test")
    assert "test AUC of 0.9950 is too good" in said
    assert "column 'paid' alone has 1.0000" in said
    assert not leak_hint(data, {"auc": 0.98, "recall_10": 0.5, "catalogue": 1e6}, "test")
    assert "belong to the item" in leak_hint(data, {"auc": None, "recall_10": 1.0, "catalogue": 1000.0}, "test")
    without = stoker.prepare(
        stoker.Schema.from_dict({"label": "clicked", "categorical": [{"name": "item", "type": "int"}]}), log
    )
    assert "No column alone" in leak_hint(without, {"auc": 1.0}, "test")


def test_a_number_that_only_rows_of_one_label_have_is_named(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    label = draw.integers(2, size=2000)
    log = pl.DataFrame({"skipped": label, "item": draw.integers(50, size=2000), "skip_ms": draw.random(2000)})
    log = log.with_columns(pl.when(pl.col("skipped") == 1).then("skip_ms"), more=pl.lit(1.0) / (1 + pl.col("item")))
    dense = {"name": "skip_ms", "fill": "median", "transforms": ["zscore"]}  # missing is in the middle
    schema = {"label": "skipped", "categorical": [{"name": "item", "type": "int"}], "dense": [{"name": "more"}, dense]}
    data = stoker.prepare(stoker.Schema.from_dict(schema), log, out=tmp_path / "d")
    assert "column 'skip_ms' alone has 1.0000" in leak_hint(data, {"auc": 0.995}, "test")


@pytest.mark.slow
def test_a_run_shows_the_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    label = np.random.default_rng(0).integers(2, size=2000)
    log = pl.DataFrame({"clicked": label, "paid": label * 5.0 - 2, "item": label * 0})
    schema = {"label": "clicked", "dense": [{"name": "paid"}]}
    with pytest.raises(ConfigError, match="has dense columns only"):
        stoker.train(stoker.prepare(stoker.Schema.from_dict(schema), log), out=tmp_path / "none", display="quiet")
    data = stoker.prepare(stoker.Schema.from_dict({**schema, "categorical": [{"name": "item", "type": "int"}]}), log)
    stoker.train(data, out=tmp_path / "run", epochs=6, display="plain")
    assert "column 'paid' alone has 1.0000" in "".join(capsys.readouterr()).replace("\n", " ")
