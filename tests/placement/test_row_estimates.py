"""What profiles rest on: draws, full counts, the published estimate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.dataset.dataset import Dataset
from stoker.rewrite.popularity import ChunkRows, ExactRows, draw, half_width
from stoker.testing import make_dataset


def test_half_width_is_equation_4() -> None:
    n, population = 35, 400
    t = 3.601  # of Student, 99.9 % and 34 degrees of freedom, from published tables
    expected = t * math.sqrt((population - n) / population * 7.5**2 / n)
    assert half_width(7.5, n, n / population, 0.999) == pytest.approx(expected, rel=1e-4)
    assert half_width(7.5, n, 1.0, 0.999) == 0


@settings(max_examples=scaled(100), deadline=None)
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=60),
    first=st.integers(0, 12),
    cut=st.floats(0.01, 14),
)
def test_exact_rows_are_counted(counts: list[int], first: int, cut: float) -> None:
    ordered = np.array([first, *sorted(counts, reverse=True)])
    found = ExactRows(ordered)
    known = int((ordered[1:] >= cut).sum())
    expected = known + 1 if known else int(first >= cut)
    assert found.hot(np.array([cut])).tolist() == [expected]
    assert found.interval(cut) == (expected, expected, expected)
    prefixes = np.arange(len(ordered) + 1)
    shares = np.concatenate([[0], np.cumsum(ordered)]) / max(ordered.sum(), 1)
    assert found.served(prefixes) == pytest.approx(shares)


@settings(max_examples=scaled(100), deadline=None)
@given(counts=st.lists(st.integers(0, 12), min_size=1, max_size=30), cut=st.floats(0.01, 14))
def test_counts_in_no_order_are_fitted_by_falling_ones(counts: list[int], cut: float) -> None:
    """The max-min formula of isotonic regression, written out."""
    y = np.array(counts)
    fitted = [min(max(y[a : b + 1].mean() for b in range(i, len(y))) for a in range(i + 1)) for i in range(len(y))]
    found = ExactRows(np.array([0, *counts]))
    assert found.accesses == sum(counts)
    known = sum(value >= max(math.ceil(cut) - 0.5, 0.0) - 1e-9 for value in fitted)
    assert found.hot(np.array([cut])).tolist() == [known + 1 if known else 0]
    assert found.served(np.array([0, len(y) + 1])) == pytest.approx([0.0, 1.0 if sum(counts) else 0.0])


def test_chunks_are_equations_1_to_4() -> None:
    random = np.random.default_rng(4)
    counts = random.poisson(3, 20_001).astype(np.int32)
    found = ChunkRows(counts, share=0.1, chunks=10, chunk_rows=100, confidence=0.99, seed=3, name="t")
    cut = 45.0  # 4.5 sampled accesses
    hits = np.array([(chunk >= 4.5).sum() for chunk in found._chunks])
    assert hits.shape == (10,)
    estimate = round(hits.mean() / 100 * 20_000) + 1
    assert found.hot(np.array([cut])).tolist() == [estimate]
    half = 3.2498 * math.sqrt((200 - 10) / 200 * hits.var(ddof=1) / 10)
    low, high = (round((hits.mean() + side) * 200) + 1 for side in (-half, half))
    assert found.interval(cut) == (estimate, low, high)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("d"), rows=10_000, shard_rows=3001)


@pytest.mark.parametrize(("share", "block"), [(0.05, 64), (0.3, 7), (1.0, 64), (0.0001, 64)])
def test_draws(data: Dataset, share: float, block: int) -> None:
    taken = draw(data.train, share, seed=1, block_rows=block)
    sizes = taken.stops - taken.starts
    assert (sizes > 0).all()
    assert sizes.max() <= block
    assert taken.rows == sizes.sum()
    assert taken.share == pytest.approx(taken.rows / 8000)
    assert abs(taken.rows - share * 8000) <= max(block, 1)
    assert (taken.starts[1:] >= taken.stops[:-1]).all()  # in the order of the files, none twice
    assert taken.stops[-1] <= 8000


def test_every_row_is_as_likely(data: Dataset) -> None:
    seen = np.zeros(8000, np.int64)
    for seed in range(400):
        taken = draw(data.train, 0.1, seed=seed, block_rows=16)
        for start, stop in zip(taken.starts, taken.stops, strict=True):
            seen[start:stop] += 1
    assert abs(seen.mean() - 40) < 0.5
    blocks = seen[: 8000 // 16 * 16].reshape(-1, 16).mean(axis=1)
    assert abs(blocks - 40).max() < 6 * math.sqrt(400 * 0.1 * 0.9)
