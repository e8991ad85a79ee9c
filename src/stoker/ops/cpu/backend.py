"""The CPU back end: Numba kernels on torch's number of threads, equal to the reference to the bit."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stoker.ops.backend import Backend
from stoker.ops.codegen.llvm_rows import DECOUPLED
from stoker.ops.codegen.native import Kernel
from stoker.ops.codegen.threads import kernel_threads
from stoker.ops.cpu import kernels
from stoker.ops.cpu.arena import Arena, borrowed, flat
from stoker.ops.lamb import ROWS, Touched, combined, scales
from stoker.ops.rule import RowRule
from stoker.ops.select import offsets_fit
from stoker.ops.space import AddressSpace, Bags, Part, Parts, Rounding

_SUMS = 2 + 11  # rows of sums of a thread: see apply_kernel()
_BLOCKS = 8  # blocks of rows that a thread steps
_NO_FLOATS = np.zeros(1, dtype=np.float32)
_NO_ROWS = np.zeros(0, dtype=np.int64)
_NO_OFFSETS = np.zeros(1, dtype=np.int64)


def _strided(grad: Tensor) -> tuple[np.ndarray, int, int]:
    """Return the memory of a gradient [B, F, D] from its first element on, and its strides by example and feature."""
    batch, features, dim = grad.shape
    grad = grad if grad.dtype == torch.float32 else grad.to(torch.float32)  # which is a call of torch
    if grad.is_contiguous():
        return borrowed(grad), features * dim, dim
    if grad.stride(2) != 1 and dim > 1:
        return borrowed(grad.contiguous()), features * dim, dim
    extent = (batch - 1) * grad.stride(0) + (features - 1) * grad.stride(1) + dim
    return borrowed(grad.as_strided((extent,), (1,))), grad.stride(0), grad.stride(1)


def _ids(bags: Bags) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ids [L], offsets and per-sample weights [L] float32; arrays that no kernel reads for missing ones."""
    return (
        flat(bags.ids.contiguous()),
        _NO_OFFSETS if bags.offsets is None else np.ascontiguousarray(bags.offsets.numpy()),
        _NO_FLOATS if bags.weights is None else flat(bags.weights.to(torch.float32).contiguous()),
    )


def _run(entries: np.ndarray, items: np.ndarray, run: int, threads: int, *after: tuple[Any, ...]) -> None:
    """Give ``items`` to the kernels at ``entries`` (:data:`stoker.ops.cpu.kernels.items_kernel`)."""
    kernels.items_kernel.run(entries, items, np.zeros(1, np.int64), run, after=after, threads=threads)


def _groups(parts: Parts, states: Iterable[str]) -> tuple[_PartKey, ...]:
    """Describe the parts for :func:`_layout`. Their arrays are addressed from those of the first on."""
    found = []
    for part in parts:
        memory = [(0, 0)] * 3
        pairs = [(parts[0].weight, part.weight), *((parts[0].state[name], part.state[name]) for name in states)]
        for index, (base, own) in enumerate(pairs):
            begin = (own.data_ptr() - base.data_ptr()) // own.itemsize
            memory[index] = begin, own.shape[1] if own.ndim > 1 else 1
        found.append(_PartKey(part.space, part.weight.shape[1], part.columns, part.places, part.mean, tuple(memory)))
    return tuple(found)


_ITEMS_PER_THREAD = 2  # so that no thread ends with a large one


@dataclass(frozen=True, eq=False)
class _PartNumbers:
    """Numbers of all parts, for kernels: T tables, F features by part, and by table; int64."""

    features: tuple[np.ndarray, ...]  # start [parts + 1], and [F * 4] column, place, first element, rows of the table
    tables: tuple[np.ndarray, ...]  # start [T + 1], [F] columns, places, and [T] rows
    begins: np.ndarray  # [1 + states, T] the first element of each table
    part_of: np.ndarray  # [T]
    means: np.ndarray  # [T] whether it pools by the mean
    dims: tuple[int, ...]  # of each part
    items: np.ndarray  # [I, 2]
    partitions: np.ndarray  # [T]
    features_of: np.ndarray  # [T] how many features have each table


def _bag_lookups(layout: _PartNumbers, offsets: np.ndarray, features: int) -> np.ndarray:
    """Count the lookups of each table [T] in bags [B * F + 1]."""
    start, columns, *_ = layout.tables
    lengths = np.diff(offsets).reshape(-1, features).sum(0)
    return np.add.reduceat(np.append(lengths[columns], 0), start[:-1]) * (layout.features_of > 0)


