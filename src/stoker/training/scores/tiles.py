"""Score rows so that a score does not depend on the other rows of its batch.

A library of matrix products may add in another order for another number of rows. So a score is defined as that of its
row in a block of one size, on one thread. A block of another size, or on all threads, is used once a trial has found
that its scores have the same bits: random rows of the model's shapes, scored both ways. The order of a sum depends on
shapes and threads, not on values. A function such as exp may have another value for the elements that fill no vector,
and a trial may miss that; so blocks and the parts of threads are multiples of two vectors, whatever the machine.

A library may also add in another order where a row begins at another address within a vector, as with 10 columns. If a
trial finds that the bits depend on the place of a row, fewer rows are scored in a block, so far from each other that
all begin alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from stoker.dataset.batch import Batch
from stoker.models import RecModel
from stoker.ops.by_shard import Known, recorded
from stoker.tables.ranks.share import share_of
from stoker.tables.shards import one_thread
from stoker.training.ranks.sharded import each_on_one_thread, own_threads

TILE = 256  # examples of the block that defines a score
GPU_TILE = 8192
SMALL = (64, 128)  # of the last rows of a batch: a block of TILE rows takes two to three times as long
MIDDLE = 512  # two threads take Python's lock from each other half as often
LARGE = 2048  # on all threads; for fewer rows, waking threads takes longer than they save
_TRIALS = 4  # blocks of a trial
_SPREADS = (1, 2, 4, 8, 16)  # places in a block for a row: 16 floats are a vector
_MOVES = (1, 2, 3, 5, 8)  # places by which rows move in a trial
_ALIGNED = 64  # bytes: products may differ for other addresses


class _BlockSizes:
    """The blocks that a model may be scored in."""

    def __init__(self) -> None:
        self._same: dict[tuple[object, ...], bool] = {}  # what trials found
        self._spread: dict[tuple[object, ...], int] = {}

    def size(self, model: RecModel, inputs: Sequence[Tensor], rows: int) -> int:
        """Return the size of the next block on one thread, if so many rows are left."""
        if rows >= MIDDLE and self.fits(model, inputs, MIDDLE, 1):
            return MIDDLE
        return next((size for size in SMALL if size >= rows and self.fits(model, inputs, size, 1)), TILE)

    def fits(self, model: RecModel, inputs: Sequence[Tensor], size: int, threads: int) -> bool:
        """Return True if blocks of ``size`` have the bits of the definition."""
        if threads & (threads - 1) or self.spread(model, inputs) > 1:  # the parts of threads are multiples of vectors
            return False
        key = size, threads, *_kind(model, inputs)
        if key not in self._same:
            self._same[key] = _can_be_drawn(inputs) and _try(model, inputs, size, threads)
        return self._same[key]

    def spread(self, model: RecModel, inputs: Sequence[Tensor]) -> int:
        """Return how many places of a block a row needs, so that its score does not depend on which it has."""
        if not _can_be_drawn(inputs):
            return 1
        if (key := _kind(model, inputs)) not in self._spread:
            found = 1  # also if places in a vector are not the reason
            for spread in _SPREADS:
                if (alike := _moved_alike(model, inputs, spread)) is None:
                    return 1  # scores that are not finite tell nothing of later models
                if alike:
                    found = spread
                    break
            self._spread[key] = found
        return self._spread[key]


def _can_be_drawn(inputs: Sequence[Tensor]) -> bool:
    """Return whether a trial can draw inputs: random whole numbers may be none that the model takes."""
    return all(each.is_floating_point() or each.dtype == torch.bool for each in inputs)


def _kind(model: RecModel, inputs: Sequence[Tensor]) -> tuple[object, ...]:
    """Return all that decides the kernels of a model's products."""
    shapes = tuple((each.dtype, each.shape[1:]) for each in inputs)
    return shapes, model.matmul, torch.get_float32_matmul_precision()


_blocks: WeakKeyDictionary[RecModel, _BlockSizes] = WeakKeyDictionary()
_alike: dict[object, _BlockSizes] = {}  # by what models of the same shapes have in common


def _blocks_of(model: RecModel) -> _BlockSizes:
    """Return the blocks of a model; models that differ in the values of weights only share them."""
    if (found := _blocks.get(model)) is None:
        shapes = tuple((name, each.dtype, each.shape) for name, each in model.named_parameters())
        key = type(model), repr(model.config()), shapes
        found = _blocks[model] = _alike.setdefault(key, _BlockSizes())
    return found


