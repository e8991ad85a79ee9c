"""What a feature learned: one row per distinct key, made at once or when it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    import polars as pl

    from stoker.prep.features.fitted.keys import Coder

__all__ = ["FoldSums", "Later", "LearnedTable", "coded", "codes_of"]

T = TypeVar("T")


class LearnedTable:
    """What one feature learned: kept in the dataset and used unchanged on new rows.

    Args:
        table: one row per distinct key; or what makes it, when it is asked for first.
        facts: plain values.
        folds: arrays by name: each key's sums by fold; for training rows, and not kept with a dataset.
        keys: :class:`~stoker.prep.features.fitted.keys.KeyTable` of the rows of ``table``, by a Coder.
        numbers: of the table, as encoding looks them up.
    """

    def __init__(
        self,
        *,
        table: pl.DataFrame | Callable[[], pl.DataFrame],
        facts: dict[str, Any] | None = None,
        folds: Mapping[str, Any] | None = None,
        keys: Any = None,
        numbers: Any = None,
    ) -> None:
        self._table = table
        self.facts: dict[str, Any] = {} if facts is None else facts
        self.folds: Any = folds
        self.keys, self.numbers = keys, numbers
        self._lock = threading.Lock()

    @property
    def table(self) -> pl.DataFrame:
        """One row per distinct key."""
        with self._lock:
            if callable(self._table):
                self._table = self._table()
            return self._table

    def bind(self, names: Sequence[str], coder: Coder) -> None:
        """Number the keys, of the columns ``names`` of the table, if that is not done yet."""
        from stoker.prep.features.fitted.keys import KeyTable

        if self.keys is None and names:
            self.keys = KeyTable.of([coder.add(name, self.table.get_column(name)) for name in names])

    def places(self, rows: pl.DataFrame, names: Sequence[str]) -> Any:
        """[n] row of the table for each of some rows that have codes, -1 where there is none."""
        if self.keys.column in rows.columns:  # looked up with those of other features
            return rows.get_column(self.keys.column).to_numpy()
        return self.keys.find(codes_of(rows, names))


class Later(Generic[T]):
    """A value that is made when it is asked for first, once."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._lock = threading.Lock()
        self._made: T

    def __call__(self) -> T:
        with self._lock:
            if self._make is not None:
                self._made, self._make = self._make(), None
            return self._made


class FoldSums(Mapping[str, Any]):
    """``LearnedTable.folds`` of rows in memory."""

    _names: ClassVar = ("first", "fold_of", "held")

    def __init__(self, sums: Later[tuple[Any, ...]]) -> None:
        self._sums = sums

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._sums()[self._names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def coded(names: Sequence[str]) -> list[str]:
    """Where the codes of some columns lie."""
    from stoker.prep.features.fitted.keys import code_column

    return [code_column(name) for name in names]


def codes_of(rows: pl.DataFrame, names: Sequence[str]) -> list[Any]:
    """The codes of some columns, each int32 [n]."""
    return [rows.get_column(name).to_numpy() for name in coded(names)]
