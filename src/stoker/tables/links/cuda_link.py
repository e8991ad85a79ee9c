"""Move rows between the slots on a GPU and their backing store, while the GPU computes.

The host only queues work, so every dependency is an event that the device waits for:

* Rows leave their slots (``outgoing`` stream) after the work that used them: the marks of the leases that released the
  slots. They go through page-locked buffers; a thread stores them when the copy has arrived.
* Rows enter slots (``incoming`` stream) after that work, and after the leaving rows were copied.
* Work on a batch waits for the ticket of its rows, not for those of later batches.
* A buffer is used again when the work queued with it is done; memory of the device follows the stream that uses it.

The fence between a writeback and a later fetch of the same row is that of
:class:`stoker.tables.links.transfer.QueuedLink`: the host waits until the row is stored.

Legend: C slots, E rows that leave, F rows that come, n rows in a buffer.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import timeit
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.tables.links.transfer import QueuedLink, TransferStats, Writeback
from stoker.tables.slots.residency import Ints, SlotPlan
from stoker.tables.storage import Rows
from stoker.tables.stores.home import Home, MemoryHome, StoredRows

ReadWay = Literal["auto", "staged", "direct"]
_WAYS: tuple[ReadWay, ...] = ("staged", "direct")

_BUFFER = 8 * 2**20  # most bytes of a buffer: the processor gathers one while others are copied
_BUFFERS = 4  # in each direction
# Bytes of a buffer when all changed rows are written back: a checkpoint does not enlarge buffers of small batches.
_BULK = 2 * 2**20
_NAMES = 2 * 8  # bytes a row in a buffer: its slot and its address
_PROBE = 4 * 2**20  # bytes read to compare the two ways of reading
_ATTEMPTS = 5


def staging_bytes(row_bytes: int, moved: int) -> int:
    """Return the bytes of a link's buffers at full size: on the device, and as many page-locked on the host.

    ``row_bytes``: bytes of a row with its optimizer state; ``moved``: rows that a plan fetches or evicts.
    """
    most, bulk = (max(1, size // row_bytes) for size in (_BUFFER, _BULK))
    arriving = min(most, 2 * moved)  # buffers grow by doubling
    return _BUFFERS * (arriving + max(arriving, bulk)) * (row_bytes + _NAMES)


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Return when all work before it is done."""


