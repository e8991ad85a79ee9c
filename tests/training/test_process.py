"""Calls leave the process as they found it: threads, generators, allocator."""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_python
from safetensors.torch import load_file
from small_runs import ROWS, SMALL, TENTH

import stoker
from stoker.testing import make_dataset

SETTINGS: dict[str, Any] = {**{k: v for k, v in SMALL.items() if k != "display"}, "backend": "reference"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> stoker.Dataset:
    return make_dataset(tmp_path_factory.mktemp("process") / "d", rows=400, num_embeddings=ROWS)


def state() -> list[Any]:
    return [
        torch.get_num_threads(), torch.get_rng_state().tolist(), random.getstate(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],  # noqa: NPY002
    ]  # fmt: skip


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls that must leave the process alone; they must have set the number of threads for a time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    given: list[int] = []
    really = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (given.append(count), really(count)))

    def check(call: Callable[[], Any], *, sets_threads: bool = True) -> Any:
        torch.rand(3)
        given.clear()
        before = state()
        try:
            return call()
        finally:
            assert state() == before
            assert given == ([1, 3] if sets_threads else [])

    yield check
    really(threads)


def test_calls_restore_the_process(data: stoker.Dataset, tmp_path: Path, unchanged: Any) -> None:
    run = tmp_path / "run"
    unchanged(lambda: stoker.train(data, out=run, **SETTINGS, display="quiet"))
    unchanged(lambda: stoker.train(resume=run, epochs=2, display="quiet"))
    unchanged(lambda: stoker.find_lr(data, lr_steps=20, **SETTINGS))
    unchanged(lambda: stoker.verify(run, steps=2, begin="start", device_memory=TENTH))
    unchanged(lambda: stoker.trace(run, steps=2, begin="start"))
    model = unchanged(lambda: stoker.load(run).model, sets_threads=False)
    unchanged(lambda: stoker.evaluate(model, data.valid), sets_threads=False)
    unchanged(lambda: stoker.predict(model, data.valid, tmp_path / "scores.parquet"))  # in blocks, one thread each


def test_a_run_that_fails_restores_the_process(
    data: stoker.Dataset, tmp_path: Path, unchanged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        torch.rand(1)
        raise RuntimeError("in the middle")

    monkeypatch.setattr(stoker.RecModel, "loss", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        unchanged(lambda: stoker.train(data, out=tmp_path / "run", **SETTINGS, display="quiet"))
    with pytest.raises(RuntimeError, match="in the middle"):
        unchanged(lambda: stoker.find_lr(data, lr_steps=20, **SETTINGS))


_MAPPED = """
import ctypes, os, sys
from pathlib import Path
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keep")]
libc.mallinfo2.restype = Info

def mapped(size):
    "Whether a block of this size is mapped by itself, so that it goes back to the kernel when it is freed."
    before = libc.mallinfo2().hblks
    block = libc.malloc(size)
    after = libc.mallinfo2().hblks
    libc.free(block)
    return after > before

import stoker
from stoker.testing import make_dataset
large, folder = 2**26, Path(sys.argv[1])
data = make_dataset(folder / "d", rows=200, num_embeddings=[50, 20])
seen = []
loss = stoker.RecModel.loss
def observed(*arguments):
    seen.append(mapped(large))
    if fails:
        raise KeyError
    return loss(*arguments)
stoker.RecModel.loss = observed
settings = dict(embedding_dim=4, batch_size=64, epochs=1, backend="reference", tensorboard=False, display="quiet")
first = mapped(large)
for fails in (False, True):
    try:
        stoker.train(data, out=folder / f"run{fails}", **settings)
    except KeyError:
        pass
    print(first, any(seen), mapped(large), mapped(2**23), mapped(2**20))
    seen.clear()
"""


@pytest.mark.slow
def test_training_restores_the_allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, where nothing else has changed the allocator."""
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs mallinfo2, which glibc 2.33 and later has")
    for name in os.environ:
        if name.startswith(("MALLOC_", "GLIBC_")):
            monkeypatch.delenv(name)

    def lines(folder: str, **environment: str) -> list[str]:
        done = run_python("-c", _MAPPED, tmp_path / folder, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert lines("plain") == ["True False True True False"] * 2
    assert lines("given", MALLOC_MMAP_THRESHOLD_=str(2**24)) == ["True False True False False"] * 2


@pytest.mark.slow
def test_runs_in_threads_have_the_numbers_of_runs_one_by_one(data: stoker.Dataset, tmp_path: Path) -> None:
    """Only the state of torch's generator, which they share, may differ."""

    def train(name: str) -> Any:
        place = {"device_memory": TENTH} if name.startswith("placed") else {}
        result = stoker.train(data, out=tmp_path / name, **SMALL, **place, seed=int(name[-1]))
        [last] = (tmp_path / name / "checkpoints").glob("step_*")
        tensors = [(path.name, load_file(path)) for path in sorted(last.glob("*.safetensors"))]
        return result.test, [
            (file, key, each) for file, of in tensors for key, each in of.items() if "generator" not in key
        ]

    names = ["resident-0", "placed-1", "resident-2", "placed-3"]
    alone = [train(name) for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        together = list(pool.map(train, [f"{name[:-2]}-together-{name[-1]}" for name in names]))
    for (metrics, found), (expected, tensors) in zip(together, alone, strict=True):
        assert metrics == expected
        assert [each[:2] for each in found] == [each[:2] for each in tensors]
        assert all(torch.equal(one[2], other[2]) for one, other in zip(found, tensors, strict=True))
