"""The order of hot and cold batches: the Shuffle Scheduler of FAE (VLDB 2022), section 4.3, Equation 5.

A state machine. Its inputs are the number of batches of each kind in an epoch, and the test loss at each swap; its
output is the next segment of batches. Every epoch begins with cold batches.

**Rates.** At R(r), r > 1, kinds alternate in segments of r % of their batches: after the j-th segment of a kind,
``ceil(j * r / 100 * batches)`` of its batches are done. So R(100) means all cold batches, then all hot ones, and both
kinds end in the same round. A segment has at least one batch of the rarer kind; if r % are less than that, the other
kind has the same number of segments. At R(1) kinds alternate batch by batch: one of the rarer kind, then some of the
other in proportion. A segment is then 1 % of the batches of both kinds, to measure the test loss less often than after
every batch. When the rate changes, the remaining batches of the epoch are split again.

**Swaps.** The test loss is due when a segment ends and batches of the other kind follow, also across epochs; at R(1)
after every segment. In the paper, Equation 5 has min and max swapped. Here:

* r <- max(r / 2, low) if the loss did not fall since the last swap; an equal loss has not fallen, as in the paper (>=);
* r <- min(2 r, high) if it fell in ``patience`` (the paper's u) consecutive swaps; counting then starts again;
* else r stays, as at the first swap, which has no loss to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from fractions import Fraction
from itertools import chain, repeat
from typing import Any, Literal

from stoker.base.errors import ConfigError

Kind = Literal["cold", "hot"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Batches between two measurements of the test loss: runs of (kind, batches), in order."""

    runs: tuple[tuple[Kind, int], ...]

    def __len__(self) -> int:
        return sum(batches for _, batches in self.runs)

    @property
    def kind(self) -> Literal["cold", "hot", "mixed"]:
        """The kind of its batches."""
        kinds = {kind for kind, _ in self.runs}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    def kinds(self) -> Iterator[Kind]:
        """Return the kind of each batch, in order."""
        return chain.from_iterable(repeat(kind, batches) for kind, batches in self.runs)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The rate that the scheduler chose by a test loss."""

    swap: int  # counted from 1
    after: Literal["cold", "hot", "mixed"]  # the segment that has ended
    loss: float
    rate_before: float
    rate_after: float
    why: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a loss that is not finite becomes None."""
        return asdict(self) | {"loss": self.loss if math.isfinite(self.loss) else None}


@dataclass
class _Count:
    """The batches of a kind in an epoch."""

    batches: int = 0  # in the epoch
    base: int = 0  # left at the last change of the rate, or at the start of the epoch
    given: int = 0  # put into segments since then
    parts: int = 0  # segments since then, or rounds at the lowest rate

    @property
    def left(self) -> int:
        return self.base - self.given

    def split(self, batches: int) -> None:
        """Start to split this number of batches."""
        self.base, self.given, self.parts = batches, 0, 0

    def take(self, share: Fraction) -> int:
        """Take batches until this share of the base is given; return their number."""
        batches = math.ceil(self.base * min(share, Fraction(1))) - self.given
        self.given += batches
        self.parts += 1
        return batches


