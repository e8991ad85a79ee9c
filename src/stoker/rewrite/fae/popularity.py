"""``stoker.profile``: which rows are accessed so often that fast memory should hold them (FAE, VLDB 2022, section 4.1).

Legend: Z tables, Q thresholds, G groups of sampled inputs.
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
from stoker.rewrite.fae.row_estimates import ChunkRows, ExactRows, RowEstimate
from stoker.rewrite.fae.sampling import AccessLog, Sample, draw
from stoker.rewrite.fae.stratified import StratifiedRows
from stoker.rewrite.fae.threshold import Thresholds

__all__ = ["profile"]

Int64 = npt.NDArray[np.int64]
Progress = Callable[[str, int, int], None]  # (what is being done, done, total)

_SMALL = 10**6  # bytes: smaller tables are hot as a whole
_INPUTS = 2**17  # inputs at most whose ids are compared with the hot rows: an error of 0.14 % where they are unlike
_POINTS = 20  # of the curve
_METHODS = ("stratified", "chunks")


def profile(
    dataset: Dataset | str | Path,
    *,
    budget: int | str = "512MiB",
    embedding_dim: int = 16,
    dtype: str = "float32",
    optimizer: str | RowOptimizer = "rowwise_adagrad",
    sample: float | str | None = 0.05,
    method: str = "stratified",
    confidence: float | str = 0.999,
    chunks: int = 35,
    chunk_rows: int = 1024,
    seed: int = 0,
    progress: Progress | None = None,
) -> HotProfile:
    """Find the hot rows of a dataset's tables within a budget of fast memory.

    Training rows are sampled and their accesses counted; a row is hot if it has at least the share t of its table's
    accesses, where t is as low as the budget allows. Tables under 1 MB are hot as a whole if the budget holds them all.
    Ids follow the count, so a table's hot rows are the ids below a number H, its ``hot_rows``. Shards are not checked
    against their checksums, as training does: that would read them whole. Ids that are read are checked against their
    tables.

    Args:
        dataset: a dataset or its directory.
        budget: L: bytes for hot rows and their optimizer state, such as "512MiB".
        embedding_dim: columns of every table; with ``dtype`` and ``optimizer`` it gives the bytes of a row.
        dtype: of the weights, ``"float32"`` or ``"bfloat16"``.
        optimizer: the row optimizer or its kind, whose state lies with the row.
        sample: x: share of the training rows to read, ``0.05`` or ``"5%"``; None takes the vocabulary's counts of
            all rows instead (the share of inputs is then measured on a sample of up to 131,072).
        method: ``"stratified"``: ids follow the count, and means over neighbouring ids show where it falls below the
            cut-off; ``"chunks"``: n chunks of m rows drawn at random, as published
            (:mod:`stoker.rewrite.fae.row_estimates` and :mod:`stoker.rewrite.fae.stratified` compare them).
        confidence: of the intervals, ``0.999`` or ``"99.9%"``.
        chunks: n: of rows with "chunks", of sampled inputs with "stratified".
        chunk_rows: m: rows of a chunk with "chunks".
        seed: of the sample and of the chunks.
        progress: called with (what is being done, done, total) while it works.

    Returns:
        The profile. Memory does not grow with the data; with "chunks" it takes 4 bytes a row of the tables, with
        ``sample=None`` the counts' 8.

    Raises:
        ConfigError: settings out of their range, or a budget that holds no row.
        DataError: no dataset there, no training rows or tables, or an id outside its table.
    """
    settings = _settings(budget, embedding_dim, dtype, optimizer, sample, method, confidence, chunks, chunk_rows, seed)
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
    log = AccessLog(dataset)
    if settings.sample is None:
        taken = draw(dataset.train, min(1.0, _INPUTS / len(dataset.train)), groups=settings.chunks, seed=seed)
        tables: list[RowEstimate] = [ExactRows(dataset.counts[name].numpy()) for name in log.names]
    else:
        taken = draw(dataset.train, settings.sample, groups=settings.chunks, seed=seed)
        tables = _estimates(log, taken, settings, lambda done, total: report("reading ids", done, total))
    small = [int(rows) * size < _SMALL for rows in log.sizes]
    fits = sum(int(rows) * size for rows, whole in zip(log.sizes, small, strict=True) if whole) <= settings.budget
    whole = [fits and each for each in small]
    thresholds = Thresholds(tables, [size] * len(tables), whole)
    threshold, hot = thresholds.fill(settings.budget)
    shares, hot_at = thresholds.curve(_POINTS)
    place = int((shares >= max(threshold, 1e-300)).sum())
    steps = np.insert(hot_at, place, hot, axis=0)  # nested: the prefixes only grow
    inputs = taken.first(_INPUTS)
    hits = log.levels(inputs, steps, lambda done, total: report("comparing", done, total))
    served = np.stack([table.served(steps[:, z]) for z, table in enumerate(tables)], axis=1)
    accesses = np.array([table.accesses for table in tables], np.float64)
    access_shares = served @ accesses / max(float(accesses.sum()), 1.0)
    input_shares = hits.cumsum(axis=1).sum(axis=0)[:-1] / inputs.rows
    found = []
    for z, (name, table) in enumerate(zip(log.names, tables, strict=True)):
        cut = threshold * max(table.accesses, 1)
        estimate = int(table.hot(np.array([cut]))[0]) if threshold > 0 else table.rows
        low, high = table.interval(cut) if threshold > 0 else (table.rows, table.rows)
        found.append(
            HotTable(
                name=name, rows=table.rows, row_bytes=size, accesses=table.accesses, hot_rows=int(hot[z]),
                estimate=estimate, low=low, high=high, access_share=float(served[place, z]), whole=whole[z],
                by_count=table.by_count,
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
        input_error=_error(hits, place, inputs.share), inputs=inputs.rows, curve=tuple(curve),
    )  # fmt: skip


def _settings(
    budget: int | str,
    embedding_dim: int,
    dtype: str,
    optimizer: str | RowOptimizer,
    sample: float | str | None,
    method: str,
    confidence: float | str,
    chunks: int,
    chunk_rows: int,
    seed: int,
) -> ProfileSettings:
    share = None if sample is None else _share("sample", sample)
    if share == 0:
        raise ConfigError("sample is 0: nothing would be read. Give a share such as 5%.", settings=("sample",))
    if method not in _METHODS:
        raise ConfigError(f"method {method!r} is unknown. Choose one of {', '.join(_METHODS)}.", settings=("method",))
    sure = _share("confidence", confidence)
    if not 0 < sure < 1:
        raise ConfigError(
            f"confidence is {confidence}; give a share above 0 and below 100 %, such as 99.9%.",
            settings=("confidence",),
        )
    if chunks < 2 or chunk_rows < 1:
        raise ConfigError(
            f"chunks={chunks} and chunk_rows={chunk_rows} must be at least 2 and 1.", settings=("chunks",)
        )
    if seed < 0:
        raise ConfigError(f"seed is {seed}; give 0 or more.", settings=("seed",))
    return ProfileSettings(
        budget=parse_size(budget), embedding_dim=embedding_dim, dtype=dtype,
        optimizer=optimizer if isinstance(optimizer, str) else optimizer.kind, sample=share,
        method="exact" if share is None else method, confidence=sure, chunks=chunks, chunk_rows=chunk_rows, seed=seed,
    )  # fmt: skip


def _share(setting: str, value: float | str) -> float:
    try:
        return parse_share(value)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}", settings=(setting,)) from error


def _estimates(
    log: AccessLog, taken: Sample, settings: ProfileSettings, advance: Callable[[int, int], None]
) -> list[RowEstimate]:
    """The rows of each table by sampled accesses."""
    if settings.method == "stratified":
        strata = log.strata(taken, advance)
        return [
            StratifiedRows(int(rows), strata[:, z], share=taken.share, confidence=settings.confidence)
            for z, rows in enumerate(log.sizes)
        ]
    return [
        ChunkRows(
            counts, share=taken.share, chunks=settings.chunks, chunk_rows=settings.chunk_rows,
            confidence=settings.confidence, seed=settings.seed, name=name,
        )
        for name, counts in zip(log.names, log.rows(taken, advance), strict=True)
    ]  # fmt: skip


def _error(hits: Int64, level: int, share: float) -> float:
    """Standard error of the share of inputs that are hot at a level, from how the groups differ.

    Args:
        hits: inputs by group and level, [G, Q + 1].
        level: of interest.
        share: of all inputs that were looked at.
    """
    inputs = hits.sum(axis=1)
    hot = hits[:, : level + 1].sum(axis=1)
    mean = hot.sum() / inputs.sum()
    groups = len(hits)
    spread = float(np.square(hot - mean * inputs).sum()) * groups / (groups - 1)
    return float(np.sqrt(spread * max(0.0, 1 - share))) / float(inputs.sum())
