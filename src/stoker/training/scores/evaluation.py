"""Compute metrics and scores of a trained model over a split, in the order of the file."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.base.errors import ConfigError, DataError, require
from stoker.base.files import atomic_file, canonical_json, check_target, hash_json
from stoker.base.picture import Grid, Shown
from stoker.base.progress import Counted
from stoker.base.units import plural
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.spec import FeatureSpec
from stoker.models import RecModel
from stoker.tables import stage
from stoker.tables.config import Slotted
from stoker.tables.ranks.share import Shares, whole_of
from stoker.training.scores.metrics import OF_PROBABILITIES, RankingMetrics, StreamingMetrics, deciding
from stoker.training.scores.tiles import tiled_scores

if TYPE_CHECKING:
    import pyarrow as pa

    from stoker.dataset.split import Split
    from stoker.training.scores.catalogue import Catalogue


_ScoredBatch = tuple[Tensor | None, Tensor]  # labels and scores of a batch
SCORED = 8192  # examples per batch
_HEAD = 5  # rows in a report
_ROW_GROUP = 2**17  # rows of a file that are written at a time
_REMEDY = (
    "Use the dataset of the training run, as it was prepared then (without a dataset, the one of the run is taken), or "
    "train a model on this one."
)


def dataset_identity(dataset: Dataset) -> dict[str, str]:
    """Return hashes of schema, vocabularies, fits and the state of window features.

    If the first three are equal, the rows of a model mean the same ids, and dense values are scaled alike.
    """
    files, schema = dataset.manifest.get("files", {}), dataset.manifest.get("schema") or {}
    vocabulary = {name: entry["sha256"] for name, entry in files.items() if name.startswith("vocab/")}
    # Tables of features over time are states, which go on with later rows.
    tables: tuple[list[str], list[str]] = [], []
    for one in schema.get("feature", ()):
        tables["order" in one].append(f"features/{one['name']}.parquet")
    fitted, state = ({name: files[name]["sha256"] for name in names if name in files} for names in tables)
    stats = {
        column: {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in each.items()}
        for column, each in dataset.manifest.get("dense_stats", {}).items()  # last bits depend on the machine
    }
    return {
        "schema_hash": dataset.schema_hash, "vocabulary_hash": hash_json(vocabulary),
        "fitted_hash": hash_json([stats, fitted]), "history_hash": hash_json(state),
    }  # fmt: skip


def check_dataset(
    dataset: Dataset, spec: FeatureSpec, trained_on: dict[str, str] | None, *, continued: bool = False
) -> None:
    """Refuse a dataset whose ids mean something else than those of the training data.

    ``trained_on``: :func:`dataset_identity` of the rows that the model was trained on last. ``continued``: further rows
    are prepared like it and continue its window features, so that it must have the vocabulary and the state after those
    rows, not those before an update.
    """
    mine, theirs = spec.to_dict(), dataset.schema.to_dict()
    identity: dict[str, Any] = dataset_identity(dataset)
    if not continued and trained_on is not None and trained_on.get("first") == identity["vocabulary_hash"]:
        # Updates have added ids after those of the run's own dataset, which still mean what they did.
        theirs["num_embeddings"] = mine["num_embeddings"]
        trained_on = {**trained_on, "vocabulary_hash": identity["vocabulary_hash"]}
    for what in ("dense", "features", "num_embeddings"):
        if canonical_json(mine[what]) != canonical_json(theirs[what]):
            raise ConfigError(
                f"{dataset.path} does not fit the model: its {what.replace('_', ' ')} are "
                f"{_short(theirs[what])}, the model was trained with {_short(mine[what])}. {_REMEDY}"
            )
    known = identity if trained_on is None else trained_on
    if not continued:
        del identity["history_hash"]
    different = [name for name in identity if known.get(name, identity[name]) != identity[name]]
    if different == ["history_hash"]:
        raise ConfigError(
            f"{dataset.path} has the state of window features of other rows than those that the model was trained on "
            "last, so counts and histories of new rows would be those of another log or day. Put the dataset of the "
            "model back from a copy; stoker.Scorer(model, DATASET) scores with any state."
        )
    if different[:1] == ["fitted_hash"]:
        raise ConfigError(
            f"{dataset.path} was prepared by itself: its fills, scales and features were fitted to other rows than "
            "those of the model's dataset, so the scores would mean nothing. Prepare its logs with "
            "stoker prepare --like DATASET, the dataset of the model."
        )
    if different:
        raise ConfigError(
            f"{dataset.path} was prepared with another schema or vocabulary than the model's dataset, so "
            f"its ids stand for other values and the scores would mean nothing. {_REMEDY}"
        )


def check_rows(dataset: Dataset, manifest: Mapping[str, Any], *, continued: bool = False) -> None:
    """Refuse a dataset that does not fit a checkpoint, as :func:`check_dataset`."""
    spec, known = FeatureSpec.from_dict(manifest["features"]), manifest["extra"].get("dataset")
    check_dataset(dataset, spec, known, continued=continued)


def _short(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= 100 else text[:97] + "..."


@contextmanager
def scoring(model: RecModel) -> Iterator[None]:
    """Put the model in evaluation mode, without gradients; batches of any size fit."""
    training = model.training
    model.eval()
    # A run refuses large batches to keep training fast. Scoring splits them into parts instead.
    refusing = [
        (group, group.strategy)
        for group in model.embeddings.groups
        if isinstance(group.strategy, Slotted) and group.strategy.spill == "refuse"
    ]
    for group, strategy in refusing:
        group.strategy = replace(strategy, spill="parts")
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        for group, strategy in refusing:
            group.strategy = strategy


def evaluate(
    model: RecModel,
    split: Split,
    *,
    batch_size: int = SCORED,
    rows: int | None = None,
    stop: Callable[[], bool] | None = None,
    lookahead: int | None = None,
    k: int = 10,
    catalogue: Catalogue | None = None,
) -> dict[str, float]:
    """Compute the metrics of a model on a split.

    They are AUC, log loss, normalized entropy, accuracy and calibration (:class:`StreamingMetrics`). If the split has
    groups, also MRR, nDCG@k, hit rate@k and group AUC (:class:`stoker.training.scores.metrics.RankingMetrics`). Rows
    without a label are left out, also in their lists; ``rows`` in the result counts the others. Rows are ordered by
    their logits. Probabilities in float32, as of :func:`predict`, are equal for some of them that are close, so an AUC
    that is computed from these may differ in the sixth digit.

    Args:
        model: the model. It does not change.
        split: for example ``dataset.valid``.
        batch_size: examples per batch.
        rows: evaluate this many rows, the first ones; None means all.
        stop: called before each batch; if it returns True, the metrics of the rows so far are returned.
        lookahead: batches to read ahead if rows are in a cache (:func:`stoker.stage`). This is faster and gives the
            same numbers. None fetches rows on demand, because only one stage can be open at a time.
        k: k of nDCG@k and hit rate@k.
        catalogue: of a two-tower model: also return the recall among its items
            (:meth:`stoker.training.Catalogue.recall`).

    Raises:
        ConfigError: k below 1.
        DataError: damaged rows or groups, or no row has a label.

    >>> from stoker.testing import make_dataset
    >>> data = make_dataset("data", rows=1000)
    >>> model = stoker.train(data, out="run", batch_size=64, steps=10, display="quiet").model
    >>> found = stoker.evaluate(model, data.test)
    >>> found["rows"], 0 < found["auc"] < 1
    (100, True)
    """
    _check(model, split)
    if not split.labelled and len(split):
        raise DataError(f"no row of split {split.name} has a label to evaluate by; stoker predict scores them.")
    metrics = StreamingMetrics()
    ranking = None if split.groups is None else RankingMetrics(k=k)
    done = 0
    with (
        scoring(model),
        closing(_batches(model, split, batch_size, rows, lookahead)) as batches,
        Counted(f"evaluating {split.name}", _count(split, rows), "rows") as counted,
    ):
        for batch in batches:
            if stop is not None and stop():
                break
            logits, batch = model(batch), whole_of(batch)
            assert batch.labels is not None
            known = ~batch.labels.isnan()
            scored = logits[known.to(logits.device)], batch.labels[known]
            metrics.update(*scored)
            if ranking is not None:
                assert split.groups is not None
                ranking.update(*scored, split.groups[done : done + len(batch)][known.cpu().numpy()])
            done += len(batch)
            counted.add(len(batch))
    found = metrics.compute() | ({} if ranking is None else ranking.compute())
    if catalogue is not None:
        with scoring(model):
            found |= catalogue.recall(model, split, rows=rows, stop=stop)
    return found


def _check(model: object, split: object) -> None:
    """Refuse what is no model, such as the path of a run, and no split, such as a dataset."""
    if not hasattr(model, "embeddings") or not hasattr(split, "batches"):
        raise ConfigError("give a model, such as stoker.load(run).model, and a split of a dataset, such as data.test.")


def _count(split: Split, rows: int | None) -> int:
    return len(split) if rows is None else min(rows, len(split))


def _batches(
    model: RecModel, split: Split, batch_size: int, rows: int | None, lookahead: int | None, *, reuse: bool = True
) -> Generator[Batch, None, None]:
    ahead = lookahead is not None and any(isinstance(group.strategy, Slotted) for group in model.embeddings.groups)
    stream: Iterable[Batch] = split.batches(batch_size, limit=rows, reuse=reuse and not ahead)
    if (tables := model.embeddings).divided and tables.ranks is not None:
        stream = Shares(stream, tables.ranks, tables.shards)
    yield from stage(stream, model, lookahead=lookahead or 0) if ahead else stream


def _scored(
    model: RecModel, split: Split, batch_size: int, rows: int | None, lookahead: int | None
) -> Generator[_ScoredBatch, None, None]:
    """Yield the labels and scores of each batch."""
    _check(model, split)
    with (
        scoring(model),
        closing(_batches(model, split, batch_size, rows, lookahead, reuse=False)) as batches,
        Counted("scoring", _count(split, rows), "rows") as counted,
    ):
        for batch in batches:
            # The labels of a staged batch are on the model's device.
            scores, labels = tiled_scores(model, batch), whole_of(batch).labels
            yield None if labels is None else labels.cpu(), scores.cpu()
            counted.add(len(scores))


def finite(metrics: dict[str, float], loss: str = "bce", metric: str = "auc") -> dict[str, float | None]:
    """Return the metrics with None if undefined, as those of probabilities after a loss that ranks, but ``metric``."""
    found = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return found if loss == "bce" else found | dict.fromkeys(OF_PROBABILITIES - {deciding(found, metric)})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Scores(Shown):
    """The scores of the first rows of a split, in its order. ``np.asarray(scores)`` returns them as an array.

    ``pyarrow.table(scores)`` returns the columns that :func:`write_scores` writes.
    """

    scores: npt.NDArray[np.float32]  # [n], the probability of label 1
    labels: npt.NDArray[np.float32] | None  # [n], NaN for rows without a label; None if no row has one
    groups: npt.NDArray[np.int32] | None  # [n], None if the split has no groups
    kept: pa.Table | None = None  # [n] the raw columns in ``keep`` of the schema; None if there are none

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Positions in the split, [n]."""
        return np.arange(len(self.scores))

    def summary(self) -> str:
        """Return how many scores there are, and their mean."""
        mean = f", mean {self.scores.mean():.4f}" if len(self) else ""
        return f"{plural(len(self), 'score')}{mean}"

    def grids(self) -> tuple[Grid]:
        """Return the first rows."""
        columns = {"row": self.rows, "label": self.labels, "score": self.scores, "group": self.groups}
        known = {name: values for name, values in columns.items() if values is not None}
        lines = [[f"{value:g}" for value in line] for line in zip(*(v[:_HEAD] for v in known.values()), strict=True)]
        return (Grid(list(known), lines, f"the first {len(lines)} rows", left=()),)

    def __len__(self) -> int:
        return len(self.scores)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        require("pyarrow", "Arrow streams need")
        return _table(self.labels, self.scores, self.groups, self.kept).__arrow_c_stream__(requested_schema)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.scores, dtype) if copy else np.asarray(self.scores, dtype)


