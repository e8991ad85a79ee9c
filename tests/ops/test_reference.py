"""The reference operations against textbooks: PyTorch's own modules and optimizers."""

from __future__ import annotations

import math

import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stoker import optim
from stoker.ops import reference


def bags_of(lengths: list[int], rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, rows, (sum(lengths),), generator=generator)
    return ids, torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int64)


@settings(deadline=None, max_examples=scaled(60))
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    rows=st.integers(1, 20),
    dim=st.sampled_from([1, 3, 16, 17]),
    mode=st.sampled_from(["sum", "mean", "weighted"]),
    seed=st.integers(0, 2**20),
)
def test_lookup_and_gradient_equal_embedding_bag_on_integers(lengths, rows, dim, mode, seed):
    ids, offsets = bags_of(lengths, rows, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.randint(-8, 8, (rows, dim), generator=generator).float()
    grad = torch.randint(-4, 4, (len(lengths), dim), generator=generator).float()
    weights = torch.randint(-2, 3, (len(ids),), generator=generator).float() if mode == "weighted" else None
    bag = nn.EmbeddingBag.from_pretrained(
        weight.clone(), freeze=False, mode="mean" if mode == "mean" else "sum", include_last_offset=True
    )
    expected = bag(ids, offsets, per_sample_weights=weights)
    expected.backward(grad)
    pooled = reference.lookup(weight, ids, offsets, weights, mean=mode == "mean")
    distinct, total = reference.distinct_gradients(ids, offsets, weights, grad, mean=mode == "mean")
    dense = torch.zeros_like(weight)
    dense[distinct] = total
    if mode == "mean":  # thirds are not exact
        torch.testing.assert_close(pooled, expected)
        torch.testing.assert_close(dense, bag.weight.grad)
    else:
        assert torch.equal(pooled, expected)
        assert torch.equal(dense, bag.weight.grad)


def test_duplicates_are_summed_in_order_of_occurrence():
    # 1e8 absorbs 1.0 in float32, so the order decides the sum.
    grad = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    rows = torch.tensor([3, 3, 3, 3])
    assert reference.distinct_gradients(rows, None, None, grad)[1].item() == 1.0
    assert reference.distinct_gradients(rows, None, None, grad[[0, 2, 1, 3]])[1].item() == 2.0


@pytest.mark.parametrize("count", [64, 65, 128, 129, 700])
def test_many_duplicates_are_summed_in_chunks(count: int) -> None:
    g = torch.Generator().manual_seed(count)
    grad = torch.randn(2 * count, 3, generator=g) * 10.0 ** torch.randint(-4, 5, (2 * count, 1), generator=g)
    rows = torch.stack([torch.full((count,), 5), torch.arange(count) % 3], 1).view(-1)
    total = torch.zeros(3)
    for first in range(0, count, reference.CHUNK):
        chunk = torch.zeros(3)
        for one in grad[::2][first : first + reference.CHUNK]:
            chunk = chunk + one
        total = total + chunk
    distinct, sums = reference.distinct_gradients(rows, None, None, grad)
    assert torch.equal(sums[distinct == 5][0], total)
    in_order = reference.add_in_order(torch.zeros(1, 3), torch.zeros(count, dtype=torch.int64), grad[::2])
    assert torch.equal(in_order[0], total) == (count <= 65)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_rules_equal_torch_optim_when_every_row_is_touched(kind, decay):
    torch.manual_seed(0)
    weight = torch.randn(5, 7)
    parameter = nn.Parameter(weight.clone())
    textbook: torch.optim.Optimizer
    own: optim.RowOptimizer
    if kind == "sgd":
        textbook, own = (
            torch.optim.SGD([parameter], lr=0.1, weight_decay=decay),
            optim.SGD(lr=0.1, weight_decay=decay),
        )
    elif kind == "adagrad":
        textbook = torch.optim.Adagrad([parameter], lr=0.1, eps=1e-8, weight_decay=decay)
        own = optim.Adagrad(lr=0.1, weight_decay=decay)
    else:
        textbook = torch.optim.Adam([parameter], lr=0.1, weight_decay=decay)
        own = optim.Adam(lr=0.1, weight_decay=decay)
    state = {name: torch.zeros_like(weight) for name in own.state}
    for tick in range(5):
        grad = torch.randn(5, 7)
        parameter.grad = grad.clone()
        textbook.step()
        reference.update_rows(weight, state, torch.arange(5), grad.clone(), own.rule(tick))
        torch.testing.assert_close(weight, parameter.detach(), rtol=2e-6, atol=2e-7)


def test_lazy_adam_equals_sparse_adam_but_for_where_epsilon_stands():
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(9, 4))
    weight = parameter.detach().clone()
    textbook = torch.optim.SparseAdam([parameter], lr=0.1, eps=1e-16)
    own = optim.Adam(lr=0.1, eps=1e-16)
    state = {name: torch.zeros_like(weight) for name in own.state}
    for tick in range(6):
        rows = torch.randperm(9)[:4].sort().values
        grad = torch.randn(4, 4)
        parameter.grad = torch.sparse_coo_tensor(rows.unsqueeze(0), grad, parameter.shape, check_invariants=False)
        textbook.step()
        reference.update_rows(weight, state, rows, grad.clone(), own.rule(tick))
    torch.testing.assert_close(weight, parameter.detach())


