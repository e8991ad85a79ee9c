"""Joining metadata: columns of another file, found by a key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stoker.base.checks import fail
from stoker.base.errors import DataError
from stoker.prep.features.base import texts
from stoker.prep.features.learned import Learned, LearnedTable, look_up

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Merge"]


@dataclass(frozen=True, kw_only=True)
class Merge(Learned):
    """Columns of ``file``, joined where its ``key`` equals ``on``; missing for keys that the file does not have.

    The file is read once, when a dataset is prepared, and kept with it: new rows meet the metadata of then.

    Args:
        on: column of the rows.
        file: delimited text, Parquet or JSON lines, with one line per key. A relative path in a schema file is looked
            for beside that file first, then, as any other, in the working directory.
        columns: of the file, to join as text; their names in the result are ``name_<column>``.
        number_columns: as ``columns``, but numbers.
        key: column of the file; empty: called as ``on``.
    """

    kind: ClassVar[str] = "merge"
    beside: ClassVar[Path | None] = None  # folder of the schema file; no setting, so that datasets do not hang on it
    on: str
    file: str
    columns: tuple[str, ...] = ()
    number_columns: tuple[str, ...] = ()
    key: str = ""

    def check(self) -> None:
        texts(self.where, "columns", (*self.columns, *self.number_columns))
        if not self.file:
            fail(self.where, "file", "is empty")

    def of_schema(self, folder: Path) -> Merge:
        """The same feature, of a schema file in ``folder``."""
        made = replace(self)
        object.__setattr__(made, "beside", folder)
        return made

    @property
    def path(self) -> Path:
        """The file: beside the schema file if it is there, else seen from the working directory."""
        near = None if self.beside is None else self.beside / self.file
        return near if near is not None and near.is_file() else Path(self.file)

    def check_file(self) -> None:
        """Look whether the file is there and has the columns. Raises :class:`DataError`."""
        from stoker.prep.features.tables import open_table

        if not self.path.is_file():
            places = [Path.cwd()] if self.beside is None else [self.beside.absolute(), Path.cwd()]
            listed = "" if Path(self.file).is_absolute() else f" in {' or '.join(map(str, dict.fromkeys(places)))}"
            raise DataError(f"{self.where}: there is no file {self.file!r}{listed}. Check the path.")
        open_table(self.path, self._types())

    def _types(self) -> dict[str, str]:
        """Columns of the file that are read."""
        texts_, numbers = dict.fromkeys(self.columns, "string"), dict.fromkeys(self.number_columns, "float")
        return {self.key or self.on: "string", **texts_, **numbers}

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.on,)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(f"{self.name}_{column}" for column in (*self.columns, *self.number_columns))

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.on,)

    @property
    def types(self) -> dict[str, Any]:
        import polars as pl

        texts_, numbers = self.outputs[: len(self.columns)], self.outputs[len(self.columns) :]
        return {**dict.fromkeys(texts_, pl.String), **dict.fromkeys(numbers, pl.Float64)}

    def learn(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> LearnedTable:
        import polars as pl

        from stoker.prep.features.tables import read_table

        key = self.key or self.on
        if key in (*self.columns, *self.number_columns):
            raise DataError(f"{self.where}: {key!r} is the key of {self.file} and cannot be joined, too. Leave it out.")
        self.check_file()
        types = self._types()
        table = read_table(self.path, types).rename({c: f"{self.name}_{c}" for c in types if c != key})
        there = rows.collect_schema()[self.on]
        if not there.is_integer() and there != pl.String:
            raise DataError(f"{self.where}: column {self.on!r} holds {there}, not text or whole numbers.")
        # Keys that are no such number can match no row; "7" and "07" are the same one.
        table = table.rename({key: self.on}).cast({self.on: there}, strict=False).drop_nulls(self.on)
        twice = table.filter(table[self.on].is_duplicated())
        if twice.height:
            raise DataError(
                f"{self.where}: {self.file} has {twice.height:,} lines whose {key} another line has, too, for example "
                f"{twice[self.on][0]!r}. Keep one line for each."
            )
        return LearnedTable(table=table, distinct=True)

    def attach(self, frame: pl.LazyFrame, learned: LearnedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        return look_up(frame, {self.on: self.on}, learned.table, {name: name for name in self.outputs})
