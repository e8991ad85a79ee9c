"""Write synthetic logs and their truth: a few threads render blocks of 65,536 rows, which are written in order.

The truth is what the best possible model reaches. It is known because the true probabilities are known: no ranking is
better than that by the probability from which the label was drawn, and no expected log loss is lower.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from stoker.base.device import cpu_count
from stoker.base.errors import ConfigError, DataError, errors_as, require
from stoker.base.files import atomic_file
from stoker.base.ordered import ordered_map
from stoker.base.settings import with_arguments_of
from stoker.base.units import format_size, parse_count, parse_setting, parse_share
from stoker.dataset.rebuild import absent_folders, remove_empty
from stoker.prep.recipes import draw
from stoker.synthetic.clicks import Curve, Options
from stoker.synthetic.logs import METADATA, RECIPES, RenderedBlock, SyntheticSource
from stoker.synthetic.settings import TextSettings

BLOCK = 65_536
_SPOILED = {"label": ord("x"), "number": ord("x"), "hex": ord("z"), "utf8": 0xFF}


@dataclass(frozen=True)
class WriteArguments(TextSettings):
    """The arguments of :func:`write`."""

    recipe: str
    rows: int | str
    out: str | Path
    _: KW_ONLY
    workers: int | None = None
    overwrite: bool = False
    metadata: str | Path | None = None
    if TYPE_CHECKING:
        curve: Curve | str | Path | None = None  # type: ignore[assignment]


@with_arguments_of(WriteArguments)
def write(
    recipe: str,
    rows: int | str,
    out: str | Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    metadata: str | Path | None = None,
    **settings: Any,
) -> SyntheticTruth:
    """Write a log in the raw format of ``recipe`` and, next to it, ``<out>.truth.json``.

    The arguments determine every byte; ``workers`` and the machine do not change any. Memory does not grow with
    ``rows``.

    Args:
        recipe: one of :data:`RECIPES`.
        rows: log lines (ratings for movielens, impressions for ebnerd), a number or ``"10M"``.
        out: a file; ``.gz`` and ``.zst`` compress text, online-retail and globo are Parquet. For movielens and ebnerd a
            directory.
        alpha: exponent of Zipf's law for the ids, used without a curve.
        curve: a measured frequency curve, the name of a curve of the package, or a file of one; it is stretched to the
            size of each table.
        seed: of the rows, 0 or more.
        universe: 0 or more. Logs of one universe share ids, their popularity and hidden weights with any seed,
            so that a model trained on one log can score another. None takes ``seed``. Tables grow with ``rows``, except
            in criteo and avazu: give logs of one universe the same ``rows``.
        drift: share of the frequency ranks that have another id at the end of the log than at its start, 0 to 1.
        bad: share of lines to spoil (wrong column count, unreadable label or number, invalid hex, broken UTF-8), for
            text formats. :func:`stoker.prepare` quarantines exactly these. They do not count in the truth.
        scale: factor on the number of distinct ids of every table, above 0 and up to 100.
        base_rate: share of positives, between 0 and 1; None takes that of the real log.
        signal: standard deviation of the true logit, or strength of preferences, 0 to 5. With 0 labels are random.
        workers: rendering threads; None takes one per core, at most 4.
        overwrite: replace an existing log, once the new one is whole.
        metadata: trivago only: also write the properties of every item (``item_id,properties``) to this file,
            ``item_metadata.csv`` in the real data set. They depend only on the universe and the number of items.

    Returns:
        The truth: what the best possible model reaches.

    Raises:
        ConfigError: the recipe is unknown, a setting is out of range, the file name does not suit the format, ``out``
            exists, or it cannot be written.
        DataError: the disk is full.
        KeyboardInterrupt: Ctrl-C; its text says that nothing was kept.

    >>> truth = write("avazu", 5000, "avazu.csv", seed=1)
    >>> print(f"{truth.examples:,} rows, best AUC {truth.best_auc:.2f}")
    5,000 rows, best AUC 0.80
    """
    total, share = parse_setting("rows", parse_count, rows), parse_setting("bad", parse_share, settings.pop("bad", 0.0))
    if total < 1:
        raise ConfigError(f"rows is {total}. Give at least 1.", settings=("rows",))
    options = Options(rows=total, **settings)
    source = source_of(recipe, options)
    out = Path(out)
    if share and not source.spoil:
        message = f"bad is {share:g}, but {recipe} logs have no lines of text to spoil. Leave it out."
        raise ConfigError(message, settings=("bad",))
    truth_file = Path(f"{out if out.name else out.absolute()}.truth.json")
    paths = {name: out / name if name else out for name in source.files}
    files = dict(source.files)
    if metadata is not None:
        if source.metadata is None:
            message = f"metadata cannot be written: of all logs only trivago has any, not {recipe}. Leave it out."
            raise ConfigError(message, settings=("metadata",))
        paths[METADATA] = _metadata_path(Path(metadata), (out, truth_file))
        files[METADATA] = source.metadata
    _check_place(out, [*paths.values(), truth_file], source, overwrite)
    # A row takes more than a byte, so these would never fit; others may, depending on the log.
    if total > (free := shutil.disk_usage(next(each for each in out.absolute().parents if each.exists())).free):
        raise ConfigError(f"rows is {rows}, but {format_size(free)} of disk are free at {out}. Give fewer rows.")
    made = [folder for path in paths.values() for folder in absent_folders(path.parent)]
    meter, spoiled = TruthMeter(), 0
    unwritable = errors_as(ConfigError, f"{out} cannot be written", "Choose a place that you may write to.")
    try:
        with unwritable, ExitStack() as stack:  # the files of a log appear together, once the last one is whole
            for name, (count, render) in files.items():
                spoil = partial(_spoil, kinds={} if name else source.spoil, share=share, seed=options.seed)
                header = source.header.get(name, "")
                spoiled += _write_file(stack, paths[name], header, count, render, spoil, meter, workers)
    except KeyboardInterrupt as stop:
        message = f"interrupted; nothing was written to {out}. Give the same command again to start over."
        raise KeyboardInterrupt(message) from stop
    finally:
        remove_empty(made)
    truth = meter.truth(
        recipe=recipe, rows=total, bad=spoiled, seed=options.seed, task=source.task, universe=options.universe
    )
    truth.save(truth_file)
    return truth


def _metadata_path(path: Path, taken: tuple[Path, ...]) -> Path:
    """Return ``path``; raise ConfigError if ``prepare`` could not find metadata there."""
    remedy = ""
    if path.is_dir():
        remedy = f"this is a directory. Name a file in it: {path / 'item_metadata.csv'}."
    elif path.resolve() in [other.resolve() for other in taken]:
        remedy = "the log is written to this file. Name another one, such as item_metadata.csv."
    elif "metadata" not in path.name:
        remedy = "prepare finds this file by 'metadata' in its name. Name it item_metadata.csv."
    if remedy:
        raise ConfigError(f"metadata {path}: {remedy}", settings=("metadata",))
    return path


def _check_place(out: Path, files: list[Path], source: SyntheticSource, overwrite: bool) -> None:
    """Raise ConfigError if ``out`` is a file for a directory or the reverse, or if a file exists."""
    single = "" in source.files
    if single and out.is_dir():
        raise ConfigError(f"{out} is a directory. Name a file in it: {out / source.example}.")
    if not single and out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file, but this log has {len(source.files)} files. Name a directory for them.")
    present = next((path for path in files if path.exists()), None)
    if present is not None and not overwrite:
        message = f"{present} is there already. Choose another out, or pass overwrite=True to replace it."
        raise ConfigError(message, settings=("out", "overwrite"))


def source_of(recipe: str, options: Options) -> SyntheticSource:
    """Return the source of a recipe, whose name may have dashes or underscores."""
    build = RECIPES.get(recipe.replace("_", "-"))
    if build is None:
        raise ConfigError(f"there is no synthetic log for {recipe!r}. Choose one of {', '.join(RECIPES)}.")
    return build(options)


def ordered_blocks(rows: int, make: Callable[[int, int], Any], workers: int | None) -> Iterator[Any]:
    """Call ``make(start, stop)`` for each block on threads; yield results in order, few of them in memory at once."""
    workers = workers or min(4, cpu_count())
    starts = range(0, max(rows, 1), BLOCK)
    return ordered_map(lambda start: make(start, min(start + BLOCK, rows)), starts, workers, ahead=workers)


def _write_file(
    stack: ExitStack, path: Path, header: str, rows: int, render: Callable[[int, int], RenderedBlock],
    spoil: Callable[[RenderedBlock, int], tuple[RenderedBlock, int]], meter: TruthMeter, workers: int | None,
) -> int:  # fmt: skip
    """Write one file, which appears when ``stack`` closes; return the number of spoiled lines."""

    def make(start: int, stop: int) -> tuple[Any, RenderedBlock, int]:
        part = render(start, stop)
        if part.block is None:
            return part.table, part, 0
        part, bad = spoil(part, start)
        return cast(Any, part.block).tobytes().translate(None, b"\0"), part, bad

    spoiled, put = 0, None
    for content, part, bad in ordered_blocks(rows, make, workers):
        if put is None:
            sink = _text(path, header) if part.table is None else _parquet(path, part.table.schema)
            put = stack.enter_context(sink)
        put(content)
        spoiled += bad
        if part.labels is None:
            meter.add(part.logits)
        else:
            meter.add_known(part.logits, part.labels)
    return spoiled


def _spoil(
    part: RenderedBlock, start: int, *, kinds: Mapping[str, int], share: float, seed: int
) -> tuple[RenderedBlock, int]:
    """Spoil a share of the lines in place and drop them from the truth; return the block and their number."""
    if not kinds or not share or part.block is None:
        return part, 0
    rows = np.arange(start, start + len(part.block))
    hit = draw.uniform(draw.key_of(seed, "bad"), rows) < share
    chosen = draw.integers(draw.key_of(seed, "bad kind"), rows, len(kinds))
    for number, (kind, column) in enumerate(kinds.items()):
        lines = hit & (chosen == number)
        if kind == "columns":
            part.block[lines, part.starts[column] - 1] = 0  # two fields run together
        else:
            part.block[lines, part.starts[column]] = _SPOILED[kind]
    times = 1 if part.labels is None else 2
    if len(part.logits) == times * len(rows):
        keep = np.tile(~hit, times)
        part = replace(part, logits=part.logits[keep], labels=None if part.labels is None else part.labels[keep])
    return part, int(hit.sum())


@contextmanager
def _text(path: Path, header: str) -> Iterator[Callable[[bytes], object]]:
    if path.suffix in (".parquet", ".zip", ".bz2", ".xz"):
        raise ConfigError(f"{path.name}: this log is text. Name it .tsv, .csv or .txt, with .gz or .zst to compress.")
    with ExitStack() as stack:
        out: Any = stack.enter_context(atomic_file(path))
        if path.suffix == ".gz":
            # Without file name and time in the header, and with blocks of fixed size, the bytes are always the same.
            packed = stack.enter_context(gzip.GzipFile("", "wb", 6, out, mtime=0))
            out = stack.enter_context(io.BufferedWriter(cast(Any, packed), 1 << 20))
        elif path.suffix == ".zst":
            zstandard = require("zstandard", f"{path} needs")
            out = stack.enter_context(zstandard.ZstdCompressor(level=3).stream_writer(out, closefd=False))
        if header:
            out.write(header.encode() + b"\n")
        yield out.write


@contextmanager
def _parquet(path: Path, schema: Any) -> Iterator[Callable[[Any], object]]:
    import pyarrow.parquet as pq

    if path.suffix != ".parquet":
        raise ConfigError(f"{path.name}: this log is Parquet. Name it {path.stem}.parquet.")
    with atomic_file(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        yield writer.write_table


@dataclass(frozen=True, kw_only=True)
class SyntheticTruth:
    """The truth of one log; AUC, log loss (nats) and base rate are expectations over the labels.

    >>> truth = stoker.synthetic.write("taobao", 2000, "taobao.csv")
    >>> SyntheticTruth.load("taobao.csv.truth.json") == truth
    True
    >>> truth.task
    'the taken item against one item drawn uniformly from all, given the user'
    """

    recipe: str
    rows: int  # rows of the log, with bad lines
    bad: int  # lines spoiled on purpose
    examples: int  # labelled examples, from which the figures are
    seed: int
    base_rate: float  # share of positives
    best_auc: float
    best_log_loss: float
    task: str  # what an example is, and what its negatives are
    universe: int | None = None  # None: the seed; older files do not name it

    def save(self, path: str | Path) -> None:
        """Write as JSON, without the universe if it is None."""
        kept = {name: value for name, value in asdict(self).items() if name != "universe" or value is not None}
        Path(path).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> SyntheticTruth:
        """Read the ``<out>.truth.json`` that ``write`` made.

        Raises:
            DataError: the file is missing, or is not a truth.
        """
        what, remedy = f"{path} is not the truth of a synthetic log", "stoker.synthetic.write makes one."
        with errors_as(DataError, what, remedy, (OSError, TypeError, json.JSONDecodeError)):
            return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


class TruthMeter:
    """Sum up true logits in bounded memory: expected AUC by a fine histogram, expected log loss exactly.

    >>> import numpy as np
    >>> meter = TruthMeter()
    >>> meter.add(np.array([-2.0, -1.0, 0.0, 3.0]))
    >>> round(meter.base_rate, 3), round(meter.auc, 3), round(meter.log_loss, 3)
    (0.46, 0.844, 0.458)
    """

    BINS = 2**17
    RANGE = 20.0  # logits beyond +-20 count in the end bins; their labels are certain to 2e-9

    def __init__(self) -> None:
        self._positive = np.zeros(self.BINS)
        self._negative = np.zeros(self.BINS)
        self._entropy = 0.0
        self.examples = 0

    def add(self, logits: NDArray) -> None:
        """Add examples by their true logits, [n]; each is positive with probability ``1 / (1 + exp(-logit))``."""
        z = logits.astype(np.float64)
        p = 1.0 / (1.0 + np.exp(-z))
        self._add(z, p, 1.0 - p)

    def add_known(self, logits: NDArray, labels: NDArray) -> None:
        """Add examples by their best logits and fixed labels, [n] each."""
        y = labels.astype(np.float64)
        self._add(logits.astype(np.float64), y, 1.0 - y)

    def _add(self, z: NDArray, positive: NDArray, negative: NDArray) -> None:
        bins = ((np.clip(z, -self.RANGE, self.RANGE) + self.RANGE) * (self.BINS / (2 * self.RANGE))).astype(np.int64)
        np.minimum(bins, self.BINS - 1, out=bins)
        self._positive += np.bincount(bins, weights=positive, minlength=self.BINS)
        self._negative += np.bincount(bins, weights=negative, minlength=self.BINS)
        # np.sum, not a product by BLAS: its order of additions depends on the processor.
        self._entropy += float(np.sum(positive * np.logaddexp(0.0, -z) + negative * np.logaddexp(0.0, z)))
        self.examples += len(z)

    def truth(self, **log: Any) -> SyntheticTruth:
        """Return the truth of the log whose examples were added; ``log``: its other fields."""
        figures: dict[str, Any] = {"base_rate": self.base_rate, "best_auc": self.auc, "best_log_loss": self.log_loss}
        return SyntheticTruth(examples=self.examples, **figures, **log)

    @property
    def base_rate(self) -> float:
        """Expected share of positives."""
        return float(self._positive.sum() / total) if (total := self._total()) else float("nan")

    @property
    def auc(self) -> float:
        """Expected AUC of ranking by the true probability; ties within a bin count half."""
        below = np.cumsum(self._negative) - self._negative
        pairs = self._positive.sum() * self._negative.sum()
        return float((self._positive * (below + self._negative / 2)).sum() / pairs) if pairs else float("nan")

    @property
    def log_loss(self) -> float:
        """Expected log loss of predicting the true probability, nats per example."""
        return self._entropy / total if (total := self._total()) else float("nan")

    def _total(self) -> float:
        return float(self._positive.sum() + self._negative.sum())
