"""When rows step: at the end of each backward, at the end of ``accumulate()``, or when an optimizer steps.

A ``backward`` is one step, over any number of lookups and losses: gradients are collected while it runs and used when
it ends, as an optimizer would use the ``.grad`` of a parameter. If a backward fails, its gradients are dropped.

Rows are not parameters, so changes to parameters between ``backward`` and ``optimizer.step()`` do not reach them. Loops
that would silently mean something else raise an error that names the cause. Each check takes less than a microsecond a
step, or about ten if the step has emptied the processor's caches.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.variable import Variable
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stoker.base.errors import ConfigError
from stoker.tables.accumulation import Accumulation, Weak, optimizers, parameters_of

#: The gradient of the handle is one of these vectors times the norm of the rows' gradient. Their norm is 1, so that
#: norms are right, to the same bit; elements differ, so that clipping by value, which is refused, differs from clipping
#: by norm. Each backward takes the next vector, so that a sum with a gradient of another backward is not a multiple.
_DIRECTIONS = (0.6, 0.8), (0.8, 0.6), (0.6, -0.8), (0.8, -0.6)
_MARK = 1e-30  # replaces that norm if rows have stepped already: too small to count in any norm
_OTHERS = (
    "give that optimizer the parameters without the handle: model.dense_parameters(), or "
    "[p for p in model.parameters() if p is not tables.handle]"
)
_MARK_READ = torch.tensor(_MARK, dtype=torch.float32, device="cpu").item()
_NOTHING = nullcontext()
#: Settings of torch's optimizers, which loops change in ``param_groups``.
_UNREAD = {
    "weight_decay", "betas", "momentum", "dampening", "nesterov", "eps", "amsgrad", "maximize", "alpha", "lr_decay",
}  # fmt: skip
_ALONE = 256  # steps of one thread until gradients are watched again
_WAITING = 256  # backwards with unused gradients before a warning
_watched: Weak[RowStepper, None] = Weak()  # told when an optimizer steps
_hook: Any = None
_SCALERS = (torch.amp.GradScaler, torch.cuda.amp.GradScaler)
_seen = (-1, -1)  # references to these classes when scalers were last looked for
_scalers: list[weakref.ref[torch.amp.GradScaler]] = []
#: Whether torch.distributed is in use.
_several_processes: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False


class Remedies(NamedTuple):
    """Remedies in error messages."""

    step: str = (
        "Let the rows step like parameters: rows = tables.as_optimizer(), then rows.step() and rows.zero_grad() next "
        "to those of the other optimizer"
    )
    scaler: str = ", with scaler.step(rows)"
    ranks: str = (
        "Call tables.replicate(stoker.Replicas()) first, or tables.replicate(None) if the ranks are meant to hold "
        "different rows"
    )


_REMEDIES = Remedies()


def new_handle(device: torch.device | str) -> nn.Parameter:
    """Return a parameter [2] that stands for the rows in ``module.parameters()``; its value is never used."""
    return nn.Parameter(torch.ones(2, dtype=torch.float32, device=device))


class _Backward:
    """The gradients of one ``backward``. Only the engine refers to it, so it is dropped if the backward fails."""

    __slots__ = ("__weakref__", "_again", "_stepper", "_task", "gradients")

    def __init__(self, steps: RowStepper, task: int) -> None:
        self.gradients: list[Any] = []
        self._stepper, self._task = steps, task
        self._again = _several_processes()

    def __call__(self) -> None:
        if self._again:  # after DistributedDataParallel's last callback, which writes gradients of all parameters
            self._again = False
            Variable._execution_engine.queue_callback(self)
            return
        gradients, self.gradients = self.gradients, []
        self._stepper.end_backward(gradients, self._task)


class RowStepper:
    """Collect gradients, and update rows when it is time.

    ``trained``, tables or a tensor train, is weakly referenced. It has ``handle``, ``apply_gradients``, ``exchange``
    and, if an optimizer drives it, ``gradient_norm``.
    """

    def __init__(self, trained: Any, name: str, remedies: Remedies = _REMEDIES) -> None:
        self._trained = weakref.ref(trained)
        self.name, self.remedies = name, remedies
        self.handle: nn.Parameter  # the expected one: see keep()
        self.node: Any = None  # the engine's node for the handle's gradient
        self.scale = 1.0  # gradients are multiplied by this before they are used
        self.checked = True  # whether loops that would mean something else raise errors
        self.alone = False  # whether other ranks may hold other rows
        self.optimizer: TableOptimizer | None = None
        self._accumulating = 0
        self._watched = False
        self._running: dict[int, weakref.ref[_Backward]] = {}
        self._pending: list[tuple[list[Any], float]] = []  # gradients of whole backwards, each with a factor
        self._norm = 0.0  # of all of them, from the handle's gradient
        self._published_times = self._turn = 0  # which of _DIRECTIONS the last of these gradients has
        self._published: Tensor | None = None  # the gradient that was given to the handle
        self._version = 0
        self._marked: Tensor | None = None  # that gradient, if it is only a mark
        self._lock = threading.RLock()
        self._accumulation = Accumulation()
        self._steps_before = 0  # of the rows, before a step of an optimizer that calls a closure
        self._thread = self._thread_of_backward = 0  # of the last forward, and of the last backward
        self._shared = ""  # an optimizer with the handle that stepped before the rows did
        self._expects = False  # whether autograd writes a gradient of the handle in this backward

    @property
    def deferred(self) -> bool:
        """Whether rows wait for ``step()`` of an optimizer."""
        return self.optimizer is not None and not self.optimizer.in_backward

    @property
    def trained(self) -> Any:
        """The tables or the tensor train."""
        return self._trained()

    def drive(self, *, in_backward: bool) -> TableOptimizer:
        """Return the optimizer; raise ConfigError if gradients wait that would step at another time, or never."""
        optimizer = self.optimizer
        if self._pending and (optimizer is None or optimizer.in_backward != in_backward):
            raise ConfigError(
                f"gradients of {self.name} wait for step(), or for the end of accumulate(), and as_optimizer() would "
                "lose them. Call it before backward(), or after step() or zero_grad()."
            )
        if optimizer is None:
            optimizer = self.optimizer = TableOptimizer(self.trained, self, in_backward=in_backward)
        optimizer.in_backward = in_backward
        return optimizer

    def keep(self, handle: nn.Parameter) -> None:
        """Record the handle after it was created or moved."""
        self.handle = self._accumulation.handle = handle
        trains = handle.requires_grad
        if self._published is not None:  # the gradient has moved, too
            self._published, self._version = handle.grad, 0 if handle.grad is None else handle.grad._version
        if handle.is_inference():  # created in inference mode: it never trains
            return
        with torch.inference_mode(False), torch.enable_grad():
            function = handle.requires_grad_().view_as(handle).grad_fn
        handle.requires_grad_(trains)
        self.node = None if function is None else function.next_functions[0][0]

    def take_lr(self, value: float) -> None:
        """Tell the optimizer, which schedulers drive, of a learning rate that was set without it."""
        if self.optimizer is not None and float((group := self.optimizer.param_groups[0])["lr"]) != value:
            group["lr"] = value

    def enclosing(self) -> int:
        """Return the backward that a forward runs in, for :meth:`collect`; -1 for none.

        ``torch.utils.checkpoint`` calls forward again inside backward, and with ``use_reentrant=True`` runs a second
        backward there. Its gradients belong to the step of the outer backward.
        """
        task = torch._C._current_graph_task_id()
        if task >= 0:
            self._running_backward(task)
        return task

    def _running_backward(self, task: int) -> _Backward:
        """Return the gradients of the running backward ``task`` so far."""
        known = self._running.get(task)
        backward = None if known is None else known()
        if backward is None:
            for number, each in list(self._running.items()):  # backwards that failed
                if each() is None:
                    self._running.pop(number, None)
            if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False):
                raise ConfigError(
                    "compiled autograd (torch._dynamo.config.compiled_autograd) runs no callback at the end of a "
                    f"backward, so the rows of {self.name} would never step. Turn it off; torch.compile works without."
                )
            backward = _Backward(self, task)
            self._running[task] = weakref.ref(backward)
            Variable._execution_engine.queue_callback(backward)
            if self.deferred and _several_processes():
                with self._lock:  # before DistributedDataParallel averages the handle's gradient over the ranks
                    self._take_changes()
        return backward

    def collect(self, gradient: Any, enclosing: int = -1) -> None:
        """Keep a gradient until the backward that is running ends, or the one that its forward ran in."""
        around = self._running.get(enclosing)
        backward = None if around is None else around()
        if backward is None:
            if not self._is_wanted():
                return
            backward = self._running_backward(torch._C._current_graph_task_id())
        backward.gradients.append(gradient)

    def end_backward(self, gradients: list[Any], task: int) -> None:
        """End the backward ``task``: step, or keep the gradients for a later step."""
        self._running.pop(task, None)
        trained = self.trained
        if trained is None or not gradients:
            return
        if self.checked and not self.deferred:
            self._thread_of_backward = threading.get_ident()
            self._accumulation.end_backward(task)
        # Gradients are on only in a backward with create_graph=True; turning them off takes a microsecond.
        with self._lock, torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            if self.checked:
                self._check_handle_is_unused()
            gradients = trained.exchange(gradients)
            if self.deferred:
                if not _several_processes():
                    self._take_changes()
                self._pending.append(([each.kept() for each in gradients], self.scale))
                if len(self._pending) == _WAITING:
                    warnings.warn(
                        f"gradients of {_WAITING} backwards wait in memory for as_optimizer().step(), and the rows of "
                        f"{self.name} have not moved since. Call step() and zero_grad(); for a scheduler alone, take "
                        "as_optimizer(in_backward=True).",
                        stacklevel=2,
                    )
                self._publish()
                return
            if self.checked:
                self._check_scaler()
            if self._accumulating:
                self._pending.append(([each.kept() for each in gradients], self.scale))
                self._mark()
            else:
                self._step_inside(gradients, self.scale)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Make one step from all backwards in the block; none after an exception. An optimizer accumulates anyway."""
        if self.deferred:
            yield
            return
        self._accumulating += 1
        try:
            yield
        except BaseException:
            if self._accumulating == 1:
                self.discard()
            raise
        finally:
            self._accumulating -= 1
        if not self._accumulating and self._pending:
            pending = self._take_pending()  # first, so that none is left after an error
            if self.checked:
                self._check_mark()
            with torch.no_grad():
                self._step_inside(*pending)

    def _step_inside(self, gradients: list[Any], scale: float) -> None:
        """Step without an optimizer."""
        if self.optimizer is not None:
            self.optimizer.hand_lr_over()
        self.trained.apply_gradients(gradients, scale)
        self._accumulation.step_rows()
        self._mark()

    def discard(self) -> None:
        """Drop gradients that were not used."""
        self._pending.clear()

    def step(self) -> None:
        """Step with the collected gradients."""
        with self._lock:
            if (inside := self._running.get(torch._C._current_graph_task_id())) is not None and inside() is not None:
                raise ConfigError(
                    f"step() of the rows of {self.name} was called inside their backward, by a hook: their gradient is "
                    "there when it ends. Call step() after backward(); or leave as_optimizer() out, then rows step "
                    "inside backward by themselves."
                )
            shared, self._shared = self._shared, ""
            if shared and self._pending and self.trained.handle.grad is None:
                self.discard()
                raise ConfigError(
                    f"zero_grad() after the step of {shared}, which has the handle of {self.name} among its "
                    f"parameters, dropped the gradient of the rows before their step(). Call rows.step() first, or "
                    f"{_OTHERS}."
                )
            self._take_changes()
            if self._pending:
                self.trained.apply_gradients(*self._take_pending())

    def _check_nothing_is_left(self) -> None:
        """Raise an error if the handle has a gradient when the rows have none."""
        grad = self.trained.handle.grad
        if self.checked and grad is not None and grad.tolist() not in ([0.0, 0.0], [_MARK_READ, _MARK_READ]):
            raise ConfigError(
                f"step() or backward() found a gradient of {self.name} that an earlier step() has used up, or that "
                "zero_grad() has dropped before the loop put it back. PyTorch would use it again. Call zero_grad() "
                "after each step(), and step() after a backward."
            )

    def _take_pending(self) -> tuple[list[Any], float]:
        """Return the collected gradients, and the factor that is still to be applied."""
        pending, self._pending = self._pending, []
        factors = {each for _, each in pending}
        if len(factors) == 1:
            return [g for group, _ in pending for g in group], factors.pop()
        return [g.scaled(each) for group, each in pending for g in group], 1.0

    def _publish(self) -> None:
        """Give the handle a gradient with the norm of the rows' gradient."""
        trained = self.trained
        gradients = [g if each == 1.0 else g.scaled(each) for group, each in self._pending for g in group]
        self._norm = trained.gradient_norm(gradients)
        # Ranks with rows of their own differ in it, so that an average over ranks by the loop is noticed, too.
        apart = trained._summed is None and dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if apart else 0
        self._published_times += 1
        self._turn = (self._published_times + rank) % len(_DIRECTIONS)
        self._show(self._direction().to(trained.handle.device) * self._norm)

    def _direction(self) -> Tensor:
        return torch.tensor(_DIRECTIONS[self._turn], dtype=torch.float32, device="cpu")

    def _take_changes(self) -> None:
        """Clip, unscale or clear the rows' gradient, as was done to the handle's."""
        if not self._pending:
            self._check_nothing_is_left()
            return
        handle = self.trained.handle
        grad = handle.grad
        if grad is None:
            self.discard()
            return
        first, second = after = grad.tolist()  # versions are no help: GradScaler changes gradients without counting
        before = (self._direction() * self._norm).tolist()
        if first == second == 0.0:
            if self._norm:
                self.discard()
            return
        if not math.isfinite(before[1]):  # also a norm that is too large for the handle's type
            if grad._version == self._version or (second == before[1] and not math.isfinite(self._norm)):
                return
            if not math.isnan(first):
                self._refuse_change(before, after)
            factor = math.nan if math.isnan(self._norm) else 0.0  # by which clip_grad_norm_ multiplies
            self._pending = [(group, each * factor) for group, each in self._pending]
            self._norm = math.nan
            self._published, self._version = grad, grad._version
            return
        if math.isnan(first) and math.isnan(second):
            self.discard()
            if _enabled_scaler():  # which leaves this step out
                return
            handle.grad = None
            raise ConfigError(
                f"the gradient of {self.name} became NaN after backward, by clip_grad_norm_ where a gradient of "
                "another parameter is not finite. Skip such a step: zero_grad() and no step()."
            )
        large = int(abs(before[1]) > before[0])
        factor = after[large] / before[large] if self._norm else math.nan
        exact = 1e-3 if _several_processes() else 1e-5  # DistributedDataParallel may send gradients as float16
        if not math.isclose(after[1 - large], factor * before[1 - large], rel_tol=exact, abs_tol=1e-40):
            self._refuse_change(before, after)
        self._pending = [(group, each * factor) for group, each in self._pending]
        self._norm *= factor
        self._published, self._version = grad, grad._version

    def _refuse_change(self, before: list[float], after: list[float]) -> None:
        raise ConfigError(
            f"the gradient of {self.name} was changed by more than a factor: from {before} to {after} "
            "(clip_grad_value_, noise, or a sum with the gradient of another backward?). Rows have no gradient to "
            "change element by element. Clip by norm (clip_grad_norm_), or give the row optimizer clip_value; add "
            "losses instead of gradients."
        )

    def _mark(self) -> None:
        """Give the handle a gradient that shows whether something clips or unscales it."""
        if not self.checked:
            return
        handle, mark = self.handle, self._marked
        if mark is not None and mark is self._published and mark._version == self._version and mark is handle.grad:
            return
        mark = self.trained.handle.new_full((2,), _MARK)  # which may be another, until a forward refuses it
        self._marked = mark
        self._show(mark)

    def _show(self, grad: Tensor) -> None:
        """Make this the handle's gradient, and record its version."""
        self.trained.handle.grad = grad
        self._published, self._version = grad, grad._version

    def expect_gradient(self) -> None:
        """Note that autograd adds zeros to the gradient of the handle: nothing clipped it."""
        self._expects = True
        if not self.deferred:
            self._unmark()

    def _unmark(self) -> None:
        if self.trained.handle.grad is self._published:
            self.trained.handle.grad = self._published = None

    def check(self) -> None:
        """Raise an error for ranks that train separately, and for gradients clipped or unscaled after a step."""
        if not self.alone and _several_processes() and dist.get_world_size() > 1:
            raise ConfigError(
                f"this is one of {dist.get_world_size()} ranks, but each would train the rows of {self.name} on its "
                f"own: DistributedDataParallel and FSDP see parameters only. {self.remedies.ranks}."
            )
        if self.checked:
            if not self._watched:  # reading the set at each step would take longer than all other checks
                self.watch()
            if self._thread != threading.get_ident():
                self._change_thread()
            if not self.deferred:
                self._check_mark()
                self._accumulation.before_forward()

    def watch(self) -> None:
        """Look at each step of an optimizer."""
        global _hook
        self._watched = True
        _watched.setdefault(self, None)
        _hook = _hook or [
            register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step),
        ]  # fmt: skip

    def _check_handle_is_unused(self) -> None:
        """Raise an error if a loss depends on the handle, as if it were the rows."""
        grad, expected, self._expects = self.handle.grad, self._expects, False
        if grad is None or expected:
            return
        if (self.deferred or grad._version == self._version) and grad is self._published:  # autograd adds in place
            return
        # Averaged over ranks by DistributedDataParallel (asked first: tolist() waits for a GPU), cleared, or put back.
        if _several_processes() or grad.tolist() in ([0.0, 0.0], [_MARK_READ, _MARK_READ]):
            return
        self.trained.handle.grad = self._published = None
        raise ConfigError(
            f"the loss depends on the handle of {self.name}, which is a parameter of the model but not the rows: a "
            "penalty on all model.parameters()? Leave tables.handle out of it."
        )

    def _check_mark(self) -> None:
        """Raise an error for a gradient that was clipped, unscaled or replaced after the rows had stepped."""
        published, grad = self._published, self.handle.grad
        if published is None or grad is None or (grad is published and grad._version == self._version):
            return
        self._published, found = None, grad.tolist()
        put_back = grad is not published and found == [_MARK_READ, _MARK_READ]  # by the loop, with equal values
        if found != [0.0, 0.0] and not put_back:
            self.trained.handle.grad = None
            self._accumulation.forget()
            raise ConfigError(
                "gradients were clipped or unscaled after backward (clip_grad_norm_, clip_grad_value_, "
                f"GradScaler.unscale_?), when the rows of {self.name} had taken their step inside backward. "
                f"{self.remedies.step}; or give the row optimizer clip_norm or clip_value, and clip model.parameters() "
                "without the tables' handle. If rows are meant to be left out, say so: tables.step_each_backward()."
            )

    def _change_thread(self) -> None:
        """Watch no gradients while several threads train: they share them, and hooks may not change in a backward."""
        if torch._C._current_graph_task_id() < 0:  # else the thread is one of autograd's
            if self._thread:
                self._accumulation.forget(_ALONE)
            self._thread, self._thread_of_backward = threading.get_ident(), 0

    def check_optimizer(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Raise an error if an optimizer is to step once for several steps of the rows; not yet with a ``closure``."""
        self._steps_before = self._accumulation.steps
        if not self.checked or self.trained is None:
            return
        handle = self.trained.handle
        if self.deferred:
            if any(p is handle for p in parameters_of(optimizer)):
                self._shared = type(optimizer).__name__
                if isinstance(optimizer, torch.optim.LBFGS):
                    raise ConfigError(
                        f"LBFGS has the handle of {self.name} among its parameters, and the step of each depends on "
                        f"the gradients of all: the others would step by a gradient that is not the rows': {_OTHERS}."
                    )
                if _enabled_scaler():
                    raise ConfigError(
                        f"{self._shared} has the handle of {self.name} among its parameters, as the optimizer of the "
                        f"rows has, so a GradScaler divides the gradient of the rows twice: {_OTHERS}."
                    )
            return
        if self._trains_with(optimizer):
            self._check_mark()
            if not closure:
                self.check_count(optimizer)

    def check_count(self, optimizer: torch.optim.Optimizer, *, closure: bool = False) -> None:
        """Do :meth:`check_optimizer` for all backwards since it stepped, with those of a closure."""
        if not self.checked or self.deferred or self.trained is None or not self._trains_with(optimizer):
            return
        inside = self._accumulation.steps - self._steps_before
        if closure and inside > 1 and isinstance(optimizer, torch.optim.LBFGS):  # it looks for the best step
            raise self._once_for(optimizer, inside)
        count, used = self._accumulation.of(optimizer)
        if count > 1 and used:
            raise ConfigError(
                f"{type(optimizer).__name__} steps with gradients of its last step, too, which zero_grad() has not "
                f"dropped; the rows of {self.name} stepped by those of one backward alone. Call zero_grad() after each "
                "step(). If each backward is meant to be a step of the rows, say so: tables.step_each_backward()."
            )
        if count > 1:
            raise self._once_for(optimizer, count)
        self._accumulation.step_optimizer(optimizer)

    def _trains_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return False for an optimizer of another thread's model; that thread may be writing gradients now."""
        if not (here := threading.get_ident() in (self._thread, self._thread_of_backward)):
            self._accumulation.followed(optimizer).near = False  # it may be of another model from now on
        return here or self._accumulation.followed(optimizer).own

    def _once_for(self, optimizer: torch.optim.Optimizer, count: int) -> ConfigError:
        return ConfigError(
            f"{type(optimizer).__name__} steps once for {count} backwards, but the rows of {self.name} took a step in "
            f"each. {self.remedies.step}; or put the backwards into `with tables.accumulate():`. If each backward is "
            "meant to be a step of the rows, say so: tables.step_each_backward()."
        )

    def _check_scaler(self) -> None:
        """Raise an error if rows would step by scaled gradients."""
        if self.scale == 1.0 and _enabled_scaler():
            raise ConfigError(
                f"a GradScaler is in use, and the rows of {self.name} step inside backward: they would move by the "
                f"scaled gradient. {self.remedies.step}{self.remedies.scaler}. If the scaler is not for this model, "
                "say so: tables.step_each_backward()."
            )

    def _is_wanted(self) -> bool:
        """Return False if rows were frozen since the forward, or the backward is for other inputs (``inputs=...``)."""
        if self.node is None or not self.handle.requires_grad:
            return self.node is None
        try:
            return bool(torch._C._will_engine_execute_node(self.node))
        except RuntimeError:  # torch raises it if this leaf's gradient is captured
            raise ConfigError(
                f"torch.autograd.grad was asked for the gradient of the handle of {self.name}, which stands for the "
                "rows: rows have no gradient to hand out. Leave it out of the inputs (model.dense_parameters(), or "
                "[p for p in model.parameters() if p is not tables.handle]), or call backward()."
            ) from None

    def check_handle(self, handle: nn.Parameter | None) -> nn.Parameter:
        """Raise an error if the handle is not the one of these tables."""
        if handle is None or handle is not self.handle:
            raise ConfigError(
                f"the parameter that stands for the rows of {self.name} (tables.handle) was replaced, by FSDP, "
                "fully_shard or functional_call: the rows themselves would be neither sharded nor replaced. Leave it "
                "out: FSDP(model, ignored_modules=[tables]), fully_shard(model, ignored_params={tables.handle}), or "
                "functional_call with the dense parameters alone."
            )
        return handle


def _enabled_scaler() -> bool:
    """Whether there is a GradScaler that scales."""
    global _seen
    counts = (sys.getrefcount(_SCALERS[0]), sys.getrefcount(_SCALERS[1]))
    if counts != _seen or any(each() is None for each in _scalers):  # one may have replaced another
        _seen = counts
        _scalers.clear()
        for kind in _SCALERS:
            _scalers.extend(weakref.ref(each) for each in gc.get_referrers(kind) if isinstance(each, _SCALERS[0]))
    scalers = [scaler for each in _scalers if (scaler := each()) is not None]
    return bool(scalers) and any(scaler.is_enabled() and scaler._scale is not None for scaler in scalers)


# Making an optimizer imports the compiler, so its decorator costs no import here.
@_disable_dynamo
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, TableOptimizer):
        return
    closure = _closure(args, kwargs)
    optimizers.setdefault(optimizer, None)
    _check_all(lambda steps: steps.check_optimizer(optimizer, closure=closure))


