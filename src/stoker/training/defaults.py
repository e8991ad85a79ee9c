"""Defaults that follow the number of training rows: batch size, epochs, patience.

A small log cut into batches of 2,048 has a handful of steps, too few for any model; a large one is learnt in one pass.
What is given wins: a default is worked out only where a setting is left out. Test rows decide nothing here.
"""

from __future__ import annotations

from typing import Any

from stoker.base.units import plural
from stoker.dataset.dataset import Dataset
from stoker.training.config import TrainConfig

SMALLEST, LARGEST = 64, 2048  # examples; below, a step costs as much as at 64; above, learning rates want others
BATCHES = 80  # of an epoch at least, where batches of SMALLEST allow it
EPOCHS = 10  # passes over a small log at most
EXAMPLES = 4_000_000  # that a run goes through at most by default, unless one epoch has more
PATIENCE = 2  # epochs without a better metric
BY_ROWS = ("batch_size", "epochs", "patience")  # the settings that follow the rows


def batch_for(rows: int) -> int:
    """Return the largest power of two, within bounds, of which an epoch of ``rows`` has 80 batches.

    >>> [batch_for(rows) for rows in (1_000, 10_000, 100_000, 1_000_000)]
    [64, 64, 1024, 2048]
    """
    return min(LARGEST, max(SMALLEST, 1 << max(0, (rows // BATCHES).bit_length() - 1)))


def epochs_for(rows: int, *, validated: bool) -> int:
    """Return the passes over ``rows``: one where no validation rows can tell when the next one does harm.

    >>> [epochs_for(rows, validated=True) for rows in (10_000, 1_000_000, 50_000_000)]
    [10, 4, 1]
    >>> epochs_for(10_000, validated=False)
    1
    """
    return min(EPOCHS, max(1, EXAMPLES // max(1, rows))) if validated else 1


def why_batch(rows: int) -> str:
    """Say why a batch of ``rows`` has the size that :func:`batch_for` returns."""
    size = batch_for(rows)
    if size == SMALLEST:
        return f"the smallest worth a step: {plural(rows, 'row')} make {plural(-(-rows // size), 'step')} an epoch"
    if size == LARGEST:
        return f"the learning rates are meant for it, and {rows:,} rows make {-(-rows // size):,} steps an epoch"
    return f"the largest power of two of which an epoch of {rows:,} rows has {BATCHES} batches or more"


def why_epochs(rows: int, *, validated: bool) -> str:
    """Say why there are as many epochs as :func:`epochs_for` returns."""
    if not validated:
        return "without validation rows nothing tells when another pass does harm"
    if EXAMPLES // max(1, rows) >= EPOCHS:
        return f"at most; {plural(rows, 'row')} are few, and validation rows tell when to stop"
    return f"at most; {EPOCHS} for a small log, fewer where they would go through more than {EXAMPLES:,} examples"


def left_out(config: TrainConfig) -> frozenset[str]:
    """Return the names of the settings that follow the rows and are not given."""
    return frozenset(name for name in BY_ROWS if getattr(config, name) is None)


def complete(config: TrainConfig, data: Dataset) -> TrainConfig:
    """Return settings whose batch size and epochs are numbers, and whose patience fits epochs that nobody gave."""
    rows, missing, found = len(data.train), left_out(config), dict[str, Any]()
    if "batch_size" in missing:
        found["batch_size"] = batch_for(rows)
    if "epochs" in missing:
        valid = bool(data.splits.get("valid"))
        found["epochs"] = 1 if config.steps is not None else epochs_for(rows, validated=valid)
        if "patience" in missing and found["epochs"] > 1:
            epoch = -(-rows // found.get("batch_size", config.batch_size))
            found["patience"] = PATIENCE * max(1, epoch // (config.eval_every or epoch))
    return config.replace(**found) if found else config


def by_rows(given: TrainConfig, config: TrainConfig, data: Dataset) -> str:
    """Say in a line what :func:`complete` made of the ``given`` settings; empty if it had nothing to do."""
    missing, words = left_out(given), []
    if "batch_size" in missing:
        words.append(f"batch {config.batch_size:,}")
    if "epochs" in missing and config.steps is None:
        words.append("1 epoch" if config.epochs == 1 else f"up to {config.epochs} epochs")
    if "patience" in missing and config.patience is not None:
        words.append(f"stops after {plural(config.patience, 'evaluation')} without improvement")
    return f"{plural(len(data.train), 'training row')}: {', '.join(words)}" if words else ""
