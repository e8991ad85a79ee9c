"""``stoker.replay``: simulate cache strategies on a stream of ids, without training.

Placement does not change the ids of a run, so hits, misses and traffic depend on the ids only. A stream becomes a
trace: the distinct rows of each step, numbered by falling frequency. The planner of a run
(:class:`stoker.tables.slots.residency.Residency`) plans its batches. Strategies differ in the next uses that the
planner knows: those in a window, those of hints, or none.

Legend: T steps, L distinct rows of all steps one after the other, K rows that occur at all, N rows of all tables,
C slots, B examples, F features.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.base import spool
from stoker.base.errors import ConfigError, DataError, require
from stoker.base.picture import Grid, Shown
from stoker.base.progress import Progress, quiet
from stoker.base.settings import with_arguments_of
from stoker.base.spool import Spool
from stoker.base.units import format_size, parse_count, parse_share, parse_size
from stoker.dataset.dataset import Dataset
from stoker.ops.space import AddressSpace, make_space
from stoker.optim import ROW_OPTIMIZERS, RowOptimizer
from stoker.placement.budget import ReplaySettings
from stoker.tables import tables_for
from stoker.tables.config import DTYPES, Cached, bytes_of_row
from stoker.tables.slots.residency import FARTHEST, Hints
from stoker.tables.slots.slotted import make_residency
from stoker.tables.slots.window import Ahead, default_memory

Kind = Literal["lru", "lfu", "lookahead", "adaptive", "pinned", "belady", "hot-cold", "host-pipelined"]
_PLAIN: tuple[Kind, ...] = ("lru", "lfu", "adaptive", "pinned", "belady", "hot-cold", "host-pipelined")
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_ADAPTIVE = ("adaptive", "pinned")


@dataclass(frozen=True, kw_only=True)
class CacheStrategy:
    """Which resident row is evicted when a slot is needed.

    * ``lru``: the one whose last use is longest ago.
    * ``lfu``: the one that the fewest batches have used so far, counted over the whole trace.
    * ``lookahead``: the one whose next use is farthest. Only the next ``window`` batches are known, and a row in none
      of them counts as infinitely far (Balasubramanian et al., cDLRM, 2021, section 3).
    * ``adaptive``: the same with as many batches known as evictions need, within ``memory``
      (:mod:`stoker.tables.slots.window`): what a cache over a file or URL does by default.
    * ``pinned``: the same, and the first ids of tables are pinned (``Cached(hot=...)``).
    * ``belady``: the same with all batches known. No strategy has fewer misses (Belady 1966).
    * ``hot-cold``: hot rows are pinned once fetched, and the others are as in ``host-pipelined``. Hot are the rows that
      the most batches of the trace use, as many as leave slots for the other rows in flight (FAE, 2022).
    * ``host-pipelined``: no cache. A row is evicted as soon as no batch in flight uses it.

    Among equals, the greater id is evicted first (it is the rarer one), then the later table.
    """

    kind: Kind
    window: int = 0  # batches known ahead; for lookahead only
    memory: float = math.inf  # bytes for known batches; for adaptive and pinned only

    @property
    def name(self) -> str:
        """The name that users write, such as ``lookahead-64``."""
        return f"lookahead-{self.window}" if self.kind == "lookahead" else self.kind

    @classmethod
    def parse(cls, text: str) -> CacheStrategy:
        """Return the strategy of a :attr:`name`."""
        for kind in _PLAIN:
            if text == kind:
                return cls(kind=kind)
        word, _, number = text.partition("-")
        if word == "lookahead" and number.isdecimal() and int(number) >= 1:
            return cls(kind="lookahead", window=int(number))
        raise ConfigError(
            f"strategy {text!r} is unknown. Choose among {', '.join(_PLAIN)} and lookahead-W, where W is the number of "
            "batches known ahead, at least 1 (lookahead-64 for example)."
        )


class HitCounts(NamedTuple):
    """Hits and misses of a strategy over a trace."""

    hits: int  # distinct rows of batches that were resident
    lookups_hit: int  # occurrences of those
    misses: int  # distinct rows of batches that were fetched
    compulsory: int  # misses of rows never used before
    written_back: int  # evicted rows, without those resident at the end


@dataclass(frozen=True, kw_only=True, eq=False)
class IdTrace:
    """The distinct rows of each step.

    Rows are numbered from 0 in the order of (id within its table, position of the table), and listed rising within a
    step. ``rows``, ``counts`` and ``until`` are in unnamed temporary files, at most 16 bytes per place in all. Memory
    grows with K (about 40 bytes per row while recording) and C (about 100 bytes per slot in a simulation), not with L.
    """

    offsets: Int64  # [T + 1] first place of each step
    rows: Int32  # [L]
    counts: Int32  # [L] occurrences of the row in its batch
    until: Int32  # [L] batches until the next use of the row; 0 if there is none
    num_rows: int  # K
    lookups: int  # occurrences of all rows
    keys: Int64  # [K] key of each row: its id times the number of tables, plus the position of the table

    @property
    def steps(self) -> int:
        """T, the number of steps."""
        return len(self.offsets) - 1

    @property
    def places(self) -> int:
        """L, the number of places."""
        return int(self.offsets[-1])

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield chunks of steps [first, last)."""
        return spool.stretches(self.offsets)

    def in_flight(self, batches: int, hot: Flags) -> Int64:
        """Return how many rows that are not ``hot`` [K] the last ``batches`` batches use, at each step [T]."""
        change = np.zeros(self.steps + 1, np.int64)
        for first, last in self.chunks():
            places = slice(*self.offsets[[first, last]])
            cold, until = ~hot[self.rows[places]], self.until[places]
            step = np.repeat(np.arange(first, last), np.diff(self.offsets[first : last + 1]))
            end = step + np.where(until > 0, np.minimum(until, batches), batches)
            change += np.bincount(step[cold], minlength=len(change))
            change -= np.bincount(np.minimum(end[cold], self.steps), minlength=len(change))
        return np.cumsum(change[:-1])


