"""Where the rows of a run lie, and what moves between fast memory and their home while it trains."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from stoker.data.batch import Batch
from stoker.data.dataset import Dataset
from stoker.data.features import FeatureSpec
from stoker.data.reader import BatchStream
from stoker.models import RecModel
from stoker.optim import RowOptimizer
from stoker.placement.placement import Placement
from stoker.placement.planner import plan
from stoker.placement.profile import Profile
from stoker.tables import Stage, TableConfig, stage, tables_for
from stoker.tables.slotted import SlottedRows
from stoker.training.config import TrainConfig
from stoker.training.totals import STAGES, StageTotals

__all__ = ["Epochs", "let_go", "moved", "movement", "place", "place_run", "place_saved", "slotted", "staged"]

_SECONDS = "seconds."  # before the name of a stage, in what :func:`moved` counts


class Epochs:
    """The batches of a run, epoch after epoch, up to ``total`` in all; a lookahead sees across the ends of epochs."""

    def __init__(self, stream: BatchStream, total: int) -> None:
        self.stream, self.total = stream, total

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
    device: torch.device | str | None = None,
    profile: Profile | None = None,
) -> Placement:
    """:func:`stoker.plan` with what a dataset knows: counts, and how many ids its features have.

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
    return plan(
        tables, counts, optimizer=optimizer, device_memory=device_memory, host_memory=host_memory, path=home_path,
        batch_size=batch_size, lookahead=lookahead, in_flight=in_flight, spill=spill, device=device, profile=profile,
        ids_per_feature=mean, max_ids=most,
    )  # fmt: skip


def place_saved(
    manifest: Mapping[str, Any], data: Dataset, *, device_memory: str | None, **budget: Any
) -> Placement | None:
    """The placement of a checkpoint's tables, for scoring them on ``data``; None: everything on the device.

    Args:
        manifest: of the checkpoint.
        data: its dataset.
        device_memory: for rows and their state; None means all that is needed.
        budget: further settings of :func:`place`.

    Raises:
        ConfigError: a budget that cannot work.
    """
    if device_memory in (None, "all"):
        return None
    settings = manifest["model"]
    tables = tables_for(
        FeatureSpec.from_dict(manifest["features"]), settings["embedding_dim"], pooling=settings["pooling"],
        dtype=settings["dtype"],
    )  # fmt: skip
    optimizer = RowOptimizer.from_dict(manifest["row_optimizer"])
    return place(data, tables, optimizer, device_memory=str(device_memory), **budget)


def place_run(config: TrainConfig, data: Dataset, optimizer: RowOptimizer) -> Placement | None:
    """The placement that a run's settings ask for; None: everything on the device.

    Raises:
        ConfigError: a budget that cannot work.
    """
    if config.device_memory is None:
        return None
    tables = tables_for(data.schema, config.embedding_dim, pooling=config.pooling, dtype=config.dtype)
    return place(
        data, tables, optimizer, device_memory=config.device_memory, host_memory=config.host_memory,
        home_path=config.home_path, batch_size=config.batch_size, lookahead=config.lookahead,
        in_flight=config.in_flight, spill=config.spill, device=config.device,
    )  # fmt: skip


def slotted(model: RecModel) -> list[SlottedRows]:
    """The storages of a model whose rows come and go."""
    return [group.storage for group in model.embeddings.groups if isinstance(group.storage, SlottedRows)]


class MeteredStage(Stage):
    """Counts how long each stage of training takes while a loop goes through its batches."""

    totals: StageTotals

    @classmethod
    def of(cls, made: Stage, in_flight: int | None) -> MeteredStage:
        """The same batches, staged in the same way."""
        found = cls(made.stream, made.tables, made.lookahead, in_flight, made.background)
        found.totals = StageTotals()
        return found

    def __iter__(self) -> Iterator[Batch]:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(RuntimeError):  # the caller records a timeline of its own
                stack.enter_context(self.totals)
            yield from super().__iter__()


def staged(batches: Epochs, model: RecModel, config: TrainConfig, *, metered: bool = True) -> Epochs | Stage:
    """The batches of a run with their rows in place, where rows come and go; ``metered``: with times by stage."""
    if not slotted(model):
        return batches
    made = stage(batches, model, lookahead=config.lookahead, in_flight=config.in_flight)
    return MeteredStage.of(made, config.in_flight) if metered else made


def let_go(model: RecModel) -> None:
    """Close threads and files of a model that is given up; what its rows were does not matter any more."""
    for storage in slotted(model):
        with contextlib.suppress(Exception):
            storage.close()


def moved(model: RecModel, feed: Epochs | Stage) -> dict[str, float]:
    """What has moved so far: distinct rows wanted and found in place, bytes fetched, seconds that training waited; and
    seconds of every stage."""
    storages = slotted(model)
    if not storages:
        return {}
    waited = feed.stall_seconds if isinstance(feed, Stage) else 0.0
    seconds = feed.totals.seconds() if isinstance(feed, MeteredStage) else {}
    return {
        "rows": sum(storage.stats.rows for storage in storages),
        "hits": sum(storage.stats.hits for storage in storages),
        "bytes": sum(storage.stats.fetched_bytes for storage in storages),
        "waited": waited + sum(storage.stats.stall_seconds for storage in storages),
    } | {_SECONDS + name: value for name, value in seconds.items()}


def movement(amount: dict[str, float], steps: int, seconds: float) -> dict[str, Any]:
    """The fields of a training record for what moved during ``steps`` and ``seconds``; none if nothing could.

    ``stage_seconds`` adds up threads: what goes on beside training is in it, waited for or not.
    """
    if not amount:
        return {}
    return {
        "hit_rate": amount["hits"] / amount["rows"] if amount["rows"] else 1.0,
        "fetched_mib_per_step": amount["bytes"] / 2**20 / steps,
        "stall_share": min(1.0, amount["waited"] / seconds),
        "stage_seconds": {
            name: round(amount[_SECONDS + name], 6) for name in STAGES if amount.get(_SECONDS + name, 0.0) > 0
        },
    }
