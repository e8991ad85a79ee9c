"""Contestants in processes of their own, round by round: A B A B, checked before any time is handed out.

A contestant is a script of ``benchmarks/peers``, run by its environment's Python. It takes one JSON
argument and prints JSON lines; lines that are not JSON are ignored.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Crashed, NotRun, Run, Table, WrongResult

__all__ = ["Contestant", "Timings", "compare", "peer_python", "play", "work", "worker_env"]

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".peers"
SCRIPTS = Path(__file__).parent / "peers"

#: the same for everybody: large tensors keep their pages instead of giving them back at every free
TUNABLES = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=100000000000"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A script and the environment it runs in."""

    label: str
    script: str  # file name under benchmarks/peers
    options: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None  # peer environment; None is ours
    threads: int = 2
    sources: Path | None = None  # of the package, if the environment is ours; None is this clone's


def peer_python(environment: str | None) -> Path:
    """The Python of a peer environment, or ours.

    Raises:
        NotRun: the environment was not built.
    """
    if environment is None:
        return Path(sys.executable)
    python = PEERS / environment / "bin" / "python"
    if not (PEERS / environment / "built").exists():
        raise NotRun(f"make peers (environment {environment!r} is missing)")
    return python


def worker_env(contestant: Contestant) -> dict[str, str]:
    """Equal settings for all: allocator, threads, no user site, and our sources for ourselves only."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_", "NUMBA_", "KMP_", "PYTHON"))}
    env |= {
        "GLIBC_TUNABLES": TUNABLES,
        "OMP_NUM_THREADS": str(contestant.threads),
        "MKL_NUM_THREADS": str(contestant.threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    if contestant.environment is None:
        env["PYTHONPATH"] = str(contestant.sources or ROOT / "src")
    return env


def work(contestant: Contestant, config: dict[str, Any], *, timeout: float = 3600.0) -> list[dict[str, Any]]:
    """Run one contestant once and return its JSON lines.

    Raises:
        NotRun: its environment is missing.
        Crashed: it died, printed nothing or ran past ``timeout`` seconds.
    """
    argument = json.dumps({**config, **contestant.options, "threads": contestant.threads})
    command = [str(peer_python(contestant.environment)), str(SCRIPTS / contestant.script), argument]
    try:
        done = subprocess.run(
            command,
            env=worker_env(contestant),
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Crashed(f"{contestant.label} was stopped after {timeout:g} seconds") from None
    lines = []
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            lines.append(json.loads(line))
    if done.returncode or not lines:
        tail = "\n".join(done.stderr.splitlines()[-15:])
        end = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise Crashed(f"{contestant.label} ended with {end}:\n{tail}")
    return lines


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds per step, contestant label -> case -> one value a round; all belong to checked results."""

    seconds: dict[str, dict[str, list[float]]]
    fastest: dict[str, dict[str, float]]  # the fastest block of all rounds: what noise left alone
    versions: dict[str, Any]
    extra: dict[str, list[dict[str, Any]]]  # contestant label -> whatever else it said, per round

    def median(self, label: str, case: str) -> float:
        return statistics.median(self.seconds[label][case])

    def best(self, labels: Sequence[str], case: str) -> str:
        """The fastest of several contestants by median."""
        return min(labels, key=lambda label: self.median(label, case))


def play(
    contestants: Sequence[Contestant],
    config: dict[str, Any],
    run: Run,
    check: Callable[[str, dict[str, Any], Path], None],
    *,
    rotate: bool = True,
) -> Timings:
    """Run all contestants in interleaved rounds of fresh processes.

    Each worker gets ``results``, a directory for what ``check(label, line, directory)`` shall look at;
    ``check`` sees every line with ``"event": "checked"`` and raises WrongResult. A contestant that was
    never checked is wrong too. ``rotate`` lets each contestant begin a round in turn; without it the first
    always does.
    """
    for contestant in contestants:
        peer_python(contestant.environment)
    seconds: dict[str, dict[str, list[float]]] = {c.label: {} for c in contestants}
    fastest: dict[str, dict[str, float]] = {c.label: {} for c in contestants}
    extra: dict[str, list[dict[str, Any]]] = {c.label: [] for c in contestants}
    versions: dict[str, Any] = {}
    for number in range(run.rounds):
        turn = number % len(contestants) if rotate else 0
        for contestant in [*contestants[turn:], *contestants[:turn]]:
            run.log(f"round {number + 1}/{run.rounds}: {contestant.label}")
            with tempfile.TemporaryDirectory(prefix="stoker-bench-") as results:
                lines = work(contestant, {**config, "results": results, "quick": run.quick})
                checked = set()
                for line in lines:
                    if line["event"] == "checked":
                        check(contestant.label, line, Path(results))
                        checked.add(line["case"])
            for line in lines:
                if line["event"] == "timed":
                    if line["case"] not in checked:
                        raise WrongResult(f"{contestant.label} timed {line['case']!r} without a check")
                    case, value = line["case"], line["seconds"]
                    seconds[contestant.label].setdefault(case, []).append(value)
                    least = fastest[contestant.label].get(case, float("inf"))
                    fastest[contestant.label][case] = min(least, line.get("fastest", value))
                elif line["event"] == "versions":
                    versions[contestant.label] = line["versions"]
                elif line["event"] == "extra":
                    extra[contestant.label].append(line)
    return Timings(seconds=seconds, fastest=fastest, versions=versions, extra=extra)


def compare(
    timings: Timings,
    ours: str,
    peers: Sequence[str],
    cases: dict[str, int],
    title: str,
    unit: str = "ms/step",
) -> tuple[float, Table, dict[str, float]]:
    """The smallest over ``cases`` of the median ratio (peer seconds / our seconds) against the best peer.

    Ratios are formed pair by pair within a round. ``cases`` maps a case to its samples per step; a peer may leave some
    out. Returns the value, a table with every contestant, and the ratio of each case.
    """
    rows, ratios = [], {}
    for case, samples in cases.items():
        there = [peer for peer in peers if case in timings.seconds[peer]]
        best = timings.best(there, case)
        for label in [ours, *there]:
            own = timings.seconds[label][case]
            pairs = [peer / mine for peer, mine in zip(own, timings.seconds[ours][case], strict=True)]
            if label == best:
                ratios[case] = statistics.median(pairs)
            rate = [samples / value / 1e3 for value in own]
            scale = 1 if unit == "s" else 1e3
            rows.append(
                [
                    label + (" (best peer)" if label == best else ""),
                    case,
                    f"{statistics.median(own) * scale:.2f}",
                    f"{timings.fastest[label][case] * scale:.2f}",
                    f"{statistics.median(rate):.1f}",
                    f"{min(rate):.1f}-{max(rate):.1f}",
                    "" if label == ours else f"{statistics.median(pairs):.2f} ({min(pairs):.2f}-{max(pairs):.2f})",
                ]
            )
    table = Table(
        title=title,
        columns=["contestant", "case", unit, "fastest", "k samples/s", "min-max", "ours faster by (min-max)"],
        rows=rows,
    )
    return min(ratios.values()), table, ratios
