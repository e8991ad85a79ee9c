"""Writing synthetic logs: blocks of 65,536 rows rendered by a few threads, written in order."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np

from stoker.base.device import cpu_count
from stoker.base.errors import ConfigError
from stoker.base.files import atomic_file
from stoker.base.ordered import ordered_map
from stoker.base.units import parse_count, parse_share
from stoker.dataset.rebuild import absent_folders, remove_empty
from stoker.prep.recipes import draw
from stoker.synthetic import choices, formats, purchases
from stoker.synthetic.clicks import Options
from stoker.synthetic.curve import Curve
from stoker.synthetic.formats import METADATA, Part, Source
from stoker.synthetic.truth import SyntheticTruth, TruthMeter

__all__ = ["BLOCK", "RECIPES", "ordered_blocks", "source_of", "write"]

BLOCK = 65_536
T = TypeVar("T")
_SPOILED = {"label": ord("x"), "number": ord("x"), "hex": ord("z"), "utf8": 0xFF}

RECIPES: dict[str, Callable[[Options], Source]] = {
    "criteo": formats.criteo,
    "avazu": formats.avazu,
    "taobao": purchases.taobao,
    "trivago": choices.trivago,
    "movielens": formats.movielens,
    "online-retail": purchases.online_retail,
    "globo": purchases.globo,
    "ebnerd": choices.ebnerd,
}


def write(
    recipe: str,
    rows: int | str,
    out: str | Path,
    *,
    seed: int = 0,
    universe: int | None = None,
    alpha: float = 1.05,
    curve: Curve | str | Path | None = None,
    drift: float = 0.0,
    bad: float | str = 0.0,
    scale: float = 1.0,
    base_rate: float | None = None,
    signal: float = 1.3,
    workers: int | None = None,
    overwrite: bool = False,
    metadata: str | Path | None = None,
) -> SyntheticTruth:
    """Write a log in the raw format of ``recipe`` and, beside it, ``<out>.truth.json``.

    The bytes depend on the arguments only, never on ``workers`` or the machine. Memory does not grow with
    ``rows``.

    Args:
        recipe: one of :data:`RECIPES`.
        rows: log lines (ratings for movielens, impressions for ebnerd); a number or ``"10M"``.
        out: a file; ``.gz`` and ``.zst`` compress text. A directory for movielens and ebnerd. online-retail
            and globo are Parquet.
        alpha: exponent of Zipf's law for the ids, where no curve is given.
        curve: a measured frequency curve, the name of one of the package's, or a file of one; stretched to
            each table.
        seed: 0 or more; another seed, other rows.
        universe: 0 or more; logs of one universe share ids, their popularity and hidden weights whatever their seed,
            so that a model of one log can score another. None takes ``seed``. Where tables grow with ``rows``
            (all but criteo and avazu), give such logs the same ``rows``.
        drift: share of the frequency ranks whose id is another one at the end of the log than at its start, 0 to 1.
        bad: share of lines to spoil (wrong column count, unparsable label or number, invalid hex, broken UTF-8),
            for text formats; :func:`stoker.prepare` sets aside just these. They do not enter the truth.
        scale: factor on the number of distinct ids of every table, above 0 and up to 100.
        base_rate: share of positives, between 0 and 1; None takes the real log's.
        signal: standard deviation of the true logit, or the strength of preferences, 0 to 5; 0 plants nothing.
        workers: rendering threads; None takes one per core, at most 4.
        overwrite: replace a log that is there, once the new one is whole.
        metadata: trivago only: also write the properties of every item (``item_id,properties``) to this file,
            ``item_metadata.csv`` in the real data set; it depends on the universe and the number of items only.

    Returns:
        The planted truth: what the best possible model reaches.

    Raises:
        ConfigError: an unknown recipe, an impossible setting, a file name that does not suit the format, a place
            that cannot be written to, or a log that is there already.
        DataError: a full disk.
        KeyboardInterrupt: Ctrl-C; its text says that nothing was kept.
    """
    total, share = _parsed("rows", parse_count, rows), _parsed("bad", parse_share, bad)
    if total < 1:
        raise ConfigError(f"{total} rows make no log. Ask for at least 1.")
    options = Options(
        rows=total,
        seed=seed,
        universe=universe,
        alpha=alpha,
        curve=curve if curve is None or isinstance(curve, Curve) else Curve.load(curve),
        drift=drift,
        scale=scale,
        base_rate=base_rate,
        signal=signal,
    )
    source = source_of(recipe, options)
    out = Path(out)
    if share and not source.spoil:
        raise ConfigError(
            f"bad {share:g}: {recipe} logs have no lines of text to spoil. Leave it out.", settings=("bad",)
        )
    truth_file = out.with_name(out.name + ".truth.json")
    paths = {name: out / name if name else out for name in source.files}
    files = dict(source.files)
    if metadata is not None:
        paths[METADATA] = _metadata_path(Path(metadata), (out, truth_file), recipe, source)
        files[METADATA] = cast(Any, source.metadata)
    _check_place(out, [*paths.values(), truth_file], source, overwrite)
    made = [folder for path in paths.values() for folder in absent_folders(path.parent)]
    meter, spoiled = TruthMeter(), 0
    try:
        with ExitStack() as stack:  # the files of a log appear together, when the last is whole
            for name, (count, render) in files.items():
                spoiled += _write_file(stack, paths[name], source, name, count, render, share, seed, meter, workers)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"interrupted; nothing was written to {out}. Give the same command again to start over."
        ) from stop
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written ({error.strerror}). Choose a place that you may write to."
        ) from error
    finally:
        remove_empty(made)
    truth = meter.truth(recipe=recipe, rows=total, bad=spoiled, seed=seed, task=source.task, universe=universe)
    truth.save(truth_file)
    return truth


def _parsed(name: str, parse: Callable[[Any], T], value: object) -> T:
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}", settings=(name,)) from None


def _metadata_path(path: Path, taken: tuple[Path, ...], recipe: str, source: Source) -> Path:
    """Return ``path``, or refuse it where it cannot hold metadata that ``prepare`` recognises."""
    if source.metadata is None:
        raise ConfigError(f"metadata: {recipe} logs have none; trivago's have. Leave it out.", settings=("metadata",))
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


def _check_place(out: Path, files: list[Path], source: Source, overwrite: bool) -> None:
    """Refuse an output of the wrong kind, or one that is there."""
    single = "" in source.files
    if single and out.is_dir():
        raise ConfigError(f"{out} is a directory. Name a file in it: {out / source.example}.")
    if not single and out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file, but this log has {len(source.files)}. Name a directory for them.")
    present = next((path for path in files if path.exists()), None)
    if present is not None and not overwrite:
        raise ConfigError(
            f"{present} is there already. Choose another out, or pass overwrite=True to replace it.",
            settings=("out", "overwrite"),
        )


def source_of(recipe: str, options: Options) -> Source:
    """The source behind a recipe's name, dashes or underscores."""
    build = RECIPES.get(recipe.replace("_", "-"))
    if build is None:
        raise ConfigError(f"no synthetic log for {recipe!r}. There is one for {', '.join(RECIPES)}.")
    return build(options)


