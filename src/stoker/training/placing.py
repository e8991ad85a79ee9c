"""Where the rows of a run are, and what moves between fast memory and their backing store while it trains."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from stoker.base.errors import ConfigError
from stoker.base.timeline import Recorder
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.reading.reader import BatchStream, EpochRest
from stoker.dataset.spec import FeatureSpec
from stoker.models import MODELS, RecModel
from stoker.optim import RowOptimizer
from stoker.placement.hot_cold import HotBatches
from stoker.placement.placement import Placement
from stoker.placement.planner import plan
from stoker.tables import Stage, TableConfig, TensorTrain, stage
from stoker.tables.compressed.tensor_train import stored_tables
from stoker.tables.slots.foresight import Progress
from stoker.tables.slots.slotted import SlottedRows
from stoker.training.config import TrainConfig
from stoker.training.scores.evaluation import SCORED
from stoker.training.sizing.room import check_memory
from stoker.training.terminal.progress import Clock

Batches = TypeVar("Batches", bound=Iterable[Batch])

#: What a step consists of, in the order in which a batch goes through it.
STAGES = {
    "foresight": "find next uses",
    "read": "make the batch",
    "plan": "choose slots",
    "fence": "wait for writebacks",
    "fetch": "rows from home to slots",
    "forward": "dense part and loss",
    "lookup": "look up and pool rows",
    "backward": "dense part",
    "update": "optimizer of the rows",
    "dense": "optimizer of the dense part",
    "writeback": "rows from slots to home",
    "stall": "other waiting",
    "step": "everything else",
}
_WITHIN = 2**14  # spans that one span may have directly inside it
_FEWEST = 32  # examples scored at a time, unless asked for
_SECONDS = "seconds."  # before the name of a stage, in what :func:`moved` counts


class Epochs:
    """The batches of a run, epoch after epoch, up to ``total`` in all; a lookahead sees across the ends of epochs.

    Args:
        stream: the batches.
        total: how many.
        foreseen: up to which batch next uses may be recorded; None means all.
    """

    def __init__(self, stream: BatchStream, total: int, foreseen: int | None = None) -> None:
        self.stream, self.total = stream, total
        self.foreseen = total if foreseen is None else min(foreseen, total)

    def __iter__(self) -> Iterator[Batch]:
        while self.stream.step < self.total:
            for batch in self.stream:
                yield batch
                if batch.step + 1 >= self.total:
                    return

    @property
    def step(self) -> int:
        """Batches handed out; the next one carries this number."""
        return self.stream.step

    def rest_of_epoch(self, step: int, *, ids_only: bool = False) -> EpochRest:
        """The batches from number ``step`` to the end of its epoch or of the run; the stream stays where it is."""
        return self.stream.rest_of_epoch(step, until=self.foreseen, ids_only=ids_only)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """The position in the stream, or what it was after ``step`` batches."""
        return self.stream.state_dict(step)


def place(
    data: Dataset,
    tables: tuple[TableConfig, ...],
    optimizer: RowOptimizer,
    *,
    batch_size: int = 2048,
    scheduled: bool = False,
    **options: Any,
) -> Placement:
    """:func:`stoker.plan` with what a dataset knows: counts, how many ids its features have, and, where hot and cold
    batches come apart (``scheduled``), how many of them are hot. ``options`` are those of :func:`stoker.plan`.

    Raises:
        ConfigError: a budget that cannot work.
    """
    counts = {
        table.name: data.counts[table.name]
        for table in tables
        if table.name in data.counts and len(data.counts[table.name]) == table.num_embeddings
    }
    examples = max(1, len(data.train))
    shared = {name: table for table in tables for name in table.features}
    mean = {
        name: float(counts[table.name].sum()) / examples / len(table.features)
        for name, table in shared.items()
        if table.name in counts
    }
    most = {
        feature.name: max(feature.max_length, math.ceil(mean.get(feature.name, 1))) for feature in data.schema.features
    }
    known = data.hot_cold if scheduled else None
    hot = None if known is None else HotBatches(rows=known["hot_rows"], share=len(data.hot) / examples)
    return plan(
        tables, counts, optimizer=optimizer, batch_size=batch_size, hot_batches=hot, ids_per_feature=mean, max_ids=most,
        **options,
    )  # fmt: skip


def place_scoring(
    manifest: Mapping[str, Any],
    data: Dataset,
    settings: Mapping[str, Any],
    *,
    batch_size: int | None,
    lookahead: int,
    device: torch.device,
) -> tuple[Placement | None, int]:
    """Where a checkpoint's rows are while they score ``data``, and the number of examples at a time.

    Args:
        manifest: of the checkpoint.
        data: its dataset.
        settings: ``device_memory`` (None or "all": no limit), ``host_memory`` and ``home_path``.
        batch_size: None takes as many as the budget allows, at most 8192.
        lookahead: batches whose ids are known in advance.
        device: where the slots are.

    Returns:
        The placement, None if everything is on the device; and the batch size.

    Raises:
        ConfigError: a budget that cannot work, or rows that need more memory than there is.
    """
    model = manifest["model"]
    # A model that is not known here is refused where it is built.
    tables = MODELS.get(model["model"], RecModel).tables_from(FeatureSpec.from_dict(manifest["features"]), model)
    trains = {name: TensorTrain.from_dict(values) for name, values in model.get("tensor_train", {}).items()}
    optimizer = RowOptimizer.from_dict(manifest["row_optimizer"])
    size = batch_size or SCORED
    budget = settings.get("device_memory")
    if budget in (None, "all"):
        check_memory(stored_tables(tables, trains), optimizer.state, device)
        return None, size
    while True:
        try:
            placement = place(
                data, tables, optimizer, device_memory=str(budget), host_memory=settings.get("host_memory"),
                path=settings.get("home_path"), batch_size=size, lookahead=lookahead, device=device,
                tensor_trains=trains,
            )  # fmt: skip
            return placement, size
        except ConfigError:
            # Where slots are main memory, the budget also pays for what is known of coming batches.
            if batch_size is not None or size <= _FEWEST:
                raise
            size //= 2


def place_run(config: TrainConfig, data: Dataset, optimizer: RowOptimizer) -> Placement | None:
    """The placement that a run's settings ask for; None: everything on the device.

    Raises:
        ConfigError: a budget that cannot work.
    """
    if config.device_memory is None:
        return None
    return place(
        data, config.tables(data.schema), optimizer, device_memory=config.device_memory, host_memory=config.host_memory,
        path=config.home_path, batch_size=config.batch_size, lookahead=config.lookahead,
        in_flight=config.in_flight, spill=config.spill, foresight=config.foresight,
        strategy=config.strategy, tensor_trains=config.tensor_trains(data.schema),
        scheduled=config.batch_order != "shuffled", device=config.device,
    )  # fmt: skip


def slotted(model: RecModel) -> list[SlottedRows]:
    """The storages of a model whose rows come and go."""
    return [group.storage for group in model.embeddings.groups if isinstance(group.storage, SlottedRows)]


def staged(
    batches: Batches, model: RecModel, config: TrainConfig, *, progress: Progress | None = None
) -> Batches | Stage:
    """The batches of a run with their rows in place, where rows come and go; ``progress`` is called while next uses are
    recorded."""
    if not slotted(model):
        return batches
    return stage(
        batches, model, lookahead=config.lookahead, in_flight=config.in_flight, foresight=config.foresight,
        progress=progress,
    )  # fmt: skip


def iterate(batches: Iterable[Batch]) -> Generator[Batch, None, None]:
    """The batches as a generator, which can be closed: that ends the threads behind a stage."""
    yield from batches


class StageTotals(Recorder):
    """Seconds of each stage over all threads, each without the stages inside it.

    A span is known when it ends, and those inside it ended before: each thread keeps its last ones until one ends that
    turns out to contain them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._totals: list[Counter[str]] = []  # nanoseconds, of each thread
        self._own = threading.local()

    def add(self, name: str, start: int, end: int, step: int | None) -> None:
        own = self._own
        if not hasattr(own, "totals"):
            own.totals, own.within = Counter(), deque(maxlen=_WITHIN)
            self._totals.append(own.totals)
        within: deque[tuple[int, int]] = own.within
        rest = end - start
        while within and within[-1][0] >= start:
            begun, ended = within.pop()
            rest -= ended - begun
        within.append((start, end))
        own.totals[name] += rest

    def seconds(self) -> dict[str, float]:
        """Seconds of each of :data:`STAGES` so far."""
        found = Counter[str]()
        for totals in list(self._totals):
            found.update(totals.copy())
        return {name: found[name] / 1e9 for name in STAGES}

    @contextlib.contextmanager
    def recording(self, model: RecModel) -> Iterator[None]:
        """Record within the block if rows of the model can move, and the caller records no timeline of its own."""
        with contextlib.ExitStack() as stack:
            if slotted(model):
                with contextlib.suppress(RuntimeError):
                    stack.enter_context(self)
            yield


