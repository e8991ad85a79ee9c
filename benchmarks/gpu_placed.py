"""Rows in host memory behind a cache of 5 % of them, against all rows in the GPU's own memory."""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

from benchmarks.gpu_dlrm import Contest, Measured, Workload, moved, ratio, release, same_rows
from benchmarks.gpu_limits import limits
from benchmarks.gpu_tools import Clock, Setting
from benchmarks.harness import Outcome, Table, WrongResult
from stoker import DLRM, Cached, ConfigError
from stoker.tables.slots.residency import Residency
from stoker.tables.slots.slotted import SlottedRows
from stoker.tables.stores.home import MemoryHome

__all__ = ["measure"]

FRACTION = 0.05
BASE, MINE = "all in device memory", "cached, 5 % of the rows"
CHUNK = 2**20  # rows copied home at a time


def measure(setting: Setting) -> Outcome:
    """The value is the smallest throughput ratio of the cases.

    Raises:
        NotRun: the device has too little memory for all rows.
        WrongResult: losses or rows differ.
    """
    clock = Clock(setting.pick(full=165.0, quick=30.0, tiny=60.0))
    workload = Workload.make(setting)
    models = {BASE: workload.model()}
    try:
        models[MINE] = cached(workload)
        return _compare(workload, models, clock)
    finally:
        release(models)


def _compare(workload: Workload, models: dict[str, DLRM], clock: Clock) -> Outcome:
    setting, storage = workload.setting, _storage(models[MINE])
    contest = Contest(workload, models, clock)
    begin = clock.spent
    fill_home(models[BASE], models[MINE])
    filled = clock.spent - begin
    contest.warm(list(workload.hot(storage.num_slots)))
    cases: dict[int, dict[str, list[Measured]]] = {}
    alone: dict[int, tuple[float, float]] = {}
    most = 2 if workload.plain else setting.pick(full=5, quick=3, tiny=2)
    for number, examples in enumerate(workload.batches):
        cases[examples] = contest.rounds(examples, most, 0.5 + 0.5 * (number + 1) / len(workload.batches))
    for examples in workload.batches:
        alone[examples] = contest.staged_alone(MINE, examples)
    compared = same_rows(models, workload.batch(0, workload.batches[-1]))
    home, reading = storage.home, getattr(storage._link, "reading", "in line")
    locked = "page-locked" if isinstance(home, MemoryHome) and home.pinned else "ordinary"
    planner = "plain Python" if type(storage.residency) is Residency else "Numba"
    ratios = {examples: ratio(found[BASE], found[MINE]) for examples, found in cases.items()}
    data = {
        "planner": planner,
        "home": locked,
        "reading": reading,
        "gigabytes": workload.gigabytes,
        "slots": storage.num_slots,
        "fast_bytes": {name: _fast_bytes(model) for name, model in models.items()},
        "fill_seconds": filled,
        "cases": {str(examples): _figures(examples, found, alone[examples]) for examples, found in cases.items()},
        "ratios": {str(examples): found for examples, found in ratios.items()},
    }
    rounds = " and ".join(f"{len(found[BASE])} at batch {examples}" for examples, found in cases.items())
    notes = [
        f"equal to the bit: the losses of all steps, and {compared:,} rows with their state at the end",
        f"rows are planned by {planner}; rounds in turn: {rounds}; ratios within a round, the median counts",
        f"device memory for rows and state: {_fast_bytes(models[BASE]) / 2**30:.2f} GiB against "
        f"{_fast_bytes(models[MINE]) / 2**30:.2f} GiB",
        f"home: {locked} memory, rows are read {reading}",
        f"all rows lay in host memory first ({filled:.0f} s), and the slots held the most frequent rows",
        "of the link: rows moved, over its measured limit both ways; staging alone (rows planned and fetched, nobody "
        "trains): over its limit to the device",
    ]
    if planner == "plain Python":
        notes.insert(0, "Numba is missing (pip install numba): these times are not the product's")
    tables = _tables(workload, cases, ratios, alone, setting)
    return Outcome(value=min(median for median, _, _ in ratios.values()), tables=tables, notes=notes, data=data)