def dataset_space(dataset: Dataset) -> AddressSpace:
    """Return the address space of the tables of a dataset, in the order of a model."""
    if not dataset.schema.features:
        raise DataError(f"{dataset.path} has no categorical or sequence column, so there is no row to cache.")
    tables = tables_for(dataset.schema, 1)
    return make_space(
        [table.name for table in tables],
        [table.num_embeddings for table in tables],
        [table.features for table in tables],
        [feature.name for feature in dataset.schema.features],
    )


def dataset_steps(
    dataset: Dataset, space: AddressSpace, *, batch_size: int, seed: int | None, steps: int | None
) -> tuple[int, Iterator[Int64]]:
    """Return the number of steps, and for each training batch the keys ``id * tables + table`` of its lookups.

    ``seed`` None: the order of the file; ``steps``: batches in all, over several epochs if needed; None: one epoch.
    """
    stream = dataset.train.batches(batch_size, seed=seed, reuse=True)
    if not len(stream):
        raise DataError(f"{dataset.path} has no training rows.")
    total = len(stream) if steps is None else steps
    table_of, rows = np.asarray(space.table_of, np.int64), np.asarray(space.rows, np.int64)

    def keys() -> Iterator[Int64]:
        left = total
        while left:
            for batch in stream:
                ids = batch.ids.numpy().astype(np.int64)
                table = table_of
                if batch.offsets is not None:
                    table = np.repeat(np.tile(table_of, len(batch)), np.diff(batch.offsets.numpy()))
                if np.any(ids < 0) or np.any(ids >= rows[table]):
                    dataset.train.check_ids()  # names the shard, the feature and the id
                yield (ids * len(space.names) + table).reshape(-1)
                left -= 1
                if not left:
                    return

    return total, keys()


def array_steps(arrays: Iterable[Any], num_embeddings: int | None, steps: int | None) -> Iterator[Int64]:
    """Yield the keys of batches that are arrays of ids of one table, of any shape."""
    for number, array in enumerate(arrays):
        if number == steps:
            return
        ids = np.asarray(array)
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise DataError(f"batch {number} has ids of type {ids.dtype}; ids are whole numbers. Convert them first.")
        keys = ids.astype(np.int64).reshape(-1)
        if keys.size and (keys.min() < 0 or (num_embeddings is not None and keys.max() >= num_embeddings)):
            low, high = int(keys.min()), int(keys.max())
            room = "" if num_embeddings is None else f" and below num_embeddings={num_embeddings:,}"
            raise DataError(f"batch {number} has ids from {low:,} to {high:,}; they must be at least 0{room}.")
        yield keys


