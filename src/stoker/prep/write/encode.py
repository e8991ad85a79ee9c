"""The last pass over finished parts: shards in which every value is its id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.errors import DataError
from stoker.prep.fit.split_rules import PartRows, SplitFile
from stoker.prep.fit.transforms import DenseFit, DenseSteps
from stoker.prep.parse.dictionary_kernels import count_codes
from stoker.prep.parse.layout import Layout, feature_codes, one_hot_codes, raw_columns
from stoker.prep.schema import CategoricalColumn
from stoker.prep.stages.parts import PartFile
from stoker.prep.write.encode_kernels import gather, gather_bags, write_rows

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
        self.layout, self._splits = layout, splits
        self._steps = DenseSteps(layout.columns, fit)
        self._tables = dict(tables)
        self._id_type: type[np.integer[Any]] = np.int64 if wide else np.int32
        self._starts: dict[str, Array] = {}
        self._ids: dict[str, Array] = {}
        self._last: tuple[int, Array, npt.NDArray[np.int64]] | None = None  # the part looked up last, and its ids
        of_table: dict[str, int] = {}
        self._rank: list[int] = []  # of each feature among the features of its table
        for column in layout.features:
            self._rank.append(of_table.get(column.table_name, 0))
            of_table[column.table_name] = self._rank[-1] + 1
        self._width = of_table
        for column in layout.features:
            if column.hash_buckets is None and column.table_name not in self._starts:
                with PartFile(self._tables[column.table_name]) as arrays:
                    self._starts[column.table_name] = np.array(arrays["starts"])
                    self._ids[column.table_name] = arrays["ids"]  # mapped: the system keeps what there is room for

    def lookup(self, part: PartRows) -> tuple[Array, npt.NDArray[np.int64]]:
        """Ids by code of all features of a part, one after the other, and where each feature's begin."""
        if self._last is None or self._last[0] != part.index:
            self._last = (part.index, *self._look_up(part))
        return self._last[1], self._last[2]

    def _look_up(self, part: PartRows) -> tuple[Array, npt.NDArray[np.int64]]:
        pieces, bases, at = [], [], 0
        for index, column in enumerate(self.layout.features):
            if column.hash_buckets is not None:
                ids = np.arange(column.hash_buckets + 1)
            else:
                starts = self._starts[column.table_name]
                position = part.index * self._width[column.table_name] + self._rank[index]
                ids = self._ids[column.table_name][starts[position] : starts[position + 1]]
            pieces.append(ids)
            bases.append(at)
            at += len(ids)
        flat = np.concatenate(pieces).astype(self._id_type) if pieces else np.empty(0, self._id_type)
        return flat, np.array(bases, np.int64)

    def without_ids(self, part: PartRows, place_of: Callable[[PartRows, int], str]) -> npt.NDArray[np.bool_]:
        """Rows in which a column with oov="drop" has a value without id.

        ``place_of`` words where a row of a part stands, for the error.

        Raises:
            DataError: a column with oov="error" has one.
        """
        lut, bases = self.lookup(part)
        drop = np.zeros(part.rows, np.bool_)
        with part.open() as arrays:
            for index, column in enumerate(self.layout.features):
                if column.oov == "reserved" or column.hash_buckets is not None:
                    continue
                codes, lengths = feature_codes(arrays, self.layout, index)
                unknown = (codes > 0) & (lut[bases[index] + codes.astype(np.int64)] == 0)
                rows = np.flatnonzero(unknown) if lengths is None else (
                    np.repeat(np.arange(part.rows), lengths)[unknown]
                )  # fmt: skip
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
        """Training occurrences by id of every table, counted afresh after rows were dropped."""
        counts = {}
        for name, path in self._tables.items():
            with PartFile(path) as arrays:
                counts[name] = np.zeros(arrays.size("counts"), np.int64)
        for part in parts:
            chosen = self._splits.train_rows(part)
            if chosen is None:
                continue
            lut, bases = self.lookup(part)
            bounds = [*bases.tolist(), len(lut)]
            with part.open() as arrays:
                for index, column in enumerate(self.layout.features):
                    codes, lengths = feature_codes(arrays, self.layout, index)
                    by_code = np.zeros(bounds[index + 1] - bounds[index], np.int64)
                    count_codes(codes, chosen if lengths is None else np.repeat(chosen, lengths), by_code)
                    np.add.at(counts[column.table_name], lut[bounds[index] : bounds[index + 1]], by_code)
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
            self._fill(out, part, rows, at, first, zeros)
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

    def _fill(self, out: dict[str, Array], part: PartRows, rows: Array, at: int, first: int, zeros: Array) -> None:
        """Write rows of a part to those from ``at`` on of a shard, and its ids from ``first`` on if it has sequences;
        add the ids that are 0 to ``zeros`` [F]."""
        lut, bases = self.lookup(part)
        with part.open() as arrays:
            if self.layout.sequences or "dense" in arrays:
                out["labels"][at : at + len(rows)] = arrays["labels"][rows]
                self._dense(arrays, rows, out["dense"], at)
                if self.layout.sequences:
                    self._bags(arrays, lut, bases, rows, out, at, first, zeros)
                else:
                    codes = one_hot_codes(arrays, self.layout)
                    gather(codes.addresses, codes.types, codes.rows, lut, bases, rows, out["ids"], at, zeros)
                return
            raw, codes = raw_columns(arrays, self.layout), one_hot_codes(arrays, self.layout)
            known, scales, places = arrays["labels"], self._steps.scales, self._steps.places
            for begin, end, tile in self._steps.tiles(raw, rows):
                write_rows(
                    tile, scales, places, out["dense"], codes.addresses, codes.types, codes.rows, lut, bases,
                    rows[begin:end], out["ids"], known, out["labels"], at + begin, zeros,
                )  # fmt: skip

    def _dense(self, arrays: PartFile, rows: Array, out: Array, at: int) -> None:
        if "dense" in arrays:
            out[at : at + len(rows)] = arrays["dense"][rows]
        else:
            self._steps.write(raw_columns(arrays, self.layout), rows, out, at)

    def _bags(
        self, arrays: PartFile, lut: Array, bases: Array, rows: Array, out: dict[str, Array], at: int, first: int,
        zeros: Array,
    ) -> None:  # fmt: skip
        """Write the ids of some rows, bag by bag, and their lengths and offsets."""
        layout = self.layout
        slots = np.array(
            [layout.one_hot.index(i) if i in layout.one_hot else -1 - layout.sequences.index(i)
             for i in range(len(layout.features))],
            np.int64,
        )  # fmt: skip
        stop = at + len(rows)
        lengths = out["lengths"][at:stop]
        lengths.fill(1)
        flat, bags, flat_base, bag_base = [], [], [], []
        flat_at, bag_at = 0, 0
        for index in layout.sequences:
            codes, counts = arrays[f"codes.{index}"], arrays[f"counts.{index}"]
            lengths[:, index] = counts[rows]
            flat.append(codes)
            bags.append(np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))
            flat_base.append(flat_at)
            bag_base.append(bag_at)
            flat_at += len(codes)
            bag_at += len(bags[-1])
        starts = np.full(len(rows) + 1, first)
        starts[1:] += np.cumsum(lengths.sum(axis=1, dtype=np.int64))
        out["row_offsets"][at + 1 : stop + 1] = starts[1:]
        one_hot = one_hot_codes(arrays, layout)
        gather_bags(
            one_hot.addresses, one_hot.types, one_hot.rows, slots, np.concatenate(flat), np.array(flat_base),
            np.concatenate(bags), np.array(bag_base), lut, bases, rows, lengths, starts, out["ids"], zeros,
        )  # fmt: skip
