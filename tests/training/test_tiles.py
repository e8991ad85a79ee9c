"""A score does not depend on the rows that share its batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
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


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_any_batches_are_those_of_one(name: str) -> None:
    model = MODELS[name]().eval()
    whole = tiled_scores(model, examples(model.spec, 0, _ROWS))

    @settings(max_examples=scaled(12), deadline=None)
    @given(cuts=st.lists(st.integers(0, _ROWS), max_size=4))
    def check(cuts: list[int]) -> None:
        places = [0, *sorted(cuts), _ROWS]
        found = [tiled_scores(model, examples(model.spec, *piece)) for piece in pairwise(places)]
        assert torch.equal(torch.cat(found), whole)

    check()
    torch.testing.assert_close(whole, model.predict(examples(model.spec, 0, _ROWS)), rtol=1e-2, atol=1e-3)


def test_a_tile_is_what_the_dense_part_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["dlrm"]().eval()
    seen = []
    inner = model.dense_part

    def watched(dense: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        seen.append((len(dense), dense.data_ptr() % 64, embedded.data_ptr() % 64, torch.get_num_threads()))
        return inner(dense, embedded)

    monkeypatch.setattr(model, "dense_part", watched)
    tiled_scores(model, examples(_SPEC, 1, _ROWS))
    assert set(seen) == {(TILE, 0, 0, 1)}
    assert len(tiled_scores(model, examples(_SPEC, 0, 0))) == 0