class Streams:
    """The device of a link: torch's streams of one GPU, two for copies and those of the threads that compute.

    Work of one stream runs in the order in which it was queued; work of two streams in any order that their waits
    allow; and the host runs ahead of all. Tests replace it by a simulated device, which does work as late as possible.
    """

    device: torch.device
    incoming: Any  # the stream that fills slots
    outgoing: Any  # the stream that empties them: a link copies in both directions at once

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # The short copies of a batch run before the long kernels of the batch in training.
        self.incoming = torch.cuda.Stream(device, priority=-1)
        self.outgoing = torch.cuda.Stream(device, priority=-1)

    def current(self) -> Any:
        """Return the stream on which the calling thread queues its own work."""
        return torch.cuda.current_stream(self.device)

    def queue(self, stream: Any, work: Callable[[], None]) -> None:
        """Queue the device operations of ``work``. They use only memory that was allocated before."""
        with torch.cuda.stream(stream), torch.no_grad():
            work()

    def record(self, stream: Any) -> Event:
        """Return the end of what is queued on ``stream`` now."""
        event = torch.cuda.Event(blocking=True)  # the host sleeps while it waits, because its cores gather rows
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Make work that is queued on ``stream`` from now on wait for ``event``."""
        stream.wait_event(event)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate page-locked memory of the host, which asynchronous copies may use."""
        return torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")

    def scratch(self, stream: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate memory of the device for work on ``stream`` only. It may be dropped before that work is done."""
        with torch.cuda.stream(stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def lend(self, tensor: Tensor, stream: Any) -> None:
        """Allow :meth:`scratch` on another ``stream``: when dropped, it is free after the work queued there."""
        tensor.record_stream(stream)

    def copy_rows(self, source: Tensor, rows: Tensor, target: Tensor, places: Tensor) -> None:
        """Copy, within :meth:`queue`, row ``rows[i]`` of page-locked ``source`` to row ``places[i]`` of ``target``.

        ``rows`` and ``places`` are [n] int64 on the device, and ``places`` distinct.
        """
        from stoker.ops.gpu.kernels import copy_rows

        copy_rows(source, rows, target, places)

    @property
    def reads_host(self) -> bool:
        """Return True if :meth:`copy_rows` works here."""
        return importlib.util.find_spec("triton") is not None


class CudaLink(QueuedLink):
    """Run plans on copy streams during the computation.

    The GPU itself can read rows of a backing store in page-locked memory. Which way is faster depends on the link, the
    processor and the width of rows, so both are timed once. Rows that were never stored are computed by the processor
    and staged in either case. The choice changes no bit.

    Args:
        home: all rows.
        slots: the slots.
        stats: the counters.
        streams: of the device; None means those of the GPU with the slots.
        reading: "staged": the processor gathers rows into page-locked buffers, which are copied; "direct": the GPU
            reads the store; "auto": the faster one here.
        buffer_bytes: most bytes of a buffer; a single row may exceed it.
        buffers: in each direction.
    """

    roomy = True

    def __init__(
        self, home: Home, slots: Rows, stats: TransferStats, *, streams: Streams | None = None,
        reading: ReadWay = "auto", buffer_bytes: int = _BUFFER, buffers: int = _BUFFERS,
    ) -> None:  # fmt: skip
        super().__init__(home, slots, stats)
        self.streams = streams = Streams(slots.weight.device) if streams is None else streams
        self._most = max(1, buffer_bytes // home.row_bytes)  # rows in a buffer
        self._bulk = max(1, min(buffer_bytes, _BULK) // home.row_bytes)
        self._arriving = deque(_Buffer(home, streams, streams.incoming) for _ in range(buffers))
        self._leaving = deque(_Buffer(home, streams, streams.outgoing) for _ in range(buffers))
        self._users: tuple[Any, ...] = ()  # streams that work on leased slots
        self._sent: list[Tensor] = []  # tensors sent since the last ticket
        # Events that each stream must still wait for. The first: the memory of the slots may have had another use.
        made = streams.record(streams.current())
        self._before: dict[Any, deque[Event]] = {streams.incoming: deque([made]), streams.outgoing: deque([made])}
        for tensor in (slots.weight, *slots.state.values()):
            for stream in self._before:
                streams.lend(tensor, stream)
        self.reading = _reading(home, streams, reading)

    def run(self, plan: SlotPlan) -> None:
        super().run(plan)
        self._follow(self.streams.incoming)
        self._follow(self.streams.outgoing)

    def write_back(self, number: int, rows: Ints, slots: Ints) -> None:
        for part in self._parts(len(rows)):
            # Also after an error: these rows have left their slots.
            self._post(_BufferedWriteback(number, rows[part], self._take_off(slots[part])))
        self._raise()

    def store(self, rows: Ints, slots: Ints) -> None:
        for part in self._parts(len(rows), self._bulk):
            job = _BufferedWriteback(-1, rows[part], self._take_off(slots[part]))
            try:
                self.home.store(job.rows, job.arrive())
            finally:
                job.done()

    def _take_off(self, slots: Ints) -> _Buffer:
        """Queue the copy of the rows in ``slots`` [n] to the host, in a buffer that is busy from now on."""
        streams, stream = self.streams, self.streams.outgoing
        buffer = _next(self._leaving)
        self._until(lambda: not buffer.busy)
        buffer.hold(slots, most=self._most)
        self._follow(stream)
        streams.queue(stream, partial(buffer.gather, self.slots))
        self._before[streams.incoming].append(streams.record(stream))  # nothing may enter these slots before
        streams.queue(stream, buffer.download)
        buffer.end, buffer.busy = streams.record(stream), True
        return buffer

    def fetch(self, rows: Ints, slots: Ints) -> None:
        streams, stream = self.streams, self.streams.incoming
        if self.reading == "direct":
            assert isinstance(self.home, MemoryHome)
            stored = self.home.stored.contains(rows)
            for _, buffer in self._buffers(slots[stored], rows[stored]):
                self._follow(stream)
                streams.queue(stream, partial(buffer.read, self.home.arrays, self.slots))
            rows, slots = rows[~stored], slots[~stored]
        for part, buffer in self._buffers(slots):
            self.home.fetch(rows[part], buffer.host)
            streams.queue(stream, buffer.upload)
            self._follow(stream)  # as late as possible: the copy above touches no slot
            streams.queue(stream, partial(buffer.scatter, self.slots))

    def _buffers(self, slots: Ints, rows: Ints | None = None) -> Iterator[tuple[slice, _Buffer]]:
        """Yield free buffers for successive slices of the rows that enter ``slots``."""
        for part in self._parts(len(slots)):
            buffer = _next(self._arriving)
            if buffer.end is not None:
                buffer.end.synchronize()
            buffer.hold(slots[part], None if rows is None else rows[part], most=self._most)
            yield part, buffer
            buffer.end = self.streams.record(self.streams.incoming)

    def _parts(self, count: int, most: int | None = None) -> Iterator[slice]:
        most = most or self._most
        for begin in range(0, count, most):
            yield slice(begin, min(begin + most, count))

    def label(self, labels: Sequence[tuple[Tensor, Ints]], slots: Ints) -> None:
        stream = self.streams.incoming
        at = self._copied(torch.from_numpy(slots))
        self._follow(stream)
        for tensor, values in labels:
            self.streams.lend(tensor, stream)
            self.streams.queue(stream, partial(_scatter, tensor, at, self._copied(torch.from_numpy(values))))

    def send(self, tensor: Tensor) -> Tensor:
        if tensor.device != torch.device("cpu"):
            return tensor.to(self.streams.device)
        copied = self._copied(tensor.detach())
        self._sent.append(copied)
        return copied

    def _copied(self, tensor: Tensor) -> Tensor:
        """Queue the copy of a tensor of the host to the device."""
        streams, stream = self.streams, self.streams.incoming
        kept = streams.pinned(tuple(tensor.shape), tensor.dtype).copy_(tensor)
        copied = streams.scratch(stream, tuple(tensor.shape), tensor.dtype)
        streams.queue(stream, partial(_copy, copied, kept))
        return copied

    def ticket(self) -> _Ticket:
        sent, self._sent = self._sent, []
        return _Ticket(self.streams.record(self.streams.incoming), tuple(sent))

    def ready(self, ticket: Any = None) -> None:
        stream = self.streams.current()
        if stream not in self._users:
            self._users = (*self._users, stream)
        event, sent = self.ticket() if ticket is None else ticket
        self.streams.wait(stream, event)
        for tensor in sent:
            self.streams.lend(tensor, stream)

    def mark(self) -> tuple[Event, ...]:
        # A lease may end in any thread, also in the garbage collector: so the stream of that thread does not matter.
        return () if sys.is_finalizing() else tuple(self.streams.record(stream) for stream in self._users)

    def released(self, mark: Any) -> None:
        for waiting in self._before.values():
            waiting.extend(mark)

    def finish(self) -> None:
        for event in self.mark():
            event.synchronize()

    def _follow(self, stream: Any) -> None:
        """Make work that is queued on ``stream`` from now on wait for all work on released slots."""
        waiting = self._before[stream]
        while waiting:
            self.streams.wait(stream, waiting.popleft())

    def close(self, *, drain: bool = True) -> None:
        try:
            super().close(drain=drain)
        finally:
            for stream in (self.streams.incoming, self.streams.outgoing):
                self.streams.record(stream).synchronize()  # the memory of the store may be freed


class _Ticket(NamedTuple):
    event: Event
    sent: tuple[Tensor, ...]


class _Buffer:
    """Memory for n rows in flight, here and on the device, with slots and addresses; :meth:`hold` queues no work."""

    def __init__(self, home: Home, streams: Streams, stream: Any) -> None:
        self._home, self._streams, self._stream = home, streams, stream
        self._room = 0  # rows
        self.end: Event | None = None  # of the work queued with it
        self.busy = False  # a writeback must still store its rows

    def hold(self, slots: Ints, rows: Ints | None = None, *, most: int) -> None:
        """Make room for rows that enter or leave ``slots`` [n]; ``rows`` [n] are their addresses.

        All work queued with the buffer must be done. It grows to ``most`` rows by doubling.
        """
        streams, stream, count = self._streams, self._stream, len(slots)
        if count > self._room:
            self._room = min(most, max(count, 2 * self._room))
            self._host = self._home.empty(self._room, streams.pinned)
            self._device = self._home.empty(self._room, partial(streams.scratch, stream))
            self._host_names = streams.pinned((2, self._room), torch.int64)
            self._device_names = streams.scratch(stream, (2, self._room), torch.int64)
        self.host, self.device = self._host[:count], self._device[:count]
        named = self._host_names[:, :count], self._device_names[:, :count]
        self.names: list[tuple[Tensor, Tensor]] = list(zip(*named, strict=True))  # slots, addresses
        for (host, _), numbers in zip(self.names, (slots, rows), strict=True):
            if numbers is not None:
                host.copy_(torch.from_numpy(numbers))

    def upload(self) -> None:
        """Copy from host to device."""
        self._name(0)
        _copy_rows(self.device, self.host)

    def scatter(self, slots: Rows) -> None:
        """Copy the rows into their slots, after :meth:`upload`."""
        for target, tensor in zip(slots.tensors, self.device.tensors, strict=True):
            _scatter(target, self.names[0][1], tensor)

    def gather(self, slots: Rows) -> None:
        """Copy the rows from their slots."""
        at = self._name(0)
        for source, tensor in zip(slots.tensors, self.device.tensors, strict=True):
            torch.index_select(source, 0, at, out=tensor)

    def download(self) -> None:
        """Copy from device to host, after :meth:`gather`."""
        _copy_rows(self.host, self.device)

    def read(self, arrays: Rows, slots: Rows) -> None:
        """Copy rows from the page-locked ``arrays`` of a store into their slots."""
        at, rows = self._name(0), self._name(1)
        for source, target in zip(arrays.tensors, slots.tensors, strict=True):
            self._streams.copy_rows(source, rows, target, at)

    def _name(self, which: int) -> Tensor:
        """Return the slots or addresses, on the device."""
        host, device = self.names[which]
        _copy(device, host)
        return device


class _BufferedWriteback(Writeback):
    """A writeback in a buffer."""

    def __init__(self, number: int, rows: Ints, buffer: _Buffer) -> None:
        assert buffer.end is not None
        super().__init__(number, rows, buffer.host)
        self.end = buffer.end
        self._buffer: _Buffer | None = buffer
        self._lost: BaseException | None = None

    def arrive(self) -> Rows:
        if self._lost is not None:
            raise self._lost
        self.end.synchronize()
        return self.values

    def keep(self) -> None:
        if self._buffer is None:
            return
        try:
            self.values = self.arrive().map(Tensor.clone)
        except BaseException as error:  # the device failed: there are no rows to store later
            self._lost = error
        self.done()

    def done(self) -> None:
        if self._buffer is not None:
            self._buffer.busy, self._buffer = False, None


def _next(buffers: deque[_Buffer]) -> _Buffer:
    """Return the least recently used buffer."""
    buffers.rotate(-1)
    return buffers[-1]


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _scatter(target: Tensor, at: Tensor, source: Tensor) -> None:
    target.index_copy_(0, at, source)


def _copy_rows(target: Rows, source: Rows) -> None:
    for tensor, values in zip(target.tensors, source.tensors, strict=True):
        _copy(tensor, values)


def _reading(home: Home, streams: Streams, wanted: ReadWay) -> ReadWay:
    """Choose how to read ``home``."""
    can = isinstance(home, MemoryHome) and home.pinned and streams.reads_host
    if wanted == "direct" and not can:
        raise ConfigError(
            f"{home!r} cannot be read by the GPU directly. Use a store in memory with pin=True and install Triton, "
            "or leave reading='staged'."
        )
    if wanted != "auto":
        return wanted
    if not can:
        return "staged"
    try:
        seconds = _times(home, streams)
    except Exception as error:
        warnings.warn(f"the GPU cannot read {home!r} itself ({error}); rows are staged, which is slower.", stacklevel=2)
        return "staged"
    return min(seconds, key=lambda way: seconds[way])


def _times(home: Home, streams: Streams) -> dict[ReadWay, float]:
    """Time each way of reading for a few MiB of rows from all over ``home``."""
    timed = copy.copy(home)
    timed.stored = StoredRows(home.num_rows)  # do not time rows that were never stored
    timed.stored.words.fill(-1)
    count = min(home.num_rows, max(1, _PROBE // home.row_bytes))
    rows = np.random.default_rng(0).permutation(np.linspace(0, home.num_rows - 1, count).astype(np.int64))
    slots = np.arange(count, dtype=np.int64)
    target = home.empty(count, partial(streams.scratch, streams.incoming))
    seconds: dict[ReadWay, float] = {}
    for way in _WAYS:
        link = CudaLink(timed, target, TransferStats(), streams=streams, reading=way)

        def fetch(link: CudaLink = link) -> None:
            link.fetch(rows, slots)
            streams.record(streams.incoming).synchronize()

        seconds[way] = min(timeit.repeat(fetch, number=1, repeat=_ATTEMPTS))  # the first one compiles
    return seconds
