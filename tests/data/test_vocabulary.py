"""Tables numbered by falling count: against a counter, whatever the order and number of blocks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring import peak

from stoker.base.errors import DataError
from stoker.prep.fit.dense import select_rank
from stoker.prep.fit.vocabulary import TableBuilder
from stoker.rewrite.reorder import read_vocabulary, write_vocabulary

blocks_of_ints = st.lists(
    st.dictionaries(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9), st.integers(0, 4), max_size=30),
    max_size=8,
)
blocks_of_texts = st.lists(st.dictionaries(st.text(max_size=4), st.integers(0, 4), max_size=30), max_size=8)


@settings(deadline=None)
@given(blocks_of_ints, st.integers(1, 4))
def test_ints_are_numbered_by_count_then_value(blocks: list[dict[int, int]], min_count: int) -> None:
    builder, total = TableBuilder("int"), Counter[int]()
    for block in blocks:
        total.update(block)
        builder.add(pa.array(list(block), pa.int64()), np.array(list(block.values()), np.int64))
    done = builder.finish(min_count=min_count, missing=None, total=total.total())
    kept = sorted(((v, n) for v, n in total.items() if n >= min_count), key=lambda item: (-item[1], item[0]))
    assert list(done.frame.iter_rows()) == kept
    ids = {value: number for number, (value, _) in enumerate(kept, 1)}
    for block, entries in zip(blocks, builder.refs, strict=True):
        assert done.ids[entries].tolist() == [ids.get(value, 0) for value in block]
    assert done.counts().tolist() == [done.unknown, *(n for _, n in kept)]
    assert done.counts().sum() == total.total()


@settings(deadline=None)
@given(blocks_of_texts, st.integers(0, 3))
def test_texts_and_the_missing_category(blocks: list[dict[str, int]], missing: int) -> None:
    builder, total = TableBuilder("string"), Counter[str]()
    for block in blocks:
        total.update(block)
        builder.add(pa.array(list(block), pa.large_string()), np.array(list(block.values()), np.int64))
    done = builder.finish(min_count=1, missing=missing, total=total.total() + missing)
    kept = [(value, n) for value, n in [(None, missing), *total.items()] if n > 0]
    kept.sort(key=lambda item: (-item[1], item[0] is not None, (item[0] or "").encode()))
    assert list(done.frame.iter_rows()) == kept
    ids = {value: number for number, (value, _) in enumerate(kept, 1)}
    assert done.missing_id == ids.get(None, 0)
    for block, entries in zip(blocks, builder.refs, strict=True):
        assert done.ids[entries].tolist() == [ids.get(value, 0) for value in block]


def test_tables_grow_past_their_first_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.prep.fit.vocabulary._BATCH", 5_000)
    values = np.random.default_rng(0).permutation(200_000).astype(np.int64) * 7919
    builder = TableBuilder("int")
    for block in np.array_split(np.concatenate([values, values[:50_000]]), 13):
        builder.add(pa.array(block), np.ones(len(block), np.int64))
    done = builder.finish(min_count=1, missing=None, total=250_000)
    assert done.num_embeddings == 200_001
    assert done.frame["value"].head(50_000).to_list() == sorted(values[:50_000].tolist())
    texts = TableBuilder("string")
    names = [f"item-{value}" for value in range(30_000)]
    for start in range(0, 30_000, 1000):
        texts.add(pa.array(names[start : start + 1000], pa.large_string()), np.ones(1000, np.int64))
    assert set(texts.finish(min_count=1, missing=None, total=30_000).frame["value"]) == set(names)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="measures memory through /proc, which is not here"
)
def test_numbers_are_counted_in_ninety_bytes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 40 M distinct values in a table on each of two threads, 200 bytes would be 16 GB."""
    monkeypatch.setattr("stoker.prep.fit.vocabulary._BATCH", 2**15)  # as if there were 32 times as many
    values = np.random.default_rng(0).permutation(1_100_000).astype(np.int64) * 7919

    def count(values: np.ndarray) -> int:
        before = peak(reset=True)
        builder = TableBuilder("int")
        for block in np.array_split(values, 20):
            builder.add(pa.array(block), np.ones(len(block), np.int64))
        done = builder.finish(min_count=1, missing=None, total=len(values))
        assert done.num_embeddings == len(values) + 1
        return peak() - before

    count(values[:1000])  # loads what it needs
    assert count(values) / len(values) < 120


@pytest.mark.parametrize(("kind", "top"), [("hex", 2**64 - 1), ("int", -1)])
def test_hex_is_unsigned(kind: str, top: int) -> None:
    builder = TableBuilder(kind)
    builder.add(pa.array([-1, 5], pa.int64()), np.array([3, 3], np.int64))
    frame = builder.finish(min_count=1, missing=None, total=6).frame
    assert frame["value"].to_list() == sorted([5, top])


def test_written_vocabulary_reads_back(tmp_path: Path) -> None:
    builder = TableBuilder("float")
    builder.add(pa.array(np.array([2.5, -1.0]).view(np.int64)), np.array([1, 2], np.int64))
    done = builder.finish(min_count=1, missing=None, total=3)
    write_vocabulary(done.frame, tmp_path / "t.parquet")
    assert list(read_vocabulary(tmp_path / "t.parquet").iter_rows()) == [(-1.0, 2), (2.5, 1)]
    with pytest.raises(DataError, match=r"none\.parquet cannot be read"):
        read_vocabulary(tmp_path / "none.parquet")


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), min_size=1, max_size=60), st.data())
def test_select_rank_equals_sorting(values: list[int], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(values) - 1))
    array = np.array(values, np.int64)
    parts = np.array_split(array, 3)
    assert select_rank(lambda: ((part, None) for part in parts), rank) == sorted(values)[rank]
    counted = [np.unique(part, return_counts=True) for part in parts]
    assert select_rank(lambda: iter(counted), rank) == sorted(values)[rank]
