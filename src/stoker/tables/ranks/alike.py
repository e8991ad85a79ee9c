"""What tables must have alike on all ranks: rows and settings when they meet, and what each step depends on.

A step compares numbers, in a message that it sends anyway. Texts are compared only where ranks differ.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable
from typing import Any

from stoker.base.errors import ConfigError
from stoker.tables.ranks.divided import DividedGroup
from stoker.tables.ranks.transport import Ranks, bits_of, checksum, plain
from stoker.tables.slots.slotted import SlottedRows

_CHUNK = 2**12  # rows that are read at once


def check_alike(ranks: Ranks, tables: Any) -> None:
    """Check that ``tables`` can train with those of the other ranks; all of them call this.

    Raises:
        ConfigError: the ranks have different rows, tables, optimizers or shards, or average copies.
    """
    if ranks.average_every is not None and not tables.divided:
        raise ConfigError(
            "replicate() sums gradients in each step, but these ranks average copies. Make the tables with "
            "EmbeddingTables(..., ranks=ranks.averaging(K)), or give replicate() ranks without averaging()."
        )
    if 1 < tables.shards < ranks.size:
        raise ConfigError(
            f"{ranks.size} ranks need as many logical shards of a batch, but the tables have {tables.shards}. "
            f"Make them with shards={1 << (ranks.size - 1).bit_length()} or more."
        )
    # Of divided rows each rank makes its own, and bfloat16 rounds by it.
    seeded = tables.divided or tables.raw is not None or any(table.dtype == "bfloat16" for table in tables.tables)
    own = tables.seed if seeded else None
    together = [[table.name for table in group.tables] for group in tables.groups]
    ranks.check_alike(
        tables.tables, tables.stored, tables.features, together, tables.optimizer, tables.shards, own
    )  # fmt: skip
    # Rows that nothing has changed are a function of the seed, so the first ones tell.
    changed = any(group.version for group in tables.groups)
    _compare(ranks, tables, whole=any(each for [each] in ranks.numbers("say whether rows changed", [changed])))
    ranks.check_equal("the number of row updates done", tables.tick)
    known = weakref.ref(tables)
    ranks.settings.append(lambda: {} if (found := known()) is None else _settings(found))


def _compare(ranks: Ranks, tables: Any, *, whole: bool) -> None:
    """Check that all ranks have the same rows of tables that are not divided: all rows, or the first ones."""
    for table in tables.stored:
        if isinstance(tables.group_of[table.name], DividedGroup):
            continue
        found: dict[str, int] = {}
        for _, rows in tables.read(table.name, _CHUNK):
            for name, value in {"": rows.weight, **rows.state}.items():
                found[name] = checksum([value], found.get(name))
            if not whole:
                break
        for name, value in sorted(found.items()):
            state = f"the optimizer state of table {table.name!r} ({name})"
            ranks.check_equal(state if name else f"table {table.name!r}", value)


def compare_written(ranks: Ranks | None, tables: Any) -> None:
    """Check that all ranks have the same rows, if they have said that they wrote others; all of them call this."""
    if ranks is not None and ranks.unsure:
        ranks.unsure, tables.written = False, 0
        _compare(ranks, tables, whole=True)


def said(tables: Any, scale: float) -> list[int]:
    """Return what a rank says of its next step: learning rate, factor on gradients, checksums of settings and rows.

    The rows are those that were written since ranks compared theirs.
    """
    optimizer = tables.optimizer
    others = optimizer, sorted(tables.frozen), tables.shards, tables.tick, tables._stepper.deferred
    return [bits_of(optimizer.lr), bits_of(scale), zlib.crc32(plain(others).encode()), tables.written]


def _settings(tables: Any) -> dict[str, str]:
    """Return the settings that ranks share, in words."""
    names = ", ".join(table.name for table in tables.tables[:3]) + (", ..." if len(tables.tables) > 3 else "")
    found: dict[str, object] = {
        "number of open stages": tables.open_stages,
        "mode": "train" if tables.training else "eval",
        "requires_grad": tables.handle.requires_grad,
        "list of frozen tables": sorted(tables.frozen),
        "gradient_scale": tables.gradient_scale,
        "way to step": "as_optimizer()" if tables._stepper.deferred else "in each backward",
        "row optimizer": tables.optimizer,
        "number of shards": tables.shards,
        "number of row updates done": tables.tick,
    }
    if tables.open_stages:  # which ask ahead for rows in slots alone
        slotted = [group for group in tables.groups if isinstance(group.storage, SlottedRows)]
        found = {"placement": f"{_names(slotted)} in slots and the rest in memory", **found}
    return {f"the {name} of tables {names}": str(value) for name, value in found.items()}


def _names(groups: Iterable[Any]) -> str:
    return ", ".join(table.name for group in groups for table in group.tables) or "none"
