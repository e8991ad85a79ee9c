"""What planning alone costs: against the planner of an earlier commit, and on two threads against one."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, NotRun, Outcome, Run, Table, WrongResult
from benchmarks.rounds import PEERS, ROOT, Contestant, Timings, compare, play
from benchmarks.tensor_train import TERABYTE
from benchmarks.workload import SKEW

__all__ = ["bars"]

EARLIER = "88bf09a"  # its planner is the yardstick: no pinned rows in a cache, and cache misses one by one
HOT = 0.9  # of the slots, for ours
SAME = 1e-3  # largest difference of misses
OPTIONS = {"hot": HOT}
OURS = Contestant(label="stoker, 90 % of the slots pinned", script="stoker_planner.py", options=OPTIONS, threads=1)
TWO = Contestant(label="stoker, on two threads", script="stoker_planner.py", options=OPTIONS)


def earlier() -> Contestant:
    """The planner of EARLIER, from the history of this clone.

    Raises:
        NotRun: the clone has no such commit.
    """
    folder = PEERS / f"planner-{EARLIER}"
    if not (folder / "src").exists():
        command = ["git", "-C", str(ROOT), "archive", EARLIER, "src"]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise NotRun(f"commit {EARLIER} is not in this clone; get the whole history (git fetch --unshallow)")
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
    return Contestant(
        label=f"stoker {EARLIER}, nothing pinned", script="stoker_planner.py", options={"hot": 0}, threads=1,
        sources=folder / "src",
    )  # fmt: skip


def _play(contestants: list[Contestant], run: Run, what: str = "") -> tuple[Timings, list[dict[str, Any]]]:
    """Time ``contestants``, whose misses must be equal, and the digest ``what``; return the checked lines, too."""
    steps = {8192: (16, 16), 65536: (4, 4)} if run.quick else {8192: (64, 64), 65536: (64, 24)}
    config = {"sizes": TERABYTE, "skew": SKEW, "fraction": 0.05, "lookahead": 64, "steps": steps}
    seen: list[dict[str, Any]] = []

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        if line["free"]:
            raise WrongResult(f"{label}, batch {line['case']}: {line['free']:,} slots are still empty")
        for other in seen:
            if other["case"] != line["case"]:
                continue
            mine, first = sum(line["misses"]), sum(other["misses"])
            if abs(mine / first - 1) > SAME or (what and line[what] != other[what]):
                raise WrongResult(
                    f"{label}, batch {line['case']}: {mine:,} misses where {other['label']} has {first:,}, or other "
                    f"{what or 'rows'}"
                )
        seen.append(line | {"label": label})

    return play(contestants, config, run, check), seen


def _outcome(timings: Timings, seen: list[dict[str, Any]], ours: str, other: str, title: str) -> Outcome:
    value, table, ratios = compare(timings, ours, [other], {line["case"]: int(line["case"]) for line in seen}, title)
    parts = [
        [label, line["case"], *(f"{1e3 * part:.2f}" for part in line["parts"])]
        for label in (ours, other)
        for line in timings.extra[label]
    ]
    notes = [
        f"{seen[0]['slots']:,} slots, all taken, hold the rows that the rule of eviction keeps in the long run: before "
        "the clock they are looked up once, then the window is filled and turned over",
        "misses a batch: " + "; ".join(dict.fromkeys(_misses(line) for line in seen)),
        "fetched rows are the same, row by row: " + ("yes" if _same(seen, "fetched") else "no"),
        "the link moves nothing; the clock has announcing a batch, its plan, the slots of its ids and its release",
    ]
    made = Table(title="Parts, ms, of each round", columns=["contestant", "batch", "announce", "stage", "release"],
                 rows=parts)  # fmt: skip
    data = {"seconds": timings.seconds, "ratios": ratios, "versions": timings.versions, "extra": timings.extra}
    return Outcome(value=value, tables=[table, made], notes=notes, data=data)


def _misses(line: dict[str, Any]) -> str:
    return f"{line['label']}, batch {line['case']}: {sum(line['misses']) / len(line['misses']):,.1f}"


def _same(seen: list[dict[str, Any]], what: str) -> bool:
    return len({(line["case"], line[what]) for line in seen}) == len({line["case"] for line in seen})


def speed(run: Run) -> Outcome:
    """Seconds of the earlier planner over ours, on one core."""
    title = "MLPerf's tables, 5 % slots, Zipf ids, lookahead 64, one core"
    return _outcome(*_play([OURS, other := earlier()], run), OURS.label, other.label, title)


def threads(run: Run) -> Outcome:
    """Seconds on one thread over those on two."""
    title = "MLPerf's tables, 5 % slots, Zipf ids, lookahead 64, two threads"
    return _outcome(*_play([TWO, OURS], run, "plans"), TWO.label, OURS.label, title)


def bars() -> list[Bar]:
    """The promises of planning at the speed of an accelerator."""
    common: dict[str, Any] = {"group": "planning", "rounds": 3}
    return [
        Bar(
            name="planning-speed", title=f"planning a batch with pinned rows, against commit {EARLIER} without",
            must=3.0, aim=5.0, run=speed, **common,
        ),
        Bar(
            name="planning-threads", title="planning a batch on two threads, against one, plans equal to the bit",
            must=1.7, run=threads, **common,
        ),
    ]  # fmt: skip
