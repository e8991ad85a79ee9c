"""The definition of every operation, in plain PyTorch. Other back ends must equal it, forward and gradient.

Legend: B examples, F features, L ids in all, D columns, C rows in fast memory, U distinct rows of a batch.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from stoker.ops.rule import RowRule, condition
from stoker.ops.tree import RowSums, Shards, sum_rows

# The multipliers of SplitMix64 (Steele, Lea & Flood 2014) as signed 64-bit numbers; torch wraps on overflow.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX1 = 0xBF58476D1CE4E5B9 - 2**64
MIX2 = 0x94D049BB133111EB - 2**64
_LANES = 16  # width of the fixed summation tree in row_norm_squared
_FEW = 16  # chunks of lanes that are added one by one
CHUNK = 64  # occurrences of a row whose gradients are summed first; then their sums are


def derive_key(seed: int, *labels: str | int) -> int:
    """Derive a signed 64-bit key for one purpose, so that no two tables or purposes share random numbers."""
    text = "\x1f".join([str(seed), *map(str, labels)]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def counter_bits(key: int | Tensor, counter: Tensor) -> Tensor:
    """Return 64 random bits for each ``counter`` (int64): SplitMix64 as a counter-based generator.

    A value depends on (key, counter) only, so any placement, rank or order of work draws the same numbers.
    """
    z = (counter + 1) * GOLDEN + key
    z = (z ^ _shift_right(z, 30)) * MIX1
    z = (z ^ _shift_right(z, 27)) * MIX2
    return z ^ _shift_right(z, 31)


def uniform(key: int | Tensor, counter: Tensor) -> Tensor:
    """Return a number in [-1, 1) for each ``counter``: float32, exact."""
    return _shift_right(counter_bits(key, counter), 40).to(torch.float32) * 2.0**-23 - 1.0


def init_rows(key: int, start: int, stop: int, dim: int, scale: float) -> Tensor:
    """Return rows ``start..stop`` of a fresh table, uniform in [-scale, scale): [stop - start, dim] float32.

    Row i does not depend on the range, so a table can be filled lazily and in blocks.
    """
    counter = torch.arange(start * dim, stop * dim, dtype=torch.int64, device="cpu")
    return (uniform(key, counter) * torch.tensor(scale, dtype=torch.float32, device="cpu")).view(stop - start, dim)


def addresses(ids: Tensor, bases: Tensor, offsets: Tensor | None) -> Tensor:
    """Return row addresses [L] int64: each id plus the first row of its feature's table.

    ``ids`` is [B, F] (one id a bag) or flat [L] with ``offsets`` [B * F + 1]; ``bases`` is [F] int64.
    """
    return (ids.to(torch.int64) + by_id(bases, ids, offsets)).reshape(-1)


def by_id(by_feature: Tensor, ids: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the value of each id's feature, in the shape of ``ids``; ``by_feature`` is [F]."""
    if offsets is None:
        return by_feature.expand(ids.shape)
    feature = torch.arange(len(offsets) - 1, device=ids.device) % len(by_feature)
    return torch.repeat_interleave(by_feature[feature], bag_lengths(offsets))


def bag_lengths(offsets: Tensor) -> Tensor:
    """Return the number of ids in each bag: [bags] int64."""
    return offsets[1:] - offsets[:-1]


def bag_of(offsets: Tensor, count: int) -> Tensor:
    """Return the bag of each of ``count`` ids: [L] int64."""
    lengths = bag_lengths(offsets)
    # With the size given, the host does not wait for the device.
    return torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths, output_size=count)


def add_in_order(into: Tensor, target: Tensor, values: Tensor) -> Tensor:
    """Do ``into[target[k]] += values[k]`` for k = 0, 1, ...: the order of float additions is part of the result."""
    if len(target) == 0:
        return into
    order = torch.argsort(target, stable=True)
    grouped, counts = torch.unique_consecutive(target[order], return_counts=True)
    start = torch.cumsum(counts, 0) - counts
    for rank in range(int(counts.max())):
        live = counts > rank
        into[grouped[live]] += values[order[start[live] + rank]]
    return into


def add_in_chunks(into: Tensor, target: Tensor, values: Tensor) -> Tensor:
    """Do :func:`add_in_order`, but first sum each CHUNK values of one target, from +0.0; then add these sums in order.

    A row that a batch contains 60,000 times would otherwise be a chain of 60,000 additions, for which a GPU waits.
    """
    order = torch.argsort(target, stable=True)
    counts = torch.unique_consecutive(target[order], return_counts=True)[1]
    rank = torch.arange(len(order), device=order.device) - torch.repeat_interleave(
        torch.cumsum(counts, 0) - counts, counts
    )
    first = rank % CHUNK == 0
    sums = torch.zeros(int(first.sum()), values.shape[1], dtype=values.dtype, device=values.device)
    add_in_order(sums, torch.cumsum(first, 0) - 1, values[order])
    return add_in_order(into, target[order][first], sums)


