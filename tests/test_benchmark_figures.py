"""Figures of README: each is in the results file it names, within its printed rounding."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.__main__ import all_bars
from benchmarks.gpu import PARTS
from benchmarks.harness import current_name, known_short
from benchmarks.index import RESULTS, figures, page

ROOT = Path(__file__).parents[1]
MOST_ROWS = 12


def measured() -> list[list[str]]:
    """Rows of README's table: what, against, measured with a link to the result, bar."""
    text = (ROOT / "README.md").read_text().split("## Measured")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def result(cell: str) -> tuple[str, dict[str, Any]]:
    """The figures of a cell, and the bar's part of the file that its link names."""
    found = re.fullmatch(r'\[(.+)\]\((benchmarks/results/.+)\.md "([\w-]+)"\)', cell)
    assert found, f"a figure links to its file, with its bar as the title: {cell}"
    made = json.loads((ROOT / f"{found[2]}.json").read_text())
    (bar,) = (bar for bar in made["bars"] if current_name(bar) == found[3])
    return found[1], dict(bar)


def unsupported(text: str, bar: dict[str, Any]) -> list[str]:
    """The figures of a cell that the result does not hold; what is in brackets says which case, as do commas."""
    missing = []
    for said in re.findall(r"\d+(?:\.\d+)?", re.sub(r"\([^)]*\)", "", text)):
        half = 0.5 * 10.0 ** -len(said.partition(".")[2])
        if not any(abs(abs(value) - float(said)) <= half * 1.0001 for value in figures(bar)):
            missing.append(said)
    return missing


@pytest.mark.parametrize("row", measured(), ids=lambda row: row[2].split('"')[1])
def test_a_figure_is_in_the_file_it_names(row: list[str]) -> None:
    text, bar = result(row[2])
    assert re.search(r"\d", text)
    assert unsupported(text, bar) == []
    must = re.match(r"[\d.]+", row[3])
    assert must
    assert float(must[0]) == bar["must"]
    assert ("short" in row[3]) == (bar["status"] == "short")


def test_a_wrong_figure_is_found() -> None:
    """The figure that README once had for row-wise Adagrad, 4.0x / 4.2x, contradicts its file."""
    name, file = "embedding-rowwise-adagrad-vs-torch", "embedding_amd-epyc-2c-avx512-bf16_2026-11-21"
    _, bar = result(f'[4.0x / 4.2x](benchmarks/results/{file}.md "{name}")')
    assert unsupported("4.0x / 4.2x", bar) == ["4.0", "4.2"]
    assert unsupported("2.6x / 3.7x", bar) == []


def test_the_table_is_short_and_says_what_it_leaves_out() -> None:
    assert 5 <= len(measured()) <= MOST_ROWS
    text = (ROOT / "README.md").read_text()
    assert "no figure is from a GPU" in text
    for row in measured():
        if any(word in row[1] for word in ("fastai", "pandas", "item-wise")):
            assert row[0].startswith("history")


def test_the_page_of_all_results_is_current() -> None:
    assert (RESULTS / "README.md").read_text() == page(), "run python -m benchmarks.index"


def test_changes_cite_commits_and_bars_that_exist() -> None:
    text = (ROOT / "benchmarks" / "CHANGES.md").read_text()
    assert text.count("\n| ") > 15
    known = (
        {bar.name for bar in all_bars()}
        | {f"gpu-{part}" for part in PARTS}
        | {bar["name"] for path in RESULTS.glob("*.json") for bar in json.loads(path.read_text())["bars"]}
    )
    for line in text.splitlines():
        if line.startswith("| `"):
            names = re.findall(r"`([a-z0-9-]+)`", line.split(" | ")[0])
            assert set(names) <= known, line
            assert re.search(r"\b[0-9a-f]{7}\b|this change", line), line
    assert set(known_short()) <= known
