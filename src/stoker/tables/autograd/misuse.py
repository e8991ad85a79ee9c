"""Training loops that would silently mean something else for rows that step inside backward, refused by name.

Rows are no parameters, so what a loop does to parameters between ``backward`` and ``optimizer.step()`` does not reach
them. Each check costs less than a microsecond a step, and some ten where a step has emptied the processor's caches.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stoker.base.errors import ConfigError

__all__ = [
    "Remedies",
    "RowsOptimizer",
    "Steps",
    "changed_gradient",
    "check_export",
    "check_modes",
    "check_ranks",
    "check_scaler",
    "is_wanted",
    "replaced_handle",
    "several_processes",
    "watch",
]


class Remedies(NamedTuple):
    """What errors advise."""

    step: str = (
        "Let the rows step like parameters: rows = tables.as_optimizer(), then rows.step() and rows.zero_grad() beside "
        "those of the other optimizer"
    )
    scaler: str = ", with scaler.step(rows)"
    ranks: str = (
        "Call tables.replicate(stoker.Replicas()) first, or tables.replicate(None) if the ranks are meant to hold "
        "different rows"
    )


class RowsOptimizer(torch.optim.Optimizer):
    """An optimizer of rows: it steps because a loop says so."""


class Steps(Protocol):
    """What is checked: the row steps of tables, or of a tensor train
    (:class:`stoker.tables.autograd.stepping.RowSteps`)."""

    name: str
    remedies: Remedies
    node: Any
    scale: float
    checked: bool
    latest: int
    since_optimizer: int

    @property
    def deferred(self) -> bool: ...

    @property
    def trained(self) -> Any: ...

    def check_mark(self) -> None: ...


_watched: weakref.WeakSet[Steps] = weakref.WeakSet()
_SCALERS = (torch.amp.GradScaler, torch.cuda.amp.GradScaler)
_seen = (-1, -1)  # references to these classes when scalers were last looked for
_scalers: list[weakref.ref[torch.amp.GradScaler]] = []
_hook: Any = None


def watch(steps: Steps) -> None:
    """Notice when optimizers step, to tell accumulated gradients."""
    global _hook
    if steps not in _watched:
        _watched.add(steps)
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, RowsOptimizer):
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
        if added or isinstance(optimizer, torch.optim.LBFGS):  # whose closure calls backward many times a step
            raise ConfigError(
                f"{type(optimizer).__name__} steps once for {count} backwards, but the rows of {steps.name} took a "
                f"step in each. {steps.remedies.step}; or put the backwards into `with tables.accumulate():`. "
                "If each backward is meant to be a step of the rows, say so: tables.step_each_backward()."
            )


def _latest_backward() -> int:
    """The number of the last backward in this process; each takes the next one."""
    found: list[int] = []
    with torch.enable_grad():
        probe = torch.zeros((), requires_grad=True) * 1
        probe.register_hook(lambda grad: found.append(torch._C._current_graph_task_id()))
        probe.backward()
    return found[0] - 1


def check_scaler(steps: Steps) -> None:
    """Refuse rows that would step by scaled gradients.

    Raises:
        ConfigError: a gradient scaler is in use in this process.
    """
    global _seen
    if steps.scale != 1.0:
        return
    counts = (sys.getrefcount(_SCALERS[0]), sys.getrefcount(_SCALERS[1]))
    if counts != _seen:
        _seen = counts
        _scalers.clear()
        for kind in _SCALERS:
            _scalers.extend(weakref.ref(each) for each in gc.get_referrers(kind) if isinstance(each, _SCALERS[0]))
    if _scalers and any(_has_scaled(each()) for each in _scalers):
        raise ConfigError(
            f"a GradScaler is in use, and the rows of {steps.name} step inside backward: they would move by the scaled "
            f"gradient. {steps.remedies.step}{steps.remedies.scaler}. If the scaler is not for this model, say so: "
            "tables.step_each_backward()."
        )


def _has_scaled(scaler: torch.amp.GradScaler | None) -> bool:
    return scaler is not None and scaler.is_enabled() and scaler._scale is not None


def changed_gradient(steps: Steps) -> ConfigError:
    """The error of a loop that clipped or unscaled gradients after rows had stepped."""
    return ConfigError(
        "gradients were clipped or unscaled after backward (clip_grad_norm_, clip_grad_value_, GradScaler.unscale_?), "
        f"when the rows of {steps.name} had taken their step inside backward. {steps.remedies.step}; or give the "
        "row optimizer clip_norm or clip_value, and clip model.parameters() without the tables' handle. If rows are "
        "meant to be left out, say so: tables.step_each_backward()."
    )


def _never() -> bool:
    return False


#: Whether torch.distributed is in use.
several_processes: Callable[[], bool] = dist.is_initialized if dist.is_available() else _never


def check_ranks(steps: Steps) -> None:
    """Refuse ranks whose rows would drift apart.

    Raises:
        ConfigError: several ranks, and nobody said how their rows belong together.
    """
    if several_processes() and dist.get_world_size() > 1:
        raise ConfigError(
            f"this is one of {dist.get_world_size()} ranks, but each would train the rows of {steps.name} on its own: "
            f"DistributedDataParallel and FSDP see parameters only. {steps.remedies.ranks}."
        )


def check_modes() -> None:
    """Refuse transforms of functions and traces, which see no rows.

    Raises:
        ConfigError: the call is inside torch.func or torch.jit.trace.
    """
    if torch._C._are_functorch_transforms_active():
        raise ConfigError(
            "EmbeddingTables and TTEmbeddingBag were called inside a transform of torch.func (vmap, grad, jacrev, "
            "jvp), which sees parameters, but no rows that step inside backward. Look the rows up first, "
            "embedded = tables(ids), and transform the function of embedded."
        )
    if torch._C._get_tracing_state() is not None:
        raise ConfigError(
            "torch.jit.trace records operations of PyTorch, but rows are looked up by other kernels. Trace the dense "
            "part with embedded rows as its input, or use torch.export: model.export_dense(batch)."
        )


def is_wanted(steps: Steps) -> bool:
    """Return False if the backward that runs is for other inputs than the rows, as ``backward(inputs=...)`` may be.

    Raises:
        ConfigError: ``torch.autograd.grad`` was asked for the gradient of the handle.
    """
    if steps.node is None:
        return True
    try:
        return bool(torch._C._will_engine_execute_node(steps.node))
    except RuntimeError:  # torch's way to say that this leaf's gradient is captured
        raise ConfigError(
            f"torch.autograd.grad was asked for the gradient of the handle of {steps.name}, which stands for the rows: "
            "rows have no gradient to hand out. Leave it out of the inputs (model.dense_parameters(), or "
            "[p for p in model.parameters() if p is not tables.handle]), or call backward()."
        ) from None


def replaced_handle(steps: Steps) -> ConfigError:
    """The error of tables whose handle is another one than they were made with."""
    return ConfigError(
        f"the parameter that stands for the rows of {steps.name} (tables.handle) was replaced, by FSDP, fully_shard or "
        "functional_call: the rows themselves would be neither sharded nor replaced. Leave it out: "
        "FSDP(model, ignored_modules=[tables]), fully_shard(model, ignored_params={tables.handle}), or "
        "functional_call with the dense parameters alone."
    )


def check_export() -> None:
    """Refuse programs that leave this process.

    Raises:
        ConfigError: the call is inside torch.export.
    """
    if torch.compiler.is_exporting():
        raise ConfigError(
            "torch.export of a model with EmbeddingTables or TTEmbeddingBag would hold no rows. Export the dense part, "
            "which takes looked-up rows as its input: model.export_dense(batch) of a stoker model, or "
            "torch.export.export(dense_part, (tables(ids),)). TTEmbeddingBag.dense() gives the rows of a bag."
        )
