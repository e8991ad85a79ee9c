"""A simulated GPU: work is queued and done later, in any order that streams and events allow, and never before it must.

It takes the place of torch's streams behind :class:`stoker.tables.links.cuda_link.CudaLink`, and its back end queues
the
lookups and updates of training on a compute stream. Everything happens in one thread, drawn from a seed, also the
landing of writebacks; memory that is dropped while other streams use it is spoilt, as by its next owner.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from placed import Case, Found, draw, placed_run, reconcile

from stoker import EmbeddingTables
from stoker.ops import Bags
from stoker.tables.links.cuda_link import CudaLink, Streams
from stoker.tables.slots.slotted import SlottedRows

__all__ = ["SimulatedLink", "SimulatedStreams", "defer", "draw_case", "log_outputs", "run", "use"]


class _Stream:
    def __init__(self, name: str, weight: float) -> None:
        self.name, self.weight = name, weight
        self.queue: deque[tuple[str, Any]] = deque()


class _Event:
    def __init__(self, device: SimulatedStreams, stream: _Stream) -> None:
        self.device, self.stream, self.over = device, stream, False

    def synchronize(self) -> None:
        if ("host", self.stream.name) not in self.device.ignored:
            self.device.run_until(lambda: self.over)


class SimulatedStreams(Streams):
    """The device.

    Args:
        random: draws what runs when.
        ignored: waits that are left out, as (who waits, for whom) among "incoming", "outgoing", "compute", "worker"
            and "host"; "memory" does not wait for streams that memory was lent to.
    """

    device = torch.device("cpu")
    reads_host = True

    def __init__(self, random: np.random.Generator, ignored: set[tuple[str, str]] | None = None) -> None:
        self.random, self.ignored = random, ignored or set()
        # Some streams are much slower than others, and the device may lag far behind the host.
        self.eager = float(random.choice([0.0, 0.2, 0.5, 0.8]))
        self.streams = [
            _Stream(name, float(random.choice([0.02, 1.0, 5.0])))
            for name in ("incoming", "outgoing", "compute", "worker", "memory")
        ]
        self.incoming, self.outgoing, self.compute, self.worker, self.memory = self.streams
        self._lent: dict[int, set[str]] = {}
        self._lock = threading.RLock()

    def current(self) -> _Stream:
        return self.compute

    def queue(self, stream: _Stream, work: Callable[[], Any]) -> None:
        with self._lock:
            stream.queue.append(("work", work))
            self._go_on()

    def record(self, stream: _Stream) -> _Event:
        with self._lock:
            event = _Event(self, stream)
            stream.queue.append(("event", event))
            return event

    def wait(self, stream: _Stream, event: _Event) -> None:
        with self._lock:
            if (stream.name, event.stream.name) not in self.ignored:
                stream.queue.append(("wait", event))
            self._go_on()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return _spoil(torch.empty(shape, dtype=dtype))

    def scratch(self, stream: _Stream, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = _spoil(torch.empty(shape, dtype=dtype))
        self._lent[id(tensor)] = {stream.name}
        weakref.finalize(tensor, self._dropped, id(tensor), tensor.detach())
        return tensor

    def lend(self, tensor: torch.Tensor, stream: _Stream) -> None:
        if id(tensor) in self._lent and ("memory", stream.name) not in self.ignored:
            self._lent[id(tensor)].add(stream.name)

    def _dropped(self, key: int, memory: torch.Tensor) -> None:
        """The allocator gives ``memory`` to somebody else after the work of the streams that it knows of."""
        with self._lock:
            names = self._lent.pop(key)
            for stream in self.streams:
                if stream.name in names:
                    self.memory.queue.append(("wait", self.record(stream)))
            self.memory.queue.append(("work", lambda: _spoil(memory)))

    def copy_rows(
        self, source: torch.Tensor, rows: torch.Tensor, target: torch.Tensor, places: torch.Tensor
    ) -> None:  # fmt: skip
        target[places] = source[rows]

    def step(self) -> bool:
        """Do one piece of work that may be done now; whether there was one."""
        with self._lock:
            ready = [stream for stream in self.streams if stream.queue and _may(stream.queue[0])]
            if not ready:
                return False
            drawn = float(self.random.random()) * sum(stream.weight for stream in ready)
            while len(ready) > 1 and drawn >= ready[-1].weight:
                drawn -= ready.pop().weight
            kind, what = ready[-1].queue.popleft()
            if kind == "work":
                with torch.no_grad():
                    what()
            elif kind == "event":
                what.over = True
            return True

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self.step() or done(), "the device waits for something that never comes"

    def _go_on(self) -> None:
        while self.random.random() < self.eager and self.step():
            pass


def _may(item: tuple[str, Any]) -> bool:
    return item[0] != "wait" or item[1].over


def _spoil(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(math.nan if tensor.dtype.is_floating_point else 10**6)


class SimulatedLink(CudaLink):
    """Writebacks land when the simulated device says so, not from a thread."""

    def _enqueue(self, job: Any) -> None:
        device: Any = self.streams
        device.wait(device.worker, job.end)
        device.queue(device.worker, lambda: self._land(job))

    def _until(self, done: Callable[[], bool]) -> None:
        device: Any = self.streams
        device.run_until(done)


class _Deferred:
    """A back end whose lookups and updates are queued on the compute stream."""

    def __init__(self, inner: Any, device: SimulatedStreams) -> None:
        self.inner, self.device = inner, device
        self.waits = False  # results are looked at as soon as the call returns

    def lookup(self, weight: torch.Tensor, space: Any, bags: Bags) -> torch.Tensor:
        bags, features = _alias(bags), len(space.features)
        out = torch.full((bags.batch_size(features), features, weight.shape[1]), math.nan)
        self.device.queue(self.device.compute, lambda: out.copy_(self.inner.lookup(weight, space, bags)))
        if self.waits:
            self.finish()
        return out

    def update(self, weight: Any, state: Any, space: Any, bags: Bags, grad: Any, rule: Any, rounding: Any) -> None:
        bags = _alias(bags)
        self.device.queue(
            self.device.compute, lambda: self.inner.update(weight, state, space, bags, grad, rule, rounding)
        )
        if self.waits:
            self.finish()

    def weight_gradient(self, weight: torch.Tensor, space: Any, bags: Bags, grad: torch.Tensor) -> torch.Tensor:
        self.finish()  # autograd copies it at once
        return self.inner.weight_gradient(weight, space, bags, grad)

    def check_offsets(self, offsets: torch.Tensor, count: int, most: Any, check: Callable[[], None]) -> None:
        self.finish()
        check()

    def synchronize(self) -> None:
        return

    def finish(self) -> None:
        self.device.record(self.device.compute).synchronize()


def _alias(bags: Bags) -> Bags:
    """Other tensors on the same memory: what is queued does not keep it, as kernels do not."""
    ids, offsets, weights = (None if t is None else t.detach() for t in (bags.ids, bags.offsets, bags.weights))
    assert ids is not None
    return bags._replace(ids=ids, offsets=offsets, weights=weights)


def log_outputs(tables: EmbeddingTables) -> list[torch.Tensor]:
    """A list that gets what groups look up, and the gradients of weights, in the order of calls."""
    log: list[torch.Tensor] = []
    for group in tables.groups:
        for name in ("lookup", "weight_gradient"):
            setattr(group, name, _logged(getattr(group, name), log))
    return log


def _logged(method: Callable[..., torch.Tensor], log: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*given: Any) -> torch.Tensor:
        result = method(*given)
        log.append(result.clone())
        return result

    return call


def defer(tables: EmbeddingTables, device: SimulatedStreams) -> list[torch.Tensor]:
    """Queue the work of every slotted group on ``device``; the list gets the outputs, as from :func:`log_outputs`."""
    log: list[torch.Tensor] = []
    for group in tables.groups:
        if not isinstance(group.storage, SlottedRows):
            continue
        backend: Any = _Deferred(group.backend, device)
        group.backend = backend

        def lookup(
            bags: Any, lease: Any, method: Any = group.lookup, backend: Any = backend, group: Any = group
        ) -> torch.Tensor:
            # In parts, which are put together at once, or with the largest taken from what was found.
            backend.waits = lease is None or lease.over or bags.space is not group.space
            result = method(bags, lease)
            backend.waits = False
            log.append(result)
            return result

        group.lookup = lookup  # type: ignore[method-assign]
        group.weight_gradient = _logged(group.weight_gradient, log)  # type: ignore[method-assign]
        group.gradient_norm_squared = _awaited(group.gradient_norm_squared, backend)  # type: ignore[method-assign]
    return log


def _awaited(method: Callable[..., float], backend: _Deferred) -> Callable[..., float]:
    """A method that reads on the host what it had the device work out."""

    def call(*given: Any) -> float:
        backend.waits = True
        result = method(*given)
        backend.waits = False
        return result

    return call


def use(storage: SlottedRows, device: SimulatedStreams, kind: type[CudaLink] = SimulatedLink, **settings: Any) -> None:
    """Give ``storage`` a link on ``device``."""
    storage.move_by(kind(storage.home, storage.transit, storage.stats, streams=device, **settings))


def draw_case(seed: int) -> Case:
    """Training with many lookups in between: rows that leave unchanged have no writeback to wait for."""
    case = draw(seed, backend="reference")
    random = np.random.default_rng(seed + 2)
    often = float(random.choice([0.1, 0.5, 0.9]))
    peeks = {step for step in range(14) if random.random() < often}
    return reconcile(replace(case, slow=False, background=False, lags=True, peeks=peeks))


def run(
    case: Case,
    *,
    ignored: Iterable[tuple[str, str]] = (),
    alter: Callable[[SlottedRows], None] | None = None,
    kind: type[CudaLink] = SimulatedLink,
) -> Found:
    """The case on a simulated device; outputs as of :func:`log_outputs`."""
    random = np.random.default_rng(case.seed + 3)
    device = SimulatedStreams(random, set(ignored))

    def change(storage: SlottedRows) -> None:
        row = storage.home.row_bytes
        reading = "staged"
        if storage.home.kind == "memory" and random.random() < 0.5:
            storage.home.pinned, reading = True, "direct"
        use(
            storage, device, kind, reading=reading,
            buffer_bytes=row * int(random.integers(1, 20)), buffers=int(random.integers(1, 4)),
        )  # fmt: skip
        if alter is not None:
            alter(storage)

    result = placed_run(case, change, lambda tables: defer(tables, device))
    device.run_until(lambda: not any(stream.queue for stream in device.streams))
    return result
