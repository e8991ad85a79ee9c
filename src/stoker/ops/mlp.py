"""A chain of linear layers with ReLU between them, on the fastest matrix products of the processor.

torch sends float32 products on the CPU to MKL, which uses half-width vectors on AVX-512 processors that are not
Intel's; oneDNN comes in the same package and uses the full width (2.4 times as fast on a Zen 5). With AVX2 MKL is the
faster of the two, in weight gradients by a third: there the chain uses MKL, and still saves the fresh memory that
autograd takes for every ReLU and its gradient. Under bfloat16 autocast the same chain runs in bfloat16
with float32 weights, each cast once a step. On a GPU the ReLU is part of the product if that keeps not-a-numbers; a
kernel passes the gradient through it and sums that of the bias; and weights are padded, so that cuBLAS reads aligned
rows. Results agree within rounding. Elsewhere
(other types, inside ``torch.compile``) this is ``F.linear`` and ReLU.

With batch norm after every ReLU (:func:`normed_mlp`), the norm takes no pass over the batch. It makes y = a h + c of a
column h, which is folded into the next layer, z = W y + b. For the gradient G [B, out] of z, let M = G' h [out, C] and
s = G' 1 [out], sums over the examples. The gradients of W and b are M a + s c' and s, and those of y and of y h, summed
over the examples, are s W and the sums of M W over outputs. The norm's own gradients (Ioffe & Szegedy 2015, section 3)
need only these.

Legend: B examples, C columns of an input, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stoker.ops.by_shard import Apart, move, once, shards_here, sums_by_shard
from stoker.ops.space import HAVE_TRITON

#: Inputs should have a multiple of this many columns: 367 columns take a fifth more time than 368.
ALIGN = 16
_SMALL = 2**14  # elements of a weight: MKL computes the gradients of smaller ones, chunk by chunk


_Single = tuple[Tensor, Tensor | None, Tensor, Tensor]


class _Products:
    """Matrix products in the library that torch chooses: MKL, where torch has it."""

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        """Return [B, out] from ``x`` [B, in], ``weight`` [out, in] and ``bias`` [out]."""
        result = F.linear(x, weight, bias)
        return result.relu_() if relu else result

    @staticmethod
    def relu_gradient(grad: Tensor, output: Tensor, *, own: bool) -> tuple[Tensor, Tensor | None]:
        """Return ``grad`` [B, out] where the ReLU's ``output`` is above 0, else 0, and the sums of its columns [out].

        ``own``: ``grad`` may be overwritten. The sums may be None: they are not computed.
        """
        if own:
            return torch.ops.aten.threshold_backward.grad_input(grad, output, 0, grad_input=grad), None
        return torch.ops.aten.threshold_backward(grad, output, 0), None

    @staticmethod
    def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of weight [out, in] and bias [out] from ``grad`` [B, out] and input ``x`` [B, in]."""
        return grad.t() @ x, grad.sum(0)

    @staticmethod
    def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of ``x`` [B, in]."""
        return grad @ weight

    @staticmethod
    def single_gradients(grad: Tensor, x: Tensor, weight: Tensor, *, relu: bool) -> _Single:
        """Return the gradients of a layer with one output: of ``x`` [B, in], None, of ``weight`` [1, in] and bias [1].

        ``relu``: ``x`` is the output of a ReLU, which the gradient may pass, too; then its sums replace None.
        """
        return grad * weight, None, *_single_sums(grad, x)  # outer products need no matrix kernel


class _Gpu(_Products):
    """The same products with the kernel of a GPU."""

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        if relu and bias is not None and _passes_nan(x, weight, bias):
            return torch._addmm_activation(bias, x, weight.t())
        return _Products.linear(x, weight, bias, relu)

    @staticmethod
    def relu_gradient(grad: Tensor, output: Tensor, *, own: bool) -> tuple[Tensor, Tensor | None]:
        from stoker.ops.gpu.dense import relu_gradient

        result, sums = relu_gradient(grad.contiguous(), output)
        return result, sums

    @staticmethod
    def single_gradients(grad: Tensor, x: Tensor, weight: Tensor, *, relu: bool) -> _Single:
        if not relu:
            return _Products.single_gradients(grad, x, weight, relu=False)
        from stoker.ops.gpu.dense import relu_gradient

        result, sums, product, total = relu_gradient(grad, x, weight)
        return result, sums, product, total


_passing: dict[tuple[object, ...], bool] = {}


def _passes_nan(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Return True if the product that torch chooses for these sizes keeps not-a-numbers in its fused ReLU.

    Libraries do not say so, and one that makes them 0 would hide a run that diverges. The first call of each size asks
    the device, and waits for it.
    """
    kind = (x.device, x.dtype, x.shape, weight.shape, torch.get_float32_matmul_precision())
    if kind not in _passing:
        if torch.cuda.is_current_stream_capturing():  # a graph cannot wait
            return False
        unknown = torch.full_like(x, torch.nan)
        _passing[kind] = bool(torch._addmm_activation(bias, unknown, weight.t()).isnan().all())
    return _passing[kind]


