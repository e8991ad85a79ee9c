"""The run directory of several ranks: the first rank alone reads and writes it, so the others need not see its disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stoker.tables.ranks.transport import Ranks
from stoker.training.files.rundir import Place, RunDirectory, Upload
from stoker.training.ranks.first import on_first


class RankRun(RunDirectory):
    """As :class:`RunDirectory`; all ranks call its methods, get the same results and raise the same errors."""

    def __init__(self, path: str | Path, ranks: Ranks) -> None:
        super().__init__(path)
        self.ranks, self._here = ranks, RunDirectory(path)

    def check_new(self) -> None:
        on_first(self.ranks, "check the run directory", self._here.check_new)

    @contextmanager
    def locked(self) -> Iterator[None]:
        with ExitStack() as stack:
            on_first(self.ranks, "lock the run", lambda: stack.enter_context(self._here.locked()))
            yield

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        on_first(self.ranks, f"write {name}", lambda: self._here.write(name, values))

    def read(self, name: str) -> dict[str, Any]:
        return on_first(self.ranks, f"read {name}", lambda: self._here.read(name))

    def head(self) -> dict[str, Any] | None:
        return on_first(self.ranks, "read the head", self._here.head)

    def steps(self) -> list[int]:
        return on_first(self.ranks, "list checkpoints", self._here.steps)

    def newest_whole(self) -> tuple[Path | None, list[str]]:
        return on_first(self.ranks, "check checkpoints", self._here.newest_whole)

    def evaluated(self, metric: str) -> list[dict[str, Any]]:
        return on_first(self.ranks, "list evaluations", lambda: self._here.evaluated(metric))

    def prune(self, keep_last: int, best: int | None) -> None:
        on_first(self.ranks, "delete checkpoints", lambda: self._here.prune(keep_last, best))

    def manifest(self, checkpoint: Path) -> dict[str, Any]:
        return on_first(self.ranks, "read a manifest", lambda: self._here.manifest(checkpoint))

    def set_aside(self, step: int) -> Path | None:
        return on_first(self.ranks, "rename a checkpoint", lambda: self._here.set_aside(step))


def open_run_directory(path: str | Path, ranks: Ranks | None) -> RunDirectory:
    """Return the run directory of a process, or of several ranks."""
    return RunDirectory(path) if ranks is None else RankRun(path, ranks)


@contextmanager
def unshared(out: Place, resume: Place) -> Iterator[tuple[Place, Place, Upload]]:
    """Yield what :func:`stoker.training.files.rundir.local_run` does, on ranks that leave the run to the first one."""
    yield out, resume, lambda: None
