"""The full DLRM step's inputs, its float64 reference, and the comparison.

Legend: B examples, F features, D columns. Layers are named b0.. (bottom) and t0.. (top), weights [out, in].
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.harness import CACHE, WrongResult
from benchmarks.workload import CHECKED_STEPS, DIM, POOL, EmbeddingWorkload

__all__ = ["BOTTOM", "LAYERS", "TOP", "DlrmWorkload", "check_model", "dense_flops", "layer_shapes"]

BOTTOM = (13, 512, 256, 64, 16)
TOP = (512, 256, 1)
LR = 0.1
ROW_LR = {"sgd": 0.1, "rowwise_adagrad": 0.05}
#: A first step of Adagrad divides the gradient by its own size, so that rounding alone would move a row whose gradient
#: cancels out as far as any; an eps near the size of real gradients (1e-5 to 1e-4 here) keeps the check meaningful.
EPS = 1e-5
#: relative error of a change of weights (norms) and absolute error of a logit, by the type of the dense part
TOLERANCE = {"float32": (2e-3, 2e-4), "bfloat16": (0.25, 0.05)}
#: The same with row-wise Adagrad in float32. Where rounding turns a ReLU of one example on or off, rows whose gradients
#: nearly cancel move by a share of their size, and logits too. It hits plain PyTorch with MKL and Stoker at batch 8192
#: (3.4e-3 and 3.7e-4, equal to three digits) and probably TorchRec at 2048 (2.9e-3). A wrong eps is off by 0.16.
KINKS = (2e-2, 2e-2)


def layer_shapes(features: int) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of every linear layer."""
    fields = features + 1
    bottom = list(itertools.pairwise(BOTTOM))
    top_in = DIM + fields * (fields - 1) // 2
    top = list(zip((top_in, *TOP), TOP, strict=False))
    return {**{f"b{i}": s for i, s in enumerate(bottom)}, **{f"t{i}": s for i, s in enumerate(top)}}


LAYERS = tuple(layer_shapes(26))


def dense_flops(batch: int, features: int = 26) -> tuple[int, int]:
    """FLOPs of one training step: (MLPs, interaction). The dense columns need no gradient."""
    shapes = layer_shapes(features)
    mlp = sum(6 * batch * i * o for i, o in shapes.values()) - 2 * batch * shapes["b0"][0] * shapes["b0"][1]
    pairs = (features + 1) * features // 2
    return mlp, 6 * batch * pairs * DIM


@dataclass(frozen=True, kw_only=True)
class DlrmWorkload:
    """Files for every contestant, next to the embedding workload's ids.

    ``dense_B.npy`` [pool, B, 13], ``labels_B.npy`` [pool, B], ``start.npz`` (layers), ``rows.npy`` [N, D]
    initial rows.
    """

    directory: Path
    embedding: EmbeddingWorkload

    @classmethod
    def make(cls) -> DlrmWorkload:
        embedding = EmbeddingWorkload.make()
        made = cls(directory=CACHE / "dlrm", embedding=embedding)
        stamp = {"sizes": embedding.sizes, "pool": {str(k): v for k, v in POOL.items()}, "version": 2}
        done = made.directory / "workload.json"
        if done.exists() and json.loads(done.read_text()) == stamp:
            return made
        made.directory.mkdir(parents=True, exist_ok=True)
        for old in made.directory.iterdir():
            old.unlink()
        rng = np.random.default_rng(21)
        start: dict[str, np.ndarray] = {}
        for name, (inputs, outputs) in layer_shapes(len(embedding.sizes)).items():
            start[f"{name}.weight"] = rng.normal(0, (2 / (inputs + outputs)) ** 0.5, (outputs, inputs)).astype(
                np.float32
            )
            start[f"{name}.bias"] = rng.normal(0, outputs**-0.5, outputs).astype(np.float32)
        np.savez(made.directory / "start.npz", **start)  # type: ignore[arg-type]
        rows = [rng.uniform(-(n**-0.5), n**-0.5, (n, DIM)).astype(np.float32) for n in embedding.sizes]
        np.save(made.directory / "rows.npy", np.concatenate(rows))
        for batch, count in POOL.items():
            dense = np.log1p(rng.lognormal(1.0, 1.5, (count, batch, BOTTOM[0]))).astype(np.float32)
            np.save(made.directory / f"dense_{batch}.npy", dense)
            np.save(made.directory / f"labels_{batch}.npy", (rng.random((count, batch)) < 0.25).astype(np.float32))
        done.write_text(json.dumps(stamp))
        return made

    def config(self, optimizers: list[str], batches: list[int]) -> dict[str, Any]:
        """What a worker is told."""
        return {
            "inputs": str(self.directory),
            "ids": str(self.embedding.directory),
            "sizes": self.embedding.sizes,
            "layers": LAYERS,
            "bottom": BOTTOM,
            "top": TOP,
            "optimizers": optimizers,
            "batches": batches,
            "checked_steps": CHECKED_STEPS,
            "lr": LR,
            "row_lr": ROW_LR,
            "eps": EPS,
        }

    def reference(self, optimizer: str, batch: int) -> dict[str, np.ndarray]:
        """A plain float64 DLRM over the checked steps: last logits, changes of layers and touched rows."""
        path = self.directory / f"reference_{optimizer}_{batch}.npz"
        if path.exists():
            with np.load(path) as kept:
                return dict(kept)
        sizes = self.embedding.sizes
        bases = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        ids = (
            np.load(self.embedding.directory / f"ids_{batch}.npy", mmap_mode="r")[:CHECKED_STEPS].astype(np.int64)
            + bases
        )
        dense = np.load(self.directory / f"dense_{batch}.npy", mmap_mode="r")
        labels = np.load(self.directory / f"labels_{batch}.npy", mmap_mode="r")
        rows = np.unique(ids)
        table = torch.from_numpy(np.load(self.directory / "rows.npy", mmap_mode="r")[rows].astype(np.float64))
        first = table.clone()
        with np.load(self.directory / "start.npz") as kept:
            start = {name: torch.from_numpy(value.astype(np.float64)) for name, value in kept.items()}
        layers = {name: value.clone().requires_grad_() for name, value in start.items()}
        total = torch.zeros(len(rows), dtype=torch.float64)
        logits = torch.zeros(0)
        for step in range(CHECKED_STEPS):
            place = torch.from_numpy(np.searchsorted(rows, ids[step]))
            embedded = table[place].requires_grad_()
            logits = forward(layers, torch.from_numpy(dense[step].astype(np.float64)), embedded)
            loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(labels[step].astype(np.float64)))
            names = list(layers)
            *grads, row_grad = torch.autograd.grad(loss, [*layers.values(), embedded])
            with torch.no_grad():
                for name, grad in zip(names, grads, strict=True):
                    layers[name] -= LR * grad
                g = torch.zeros_like(table).index_add_(0, place.reshape(-1), row_grad.reshape(-1, DIM))
                if optimizer == "sgd":
                    table -= ROW_LR[optimizer] * g
                else:
                    total += g.square().mean(1)
                    table -= ROW_LR[optimizer] * g / (total.sqrt() + EPS).unsqueeze(1)
        found = {
            "touched": rows,
            "logits": logits.detach().numpy(),
            "rows": (table - first).numpy(),
            **{name: (layers[name] - start[name]).detach().numpy() for name in layers},
        }
        np.savez(path, **found)
        return found


