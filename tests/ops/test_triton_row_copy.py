"""The kernel that copies rows by number: in Triton's interpreter, compiled for a GPU, and on one where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SOURCE = str(Path(__file__).parents[2] / "src")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed here"
)
needs_kernel = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here"
)

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from stoker.ops.gpu.kernels import copy_rows_kernel
for kind in ("*i16", "*i32"):
    for dim, rows, block in ((64, 32, 64), (1, 2048, 1), (300, 8, 256)):
        names = {"source": kind, "rows": "*i64", "target": kind, "places": "*i64", "count": "i32"}
        constants = {"D": dim, "ROWS": rows, "BLOCK": block}
        places = {(place,): [["tt.divisibility", 16]] for place in range(4)}
        source = ASTSource(copy_rows_kernel, {**names, **dict.fromkeys(constants, "constexpr")}, constants, places)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
        text = built.asm["ptx"]
        assert "ld.global" in text and "st.global" in text
        if dim == 64:
            assert ".v4.b32" in text, "rows are read in pieces of 16 bytes"
"""


def run(*arguments: str, **environment: str) -> None:
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


if not INTERPRETED:

    @pytest.mark.slow
    def test_interpreter() -> None:
        run("-m", "pytest", "-x", "-p", "no:cacheprovider", __file__, TRITON_INTERPRET="1")

    @pytest.mark.slow
    def test_machine_code(tmp_path: Path) -> None:
        """It compiles for a GPU that is not there, and reads whole pieces of rows."""
        run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")


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
