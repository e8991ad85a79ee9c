"""The CPU back end: Numba kernels on torch's number of threads, equal to the reference to the bit."""

from __future__ import annotations

import math
import threading
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from stoker.ops.backend import Backend
from stoker.ops.codegen.llvm_rows import CLIP_NORM, CLIP_VALUE, COW, DECAY
from stoker.ops.cpu import kernels
from stoker.ops.cpu import lamb as lamb_cpu
from stoker.ops.cpu.arena import Arena, flat
from stoker.ops.lamb import ROWS
from stoker.ops.rule import CODES, STATE, RowRule
from stoker.ops.select import offsets_fit
from stoker.ops.space import AddressSpace, Bags, Rounding

_NO_FLOATS = np.zeros(1, dtype=np.float32)
_NO_ROWS = np.zeros(0, dtype=np.int64)
_NO_OFFSETS = np.zeros(1, dtype=np.int64)


def _strided(grad: Tensor) -> tuple[np.ndarray, int, int]:
    """The memory of a gradient [B, F, D] from its first element on, and its strides by example and by feature."""
    batch, features, dim = grad.shape
    if grad.stride(2) != 1 and dim > 1:
        grad = grad.contiguous()
    if grad.is_contiguous():
        return flat(grad), features * dim, dim
    extent = (batch - 1) * grad.stride(0) + (features - 1) * grad.stride(1) + dim
    return grad.detach().as_strided((extent,), (1,)).numpy(), grad.stride(0), grad.stride(1)


_ITEMS_PER_THREAD = 2  # so that none is left with a big one at the end


