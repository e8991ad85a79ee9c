"""Which tables to compress, where the user allows it: another model, so never chosen by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker.placement.placement import row_bytes
from stoker.tables.compressed.tensor_train import stored_tables
from stoker.tables.config import TableConfig, TensorTrain


def rows_to_compress(
    tables: Sequence[TableConfig],
    budget: int,
    state: Mapping[str, str],
    rank: int,
    cores: int = 3,
    already: Mapping[str, TensorTrain] | None = None,
) -> int | None:
    """The fewest largest tables that have to become tensor trains for everything to lie on the device.

    Args:
        tables: of the model.
        budget: bytes for rows, cores and their optimizer state.
        state: of the row optimizer.
        rank: of the tensor trains.
        cores: of each.
        already: tables that are compressed in any case, by name.

    Returns:
        The rows from which on a table is compressed. Where even all those that get smaller leave too much, these. None
        where everything fits as it is, or no table gets smaller.
    """

    def size(several: Sequence[TableConfig]) -> int:
        return sum(table.num_embeddings * row_bytes(table, state) for table in several)

    already = already or {}
    left, found = size(stored_tables(tables, already)), None
    tables = [table for table in tables if table.name not in already]
    if left <= budget:
        return None
    train = TensorTrain(rank=rank, cores=cores)
    for rows in sorted({table.num_embeddings for table in tables}, reverse=True):
        those = [table for table in tables if table.num_embeddings == rows]
        saved = size(those) - size(stored_tables(those, {table.name: train for table in those}))
        if saved <= 0:
            break
        left, found = left - saved, rows
        if left <= budget:
            break
    return found
