"""Arguments of kernels: the address space of several tables, the lookups of a batch, keys of random bits.

Tables of equal width are end to end in one address space, so that one kernel call updates them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from stoker.ops import reference
from stoker.ops.tree import Shards

T = TypeVar("T")
HAVE_NUMBA = find_spec("numba") is not None
HAVE_TRITON = find_spec("triton") is not None


class ByTable(NamedTuple):
    """Tables and their features in the order of kernels; int64."""

    table_of: np.ndarray  # [F] table of each feature
    start: np.ndarray  # [T + 1] where the features of each table begin
    features: np.ndarray  # [F] the features, by table
    first_row: np.ndarray  # [T + 1]
    rows: np.ndarray  # [T]
    features_of: np.ndarray  # [T] how many features have each table


class Placed(NamedTuple):
    """Tables and their features on a device; int64."""

    bases: Tensor  # [F] first address of each feature's table
    limits: Tensor  # [F] its rows
    table_of: Tensor  # [F]
    first_row: Tensor  # [T + 1]


@dataclass(frozen=True, eq=False)
class AddressSpace:
    """T tables end to end, and the F features that address them. Addresses are int64 throughout."""

    names: tuple[str, ...]  # [T] table names
    rows: tuple[int, ...]  # [T] rows of each table
    features: tuple[str, ...]  # [F] feature names in batch order
    table_of: tuple[int, ...]  # [F] position of each feature's table
    first_row: np.ndarray = field(init=False)  # [T + 1] int64, first address of each table; the last is the total
    bases: Tensor = field(init=False)  # [F] int64, first address of each feature's table
    limits: Tensor = field(init=False)  # [F] int64, rows of each feature's table

    def __post_init__(self) -> None:
        first = np.zeros(len(self.rows) + 1, dtype=np.int64)
        np.cumsum(np.asarray(self.rows, dtype=np.int64), out=first[1:])
        tables = np.asarray(self.table_of, dtype=np.int64)
        object.__setattr__(self, "first_row", first)
        object.__setattr__(self, "bases", torch.from_numpy(first[tables]))
        object.__setattr__(self, "limits", torch.from_numpy(np.asarray(self.rows, dtype=np.int64)[tables]))

    @property
    def num_rows(self) -> int:
        """Rows of all tables together."""
        return int(self.first_row[-1])

    @cached_property
    def by_table(self) -> ByTable:
        """Return the tables as arrays, and the features in their order."""
        tables, rows = np.asarray(self.table_of, np.int64), np.asarray(self.rows, np.int64)
        features = np.argsort(tables, kind="stable").astype(np.int64)
        start = np.searchsorted(tables[features], np.arange(len(rows) + 1)).astype(np.int64)
        return ByTable(tables, start, features, np.ascontiguousarray(self.first_row), rows, np.diff(start))

    def on(self, device: torch.device) -> Placed:
        """Return tables and features as tensors on ``device``."""
        if device not in self._placed:
            tensors = (
                self.bases,
                self.limits,
                torch.tensor(self.table_of, dtype=torch.int64, device="cpu"),
                torch.from_numpy(self.first_row),
            )
            self._placed[device] = Placed(*(tensor.to(device) for tensor in tensors))
        return self._placed[device]

    @cached_property
    def _placed(self) -> dict[torch.device, Placed]:
        return {}

    def occurrences(self, offsets: np.ndarray | None, count: int) -> np.ndarray:
        """Count the ids of each table [T] int64, of ``count`` ids in bags [B * F + 1] or one a feature."""
        known = self.by_table
        if offsets is None:
            return known.features_of * (count // len(known.features))
        lengths = np.diff(offsets).reshape(-1, len(known.features)).sum(0)
        return np.bincount(known.table_of, weights=lengths, minlength=len(self.rows)).astype(np.int64)

    def locate(self, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the table of each address [n], and the row in that table."""
        table = np.searchsorted(self.first_row, addresses, side="right") - 1
        return table, addresses - self.first_row[table]

    def table_range(self, table: int) -> tuple[int, int]:
        """Return the first address of a table and the one after its last."""
        return int(self.first_row[table]), int(self.first_row[table + 1])

    def check(self, ids: Tensor, offsets: Tensor | None) -> None:
        """Raise IndexError if an id is outside its feature's table, naming the first such id.

        A wrong id would otherwise read or change a row of the neighbouring table.
        """
        if ids.numel() == 0:
            return
        limits = self.on(ids.device).limits
        bad = (ids < 0) | (ids >= reference.by_id(limits, ids, offsets))
        if bool(bad.any()):
            self.explain(ids, offsets, int(bad.reshape(-1).nonzero()[0]))

    def explain(self, ids: Tensor, offsets: Tensor | None, position: int) -> None:
        """Raise the IndexError for the id at flat ``position``."""
        if offsets is None:
            bag = position
        else:
            bag = int(torch.searchsorted(offsets, torch.tensor(position, device=offsets.device), right=True)) - 1
        example, feature = divmod(bag, len(self.features))
        table = self.table_of[feature]
        raise IndexError(
            f"example {example} has id {int(ids.reshape(-1)[position])} in feature {self.features[feature]!r}, but "
            f"table {self.names[table]!r} holds the ids 0 to {self.rows[table] - 1:,}. Map unseen values to id 0, "
            "or build the table with more rows."
        )


