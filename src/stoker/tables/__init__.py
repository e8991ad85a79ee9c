"""Embedding tables: what they are, where their rows lie, and how a model uses them."""

from __future__ import annotations

from stoker.tables.config import Device, Strategy, TableConfig, tables_for
from stoker.tables.embedding import EmbeddingTables

__all__ = ["Device", "EmbeddingTables", "Strategy", "TableConfig", "tables_for"]
