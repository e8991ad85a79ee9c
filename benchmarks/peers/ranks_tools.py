"""What contestants on several processes share: starting them, checked steps, timed blocks of equal length.

Rank r of R has the examples ``r * B // R`` to ``(r + 1) * B // R`` of each batch of B.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dlrm_tools import case_name, initial_rows
from worker_tools import BLOCK, batches_of, say

__all__ = ["ranks_case", "run_on_ranks"]

_RANK = "BENCHMARK_RANK"


def run_on_ranks(config: dict[str, Any], work: Callable[[], None]) -> None:
    """Run this script in ``config["ranks"]`` processes, which share ``config["threads"]`` threads."""
    size, rank = config["ranks"], int(os.environ.get(_RANK, 0))
    torch.set_num_threads(max(1, config["threads"] // size))
    others = []
    if size > 1 and _RANK not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
        for other in range(1, size):
            env = {**os.environ, _RANK: str(other), "RANK": str(other), "LOCAL_RANK": str(other)}
            others.append(subprocess.Popen([sys.executable, *sys.argv], env=env, stdout=subprocess.DEVNULL))
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    if size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=size)
    work()
    if size > 1:
        dist.destroy_process_group()
    if any(other.wait() for other in others):
        raise SystemExit("another rank failed")


def ranks_case(
    config: dict[str, Any],
    optimizer: str,
    case: dict[str, Any],
    natural: Callable[[np.ndarray, np.ndarray, np.ndarray], Any],
    step: Callable[[Any], Any],
    layers: Callable[[], dict[str, np.ndarray]],
    rows: Callable[[], np.ndarray],
) -> None:
    """Check, then time one (optimizer, shape) of a freshly built model.

    Args:
        natural: (dense [B, 13], ids [B, F], labels [B]) of all ranks as the input of this one, before the clock runs.
        step: one whole training step; every rank calls it as often.
        layers, rows: the weights now, rows as [N, D]; every rank calls them.
    """
    source, first = Path(case["inputs"]), config["checked_steps"]
    dense, labels = np.load(source / "dense.npy"), np.load(source / "labels.npy")
    ids = [each.reshape(case["batch"], -1) for each, _ in batches_of({"inputs": case["ids"]})]
    pool = [natural(*each) for each in zip(dense, ids, labels, strict=True)]
    for number in range(first):
        step(pool[number])
    now, name = rows(), case_name(optimizer, case)
    if not (dist.is_initialized() and dist.get_rank()):
        changed = np.flatnonzero((now != initial_rows(case)).any(axis=1))
        left = f"{optimizer}_{source.name}.npz"
        np.savez(Path(config["results"]) / left, changed=changed, rows=now[changed], **layers())
        say("checked", case=name, optimizer=optimizer, shape=case["name"], left=left)
    del now
    blocks = []
    for number in range(config["blocks"]):
        begin = time.perf_counter()
        for each in range(BLOCK):
            step(pool[(first + number * BLOCK + each) % len(pool)])
        blocks.append((time.perf_counter() - begin) / BLOCK)
    blocks = blocks[1:]  # the first one warms up
    say("timed", case=name, seconds=float(np.median(blocks)), blocks=len(blocks), fastest=min(blocks))
