"""Every committed result in one page: ``python -m benchmarks.index`` writes ``benchmarks/results/README.md``."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Table, current_name

__all__ = ["RESULTS", "figures", "page"]

RESULTS = Path(__file__).parent / "results"
HEAD = """# Results

Written by `python -m benchmarks.index` from the files of this folder; a test fails where it is not up to date. The
bars `gpu-...` were measured on a GPU, all others without one. Results are append-only: a rerun adds files and names
those it supersedes. Files whose names end in a date are the oldest; some were overwritten by reruns of their day, and
Git has what they held.
[What changed in bars, workloads and tolerances](../CHANGES.md).

Bars whose names end in `-vs-fbgemm`, `-vs-torch` and the `dlrm-step` group are history: one workload, weaker peers. The
`matrix` bars replace them. fastai 1, pandas and item-wise loaders are the baselines of the papers that we repeat, not
strong peers of today.
"""


def numbers(value: Any) -> Iterator[float]:
    """Every number in nested JSON values."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def figures(bar: dict[str, Any]) -> set[float]:
    """Return what a bar's result says: its value, its ratios, and every peer's median ratio to us in every case."""
    data = bar["data"]
    found = set(numbers([bar["value"], data.get("ratios", [])]))
    seconds = data.get("seconds")
    if isinstance(seconds, dict):
        first = next(iter(seconds.values()))
        for cases in seconds.values():
            if isinstance(cases, dict):
                for case, values in cases.items():
                    pairs = zip(values, first.get(case, []), strict=False)
                    found |= {statistics.median(ratios) for ratios in [[a / b for a, b in pairs]] if ratios}
    return found


def rounds_of(bar: dict[str, Any]) -> str:
    """How many rounds (or seeds); told by the number of values in files that do not say."""
    if "rounds" in bar:
        return str(bar["rounds"])
    found = {name: bar["data"].get(name) for name in ("seconds", "ours", "values")}
    value = next((value for value in found.values() if value), None)
    while isinstance(value, dict):
        value = next(iter(value.values()), None)
    return str(len(value)) if isinstance(value, list) else ""


def page(folder: Path = RESULTS) -> str:
    """The page's text: a table for each machine, by bar and then by date."""
    rows: dict[tuple[str, str], list[tuple[str, str, list[str]]]] = {}
    made = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    gone = {name for each in made.values() for name in each.get("supersedes", [])}
    newest: dict[tuple[str, str], str] = {}
    for each in made.values():
        for bar in each["bars"]:
            key = (each["machine"]["slug"], current_name(bar))
            newest[key] = max(newest.get(key, ""), each.get("time", each["date"]))
    for path, each in made.items():
        text = path.with_suffix(".md").read_text()
        machine = each["machine"]
        for bar in each["bars"]:
            name = re.escape(bar["name"])
            line = re.search(rf"^{name}: (.*) \(must (.*?)\) (\w+)", text, re.MULTILINE)
            title = re.search(rf"^## {name}: (.*)$", text, re.MULTILINE)
            when = each.get("time", each["date"])
            status = bar["status"]
            if path.name in gone or when < newest[machine["slug"], current_name(bar)]:
                status += ", superseded"
            cells = [
                f"`{current_name(bar)}`: {title.group(1) if title else bar.get('title', '')}",
                line.group(1) if line else "",
                line.group(2) if line else f"{bar['must']:g}",
                status + (", quick" if each["quick"] else ""),
                rounds_of(bar),
                when[:16].replace("T", " "),
                f"[file]({path.with_suffix('.md').name})",
            ]
            title_of = (machine["slug"], f"{machine['CPU']}, {machine['cores']} cores, {machine['memory']}")
            rows.setdefault(title_of, []).append((current_name(bar), when, cells))
    tables = [
        Table(
            title=f"{slug}: {about}",
            columns=["bar", "value", "must", "status", "rounds or seeds", "UTC", "file"],
            rows=[cells for _, _, cells in sorted(found)],
        ).markdown()
        for (slug, about), found in sorted(rows.items())
    ]
    return HEAD + "\n" + "\n\n".join(tables) + "\n"


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(page())
