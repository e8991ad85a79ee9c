"""What a report shows and no record has: measured once with the trained model, on a sample of rows.

Legend: n rows of the sample, F features, D columns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.device import cpu_count, cpu_model, rate
from stoker.base.errors import ConfigError, DataError, require
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.models import RecModel, SequenceModel
from stoker.ops.tt.shape import TTShape
from stoker.placement.replay import replay
from stoker.tables.config import TableConfig, bytes_of_row
from stoker.tables.ranks.transport import Ranks
from stoker.training.config import TrainConfig
from stoker.training.defaults import BY_ROWS, OPTIONS, complete, for_small_log
from stoker.training.ranks.first import on_first
from stoker.training.scheduled import batch_order
from stoker.training.scores.evaluation import finite, scoring
from stoker.training.scores.metrics import StreamingMetrics

FILE = "analysis.json"  # in a run directory
KEYS = {"split", "rows", "columns", "tables", "calibration", "slices", "cache", "machine", "work"}  # of the file
ROWS = 16_384  # of the sample
SECONDS = 2.0  # for the columns of the sample; those of the largest tables come first
_BINS = 10  # of calibration
_VALUES = 12  # ids of a table that are slices each
_FIGURES = "rows", "auc", "log_loss", "calibration"  # of a slice
_LEAST = 100  # rows of a slice
_LOOKUPS = 2_000_000  # of a replay

Floats = npt.NDArray[np.float64]


def analyse(
    model: RecModel, data: Dataset, config: TrainConfig, *, rows: int = ROWS, seconds: float = SECONDS,
    ranks: Ranks | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure what each column brings, calibration, slices, the best possible cache, and this machine; on all ranks.

    A column brings the log loss that shuffling its values among the rows of the sample adds (permutation importance,
    Breiman 2001): with its standard error over rows. The sequences of one history are shuffled together. Columns that
    ``seconds`` do not suffice for have none. The sample is of validation rows, else of test or training rows.
    """
    split = next(
        (found for name in ("valid", "test", "train") if (found := data.splits.get(name)) and found.labelled), None
    )
    if split is None:
        raise DataError(f"{data.path} has no rows with labels, so there is nothing to analyse.")
    batch = next(iter(split.batches(rows, limit=rows, reuse=False))).to(model.device)
    assert batch.labels is not None
    known = torch.nonzero(~batch.labels.isnan()).flatten()
    labels = batch.labels[known].double().cpu().numpy()
    with scoring(model):
        logits = model(batch)[known].double().cpu().numpy()
        losses = _losses(logits, labels)
        columns = list(_columns(model, batch, known, labels, losses, seconds, ranks))
    return {
        "split": split.name, "rows": len(labels), "columns": columns,
        "tables": _tables(model, batch, data), "calibration": _calibration(logits, labels),
        "slices": _slices(model, data, batch, known, logits, labels), "cache": _cache(data, config),
        "machine": limits(model.device), "work": work_of(model, batch), "chosen": _chosen(data, config),
    }  # fmt: skip


def _chosen(data: Dataset, config: TrainConfig) -> dict[str, Any]:
    """Return what the rules choose for the dataset where a setting is not given."""
    free = config.replace(**dict.fromkeys(BY_ROWS), batch_order=batch_order(TrainConfig(), data))
    ruled = complete(free, data)
    options = for_small_log(config.replace(**{name: {} for name in OPTIONS}), data)
    return {name: getattr(ruled, name) for name in (*BY_ROWS, "batch_order")} | options


def _losses(logits: Floats, labels: Floats) -> Floats:
    return np.logaddexp(0.0, np.where(labels == 1, -logits, logits))


def _columns(
    model: RecModel, batch: Batch, known: Tensor, labels: Floats, losses: Floats, seconds: float, ranks: Ranks | None
) -> Iterator[dict[str, Any]]:
    """Yield the log loss that each column saves, until the time is over on the first rank."""
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0)).to(model.device)
    features = model.spec.features
    sizes = [model.spec.num_embeddings[feature.table] for feature in features]
    history = model.history.values() if isinstance(model, SequenceModel) else ()
    steps = [f for f, feature in enumerate(features) if feature.name in history]  # as long as each other in each row
    wanted: list[tuple[str, str | None, Any]] = [
        (features[f].name, features[f].table, lambda f=f: shuffled(batch, steps if f in steps else [f], order))
        for f in sorted(range(len(features)), key=lambda f: -sizes[f])
    ]
    for place, name in enumerate(model.spec.dense):
        wanted.append((name, None, lambda place=place: replace(batch, dense=_with(batch.dense, [place], order))))
    end = time.perf_counter() + seconds
    for name, table, make in wanted:
        if on_first(ranks, "look at the clock", lambda: time.perf_counter() > end):
            return
        more = _losses(model(make())[known].double().cpu().numpy(), labels) - losses
        error = float(more.std() / np.sqrt(len(more)))
        yield {"name": name, "table": table, "loss": float(more.mean()), "error": error}


