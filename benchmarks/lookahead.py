"""Looking as far ahead as evictions need, against knowing the whole future: misses on a real and a generated stream.

``stoker.replay`` counts, and counts do not depend on the machine. Before they are believed, the fast simulation must
equal the plain-Python one on the first batches of each trace, and the planner itself, on the batches that
:func:`stoker.stage` hands out, must come to the same number with the window that adapts, and to Belady's number with
an epoch lookahead. What is timed is the recording of next uses.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, WrongResult, data_files
from benchmarks.naive_replay import replay_reference
from benchmarks.workload import SKEW, kaggle_like
from stoker import synthetic
from stoker.dataset.dataset import Dataset
from stoker.optim import SGD
from stoker.placement.replay import CacheStrategy, Replay, dataset_space, dataset_steps, record, replay, simulate
from stoker.prep.prepare import run_prepare
from stoker.tables import Cached, EmbeddingTables, stage, tables_for
from stoker.tables.slots.slotted import SlottedRows
from stoker.training.config import TrainConfig
from stoker.training.placing import Epochs, StageTotals
from stoker.training.step_time import measure_step

__all__ = ["bars", "percent_above"]

BATCH = 2048
FRACTION = 0.1  # of the rows lie in fast memory
OURS = "adaptive"
MEMORY = "256MiB"  # of the window that adapts
WINDOW = 64  # batches, fixed, with an epoch lookahead
FORESEEN = f"lookahead {WINDOW} + epoch lookahead"
DIM = 64  # of the training step that recording is compared with
STRATEGIES = (
    "lru", "lfu", "lookahead-8", "lookahead-64", "lookahead-256", "lookahead-512", OURS, "pinned", "host-pipelined",
    "belady",
)  # fmt: skip
ORDERS = {"in order of time": None, "shuffled, as training reads": 0}  # seed of the order; the first one counts
_ORDER_OF = {seed: order for order, seed in ORDERS.items()}
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
    clicks = data_files("globo/clicks.parquet")
    out = CACHE / "globo_progressive"
    if not (out / "manifest.json").exists():
        run.log("preparing globo")
        run_prepare("globo", clicks, out=out, preset="progressive")
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
        for name in ("lru", "lfu", "lookahead-4", OURS, "host-pipelined", "belady"):
            strategy = CacheStrategy.parse(name)
            fast = simulate(trace, strategy, slots, in_flight)
            plain = replay_reference(batches, slots, strategy, in_flight=in_flight)
            if fast != plain or not plain.written_back:
                raise WrongResult(f"{name}, {slots:,} slots, in_flight={in_flight}: {fast}, the definition {plain}")


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """What :func:`stoker.stage` did with next uses recorded beforehand."""

    misses: int
    seconds: float  # to record them
    step: float  # seconds of a training step with all rows resident


def planned(data: Dataset, found: Replay, seed: int | None, as_in: str, **options: Any) -> tuple[int, float]:
    """Stage the batches of a replay: the real planner on the real stream, with rows of one column that nobody trains.

    Returns:
        The misses, and the seconds in which next uses were recorded.

    Raises:
        WrongResult: it fetched other than the replayed strategy ``as_in`` does.
    """
    tables = EmbeddingTables(
        tables_for(data.schema, 1),
        features=[feature.name for feature in data.schema.features],
        optimizer=SGD(lr=0.1),
        device="cpu",
        placement=Cached(fraction=FRACTION, window=MEMORY, home="file", path=str(CACHE)),
    )
    (storage,) = (group.storage for group in tables.groups)
    assert isinstance(storage, SlottedRows)
    batches = Epochs(data.train.batches(BATCH, seed=seed), found.steps)
    totals = StageTotals()
    with totals:
        for _ in stage(batches, tables, in_flight=1, background=False, **options):
            pass
    misses, said = storage.stats.fetched, found[as_in].misses
    if misses != said or storage.num_slots != found.slots:
        raise WrongResult(
            f"{options}: {misses:,} misses in {storage.num_slots:,} slots, {as_in} {said:,} in {found.slots:,}"
        )
    tables.close()
    return misses, totals.seconds()["epoch_lookahead"]


def percent_above(found: Replay, misses: int) -> float:
    """Misses above Belady's in percent; infinite unless they are fewer than LRU's and LFU's."""
    if misses >= min(found["lru"].misses, found["lfu"].misses):
        return math.inf
    return 100 * (misses / found["belady"].misses - 1)


