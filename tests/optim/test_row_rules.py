"""The row optimizers against torch.optim and the papers; what they share is in tests/ops and tests/tables."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

from stoker import FTRL, LAMB, SGD, AdamW, EmbeddingTables, MomentumSGD, StepDecay, TableConfig, TrainConfig, optim
from stoker.base.errors import ConfigError
from stoker.ops.rule import RULES
from stoker.optim import ROW_OPTIMIZERS, RowOptimizer

ROWS, DIM, STEPS = 6, 5, 12
# One of each rule that kernels know; the first update of a row differs from the others in some.
NEW = [
    AdamW(lr=0.05, weight_decay=0.3), MomentumSGD(lr=0.1, momentum=0.8), FTRL(lr=0.3, l1=0.2, l2=0.1),
    MomentumSGD(lr=0.1, nesterov=True, weight_decay=0.1), FTRL(lr=0.3, beta=0.0, clip_norm=1.0),
]  # fmt: skip
IDS = [str(i) + type(optimizer).__name__ for i, optimizer in enumerate(NEW)]


def tables(optimizer: RowOptimizer, **options: Any) -> EmbeddingTables:
    given = {"name": "t", "num_embeddings": ROWS, "embedding_dim": DIM, "init_scale": 0.5, **options}
    backend = given.pop("backend", "reference")
    return EmbeddingTables([TableConfig(**given)], optimizer=optimizer, backend=backend, seed=4)


def state_of(made: EmbeddingTables) -> dict[str, Tensor]:
    """Copies of the rows and their state."""
    found = next(iter(made.read("t")))[1]
    return {name: tensor.clone() for name, tensor in {"weight": found.weight, **found.state}.items()}


def gradients(seed: int, steps: int = STEPS) -> list[Tensor]:
    """A gradient of each row for each step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, DIM, generator=generator) for _ in range(steps)]


def trained(made: EmbeddingTables, grads: list[Tensor], touched: range = range(ROWS)) -> Tensor:
    """The rows after steps that touch ``touched`` with these gradients."""
    ids = torch.tensor(touched).view(-1, 1)
    for grad in grads:
        made(ids).backward(grad[touched.start : touched.stop].unsqueeze(1))
    return made.rows("t")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "make"),
    [
        (AdamW(lr=0.05, eps=1e-10), lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-10)),
        (
            AdamW(lr=0.02, betas=(0.5, 0.9), eps=1e-10, weight_decay=0.7),
            lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.5, 0.9), eps=1e-10, weight_decay=0.7),
        ),
        (MomentumSGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (
            MomentumSGD(lr=0.1, momentum=0.7, nesterov=True, weight_decay=0.2),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.7, nesterov=True, weight_decay=0.2),
        ),
        (MomentumSGD(lr=0.1, momentum=0.0), lambda p: torch.optim.SGD(p, lr=0.1)),
    ],
)
def test_rows_that_every_step_touches_train_as_with_torch(own: RowOptimizer, make: Any) -> None:
    made, grads = tables(own), gradients(1)
    weight = made.rows("t").double().requires_grad_()
    textbook = make([weight])
    for grad in grads:
        weight.grad = grad.double()
        textbook.step()
    torch.testing.assert_close(trained(made, grads).double(), weight.detach(), rtol=1e-5, atol=1e-6)


def test_the_decay_of_adamw_follows_the_schedule() -> None:
    own = AdamW(lr=0.05, weight_decay=0.5, eps=1e-10, schedule=StepDecay(every=3, gamma=0.1))
    made, grads = tables(own), gradients(2)
    weight = made.rows("t").double().requires_grad_()
    textbook = torch.optim.AdamW([weight], lr=0.05, weight_decay=0.5, eps=1e-10)
    schedule = torch.optim.lr_scheduler.StepLR(textbook, 3, 0.1)
    for grad in grads:
        weight.grad = grad.double()
        textbook.step()
        schedule.step()
    torch.testing.assert_close(trained(made, grads).double(), weight.detach(), rtol=1e-5, atol=1e-6)


