"""Where the rows of a run lie, and what moves between fast memory and their home while it trains."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from stoker.base.errors import ConfigError
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.spec import FeatureSpec
from stoker.dataset.split import BatchStream, EpochRest
from stoker.models import MODELS, RecModel
from stoker.optim import RowOptimizer
from stoker.placement.hot_cold import HotBatches
from stoker.placement.placement import Placement
from stoker.placement.planner import plan
from stoker.placement.profile import Profile
from stoker.placement.weigh import Choice
from stoker.tables import Stage, TableConfig, TensorTrain, stage
from stoker.tables.compressed.tensor_train import stored_tables
from stoker.tables.slots.foresight import Progress
from stoker.tables.slots.slotted import SlottedRows
from stoker.training.config import TrainConfig
from stoker.training.scores.evaluation import SCORED
from stoker.training.sizing.room import check_memory
from stoker.training.terminal.progress import Clock
from stoker.training.totals import STAGES, StageTotals

__all__ = [
    "Epochs",
    "MeteredStage",
    "moved",
    "movement",
    "place",
    "place_run",
    "place_scoring",
    "slotted",
    "staged",
    "tidy",
]

Batches = TypeVar("Batches", bound=Iterable[Batch])

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
    device_memory: str | int,
    host_memory: str | int | None = None,
    home_path: str | None = None,
    batch_size: int = 2048,
    lookahead: int = 64,
    in_flight: int | None = None,
    spill: Literal["parts", "refuse"] = "parts",
    foresight: bool = False,
    strategy: Choice = "auto",
    tensor_trains: Mapping[str, TensorTrain] | None = None,
    scheduled: bool = False,
    device: torch.device | str | None = None,
    profile: Profile | None = None,
) -> Placement:
    """:func:`stoker.plan` with what a dataset knows: counts, how many ids its features have, and, where hot and cold
    batches come apart (``scheduled``), how many of them are hot.

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
        tables, counts, optimizer=optimizer, device_memory=device_memory, host_memory=host_memory, path=home_path,
        batch_size=batch_size, lookahead=lookahead, in_flight=in_flight, spill=spill, foresight=foresight,
        strategy=strategy, tensor_trains=tensor_trains, hot_batches=hot, device=device, profile=profile,
        ids_per_feature=mean, max_ids=most,
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
    """Where a checkpoint's rows lie while they score ``data``, and with how many examples at a time.

    Args:
        manifest: of the checkpoint.
        data: its dataset.
        settings: ``device_memory`` (None or "all": no limit), ``host_memory`` and ``home_path``.
        batch_size: examples; None takes as many as the budget allows, at most 8192.
        lookahead: batches whose ids are known in advance.
        device: where the slots are.

    Returns:
        The placement, None where everything lies on the device; and the batch size.

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
                home_path=settings.get("home_path"), batch_size=size, lookahead=lookahead, device=device,
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
        home_path=config.home_path, batch_size=config.batch_size, lookahead=config.lookahead,
        in_flight=config.in_flight, spill=config.spill, foresight=config.foresight,
        strategy=config.strategy, tensor_trains=config.tensor_trains(data.schema),
        scheduled=config.batch_order != "shuffled", device=config.device,
    )  # fmt: skip


def slotted(model: RecModel) -> list[SlottedRows]:
    """The storages of a model whose rows come and go."""
    return [group.storage for group in model.embeddings.groups if isinstance(group.storage, SlottedRows)]


class MeteredStage(Stage):
    """Counts how long each stage of training takes while a loop goes through its batches."""

    totals: StageTotals

    @classmethod
    def of(cls, made: Stage, config: TrainConfig, progress: Progress | None) -> MeteredStage:
        """The same batches, staged in the same way."""
        found = cls(
            made.stream, made.tables, made.lookahead, config.in_flight, made.background, foresight=config.foresight,
            progress=progress,
        )  # fmt: skip
        found.totals = StageTotals()
        return found

    def __iter__(self) -> Iterator[Batch]:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(RuntimeError):  # the caller records a timeline of its own
                stack.enter_context(self.totals)
            yield from super().__iter__()


def staged(
    batches: Batches, model: RecModel, config: TrainConfig, *, metered: bool = True, progress: Progress | None = None
) -> Batches | Stage:
    """The batches of a run with their rows in place, where rows come and go.

    Args:
        batches: of the run.
        model: whose rows they are.
        config: the run's settings.
        metered: with times by stage.
        progress: called while next uses are recorded.
    """
    if not slotted(model):
        return batches
    made = stage(
        batches, model, lookahead=config.lookahead, in_flight=config.in_flight, foresight=config.foresight,
        progress=progress,
    )  # fmt: skip
    return MeteredStage.of(made, config, progress) if metered else made


@contextlib.contextmanager
def tidy(config: TrainConfig) -> Iterator[list[RecModel]]:
    """Of a run that fails, threads and files of the models in the list that this gives are closed, and no empty
    directory for a home stays that was not there before."""
    folder = None if config.home_path is None or config.device_memory is None else Path(config.home_path)
    missing = [] if folder is None else [one for one in (folder, *folder.parents) if not one.exists()]
    models: list[RecModel] = []
    try:
        yield models
    except BaseException:
        for model in models:
            _let_go(model)
        for one in missing:
            with contextlib.suppress(OSError):  # not empty, or never made
                one.rmdir()
        raise


def _let_go(model: RecModel) -> None:
    """Close threads and files of a model that is given up; what its rows were does not matter any more."""
    for storage in slotted(model):
        with contextlib.suppress(Exception):
            storage.close()


def moved(model: RecModel, feed: Iterable[Batch]) -> dict[str, float]:
    """What has moved so far: distinct rows wanted and found in place, bytes fetched, seconds that training waited; and
    seconds of every stage."""
    storages = slotted(model)
    if not storages:
        return {}
    waited: float = getattr(feed, "stall_seconds", 0.0)
    totals: StageTotals | None = getattr(feed, "totals", None)
    seconds = {} if totals is None else totals.seconds()
    return {
        "rows": sum(storage.stats.rows for storage in storages),
        "hits": sum(storage.stats.hits for storage in storages),
        "bytes": sum(storage.stats.fetched_bytes for storage in storages),
        "waited": waited + sum(storage.stats.stall_seconds for storage in storages),
    } | {_SECONDS + name: value for name, value in seconds.items()}


def movement(amount: dict[str, float], steps: int, times: Clock) -> dict[str, Any]:
    """The fields of a training record for what moved during ``steps``; none if nothing could.

    Args:
        amount: counted in them, see :func:`moved`.
        steps: batches.
        times: the clock over those of the steps whose times count.

    ``stage_seconds`` adds up threads: what goes on beside training is in it, waited for or not.
    """
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
