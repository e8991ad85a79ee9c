"""A feature in one line, from the command line, a schema file and Python, with the column that a model reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker import features as f
from stoker.base.errors import SchemaError
from stoker.cli import main
from stoker.dataset.dataset import Dataset
from stoker.prep.features.base import feature_from_text
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mean_target by=city,item folds=10", f.MeanTargetEncoding(by=("city", "item"), folds=10)),
        ("count name='how often' by=item", f.CountEncoding(name="how often", by=("item",))),
        ("rank by=list order=price descending=true", f.Rank(by=("list",), order="price", descending=True)),
        ("past_count by=item order=at window=86400", f.PastCount(by=("item",), order="at", window=86400)),
        ("match name=click column=action 'pattern=^a b$'", f.Match(name="click", column="action", pattern="^a b$")),
        ("match name=seven column=x values=7", f.Match(name="seven", column="x", values=("7",))),
        ("split column=path separator=, width=3", f.Split(column="path", separator=",", width=3)),
    ],
)
def test_a_line_is_the_feature(text: str, expected: f.Derivation) -> None:
    assert feature_from_text(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a feature is empty"),
        ("mean_targt by=item", r"Did you mean 'mean_target'"),
        ("count by", "'by' is not a setting. Write key=value"),
        ("count by=item by=city", "by is given twice"),
        ("count bye=item", "unknown key 'bye'.*Did you mean 'by'"),
        ("mean_target by=item folds=many", "folds must be a whole number, found 'many'"),
        ("count 'by=item", r"no closing quotation. Close the quotes"),
        ("mean_target by=item folds=1", "1 is below 2"),
    ],
)
def test_what_is_none_says_why(text: str, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        feature_from_text(text)


@pytest.mark.parametrize("kind", sorted(f.KINDS))
def test_every_kind_has_columns_that_a_schema_takes(kind: str) -> None:
    settings: dict[str, dict[str, Any]] = {
        "pairs": {"columns": ["a", "b"], "names": ["x", "y"]}, "keep": {"column": "a", "pattern": "a"},
        "match": {"column": "a", "pattern": "a"}, "constrain": {"column": "a", "pattern": "a"},
        "mask": {"column": "a", "where_column": "b", "pattern": "a"}, "equal": {"left": "a", "right": "b"},
        "subtract": {"left": "a", "right": "b"}, "divide": {"left": "a", "right": "b"},
        "split": {"column": "a", "width": 2}, "time_parts": {"column": "a"},
        "cross": {"columns": ["a", "b"], "buckets": 9},
        "properties": {"column": "a", "values": ["x", "y"]},
        "merge": {"on": "a", "file": "t.csv", "columns": ["c"], "number_columns": ["n"]},
        **{name: {"by": ["a"], "order": "b", "column": "c"} for name in ("previous", "difference", "history")},
        **{name: {"by": ["a"], "order": "b"} for name in ("since_last", "past_count", "rank")},
        **{name: {"by": ["a"]} for name in ("count", "mean_target")},
    }  # fmt: skip
    feature = f.feature_from_dict({"kind": kind, "name": "made", **settings[kind]}, "x")
    schema = Schema(label=Label(column="label"), categorical=(CategoricalColumn(name="user"),)).with_feature(feature)
    assert schema.feature == (feature,)
    read = [column.name for column in (*schema.dense, *schema.features) if column.name != "user"]
    assert sorted(read) == ([] if kind in ("keep", "pairs") else sorted(feature.outputs))
    if kind == "merge":
        assert [column.name for column in schema.dense] == ["made_n"]
        assert feature.model_columns()["made_c"] == {"type": "string"}


def test_a_schema_file_takes_lines(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('label = "y"\nderive = ["count by=user", "mean_target by=user"]\n[[categorical]]\nname = "user"\n')
    schema = Schema.from_file(path)
    assert [feature.name for feature in schema.feature] == ["count_user", "mean_target_user"]
    assert schema.dense == (
        DenseColumn(name="count_user", transforms=("log1p", "zscore")),
        DenseColumn(name="mean_target_user", transforms=("zscore",)),
    )
    assert Schema.from_dict(schema.to_dict()) == schema
    plain = Schema(label=Label(column="y"), categorical=(CategoricalColumn(name="user"),))
    longhand = plain.with_feature(f.CountEncoding(by=("user",))).with_feature({"kind": "mean_target", "by": ["user"]})
    assert longhand.hash() == schema.hash()
    with pytest.raises(SchemaError, match=r"makes column 'count_user', which .* made already"):
        schema.with_feature("count by=user")


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


@pytest.mark.slow
def test_the_command_line_takes_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.toml").write_text('label = "y"\n[[categorical]]\nname = "user"\n')
    (tmp_path / "log.csv").write_text("y,user\n" + "".join(f"{row % 3 % 2},u{row % 7}\n" for row in range(300)))
    schema, log, out, no = (tmp_path / name for name in ("s.toml", "log.csv", "out", "no"))
    given = ["--feature", "mean_target by=user", "--feature", "count by=user", "--min-count", 2]
    assert run("prepare", schema, log, "--out", out, *given) == 0
    dense = ("mean_target_user", "count_user")
    assert Dataset(out).schema.dense == dense
    assert run("prepare", "--like", out, log, "--out", tmp_path / "new") == 0
    assert Dataset(tmp_path / "new").schema.dense == dense
    capsys.readouterr()
    assert run("prepare", "--like", out, log, "--out", no, "--feature", "count by=user") != 0
    assert "--feature adds a column, and --like takes those of the dataset" in capsys.readouterr().err
    assert run("prepare", schema, log, "--out", no, "--feature", "count by=usr") != 0
    assert "usr" in capsys.readouterr().err
    assert not no.exists()
