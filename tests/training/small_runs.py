"""Runs that train in no time, and what they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "embedding_dim": 4, "model_options": {"bottom": (8,), "top": (8,)}, "batch_size": 32, "tensorboard": False,
    "display": "quiet", "threads": 1,
}  # fmt: skip


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of one kind of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]
