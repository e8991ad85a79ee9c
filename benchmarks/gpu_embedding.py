"""Lookup and row update on a GPU: checked against the reference first, then timed next to PyTorch.

Needs torch and triton only: ``PYTHONPATH=src python benchmarks/gpu_embedding.py [--quick] [--json FILE]``.
``--quick`` compiles about 150 kernels and takes a few minutes; the full run compiles several hundred more.
No time is printed unless every check passed. Bytes counted are those the step cannot avoid: ids and rows
read and pooled rows written by the lookup; ids and gradients read by the update, and each distinct row and
its state read and written once. The fraction is of the bandwidth that a large device-to-device copy reaches
on this GPU.

Legend: B examples, F features (one table each), D columns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from stoker.ops import AddressSpace, Bags, ReferenceBackend, Rounding, RowRule
from stoker.ops.space import make_space
from stoker.ops.triton_backend import TritonBackend, interpreted

KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10,
    5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
STATE = {
    "sgd": {},
    "adagrad": {"sum": "row"},
    "rowwise_adagrad": {"sum": "scalar"},
    "adam": {"exp_avg": "row", "exp_avg_sq": "row"},
}
LR = 0.0625


def make_state(rows: int, dim: int, kind: str, device: torch.device) -> dict[str, Tensor]:
    shapes = {"row": (rows, dim), "scalar": (rows,)}
    return {name: torch.zeros(shapes[shape], device=device) for name, shape in STATE[kind].items()}


def rule_of(kind: str, **extra: float) -> RowRule:
    return RowRule(kind, LR, 1e-8, 0.9, 0.999, 1.0 - 0.9, 1.0 - 0.999, **extra)


def space_of(sizes: list[int]) -> AddressSpace:
    names = [f"C{i}" for i in range(len(sizes))]
    return make_space(names, sizes, [[name] for name in names], names)


def zipf_ids(sizes: list[int], batch: int, g: torch.Generator, skew: float) -> Tensor:
    """Ids [B, F] int32, id i about proportional to (i + 1) ** -skew, by inverting the continuous law."""
    u = torch.rand(batch, len(sizes), generator=g, dtype=torch.float64)
    top = torch.tensor(sizes, dtype=torch.float64)
    power = 1.0 - skew
    ids = ((1.0 + u * ((top + 1.0) ** power - 1.0)) ** (1.0 / power)).floor() - 1.0
    return torch.minimum(ids.clamp(min=0), top - 1.0).to(torch.int32)


def jagged(sizes: list[int], batch: int, g: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Flat ids [L] and offsets [B * F + 1]; a bag holds 0 to 6 ids."""
    lengths = torch.randint(0, 7, (batch * len(sizes),), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    limits = torch.repeat_interleave(torch.tensor(sizes).repeat(batch), lengths)
    ids = (torch.rand(len(limits), generator=g, dtype=torch.float64) ** 3 * limits).to(torch.int32)
    return ids.to(device), offsets.to(device)


class Checks:
    """Counts comparisons and keeps those that failed."""

    def __init__(self) -> None:
        self.done = 0
        self.failed: list[str] = []

    def equal(self, what: str, found: Tensor, expected: Tensor) -> None:
        self.done += 1
        if found.dtype != expected.dtype or found.shape != expected.shape:
            self.failed.append(f"{what}: {found.dtype} {tuple(found.shape)}")
        elif not torch.equal(found.nan_to_num(1e30), expected.nan_to_num(1e30)):
            wrong = int((found != expected).sum())
            worst = float((found.double() - expected.double()).abs().max())
            self.failed.append(f"{what}: {wrong:,} of {found.numel():,} values differ, by up to {worst:.3g}")

    def true(self, what: str, fine: bool) -> None:
        self.done += 1
        if not fine:
            self.failed.append(what)


def check(device: torch.device, *, quick: bool, batch: int = 700) -> Checks:
    """All kernels against the reference on the same device, to the bit."""
    checks, g = Checks(), torch.Generator().manual_seed(1)
    backend, reference = TritonBackend(), ReferenceBackend()
    sizes = [3, 500, 20_000]
    space = space_of(sizes)
    keys = tuple(2**40 * (i + 1) - 2**61 for i in range(len(sizes)))
    for dim in (16, 100) if quick else (1, 4, 16, 17, 64, 100, 128, 256, 1000):
        for dtype in (torch.float32, torch.bfloat16):
            label = f"D {dim} {dtype}".replace("torch.", "")
            weight = torch.empty(space.num_rows, dim, dtype=dtype, device=device)
            fresh = torch.empty_like(weight)
            backend.init_rows(weight, -(2**62) + 3, 5, 0.25)
            reference.init_rows(fresh, -(2**62) + 3, 5, 0.25)
            checks.equal(f"init_rows {label}", weight, fresh)
            flat, offsets = jagged(sizes, batch, g, device)
            scales = torch.randn(len(flat), generator=g).to(device)
            one = zipf_ids(sizes, batch, g, 1.05).to(device)
            layouts = {
                "one": Bags(one),
                "one int64": Bags(one.to(torch.int64)),
                "sum": Bags(flat, offsets),
                "mean": Bags(flat, offsets, None, True),
                "weighted": Bags(flat, offsets, scales),
            }
            for layout, bags in layouts.items():
                expected = reference.lookup(weight, space, bags)
                checks.equal(f"lookup {label} {layout}", backend.lookup(weight, space, bags), expected)
                grad = torch.randn(batch, len(sizes), dim, generator=g).to(device)
                for kind in STATE:
                    for extra in ({}, {"clip_value": 1.0, "clip_norm": 2.0, "weight_decay": 0.01}):
                        where = f"update {label} {layout} {kind} {'with options' if extra else ''}"
                        check_update(checks, where, (backend, reference), weight, space, bags, grad, kind, keys, extra)
            found = backend.weight_gradient(weight, space, layouts["weighted"], grad)
            expected = reference.weight_gradient(weight, space, layouts["weighted"], grad)
            checks.true(f"weight_gradient {label}", bool(torch.allclose(found, expected, rtol=1e-3, atol=1e-3)))
    check_errors(checks, backend, device)
    check_large(checks, backend, device)
    return checks


def check_update(
    checks: Checks,
    where: str,
    backends: tuple[TritonBackend, ReferenceBackend],
    weight: Tensor,
    space: AddressSpace,
    bags: Bags,
    grad: Tensor,
    kind: str,
    keys: tuple[int, ...],
    extra: dict[str, float],
) -> None:
    results = []
    for backend in backends:
        rows, state = weight.clone(), make_state(len(weight), weight.shape[1], kind, weight.device)
        for step in range(2):
            rounding = Rounding(tuple(key + step for key in keys))
            backend.update(rows, state, space, bags, grad, rule_of(kind, **extra), rounding)
        results.append((rows, state))
    (rows, state), (expected, expected_state) = results
    checks.equal(where, rows, expected)
    for name in state:
        checks.equal(f"{where} {name}", state[name], expected_state[name])


def check_errors(checks: Checks, backend: TritonBackend, device: torch.device) -> None:
    """A bad id is reported, and nothing is written from its batch on."""
    space = space_of([4, 50])
    weight = torch.zeros(54, 16, device=device)
    bags = Bags(torch.tensor([[0, 0], [4, 1]], device=device))
    message = ""
    try:
        backend.lookup(weight, space, bags)
        backend.update(weight, {}, space, bags, torch.ones(2, 2, 16, device=device), rule_of("sgd"), Rounding(()))
        backend.synchronize()
    except IndexError as error:
        message = str(error)
    checks.true("the error names example, id and feature", "example 1 has id 4 in feature 'C0'" in message)
    checks.true("a bad batch writes nothing", not bool(weight.any()))


def check_large(checks: Checks, backend: TritonBackend, device: torch.device) -> None:
    """Row times dim above 2**31, and more than 2**31 rows, where the memory is there."""
    for rows, dim in ((2**25 + 3, 64), (2**31 + 3, 1)):
        if torch.cuda.mem_get_info()[0] < 4 * rows * dim + 2**31:
            print(f"  skipped: {rows:,} rows of {dim} columns do not fit the free memory")
            continue
        weight = torch.zeros(rows, dim, device=device)
        space = space_of([5, rows - 5])
        ids = torch.tensor([[0, rows - 6], [4, rows - 6], [4, 0]], device=device)
        grad = torch.arange(1.0, 7.0, device=device).view(3, 2, 1).expand(3, 2, dim).contiguous()
        backend.update(weight, {}, space, Bags(ids), grad, RowRule("sgd", 1.0), Rounding(()))
        touched = weight[torch.tensor([0, 1, 4, 5, 6, rows - 2, rows - 1], device=device), 0].tolist()
        checks.true(f"{rows:,} rows of {dim} columns: {touched}", touched == [-1.0, 0.0, -8.0, -6.0, 0.0, 0.0, -6.0])
        pooled = backend.lookup(weight, space, Bags(ids))[:, :, -1].tolist()
        checks.true(f"{rows:,} rows: {pooled}", pooled == [[-1.0, -6.0], [-8.0, -6.0], [-8.0, -6.0]])
        del weight
        torch.cuda.empty_cache()


def milliseconds(step: Callable[[int], Any], rounds: int, steps: int) -> float:
    """Median over rounds of the time of one step, after a warm-up round."""
    times = []
    for turn in range(rounds + 1):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for index in range(steps):
            step(turn * steps + index)
        end.record()
        torch.cuda.synchronize()
        if turn:
            times.append(begin.elapsed_time(end) / steps)
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a 1 GiB copy."""
    source = torch.ones(2**28, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (milliseconds(lambda _: target.copy_(source), 5, 10) / 1000)


def measure(
    device: torch.device,
    sizes: list[int],
    dim: int,
    batch: int,
    dtype: torch.dtype,
    kind: str,
    copy: float,
    rounds: int,
) -> dict[str, Any]:
    """Times of one setting: Triton's lookup and update apart, and PyTorch's whole step for SGD in float32."""
    g = torch.Generator().manual_seed(2)
    space, features, steps = space_of(sizes), len(sizes), 20
    pool = [zipf_ids(sizes, batch, g, 1.05).to(device) for _ in range(steps)]
    grad = torch.randn(batch, features, dim, generator=g).to(device)
    weight = torch.empty(space.num_rows, dim, dtype=dtype, device=device)
    backend = TritonBackend()
    backend.init_rows(weight, 1, 0, 0.01)
    state = make_state(space.num_rows, dim, kind, device)
    rule, keys = rule_of(kind), Rounding(tuple(range(len(sizes))))
    bases = space.bases.to(device)
    distinct = statistics.mean(len(torch.unique(ids + bases)) for ids in pool)
    lookups = batch * features
    state_bytes = {"row": 4 * dim, "scalar": 4}
    row_bytes = dim * weight.element_size()
    kept = row_bytes + sum(state_bytes[shape] for shape in STATE[kind].values())
    lookup_bytes = 4 * lookups + distinct * row_bytes + lookups * dim * 4
    update_bytes = 4 * lookups + lookups * dim * 4 + 2 * distinct * kept

    bags = [Bags(ids) for ids in pool]
    lookup = milliseconds(lambda i: backend.lookup(weight, space, bags[i % steps]), rounds, steps)

    def update(index: int) -> None:
        backend.update(weight, state, space, bags[index % steps], grad, rule, keys)

    updates = milliseconds(update, rounds, steps)
    backend.synchronize()
    result = {
        "tables": features,
        "rows": space.num_rows,
        "dim": dim,
        "batch": batch,
        "dtype": str(dtype).removeprefix("torch."),
        "optimizer": kind,
        "distinct_rows": distinct,
        "lookup_ms": lookup,
        "lookup_gb_s": lookup_bytes / lookup / 1e6,
        "lookup_of_copy": lookup_bytes / lookup * 1e3 / copy,
        "update_ms": updates,
        "update_gb_s": update_bytes / updates / 1e6,
        "update_of_copy": update_bytes / updates * 1e3 / copy,
        "step_ms": lookup + updates,
    }
    if kind == "sgd" and dtype == torch.float32:
        result["torch_step_ms"] = torch_step(weight, [ids + bases for ids in pool], grad, rounds)
        result["speedup"] = result["torch_step_ms"] / result["step_ms"]
    return result


def torch_step(weight: Tensor, pool: list[Tensor], grad: Tensor, rounds: int) -> float:
    """One stacked ``nn.EmbeddingBag(sparse=True)`` over all tables and ``SGD``: lookup, backward, step."""
    bag = torch.nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(bag.parameters(), lr=LR)
    flat = grad.reshape(-1, grad.shape[2])

    def step(index: int) -> None:
        bag(pool[index % len(pool)].reshape(-1, 1)).backward(flat)
        optimizer.step()
        optimizer.zero_grad()

    return milliseconds(step, rounds, len(pool))


def show(results: list[dict[str, Any]]) -> None:
    columns = ["tables", "D", "batch", "type", "optimizer", "distinct", "lookup ms", "GB/s", "of copy"]
    columns += ["update ms", "GB/s", "of copy", "torch ms", "speed-up"]
    lines = [columns]
    for r in results:
        line = [str(r["tables"]), str(r["dim"]), str(r["batch"]), r["dtype"], r["optimizer"]]
        line += [
            f"{r['distinct_rows']:,.0f}",
            f"{r['lookup_ms']:.3f}",
            f"{r['lookup_gb_s']:.0f}",
            f"{r['lookup_of_copy']:.0%}",
        ]
        line += [f"{r['update_ms']:.3f}", f"{r['update_gb_s']:.0f}", f"{r['update_of_copy']:.0%}"]
        line += [f"{r['torch_step_ms']:.3f}", f"{r['speedup']:.2f}x"] if "torch_step_ms" in r else ["-", "-"]
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def popular_row(device: torch.device, rounds: int) -> dict[str, float]:
    """Milliseconds of an update in which one row takes every occurrence: adding in order at its worst."""
    result, backend = {}, TritonBackend()
    space, weight = space_of([1000]), torch.zeros(1000, 16, device=device)
    for count in (1_000, 10_000, 100_000):
        bags = Bags(torch.zeros(count, 1, dtype=torch.int32, device=device))
        grad = torch.randn(count, 1, 16, device=device)

        def step(_: int, bags: Bags = bags, grad: Tensor = grad) -> None:
            backend.update(weight, {}, space, bags, grad, rule_of("sgd"), Rounding(()))

        result[str(count)] = milliseconds(step, rounds, 3)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer checks and settings")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers here")
    options = parser.parse_args()
    if interpreted() or not torch.cuda.is_available():
        print("no CUDA device, or TRITON_INTERPRET is set: nothing to measure", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    machine = {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    checks = check(device, quick=options.quick)
    print(f"{checks.done - len(checks.failed):,} of {checks.done:,} checks passed")
    for line in checks.failed[:40]:
        print(f"  wrong: {line}")
    report: dict[str, Any] = {"machine": machine, "checks": checks.done, "failed": checks.failed}
    if not checks.failed:
        rounds = 3 if options.quick else 7
        copy = copy_bandwidth(device)
        report["copy_gb_s"] = copy / 1e9
        print(f"copy: {copy / 1e9:,.0f} GB/s read and written")
        settings = [
            (dim, batch, dtype, kind)
            for dim in (16, 128)
            for batch in ((8192,) if options.quick else (2048, 8192, 65536))
            for dtype in (torch.float32, torch.bfloat16)
            for kind in STATE
        ]
        results = []
        for dim, batch, dtype, kind in settings:
            sizes = list(KAGGLE) if dim == 16 else [max(3, rows // 4) for rows in KAGGLE]
            results.append(measure(device, sizes, dim, batch, dtype, kind, copy, rounds))
            torch.cuda.empty_cache()
        show(results)
        report["results"] = results
        report["popular_row_ms"] = popular_row(device, rounds)
        print("one row with all occurrences, ms:", report["popular_row_ms"])
    text = json.dumps(report, indent=1)
    if options.json:
        with open(options.json, "w") as file:
            file.write(text + "\n")
    else:
        print(text)
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
