"""Keep a model in step with a run that is updated elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from stoker.base.errors import CheckpointError
from stoker.base.settings import checked_arguments
from stoker.tables.storage import Rows
from stoker.training.files import checkpoint, loading, module_state
from stoker.training.files.checkpoint import Link, M
from stoker.training.files.rundir import RunDirectory, find_checkpoint
from stoker.training.files.segments import Ints, SavedTable


class Version(NamedTuple):
    """Which model a follower has."""

    number: int  # of the update; 0: the model that was trained first
    step: int
    manifest: str  # sha256, which stands for every byte


class _NewRows(NamedTuple):
    """New rows of one table."""

    module: str
    table: str
    rows: Ints
    values: Rows


class Follower:
    """A model that follows the updates of a run, forwards and, after a roll-back, back.

    An update is read and checked first. Then, under :attr:`lock`, its rows are copied into the model, wherever these
    are. Code that scores under the same lock never uses half of an update. If new ids made tables larger,
    :attr:`model` is another model from then on.

    Args:
        run: the run directory.
        into: the model; None loads the run's own, by ``settings`` of :func:`stoker.load`.
        lock: taken while rows are replaced; None: a new lock.

    Raises:
        CheckpointError: the run has no whole model.

    >>> from stoker.testing import make_daily_run
    >>> tuesday, wednesday = make_daily_run("run")
    >>> follower = stoker.Follower("run")
    >>> follower.poll()  # nothing new
    False
    >>> found = stoker.update("run", tuesday)  # in any process
    >>> follower.poll(), follower.version.number
    (True, 1)
    """

    @checked_arguments
    def __init__(
        self,
        run: str | Path,
        into: M | None = None,
        *,
        lock: AbstractContextManager[Any] | None = None,
        **settings: Any,
    ) -> None:
        self.run = RunDirectory(run)
        self.lock = threading.RLock() if lock is None else lock
        self._settings = settings if into is None else None  # of a model of our own
        path = find_checkpoint(self.run.path)
        with checkpoint.reading(path) as self._links:
            made = self.before_change(path)
            self.model: Any = (loading.load(path, **settings) if into is None else loading.load(path, into)).model
        self._is_whole = True  # not a part of one model and a part of another
        self.after_change(made)

    @property
    def path(self) -> Path:
        """The checkpoint of the model."""
        return self._links[-1].path

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest of the checkpoint of the model."""
        return self._links[-1].manifest

    @property
    def version(self) -> Version:
        """The model as it is now."""
        _, manifest, digest = self._links[-1]
        number = int(manifest["extra"].get("update", {}).get("number", 0))
        return Version(number, int(manifest["step"]), digest)

    def poll(self) -> bool:
        """Apply what has been published since; return True if the model changed.

        Raises:
            CheckpointError: a segment is missing or damaged, or files were replaced while they were read. The model is
                as before, unless files that are read whole, after a roll-back, were replaced: the next call mends it.
        """
        path = find_checkpoint(self.run.path)
        if self._is_whole and checkpoint.hash_manifest(path) == self._links[-1].digest:
            return False
        links = checkpoint.chain(path)
        if self._is_whole and self._links[-1].digest in links[-1].digests:  # the same model, compacted
            self._links = links
            return False
        with ExitStack() as files:
            with checkpoint.reading(path, links[-1].manifest) as links:
                made = self.before_change(path)
                same = self._sizes(links[-1]) == self._sizes(self._links[-1])
                changes = self._changes(links) if same and self._is_whole else None
                model = self.model if same else self._rebuilt(path)
                fill_dense = files.enter_context(loading.dense_part(links, model))
            with self.lock, torch.no_grad():
                if not same:
                    self.model = model
                elif changes is None:
                    self._is_whole = False
                    with checkpoint.reading(path, links[-1].manifest):
                        loading.load(path, model)
                else:
                    tables = module_state.tables_in(module_state.unwrap(model))
                    for each in changes:
                        tables[each.module].group_of[each.table].scatter(each.table, each.rows, each.values)
                    fill_dense()
                self._is_whole, self._links = True, links
                self.after_change(made)
        return True

    def before_change(self, path: Path) -> Any:
        """Prepare what must change together with the model, before the lock is taken; a subclass may."""

    def after_change(self, made: Any) -> None:
        """Change it to what :meth:`before_change` returned, under the lock."""

    @staticmethod
    def _sizes(link: Link) -> list[int]:
        return [int(entry["num_embeddings"]) for entry in link.manifest["tables"]]

    def _rebuilt(self, path: Path) -> Any:
        """Return the model with tables of other sizes."""
        if self._settings is None:
            raise CheckpointError(
                f"{path} has tables with other numbers of rows, for ids that are new. Build a model for it, and a "
                "follower for that; or leave out the model, so that the follower builds it."
            )
        return loading.load(path, **self._settings).model

    def _changes(self, links: list[Link]) -> list[_NewRows] | None:
        """Return the rows that differ between the model and the end of ``links``, with the values there.

        None: they have no checkpoint in common, or files of the model as it is now are gone, by a roll-back and what
        came after it.
        """
        own = {link.digest: place for place, link in enumerate(self._links)}
        pairs = [(own[digest], new) for new, link in enumerate(links) for digest in link.digests if digest in own]
        if not pairs:
            return None
        undone, common = max(pairs, key=lambda pair: pair[1])
        for link in links[common + 1 :]:
            checkpoint.verify_files(link.path, link.manifest)
        found = []
        for entry in links[-1].manifest["tables"]:
            key, new = (entry.get("module", "embeddings"), str(entry["name"])), SavedTable(links, entry)
            if undone == len(self._links) - 1:  # forwards: the segments have the values
                found += [_NewRows(*key, *rows) for rows in new.segments(common)]
                continue
            try:
                rows = np.union1d(SavedTable(self._links, entry).changed(undone), new.changed(common))
            except CheckpointError:
                return None
            found.append(_NewRows(*key, rows, new.gather(rows)))
        # Another update may have got the name of one that was taken back.
        return found if checkpoint.is_current(self._links[undone + 1 :]) else None
