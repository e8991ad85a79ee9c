"""A run directory: its files, its checkpoints, its log, and its copy at a URL.

::

    RUN/config.json           dataset and settings
    RUN/checkpoints/step_000001000/
    RUN/checkpoints/step_000002000.damaged/   renamed when the run was resumed
    RUN/metrics.jsonl         one JSON object per line
    RUN/tensorboard/
    RUN/report.json           final metrics, written at the end
    RUN/head.json             the newest update, if there is one (stoker.live.journal)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeAlias, TypeVar

from stoker.base import remote
from stoker.base.errors import CheckpointError, ConfigError, DataError, StokerError, errors_as
from stoker.base.files import SEAL, atomic_file, check_name, lock_file, seal, sync_folder, unseal
from stoker.base.settings import renamed
from stoker.base.units import plural, quoted
from stoker.dataset.dataset import Dataset
from stoker.models import MODELS
from stoker.training.config import TrainConfig
from stoker.training.files import checkpoint as ckpt
from stoker.training.scores.metrics import merit

#: In ``extra`` of the manifest of an interim checkpoint, which was due by the clock and not by the step.
INTERIM: dict[str, Any] = {"interim": True}
_STEP = re.compile(r"step_(\d{9,})")
#: The remedy if no checkpoint of a run is whole.
LOST = "Put a checkpoint back from a copy, or train a new run."

Upload: TypeAlias = Callable[[], str | None]  # uploads new files; returns the problem in words, else None
HEAD, UPDATES, _LOCK = "head.json", "updates.jsonl", ".lock"
_DONE = ".uploaded"  # in the local folder of a run, once all of it is at its URL

Place: TypeAlias = "str | Path | None"
T = TypeVar("T")


class RunInUseError(ConfigError):
    """Another process changes the run."""


class RunDirectory:
    """The paths and checkpoints of a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> RunDirectory:
        """Make a new run directory; if that fails, delete what was made of it. After a kill it can be made again."""
        run = cls(path)
        run.check_new()
        made = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            with run.locked() as alone:
                run.check_new()  # another process may have begun meanwhile
                if alone and run.checkpoints.exists():  # left by a kill
                    run.checkpoints.rmdir()
                run.checkpoints.mkdir()  # only one of two processes succeeds where a disk has no locks
                made.insert(0, run.checkpoints)
                run.write("config.json", config)
        except BaseException as error:
            with suppress(OSError):  # not empty: another process uses it, and so the folders above
                if run.checkpoints in made:
                    (run.path / _LOCK).unlink()
                for folder in made:
                    folder.rmdir()
            if isinstance(error, FileExistsError):
                raise ConfigError(f"another process has just begun a run in {path}. Choose another --out.") from error
            raise
        return run

    def check_new(self) -> None:
        """Check that :meth:`create` can make the directory: at most what a kill within it leaves is there."""
        check_name(self.path)
        if self.path.exists() and not (self.path.is_dir() and self._can_begin()):
            known = (self.path / "config.json").exists()
            hint = f"Continue it with --resume {quoted(self.path)}, or choose" if known else "Choose"
            raise ConfigError(f"{self.path} exists and is not empty. {hint} another --out.")
        place = next(p for p in (self.path.absolute(), *self.path.absolute().parents) if p.exists())
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise ConfigError(f"{self.path} cannot be made: {place} is not a writable directory. Choose another --out.")

    def _can_begin(self) -> bool:
        """Return True if the directory is empty but for what a kill within :meth:`create` leaves."""
        names, found = {entry.name for entry in self.path.iterdir()}, self.checkpoints
        empty = found.is_dir() and not found.is_symlink() and not any(found.iterdir())
        return names <= {_LOCK, "checkpoints", "config.json.tmp"} and (empty or "checkpoints" not in names)

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Lock the run against other processes; the end of the process, even by a kill, releases the lock.

        The block gets False if the disk has no locks.
        """
        remedy = "Training puts its checkpoints there: make it writable, or continue a copy of the directory."
        with errors_as(ConfigError, f"{self.path} cannot be written to", remedy):
            for folder in filter(Path.exists, (self.path, self.checkpoints)):
                TemporaryFile(dir=folder).close()  # the lock may have been made when they were writable
            file = (self.path / _LOCK).open("w")
        with file:
            for _ in range(100):  # another process may only look whether it can begin here
                if (locked := lock_file(file)) is not False:
                    break
                time.sleep(0.01)
            else:
                raise RunInUseError(f"another process is training in {self.path}. Wait for it, or stop it first.")
            yield bool(locked)

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Write one JSON file atomically, with a checksum."""
        with atomic_file(self.path / name) as file:
            file.write(json.dumps(seal(values), indent=1, allow_nan=False).encode() + b"\n")

    def config(self) -> dict[str, Any]:
        """Return ``config.json``, after a check that its settings and its model are known."""
        values = self.read("config.json")
        if unknown := sorted(renamed(values["settings"]).keys() - TrainConfig.__dataclass_fields__.keys()):
            raise ConfigError(f"{self.path / 'config.json'} has settings of a newer Stoker: {unknown}. Upgrade it.")
        model = values["settings"].get("model")
        if model is not None and model not in MODELS:
            raise ConfigError(f"{self.path} trains a model {model!r}, unknown here. {unknown_model(self.path, model)}")
        return values

    def read(self, name: str) -> dict[str, Any]:
        """Return the contents of a JSON file of the run."""
        try:
            values: dict[str, Any] = unseal((self.path / name).read_bytes())
            if not isinstance(values, dict):
                raise ValueError("it holds no object")
            if name == "config.json" and not {"settings", "dataset"} <= set(values):
                raise ValueError("it lacks the settings and the dataset")
        except (FileNotFoundError, NotADirectoryError) as error:
            if (url := remote.url_of(self.path)) is not None:
                raise ConfigError(f"{url} is a URL, and this needs a run on a local disk. Copy the run.") from error
            found = kind_of(self.path)
            is_what = f"is {found}, not a run directory" if found else f"is not a run directory: it has no {name}"
            raise ConfigError(f"{self.path} {is_what}. Name the directory that stoker train --out made.") from error
        except ValueError as error:
            raise ConfigError(
                f"{self.path / name} is garbled ({error}). Put it back from a copy. Without it the run cannot go on, "
                "but its checkpoints can be scored: stoker evaluate CHECKPOINT --data DATASET --device-memory all. If "
                f"you have altered it yourself, delete its line {SEAL!r}."
            ) from error
        return values

    def head(self) -> dict[str, Any] | None:
        """Return ``head.json``: the name of the checkpoint that updates have reached, its number, step and manifest.

        None: the run was not updated.
        """
        path = self.path / HEAD
        remedy = "Put it back from a copy, or delete it to go back to the model before all updates."
        with errors_as(CheckpointError, f"{path} is garbled", remedy, (OSError, ValueError, KeyError, TypeError)):
            try:
                text = path.read_text(encoding="utf-8")
            except FileNotFoundError:  # a roll-back may delete it at any moment
                return None
            values: dict[str, Any] = unseal(text)
            Path(values["checkpoint"]).relative_to(Path(values["checkpoint"]).name)
            str(values["manifest"])
            return values

    def updates(self) -> list[dict[str, Any]]:
        """Return the lines of ``updates.jsonl``, one for each update up to the head; none if there was no update."""
        path, last = self.path / UPDATES, int((self.head() or {}).get("number", 0))
        found: list[dict[str, Any]] = []
        if path.exists():
            with errors_as(DataError, f"{path} is garbled", "Put it back from a copy.", (OSError, ValueError)):
                for line in path.read_bytes().split(b"\n")[:-1]:  # what follows the last newline was cut by a kill
                    found.append(unseal(line))
        known = [each for each in found if each["number"] <= last]
        if [each["number"] for each in known] != list(range(1, last + 1)):
            raise DataError(
                f"{path} has {plural(len(known), 'line')} up to update {last}, of which each should have one: "
                "logs that were used already would not be recognised. Put it back from a copy."
            )
        return known

    def rows_of(self, number: int) -> Path:
        """Return the directory of the prepared rows of an update."""
        return self.path / "updates" / f"{number:06d}"

    def remove_head(self) -> None:
        """Go back to the model that was trained first."""
        (self.path / HEAD).unlink(missing_ok=True)
        sync_folder(self.path)

    def records(self) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl, without an incomplete line of a killed run."""
        found = []
        with suppress(FileNotFoundError), self.metrics.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with suppress(ValueError):
                    record = json.loads(line)
                    if isinstance(record, dict) and {"kind", "step"} <= set(record):
                        found.append(record)
        return found

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint of ``step``."""
        return self.checkpoints / f"step_{step:09d}"

    def set_aside(self, step: int) -> Path | None:
        """Rename a damaged checkpoint (:func:`stoker.training.files.checkpoint.set_aside`); None: there is none."""
        path = self.checkpoint(step)
        return ckpt.set_aside(path) if path.exists() else None

    def manifest(self, checkpoint: Path) -> dict[str, Any]:
        """Return the manifest of one of its checkpoints."""
        return ckpt.read_manifest(checkpoint)

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, whole or damaged, in rising order."""
        if not self.checkpoints.is_dir():
            return []
        # A directory without manifest counts: it got its name when it was whole, so it was damaged later.
        matches = (_STEP.fullmatch(entry.name) for entry in self.checkpoints.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def _extra(self, step: int) -> dict[str, Any] | None:
        """Return ``extra`` of the manifest of a checkpoint; None if it cannot be read."""
        try:
            return dict(ckpt.read_manifest(self.checkpoint(step))["extra"])
        except CheckpointError:
            return None

    def newest_extra(self) -> dict[str, Any]:
        """Return ``extra`` of the newest manifest that can be read; empty if none can."""
        found = (self._extra(step) for step in reversed(self.steps()))
        return next((extra for extra in found if extra is not None), {})

    def problem(self, step: int) -> str | None:
        """Return what is wrong with a checkpoint; None if all its files match their checksums."""
        try:
            ckpt.verify(self.checkpoint(step))
        except CheckpointError as error:
            return str(error)
        return None

    def newest_whole(self) -> tuple[Path | None, list[str]]:
        """Return the newest checkpoint whose files all match their checksums, and what is wrong with newer ones."""
        problems: list[str] = []
        for step in reversed(self.steps()):
            problem = self.problem(step)
            if problem is None:
                return self.checkpoint(step), problems
            problems.append(problem)
        return None, problems

    def evaluated(self, metric: str) -> list[dict[str, Any]]:
        """Return the evaluations of those checkpoints that have one, best first: ``{"step", "valid"}``."""
        latest = {step: (self._extra(step) or {}).get("progress", {}).get("latest") for step in self.steps()}
        found = [record for step, record in latest.items() if record is not None and record["step"] == step]
        return sorted(found, key=lambda record: merit(record["valid"], metric), reverse=True)

    def best(self) -> Path | None:
        """Return the best checkpoint of the run; if it was deleted, the best of the others; None if there is none."""
        extra = self.newest_extra()
        best = extra.get("best")
        if best is not None and best["step"] not in self.steps():
            best = next(iter(self.evaluated(extra.get("settings", {}).get("metric", "auc"))), None)
        return None if best is None else self.checkpoint(int(best["step"]))

    def prune(self, keep_last: int, best: int | None) -> None:
        """Delete all but the last ``keep_last`` checkpoints and the best, and temporary files.

        An interim checkpoint is deleted once there is a newer one, so that interruptions do not change which
        checkpoints a run has at its end.
        """
        steps = self.steps()
        interim = [step for step in steps[:-1] if (self._extra(step) or {}).get("interim")]
        last = [step for step in steps if step not in interim][-keep_last:]
        for step in steps:
            if step not in last and step != best:
                ckpt.discard(self.checkpoint(step))
        for entry in self.checkpoints.glob("step_*.tmp*"):
            shutil.rmtree(entry, ignore_errors=True)


def read_report(run: RunDirectory) -> dict[str, Any] | None:
    """Return ``report.json``, what a run writes at its end; None if it is not there."""
    if not (run.path / "report.json").is_file():
        return None
    found = run.read("report.json")
    if not {"step", "best_step", "valid", "test"} <= found.keys():
        raise DataError(f"{run.path / 'report.json'} is not what a run writes. Put it back from a copy, or delete it.")
    return found


def find_checkpoint(path: str | Path) -> Path:
    """Return the path of a checkpoint: of a run the one that it was updated to, else its best or newest whole one."""
    path = remote.local_run(path)
    if kind_of(path) == "a dataset":
        raise CheckpointError(
            f"{path} is a dataset, not a run. Name the run or checkpoint, and the dataset with --data {quoted(path)}."
        )
    if kind_of(path) == "an export":
        raise CheckpointError(
            f"{path} is an export, not a run. It scores raw rows: stoker serve {quoted(path)}, or in Python "
            "stoker.Scorer. Else name the run."
        )
    if (path / "manifest.json").is_file():
        return path
    run = RunDirectory(path)
    if not path.exists():
        if (kept := ckpt.left_by_a_kill(path)) is not None:
            return kept
        raise CheckpointError(f"{path} does not exist.")
    if _STEP.fullmatch(path.name) and (path.parent.parent / "config.json").is_file():
        raise CheckpointError(f"{path} is damaged: it has no manifest.json. {whole_checkpoints(path)}")
    if not (path / "config.json").is_file() and not run.steps():
        raise CheckpointError(
            f"{path} is neither a checkpoint nor a run directory. Name the directory that stoker train --out made."
        )
    if (head := run.head()) is not None:
        updated: Path = run.checkpoints / head["checkpoint"]
        if not updated.exists():
            updated = ckpt.left_by_a_kill(updated) or updated
        if not updated.exists():
            raise CheckpointError(
                f"{updated} is missing, to which {path} was updated. Put it back from a copy, or delete "
                f"{run.path / HEAD} to go back to the model before all updates."
            )
        if not _is_of(head, updated):
            if run.head() != head:  # an update or a roll-back came in between
                return find_checkpoint(path)
            raise CheckpointError(
                f"{updated} is another checkpoint than the one that {path} was updated to: {HEAD} names a manifest "
                f"with sha256 {head['manifest'][:16]}... It was exchanged, or written again elsewhere. Put the right "
                f"one back from a copy, or go back to an earlier update: stoker rollback {quoted(path)}."
            )
        return updated
    return trained(run)


def _is_of(head: Mapping[str, Any], checkpoint: Path) -> bool:
    """Return whether a head names this checkpoint, maybe before it was joined. One that is damaged is named later."""
    try:
        return head["manifest"] in ckpt.Link.of(checkpoint).digests
    except CheckpointError:
        return True


def trained(run: RunDirectory) -> Path:
    """Return the best checkpoint of the training of a run, else its newest whole one.

    Raises:
        CheckpointError: there is none.
    """
    path, steps = run.path, run.steps()
    if len(steps) > 1:
        last = run.checkpoint(steps[-1])
        try:
            ckpt.read_manifest(last)  # without it, the best checkpoint of an earlier time would be taken
        except CheckpointError as error:
            if run.steps() != steps:  # it was deleted, by a run that trains
                return trained(run)
            raise CheckpointError(f"{error} It says which checkpoint is the best. {whole_checkpoints(last)}") from error
    if best := run.best():
        return best
    whole, problems = run.newest_whole()
    if whole is not None:
        return whole
    if problems:
        raise CheckpointError(f"{path} has no whole checkpoint. {' '.join(problems)} {LOST}")
    raise CheckpointError(f"{path} has no checkpoint yet. Continue it with: stoker train --resume {quoted(path)}")


def unknown_model(place: Path, name: str) -> str:
    """Return the remedy for an unknown model ``name`` of a run or checkpoint, for the end of a message."""
    run, path = RunDirectory(place), None
    if not (place / "config.json").is_file():
        run = run_of(place) or run
    with suppress(ConfigError):
        path = run.read("config.json").get("model_class")
    if path is None:
        return (
            f"Give --import package.module:Class, the class whose name is {name!r}; in Python call "
            "stoker.models.import_model('package.module:Class') first."
        )
    return (
        f"This run was trained with {path}: give --import {path}, in the directory from which it can be imported; in "
        f"Python call stoker.models.import_model({path!r}) first."
    )


def whole_checkpoints(checkpoint: Path) -> str:
    """Name the whole checkpoints of a run that has a damaged one, for the end of a message."""
    run = RunDirectory(checkpoint.parent.parent)
    if checkpoint.parent.name != run.checkpoints.name:
        return "Take another checkpoint."
    whole = [str(run.checkpoint(step)) for step in run.steps() if run.problem(step) is None]
    if not whole:
        return f"No other checkpoint of {run.path} is whole. {LOST}"
    if len(whole) == 1:
        return f"Another checkpoint of the run is whole: give {whole[0]} in place of the run."
    return f"Other checkpoints of the run are whole: give one of {', '.join(whole)} in place of the run."


def find_dataset(checkpoint: Path, remedy: str = "Name it with --data DATASET.") -> Path:
    """Return the path of the dataset on which a checkpoint was trained; ``remedy`` is for one that was moved."""
    run = run_of(checkpoint)
    if run is None:
        raise ConfigError(f"{checkpoint} is not in a run directory, so its dataset is unknown. Give --data DATASET.")
    return Path(own_dataset(run.read("config.json"), remedy))


def newest_rows(checkpoint: Path, remedy: str, data: T | None = None) -> Path | T:
    """Return the dataset of the rows that a checkpoint was trained on last: new rows are prepared like those.

    ``data``: the dataset that the run was trained on first, if it was moved.
    """
    path = next(reversed(_updated_rows(checkpoint)), None)
    if path is None or (data is not None and not path.is_dir()):
        return find_dataset(checkpoint, remedy) if data is None else data
    return _existing(path, remedy)


def trained_rows(
    checkpoint: Path, data: Dataset | None = None, remedy: str = "Name it with --data DATASET."
) -> tuple[Dataset, list[Dataset]]:
    """Return the dataset on which a checkpoint was trained first, and the rows of its updates."""
    first, back = Dataset(find_dataset(checkpoint, remedy)) if data is None else data, "Put them back from a copy."
    found = [Dataset(_existing(path, back)) for path in _updated_rows(checkpoint)]
    lines = RunDirectory(found[0].path.parent.parent).updates() if found else []
    for rows, line in zip(found, lines, strict=False):  # the head may be an earlier update
        if line.get("data_hash", rows.test.data_hash) != rows.test.data_hash:
            raise DataError(f"{rows.path} has other rows than update {line['number']} was trained on. {back}")
    return first, found


def _updated_rows(checkpoint: Path) -> list[Path]:
    """Return the directories of the rows of the updates of a checkpoint, in their order."""
    run, update = run_of(checkpoint), ckpt.read_manifest(checkpoint)["extra"].get("update")
    return [] if run is None or update is None else [run.rows_of(one + 1) for one in range(int(update["number"]))]


def _existing(rows: Path, remedy: str) -> Path:
    if not rows.is_dir():
        raise DataError(f"{rows} is missing: the rows of that update were deleted. {remedy}")
    return rows


def settings_around(checkpoint: Path) -> dict[str, Any]:
    """Return the settings with which a checkpoint was trained; empty if it is not in a run directory."""
    run = run_of(checkpoint)
    return {} if run is None else dict(run.read("config.json")["settings"])


def run_of(checkpoint: Path) -> RunDirectory | None:
    """Return the run that a checkpoint is of; None if it is in no run directory."""
    run = checkpoint.resolve().parent.parent
    return RunDirectory(run) if (run / "config.json").is_file() else None


def own_dataset(config: Mapping[str, Any], remedy: str) -> str:
    """Return the path of a run's dataset, from its config.json."""
    path = str(config["dataset"])
    if remote.url_of(path) is None and not Path(path).is_dir():
        raise DataError(f"the run's dataset is no longer at {path}. If it was moved: {remedy[0].lower()}{remedy[1:]}")
    return path


