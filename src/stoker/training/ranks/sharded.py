"""The loss of a model and its gradients, one logical shard of the batch after the other.

Each shard runs on one thread, forward and backward, so its products have the same shapes and the same bits on any
machine of a kind, whatever the number of threads. Several shards run at once. Sums over shards are made by the tree of
:mod:`stoker.ops.tree`.

Legend: B examples, V shards.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from threading import Barrier, Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.base.errors import ConfigError
from stoker.dataset.batch import Batch
from stoker.models import RecModel
from stoker.ops.by_shard import Known, Moved, move_all
from stoker.ops.codegen.threads import kernel_threads, own
from stoker.ops.cpu.arena import Arena
from stoker.ops.tree import Node, Shards, nodes_of
from stoker.tables.ranks.share import Share, share_of, whole_of
from stoker.tables.ranks.transport import Ranks, checksum
from stoker.tables.shards import one_thread
from stoker.training.ranks.sums import Alike, Sums, add_over_ranks, moves_of_ranks
from stoker.training.ranks.together import Compute, Together, bits_of_products, compute_part

_ALIGNED = 64  # bytes: where tensors of torch begin, and slices of a batch may not
_arena = Arena()


@cache
def _pool(size: int, process: int) -> ThreadPoolExecutor:
    """Return ``size`` threads of this process on each of which torch's operations use no other thread."""
    before, started = torch.get_num_threads(), Barrier(size + 1)

    def begin() -> None:
        torch.get_num_threads()  # takes the number of the process, once in each thread
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(size, thread_name_prefix="stoker-shard")
    for _ in range(size):
        pool.submit(begin)
    started.wait()
    torch.set_num_threads(before)  # also that of threads to come
    return pool


@contextmanager
def own_threads() -> Iterator[None]:
    """Let torch's operations run on the calling thread alone, and kernels on a team: no worker of OpenMP is woken.

    After its work such a worker spins for milliseconds, on a core that the threads of shards need.
    """
    size = torch.get_num_threads()
    if size == 1:
        yield
        return
    own.size = size
    try:
        torch.set_num_threads(1)
        yield
    finally:
        own.size = 0
        torch.set_num_threads(size)


def each_on_one_thread(work: Callable[[int], None], numbers: Sequence[int]) -> None:
    """Call ``work`` for each number, several at once on torch's number of threads, each of which works alone.

    Raises:
        BaseException: the first error; numbers that were not begun are left out.
    """
    size = min(kernel_threads(), len(numbers))
    if size <= 1:
        with one_thread():
            for number in numbers:
                work(number)
        return
    left: Iterator[int] = iter(numbers)
    errors: list[BaseException] = []

    def run() -> None:
        while not errors and (number := next(left, None)) is not None:  # next() is one step of the interpreter
            try:
                work(number)
            except BaseException as error:
                errors.append(error)

    pool = _pool(kernel_threads(), os.getpid())
    for each in [pool.submit(run) for _ in range(size)]:
        each.result()
    if errors:
        raise errors[0]


