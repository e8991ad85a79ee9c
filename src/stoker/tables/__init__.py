"""Embedding tables: their configuration, the place of their rows, and their use in a model."""

from __future__ import annotations

from stoker.tables.compressed.tt_bag import TTEmbeddingBag
from stoker.tables.config import (
    Cached,
    Device,
    HostPipelined,
    HotCold,
    Mapped,
    Strategy,
    TableConfig,
    TensorTrain,
    tables_for,
)
from stoker.tables.embedding import EmbeddingTables
from stoker.tables.ranks.heartbeat import RanksError
from stoker.tables.ranks.replicas import Replicas
from stoker.tables.ranks.transport import Ranks
from stoker.tables.stage import Stage, stage
from stoker.tables.stores.registry import register_store

__all__ = [
    "Cached", "Device", "EmbeddingTables", "HostPipelined", "HotCold", "Mapped", "Ranks", "RanksError", "Replicas",
    "Stage", "Strategy", "TTEmbeddingBag", "TableConfig", "TensorTrain", "register_store", "stage", "tables_for",
]  # fmt: skip
