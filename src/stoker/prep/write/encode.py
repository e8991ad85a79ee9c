"""Encode finished parts into shards, in which every value is its id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.errors import DataError
from stoker.prep.fit.dense import DenseFit, blocks, dense_values
from stoker.prep.fit.fitting import count_codes
from stoker.prep.fit.split_rules import SplitFile
from stoker.prep.parse.layout import Layout, feature_codes, raw_columns
from stoker.prep.schema import CategoricalColumn
from stoker.prep.stages.parts import Arrays, LogPart, open_part

Array = npt.NDArray[Any]
PartSlice = tuple[LogPart, int, int]  # rows [begin, end) of one part's rows in a split


@dataclass(frozen=True)
class Encoder:
    """Make shards from parts and finished tables, in any process."""

    layout: Layout
    splits: SplitFile
    tables: Mapping[str, Path]  # table -> its work file
    dense: Sequence[DenseFit]
    wide: bool  # whether ids need int64

    def __getstate__(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @cached_property
    def _ids(self) -> dict[int, tuple[Array, Array]]:
        """Feature -> ids behind the codes of all parts, and the start of each part. Only features with a vocabulary."""
        found = {}
        for index, column in enumerate(self.layout.features):
            if column.hash_buckets is None:
                with open_part(self.tables[column.table_name]) as arrays:
                    # Mapped: the system caches as much as fits.
                    found[index] = arrays[f"ids.{index}"], np.array(arrays[f"starts.{index}"])
        return found

    def _ids_of(self, part: LogPart, index: int, codes: Array) -> Array:
        """Return the ids behind the codes of a feature in a part; with hash buckets, codes are ids."""
        if index not in self._ids:
            return codes
        ids, starts = self._ids[index]
        found: Array = ids[starts[part.index] : starts[part.index + 1]][codes]
        return found

    def without_ids(self, part: LogPart, place_of: Callable[[LogPart, int], str]) -> npt.NDArray[np.bool_]:
        """Return bool [rows]: rows in which a column with oov="drop" has a value without id.

        ``place_of`` returns the file and number of a row, for the error.

        Raises:
            DataError: a column with oov="error" has a value without id.
        """
        drop = np.zeros(part.rows, np.bool_)
        with part.open() as arrays:
            for index, column in enumerate(self.layout.features):
                if column.oov in ("reserved", "grow") or column.hash_buckets is not None:
                    continue
                codes, lengths = feature_codes(arrays, index)
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

    def counts(self, parts: Sequence[LogPart]) -> dict[str, npt.NDArray[np.int64]]:
        """Return the training occurrences by id of every table; if ``parts`` are given, count again in them."""
        counts = {}
        growing = {column.table_name for column in self.layout.features if column.oov == "grow"}
        for name, path in self.tables.items():
            with open_part(path) as arrays:
                counts[name] = np.array(arrays["counts"])
                if parts and name not in growing:
                    counts[name].fill(0)
        for part in parts:
            chosen = self.splits.train_rows(part)
            if chosen is None:
                continue
            with part.open() as arrays:
                for index, column in enumerate(self.layout.features):
                    if column.table_name in growing:  # raw ids have no place in counts by row
                        continue
                    by_code = count_codes(arrays, index, chosen, 0)
                    ids = self._ids_of(part, index, np.arange(len(by_code)))
                    np.add.at(counts[column.table_name], ids, by_code)
        return counts

    def encode(self, slices: Sequence[PartSlice], split: int) -> tuple[dict[str, Array], dict[str, Any]]:
        """Encode the shard of some rows of a split.

        Returns:
            Its tensors by name; and facts for its record: rows with label 1 (``positives``) and without label
            (``absent``), and ``unknown`` [2, F], the number of ids that are 0 and of all ids by feature.
        """
        zeros = np.zeros(len(self.layout.features), np.int64)
        chosen = [(part, self.splits.rows(part, split)[begin:end]) for part, begin, end in slices]
        sizes = [len(rows) for _, rows in chosen]
        ids = np.empty((sum(sizes), 0 if self.layout.sequences else len(zeros)), self._id_type)
        places = np.split(ids, np.cumsum(sizes)[:-1])
        made = [self._tensors(part, rows, zeros, place) for (part, rows), place in zip(chosen, places, strict=True)]
        out = {name: np.concatenate([some.pop(name) for some in made]) for name in list(made[0])}
        out.setdefault("ids", ids)
        total = np.full_like(zeros, len(out["labels"]))
        if self.layout.sequences:
            out["row_offsets"] = _offsets(out["lengths"].sum(axis=1))
            total = out["lengths"].sum(axis=0)
        return out, {
            "positives": int(np.count_nonzero(out["labels"] == 1)),
            "absent": int(np.count_nonzero(np.isnan(out["labels"]))) if self.layout.label.optional else 0,
            "unknown": [zeros.tolist(), total.tolist()],
        }

    def _tensors(self, part: LogPart, rows: Array, zeros: Array, ids: Array) -> dict[str, Array]:
        """Return the tensors of some rows of a part; add the number of ids that are 0 by feature to ``zeros``.

        Without sequences, the ids are written to ``ids`` [rows, F].
        """
        with part.open() as arrays:
            raw = raw_columns(arrays, self.layout)
            out = {
                "dense": dense_values(self.layout.columns, raw, self.dense, rows=rows),
                "labels": arrays["labels"][rows],
            }
            if self.layout.sequences:
                return out | self._bags(arrays, part, rows, zeros)
            codes = [arrays[f"codes.{index}"] for index in range(len(self.layout.features))]
            for begin, chosen in blocks(len(rows), rows):
                for index, column in enumerate(codes):
                    found = self._ids_of(part, index, column[chosen])
                    ids[begin : begin + len(chosen), index] = found
                    zeros[index] += len(found) - np.count_nonzero(found)
        return out

    def _bags(self, arrays: Arrays, part: LogPart, rows: Array, zeros: Array) -> dict[str, Array]:
        """Return the ids of some rows, bag by bag, and the length of each bag."""
        lengths = np.ones((len(rows), len(self.layout.features)), np.int32)
        begins = {index: _offsets(arrays[f"counts.{index}"]) for index in self.layout.sequences}
        for index in begins:
            lengths[:, index] = arrays[f"counts.{index}"][rows]
        ids = np.empty(lengths.sum(dtype=np.int64), self._id_type)
        at = 0
        for begin, chosen in blocks(len(rows), rows):
            here = lengths[begin : begin + len(chosen)]
            places = at + _offsets(here.reshape(-1))  # start of each bag, row by row
            at = int(places[-1])
            for index, to in enumerate(places[:-1].reshape(here.shape).T):
                source = chosen
                if index in begins:
                    length = here[:, index]
                    within = np.arange(length.sum(dtype=np.int64)) - np.repeat(_offsets(length)[:-1], length)
                    source = np.repeat(begins[index][chosen], length) + within
                    to = np.repeat(to, length) + within
                found = self._ids_of(part, index, arrays[f"codes.{index}"][source])
                ids[to] = found
                zeros[index] += len(found) - np.count_nonzero(found)
        return {"ids": ids, "lengths": lengths}

    @property
    def _id_type(self) -> type[np.int32 | np.int64]:
        return np.int64 if self.wide else np.int32


def _offsets(lengths: Array) -> npt.NDArray[np.int64]:
    """Return the start of each list in the concatenation of all, and the end of the last."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _raw_value(arrays: Arrays, index: int, column: CategoricalColumn, code: int) -> str:
    """Return the value behind a code above 0, after fill and modulo."""
    if column.type == "string":
        ends = arrays[f"ends.{index}"]
        return arrays[f"bytes.{index}"][ends[code - 1] : ends[code]].tobytes().decode()
    value = arrays[f"values.{index}"][code - 1]
    if column.type == "hex":
        return f"{value.view(np.uint64):x}"
    return str(value.view(np.float64) if column.type == "float" else value)
