"""Prepare raw click logs into a dataset: bounded memory, resumable, the same bytes for the same input.

There are three passes: raw blocks become typed parts (:mod:`stoker.prep.rows.raw_rows`); splits, tables and
statistics are fitted on training rows; parts become shards. ``OUT/.work`` has a journal of finished steps. It is
deleted when the manifest is written.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base import remote
from stoker.base.device import check_threads, give_back_memory, peak_memory, return_freed_memory
from stoker.base.errors import ConfigError, DataError
from stoker.base.files import NO_ROOM
from stoker.base.settings import with_arguments_of
from stoker.base.units import format_size, plural
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import REQUEST, SPLITS, note_request
from stoker.dataset.memory import TemporaryFolder
from stoker.dataset.rebuild import (
    UnusableInput,
    absent_folders,
    check_out,
    check_replaceable,
    recover,
    remove_dataset,
    remove_empty,
    replace_dataset,
)
from stoker.prep.draft import AUTO, Draft, draft_inputs
from stoker.prep.fit.fitting import Fitting
from stoker.prep.fit.split_rules import targets_of_files
from stoker.prep.inputs import Input, Inputs, files_of
from stoker.prep.like import Like
from stoker.prep.parse.frames import MissingColumnError
from stoker.prep.parse.quarantine import BadLineLimit, BadReasons
from stoker.prep.parse.sources import BLOCK_BYTES, FRAME, expand, refuse_packed_copies, text_order_warning
from stoker.prep.recipe import OWN_SCHEMA, Recipe
from stoker.prep.rows.featured import featured_rows
from stoker.prep.rows.first_look import check_notation, fitted_to, with_one_notation
from stoker.prep.rows.raw_rows import ReadRows, read_rows
from stoker.prep.schema import Schema, SplitRule, split_of
from stoker.prep.settings import PrepareSettings
from stoker.prep.stages.task import StageProgress, Task
from stoker.prep.write.publish import publish, warnings_of
from stoker.rewrite.id_order import Reordering

_ROOM = 3  # bytes of work and shards for each byte of input, roughly; a file may be compressed
_REORDERING = {"read": ("look", "rows"), "order": ("order", "tables"), "write": ("replace", "rows")}  # stage, unit


@dataclass(kw_only=True)
class PrepareReport:
    """The result of a preparation."""

    path: Path
    rows: dict[str, int]  # split -> rows
    positives: dict[str, int]
    labelled: dict[str, int]  # split -> rows with a label
    tables: dict[str, dict[str, float]]  # table -> rows, unknown (share of valid and test ids that are 0)
    lines: int
    bad: int
    seconds: float
    peak_memory: int  # bytes, of this process since it began
    reused: int  # steps that an interrupted run had finished
    dropped: int = 0  # rows that a split rule, sampling or an oov policy dropped
    warnings: list[str] = field(default_factory=list)  # files that break off or were named twice; groups that were cut
    reasons: dict[str, int] = field(default_factory=dict)  # the three commonest reasons of bad lines, with counts
    remedies: list[str] = field(default_factory=list)  # what to do about them
    groups: dict[str, Any] | None = None  # column, count, cut (groups with rows in several splits)
    already: bool = False  # nothing was done: the dataset exists, from the same files and settings


@dataclass(frozen=True, kw_only=True)
class Preparation(PrepareSettings):
    """All settings of a preparation, which :func:`prepare` describes."""

    like: Dataset | str | os.PathLike[str] | None = None
    grow: bool = False
    overwrite: bool = False
    executor: Executor | None = None
    progress: Callable[[StageProgress], None] | None = None
    block_bytes: int = BLOCK_BYTES  # of text to read at a time
    if TYPE_CHECKING:
        split: SplitRule | str | None = None  # type: ignore[assignment]
        reorder: Reordering | bool = False  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history not in ("auto", "ignore") or (self.history != "auto" and self.like is None):
            raise ConfigError(
                f'history is "auto" or, with like, "ignore"; found {self.history!r}. Without like there is no history '
                "to continue: leave it out.", settings=("history", "like"),
            )  # fmt: skip
        if self.executor is not None and not isinstance(self.executor, Executor):
            raise ConfigError(
                f"executor is a {type(self.executor).__name__}, not a concurrent.futures.Executor. Pass one, such as "
                "ProcessPoolExecutor(); of a Dask client, pass client.get_executor().", settings=("executor",),
            )  # fmt: skip
        if self.like is None:
            if self.grow:
                raise ConfigError(
                    "grow adds values to the vocabularies of another dataset: name it with like, or leave grow out.",
                    settings=("grow", "like"),
                )
            if self.negatives:
                raise ConfigError(
                    "negatives samples rows as another dataset did: name it with like. Without like, [negatives] of "
                    "the schema is enough.", settings=("negatives", "like"),
                )  # fmt: skip
            return
        if self.reorder is not False:
            raise ConfigError(
                "a dataset prepared with like has the ids of the other dataset. Leave reorder out.",
                settings=("like", "reorder"),
            )
        if self.split is not None:
            raise ConfigError(
                "with like, all rows go to the split test, so that a split rule has no effect. Leave it out.",
                settings=("like",),
            )

    def task(
        self, recipe: Draft | Recipe | Schema | str | os.PathLike[str] | None, inputs: Inputs, out: Path
    ) -> tuple[Task, list[str]]:
        """Return the task and its warnings."""
        measure: Like | None = None
        limit = BadLineLimit(strict=self.strict, max_bad=self.max_bad)
        noted: list[str] = []
        if self.like is not None:
            path = self.like.path if isinstance(self.like, Dataset) else Path(self.like)
            measure = _like(path, recipe, self.preset, self.history, grow=self.grow, negatives=self.negatives)
            chosen, schema = measure.recipe, measure.schema
        elif recipe is None:
            raise ConfigError("prepare needs a recipe, a schema, or like=DATASET.", settings=("like",))
        else:
            if recipe == AUTO:
                recipe = draft_inputs(inputs, inputs.files)
                noted += filter(None, [recipe.doubts])
            limit.usual += recipe.lacking if isinstance(recipe, Draft) else 0.0
            chosen, schema = load_recipe(recipe, self.preset)
        if self.split is not None:
            schema = replace(schema, split=split_of(self.split))
        more = [self.keep] if isinstance(self.keep, str) else self.keep
        schema = replace(schema, keep=tuple(dict.fromkeys((*schema.keep, *more))))
        names = inputs.names
        _check_names(chosen, names)
        sources, again = expand(inputs.files)
        refuse_packed_copies(sources, names, schema.source)
        task = Task(
            recipe=chosen, schema=fitted_to(schema, chosen, sources), files=sources, out=out,
            limit=limit, threads=check_threads(self.threads), report=self.progress or (lambda _: None),
            block_bytes=self.block_bytes, executor=self.executor, like=measure, names=names,
        )  # fmt: skip
        task = task if measure else with_one_notation(task)
        noted += [f"{names.get(path, path)} was named more than once; it is read once." for path in again]
        in_order = text_order_warning(names.get(path, str(path)) for path in sources)
        noted += filter(None, [in_order, measure.warning if measure else None])
        noted += [*task.schema.leak_warnings(), *task.schema.window_warnings()]
        return task, noted


@dataclass(frozen=True)
class PrepareArguments(Preparation):
    """The arguments of :func:`prepare`."""

    recipe: Recipe | Schema | str | os.PathLike[str] | None = None
    files: Input | Sequence[Input] = ()
    _: KW_ONLY
    out: str | os.PathLike[str] | None = None


@with_arguments_of(PrepareArguments)
def prepare(
    recipe: Recipe | Schema | str | os.PathLike[str] | None = None,
    files: Input | Sequence[Input] = (),
    *,
    out: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Dataset:
    """Prepare raw logs into a dataset directory, or into memory.

    >>> import polars as pl
    >>> log = pl.DataFrame({"item": ["a", "b", "a", "c"] * 250, "clicked": [0, 1, 0, 0] * 250})
    >>> data = stoker.prepare(stoker.Schema.from_dict({"label": "clicked", "categorical": [{"name": "item"}]}), log)
    >>> len(data.train) + len(data.valid) + len(data.test)
    1000

    Args:
        recipe: a recipe or its name, a schema, or the path of a TOML or YAML schema file. ``"auto"``: the draft of
            :func:`stoker.draft_schema` as it is. With ``like``, pass it only if a recipe of your own derived the rows.
        files: raw files or glob patterns: delimited text, Parquet or JSON lines; text also as .gz or .zst. Files are
            read in the given order, those of one pattern sorted by name with numbers by value: day_2 before day_10.
            URLs that fsspec knows (``s3://``, ``https://``, ``hf://`` ...) are downloaded first. Or tables, alone or in
            a list: Polars or pandas frames, PyArrow tables, readers and datasets, DuckDB relations, or anything with
            ``__arrow_c_stream__``; a stream is read once, to a temporary Parquet file.
        out: directory or URL to make. A dataset for a URL is prepared locally and then uploaded, its manifest last. If
            ``out`` is a symbolic link, its target is made or replaced. None: temporary files, which the system keeps in
            memory while it has room. They exist as long as this process refers to the dataset;
            :meth:`Dataset.save <stoker.Dataset.save>` copies them to a directory.
        like: a prepared dataset or its path. The new rows get its schema, vocabularies, fills, scales and fitted
            features. All rows go to the split ``test``. Rows may lack a label, or files the whole column: the label is
            then NaN, and :func:`stoker.predict` scores the rows.
        grow: with ``like``, values that its vocabularies do not have get ids after its own, if they occur as often as
            the column's ``min_count`` says. Ids of the other dataset remain what they are.
        negatives: with ``like``, rows of label 0 are sampled by ``[negatives]`` of its schema, and without a label
            column each row of the log has label 1. Otherwise such rows have no label, as ``stoker predict`` needs them.
        history: for window features, with ``like``. ``"auto"``: the new rows continue the rows of the dataset, and
            older rows are an error. ``"ignore"``: only the new rows count.
        preset: preset of the recipe; None: its first.
        strict: stop at the first bad line.
        max_bad: share of lines that may be bad, e.g. ``"0.1%"``, including labels outside {0, 1}; None: fewer than 10
            lines or at most 1 %, but no such label. With a share, a compressed file that breaks off stops the run;
            without, it causes a warning.
        overwrite: replace an existing dataset. Without it, a dataset that the same version prepared from the same files
            and settings is returned as it is, and any other is an error.
        resume: continue an interrupted run; False starts from the beginning.
        reorder: number ids so that ids used together are neighbours, as :func:`stoker.reorder` does; True: with its
            defaults. Until then the work is in ``out``.plain.
        split: replaces the rule of the recipe or schema: a :class:`stoker.prep.schema.SplitRule`, or a line such as
            ``"random:0.8,0.1"``, ``"time:0.8,0.1"`` or ``"hash:user:0.8,0.1"`` (docs/prepare.md has all).
        keep: raw columns to copy to the scores, besides those that the schema keeps.
        threads: number of threads that parse and encode, at most 16 or four per core; None: one per core. It does not
            change a byte of the result.
        executor: a :class:`concurrent.futures.Executor` whose workers parse blocks, build tables and write shards
            instead of threads: ``ProcessPoolExecutor``, Dask's ``Client.get_executor()`` and the like. Workers must
            see the input files and ``out`` under the same paths. Features, statistics of dense columns, vocabularies
            from ``like``, groups and kept columns remain on threads of this process. The executor is left open. It does
            not change a byte of the result.
        progress: called from the calling thread after each step.

    Returns:
        The dataset, opened.

    Raises:
        SchemaError: the schema contradicts itself or does not fit the files.
        DataError: no usable input, a missing column, a label outside {0, 1}, too many bad lines, a full disk, or an
            output directory that is in use.
        KeyboardInterrupt: Ctrl-C; its text says what was kept.
    """
    temporary = None  # this reference keeps it
    if out is None and settings.get("reorder", False) is not False:
        raise ConfigError("reorder needs a dataset in files. Pass out=DIRECTORY.", settings=("out", "reorder"))
    with files_of(files) as inputs:
        if out is None:
            temporary = TemporaryFolder(_ROOM * sum(path.stat().st_size for path in expand(inputs.files)[0]))
        with remote.published(
            str(out) if temporary is None else temporary.path, overwrite=settings.get("overwrite", False)
        ) as folder:
            report = run_prepare(recipe, inputs, out=folder, **settings)
    for text in report.warnings:
        warnings.warn(text, stacklevel=3)  # past the wrapper that gives this function its arguments
    return Dataset(report.path if remote.url_of(out) is None else str(out))


def run_prepare(
    recipe: Draft | Recipe | Schema | str | os.PathLike[str] | None,
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Inputs,
    *,
    out: str | os.PathLike[str],
    **given: Any,
) -> PrepareReport:
    """Prepare as :func:`prepare` does, with the settings of :class:`Preparation`; return a report."""
    settings = Preparation(**given)
    started = time.perf_counter()
    if not isinstance(files, Inputs):
        files = Inputs([files] if isinstance(files, str | os.PathLike) else list(files))
    target = Path(out) if settings.executor is None else Path(out).absolute()
    if target.is_symlink():  # keep the link; make or replace its target
        target = target.resolve()
    task, noted = settings.task(recipe, files, target)
    how = Reordering() if settings.reorder is True else settings.reorder or None
    request = task.request(how)
    recover(target)
    if not settings.overwrite and (there := _finished_dataset(target, request)) is not None:
        report = _report(task, there.path, there.manifest, started, already=True)
    elif how is None:
        report = _build(task, target, request, resume=settings.resume, overwrite=settings.overwrite)
    else:
        report = _build_reordered(task, target, how, request, settings)
    report.warnings += noted
    return report


def _build_reordered(
    task: Task, target: Path, how: Reordering, request: str | None, settings: Preparation
) -> PrepareReport:
    """Prepare next to ``target``, then reorder the result into it."""
    from stoker.rewrite.reorder import run_reorder

    def show(what: str, done: int, total: int) -> None:
        stage, unit = _REORDERING[what]
        task.report(StageProgress(stage=stage, done=done, total=total, unit=unit))

    _refuse_inside(target, task.files)
    check_out(target, overwrite=settings.overwrite)
    plain = target.with_name(target.name + ".plain")
    recover(plain)
    # A whole dataset in ``plain`` is left from a killed run, perhaps of another command.
    report = _build(task, plain, None, resume=settings.resume, overwrite=True)
    try:
        made = run_reorder(
            plain, target, how=how, overwrite=settings.overwrite, threads=task.threads, progress=show,
            note=lambda folder: note_request(folder, request),
        )  # fmt: skip
    finally:
        remove_dataset(plain)
    return replace(report, path=target, seconds=report.seconds + made.seconds)


def _build(task: Task, target: Path, request: str | None, *, resume: bool, overwrite: bool) -> PrepareReport:
    """Prepare ``target``; explain a full disk and the death of a worker.

    Raises:
        DataError: ``target`` contains an input or something else that may not be overwritten, or the run failed.
    """
    _refuse_inside(target, task.files)
    task.out = target
    if (target / "manifest.json").exists():
        check_replaceable(target, overwrite=overwrite)
        task.out = target.with_name(target.name + ".new")  # the old dataset remains until the new one is whole
    try:
        return _run(task, target, request, resume=resume)
    except (OSError, DataError) as error:
        cause = error.__cause__ if isinstance(error, DataError) else error
        if not isinstance(cause, OSError) or cause.errno not in NO_ROOM:
            raise
        place = next(path for path in (task.out, *task.out.absolute().parents) if path.exists())
        free, some = format_size(shutil.disk_usage(place).free), _finished(task) > 0
        disk = os.statvfs(place) if hasattr(os, "statvfs") else None
        files = f" and {disk.f_favail:,} files" if disk and disk.f_files else ""  # inodes may be out before bytes are
        without = "" if some else " without this run"  # what it wrote is deleted
        remedy = task.remedy_of_full_disk(kept=some)
        raise DataError(f"no room left on the disk of {target} ({free}{files} free{without}). {remedy}") from error
    except RuntimeError as error:
        if not isinstance(error, BrokenExecutor) and "after shutdown" not in str(error):
            raise
        kept = "" if task.temporary else " Finished parts are kept: the same call continues from there."
        raise DataError(
            f"the executor, or a worker of it, ended before the work was done ({error or type(error).__name__}). A "
            f"worker may have run out of memory: use fewer.{kept}"
        ) from error


def _refuse_inside(target: Path, sources: Sequence[Path]) -> None:
    inside = target.resolve()
    for source in sources:
        if source.resolve().is_relative_to(inside):
            raise DataError(f"{source} is inside {target}, the directory of the dataset. Choose another directory.")


def _check_names(recipe: Recipe, names: Mapping[Path, str]) -> None:
    """Raise :class:`ConfigError` for tables if the recipe tells its files apart by their names."""
    tables = [name for path, name in names.items() if path.suffix == FRAME]
    needed = [raw.files for raw in recipe.inputs.values() if not raw.optional]
    if tables and needed and needed != [("*",)]:
        patterns = [pattern for raw in recipe.inputs.values() for pattern in raw.files]
        raise ConfigError(
            f"recipe {recipe.name} reads several files and knows them by their names: {', '.join(patterns)}. Pass "
            f"files, not tables such as {tables[0]}.", settings=("files",),
        )  # fmt: skip


def _like(path: Path, recipe: object, preset: str | None, history: str, *, grow: bool, negatives: bool) -> Like:
    """Open the dataset of ``like``."""
    if preset is not None:
        raise ConfigError(
            "with like, the rows take the recipe of that dataset: leave preset out.", settings=("preset",)
        )
    if recipe is not None and not isinstance(recipe, Recipe):
        named = "another schema" if isinstance(recipe, Schema) else repr(recipe)
        raise ConfigError(
            f"{path} has a schema, so {named} cannot be used as well. Leave the recipe out.", settings=("like",)
        )
    like = Like(path, recipe, history, grow=grow, negatives=negatives)
    if negatives and like.schema.negatives is None:
        raise ConfigError(f"the schema of {path} has no [negatives]: leave negatives out.", settings=("negatives",))
    return like


def load_recipe(recipe: Draft | Recipe | Schema | str | os.PathLike[str], preset: str | None) -> tuple[Recipe, Schema]:
    """Return the recipe with its preset chosen, and its schema; wrap a schema in a recipe."""
    if isinstance(recipe, Draft):
        recipe = recipe.schema()
    if isinstance(recipe, str) and not recipe.endswith((".toml", ".yaml", ".yml")):
        from stoker.prep import recipes

        recipe = recipes.get(recipe)
    if isinstance(recipe, Recipe):
        recipe = recipe.with_preset(preset)
        return recipe, recipe.schema()
    if preset is not None:
        raise DataError("a preset belongs to a recipe; a schema has none. Leave the preset out.")
    schema = recipe if isinstance(recipe, Schema) else Schema.from_file(Path(recipe))
    own = Recipe(name=schema.name, description="own schema", presets={OWN_SCHEMA: lambda: schema})
    return own, schema


def _finished_dataset(target: Path, request: str | None) -> Dataset | None:
    """Return the dataset at ``target`` if it was made by the same ``request``, else None."""
    try:
        if request is None or (target / REQUEST).read_text(encoding="ascii") != request:
            return None
        return Dataset(target)
    except (OSError, UnicodeError, DataError):
        return None  # the preparation will say what is wrong


def _run(task: Task, target: Path, request: str | None, *, resume: bool) -> PrepareReport:
    """Prepare in ``task.out``, then move it to ``target``."""
    started = time.perf_counter()
    return_freed_memory()
    if task.splitting.split.rule == "files" and task.recipe.derive is None:
        targets_of_files(task.splitting, [path.name for path in task.files])
    for feature in task.merged:
        feature.check_file()
    check_notation(task)
    made = absent_folders(task.out) or [task.out] * task.work.exists()
    try:
        task.begin(resume=resume)
        try:
            rows = _read(task)
            fitting = Fitting(task, rows.blocks)
            fitting.fit()
            note_request(task.out, request)
            manifest = publish(task, rows, fitting)
        except UnusableInput:
            task.discard()
            raise
        finally:
            task.journal.close()
            if not task.journal.done:  # a run that failed before its first finished step leaves nothing
                shutil.rmtree(task.work, ignore_errors=True)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(_kept(task, resume=resume)) from stop
    finally:
        remove_empty(made)
    if task.out != target:
        replace_dataset(task.out, target)
    _remove(target / task.work.name)  # last: until the dataset is in its place, it marks the directory as ours
    give_back_memory()
    report = _report(task, target, manifest, started)
    report.dropped = sum(part.rows for part in fitting.parts) - sum(report.rows.values())
    report.warnings = [*task.limit.broken, *report.warnings]
    return report


def _remove(work: Path) -> None:
    """Remove the directory of unfinished work; an executor that does jobs twice may still write there for a moment."""
    for left in reversed(range(100)):
        try:
            return shutil.rmtree(work)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not left:
                raise
            time.sleep(0.02)


def _read(task: Task) -> ReadRows:
    """Read the rows with their features; explain an error that missing labels cause."""
    try:
        return featured_rows(task) if task.in_passes else read_rows(task)
    except DataError as error:
        label = task.schema.label.column
        absent = isinstance(error, MissingColumnError) and list(error.missing) == [label]
        if task.like is None and (absent or f"column {label}: missing value" in str(error)):
            remedy = f"Training needs labels ({label}). To score rows without: stoker prepare --like DATASET."
            kind = UnusableInput if isinstance(error, UnusableInput) else DataError
            raise kind(f"{error} {remedy}", settings=error.settings) from error
        raise


def _report(
    task: Task, path: Path, manifest: dict[str, Any], started: float, *, already: bool = False
) -> PrepareReport:
    """Make the report of a prepared dataset from its manifest."""
    quarantine = path / "quarantine.jsonl"
    found = BadReasons.of_quarantine(quarantine) if quarantine.exists() else BadReasons({}, [])
    splits = [(name, manifest["splits"][name]) for name in SPLITS if name in manifest["splits"]]  # files sort names
    return PrepareReport(
        path=path, reasons=found.counts, remedies=found.remedies,
        rows={name: entry["rows"] for name, entry in splits},
        positives={name: entry["positives"] for name, entry in splits},
        labelled={name: entry.get("labelled", entry["rows"]) for name, entry in splits},
        tables=_table_summary(manifest),
        lines=sum(source["rows"] + source["bad"] for source in manifest["sources"]), bad=manifest["quarantined"],
        seconds=time.perf_counter() - started, peak_memory=peak_memory() or 0, reused=task.reused,
        groups=manifest.get("groups"), already=already,
        warnings=warnings_of(task, manifest),
    )  # fmt: skip


def _finished(task: Task) -> int:
    """Return how many finished steps a later run can reuse; 0 for a dataset in memory."""
    return len(task.journal.done) if hasattr(task, "journal") and not task.temporary else 0


def _kept(task: Task, *, resume: bool) -> str:
    """Say what an interrupted run leaves, and how to continue."""
    done = _finished(task)
    if task.temporary:
        return "interrupted; nothing was kept, as the dataset is in memory. Pass out=DIRECTORY to continue later."
    if not done:
        return "interrupted before a part was finished; nothing was kept. Give the same command again to start over."
    again = "Give the same command again" + ("" if resume else " with resume")
    steps = plural(done, "finished step")
    return f"interrupted; {steps} kept in {task.work}. {again} to continue from there."


def _table_summary(manifest: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the rows of every table, and the share of its held-out ids that are 0."""
    summary: dict[str, dict[str, float]] = {}
    features = manifest["features"]["features"]
    for table in dict.fromkeys(feature["table"] for feature in features):
        names = [feature["name"] for feature in features if feature["table"] == table]
        pairs = [manifest["unknown"][split][name] for split in ("valid", "test") for name in names]
        zeros, ids = map(sum, zip(*pairs, strict=True))
        rows = manifest["features"]["num_embeddings"][table]
        summary[table] = {"rows": rows, "unknown": zeros / ids if ids else 0.0}
    return summary
