"""The kernel that copies rows by number: in Triton's interpreter (of test_triton.py), and on a GPU if there is one."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed here"
)
needs_kernel = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here"
)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "count"), [(None, 70), (1, 5), (3, 1), (64, 100), (300, 9), (4, 0)])
def test_rows_are_copied_to_the_bit(dtype, dim, count):
    from stoker.ops.gpu.kernels import copy_rows

    device = torch.device("cpu" if INTERPRETED else "cuda")
    random = np.random.default_rng(0)
    shape = (150,) if dim is None else (150, dim)
    whole = torch.int16 if dtype == torch.bfloat16 else torch.int32
    limit = 2 ** (8 * whole.itemsize - 1)
    # Any bits: not-a-numbers with a payload among them.
    source = torch.from_numpy(random.integers(-limit, limit, shape)).to(whole).view(dtype)
    if not INTERPRETED:
        source = source.pin_memory()
    target = torch.zeros(shape, dtype=dtype, device=device)
    rows = torch.from_numpy(random.integers(0, 150, count)).to(device)
    places = torch.from_numpy(random.permutation(150)[:count].copy()).to(device)
    copy_rows(source, rows, target, places)
    expected = torch.zeros(shape, dtype=dtype).view(whole)
    expected[places.cpu()] = source.view(whole)[rows.cpu()]
    assert torch.equal(target.cpu().view(whole), expected)
