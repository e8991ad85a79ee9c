"""Shard files: up to 2**20 rows as plain safetensors, written whole or not at all, read through a memory map.

The writer and the header parser are our own because the library copies every array when it writes or reads, and a split
may be larger than memory. The bytes are ordinary safetensors: any reader of that format opens them.

Legend: n rows of the shard, F features, L ids in all.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.errors import DataError, errors_as
from stoker.base.files import atomic_file, file_identity
from stoker.base.units import format_size

SHARD_ROWS = 2**20  # rows per shard at most: about 170 MB of Criteo
_CHUNK = 2**22  # bytes of a chunk to write
_NAMES = {np.dtype(f"<{kind}{bits // 8}"): f"{kind.upper()}{bits}"
          for kind, bits in (("u", 8), ("u", 16), ("u", 32), ("i", 32), ("i", 64), ("f", 32), ("f", 64))}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MAX_HEADER = 2**24  # bytes; about a hundred a tensor


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """The manifest's record of one shard."""

    file: str  # "train/00000.safetensors": the last two parts of its path
    rows: int
    bytes: int
    sha256: str  # hex digest of the whole file

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def write_shard(
    path: str | Path,
    *,
    dense: npt.NDArray[np.float32],  # [n, num_dense] float32
    labels: npt.NDArray[np.float32],  # [n] float32
    ids: npt.NDArray[np.integer],  # [n, F], or flat [L] sample-major with lengths and row_offsets
    lengths: npt.NDArray[np.int32] | None = None,  # [n, F] int32
    row_offsets: npt.NDArray[np.int64] | None = None,  # [n + 1] int64
) -> ShardInfo:
    """Write one shard atomically and return its record for the manifest.

    The same arrays give the same bytes on every machine.

    Raises:
        DataError: the shapes or types of the arrays do not form a shard, or the disk is full.
    """
    path = Path(path)
    arrays: dict[str, npt.NDArray[Any]] = {"dense": dense, "ids": ids, "labels": labels}
    if lengths is not None and row_offsets is not None:
        arrays |= {"lengths": lengths, "row_offsets": row_offsets}
    elif lengths is not None or row_offsets is not None:
        raise DataError(f"shard {path.name}: lengths and row_offsets belong together; one of them is missing.")
    shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    if problem := _problem(shapes):
        raise DataError(f"shard {path.name}: {problem}.")
    if row_offsets is not None and lengths is not None and len(labels):
        if row_offsets[0] != 0 or not np.array_equal(np.diff(row_offsets), lengths.sum(axis=1, dtype=np.int64)):
            raise DataError(f"shard {path.name}: row_offsets are not the running sum of the lengths.")
        if row_offsets[-1] != len(ids):
            raise DataError(
                f"shard {path.name}: row_offsets end at {row_offsets[-1]:,}, but there are {len(ids):,} ids."
            )
    size, digest = write_chunks(path, chunks_of(arrays))
    return ShardInfo(file=f"{path.parent.name}/{path.name}", rows=len(labels), bytes=size, sha256=digest)


