"""Stoker's tensor-train table: ``TTEmbeddingBag`` with SGD inside backward, and how near its products are to GEMM."""

from __future__ import annotations

import time

import numpy as np
import torch
from tt_tools import LR, run_cases
from worker_tools import argument, say, versions

import stoker
from stoker.ops.tt.lookup import expand, gradients
from stoker.ops.tt.shape import TTShape
from stoker.ops.tt.trie import build_trie
from stoker.optim import SGD

config = argument()
torch.set_num_threads(config["threads"])
versions(torch=torch.__version__, stoker=stoker.__version__)


def least(work, repeats):
    """The shortest of a few runs, in seconds."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


class Ours:
    def __init__(self, case, cores):
        shape = TTShape(tuple(case["rows"]), tuple(case["cols"]), tuple(case["ranks"]))
        self.bag = stoker.TTEmbeddingBag(
            case["num_embeddings"], case["dim"], mode="sum", shape=shape, optimizer=SGD(lr=LR)
        )
        with torch.no_grad():
            for core, values in zip(self.bag.cores, cores, strict=True):
                core.copy_(torch.from_numpy(values))

    def ids(self, batch):
        return torch.from_numpy(batch).view(-1, 1)

    def gradient(self, grad):
        return torch.from_numpy(grad)

    @torch.no_grad()
    def lookup(self, ids):
        return self.bag(ids)

    def forward(self, ids):
        return self.bag(ids)

    def backward(self, out, grad):
        out.backward(grad)

    def array(self, out):
        return out.detach().numpy().copy()

    def cores(self):
        return [core.detach().numpy() for core in self.bag.cores]

    @torch.no_grad()
    def close(self, case):
        """FLOP of the products, from the trie, and the time of their functions alone."""
        shape, cores = self.bag.shape, list(self.bag.cores)
        ids = torch.from_numpy(np.load(case["ids"], mmap_mode="r")[0].copy())
        distinct = torch.unique(ids)
        trie = build_trie(distinct, shape, cores[0])
        flop, width = 0, shape.cols[0]
        for place, level in enumerate(trie.levels[1:], 1):
            _, left, wide = shape.core_shapes[place]
            flop += 2 * len(level.digit) * width * left * wide
            width *= shape.cols[place]
        values = expand(cores, trie)
        grad = torch.randn(len(distinct), shape.dim)
        repeats = 5 if config["quick"] else 30
        say(
            "extra",
            case=case["name"],
            nodes=[len(level.digit) for level in trie.levels],
            slices=[len(level.digits) for level in trie.levels],
            flop=flop,
            trie=least(lambda: build_trie(distinct, shape, cores[0]), repeats),
            expand=least(lambda: expand(cores, trie), repeats),
            gradients=least(lambda: gradients(cores, trie, values, grad), repeats),
        )


run_cases(config, Ours)
size = 2048
a, b = torch.randn(2, size, size)
out = torch.empty(size, size)
say("extra", case="gemm", flops=2 * size**3 / least(lambda: torch.mm(a, b, out=out), 5))
