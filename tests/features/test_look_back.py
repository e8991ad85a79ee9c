"""Looking back over rows in pieces, and rows that a recipe derives in slices, against all of them at once."""

from __future__ import annotations

import datetime
import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from test_featured_datasets import hash_tree

from stoker import features as f
from stoker.base.errors import DataError
from stoker.prep.features import execute
from stoker.prep.features.execute import by_key
from stoker.prep.features.past import Past, compute_all
from stoker.prep.prepare import run_prepare
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.rows import featured
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule

DAY = datetime.date(2020, 1, 1)
LARGE = 2**53 + 1  # no float64


def log(count: int) -> pl.DataFrame:
    draw = random.Random(count)

    def some(*values: Any) -> list[Any]:
        return [draw.choice(values) for _ in range(count)]

    return pl.DataFrame(
        {
            "user": pl.Series(some("a", "b", "Zoë", "", None), dtype=pl.String),
            "item": pl.Series(some(1, 2, -3, LARGE, None), dtype=pl.Int64),
            "code": pl.Series(some(0, 7, 2**64 - 1, None), dtype=pl.UInt64),
            "bool": pl.Series(some(True, False, None), dtype=pl.Boolean),
            "real": pl.Series(some(0.0, -0.0, float("nan"), 1.5, None), dtype=pl.Float64),
            "small": pl.Series(some(1.5, None), dtype=pl.Float32),
            "day": pl.Series([DAY + datetime.timedelta(draw.randrange(9)) for _ in range(count)]),
            "moment": pl.Series(some(*range(9), None), dtype=pl.Int64).cast(pl.Datetime("ms", "UTC")),
            "when": pl.Series(some(*range(20), -(2**40), None), dtype=pl.Int64),
            "event": pl.Series(some(0, 1, None), dtype=pl.Int8),
            "list": pl.Series(some(["x"], ["y", "z"], [], None), dtype=pl.List(pl.String)),
        }
    )


FEATURES: tuple[Past, ...] = (
    f.Previous(name="1", column="user", by="item", order="when"),
    f.Previous(name="2", column="user", by=("user", "item"), order="when", events="event"),
    f.Previous(name="3", column="item", by="user", order="moment"),
    f.Previous(name="4", column="bool", by=("item", "bool"), order="day"),
    f.Previous(name="5", column="day", by=("real", "user"), order="when"),
    f.Previous(name="6", column="moment", by="small", order="real"),
    f.Previous(name="7", column="code", by="moment", order="code"),
    f.Difference(name="8", column="when", by="code", order="when"),
    f.SinceLast(name="9", by="user", order="when"),
    f.PastCount(name="10", by="item", order="when", window=3.0),
    f.PastCount(name="11", by=("code", "user", "item"), order="moment"),
    f.Rank(name="12", by="day", order="small", descending=True),
    f.Previous(name="13", column="small", by="user", order="item", events="small"),
    f.History(name="14", column="user", by="item", order="when", length=3),
    f.History(name="15", column="small", by=("user", "bool"), order="moment", events="event", length=2),
    f.History(name="16", column="code", by="user", order="real", length=100),
    f.History(name="17", column="moment", by="code", order="item", events="item"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "rows_of_a_partition"), [(300, 1000), (300, 100), (100, 8)])
