"""``stoker prepare`` on the command line: help, summary, JSON and errors in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from stoker.cli.prepare import register
from stoker.errors import StokerError

SCHEMA = """
label = "label"
[[dense]]
name = "price"
[[categorical]]
name = "item"
[split]
rule = "runs"
runs = 4
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "shop.toml").write_text(SCHEMA)
    lines = [f"{i % 2},{'abc'[i % 3]},{i}" for i in range(20)]
    (tmp_path / "log.csv").write_text("\n".join(["label,item,price", *lines, "1,a,x"]) + "\n")
    return tmp_path


def run(*arguments: object) -> Result:
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    return CliRunner().invoke(app, ["prepare", *map(str, arguments)])


def test_summary_shows_splits_tables_and_bad_lines(log: Path) -> None:
    done = run(log / "shop.toml", log / "log.csv", "--out", log / "out")
    assert done.exit_code == 0, done.output
    for part in ("train", "15", "item", "1 bad lines", "rows/s", "peak memory"):
        assert part in done.output


def test_json_and_min_count(log: Path) -> None:
    done = run(log / "shop.toml", log / "log.csv", "--out", log / "out", "--json", "--min-count", 6)
    report = json.loads(done.output)
    assert report["rows"] == {"train": 15, "valid": 2, "test": 3}
    assert report["tables"]["item"]["rows"] == 1
    assert report["bad"] == 1


def test_help_and_recipe_list() -> None:
    shown = run("--help").output
    assert "stoker prepare criteo" in shown
    assert "--max-bad" in shown
    assert "dlrm, nvt" in run("--list").output
    assert {entry["name"] for entry in json.loads(run("--list", "--json").output)} >= {"criteo"}


def test_errors_reach_the_caller_as_stoker_errors(log: Path) -> None:
    for arguments, message in (
        ((log / "shop.toml", log / "log.csv"), "add --out"),
        ((log / "shop.toml",), "needs a recipe and files"),
        (("critoe", log / "log.csv", "--out", log / "o"), "Did you mean 'criteo'"),
        ((log / "shop.toml", log / "log.csv", "--out", log / "o", "--strict"), r"log.csv:22: column price"),
        ((log / "shop.toml", log / "log.csv", "--out", log / "o", "--max-bad", "lots"), "not a number"),
    ):
        done = run(*arguments)
        assert isinstance(done.exception, StokerError)
        assert message in str(done.exception)
