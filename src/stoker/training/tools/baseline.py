"""Simple models on the columns of a dataset, which a recommender should beat.

They are the average of the training labels, a logistic regression and, if LightGBM is installed, boosted trees. Their
metrics are stored with the dataset (``baselines.json``), and each later run shows them next to its own.

Legend: n rows, F features, W weights (one for each id of each feature in the rows of the fit, and one for each dense
column).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker.base.errors import ConfigError, DataError, require
from stoker.base.files import atomic_file
from stoker.base.picture import Grid, Shown
from stoker.base.progress import Progress, quiet
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.spec import FeatureSpec
from stoker.dataset.split import Split
from stoker.training.scores.metrics import StreamingMetrics
from stoker.training.settings import BASELINE_ROWS

FILE = "baselines.json"
BATCH = 8192  # rows
L2 = 1.0  # the default of scikit-learn, C = 1
STEPS = 200  # most steps of L-BFGS
TREES = 300  # most trees of LightGBM; validation rows stop it earlier

Predictor = Callable[[Batch], npt.NDArray[np.float64]]  # a batch -> its logits [B]


@dataclass(frozen=True, kw_only=True, repr=False)
class Baselines(Shown):
    """The metrics of simple models: ``figures["logistic regression"]["test"]["auc"]``."""

    rows: int  # training rows of the fit
    figures: Mapping[str, Mapping[str, Mapping[str, float | None]]]  # model -> split -> metric -> value

    def summary(self) -> str:
        """Return the AUC of each model."""
        split = "test" if any("test" in metrics for metrics in self.figures.values()) else "valid"
        return baseline_line(self, split) or f"no AUC, fitted on {self.rows:,} rows"

    def grids(self) -> tuple[Grid]:
        """Return a table with a line for each model."""
        splits = list(next(iter(self.figures.values()), {}))
        rows = [
            [name, *(f"{value:.4f}" if (value := metrics[split][key]) is not None else "-"
                     for split in splits for key in ("auc", "log_loss"))]
            for name, metrics in self.figures.items()
        ]  # fmt: skip
        headings = [f"{split} {word}" for split in splits for word in ("AUC", "log loss")]
        return (Grid(["model", *headings], rows, f"fitted on {self.rows:,} training rows"),)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def baseline_line(found: Baselines, split: str) -> str:
    """Return a sentence with the AUC of each simple model on a split; empty if there is none."""
    said = [f"{name} {of[split]['auc']:.4f}" for name, of in found.figures.items() if of.get(split, {}).get("auc")]
    return f"AUC of baselines on the same {split} rows: {', '.join(said)}" if said else ""


def saved_baselines(dataset: Dataset) -> Baselines | None:
    """Return the baselines of a dataset; None if there are none, or they cannot be read."""
    try:
        found = json.loads((Path(dataset.path) / FILE).read_text(encoding="utf-8"))
        return Baselines(rows=int(found["rows"]), figures=found["figures"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def baseline(dataset: Dataset | str | Path, *, rows: int = BASELINE_ROWS, progress: Progress = quiet) -> Baselines:
    """Fit simple models on the training rows, evaluate them on the other splits, and store the metrics with the data.

    The logistic regression has a weight for each id of each feature (a sequence counts as the mean over its ids) and
    for each dense column, with the default L2 penalty of scikit-learn. L-BFGS solves it.

    Args:
        dataset: a dataset or its directory.
        rows: most training rows to fit on, drawn at random.
        progress: called with (task, done, total).

    Raises:
        ConfigError: rows under 1. DependencyError: SciPy is not installed.
        DataError: there are no training rows, or all labels are equal.

    Example:
        >>> from stoker.testing import make_dataset
        >>> found = stoker.baseline(make_dataset("data", rows=2000))
        >>> "logistic regression" in found.figures
        True
        >>> found.figures["average"]["valid"]["auc"]
        0.5
    """
    if rows < 1:
        raise ConfigError(f"rows is {rows}; give at least 1.")
    require("scipy", "baselines need")
    data = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
    data.schema.check_ids("linear models and trees have no columns for them")
    batches = list(_drawn(data.train, rows))
    labels = np.concatenate([_labels(batch) for batch in batches]) if batches else np.empty(0)
    if not 0 < labels.sum() < len(labels):
        raise DataError(
            f"{data.path} has no training rows of both labels, so there is nothing to fit. Prepare it with more rows."
        )
    figures = {}
    fits: dict[str, Callable[[], Predictor | None]] = {
        "average": lambda: _average(labels),
        "logistic regression": lambda: _logistic(_Design(data.schema, batches), batches, labels, progress),
        "LightGBM": lambda: _trees(data, batches, labels),
    }
    for name, fit in fits.items():
        progress(name, 0, 1)
        if (predictor := fit()) is not None:
            figures[name] = {
                split.name: _evaluate(predictor, split) for split in (data.valid, data.test) if split.labelled
            }
        progress(name, 1, 1)
    found = Baselines(rows=len(labels), figures=figures)
    with atomic_file(Path(data.path) / FILE) as file:
        file.write(json.dumps(found.to_dict(), indent=1).encode())
    return found


def _drawn(split: Split, rows: int) -> Iterator[Batch]:
    """Yield batches of at most this many rows together, in shuffled order, at most one epoch."""
    left = min(rows, len(split))
    for batch in split.batches(min(BATCH, max(1, left)), seed=0):
        if len(batch) > left:
            return
        yield batch
        left -= len(batch)


def _labels(batch: Batch) -> npt.NDArray[np.float64]:
    assert batch.labels is not None
    return batch.labels.numpy().astype(np.float64)


def _evaluate(predictor: Predictor, split: Split) -> dict[str, float | None]:
    metrics = StreamingMetrics()
    for batch in split.batches(BATCH):
        labels = torch.from_numpy(_labels(batch)).float()
        known = ~labels.isnan()
        metrics.update(torch.from_numpy(predictor(batch))[known], labels[known])
    return {name: value if np.isfinite(value) else None for name, value in metrics.compute().items()}


def _average(labels: npt.NDArray[np.float64]) -> Predictor:
    share = labels.mean()
    logit = np.log(share) - np.log1p(-share)
    return lambda batch: np.full(len(batch), logit)


class _Design:
    """Turn batches into sparse matrices [B, W]: indicator columns of ids, then standardized dense columns.

    Only ids in ``batches``, the rows of the fit, have columns: the weight of any other is 0, and tables may be large.
    """

    def __init__(self, spec: FeatureSpec, batches: Sequence[Batch]) -> None:
        sizes = [spec.num_embeddings[feature.table] for feature in spec.features]
        self._base = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)  # [F + 1]
        self._known = np.unique(np.concatenate([np.unique(self._entries(batch)[0]) for batch in batches]))
        if not len(self._known):  # all bags are empty: a column of zeros
            self._known = np.array([-1])
        dense = np.concatenate([batch.dense.numpy() for batch in batches])
        self._mean, deviation = dense.mean(axis=0), dense.std(axis=0)
        self._scale = np.where(deviation > 0, deviation, 1.0)
        self.width = len(self._known) + len(spec.dense)

    def matrix(self, batch: Batch) -> Any:
        """Return a scipy.sparse.csr_matrix [B, W] of float64."""
        from scipy import sparse

        wanted, lengths = self._entries(batch)
        starts = np.concatenate([[0], lengths.sum(axis=1).cumsum()])
        columns = np.searchsorted(self._known, wanted).clip(max=len(self._known) - 1)
        shares = np.repeat(1.0 / lengths.clip(min=1), lengths.reshape(-1))
        shares[self._known[columns] != wanted] = 0.0
        counts = sparse.csr_matrix((shares, columns, starts), shape=(len(batch), len(self._known)))
        dense = (batch.dense.numpy() - self._mean) / self._scale
        return sparse.hstack([counts, sparse.csr_matrix(dense.astype(np.float64))], format="csr")

    def _entries(self, batch: Batch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the row of each id [L], where tables of all features follow each other; and bag lengths [B, F]."""
        features = len(self._base) - 1
        if batch.offsets is None:
            lengths = np.ones((len(batch), features), dtype=np.int64)
        else:
            lengths = batch.offsets.diff().numpy().reshape(len(batch), features)
        starts = np.broadcast_to(self._base[:-1], lengths.shape).reshape(-1)
        return batch.ids.numpy().reshape(-1) + np.repeat(starts, lengths.reshape(-1)), lengths