def _with(values: Tensor, columns: list[int], order: Tensor) -> Tensor:
    """Return a copy with some columns in another order."""
    found = values.clone()
    found[:, columns] = values[order][:, columns]
    return found


def shuffled(batch: Batch, features: list[int], order: Tensor) -> Batch:
    """Return the batch with the bags of some features from rows ``order`` [B]."""
    if batch.offsets is None:
        return replace(batch, ids=_with(batch.ids, features, order))
    bags = torch.arange(len(batch.offsets) - 1, device=batch.ids.device).view(len(batch), -1)
    bags = _with(bags, features, order).flatten()
    lengths = batch.offsets.diff()[bags]
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    places = torch.arange(int(offsets[-1]), device=bags.device) + (
        batch.offsets[bags] - offsets[:-1]
    ).repeat_interleave(lengths)
    weights = None if batch.weights is None else batch.weights[places]
    return replace(batch, ids=batch.ids[places], offsets=offsets, weights=weights)


def _tables(model: RecModel, batch: Batch, data: Dataset) -> list[dict[str, Any]]:
    """Return the cost of each table: bytes, lookups an example, distinct rows of the sample, and shares of id 0."""
    grown = model.spec.grow  # whose ids are raw: only in training it shows which have a row
    counts = data.manifest.get("unknown", {})
    others = [split for split in counts if split != "train"]

    def share(splits: list[str], mine: list[int]) -> float | None:
        pairs = [counts[split][model.spec.features[f].name] for split in splits for f in mine]
        return sum(zeros for zeros, _ in pairs) / total if (total := sum(ids for _, ids in pairs)) else None

    found = []
    for table in model.tables:
        mine = [f for f, feature in enumerate(model.spec.features) if feature.table == table.name]
        ids = torch.cat([batch.bags(f)[0] for f in mine])
        found.append({
            "name": table.name, "rows": table.num_embeddings, "dim": table.embedding_dim,
            "bytes": stored(model, table), "compressed": table.name in model.tensor_train,
            "lookups": len(ids) / len(batch), "distinct": len(ids.unique()) / max(1, len(ids)),
            "unknown": None if table.name in grown else share(others, mine),
            "unknown_train": share([*counts.keys() & {"train"}], mine),
        })  # fmt: skip
    return found


def stored(model: RecModel, table: TableConfig) -> int:
    """Return the bytes of a table with its optimizer state: its rows, or the cores of a tensor train."""
    state = model.embeddings.optimizer.state
    if table.name not in model.tensor_train:
        return table.num_embeddings * bytes_of_row(table.embedding_dim, table.dtype, state)
    cores = _shape_of(model, table).core_shapes
    return sum(rows * bytes_of_row(left * right, "float32", state) for rows, left, right in cores)


def _shape_of(model: RecModel, table: TableConfig) -> TTShape:
    return TTShape(**{name: tuple(each) for name, each in model.tensor_train[table.name].items()})


def _calibration(logits: Floats, labels: Floats) -> list[dict[str, float]]:
    """Return the mean score and the mean label of equal parts of the rows, by rising score."""
    order, scores = np.argsort(logits, kind="stable"), 1 / (1 + np.exp(-logits))
    parts = [part for part in np.array_split(order, _BINS) if len(part)]
    return [{"score": float(scores[p].mean()), "label": float(labels[p].mean()), "rows": len(p)} for p in parts]


def _values(data: Dataset, table: str, size: int) -> list[str]:
    """Return what the ids of a small table stand for; ids without a vocabulary are shown themselves."""
    pl = require("polars", "the report needs")
    found = ["missing or unknown", *(f"= id {number}" for number in range(1, size))]
    with suppress(OSError, pl.exceptions.PolarsError):
        rows = pl.scan_parquet(data.path / "vocab" / f"{table}.parquet").select("value").head(size - 1).collect()
        texts = ["missing" if value is None else f"= {str(value)[:40]}" for value in rows["value"]]
        found[1 : len(texts) + 1] = texts
    return found


