"""Predict what hot and cold batches gain over shuffled ones, before a dataset is classified.

Both orders pin the same hot rows (``HotCold``), and look up the same cold rows. Hot batches move nothing. Cold batches
are fewer, with more cold rows in each, so a cold row is less often in two batches. That is all that the order saves.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stoker.base.device import resolve_device
from stoker.base.units import format_size
from stoker.dataset.dataset import Dataset
from stoker.placement.expected import expect, phases, split_hot, uses_of
from stoker.rewrite.hot_profile import HotProfile
from stoker.training.defaults import batch_for
from stoker.training.scheduled import TRAINED_PER_TESTED

_NOTHING = 1 / TRAINED_PER_TESTED  # share of the bytes; the test losses of the schedule take up to this share of time


@dataclass(frozen=True, kw_only=True)
class HotGain:
    """The expected bytes of cold rows that move in an epoch, both ways, with both orders of batches."""

    batch_size: int
    steps: int  # of an epoch
    shuffled: int  # bytes of an epoch
    hot_cold: int
    device: str  # type of the device of the slots

    @property
    def saved(self) -> float:
        """The share of the bytes that hot and cold batches save."""
        return 1 - self.hot_cold / self.shuffled if self.shuffled else 0.0

    def lines(self) -> list[str]:
        """Say what to expect, in lines of at most 80 columns."""
        shuffled, apart = format_size(self.shuffled), format_size(self.hot_cold)
        said = [
            f"expected in an epoch of {self.steps:,} batches of {self.batch_size:,}, with these rows pinned:",
            f"shuffled batches move {shuffled}, hot and cold ones {apart} ({self.saved:.1%} less)",
        ]
        if self.saved <= _NOTHING:
            return [*said, "hot and cold batches will gain nothing: shuffled ones do as well"]
        if self.device == "cpu":
            return [*said, "rows move within main memory here, so this will hardly gain time"]
        return [*said, "this will gain time if training waits for rows"]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"saved": self.saved}


def predict_gain(data: Dataset, found: HotProfile, batch_size: int | None = None, device: str | None = None) -> HotGain:
    """Predict the bytes that move in an epoch with both orders of batches, from the counts of the training rows.

    Args:
        data: the dataset of the profile.
        found: its hot rows, and the share of the inputs that need no others.
        batch_size: examples; None takes the default of a run.
        device: of the slots; None takes the first GPU, else the CPU.
    """
    examples, kind = max(1, len(data.train)), resolve_device(device).type
    size = batch_size or batch_for(examples)
    in_flight = 2 if kind == "cuda" else 1
    moved = [0.0, 0.0]  # shuffled, hot and cold
    for table in found.tables:
        uses = uses_of(table.rows, data.counts[table.name].numpy(), size * table.accesses / examples)
        orders = (
            (uses, examples),
            (phases(uses, table.hot_rows, found.input_share)[1], examples * (1 - found.input_share)),
        )
        for place, (order, rows) in enumerate(orders):
            cold = [split_hot(order, table.hot_rows)[1]]
            traffic = expect(cold, table.rows, lookahead=0, in_flight=in_flight, transient=True)
            moved[place] += (traffic.fetched + traffic.written) * table.row_bytes * rows / size
    return HotGain(
        batch_size=size, steps=-(-examples // size), shuffled=round(moved[0]), hot_cold=round(moved[1]), device=kind
    )
