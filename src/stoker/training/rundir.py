"""A run directory: where its files are, which checkpoints it holds, which may go.

::

    RUN/config.json           dataset and settings
    RUN/checkpoints/step_000001000/
    RUN/metrics.jsonl         one JSON object per line
    RUN/tensorboard/
    RUN/report.json           final metrics, written at the end
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stoker.data.shards import atomic_file
from stoker.errors import CheckpointError, ConfigError
from stoker.training import checkpoint as ckpt
from stoker.training.metrics import merit

__all__ = ["RunDirectory", "find_checkpoint", "find_dataset", "whole_beside"]

_STEP = re.compile(r"step_(\d{9,})")


class RunDirectory:
    """Paths and bookkeeping of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> RunDirectory:
        """A new run. Of one that cannot be made, for want of room, nothing stays.

        Raises:
            ConfigError: the directory exists and is not empty.
            DataError: the disk has no room.
        """
        run = cls(path)
        if run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir())):
            hint = f"Continue it with --resume {path}, or choose" if (run.path / "config.json").exists() else "Choose"
            raise ConfigError(f"{path} exists and is not empty. {hint} another --out.")
        made: list[Path] = []
        try:
            for folder in (*reversed(run.path.parents), run.path):
                if not folder.exists():
                    folder.mkdir(exist_ok=True)
                    made.append(folder)
            try:
                run.checkpoints.mkdir()  # of two processes only one can
            except FileExistsError as error:
                raise ConfigError(f"another process has just begun a run in {path}. Choose another --out.") from error
            made.append(run.checkpoints)
            run.write("config.json", config)
        except BaseException:
            for folder in reversed(made):
                with suppress(OSError):  # not empty: another process's
                    folder.rmdir()
            raise
        return run

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the run; a killed one lets go by itself.

        Raises:
            ConfigError: another process trains here.
        """
        if sys.platform == "win32":
            yield
            return
        import fcntl

        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"another process is training in {self.path}. Wait for it, or stop it first."
                ) from error
            yield

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Write one JSON file atomically."""
        with atomic_file(self.path / name) as file:
            file.write(json.dumps(values, indent=1, allow_nan=False).encode() + b"\n")

    def read(self, name: str) -> dict[str, Any]:
        """One JSON file of the run.

        Raises:
            ConfigError: there is no run, or the file is garbled.
        """
        try:
            values: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"{self.path} is no run directory: it has no {name}.") from error
        except ValueError as error:
            raise ConfigError(f"{self.path / name} is garbled ({error}).") from error
        return values

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of ``step`` lies."""
        return self.checkpoints / f"step_{step:09d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint with a manifest, rising."""
        if not self.checkpoints.is_dir():
            return []
        found = []
        for entry in self.checkpoints.iterdir():
            match = _STEP.fullmatch(entry.name)
            if match and (entry / "manifest.json").is_file():
                found.append(int(match[1]))
        return sorted(found)

    def newest_whole(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint whose files all match their checksums, and what is wrong with newer ones."""
        problems = []
        for step in reversed(self.steps()):
            try:
                ckpt.verify(self.checkpoint(step))
            except CheckpointError as error:
                problems.append(str(error))
            else:
                return self.checkpoint(step), problems
        return None, problems

    def evaluated(self, metric: str) -> list[dict[str, Any]]:
        """The evaluations that the run's checkpoints were written after, best first: ``{"step", "valid"}``."""
        found = []
        for step in self.steps():
            with suppress(CheckpointError):
                latest = ckpt.read_manifest(self.checkpoint(step))["extra"].get("progress", {}).get("latest")
                if latest is not None and latest["step"] == step:
                    found.append(latest)
        return sorted(found, key=lambda record: merit(record["valid"], metric), reverse=True)

    def best(self) -> Path | None:
        """The run's best checkpoint; where that is gone, the best of the others; None without an evaluated one."""
        steps = self.steps()
        for step in reversed(steps):
            with suppress(CheckpointError):
                extra = ckpt.read_manifest(self.checkpoint(step))["extra"]
                best = extra.get("best")
                if best is not None and best["step"] not in steps:
                    best = next(iter(self.evaluated(extra.get("settings", {}).get("metric", "auc"))), None)
                return None if best is None else self.checkpoint(int(best["step"]))
        return None

    def prune(self, keep_last: int, best: int | None) -> None:
        """Delete all but the last ``keep_last`` checkpoints and the best, and the rest of broken writes."""
        for step in self.steps()[:-keep_last]:
            if step != best:
                ckpt.discard(self.checkpoint(step))
        for entry in self.checkpoints.glob("step_*.tmp*"):
            shutil.rmtree(entry, ignore_errors=True)


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint directory as it is; of a run directory its best checkpoint, else its newest whole one.

    Raises:
        CheckpointError: neither a checkpoint nor a run with one.
    """
    path = Path(path)
    if (path / "manifest.json").is_file():
        return path
    run = RunDirectory(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if not (path / "config.json").is_file() and not run.steps():
        raise CheckpointError(f"{path} is neither a checkpoint nor a run directory.")
    if best := run.best():
        return best
    newest, problems = run.newest_whole()
    if newest is None:
        raise CheckpointError(f"{path} has no whole checkpoint. {' '.join(problems)}".rstrip())
    return newest


def whole_beside(checkpoint: Path) -> str:
    """What else of a run can be taken where one of its checkpoints is damaged, for the end of a message."""
    run = RunDirectory(checkpoint.parent.parent)
    if checkpoint.parent.name != run.checkpoints.name:
        return "Take another checkpoint."
    whole = []
    for step in run.steps():
        with suppress(CheckpointError):
            ckpt.verify(run.checkpoint(step))
            whole.append(str(run.checkpoint(step)))
    if not whole:
        return f"No other checkpoint of {run.path} is whole."
    return f"Whole are {', '.join(whole)}: give one of these in place of the run."


def find_dataset(checkpoint: Path) -> Path:
    """The dataset of the run that a checkpoint lies in.

    Raises:
        ConfigError: the checkpoint lies in no run.
    """
    run = checkpoint.resolve().parent.parent
    if not (run / "config.json").is_file():
        raise ConfigError(f"{checkpoint} lies in no run directory, so its dataset is not known. Pass --data.")
    return Path(RunDirectory(run).read("config.json")["dataset"])