class _OneDNN(_Products):
    """The same products in oneDNN's own operators."""

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        return result.relu_() if relu else result  # oneDNN's own would turn NaN to 0

    @staticmethod
    def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if grad.dtype == torch.bfloat16:  # torch sends these products to oneDNN anyway
            return grad.t() @ x, grad.sum(0, dtype=torch.float32)
        if weight.numel() <= _SMALL and torch.backends.mkl.is_available():
            return _by_chunks(grad, x), _column_sums(grad)
        # Not for a single output: at [8192, 64] x [8192, 1] torch 2.13 writes past the end of the result.
        result: tuple[Tensor, Tensor] = torch.ops.aten.mkldnn_linear_backward_weights.default(
            grad.to_mkldnn(), x.to_mkldnn(), weight, True
        )
        return result

    @staticmethod
    def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
        if grad.dtype == torch.bfloat16:
            return grad @ weight
        return _OneDNN.linear(grad, once(weight, _transposed), None, False)


def _transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous()


def _by_chunks(grad: Tensor, x: Tensor) -> Tensor:
    """Return ``grad`` [B, out] transposed times ``x`` [B, in], summed over chunks of rows: [out, in].

    For a small result, copying both into oneDNN's layout takes longer than the product, and one product over all rows
    keeps threads waiting for each other: chunks take half the time (docs/maintainers/log.md).
    """
    rows = 512 if len(x) < 2**14 else 1024
    chunks = len(x) // rows
    if chunks < 2:
        return grad.t() @ x
    whole = chunks * rows
    by_chunk = grad[:whole].view(chunks, rows, grad.shape[1]).transpose(1, 2)
    total = torch.bmm(by_chunk, x[:whole].view(chunks, rows, x.shape[1])).sum(0)
    return total.addmm_(grad[whole:].t(), x[whole:]) if whole < len(x) else total


