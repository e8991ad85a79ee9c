"""TTEmbeddingBag is nn.EmbeddingBag over the rows its cores stand for: forward, gradients, updates, files, ranks."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import start_ranks
from torch import Tensor, nn

import stoker
from stoker import TTEmbeddingBag
from stoker.base.errors import ConfigError
from stoker.ops.reference import update_rows
from stoker.ops.tt.lookup import digits_of, rows_by_definition
from stoker.ops.tt.shape import TTShape

SHAPE = TTShape((5, 3, 4), (1, 2, 3), (4, 3))  # 60 rows, of which 57 are there
ROWS, DIM = 57, 6
OPTIMIZERS = {
    "sgd": stoker.SGD(lr=0.02),
    "adagrad": stoker.Adagrad(lr=0.1),
    "rowwise": stoker.RowWiseAdagrad(lr=0.1),
    "adam": stoker.Adam(lr=0.05),
    "adamw": stoker.AdamW(lr=0.05, weight_decay=0.1),
    "nesterov": stoker.MomentumSGD(lr=0.02, nesterov=True),
    "ftrl": stoker.FTRL(lr=0.1, l1=0.02),
    "clipped": stoker.Adagrad(lr=0.1, clip_norm=0.5, weight_decay=0.01),
    "schedule": stoker.SGD(lr=0.02, schedule=stoker.StepDecay(every=2, gamma=0.1)),
}


def make(**options: Any) -> TTEmbeddingBag:
    given = {"shape": SHAPE, "seed": 3, "std": 0.5, "mode": "sum", "backend": "reference", **options}
    return TTEmbeddingBag(ROWS, DIM, **given)


def rows_of(bag: TTEmbeddingBag) -> Tensor:
    """All rows, in the graph of the cores."""
    return rows_by_definition(list(bag.cores), torch.arange(bag.num_embeddings), bag.shape)


def expected_of(bag: TTEmbeddingBag, weight: Tensor, *call: Any, **named: Any) -> Tensor:
    """What nn.EmbeddingBag with the dense rows gives."""
    ids, offsets, *rest = (*call, None)[: max(2, len(call))]
    return nn.functional.embedding_bag(
        ids.long(), weight, None if offsets is None else offsets.long(), mode=bag.mode,
        include_last_offset=bag.include_last_offset, padding_idx=bag.padding_idx,
        per_sample_weights=rest[0] if rest else None, **named,
    )  # fmt: skip


def draw_offsets(lengths: list[int], last: bool) -> Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends if last else ends[:-1]


@settings(max_examples=scaled(120))
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    last=st.booleans(),
    mode=st.sampled_from(["sum", "mean"]),
    padding=st.one_of(st.none(), st.integers(-ROWS, ROWS - 1)),
    weighted=st.booleans(),
    narrow=st.booleans(),
    double=st.booleans(),
    skewed=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_equals_embedding_bag_over_the_same_rows(lengths, last, mode, padding, weighted, narrow, double, skewed, seed):
    dtype = torch.float64 if double else torch.float32
    bag = make(mode=mode, include_last_offset=last, padding_idx=padding, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 3 if skewed else ROWS, (sum(lengths),), generator=generator)
    if padding is not None and len(ids):
        ids[: len(ids) // 3] = padding % ROWS
    if narrow:
        ids = ids.int()
    offsets = draw_offsets(lengths, last)
    if narrow:
        offsets = offsets.int()
    weights = torch.randn(len(ids), generator=generator, dtype=dtype) if weighted and mode == "sum" else None
    given, own = (None if weights is None else weights.clone().requires_grad_() for _ in range(2))
    other = copy.deepcopy(bag)
    found, expected = bag(ids, offsets, own), expected_of(other, rows_of(other), ids, offsets, given)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    near = {"rtol": 1e-10, "atol": 1e-12} if double else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, expected, **near)
    grad = torch.randn(found.shape, generator=generator, dtype=dtype)
    found.backward(grad)
    expected.backward(grad)
    for mine, its in zip(bag.cores, other.cores, strict=True):
        torch.testing.assert_close(mine.grad, its.grad, **near)
    if own is not None and given is not None:
        torch.testing.assert_close(own.grad, given.grad, **near)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 7])
def test_bags_of_one_length(mode, padding):
    bag = make(mode=mode, padding_idx=padding, dtype=torch.float64)
    ids = torch.randint(0, 12, (9, 4), generator=torch.Generator().manual_seed(0))
    weights = torch.rand(9, 4, dtype=torch.float64).requires_grad_() if mode == "sum" else None
    again = None if weights is None else weights.detach().clone().requires_grad_()
    found, expected = bag(ids, per_sample_weights=weights), expected_of(bag, rows_of(bag), ids, None, again)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    mine = torch.autograd.grad(found.square().sum(), [*bag.cores, *([] if weights is None else [weights])])
    its = torch.autograd.grad(expected.square().sum(), [*bag.cores, *([] if again is None else [again])])
    for one, other in zip(mine, its, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_gradients_by_finite_differences():
    bag = make(dtype=torch.float64)
    ids, offsets = torch.tensor([1, 1, 56, 20, 3, 0]), torch.tensor([0, 2, 2, 5])
    weights = torch.rand(6, dtype=torch.float64).requires_grad_()

    def call(weights: Tensor, *cores: Tensor) -> Tensor:
        return torch.func.functional_call(
            bag, {f"cores.{k}": core for k, core in enumerate(cores)}, (ids, offsets, weights)
        )

    cores = [core.detach().clone().requires_grad_() for core in bag.cores]
    assert torch.autograd.gradcheck(call, (weights, *cores))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_bags_without_any_id_have_a_gradient_of_zeros(last, fused, backend):
    """As nn.EmbeddingBag's have: a rare empty batch must not stop a training run."""
    bag = make(include_last_offset=last, optimizer=stoker.Adam(lr=0.1) if fused else None, backend=backend)
    before = copy.deepcopy(bag.state_dict())
    out = bag(torch.zeros(0, dtype=torch.int64), draw_offsets([0, 0, 0], last))
    assert torch.equal(out, torch.zeros(3, DIM))
    out.sum().backward()
    for core in bag.cores:
        assert core.grad is None if fused else not core.grad.any()
    for name, value in bag.state_dict().items():
        assert name == "_extra_state" or torch.equal(value, before[name])


