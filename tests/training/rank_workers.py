"""Processes that train together, started once for many runs; collectives that may add floats raise an error in them."""

from __future__ import annotations

import gc
import os
import tempfile
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch.distributed as dist
from processes import context, start_process
from reductions import join

import stoker
from stoker.tables import Ranks

__all__ = ["Workers"]


class Workers:
    """``count`` processes; the first R of them train a run. A context manager."""

    def __init__(self, count: int = 4) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            mine, theirs = context().Pipe()
            self._processes.append(start_process(_serve, rank, count, f"{self._folder.name}/meet", theirs))
            self._pipes.append(mine)
            theirs.close()

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
            each.join()
        self._folder.cleanup()


def _serve(rank: int, count: int, meet: str, pipe: Connection) -> None:
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
