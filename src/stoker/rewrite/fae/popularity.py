"""``stoker.profile``: which rows are accessed so often that fast memory should hold them (FAE, VLDB 2022, section 4.1).

Legend: Z tables, Q thresholds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stoker.base.errors import ConfigError, DataError
from stoker.base.units import format_size, parse_share, parse_size
from stoker.dataset.dataset import Dataset
from stoker.optim import RowOptimizer
from stoker.placement.replay import row_size
from stoker.rewrite.fae.hot_profile import CurvePoint, HotProfile, HotTable, ProfileSettings
from stoker.rewrite.fae.row_estimates import ChunkRows, ExactRows, RowEstimate, follows_count
from stoker.rewrite.fae.sampling import Sample, count_accesses, draw, first_hot_levels, table_names
from stoker.rewrite.fae.threshold import Thresholds

__all__ = ["profile", "true_hot_rows"]

Progress = Callable[[str, int, int], None]  # (what is being done, done, total)

_SMALL = 10**6  # bytes: smaller tables are hot as a whole
_INPUTS = 2**17  # inputs at most whose ids are compared with the hot rows: an error of 0.14 % where they are unlike
_POINTS = 20  # of the curve


def profile(
    dataset: Dataset | str | Path,
    *,
    budget: int | str = "512MiB",
    embedding_dim: int = 16,
    dtype: str = "float32",
    optimizer: str | RowOptimizer = "rowwise_adagrad",
    sample: float | str | None = None,
    confidence: float | str = 0.999,
    chunks: int = 35,
    chunk_rows: int = 1024,
    seed: int = 0,
    progress: Progress | None = None,
) -> HotProfile:
    """Find the hot rows of a dataset's tables within a budget of fast memory.

    A row is hot if it has at least the share t of its table's accesses, where t is as low as the budget allows. Tables
    under 1 MB are hot as a whole if the budget holds them all. Ids follow the count, so a table's hot rows are the ids
    below a number H, its ``hot_rows``. Accesses are the vocabulary's counts of all training rows. To study the
    published estimate instead, give ``sample``: :func:`true_hot_rows` tells how near it came.

    The share of hot inputs is measured on up to 131,072 training rows. Their shards are not checked against their
    checksums, which would read them whole; ids that are read are checked against their tables.

    Args:
        dataset: a dataset or its directory.
        budget: L: bytes for hot rows and their optimizer state, such as "512MiB".
        embedding_dim: columns of every table; with ``dtype`` and ``optimizer`` it gives the bytes of a row.
        dtype: of the weights, ``"float32"`` or ``"bfloat16"``.
        optimizer: the row optimizer or its kind, whose state lies with the row.
        sample: x: share of the training rows to estimate from, ``0.05`` or ``"5%"`` as published; None takes the
            counts of all rows.
        confidence: of the estimate's intervals, ``0.999`` or ``"99.9%"``.
        chunks: n: of rows whose sampled accesses the estimate looks at (:mod:`stoker.rewrite.fae.row_estimates`).
        chunk_rows: m: rows of a chunk.
        seed: of what is drawn: inputs, sample and chunks.
        progress: called with (what is being done, done, total) while it works.

    Returns:
        The profile. Memory: 8 bytes a row of the tables for counts, 4 more with ``sample``.

    Raises:
        ConfigError: settings out of their range, or a budget that holds no row.
        DataError: no dataset there, no training rows or tables, or an id outside its table.
    """
    settings = ProfileSettings(
        budget=parse_size(budget), embedding_dim=embedding_dim, dtype=dtype,
        optimizer=optimizer if isinstance(optimizer, str) else optimizer.kind,
        sample=None if sample is None else _share("sample", sample), method="exact" if sample is None else "chunks",
        confidence=_share("confidence", confidence), chunks=chunks, chunk_rows=chunk_rows, seed=seed,
    )  # fmt: skip
    size = row_size(embedding_dim, dtype, optimizer)
    if settings.budget < size:
        raise ConfigError(
            f"budget {format_size(settings.budget)} holds not even one row of {size} bytes. Give more, such as 512MiB.",
            settings=("budget",),
        )
    if not isinstance(dataset, Dataset):
        dataset = Dataset(dataset)
    if not dataset.schema.features:
        raise DataError(f"{dataset.path} has no categorical or sequence column, so no row is hot.")
    if not len(dataset.train):
        raise DataError(f"{dataset.path} has no training rows.")
    report = progress or (lambda what, done, total: None)
    names = table_names(dataset.schema)
    tables: list[RowEstimate]
    if settings.sample is None:
        tables = [ExactRows(dataset.counts[name].numpy()) for name in names]
    else:
        taken = draw(dataset.train, settings.sample, seed=seed)
        accesses = count_accesses(dataset, taken, lambda done, total: report("reading ids", done, total))
        tables = [
            ChunkRows(
                accesses[name], share=taken.share, chunks=chunks, chunk_rows=chunk_rows,
                confidence=settings.confidence, seed=seed, name=name,
            )
            for name in names
        ]  # fmt: skip
    small = [table.rows * size < _SMALL for table in tables]
    fits = sum(table.rows * size for table, each in zip(tables, small, strict=True) if each) <= settings.budget
    whole = [fits and each for each in small]
    thresholds = Thresholds(tables, [size] * len(tables), whole)
    threshold, hot = thresholds.fill(settings.budget)
    shares, hot_at = thresholds.curve(_POINTS)
    place = int((shares >= max(threshold, 1e-300)).sum())
    steps = np.insert(hot_at, place, hot, axis=0)  # nested: the prefixes only grow
    inputs = draw(dataset.train, min(1.0, _INPUTS / len(dataset.train)), seed=seed)
    levels = first_hot_levels(dataset, inputs, steps, lambda done, total: report("comparing", done, total))
    input_shares = np.bincount(levels, minlength=len(steps) + 1).cumsum()[:-1] / inputs.rows
    served = np.stack([table.served(steps[:, z]) for z, table in enumerate(tables)], axis=1)
    weights = np.array([table.accesses for table in tables], np.float64)
    access_shares = served @ weights / max(float(weights.sum()), 1.0)
    found = []
    for z, (name, table) in enumerate(zip(names, tables, strict=True)):
        cut = threshold * max(table.accesses, 1)
        estimate = int(table.hot(np.array([cut]))[0]) if threshold > 0 else table.rows
        low, high = table.interval(cut) if threshold > 0 else (table.rows, table.rows)
        found.append(
            HotTable(
                name=name, rows=table.rows, row_bytes=size, accesses=table.accesses, hot_rows=int(hot[z]),
                estimate=estimate, low=low, high=high, access_share=float(served[place, z]), whole=whole[z],
                by_count=follows_count(dataset.counts[name].numpy()),
            )
        )  # fmt: skip
    curve = [
        CurvePoint(
            threshold=min(float(share), 1.0),
            hot_bytes=int(rows.sum()) * size,
            access_share=float(access),
            input_share=float(inputs_hot),
        )
        for share, rows, access, inputs_hot in zip(
            shares, hot_at, np.delete(access_shares, place), np.delete(input_shares, place), strict=True
        )
    ]
    return HotProfile(
        schema_hash=dataset.schema_hash, data_hash=dataset.train.data_hash, settings=settings, threshold=threshold,
        tables=tuple(found), access_share=float(access_shares[place]), input_share=float(input_shares[place]),
        input_error=_error(levels <= place, inputs), inputs=inputs.rows, curve=tuple(curve),
    )  # fmt: skip


def true_hot_rows(dataset: Dataset, found: HotProfile) -> dict[str, int]:
    """Count the rows of each table that reach the profile's threshold, from the counts of all training rows."""
    counts = {table.name: dataset.counts[table.name].numpy() for table in found.tables}
    if not found.threshold:
        return {name: len(each) for name, each in counts.items()}
    return {name: ExactRows(each).interval(found.threshold * max(each.sum(), 1))[0] for name, each in counts.items()}


def _share(setting: str, value: float | str) -> float:
    try:
        return parse_share(value)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}", settings=(setting,)) from error


def _error(hot: npt.NDArray[np.bool_], inputs: Sample) -> float:
    """Return the standard error of the share of inputs [n] that are hot, from how the drawn blocks differ."""
    sizes = inputs.stops - inputs.starts
    hits = np.add.reduceat(hot.astype(np.int64), np.cumsum(sizes) - sizes)
    blocks = len(sizes)
    spread = float(np.square(hits - hot.mean() * sizes).sum()) * blocks / max(blocks - 1, 1)
    return float(np.sqrt(spread * max(0.0, 1 - inputs.share))) / len(hot)