def test_rowwise_adagrad_by_hand():
    weight, state = torch.ones(2, 4), {"sum": torch.tensor([0.0, 3.0])}
    grad = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    reference.update_rows(weight, state, torch.tensor([1]), grad, optim.RowWiseAdagrad(lr=0.5).rule(0))
    assert state["sum"].tolist() == [0.0, 10.5]
    torch.testing.assert_close(weight[1], 1 - 0.5 * grad[0] / (math.sqrt(10.5) + 1e-8))
    assert torch.equal(weight[0], torch.ones(4))


def test_clipping_comes_before_decay():
    weight = torch.full((1, 4), 2.0)
    rule = optim.SGD(lr=1.0, clip_value=1.0, clip_norm=1.0, weight_decay=0.5).rule(0)
    reference.update_rows(weight, {}, torch.tensor([0]), torch.full((1, 4), 9.0), rule)
    assert torch.equal(
        weight, torch.full((1, 4), 2.0 - (0.5 + 1.0))
    )  # clipped to 1, to norm 1 (0.5 each), then + 0.5 * 2


@given(dim=st.integers(1, 70), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=scaled(40))
def test_row_norm_is_the_sum_of_squares(dim, seed):
    values = torch.randn(3, dim, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(reference.row_norm_squared(values), (values.double() ** 2).sum(1).float())


@pytest.mark.parametrize(("rows", "dim"), [(0, 400), (1, 273), (7, 2048)])
def test_the_norm_of_wide_rows_adds_in_the_same_order(rows, dim, monkeypatch):
    values = torch.randn(rows, dim, generator=torch.Generator().manual_seed(dim)) * torch.logspace(-3, 3, dim)
    found = reference.row_norm_squared(values)
    monkeypatch.setattr(reference, "_FEW", dim)
    assert torch.equal(found, reference.row_norm_squared(values))


def test_exact_sqrt_is_correctly_rounded():
    values = torch.rand(100_000)
    assert (reference.Tensors.sqrt(values).numpy() == values.numpy() ** 0.5).all()


def test_initial_rows_do_not_depend_on_the_range_asked_for():
    whole = reference.init_rows(5, 0, 100, 7, 0.3)
    parts = torch.cat([reference.init_rows(5, start, start + 10, 7, 0.3) for start in range(0, 100, 10)])
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, reference.init_rows(6, 0, 100, 7, 0.3))
    far = reference.init_rows(5, 2**33, 2**33 + 2, 7, 0.3)  # row * dim beyond 32 bits
    assert not torch.equal(far, whole[:2])


def test_initial_rows_are_uniform():
    values = reference.init_rows(1, 0, 20_000, 16, 0.5)
    assert values.abs().max() <= 0.5
    histogram = torch.histc(values, bins=20, min=-0.5, max=0.5)
    expected = values.numel() / 20
    assert ((histogram - expected) ** 2 / expected).sum() < 50  # chi-square, 19 degrees of freedom, p > 0.0001
    correlation = torch.corrcoef(torch.stack([values[:-1].flatten(), values[1:].flatten()]))[0, 1]
    assert abs(correlation) < 0.01


def test_stochastic_rounding_is_unbiased_and_keeps_what_fits():
    value = torch.full((200_000,), 1.0 + 1 / 512)  # a quarter of the way from 1 to 1 + 1/128
    bits = reference.counter_bits(3, torch.arange(len(value)))
    rounded = reference.stochastic_round(value, bits).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0078125}
    assert abs((rounded > 1).float().mean().item() - 0.25) < 0.005
    exact = torch.tensor([0.0, -2.5, 3e38, float("inf"), float("-inf"), float("nan")])
    assert torch.equal(reference.stochastic_round(exact[:2], bits[:2]), exact[:2].bfloat16())
    assert torch.equal(reference.stochastic_round(exact[3:], bits[:3]).isnan(), exact[3:].isnan())
    odd = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert reference.stochastic_round(odd.repeat(64), bits[:256]).isnan().all(), "the first and the last of both signs"


def test_random_keys_differ_by_purpose():
    keys = {reference.derive_key(seed, *labels) for seed in (0, 1) for labels in (("a",), ("b",), ("a", 1), ("a1",))}
    assert len(keys) == 8
    assert reference.derive_key(0, "x") == reference.derive_key(0, "x")


def test_interaction_is_the_strictly_lower_triangle():
    dense, embedded = torch.randn(2, 4), torch.randn(2, 3, 4)
    out = reference.dot_interaction(dense, embedded)
    assert out.shape == (2, 4 + 6)
    z = torch.cat([dense.unsqueeze(1), embedded], 1)
    expected = [z[1, i] @ z[1, j] for i in range(4) for j in range(i)]
    torch.testing.assert_close(out[1, 4:], torch.stack(expected))
