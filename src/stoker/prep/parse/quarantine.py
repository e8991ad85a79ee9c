"""Bad lines: keep them with file, line and reason, count them, and stop if there are too many."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from stoker.base.errors import ConfigError, DataError
from stoker.base.files import atomic_file
from stoker.base.units import parse_setting, parse_share
from stoker.prep.parse.frames import BadLine
from stoker.prep.stages.parts import LogPart, atomic_path

_RULE = "give the label a rule in the schema, such as rule = '> 0'"
_EARLY = 1_000_000  # from this many lines on, the share is checked while reading
DEFAULT_BAD = 0.01  # of all lines that may be bad by default,
_FEW = 10  # and fewer bad lines than this are always allowed
_COMMONEST = 3  # number of reasons in messages
# Pattern of reasons, their common name, and the remedy.
_REASONS = [(re.compile(pattern, re.DOTALL), name, remedy) for pattern, name, remedy in (
    (
        r"(?:column .+: )?broken UTF-8", "broken UTF-8",
        'Text in another encoding: set encoding = "latin-1" in [source] of the schema.',
    ),
    (
        r"(?:[\d,]+ fields?, expected|more than) (\d+)(?: fields)?", r"not \1 fields",
        "Wrong number of fields: set separator in [source] of the schema, or, without a header, the names in columns.",
    ),
    (
        r"column .+: (quoted field without a closing quote|text after a closing quote)", r"\1",
        'Quotes that are ordinary characters: set quote = "" in [source] of the schema.',
    ),
    (
        r"(column .+?): '\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}\b.* is not (a number|a whole number)", r"\1: not \2",
        'Dates in a column of numbers: if it is the time, set type = "datetime" and format in [timestamp] of the '
        "schema, else leave the column out.",
    ),
    (
        r"(column .+?): '[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?' is not (a number|a whole number)", r"\1: not \2",
        'Numbers with commas between thousands: write 1,234 as 1234. If the commas are decimal: set decimal = "," in '
        "[source] of the schema.",
    ),
    (
        r"(column .+?): '[-+\d.]*\d,\d+' is not (a number)", r"\1: not \2",
        'Numbers with a decimal comma: set decimal = "," in [source] of the schema.',
    ),
    (
        r"(column .+?): '(?i:true|false)' is not (a number|a whole number)", r"\1: not \2",
        "Truth values as text: for a label, set rule = \"== 'true'\" in [label] of the schema; else write 1 and 0.",
    ),
    (
        r"(column .+?): .* is not (a number|a whole number|text|hexadecimal .*)", r"\1: not \2",
        "Texts that stand for a missing value: list them as null_values in [source] of the schema.",
    ),
    (
        r"(column .+?): .* is not (a date and time .*)", r"\1: not \2",
        "Times written in another way: set format in [timestamp] of the schema. All lines must have one format.",
    ),
    (
        r"(column .+?): .* is not within 64 bits", r"\1: not within 64 bits",
        'Whole numbers beyond 64 bits: set type = "string" of the column.',
    ),
    (r"(column .+?): .* is neither 0 nor 1", r"\1: neither 0 nor 1", f"Labels besides 0 and 1: {_RULE}."),
    (r"not a JSON object.*", "not a JSON object", "JSON lines hold one object a line."),
)]  # fmt: skip


def write_bad_lines(path: Path, bad: Iterable[BadLine]) -> None:
    """Write a block's bad lines, numbered from the block's start, for :func:`collect_quarantine`."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for line in bad:
            file.write(json.dumps(asdict(line), ensure_ascii=False) + "\n")


def _read(part: LogPart) -> Iterator[BadLine]:
    if part.bad:
        with part.bad_path.open(encoding="utf-8") as lines:
            yield from (BadLine(**json.loads(line)) for line in lines)


def collect_quarantine(path: Path, parts: Iterable[LogPart]) -> int:
    """Write the bad lines of all parts to ``quarantine.jsonl``; return how many there are."""
    total = 0
    with atomic_file(path) as file:
        for part in parts:
            for bad in _read(part):
                entry = {"file": part.name, "line": part.lines_before + bad.line + 1}
                entry |= {"reason": bad.reason, "text": bad.text}
                file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
                total += 1
    return total


