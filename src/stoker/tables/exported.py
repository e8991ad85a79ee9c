"""Rows of an exported model, in files that are mapped into memory: read as they are touched, never trained.

Legend: n rows, D columns. A quantized row is ``scale * (q - zero)``: a scale in bfloat16 (2 bytes), ``zero`` (1 byte),
then D values ``q`` of 8 bits, or two in a byte. 0 is always exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from stoker.base.errors import CheckpointError, ConfigError
from stoker.base.files import unseal
from stoker.ops import AddressSpace, Bags
from stoker.ops.reference import addresses
from stoker.ops.space import slot_space
from stoker.tables.config import Strategy, TableConfig
from stoker.tables.storage import DeviceRows, Lease, Rows, Storage

_HEAD = 3  # bytes of scale and zero
Bytes = npt.NDArray[np.uint8]


def levels(bits: int) -> int:
    """Return the largest value of so many bits."""
    return (1 << bits) - 1


def quantize(rows: npt.NDArray[np.float32], bits: int) -> Bytes:
    """Return rows [n, D] as bytes [n, 3 + D] of 8 bits, or [n, 3 + (D + 1) // 2] of 4 bits."""
    low, high = np.minimum(rows.min(1), 0.0), np.maximum(rows.max(1), 0.0)
    wide = ((high - low) / np.float32(levels(bits))).astype(np.float32)
    upper = ((wide.view(np.uint32).astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)  # rounded up to bfloat16
    scale = np.where(upper > 0, _wide(upper), np.float32(1.0))[:, None]
    zero = np.rint(-low[:, None] / scale).clip(0, levels(bits))
    q = (np.rint(rows / scale) + zero).clip(0, levels(bits)).astype(np.uint8)
    if bits == 4:
        q = np.pad(q, ((0, 0), (0, q.shape[1] % 2)))
        q = q[:, ::2] | (q[:, 1::2] << 4)
    return np.concatenate([upper.view(np.uint8).reshape(-1, 2), zero.astype(np.uint8), q], axis=1)


def _wide(upper: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (upper.astype(np.uint32) << 16).view(np.float32)


def dequantize(data: Bytes, dim: int, bits: int) -> npt.NDArray[np.float32]:
    """Return the rows [n, D] of bytes that :func:`quantize` returned."""
    scale = _wide(np.ascontiguousarray(data[:, :2]).view(np.uint16)[:, 0])[:, None]
    q = data[:, _HEAD:]
    if bits == 4:
        q = np.stack([q & 15, q >> 4], axis=2).reshape(len(q), -1)[:, :dim]
    found: npt.NDArray[np.float32] = scale * (q.astype(np.float32) - data[:, 2:_HEAD].astype(np.float32))
    return found


def width_of(rows: str, dim: int) -> int:
    """Return the bytes of a row in a format."""
    return {"fp32": 4 * dim, "bf16": 2 * dim, "int8": _HEAD + dim, "int4": _HEAD + (dim + 1) // 2}[rows]


@dataclass(frozen=True)
class Exported(Strategy):
    """All rows in the files of an export."""

    path: str

    def open(self, tables: Sequence[TableConfig], space: AddressSpace, device: torch.device) -> Storage:
        """Map the file of a group of tables."""
        if device.type != "cpu":
            raise ConfigError("the rows of an export are mapped into main memory. Leave device out, or serve the run.")
        manifest = unseal((Path(self.path) / "manifest.json").read_bytes())
        names, kind, dim = [table.name for table in tables], manifest["rows"], tables[0].embedding_dim
        found = [entry["file"] for entry in manifest["groups"] if entry["tables"] == names]
        shape = (space.num_rows, width_of(kind, dim))
        path = Path(self.path) / (found[0] if found else "rows")
        size = path.stat().st_size if path.is_file() else -1
        if size != shape[0] * shape[1]:
            raise CheckpointError(
                f"{path} has {size:,} bytes and {shape[0] * shape[1]:,} are needed. Copy or export it again."
                if size >= 0 else f"{path} is missing: it has the rows of {names[0]!r}. Copy or export it again."
            )  # fmt: skip
        data = np.memmap(path, np.uint8, "c", shape=shape)  # changes are private to the process
        return MappedExport(data, kind) if kind in ("fp32", "bf16") else QuantizedRows(data, dim, int(kind[3:]))


class MappedExport(DeviceRows):
    """Rows as the kernels take them."""

    def __init__(self, data: Bytes, kind: str) -> None:
        self.weight = torch.from_numpy(data).view(torch.float32 if kind == "fp32" else torch.bfloat16)
        self.state = {}


class QuantizedRows(Storage):
    """Rows of 8 or 4 bits: those of a batch become float32 when it is looked up."""

    def __init__(self, data: Bytes, dim: int, bits: int) -> None:
        self._data, self._dim, self._bits = data, dim, bits
        self.weight, self.state = torch.empty(0, dim, device="cpu"), {}

    def acquire(self, bags: Bags, space: AddressSpace) -> Lease:
        space.check(bags.ids, bags.offsets)
        distinct, inverse = torch.unique(addresses(bags.ids, space.bases, bags.offsets), return_inverse=True)
        self.weight = self.gather(distinct.view(-1).numpy()).weight
        return Lease(bags._replace(ids=inverse.view(bags.ids.shape)), slot_space(space, max(1, len(distinct))))

    def gather(self, rows: npt.NDArray[np.int64]) -> Rows:
        return Rows(torch.from_numpy(dequantize(self._data[rows], self._dim, self._bits)), {})

    def read(self, start: int, stop: int) -> Rows:
        return self.gather(np.arange(start, stop))

    def write(self, start: int, rows: Rows) -> None:
        self._data[start : start + len(rows.weight)] = quantize(rows.weight.float().numpy(), self._bits)

    def scatter(self, rows: npt.NDArray[np.int64], values: Rows) -> None:
        self._data[rows] = quantize(values.weight.float().numpy(), self._bits)

    def reset_state(self, state: dict[str, str]) -> None:
        assert not state, "rows of an export are not trained"

    def to(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigError("the rows of an export are mapped into main memory. Leave device out, or serve the run.")
