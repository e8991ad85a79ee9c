"""Tensor-train tables on a GPU: rows and gradients against a CPU's, waits, launches and times of a step.

    PYTHONPATH=src python benchmarks/tensor_train_gpu.py            # a minute; --device cpu rehearses it

No time is shown unless the rows and cores of every case equal those of a CPU within float32 rounding, and no step made
the host wait. Rows of one table are looked up by ids of Zipf's law; a step is a lookup and a backward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.gpu_tools import milliseconds, zipf_ids  # noqa: E402
from stoker import SGD, Batch, EmbeddingTables, RowWiseAdagrad, TableConfig, TensorTrain, stage  # noqa: E402

CASES = ((5_000_000, 64, 64), (5_000_000, 64, 128), (40_000_000, 128, 128))  # rows, columns, rank
BATCHES = (8192, 65536)


def batches(rows: int, size: int, count: int, device: torch.device) -> list[Batch]:
    made = []
    for step in range(count):
        ids = zipf_ids([rows], size, torch.Generator().manual_seed(step), 1.05)
        batch = Batch(dense=torch.zeros(size, 0), ids=ids, step=step)
        made.append(batch.pin_memory() if device.type == "cuda" else batch)
    return made


def make(rows: int, dim: int, rank: int, kind: str, device: torch.device) -> EmbeddingTables:
    return EmbeddingTables(
        [TableConfig(name="items", num_embeddings=rows, embedding_dim=dim, init_scale=0.1)], device=device, seed=1,
        optimizer=SGD(lr=0.1) if kind == "sgd" else RowWiseAdagrad(lr=0.05),
        placement={"items": TensorTrain(rank=rank)},
    )  # fmt: skip


def train(tables: EmbeddingTables, data: list[Batch], grad: torch.Tensor) -> Iterator[torch.Tensor]:
    for batch in stage(data, tables):
        out = tables(batch.ids)
        yield out.detach()
        out.backward(grad)


def check(case: tuple[int, int, int], kind: str, device: torch.device) -> None:
    """Two steps here and on a CPU; the third must not wait."""
    rows, dim, _ = case
    grad = torch.randn(BATCHES[0], 1, dim, generator=torch.Generator().manual_seed(7)) / 64
    here, there = make(*case, kind, torch.device("cpu")), make(*case, kind, device)
    data = batches(rows, BATCHES[0], 6, device)
    for one, other in zip(train(here, data[:2], grad), train(there, data[:2], grad.to(device)), strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-3, atol=1e-4)
    for table in here.stored:
        torch.testing.assert_close(there.rows(table.name).cpu(), here.rows(table.name), rtol=1e-3, atol=1e-4)
    if device.type == "cuda":
        for number, _ in enumerate(train(there, data[2:], grad.to(device))):
            if number == 1:
                torch.cuda.set_sync_debug_mode("error")
        torch.cuda.set_sync_debug_mode("default")


def launches(step: Any, device: torch.device) -> int:
    """Kernels of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step(0)
        torch.cuda.synchronize(device)
    return sum(
        each.count for each in found.key_averages() if not each.key.startswith(("Mem", "cuda")) and each.device_time > 0
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    gpu = device.type == "cuda"
    for case in CASES if gpu else [(3000, 8, 4)]:
        for kind in ("sgd", "rowwise_adagrad"):
            check(case, kind, device)
            for size in BATCHES:
                tables, grad = make(*case, kind, device), torch.randn(size, 1, case[1], device=device) / 64
                lookups = []
                for batch in batches(case[0], size, 8, device):
                    [lookup] = tables.splitter.split(tables.splitter.check(batch.ids))
                    lookups.append((batch.ids.to(device), tables.groups[0].acquire(lookup)))

                def step(number: int, tables: Any = tables, grad: Any = grad, lookups: Any = lookups) -> None:
                    ids, lease = lookups[number % len(lookups)]
                    tables.hand_over(ids, None, [lease], None)
                    tables(ids).backward(grad)

                took = milliseconds(step, 3, 16 if gpu else 2, device)
                count = launches(step, device) if gpu else 0
                print(
                    f"{case}, {kind}, batch {size}: {took:.3f} ms and {count} kernels a step, tries made before",
                    flush=True,
                )


if __name__ == "__main__":
    main()
