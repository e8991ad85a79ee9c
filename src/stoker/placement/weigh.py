"""Which strategy moves the fewest bytes, for tables that do not fit the device.

Legend: C slots of a group, H hot rows of a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from stoker.base.errors import ConfigError
from stoker.base.units import format_size
from stoker.placement.expected import Uses
from stoker.placement.footprint import HOT_MARK
from stoker.placement.hot_cold import HotBatches, choose_hot, parted, phases, roomy
from stoker.placement.placement import Workload, row_bytes
from stoker.tables.config import Cached, HostPipelined, HotCold, Slotted, TableConfig

Kind = tuple[int, str, str]  # dim, pooling, dtype: tables that may share slots
Choice = Literal["auto", "cached", "hot-cold", "host-pipelined"]
CHOICES: tuple[str, ...] = get_args(Choice)
_CLASSES: dict[str, type[Slotted]] = {"cached": Cached, "hot-cold": HotCold, "host-pipelined": HostPipelined}
_AS_GOOD = 1.01  # times the least bytes


def check_choice(strategy: str) -> None:
    """Refuse a strategy that does not exist."""
    if strategy not in CHOICES:
        raise ConfigError(
            f"strategy {strategy!r} is unknown. Choose one of {', '.join(CHOICES)}.", settings=("strategy",)
        )


def kind_of(table: TableConfig) -> Kind:
    """What tables that share slots have in common."""
    return table.embedding_dim, table.pooling, table.dtype


def by_kind(tables: Sequence[TableConfig]) -> dict[Kind, list[TableConfig]]:
    """Tables that may share slots."""
    found: dict[Kind, list[TableConfig]] = {}
    for table in tables:
        found.setdefault(kind_of(table), []).append(table)
    return found


@dataclass(frozen=True, kw_only=True)
class Division:
    """Tables that lie on the device, and the slots of the others."""

    strategy: type[Slotted]
    resident: Sequence[TableConfig]
    rest: Sequence[TableConfig]
    slots: Mapping[Kind, int]  # C
    hot: Mapping[str, int] = field(default_factory=dict)  # table -> H, for HotCold

    def of(self, **options: Any) -> Slotted:
        """The strategy of a kind of tables."""
        if self.strategy is HotCold:
            options["hot"] = self.hot
        return self.strategy(**options)

    def moved(self, work: Workload) -> float:
        """Bytes a step of a first epoch, both ways. Hot rows come once, before the first step."""
        total = 0.0
        for kind, members in by_kind(self.rest).items():
            slots = self.slots[kind]
            traffic, _ = work.traffic(members, self.of(slots=slots), slots)
            come = sum(self.hot.get(table.name, 0) / work.uses[table.name].batches for table in members)
            total += (traffic.fetched + traffic.written + come) * row_bytes(members[0], work.state)
        return total


def weigh(
    cached: Division, work: Workload, budget: int, strategy: Choice, largest: Callable[[Sequence[TableConfig]], int]
) -> tuple[Division, dict[str, float], str]:
    """The division asked for, or the one that moves the fewest bytes; what each moves in a step, and why in a sentence.

    Args:
        cached: how a cache would lie.
        work: what to judge by.
        budget: bytes of fast memory.
        strategy: the user's choice.
        largest: rows of the largest example of tables of one kind.

    Raises:
        ConfigError: hot rows were asked for, and there is no room for them.
    """
    found: dict[str, Division] = {"cached": cached}
    problem = ""
    hot, problem = _hot_cold(cached, work, budget, largest)
    if hot is not None:
        found["hot-cold"] = hot
    found["host-pipelined"] = Division(
        strategy=HostPipelined, resident=cached.resident, rest=cached.rest, slots=cached.slots
    )
    if strategy != "auto" and strategy not in found:
        # A profile's hot rows take the same room whatever the batch.
        smaller = "a smaller batch_size, " if work.hot_batches is None else ""
        raise ConfigError(
            f"strategy 'hot-cold' cannot be: {problem}. Give more memory (--device-memory), {smaller}or another "
            "strategy.",
            settings=("strategy",),
        )
    moved = {name: division.moved(work) for name, division in found.items()}
    known = all(math.isfinite(work.uses[table.name].batches) for table in cached.rest)
    chosen = strategy if strategy != "auto" else least_moved(moved, known=known)
    sizes = {_CLASSES[name].__name__: size for name, size in moved.items()}
    said = ", ".join(
        f"{name} {'moves ' if not place else ''}{size / 2**20:.2f}{' MiB a step' if not place else ''}"
        for place, (name, size) in enumerate(sizes.items())
    )
    return found[chosen], sizes, f"{said}: {_CLASSES[chosen].__name__}{_why(strategy, chosen, moved, problem)}"


def least_moved(moved: Mapping[str, float], *, known: bool) -> str:
    """The fewest bytes. Where it makes hardly a difference, hot rows, as finding them costs nothing; but a cache if
    counts are not ``known``, for it need not know them either."""
    least = min(moved.values())
    order = ("hot-cold", "cached", "host-pipelined") if known else ("cached", "hot-cold", "host-pipelined")
    return next(name for name in order if moved.get(name, math.inf) <= least * _AS_GOOD)


def _why(strategy: Choice, chosen: str, moved: Mapping[str, float], problem: str) -> str:
    if strategy != "auto":
        return ", as asked for"
    if moved[chosen] > min(moved.values()):
        return ", which moves hardly more" + (" and need not plan hot rows" if chosen == "hot-cold" else "")
    return f" (no HotCold: {problem})" if problem else ""


def _hot_cold(
    cached: Division, work: Workload, budget: int, largest: Callable[[Sequence[TableConfig]], int]
) -> tuple[Division | None, str]:
    """Hot rows of a classified dataset, or else the most used ones; None and why not, if there is no room."""
    if work.hot_batches is not None:
        return _classified(cached, work.hot_batches, work, budget, largest)
    hot: dict[str, int] = {}
    slots: dict[Kind, int] = {}
    for kind, members in by_kind(cached.rest).items():
        uses, footprint = [work.uses[table.name] for table in members], work.footprint(members)
        depth = work.depth(None)
        slots[kind] = cached.slots[kind]
        chosen = choose_hot(uses, slots[kind], depth)
        if any(chosen):  # what is not needed to plan rows holds more of them
            slots[kind] = footprint.hot_slots_within(footprint.fast(slots[kind]), slots[kind] - sum(chosen))
            chosen = choose_hot(uses, slots[kind], depth)
        hot |= {table.name: count for table, count in zip(members, chosen, strict=True)}
    if not any(hot.values()):
        return None, "the rows of a batch take all slots, and leave none for hot rows"
    return Division(strategy=HotCold, resident=cached.resident, rest=cached.rest, slots=slots, hot=hot), ""


def _classified(
    cached: Division, batches: HotBatches, work: Workload, budget: int,
    largest: Callable[[Sequence[TableConfig]], int],
) -> tuple[Division | None, str]:  # fmt: skip
    """All rows that the profile calls hot, room for those in transit, and more hot rows where memory is left."""
    tables = [*cached.resident, *cached.rest]
    hot = {table.name: batches.rows.get(table.name, 0) for table in tables}
    whole = [table for table in tables if hot[table.name] >= table.num_embeddings]
    rest = [table for table in tables if table not in whole]
    if not any(hot[table.name] for table in rest):
        return None, "the profile calls whole tables hot, and no part of one"
    kinds = by_kind(rest)
    left = budget - sum(table.num_embeddings * row_bytes(table, work.state) for table in whole)
    needed, wanted, transit = dict[Kind, int](), dict[Kind, int](), dict[Kind, int]()
    uses: dict[Kind, list[Uses]] = {}  # in batches that are not of hot rows only
    for kind, members in kinds.items():
        uses[kind] = [phases(work.uses[table.name], hot[table.name], batches.share)[1] for table in members]
        cold = [parted(use, hot[table.name])[1] for use, table in zip(uses[kind], members, strict=True)]
        transit[kind] = roomy(sum(use.distinct_of(work.depth(None)) for use in cold))
        own = sum(hot[table.name] for table in members)
        footprint = work.footprint(members)
        needed[kind], wanted[kind] = (
            footprint.fast(rows) + own * (footprint.slot_bytes + (HOT_MARK if footprint.on_cpu else 0))
            for rows in (largest(members), max(largest(members), transit[kind]))
        )
    least = sum(needed.values())
    if least > left:
        return None, (
            f"the profile's hot rows and those of one example in transit take {format_size(budget - left + least)}, "
            f"more than {format_size(budget)}"
        )
    spare = left - least
    more = {kind: wanted[kind] - needed[kind] for kind in kinds}
    part = min(1.0, spare / total) if (total := sum(more.values())) else 0.0
    given = {kind: needed[kind] + int(part * more[kind]) for kind in kinds}
    first = next(iter(kinds))
    given[first] += left - sum(given.values())  # nobody else needs it
    slots: dict[Kind, int] = {}
    for kind, members in kinds.items():
        least_hot = [hot[table.name] for table in members]
        own = sum(least_hot)
        footprint = work.footprint(members)
        each = footprint.slot_bytes + (HOT_MARK if footprint.on_cpu else 0)
        slots[kind] = own + footprint.slots_within(given[kind] - own * each)
        if slots[kind] > own + transit[kind]:  # room for more hot rows than the profile has
            slots[kind] = footprint.hot_slots_within(given[kind], transit[kind])
            more_hot = choose_hot(uses[kind], slots[kind], work.depth(None), least_hot)
            hot |= {table.name: count for table, count in zip(members, more_hot, strict=True)}
    kept = {table.name: hot[table.name] for table in rest}
    return Division(strategy=HotCold, resident=whole, rest=rest, slots=slots, hot=kept), ""
