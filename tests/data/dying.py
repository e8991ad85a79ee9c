"""Processes that die before their n-th change of the disk: ``python dying.py JOB FOLDER LAST EVERY``.

A job makes FOLDER/place/out. Each child of this process runs it and dies at one of the LAST steps (0: of all), EVERY
steps behind the one before; a second child then does it again. The forking process itself stays without threads, so a
child begins like a process of its own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stoker.prep.prepare
from stoker.dataset import gather, split
from stoker.dataset.dataset import Dataset
from stoker.rewrite import derived
from stoker.rewrite.classified import write_classified

JOB, FOLDER = sys.argv[1], Path(sys.argv[2])
PLACE = FOLDER / "place"
OUT = PLACE / "out"
CHANGES = ("mkdir", "link", "replace", "rename", "unlink", "rmdir", "fsync")


def classify(number: int) -> None:
    hot = {"C1": 5 + number, "C2": 5}
    source = Dataset(FOLDER / "source")
    write_classified(source, OUT, hot_rows=hot, profile_hash=str(number), profile={}, threads=1, overwrite=True)


def prepare(number: int, *, reorder: bool = False) -> None:
    files = [FOLDER / "old.csv"] if number == 0 else [FOLDER / "old.csv", FOLDER / "new.csv"]
    schema = FOLDER / "schema.toml"
    stoker.prepare(str(schema), files, out=OUT, overwrite=True, reorder=reorder, threads=1)


def reorder(number: int) -> None:
    prepare(number, reorder=True)


def child(work: Callable[[], Any]) -> int:
    """The exit code of a process that does this and nothing else."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def die_before(step: int, count: list[int]) -> None:
    """Die instead of the ``step``-th change; ``count`` receives how many there were."""
    seen = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            count[0] = seen
            if seen == step:
                os._exit(9)
            return call(*args, **kwargs)

        return wrapper

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))


def digests() -> dict[str, str]:
    files = [path for path in sorted(OUT.rglob("*")) if path.is_file()]
    return {str(path.relative_to(OUT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def whole(work: Callable[[int], None], number: int) -> dict[str, str]:
    """What the job makes when nothing happens."""
    assert child(lambda: work(number)) == 0
    made = digests()
    shutil.rmtree(PLACE)
    PLACE.mkdir()
    return made


def main() -> None:
    # The twins: no child has machine code to load.
    derived.make_gather = split.make_gather = lambda shards, starts, **_: gather.NumpyGather(shards, starts)
    work = {"classify": classify, "prepare": prepare, "reorder": reorder}[JOB]
    PLACE.mkdir()
    old, new = whole(work, 0), whole(work, 1)
    assert old != new

    def after() -> None:
        """What a death left is the old dataset or the new one, or one rename from it; and the job can be done."""
        if OUT.exists():
            Dataset(OUT).verify()
            found = {name: value for name, value in digests().items() if name.split("/")[0] not in (".work", ".lock")}
            assert found in (old, new)
        else:
            assert (PLACE / ".out.stoker-old" / "manifest.json").exists(), "the old dataset is gone"
        work(1)
        assert digests() == new
        assert [path.name for path in PLACE.iterdir()] == ["out"], sorted(PLACE.iterdir())

    def dying(step: int) -> None:
        count = [0]
        die_before(step, count)
        work(1)
        (FOLDER / "steps").write_text(str(count[0]))

    def dies(step: int) -> int:
        shutil.rmtree(PLACE)
        shutil.copytree(FOLDER / "kept", PLACE)
        return child(lambda: dying(step))

    assert child(lambda: work(0)) == 0
    shutil.copytree(PLACE, FOLDER / "kept")
    assert dies(0) == 0
    steps = int((FOLDER / "steps").read_text())
    last, every = map(int, sys.argv[3:])
    chosen = range(max(1, steps + 1 - last) if last else 1, steps + 1, every)
    for step in chosen:
        assert dies(step) == 9, step
        assert child(after) == 0, f"after step {step} of {steps}"
    print("steps", len(chosen))


main()