def factors(count: int, offsets: Tensor | None, weights: Tensor | None, mean: bool) -> Tensor | None:
    """Return the factor of each of ``count`` gradients [L]: its weight, or 1/len(bag) in mean pooling; None: 1."""
    if weights is not None:
        return weights.reshape(-1).to(torch.float32)
    if mean and offsets is not None:
        lengths = bag_lengths(offsets)
        return (torch.ones_like(lengths, dtype=torch.float32) / lengths)[bag_of(offsets, count)]
    return None


def lookup(
    weight: Tensor, rows: Tensor, offsets: Tensor | None, weights: Tensor | None = None, *, mean: bool = False
) -> Tensor:
    """Return pooled rows [bags, D] float32, as ``nn.EmbeddingBag`` does; an empty bag gives zeros.

    ``weight`` [C, D] float32 or bfloat16, ``rows`` [L] int64, ``offsets`` [bags + 1] or None (one row a bag).
    A bag is summed in order of occurrence; its mean is the sum times 1/len.
    """
    picked = weight[rows].to(torch.float32)
    if weights is not None:
        picked = picked * weights.to(torch.float32).unsqueeze(1)
    if offsets is None:
        return picked
    pooled = torch.zeros(len(offsets) - 1, weight.shape[1], dtype=torch.float32, device=weight.device)
    add_in_order(pooled, bag_of(offsets, len(rows)), picked)
    if mean:
        lengths = bag_lengths(offsets).clamp(min=1)
        pooled *= (torch.ones_like(lengths, dtype=torch.float32) / lengths).unsqueeze(1)
    return pooled


def per_sample_weight_gradient(weight: Tensor, rows: Tensor, offsets: Tensor | None, grad: Tensor) -> Tensor:
    """Return the gradient of per-sample weights [L] float32: each row's dot product with its bag's gradient."""
    grads = grad if offsets is None else grad[bag_of(offsets, len(rows))]
    return (grads.to(torch.float32) * weight[rows].to(torch.float32)).sum(1)


def distinct_gradients(
    rows: Tensor, offsets: Tensor | None, weights: Tensor | None, grad: Tensor, *, mean: bool = False,
    shards: Shards | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the distinct rows of a batch [U] (ascending) and the gradient of each [U, D] float32.

    Duplicates are summed in order of occurrence, in chunks (:func:`add_in_chunks`), starting from +0.0: this fixes the
    result to the bit. With ``shards`` of the bags, this is done in each shard, and the sums are added by their tree.
    """
    grads, shard = grad.to(torch.float32), None if shards is None else shards.of_bags(grad)
    if offsets is not None:
        bag = bag_of(offsets, len(rows))
        grads, shard = grads[bag], None if shard is None else shard[bag]
    scales = factors(len(rows), offsets, weights, mean)
    grads = grads if scales is None else grads * scales.unsqueeze(1)
    distinct, inverse = torch.unique(rows, return_inverse=True)
    if shards is not None and shard is not None:
        pairs, inverse = torch.unique(inverse * 2**20 + shard, return_inverse=True)
        start = pairs % 2**20
        parts = add_in_chunks(grads.new_zeros(len(pairs), grad.shape[1]), inverse, grads)
        return distinct, sum_rows(RowSums(pairs >> 20, start, torch.ones_like(start), parts), shards.numbers).values
    total = torch.zeros(len(distinct), grad.shape[1], dtype=torch.float32, device=grad.device)
    return distinct, add_in_chunks(total, inverse, grads)


def row_norm_squared(values: Tensor) -> Tensor:
    """Return the sum of squares of each row [U] float32, in one fixed order.

    Sixteen lanes add every 16th element in order, then fold in halves. A vector unit of 16 lanes adds so; the order is
    written out so that every back end gives the same bits.
    """
    squares = values * values
    pad = -squares.shape[1] % _LANES
    squares = torch.nn.functional.pad(squares, (0, pad)).view(len(values), (values.shape[1] + pad) // _LANES, _LANES)
    chunks = squares.shape[1]
    if chunks > _FEW and len(values):  # a bag is summed in order
        count, device = len(values) * chunks, values.device
        starts = torch.arange(0, count, chunks, device=device)
        parts = squares.view(count, _LANES)
        lanes = torch.nn.functional.embedding_bag(torch.arange(count, device=device), parts, starts, mode="sum")
    else:
        lanes = torch.zeros(len(values), _LANES, dtype=values.dtype, device=values.device)
        for chunk in range(chunks):
            lanes = lanes + squares[:, chunk]
    width = _LANES
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    return lanes[:, 0]


def stochastic_round(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16, up or down with probability by distance; ``bits`` int64 are the random bits.

    Not-a-number and infinity pass through unchanged.
    """
    raw = values.contiguous().view(torch.int32)
    low = _shift_right(bits, 48).to(torch.int32)
    rounded = ((raw + low) & -65536).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values).to(torch.bfloat16)


