"""Training loops that would silently mean something else for rows that step inside backward, refused by name.

Rows are no parameters, so what a loop does to parameters between ``backward`` and ``optimizer.step()`` does not reach
them. Each check costs less than a microsecond a step.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stoker.errors import ConfigError

if TYPE_CHECKING:
    from stoker.tables.stepping import RowSteps

__all__ = ["changed_gradient", "check_ranks", "check_scaler", "watch"]

_REMEDY = (
    "Let the rows step like parameters: rows = tables.as_optimizer(), then rows.step() and rows.zero_grad() beside "
    "those of the other optimizer"
)
_watched: weakref.WeakSet[RowSteps] = weakref.WeakSet()
_seen = [-1, -1]  # references to the classes of gradient scalers when they were last looked for
_scalers: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
_hook: Any = None


def watch(steps: RowSteps) -> None:
    """Notice when optimizers step, to tell accumulated gradients."""
    global _hook
    if steps not in _watched:
        _watched.add(steps)
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    from stoker.tables.stepping import TableOptimizer

    if isinstance(optimizer, TableOptimizer):
        return
    latest = None
    for steps in list(_watched):
        count, steps.since_optimizer = steps.since_optimizer, 0
        if not steps.checked or steps.deferred or steps.trained is None:
            continue
        steps.check_mark()
        if count < 2:
            continue
        latest = _latest_backward() if latest is None else latest
        if steps.latest != latest:  # another model's backward came last: this optimizer is not for these rows
            continue
        handle = steps.trained.handle
        # Backwards that add to a gradient change it in place; one that makes it does not.
        added = any(
            p.grad is not None and p.grad._version > 0
            for g in optimizer.param_groups
            for p in g["params"]
            if p is not handle
        )
        if added:
            raise ConfigError(
                f"{type(optimizer).__name__} steps once for {count} backwards, but the rows of {steps.name} took a "
                f"step in each. {_REMEDY}; or put the backwards into `with tables.accumulate():`. If each backward is "
                "meant to be a step of the rows, say so: tables.step_each_backward()."
            )


def _latest_backward() -> int:
    """The number of the last backward in this process; each takes the next one."""
    found: list[int] = []
    with torch.enable_grad():
        probe = torch.zeros((), requires_grad=True) * 1
        probe.register_hook(lambda grad: found.append(torch._C._current_graph_task_id()))
        probe.backward()
    return found[0] - 1


def check_scaler(steps: RowSteps) -> None:
    """Refuse rows that would step by scaled gradients.

    Raises:
        ConfigError: a gradient scaler is in use in this process.
    """
    if steps.scale != 1.0:
        return
    classes = [torch.amp.GradScaler, torch.cuda.amp.GradScaler]
    counts = [sys.getrefcount(each) for each in classes]
    if counts != _seen:
        _seen[:] = counts
        _scalers.clear()
        for kind in classes:
            _scalers.update(each for each in gc.get_referrers(kind) if isinstance(each, torch.amp.GradScaler))
    if any(each.is_enabled() and each._scale is not None for each in _scalers):  # one that has scaled something
        raise ConfigError(
            f"a GradScaler is in use, and the rows of {steps.name} step inside backward: they would move by the scaled "
            f"gradient. {_REMEDY}, with scaler.step(rows). If the scaler is not for this model, say so: "
            "tables.step_each_backward()."
        )


def changed_gradient(steps: RowSteps) -> ConfigError:
    """The error of a loop that clipped or unscaled gradients after rows had stepped."""
    return ConfigError(
        "gradients were clipped or unscaled after backward (clip_grad_norm_, clip_grad_value_, GradScaler.unscale_?), "
        f"when the rows of {steps.name} had taken their step inside backward. {_REMEDY}; or give the row optimizer "
        "clip_norm or clip_value, and clip model.parameters() without the tables' handle. If rows are meant to be left "
        "out, say so: tables.step_each_backward()."
    )


def check_ranks(steps: RowSteps) -> None:
    """Refuse ranks whose rows would drift apart.

    Raises:
        ConfigError: several ranks, and nobody said how their rows belong together.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"this is one of {dist.get_world_size()} ranks, but each would train the rows of {steps.name} on its own: "
            f"DistributedDataParallel and FSDP see parameters only. {steps.ranks_remedy}"
        )