def predict(
    model: RecModel,
    split: Split,
    out: str | Path | None = None,
    *,
    batch_size: int = SCORED,
    rows: int | None = None,
    lookahead: int | None = None,
) -> Scores:
    """Compute a score for each row of a split, and write the scores to ``out`` if it is given.

    Args:
        model: the model.
        split: for example ``dataset.test``.
        out: a file to write, too (:func:`write_scores`).
        batch_size: examples per batch.
        rows: score this many rows, the first ones; None means all.
        lookahead: as for :func:`evaluate`.

    Raises:
        ConfigError: ``out`` exists, or its name ends in neither .parquet nor .csv.
        DependencyError: ``out`` is given and pyarrow is not installed.

    >>> from stoker.testing import make_dataset
    >>> data = make_dataset("data", rows=1000)
    >>> model = stoker.train(data, out="run-to-score", batch_size=64, steps=10, display="quiet").model
    >>> found = stoker.predict(model, data.test)
    >>> found
    <Scores: 100 scores, mean 0...>
    >>> found.scores.shape, found.labels.shape
    ((100,), (100,))
    """
    if out is not None:
        check_scores_file(Path(out))
    with closing(_scored(model, split, batch_size, rows, lookahead)) as scored:
        batches = list(scored)
    if out is not None:
        _write(split, Path(out), iter(batches), batch_size)
    labels, scores = _joined(batches)
    return Scores(
        scores=scores,
        labels=labels if split.labelled else None,
        groups=None if split.groups is None else np.asarray(split.groups[: len(scores)]),
        kept=None if split.kept is None else split.kept.read(0, len(scores)),
    )


