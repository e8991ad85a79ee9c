"""Tensor-train rows against their definition: tries, gradients, shapes, fresh cores and TT-SVD."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from campaigns import scaled
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.ops.tt import lookup as tensor_train
from stoker.ops.tt.lookup import (
    decompose,
    digits_of,
    expand,
    fill_core,
    gradients,
    rows_by_definition,
)
from stoker.ops.tt.shape import TTShape, factorize
from stoker.ops.tt.trie import build_trie

FAR = TTShape((2**21, 2**21, 2**11), (1, 2, 3), (2, 1))  # 2**53 rows


@st.composite
def shapes(draw: st.DrawFn, largest: int = 7) -> TTShape:
    """2 to 4 cores with unequal ranks, some larger than what they can use, and cores of one row or one column."""
    count = draw(st.integers(2, 4))
    rows = draw(st.lists(st.integers(1, largest), min_size=count, max_size=count))
    cols = draw(st.lists(st.sampled_from([1, 2, 3, 5]), min_size=count, max_size=count))
    ranks = draw(st.lists(st.integers(1, 5), min_size=count - 1, max_size=count - 1))
    return TTShape(tuple(rows), tuple(cols), tuple(ranks))


def some_rows(shape: TTShape, seed: int, many: bool) -> Tensor:
    """Distinct rows, ascending; few of them leave digits out, and one row may be all there is."""
    generator = torch.Generator().manual_seed(seed)
    count = min(shape.capacity, 200 if many else 3)
    drawn = torch.randint(0, shape.capacity, (count,), generator=generator)
    if seed % 3 == 0:
        drawn = torch.cat([drawn, torch.tensor([0, shape.capacity - 1])])
    return torch.unique(drawn)


def cores_of(shape: TTShape, seed: int, *, integers: bool = False, only: Tensor | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if integers:
        return [torch.randint(-2, 3, size, generator=generator).float() for size in shape.core_shapes]
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in shape.core_shapes]


def by_trie(cores: list[Tensor], rows: Tensor, shape: TTShape, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Rows in ascending order, and gradients as large as the cores, with NaN in slices that got none."""
    trie = build_trie(rows, shape, cores[0])
    values = expand(cores, trie)
    found = trie.in_order(values.rows)
    whole = []
    for core, (digits, slices) in zip(
        cores, gradients(cores, trie, values, trie.from_order(grad)), strict=True
    ):  # fmt: skip
        assert torch.equal(digits, torch.unique(digits))
        whole.append(torch.full_like(core, math.nan))
        whole[-1][digits] = slices
    return found, whole


