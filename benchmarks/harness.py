"""What a bar is, when it is met, and how its outcome is printed and kept.

Exit codes: 0 every bar ok, 1 a bar short or wrong, 2 a bar not run (and none short).
"""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "Bar",
    "NotRun",
    "Outcome",
    "Result",
    "Run",
    "Table",
    "WrongResult",
    "body",
    "data_files",
    "exit_code",
    "judge",
    "write_results",
]

CACHE = Path(__file__).parent / "cache"  # generated inputs; git-ignored
SHARED = 0.05  # share of the processors used by others from which a result says so
Status = Literal["ok", "short", "wrong", "not run"]


class WrongResult(Exception):
    """A contestant's numbers are not the reference's: no time of this bar may be shown."""


class NotRun(Exception):
    """The bar cannot run here for a reason that is not its result: a peer or a data set is missing."""


def data_files(*names: str) -> list[Path]:
    """Files of the data sets that are not ours to distribute, from ``STOKER_DATA`` or ``../shared/data``.

    Raises:
        NotRun: some of them are not on this machine.
    """
    folder = Path(os.environ.get("STOKER_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if absent := [name for name in names if not (folder / name).exists()]:
        raise NotRun(f"{', '.join(absent)} not found (set STOKER_DATA to the folder of the data sets)")
    return [folder / name for name in names]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that reads the same in a terminal and in Markdown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        cells = [list(map(str, self.columns)), *(list(map(str, row)) for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]

        def line(row: Sequence[str]) -> str:
            padded = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
            return f"| {' | '.join(padded)} |"

        rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
        return "\n".join([f"**{self.title}**", "", line(cells[0]), rule, *map(line, cells[1:])])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a bar measured. It exists only after all results were found equal."""

    value: float
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    data: dict[str, Any] = field(default_factory=dict)  # raw timings, versions: goes to the JSON file


@dataclass(frozen=True, kw_only=True)
class Run:
    """How thoroughly to measure."""

    quick: bool = False
    rounds: int = 5  # interleaved rounds of fresh processes

    @classmethod
    def of(cls, *, quick: bool, rounds: int | None = None) -> Run:
        return cls(quick=quick, rounds=rounds or (2 if quick else 5))

    def log(self, text: str) -> None:
        """Progress; never a measured time of a bar that is not checked yet."""
        print(f"  {text}", flush=True)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One promise: a measured value and the figure it must reach."""

    name: str
    group: str  # bars of one group share a results file
    title: str
    must: float
    aim: float | None = None
    at_most: bool = False  # the value must stay at or below ``must``
    unit: str = "x"
    digits: int = 2
    run: Callable[[Run], Outcome]

    def show(self, value: float) -> str:
        return f"{value:.{self.digits}f}{self.unit}"

    @property
    def requirement(self) -> str:
        return f"{'at most ' if self.at_most else ''}{self.must:g}{self.unit}"

    def met(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return value <= self.must if self.at_most else value >= self.must


@dataclass(frozen=True, kw_only=True)
class Result:
    """A bar's status and, where it was measured, its outcome."""

    bar: Bar
    status: Status
    outcome: Outcome | None = None
    reason: str = ""
    seconds: float = 0.0
    others: float | None = None  # share of the processors that other programs used meanwhile

    @property
    def line(self) -> str:
        """The last line of a run, made to be read by scripts."""
        bar = self.bar
        if self.outcome is not None:
            return f"{bar.name}: {bar.show(self.outcome.value)} (must {bar.requirement}) {self.status}"
        if self.status == "wrong":
            return f"{bar.name}: wrong results, no time reported (must {bar.requirement}) short"
        return f"{bar.name}: {self.reason} (must {bar.requirement}) {self.status}"


class _Meter:
    """Wall time, and how much of the processors others used: a bar measured on a shared machine says so."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.ticks = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds of processor time: (in all, busy, ours and our children's); None where /proc is missing."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        values = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
        own = os.times()
        idle = values[3] + values[4]
        return sum(values), sum(values) - idle, sum(own[:4])

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    @property
    def others(self) -> float | None:
        now = self._read()
        if now is None or self.ticks is None:
            return None
        whole, busy, own = (b - a for a, b in zip(self.ticks, now, strict=True))
        return max(0.0, busy - own) / whole if whole > 0 else None


def judge(bar: Bar, run: Run) -> Result:
    """Run a bar and decide. Wrong results and missing peers never end as "ok"."""
    meter = _Meter()
    outcome, reason = None, ""
    status: Status
    try:
        outcome = bar.run(run)
        status = "ok" if bar.met(outcome.value) else "short"
    except NotRun as missing:
        status, reason = "not run", f"not run: {missing}"
    except WrongResult as wrong:
        status, reason = "wrong", str(wrong)
    except Exception as error:
        # A crash in one bar must not hide the others of a long campaign.
        traceback.print_exc()
        status, reason = "wrong", f"{type(error).__name__}: {error}"
    return Result(bar=bar, status=status, outcome=outcome, reason=reason, seconds=meter.seconds, others=meter.others)


def exit_code(results: Sequence[Result]) -> int:
    """0 all ok; 1 one short or wrong; 2 one not run and the others ok."""
    statuses = {result.status for result in results}
    if statuses & {"short", "wrong"} or not results:
        return 1
    return 2 if "not run" in statuses else 0


def report(result: Result) -> str:
    """Everything about one result but its last line."""
    parts = [f"## {result.bar.name}: {result.bar.title}"]
    if result.status == "wrong":
        parts.append(f"WRONG RESULTS: {result.reason}")
    if result.outcome is not None:
        parts += [table.markdown() for table in result.outcome.tables]
        notes = list(result.outcome.notes)
        if result.others is not None and result.others > SHARED:
            notes.append(f"the machine was shared: other programs used {result.others:.0%} of the processors meanwhile")
        if notes:
            parts.append("\n".join(f"* {note}" for note in notes))
    return "\n\n".join(parts)


def body(results: Sequence[Result], what: str, machine: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """Everything about a run, as plain JSON values."""
    values = [
        {
            "name": result.bar.name,
            "status": result.status,
            "must": result.bar.must,
            "at_most": result.bar.at_most,
            "value": None if result.outcome is None else result.outcome.value,
            "reason": result.reason,
            "seconds": round(result.seconds, 1),
            "others": result.others,
            "data": {} if result.outcome is None else result.outcome.data,
        }
        for result in results
    ]
    return {"what": what, "date": date.today().isoformat(), "quick": quick, "machine": machine, "bars": values}


def write_results(results: Sequence[Result], out: Path, what: str, machine: dict[str, Any], *, quick: bool) -> Path:
    """Write ``<what>_<machine>_<date>.md`` and ``.json`` under ``out``; return the Markdown's path."""
    out.mkdir(parents=True, exist_ok=True)
    today = date.today().isoformat()
    stem = out / f"{what}_{machine['slug']}_{today}"
    facts = [f"* {key}: {value}" for key, value in machine.items() if key not in ("slug", "versions")]
    facts.append("* versions: " + ", ".join(f"{k} {v}" for k, v in machine["versions"].items()))
    lines = [f"# {what}, {today}", "", *facts, *(["* quick run: fewer rounds"] if quick else []), "", "```"]
    lines += [result.line for result in results]
    lines += ["```", "", "\n\n".join(report(result) for result in results), ""]
    markdown = stem.with_name(stem.name + ".md")
    markdown.write_text("\n".join(lines))
    made = body(results, what, machine, quick=quick)
    stem.with_name(stem.name + ".json").write_text(json.dumps(made, indent=1) + "\n")
    return markdown
