"""Configuration of a table, and strategies for the place of its rows. These are values without memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from stoker.base.checks import check_not_negative, check_types, typed
from stoker.base.errors import ConfigError
from stoker.base.settings import checked_arguments
from stoker.base.units import parse_size
from stoker.dataset.spec import FeatureSpec, Grow
from stoker.ops.tt.shape import TTShape, factorize
from stoker.tables.stores.registry import store_class, store_names

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def bytes_of_row(dim: int, dtype: str, state: Mapping[str, str]) -> int:
    """Return the bytes of a row of ``dim`` columns with its optimizer state, name -> "row" or "scalar"."""
    return dim * DTYPES[dtype].itemsize + sum(4 * dim if kind == "row" else 4 for kind in state.values())


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Where the rows of a table are while it trains. Placement is not a model change.

    >>> isinstance(stoker.Cached(fraction=0.1), stoker.Strategy)
    True
    """

    def __post_init__(self) -> None:
        check_types(self, type(self).__name__)


@dataclass(frozen=True, kw_only=True)
class Device(Strategy):
    """All rows on the device: as many slots as rows, and no row is evicted.

    >>> table = stoker.TableConfig(name="t", num_embeddings=1000, embedding_dim=8)
    >>> stoker.EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1), placement=stoker.Device())
    EmbeddingTables(
      1 table, 1,000 rows, 31.2 KiB with state, sgd
      t: 8 columns, Device, on cpu
    )
    """


@dataclass(frozen=True, kw_only=True)
class Mapped(Strategy):
    """All rows in a file that is mapped into main memory, for training on a CPU: nothing is planned or copied.

    Fast while the page cache of the system holds the file. If it does not, a page is read for nearly every row, so take
    ``Cached(home="file", ...)`` there.

    >>> table = stoker.TableConfig(name="t", num_embeddings=1000, embedding_dim=8)
    >>> stoker.EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1), placement=stoker.Mapped())
    EmbeddingTables(
      1 table, 1,000 rows, 31.2 KiB with state, sgd
      t: 8 columns, Mapped, on cpu
    )
    """

    path: str | None = None  # directory of the file, which has no name there; None: the system's temporary one


