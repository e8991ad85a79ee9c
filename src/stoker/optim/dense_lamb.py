"""LAMB for the dense part: Adam's direction, as long as each parameter is (You et al. 2020, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stoker.base.checks import check_not_negative
from stoker.optim.rows import check_betas, check_trust


class DenseLAMB(torch.optim.Optimizer):
    """Layer-wise adaptive moments for large batches; a layer is a parameter.

    For each parameter w with gradient g, in step t counted from 1::

        m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g * g
        u = (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps) + weight_decay * w
        w = w - lr * trust * u,  where trust = |w| / |u| within [min_trust, max_trust]

    If one of the norms is 0 the trust is 1, so that a parameter of zeros learns. The paper leaves the bounds open (its
    function phi); fastai takes 10. Norms are summed in float64.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> optimizer = stoker.DenseLAMB(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> layer.weight.data  # moved by 0.1 times its norm, 5
    tensor([[2.6464, 3.6464]])

    Args:
        params: parameters, or groups of them.
        lr: length of a step as a share of the parameter's norm.
        betas: decay of both moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled from the moments, as in the paper.
        min_trust: least trust ratio.
        max_trust: largest trust ratio; None means no bound.

    Raises:
        ConfigError: a value out of its range.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        min_trust: float = 0.0,
        max_trust: float | None = 10.0,
    ) -> None:
        check_not_negative("DenseLAMB", lr=lr, weight_decay=weight_decay, eps=eps)
        check_betas("DenseLAMB", betas)
        check_trust("DenseLAMB", min_trust, max_trust)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "min_trust": min_trust,
            "max_trust": max_trust,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one step; parameters without a gradient do not move."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, w: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[w]
        if not state:
            # A tensor, as in torch's optimizers, so that it is saved and loaded with the moments.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(w), torch.zeros_like(w)
        state["step"] += 1
        step = int(state["step"])
        (beta1, beta2), m, v = group["betas"], state["exp_avg"], state["exp_avg_sq"]
        m.mul_(beta1).add_(g, alpha=1.0 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        u = (v / (1.0 - beta2**step)).sqrt_().add_(group["eps"])
        torch.div(m, u, out=u).div_(1.0 - beta1**step)
        if group["weight_decay"]:
            u.add_(w, alpha=group["weight_decay"])
        # All on the device: a number on the host would make the GPU wait for every parameter.
        norms = torch.linalg.vector_norm(w, dtype=torch.float64), torch.linalg.vector_norm(u, dtype=torch.float64)
        trust = (norms[0] / norms[1]).clamp(group["min_trust"], group["max_trust"])
        trust = torch.where((norms[0] > 0) & (norms[1] > 0), trust, torch.ones_like(trust))
        w.sub_(u.mul_((trust * group["lr"]).to(u.dtype)))
