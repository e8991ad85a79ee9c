"""The arguments of :class:`stoker.EmbeddingTables`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from stoker.base.checks import check_types
from stoker.base.errors import ConfigError
from stoker.ops import BackendName
from stoker.optim import RowOptimizer
from stoker.tables.config import Strategy, TableConfig, TensorTrain, strategies_of
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

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, RowOptimizer):
            raise ConfigError(
                f"optimizer is {self.optimizer!r}; rows need one of their own, such as stoker.SGD(lr=0.1), "
                "stoker.RowWiseAdagrad(lr=0.05) or stoker.Adam(lr=0.001).",
                settings=("optimizer",),
            )
        check_types(self, "EmbeddingTables")

    def check_divided(self) -> None:
        """Check what tables divided among ranks do not do yet."""
        assert self.ranks is not None
        average = self.ranks.average_every is not None
        at = strategies_of([each.name for each in self.tables], self.placement)
        cannot = {
            "one shard: give shards=8, or another power of two": self.shards == 1,
            "the means of Replicas: give stoker.distributed.Ranks()": self.ranks.means,
            f"the device {self.device}: take the CPU": torch.device(self.device).type != "cpu",
            "copies that are averaged and tables that grow": average and any(each.grow for each in self.tables),
            "copies that are averaged and tensor trains": average and any(isinstance(each, TensorTrain) for each in at),
        }  # fmt: skip
        if found := [what for what, asked in cannot.items() if asked]:
            raise ConfigError(f"tables with ranks= divide their rows, which does not work yet with {found[0]}.")

    def check_growing(self) -> None:
        """Check what tables that grow do not do."""
        names = [table.name for table in self.tables if table.grow is not None]
        cannot = {
            f"{type(self.optimizer).__name__}, whose steps depend on all rows of a table: take another row optimizer":
                self.optimizer.rule(0).definition.scope == "table",
        }  # fmt: skip
        if names and (found := [what for what, asked in cannot.items() if asked]):
            raise ConfigError(f"tables that grow ({', '.join(names[:3])}) cannot be combined with {found[0]}.")
