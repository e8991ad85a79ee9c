"""Inputs of the bars on placed rows, and what their results are compared with.

Legend: N rows of the real trace, B examples, F features, D columns.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import CACHE, WrongResult
from benchmarks.peers.placed_tools import RankIds, filled_ids, load_trace
from stoker.dataset.dataset import Dataset
from stoker.optim import RowWiseAdagrad
from stoker.placement.planner import plan
from stoker.tables.config import Slotted, TableConfig
from stoker.tables.stores.home import Initial

__all__ = ["EPS", "LR", "FileTrace", "check_close", "check_same_losses", "large_rows", "planned"]

LR = 0.05
EPS = 1e-8
GRADS = 4  # distinct gradients
SPREAD = 8  # rows of the file for each row of the trace


def check_close(label: str, what: str, mine: np.ndarray, exact: np.ndarray, tolerance: float = 1e-5) -> None:
    """Equal within the rounding of a few dozen float32 updates.

    Raises:
        WrongResult: naming the worst element.
    """
    if mine.shape != exact.shape:
        raise WrongResult(f"{label}: {what} of shape {mine.shape}, not {exact.shape}")
    error = np.abs(mine.astype(np.float64) - exact) / (1 + np.abs(exact))
    if not (error <= tolerance).all():
        worst = np.unravel_index(int(np.argmax(np.nan_to_num(error, nan=np.inf))), error.shape)
        raise WrongResult(
            f"{label}: {what} differ from the float64 reference at {tuple(map(int, worst))}: "
            f"{mine[worst]!r}, not {exact[worst]!r} (allowed {tolerance:g})"
        )


def check_same_losses(label: str, mine: np.ndarray, first: np.ndarray) -> None:
    """Equal to the bit.

    Raises:
        WrongResult: naming the first step that differs.
    """
    if mine.shape != first.shape or not np.isfinite(mine).all():
        raise WrongResult(f"{label}: {len(mine)} losses, not {len(first)} finite ones")
    if (mine != first).any():
        step = int(np.flatnonzero(mine != first)[0])
        raise WrongResult(f"{label}: the loss of step {step} is {mine[step]!r}, not {first[step]!r}")


@dataclass(frozen=True, kw_only=True)
class FileTrace:
    """The real trace on rows of one file.

    ``weight.bin`` [SPREAD * N, D] float32; ``trace_B.npz`` flat ids and offsets; ``grad_B.npy`` [GRADS, B, F, D].
    Ids of all tables are mapped by a fixed permutation onto a space SPREAD times as large: rows used together would
    otherwise lie in one page, ids being sorted by frequency.
    """

    directory: Path
    num_rows: int  # in the file
    real_rows: int  # N
    features: tuple[str, ...]
    dim: int

    @classmethod
    def make(cls, data: Dataset, batches: dict[int, int], dim: int) -> FileTrace:
        """Make the files, or take them as they are when they are whole. ``batches``: batch size -> how many."""
        names = tuple(feature.name for feature in data.schema.features)
        tables = data.schema.num_embeddings
        first = dict(zip(tables, itertools.accumulate(tables.values(), initial=0), strict=False))
        real = sum(tables.values())
        made = cls(directory=CACHE / "placed_file", num_rows=SPREAD * real, real_rows=real, features=names, dim=dim)
        made.directory.mkdir(parents=True, exist_ok=True)
        weight, done = made.directory / "weight.bin", made.directory / "weight.json"
        stamp = {"rows": made.num_rows, "dim": dim, "tables": tables, "grads": GRADS, "version": 1}
        if not done.exists() or json.loads(done.read_text()) != stamp:
            for old in made.directory.glob("*.*"):
                old.unlink()
            rng = np.random.default_rng(30)
            with weight.open("wb") as file:
                for start in range(0, made.num_rows, 2**18):
                    shape = (min(2**18, made.num_rows - start), dim)
                    file.write(((rng.random(shape, dtype=np.float32) - 0.5) * 0.2).tobytes())
            done.write_text(json.dumps(stamp))
        place = np.random.default_rng(31).permutation(made.num_rows)[:real]
        bases = np.array([first[feature.table] for feature in data.schema.features])
        for batch, count in batches.items():
            target = made.directory / f"trace_{batch}.npz"
            if target.exists() and len(load_trace(str(target))) >= count:
                continue
            for old in made.directory.glob(f"reference_{batch}_*"):
                old.unlink()
            ids, offsets = [], []
            for given in itertools.islice(data.train.batches(batch, seed=None), count):
                if given.offsets is None:
                    bounds = np.arange(given.ids.numel() + 1)
                else:
                    bounds = given.offsets.numpy()
                base = np.repeat(np.tile(bases, batch), np.diff(bounds))
                ids.append(place[given.ids.reshape(-1).numpy().astype(np.int64) + base])
                offsets.append(bounds)
            bounds = np.cumsum([0, *map(len, ids)])
            grad = np.random.default_rng(32).standard_normal((GRADS, batch, len(names), dim), dtype=np.float32)
            np.save(made.directory / f"grad_{batch}.npy", grad)
            np.savez(target, ids=np.concatenate(ids), bounds=bounds, offsets=np.stack(offsets))
        return made

    def config(self) -> dict[str, Any]:
        """What a worker is told."""
        return {
            "inputs": str(self.directory), "num_rows": self.num_rows, "dim": self.dim, "features": self.features,
            "lr": LR, "eps": EPS,
        }  # fmt: skip

    def reference(self, batch: int, steps: int) -> dict[str, np.ndarray]:
        """Touched rows after ``steps`` steps of row-wise Adagrad and the last lookup [B, F, D], in float64."""
        path = self.directory / f"reference_{batch}_{steps}.npz"
        if path.exists():
            with np.load(path) as kept:
                return dict(kept)
        trace = load_trace(str(self.directory / f"trace_{batch}.npz"))[:steps]
        grads = torch.from_numpy(np.load(self.directory / f"grad_{batch}.npy")).double().view(GRADS, -1, self.dim)
        rows = np.unique(np.concatenate([ids for ids, _ in trace]))
        initial = np.memmap(self.directory / "weight.bin", np.float32, "r", shape=(self.num_rows, self.dim))
        weight = torch.from_numpy(initial[rows].astype(np.float64))
        total = torch.zeros(len(rows), dtype=torch.float64)
        output = torch.zeros(0)
        for number, (ids, offsets) in enumerate(trace):
            at, inverse = np.unique(np.searchsorted(rows, ids), return_inverse=True)
            bag = torch.from_numpy(np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)))
            here, place = torch.from_numpy(at), torch.from_numpy(inverse)
            if number == len(trace) - 1:
                output = torch.zeros(len(offsets) - 1, self.dim, dtype=torch.float64)
                output.index_add_(0, bag, weight[here][place])
            g = torch.zeros(len(at), self.dim, dtype=torch.float64).index_add_(0, place, grads[number % GRADS][bag])
            total[here] += g.square().mean(1)
            weight[here] -= LR * g / (total[here].sqrt() + EPS).unsqueeze(1)
        kept = {"weight": weight.numpy(), "output": output.view(batch, len(self.features), self.dim).numpy()}
        np.savez(path, **kept)  # type: ignore[arg-type]
        return kept

    def check(self, label: str, batch: int, steps: int, results: Path) -> None:
        """Compare what a contestant left.

        Raises:
            WrongResult: rows or the last lookup differ.
        """
        exact = self.reference(batch, steps)
        for what in ("weight", "output"):
            mine = np.load(results / f"{what}_{batch}.npy")
            check_close(label, what, mine.reshape(exact[what].shape), exact[what])


def large_rows(config: dict[str, Any], figures: dict[str, Any], rows: np.ndarray) -> np.ndarray:
    """Weights [n, D] float64 of ``rows`` after the filling and the measured steps of ``peers/stoker_large.py``."""
    features, dim, grads = config["features"], config["dim"], config["grads"]
    table = TableConfig(name="rows", num_embeddings=config["num_rows"], embedding_dim=dim)
    weight = Initial.of([table], 0).rows(rows).double().numpy()
    total = np.zeros(len(rows))
    ids = RankIds(config["num_rows"], config["skew"])
    wide, batch = config["fill_batch"], config["batch"]
    phases = (
        (wide, figures["fills"], lambda n: filled_ids(n, wide, features, figures["slots"])),
        (batch, config["steps"], lambda n: ids.batch(n, (batch, features))),
    )
    for examples, count, ids_of in phases:
        grad = np.random.default_rng(8).standard_normal((grads, examples, features, dim), dtype=np.float32)
        flat = grad.reshape(grads, -1, dim)
        for number in range(count):
            given = ids_of(number).reshape(-1)
            at = np.searchsorted(rows, given).clip(max=len(rows) - 1)
            hit = np.flatnonzero(rows[at] == given)
            g = np.zeros((len(rows), dim))
            np.add.at(g, at[hit], flat[number % grads][hit].astype(np.float64))
            seen = np.unique(at[hit])
            total[seen] += np.square(g[seen]).mean(1)
            weight[seen] -= LR * g[seen] / (np.sqrt(total[seen]) + EPS)[:, None]
    return weight


def planned(config: dict[str, Any], budget: str) -> dict[str, Any]:
    """What ``stoker.plan`` says of the table of ``peers/stoker_large.py`` in ``budget`` of main memory: bytes of slots
    (``memory``), and how rows go home (``writes``).
    """
    table = TableConfig(
        name="rows", num_embeddings=config["num_rows"], embedding_dim=config["dim"],
        features=tuple(f"f{i}" for i in range(config["features"])),
    )  # fmt: skip
    placement = plan(
        [table], optimizer=RowWiseAdagrad(lr=config["lr"]), device_memory=budget, host_memory="1GiB", device="cpu",
        batch_size=config["batch"], lookahead=config["lookahead"], strategy="cached",
    )  # fmt: skip
    strategy = placement["rows"]
    assert isinstance(strategy, Slotted)
    return {"memory": int(strategy.memory or 0), "writes": strategy.writes}