def _table(title: str, found: Replay, known: Foreseen) -> Table:
    """All strategies; ours with an epoch lookahead stands behind Belady's."""
    rows = [
        [
            figures.strategy,
            f"{figures.hit_rate:.2%}",
            f"{figures.lookup_hit_rate:.2%}",
            f"{figures.misses:,}",
            "" if figures.above_belady is None else f"{figures.above_belady:+.2%}",
            "" if figures.ahead is None else f"{figures.ahead:,}",
            "" if figures.window_mib is None else f"{figures.window_mib:.0f}",
            f"{figures.misses / found.steps:,.1f}",
            f"{figures.written_back / found.steps:,.1f}",
        ]
        for figures in found.strategies
    ]
    ours = [FORESEEN, f"{1 - known.misses / found.rows_needed:.2%}", "", f"{known.misses:,}"]
    ours += [
        f"{known.misses / found['belady'].misses - 1:+.2%}",
        str(WINDOW),
        "",
        f"{known.misses / found.steps:,.1f}",
        "",
    ]
    moved = ["rows in/step", "rows out/step"]
    return Table(
        title=f"{title}: {found.steps:,} batches of {BATCH}, {found.slots:,} slots for {found.num_rows:,} rows",
        columns=["strategy", "hit rate", "of lookups", "misses", "above Belady", "ahead", "its MiB", *moved],
        rows=[rows[0], ours, *rows[1:]],
    )


@cache
def _measured(trace: Trace, seed: int | None, run: Run) -> tuple[Replay, Foreseen]:
    """Counted once for both bars."""
    dataset = trace.open(run)
    check(dataset)
    run.log(f"replaying {trace.title}, {_ORDER_OF[seed]}")
    steps = min(300, len(dataset.train.batches(BATCH))) if run.quick else None  # next uses are known within an epoch
    found = replay(
        dataset, fraction=FRACTION, batch_size=BATCH, seed=seed, steps=steps, strategies=STRATEGIES, window=MEMORY
    )
    run.log(f"staging {trace.title}, {_ORDER_OF[seed]}, and with an epoch lookahead")
    planned(dataset, found, seed, OURS)
    misses, seconds = planned(dataset, found, seed, "belady", lookahead=WINDOW, epoch_lookahead=True)
    step = measure_step(TrainConfig(batch_size=BATCH, embedding_dim=DIM), dataset).resident
    return found, Foreseen(misses=misses, seconds=seconds, step=step)


def measure(traces: Sequence[Trace], run: Run) -> Outcome:
    """The worst excess over the traces, in order of time and shuffled, with the window alone."""
    tables, notes, values, data = [], [], [], {}
    for trace in traces:
        for order, seed in ORDERS.items():
            title = f"{trace.title}, {order}"
            found, known = _measured(trace, seed, run)
            above = percent_above(found, found[OURS].misses)
            values.append(above)
            tables.append(_table(title, found, known))
            first = found.strategies[0].compulsory
            notes.append(f"{title}: {first:,} misses are first uses, which no strategy avoids")
            if math.isinf(above):
                notes.append(f"{title}: {OURS} misses no less than LRU or LFU")
            data[title] = found.to_dict()
    notes.append("checked: the first batches of each trace give the same counts in the plain-Python simulation")
    notes.append("checked: the real planner behind stage() misses exactly as often as the simulation on every trace")
    return Outcome(value=max(values), tables=tables, notes=_quick(notes, run), data=data)


def measure_epoch_lookahead(traces: Sequence[Trace], run: Run) -> Outcome:
    """The same with the next uses of the epoch recorded, and what recording costs."""
    rows, notes, values, data = [], [], [], {}
    for trace in traces:
        for order, seed in ORDERS.items():
            title = f"{trace.title}, {order}"
            found, known = _measured(trace, seed, run)
            values += [percent_above(found, known.misses)] if seed is None else []
            cells = [f"{found[f'lookahead-{WINDOW}'].misses:,}", f"{known.misses:,}", f"{known.seconds:.2f}"]
            cells += [f"{1e6 * known.seconds / found.lookups:.3f}", f"{1e3 * known.step:.1f}"]
            rows.append([title, *cells, f"{known.seconds / (known.step * found.steps):.2%}"])
            data[title] = asdict(known)
    columns = [
        "trace",
        f"misses, lookahead {WINDOW}",
        "with epoch lookahead",
        "recording s",
        "s/M lookups",
        "step ms",
        "of the epoch",
    ]
    notes.append("checked: the real planner behind stage() misses exactly as often as Belady's rule on every trace")
    notes.append(
        f"step: a training step at D {DIM} with all rows resident; recording goes before the epoch's first one"
    )
    table = Table(title="With the next uses of the epoch recorded beforehand", columns=columns, rows=rows)
    return Outcome(value=max(values), tables=[table], notes=_quick(notes, run), data=data)


def _quick(notes: list[str], run: Run) -> list[str]:
    return [*notes, "quick: the first 300 batches of each trace at most"] if run.quick else notes


def bars() -> list[Bar]:
    """The promise of the lookahead cache, with the window alone and with the whole epoch known."""
    title = "misses of {} above Belady's, 10 % of the rows in slots; fewer than LRU's and LFU's"
    return [
        Bar(
            name=name,
            group="lookahead",
            title=title.format(how),
            must=must,
            at_most=True,
            unit=" %",
            run=partial(measured, TRACES),
        )
        for name, how, must, measured in (
            ("lookahead-vs-belady", f"a window that adapts within {MEMORY}", 2.0, measure),
            ("epoch-lookahead-vs-belady", "lookahead 64 and an epoch lookahead", 5.0, measure_epoch_lookahead),
        )
    ]
