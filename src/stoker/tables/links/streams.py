"""Queues of work on a device, and the waits between them: what a link to a GPU asks of it, and no more.

Work of one stream runs in the order in which it was queued; work of two streams in any order that their waits allow,
and the host runs ahead of all. Tests put a simulated device in the place of :class:`CudaStreams`, which does no work
before it must.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CudaStreams", "Event", "Streams"]


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Return when all work before it is done."""


class Streams(ABC):
    """The streams of one device: two for copies, and those of the threads that compute."""

    device: torch.device
    incoming: Any  # the stream that fills slots
    outgoing: Any  # the stream that empties them: links carry both ways at once

    @abstractmethod
    def current(self) -> Any:
        """The stream on which the calling thread queues its own work."""

    @abstractmethod
    def queue(self, stream: Any, work: Callable[[], None]) -> None:
        """Queue the device operations of ``work``. They use only memory that was there before."""

    @abstractmethod
    def record(self, stream: Any) -> Event:
        """The end of what is queued on ``stream`` now."""

    @abstractmethod
    def wait(self, stream: Any, event: Event) -> None:
        """What is queued on ``stream`` from now on runs after ``event``."""

    @abstractmethod
    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Page-locked memory of the host, which copies may use while the host goes on."""

    @abstractmethod
    def scratch(self, stream: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the device, for work on ``stream`` alone. It may be dropped before that work is done."""

    @abstractmethod
    def lend(self, tensor: Tensor, stream: Any) -> None:
        """:meth:`scratch` is used on another ``stream`` too: when dropped, it is free after what is queued there."""

    @abstractmethod
    def copy_rows(self, source: Tensor, rows: Tensor, target: Tensor, places: Tensor) -> None:
        """Within :meth:`queue`: row ``rows[i]`` of page-locked ``source`` goes to row ``places[i]`` of ``target``.

        Args:
            source: [N, D] or [N].
            rows: [n] int64, on the device.
            target: [C, D] or [C], on the device, of the same type.
            places: [n] int64, distinct, on the device.
        """

    @property
    @abstractmethod
    def reads_host(self) -> bool:
        """Whether :meth:`copy_rows` works here."""


class CudaStreams(Streams):
    """torch's streams and events on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # The short copies of a batch go before the long kernels of the one in training.
        self.incoming = torch.cuda.Stream(device, priority=-1)
        self.outgoing = torch.cuda.Stream(device, priority=-1)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def queue(self, stream: Any, work: Callable[[], None]) -> None:
        with torch.cuda.stream(stream), torch.no_grad():
            work()

    def record(self, stream: Any) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # the host sleeps while it waits: its cores gather rows
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def scratch(self, stream: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def lend(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def copy_rows(self, source: Tensor, rows: Tensor, target: Tensor, places: Tensor) -> None:
        from stoker.ops.gpu.kernels import copy_rows

        copy_rows(source, rows, target, places)

    @property
    def reads_host(self) -> bool:
        return importlib.util.find_spec("triton") is not None
