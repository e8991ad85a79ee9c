"""The vocabulary of a table in its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.base.engine import full_disk
from stoker.base.errors import DataError
from stoker.base.files import atomic_file

__all__ = ["read_vocabulary", "write_vocabulary"]


def write_vocabulary(frame: Any, path: Path) -> None:
    """Write a Polars frame (value, count) as Parquet, atomically, the same bytes for the same vocabulary."""
    with atomic_file(path) as file, full_disk():
        frame.write_parquet(file, compression="zstd", statistics=True, row_group_size=2**18)


def read_vocabulary(path: str | Path) -> Any:
    """The vocabulary of a table of a prepared dataset: a Polars frame (value, count); row i is id i + 1."""
    import polars as pl

    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path} cannot be read as a vocabulary: {error}.") from error
