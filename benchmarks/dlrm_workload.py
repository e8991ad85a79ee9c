"""The full DLRM step's matrix of workloads, its float64 reference, and the comparison.

Legend: B examples, F features, N rows of all tables, D columns, L ids of a batch. Layers are named b0.. (bottom) and
t0.. (top), weights [out, in].
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
import torch
from torch.nn import functional as F

from benchmarks.harness import CACHE, WrongResult
from benchmarks.workload import CHECKED_STEPS, EmbeddingWorkload, Shape, corner, kaggle_shape

__all__ = ["DLRM_MATRIX", "QUICK_DLRM_MATRIX", "DlrmShape", "DlrmWorkload", "check_model", "layer_shapes"]

DENSE = 13  # dense columns
LR = 0.1
ROW_LR = {"sgd": 0.1, "rowwise_adagrad": 0.05}
#: A first step of Adagrad divides the gradient by its own size, so that rounding alone would move a row whose gradient
#: cancels out as far as any; an eps near the size of real gradients (1e-5 to 1e-4 here) keeps the check meaningful.
EPS = 1e-5
#: relative error of a change of weights (norms) and absolute error of a logit, by the type of the dense part
TOLERANCE = {"float32": (2e-3, 2e-4), "bfloat16": (0.25, 0.1)}
#: The same with row-wise Adagrad in float32. Where rounding turns a ReLU of one example on or off, rows whose gradients
#: nearly cancel move by a share of their size, and logits too. It hits plain PyTorch with MKL and Stoker at batch 8192
#: (3.4e-3 and 3.7e-4, equal to three digits) and probably TorchRec at 2048 (2.9e-3). A wrong eps is off by 0.16.
KINKS = (2e-2, 2e-2)


#: Outputs of the bottom layers before the last, and of the top layers. With narrow ones the rows decide. With small
#: ones and 8 tables of 16 columns, products are a tenth of those of the wide ones with Kaggle's tables.
LAYERS = {
    "wide": ((512, 256, 64), (512, 256, 1)),
    "small": ((128, 64), (256, 96, 1)),
    "narrow": ((64,), (64, 1)),
}


@dataclass(frozen=True, kw_only=True)
class DlrmShape:
    """One corner: tables of one width, ids, and the layers above them."""

    tables: Shape
    layers: str = "wide"  # of LAYERS

    @property
    def name(self) -> str:
        return f"{self.tables.name}, {self.layers} layers"

    @property
    def dim(self) -> int:
        return self.tables.dims[0]

    @property
    def row_lr(self) -> dict[str, float]:
        """By optimizer. Pooled rows of bags move as far as single rows: larger logits would need wider tolerances."""
        return {name: lr * 2 / (self.tables.longest + 1) for name, lr in ROW_LR.items()}

    @property
    def bottom(self) -> tuple[int, ...]:
        return (DENSE, *LAYERS[self.layers][0], self.dim)

    @property
    def top(self) -> tuple[int, ...]:
        return LAYERS[self.layers][1]


DLRM_MATRIX = (
    DlrmShape(tables=kaggle_shape(2048)),
    DlrmShape(tables=kaggle_shape(8192)),
    DlrmShape(tables=corner((32,) * 12, 1024, 1, 1.05)),
    DlrmShape(tables=corner((32,) * 12, 8192, 1, 0.0), layers="narrow"),
    DlrmShape(tables=corner((128,) * 8, 2048, 20, 0.8)),
    DlrmShape(tables=corner((8,) * 12, 8192, 20, 1.2), layers="narrow"),
    DlrmShape(tables=corner((16,) * 12, 65536, 1, 0.6, scattered=False)),
)
QUICK_DLRM_MATRIX = (DLRM_MATRIX[0], DLRM_MATRIX[5])


def layer_shapes(shape: DlrmShape) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of every linear layer."""
    fields = len(shape.tables.sizes) + 1
    bottom = list(itertools.pairwise(shape.bottom))
    top_in = shape.dim + fields * (fields - 1) // 2
    top = list(zip((top_in, *shape.top), shape.top, strict=False))
    return {**{f"b{i}": s for i, s in enumerate(bottom)}, **{f"t{i}": s for i, s in enumerate(top)}}