def record(steps: Iterable[Int64], advance: Callable[[int], None] = lambda step: None) -> tuple[IdTrace, int]:
    """Return a trace from the keys of each step, and the greatest key; ``advance`` is called with the steps read.

    Of equal rows, the one with the greater key is evicted first.
    """
    offsets, lookups = [0], 0
    known, fresh, waiting = np.empty(0, np.int64), list[Int64](), 0
    with Spool(np.int64) as wide, Spool(np.int32) as narrow, Spool(np.int32) as numbers:
        for keys in steps:
            distinct, counts = np.unique(keys, return_counts=True)
            wide.add(distinct)
            narrow.add(counts)
            offsets.append(offsets[-1] + len(distinct))
            lookups += len(keys)
            fresh.append(distinct)
            waiting += len(distinct)
            if waiting >= max(4 * spool.CHUNK, len(known)):  # seldom, but with memory in proportion to K
                known, fresh, waiting = np.unique(np.concatenate([known, *fresh])), [], 0
            advance(len(offsets) - 1)
        known = np.unique(np.concatenate([known, *fresh]))
        if not len(known):
            raise DataError("the trace has no lookups. Give a dataset, or batches with ids.")
        places = wide.mapped()
        for begin, end in spool.spans(len(places)):
            numbers.add(np.searchsorted(known, places[begin:end]))
        rows, occurrences = numbers.mapped(), narrow.mapped()
    del places
    with Spool(np.int32) as file:
        file.reserve(len(rows))
        until = file.mapped()
    soonest = np.zeros(len(known), np.int32)  # step of the next use of each row; 0: none
    for step in reversed(range(len(offsets) - 1)):
        part = slice(offsets[step], offsets[step + 1])
        later = soonest[rows[part]]
        until[part] = np.where(later > 0, later - step, 0)
        soonest[rows[part]] = step
    trace = IdTrace(
        offsets=np.array(offsets, np.int64), rows=rows, counts=occurrences, until=until, num_rows=len(known),
        lookups=lookups, keys=known,
    )  # fmt: skip
    return trace, int(known[-1])


