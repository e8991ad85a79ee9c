"""Schemas: the same in Python, TOML and YAML; every mistake named with its key and the nearest right one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.errors import ConfigError, SchemaError
from stoker.base.files import hash_json
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.recipes.ads import criteo
from stoker.prep.schema import (
    CategoricalColumn,
    DenseColumn,
    Label,
    Schema,
    SequenceColumn,
    SplitRule,
    Timestamp,
)

TOML = """
name = "shop"
negative_keep = 0.5
[label]
column = "stars"
rule = ">= 4"
[timestamp]
column = "when"
type = "datetime"
[source]
separator = ";"
quote = ""
null_values = ["NULL"]
[[dense]]
name = "price"
fill = "median"
clip_min = 0
transforms = ["log1p", "zscore"]
[[categorical]]
name = "user"
min_count = 2
oov = "drop"
[[categorical]]
name = "item"
source = "article"
type = "int"
table = "items"
[[sequence]]
name = "history"
type = "int"
table = "items"
max_length = 20
separator = " "
[split]
rule = "time"
train = 0.8
valid = 0.1
test = 0.1
"""
YAML = """
name: shop
negative_keep: 0.5
label: {column: stars, rule: ">= 4"}
timestamp: {column: when, type: datetime}
source: {separator: ";", quote: "", null_values: ["NULL"]}
dense:
  - {name: price, fill: median, clip_min: 0, transforms: [log1p, zscore]}
categorical:
  - {name: user, min_count: 2, oov: drop}
  - {name: item, source: article, type: int, table: items}
sequence:
  - {name: history, type: int, table: items, max_length: 20, separator: " "}
