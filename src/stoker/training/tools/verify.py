"""``stoker.verify``: check that a run with a cache computes the same bits as one with all rows resident.

Steps of the run are replayed twice, placed and resident, from the same checkpoint. Each replay reads its own batches.
Rows are also compared before a step: so a row that was lost or fetched too early is found itself, before its wrong
value spreads over the loss to all other rows of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stoker.base.device import device_memory as memory_of
from stoker.base.device import resolve_device
from stoker.base.errors import ConfigError
from stoker.base.picture import Grid, Shown
from stoker.base.progress import Progress, quiet
from stoker.base.settings import with_arguments_of
from stoker.base.units import format_size, parse_size, plural
from stoker.dataset.batch import Batch
from stoker.models import RecModel
from stoker.ops import Bags
from stoker.ops.distinct import distinct_rows
from stoker.optim import Constant
from stoker.placement.placement import Placement, row_bytes
from stoker.tables.config import Slotted
from stoker.tables.group import TableGroup
from stoker.tables.storage import Rows
from stoker.tables.stores.registry import store_class
from stoker.training.placing import iterate, place_run, rows_bytes, slotted
from stoker.training.replica import Rerun, Section, SectionArguments, find_section, process_settings

_SHARES = (0.1, 0.2, 0.4, 0.8)  # of the bytes of the rows, tried in turn for a run without a budget
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_CHUNK_BYTES = 64 * 2**20  # of rows that are compared at a time at the end

When = Literal["before", "after", "end"]  # before or after a step, or in the comparison of all rows at the end


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """The first value that differs."""

    step: int  # of the batch, counted from 0
    when: When
    what: Literal["row", "loss", "dense"]
    table: str | None = None
    id: int | None = None  # row of the table
    name: str = "weight"  # "weight" or optimizer state of the row; parameter of the dense part
    column: int | None = None  # column of the row; position in a flattened parameter
    placed: float
    resident: float

    def __str__(self) -> str:
        when = f"{'at the end, after' if self.when == 'end' else self.when} step {self.step:,}"
        what = "loss"
        if self.what == "row":
            what = f"table {self.table!r}, id {self.id:,}, {self.name}, column {self.column}"
        elif self.what == "dense":
            what = f"{self.name}, element {self.column}"
        return f"{when}: {what}: placed {self.placed:.9g}, resident {self.resident:.9g}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Verification(Shown):
    """What :func:`verify` compared, and the first difference."""

    run: Path
    checkpoint: Path | None  # first state; None: the start of the run
    begin: int  # first step, counted from 0
    steps: int  # compared steps
    placement: str  # in words
    touched_rows: int  # rows of the batches, each counted once per step
    all_rows: int  # rows compared at the end
    values: int  # compared numbers
    seconds: float
    difference: FirstDifference | None

    @property
    def identical(self) -> bool:
        """True if all values were equal to the bit."""
        return self.difference is None

    def summary(self) -> str:
        """Return whether the bits are equal, or the first difference."""
        if self.difference is not None:
            return f"different {self.difference}"
        return f"identical over {plural(self.steps, 'step')}, {self.values:,} values compared"

    def grids(self) -> tuple[Grid]:
        """Return what was compared."""
        origin = "its start" if self.checkpoint is None else self.checkpoint.name
        counts = {
            "steps": self.steps, "rows touched by a step": self.touched_rows, "rows at the end": self.all_rows,
            "values": self.values,
        }  # fmt: skip
        rows = [["from", origin], ["placed", self.placement], *([name, f"{n:,}"] for name, n in counts.items())]
        return (Grid(["run", str(self.run)], rows, left=(0, 1)),)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        checkpoint = None if self.checkpoint is None else str(self.checkpoint)
        return {"identical": self.identical, **asdict(self), "run": str(self.run), "checkpoint": checkpoint}


@with_arguments_of(SectionArguments)
def verify(run: str | Path, **given: Any) -> Verification:
    """Replay steps of a run with its rows in a cache and with all of them resident, and compare the bits.

    Each step compares the rows of the batch and their optimizer state before and after it, the loss, and the dense part
    with its optimizer. At the end all rows of all tables are compared. The run directory is only read.

    Args:
        run: the run directory.
        steps: steps to replay; fewer if the run has fewer.
        begin: a step with a checkpoint, or "start". None takes the newest whole checkpoint with that many steps before
            it, else the start.
        data: the dataset; None means that of the run.
        progress: called with (what, done, total).
        settings: ``device_memory``, ``host_memory``, ``home_path``, ``strategy``, ``lookahead``, ``epoch_lookahead``,
            ``in_flight``, ``spill``, ``device``, ``backend`` or ``threads`` in place of those of the run. A run without
            a budget gets 10 % of the bytes of its rows, without the cores of tensor trains.

    Raises:
        ConfigError: no run there, a budget for all rows, or too little memory to have all rows resident, too.
        CheckpointError: no whole checkpoint at ``begin``.

    >>> from stoker.testing import make_dataset
    >>> data = make_dataset("data", rows=1000)
    >>> result = stoker.train(data, out="run", batch_size=64, steps=10, display="quiet")
    >>> stoker.verify("run", steps=2)
    <Verification: identical over 2 steps, ... values compared>
    """
    started = time.perf_counter()
    asked = SectionArguments(run, **given)
    section = find_section(run, steps=asked.steps, begin=asked.begin, data=asked.data, settings=given)
    with process_settings(section.config):
        section, placement = _placed(section, given="device_memory" in given, chosen="strategy" in given)
        _check_memory(section, placement)
        with closing(Rerun(section, placement)) as placed:
            comparison = _RerunComparison(placed, Rerun(section, None))
            difference = comparison.replay(section, asked.progress or quiet)
    return Verification(
        run=section.run.path, checkpoint=section.checkpoint, begin=section.begin, steps=comparison.steps,
        placement=_describe(placed.model), touched_rows=comparison.touched, all_rows=comparison.all,
        values=comparison.values, seconds=time.perf_counter() - started, difference=difference,
    )  # fmt: skip


def _rows_bytes(section: Section, *, movable: bool = False) -> int:
    """Return the bytes of all rows with their optimizer state; ``movable``: without the cores of tensor trains."""
    config, spec = section.config, section.data.schema
    whole = set(spec.num_embeddings) - set(config.tensor_trains(spec))
    tables = (table for table in config.stored_tables(spec) if not movable or table.name in whole)
    return rows_bytes(tables, config.make_row_optimizer(Constant()).state)


def _placed(section: Section, *, given: bool, chosen: bool) -> tuple[Section, Placement]:
    """Return the section with a budget for fewer than all rows, and its placement."""
    config, optimizer = section.config, section.config.make_row_optimizer(Constant())
    placement = place_run(config, section.data, optimizer)
    if placement is not None and not placement.resident:
        return section, placement
    total, movable = _rows_bytes(section), _rows_bytes(section, movable=True)
    if not movable:
        raise ConfigError(
            "all tables of this run are tensor trains, whose cores are always on the device, so no row would move and "
            "nothing would be verified. Verify a run that has other tables, too."
        )
    if given:
        raise ConfigError(
            f"--device-memory {config.device_memory or 'all'} holds all rows, {format_size(total)} with their "
            "state, so no row would move and nothing would be verified. Give less, or leave it out."
        )
    # All rows of the run were resident, so its strategy had no effect and may not fit.
    strategies: list[Any] = [config.strategy] if chosen or config.strategy == "auto" else [config.strategy, "auto"]
    for strategy, share in product(strategies, _SHARES):
        memory = str(max(1, total - movable + int(share * movable)))
        config = section.config.replace(device_memory=memory, strategy=strategy)
        try:
            placement = place_run(config, section.data, optimizer)
        except ConfigError as error:
            failure = error
        else:
            assert placement is not None
            return replace(section, config=config), placement
    raise failure


def _check_memory(section: Section, placement: Placement) -> None:
    """Refuse if memory does not hold all rows resident, next to the cache."""
    device = resolve_device(section.config.device)
    rows = _rows_bytes(section)
    needed = rows + parse_size(section.config.device_memory or 0)
    behind = {each.home for each in placement.values() if isinstance(each, Slotted)}
    if device.type == "cpu" and any(store_class(home).in_memory for home in behind):
        needed += rows
    free = memory_of(device)[0]
    if free and needed > free:
        raise ConfigError(
            f"verify needs all rows resident, too, {format_size(rows)} with their state: {format_size(needed)} in "
            f"all, but {device} has {format_size(free)} free. Verify on a device with more memory, or a run of "
            "the same model on fewer rows."
        )


def _describe(model: RecModel) -> str:
    storages = slotted(model)
    if not storages:
        return f"{sum(table.num_embeddings for table in model.tables):,} rows, in part in a mapped file"
    rows, slots = sum(storage.num_rows for storage in storages), sum(storage.num_slots for storage in storages)
    homes = " and ".join(sorted({storage.home.kind for storage in storages}))
    return f"{slots:,} slots for {rows:,} rows in {homes}"


class _RerunComparison:
    """Compare two reruns to the bit and count the compared values."""

    def __init__(self, placed: Rerun, resident: Rerun) -> None:
        self.placed, self.resident = placed, resident
        self.steps = self.touched = self.all = self.values = 0
        self._resident: dict[str, tuple[TableGroup, int]] = {
            table.name: (group, group.space.table_range(index)[0])
            for group in resident.model.embeddings.groups
            for index, table in enumerate(group.tables)
        }

    def replay(self, section: Section, progress: Progress) -> FirstDifference | None:
        """Train both on the steps of the section, and return the first difference."""
        with closing(iterate(self.placed.feed)) as ones, closing(iterate(self.resident.feed)) as others:
            while self.steps < section.steps:
                batch, other = next(ones), next(others)
                if difference := self._touched(batch, "before"):
                    return difference
                losses = self.placed.step(batch), self.resident.step(other)
                self.steps += 1
                # Rows last: a wrong row was found before the step, and a wrong loss spreads to all of them.
                if difference := self._dense(batch.step, *losses) or self._touched(batch, "after"):
                    return difference
                progress("steps", self.steps, section.steps)
        return self._tables(section.begin + self.steps - 1, progress)

    def _touched(self, batch: Batch, when: When) -> FirstDifference | None:
        """Compare the rows of a batch and their state, in a slot or in the backing store."""
        embeddings = self.placed.model.embeddings
        offsets = None if batch.offsets is None else batch.offsets.cpu()
        bags = Bags(batch.ids.cpu(), offsets)
        lookups = embeddings.splitter.split(bags if embeddings.raw is None else embeddings.raw.find(bags))
        for group, (bags, space) in zip(embeddings.groups, lookups, strict=True):
            found = distinct_rows(bags, space)[0]
            found.sort()
            values = group.storage.gather(found)
            for table, name in enumerate(group.space.names):
                first, last = group.space.table_range(table)
                begin, end = np.searchsorted(found, (first, last)).tolist()
                ids = found[begin:end] - first
                other, base = self._resident[name]
                mine = Rows(values.weight[begin:end], {key: value[begin:end] for key, value in values.state.items()})
                if when == "after":
                    self.touched += len(ids)
                if difference := self._rows(mine, other.storage.gather(ids + base), name, ids, batch.step, when):
                    return difference
        return None

    def _tables(self, step: int, progress: Progress) -> FirstDifference | None:
        """Compare all rows of all tables."""
        models = self.placed.model, self.resident.model
        stored, state = models[0].embeddings.stored, models[0].embeddings.optimizer.state
        total = sum(table.num_embeddings for table in stored)
        for table in stored:
            chunk = max(1, _CHUNK_BYTES // row_bytes(table, state))
            both = (model.embeddings.read(table.name, chunk) for model in models)
            for (start, mine), (_, other) in zip(*both, strict=True):
                ids = np.arange(start, start + len(mine.weight))
                self.all += len(ids)
                if difference := self._rows(mine, other, table.name, ids, step, "end"):
                    return difference
                progress("all rows", self.all, total)
        return None

    def _rows(self, mine: Rows, other: Rows, table: str, ids: Any, step: int, when: When) -> FirstDifference | None:
        """Compare rows of one table with these ids."""
        ours, theirs = ({"weight": rows.weight, **rows.state} for rows in (mine, other))
        found = []
        for name, one in ours.items():
            if (place := self._differing(one, theirs[name])) is not None:
                row, column = divmod(place, one[0].numel())
                found.append((row, name, column))
        if not found:
            return None
        row, name, column = min(found, key=lambda each: each[0])
        placed, resident = (float(rows[name][row].reshape(-1)[column]) for rows in (ours, theirs))
        return FirstDifference(
            step=step, when=when, what="row", table=table, id=int(ids[row]), name=name, column=column, placed=placed,
            resident=resident,
        )  # fmt: skip

    def _dense(self, step: int, loss: Tensor, other: Tensor) -> FirstDifference | None:
        """Compare the loss, the dense parameters and the state of their optimizer."""
        if self._differing(loss, other) is not None:
            return FirstDifference(step=step, when="after", what="loss", placed=float(loss), resident=float(other))
        for (name, one), (_, two) in zip(_dense_tensors(self.placed), _dense_tensors(self.resident), strict=True):
            if (at := self._differing(one, two)) is not None:
                placed, resident = (float(each.reshape(-1)[at]) for each in (one, two))
                return FirstDifference(
                    step=step, when="after", what="dense", name=name, column=at, placed=placed, resident=resident
                )
        return None

    def _differing(self, one: Tensor, other: Tensor) -> int | None:
        """Return the position of the first value whose bits differ; None if there is none."""
        self.values += one.numel()
        bits, others = _bits(one), _bits(other.to(one.device))
        return None if torch.equal(bits, others) else int((bits != others).reshape(-1).nonzero()[0])


def _dense_tensors(rerun: Rerun) -> Iterator[tuple[str, Tensor]]:
    model, dense = rerun.model, rerun.dense
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    yield from ((name, value.detach()) for name, value in model.dense_tensors())
    for parameter, state in dense.state.items():
        yield from ((f"{names[parameter]}.{key}", value) for key, value in state.items() if isinstance(value, Tensor))


def _bits(tensor: Tensor) -> Tensor:
    """View the same memory as integers, which are equal only if each bit is equal, unlike floats."""
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()])
