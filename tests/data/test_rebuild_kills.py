"""A process that dies at every step of making a dataset anew: what is there is whole, and the next one works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.data.dataset import Dataset
from stoker.testing import make_dataset

_SIZES = (20, 10)
# The forking process stays without threads: every child begins as if it were a process of its own.
_DYING = """
import os, shutil, sys
from pathlib import Path
from stoker.data import gather, hot_cold, hot_mask, reader
from stoker.data.dataset import Dataset
from stoker.data.hot_cold import Profiled, run_classify

hot_cold.make_hot_mask = hot_mask.NumpyHotMask  # the twins: no child has machine code to load
hot_cold.make_gather = reader.make_gather = lambda shards, starts, **_: gather.NumpyGather(shards, starts)
source, place, old = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "old"
out = place / "out"

def classify(number):
    return run_classify(
        Dataset(source), Profiled(hot_rows={"C1": 5 + number, "C2": 5}, hash=str(number), values={}), out,
        threads=1, overwrite=True,
    )

def die_before(step):
    seen = 0
    def counted(call):
        def wrapper(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == step:
                os._exit(9)
            return call(*args, **kwargs)
        return wrapper
    for name in ("mkdir", "link", "replace", "rename", "unlink", "rmdir", "fsync"):
        setattr(os, name, counted(getattr(os, name)))
    shutil.rmtree = counted(shutil.rmtree)

def child(work):
    number = os.fork()
    if number == 0:
        code = 1
        try:
            code = work() or 0
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])

def dying(step):
    die_before(step)
    classify(1)

def after():
    if out.exists():
        made = Dataset(out)
        made.verify()
        assert made.hot_cold["profile_hash"] in "01"
    else:
        assert not old or (place / "out.old").is_dir(), "the old dataset is gone"
    classify(2)
    Dataset(out).verify()
    assert Dataset(out).hot_cold["profile_hash"] == "2"
    assert [path.name for path in place.iterdir()] == ["out"], sorted(place.iterdir())
    assert not (out / ".lock").exists()

step = 0
while True:
    step += 1
    if out.exists():
        shutil.rmtree(out)
    assert not old or child(lambda: classify(0) and 0) == 0
    code = child(lambda: dying(step))
    if code == 0:
        break
    assert code == 9, code
    assert child(after) == 0, f"after step {step}"
print("steps", step)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which this system lacks")
@pytest.mark.parametrize("before", ["none", "old"])
def test_a_death_at_any_step_of_making_a_dataset_anew(tmp_path: Path, before: str) -> None:
    make_dataset(tmp_path / "source", rows=60, num_embeddings=_SIZES, shard_rows=30)
    (tmp_path / "place").mkdir()
    found = subprocess.run(
        [sys.executable, "-c", _DYING, str(tmp_path / "source"), str(tmp_path / "place"), before],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert int(found.stdout.split()[-1]) > 20
    assert Dataset(tmp_path / "source").verify() > 0
