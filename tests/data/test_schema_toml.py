"""Schemas written as TOML: loading the text gives the schema back."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import Schema, recipes
from stoker.cli import main
from stoker.prep.draft import schema_toml, toml_value
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, SequenceColumn, SplitRule, Timestamp
from stoker.prep.source_format import SourceFormat

PRESETS = [(name, preset) for name in recipes.names() for preset in recipes.get(name).presets]
texts = st.text(st.characters(codec="utf-8"))
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
plain = names.map(lambda name: name.translate({ord(sign): None for sign in "*?"}))  # no pattern
scalars = texts | st.booleans() | st.integers() | st.floats()
SHARES = {"train": 0.5, "valid": 0.25, "test": 0.25}


def same(schema: Schema, text: str) -> None:
    loaded = Schema.from_dict(tomllib.loads(text))
    assert loaded == schema
    assert loaded.hash() == schema.hash()


@given(st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner)))
def test_any_value_comes_back(value: Any) -> None:
    assert repr(tomllib.loads(f"x = {toml_value(value)}")["x"]) == repr(value)


@pytest.mark.parametrize(
    "text", ['"', "\\", "\\n", "\n", "\t", "\x00", "\x1f", "\x7f", "'", '"""', "é\u2028", "#", "\x01"]
)
def test_texts_are_quoted(text: str) -> None:
    assert tomllib.loads(f"x = {toml_value(text)}  # comment") == {"x": text}
    assert tomllib.loads(f"x = {toml_value({text: [text]})}") == {"x": {text: [text]}}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_the_schema_of_a_recipe_comes_back(
    name: str, preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["schema", name, "--preset", preset])
    assert not done.value.code
    text = capsys.readouterr().out
    recipe = recipes.get(name, preset)
    (tmp_path / "s.toml").write_text(text, encoding="utf-8")
    schema = Schema.from_file(tmp_path / "s.toml")
    assert schema == recipe.schema()
    assert schema.hash() == recipe.schema().hash()
    assert ("cannot express" in text) == (recipe.derive is not None)


def test_the_first_preset_is_printed_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["schema", "criteo"])
    assert "preset dlrm" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["creteo"], ["criteo", "--preset", "nvd"]])
def test_an_unknown_recipe_or_preset_is_one_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["schema", *arguments])
    assert done.value.code == 2
    assert "Did you mean" in capsys.readouterr().err


recipe_columns = st.sampled_from(PRESETS).map(lambda pair: recipes.get(*pair).schema())
splits = (
    st.builds(SplitRule, runs=st.integers(2, 9), seed=st.integers(), column=st.none() | names)
    | st.builds(SplitRule, rule=st.just("runs"), runs=st.integers(2, 9), seed=st.integers(0, 1))
    | st.builds(SplitRule, rule=st.sampled_from(["time", "hash"]), **{k: st.just(v) for k, v in SHARES.items()})
    | st.builds(
        SplitRule, rule=st.just("column"), column=names, values=st.dictionaries(texts, st.just("drop"), min_size=1)
    )
    | st.builds(SplitRule, rule=st.just("leave_last_out"), column=names, min_rows=st.integers(1, 9))
)
sources = st.builds(
    SourceFormat,
    separator=st.sampled_from([None, ",", "\t", "::", "\x01", '"']),
    columns=st.lists(names, unique=True, max_size=40),
    quote=st.sampled_from([None, '"', "'"]),
    null_values=st.lists(texts, max_size=3),
)
fills = st.floats(allow_nan=False) | st.integers() | st.sampled_from(["mean", "median"])
denses = st.builds(
    DenseColumn, name=plain.map("d{}".format), source=st.none() | names,
    fill=fills, clip_min=st.none() | st.floats(-9, 0), null_flag=st.booleans(),
    transforms=st.sampled_from([(), ("log1p",), ("log1p", "zscore")]),
)  # fmt: skip
ids = st.builds(CategoricalColumn, name=plain.map("c{}".format), type=st.just("string"), fill=st.none() | texts)
lists = st.builds(
    SequenceColumn, name=plain.map("s{}".format), separator=st.sampled_from("|,;\t\x01"), keep=st.just("first")
)


@pytest.mark.slow
@settings(max_examples=scaled(60))
@given(schema=recipe_columns, name=texts, split=splits, source=sources, dense=denses, ids=ids, bag=lists, label=names)
def test_any_schema_comes_back(
    schema: Schema, name: str, split: SplitRule, source: SourceFormat, dense: DenseColumn, ids: CategoricalColumn,
    bag: SequenceColumn, label: str,
) -> None:  # fmt: skip
    changed = Schema(
        name=name,
        label=Label(column=label, rule="== 'x\"y'"),
        timestamp=Timestamp(column=label, type="datetime", format='"%Y"'),
        split=split,
        source=source,
        dense=[dense],
        categorical=[*schema.categorical, ids],
        sequence=[bag],
        negative_keep=0.125,
    )
    same(changed, schema_toml(changed))
    same(schema, schema_toml(schema))