@_disable_dynamo
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _closure(args, kwargs) and not isinstance(optimizer, TableOptimizer):
        _check_all(lambda steps: steps.check_count(optimizer, closure=True))


def _closure(args: Any, kwargs: Any) -> bool:
    return kwargs.get("closure", args[1] if len(args) > 1 else None) is not None


def _check_all(check: Callable[[RowStepper], None]) -> None:
    """Check all rows, so that none keeps a count of steps before an error; raise the first error."""
    errors: list[ConfigError] = []
    for steps, _ in _watched.items():
        try:
            check(steps)
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _check_norm(tensors: list[Tensor], norm_type: float, count: int) -> None:
    """Raise an error for a norm that the handles' gradients among ``tensors``, of ``count`` in all, do not have."""
    for steps in [each for each, _ in _watched.items() if each.deferred and each.checked and each.trained is not None]:
        grad = steps.trained.handle.grad if steps._thread == threading.get_ident() else steps._published
        if not any(grad is each for each in tensors):
            continue
        if count > 1 and (copies := getattr(steps.trained, "averages", None)) and copies.ranks.size > 1:
            raise ConfigError(
                f"a norm over the rows of {steps.name} and other parameters differs among ranks, because each "
                "rank steps its own copy of the rows until the next average: the other parameters would drift "
                "apart. Clip those without tables.handle, and rows by clip_norm of their optimizer."
            )
        if float(norm_type) != 2.0:
            raise ConfigError(
                f"gradients are measured by their norm of type {norm_type}, but of the gradient of the rows of "
                f"{steps.name} only the 2-norm is known. Leave norm_type at 2; or give the row optimizer "
                "clip_norm or clip_value, and clip model.parameters() without the tables' handle."
            )


