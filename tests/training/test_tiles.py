"""A score does not depend on the rows that share its batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.training.scores import tiles
from stoker.training.scores.tiles import TILE, tiled_scores
from tests.campaigns import scaled

_ROWS = 2 * TILE + 41
_SPEC = stoker.FeatureSpec.from_sizes(num_dense=3, num_embeddings=[4000, 50])
_ITEM = stoker.Feature(name="item", table="items")
_PAST = stoker.Feature(name="past", table="items", sequence=True, max_length=5)
_HISTORY = stoker.FeatureSpec(dense=("age",), features=(_ITEM, _PAST), num_embeddings={"items": 100})
MODELS = {
    "dlrm": lambda: stoker.DLRM(_SPEC, embedding_dim=8, bottom=(24,), top=(40, 9)),
    "dlrm-bf16": lambda: stoker.DLRM(_SPEC, embedding_dim=8, bottom=(24,), top=(40, 9), matmul="bf16"),
    "dcn": lambda: stoker.DCN(_SPEC, embedding_dim=8),
    "tabular": lambda: stoker.Tabular(_SPEC),
    "tensor-train": lambda: stoker.DLRM(
        _SPEC, embedding_dim=8, bottom=(8,), top=(9,), placement={"C1": stoker.TensorTrain(rank=4)}
    ),
    "din": lambda: stoker.DIN(_HISTORY, embedding_dim=6, attention=(13,)),
    "sasrec": lambda: stoker.SASRec(_HISTORY, embedding_dim=8, blocks=1),
    "tbsm": lambda: stoker.TBSM(_HISTORY, embedding_dim=8),
}


def examples(spec: stoker.FeatureSpec, start: int, stop: int) -> stoker.Batch:
    """Return rows start..stop of a fixed log."""
    random = torch.Generator().manual_seed(0)
    dense = torch.rand(_ROWS, len(spec.dense), generator=random)[start:stop]
    if spec is _SPEC:
        ids = [torch.randint(0, rows, (_ROWS,), generator=random)[start:stop] for rows in (4000, 50)]
        return stoker.Batch(dense=dense, ids=torch.stack(ids, 1))
    lengths = torch.stack([torch.ones(_ROWS, dtype=torch.int64), torch.randint(0, 6, (_ROWS,), generator=random)], 1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
    ids = torch.randint(0, 100, (int(offsets[-1]),), generator=random)
    mine = offsets[2 * start : 2 * stop + 1]
    return stoker.Batch(dense=dense, ids=ids[mine[0] : mine[-1]], offsets=mine - mine[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_scores_of_any_batches_are_those_of_the_definition(name: str, threads: int) -> None:
    model = MODELS[name]().eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles._BlockSizes, "fits", lambda *of: False)  # blocks of TILE rows, on one thread
        whole = tiled_scores(model, examples(model.spec, 0, _ROWS))

    @settings(max_examples=scaled(12), deadline=None)
    @given(cuts=st.lists(st.integers(0, _ROWS), max_size=4))
    def check(cuts: list[int]) -> None:
        places = [0, *sorted(cuts), _ROWS]
        found = [tiled_scores(model, examples(model.spec, *piece)) for piece in pairwise(places)]
        assert torch.equal(torch.cat(found), whole)

    check()
    torch.testing.assert_close(whole, model.predict(examples(model.spec, 0, _ROWS)), rtol=1e-2, atol=1e-3)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


Seen = list[tuple[int, int, int, int]]


def watch(model: stoker.RecModel, monkeypatch: pytest.MonkeyPatch, slip: float = 0.0) -> Seen:
    """Note what the dense part sees: rows, alignment of its inputs, threads. ``slip``: for other blocks."""
    seen: Seen = []
    inner: Any = model.dense_part

    def watched(dense: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        seen.append((len(dense), dense.data_ptr() % 64, embedded.data_ptr() % 64, torch.get_num_threads()))
        return inner(dense, embedded) + slip * (len(dense) != TILE or torch.get_num_threads() > 1)

    monkeypatch.setattr(model, "dense_part", watched)
    own = tiles._BlockSizes()
    monkeypatch.setattr(tiles, "_blocks_of", lambda model: own)
    return seen


def test_the_dense_part_sees_aligned_blocks_of_a_few_sizes(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    model = MODELS["dlrm"]().eval()
    seen = watch(model, monkeypatch)
    batch = examples(_SPEC, 1, _ROWS)  # 552 rows
    tiled_scores(model, batch)  # trials
    seen.clear()
    tiled_scores(model, batch)
    assert sorted(seen) == [(64, 0, 0, 1), (tiles.MIDDLE, 0, 0, 1)]
    seen.clear()
    large = stoker.Batch(dense=batch.dense[:1].expand(2500, -1), ids=batch.ids[:1].expand(2500, -1))
    scores = tiled_scores(model, large)
    assert torch.equal(scores, scores[:1].expand(2500))
    assert ((tiles.LARGE, 0, 0, 2) in seen) == (threads == 2)
    assert len(tiled_scores(model, examples(_SPEC, 0, 0))) == 0


@pytest.mark.parametrize("name", ["din", "sasrec"])
def test_models_with_a_mask_are_tried_in_blocks_of_other_sizes(name: str) -> None:
    model = MODELS[name]().eval()
    tiled_scores(model, examples(_HISTORY, 0, 9))
    blocks, inputs = tiles._blocks_of(model), model.inputs(examples(_HISTORY, 0, 9))
    assert blocks.spread(model, inputs) > 1 or tiles.SMALL[0] in [size for size, *_ in blocks._same]


def test_blocks_whose_scores_have_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    whole = tiled_scores(MODELS["dlrm"]().eval(), examples(_SPEC, 0, _ROWS))
    model = MODELS["dlrm"]().eval()
    seen = watch(model, monkeypatch, slip=1e-6)
    batches = [examples(_SPEC, start, stop) for start, stop in ((0, 5), (5, 105), (105, _ROWS))]
    found = [tiled_scores(model, batch) for batch in batches]
    assert torch.equal(torch.cat(found), whole)
    seen.clear()
    assert all(torch.equal(tiled_scores(model, batch), part) for batch, part in zip(batches, found, strict=True))
    assert set(seen) == {(TILE, 0, 0, 1)}


def test_trials_can_be_made_before(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    model = MODELS["dlrm"]().eval()
    seen = watch(model, monkeypatch)
    tiles.try_blocks(model, examples(_SPEC, 0, 1))
    assert {rows for rows, *_ in seen} == ({64, 128, TILE, tiles.MIDDLE} | ({tiles.LARGE} if threads != 3 else set()))
    seen.clear()
    calls = (1, 64, 65, 129, TILE, 600)
    for rows in calls:
        tiled_scores(model, examples(_SPEC, 0, min(rows, _ROWS)))
    assert [rows for rows, *_ in seen].count(64) == 3  # with the last 40 of 552
    assert len(seen) == len(calls) + 1


def test_models_that_differ_in_weights_only_share_trials() -> None:
    one, two, other = (stoker.DLRM(_SPEC, embedding_dim=8, bottom=(24,), top=top) for top in ((40,), (40,), (41,)))
    assert tiles._blocks_of(one) is tiles._blocks_of(two)
    assert tiles._blocks_of(one) is not tiles._blocks_of(other)


@pytest.mark.parametrize("places", [1, 4, 16])
def test_a_score_does_not_depend_on_the_place_of_a_row(monkeypatch: pytest.MonkeyPatch, places: int) -> None:
    """Even if the library of products adds in another order at another place in a vector."""
    model = MODELS["dlrm"]().eval()
    watch(model, monkeypatch)
    inner: Any = model.dense_part

    def slipping(dense: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return inner(dense, embedded) + 1e-3 * (torch.arange(len(dense)) % places)

    monkeypatch.setattr(model, "dense_part", slipping)
    whole = tiled_scores(model, examples(_SPEC, 0, _ROWS))
    for start, stop in ((0, 300), (1, 2), (5, 100), (7, _ROWS)):
        assert torch.equal(tiled_scores(model, examples(_SPEC, start, stop)), whole[start:stop])
    torch.testing.assert_close(whole, torch.sigmoid(inner(*model.inputs(examples(_SPEC, 0, _ROWS)))).detach())


@pytest.mark.slow
@pytest.mark.parametrize("width", [5, 10, 17])
def test_rows_of_odd_widths_have_one_score(width: int) -> None:
    for model in (stoker.SASRec(_HISTORY, embedding_dim=width), stoker.DIN(_HISTORY, embedding_dim=width)):
        whole = tiled_scores(model.eval(), examples(_HISTORY, 0, 300))
        for start in (1, 2, 3, 70):
            assert torch.equal(tiled_scores(model, examples(_HISTORY, start, 300)), whole[start:])


def test_trials_take_whole_numbers_and_scores_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["dlrm"]().eval()
    blocks, batch = tiles._BlockSizes(), examples(_SPEC, 0, 3)
    inputs = model.inputs(batch)
    assert blocks.spread(model, (*inputs, torch.zeros(3, dtype=torch.int64))) == 1
    monkeypatch.setattr(model, "dense_part", lambda dense, embedded: dense[:, 0] * torch.nan)
    assert blocks.spread(model, inputs) == 1
    assert not blocks._spread, "a model of the same shapes may be a sound one"
    monkeypatch.setattr(model, "dense_part", lambda dense, embedded: dense[:, 0] - dense[:, 0].cumsum(0))
    assert blocks.spread(model, inputs) == 1
