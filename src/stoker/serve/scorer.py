"""Score raw rows in memory with the model of a run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from stoker.base.errors import ConfigError, DataError
from stoker.base.settings import checked_arguments
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.spec import FeatureSpec
from stoker.live.follow import Follower
from stoker.models import RecModel
from stoker.prep.like import Like
from stoker.prep.requests import FittedSchema, RowEncoder
from stoker.serve.export import is_export, open_export, version_of
from stoker.training.files.checkpoint import hash_manifest, read_manifest, reading
from stoker.training.files.loading import load
from stoker.training.files.rundir import find_checkpoint, newest_rows
from stoker.training.scores.evaluation import check_dataset, scoring
from stoker.training.scores.tiles import tiled_scores, try_blocks

_REMEDY = "Pass the dataset: stoker.Scorer(run, data=...)"
ScoreArray = npt.NDArray[np.float32]


def _encoder(data: Any, spec: FeatureSpec, known: Any) -> RowEncoder:
    dataset = data if isinstance(data, Dataset) else Dataset(data)
    check_dataset(dataset, spec, known, continued=True)
    return RowEncoder(FittedSchema.of(Like(dataset.path)))


def filled(encoder: RowEncoder) -> dict[str, str | None]:
    """Return the raw columns of a row without values, as texts, but for the time that each row must have: the last."""
    found: dict[str, str | None] = dict.fromkeys(encoder.columns)
    time, times = encoder.fitted.schema.timestamp, encoder.fitted.times
    if time is not None and times and time.column in found:
        last = times[1]
        found[time.column] = str(last)
        if time.type == "datetime":
            found[time.column] = pl.Series([datetime.fromisoformat(last)]).dt.strftime(time.format or "%+")[0]
    return found


class Scorer:
    """Scores raw rows, which need no label, with the features and vocabularies of the run's dataset.

    A score equals that of ``stoker predict`` to the bit, whatever other rows are scored with it. If the schema has
    window features, each call counts as one file: they use the stored state and the earlier rows of the call.

    Args:
        source: a run directory, a checkpoint, a directory of :func:`stoker.export`, or a model.
        data: the dataset of the model, if it was moved, or if ``source`` is a model.
        follow: follow the updates and roll-backs of the run, with :meth:`poll`.
        settings: of :func:`stoker.load`, such as ``device``; of an export, ``check=True`` to compare all files with
            their sha256.

    Raises:
        ConfigError: the dataset is not that of the model, or its rows cannot be made one by one.
        CheckpointError: a file is missing or damaged.
        DataError: the dataset is missing or damaged.

    >>> from stoker.testing import make_daily_run
    >>> tuesday, wednesday = make_daily_run("run")
    >>> model = stoker.Scorer("run")
    >>> model.columns
    ['item', 'user']
    >>> model.score(tuesday.head(3).select(model.columns)).shape
    (3,)
    """

    @checked_arguments
    def __init__(
        self, source: str | Path | RecModel, data: Dataset | str | Path | None = None, *, follow: bool = False,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.version: Mapping[str, Any] = {}
        self.lock = threading.RLock()  # held while rows are encoded and scored
        #: gives what is called with a new checkpoint, without the lock; what that returns is called with the new model
        self.companion: Callable[[], Callable[[Path, RowEncoder], Callable[[], None]] | None] = lambda: None
        self._follower: _Followed | None = None
        #: the checkpoint of the model, with its manifest; None of an export and of a model in memory
        self.checkpoint: tuple[Path, Mapping[str, Any]] | None = None
        if not isinstance(source, RecModel) and is_export(source):
            self.model, fitted, manifest = open_export(source, **settings)
            self.encoder, self.version = RowEncoder(fitted), manifest["version"]
            return
        if isinstance(source, RecModel):
            if data is None:
                raise ConfigError("a model does not know its dataset. Pass both: stoker.Scorer(model, data).")
            self.model, self.encoder = source, _encoder(data, source.spec, None)
        elif follow:
            self._follower = _Followed(self, source, data, lock=self.lock, **settings)
            self.checkpoint = self._follower.path, self._follower.manifest
        else:
            path = find_checkpoint(source)
            with reading(path) as links:
                whole = links[-1].manifest
                self.model = load(path, **settings).model
                known = whole["extra"].get("dataset")
                self.encoder = _encoder(newest_rows(path, _REMEDY, data), self.model.spec, known)
            self.checkpoint, self.version = (path, whole), version_of(whole)

    @property
    def follows(self) -> bool:
        """Whether :meth:`poll` can find another model."""
        return self._follower is not None

    def poll(self) -> bool:
        """Take the model that the run has now; return True if it changed. From then on all rows see the new one.

        Raises:
            CheckpointError: an update is missing or damaged; the model is as before.
            DataError: the rows of one are; likewise.
        """
        return self._follower is not None and self._follower.poll()

    @property
    def columns(self) -> list[str]:
        """The raw columns that rows must have."""
        return self.encoder.columns

    def score(self, rows: Any, *, unknown: bool = False) -> ScoreArray:
        """Return the probability of label 1 for each row, float32 [n].

        Args:
            rows: a table: Polars, pandas, Arrow, or anything with ``__arrow_c_stream__``.
            unknown: leave out columns that the model does not know, instead of refusing them.

        Raises:
            DataError: a column is missing or unknown, or a value does not fit; the message names row and column.
        """
        with self.lock:  # ids are those of the model that scores
            return self.score_batch(self.encoder.encode(rows, unknown=unknown))

    def warm_up(self) -> str:
        """Load the kernels, which are compiled once for a machine, so that the first request does not wait for them.

        Returns:
            Why that was impossible, or an empty text.
        """
        with self.lock:
            rows = {name: pl.Series([value], dtype=pl.String) for name, value in filled(self.encoder).items()}
            try:
                batch = self.encoder.encode(pl.DataFrame(rows))
            except DataError as error:  # a row without values may not fit
                return str(error)
            self.score_batch(batch)
            with scoring(self.model):
                try_blocks(self.model, batch)
        return ""

    def score_together(self, requests: Sequence[Any]) -> list[ScoreArray]:
        """Return the scores of several requests, each a table or a list of objects of JSON (``parsed``).

        Raises:
            DataError: rows of one of them do not fit.
        """
        with self.lock:
            return self._together(requests)

    def _together(self, requests: Sequence[Any]) -> list[ScoreArray]:
        groups: list[Any] = []
        encoder = self.encoder
        for rows in requests:
            last = groups[-1] if groups and encoder.independent else None  # its rows may be encoded with these
            if isinstance(rows, list):
                encoder.check_objects(rows)
                groups.append(groups.pop() + rows if isinstance(last, list) else rows)
            elif isinstance(rows, pa.Table) and isinstance(last, pa.Table) and last.schema == rows.schema:
                groups.append(pa.concat_tables([groups.pop(), rows]))
            else:
                groups.append(rows)
        batches = [encoder.from_objects(each) if isinstance(each, list) else encoder.encode(each) for each in groups]
        scores = np.concatenate([self.score_batch(each) for each in batches]) if batches else np.empty(0, np.float32)
        ends = np.cumsum([len(rows) for rows in requests])
        return [scores[end - len(rows) : end] for end, rows in zip(ends, requests, strict=True)]

    def score_batch(self, batch: Batch) -> ScoreArray:
        """Return the scores of rows that are encoded."""
        with self.lock, scoring(self.model):
            scores: ScoreArray = tiled_scores(self.model, batch).cpu().numpy()
        return scores


class _Followed(Follower):
    """The model of a run, with the encoder of its rows; both change at once."""

    def __init__(self, scorer: Scorer, run: str | Path, data: Dataset | str | Path | None, **settings: Any) -> None:
        self._scorer, self._data = weakref.proxy(scorer), data  # a cycle would keep the rows
        self._last: dict[str, Any] = {}  # of the last two models: a roll-back is quick
        super().__init__(run, **settings)

    def before_change(self, path: Path) -> Any:
        key = hash_manifest(path)
        if key not in self._last:
            manifest = read_manifest(path)
            spec, known = FeatureSpec.from_dict(manifest["features"]), manifest["extra"].get("dataset")
            self._last[key] = _encoder(newest_rows(path, _REMEDY, self._data), spec, known), version_of(manifest)
        self._last = {each: self._last[each] for each in [*self._last][-2:] if each != key} | {key: self._last[key]}
        companion = self._scorer.companion()
        return (*self._last[key], None if companion is None else companion(path, self._last[key][0]))

    def after_change(self, made: Any) -> None:
        self._scorer.encoder, self._scorer.version, then = made
        self._scorer.model = self.model
        if then is not None:
            then()