split: {rule: time, train: 0.8, valid: 0.1, test: 0.1}
"""


def test_toml_yaml_and_python_agree(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / "a.yaml").write_text(YAML)
    schema = Schema.from_file(tmp_path / "a.toml")
    assert schema == Schema.from_file(tmp_path / "a.yaml")
    assert schema.hash() == Schema.from_file(tmp_path / "a.yaml").hash()
    assert schema.source.quote is None
    assert schema.label.parsed() == (">=", 4.0)
    assert [feature.table_name for feature in schema.features] == ["user", "items", "items"]
    assert schema.dense[0] == DenseColumn(name="price", fill="median", clip_min=0, transforms=("log1p", "zscore"))


def test_a_bare_label_and_a_quoted_rule() -> None:
    schema = Schema.from_dict({"label": "click", "categorical": [{"name": "item"}]})
    assert schema.label == Label(column="click")
    assert Label(column="action", rule="== 'clickout item'").parsed() == ("==", "clickout item")


@pytest.mark.parametrize("preset", ["dlrm", "nvt", "terabyte", "mlperf"])
def test_dictionary_round_trip_and_hash(preset: str) -> None:
    schema = criteo(preset).schema()
    again = Schema.from_dict(schema.to_dict())
    assert again == schema
    assert again.hash() == schema.hash() == hash_json(schema.to_dict())


@given(
    st.builds(
        CategoricalColumn,
        name=st.just("item"),
        type=st.sampled_from(["int", "hex"]),
        min_count=st.integers(1, 5),
        modulo=st.none() | st.integers(1, 10**9),
        oov=st.sampled_from(["reserved", "drop", "error"]),
    ),
    st.builds(SplitRule, rule=st.just("runs"), runs=st.integers(2, 9)),
)
def test_every_schema_comes_back_and_hashes_differ(column: CategoricalColumn, split: SplitRule) -> None:
    schema = Schema(label=Label(column="y"), categorical=(column,), split=split)
    assert Schema.from_dict(schema.to_dict()) == schema
    other = Schema(label=Label(column="z"), categorical=(column,), split=split)
    assert schema.hash() != other.hash()


def minimal(**changes: Any) -> dict[str, Any]:
    return {"label": "y", "categorical": [{"name": "item"}], **changes}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"categorical": [{"name": "a"}]}, "the key 'label' is missing"),
        (minimal(dens=[]), r"unknown key 'dens'. Allowed: .*Did you mean 'dense'"),
        (minimal(categorical=[{"nam": "a"}]), r"categorical\[0\]: unknown key 'nam'.*'name'"),
        (
            minimal(categorical=[{"name": "a", "type": "strng"}]),
            r"type 'strng' is not one of: hex, int.*'string'",
        ),
        (
            minimal(categorical=[{"name": "a", "min_count": "2"}]),
            "min_count must be a whole number, found '2'",
        ),
        (minimal(categorical=[{"name": "a", "min_count": 0}]), "min_count 0 is below 1"),
        (minimal(categorical=[{"name": "a", "modulo": 5}]), "modulo needs type int or hex"),
        (
            minimal(categorical=[{"name": "a", "hash_buckets": 2**32}]),
            "hash_buckets 4,294,967,296 is above the maximum 4,294,967,295",
        ),
        (
            minimal(categorical=[{"name": "a", "hash_buckets": 5, "min_count": 2}]),
            "no effect with hash_buckets",
        ),
        (minimal(categorical=[{"name": "a", "type": "int", "fill": "x"}]), "'x' is not a value of type int"),
        (
            minimal(categorical={"name": "a"}),
            r"categorical must be a list of tables, written \[\[categorical\]\]",
        ),
        (minimal(categorical=[{"name": "a"}, {"name": "a"}]), r"columns \['a'\] are named twice"),
        (minimal(categorical=[]), "the schema has no feature"),
        (
            minimal(categorical=[{"name": "a", "table": "t"}, {"name": "b", "table": "t", "min_count": 3}]),
            "shares table 't'",
        ),
        (
            minimal(dense=[{"name": "p", "transforms": ["log"]}]),
            r"transforms 'log' is not one of: log1p.*'log1p'",
        ),
        (minimal(dense=[{"name": "p", "transforms": ["zscore", "log1p"]}]), "must be the last one"),
        (
            minimal(dense=[{"name": "p", "fill": "mode"}]),
            "fill 'mode' is not one of: mean, median, or a number",
        ),
        (minimal(dense=[{"name": "p", "clip_min": 2, "clip_max": 1}]), "is above clip_max"),
        (minimal(sequence=[{"name": "s", "keep": "lst"}]), "keep 'lst' is not one of: last, first"),
        (minimal(split={"rule": "random"}), "rule 'random' is not one of: runs, time"),
        (
            minimal(split={"rule": "runs", "train": 0.5}),
            "train does not belong to rule 'runs', which takes: runs",
        ),
        (minimal(split={"rule": "hash", "train": 0.9}), r"0.9 \+ 0.1 \+ 0.1 = 1.1, not 1"),
        (minimal(split={"rule": "column"}), "needs the column to split by"),
        (minimal(split={"rule": "files", "files": {"a": "tran"}}), "files 'tran' is not one of.*'train'"),
        (minimal(split={"rule": "time"}), "needs a .timestamp. with its column"),
        (minimal(label={"column": "y", "rule": "about 4"}), "is not a comparison"),
        (minimal(label={"column": "y", "rule": "> 'a'"}), "orders text"),
        (minimal(negative_keep=0.0), "negative_keep 0.0 is not a share"),
        (minimal(source={"quote": "''"}), "is not one ASCII character"),
        (
            minimal(timestamp={"column": "t", "type": "date"}),
            "type 'date' is not one of: int, float, datetime",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=f"(?s)^shop.toml.*{message}") as caught:
        Schema.from_dict(values, where="shop.toml")
    assert not re.search(r"(\b\w+): \1: ", str(caught.value))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"none\.toml: cannot be read \(No such file or directory\)\."):
        Schema.from_file(tmp_path / "none.toml")
    (tmp_path / "a.toml").write_text("label = [")
    with pytest.raises(SchemaError, match=r"a\.toml: is not well-formed"):
        Schema.from_file(tmp_path / "a.toml")
    (tmp_path / "a.yaml").write_text("- 1")
    with pytest.raises(SchemaError, match=r"a\.yaml: must be a table of keys, found list"):
        Schema.from_file(tmp_path / "a.yaml")
    for name in ("empty.yaml", "empty.toml"):
        (tmp_path / name).write_text("# later\n")
        with pytest.raises(SchemaError, match=rf"{name}: is empty\. A schema names"):
            Schema.from_file(tmp_path / name)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(SchemaError, match=r"ends in \.toml, \.yaml or \.yml"):
        Schema.from_file(tmp_path / "a.json")


def test_recipes_refuse_what_cannot_work() -> None:
    def schema() -> Schema:
        sequence = SequenceColumn(name="s")
        return Schema(label=Label(column="y"), sequence=(sequence,), timestamp=Timestamp(column="t"))

    recipe = Recipe(name="r", description="", presets={"one": schema, "two": schema})
    assert recipe.preset_name == "one"
    assert recipe.with_preset("two").preset_name == "two"
    assert recipe.schema("two") == schema()
    with pytest.raises(ConfigError, match=r"no preset 'tow'. It has: one, two. Did you mean 'two'"):
        recipe.with_preset("tow")
    with pytest.raises(SchemaError, match="describes no raw input"):
        Recipe(name="r", description="", presets={"one": schema}, derive=lambda frames, _: frames["a"])
    with pytest.raises(SchemaError, match="type 'text' is not one of"):
        RawInput(columns={"a": "text"})
    with pytest.raises(SchemaError, match=r"required columns \['b'\]"):
        RawInput(columns={"a": "int"}, required=("b",))
