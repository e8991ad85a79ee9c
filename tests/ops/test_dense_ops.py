"""Interaction, layer chain, arena and thread team."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stoker.ops import mlp as ops_mlp
from stoker.ops import reference
from stoker.ops.codegen.threads import Team
from stoker.ops.cpu.arena import Arena, is_foreign
from stoker.ops.interaction import dot_interaction
from stoker.ops.loss import binary_cross_entropy
from stoker.ops.mlp import mlp, normed_mlp


@pytest.mark.slow
@settings(deadline=None, max_examples=scaled(40))
@given(
    batch=st.integers(0, 70),
    features=st.integers(1, 40),
    dim=st.sampled_from([1, 4, 16, 20, 64, 130]),
    align=st.sampled_from([1, 8, 16]),
    seed=st.integers(0, 1000),
)
def test_interaction_equals_the_reference(batch, features, dim, align, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((batch, dim), (batch, features, dim))
    ]
    padded, expected = dot_interaction(*inputs, align=align), reference.dot_interaction(*inputs)
    out, zeros = padded[:, : expected.shape[1]], padded[:, expected.shape[1] :]
    assert not batch or (padded.shape[1] % align == 0 and zeros.shape[1] < align and not zeros.any())
    grad = torch.randn(expected.shape, generator=generator)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_interaction_is_exact_on_integers():
    dense = torch.randint(-4, 5, (9, 16)).float().requires_grad_()
    embedded = torch.randint(-4, 5, (9, 26, 16)).float().requires_grad_()
    out, expected = dot_interaction(dense, embedded), reference.dot_interaction(dense, embedded)
    assert out.shape == (9, 16 + 351)
    assert torch.equal(out, expected)
    grad = torch.randint(-3, 4, expected.shape).float()
    for ours, theirs in zip(
        torch.autograd.grad(out, (dense, embedded), grad),
        torch.autograd.grad(expected, (dense, embedded), grad),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.fixture(params=[ops_mlp._Products, ops_mlp._OneDNN], ids=["torch", "onednn"])
def products(request, monkeypatch):
    """Both libraries, whichever this processor would choose."""
    if request.param is ops_mlp._OneDNN and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(ops_mlp, "_products", lambda *_: request.param)
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("relu_last", [False, True])
@pytest.mark.parametrize("sizes", [[3, 1], [13, 64, 16], [40, 32, 8, 1], [5, 1, 4]])
@pytest.mark.parametrize("batch", [1, 33])
def test_layer_chain_equals_linear_and_relu(sizes, relu_last, batch, products):
    torch.manual_seed(0)
    layers = [nn.Linear(i, o) for i, o in itertools.pairwise(sizes)]
    x = torch.randn(batch, sizes[0], requires_grad=True)
    expected = x
    for index, layer in enumerate(layers):
        expected = layer(expected)
        if relu_last or index < len(layers) - 1:
            expected = expected.relu()
    out = mlp(x, [layer.weight for layer in layers], [layer.bias for layer in layers], relu_last=relu_last)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(expected)
    parameters = [x, *(p for layer in layers for p in layer.parameters())]
    for ours, theirs in zip(
        torch.autograd.grad(out, parameters, grad),
        torch.autograd.grad(expected, parameters, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [511, 1023, 1024, 1700, 2**14 + 1500])
def test_weight_gradients_by_chunks_of_rows_are_those_of_all(batch):
    """Exactly so for whole numbers, whose sums have no rounding."""
    grad, x = (torch.randint(-3, 4, (batch, width)).float() for width in (5, 7))
    assert torch.equal(ops_mlp._by_chunks(grad, x), (grad.double().t() @ x.double()).float())
    assert torch.equal(ops_mlp._column_sums(x), x.double().sum(0).float())


def test_layer_chain_ignores_columns_of_zeros(products):
    torch.manual_seed(0)
    layers = [nn.Linear(13, 20), nn.Linear(20, 1)]
    parameters = [p for layer in layers for p in layer.parameters()]
    narrow = torch.randn(33, 13)
    results = []
    for x in (narrow, nn.functional.pad(narrow, (0, 3))):
        x.requires_grad_()
        out = mlp(x, [layer.weight for layer in layers], [layer.bias for layer in layers], relu_last=False)
        results.append((out, *torch.autograd.grad(out.sum(), [*parameters, x])))
    results[1] = (*results[1][:-1], results[1][-1][:, :13])
    for plain, padded in zip(*results, strict=True):
        assert plain.shape == padded.shape
        torch.testing.assert_close(plain, padded, rtol=1e-5, atol=1e-5)


def test_layer_chain_lets_nan_through(products):
    layers = [nn.Linear(4, 8), nn.Linear(8, 1)]
    x = torch.randn(5, 4)
    x[2, 1] = torch.nan
    out = mlp(x, [layer.weight for layer in layers], [layer.bias for layer in layers], relu_last=True)
    assert out.isnan().flatten().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("of", ["a weight", "a bias", "infinities"])
def test_layer_chain_lets_nan_of_its_layers_through(of, products):
    """Also where finite inputs and weights overflow to infinities of both signs, whose sum is undefined."""
    layers = [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(1.0)
        if of == "infinities":
            layers[0].weight.fill_(3e38)
            layers[1].weight[:, 0] = -1.0
        else:
            (layers[1].weight[3] if of == "a weight" else layers[1].bias)[2] = torch.nan
    parts = [layer.weight for layer in layers], [layer.bias for layer in layers]
    assert mlp(torch.full((5, 4), 9.0), *parts, relu_last=False).isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [(), (8,), (16, 1, 4)])
@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize("own", [(True,), (False,), (True, False), (False, True)])
@pytest.mark.parametrize("batch", [7, 1100])
def test_layer_chain_with_batch_norm_equals_torchs(hidden, columns, own, batch, products):
    torch.manual_seed(0)
    embedded, dense = torch.randn(batch, 5, requires_grad=True), torch.randn(batch, columns) + 2
    layers = [nn.Linear(*sizes) for sizes in itertools.pairwise((5 + columns, *hidden, 1))]
    sets = [[nn.BatchNorm1d(size) if size else None for size in (columns, *hidden)] for _ in range(2)]
    of_batch = [own[at % len(own)] for at in range(1 + len(hidden))]
    for norms, live in zip(zip(*sets, strict=True), of_batch, strict=True):
        for norm in filter(None, norms):
            torch.manual_seed(norm.num_features)
            for values in (norm.weight, norm.bias, norm.running_mean):
                nn.init.uniform_(values, 0.5, 1.5)
            norm.train(live)
    (first, *norms), (_, *mine) = sets
    x = embedded if first is None else torch.cat([embedded, first(dense)], 1)
    for layer, norm in zip(layers, norms, strict=False):
        x = norm(layer(x).relu())
    expected = layers[-1](x).squeeze(1)
    parts = [layer.weight for layer in layers], [layer.bias for layer in layers]
    out = normed_mlp(embedded, dense, parts, sets[1], of_batch)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    grad = torch.randn(batch) / batch
    found = []
    for result, chain in ((out, [sets[1][0], *mine]), (expected, sets[0])):
        parameters = [p for module in (*layers, *chain) if module is not None for p in module.parameters()]
        found.append(torch.autograd.grad(result, [embedded, *parameters], grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(*sets[::-1], strict=True):
        for name in ("running_mean", "running_var") if ours is not None else ():
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-5)


def test_layer_chain_with_batch_norm_lets_nan_through(products):
    layers, norm = [nn.Linear(4, 8), nn.Linear(8, 1)], nn.BatchNorm1d(8)
    x = torch.randn(5, 4)
    x[2, 1] = torch.nan
    parts = [layer.weight for layer in layers], [layer.bias for layer in layers]
    out = normed_mlp(x, torch.empty(5, 0), parts, [None, norm], [False, False])
    assert out.isnan().tolist() == [False, False, True, False, False]


def test_layer_chain_in_bfloat16_is_autocasts():
    torch.manual_seed(0)
    layers = [nn.Linear(20, 64), nn.Linear(64, 8), nn.Linear(8, 1)]
    x = torch.randn(33, 20, requires_grad=True)
    parameters = [x, *(p for layer in layers for p in layer.parameters())]
    results = []
    for ours in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if ours:
                out = mlp(x, [layer.weight for layer in layers], [layer.bias for layer in layers], relu_last=False)
            else:
                out = layers[2](layers[1](layers[0](x).relu()).relu())
        assert out.dtype == torch.bfloat16
        results.append((out, *torch.autograd.grad(out.float().sum(), parameters)))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_layer_chain_falls_back_for_doubles():
    double = nn.Linear(8, 8).double()
    assert torch.autograd.gradcheck(
        lambda v, w, b: mlp(v, [w], [b], relu_last=True),
        (torch.randn(3, 8).double().requires_grad_(), double.weight, double.bias),
    )


def test_idle_memory_of_batches_of_many_sizes_is_a_few_times_the_largest():
    arena, largest = Arena(), 2**23
    for size in range(2**19, largest, 2**16):
        arena.empty(size)
    assert sum(each.size for idle in arena._idle.values() for each in idle) < 8 * largest


def test_arena_returns_memory_only_when_nobody_refers_to_it():
    arena = Arena()
    first = arena.empty(1000, 30)
    view = first[3:5].clone(), first[3:5]
    view[1].fill_(7.0)
    address = first.data_ptr()
    del first
    other = arena.empty(1000, 30)
    assert other.data_ptr() != address  # the view still needs its memory
    other.fill_(1.0)
    assert view[1].eq(7.0).all()
    assert not is_foreign(view[1])
    array = view[1].numpy()
    del view
    assert is_foreign(torch.from_numpy(array))
    del array
    assert not is_foreign(torch.zeros(2))
    assert arena.empty(1000, 30).data_ptr() == address


def test_the_gradient_of_a_small_interaction_is_not_copied_for_the_rows():
    embedded = torch.randn(3, 2, 4, requires_grad=True)
    seen = []
    embedded.register_hook(lambda grad: seen.append(is_foreign(grad)))
    dot_interaction(torch.randn(3, 4), embedded).sum().backward()
    assert seen == [False]


def test_idle_memory_of_an_arena_does_not_grow_with_the_number_of_sizes():
    arena, sizes = Arena(), [2**20 + more * 2**18 for more in range(32)]
    for size in sizes:
        assert arena.empty(size).numel() == size
    assert sum(size * len(buffers) for size, buffers in arena._idle.items()) <= 5 * sizes[-1]
    places = []
    for _ in range(3):  # sizes that repeat, as in a loop
        lent = [arena.empty(size) for size in sizes[:9]]
        places.append({each.data_ptr() for each in lent})
        del lent
    assert places[1] == places[2]


def test_team_runs_everything_and_passes_errors_on():
    team = Team(3)
    seen: list[int] = []
    lock = threading.Lock()

    def work(value: int) -> int:
        with lock:
            seen.append(value)
        if value == 2:
            raise KeyError("broken on purpose")
        return value * 10

    assert team.run(work, [(0,), (1,), (3,)]) == [0, 10, 30]
    with pytest.raises(KeyError, match="broken on purpose"):
        team.run(work, [(0,), (1,), (2,)])
    assert team.run(work, [(0,), (4,)]) == [0, 40]  # the team survives
    assert sorted(seen) == [0, 0, 0, 1, 1, 2, 3, 4]


@given(
    values=st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=50),
    labels=st.lists(st.sampled_from([0.0, 1.0]), min_size=50, max_size=50),
)
def test_loss_equals_torchs(values, labels):
    logits = torch.tensor(values, requires_grad=True)
    target = torch.tensor(labels[: len(values)])
    ours = binary_cross_entropy(logits, target)
    theirs = nn.functional.binary_cross_entropy_with_logits(logits, target)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(3 * ours, logits)[0], torch.autograd.grad(3 * theirs, logits)[0], rtol=1e-5, atol=1e-7
    )
