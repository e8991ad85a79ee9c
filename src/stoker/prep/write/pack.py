"""The last pass over finished parts for a dataset in memory: parts to packed records
(:mod:`stoker.dataset.reading.packed`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.ordered import ordered_map
from stoker.dataset.reading.packed import Field, Packing
from stoker.prep.fit.dense_kernels import Columns
from stoker.prep.fit.split_rules import PartRows
from stoker.prep.fit.transforms import DenseFit, DenseSteps, dense_values
from stoker.prep.parse.layout import Layout, one_hot_codes, raw_columns
from stoker.prep.schema import DenseColumn
from stoker.prep.work.parts import Part
from stoker.prep.write.encode import Encoder
from stoker.prep.write.packed_kernels import greatest_code, write_records

__all__ = ["Packer"]

Array = npt.NDArray[Any]
_BYTE, _SHORT, _FLOAT = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.float32)
_ONE = np.float32(1).view(np.uint32)
_NO_DENSE = np.empty((0, 0), np.float32)
_NO_DENSE.flags.writeable = False  # as the arrays of parts: kernels are compiled for one of the two


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What the columns of all parts are."""

    types: list[np.dtype[Any]]  # of each raw column, none where parts have none
    greatest: list[int]  # code of each that is uint16
    binary: bool  # whether every label is 0 or 1


class Packer:
    """Makes packed records of parts and finished tables, for data with one id per feature.

    Args:
        encoder: of the same parts.
        parts: all of them.
        open_part: opens a part.
        fit: of the dense columns.
        table_rows: of each table by name.
        wide: whether ids need int64.
        threads: parts that are looked at at a time.
    """

    def __init__(
        self,
        encoder: Encoder,
        parts: Sequence[PartRows],
        open_part: Callable[[PartRows], Part],
        fit: Sequence[DenseFit],
        table_rows: Mapping[str, int],
        *,
        wide: bool,
        threads: int,
    ) -> None:
        layout = encoder.layout
        self._encoder, self._open, self._layout = encoder, open_part, layout
        seen = _look(layout, parts, open_part, threads)
        floats = [index for index, dtype in enumerate(seen.types) if dtype.kind == "f"]
        fields = _dense_fields(layout, seen, fit) if layout.fitted else [
            Field(tensor="dense", column=column, dtype=_FLOAT) for column in range(layout.dense_width)
        ]  # fmt: skip
        for index, feature in enumerate(layout.features):
            fields.append(Field(tensor="ids", column=index, dtype=_id_type(table_rows[feature.table_name])))
        fields.append(Field(tensor="labels", column=0, dtype=_BYTE if seen.binary else _FLOAT))
        self.packing = packing = Packing(
            fields, dense=layout.dense_width, features=len(layout.features), wide=wide
        )  # fmt: skip
        begins = _begins(layout.columns)
        by_column = {field.column: field for field in packing.of("dense")}
        plain = [by_column[begins[index]] for index in floats]
        self._floats = floats
        self._steps = DenseSteps(
            [replace(layout.columns[index], null_flag=False) for index in floats], [fit[index] for index in floats]
        )
        self._places = np.array([field.place for field in plain], np.int64)[self._steps.places]
        coded = [(index, by_column[begins[index]]) for index, dtype in enumerate(seen.types) if dtype.kind == "u"]
        self._coded = np.array(
            [(index, field.dtype.itemsize, field.place) for index, field in coded], np.int64
        ).reshape(-1, 3)
        flags = [(index, by_column[begins[index] + 1].at) for index in floats if layout.columns[index].null_flag]
        self._flags = np.array(flags, np.int64).reshape(-1, 2)
        ids = sorted(packing.of("ids"), key=lambda field: field.column)
        self._ids = np.array([(field.dtype.itemsize, field.place) for field in ids], np.int64).reshape(-1, 2)
        (self._label,) = packing.of("labels")
        self._dense_place = 0 if layout.fitted or not by_column else by_column[0].place

    def pack(
        self, part: PartRows, rows: npt.NDArray[np.int64], memory: Callable[[int], npt.NDArray[np.uint8]]
    ) -> tuple[npt.NDArray[np.uint8], int, list[list[int]]]:
        """The records [n, R] of the ``rows`` [n] of a part, in ``memory``, which gives bytes; its positive labels, and
        zero and all ids of each feature."""
        size = self.packing.size
        records = memory(len(rows) * size).reshape(-1, size)
        views = [records.view(dtype) for dtype in (np.uint16, np.float32, np.int32, np.int64)]
        lut, bases = self._encoder.lookup(part)
        zeros = np.zeros(len(self._ids), np.int64)
        positives = 0.0
        with self._open(part) as arrays:
            fitted = self._layout.fitted
            raw = raw_columns(arrays, self._layout) if fitted else []
            dense = _NO_DENSE if fitted else arrays["dense"]
            codes, known, columns = one_hot_codes(arrays, self._layout), arrays["labels"], Columns(raw)
            for begin, end, tile in self._steps.tiles([raw[index] for index in self._floats], rows):
                positives += write_records(
                    tile, self._steps.scales, self._places, dense, self._dense_place, columns.addresses, columns.types,
                    columns.rows, self._coded, self._flags, codes.addresses, codes.types, codes.rows, lut, bases,
                    self._ids, rows[begin:end], known, self._label.dtype.itemsize, self._label.place, records, *views,
                    begin, zeros,
                )  # fmt: skip
        return records, int(positives), [zeros.tolist(), [len(rows)] * len(zeros)]


