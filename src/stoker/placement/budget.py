"""The memory for rows of tables, and how rows move if it does not hold all of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from stoker.base.settings import Settings, Useless, setting

Choice = Literal["auto", "cached", "hot-cold", "host-pipelined"]


@dataclass(frozen=True, kw_only=True)
class MemoryBudget(Settings, panel="Memory"):
    """The memory for rows. It changes no number that a model computes.

    >>> MemoryBudget(device_memory="4GiB", in_flight=3).lookahead
    64
    """

    device_memory: str | int | None = setting(
        None,
        "Memory for rows and their optimizer state, such as 4GiB. Other rows are in main memory.",
        unset="all",
        size=True,
    )
    host_memory: str | int | None = setting(
        None,
        "Main memory for rows that do not fit on the device. Other rows are in a file.",
        unset="80% of what is available",
        size=True,
    )
    home_path: str | os.PathLike[str] | None = setting(
        None, "Directory of that file.", unset="the temporary directory", options=("--home",)
    )
    strategy: Choice = setting(
        "auto", "Strategy of tables that do not fit. auto takes the one that moves the fewest bytes."
    )
    lookahead: int = setting(64, "Batches whose ids are read ahead, beyond those in flight.", least=0)
    foresight: bool = setting(
        False, "Read the ids of an epoch first. Every next use is then known, and the fewest rows move."
    )
    in_flight: int | None = setting(
        None, "Batches whose rows are on the device at a time, if they fit.", unset="adapts", least=1
    )
    spill: Literal["parts", "refuse"] = setting(
        "parts", "Train batches with more rows than fit in parts, or refuse them."
    )

    def __post_init__(self) -> None:
        if self.device_memory == "all":
            self._set("device_memory", None)
        if self.home_path is not None:
            self._set("home_path", os.fspath(self.home_path))
        super().__post_init__()

    def useless(self) -> Useless:
        yield from super().useless()
        if self.device_memory is None:
            names = ("host_memory", "home_path", "strategy", "lookahead", "foresight", "in_flight", "spill")
            yield names, "without a limit on device memory all rows are on the device"
