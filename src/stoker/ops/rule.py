"""How rows are updated: the formula of each rule, written once for all back ends, and its constants.

A formula takes arithmetic ``x``, constants ``c`` by name (:class:`Constants`), and rows. It works on any type with
Python's operators: tensors of rows [U, D] with numbers of rows [U, 1] (:class:`stoker.ops.reference.Tensors`), or
vectors of one row (:class:`stoker.ops.codegen.llvm.Vectors`). ``x`` has ``sqrt(v)``, ``square_sum(v)`` and ``norm(v)``
of each row, ``over(number, v)``, rounded once, ``is_zero(v)``, ``where(condition, v, other)`` and ``clamp(v, limit)``.
Triton reads source text, so :mod:`stoker.ops.gpu.kernels` has the formulas once more; the reference steps for others.
"""

from __future__ import annotations

import marshal
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np


class Constants(NamedTuple):
    """The numbers that kernels read, each rounded to float32: see :meth:`RowRule.constants`."""

    lr: float  # divided by bias1; lamb: 1 / bias1
    eps: float
    share: float  # 1 / D
    beta1: float
    rest1: float  # 1 - beta1
    beta2: float
    rest2: float
    unbias: float  # 1 / sqrt(bias2)
    keep: float
    l1: float
    l2: float
    clip_value: float
    clip_norm: float
    decay: float
    cow_ratio: float
    cow_floor: float


# Flags of condition(): what it does to a gradient.
CLIP_VALUE, CLIP_NORM, DECAY, COW = 1, 2, 4, 8


def condition(x: Any, c: Any, flags: int, g: Any, w: Any, count: Any) -> Any:
    """Clip the gradients ``g`` of rows ``w`` that occur ``count`` times each, and add weight decay."""
    if flags & CLIP_VALUE:
        g = x.clamp(g, c.clip_value)
    if flags & CLIP_NORM:
        g = _shorten(x, g, c.clip_norm)
    if flags & COW:
        own = x.norm(w) * c.cow_ratio
        g = _shorten(x, g, count * x.where(own > c.cow_floor, own, c.cow_floor))
    return g + w * c.decay if flags & DECAY else g


def _shorten(x: Any, g: Any, limit: Any) -> Any:
    norm = x.norm(g)
    return g * x.where(norm > limit, x.over(limit, norm), 1.0)


def _sgd(x: Any, c: Any, w: Any, g: Any) -> Any:
    return (w - g * c.lr,)


def _adagrad(x: Any, c: Any, w: Any, g: Any, total: Any) -> Any:
    total = total + g * g
    return w - (g * c.lr) / (x.sqrt(total) + c.eps), total


def _rowwise_adagrad(x: Any, c: Any, w: Any, g: Any, total: Any) -> Any:
    total = total + x.square_sum(g) * c.share
    return w - g * x.over(c.lr, x.sqrt(total) + c.eps), total


def moments(c: Any, g: Any, mean: Any, square: Any) -> tuple[Any, Any]:
    """Return Adam's moments after a gradient."""
    return mean * c.beta1 + g * c.rest1, square * c.beta2 + (g * g) * c.rest2


def direction(x: Any, c: Any, mean: Any, square: Any) -> Any:
    """Return Adam's step for its moments."""
    return (mean * c.lr) / (x.sqrt(square) * c.unbias + c.eps)


def _adam(x: Any, c: Any, w: Any, g: Any, mean: Any, square: Any) -> Any:
    mean, square = moments(c, g, mean, square)
    return w * c.keep - direction(x, c, mean, square), mean, square


def _momentum(x: Any, c: Any, w: Any, g: Any, buffer: Any) -> Any:
    buffer = buffer * c.beta1 + g
    return w - buffer * c.lr, buffer


def _nesterov(x: Any, c: Any, w: Any, g: Any, buffer: Any) -> Any:
    buffer = buffer * c.beta1 + g
    return w - (g + buffer * c.beta1) * c.lr, buffer


def _ftrl(x: Any, c: Any, w: Any, g: Any, before: Any, linear: Any) -> Any:
    total = before + g * g
    root = x.sqrt(total)
    fresh = x.where(x.is_zero(linear), w * c.eps, linear)  # ftrl pulls a fresh weight towards itself
    linear = x.where(x.is_zero(before), fresh, linear) + (root - x.sqrt(before)) * w - g * c.lr
    above, below = linear - c.l1, linear + c.l1
    shrunk = x.where(above > 0.0, above, x.where(below < 0.0, below, linear * 0.0))
    scale = root + c.eps + c.l2
    return x.where(x.is_zero(scale), w, shrunk / scale), total, linear


def _lamb(x: Any, c: Any, w: Any, *others: Any) -> Any:
    raise ValueError("a row's step under lamb depends on its whole table: see stoker.ops.lamb")