class BadReasons(NamedTuple):
    """The commonest reasons of bad lines with their counts, and their remedies."""

    counts: dict[str, int]
    remedies: list[str]

    @classmethod
    def among(cls, reasons: Iterable[str]) -> BadReasons:
        """Count reasons, ignoring the values and numbers in them; keep the three commonest."""
        counts: Counter[str] = Counter()
        remedies = {}
        for reason in reasons:
            for pattern, name, remedy in _REASONS:
                if match := pattern.fullmatch(reason):
                    reason = match.expand(name)
                    remedies[reason] = remedy
                    break
            counts[reason] += 1
        kept = dict(counts.most_common(_COMMONEST))
        return cls(kept, list(dict.fromkeys(remedies[reason] for reason in kept if reason in remedies)))

    @classmethod
    def of_quarantine(cls, path: Path) -> BadReasons:
        """Return the commonest reasons of a ``quarantine.jsonl``."""
        with path.open(encoding="utf-8") as lines:
            return cls.among(json.loads(line)["reason"] for line in lines)

    def __str__(self) -> str:
        reasons = "; ".join(f"{count:,} x {reason}" for reason, count in self.counts.items())
        return " ".join([f"Commonest: {reasons}.", *self.remedies])


class BadLineLimit:
    """Count lines in file order; stop at the first bad line (strict) or above a share of bad lines (max_bad).

    A label that is a number but neither 0 nor 1 mostly means a column of another kind (stars, counts, kinds of clicks),
    not damage. So it stops the run, unless ``max_bad`` allows damaged lines. A compressed file that breaks off exceeds
    any share, because the number of lost lines is unknown.

    Args:
        strict: allow no bad line.
        max_bad: share of all lines, e.g. ``"0.1%"``; None: fewer than 10 lines or at most 1 %, but no such label.
        remedy: what the error of ``strict`` advises; None: to fix the line or to leave ``strict`` out.

    Raises:
        ConfigError: ``max_bad`` is not a share, or is given with ``strict``.
    """

    def __init__(self, *, strict: bool = False, max_bad: str | float | None = None, remedy: str | None = None) -> None:
        self.strict = strict
        self.usual = DEFAULT_BAD  # share that may be bad without ``max_bad``
        self.remedy = remedy or "Fix the line, or leave strict out to set bad lines aside."
        if strict and max_bad is not None:
            raise ConfigError("strict allows no bad line, max_bad a share. Give one of them.", settings=("strict",))
        self.share = None if max_bad is None else parse_setting("max_bad", parse_share, max_bad)
        self.lines = self.bad = self.labels = 0
        self.first = ""
        self.broken: list[str] = []  # a message for each file that breaks off
        self._parts: list[LogPart] = []  # the parts with bad lines

    def add(self, part: LogPart) -> None:
        """Count the next part.

        Raises:
            DataError: there are more bad lines than allowed.
        """
        self.lines += part.rows + part.bad
        self.bad += part.bad
        if part.bad:
            self._parts.append(part)
            self._add_bad(part)
        if self.lines >= _EARLY:
            self.check()

    def _add_bad(self, part: LogPart) -> None:
        lines = list(_read(part))
        labels = [line for line in lines if line.label]
        self.labels += len(labels)

        def place(line: BadLine) -> str:
            return f"{part.name}:{part.lines_before + line.line + 1}: {line.reason}"

        if self.strict and not lines[0].broken:
            raise DataError(f"{place(lines[0])}. {self.remedy}", settings=("strict",))
        if labels and self.share is None:
            raise DataError(
                f"{place(labels[0])}. If the column holds such values, {_RULE}. If the line is damaged, fix it, "
                "or say what share of lines may be bad with max_bad, such as 0.1%.",
                settings=("max_bad",),
            )
        self.first = self.first or place(lines[0])
        if not part.broken:
            return
        found = f"{part.name} breaks off at line {part.lines_before + part.lines:,}: {lines[-1].reason}."
        if self.strict:
            raise DataError(
                f"{found} Get the file whole, or leave strict out to take what it has.", settings=("strict",)
            )
        if self.share is not None:
            raise DataError(
                f"{found} How many lines are lost is not known, so no share of max_bad can hold. Get the file whole, "
                "or leave max_bad out to take what it has.",
                settings=("max_bad",),
            )
        self.broken.append(f"{found} Get the file whole and prepare again.")

    def reasons(self) -> BadReasons:
        """Return the commonest reasons of the bad lines so far."""
        return BadReasons.among(line.reason for part in self._parts for line in _read(part))

    def check(self) -> None:
        """Raise :class:`DataError` if more than the allowed share of lines is bad."""
        share, by_default = (self.usual, " by default") if self.share is None else (self.share, "")
        if self.bad / max(self.lines, 1) <= share or (by_default and self.bad < _FEW):
            return
        labels = f" {self.labels:,} of them for their label: {_RULE}." if self.labels else ""
        raise DataError(
            f"{self.bad:,} of {self.lines:,} lines are bad ({self.bad / max(self.lines, 1):.3%}), "
            f"more than the {share:.3%} that max_bad allows{by_default}. The first: {self.first}.{labels} "
            f"{self.reasons()} To set them aside, allow more with max_bad, such as "
            f"{min(100, math.floor(100 * self.bad / max(self.lines, 1)) + 1)}%.",
            settings=("max_bad",),
        )
