"""Metrics and scores of a trained model over a split, in file order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterator
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
from stoker.base.files import atomic_file, check_target
from stoker.base.picture import Grid, Shown
from stoker.base.units import plural
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import canonical_json
from stoker.models import RecModel
from stoker.tables import stage
from stoker.tables.config import Slotted
from stoker.training.scores.metrics import RankingMetrics, StreamingMetrics

if TYPE_CHECKING:
    import pyarrow as pa

    from stoker.dataset.split import Split


_Piece = tuple[Tensor | None, Tensor]  # labels and scores of a batch
SCORED = 8192  # examples at a time
_HEAD = 5  # rows that a report shows
_ROW_GROUP = 2**17  # rows of a file of scores that are written at a time
_REMEDY = (
    "Use the dataset that the model was trained on, as it was prepared then (a run finds it by itself where none is "
    "named), or train a model on this one."
)


def dataset_identity(dataset: Dataset) -> dict[str, str]:
    """What must agree for a model's rows to mean the same ids: the schema and the vocabularies."""
    files = dataset.manifest.get("files", {})
    vocabulary = {name: entry["sha256"] for name, entry in files.items() if name.startswith("vocab/")}
    return {
        "schema_hash": dataset.schema_hash,
        "vocabulary_hash": hashlib.sha256(canonical_json(vocabulary).encode()).hexdigest(),
    }


def check_dataset(dataset: Dataset, model: RecModel, trained_on: dict[str, str] | None) -> None:
    """Refuse a dataset whose ids mean something else than those the model was trained on.

    Raises:
        ConfigError: naming what differs.
    """
    mine, theirs = model.spec.to_dict(), dataset.schema.to_dict()
    for what in ("dense", "features", "num_embeddings"):
        if canonical_json(mine[what]) != canonical_json(theirs[what]):
            raise ConfigError(
                f"{dataset.path} does not fit the model: its {what.replace('_', ' ')} are "
                f"{_short(theirs[what])}, the model was trained with {_short(mine[what])}. {_REMEDY}"
            )
    if trained_on is not None and trained_on != dataset_identity(dataset):
        raise ConfigError(
            f"{dataset.path} was prepared with another schema or vocabulary than the model's dataset, so "
            f"its ids stand for other values and the scores would mean nothing. {_REMEDY}"
        )


def _short(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= 100 else text[:97] + "..."


@contextmanager
def _scoring(model: RecModel) -> Iterator[None]:
    training = model.training
    model.eval()
    # To refuse a batch is to keep training fast; scores are worked out in parts where batches are larger than that.
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
) -> dict[str, float]:
    """AUC, log loss, normalized entropy, accuracy, calibration (:class:`StreamingMetrics`); where the split has groups,
    also MRR, nDCG@k, hit rate@k and group AUC (:class:`stoker.training.scores.metrics.RankingMetrics`). Rows without
    label are left out, also of their lists; ``rows`` of the result counts those that have one.

    Args:
        model: the model; nothing of it changes.
        split: for example ``dataset.valid``.
        batch_size: examples at a time.
        rows: the first so many rows only; None means all.
        stop: asked before every batch; when it says yes, metrics of the rows so far are returned.
        lookahead: batches looked ahead where rows come and go (:func:`stoker.stage`), which is faster and gives the
            same numbers; None fetches rows on demand, as there must be one stage at a time.
        k: places of a list that nDCG and hit rate look at.

    Raises:
        ConfigError: k below 1. DataError: damaged rows or groups, or no row has a label.
    """
    if not split.labelled and len(split):
        raise DataError(
            f"no row of split {split.name} has a label, so there is nothing to evaluate by; stoker predict scores them."
        )
    metrics = StreamingMetrics()
    ranking = None if split.groups is None else RankingMetrics(k=k)
    done = 0
    with _scoring(model), closing(_batches(model, split, batch_size, rows, lookahead)) as batches:
        for batch in batches:
            if stop is not None and stop():
                break
            assert batch.labels is not None
            known, logits = ~batch.labels.isnan(), model(batch)
            found = logits[known.to(logits.device)], batch.labels[known]
            metrics.update(*found)
            if ranking is not None:
                assert split.groups is not None
                ranking.update(*found, split.groups[done : done + len(batch)][known.cpu().numpy()])
            done += len(batch)
    return metrics.compute() | ({} if ranking is None else ranking.compute())


def _batches(
    model: RecModel, split: Split, batch_size: int, rows: int | None, lookahead: int | None, *, reuse: bool = True
) -> Generator[Batch, None, None]:
    ahead = lookahead is not None and any(isinstance(group.strategy, Slotted) for group in model.embeddings.groups)
    stream = split.batches(batch_size, limit=rows, reuse=reuse and not ahead)
    yield from stage(stream, model, lookahead=lookahead or 0) if ahead else stream


def _scored(
    model: RecModel, split: Split, batch_size: int, rows: int | None, lookahead: int | None
) -> Generator[_Piece, None, None]:
    """Labels and scores of each batch."""
    with _scoring(model), closing(_batches(model, split, batch_size, rows, lookahead, reuse=False)) as batches:
        for batch in batches:
            # The labels of a staged batch are on the model's device.
            yield None if batch.labels is None else batch.labels.cpu(), model.predict(batch).cpu()


def finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """The same with None for undefined values, which JSON can hold."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Scores(Shown):
    """The scores of the first rows of a split, in its order; an array of them for NumPy: ``np.asarray(scores)``.

    Arrow libraries read the columns that :func:`write_scores` writes: ``pyarrow.table(scores)``.
    """

    scores: npt.NDArray[np.float32]  # [n], the probability of label 1
    labels: npt.NDArray[np.float32] | None  # [n], NaN for rows without; None where no row has one
    groups: npt.NDArray[np.int32] | None  # [n], None where the split has none
    kept: pa.Table | None = None  # [n] the raw columns of the schema's ``keep``, None where it names none

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
    """Return a score for every row of a split, and write them to a file if one is named.

    ::

        found = stoker.predict(model, data.test)
        found.scores, found.labels, found.groups     # one number per row

    Args:
        model: the model.
        split: for example ``dataset.test``.
        out: a file to write, too (:func:`write_scores`).
        batch_size: examples at a time.
        rows: the first so many rows only; None means all.
        lookahead: as for :func:`evaluate`.

    Raises:
        ConfigError: ``out`` exists, or its name ends in neither .parquet nor .csv.
        DependencyError: ``out`` is given and pyarrow is not installed.
    """
    if out is not None:
        check_scores_file(Path(out))
    with closing(_scored(model, split, batch_size, rows, lookahead)) as scored:
        pieces = list(scored)
    if out is not None:
        _write(split, Path(out), iter(pieces), batch_size)
    labels, scores = _joined(pieces)
    return Scores(
        scores=scores,
        labels=labels if split.labelled else None,
        groups=None if split.groups is None else np.asarray(split.groups[: len(scores)]),
        kept=None if split.kept is None else split.kept.read(0, len(scores)),
    )


def _joined(pieces: list[_Piece]) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.float32]]:
    """Return labels [n] and scores [n] of all batches."""
    labels = [label for label, _ in pieces if label is not None]
    scores = torch.cat([score for _, score in pieces]).numpy() if pieces else np.empty(0, np.float32)
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
    """Write scores to a file: row (int64, position in the split), label (float32, null where there is none), score
    (float32); where the split has groups, also group (int32, :attr:`Split.groups <stoker.dataset.split.Split.groups>`).
    Kept columns (:attr:`Split.kept <stoker.dataset.split.Split.kept>`) are before the score, those that are named like
    one of these with ``raw_`` before their name.

    The file appears when it is whole. Memory is that of one batch, or of ``lookahead`` more (:func:`evaluate`), and of
    131,072 rows of the file. Arguments and errors as of :func:`predict`; ``out`` ends in .parquet or .csv, which
    decides the format.

    Returns:
        The number of rows.
    """
    check_scores_file(Path(out))
    with closing(_scored(model, split, batch_size, rows, lookahead)) as scored:
        return _write(split, Path(out), scored, batch_size)


def _write(split: Split, out: Path, scored: Iterator[_Piece], batch_size: int) -> int:
    """Write labels and scores of batches as :func:`write_scores` does."""

    def table(labels: npt.NDArray[np.float32] | None, scores: npt.NDArray[np.float32], first: int) -> pa.Table:
        stop = first + len(scores)
        groups = None if split.groups is None else split.groups[first:stop]
        return _table(labels, scores, groups, None if split.kept is None else split.kept.read(first, stop), first)

    done, empty = 0, table(None, np.empty(0, np.float32), 0)
    with atomic_file(out) as file, _writer(file, out.suffix, empty.schema) as writer:
        for pieces in iter(lambda: list(islice(scored, -(-_ROW_GROUP // batch_size))), []):
            labels, scores = _joined(pieces)
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
    if kept is not None:
        values |= zip(map(_kept_name, kept.column_names), kept.columns, strict=True)
    values["score"] = scores
    return pa.table(values if groups is None else values | {"group": groups})


def check_scores_file(out: Path) -> None:
    """Refuse a file that :func:`predict` cannot write, before a model is read.

    Raises:
        ConfigError: it exists, cannot be written, or its name does not say a format.
        DependencyError: pyarrow is not installed.
    """
    if out.suffix not in (".parquet", ".csv"):
        raise ConfigError(
            f"{out} ends in neither .parquet nor .csv, which says the format of the scores. Choose for example "
            f"{out.with_suffix('.parquet')}."
        )
    if out.exists():
        raise ConfigError(f"{out} exists. Choose another name, or delete it first.")
    check_target(out)
    require("pyarrow", "writing scores needs")


def _kept_name(name: str) -> str:
    return f"raw_{name}" if name in ("row", "label", "score", "group") else name


def _writer(file: Any, suffix: str, schema: Any) -> Any:
    import pyarrow.csv
    import pyarrow.parquet

    if suffix == ".csv":
        return pyarrow.csv.CSVWriter(file, schema)
    return pyarrow.parquet.ParquetWriter(file, schema, compression="zstd")
