"""Every epoch is a permutation, whatever the sizes, and looks like a random one."""

from __future__ import annotations

import numpy as np
import pytest
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.errors import ConfigError
from stoker.dataset.order import EpochOrder, permutation, rows_that_fit


@pytest.mark.slow
@settings(deadline=None, max_examples=scaled(100))
@given(
    rows=st.integers(0, 5000),
    pool=st.integers(1, 6000),
    seed=st.none() | st.integers(-5, 2**70),
    cut=st.integers(1, 999),
)
def test_each_row_once_and_any_stretch_alone(rows: int, pool: int, seed: int | None, cut: int) -> None:
    order = EpochOrder(rows, pool_rows=pool, seed=seed, epoch=3)
    whole = order.take(0, rows)
    assert np.array_equal(np.sort(whole), np.arange(rows))
    again = EpochOrder(rows, pool_rows=pool, seed=seed, epoch=3)
    for start in range((rows // cut) * cut, -1, -cut):
        assert np.array_equal(again.take(start, min(start + cut, rows)), whole[start : start + cut])
    blocks = np.concatenate([order.blocks_of(p) for p in range(order.pools)] or [np.empty(0, np.int64)])
    assert np.array_equal(np.sort(blocks), np.arange(-(-rows // order.block_rows)))
    for p in range(order.pools):
        taken = whole[order.pool_starts[p] : order.pool_starts[p + 1]]
        assert len(taken) <= max(pool, 1)
        assert set(np.unique(taken // order.block_rows)) == set(order.blocks_of(p).tolist())


def test_pools_of_several_chunks_have_each_row_once() -> None:
    order = EpochOrder(100_000, pool_rows=40_000, seed=0, epoch=0)
    assert order.pools == 3
    whole = order.take(0, 100_000)
    assert np.array_equal(np.sort(whole), np.arange(100_000))
    parts = [order.take(start, start + 1000) for start in range(0, 100_000, 1000)]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2**14 + 1, 2**16, 100_003, 2**18 + 1])
def test_the_formula_is_a_permutation(size: int) -> None:
    whole = permutation("a", size)(0, size)
    assert np.array_equal(np.sort(whole), np.arange(size))
    assert np.array_equal(permutation("a", size)(size - 7, size), whole[-7:])
    assert (permutation("b", size)(0, size) == whole).mean() < 0.001
    # Correlations of a random permutation are of the order 1 / sqrt(size); five times that is a defect.
    assert abs(np.corrcoef(whole, np.arange(size))[0, 1]) < 5 / size**0.5
    assert abs(np.corrcoef(whole[1:], whole[:-1])[0, 1]) < 5 / size**0.5
    # Neighbours do not stay neighbours: a random permutation keeps about 2 of them.
    assert (np.abs(np.diff(whole)) == 1).sum() < 15


def test_addresses_beyond_32_bits() -> None:
    size = 2**33 + 12345
    values = permutation("far", size)(size - 20_000, size)
    assert values.dtype == np.int64
    assert values.min() >= 0
    assert values.max() < size
    assert len(np.unique(values)) == 20_000
    # Half of a uniform draw lies above the middle; 20,000 draws put six sigma at 424.
    assert abs(int((values > size // 2).sum()) - 10_000) < 424


@pytest.mark.slow
def test_small_ranges_are_uniform() -> None:
    seen = np.zeros((6, 6), int)
    for draw in range(6000):
        seen[np.arange(6), permutation(f"{draw}", 6)(0, 6)] += 1
    assert np.abs(seen - 1000).max() < 6 * (1000 * 5 / 6) ** 0.5


def test_the_order_is_part_of_the_format() -> None:
    """These numbers may not change: a resumed run must see the order that it started with."""
    small = EpochOrder(10, pool_rows=10, seed=1, epoch=0)
    assert small.take(0, 10).tolist() == [4, 5, 2, 3, 0, 6, 9, 7, 1, 8]
    blocks = EpochOrder(1000, pool_rows=100, seed=1, epoch=0)  # of a sixteenth of a pool
    assert blocks.take(95, 101).tolist() == [691, 965, 752, 950, 521, 3]
    large = EpochOrder(10**6, pool_rows=10**5, seed=1, epoch=2)
    assert large.take(123_456, 123_460).tolist() == [389160, 855336, 389621, 790763]


def test_epochs_and_seeds_differ() -> None:
    orders = {
        (seed, epoch): tuple(EpochOrder(1000, pool_rows=300, seed=seed, epoch=epoch).take(0, 1000).tolist())
        for seed in (0, 1, 12)
        for epoch in (0, 1, 2)
    }
    assert len(set(orders.values())) == 9


def test_no_memory_at_all() -> None:
    assert rows_that_fit(1000, 160.0) == 6
    with pytest.raises(ConfigError, match="not even one row of 160 bytes"):
        rows_that_fit(100, 160.0)


@pytest.mark.parametrize("size", [2**14 + 1, 2**15, 2**15 + 1, 100_003, 3 * 2**20 + 7, 2**33 + 5, 2**61 + 11, 2**62])
def test_the_compiled_permutation_is_that_of_numpy(size: int) -> None:
    pytest.importorskip("numba", reason="the compiled form needs numba, which is not installed here")
    for name in ("0/0", "7/3"):
        fast, plain = permutation(name, size, fast=True), permutation(name, size, fast=False)
        for start in (0, 1, size // 3, size - 5000):
            assert fast(start, start + 5000).tolist() == plain(start, start + 5000).tolist()
        assert len(fast(5, 5)) == 0
