"""``stoker.plan``: choose the place of each table for a given memory.

If all rows fit the device, they are there. If not, whole tables are on the device, those with the most used rows per
byte first, as long as that lowers the traffic of the others. The others share the remaining memory as slots.

Bookkeeping takes more main memory (:mod:`stoker.placement.footprint`). On a CPU the budget of the slots covers it, and
with a GPU that of the backing store.

Legend: C slots of a group, H hot rows of a table.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from stoker.base.device import available_memory, resolve_device, total_memory
from stoker.base.device import device_memory as memory_of
from stoker.base.errors import ConfigError
from stoker.base.settings import with_arguments_of
from stoker.base.units import format_size, parse_size
from stoker.optim import RowOptimizer
from stoker.placement.budget import MemoryBudget
from stoker.placement.expected import HotBatches, Uses, choose_hot, phases, split_hot, uses_of, with_margin
from stoker.placement.footprint import Footprint
from stoker.placement.placement import Placement, Workload, row_bytes
from stoker.placement.profile import Profile, measure_profile
from stoker.tables.compressed.tensor_train import stored_tables
from stoker.tables.config import Cached, Device, HostPipelined, HotCold, Mapped, Slotted, TableConfig, TensorTrain
from stoker.tables.embedding import EmbeddingTables
from stoker.tables.stores.registry import store_class, store_for

Kind = tuple[int, str, str]  # dim, pooling, dtype: tables that may share slots

_SHARES = 16  # shares of memory that are given to kinds of tables one by one
_AS_GOOD = 1.01  # factor on the least cost
_PINNED = (1.0, 0.9, 0.8, 0.6, 0.3)  # shares of a cache's slots, as far as rows in flight leave them
_HOME_SHARE = 0.8  # of the available memory
_LEAST_TIER = 2**16  # least bytes of a RAM tier
_INDEX_SHARE = 8  # the index of a log-structured file takes at most 1/8 of the memory for rows


@dataclass(frozen=True, kw_only=True)
class _PlanOptions:
    """The arguments of :func:`plan` but for tables and memory settings."""

    optimizer: RowOptimizer | None = None
    budget: MemoryBudget | None = None
    batch_size: int = 2048
    tensor_trains: Mapping[str, TensorTrain] | None = None
    hot_batches: HotBatches | None = None
    device: torch.device | str | None = None
    profile: Profile | None = None
    ids_per_feature: float | Mapping[str, float] | None = None
    max_ids: int | Mapping[str, int] | None = None


@dataclass(frozen=True)
class PlanArguments(MemoryBudget, _PlanOptions):
    """The arguments of :func:`plan`."""

    tables: EmbeddingTables | nn.Module | Sequence[TableConfig]
    counts: Mapping[str, Any] | None = None
    _: KW_ONLY
    path: str | os.PathLike[str] | None = None  # home_path


@with_arguments_of(PlanArguments)
def plan(
    tables: EmbeddingTables | nn.Module | Sequence[TableConfig], counts: Mapping[str, Any] | None = None, **given: Any
) -> Placement:
    """Choose the place of each table. It changes no number that a model computes.

    Args:
        tables: an :class:`EmbeddingTables`, a module that contains one (``model``), or configurations of tables
            (``model.tables``).
        counts: table -> training occurrences by id [num_embeddings], falling, such as ``dataset.counts``. Tables
            without counts are assumed to follow Zipf's law with exponent 1.05.
        optimizer: the row optimizer, whose state moves with a row. None: that of ``tables``, if it has one.
        budget: the memory settings. None takes them from ``memory``.
        batch_size: examples per batch.
        tensor_trains: tables whose cores are on the device instead of their rows. The planner does not choose them,
            because they change the model.
        hot_batches: batches of a classified dataset that the schedule reads. ``HotCold`` pins the hot rows of its
            profile.
        device: device of the slots. None takes the first GPU, else the CPU.
        profile: costs of the machine. None measures this machine when they are first read.
        ids_per_feature: mean ids of a feature in an example, for all features or by feature. None means 1.
        max_ids: the most ids of a feature in an example. None means ``ids_per_feature`` rounded up.
        memory: the memory settings by name. ``device_memory``: fast memory for rows and their state, such as "4GiB"; on
            a CPU it also covers bookkeeping; the dense part is not in it. ``host_memory``: main memory for all rows,
            and with a GPU for bookkeeping; None takes 80 % of what is available (on a CPU, less ``device_memory``).
            Rows that need more are in a file in the directory ``path``; None: the temporary one of the system.
            ``strategy`` of tables that do not fit: "cached", "hot-cold", "host-pipelined", "mapped" (on a CPU), or
            "auto", the one that is expected to take the least time: "mapped" if rows go to a file that the page cache
            can hold; behind another file, the one that moves the fewest bytes. ``lookahead``, ``in_flight`` and
            ``epoch_lookahead`` as for :func:`stoker.stage`. ``spill``: "parts" splits a batch with more rows than
            slots, "refuse" refuses it.

    Raises:
        ConfigError: a budget that cannot work, with the smallest one that does; or a setting out of its range.

    >>> tables = [stoker.TableConfig(name=name, num_embeddings=rows, embedding_dim=16) for name, rows in
    ...           [("user", 100_000), ("item", 1_000)]]
    >>> placement = stoker.plan(tables, optimizer=stoker.RowWiseAdagrad(lr=0.1), device_memory="1MiB", batch_size=256)
    >>> {name: type(strategy).__name__ for name, strategy in placement.items()}
    {'user': 'Cached', 'item': 'Device'}
    """
    asked = _PlanOptions(**{item.name: given.pop(item.name) for item in fields(_PlanOptions) if item.name in given})
    tables, optimizer = _configurations(tables, asked.optimizer)
    batch_size, profile = asked.batch_size, asked.profile
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; it must be at least 1.")
    settings = _settings(asked.budget, given)
    chosen = resolve_device(asked.device)
    limit = parse_size(settings.device_memory or 0)
    mean = {name: _per_feature(asked.ids_per_feature, name, 1.0) for table in tables for name in table.features}
    most = {name: int(_per_feature(asked.max_ids, name, math.ceil(mean[name]))) for name in mean}
    state = dict(optimizer.state)
    work = Workload(
        uses=_uses(tables, counts or {}, batch_size, mean), state=state, budget=settings, device=chosen,
        hot_batches=asked.hot_batches,
    )  # fmt: skip
    needs = _Needs(work, most)
    trains = {name: each for name, each in (asked.tensor_trains or {}).items() if name in work.uses}
    everything, tables = tables, [table for table in tables if table.name not in trains]
    cores = sum(
        table.num_embeddings * row_bytes(table, state)
        for table in stored_tables([table for table in everything if table.name in trains], trains)
    )
    total = sum(needs.bytes(table) for table in tables)
    if total + cores <= limit:
        _check_device(total + cores, chosen)
        return Placement(everything, {**{table.name: Device() for table in tables}, **trains}, work, profile)
    if cores >= limit:
        raise ConfigError(
            f"the cores of {len(trains)} tensor-train tables need {format_size(cores)} with their state, but the "
            f"budget for rows is {format_size(limit)}. Give more device memory, or a lower rank."
        )
    limit -= cores
    on_cpu = chosen.type == "cpu"

    def mapped(note: str) -> Placement:
        resident, path, choice = _map(tables, limit, needs, settings)
        at: dict[str, Any] = {table.name: Mapped(path=path) for table in tables}
        at |= {table.name: Device() for table in resident}
        return Placement(everything, {**at, **trains}, work, profile, note, choice=choice)

    if settings.strategy == "mapped":
        return mapped("")

    def placed(limit: int) -> _TriedPlaces:
        needs.check(tables, limit, batch_size)
        resident, slots = _divide(tables, limit, needs, work)
        rest = [table for table in tables if table not in resident]
        first = Division(strategy=Cached, resident=resident, rest=rest, slots=slots)
        in_memory = store_class(store_of(first)[0]).in_memory
        division, moved, choice = weigh(first, work, limit, needs.largest_slots, profile, in_memory=in_memory)
        return _TriedPlaces(division, moved, choice, *store_of(division))

    def store_of(division: Division) -> tuple[str, float, str]:
        homes = sum(needs.bytes(table) for table in division.rest)
        bookkeeping, given = (0, needs.taken(division)) if on_cpu else (needs.bookkeeping(division), 0)
        return _choose_store(homes, bookkeeping, given, settings)

    found, unmapped = placed(limit), ""
    if on_cpu and settings.strategy == "auto" and store_class(found.home).in_files:
        try:
            return mapped(found.note)
        except ConfigError as error:
            unmapped = f"; not mapped: {error}"
    options: dict[str, Any] = {"home": found.home, "spill": settings.spill}
    room = 0.0  # bytes of main memory for a RAM tier
    if not store_class(found.home).in_memory:
        options |= {"path": settings.home_path, "writes": "in-place"}
        # The page cache of the system uses memory for a file anyway and frees it. A RAM tier keeps what it is given.
        needs_tier = store_class(found.home).cache_bytes is not None
        room = found.room if settings.host_memory is not None or needs_tier else 0.0
        # A log-structured file is worth a little memory for its index.
        index = store_class(found.home).index_bytes(sum(table.num_embeddings for table in tables))
        if index and index * _INDEX_SHARE <= (limit if on_cpu else found.room):
            with suppress(ConfigError):  # the index leaves too little memory
                found = placed(limit - index) if on_cpu else found
                options["writes"] = "append"
                room -= 0 if on_cpu else index
    division, moved, choice, note = found.division, found.moved, found.choice, found.note
    _check_device(needs.taken(division) + cores, chosen)
    resident, rest, slots = list(division.resident), list(division.rest), dict(division.slots)
    kinds = by_kind(rest)
    tiers = _tiers(kinds, room, found, settings, needs)
    of_kind = {
        kind: division.of(
            memory=slots[kind] * row_bytes(members[0], state), host_memory=tiers[kind],
            window=needs.footprint(members).window(slots[kind] - division.count_hot(members)), **options,
        )
        for kind, members in kinds.items()
    }  # fmt: skip
    strategies = {table.name: Device() if table in resident else of_kind[kind_of(table)] for table in tables}
    return Placement(everything, {**strategies, **trains}, work, profile, note, moved, choice + unmapped)


def _settings(budget: MemoryBudget | None, given: dict[str, Any]) -> MemoryBudget:
    """Return the memory settings."""
    if budget is None:
        if "path" in given:
            given["home_path"] = given.pop("path")
        budget = MemoryBudget.from_dict(given)
    elif given:
        raise ConfigError(f"plan takes a budget or memory settings by name ({', '.join(given)}), not both.")
    if budget.device_memory is None:
        raise ConfigError("plan needs a limit on fast memory. Give for example device_memory='4GiB'.")
    return budget


def _per_feature(given: float | Mapping[str, float] | None, name: str, default: float) -> float:
    if given is None:
        return default
    return given if isinstance(given, int | float) else given.get(name, default)


def _configurations(
    tables: EmbeddingTables | nn.Module | Sequence[TableConfig], optimizer: RowOptimizer | None
) -> tuple[Sequence[TableConfig], RowOptimizer]:
    """Return the configurations of the tables, and the row optimizer."""
    if isinstance(tables, nn.Module):
        found = [module for module in tables.modules() if isinstance(module, EmbeddingTables)]
        if len(found) != 1:
            raise ConfigError(
                f"{type(tables).__name__} contains {len(found)} EmbeddingTables; plan places one. Pass it, or a "
                "list of TableConfig."
            )
        return found[0].tables, optimizer or found[0].optimizer
    tables = list(tables) if isinstance(tables, Iterable) and not isinstance(tables, str | Mapping) else []
    if not tables or not all(isinstance(table, TableConfig) for table in tables):
        raise ConfigError(
            "plan needs tables: an EmbeddingTables, a module with one, or a list of TableConfig (model.tables)."
        )
    if optimizer is None:
        raise ConfigError("a list of TableConfig has no optimizer. Pass optimizer=, such as stoker.RowWiseAdagrad().")
    return tables, optimizer


def _uses(
    tables: Sequence[TableConfig], counts: Mapping[str, Any], batch_size: int, mean: Mapping[str, float]
) -> dict[str, Uses]:
    """Return the use of the rows, by table."""
    found: dict[str, Uses] = {}
    for table in tables:
        known = counts.get(table.name)
        if known is not None and len(known) != table.num_embeddings:
            raise ConfigError(
                f"table {table.name!r} has {table.num_embeddings:,} rows, but {len(known):,} counts. Give those of "
                "its own vocabulary."
            )
        found[table.name] = uses_of(
            table.num_embeddings, known, batch_size * sum(mean[name] for name in table.features)
        )
    return found


class _TriedPlaces(NamedTuple):
    """The places of tables within a budget, and the reasons."""

    division: Division
    moved: dict[str, float]  # as for Placement
    choice: str
    home: str  # name of the store
    room: float  # bytes of main memory for the backing store
    note: str


class _Needs:
    """The needs of tables: slots, and bytes of memory."""

    def __init__(self, work: Workload, most: Mapping[str, int]) -> None:
        self.work, self.most, self.spill = work, most, work.budget.spill
        self.uses, self.state = work.uses, work.state
        self._footprints: dict[tuple[str, ...], Footprint] = {}

    def bytes(self, table: TableConfig) -> int:
        """Return the bytes of all rows of a table."""
        return table.num_embeddings * row_bytes(table, self.state)

    def density(self, table: TableConfig) -> float:
        """Return the used rows per step and byte."""
        return self.uses[table.name].distinct / self.bytes(table)

    def footprint(self, members: Sequence[TableConfig]) -> Footprint:
        """Return the footprint of tables of one kind."""
        names = tuple(table.name for table in members)
        if names not in self._footprints:
            self._footprints[names] = self.work.footprint(members)
        return self._footprints[names]

    def in_flight_slots(self, members: Sequence[TableConfig], depth: int) -> int:
        """Return the slots for ``depth`` batches of tables of one kind, with a margin that few batches exceed."""
        expected = sum(self.uses[table.name].distinct_of(depth) for table in members)
        return min(with_margin(expected), sum(table.num_embeddings for table in members))

    def largest_slots(self, members: Sequence[TableConfig]) -> int:
        """Return the rows of the largest example, in tables of one kind."""
        rows = sum(min(table.num_embeddings, sum(self.most[name] for name in table.features)) for table in members)
        return max(1, rows)

    def least_slots(self, members: Sequence[TableConfig]) -> int:
        """Return the minimum of slots to train tables of one kind."""
        largest = self.largest_slots(members)
        if self.spill == "refuse":
            return max(largest, self.in_flight_slots(members, self.work.budget.in_flight or 1))
        return largest

    def wanted_slots(self, members: Sequence[TableConfig]) -> int:
        """Return the slots to stage one batch while another is trained."""
        return self.in_flight_slots(members, self.work.budget.in_flight or 2)

    def fast(self, tables: Sequence[TableConfig], slots: Callable[[Sequence[TableConfig]], int]) -> int:
        """Return the fast memory of tables, where ``slots`` returns the slots of a kind."""
        return sum(self.footprint(members).fast(slots(members)) for members in by_kind(tables).values())

    def taken(self, division: Division) -> int:
        """Return the fast memory of a division."""
        total = sum(self.bytes(table) for table in division.resident)
        for kind, members in by_kind(division.rest).items():
            footprint, hot = self.footprint(members), division.count_hot(members)
            total += footprint.fast(division.slots[kind] - hot) + footprint.slot_bytes * hot
        return total

    def bookkeeping(self, division: Division) -> int:
        """Return the main memory for the bookkeeping of a division."""
        kinds = by_kind(division.rest).items()
        return sum(
            self.footprint(members).counted(division.slots[kind] - division.count_hot(members))
            for kind, members in kinds
        )

    def check(self, tables: Sequence[TableConfig], budget: int, batch_size: int) -> None:
        """Refuse a budget that cannot work."""
        least = self.fast(tables, self.least_slots)
        if budget >= least:
            return
        if self.spill == "refuse":
            depth = self.work.budget.in_flight or 1
            number = "a batch" if depth == 1 else f"{depth} batches in flight"
            what = f"{number} of {batch_size:,} examples needs about {format_size(least)} of rows at once"
            remedy = "lower in_flight or batch_size, or choose spill='parts', which splits large batches"
        else:
            kinds = list(by_kind(tables).values())
            bookkeeping = sum(self.footprint(m).fast(0) for m in kinds) if self.work.device.type == "cpu" else 0
            rows = sum(self.footprint(m).slot_bytes * self.least_slots(m) for m in kinds)
            if bookkeeping > rows:
                what = (
                    f"bookkeeping takes {format_size(least - rows)} with batches of {batch_size:,} "
                    f"examples, and the largest example has {format_size(rows)} of rows"
                )
                remedy = "or choose a smaller batch_size"
            else:
                what = f"the largest example alone has {format_size(least)} of rows"
                remedy = "or choose fewer columns (embedding_dim)"
        raise ConfigError(
            f"device_memory {format_size(budget)} is too little: {what}, with optimizer state. The smallest budget "
            f"that works is {_at_least(least)}. Give that much (--device-memory), {remedy}.",
            settings=("spill",),
        )


def _divide(
    tables: Sequence[TableConfig], budget: int, needs: _Needs, work: Workload
) -> tuple[list[TableConfig], dict[Kind, int]]:
    """Return the tables that are on the device as a whole, and the slots of the others by kind."""
    order = sorted(tables, key=lambda table: (-needs.density(table), table.name))
    options: list[tuple[float, int, dict[Kind, int]]] = []
    used = 0
    for count in range(len(order)):
        rest = order[count:]
        # If even all memory does not fit the batches in flight, all of it goes to slots.
        if count and used + needs.fast(rest, needs.wanted_slots) > budget:
            break
        slots, moved = _share_memory(by_kind(rest), budget - used, needs, work)
        options.append((moved, count, slots))
        used += needs.bytes(order[count])
    least = min(moved for moved, _, _ in options)
    # Among the best ones, choose the most tables on the device, because they need no planning.
    _, count, slots = max((option for option in options if option[0] <= _AS_GOOD * least), key=lambda o: o[1])
    return order[:count], slots


def _share_memory(
    kinds: Mapping[Kind, Sequence[TableConfig]], memory: int, needs: _Needs, work: Workload
) -> tuple[dict[Kind, int], float]:
    """Return the slots of each kind, and the bytes fetched in a step.

    Each kind gets its minimum. Each share of the rest goes to the kind whose traffic it lowers most.
    """
    prints = {kind: needs.footprint(members) for kind, members in kinds.items()}

    def moved(kind: Kind, given: int) -> float:
        slots = max(1, prints[kind].slots_within(given))
        traffic, _ = work.traffic(kinds[kind], Cached(slots=slots), slots)
        return traffic.fetched * prints[kind].row_bytes

    if len(kinds) == 1:
        kind = next(iter(kinds))
        given = {kind: memory}
    else:
        least = {kind: needs.least_slots(members) for kind, members in kinds.items()}
        given = {
            kind: prints[kind].fast(max(needs.wanted_slots(members), least[kind])) for kind, members in kinds.items()
        }
        if sum(given.values()) > memory:
            given = {kind: prints[kind].fast(slots) for kind, slots in least.items()}
        part = max(1, (memory - sum(given.values())) // _SHARES)
        now = {kind: moved(kind, given[kind]) for kind in kinds}
        for _ in range(_SHARES):
            after = {kind: moved(kind, given[kind] + part) for kind in kinds}
            best = max(kinds, key=lambda kind: now[kind] - after[kind])
            given[best], now[best] = given[best] + part, after[best]
    slots = {kind: prints[kind].slots_within(value) for kind, value in given.items()}
    return slots, sum(moved(kind, value) for kind, value in given.items())


def _choose_store(needed: int, bookkeeping: int, slots: int, settings: MemoryBudget) -> tuple[str, float, str]:
    """Return the backing store of rows that do not fit the device, the main memory for it, and the reason.

    ``needed``: bytes of all these rows; of main memory, ``bookkeeping`` and ``slots``: for these.
    """
    if settings.host_memory is not None:
        room: float = parse_size(settings.host_memory)
        given = f"host_memory {format_size(room)}"
    else:
        available = available_memory()
        room = math.inf if available is None else _HOME_SHARE * max(0, available - slots)
        given = f"80 % of the available memory, {format_size(room)}"
    if needed + bookkeeping <= room:
        return "memory", room - bookkeeping, f"the backing store takes {format_size(needed)} of main memory"
    if bookkeeping:
        given += f" less {format_size(bookkeeping)} for bookkeeping"
    path = None if settings.home_path is None else str(settings.home_path)
    home = store_for(path)
    why = f"the backing store needs {format_size(needed)}, more than {given}: it is {store_class(home).place(path)}"
    return home, room - bookkeeping, why


def _map(
    tables: Sequence[TableConfig], limit: int, needs: _Needs, settings: MemoryBudget
) -> tuple[list[TableConfig], str | None, str]:
    """Return the tables on the device, if the other ones are mapped, the directory of the file, and the reason."""
    resident, taken = [], 0
    for table in sorted(tables, key=lambda table: (-needs.density(table), table.name)):
        if taken + needs.bytes(table) <= limit:
            resident.append(table)
            taken += needs.bytes(table)
    size = sum(map(needs.bytes, tables)) - taken
    path = None if settings.home_path is None else str(settings.home_path)
    available = available_memory()
    room = _HOME_SHARE * max(0, (total_memory() or 0 if available is None else available) - taken)
    store = store_class(store_for(path))
    folder = Path(path or tempfile.gettempdir()).absolute()
    free = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free
    if needs.work.device.type != "cpu":
        problem = "a GPU does not train rows in a mapped file"
    elif not store.in_files:
        problem = f"rows {store.place(path)} cannot be mapped"
    elif size > room:
        problem = f"80 % of the available memory, {format_size(room)}, do not hold a file of {format_size(size)}"
    elif size > free:
        problem = f"a mapped file takes {format_size(size)} at once, and its disk has {format_size(free)} free"
    else:
        why = f"mapped: the page cache can hold the file of {format_size(size)}, because {format_size(room)} are free"
        return resident, path, f"{why} for it; rows are trained in it, and none is planned or copied"
    raise ConfigError(problem, settings=("strategy",))


def _tiers(
    kinds: Mapping[Kind, Sequence[TableConfig]], room: float, found: _TriedPlaces, settings: MemoryBudget, needs: _Needs
) -> dict[Kind, int | None]:
    """Return the bytes of the RAM tier of each kind; None if the store needs none, and there are a few blocks only."""
    store, homes = store_class(found.home), {kind: sum(map(needs.bytes, members)) for kind, members in kinds.items()}
    rows = {kind: sum(table.num_embeddings for table in members) for kind, members in kinds.items()}
    least = {kind: store.least_cache(rows[kind], homes[kind] // rows[kind]) for kind in kinds}
    spare = room - sum(least.values())
    if spare < 0 and any(least.values()):
        given = "80 % of the available memory" if settings.host_memory is None else "host_memory"
        asked = found.room if settings.host_memory is None else float(parse_size(settings.host_memory))
        needed = math.ceil(asked - spare)
        raise ConfigError(
            f"{given}, {format_size(asked)}, is too little: rows {store.place(str(settings.home_path))} move in "
            f"blocks, and the smallest cache of blocks and its bookkeeping take {format_size(needed)}. Give at least "
            f"{_at_least(needed)} (--host-memory).",
            settings=("host_memory",),
        )
    tiers: dict[Kind, int | None] = {}
    for kind, size in homes.items():
        share = least[kind] + spare * size / sum(homes.values())
        # The page table of a tier over a file takes at most 4 bytes a row, and its blocks as much again.
        enough = least[kind] or _LEAST_TIER + 8 * rows[kind] + 16 * size // rows[kind]
        tiers[kind] = int(share) if share >= enough else None
    return tiers


def _check_device(needed: int, device: torch.device) -> None:
    total = memory_of(device)[1]
    if total and needed > total:
        raise ConfigError(
            f"the rows on {device} would take {format_size(needed)}, but it has {format_size(total)} of memory. "
            f"Give a smaller --device-memory: the other rows are then in main memory or in a file."
        )


def _at_least(size: int) -> str:
    """Return a size as a user types it, rounded up."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{math.ceil(size / factor * 10) / 10:g}{unit}"
    return f"{math.ceil(size / 1024)}KiB"


