"""The matrix of embedding workloads, their inputs, and their reference in float64, made once and kept in the cache.

Legend: B examples, F features (one table each), N rows of all tables, D columns, L ids of a batch, W columns of all
tables together (the sum of D).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import CACHE, WrongResult

__all__ = [
    "CHECKED_STEPS",
    "KAGGLE",
    "MATRIX",
    "QUICK_MATRIX",
    "EmbeddingWorkload",
    "Shape",
    "check_rows",
    "kaggle_like",
    "kaggle_shape",
    "zipf_ids",
]

#: Criteo Kaggle's tables with all ids kept
KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306,
    10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
SKEW = 1.05  # exponent of the Zipf law where a workload names no other
TABLE_BYTES = 192 * 2**20  # of a shape's rows: many times the last-level cache
POOL_IDS = 6_000_000  # of all distinct batches of a shape, so that no cache holds the next one's rows
GRADS = 4  # distinct gradients
CHECKED_STEPS = 3  # the first steps of every process are compared with the reference
LR = 2.0**-5
EPS = 1e-8
BETAS = (0.9, 0.999)


def kaggle_like(total: int = 5_000_000) -> list[int]:
    """Kaggle's table sizes scaled to ``total`` rows, none below 3."""
    share = total / sum(KAGGLE)
    sizes = [max(3, round(rows * share)) for rows in KAGGLE]
    sizes[int(np.argmax(sizes))] += total - sum(sizes)
    return sizes


def zipf_ids(rng: np.random.Generator, rows: int, count: int, skew: float = SKEW) -> np.ndarray:
    """Ids 0..rows-1 with probability proportional to (id + 1) ** -skew; 0 is uniform."""
    mass = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -skew)
    return np.searchsorted(mass, rng.random(count) * mass[-1]).clip(max=rows - 1).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One corner of the matrix: which tables, which ids, how many at a time."""

    name: str
    sizes: tuple[int, ...]  # rows of each table
    dims: tuple[int, ...]  # columns of each table
    batch: int
    longest: int = 1  # ids of a bag: always one, or 1 to ``longest``, all equally likely
    skew: float = SKEW
    scattered: bool = True  # popular ids anywhere in their table; else id 0 is the most popular

    @property
    def width(self) -> int:
        """Columns of all tables."""
        return sum(self.dims)

    @property
    def ids_per_batch(self) -> int:
        """How many ids a batch has on average."""
        return self.batch * len(self.sizes) * (self.longest + 1) // 2

    @property
    def pool(self) -> int:
        """Distinct batches."""
        return min(200, max(CHECKED_STEPS + 1, POOL_IDS // self.ids_per_batch))


def kaggle_shape(batch: int) -> Shape:
    """Return 26 tables like Criteo Kaggle's, ids by falling frequency: the workload of the bars before the matrix."""
    sizes = tuple(kaggle_like())
    return Shape(
        name=f"26 tables D 16, one id, Zipf 1.05 sorted, batch {batch}",
        sizes=sizes, dims=(16,) * len(sizes), batch=batch, scattered=False,
    )  # fmt: skip


def corner(dims: Sequence[int], batch: int, longest: int, skew: float, *, scattered: bool = True) -> Shape:
    """Return a shape whose tables take TABLE_BYTES: each has two thirds of the rows before it, the last one has 10."""
    shares = np.array([(2 / 3) ** place for place in range(len(dims) - 1)])
    rows = shares * TABLE_BYTES / 4 / (shares * np.array(dims[:-1])).sum()
    columns = "/".join(map(str, dict.fromkeys(dims)))
    ids = "one id" if longest == 1 else f"bags of 1-{longest}"
    law = f"Zipf {skew:g}" if skew else "uniform"
    order = ("scattered" if scattered else "sorted") if skew else ""
    return Shape(
        name=f"{len(dims)} tables D {columns}, {ids}, {law} {order}".rstrip() + f", batch {batch}",
        sizes=(*rows.astype(int).tolist(), 10), dims=tuple(dims), batch=batch, longest=longest, skew=skew,
        scattered=scattered,
    )  # fmt: skip


MIXED = (8, 32, 64, 128, 8, 32, 64, 128)
MATRIX = (
    kaggle_shape(2048),
    kaggle_shape(8192),
    corner(MIXED, 2048, 20, 0.8),
    corner(MIXED, 8192, 20, 1.2),
    corner(MIXED, 1024, 1, 1.05, scattered=False),
    corner(MIXED, 65536, 1, 0.0),
    corner((8,) * 12, 8192, 1, 0.6),
    corner((8,) * 12, 1024, 20, 0.0),
    corner((128,) * 4, 8192, 1, 0.6, scattered=False),
    corner((128,) * 4, 1024, 20, 1.05),
    corner((32,) * 8, 65536, 1, 1.2),
)
QUICK_MATRIX = (MATRIX[0], MATRIX[2], MATRIX[7], MATRIX[8])