def test_partitions_give_what_all_rows_at_once_do(tmp_path: Path, count: int, rows_of_a_partition: int) -> None:
    rows = log(count)
    sizes = [1, count - 180, 4, 175] if count > 180 else [1, count - 60, 4, 55]
    starts = np.cumsum([0, *sizes])

    def read(block: int) -> pl.DataFrame:
        return rows[int(starts[block]) : int(starts[block + 1])]

    for feature in FEATURES:
        expected = compute_all(rows, [feature])

        def work(frame: pl.DataFrame, partition: int, partitions: int, feature: Past = feature) -> pl.DataFrame:
            assert 0 <= partition < partitions == -(-count // rows_of_a_partition)
            return compute_all(frame, [feature])

        made = list(by_key(read, sizes, feature.by, work, tmp_path, 2, rows_of_a_partition))
        assert [part.height for part in made] == sizes
        assert pl.concat(made).equals(expected, null_equal=True)
        assert made[0].schema == expected.schema
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
@settings(max_examples=scaled(60), deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 60), st.integers(1, 9))
def test_rows_come_back_in_order(sizes: list[int], rows: int, keys: int) -> None:
    frames = [pl.DataFrame({"n": range(100 * b, 100 * b + size)}).with_columns(k=pl.col("n") * 7 % keys)
              for b, size in enumerate(sizes)]  # fmt: skip

    def work(frame: pl.DataFrame, partition: int, count: int) -> pl.DataFrame:
        assert frame["n"].is_sorted()
        seen.append(set(frame["k"]))
        return frame.select("n", twice=pl.col("n") * 2)

    seen: list[set[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        made = list(by_key(frames.__getitem__, sizes, ["k"], work, Path(folder), 2, rows))
    assert [part["n"].to_list() for part in made] == [frame["n"].to_list() for frame in frames]
    assert all(part["twice"].to_list() == [2 * n for n in part["n"]] for part in made)
    assert sum(map(len, seen)) == len(set().union(*seen))  # a key is in one partition


def _twice(inputs: Mapping[str, pl.LazyFrame], schema: Schema) -> pl.LazyFrame:
    rows = inputs["log"].with_columns(tags=pl.concat_list("user", "item"), big=pl.col("item").cast(pl.Int64) + 2**40)
    return pl.concat([rows, rows]).with_row_index("n").with_columns(pl.col("n").cast(pl.Int64))


SCHEMA = Schema(
    name="twice",
    label=Label(column="y"),
    feature=(
        f.Previous(name="last", column="tags", by="user", order="n"),
        f.Previous(name="last_big", column="big", by=("user", "n"), order="n"),
        f.PastCount(name="seen", by="big", order="n"),
        f.CountEncoding(name="shown", by=("item", "seen")),
    ),
    dense=(DenseColumn(name="seen"), DenseColumn(name="shown"), DenseColumn(name="last_big")),
    categorical=(CategoricalColumn(name="item", type="string"),),
    sequence=(SequenceColumn(name="last", type="string", max_length=3),),
    split=SplitRule(rule="hash", train=0.8, valid=0.1, test=0.1),
)
RECIPE = Recipe(
    name="twice",
    description="",
    presets={"only": lambda: SCHEMA},
    preset="only",
    inputs={"log": RawInput(columns={"user": "string", "item": "string", "y": "int"})},
    derive=_twice,
)


class Stop(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_derived_rows_that_were_interrupted_go_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    draw = random.Random(3)
    lines = [f"{draw.choice('abc')},{draw.randrange(5)},{draw.randrange(2)}" for _ in range(60)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,y", *lines]) + "\n")
    run_prepare(RECIPE, tmp_path / "log.csv", out=tmp_path / "whole", threads=2)
    monkeypatch.setattr(featured, "_SLICE", 17)
    monkeypatch.setattr(execute, "PARTITION_ROWS", 16)
    run_prepare(RECIPE, tmp_path / "log.csv", out=tmp_path / "pieces", threads=2)
    assert hash_tree(tmp_path / "pieces") == hash_tree(tmp_path / "whole")
    made = 0

    def write(*given: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made > steps:
            raise Stop
        return written(*given, **options)

    written = featured.write_rows
    with monkeypatch.context() as patch:
        patch.setattr(featured, "write_rows", write)
        with pytest.raises(Stop):
            run_prepare(RECIPE, tmp_path / "log.csv", out=tmp_path / "cut", threads=1)
    report = run_prepare(RECIPE, tmp_path / "log.csv", out=tmp_path / "cut", threads=1)
    assert report.reused >= steps
    assert hash_tree(tmp_path / "cut") == hash_tree(tmp_path / "whole")


@pytest.mark.slow
def test_rows_of_two_derivations_never_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe whose rows come in another order each time, such as by a join that keeps none."""
    lines = [f"{number},{number % 5},{number % 2}" for number in range(60)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,y", *lines]) + "\n")
    turned = False

    def derive(inputs: Mapping[str, pl.LazyFrame], schema: Schema) -> pl.LazyFrame:
        rows = _twice(inputs, schema)
        return rows.reverse() if turned else rows

    def stop(path: Path, *given: Any) -> Any:
        if path.stem == "000003":
            raise Stop
        return written(path, *given)

    recipe = replace(RECIPE, derive=derive)
    written = featured.write_rows
    run_prepare(recipe, tmp_path / "log.csv", out=tmp_path / "whole", threads=1)
    monkeypatch.setattr(featured, "_SLICE", 17)
    with monkeypatch.context() as patch:
        patch.setattr(featured, "write_rows", stop)
        with pytest.raises(Stop):
            run_prepare(recipe, tmp_path / "log.csv", out=tmp_path / "cut", threads=1)
    turned = True  # a run that goes on has the rows of the first derivation
    run_prepare(recipe, tmp_path / "log.csv", out=tmp_path / "cut", threads=1)
    assert hash_tree(tmp_path / "cut") == hash_tree(tmp_path / "whole")


@pytest.mark.parametrize("said", ["underlying IO error: No space left on device (os error 28)",
                                  "parquet: File out of specification: Invalid thrift: transport error"])  # fmt: skip
@pytest.mark.parametrize("recipe", [RECIPE, replace(SCHEMA, feature=(f.CountEncoding(name="shown", by="item"),),
                                                    dense=(DenseColumn(name="shown"),), sequence=())])  # fmt: skip
def test_a_full_disk_is_told_of_whoever_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe | Schema, said: str
) -> None:
    (tmp_path / "log.csv").write_text("user,item,y\na,1,0\nb,2,1\n")

    def full(*given: Any, **options: Any) -> None:
        raise pl.exceptions.ComputeError(said)

    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    with pytest.raises(DataError, match="no room left on the disk of"):
        run_prepare(recipe, tmp_path / "log.csv", out=tmp_path / "made", threads=1)