def test_only_padding():
    bag = make(padding_idx=-1, optimizer=stoker.Adam(lr=0.1))
    bag(torch.tensor([3, 4, 5]), torch.tensor([0])).sum().backward()  # moments that would go on moving
    before = copy.deepcopy(bag.state_dict())
    out = bag(torch.full((4,), ROWS - 1), torch.tensor([0, 2]))
    assert torch.equal(out, torch.zeros(2, DIM))
    out.sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in bag.state_dict().items() if "_extra" not in name)


def textbook(
    cores: list[Tensor], states: list[dict[str, Tensor]], shape: TTShape, grads: list[Tensor], ids: Tensor, rule: Any
) -> None:
    """One row-optimizer step on the slices that the digits of ``ids`` name, and no others."""
    for core, state, grad, digits in zip(cores, states, grads, digits_of(ids, shape), strict=True):
        slices = torch.unique(digits)
        update_rows(core.view(len(core), -1), state, slices, grad.reshape(len(core), -1)[slices], rule)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("shape", [SHAPE, TTShape((60, 3), (2, 3), (32,))], ids=["small slices", "slices in pieces"])
def test_updates_inside_backward_are_those_of_the_textbook(kind, backend, shape):
    rule = OPTIMIZERS[kind]
    bag = make(shape=shape, optimizer=rule, backend=backend)
    cores = [core.detach().clone() for core in bag.cores]
    states = [
        {
            name: torch.zeros(core.shape[0], core[0].numel()) if kind == "row" else torch.zeros(core.shape[0])
            for name, kind in rule.state.items()
        }
        for core in cores
    ]
    generator = torch.Generator().manual_seed(5)
    for step in range(5):
        ids = torch.randint(0, 9 if step % 2 else 30, (7,), generator=generator)
        offsets = draw_offsets([2, 0, 4, 1], False)
        leaves = [core.clone().requires_grad_() for core in cores]
        expected = expected_of(bag, rows_by_definition(leaves, torch.arange(ROWS), shape), ids, offsets)
        target = torch.randn(expected.shape, generator=generator)
        ((expected - target) ** 2).sum().backward()
        found = bag(ids, offsets)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        ((found - target) ** 2).sum().backward()
        before = [core.clone() for core in cores]
        textbook(cores, states, shape, [leaf.grad for leaf in leaves], ids, rule.rule(step))
        for place, (core, old, digits) in enumerate(zip(bag.cores, before, digits_of(ids, shape), strict=True)):
            idle = torch.ones(len(core), dtype=torch.bool)
            idle[digits] = False
            if idle.any() and step == 0:
                assert torch.equal(core[idle], old[idle])
                for name in rule.state:
                    assert not bag.get_buffer(f"state_{place}_{name}")[idle].any()
            torch.testing.assert_close(core.detach(), cores[place], rtol=2e-3, atol=2e-4)
            for name in rule.state:
                torch.testing.assert_close(
                    bag.get_buffer(f"state_{place}_{name}"), states[place][name], rtol=2e-3, atol=1e-5
                )
    assert bag.tick == 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("rank", [32, (3, 40)])