def algorithm_1(grads: np.ndarray, alpha: float, beta: float, l1: float, l2: float) -> np.ndarray:
    """McMahan et al. 2013, for a weight of each element of ``grads[step]``, in float64."""
    z, n, w = (np.zeros(grads.shape[1:]) for _ in range(3))
    for g in grads.astype(np.float64):
        sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / alpha
        z += g - sigma * w
        n += g * g
        w = np.where(np.abs(z) <= l1, 0.0, -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2))
    return w


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alpha", "beta", "l1", "l2"), [(0.1, 1.0, 0.0, 0.0), (0.5, 1.0, 2.0, 0.0), (0.2, 0.0, 0.5, 3.0), (1.0, 2.0, 1, 1)]
)
def test_ftrl_is_the_papers_where_rows_begin_with_zeros(alpha: float, beta: float, l1: float, l2: float) -> None:
    grads = gradients(3, steps=40)
    made = tables(FTRL(lr=alpha, beta=beta, l1=l1, l2=l2), init_scale=0.0)
    wanted = algorithm_1(torch.stack(grads).numpy(), alpha, beta, l1, l2)
    found = trained(made, grads).numpy()
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-6)
    assert (found == 0).any() == (l1 > 0), "l1 makes weights exactly 0, and nothing else does"


def test_ftrl_begins_at_the_first_weights() -> None:
    """Without l1 and l2 the first step is ``lr / (beta + |g|)`` along the gradient, whatever the weights were."""
    made, (grad,) = tables(FTRL(lr=0.3, beta=0.7)), gradients(4, steps=1)
    before = made.rows("t")
    torch.testing.assert_close(trained(made, [grad]), before - 0.3 * grad / (0.7 + grad.abs()))
    still = tables(FTRL(lr=0.3, beta=0.0))
    assert torch.equal(trained(still, [torch.zeros(ROWS, DIM)]), still.rows("t")), "0 / 0 keeps the weight"


def test_a_rate_that_falls_to_0_leaves_ftrls_weights_where_they_are() -> None:
    schedule = StepDecay(every=5, gamma=1e-9)
    made, grads = tables(FTRL(lr=0.3, l1=2.0, schedule=schedule)), gradients(5)
    after = trained(made, grads[:5])
    zeros = after == 0
    torch.testing.assert_close(trained(made, [grad * 1e-3 for grad in grads[5:]]), after, rtol=1e-4, atol=1e-5)
    assert zeros.any()
    assert torch.equal(made.rows("t") == 0, zeros)


