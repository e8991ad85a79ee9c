"""How far a stage goes ahead: ``in_flight`` batches with their rows, and ``lookahead`` beyond them with their ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import stoker
from stoker import Batch, Cached, EmbeddingTables, TableConfig
from stoker.tables.slots.slotted import SlottedRows

ROWS, EACH, COUNT = 400, 8, 30


def tables_with(placement: Any = None) -> EmbeddingTables:
    table = TableConfig(name="t", num_embeddings=ROWS, embedding_dim=4)
    return EmbeddingTables([table], optimizer=stoker.Adagrad(lr=0.1), placement=placement)


class Source:
    """Batches of rows of their own, and how many were taken."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[Batch]:
        for step in range(COUNT):
            self.taken += 1
            ids = (torch.arange(EACH) + EACH * step).remainder(ROWS).view(-1, 1)
            yield Batch(dense=torch.zeros(EACH, 0), ids=ids, step=step)


def trained(tables: EmbeddingTables, batches: Any) -> torch.Tensor:
    for batch in batches:
        tables(batch.ids).square().sum().backward()
    return tables.rows("t")


@pytest.mark.parametrize(("in_flight", "lookahead"), [(1, 0), (1, 4), (3, 4), (12, 4), (12, 0)])
def test_lookahead_begins_behind_the_batches_in_flight(in_flight: int, lookahead: int) -> None:
    source, tables = Source(), tables_with(Cached(slots=EACH * 12))
    storage = tables.groups[0].storage
    assert isinstance(storage, SlottedRows)
    batches = iter(stoker.stage(source, tables, in_flight=in_flight, lookahead=lookahead, background=False))
    next(batches)
    assert source.taken == in_flight + lookahead
    assert storage.residency.free == storage.num_slots - EACH * in_flight
    batches.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("background", [False, True])
def test_more_in_flight_than_lookahead_and_slots_hold_changes_no_number(background: bool) -> None:
    tables = tables_with(Cached(slots=EACH * 5))
    storage = tables.groups[0].storage
    assert isinstance(storage, SlottedRows)
    staged = stoker.stage(Source(), tables, in_flight=100, lookahead=4, background=background)
    most = 0

    def watched() -> Iterator[Batch]:
        nonlocal most
        for batch in staged:
            held = [found() for found in storage._leases.values()]  # this one included, until it is looked up
            most = max(most, sum(lease is not None and lease.staged for lease in held))
            yield batch

    rows = trained(tables, watched())
    assert most == 5 if not background else 1 <= most <= 5  # how far a thread comes is for the clock to say
    assert torch.equal(rows, trained(tables_with(), Source()))


def test_batches_that_do_not_fit_yet_keep_their_turn() -> None:
    """With more in flight than the slots hold, no row is fetched for a batch whose slots another one then takes."""
    tables = [TableConfig(name=name, num_embeddings=500, embedding_dim=dim) for name, dim in (("a", 4), ("b", 8))]
    random = torch.Generator().manual_seed(0)
    all_ids = (torch.rand(60, 32, 2, generator=random) ** 3 * 500).long()
    batches = [Batch(dense=torch.zeros(32, 0), ids=ids, step=step) for step, ids in enumerate(all_ids)]
    made = EmbeddingTables(tables, optimizer=stoker.Adagrad(lr=0.1), placement=Cached(slots=80))
    assert len(made.groups) == 2  # one may have room for a batch while the other has none
    for batch in stoker.stage(batches, made, in_flight=8, lookahead=4, background=False):
        sum(rows.square().sum() for rows in made(batch.ids)).backward()  # type: ignore[union-attr]
    for place, group in enumerate(made.groups):
        assert isinstance(group.storage, SlottedRows)
        assert group.storage.stats.rows == sum(len(ids[:, place].unique()) for ids in all_ids)
        assert group.storage.stats.fetched + group.storage.stats.hits == group.storage.stats.rows
