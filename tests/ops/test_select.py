"""The bags of some features: by loops as by the mask that defines them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.ops import select
from stoker.ops.select import columns_of, keep_ids, select_bags


@given(
    lengths=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), max_size=12),
    columns=st.sampled_from([[0], [1], [2], [0, 2], [1, 2], [0, 1, 2]]),
    dtype=st.sampled_from([torch.int32, torch.int64]), weighted=st.booleans(),
)  # fmt: skip
def test_bags_of_chosen_features(
    lengths: list[list[int]], columns: list[int], dtype: torch.dtype, weighted: bool
) -> None:
    sizes = torch.tensor([size for row in lengths for size in row], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    ids = torch.arange(int(offsets[-1]), dtype=dtype) + 7
    weights = torch.rand(len(ids)) if weighted else None
    found = select_bags(tuple(columns), 3, ids, offsets, weights)
    expected = select._by_mask(torch.tensor(columns), 3, ids, offsets, weights)
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other)
    assert found[0].dtype == dtype


@given(places=st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True).map(sorted))
def test_columns_are_copies(places: list[int]) -> None:
    table = torch.arange(36).view(3, 12)
    found = columns_of(table, tuple(places))
    assert found.tolist() == [[row[place] for place in places] for row in table.tolist()]
    assert found.is_contiguous()
    table.zero_()
    assert found[2, 0] == 24 + places[0], "it shares the memory of the table"


@given(bags=st.lists(st.lists(st.booleans(), max_size=4), max_size=9), jagged=st.booleans())
def test_kept_ids_remain_in_their_bags_with_their_weights(bags: list[list[bool]], jagged: bool) -> None:
    bags = bags if jagged else [[each] for bag in bags for each in bag]
    keep = torch.tensor([each for bag in bags for each in bag], dtype=torch.bool)
    offsets = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0) if jagged else None
    ids = torch.arange(len(keep)) + 7
    found, ends, weights = keep_ids(keep, ids, offsets, ids * 0.5)
    assert weights is not None
    assert found.tolist() == (wanted := ids[keep].tolist())
    assert weights.tolist() == [0.5 * each for each in wanted]
    assert ends.diff().tolist() == [sum(bag) for bag in bags]
    assert keep_ids(keep, ids, offsets, None)[2] is None


@pytest.mark.parametrize("compiled", [True, False])
def test_offsets_that_do_not_rise_from_0_to_the_end(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if not compiled:
        monkeypatch.setattr(select, "HAVE_NUMBA", False)
    assert select.offsets_fit(torch.tensor([0, 2, 2, 4]), 4)
    for wrong in ([0, 3, 1, 4], [1, 2, 2, 4], [0, 2, 2, 3], [0, 2, 2, 5], [0, 5, 3, 4]):
        assert not select.offsets_fit(torch.tensor(wrong), 4)


def test_weights_that_learn_get_their_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets, ids = torch.tensor([0, 1, 3, 3, 5]), torch.arange(5)
    weights = torch.ones(5, requires_grad=True)
    chosen = select_bags((1,), 2, ids, offsets, weights)[2]
    assert chosen is not None
    chosen.sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [0, 1, 1, 1, 1]
    monkeypatch.setattr(select, "HAVE_NUMBA", False)
    assert select_bags((0,), 2, ids, offsets, None)[0].tolist() == [0]
