"""A training step, and throwaway models that do steps of a run: to replay, to measure, to search rates and sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stoker.base.device import device_memory, kept_memory, resolve_device
from stoker.base.errors import CheckpointError, ConfigError
from stoker.base.files import url_of
from stoker.base.progress import Progress
from stoker.base.remote import local_run
from stoker.base.timeline import span
from stoker.base.units import parse_size
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.spec import FeatureSpec
from stoker.dataset.split import BatchStream
from stoker.models import RecModel
from stoker.optim import Constant, RowOptimizer, Schedule
from stoker.placement.budget import MemoryBudget
from stoker.placement.placement import Placement
from stoker.tables import Ranks, Strategy
from stoker.training.config import TrainConfig
from stoker.training.files import checkpoint, loading
from stoker.training.files.rundir import RunDirectory, open_dataset, own_dataset
from stoker.training.placing import iterate, place_run, rows_bytes, slotted
from stoker.training.ranks.sharded import ShardedLoss, generator_states, own_threads
from stoker.training.scheduled import Feed, HotColdStream, run_stream, swap_loss
from stoker.training.scores.evaluation import check_dataset
from stoker.training.settings import MACHINE, REPLAYED, MachineConfig


@contextlib.contextmanager
def process_settings(config: TrainConfig) -> Iterator[list[RecModel]]:
    """Set the run's number of threads, seed torch's generators, and let glibc keep freed memory; restore all on exit.

    Only the generators of the CPU and of the run's device are seeded. If the block fails, the spill files of the models
    that it appended to the list are closed, and empty directories that were made for them are deleted.
    """
    device = resolve_device(config.device)
    local = config.home_path is not None and url_of(config.home_path) is None and config.device_memory is not None
    folder = Path(config.home_path or "") if local else None
    missing = [] if folder is None else [one for one in (folder, *folder.parents) if not one.exists()]
    models: list[RecModel] = []
    threads = torch.get_num_threads()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), kept_memory():
        seed_generators(config)
        try:
            if config.threads is not None:
                torch.set_num_threads(config.threads)
            yield models
        except BaseException:
            for storage in (storage for model in models for storage in slotted(model)):
                with contextlib.suppress(Exception):  # the rows are not needed any more
                    storage.close()
            for one in missing:
                with contextlib.suppress(OSError):  # not empty, or not made
                    one.rmdir()
            raise
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def seed_generators(config: TrainConfig) -> None:
    """Seed torch's generators of the CPU and of the run's device, for models with dropout."""
    torch.default_generator.manual_seed(config.seed)
    device = resolve_device(config.device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(config.seed)


def open_stream(
    config: TrainConfig, data: Dataset, optimizer: RowOptimizer, placement: Placement | None
) -> BatchStream | HotColdStream:
    """Return the training batches of a run, with a copy of its rows in memory if the settings and free memory allow.

    Batches for tables with slots or tensor trains are made in main memory, where slots and products are planned.
    """
    device = resolve_device(config.device)
    gpu = device.type == "cuda"
    placed = (placement is not None and not placement.resident) or (gpu and bool(config.tensor_trains(data.schema)))
    budget = 0
    if config.data_memory != "auto":
        budget = parse_size(config.data_memory)
    elif gpu and not placed:
        rows = rows_bytes(config.stored_tables(data.schema), optimizer.state)
        budget = max(0, (device_memory(device)[0] - rows) // 2)
    return run_stream(
        config, data, reuse=not gpu and not placed,  # a staged batch waits, so its memory is not reused
        pin_memory=gpu, device=device if gpu and not placed else None, data_memory=budget,
    )  # fmt: skip


class Replica:
    """The model of a run with its optimizers.

    Args:
        config: settings of the run.
        spec: columns of its dataset.
        schedule: factor on the learning rates.
        placement: where the rows are; None: on the device.
        dense_schedule: factor on the dense rate, if it has its own.
        wait: synchronize with the GPU after each part of a step, so that a timeline shows the time of each.
        ranks: processes among which the rows are divided.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: FeatureSpec,
        schedule: Schedule,
        placement: Mapping[str, Strategy] | None,
        dense_schedule: Schedule | None = None,
        *,
        wait: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        if config.average_every is not None:
            if ranks is None:
                raise ConfigError(
                    f"average_every is {config.average_every}, so rows are the means of copies on several ranks: one "
                    "process cannot train or repeat these steps. Start ranks (--ranks), or leave it out.",
                    settings=("average_every",),
                )
            ranks = ranks.averaging(config.average_every)
        self.config, self.schedule, self.ranks = config, schedule, ranks
        self.model = config.make_model(spec, config.make_row_optimizer(schedule), placement, ranks)
        self.dense = config.make_dense_optimizer(self.model)
        if config.compile:
            self.model.compile_dense()
        if config.cuda_graphs:
            self.model.graph_dense()
        self.by_shards = None if config.shards == 1 else ShardedLoss(self.model)
        self._loss = self.by_shards or self.model.loss
        self.model.train()
        self._dense_factor = partial(config.dense_factor, dense_schedule or schedule)
        self._parameters = self.model.dense_parameters()
        self._wait = wait and self.model.device.type == "cuda"

    def step(self, batch: Batch) -> Tensor:
        """Train on a batch; return its loss."""
        if self.config.shards == 1:
            return self._step(batch)
        with own_threads():
            return self._step(batch)

    def _step(self, batch: Batch) -> Tensor:
        for group in self.dense.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * self._dense_factor(batch.step)
        with span("forward"):
            loss = self._loss(batch)  # with shards also the gradients
            self.synchronize()
        with span("backward"):
            loss.backward()  # rows are updated here, in place
            self.synchronize()
        with span("dense"):
            if self.config.dense_clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._parameters, self.config.dense_clip_norm)
            self.dense.step()
            self.dense.zero_grad()
            self.synchronize()
        return loss.detach()

    def average(self, *, now: bool) -> bool:
        """Return True if all ranks have the same rows; ``now``: average their copies first."""
        tables = self.model.embeddings
        if now:
            tables.average()
        return tables.averages is None or not tables.averages.pending

    def synchronize(self) -> None:
        """Wait for the GPU, if ``wait`` is set."""
        if self._wait:
            torch.cuda.synchronize(self.model.device)

    def close(self) -> None:
        """Close threads and files of the tables."""
        self.model.embeddings.close()


