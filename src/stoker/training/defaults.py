"""Defaults that depend on the number of training rows: batch size, epochs, patience.

A small log in batches of 2,048 has only a few steps, too few for any model; one pass suffices for a large log. Only
settings that are left out get a default. Test rows do not influence it.
"""

from __future__ import annotations

from typing import Any

from stoker.base.units import plural
from stoker.dataset.dataset import Dataset
from stoker.training.config import TrainConfig
from stoker.training.scheduled import TRAINED_PER_TESTED

SMALLEST, LARGEST = 64, 2048  # examples; a step is not faster below 64; above 2048 the learning rates do not fit
BATCHES = 80  # least batches of an epoch, if there are rows enough
EPOCHS = 10  # most passes, over a small log
EXAMPLES = 4_000_000  # most examples of a run by default, unless one epoch has more
PATIENCE = 2  # epochs without a better metric
BY_ROWS = ("batch_size", "epochs", "patience", "schedule_rows")  # settings that depend on the rows
TESTS = 4  # test losses of an epoch at the first rate, 50


def batch_for(rows: int) -> int:
    """Return the largest power of two from 64 to 2,048 that cuts ``rows`` into at least 80 batches.

    >>> [batch_for(rows) for rows in (1_000, 10_000, 100_000, 1_000_000)]
    [64, 64, 1024, 2048]
    """
    return min(LARGEST, max(SMALLEST, 1 << max(0, (rows // BATCHES).bit_length() - 1)))


def epochs_for(rows: int, *, validated: bool) -> int:
    """Return the passes over ``rows``: one if no validation rows can tell when another pass overfits.

    >>> [epochs_for(rows, validated=True) for rows in (10_000, 1_000_000, 50_000_000)]
    [10, 4, 1]
    >>> epochs_for(10_000, validated=False)
    1
    """
    return min(EPOCHS, max(1, EXAMPLES // max(1, rows))) if validated else 1


def why_batch(rows: int) -> str:
    """Return the reason for :func:`batch_for`, in words."""
    size = batch_for(rows)
    if size == SMALLEST:
        return f"the smallest worth a step: {plural(rows, 'row')} make {plural(-(-rows // size), 'step')} an epoch"
    if size == LARGEST:
        return f"the learning rates are meant for it, and {rows:,} rows make {-(-rows // size):,} steps an epoch"
    return f"the largest power of two that cuts {rows:,} rows into {BATCHES} batches or more"


def why_epochs(rows: int, *, validated: bool) -> str:
    """Return the reason for :func:`epochs_for`, in words."""
    if not validated:
        return "without validation rows nothing tells when another pass overfits"
    if EXAMPLES // max(1, rows) >= EPOCHS:
        return f"at most; {plural(rows, 'row')} are few, and validation rows tell when to stop"
    return f"at most; {EPOCHS} for a small log, fewer if the run would see more than {EXAMPLES:,} examples"


def left_out(config: TrainConfig) -> frozenset[str]:
    """Return the names of the settings that depend on the rows and are not given."""
    return frozenset(name for name in BY_ROWS if getattr(config, name) is None)


def complete(config: TrainConfig, data: Dataset) -> TrainConfig:
    """Return the settings with a batch size and epochs; if epochs were not given, also with a patience."""
    rows, missing, found = len(data.train), left_out(config), dict[str, Any]()
    if "batch_size" in missing:
        found["batch_size"] = batch_for(rows)
    if "epochs" in missing:
        valid = bool(data.splits.get("valid"))
        found["epochs"] = 1 if config.steps is not None else epochs_for(rows, validated=valid)
        if "patience" in missing and found["epochs"] > 1:
            epoch = -(-rows // found.get("batch_size", config.batch_size))
            found["patience"] = PATIENCE * max(1, epoch // (config.eval_every or epoch))
    if "schedule_rows" in missing and data.hot_cold is not None and config.batch_order != "shuffled":
        found["schedule_rows"] = min(8192, max(256, rows // (TESTS * TRAINED_PER_TESTED)))
    if config.model == "two-tower" and "item" not in config.model_options and (item := _item_columns(data)):
        found["model_options"] = {**config.model_options, "item": item}
    return config.replace(**found) if found else config


def _item_columns(data: Dataset) -> tuple[str, ...]:
    """Return the columns that the schema of the dataset names as those of the item, its id first."""
    schema = data.manifest.get("schema", {})
    raw = (schema.get("negatives") or {}).get("columns", ())
    ids = [
        (one.get("source") or one["name"], one["name"])
        for key in ("categorical", "dense")
        for one in schema.get(key, ())
    ]
    return tuple(name for column in raw for source, name in ids if source == column)


def by_rows(given: TrainConfig, config: TrainConfig, data: Dataset) -> str:
    """Return a line about what :func:`complete` added to the ``given`` settings; empty if it added nothing."""
    missing, words = left_out(given), []
    if "batch_size" in missing:
        words.append(f"batch {config.batch_size:,}")
    if "epochs" in missing and config.steps is None:
        words.append("1 epoch" if config.epochs == 1 else f"up to {config.epochs} epochs")
    if "patience" in missing and config.patience is not None:
        words.append(f"stops after {plural(config.patience, 'evaluation')} without improvement")
    return f"{plural(len(data.train), 'training row')}: {', '.join(words)}" if words else ""
