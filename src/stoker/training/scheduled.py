"""Training on a classified dataset: hot and cold batches in the order of the Shuffle Scheduler.

Each segment of the schedule is staged separately, and a lookahead ends with the segment: the test loss at its end
decides which batches follow.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from stoker.base.errors import CheckpointError, ConfigError
from stoker.base.progress import Progress
from stoker.base.units import parse_size, quoted
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.split import BatchStream, EpochRest, Split
from stoker.models import RecModel
from stoker.ops.loss import LISTS
from stoker.tables import Stage
from stoker.tables.ranks.share import Shares
from stoker.tables.slots.window import Ahead
from stoker.training.config import TrainConfig
from stoker.training.placing import Epochs, iterate, staged
from stoker.training.scores.evaluation import evaluate
from stoker.training.shuffle import Decision, Kind, Segment, ShuffleScheduler

_KIND = "stoker.HotColdStream"
TRAINED_PER_TESTED = 50  # a row of a test loss costs no more than a trained one, so tests take at most 2 % of the time


def batch_order(config: TrainConfig, data: Dataset) -> Literal["shuffled", "hot-cold"]:
    """Return the order of batches for a dataset; "auto" means hot-cold if the dataset is classified."""
    if config.batch_order == "shuffled" or (config.batch_order == "auto" and data.hot_cold is None):
        return "shuffled"
    if data.hot_cold is None:
        raise ConfigError(
            f"batch_order 'hot-cold' needs a classified dataset, but {data.path} is not. Classify it with: "
            f"stoker classify {quoted(data.path)} --device-memory SIZE --out DIRECTORY",
            settings=("batch_order",),
        )
    if not data.splits.get("valid"):
        raise ConfigError(
            f"{data.path} has no validation rows, whose loss the schedule of hot and cold batches needs. Choose "
            "batch_order 'shuffled', or prepare and classify the data with a split that has some.",
            settings=("batch_order",),
        )
    return "hot-cold"


def run_stream(config: TrainConfig, data: Dataset, **options: Any) -> BatchStream | HotColdStream:
    """Return the training batches of a run; ``options`` are those of :meth:`stoker.dataset.split.Split.batches`."""
    lists = config.loss in LISTS
    if lists and data.groups is None:
        raise ConfigError(f"loss {config.loss} is over lists, and the dataset was prepared without a group column. "
                          "Prepare it with one, or take loss bce.", settings=("loss",))  # fmt: skip
    if batch_order(config, data) == "shuffled":
        options |= {"whole_groups": True} if lists else {}
        return data.train.batches(config.batch_size, seed=config.seed, shuffle_memory=config.shuffle_memory, **options)
    if config.loss != "bce":
        what = "lists, which hot and cold batches would cut" if lists else "batches, which hot items would fill"
        raise ConfigError(f"loss {config.loss} is over {what}. Give batch_order 'shuffled', or loss bce.",
                          settings=("loss", "batch_order"))  # fmt: skip
    memory, whole = parse_size(config.shuffle_memory), data.train.bytes
    fits = int(options.pop("data_memory", None) or 0) >= whole

    def batches(part: Split) -> BatchStream:
        row = -(-part.bytes // max(1, len(part)))
        share = max(1, row, -(-memory * part.bytes // whole))
        return part.batches(
            config.batch_size, seed=config.seed, shuffle_memory=share, data_memory=whole if fits else None, **options
        )

    tested = min(config.schedule_rows or len(data.valid), len(data.valid))
    return HotColdStream(batches(data.cold), batches(data.hot), ShuffleScheduler(config.swap_rate), tested=tested)


def swap_loss(model: RecModel, data: Dataset, config: TrainConfig, stop: Callable[[], bool] | None = None) -> float:
    """Return the test loss for the schedule: the log loss on the first ``schedule_rows`` validation rows."""
    return evaluate(model, data.valid, rows=config.schedule_rows, stop=stop)["log_loss"]


class HotColdStream:
    """Hot and cold batches, segment by segment in the order of the scheduler. An epoch has each batch once.

    A ``for`` loop yields the rest of a segment, from batch :attr:`step`. ``tested``: rows of a test loss, which is left
    out where these would be more than 2 % of the rows trained so far.
    """

    def __init__(self, cold: BatchStream, hot: BatchStream, scheduler: ShuffleScheduler, *, tested: int = 0) -> None:
        self.streams: dict[Kind, BatchStream] = {"cold": cold, "hot": hot}
        self.scheduler, self.tested = scheduler, tested
        self.step = 0  # number of the first batch of the next loop
        self.first = 0  # number of the first batch of the segment
        self.total = self.foreseen = sys.maxsize  # batches of the run; next uses may be recorded up to ``foreseen``
        self._open: dict[Kind, Generator[Batch, None, None]] = {}
        scheduler.begin(len(cold), len(hot))
        scheduler.next_segment()

    def __len__(self) -> int:
        """Batches per epoch."""
        return sum(map(len, self.streams.values()))

    @property
    def resident(self) -> bool:
        """True if the rows are cached in memory."""
        return any(stream.resident for stream in self.streams.values())

    def __str__(self) -> str:
        cold, hot = (f"{len(stream):,} {kind}" for kind, stream in self.streams.items())
        return f"{cold} and {hot} batches an epoch, swapped by the test loss, at first at R({self.scheduler.rate:g})"

    @property
    def end(self) -> int:
        """Number of the first batch after the segment."""
        return self.first + len(self._segment)

    @property
    def _segment(self) -> Segment:
        assert self.scheduler.segment is not None
        return self.scheduler.segment

    def begin(self, step: int) -> None:
        """Move to batch ``step``; if the segment ends there, go to the next one."""
        self.step = step
        if step == self.end:
            self._proceed()

    def _proceed(self) -> None:
        self.first = self.end
        self.scheduler.next_segment()

    def is_swapping(self, step: int) -> bool:
        """Return True if :meth:`swap` is due after ``step`` batches."""
        tested = (self.scheduler.swaps + 1) * self.tested
        affordable = TRAINED_PER_TESTED * tested <= step * self.streams["cold"].batch_size
        return step == self.end and self.scheduler.due and affordable

    def swap(self, loss: float) -> Decision:
        """Set the rate by the test loss, and go to the next segment."""
        decision = self.scheduler.swap(loss)
        self._proceed()
        return decision

    def _places(self, step: int) -> dict[Kind, int]:
        """Return the batches of each kind that this epoch has had before batch ``step`` of the segment."""
        rest = Counter(islice(self._segment.kinds(), step - self.first, None))
        return {kind: done - rest[kind] for kind, done in self.scheduler.done.items()}

    def _kinds(self, step: int, until: int) -> list[Kind]:
        return list(islice(self._segment.kinds(), step - self.first, until - self.first))

    def __iter__(self) -> Iterator[Batch]:
        sources = {kind: self._source(kind, place) for kind, place in self._places(self.step).items()}
        for number, kind in enumerate(self._kinds(self.step, min(self.end, self.total)), self.step):
            yield replace(next(sources[kind]), step=number)

    def _source(self, kind: Kind, place: int) -> Generator[Batch, None, None]:
        """Return the batches of one kind from ``place``; continue an open iterator, for opening reads all shards."""
        stream, epoch = self.streams[kind], self.scheduler.epoch
        if kind not in self._open or (stream.epoch, stream.position) != (epoch, place):
            if kind in self._open:
                self._open.pop(kind).close()
            stream.epoch, stream.position = epoch, place
            self._open[kind] = iterate(stream)
        return self._open[kind]

    def rest_of_epoch(self, step: int, *, ids_only: bool = False) -> _SegmentRest:
        """Return the batches from number ``step`` to the end of the segment, without moving the stream."""
        sources = {
            kind: self.streams[kind].rest_of_epoch(
                self.scheduler.epoch * len(self.streams[kind]) + place, ids_only=ids_only
            )
            for kind, place in self._places(step).items()
        }
        return _SegmentRest(self._kinds(step, max(step, min(self.end, self.foreseen))), sources)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position at batch ``step`` of the segment; None: at the first batch of the next loop."""
        step = self.step if step is None else step
        places = self._places(step)
        streams: dict[str, Any] = {
            kind: {**stream.state_dict(), "epoch": self.scheduler.epoch, "position": places[kind]}
            for kind, stream in self.streams.items()
        }
        return {"kind": _KIND, "step": step, "first": self.first, "scheduler": self.scheduler.state_dict(), **streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of ``state``."""
        if state.get("kind") != _KIND:
            raise CheckpointError(
                "the saved data position is not one of hot and cold batches. Open the dataset that the run started on."
            )
        for kind, stream in self.streams.items():
            stream.load_state_dict(state[kind])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.first = int(state["step"]), int(state["first"])


class _SegmentRest:
    """The rest of a segment, read without moving the stream."""

    def __init__(self, kinds: list[Kind], sources: dict[Kind, EpochRest]) -> None:
        self._kinds, self._sources = kinds, sources

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Iterator[Batch]:
        sources = {kind: iter(source) for kind, source in self._sources.items()}
        return (next(sources[kind]) for kind in self._kinds)


class Feed:
    """The batches of a run, staged. Hot and cold batches are staged segment by segment.

    If :attr:`swapping`, the loop should measure the test loss and call :meth:`swap` before it takes the next batch;
    otherwise the rate stays. ``foreseen``: record next uses up to this batch; None: of all batches.
    """

    def __init__(
        self,
        stream: BatchStream | HotColdStream,
        total: int,
        model: RecModel,
        config: TrainConfig,
        *,
        foreseen: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.total = total
        self.step = stream.step  # number of the next batch
        self.stall_seconds = 0.0  # in which training waited for rows
        self.hurry: Callable[[], bool] = lambda: False  # see Stage.hurry
        self._hot_cold = stream if isinstance(stream, HotColdStream) else None
        self._stream = Epochs(stream, total) if isinstance(stream, BatchStream) else stream
        self._stream.total, self._stream.foreseen = total, min(total, foreseen or total)
        tables = model.embeddings
        self._batches: Any = self._stream
        if tables.divided and tables.ranks is not None:
            self._batches = Shares(self._stream, tables.ranks, tables.shards)
        self._model, self._config, self._progress = model, config, progress
        self._depth = config.in_flight  # batches in flight at the end of the last segment
        self._ahead: Ahead | None = None  # and how far it looked

    def __iter__(self) -> Iterator[Batch]:
        begun = self.step
        while self.step < self.total:
            if self._hot_cold is not None:
                self._hot_cold.begin(self.step)
            first, waited, start = self.step, 0.0, time.perf_counter()
            segment = staged(self._batches, self._model, self._config, progress=self._progress)
            if isinstance(segment, Stage):
                segment.hurry, segment.in_flight = self.hurry, self._depth or segment.in_flight
                segment.ahead = self._ahead = self._ahead or segment.ahead
            with closing(iterate(segment)) as batches:
                for batch in batches:
                    if isinstance(segment, Stage):
                        # A stage leaves out the wait for its first batch, but between segments training waits.
                        late = segment.background and begun < self.step == first
                        self.stall_seconds += segment.stall_seconds - waited + late * (time.perf_counter() - start)
                        waited, self._depth = segment.stall_seconds, segment.in_flight
                    self.step = batch.step + 1
                    yield batch

    @property
    def swapping(self) -> bool:
        """True if :meth:`swap` is due before the next batch."""
        return self._hot_cold is not None and self._hot_cold.is_swapping(self.step) and self.step < self.total

    def swap(self, loss: float) -> Decision:
        """Set the rate by the test loss, and go to the next segment."""
        assert self._hot_cold is not None
        return self._hot_cold.swap(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch."""
        return self._stream.state_dict(self.step)
