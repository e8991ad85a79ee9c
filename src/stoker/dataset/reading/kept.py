"""Raw columns that travel with the rows to their scores: one Parquet file a split, in the order of its rows.

Shards, batches and training know nothing of them; a dataset without kept columns has no such file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.errors import DataError
from stoker.base.files import atomic_file, hash_file

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["KEPT_ROWS", "KeptColumns", "KeptWriter", "kept_file", "kept_writer"]

KEPT_ROWS = 2**17  # rows of a row group


def kept_file(split: str) -> str:
    """Name of the file in the dataset that holds the kept columns of a split."""
    return f"keep/{split}.parquet"


class KeptColumns:
    """The kept columns of a split, read from their file as they are asked for.

    Args:
        path: the Parquet file.
        expected: the manifest's entry of it.
        first: row of the file that is row 0 here.
        rows: of the split.

    Raises:
        DataError: the file is missing or damaged, or has too few rows.
    """

    def __init__(self, path: Path, expected: Mapping[str, Any], first: int, rows: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        again = "Restore the file from a copy, or prepare the dataset again."
        try:
            digest = hash_file(path)[1]
            if digest != expected["sha256"]:
                raise DataError(
                    f"{path} is damaged: its sha256 begins with {digest[:16]}, in the manifest with "
                    f"{str(expected['sha256'])[:16]}. {again}"
                )
            self._file = pq.ParquetFile(path)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}. {again}") from error
        if self._file.metadata.num_rows < first + rows:
            raise DataError(f"{path} holds {self._file.metadata.num_rows:,} rows, needed are {first + rows:,}. {again}")
        self._first, self._rows = first, rows

    def __len__(self) -> int:
        return self._rows

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""
        return self._file.schema_arrow.remove_metadata()

    def read(self, start: int = 0, stop: int | None = None) -> pa.Table:
        """Return the columns of rows [start, stop) of the split; ``stop`` None: to its end."""
        stop = self._rows if stop is None else min(stop, self._rows)
        begin, end = self._first + start, self._first + max(stop, start)
        group = begin // KEPT_ROWS
        table = self._file.read_row_groups(range(group, -(-end // KEPT_ROWS)) if end > begin else [])
        return table.replace_schema_metadata().slice(begin - group * KEPT_ROWS, end - begin)


class KeptWriter:
    """Writes rows to a Parquet file in row groups of ``KEPT_ROWS``, however they arrive. See :func:`kept_writer`."""

    def __init__(self, writer: Any) -> None:
        self._writer, self._schema = writer, writer.schema
        self._waiting: list[pa.Table] = []
        self._rows = 0  # in them

    def write(self, table: pa.Table) -> None:
        """Add rows, whose columns are cast to the types of the file."""
        self._waiting.append(table.cast(self._schema))
        self._rows += len(table)
        while self._rows >= KEPT_ROWS:
            self.flush(KEPT_ROWS)

    def flush(self, rows: int | None = None) -> None:
        """Write the first ``rows`` of those that wait, None: all, as a row group."""
        import pyarrow as pa

        rows = self._rows if rows is None else rows
        if not rows:
            return
        table = pa.concat_tables(self._waiting)
        self._writer.write_table(table.slice(0, rows), row_group_size=KEPT_ROWS)
        self._waiting, self._rows = [table.slice(rows)], self._rows - rows


@contextmanager
def kept_writer(path: Path, schema: pa.Schema) -> Iterator[KeptWriter]:
    """A writer of kept columns, whose file appears when the block ends.

    Raises:
        DataError: a full disk.
    """
    import pyarrow.parquet as pq

    with atomic_file(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as made:
        writer = KeptWriter(made)
        yield writer
        writer.flush()
