"""Optimizers for embedding rows.

A row optimizer is a value: the tables read it and update rows in place during backward. Its arithmetic is
defined once, in :mod:`stoker.ops.reference`; all constants are rounded to float32 before use.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from stoker.errors import ConfigError
from stoker.ops.rule import RowRule
from stoker.optim.lamb_options import check_lamb
from stoker.optim.schedules import SCHEDULES, Constant, Schedule

__all__ = ["LAMB", "ROW_OPTIMIZERS", "SGD", "Adagrad", "Adam", "RowOptimizer", "RowWiseAdagrad"]


@dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """What all row optimizers share.

    Order within one update of a distinct row, with G the sum of its gradients in order of occurrence:
    clip each element of G, clip the norm of G, clip it by CowClip, add ``weight_decay * w``, then the optimizer's own
    step.
    """

    kind: ClassVar[str]
    #: name of each state tensor -> "row" ([N, D] float32) or "scalar" ([N] float32)
    state: ClassVar[dict[str, Literal["row", "scalar"]]] = {}

    lr: float
    schedule: Schedule = field(default_factory=Constant)
    weight_decay: float = 0.0  # L2, added to the gradient of touched rows only
    clip_value: float | None = None  # largest absolute value of an element of G
    clip_norm: float | None = None  # largest Euclidean norm of G
    # CowClip's (r, zeta) (Zheng et al. 2022): the norm of G is at most count * max(r * |w|, zeta), where count is how
    # often the row occurs in the batch. The paper takes r = 1, and zeta from 1e-5 to 1e-3.
    cow_clip: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "clip_value", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{type(self).__name__}({name}={value}) must be finite and not negative.")

        if self.cow_clip is not None:
            if len(self.cow_clip) != 2 or not all(value >= 0 and math.isfinite(value) for value in self.cow_clip):
                raise ConfigError(
                    f"{type(self).__name__}(cow_clip={self.cow_clip}) must be two numbers (r, zeta), finite and not "
                    "negative, such as (1.0, 1e-5)."
                )
            if not any(self.cow_clip):
                raise ConfigError(
                    f"{type(self).__name__}(cow_clip={self.cow_clip}) would clip every gradient to 0. Raise r or zeta."
                )

    def rule(self, tick: int) -> RowRule:
        """The constants of the update at ``tick`` (updates done so far, counted from 0)."""
        return RowRule(
            kind=self.kind,
            lr=self.lr * self.schedule.factor(tick),
            weight_decay=self.weight_decay,
            clip_value=math.inf if self.clip_value is None else self.clip_value,
            clip_norm=math.inf if self.clip_norm is None else self.clip_norm,
            cow_ratio=math.inf if self.cow_clip is None else self.cow_clip[0],
            cow_floor=0.0 if self.cow_clip is None else self.cow_clip[1],
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"kind": self.kind, **asdict(self), "schedule": self.schedule.to_dict()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> RowOptimizer:
        """Inverse of :meth:`to_dict`."""
        values = dict(values)
        schedule = dict(values.pop("schedule"))
        kind = values.pop("kind")
        if kind not in ROW_OPTIMIZERS:
            raise ConfigError(f"row optimizer {kind!r} is unknown. Choose one of {sorted(ROW_OPTIMIZERS)}.")
        for name in ("betas", "cow_clip"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return ROW_OPTIMIZERS[kind](schedule=SCHEDULES[schedule.pop("kind")](**schedule), **values)


@dataclass(frozen=True, kw_only=True)
class SGD(RowOptimizer):
    """``w -= lr * G``; no momentum, so untouched rows stand still."""

    kind: ClassVar[str] = "sgd"


@dataclass(frozen=True, kw_only=True)
class Adagrad(RowOptimizer):
    """``s += G*G; w -= lr * G / (sqrt(s) + eps)`` (Duchi et al. 2011)."""

    kind: ClassVar[str] = "adagrad"
    state: ClassVar[dict[str, Literal["row", "scalar"]]] = {"sum": "row"}
    eps: float = 1e-8

    def rule(self, tick: int) -> RowRule:
        return super().rule(tick)._replace(eps=self.eps)


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(RowOptimizer):
    """``s += mean(G*G); w -= lr / (sqrt(s) + eps) * G``: one state value a row (as in FBGEMM and DLRM)."""

    kind: ClassVar[str] = "rowwise_adagrad"
    state: ClassVar[dict[str, Literal["row", "scalar"]]] = {"sum": "scalar"}
    eps: float = 1e-8

    def rule(self, tick: int) -> RowRule:
        return super().rule(tick)._replace(eps=self.eps)


@dataclass(frozen=True, kw_only=True)
class Adam(RowOptimizer):
    """Adam (Kingma & Ba 2015, Algorithm 1) whose moments move only in the steps that touch the row.

    The bias correction counts all steps, as in ``torch.optim.SparseAdam``.
    """

    kind: ClassVar[str] = "adam"
    state: ClassVar[dict[str, Literal["row", "scalar"]]] = {"exp_avg": "row", "exp_avg_sq": "row"}
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"Adam(betas={self.betas}): both must lie in [0, 1).")

    def rule(self, tick: int) -> RowRule:
        beta1, beta2 = self.betas
        return (
            super()
            .rule(tick)
            ._replace(
                eps=self.eps,
                beta1=beta1,
                beta2=beta2,
                bias1=1.0 - beta1 ** (tick + 1),
                bias2=1.0 - beta2 ** (tick + 1),
            )
        )


@dataclass(frozen=True, kw_only=True)
class LAMB(RowOptimizer):
    """LAMB (You et al. 2020, Algorithm 2) where a layer is a table: ``w -= lr * trust * u`` for each touched row.

    u is Adam's direction plus ``weight_decay * w``, with moments that move only in the steps that touch the row, and
    with ``l2 * w`` added to the gradient they see, as other row optimizers do with their ``weight_decay``. The
    trust ratio is the norm of the whole table over that of u, within bounds; rows that are not touched have u = 0. It
    is 1 where one of the norms is 0. Both are exact sums (:mod:`stoker.ops.lamb`), so they do not depend on where rows
    lie. The first update after a table was made or loaded reads all its rows once.
    """

    kind: ClassVar[str] = "lamb"
    state: ClassVar[dict[str, Literal["row", "scalar"]]] = {"exp_avg": "row", "exp_avg_sq": "row"}
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    min_trust: float = 0.0
    max_trust: float | None = 10.0  # None: no bound
    l2: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.l2 >= 0 and math.isfinite(self.l2)):
            raise ConfigError(f"LAMB(l2={self.l2}) must be finite and not negative.")
        check_lamb("LAMB", self.betas, self.eps, self.min_trust, self.max_trust)

    def rule(self, tick: int) -> RowRule:
        beta1, beta2 = self.betas
        return (
            super()
            .rule(tick)
            ._replace(
                eps=self.eps,
                beta1=beta1,
                beta2=beta2,
                bias1=1.0 - beta1 ** (tick + 1),
                bias2=1.0 - beta2 ** (tick + 1),
                min_trust=self.min_trust,
                max_trust=math.inf if self.max_trust is None else self.max_trust,
                l2=self.l2,
            )
        )


#: by kind
ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {each.kind: each for each in (SGD, Adagrad, RowWiseAdagrad, Adam, LAMB)}
