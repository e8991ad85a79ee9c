"""Split rules in one line, on the command line and in Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stoker
from stoker.base.errors import ConfigError, SchemaError
from stoker.cli import main
from stoker.prep.recipes import get
from stoker.prep.schema import CategoricalColumn, Label, Schema, SplitRule, Timestamp, split_of

SCHEMA = Schema(label=Label(column="y"), timestamp=Timestamp(column="t"), categorical=(CategoricalColumn(name="user"),))
VALUES = {name: name for name in ("train", "valid", "test", "drop")}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    lines = [f"{n % 2},{n},{n % 30},{['train', 'valid', 'test', 'drop'][n % 4]}" for n in range(1000)]
    (tmp_path / "log.csv").write_text("\n".join(["y,t,user,part", *lines]) + "\n")
    return tmp_path / "log.csv"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("random:0.7,0.2", SplitRule(train=0.7, valid=0.2, test=0.1)),
        ("random:0.7,0.2,0.1", SplitRule(train=0.7, valid=0.2, test=0.1)),
        ("random", SplitRule()),
        ("hash:user:0.8,0.1", SplitRule(column="user")),
        ("hash:user", SplitRule(column="user")),
        ("hash:a:b:0.5,0.5", SplitRule(column="a:b", train=0.5, valid=0.5, test=0.0)),
        ("hash:5:0.8,0.1", SplitRule(column="5")),
        ("time:0.9", SplitRule(rule="time", train=0.9, valid=0.05, test=0.05)),
        ("last_touch:user:0.6,0.2", SplitRule(rule="last_touch", column="user", train=0.6, valid=0.2, test=0.2)),
        ("leave_last_out:user", SplitRule(rule="leave_last_out", column="user")),
        ("leave_last_out:user:5", SplitRule(rule="leave_last_out", column="user", min_rows=5)),
        ("runs", SplitRule(rule="runs")),
        ("runs:4", SplitRule(rule="runs", runs=4)),
        ("column:part", SplitRule(rule="column", column="part", values=VALUES)),
    ],
)
def test_forms(text: str, rule: SplitRule) -> None:
    assert split_of(text) == rule
    assert split_of(rule) is rule


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not a rule"),
        ("tme:0.9", r"'tme' is not a rule. Did you mean 'time'\?"),
        ("time:x", "'x' is not a number"),
        ("time:0.9,0.3", "sum to 1"),
        ("time:0.5,0.1,0.1", "sum to 1"),
        ("time:1.5", "from 0 to 1"),
        ("time:nan", "'nan' is not a number"),
        ("time:0.1,0.2,0.3,0.4", "the shares"),
        ("random:user:0.8", "'user' is not a number"),
        ("hash:0.8,0.1", "hash needs a column before its shares"),
        ("hash", "hash needs a column"),
        ("runs:1", "below 2"),
        ("runs:2.5", "one whole number"),
        ("runs:2,3", "one whole number"),
        ("leave_last_out", "needs a column"),
        ("column:part:3", "takes no number"),
    ],
)
def test_bad_values_list_the_forms(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        split_of(text)
    assert "hash:COLUMN:0.8,0.1" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 10


def test_the_command_line_overrides_and_the_manifest_records(log: Path, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        'label = "y"\n[timestamp]\ncolumn = "t"\n[[categorical]]\nname = "user"\n[split]\nrule = "runs"\n'
    )
    command = ["prepare", str(tmp_path / "s.toml"), str(log), "--out", str(tmp_path / "a"), "--json"]
    for _ in range(2):  # the second finds it done
        with pytest.raises(SystemExit) as caught:
            main([*command, "--split", "time:0.8,0.1"])
        assert not caught.value.code
    data = stoker.Dataset(tmp_path / "a")
    assert [len(split) for split in data.splits.values()] == [800, 100, 100]
    told = json.loads((data.path / "manifest.json").read_text())["schema"]["split"]
    assert (told["rule"], told["train"], told["valid"]) == ("time", 0.8, 0.1)
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code, "the schema's own rule asks for another dataset"


def test_python_takes_lines_and_rules(log: Path) -> None:
    data = stoker.prepare(SCHEMA, log, split="column:part")
    assert [len(split) for split in data.splits.values()] == [250, 250, 250]
    data = stoker.prepare(SCHEMA, log, split=SplitRule(rule="time", train=0.5, valid=0.0, test=0.5))
    assert [len(split) for split in data.splits.values()] == [500, 0, 500]
    with pytest.raises(SchemaError, match="'time' needs a"):
        stoker.prepare(Schema(label=SCHEMA.label, categorical=SCHEMA.categorical), log, split="time:0.8")


def test_recipes_and_reordering_take_it_rows_like_a_dataset_do_not(log: Path, tmp_path: Path) -> None:
    lines = [f"{n % 30}::{n % 40}::{n % 5 + 1}::{n}" for n in range(900)]
    (tmp_path / "ratings.dat").write_text("\n".join(lines) + "\n")
    recipe = get("movielens")
    data = stoker.prepare(recipe, tmp_path / "ratings.dat", out=tmp_path / "m", split="runs:3")
    assert data.manifest["schema"]["split"]["rule"] == "runs"
    wide = [f"{n % 2},{n},{n % 1100},train" for n in range(4000)]
    (tmp_path / "wide.csv").write_text("\n".join(["y,t,user,part", *wide]) + "\n")
    made = stoker.prepare(
        SCHEMA, tmp_path / "wide.csv", out=tmp_path / "r", split="time:0.8,0.1", keep=["t"], reorder=True
    )
    assert made.reordered is not None
    assert [len(split) for split in made.splits.values()] == [3200, 400, 400]
    assert made.test.kept is not None
    assert made.test.kept.read()["t"].to_pylist() == list(range(3600, 4000))
    with pytest.raises(ConfigError, match="a split rule has no effect"):
        stoker.prepare(files=log, like=made.path, out=tmp_path / "l", split="time:0.8,0.1")