def header_of(tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> bytes:
    """Return the begin of a file of safetensors, given type and shape of each; the bytes of the tensors follow."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype.newbyteorder("<")], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # so the data starts on a cache line
    return len(text).to_bytes(8, "little") + text


def chunks_of(arrays: Mapping[str, npt.NDArray[Any]]) -> Iterator[Any]:
    """Yield the bytes of a file of safetensors in chunks."""
    # The widest types first: so every tensor is aligned without gaps, which the format forbids.
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    yield header_of({name: (arrays[name].dtype, arrays[name].shape) for name in order})
    for name in order:
        yield from _chunks(arrays[name])


def write_chunks(path: Path, chunks: Iterable[Any]) -> tuple[int, str]:
    """Write a file in chunks, atomically; return its size in bytes and its sha256.

    Raises:
        DataError: a full disk.
    """
    digest, size = hashlib.sha256(), 0
    with atomic_file(path) as file:
        for chunk in chunks:
            digest.update(chunk)
            size += file.write(chunk)
    return size, digest.hexdigest()


def _chunks(tensor: npt.NDArray[Any]) -> Iterator[Any]:
    """Yield the bytes of a tensor in chunks."""
    step = max(1, _CHUNK // max(1, tensor.nbytes // max(1, len(tensor))))
    for start in range(0, len(tensor), step):
        rows = tensor[start : start + step]
        yield np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


def _problem(shapes: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> str | None:
    """Return why these tensors are not a shard; None if they are one."""
    sequence = "lengths" in shapes
    expected = {"dense": (["f4"], 2), "labels": (["f4"], 1), "ids": (["i4", "i8"], 1 if sequence else 2)}
    if sequence:
        expected |= {"lengths": (["i4"], 2), "row_offsets": (["i8"], 1)}
    if set(shapes) != set(expected):
        return f"it holds the tensors {sorted(shapes)}, expected {sorted(expected)}"
    for name, (types, axes) in expected.items():
        dtype, shape = shapes[name]
        if dtype.str[1:] not in types or len(shape) != axes:
            wanted = " or ".join(types)
            return f"{name} is {dtype.name} of shape {list(shape)}, expected {wanted} with {axes} axes"
    rows = {name: shapes[name][1][0] for name in expected if name != "ids" or not sequence}
    if sequence:
        rows["row_offsets"] -= 1
    if len(set(rows.values())) > 1:
        return f"its tensors disagree on the number of rows: {rows}"
    return None


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Read-only views of the tensors of one shard. Pages are read from the file when they are touched."""

    path: Path
    rows: int
    dense: npt.NDArray[np.float32]  # [n, num_dense]
    labels: npt.NDArray[np.float32]  # [n]
    ids: npt.NDArray[np.integer]  # [n, F] or [L]
    lengths: npt.NDArray[np.int32] | None = None  # [n, F]
    row_offsets: npt.NDArray[np.int64] | None = None  # [n + 1]
    identity: tuple[int, ...] = ()  # of the file when it was mapped: device, inode, bytes, time of last change
    map: mmap.mmap | None = None  # None: the tensors are in memory
    starts: Mapping[str, int] = field(default_factory=dict)  # tensor name -> byte where it starts in the file

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The tensors by name."""
        found = {name: getattr(self, name) for name in ("dense", "ids", "labels", "lengths", "row_offsets")}
        return {name: array for name, array in found.items() if array is not None}

    def will_need(self, start: int, stop: int) -> None:
        """Ask the kernel to read rows [start, stop) soon; returns at once."""
        if self.map is None or not hasattr(self.map, "madvise"):
            return
        for name, origin in self.starts.items():
            array = getattr(self, name)
            first, last = start, stop
            if name == "ids" and self.row_offsets is not None:
                first, last = int(self.row_offsets[start]), int(self.row_offsets[stop])
            width = array.itemsize * (array.shape[1] if array.ndim == 2 else 1)
            begin = (origin + first * width) // mmap.PAGESIZE * mmap.PAGESIZE
            end = min(origin + last * width, len(self.map))
            if end > begin:
                self.map.madvise(mmap.MADV_WILLNEED, begin, end - begin)

    def digest(self) -> tuple[int, str]:
        """Return the size in bytes and the sha256 of the mapped file.

        It reads with system calls, not through the map: a bad sector is then an error, but would kill the process
        through the map. Afterwards the page cache has the file for the map.

        Raises:
            DataError: the file cannot be read, or is no longer the one that was mapped.
        """
        remedy = "Look at the disk, and restore the file from a copy, or prepare the dataset again."
        with errors_as(DataError, f"{self.path} cannot be read", remedy), self.path.open("rb") as file:
            if file_identity(file) != self.identity:
                raise DataError(
                    f"{self.path} was changed or replaced since it was opened. Let what writes to it finish, then "
                    "open the dataset again."
                )
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return file.tell(), digest

    def release(self) -> None:
        """Unmap the pages touched so far; they remain in the page cache and return when touched again."""
        if self.map is not None and hasattr(self.map, "madvise"):
            self.map.madvise(mmap.MADV_DONTNEED)


def open_shard(path: str | Path, *, rows: int) -> Shard:
    """Map one shard, and read only its header.

    Raises:
        DataError: it is not a shard, or has another number of rows than the manifest says.
    """
    path = Path(path)
    if sys.byteorder != "little":
        raise DataError("Stoker's shards are little-endian and mapped without conversion; this machine is big-endian.")
    try:
        with path.open("rb") as file:
            extra: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
            identity = file_identity(file)  # before the map, to notice a change in between
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **extra)
    except ValueError as error:
        raise DataError(f"{path} is empty, expected a shard of {rows:,} rows. Prepare the dataset again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be opened: {error.strerror}.") from error
    try:
        tensors, starts = tensor_views(mapped)
        problem = _problem({name: (array.dtype, array.shape) for name, array in tensors.items()})
        if problem is None and len(tensors["labels"]) != rows:
            problem = f"it holds {len(tensors['labels']):,} rows, the manifest says {rows:,}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a shard: {error}. Prepare the dataset again, or restore the file from a copy."
        ) from error
    if problem:
        raise DataError(f"{path} is not the shard it should be: {problem}. Prepare the dataset again.")
    return Shard(path=path, rows=rows, identity=identity, map=mapped, starts=starts, **tensors)


def tensor_views(mapped: mmap.mmap) -> tuple[dict[str, npt.NDArray[Any]], dict[str, int]]:
    """Return the tensors of a mapped file of safetensors, and the byte where each starts."""
    length = int.from_bytes(mapped[:8], "little")
    if not 2 <= length <= min(_MAX_HEADER, len(mapped) - 8):
        raise ValueError(f"its header claims {format_size(length)} of {format_size(len(mapped))}")
    header = json.loads(mapped[8 : 8 + length])
    tensors: dict[str, npt.NDArray[Any]] = {}
    starts: dict[str, int] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= len(mapped) - 8 - length:
            raise ValueError(f"tensor {name} ends past the file's end")
        dtype = _DTYPES[entry["dtype"]]
        flat = np.frombuffer(mapped, dtype, (end - begin) // dtype.itemsize, 8 + length + begin)
        tensors[name] = flat.reshape(entry["shape"])
        starts[name] = 8 + length + begin
    return tensors, starts


def allow_open_files(count: int) -> None:
    """Raise the limit of open files by ``count`` mapped files, if this process may.

    Before Python 3.13 every map keeps its file open, and the usual limit is 1,024.

    Raises:
        DataError: the limit cannot be raised far enough.
    """
    if sys.version_info >= (3, 13) or sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 512  # other open files of a process
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise DataError(
            f"the split has {count:,} shards, but this process may open only {hard:,} files. "
            f"Raise the limit with: ulimit -n {wanted}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