class Rule(NamedTuple):
    """How a kind of row optimizer steps."""

    step: Callable[..., Any]  # (x, c, w, g, *states) -> the new rows and states
    state: dict[str, Literal["row", "scalar"]]  # name -> [N, D] or [N], in the order in which kernels take them
    code: int  # kernels are compiled once for each
    scope: Literal["row", "table"] = "row"  # what a step depends on: the row and its gradient, or its whole table

    @property
    def scalar(self) -> bool:
        """Whether the state is one number a row, so that a kernel takes whole rows."""
        return "scalar" in self.state.values()


_OWN = 2**32  # codes from here on are of formulas that other packages bring
_MOMENTS: dict[str, Literal["row", "scalar"]] = {"exp_avg": "row", "exp_avg_sq": "row"}
#: by kind
RULES = {
    "sgd": Rule(_sgd, {}, 0),
    "adagrad": Rule(_adagrad, {"sum": "row"}, 1),
    "rowwise_adagrad": Rule(_rowwise_adagrad, {"sum": "scalar"}, 2),
    "adam": Rule(_adam, _MOMENTS, 3),
    "momentum": Rule(_momentum, {"momentum_buffer": "row"}, 4),
    "nesterov": Rule(_nesterov, {"momentum_buffer": "row"}, 5),
    "ftrl": Rule(_ftrl, {"sum": "row", "linear": "row"}, 6),
    "lamb": Rule(_lamb, _MOMENTS, 7, "table"),
}


def add_rule(kind: str, step: Callable[..., Any], state: dict[str, Literal["row", "scalar"]]) -> None:
    """Add a formula to :data:`RULES`. Kernels on the CPU are made from it; on a GPU the reference steps."""
    RULES[kind] = Rule(step, state, _OWN | crc32(marshal.dumps(step.__code__)))  # another formula, another kernel


class RowRule(NamedTuple):
    """One update: its rule, a key of :data:`RULES`, and its constants, which back ends round to float32 before use."""

    kind: str
    lr: float
    eps: float = 0.0  # added to the root in the denominator; FTRL's beta
    beta1: float = 0.0  # also the momentum
    beta2: float = 0.0
    bias1: float = 1.0  # 1 - beta1 ** steps
    bias2: float = 1.0  # 1 - beta2 ** steps
    weight_decay: float = 0.0  # added to the gradient
    clip_value: float = math.inf
    clip_norm: float = math.inf
    cow_ratio: float = math.inf  # r of CowClip; infinity: no CowClip
    cow_floor: float = 0.0  # zeta of CowClip
    min_trust: float = 0.0  # lamb
    max_trust: float = math.inf
    l1: float = 0.0  # ftrl: times the learning rate
    l2: float = 0.0  # ftrl: times the learning rate; lamb: weight decay outside the moments
    keep: float = 1.0  # adam: factor on the row before the step, for decoupled weight decay

    @property
    def definition(self) -> Rule:
        """The rule's formula and state."""
        return RULES[self.kind]

    @property
    def flags(self) -> int:
        """The flags of :func:`condition`."""
        return (
            (CLIP_VALUE if self.clip_value != math.inf else 0)
            | (CLIP_NORM if self.clip_norm != math.inf else 0)
            | (DECAY if self.weight_decay else 0)
            | (COW if self.cow_ratio != math.inf else 0)
        )

    @property
    def counts(self) -> bool:
        """Whether the update needs how often each row occurs."""
        return bool(self.flags & COW)

    @property
    def elementwise(self) -> bool:
        """Whether each element of a row steps by itself."""
        return self.definition.scope == "row" and not self.definition.scalar and not self.flags & (CLIP_NORM | COW)

    def constants(self, dim: int) -> Constants:
        """Return the numbers for rows of ``dim`` columns."""
        return _constants(self, dim)


@lru_cache(maxsize=64)  # most steps repeat the rule of the step before
def _constants(rule: RowRule, dim: int) -> Constants:
    rate = rule.lr if rule.definition.scope == "row" else 1.0
    values = Constants(
        lr=rate / rule.bias1, eps=rule.eps, share=1.0 / dim, beta1=rule.beta1,
        rest1=1.0 - rule.beta1, beta2=rule.beta2, rest2=1.0 - rule.beta2, unbias=1.0 / math.sqrt(rule.bias2),
        keep=rule.keep, l1=rule.l1, l2=rule.l2, clip_value=rule.clip_value, clip_norm=rule.clip_norm,
        decay=rule.weight_decay, cow_ratio=rule.cow_ratio, cow_floor=rule.cow_floor,
    )  # fmt: skip
    return Constants(*np.array(values, np.float32).tolist())
