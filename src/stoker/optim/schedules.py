"""Learning-rate schedules: factors on the rate that depend only on the step, so resuming needs no state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from stoker.base.checks import check_not_negative, check_types
from stoker.base.errors import ConfigError

_NOT_NEGATIVE = {"warmup", "start", "power", "end", "gamma"}


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """A factor on the learning rate that depends only on the step, so that resuming needs no state.

    Raises:
        ConfigError: a value of another type, or out of its range.
    """

    kind: ClassVar[str]
    warmup: int = 0  # steps in which the factor rises linearly from 1/warmup to 1

    def __post_init__(self) -> None:
        given = vars(self) if type(self) in SCHEDULES.values() else {"warmup": self.warmup}  # others may mean others
        check_types(self, owner := type(self).__name__)
        check_not_negative(owner, **{name: given[name] for name in _NOT_NEGATIVE & given.keys()})
        for name in {"steps", "every"} & given.keys():
            if given[name] < 1:
                raise ConfigError(f"{owner}({name}={given[name]}) must be at least 1.")

    def factor(self, step: int) -> float:
        """Return the factor at ``step``, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return self.decay(step - self.warmup)

    @abstractmethod
    def decay(self, step: int) -> float:
        """Return the factor ``step`` steps after the warm-up."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """No decay after the warm-up.

    >>> schedule = stoker.Constant(warmup=4)
    >>> [round(schedule.factor(step), 3) for step in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """

    kind: ClassVar[str] = "constant"

    def decay(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class PolynomialDecay(Schedule):
    """Fall from 1 to ``end`` as ``(1 - step/steps) ** power`` (power 1 is linear; MLPerf DLRM takes 2).

    >>> schedule = stoker.PolynomialDecay(steps=4)
    >>> [round(schedule.factor(step), 3) for step in range(6)]
    [1.0, 0.562, 0.25, 0.062, 0.0, 0.0]
    """

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
    """Fall from 1 to ``end`` along half a cosine over ``steps``.

    >>> schedule = stoker.CosineDecay(steps=4)
    >>> [round(schedule.factor(step), 3) for step in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """

    kind: ClassVar[str] = "cosine"
    steps: int
    end: float = 0.0

    def decay(self, step: int) -> float:
        share = min(step / self.steps, 1.0)
        return self.end + (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * share))


@dataclass(frozen=True, kw_only=True)
class StepDecay(Schedule):
    """Multiply by ``gamma`` every ``every`` steps.

    >>> schedule = stoker.StepDecay(every=2)
    >>> [round(schedule.factor(step), 3) for step in range(6)]
    [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    """

    kind: ClassVar[str] = "step"
    every: int
    gamma: float = 0.1

    def decay(self, step: int) -> float:
        return float(self.gamma ** (step // self.every))


@dataclass(frozen=True, kw_only=True)
class OneCycle(Schedule):
    """Rise from ``1 / div`` to 1 along half a cosine, then fall to ``1 / final_div`` along another (Smith 2018).

    Shape and defaults are fastai's; momentum does not change. ``warmup`` must be 0: the cycle has its own rise.

    Raises:
        ConfigError: a share outside (0, 1), divisors below 1, or a warm-up.

    >>> schedule = stoker.OneCycle(steps=6, share=0.5)
    >>> [round(schedule.factor(step), 3) for step in range(6)]
    [0.04, 0.372, 0.908, 0.905, 0.345, 0.0]
    """

    kind: ClassVar[str] = "one-cycle"
    steps: int  # length of the cycle
    share: float = 0.25  # of the steps, in which the factor rises
    div: float = 25.0
    final_div: float = 1e5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.share < 1.0:
            raise ConfigError(f"OneCycle(share={self.share}): the rise must take a share between 0 and 1 of the steps.")
        if not (1.0 <= self.div < math.inf and 1.0 <= self.final_div < math.inf):
            raise ConfigError(
                f"OneCycle(div={self.div}, final_div={self.final_div}): the rate is divided by them, so both must be "
                "at least 1."
            )
        if self.warmup:
            raise ConfigError(f"OneCycle(warmup={self.warmup}): the cycle has its own warm-up. Leave it out.")

    def decay(self, step: int) -> float:
        # The last step of the cycle, not the one after it, has the lowest rate.
        at = min(step / max(1, self.steps - 1), 1.0)
        if at < self.share:
            return _half_cosine(1.0 / self.div, 1.0, at / self.share)
        return _half_cosine(1.0, 1.0 / self.final_div, (at - self.share) / (1.0 - self.share))


def _half_cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * 0.5 * (1.0 + math.cos(math.pi * share))


#: by kind
SCHEDULES: dict[str, type[Schedule]] = {
    schedule.kind: schedule for schedule in (Constant, PolynomialDecay, CosineDecay, StepDecay, OneCycle)
}