def _joined(batches: list[_ScoredBatch]) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.float32]]:
    """Return labels [n] and scores [n] of all batches."""
    labels = [label for label, _ in batches if label is not None]
    scores = torch.cat([score for _, score in batches]).numpy() if batches else np.empty(0, np.float32)
    return torch.cat(labels).numpy() if labels else None, scores


def write_scores(
    model: RecModel,
    split: Split,
    out: str | Path,
    *,
    batch_size: int = SCORED,
    rows: int | None = None,
    lookahead: int | None = None,
) -> int:
    """Write scores to a Parquet or CSV file.

    Columns: row (int64, position in the split), label (float32, null if there is none), the kept columns
    (:attr:`Split.kept <stoker.dataset.split.Split.kept>`), and score (float32). If the split has groups, also group
    (int32, :attr:`Split.groups <stoker.dataset.split.Split.groups>`). A kept column with the name of another column
    gets the prefix ``raw_``.

    The file appears when it is complete. Memory is that of one batch, or of ``lookahead`` more (:func:`evaluate`), and
    of 131,072 rows of the file. Arguments and errors are those of :func:`predict`. The format follows from the name of
    ``out``, which ends in .parquet or .csv.

    Returns:
        The number of rows.
    """
    check_scores_file(Path(out))
    with closing(_scored(model, split, batch_size, rows, lookahead)) as scored:
        return _write(split, Path(out), scored, batch_size)