class ShuffleScheduler:
    """Choose the next segments of hot and cold batches.

    Args:
        rate: R at the start, in percent.
        patience: number of consecutive swaps with a falling loss that doubles the rate.
        low: the smallest rate, at which kinds alternate batch by batch.
        high: the largest rate.

    Raises:
        ConfigError: an argument is out of range.

    >>> scheduler = ShuffleScheduler(rate=50)
    >>> scheduler.begin(cold=6, hot=4)
    >>> [scheduler.next_segment().runs for _ in range(4)]
    [(('cold', 3),), (('hot', 2),), (('cold', 3),), (('hot', 2),)]
    """

    def __init__(self, rate: float = 50, patience: int = 4, low: float = 1, high: float = 100) -> None:
        if not 0 < low <= rate <= high <= 100:
            raise ConfigError(
                f"rate is {rate:g}, low is {low:g} and high is {high:g}. Give 0 < low <= rate <= high <= 100."
            )
        if patience < 1:
            raise ConfigError(f"patience is {patience}. Give at least 1 swap.")
        self.patience, self.low, self.high = patience, float(low), float(high)
        self.rate = float(rate)
        self.epoch = -1  # of the segment
        self.segment: Segment | None = None  # the current one
        self.swaps = self.falls = 0  # losses so far; the last ones in a row that fell
        self.loss: float | None = None  # at the last swap
        self._counts: dict[Kind, _Count] = {"cold": _Count(), "hot": _Count()}
        self._turn: Kind = "cold"  # kind of the next segment

    def begin(self, cold: int, hot: int) -> None:
        """Set the batches of each kind in an epoch, which begins with the next segment.

        Raises:
            ConfigError: there are none.
        """
        if min(cold, hot) < 0 or cold + hot < 1:
            raise ConfigError(f"an epoch of {cold} cold and {hot} hot batches has nothing to schedule.")
        self._counts = {"cold": _Count(batches=cold), "hot": _Count(batches=hot)}

    @property
    def left(self) -> dict[Kind, int]:
        """Batches of the epoch that were in no segment yet."""
        return {kind: count.left for kind, count in self._counts.items()}

    @property
    def done(self) -> dict[Kind, int]:
        """Batches of the epoch in segments so far, with those of the current one."""
        return {kind: count.batches - count.left for kind, count in self._counts.items()}

    @property
    def due(self) -> bool:
        """True if :meth:`swap` must be called before the next segment."""
        return self.segment is not None and self.segment.kind != self._next_kind()  # no kind is "mixed"

    def _next_kind(self) -> Kind:
        left = self.left
        if not any(left.values()):
            return "cold" if self._counts["cold"].batches else "hot"
        return self._turn if left[self._turn] else _other(self._turn)

    def next_segment(self) -> Segment:
        """Return the next segment. After the last one of an epoch, the next epoch begins."""
        if not any(self.left.values()):
            self.epoch += 1
            self._turn = "cold"
            for count in self._counts.values():
                count.split(count.batches)
        rarer = min(self.left.values())
        if rarer and self.rate <= self.low:
            self.segment = Segment(runs=tuple(self._rounds()))
            return self.segment
        kind = self._next_kind()
        count = self._counts[kind]
        if rarer:
            share = max(Fraction(self.rate) / 100, Fraction(1, self._rounds_left))
            batches = count.take(share * (count.parts + 1))
        else:
            batches, count.given = count.left, count.base
        self._turn = _other(kind)
        self.segment = Segment(runs=((kind, batches),))
        return self.segment

    @property
    def _rounds_left(self) -> int:
        """Batches of the rarer kind at the last change of the rate, or at the start of the epoch."""
        return min(count.base for count in self._counts.values())

    def _rounds(self) -> Iterator[tuple[Kind, int]]:
        """Yield alternating batches, ``rate`` percent of the base."""
        rounds, first = self._rounds_left, self._counts[self._turn].parts
        for number in range(first, min(first + math.ceil(rounds * Fraction(self.rate) / 100), rounds)):
            for kind in (self._turn, _other(self._turn)):
                yield kind, self._counts[kind].take(Fraction(number + 1, rounds))

    def swap(self, loss: float) -> Decision:
        """Set the rate by the test loss after the last segment (Equation 5).

        A loss that is not finite has not fallen; the loss after it is not compared.
        """
        assert self.segment is not None
        before, last = self.rate, self.loss
        self.swaps += 1
        self.loss = loss if math.isfinite(loss) else None
        if last is None:
            why = "the first loss"
        elif not loss < last:
            self.rate, self.falls = max(before / 2, self.low), 0
            why = "the loss did not fall" + (", but the rate is the lowest" if self.rate == before else "")
        else:
            self.falls += 1
            why = f"the loss fell, {self.falls} of {self.patience} in a row"
            if self.falls == self.patience:
                self.rate, self.falls = min(2 * before, self.high), 0
                why += ", but the rate is the highest" if self.rate == before else ""
        if self.rate != before:
            for count in self._counts.values():
                count.split(count.left)
        return Decision(
            swap=self.swaps, after=self.segment.kind, loss=loss, rate_before=before, rate_after=self.rate, why=why
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "settings": [self.patience, self.low, self.high],
            "rate": self.rate,
            "epoch": self.epoch,
            "segment": None if self.segment is None else [list(run) for run in self.segment.runs],
            "swaps": self.swaps,
            "falls": self.falls,
            "loss": self.loss,
            "turn": self._turn,
            "counts": {kind: list(astuple(count)) for kind, count in self._counts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at ``state``."""
        self.patience, self.low, self.high = state["settings"]
        self.rate, self.epoch, self.swaps, self.falls = (state[name] for name in ("rate", "epoch", "swaps", "falls"))
        self.loss, self._turn = state["loss"], state["turn"]
        runs = state["segment"]
        self.segment = None if runs is None else Segment(runs=tuple((kind, batches) for kind, batches in runs))
        self._counts = {kind: _Count(*state["counts"][kind]) for kind in self._counts}


def _other(kind: Kind) -> Kind:
    return "hot" if kind == "cold" else "cold"
