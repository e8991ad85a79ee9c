"""The Triton back end: tables on a GPU, equal to the reference to the bit, without waiting for the device.

With ``TRITON_INTERPRET=1`` set before Triton is imported, the same kernels run on CPU tensors, slowly. Tests use that
where there is no GPU.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.ops.backend import Backend
from stoker.ops.gpu import kernels
from stoker.ops.gpu.kernels import NO_ERROR, on
from stoker.ops.reference import CHUNK
from stoker.ops.rule import CLIP_NORM, CLIP_VALUE, COW, DECAY, RowRule
from stoker.ops.space import AddressSpace, Bags, Part, Parts, Rounding, SlotSpace

_TILE = 1024  # elements of a tile: 8 a thread
_EXACT = {"enable_fp_fusion": False}  # multiply, round, add, round: as the reference does


def interpreted() -> bool:
    """Return True if Triton's interpreter runs here: TRITON_INTERPRET=1 was set before Triton's import."""
    return not isinstance(kernels.lookup_kernel, triton.runtime.JITFunction)


def _check_interpreter(triton_version: str, numpy_version: str) -> None:
    """Raise ConfigError if Triton's interpreter cannot run loops whose end is loaded from memory.

    Triton before 3.7 converts arrays of one element to integers, which NumPy 2.4 and later refuse.
    """
    if _release(triton_version) < (3, 7) and _release(numpy_version) >= (2, 4):
        raise ConfigError(
            f"Triton {triton_version} cannot interpret kernels (TRITON_INTERPRET=1) with NumPy {numpy_version}: before "
            "Triton 3.7 its interpreter needs NumPy below 2.4. Run: pip install 'triton>=3.7', or: pip install "
            "'numpy<2.4'. Kernels that are compiled for a GPU are not affected: to use them, unset TRITON_INTERPRET."
        )


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


class _Segments(NamedTuple):
    """The occurrences of a batch, sorted by row; equal rows keep their order of occurrence."""

    rows: Tensor  # [L] row addresses, rising
    segments: Tensor  # [L] int64, running number of the distinct row, from 1
    starts: Tensor  # [L + 1] int64, where each distinct row begins; the host does not know how many there are
    sources: Tensor  # [L] int64, bag of each occurrence
    scales: Tensor | None  # [L] float32, factor of each occurrence's gradient
    distinct: bool = False  # each row occurs once


class TritonBackend(Backend):
    """Triton kernels.

    An id outside its table raises IndexError as in the reference, and offsets that do not rise ValueError, but on a GPU
    at a later call (:class:`Watch`), or at :meth:`synchronize`. Until then nothing is written: from that batch on,
    updates leave every table on the device as it was.

    Args:
        lazy: report bad ids and offsets at a later call, so that no call waits for the device; None means on CUDA only.

    Raises:
        ConfigError: Triton's interpreter was chosen, but cannot run the kernels with this NumPy.
    """

    name, joins = "triton", True

    def __init__(self, *, lazy: bool | None = None) -> None:
        if interpreted():
            _check_interpreter(triton.__version__, np.__version__)
        self._lazy = lazy
        self._watches: dict[torch.device, Watch] = {}
        self._counted: dict[torch.device, Tensor] = {}
        self._constants: dict[tuple[torch.device, Sequence[int]], Tensor] = {}

    def synchronize(self) -> None:
        for watch in self._watches.values():
            watch.poll(wait=True)

    def check_offsets(self, offsets: Tensor, count: int, most: Sequence[int], check: Callable[[], None]) -> None:
        bags, device = len(offsets) - 1, offsets.device
        if bags == 0:
            check()
            return
        watch = self._watch(device)
        with on(device):
            kernels.offsets_kernel[triton.cdiv(bags, 256),](
                offsets, self._sent(most, device), watch.word, bags, count, F=len(most), SIZE=256, **_EXACT
            )
            watch.expect(check)

    def lookup(self, weight: Tensor, space: AddressSpace, bags: Bags) -> Tensor:
        shape = (bags.batch_size(len(space.features)), len(space.features), weight.shape[1])
        return self.lookup_parts(Parts([Part(weight, {}, space, (), (), bags.mean)]), space, bags, shape)

    def lookup_parts(self, parts: Parts, space: AddressSpace, bags: Bags, shape: tuple[int, ...]) -> Tensor:
        device = parts[0].weight.device
        watch = self._watch(device)
        watch.poll()
        out = torch.empty(shape, dtype=torch.float32, device=device)
        if out.numel() == 0:
            return out
        scales = None if bags.weights is None else bags.weights.reshape(-1).to(torch.float32).contiguous()
        ids, offsets = bags.ids.contiguous(), None if bags.offsets is None else bags.offsets.contiguous()
        with on(device):
            for part in parts:
                place, count, dim = part.space.on(device), len(part.space.features), part.weight.shape[1]
                total, block = shape[0] * count, min(_power(dim), 256)
                tile = max(1, _TILE // block)
                grid = (triton.cdiv(total, tile), triton.cdiv(dim, block))
                tables = place.bases, place.limits, place.bases, place.bases
                if part.columns:
                    tables = *tables[:2], self._sent(part.columns, device), self._sent(part.places, device)
                constants = {
                    "F": count, "D": dim, "ALL": len(space.features) if part.columns else 0,
                    "WIDTH": out[0].numel() if part.columns else 0, "BF16": part.weight.dtype == torch.bfloat16,
                    "SCALED": scales is not None, "BAGS": tile, "BLOCK": block, **_EXACT,
                }  # fmt: skip
                given = (*tables, _or(scales, out), out, watch.word, total)
                if offsets is None:
                    kernels.lookup_kernel[grid](_bits(part.weight), ids, *given, **constants)
                else:
                    kernels.lookup_bags_kernel[grid](
                        _bits(part.weight), ids, offsets, *given, len(ids), MEAN=part.mean, UNROLL=4, **constants
                    )
            watch.post(space, bags)
        return out

    def update(
        self, weight: Tensor, state: dict[str, Tensor], space: AddressSpace, bags: Bags, grad: Tensor, rule: RowRule,
        rounding: Rounding,
    ) -> None:  # fmt: skip
        if bags.ids.numel() and not self.steps(rule, sharded=bags.shards is not None):
            self._watch(weight.device).poll(wait=True)  # ids must be in their tables
            super().update(weight, state, space, bags, grad, rule, rounding)
            return
        self._update(Parts([Part(weight, state, space, (), (), bags.mean)]), space, bags, grad, rule, rounding)

    def update_parts(
        self, parts: Parts, space: AddressSpace, bags: Bags, grad: Tensor, rule: RowRule, rounding: Rounding
    ) -> None:
        self._update(parts, space, bags, grad.reshape(len(grad), 1, -1), rule, rounding)

    def steps(self, rule: RowRule, *, sharded: bool = False) -> bool:
        return not sharded and rule.kind in kernels.STEPS

    def _update(
        self, parts: Parts, space: AddressSpace, bags: Bags, grad: Tensor, rule: RowRule, rounding: Rounding
    ) -> None:
        """Update the rows of all parts: one sort of the addresses, then the kernels of each part."""
        device, features, count = parts[0].weight.device, len(space.features), bags.ids.numel()
        watch, table = self._watch(device), space.on(device)
        watch.poll()
        if count == 0:
            return
        given, layout = _gradient(grad, features)
        joint = bool(parts[0].columns)
        if joint:
            layout["FEATURE"] = -1  # its place is read
        first = 0
        with on(device):
            found = self._segments(space, bags, self._means(parts, space, bags), watch, device)
            keys = table.first_row
            if any(part.weight.dtype == torch.bfloat16 for part in parts):
                keys = _send(rounding.keys, device)
            for part in parts:
                places, last = table.table_of, first + part.space.num_rows
                if joint:
                    places = parts.know((first, device), partial(self._places, part, features, device))
                self._update_part(
                    part, found, (given, places, layout), (table.table_of, table.first_row, keys, rounding.rows),
                    (count, first, last), rule,
                )  # fmt: skip
                first = last
            watch.post(space, bags, updated=True)

    def _update_part(
        self, part: Part, found: _Segments, gradient: tuple[Tensor, Tensor, dict[str, Any]],
        random: tuple[Tensor, Tensor, Tensor, Tensor | None], numbers: tuple[int, int, int], rule: RowRule,
    ) -> None:  # fmt: skip
        """Update the rows of one part.

        Args:
            part: the rows.
            found: the occurrences of all parts.
            gradient: [B, F, D] as for kernels, the place of each feature's, and its layout.
            random: what decides random bits: table of each feature, its first row, its key, and the row in each slot.
            numbers: of occurrences, and the first and last address of the part.
            rule: of the step.
        """
        weight, (given, places, layout), (table_of, first_row, keys, slots) = part.weight, gradient, random
        device, dim, count, word = weight.device, weight.shape[1], numbers[0], self._watch(weight.device).word
        states, flags = [part.state[name] for name in rule.definition.state], rule.flags
        block = max(16, _power(dim))
        tile = max(1, _TILE // block)
        totals = unused = word.view(torch.float32)  # of the type that kernels are compiled for
        scales = _or(found.scales, unused)
        common = {"D": dim, "SCALED": found.scales is not None, "LONG": CHUNK, **layout, **_EXACT}
        segments = found.rows, found.segments, found.starts
        if count > CHUNK and not found.distinct:
            windows, width = triton.cdiv(count, CHUNK), min(128, _power(dim))
            sums = torch.empty(2 * windows, dim, dtype=torch.float32, device=device)
            totals = torch.empty(windows, dim, dtype=torch.float32, device=device)
            kernels.sum_chunks_kernel[windows, triton.cdiv(dim, width)](
                *segments, found.sources, scales, given, places, sums, word, *numbers, BLOCK=width, UNROLL=16,
                num_warps=1, **common,
            )  # fmt: skip
            width = min(32, width)
            kernels.sum_long_kernel[windows, triton.cdiv(dim, width)](
                *segments, sums, totals, word, *numbers, D=dim, PART=layout["FEATURE"] < 0, LONG=CHUNK, BLOCK=width,
                UNROLL=32, num_warps=1, **_EXACT,
            )  # fmt: skip
        kernels.update_kernel[triton.cdiv(count, tile),](
            _bits(weight), *states, *[unused] * (2 - len(states)), *segments,
            found.sources, scales, given, places, totals, word, table_of, first_row, keys, _or(slots, first_row),
            *numbers, *(0.0 if value == math.inf else value for value in rule.constants(dim)),
            RULE=rule.definition.code, BF16=weight.dtype == torch.bfloat16, SLOTTED=slots is not None,
            CLIP_VALUE=bool(flags & CLIP_VALUE), CLIP_NORM=bool(flags & CLIP_NORM), DECAY=bool(flags & DECAY),
            COW=bool(flags & COW), ROWS=tile, BLOCK=block, UNROLL=4, num_warps=4 if block <= 2048 else 8, **common,
        )  # fmt: skip

    def _places(self, part: Part, features: int, device: torch.device) -> Tensor:
        """Return the place of each of all features [F]; 0 for those of other parts."""
        places = dict(zip(part.columns, part.places, strict=True))
        return self._sent(tuple([places.get(column, 0) for column in range(features)]), device)

    @staticmethod
    def _means(parts: Parts, space: AddressSpace, bags: Bags) -> tuple[bool, ...]:
        """Return which features are pooled by their mean [F]."""
        if not parts[0].columns:
            return (bags.mean,) * len(space.features)
        means = {column: part.mean for part in parts for column in part.columns}
        return tuple([means[column] for column in range(len(space.features))])

    def init_rows(self, out: Tensor, key: int, start: int, scale: float) -> None:
        count, dim = out.numel(), out.shape[1]
        if count == 0:
            return
        if not out.is_contiguous():
            super().init_rows(out, key, start, scale)
            return
        with on(out.device):
            kernels.init_kernel[triton.cdiv(count, _TILE),](
                _bits(out), key, start * dim, count, float(np.float32(scale)), BF16=out.dtype == torch.bfloat16,
                SIZE=_TILE, **_EXACT,
            )  # fmt: skip

    def weight_gradient(self, weight: Tensor, space: AddressSpace, bags: Bags, grad: Tensor) -> Tensor:
        """Return the gradient of the per-sample weights [L]: dot products in a fixed order, not the reference's."""
        device, dim, count = weight.device, weight.shape[1], bags.ids.numel()
        watch = self._watch(device)
        watch.poll()
        out = torch.empty(count, dtype=torch.float32, device=device)
        if count == 0:
            return out
        block = min(_power(dim), 128)
        tile = max(1, _TILE // block)
        given, layout = _gradient(grad, len(space.features))
        with on(device):
            rows, bag, _ = self._addresses(space, bags, (False,), watch, device)
            kernels.weight_gradient_kernel[triton.cdiv(count, tile),](
                _bits(weight), rows, _or(bag, rows), given, out, count, space.num_rows, D=dim,
                BF16=weight.dtype == torch.bfloat16, JAGGED=bag is not None, SIZE=tile, BLOCK=block, **layout, **_EXACT,
            )  # fmt: skip
        return out

    def _watch(self, device: torch.device) -> Watch:
        if device not in self._watches:
            self._watches[device] = Watch(device, lazy=self._lazy)
        return self._watches[device]

    def _sent(self, values: Sequence[int], device: torch.device) -> Tensor:
        """Return small integers on the device, which keeps them; ``values`` is a tuple."""
        if (found := self._constants.get((device, values))) is None:
            found = self._constants[device, values] = _send(values, device)
        return found

    def _addresses(
        self, space: AddressSpace, bags: Bags, means: tuple[bool, ...], watch: Watch, device: torch.device
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the row address of each id [L], its bag and, in a mean, its factor; None where all are alike.

        ``means`` [F]: which features are pooled by their mean.

        Addresses are int32 where it fits, which takes half the passes to sort.
        """
        place, count, features = space.on(device), bags.ids.numel(), len(space.features)
        dtype = torch.int32 if space.num_rows < 2**31 else torch.int64
        rows = torch.empty(count, dtype=dtype, device=device)
        ids, offsets, bag, scales = bags.ids.contiguous(), bags.offsets, None, None
        if offsets is not None:
            bag = torch.empty(count, dtype=torch.int64, device=device)
            scales = torch.empty(count, dtype=torch.float32, device=device) if any(means) else None
        total = bags.batch_size(features) * features
        kernels.addresses_kernel[triton.cdiv(count, _TILE),](
            ids, _or(offsets, ids).contiguous(), place.bases, place.limits, self._sent(means, device), rows,
            _or(bag, rows), _or(scales, rows), watch.word, total, count, space.num_rows, total.bit_length(), F=features,
            JAGGED=bag is not None, MEAN=scales is not None, SIZE=_TILE, **_EXACT,
        )  # fmt: skip
        return rows, bag, scales

    def _numbers(self, count: int, device: torch.device) -> Tensor:
        """Return 0, 1, ... [at least ``count``] int64."""
        if device not in self._counted or len(self._counted[device]) < count:
            self._counted[device] = torch.arange(max(1024, _power(count)), device=device)
        return self._counted[device]

    def _segments(
        self, space: AddressSpace, bags: Bags, means: tuple[bool, ...], watch: Watch, device: torch.device
    ) -> _Segments:
        count = bags.ids.numel()
        addresses, bag, scales = self._addresses(space, bags, means, watch, device)
        if bags.weights is not None:
            scales = bags.weights.reshape(-1).to(torch.float32)
        if bags.distinct:
            numbers = self._numbers(count + 1, device)
            return _Segments(addresses, numbers[1:], numbers, numbers if bag is None else bag, scales, distinct=True)
        rows, order = torch.sort(addresses, stable=True)
        grid = (triton.cdiv(count, _TILE),)
        found = torch.empty(grid, dtype=torch.int64, device=device)
        segments = torch.empty(count, dtype=torch.int64, device=device)
        starts = torch.empty(count + 1, dtype=torch.int64, device=device)
        kernels.mark_kernel[grid](rows, found, count, SIZE=_TILE, **_EXACT)
        kernels.starts_kernel[grid](rows, found, segments, starts, count, SIZE=_TILE, **_EXACT)
        return _Segments(
            rows, segments, starts, order if bag is None else bag[order], None if scales is None else scales[order]
        )


def _bits(weight: Tensor) -> Tensor:
    """View bfloat16 as int16; return float32 as it is."""
    assert weight.is_contiguous(), "kernels address rows by row * dim"
    return weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight


def _gradient(grad: Tensor, features: int) -> tuple[Tensor, dict[str, Any]]:
    """Return ``grad`` [B, F, D] for a kernel, and its layout; it is copied only if its rows are not contiguous."""
    if grad.dtype not in (torch.float32, torch.bfloat16):
        grad = grad.to(torch.float32)
    if grad.stride(2) != 1:
        grad = grad.contiguous()
    half = grad.dtype == torch.bfloat16
    layout = {"F": features, "EXAMPLE": grad.stride(0), "FEATURE": grad.stride(1), "GRAD16": half}
    return grad.view(torch.int16) if half else grad, layout


def _or(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """Return ``tensor``, or if it is None another one, which the kernel does not read."""
    return unused if tensor is None else tensor


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _send(values: Sequence[int], device: torch.device) -> Tensor:
    """Copy small integers to the device without waiting for it."""
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


_UNREAD = 64  # reports that the host does not read before it waits for the device
_MOST_BYTES = 2**26  # bytes of ids in them: they remain in the device's memory
_Check = Callable[[], None]


class Watch:
    """The error word of one device: bad ids and offsets are reported without making the host wait.

    Kernels write the position of the first bad id into one word on the device, or a negative number for bad offsets.
    Every update reads that word first: once it is set, nothing is written. A lookup copies the word to the host, which
    reads the copy at a later call.

    Args:
        device: where the tables are.
        lazy: report at a later call, so that no call waits for the device; the default on CUDA.
    """

    def __init__(self, device: torch.device, *, lazy: bool | None = None) -> None:
        self.word = torch.full((1,), NO_ERROR, dtype=torch.int64, device=device)
        self.lazy = device.type == "cuda" if lazy is None else lazy
        self._reports: deque[tuple[torch.cuda.Event | None, Tensor, list[_Check], int]] = deque()
        self._report_bytes = 0  # bytes of ids in the reports
        self._expected: list[_Check] = []  # for the next report
        self._posted: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # ids by their number

    def expect(self, check: _Check) -> None:
        """Note that a kernel has checked something; ``check`` raises the error if there is one."""
        if self.lazy:
            self._expected.append(check)
        elif int(self.word) != NO_ERROR:
            self._raise(int(self.word), [check])

    def post(self, space: AddressSpace, bags: Bags, *, updated: bool = False) -> None:
        """Copy the finding of the kernel that checked ``bags`` to the host, but for ids of its lookup in an update."""
        if not self.lazy:
            self.expect(partial(space.check, bags.ids, bags.offsets))
            return
        known = isinstance(space, SlotSpace)  # slots are our own
        if updated:
            known = known or self._posted.pop(id(bags.ids), None) is bags.ids
        else:
            self._posted[id(bags.ids)] = bags.ids
        if known and not self._expected:
            return
        checks: list[_Check] = [*self._expected, partial(space.check, bags.ids, bags.offsets)]
        self._expected = []
        copied: Any = None
        if self.word.device.type == "cuda":
            copy = torch.empty(1, dtype=torch.int64, pin_memory=True)
            copy.copy_(self.word, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        else:
            copy = self.word.clone()
        self._reports.append((copied, copy, checks, bags.ids.nbytes))
        self._report_bytes += bags.ids.nbytes

    def poll(self, *, wait: bool = False) -> None:
        """Raise the error that was found, if any; ``wait`` until the device has finished all calls so far."""
        while self._reports:
            copied, copy, checks, size = self._reports[0]
            if copied is not None:
                few = len(self._reports) <= _UNREAD and self._report_bytes <= _MOST_BYTES
                if not wait and few and not copied.query():
                    return
                copied.synchronize()
            self._reports.popleft()
            self._report_bytes -= size
            if int(copy) != NO_ERROR:
                self._raise(int(copy), checks)
        if wait and int(self.word) != NO_ERROR:
            self._raise(int(self.word), self._expected)

    def _raise(self, position: int, checks: Sequence[_Check]) -> None:
        self._reports.clear()
        self._expected, self._report_bytes = [], 0
        self.word.fill_(NO_ERROR)
        for check in checks:
            check()
        what = "offsets that do not rise" if position < 0 else f"an id outside its table at position {position:,}"
        raise IndexError(
            f"an earlier batch had {what} of its ids, and they have been overwritten since. Keep a batch unchanged "
            "until the next one, or map unseen values to id 0."
        )
