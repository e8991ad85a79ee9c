"""Ids of the tensor-train bars, and what their lookup and one SGD step must give, in float64.

Ids have Globo's skew: the counts of its articles or readers in falling order, stretched to the rows of the table. Each
of the n counted ids becomes N / n rows that share its clicks evenly, so single rows are less popular than they were,
which is against us: few rows of a batch repeat. Row 0 is the most popular: frequency order. UNSTRETCHED leaves the
counts as they are, on the first n rows of the table.

Legend: N rows, D columns, B ids a batch, U distinct ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from benchmarks.harness import CACHE, Run, WrongResult
from benchmarks.lookahead import globo
from benchmarks.peers.tt_tools import LR, cores_of
from stoker.ops.tt.shape import TTShape, factorize

__all__ = ["BATCH", "PUBLISHED_COLS", "UNSTRETCHED", "Case", "check", "equal_rows"]

BATCH = 4096
POOL = 64  # distinct batches
UNSTRETCHED = "-clicks"  # behind the name of Globo's table
PUBLISHED_COLS = {16: (2, 2, 4), 64: (4, 4, 4)}
_TOLERANCE = 2e-5  # of the largest magnitude, for sums of up to 128 x 128 products in float32


def equal_rows(num_embeddings: int, count: int = 3) -> tuple[int, ...]:
    """Row factors as equal as they can be with the least product that holds the rows."""
    first = round(num_embeddings ** (1 / count))
    rows = [first] * count
    place = 0
    while np.prod(rows, dtype=np.int64) < num_embeddings:
        rows[place % count] += 1
        place += 1
    return tuple(rows)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A table and the ids that look into it."""

    rows: int
    dim: int
    rank: int
    of: str = "article"  # table of Globo whose skew it has

    @property
    def name(self) -> str:
        return f"{self.rows / 1e6:g} M x {self.dim} rank {self.rank} {self.of}"

    def shape(self, which: str) -> TTShape:
        """ "ours", or "published": equal row factors and EL-Rec's factors of the columns."""
        if which == "ours":
            return factorize(self.rows, self.dim, self.rank)
        return TTShape(equal_rows(self.rows), PUBLISHED_COLS[self.dim], (self.rank, self.rank))

    def config(self, run: Run, *, permuted: bool = False) -> dict[str, Any]:
        """What a worker is told."""
        shapes = {which: self.shape(which) for which in ("ours", "published")}
        return {
            "name": self.name,
            "num_embeddings": self.rows,
            "dim": self.dim,
            "ids": str(ids_file(self.of, self.rows, run, permuted=permuted)),
            "shapes": {k: {"rows": s.rows, "cols": s.cols, "ranks": s.ranks} for k, s in shapes.items()},
        }


def ids_file(of: str, rows: int, run: Run, *, permuted: bool = False) -> Path:
    """[POOL, BATCH] int64, made once; with ``permuted`` the same ids renamed at random.

    Raises:
        NotRun: Globo is not on this machine.
    """
    path = CACHE / "tensor_train" / f"{of}_{rows}{'_permuted' * permuted}.npy"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(11)
    if permuted:
        ids = rng.permutation(rows)[np.load(ids_file(of, rows, run))]
    else:
        counts = np.sort(load_file(globo(run).path / "counts.safetensors")[of.removesuffix(UNSTRETCHED)])[::-1]
        mass = np.cumsum(counts[counts > 0])
        drawn = np.searchsorted(mass, rng.integers(0, mass[-1], (POOL, BATCH)), side="right")
        places = drawn if of.endswith(UNSTRETCHED) else (drawn + rng.random(drawn.shape)) / len(mass) * rows
        ids = places.astype(np.int64).clip(max=rows - 1)
    np.save(path, ids)
    return path


@cache
def reference(case: Case, which: str, file: Path) -> tuple[np.ndarray, list[np.ndarray]]:
    """The first batch's rows [B, D], and what one SGD step adds to each core: autograd of the definition in float64."""
    shape = case.shape(which)
    given = cores_of({"rows": list(shape.rows), "cols": list(shape.cols), "ranks": list(shape.ranks)})
    cores = [torch.from_numpy(core).double().requires_grad_() for core in given]
    distinct, inverse = np.unique(np.load(file, mmap_mode="r")[0], return_inverse=True)
    grad = np.random.default_rng(7).standard_normal((4, len(inverse), case.dim), dtype=np.float32)[0]
    sums = np.zeros((len(distinct), case.dim))
    np.add.at(sums, inverse, grad)
    found = []
    for start in range(0, len(distinct), 256):
        part = distinct[start : start + 256]
        digits = np.unravel_index(part, shape.rows)
        value = torch.ones(len(part), 1, 1, dtype=torch.float64)
        for core, digit, cols in zip(cores, digits, shape.cols, strict=True):
            slices = core[torch.from_numpy(digit)]
            value = (value @ slices).reshape(len(part), value.shape[1] * cols, -1)
        rows = value.reshape(len(part), case.dim)
        rows.backward(torch.from_numpy(sums[start : start + 256]))
        found.append(rows.detach().numpy())
    changes = [(-LR * core.grad).to(torch.float32).numpy() for core in cores if core.grad is not None]
    return np.concatenate(found)[inverse].astype(np.float32), changes


def check(label: str, case: Case, which: str, run: Run, left: Path, *, permuted: bool = False) -> None:
    """What a contestant left equals the reference within rounding.

    Raises:
        WrongResult: it does not.
    """
    looked, changes = reference(case, which, ids_file(case.of, case.rows, run, permuted=permuted))
    kept = np.load(left)
    wanted: Sequence[tuple[str, np.ndarray]] = [
        ("looked", looked),
        ("out", looked),
        *((f"change{place}", change) for place, change in enumerate(changes)),
    ]
    for name, exact in wanted:
        mine = kept[name]
        if mine.shape != exact.shape:
            raise WrongResult(f"{label}, {case.name}: {name} of shape {mine.shape}, not {exact.shape}")
        # A change is the difference of two float32 cores of magnitude 1, whatever it is itself.
        allowed = _TOLERANCE * float(np.abs(exact).max()) + (5e-7 if name.startswith("change") else 0.0)
        error = float(np.abs(mine - exact).max())
        if not error <= allowed:
            raise WrongResult(f"{label}, {case.name}: {name} off the float64 reference by {error:.3g} > {allowed:.3g}")