@torch.library.custom_op("stoker::check_norm", mutates_args=())
def _check_compiled_norm(tensors: list[Tensor], norm_type: float, count: int) -> Tensor:
    try:
        _check_norm(tensors, norm_type, count)
    except ConfigError:
        torch.set_grad_enabled(True)  # a graph that fails leaves the mode of clip_grad_norm_, which is off
        raise
    return tensors[0].new_zeros(())


@_check_compiled_norm.register_fake
def _(tensors: list[Tensor], norm_type: float, count: int) -> Tensor:
    return tensors[0].new_zeros(())


def _refuse_other_norms() -> None:
    """Let ``clip_grad_norm_`` and ``get_total_norm`` raise an error for norms that the handle's gradient does not have.

    Nothing of a norm is seen in a gradient afterwards, and torch has no hook there. What changes is the function inside
    torch's decorator, because a loop may have imported what is around it.
    """
    [cell, *_] = getattr(getattr(clip_grad, "_get_total_norm", None), "__closure__", None) or [None]
    norm_of: Callable[..., Tensor] | None = cell and cell.cell_contents
    if cell is None or not callable(norm_of) or hasattr(norm_of, "checks_rows"):
        return

    @wraps(norm_of)
    def checked(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not torch.compiler.is_compiling():
            _check_norm(tensors, norm_type, len(tensors))
        elif like_ours := [each for each in tensors if each.shape == (2,)]:  # the graph keeps what has a use
            zero = torch.ops.stoker.check_norm(like_ours, float(norm_type), len(tensors))
            total: Tensor = norm_of(tensors, norm_type, *args, **kwargs) + zero
            return total
        return norm_of(tensors, norm_type, *args, **kwargs)

    vars(checked)["checks_rows"] = True
    cell.cell_contents = checked


class TableOptimizer(torch.optim.Optimizer):
    """Step the rows of tables in ``step()``, as a torch optimizer steps parameters.

    :meth:`stoker.EmbeddingTables.as_optimizer` returns it. Gradients of any number of backwards are summed until
    :meth:`step`; ``zero_grad()`` drops them. Learning-rate schedulers set ``param_groups[0]["lr"]``. ``GradScaler`` and
    ``clip_grad_norm_`` work, because the gradient of its one parameter has the norm of the rows' gradient.

    State of the row optimizer belongs to the tables (:func:`stoker.save`), not to this object.
    """

    def __init__(self, trained: Any, steps: RowStepper, *, in_backward: bool = False) -> None:
        super().__init__([trained.handle], {"lr": trained.optimizer.lr})
        steps._accumulation.forget()
        steps.watch()
        _refuse_other_norms()
        self._row_steps, self.in_backward = steps, in_backward

    def hand_lr_over(self) -> None:
        """Copy the learning rate, which a scheduler may have set, to the tables."""
        group = self.param_groups[0]
        if unread := [name for name in sorted(_UNREAD & group.keys()) if group[name] not in (0, None)]:
            raise ConfigError(
                f"param_groups of {self._row_steps.name} has {', '.join(unread)}, which rows do not read: only "
                "lr counts there. Give other settings to the row optimizer when the tables are made, such as "
                "stoker.AdamW(weight_decay=0.01)."
            )
        trained, rate = self._row_steps.trained, float(self.param_groups[0]["lr"])
        if rate != trained.optimizer.lr:
            trained.lr = rate

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse other parameters."""
        if self.param_groups:
            raise ConfigError(
                "as_optimizer() steps the rows of its tables only. Give other parameters their own optimizer."
            )
        super().add_param_group(param_group)

    def __reduce__(self) -> Any:
        raise ConfigError(
            "as_optimizer() of tables cannot be copied or pickled: it belongs to them, and has no state but the "
            "learning rate. Copy the tables, then call as_optimizer() of the copy."
        )

    @_disable_dynamo  # a compiler would break its graph at each line
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one step of the row optimizer with the sum of the collected gradients, which are then used up.

        Raises:
            ConfigError: gradients were changed element by element, or dropped by another optimizer's ``zero_grad()``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.in_backward:
            self.hand_lr_over()
            self._row_steps.step()
        return loss

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the collected gradients."""
        super().zero_grad(set_to_none)
        if not self.in_backward:
            self._row_steps.discard()