def test_back_ends_give_the_same_bits(kind, rank):
    bags = [
        TTEmbeddingBag(900, 16, rank=rank, seed=1, optimizer=OPTIMIZERS[kind], backend=name)
        for name in ("reference", "cpu")
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids, offsets = torch.randint(0, 900, (80,), generator=generator), draw_offsets([3] * 20 + [0, 20], False)
        for bag in bags:
            bag(ids, offsets).square().sum().backward()
    first, second = (bag.state_dict() for bag in bags)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("how", ["one loss", "accumulate"])
def test_several_lookups_are_one_step(how):
    """Equal to cores that are parameters, with torch's optimizer."""
    bag, plain = make(optimizer=stoker.SGD(lr=0.5)), make()
    plain.load_state_dict(bag.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    first, second, begin = torch.tensor([1, 2, 30, 7]), torch.tensor([2, 31, 7]), torch.tensor([0])
    if how == "one loss":
        (bag(first, begin).sum() * 2 + bag(second, begin).sum()).backward()
    else:
        with bag.accumulate():
            (bag(first, begin).sum() * 2).backward()
            bag(second, begin).sum().backward()
    (plain(first, begin).sum() * 2 + plain(second, begin).sum()).backward()
    optimizer.step()
    assert bag.tick == 1
    for mine, its in zip(bag.cores, plain.cores, strict=True):
        torch.testing.assert_close(mine.detach(), its.detach(), rtol=1e-5, atol=1e-6)


def test_a_backward_after_the_cores_have_changed_is_refused():
    """Its gradient depends on the cores as they were, as PyTorch says of parameters that were changed in place."""
    bag, begin = make(optimizer=stoker.SGD(lr=0.5)), torch.tensor([0])
    outs = [bag(torch.tensor(ids), begin) for ids in ([1, 2, 30, 7], [2, 31, 7])]
    outs[0].sum().backward(retain_graph=True)
    before = [core.detach().clone() for core in bag.cores]
    for out in outs:
        with pytest.raises(RuntimeError, match=r"changed between this forward and its backward.*join the losses"):
            out.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, bag.cores, strict=True))


def test_eval_mode_keeps_the_cores_and_says_so():
    bag = make(optimizer=stoker.SGD(lr=0.5)).eval()
    before = [core.detach().clone() for core in bag.cores]
    with pytest.warns(UserWarning, match="eval mode: its cores were not updated"):
        bag(torch.tensor([1, 2]), torch.tensor([0])).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, bag.cores, strict=True))


def test_a_gradient_scaler_is_refused():
    bag, scaler = make(optimizer=stoker.SGD(lr=0.5)), torch.amp.GradScaler("cpu")
    with pytest.raises(stoker.ConfigError, match="GradScaler is in use"):
        scaler.scale(bag(torch.tensor([1, 2]), torch.tensor([0])).sum()).backward()
    assert bag.tick == 0


