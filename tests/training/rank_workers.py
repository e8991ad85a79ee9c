"""Processes that train together, started once for many runs; collectives that may add floats raise an error in them.

All are forks of one process that has done some runs, so it has the kernels in memory: each would need seconds for that.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from types import TracebackType
from typing import Any

import torch.distributed as dist
from processes import context, start_process
from ranked import alone_on_a_thread
from reductions import join

import stoker
from stoker.tables import Ranks

__all__ = ["Fork", "Warm", "Workers"]


class Fork:
    """A fork of a :class:`Warm` process."""

    def __init__(self, pid: int, ask: Callable[..., Any]) -> None:
        self._pid, self._ask = pid, ask
        self.exitcode: int | None = None

    def kill(self) -> None:
        """Kill it, if it runs."""
        if self.exitcode is None:
            os.kill(self._pid, signal.SIGKILL)  # a number stays taken until the process that forked asks for the status

    def join(self, seconds: float) -> None:
        """Wait until it ends, at most for so long; :attr:`exitcode` is then set."""
        end = time.monotonic() + seconds
        while self.exitcode is None and time.monotonic() < end:
            self.exitcode = self._ask("status", self._pid)
            time.sleep(0.005)


class Warm:
    """A process that does ``runs``, settings of ``stoker.train`` with ``data``, and then forks. A context manager."""

    def __init__(self, data: Any, runs: Sequence[dict[str, Any]]) -> None:
        self._orders, theirs = context().Pipe()
        self._process = start_process(_warm, theirs, str(data), list(runs))
        theirs.close()
        assert self._orders.recv() == "warm"

    def start(self, work: Callable[..., None], *given: Any) -> Fork:
        """Call ``work(*given)``, a function of a module, in a fork."""
        return Fork(self._ask("start", work, given), self._ask)

    def _ask(self, *order: Any) -> Any:
        self._orders.send(order)
        return self._orders.recv()

    def __enter__(self) -> Warm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._orders.close()
        self._process.join(30)


def _warm(orders: Connection, data: str, runs: list[dict[str, Any]]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        for number, settings in enumerate(runs):
            given = {"threads": 1, **settings, "out": f"{folder}/{number}"}
            stoker.train(data, ranks=alone_on_a_thread(), **given).model.embeddings.close()
    gc.collect()
    assert threading.active_count() == 1  # none would survive a fork
    orders.send("warm")
    while True:
        try:
            what, *given = orders.recv()
        except EOFError:
            return
        if what == "status":
            ended, status = os.waitpid(given[0], os.WNOHANG)
            orders.send(os.waitstatus_to_exitcode(status) if ended else None)
        elif (pid := os.fork()) == 0:
            try:
                given[0](*given[1])
            finally:
                os._exit(0)
        else:
            orders.send(pid)


class Workers:
    """``count`` forks; the first R of them train a run. A context manager."""

    def __init__(self, warm: Warm, count: int = 4) -> None:
        self._folder = tempfile.TemporaryDirectory()
        meet, self._pipes = f"{self._folder.name}/meet", list[Any]()
        with Listener(f"{self._folder.name}/pipe", "AF_UNIX", backlog=count) as listener:
            self._processes = [warm.start(_serve, rank, count, meet, listener.address) for rank in range(count)]
            found = [listener.accept() for _ in range(count)]
        self._pipes = [pipe for _, pipe in sorted(((pipe.recv(), pipe) for pipe in found), key=lambda pair: pair[0])]

    def train(self, ranks: int, *given: Any, **settings: Any) -> list[Any]:
        """Return of each rank (step, best step, validation, test) of ``stoker.train``, or its error."""
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, given, settings))
        return [pipe.recv() for pipe in self._pipes[:ranks]]

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for each in self._processes:
            each.join(5)
            each.kill()
            each.join(5)
        self._folder.cleanup()


def _serve(rank: int, count: int, meet: str, address: Any) -> None:
    pipe = Client(address)
    pipe.send(rank)
    join(rank, count, meet)
    groups = [dist.new_group(list(range(size + 1))) for size in range(count)]
    while True:
        try:
            ranks, given, settings = pipe.recv()
        except EOFError:
            break
        try:
            result = stoker.train(*given, ranks=Ranks(groups[ranks - 1]), **settings)
            result.model.embeddings.close()
            found: Any = (result.step, result.best_step, result.valid, result.test)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        pipe.send(found)
        gc.collect()
    os._exit(0)  # closing the groups would wait
