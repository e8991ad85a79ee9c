"""The last pass over finished parts: shards in which every value is its id."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.errors import DataError
from stoker.prep.fit.build_tables import count_codes
from stoker.prep.fit.split_rules import PartRows
from stoker.prep.fit.transforms import DenseFit, blocks, dense_values
from stoker.prep.parse.layout import Layout, feature_codes, raw_columns
from stoker.prep.schema import CategoricalColumn
from stoker.prep.stages.parts import Part, PartFile

__all__ = ["Encoder", "Slice", "Target"]

Array = npt.NDArray[Any]
Open = Callable[[PartRows], Part]
Assign = Callable[[PartRows], npt.NDArray[np.uint8]]
RowsOf = Callable[[PartRows], npt.NDArray[np.int64]]  # the rows of a part that belong to the split, in order


def _raw_value(arrays: Part, index: int, column: CategoricalColumn, code: int) -> str:
    """The value behind a code above 0, after fill and modulo."""
    if column.type == "string":
        ends = arrays[f"ends.{index}"]
        return arrays[f"bytes.{index}"][ends[code - 1] : ends[code]].tobytes().decode()
    value = arrays[f"values.{index}"][code - 1]
    if column.type == "hex":
        return f"{value.view(np.uint64):x}"
    return str(value.view(np.float64) if column.type == "float" else value)


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Rows [begin, end) of one part's rows in a split."""

    part: PartRows
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the rows of a slice go."""

    slice: Slice
    arrays: dict[str, Array]  # the tensors of the shard
    row: int  # of the shard: the first
    id: int  # of the flat ids of a shard with sequences: the first


class Encoder:
    """Makes shards of parts and finished tables.

    Args:
        layout: of the parts.
        open_part: opens a part.
        tables: work file of every table by name.
        fit: of the dense columns.
        wide: whether ids need int64.
    """

    def __init__(
        self,
        layout: Layout,
        open_part: Open,
        tables: Mapping[str, Path],
        fit: Sequence[DenseFit],
        *,
        wide: bool,
    ) -> None:
        self.layout, self._open, self._fit = layout, open_part, fit
        self._tables = dict(tables)
        self._id_type: type[np.integer[Any]] = np.int64 if wide else np.int32
        self._ids: dict[str, tuple[Array, Array]] = {}  # of each table: all ids, and where those of a dictionary begin
        of_table: dict[str, int] = defaultdict(int)  # features
        self._rank: list[int] = []  # of each feature among the features of its table
        for column in layout.features:
            name = column.table_name
            self._rank.append(of_table[name])
            of_table[name] += 1
            if column.hash_buckets is None and name not in self._ids:
                with PartFile(self._tables[name]) as arrays:
                    # Mapped: the system caches what there is room for.
                    self._ids[name] = arrays["ids"], np.array(arrays["starts"])
        self._width = of_table

    def _ids_of(self, part: PartRows, index: int, codes: Array) -> Array:
        """Return the ids behind codes of a feature in a part; codes of hash buckets are ids."""
        column = self.layout.features[index]
        if column.hash_buckets is not None:
            return codes
        ids, starts = self._ids[column.table_name]
        place = part.index * self._width[column.table_name] + self._rank[index]
        found: Array = ids[starts[place] : starts[place + 1]][codes]
        return found

    def without_ids(self, part: PartRows, place_of: Callable[[PartRows, int], str]) -> npt.NDArray[np.bool_]:
        """Return the rows in which a column with oov="drop" has a value without id.

        ``place_of`` words where a row of a part stands, for the error.

        Raises:
            DataError: a column with oov="error" has one.
        """
        drop = np.zeros(part.rows, np.bool_)
        with self._open(part) as arrays:
            for index, column in enumerate(self.layout.features):
                if column.oov == "reserved" or column.hash_buckets is not None:
                    continue
                codes, lengths = feature_codes(arrays, self.layout, index)
                unknown = (codes > 0) & (self._ids_of(part, index, codes) == 0)
                rows = np.repeat(np.arange(part.rows), 1 if lengths is None else lengths)[unknown]
                if column.oov == "drop":
                    drop[rows] = True
                elif rows.size:
                    value = _raw_value(arrays, index, column, int(codes[unknown][0]))
                    raise DataError(
                        f"{place_of(part, int(rows[0]))} has {value!r} in {column.name}, which got no id in training "
                        f"(min_count {column.min_count}), and the column's oov policy is error. "
                        "Use oov = 'reserved' for id 0, or 'drop' to leave such rows out."
                    )
        return drop

    def count(
        self, parts: Sequence[PartRows], train_rows: Callable[[PartRows], npt.NDArray[np.bool_] | None]
    ) -> dict[str, npt.NDArray[np.int64]]:
        """Return the training occurrences by id of every table, counted again after rows were dropped."""
        counts = {}
        for name, path in self._tables.items():
            with PartFile(path) as arrays:
                counts[name] = np.zeros(arrays.size("counts"), np.int64)
        for part in parts:
            chosen = train_rows(part)
            if chosen is None:
                continue
            with self._open(part) as arrays:
                for index, column in enumerate(self.layout.features):
                    by_code = count_codes(arrays, self.layout, index, chosen, 0)
                    ids = self._ids_of(part, index, np.arange(len(by_code)))
                    np.add.at(counts[column.table_name], ids, by_code)
        return counts

    def allocate(self, slices: Sequence[Slice], rows_of: RowsOf) -> list[Target]:
        """Make the tensors of one shard, not filled yet; return where each of its slices goes."""
        sizes = [piece.end - piece.begin for piece in slices]
        n, width, bags = sum(sizes), len(self.layout.features), bool(self.layout.sequences)
        ids = [self._count_ids(piece, rows_of) if bags else 0 for piece in slices]
        arrays: dict[str, Array] = {
            "dense": np.empty((n, len(self.layout.schema.dense_names)), np.float32), "labels": np.empty(n, np.float32),
            "ids": np.empty(sum(ids) if bags else (n, width), self._id_type),
        }  # fmt: skip
        if bags:
            arrays |= {"lengths": np.empty((n, width), np.int32), "row_offsets": np.empty(n + 1, np.int64)}
            arrays["row_offsets"][0] = 0
        firsts = zip(slices, accumulate(sizes, initial=0), accumulate(ids, initial=0), strict=False)
        return [Target(slice=piece, arrays=arrays, row=row, id=first) for piece, row, first in firsts]

    def _count_ids(self, piece: Slice, rows_of: RowsOf) -> int:
        rows = rows_of(piece.part)[piece.begin : piece.end]
        with self._open(piece.part) as arrays:
            bags = sum(int(arrays[f"counts.{index}"][rows].sum(dtype=np.int64)) for index in self.layout.sequences)
        return bags + len(rows) * len(self.layout.one_hot)

    def fill(self, target: Target, rows_of: RowsOf) -> tuple[int, int, list[list[int]]]:
        """Write the rows of a slice to their shard; return how many have label 1 and how many none, and zero and all
        ids by feature.

        Slices of a shard may be filled in any order, and several at a time.
        """
        piece, out = target.slice, target.arrays
        rows = rows_of(piece.part)[piece.begin : piece.end]
        here = slice(target.row, target.row + len(rows))
        labels = out["labels"][here]
        with self._open(piece.part) as arrays:
            labels[:] = arrays["labels"][rows]
            if "dense" in arrays:
                out["dense"][here] = arrays["dense"][rows]
            else:
                raw = raw_columns(arrays, self.layout)
                dense_values(self.layout.columns, raw, self._fit, rows=rows, out=out["dense"], at=target.row)
            write = self._write_bags if self.layout.sequences else self._write_ids
            zeros = write(arrays, rows, target)
        everything = [len(rows)] * len(zeros)
        if self.layout.sequences:
            everything = out["lengths"][here].sum(axis=0).tolist()
        absent = int(np.count_nonzero(np.isnan(labels))) if self.layout.label.optional else 0
        return int(np.count_nonzero(labels == 1)), absent, [zeros.tolist(), everything]

    def _write_ids(self, arrays: Part, rows: Array, target: Target) -> Array:
        """Write the ids of some rows, one per feature; return how many are zero by feature."""
        zeros = np.zeros(len(self.layout.features), np.int64)
        codes = [arrays[f"codes.{index}"] for index in self.layout.one_hot]
        for begin, chosen in blocks(len(rows), rows):
            out = target.arrays["ids"][target.row + begin : target.row + begin + len(chosen)]
            for index, column in enumerate(codes):
                ids = self._ids_of(target.slice.part, index, column[chosen])
                out[:, index] = ids
                zeros[index] += len(ids) - np.count_nonzero(ids)
        return zeros

    def _write_bags(self, arrays: Part, rows: Array, target: Target) -> Array:
        """Write the ids of some rows, bag by bag, their lengths and offsets; return how many are zero by feature."""
        layout, at, first, width = self.layout, target.id, target.row, len(self.layout.features)
        zeros = np.zeros(width, np.int64)
        begins = {index: _offsets(arrays[f"counts.{index}"]) for index in layout.sequences}
        for begin, chosen in blocks(len(rows), rows):
            here = slice(first + begin, first + begin + len(chosen))
            lengths = target.arrays["lengths"][here]
            lengths.fill(1)
            for index in layout.sequences:
                lengths[:, index] = arrays[f"counts.{index}"][chosen]
            places = at + _offsets(lengths)  # where each bag begins, row by row
            target.arrays["row_offsets"][here.start + 1 : here.stop + 1] = places[width::width]
            places, at = places[:-1].reshape(lengths.shape), int(places[-1])
            for index in range(width):
                source, to = chosen, places[:, index]
                if index in begins:
                    within = _within(lengths[:, index])
                    source = np.repeat(begins[index][chosen], lengths[:, index]) + within
                    to = np.repeat(to, lengths[:, index]) + within
                ids = self._ids_of(target.slice.part, index, arrays[f"codes.{index}"][source])
                target.arrays["ids"][to] = ids
                zeros[index] += len(ids) - np.count_nonzero(ids)
        return zeros


def _offsets(lengths: Array) -> npt.NDArray[np.int64]:
    """Return where each of some lists begins, one after the other, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _within(lengths: Array) -> npt.NDArray[np.int64]:
    """Return 0, 1, ... for the values of each list."""
    return np.arange(lengths.sum(dtype=np.int64)) - np.repeat(_offsets(lengths)[:-1], lengths)