def _try(model: RecModel, inputs: Sequence[Tensor], size: int, threads: int) -> bool:
    """Return True if random rows have the same logits in blocks of ``size`` on ``threads`` as by the definition."""
    random = torch.Generator().manual_seed(0)
    rows = max(size, TILE)
    normal = [torch.randn((rows, *each.shape[1:]), generator=random) for each in inputs]
    drawn = [each > 0 if like.dtype == torch.bool else each.to(like) for each, like in zip(normal, inputs, strict=True)]

    def scored(size: int, blocks: int) -> Tensor:
        parts = [tuple(_tile(each, at * size, size) for each in drawn) for at in range(blocks)]
        logits = [model._logits(model.dense_part, part) for part in parts]
        return torch.stack([torch.cat(logits), torch.cat([torch.sigmoid(each) for each in logits])])

    with torch.no_grad(), one_thread():
        expected = scored(TILE, rows // TILE)
    with torch.no_grad(), one_thread() if threads == 1 else nullcontext():
        found = scored(size, min(_TRIALS, rows // size))
    return torch.equal(found, expected[:, : found.shape[1]])


def _moved_alike(model: RecModel, inputs: Sequence[Tensor], spread: int) -> bool | None:
    """Return whether random rows have the same logits at ``spread`` places of a block each; None: one is not finite."""
    random = torch.Generator().manual_seed(0)
    rows = TILE // spread
    drawn = [torch.rand((rows, *each.shape[1:]), generator=random).to(each.dtype) for each in inputs]

    def scored(by: int) -> Tensor:
        parts = tuple(_tile(each.roll(by, 0), 0, TILE, spread) for each in drawn)
        return model._logits(model.dense_part, parts)[::spread].roll(-by)

    with torch.no_grad(), one_thread():
        expected = scored(0)
        if not expected.isfinite().all():
            return None
        return all(torch.equal(scored(by), expected) for by in _MOVES)


def try_blocks(model: RecModel, batch: Batch) -> None:
    """Try all blocks now, so that no later call waits. ``model`` is in eval mode, and ``batch`` has a row of it."""
    if model.device.type == "cpu" and not model.embeddings.divided:
        with torch.no_grad():
            inputs = model.inputs(batch)
        for size, threads in (*((size, 1) for size in (*SMALL, MIDDLE)), (LARGE, torch.get_num_threads())):
            _blocks_of(model).fits(model, inputs, size, threads)


def tiled_scores(model: RecModel, batch: Batch) -> Tensor:
    """Return probabilities [B] float32, as ``model.predict`` does, within rounding of it.

    Inputs without one entry per example are scored as one block. If rows are divided among ranks, each scores the
    examples of its shards, and all return the scores of the whole batch.
    """
    batch = batch.to(model.device)
    tables = model.embeddings
    if tables.divided and tables.ranks is not None:
        own = _scores(model, share_of(batch, tables.ranks, tables.shards))
        return torch.cat(tables.ranks.gather("gather scores", own))
    count = len(batch)
    if not count:
        return torch.empty(0)
    with _threads_for(count) if model.device.type == "cpu" and count < LARGE else nullcontext():
        return _scores(model, batch)


def _scores(model: RecModel, batch: Batch) -> Tensor:
    count = len(batch)
    with torch.no_grad():
        inputs = model.inputs(batch)
    if any(each.shape[0] != count for each in inputs):
        return model.predict(batch)
    if not count:  # of this rank
        return torch.empty(0)
    out, known, spread = torch.empty(count, device=model.device), Known(), 1

    def work(start: int, size: int) -> None:
        with torch.no_grad(), recorded(known):  # weights are brought into their layout once
            logits = model._logits(model.dense_part, tuple(_tile(each, start, size, spread) for each in inputs))
            out[start : start + size // spread] = torch.sigmoid(logits)[::spread][: count - start]

    if model.device.type != "cpu":
        for start in range(0, count, GPU_TILE):
            work(start, GPU_TILE)
        return out
    blocks, threads, done = _blocks_of(model), torch.get_num_threads(), 0
    spread = blocks.spread(model, inputs)
    while count - done >= LARGE and blocks.fits(model, inputs, LARGE, threads):
        work(done, LARGE)
        done += LARGE
    if done < count:
        sizes, at = dict[int, int](), done
        while at < count:
            sizes[at] = blocks.size(model, inputs, count - at)
            at += sizes[at] // spread
        with _threads_for(count - done):
            each_on_one_thread(lambda start: work(start, sizes[start]), [*sizes])
    return out


def _threads_for(rows: int) -> AbstractContextManager[None]:
    """Return the threads on which rows are looked up and scored: waking another takes longer than a lookup."""
    return one_thread() if rows <= TILE else own_threads()


def _tile(values: Tensor, start: int, size: int, spread: int = 1) -> Tensor:
    """Return a block of ``size`` places with the entries from ``start`` on, one in ``spread`` places, and zeros."""
    part = values[start : start + size // spread]
    if len(part) < size:
        filled = values.new_zeros((size, *values.shape[1:]))
        filled[: len(part) * spread : spread] = part
        return filled
    aligned = part.data_ptr() % _ALIGNED == 0 and part.is_contiguous()
    return part if aligned else part.clone(memory_format=torch.contiguous_format)
