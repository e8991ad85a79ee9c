"""The run directory of several ranks: the first rank alone reads and writes it, so the others need not see its disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from stoker.tables.ranks.transport import Ranks
from stoker.training.files.rundir import Place, RunDirectory, Upload
from stoker.training.ranks.first import on_first

#: What the first rank does in each method, for messages.
_WORK = {
    "check_new": "check the run directory", "write": "write {}", "read": "read {}", "head": "read the head",
    "steps": "list checkpoints", "newest_whole": "check checkpoints", "evaluated": "list evaluations",
    "prune": "delete checkpoints", "manifest": "read a manifest", "set_aside": "rename a checkpoint",
}  # fmt: skip


class RankRun(RunDirectory):
    """As :class:`RunDirectory`; all ranks call its methods, get the same results and raise the same errors."""

    def __init__(self, path: str | Path, ranks: Ranks) -> None:
        super().__init__(path)
        self.ranks, here = ranks, RunDirectory(path)
        for name, work in _WORK.items():
            setattr(self, name, partial(self._on_first, work, getattr(here, name)))

    def _on_first(self, work: str, method: Callable[..., Any], *given: Any) -> Any:
        return on_first(self.ranks, work.format(*given), partial(method, *given))

    @contextmanager
    def locked(self) -> Iterator[bool]:
        with ExitStack() as stack:
            here = RunDirectory(self.path)
            yield on_first(self.ranks, "lock the run", lambda: stack.enter_context(here.locked()))


def open_run_directory(path: str | Path, ranks: Ranks | None) -> RunDirectory:
    """Return the run directory of a process, or of several ranks."""
    return RunDirectory(path) if ranks is None else RankRun(path, ranks)


@contextmanager
def unshared(out: Place, resume: Place) -> Iterator[tuple[Place, Place, Upload]]:
    """Yield what :func:`stoker.training.files.rundir.local_run` does, on ranks that leave the run to the first one."""
    yield out, resume, lambda: None
