"""The kernels of :mod:`stoker.tables.slots.sharded`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

import numpy as np

from stoker.ops.codegen.jit import INNER, PLAIN, jit
from stoker.tables.slots.residency import Ints, Places, SlotPlan


@jit(**PLAIN)
def _turn(block, shards):
    return np.int64((np.uint64(block) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(61)) & (shards - 1)


@jit(**INNER)
def _shard(row, bits):
    return (row ^ _turn(row >> bits, np.int64(1) << bits)) & ((np.int64(1) << bits) - 1)


@jit(**PLAIN)
def _divide(rows, bits, blocks, order, begins):
    for i in range(rows.size):
        begins[_shard(rows[i], bits) + 1] += 1
    for shard in range(1, begins.size):
        begins[shard] += begins[shard - 1]
    for i in range(rows.size):
        shard = _shard(rows[i], bits)
        at = begins[shard]
        begins[shard] += 1
        blocks[at] = rows[i] >> bits
        order[at] = i
    for shard in range(begins.size - 1, 0, -1):
        begins[shard] = begins[shard - 1]
    begins[0] = 0


@jit(**INNER)
def _move(blocks, at, shard, bits, first, moved):
    shards = np.int64(1) << bits
    for i in range(blocks.size):
        moved[0, i] = (blocks[i] << bits) | ((shard ^ _turn(blocks[i], shards)) & (shards - 1))
        moved[1, i] = at[i] + first


@jit(**PLAIN)
def _merge(own, fetch_rows, fetch_slots, evict_rows, evict_slots, order, shard, bits, first, slots, fetched, gone):
    for i in range(own.size):
        slots[order[i]] = own[i] + first
    _move(fetch_rows, fetch_slots, shard, bits, first, fetched)
    _move(evict_rows, evict_slots, shard, bits, first, gone)


@jit(**PLAIN)
def _pick(slots, start, stop, found):
    count = 0
    for i in range(slots.size):
        if start <= slots[i] < stop:
            found[count] = slots[i] - start
            count += 1
    return count


def divide(rows: Ints, shards: int) -> tuple[Ints, Places, Ints]:
    """Return the rows of a batch by shard: :class:`stoker.tables.slots.sharded.RowsByShard`."""
    blocks, order = np.empty_like(rows), np.empty(len(rows), np.int32)
    begins = np.zeros(shards + 1, np.int64)
    _divide(rows, shards.bit_length() - 1, blocks, order, begins)
    return blocks, order, begins


def merge(made: SlotPlan, order: Places, shard: int, shards: int, first: int, slots: Ints) -> list[Ints]:
    """Write the slots of a shard's plan to their places in the batch, and return what moves.

    Args:
        made: its plan.
        order: places of its rows in the batch.
        shard: its number.
        shards: S.
        first: its first slot.
        slots: [U] of the batch.

    Returns:
        Addresses and slots of the fetched rows, and of those to write back.
    """
    fetched, gone = np.empty((2, len(made.fetch_rows)), np.int64), np.empty((2, len(made.evict_rows)), np.int64)
    _merge(
        made.slots, made.fetch_rows, made.fetch_slots, made.evict_rows, made.evict_slots, order, shard,
        shards.bit_length() - 1, first, slots, fetched, gone,
    )  # fmt: skip
    return [*fetched, *gone]


def pick(slots: Ints, start: int, stop: int) -> Ints:
    """Return the slots in ``start..stop``, less ``start``."""
    found = np.empty_like(slots)
    return found[: _pick(slots, start, stop, found)]
