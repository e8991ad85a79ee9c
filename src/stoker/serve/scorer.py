"""Score raw rows in memory with the model of a run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.errors import ConfigError
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.models import RecModel
from stoker.prep.like import Like
from stoker.prep.requests import Fitted, RowEncoder
from stoker.training.files.checkpoint import read_manifest
from stoker.training.files.loading import load
from stoker.training.files.rundir import find_checkpoint, newest_rows
from stoker.training.scores.evaluation import check_dataset, scoring
from stoker.training.scores.tiles import tiled_scores

_REMEDY = "Pass the dataset: stoker.Scorer(run, data=...)"
Scores = npt.NDArray[np.float32]


class Scorer:
    """Scores raw rows, which need no label, with the features and vocabularies of the run's dataset.

    A score equals that of ``stoker predict`` to the bit, whatever other rows are scored with it. If the schema has
    window features, each call is as a file of its own: its rows see the stored state and the earlier rows of the call.

    Args:
        source: a run directory, a checkpoint, a directory of :func:`stoker.export`, or a model.
        data: the dataset of the model, if it was moved, or if ``source`` is a model.
        settings: of :func:`stoker.load`, such as ``device``.

    Raises:
        ConfigError: the dataset is not that of the model, or its rows cannot be made one by one.
        CheckpointError: a file is missing or damaged.
        DataError: the dataset is missing or damaged.

    >>> from stoker.testing import make_daily_run
    >>> tuesday, wednesday = make_daily_run("run")
    >>> model = stoker.Scorer("run")
    >>> model.columns
    ['user', 'item']
    >>> model.score(tuesday.head(3).select(model.columns)).shape
    (3,)
    """

    def __init__(
        self, source: str | Path | RecModel, data: Dataset | str | Path | None = None, **settings: Any
    ) -> None:
        self.version: Mapping[str, Any] = {}
        known = None
        if isinstance(source, RecModel):
            if data is None:
                raise ConfigError("a model does not know its dataset. Pass both: stoker.Scorer(model, data).")
            self.model = source
        else:
            path = find_checkpoint(source)
            manifest = read_manifest(path)
            data, known = newest_rows(path, _REMEDY) if data is None else data, manifest["extra"].get("dataset")
            self.model = load(path, **settings).model
            update = manifest["extra"].get("update", {})
            self.version = {"update": int(update.get("number", 0)), "step": int(manifest["step"])}
        dataset = data if isinstance(data, Dataset) else Dataset(data)
        check_dataset(dataset, self.model.spec, known)
        self.encoder = RowEncoder(Fitted.of(Like(dataset.path)))
        self.lock = threading.RLock()  # held while rows are looked up and scored

    @property
    def columns(self) -> list[str]:
        """The raw columns that rows must have."""
        return self.encoder.columns

    def score(self, rows: Any, *, unknown: bool = False) -> Scores:
        """Return the probability of label 1 for each row, float32 [n].

        Args:
            rows: a table: Polars, pandas, Arrow, or anything with ``__arrow_c_stream__``.
            unknown: leave out columns that the model does not know, instead of refusing them.

        Raises:
            DataError: a column is missing or unknown, or a value does not fit; the message names row and column.
        """
        return self.score_batch(self.encoder.encode(rows, unknown=unknown))

    def score_batch(self, batch: Batch) -> Scores:
        """Return the scores of rows that are encoded."""
        with self.lock, scoring(self.model):
            scores: Scores = tiled_scores(self.model, batch).cpu().numpy()
        return scores
