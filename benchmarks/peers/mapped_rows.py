"""The naive way to tables larger than memory: rows in a memory-mapped file, plain PyTorch on top.

Lookup as nn.EmbeddingBag(mode="sum", include_last_offset=True); row-wise Adagrad by unique + index_add_. The rows of a
batch are gathered once; two threads take the page faults of the gather.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from placed_tools import case_name, drop_file, drop_steps, load_trace, timed_steps
from torch.nn import functional as F
from worker_tools import argument, say, versions

config = argument()
torch.set_num_threads(config["threads"])
torch.set_grad_enabled(False)
versions(torch=torch.__version__)
source, results = Path(config["inputs"]), Path(config["results"])
num_rows, dim, lr, eps = config["num_rows"], config["dim"], config["lr"], config["eps"]


class Mapped:
    """A file of float32 as a tensor."""

    def __init__(self, path, shape):
        self.fd = os.open(path, os.O_RDWR)
        os.fsync(self.fd)
        self.memory = mmap.mmap(self.fd, 0)
        if config["advice"] == "random":
            self.memory.madvise(mmap.MADV_RANDOM)  # no read-ahead around a page fault
        self.tensor = torch.from_numpy(np.frombuffer(self.memory, np.float32).reshape(shape))

    def drop(self):
        # Mapped pages stay in the page cache whatever the advice on the file: unmap them first.
        self.memory.madvise(mmap.MADV_DONTNEED)
        drop_file(self.fd)


def run(batch_size, warm_up, timed, folder):
    given = load_trace(source / f"trace_{batch_size}.npz")
    due = drop_steps(given, config["memory"], 4 * dim, config["slots"] * 4 * dim)
    trace = [(torch.from_numpy(i), torch.from_numpy(o)) for i, o in given]
    grads = [torch.from_numpy(g).view(-1, dim) for g in np.load(source / f"grad_{batch_size}.npy")]
    shutil.copyfile(source / "weight.bin", folder / "weight.bin")
    with open(folder / "state.bin", "wb") as file:
        file.write(bytes(4 * num_rows))  # written, not sparse: reading a hole costs no disk access
    weight, state = Mapped(folder / "weight.bin", (num_rows, dim)), Mapped(folder / "state.bin", (num_rows,))
    kept = {}

    def step(number):
        if number in due:
            weight.drop()
            state.drop()
        ids, offsets = trace[number]
        rows, inverse = torch.unique(ids, return_inverse=True)
        looked = weight.tensor.index_select(0, rows)
        kept["output"] = F.embedding_bag(inverse, looked, offsets, mode="sum", include_last_offset=True)
        each = grads[number % len(grads)].repeat_interleave(offsets.diff(), 0)
        g = torch.zeros(len(rows), dim).index_add_(0, inverse, each)
        total = state.tensor.index_select(0, rows).add_(g.square().mean(1))
        state.tensor.index_copy_(0, rows, total)
        weight.tensor.index_copy_(0, rows, looked.sub_(g.mul_((lr / total.sqrt_().add_(eps)).unsqueeze(1))))

    blocks = timed_steps(step, warm_up, timed)
    touched = torch.unique(torch.cat([ids for ids, _ in trace[: warm_up + timed]]))
    np.save(results / f"weight_{batch_size}.npy", weight.tensor[touched].numpy())
    np.save(results / f"output_{batch_size}.npy", kept["output"].numpy())
    case = case_name(batch_size)
    say("checked", case=case, batch=batch_size)
    say("timed", case=case, seconds=float(np.mean(blocks)), blocks=len(blocks), fastest=min(blocks))


with tempfile.TemporaryDirectory(dir=source) as folder:
    for size, (warm_up, timed) in config["steps"].items():
        run(int(size), warm_up, timed, Path(folder))
