"""One split of a dataset, and its batches: whole, and in the order of the epoch.

Rows are copied once, from the mapped shards to the tensors of the batch. Only the pages of one pool are resident (at
most ``shuffle_memory``): a finished pool is unmapped, and the kernel reads the next pool meanwhile. These are clean
pages of the page cache; the stream itself takes about 1 MB. If ``data_memory`` has room for the split, its rows are
copied there once instead, and batches are gathered from the copy (:class:`stoker.dataset.gather.ResidentRows`).

A shard is checked before its first row is read: in file order one shard after the other, with a shuffle all of them
before the first batch.

Legend: B rows of a batch, F features, L ids in all, W ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError, ConfigError, require
from stoker.base.ordered import start_thread
from stoker.base.settings import method_with_arguments_of
from stoker.base.units import format_size, parse_size
from stoker.dataset.batch import Batch
from stoker.dataset.gather import Gather, ResidentRows, make_gather, new_tensor
from stoker.dataset.order import EpochOrder, GroupOrder, rows_that_fit
from stoker.dataset.rows import SplitRows

T = TypeVar("T")
_ARROW_ROWS = 2**16  # of a record batch
_KIND = "stoker.BatchStream"


class _RankPositions:
    """The positions of the epoch in batch k of rank r.

    Global batch g has the positions from ``g * B`` on and belongs to rank ``g % W``. The rest at the end is divided
    evenly, so every rank has the same number of batches and no row is lost; a rest of fewer than W rows is divided
    together with the last full round.
    """

    def __init__(self, rows: int, batch_size: int, world_size: int, *, drop_last: bool) -> None:
        self.batch_size, self.world_size = batch_size, world_size
        round_rows = batch_size * world_size
        full, rest = divmod(rows, round_rows)
        self.full = full
        self.tail_start, self.tail, self.tail_rounds = full * round_rows, 0, 0
        if rest and not drop_last:
            if rest < world_size and full and batch_size > 1:
                self.full = full - 1
                self.tail_start -= round_rows
                self.tail, self.tail_rounds = rest + round_rows, 2
            elif rest < world_size:
                raise ConfigError(
                    f"the last {rest} of {rows:,} rows cannot be divided among {world_size} ranks. "
                    "Pass drop_last=True, or use fewer ranks."
                )
            else:
                self.tail, self.tail_rounds = rest, 1
        self.count = self.full + self.tail_rounds  # batches per rank and epoch

    def span(self, index: int, rank: int) -> tuple[int, int]:
        """Return positions [start, stop) of a rank's batch."""
        number = index * self.world_size + rank
        if index < self.full:
            return number * self.batch_size, (number + 1) * self.batch_size
        parts = self.tail_rounds * self.world_size
        part = number - self.full * self.world_size
        return self.tail_start + self.tail * part // parts, self.tail_start + self.tail * (part + 1) // parts


@dataclass(frozen=True)
class Reading:
    """The arguments of :meth:`Split.batches`: how rows become batches."""

    batch_size: int
    _: KW_ONLY
    seed: int | None = None
    drop_last: bool = False
    shuffle_memory: str | int = "1GiB"
    rank: int = 0
    world_size: int = 1
    limit: int | None = None
    prefetch: int = 0
    reuse: bool = False
    pin_memory: bool = False
    device: torch.device | str | None = None
    data_memory: str | int | None = None
    whole_groups: bool = False

    def __post_init__(self) -> None:
        if not self.batch_size >= 1:
            raise ConfigError(f"batch_size is {self.batch_size}; a batch has at least 1 row.")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is outside 0 to world_size - 1 = {self.world_size - 1}.")
        if self.limit is not None and not self.limit >= 1:
            raise ConfigError(f"limit is {self.limit} rows; give at least 1, or None for all.")
        if self.prefetch < 0:
            raise ConfigError(f"prefetch is {self.prefetch} batches; give 0 (none) or more.")
        if self.reuse and self.pinned:
            raise ConfigError(
                "reuse=True could overwrite a batch that is still being copied to the GPU. Leave it out: "
                "torch recycles page-locked memory by itself, and safely."
            )

    @property
    def on_gpu(self) -> bool:
        """Whether batches are on a GPU."""
        return self.device is not None and torch.device(self.device).type == "cuda"

    @property
    def pinned(self) -> bool:
        """Whether batches are in page-locked memory."""
        return self.pin_memory or self.on_gpu


