"""Runs that train in no time, and what they wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROWS = (600, 300, 10)  # of three tables
ROW = 4 * 4 + 4  # bytes: 4 columns and row-wise Adagrad's scalar, as of SMALL
FILE = {"host_memory": "1KiB", "strategy": "cached"}  # rows in a file that is not mapped
TENTH = str(sum(ROWS) * ROW // 10)
HALF = str(sum(ROWS) * ROW // 2)
SMALL: dict[str, Any] = {
    "embedding_dim": 4, "model_options": {"bottom": (8,), "top": (8,)}, "batch_size": 32, "tensorboard": False,
    "display": "quiet", "threads": 1,
}  # fmt: skip


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of one kind of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def files(folder: Path) -> dict[str, bytes]:
    """What the files below a folder hold, by their place in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def checkpoint_files(run: Path, step: int | None = None) -> dict[str, bytes]:
    """The files of a run's checkpoints, or of the one at ``step``."""
    checkpoints = run / "checkpoints"
    return files(checkpoints if step is None else checkpoints / f"step_{step:09d}")


def assert_same_run(run: Path, other: Path, kinds: Sequence[str] = ("train", "valid", "test")) -> None:
    """Two runs have the same checkpoints, and the same numbers in their records of some kinds."""
    assert checkpoint_files(run) == checkpoint_files(other)
    keep = ("step", "epoch", "loss", "auc", "log_loss")
    for kind in kinds:
        ours, theirs = ([[line.get(k) for k in keep] for line in records(one, kind)] for one in (run, other))
        assert ours == theirs
