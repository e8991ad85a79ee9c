"""Training on several processes: the price of logical shards, two ranks against one process, and against TorchRec.

DLRM with Kaggle's tables. Every side is checked against the float64 reference of the DLRM matrix after three steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.averages import measure_averages
from benchmarks.dlrm_step import TITLES
from benchmarks.dlrm_workload import DLRM_MATRIX, DlrmWorkload, check_model
from benchmarks.harness import Bar, Outcome, Run, Table
from benchmarks.network import measure_network
from benchmarks.rounds import Contestant, Timings, compare, play

__all__ = ["bars"]

SHAPES = DLRM_MATRIX[:2]  # Kaggle's tables, batches of 2,048 and 8,192
SHARDS = 8


def ours(ranks: int, shards: int) -> Contestant:
    label = f"stoker, {ranks} process{'es' * (ranks > 1)}, {shards} shard{'s' * (shards > 1)}"
    return Contestant(label=label, script="stoker_ranks.py", options={"ranks": ranks, "shards": shards})


PLAIN, ONE, TWO = ours(1, 1), ours(1, SHARDS), ours(2, SHARDS)
PEER = Contestant(
    label="TorchRec, 2 processes, row-wise", script="torchrec_ranks.py", environment="fbgemm", options={"ranks": 2}
)


@lru_cache(maxsize=2)
def measure(run: Run, *, peer: bool) -> Timings:
    optimizers = ["rowwise_adagrad"] if run.quick else list(TITLES)
    workloads = {shape.name: DlrmWorkload.make(shape) for shape in SHAPES}

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        check_model(label, workloads[line["shape"]], line["optimizer"], results / line["left"])

    config = DlrmWorkload.config(list(workloads.values()), optimizers)
    config["blocks"] = 4 if run.quick else 9
    return play([PLAIN, ONE, TWO, *([PEER] if peer else [])], config, run, check)


def cases(run: Run) -> dict[str, int]:
    titles = [TITLES["rowwise_adagrad"]] if run.quick else TITLES.values()
    return {f"{title}: {shape.name}": shape.tables.batch for title in titles for shape in SHAPES}


def judged(mine: Contestant, other: Contestant, *, at_most: bool = False) -> Callable[[Run], Outcome]:
    """Return what measures the speed of one side as a multiple of another's, at its worst; or the price of it."""

    def work(run: Run) -> Outcome:
        timings = measure(run, peer=PEER in (mine, other))
        value, table, ratios = compare(timings, mine.label, [other.label], cases(run), f"{mine.label}; {other.label}")
        if at_most:
            value, table = _price(timings, mine.label, other.label, list(cases(run)))
        return Outcome(value=value, tables=[table], data={"seconds": timings.seconds, "ratios": ratios,
                                                         "versions": timings.versions})  # fmt: skip

    return work


def _price(timings: Timings, mine: str, other: str, names: Sequence[str]) -> tuple[float, Table]:
    """Return the largest median of a step's time as a multiple of another's, and a table of them."""
    pairs = {
        name: [a / b for a, b in zip(timings.seconds[mine][name], timings.seconds[other][name], strict=True)]
        for name in names
    }
    rows = [
        [name, f"{statistics.median(each):.3f} ({min(each):.3f}-{max(each):.3f})",
         *(f"{timings.median(label, name) * 1e3:.2f}" for label in (other, mine))]
        for name, each in pairs.items()
    ]  # fmt: skip
    table = Table(title=f"A step of: {mine}", columns=["case", f"of: {other}", "ms before", "ms"], rows=rows)
    return max(map(statistics.median, pairs.values())), table


def bars() -> list[Bar]:
    """What is asked of ranks on one machine."""
    made: list[tuple[str, str, float, bool, Callable[[Run], Outcome]]] = [
        ("ranks-price", "step in 8 logical shards, of that in 1, one process, batches of 2,048 and 8,192", 1.05, True,
         judged(ONE, PLAIN, at_most=True)),
        ("ranks-speed", "2 processes of 1 thread against one of 2 threads, the same bits", 0.9, False,
         judged(TWO, ONE)),
        ("ranks-vs-torchrec", "2 processes against TorchRec's row-wise sharding on gloo", 1.5, False,
         judged(TWO, PEER)),
        ("ranks-network", "4 ranks, 1 Gbit/s and 1 ms: exposed communication with lookahead 16, of that with 1", 0.25,
         True, measure_network),
    ]  # fmt: skip
    speeds = [
        Bar(name=name, group="ranks", title=title, must=must, at_most=most, rounds=3, run=work)
        for name, title, must, most, work in made
    ]
    averages = Bar(
        name="ranks-average", group="ranks", must=0.02, at_most=True, unit=" points", digits=3, rounds=3,
        title="AUC lost if copies of rows are averaged every 16 steps (cDLRM) on 4 ranks, SGD", run=measure_averages,
    )  # fmt: skip
    return [*speeds, averages]
