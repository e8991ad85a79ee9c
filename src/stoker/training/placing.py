"""Place the rows of a run, check that memory and disk suffice, and stage batches while it trains."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import threading
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from stoker.base.device import available_memory, total_memory
from stoker.base.device import device_memory as memory_of
from stoker.base.errors import CheckpointError, ConfigError
from stoker.base.progress import Progress
from stoker.base.timeline import Recorder
from stoker.base.units import format_size
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.spec import FeatureSpec
from stoker.dataset.split import BatchStream, EpochRest
from stoker.models import MODELS, RecModel
from stoker.optim import RowOptimizer
from stoker.placement.budget import MemoryBudget
from stoker.placement.expected import HotBatches
from stoker.placement.placement import Placement, row_bytes
from stoker.placement.planner import plan
from stoker.tables import Device, Stage, Strategy, TableConfig, TensorTrain, stage
from stoker.tables.compressed.tensor_train import stored_tables
from stoker.tables.config import Slotted
from stoker.tables.slots.slotted import SlottedRows
from stoker.training.config import TrainConfig
from stoker.training.scores.evaluation import SCORED

Batches = TypeVar("Batches", bound=Iterable[Batch])

#: The stages of a step, in the order in which a batch goes through them.
STAGES = {
    "epoch_lookahead": "find next uses",
    "read": "make the batch",
    "plan": "choose slots",
    "fence": "wait for writebacks",
    "fetch": "rows from backing store to slots",
    "forward": "dense part and loss",
    "lookup": "look up and pool rows",
    "backward": "dense part",
    "update": "optimizer of the rows",
    "dense": "optimizer of the dense part",
    "writeback": "rows from slots to backing store",
    "stall": "other waiting",
    "step": "everything else",
}
_WITHIN = 2**14  # most spans directly inside one span
_SHARE = 0.8  # of the memory, for the budget that a message proposes
_FEWEST = 32  # examples scored at a time, unless the user chooses


class Epochs:
    """The batches of a run, epoch after epoch. A lookahead may see beyond the end of an epoch."""

    def __init__(self, stream: BatchStream, total: int) -> None:
        self.stream, self.total = stream, total
        self.foreseen = total  # next uses may be recorded up to this batch

    def __iter__(self) -> Iterator[Batch]:
        while self.stream.step < self.total:
            for batch in self.stream:
                yield batch
                if batch.step + 1 >= self.total:
                    return

    @property
    def step(self) -> int:
        """Number of the next batch."""
        return self.stream.step

    def rest_of_epoch(self, step: int, *, ids_only: bool = False) -> EpochRest:
        """Return the batches from number ``step`` to the end of its epoch or of the run, without moving the stream."""
        return self.stream.rest_of_epoch(step, until=self.foreseen, ids_only=ids_only)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position after ``step`` batches; None: the current one."""
        return self.stream.state_dict(step)


