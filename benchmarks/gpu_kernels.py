"""The Triton kernels: checked against the reference first, then timed next to PyTorch and the memory's bandwidth.

Bytes counted are those the step cannot avoid: ids and rows read and pooled rows written by the lookup; ids and
gradients read by the update, and each distinct row and its state read and written once. The fraction is of the
bandwidth that a large device-to-device copy reaches on this GPU. No time is shown unless every check passed.

Legend: B examples, F features (one table each), D columns.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_limits import limits
from benchmarks.gpu_tools import Clock, Setting, milliseconds, zipf_ids
from benchmarks.harness import NotRun, Outcome, Table, WrongResult
from stoker.ops import AddressSpace, Backend, Bags, Rounding, RowRule
from stoker.ops.gpu.backend import TritonBackend, interpreted
from stoker.ops.gpu.dense import interaction, interaction_gradient, relu_gradient
from stoker.ops.reference import dot_interaction
from stoker.ops.space import make_space

__all__ = ["measure"]

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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to check and what to time."""

    dims: tuple[int, ...]  # D of the checks, the timed ones first
    batch: int
    sizes: tuple[int, ...] = (3, 500, 20_000)
    layouts: tuple[str, ...] = ("one", "one int64", "sum", "mean", "weighted")
    options: tuple[dict[str, float], ...] = ({}, {"clip_value": 1.0, "clip_norm": 2.0, "weight_decay": 0.01})
    batches: tuple[int, ...]  # timed
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    kinds: tuple[str, ...] = ("rowwise_adagrad", "sgd", "adagrad", "adam")
    tables: tuple[int, ...] = KAGGLE  # rows of each, timed
    rounds: int
    seconds: float  # for everything: checks of further widths end at half of it, timings at the whole


def plan_of(setting: Setting) -> Plan:
    every = (128, 16, 100, 1, 4, 17, 64, 256, 1000)
    return setting.pick(
        full=Plan(
            dims=every if setting.all_kernels else every[:3],
            batch=700,
            batches=(8192, 65536, 2048),
            rounds=5,
            seconds=1e6 if setting.all_kernels else 165.0,
        ),
        quick=Plan(
            dims=(128,),
            batch=300,
            layouts=("one", "weighted"),
            batches=(8192,),
            dtypes=(torch.float32,),
            kinds=("rowwise_adagrad", "sgd"),
            rounds=3,
            seconds=40.0,
        ),
        tiny=Plan(
            dims=(16,),
            batch=6,
            sizes=(3, 40),
            layouts=("one", "weighted"),
            options=({"clip_value": 1.0, "clip_norm": 2.0, "weight_decay": 0.01},),
            batches=(4,),
            dtypes=(torch.float32,),
            kinds=("rowwise_adagrad", "sgd"),
            tables=(3, 50),
            rounds=1,
            seconds=60.0,
        ),
    )


def check(device: torch.device, plan: Plan, clock: Clock) -> tuple[Checks, list[int]]:
    """All kernels against the reference on the same device, to the bit; and the widths left out for lack of time."""
    checks, g = Checks(), torch.Generator().manual_seed(1)
    backend, reference = TritonBackend(), Backend()
    sizes, left = list(plan.sizes), []
    space = space_of(sizes)
    keys = tuple(2**40 * (i + 1) - 2**61 for i in range(len(sizes)))
    timed = {dim for dim, _, _, _ in settings(plan)}
    for dim in plan.dims:
        if dim not in timed and clock.over(0.5):
            left.append(dim)
            continue
        for dtype in plan.dtypes:
            label = f"D {dim} {dtype}".replace("torch.", "")
            weight = torch.empty(space.num_rows, dim, dtype=dtype, device=device)
            fresh = torch.empty_like(weight)
            backend.init_rows(weight, -(2**62) + 3, 5, 0.25)
            reference.init_rows(fresh, -(2**62) + 3, 5, 0.25)
            checks.equal(f"init_rows {label}", weight, fresh)
            flat, offsets = jagged(sizes, plan.batch, g, device)
            scales = torch.randn(len(flat), generator=g).to(device)
            one = zipf_ids(sizes, plan.batch, g, 1.05).to(device)
            layouts = {
                "one": Bags(one),
                "one int64": Bags(one.to(torch.int64)),
                "sum": Bags(flat, offsets),
                "mean": Bags(flat, offsets, None, True),
                "weighted": Bags(flat, offsets, scales),
            }
            for layout in plan.layouts:
                bags = layouts[layout]
                expected = reference.lookup(weight, space, bags)
                checks.equal(f"lookup {label} {layout}", backend.lookup(weight, space, bags), expected)
                grad = torch.randn(plan.batch, len(sizes), dim, generator=g).to(device)
                for kind in plan.kinds:
                    for extra in plan.options:
                        where = f"update {label} {layout} {kind} {'with options' if extra else ''}"
                        check_update(checks, where, (backend, reference), weight, space, bags, grad, kind, keys, extra)
            found = backend.weight_gradient(weight, space, layouts["weighted"], grad)
            expected = reference.weight_gradient(weight, space, layouts["weighted"], grad)
            checks.true(f"weight_gradient {label}", bool(torch.allclose(found, expected, rtol=1e-3, atol=1e-3)))
    check_errors(checks, backend, device)
    check_dense(checks, plan.batch, max(plan.dims), device)
    if device.type == "cuda":
        check_large(checks, backend, device)
    return checks, left


