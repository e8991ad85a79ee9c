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
_LINE = 16  # float32 numbers
_lent: dict[int, weakref.ref[np.ndarray]] = {}  # the memory that tensors use now, by its address


def is_foreign(tensor: Tensor) -> bool:
    """Return True if another library owns the memory of a tensor, and may change it without torch's notice."""
    storage = tensor.untyped_storage()
    return not storage.resizable() and storage.data_ptr() not in _lent


def flat(tensor: Tensor) -> np.ndarray:
    """View a contiguous tensor on the CPU as a flat array; bfloat16 as uint16."""
    array: np.ndarray = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
    return array.reshape(-1)


def borrowed(grad: Tensor) -> np.ndarray:
    """View a contiguous float32 tensor as :func:`flat` does, but so that :func:`is_foreign` still returns False for it.

    After ``Tensor.numpy()`` torch lets NumPy own the memory, and a gradient of the next step there would be copied.
    """
    array: np.ndarray = np.from_dlpack(grad.detach())
    return array.reshape(-1)


class Arena:
    """Float32 tensors on the CPU whose memory is recycled."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=_KEEP))

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialised tensor of ``shape``."""
        size = math.prod(shape)
        step = 1 << max(10, (size - 1).bit_length() - 3 * (size >= 2**20))  # few sizes, or idle ones would fill memory
        rounded = max(1, -(-size // step)) * step
        idle = self._idle[rounded]
        try:
            memory = idle.pop()
        except IndexError:
            memory = np.empty(rounded + _LINE, dtype=np.float32)
            first = -memory.ctypes.data % (4 * _LINE) // 4  # begins like a tensor of torch, at a line of the cache
            memory = memory[first : first + rounded]
        view = memory[:size].reshape(shape)
        # reshape may return the slice itself. It is a fresh object either way, and lives while any tensor uses it.
        tensor = torch.from_numpy(view)
        key = tensor.data_ptr() or id(view)  # 0 if it is empty

        def give_back(_: object, memory: np.ndarray = memory, key: int = key) -> None:
            _lent.pop(key, None)
            idle.append(memory)

        _lent[key] = weakref.ref(view, give_back)
        return tensor