def moved(model: RecModel, feed: Iterable[Batch], totals: StageTotals) -> dict[str, float]:
    """What has moved so far: distinct rows wanted and found in place, bytes fetched, seconds that training waited; and
    seconds of every stage. Nothing where no rows can move."""
    storages = slotted(model)
    if not storages:
        return {}
    waited: float = getattr(feed, "stall_seconds", 0.0)
    return {
        "rows": sum(storage.stats.rows for storage in storages),
        "hits": sum(storage.stats.hits for storage in storages),
        "bytes": sum(storage.stats.fetched_bytes for storage in storages),
        "waited": waited + sum(storage.stats.stall_seconds for storage in storages),
    } | {_SECONDS + name: value for name, value in totals.seconds().items()}


def movement(amount: dict[str, float], steps: int, times: Clock) -> dict[str, Any]:
    """The fields of a training record for what was :func:`moved` in ``steps``; ``times``: the clock over those whose
    times count. ``stage_seconds`` adds up threads, waited for or not."""
    if not amount:
        return {}
    return {
        "hit_rate": amount["hits"] / amount["rows"] if amount["rows"] else 1.0,
        "fetched_mib_per_step": amount["bytes"] / 2**20 / steps,
        "stall_share": min(1.0, times.counted["waited"] / times.seconds),
        "stage_seconds": {
            name: round(times.counted[_SECONDS + name], 6)
            for name in STAGES
            if times.counted.get(_SECONDS + name, 0.0) > 0
        },
    }
