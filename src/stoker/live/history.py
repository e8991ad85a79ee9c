"""Go back to an earlier update, or join updates to a whole checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from stoker.base.errors import CheckpointError, ConfigError, errors_as
from stoker.base.picture import Shown
from stoker.base.units import format_size, plural
from stoker.live.journal import opened, set_head
from stoker.models import MODELS, TwoTower
from stoker.training.config import TrainConfig
from stoker.training.files import checkpoint
from stoker.training.files.rundir import RunDirectory, trained
from stoker.training.files.segments import join


def rollback(run: str | Path, to: int | None = None) -> Path:
    """Go back to an earlier update of a run: later ones have not happened, and their logs may be used again.

    Their segments remain until the next :func:`stoker.update`, so a reader that applies them is not disturbed.

    Args:
        run: a run that was updated.
        to: number of the update to go back to; 0 is the model that was trained first; None: the one before the last.

    Returns:
        The checkpoint that counts now.

    Raises:
        ConfigError: the run was not updated, or there is no such update before the last.
        CheckpointError: the model of that update is missing or damaged, or was joined to a later one.

    >>> from stoker.testing import make_daily_run
    >>> tuesday, wednesday = make_daily_run("run")
    >>> for day in (tuesday, wednesday):
    ...     found = stoker.update("run", day)
    >>> stoker.rollback("run").name
    'update_000001'
    """
    with opened(run) as journal:
        if not journal.number:
            raise ConfigError(f"{journal.run.path} was not updated, so there is nothing to take back.")
        wanted = journal.number - 1 if to is None else to
        if not 0 <= wanted <= journal.number:
            raise ConfigError(
                f"{journal.run.path} is at update {journal.number}, so it cannot go back to update {wanted}. Give a "
                f"number from 0 to {journal.number - 1}."
            )
        found = _model_of(journal.run, wanted)
        checkpoint.verify(found)
        if wanted:
            set_head(journal.run, found)
        else:
            journal.run.remove_head()
    return found


def _model_of(run: RunDirectory, number: int) -> Path:
    if number == 0:
        return trained(run)
    path = run.checkpoints / f"update_{number:06d}"
    if not path.exists():
        raise CheckpointError(f"{path} is missing: it was joined to a later update (stoker compact), or deleted.")
    return path


@dataclass(frozen=True, kw_only=True, repr=False)
class Compaction(Shown):
    """What :func:`compact` returns."""

    checkpoint: Path  # whole now
    joined: int  # segments that it replaces
    freed: int  # bytes; negative if the whole checkpoint takes more

    def summary(self) -> str:
        """Return the checkpoint, the segments and the bytes."""
        if not self.joined:
            return f"{self.checkpoint} is a whole checkpoint already"
        size = f"{format_size(abs(self.freed))} {'freed' if self.freed >= 0 else 'more than before'}"
        return f"{self.checkpoint} is whole now, {plural(self.joined, 'segment')} joined, {size}"


def compact(run: str | Path, to: int | None = None) -> Compaction:
    """Join the updates of a run to a whole checkpoint, and delete the updates before it.

    The files of the whole checkpoint are those that :func:`stoker.save` would have written. Later updates continue from
    it, and :func:`rollback` can go back to none of the joined ones, only to the model before all. The checkpoints of
    the training remain, as do the rows of updates of a two-tower model, which have its items. Memory is that of one
    file of rows. After a kill the run works, and the next call finishes.

    Args:
        run: a run that was updated.
        to: number of the last update to join; None: the newest.

    Raises:
        ConfigError: the run was not updated, or there is no such update.
        CheckpointError: a segment is missing or damaged, or the disk has no room for a whole checkpoint.

    >>> from stoker.testing import make_daily_run
    >>> tuesday, wednesday = make_daily_run("joined")
    >>> for day in (tuesday, wednesday):
    ...     found = stoker.update("joined", day)
    >>> stoker.compact("joined").joined
    2
    """
    with opened(run) as journal:
        if not journal.number:
            raise ConfigError(f"{journal.run.path} was not updated, so there is nothing to join.")
        number = journal.number if to is None else to
        if not 0 < number <= journal.number:
            raise ConfigError(
                f"{journal.run.path} is at update {journal.number}, so updates up to {number} cannot be joined. Give a "
                f"number from 1 to {journal.number}."
            )
        target = _model_of(journal.run, number)
        before = _bytes(journal.run.path)
        joined = join(target)
        set_head(journal.run, journal.checkpoint)
        kept = {link.path for link in checkpoint.chain(journal.checkpoint)}
        towers = issubclass(MODELS[TrainConfig.from_dict(journal.config["settings"]).model], TwoTower)
        remedy = "The run works. Free some space, and compact it again: that deletes the rest."
        with errors_as(CheckpointError, f"{target} is whole, but the updates before it could not be deleted", remedy):
            for path in sorted(journal.run.checkpoints.glob("update_*")):
                if int(path.name.split("_")[1]) <= number and path not in kept:
                    checkpoint.discard(path)
            for path in sorted(journal.run.rows_of(0).parent.glob("[0-9]*")):
                if int(path.name.split(".")[0]) < number and not towers:  # a killed preparation leaves NUMBER.new
                    shutil.rmtree(path)
        return Compaction(checkpoint=target, joined=joined, freed=before - _bytes(journal.run.path))


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
