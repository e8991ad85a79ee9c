"""``stoker.explain``: the reason for each default of a run, for one dataset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.base.device import resolve_device
from stoker.base.picture import Grid, Shown
from stoker.base.settings import with_arguments_of
from stoker.base.units import format_size, plural
from stoker.dataset.dataset import Dataset
from stoker.optim import Constant
from stoker.training import defaults
from stoker.training.config import TrainConfig
from stoker.training.files.rundir import open_dataset
from stoker.training.placing import rows_bytes
from stoker.training.scheduled import batch_order
from stoker.training.settings import DENSE_LR


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A setting, its value for a dataset, and the reason."""

    setting: str
    value: Any
    why: str
    given: bool = False  # by the caller, so not a default


@dataclass(frozen=True, kw_only=True, repr=False)
class Explanation(Shown):
    """The reasons for the settings of a run, by name: ``explanation["batch_size"].why``."""

    rows: int  # training rows
    reasons: tuple[Reason, ...]

    def __getitem__(self, setting: str) -> Reason:
        return next(reason for reason in self.reasons if reason.setting == setting)

    def summary(self) -> str:
        """Return the length of the run."""
        names = ("batch_size", "epochs", "steps", "patience")
        shown = [f"{each.setting} {_said(each.value)}" for each in self.reasons if each.setting in names]
        return f"{self.rows:,} training rows, {', '.join(shown)}"

    def grids(self) -> tuple[Grid]:
        """Return a table with one line for each setting."""
        cells = [[each.setting.replace("_", "-"), _said(each.value), each.why] for each in self.reasons]
        return (Grid(["setting", "value", "why"], cells, f"{self.rows:,} training rows", left=(0, 1, 2)),)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"rows": self.rows, "reasons": [vars(reason) for reason in self.reasons]}


@dataclass(frozen=True)
class ExplainArguments(TrainConfig):
    """The arguments of :func:`explain`."""

    dataset: Dataset | str | Path
    config: TrainConfig | None = None
    _: KW_ONLY


@with_arguments_of(ExplainArguments)
def explain(dataset: Dataset | str | Path, config: TrainConfig | None = None, **settings: Any) -> Explanation:
    """Return the values that :func:`stoker.train` would use for the main settings, with reasons; train nothing.

    Args:
        dataset: what ``stoker prepare`` wrote.
        config: settings; keyword settings override them.
        settings: fields of :class:`TrainConfig`.

    Raises:
        ConfigError: settings cannot work.
        DataError: the dataset is missing or damaged.

    >>> from stoker.testing import make_dataset
    >>> found = stoker.explain(make_dataset("data", rows=20_000), epochs=3)
    >>> found["batch_size"].value, found["batch_size"].why
    (128, 'the largest power of two that cuts 16,000 rows into 80 batches or more')
    >>> found["epochs"].why
    'given'
    """
    data = open_dataset(dataset)
    asked = (config or TrainConfig()).replace(**settings)
    whole = defaults.complete(asked, data)
    standard = TrainConfig()
    reasons = []
    for name, value, why in _reasons(asked, whole, data):
        given = getattr(asked, name) != getattr(standard, name)
        reasons.append(Reason(setting=name, value=value, why="given" if given else why, given=given))
    return Explanation(rows=len(data.train), reasons=tuple(reasons))


def _reasons(asked: TrainConfig, config: TrainConfig, data: Dataset) -> Iterator[tuple[str, Any, str]]:
    """Yield setting, value and the reason for the value if it is a default."""
    rows, valid = len(data.train), len(data.splits.get("valid") or ())
    epoch = -(-rows // config.batch_size)
    yield "model", config.model, "it takes dense columns and ids, and learns their pairs"
    for name, value in defaults.for_small_log(asked, data).items():
        yield name, value, defaults.WHY[name]
    yield "embedding_dim", config.embedding_dim, "enough for most logs; the memory of tables grows with it"
    yield "batch_size", config.batch_size, defaults.why_batch(rows)
    if config.steps is None:
        yield "epochs", config.epochs, defaults.why_epochs(rows, validated=valid > 0)
    else:
        yield "steps", config.steps, "given"
    yield "patience", config.patience, _why_patience(asked, config, valid)
    every = "an epoch" if config.eval_every is None else config.eval_every
    yield "eval_every", every, f"{plural(epoch, 'step')}, which train on every row once"
    yield "metric", config.metric, "it chooses the best checkpoint, and does not depend on the share of positives"
    optimizer = config.make_row_optimizer(Constant())
    yield "row_optimizer", config.row_optimizer, "one number of state a row; each row has its own rate"
    yield "row_lr", optimizer.lr, f"the usual one of {config.row_optimizer}; stoker find-lr tries others"
    yield "dense_optimizer", config.dense_optimizer, "each weight has its own rate; little to tune"
    dense_lr = DENSE_LR[config.dense_optimizer] if config.dense_lr is None else config.dense_lr
    yield "dense_lr", dense_lr, f"the usual one of {config.dense_optimizer}; stoker find-lr tries others"
    ends = "patience may end the run at any step, so no schedule knows its length"
    yield "schedule", config.schedule, ends if config.patience else "rates that stay; --schedule has others"
    order = batch_order(config, data)
    why = "stoker classify made hot and cold rows" if order == "hot-cold" else "the dataset is not classified"
    yield "batch_order", order, why
    device = resolve_device(config.device).type
    yield "device", device, "there is a GPU" if device == "cuda" else "torch sees no GPU"
    size = format_size(rows_bytes(config.stored_tables(data.schema), optimizer.state))
    yield "device_memory", config.device_memory or "all", f"rows and their state take {size}"
    yield "threads", config.threads or torch.get_num_threads(), "as many as torch uses"


def _why_patience(asked: TrainConfig, config: TrainConfig, valid: int) -> str:
    if config.patience is not None:
        return f"two epochs without a better metric on {plural(valid, 'validation row')}; the best epoch is kept"
    if not valid:
        return "it needs validation rows, and there are none"
    given = asked.steps is not None or "epochs" not in defaults.left_out(asked)
    return "epochs or steps are given" if given else "there is one epoch"


def _said(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_said(each)}" for name, each in value.items())
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
