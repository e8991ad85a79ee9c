"""The memory for rows of tables, and how rows move if it does not hold all of them.

The help of the command line reads this, so none of it needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from stoker.base.checks import checked
from stoker.base.errors import ConfigError
from stoker.base.files import url_of
from stoker.base.settings import Settings, Useless, setting
from stoker.base.units import parse_count, parse_share, parse_size
from stoker.optim import ROW_OPTIMIZERS

LOOKAHEAD = 64  # batches whose ids are known where too few come for it to adapt
Choice = Literal["auto", "cached", "hot-cold", "host-pipelined", "mapped"]

_SLOTS = "Fast memory (one of three)"


@dataclass(frozen=True, kw_only=True)
class MemoryBudget(Settings, panel="Memory"):
    """The memory for rows. It changes no number that a model computes.

    >>> MemoryBudget(device_memory="4GiB", in_flight=3).strategy
    'auto'
    """

    device_memory: str | int | None = setting(
        None,
        "Memory for rows and their optimizer state, such as 4GiB. Other rows are in main memory or a file.",
        unset="all",
        parse=parse_size,
        least=1,
    )
    host_memory: str | int | None = setting(
        None,
        "Main memory for rows that do not fit on the device. If it does not hold all, it is a cache of them.",
        unset="80% of what is available",
        parse=parse_size,
    )
    home_path: str | os.PathLike[str] | None = setting(
        None,
        "Directory of a file, or URL such as s3://bucket/folder, for the rows that host memory does not hold. "
        "Checkpoints do not need it.",
        unset="the temporary directory",
        options=("--home", "--home-path"),
    )
    strategy: Choice = setting(
        "auto",
        "Strategy of tables that do not fit. auto takes the quickest one, and maps a file that free memory holds.",
    )
    lookahead: int | None = setting(
        None, "Batches whose ids are read ahead, beyond those in flight.", unset="adapts", least=0
    )
    epoch_lookahead: bool = setting(
        False, "Read the ids of an epoch first. Every next use is then known, and the fewest rows move."
    )
    in_flight: int | None = setting(
        None, "Batches whose rows are on the device at a time, if they fit.", unset="adapts", least=1
    )
    spill: Literal["parts", "refuse"] = setting(
        "parts", "Batches with more rows than slots. parts trains them in chunks, with the same numbers."
    )

    def __post_init__(self) -> None:
        if self.device_memory == "all":
            self._set("device_memory", None)
        if self.home_path is not None:
            self._set("home_path", url_of(self.home_path) or checked("home_path", self.home_path, str))
        super().__post_init__()

    @property
    def some_lookahead(self) -> int:
        """``lookahead``, or that of a few batches."""
        return LOOKAHEAD if self.lookahead is None else self.lookahead

    def useless(self) -> Useless:
        yield from super().useless()
        if self.device_memory is None:
            names = ("host_memory", "home_path", "strategy", "lookahead", "epoch_lookahead", "in_flight", "spill")
            yield names, "without device_memory all rows are on the device"


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Settings, panel="Batches"):
    """The fast memory and the batches that :func:`stoker.replay` replays."""

    #: names of before
    FORMER: ClassVar[Mapping[str, str]] = {"dim": "embedding_dim", "optimizer": "row_optimizer"}

    slots: int | str | None = setting(
        None, "Slots, such as 50k. Each holds one row.", parse=parse_count, least=1, panel=_SLOTS
    )
    fraction: float | str | None = setting(
        None, "Slots as a share of all rows, 0.1 or 10%.", unset="10%", parse=parse_share, panel=_SLOTS
    )
    device_memory: int | str | None = setting(
        None, "Memory for rows and their optimizer state, such as 1GiB.", parse=parse_size, least=1, panel=_SLOTS
    )
    pinned: float | str = setting(
        0.9, "Slots that the strategy pinned pins, as a share, 0.9 or 90%.", parse=parse_share, panel=_SLOTS
    )
    window: int | str | None = setting(
        None, "Memory for the known batches of adaptive and pinned.", unset="a 64th of main memory", parse=parse_size
    )
    in_flight: int = setting(1, "Batches in flight, whose rows may not be evicted.", least=1)
    batch_size: int = setting(2048, "Examples per batch.")
    steps: int | None = setting(None, "Batches to replay.", unset="one epoch", least=1)
    seed: int | None = setting(0, "Seed of the shuffled order.")
    embedding_dim: int = setting(
        16, "Columns of every table.", least=1, options=("--embedding-dim", "--dim"), panel="Rows"
    )
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Type of the table weights.", panel="Rows")
    row_optimizer: str = setting(
        "rowwise_adagrad", "Row optimizer, whose state needs memory too.", choices=lambda: ROW_OPTIMIZERS, panel="Rows",
        options=("--row-optimizer", "--optimizer"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(value is not None for value in (self.slots, self.fraction, self.device_memory)) > 1:
            raise ConfigError(
                "slots, fraction and device_memory each size the fast memory. Give one of them.",
                settings=("slots", "fraction"),
            )