@dataclass(frozen=True, eq=False)
class SlotSpace(AddressSpace):
    """The slots that the tables of a group share: an id is a slot, whatever its feature."""

    slots: int = 0  # C

    def __post_init__(self) -> None:
        count, tables = len(self.features), len(self.names)
        object.__setattr__(self, "rows", (self.slots,) * tables)
        object.__setattr__(self, "first_row", np.zeros(tables + 1, dtype=np.int64))
        object.__setattr__(self, "bases", torch.zeros(count, dtype=torch.int64, device="cpu"))
        object.__setattr__(self, "limits", torch.full((count,), self.slots, dtype=torch.int64, device="cpu"))

    @property
    def num_rows(self) -> int:
        return self.slots


@lru_cache(maxsize=1024)
def slot_space(space: AddressSpace, slots: int) -> SlotSpace:
    """Return the space of ``slots`` shared slots with the features of ``space``."""
    return SlotSpace(names=space.names, rows=space.rows, features=space.features, table_of=space.table_of, slots=slots)


def make_space(
    names: Sequence[str], rows: Sequence[int], table_features: Sequence[Sequence[str]], order: Sequence[str]
) -> AddressSpace:
    """Make an address space over tables, with the features in batch ``order``."""
    owner = {feature: table for table, features in enumerate(table_features) for feature in features}
    return AddressSpace(
        names=tuple(names), rows=tuple(rows), features=tuple(order), table_of=tuple(owner[feature] for feature in order)
    )


class Bags(NamedTuple):
    """The lookups of one batch in one group."""

    ids: Tensor  # [B, F] (one id a bag) or flat [L], int32 or int64, local to each feature's table
    offsets: Tensor | None = None  # [B * F + 1] int64, or None
    weights: Tensor | None = None  # [L] float32 per-sample weights, or None
    mean: bool = False  # mean pooling instead of sum
    distinct: bool = False  # whether no id occurs twice, so that an update need not search
    shards: Shards | None = None  # for an update: the logical shards of its examples

    def batch_size(self, num_features: int) -> int:
        """Return B."""
        return self.ids.shape[0] if self.offsets is None else (len(self.offsets) - 1) // num_features

    def cpu(self) -> Bags:
        """Return the same on the CPU, where plans are made."""
        if self.ids.device.type == "cpu":
            return self
        offsets, weights = (None if part is None else part.cpu() for part in (self.offsets, self.weights))
        return self._replace(ids=self.ids.cpu(), offsets=offsets, weights=weights)  # with its shards


class Part(NamedTuple):
    """The rows of one width, and which features of a batch look them up."""

    weight: Tensor  # [C, D]
    state: dict[str, Tensor]
    space: AddressSpace
    columns: tuple[int, ...]  # of each feature in the batch
    places: tuple[int, ...]  # where its output begins in that of an example
    mean: bool


class Parts(tuple[Part, ...]):
    """Parts whose memory does not move, so that a back end can keep what it finds out about them.

    In a step, Python takes three times as long as alone: the processor's caches are full of rows and gradients.

    Args:
        known: what was found out about parts that differ in their memory alone.
    """

    _known: dict[Any, Any]

    def __new__(cls, parts: Iterable[Part], known: dict[Any, Any] | None = None) -> Parts:
        made = super().__new__(cls, parts)
        made._known = {} if known is None else known
        return made

    def know(self, key: Any, find: Callable[[], T]) -> T:
        """Return what ``find`` returned for this key."""
        try:
            found: T = self._known[key]
        except KeyError:
            found = self._known[key] = find()
        return found


class Rounding(NamedTuple):
    """Keys of the random bits for bfloat16 rows in one update, one a table: results do not depend on grouping."""

    keys: tuple[int, ...]  # [T] signed 64-bit
    tables: Tensor | None = None  # [C] int64, table of the row in each slot; None where addresses are rows
    rows: Tensor | None = None  # [C] int64, that row's number within its table

    def bits(self, distinct: Tensor, dim: int, space: AddressSpace) -> Tensor:
        """Return the random bits [U, D] int64 of the rows at ``distinct`` [U]."""
        if self.tables is not None and self.rows is not None:
            table, local = self.tables[distinct], self.rows[distinct]
        else:
            first = space.on(distinct.device).first_row
            table = torch.searchsorted(first, distinct, right=True) - 1
            local = distinct - first[table]
        keys = torch.tensor(self.keys, dtype=torch.int64, device=distinct.device)[table]
        counter = local.unsqueeze(1) * dim + torch.arange(dim, device=distinct.device)
        return reference.counter_bits(keys.unsqueeze(1), counter)
