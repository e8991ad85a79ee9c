"""What a bar is, when it is met, and how its outcome is printed and kept.

Exit codes: 0 no regression, 1 a bar is short that is not in ``known_short.toml``, wrong or crashed, 2 a bar did not run
and there is no regression.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "Bar",
    "Crashed",
    "NotRun",
    "Outcome",
    "Result",
    "Run",
    "Table",
    "WrongResult",
    "body",
    "current_name",
    "data_files",
    "exit_code",
    "judge",
    "known_short",
    "latest",
    "write_results",
]

CACHE = Path(__file__).parent / "cache"  # generated inputs; git-ignored
SHARED = 0.05  # share of the processors used by others from which a result says so
KNOWN_SHORT = Path(__file__).with_name("known_short.toml")
#: names that bars had before, and their names now
RENAMED = {"foresight-vs-belady": "epoch-lookahead-vs-belady"}
Status = Literal["ok", "short", "wrong", "crashed", "not run"]


class WrongResult(Exception):
    """A contestant's numbers are not the reference's: no time of this bar may be shown."""


class Crashed(Exception):
    """A contestant's process died or printed nothing: its results are unknown, not wrong."""


class NotRun(Exception):
    """The bar cannot run here for a reason that is not its result: a peer or a data set is missing."""


def known_short() -> dict[str, str]:
    """Bars that are known to be short, with the reason: bar -> reason."""
    return {name: entry["reason"] for name, entry in tomllib.loads(KNOWN_SHORT.read_text()).items()}


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
    def of(cls, *, quick: bool, rounds: int | None = None, full_rounds: int = 5) -> Run:
        return cls(quick=quick, rounds=rounds or (2 if quick else full_rounds))

    def log(self, text: str) -> None:
        """Progress; never a measured time of a bar that is not checked yet."""
        print(f"  {text}", flush=True)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One promise: a measured value and the figure it must reach."""

    name: str
    group: str  # bars of one group run together by the group's name
    title: str
    must: float
    aim: float | None = None
    at_most: bool = False  # the value must stay at or below ``must``
    unit: str = "x"
    digits: int = 2
    rounds: int = 5  # of a full run
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
    rounds: int = 0
    known: str = ""  # why the bar is known to be short

    @property
    def regressed(self) -> bool:
        """Whether the bar fails the run: it crashed, is wrong, or is short and not known to be."""
        return self.status in ("wrong", "crashed") or (self.status == "short" and not self.known)

    @property
    def line(self) -> str:
        """The last line of a run, made to be read by scripts."""
        bar = self.bar
        if self.outcome is not None:
            said = f"{bar.name}: {bar.show(self.outcome.value)} (must {bar.requirement}) {self.status}"
            if self.known:
                said += f", known: {self.known}" if self.status == "short" else "; delete it from known_short.toml"
            return said
        if self.status == "wrong":
            return f"{bar.name}: wrong results, no time reported (must {bar.requirement}) short"
        if self.status == "crashed":
            return (
                f"{bar.name}: crashed, no time reported: {self.reason.splitlines()[0]} (must {bar.requirement}) crashed"
            )
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
    except Crashed as crash:
        status, reason = "crashed", str(crash)
    except Exception as error:
        # A crash in one bar must not hide the others of a long campaign.
        traceback.print_exc()
        status, reason = "crashed", f"{type(error).__name__}: {error}"
    return Result(
        bar=bar, status=status, outcome=outcome, reason=reason, seconds=meter.seconds, others=meter.others,
        rounds=run.rounds, known=known_short().get(bar.name, ""),
    )  # fmt: skip


def exit_code(results: Sequence[Result]) -> int:
    """Return 0 without a regression, 1 with one, 2 where a bar did not run and none regressed."""
    if not results or any(result.regressed for result in results):
        return 1
    return 2 if any(result.status == "not run" for result in results) else 0


def report(result: Result) -> str:
    """Everything about one result but its last line."""
    parts = [f"## {result.bar.name}: {result.bar.title}"]
    if result.status == "wrong":
        parts.append(f"WRONG RESULTS: {result.reason}")
    if result.status == "crashed":
        parts.append(f"CRASHED, results unknown: {result.reason}")
    if result.outcome is not None:
        parts += [table.markdown() for table in result.outcome.tables]
        notes = list(result.outcome.notes)
        if result.others is not None and result.others > SHARED:
            notes.append(f"the machine was shared: other programs used {result.others:.0%} of the processors meanwhile")
        if notes:
            parts.append("\n".join(f"* {note}" for note in notes))
    return "\n\n".join(parts)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def provenance() -> dict[str, Any]:
    """When, from which sources and by which command a result is made.

    ``commit`` is None outside a Git checkout; ``dirty`` says whether tracked files differ from it. The command lacks
    ``--out``, a folder of this machine.
    """
    given = iter(sys.argv[1:])
    kept = [each for each in given if not (each.startswith("--out=") or (each == "--out" and [next(given, None)]))]
    command = [Path(sys.argv[0]).name, *kept]
    if command[0] == "__main__.py":
        command[:1] = ["python", "-m", "benchmarks"]
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changed is None else bool(changed),
        "command": shlex.join(command),
    }


def current_name(bar: dict[str, Any]) -> str:
    """Return the name that a bar of a file has now; files keep names of before."""
    return RENAMED.get(bar["name"], str(bar["name"]))


def latest(folder: Path) -> dict[tuple[str, str], tuple[Path, dict[str, Any], dict[str, Any]]]:
    """Find the newest full result of each bar on each machine.

    Returns (machine slug, bar) -> (file, whole content, the bar's part). Bars that did not run and quick runs count
    only where there is nothing else.
    """
    found: dict[tuple[str, str], tuple[Path, dict[str, Any], dict[str, Any]]] = {}
    ranks: dict[tuple[str, str], tuple[bool, bool, str]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: (len(path.name), path.name)):
        made = json.loads(path.read_text())
        for bar in made["bars"]:
            key = (made["machine"]["slug"], current_name(bar))
            # The oldest files have a date only, which sorts before any time of that day.
            rank = (bar["status"] != "not run", not made["quick"], made.get("time", made["date"]))
            if key not in ranks or rank >= ranks[key]:
                found[key], ranks[key] = (path, made, bar), rank
    return found


def body(results: Sequence[Result], what: str, machine: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """Everything about a run, as plain JSON values."""
    values = [
        {
            "name": result.bar.name,
            "title": result.bar.title,
            "status": result.status,
            "known": result.known,
            "must": result.bar.must,
            "at_most": result.bar.at_most,
            "unit": result.bar.unit,
            "digits": result.bar.digits,
            "rounds": result.rounds,
            "value": None if result.outcome is None else result.outcome.value,
            "reason": result.reason,
            "seconds": round(result.seconds, 1),
            "others": result.others,
            "data": {} if result.outcome is None else result.outcome.data,
        }
        for result in results
    ]
    made = provenance()
    return {"what": what, "date": made["time"][:10], **made, "quick": quick, "machine": machine, "bars": values}


def write_results(results: Sequence[Result], out: Path, what: str, machine: dict[str, Any], *, quick: bool) -> Path:
    """Write ``<what>_<machine>_<UTC time>.md`` and ``.json`` under ``out``; return the Markdown's path.

    No file is ever overwritten. The new files name those whose figures they supersede: the newest earlier results of
    the same bars on the same machine.
    """
    out.mkdir(parents=True, exist_ok=True)
    made = body(results, what, machine, quick=quick)
    earlier = latest(out)
    keys = [(machine["slug"], result.bar.name) for result in results]
    made["supersedes"] = sorted({earlier[key][0].name for key in keys if key in earlier})
    stem = f"{what}_{machine['slug']}_{made['time'].replace(':', '')}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    data = next(path for name in names if not (path := out / f"{name}.json").exists())
    dirty = {True: ", with uncommitted changes", False: "", None: ""}[made["dirty"]]
    facts = [
        f"* time: {made['time']}",
        f"* commit: {made['commit'] or 'unknown'}{dirty}",
        f"* command: `{made['command']}`",
        f"* rounds: {', '.join(map(str, sorted({result.rounds for result in results})))}",
        *(f"* {key}: {value}" for key, value in machine.items() if key not in ("slug", "versions")),
        "* versions: " + ", ".join(f"{k} {v}" for k, v in machine["versions"].items()),
        *(["* quick run: fewer rounds"] if quick else []),
        f"* supersedes: {', '.join(made['supersedes']) or 'nothing'}",
    ]
    lines = [f"# {what}, {made['time']}", "", *facts, "", "```", *(result.line for result in results)]
    lines += ["```", "", "\n\n".join(report(result) for result in results), ""]
    markdown = data.with_suffix(".md")
    for path, text in ((data, json.dumps(made, indent=1) + "\n"), (markdown, "\n".join(lines))):
        with path.open("x") as file:
            file.write(text)
    return markdown
