"""Looking 64 batches ahead against knowing the whole future: misses on a real and on a generated stream of ids.

Nothing is timed: ``stoker.replay`` counts, and counts do not depend on the machine. Before they are believed, the fast
simulation must equal the plain-Python one on the first batches of each trace.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness import CACHE, Bar, NotRun, Outcome, Run, Table, WrongResult
from benchmarks.rounds import ROOT
from benchmarks.workload import SKEW, kaggle_like
from stoker import synthetic
from stoker.data.dataset import Dataset
from stoker.data.prepare import run_prepare
from stoker.placement.id_trace import dataset_space, dataset_steps, record
from stoker.placement.replay import Replay, replay, simulate
from stoker.placement.replay_reference import CacheStrategy, replay_reference

__all__ = ["bars", "percent_above"]

BATCH = 2048
FRACTION = 0.1  # of the rows lie in fast memory
OURS = "lookahead-64"
STRATEGIES = ("lru", "lfu", "lookahead-16", OURS, "lookahead-256", "lookahead-512", "host-pipelined", "belady")
ORDERS = {"in order of time": None, "shuffled, as training reads": 0}  # seed of the order; the first one counts
CHECKED_STEPS = 12  # equal to the plain simulation on so many batches, with slots so few that rows leave
DRIFT = 1.0  # every rank of the generated log changes hands once


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A stream of ids in the order of time."""

    title: str
    open: Callable[[Run], Dataset]


def globo(run: Run) -> Dataset:
    """Globo clicks with their negatives, the first 80 % of the log in order of time; prepared once into the cache.

    Raises:
        NotRun: the log is not on this machine.
    """
    source = Path(os.environ.get("STOKER_DATA", ROOT.parent / "shared" / "data")) / "globo" / "clicks.parquet"
    if not source.exists():
        raise NotRun(f"{source.name} not found (set STOKER_DATA to the folder of the data sets)")
    out = CACHE / "globo_progressive"
    if not (out / "manifest.json").exists():
        run.log("preparing globo")
        run_prepare("globo", [source], out=out, preset="progressive")
    return Dataset(out)


def zipf(run: Run) -> Dataset:
    """Kaggle's 26 tables scaled to a million rows; synthetic."""
    rows = 400_000 if run.quick else 2_000_000
    out = CACHE / f"zipf_drift_{rows}"
    if not (out / "manifest.json").exists():
        run.log(f"writing {rows:,} synthetic rows")
        sizes = kaggle_like(1_000_000)
        synthetic.dataset(out, rows=rows, sizes=sizes, num_dense=1, alpha=SKEW, drift=DRIFT)
    return Dataset(out)


TRACES = (
    Trace(title="Globo", open=globo),
    Trace(title=f"Zipf {SKEW} with drift {DRIFT:g} (synthetic)", open=zipf),
)


def check(data: Dataset) -> None:
    """The fast simulation of the trace's first batches equals the plain one.

    Raises:
        WrongResult: it does not.
    """
    space = dataset_space(data)
    tables = len(space.names)
    _, steps = dataset_steps(data, space, batch_size=BATCH, seed=None, steps=CHECKED_STEPS)
    keys = list(steps)
    trace, _ = record(keys)
    batches = [Counter(divmod(key, tables) for key in step.tolist()) for step in keys]
    for in_flight in (1, 3):
        flights = (batches[max(0, step - in_flight + 1) : step + 1] for step in range(len(batches)))
        slots = max(len(set(itertools.chain(*flight))) for flight in flights) * 11 // 10
        for name in ("lru", "lfu", "lookahead-4", "host-pipelined", "belady"):
            strategy = CacheStrategy.parse(name)
            fast = simulate(trace, strategy, slots, in_flight)
            plain = replay_reference(batches, slots, strategy, in_flight=in_flight)
            if fast != plain or not plain.written_back:
                raise WrongResult(f"{name}, {slots:,} slots, in_flight={in_flight}: {fast}, the definition {plain}")


def percent_above(found: Replay) -> float:
    """Misses of ours above Belady's in percent; infinite unless they are fewer than LRU's and LFU's."""
    ours = found[OURS]
    if ours.misses >= min(found["lru"].misses, found["lfu"].misses) or ours.above_belady is None:
        return math.inf
    return 100 * ours.above_belady


def _table(title: str, found: Replay) -> Table:
    return Table(
        title=f"{title}: {found.steps:,} batches of {BATCH}, {found.slots:,} slots for {found.num_rows:,} rows",
        columns=["strategy", "hit rate", "of lookups", "misses", "above Belady", "rows in/step", "rows out/step"],
        rows=[
            [
                figures.strategy,
                f"{figures.hit_rate:.2%}",
                f"{figures.lookup_hit_rate:.2%}",
                f"{figures.misses:,}",
                "" if figures.above_belady is None else f"{figures.above_belady:+.2%}",
                f"{figures.misses / found.steps:,.1f}",
                f"{figures.written_back / found.steps:,.1f}",
            ]
            for figures in found.strategies
        ],
    )


def measure(traces: Sequence[Trace], run: Run) -> Outcome:
    """The worst excess over the traces, in order of time."""
    tables, notes, values, data = [], [], [], {}
    for trace in traces:
        dataset = trace.open(run)
        check(dataset)
        for order, seed in ORDERS.items():
            title = f"{trace.title}, {order}"
            run.log(f"replaying {title}")
            found = replay(
                dataset,
                fraction=FRACTION,
                batch_size=BATCH,
                seed=seed,
                steps=300 if run.quick else None,
                strategies=STRATEGIES,
            )
            above = percent_above(found)
            values += [above] if seed is None else []
            tables.append(_table(title, found))
            first = found.strategies[0].compulsory
            notes.append(f"{title}: {first:,} misses are first uses, which no strategy avoids")
            if math.isinf(above):
                notes.append(f"{title}: {OURS} misses no less than LRU or LFU")
            data[title] = found.to_dict()
    notes.append("checked: the first batches of each trace give the same counts in the plain-Python simulation")
    if run.quick:
        notes.append("quick: the first 300 batches of each trace")
    return Outcome(value=max(values), tables=tables, notes=notes, data=data)


def bars() -> list[Bar]:
    """The promise of the lookahead cache."""
    return [
        Bar(
            name="lookahead-vs-belady",
            group="lookahead",
            title="misses of lookahead 64 above Belady's, 10 % of the rows in slots; fewer than LRU's and LFU's",
            must=5.0,
            at_most=True,
            unit=" %",
            run=partial(measure, TRACES),
        )
    ]
