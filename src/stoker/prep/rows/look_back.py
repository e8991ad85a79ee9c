"""Features that look back, worked out over rows of all files, a share of the groups at a time.

Rows are dealt to shares by a hash of their group. For each key, a record of every row - the key and the values that
features look at - goes to a temporary file, those of a piece of the rows sorted by share: so a share is one stretch of
every piece. It is small enough to be grouped and sorted within the cache of a processor. What it gives is written where
its records lay, and comes back into the order of the rows a piece at a time. So whatever there is of rows and shares,
they are read twice and written twice. Features of a key that holds another one, as (user, item) holds (item), are dealt
with those of that one. In memory lie the pieces and shares in work, and the distinct texts of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.base.ordered import ordered_map
from stoker.base.spool import Spool
from stoker.prep.features.fitted.keys import Coder, code_column
from stoker.prep.features.hashing import hash_values
from stoker.prep.features.past import Past, PastCount, Previous, Rank, work_out
from stoker.prep.features.past_kernels import deal
from stoker.prep.parse.dictionaries import splitmix

__all__ = ["LookBack", "can_deal"]

Array = npt.NDArray[Any]
_NUMBERS: dict[Any, str] = {
    pl.Int8: "i1", pl.Int16: "i2", pl.Int32: "i4", pl.Int64: "i8", pl.UInt8: "u1", pl.UInt16: "u2", pl.UInt32: "u4",
    pl.UInt64: "u8", pl.Float32: "f4", pl.Float64: "f8", pl.Boolean: "?", pl.Date: "i4", pl.Datetime: "i8",
    pl.Duration: "i8", pl.Time: "i8",
}  # fmt: skip


def can_deal(feature: Past, schema: pl.Schema) -> bool:
    """Whether all that a feature reads and makes are texts, numbers and moments, as records hold them."""
    made = work_out(schema.to_frame(), [feature]).schema
    return all(_number(dtype) or dtype == pl.String for dtype in (*map(schema.get, feature.inputs), *made.values()))


def _number(dtype: Any) -> str | None:
    """NumPy's type of what is behind a Polars type; None: it has none."""
    return _NUMBERS.get(dtype.base_type())


class _Records:
    """How columns of some types lie in records: each a value, and whether it is there; of texts their codes.

    Args:
        columns: name -> Polars type.
        coder: of the texts.
        short: columns of whole numbers that 32 bits hold.
        mark: put before a name when the coder is asked.
    """

    def __init__(self, columns: dict[str, Any], coder: Coder, short: Collection[str], mark: str = "") -> None:
        self.columns, self._coder, self._mark = columns, coder, mark
        types = [
            (f"v{i}", _number(dtype) if dtype != pl.String and name not in short else "i4")
            for i, (name, dtype) in enumerate(columns.items())
        ]
        self.dtype = np.dtype([*types, *((f"m{i}", "?") for i in range(len(columns)))])

    def encoded(self, series: pl.Series) -> tuple[Array, Array | bool]:
        """Values as they lie in records, and where they are there (True: everywhere)."""
        if series.dtype == pl.String:
            return self._coder.add(self._mark + series.name, series), True
        there: Array | bool = series.is_not_null().to_numpy() if series.null_count() else True
        whole = series.to_physical()
        if not isinstance(there, bool):
            whole = whole.fill_null(False if whole.dtype == pl.Boolean else 0)
        return whole.to_numpy(), there

    def fill(self, records: Array, number: int, values: Array, there: Array | bool) -> None:
        records[f"v{number}"], records[f"m{number}"] = values, there

    def codes(self, records: Any, number: int) -> pl.Series:
        """The codes of a column of texts."""
        return pl.Series(np.ascontiguousarray(records[f"v{number}"]))

    def decoded(self, records: Any, number: int, name: str) -> pl.Series:
        """The column, as it was."""
        dtype = self.columns[name]
        values = np.ascontiguousarray(records[f"v{number}"], _number(dtype))
        if dtype == pl.String:
            return self._coder.values(self._mark + name, values).alias(name)
        series = pl.Series(name, values)
        there = records[f"m{number}"]
        if not there.all():
            series = series.set(pl.Series(~there), None)
        return series if series.dtype == dtype else series.cast(dtype)


class _Group:
    """The features that are dealt by one key, the records of what they read, and those of what they make."""

    def __init__(
        self, by: tuple[str, ...], features: list[Past], schema: pl.Schema, coder: Coder, short: Collection[str]
    ) -> None:
        self.by, self.features = by, features
        self.keys = dict.fromkeys(name for feature in features for name in feature.by)
        self.values = dict.fromkeys(name for feature in features for name in feature.values)
        columns = dict.fromkeys((*self.keys, *self.values))
        self.given = _Records({name: schema[name] for name in columns}, coder, short)
        made = work_out(schema.to_frame(), features).schema
        counted = {one.name for one in features if isinstance(one, PastCount | Rank)}
        taken = {one.name for one in features if isinstance(one, Previous) and one.column in short}
        self.made = _Records(dict(made), coder, counted | taken, "made ")

    def rows(self, records: Array) -> pl.DataFrame:
        """What the features read. Texts that are keys come as codes."""
        found = []
        for number, (name, dtype) in enumerate(self.given.columns.items()):
            if name in self.values:
                found.append(self.given.decoded(records, number, name))
            if name in self.keys and (dtype == pl.String or name not in self.values):
                if dtype == pl.String:
                    alias = code_column(name) if name in self.values else name
                    found.append(self.given.codes(records, number).alias(alias))
                else:
                    found.append(self.given.decoded(records, number, name))
        return pl.DataFrame(found)


