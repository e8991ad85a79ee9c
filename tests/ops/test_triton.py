"""The Triton back end against the reference, to the bit.

Every test here runs twice where it can: in Triton's interpreter on CPU tensors, in a process of its own
because the interpreter is chosen when Triton is imported, and natively on a CUDA device.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import EFFORT, scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.errors import ConfigError
from stoker.ops import AddressSpace, Backend, Bags, Rounding, RowRule, get_backend
from stoker.ops.rule import RULES, add_rule
from stoker.ops.space import make_space
from stoker.optim import Adagrad
from stoker.tables import EmbeddingTables, TableConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SOURCE = str(Path(__file__).parents[2] / "src")
SHAPES = {kind: rule.state for kind, rule in RULES.items() if rule.scope == "row"}
DIMS = st.sampled_from([1, 3, 4, 16, 17, 64, 100, 128])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
LAYOUTS = st.sampled_from(["one", "one weighted", "sum", "mean", "weighted"])

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed here"
)
REFERENCE = Backend()


def on_device(function: Any) -> Any:
    """Run in the interpreter's process, and natively where there is a GPU."""
    if INTERPRETED:
        return function
    return pytest.mark.gpu(
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here")(
            function
        )
    )


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


if not INTERPRETED:

    @pytest.mark.timeout(1200)  # a hundred tests in one, if it is the turn of all
    def test_interpreter() -> None:
        """The tests below, and those of copies of rows and of a whole step, on CPU tensors."""
        options = ["-x", "-p", "no:cacheprovider"]
        others = [str(Path(__file__).with_name(name)) for name in ("test_triton_row_copy.py", "test_gpu_step.py")]
        done = process("-m", "pytest", *options, __file__, *others, TRITON_INTERPRET="1")
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.slow
    @pytest.mark.parametrize("capability", ["80", "90"])
    def test_machine_code(capability: str, tmp_path: Path) -> None:
        """Every kernel compiles for GPUs that are not there, and rounds after every operation."""
        script = Path(__file__).with_name("triton_native.py")
        done = process(str(script), capability, "--few", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
        assert done.returncode == 0, done.stderr[-4000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert len(found["kernels"]) == 16
        assert found["variants"] >= 30
        assert found["inexact"] == {}
        assert {name: cost for name, cost in found["cost"].items() if cost["stack"]} == {}, "spilled registers"
        wide = {name for name, cost in found["cost"].items() if cost["wide loads"]}
        read = re.compile("interaction|lookup|copy_rows")
        assert {name for name in found["cost"] if read.search(name)} <= wide

    def test_cpu_is_refused_without_interpreter() -> None:
        with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
            get_backend("triton", torch.device("cpu"))


@pytest.fixture(autouse=True)
def _strict() -> Any:
    """Fresh integers are filled too; NumPy's floating-point warnings, which no GPU has, are off."""
    if not INTERPRETED:
        yield
        return
    torch.use_deterministic_algorithms(True)
    with np.errstate(all="ignore"):
        yield
    torch.use_deterministic_algorithms(False)


def make_backend(lazy: bool | None = False) -> Any:
    from stoker.ops.gpu.backend import TritonBackend

    return TritonBackend(lazy=lazy)


def space_of(small: int, large: int) -> AddressSpace:
    return make_space(["a", "b"], [small, large], [["x", "z"], ["y"]], ["x", "y", "z"])


def make_bags(space: AddressSpace, batch: int, layout: str, dtype: torch.dtype, g: torch.Generator) -> Bags:
    count = len(space.features)
    if layout.startswith("one"):
        lengths, offsets = torch.ones(batch * count, dtype=torch.int64), None
    else:
        lengths = torch.randint(0, 7, (batch * count,), generator=g)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(DEVICE)
    limits = torch.repeat_interleave(space.limits.repeat(batch), lengths)
    # Squaring makes low ids frequent, so that rows occur several times.
    ids = (torch.rand(len(limits), generator=g, dtype=torch.float64) ** 2 * limits).to(dtype)
    if offsets is None:
        ids = ids.view(batch, count)
    weights = torch.randn(ids.numel(), generator=g).to(DEVICE) if "weighted" in layout else None
    return Bags(ids.to(DEVICE), offsets, weights, layout == "mean")


def make_table(space: AddressSpace, dim: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return torch.randn(space.num_rows, dim, generator=g).to(dtype).to(DEVICE)


def make_state(space: AddressSpace, dim: int, kind: str, g: torch.Generator) -> dict[str, torch.Tensor]:
    shapes = {"row": (space.num_rows, dim), "scalar": (space.num_rows,)}
    made = {name: torch.rand(shapes[shape], generator=g) for name, shape in SHAPES[kind].items()}
    for tensor in made.values():
        tensor[::3] = 0.0  # of rows that no batch has touched
    return {name: tensor.to(DEVICE) for name, tensor in made.items()}


def same(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.dtype == right.dtype
    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def both_update(
    weight: torch.Tensor,
    state: dict[str, torch.Tensor],
    space: AddressSpace,
    bags: Bags,
    grad: torch.Tensor,
    rule: RowRule,
    keys: tuple[int, ...] = (7, -(2**62) + 1),
) -> None:
    """Update copies with both back ends, compare, and keep the result."""
    expected, expected_state = weight.clone(), {name: tensor.clone() for name, tensor in state.items()}
    REFERENCE.update(expected, expected_state, space, bags, grad, rule, Rounding(keys))
    make_backend().update(weight, state, space, bags, grad, rule, Rounding(keys))
    same(weight, expected)
    for name, tensor in state.items():
        same(tensor, expected_state[name])


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "fits"),
    [("3.6.0", "2.4.0", False), ("3.6.0", "2.3.5", True), ("3.7.0", "2.4.0", True), ("3.10.0+git1", "2.5.0rc1", True)],
)
def test_an_interpreter_that_cannot_run_with_this_numpy_is_refused(
    triton_version: str, numpy_version: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.ops.gpu import backend as triton_backend

    monkeypatch.setattr(triton_backend.triton, "__version__", triton_version)
    monkeypatch.setattr(triton_backend.np, "__version__", numpy_version)
    monkeypatch.setattr(triton_backend, "interpreted", lambda: True)
    if fits:
        triton_backend.TritonBackend()
        return
    with pytest.raises(ConfigError, match=r"Triton 3\.6\.0 .* NumPy 2\.4\.0.*pip install 'triton>=3\.7'"):
        triton_backend.TritonBackend()
    monkeypatch.setattr(triton_backend, "interpreted", lambda: False)
    triton_backend.TritonBackend()  # compiled kernels do not care


@on_device
def test_a_kernel_that_writes_nothing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.ops.gpu import backend as triton_backend

    class Nothing:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **named: None

    backend, space = make_backend(), space_of(4, 50)
    monkeypatch.setattr(triton_backend.kernels, "lookup_kernel", Nothing())
    bags = Bags(torch.zeros(2, 3, dtype=torch.int64, device=DEVICE))
    assert backend.lookup(torch.ones(54, 4, device=DEVICE), space, bags).isnan().all()


@on_device
@settings(max_examples=scaled(40), deadline=None, derandomize=True)
@given(DIMS, DTYPES, LAYOUTS, st.sampled_from([torch.int32, torch.int64]), st.integers(0, 40), st.integers(1, 5))
def test_lookup(dim: int, dtype: torch.dtype, layout: str, index: torch.dtype, batch: int, small: int) -> None:
    g = torch.Generator().manual_seed(batch)
    space = space_of(small, 30)
    weight = make_table(space, dim, dtype, g)
    bags = make_bags(space, batch, layout, index, g)
    pooled = make_backend().lookup(weight, space, bags)
    assert pooled.shape == (batch, 3, dim)
    same(pooled, REFERENCE.lookup(weight, space, bags))


@on_device
@pytest.mark.parametrize("layout", ["one", "weighted"])
def test_a_rule_without_a_kernel_steps_as_the_reference(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "own of tests", None)  # goes with the test
    add_rule("own of tests", lambda x, c, w, g, mean: (w - (mean + g) * c.lr, mean + g), {"mean": "row"})
    g = torch.Generator().manual_seed(1)
    space = space_of(4, 30)
    weight, state = make_table(space, 8, torch.bfloat16, g), {"mean": torch.zeros(space.num_rows, 8, device=DEVICE)}
    rule = RowRule(kind="own of tests", lr=0.1)
    bags = make_bags(space, 20, layout, torch.int64, g)
    both_update(weight, state, space, bags, torch.randn(20, 3, 8, generator=g).to(DEVICE), rule)
    assert state["mean"].any()


@on_device
@settings(max_examples=scaled(60), deadline=None, derandomize=True)
@given(
    DIMS,
    DTYPES,
    LAYOUTS,
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from(
        [{}, {"clip_value": 0.5}, {"clip_norm": 1.5}, {"weight_decay": 0.1}, {"cow_ratio": 0.3, "cow_floor": 0.1}]
    ),
    st.integers(0, 40),
    st.integers(1, 5),
)
def test_update(
    dim: int,
    dtype: torch.dtype,
    layout: str,
    kind: str,
    extra: dict[str, float],
    batch: int,
    small: int,
) -> None:
    g = torch.Generator().manual_seed(batch * 8 + dim)
    space = space_of(small, 30)
    weight = make_table(space, dim, dtype, g)
    state = make_state(space, dim, kind, g)
    for step in (1, 2):
        rule = RowRule(kind, 0.1 * step, 1e-8, 0.9, 0.999, 1 - 0.9**step, 1 - 0.999**step, **extra)
        rule = rule._replace(keep=0.95, l1=0.3, l2=0.1)
        grad = torch.randn(batch, 3, dim, generator=g).to(DEVICE)
        both_update(weight, state, space, make_bags(space, batch, layout, torch.int32, g), grad, rule)


@on_device
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_distinct_rows_step_without_a_search(kind: str) -> None:
    """More rows than of one row's gradients are summed at a time."""
    g, space = torch.Generator().manual_seed(3), space_of(1, 150)
    weight, state = make_table(space, 5, torch.float32, g), make_state(space, 5, kind, g)
    rows, grad = torch.randperm(151, generator=g)[:90].to(DEVICE), torch.randn(90, 5, generator=g).to(DEVICE)
    expected, expected_state = weight.clone(), {name: tensor.clone() for name, tensor in state.items()}
    rule = RowRule(kind, 0.1, 1e-8, 0.9, 0.999, 1 - 0.9, 1 - 0.999)
    REFERENCE.step_rows(expected, expected_state, rows, grad, rule)
    make_backend().step_rows(weight, state, rows, grad, rule)
    same(weight, expected)
    for name, tensor in state.items():
        same(tensor, expected_state[name])


@on_device
@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_update_with_all_options_and_low_precision_gradient(kind: str) -> None:
    g = torch.Generator().manual_seed(1)
    space = space_of(4, 50)
    weight, state = make_table(space, 48, torch.float32, g), make_state(space, 48, kind, g)
    rule = RowRule(kind, 0.1, 1e-8, 0.9, 0.999, 0.1, 0.001, weight_decay=0.01, clip_value=1.0, clip_norm=2.0)
    rule = rule._replace(cow_ratio=0.5, cow_floor=1e-3)
    grad = torch.randn(30, 5, 50, generator=g).to(DEVICE)[:, 1:4, :48]  # of several groups' joint output
    others = grad.to(torch.bfloat16), grad.transpose(0, 1).contiguous().transpose(0, 1)
    for each in (grad, *(others if kind == "adam" else ())):
        both_update(weight, state, space, make_bags(space, 30, "sum", torch.int64, g), each, rule)


@on_device
@pytest.mark.parametrize(
    ("repeats", "dim"),
    # 2200: more chunks than are summed in one turn of a loop, which is slow to interpret: in CI.
    [*((repeats, 17) for repeats in (63, 64, 65, 128, 129)), (65, 1), (129, 64),
     *([(2200, 17)] if EFFORT >= 0.25 or not INTERPRETED else []),
     *(() if INTERPRETED else ((2200, 1), (2200, 64)))],
)  # fmt: skip
def test_popular_row_is_summed_in_order(repeats: int, dim: int) -> None:
    """Rows above and below the length of a chunk, with a long row next to them; the order of addition shows."""
    g = torch.Generator().manual_seed(repeats)
    space = make_space(["a"], [9], [["x"]], ["x"])
    others = torch.randint(0, 3, (50,), generator=g)
    ids = torch.cat([torch.full((repeats,), 3), torch.full((repeats + 3,), 4), others, others + 5])
    ids = ids[torch.randperm(len(ids), generator=g)].view(-1, 1).to(DEVICE)
    scale = 10.0 ** torch.randint(-4, 5, (len(ids), 1, 1), generator=g)
    grad = (torch.randn(len(ids), 1, dim, generator=g) * scale).to(DEVICE)
    rule = RowRule("sgd", 1.0)
    weight = torch.zeros(9, dim, device=DEVICE)
    both_update(weight, {}, space, Bags(ids), grad, rule)
    if repeats == 129:
        backwards = torch.zeros(9, dim, device=DEVICE)
        make_backend().update(backwards, {}, space, Bags(ids.flip(0)), grad.flip(0), rule, Rounding(()))
        assert not torch.equal(weight[3], backwards[3])


@on_device
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("jagged", [False, True])
def test_several_widths_at_once(jagged: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of two widths and poolings, one of them with a row of more than 64 lookups."""
    from stoker.ops.gpu.backend import TritonBackend

    g = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, 4, (70, 4), generator=g) if jagged else torch.ones(70, 4, dtype=torch.int64)
    limits = torch.tensor([40, 300, 1, 40]).repeat(70).repeat_interleave(lengths.view(-1))
    ids = (torch.rand(len(limits), generator=g) ** 3 * limits).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
    given = [each.to(DEVICE) for each in ((ids, offsets) if jagged else (ids.view(70, 4),))]
    grads, results, updates = torch.randn(2, 70, 2 * 4 + 2 * 20, generator=g).to(DEVICE), [], []
    kept = TritonBackend.update_parts
    monkeypatch.setattr(TritonBackend, "update_parts", lambda *each: (updates.append(1), kept(*each)))
    for backend in ("reference", "triton"):
        tables = EmbeddingTables(
            [
                TableConfig(name="a", num_embeddings=300, embedding_dim=4, dtype=dtype),
                TableConfig(name="b", num_embeddings=40, embedding_dim=20, features=("b0", "b1"), dtype=dtype),
                TableConfig(name="c", num_embeddings=1, embedding_dim=4, pooling="mean", dtype=dtype),
            ],
            optimizer=Adagrad(lr=0.1), features=["b0", "a", "c", "b1"], backend=backend, device=DEVICE,
        )  # fmt: skip
        outs = []
        for grad in grads:
            outs.append(tables(*given))
            outs[-1].backward(grad)
        results.append([*outs, *(tables.rows(name) for name in "abc"), *tables.state_dict().values()])
    assert len(updates) == 2
    for expected, got in zip(*results, strict=True):
        assert torch.equal(expected, got) if isinstance(got, torch.Tensor) else expected == got
    given[0].view(-1)[3] = 300
    with pytest.raises(IndexError, match="has id 300 in feature"):
        tables(*given), get_backend("triton", DEVICE).synchronize()


@on_device
@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_not_a_number_stays_in_its_row(kind: str) -> None:
    g = torch.Generator().manual_seed(2)
    space = space_of(4, 50)
    for dtype in (torch.float32, torch.bfloat16):
        weight, state = make_table(space, 20, dtype, g), make_state(space, 20, kind, g)
        grad = torch.randn(10, 3, 20, generator=g).to(DEVICE)
        grad[3, 1, 4], grad[5, 1, 19] = float("nan"), float("inf")
        rule = RowRule(kind, 0.1, 1e-8, 0.9, 0.999, 0.1, 0.001, clip_value=1e4)
        bags = make_bags(space, 10, "one", torch.int32, g)
        both_update(weight, state, space, bags, grad, rule)
        assert int(weight.isnan().any(1).sum()) == 1


@on_device
@settings(max_examples=scaled(30), deadline=None, derandomize=True)
@given(DIMS, DTYPES, st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**33), st.floats(1e-6, 10))
def test_init_rows(dim: int, dtype: torch.dtype, key: int, start: int, scale: float) -> None:
    out, expected = (torch.full((70, dim), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    make_backend().init_rows(out, key, start, scale)
    REFERENCE.init_rows(expected, key, start, scale)
    same(out, expected)


@on_device
@pytest.mark.parametrize("layout", ["one weighted", "weighted"])
@pytest.mark.parametrize("dim", [1, 17, 128, 200])
def test_weight_gradient(layout: str, dim: int) -> None:
    """Close, not equal: the reference leaves the order of a dot product to torch."""
    g = torch.Generator().manual_seed(3)
    space = space_of(4, 50)
    weight = make_table(space, dim, torch.float32, g)
    bags = make_bags(space, 20, layout, torch.int32, g)
    grad = torch.randn(20, 3, dim, generator=g).to(DEVICE)
    expected = REFERENCE.weight_gradient(weight, space, bags, grad)
    torch.testing.assert_close(
        make_backend().weight_gradient(weight, space, bags, grad), expected, rtol=1e-4, atol=1e-4
    )


@on_device
@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
@pytest.mark.parametrize("layout", ["one", "sum"])
def test_id_outside_its_table(bad: int, layout: str) -> None:
    """The error is the reference's, and the neighbouring table stays as it was."""
    g = torch.Generator().manual_seed(4)
    space = space_of(4, 50)
    weight = make_table(space, 16, torch.float32, g)
    before = weight.clone()
    bags = make_bags(space, 20, layout, torch.int32, g)
    bags.ids.view(-1)[-1] = bad
    if layout == "sum":
        bags.offsets[-2] = bags.offsets[-1] - 1  # so that the last id is the last bag's
    with pytest.raises(IndexError) as expected:
        REFERENCE.lookup(weight, space, bags)
    backend = make_backend()
    with pytest.raises(IndexError) as found:
        backend.lookup(weight, space, bags)
    assert str(found.value) == str(expected.value)
    with pytest.raises(IndexError):
        backend.update(weight, {}, space, bags, torch.ones(20, 3, 16, device=DEVICE), RowRule("sgd", 1.0), Rounding(()))
    same(weight, before)


@on_device
def test_late_report() -> None:
    """Nothing is written from the bad batch on; the error comes with a later call, once, and work goes on."""
    space = space_of(4, 50)
    weight = torch.zeros(54, 16, device=DEVICE)
    good = Bags(torch.zeros(2, 3, dtype=torch.int64, device=DEVICE))
    bad = Bags(torch.tensor([[0, 0, 0], [1, 50, 1]], device=DEVICE))
    grad, rule = torch.ones(2, 3, 16, device=DEVICE), RowRule("sgd", 1.0)
    backend = make_backend(lazy=True)
    out = backend.lookup(weight, space, bad)
    assert not out[1, 1].any()
    with pytest.raises(IndexError, match="example 1 has id 50 in feature 'y'"):
        backend.synchronize()
    backend.synchronize()
    backend.lookup(weight, space, bad)
    with pytest.raises(IndexError, match="example 1 has id 50"):  # noqa: PT012
        backend.update(weight, {}, space, bad, grad, rule, Rounding(()))
        assert not weight.any()
        backend.synchronize()
    backend.update(weight, {}, space, bad, grad, rule, Rounding(()))
    bad.ids.zero_()
    with pytest.raises(IndexError, match="position 4 of its ids"):
        backend.synchronize()
    assert not weight.any()
    backend.update(weight, {}, space, good, grad, rule, Rounding(()))
    backend.synchronize()
    assert weight.any()


@on_device
@pytest.mark.parametrize(("rows", "dim"), [(2**25 + 3, 64), (2**31 + 3, 1)])
def test_addresses_beyond_32_bits(rows: int, dim: int, tmp_path: Path) -> None:
    """Rows times columns above 2**31, in a sparse file; with 2**31 rows the ids themselves need 64 bits."""
    if INTERPRETED:
        array = np.memmap(tmp_path / "rows", dtype=np.float32, mode="w+", shape=(rows, dim))
        weight = torch.from_numpy(array)
    elif torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("less than 12 GiB of GPU memory are free")
    else:
        weight = torch.zeros(rows, dim, device=DEVICE)
    space = make_space(["a", "b"], [5, rows - 5], [["x"], ["y"]], ["x", "y"])
    last = rows - 6
    ids = torch.tensor([[0, last], [4, last], [4, 0]], device=DEVICE)
    grad = torch.arange(1.0, 7.0, device=DEVICE).view(3, 2, 1).expand(3, 2, dim).contiguous()
    backend = make_backend()
    backend.update(weight, {}, space, Bags(ids), grad, RowRule("sgd", 1.0), Rounding(()))
    touched = weight[[0, 1, 4, 5, 6, rows - 2, rows - 1], 0].tolist()
    assert touched == [-1.0, 0.0, -8.0, -6.0, 0.0, 0.0, -6.0]
    pooled = backend.lookup(weight, space, Bags(ids))
    assert pooled[:, :, -1].tolist() == [[-1.0, -6.0], [-8.0, -6.0], [-8.0, -6.0]]


@on_device
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tables_train_alike(dtype: Any) -> None:
    """Three steps of whole tables on both back ends: the same losses and rows."""
    runs = []
    for name in ("reference", "triton"):
        tables = EmbeddingTables(
            [TableConfig(name="u", num_embeddings=20, embedding_dim=8, dtype=dtype, pooling="mean")],
            optimizer=Adagrad(lr=0.1),
            device=DEVICE,
            backend=name,
        )
        g = torch.Generator().manual_seed(5)
        losses = []
        for _ in range(3):
            ids = torch.randint(0, 20, (40,), generator=g).to(DEVICE)
            loss = (tables(ids, torch.arange(0, 41, 4, device=DEVICE)) - 1.0).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
        runs.append((losses, tables.rows("u")))
    assert runs[0][0] == runs[1][0]
    assert runs[0][0][2] < runs[0][0][0]
    same(runs[0][1], runs[1][1])
