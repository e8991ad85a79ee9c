"""Names of backing stores. A new store is a class in its own file, and a line here or a call of register_store.

Strategies look up names and capabilities of stores here, so this module imports neither strategies nor stores.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from stoker.base.errors import ConfigError
from stoker.base.files import url_of

#: value of ``home`` in :class:`stoker.tables.config.Slotted` -> its class, or the place of the class
_STORES: dict[str, Any] = {
    "memory": "stoker.tables.stores.home:MemoryHome",
    "file": "stoker.tables.stores.log_home:LogHome",
    "remote": "stoker.tables.stores.remote_home:RemoteHome",
}
_BUILT_IN = tuple(_STORES)


def register_store(name: str, store: type[Any]) -> None:
    """Register a backing store for ``home="<name>"`` of a strategy, and for ``--home <name>://...``.

    Args:
        name: a new one.
        store: a subclass of :class:`stoker.tables.stores.home.Home`.

    Raises:
        ConfigError: the name is that of a store of Stoker.

    >>> from stoker.tables.stores.home import MemoryHome
    >>> class Counted(MemoryHome):
    ...     kind = "counted memory"
    >>> stoker.register_store("counted", Counted)
    >>> stoker.Cached(slots=100, home="counted").home
    'counted'
    """
    if name in _BUILT_IN:
        raise ConfigError(f"a store of Stoker is called {name!r}. Choose another name.")
    _STORES[name] = store


def store_names() -> tuple[str, ...]:
    """Return the possible values of ``home``."""
    return tuple(_STORES)


def store_class(name: str) -> type[Any]:
    """Return the class of a known name."""
    found = _STORES[name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = _STORES[name] = getattr(import_module(module), attribute)
    return found  # type: ignore[no-any-return]


def store_of(strategy: Any, num_rows: int) -> type[Any]:
    """Return the class of the backing store of N rows under ``strategy``."""
    return store_class(strategy.home).choose(strategy, num_rows)  # type: ignore[no-any-return]


def store_for(path: str | None) -> str:
    """Return the name of the store that keeps rows at ``path``: a directory, None for a temporary one, or a URL."""
    if (url := url_of(path)) is None:
        return "file"
    scheme = url.partition("://")[0]
    return scheme if scheme in _STORES and scheme not in _BUILT_IN else "remote"