class BatchStream:
    """The batches of a split, epoch after epoch. Made by :meth:`Split.batches`.

    Each ``for`` loop over it yields the rest of the current epoch: a whole epoch, or what remains after an early exit
    or a resume. The next loop yields the next epoch, in another order.

    Raises:
        DataError: (while read) a shard is damaged, or holds an id outside its table.
    """

    def __init__(self, split: SplitRows, reading: Reading) -> None:
        self.split, self._reading = split, reading
        self.batch_size, self.reuse = reading.batch_size, reading.reuse
        self.rows = len(split) if reading.limit is None else min(reading.limit, len(split))
        self.epoch = 0
        self.position = 0  # batches of this epoch yielded so far
        world_size = reading.world_size
        self._rank_positions = _RankPositions(self.rows, self.batch_size, world_size, drop_last=reading.drop_last)
        if self.rows and not self._rank_positions.count:
            raise ConfigError(
                f"split {split.name} has {self.rows:,} rows, fewer than one batch of {self.batch_size:,} for each "
                f"of {world_size} ranks. Lower batch_size, or pass drop_last=False."
            )
        bytes_per_row = split.bytes / max(len(split), 1)
        self._pool_rows = min(rows_that_fit(parse_size(reading.shuffle_memory), bytes_per_row), max(self.rows, 1))
        room = 0 if reading.data_memory is None else parse_size(reading.data_memory)
        self._groups = self._group_order(reading, split) if reading.whole_groups else None
        self.resident = 0 < resident_bytes(split, self.rows) <= room  # whether rows are, or will be, in memory
        self._resident_rows: ResidentRows | None = None

    def _group_order(self, reading: Reading, split: SplitRows) -> GroupOrder:
        if split.groups is None:
            raise ConfigError(f"split {split.name} has no groups, so its batches cannot hold whole groups. Prepare the "
                              "dataset with a group column.")  # fmt: skip
        if reading.world_size > 1 or reading.drop_last:
            raise ConfigError("batches of whole groups are not divided among ranks, and none is dropped. Leave "
                              "world_size and drop_last out.")  # fmt: skip
        if self._pool_rows < self.rows:
            raise ConfigError(
                f"whole groups are shuffled as one pool, and the {self.rows:,} rows of split {split.name} take "
                f"{format_size(split.bytes)}, more than shuffle_memory. Give that much.", settings=("shuffle_memory",),
            )  # fmt: skip
        return GroupOrder(split.groups[: self.rows], self.batch_size)

    def __repr__(self) -> str:
        place = f"batch {self.position:,} of {len(self):,} in epoch {self.epoch:,}"
        return f"BatchStream({self.split.name!r}, {self.batch_size:,} rows a batch, at {place})"

    def __len__(self) -> int:
        """Return the batches per epoch, the same on every rank."""
        return self._rank_positions.count if self._groups is None else self._groups.count

    def __iter__(self) -> Iterator[Batch]:
        batches, ahead = self._produce(self.epoch, self.position), self._reading.prefetch
        with closing(prefetched(batches, ahead) if ahead else batches) as made, closing(self._copied(made)) as source:
            for batch in source:
                self.position += 1  # counted before the yield: a checkpoint made now resumes after it
                yield batch
        self.epoch += 1
        self.position = 0

    def _copied(self, batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
        """Yield the batches on the chosen device."""
        device = self._reading.device
        if device is not None and self._reading.on_gpu and not self.resident:
            yield from copied_ahead(batches, torch.device(device))
            return
        for batch in batches:
            yield batch if device is None else batch.to(device)

    @property
    def fresh(self) -> bool:
        """Whether every batch has its own memory."""
        return not self.reuse

    @property
    def step(self) -> int:
        """Batches yielded over all epochs; the ``step`` of the next batch."""
        return self.epoch * len(self) + self.position

    def rest_of_epoch(self, step: int | None = None, *, until: int | None = None, ids_only: bool = False) -> EpochRest:
        """Return batches of one epoch, to read them ahead or again, without moving the stream.

        Args:
            step: number of the first batch; None means the next one.
            until: number after the last batch; None means to the end of the epoch.
            ids_only: to save time, return no dense columns ([B, 0]) and no labels.

        Returns:
            The batches, equal to those of the stream, in new tensors on the CPU; ``len()`` is their number.
        """
        first = self.step if step is None else step
        epoch = first // max(1, len(self))
        end = (epoch + 1) * len(self)
        return EpochRest(self, first, max(first, end if until is None else min(until, end)), ids_only)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position of the stream and what it reads, as plain JSON values.

        Args:
            step: the position after this many batches over all epochs; None: the current one, with any read ahead.
        """
        epoch, position = self.epoch, self.position
        if step is not None:
            # In a loop, the last batch of an epoch leaves the stream at the end of that epoch.
            epoch = max(0, step - 1) // max(1, len(self))
            position = step - epoch * len(self)
        return {
            "kind": _KIND,
            "epoch": epoch,
            "position": position,
            "seed": self._reading.seed,
            "batch_size": self.batch_size,
            "world_size": self._rank_positions.world_size,
            "rows": self.rows,
            "batches": len(self),
            "pool_rows": self._pool_rows,
            "split": self.split.name,
            "schema_hash": self.split.schema_hash,
            "data_hash": self.split.data_hash,
            **({} if self._groups is None else {"whole_groups": True}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch where ``state`` was taken; no earlier batch is read.

        The number of ranks may change if ``batch_size * world_size`` does not.

        Raises:
            CheckpointError: the state belongs to other data or to other batches.
        """
        if state.get("kind") != _KIND:
            raise CheckpointError("this is not the state of a batch stream: it has no kind 'stoker.BatchStream'.")
        mine = self.state_dict()
        seed, ranks, remedy = self._reading.seed, self._reading.world_size, "Open the one that the run started on"
        remedies = {
            "schema_hash": f"belongs to another dataset (its schema differs). {remedy}",
            "split": f"belongs to split {state.get('split')!r}, this stream reads {self.split.name!r}. Open that one",
            "data_hash": f"belongs to a dataset of the same schema with other rows. {remedy}",
            "rows": f"belongs to {state.get('rows'):,} rows, this stream has {self.rows:,}. Pass the same limit",
            "whole_groups": "belongs to batches that differ in whole_groups. Pass the same whole_groups",
            "seed": f"belongs to seed {state.get('seed')}, this stream has {seed}. Pass the same seed",
        }

        def check(good: bool, remedy: str) -> None:
            if not good:
                raise CheckpointError(f"the saved data position {remedy}.")

        for key, remedy in remedies.items():
            check(state.get(key) == mine.get(key), remedy)
        size, others, position = state["batch_size"], state["world_size"], state["position"]
        check(
            size * others == self.batch_size * ranks,
            f"counts batches of {size:,} rows on {others} ranks, this stream has {self.batch_size:,} on {ranks}. "
            f"Keep batch_size times ranks at {size * others:,}",
        )
        check(
            state["pool_rows"] == self._pool_rows or seed is None,
            f"belongs to an order shuffled {state['pool_rows']:,} rows at a time, this stream shuffles "
            f"{self._pool_rows:,}. Pass the same shuffle_memory",
        )
        if others != ranks and position < len(self):
            full = min(_RankPositions(self.rows, size, others, drop_last=False).full, self._rank_positions.full)
            check(
                position <= full,
                f"is in the last batches of an epoch, which {others} ranks divide differently than {ranks}. Finish the "
                f"epoch on {others} ranks",
            )
        check(
            state["batches"] == len(self),
            f"counts {state['batches']:,} batches per epoch, this stream has {len(self):,}. Pass the same drop_last",
        )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _produce(
        self, epoch: int, position: int, end: int | None = None, *, again: bool = False, ids_only: bool = False
    ) -> Generator[Batch, None, None]:
        """Yield batches ``position`` to ``end`` of an epoch; ``again``: as copies, in new tensors."""
        end = len(self) if end is None else end
        if position >= end:
            return
        reading, split = self._reading, self.split
        order: EpochOrder | GroupOrder
        if self._groups is None:
            order = EpochOrder(self.rows, pool_rows=self._pool_rows, seed=reading.seed, epoch=epoch)
        else:
            order = self._groups.shuffle(reading.seed, epoch)
        resident = self.resident and not again
        if reading.seed is not None or resident or self._groups is not None:
            split.check_rows(0, self.rows)  # a shuffled batch has rows of all shards
        pages = None if resident else _Pages(split, order, self.rows)
        gather: Gather
        threads = 1 if reading.prefetch else torch.get_num_threads()  # prefetching leaves threads to training
        if resident:
            if self._resident_rows is None:
                device = torch.device(reading.device or "cpu")
                self._resident_rows = ResidentRows(split.shards, self.rows, device, threads=threads)
            gather = self._resident_rows
        else:
            gather = make_gather(split.shards, split.starts, ids_only=ids_only, threads=threads)
        fresh = again or not (self.reuse or reading.pinned)
        # This generator shares nothing that changes: an abandoned one whose thread is still ending does no harm.
        ring: list[dict[str, Tensor]] = [{} for _ in range(reading.prefetch + 2)]
        for index in range(position, end):
            start, stop = (0, 0) if self._groups is not None else self._rank_positions.span(index, reading.rank)
            if reading.seed is None:
                split.check_rows(start, stop)
            if pages is not None:
                pages.at(start)
            allocate = new_tensor if fresh else partial(self._allocate, ring[index % len(ring)])
            rows, groups = order.batch(index) if isinstance(order, GroupOrder) else (order.take(start, stop), None)
            tensors: dict[str, Any] = gather(rows, allocate)
            if groups is not None:
                tensors["groups"] = torch.from_numpy(groups)
            if ids_only:
                tensors["dense"] = torch.empty((len(rows), 0))
            yield Batch(step=epoch * len(self) + index, **tensors)

    def _allocate(self, ring: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self.reuse:
            return torch.empty(shape, dtype=dtype, pin_memory=self._reading.pinned)
        size = prod(shape)
        if name not in ring or ring[name].numel() < size:
            ring[name] = torch.empty(max(size, 1), dtype=dtype)
        return ring[name][:size].view(shape)


def resident_bytes(split: SplitRows, rows: int) -> int:
    """Return the bytes of a resident copy of the first ``rows`` rows of a split; approximate for sequences."""
    return ResidentRows.bytes(split.shards, rows) if split.shards else 0


class EpochRest:
    """Batches of one epoch, read separately from the stream; made by :meth:`BatchStream.rest_of_epoch`."""

    def __init__(self, stream: BatchStream, first: int, end: int, ids_only: bool) -> None:
        self._stream, self._first, self._end, self._ids_only = stream, first, end, ids_only

    def __len__(self) -> int:
        return self._end - self._first

    def __iter__(self) -> Iterator[Batch]:
        epoch, position = divmod(self._first, max(1, len(self._stream)))
        return self._stream._produce(epoch, position, position + len(self), again=True, ids_only=self._ids_only)


class _Pages:
    """Prefetch the pages of the next pool and release those of the last one."""

    def __init__(self, split: SplitRows, order: EpochOrder | GroupOrder, rows: int) -> None:
        self._split, self._order, self._rows = split, order, rows
        self._pool = -1
        self._asked = 0  # blocks of the next pool that were prefetched

    def at(self, position: int) -> None:
        """Prefetch and release pages before the rows at ``position`` are read."""
        order = self._order
        pool = order.pool_of(position)
        if pool != self._pool:
            if self._pool >= 0:
                for shard in self._split.shards:
                    shard.release()
            if order.pools == 1:
                self._split.will_need(0, self._rows)
            elif isinstance(order, EpochOrder) and self._pool < 0 and order.seed is not None:
                self._ask(pool, 0, len(order.blocks_of(pool)))
            self._pool, self._asked = pool, 0
        if (
            isinstance(order, EpochOrder) and pool + 1 < order.pools and order.seed is not None
        ):  # in file order the kernel reads ahead anyway
            begin, end = int(order.pool_starts[pool]), int(order.pool_starts[pool + 1])
            blocks = len(order.blocks_of(pool + 1))
            # Evenly over the pool, so that no single batch waits for it.
            until = min(blocks, -(-blocks * (position - begin + 1) // max(1, end - begin)) + 1)
            self._ask(pool + 1, self._asked, until)
            self._asked = max(until, self._asked)

    def _ask(self, pool: int, first: int, last: int) -> None:
        assert isinstance(self._order, EpochOrder)
        size = self._order.block_rows
        for block in self._order.blocks_of(pool)[first:last].tolist():
            self._split.will_need(block * size, min((block + 1) * size, self._rows))


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def prefetched(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield the same items; a thread makes up to ``depth`` of them ahead.

    An error in the thread reaches the consumer at its item, with its own traceback. Closing the generator, Ctrl-C or
    the end of the interpreter waits at most for the item that is being made.
    """
    ready: queue.Queue[T | _Failure | None] = queue.Queue(maxsize=depth)
    left = threading.Event()

    def work() -> None:
        last = None
        try:
            for item in items:
                ready.put(item)
                if left.is_set():
                    return
        except BaseException as error:
            last = _Failure(error)
        ready.put(last)

    def leave() -> None:
        left.set()
        with suppress(queue.Empty):  # the thread may wait for a place, and then sees that nothing reads on
            while True:
                ready.get_nowait()

    start_thread("stoker-reader", work, leave)
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        leave()


def copied_ahead(batches: Iterator[Batch], device: torch.device) -> Generator[Batch, None, None]:
    """Yield the same batches on a GPU: the next one is copied on a separate stream while the caller works.

    Copies overlap with work only from page-locked memory; two batches are on the device at a time.
    """
    stream = torch.cuda.Stream(device)
    waiting: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            ahead = batch.to(device, non_blocking=True), stream.record_event()
        if waiting is not None:
            yield _arrived(*waiting, device)
        waiting = ahead
    if waiting is not None:
        yield _arrived(*waiting, device)


def _arrived(batch: Batch, event: torch.cuda.Event, device: torch.device) -> Batch:
    """Return the batch once the caller's stream may use it; nothing overwrites it before the stream has."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(event)
    for tensor in batch.tensors().values():
        tensor.record_stream(stream)
    return batch


class Split(SplitRows):
    """The rows of one split, and batches of them. ``len(split)`` is their number.

    Arrow libraries read it as a stream: ``pyarrow.table(split)``, ``polars.DataFrame(split)``. Its columns are
    ``label`` (float32, null for rows without), dense columns (float32) as models see them, and the ids of each feature,
    lists of them for sequences. Row i is row i of :meth:`batches` without a seed.
    """

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        pa = require("pyarrow", "Arrow streams need")
        kind = pa.from_numpy_dtype(self.shards[0].ids.dtype) if self.shards else pa.int32()
        names = [*self.schema.dense, *(feature.name for feature in self.schema.features)]
        label = "label" if "label" not in names else "label_"
        types = [pa.list_(kind) if feature.sequence else kind for feature in self.schema.features]
        types = [pa.float32()] * (1 + len(self.schema.dense)) + types
        schema = pa.schema(list(zip([label, *names], types, strict=True)))

        def blocks() -> Iterator[Any]:
            for batch in self.batches(_ARROW_ROWS) if len(self) else ():
                assert batch.labels is not None
                labels = pa.array(batch.labels.numpy(), from_pandas=True)  # NaN becomes null
                columns = [labels, *map(pa.array, batch.dense.numpy().T)]
                for place, feature in enumerate(self.schema.features):
                    ids, ends = batch.bags(place)
                    if feature.sequence:
                        columns.append(pa.ListArray.from_arrays(pa.array(ends.int().numpy()), ids.numpy()))
                    else:
                        columns.append(pa.array(ids.numpy()))
                yield pa.record_batch(columns, schema=schema)

        return pa.RecordBatchReader.from_batches(schema, blocks()).__arrow_c_stream__(requested_schema)

    @method_with_arguments_of(Reading)
    def batches(self, batch_size: int, **reading: Any) -> BatchStream:
        """Return a stream of batches; iterate it once per epoch.

        Args:
            batch_size: rows per batch and rank. The last batch of an epoch may be smaller.
            seed: shuffle every epoch in another order, a function of the seed; None keeps the order of the file.
            drop_last: leave out the rows that do not fill a batch on every rank.
            shuffle_memory: bytes of rows that are shuffled together and resident. A split that fits is permuted as a
                whole; a larger one in pools of blocks from all over it. The order depends on this setting.
            rank: number of this process among ``world_size``. Every row goes to exactly one rank, and every rank gets
                the same number of batches. The rest at the end is divided evenly, in smaller batches.
            world_size: number of ranks.
            limit: use only the first ``limit`` rows of the split.
            prefetch: batches that a thread makes ahead; 0 makes each on demand.
            reuse: recycle the tensors. A batch is then valid only until the next one is drawn.
            pin_memory: page-locked tensors, for asynchronous copies to a GPU.
            device: copy batches to this device; to a GPU through page-locked memory, one batch ahead.
            data_memory: bytes of that device (without one, of main memory) for a copy of the rows. If they fit, the
                copy is made before the first batch, and batches, equal to the bit, are gathered from it. If they do not
                fit, or for None, rows are read from their files.
            whole_groups: every batch holds all rows of its groups (:attr:`groups`), one group after the other, and
                :attr:`Batch.groups <stoker.Batch>` numbers them. A batch has at most ``batch_size`` rows. The split
                must fit ``shuffle_memory``.

        Raises:
            ConfigError: settings that leave no batch, or contradict each other.
        """
        return BatchStream(self, Reading(batch_size, **reading))

    def check(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check every shard against the manifest's checksum and every id against its table, once per process.

        Reading does the same when it first needs a shard; this method can show progress.

        Args:
            progress: called with the bytes checked and the bytes in all.

        Raises:
            DataError: a shard is damaged or holds an id outside its table.
        """
        self.check_rows(0, self.rows, progress)
