"""Tensor trains in plans: the budget that cores take, and which tables would have to become some."""

from __future__ import annotations

import pytest
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker import TableConfig, TensorTrain
from stoker.base.errors import ConfigError
from stoker.placement.placement import row_bytes
from stoker.placement.planner import rows_to_compress
from stoker.placement.profile import Profile
from stoker.tables.compressed.tensor_train import stored_tables

STATE = stoker.RowWiseAdagrad(lr=0.1).state
PROFILE = Profile(
    row_bytes=68, fetch=1e7, store=2e7, plan_row=1e-7, plan_miss=2e-7, plan_lookup=1e-8, file_cold=1e5,
    file_warm=1e6, file_store=1e6,
)  # fmt: skip


def tables_of(*rows: int) -> list[TableConfig]:
    return [TableConfig(name=f"C{place}", num_embeddings=count, embedding_dim=16) for place, count in enumerate(rows)]


def size_of(tables: tuple[TableConfig, ...] | list[TableConfig]) -> int:
    return sum(table.num_embeddings * row_bytes(table, STATE) for table in tables)


def planned(tables: list[TableConfig], budget: int, trains: dict[str, TensorTrain]) -> stoker.Placement:
    return stoker.plan(
        tables, optimizer=stoker.RowWiseAdagrad(lr=0.1), device_memory=budget, tensor_trains=trains, device="cpu",
        batch_size=32, lookahead=2, profile=PROFILE,
    )  # fmt: skip


def test_cores_come_out_of_the_budget() -> None:
    tables, trains = tables_of(100_000, 20_000, 50), {"C0": TensorTrain(rank=8)}
    needed = size_of(stored_tables(tables, trains))
    fits, short = planned(tables, needed, trains), planned(tables, needed - 1, trains)
    assert fits.resident
    assert fits["C0"] == trains["C0"]
    assert not short.resident
    groups = {group.strategy: group for group in short.groups}
    assert groups["tensor-train"].slot_bytes == size_of(stored_tables(tables[:1], trains))
    assert sum(group.slot_bytes for group in short.groups) <= needed - 1
    for placement in (fits, short):
        assert "1 table tensor-train" in placement.summary()
    with pytest.raises(ConfigError, match=r"cores of 1 tensor-train tables need"):
        planned(tables, size_of(stored_tables(tables[:1], trains)), trains)


def test_many_groups_are_lines_of_a_table() -> None:
    tables = tables_of(*(1000 * place for place in range(20, 30)))
    trains = {table.name: TensorTrain(rank=rank) for rank, table in enumerate(tables, 4)}
    (grid,) = planned(tables, size_of(tables), trains).grids()
    assert list(grid.headings[:4]) == ["tables", "rows", "with optimizer state", "strategy"]
    assert [line[0] for line in grid.rows] == list(trains)
    (grid,) = planned(tables, size_of(tables), {"C0": trains["C0"]}).grids()
    assert list(grid.headings) == ["tables", "C0", "C1, C2 and 7 more"]


def test_tables_that_are_compressed_already_are_not_proposed() -> None:
    tables, already = tables_of(100_000, 20_000, 5_000), {"C0": TensorTrain(own=2)}
    left = size_of(stored_tables(tables, already))
    assert rows_to_compress(tables, left, STATE, 8, already=already) is None
    assert rows_to_compress(tables, left - 1, STATE, 8, already=already) == 20_000
    assert rows_to_compress(tables, left, STATE, 8) == 100_000


def test_without_being_told_no_table_is_compressed() -> None:
    tables = tables_of(100_000, 20_000)
    assert not any(isinstance(each, TensorTrain) for each in planned(tables, size_of(tables) // 2, {}).values())


@settings(max_examples=scaled(60), deadline=None)
@given(
    rows=st.lists(st.integers(1, 200_000), min_size=1, max_size=6), share=st.floats(0.0, 1.2), rank=st.integers(1, 48)
)
def test_as_few_tables_as_make_the_rest_fit(rows: list[int], share: float, rank: int) -> None:
    tables = tables_of(*rows)
    budget = int(share * size_of(tables))
    found = rows_to_compress(tables, budget, STATE, rank)

    def after(least: int) -> int:
        large = {table.name: TensorTrain(rank=rank) for table in tables if table.num_embeddings >= least}
        return size_of(stored_tables(tables, large))

    if size_of(tables) <= budget:
        assert found is None
    elif found is None:
        assert after(max(rows)) >= size_of(tables)  # not even the largest gets smaller
    else:
        assert after(found) < size_of(tables)
        larger = [count for count in sorted(set(rows)) if count > found]
        assert all(after(count) > budget for count in larger)