def _column_sums(x: Tensor) -> Tensor:
    """Sum ``x`` [B, C] over its rows; many of them by chunks, in a third of the time of one sum."""
    whole = len(x) // 256 * 256 if len(x) >= 2**13 else 0
    rest = x[whole:].sum(0)
    return x[:whole].reshape(whole // 256, 256, x.shape[1]).sum(1).sum(0).add_(rest) if whole else rest


@cache
def _products(dtype: torch.dtype, device: str = "cpu") -> type[_Products]:
    """Choose the library for ``dtype`` by rule, not by timing, so that a resumed run has the same bits."""
    if device != "cpu":
        return _Gpu
    if not torch.backends.mkldnn.is_available():
        return _Products
    if (
        dtype == torch.float32
        and torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
    ):
        return _Products
    try:  # do its operators exist in this torch, take the type and give the right result?
        x, weight, bias, grad = (torch.ones(size, dtype=dtype, device="cpu") for size in ((2, 3), (4, 3), (4,), (2, 4)))
        right = torch.equal(_OneDNN.linear(x, weight, bias, True), torch.full((2, 4), 4.0, dtype=dtype, device="cpu"))
        product, total = _OneDNN.weight_gradient(grad, x, weight)
    except (AttributeError, RuntimeError):
        return _Products
    return _OneDNN if right and bool((product == 2.0).all()) and bool((total == 2.0).all()) else _Products


def _single_sums(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight [1, in] and bias [1] of a layer with one output."""
    return grad.t() @ x, grad.sum(0)


class _MLPFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, relu_last: bool, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        layers = len(parameters) // 2
        products = _products(dtype, x.device.type)
        parameters = tuple([each if each.dtype == dtype else each.to(dtype) for each in parameters])
        ctx.extra = x.shape[1] - parameters[0].shape[1]
        if ctx.extra:
            parameters = (once(parameters[0], F.pad, (0, ctx.extra)), *parameters[1:])
        activations = [x.to(dtype)]
        for layer in range(layers):
            weight, bias = parameters[2 * layer : 2 * layer + 2]
            activations.append(products.linear(activations[-1], weight, bias, relu_last or layer < layers - 1))
        ctx.relu_last, ctx.shards = relu_last, shards_here()
        ctx.save_for_backward(*activations, *parameters)
        return activations[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layers = (len(ctx.saved_tensors) - 1) // 3
        activations, parameters = ctx.saved_tensors[: layers + 1], ctx.saved_tensors[layers + 1 :]
        products = _products(activations[0].dtype, grad.device.type)
        grads: list[Tensor | None] = []
        passed: Tensor | None = None  # the gradient of this layer's bias, if the gradient has passed its ReLU
        for layer in reversed(range(layers)):
            x, weight, last, total = activations[layer], parameters[2 * layer], layer == layers - 1, passed
            passed = None
            if total is None and (not last or ctx.relu_last):
                # But for the last layer's, grad was made here, so nothing else uses it.
                grad, total = products.relu_gradient(grad, activations[layer + 1], own=not last)
            if last:
                grad = grad.to(x.dtype).contiguous()
            if weight.shape[0] == 1 and ctx.shards == 1:
                grad, passed, product, total = products.single_gradients(grad, x, weight, relu=layer > 0)
            elif weight.shape[0] == 1:
                product, total = sums_by_shard(_single_sums, ctx.shards, grad, x)
                grad = grad * weight
            elif total is not None:
                product = grad.t() @ x
            else:
                product, total = sums_by_shard(partial(products.weight_gradient, weight=weight), ctx.shards, grad, x)
            grads += [total, product]
            if weight.shape[0] > 1 and (layer > 0 or ctx.needs_input_grad[0]):
                grad = products.input_gradient(grad, weight)
        if ctx.extra and (first := grads[-1]) is not None:
            grads[-1] = first[:, : -ctx.extra]
        wide = [each if each is None or each.dtype == torch.float32 else each.float() for each in reversed(grads)]
        return (grad.to(torch.float32) if ctx.needs_input_grad[0] else None, None, None, *wide)


def _dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _is_plain(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return True if these inputs take torch's own operations."""
    return (
        not (x.device.type == "cpu" or (x.device.type == "cuda" and HAVE_TRITON))
        or weight.dtype != torch.float32
        or dtype not in (torch.float32, torch.bfloat16)
        or torch.compiler.is_compiling()
        or not len(x)
    )


def is_fast(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return True if :func:`normed_mlp` takes ``x`` [B, in] and these weights: in bfloat16 it would be too coarse."""
    return x.device.type == "cpu" and _dtype(x) == torch.float32 and not _is_plain(x, weights[0], torch.float32)


def mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *, relu_last: bool) -> Tensor:
    """Pass ``x`` [B, in] through every layer, with ReLU after each (the last only if ``relu_last``): [B, out].

    ``weights[l]`` is [out_l, in_l] and ``biases[l]`` [out_l], as in ``nn.Linear``. ``x`` may have more columns than
    ``weights[0]``: they must be zero, and have no effect (see :data:`ALIGN`).
    """
    dtype = _dtype(x)
    if _is_plain(x, weights[0], dtype):
        if shards_here() > 1:
            raise Apart
        x = x[:, : weights[0].shape[1]]
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            x = F.linear(x, weight, bias)
            x = F.relu(x) if relu_last or layer < len(weights) - 1 else x
        return x
    parameters = [tensor for pair in zip(weights, biases, strict=True) for tensor in pair]
    result: Tensor = _MLPFunction.apply(x.contiguous(), relu_last, dtype, *parameters)  # type: ignore[no-untyped-call]
    return result


class _Norm(NamedTuple):
    """What batch norm makes of a column h: a h + c, with a = gain * inverse and c = bias - mean * a."""

    mean: Tensor
    inverse: Tensor  # 1 / deviation
    a: Tensor
    c: Tensor
    of_batch: bool  # by its own moments

    @classmethod
    def of(cls, module: nn.BatchNorm1d, h: Tensor, gain: Tensor, bias: Tensor, of_batch: bool) -> _Norm:
        """Return the norm of ``h`` [B, C], by its own moments, which also update the running ones, or by the latter."""
        mean, variance = module.running_mean, module.running_var
        assert mean is not None
        assert variance is not None
        if of_batch:
            found = _column_sums(h) / len(h)
            # One pass for the squared deviations, instead of two.
            squares = _column_sums(F.mse_loss(h, found.expand_as(h), reduction="none"))
            momentum = module.momentum or 0.1
            move(mean, found, momentum)
            move(variance, squares / (len(h) - 1), momentum)
            mean, variance = found, squares / len(h)
        inverse = torch.rsqrt(variance + module.eps)
        a = gain * inverse
        return cls(mean.clone(), inverse, a, bias - mean * a, of_batch)

    def gradients(self, product: Tensor, total: Tensor, weight: Tensor) -> list[Tensor]:
        """Return the gradients of gain, bias, next weight and its bias, from M, s and that weight."""
        bias = total @ weight
        gain = ((product * weight).sum(0) - self.mean * bias) * self.inverse
        return [gain, bias, product * self.a + torch.outer(total, self.c), total]


def _sums(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return M [out, C] and s [out]."""
    if len(weight) == 1:  # outer products need no matrix kernel
        return grad.t() @ x, grad.sum(0)
    return _products(torch.float32).weight_gradient(grad, x, weight)


class _NormedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norms: Any, of_batch: Any, embedded: Tensor, dense: Tensor, *parameters: Tensor) -> Tensor:
        of_embedded, of_dense, bias, *rest = parameters
        products = _products(torch.float32)
        z = products.linear(embedded, of_embedded, bias, False)
        if dense.shape[1]:
            z.addmm_(dense, of_dense.t())
        chain, inner = [], []
        for norm, own, *four in zip(norms, of_batch, *(rest[at::4] for at in range(4)), strict=True):
            gain, shift, weight, bias = four
            inner.append(z.relu_())
            chain.append(_Norm.of(norm, z, gain, shift, own))
            z = products.linear(z, weight * chain[-1].a, torch.addmv(bias, weight, chain[-1].c), False)
        ctx.save_for_backward(embedded, dense, *parameters, *inner)
        ctx.chain = chain
        return z.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        embedded, dense, of_embedded, _, _, *rest = ctx.saved_tensors
        products, grad = _products(torch.float32), grad.unsqueeze(1)
        grads: list[Tensor] = []
        inner, weights = rest[4 * len(ctx.chain) :], rest[2 : 4 * len(ctx.chain) : 4]
        for norm, h, weight in reversed(list(zip(ctx.chain, inner, weights, strict=True))):
            grads = [*norm.gradients(*_sums(grad, h, weight), weight), *grads]
            v = norm.a * norm.inverse * grads[0] / len(h) if norm.of_batch else torch.zeros_like(norm.a)
            u = norm.mean * v - norm.a * grads[1] / len(h) if norm.of_batch else v
            if len(weight) == 1:
                grad = torch.addcmul(u, grad, weight[0] * norm.a)
            else:
                grad = products.linear(grad, (weight * norm.a).t().contiguous(), u, False)
            grad.addcmul_(h, v, value=-1.0)
            torch.ops.aten.threshold_backward.grad_input(grad, h, 0, grad_input=grad)
        product, total = _sums(grad, embedded, of_embedded)
        first = [product, _by_chunks(grad, dense), total]
        back = products.linear(grad, of_embedded.t().contiguous(), None, False) if ctx.needs_input_grad[2] else None
        return None, None, back, None, *first, *grads


def normed_mlp(
    embedded: Tensor, dense: Tensor, layers: tuple[Sequence[Tensor], Sequence[Tensor]],
    norms: Sequence[nn.BatchNorm1d | None], of_batch: Sequence[bool],
) -> Tensor:  # fmt: skip
    """Pass ``embedded`` [B, E] next to the normed ``dense`` [B, N] through layers of one output at last: [B].

    Batch norm follows the ReLU of every layer but the last, which has none. On the CPU, see :func:`is_fast`.

    Args:
        embedded: goes in as it is.
        dense: no gradient is made for it.
        layers: their weights [out, in] and biases [out].
        norms: of ``dense``, None if N is 0, and of each output but the last.
        of_batch: whether each norm takes the moments of the batch, of at least two rows, and updates the running ones.
    """
    (weight, *weights), (bias, *biases) = layers
    first, *others = norms
    of_dense = weight[:, embedded.shape[1] :]
    if first is not None:
        with torch.no_grad():
            mean, inverse, *_ = _Norm.of(first, dense, first.weight, first.bias, of_batch[0])
            dense = (dense - mean).mul_(inverse)
        bias = torch.addmv(bias, of_dense, first.bias)
        of_dense = of_dense * first.weight
    stages = [weight[:, : embedded.shape[1]].contiguous(), of_dense, bias]
    for norm, *layer in zip(others, weights, biases, strict=True):
        assert norm is not None
        stages += [norm.weight, norm.bias, *layer]
    result: Tensor = _NormedMLP.apply(others, of_batch[1:], embedded.contiguous(), dense, *stages)  # type: ignore[no-untyped-call]
    return result
