"""CUDA graphs of a model's dense part: one launch a pass, where the host would queue about seventy.

Experimental: graphs need a GPU, so no test in CI captures one. Tests run the same code with a recorder that repeats the
work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_SHAPES = 4  # graphs that are kept; each keeps the activations of a batch
_WARM = 3  # runs before a capture: libraries choose their kernels then


def capture(work: Callable[[], Any], stream: torch.cuda.Stream | None) -> tuple[Any, Callable[[], None]]:
    """Capture ``work``; return its results, and a function that repeats it and overwrites them."""
    graph = torch.cuda.CUDAGraph()
    # Threads that move rows may allocate and ask events meanwhile: only this thread's calls must be capturable.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = work()
    return results, graph.replay


class _Recorded:
    """Forward and backward for inputs of one kind, in memory that every batch shares."""

    def __init__(
        self, model: nn.Module, part: Callable[..., Tensor], inputs: Sequence[Tensor], parameters: Any
    ) -> None:
        self._model, self._part = model, part
        self._made: Tensor | None = None
        self.inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
        # Autograd remembers on which stream a parameter was first used; the same memory under other names was on none.
        self._aliases = {id(each): nn.Parameter(each.detach(), requires_grad=each.requires_grad) for each in parameters}
        trained = [*self.inputs, *(self._aliases[id(each)] for each in parameters)]
        self._wanted = [each for each in trained if each.requires_grad]
        stream = torch.cuda.Stream(inputs[0].device) if inputs[0].is_cuda else None
        with torch.enable_grad():
            self._warm(stream)
            (self.out,), self.forward = capture(self._run_forward, stream)
            self.slope = torch.zeros_like(self.out)
            found, self.backward = capture(self._run_backward, stream)
        rest = iter(found)
        self.grads = [next(rest) if each.requires_grad else None for each in trained]
        self.runs = 0

    def _warm(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM):
                self.slope = torch.zeros_like(*self._run_forward())
                self._run_backward()
        self._made = None  # no node of autograd is left
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _run_forward(self) -> tuple[Tensor]:
        with self._aliased():
            self._made = self._part(*self.inputs)
        return (self._made,)

    def _run_backward(self) -> tuple[Tensor | None, ...]:
        assert self._made is not None
        return torch.autograd.grad(self._made, self._wanted, self.slope, retain_graph=True, allow_unused=True)

    @contextmanager
    def _aliased(self) -> Iterator[None]:
        """Put the aliases in the place of the parameters."""
        modules = [each._parameters for each in self._model.modules()]
        before = [dict(each) for each in modules]
        try:
            for each in modules:
                each.update({name: self._aliases.get(id(tensor), tensor) for name, tensor in each.items()})
            yield
        finally:
            for each, tensors in zip(modules, before, strict=True):
                each.update(tensors)


class _ReplayFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorded: _Recorded, *given: Tensor) -> Tensor:
        for parameter, value in zip(recorded.inputs, given, strict=False):  # the parameters are where they were
            parameter.detach().copy_(value)
        recorded.forward()
        recorded.runs += 1
        ctx.recorded, ctx.run = recorded, recorded.runs
        out: Tensor = recorded.out.detach().clone()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        recorded = ctx.recorded
        if ctx.run != recorded.runs:
            raise RuntimeError(
                "a second forward pass came before this backward. CUDA graphs of the dense part keep the activations "
                "of one batch: call backward after each loss, or leave graph_dense() (--cuda-graphs) out."
            )
        recorded.slope.copy_(grad)
        recorded.backward()
        # Rows may take their step later, when the next batch has overwritten the graph's memory.
        return None, *(None if each is None else each.clone() for each in recorded.grads)


class DenseGraphs:
    """The dense part, replayed for kinds of inputs that come again; other inputs run as usual.

    Args:
        model: has the parameters.
        part: its dense part: the same operations for every batch of one shape.
        parameters: returns what the part trains.
    """

    def __init__(
        self, model: nn.Module, part: Callable[..., Tensor], parameters: Callable[[], Sequence[Tensor]]
    ) -> None:
        self._model, self._part, self._parameters = model, part, parameters
        self._seen: dict[tuple[Any, ...], _Recorded | None] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the logits [B]."""
        if not torch.is_grad_enabled():
            return self._part(*inputs)
        parameters = self._parameters()
        kind = tuple((each.shape, each.dtype, each.requires_grad) for each in inputs)
        key = (kind, *(each.data_ptr() for each in parameters))  # parameters that moved need graphs of their own
        if key not in self._seen:  # a batch size that comes once, such as the last of an epoch, is not worth a graph
            if len(self._seen) < 16 * _SHAPES:
                self._seen[key] = None
            return self._part(*inputs)
        recorded = self._seen[key]
        if recorded is None:
            if sum(each is not None for each in self._seen.values()) >= _SHAPES:
                return self._part(*inputs)
            recorded = self._seen[key] = _Recorded(self._model, self._part, inputs, parameters)
        result: Tensor = _ReplayFunction.apply(recorded, *inputs, *parameters)  # type: ignore[no-untyped-call]
        return result
