"""Reset the rows that a batch gives to raw ids, wherever the rows are.

The lookup that trains resets them first, through their own lease. So they may be in slots,
in flight or in a file, and batches that are staged share the slots.

Legend: U distinct rows.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from stoker.base.errors import ConfigError
from stoker.ops import Bags
from stoker.ops.reference import addresses
from stoker.tables.autograd import Gradient
from stoker.tables.group import TableGroup
from stoker.tables.growing.ids import GrowingIds, Grown, InitialRows
from stoker.tables.lookups import version_of
from stoker.tables.ranks.share import Share
from stoker.tables.ranks.transport import Ranks
from stoker.tables.storage import Lease, release_all

_KEPT = 64  # steps whose births are known


class Births:
    """Reset the rows that raw ids get, and find gradients of rows that had another raw id."""

    def __init__(self, raw: GrowingIds | None, groups: Sequence[TableGroup], seed: int) -> None:
        self.raw, self.groups, self.seed = raw, groups, seed
        self.step = 0  # lookups that trained
        self._since = 0  # the step of the last load, before which rows had other raw ids
        if raw is not None:
            raw.loaded = weakref.WeakMethod(self._forget)  # a cycle would keep the rows until Python looks for cycles
        spaces = [(index, group.space) for index, group in enumerate(groups)]
        places = {name: (i, int(space.first_row[at])) for i, space in spaces for at, name in enumerate(space.names)}
        own = [places[name] for name in ([] if raw is None else raw.names)]
        self._groups, self._firsts = np.array(own, np.int64).reshape(-1, 2).T.copy()
        self._initial = InitialRows([] if raw is None else raw.tables, seed)
        self._recent: deque[tuple[int, dict[int, Tensor]]] = deque(maxlen=_KEPT)  # step, and addresses by group
        self._last: tuple[weakref.ref[Tensor], int, Tensor] | None = None  # ids of the last such lookup, and its rows

    def rows_of(
        self, call: Bags, leases: list[Lease | None], grown: Grown | None, time: int | None, frozen: frozenset[str], *,
        grows: bool, ranks: Ranks | None, share: Share | None,
    ) -> tuple[Bags, list[Lease | None]]:  # fmt: skip
        """Return a call with rows for its raw ids, and the leases that still fit.

        ``grown``: the step that the stage did; ``grows``: whether this lookup trains; ``share``: the batch, if this
        rank knows the examples of all. All ``ranks`` call this.
        """
        assert self.raw is not None
        device, raw = call.ids.device, call.ids
        again = grows and torch._C._current_graph_task_id() >= 0  # torch.utils.checkpoint repeats a forward
        if again or not grows:
            rows = self._repeated(raw) if again else None
            fits = rows is None and grown is not None and not grown.trains and grown.clock == tuple(self.raw.clock)
            if rows is None:
                rows = grown.call.ids if fits and grown is not None else self.raw.find(call.cpu()).ids
        else:
            whole, time, mine = self._whole(call, grown, time, ranks, share)
            done, fits = self.raw.take(grown, whole, time, frozen)
            rows = done.call.ids[mine]
            self.step += 1
            self._last = weakref.ref(raw), version_of(raw), rows
            if len(done.births.rows):
                self._reset(done)
        if not fits:
            release_all(leases)
            leases = [None] * len(self.groups)
        return call._replace(ids=rows.to(device)), leases

    def ahead(
        self, call: Bags, time: int | None, frozen: frozenset[str], *, grows: bool, ranks: Ranks | None,
        share: Share | None,
    ) -> Grown | None:  # fmt: skip
        """Do the step of a batch that comes later; None if no table grows. Arguments as for :meth:`rows_of`."""
        if self.raw is None:
            return None
        whole, latest, mine = self._whole(call, None, time, ranks if grows else None, share)
        grown = self.raw.ahead(whole, latest, frozen, grows=grows)
        grown.mine, grown.said = mine, time
        return grown

    def _whole(
        self, call: Bags, grown: Grown | None, time: int | None, ranks: Ranks | None, share: Share | None
    ) -> tuple[Bags, int | None, slice]:
        """Return the batch of all ranks, its time, and where the own ids are in it."""
        if ranks is None:
            return call.cpu(), time, slice(None)
        if grown is not None and grown.trains:
            if time == grown.said:
                return grown.raw, grown.time, grown.mine
            with ranks.guard():
                raise ConfigError(
                    f"a lookup has time {time}, but its batch had {grown.said} when stage() read it, which the other "
                    "ranks know. Give both the same time."
                )
        if share is None:
            return _joined(ranks, call.cpu(), time)
        return Bags(share.whole.ids, share.whole.offsets), time, share.place

    def _repeated(self, ids: Tensor) -> Tensor:
        """Return the rows of a lookup that a backward repeats."""
        if self._last is not None and self._last[0]() is ids and self._last[1] == version_of(ids):
            return self._last[2]
        raise ConfigError(
            "a backward looks up other raw ids than the last lookup that trained, in tables that grow. Keep lookups "
            "out of torch.utils.checkpoint: embed first, and checkpoint what comes after."
        )

    def _reset(self, grown: Grown) -> None:
        """Reset rows to the initial values of their raw ids."""
        assert self.raw is not None
        tables, rows, ids = grown.births
        where = {}
        for index in np.unique(self._groups[tables]).tolist():
            mine = slice(None) if len(self.groups) == 1 else self._groups[tables] == index
            device, own = self.groups[index].storage.weight.device, tables[mine]
            # Tables of a group are in the order of their rows.
            where[index] = torch.from_numpy(rows[mine] + self._firsts[own]).to(device)
            fresh = self._initial.make(own, ids[mine], self.groups[index].dim)
            self.groups[index].start_anew(where[index], fresh.to(device))
        self._recent.append((self.step, where))

    def _forget(self) -> None:
        """Note that all rows have other raw ids now."""
        self.step += 1
        self._since = self.step

    def check(self, gradients: Sequence[Gradient]) -> None:
        """Raise ConfigError for a gradient of a row that was given to another raw id since its lookup."""
        for each in gradients:
            if each.born == self.step:
                continue
            ids, space = each.lookups.bags.ids, each.lookups.space
            rows = addresses(ids, space.on(ids.device).bases, each.lookups.bags.offsets)
            oldest = self._recent[0][0] if len(self._recent) == _KEPT else 0
            late = each.born + 1 < oldest or each.born < self._since
            if late or any(
                step > each.born and each.group in where and bool(torch.isin(rows, where[each.group]).any())
                for step, where in self._recent
            ):
                names = ", ".join(self.groups[each.group].space.names[:3])
                raise ConfigError(
                    f"a lookup of tables {names}, which grow, gets its gradient after {self.step - each.born} further "
                    "lookups that trained, or after a load, and a row may be another raw id's now. Step after each "
                    "lookup that trains, join the examples in one batch, or give the tables more rows."
                )


def _joined(ranks: Ranks, call: Bags, time: int | None) -> tuple[Bags, int | None, slice]:
    """Return the batch of all ranks, in their order, its time, and where the own ids are in it."""
    kind = "in bags" if call.offsets is not None else "one a feature"
    known = ranks.numbers("tell the time of a lookup", [time is not None, time or 0])
    ids = call.ids.to(torch.int64).clone(memory_format=torch.contiguous_format)  # also where it is empty
    parts = ranks.gather(f"look up raw ids, {kind}", ids)
    begin = sum(len(part) for part in parts[: ranks.rank])
    offsets = None
    if call.offsets is not None:
        lengths = torch.cat(ranks.gather("look up raw ids, their bags", call.offsets.diff()))
        offsets = pad(lengths.cumsum(0), (1, 0))
    times = [value for given, value in known if given]
    if 0 < len(times) < len(known):
        raise ConfigError("some ranks have a time for this lookup, others have none. Give it on every rank.")
    whole = Bags(torch.cat(parts), offsets)
    return whole, max(times, default=None), slice(begin, begin + len(parts[ranks.rank]))