def ordered_blocks(rows: int, make: Callable[[int, int], Any], workers: int | None) -> Iterator[Any]:
    """``make(start, stop)`` over all blocks, on threads, in order; only a few results exist at a time."""
    workers = workers or min(4, cpu_count())
    starts = range(0, max(rows, 1), BLOCK)
    return ordered_map(lambda start: make(start, min(start + BLOCK, rows)), starts, workers, ahead=workers)


def _write_file(
    stack: ExitStack,
    path: Path,
    source: Source,
    name: str,
    rows: int,
    render: Callable[[int, int], Part],
    bad: float,
    seed: int,
    meter: TruthMeter,
    workers: int | None,
) -> int:
    spoil = source.spoil if name == "" and bad else {}

    def make(start: int, stop: int) -> tuple[bytes, Part, int]:
        part = render(start, stop)
        if part.block is None:
            return b"", part, 0
        count, part = _spoil(part, spoil, start, bad, seed)
        assert part.block is not None
        return part.block.tobytes().translate(None, b"\0"), part, count

    spoiled, parquet = 0, None
    sink: BinaryIO | None = None
    for lines, part, count in ordered_blocks(rows, make, workers):
        if part.table is not None:
            parquet = parquet or _parquet(stack, path, part.table)
            parquet.write_table(part.table)
        else:
            if sink is None:
                sink = stack.enter_context(_text_sink(path))
                if name in source.header:
                    sink.write(source.header[name].encode() + b"\n")
            sink.write(lines)
        spoiled += count
        if part.labels is None:
            meter.add(part.logits)
        else:
            meter.add_known(part.logits, part.labels)
    return spoiled


def _spoil(part: Part, spoil: Any, start: int, bad: float, seed: int) -> tuple[int, Part]:
    if not spoil or part.block is None:
        return 0, part
    block = part.block
    rows = np.arange(start, start + len(block))
    hit = draw.uniform(draw.key_of(seed, "bad"), rows) < bad
    kinds = draw.integers(draw.key_of(seed, "bad kind"), rows, len(spoil))
    for number, (kind, column) in enumerate(spoil.items()):
        lines = hit & (kinds == number)
        if kind == "columns":
            block[lines, part.starts[column] - 1] = 0  # two fields run together
        else:
            block[lines, part.starts[column]] = _SPOILED[kind]
    logits, labels = part.logits, part.labels
    if labels is None and len(logits) == len(block):
        logits = logits[~hit]
    elif labels is not None and len(logits) == 2 * len(block):
        keep = np.concatenate([~hit, ~hit])
        logits, labels = logits[keep], labels[keep]
    return int(hit.sum()), Part(block=block, starts=part.starts, logits=logits, labels=labels)


@contextmanager
def _text_sink(path: Path) -> Iterator[BinaryIO]:
    with atomic_file(path) as file, ExitStack() as stack:
        out: Any = file
        if path.suffix == ".gz":
            # No file name and no time in the header, and pieces of fixed size: the same bytes each time.
            packed = stack.enter_context(gzip.GzipFile("", "wb", 6, file, mtime=0))
            out = stack.enter_context(io.BufferedWriter(cast(Any, packed), 1 << 20))
        elif path.suffix == ".zst":
            import zstandard

            out = stack.enter_context(zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False))
        elif path.suffix == ".parquet":
            raise ConfigError(
                f"{path.name}: this log is text. Name it .tsv, .csv or .txt, with .gz or .zst to compress."
            )
        yield out


def _parquet(stack: ExitStack, path: Path, table: Any) -> Any:
    import pyarrow.parquet as pq

    if path.suffix != ".parquet":
        raise ConfigError(f"{path.name}: this log is Parquet. Name it {path.stem}.parquet.")
    file = stack.enter_context(atomic_file(path))
    return stack.enter_context(pq.ParquetWriter(file, table.schema, compression="zstd"))