class _Layout:
    """Tables and their features as arrays, largest table first, for one address space."""

    def __init__(self, space: AddressSpace) -> None:
        self.bases, self.limits = space.bases.numpy(), space.limits.numpy()
        self.table_of, self.start, self.features, self.first_row, self.rows = space.by_table
        self.per_table = np.diff(self.start)
        # The largest first, so that no thread is left with a big one at the end.
        weight = self.per_table * np.minimum(np.asarray(space.rows, dtype=np.float64), 1e6)
        self._order = np.argsort(-weight, kind="stable").astype(np.int64)
        self._items: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.no_keys = np.zeros(len(space.rows), dtype=np.int64)

    def items(self, threads: int) -> tuple[np.ndarray, np.ndarray]:
        """What ``threads`` share: table and part [I, 2], and the parts of each table, a power of two.

        Few tables are cut into parts, so that every thread has work. Each part walks the whole batch, so there are no
        more than it takes, and none without rows: runs of 16 rows go to the parts in turn.
        """
        if threads not in self._items:
            wanted = -(-_ITEMS_PER_THREAD * threads // len(self._order)) if threads > 1 else 1
            wanted = 1 << (wanted - 1).bit_length()
            most = [1 << max(rows // 16, 1).bit_length() - 1 for rows in self.rows.tolist()]
            parts = np.minimum(most, wanted)
            pairs = [(table, part) for table in self._order.tolist() for part in range(parts[table])]
            self._items[threads] = (np.array(pairs, np.int64), parts)
        return self._items[threads]


class _Scratch:
    """Hash tables and gradient buffers, one for each thread; grown as needed, kept between batches."""

    def __init__(self) -> None:
        self._fitted = (0, 0, 0)
        self.arrays: tuple[np.ndarray, ...] = ()

    def fit(self, threads: int, occurrences: int, dim: int) -> None:
        size = 16
        while size < 2 * occurrences:
            size *= 2
        wanted = (threads, size, occurrences * dim)
        if any(has < want for has, want in zip(self._fitted, wanted, strict=True)):
            threads, size, elements = (max(has, want) for has, want in zip(self._fitted, wanted, strict=True))
            self._fitted = (threads, size, elements)
            self.arrays = (
                np.full((threads, size), -1, dtype=np.int64),  # keys: a row, or -1
                np.empty((threads, size), dtype=np.int32),  # slots: that row's place in the buffer
                np.empty((threads, size), dtype=np.int64),  # places: where the n-th row stands among the keys
                np.empty((threads, elements), dtype=np.float32),  # buffer: summed gradients
                np.empty((threads, size), dtype=np.int32),  # how often each row occurs
            )


class CpuBackend(Backend):
    """Numba kernels. Scratch memory is one hash table and one gradient buffer a thread."""

    name = "cpu"

    def __init__(self) -> None:
        self._layouts: WeakKeyDictionary[AddressSpace, _Layout] = WeakKeyDictionary()
        self._scratch = _Scratch()
        self._busy = threading.Lock()
        self._arena = Arena()

    def _layout(self, space: AddressSpace) -> _Layout:
        known = self._layouts.get(space)
        if known is None:
            known = self._layouts[space] = _Layout(space)
        return known

    def init_rows(self, out: Tensor, key: int, start: int, scale: float) -> None:
        cursor = np.zeros(1, dtype=np.int64)
        kernels.init_kernel.run(flat(out), key, start * out.shape[1], np.float32(scale), cursor, 65536)

    def lookup(self, weight: Tensor, space: AddressSpace, bags: Bags) -> Tensor:
        layout = self._layout(space)
        dim, count = weight.shape[1], len(space.features)
        batch = bags.batch_size(count)
        out = self._arena.empty(batch, count, dim)
        if batch == 0:
            return out
        kernel = kernels.lookup_kernel(dim, bags.offsets is not None, bags.weights is not None, bags.mean)
        scale = _NO_FLOATS if bags.weights is None else flat(bags.weights.to(torch.float32).contiguous())
        cursor = np.zeros(1, dtype=np.int64)
        error = np.zeros(1, dtype=np.int64)
        common = (layout.bases, layout.limits, scale, flat(out), error, cursor)
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
        layout = self._layout(space)
        dim, count = weight.shape[1], len(space.features)
        batch = bags.batch_size(count)
        if grad.shape != (batch, count, dim):
            raise ValueError(f"the gradient has shape {tuple(grad.shape)}; {(batch, count, dim)} is expected.")
        if bags.ids.numel() == 0:
            return
        error = np.zeros(1, dtype=np.int64)
        flags = (
            (CLIP_VALUE if rule.clip_value != math.inf else 0)
            | (CLIP_NORM if rule.clip_norm != math.inf else 0)
            | (DECAY if rule.weight_decay else 0)
            | (COW if rule.cow_ratio != math.inf else 0)
        )
        weighted = bags.weights is not None
        mean = bags.mean and bags.offsets is not None
        sums = kernels.sum_kernel(dim, bags.offsets is not None, weighted, mean, bool(flags & COW))
        apply = kernels.apply_kernel(dim, CODES[rule.kind], flags)
        if bags.offsets is None:
            offsets, occurrences = _NO_OFFSETS, layout.per_table * batch
        else:
            offsets = bags.offsets.contiguous().numpy()
            lengths = np.diff(offsets).reshape(-1, count).sum(0)
            occurrences = np.bincount(layout.table_of, weights=lengths, minlength=len(space.rows)).astype(np.int64)
        threads = torch.get_num_threads()
        items, parts = layout.items(threads)
        names = STATE[rule.kind]
        constants = np.array(rule.constants(dim), dtype=np.float32)
        with self._busy:  # one scratch for all groups: backward passes take turns
            self._scratch.fit(threads, int(occurrences.max()), dim)
            keys, slots, places, buffers, counts = self._scratch.arrays
            first = state[names[0]] if names else None
            updating = (
                flat(weight), _NO_FLOATS if first is None else flat(first),
                flat(state[names[1]]) if len(names) > 1 else _NO_FLOATS, layout.first_row, constants,
                np.array(rounding.keys, dtype=np.int64) if rounding.keys else layout.no_keys,
                _NO_ROWS if rounding.rows is None else rounding.rows.numpy(), keys, places, buffers, counts,
            )  # fmt: skip
            sums.run(
                bags.ids.contiguous().reshape(-1).numpy(), offsets,
                flat(bags.weights.to(torch.float32).contiguous()) if bags.weights is not None else _NO_FLOATS,
                *_strided(grad.to(torch.float32)), layout.start, layout.features, layout.first_row, layout.rows, items,
                parts, occurrences, weight.data_ptr(), weight.itemsize, 0 if first is None else first.data_ptr(),
                0 if first is None else first.itemsize * first.numel() // len(first), keys, slots, places, buffers,
                counts, error, np.zeros(1, dtype=np.int64), apply.entry(*updating), following=updating, threads=threads,
            )  # fmt: skip
        if error[0]:
            raise RuntimeError(
                "ids or offsets were overwritten between a lookup and its update: they now lie outside their tables or "
                "bags. Rows of this batch may have been updated in part, so go back to the last checkpoint. Leave the "
                "memory of a batch alone until backward is done."
            )

    def lamb_direct(
        self, weight: Tensor, state: dict[str, Tensor], rows: Tensor, table: Tensor, tables: int, grad: Tensor | None,
        rule: RowRule, counts: Tensor | None,
    ) -> tuple[Tensor, list[int]]:  # fmt: skip
        if len(rows) > ROWS:
            return super().lamb_direct(weight, state, rows, table, tables, grad, rule, counts)
        return lamb_cpu.direct(weight, state, rows, table, tables, grad, rule, counts)

    def lamb_move(
        self, weight: Tensor, rows: Tensor, table: Tensor, directions: Tensor, ratios: list[float], rule: RowRule,
        rounding: Rounding, space: AddressSpace,
    ) -> list[int]:  # fmt: skip
        if len(rows) > ROWS:
            return super().lamb_move(weight, rows, table, directions, ratios, rule, rounding, space)
        return lamb_cpu.move(weight, rows, table, directions, ratios, rule, rounding, space)

    def weight_gradient(self, weight: Tensor, space: AddressSpace, bags: Bags, grad: Tensor) -> Tensor:
        layout = self._layout(space)
        count = bags.ids.numel()
        offsets = np.arange(count + 1) if bags.offsets is None else bags.offsets.contiguous().numpy()
        out, error = torch.empty(count, dtype=torch.float32), np.zeros(1, dtype=np.int64)
        if count:
            kernels.weight_gradient_kernel(weight.shape[1]).run(
                flat(weight), bags.ids.reshape(-1).contiguous().numpy(), offsets, layout.bases, layout.limits,
                flat(grad.to(torch.float32).contiguous()), out.numpy(), error, np.zeros(1, dtype=np.int64), 256,
            )  # fmt: skip
        if error[0]:
            _refuse(space, bags)
        return out


def _refuse(space: AddressSpace, bags: Bags) -> None:
    """Raise the error of a batch with a bad id or bag."""
    if bags.offsets is not None and not offsets_fit(bags.offsets, bags.ids.numel()):
        raise ValueError(f"offsets must rise from 0 to the number of ids, {bags.ids.numel()}; they do not.")
    space.check(bags.ids, bags.offsets)
    raise RuntimeError("ids or offsets were overwritten while they were read. Leave the memory of a batch alone.")


def _block(total: int, least: int) -> int:
    """Work handed out at a time: small enough to balance, large enough not to fight over the cursor."""
    return max(least, total // (8 * torch.get_num_threads()))
