"""A range test for learning rates (Smith 2017): rates rise step by step, and the loss shows which ones learn.

The rate where the loss falls fastest is best for the first steps, in which a model mostly learns the base rate of the
labels. It need not be the best for a run. So each candidate is compared with the rates of the settings, with a new
model over the same batches, and only rates that are better on held-out rows are suggested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from stoker.base.errors import ConfigError
from stoker.base.picture import Grid, Plotted, blank
from stoker.base.settings import with_arguments_of
from stoker.dataset.dataset import Dataset
from stoker.optim import Schedule
from stoker.training.config import TrainConfig
from stoker.training.defaults import complete
from stoker.training.files.rundir import open_dataset
from stoker.training.replica import throwaway
from stoker.training.scores.evaluation import predict
from stoker.training.settings import RangeTest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Which = Literal["both", "rows", "dense"]
_DIVERGED = 4.0  # factor on the least smoothed loss, at which the test stops
_PASSES = 3.0  # over the training rows, from which there is a warning
_TRIAL = 5  # most steps of a trial, in lengths of the range test
_HELD_OUT = 2**16  # validation rows for trials
_HELD_OUT_SHARE = 0.1  # without validation rows: batches after those of a trial, as a share of them
_LEAST = 2.0**-24  # least probability of the label in the log loss
_SURE = 2.0  # standard errors by which a trial must be better
_SKIPPED = 0.05  # of the steps at the start, in which the smoothed loss is not stable


@dataclass(frozen=True, kw_only=True)
class _Rising(Schedule):
    """Rise from ``low`` to ``high`` by the same factor each step."""

    kind: ClassVar[str] = "rising"
    low: float
    high: float
    steps: int

    def decay(self, step: int) -> float:
        return float(self.low * (self.high / self.low) ** (step / (self.steps - 1)))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The loss on held-out rows, after training with a constant factor on the rates of the settings."""

    rule: str  # "settings", "steepest" or "minimum / 10"
    factor: float
    loss: float  # mean log loss of the held-out rows
    change: float  # difference of that loss to the trial of the settings
    error: float  # standard error of the change, over the rows

    @property
    def better(self) -> bool:
        """True if the loss is lower than that of the settings by more than chance."""
        return self.change < -_SURE * self.error