def _add(first: Sums | None, second: Sums | None) -> Sums | None:
    """Add two halves of a node, in the memory of the first; one that is absent is left out."""
    if first is None or second is None:
        return first or second
    both = [(a, b) for a, b in zip(first.grads, second.grads, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_(*map(list, zip(*both, strict=True)))
    grads = [b if a is None else a for a, b in zip(first.grads, second.grads, strict=True)]
    return Sums(first.loss + second.loss, grads)


class _Tree:
    """Sums over shards. Of two siblings, the thread that ends last adds both."""

    def __init__(self, shards: range) -> None:
        self.tops, self._lock = set(nodes_of(shards)), Lock()
        self.sums: dict[Node, Sums | None] = {}

    def add(self, node: Node, found: Sums | None) -> None:
        while node not in self.tops:
            first = node.start & -(2 * node.size)
            sibling = Node(first if node.start > first else first + node.size, node.size)
            with self._lock:
                if sibling not in self.sums:
                    self.sums[node] = found
                    return
                other = self.sums.pop(sibling)
            found = _add(found, other) if node.start == first else _add(other, found)
            node = Node(first, 2 * node.size)
        with self._lock:
            self.sums[node] = found


class _InputGradient:
    """The gradients of the slices of an input [B, ...], joined."""

    def __init__(self, like: Tensor) -> None:
        self._shape, self._lock = like.shape, Lock()
        self._joined: Tensor | None = None
        self._absent: list[slice] = []  # of shards whose loss does not depend on the input
        self._device = like.device

    def put(self, start: int, stop: int, grad: Tensor | None) -> None:
        if grad is None:
            self._absent.append(slice(start, stop))
            return
        with self._lock:
            if self._joined is None:
                self._joined = self._empty(grad)
        self._joined[start:stop] = grad

    @property
    def reached(self) -> bool:
        """Whether a shard has a gradient."""
        return self._joined is not None

    def joined(self, *, reached: bool) -> Tensor | None:
        """Return the gradient of the whole input; None if no shard has one; ``reached``: one of another rank has."""
        if self._joined is not None:
            for each in self._absent:
                self._joined[each] = 0.0
        elif reached:
            return torch.zeros(self._shape, device=self._device)
        return self._joined

    def _empty(self, like: Tensor) -> Tensor:
        """Return memory for all of them, in which the second dimension is the outer one if it is so in ``like``."""
        if like.device.type != "cpu" or like.dtype != torch.float32:
            return torch.zeros(self._shape, dtype=like.dtype, device=like.device)
        if like.dim() == 3 and like.stride(0) < like.stride(1):
            batch, places, dim = self._shape
            stride = batch * dim + 16  # an odd line: see stoker.ops.interaction
            return _arena.empty(places, stride).as_strided((batch, places, dim), (dim, stride, 1))
        return _arena.empty(*self._shape)


class _Sharded(torch.autograd.Function):
    """The loss. Its gradients are found in the forward pass, shard by shard, so no activation outlives its shard."""

    @staticmethod
    def forward(ctx: Any, owner: ShardedLoss, batch: Batch, count: int, *given: Tensor) -> Tensor:
        loss, ctx.grads = owner.compute(batch, given[:count], given[count:])
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError("backward was called twice for a loss by shards, whose gradients are used once.")
        if grad.device.type != "cpu" or float(grad) != 1.0:
            grads = [None if each is None else each * grad for each in grads]
        return None, None, None, *grads


class ShardedLoss:
    """The mean binary cross entropy of a model, computed in the logical shards of its tables.

    Its value and gradients do not depend on the number of threads. Batch norm takes the moments of a shard, and running
    moments move shard after shard. ``predict`` and evaluation of the model are then done by shards, too.

    If the rows are divided among ranks, all of them call this with the same batch. Each computes its shards, and all
    get the loss, the gradients of parameters and the logits of the whole batch.

    >>> spec = stoker.FeatureSpec.from_sizes(num_dense=2, num_embeddings=[100, 50])
    >>> model = stoker.DLRM(spec, embedding_dim=4, bottom=(8,), top=(8,))
    >>> model.embeddings.shards = 2
    >>> loss_of = ShardedLoss(model)
    >>> batch = stoker.Batch(dense=torch.zeros(3, 2), ids=torch.tensor([[1, 2], [3, 4], [1, 0]]), labels=torch.ones(3))
    >>> loss_of(batch).backward()  # rows take their step here
    >>> model.embeddings.tick
    1

    Args:
        model: whose tables have shards.

    Raises:
        ConfigError: the dense part is compiled or has CUDA graphs, or the model has its own loss, or another than bce.
    """

    def __init__(self, model: RecModel) -> None:
        shards = model.embeddings.shards
        if model._compiled is not None:
            raise ConfigError(
                f"{shards} shards run the dense part on one thread each, but torch.compile and CUDA graphs make code "
                "for a whole batch. Leave compile and cuda_graphs out, or take shards=1.",
                settings=("shards", "compile", "cuda_graphs"),
            )
        kind = type(model)
        if kind.loss is not RecModel.loss or kind.forward is not RecModel.forward:
            raise ConfigError(
                f"model {kind.__name__} has a loss or forward of its own, which {shards} shards would leave out. "
                "Define dense_part and inputs only, or take shards=1.",
                settings=("shards", "model"),
            )
        self.model, self.ranks = model, _ranks_of(model)
        self.note: Callable[[], int] = lambda: 0  # what this rank says to the others in a step
        self.hear: Callable[[list[int]], None] = lambda notes: None  # called with what all of them say
        self.parameters: list[nn.Parameter] = model.dense_parameters()
        if self.ranks is not None and (other := {each.dtype for each in self.parameters} - {torch.float32}):
            raise ConfigError(
                f"the dense part of {kind.__name__} has parameters of {other.pop()}, whose gradients ranks do not add. "
                "Make them float32.", settings=("model",),
            )  # fmt: skip
        self._steps = 0
        self._together = Together(model)
        model.by_shards = _logits  # no method: a cycle would keep the rows until Python looks for cycles

    def __call__(self, batch: Batch) -> Tensor:
        """Return the loss of a batch; its ``backward`` also updates the rows."""
        model = self.model
        if model.objective != "bce":
            raise ConfigError(
                f"loss {model.objective} is not of one example alone, so shards would cut what it is over. Set "
                "model.objective to bce, or take model.loss(batch) and shards=1.", settings=("loss", "shards"),
            )  # fmt: skip
        if batch.labels is None:
            raise ValueError(f"batch {batch.step} has no labels, so it has no loss. Use predict instead.")
        batch, inputs = _inputs(model, batch.to(model.device))
        for each in inputs:
            if len(each) != len(batch):
                raise ConfigError(
                    f"an input of the dense part of {type(model).__name__} has {len(each)} rows for {len(batch)} "
                    "examples, so it has no shards. Take shards=1.",
                    settings=("shards",),
                )
        trained = [each for each in self.parameters if each.requires_grad]
        loss: Tensor = _Sharded.apply(self, batch, len(inputs), *inputs, *trained)  # type: ignore[no-untyped-call]
        return loss

    def compute(
        self, batch: Batch, inputs: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss, and the gradients of inputs and parameters."""
        assert batch.labels is not None
        model, labels, shards, count = self.model, batch.labels, _shards(self.model, batch), len(whole_of(batch))
        tree, trained = _Tree(shards.numbers), [each.requires_grad for each in inputs]
        slices = [_InputGradient(each) if wanted else None for each, wanted in zip(inputs, trained, strict=True)]
        moved: dict[int, list[Moved]] = {}
        part = partial(compute_part, model, parameters, count, Known(), _autocast(model.device.type))
        drawn = generator_states(model.device)

        def work(node: Node) -> None:
            start, stop = (shards.bounds[at - shards.first] for at in (node.start, node.start + node.size))
            if start == stop:
                tree.add(node, None)
                return
            own = [_aligned(each[start:stop]).requires_grad_(w) for each, w in zip(inputs, trained, strict=True)]
            found = part(own, labels[start:stop], node.size)
            moved[node.start] = found.moved
            for each, grad in zip(filter(None, slices), found.inputs, strict=True):
                each.put(start, stop, grad)
            tree.add(node, Sums(found.loss, _own_memory(found.parameters)))

        nodes = self._together.nodes(shards, inputs, part)
        _run(model, lambda index: work(nodes[index]), len(nodes))
        # Another thread may have drawn, such as one that reads data.
        if not all(map(torch.equal, drawn, generator_states(model.device))) and self._draws(
            shards, inputs, labels, part
        ):
            raise ConfigError(
                f"the dense part of {type(model).__name__} draws from torch's generator (nn.Dropout?), in the order in "
                "which threads ask. Draw in inputs(), from a generator of (seed, step, shard) as stoker.Tabular does, "
                "or take shards=1.",
                settings=("shards", "model"),
            )
        moves = [each for index in sorted(moved) for each in moved[index]]
        reached = [each is not None and each.reached for each in slices]
        if (ranks := self.ranks) is None:
            [found] = tree.sums.values()
        else:
            with ranks.whole("add gradients of parameters"):
                found, reached, notes = add_over_ranks(
                    ranks, model.embeddings.shards, count, tree.sums, parameters, reached, self.note(),
                    self._alike(whole_of(batch)),
                )  # fmt: skip
            self.hear(notes)
            if buffers := list(model.buffers()):
                moves = moves_of_ranks(ranks, buffers, moves)
        move_all(moves)
        if found is None:  # an empty batch
            return labels.new_tensor(torch.nan), [None] * (len(inputs) + len(parameters))
        pairs = zip(slices, reached, strict=True)
        joined = [None if each is None else each.joined(reached=wanted) for each, wanted in pairs]
        return found.loss, [*joined, *found.grads]

    def _draws(self, shards: Shards, inputs: Sequence[Tensor], labels: Tensor, part: Compute) -> bool:
        """Return True if the dense part draws from torch's generator: compute a shard again, and look at operations."""
        start, stop = next(((a, b) for a, b in zip(shards.bounds, shards.bounds[1:], strict=False) if a < b), (0, 0))
        own = [each[start:stop].detach().clone().requires_grad_(each.requires_grad) for each in inputs]
        draws = _Draws()  # type: ignore[no-untyped-call]
        with draws:
            if start < stop:
                part(own, labels[start:stop], 1)
        return draws.found

    def _alike(self, batch: Batch) -> Alike:
        """Return numbers of the batch and the model, which are found anew in steps 1, 2, 4, 8, ... of this loss."""
        self._steps += 1
        kind = self.model.device.type
        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        precision, training = torch.get_float32_matmul_precision(), [each.training for each in self.model.modules()]
        modes = cast, precision, training, bits_of_products()
        ways = zlib.crc32(repr(modes).encode())
        if self._steps & (self._steps - 1):
            return Alike(batch.step, 0, 0, ways)
        given = [batch.dense, batch.ids, batch.offsets, batch.weights, batch.labels]
        state = [*self.parameters, *self.model.buffers()]
        rows, values = (_checksum(x for x in each if x is not None) for each in (given, state))
        return Alike(batch.step, rows, values, ways)


@torch.no_grad()
def _logits(model: RecModel, batch: Batch) -> Tensor:
    """Return the logits [B] of the whole batch, without gradients."""
    batch, inputs = _inputs(model, batch)
    shards = _shards(model, batch)
    found: list[Tensor] = [inputs[0].new_empty(0)] * (len(shards.bounds) - 1)
    around = _autocast(model.device.type)

    def work(index: int) -> None:
        start, stop = shards.bounds[index : index + 2]
        if start < stop:
            with torch.no_grad(), around():
                own = tuple(_aligned(each[start:stop]) for each in inputs)
                found[index] = model._logits(model.dense_part, own)

    _run(model, work, len(found))
    mine = torch.cat(found)
    return mine if (ranks := _ranks_of(model)) is None else torch.cat(ranks.gather("gather logits", mine))


def _ranks_of(model: RecModel) -> Ranks | None:
    """Return the ranks that each have shards of the same batch."""
    ranks = model.embeddings.ranks
    return None if ranks is None or ranks.means else ranks


def _inputs(model: RecModel, batch: Batch) -> tuple[Batch, tuple[Tensor, ...]]:
    """Return the examples of this rank, and the inputs of the dense part."""
    if (ranks := _ranks_of(model)) is None:
        return batch, model.inputs(batch)
    batch = share_of(batch, ranks, model.embeddings.shards)
    model.embeddings.share = batch
    try:
        return batch, model.inputs(batch)
    finally:
        model.embeddings.share = None


def _shards(model: RecModel, batch: Batch) -> Shards:
    known = batch.shards if isinstance(batch, Share) else model.embeddings.shards_of(len(batch))
    return known or Shards.of(len(batch), 1)


def _run(model: RecModel, work: Callable[[int], None], count: int) -> None:
    if model.device.type == "cpu":
        each_on_one_thread(work, range(count))
    else:
        for index in range(count):
            work(index)


class _Draws(TorchDispatchMode):
    """Watch for operations that draw from torch's generators, or may: those of other libraries do not say."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**(kwargs or {})}
        own = any(isinstance(each, torch.Generator) for each in (*args, *given.values()))
        known = func.namespace in ("aten", "prim", "prims", "stoker")
        self.found |= not known or (torch.Tag.nondeterministic_seeded in func.tags and not own)
        return func(*args, **given)


def generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a dense part may draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _autocast(kind: str) -> Callable[[], Any]:
    """Return a function that enters the caller's autocast in another thread."""
    if not torch.is_autocast_enabled(kind):
        return nullcontext
    return partial(torch.autocast, kind, torch.get_autocast_dtype(kind), cache_enabled=False)


def _checksum(tensors: Iterable[Tensor]) -> int:
    """Return a number of the values, whatever their types."""
    return checksum(each.to(torch.float64 if each.is_floating_point() else torch.int64) for each in tensors)


def _aligned(part: Tensor) -> Tensor:
    """Return a slice as a leaf whose memory begins as that of a whole tensor: products may depend on it."""
    part = part.detach()
    return part.clone() if part.data_ptr() % _ALIGNED else part


def _own_memory(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return gradients that can be added to in place: autograd may give several parameters the same one."""
    known: set[int] = set()
    found: list[Tensor | None] = []
    for each in grads:
        if each is not None:
            shared = each.data_ptr() in known or 0 in each.stride()
            known.add(each.data_ptr())
            each = each.clone(memory_format=torch.contiguous_format) if shared else each
        found.append(each)
    return found
