"""Groups and kept columns: data of each row that only some readers need, in files next to the shards.

**Groups**: which list each row belongs to, one number a row. Rows of one list, such as the hotels of one clickout, are
ranked against each other; only evaluation reads it. **Kept columns**: raw columns that go with the rows to their
scores, in a Parquet file. Shards, batches and training use neither; a dataset without them has no such files.

Legend: n rows of a split, G its groups.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stoker.base.errors import DataError, errors_as
from stoker.base.files import atomic_file, hash_file
from stoker.dataset.shards import header_of, tensor_views, write_chunks

if TYPE_CHECKING:
    import pyarrow as pa

Int32 = npt.NDArray[np.int32]
KEPT_ROWS = 2**17  # rows of a row group
_AGAIN = "Restore the file from a copy, or prepare the dataset again."


def _check_file(path: Path, expected: Mapping[str, Any]) -> None:
    """Compare a file with its entry in the manifest."""
    digest = hash_file(path)[1]
    if digest != expected["sha256"]:
        raise DataError(
            f"{path} is damaged: its sha256 begins with {digest[:16]}, in the manifest with "
            f"{str(expected['sha256'])[:16]}. {_AGAIN}"
        )


def group_file(split: str) -> str:
    """Return the name of the file in the dataset that holds the groups of a split."""
    return f"groups/{split}.safetensors"


def write_group_file(path: Path, rows: int, blocks: Iterable[Int32]) -> dict[str, Any]:
    """Write the group numbers of ``rows`` rows, block by block; return the manifest's entry of the file.

    The bytes are ordinary safetensors with one tensor ``group`` [n] int32.

    Raises:
        DataError: a full disk.
    """

    def chunks() -> Iterator[bytes]:
        yield header_of({"group": (np.dtype("<i4"), (rows,))})
        found = 0
        for block in blocks:
            found += len(block)
            yield np.ascontiguousarray(block, "<i4").tobytes()
        if found != rows:
            raise DataError(f"{path.name}: {found:,} group numbers for {rows:,} rows.")

    size, digest = write_chunks(path, chunks())
    return {"bytes": size, "sha256": digest}


def map_groups(path: Path, expected: Mapping[str, Any], rows: int) -> Int32:
    """Check a file of groups and map it read-only: [n] int32, the group number of every row.

    Raises:
        DataError: the file is missing, damaged or of another number of rows.
    """
    with errors_as(DataError, f"{path} cannot be read", _AGAIN):
        _check_file(path, expected)
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    groups: Int32 = tensor_views(mapped)[0]["group"]
    if groups.shape != (rows,) or groups.dtype != np.int32:
        raise DataError(f"{path} holds groups of {list(groups.shape)} rows, the split has {rows:,}. {_AGAIN}")
    return groups


class GroupWriter:
    """Number groups from 0 in the order in which they first appear, and count them for the manifest.

    Args:
        known: most groups; the name of a group is a number below that.
    """

    def __init__(self, known: int) -> None:
        self.count = 0
        self._numbers = np.full(known, -1, np.int32)
        self._rows = np.zeros(known, np.int64)
        self._positive = np.zeros(known, np.bool_)

    def add(self, names: npt.NDArray[np.integer], labels: npt.NDArray[np.float32]) -> Int32:
        """Return the group numbers of the next rows, whose groups have these ``names`` [n]."""
        unseen = names[self._numbers[names] < 0]
        new = unseen[np.sort(np.unique(unseen, return_index=True)[1])]  # by first row
        self._numbers[new] = np.arange(self.count, self.count + len(new))
        self.count += len(new)
        numbers: Int32 = self._numbers[names]
        np.add.at(self._rows, numbers, 1)
        self._positive[numbers[labels > 0.5]] = True
        return numbers

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """Which names had a row: [known]."""
        return self._numbers >= 0

    def summary(self) -> dict[str, int]:
        """Return the ``count`` of groups, rows of the ``largest``, and groups ``with_positive`` labels."""
        return {
            "count": self.count,
            "largest": int(self._rows.max(initial=0)),
            "with_positive": int(self._positive.sum()),
        }


def kept_file(split: str) -> str:
    """Return the name of the file in the dataset that holds the kept columns of a split."""
    return f"keep/{split}.parquet"


class KeptColumns:
    """The kept columns of a split, read from their file on demand.

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

        with errors_as(DataError, f"{path} cannot be read", _AGAIN, (OSError, pa.ArrowException)):
            _check_file(path, expected)
            self._file = pq.ParquetFile(path)
        if self._file.metadata.num_rows < first + rows:
            raise DataError(
                f"{path} holds {self._file.metadata.num_rows:,} rows, needed are {first + rows:,}. {_AGAIN}"
            )
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
    """Write rows to a Parquet file in row groups of ``KEPT_ROWS``. See :func:`kept_writer`."""

    def __init__(self, writer: Any) -> None:
        self._writer, self._schema = writer, writer.schema
        self._waiting: list[pa.Table] = []
        self._rows = 0  # in them

    def write(self, table: pa.Table) -> None:
        """Add rows; their columns are cast to the types of the file."""
        self._waiting.append(table.cast(self._schema))
        self._rows += len(table)
        while self._rows >= KEPT_ROWS:
            self.flush(KEPT_ROWS)

    def flush(self, rows: int | None = None) -> None:
        """Write the first ``rows`` waiting rows (None: all) as a row group."""
        import pyarrow as pa

        rows = self._rows if rows is None else rows
        if not rows:
            return
        table = pa.concat_tables(self._waiting)
        self._writer.write_table(table.slice(0, rows), row_group_size=KEPT_ROWS)
        self._waiting, self._rows = [table.slice(rows)], self._rows - rows


@contextmanager
def kept_writer(path: Path, schema: pa.Schema) -> Iterator[KeptWriter]:
    """Yield a writer of kept columns; the file appears when the block ends.

    Raises:
        DataError: a full disk.
    """
    import pyarrow.parquet as pq

    with atomic_file(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as made:
        writer = KeptWriter(made)
        yield writer
        writer.flush()