def by_definition(cores: list[Tensor], rows: Tensor, shape: TTShape, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [core.clone().requires_grad_() for core in cores]
    found = rows_by_definition(leaves, rows, shape)
    found.backward(grad)
    whole = []
    for leaf, digits in zip(leaves, digits_of(rows, shape), strict=True):
        assert leaf.grad is not None
        missing = torch.ones(len(leaf), dtype=torch.bool)
        missing[digits] = False
        assert not leaf.grad[missing].any()
        leaf.grad[missing] = math.nan
        whole.append(leaf.grad)
    return found.detach(), whole


def test_a_row_is_the_product_of_its_slices_in_mixed_radix() -> None:
    """The definition itself, element by element and in exact integers."""
    shape = TTShape((3, 2, 4), (2, 3, 1), (2, 3))
    cores = cores_of(shape, 0, integers=True)
    rows = rows_by_definition(cores, torch.arange(shape.capacity), shape)
    for row in range(shape.capacity):
        digits = (row // 8, row // 4 % 2, row % 4)
        for column in range(shape.dim):
            places = (column // 3, column % 3, 0)
            product = torch.ones(1, 1)
            for core, digit, place, cols in zip(cores, digits, places, shape.cols, strict=True):
                left = core.shape[1]
                product = product @ core[digit].view(left, cols, -1)[:, place]
            assert rows[row, column] == product.item()


@pytest.mark.slow
@settings(max_examples=scaled(150))
@given(shape=shapes(), seed=st.integers(0, 2**20), many=st.booleans())
@example(shape=TTShape((5, 1, 5), (1, 7, 1), (3, 2)), seed=1, many=True)
@example(shape=TTShape((1, 1), (1, 13), (1,)), seed=0, many=False)
def test_rows_and_gradients_equal_the_definition(shape: TTShape, seed: int, many: bool) -> None:
    cores, rows = cores_of(shape, seed), some_rows(shape, seed, many)
    grad = torch.randn(len(rows), shape.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found, slices = by_trie(cores, rows, shape, grad)
    expected, wanted = by_definition(cores, rows, shape, grad)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for mine, other in zip(slices, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.slow
@settings(max_examples=scaled(80))
@given(shape=shapes(4), seed=st.integers(0, 2**20), many=st.booleans())
def test_exact_on_small_integers(shape: TTShape, seed: int, many: bool) -> None:
    """Every product and sum is a whole number below 2**24, so float32 has no excuse."""
    shape = TTShape(shape.rows, shape.cols, tuple(min(2, rank) for rank in shape.ranks))
    cores, rows = cores_of(shape, seed, integers=True), some_rows(shape, seed, many)
    grad = torch.randint(-2, 3, (len(rows), shape.dim), generator=torch.Generator().manual_seed(seed)).float()
    found, slices = by_trie(cores, rows, shape, grad)
    expected, wanted = by_definition([core.double() for core in cores], rows, shape, grad.double())
    assert torch.equal(found.double(), expected)
    for mine, other in zip(slices, wanted, strict=True):
        assert torch.equal(torch.nan_to_num(mine.double(), 99), torch.nan_to_num(other, 99))


@pytest.mark.slow
@settings(max_examples=scaled(40))
@given(
    rows=st.lists(st.one_of(st.integers(0, FAR.capacity - 1), st.integers(FAR.capacity - 9, FAR.capacity - 1)),
                  min_size=1, max_size=30, unique=True)
)  # fmt: skip
@example(rows=[2**31 - 1, 2**31, 2**32 + 1, 2**52 + 1, 2**53 - 1])
def test_ids_that_no_float_holds(rows: list[int]) -> None:
    """Digits above 2**31 and next to 2**53, by Python's own integers."""
    trie = build_trie(torch.tensor(sorted(rows)), FAR, torch.zeros(0))
    assert trie.levels[-1].digit.tolist() == sorted(row % 2**11 for row in rows)
    tops = sorted({row // 2**32 for row in rows})
    assert trie.levels[0].digit.tolist() == tops
    expected = [(row // 2**32, row // 2**11 % 2**21, row % 2**11) for row in rows]
    assert [tuple(column) for column in torch.stack(digits_of(torch.tensor(rows), FAR), 1).tolist()] == expected
    # Walk up from each row: its digits are those of its nodes.
    for place, row in enumerate(sorted(rows)):
        last = trie.levels[2]
        node = int(last.by_prefix[place])
        assert last.parent is not None
        middle = int(last.parent[node])
        assert trie.levels[1].parent is not None
        top = int(trie.levels[1].parent[middle])  # the first digit: values of the first level are the whole core
        digits = (top, int(trie.levels[1].digit[middle]), int(last.digit[node]))
        assert digits == (row // 2**32, row // 2**11 % 2**21, row % 2**11)


@pytest.mark.slow
def test_rows_at_the_end_of_a_huge_table() -> None:
    """Row products where 2**53 rows are addressed: cores of 4 million values and no more."""
    shape = TTShape((2**21, 2**21, 2**13), (1, 1, 2), (1, 1))  # 2**55 rows
    cores = [
        torch.arange(size[0]).view(-1, 1, 1).expand(size).remainder(251).add(1).float() for size in shape.core_shapes
    ]
    rows = torch.tensor([0, 2**31 + 5, 2**53 - 1, 2**53 + 1, 2**54 + 12345, 2**55 - 2, 2**55 - 1])
    trie = build_trie(rows, shape, cores[0])
    found = trie.in_order(expand(cores, trie).rows)
    for row, value in zip(rows.tolist(), found.tolist(), strict=True):
        digits = (row // 2**34, row // 2**13 % 2**21, row % 2**13)
        assert value == [float(math.prod(digit % 251 + 1 for digit in digits))] * 2


@settings(max_examples=scaled(60))
@given(shape=shapes(), seed=st.integers(0, 2**20), many=st.booleans())
def test_every_distinct_prefix_is_one_node(shape: TTShape, seed: int, many: bool) -> None:
    rows = some_rows(shape, seed, many)
    trie = build_trie(rows, shape, torch.zeros(0))
    for place, level in enumerate(trie.levels, 1):
        below = math.prod(shape.rows[place:])
        prefixes = {row // below for row in rows.tolist()}
        assert len(level.digit) == len(prefixes)
        # Nodes of a digit lie together, in ascending order of the digits; by_prefix lists each node once.
        assert torch.equal(level.digits, torch.unique(level.digit))
        assert level.start[0] == 0
        assert level.start[-1] == len(level.digit)
        for digit, begin, stop in zip(level.digits, level.start, level.start[1:], strict=False):
            assert (level.digit[begin:stop] == digit).all()
        assert torch.equal(torch.sort(level.by_prefix)[0], torch.arange(len(prefixes)))
        assert torch.equal(level.digit[level.by_prefix], torch.tensor(sorted(prefixes)) % shape.rows[place - 1])
        if level.children is not None:
            assert int(level.children.sum()) == len(prefixes)


@pytest.mark.slow
@settings(max_examples=60)
@given(shape=shapes(), seed=st.integers(0, 2**20), many=st.booleans(), most=st.integers(0, 3),
       chunk=st.integers(1, 4))  # fmt: skip
def test_blocks_have_each_node_once(shape: TTShape, seed: int, many: bool, most: int, chunk: int) -> None:
    """Places by blocks against the nodes themselves, also where a digit has several blocks and a node many children."""
    rows = some_rows(shape, seed, many)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stoker.ops.tt.trie._MOST", most)
        patch.setattr("stoker.ops.tt.trie._SPARE", 0)
        patch.setattr("stoker.ops.tt.trie.CHUNK", chunk)
        trie = build_trie(rows, shape, torch.zeros(0, dtype=torch.float64))
        cores, grad = cores_of(shape, seed), torch.randn(len(rows), shape.dim, dtype=torch.float64)
        found, slices = by_trie(cores, rows, shape, grad)
    before = len(trie.levels[0].digit)
    for level, block, slices_of in zip(trie.levels[1:], trie.blocks, shape.rows[1:], strict=True):
        count = len(block.parents) // block.size
        digits = torch.arange(slices_of) if block.digits is None else block.digits
        assert len(digits) == count
        assert len(block.parents) <= max(3, most) * len(level.digit) + 2 * len(level.digits)
        children, starts, chunks = block.children
        assert torch.equal(torch.sort(children)[0], torch.unique(children))
        assert int(starts.diff().max()) <= chunk
        if chunks is not None:
            starts = starts[chunks]
        assert len(starts) == before + 1
        over = torch.repeat_interleave(torch.arange(before), starts.diff())
        parents = block.parents[children]
        if level is trie.levels[1]:
            parents = torch.searchsorted(trie.levels[0].digit, parents)
        assert torch.equal(parents, over)
        assert sorted(digits[children // block.size].tolist()) == level.digit.tolist()
        before = len(block.parents)
    assert len(torch.unique(trie.places)) == len(rows)
    expected, wanted = by_definition(cores, rows, shape, grad)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(slices, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11, equal_nan=True)


def test_one_product_for_each_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is shared: 64 rows with one common prefix cost one product more than a row alone in the second level."""
    shape, sizes = TTShape((4, 4, 64), (1, 1, 8), (3, 5)), []
    multiply = torch.bmm

    def counted(left: Tensor, right: Tensor) -> Tensor:
        sizes.append(tuple(left.shape[:2]))
        return multiply(left, right)

    monkeypatch.setattr(tensor_train.torch, "bmm", counted)
    cores = cores_of(shape, 0)
    expand(cores, build_trie(torch.arange(64) + 5 * 64, shape, cores[0]))
    assert sizes == [(1, 1), (64, 1)]


def test_order_and_its_inverse() -> None:
    shape = TTShape((3, 4, 5), (1, 1, 2), (2, 2))
    rows = some_rows(shape, 7, True)
    trie = build_trie(rows, shape, torch.zeros(0))
    values = torch.randn(len(rows), 3)
    assert torch.equal(trie.in_order(trie.from_order(values)), values)
    assert torch.equal(trie.from_order(trie.in_order(values)), values)
    assert not torch.equal(trie.in_order(values), values)


def test_no_rows_at_all() -> None:
    shape = TTShape((3, 4, 5), (1, 2, 2), (2, 3))
    cores, rows = cores_of(shape, 0), torch.zeros(0, dtype=torch.int64)
    trie = build_trie(rows, shape, cores[0])
    values = expand(cores, trie)
    assert values.rows.shape == (0, 4)
    found = gradients(cores, trie, values, torch.zeros(0, 4, dtype=torch.float64))
    assert [tuple(slices.shape) for _, slices in found] == [(0, *size[1:]) for size in shape.core_shapes]


@pytest.mark.slow
def test_the_same_bits_again_and_with_another_number_of_threads() -> None:
    shape = TTShape((40, 30, 20), (2, 4, 4), (16, 24))
    generator = torch.Generator().manual_seed(0)
    cores = [torch.randn(size, generator=generator) for size in shape.core_shapes]
    rows = torch.unique(torch.randint(0, shape.capacity, (6000,), generator=generator))
    grad = torch.randn(len(rows), shape.dim, generator=generator)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (2, 2, 1):
            torch.set_num_threads(threads)
            found, slices = by_trie(cores, rows, shape, grad)
            results.append([found, *(part.nan_to_num(9) for part in slices)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(mine, its) for mine, its in zip(results[0], other, strict=True))


# ---- shapes


def least_bytes(rows: int, dim: int, rank: int, cores: int) -> int:
    """Of all factors whatsoever, by trying them. With a rank beyond use it may be the table itself."""

    def columns(value: int, count: int) -> list[tuple[int, ...]]:
        if count == 1:
            return [(value,)]
        return [
            (first, *rest)
            for first in range(1, value + 1)
            if value % first == 0
            for rest in columns(value // first, count - 1)
        ]

    best = 10**18
    for rest in itertools.product(range(1, rows + 1), repeat=cores - 1):
        if math.prod(rest) > 2 * rows:
            continue
        for cols in columns(dim, cores):
            factors = (-(-rows // math.prod(rest)), *rest)
            sizes = [row * col for row, col in zip(factors, cols, strict=True)]
            ranks = [min(rank, math.prod(sizes[:cut]), math.prod(sizes[cut:])) for cut in range(1, cores)]
            ends = [1, *ranks, 1]
            best = min(best, sum(size * ends[k] * ends[k + 1] for k, size in enumerate(sizes)))
    return best


@pytest.mark.slow
@pytest.mark.parametrize("cores", [2, 3])
@pytest.mark.parametrize(
    ("rows", "dim", "rank"),
    [(1, 1, 1), (7, 5, 2), (60, 8, 3), (61, 8, 4), (97, 12, 2), (150, 6, 3), (144, 16, 4), (211, 7, 3)],
)
def test_close_to_the_fewest_bytes_there_are(rows: int, dim: int, rank: int, cores: int) -> None:
    shape = factorize(rows, dim, rank, cores)
    assert shape.num_parameters <= 1.1 * least_bytes(rows, dim, rank, cores)


@pytest.mark.slow
@settings(max_examples=scaled(120))
@given(
    rows=st.one_of(st.integers(1, 50), st.integers(1, 10**10)),
    dim=st.sampled_from([1, 2, 7, 16, 31, 48, 64]),
    cores=st.integers(2, 4),
    rank=st.integers(1, 130),
)
def test_factors_hold_the_table(rows: int, dim: int, cores: int, rank: int) -> None:
    shape = factorize(rows, dim, rank, cores)
    assert len(shape.rows) == cores
    assert shape.capacity == math.prod(shape.rows) >= rows
    assert shape.dim == math.prod(shape.cols) == dim
    sizes = [row * col for row, col in zip(shape.rows, shape.cols, strict=True)]
    for cut, found in enumerate(shape.ranks, 1):
        assert found == min(rank, math.prod(sizes[:cut]), math.prod(sizes[cut:]))
    assert shape.num_parameters == sum(math.prod(size) for size in shape.core_shapes)


def test_each_rank_of_its_own() -> None:
    assert factorize(10**6, 64, (8, 16)).ranks == (8, 16)
    assert factorize(10**6, 64, (8, 16, 4), 4).ranks == (8, 16, 4)
    assert factorize(10**6, 64, [8, 16]).ranks == (8, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 2), "0 rows"),
        ((5, 0, 2), "0 columns"),
        ((5, 4, 0), "rank 0"),
        ((5, 4, (2,)), "rank"),
        ((5, 4, (2, 0)), "rank"),
        ((5, 4, 2, 1), "2 to 4 cores"),
        ((5, 4, 2, 5), "2 to 4 cores"),
    ],
)
def test_numbers_out_of_range(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        factorize(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ((4,), (4,), ()),
        ((4, 4), (4,), (2,)),
        ((4, 4), (2, 2), (2, 2)),
        ((4, 0), (2, 2), (2,)),
        ((4, 4), (2, 2), (0,)),
    ],
)
def test_shapes_that_do_not_fit_together(arguments: tuple) -> None:
    with pytest.raises(ConfigError):
        TTShape(*arguments)


# ---- fresh cores


def init_core(seed: int, name: str, shape: TTShape, place: int, scale: float) -> torch.Tensor:
    made = torch.empty(shape.core_shapes[place])
    fill_core(made, seed, name, shape, place, scale)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        (TTShape((300, 300), (4, 4), (8,)), 1.0),
        (TTShape((60, 60, 60), (2, 4, 2), (16, 16)), 0.05),
        (TTShape((200, 80, 50), (1, 1, 16), (32, 8)), 3.0),
        (TTShape((30, 30, 30, 30), (2, 2, 2, 2), (12, 20, 12)), 1.0),
        (TTShape((5000, 1), (1, 16), (8,)), 0.1),
    ],
)
def test_fresh_rows_have_the_variance_asked_for(shape: TTShape, scale: float) -> None:
    """Over seeds as well: all rows of one table share few slices, whose luck they share."""
    squares, means = [], []
    rows = torch.unique(torch.randint(0, shape.capacity, (4000,), generator=torch.Generator().manual_seed(0)))
    for seed in range(12):
        cores = [init_core(seed, "t", shape, place, scale) for place in range(len(shape.rows))]
        values = rows_by_definition(cores, rows, shape).double()
        squares.append(values.square().mean().item())
        means.append(values.mean().item())
    asked = scale**2 / 3
    assert np.mean(squares) == pytest.approx(asked, rel=0.04)
    assert abs(np.mean(means)) < 0.03 * asked**0.5


def test_what_is_common_to_all_rows_starts_with_variance_1() -> None:
    """So that a row's own numbers move it as far as its own elements would."""
    own = TTShape((4000, 1), (1, 64), (4,))
    first, last = (init_core(0, "t", own, place, 0.3).double() for place in range(2))
    assert last.square().mean().item() == pytest.approx(1, rel=0.15)
    assert first.square().mean().item() == pytest.approx(0.3**2 / 3 / 4, rel=0.05)
    assert own.own
    assert not any(
        TTShape(*shape).own for shape in (((9, 1), (2, 8), (4,)), ((1, 1), (1, 8), (4,)), ((9, 2), (1, 8), (4,)))
    )


def test_fresh_cores_are_a_function_of_seed_name_and_place() -> None:
    shape = TTShape((6, 6, 6), (2, 2, 2), (3, 3))
    first = init_core(1, "a", shape, 1, 0.5)
    assert first.shape == shape.core_shapes[1]
    assert torch.equal(first, init_core(1, "a", shape, 1, 0.5))
    for other in (init_core(2, "a", shape, 1, 0.5), init_core(1, "b", shape, 1, 0.5)):
        assert (first != other).float().mean() > 0.9
    square = TTShape((6, 6, 6), (1, 1, 1), (1, 1))
    made = [init_core(1, "a", square, place, 0.5) for place in range(3)]
    assert not torch.equal(made[0], made[1])
    assert not torch.equal(made[1], made[2])


# ---- TT-SVD


def dense_of(cores: list[Tensor], shape: TTShape, rows: int) -> Tensor:
    return rows_by_definition(cores, torch.arange(rows), shape)


def unfolding(weight: Tensor, shape: TTShape, cut: int) -> Tensor:
    """The matrix whose rank the cut ``cut`` bounds: rows and columns of the first ``cut`` cores against the rest."""
    places = len(shape.rows)
    padded = torch.zeros(shape.capacity, shape.dim, dtype=weight.dtype)
    padded[: len(weight)] = weight
    left = [axis for place in range(cut) for axis in (place, places + place)]
    right = [axis for place in range(cut, places) for axis in (place, places + place)]
    size = math.prod(shape.rows[:cut]) * math.prod(shape.cols[:cut])
    return padded.view(*shape.rows, *shape.cols).permute(*left, *right).reshape(size, -1)


def least_error(weight: Tensor, shape: TTShape, cut: int) -> float:
    """Frobenius, of the truncated SVD of one unfolding (Eckart and Young)."""
    return torch.linalg.svdvals(unfolding(weight, shape, cut))[shape.ranks[cut - 1] :].norm().item()


@settings(max_examples=scaled(40))
@given(rows=st.integers(1, 60), dim=st.sampled_from([1, 3, 8, 12]), cores=st.integers(2, 4), seed=st.integers(0, 99))
def test_exact_at_full_rank(rows: int, dim: int, cores: int, seed: int) -> None:
    weight = torch.randn(rows, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    shape = factorize(rows, dim, 10**6, cores)
    made = decompose(weight, shape)
    assert [tuple(core.shape) for core in made] == list(shape.core_shapes)
    assert all(core.is_contiguous() and core.dtype == torch.float64 for core in made)
    torch.testing.assert_close(dense_of(made, shape, rows), weight, rtol=1e-10, atol=1e-10)


@settings(max_examples=scaled(60))
@given(shape=shapes(5), missing=st.integers(0, 4), seed=st.integers(0, 99))
@example(shape=TTShape((2, 5), (1, 5), (5,)), missing=0, seed=0)  # a rank that the left side cannot use
@example(shape=TTShape((5, 1), (5, 1), (5,)), missing=0, seed=0)  # and one that the right side cannot
@example(shape=TTShape((2, 2, 5), (1, 2, 5), (1, 5)), missing=0, seed=0)  # and one that the rank before it forbids
def test_no_farther_than_the_bound(shape: TTShape, missing: int, seed: int) -> None:
    """The error of the whole is at most the root of the sum of squares over the cuts (Oseledets 2011, Theorem 2.2)."""
    rows = max(1, shape.capacity - missing)
    weight = torch.randn(rows, shape.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    error = (dense_of(decompose(weight, shape), shape, shape.capacity) - unfolding_rows(weight, shape)).norm().item()
    least = [least_error(weight, shape, cut) for cut in range(1, len(shape.rows))]
    assert max(least) - 1e-9 <= error <= sum(value**2 for value in least) ** 0.5 + 1e-9
    assert error <= (len(shape.rows) - 1) ** 0.5 * max(least) + 1e-9
    if len(shape.rows) == 2:
        assert error == pytest.approx(least[0], abs=1e-9)


def unfolding_rows(weight: Tensor, shape: TTShape) -> Tensor:
    padded = torch.zeros(shape.capacity, shape.dim, dtype=weight.dtype)
    padded[: len(weight)] = weight
    return padded


@pytest.mark.slow
def test_the_error_falls_as_the_rank_rises() -> None:
    weight = torch.randn(200, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    errors = []
    for rank in (1, 2, 4, 8, 16, 32, 64):
        shape = TTShape((8, 5, 5), (1, 4, 4), (rank, rank))
        errors.append((dense_of(decompose(weight, shape), shape, 200) - weight).norm().item())
    assert all(later < before or later < 1e-9 for before, later in itertools.pairwise(errors))
    assert errors[0] > 10
    assert errors[-1] < 1e-9


def test_rows_of_a_train_are_found_again() -> None:
    """In float32, where the exact ranks are known."""
    shape = TTShape((12, 10, 9), (2, 2, 4), (5, 7))
    cores = [torch.randn(size, generator=torch.Generator().manual_seed(k)) for k, size in enumerate(shape.core_shapes)]
    weight = dense_of(cores, shape, shape.capacity)
    found = dense_of(decompose(weight, shape), shape, shape.capacity)
    assert (found - weight).norm() < 1e-5 * weight.norm()


def test_a_table_of_zeros() -> None:
    shape = TTShape((3, 3), (2, 2), (4,))
    assert not dense_of(decompose(torch.zeros(7, 4), shape), shape, 9).any()


def test_a_table_that_does_not_fit() -> None:
    shape = TTShape((3, 3), (2, 2), (4,))
    for size in ((10, 4), (9, 5)):
        with pytest.raises(ConfigError, match="does not fit"):
            decompose(torch.zeros(size), shape)


def test_rows_with_numbers_of_their_own_are_found_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.ops.tt.lookup._COLUMNS", 100)
    shape = TTShape((20_001, 1), (1, 6), (3,))
    cores = [torch.randn(size, generator=torch.Generator().manual_seed(k)) for k, size in enumerate(shape.core_shapes)]
    weight = dense_of(cores, shape, 20_000)
    found = decompose(weight, shape)
    assert (dense_of(found, shape, 20_000) - weight).norm() < 1e-5 * weight.norm()
    assert not found[0][20_000:].any()
    torch.testing.assert_close(found[1][0] @ found[1][0].T, 6 * torch.eye(3), rtol=0, atol=1e-4)  # scaled as fresh ones


def test_a_cut_too_large_for_eigenvectors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.ops.tt.lookup._LARGEST", 5)
    with pytest.raises(ConfigError, match="cuts the table into 6 rows"):
        decompose(torch.zeros(9, 4), TTShape((3, 3), (2, 2), (4,)))
