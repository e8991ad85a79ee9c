"""What every storage promises. A new storage adds one line to STORAGES and inherits these tests."""

from __future__ import annotations

import pytest
import torch

from stoker.tables.storage import DeviceRows, Rows, Storage

STATE = {"exp_avg": "row", "sum": "scalar"}
STORAGES = {
    "DeviceRows": lambda rows, dim, dtype: DeviceRows(rows, dim, dtype, STATE, torch.device("cpu")),
}


def random_rows(count: int, dim: int, dtype: torch.dtype, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return Rows(
        torch.randn(count, dim, generator=generator).to(dtype),
        {
            "exp_avg": torch.randn(count, dim, generator=generator),
            "sum": torch.rand(count, generator=generator),
        },
    )


@pytest.fixture(params=sorted(STORAGES))
def make(request):
    return STORAGES[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "dim"), [(1, 1), (7, 3), (1000, 16)])
def test_rows_read_back_as_written_with_their_state(make, count, dim, dtype):
    storage: Storage = make(count, dim, dtype)
    assert storage.num_rows == count
    rows = random_rows(count, dim, dtype, 1)
    storage.write(0, rows)
    for start, stop in [(0, count), (count // 2, count), (count - 1, count), (0, 0)]:
        got = storage.read(start, stop)
        assert torch.equal(got.weight, rows.weight[start:stop])
        for name in STATE:
            assert torch.equal(got.state[name], rows.state[name][start:stop])


def test_partial_writes_leave_other_rows_alone(make):
    storage: Storage = make(50, 4, torch.float32)
    everything = random_rows(50, 4, torch.float32, 1)
    storage.write(0, everything)
    storage.write(20, random_rows(5, 4, torch.float32, 2))
    assert torch.equal(storage.read(0, 20).weight, everything.weight[:20])
    assert torch.equal(storage.read(25, 50).weight, everything.weight[25:])
    assert torch.equal(storage.read(20, 25).weight, random_rows(5, 4, torch.float32, 2).weight)


def test_state_starts_at_zero_and_bytes_are_counted(make):
    storage: Storage = make(10, 4, torch.float32)
    assert all(not tensor.any() for tensor in storage.read(0, 10).state.values())
    assert storage.fast_bytes >= storage.weight.nbytes > 0


def test_written_values_are_copied(make):
    storage: Storage = make(3, 2, torch.float32)
    rows = random_rows(3, 2, torch.float32, 1)
    storage.write(0, rows)
    before = rows.weight.clone()
    rows.weight.fill_(99.0)
    assert torch.equal(storage.read(0, 3).weight, before)
