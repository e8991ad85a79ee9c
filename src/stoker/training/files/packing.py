"""Rows of a segment in fewer bytes: their numbers as differences, the top bytes of values in Huffman codes.

The top byte of a float is its sign and most of its exponent, which differ little between the values of a table. The
other bytes look random. Each is stored apart: all lowest bytes, then the next ones.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
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
            whole = value.unsqueeze(-1).view(torch.uint8).numpy()
            low = np.empty((whole.shape[-1] - 1, *value.shape), np.uint8)
            for place, plane in enumerate(low):
                plane[...] = whole[..., place]
            coder = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
            coded = coder.compress(np.ascontiguousarray(whole[..., -1]).data) + coder.flush()
            found[name] = torch.from_numpy(low)
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
        low = value.numpy()
        whole = np.empty((*low.shape[1:], len(low) + 1), np.uint8)
        for place, plane in enumerate(low):
            whole[..., place] = plane
        top = zlib.decompress(self._file.get_tensor(name + _TOP).numpy())
        whole[..., -1] = np.frombuffer(top, np.uint8).reshape(low.shape[1:])
        return torch.from_numpy(whole).view(getattr(torch, self._kinds[name])).squeeze(-1)

    get_slice = get_tensor