#: the default strategies
STRATEGIES = (
    "lru", "lfu", "lookahead-1", "lookahead-4", "lookahead-16", "lookahead-64", "lookahead-256", "adaptive", "pinned",
    "hot-cold", "host-pipelined", "belady",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StrategyFigures:
    """The figures of one strategy over the whole trace. A row counts once per batch that uses it."""

    strategy: str
    hit_rate: float  # share of the distinct rows of batches that were in a slot
    lookup_hit_rate: float  # the same as a share of all lookups
    hits: int  # rows
    misses: int  # rows fetched, including compulsory ones
    compulsory: int  # rows fetched for their first use, which no strategy avoids
    written_back: int  # rows evicted; all are dirty. Rows resident at the end are written by a checkpoint
    mib_in_per_step: float  # MiB fetched per step, weights and optimizer state
    mib_out_per_step: float  # MiB written back per step
    above_belady: float | None  # misses / misses of belady - 1; None without belady
    ahead: int | None  # most batches known ahead; None if the strategy knows none, or all
    window_mib: float | None  # most MiB of those batches


@dataclass(frozen=True, kw_only=True, repr=False)
class Replay(Shown):
    """The figures of several strategies on one trace, the best hit rate first.

    >>> found = stoker.replay([[0, 1], [0, 2], [0, 3], [0, 1]], slots=3, strategies=["lru", "belady"])
    >>> found
    <Replay: belady is best with a hit rate of 50.00%; 4 batches, 3 slots for 4 rows>
    >>> found["lru"].misses
    5
    """

    steps: int  # T
    batch_size: int | None  # examples; None for a trace of arrays
    in_flight: int  # batches whose rows may not be evicted
    num_rows: int  # N
    rows_used: int  # rows that occur in the trace
    slots: int  # C
    least_slots: int  # most rows in flight at a step: the minimum of slots for all strategies
    row_bytes: int  # bytes of a slot: weights and optimizer state
    rows_needed: int  # distinct rows of all batches: hits and misses together
    lookups: int
    strategies: tuple[StrategyFigures, ...]

    def __getitem__(self, strategy: str) -> StrategyFigures:
        """Return the figures of one strategy by name.

        Raises:
            KeyError: it was not replayed.
        """
        for figures in self.strategies:
            if figures.strategy == strategy:
                return figures
        raise KeyError(f"{strategy!r} was not replayed, only {', '.join(f.strategy for f in self.strategies)}")

    def summary(self) -> str:
        """Return the best strategy and the slots."""
        best = self.strategies[0]
        return (
            f"{best.strategy} is best with a hit rate of {best.hit_rate:.2%}; {self.steps:,} batches, "
            f"{self.slots:,} slots for {self.num_rows:,} rows"
        )

    def grids(self) -> tuple[Grid]:
        """Return a table with a line for each strategy."""
        headings = ["strategy", "hit rate", "of lookups", "misses", "above belady", "KiB in", "KiB out", "ahead", "MiB"]
        rows = [
            [
                each.strategy, f"{each.hit_rate:.2%}", f"{each.lookup_hit_rate:.2%}", f"{each.misses:,}",
                "-" if each.above_belady is None else f"{each.above_belady:+.1%}",
                f"{each.mib_in_per_step * 2**10:,.1f}", f"{each.mib_out_per_step * 2**10:,.1f}",
                *(("-", "-") if each.ahead is None else (f"{each.ahead:,}", f"{each.window_mib or 0:,.1f}")),
            ]
            for each in self.strategies
        ]  # fmt: skip
        return (Grid(headings, rows),)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def row_size(dim: int, dtype: str = "float32", optimizer: str | RowOptimizer = "rowwise_adagrad") -> int:
    """Return the bytes of one row with its optimizer state."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown. Choose one of {', '.join(sorted(DTYPES))}.")
    kind = optimizer if isinstance(optimizer, str) else optimizer.kind
    if kind not in ROW_OPTIMIZERS:
        raise ConfigError(f"row optimizer {kind!r} is unknown. Choose one of {', '.join(sorted(ROW_OPTIMIZERS))}.")
    return bytes_of_row(dim, dtype, ROW_OPTIMIZERS[kind].state)


@dataclass(frozen=True)
class ReplayArguments(ReplaySettings):
    """The arguments of :func:`replay`."""

    source: Dataset | str | Path | Iterable[Any]
    _: KW_ONLY
    strategies: Sequence[str] = STRATEGIES
    hot: Mapping[str, int] | None = None
    num_embeddings: int | None = None
    progress: Progress | None = None
    if TYPE_CHECKING:
        row_optimizer: str | RowOptimizer = "rowwise_adagrad"  # type: ignore[assignment]


@with_arguments_of(ReplayArguments)
def replay(source: Dataset | str | Path | Iterable[Any], **given: Any) -> Replay:
    """Replay cache strategies on a stream of ids, without training, and return their hit rates and traffic.

    Args:
        source: a dataset or its directory, whose training batches are read as in training; or an iterable with one
            array of ids per batch (one table, any shape).
        slots: rows in fast memory. Give at most one of slots, fraction and device_memory.
        fraction: the slots as a share of all rows, ``0.1`` or ``"10%"``. The default is 10 %.
        device_memory: the slots in bytes, such as ``"1GiB"``, all for rows and their state.
        strategies: ``"lru"``, ``"lfu"``, ``"hot-cold"``, ``"host-pipelined"``, ``"belady"``, ``"lookahead-W"`` for
            W batches known ahead, ``"adaptive"`` for as many as evictions need, and ``"pinned"`` for the same with
            pinned rows.
        hot: table -> ids that ``"pinned"`` pins, as ``Cached(hot=...)`` does. None pins the most used ids of a dataset,
            in ``pinned`` of the slots, or in as many as the rows in flight leave.
        pinned: that share, ``0.9`` or ``"90%"``. The ids of arrays are pinned from 0 on.
        window: bytes for the known batches of ``"adaptive"`` and ``"pinned"``, such as ``"256MiB"``.
        in_flight: batches whose rows may not be evicted, including the current one.
        batch_size: examples per batch.
        steps: batches in all, over several epochs if needed; None takes one epoch, or all arrays.
        seed: seed of the shuffled order, as in training; None keeps the order of the file.
        embedding_dim: columns of each table. It, ``dtype`` and ``row_optimizer`` determine the bytes of a row.
        dtype: type of the weights, ``"float32"`` or ``"bfloat16"``.
        row_optimizer: the row optimizer or its kind, whose state moves with the row.
        num_embeddings: rows of the table of the arrays; None takes the greatest id plus 1.
        progress: called with (what is being done, done, total).

    Returns:
        The figures. The trace takes 16 bytes of temporary file for each distinct row of each batch, and about 40 bytes
        of memory for each row that occurs; a simulation about 100 for each slot.

    Raises:
        ConfigError: settings that contradict each other or do not exist; a batch whose rows exceed the slots; or
            millions of batches for a strategy that ranks all of them.
        DataError: no dataset there, or ids that its tables do not have.
        DependencyError: Numba is not installed.

    >>> batches = [[0, 1], [0, 2], [0, 3], [0, 1]]
    >>> print(stoker.replay(batches, slots=3, strategies=["lru", "belady"]).grids()[0].text())
    strategy  hit rate  of lookups  misses  above belady  KiB in  KiB out  ahead  MiB
    --------  --------  ----------  ------  ------------  ------  -------  -----  ---
    belady      50.00%      50.00%       4         +0.0%     0.1      0.0      -    -
    lru         37.50%      37.50%       5        +25.0%     0.1      0.0      -    -
    """
    asked = ReplayArguments(source, **given)
    in_flight, steps, num_embeddings = asked.in_flight, asked.steps, asked.num_embeddings
    window = default_memory() if asked.window is None else parse_size(asked.window)
    chosen = [replace(CacheStrategy.parse(name), memory=window) for name in dict.fromkeys(asked.strategies)]
    if not chosen:
        raise ConfigError(f"no strategy was named. Choose among {', '.join(STRATEGIES)}.")
    size = row_size(asked.embedding_dim, asked.dtype, asked.row_optimizer)
    report = asked.progress or quiet
    require("numba", "replay needs")
    if isinstance(source, str | Path):
        source = Dataset(source)
    from_dataset = isinstance(source, Dataset)
    if isinstance(source, Dataset):
        source.schema.check_ids("there are no ids of rows to replay")
        space = dataset_space(source)
        total, keys = dataset_steps(source, space, batch_size=asked.batch_size, seed=asked.seed, steps=steps)
        trace, _ = record(keys, lambda done: report("reading ids", done, total))
        num_rows, hot = space.num_rows, asked.hot
        if wrong := [name for name in hot or () if name not in space.names]:
            raise ConfigError(f"there is no table {wrong[0]!r} to pin rows of, only {', '.join(space.names)}.")

        def pins(most: int) -> list[int]:
            chosen = _most_used(source.counts, most) if hot is None else hot
            return [min(rows, chosen.get(name, 0)) for name, rows in zip(space.names, space.rows, strict=True)]
    else:
        total = min(len(source), steps or len(source)) if isinstance(source, Sized) else steps or 0
        keys = array_steps(source, num_embeddings, steps)
        trace, greatest = record(keys, lambda done: report("reading ids", done, max(total, done)))
        num_rows = num_embeddings or greatest + 1

        def pins(most: int) -> list[int]:
            return [min(num_rows, most)]

    slots, memory, share = None if asked.slots is None else parse_count(asked.slots), asked.device_memory, None
    if slots is None and memory is None:
        share = parse_share(0.1 if asked.fraction is None else asked.fraction)
    capacity = Cached(slots=slots, memory=memory, fraction=share).count_slots(num_rows, size)

    taken = trace.in_flight(in_flight, np.zeros(trace.num_rows, np.bool_))
    least = int(taken.max())
    if least > capacity:
        step = int(np.argmax(taken > capacity))
        lower = "batch_size" if in_flight == 1 else "batch_size or in_flight"
        raise ConfigError(
            f"batch {step:,} needs {taken[step]:,} rows in fast memory at once (in_flight={in_flight}), but there are "
            f"{capacity:,} slots. Give at least {least:,} slots, which is {least / num_rows:.2%} of all rows or "
            f"{format_size(least * size)}; or lower {lower}."
        )

    def one(strategy: CacheStrategy) -> _Run:
        if strategy.kind == "pinned":
            most = min(int(parse_share(asked.pinned) * capacity), capacity - least)
            return _pinned(trace, strategy, pins(most), capacity, in_flight, report)
        replayed = _hot_cold if strategy.kind == "hot-cold" else _replayed
        return replayed(trace, strategy, capacity, in_flight, report)

    found = {strategy: one(strategy) for strategy in chosen}
    best = next((run.counts.misses for strategy, run in found.items() if strategy.kind == "belady"), None)
    figures = [_figures(strategy, run, trace, size, best) for strategy, run in found.items()]
    return Replay(
        steps=trace.steps, batch_size=asked.batch_size if from_dataset else None, in_flight=in_flight,
        num_rows=num_rows, rows_used=trace.num_rows, slots=capacity, least_slots=least, row_bytes=size,
        rows_needed=trace.places,
        lookups=trace.lookups, strategies=tuple(sorted(figures, key=lambda f: (-f.hit_rate, f.strategy != "belady"))),
    )  # fmt: skip


def _figures(strategy: CacheStrategy, run: _Run, trace: IdTrace, row_bytes: int, best: int | None) -> StrategyFigures:
    mib, counts = row_bytes / 2**20 / trace.steps, run.counts
    looks = strategy.kind in ("lookahead", *_ADAPTIVE)
    return StrategyFigures(
        strategy=strategy.name, hit_rate=counts.hits / trace.places, lookup_hit_rate=counts.lookups_hit / trace.lookups,
        hits=counts.hits, misses=counts.misses, compulsory=counts.compulsory, written_back=counts.written_back,
        mib_in_per_step=counts.misses * mib, mib_out_per_step=counts.written_back * mib,
        above_belady=None if best is None else counts.misses / best - 1,
        ahead=run.ahead if looks else None, window_mib=run.window_bytes / 2**20 if looks else None,
    )  # fmt: skip


class _Run(NamedTuple):
    """What a simulation counted."""

    counts: HitCounts
    ahead: int  # most batches known ahead
    window_bytes: int  # most bytes of them


def _hints(trace: IdTrace, kind: Kind) -> Callable[[int, Int64, Int32], Hints | None]:
    """Return a function for the next uses of the rows of a batch, beyond the window.

    For LRU and LFU, they are after the end of the trace: the later, the longer ago or the less often a row was used.
    """
    end, uses = 2 * trace.steps, np.zeros(trace.num_rows, np.int32)
    if kind in ("lru", "lfu", "belady") and end > FARTHEST:
        raise ConfigError(f"{kind} ranks at most {FARTHEST // 2:,} batches, not {trace.steps:,}. Give fewer steps.")

    def frequency(step: int, rows: Int64, until: Int32) -> Hints:
        uses[rows] += 1
        return end - step - uses[rows]

    known: dict[str, Callable[[int, Int64, Int32], Hints]] = {
        "lru": lambda step, rows, until: np.full(len(rows), end - 2 * step, np.int32),
        "lfu": frequency,
        "belady": lambda step, rows, until: until,
    }
    return known.get(kind, lambda step, rows, until: None)


def _replayed(
    trace: IdTrace, strategy: CacheStrategy, slots: int, in_flight: int, report: Progress, hot: Flags | None = None
) -> _Run:
    """Replay a trace once; the rows ``hot`` [K] are pinned and take none of the ``slots``."""
    passing, adapts = strategy.kind in ("hot-cold", "host-pipelined"), strategy.kind in _ADAPTIVE
    residency = make_residency([0, trace.num_rows], min(slots, trace.num_rows + 1), transient=passing)
    residency.set_up(landing=0)
    ahead, hints = Ahead(None if adapts else strategy.window), _hints(trace, strategy.kind)
    waiting: deque[tuple[Int64, Int32, float]] = deque()  # known batches: rows, occurrences, bytes
    flying: deque[Int64] = deque()  # slots of batches in flight
    fresh = np.zeros(0, np.bool_) if hot is None else hot.copy()  # pinned rows that were not used yet
    known = misses = missed = written = widest = 0
    size = largest = 0.0

    def read(step: int) -> None:
        nonlocal misses, missed, size
        part = slice(*trace.offsets[step : step + 2])
        rows, counts, until = trace.rows[part].astype(np.int64), trace.counts[part], trace.until[part]
        own = residency.batch_bytes(len(rows), int(counts.sum()))
        if hot is not None:
            new, cold = fresh[rows], ~hot[rows]
            misses, missed, fresh[rows] = misses + int(new.sum()), missed + int(counts[new].sum()), False
            own = residency.batch_bytes(int(cold.sum()), int(counts.sum()))
            rows, counts, until = rows[cold], counts[cold], until[cold]
        residency.announce(rows, hints(step, rows, until))
        waiting.append((rows, counts, own))
        size += own

    for first, last in trace.chunks():
        for step in range(first, last):
            report(strategy.name, step, trace.steps)
            while known < trace.steps and known - step <= ahead.batches:
                if adapts and known - step > in_flight and size >= strategy.memory:
                    break
                read(known)
                known += 1
            widest, largest = max(widest, known - step - 1), max(largest, size)
            if len(flying) == in_flight:
                residency.release(flying.popleft(), changed=True)
            plan = residency.plan()
            assert plan is not None, "the rows in flight fit the slots"
            flying.append(plan.slots)
            rows, counts, own = waiting.popleft()
            misses, written = misses + len(plan.fetch_rows), written + len(plan.evict_rows)
            missed += int(counts[np.searchsorted(rows, plan.fetch_rows)].sum())
            ahead.judge(residency.guesses, known - step - 1)
            size -= own
    report(strategy.name, trace.steps, trace.steps)
    # Each row is fetched for its first use, whatever the strategy.
    counted = HitCounts(trace.places - misses, trace.lookups - missed, misses, trace.num_rows, written)
    return _Run(counted, widest, int(largest))


def _most_used(counts: Mapping[str, Any], most: int) -> dict[str, int]:
    """Return table -> how many of its first ids are among the ``most`` most used rows, without ties at the end."""

    def above(uses: int) -> dict[str, int]:  # without a copy of the counts, which may be of a billion rows
        return {name: int(np.count_nonzero(np.asarray(found) > uses)) for name, found in counts.items()}

    greatest = max((int(np.asarray(found).max(initial=0)) for found in counts.values()), default=0)
    # The uses of the most used of the others, whose ties may not be pinned, either.
    least = bisect_left(range(greatest + 1), -most, key=lambda uses: -sum(above(uses).values()))
    return above(least) if most > 0 else {}


def _pinned(
    trace: IdTrace, strategy: CacheStrategy, hot: Sequence[int], slots: int, in_flight: int, report: Progress
) -> _Run:
    """Replay a cache that pins the first ``hot`` [number of tables] ids of each table."""
    pins, room = np.array(hot, np.int64), slots - sum(hot)
    flags = trace.keys // len(pins) < pins[trace.keys % len(pins)]
    least = int(trace.in_flight(in_flight, flags).max())
    if least > room:
        raise ConfigError(
            f"{sum(hot):,} pinned rows leave {max(0, room):,} of {slots:,} slots, but the other rows in flight need "
            f"{least:,}. Pin fewer rows, or give more slots.",
            settings=("pinned",),
        )
    return _replayed(trace, strategy, room, in_flight, report, flags)


def _hot_cold(trace: IdTrace, strategy: CacheStrategy, slots: int, in_flight: int, report: Progress) -> _Run:
    """Pin as many of the most used rows as leave slots for the others."""
    uses = np.zeros(trace.num_rows, np.int64)
    for first, last in trace.chunks():
        uses += np.bincount(trace.rows[trace.offsets[first] : trace.offsets[last]], minlength=trace.num_rows)
    order = np.argsort(-uses, kind="stable")

    def hot(count: int) -> Flags:
        found = np.zeros(trace.num_rows, np.bool_)
        found[order[:count]] = True
        return found

    # With one more hot row, at most one row less is in flight, so bisection works.
    most = bisect_right(
        range(1, min(slots, trace.num_rows) + 1), slots,
        key=lambda count: count + int(trace.in_flight(in_flight, hot(count)).max()),
    )  # fmt: skip
    return _replayed(trace, strategy, slots, in_flight, report, hot(most))


def simulate(trace: IdTrace, strategy: CacheStrategy, slots: int, in_flight: int = 1) -> HitCounts:
    """Replay one strategy on a trace whose rows in flight fit the slots."""
    replayed = _hot_cold if strategy.kind == "hot-cold" else _replayed
    return replayed(trace, strategy, slots, in_flight, quiet).counts
