"""Defaults that depend on the training rows: batch size, epochs, patience, linear terms.

A small log in batches of 2,048 has only a few steps, too few for any model; one pass suffices for a large log. Only
settings that are left out get a default. Test rows do not influence it.
"""

from __future__ import annotations

from typing import Any

from stoker.base.units import plural
from stoker.dataset.dataset import Dataset
from stoker.training.config import TrainConfig
from stoker.training.scheduled import TRAINED_PER_TESTED
from stoker.training.settings import EPOCHS, LARGEST, SMALLEST, TEST_ROWS

BATCHES = 80  # least batches of an epoch, if there are rows enough
EXAMPLES = 4_000_000  # most examples of a run by default, unless one epoch has more
PATIENCE = 2  # epochs without a better metric
BY_ROWS = ("batch_size", "epochs", "patience", "schedule_rows")  # settings that depend on the rows
RARE = 0.1  # most of the rarer label's share at which rows get an eps
EPS = 0.1  # of row-wise Adagrad, over the batch size
WIDE = 15  # least columns of a log that gets linear terms
ROWS_A_WEIGHT = 3  # least training rows of such a log for each id and each dense column
OPTIONS = ("model_options", "row_options")  # they get values only where they are empty
WHY = {
    "model_options": f"a small log of {WIDE} columns or more, with few ids: linear terms, from the share of label 1",
    "row_options": f"a small log with a rare label: {EPS:g} / batch size; else a tiny first gradient is a full step",
}
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


def for_small_log(config: TrainConfig, data: Dataset) -> dict[str, Any]:
    """Return options of a DLRM and of its rows for a small log; empty if the log is large, or such options are given.

    Row-wise Adagrad takes a step of full size for a row's first gradient, even if that is almost zero, as most are if
    one label is rare; ``eps`` prevents that. A DLRM learns the effect of a single column through products only. With
    many columns these products are noise, so it gets linear terms if there are rows enough to determine them.
    """
    rows, positives = len(data.train), data.manifest["splits"]["train"].get("positives") or 0
    plain, names = TrainConfig(), ("model", "loss", "row_optimizer", "row_lr", *OPTIONS)
    given = any(getattr(config, name) != getattr(plain, name) for name in names)
    if given or not 0 < positives < rows or rows * EPOCHS > EXAMPLES:
        return {}
    found: dict[str, Any] = {}
    if min(positives, rows - positives) <= RARE * rows:
        found["row_options"] = {"eps": EPS / (config.batch_size or batch_for(rows))}
    spec = data.schema
    weights = len(spec.dense) + sum(spec.num_embeddings[feature.table] for feature in spec.features)
    if len(spec.dense) + len(spec.features) >= WIDE and weights * ROWS_A_WEIGHT <= rows:
        found["model_options"] = {"linear": positives / rows}
    return found


def left_out(config: TrainConfig) -> frozenset[str]:
    """Return the names of the settings that depend on the rows and are not given."""
    return frozenset(name for name in (*BY_ROWS, *OPTIONS) if getattr(config, name) in (None, {}))


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
        found["schedule_rows"] = min(TEST_ROWS[1], max(TEST_ROWS[0], rows // (TESTS * TRAINED_PER_TESTED)))
    found |= for_small_log(config, data)
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
    if "model_options" in missing and "linear" in config.model_options:
        words.append("linear terms")
    if "row_options" in missing and "eps" in config.row_options:
        words.append(f"eps {config.row_options['eps']:.2g} of the rows")
    return f"{plural(len(data.train), 'training row')}: {', '.join(words)}" if words else ""
