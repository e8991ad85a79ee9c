"""The CPU's kernels of tensor trains against the plain form."""

from __future__ import annotations

import weakref
from dataclasses import fields

import numpy as np
import numpy.typing as npt
import pytest
import torch

from stoker.ops.tt.lookup import Values, expand, gradients, take
from stoker.ops.tt.shape import TTShape
from stoker.ops.tt.trie import Trie, build_trie

pytest.importorskip("numba", reason="tests the kernels that Numba compiles, and numba is not installed here")

SHAPES = (
    TTShape((7, 5, 6), (1, 1, 16), (16, 16)),
    TTShape((30, 20, 20), (2, 2, 4), (13, 7)),  # widths that no vector divides
    TTShape((90, 41), (1, 5), (5,)),
    TTShape((30, 3, 20, 9), (1, 4, 1, 4), (24, 33, 10)),
    TTShape((60, 4, 70), (1, 1, 64), (64, 128)),  # blocks of more rows than a thread takes
    TTShape((50_000, 9), (2, 2), (3,)),  # more digits than nodes
)


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(map(str, shape.rows)))
def shape(request: pytest.FixtureRequest) -> TTShape:
    found: TTShape = request.param
    return found


def made(shape: TTShape, count: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Cores, distinct rows and a gradient for them, in the order of the rows."""
    generator = torch.Generator().manual_seed(3)
    cores = [torch.randn(size, generator=generator) for size in shape.core_shapes]
    rows = torch.unique(torch.randint(0, shape.capacity, (count,), generator=generator))
    return cores, rows, torch.randn(len(rows), shape.dim, generator=generator)


def both_ways(shape: TTShape, count: int) -> tuple[Trie, Values, list[tuple[torch.Tensor, torch.Tensor]]]:
    cores, rows, grad = made(shape, count)
    trie = build_trie(rows, shape, cores[0])
    values = expand(cores, trie)
    return trie, values, gradients(cores, trie, values, trie.from_order(grad))


def close(mine: torch.Tensor, plain: torch.Tensor) -> None:
    scale = float(plain.abs().max()) if plain.numel() else 1.0
    torch.testing.assert_close(mine, plain, rtol=0, atol=2e-6 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 40, 3000])
def test_kernels_equal_the_plain_form(shape: TTShape, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trie, values, slices = both_ways(shape, count)
    monkeypatch.setattr("stoker.ops.tt.trie.HAVE_NUMBA", False)
    plain_trie, plain_values, plain_slices = both_ways(shape, count)
    for level, plain in zip(trie.levels, plain_trie.levels, strict=True):
        for field in fields(plain):
            a, b = getattr(level, field.name), getattr(plain, field.name)
            assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b, field.name
    assert plain_trie.blocks
    assert not trie.blocks
    close(trie.in_order(values.rows), plain_trie.in_order(plain_values.rows))
    for (digits, a), (plain_digits, b) in zip(slices, plain_slices, strict=True):
        assert torch.equal(digits, plain_digits)
        close(a, b)


def test_kernels_keep_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[npt.NDArray[np.int64]]] = []

    def cursor() -> npt.NDArray[np.int64]:
        kept.append(weakref.ref(made := np.zeros(1, np.int64)))
        return made

    monkeypatch.setattr("stoker.ops.tt.cpu._cursor", cursor)
    both_ways(SHAPES[0], 40)
    assert {each() is None for each in kept} == {True}


def test_threads_change_no_bit(shape: TTShape) -> None:
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(both_ways(shape, 3000))
    finally:
        torch.set_num_threads(threads)
    for _, values, slices in found[1:]:
        assert all(map(torch.equal, values.kept, found[0][1].kept))
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(slices, found[0][2], strict=True))


def test_a_row_is_the_same_in_every_batch(shape: TTShape) -> None:
    """A product is summed in one order, whatever rows lie beside it."""
    cores, rows, _ = made(shape, 3000)
    trie = build_trie(rows, shape, cores[0])
    together = trie.in_order(expand(cores, trie).rows)
    for at in range(0, len(rows), 97):
        alone = build_trie(rows[at : at + 1], shape, cores[0])
        assert torch.equal(expand(cores, alone).rows, together[at : at + 1])


def test_rows_may_repeat(shape: TTShape) -> None:
    """Leaves are never made one: a trie of every occurrence takes every gradient by itself."""
    cores, rows, _ = made(shape, 300)
    repeated = rows.repeat_interleave(2)
    trie = build_trie(repeated, shape, cores[0])
    values = expand(cores, trie)
    once = build_trie(rows, shape, cores[0])
    assert torch.equal(trie.in_order(values.rows)[::2], once.in_order(expand(cores, once).rows))
    grad = torch.ones(len(repeated), shape.dim)
    twice = gradients(cores, trie, values, grad)
    single = gradients(cores, once, expand(cores, once), 2 * grad[: len(rows)])
    for (digits, a), (same, b) in zip(twice, single, strict=True):
        assert torch.equal(digits, same)
        close(a, b)


@pytest.mark.parametrize("dim", [5, 16, 64])
def test_gradients_of_taken_rows_are_summed_in_order(dim: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for length, count in ((1, 1), (700, 40), (700, 600)):
        rows = torch.randn(count, dim, generator=generator, requires_grad=True)
        more = torch.randint(0, count, (max(0, length - count),), generator=generator)
        places = torch.cat([torch.randperm(count, generator=generator), more])
        grad = torch.randn(len(places), dim, generator=generator)
        taken = take(rows, places)
        assert torch.equal(taken, rows[places])
        taken.backward(grad)
        expected = torch.zeros(count, dim)
        for place, each in zip(places.tolist(), grad, strict=True):
            expected[place] += each
        assert rows.grad is not None
        assert torch.equal(rows.grad, expected)
