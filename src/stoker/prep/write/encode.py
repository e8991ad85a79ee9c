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
from stoker.prep.fit.split_rules import PartRows, SplitFile
from stoker.prep.fit.transforms import DenseFit, blocks, dense_values
from stoker.prep.parse.layout import Layout, feature_codes, raw_columns
from stoker.prep.schema import CategoricalColumn
from stoker.prep.stages.parts import PartFile

__all__ = ["Encoder", "Shard", "Slice"]

Array = npt.NDArray[Any]


def _raw_value(arrays: PartFile, index: int, column: CategoricalColumn, code: int) -> str:
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
class Shard:
    """The rows of a shard, and what its record says of them."""

    arrays: dict[str, Array]  # tensors by name
    positives: int  # rows with label 1
    absent: int  # rows without label
    unknown: list[list[int]]  # [2, F] ids that are 0, and all ids, by feature


class Encoder:
    """Makes shards of parts and finished tables.

    Args:
        layout: of the parts.
        splits: of the rows.
        tables: work file of every table by name.
        fit: of the dense columns.
        wide: whether ids need int64.
    """

    def __init__(
        self, layout: Layout, splits: SplitFile, tables: Mapping[str, Path], fit: Sequence[DenseFit], *, wide: bool
    ) -> None:
        self.layout, self._splits, self._fit = layout, splits, fit
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
        with part.open() as arrays:
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

    def count(self, parts: Sequence[PartRows]) -> dict[str, npt.NDArray[np.int64]]:
        """Return the training occurrences by id of every table, counted again after rows were dropped."""
        counts = {}
        for name, path in self._tables.items():
            with PartFile(path) as arrays:
                counts[name] = np.zeros(arrays.size("counts"), np.int64)
        for part in parts:
            chosen = self._splits.train_rows(part)
            if chosen is None:
                continue
            with part.open() as arrays:
                for index, column in enumerate(self.layout.features):
                    by_code = count_codes(arrays, self.layout, index, chosen, 0)
                    ids = self._ids_of(part, index, np.arange(len(by_code)))
                    np.add.at(counts[column.table_name], ids, by_code)
        return counts

    def encode(self, slices: Sequence[Slice], split: int) -> Shard:
        """Make the shard of some rows of a split."""
        chosen = [(piece.part, self._splits.rows(piece.part, split)[piece.begin : piece.end]) for piece in slices]
        sizes = [len(rows) for _, rows in chosen]
        n, width, bags = sum(sizes), len(self.layout.features), bool(self.layout.sequences)
        ids = [self._count_ids(part, rows) if bags else 0 for part, rows in chosen]
        out: dict[str, Array] = {
            "dense": np.empty((n, len(self.layout.schema.dense_names)), np.float32), "labels": np.empty(n, np.float32),
            "ids": np.empty(sum(ids) if bags else (n, width), self._id_type),
        }  # fmt: skip
        if bags:
            out |= {"lengths": np.empty((n, width), np.int32), "row_offsets": np.empty(n + 1, np.int64)}
            out["row_offsets"][0] = 0
        zeros = np.zeros(width, np.int64)
        firsts = zip(accumulate(sizes, initial=0), accumulate(ids, initial=0), strict=True)
        for (part, rows), (at, first) in zip(chosen, firsts, strict=False):
            zeros += self._fill(out, part, rows, at, first)
        labels = out["labels"]
        return Shard(
            arrays=out,
            positives=int(np.count_nonzero(labels == 1)),
            absent=int(np.count_nonzero(np.isnan(labels))) if self.layout.label.optional else 0,
            unknown=[zeros.tolist(), (out["lengths"].sum(axis=0) if bags else np.full(width, n)).tolist()],
        )

    def _count_ids(self, part: PartRows, rows: Array) -> int:
        with part.open() as arrays:
            bags = sum(int(arrays[f"counts.{index}"][rows].sum(dtype=np.int64)) for index in self.layout.sequences)
        return bags + len(rows) * len(self.layout.one_hot)

    def _fill(self, out: dict[str, Array], part: PartRows, rows: Array, at: int, first: int) -> Array:
        """Write rows of a part to those from ``at`` on of a shard, and its ids from ``first`` on if it has sequences;
        return how many ids are 0 by feature."""
        here = slice(at, at + len(rows))
        with part.open() as arrays:
            out["labels"][here] = arrays["labels"][rows]
            if "dense" in arrays:
                out["dense"][here] = arrays["dense"][rows]
            else:
                raw = raw_columns(arrays, self.layout)
                dense_values(self.layout.columns, raw, self._fit, rows=rows, out=out["dense"], at=at)
            if self.layout.sequences:
                return self._write_bags(arrays, out, part, rows, at, first)
            return self._write_ids(arrays, out["ids"][here], part, rows)

    def _write_ids(self, arrays: PartFile, out: Array, part: PartRows, rows: Array) -> Array:
        """Write the ids of some rows, one per feature, to ``out``; return how many are 0 by feature."""
        zeros = np.zeros(len(self.layout.features), np.int64)
        codes = [arrays[f"codes.{index}"] for index in self.layout.one_hot]
        for begin, chosen in blocks(len(rows), rows):
            for index, column in enumerate(codes):
                ids = self._ids_of(part, index, column[chosen])
                out[begin : begin + len(chosen), index] = ids
                zeros[index] += len(ids) - np.count_nonzero(ids)
        return zeros

    def _write_bags(
        self, arrays: PartFile, out: dict[str, Array], part: PartRows, rows: Array, row: int, at: int
    ) -> Array:
        """Write the ids of some rows, bag by bag, their lengths and offsets; return how many are 0 by feature.

        The rows go to those from ``row`` on of the shard, their ids to those from ``at`` on.
        """
        layout, width = self.layout, len(self.layout.features)
        zeros = np.zeros(width, np.int64)
        begins = {index: _offsets(arrays[f"counts.{index}"]) for index in layout.sequences}
        for begin, chosen in blocks(len(rows), rows):
            here = slice(row + begin, row + begin + len(chosen))
            lengths = out["lengths"][here]
            lengths.fill(1)
            for index in layout.sequences:
                lengths[:, index] = arrays[f"counts.{index}"][chosen]
            places = at + _offsets(lengths)  # where each bag begins, row by row
            out["row_offsets"][here.start + 1 : here.stop + 1] = places[width::width]
            places, at = places[:-1].reshape(lengths.shape), int(places[-1])
            for index in range(width):
                source, to = chosen, places[:, index]
                if index in begins:
                    within = _within(lengths[:, index])
                    source = np.repeat(begins[index][chosen], lengths[:, index]) + within
                    to = np.repeat(to, lengths[:, index]) + within
                ids = self._ids_of(part, index, arrays[f"codes.{index}"][source])
                out["ids"][to] = ids
                zeros[index] += len(ids) - np.count_nonzero(ids)
        return zeros


def _offsets(lengths: Array) -> npt.NDArray[np.int64]:
    """Return where each of some lists begins, one after the other, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _within(lengths: Array) -> npt.NDArray[np.int64]:
    """Return 0, 1, ... for the values of each list."""
    return np.arange(lengths.sum(dtype=np.int64)) - np.repeat(_offsets(lengths)[:-1], lengths)