class LookBack:
    """Works features out; a context manager, which closes its temporary files.

    Args:
        features: all inputs of which are there, none made by another of them; :func:`can_deal` of each.
        schema: columns of the rows.
        sizes: rows of each piece.
        shares: into how many groups are dealt.
        threads: that work.
        folder: of the temporary files.
        short: columns of whole numbers that 32 bits hold, as far as is known.

    Raises:
        OSError: from every method: the disk is full or fails.
    """

    def __init__(
        self,
        features: Sequence[Past],
        schema: pl.Schema,
        sizes: Sequence[int],
        shares: int,
        threads: int,
        folder: Path,
        short: Collection[str] = (),
    ) -> None:
        coder = Coder()
        self._groups = [_Group(by, some, schema, coder, short) for by, some in _dealt(features).items()]
        self.columns = list(dict.fromkeys(name for group in self._groups for name in group.given.columns))
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._shares, self._threads, self._folder = shares, threads, folder
        # Of each key and piece, where the records of every share begin, counted from the first record of all.
        self._begins = np.zeros((len(self._groups), len(sizes), shares + 1), np.int64)
        self._open = ExitStack()

    def __enter__(self) -> LookBack:
        groups = self._groups
        self._given = [self._open.enter_context(Spool(group.given.dtype, self._folder)) for group in groups]
        self._made = [self._open.enter_context(Spool(group.made.dtype, self._folder)) for group in groups]
        self._order = [self._open.enter_context(Spool(np.int32, self._folder)) for _ in groups]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def run(self, read: Callable[[int], pl.DataFrame]) -> Iterator[pl.DataFrame]:
        """The features of the rows of each piece, in order; ``read`` gives the :attr:`columns` of a piece."""
        pieces = range(len(self._starts) - 1)
        for piece, dealt in enumerate(ordered_map(lambda at: self._deal(read(at)), pieces, self._threads)):
            for number, (begins, records, order) in enumerate(dealt):
                self._begins[number, piece] = self._starts[piece] + begins
                self._given[number].add(records)
                self._order[number].add(order)
        jobs = [(number, share) for number in range(len(self._groups)) for share in range(self._shares)]
        for _ in ordered_map(self._share, jobs, self._threads):
            pass
        for spool in self._given:
            spool.close()
        yield from ordered_map(self._back, pieces, self._threads)

    def _deal(self, rows: pl.DataFrame) -> list[tuple[Array, Array, Array]]:
        """For each key: where its shares begin, the records by share, and the row of each."""
        hashes: dict[str, Array] = {}
        columns: dict[str, tuple[Array, Array | bool]] = {}
        found = []
        for group in self._groups:
            for name in group.given.columns:
                if name not in columns:
                    columns[name] = group.given.encoded(rows.get_column(name))
            for name in group.by:
                if name not in hashes:
                    series = rows.get_column(name)
                    text = series.dtype == pl.String
                    hashes[name] = splitmix(columns[name][0].astype(np.uint64)) if text else hash_values(series)
            begins, order = np.zeros(self._shares + 1, np.int64), np.empty(rows.height, np.int32)
            deal(_share_of([hashes[name] for name in group.by], self._shares), begins, order)
            records = np.empty(rows.height, group.given.dtype)
            for number, name in enumerate(group.given.columns):
                values, there = columns[name]
                group.given.fill(records, number, values[order], there if isinstance(there, bool) else there[order])
            found.append((begins, records, order))
        return found

    def _share(self, job: tuple[int, int]) -> None:
        """Work out the features of one key for one share of its groups."""
        number, share = job
        group = self._groups[number]
        begins, ends = self._begins[number, :, share], self._begins[number, :, share + 1]
        places = np.concatenate([[0], np.cumsum(ends - begins)]).tolist()
        spans = list(zip(begins.tolist(), ends.tolist(), places[:-1], places[1:], strict=True))
        records = np.empty(places[-1], group.given.dtype)
        for begin, end, first, last in spans:
            if begin < end:
                self._given[number].read_into(begin, records[first:last])
        found = work_out(group.rows(records), group.features)
        made = np.empty(len(records), group.made.dtype)
        for place, series in enumerate(found.get_columns()):
            group.made.fill(made, place, *group.made.encoded(series))
        for begin, end, first, last in spans:
            if begin < end:
                self._made[number].write(begin, made[first:last])

    def _back(self, piece: int) -> pl.DataFrame:
        """The outputs of a piece in the order of its rows."""
        begin, end = int(self._starts[piece]), int(self._starts[piece + 1])
        series = []
        for number, group in enumerate(self._groups):
            made, order = self._made[number].read(begin, end), self._order[number].read(begin, end)
            for place, name in enumerate(group.made.columns):
                back = {}
                for field in (f"v{place}", f"m{place}"):
                    back[field] = np.empty(len(made), made.dtype[field])
                    back[field][order] = made[field]
                series.append(group.made.decoded(back, place, name))
        return pl.DataFrame(series)


def _dealt(features: Sequence[Past]) -> dict[tuple[str, ...], list[Past]]:
    """The features by the key that they are dealt by: one within their own, the one whose records hold the most of what
    they read."""
    found: dict[tuple[str, ...], list[Past]] = {}
    for feature in sorted(features, key=lambda one: len(one.by)):
        within = [by for by in found if set(by) <= set(feature.by)]
        missing = {
            by: len(set(feature.inputs).difference(*(one.inputs for one in found[by])))
            for by in within
        }  # fmt: skip
        by = min(within, key=lambda one: missing[one], default=feature.by)
        found.setdefault(by, []).append(feature)
    return found


def _share_of(hashes: Sequence[Array], shares: int) -> Array:
    """[n] the share of groups whose columns hash so."""
    mixed = hashes[0]
    for other in hashes[1:]:
        mixed = splitmix(mixed) ^ other
    return (splitmix(mixed) % np.uint64(shares)).astype(np.int64)
