"""Where typed rows with their first features lie between the passes over them: in files, or in memory while there is
room and nothing has to outlast the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq

from stoker.base.engine import full_disk
from stoker.prep.stages.parts import checksum, write_part

__all__ = ["RowStore", "sibling"]


_VIEW = 16  # bytes that a text takes beside its own, which Polars does not count


def sibling(path: Path) -> Path:
    """Where the keys of a file of rows lie."""
    return path.with_suffix(".part")


class RowStore:
    """Rows by path.

    Args:
        room: bytes to hold in memory at most; 0: all rows go to files, from where an interrupted run goes on.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: dict[str, tuple[pl.DataFrame, int]] = {}  # by path, with the bytes that count
        self._lock = threading.Lock()

    def write(self, path: Path, rows: pl.DataFrame, keys: Mapping[str, Any], *, borrowed: bool) -> dict[str, Any]:
        """Keep rows, and their keys beside; the record for the journal says how many rows there are.

        ``borrowed``: their texts lie in memory that something else is going to take.
        """
        record = {"made": rows.height, "keys": write_part(sibling(path), keys)}
        size = int(rows.estimated_size()) + _VIEW * sum(rows.height for dtype in rows.dtypes if dtype == pl.String)
        with self._lock:
            fits = size <= self._room
            self._room -= size * fits
        if fits:
            self._held[str(path)] = (_copied(rows) if borrowed else rows, size)
            return record
        beside = path.with_suffix(".tmp")
        with full_disk():
            rows.write_parquet(beside, compression="lz4", row_group_size=2**17)
        os.replace(beside, path)
        return {**checksum(path), **record}

    def scan(self, path: Path) -> pl.LazyFrame:
        """The rows."""
        held = self._held.get(str(path))
        return pl.scan_parquet(path) if held is None else held[0].lazy()

    def scan_all(self, paths: Sequence[Path]) -> pl.LazyFrame:
        """The rows of all of ``paths``, in order."""
        if not self._held:
            return pl.scan_parquet(list(paths))
        return pl.concat([self.scan(path) for path in paths])

    def short(self, path: Path, names: set[str]) -> set[str]:
        """Those of some columns of whole numbers that 32 bits hold, as far as is known without reading a file."""
        held = self._held.get(str(path))
        if held is not None:
            extremes = [(held[0].get_column(name).min(), held[0].get_column(name).max()) for name in names]
            return {name for name, ends in zip(names, extremes, strict=True) if _is_short(*ends)}
        footer = pq.read_metadata(path)
        for group in range(footer.num_row_groups):
            columns = [footer.row_group(group).column(number) for number in range(footer.num_columns)]
            known = {column.path_in_schema: column.statistics for column in columns}
            names = {name for name in names if _is_known_short(known.get(name))}
        return names

    def release(self, path: Path) -> None:
        """Give up rows that are in memory."""
        held = self._held.pop(str(path), None)
        if held is not None:
            with self._lock:
                self._room += held[1]


def _is_short(least: Any, most: Any) -> bool:
    return least is None or bool(least >= -(2**31) and most < 2**31)


def _is_known_short(statistics: Any) -> bool:
    if statistics is None:
        return False
    if not statistics.has_min_max:  # as of no value at all
        return bool(statistics.has_null_count and statistics.num_values == 0)
    return _is_short(statistics.min, statistics.max)


def _copied(rows: pl.DataFrame) -> pl.DataFrame:
    stream = BytesIO()
    rows.write_ipc_stream(stream)
    stream.seek(0)
    return pl.read_ipc_stream(stream)