def forward(layers: dict[str, torch.Tensor], dense: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """DLRM written as plainly as can be: logits [B]."""
    x = dense
    for i in range(len(BOTTOM) - 1):
        x = F.relu(F.linear(x, layers[f"b{i}.weight"], layers[f"b{i}.bias"]))
    z = torch.cat([x.unsqueeze(1), embedded], dim=1)
    row, column = torch.tril_indices(z.shape[1], z.shape[1], offset=-1)
    x = torch.cat([x, (z @ z.transpose(1, 2))[:, row, column]], dim=1)
    for i in range(len(TOP)):
        x = F.linear(x, layers[f"t{i}.weight"], layers[f"t{i}.bias"])
        x = F.relu(x) if i < len(TOP) - 1 else x
    return x.squeeze(1)


def check_model(
    label: str,
    workload: DlrmWorkload,
    optimizer: str,
    batch: int,
    results: Path,
    case: str,
    dtype: str = "float32",
) -> None:
    """Compare what a contestant left after the checked steps with the float64 reference.

    Changes are compared, not weights: a weight hides a wrong update behind its own size.

    Raises:
        WrongResult: naming the contestant and the tensor.
    """
    reference = workload.reference(optimizer, batch)
    kinks = (optimizer, dtype) == ("rowwise_adagrad", "float32")
    relative, absolute = KINKS if kinks else TOLERANCE[dtype]
    found = dict(np.load(results / f"{case}.npz"))
    worst = float(np.abs(found["logits"].reshape(-1) - reference["logits"]).max())
    if not worst <= absolute:
        raise WrongResult(f"{label}, {case}: logits differ from the reference by {worst:.3g} (allowed {absolute})")
    if not np.isin(found["changed"], reference["touched"], assume_unique=True).all():
        raise WrongResult(f"{label}, {case}: rows changed that the batches never touched")
    place = np.searchsorted(reference["touched"], found["changed"])
    mine = np.zeros_like(reference["rows"])
    initial = np.load(workload.directory / "rows.npy", mmap_mode="r")[found["changed"]]
    mine[place] = found["rows"].astype(np.float64) - initial
    bounds = np.concatenate([[0], np.cumsum(workload.embedding.sizes)])
    with np.load(workload.directory / "start.npz") as start:
        pairs = [(name, found[name].astype(np.float64) - start[name], reference[name], start[name]) for name in start]
    for i, (begin, stop) in enumerate(itertools.pairwise(bounds)):
        inside = (reference["touched"] >= begin) & (reference["touched"] < stop)
        scale = np.full((int(inside.sum()), DIM), (stop - begin) ** -0.5)
        pairs.append((f"rows of table {i}", mine[inside], reference["rows"][inside], scale))
    for name, change, exact, size in pairs:
        # A change is the difference of two float32 weights: their rounding adds to what is allowed.
        allowed = relative * np.linalg.norm(exact) + 2**-23 * np.linalg.norm(size)
        error = float(np.linalg.norm(change - exact))
        if not error <= allowed:
            raise WrongResult(
                f"{label}, {case}: change of {name} is off by {error:.3g}, of {np.linalg.norm(exact):.3g} "
                f"(allowed {allowed:.2g})"
            )
