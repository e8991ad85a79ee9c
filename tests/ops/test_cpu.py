"""The Numba back end against the reference: equal to the bit, forward and update, whatever the batch looks like."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from campaigns import EFFORT, scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_python

from stoker import optim
from stoker.ops import Bags, Rounding, get_backend
from stoker.ops.reference import derive_key
from stoker.ops.space import make_space

pytest.importorskip("numba", reason="the CPU back end needs numba")

REFERENCE, CPU = (get_backend(name, torch.device("cpu")) for name in ("reference", "cpu"))
OPTIMIZERS = [
    optim.SGD(lr=0.1),
    optim.Adagrad(lr=0.1),
    optim.RowWiseAdagrad(lr=0.1),
    optim.Adam(lr=0.1),
    optim.AdamW(lr=0.1, weight_decay=0.3),
    optim.MomentumSGD(lr=0.1),
    optim.MomentumSGD(lr=0.1, momentum=0.7, nesterov=True),
    optim.FTRL(lr=0.1, l1=0.5, l2=0.2),
    optim.FTRL(lr=0.1, beta=0.0, weight_decay=0.1),
    optim.SGD(lr=0.1, weight_decay=0.01, clip_value=0.5, clip_norm=1.0),
    optim.Adam(lr=0.1, clip_norm=0.7),
    optim.Adam(lr=0.1, cow_clip=(0.3, 0.1)),
    optim.RowWiseAdagrad(lr=0.1, cow_clip=(0.0, 0.05), clip_value=1.0, clip_norm=2.0, weight_decay=0.01),
]


# Each width, rule and type is a kernel to compile: one width for each rule and type. In CI each rule has one type, and
# each width and kind of bags one pooling and one integer.
STEPPED = (0, 1, 3, 9, 10)  # rules with float32; the others have bfloat16
WIDTHS, POOLINGS, INTEGERS = (1, 3, 16, 100), ("sum", "mean", "weighted"), (torch.int32, torch.int64)


@st.composite
def cases(draw):
    number, fixed = draw(st.integers(0, len(OPTIMIZERS) - 1)), EFFORT < 1
    narrow = int(number not in STEPPED) if fixed else draw(st.integers(0, 1))
    dtype, width = (torch.float32, torch.bfloat16)[narrow], (number + (0 if fixed else narrow)) % len(WIDTHS)
    tables = draw(st.lists(st.sampled_from([1, 2, 7, 40, 3000]), min_size=1, max_size=4))
    shared = draw(st.booleans())  # whether two features address the first table
    features = [[f"f{i}", f"g{i}"] if i == 0 and shared else [f"f{i}"] for i in range(len(tables))]
    order = draw(st.permutations([name for names in features for name in names]))
    space = make_space([f"t{i}" for i in range(len(tables))], tables, features, order)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    batch, count = draw(st.integers(0, 40)), len(order)
    jagged = draw(st.booleans())
    integer = INTEGERS[(width // 2 + jagged) % 2] if fixed else draw(st.sampled_from(INTEGERS))
    skew = draw(st.sampled_from([1.0, 4.0]))  # 4: most lookups fall on a few rows
    if not jagged:
        ids = (torch.rand(batch, count, generator=generator) ** skew * space.limits).to(integer)
        offsets = None
    else:
        lengths = torch.randint(0, 4, (batch * count,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        limits = space.limits.repeat(batch).repeat_interleave(lengths)
        ids = (torch.rand(len(limits), generator=generator) ** skew * limits).to(integer)
    pooling = POOLINGS[(width + jagged) % 3] if fixed else draw(st.sampled_from(POOLINGS))
    weights = torch.randn(ids.numel(), generator=generator) if pooling == "weighted" else None
    return OPTIMIZERS[number], dtype, WIDTHS[width], space, Bags(ids, offsets, weights, pooling == "mean"), generator


@pytest.mark.slow
@settings(deadline=None, max_examples=scaled(40))
@given(
    number=st.sampled_from(STEPPED), count=st.integers(0, 60), threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_distinct_rows_step_as_in_an_update(number, count, threads, seed):
    optimizer, dim, generator = OPTIMIZERS[number], WIDTHS[number % len(WIDTHS)], torch.Generator().manual_seed(seed)
    rows, grad = torch.randperm(90, generator=generator)[:count], torch.randn(count, dim, generator=generator)
    weight = torch.randn(90, dim, generator=generator)
    state = {name: torch.rand(90, dim, generator=generator) for name in optimizer.state}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = []
        for backend in (REFERENCE, CPU):
            w, s = weight.clone(), {name: tensor.clone() for name, tensor in state.items()}
            backend.step_rows(w, s, rows, grad.clone(), optimizer.rule(1))
            results.append((w, *s.values()))
        assert all(torch.equal(expected, got) for expected, got in zip(*results, strict=True))
    finally:
        torch.set_num_threads(before)


def test_rows_outside_their_table_do_not_step():
    weight = torch.zeros(3, 16)
    for rows in ([0, 3], [-1, 2]):
        with pytest.raises(IndexError, match="of 3 in"):
            CPU.step_rows(weight, {}, torch.tensor(rows), torch.ones(2, 16), optim.SGD(lr=0.1).rule(0))
    assert not weight.any()


@pytest.mark.slow
@settings(deadline=None, max_examples=scaled(100))
@given(case=cases(), threads=st.sampled_from([1, 2, 3]))
def test_equals_the_reference_to_the_bit(case, threads):
    optimizer, dtype, dim, space, bags, generator = case
    total = space.num_rows
    weight = torch.randn(total, dim, generator=generator).to(dtype)
    shapes = {"row": (total, dim), "scalar": (total,)}
    state = {name: torch.rand(shapes[kind], generator=generator) for name, kind in optimizer.state.items()}
    grad = torch.randn(bags.batch_size(len(space.features)), len(space.features), dim, generator=generator)
    rounding = Rounding(tuple(derive_key(1, name) for name in space.names))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = []
        for backend in (REFERENCE, CPU):
            w, s = weight.clone(), {name: tensor.clone() for name, tensor in state.items()}
            pooled = backend.lookup(w, space, bags).clone()
            for tick in (0, 1):
                backend.update(w, s, space, bags, grad, optimizer.rule(tick), rounding)
            results.append((pooled, w, *s.values()))
        for expected, got in zip(*results, strict=True):
            assert torch.equal(expected, got)
        if bags.weights is not None and bags.ids.numel():
            torch.testing.assert_close(
                CPU.weight_gradient(weight, space, bags, grad), REFERENCE.weight_gradient(weight, space, bags, grad),
                rtol=1e-4, atol=1e-4,
            )  # fmt: skip
    finally:
        torch.set_num_threads(before)


@given(tables=st.lists(st.integers(1, 300), min_size=1, max_size=6), threads=st.integers(1, 9))
def test_every_run_of_16_rows_has_one_part_of_its_table(tables, threads):
    from stoker.ops.cpu.backend import share_work

    items, parts = share_work(tables, [1.0] * len(tables), threads)
    found = sorted(map(tuple, items.tolist()))
    assert found == [(table, part) for table in range(len(tables)) for part in range(parts[table])]
    for table, rows in enumerate(tables):
        owners = {row >> 4 & (int(parts[table]) - 1) for row in range(rows)}
        assert owners == set(range(parts[table]))  # none without rows
    if threads == 1:
        assert parts.max() == 1
    elif min(tables) >= 64 * threads:
        assert len(items) >= 2 * threads


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 16, 65, 200])
def test_initial_rows(dim, dtype):
    ours, expected = torch.empty(5000, dim, dtype=dtype), torch.empty(5000, dim, dtype=dtype)
    CPU.init_rows(ours, 77, 2**31, 0.25)
    REFERENCE.init_rows(expected, 77, 2**31, 0.25)
    assert torch.equal(ours, expected)


def test_one_row_many_times_and_hash_collisions():
    """All lookups on rows that collide in a small hash table, and a table of one row."""
    space = make_space(["a", "b"], [1, 10_000_000], [["a"], ["b"]], ["a", "b"])
    collide = torch.arange(512, dtype=torch.int64) * 16384 % 10_000_000
    ids = torch.stack([torch.zeros(512, dtype=torch.int64), collide], 1)
    weight = torch.zeros(space.num_rows, 1)
    expected = torch.zeros(space.num_rows, 1)
    grad = torch.randn(512, 2, 1)
    for backend, target in ((REFERENCE, expected), (CPU, weight)):
        backend.update(target, {}, space, Bags(ids), grad, optim.SGD(lr=1.0).rule(0), Rounding(()))
    assert torch.equal(weight, expected)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [-1, 7, 2**31 + 5])
@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("backend", [REFERENCE, CPU], ids=["reference", "cpu"])
def test_ids_outside_the_table_are_refused(bad, jagged, backend):
    space = make_space(["first", "second"], [7, 9], [["first"], ["second"]], ["first", "second"])
    ids = torch.zeros(4, 2, dtype=torch.int64)
    ids[2, 0] = bad
    bags = Bags(ids.reshape(-1), torch.arange(9)) if jagged else Bags(ids)
    with pytest.raises(IndexError, match=rf"example 2 has id {bad} in feature 'first'.*ids 0 to 6"):
        backend.lookup(torch.zeros(16, 4), space, bags)


@pytest.mark.slow
def test_row_addresses_beyond_32_bits():
    """Rows times columns above 2**31: 64-bit addresses, on memory that is only touched where it is used."""
    import numpy as np

    rows, dim = 70_000_000, 32  # 2.24e9 elements, 9 GB of address space, of which a few pages are touched
    try:
        memory = np.zeros((rows, dim), dtype=np.float32)
    except MemoryError:
        pytest.skip("this machine does not hand out 9 GB of address space")
    weight = torch.from_numpy(memory)
    space = make_space(["small", "huge"], [5, rows - 5], [["small"], ["huge"]], ["small", "huge"])
    ids = torch.tensor([[1, rows - 6], [4, 2**26 + 3], [1, rows - 6]])
    grad = torch.arange(1.0, 7.0).reshape(3, 2, 1).repeat(1, 1, dim)
    CPU.update(weight, {}, space, Bags(ids), grad, optim.SGD(lr=1.0).rule(0), Rounding(()))
    assert weight[rows - 1].tolist() == [-8.0] * dim  # 2 + 6
    assert weight[2**26 + 8].tolist() == [-4.0] * dim
    assert weight[1].tolist() == [-6.0] * dim
    # Where 32-bit arithmetic would have landed:
    wrapped = ((rows - 1) * dim - 2**32) // dim if (rows - 1) * dim > 2**32 else ((rows - 1) * dim) % 2**31 // dim
    assert weight[wrapped].abs().sum() == 0
    pooled = CPU.lookup(weight, space, Bags(ids))
    assert pooled[0, 1].tolist() == [-8.0] * dim


@pytest.mark.slow
def test_kernels_are_kept_on_disk():
    """A second process finds every kernel compiled: nothing in a kernel's cache key changes between processes."""
    code = (
        "import torch; from stoker.ops.codegen.jit import _KernelFiles; saved = []\n"
        "real = _KernelFiles.save\n"
        "def save(self, key, data): saved.append(self._name(key)); real(self, key, data)\n"
        "_KernelFiles.save = save\n"
        "import stoker; from stoker.ops.interaction import dot_interaction\n"
        "t = stoker.EmbeddingTables([stoker.TableConfig(name='t', num_embeddings=9, embedding_dim=4)],"
        " optimizer=stoker.SGD(lr=0.1))\n"
        "out = dot_interaction(torch.zeros(3, 4), t(torch.zeros(3, 1, dtype=torch.int64)))\n"
        "out.sum().backward(); print('SAVED', saved)"
    )
    first = run_python("-c", code)  # a fork
    assert first.returncode == 0, first.stderr
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert second.stdout.strip().endswith("SAVED []")


