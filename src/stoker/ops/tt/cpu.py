"""Tensor-train products on the CPU by Numba kernels; within rounding of the plain form, the same for any threads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker.ops.cpu.arena import Arena
from stoker.ops.tt import kernels
from stoker.ops.tt.level import Level

_PART = 32  # rows of a slice whose gradient a thread sums at a time
_arena = Arena()


def _flat(tensor: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = tensor.detach().contiguous().view(-1).numpy()
    return array


def _cursor() -> npt.NDArray[np.int64]:
    return np.zeros(1, dtype=np.int64)


def split_keys(keys: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Digits, number of the node above, and these nodes' keys and numbers of children; ``keys`` are ascending."""
    digits, inverse, above, children = kernels.split_level(keys.contiguous().numpy(), count)
    return tuple(torch.from_numpy(part) for part in (digits, inverse, above, children))  # type: ignore[return-value]


def order_nodes(digits: Tensor, radix: int) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
    """Digits in order, the order, its inverse, and the distinct digits and where each begins."""
    ordered, order, by_prefix, distinct, start = kernels.order_level(digits.contiguous().numpy(), radix)
    made = (torch.from_numpy(part) for part in (ordered, order, by_prefix))
    return (*made, distinct.tolist(), start.tolist())


def _arrays(level: Level) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    assert level.parent is not None
    return np.array(level.digits, np.int64), np.array(level.start, np.int64), level.parent.numpy()


def node_values(above: Tensor, core: Tensor, level: Level) -> Tensor:
    """[P * M, m_k * r_k]: the values [.., M, r_{k-1}] of each node's parent times its slice of the core."""
    digits, start, parent = _arrays(level)
    width, (_, rank, columns) = above.shape[1], core.shape
    tasks, offsets = kernels.tasks_of(start, width, parent, rank)
    made = _arena.empty(len(offsets), columns)
    kernels.down.run(
        _flat(above), offsets, tasks, digits, _flat(core), rank, columns, _flat(made), _cursor(),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return made


def back_through(above: Tensor, core: Tensor, level: Level, before: Level, back: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the slices that occur [n, r_{k-1}, m_k * r_k], and of the level before [its nodes, M * r_{k-1}].

    ``back`` [P * M, m_k * r_k] is the gradient of :func:`node_values`.
    """
    digits, start, parent = _arrays(level)
    width, (_, rank, columns) = above.shape[1], core.shape
    threads = torch.get_num_threads()
    given, grad = _flat(above), _flat(back)
    tasks, offsets = kernels.tasks_of(start, width, parent, rank)
    slices = _arena.empty(len(digits), rank, columns)
    parts = -(-rank // _PART)
    kernels.up_slices.run(
        given, offsets, start * width, parts, grad, rank, columns, _flat(slices), _cursor(), threads=threads
    )
    passed = _arena.empty(len(offsets), rank)
    rows = np.arange(len(offsets)) * columns
    kernels.up_values.run(
        grad, rows, tasks, digits, _flat(core), rank, columns, _flat(passed), _cursor(), threads=threads
    )
    assert level.children is not None
    begins = np.zeros(len(level.children) + 1, np.int64)
    np.cumsum(level.children.numpy(), out=begins[1:])
    summed = _arena.empty(len(before.digit), width * rank)
    kernels.sum_children.run(
        _flat(passed), level.by_prefix.numpy(), begins, before.by_prefix.numpy(), width * rank, _flat(summed),
        _cursor(), threads=threads,
    )  # fmt: skip
    return slices, summed
