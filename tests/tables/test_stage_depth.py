"""How far a stage goes ahead: ``in_flight`` batches with their rows, and ``lookahead`` beyond them with their ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import stoker
from stoker import Batch, Cached, EmbeddingTables, TableConfig
from stoker.tables.slotted import SlottedRows

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
            most = max(most, len(storage._ahead))  # this one included, until it is looked up
            yield batch

    rows = trained(tables, watched())
    assert most == 5 if not background else 1 <= most <= 5  # how far a thread comes is for the clock to say
    assert torch.equal(rows, trained(tables_with(), Source()))