def check_update(
    checks: Checks,
    where: str,
    backends: tuple[TritonBackend, Backend],
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


def check_dense(checks: Checks, batch: int, dim: int, device: torch.device) -> None:
    """The kernels of the dense part, in full precision, against PyTorch's operations."""
    g, before = torch.Generator().manual_seed(3), torch.get_float32_matmul_precision()
    dense, rows = (torch.randn(*shape, generator=g).to(device) for shape in ((batch, dim), (batch, 26, dim)))
    given = [dense.clone().requires_grad_(), rows.clone().requires_grad_()]
    torch.set_float32_matmul_precision("highest")
    try:
        expected = dot_interaction(*given)
        found = interaction(dense, rows, expected.shape[1])
        grad = torch.randn(expected.shape, generator=g).to(device)
        expected.backward(grad)
        gradients = interaction_gradient(dense, rows, grad)
        for name, one, other in zip(
            ("interaction", "its dense gradient", "its gradient of rows"),
            (found, *gradients), (expected, *(each.grad for each in given)), strict=True,
        ):  # fmt: skip
            checks.true(name, other is not None and bool(torch.allclose(one, other, rtol=1e-4, atol=1e-3)))
    finally:
        torch.set_float32_matmul_precision(before)
    passed, sums = relu_gradient(grad, found)
    checks.equal("gradient through a ReLU", passed, torch.where(found <= 0, 0.0, grad))
    checks.true("its sums", bool(torch.allclose(sums, passed.sum(0), rtol=1e-4, atol=1e-3)))


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
    checks.true("bad offsets are noticed", notices_offsets(backend, torch.tensor([0, 3, 2, 4, 4], device=device)))
    checks.true("good offsets pass", not notices_offsets(backend, torch.tensor([0, 1, 2, 4, 4], device=device)))


def notices_offsets(backend: TritonBackend, offsets: Tensor) -> bool:
    """Whether the device reports these offsets into four ids of two features."""
    asked: list[bool] = []
    try:
        backend.check_offsets(offsets, 4, (2**62, 2**62), lambda: asked.append(True))
        backend.synchronize()
    except IndexError:  # as the check above raised nothing
        return asked == [True]
    return False


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


@lru_cache(maxsize=2)
def id_pool(sizes: tuple[int, ...], batch: int, count: int) -> list[Tensor]:
    """Distinct batches of ids [B, F] int32, on the CPU."""
    g = torch.Generator().manual_seed(2)
    return [zipf_ids(sizes, batch, g, 1.05) for _ in range(count)]


def time_kernels(
    device: torch.device,
    sizes: tuple[int, ...],
    dim: int,
    batch: int,
    dtype: torch.dtype,
    kind: str,
    copy: float,
    rounds: int,
) -> dict[str, Any]:
    """Times of one setting: Triton's lookup and update apart, and PyTorch's whole step for SGD in float32."""
    g = torch.Generator().manual_seed(2)
    steps = 20 if device.type == "cuda" else 2
    space, features = space_of(list(sizes)), len(sizes)
    pool = [ids.to(device) for ids in id_pool(sizes, batch, steps)]
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
    lookup = milliseconds(lambda i: backend.lookup(weight, space, bags[i % steps]), rounds, steps, device)

    def update(index: int) -> None:
        backend.update(weight, state, space, bags[index % steps], grad, rule, keys)

    updates = milliseconds(update, rounds, steps, device)
    backend.synchronize()
    result: dict[str, Any] = {
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

    return milliseconds(step, rounds, len(pool), weight.device)


def table_of(results: list[dict[str, Any]]) -> Table:
    columns = ["tables, D, batch, type, optimizer", "distinct", "lookup ms", "GB/s", "of memory"]
    columns += ["update ms", "GB/s", "of memory", "torch ms", "speed-up"]
    rows = []
    for r in results:
        row = [f"{r['tables']}, {r['dim']}, {r['batch']}, {r['dtype']}, {r['optimizer']}", f"{r['distinct_rows']:,.0f}"]
        for name in ("lookup", "update"):
            row += [f"{r[f'{name}_ms']:.3f}", f"{r[f'{name}_gb_s']:.0f}", f"{r[f'{name}_of_copy']:.0%}"]
        row += [f"{r['torch_step_ms']:.3f}", f"{r['speedup']:.2f}x"] if "torch_step_ms" in r else ["-", "-"]
        rows.append(row)
    title = "Triton kernels against the memory's bandwidth, and lookup + update against PyTorch"
    return Table(title=title, columns=columns, rows=rows)


def popular_row(device: torch.device, rounds: int) -> dict[str, float]:
    """Milliseconds of an update in which one row takes every occurrence: adding in order at its worst."""
    result, backend = {}, TritonBackend()
    space, weight = space_of([1000]), torch.zeros(1000, 16, device=device)
    for count in (1_000, 10_000, 100_000):
        bags = Bags(torch.zeros(count, 1, dtype=torch.int32, device=device))
        grad = torch.randn(count, 1, 16, device=device)

        def step(_: int, bags: Bags = bags, grad: Tensor = grad) -> None:
            backend.update(weight, {}, space, bags, grad, rule_of("sgd"), Rounding(()))

        result[str(count)] = milliseconds(step, rounds, 3, device)
    return result


def settings(plan: Plan) -> list[tuple[int, int, torch.dtype, str]]:
    """(D, B, type, optimizer) to time, those that matter most first."""
    dims = [dim for dim in (128, 16) if dim in plan.dims]
    return [(d, b, dtype, kind) for b in plan.batches for dtype in plan.dtypes for d in dims for kind in plan.kinds]


def measure(setting: Setting) -> Outcome:
    """Check, then time. The value is the lookup's share of the memory's bandwidth in the first setting.

    Raises:
        NotRun: Triton runs in its interpreter on a machine with a GPU, or natively on a CPU.
        WrongResult: a kernel's numbers are not the reference's.
    """
    device, plan = setting.device, plan_of(setting)
    if interpreted() != (device.type == "cpu"):
        raise NotRun("TRITON_INTERPRET must be 1 on a CPU and unset on a GPU")
    clock = Clock(plan.seconds)
    checks, left = check(device, plan, clock)
    if checks.failed:
        shown = "\n".join(f"  wrong: {line}" for line in checks.failed[:40])
        raise WrongResult(f"{len(checks.failed):,} of {checks.done:,} checks of kernels failed\n{shown}")
    notes = [f"{checks.done:,} comparisons with the reference passed, bit for bit where the definition fixes the order"]
    if left:
        notes.append(f"out of time: widths {', '.join(map(str, left))} were not checked (--all-kernels does)")
    copy, chosen = limits(setting)["memory"] * 1e9, settings(plan)
    results: list[dict[str, Any]] = []
    for dim, batch, dtype, kind in chosen:
        if results and clock.over():
            notes.append(f"out of time: {len(chosen) - len(results)} of {len(chosen)} settings were not timed")
            break
        sizes = plan.tables if dim == 16 else tuple(max(3, rows // 4) for rows in plan.tables)
        results.append(time_kernels(device, sizes, dim, batch, dtype, kind, copy, plan.rounds))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    data: dict[str, Any] = {"checks": checks.done, "widths_left": left, "results": results}
    if device.type == "cuda":
        data["popular_row_ms"] = popular_row(device, plan.rounds)
        shown = ", ".join(f"{int(count):,}: {ms:.3f} ms" for count, ms in data["popular_row_ms"].items())
        notes.append(f"update of one row that takes every occurrence, by their number: {shown}")
    return Outcome(value=results[0]["lookup_of_copy"], tables=[table_of(results)], notes=notes, data=data)
