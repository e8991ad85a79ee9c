"""The CPU back end: Numba kernels on torch's number of threads, equal to the reference to the bit."""

from __future__ import annotations

import threading
from functools import lru_cache

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from stoker.ops.backend import Backend
from stoker.ops.codegen.llvm_rows import DECOUPLED, MOVE
from stoker.ops.cpu import kernels
from stoker.ops.cpu.arena import Arena, flat
from stoker.ops.cpu.lamb import BLOCK, direct_kernel, move_kernel
from stoker.ops.lamb import ROWS, Touched, combined, scales
from stoker.ops.rule import RowRule
from stoker.ops.select import offsets_fit
from stoker.ops.space import AddressSpace, Bags, Rounding

_BLOCKS = 8  # blocks of rows that a thread steps
_NO_FLOATS = np.zeros(1, dtype=np.float32)
_NO_ROWS = np.zeros(0, dtype=np.int64)
_NO_OFFSETS = np.zeros(1, dtype=np.int64)


def _strided(grad: Tensor) -> tuple[np.ndarray, int, int]:
    """Return the memory of a gradient [B, F, D] from its first element on, and its strides by example and feature."""
    batch, features, dim = grad.shape
    if grad.stride(2) != 1 and dim > 1:
        grad = grad.contiguous()
    if grad.is_contiguous():
        return flat(grad), features * dim, dim
    extent = (batch - 1) * grad.stride(0) + (features - 1) * grad.stride(1) + dim
    return grad.detach().as_strided((extent,), (1,)).numpy(), grad.stride(0), grad.stride(1)


def _scales(bags: Bags) -> np.ndarray:
    """Return the per-sample weights [L] float32, or an array that no kernel reads."""
    return _NO_FLOATS if bags.weights is None else flat(bags.weights.to(torch.float32).contiguous())


_ITEMS_PER_THREAD = 2  # so that no thread ends with a large one


