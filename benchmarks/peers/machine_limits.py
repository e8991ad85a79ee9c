"""Measures this machine's limits: copy bandwidth, random 64-byte lines, matrix products."""

from __future__ import annotations

import itertools
import threading
import time
from functools import partial

import numba
import numpy as np
import torch
from worker_tools import argument, say

config = argument()
torch.set_num_threads(config["threads"])
repeats = 3 if config["quick"] else 7


def best(work, units):
    """The highest rate of several attempts, in units a second."""
    work()
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        rates.append(units / (time.perf_counter() - start))
    return max(rates)


def together(function, parts):
    threads = [threading.Thread(target=function, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@numba.njit(nogil=True)
def touch(table, where, out):
    """Read one float of every line: eight independent chains keep the memory busy."""
    a = b = c = d = e = f = g = h = np.float32(0)
    for i in range(0, len(where) - 7, 8):
        a += table[where[i]]
        b += table[where[i + 1]]
        c += table[where[i + 2]]
        d += table[where[i + 3]]
        e += table[where[i + 4]]
        f += table[where[i + 5]]
        g += table[where[i + 6]]
        h += table[where[i + 7]]
    out[0] = a + b + c + d + e + f + g + h


def product(a, b):
    """``a @ b.T`` by torch.mm or oneDNN: torch's default is not the faster one on every CPU."""
    out = torch.mm(a, b.T)
    forms = [lambda: torch.mm(a, b.T, out=out)]
    try:
        torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
        forms.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    except (AttributeError, RuntimeError):  # no oneDNN, or none for this type on this processor
        pass
    return min(forms, key=seconds)


def seconds(work):
    """The shortest of a few runs."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def products(sizes, batch, dtype):
    """The three products of every layer (forward, both gradients) in their faster form, and their FLOPs."""
    made, flops = [], 0
    for inputs, outputs in sizes:
        x, w, g = (torch.randn(*s).to(dtype) for s in ((batch, inputs), (outputs, inputs), (batch, outputs)))
        made += [product(x, w), product(g, w.T.contiguous()), product(g.T.contiguous(), x.T.contiguous())]
        flops += 6 * batch * inputs * outputs

    def work():
        for one in made:
            one()

    return work, flops


count = config["threads"]
size = 2**26
source, target = np.ones(size, np.float32), np.zeros(size, np.float32)
cuts = np.linspace(0, size, count + 1).astype(int)
halves = [(target[a:b], source[a:b]) for a, b in itertools.pairwise(cuts)]
copy = best(partial(together, np.copyto, halves), 2 * size * 4) / 1e9
del source, target, halves

table = np.ones(2**28, np.float32)  # 1 GiB
rng = np.random.default_rng(0)
drawn = 2**21
jobs = [(table, rng.integers(0, 2**24, drawn) * 16, np.zeros(1, np.float32)) for _ in range(count)]
lines = best(partial(together, touch, jobs), drawn * count)
del table, jobs

mlp = [(13, 512), (512, 256), (256, 64), (64, 16), (367, 512), (512, 256), (256, 1)]
found = {"copy": copy, "lines": lines}
for name, dtype in (("", torch.float32), ("_bf16", torch.bfloat16)):
    for batch in (2048, 8192):
        work, flops = products(mlp, batch, dtype)
        found[f"gemm_{batch}{name}"] = best(work, flops) / 1e9
    square = product(*(torch.randn(2048, 2048).to(dtype) for _ in range(2)))
    found[f"gemm_big{name}"] = best(square, 2 * 2048**3) / 1e9
say("limits", **found)