@pytest.mark.slow
def test_without_torchs_openmp_the_team_gives_the_same(monkeypatch):
    """Where torch's OpenMP is not GNU's (macOS, Windows), kernels run on a team of Python threads."""
    from stoker.ops.codegen import native

    space = make_space(["a", "b"], [50, 3000], [["a"], ["b"]], ["a", "b"])
    ids = torch.stack([torch.randint(0, 50, (400,)), torch.randint(0, 3000, (400,))], 1)
    start, grad = torch.randn(3050, 16), torch.randn(400, 2, 16)
    results = []
    for address in (native._gomp_parallel(), 0):
        monkeypatch.setattr(native, "_gomp_parallel", lambda address=address: address)
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            weight = start.clone()
            CPU.update(weight, {}, space, Bags(ids), grad, optim.SGD(lr=0.1).rule(0), Rounding(()))
            results += [weight, CPU.lookup(weight, space, Bags(ids)).clone()]
        finally:
            torch.set_num_threads(before)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    with pytest.raises(IndexError, match="holds the ids 0 to 49"):
        CPU.lookup(start, space, Bags(torch.tensor([[50, 0]])))
    arguments = native.arguments

    def mark(p):
        (seen,) = arguments(p)
        seen[0] += 1

    seen = np.zeros(1, np.int64)
    native.Kernel(mark).run(seen, threads=0)  # what callers get for no rows
    assert seen[0] == 1
