"""Notes of a run to its user: about its settings at the start, about metrics, and about its end or failure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stoker.base.device import contended
from stoker.base.errors import StokerError
from stoker.base.units import format_count, format_size, listed, plural
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.split import BatchStream, Split
from stoker.models import RecModel, TwoTower
from stoker.optim import Schedule
from stoker.placement.placement import Placement
from stoker.training.config import TrainConfig
from stoker.training.files.rundir import RunDirectory
from stoker.training.placing import rows_bytes
from stoker.training.progress import LoopState
from stoker.training.scheduled import HotColdStream
from stoker.training.scores.metrics import StreamingMetrics, deciding
from stoker.training.step_time import BatchChoice

#: defaults of earlier versions, which the config.json of their runs holds: nobody gave them
FORMER = {"schedule_rows": 8192, "lookahead": 64}


def facts(
    model: RecModel,
    data: Dataset,
    config: TrainConfig,
    total: int,
    placement: Placement | None,
    stream: BatchStream | HotColdStream,
) -> str:
    """Describe what is trained, for the first line on the screen."""
    rows = sum(table.num_embeddings for table in model.tables)
    size = rows_bytes(model.embeddings.stored, model.embeddings.optimizer.state)
    trains = f", {plural(len(model.tensor_train), 'tensor train')} among them" if model.tensor_train else ""
    dense = sum(parameter.numel() for parameter in model.dense_parameters())
    return (
        f"{model.name}: {plural(len(model.tables), 'table')}{trains}, {format_count(rows)} rows, {format_size(size)} "
        f"with optimizer state; {format_count(dense)} dense parameters; {format_count(len(data.train))} training "
        f"rows{' cached in memory' if stream.resident else ''}, {plural(total, 'step')} of {config.batch_size:,} "
        f"{f'in {config.shards} shards ' if config.shards > 1 else ''}on "
        f"{model.device}"
        + (f"\n{stream}" if isinstance(stream, HotColdStream) else "")
        + ("" if placement is None else f"\n{placement.summary()}")
    )


def crowded(times: Mapping[str, float], device: torch.device) -> str | None:
    """Say that other programs used the cores while some steps were trained, if threads spin meanwhile."""
    worked = times.get("others", 0.0)
    others = contended(worked / times["seconds"])
    if worked < 1.0 or not others or device.type != "cpu" or "OMP_WAIT_POLICY" in os.environ:
        return None
    return (
        f"other programs use {others:.1f} cores, and threads spin while they wait for each other. Started with "
        "OMP_WAIT_POLICY=passive, or resumed with it, this can be several times as fast"
    )


def chosen(choice: BatchChoice | None, config: TrainConfig) -> Iterator[str]:
    """Say why the batch size was chosen, and whether the learning rates suit it."""
    if choice is not None:
        yield str(choice)
        if config.lr_scaling == "none" and choice.batch_size != config.base_batch_size:
            yield (
                f"the learning rates are meant for batches of {config.base_batch_size:,}: "
                "with lr_scaling they would follow the batch size"
            )
    elif config.lr_scaling == "none" and (said := ignored(config, "base_batch_size")):
        yield f"{said}: without lr_scaling the learning rates do not follow the batch size"


def without_effect(
    config: TrainConfig, placement: Placement | None, total: int, trains: int, *, grouped: bool
) -> Iterator[str]:
    """Name the given settings that have no effect, in a run of ``total`` steps with ``trains`` tensor trains."""
    lists = [] if grouped else [(("ranking_k",), "the dataset was prepared without group, so it has no lists")]
    for names, why in (*config.useless(), *lists):
        if said := ignored(config, *names):
            yield f"{said}: {why}"
    if config.tt_rank is not None and trains == len(config.tt_own):
        yield (
            f"tt_rank is ignored: no table of {config.tt_rows:,} rows or more gets smaller by rank {config.tt_rank}. "
            "Lower tt_rows to compress smaller tables, or take a smaller rank"
        )
    if placement is not None and config.lookahead == 0 and not config.epoch_lookahead:
        yield "without a lookahead the cache does not know the next use of its rows, so more rows are moved"
    if (warmup := max(config.warmup, config.dense_warmup)) >= total:
        yield (
            f"the warm-up of {plural(warmup, 'step')} is not shorter than the run of {plural(total, 'step')}: "
            "the learning rates never reach their full value"
        )
    elif (
        config.schedule in ("linear", "cosine", "polynomial", "one-cycle")
        and config.warmup + (config.decay_steps or 0) > total
    ):
        yield (
            f"warm-up and decay take {plural(config.warmup + (config.decay_steps or 0), 'step')}, the run has "
            f"{total:,}: the decay does not end within the run"
        )


#: settings by which a feature knows columns of its own row, of kinds that are not as others
_READ: dict[str, tuple[str, ...]] = {"merge": ("on",), "difference": ("by", "column"), "rank": ("by", "order")}


def of_both_towers(model: RecModel, data: Dataset) -> Iterator[str]:
    """Name columns of the user of a two-tower model that are computed from the item of their row."""
    if not isinstance(model, TwoTower):
        return
    schema = data.manifest.get("schema", {})
    columns = [one for kind in ("categorical", "dense", "sequence") for one in schema.get(kind, ())]
    source = {one["name"]: one.get("source") or one["name"] for one in columns if isinstance(one, dict)}
    raw = {source.get(name, name) for name in model.item}
    read_again: list[dict[str, Any]] = [{"name": name, "column": name} for name in sorted(raw)]
    for feature in (*read_again, *schema.get("feature", ())):
        # What looks at rows before, such as a history, knows of its own row only the keys.
        usual = ("by",) if "order" in feature else ("by", "column", "columns", "left", "right", "where_column")
        given = [feature.get(each) or () for each in _READ.get(feature.get("kind", ""), usual)]
        read = {name for value in given for name in ((value,) if isinstance(value, str) else value)}
        if both := sorted(raw & read):
            made = _made(feature)
            raw |= made
            if mine := [name for name in source if source[name] in made and name not in model.item]:
                one = len(mine) == 1
                yield (
                    f"{listed(mine)} {'is' if one else 'are'} computed from {listed(both)}, which is of the item, but "
                    f"{'belongs' if one else 'belong'} to the user, whose vector so knows the item of its row: recall "
                    f"is too high, and retrieval has no such value. Add {listed(mine)} to the model option item, or "
                    "leave it out"
                )


def _made(feature: Mapping[str, Any]) -> set[str]:
    """Return the columns that a feature of a schema makes."""
    name, kind = feature["name"], feature.get("kind")
    if kind == "merge":
        return {f"{name}_{column}" for column in (*feature.get("columns", ()), *feature.get("number_columns", ()))}
    if kind in ("properties", "split"):
        most = feature.get("width") or feature.get("most") or len(feature.get("values", ()))
        return {f"{name}_{number + 1}" for number in range(most)}
    return {f"{name}_{part}" for part in feature["parts"]} if kind == "time_parts" else {name}


def stretched(config: TrainConfig, before: int, now: int) -> str | None:
    """Say that a run is resumed with another length, by which its schedule changes; None if it is not."""
    if before == now or config.schedule == "constant" or config.decay_steps is not None:
        return None
    return (
        f"the schedule {config.schedule} was for {before:,} steps and is now for {now:,}, so rates change at once and "
        f"the result is not that of one run of {now:,} steps. For runs that may go on, give decay_steps or a constant "
        "schedule at their start"
    )


def ignored(config: TrainConfig, *names: str) -> str:
    """Name the given ones of these settings, e.g. "tt_rows and tt_cores are ignored"; empty if none was given."""
    words = config.changed(name for name in names if (name, getattr(config, name)) not in FORMER.items())
    listed = " and ".join(filter(None, (", ".join(words[:-1]), "".join(words[-1:]))))
    return f"{listed} {'is' if len(words) == 1 else 'are'} ignored" if words else ""


def undefined(metric: str, other: str) -> str:
    """Say which other metric chooses the best checkpoint, because ``metric`` is not defined."""
    says = f"{other.replace('recall_', 'recall@').replace('_', ' ')} says what is best"
    if metric == "group_auc":
        return f"no list of validation rows has both labels: without a group AUC, {says}"
    name = "an AUC" if metric == "auc" else f"an {metric}" if metric == "mrr" else f"a {metric}"
    return f"all validation labels are the same: without {name}, {says}"


def ending(progress: LoopState, config: TrainConfig, total: int, *, trained: bool) -> str | None:
    """Return a note on the end of training: stopped early, or nothing was left to do; None: neither."""
    if progress.step < total:
        name = deciding({} if progress.latest is None else progress.latest["valid"], config.metric).replace("_", " ")
        best = "" if progress.best is None else f"; best at step {progress.best['step']:,}"
        return (
            f"stopped early at step {progress.step:,} of {total:,}: {name} on the validation rows has not improved for "
            f"{plural(progress.stale, 'evaluation')} (patience){best}"
            + ("" if trained else ". A larger patience trains on")
        )
    return None if trained else f"nothing is left to do: {plural(progress.step, 'step')} of {total:,} are done"


def explain(
    what: str,
    step: int,
    model: RecModel,
    dense: torch.optim.Optimizer,
    schedule: Schedule,
    config: TrainConfig,
    run: RunDirectory,
) -> StokerError:
    """Return the error of a run that diverged: the step, the learning rates, the last checkpoint, the remedy."""
    steps = run.steps()
    kept = f"The last good checkpoint is {run.checkpoint(steps[-1])}" if steps else "There is no checkpoint yet"
    row_lr = model.embeddings.optimizer.lr * schedule.factor(step)
    dense_lr = dense.param_groups[0]["initial_lr"] * config.dense_factor(schedule, step)
    return StokerError(
        f"{what} at step {step:,}, with row_lr {row_lr:g} and dense_lr {dense_lr:g}. {kept}. Lower the "
        "learning rates, or clip gradients (row_clip_norm, dense_clip_norm). At step 0, look for infinite values in "
        "the dense columns."
    )


_TOO_GOOD = 0.99  # AUC or recall@10
_ALONE = 0.9  # AUC of a single column that explains it
_ROWS = 2**15  # of each of two samples
_BINS = 100  # quantiles of a dense column
_ITEMS = 200  # a smaller catalogue has a large recall@10 by itself


def leak_hint(data: Dataset, metrics: Mapping[str, float | None], split: str) -> str:
    """Return a sentence about metrics of ``split`` that are too good to be true, or an empty text.

    It names the column whose values alone give the highest AUC: the mean label of an id, or of a bin of numbers, in the
    training rows. All come from the first rows of a split.
    """
    if (metrics.get("recall_10") or 0) >= _TOO_GOOD and (metrics.get("catalogue") or 0) > _ITEMS:
        return (
            f"a {split} recall@10 of {metrics['recall_10']:.4f} is too good: does a column of the user belong to the "
            "item, such as its category? Model option item names the columns of the item"
        )
    if (metrics.get("auc") or 0) < _TOO_GOOD:
        return ""
    found = dict(_aucs(data, _sample(data.train), _sample(data.splits[split])))
    best = max(found, key=lambda name: found[name], default="")
    said = f"a {split} AUC of {metrics['auc']:.4f} is too good to be true for most logs: "
    if not best or found[best] < _ALONE:
        return f"{said}is a column made from the label, or known only after it? No column alone reaches {_ALONE:g}"
    return (
        f"{said}column {best!r} alone has {found[best]:.4f}. If it is made from the label, or known only after it, "
        "leave it out of the schema"
    )


def _sample(split: Split) -> Batch:
    return next(iter(split.batches(min(_ROWS, len(split)))))


def _aucs(data: Dataset, train: Batch, validation: Batch) -> Iterator[tuple[str, float]]:
    """Yield the AUC of the mean label of each dense column's bins, and of each id of the features with one id."""
    assert train.labels is not None
    assert validation.labels is not None
    known, mean = ~validation.labels.isnan(), float(train.labels.nanmean())
    for name, *both in _codes(data, train, validation):
        ids, places = torch.unique(torch.cat(both), return_inverse=True)
        mine, theirs = places[: len(train)], places[len(train) :]
        seen = torch.zeros(len(ids), dtype=torch.float64).index_add_(0, mine, torch.ones(len(mine)).double())
        sums = torch.zeros(len(ids), dtype=torch.float64).index_add_(0, mine, train.labels.nan_to_num(mean).double())
        yield name, _auc(((sums + mean) / (seen + 1)).float()[theirs][known], validation.labels[known])


def _codes(data: Dataset, train: Batch, validation: Batch) -> Iterator[tuple[str, Tensor, Tensor]]:
    for at, name in enumerate(data.schema.dense):
        yield name, *_bins(train.dense[:, at].contiguous(), validation.dense[:, at].contiguous())
    for at, feature in enumerate(data.schema.features):
        if not feature.sequence and len(validation.bags(at)[0]) == len(validation):
            yield feature.name, train.bags(at)[0], validation.bags(at)[0]


def _bins(train: Tensor, validation: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bin of each number: a quantile, or -1 for the most frequent one, which stands for missing values."""
    cuts = torch.quantile(train, torch.arange(1, _BINS) / _BINS).unique()
    fill = train.mode().values
    one, other = (torch.bucketize(numbers, cuts).where(numbers != fill, -1) for numbers in (train, validation))
    return one, other


def _auc(scores: Tensor, labels: Tensor) -> float:
    metrics = StreamingMetrics()
    metrics.update(scores, labels)
    auc = metrics.compute()["auc"]
    return auc if auc == auc else 0.5