@dataclass(frozen=True, kw_only=True)
class DlrmWorkload:
    """Files for every contestant, next to the embedding workload's ids.

    ``dense.npy`` [pool, B, 13], ``labels.npy`` [pool, B], ``start.npz`` (layers), ``rows.npy`` [N, D] initial rows.
    """

    directory: Path
    embedding: EmbeddingWorkload
    shape: DlrmShape

    @classmethod
    def make(cls, shape: DlrmShape) -> DlrmWorkload:
        """Make the files, or take them as they are when they are whole."""
        tables = shape.tables
        stamp = json.dumps({**asdict(shape), "pool": tables.pool, "version": 4})
        folder = CACHE / "dlrm" / hashlib.sha256(stamp.encode()).hexdigest()[:16]
        made = cls(directory=folder, embedding=EmbeddingWorkload.make(tables), shape=shape)
        done = folder / "workload.json"
        if done.exists():
            return made
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(21)
        start: dict[str, np.ndarray] = {}
        for name, (inputs, outputs) in layer_shapes(shape).items():
            start[f"{name}.weight"] = rng.normal(0, (2 / (inputs + outputs)) ** 0.5, (outputs, inputs)).astype(
                np.float32
            )
            start[f"{name}.bias"] = rng.normal(0, outputs**-0.5, outputs).astype(np.float32)
        np.savez(folder / "start.npz", **start)  # type: ignore[arg-type]
        scales = [n**-0.5 * 2 / (tables.longest + 1) for n in tables.sizes]  # pooled as large as a single row
        rows = [
            (rng.random((n, shape.dim), dtype=np.float32) * 2 - 1) * np.float32(scale)
            for n, scale in zip(tables.sizes, scales, strict=True)
        ]
        np.save(folder / "rows.npy", np.concatenate(rows))
        dense = np.log1p(rng.lognormal(1.0, 1.5, (tables.pool, tables.batch, DENSE))).astype(np.float32)
        np.save(folder / "dense.npy", dense)
        np.save(folder / "labels.npy", (rng.random((tables.pool, tables.batch)) < 0.25).astype(np.float32))
        done.write_text(stamp)
        return made

    def case(self) -> dict[str, Any]:
        """What a worker is told of this shape."""
        return {
            **self.embedding.case(),
            "inputs": str(self.directory),
            "ids": str(self.embedding.directory),
            "name": self.shape.name,
            "dim": self.shape.dim,
            "layers": list(layer_shapes(self.shape)),
            "bottom": self.shape.bottom,
            "top": self.shape.top,
            "row_lr": self.shape.row_lr,
        }

    @staticmethod
    def config(workloads: Sequence[DlrmWorkload], optimizers: Sequence[str]) -> dict[str, Any]:
        """What a worker is told."""
        return {
            "cases": [workload.case() for workload in workloads],
            "optimizers": list(optimizers),
            "checked_steps": CHECKED_STEPS,
            "lr": LR,
            "eps": EPS,
        }

    def reference(self, optimizer: str) -> dict[str, np.ndarray]:
        """A plain float64 DLRM over the checked steps: last logits, changes of layers and touched rows."""
        path = self.directory / f"reference_{optimizer}.npz"
        if path.exists():
            with np.load(path) as kept:
                return dict(kept)
        tables = self.shape.tables
        features, dim = len(tables.sizes), self.shape.dim
        bases = np.concatenate([[0], np.cumsum(tables.sizes)[:-1]])
        steps = []  # global ids [L], bag [L]
        for step in range(CHECKED_STEPS):
            ids, offsets = self.embedding.batch_ids(step)
            bag = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            steps.append((ids + bases[bag % features], bag))
        dense = np.load(self.directory / "dense.npy", mmap_mode="r")
        labels = np.load(self.directory / "labels.npy", mmap_mode="r")
        rows = np.unique(np.concatenate([ids for ids, _ in steps]))
        table = torch.from_numpy(np.load(self.directory / "rows.npy", mmap_mode="r")[rows].astype(np.float64))
        first = table.clone()
        with np.load(self.directory / "start.npz") as kept:
            start = {name: torch.from_numpy(value.astype(np.float64)) for name, value in kept.items()}
        layers = {name: value.clone().requires_grad_() for name, value in start.items()}
        total = torch.zeros(len(rows), dtype=torch.float64)
        logits = torch.zeros(0)
        for step, (ids, bag) in enumerate(steps):
            place, into = torch.from_numpy(np.searchsorted(rows, ids)), torch.from_numpy(bag)
            pooled = torch.zeros(tables.batch * features, dim, dtype=torch.float64).index_add_(0, into, table[place])
            embedded = pooled.view(tables.batch, features, dim).requires_grad_()
            logits = forward(layers, torch.from_numpy(dense[step].astype(np.float64)), embedded)
            loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(labels[step].astype(np.float64)))
            names = list(layers)
            *grads, row_grad = torch.autograd.grad(loss, [*layers.values(), embedded])
            with torch.no_grad():
                for name, grad in zip(names, grads, strict=True):
                    layers[name] -= LR * grad
                g = torch.zeros_like(table).index_add_(0, place, row_grad.reshape(-1, dim)[into])
                if optimizer == "sgd":
                    table -= self.shape.row_lr[optimizer] * g
                else:
                    total += g.square().mean(1)
                    table -= self.shape.row_lr[optimizer] * g / (total.sqrt() + EPS).unsqueeze(1)
        found = {
            "touched": rows,
            "logits": logits.detach().numpy(),
            "rows": (table - first).numpy(),
            **{name: (layers[name] - start[name]).detach().numpy() for name in layers},
        }
        np.savez(path, **found)
        return found


