"""Rows that do not fit: a tenth of them in fast memory against all, a file against memory maps, a table of 100 GiB, and
what planning costs.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dlrm_workload import DlrmShape, DlrmWorkload, check_model
from benchmarks.harness import CACHE, Bar, NotRun, Outcome, Run, Table, WrongResult
from benchmarks.lookahead import globo
from benchmarks.peers.placed_tools import case_name
from benchmarks.placed_workload import (
    EPS,
    LR,
    SPREAD,
    FileTrace,
    check_close,
    check_same_losses,
    large_rows,
    planned,
)
from benchmarks.rounds import Contestant, Timings, compare, play
from benchmarks.workload import (
    BETAS,
    CHECKED_STEPS,
    SKEW,
    EmbeddingWorkload,
    Shape,
    check_rows,
    corner,
    kaggle_shape,
)
from benchmarks.workload import EPS as ROW_EPS
from benchmarks.workload import LR as ROW_LR

__all__ = ["bars"]

DIM = 64
FRACTION = 0.1  # of the rows lie in fast memory
LOOKAHEAD = 64
GIB = 2**30
LARGE_BUDGET = "3.5GiB"  # for a table of 100 GiB

RESIDENT = Contestant(label="all rows resident", script="stoker_placed.py")
PLACED = Contestant(label="stoker, 10 % in slots", script="stoker_placed.py", options={"fraction": FRACTION})
IN_FILE = Contestant(label="stoker, file", script="stoker_file.py")
MAPPED = [
    Contestant(label="memory-mapped rows", script="mapped_rows.py", options={"advice": None}),
    Contestant(label="memory-mapped rows, no read-ahead", script="mapped_rows.py", options={"advice": "random"}),
]
LARGE = Contestant(label="stoker, 100 GiB", script="stoker_large.py")
PLANNING = Contestant(label="stoker, placed beside resident", script="stoker_planning.py")


def _moved(timings: Timings, label: str) -> Table:
    """What our contestant brought into its slots, by case."""
    rows = []
    for line in timings.extra[label][: len(timings.seconds[label])]:
        cells = [f"{line['rows']:,.0f}", f"{line['hit_rate']:.2%}", f"{line['fetched']:,.0f}"]
        rows.append([line["case"], *cells])
    return Table(title="Rows per timed step", columns=["case", "distinct", "in slots", "fetched"], rows=rows)


def _data(timings: Timings, ratios: dict[str, float]) -> dict[str, Any]:
    return {"seconds": timings.seconds, "ratios": ratios, "versions": timings.versions, "extra": timings.extra}


def step(run: Run) -> Outcome:
    """Throughput of the placed training loop over that of the resident one."""
    data = globo(run)
    # Warm-up and timed steps; every run does the same ones, so that it ends with the same bits.
    steps = {2048: (32, 24), 8192: (8, 8)} if run.quick else {2048: (200, 200), 8192: (80, 60)}
    config = {
        "dataset": str(data.path), "steps": steps, "dim": DIM, "lookahead": LOOKAHEAD, "lr": 0.1, "row_lr": LR,
        "bottom": (512, 256, DIM), "top": (512, 512, 256),
    }  # fmt: skip
    first: dict[int, tuple[np.ndarray, str]] = {}

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        batch = line["batch"]
        losses = np.load(results / f"losses_{batch}.npy")
        expected, rows = first.setdefault(batch, (losses, line["rows"]))
        check_same_losses(f"{label}, batch {batch}", losses, expected)
        if rows != line["rows"]:
            raise WrongResult(f"{label}, batch {batch}: rows or their state differ from the first run's")

    timings = play([PLACED, RESIDENT], config, run, check)
    cases = {case_name(batch): batch for batch in steps}
    title = f"Globo in order of time, D {DIM}: whole training loop, reader included"
    value, table, ratios = compare(timings, PLACED.label, [RESIDENT.label], cases, title)
    notes = [
        "checked: all losses, rows and states at the end are equal to the bit between all runs",
        f"{sum(data.schema.num_embeddings.values()):,} rows in all; bottom {len(data.schema.dense)}-512-256-64, top "
        "512-512-256-1, row-wise Adagrad on the rows; the smaller ratio counts",
    ]
    return Outcome(value=value, tables=[table, _moved(timings, PLACED.label)], notes=notes, data=_data(timings, ratios))


def _on_file(run: Run, memory: str) -> tuple[Timings, dict[str, int], FileTrace, int]:
    """Rows in a file, ours and memory-mapped ones; ``memory`` says what the page cache may keep (drop_steps)."""
    steps = {2048: (24, 16)} if run.quick else {2048: (120, 60), 8192: (40, 24)}
    trace = FileTrace.make(globo(run), {b: sum(n) + LOOKAHEAD + 16 for b, n in steps.items()}, DIM)
    slots = round(FRACTION * trace.real_rows)
    config = {**trace.config(), "steps": steps, "slots": slots, "lookahead": LOOKAHEAD, "memory": memory}

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        trace.check(label, line["batch"], sum(steps[line["batch"]]), results)

    for batch, counts in steps.items():
        trace.reference(batch, sum(counts))
    timings = play([IN_FILE, *MAPPED], config, run, check)
    return timings, {case_name(batch): batch for batch in steps}, trace, slots


def mapped(run: Run) -> Outcome:
    """The same where the page cache may keep as much as our slots hold, and where it may keep everything."""
    tables, ratios, data = [], {}, {}
    for memory, title in (("equal", "page cache of the size of our slots"), ("plenty", "page cache never dropped")):
        run.log(title)
        timings, cases, trace, slots = _on_file(run, memory)
        _, table, found = compare(timings, IN_FILE.label, [each.label for each in MAPPED], cases, title)
        tables.append(table)
        ratios |= {f"{memory}: {case}": ratio for case, ratio in found.items()}
        data[memory] = timings.seconds
    notes = [
        "checked: all touched rows and the last lookup within rounding of a float64 reference",
        f"equal: the maps' pages are dropped as soon as they exceed the bytes of our {slots:,} slots, our file's pages "
        "before every step, both inside the clock",
        "ours as stoker.plan chooses, which is told of the page cache: mapped where it is unlimited, else behind slots",
        f"Globo on a file of {trace.num_rows:,} rows, D {DIM}; the worst case counts; asked where the page cache is as "
        "large as our slots: 4x, aim 8x",
    ]
    return Outcome(value=min(ratios.values()), tables=tables, notes=notes, data={"ratios": ratios, "seconds by": data})


CACHED_SHAPES = (
    *(corner((16,) * 8, 2048, 1, skew, scattered=False) for skew in (1.05, 0.6, 0.0)),
    corner((64,) * 8, 1024, 1, 1.05, scattered=False),
    corner((16,) * 8, 1024, 20, 0.8, scattered=False),
)


KINDS = ("Cached", "HotCold")
ALL = "all rows resident"
PINNED = 0.8  # of the slots


def _players(script: str, options: dict[str, Any]) -> list[Contestant]:
    """All rows resident, and a tenth of them in slots by each strategy, most of these pinned."""
    slots = {"fraction": FRACTION, "pinned": PINNED, "lookahead": LOOKAHEAD}
    behind = [
        Contestant(label=f"{kind}, 10 %", script=script, options=options | slots | {"placement": kind})
        for kind in KINDS
    ]
    return [Contestant(label=ALL, script=script, options=options), *behind]


def _against_resident(timings: Timings, cases: dict[str, int]) -> tuple[list[Table], dict[str, float]]:
    """Return a table for each strategy, and the ratio of the better one on each case."""
    found = [compare(timings, f"{kind}, 10 %", [ALL], cases, f"{kind} against resident rows") for kind in KINDS]
    return [table for _, table, _ in found], {case: max(ratios[case] for *_, ratios in found) for case in cases}


def cached(run: Run, shapes: Sequence[Shape] = CACHED_SHAPES) -> Outcome:
    """Lookup, backward and update with a tenth of the rows in slots over all resident: the rows alone, nothing else."""
    chosen = shapes[:2] if run.quick else shapes
    workloads = {shape.name: EmbeddingWorkload.make(shape) for shape in chosen}
    for workload in workloads.values():
        workload.reference("rowwise_adagrad")
    first: dict[str, dict[str, np.ndarray]] = {}

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        found = dict(np.load(results / line["left"]))
        check_rows(label, "rowwise_adagrad", workloads[line["case"]].reference("rowwise_adagrad"), found)
        expected = first.setdefault(line["case"], found)
        if any(not np.array_equal(found[name], expected[name]) for name in expected):
            raise WrongResult(f"{label}, {line['case']}: not the first run's bits")

    config = {
        "cases": [workload.case() for workload in workloads.values()], "optimizer": "rowwise_adagrad",
        "checked_steps": CHECKED_STEPS, "lr": ROW_LR, "eps": ROW_EPS, "betas": BETAS,
        "seconds": 0.5 if run.quick else 2.0,
    }  # fmt: skip
    timings = play(_players("stoker_embedding.py", {}), config, run, check)
    tables, ratios = _against_resident(timings, {shape.name: shape.batch for shape in chosen})
    notes = [
        "checked: rows and lookups equal a float64 reference within rounding, and all resident rows to the bit",
        f"{PINNED:.0%} of the slots are pinned; no dense part: nothing to hide the transfer of rows behind",
        "the better strategy of each shape counts, as stoker.plan chooses by the costs that it measures; asked on the "
        "first three shapes: 0.45x, 0.30x and 0.25x",
    ]
    data = {"seconds": timings.seconds, "ratios": ratios}
    return Outcome(value=min(ratios.values()), tables=tables, notes=notes, data=data)


@lru_cache(maxsize=1)
def _small_dlrm(run: Run) -> tuple[Timings, list[Table], list[float]]:
    """Time the training steps of a small DLRM on the first three shapes; return the ratios of the better strategy."""
    workloads = {}
    for tables in CACHED_SHAPES[:3]:
        shape = DlrmShape(tables=tables, layers="small")
        workloads[shape.name] = DlrmWorkload.make(shape)
    first: dict[str, dict[str, np.ndarray]] = {}

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        check_model(label, workloads[line["shape"]], "rowwise_adagrad", results / line["left"])
        found = dict(np.load(results / line["left"]))
        expected = first.setdefault(line["case"], found)
        if any(not np.array_equal(found[name], expected[name]) for name in expected):
            raise WrongResult(f"{label}, {line['case']}: not the first run's bits")

    config = DlrmWorkload.config(list(workloads.values()), ["rowwise_adagrad"])
    config["seconds"] = 0.5 if run.quick else 2.0
    for case in config["cases"]:
        case["shares"] = False
    players = _players("stoker_dlrm.py", {"dense_dtype": "float32", "compile": False})
    timings = play(players, config, run, check)
    cases = {f"row-wise Adagrad: {name}": each.shape.tables.batch for name, each in workloads.items()}
    found, ratios = _against_resident(timings, cases)
    return timings, found, list(ratios.values())


def _small_bar(shape: int) -> Callable[[Run], Outcome]:
    """Return the bar of a shape: throughput of training with a tenth of the rows in slots over all resident."""

    def dlrm(run: Run) -> Outcome:
        timings, tables, ratios = _small_dlrm(run)
        notes = [
            "checked: layers, rows and logits of the first steps equal a float64 reference within rounding, and the "
            "resident model's to the bit",
            f"{PINNED:.0%} of the slots are pinned; all products are a tenth of those of Kaggle's DLRM (bottom "
            "13-128-64-16, top 52-256-96-1); the better strategy counts, as stoker.plan chooses by measured costs",
        ]
        return Outcome(value=ratios[shape], tables=tables, notes=notes, data=_data(timings, {}) | {"ratios": ratios})

    return dlrm


def file(run: Run) -> Outcome:
    """How many times faster than memory-mapped rows, where rows must come from the disk."""
    timings, cases, trace, slots = _on_file(run, "dropped")
    title = f"Globo in order of time on a file of {trace.num_rows:,} rows, D {DIM}: lookup, backward, row-wise Adagrad"
    value, table, ratios = compare(timings, IN_FILE.label, [each.label for each in MAPPED], cases, title)
    notes = [
        "checked: all touched rows and the last lookup within rounding of a float64 reference",
        "the file's pages are dropped from the page cache before the first and every fourth step, inside the clock",
        f"ids lie scattered over {SPREAD} times as many rows by a fixed permutation: only by chance do two of a batch "
        "share a page",
        f"ours: every row is in the file before it starts; {slots:,} slots, a tenth of the real rows; rows that leave "
        "are appended, and segments cleaned, inside the clock",
    ]
    if run.quick:
        notes.append("quick: batch 2048 only")
    return Outcome(
        value=value, tables=[table, _moved(timings, IN_FILE.label)], notes=notes, data=_data(timings, ratios)
    )


def large(run: Run) -> Outcome:
    """Peak memory of training a table of 100 GiB, without the interpreter and its libraries."""
    folder = CACHE / "placed_large"
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 24 * GIB:
        raise NotRun(f"24 GiB of free disk under {CACHE.name} (there are {free / GIB:.0f})")
    config = {
        "num_rows": 400_000_000, "dim": DIM, "batch": 2048, "features": 8, "lookahead": LOOKAHEAD, "skew": SKEW,
        "steps": 80 if run.quick else 400, "fill_batch": 8192, "grads": 4, "lr": LR, "eps": EPS, "folder": str(folder),
    }  # fmt: skip
    config |= planned(config, LARGE_BUDGET)
    seen: list[dict[str, Any]] = []

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        rows = np.load(results / "rows.npy")
        check_close(label, "rows", np.load(results / "weight.npy"), large_rows(config, line, rows))
        seen.append(line)

    timings = play([LARGE], config, Run.of(quick=run.quick, rounds=1), check)
    (found,) = seen
    cells = [
        ("table with its state", f"{found['table_bytes'] / GIB:.1f} GiB"),
        ("slots", f"{found['slots']:,} ({config['memory'] / GIB:.2f} GiB), {found['resident_slots']:,} taken"),
        ("steps/s", f"{1 / found['mean']:.1f}"),
        ("ms/step, median", f"{found['median'] * 1e3:.1f}"),
        ("distinct rows per step", f"{found['rows']:,.0f}"),
        ("of them in slots", f"{found['hit_rate']:.2%}"),
        ("rows in, rows out per step", f"{found['fetched']:,.0f}, {found['written']:,.0f}"),
        ("peak memory after the imports", f"{found['peak'] / GIB:.2f} GiB"),
        ("interpreter and libraries before", f"{found['baseline'] / GIB:.2f} GiB"),
        ("writing all rows home at the end", f"{found['flush']:.1f} s"),
        ("disk taken, of a file of", f"{found['disk_bytes'] / GIB:.2f} of {found['file_bytes'] / GIB:.1f} GiB"),
    ]
    table = Table(
        title=f"400 M x 64 rows on a sparse file, batch 2048 x 8, Zipf {SKEW} ids, row-wise Adagrad",
        columns=["what", "measured"],
        rows=cells,
    )
    notes = [
        f"slots: as stoker.plan gives for {LARGE_BUDGET}, which covers finding and planning rows; the rest of 4 GiB is "
        "for kernels, gradients and batches",
        "checked: rows of the measured steps within rounding of a float64 replay from the initial rows",
        f"before the {config['steps']} measured steps the most frequent rows were trained once each, so that all slots "
        "are taken and rows leave; other rows are computed at first use and read from the file later",
    ]
    return Outcome(value=found["peak"] / GIB, tables=[table], notes=notes, data=_data(timings, {}) | {"found": found})


def planning(run: Run) -> Outcome:
    """Planning per step as a percentage of the resident step."""
    shape = kaggle_shape(8192)
    batch = shape.batch
    workload = DlrmWorkload.make(DlrmShape(tables=shape))
    config = DlrmWorkload.config([workload], ["rowwise_adagrad"]) | {
        "steps": (8, 16) if run.quick else (40, 80), "fraction": FRACTION, "lookahead": LOOKAHEAD,
    }  # fmt: skip

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        resident, placed = np.load(results / "losses.npy")
        check_same_losses(label, placed, resident)
        if not line["rows_equal"]:
            raise WrongResult(f"{label}: rows or their state differ from the resident model's")

    timings = play([PLANNING], config, run, check)
    lines = timings.extra[PLANNING.label]
    shares = [100 * (line["announce"] + line["plan"]) / line["step"] for line in lines]
    table = Table(
        title=f"Planning at batch {batch} x {len(shape.sizes)}, 10 % of {sum(shape.sizes):,} "
        "rows in slots (ms per step)",
        columns=["round", "distinct, announce", "release, plan, ids", "fetch, write", "resident step", "planning"],
        rows=[
            [
                str(number + 1),
                *(f"{line[part] * 1e3:.2f}" for part in ("announce", "plan", "moving", "step")),
                f"{share:.2f} %",
            ]
            for number, (line, share) in enumerate(zip(lines, shares, strict=True))
        ],
    )
    last = lines[-1]
    notes = [
        "checked: all losses, rows and states equal those of the resident model to the bit",
        f"{last['rows']:,.0f} distinct rows per step, {last['hit_rate']:.2%} in slots, {last['fetched']:,.0f} fetched",
        "planning runs in the training thread here; fetch and write are not planning",
    ]
    return Outcome(value=statistics.median(shares), tables=[table], notes=notes, data=_data(timings, {}))


def bars() -> list[Bar]:
    """The promises of placed rows."""
    return [
        Bar(
            name="placed-step",
            group="placed",
            title="DLRM on Globo with 10 % of the rows in fast memory: throughput over all resident",
            must=0.90,
            aim=0.97,
            digits=3,
            run=step,
        ),
        Bar(
            name="placed-file",
            group="placed",
            title="rows in a file, page cache dropped: against memory-mapped rows with nn.EmbeddingBag semantics",
            must=3.0,
            aim=10.0,
            run=file,
        ),
        Bar(
            name="rows-mapped",
            group="placed",
            title="rows in a file against memory maps, page cache as large as our slots and unlimited, the worst case",
            must=1.0,
            aim=1.2,
            rounds=3,
            run=mapped,
        ),
        Bar(
            name="rows-cached",
            group="placed",
            title="rows alone, 10 % in slots: throughput over all resident, the worst of five shapes",
            must=0.5,
            aim=0.9,
            rounds=3,
            run=cached,
        ),
        *(
            Bar(
                name=f"dlrm-cached-{name}",
                group="placed",
                title=f"small DLRM, 10 % in slots: throughput over all resident, {law} ids",
                must=must,
                aim=aim,
                rounds=3,
                run=_small_bar(shape),
            )
            for shape, (name, law, must, aim) in enumerate(
                [
                    ("steep", "Zipf 1.05", 0.82, 0.92),
                    ("flat", "Zipf 0.6", 0.65, 0.8),
                    ("uniform", "uniform", 0.6, 0.75),
                ]
            )
        ),
        Bar(
            name="placed-100gib",
            group="placed",
            title="peak memory of training a table of 100 GiB where 4 GiB may be used",
            must=4.0,
            at_most=True,
            unit=" GiB",
            run=large,
        ),
        Bar(
            name="planning-cost",
            group="placed",
            title="planning per step at batch 8192 x 26, of a resident fp32 step",
            must=10.0,
            at_most=True,
            unit=" %",
            run=planning,
        ),
    ]
