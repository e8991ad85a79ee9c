"""Which backing store a strategy gets: a new one is a class in a module of its own, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stoker.base.device import total_memory
from stoker.tables.config import Slotted
from stoker.tables.stores.file_home import FileHome
from stoker.tables.stores.home import Home, Initial, MemoryHome
from stoker.tables.stores.log_home import LogHome

__all__ = ["make_home", "store_of"]

_INDEX_SHARE = 64  # a log's index takes at most one part in so many of memory, unless it was asked for


def _file(strategy: Slotted, num_rows: int) -> type[Home]:
    fits = LogHome.index_bytes(num_rows) <= (total_memory() or 0) // _INDEX_SHARE
    return LogHome if strategy.writes == "append" or (strategy.writes is None and fits) else FileHome


#: name of a home in :class:`stoker.tables.config.Slotted` -> the class, by strategy and N
_STORES: dict[str, Callable[[Slotted, int], type[Home]]] = {"memory": lambda *_: MemoryHome, "file": _file}


def store_of(strategy: Slotted, num_rows: int) -> type[Home]:
    """Return the class of the backing store of N rows under ``strategy``, with what it can do and needs."""
    return _STORES[strategy.home](strategy, num_rows)


def make_home(strategy: Slotted, initial: Initial, state: Mapping[str, str], *, gpu: bool) -> Home:
    """Make the backing store of a group under ``strategy``; ``gpu``: its slots are on a GPU."""
    return store_of(strategy, initial.num_rows).of(strategy, initial, state, gpu=gpu)
