"""Optimizers for embedding rows, and learning-rate schedules that are pure functions of the step.

A row optimizer is a value: the tables read it and update rows in place during backward. Its arithmetic is
defined once, in :mod:`stoker.ops.reference`; all constants are rounded to float32 before use.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from stoker.errors import ConfigError
from stoker.ops.rule import RowRule

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Constant",
    "CosineDecay",
    "PolynomialDecay",
    "RowOptimizer",
    "RowWiseAdagrad",
    "Schedule",
    "StepDecay",
]


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """A factor on the learning rate as a function of the step, so that resuming needs no state."""

    kind: ClassVar[str]
    warmup: int = 0  # steps over which the factor rises linearly from 1/warmup to 1

    def factor(self, step: int) -> float:
        """The factor at ``step``, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return self.decay(step - self.warmup)

    @abstractmethod
    def decay(self, step: int) -> float:
        """The factor ``step`` steps after the warm-up."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """No decay after the warm-up."""

    kind: ClassVar[str] = "constant"

    def decay(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class PolynomialDecay(Schedule):
    """Falls from 1 to ``end`` as ``(1 - step/steps) ** power`` (power 1 is linear, 2 is MLPerf DLRM's)."""

    kind: ClassVar[str] = "polynomial"
    start: int = 0  # steps after the warm-up before the decay begins
    steps: int  # length of the decay
    power: float = 2.0
    end: float = 0.0  # final factor

    def decay(self, step: int) -> float:
        share = min(max(step - self.start, 0) / self.steps, 1.0)
        return float(self.end + (1.0 - self.end) * (1.0 - share) ** self.power)


@dataclass(frozen=True, kw_only=True)
class CosineDecay(Schedule):
    """Falls from 1 to ``end`` along half a cosine over ``steps``."""

    kind: ClassVar[str] = "cosine"
    steps: int
    end: float = 0.0

    def decay(self, step: int) -> float:
        share = min(step / self.steps, 1.0)
        return self.end + (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * share))


@dataclass(frozen=True, kw_only=True)
class StepDecay(Schedule):
    """Multiplies by ``gamma`` every ``every`` steps."""

    kind: ClassVar[str] = "step"
    every: int
    gamma: float = 0.1

    def decay(self, step: int) -> float:
        return float(self.gamma ** (step // self.every))


@dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """What all row optimizers share.

    Order within one update of a distinct row, with G the sum of its gradients in order of occurrence:
    clip each element of G, clip the norm of G, add ``weight_decay * w``, then the optimizer's own step.
    """

    kind: ClassVar[str]
    #: name of each state tensor -> "row" ([N, D] float32) or "scalar" ([N] float32)
    state: ClassVar[dict[str, Literal["row", "scalar"]]] = {}

    lr: float
    schedule: Schedule = field(default_factory=Constant)
    weight_decay: float = 0.0  # L2, added to the gradient of touched rows only
    clip_value: float | None = None  # largest absolute value of an element of G
    clip_norm: float | None = None  # largest Euclidean norm of G

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "clip_value", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{type(self).__name__}({name}={value}) must be finite and not negative.")

    def rule(self, tick: int) -> RowRule:
        """The constants of the update at ``tick`` (updates done so far, counted from 0)."""
        return RowRule(
            kind=self.kind,
            lr=self.lr * self.schedule.factor(tick),
            weight_decay=self.weight_decay,
            clip_value=math.inf if self.clip_value is None else self.clip_value,
            clip_norm=math.inf if self.clip_norm is None else self.clip_norm,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"kind": self.kind, **asdict(self), "schedule": self.schedule.to_dict()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> RowOptimizer:
        """Inverse of :meth:`to_dict`."""
        values = dict(values)
        schedule = dict(values.pop("schedule"))
        kinds: dict[str, type[Schedule]] = {c.kind: c for c in (Constant, PolynomialDecay, CosineDecay, StepDecay)}
        optimizers = {c.kind: c for c in (SGD, Adagrad, RowWiseAdagrad, Adam)}
        kind = values.pop("kind")
        if kind not in optimizers:
            raise ConfigError(f"row optimizer {kind!r} is unknown. Choose one of {sorted(optimizers)}.")
        if "betas" in values:
            values["betas"] = tuple(values["betas"])
        return optimizers[kind](schedule=kinds[schedule.pop("kind")](**schedule), **values)


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
