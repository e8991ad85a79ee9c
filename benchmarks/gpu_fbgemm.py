"""Our tables' kernels beside FBGEMM's table-batched embeddings, on one GPU: the same tables, ids and gradients.

FBGEMM is what TorchRec and most others use on GPUs. A step is the lookup and the fused backward with its update, as
each library's own interface runs them: FBGEMM's is an autograd function, ours are the calls of a back end.

Legend: B examples, F features (one table each), D columns.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from benchmarks.gpu_kernels import LR, make_state, rule_of, space_of
from benchmarks.gpu_tools import Clock, Setting, milliseconds, zipf_ids
from benchmarks.harness import NotRun, Outcome, Table, WrongResult
from stoker.ops import Backend, Bags, Rounding, RowRule
from stoker.ops.gpu.backend import TritonBackend

__all__ = ["measure"]

MLPERF = (
    40_000_000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40_000_000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
    14, 40_000_000, 40_000_000, 40_000_000, 590152, 12973, 108, 36,
)  # fmt: skip
KINDS = {"sgd": "EXACT_SGD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD", "adam": "ADAM"}


def measure(setting: Setting) -> Outcome:
    """The value is the smallest ratio of FBGEMM's time of a step to ours.

    Raises:
        NotRun: FBGEMM is not installed.
        WrongResult: lookups differ, before a step or after one.
    """
    if importlib.util.find_spec("fbgemm_gpu") is None:
        raise NotRun("fbgemm_gpu is missing (pip install fbgemm-gpu, of the release for this torch)")
    device, clock = setting.device, Clock(setting.pick(full=90.0, quick=40.0, tiny=60.0))
    cap, dim = setting.pick(full=(8_000_000, 128), quick=(2_000_000, 128), tiny=(300, 16))
    batches = setting.pick(full=(8192, 65536, 2048), quick=(8192, 65536), tiny=(8,))
    results, left = [], 0
    for kind in KINDS:
        for batch in batches:
            if results and clock.over():
                left += 1
            else:
                sizes = [min(rows, cap // (4 if kind == "adam" else 1)) for rows in MLPERF]
                results.append(_case(kind, sizes, dim, batch, device, setting.pick(full=5, quick=3, tiny=1)))
    notes = ["lookups were equal within 1e-6 before, and within 1e-4 after one step of each"]
    if left:
        notes.append(f"out of time: {left} cases were not timed")
    columns = [
        "optimizer",
        "batch",
        "distinct rows",
        "FBGEMM forward ms",
        "step ms",
        "ours forward ms",
        "step ms",
        "speed-up",
    ]
    rows = [
        [
            each["optimizer"], str(each["batch"]), f"{each['distinct_rows']:,}", f"{each['fbgemm_ms']['forward']:.3f}",
            f"{each['fbgemm_ms']['step']:.3f}", f"{each['ours_ms']['forward']:.3f}", f"{each['ours_ms']['step']:.3f}",
            f"{each['speedup']:.2f}x",
        ]
        for each in results
    ]  # fmt: skip
    title = f"Lookup and step of MLPerf's 26 tables, D {dim}, Zipf 1.05, beside FBGEMM"
    return Outcome(
        value=min(each["speedup"] for each in results), tables=[Table(title=title, columns=columns, rows=rows)],
        notes=notes, data={"results": results},
    )  # fmt: skip


def _case(kind: str, sizes: list[int], dim: int, batch: int, device: torch.device, rounds: int) -> dict[str, Any]:
    steps = 20 if device.type == "cuda" else 2
    g, space = torch.Generator().manual_seed(0), space_of(sizes)
    theirs = _fbgemm(kind, sizes, dim, device)
    weight = torch.empty(space.num_rows, dim, device=device).uniform_(-0.01, 0.01)
    with torch.no_grad():
        for part, begin, count in zip(theirs.split_embedding_weights(), space.first_row.tolist(), sizes, strict=False):
            part.copy_(weight[begin : begin + count])
    state, ours = make_state(space.num_rows, dim, kind, device), TritonBackend() if device.type == "cuda" else Backend()
    pool = [zipf_ids(sizes, batch, g, 1.05) for _ in range(steps)]
    bags = [Bags(ids.to(device)) for ids in pool]
    flat = [ids.t().contiguous().view(-1).to(device, torch.int64) for ids in pool]
    offsets = torch.arange(batch * len(sizes) + 1, device=device)
    grad = torch.randn(batch, len(sizes), dim, generator=g).to(device) * 1e-3
    joined = grad.view(batch, -1)

    def forward(index: int) -> torch.Tensor:
        return ours.lookup(weight, space, bags[index % steps])

    rule = rule_of(kind) if kind == "adam" else RowRule(kind, LR, 1e-8)

    def step(index: int) -> None:
        forward(index)
        ours.update(weight, state, space, bags[index % steps], grad, rule, Rounding(()))

    def compare(when: str, tolerance: float) -> None:
        one, other = forward(0).view(batch, -1), theirs(flat[0], offsets).detach()
        if not torch.allclose(one, other, rtol=0.0, atol=tolerance):
            raise WrongResult(f"{kind}: lookups {when} differ by {float((one - other).abs().max()):.3g}")

    compare("before a step", 1e-6)
    step(0)
    theirs(flat[0], offsets).backward(joined)
    if kind != "adam":  # whose bias correction here is that of the first step for ever, so that both do the same work
        compare("after a step", 1e-4)
    fbgemm = {
        "forward": milliseconds(lambda i: theirs(flat[i % steps], offsets), rounds, steps, device),
        "step": milliseconds(lambda i: theirs(flat[i % steps], offsets).backward(joined), rounds, steps, device),
    }
    own = {
        "forward": milliseconds(forward, rounds, steps, device),
        "step": milliseconds(step, rounds, steps, device),
    }
    ours.synchronize()
    return {
        "optimizer": kind, "batch": batch, "dim": dim, "rows": space.num_rows, "fbgemm_ms": fbgemm, "ours_ms": own,
        "distinct_rows": len(torch.unique(pool[0] + space.bases)), "speedup": fbgemm["step"] / own["step"],
    }  # fmt: skip


def _fbgemm(kind: str, sizes: list[int], dim: int, device: torch.device) -> Any:
    ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
    place = ("DEVICE", "CUDA") if device.type == "cuda" else ("HOST", "CPU")
    where = (getattr(ops.EmbeddingLocation, place[0]), getattr(ops.ComputeDevice, place[1]))
    return ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *where) for rows in sizes], optimizer=getattr(configs.EmbOptimType, KINDS[kind]),
        learning_rate=LR, eps=1e-8, beta1=0.9, beta2=0.999, stochastic_rounding=False,
        **({"device": device} if device.type == "cuda" else {}),
    )  # fmt: skip
