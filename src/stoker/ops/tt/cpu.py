"""Numba kernels of tensor-train tables (see :mod:`stoker.ops.tt.lookup`): tries and grouped products.

A batch has hundreds of products of tens of rows. A library call for each costs more than the products. Here one kernel
does a level. One thread sums each element in a fixed order, so results do not depend on threads.

Legend: P nodes of a level, M columns so far, K = r_{k-1} values of a row, W = m_k * r_k columns of a slice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding
from numba import njit
from torch import Tensor

from stoker.ops.codegen.jit import jit
from stoker.ops.codegen.llvm import LANES
from stoker.ops.codegen.llvm_rows import row_accumulate, row_copy
from stoker.ops.codegen.llvm_tiles import tile_across, tile_product, transpose
from stoker.ops.codegen.native import Kernel, arguments, shared
from stoker.ops.cpu.arena import Arena, flat
from stoker.ops.tt.shape import Level

# Numba compiles a function again for a literal argument: so np.int64(0), not 0, below.
BLOCK = 64  # rows of a product that a thread takes at a time
_WIDE = bool(binding.get_host_cpu_features().get("avx512f", False))
_HIGH = 8 if _WIDE else 4  # rows of a tile: the registers hold as many sums
_LOW = 4 if _WIDE else 2  # rows of a lower tile, which still hides the latency of a sum
_PAIR = 2 if _WIDE else 1
_STEP = LANES * _PAIR


@jit
def split_level(keys, count):
    """Split off the last digits of ascending ``keys`` [P]; find the nodes above.

    Returns digits [P], for each key its node above [P], the nodes' keys [Q] and how many children each has [Q].
    """
    size = len(keys)
    digits, inverse = np.empty(size, np.int64), np.empty(size, np.int64)
    above, children = np.empty(size, np.int64), np.empty(size, np.int64)
    found = -1
    for i in range(size):
        key = keys[i] // count
        digits[i] = keys[i] - key * count
        if found < 0 or above[found] != key:
            found += 1
            above[found] = key
            children[found] = 0
        children[found] += 1
        inverse[i] = found
    return digits, inverse, above[: found + 1].copy(), children[: found + 1].copy()


@jit
def order_level(digits, radix, order):
    """Sort the nodes [P] by digit, stably, into ``order``, unless radix is 0; also its inverse, and runs of digits."""
    size = len(digits)
    if radix:
        place = np.zeros(radix + 1, np.int64)
        for digit in digits:
            place[digit + 1] += 1
        for digit in range(radix):
            place[digit + 1] += place[digit]
        for i in range(size):
            order[place[digits[i]]] = i
            place[digits[i]] += 1
    ordered, by_prefix = np.empty(size, np.int64), np.empty(size, np.int64)
    distinct, start = np.empty(size, np.int64), np.empty(size + 1, np.int64)
    found = 0
    for i in range(size):
        ordered[i] = digits[order[i]]
        by_prefix[order[i]] = i
        if found == 0 or distinct[found - 1] != ordered[i]:
            distinct[found], start[found] = ordered[i], i
            found += 1
    start[found] = size
    return ordered, by_prefix, distinct[:found].copy(), start[: found + 1].copy()


@jit
def tasks_of(start, width, parent, rank):
    """Cut rows into blocks with one slice, of at most BLOCK: [T, 3] (number of digit, first row, last), and offsets.

    Rows are the M = ``width`` rows of every node. The offset of each [P * M] is where its K = ``rank`` values begin in
    the level before.
    """
    count = 0
    for group in range(len(start) - 1):
        count += ((start[group + 1] - start[group]) * width + BLOCK - 1) // BLOCK
    tasks = np.empty((count, 3), np.int64)
    at = 0
    for group in range(len(start) - 1):
        for begin in range(start[group] * width, start[group + 1] * width, BLOCK):
            tasks[at, 0], tasks[at, 1] = group, begin
            tasks[at, 2] = min(begin + BLOCK, start[group + 1] * width)
            at += 1
    offsets = np.empty(len(parent) * width, np.int64)
    for node in range(len(parent)):
        for row in range(width):
            offsets[node * width + row] = (parent[node] * width + row) * rank
    return tasks, offsets


def _strip(tile, vectors):
    """Make a kernel for rows begin..stop of a strip of ``vectors`` * LANES columns; ``out_at`` is row ``begin``."""

    @njit
    def strip(left, offsets, begin, stop, count, right, right_at, stride, out, out_at, out_stride):
        row = begin
        while row < stop:
            # The last tile begins earlier where fewer rows are left: it computes some rows again, with the same bits.
            if stop - row > _LOW and stop - begin >= _HIGH:
                row = min(row, stop - _HIGH)
                at = out_at + (row - begin) * out_stride
                tile(_HIGH, vectors, left, offsets, row, count, right, right_at, stride, out, at, out_stride)
                row += _HIGH
            elif stop - begin >= _LOW:
                row = min(row, stop - _LOW)
                at = out_at + (row - begin) * out_stride
                tile(_LOW, vectors, left, offsets, row, count, right, right_at, stride, out, at, out_stride)
                row += _LOW
            else:
                at = out_at + (row - begin) * out_stride
                tile(1, vectors, left, offsets, row, count, right, right_at, stride, out, at, out_stride)
                row += 1

    return strip


def _product(tile):
    """Make a kernel for rows begin..stop of ``left @ right`` with ``width`` columns; ``out_at`` is row ``begin``."""
    narrow, wide = _strip(tile, 1), _strip(tile, _PAIR)

    @njit
    def product(left, offsets, begin, stop, count, right, right_at, width, out, out_at, panel, scratch):
        column = 0
        while column + _STEP <= width:
            wide(left, offsets, begin, stop, count, right, right_at + column, width, out, out_at + column, width)
            column += _STEP
        while column + LANES <= width:
            narrow(left, offsets, begin, stop, count, right, right_at + column, width, out, out_at + column, width)
            column += LANES
        rest = width - column
        zero, lanes = np.int64(0), np.int64(LANES)
        if rest:  # a panel of LANES columns: so nothing is read or written beyond the matrix
            for k in range(count):
                for j in range(rest):
                    panel[k * LANES + j] = right[right_at + k * width + column + j]
            narrow(left, offsets, begin, stop, count, panel, zero, lanes, scratch, zero, lanes)
            for row in range(stop - begin):
                for j in range(rest):
                    out[out_at + row * width + column + j] = scratch[row * LANES + j]

    return product


_rows, _across = _product(tile_product), _product(tile_across)


@njit
def _turn(matrix, at, rows, columns, out):
    """Transpose the matrix [rows, columns] that begins at ``at`` into ``out[columns, rows]``."""
    whole_rows, whole_columns = rows // LANES * LANES, columns // LANES * LANES
    for i in range(0, whole_rows, LANES):
        for j in range(0, whole_columns, LANES):
            transpose(matrix, at + i * columns + j, columns, out, j * rows + i, rows)
    for i in range(rows):
        for j in range(whole_columns if i < whole_rows else 0, columns):
            out[j * rows + i] = matrix[at + i * columns + j]


def _down(p):
    left, offsets, tasks, digits, core, rank, width, out, cursor = arguments(p)
    panel, tile = np.zeros(rank * LANES, np.float32), np.empty(BLOCK * LANES, np.float32)
    for task in shared(cursor, 1, len(tasks)):
        begin, stop, at = tasks[task, 1], tasks[task, 2], digits[tasks[task, 0]] * rank * width
        _rows(left, offsets, begin, stop, rank, core, at, width, out, begin * width, panel, tile)


def _up_values(p):
    back, offsets, tasks, digits, core, rank, width, out, cursor = arguments(p)
    panel, tile = np.zeros(width * LANES, np.float32), np.empty(BLOCK * LANES, np.float32)
    turned = np.empty(rank * width, np.float32)
    last = -1
    for task in shared(cursor, 1, len(tasks)):
        if tasks[task, 0] != last:
            last = tasks[task, 0]
            _turn(core, digits[last] * rank * width, rank, width, turned)
        begin, stop = tasks[task, 1], tasks[task, 2]
        _rows(back, offsets, begin, stop, width, turned, np.int64(0), rank, out, begin * rank, panel, tile)


def _up_slices(p):
    left, offsets, start, parts, back, rank, width, out, cursor = arguments(p)
    high = (rank + parts - 1) // parts
    tile, panel = np.empty(rank * LANES, np.float32), np.zeros(LANES, np.float32)
    for task in shared(cursor, 1, (len(start) - 1) * parts):
        group, begin = task // parts, task % parts * high
        stop, first, count = min(begin + high, rank), start[group], start[group + 1] - start[group]
        rows = offsets[first : first + count]
        at, to = first * width, (group * rank + begin) * width
        if len(panel) < count * LANES:
            panel = np.zeros(count * LANES, np.float32)
        _across(left, rows, begin, stop, count, back, at, width, out, to, panel, tile)


def _sum_children(p):
    values, by_prefix, begins, places, width, out, cursor = arguments(p)
    count, whole = len(begins) - 1, width // LANES * LANES
    for node in shared(cursor, BLOCK, count):
        to = places[node] * width
        for child in range(begins[node], begins[node + 1]):
            at, one = by_prefix[child] * width, np.float32(1.0)
            for j in range(0, whole, LANES):
                if child == begins[node]:
                    row_copy(LANES, out, to + j, values, at + j)
                else:
                    row_accumulate(LANES, 0, 0, out, to + j, values, at + j, one)
            for j in range(whole, width):
                out[to + j] = values[at + j] if child == begins[node] else out[to + j] + values[at + j]


down = Kernel(_down, allocates=True)
up_values = Kernel(_up_values, allocates=True)
up_slices = Kernel(_up_slices, allocates=True)
sum_children = Kernel(_sum_children)


_PART = 32  # rows of a slice whose gradient a thread sums at a time
_arena = Arena()


def _cursor() -> npt.NDArray[np.int64]:
    return np.zeros(1, np.int64)


def split_keys(keys: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return digits, numbers of the nodes above, their keys and child counts; ``keys`` are ascending."""
    return tuple(torch.from_numpy(part) for part in split_level(keys.contiguous().numpy(), count))


