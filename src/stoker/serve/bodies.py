"""Read what a client has sent, which may be anything: rows in Arrow and in JSON, checked before they are used."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class RequestError(Exception):
    """A request that cannot be answered."""

    def __init__(self, status: int, cause: str, retry: int | None = None) -> None:
        super().__init__(cause)
        self.status, self.retry = status, retry


def arrow_rows(body: bytes, limit: int) -> pa.Table:
    """Return the table of an Arrow stream, whose offsets, indices and texts are valid.

    ``limit``: bytes that its values may take, each written out. A few bytes can stand for any number of equal values.
    """
    try:
        if any(_is_compressed(message) for message in pa.ipc.MessageReader.open_stream(body)):
            raise RequestError(400, "the Arrow stream is compressed. Send it without, or in smaller requests as JSON.")
        table = pa.ipc.open_stream(body).read_all()
        table.validate(full=True)
        size = sum(_written(chunk) for column in table.columns for chunk in column.chunks)
    except (pa.ArrowException, EOFError, ValueError, struct.error) as error:
        raise _invalid(error) from None
    except OSError as error:  # pyarrow's, of a stream that ends early
        raise _invalid(error) from None
    if max(size, table.num_rows) > limit:
        raise RequestError(413, f"the {table.num_rows:,} rows take {size:,} bytes, and {limit:,} are allowed.")
    return table


def _invalid(error: Exception) -> RequestError:
    return RequestError(400, f"the body is not a valid Arrow stream: {error}.")


def _is_compressed(message: Any) -> bool:
    """Return True if a message has a compressed batch; pyarrow does not say so before it has read it."""
    data = message.metadata.to_pybytes()
    header = _target(data, _field(data, struct.unpack_from("<I", data)[0], 2))
    if message.type == "dictionary":
        header = _target(data, _field(data, header, 1))
    return message.type in ("dictionary", "record batch") and _field(data, header, 3) is not None


def _field(data: bytes, table: int, number: int) -> int | None:
    """Return where a field of a table of FlatBuffers is; None if the table has it not."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", data, fields)[0]:
        return None
    return table + found if (found := struct.unpack_from("<H", data, fields + 4 + 2 * number)[0]) else None


def _target(data: bytes, place: int | None) -> int:
    """Return where the table is that a field refers to."""
    if place is None:
        raise ValueError("a message lacks its header")
    return place + int(struct.unpack_from("<I", data, place)[0])


def _written(array: Any) -> int:
    """Return how many bytes the values take, each written out, at least one each."""
    kind, types = array.type, pa.types
    if types.is_dictionary(kind):
        lengths = [_written(array.dictionary[at : at + 1]) for at in range(len(array.dictionary))]
        return int(pc.sum(pc.take(pa.array(lengths, pa.int64()), array.indices)).as_py() or 0) + len(array)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _written(array.flatten()) + len(array)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)[array.offset :][: len(array)]
        return int(views[:, 0].sum(dtype=np.int64)) + len(array)
    if types.is_nested(kind) or types.is_run_end_encoded(kind):
        raise ValueError(f"a column holds {kind}")
    return max(int(array.nbytes), len(array))
