"""How unequal ids are: the share of all occurrences that falls on the most frequent ones.

A curve is the cumulative share by rank at a few dozen ranks. It comes from Zipf's law or from counts of a
real column; it holds aggregate numbers only, so a curve can be published where the data it was measured on
cannot.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.base.errors import ConfigError, DataError

__all__ = ["Curve", "Sampler", "measure_curve", "zipf"]

_EXACT_HEAD = 4096  # ranks summed one by one; beyond, the sum over a stretch is its Euler-Maclaurin integral


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Cumulative share of occurrences at some ranks; between two of them shares fall like 1 / rank."""

    name: str
    num_ids: int  # distinct ids the curve speaks of
    ranks: tuple[int, ...]  # rising, 1-based, the last is num_ids
    shares: tuple[float, ...]  # cumulative share of the ids up to that rank, the last is 1
    occurrences: int = 0  # how many were counted; 0 for a formula

    def __post_init__(self) -> None:
        ranks, shares = np.array(self.ranks), np.array(self.shares)
        fits = len(ranks) == len(shares) > 0 and ranks[0] >= 1 and ranks[-1] == self.num_ids
        if not fits or np.any(np.diff(ranks) <= 0) or np.any(np.diff(shares) < 0) or abs(shares[-1] - 1) > 1e-9:
            raise ConfigError(
                f"curve {self.name!r} is not a cumulative share by rank: {len(ranks)} ranks must rise "
                f"to num_ids={self.num_ids:,}, with as many shares rising to 1. Use measure_curve()."
            )

    def share_of_top(self, num_ids: int) -> float:
        """Share of all occurrences on the ``num_ids`` most frequent ids."""
        return float(self.cumulative(np.array([float(num_ids)]))[0])

    def cumulative(self, ranks: NDArray[np.floating]) -> NDArray[np.float64]:
        """Cumulative share at (fractional, 1-based) ranks; linear in rank below 1 and in log rank above."""
        known = np.array(self.ranks, dtype=np.float64)
        at = np.interp(np.log(np.maximum(ranks, 1.0)), np.log(known), np.array(self.shares))
        return np.asarray(at * np.minimum(ranks, 1.0), dtype=np.float64)

    def stretched(self, num_ids: int) -> Curve:
        """The same inequality over another number of ids: the top x % keep their share of occurrences."""
        if num_ids == self.num_ids:
            return self
        ranks = _knots(num_ids)
        shares = self.cumulative(ranks * (self.num_ids / num_ids))
        shares[-1] = 1.0
        return Curve(name=self.name, num_ids=num_ids, ranks=tuple(ranks.tolist()), shares=tuple(shares.tolist()))

    def save(self, path: str | Path) -> None:
        """Write the curve as JSON."""
        fields = {"name": self.name, "num_ids": self.num_ids, "occurrences": self.occurrences}
        fields |= {"ranks": list(self.ranks), "shares": [round(share, 7) for share in self.shares]}
        Path(path).write_text(json.dumps(fields) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, name: str | Path) -> Curve:
        """A curve file by path, or one of the package's own: ``globo-articles``, ``book-crossing-books``."""
        own = resources.files("stoker.synthetic") / "curves"
        source = own / f"{name}.json"
        if not source.is_file():
            source = Path(name)
        if not source.is_file():
            names = ", ".join(sorted(entry.name.removesuffix(".json") for entry in own.iterdir()))
            raise ConfigError(f"no frequency curve {str(name)!r}: neither a file nor one of {names}.")
        try:
            fields: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
            return cls(
                name=str(fields["name"]), num_ids=int(fields["num_ids"]), occurrences=int(fields.get("occurrences", 0)),
                ranks=tuple(map(int, fields["ranks"])), shares=tuple(map(float, fields["shares"])),
            )  # fmt: skip
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise DataError(f"{source} is no frequency curve ({error!r}). Write one with Curve.save().") from error