@dataclass(frozen=True, kw_only=True)
class Slotted(Strategy):
    """Rows in a backing store, some of them in slots of fast memory. Give exactly one of the three sizes.

    Tables of equal width, pooling, type and strategy share the slots.

    Raises:
        ConfigError: no size or several, or one out of its range.
    """

    slots: int | None = None  # rows in fast memory
    fraction: float | None = None  # of the tables' rows, in (0, 1]
    memory: int | str | None = None  # bytes for weights and optimizer state in fast memory, such as "4GiB"
    home: str = "memory"  # the backing store: "memory", "file", or a name given to stoker.register_store
    path: str | None = None  # directory of the spill file, None: the system's temporary one; or a URL of the store
    # A RAM tier: bytes of main memory for blocks of rows of a store that is not in memory, such as "2GiB".
    host_memory: int | str | None = None
    direct: bool = False  # read and write the file past the page cache
    # How rows are stored in a file: appended to a log, which moves only the bytes of a row and keeps 4 bytes a row in
    # memory, or "in-place", which reads and writes a page a row. None: appended, if the index takes at most a 64th of
    # the machine's memory.
    writes: Literal["append", "in-place"] | None = None
    # Page-lock rows in memory, so that a GPU can read them itself where that is faster. It takes the memory of all rows
    # at once, and time. None: for a GPU, if the rows are at most half of the available memory.
    pin: bool | None = None
    spill: Literal["parts", "refuse"] = "parts"  # a batch with more rows than slots: chunk it, or refuse it
    # table -> H: its ids below H are pinned in slots, so nothing is planned for them. Sizes count these slots, too.
    hot: Mapping[str, int] | tuple[tuple[str, int], ...] = ()
    # Bytes of main memory for the ids of coming batches, such as "256MiB", in addition to the slots. None: a 64th of
    # the machine's memory, for all tables together.
    window: int | str | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        try:
            hot = tuple(sorted((table, typed(rows, int)) for table, rows in dict(self.hot).items()))
        except (TypeError, ValueError):
            raise ConfigError(f"{name}: hot is {self.hot!r}; give rows of tables, such as {{'C3': 10_000}}.") from None
        object.__setattr__(self, "hot", hot)  # hashable, and equal in any order
        super().__post_init__()
        if wrong := [table for table, rows in hot if rows < 0]:
            raise ConfigError(f"{name}: table {wrong[0]!r} has {dict(hot)[wrong[0]]} hot rows; give 0 or more.")
        given = [value for value in (self.slots, self.fraction, self.memory) if value is not None]
        if len(given) != 1:
            raise ConfigError(f"{name} needs one size: slots=, fraction= or memory=; {len(given)} were given.")
        if self.slots is not None and self.slots < 1:
            raise ConfigError(f"{name}: slots is {self.slots}; it must be at least 1.")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ConfigError(f"{name}: fraction is {self.fraction}; it must be above 0 and at most 1.")
        if self.home not in (known := store_names()):
            raise ConfigError(f"{name}: home {self.home!r} is unknown. Choose {', '.join(map(repr, known))}.")
        store = store_class(self.home)
        if self.host_memory is not None:
            object.__setattr__(self, "host_memory", parse_size(self.host_memory))
            if store.in_memory:
                raise ConfigError(
                    f"{name}: host_memory caches rows of a store in main memory, but home={self.home!r} is in main "
                    "memory. Leave host_memory out, or choose home='file'."
                )
        if self.pin and not store.in_memory:
            raise ConfigError(
                f"{name}: pin=True page-locks rows in memory, but home={self.home!r} keeps them elsewhere."
            )
        for size in ("memory", "window"):
            if getattr(self, size) is not None:
                object.__setattr__(self, size, parse_size(getattr(self, size)))

    def count_slots(self, rows: int, row_bytes: int) -> int:
        """Return C for tables of ``rows`` rows in all with ``row_bytes`` bytes each, state included."""
        if self.slots is not None:
            return min(self.slots, rows)
        if self.fraction is not None:
            return max(1, min(rows, round(self.fraction * rows)))
        slots = int(self.memory or 0) // row_bytes
        if slots < 1:
            raise ConfigError(f"{self.memory} bytes hold no row of {row_bytes} bytes. Give more memory.")
        return min(slots, rows)

    @property
    def hot_rows(self) -> dict[str, int]:
        """Return table -> H, for tables with hot rows."""
        return dict(self.hot)

    def count_hot(self, tables: Sequence[TableConfig]) -> tuple[int, ...]:
        """Return H of each table [T]."""
        hot = self.hot_rows
        for table in tables:
            if hot.get(table.name, 0) > table.num_embeddings:
                raise ConfigError(
                    f"{type(self).__name__}: {hot[table.name]:,} rows of table {table.name!r} are to be hot, but it "
                    f"has {table.num_embeddings:,}. Give at most that many, or profile the dataset of these tables."
                )
        return tuple(hot.get(table.name, 0) for table in tables)


@dataclass(frozen=True, kw_only=True)
class Cached(Slotted):
    """A cache filled by looking ahead: the row whose next use is farthest is evicted (cDLRM; exact, as in BagPipe).

    If ids fall by frequency, ``hot`` rows save most of the planning.

    >>> table = stoker.TableConfig(name="t", num_embeddings=1000, embedding_dim=8)
    >>> stoker.EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1), placement=stoker.Cached(fraction=0.1))
    EmbeddingTables(
      1 table, 1,000 rows, 3.1 KiB with state, sgd
      t: 8 columns, Cached, 100 slots for 1,000 rows, backed by memory, on cpu
    )
    """


