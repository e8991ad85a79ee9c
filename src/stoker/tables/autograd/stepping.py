"""When rows take their step: at the end of each backward, at the end of ``accumulate()``, or when an optimizer steps.

However many lookups and losses a ``backward`` goes through, it is one step: gradients are collected while it runs and
used when it ends, as an optimizer would use the ``.grad`` of a parameter. If a backward fails, its gradients are
dropped.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable

from stoker.base.errors import ConfigError
from stoker.tables.autograd import misuse

__all__ = ["RowSteps", "TableOptimizer", "Trained", "new_handle"]

#: The gradient of the handle is this vector times the norm of the rows' gradient. Its own norm is 1, so that norms are
#: right; its elements differ, so that clipping by value, which cannot be honoured, can be told from clipping by norm.
_DIRECTION = (0.6, 0.8)
_MARK = 1e-30  # in place of that norm where rows have stepped already: too small to count in any norm


def new_handle(device: torch.device | str) -> nn.Parameter:
    """A parameter [2] that stands for the rows in ``module.parameters()``; its value is never used."""
    return nn.Parameter(torch.ones(2, device=device))


_REMEDIES = misuse.Remedies()
_NOTHING = nullcontext()
_WAITING = 256  # backwards after which gradients that nobody uses draw a warning


class Trained(Protocol):
    """What :class:`RowSteps` trains: tables, or a tensor train."""

    handle: nn.Parameter

    def apply_gradients(self, gradients: Sequence[Any], scale: float) -> None:
        """One step of the row optimizer with the sum of ``gradients`` times ``scale``."""

    def gradient_norm(self, gradients: Sequence[Any]) -> float:
        """The Euclidean norm of the sum of ``gradients``, row by row."""

    def exchange(self, gradients: list[Any]) -> list[Any]:
        """The gradients of all ranks, where there are several."""


class _Backward:
    """The gradients of one ``backward``. The engine alone keeps it: it is gone with a backward that fails."""

    __slots__ = ("__weakref__", "_again", "_steps", "_task", "gradients")

    def __init__(self, steps: RowSteps, task: int) -> None:
        self.gradients: list[Any] = []
        self._steps, self._task = steps, task
        self._again = misuse.several_processes()

    def __call__(self) -> None:
        if self._again:  # behind DistributedDataParallel's own last act, which writes gradients of all parameters
            self._again = False
            Variable._execution_engine.queue_callback(self)
            return
        gradients, self.gradients = self.gradients, []
        self._steps.end_backward(gradients, self._task)


class RowSteps:
    """Collects gradients, and has rows updated when it is time.

    Args:
        trained: what is trained; only weakly referenced.
        name: what errors call it.
        remedies: what errors advise.
    """

    def __init__(self, trained: Trained, name: str, remedies: misuse.Remedies = _REMEDIES) -> None:
        self._trained = weakref.ref(trained)
        self.name, self.remedies = name, remedies
        self.handle: nn.Parameter | None = None  # what the trained one's handle must still be
        self.node: Any = None  # where the engine would take the handle's gradient
        self.scale = 1.0  # gradients are multiplied by this before they are used
        self.checked = True  # whether loops that would mean something else are refused
        self.alone = False  # whether other ranks may hold other rows
        self.optimizer: TableOptimizer | None = None
        self._accumulating = 0
        self._watched = False  # asking misuse at each step would cost more than all else that is checked
        self._running: dict[int, weakref.ref[_Backward]] = {}
        self._pending: list[tuple[list[Any], float]] = []  # gradients of whole backwards, each with a factor
        self._norm = 0.0  # of all of them, as the handle's gradient says
        self._published: Tensor | None = None  # what the handle was given as its gradient, and its version then
        self._version = 0
        self._marked: Tensor | None = None  # that gradient, where it is only a mark
        self._lock = threading.RLock()
        self.latest = -1  # the number of the last backward that reached these rows
        self.since_optimizer = 0  # steps inside backward since an optimizer of torch's stepped

    @property
    def deferred(self) -> bool:
        """Whether rows wait for an optimizer's ``step()``."""
        return self.optimizer is not None and not self.optimizer.in_backward

    @property
    def trained(self) -> Any:
        """What is trained."""
        return self._trained()

    def keep(self, handle: nn.Parameter) -> None:
        """Know the handle, which has just been made or moved."""
        self.handle, trains = handle, handle.requires_grad
        if handle.is_inference():  # made in inference mode: it never trains
            return
        with torch.inference_mode(False), torch.enable_grad():
            function = handle.requires_grad_().view_as(handle).grad_fn
        handle.requires_grad_(trains)
        self.node = None if function is None else function.next_functions[0][0]

    def enclosing(self) -> int:
        """The backward that a forward runs in, for :meth:`collect`; -1 for none.

        ``torch.utils.checkpoint`` calls forward again inside backward, and with ``use_reentrant=True`` goes backward
        through it by a backward of its own. What that finds belongs to the step of the backward around it.
        """
        task = torch._C._current_graph_task_id()
        if task >= 0:
            self._of(task)
        return task

    def _of(self, task: int) -> _Backward:
        """What the running backward ``task`` has found."""
        known = self._running.get(task)
        backward = None if known is None else known()
        if backward is None:
            for number, each in list(self._running.items()):  # of backwards that failed
                if each() is None:
                    self._running.pop(number, None)
            backward = _Backward(self, task)
            self._running[task] = weakref.ref(backward)
            Variable._execution_engine.queue_callback(backward)
        return backward

    def collect(self, gradient: Any, enclosing: int = -1) -> None:
        """Keep a gradient until the backward that is running ends, or the one that its forward ran in."""
        around = self._running.get(enclosing)
        backward = None if around is None else around()
        if backward is None:
            if not misuse.is_wanted(self):
                return
            backward = self._of(torch._C._current_graph_task_id())
        backward.gradients.append(gradient)

    def end_backward(self, gradients: list[Any], task: int) -> None:
        """The backward ``task`` has ended: step, or wait for what says so."""
        self._running.pop(task, None)
        self.latest, trained = task, self.trained
        if trained is None or not gradients:
            return
        # Gradients are on in a backward with create_graph=True alone; turning them off costs a microsecond.
        with self._lock, torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            gradients = trained.exchange(gradients)
            if self.deferred:
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
            elif self._accumulating:
                self._pending.append(([each.kept() for each in gradients], self.scale))
            else:
                if self.checked:
                    misuse.check_scaler(self)
                if self.optimizer is not None:
                    self.optimizer.hand_lr_over()
                trained.apply_gradients(gradients, self.scale)
                self.since_optimizer += 1
                self._mark()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """One step from all backwards inside; none if it is left by an exception. An optimizer accumulates anyway."""
        if self.deferred:
            yield
            return
        self._accumulating += 1
        self._unmark()
        try:
            yield
        except BaseException:
            if self._accumulating == 1:
                self.discard()
            raise
        finally:
            self._accumulating -= 1
        if not self._accumulating and self._pending:
            if self.optimizer is not None:
                self.optimizer.hand_lr_over()
            self._apply_pending(1.0)
            self.since_optimizer += 1
            self._mark()

    def discard(self) -> None:
        """Drop gradients that were not used."""
        self._pending.clear()
        self._norm = 0.0

    def step(self) -> None:
        """Use what was collected."""
        with self._lock:
            self._take_changes()
            self._apply_pending(1.0)
            self._norm = 0.0

    @torch.no_grad()
    def _apply_pending(self, factor: float) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        factors = {each for _, each in pending}
        trained = self.trained
        if len(factors) == 1:
            trained.apply_gradients([g for group, _ in pending for g in group], factors.pop() * factor)
        else:
            trained.apply_gradients([g.scaled(each) for group, each in pending for g in group], factor)

    def _publish(self) -> None:
        """Give the handle a gradient with the norm of the rows' gradient."""
        trained = self.trained
        gradients = [g if each == 1.0 else g.scaled(each) for group, each in self._pending for g in group]
        self._norm = trained.gradient_norm(gradients)
        handle = trained.handle
        self._show(torch.tensor(_DIRECTION, device=handle.device, dtype=handle.dtype) * self._norm)

    def _take_changes(self) -> None:
        """Do to the rows' gradient what was done to the handle's: clipped, unscaled or cleared."""
        if not self._pending:
            return
        handle = self.trained.handle
        grad = handle.grad
        if grad is None:
            self.discard()
            return
        first, second = grad.tolist()  # versions do not tell: GradScaler changes gradients without a trace
        before = [float(each) for each in torch.tensor(_DIRECTION, dtype=handle.dtype) * self._norm]
        if self._norm == 0.0 or not math.isfinite(self._norm):
            return
        if first == second == 0.0:
            self.discard()
            return
        factor = second / before[1]
        if not math.isclose(first / before[0], factor, rel_tol=1e-3):
            raise ConfigError(
                f"the gradient of {self.name} was changed by more than a factor: from {before} to {[first, second]} "
                "(clip_grad_value_, or noise?). Rows have no gradient to change element by element. Clip by norm "
                "(clip_grad_norm_), or give the row optimizer clip_value."
            )
        self._pending = [(group, each * factor) for group, each in self._pending]
        self._norm *= factor
        self._published, self._version = grad, grad._version

    def _mark(self) -> None:
        """Leave a gradient at the handle that shows whether somebody clips or unscales it."""
        if not self.checked:
            return
        handle: Tensor = self.trained.handle
        mark = self._marked
        if mark is not None and mark is self._published and mark._version == self._version and mark is handle.grad:
            return
        mark = handle.new_full((2,), _MARK)
        self._marked = mark
        self._show(mark)

    def _show(self, grad: Tensor) -> None:
        """Make this the handle's gradient, and know it again."""
        self.trained.handle.grad = grad
        self._published, self._version = grad, grad._version

    def expect_gradient(self) -> None:
        """The handle's gradient is about to change for no reason of the loop's."""
        if not self.deferred:
            self._unmark()

    def _unmark(self) -> None:
        if self.trained.handle.grad is self._published:
            self.trained.handle.grad = self._published = None

    def check(self) -> None:
        """Refuse a loop whose steps would mean something else (:mod:`stoker.tables.autograd.misuse`).

        Raises:
            ConfigError: gradients were clipped or unscaled behind a step, or other ranks train on their own.
        """
        if not self.alone:
            misuse.check_ranks(self)
        if self.checked and not self.deferred:
            if not self._watched:
                misuse.watch(self)
                self._watched = True
            self.check_mark()

    def check_mark(self) -> None:
        """Refuse a gradient that was clipped or unscaled after the rows had stepped.

        Raises:
            ConfigError: see above.
        """
        published = self._published
        if published is None or published._version == self._version or published is not self.trained.handle.grad:
            return
        self._published = None
        if published.tolist() != [0.0, 0.0]:
            raise misuse.changed_gradient(self)


