"""Features by loops over rows of plain Python: the definition that the library is compared with."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
MASK = 2**64 - 1


def finish(h: int) -> int:
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB & MASK
    return h ^ (h >> 31)


def hash_text(text: str, seed: int = 0) -> int:
    h = 14695981039346656037 ^ seed
    for byte in text.encode():
        h = (h ^ byte) * 1099511628211 & MASK
    return finish(h)


def splitmix(value: int) -> int:
    return finish((value + 0x9E3779B97F4A7C15) & MASK)


def cross(row: Row, columns: Sequence[str], buckets: int, seed: int) -> int:
    return hash_text("\x1f".join("\x00" if row[c] is None else str(row[c]) for c in columns), seed) % buckets


def fold_of(number: int, row: Row, folds: int, fold_by: Sequence[str], seed: int) -> int:
    if fold_by:
        return cross(row, fold_by, 2**64, seed) % folds
    return (splitmix(number ^ splitmix(seed))) % folds


def mean_target(
    train: Sequence[Row], rows: Sequence[Row], by: Sequence[str], folds: int, smoothing: float,
    fold_by: Sequence[str], seed: int, *, out_of_fold: bool,
) -> list[float]:  # fmt: skip
    found = []
    for number, row in enumerate(rows):
        seen = list(train)
        if out_of_fold:
            own = fold_of(number, row, folds, fold_by, seed)
            seen = [r for i, r in enumerate(train) if fold_of(i, r, folds, fold_by, seed) != own]
        every = seen or list(train)
        mean = sum(r["y"] for r in every) / len(every)
        same = [r["y"] for r in seen if all(r[c] == row[c] for c in by)]
        weight = len(same) + smoothing
        found.append((sum(same) + smoothing * mean) / weight if weight else mean)
    return found


def before(rows: Sequence[Row], at: int, by: Sequence[str], order: str, events: str | None) -> list[int]:
    """Rows of the group that are strictly before, in order."""
    if rows[at][order] is None:
        return []
    found = [
        i for i, row in enumerate(rows)
        if all(row[c] == rows[at][c] for c in by) and row[order] is not None and row[order] < rows[at][order]
        and (events is None or (row[events] is not None and row[events] > 0))
    ]  # fmt: skip
    return sorted(found, key=lambda i: (rows[i][order], i))


def rank(rows: Sequence[Row], at: int, by: Sequence[str], order: str, *, descending: bool, dense: bool) -> int | None:
    own = rows[at][order]
    if own is None:
        return None
    values = [r[order] for r in rows if all(r[c] == rows[at][c] for c in by) and r[order] is not None]
    lower = [v for v in values if (v > own if descending else v < own)]
    return 1 + len(set(lower) if dense else lower)


def clock(seconds: float, offset: float) -> dict[str, int]:
    moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=seconds + offset * 3600)
    return {
        "hour": moment.hour, "weekday": moment.isoweekday(), "day": moment.day, "month": moment.month,
        "minute_of_day": moment.hour * 60 + moment.minute,
    }  # fmt: skip