def share_work(rows: Sequence[int], weight: Sequence[float], threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the work items of ``threads``: (table, partition) [I, 2], and each table's partitions, a power of two.

    A large table is partitioned, so that every thread has work. A thread walks the whole batch for each partition, so
    there are no more than needed, and none is empty: runs of 16 rows go to the partitions in turn.
    """
    work = np.array(weight) * np.log2(np.array(rows) + 2.0)
    wanted = work / work.sum() * _ITEMS_PER_THREAD * threads if threads > 1 else work * 0
    parts = np.array([
        min(1 << max(count // 16, 1).bit_length() - 1, 1 << max(math.ceil(want - 1e-6) - 1, 0).bit_length())
        for count, want in zip(rows, wanted.tolist(), strict=True)
    ])  # fmt: skip
    # The largest first, so that no thread ends with a large one.
    order = np.argsort(-work / parts, kind="stable")
    return np.array([(table, part) for table in order.tolist() for part in range(parts[table])], np.int64), parts


class _PartKey(NamedTuple):
    """A part without its memory."""

    space: AddressSpace
    dim: int
    columns: tuple[int, ...]
    places: tuple[int, ...]
    mean: bool
    memory: tuple[tuple[int, int], ...]  # of rows and each state: where they begin in an array, and their width


@lru_cache(maxsize=64)
def _layout(groups: tuple[_PartKey, ...], threads: int) -> _PartNumbers:
    """Return the numbers of all parts."""
    known = [group.space.by_table for group in groups]

    def join(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(arrays)).astype(np.int64)

    def by_table(which: Iterable[tuple[int, ...]]) -> np.ndarray:
        return join(np.array(mine)[table.features] for mine, table in zip(which, known, strict=True))

    columns, places = [group.columns for group in groups], [group.places for group in groups]
    rows, features_of = join(each.rows for each in known), join(each.features_of for each in known)
    part_of = np.repeat(np.arange(len(groups)), [len(each.rows) for each in known])
    memory = [[first * width + begin for begin, width in group.memory for first in [table.first_row[:-1]]]
              for group, table in zip(groups, known, strict=True)]  # fmt: skip
    begins = np.stack([join(each) for each in zip(*memory, strict=True)])
    wide = np.array([group.dim + 16 for group in groups])[part_of]
    return _PartNumbers(
        (np.cumsum([0, *map(len, columns)]), join(np.stack([
            group.columns, group.places, group.space.bases.numpy() * group.dim + group.memory[0][0],
            group.space.limits.numpy(),
        ], 1) for group in groups).reshape(-1)),
        (np.cumsum([0, *features_of.tolist()]), by_table(columns), by_table(places), rows),
        begins, part_of, np.array([group.mean for group in groups])[part_of], tuple([group.dim for group in groups]),
        *share_work(rows.tolist(), (features_of * wide).tolist(), threads), features_of,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _examples(groups: int, batch: int) -> np.ndarray:
    """Return items (group, first example) [I, 2]."""
    first = np.arange(0, batch, kernels.EXAMPLES)
    return np.stack([np.tile(np.arange(groups), len(first)), np.repeat(first, groups)], 1)


def _even(count: int, step: int) -> tuple[int, ...]:
    return tuple(number * step for number in range(count))  # the step is 0 in gradients that are one number


@lru_cache(maxsize=256)
def _known(space: AddressSpace, dim: int, stride: int, mean: bool) -> tuple[Any, Any, dict[Any, Any]]:
    """Return the columns and places of a part alone, and what was found out about it, wherever its memory is."""
    count = len(space.features)
    return _even(count, 1), _even(count, stride), {}


def _alone(weight: Tensor, state: dict[str, Tensor], space: AddressSpace, stride: int, mean: bool) -> Parts:
    """Return one part; ``stride``: between the features of an example."""
    columns, places, known = _known(space, weight.shape[1], stride, mean)
    return Parts((Part(weight, state, space, columns, places, mean),), known)


def _memory(parts: Parts) -> np.ndarray:
    """Return the rows; those of a part alone may move."""
    return flat(parts[0].weight) if len(parts) == 1 else parts.know("memory", lambda: flat(parts[0].weight))


@lru_cache(maxsize=64)
def _constants(rule: RowRule, dims: tuple[int, ...]) -> np.ndarray:
    return np.array([rule.constants(dim) for dim in dims], np.float32)


class _Scratch:
    """Memory of each thread; grown as needed, kept between batches."""

    def __init__(self) -> None:
        self._fitted = (0, 0, 0)
        self.arrays: tuple[np.ndarray, ...] = ()
        self.sums = np.empty((0, 0), np.float32)

    def fit(self, threads: int, lookups: int, dim: int) -> None:
        """Make room for tables with this many lookups and columns."""
        have = self._fitted
        if threads > have[0] or lookups > have[1] or dim > have[2]:
            self._fitted = threads, lookups, dim = max(threads, have[0]), max(lookups, have[1]), max(dim, have[2])
            self.arrays = (
                np.empty((threads, 1 << max(4, (2 * lookups - 1).bit_length())), np.int32),  # hash table of rows
                np.empty((threads, 2 * lookups + 1), np.int64),  # a distinct row, and its last and first lookup
                np.empty((threads, lookups), np.int32),  # the next lookup of the same row
                np.empty((threads, lookups), np.int64),  # where the gradient of a lookup begins
                np.empty((threads, lookups), np.float32),  # its factor
            )
            self.sums = np.empty((threads, _SUMS * dim), np.float32)


class CpuBackend(Backend):
    """Numba kernels. Scratch memory is one hash table and a few gradients a thread."""

    name, joins = "cpu", True

    def __init__(self) -> None:
        self._scratch = _Scratch()
        self._busy = threading.Lock()
        self._arena = Arena()

    def init_rows(self, out: Tensor, key: int, start: int, scale: float) -> None:
        cursor = np.zeros(1, dtype=np.int64)
        kernels.init_kernel.run(flat(out), key, start * out.shape[1], np.float32(scale), cursor, 65536)

    def lookup(self, weight: Tensor, space: AddressSpace, bags: Bags) -> Tensor:
        count, dim = len(space.features), weight.shape[1]
        alone = _alone(weight, {}, space, dim, bags.mean)
        return self.lookup_parts(alone, space, bags, (bags.batch_size(count), count, dim))

    def lookup_parts(self, parts: Parts, space: AddressSpace, bags: Bags, shape: tuple[int, ...]) -> Tensor:
        out = self._arena.empty(*shape)
        batch, count = shape[0], len(space.features)
        if batch == 0:
            return out
        jagged, weighted = bags.offsets is not None, bags.weights is not None
        error, threads = np.zeros(1, dtype=np.int64), kernel_threads()
        layout = parts.know("rows", lambda: _layout(_groups(parts, ()), 1))
        lookups = parts.know(
            ("lookup", jagged, weighted),
            lambda: tuple([
                kernels.lookup_kernel(part.weight.shape[1], jagged, weighted, part.mean and jagged) for part in parts
            ]),
        )  # fmt: skip
        runs = -(-_block(batch, 1 + 256 // count, threads) // kernels.EXAMPLES)
        given = (
            _memory(parts), *_ids(bags), *layout.features, out.numel() // batch,
            count, borrowed(out), runs * kernels.EXAMPLES, error,
        )  # fmt: skip
        _run(Kernel.entries(lookups, given), _examples(len(parts), batch), runs * len(parts), threads, given)
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
        if bags.ids.numel():
            memory, example_stride, feature_stride = _strided(grad)
            alone = _alone(weight, state, space, feature_stride, bags.mean)
            self._update(alone, bags, count, memory, example_stride, rule, rounding)

    def update_parts(
        self, parts: Parts, space: AddressSpace, bags: Bags, grad: Tensor, rule: RowRule, rounding: Rounding
    ) -> None:
        if bags.ids.numel():
            if grad.dtype == torch.float32 and grad.is_contiguous():  # the other way takes four calls of torch
                memory, example_stride = borrowed(grad), grad.numel() // len(grad)
            else:
                memory, example_stride, _ = _strided(grad.to(torch.float32).reshape(len(grad), 1, -1))
            count = sum(len(part.columns) for part in parts)
            self._update(parts, bags, count, memory, example_stride, rule, rounding)

    def _update(
        self, parts: Parts, bags: Bags, features: int, grad: np.ndarray, example_stride: int, rule: RowRule,
        rounding: Rounding,
    ) -> None:  # fmt: skip
        jagged, weighted, sharded = bags.offsets is not None, bags.weights is not None, bags.shards is not None
        ends = _NO_ROWS if bags.shards is None else np.array((bags.shards.first, *bags.shards.bounds[1:]), np.int64)
        error, threads, definition = np.zeros(1, dtype=np.int64), kernel_threads(), rule.definition
        layout = parts.know(
            ("state", threads, definition.code), lambda: _layout(_groups(parts, definition.state), threads)
        )
        mean = jagged and not weighted and bool(layout.means.any())
        scaled, flags = weighted or mean, rule.flags
        applies = parts.know(
            ("update", definition.code, flags, scaled, sharded),
            lambda: tuple([kernels.apply_kernel(dim, definition.code, flags, scaled, sharded) for dim in layout.dims]),
        )
        find = kernels.find_kernel(jagged, weighted, mean, sharded)
        ids, offsets, scale = _ids(bags)
        lookups = _bag_lookups(layout, offsets, features) if jagged else layout.features_of * (len(ids) // features)
        rows = _memory(parts)
        states = [flat(parts[0].state[name]) for name in definition.state]
        with self._busy:  # all threads of the program share the scratch: backward passes take turns
            self._scratch.fit(threads, int(lookups.max()), max(layout.dims))
            slots, *lists = self._scratch.arrays
            updating = (
                rows, *states, *[_NO_FLOATS] * (2 - len(states)), grad, layout.begins,
                _constants(rule, layout.dims), layout.part_of,
                np.array(rounding.keys, np.int64) if rounding.keys else np.zeros(len(layout.part_of), np.int64),
                _NO_ROWS if rounding.rows is None else rounding.rows.numpy(), *lists, self._scratch.sums,
            )  # fmt: skip
            finding = (
                ids, offsets, scale, features, example_stride, *layout.tables, layout.partitions, lookups,
                layout.means, ends, slots, *lists, error,
                Kernel.entries(applies, updating)[layout.part_of],
            )  # fmt: skip
            _run(Kernel.entries((find,) * len(layout.part_of), finding), layout.items, 1, threads, finding, updating)
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
        apply = kernels.apply_kernel(dim, rule.definition.code, rule.flags, False)
        size = -(-count // (_BLOCKS * kernel_threads()))  # rows of a block; the last one may have fewer
        blocks = -(-count // size)
        listed = np.empty((blocks, 2 * size), np.int64)  # each row has one lookup, whose number is that in its block
        listed.reshape(-1)[: 2 * count : 2], listed[:, 1::2] = rows.numpy(), np.arange(size) * (2**32 + 1)
        sources = np.arange(blocks * size).reshape(blocks, size) * dim
        states = [flat(state[name]) for name in rule.definition.state]
        updating = (
            flat(weight), *states, *[_NO_FLOATS] * (2 - len(states)), flat(grad.contiguous()),
            np.zeros((3, 1), np.int64), _constants(rule, (dim,)), np.zeros(1, np.int64), np.zeros(1, np.int64),
            _NO_ROWS, listed, np.empty((blocks, size), np.int32), sources, np.empty((blocks, size), np.float32),
            np.empty((blocks, 2 * dim), np.float32),
        )  # fmt: skip
        kernels.step_kernel.run(count, size, apply.entry(*updating), np.zeros(1, np.int64), after=(updating,))

    def lamb_direct(
        self, weight: Tensor, state: dict[str, Tensor], found: Touched, grad: Tensor, rule: RowRule
    ) -> tuple[Tensor, list[int]]:
        if len(found.rows) > ROWS:
            return super().lamb_direct(weight, state, found, grad, rule)
        dim, threads = weight.shape[1], kernel_threads()
        flags = rule.flags | (DECOUPLED if rule.l2 else 0)
        counts = found.counts.numpy() if rule.counts else _NO_ROWS
        limbs = np.zeros((threads, found.tables, 3), np.int64)
        if len(grad):
            kernels.direct_kernel(dim, flags).run(
                flat(weight), flat(state["exp_avg"]), flat(state["exp_avg_sq"]), flat(grad), found.rows.numpy(),
                found.table.numpy(), counts, np.array(rule.constants(dim), np.float32), limbs, np.zeros(1, np.int64),
                kernels.LAMB_BLOCK, threads=threads,
            )  # fmt: skip
        return grad, combined(limbs)

    def lamb_move(
        self, weight: Tensor, found: Touched, directions: Tensor, ratios: list[float], rule: RowRule,
        rounding: Rounding, space: AddressSpace,
    ) -> list[int]:  # fmt: skip
        if len(found.rows) > ROWS:
            return super().lamb_move(weight, found, directions, ratios, rule, rounding, space)
        threads = kernel_threads()
        limbs = np.zeros((threads, found.tables, 3), np.int64)
        if len(found.rows):
            kernels.move_kernel(weight.shape[1]).run(
                flat(weight), flat(directions), found.rows.numpy(), found.table.numpy(), scales(ratios, rule),
                space.first_row, _NO_ROWS if rounding.rows is None else rounding.rows.numpy(),
                np.array(rounding.keys or (0,) * found.tables, np.int64), limbs, np.zeros(1, np.int64),
                kernels.LAMB_BLOCK, threads=threads,
            )  # fmt: skip
        return combined(limbs)

    def weight_gradient(self, weight: Tensor, space: AddressSpace, bags: Bags, grad: Tensor) -> Tensor:
        count = bags.ids.numel()
        offsets = np.arange(count + 1) if bags.offsets is None else bags.offsets.contiguous().numpy()
        out, error = torch.empty(count, dtype=torch.float32, device="cpu"), np.zeros(1, dtype=np.int64)
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


def _block(total: int, least: int, threads: int) -> int:
    """Return the size of a work item: small enough to balance, large enough to keep threads off the cursor."""
    return max(least, total // (8 * threads))