@dataclass(frozen=True, kw_only=True)
class HostPipelined(Slotted):
    """Slots only for batches in flight: every row is written back after its last use (EL-Rec's pipeline).

    >>> table = stoker.TableConfig(name="t", num_embeddings=1000, embedding_dim=8)
    >>> stoker.EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1), placement=stoker.HostPipelined(memory="4KiB"))
    EmbeddingTables(
      1 table, 1,000 rows, 4.0 KiB with state, sgd
      t: 8 columns, HostPipelined, 128 slots for 1,000 rows, backed by memory, on cpu
    )

    Raises:
        ConfigError: as for :class:`Slotted`; or hot rows.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hot:
            raise ConfigError("HostPipelined keeps no rows. With hot rows it is HotCold: choose that.")


class _Profiled(Protocol):
    """A profile, such as :class:`stoker.HotProfile`."""

    @property
    def hot_rows(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, kw_only=True)
class HotCold(Slotted):
    """Hot rows, the ids below H of each table, are pinned in slots; other rows are written back after their last use.

    (FAE, VLDB 2022, section 4, with one copy of a hot row instead of two.) The fields are those of :class:`Slotted`:
    ``slots``, ``fraction`` or ``memory`` count hot rows and rows in flight together. One value serves tables with
    different H, which then share one cache.

    >>> table = stoker.TableConfig(name="t", num_embeddings=1000, embedding_dim=8)
    >>> hot = stoker.HotCold(hot={"t": 100}, slots=200)
    >>> stoker.EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1), placement=hot)
    EmbeddingTables(
      1 table, 1,000 rows, 6.2 KiB with state, sgd
      t: 8 columns, HotCold, 200 slots for 1,000 rows, 100 of them hot, backed by memory, on cpu
    )

    Raises:
        ConfigError: as for :class:`Slotted`; or no hot rows, or a negative number.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any(self.hot_rows.values()):
            raise ConfigError(
                "HotCold needs hot rows, such as hot={'C3': 10_000}, or HotCold.from_profile(stoker.profile(...), "
                "...). Without any, choose HostPipelined."
            )

    @classmethod
    def from_profile(cls, profile: _Profiled, **options: Any) -> HotCold:
        """Take the hot rows of a profile (``stoker.profile``); ``options``: the other fields, with one size."""
        return cls(hot=profile.hot_rows, **options)


