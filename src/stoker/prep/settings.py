"""The settings of a preparation that the command line has, too. Its help reads them, so none of this needs Polars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.base.settings import Settings, setting

#: By these the command line tells the URL of a raw file from that of a dataset.
LOG_SUFFIXES = (
    ".csv", ".tsv", ".txt", ".dat", ".log", ".gz", ".zst", ".zstd", ".parquet", ".pq", ".json", ".jsonl", ".ndjson",
)  # fmt: skip
DRAFT_ROWS = 100_000  # that a draft reads by default
PRESET = "Preset of the recipe; the first one if left out."


@dataclass(frozen=True, kw_only=True)
class PrepareSettings(Settings):
    """How logs are prepared; :func:`stoker.prepare` describes each setting."""

    history: str = setting(
        "auto", "With --like: window features continue from that dataset (auto), or see new rows only (ignore)."
    )
    negatives: bool = setting(
        False, "With --like: sample rows of label 0 as the schema says, to evaluate.", options=("--negatives",)
    )
    preset: str | None = setting(None, PRESET)
    strict: bool = setting(False, "Stop at the first bad line.", options=("--strict",))
    max_bad: str | float | None = setting(
        None, "Allowed share of bad lines, such as 0.1%.", unset="1%, from 10 bad lines on"
    )
    split: str | None = setting(
        None, "Split rule in place of that of the recipe: random:0.8,0.1, time:0.9, hash:user:0.8,0.1, ..."
    )
    keep: str | Sequence[str] = setting((), "Raw column that stoker predict writes next to the scores. Repeatable.")
    resume: bool = setting(True, "Continue an interrupted run.")
    reorder: bool = setting(
        False, "Renumber ids so that ids used together are neighbours, as stoker reorder does.", options=("--reorder",)
    )
    threads: int | None = setting(None, "CPU threads.", unset="one per core")
