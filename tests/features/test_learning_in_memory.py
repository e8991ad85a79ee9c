"""Learned features whose keys are in memory, and rows that are, against those that are read some at a time."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stoker.prep.features.fitted.keys import Coder, code_column
from test_featured_datasets import SCHEMA, hash_tree, write_log

import stoker
from stoker import features as f
from stoker.prep.prepare import run_prepare
from stoker.prep.rows import feature_passes
from stoker.prep.schema import DenseColumn, Schema, SplitRule
from stoker.prep.stages import task
from stoker.prep.stages.parts import Journal

MORE = (
    f.MeanTargetEncoding(name="both_mean", by=("user", "item"), folds=3),
    f.MeanTargetEncoding(name="three_mean", by=("user", "item", "at_hour"), folds=300, smoothing=0),
    f.CountEncoding(name="both", by=("user", "item")),
    f.Divide(name="share", left="both", right="both_mean"),  # of the row itself, between learned ones
    f.CountEncoding(name="tags_count", by=("tags",)),
    f.MeanTargetEncoding(name="of_counts", by=("both", "share"), folds=2),
)
ALL = replace(
    SCHEMA,
    feature=(*SCHEMA.feature, *MORE),
    dense=(*SCHEMA.dense, *(DenseColumn(name=feature.name) for feature in MORE)),
)
DROPPED = replace(ALL, split=SplitRule(rule="column", column="user", values={
    "u0": "valid", "u1": "test", "u2": "drop", "u3": "drop", **{f"u{n}": "train" for n in range(4, 9)},
}))  # fmt: skip
NONE_HELD_OUT = replace(ALL, split=SplitRule(rule="hash", train=1.0, valid=0.0, test=0.0))


def without_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(feature_passes, "available_memory", lambda: None)


@pytest.mark.parametrize("schema", [ALL, DROPPED, NONE_HELD_OUT], ids=["time", "dropped", "train"])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_bytes_with_keys_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: Schema, threads: int
) -> None:
    write_log(tmp_path / "log.csv", 200)
    used: list[int] = []
    learn = feature_passes.learn_in_memory

    def counted(features: Any, *given: Any) -> Any:
        used.append(len(features))
        return learn(features, *given)

    monkeypatch.setattr(feature_passes, "learn_in_memory", counted)
    run_prepare(schema, tmp_path / "log.csv", out=tmp_path / "held", threads=threads, block_bytes=2_000)
    assert sum(used) == 8
    without_memory(monkeypatch)
    run_prepare(schema, tmp_path / "log.csv", out=tmp_path / "streamed", threads=threads, block_bytes=2_000)
    assert sum(used) == 8
    assert hash_tree(tmp_path / "held") == hash_tree(tmp_path / "streamed")


class Stop(Exception):
    pass


@pytest.mark.parametrize("first", ["memory", "files"])
@pytest.mark.parametrize("damage", [False, True])
def test_a_run_goes_on_with_more_or_less_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, damage: bool
) -> None:
    """Above all, no training row is encoded with its own label by what was learned in memory, which keeps no folds."""
    write_log(tmp_path / "log.csv", 60)
    settings: dict[str, Any] = {"threads": 1, "block_bytes": 2_000}
    run_prepare(ALL, tmp_path / "log.csv", out=tmp_path / "whole", **settings)
    whole = hash_tree(tmp_path / "whole")
    added, add = 0, Journal.add
    for steps in range(5 - damage, 40, 5):
        with monkeypatch.context() as patch:
            added = 0

            def counted(journal: Journal, *given: Any, most: int = steps) -> Any:
                nonlocal added
                added += 1
                if added > most:
                    raise Stop
                return add(journal, *given)

            patch.setattr(Journal, "add", counted)
            if first == "files":
                without_memory(patch)
            try:
                run_prepare(ALL, tmp_path / "log.csv", out=tmp_path / "cut", **settings)
                break
            except Stop:
                pass
        if damage:
            for path in sorted((tmp_path / "cut" / ".work" / "passes").glob("*.arrow"))[-1:]:
                path.write_bytes(path.read_bytes()[:-1])
        with monkeypatch.context() as patch:
            if first == "memory":
                without_memory(patch)
            run_prepare(ALL, tmp_path / "log.csv", out=tmp_path / "cut", overwrite=True, **settings)
        assert hash_tree(tmp_path / "cut") == whole, steps
        stoker.Dataset(tmp_path / "cut").verify()
        shutil.rmtree(tmp_path / "cut")
    assert added > 20


@pytest.mark.parametrize("most", [0, 5_000, 2**30])
def test_rows_in_memory_are_those_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Some pieces in memory, others not; blocks follow each other in the same memory."""
    write_log(tmp_path / "log.csv", 300)
    names = [f"a user whose name is longer than a view holds, {number}" for number in range(9)]
    text = (tmp_path / "log.csv").read_text()
    for number, name in enumerate(names):
        text = text.replace(f",u{number},", f',"{name}",')
    (tmp_path / "log.csv").write_text(text)
    stoker.prepare(ALL, tmp_path / "log.csv", out=tmp_path / "files")
    monkeypatch.setattr(task, "_HOLD_MOST", most)
    monkeypatch.setattr("stoker.prep.prepare.BLOCK_BYTES", 2_000)
    data = stoker.prepare(ALL, tmp_path / "log.csv", threads=2)
    data.save(tmp_path / "memory")
    assert hash_tree(tmp_path / "memory") == hash_tree(tmp_path / "files")


@settings(max_examples=100)
@given(st.data())
def test_keys_of_the_rows_that_teach(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 30))
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    columns = {name: [draw.choice([None, "a", "b", "c", "d"]) for _ in range(rows)] for name in "xyz"}
    teaching = data.draw(st.integers(0, rows))
    wanted = data.draw(st.lists(st.sampled_from([("x",), ("x", "y"), ("x", "y", "z"), ("z", "y"), ("y", "x", "z")]),
                                min_size=1, unique=True))  # fmt: skip
    coder = Coder()
    frame = pl.DataFrame({code_column(n): coder.add(n, pl.Series(n, v, pl.String)) for n, v in columns.items()})
    numbered = coder.number(frame, wanted, add=True, threads=2, teaching=teaching)
    for names in wanted:
        keys = list(zip(*(columns[name] for name in names), strict=True))
        expected: dict[Any, int] = {}
        for key in keys[:teaching]:
            expected.setdefault(key, len(expected))
        table = coder.table(names)
        assert table is not None
        assert len(table) == len(expected)
        assert numbered.get_column(table.column).to_list() == [expected.get(key, -1) for key in keys]
        back = [coder.values(name, codes).to_list() for name, codes in zip(names, table.codes(), strict=True)]
        assert list(zip(*back, strict=True)) == list(expected)
        found = table.find([frame.get_column(code_column(name)).to_numpy() for name in names])
        assert found.tolist() == [expected.get(key, -1) for key in keys]