@pytest.mark.parametrize("optimizer", NEW, ids=IDS)
def test_rows_that_a_step_does_not_touch_stand_still(optimizer: RowOptimizer) -> None:
    made, grads = tables(optimizer), gradients(6)
    trained(made, grads[:3])
    before = state_of(made)
    trained(made, grads[3:], range(2))
    for name, tensor in state_of(made).items():
        assert torch.equal(before[name][2:], tensor[2:])
        assert not torch.equal(before[name][:2], tensor[:2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", NEW, ids=IDS)
def test_kernels_equal_the_reference_from_the_first_step(optimizer: RowOptimizer, dtype: str) -> None:
    pytest.importorskip("numba", reason="the CPU back end needs numba")
    grads = gradients(7)
    grads[0][:, 0] = 0.0  # the first gradient of an element may be 0
    found = [trained(tables(optimizer, dtype=dtype, backend=name), grads) for name in ("reference", "cpu")]
    assert torch.equal(*found)
    assert not torch.equal(found[0], tables(optimizer, dtype=dtype).rows("t"))


@pytest.mark.slow
def test_bfloat16_rows_follow_float32_rows() -> None:
    """Rounding is unbiased: over many rows the mean of the difference vanishes."""
    for optimizer in (AdamW(lr=0.01), MomentumSGD(lr=0.02), FTRL(lr=0.1)):
        runs = []
        for dtype in ("float32", "bfloat16"):
            made = tables(optimizer, dtype=dtype, num_embeddings=4000, init_scale=0.0)
            ids = torch.arange(4000).view(-1, 1)
            for _ in range(20):
                made(ids).sub(1.0).square().sum().backward()
            runs.append(made.rows("t").float())
        assert abs(float((runs[0] - runs[1]).mean())) < 2e-3 * float(runs[0].mean())


def test_a_bound_of_0_is_one_and_none_is_none() -> None:
    assert LAMB(lr=0.1, max_trust=None).rule(0).max_trust == math.inf
    table = TableConfig(name="t", num_embeddings=2, embedding_dim=2, init_scale=0.0)
    for clip in ("clip_value", "clip_norm"):
        tables = EmbeddingTables([table], optimizer=SGD(lr=1.0, **{clip: 0.0}), backend="reference")
        tables(torch.tensor([[0]])).sum().backward()
        assert not tables.rows("t").any()


@pytest.mark.parametrize("kind", sorted(ROW_OPTIMIZERS))
def test_every_kind_is_everywhere(kind: str) -> None:
    optimizer = ROW_OPTIMIZERS[kind](lr=0.1, weight_decay=0.2)
    assert RowOptimizer.from_dict(optimizer.to_dict()) == optimizer
    rule = optimizer.rule(0)
    assert RULES[rule.kind].state == optimizer.state, "kernels and tables name a state alike"
    made = TrainConfig(row_optimizer=kind, row_lr=0.1, row_weight_decay=0.2).make_row_optimizer(optim.Constant())
    assert made == replace(optimizer, **({"max_trust": 10.0} if kind == "lamb" else {}))
    assert TrainConfig(row_optimizer=kind).make_row_optimizer(optim.Constant()).lr > 0
    assert sorted(get_args(get_type_hints(TrainConfig)["row_optimizer"])) == sorted(ROW_OPTIMIZERS)


def test_settings_of_one_kind_reach_it() -> None:
    given = {"row_momentum": 0.5, "row_nesterov": True, "row_beta": 0.1, "row_l1": 0.2, "row_l2": 0.3, "max_trust": 7.0}
    for kind, own in ((kind, each.settings) for kind, each in ROW_OPTIMIZERS.items()):
        made = TrainConfig(row_optimizer=kind, **given).make_row_optimizer(optim.Constant())
        for option, setting in own.items():
            assert getattr(made, option) == given.get(setting, 0.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MomentumSGD(lr=0.1, momentum=1.0), r"momentum=1.0\) must be in \[0, 1\)"),
        (lambda: MomentumSGD(lr=0.1, momentum=math.nan), r"must be in \[0, 1\)"),
        (lambda: FTRL(lr=0.1, l1=-1.0), "l1=-1.0"),
        (lambda: FTRL(lr=0.1, beta=math.inf), "beta=inf"),
        (lambda: AdamW(lr=4.0, weight_decay=0.5), "product is 2, .*Lower one"),
        (lambda: AdamW(lr=4.0, betas=(1.0, 0.5)), r"AdamW\(betas"),
        (lambda: TrainConfig(row_optimizer="momentum_sgd", row_momentum=1.5), "row_optimizer: MomentumSGD"),
        (lambda: TrainConfig(row_l1=-0.5), "row_l1 is -0.5"),
    ],
)
def test_values_out_of_range(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_kind_is_that_of_one_class_with_a_rate() -> None:
    with pytest.raises(ConfigError, match=r"Mine has the kind 'sgd', which is that of stoker\.optim\.rows:SGD"):
        optim.register_row_optimizer(type("Mine", (optim.SGD,), {}))
    with pytest.raises(ConfigError, match="Bare has no default_lr"):
        optim.register_row_optimizer(type("Bare", (optim.RowOptimizer,), {"kind": "bare"}))
    assert optim.ROW_OPTIMIZERS["sgd"] is optim.SGD
    assert "bare" not in optim.ROW_OPTIMIZERS


def test_a_kind_has_its_own_state() -> None:
    """Setting another optimizer of the same kind keeps the state, another kind starts anew."""
    made, grads = tables(MomentumSGD(lr=0.1)), gradients(8)
    trained(made, grads)
    state = state_of(made)["momentum_buffer"]
    for group in made.groups:
        group.set_optimizer(MomentumSGD(lr=0.01, nesterov=True))
    assert torch.equal(state_of(made)["momentum_buffer"], state)
    for group in made.groups:
        group.set_optimizer(SGD(lr=0.01))
    assert list(state_of(made)) == ["weight"]