@dataclass(frozen=True, kw_only=True)
class TensorTrain(Strategy):
    """Cores on the device whose products are the rows (EL-Rec, SC 2022): less memory, and a change of the model.

    The row optimizer works on slices of cores.

    >>> table = stoker.TableConfig(name="t", num_embeddings=1000, embedding_dim=8)
    >>> stoker.EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1), placement=stoker.TensorTrain(rank=4))
    EmbeddingTables(
      1 table, 1,000 rows, 1.6 KiB with state, sgd
      t: 8 columns, TensorTrain, on cpu
    )

    Raises:
        ConfigError: a rank below 1, or not 2 to 4 cores.
    """

    rank: int | tuple[int, ...] = 32  # of all cuts between cores, or of each
    cores: int = 3  # 2 to 4
    own: int | None = None  # instead of both: numbers that each row has alone, next to one common core
    shape: TTShape | None = None  # instead of all three

    @classmethod
    def from_dict(cls, values: Mapping[str, Sequence[int]]) -> TensorTrain:
        """Build the strategy from :meth:`to_dict`'s values."""
        rows, cols, ranks = (tuple(values[name]) for name in ("rows", "cols", "ranks"))
        return cls(shape=TTShape(rows, cols, ranks))

    def to_dict(self, table: TableConfig) -> dict[str, list[int]]:
        """Return the shape for ``table`` as plain values for JSON."""
        shape = self.shape_of(table)
        return {"rows": list(shape.rows), "cols": list(shape.cols), "ranks": list(shape.ranks)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rank, Sequence):
            object.__setattr__(self, "rank", tuple(map(int, self.rank)))  # for hashes and JSON
        if self.own is not None and self.own < 1:
            raise ConfigError(f"a row of a tensor train cannot have {self.own} numbers of its own; give at least 1.")
        if self.shape is None:
            factorize(1, 1, self.rank, self.cores)  # checks the numbers

    def shape_of(self, table: TableConfig) -> TTShape:
        """Return factors and ranks for ``table``.

        Raises:
            ConfigError: the given shape does not fit, there are as many own numbers as columns, the type is not
                float32, rows start as zeros, or the table grows.
        """
        if table.scale == 0:
            raise ConfigError(
                f"table {table.name!r} has init_scale 0, but cores of zeros have no gradient and never learn. Give a "
                "small scale instead, or leave init_scale out."
            )
        if table.dtype != "float32":
            raise ConfigError(
                f"table {table.name!r} has dtype {table.dtype}, but tensor-train cores are float32. Leave one of them "
                "out; cores are small already."
            )
        if table.grow is not None:
            raise ConfigError(
                f"table {table.name!r} grows, but the rows of a tensor train are products of cores that they share, so "
                "none can start anew. Leave grow or the tensor train out."
            )
        if self.shape is None and self.own is not None:
            if self.own >= table.embedding_dim:
                raise ConfigError(
                    f"table {table.name!r} has {table.embedding_dim} columns, so rows with {self.own} numbers of their "
                    "own save nothing. Give fewer, or do not compress the table."
                )
            return TTShape((table.num_embeddings, 1), (1, table.embedding_dim), (self.own,))
        if self.shape is None:
            return factorize(table.num_embeddings, table.embedding_dim, self.rank, self.cores)
        if self.shape.dim != table.embedding_dim or self.shape.capacity < table.num_embeddings:
            raise ConfigError(
                f"table {table.name!r} is {table.num_embeddings:,} x {table.embedding_dim}, but its tensor train is "
                f"{self.shape.capacity:,} x {self.shape.dim} ({self.shape.rows} x {self.shape.cols}). Give factors "
                "with at least the rows and just the columns, or leave shape out."
            )
        return self.shape


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """One embedding table and the features that address it.

    >>> table = stoker.TableConfig(name="user", num_embeddings=1_000_000, embedding_dim=16)
    >>> table.num_bytes
    64000000
    """

    name: str
    num_embeddings: int  # rows
    embedding_dim: int  # columns
    features: tuple[str, ...] = ()  # features that look rows up here; empty: one with the name of the table
    pooling: Literal["sum", "mean", "max"] = "sum"
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights; optimizer state is always float32
    init_scale: float | None = None  # rows start uniform in [-init_scale, init_scale); None means sqrt(1 / rows)
    padding_idx: int | None = None  # an id that counts as absent, as in nn.EmbeddingBag: not pooled, never updated
    grow: Grow | None = None  # ids are raw, any int64, and get rows in training; raw id 0 has row 0

    def __post_init__(self) -> None:
        check_types(self, f"table {self.name!r}")
        if not 1 <= min(sizes := (self.num_embeddings, self.embedding_dim)) <= max(sizes) < 2**63:
            raise ConfigError(
                f"table {self.name!r} has num_embeddings={self.num_embeddings} and embedding_dim={self.embedding_dim}; "
                "both must be at least 1, and less than 2**63."
            )
        check_not_negative(f"table {self.name!r}", init_scale=self.init_scale)
        if self.padding_idx is not None and not -self.num_embeddings <= self.padding_idx < self.num_embeddings:
            raise ConfigError(
                f"table {self.name!r}: padding_idx is {self.padding_idx}, but the table has {self.num_embeddings:,} "
                f"rows. Give an id from {-self.num_embeddings:,} to {self.num_embeddings - 1:,}."
            )
        object.__setattr__(self, "features", tuple(self.features) or (self.name,))
        if self.grow is not None:
            self._check_grow()

    def _check_grow(self) -> None:
        cannot = {
            f"num_embeddings={self.num_embeddings:,}: row 0 is for ids without a row, so give 2 to {2**31 - 1:,}":
                not 2 <= self.num_embeddings < 2**31,
            "padding_idx: leave these ids out of their bags": self.padding_idx is not None,
            "bfloat16, whose rounding depends on the row: take float32": self.dtype != "float32",
        }  # fmt: skip
        if found := [what for what, given in cannot.items() if given]:
            raise ConfigError(f"table {self.name!r} grows, which cannot be combined with {found[0]}.")

    @property
    def padding_row(self) -> int | None:
        """``padding_idx`` counted from 0."""
        return None if self.padding_idx is None else self.padding_idx % self.num_embeddings

    @property
    def scale(self) -> float:
        """Half-width of the initial uniform distribution (DLRM: sqrt(1 / num_embeddings))."""
        return math.sqrt(1.0 / self.num_embeddings) if self.init_scale is None else self.init_scale

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self.num_embeddings * self.embedding_dim * DTYPES[self.dtype].itemsize