def _look(layout: Layout, parts: Sequence[PartRows], open_part: Callable[[PartRows], Part], threads: int) -> _Seen:
    """One look at the types, one at the labels and at columns that are uint16 somewhere and nowhere wider."""
    types = [_BYTE] * (len(layout.dense) if layout.fitted else 0)
    if layout.fitted:
        for part in parts:
            with open_part(part) as arrays:
                found = [column.dtype for column in raw_columns(arrays, layout)]
            types = [np.promote_types(a, b) for a, b in zip(types, found, strict=True)]
    shorts = [index for index, dtype in enumerate(types) if dtype == _SHORT]

    def look(part: PartRows) -> tuple[list[int], bool]:
        with open_part(part) as arrays:
            columns = [arrays[f"raw.{index}"] for index in shorts]
            greatest = [int(greatest_code(column, np.iinfo(column.dtype).max)) for column in columns]
            bits = arrays["labels"].view(np.uint32)
            return greatest, bool(((bits == 0) | (bits == _ONE)).all())

    greatest, binary = [0] * len(types), True
    for some, only in ordered_map(look, parts, threads):
        binary &= only
        for index, code in zip(shorts, some, strict=True):
            greatest[index] = max(greatest[index], code)
    return _Seen(types=types, greatest=greatest, binary=binary)


def _begins(columns: Sequence[DenseColumn]) -> list[int]:
    """The column of ``dense`` that each one's values are; its flag, if it has one, is the next."""
    return list(accumulate((len(column.names) for column in columns), initial=0))[: len(columns)]


def _dense_fields(layout: Layout, seen: _Seen, fit: Sequence[DenseFit]) -> list[Field]:
    fields = []
    columns = zip(layout.columns, _begins(layout.columns), seen.types, seen.greatest, fit, strict=True)
    for column, place, dtype, greatest, one in columns:
        if dtype.kind == "u":
            table = _table(column, one, greatest if dtype == _SHORT else 255)
            flag = place + 1 if column.null_flag else -1
            fields.append(Field(tensor="dense", column=place, dtype=dtype, table=table, flag=flag))
            continue
        fields.append(Field(tensor="dense", column=place, dtype=_FLOAT))
        if column.null_flag:
            fields.append(Field(tensor="dense", column=place + 1, dtype=_BYTE))
    return fields


def _table(column: DenseColumn, fit: DenseFit, greatest: int) -> npt.NDArray[np.float32]:
    """What the codes up to ``greatest`` stand for: 0 for a missing value, others for the whole number below."""
    raw = np.arange(-1.0, greatest)
    raw[0] = np.nan
    return dense_values([replace(column, null_flag=False)], [raw], [fit])[:, 0].copy()


def _id_type(rows: int) -> np.dtype[Any]:
    """The narrowest type of ids of a table of so many rows."""
    for dtype in (np.uint8, np.uint16, np.int32):
        if rows <= np.iinfo(dtype).max + 1:
            return np.dtype(dtype)
    return np.dtype(np.int64)