def test_cores_changed_between_forward_and_backward_are_noticed():
    """Without an optimizer of its own the bag is like any module: torch refuses a stale gradient."""
    bag = make()
    out = bag(torch.tensor([1, 2]), torch.tensor([0])).sum()
    with torch.no_grad():
        bag.cores[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_gradients_accumulate():
    bag, other = make(dtype=torch.float64), make(dtype=torch.float64)
    parts = [torch.tensor([1, 2, 30, 7]), torch.tensor([2, 31, 7])]
    for ids in parts:
        bag(ids, torch.tensor([0])).square().sum().backward()
        expected_of(other, rows_of(other), ids, torch.tensor([0])).square().sum().backward()
    for mine, its in zip(bag.cores, other.cores, strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-12)


def test_any_optimizer_of_torch_trains_it():
    bag = TTEmbeddingBag(200, 8, rank=6, std=0.1, seed=0)
    target = torch.randn(200, 8, generator=torch.Generator().manual_seed(0)) @ torch.ones(8, 8) * 0.1
    ids, optimizer = torch.arange(200), torch.optim.Adam(bag.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = ((bag(ids, ids) - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(bag.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def train(bag: TTEmbeddingBag, seed: int) -> None:
    ids = torch.randint(0, ROWS, (20,), generator=torch.Generator().manual_seed(seed))
    bag(ids, torch.tensor([0, 5, 5])).square().sum().backward()


def through_torch_save(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_state_dict(module: nn.Module) -> nn.Module:
    """By a file that is read without trusting it."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    made = make(optimizer=module.optimizer, seed=77)
    assert made.load_state_dict(torch.load(file, weights_only=True)).missing_keys == []
    return made


@pytest.mark.slow
@pytest.mark.parametrize("copied", [copy.deepcopy, through_torch_save, through_state_dict])
@pytest.mark.parametrize("optimizer", [None, OPTIMIZERS["adam"], OPTIMIZERS["schedule"]], ids=["none", "adam", "sgd"])
def test_copies_are_whole_and_their_own(copied, optimizer):
    bag = make(optimizer=optimizer)
    for seed in range(3):
        train(bag, seed)
    bag.zero_grad()
    before = copy.deepcopy(bag.state_dict())
    other = copied(bag)
    train(other, 9)
    assert all(torch.equal(value, before[name]) for name, value in bag.state_dict().items())
    train(bag, 9)
    assert bag.tick == other.tick == (4 if optimizer else 0)
    assert bag.state_dict().keys() == other.state_dict().keys()
    for name, value in bag.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    for mine, its in zip(bag.cores, other.cores, strict=True):
        assert mine.grad is None if optimizer else torch.equal(mine.grad, its.grad)


@pytest.mark.parametrize("optimizer", [None, stoker.Adam(lr=0.1)])
def test_a_state_dict_holds_tensors_only(optimizer):
    """Averages of weights, safetensors and DDP go through it and expect no more."""
    state = make(optimizer=optimizer).state_dict()
    assert all(isinstance(value.cpu(), Tensor) for value in state.values())
    with pytest.raises(RuntimeError, match="cores"):
        make(optimizer=optimizer).load_state_dict({k: v for k, v in state.items() if not k.startswith("cores.1")})


def test_double_and_back():
    bag, ids, begin = make(), torch.arange(20), torch.tensor([0, 7])
    narrow = bag(ids, begin)
    wide = bag.to(torch.float64)(ids, begin)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide, expected_of(bag, rows_of(bag), ids, begin), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(wide.float(), narrow, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("to", [torch.float64, torch.bfloat16])
def test_updates_inside_backward_are_refused_to_other_types(to):
    with pytest.raises(ConfigError, match="float32"):
        make(optimizer=stoker.SGD(lr=0.1), dtype=to)
    bag = make(optimizer=stoker.SGD(lr=0.1)).to(to)
    with pytest.raises(ConfigError, match="float32"):
        bag(torch.tensor([1]), torch.tensor([0]))
    bag.float()(torch.tensor([1]), torch.tensor([0])).sum().backward()
    assert bag.tick == 1


def test_follows_the_default_type_like_embedding_bag():
    torch.set_default_dtype(torch.float64)
    try:
        assert make().cores[0].dtype == nn.EmbeddingBag(3, 3).weight.dtype == torch.float64
        fused = make(optimizer=stoker.Adagrad(lr=0.1))
        assert {value.dtype for name, value in fused.state_dict().items() if "_extra" not in name} == {torch.float32}
        train(fused, 0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_under_autocast():
    bag = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = bag(torch.arange(20), torch.tensor([0, 7]))
    assert torch.equal(out, bag(torch.arange(20), torch.tensor([0, 7])))
    out.sum().backward()


@pytest.mark.parametrize("wrong", [-1, ROWS, ROWS + 2, 2**40])
@pytest.mark.parametrize("padding", [None, 4])
def test_ids_outside_the_table(wrong, padding):
    """Those of padded rows too: cores have 60 rows."""
    bag = make(padding_idx=padding)
    with pytest.raises(IndexError, match=rf"id {wrong} .*57"):
        bag(torch.tensor([1, wrong, 2]), torch.tensor([0]))
    assert not rows_of(bag)[ROWS:].numel()


@pytest.mark.parametrize(
    "wrong", [torch.tensor([0.0, 1.0]), torch.tensor([True]), torch.tensor([1], dtype=torch.int16)]
)
def test_ids_that_are_no_ids(wrong):
    with pytest.raises(ValueError, match="int32 or int64"):
        make()(wrong, torch.tensor([0]))


def test_calls_that_embedding_bag_refuses():
    bag, ids = make(mode="mean"), torch.tensor([1, 2])
    with pytest.raises((ValueError, NotImplementedError), match="per_sample_weights"):
        bag(ids, torch.tensor([0]), torch.ones(2))
    with pytest.raises(ValueError, match="offsets"):
        bag(ids)
    with pytest.raises(ValueError, match="offsets"):
        bag(ids.view(1, 2), torch.tensor([0]))
    with pytest.raises(RuntimeError, match=r"offsets\[0\]"):
        bag(ids, torch.tensor([1]))
    with pytest.raises(ValueError, match="per_sample_weights"):
        make()(ids, torch.tensor([0]), torch.ones(3))
    with pytest.raises(ValueError, match="the last offset is 1, but there are 2 ids"):
        make(include_last_offset=True)(ids, torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 1.0}, "max_norm"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"mode": "max"}, "max"),
        ({"padding_idx": ROWS}, "padding_idx"),
        ({"padding_idx": -ROWS - 1}, "padding_idx"),
        ({"shape": None, "rank": 0}, "rank"),
        ({"shape": None, "cores": 7}, "cores"),
        ({"shape": None, "own": 0}, "0 numbers of its own"),
        ({"shape": None, "own": DIM}, f"has {DIM} columns"),
        ({"shape": TTShape((5, 3), (2, 3), (4,))}, "57"),
        ({"shape": TTShape((9, 9), (2, 2), (4,))}, "81 x 4"),
        ({"std": 0.0}, "std"),
        ({"std": math.nan}, "std"),
    ],
)
def test_arguments_that_cannot_be_honoured(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_sizes_that_make_no_table():
    for size in ((0, 4), (4, 0)):
        with pytest.raises(ConfigError):
            TTEmbeddingBag(*size)


def test_no_two_bags_start_alike_unless_told():
    """As with nn.EmbeddingBag: a model of many tables of one size has different ones, and torch's seed repeats them."""
    first, second = TTEmbeddingBag(50, 4), TTEmbeddingBag(50, 4)
    assert not torch.equal(first.cores[0], second.cores[0])
    for seeded in ({"seed": 5}, {}):
        made = []
        for _ in range(2):
            torch.manual_seed(1)
            made.append(TTEmbeddingBag(50, 4, **seeded))
        assert torch.equal(made[0].cores[2], made[1].cores[2])


@pytest.mark.slow
def test_fresh_rows_have_the_deviation_asked_for():
    for std in (1.0, 0.01):
        found = [rows_of(TTEmbeddingBag(3000, 16, seed=seed, std=std)).detach().double() for seed in range(6)]
        assert torch.stack(found).std().item() == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("chunk", [1, 10, 57, 1000])
def test_dense_gives_all_rows_in_order(chunk):
    bag, after = make(), 0
    for start, rows in bag.dense(chunk):
        assert start == after
        after += len(rows)
        torch.testing.assert_close(rows, rows_of(bag)[start:after].detach(), rtol=1e-4, atol=1e-6)
        assert not rows.requires_grad
    assert after == ROWS


def test_a_dense_table_and_back():
    weight = torch.randn(101, 12, generator=torch.Generator().manual_seed(0))
    whole = TTEmbeddingBag.from_dense(weight, rank=10**6, mode="sum", padding_idx=3)
    torch.testing.assert_close(torch.cat([rows for _, rows in whole.dense(40)]), weight, rtol=1e-4, atol=1e-5)
    assert whole.import_error < 1e-6
    assert (whole.mode, whole.padding_idx, whole.num_embeddings) == ("sum", 3, 101)
    ids, offsets = torch.tensor([3, 4, 100, 4]), torch.tensor([0, 3])
    expected = nn.functional.embedding_bag(ids, weight, offsets, mode="sum", padding_idx=3)
    torch.testing.assert_close(whole(ids, offsets), expected, rtol=1e-4, atol=1e-5)
    errors = [TTEmbeddingBag.from_dense(weight, rank=rank).import_error for rank in (1, 4, 16)]
    assert errors[0] > errors[1] > errors[2] > 0
    made = TTEmbeddingBag.from_dense(weight, rank=4)
    off = (torch.cat([rows for _, rows in made.dense()]) - weight).norm() / weight.norm()
    assert made.import_error == pytest.approx(off.item(), rel=1e-4)
    assert TTEmbeddingBag.from_dense(torch.zeros(9, 4)).import_error == 0.0


@pytest.mark.parametrize("optimizer", [None, stoker.Adagrad(lr=0.1)])
def test_rows_with_numbers_of_their_own(optimizer):
    """A row is its own numbers times the common core, and what one row learns by its own moves no other."""
    bag = TTEmbeddingBag(300, 6, mode="sum", own=2, seed=0, optimizer=optimizer)
    assert [tuple(core.shape) for core in bag.cores] == [(300, 1, 2), (1, 2, 6)]
    own, common = (core.detach().clone() for core in bag.cores)
    ids = torch.tensor([4, 299, 4])
    torch.testing.assert_close(bag(ids, torch.tensor([0, 1, 2])), own[ids, 0] @ common[0])
    bag(ids, torch.tensor([0, 1, 2])).sum().backward()
    if optimizer is None:
        assert torch.equal(bag.cores[0].grad.flatten(1).abs().sum(1).nonzero().flatten(), torch.tensor([4, 299]))
        torch.testing.assert_close(bag.cores[0].grad[4, 0], 2 * common[0].sum(1))
    else:
        moved = (bag.cores[0] != own).flatten(1).any(1)
        assert torch.equal(moved.nonzero().flatten(), torch.tensor([4, 299]))
    weight = torch.randn(50, 2) @ torch.randn(2, 6)
    assert TTEmbeddingBag.from_dense(weight, own=2).import_error < 1e-5
    assert TTEmbeddingBag.from_dense(weight, own=1).import_error > 1e-2


def test_from_a_trained_embedding_bag():
    source = nn.EmbeddingBag(40, 6, dtype=torch.float64)
    bag = TTEmbeddingBag.from_dense(source.weight, rank=10**6)
    ids = torch.arange(40).view(8, 5)
    torch.testing.assert_close(bag(ids), source(ids), rtol=1e-8, atol=1e-10)
    assert all(core.requires_grad and core.is_leaf for core in bag.cores)
    assert source.weight.grad is None


def test_positions_of_arguments_are_those_of_embedding_bag():
    weight = torch.randn(40, 6)
    given = (40, 6, None, 2.0, False, "sum", False, weight, True, 3)
    plain, bag = nn.EmbeddingBag(*given), TTEmbeddingBag(*given, rank=10**6)
    ids, offsets = torch.tensor([3, 4, 9, 4]), torch.tensor([0, 3, 4])
    torch.testing.assert_close(bag(ids, offsets), plain(ids, offsets), rtol=1e-4, atol=1e-5)
    assert bag.import_error < 1e-5
    with pytest.raises(ConfigError, match=r"\(40, 6\), but 41 rows of 6"):
        TTEmbeddingBag(41, 6, _weight=weight)


def test_from_pretrained_takes_what_embedding_bag_takes():
    weight = torch.randn(40, 6)
    ids, offsets = torch.tensor([3, 4, 9, 4]), torch.tensor([0, 3])
    plain = nn.EmbeddingBag.from_pretrained(weight, mode="sum", padding_idx=3)
    frozen = TTEmbeddingBag.from_pretrained(weight, mode="sum", padding_idx=3, rank=10**6)
    torch.testing.assert_close(frozen(ids, offsets), plain(ids, offsets), rtol=1e-4, atol=1e-5)
    assert not any(core.requires_grad for core in frozen.cores)
    assert not frozen(ids, offsets).requires_grad
    free = TTEmbeddingBag.from_pretrained(weight, freeze=False, own=2)
    free(ids, offsets).sum().backward()
    assert all(core.grad is not None for core in free.cores)
    with pytest.raises(ConfigError, match="frozen cores take no optimizer"):
        TTEmbeddingBag.from_pretrained(weight, optimizer=stoker.SGD(lr=0.1))


@pytest.mark.parametrize("core", [0, 1, 2])
def test_some_frozen_cores_are_refused_with_an_optimizer(core: int) -> None:
    bag, ids = make(optimizer=stoker.SGD(lr=0.1)), torch.tensor([3, 4, 5])
    bag.cores[core].requires_grad_(False)
    with pytest.raises(ConfigError, match="some cores are frozen"):
        bag(ids, torch.tensor([0]))
    bag.requires_grad_(False)
    assert not bag(ids, torch.tensor([0])).requires_grad


def test_reset_parameters_starts_anew():
    bag = make(optimizer=stoker.Adam(lr=0.1), seed=5)
    fresh = copy.deepcopy(bag.state_dict())
    bag(torch.tensor([3, 4, 5]), torch.tensor([0])).sum().backward()
    assert any(not torch.equal(value, fresh[name]) for name, value in bag.state_dict().items())
    bag.reset_parameters(5)
    assert all(torch.equal(value, fresh[name]) for name, value in bag.state_dict().items())
    bag.reset_parameters()
    assert not torch.equal(bag.cores[0], fresh["cores.0"])


def test_there_is_no_weight():
    with pytest.raises(AttributeError, match=r"cores are its parameters, dense\(\) gives rows"):
        _ = make().weight
    assert not hasattr(make(), "weight")
    with pytest.raises(AttributeError, match="no attribute 'wight'"):
        _ = make().wight


def test_it_says_what_it_is():
    said = repr(TTEmbeddingBag(10**6, 64, rank=16))
    assert "1.00 M x 64" in said
    assert "times smaller" in said
    assert "ranks (16, 16)" in said


# ---- two processes


def joint_batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, ROWS, (8, 3), generator=generator)
    return ids[:, :2].contiguous(), torch.randn(8, DIM, generator=generator), ids


def run(bag: nn.Module, part: slice, average: Any = None) -> list[Tensor]:
    module = bag.module if hasattr(bag, "module") else bag
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    ids, target, _ = joint_batch()
    for _ in range(4):
        optimizer.zero_grad()
        ((bag(ids[part]) - target[part]) ** 2).mean().backward()
        if average:
            average(module)
        optimizer.step()
    return [core.detach().clone() for core in module.cores]


def mean_of_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def worker(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    part = slice(rank * 4, rank * 4 + 4)
    wrapped = nn.parallel.DistributedDataParallel(make(dtype=torch.float64))
    found = {
        "ddp": run(wrapped, part),
        "by hand": run(make(dtype=torch.float64), part, mean_of_gradients),
    }
    torch.save(found, f"{folder}/{rank}.pt")
    del wrapped
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    start_ranks(worker, 2, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    expected = run(make(dtype=torch.float64), slice(0, 8))
    start = list(make(dtype=torch.float64).cores)
    for way in ("ddp", "by hand"):
        for place, core in enumerate(expected):
            assert torch.equal(ranks[0][way][place], ranks[1][way][place])
            torch.testing.assert_close(ranks[0][way][place], core, rtol=1e-10, atol=1e-12)
            assert not torch.allclose(core, start[place])


@pytest.mark.parametrize("wrong", [None, stoker.Adagrad(lr=0.1), torch.optim.SGD([torch.zeros(1)], lr=0.1)])
def test_an_optimizer_of_another_kind_is_refused(wrong):
    bag = stoker.TTEmbeddingBag(60, 8, rank=2, optimizer=stoker.SGD(lr=0.1))
    with pytest.raises(stoker.ConfigError, match=r"made with optimizer SGD, which cannot become \w+: it keeps other"):
        bag.optimizer = wrong
    with pytest.raises(stoker.ConfigError, match="CowClip"):
        bag.optimizer = stoker.SGD(lr=0.1, cow_clip=(1.0, 1e-3))
    bag.optimizer = stoker.SGD(lr=0.0)
    before = bag.cores[0].detach().clone()
    bag(torch.tensor([[1, 2]])).sum().backward()
    assert torch.equal(bag.cores[0], before)
    assert bag.tick == 1
    with pytest.raises(stoker.ConfigError, match="optimizer of TTEmbeddingBag is a"):
        stoker.TTEmbeddingBag(60, 8, rank=2, optimizer="sgd")


@pytest.mark.parametrize("optimizer", [None, stoker.SGD(lr=0.1)])
def test_a_change_of_type_between_forward_and_backward_is_refused(optimizer):
    bag = stoker.TTEmbeddingBag(60, 8, rank=2, optimizer=optimizer)
    rows = bag(torch.tensor([[1, 2]]))
    bag.half()
    with pytest.raises(RuntimeError, match=r"another type \(half\(\)\), came between"):
        rows.sum().backward()
