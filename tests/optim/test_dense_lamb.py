"""LAMB of the dense part against Algorithm 2 of its paper, written out in float64."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stoker import DenseLAMB
from stoker.base.errors import ConfigError


def algorithm_2(
    x: Tensor, grads: list[Tensor], *, lr: float, beta1: float, beta2: float, eps: float, decay: float,
    low: float, high: float,
) -> Tensor:  # fmt: skip
    """You et al. 2020, Algorithm 2, line by line, for one layer; phi(z) = z, and the ratio within bounds."""
    x = x.double()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t, g in enumerate(grads, 1):
        g = g.double()
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        r = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
        update = r + decay * x
        ratio = 1.0
        if x.norm() > 0 and update.norm() > 0:
            ratio = min(max(float(x.norm() / update.norm()), low), high)
        x = x - lr * ratio * update
    return x


@settings(deadline=None, max_examples=scaled(60))
@given(
    shape=st.sampled_from([(1,), (7,), (3, 5), (2, 3, 4)]),
    steps=st.integers(1, 6),
    scale=st.sampled_from([0.0, 1e-4, 1.0, 100.0]),
    gradient=st.sampled_from([0.0, 1e-5, 1.0]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.5, 0.0)]),
    decay=st.sampled_from([0.0, 0.1]),
    bounds=st.sampled_from([(0.0, None), (0.0, 10.0), (0.5, 0.6)]),
    seed=st.integers(0, 2**20),
)
def test_equals_the_algorithm(shape, steps, scale, gradient, betas, decay, bounds, seed):
    generator = torch.Generator().manual_seed(seed)
    start = scale * torch.randn(shape, generator=generator)
    grads = [gradient * torch.randn(shape, generator=generator) for _ in range(steps)]
    parameter = nn.Parameter(start.clone())
    optimizer = DenseLAMB(
        [parameter], lr=0.03, betas=betas, eps=1e-6, weight_decay=decay, min_trust=bounds[0], max_trust=bounds[1]
    )
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    wanted = algorithm_2(
        start, grads, lr=0.03, beta1=betas[0], beta2=betas[1], eps=1e-6, decay=decay, low=bounds[0],
        high=math.inf if bounds[1] is None else bounds[1],
    )  # fmt: skip
    torch.testing.assert_close(parameter.detach().double(), wanted, rtol=2e-5, atol=1e-6)


def test_a_parameter_of_zeros_learns():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, -2.0, 0.0])
    DenseLAMB([parameter], lr=0.1, eps=0.0 + 1e-12).step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.1, 0.1, 0.0]))


def test_norms_of_tiny_and_huge_parameters_are_in_range():
    """Their squares are not, in float32: the ratio would be 1, or its bound."""
    for scale in (1e-25, 1e25):
        parameter = nn.Parameter(scale * torch.tensor([3.0, 4.0]))
        parameter.grad = torch.ones(2)
        DenseLAMB([parameter], lr=0.1, eps=0.0, max_trust=None).step()
        moved = torch.tensor([3.0, 4.0]) - 0.1 * 5 / math.sqrt(2)
        torch.testing.assert_close(parameter.detach() / scale, moved)


def test_layers_do_not_know_of_each_other_and_one_without_gradient_stands_still():
    one, other, still = (nn.Parameter(torch.full((4,), value)) for value in (1.0, 100.0, 5.0))
    one.grad = other.grad = torch.ones(4)
    DenseLAMB([one, other, still], lr=0.1, max_trust=None).step()
    torch.testing.assert_close(one.detach() / 1.0, other.detach() / 100.0)
    assert torch.equal(still.detach(), torch.full((4,), 5.0))


def test_state_goes_on_to_the_bit():
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(6, 5))
    optimizer = DenseLAMB([parameter], lr=0.02, weight_decay=0.01)
    grads = [torch.randn(6, 5) for _ in range(6)]

    def go(parameter: nn.Parameter, optimizer: DenseLAMB, some: list[Tensor]) -> None:
        for grad in some:
            parameter.grad = grad
            optimizer.step()

    go(parameter, optimizer, grads[:3])
    copy = nn.Parameter(parameter.detach().clone())
    again = DenseLAMB([copy], lr=9.0)
    again.load_state_dict(deepcopy(optimizer.state_dict()))
    go(parameter, optimizer, grads[3:])
    go(copy, again, grads[3:])
    assert torch.equal(parameter, copy)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (1.0, 0.9)}, r"\[0, 1\)"),
        ({"eps": math.nan}, "eps"),
        ({"min_trust": 2.0, "max_trust": 1.0}, "trust ratio"),
        ({"max_trust": 0.0}, "max_trust > 0"),
        ({"weight_decay": math.inf}, "weight_decay"),
    ],
)
def test_values_out_of_range(options, words):
    with pytest.raises(ConfigError, match=words):
        DenseLAMB([nn.Parameter(torch.zeros(1))], **options)
