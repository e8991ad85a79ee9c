"""Bad lines: kept with file, line and reason, counted, refused where the user allows none or a share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stoker.data.columns import BadLine
from stoker.data.shards import atomic_file
from stoker.errors import DataError
from stoker.units import parse_share

__all__ = ["BadLineLimit", "collect_quarantine", "write_bad_lines"]

_EARLY = 1_000_000  # lines after which a share already exceeded stops the run


def write_bad_lines(path: Path, bad: Iterable[BadLine]) -> None:
    """Keep a block's bad lines, numbered from the block's start, until :func:`collect_quarantine`."""
    with path.open("w", encoding="utf-8") as file:
        for line in bad:
            file.write(json.dumps([line.line, line.reason, line.text], ensure_ascii=False) + "\n")


def collect_quarantine(path: Path, blocks: Sequence[tuple[str, int, Path]]) -> int:
    """Write ``quarantine.jsonl`` from (file name, lines before the block, its bad lines); counts them."""
    total = 0
    with atomic_file(path) as file:
        for name, before, kept in blocks:
            with kept.open(encoding="utf-8") as lines:
                for raw in lines:
                    line, reason, text = json.loads(raw)
                    entry = {"file": name, "line": before + line + 1, "reason": reason, "text": text}
                    file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
                    total += 1
    return total


class BadLineLimit:
    """Counts lines in file order and stops at the first bad one (strict) or past a share (max_bad).

    Args:
        strict: no bad line at all.
        max_bad: share of all lines, e.g. ``"0.1%"``; None: any number.
    """

    def __init__(self, *, strict: bool = False, max_bad: str | float | None = None) -> None:
        self.strict = strict
        self.share = None if max_bad is None else parse_share(max_bad)
        self.lines = 0
        self.bad = 0
        self.first = ""

    def add(self, file: str, before: int, lines: int, bad: int, kept: Path | None) -> None:
        """Note the next block.

        Raises:
            DataError: the limit is exceeded.
        """
        self.lines += lines
        self.bad += bad
        if bad and not self.first and kept is not None:
            self.first = _describe(file, before, kept)
            if self.strict:
                raise DataError(f"{self.first}. Mend the line, or leave --strict out to set bad lines aside.")
        if self.lines >= _EARLY:
            self.check()

    def check(self) -> None:
        """Raise :class:`DataError` where the share of bad lines is exceeded."""
        if self.share is not None and self.bad > self.share * self.lines:
            raise DataError(
                f"{self.bad:,} of {self.lines:,} lines are bad ({self.bad / max(self.lines, 1):.3%}), "
                f"more than the {self.share:.3%} that --max-bad allows. The first: {self.first}."
            )


def _describe(file: str, before: int, kept: Path) -> str:
    with kept.open(encoding="utf-8") as lines:
        entry: list[Any] = json.loads(lines.readline())
    return f"{file}:{before + entry[0] + 1}: {entry[1]}"
