"""The embedding step's inputs and its reference in float64, made once and kept under ``benchmarks/cache``.

Legend: B examples, F features (one table each), D columns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import CACHE, WrongResult

__all__ = ["CHECKED_STEPS", "DIM", "KAGGLE", "POOL", "EmbeddingWorkload", "check_rows", "kaggle_like"]

#: Criteo Kaggle's tables with all ids kept
KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306,
    10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
DIM = 16
SKEW = 1.05  # exponent of the Zipf law
POOL = {2048: 200, 8192: 64}  # distinct batches, so that no cache holds the next one's rows
GRADS = 6  # distinct gradients: more than the last-level cache holds
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


def zipf_ids(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    """Ids 0..rows-1 with probability proportional to (id + 1) ** -SKEW."""
    mass = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -SKEW)
    return np.searchsorted(mass, rng.random(count) * mass[-1]).clip(max=rows - 1).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class EmbeddingWorkload:
    """Files that every contestant reads: ``weight.npy`` [N, D]; ``ids_B.npy`` [pool, B, F]; ``grad_B.npy``
    [GRADS, B, F, D].

    Weights are multiples of 2^-12, gradients of 2^-10 and the learning rate is 2^-5, so every sum of
    gradients is exact in float32 in any order, and so is the whole SGD step: contestants must agree to the
    bit there.
    """

    directory: Path
    sizes: list[int]

    @classmethod
    def make(
        cls, sizes: list[int] | None = None, pool: dict[int, int] | None = None, name: str = "embedding"
    ) -> EmbeddingWorkload:
        """Make the files, or take them as they are when they are whole."""
        sizes = kaggle_like() if sizes is None else sizes
        pool = POOL if pool is None else pool
        directory = CACHE / name
        stamp = {"sizes": sizes, "pool": {str(k): v for k, v in pool.items()}, "grads": GRADS, "version": 1}
        done = directory / "workload.json"
        made = cls(directory=directory, sizes=sizes)
        if done.exists() and json.loads(done.read_text()) == stamp:
            return made
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.iterdir():
            old.unlink()
        rng = np.random.default_rng(20)
        weight = rng.integers(-4096, 4096, (sum(sizes), DIM), dtype=np.int32).astype(np.float32) * np.float32(2.0**-12)
        np.save(directory / "weight.npy", weight)
        for batch, count in pool.items():
            ids = np.empty((count, batch, len(sizes)), dtype=np.int32)
            for feature, rows in enumerate(sizes):
                ids[:, :, feature] = zipf_ids(rng, rows, count * batch).reshape(count, batch)
            np.save(directory / f"ids_{batch}.npy", ids)
            grad = rng.standard_normal((GRADS, batch, len(sizes), DIM), dtype=np.float32).clip(-3.9, 3.9)
            np.save(directory / f"grad_{batch}.npy", np.round(grad * 1024) / np.float32(1024))
        done.write_text(json.dumps(stamp))
        return made

    def config(self, optimizer: str, batches: list[int]) -> dict[str, object]:
        """What a worker is told."""
        return {
            "inputs": str(self.directory),
            "sizes": self.sizes,
            "optimizer": optimizer,
            "batches": batches,
            "checked_steps": CHECKED_STEPS,
            "lr": LR,
            "eps": EPS,
            "betas": BETAS,
        }

    def reference(self, optimizer: str, batch: int) -> dict[str, np.ndarray]:
        """Touched rows, their weights after the checked steps, and the last step's lookup, in float64."""
        path = self.directory / f"reference_{optimizer}_{batch}.npz"
        if path.exists():
            with np.load(path) as kept:
                return dict(kept)
        bases = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        ids = np.load(self.directory / f"ids_{batch}.npy", mmap_mode="r")[:CHECKED_STEPS]
        grads = np.load(self.directory / f"grad_{batch}.npy", mmap_mode="r")
        flat = [(step + bases).reshape(-1) for step in ids.astype(np.int64)]
        rows = np.unique(np.concatenate(flat))
        w = np.load(self.directory / "weight.npy", mmap_mode="r")[rows].astype(np.float64)
        state = [np.zeros_like(w), np.zeros_like(w)]
        looked = w
        for step, addresses in enumerate(flat):
            place = np.searchsorted(rows, addresses)
            looked = w[place]
            order = np.argsort(place, kind="stable")
            at, start = np.unique(place[order], return_index=True)
            g = np.add.reduceat(grads[step % GRADS].reshape(-1, DIM)[order].astype(np.float64), start)
            w[at] -= textbook(optimizer, g, state, at, step)
        kept = {"rows": rows, "weight": w, "output": looked}
        np.savez(path, **kept)  # type: ignore[arg-type]
        return kept


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


def check_rows(
    label: str,
    optimizer: str,
    reference: dict[str, np.ndarray],
    rows: np.ndarray,
    weight: np.ndarray,
    output: np.ndarray,
) -> None:
    """Compare a contestant's changed rows and last lookup with the reference.

    ``rows`` are those whose weights changed at all in the checked steps: no other may have moved. SGD must
    agree to the bit; the others within float32 rounding (a few units in the last place of a step or a
    weight).

    Raises:
        WrongResult: naming the contestant and the worst element.
    """
    if not np.isin(rows, reference["rows"], assume_unique=True).all():
        raise WrongResult(f"{label}: rows changed that the batches never touched")
    place = np.searchsorted(reference["rows"], rows)
    # A touched row may stand still (its gradients cancel), so rows not reported count as unchanged.
    missing = np.ones(len(reference["rows"]), dtype=bool)
    missing[place] = False
    if missing.sum() > max(3, len(missing) // 1000):
        raise WrongResult(f"{label}: {missing.sum():,} of {len(missing):,} touched rows were not updated")
    tolerance = 0.0 if optimizer == "sgd" else 1e-6
    for what, mine, exact in (
        ("rows", weight, reference["weight"][place]),
        ("lookup", output.reshape(-1, DIM), reference["output"]),
    ):
        if mine.shape != exact.shape:
            raise WrongResult(f"{label}: {what} of shape {mine.shape}, not {exact.shape}")
        error = np.abs(mine.astype(np.float64) - exact)
        # Adam's eps stands on either side of the bias correction in different libraries: visible at tiny
        # gradients only.
        allowed = tolerance * (1 + np.abs(exact)) * (10 if optimizer == "adam" else 1)
        if not (error <= allowed).all():
            worst = np.unravel_index(int(np.argmax(np.nan_to_num(error, nan=np.inf))), error.shape)
            raise WrongResult(
                f"{label}: {what} differ from the float64 reference by {error[worst]:.3g} at "
                f"{tuple(map(int, worst))}: {mine[worst]!r}, not {exact[worst]!r} "
                f"(allowed {allowed[worst]:.1g})"
            )
