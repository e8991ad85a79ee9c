"""LAMB's kernels against their definition: equal to the bit, directions, rows and sums."""

from __future__ import annotations

import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import LAMB, Adam
from stoker.ops import Rounding, get_backend, lamb
from stoker.ops.reference import update_rows
from stoker.ops.space import make_space, slot_space

pytest.importorskip("numba", reason="the CPU back end needs numba")

REFERENCE, CPU = (get_backend(name, torch.device("cpu")) for name in ("reference", "cpu"))
LAMBS = [
    LAMB(lr=0.1), LAMB(lr=0.1, clip_value=0.5, clip_norm=1.0, cow_clip=(0.4, 0.01), weight_decay=0.01, l2=0.02),
]  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, max_examples=scaled(40))
@given(
    # Each width is two kernels to compile, or more.
    dim=st.sampled_from([4, 65]), count=st.integers(0, 700), optimizer=st.sampled_from(LAMBS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), slotted=st.booleans(), threads=st.sampled_from([1, 3]),
    scale=st.sampled_from([1e-6, 1.0, 1e25]), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_equals_the_reference_to_the_bit(dim, count, optimizer, dtype, slotted, threads, scale, seed):
    g = torch.Generator().manual_seed(seed)
    space = make_space(["a", "b"], [400, 600], [["x"], ["y"]], ["x", "y"])
    rows = torch.randperm(1000, generator=g)[:count]
    rounding = Rounding((5, -7))
    if slotted:
        local = torch.randint(0, 2**40, (1000,), generator=g)
        space = slot_space(space, 1000)
        rounding = Rounding((5, -7), (torch.arange(1000) >= 400).to(torch.int64), local)
    weight = (scale * torch.randn(1000, dim, generator=g)).to(dtype)
    state = {"exp_avg": torch.randn(1000, dim, generator=g), "exp_avg_sq": torch.rand(1000, dim, generator=g)}
    grad = torch.randn(count, dim, generator=g)
    which = torch.arange(count).repeat_interleave(torch.randint(1, 50, (count,), generator=g))
    touched = lamb.Touched(rows, (rows >= 400).to(torch.int64), 2, which)
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        for backend in (REFERENCE, CPU):
            w, s = weight.clone(), {name: tensor.clone() for name, tensor in state.items()}
            outcome = []
            for tick in (0, 1):
                rule = optimizer.rule(tick)
                directions, lengths = backend.lamb_direct(w, s, touched, grad.clone(), rule)
                grown = backend.lamb_move(w, touched, directions, [0.3, 1.7], rule, rounding, space)
                outcome += [directions, lengths, grown]
            found.append([*outcome, w, *s.values()])
    finally:
        torch.set_num_threads(before)
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got) if isinstance(expected, torch.Tensor) else expected == got


@pytest.mark.slow
def test_without_trust_l2_is_adams_weight_decay():
    """Both go through the moments, so both see the same gradients; only the order of two factors differs."""
    g = torch.Generator().manual_seed(1)
    weight, rows = torch.randn(50, 8, generator=g), torch.arange(0, 50, 2)
    touched = lamb.Touched(rows, rows * 0, 1, torch.arange(25))
    space = make_space(["a"], [50], [["x"]], ["x"])
    adam, plain, ours = (weight.clone() for _ in range(3))
    states = [{"exp_avg": torch.zeros(50, 8), "exp_avg_sq": torch.zeros(50, 8)} for _ in range(3)]
    for tick in range(5):
        grad = 0.01 * torch.randn(25, 8, generator=g)
        rule = Adam(lr=0.1, weight_decay=0.05, eps=1e-6).rule(tick)
        update_rows(adam, states[0], rows, grad, rule)
        for w, state, l2 in ((plain, states[1], 0.0), (ours, states[2], 0.05)):
            rule = LAMB(lr=0.1, l2=l2).rule(tick)
            directions, _ = CPU.lamb_direct(w, state, touched, grad.clone(), rule)
            CPU.lamb_move(w, touched, directions, [1.0], rule, Rounding((0,)), space)
    torch.testing.assert_close(ours, adam, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states[2], states[0], rtol=1e-5, atol=1e-8)
    assert (plain - adam).abs().max() > 0.05


def test_more_rows_than_their_integers_may_sum_go_to_the_definition(monkeypatch):
    asked = []
    monkeypatch.setattr("stoker.ops.cpu.backend.ROWS", 3)
    monkeypatch.setattr(
        lamb, "direct", lambda weight, state, found, *rest: asked.append(len(found.rows)) or torch.zeros(4, 2)
    )
    state = {"exp_avg": torch.zeros(9, 2), "exp_avg_sq": torch.zeros(9, 2)}
    rows = torch.arange(4)
    CPU.lamb_direct(
        torch.zeros(9, 2), state, lamb.Touched(rows, rows * 0, 1, rows), torch.zeros(4, 2), LAMBS[0].rule(0)
    )
    assert asked == [4]
