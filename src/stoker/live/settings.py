"""The settings of an update. The help of the command line reads them, so none of this needs torch."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.settings import Settings, like, setting
from stoker.prep.settings import PrepareSettings

POLL = 10.0  # seconds between two checks for new logs


@dataclass(frozen=True, kw_only=True)
class UpdateSettings(Settings, panel="Update"):
    """How new rows are trained on; :func:`stoker.update` describes the rest."""

    rate: float = setting(1.0, "Factor on the learning rates of the run, which are then constant.", least=0)
    batch_size: int | None = setting(None, "Examples per batch.", unset="that of the run", least=1)
    save_every: int | None = setting(
        None, "Steps between segments within an update, from which a killed one continues.", least=1,
        unset="one segment, at the end",
    )  # fmt: skip
    keep_ids: bool = setting(
        False, "Give no rows to new ids. They share row 0, as in training.", options=("--keep-ids",)
    )
    held_out: bool = setting(
        False, "Take logs of the dataset of the run, too: of its rows for validation and test.", options=("--held-out",)
    )
    max_bad: str | float | None = like(PrepareSettings, "max_bad")
