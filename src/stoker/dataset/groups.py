"""Which list each row of a split belongs to: one number a row, in a file of its own beside the shards.

Rows of one list, such as the hotels of one clickout, are ranked against each other. Only evaluation asks for them, in
file order: training reads shards that know nothing of groups, and a dataset without groups has no such file.

Legend: n rows of a split, G its groups.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.errors import DataError
from stoker.base.files import atomic_file

__all__ = ["group_file", "map_groups", "write_group_file"]

Int32 = npt.NDArray[np.int32]
_NAME = "group"


def group_file(split: str) -> str:
    """Where the groups of a split lie in the dataset."""
    return f"groups/{split}.safetensors"


def write_group_file(path: Path, rows: int, parts: Iterable[Int32]) -> dict[str, Any]:
    """Write the group numbers of ``rows`` rows, part by part; the manifest's entry of the file.

    The bytes are ordinary safetensors with one tensor ``group`` [n] int32.

    Raises:
        DataError: a full disk.
    """
    header = {_NAME: {"dtype": "I32", "shape": [rows], "data_offsets": [0, 4 * rows]}}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    digest, size = hashlib.sha256(), 0
    with atomic_file(path) as file:
        for piece in _pieces(text, parts):
            digest.update(piece)
            size += file.write(piece)
        if size != 8 + len(text) + 4 * rows:
            raise DataError(f"{path.name}: {(size - 8 - len(text)) // 4:,} group numbers for {rows:,} rows.")
    return {"bytes": size, "sha256": digest.hexdigest()}


def _pieces(header: bytes, parts: Iterable[Int32]) -> Iterator[Any]:
    yield len(header).to_bytes(8, "little") + header
    for part in parts:
        yield np.ascontiguousarray(part, "<i4").tobytes()


def map_groups(path: Path, expected: Mapping[str, Any], rows: int) -> Int32:
    """[n] int32 group number of every row, mapped read-only, after a look at the file's checksum.

    Raises:
        DataError: the file is missing, damaged or of another number of rows.
    """
    again = "Restore the file from a copy, or prepare the dataset again."
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != expected["sha256"]:
                raise DataError(
                    f"{path} is damaged: its sha256 begins with {digest[:16]}, in the manifest with "
                    f"{str(expected['sha256'])[:16]}. {again}"
                )
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {again}") from error
    length = int.from_bytes(mapped[:8], "little")
    found = json.loads(mapped[8 : 8 + length])[_NAME]
    if found["shape"] != [rows] or found["dtype"] != "I32":
        raise DataError(f"{path} holds groups of {found['shape']} rows, the split has {rows:,}. {again}")
    groups: Int32 = np.frombuffer(mapped, "<i4", rows, 8 + length)
    return groups