def check_strategies(placement: Any) -> None:
    """Check a placement."""
    given = list(placement.values()) if isinstance(placement, Mapping) else [placement]
    if wrong := [each for each in given if each is not None and not isinstance(each, Strategy)]:
        raise ConfigError(
            f"placement holds {wrong[0]!r}, which is not a strategy. Give stoker.Device(), "
            "stoker.Cached(fraction=0.1), stoker.HotCold(...), stoker.HostPipelined(...) or stoker.TensorTrain(), "
            "for all tables or by name; stoker.plan(...) chooses.",
            settings=("placement",),
        )


@checked_arguments
def tables_for(spec: FeatureSpec, embedding_dim: int | Mapping[str, int], **options: Any) -> tuple[TableConfig, ...]:
    """Return one table for every vocabulary of a dataset.

    >>> spec = stoker.FeatureSpec.from_sizes(num_dense=0, num_embeddings=[100, 50])
    >>> [(table.name, table.num_embeddings) for table in stoker.tables_for(spec, 8)]
    [('C1', 100), ('C2', 50)]

    Args:
        spec: from ``Dataset.schema``.
        embedding_dim: columns of each table, or columns by table.
        options: further arguments of each config.
    """
    features: dict[str, list[str]] = {}
    for feature in spec.features:
        features.setdefault(feature.table, []).append(feature.name)
    return tuple(
        TableConfig(
            name=table,
            num_embeddings=spec.num_embeddings[table],
            embedding_dim=embedding_dim[table] if isinstance(embedding_dim, Mapping) else embedding_dim,
            features=tuple(names),
            grow=spec.grow.get(table),
            **options,
        )
        for table, names in features.items()
    )


def feature_order(tables: Sequence[TableConfig], features: Sequence[str] | None) -> tuple[str, ...]:
    """Return the order of features in a batch: as given, or table by table."""
    own = [feature for table in tables for feature in table.features]
    if len(set(own)) != len(own):
        twice = sorted({feature for feature in own if own.count(feature) > 1})
        raise ConfigError(f"features {twice} belong to two tables. Name each feature once.")
    if features is None:
        return tuple(own)
    if sorted(features) != sorted(own):
        raise ConfigError(
            f"features {sorted(set(own) ^ set(features))} are in the batch or in the tables, but not in both."
        )
    return tuple(features)


def strategies_of(names: Sequence[str], placement: Strategy | Mapping[str, Strategy] | None) -> list[Strategy]:
    """Return a strategy for each table."""
    check_strategies(placement)
    if placement is None or isinstance(placement, Strategy):
        found = [placement or Device()] * len(names)
    else:
        if unknown := sorted(set(placement) - set(names)):
            raise ConfigError(f"the placement names {unknown}, but the tables are {', '.join(names)}.")
        found = [placement.get(name, Device()) for name in names]
    for strategy in found:
        if isinstance(strategy, Slotted) and (unknown := sorted(set(strategy.hot_rows) - set(names))):
            raise ConfigError(
                f"{type(strategy).__name__} names hot rows of {unknown}, but the tables are {', '.join(names)}."
            )
    return found
