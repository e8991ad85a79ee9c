"""Typed columns of a block of rows, whatever file they came from, and the lines that had to be left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["TEXT_CUT", "BadLine", "Block", "Field", "RawColumn", "careful_value", "cut_text"]

Array = npt.NDArray[Any]
TEXT_CUT = 200  # characters of a bad line that the quarantine keeps
_INT = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SPACE = " \t\n\r\v\f"  # around a number
_HEX = re.compile(r"[0-9a-fA-F]{1,16}")


@dataclass(frozen=True, kw_only=True)
class Field:
    """A raw column read as one type. Several features may ask for the same one."""

    column: str
    kind: str  # float | int | hex | string | datetime (text, or microseconds where the file is typed)
    separator: str | None = None  # of a list; None: a single value
    max_length: int = 0  # of a list
    keep: str = "last"
    required: bool = False  # an empty field makes the line bad
    optional: bool = False  # a file may lack the column, which is as if all its fields were empty
    kept: bool = False  # goes to the scores: a typed file's in the type that it has there, not as ``kind``


@dataclass(kw_only=True)
class RawColumn:
    """Values of a field: numbers with a mask, or texts. Lists add ``counts``."""

    values: Array | None = None  # [n] float64 (NaN where missing) or int64 (hex: the bits of a uint64)
    pieces: list[Array] | None = None  # numbers as their file has them, int64 too, until :meth:`numbers` is called
    missing: npt.NDArray[np.bool_] | None = None  # [n] for int64 values
    texts: pl.Series | None = None  # [n] strings, null where missing
    counts: npt.NDArray[np.int32] | None = None  # [rows]: how many of the values belong to each row

    @classmethod
    def empty(cls, kind: str, rows: int) -> RawColumn:
        """Return the column of a field whose value is missing in every row."""
        if kind in ("string", "datetime"):
            return cls(texts=pl.repeat(None, rows, dtype=pl.String, eager=True))
        if kind == "float":
            return cls(values=np.full(rows, np.nan))
        return cls(values=np.zeros(rows, np.int64), missing=np.ones(rows, np.bool_))

    def take(self, keep: npt.NDArray[np.bool_]) -> RawColumn:
        """Return the rows that ``keep`` marks."""
        each = keep if self.counts is None else np.repeat(keep, self.counts)
        return RawColumn(
            values=None if self.texts is not None else self.numbers()[each],
            missing=None if self.missing is None else self.missing[each],
            texts=None if self.texts is None else self.texts.filter(pl.Series(each, dtype=pl.Boolean)),
            counts=None if self.counts is None else self.counts[keep],
        )

    def __len__(self) -> int:
        """n: of lists, their items."""
        return len(self.numbers() if self.texts is None else self.texts)

    def numbers(self) -> Array:
        """Return the values [n] as one array."""
        if self.pieces is not None:
            self.values, self.pieces = np.concatenate(self.pieces, dtype=np.float64), None
        assert self.values is not None
        return self.values

    def absent(self) -> npt.NDArray[np.bool_]:
        """Return where the value is missing, [n]."""
        if self.texts is not None:
            return self.texts.is_null().to_numpy()
        if self.missing is not None:
            return self.missing
        absent: npt.NDArray[np.bool_] = np.isnan(self.numbers())
        return absent


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line that goes to the quarantine."""

    line: int  # counted from 0 within the block
    reason: str
    text: str
    label: bool = False  # its only fault is a label that is a number but neither 0 nor 1
    broken: bool = False  # stands for all that is lost of a file that breaks off here


@dataclass(kw_only=True)
class Block:
    """What one stretch of a file gave."""

    rows: int
    lines: int  # good, bad and skipped ones, for numbering what follows
    columns: dict[Field, RawColumn]
    row_line: npt.NDArray[np.int64]  # [rows] line within the block
    row_at: npt.NDArray[np.int64]  # [rows] what ``text_at`` knows each row by
    text_at: Callable[[int], str]  # the text of a row, for the quarantine
    bad: list[BadLine] = field(default_factory=list)
    frame: Any = None  # of a typed file: the Polars frame whose rows ``row_at`` names

    def drop(self, wrong: npt.NDArray[np.bool_], reason: Callable[[int], str], *, label: bool = False) -> None:
        """Move the rows that ``wrong`` marks to the bad lines."""
        for row in np.flatnonzero(wrong).tolist():
            text = self.text_at(int(self.row_at[row]))
            self.bad.append(BadLine(line=int(self.row_line[row]), reason=reason(row), text=text, label=label))
        self.bad.sort(key=lambda bad: bad.line)
        keep = ~wrong
        self.columns = {key: column.take(keep) for key, column in self.columns.items()}
        self.row_line, self.row_at = self.row_line[keep], self.row_at[keep]
        self.rows = int(keep.sum())

    def drop_labels(self, item: Field) -> None:
        """Move the rows whose label, a number, is neither 0 nor 1 to the bad lines; an optional one may be missing."""
        if self.columns[item].texts is not None:
            return
        values = self.columns[item].numbers()
        wrong = (values != 0) & (values != 1)
        if item.optional:
            wrong &= ~self.columns[item].absent()
        if wrong.any():
            self.drop(wrong, lambda row: f"column {item.column}: {values[row]:g} is neither 0 nor 1", label=True)


def careful_value(kind: str, text: str) -> float | int | None:
    """Return the value of a text that Polars refuses or reads otherwise; None if it is not of that type."""
    text = text.strip(_SPACE)
    if kind == "float" and _FLOAT.fullmatch(text):
        value = float(text)
        return value if np.isfinite(value) else None
    if kind == "int" and _INT.fullmatch(text):
        number = int(text)
        return number if -(2**63) <= number < 2**63 else None
    if kind == "hex" and _HEX.fullmatch(text):
        return int(text, 16)
    return None


def cut_text(line: bytes) -> str:
    """Return what the quarantine keeps of a line."""
    return line[: 4 * TEXT_CUT].decode("utf-8", "replace").rstrip("\r")[:TEXT_CUT]
