"""Embedding tables: what they are, where their rows lie, and how a model uses them."""

from __future__ import annotations

from stoker.tables.config import Cached, Device, HostPipelined, Strategy, TableConfig, tables_for
from stoker.tables.embedding import EmbeddingTables
from stoker.tables.stage import Stage, stage

__all__ = [
    "Cached",
    "Device",
    "EmbeddingTables",
    "HostPipelined",
    "Stage",
    "Strategy",
    "TableConfig",
    "stage",
    "tables_for",
]
