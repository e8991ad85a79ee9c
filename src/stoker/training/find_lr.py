"""A range test for learning rates (Smith 2017): they rise step by step, and the loss shows which of them learn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Unpack

from stoker.data.dataset import Dataset
from stoker.errors import ConfigError
from stoker.optim import Constant, Schedule
from stoker.training.config import TrainConfig
from stoker.training.rundir import open_dataset
from stoker.training.settings import TrainSettings
from stoker.training.throwaway import throwaway

__all__ = ["Finding", "find_lr"]

Which = Literal["both", "rows", "dense"]
_DIVERGED = 4.0  # times the least smoothed loss: no use in going on
_PASSES = 3.0  # over the training rows, from which on a warning is due
_SKIPPED = 0.05  # of the steps at the beginning, where the smoothed loss has not settled


@dataclass(frozen=True, kw_only=True)
class _Rising(Schedule):
    """From ``low`` to ``high``, each step the same factor."""

    kind: ClassVar[str] = "rising"
    low: float
    high: float
    steps: int

    def decay(self, step: int) -> float:
        return float(self.low * (self.high / self.low) ** (step / (self.steps - 1)))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What :func:`find_lr` saw. Rates are ``factors`` times those of the settings, for what was varied."""

    which: Which
    batch_size: int
    row_lr: float  # that the factors multiply, scaled to the batch size
    dense_lr: float
    factors: tuple[float, ...]  # of each step
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    diverged: bool  # the loss rose so far that the test ended early
    epochs: float = 0.0  # passes over the training rows

    @property
    def minimum(self) -> int | None:
        """The step with the least smoothed loss; None if it was the first that counts, and so nothing was learnt."""
        begin = self._begin
        at = min(range(begin, len(self.smoothed)), key=self.smoothed.__getitem__, default=begin)
        return at if at > begin else None

    @property
    def steepest(self) -> int | None:
        """The step where the smoothed loss falls fastest by the logarithm of the rate, before its minimum."""
        if (end := self.minimum) is None:
            return None
        begin, reach = self._begin, max(2, len(self.smoothed) // 20)

        def slope(at: int) -> float:
            low, high = max(begin, at - reach), min(end, at + reach)
            return (self.smoothed[high] - self.smoothed[low]) / math.log(self.factors[high] / self.factors[low])

        return min(range(begin, end), key=slope)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the suggestions doubtful, in words."""
        said = []
        if self.epochs > _PASSES:
            said.append(
                f"the test passed over the training rows {self.epochs:.0f} times, so the loss also falls by what is "
                "learnt by heart: take smaller batches, fewer steps, or rates from the left end of the slope"
            )
        if self.minimum is not None and not self.diverged and self.minimum >= 0.98 * (len(self.factors) - 1):
            said.append(
                "the loss still fell at the highest rates, so its minimum is not known: raise the highest factor"
            )
        return tuple(said)

    @property
    def _begin(self) -> int:
        return min(int(_SKIPPED * len(self.factors)), max(0, len(self.smoothed) - 1))

    @property
    def suggestions(self) -> dict[str, dict[str, float]]:
        """By rule, ``steepest`` and ``minimum / 10``, the ``row_lr`` and ``dense_lr`` that it suggests."""
        if self.minimum is None or self.steepest is None:
            return {}
        factors = {"steepest": self.factors[self.steepest], "minimum / 10": self.factors[self.minimum] / 10}
        return {rule: self.rates(factor) for rule, factor in factors.items()}

    def rates(self, factor: float) -> dict[str, float]:
        """The rates at a factor, those that were varied."""
        found = {} if self.which == "dense" else {"row_lr": self.row_lr * factor}
        return found if self.which == "rows" else {**found, "dense_lr": self.dense_lr * factor}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        lists = {name: list(getattr(self, name)) for name in ("factors", "losses", "smoothed")}
        return {
            "which": self.which, "batch_size": self.batch_size, "row_lr": self.row_lr, "dense_lr": self.dense_lr,
            "diverged": self.diverged, "epochs": self.epochs, "suggestions": self.suggestions,
            "warnings": list(self.warnings), **lists,
        }  # fmt: skip

    def plot(self, path: str | Path) -> None:
        """Write loss and smoothed loss by rate as a PNG.

        Raises:
            ConfigError: the name does not end in .png.
            DependencyError: matplotlib is not installed.
        """
        from stoker.training.find_lr_plot import plot_finding

        plot_finding(self, Path(path))


def find_lr(
    dataset: Dataset | str | Path,
    config: TrainConfig | None = None,
    *,
    lr_steps: int = 200,
    low: float = 1e-3,
    high: float = 1e3,
    which: Which = "both",
    smoothing: float = 0.9,
    progress: Callable[[int, int], None] | None = None,
    **settings: Unpack[TrainSettings],
) -> Finding:
    """Train a model that is thrown away with rates that rise from step to step, and see what its loss does.

    Args:
        dataset: what ``stoker prepare`` wrote.
        config: settings of the run that is to come; keyword settings go on top. Its schedule does not count.
        lr_steps: batches; epochs follow each other where one has too few.
        low: first factor on the rates of the settings.
        high: last factor.
        which: what rises, "rows", "dense" or "both" with their ratio as in the settings.
        smoothing: weight of the past in the smoothed loss, in [0, 1); its bias is corrected.
        progress: called with (steps done, all steps).
        settings: fields of :class:`TrainConfig`.

    Raises:
        ConfigError: settings that cannot work, or rates of 0, which nothing multiplies.
        DataError: no such dataset, or a damaged one.
    """
    if lr_steps < 20:
        raise ConfigError(f"{lr_steps} steps are too few to see a loss fall and rise. Give at least 20.")
    if not 0 < low < high < math.inf:
        raise ConfigError(f"rates rise from factor {low:g} to {high:g}: low must be above 0, and high above low.")
    if which not in ("both", "rows", "dense"):
        raise ConfigError(f"which is {which!r}. Choose 'both', 'rows' or 'dense'.")
    if not 0 <= smoothing < 1:
        raise ConfigError(f"smoothing is {smoothing}; it is the weight of the past, in [0, 1).")
    data = open_dataset(dataset)
    config = (config or TrainConfig()).replace(**settings)
    if not len(data.train):
        raise ConfigError(f"{data.path} has no training rows.")
    rising = _Rising(low=low, high=high, steps=lr_steps)
    losses: list[float] = []
    smoothed: list[float] = []
    average, diverged = 0.0, False
    rows = Constant() if which == "dense" else rising
    with throwaway(data, config, lr_steps, rising, rows) as model:
        row_lr, dense_lr = model.model.embeddings.optimizer.lr, float(model.dense.param_groups[0]["lr"])
        if (which != "dense" and not row_lr) or (which != "rows" and not dense_lr):
            raise ConfigError(f"row_lr is {row_lr:g} and dense_lr {dense_lr:g}: a rate of 0 stays 0 under any factor.")
        while len(losses) < lr_steps:
            loss = float(model.step(vary_dense=which != "rows"))
            if not math.isfinite(loss):
                diverged = True
                break
            losses.append(loss)
            average = smoothing * average + (1.0 - smoothing) * loss
            smoothed.append(average / (1.0 - smoothing ** len(losses)))
            if progress is not None:
                progress(len(losses), lr_steps)
            if len(losses) > _SKIPPED * lr_steps and smoothed[-1] > _DIVERGED * min(smoothed):
                diverged = True
                break
    return Finding(
        which=which, batch_size=config.batch_size, row_lr=row_lr, dense_lr=dense_lr,
        factors=tuple(rising.factor(step) for step in range(len(losses))), losses=tuple(losses),
        smoothed=tuple(smoothed), diverged=diverged, epochs=len(losses) * config.batch_size / len(data.train),
    )  # fmt: skip