def kind_of(table: TableConfig) -> Kind:
    """Return what tables that share slots have in common."""
    return table.embedding_dim, table.pooling, table.dtype


def by_kind(tables: Sequence[TableConfig]) -> dict[Kind, list[TableConfig]]:
    """Group tables that may share slots."""
    found: dict[Kind, list[TableConfig]] = {}
    for table in tables:
        found.setdefault(kind_of(table), []).append(table)
    return found


@dataclass(frozen=True, kw_only=True)
class Division:
    """Tables that are on the device as a whole, and the slots of the others."""

    strategy: type[Slotted]
    resident: Sequence[TableConfig]
    rest: Sequence[TableConfig]
    slots: Mapping[Kind, int]  # C
    hot: Mapping[str, int] = field(default_factory=dict)  # table -> H

    def of(self, **options: Any) -> Slotted:
        """Return the strategy of a kind of tables."""
        return self.strategy(**options, hot=self.hot)

    def count_hot(self, tables: Sequence[TableConfig]) -> int:
        """Return the hot rows of some tables together."""
        return sum(self.hot.get(table.name, 0) for table in tables)

    def cost(self, work: Workload, profile: Profile | None) -> tuple[float, float | None]:
        """Return the bytes moved per step of the first epoch, both ways, and the seconds to plan and move rows.

        Hot rows are fetched once, at the start. Without a profile there are no seconds.
        """
        moved, seconds = 0.0, 0.0
        for kind, members in by_kind(self.rest).items():
            strategy, slots = self.of(slots=self.slots[kind]), self.slots[kind]
            come = sum(self.hot.get(table.name, 0) / work.uses[table.name].batches for table in members)
            if profile is not None:
                found = work.cost(members, strategy, slots, profile)
                seconds += found.planning + found.moving + come / profile.fetch
            traffic = work.traffic(members, strategy, slots)[0] if profile is None else found.traffic
            moved += (traffic.fetched + traffic.written + come) * row_bytes(members[0], work.state)
        return moved, None if profile is None else seconds