def zipf(alpha: float, num_ids: int) -> Curve:
    """Zipf's law: the share of rank r is proportional to ``r ** -alpha``. ``alpha`` 0 makes all ids equal."""
    if num_ids < 1 or not 0 <= alpha <= 10:
        raise ConfigError(f"Zipf's law needs num_ids >= 1 and alpha in 0..10, not {num_ids:,} and {alpha}.")
    ranks = _knots(num_ids)
    head = np.cumsum(np.arange(1, min(num_ids, _EXACT_HEAD) + 1, dtype=np.float64) ** -alpha)
    mass = head[np.minimum(ranks, len(head)) - 1]
    beyond = ranks > len(head)
    if beyond.any():
        low, high = len(head) + 0.5, ranks[beyond] + 0.5
        if abs(alpha - 1) < 1e-9:
            mass[beyond] += np.log(high / low)
        else:
            mass[beyond] += (high ** (1 - alpha) - low ** (1 - alpha)) / (1 - alpha)
    shares = mass / mass[-1]
    return Curve(name=f"zipf-{alpha:g}", num_ids=num_ids, ranks=tuple(ranks.tolist()), shares=tuple(shares.tolist()))


def measure_curve(counts: Iterable[int] | NDArray, *, name: str = "measured") -> Curve:
    """The curve of a column, from how often each of its values occurs.

    Takes any array or tensor of counts in any order (``dataset.counts["item"]`` for one); zeros are left
    out. Keeps every rank up to 16 and then one in every quarter more: some fifty numbers for 50,000 ids.
    """
    ordered = np.sort(np.asarray(counts, dtype=np.int64).ravel())[::-1]
    ordered = ordered[ordered > 0]
    if len(ordered) == 0:
        raise DataError(f"no counts above 0 to measure the curve {name!r} from.")
    cumulative = np.cumsum(ordered)
    ranks = _knots(len(ordered), ratio=1.25, exact=16)
    shares = cumulative[ranks - 1] / cumulative[-1]
    return Curve(
        name=name, num_ids=len(ordered), occurrences=int(cumulative[-1]), ranks=tuple(ranks.tolist()),
        shares=tuple(shares.tolist()),
    )  # fmt: skip


class Sampler:
    """Ranks drawn from a curve: uniform numbers in, 0-based ranks out, by a search in under 1,000 knots."""

    def __init__(self, curve: Curve) -> None:
        fine = _knots(curve.num_ids)
        self.num_ids = curve.num_ids
        self._low = np.append(0, fine).astype(np.float64)  # segment i is the ranks low[i]..low[i + 1] - 1
        self._cumulative = np.append(0.0, curve.cumulative(fine.astype(np.float64)))
        widths = np.diff(self._cumulative)
        # Ranks of an empty segment are never drawn: the search cannot end there.
        self._slope = np.diff(self._low) / np.where(widths > 0, widths, 1.0)

    def __call__(self, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
        """0-based ranks for numbers in [0, 1), [n]."""
        segment = np.searchsorted(self._cumulative, uniforms, side="right") - 1
        np.minimum(segment, len(self._slope) - 1, out=segment)
        rank = uniforms - self._cumulative[segment]
        rank *= self._slope[segment]
        rank += self._low[segment]
        ranks: NDArray[np.int64] = rank.astype(np.int64)
        np.minimum(ranks, self.num_ids - 1, out=ranks)
        return ranks

    def share(self, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        """The probability of each 0-based rank, [n]."""
        segment = np.minimum(np.searchsorted(self._low, ranks, side="right"), len(self._slope)) - 1
        return np.asarray((np.diff(self._cumulative) / np.diff(self._low))[segment])


def _knots(num_ids: int, *, ratio: float = 1.02, exact: int = 256) -> NDArray[np.int64]:
    """Every rank up to ``exact``, then ranks that grow by ``ratio``, the last one ``num_ids``."""
    steps = max(0, int(np.ceil(np.log(max(num_ids / exact, 1.0)) / np.log(ratio))))
    tail = exact * ratio ** np.arange(1, steps + 1)
    ranks = np.concatenate([np.arange(1, exact + 1), tail.astype(np.int64), [num_ids]])
    return np.unique(np.minimum(ranks, num_ids))
