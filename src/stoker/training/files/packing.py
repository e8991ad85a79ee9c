"""Rows of a segment in fewer bytes: their numbers as differences, the top bytes of values in Huffman codes.

The top byte of a float is its sign and most of its exponent, which differ little between the values of a table. The
other bytes look random. Each is stored apart: all lowest bytes, then the next ones.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_TOP = ".top"
_STEPS = (torch.uint8, torch.int16, torch.int32, torch.int64)  # of row numbers; the first that suffices


def pack(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to store for ``row`` [n], ascending, and for values [n, ...], and the metadata of the file."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name == "row":
            steps = torch.diff(value, prepend=value.new_zeros(1))
            kind = next(kind for kind in _STEPS if int(steps.max()) <= torch.iinfo(kind).max)
            found[name] = steps.to(kind)
        else:
            planes = value.unsqueeze(-1).view(torch.uint8).movedim(-1, 0).contiguous()
            coder = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
            coded = coder.compress(planes[-1].numpy().data) + coder.flush()
            found[name] = planes[:-1].contiguous()
            found[name + _TOP] = torch.frombuffer(bytearray(coded), dtype=torch.uint8)
    kinds = {name: str(value.dtype).removeprefix("torch.") for name, value in tensors.items()}
    return found, {"types": json.dumps(kinds, sort_keys=True)}  # one key: safetensors writes several in any order


class Packed:
    """A file of packed tensors, read as one of safetensors."""

    def __init__(self, file: Any) -> None:
        self._file, self._kinds = file, json.loads(file.metadata()["types"])

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return sorted(self._kinds)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor as it was."""
        value: Tensor = self._file.get_tensor(name)
        if name == "row":
            return value.to(torch.int64).cumsum(0)
        top = bytearray(zlib.decompress(self._file.get_tensor(name + _TOP).numpy()))
        planes = torch.cat([value.flatten(1), torch.frombuffer(top, dtype=torch.uint8)[None]])
        return planes.T.reshape(-1).view(getattr(torch, self._kinds[name])).view(value.shape[1:])

    get_slice = get_tensor