@contextlib.contextmanager
def throwaway(
    data: Dataset, config: TrainConfig, steps: int, dense: Schedule | None = None, rows: Schedule | None = None
) -> Iterator[tuple[Replica, Iterator[Batch]]]:
    """Yield a new replica, placed by the settings, and its shuffled batches; restore generators and threads on exit.

    The schedule of the settings is ignored: ``dense`` and ``rows`` are those of the rates; None: constant.
    """
    config = config.replace(batch_order="shuffled", dense_warmup=0)
    with process_settings(config) as models:
        optimizer = config.make_row_optimizer(Constant())
        placement = place_run(config, data, optimizer)
        stream = open_stream(config, data, optimizer, placement)  # with the cache of the run, so steps take as long
        replica = Replica(config, data.schema, rows or Constant(), placement, dense or Constant())
        models.append(replica.model)
        with contextlib.closing(iterate(Feed(stream, steps, replica.model, config))) as batches:
            yield replica, batches
        replica.close()


@dataclass(frozen=True, kw_only=True)
class Section:
    """Some steps of a run."""

    run: RunDirectory
    data: Dataset
    config: TrainConfig
    checkpoint: Path | None  # first state; None: the initial model
    begin: int  # step of the first batch, counted from 0
    steps: int  # batches
    total: int  # of the whole run


@dataclass(frozen=True)
class SectionArguments(MachineConfig, MemoryBudget):
    """The arguments of :func:`stoker.verify` and :func:`stoker.trace`: steps of a run, and settings of the replay."""

    run: str | Path
    _: KW_ONLY
    steps: int = REPLAYED
    begin: int | Literal["start"] | None = None
    data: Dataset | str | Path | None = None
    progress: Progress | None = None


def find_section(
    run: str | Path,
    *,
    steps: int,
    begin: int | Literal["start"] | None = None,
    data: Dataset | str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Section:
    """Return the section of a run to replay; ``settings`` among :data:`MACHINE` replace those of the run.

    ``begin``: a step that has a checkpoint, or "start"; None takes the newest whole checkpoint with this many steps
    after it, else the start.
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}; give at least 1.")
    directory = RunDirectory(local_run(run))
    values = directory.config()
    machine = {name: value for name, value in (settings or {}).items() if name in MACHINE}
    config = TrainConfig.from_dict(values["settings"]).replace(**machine)
    dataset = open_dataset(data or own_dataset(values, "Name it with --data DATASET."))
    total = config.steps or config.epochs * len(run_stream(config, dataset))
    found = None
    if begin is None:
        early = (step for step in reversed(directory.steps()) if total - step >= steps)
        found = next((step for step in early if directory.problem(step) is None), None)
    elif begin not in ("start", 0):
        if begin not in directory.steps():
            known = ", ".join(f"{step:,}" for step in directory.steps()) or "none"
            raise CheckpointError(f"{run} has no checkpoint at step {begin:,}. It has: {known}. Or begin at the start.")
        checkpoint.verify(directory.checkpoint(int(begin)))
        found = int(begin)
    first = found or 0
    if first >= total:
        raise ConfigError(f"the run ends at step {total:,}, so no step follows step {first:,}. Begin earlier.")
    return Section(
        run=directory, data=dataset, config=config, checkpoint=None if found is None else directory.checkpoint(found),
        begin=first, steps=min(steps, total - first), total=total,
    )  # fmt: skip


class Rerun(Replica):
    """The model, optimizers and batches of a run at the first step of a section.

    ``endless``: look ahead beyond the end of the run, so that its last steps take as long as others.
    """

    def __init__(
        self, section: Section, placement: Placement | None, *, wait: bool = False, endless: bool = False
    ) -> None:
        config, data = section.config, section.data
        seed_generators(config)
        stream = run_stream(config, data)
        super().__init__(config, data.schema, config.make_schedule(section.total), placement, wait=wait)
        self.data = data
        if section.checkpoint is not None:
            manifest = checkpoint.read_manifest(section.checkpoint)
            check_dataset(data, self.model.spec, manifest["extra"].get("dataset"))
            loading.load(section.checkpoint, self.model, self.dense, stream)
        end = section.total + (config.some_lookahead + 1 if endless else 0)
        # Next uses are recorded for these steps only: for a whole epoch it could take longer than the steps.
        foreseen = section.begin + section.steps
        self.feed = Feed(stream, end, self.model, config, foreseen=foreseen)
        self._drawn = generator_states(self.model.device)
        self._swap()

    def step(self, batch: Batch) -> Tensor:
        torch.set_rng_state(self._drawn[0])
        for state in self._drawn[1:]:
            torch.cuda.set_rng_state(state, self.model.device)
        loss = super().step(batch)
        self._drawn = generator_states(self.model.device)  # so two reruns in turns draw the same numbers
        self._swap()
        return loss

    def _swap(self) -> None:
        """Choose the next segment of hot or cold batches as the run did."""
        if self.feed.swapping:
            with span("swap"):
                self.feed.swap(swap_loss(self.model, self.data, self.config))
                self.synchronize()
