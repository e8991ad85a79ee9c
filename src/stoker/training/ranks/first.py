"""Work of the first rank alone, such as reading and writing files, whose result or error all ranks get."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from stoker.base.errors import StokerError
from stoker.tables.ranks.transport import Ranks

T = TypeVar("T")
_NOTHING = torch.empty(0, dtype=torch.uint8)


def is_first(ranks: Ranks | None) -> bool:
    """Return True on the first rank, and in a single process."""
    return ranks is None or ranks.rank == 0


def on_first(ranks: Ranks | None, work: str, action: Callable[[], T]) -> T:
    """Return on every rank what ``action()`` returns on the first one; all ranks call this.

    Args:
        ranks: None: a single process.
        work: in words, for messages.
        action: its result and its errors can be pickled.

    Raises:
        Exception: what ``action()`` raises, on every rank; ``told`` is then True.
    """
    if ranks is None:
        return action()
    found: Any = None
    error: Exception | None = None
    if ranks.rank == 0:
        try:
            found = action()
        except Exception as raised:
            error = raised
    sent = pickle.dumps((found, error and _portable(error))) if ranks.rank == 0 else b""
    data = broadcast(ranks, work, torch.frombuffer(bytearray(sent), dtype=torch.uint8) if sent else _NOTHING)
    if ranks.rank:
        found, error = pickle.loads(data.numpy().tobytes())
    if error is not None:
        error.told = True  # type: ignore[attr-defined]
        raise error
    return found  # type: ignore[no-any-return]


def each_on_first(ranks: Ranks | None, work: str, items: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Yield on every rank what ``items()`` yields on the first one, none of it None; all ranks iterate over it."""
    begun = list[Iterator[T]]()

    def take() -> T | None:
        begun[:] = begun or [items()]
        return next(begun[0], None)

    while (item := on_first(ranks, work, take)) is not None:
        yield item


def broadcast(ranks: Ranks, work: str, value: Tensor) -> Tensor:
    """Return the bytes [n] uint8 of the first rank on every rank; the others give any."""
    first = ranks.rank == 0
    found = ranks.exchange(work, [value if first and other else value[:0] for other in range(ranks.size)])[0]
    return value if first else found


def _portable(error: Exception) -> Exception:
    """Return an error that another process can make again."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return StokerError(f"{type(error).__name__}: {error}")
    return error