def weigh(
    cached: Division, work: Workload, budget: int, largest: Callable[[Sequence[TableConfig]], int],
    profile: Profile | None = None, *, in_memory: bool,
) -> tuple[Division, dict[str, float], str]:  # fmt: skip
    """Choose the strategy that the user wants, or the quickest one; and the first ids that a cache pins.

    Rows in files wait for the disk, so for them the strategy that moves the fewest bytes is taken. ``cached`` is the
    division for a cache, ``largest`` counts the rows of the largest example, ``profile`` None: measure this machine.
    Returns the division, the bytes that each strategy moves per step, and the reason in a sentence.
    """
    found, strategy = {"cached": [cached]}, work.budget.strategy
    hot, problem = _hot_cold(cached, work, budget, largest)
    if hot is not None:
        found["hot-cold"] = [hot]
    found["host-pipelined"] = [replace(cached, strategy=HostPipelined)]
    if strategy != "auto" and strategy not in found:
        # The hot rows of a profile take the same memory for any batch size.
        smaller = "a smaller batch_size, " if work.hot_batches is None else ""
        raise ConfigError(
            f"strategy 'hot-cold' does not work: {problem}. Give more memory (--device-memory), {smaller}or another "
            "strategy.",
            settings=("strategy",),
        )
    if in_memory and profile is None:
        most = max(cached.rest, key=lambda table: table.num_embeddings)
        profile = measure_profile(dim=most.embedding_dim, dtype=most.dtype, state=work.state, device=work.device)
    # Without counts, the first ids may not be those that are used most. A cache that knows the epoch does better.
    known = (
        all(math.isfinite(work.uses[table.name].batches) for table in cached.rest) and not work.budget.epoch_lookahead
    )
    if known and work.hot_batches is None:
        found["cached"] += [each for share in _PINNED if (each := _pinned(cached, work, share)) is not None]
    best: dict[str, tuple[Division, float, float | None]] = {}  # with its bytes and seconds
    for name, divisions in found.items():
        weighed = [(each, *each.cost(work, profile if in_memory else None)) for each in divisions]
        best[name] = min(weighed, key=lambda one: one[1] if one[2] is None else one[2])
    costs = {name: size if seconds is None else seconds for name, (_, size, seconds) in best.items()}
    sure = {name: cost for name, cost in costs.items() if known or work.hot_batches or name != "hot-cold"}
    chosen = strategy if strategy != "auto" else least_cost(sure)
    sizes = {name: size for name, (_, size, _) in best.items()}
    said = ", ".join(
        f"{name} {size / 2**20:.2f} MiB" + ("" if seconds is None else f" in {1000 * seconds:.1f} ms")
        for name, (_, size, seconds) in best.items()
    )
    why = _why(strategy, chosen, sure, problem)
    said = f"rows {'planned and ' * in_memory}moved a step: {said}"
    return best[chosen][0], sizes, f"{said}; chosen: {chosen}{why}"


