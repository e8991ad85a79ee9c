"""The arguments of :class:`stoker.EmbeddingTables`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from stoker.ops import BackendName
from stoker.optim import RowOptimizer
from stoker.tables.config import Strategy, TableConfig
from stoker.tables.ranks.transport import Ranks


@dataclass(frozen=True)
class TablesArguments:
    """The arguments of :class:`EmbeddingTables`."""

    tables: Sequence[TableConfig]
    _: KW_ONLY
    optimizer: RowOptimizer
    features: Sequence[str] | None = None
    seed: int = 0
    device: torch.device | str = "cpu"
    backend: BackendName = "auto"
    include_last_offset: bool = True
    placement: Strategy | Mapping[str, Strategy] | None = None
    steps: Mapping[str, int] | None = None
    shards: int = 1
    ranks: Ranks | None = None