class Tensors:
    """Arithmetic of :mod:`stoker.ops.rule` on rows [U, D] and numbers of rows [U, 1]."""

    where: Any = staticmethod(torch.where)

    @staticmethod
    def sqrt(values: Tensor) -> Tensor:
        """Return the square roots by way of float64: ``torch.sqrt`` may be an ulp off."""
        return values.to(torch.float64).sqrt().to(torch.float32)

    @staticmethod
    def square_sum(values: Tensor) -> Tensor:
        """Return the sum of squares of each row [U, 1]."""
        return row_norm_squared(values).unsqueeze(1)

    @staticmethod
    def norm(values: Tensor) -> Tensor:
        """Return the Euclidean norm of each row [U, 1]."""
        return Tensors.sqrt(Tensors.square_sum(values))

    @staticmethod
    def over(number: Tensor | float, values: Tensor) -> Tensor:
        """Divide. If the left side is a number, torch alone would multiply by the reciprocal."""
        return (torch.full_like(values, number) if isinstance(number, float) else number) / values

    @staticmethod
    def is_zero(values: Tensor) -> Tensor:
        """Return which elements are 0."""
        return values == 0

    @staticmethod
    def clamp(values: Tensor, limit: float) -> Tensor:
        """Limit each element to [-limit, limit]."""
        return values.clamp(-limit, limit)


def conditioned(g: Tensor, rule: RowRule, w: Tensor, counts: Tensor | None) -> Tensor:
    """Return the gradients [U, D] of distinct rows, clipped and with weight decay (:func:`stoker.ops.rule.condition`).

    ``w`` [U, D] are the rows; ``counts`` [U] int64 tell how often each occurs in the batch, needed for CowClip.
    """
    assert counts is not None or not rule.counts, "CowClip counts occurrences"
    occurs = None if counts is None else counts.to(torch.float32).unsqueeze(1)
    result: Tensor = condition(Tensors, rule.constants(g.shape[1]), rule.flags, g, w, occurs)
    return result


def update_rows(
    weight: Tensor,
    state: dict[str, Tensor],
    rows: Tensor,
    grad: Tensor,
    rule: RowRule,
    *,
    rounding: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """Update ``weight[rows]`` and its state in place; ``rows`` [U] are distinct, ``grad`` [U, D] their gradients.

    ``rounding`` [U, D] int64 are random bits, needed for bfloat16 weights. ``counts`` [U] int64 tell how often each row
    occurs, needed for CowClip. Formulas: :mod:`stoker.ops.rule`.
    """
    w = weight[rows].to(torch.float32)
    g = conditioned(grad, rule, w, counts)
    states = [state[name][rows].view(len(rows), state[name].shape[1:].numel()) for name in rule.definition.state]
    w, *moved = rule.definition.step(Tensors, rule.constants(weight.shape[1]), w, g, *states)
    for name, values in zip(rule.definition.state, moved, strict=True):
        state[name][rows] = values.view(len(rows), *state[name].shape[1:])
    weight[rows] = stored(w, weight.dtype, rounding)


def stored(values: Tensor, dtype: torch.dtype, rounding: Tensor | None) -> Tensor:
    """Return new float32 rows [U, D] in the type of the table."""
    if dtype != torch.bfloat16:
        return values
    assert rounding is not None, "bfloat16 rows need random bits"
    return stochastic_round(values, rounding)


def dot_interaction(dense: Tensor, embedded: Tensor) -> Tensor:
    """Return DLRM's pairwise interaction (Naumov et al. 2019): [B, D + (F + 1) * F / 2].

    ``dense`` [B, D] and ``embedded`` [B, F, D] stack to Z; the strictly lower triangle of Z Z^T, row by row, follows
    the dense vector.
    """
    z = torch.cat([dense.unsqueeze(1), embedded.to(dense.dtype)], dim=1)
    vectors = z.shape[1]
    row, column = torch.tril_indices(vectors, vectors, offset=-1, device=z.device)
    # Index one axis: the gradient of indexing two is several times slower.
    products = torch.bmm(z, z.transpose(1, 2)).flatten(1).index_select(1, row * vectors + column)
    return torch.cat([dense, products], dim=1)
