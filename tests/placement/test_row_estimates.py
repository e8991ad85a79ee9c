"""What the profile's estimates rest on: draws, strata, falling means, Student's t."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.errors import ConfigError
from stoker.dataset.dataset import Dataset
from stoker.rewrite.fae.row_estimates import ChunkRows, ExactRows, falling
from stoker.rewrite.fae.sampling import draw, strata_edges
from stoker.rewrite.fae.stratified import StratifiedRows
from stoker.rewrite.fae.student import half_width, t_quantile
from stoker.testing import make_dataset

#: (confidence, degrees) -> two-sided quantile, from published tables
TABLE = {
    (0.5, 1): 1.000, (0.95, 1): 12.706, (0.99, 2): 9.925, (0.999, 3): 12.924, (0.95, 4): 2.776, (0.90, 5): 2.015,
    (0.95, 10): 2.228, (0.999, 30): 3.646, (0.95, 30): 2.042, (0.99, 60): 2.660, (0.999, 120): 3.373,
}  # fmt: skip


@pytest.mark.parametrize(("case", "expected"), TABLE.items())
def test_quantiles_of_student(case: tuple[float, int], expected: float) -> None:
    assert t_quantile(*case) == pytest.approx(expected, abs=6e-4)


def test_quantiles_are_scipys() -> None:
    stats = pytest.importorskip("scipy.stats", reason="the comparison needs scipy, which is not installed here")
    for degrees in (*range(1, 41), 75, 200, 1001):
        for confidence in (0.1, 0.5, 0.9, 0.99, 0.999, 0.99999):
            assert t_quantile(confidence, degrees) == pytest.approx(
                stats.t.ppf((1 + confidence) / 2, degrees), rel=1e-7
            )


def test_half_width_is_equation_4() -> None:
    n, population = 35, 400
    expected = t_quantile(0.999, 34) * math.sqrt((population - n) / population * 7.5**2 / n)
    assert half_width(7.5, n, n / population, 0.999) == pytest.approx(expected)
    assert half_width(7.5, n, 1.0, 0.999) == 0
    for confidence, degrees in ((0.0, 5), (1.0, 5), (0.9, 0)):
        with pytest.raises(ConfigError):
            t_quantile(confidence, degrees)


@settings(max_examples=200, deadline=None)
@given(
    means=st.lists(st.integers(0, 20), min_size=1, max_size=30),
    weights=st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
def test_falling_means_are_the_nearest(means: list[int], weights: list[int]) -> None:
    """The max-min formula of isotonic regression, written out."""
    y, w = np.array(means, float), np.array(weights[: len(means)], float)
    values, ends = falling(y, w)
    assert np.all(np.diff(values) < 0)
    fitted = np.repeat(values, np.diff(np.concatenate([[0], ends])))
    for i in range(len(y)):
        best = min(
            max(float((y[a : b + 1] * w[a : b + 1]).sum() / w[a : b + 1].sum()) for b in range(i, len(y)))
            for a in range(i + 1)
        )
        assert fitted[i] == pytest.approx(best)


@given(rows=st.integers(1, 10**9))
def test_strata_cover_the_table(rows: int) -> None:
    edges = strata_edges(rows)
    assert edges[0] == 0
    assert edges[-1] == rows
    widths = np.diff(edges)
    assert (widths > 0).all()
    assert (widths[:64] == 1).all()
    assert (widths[128:] <= edges[128:-1] / 64 + 1).all()


@settings(max_examples=100, deadline=None)
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
    assert found.interval(cut) == (expected, expected)
    prefixes = np.arange(len(ordered) + 1)
    shares = np.concatenate([[0], np.cumsum(ordered)]) / max(ordered.sum(), 1)
    assert found.served(prefixes) == pytest.approx(shares)


def steps_of(rows: int) -> np.ndarray:
    """Counts that fall in steps, low ones over long stretches."""
    return np.maximum(1, (40_000 / np.arange(1, rows) ** 0.8).astype(np.int64))


@pytest.mark.parametrize("cut", [20.0, 60.0, 700.0])
def test_stratified_intervals_hold_the_truth(cut: float) -> None:
    """Accesses drawn one by one at 5 %, 300 times."""
    random = np.random.default_rng(1)
    rows, groups, share = 30_000, 35, 0.05
    counts = steps_of(rows)
    truth = int((counts >= cut).sum()) + 1
    edges = strata_edges(rows)
    inside, off = 0, []
    for _ in range(300):
        drawn = random.binomial(counts, share)
        strata = np.add.reduceat(np.concatenate([[0], drawn]), edges[:-1])
        dealt = random.multinomial(strata, np.full(groups, 1 / groups)).T
        found = StratifiedRows(rows, dealt, share=share, confidence=0.99)
        low, high = found.interval(cut)
        inside += low <= truth <= high
        off.append(abs(int(found.hot(np.array([cut]))[0]) - truth) / truth)
    assert inside >= 297 - 3
    assert np.quantile(off, 0.95) <= 0.1
    # What a scan of the whole sampled log finds by comparing single rows with Equation 1's cut-off.
    if cut == 20:
        assert abs(int((drawn >= cut * share).sum()) - truth) > 0.2 * truth


def test_the_interval_narrows_with_the_sample() -> None:
    rows, counts = 30_000, steps_of(30_000)
    edges = strata_edges(rows)
    widths = []
    for share in (0.02, 0.2):
        drawn = np.random.default_rng(2).binomial(counts, share)
        strata = np.add.reduceat(np.concatenate([[0], drawn]), edges[:-1])
        dealt = np.random.default_rng(3).multinomial(strata, np.full(35, 1 / 35)).T
        low, high = StratifiedRows(rows, dealt, share=share, confidence=0.999).interval(20)
        widths.append(high - low)
    assert 0 < widths[1] < 0.6 * widths[0]


def test_chunks_are_equations_1_to_4() -> None:
    random = np.random.default_rng(4)
    counts = random.poisson(3, 20_001).astype(np.int32)
    found = ChunkRows(counts, share=0.1, chunks=10, chunk_rows=100, confidence=0.99, seed=3, name="t")
    cut = 45.0  # 4.5 sampled accesses
    hits = np.array([(chunk >= 4.5).sum() for chunk in found._chunks])
    assert hits.shape == (10,)
    assert found.hot(np.array([cut])).tolist() == [round(hits.mean() / 100 * 20_000) + 1]
    half = t_quantile(0.99, 9) * math.sqrt((200 - 10) / 200 * hits.var(ddof=1) / 10)
    assert found.interval(cut) == (round((hits.mean() - half) * 200) + 1, round((hits.mean() + half) * 200) + 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("d"), rows=10_000, shard_rows=3001)


@pytest.mark.parametrize(("share", "block"), [(0.05, 64), (0.3, 7), (1.0, 64), (0.0001, 64)])
def test_draws(data: Dataset, share: float, block: int) -> None:
    taken = draw(data.train, share, groups=5, seed=1, block_rows=block)
    sizes = taken.stops - taken.starts
    assert (sizes > 0).all()
    assert sizes.max() <= block
    assert taken.rows == sizes.sum()
    assert taken.share == pytest.approx(taken.rows / 8000)
    assert abs(taken.rows - share * 8000) <= max(block, 1)
    place = taken.shards * 10**6 + taken.starts
    assert (np.diff(place) > 0).all()  # in the order of the file
    seen = [
        int(shard) * 10**6 + row
        for shard, start, stop in zip(taken.shards, taken.starts, taken.stops, strict=True)
        for row in range(start, stop)
    ]
    assert len(set(seen)) == len(seen)
    assert all(seen[-1] % 10**6 < data.train.shards[int(taken.shards[-1])].rows for _ in (0,))
    if share < 1:
        dealt = np.bincount(taken.groups, minlength=5)
        assert dealt.max() - dealt.min() <= 1


def test_every_row_is_as_likely(data: Dataset) -> None:
    seen = np.zeros(8000, np.int64)
    for seed in range(400):
        taken = draw(data.train, 0.1, groups=2, seed=seed, block_rows=16)
        for shard, start, stop in zip(taken.shards, taken.starts, taken.stops, strict=True):
            begin = data.train.starts[int(shard)]
            seen[begin + start : begin + stop] += 1
    assert abs(seen.mean() - 40) < 0.5
    blocks = seen[: 8000 // 16 * 16].reshape(-1, 16).mean(axis=1)
    assert abs(blocks - 40).max() < 6 * math.sqrt(400 * 0.1 * 0.9)


def test_first_is_a_part(data: Dataset, tmp_path: Path) -> None:
    taken = draw(data.train, 0.5, groups=4, seed=0, block_rows=8)
    part = taken.first(400)
    assert 390 <= part.rows <= 410
    assert part.share == pytest.approx(part.rows / 8000)
    assert set(zip(part.shards.tolist(), part.starts.tolist(), strict=True)) <= set(
        zip(taken.shards.tolist(), taken.starts.tolist(), strict=True)
    )
    assert taken.first(10**9) is taken
