"""A placement: the strategy of each table, the traffic and time that it costs, and the bytes that ranks send.

If rows are divided among ranks (:mod:`stoker.tables.ranks`), a rank names the distinct rows of its examples to their
owners, gets these rows, and sends the sums of their gradients back: one for each node of the tree that its shards
cover. If that is one node, owners know the rows in their order. Each rank adds a slice of the dense part's gradients.
What a rank owns itself is not sent.

Legend: R ranks, V shards, P parameters of the dense part, D columns.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any, NamedTuple

import torch

from stoker.base.device import available_memory
from stoker.base.errors import ConfigError
from stoker.base.picture import Grid, Shown
from stoker.base.units import format_count, format_size, plural
from stoker.ops.tree import nodes_of, shards_of
from stoker.placement.budget import MemoryBudget
from stoker.placement.expected import (
    HotBatches,
    Traffic,
    Uses,
    all_hits,
    expect_pinned,
    part_of,
    phases,
    split_hot,
    weighted,
)
from stoker.placement.footprint import Footprint, Window
from stoker.placement.profile import Profile, measure_profile
from stoker.tables.compressed.tensor_train import stored_tables
from stoker.tables.config import (
    DTYPES,
    Cached,
    Device,
    Mapped,
    Slotted,
    Strategy,
    TableConfig,
    TensorTrain,
    bytes_of_row,
)
from stoker.tables.ranks.sums import sends_names
from stoker.tables.stores.registry import store_class, store_of

_MIB = 2**20


def row_bytes(table: TableConfig, state: Mapping[str, str]) -> int:
    """Return the bytes of a row of a table with its optimizer state."""
    return bytes_of_row(table.embedding_dim, table.dtype, state)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tables that share slots, and their expected figures for a step of the first epoch."""

    tables: tuple[str, ...]
    dim: int  # columns
    rows: int  # of all its tables
    bytes: int  # of all rows, with optimizer state
    strategy: str  # device, tensor-train, or a value of --strategy
    home: str | None  # backing store; None: all rows are in fast memory
    hot: int  # pinned rows
    slots: int  # rows in fast memory
    slot_bytes: int  # bytes of the slots, with optimizer state
    cache_bytes: int  # main memory for a RAM tier over the backing store
    bookkeeping_bytes: int  # main memory for bookkeeping, at most
    distinct_rows: float  # of a batch
    hit_rate: float  # share of a batch's distinct rows that are in a slot already
    lookup_hit_rate: float  # the same as a share of lookups
    fetched_mib: float  # MiB per step from the backing store to slots
    written_mib: float  # MiB per step back
    in_parts: bool  # a typical batch has more rows than slots, so it is split into parts
    plan_seconds: float  # per step, to find slots on the measured machine
    move_seconds: float  # per step, to move rows, with the wait for a disk
    disk_seconds: float  # of those, waiting for a disk

    @property
    def seconds(self) -> float:
        """Seconds per step to plan and to move rows."""
        return self.plan_seconds + self.move_seconds