def _slices(
    model: RecModel, data: Dataset, batch: Batch, known: Tensor, logits: Floats, labels: Floats
) -> list[dict[str, Any]]:
    """Return metrics of rows with each id of small tables, and (un)known ids of large ones that do not grow."""
    found = []
    for f, feature in enumerate(model.spec.features):
        if feature.table in model.spec.grow or not bool((batch.lengths(f) == 1).all()):
            continue
        ids = batch.bags(f)[0][known].cpu().numpy()
        size = model.spec.num_embeddings[feature.table]
        small = size <= _VALUES
        words = _values(data, feature.table, size) if small else ["missing or unknown", "known"]
        for place, value in enumerate(words):
            mine = ids == place if small else (ids != 0) == bool(place)
            if _LEAST <= mine.sum() < len(ids):
                metrics = StreamingMetrics()
                metrics.update(torch.from_numpy(logits[mine]).float(), torch.from_numpy(labels[mine]).float())
                figures = finite(metrics.compute())
                found.append({"slice": f"{feature.name} {value}", **{key: figures[key] for key in _FIGURES}})
    return found


def _cache(data: Dataset, config: TrainConfig) -> dict[str, Any] | None:
    """Replay the first batches in a cache of the memory that the run gave its rows; None if it gave no limit."""
    if config.device_memory is None:
        return None
    train, size = data.train, int(config.batch_size)
    lookups = max(1, next(iter(train.batches(size, limit=size))).ids.numel())
    steps = max(1, min(-(-len(train) // size), _LOOKUPS // lookups))
    try:
        found = replay(
            data, device_memory=config.device_memory, batch_size=size, steps=steps, seed=config.seed,
            dtype=config.dtype, embedding_dim=config.embedding_dim, row_optimizer=config.row_optimizer,
            strategies=["pinned", "belady", "lru"],
        )  # fmt: skip
    except ConfigError:  # a cache of all tables together has too few slots for a batch
        return None
    return {"steps": found.steps, "rates": {each.strategy: each.hit_rate for each in found.strategies}}


def work_of(model: RecModel, batch: Batch) -> dict[str, float]:
    """Return the least work of a training step, for an example: products, and bytes of rows.

    A multiplication takes two operations forward and four backward. A row is read in a lookup, and read and written in
    an update, with its state. So is each slice of a tensor train whose products are the rows.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, if it is there

    named = model.named_parameters()
    weights = sum(each.numel() for name, each in named if each.dim() >= 2 and not name.endswith("bias"))
    with scoring(model):
        inputs = model.inputs(batch)
        with FlopCounterMode(display=False) as counted:  # weights of a sequence are used once a step
            model._logits(model.dense_part, inputs)
    products = max(float(weights * len(batch)), counted.get_total_flops() / 2)
    state, moved = model.embeddings.optimizer.state, 0.0
    for f, feature in enumerate(model.spec.features):
        table = next(table for table in model.tables if table.name == feature.table)
        ids = batch.bags(f)[0]
        moved += len(ids) * bytes_of_row(table.embedding_dim, table.dtype, {})
        if table.name not in model.tensor_train:
            moved += 2 * len(ids.unique()) * bytes_of_row(table.embedding_dim, table.dtype, state)
            continue
        shape, carried, prefixes = _shape_of(model, table), 1, ids.unique()
        nodes = [prefixes := (prefixes // rows).unique() for rows in (1, *shape.rows[:0:-1])][::-1]  # by level
        for place, (rows, left, width) in enumerate(shape.core_shapes):
            if place:  # each distinct prefix is the product of a shorter one and a slice
                products += len(nodes[place]) * carried * left * width
            carried *= shape.cols[place]
            slices = len((nodes[place] % rows).unique())
            moved += slices * sum(k * bytes_of_row(left * width, "float32", s) for k, s in ((1, {}), (2, state)))
    return {"operations": 6 * products / len(batch), "row_bytes": moved / len(batch)}


def limits(device: torch.device, seconds: float = 0.1) -> dict[str, Any]:
    """Measure float32 products in operations/s, and random reads of 64-byte rows in bytes/s."""
    cuda = device.type == "cuda"
    one, table = torch.ones(1024, 1024, device=device), torch.zeros(2**20, 16, device=device)
    index = torch.randint(2**20, (2**16,), generator=torch.Generator().manual_seed(0)).to(device)

    def timed(work: Any) -> Any:
        work()
        if cuda:
            torch.cuda.synchronize(device)

    return {
        "name": torch.cuda.get_device_name(device) if cuda else f"{cpu_model()}, {cpu_count()} cores",
        "operations": rate("products", lambda: timed(lambda: one @ one), 2.0 * 1024**3, seconds),
        "row_bytes": rate("reads of rows", lambda: timed(lambda: table[index]), 64.0 * len(index), seconds),
    }
