"""Buffers that are used again when nothing refers to them any more.

A fresh large buffer costs more than a gather: the kernel zeroes every page, and the C library returns the pages at
every free. The memory of a tensor is used again only after its last reference is dropped, so keeping a tensor is safe.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque

import numpy as np
import torch
from torch import Tensor

_KEEP = 8  # idle buffers kept of each size
_LARGE = 2**20  # float32 numbers from which there are many sizes
_TIMES = 4  # idle memory is at most so many times what was lent at once
_LINE = 16  # float32 numbers
#: the memory that tensors use now, by its address, and its numbers
_lent: dict[int, tuple[weakref.ref[np.ndarray], int]] = {}


def is_foreign(tensor: Tensor) -> bool:
    """Return True if another library owns the memory of a tensor, and may change it without torch's notice."""
    storage = tensor.untyped_storage()
    return not storage.resizable() and storage.data_ptr() not in _lent


def flat(tensor: Tensor) -> np.ndarray:
    """View a contiguous tensor on the CPU as a flat array; bfloat16 as uint16."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    array: np.ndarray = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array.reshape(-1)


class _Borrowed:
    """The memory of a contiguous float32 tensor, for NumPy."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, place = tensor, (tensor.data_ptr(), False)
        self.__array_interface__ = {"version": 3, "typestr": "<f4", "data": place, "shape": (tensor.numel(),)}


def borrowed(grad: Tensor) -> np.ndarray:
    """View a contiguous float32 tensor as :func:`flat` does, but so that :func:`is_foreign` still returns False for it.

    After ``Tensor.numpy()`` torch lets NumPy own the memory, and a gradient of the next step there would be copied.
    ``numpy.from_dlpack`` takes 20 microseconds.
    """
    return np.asarray(_Borrowed(grad))


class Arena:
    """Float32 tensors on the CPU whose memory is recycled."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=_KEEP))
        self._most = 0  # numbers that were lent at once

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialised tensor of ``shape``."""
        size = math.prod(shape)
        step = 1 << max(10, (size - 1).bit_length() - 3 * (size >= _LARGE))  # few sizes, so that they come again
        rounded = max(1, -(-size // step)) * step
        try:
            memory = self._idle[rounded].pop()
        except IndexError:
            if size >= _LARGE:  # batches of any size need other buffers, and the idle ones become too many
                self._most = max(self._most, rounded + sum(lent for _, lent in [*_lent.values()]))
                idle = sum(each * len(kept) for each, kept in dict(self._idle).items())
                if idle > _TIMES * self._most:
                    self._idle.clear()
            memory = np.empty(rounded + _LINE, dtype=np.float32)
            first = -memory.ctypes.data % (4 * _LINE) // 4  # begins like a tensor of torch, at a line of the cache
            memory = memory[first : first + rounded]
        view = memory[:size].reshape(shape)
        # reshape may return the slice itself. It is a fresh object either way, and lives while any tensor uses it.
        tensor = torch.from_numpy(view)
        key = tensor.data_ptr() or id(view)  # 0 if it is empty

        def give_back(_: object, memory: np.ndarray = memory, key: int = key) -> None:
            _lent.pop(key, None)
            self._idle[rounded].append(memory)

        _lent[key] = weakref.ref(view, give_back), rounded
        return tensor
