"""The right to work on a batch's rows: from its lookup to the end of its update they stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from stoker.ops import AddressSpace, Bags, Rounding

__all__ = ["Lease"]


class Lease:
    """A batch's lookups as the kernels take them, and the promise that its rows stay in place.

    Args:
        bags: lookups in ``space``.
        space: the address space of the rows in place (the group's own, or its slots).
        tables, rows: what is in each slot, for the random bits of bfloat16; None where addresses are rows.
        give_back: called once with whether the rows were changed.
        token: kept alive for the storage.
    """

    __slots__ = ("__weakref__", "_give_back", "bags", "over", "rows", "space", "tables", "token")

    def __init__(
        self,
        bags: Bags,
        space: AddressSpace,
        *,
        tables: Tensor | None = None,
        rows: Tensor | None = None,
        give_back: Callable[[Any, bool], None] | None = None,
        token: Any = None,
    ) -> None:
        self.bags, self.space, self.tables, self.rows = bags, space, tables, rows
        self._give_back, self.token = give_back, token
        self.over = False  # whether the rows may have left: the lease must not be used any more

    def rounding(self, keys: tuple[int, ...]) -> Rounding:
        """Keys of the random bits with what they need to know of the slots."""
        return Rounding(keys, self.tables, self.rows)

    def release(self, *, changed: bool) -> None:
        """The batch is done; ``changed``: its rows were updated. Further calls do nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            token, self.token = self.token, None
            self.over = True
            give_back(token, changed)

    def __del__(self) -> None:
        self.release(changed=False)