def _logistic(
    design: _Design, batches: Sequence[Batch], labels: npt.NDArray[np.float64], progress: Progress
) -> Predictor:
    """Minimize the sum of the log losses + L2 / 2 |weights|^2; the intercept is not penalized."""
    from scipy import optimize, sparse

    matrix = sparse.vstack([design.matrix(batch) for batch in batches], format="csr")
    transposed = matrix.T.tocsr()

    def loss(weights: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        logits = matrix @ weights[:-1] + weights[-1]
        wrong = 1.0 / (1.0 + np.exp(-logits)) - labels
        value = np.logaddexp(0.0, logits).sum() - labels @ logits + L2 / 2 * weights[:-1] @ weights[:-1]
        return float(value), np.concatenate([transposed @ wrong + L2 * weights[:-1], [wrong.sum()]])

    start, done = np.zeros(design.width + 1), count(1)
    weights = optimize.minimize(
        loss, start, jac=True, method="L-BFGS-B", options={"maxiter": STEPS},
        callback=lambda _: progress("logistic regression", next(done), STEPS),
    ).x  # fmt: skip
    return lambda batch: design.matrix(batch) @ weights[:-1] + weights[-1]


def _trees(data: Dataset, batches: Sequence[Batch], labels: npt.NDArray[np.float64]) -> Predictor | None:
    """Return boosted trees over dense columns and single ids; None if LightGBM is not installed."""
    try:
        import lightgbm
    except ImportError:
        return None
    single = [place for place, feature in enumerate(data.schema.features) if not feature.sequence]
    features, dense = len(data.schema.features), len(data.schema.dense)

    def table(batch: Batch) -> npt.NDArray[np.float64]:
        if batch.offsets is None:
            ids = batch.ids.numpy()
        else:  # bags of single ids have one each
            ids = batch.ids.numpy()[batch.offsets[:-1].numpy().clip(max=len(batch.ids) - 1)].reshape(-1, features)
        return np.concatenate([batch.dense.numpy(), ids[:, single]], axis=1).astype(np.float64)

    settings = {"categorical_feature": list(range(dense, dense + len(single))), "free_raw_data": False}
    train = lightgbm.Dataset(np.concatenate([table(batch) for batch in batches]), labels, **settings)
    watched, stopping = [], []
    if data.valid.labelled:
        valid = list(_drawn(data.valid, BASELINE_ROWS))
        known = np.concatenate([_labels(batch) for batch in valid])
        rows = np.concatenate([table(batch) for batch in valid])[~np.isnan(known)]
        watched = [lightgbm.Dataset(rows, known[~np.isnan(known)], reference=train)]
        stopping = [lightgbm.early_stopping(20, verbose=False)]
    options = {"objective": "binary", "verbosity": -1, "seed": 0, "deterministic": True}
    model = lightgbm.train(options, train, TREES, valid_sets=watched, callbacks=stopping)
    return lambda batch: np.asarray(model.predict(table(batch), raw_score=True))