def open_dataset(dataset: Dataset | str | Path) -> Dataset:
    """Return a dataset by its path."""
    if isinstance(dataset, Dataset):
        return dataset
    if kind_of(Path(dataset)) == "a run":
        own = ""
        with suppress(ConfigError, KeyError):
            own = f" (its own is {RunDirectory(dataset).read('config.json')['dataset']})"
        raise ConfigError(
            f"{dataset} is a run, not a dataset. Name the directory that stoker prepare wrote{own}; to continue the "
            f"run: stoker train --resume {quoted(dataset)}"
        )
    return Dataset(dataset)


def kind_of(path: Path) -> str | None:
    """Return the kind of a directory in words, such as "a run"; None: not one of Stoker's."""
    if (path / "config.json").is_file() and (path / "checkpoints").is_dir():
        return "a run"
    try:
        kind = json.loads((path / "manifest.json").read_bytes()).get("kind", "dataset")
    except (OSError, ValueError, AttributeError):
        return None
    return {"dataset": "a dataset", "checkpoint": "a checkpoint", "export": "an export"}.get(str(kind))


@contextmanager
def local_run(out: Place, resume: Place) -> Iterator[tuple[Place, Place, Upload]]:
    """Yield local paths for ``out`` and ``resume``, and a function that uploads the run; errors name its URL."""
    url = remote.url_of(resume if out is None else out)
    if url is None or (out is not None and resume is not None):
        yield out, resume, lambda: None
        return
    folder = remote.output_folder(url)
    if out is not None:
        if not remote.is_empty(url):
            raise ConfigError(f"{url} is not empty. Continue the run there with --resume {url}, or take another --out.")
        remote.check_writable(url)  # before hours of training
        if (folder / _DONE).exists():  # a copy of a run that was deleted at the URL
            shutil.rmtree(folder)
    else:
        _download(url, folder)

    def upload() -> str | None:
        try:
            remote.upload_run(folder, url, quiet=True)
        except StokerError as error:
            return str(error)
        return None

    try:
        yield (folder, None, upload) if out is not None else (None, folder, upload)
    except BaseException as error:
        remote.rename_in(error, {str(folder): url})
        if (folder / "config.json").is_file():
            with suppress(StokerError):
                remote.upload_run(folder, url)
        raise
    remote.upload_run(folder, url)
    (folder / _DONE).touch()


def _download(url: str, folder: Path) -> None:
    """Copy the run at a URL to its local folder, which may have an older copy."""
    if remote.is_empty(url) and (folder / "config.json").is_file():  # killed before its first upload
        return
    folder.mkdir(parents=True, exist_ok=True)
    with RunDirectory(folder).locked():
        (folder / _DONE).unlink(missing_ok=True)
        remote.fetch_run(url, folder)