def least_cost(costs: Mapping[str, float]) -> str:
    """Return the strategy with the least cost; among nearly equal ones a cache, which adapts to what is read."""
    least = min(costs.values())
    order = ("cached", "hot-cold", "host-pipelined")
    return next(name for name in order if costs.get(name, math.inf) <= least * _AS_GOOD)


def _why(strategy: str, chosen: str, costs: Mapping[str, float], problem: str) -> str:
    if strategy != "auto":
        return ", as requested"
    if costs[chosen] > min(costs.values()):
        return ", which costs little more"
    return f" (no hot-cold: {problem})" if problem else ""


def _hot_cold(
    cached: Division, work: Workload, budget: int, largest: Callable[[Sequence[TableConfig]], int]
) -> tuple[Division | None, str]:
    """Return the division with hot rows: those of a classified dataset, else the most used ones; or why not."""
    if work.hot_batches is not None:
        return _classified(cached, work.hot_batches, work, budget, largest)
    pinned = _pinned(cached, work, 1.0)
    if pinned is None:
        return None, "the rows of a batch take all slots, so none are left for hot rows"
    return replace(pinned, strategy=HotCold), ""


def _pinned(cached: Division, work: Workload, share: float) -> Division | None:
    """Return the cache with its most used rows pinned, or None if there is no slot for them.

    ``share``: of the slots that is pinned, at most all but those that the other rows in flight need.
    """
    hot: dict[str, int] = {}
    slots: dict[Kind, int] = {}
    for kind, members in by_kind(cached.rest).items():
        uses, footprint, depth = [work.uses[table.name] for table in members], work.footprint(members), work.depth(None)

        def chosen(slots: int, uses: Sequence[Uses] = uses, depth: int = depth) -> list[int]:
            most = choose_hot(uses, slots, depth)
            return most if sum(most) <= share * slots else choose_hot(uses, int(share * slots), 0)

        slots[kind] = cached.slots[kind]
        found = chosen(slots[kind])
        if any(found):  # hot rows need less bookkeeping, so there is memory for more of them
            slots[kind] = footprint.hot_slots_within(footprint.fast(slots[kind]), slots[kind] - sum(found))
            found = chosen(slots[kind])
        hot |= {table.name: count for table, count in zip(members, found, strict=True)}
    return replace(cached, slots=slots, hot=hot) if any(hot.values()) else None


