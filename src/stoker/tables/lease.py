"""The right to work on a batch's rows: they stay in their slots until the lease ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stoker.ops import AddressSpace, Bags, Rounding
from stoker.tables.lookups import version_of

__all__ = ["Lease", "Staged"]


class Lease:
    """A batch's lookups as the kernels take them, and the promise that its rows stay in place.

    A lease that nobody works under can be revoked when its slots are needed: whoever holds it acquires the rows again.
    So work goes between :meth:`begin` and :meth:`end`, and ``begin`` says whether the rows are still there.

    Args:
        bags: lookups in ``space``.
        space: the address space of the rows in place (the group's own, or its slots).
        tables, rows: what is in each slot, for the random bits of bfloat16; None where addresses are rows.
        give_back: called once with ``token`` and whether the rows were changed; None where no row ever leaves.
        token: kept alive for the storage.
        ticket: stands for rows that may still be on their way; None where they have arrived.
    """

    __slots__ = (
        "__weakref__", "_give_back", "_lock", "_workers", "bags", "ids", "over", "rows", "space", "staged",
        "tables", "ticket", "token",
    )  # fmt: skip

    def __init__(
        self,
        bags: Bags,
        space: AddressSpace,
        *,
        tables: Tensor | None = None,
        rows: Tensor | None = None,
        give_back: Callable[[Any, bool], None] | None = None,
        token: Any = None,
        ticket: Any = None,
    ) -> None:
        self.bags, self.space, self.tables, self.rows = bags, space, tables, rows
        self._give_back, self.token, self.ticket = give_back, token, ticket
        self.ids: Tensor | None = None  # a copy of those whose rows these are, where the caller's may change unnoticed
        self._lock = None if give_back is None else threading.Lock()
        self._workers = 0
        self.staged = False  # for a batch that is not handed out yet
        self.over = False  # whether the rows may have left: the lease must not be used any more

    def use(self, bags: Bags) -> None:
        """Look up with the offsets and weights of ``bags``, whose ids are those that the lease was made for."""
        self.bags = bags if self._lock is None else replace(bags, ids=self.bags.ids)

    def serves(self, ids: Tensor) -> bool:
        """Whether the rows are those of ``ids``, which NumPy can change without a trace."""
        own = self.ids  # another thread may revoke the lease meanwhile
        return own is None or torch.equal(ids.reshape(-1), own.reshape(-1))

    @property
    def can_end(self) -> bool:
        """Whether rows may leave, so that it matters whose they are."""
        return self._lock is not None

    def rounding(self, keys: tuple[int, ...]) -> Rounding:
        """Keys of the random bits with what they need to know of the slots."""
        return Rounding(keys, self.tables, self.rows)

    def begin(self) -> bool:
        """Keep the rows in place until :meth:`end`; False if they may have left."""
        if self._lock is None:
            return True
        with self._lock:
            if self.over:
                return False
            self._workers += 1
            return True

    def end(self) -> None:
        """Work that :meth:`begin` announced is done."""
        if self._lock is not None:
            with self._lock:
                self._workers -= 1

    def revoke(self) -> bool:
        """Take the rows back; False if somebody works on them or the lease is over."""
        return self._finish(changed=False, force=False)

    def release(self, *, changed: bool) -> None:
        """The batch is done; ``changed``: its rows were updated. Further calls do nothing."""
        self._finish(changed=changed, force=True)

    def _finish(self, *, changed: bool, force: bool) -> bool:
        if self._lock is None:
            return False
        with self._lock:
            if self.over or (self._workers and not force):
                return False
            self.over = True
        give_back, token = self._give_back, self.token
        self._give_back = self.token = self.ticket = self.ids = None
        assert give_back is not None
        give_back(token, changed)
        return True

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:  # one that was never made has nothing to give back
            self.release(changed=False)


class Staged(NamedTuple):
    """A batch whose rows a stage has brought."""

    ids: Tensor  # the very tensor that was handed out
    version: int  # of its contents
    offsets: Tensor | None
    copies: tuple[Tensor, Tensor | None] | None  # ids and offsets when they were announced; None on a GPU
    leases: tuple[Lease | None, ...]

    def fits(self, ids: Tensor, offsets: Tensor | None) -> bool:
        """Whether these lookups, as checked, are still those that were announced."""
        if self.copies is None:
            return offsets is self.offsets and version_of(ids) == self.version
        known, where = self.copies
        if (offsets is None) != (where is None):
            return False
        return torch.equal(ids, known) and (offsets is None or where is None or torch.equal(offsets, where))
