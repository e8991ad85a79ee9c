"""``stoker.verify``: whether a run whose rows come and go computes the same bits as one that has them all.

Steps of the run are replayed twice side by side, placed and resident, each from the same checkpoint with batches read
on its own. Rows are compared before a step too: there a row that was lost or came too early is found itself, before
its wrong value has spread over the loss to every other row of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from stoker.base.device import device_memory as memory_of
from stoker.base.device import resolve_device
from stoker.base.errors import ConfigError
from stoker.base.units import format_size, parse_size
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.models import RecModel
from stoker.ops.distinct import distinct_rows
from stoker.optim import Constant
from stoker.placement.placement import Placement, row_bytes
from stoker.tables.group import TableGroup
from stoker.tables.storage import Rows
from stoker.training.config import MachineSettings
from stoker.training.placing import iterate, place_run, rows_bytes, slotted
from stoker.training.replica import Rerun, Section, find_section, process_settings

_SHARE = 0.1  # of the rows' bytes, where a run has no budget of its own
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_CHUNK_BYTES = 64 * 2**20  # of rows compared at a time at the end

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first value that is not the same."""

    step: int  # of the batch, counted from 0
    when: Literal["before", "after", "end"]  # as the step found it, as it left it, or in the last look at all rows
    what: Literal["row", "loss", "dense"]
    table: str | None = None
    id: int | None = None  # row of the table
    name: str = "weight"  # weight or optimizer state of the row; parameter of the dense part
    column: int | None = None  # of the row; position in a flattened parameter
    placed: float
    resident: float

    def __str__(self) -> str:
        when = {
            "before": f"before step {self.step:,}",
            "after": f"after step {self.step:,}",
            "end": f"at the end, after step {self.step:,}",
        }[self.when]
        what = "loss"
        if self.what == "row":
            what = f"table {self.table!r}, id {self.id:,}, {self.name}, column {self.column}"
        elif self.what == "dense":
            what = f"{self.name}, element {self.column}"
        return f"{when}: {what}: placed {self.placed:.9g}, resident {self.resident:.9g}"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What :func:`verify` compared, and the first difference."""

    run: Path
    checkpoint: Path | None  # begun from; None: from the start of the run
    begin: int  # first step, counted from 0
    steps: int  # compared
    placement: str  # in words
    touched_rows: int  # rows of the batches, each counted in every step that touches it
    all_rows: int  # looked at in the end
    values: int  # single numbers compared
    seconds: float
    difference: Difference | None

    @property
    def identical(self) -> bool:
        """Whether everything was equal to the bit."""
        return self.difference is None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        checkpoint = None if self.checkpoint is None else str(self.checkpoint)
        return {"identical": self.identical, **asdict(self), "run": str(self.run), "checkpoint": checkpoint}


def verify(
    run: str | Path,
    *,
    steps: int = 50,
    begin: int | Literal["start"] | None = None,
    data: Dataset | str | Path | None = None,
    progress: Progress | None = None,
    **settings: Unpack[MachineSettings],
) -> Verification:
    """Replay steps of a run with its rows placed and with all of them resident, and compare the bits.

    Compared are, in every step, the rows of the batch with their optimizer state before and after it, the loss, and
    the dense part with its optimizer; at the end all rows of all tables. The run directory is only read.

    Args:
        run: the run directory.
        steps: how many; fewer where the run has fewer.
        begin: a step that has a checkpoint, or "start"; None takes the newest whole checkpoint that has so many steps
            before it, else the start.
        data: the dataset; None means the run's own.
        progress: called with (what, done, total).
        settings: ``device_memory``, ``host_memory``, ``home_path``, ``strategy``, ``lookahead``, ``foresight``,
            ``in_flight``, ``spill``, ``device``, ``backend`` or ``threads`` instead of the run's. A run without a
            budget is placed at 10 % of its rows' bytes, cores of tensor trains aside.

    Raises:
        ConfigError: no run there, a budget that holds all rows, or too little memory to have them all resident too.
        CheckpointError: no whole checkpoint at ``begin``.
    """
    started = time.perf_counter()
    section = find_section(run, steps=steps, begin=begin, data=data, settings=settings)
    with process_settings(section.config):
        section, placement = _placed(section, given="device_memory" in settings, chosen="strategy" in settings)
        _check_memory(section, placement)
        with closing(Rerun(section, placement)) as placed:
            resident = Rerun(section, None)
            comparison = _Comparison(placed.model, resident.model)
            difference, done = _replay(section, placed, resident, comparison, progress or _quiet)
    return Verification(
        run=section.run.path, checkpoint=section.checkpoint, begin=section.begin, steps=done,
        placement=_describe(placed.model), touched_rows=comparison.touched, all_rows=comparison.all,
        values=comparison.values, seconds=time.perf_counter() - started, difference=difference,
    )  # fmt: skip


def _quiet(what: str, done: int, total: int) -> None: ...


def _rows_bytes(section: Section, *, movable: bool = False) -> int:
    """Of all rows with their optimizer state, cores of tensor trains included, or of those only that can move."""
    config, spec = section.config, section.data.schema
    whole = set(spec.num_embeddings) - set(config.tensor_trains(spec))
    tables = (table for table in config.stored_tables(spec) if not movable or table.name in whole)
    return rows_bytes(tables, config.make_row_optimizer(Constant()).state)


def _placed(section: Section, *, given: bool, chosen: bool) -> tuple[Section, Placement]:
    """The section with a budget that does not hold all rows, and its placement; ``given``: the budget was asked for,
    ``chosen``: the strategy was."""
    optimizer = section.config.make_row_optimizer(Constant())
    placement = place_run(section.config, section.data, optimizer)
    if placement is not None and not placement.resident:
        return section, placement
    total, movable = _rows_bytes(section), _rows_bytes(section, movable=True)
    if not movable:
        raise ConfigError(
            "all tables of this run are tensor trains, whose cores lie on the device wherever rows lie, so nothing "
            "would move and nothing be verified. Verify a run that has other tables too."
        )
    if given:
        raise ConfigError(
            f"--device-memory {section.config.device_memory or 'all'} holds all rows, {format_size(total)} with their "
            "state, so nothing would move and nothing be verified. Give less, or leave it out."
        )
    share, strategy = _SHARE, section.config.strategy
    while True:
        config = section.config.replace(
            device_memory=str(max(1, total - movable + int(share * movable))), strategy=strategy
        )
        try:
            placement = place_run(config, section.data, optimizer)
        except ConfigError:  # tables so small that a tenth does not hold one example
            share *= 2
            if share >= 1:
                if strategy == "auto" or chosen:
                    raise
                share, strategy = _SHARE, "auto"  # the run had no use for its strategy, all rows being resident
            continue
        assert placement is not None
        return Section(**{**vars(section), "config": config}), placement


def _check_memory(section: Section, placement: Placement) -> None:
    """Refuse what cannot be: all rows resident, beside those placed."""
    device = resolve_device(section.config.device)
    rows = _rows_bytes(section)
    needed = rows + parse_size(section.config.device_memory or 0)
    if device.type == "cpu" and any(getattr(strategy, "home", None) == "memory" for strategy in placement.values()):
        needed += rows
    free = memory_of(device)[0]
    if free and needed > free:
        raise ConfigError(
            f"to verify, all rows must be resident too, {format_size(rows)} with their state: {format_size(needed)} in "
            f"all, but {device} has {format_size(free)} free. Verify on a device with more memory, or a run of "
            "the same model on fewer rows."
        )


def _describe(model: RecModel) -> str:
    storages = slotted(model)
    rows, slots = sum(storage.num_rows for storage in storages), sum(storage.num_slots for storage in storages)
    homes = " and ".join(sorted({storage.home.kind for storage in storages}))
    return f"{slots:,} slots for {rows:,} rows at home in {homes}"


def _replay(
    section: Section, placed: Rerun, resident: Rerun, comparison: _Comparison, progress: Progress
) -> tuple[Difference | None, int]:
    """The first difference, and the steps that were done."""
    done = 0
    with closing(iterate(placed.feed)) as ones, closing(iterate(resident.feed)) as others:
        while done < section.steps:
            batch, other = next(ones), next(others)
            if difference := comparison.rows(batch, "before"):
                return difference, done
            losses = placed.step(batch), resident.step(other)
            done += 1
            # Rows last: one that came wrong was found before the step, and a wrong loss spreads to all of them.
            difference = comparison.dense(batch.step, *losses, placed, resident) or comparison.rows(batch, "after")
            if difference:
                return difference, done
            progress("steps", done, section.steps)
    return comparison.tables(section.begin + done - 1, progress), done


class _Comparison:
    """Compares the two models to the bit and counts what it looked at."""

    def __init__(self, placed: RecModel, resident: RecModel) -> None:
        self.placed, self.resident = placed, resident
        self.touched = self.all = self.values = 0
        self._home: dict[str, tuple[TableGroup, int]] = {
            table.name: (group, group.space.table_range(index)[0])
            for group in resident.embeddings.groups
            for index, table in enumerate(group.tables)
        }

    def rows(self, batch: Batch, when: Literal["before", "after"]) -> Difference | None:
        """The rows of a batch, wherever they lie now, with their state."""
        offsets = None if batch.offsets is None else batch.offsets.cpu()
        lookups = self.placed.embeddings.splitter.split(batch.ids.cpu(), offsets, None)
        for group, (bags, space) in zip(self.placed.embeddings.groups, lookups, strict=True):
            found = distinct_rows(bags, space)[0]
            found.sort()
            values = group.storage.gather(found)
            for table, name in enumerate(group.space.names):
                first, last = group.space.table_range(table)
                begin, end = np.searchsorted(found, (first, last)).tolist()
                ids = found[begin:end] - first
                other, base = self._home[name]
                mine = Rows(values.weight[begin:end], {key: value[begin:end] for key, value in values.state.items()})
                if when == "after":
                    self.touched += len(ids)
                if difference := self._compare(mine, other.storage.gather(ids + base), name, ids, batch.step, when):
                    return difference
        return None

    def dense(self, step: int, loss: Tensor, other: Tensor, placed: Rerun, resident: Rerun) -> Difference | None:
        """The loss, the dense parameters and the state of their optimizer."""
        if not self._same(loss, other):
            return Difference(step=step, when="after", what="loss", placed=float(loss), resident=float(other))
        for (name, one), (_, two) in zip(_dense_tensors(placed), _dense_tensors(resident), strict=True):
            if not self._same(one, two):
                at = int((_bits(one) != _bits(two)).reshape(-1).nonzero()[0])
                return Difference(
                    step=step, when="after", what="dense", name=name, column=at,
                    placed=float(one.reshape(-1)[at]), resident=float(two.reshape(-1)[at]),
                )  # fmt: skip
        return None

    def tables(self, step: int, progress: Progress) -> Difference | None:
        """All rows of all tables."""
        total = sum(table.num_embeddings for table in self.placed.embeddings.stored)
        for table in self.placed.embeddings.stored:
            size = row_bytes(table, self.placed.embeddings.optimizer.state)
            chunk = max(1, _CHUNK_BYTES // size)
            both = (model.embeddings.read(table.name, chunk) for model in (self.placed, self.resident))
            for (start, mine), (_, other) in zip(*both, strict=True):
                ids = np.arange(start, start + len(mine.weight))
                self.all += len(ids)
                if difference := self._compare(mine, other, table.name, ids, step, "end"):
                    return difference
                progress("all rows", self.all, total)
        return None

    def _same(self, one: Tensor, other: Tensor) -> bool:
        self.values += one.numel()
        return one.shape == other.shape and torch.equal(_bits(one), _bits(other.to(one.device)))

    def _compare(
        self, mine: Rows, other: Rows, table: str, ids: Any, step: int, when: Literal["before", "after", "end"]
    ) -> Difference | None:
        found: list[tuple[int, str, int, float, float]] = []  # row, name, column and both values
        for name, one, two in _pairs(mine, other):
            if not self._same(one, two):
                differ = (_bits(one) != _bits(two.to(one.device))).reshape(len(one), -1).nonzero()
                row, column = differ[0].tolist()
                placed, resident = (float(each[row].reshape(-1)[column]) for each in (one, two))
                found.append((row, name, column, placed, resident))
        if not found:
            return None
        row, name, column, placed, resident = min(found, key=lambda each: each[0])
        return Difference(
            step=step, when=when, what="row", table=table, id=int(ids[row]), name=name, column=column, placed=placed,
            resident=resident,
        )  # fmt: skip


def _pairs(mine: Rows, other: Rows) -> Iterator[tuple[str, Tensor, Tensor]]:
    yield "weight", mine.weight, other.weight
    for name, tensor in mine.state.items():
        yield name, tensor, other.state[name]


def _dense_tensors(rerun: Rerun) -> Iterator[tuple[str, Tensor]]:
    model, dense = rerun.model, rerun.dense
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    yield from ((name, value.detach()) for name, value in model.dense_tensors())
    for parameter, state in dense.state.items():
        yield from ((f"{names[parameter]}.{key}", value) for key, value in state.items() if isinstance(value, Tensor))


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: unlike numbers, equal only if every bit is."""
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()])
