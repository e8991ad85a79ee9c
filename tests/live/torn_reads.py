"""Rows read while updates are published and rolled back: each read must be of one version, the one that it names.

python tests/live/torn_reads.py 10_000_000           # reads of rows, under each placement
python tests/live/torn_reads.py 1_000_000 unlocked   # readers that take no lock: shows that torn reads are noticed
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from days import day, first_run

import stoker
from stoker.base.errors import CheckpointError
from stoker.live.journal import set_head
from stoker.training.files.rundir import RunDirectory

__all__ = ["Found", "make", "read"]

PLACEMENTS = {
    "device": stoker.Device(), "cached": stoker.Cached(fraction=0.2), "file": stoker.Cached(fraction=0.2, home="file"),
}  # fmt: skip
BATCH = 4096  # examples in a read


class Found(NamedTuple):
    """What readers saw."""

    reads: int  # of rows
    torn: int
    versions: int
    changes: int  # of the model while it was read
    caught_up: bool  # whether the first poll after a roll-back had its version


def make(folder: Path, rows: int) -> Path:
    """Make a run with three updates; the last one has new ids."""
    (folder / "logs").mkdir(parents=True)
    day(0, rows, rows).write_csv(folder / "logs" / "day_0.csv")
    run = first_run(folder, batch_size=512)
    for number in (1, 2, 3):
        stoker.update(run, day(number, rows // 2, rows), keep_ids=number < 3, rate=0.5)
    return run


def read(run: Path, placement: Any, wanted: int, *, locked: bool = True, readers: int = 2, changes: int = 20) -> Found:
    """Read ``wanted`` rows, and while the model changes at least ``changes`` times, with that many threads."""
    directory, folder = RunDirectory(run), run / "checkpoints"
    newest = folder / "update_000003"
    stoker.rollback(run, 0)
    paths = [stoker.load(run).path, *(folder / f"update_{number:06d}" for number in (1, 2, 3))]
    models = [stoker.load(path).model for path in paths]
    names = [table.name for table in models[0].tables]
    truth = [[model.embeddings.rows(name) for name in names] for model in models]
    least = [len(rows) for rows in truth[0]]
    follower = stoker.Follower(run, placement=placement)
    ended, changed = threading.Event(), [0]
    reads, torn = [0] * readers, [0] * readers  # of each thread
    seen, errors = set[int](), list[BaseException]()

    def publish() -> None:
        random = np.random.default_rng(0)
        while not ended.is_set():
            number = int(random.integers(4))
            if random.random() < 0.3:
                set_head(directory, newest)
                stoker.rollback(run, number)
            elif number:
                set_head(directory, paths[number])
            else:
                directory.remove_head()
            ended.wait(0.005)

    def follow() -> None:
        while not ended.is_set():
            try:
                changed[0] += follower.poll()
            except CheckpointError as error:
                errors.append(error)
                return

    def look(seed: int) -> None:
        random = np.random.default_rng(seed)
        while not ended.is_set():
            ids = np.stack([random.integers(0, size, BATCH) for size in least], 1)
            with follower.lock if locked else nullcontext(), torch.no_grad():
                number = follower.version.number
                found = follower.model.embeddings(torch.from_numpy(ids)).clone()
            rows = torch.stack([truth[number][at][ids[:, at]] for at in range(len(names))], 1)
            torn[seed] += int((found != rows).any(2).sum())
            reads[seed] += ids.size
            seen.add(number)

    threads = [threading.Thread(target=publish), threading.Thread(target=follow)]
    threads += [threading.Thread(target=look, args=(seed,)) for seed in range(readers)]
    for thread in threads:
        thread.start()
    while not errors and (sum(reads) < wanted or changed[0] < changes):
        time.sleep(0.01)
    ended.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    set_head(directory, newest)
    follower.poll()
    stoker.rollback(run, 1)
    follower.poll()
    caught_up = follower.version.number == 1
    set_head(directory, newest)
    return Found(sum(reads), sum(torn), len(seen), changed[0], caught_up)


def main() -> None:
    wanted = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        run = make(Path(folder) / "made", 20_000)
        for name, placement in PLACEMENTS.items():
            found = read(run, placement, wanted, locked="unlocked" not in sys.argv)
            print(f"{name}: {found}", flush=True)
            if found.torn:
                sys.exit(f"{found.torn:,} rows were torn.")


if __name__ == "__main__":
    main()
