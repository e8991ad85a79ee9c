"""What this machine is and what it can do at best: copies, random rows, matrix products.

A measured speed is stated as a fraction of these limits, never alone.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import Run, Table
from benchmarks.rounds import Contestant, work

if TYPE_CHECKING:
    from benchmarks.workload import EmbeddingWorkload

__all__ = ["describe", "embedding_floor", "limits"]

STATES = {"adagrad": 1, "adam": 2}  # numbers of optimizer state for each column


def _first(path: str, pattern: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1).strip() if found else ""


def describe() -> dict[str, Any]:
    """CPU model, cores, memory, kernel and versions."""
    cpu = _first("/proc/cpuinfo", r"^model name\s*:\s*(.+)$") or platform.processor() or platform.machine()
    flags = _first("/proc/cpuinfo", r"^flags\s*:\s*(.+)$").split()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    kibibytes = int(_first("/proc/meminfo", r"^MemTotal:\s+(\d+)") or 0)
    vectors = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    slug = re.sub(r"[^a-z0-9]+", "-", cpu.lower()).strip("-")[:40]
    packages = ("torch", "triton", "numba", "numpy", "polars", "pyarrow", "safetensors")
    return {
        "CPU": f"{cpu} ({', '.join(vectors)})",
        "cores": cores,
        "memory": f"{kibibytes / 2**20:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        # Processors of one name differ by more than any optimisation: the widest vectors belong to the name.
        "slug": "-".join([slug, f"{cores}c", *vectors[-1:]]).replace("_", "-"),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


@lru_cache(maxsize=1)
def limits(quick: bool) -> dict[str, float]:
    """This machine's measured limits, in a fresh process: copy GB/s, random lines/s, GEMM GFLOP/s.

    ``copy`` counts bytes read plus bytes written. ``gemm``: fp32 products of the DLRM's own shapes;
    ``gemm_big``: the best of large square ones; ``_bf16`` likewise.
    """
    lines = work(Contestant(label="machine", script="machine_limits.py"), {"quick": quick})
    found = next(line for line in lines if line["event"] == "limits")
    return {key: float(value) for key, value in found.items() if key != "event"}


def embedding_floor(
    workloads: Sequence[EmbeddingWorkload], optimizer: str, seconds: dict[str, float], run: Run
) -> tuple[Table, list[str]]:
    """How near our step comes to the time that memory alone would take.

    Least traffic of a step: every distinct row with its state comes from random places once and goes back once; ids and
    gradient are streamed in and the output streamed out. Rows count as random 64-byte lines, streams at the copy rate.
    """
    known = limits(run.quick)
    rows = []
    for workload in workloads:
        shape, measured = workload.shape, seconds[workload.shape.name]
        by_table = [len(np.unique(ids)) for ids, _ in workload.by_table(0)]
        state = {"sgd": 0, "rowwise_adagrad": 4}  # bytes a row; the others keep numbers for each column
        row_bytes = [4 * dim + state.get(optimizer, 4 * dim * STATES.get(optimizer, 0)) for dim in shape.dims]
        stream = 4 * shape.ids_per_batch + 8 * shape.batch * shape.width
        lines = sum(2 * count * -(-size // 64) for count, size in zip(by_table, row_bytes, strict=True))
        floor = stream / (known["copy"] * 1e9) + lines / known["lines"]
        moved = stream + sum(2 * count * size for count, size in zip(by_table, row_bytes, strict=True))
        rows.append(
            [
                shape.name,
                f"{shape.ids_per_batch:,}",
                f"{sum(by_table):,}",
                f"{moved / 1e6:.1f}",
                f"{moved / measured / 1e9:.1f}",
                f"{floor * 1e3:.2f}",
                f"{floor / measured:.0%}",
            ]
        )
    table = Table(
        title="Our step against the memory's limit",
        columns=["case", "lookups", "distinct rows", "least MB", "GB/s", "least ms", "of the limit"],
        rows=rows,
    )
    note = (
        f"measured limits: copy {known['copy']:.1f} GB/s (read + written), random 64-byte lines "
        f"{known['lines'] / 1e6:.0f} M/s"
    )
    return table, [note]
