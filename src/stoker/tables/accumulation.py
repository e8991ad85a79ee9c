"""How many steps of the rows the gradients of dense parameters add up, where rows step inside backward.

An optimizer that steps once for several backwards moves its parameters by the sum of their gradients, but each of these
backwards has moved the rows. A hook on a parameter sees whether its next gradient is added to one that is there. While
an optimizer steps whenever the rows do, one of its parameters is watched. If a forward finds it behind, all are.
An optimizer is watched once a backward of the rows has reached it, or it has stepped in their thread: another thread
may be writing the gradients of others.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

T = TypeVar("T")
V = TypeVar("V")


class Weak(Generic[T, V]):
    """A value for each of some objects, as long as these live. Threads may change it while another goes through it.

    Those of ``weakref`` are slower, and each step goes through several.
    """

    def __init__(self) -> None:
        self._values: dict[weakref.ref[T], V] = {}

    def setdefault(self, key: T, value: V) -> V:
        """Return the value of an object, which is ``value`` if it had none."""
        own = weakref.ref(self)  # in a cycle with itself, hooks would not be removed from parameters

        def drop(gone: weakref.ref[T]) -> None:
            if (found := own()) is not None:
                found._values.pop(gone, None)

        return self._values.setdefault(weakref.ref(key, drop), value)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: T) -> V | None:
        """Return the value of an object, or None."""
        return self._values.get(weakref.ref(key))

    def items(self) -> Iterator[tuple[T, V]]:
        """Yield all, as they are now."""
        return ((key, value) for ref, value in self._values.copy().items() if (key := ref()) is not None)


optimizers: Weak[torch.optim.Optimizer, None] = Weak()  # those of dense parameters that are known
#: references to classes of optimizers when these were last looked for, and how many were known
_known: tuple[tuple[int, ...], int] = (), -1
_arrivals = itertools.count()


class _Sum:
    """The gradient of a dense parameter, watched as long as this object lives."""

    __slots__ = ("__weakref__", "_hook", "arrived", "number", "parameter", "reached", "steps", "took_part", "used")

    def __init__(self, parameter: Tensor, steps: int, used: bool) -> None:
        self.parameter = parameter
        self.steps = steps  # of the rows whose gradients it adds up
        self.used = used  # whether its optimizer has stepped with some of them
        self.took_part = False  # in the last step of the rows
        self.reached = False  # by a backward with which the rows have not stepped yet
        self.arrived = -1  # the last backward that added to it
        self.number = 0  # of that arrival, of all arrivals
        self._hook = parameter.register_hook(unserializable_hook(partial(_note_arrival, weakref.ref(self))))

    def __del__(self) -> None:
        self._hook.remove()

    def look(self) -> None:
        """Start anew if the gradient was cleared."""
        if self.steps and not _any(self.parameter.grad):
            self.steps, self.used = 0, False


def _note_arrival(watched: weakref.ref[_Sum], _: Tensor) -> None:
    """Note that a gradient is about to be added."""
    if (found := watched()) is not None:
        found.look()
        found.arrived, found.number = torch._C._current_graph_task_id(), next(_arrivals)


class _Partner:
    """What is known of an optimizer."""

    def __init__(self) -> None:
        self.own = False  # whether backwards of the rows reach it
        self.near = False  # whether it steps in their thread
        self.stepped = -1  # steps of the rows when it last stepped
        self.watched: dict[Tensor, _Sum] | None = None


class Accumulation:
    """Follow the gradients of dense parameters through the steps of the rows and of optimizers."""

    def __init__(self) -> None:
        self.steps = 0  # of the rows
        self.handle: Tensor | None = None  # which is no dense parameter
        self._followed: Weak[torch.optim.Optimizer, _Partner] = Weak()
        self._latest = 0  # steps of the rows when an optimizer last stepped
        self._settled = -1  # those after which all known optimizers have stepped
        self._resumes = 0  # those from which on gradients are watched

    def followed(self, optimizer: torch.optim.Optimizer) -> _Partner:
        """Return what is known of an optimizer."""
        return self._followed.get(optimizer) or self._followed.setdefault(optimizer, _Partner())

    def before_forward(self) -> None:
        """Watch all parameters of optimizers that have not stepped since the rows did."""
        if self.steps == self._settled or self.steps < self._resumes:
            return
        for optimizer, known in self._followed.items():
            if known.own and known.stepped < self.steps:
                self._watch_all(optimizer, int(self.steps > 0))

    def _watch_all(self, optimizer: torch.optim.Optimizer, steps: int) -> list[_Sum]:
        """Return those that were not watched before. ``steps``: what a gradient adds up if none is known."""
        known = self.followed(optimizer)
        watched = known.watched = known.watched or {}
        new = [p for p in parameters_of(optimizer) if p not in watched and p.requires_grad and p is not self.handle]
        if not new:
            return []
        for each in watched.values():
            each.look()
        sums = [(each.steps, each.used) for each in watched.values()]  # all are cleared together
        steps, used = max(sums, default=(steps, False))
        for p in new:
            watched[p] = _Sum(p, steps, used) if steps and _any(p.grad) else _Sum(p, 0, False)
        return [watched[p] for p in new]

    def end_backward(self, task: int) -> None:
        """Note what got a gradient in the backward ``task``, which reached the rows, or in one inside it."""
        if self.steps < self._resumes:
            return
        if self.steps - self._latest < 3:  # not in each step of rows that train alone
            _find_optimizers()
        for optimizer, _ in optimizers.items():
            known = self.followed(optimizer)
            if not known.own and any(map(_was_reached, parameters_of(optimizer))):
                known.own, known.watched = True, known.watched if known.near and known.watched else {}
            if known.watched is not None and (known.own or known.near):
                reached = [each for each in known.watched.values() if each.arrived >= task]
                for each in reached or [each for each in self._watch_all(optimizer, 0) if _was_reached(each.parameter)]:
                    each.reached = True

    def step_rows(self) -> None:
        """Count a step of the rows with all backwards since their last."""
        self.steps += 1
        for _, known in self._followed.items():
            for each in (known.watched or {}).values():
                each.steps += each.reached
                each.took_part, each.reached = each.reached, False

    def of(self, optimizer: torch.optim.Optimizer) -> tuple[int, bool]:
        """Return how many steps of the rows its gradients add up, and whether it has stepped with some of them."""
        watched = (self.followed(optimizer).watched or {}).values()
        for each in watched:
            if each.steps > 1:
                each.look()
        return max(((each.steps, each.used) for each in watched), default=(0, False))

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step of an optimizer; watch one of the parameters that took part in the last step of the rows."""
        known = self.followed(optimizer)
        alone, known.near = known.stepped == self.steps, True  # alone: the rows have not stepped since its last step
        known.stepped = self._latest = self.steps
        if all(self.followed(each).stepped == self.steps for each, _ in optimizers.items()):
            self._settled = self.steps
        if self.steps < self._resumes:
            return
        watched = known.watched or {}
        if took_part := [(p.dim() < 2, each.number, p) for p, each in watched.items() if each.took_part]:
            kept = max(took_part, key=lambda each: each[:2])[2]  # small, and near the rows
            for p in [p for p in watched if p is not kept]:
                del watched[p]
        elif alone:
            watched.clear()
        elif not watched:
            self._watch_all(optimizer, int(self.steps > 0))
        for each in (known.watched or {}).values():
            each.used = each.steps > 0

    def forget(self, pause: int = 0) -> None:
        """Count the gradients that are there for none of the next steps, and watch none for ``pause`` steps."""
        self._settled, self._resumes = self.steps, max(self._resumes, self.steps + pause)
        self._followed = Weak()  # another thread may train the rows
        for optimizer, _ in optimizers.items():
            self.followed(optimizer).stepped = self.steps


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of all groups."""
    return (p for group in optimizer.param_groups for p in group["params"])


def _any(grad: Tensor | None) -> bool:
    """Return True if there is a gradient other than zeros; of a ``DTensor`` in the own shard, so that no rank waits."""
    own = grad.to_local() if grad is not None and hasattr(grad, "to_local") else grad
    return own is not None and bool((own.coalesce().values() if own.is_sparse else own).any())


def _was_reached(parameter: Tensor) -> bool:
    """Return True if the backward that ends now has written the gradient of a parameter."""
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node))
    except RuntimeError:  # it hands out gradients
        return False


def _kinds(kind: type[torch.optim.Optimizer]) -> list[type[torch.optim.Optimizer]]:
    return [kind, *(each for subclass in kind.__subclasses__() for each in _kinds(subclass))]


def _find_optimizers() -> None:
    """Find the optimizers of dense parameters that have not stepped yet."""
    global _known
    kinds = _kinds(torch.optim.Optimizer)
    references = tuple(map(sys.getrefcount, kinds))  # each optimizer refers to its class
    if (references, len(optimizers)) != _known:  # one may have replaced another
        for each in gc.get_referrers(*kinds):
            if isinstance(each, kinds[0]) and "param_groups" in vars(each) and not hasattr(each, "_row_steps"):
                optimizers.setdefault(each, None)
        _known = references, len(optimizers)