class Cost(NamedTuple):
    """The expected traffic and time of a group of tables, per step of the first epoch."""

    traffic: Traffic
    in_parts: bool  # as for Group
    planning: float  # seconds
    moving: float  # seconds, with the wait for a disk
    disk: float  # of those, waiting for a disk


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """What the cost of a placement depends on."""

    uses: Mapping[str, Uses]  # table -> use of its rows
    state: Mapping[str, str]  # state of the row optimizer
    budget: MemoryBudget
    device: torch.device
    hot_batches: HotBatches | None = None  # of a classified dataset

    def depth(self, home: str | None) -> int:
        """Return the batches in flight: the given number, or the one with which :func:`stoker.stage` begins."""
        waits = home is not None and store_class(home).is_blocking
        return self.budget.in_flight or (2 if waits or self.device.type == "cuda" else 1)

    def footprint(self, tables: Sequence[TableConfig]) -> Footprint:
        """Return the memory of tables that share slots."""
        return Footprint(
            [self.uses[table.name] for table in tables], row_bytes(tables[0], self.state), self.budget,
            on_cpu=self.device.type == "cpu", rounded=tables[0].dtype == "bfloat16",
        )  # fmt: skip

    def traffic(self, tables: Sequence[TableConfig], strategy: Slotted, slots: int) -> tuple[Traffic, bool]:
        """Return the expected traffic of tables that share ``slots``, and whether batches are split into parts."""
        uses = [self.uses[table.name] for table in tables]
        stay = strategy.count_hot(tables)
        if self.hot_batches is None:
            return self._traffic(uses, stay, strategy, slots)
        hot = [self.hot_batches.rows.get(table.name, 0) for table in tables]
        share = self.hot_batches.share
        inside, outside = zip(*(phases(use, rows, share) for use, rows in zip(uses, hot, strict=True)), strict=True)
        others, parts = self._traffic(outside, stay, strategy, slots)
        # Hot batches use the same rows again and again, so any strategy that keeps rows keeps these.
        kept = sum(hot) <= slots if isinstance(strategy, Cached) else all(map(int.__ge__, stay, hot)) and any(stay)
        warm = all_hits(inside) if kept else self._traffic(inside, stay, strategy, slots)[0]
        found = weighted(warm, others, share)
        if kept and not any(stay):  # a cache fetches the rows that occur in hot batches only
            new = sum(
                float(split_hot(use, rows)[0].rows.sum() - split_hot(out, rows)[0].rows.sum()) / use.batches
                for use, out, rows in zip(uses, outside, hot, strict=True)
            )
            found = replace(found, hits=found.hits - new, first=found.first + new)
        return found, parts

    def cost(self, tables: Sequence[TableConfig], strategy: Slotted, slots: int, profile: Profile) -> Cost:
        """Return the traffic and the time of tables that share ``slots``, on the machine of ``profile``."""
        traffic, in_parts = self.traffic(tables, strategy, slots)
        uses, size = [self.uses[table.name] for table in tables], row_bytes(tables[0], self.state)
        stay = strategy.count_hot(tables)
        found = all_hits([split_hot(use, rows)[0] for use, rows in zip(uses, stay, strict=True)])
        planned = replace(
            traffic, distinct=traffic.distinct - found.distinct, hits=traffic.hits - found.distinct,
            lookups=traffic.lookups - found.lookups,
        )  # fmt: skip
        files = store_of(strategy, sum(table.num_embeddings for table in tables)).in_files
        cold = _cold_share(sum(float(use.rows.sum()) for use in uses) * size) if files else 0.0
        disk = profile.disk_seconds(traffic, size, cold)
        moving = profile.move_seconds(traffic, size, in_memory=not files, cold=cold) + disk
        return Cost(traffic, in_parts, profile.plan_seconds(planned), moving, disk)

    def _traffic(
        self, uses: Sequence[Uses], stay: Sequence[int], strategy: Slotted, slots: int
    ) -> tuple[Traffic, bool]:
        """Return the same for batches of one kind, where ``stay`` [T] rows of each table are pinned."""
        moving = [split_hot(use, rows)[1] for use, rows in zip(uses, stay, strict=True)]
        room, depth = slots - sum(stay), self.depth(strategy.home)
        while depth > 1 and sum(use.distinct_of(depth) for use in moving) > room:
            depth -= 1  # too few slots: the next batch is staged later
        window = Window(moving, self.budget, on_cpu=self.device.type == "cpu")
        known = None if self.budget.epoch_lookahead else min(window.lookahead, window.batches(room))
        found = expect_pinned(
            uses, stay, slots, lookahead=known, in_flight=depth, transient=not isinstance(strategy, Cached)
        )
        distinct = sum(use.distinct for use in moving)
        if distinct <= room:
            return found, False
        # A batch in parts fetches its rows once for the lookup and once more for the update.
        still = max(0.0, found.distinct - distinct) if any(stay) else 0.0
        twice = replace(found, distinct=still + 2 * distinct, hits=still, lookups_hit=0.0, written=distinct)
        return twice, True


