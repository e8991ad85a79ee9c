"""What tables must have alike on all ranks: rows and settings when they meet, and what each step depends on.

A step compares numbers, in a message that it sends anyway. Texts are compared only where ranks differ.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable
from typing import Any

import torch

from stoker.base.errors import ConfigError
from stoker.tables.ranks.transport import Ranks, bits_of, plain
from stoker.tables.slots.slotted import SlottedRows


def meet(ranks: Ranks, tables: Any) -> None:
    """Check that ``tables`` can train with those of the other ranks; all of them call this.

    Raises:
        ConfigError: the ranks have different rows, tables, optimizers or shards.
    """
    if 1 < tables.shards < ranks.size:
        raise ConfigError(
            f"{ranks.size} ranks need as many logical shards of a batch, but the tables have {tables.shards}. "
            f"Make them with shards={1 << (ranks.size - 1).bit_length()} or more."
        )
    own = tables.seed if tables.divided else None  # of divided rows each rank makes its own
    together = [[table.name for table in group.tables] for group in tables.groups]
    ranks.check_alike(
        tables.tables, tables.stored, tables.features, together, tables.optimizer, tables.shards, own
    )  # fmt: skip
    for table in () if tables.divided else tables.tables:
        _, rows = next(iter(tables.read(table.name, chunk_rows=1024)))
        ranks.check_equal(f"table {table.name!r}", rows.weight)
        for name in sorted(rows.state):
            ranks.check_equal(f"the optimizer state of table {table.name!r} ({name})", rows.state[name])
    ranks.check_equal("the number of row updates done", torch.tensor(tables.tick, device=tables.device))
    known = weakref.ref(tables)
    ranks.settings.append(lambda: {} if (found := known()) is None else _settings(found))


def said(tables: Any, scale: float) -> list[int]:
    """Return what a rank says of its next step: learning rate, factor on gradients, checksum of other settings."""
    optimizer = tables.optimizer
    others = optimizer, sorted(tables.frozen), tables.shards, tables.tick, tables._steps.deferred
    return [bits_of(optimizer.lr), bits_of(scale), zlib.crc32(plain(others).encode())]


def _settings(tables: Any) -> dict[str, str]:
    """Return the settings that ranks share, in words."""
    names = ", ".join(table.name for table in tables.tables[:3]) + (", ..." if len(tables.tables) > 3 else "")
    found: dict[str, object] = {
        "number of open stages": tables.stages,
        "mode": "train" if tables.training else "eval",
        "requires_grad": tables.handle.requires_grad,
        "list of frozen tables": sorted(tables.frozen),
        "gradient_scale": tables.gradient_scale,
        "way to step": "as_optimizer()" if tables._steps.deferred else "in each backward",
        "row optimizer": tables.optimizer,
        "number of shards": tables.shards,
        "number of row updates done": tables.tick,
    }
    if tables.stages:  # which ask ahead for rows in slots alone
        slotted = [group for group in tables.groups if isinstance(group.storage, SlottedRows)]
        found = {"placement": f"{_names(slotted)} in slots and the rest in memory", **found}
    return {f"the {name} of tables {names}": str(value) for name, value in found.items()}


def _names(groups: Iterable[Any]) -> str:
    return ", ".join(table.name for group in groups for table in group.tables) or "none"
