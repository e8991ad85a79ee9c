"""The backing store of each strategy: a new one is a class in its own module, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stoker.base.device import total_memory
from stoker.tables.config import Slotted
from stoker.tables.stores.file_home import FileHome
from stoker.tables.stores.home import Home, Initial, MemoryHome
from stoker.tables.stores.log_home import LogHome

__all__ = ["make_home", "store_of"]

_INDEX_SHARE = 64  # the index of a log takes at most 1 / _INDEX_SHARE of memory, unless the user chose a log


def _file(strategy: Slotted, num_rows: int) -> type[Home]:
    fits = LogHome.index_bytes(num_rows) <= (total_memory() or 0) // _INDEX_SHARE
    return LogHome if strategy.writes == "append" or (strategy.writes is None and fits) else FileHome


#: ``home`` of :class:`stoker.tables.config.Slotted` -> the class, by strategy and N
_STORES: dict[str, Callable[[Slotted, int], type[Home]]] = {"memory": lambda *_: MemoryHome, "file": _file}


def store_of(strategy: Slotted, num_rows: int) -> type[Home]:
    """Return the class of the backing store of N rows under ``strategy``."""
    return _STORES[strategy.home](strategy, num_rows)


def make_home(strategy: Slotted, initial: Initial, state: Mapping[str, str], *, gpu: bool) -> Home:
    """Make the backing store of a group under ``strategy``; ``gpu``: its slots are on a GPU."""
    return store_of(strategy, initial.num_rows).of(strategy, initial, state, gpu=gpu)