def cached(workload: Workload) -> DLRM:
    """The model behind a cache; behind a GPU its home is page-locked where the system agrees."""
    if workload.setting.device.type == "cuda":
        # Asked for, not left to the amount of free memory: that of a virtual machine may grow only as it is used.
        with contextlib.suppress(ConfigError):
            return workload.model(Cached(fraction=FRACTION, pin=True))
    return workload.model(Cached(fraction=FRACTION))


def fill_home(base: DLRM, mine: DLRM) -> None:
    """Bring every row of ``base`` to the home of ``mine``: untouched rows would be computed, not read.

    Raises:
        WrongResult: the rows of the two were not the same.
    """
    for table in base.tables:
        for start, rows in base.embeddings.read(table.name, CHUNK):
            mine.embeddings.write(table.name, start, rows)
    largest = max(base.tables, key=lambda table: table.num_embeddings)
    pair = [next(model.embeddings.read(largest.name, 1000))[1].weight.cpu() for model in (base, mine)]
    if not bool((pair[0] == pair[1]).all()):
        raise WrongResult(f"{MINE}: rows of table {largest.name} are not those that were written")


def _storage(model: DLRM) -> SlottedRows:
    (group,) = model.embeddings.groups
    assert isinstance(group.storage, SlottedRows)
    return group.storage


def _fast_bytes(model: DLRM) -> int:
    return sum(group.storage.fast_bytes for group in model.embeddings.groups)


def _figures(examples: int, found: dict[str, list[Measured]], alone: tuple[float, float]) -> dict[str, Any]:
    return {
        "seconds": {name: [result.seconds for result in results] for name, results in found.items()},
        "samples_per_second": {
            name: examples / statistics.median(result.seconds for result in results) for name, results in found.items()
        },
        "stall": [result.stall for result in found[MINE]],
        "per_step": [result.stats for result in found[MINE]],
        "staged_alone_seconds": alone[0],
        "staged_alone_bytes": alone[1],
    }


def _tables(
    workload: Workload,
    cases: dict[int, dict[str, list[Measured]]],
    ratios: dict[int, tuple[float, float, float]],
    alone: dict[int, tuple[float, float]],
    setting: Setting,
) -> list[Table]:
    known = limits(setting)
    link = known["both ways"] * 1e9
    speed, traffic = [], []
    for examples, found in cases.items():
        mine, (median, low, high) = found[MINE], ratios[examples]
        step = {name: statistics.median(r.seconds for r in results) for name, results in found.items()}
        speed.append(
            [
                f"batch {examples}",
                *(f"{examples / step[name]:,.0f}" for name in (BASE, MINE)),
                *(f"{step[name] * 1e3:.2f}" for name in (BASE, MINE)),
                f"{median:.3f}x",
                f"{low:.3f} to {high:.3f}",
            ]
        )
        seconds, fetched = alone[examples]
        wanted, hits = moved(mine, "rows"), moved(mine, "hits")
        traffic.append(
            [
                f"batch {examples}",
                f"{wanted:,.0f}",
                f"{hits / wanted:.1%}",
                *(f"{moved(mine, key) / 2**20:.2f}" for key in ("fetched_bytes", "written_bytes")),
                f"{statistics.median(r.transferred for r in mine) / step[MINE] / link:.1%}",
                f"{statistics.median(r.stall for r in mine):.1%}",
                f"{moved(mine, 'plan_seconds') * 1e3:.2f}",
                f"{seconds * 1e3:.2f}",
                f"{fetched / seconds / (known['to device'] * 1e9):.1%}",
            ]
        )
    columns = ["case", "device: samples/s", "cached: samples/s", "device: ms", "cached: ms", "ratio", "range"]
    counted = ["case", "distinct rows", "hits", "MiB in", "MiB out"]
    return [
        Table(title=workload.title, columns=columns, rows=speed),
        Table(
            title="What the cache did, per step",
            columns=[*counted, "of the link", "stall", "plan ms", "staging alone ms", "of the link"],
            rows=traffic,
        ),
    ]
