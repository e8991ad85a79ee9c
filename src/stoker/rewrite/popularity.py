"""``stoker.profile``: find the most used rows that fit fast memory (FAE, VLDB 2022, section 4.1).

By default, accesses are the counts of the vocabulary, which each dataset has (:class:`ExactRows`). The published
estimate from a sample of the inputs (:class:`ChunkRows`) is there for study.

A row is hot if its share of the accesses to its table is at least t. A lower t makes more rows hot; t is as low as the
budget allows (:class:`Thresholds`). Hot rows are a prefix of the ids, so the budget is met exactly even if an estimate
is wrong; an error only changes the share at which the prefix ends. So the estimate fills the budget, and not the upper
end of its interval, which would leave memory unused.

Legend: n sampled rows, K blocks, F features, L ids, N rows of a table, Z tables, Q thresholds or levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stoker.base.errors import ConfigError, DataError
from stoker.base.progress import Progress, quiet
from stoker.base.settings import with_arguments_of
from stoker.base.units import format_size, parse_share, parse_size
from stoker.dataset.dataset import Dataset
from stoker.dataset.gather import make_gather, new_tensor
from stoker.dataset.order import permutation
from stoker.dataset.spec import FeatureSpec
from stoker.dataset.split import Split
from stoker.optim import ROW_OPTIMIZERS, RowOptimizer
from stoker.placement.placement import row_bytes
from stoker.placement.replay import row_size
from stoker.rewrite.derived import table_ids
from stoker.rewrite.hot_profile import CurvePoint, HotProfile, HotTable, ProfileOptions, ProfileSettings
from stoker.training.config import TrainConfig
from stoker.training.scores.metrics import run_starts
from stoker.training.settings import plain

Floats = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Advance = Callable[[int, int], None]  # (rows read, rows to read)

BLOCK_ROWS = 64  # most rows of a block: 6.5 KiB of Criteo ids
_BLOCKS = 2**15  # least number of blocks
_ROWS = 2**16  # read at a time
_SMALL = 10**6  # bytes: smaller tables are hot as a whole
_INPUTS = 2**17  # most inputs to compare with the hot rows: an error of 0.14 % if they are independent
_POINTS = 20  # of the curve
_GRID = 512  # thresholds of the first search
_HALVINGS = 48
_ALL_COLD = 2.0  # a share that no row has


@dataclass(frozen=True)
class ProfileArguments(ProfileOptions):
    """The arguments of :func:`profile`."""

    dataset: Dataset | str | Path
    _: KW_ONLY
    chunks: int = 35
    chunk_rows: int = 1024
    progress: Progress | None = None
    if TYPE_CHECKING:
        row_optimizer: str | RowOptimizer = "rowwise_adagrad"  # type: ignore[assignment]


@with_arguments_of(ProfileArguments)
def profile(dataset: Dataset | str | Path, **given: Any) -> HotProfile:
    """Find the hot rows of the tables of a dataset within a budget of fast memory.

    A row is hot if its share of the accesses to its table is at least t, where t is as low as the budget allows. Tables
    under 1 MB are hot as a whole if they all fit the budget. Ids are sorted by count, so the hot rows of a table are
    the ids below a number H, its ``hot_rows``. Accesses are the counts of all training rows. To study the published
    estimate instead, give ``sample``; :func:`true_hot_rows` computes its error.

    The share of hot inputs is measured on about 131,072 training rows. The checksums of their shards are not checked,
    because that would read all of them. The ids are checked against their tables.

    Args:
        dataset: a dataset or its directory.
        device_memory: L: bytes for hot rows and their optimizer state, such as "512MiB".
        model: model of the rows. ``model``, ``model_options``, ``embedding_dim``, ``dtype`` and ``row_optimizer`` give
            the bytes of a row of each table. ``tabular`` has tables of different widths.
        model_options: the model's own options.
        embedding_dim: columns of each table.
        dtype: type of the weights, ``"float32"`` or ``"bfloat16"``.
        row_optimizer: the row optimizer or its kind, whose state is in memory with the row.
        sample: x: share of the training rows to estimate from, ``0.05`` or ``"5%"`` as published. None takes the
            counts of all rows.
        confidence: confidence of the intervals, ``0.999`` or ``"99.9%"``.
        chunks: n: chunks of rows for the estimate (:class:`ChunkRows`).
        chunk_rows: m: rows of a chunk.
        seed: seed of the inputs, the sample and the chunks.
        progress: called with (what is being done, done, total).

    Returns:
        The profile. It takes 8 bytes of memory per row of the tables for counts, and 4 more with ``sample``.

    Raises:
        ConfigError: settings out of their range, or a budget smaller than a row.
        DataError: no dataset there, no training rows or tables, or an id outside its table.

    >>> from stoker.testing import make_dataset
    >>> stoker.profile(make_dataset("data", rows=1000), device_memory="2KiB")
    <HotProfile: 30 of 80 rows are hot (37.50%), 2.0 KiB of 5.3 KiB; they serve 72.29% of the accesses and ... inputs>
    """
    asked = ProfileArguments(dataset, **given)
    optimizer, sample, seed = asked.row_optimizer, asked.sample, asked.seed
    settings = ProfileSettings(
        budget=parse_size(asked.device_memory), embedding_dim=asked.embedding_dim, dtype=asked.dtype,
        optimizer=optimizer if isinstance(optimizer, str) else optimizer.kind,
        sample=None if sample is None else parse_share(sample), method="exact" if sample is None else "chunks",
        confidence=parse_share(asked.confidence), chunks=asked.chunks, chunk_rows=asked.chunk_rows, seed=seed,
        model=asked.model, model_options=plain(asked.model_options),
    )  # fmt: skip
    if not isinstance(dataset, Dataset):
        dataset = Dataset(dataset)
    if not dataset.schema.features:
        raise DataError(f"{dataset.path} has no categorical or sequence column, so there are no hot rows.")
    dataset.schema.check_ids("which rows will be hot is not known before")
    if not len(dataset.train):
        raise DataError(f"{dataset.path} has no training rows.")
    sizes = _row_sizes(dataset.schema, settings, optimizer)
    if settings.budget < min(sizes):
        raise ConfigError(
            f"device_memory {format_size(settings.budget)} is less than one row of {min(sizes)} bytes. Give more, such "
            "as 512MiB.", settings=("device_memory",),
        )  # fmt: skip
    report = asked.progress or quiet
    tables = _count_tables(dataset, settings, report)
    whole_bytes = [table.rows * size for table, size in zip(tables.values(), sizes, strict=True)]
    fits = sum(size for size in whole_bytes if size < _SMALL) <= settings.budget
    whole = [fits and size < _SMALL for size in whole_bytes]
    thresholds = Thresholds(list(tables.values()), sizes, whole)
    threshold, hot = thresholds.fill(settings.budget)
    shares, hot_at = thresholds.curve(_POINTS)
    place = int((shares >= max(threshold, 1e-300)).sum())
    steps = np.insert(hot_at, place, hot, axis=0)  # each prefix contains the one before
    inputs = draw(dataset.train, min(1.0, _INPUTS / len(dataset.train)), seed=seed)
    levels = first_hot_levels(dataset, inputs, steps, lambda done, total: report("comparing", done, total))
    input_shares = np.bincount(levels, minlength=len(steps) + 1).cumsum()[:-1] / inputs.rows
    served = np.stack([table.served(steps[:, z]) for z, table in enumerate(tables.values())], axis=1)
    weights = np.array([table.accesses for table in tables.values()], np.float64)
    access_shares = served @ weights / max(float(weights.sum()), 1.0)
    found = []
    for z, (name, table) in enumerate(tables.items()):
        estimate, low, high = table.interval(threshold * max(table.accesses, 1))
        exact = table if settings.sample is None else ExactRows(dataset.counts[name].numpy())
        found.append(
            HotTable(
                name=name, rows=table.rows, row_bytes=sizes[z], accesses=table.accesses, hot_rows=int(hot[z]),
                estimate=estimate, low=low, high=high, access_share=float(served[place, z]), whole=whole[z],
                by_count=exact.by_count,
            )
        )  # fmt: skip
    points = zip(
        np.minimum(shares, 1.0).tolist(), (hot_at @ np.array(sizes)).tolist(),
        np.delete(access_shares, place).tolist(), np.delete(input_shares, place).tolist(), strict=True,
    )  # fmt: skip
    return HotProfile(
        schema_hash=dataset.schema_hash, data_hash=dataset.train.data_hash, settings=settings, threshold=threshold,
        tables=tuple(found), access_share=float(access_shares[place]), input_share=float(input_shares[place]),
        input_error=_error(levels <= place, inputs), inputs=inputs.rows,
        curve=tuple(
            CurvePoint(threshold=share, hot_bytes=rows, access_share=accesses, input_share=hot_inputs)
            for share, rows, accesses, hot_inputs in points
        ),
    )  # fmt: skip


def _row_sizes(schema: FeatureSpec, settings: ProfileSettings, optimizer: str | RowOptimizer) -> list[int]:
    """Return the bytes of a row of each table, with optimizer state."""
    row_size(settings.embedding_dim, settings.dtype, optimizer)  # refuses an unknown type or optimizer
    kind = optimizer if isinstance(optimizer, str) else optimizer.kind
    own = {name: getattr(settings, name) for name in ("model", "model_options", "embedding_dim", "dtype")}
    tables = {table.name: table for table in TrainConfig.from_dict(own).tables(schema)}
    return [row_bytes(tables[name], ROW_OPTIMIZERS[kind].state) for name in _table_names(schema)]


def _count_tables(dataset: Dataset, settings: ProfileSettings, report: Progress) -> dict[str, ExactRows]:
    """Return the rows of each table by their accesses, counted or estimated from a sample."""
    names = _table_names(dataset.schema)
    if settings.sample is None:
        return {name: ExactRows(dataset.counts[name].numpy()) for name in names}
    taken = draw(dataset.train, settings.sample, seed=settings.seed)
    accesses = count_accesses(dataset, taken, lambda done, total: report("reading ids", done, total))
    return {
        name: ChunkRows(
            accesses[name], share=taken.share, chunks=settings.chunks, chunk_rows=settings.chunk_rows,
            confidence=settings.confidence, seed=settings.seed, name=name,
        )
        for name in names
    }  # fmt: skip


def true_hot_rows(dataset: Dataset, found: HotProfile) -> dict[str, int]:
    """Count the rows of each table that reach the threshold of a profile, from the counts of all training rows."""
    tables = {table.name: ExactRows(dataset.counts[table.name].numpy()) for table in found.tables}
    return {name: table.interval(found.threshold * max(table.accesses, 1))[0] for name, table in tables.items()}


def _error(hot: npt.NDArray[np.bool_], inputs: BlockSample) -> float:
    """Return the standard error of the share of hot inputs [n], from the variance of the blocks."""
    sizes = inputs.stops - inputs.starts
    hits = np.add.reduceat(hot.astype(np.int64), np.cumsum(sizes) - sizes)
    blocks = len(sizes)
    spread = float(np.square(hits - hot.mean() * sizes).sum()) * blocks / max(blocks - 1, 1)
    return float(np.sqrt(spread * max(0.0, 1 - inputs.share))) / len(hot)


class ExactRows:
    """The rows of a table by their accesses, from full counts [N].

    Hot rows are a prefix, so row 0 is hot if any other row is. If the counts do not fall along the ids, the nearest
    falling counts are used (isotonic regression).
    """

    def __init__(self, counts: npt.NDArray[Any]) -> None:
        self.rows, self.accesses = len(counts), int(counts.sum())
        self._counts = counts
        known = counts[1:]  # row 0 is apart, as it may have any count
        starts = run_starts(known)
        self.by_count = not bool((known[starts[1:]] > known[starts[1:] - 1]).any())
        if not self.by_count:
            from scipy.optimize import isotonic_regression

            known = isotonic_regression(known, increasing=False).x
            starts = run_starts(known)
        self._negative = -known[starts].astype(np.float64)  # [R] counts of the steps, negated: they rise
        self._ends = np.append(starts, len(known)) + 1  # [R + 1] row after each step; the first is 1

    def hot(self, cuts: Floats) -> Int64:
        """Return the number of rows with at least this many accesses in an epoch, for each of [Q] cut-offs."""
        # Counts are integers, so "at least c" means "more than ceil(c) - 1"; fitted counts are between integers.
        cuts = np.maximum(np.ceil(cuts) - 0.5, 0.0)
        passed = np.searchsorted(self._negative, -cuts, side="right")
        return np.where((passed > 0) | (self._counts[0] >= cuts), self._ends[passed], 0).astype(np.int64)

    def interval(self, cut: float) -> tuple[int, int, int]:
        """Return that number for one cut-off and its interval; both ends are equal, because it is exact."""
        hot = int(self.hot(np.array([cut]))[0])
        return hot, hot, hot

    def served(self, hot: Int64) -> Floats:
        """Return the accesses of the ids below ``hot`` as a share of all, [Q]."""
        ends, place = np.unique(hot, return_inverse=True)
        parts = [int(self._counts[a:b].sum(dtype=np.int64)) for a, b in pairwise([0, *ends, len(self._counts)])]
        return np.asarray(np.cumsum(parts)[place] / max(sum(parts), 1))


def half_width(deviation: float, samples: int, share: float, confidence: float) -> float:
    """Return half the interval of a mean (Equation 4): t * sqrt((N - n) / N * s**2 / n), n - 1 degrees of freedom.

    ``deviation``: s of the ``samples``, n of them, at least 2; ``share``: n / N; ``confidence``: 1 - alpha.
    """
    from scipy.special import stdtrit

    t = float(stdtrit(samples - 1, (1 + confidence) / 2))
    return t * deviation * math.sqrt(max(0.0, 1 - share) / samples)


class ChunkRows(ExactRows):
    """The same as :class:`ExactRows`, estimated from the sampled accesses of each row [N] as published (section 4.1.2).

    Rows are drawn at random in n chunks of m. Their sampled accesses are compared with the cut-off of Equation 1, and
    the share of hot rows in the chunks is the estimate for the table. The draw is a permutation of the rows, because
    with ids by falling count all hot rows are neighbours, and a chunk of neighbours would have all or none. Two errors
    remain. The sampled accesses of a row vary: at 5 %, a row with 20 accesses may have none or three. And if one row in
    1,000 is hot, 35 x 1,024 rows have 36 hot ones, plus or minus 6.
    """

    def __init__(
        self, counts: npt.NDArray[np.int32], *, share: float, chunks: int, chunk_rows: int, confidence: float,
        seed: int, name: str,
    ) -> None:  # fmt: skip
        self.rows = len(counts)
        self._counts, self._share, self._confidence = counts, share, confidence
        self.accesses = round(int(counts.sum(dtype=np.int64)) / share)
        known = counts[1:]  # row 0 is apart, as it may have any count
        self._of = len(known) / chunk_rows  # N, in chunks
        if self._of <= chunks:
            self._chunks = np.sort(known)[None, :]  # counted whole
        else:
            picked = permutation(f"{seed}/{name}/chunks", len(known))(0, chunks * chunk_rows)
            self._chunks = np.sort(known[picked].reshape(chunks, chunk_rows), axis=1)

    def _hits(self, cuts: Floats) -> Floats:
        """Return C_i (Equation 2) for each cut-off of Equation 1, [n, Q]."""
        hits = [len(chunk) - np.searchsorted(chunk, cuts * self._share) for chunk in self._chunks]
        return np.stack(hits).astype(np.float64)

    def _of_all(self, mean: Floats, cuts: Floats) -> Int64:
        """Return the rows of the prefix, from the mean hits of the chunks."""
        found = np.rint(mean.clip(0, self._chunks.shape[1]) / max(self._chunks.shape[1], 1) * (self.rows - 1))
        own = self._counts[0] >= cuts * self._share
        return np.where((found > 0) | own, found + 1, 0).astype(np.int64)

    def hot(self, cuts: Floats) -> Int64:
        return self._of_all(self._hits(cuts).mean(axis=0), cuts)

    def interval(self, cut: float) -> tuple[int, int, int]:
        """Return as :meth:`ExactRows.interval`. The interval covers the error of the chunks, not of the sample."""
        cuts = np.array([cut])
        hits = self._hits(cuts)[:, 0]
        n = len(hits)
        half = half_width(float(hits.std(ddof=1)), n, n / self._of, self._confidence) if n > 1 else 0.0
        found, low, high = (int(self._of_all(hits.mean(keepdims=True) + side, cuts)[0]) for side in (0, -half, half))
        return found, low, high


class Thresholds:
    """Hot rows by threshold: the Statistical Optimizer (section 4.1.3).

    Rows with equal counts become hot at the same t, and may need more memory than the budget. Then the prefix of each
    table includes the same share of such rows, as many as fit.
    """

    def __init__(self, tables: Sequence[ExactRows], row_bytes: Sequence[int], whole: Sequence[bool]) -> None:
        self._tables, self._whole = tables, whole
        self._row_bytes = np.array(row_bytes, np.int64)
        most = max((table.accesses for table in tables), default=0)
        # The last threshold but one needs a single access, the last one none.
        self._grid = np.concatenate([[_ALL_COLD], np.geomspace(1.0, 1.0 / max(most, 2), _GRID), [0.0]])
        self._hot = self.hot(self._grid)
        self._bytes: Int64 = self._hot @ self._row_bytes

    def hot(self, thresholds: Floats) -> Int64:
        """Return the hot rows of each table at each threshold, [Q, Z]."""
        out = np.empty((len(thresholds), len(self._tables)), np.int64)
        for z, table in enumerate(self._tables):
            # A table without accesses counts as having one.
            out[:, z] = table.rows if self._whole[z] else table.hot(thresholds * max(table.accesses, 1))
        return out

    def fill(self, budget: int) -> tuple[float, Int64]:
        """Return the lowest threshold whose rows fit the budget, and the hot rows [Z].

        Rows of equal counts are included as far as they fit. Tables that are hot as a whole must fit.
        """
        place = int(np.searchsorted(self._bytes, budget, side="right")) - 1
        assert place >= 0
        high, fits = float(self._grid[place]), self._hot[place]
        if place == len(self._grid) - 1:
            return 0.0, fits
        low, over = float(self._grid[place + 1]), self._hot[place + 1]
        for _ in range(_HALVINGS if low > 0 else 0):
            middle = math.sqrt(high * low)
            found = self.hot(np.array([middle]))[0]
            if int(found @ self._row_bytes) <= budget:
                high, fits = middle, found
            else:
                low, over = middle, found
        used, more = (int(rows @ self._row_bytes) for rows in (fits, over))
        part = (budget - used) / (more - used)
        return min(high, 1.0), fits + np.floor(part * (over - fits)).astype(np.int64)

    def curve(self, points: int) -> tuple[Floats, Int64]:
        """Return at most ``points`` falling thresholds, evenly spaced by bytes on a logarithmic scale, and hot rows."""
        used = float(self._bytes[-2])
        steps = np.geomspace(max(used / 1000, 1.0), max(used, 1.0), points)
        places = np.searchsorted(self._bytes[:-1], steps * (1 + 1e-9), side="right") - 1
        chosen = np.unique(places[places > 0])
        return self._grid[chosen], self._hot[chosen]


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockSample:
    """Blocks of rows of a split, in the order of the files."""

    share: float  # share of the rows of the split
    starts: Int64  # [K] first row
    stops: Int64  # [K] row after the last

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int((self.stops - self.starts).sum())


def draw(split: Split, share: float, *, seed: int, block_rows: int | None = None) -> BlockSample:
    """Draw a share of the rows of a split: the input sampler (section 4.1).

    Rows are drawn in blocks of up to :data:`BLOCK_ROWS` neighbours, without replacement, each block with equal
    probability. So reads are long, and each row is equally likely. Neighbours are similar (the clicks of a session), so
    a sample of blocks has a larger error than as many single rows. Blocks are therefore shorter, down to single rows,
    if the sample would have fewer than 32,768 blocks.
    """
    block = block_rows or max(1, min(BLOCK_ROWS, int(share * len(split)) // _BLOCKS))
    total = -(-len(split) // block)
    starts = block * np.sort(permutation(f"{seed}/profile", total)(0, min(total, max(1, round(share * total)))))
    stops = np.minimum(starts + block, len(split))
    return BlockSample(share=int((stops - starts).sum()) / max(len(split), 1), starts=starts, stops=stops)


def _table_names(schema: FeatureSpec) -> list[str]:
    """Return the tables of the features, in the order of the features."""
    return list(dict.fromkeys(feature.table for feature in schema.features))


def count_accesses(dataset: Dataset, sample: BlockSample, advance: Advance) -> dict[str, npt.NDArray[np.int32]]:
    """Count the accesses of the rows of each table: the embedding logger of FAE. It takes 4 bytes per row."""
    sizes = dataset.schema.num_embeddings
    counts = {name: np.zeros(sizes[name], np.int32) for name in _table_names(dataset.schema)}
    for table, ids, _ in _read(dataset, sample, advance):
        np.add.at(counts[table], ids, 1)
    return counts


def first_hot_levels(dataset: Dataset, sample: BlockSample, hot: Int64, advance: Advance) -> Int64:
    """Find the first level at which all ids of each sampled row are hot, [n]; Q if there is none.

    ``hot`` [Q, Z]: hot rows of each table, in the order of the features; they rise with the level.
    """
    levels = np.zeros(sample.rows, np.int64)
    limits = dict(zip(_table_names(dataset.schema), hot.T, strict=True))
    for table, ids, rows in _read(dataset, sample, advance):
        np.maximum.at(levels, rows, np.searchsorted(limits[table], ids, side="right"))
    return levels


def _read(dataset: Dataset, sample: BlockSample, advance: Advance) -> Iterator[tuple[str, Int64, Int64]]:
    """Yield a table, ids of sampled rows [L], and the places of their rows in the sample [L], some rows at a time."""
    split, schema = dataset.train, dataset.schema
    gather = make_gather(split.shards, split.starts, ids_only=True)
    ends = np.cumsum(sample.stops - sample.starts)  # of each block, in the sample
    for start in range(0, sample.rows, _ROWS):
        place = np.arange(start, min(start + _ROWS, sample.rows))
        block = np.searchsorted(ends, place, side="right")
        rows = sample.stops[block] - ends[block] + place
        found = {name: tensor.numpy() for name, tensor in gather(rows, new_tensor).items()}
        lengths = np.diff(found["offsets"]).reshape(len(rows), -1) if "offsets" in found else None
        for table in _table_names(schema):
            ids, at = table_ids(found["ids"], lengths, schema, table)
            if len(ids) and not 0 <= ids.min() <= ids.max() < schema.num_embeddings[table]:
                split.check_ids()  # names the shard, the row, the feature and the id
                raise DataError(f"{split.shards[0].path.parent} changed while it was read. Run the command again.")
            yield table, ids.astype(np.int64), start + at
        first, last = np.searchsorted(split.starts, [rows[0], rows[-1]], side="right")
        for shard in split.shards[first - 1 : last]:
            shard.release()
        advance(int(place[-1]) + 1, sample.rows)
