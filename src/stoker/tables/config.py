"""What a table is, and where it may lie. Values only: nothing here holds memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from stoker.data.features import FeatureSpec
from stoker.errors import ConfigError

__all__ = ["Device", "Strategy", "TableConfig", "tables_for"]

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Where the rows of a table lie while it trains. Placement is not a model change."""


@dataclass(frozen=True, kw_only=True)
class Device(Strategy):
    """All rows on the device: as many slots as rows, and nobody leaves."""


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """One embedding table and the features that address it."""

    name: str
    num_embeddings: int  # rows
    embedding_dim: int  # columns
    features: tuple[str, ...] = ()  # features that look rows up here; empty means one feature named like the table
    pooling: Literal["sum", "mean"] = "sum"
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights; optimizer state is always float32
    init_scale: float | None = None  # rows start uniform in [-init_scale, init_scale); None means sqrt(1 / rows)

    def __post_init__(self) -> None:
        if self.num_embeddings < 1 or self.embedding_dim < 1:
            raise ConfigError(
                f"table {self.name!r} has num_embeddings={self.num_embeddings} and embedding_dim={self.embedding_dim}; "
                "both must be at least 1."
            )
        if self.pooling not in ("sum", "mean"):
            raise ConfigError(f"table {self.name!r}: pooling {self.pooling!r} is unknown. Choose 'sum' or 'mean'.")
        if self.dtype not in DTYPES:
            raise ConfigError(f"table {self.name!r}: dtype {self.dtype!r} is unknown. Choose one of {sorted(DTYPES)}.")
        if not self.features:
            object.__setattr__(self, "features", (self.name,))

    @property
    def scale(self) -> float:
        """Half-width of the initial uniform distribution (DLRM: sqrt(1 / num_embeddings))."""
        return math.sqrt(1.0 / self.num_embeddings) if self.init_scale is None else self.init_scale

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self.num_embeddings * self.embedding_dim * DTYPES[self.dtype].itemsize


def tables_for(spec: FeatureSpec, embedding_dim: int, **options: Any) -> tuple[TableConfig, ...]:
    """One table of ``embedding_dim`` columns for every vocabulary of a dataset; ``options`` go to each config."""
    features: dict[str, list[str]] = {}
    for feature in spec.features:
        features.setdefault(feature.table, []).append(feature.name)
    return tuple(
        TableConfig(
            name=table,
            num_embeddings=spec.num_embeddings[table],
            embedding_dim=embedding_dim,
            features=tuple(names),
            **options,
        )
        for table, names in features.items()
    )


def feature_order(tables: Sequence[TableConfig], features: Sequence[str] | None) -> tuple[str, ...]:
    """The order of features in a batch: as given, or table by table."""
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
