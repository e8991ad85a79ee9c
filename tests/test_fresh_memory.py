"""Fresh floats are not-a-number in this process: what a kernel does not write shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stoker.ops import Bags, get_backend
from stoker.ops.cpu.arena import Arena
from stoker.ops.space import make_space

LIKE = torch.zeros(3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: torch.empty(3, 4, dtype=dtype),
        lambda dtype: torch.empty((3, 4), dtype=dtype, requires_grad=True),
        lambda dtype: torch.empty_like(LIKE, dtype=dtype),
        lambda dtype: torch.empty_strided((3, 4), (4, 1), dtype=dtype),
        lambda dtype: LIKE.new_empty(3, 4, dtype=dtype),
    ],
)
def test_torch(make, dtype):
    made = make(dtype)
    assert made.shape == (3, 4)
    assert made.dtype == dtype
    assert made.isnan().all()


def test_numpy():
    for made in (np.empty((3, 4), np.float32), np.empty(5), np.empty_like(np.zeros(4, np.float64))):
        assert np.isnan(made).all()
    assert np.empty((2, 3), dtype=np.int64).shape == (2, 3)


def test_memory_that_an_arena_lends_again():
    arena = Arena()
    first = arena.empty(8, 4)
    assert first.isnan().all()
    first.zero_()
    address = first.data_ptr()
    del first
    again = arena.empty(8, 4)
    assert again.data_ptr() == address
    assert again.isnan().all()


def test_a_kernel_of_the_cpu_that_writes_nothing_shows(monkeypatch):
    kernels = pytest.importorskip("stoker.ops.cpu.kernels", reason="the CPU back end needs numba")
    space = make_space(["t"], [5], [["f"]], ["f"])
    backend, weight, bags = get_backend("cpu", torch.device("cpu")), torch.ones(5, 4), Bags(torch.zeros(6, 1).long())
    for _ in range(2):  # the second lookup gets the memory of the first
        assert (backend.lookup(weight, space, bags) == 1).all()

    class Nothing:
        def run(self, *_, **__):
            pass

    monkeypatch.setattr(kernels, "items_kernel", Nothing())
    assert backend.lookup(weight, space, bags).isnan().all()


def test_numba_compiles_what_it_would_compile():
    numba = pytest.importorskip("numba", reason="nothing is compiled without numba")

    @numba.njit
    def made(size):
        out = np.empty(size, np.float32)
        out[:] = 2.0
        return out, np.empty_like(out).shape[0]

    out, size = made(3)
    assert out.tolist() == [2.0, 2.0, 2.0]
    assert size == 3