@dataclass(frozen=True, kw_only=True, repr=False)
class Finding(Plotted):
    """The result of :func:`find_lr`. Varied rates are ``factors`` times those of the settings."""

    which: Which
    batch_size: int
    row_lr: float  # of the settings, scaled to the batch size
    dense_lr: float
    factors: tuple[float, ...]  # one for each step
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    diverged: bool  # the loss rose so far that the test ended early
    epochs: float = 0.0  # passes over the training rows
    trials: tuple[Trial, ...] = ()  # the first one is that of the settings
    trial_steps: int = 0  # batches of each trial
    held_out: int = 0  # held-out rows

    @property
    def minimum(self) -> int | None:
        """The step with the least smoothed loss; None if it is the first one, because then nothing was learned."""
        begin = self._begin
        at = min(range(begin, len(self.smoothed)), key=self.smoothed.__getitem__, default=begin)
        return at if at > begin else None

    @property
    def steepest(self) -> int | None:
        """The step before the minimum where the smoothed loss falls fastest by the logarithm of the rate."""
        if (end := self.minimum) is None:
            return None
        begin, reach = self._begin, max(2, len(self.smoothed) // 20)

        def slope(at: int) -> float:
            low, high = max(begin, at - reach), min(end, at + reach)
            return (self.smoothed[high] - self.smoothed[low]) / math.log(self.factors[high] / self.factors[low])

        return min(range(begin, end), key=slope)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to doubt the suggestions."""
        said = []
        if self.epochs > _PASSES:
            said.append(
                f"the test passed over the training rows {self.epochs:.0f} times, so the loss also falls by "
                "overfitting: take smaller batches, fewer steps, or rates from the left end of the slope"
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
    def candidates(self) -> dict[str, float]:
        """The candidates of the curve as factors, by rule: ``steepest`` and ``minimum / 10``."""
        if self.minimum is None or self.steepest is None:
            return {}
        return {"steepest": self.factors[self.steepest], "minimum / 10": self.factors[self.minimum] / 10}

    @property
    def suggestions(self) -> dict[str, dict[str, float]]:
        """The rates that are better than those of the settings, by rule, the best first."""
        found = sorted((trial for trial in self.trials if trial.better), key=lambda trial: trial.loss)
        return {trial.rule: self.rates(trial.factor) for trial in found}

    def rates(self, factor: float) -> dict[str, float]:
        """Return the varied rates at a factor."""
        found = {} if self.which == "dense" else {"row_lr": self.row_lr * factor}
        return found if self.which == "rows" else {**found, "dense_lr": self.dense_lr * factor}

    def summary(self) -> str:
        """Return the suggested rates, or that there are none."""
        if not self.candidates:
            return "no rate to try: the loss " + ("diverged before it fell" if self.diverged else "did not fall")
        best = next(iter(self.suggestions.items()), None)
        if best is None:
            return "no other rates beat those of the settings"
        return f"{', '.join(f'{name} {value:.2g}' for name, value in best[1].items())} suggested ({best[0]})"

    def grids(self) -> tuple[Grid, ...]:
        """Return a table with a line for each trial."""
        if not self.trials:
            return ()
        rows = [
            [
                trial.rule, *(f"{rate:.2g}" for rate in self.rates(trial.factor).values()), f"{trial.loss:.4f}",
                f"{trial.change:+.4f}", f"{trial.error:.4f}",
            ]
            for trial in self.trials
        ]  # fmt: skip
        return (Grid(["rates", *self.rates(1.0), "held-out loss", "change", "error"], rows),)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        trials = [{**asdict(trial), **self.rates(trial.factor), "better": trial.better} for trial in self.trials]
        lists = {name: list(getattr(self, name)) for name in ("factors", "losses", "smoothed", "warnings")}
        return {**vars(self), **lists, "trials": trials, "suggestions": self.suggestions}

    def figure(self) -> Figure:
        """Draw loss and smoothed loss by rate."""
        figure = blank(7, 4)
        axes = figure.subplots()
        name = "row_lr" if self.which == "rows" else "dense_lr"
        base = self.row_lr if self.which == "rows" else self.dense_lr
        rates = [base * factor for factor in self.factors]
        axes.plot(rates, self.losses, linewidth=0.6, color="lightgray", label="loss")
        axes.plot(rates, self.smoothed, label="smoothed")
        for (rule, factor), style in zip(self.candidates.items(), ("-", "--"), strict=False):
            found = self.rates(factor)
            words = ", ".join(f"{key} {value:.2g}" for key, value in found.items())
            axes.axvline(found[name], linestyle=style, linewidth=1, color="gray", label=f"{rule}: {words}")
        low, high = min(self.smoothed), max(self.smoothed[: max(1, len(self.smoothed) // 4)])
        axes.set(
            xscale="log", xlabel=name + (f" (row_lr: times {self.row_lr / base:g})" if self.which == "both" else ""),
            ylabel="loss", ylim=(low - 0.1 * (high - low + 1e-9), high + high - low + 1e-9),
        )  # fmt: skip
        axes.legend()
        return figure


@dataclass(frozen=True)
class SearchArguments(TrainConfig, RangeTest):
    """The arguments of :func:`stoker.find_lr`."""

    dataset: Dataset | str | Path
    config: TrainConfig | None = None
    _: KW_ONLY
    progress: Callable[[int, int], None] | None = None


@with_arguments_of(SearchArguments)
def find_lr(
    dataset: Dataset | str | Path,
    config: TrainConfig | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Finding:
    """Find learning rates: train with rising rates, and compare the candidates of the loss curve on held-out rows.

    The models are not kept.

    Args:
        dataset: a dataset or its directory.
        config: settings of the planned run; keyword settings win. Its schedule does not count.
        lr_steps: batches of the range test, over several epochs if needed.
        low: first factor on the rates of the settings.
        high: last factor.
        which: rates that rise: "rows", "dense", or "both" with the ratio of the settings.
        smoothing: weight of earlier steps in the smoothed loss, in [0, 1). Its bias is corrected.
        trial_steps: batches of each trial; there are at most three trials. None takes the length of the planned run, at
            most five times ``lr_steps``.
        progress: called with (steps done, all steps).
        settings: fields of :class:`TrainConfig`.

    Raises:
        ConfigError: settings that cannot work, or rates of 0.
        DataError: no such dataset, or a damaged one.

    >>> from stoker.testing import make_dataset
    >>> found = stoker.find_lr(make_dataset("data", rows=2000), batch_size=64, lr_steps=40, trial_steps=20)
    >>> [trial.rule for trial in found.trials]
    ['settings', 'steepest', 'minimum / 10']
    >>> found
    <Finding: ...>
    """
    test = RangeTest.taken_from(settings)
    data = open_dataset(dataset)
    data.check_labelled("trained on")
    config = (config or TrainConfig()).replace(**settings)
    if not len(data.train):
        raise ConfigError(f"{data.path} has no training rows.")
    config = complete(config, data)
    epoch = -(-len(data.train) // config.batch_size)
    trial_steps = test.trial_steps or min(config.total_steps(epoch), _TRIAL * test.lr_steps)
    total = test.lr_steps + 3 * trial_steps
    done = count(1)

    def report() -> None:
        if progress is not None:
            progress(next(done), total)

    found = _rise(data, config, test, report)
    if not found.candidates:
        return found
    factors = {"settings": 1.0, **found.candidates}
    held_out = []
    for number, factor in enumerate(factors.values()):
        done = count(test.lr_steps + number * trial_steps + 1)
        held_out.append(_try(data, config, test.which, factor, trial_steps, report))
    trials = tuple(
        Trial(
            rule=rule, factor=factor, loss=float(loss.mean()), change=float((loss - held_out[0]).mean()),
            error=float((loss - held_out[0]).std() / math.sqrt(len(loss))),
        )
        for (rule, factor), loss in zip(factors.items(), held_out, strict=True)
    )  # fmt: skip
    return replace(found, trials=trials, trial_steps=trial_steps, held_out=len(held_out[0]))


def _rise(data: Dataset, config: TrainConfig, test: RangeTest, report: Callable[[], None]) -> Finding:
    """Train with rates that rise, until the loss leaves all bounds; ``report`` is called after every step."""
    which, smoothing, rising = test.which, test.smoothing, _Rising(low=test.low, high=test.high, steps=test.lr_steps)
    losses: list[float] = []
    smoothed: list[float] = []
    average, diverged = 0.0, False
    with throwaway(data, config, rising.steps, *_schedules(rising, which)) as (replica, batches):
        row_lr, dense_lr = replica.model.embeddings.optimizer.lr, float(replica.dense.param_groups[0]["lr"])
        if (which != "dense" and not row_lr) or (which != "rows" and not dense_lr):
            raise ConfigError(f"row_lr is {row_lr:g} and dense_lr {dense_lr:g}: a rate of 0 stays 0 under any factor.")
        while len(losses) < rising.steps and not diverged:
            loss = float(replica.step(next(batches)))
            if diverged := not math.isfinite(loss):
                break
            losses.append(loss)
            average = smoothing * average + (1.0 - smoothing) * loss
            smoothed.append(average / (1.0 - smoothing ** len(losses)))
            report()
            diverged = len(losses) > _SKIPPED * rising.steps and smoothed[-1] > _DIVERGED * min(smoothed)
    return Finding(
        which=which, batch_size=config.batch_size, row_lr=row_lr, dense_lr=dense_lr,
        factors=tuple(rising.factor(step) for step in range(len(losses))), losses=tuple(losses),
        smoothed=tuple(smoothed), diverged=diverged, epochs=len(losses) * config.batch_size / len(data.train),
    )  # fmt: skip


def _schedules(varied: Schedule, which: Which) -> tuple[Schedule | None, Schedule | None]:
    """Return the schedules of the dense rate and of the row rate; None means constant."""
    return None if which == "rows" else varied, None if which == "dense" else varied


def _try(
    data: Dataset, config: TrainConfig, which: Which, factor: float, steps: int, report: Callable[[], None]
) -> npt.NDArray[np.float64]:
    """Return the log loss of every held-out row [n] after some steps at a constant factor, or after a better epoch."""
    fixed = _Rising(low=factor, high=factor, steps=2)
    valid, epoch = data.splits.get("valid"), -(-len(data.train) // config.batch_size)
    more = 0 if valid else max(1, int(_HELD_OUT_SHARE * steps))
    found: list[Any] = []  # labels and scores after each epoch
    with throwaway(data, config, steps + more, *_schedules(fixed, which)) as (replica, batches):
        for step, batch in enumerate(islice(batches, steps), 1):
            diverged = not math.isfinite(float(replica.step(batch)))
            if valid and (diverged or step % epoch == 0 or step == steps):
                predicted = predict(replica.model, valid, rows=min(_HELD_OUT, len(valid)))
                found = [*([] if diverged else found), (predicted.labels, predicted.scores)]
            if diverged:
                break
            report()
        if not valid:  # the rows of the next batches, without training on them
            replica.model.eval()
            pairs: list[Any] = []
            for batch in islice(batches, more):
                assert batch.labels is not None
                pairs.append((batch.labels.clone(), replica.model.predict(batch)))
            found = [[torch.cat(each).cpu().numpy() for each in zip(*pairs, strict=True)]]
    rights = (np.where(labels > 0.5, scores, 1 - scores).astype(np.float64) for labels, scores in found)
    losses = [-np.log(np.maximum(np.nan_to_num(each), _LEAST)) for each in rights]  # diverged: wrong on all rows
    return min(losses, key=lambda loss: float(loss.mean()))  # the best epoch, which a run keeps