@dataclass(frozen=True, kw_only=True)
class EmbeddingWorkload:
    """Files that every contestant reads.

    ``weight.npy`` float32, table after table, [N_t, D_t] each, flat; ``ids.npy`` int32 of all batches, flat;
    ``bounds.npy`` [pool + 1], where each batch begins in it; ``offsets.npy`` [pool, B * F + 1], example by example;
    ``grad.npy`` [GRADS, B, W].

    Weights are multiples of 2^-12, gradients of 2^-7 and the learning rate is 2^-5, so with SGD all weights stay
    multiples of 2^-12: sums of gradients and pooled bags are exact in float32 in any order, up to 4,096, and
    contestants must agree to the bit.
    """

    directory: Path
    shape: Shape

    @classmethod
    def make(cls, shape: Shape) -> EmbeddingWorkload:
        """Make the files, or take them as they are when they are whole."""
        stamp = json.dumps({**asdict(shape), "pool": shape.pool, "grads": GRADS, "version": 3})
        made = cls(directory=CACHE / "matrix" / hashlib.sha256(stamp.encode()).hexdigest()[:16], shape=shape)
        done = made.directory / "workload.json"
        if done.exists():
            return made
        made.directory.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(20)
        count = sum(n * d for n, d in zip(shape.sizes, shape.dims, strict=True))
        weight = rng.integers(-4096, 4096, count, dtype=np.int16).astype(np.float32) * np.float32(2.0**-12)
        np.save(made.directory / "weight.npy", weight)
        bags = shape.pool * shape.batch * len(shape.sizes)
        lengths = rng.integers(1, shape.longest + 1, bags) if shape.longest > 1 else np.ones(bags, np.int64)
        per_table = lengths.reshape(-1, len(shape.sizes))
        ids = np.empty(int(lengths.sum()), dtype=np.int32)
        feature = np.repeat(np.tile(np.arange(len(shape.sizes)), len(per_table)), lengths)
        for place, rows in enumerate(shape.sizes):
            drawn = zipf_ids(rng, rows, int(per_table[:, place].sum()), shape.skew)
            ids[feature == place] = rng.permutation(rows).astype(np.int32)[drawn] if shape.scattered else drawn
        np.save(made.directory / "ids.npy", ids)
        each = lengths.reshape(shape.pool, -1)
        np.save(made.directory / "bounds.npy", np.concatenate([[0], each.sum(1).cumsum()]))
        np.save(made.directory / "offsets.npy", np.concatenate([np.zeros_like(each[:, :1]), each.cumsum(1)], axis=1))
        grad = rng.standard_normal((GRADS, shape.batch, shape.width), dtype=np.float32).clip(-3.9, 3.9)
        np.save(made.directory / "grad.npy", np.round(grad * 128) / np.float32(128))
        done.write_text(stamp)
        return made

    def case(self) -> dict[str, Any]:
        """What a worker is told of this shape."""
        return {"inputs": str(self.directory), **asdict(self.shape)}

    def tables(self) -> list[np.ndarray]:
        """Initial rows [N_t, D_t] of each table."""
        flat = np.load(self.directory / "weight.npy", mmap_mode="r")
        counts = [n * d for n, d in zip(self.shape.sizes, self.shape.dims, strict=True)]
        starts = itertools.accumulate(counts, initial=0)
        return [flat[a : a + c].reshape(-1, d) for a, c, d in zip(starts, counts, self.shape.dims, strict=False)]

    def batch_ids(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [L] and offsets [B * F + 1] of a batch."""
        bounds = np.load(self.directory / "bounds.npy")
        ids = np.load(self.directory / "ids.npy", mmap_mode="r")[bounds[number] : bounds[number + 1]]
        return np.asarray(ids), np.load(self.directory / "offsets.npy", mmap_mode="r")[number]

    def by_table(self, number: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return, for each table, a batch's ids [L_t] and the example [L_t] that each belongs to."""
        ids, offsets = self.batch_ids(number)
        bag = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        feature = bag % len(self.shape.sizes)
        example = bag // len(self.shape.sizes)
        return [(ids[feature == t], example[feature == t]) for t in range(len(self.shape.sizes))]

    def reference(self, optimizer: str) -> dict[str, np.ndarray]:
        """Touched rows of each table, their weights after the checked steps, the last step's lookup [B, W]; float64."""
        path = self.directory / f"reference_{optimizer}.npz"
        if path.exists():
            with np.load(path) as kept:
                return dict(kept)
        grads = np.load(self.directory / "grad.npy", mmap_mode="r")
        steps = [self.by_table(number) for number in range(CHECKED_STEPS)]
        found: dict[str, np.ndarray] = {}
        looked = []
        columns = [0, *itertools.accumulate(self.shape.dims)]
        for t, initial in enumerate(self.tables()):
            rows = np.unique(np.concatenate([step[t][0] for step in steps]))
            w = initial[rows].astype(np.float64)
            state = [np.zeros_like(w), np.zeros_like(w)]
            output = w
            for number, step in enumerate(steps):
                ids, example = step[t]
                place = np.searchsorted(rows, ids)
                grad = grads[number % GRADS][:, columns[t] : columns[t + 1]]
                output = np.add.reduceat(w[place], np.flatnonzero(np.diff(example, prepend=-1)))
                order = np.argsort(place, kind="stable")
                at, start = np.unique(place[order], return_index=True)
                g = np.add.reduceat(grad[example[order]].astype(np.float64), start)
                w[at] -= textbook(optimizer, g, state, at, number)
            looked.append(output)
            found |= {f"rows_{t}": rows, f"weight_{t}": w}
        found["output"] = np.concatenate(looked, axis=1)
        np.savez(path, **found)  # type: ignore[arg-type]
        return found


def textbook(optimizer: str, g: np.ndarray, state: list[np.ndarray], at: np.ndarray, step: int) -> np.ndarray:
    """What one step subtracts from the rows ``at``, in float64; the definitions of stoker.optim."""
    if optimizer == "sgd":
        return LR * g
    if optimizer == "adagrad":
        state[0][at] += g * g
        return LR * g / (np.sqrt(state[0][at]) + EPS)
    if optimizer == "rowwise_adagrad":
        state[0][at] += (g * g).mean(1, keepdims=True)
        return LR * g / (np.sqrt(state[0][at]) + EPS)
    b1, b2 = BETAS
    state[0][at] = b1 * state[0][at] + (1 - b1) * g
    state[1][at] = b2 * state[1][at] + (1 - b2) * g * g
    root = np.sqrt(state[1][at] / (1 - b2 ** (step + 1))) + EPS
    return LR * state[0][at] / (1 - b1 ** (step + 1)) / root


def check_rows(label: str, optimizer: str, reference: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    """Compare a contestant's changed rows and last lookup with the reference.

    ``rows_T`` are those of table T whose weights changed at all in the checked steps: no other may have moved. SGD must
    agree to the bit; the others within float32 rounding (a few units in the last place of a step or a weight).

    Raises:
        WrongResult: naming the contestant and the worst element.
    """
    # Adam's eps is added before or after the bias correction in different libraries: visible at tiny gradients only.
    tolerance = {"sgd": 0.0, "adam": 1e-5}.get(optimizer, 1e-6)
    pairs = []
    for t in range(sum(name.startswith("rows_") for name in reference)):
        touched, rows = reference[f"rows_{t}"], found[f"rows_{t}"]
        if not np.isin(rows, touched, assume_unique=True).all():
            raise WrongResult(f"{label}: rows of table {t} changed that the batches never touched")
        place = np.searchsorted(touched, rows)
        # A touched row may stand still (its gradients cancel), so rows not reported count as unchanged.
        missing = len(touched) - len(rows)
        if missing > max(3, len(touched) // 1000):
            raise WrongResult(f"{label}: {missing:,} of {len(touched):,} touched rows of table {t} were not updated")
        pairs.append((f"rows of table {t}", found[f"weight_{t}"], reference[f"weight_{t}"][place]))
    output = reference["output"]
    pairs.append(("lookup", found["output"].reshape(-1, output.shape[1]), output))
    for what, mine, exact in pairs:
        if mine.shape != exact.shape:
            raise WrongResult(f"{label}: {what} of shape {mine.shape}, not {exact.shape}")
        error = np.abs(mine.astype(np.float64) - exact)
        # A pooled row adds up to 20 rows, each with its own rounding.
        allowed = tolerance * (1 + np.abs(exact)) * (20 if what == "lookup" else 1)
        if not (error <= allowed).all():
            worst = np.unravel_index(int(np.argmax(np.nan_to_num(error, nan=np.inf))), error.shape)
            raise WrongResult(
                f"{label}: {what} differ from the float64 reference by {error[worst]:.3g} at "
                f"{tuple(map(int, worst))}: {mine[worst]!r}, not {exact[worst]!r} "
                f"(allowed {allowed[worst]:.1g})"
            )
