"""``stoker.explain``: the reason for each default of a run, for one dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

#: The reasons of all other defaults.
_ALWAYS = {
    "model_options": "each model has its own",
    "pooling": "a mean does not grow with the length of a history",
    "dtype": "nothing is rounded; bfloat16 halves the memory of rows",
    "tt_rank": "rows stay as they are; a tensor train is another model",
    "tt_rows": "smaller tables save little memory; for --tt-rank",
    "tt_cores": "four are smaller and slower; for --tt-rank",
    "tt_own": "for tables of individuals, such as users; for --tt-rank",
    "matmul": "the most precise; the others are faster on some machines",
    "compile": "compiling takes longer than a short run gains",
    "cuda_graphs": "experimental",
    "loss": "it needs only labels of 0 and 1, and its scores are probabilities",
    "shards": "the fastest; with 8, results do not depend on the threads",
    "average_every": "ranks train one model, to the bit that of one process",
    "shuffle_memory": "smaller logs are shuffled as a whole",
    "seed": "so that a run can be repeated",
    "swap_rate": "the start of FAE's schedule; test losses change it; for hot-cold",
    "schedule_rows": "so that test losses take at most 2 % of the time; for hot-cold",
    "row_weight_decay": "patience already ends a run that overfits",
    "row_momentum": "the usual one; for momentum_sgd",
    "row_nesterov": "as in PyTorch; for momentum_sgd",
    "row_beta": "the usual one; for ftrl",
    "row_l1": "weights need not be 0; for ftrl",
    "row_l2": "patience already ends a run that overfits; for ftrl and lamb",
    "row_clip_value": "adaptive rates already bound a step",
    "row_clip_norm": "adaptive rates already bound a step",
    "row_options": "each optimizer has its own",
    "row_cow_clip": "for batches of many thousands",
    "dense_weight_decay": "patience already ends a run that overfits",
    "dense_clip_norm": "adaptive rates already bound a step",
    "min_trust": "as in the paper; for lamb",
    "max_trust": "the usual one; for lamb",
    "lr_scaling": "the usual rates fit batches of up to 2,048",
    "base_batch_size": "the largest batch that the usual rates fit; for --lr-scaling",
    "cycle_rise": "as in fastai; for one-cycle",
    "warmup": "the usual rates need none with batches of up to 2,048",
    "dense_warmup": "for batches of many thousands",
    "decay_steps": "the whole run; for schedules that decay",
    "valid_rows": "all of them, since fewer say less about which checkpoint is best",
    "ranking_k": "the usual one; for lists",
    "save_every": "a checkpoint at each evaluation",
    "checkpoint_minutes": "a run that is killed loses at most these minutes",
    "keep_last": "one more than is needed, if the last one is damaged",
    "log_every": "enough points for a curve",
    "tensorboard": "written if TensorBoard is installed",
    "data_memory": "copied if a GPU has all rows of the tables and room for these, too",
    "host_memory": "what this machine has free",
    "home_path": "the directory of the run, if main memory is too small",
    "strategy": "the quickest one, by times measured on this machine",
    "lookahead": "it grows and shrinks with what it saves",
    "epoch_lookahead": "the first step would wait until all ids are read",
    "in_flight": "it grows and shrinks with what it saves",
    "spill": "the same numbers as with enough slots",
    "backend": "Triton on a GPU; on a CPU Numba, else PyTorch",
}


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

    def grids(self) -> tuple[Grid, Grid]:
        """Return a table of the settings that follow the dataset or matter most, and one of the others."""

        def grid(title: str, reasons: Iterable[Reason]) -> Grid:
            cells = [[each.setting.replace("_", "-"), _said(each.value), each.why] for each in reasons]
            return Grid(["setting", "value", "why"], cells, title, left=(0, 1, 2))

        rest = [each for each in self.reasons if each.why == _ALWAYS.get(each.setting)]
        first = [each for each in self.reasons if each not in rest]
        return grid(f"{self.rows:,} training rows", first), grid("Other settings", rest)

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
    """Return the values that :func:`stoker.train` would use for all settings, with reasons; train nothing.

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
    told = {name: (value, why) for name, value, why in _reasons(asked, whole, data)}
    for name, why in _ALWAYS.items():
        told.setdefault(name, (getattr(whole, name), why))
    reasons = []
    for name, (value, why) in told.items():
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
    if value is None or value == {}:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_said(each)}" for name, each in value.items())
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
