"""Updates that are killed at any moment: ``python dying_updates.py FOLDER FIRST LAST``.

FOLDER has logs, a dataset and a run (tests/live/days.py). A child of this process updates the run twice and compacts,
in one go, and dies: before its n-th change of the disk, or by SIGKILL from a clock. A second child does the same,
and may die too; the last one is left alone. The run must then have the bytes of one that nothing happened to. The
forking process itself stays without threads, so a child begins like a process of its own.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stoker.live.history
import stoker.live.update
from stoker.dataset import gather, split

FOLDER, FIRST, LAST = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
RUN = FOLDER / "place" / "run"
CHANGES = ("mkdir", "link", "replace", "rename", "unlink", "rmdir", "fsync")


def work() -> None:
    """What a user would do again after a kill."""
    for number in (1, 2):
        stoker.update(RUN, FOLDER / "logs" / f"day_{number}.csv", save_every=2, threads=1, data=FOLDER / "data")
    stoker.compact(RUN, 1)


def digests() -> dict[str, str]:
    files = [path for path in sorted(RUN.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(RUN)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def child(job: Callable[[], Any]) -> int:
    """How a process ended that does this and nothing else."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            job()
            code = 0
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def dying(step: int, after: float | None) -> None:
    """Do the work, and die at a change of the disk or after some seconds; note both if nothing happens."""
    seen, begun = 0, time.monotonic()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    if after is not None:
        timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    work()
    (FOLDER / "noted").write_text(f"{seen} {time.monotonic() - begun}")


def begin() -> None:
    shutil.rmtree(RUN.parent, ignore_errors=True)
    shutil.copytree(FOLDER / "run", RUN)


def main() -> None:
    split.make_gather = lambda shards, starts, **_: gather.NumpyGather(shards, starts)  # no machine code to load
    begin()
    assert child(lambda: dying(0, None)) == 0
    whole = digests()
    steps, seconds = (FOLDER / "noted").read_text().split()
    killed = 0
    for number in range(FIRST, LAST):
        chance = random.Random(number)
        begin()
        for _ in range(1 + number % 2):
            step, after = chance.randrange(1, int(steps) + 1), None
            if number % 3 == 2:
                step, after = 0, chance.uniform(0.05, 1.0) * float(seconds)
            ended = child(lambda step=step, after=after: dying(step, after))
            assert ended in (0, -signal.SIGKILL), (number, ended)
            killed += ended != 0
        assert child(work) == 0, f"after kill {number}"
        found = digests()
        differ = sorted(name for name in {*found, *whole} if found.get(name) != whole.get(name))
        assert not differ, f"after kill {number} these differ: {differ}"
    print("killed", killed)


main()
