"""A whole DLRM step with the largest tables as tensor trains, against the same model uncompressed and resident.

Both models take turns in one process, batch by batch, so that the machine's drift slows both alike.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

import stoker
from benchmarks.harness import Bar, Outcome, Run, Table, WrongResult
from benchmarks.workload import KAGGLE, kaggle_like, zipf_ids
from stoker.ops.tt.lookup import rows_by_definition
from stoker.tables.compressed.tensor_train import CompressedGroup

__all__ = ["bars"]

RANK, DIM, LARGE = 32, 16, 1_000_000
BATCHES = (2048, 8192)
KINDS = ("sgd", "rowwise_adagrad")


def _batches(sizes: list[int], batch: int, count: int) -> list[stoker.Batch]:
    rng = np.random.default_rng(0)
    found = []
    for step in range(count):
        ids = np.stack([zipf_ids(rng, rows, batch) for rows in sizes], axis=1).astype(np.int32)
        dense = torch.from_numpy(rng.standard_normal((batch, 13), np.float32))
        labels = torch.from_numpy((rng.random(batch) < 0.25).astype(np.float32))
        found.append(stoker.Batch(dense=dense, ids=torch.from_numpy(ids), labels=labels, step=step))
    return found


def _model(sizes: list[int], kind: str, trains: dict[str, stoker.TensorTrain]) -> stoker.DLRM:
    spec = stoker.FeatureSpec(
        dense=tuple(f"I{number}" for number in range(13)),
        features=tuple(stoker.Feature(name=f"C{number}", table=f"C{number}") for number in range(len(sizes))),
        num_embeddings={f"C{number}": rows for number, rows in enumerate(sizes)},
    )
    optimizer = stoker.SGD(lr=0.1) if kind == "sgd" else stoker.RowWiseAdagrad(lr=0.05)
    return stoker.DLRM(
        spec, embedding_dim=DIM, bottom=(512, 256, 64), top=(512, 256), optimizer=optimizer, tensor_train=trains
    )


def _check(model: stoker.DLRM, batch: stoker.Batch) -> None:
    """What compressed tables give is the product of their cores."""
    embedded = model.embeddings(batch.ids).detach()
    for group in model.embeddings.groups:
        if isinstance(group, CompressedGroup):
            column = model.embeddings.features.index(group.tables[0].features[0])
            rows = rows_by_definition(group.storage.slices(), batch.ids[:, column].long(), group.storage.shape)
            if not torch.allclose(embedded[:, column], rows, rtol=1e-4, atol=1e-6):
                raise WrongResult(f"table {group.tables[0].name} does not give the products of its cores")


def _step(model: stoker.DLRM, optimizer: torch.optim.Optimizer, batch: stoker.Batch) -> float:
    begin = time.perf_counter()
    loss = model.loss(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if not np.isfinite(loss.item()):
        raise WrongResult(f"the loss of step {batch.step} is {loss.item()}")
    return time.perf_counter() - begin


def step(run: Run) -> Outcome:
    """Throughput with tensor trains over that without, the worst case."""
    sizes = kaggle_like(2_000_000) if run.quick else list(KAGGLE)
    large = sorted(sizes)[-5] if run.quick else LARGE
    trains = {f"C{n}": stoker.TensorTrain(rank=RANK) for n, rows in enumerate(sizes) if rows >= large}
    rows, ratios = [], []
    for batch in BATCHES[:1] if run.quick else BATCHES:
        batches = _batches(sizes, batch, 12)
        for kind in KINDS:
            run.log(f"batch {batch}, {kind}")
            models = [_model(sizes, kind, {}), _model(sizes, kind, trains)]
            _check(models[1], batches[0])
            dense = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
            seconds: list[list[float]] = [[], []]
            for number in range(24 if run.quick else 84):
                for side in (0, 1):
                    took = _step(models[side], dense[side], batches[number % len(batches)])
                    if number >= 4:
                        seconds[side].append(took)
            plain, compressed = (float(np.median(each)) for each in seconds)
            ratios.append(plain / compressed)
            size = [sum(table.num_bytes for table in model.embeddings.stored) / 2**20 for model in models]
            rows.append(
                [
                    str(batch), kind, f"{size[0]:,.0f}", f"{size[1]:,.1f}", f"{1e3 * plain:.1f}",
                    f"{1e3 * compressed:.1f}", f"{plain / compressed:.2f}x",
                ]
            )  # fmt: skip
    table = Table(
        title=f"DLRM, {sum(sizes):,} rows in 26 tables, D {DIM}, {len(trains)} of them tensor trains of rank {RANK}",
        columns=["batch", "row optimizer", "MiB", "with cores", "ms uncompressed", "ms with cores", "throughput"],
        rows=rows,
    )
    notes = [
        f"compressed: tables of {large:,} rows and more; ids by Zipf's law, synthetic; all rows resident",
        "both models take turns in one process; medians of 80 steps",
        "checked: compressed tables give the products of their cores; losses are finite",
    ]
    return Outcome(value=min(ratios), tables=[table], notes=notes, data={"ratios": ratios})


def bars() -> list[Bar]:
    """What compression costs in time."""
    common: dict[str, Any] = {"group": "tensor-train-step", "run": step}
    return [
        Bar(
            name="tt-dlrm-step",
            title="throughput of a DLRM step with the largest tables as tensor trains, over the same uncompressed",
            must=0.5,
            aim=0.9,
            unit="x",
            **common,
        )
    ]