def _write(split: Split, out: Path, scored: Iterator[_ScoredBatch], batch_size: int) -> int:
    """Write the labels and scores of batches, as in :func:`write_scores`."""

    def table(labels: npt.NDArray[np.float32] | None, scores: npt.NDArray[np.float32], first: int) -> pa.Table:
        stop = first + len(scores)
        groups = None if split.groups is None else split.groups[first:stop]
        return _table(labels, scores, groups, None if split.kept is None else split.kept.read(first, stop), first)

    done, empty = 0, table(None, np.empty(0, np.float32), 0)
    with atomic_file(out) as file, _writer(file, out.suffix, empty.schema) as writer:
        for batches in iter(lambda: list(islice(scored, -(-_ROW_GROUP // batch_size))), []):
            labels, scores = _joined(batches)
            writer.write_table(table(labels, scores, done))
            done += len(scores)
        if not done:
            writer.write_table(empty)
    return done


def _table(
    labels: npt.NDArray[np.float32] | None, scores: npt.NDArray[np.float32], groups: npt.NDArray[np.int32] | None,
    kept: pa.Table | None, first: int = 0,
) -> pa.Table:  # fmt: skip
    """Return scores as :func:`write_scores` writes them, of rows from ``first`` on."""
    import pyarrow as pa

    known = pa.nulls(len(scores), pa.float32()) if labels is None else pa.array(labels, from_pandas=True)  # NaN: null
    values: dict[str, Any] = {"row": np.arange(first, first + len(scores)), "label": known}
    for name, column in () if kept is None else zip(kept.column_names, kept.columns, strict=True):
        while name in values or name in ("score", "group"):
            name = f"raw_{name}"
        values[name] = column
    values["score"] = scores
    return pa.table(values if groups is None else values | {"group": groups})


def check_scores_file(out: Path) -> None:
    """Refuse a file that :func:`predict` cannot write, before a model is read."""
    if out.suffix not in (".parquet", ".csv"):
        raise ConfigError(
            f"{out} ends in neither .parquet nor .csv, so the format is not known. Choose for example "
            f"{out.parent / 'scores.parquet'}."
        )
    if out.exists():
        raise ConfigError(f"{out} exists. Choose another name, or delete it first.")
    check_target(out)
    require("pyarrow", "writing scores needs")


def _writer(file: Any, suffix: str, schema: Any) -> Any:
    import pyarrow.csv
    import pyarrow.parquet

    if suffix == ".csv":
        return pyarrow.csv.CSVWriter(file, schema)
    return pyarrow.parquet.ParquetWriter(file, schema, compression="zstd")
