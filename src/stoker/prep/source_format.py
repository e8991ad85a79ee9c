"""The format of raw files."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.checks import choice, fail

FORMATS = ("auto", "csv", "parquet", "jsonl")
ENCODINGS = ("utf-8", "latin-1")


@dataclass(frozen=True, kw_only=True)
class SourceFormat:
    """The format of the raw files. Compression (.gz, .zst) is detected from the bytes.

    A quote opens a quoted field only at the start of a field (RFC 4180). Separators and line breaks in it are text, and
    two quotes are one. If no closing quote follows within 1,000 lines or 1 MiB, only the quote's own line is bad.
    """

    kind: str = "auto"  # auto (by file name) | csv (any delimited text) | parquet | jsonl
    separator: str | None = None  # between fields; None: a comma, or a tab for .tsv and .txt
    columns: tuple[str, ...] = ()  # names of the fields in order, for files without a header line
    quote: str | None = '"'  # None: quotes are ordinary characters
    encoding: str = "utf-8"  # utf-8 | latin-1
    decimal: str = "."  # of dense values and labels: "." | ",", which leaves out points between three digits
    null_values: tuple[str, ...] = ()  # texts that mean missing, besides the empty field, e.g. "NULL", "\\N"

    def __post_init__(self) -> None:
        choice("source", "kind", self.kind, FORMATS)
        choice("source", "encoding", self.encoding, ENCODINGS)
        choice("source", "decimal", self.decimal, (".", ","))
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "null_values", tuple(self.null_values))
        object.__setattr__(self, "quote", self.quote or None)
        if self.separator is not None and (not self.separator or "\n" in self.separator):
            fail("source", "separator", f"{self.separator!r} cannot separate fields. Write for example ',' or '\\t'")
        if self.quote is not None and len(self.quote.encode()) != 1:
            fail("source", "quote", f"{self.quote!r} is not one ASCII character; use '\"' or leave it out")
        if twice := sorted({name for name in self.columns if self.columns.count(name) > 1}):
            fail("source", "columns", f"{twice} are named twice")
