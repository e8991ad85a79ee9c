"""Keep a model in step with a run that is updated elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from stoker.base.errors import CheckpointError
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


class _Change(NamedTuple):
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
        lock: held while rows are replaced; None: a lock of its own.

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
        path = find_checkpoint(self.run.path)
        self._links: list[Link] = []
        self._known: list[str] = []  # sha256 of their manifests
        self._settings = settings if into is None else None  # of a model of our own
        if into is None:
            self.model: Any = loading.load(path, **settings).model
        else:
            self.model = loading.load(path, into).model
        self._arrived(path)

    @property
    def path(self) -> Path:
        """The checkpoint of the model."""
        return self._links[-1].path

    @property
    def version(self) -> Version:
        """The model as it is now."""
        manifest = self._links[-1].manifest
        number = int(manifest["extra"].get("update", {}).get("number", 0))
        return Version(number, int(manifest["step"]), self._known[-1])

    def poll(self) -> bool:
        """Apply what has been published since; return True if the model changed.

        Raises:
            CheckpointError: a segment is missing or damaged. The model is as before.
        """
        path = find_checkpoint(self.run.path)
        if checkpoint.hash_manifest(path) == self._known[-1]:
            return False
        links = checkpoint.chain(path)
        names = [_names(link) for link in links]
        if self._known[-1] in names[-1]:  # the same model, compacted
            self._arrived(path)
            return False
        made = self.before_change(path)
        common = next((place for place in reversed(range(len(links))) if self._at(names[place]) is not None), None)
        same = self._sizes(links[-1]) == self._sizes(self._links[-1])
        changes = None if common is None or not same else self._changes(links, common, names[common])
        model = self.model if same else self._rebuilt(path)
        with self.lock, torch.no_grad():
            if not same:
                self.model = model
            elif changes is None:
                loading.load(path, self.model)
            else:
                tables = module_state.tables_in(module_state.unwrap(self.model))
                for each in changes:
                    tables[each.module].group_of[each.table].scatter(each.table, each.rows, each.values)
                loading.load_dense(links[-1], self.model)
            self._arrived(path)
            self.after_change(made)
        return True

    def before_change(self, path: Path) -> Any:
        """Prepare what must change together with the model, before the lock is held; a subclass may."""

    def after_change(self, made: Any) -> None:
        """Change it to what :meth:`before_change` returned, while the lock is held."""

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

    def _at(self, names: set[str]) -> int | None:
        """Return the place of a checkpoint in the chain that the model has; None if it is not in it."""
        return next((place for place, known in enumerate(self._known) if known in names), None)

    def _arrived(self, path: Path) -> None:
        self._links = checkpoint.chain(path)
        self._known = [checkpoint.hash_manifest(link.path) for link in self._links]

    def _changes(self, links: list[Link], common: int, names: set[str]) -> list[_Change] | None:
        """Return the rows that differ between the model and the end of ``links``, with the values there.

        None: files of the model as it is now are gone, by a roll-back and what came after it.
        """
        undone = self._at(names)
        assert undone is not None
        for link in links[common + 1 :]:
            checkpoint.verify_files(link.path, link.manifest)
        found = []
        for entry in links[-1].manifest["tables"]:
            key, new = (entry.get("module", "embeddings"), str(entry["name"])), SavedTable(links, entry)
            if undone == len(self._known) - 1:  # forwards: the segments have the values
                found += [_Change(*key, *rows) for rows in new.segments(common)]
                continue
            try:
                rows = np.union1d(SavedTable(self._links, entry).changed(undone), new.changed(common))
            except CheckpointError:
                return None
            found.append(_Change(*key, rows, new.gather(rows)))
        return found


def _names(link: Link) -> set[str]:
    """Return the sha256 of a manifest, and of the one that it replaces."""
    found: Mapping[str, Any] = link.manifest
    return {checkpoint.hash_manifest(link.path), *([found["compacted"]] if "compacted" in found else [])}
