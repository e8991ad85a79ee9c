"""Columns named by patterns: expanded from the first file, before anything is read."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import stoker
from stoker.base.errors import DataError, SchemaError
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SplitRule, Timestamp
from stoker.prep.source_format import SourceFormat

SCHEMA = Schema(
    label=Label(column="x_label"),
    timestamp=Timestamp(column="x_time"),
    dense=(DenseColumn(name="x_?", transforms=("zscore",), null_flag=True), DenseColumn(name="x_b", fill=7.0)),
    categorical=(CategoricalColumn(name="c_*", min_count=2), CategoricalColumn(name="own", source="c_3")),
    split=SplitRule(rule="hash", column="c_split"),
)


def log(rows: int = 300) -> pl.DataFrame:
    values = {name: [n * place % 13 for n in range(rows)] for place, name in enumerate(["x_c", "x_a", "x_b", "X_d"], 1)}
    texts = {name: [f"{n * place % 5}" for n in range(rows)] for place, name in enumerate(["c_2", "c_1", "c_3"], 1)}
    users = [n % 30 for n in range(rows)]
    return pl.DataFrame(
        {**values, **texts, "x_label": [n % 2 for n in range(rows)], "x_time": range(rows), "c_split": users, "x_ab": 1}
    )


def write(frame: pl.DataFrame, folder: Path, kind: str) -> Path:
    path = folder / f"log.{kind}"
    if kind == "parquet":
        frame.write_parquet(path)
    elif kind == "jsonl":
        frame.write_ndjson(path)
    else:
        path.write_bytes(gzip.compress(frame.write_csv().encode()))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv.gz", "parquet", "jsonl"])
def test_a_pattern_stands_for_columns_in_the_order_of_the_file(tmp_path: Path, kind: str) -> None:
    path = write(log(), tmp_path, kind)
    data = stoker.prepare(SCHEMA, path, out=tmp_path / "d")
    assert data.schema.dense == ("x_c", "x_c_is_null", "x_a", "x_a_is_null", "x_b")
    assert [feature.name for feature in data.schema.features] == ["c_2", "c_1", "own"]
    stored = Schema.from_dict(data.manifest["schema"])
    assert stored.dense[:2] == tuple(replace(SCHEMA.dense[0], name=name) for name in ("x_c", "x_a"))
    assert stored.categorical[0].min_count == 2
    by_hand = replace(SCHEMA, dense=stored.dense, categorical=stored.categorical)
    again = stoker.prepare(by_hand, path, out=tmp_path / "e")
    assert (again.path / "manifest.json").read_bytes() == (data.path / "manifest.json").read_bytes()
    like = stoker.prepare(files=path, like=data.path, out=tmp_path / "like")
    assert like.schema.dense == data.schema.dense


def test_tables_in_memory_and_hundreds_of_columns() -> None:
    made = {f"affinity_{n}": [n * k % 7 for k in range(50)] for n in range(300)}
    frame = pl.DataFrame({**made, "y": [k % 2 for k in range(50)]})
    schema = Schema(label=Label(column="y"), dense=(DenseColumn(name="affinity_*"),))
    assert stoker.prepare(schema, frame).schema.dense == tuple(made)


def test_every_file_must_have_the_columns(tmp_path: Path) -> None:
    log().write_csv(tmp_path / "a.csv")
    log().drop("x_a").write_csv(tmp_path / "b.csv")
    with pytest.raises(DataError, match=r"b\.csv has no column 'x_a'"):
        stoker.prepare(SCHEMA, [tmp_path / "a.csv", tmp_path / "b.csv"], out=tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            (DenseColumn(name="afinity_*"),),
            r"'afinity_\*': name matches no column of .*log.csv besides .* has: x_c, x_a",
        ),
        ((DenseColumn(name="x_label?"),), r"'x_label\?': name matches no column"),
        ((DenseColumn(name="X*"), DenseColumn(name="*_d")), r"'\*_d': name matches 'X_d', as 'X\*' does"),
        ((DenseColumn(name="x_[ac]*"),), r"matches no column"),
    ],
)
def test_what_a_pattern_cannot_stand_for(tmp_path: Path, columns: tuple[DenseColumn, ...], said: str) -> None:
    log().write_csv(tmp_path / "log.csv")
    with pytest.raises(SchemaError, match=said) as caught:
        stoker.prepare(Schema(label=Label(column="x_label"), dense=columns), tmp_path / "log.csv", out=tmp_path / "d")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "d").exists()


def test_a_column_of_that_very_name_is_no_pattern(tmp_path: Path) -> None:
    log().rename({"x_a": "new?"}).with_columns(newt=1).write_csv(tmp_path / "log.csv")
    schema = Schema(label=Label(column="x_label"), dense=(DenseColumn(name="new?"),))
    assert stoker.prepare(schema, tmp_path / "log.csv", out=tmp_path / "d").schema.dense == ("new?",)
    named = Schema(label=Label(column="x_label"), dense=(DenseColumn(name="odd*", source="x_b"),))
    assert stoker.prepare(named, tmp_path / "log.csv", out=tmp_path / "e").schema.dense == ("odd*",)


def test_files_without_a_header_and_derived_rows_have_no_patterns(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"column 'x\*': name is a pattern, which needs files with a header"):
        Schema(label=Label(column="y"), dense=(DenseColumn(name="x*"),), source=SourceFormat(columns=("y", "x1")))
    Schema(label=Label(column="y"), dense=(DenseColumn(name="x?"),), source=SourceFormat(columns=("y", "x?")))
    schema = Schema(label=Label(column="x_label"), dense=(DenseColumn(name="x_?"),))
    recipe = Recipe(
        name="same", description="as they are", presets={"a": lambda: schema}, derive=lambda frames, _: frames["log"],
        inputs={"log": RawInput(columns={"x_a": "float", "x_label": "float"})},
    )  # fmt: skip
    log().write_csv(tmp_path / "log.csv")
    with pytest.raises(SchemaError, match="the columns of the rows that recipe same derives are not known before"):
        stoker.prepare(recipe, tmp_path / "log.csv", out=tmp_path / "d")


def test_patterns_of_sequences_and_beside_features(tmp_path: Path) -> None:
    frame = log().with_columns(s_1=pl.lit("1|2"), s_2=pl.lit("3"))
    frame.write_csv(tmp_path / "log.csv")
    schema = Schema.from_dict(
        {
            "label": "x_label",
            "dense": [{"name": "x_?"}, {"name": "n_*"}],
            "sequence": [{"name": "s_*", "table": "items"}],
            "feature": [{"kind": "count", "by": ["c_1"], "name": "n_1"}],
        }
    )
    data = stoker.prepare(schema, tmp_path / "log.csv", out=tmp_path / "d")
    assert data.schema.dense == ("x_c", "x_a", "x_b", "n_1")
    assert [(feature.name, feature.table) for feature in data.schema.features] == [("s_1", "items"), ("s_2", "items")]
    with pytest.raises(SchemaError, match=r"'m_\*': name matches no column .* Features make: n_1"):
        stoker.prepare(replace(schema, dense=(DenseColumn(name="m_*"),)), tmp_path / "log.csv", out=tmp_path / "e")