def order_nodes(digits: Tensor, radix: int) -> tuple[Tensor, ...]:
    """Return digits in order, the order, its inverse, the distinct digits and where each begins."""
    given, order = digits.contiguous().numpy(), np.empty(len(digits), np.int64)
    if radix > 16 * len(given) + 1024:  # too many to count; in a kernel, this sort would take seconds to compile
        radix, order = 0, np.argsort(given, kind="stable")
    ordered, *rest = order_level(given, radix, order)
    return tuple(map(torch.from_numpy, (ordered, order, *rest)))


def node_values(above: Tensor, core: Tensor, level: Level) -> Tensor:
    """Multiply the values [.., M, r_{k-1}] of each node's parent by the node's slice: [P * M, m_k * r_k]."""
    assert level.parent is not None
    digits, start, parent = level.digits.numpy(), level.start.numpy(), level.parent.numpy()
    width, (_, rank, columns) = above.shape[1], core.shape
    tasks, offsets = tasks_of(start, width, parent, rank)
    made = _arena.empty(len(offsets), columns)
    down.run(
        flat(above.contiguous()), offsets, tasks, digits, flat(core.contiguous()), rank, columns, flat(made), _cursor(),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return made


def back_through(above: Tensor, core: Tensor, level: Level, before: Level, back: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of the used slices [n, r_{k-1}, m_k * r_k], and of the level before [its nodes, M * r_{k-1}].

    ``back`` [P * M, m_k * r_k] is the gradient of :func:`node_values`.
    """
    assert level.parent is not None
    digits, start, parent = level.digits.numpy(), level.start.numpy(), level.parent.numpy()
    width, (_, rank, columns) = above.shape[1], core.shape
    threads = torch.get_num_threads()
    given, grad, slices_of = flat(above.contiguous()), flat(back.contiguous()), flat(core.contiguous())
    tasks, offsets = tasks_of(start, width, parent, rank)
    slices = _arena.empty(len(digits), rank, columns)
    # A thread takes whole slices if there are enough of them: then it reads the rows of a slice once.
    parts = min(-(-rank // _PART), -(-16 * threads // len(digits))) if len(digits) else 1
    up_slices.run(given, offsets, start * width, parts, grad, rank, columns, flat(slices), _cursor(), threads=threads)
    passed = _arena.empty(len(offsets), rank)
    rows = np.arange(len(offsets)) * columns
    up_values.run(grad, rows, tasks, digits, slices_of, rank, columns, flat(passed), _cursor(), threads=threads)
    assert level.children is not None
    begins = np.zeros(len(level.children) + 1, np.int64)
    np.cumsum(level.children.numpy(), out=begins[1:])
    summed = _arena.empty(len(before.digit), width * rank)
    sum_children.run(
        flat(passed), level.by_prefix.numpy(), begins, before.by_prefix.numpy(), width * rank, flat(summed),
        _cursor(), threads=threads,
    )  # fmt: skip
    return slices, summed


def sum_taken(grad: Tensor, places: Tensor, count: int) -> Tensor:
    """Sum the gradients [L, D] of each of ``count`` rows in order of occurrence; each occurs in ``places`` [L]."""
    _, order, _, _, start = order_nodes(places, count)
    summed = _arena.empty(count, grad.shape[1])
    sum_children.run(
        flat(grad.contiguous()), order.numpy(), start.numpy(), np.arange(count), grad.shape[1], flat(summed), _cursor(),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return summed