def layers_of(layers: dict[str, torch.Tensor], letter: str) -> int:
    return sum(name.startswith(letter) for name in layers) // 2


def forward(layers: dict[str, torch.Tensor], dense: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """DLRM written as plainly as can be: logits [B]."""
    x = dense
    for i in range(layers_of(layers, "b")):
        x = F.relu(F.linear(x, layers[f"b{i}.weight"], layers[f"b{i}.bias"]))
    z = torch.cat([x.unsqueeze(1), embedded], dim=1)
    row, column = torch.tril_indices(z.shape[1], z.shape[1], offset=-1)
    x = torch.cat([x, (z @ z.transpose(1, 2))[:, row, column]], dim=1)
    last = layers_of(layers, "t") - 1
    for i in range(last + 1):
        x = F.linear(x, layers[f"t{i}.weight"], layers[f"t{i}.bias"])
        x = F.relu(x) if i < last else x
    return x.squeeze(1)


def check_model(
    label: str,
    workload: DlrmWorkload,
    optimizer: str,
    left: Path,
    dtype: str = "float32",
) -> None:
    """Compare what a contestant left after the checked steps with the float64 reference.

    Changes are compared, not weights: a weight hides a wrong update behind its own size. Logits are compared where
    they were left: contestants on several processes leave none.

    Raises:
        WrongResult: naming the contestant and the tensor.
    """
    reference = workload.reference(optimizer)
    case, dim = workload.shape.name, workload.shape.dim
    kinks = (optimizer, dtype) == ("rowwise_adagrad", "float32")
    relative, absolute = KINKS if kinks else TOLERANCE[dtype]
    found = dict(np.load(left))
    worst = float(np.abs(found["logits"].reshape(-1) - reference["logits"]).max()) if "logits" in found else 0.0
    if not worst <= absolute:
        raise WrongResult(
            f"{label}, {optimizer}, {case}: logits differ from the reference by {worst:.3g} (allowed {absolute})"
        )
    if not np.isin(found["changed"], reference["touched"], assume_unique=True).all():
        raise WrongResult(f"{label}, {case}: rows changed that the batches never touched")
    place = np.searchsorted(reference["touched"], found["changed"])
    mine = np.zeros_like(reference["rows"])
    initial = np.load(workload.directory / "rows.npy", mmap_mode="r")[found["changed"]]
    mine[place] = found["rows"].astype(np.float64) - initial
    bounds = np.concatenate([[0], np.cumsum(workload.shape.tables.sizes)])
    with np.load(workload.directory / "start.npz") as start:
        pairs = [(name, found[name].astype(np.float64) - start[name], reference[name], start[name]) for name in start]
    for i, (begin, stop) in enumerate(itertools.pairwise(bounds)):
        inside = (reference["touched"] >= begin) & (reference["touched"] < stop)
        scale = np.full((int(inside.sum()), dim), (stop - begin) ** -0.5)
        pairs.append((f"rows of table {i}", mine[inside], reference["rows"][inside], scale))
    for name, change, exact, size in pairs:
        # A change is the difference of two float32 weights, which every step rounds: that adds to what is allowed.
        allowed = relative * np.linalg.norm(exact) + CHECKED_STEPS * 2**-23 * np.linalg.norm(size)
        error = float(np.linalg.norm(change - exact))
        if not error <= allowed:
            raise WrongResult(
                f"{label}, {case}: change of {name} is off by {error:.3g}, of {np.linalg.norm(exact):.3g} "
                f"(allowed {allowed:.2g})"
            )
