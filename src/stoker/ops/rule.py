"""The constants of one row update, as plain numbers that any back end can take."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["RowRule"]


class RowRule(NamedTuple):
    """One update's constants. Every back end rounds each to float32 before use.

    ``kind`` is one of "sgd", "adagrad", "rowwise_adagrad", "adam", "lamb" (:mod:`stoker.ops.lamb`).
    """

    kind: str
    lr: float
    eps: float = 0.0
    beta1: float = 0.0
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
    l2: float = 0.0  # and weight decay that goes through the moments