class Placement(Shown, UserDict[str, Strategy]):
    """A strategy for each table. :func:`stoker.plan` makes it, and :class:`stoker.EmbeddingTables` takes it.

    ``placement["C3"] = stoker.Device()`` replaces a decision. A table without a strategy is on the device. Tables of
    equal width, pooling, type and strategy share slots, so the memory in a strategy is that of its group.

    Args:
        tables: the tables.
        strategies: one for each table.
        workload: what the cost depends on.
        profile: costs of this machine. None measures it when :attr:`groups` is first read.
        note: the reason for the backing store.
        moved: strategy -> bytes moved in a step, both ways, for the strategies that were compared.
        choice: a sentence on what they move and which one was chosen.

    >>> tables = [stoker.TableConfig(name="user", num_embeddings=10_000, embedding_dim=16)]
    >>> placement = stoker.plan(tables, optimizer=stoker.SGD(lr=0.1), device_memory="256KiB", batch_size=64)
    >>> placement
    <placement: ... of 10.00 k rows in fast memory: 1 table cached in ... slots (...), all rows in memory (625.0 KiB)>
    >>> placement["user"] = stoker.Device()
    >>> placement.resident
    True
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        strategies: Mapping[str, Strategy],
        workload: Workload,
        profile: Profile | None = None,
        note: str = "",
        moved: Mapping[str, float] | None = None,
        choice: str = "",
    ) -> None:
        self.tables = tuple(tables)
        self.workload = workload
        self.note = note
        self.moved = dict(moved or {})
        self.choice = choice
        self._profile = profile
        self._judged: tuple[dict[str, Strategy], tuple[Group, ...]] | None = None
        super().__init__(strategies)

    def __setitem__(self, name: str, strategy: Strategy) -> None:
        if name not in {table.name for table in self.tables}:
            raise ConfigError(f"there is no table {name!r}, only {', '.join(table.name for table in self.tables)}.")
        if not isinstance(strategy, Strategy):
            raise ConfigError(f"{strategy!r} is not a strategy. Use for example stoker.Cached(memory='1GiB').")
        super().__setitem__(name, strategy)

    def __repr__(self) -> str:
        return f"<{self.summary()}>"

    @property
    def resident(self) -> bool:
        """True if all rows are on the device."""
        return not any(isinstance(strategy, Slotted | Mapped) for strategy in self.values())

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of tables. Without a profile, reading them measures this machine (:func:`measure_profile`)."""
        if self._judged is None or self._judged[0] != self.data:
            self._judged = dict(self.data), tuple(map(self._judge, self._bundles()))
        return self._judged[1]

    def _bundles(self) -> list[_Bundle]:
        """Return the tables in the groups that :class:`stoker.EmbeddingTables` will make."""
        found: dict[Any, list[TableConfig]] = {}
        for table in self.tables:
            strategy = self.get(table.name, Device())
            found.setdefault((strategy, table.embedding_dim, table.pooling, table.dtype), []).append(table)
        return [_Bundle(key[0], tables, self.workload.state) for key, tables in found.items()]

    def _judge(self, of: _Bundle) -> Group:
        work, strategy, bookkeeping = self.workload, of.strategy, 0
        cost = Cost(all_hits([work.uses[table.name] for table in of.tables]), False, 0.0, 0.0, 0.0)
        if isinstance(strategy, Slotted):
            bookkeeping = work.footprint(of.tables).bookkeeping(of.slots - sum(of.hot)).total + sum(of.hot) // 8
            store = store_of(strategy, of.rows)
            bookkeeping += store.index_bytes(of.rows)
            first = of.tables[0]
            profile = self._profile or measure_profile(
                dim=first.embedding_dim, dtype=first.dtype, state=work.state, device=work.device,
                directory=strategy.path, file=store.in_files, writes=strategy.writes,
            )  # fmt: skip
            cost = work.cost(of.tables, strategy, of.slots, profile)
        traffic = cost.traffic
        return Group(
            tables=tuple(table.name for table in of.tables), dim=of.tables[0].embedding_dim, rows=of.rows,
            bytes=of.bytes, strategy=_word(strategy), home=of.home, hot=sum(of.hot), slots=of.slots,
            slot_bytes=of.fast_bytes, cache_bytes=of.cache_bytes, bookkeeping_bytes=bookkeeping,
            distinct_rows=traffic.distinct, hit_rate=traffic.hit_rate,
            lookup_hit_rate=traffic.lookup_hit_rate, fetched_mib=traffic.fetched * of.row_bytes / _MIB,
            written_mib=traffic.written * of.row_bytes / _MIB, in_parts=cost.in_parts,
            plan_seconds=cost.planning, move_seconds=cost.moving, disk_seconds=cost.disk,
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Seconds per step to plan and to move rows, in all groups."""
        return sum(group.seconds for group in self.groups)

    @property
    def plan_seconds(self) -> float:
        """Seconds of those to find slots for rows."""
        return sum(group.plan_seconds for group in self.groups)

    @property
    def disk_seconds(self) -> float:
        """Seconds of those that wait for a disk."""
        return sum(group.disk_seconds for group in self.groups)

    def summary(self) -> str:
        """Return tables, slots, share of the rows and backing store in one line. Measures nothing."""
        bundles = self._bundles()
        trains = [each for each in bundles if isinstance(each.strategy, TensorTrain)]
        slotted = [each for each in bundles if each.home is not None]
        words = []
        if trains:
            small, large = (
                sum(sizes) for sizes in zip(*((t.bytes, t.rows * t.row_bytes) for t in trains), strict=True)
            )
            sizes = f"{format_size(small)} instead of {format_size(large)}, with state"
            words.append(f"{plural(sum(len(each.tables) for each in trains), 'table')} tensor-train ({sizes})")
        direct = sum(len(each.tables) for each in bundles if each not in trains and each not in slotted)
        if direct:
            whole = f"{plural(direct, 'table')} on the device"
            words = [*words, whole] if slotted else [f"{whole}, with all rows", *words]
        if not slotted:
            return f"placement: {', '.join(words)}"
        total, fast = (sum(counts) for counts in zip(*((each.rows, each.slots) for each in bundles), strict=True))
        words += [each.words() for each in slotted]
        return f"placement: {fast / total:.1%} of {format_count(total)} rows in fast memory: " + ", ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        weighed = {name: size / _MIB for name, size in self.moved.items()}
        groups = [{**asdict(group), "seconds": group.seconds} for group in self.groups]
        return {
            "note": self.note, "choice": self.choice, "moved_mib": weighed, "seconds": self.seconds, "groups": groups,
        }  # fmt: skip

    def grids(self) -> tuple[Grid]:
        """Return a table with a column for each group; a line if there are many. Measures as :attr:`groups` does."""
        found = [[name, *map(words, self.groups)] for name, words in _FIGURES.items()]
        lines = [line for line in found if any(figure != "-" for figure in line[1:])]
        headings, *rows = lines if len(self.groups) < len(lines) else zip(*lines, strict=True)
        return (Grid(headings, rows),)

    def _repr_html_(self) -> str:
        """Return a table with a line for each group. Measures nothing, so that a notebook shows it at once."""
        headings = ["tables", "rows", "strategy", "slots", "in fast memory", "all rows"]
        rows = [
            [
                _named([table.name for table in each.tables]), format_count(each.rows), _word(each.strategy),
                format_count(each.slots), format_size(each.fast_bytes), format_size(each.bytes),
            ]
            for each in self._bundles()
        ]  # fmt: skip
        return f"<p>{escape(self.summary())}</p>{Grid(headings, rows, left=(0, 2)).html()}"


def _moving(words: Callable[[Group], str]) -> Callable[[Group], str]:
    """Return "-" in place of a figure for groups whose rows are all in fast memory."""
    return lambda group: "-" if group.home is None else words(group)


_FIGURES: dict[str, Callable[[Group], str]] = {
    "tables": lambda group: _named(group.tables),
    "rows": lambda group: format_count(group.rows),
    "with optimizer state": lambda group: format_size(group.bytes),
    "strategy": lambda group: group.strategy + (", in parts" if group.in_parts else ""),
    "backing store": _moving(lambda group: str(group.home)),
    "cached in main memory": _moving(lambda group: format_size(group.cache_bytes) if group.cache_bytes else "-"),
    "slots": _moving(lambda group: f"{format_count(group.slots)} ({group.slots / group.rows:.1%})"),
    "of them hot": _moving(lambda group: format_count(group.hot) if group.hot else "-"),
    "memory of slots": _moving(lambda group: format_size(group.slot_bytes)),
    "bookkeeping": _moving(lambda group: format_size(group.bookkeeping_bytes)),
    "distinct rows a step": lambda group: f"{group.distinct_rows:,.0f}",
    "hit rate": lambda group: f"{group.hit_rate:.1%}",
    "hit rate of lookups": lambda group: f"{group.lookup_hit_rate:.1%}",
    "MiB fetched a step": _moving(lambda group: f"{group.fetched_mib:.2f}"),
    "MiB written a step": _moving(lambda group: f"{group.written_mib:.2f}"),
    "planning": _moving(lambda group: f"{1000 * group.plan_seconds:.1f} ms"),
    "moving": _moving(lambda group: f"{1000 * group.move_seconds:.1f} ms"),
}


class _Bundle:
    """Tables of equal width, pooling, type and strategy, and their memory."""

    def __init__(self, strategy: Strategy, tables: Sequence[TableConfig], state: Mapping[str, str]) -> None:
        self.strategy, self.tables = strategy, tables
        self.rows, self.row_bytes = sum(table.num_embeddings for table in tables), row_bytes(tables[0], state)
        self.slots, self.home, self.cache_bytes = self.rows, None, 0
        self.hot: Sequence[int] = [0] * len(tables)
        self.bytes = self.fast_bytes = self.rows * self.row_bytes  # of all rows; of those in fast memory
        if isinstance(strategy, Slotted):
            self.slots, self.home = strategy.count_slots(self.rows, self.row_bytes), strategy.home
            size = strategy.host_memory or store_class(strategy.home).cache_bytes or 0
            self.cache_bytes = min(int(size), self.bytes)
            self.fast_bytes = self.slots * self.row_bytes
            self.hot = strategy.count_hot(tables)
        if isinstance(strategy, Mapped):
            self.slots, self.home, self.fast_bytes = 0, "file", 0
        if isinstance(strategy, TensorTrain):
            cores = stored_tables(tables, dict.fromkeys([table.name for table in tables], strategy))
            self.bytes = self.fast_bytes = sum(core.num_embeddings * row_bytes(core, state) for core in cores)

    def words(self) -> str:
        """Describe the slots of the tables and their backing store."""
        assert isinstance(self.strategy, Slotted | Mapped)
        where = store_class(str(self.home)).place(self.strategy.path)
        if isinstance(self.strategy, Mapped):
            return f"{plural(len(self.tables), 'table')} mapped, all rows {where} ({format_size(self.bytes)})"
        where += f" behind {format_size(self.cache_bytes)} of memory" if self.cache_bytes else ""
        own = f", {format_count(sum(self.hot))} of them for hot rows" if any(self.hot) else ""
        return (
            f"{plural(len(self.tables), 'table')} {_word(self.strategy)} in {format_count(self.slots)} slots"
            f"{own} ({self.slots / self.rows:.1%} of their rows, {format_size(self.fast_bytes)}), all rows {where} "
            f"({format_size(self.bytes)})"
        )


def _word(strategy: Strategy) -> str:
    """Return the word of a strategy, as ``--strategy`` has it: hot-cold for HotCold."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(strategy).__name__).lower()


def _named(tables: Sequence[str]) -> str:
    """Return the first names, as many as fit a column."""
    shown = ", ".join(tables[:2])
    return shown if len(tables) <= 2 else f"{shown} and {len(tables) - 2} more"


def _cold_share(size: float) -> float:
    """Return the share of a file of ``size`` bytes that the system's page cache cannot hold."""
    room = available_memory()
    return 0.0 if room is None else max(0.0, 1.0 - 0.8 * room / max(size, 1))


_SUM_HEAD = 16  # bytes of a sum of gradients before its values: row, node and count
_SUM_COUNT = 4  # without row and node
_WIDE_IDS = 2**31  # rows from which ids take 8 bytes


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Mean bytes that a rank sends to the others in a step."""

    ids: float  # names of rows
    rows: float
    gradients: float  # of rows
    parameters: float  # gradients of the dense part
    headers: float  # before each message

    @property
    def total(self) -> float:
        """The sum of all of them."""
        return float(sum(asdict(self).values()))


def expect_sent(placement: Placement, ranks: int, shards: int, parameters: int) -> Sent:
    """Return the expected bytes of a step.

    ``placement``: of the rows that one rank owns, with their uses in whole batches; ``ranks``: at most
    ``shards``; ``parameters``: P.
    """
    own = [shards_of(rank, ranks, shards) for rank in range(ranks)]
    nodes = [node.size / shards for each in own for node in nodes_of(each)]
    others = (ranks - 1) / ranks
    groups: dict[Any, list[TableConfig]] = {}
    for table in placement.tables:
        key = placement.get(table.name, Device()), table.embedding_dim, table.pooling, table.dtype
        groups.setdefault(key, []).append(table)
    ids = rows = gradients = 0.0
    for (strategy, dim, _, dtype), tables in groups.items():

        def distinct(shares: Iterable[float], tables: list[TableConfig] = tables) -> float:
            uses = [placement.workload.uses[table.name] for table in tables]
            return others * sum(part_of(use, share).distinct for share in shares for use in uses)

        whole = isinstance(strategy, TensorTrain)  # every rank has the cores, and gets all gradients
        gradients += distinct(nodes) * ((_SUM_HEAD if whole or sends_names(ranks, shards) else _SUM_COUNT) + 4 * dim)
        if whole:
            continue
        wanted = distinct(len(each) / shards for each in own)
        ids += wanted * (8 if ranks * sum(table.num_embeddings for table in tables) >= _WIDE_IDS else 4)
        rows += wanted * dim * DTYPES[dtype].itemsize
    # Rows of slots are asked for ahead. Others, and sums of parameters, follow a message with a word of 8 bytes.
    asked = [not isinstance(strategy, TensorTrain) for strategy, *_ in groups]
    ahead = sum(isinstance(strategy, Slotted) for strategy, *_ in groups)
    messages, words = len(groups) + sum(asked) + ahead + 1, sum(asked) - ahead + 1
    return Sent(
        ids=ids, rows=rows, gradients=gradients, parameters=4 * (parameters + 1) * others * (len(nodes) / ranks + 1),
        headers=(ranks - 1) * (messages * (128 + 8 * ranks) + 8 * words),
    )  # fmt: skip