def _classified(
    cached: Division, batches: HotBatches, work: Workload, budget: int, largest: Callable[[Sequence[TableConfig]], int]
) -> tuple[Division | None, str]:
    """Pin all hot rows of the profile, keep slots for rows in flight, and pin more rows if memory is left."""
    tables = [*cached.resident, *cached.rest]
    hot = {table.name: batches.rows.get(table.name, 0) for table in tables}
    whole = [table for table in tables if hot[table.name] >= table.num_embeddings]
    rest = [table for table in tables if table not in whole]
    if not any(hot[table.name] for table in rest):
        return None, "in the profile, a table is hot as a whole or not at all"
    kinds = by_kind(rest)
    left = budget - sum(table.num_embeddings * row_bytes(table, work.state) for table in whole)
    needed, wanted, transit = dict[Kind, int](), dict[Kind, int](), dict[Kind, int]()
    uses: dict[Kind, list[Uses]] = {}  # in batches that are not hot
    for kind, members in kinds.items():
        uses[kind] = [phases(work.uses[table.name], hot[table.name], batches.share)[1] for table in members]
        cold = [split_hot(use, hot[table.name])[1] for use, table in zip(uses[kind], members, strict=True)]
        transit[kind] = with_margin(sum(use.distinct_of(work.depth(None)) for use in cold))
        footprint = work.footprint(members)
        own = footprint.slot_bytes * sum(hot[table.name] for table in members)
        needed[kind] = footprint.fast(largest(members)) + own
        wanted[kind] = footprint.fast(max(largest(members), transit[kind])) + own
    least = sum(needed.values())
    if least > left:
        return None, (
            f"the hot rows of the profile and the rows of one example take {format_size(least - left)} more than "
            f"{format_size(budget)}"
        )
    spare = left - least
    more = {kind: wanted[kind] - needed[kind] for kind in kinds}
    part = min(1.0, spare / total) if (total := sum(more.values())) else 0.0
    given = {kind: needed[kind] + int(part * more[kind]) for kind in kinds}
    first = next(iter(kinds))
    given[first] += left - sum(given.values())  # the others do not need it
    slots: dict[Kind, int] = {}
    for kind, members in kinds.items():
        least_hot = [hot[table.name] for table in members]
        own, footprint = sum(least_hot), work.footprint(members)
        slots[kind] = own + footprint.slots_within(given[kind] - own * footprint.slot_bytes)
        if slots[kind] > own + transit[kind]:  # memory for more hot rows than the profile has
            slots[kind] = footprint.hot_slots_within(given[kind], transit[kind])
            more_hot = choose_hot(uses[kind], slots[kind], work.depth(None), least_hot)
            hot |= {table.name: count for table, count in zip(members, more_hot, strict=True)}
    kept = {table.name: hot[table.name] for table in rest}
    return Division(strategy=HotCold, resident=whole, rest=rest, slots=slots, hot=kept), ""


def rows_to_compress(
    tables: Sequence[TableConfig],
    budget: int,
    state: Mapping[str, str],
    rank: int,
    cores: int = 3,
    already: Mapping[str, TensorTrain] | None = None,
) -> int | None:
    """Find the fewest largest tables to compress as tensor trains so that everything fits the device.

    Returns the number of rows from which a table is compressed. If even all tables that become smaller are too large,
    that of these. None if everything fits already, or no table becomes smaller. ``already`` are compressed in any case.
    """

    def size(several: Sequence[TableConfig]) -> int:
        return sum(table.num_embeddings * row_bytes(table, state) for table in several)

    already = already or {}
    left, found = size(stored_tables(tables, already)), None
    tables = [table for table in tables if table.name not in already]
    if left <= budget:
        return None
    train = TensorTrain(rank=rank, cores=cores)
    for rows in sorted({table.num_embeddings for table in tables}, reverse=True):
        those = [table for table in tables if table.num_embeddings == rows]
        saved = size(those) - size(stored_tables(those, {table.name: train for table in those}))
        if saved <= 0:
            break
        left, found = left - saved, rows
        if left <= budget:
            break
    return found
