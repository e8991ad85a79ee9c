"""What a batch says of its sequence features."""

from __future__ import annotations

import pytest
import torch

from stoker.base.errors import SchemaError
from stoker.dataset.batch import Batch
from stoker.dataset.spec import Feature, FeatureSpec

BATCH = Batch(
    dense=torch.zeros(3, 1),
    ids=torch.tensor([7, 11, 12, 13, 8, 9, 14]),
    offsets=torch.tensor([0, 1, 4, 5, 5, 6, 7]),
)


def test_lengths_masks_and_padding() -> None:
    assert BATCH.lengths(0).tolist() == [1, 1, 1]
    assert BATCH.lengths(1).tolist() == [3, 0, 1]
    assert BATCH.mask(1, 4).tolist() == [[False, True, True, True], [False] * 4, [False, False, False, True]]
    assert BATCH.padded(1, 4).tolist() == [[0, 11, 12, 13], [0, 0, 0, 0], [0, 0, 0, 14]]
    assert BATCH.padded(1, 2, fill=-1).tolist() == [[12, 13], [-1, -1], [-1, 14]]  # the newest ones
    assert BATCH.padded(0, 1).tolist() == [[7], [8], [9]]
    assert BATCH.padded(1, 4).dtype == BATCH.ids.dtype


def test_a_batch_moves_whole_or_is_the_same() -> None:
    assert BATCH.to("cpu") is BATCH
    moved = BATCH.to("meta")
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}
    assert moved.labels is None
    assert moved.ids.shape == BATCH.ids.shape


def test_one_id_a_bag() -> None:
    batch = Batch(dense=torch.zeros(2, 0), ids=torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32))
    assert batch.lengths(2).tolist() == [1, 1]
    assert batch.mask(2, 2).tolist() == [[False, True], [False, True]]
    assert batch.padded(2, 2).tolist() == [[0, 3], [0, 6]]


def test_place_of_a_feature() -> None:
    spec = FeatureSpec(
        dense=(),
        features=(Feature(name="item", table="item"), Feature(name="seen", table="item", sequence=True, max_length=3)),
        num_embeddings={"item": 15},
    )
    assert spec.index("seen") == 1
    with pytest.raises(SchemaError, match="no feature 'sean'; there are item, seen"):
        spec.index("sean")
