"""Packed rows of segments: fewer bytes, the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from small_runs import files
from test_segments import Training

import stoker
from stoker.training.files import checkpoint
from stoker.training.files.packing import Packed, pack

KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


@given(
    seed=st.integers(0, 2**32 - 1), count=st.integers(1, 40), dim=st.integers(1, 5),
    last=st.sampled_from([40, 300, 2**17, 2**40]),
)  # fmt: skip
def test_any_tensor_is_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, dim: int, last: int
) -> None:
    random = np.random.default_rng(seed)
    given = {"row": torch.from_numpy(np.unique(random.integers(0, last, count)))}
    for kind in KINDS:
        for shape in ((count, dim), (count,)):
            data = torch.from_numpy(random.integers(0, 256, (*shape, kind.itemsize), np.uint8))
            given[f"{kind}{len(shape)}"] = data.view(kind).squeeze(-1)
    path = tmp_path_factory.getbasetemp() / "packed.safetensors"
    tensors, metadata = pack(given)
    save_file(tensors, path, metadata)
    with safe_open(path, framework="pt") as file:
        packed = Packed(file)
        assert packed.keys() == sorted(given)
        for name, value in given.items():
            found = packed.get_tensor(name)
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))


def test_rows_take_four_fifths_of_their_bytes() -> None:
    torch.manual_seed(0)
    rows = torch.randperm(50_000)[:6000].sort().values
    given = {"row": rows, "weight": torch.randn(6000, 16) * 0.05, "sum": torch.rand(6000)}
    packed, _ = pack(given)
    assert sum(each.nbytes for each in packed.values()) < 0.82 * sum(each.nbytes for each in given.values())


@pytest.mark.slow
def test_segments_of_earlier_versions_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(tmp_path)
    for packing in (pack, lambda tensors: (dict(tensors), None), pack):
        monkeypatch.setattr(checkpoint, "pack", packing)
        run.train(2)
        run.save()
    for name, model in (("right", run.model), ("again", stoker.load(run.paths[-1]).model)):
        stoker.save(tmp_path / name, model)
    assert files(tmp_path / "again" / "tables") == files(tmp_path / "right" / "tables")