def place(
    data: Dataset,
    tables: tuple[TableConfig, ...],
    optimizer: RowOptimizer,
    budget: MemoryBudget,
    *,
    batch_size: int = 2048,
    scheduled: bool = False,
    ranks: int = 1,
    **options: Any,
) -> Placement:
    """Call :func:`stoker.plan` with the counts of a dataset and the numbers of ids of its features.

    With ``scheduled``, batches are hot or cold, and their shares count too. With several ``ranks``, the placement is
    that of the rows of the first one, which are used most. ``options`` are arguments of the plan.

    Raises:
        ConfigError: the budget is too small.
    """
    sizes, trains = {table.name: table.num_embeddings for table in tables}, options.get("tensor_trains") or {}
    counts = {
        name: found[:: 1 if name in trains else ranks]
        for name, found in data.counts.items() if len(found) == sizes.get(name)
    }  # fmt: skip
    tables = rank_tables(tables, ranks, trains)
    examples = len(data.train) or _counted_examples(data, tables, counts)
    mean = {
        feature: float(counts[table.name].sum()) / examples / len(table.features)
        for table in tables
        if table.name in counts
        for feature in table.features
    }
    most = {
        feature.name: max(feature.max_length, math.ceil(mean.get(feature.name, 1))) for feature in data.schema.features
    }
    known = data.hot_cold if scheduled else None
    hot = None
    if known is not None:
        rows = {name: -(-each // ranks) for name, each in known["hot_rows"].items()}
        hot = HotBatches(rows=rows, share=len(data.hot) / examples)
    return plan(
        tables, counts, optimizer=optimizer, budget=budget, batch_size=batch_size, hot_batches=hot,
        ids_per_feature=mean, max_ids=most, **options,
    )  # fmt: skip


def _counted_examples(data: Dataset, tables: Sequence[TableConfig], counts: Mapping[str, torch.Tensor]) -> int:
    """Return how many examples the counts are of, for a dataset that has them from another (``like``)."""
    several = {feature.name for feature in data.schema.features if feature.sequence}
    found = [
        int(counts[table.name].sum()) // len(table.features)
        for table in tables if table.name in counts and not several.intersection(table.features)
    ]  # fmt: skip
    return max([1, *found]) if found else max(1, *(len(split) for split in data.splits.values()))


def rank_tables(tables: tuple[TableConfig, ...], ranks: int, whole: Collection[str] = ()) -> tuple[TableConfig, ...]:
    """Return the tables with the rows of the first of ``ranks``; each rank has all rows of those named ``whole``."""
    return tuple(
        table if table.name in whole else replace(table, num_embeddings=-(-table.num_embeddings // ranks))
        for table in tables
    )


def for_ranks(placement: Mapping[str, Strategy] | None, tables: Iterable[TableConfig], ranks: int) -> Any:
    """Return the placement of a rank's rows as tables divided among ``ranks`` take it: hot rows are those of all."""
    if placement is None or ranks == 1:
        return placement
    rows = {table.name: table.num_embeddings for table in tables}

    def whole(strategy: Strategy) -> Strategy:
        if not isinstance(strategy, Slotted) or not strategy.hot:
            return strategy
        return replace(strategy, hot={name: min(rows[name], ranks * hot) for name, hot in strategy.hot_rows.items()})

    return {name: whole(strategy) for name, strategy in placement.items()}


def place_scoring(
    manifest: Mapping[str, Any], data: Dataset, budget: MemoryBudget, *, batch_size: int | None, device: torch.device
) -> tuple[Placement | None, int]:
    """Plan the placement of a checkpoint's rows for scoring ``data``, None: on the device; and the batch size.

    ``batch_size`` None takes as many as the budget allows, at most 8192.
    """
    model = manifest["model"]
    # The call that builds the model refuses an unknown one.
    tables = MODELS.get(model["model"], RecModel).tables_from(FeatureSpec.from_dict(manifest["features"]), model)
    trains = {name: TensorTrain.from_dict(values) for name, values in model.get("tensor_train", {}).items()}
    optimizer = RowOptimizer.from_dict(manifest["row_optimizer"])
    size = batch_size or SCORED
    if budget.device_memory is None:
        check_memory(stored_tables(tables, trains), optimizer.state, device)
        return None, size
    while True:
        try:
            placement = place(data, tables, optimizer, budget, batch_size=size, device=device, tensor_trains=trains)
            return placement, size
        except ConfigError:
            # On a CPU, where slots are in main memory, the budget includes the lookahead: try a smaller batch.
            if batch_size is not None or size <= _FEWEST:
                raise
            size //= 2


def place_run(config: TrainConfig, data: Dataset, optimizer: RowOptimizer, ranks: int = 1) -> Placement | None:
    """Return the placement for the settings of a run, of a rank's rows if there are several; None: on the device."""
    if config.epoch_lookahead and data.schema.grow:
        raise ConfigError(
            f"epoch_lookahead needs the rows of an epoch before its first step, but tables that grow "
            f"({', '.join(list(data.schema.grow)[:3])}) give them during the epoch. Leave epoch_lookahead out.",
            settings=("epoch_lookahead",),
        )
    if config.device_memory is None:
        return None
    return place(
        data, config.tables(data.schema), optimizer, config, batch_size=config.batch_size,
        tensor_trains=config.tensor_trains(data.schema), scheduled=config.batch_order != "shuffled",
        device=config.device, ranks=ranks,
    )  # fmt: skip


def slotted(model: RecModel) -> list[SlottedRows]:
    """Return the storages of a model that have slots."""
    return [group.storage for group in model.embeddings.groups if isinstance(group.storage, SlottedRows)]


def staged(
    batches: Batches, model: RecModel, config: TrainConfig, *, progress: Progress | None = None
) -> Batches | Stage:
    """Return the batches, staged if the tables need it; ``progress`` is called while next uses are recorded."""
    if not slotted(model) and not any(group.storage.reads_ids for group in model.embeddings.groups):
        return batches
    return stage(
        batches, model, lookahead=config.lookahead, in_flight=config.in_flight, epoch_lookahead=config.epoch_lookahead,
        progress=progress,
    )  # fmt: skip


def iterate(batches: Iterable[Batch]) -> Generator[Batch, None, None]:
    """Return the batches as a generator; its ``close`` ends the threads of a stage."""
    yield from batches


class StageTotals(Recorder):
    """Sum up the seconds of each stage over all threads, without the stages inside it.

    A span is recorded when it ends, after the spans inside it. So each thread keeps its last spans, until a span ends
    that contains them.
    """

    def __init__(self) -> None:
        super().__init__()
        # Nanoseconds, for each thread; None: those that have ended, for a run may have thousands of stages.
        self._totals: dict[threading.Thread | None, Counter[str]] = {None: Counter()}
        self._own = threading.local()

    def add(self, name: str, start: int, end: int, step: int | None) -> None:
        own = self._own
        if not hasattr(own, "totals"):
            own.totals, own.within = Counter(), deque(maxlen=_WITHIN)
            self._totals[threading.current_thread()] = own.totals
        within: deque[tuple[int, int]] = own.within
        rest = end - start
        while within and within[-1][0] >= start:
            begun, ended = within.pop()
            rest -= ended - begun
        within.append((start, end))
        own.totals[name] += rest

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each of :data:`STAGES` so far."""
        for thread in [each for each in list(self._totals) if each is not None and not each.is_alive()]:
            self._totals[None].update(self._totals.pop(thread))
        found = sum((totals.copy() for totals in list(self._totals.values())), Counter[str]())
        return {name: found[name] / 1e9 for name in STAGES}

    @contextlib.contextmanager
    def recording(self, model: RecModel) -> Iterator[None]:
        """Record within the block, if the model has slots and the caller does not record a timeline itself."""
        with contextlib.ExitStack() as stack:
            if slotted(model):
                with contextlib.suppress(RuntimeError):
                    stack.enter_context(self)
            yield


def rows_bytes(tables: Iterable[TableConfig], state: Mapping[str, str]) -> int:
    """Return the bytes of all rows with their optimizer state."""
    return sum(table.num_embeddings * row_bytes(table, state) for table in tables)


def check_memory(
    tables: Sequence[TableConfig], state: Mapping[str, str], device: torch.device, placement: Placement | None = None
) -> str | None:
    """Refuse rows on the device that do not fit its memory; ``placement`` None: all rows are there.

    Return a warning if they fit the memory of the machine, but not its free memory.
    """
    here = [table for table in tables if placement is None or isinstance(placement.get(table.name, Device()), Device)]
    # Optimizer state takes memory only for rows that batches touch, so only the weights are certain.
    needed = sum(table.num_bytes for table in here)
    whole = rows_bytes(here, state)
    if device.type == "cpu":
        limits = [limit for limit in (total_memory(), _address_space()) if limit is not None]
        most, free = min(limits, default=None), available_memory()
    else:
        free, most = memory_of(device)
    if most is None or not needed:
        return None
    budget = max(1, int(_SHARE * min(most, free or most)) // 2**20)
    remedy = (
        f"Give a smaller device_memory, such as {budget}MiB: the other rows are then in main memory or in a file, and "
        "the results are the same. stoker plan shows what that costs"
    )
    if needed > most:
        raise ConfigError(
            f"the rows need {format_size(whole)} on {device}, with optimizer state, but it has only "
            f"{format_size(most)}. {remedy}; or choose fewer columns (embedding_dim)."
        )
    if free is not None and needed > free:
        return (
            f"warning: the rows need {format_size(whole)} on {device}, with optimizer state, but only "
            f"{format_size(free)} is free. {remedy}."
        )
    return None


def _address_space() -> int | None:
    """Return the bytes that this process may still map; None: no limit (``ulimit -v``)."""
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        mapped = 0
    return max(0, limit - mapped)


def check_disk(
    run: Path,
    tables: Sequence[TableConfig],
    state: Mapping[str, str],
    dense_bytes: int,
    config: TrainConfig,
    *,
    steps: int,
    epoch: int,
    there: int,
) -> str | None:
    """Refuse a run if the disk has no room for one checkpoint; return a warning if not for all that it will keep.

    ``dense_bytes``: of the dense parameters; ``steps``: still to train; ``there``: checkpoints that exist.
    """
    if steps < 1:
        return None
    size = rows_bytes(tables, state) + 3 * dense_bytes  # with the two moments of Adam
    folder = next(folder for folder in (run.absolute(), *run.absolute().parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    what = f"a checkpoint takes {format_size(size)}, and the disk of {folder} has {format_size(free)} free"
    if size > free:
        raise CheckpointError(
            f"{what}. Free some space, choose a run directory on another disk (out), or fewer columns (embedding_dim).",
            settings=("out",),
        )
    saves = -(-steps // (config.save_every or config.eval_every or epoch)) + (config.checkpoint_minutes > 0)
    # The last ones, the best one, and the new one while it is written.
    kept = min(saves, max(0, config.keep_last + 2 - there))
    if kept * size <= free:
        return None
    lower = "lower keep_last, or save less often" if config.keep_last > 1 else "save less often"
    return (
        f"warning: {what}, but the run keeps up to {kept}, which need {format_size(kept * size)}. Free some space, or "
        f"{lower} (save_every, checkpoint_minutes); else training ends when the disk is full."
    )