@lru_cache(maxsize=64)
def share_work(space: AddressSpace, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the work items of ``threads``: (table, partition) [I, 2], and each table's partitions, a power of two.

    A few tables are partitioned, so that every thread has work. A thread walks the whole batch for each partition, so
    there are no more than needed, and none is empty: runs of 16 rows go to the partitions in turn.
    """
    rows = space.by_table.rows
    # The largest first, so that no thread ends with a large one.
    order = np.argsort(-space.by_table.features_of * np.minimum(rows.astype(np.float64), 1e6), kind="stable")
    wanted = -(-_ITEMS_PER_THREAD * threads // len(order)) if threads > 1 else 1
    wanted = 1 << (wanted - 1).bit_length()
    parts = np.minimum([1 << max(count // 16, 1).bit_length() - 1 for count in rows.tolist()], wanted)
    pairs = [(table, part) for table in order.tolist() for part in range(parts[table])]
    return np.array(pairs, np.int64), parts


class _Scratch:
    """A hash table and a gradient buffer for each thread; grown as needed, kept between batches."""

    def __init__(self) -> None:
        self._fitted = (0, 0, 0)
        self.arrays: tuple[np.ndarray, ...] = ()

    def fit(self, threads: int, occurrences: int, dim: int) -> None:
        size = 1 << max(4, (2 * occurrences - 1).bit_length())
        wanted = (threads, size, occurrences * dim)
        if any(has < want for has, want in zip(self._fitted, wanted, strict=True)):
            threads, size, elements = (max(has, want) for has, want in zip(self._fitted, wanted, strict=True))
            self._fitted = (threads, size, elements)
            self.arrays = (
                np.full((threads, size), -1, dtype=np.int64),  # keys: a row, or -1
                np.empty((threads, size), dtype=np.int32),  # slots: the place of that row in the buffer
                np.empty((threads, size), dtype=np.int64),  # places: the place of the n-th row among the keys
                np.empty((threads, elements), dtype=np.float32),  # buffer: summed gradients
                np.empty((threads, size), dtype=np.int32),  # how often each row occurs
            )


class CpuBackend(Backend):
    """Numba kernels. Scratch memory is one hash table and one gradient buffer a thread."""

    name = "cpu"

    def __init__(self) -> None:
        self._scratch = _Scratch()
        self._busy = threading.Lock()
        self._arena = Arena()

    def init_rows(self, out: Tensor, key: int, start: int, scale: float) -> None:
        cursor = np.zeros(1, dtype=np.int64)
        kernels.init_kernel.run(flat(out), key, start * out.shape[1], np.float32(scale), cursor, 65536)

    def lookup(self, weight: Tensor, space: AddressSpace, bags: Bags) -> Tensor:
        dim, count = weight.shape[1], len(space.features)
        batch = bags.batch_size(count)
        out = self._arena.empty(batch, count, dim)
        if batch == 0:
            return out
        kernel = kernels.lookup_kernel(dim, bags.offsets is not None, bags.weights is not None, bags.mean)
        cursor = np.zeros(1, dtype=np.int64)
        error = np.zeros(1, dtype=np.int64)
        common = (space.bases.numpy(), space.limits.numpy(), _scales(bags), flat(out), error, cursor)
        ids = bags.ids.contiguous().numpy()
        if bags.offsets is None:
            kernel.run(flat(weight), ids, *common, _block(batch, 1 + 256 // count))
        else:
            offsets = bags.offsets.contiguous().numpy()
            kernel.run(flat(weight), ids, offsets, *common, _block(batch * count, 256))
        if error[0]:
            _refuse(space, bags)
        return out

    def update(
        self, weight: Tensor, state: dict[str, Tensor], space: AddressSpace, bags: Bags, grad: Tensor, rule: RowRule,
        rounding: Rounding,
    ) -> None:  # fmt: skip
        dim, count = weight.shape[1], len(space.features)
        batch = bags.batch_size(count)
        if grad.shape != (batch, count, dim):
            raise ValueError(f"the gradient has shape {tuple(grad.shape)}; {(batch, count, dim)} is expected.")
        if bags.ids.numel() == 0:
            return
        error = np.zeros(1, dtype=np.int64)
        weighted = bags.weights is not None
        mean = bags.mean and bags.offsets is not None
        sums = kernels.sum_kernel(dim, bags.offsets is not None, weighted, mean, rule.counts)
        apply = kernels.apply_kernel(dim, rule.definition.code, rule.flags)
        offsets = None if bags.offsets is None else bags.offsets.contiguous().numpy()
        occurrences, tables = space.occurrences(offsets, bags.ids.numel()), space.by_table
        threads = torch.get_num_threads()
        states = [flat(state[name]) for name in rule.definition.state]
        constants = np.array(rule.constants(dim), dtype=np.float32)
        with self._busy:  # all groups share the scratch: backward passes take turns
            self._scratch.fit(threads, int(occurrences.max()), dim)
            keys, slots, places, buffers, counts = self._scratch.arrays
            first = states[0] if states else None
            updating = (
                flat(weight), *states, *[_NO_FLOATS] * (2 - len(states)), tables.first_row, constants,
                np.array(rounding.keys or (0,) * len(space.rows), np.int64),
                _NO_ROWS if rounding.rows is None else rounding.rows.numpy(), keys, places, buffers, counts,
            )  # fmt: skip
            sums.run(
                bags.ids.contiguous().reshape(-1).numpy(), _NO_OFFSETS if offsets is None else offsets,
                _scales(bags), *_strided(grad.to(torch.float32)), tables.start, tables.features, tables.first_row,
                tables.rows, *share_work(space, threads), occurrences, weight.data_ptr(), weight.itemsize,
                0 if first is None else first.ctypes.data, 0 if first is None else first.nbytes // len(weight), keys,
                slots, places, buffers, counts, error, np.zeros(1, dtype=np.int64), apply.entry(*updating),
                following=updating, threads=threads,
            )  # fmt: skip
        if error[0]:
            raise RuntimeError(
                "ids or offsets were overwritten between a lookup and its update: they are now outside their tables or "
                "bags. Rows of this batch may have been updated in part, so go back to the last checkpoint. Leave the "
                "memory of a batch alone until backward is done."
            )

    def step_rows(self, weight: Tensor, state: dict[str, Tensor], rows: Tensor, grad: Tensor, rule: RowRule) -> None:
        count, dim = grad.shape
        if count == 0:
            return
        low, high = torch.aminmax(rows)
        if low < 0 or high >= len(weight) or weight.dtype != torch.float32:
            raise IndexError(f"rows {int(low)} to {int(high)} of {len(weight)} in {weight.dtype} cannot step.")
        apply = kernels.apply_kernel(dim, rule.definition.code, rule.flags)
        size = -(-count // (_BLOCKS * torch.get_num_threads()))  # rows of a block; the last one may have fewer
        blocks = -(-count // size)
        keys, places = np.empty((blocks, size), np.int64), np.empty((blocks, size), np.int64)
        keys.reshape(-1)[:count], places[:] = rows.numpy(), np.arange(size)
        buffers = as_strided(flat(grad.contiguous()), (blocks, size * dim), (4 * size * dim, 4))
        states = [flat(state[name]) for name in rule.definition.state]
        updating = (
            flat(weight), *states, *[_NO_FLOATS] * (2 - len(states)), np.zeros(1, np.int64),
            np.array(rule.constants(dim), np.float32), np.zeros(1, np.int64), _NO_ROWS, keys, places, buffers,
            np.ones((1, 1), np.int32),
        )  # fmt: skip
        kernels.step_kernel.run(count, size, apply.entry(*updating), np.zeros(1, np.int64), following=updating)

    def lamb_direct(
        self, weight: Tensor, state: dict[str, Tensor], found: Touched, grad: Tensor | None, rule: RowRule
    ) -> tuple[Tensor, list[int]]:
        if len(found.rows) > ROWS:
            return super().lamb_direct(weight, state, found, grad, rule)
        dim, threads = weight.shape[1], torch.get_num_threads()
        out = torch.empty(len(found.rows), dim) if grad is None else grad
        flags = (0 if grad is None else MOVE | rule.flags) | (DECOUPLED if rule.l2 else 0)
        counts = found.counts.numpy() if grad is not None and rule.counts else _NO_ROWS
        limbs = np.zeros((threads, found.tables, 3), np.int64)
        if len(out):
            direct_kernel(dim, flags).run(
                flat(weight), flat(state["exp_avg"]), flat(state["exp_avg_sq"]), flat(out), found.rows.numpy(),
                found.table.numpy(), counts, np.array(rule.constants(dim), np.float32), limbs, np.zeros(1, np.int64),
                BLOCK, threads=threads,
            )  # fmt: skip
        return out, combined(limbs)

    def lamb_move(
        self, weight: Tensor, found: Touched, directions: Tensor, ratios: list[float], rule: RowRule,
        rounding: Rounding, space: AddressSpace,
    ) -> list[int]:  # fmt: skip
        if len(found.rows) > ROWS:
            return super().lamb_move(weight, found, directions, ratios, rule, rounding, space)
        threads = torch.get_num_threads()
        limbs = np.zeros((threads, found.tables, 3), np.int64)
        if len(found.rows):
            move_kernel(weight.shape[1]).run(
                flat(weight), flat(directions), found.rows.numpy(), found.table.numpy(), scales(ratios, rule),
                space.first_row, _NO_ROWS if rounding.rows is None else rounding.rows.numpy(),
                np.array(rounding.keys or (0,) * found.tables, np.int64), limbs, np.zeros(1, np.int64), BLOCK,
                threads=threads,
            )  # fmt: skip
        return combined(limbs)

    def weight_gradient(self, weight: Tensor, space: AddressSpace, bags: Bags, grad: Tensor) -> Tensor:
        count = bags.ids.numel()
        offsets = np.arange(count + 1) if bags.offsets is None else bags.offsets.contiguous().numpy()
        out, error = torch.empty(count, dtype=torch.float32), np.zeros(1, dtype=np.int64)
        if count:
            kernels.weight_gradient_kernel(weight.shape[1]).run(
                flat(weight), bags.ids.reshape(-1).contiguous().numpy(), offsets, space.bases.numpy(),
                space.limits.numpy(), flat(grad.to(torch.float32).contiguous()), out.numpy(), error,
                np.zeros(1, dtype=np.int64), 256,
            )  # fmt: skip
        if error[0]:
            _refuse(space, bags)
        return out


def _refuse(space: AddressSpace, bags: Bags) -> None:
    """Raise the error for a batch with a bad id or bag."""
    if bags.offsets is not None and not offsets_fit(bags.offsets, bags.ids.numel()):
        raise ValueError(f"offsets must rise from 0 to the number of ids, {bags.ids.numel()}; they do not.")
    space.check(bags.ids, bags.offsets)
    raise RuntimeError("ids or offsets were overwritten while they were read. Leave the memory of a batch alone.")


def _block(total: int, least: int) -> int:
    """Return the size of a work item: small enough to balance, large enough to keep threads off the cursor."""
    return max(least, total // (8 * torch.get_num_threads()))