class TableOptimizer(misuse.RowsOptimizer):
    """Steps the rows of tables when ``step()`` says so, as an optimizer of torch's steps parameters.

    Made by :meth:`stoker.EmbeddingTables.as_optimizer`. Gradients of any number of backwards are summed until
    :meth:`step`; ``zero_grad()`` drops them. Learning-rate schedulers drive ``param_groups[0]["lr"]``; ``GradScaler``
    and ``clip_grad_norm_`` work, because the one parameter it holds has a gradient with the norm of the rows' gradient.

    State of the row optimizer belongs to the tables (:func:`stoker.save`), not to this object.
    """

    def __init__(self, trained: Any, steps: RowSteps, *, in_backward: bool = False) -> None:
        super().__init__([trained.handle], {"lr": trained.optimizer.lr})
        self._row_steps, self.in_backward = steps, in_backward

    def hand_lr_over(self) -> None:
        """Give the tables the learning rate that a scheduler may have set."""
        trained, rate = self._row_steps.trained, float(self.param_groups[0]["lr"])
        if rate != trained.optimizer.lr:
            trained.lr = rate

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the row optimizer with the sum of the gradients collected.

        Raises:
            ConfigError: gradients were changed element by element.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.in_backward:
            self.hand_lr_over()
            self._row_steps.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients collected."""
        super().zero_grad(set_to_none)
        if not self.in_backward:
            self._row_steps.discard()
