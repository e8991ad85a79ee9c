"""The columns of a dataset that a model needs: dense columns, features and the sizes of their tables.

This is the fitted part of a schema. It needs no dataframe library, so training runs with torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from stoker.base.checks import check_types
from stoker.base.errors import ConfigError, DataError, SchemaError
from stoker.base.settings import checked_arguments
from stoker.base.units import plural


@dataclass(frozen=True, kw_only=True)
class Grow:
    """How a table gives rows to raw ids while it trains (docs/dynamic_ids.md).

    >>> stoker.TableConfig(name="item", num_embeddings=1000, embedding_dim=8, grow=stoker.Grow(admit=2)).grow.admit
    2

    Raises:
        ConfigError: a number is out of its range, or the policy is unknown.
    """

    admit: int = 1  # lookups in training at which a raw id gets its row
    ttl: int | None = None  # a raw id is forgotten when it was not used for more than this: steps, or units of time
    evict: Literal["lru", "lfu"] | None = "lru"  # whose row a new raw id gets if none is free; None: nobody's
    candidates: int | None = None  # raw ids that may wait for admission at a time; None: as many as rows

    def __post_init__(self) -> None:
        check_types(self, "Grow")
        for name, least in (("admit", 1), ("ttl", 0), ("candidates", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"Grow: {name} is {value}; it must be at least {least}.")


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One categorical or sequence column and the table of its ids.

    >>> stoker.Feature(name="past_items", table="items", sequence=True, max_length=20)
    Feature(name='past_items', table='items', sequence=True, max_length=20)
    """

    name: str
    table: str  # several features may share one table
    sequence: bool = False  # a bag of 0..max_length ids instead of exactly one
    max_length: int = 1  # most ids in a bag

    def __post_init__(self) -> None:
        check_types(self, "Feature")
        if self.max_length < 0:
            raise ConfigError(f"feature {self.name!r}: max_length is {self.max_length}; it must not be negative.")


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Dense columns, features in batch order, and ``num_embeddings`` of every table.

    Id 0 of every table is the out-of-vocabulary row. The others follow by falling training frequency; in a reordered
    dataset by tiers of it.

    >>> spec = stoker.FeatureSpec.from_sizes(num_dense=1, num_embeddings=[100, 50])
    >>> spec
    FeatureSpec(1 dense column, 2 features, 2 tables with 150 rows)
    >>> spec.num_embeddings
    {'C1': 100, 'C2': 50}
    """

    dense: tuple[str, ...]
    features: tuple[Feature, ...]
    num_embeddings: Mapping[str, int]  # table name -> rows, row 0 included
    grow: Mapping[str, Grow] = field(default_factory=dict)  # tables whose ids are raw

    def __post_init__(self) -> None:
        check_types(self, "FeatureSpec")
        names = [*self.dense, *(feature.name for feature in self.features)]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise SchemaError(f"columns {twice} are named twice. Give every column its own name.")
        missing = {feature.table for feature in self.features} - set(self.num_embeddings)
        if missing:
            raise SchemaError(f"features address the tables {sorted(missing)}, which have no num_embeddings.")
        if unknown := sorted(set(self.grow) - set(self.num_embeddings)):
            raise SchemaError(f"tables {unknown} are to grow, but have no num_embeddings.")

    def __repr__(self) -> str:
        counts = plural(len(self.dense), "dense column"), plural(len(self.features), "feature")
        tables = plural(len(self.num_embeddings), "table")
        return f"FeatureSpec({', '.join(counts)}, {tables} with {sum(self.num_embeddings.values()):,} rows)"

    def check_ids(self, what: str) -> None:
        """Raise DataError if ids of a table are raw, which ``what`` cannot work with."""
        if self.grow:
            raise DataError(
                f"tables {', '.join(list(self.grow)[:3])} grow: their ids are raw and get rows in training, so {what}. "
                "Prepare the log without oov = 'grow'."
            )

    @property
    def one_hot(self) -> bool:
        """Whether every bag has exactly one id, so that batches need no offsets."""
        return not any(feature.sequence for feature in self.features)

    def index(self, name: str) -> int:
        """Return the place of a feature in every batch.

        Raises:
            SchemaError: there is no such feature.
        """
        for place, feature in enumerate(self.features):
            if feature.name == name:
                return place
        raise SchemaError(f"there is no feature {name!r}; there are {', '.join(f.name for f in self.features)}.")

    @classmethod
    @checked_arguments
    def from_sizes(cls, num_dense: int, num_embeddings: Sequence[int]) -> FeatureSpec:
        """Return dense columns ``I1..`` and one-hot features ``C1..`` with a table each, as in the Criteo logs."""
        names = [f"C{i + 1}" for i in range(len(num_embeddings))]
        return cls(
            dense=tuple(f"I{i + 1}" for i in range(num_dense)),
            features=tuple(Feature(name=name, table=name) for name in names),
            num_embeddings=dict(zip(names, num_embeddings, strict=True)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = asdict(self)
        return values if self.grow else {name: value for name, value in values.items() if name != "grow"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FeatureSpec:
        """Build the spec from :meth:`to_dict`'s values."""
        return cls(
            dense=tuple(values["dense"]),
            features=tuple(Feature(**feature) for feature in values["features"]),
            num_embeddings={str(table): int(rows) for table, rows in values["num_embeddings"].items()},
            grow={str(table): Grow(**settings) for table, settings in values.get("grow", {}).items()},
        )
