"""``stoker.compare``: show the metrics of several runs, their differences in settings and data, and their curves.

It reads the files of the runs (config.json, metrics.jsonl, report.json) and the manifests of their datasets, no model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from stoker.base.errors import ConfigError, DataError
from stoker.base.picture import Grid, Plotted, Shown, blank
from stoker.base.remote import local_run
from stoker.base.units import format_count, listed, plural
from stoker.dataset.dataset import Dataset
from stoker.training.files.rundir import RunDirectory
from stoker.training.report.charts import chart, grid, section, write_page
from stoker.training.report.page import read
from stoker.training.scores.evaluation import dataset_identity
from stoker.training.scores.metrics import DECIDING, merit, metric_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Metrics = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """The facts of the dataset of a run that are compared."""

    path: str
    columns: tuple[str, ...]  # dense columns and features that the model sees
    tables: Mapping[str, int]  # rows of every table
    rows: Mapping[str, tuple[int, int]]  # split -> rows, and those with label 1
    groups: str | None  # column of the groups
    hashes: Mapping[str, str]  # of the schema, the vocabularies, and the rows of each split


@dataclass(frozen=True, kw_only=True, repr=False)
class RunFacts(Shown):
    """The facts of a run so far."""

    path: Path
    name: str  # shortest unique name
    #: all settings, with defaults for those an older version did not have; model options as "model_options.x"
    settings: Mapping[str, Any]
    metric: str  # that chooses the best checkpoint
    finished: bool
    step: int  # last recorded step
    best_step: int | None
    valid: Metrics  # of the best checkpoint; empty without an evaluation
    test: Metrics  # empty before the end of the run
    samples_per_second: float | None
    curve: tuple[Mapping[str, Any], ...]  # validation records, each with step and epoch
    losses: tuple[Mapping[str, Any], ...]  # training records
    dataset: DatasetFacts | None  # None: it cannot be read

    def summary(self) -> str:
        """Return the name of the run and its last step."""
        return f"{self.name}, {'finished' if self.finished else 'unfinished'} at step {self.step:,}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Plotted):
    """The comparison of several runs; :func:`compare` makes it."""

    runs: tuple[RunFacts, ...]
    metric: str  # of the curves
    settings: Mapping[str, tuple[Any, ...]]  # those that differ, with a value for each run
    data: tuple[str, ...]  # differences of the datasets
    notes: tuple[str, ...]  # reasons why figures cannot be compared

    def summary(self) -> str:
        """Return the metric of each run on the validation rows."""
        known = [(run.name, run.valid.get(self.metric)) for run in self.runs]
        said = ", ".join(f"{name} {'-' if value is None else f'{value:.4f}'}" for name, value in known)
        return f"{self.metric} on validation rows: {said}; settings that differ: {len(self.settings)}"

    def grids(self) -> tuple[Grid, ...]:
        """Return validation figures, test figures, and the settings that differ; those that exist."""
        names = ["", *(run.name for run in self.runs)]
        found = {
            "Best validation figures": _figures(self.runs, "valid"), "Test figures": _figures(self.runs, "test"),
            "Settings that differ": [[name, *map(_text, values)] for name, values in self.settings.items()],
        }  # fmt: skip
        return tuple(Grid(names, rows, title) for title, rows in found.items() if rows)

    def report(self) -> str:
        """Return the tables, the differences of the datasets, and notes, as text."""
        more = [*(f"data: {text}" for text in self.data), *(f"note: {text}" for text in self.notes)]
        return "\n\n".join([super().report(), *(["\n".join(more)] if more else [])])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        runs = [{**asdict(run), "path": str(run.path)} for run in self.runs]
        return {
            "runs": runs, "metric": self.metric, "settings": {name: list(v) for name, v in self.settings.items()},
            "data": list(self.data), "notes": list(self.notes),
        }  # fmt: skip

    def page(self, out: str | Path) -> None:
        """Write the tables, the curves and the notes as one HTML page.

        Raises:
            ConfigError: the name does not end in .html.
            DataError: the disk has no room.
        """
        loss = chart({run.name: _curve(run.losses, "loss") for run in self.runs}, "training loss by epoch")
        words = metric_names("k").get(self.metric, self.metric)
        drawn = loss + chart(curves(self), f"{words} on validation rows by epoch")
        said = "".join(f"<p>{escape(text)}</p>" for text in (*self.data, *self.notes))
        body = "".join(section(table.title, grid(table._replace(title=""))) for table in self.grids())
        names = ", ".join(run.name for run in self.runs)
        write_page(out, names, f'<h1>{escape(names)}</h1>{said}<div class="pair">{drawn}</div>{body}')

    def figure(self) -> Figure:
        """Draw the training loss and the metric on the validation rows, by epoch."""
        figure = blank(9, 3.6)
        losses, metric = figure.subplots(1, 2)
        measured = curves(self)
        for number, run in enumerate(self.runs):
            color = f"C{number % 10}"
            if train := _curve(run.losses, "loss"):
                losses.plot(
                    *zip(*train, strict=True), color=color, marker="." * (len(train) == 1), linewidth=1, label=run.name
                )
            if run.name in measured:
                curve = zip(*measured[run.name], strict=True)
                metric.plot(*curve, color=color, marker="o", markersize=3, label=run.name)
        losses.set(xlabel="epoch", ylabel="training loss")
        metric.set(xlabel="epoch", ylabel=f"{self.metric} on validation rows")
        for axes in (losses, metric):
            if axes.get_lines():
                axes.legend()
            else:
                axes.set(xticks=[], yticks=[])
                axes.text(0.5, 0.5, "no records", ha="center", va="center", transform=axes.transAxes)
        return figure


def _figures(runs: Sequence[RunFacts], which: Literal["valid", "test"]) -> list[list[str]]:
    """Return lines of metrics, a column for each run; none if no run has any."""
    columns: list[Metrics] = [getattr(run, which) for run in runs]
    if not any(columns):
        return []
    rows = []
    if which == "valid":
        steps = [("-" if run.best_step is None else f"{run.best_step:,}", run.step) for run in runs]
        rows.append(["at step", *(f"{best} of {last:,}" for best, last in steps)])
    places = {int(k) for metrics in columns if (k := metrics.get("ranking_k"))}
    for name, words in metric_names(min(places) if len(places) == 1 else "k" if places else None).items():
        values = [metrics.get(name) for metrics in columns]
        if any(value is not None for value in values):
            rows.append([words, *("-" if value is None else f"{value:.4f}" for value in values)])
    if places:
        rows.append(["k", *(f"{int(metrics.get('ranking_k') or 0):,}" for metrics in columns)])
    rows.append(["rows", *(f"{int(metrics.get('rows') or 0):,}" for metrics in columns)])
    if which == "valid":
        rates = [run.samples_per_second for run in runs]
        rows.append(["samples/s in training", *("-" if rate is None else format_count(rate) for rate in rates)])
    return rows


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return json.dumps(value) if isinstance(value, list | dict) else f"{value}"


def compare(*runs: str | Path, metric: str | None = None) -> Comparison:
    """Compare runs.

    Args:
        runs: at least two run directories, finished or not.
        metric: metric of the curves, such as "auc" or "mrr". None takes the one that chooses the best checkpoint of all
            runs, else one that all of them have.

    Raises:
        ConfigError: fewer than two runs, the same run twice, no run there, or no such metric.

    >>> from stoker.testing import make_dataset
    >>> data = make_dataset("data", rows=1000)
    >>> for name, lr in (("a", 0.01), ("b", 0.1)):
    ...     result = stoker.train(data, out=name, batch_size=64, steps=10, row_lr=lr, display="quiet")
    >>> stoker.compare("a", "b")
    <Comparison: auc on validation rows: a 0..., b 0...; settings that differ: 1>
    >>> stoker.compare("a", "b").settings
    {'row_lr': (0.01, 0.1)}
    """
    paths = [Path(run) for run in runs]
    if len(paths) < 2:
        raise ConfigError(f"{plural(len(paths), 'run')} given; name at least two to compare.")
    resolved = [path.resolve() for path in paths]
    if twice := [path for path, at in zip(paths, resolved, strict=True) if resolved.count(at) > 1]:
        raise ConfigError(f"{twice[0]} is named twice. Name runs that differ.")
    if metric is not None and metric not in DECIDING:
        raise ConfigError(f"metric {metric!r} is unknown. Choose one of {', '.join(DECIDING)}.", settings=("metric",))
    notes: list[str] = []
    found = tuple(_read(path, name, notes) for path, name in zip(paths, _names(paths), strict=True))
    chosen = _metric(found, metric, notes)
    differ = _differing(found)
    data = _data(found, notes)
    return Comparison(runs=found, metric=chosen, settings=differ, data=tuple(data), notes=tuple(notes))


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as many as make them unique."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read(path: Path, name: str, notes: list[str]) -> RunFacts:
    directory = RunDirectory(local_run(path))
    run = read(directory)
    settings, valid, report, metric = run["settings"], run["valid_curve"], run["done"], run["metric"]
    options = settings.pop("model_options") or {}
    settings |= {f"model_options.{key}": value for key, value in options.items()}
    if updates := run["updates"]:
        notes.append(f"{name} was updated {plural(len(updates), 'time')}: its figures are those before all updates")
    step = run["steps"] or int(report.get("step", 0))  # there may be no records
    finished = bool(report) and report["step"] >= step
    if not report:
        notes.append(f"{name} is not finished (step {step:,}): it has no test figures yet")
    elif not finished:
        notes.append(
            f"{name} was resumed (step {step:,}): its test figures are from its earlier end, at step {report['step']:,}"
        )
    if len(lengths := directory.read("config.json").get("lengths", ())) > 1:
        notes.append(f"{name} was resumed with another length ({', '.join(f'{each:,}' for each in lengths)} steps)")
    best = max(valid, key=lambda record: merit(record, metric), default=None)
    if finished and report["valid"]:
        best = {"step": report["best_step"], **report["valid"]}
    if best is None:
        notes.append(f"{name} was not evaluated on validation rows")
    elif not valid:
        notes.append(f"{directory.metrics} holds no evaluation: the figures of {name} are its report's, without curves")
    return RunFacts(
        path=path, name=name, settings=settings, metric=metric, finished=finished, step=step,
        best_step=None if best is None else int(best["step"]), valid=_metrics(best or {}),
        test=_metrics(run["test"]), samples_per_second=run["samples"], curve=tuple(valid), losses=tuple(run["losses"]),
        dataset=_dataset(directory, run["dataset"], name, notes),
    )  # fmt: skip


def _metrics(record: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: value for name, value in record.items() if name not in ("kind", "step", "epoch", "time")}


def _dataset(directory: RunDirectory, path: str, name: str, notes: list[str]) -> DatasetFacts | None:
    try:
        data = Dataset(path)
        identity = dataset_identity(data)
    except DataError as error:
        notes.append(f"the dataset of {name} cannot be read, so its columns are not compared: {error}")
        return None
    known = directory.newest_extra().get("dataset") or {}
    if any(known.get(what, value) != value for what, value in identity.items()):  # earlier versions knew fewer
        notes.append(f"{path} was prepared again after {name} was trained: the data described here is the new one")
    groups = data.groups
    return DatasetFacts(
        path=path,
        columns=(*data.schema.dense, *(feature.name for feature in data.schema.features)),
        tables=dict(data.schema.num_embeddings),
        rows={split: (len(found), found.positives) for split, found in data.splits.items()},
        groups=None if groups is None else str(groups["column"]),
        hashes={**identity, **{split: found.data_hash for split, found in data.splits.items()}},
    )


def _metric(runs: Sequence[RunFacts], asked: str | None, notes: list[str]) -> str:
    """Choose the metric of the curves."""
    chosen = {run.metric for run in runs}
    if len(chosen) > 1:
        by = "; ".join(f"{run.name} by {run.metric}" for run in runs)
        notes.append(f"best checkpoints are chosen by different metrics: {by}")
    has = {
        run.name: {name for record in run.curve for name in DECIDING if record.get(name) is not None} for run in runs
    }
    common = set.intersection(*(found for found in has.values() if found), set(DECIDING))
    order = [asked] if asked is not None else [*(run.metric for run in runs if len(chosen) == 1), *DECIDING]
    metric = next((name for name in order if name in common), order[0])
    without = [name for name, found in has.items() if found and metric not in found]
    if without:
        notes.append(f"no {metric} was recorded for {', '.join(without)}, so there is no curve")
    return metric


def _differing(runs: Sequence[RunFacts]) -> dict[str, tuple[Any, ...]]:
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    values = {name: tuple(run.settings.get(name) for run in runs) for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def _data(runs: Sequence[RunFacts], notes: list[str]) -> list[str]:
    """Describe the differences to the first dataset, and note figures that cannot be compared."""
    known = [(run.name, run.dataset) for run in runs if run.dataset is not None]
    if not known:
        return []
    (first, base), lines = known[0], []
    for name, data in known[1:]:
        if data.hashes == base.hashes:
            continue
        differences = _between(first, base, name, data)
        lines.append(f"{name} ({_here(data.path)}) against {first} ({_here(base.path)}): {'; '.join(differences)}")
        for split, words in (("valid", "validation"), ("test", "test")):
            rows, others = data.rows.get(split, (0, 0)), base.rows.get(split, (0, 0))
            if rows != others:
                notes.append(
                    f"{words} figures of {first} and {name} are from other rows: {_rows(others)} and {_rows(rows)}"
                )
            elif data.hashes.get(split) != base.hashes.get(split) and _labels(data, split) != _labels(base, split):
                notes.append(
                    f"{words} rows of {first} and {name} are equal in number and positives, but not in order: compare "
                    "their figures only if the rows come from the same lines of the log"
                )
    return lines


def _here(path: str) -> str:
    """Return the path relative to the current directory, if it is below it."""
    found = Path(path)
    return str(found.relative_to(Path.cwd())) if found.is_relative_to(Path.cwd()) else path


def _labels(data: DatasetFacts, split: str) -> str | None:
    """Return a hash of the labels in the order of the file, which is equal if two splits are of the same lines."""
    digest = hashlib.sha256()
    try:
        for shard in Dataset(data.path).split(split).shards:
            digest.update(shard.labels.tobytes())
            shard.release()
    except DataError:
        return None
    return digest.hexdigest()


def _rows(found: tuple[int, int]) -> str:
    return f"{plural(found[0], 'row')} with {found[1]:,} positive"


def _between(first: str, base: DatasetFacts, name: str, data: DatasetFacts) -> list[str]:
    said = []
    for words, one, other in ((f"only {name} has", data, base), (f"only {first} has", base, data)):
        if columns := [column for column in one.columns if column not in other.columns]:
            said.append(f"{words} {listed(columns)}")
    sizes = [
        f"{table} {base.tables[table]:,} and {rows:,}"
        for table, rows in data.tables.items()
        if base.tables.get(table, rows) != rows
    ]
    if sizes:
        said.append(f"rows of tables: {listed(sizes)}")
    if data.groups != base.groups:
        said.append(f"groups by {base.groups or 'nothing'} and by {data.groups or 'nothing'}")
    train, others = data.rows.get("train", (0, 0)), base.rows.get("train", (0, 0))
    if train != others:
        said.append(f"training rows: {others[0]:,} and {train[0]:,}")
    return said or ["the same columns, prepared in another way"]


MARKS = "abcdefghijklmnopqrstuvwxyz"

Points = list[tuple[float, float]]  # (epoch, value), by rising epoch


def curves(comparison: Comparison) -> dict[str, Points]:
    """Return the metric on the validation rows by epoch, for each run with such records."""
    found = {run.name: _curve(run.curve, comparison.metric) for run in comparison.runs}
    return {name: points for name, points in found.items() if points}


def _curve(records: Sequence[Mapping[str, Any]], name: str) -> Points:
    return [
        (float(record["epoch"]), float(record[name]))
        for record in records
        if record.get(name) is not None and "epoch" in record
    ]


def text_plot(
    points: Mapping[str, Points], marks: Mapping[str, str], *, below: str = "epoch", width: int = 60, height: int = 12
) -> str:
    """Draw curves (with at least one point in all) in characters, with a mark for each, and "*" where they meet."""
    every = np.array([point for each in points.values() for point in each])  # [P, 2]
    (left, low), (right, high) = every.min(0), every.max(0)
    cells = [[" "] * width for _ in range(height)]
    for name, each in points.items():
        x, y = np.array(each).T
        between = np.linspace(left, right, width)
        at = np.union1d(x, between[(between > x[0]) & (between < x[-1])])
        columns, rows = _cells(at, left, right, width, 0), _cells(np.interp(at, x, y), low, high, height, height // 2)
        for column, row in zip(columns, rows, strict=True):
            line = cells[height - 1 - row]
            line[column] = marks[name] if line[column] in (" ", marks[name]) else "*"
    digits = 4 if high - low >= 0.001 or high == low else min(9, 3 - math.floor(math.log10(high - low)))
    labels = (
        {0: f"{high:.{digits}f}", height - 1: f"{low:.{digits}f}"} if high > low else {height // 2 - 1: f"{low:.4f}"}
    )
    room = max(map(len, labels.values()))
    lines = [f"{labels.get(row, ''):>{room}} |{''.join(cells[row])}".rstrip() for row in range(height)]
    ends = f"{left:g}", f"{right:g}"
    middle = below.center(max(0, width - sum(map(len, ends))))
    return "\n".join([*lines, f"{'':>{room}} +{'-' * width}", f"{'':>{room}}  {ends[0]}{middle}{ends[1]}"])


def _cells(values: npt.NDArray[np.float64], low: float, high: float, cells: int, flat: int) -> list[int]:
    """Return the cell of each value; ``flat`` if the lowest value is the highest."""
    places = np.rint((values - low) / (high - low) * (cells - 1)) if high > low else np.full(len(values), flat)
    return [int(place) for place in places]
