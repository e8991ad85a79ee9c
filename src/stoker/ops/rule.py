"""The constants of one row update, as plain numbers that any back end can take."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

#: kind of a rule that compiled kernels know -> names of its state tensors, in the order in which kernels take them
STATE: dict[str, tuple[str, ...]] = {
    "sgd": (), "adagrad": ("sum",), "rowwise_adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq"),
    "momentum": ("momentum_buffer",), "nesterov": ("momentum_buffer",), "ftrl": ("sum", "linear"),
}  # fmt: skip
#: kind -> the number by which kernels are specialised
CODES = {kind: code for code, kind in enumerate(STATE)}


class Constants(NamedTuple):
    """The numbers that kernels read, each rounded to float32: see :meth:`RowRule.constants`."""

    lr: float  # of adam divided by bias1
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


class RowRule(NamedTuple):
    """One update's constants. Every back end rounds each to float32 before use.

    ``kind`` is a key of :data:`STATE`, or "lamb" (:mod:`stoker.ops.lamb`).
    """

    kind: str
    lr: float
    eps: float = 0.0  # added to the root in the denominator; FTRL's beta
    beta1: float = 0.0  # also the momentum
    beta2: float = 0.0
    bias1: float = 1.0  # 1 - beta1 ** steps
    bias2: float = 1.0  # 1 - beta2 ** steps
    weight_decay: float = 0.0
    clip_value: float = math.inf
    clip_norm: float = math.inf
    cow_ratio: float = math.inf  # of CowClip: r; infinity where rows are not clipped so
    cow_floor: float = 0.0  # and zeta
    min_trust: float = 0.0  # of lamb
    max_trust: float = math.inf
    l1: float = 0.0  # of ftrl: times the learning rate
    l2: float = 0.0  # of ftrl: times the learning rate; of lamb: weight decay that goes through the moments
    keep: float = 1.0  # of adam: factor on the row before the step, for decoupled weight decay

    def constants(self, dim: int) -> Constants:
        """Return the numbers for rows of ``dim`` columns."""
        return _constants(self, dim)


@lru_cache(maxsize=64)  # most rules are those of the step before
def _constants(rule: RowRule, dim: int) -> Constants:
    values = Constants(
        lr=rule.lr / rule.bias1 if rule.kind == "adam" else rule.lr, eps=rule.eps, share=1.0 / dim, beta1=rule.beta1,
        rest1=1.0 - rule.beta1, beta2=rule.beta2, rest2=1.0 - rule.beta2, unbias=1.0 / math.sqrt(rule.bias2),
        keep=rule.keep, l1=rule.l1, l2=rule.l2, clip_value=rule.clip_value, clip_norm=rule.clip_norm,
        decay=rule.weight_decay, cow_ratio=rule.cow_ratio, cow_floor=rule.cow_floor,
    )  # fmt: skip
    return Constants(*np.array(values, np.float32).tolist())
