"""Rows with a planted click probability: ids by a frequency curve, counts, and a logit made of both.

The logit of a row is a bias, a hidden weight per id and column, a slope per number, and products of hidden
factors for a few pairs of columns. Weights and factors are hashes of the ids, so no table of them is kept.
Bias and scale are set on the first 65,536 rows such that the label has the asked base rate and the logit the
asked spread.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.base import draw
from stoker.base.errors import ConfigError
from stoker.synthetic.curve import Curve, Sampler, zipf

__all__ = ["ClickBlock", "ClickLog", "IdColumn", "NumberColumn", "check_settings", "make_sampler"]

_SAMPLE = 65_536  # rows that bias and scale are set on
_PAIR_IDS = 200_000  # columns with more ids enter no pair: their pairs would occur once each


@dataclass(frozen=True, kw_only=True)
class IdColumn:
    """A categorical column of ``num_ids`` ids."""

    name: str
    num_ids: int
    missing: float = 0.0  # share of empty fields
    of: str | None = None  # a fixed function of this other column's id (age of user), instead of drawn


@dataclass(frozen=True, kw_only=True)
class NumberColumn:
    """A column of counts with a heavy tail, some of them empty or negative."""

    name: str
    largest: int = 20_000
    missing: float = 0.0
    negative: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ClickBlock:
    """Rows ``start..start + n - 1`` of a log."""

    start: int
    ids: list[NDArray[np.int64]]  # per id column [n], -1 where missing
    numbers: list[NDArray[np.int64]]  # per number column [n]
    number_missing: list[NDArray[np.bool_]]  # [n] each
    logits: NDArray[np.float32]  # [n] the true logit
    labels: NDArray[np.bool_]  # [n]


def make_sampler(num_ids: int, alpha: float, curve: Curve | None) -> Sampler:
    """Draws from ``curve`` stretched over ``num_ids``, or from Zipf's law where there is none."""
    return Sampler(curve.stretched(num_ids) if curve is not None else zipf(alpha, num_ids))


def check_settings(
    *,
    seed: int,
    universe: int | None = None,
    alpha: float,
    drift: float,
    base_rate: float | None,
    signal: float,
    scale: float = 1.0,
) -> None:
    """Refuse settings out of their range with a :class:`ConfigError`."""
    _within("alpha", alpha, 0, 10)
    _within("drift", drift, 0, 1)
    _within("signal", signal, 0, 5)
    if seed < 0:
        raise ConfigError(f"seed {seed} is negative. Give 0 or more.", settings=("seed",))
    if universe is not None and universe < 0:
        raise ConfigError(f"universe {universe} is negative. Give 0 or more.", settings=("universe",))
    if not 0 < scale <= 100:
        raise ConfigError(f"scale {scale:g} must be above 0 and at most 100.", settings=("scale",))
    if base_rate is not None and not 0 < base_rate < 1:
        raise ConfigError(f"base_rate {base_rate:g} must lie between 0 and 1, without either.")


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} {value:g} lies outside {least:g} to {most:g}.", settings=(name,))


class ClickLog:
    """A log that can be read at any row. Equal arguments give equal rows, in pieces of any size.

    Args:
        rows: length of the log; it fixes how fast ``drift`` goes, nothing else.
        universe: seed of the hidden weights and of what belongs to an id; None takes ``seed``.
        signal: standard deviation of the true logit; 0 plants nothing (best AUC 0.5).
        drift: share of the ranks whose id has been replaced by another one at the end of the log, 0 to 1.
        interactions: how many pairs of columns interact.
    """

    def __init__(
        self,
        ids: Sequence[IdColumn],
        numbers: Sequence[NumberColumn] = (),
        *,
        rows: int,
        seed: int = 0,
        universe: int | None = None,
        alpha: float = 1.05,
        curve: Curve | None = None,
        drift: float = 0.0,
        base_rate: float = 0.25,
        signal: float = 1.3,
        interactions: int = 3,
    ) -> None:
        check_settings(seed=seed, universe=universe, alpha=alpha, drift=drift, base_rate=base_rate, signal=signal)
        self.ids, self.numbers, self.rows, self.seed = tuple(ids), tuple(numbers), rows, seed
        self.universe = seed if universe is None else universe
        self.drift, self.base_rate, self.signal = drift, base_rate, signal
        self._position = {column.name: at for at, column in enumerate(self.ids)}
        sizes = {column.num_ids for column in self.ids if column.of is None}
        self._samplers = {size: make_sampler(size, alpha, curve) for size in sizes}
        self._counts = {column.largest: Sampler(zipf(1.15, column.largest)) for column in self.numbers}
        small = [at for at, column in enumerate(self.ids) if 2 < column.num_ids <= _PAIR_IDS]
        self._pairs = list(zip(small[::2], small[1::2], strict=False))[:interactions]
        # Logs of one universe share bias and scale, so they are set on the rows of the universe's own seed.
        original = copy.copy(self)
        original.seed = self.universe
        self._calibration = original._calibrated()  # here, since blocks are made on several threads

    def block(self, start: int, stop: int) -> ClickBlock:
        """Rows [start, stop); may lie past ``rows``."""
        rows = np.arange(start, stop, dtype=np.uint64)
        ids = self.draw_ids(rows)
        numbers, missing = self._draw_numbers(rows)
        centre, scale, bias = self._calibration
        logits = self._raw_logits(ids, numbers, centre) * np.float32(scale) + np.float32(bias)
        chance = draw.uniform(draw.key_of(self.seed, "label"), rows)
        return ClickBlock(
            start=start,
            ids=ids,
            numbers=numbers,
            number_missing=missing,
            logits=logits,
            labels=chance < 1.0 / (1.0 + np.exp(-logits.astype(np.float64))),
        )

    def draw_ids(self, rows: NDArray[np.uint64], *, still: bool = False) -> list[NDArray[np.int64]]:
        """Ids of every column for these rows, -1 where missing, [n] each; ``still`` leaves the drift out."""
        drawn: list[NDArray[np.int64]] = []
        for column in self.ids:
            if column.of is not None:
                parent = drawn[self._position[column.of]]
                drawn.append(draw.integers(draw.key_of(self.universe, column.name, "of"), parent, column.num_ids))
                continue
            rank = self._samplers[column.num_ids](draw.uniform(draw.key_of(self.seed, column.name), rows))
            if self.drift and not still and column.num_ids > 2:
                rank = self._drifted(rank, rows, column)
            if column.missing:
                rank[self._missing(column.name, column.missing, rows)] = -1
            drawn.append(rank)
        return drawn

    def _drifted(self, rank: NDArray, rows: NDArray[np.uint64], column: IdColumn) -> NDArray[np.int64]:
        # A rank changes hands at a moment of its own, `drift` of the ranks over the log; the new holder
        # lies far down the list, as a new article does.
        phase = draw.uniform(draw.key_of(self.universe, column.name, "phase"), rank)
        era = np.floor(rows.astype(np.float64) * (self.drift / max(self.rows, 1)) + phase).astype(np.int64)
        stride = max(1, int(column.num_ids * 0.381966))
        return (rank + era * stride) % column.num_ids

    def _draw_numbers(self, rows: NDArray[np.uint64]) -> tuple[list[NDArray], list[NDArray]]:
        values, empty = [], []
        for column in self.numbers:
            value = self._counts[column.largest](draw.uniform(draw.key_of(self.seed, column.name), rows))
            if column.negative:
                value[self._missing(column.name + "-", column.negative, rows)] = -1
            gone = self._missing(column.name, column.missing, rows)
            value[gone] = 0
            values.append(value)
            empty.append(gone)
        return values, empty

    def _missing(self, name: str, share: float, rows: NDArray[np.uint64]) -> NDArray[np.bool_]:
        if not share:
            return np.zeros(len(rows), dtype=bool)
        return draw.uniform(draw.key_of(self.seed, name, "missing"), rows) < share

    def _raw_logits(
        self, ids: list[NDArray], numbers: list[NDArray], centre: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        total = np.zeros(len((ids or numbers)[0]), dtype=np.float32)
        for column, values in zip(self.ids, ids, strict=True):
            # Rare ids cannot be learnt from one occurrence: the larger the table, the less hangs on it.
            strength = self._strength(column.name) / (1 + np.log10(column.num_ids) / 2)
            total += draw.normal(draw.key_of(self.universe, column.name, "weight"), values) * np.float32(strength)
        for number, values, middle in zip(self.numbers, numbers, centre, strict=True):
            shape = np.log1p(np.maximum(values, 0).astype(np.float32)) - middle
            total += shape * np.float32(0.25 * self._strength(number.name))
        for left, right in self._pairs:
            factor = draw.normal(draw.key_of(self.universe, self.ids[left].name, "factor"), ids[left])
            factor *= draw.normal(draw.key_of(self.universe, self.ids[right].name, "factor"), ids[right])
            total += factor * np.float32(0.4)
        return total

    def _strength(self, name: str) -> float:
        return 0.5 + float(draw.uniform(draw.key_of(self.universe, name, "strength"), np.zeros(1))[0])

    def _calibrated(self) -> tuple[NDArray[np.float32], float, float]:
        rows = np.arange(_SAMPLE, dtype=np.uint64)
        ids = self.draw_ids(rows, still=True)  # the same planted truth whatever the drift
        numbers, _ = self._draw_numbers(rows)
        means = [np.log1p(np.maximum(values, 0)).mean() for values in numbers]
        centre = np.array(means, dtype=np.float32)
        raw = self._raw_logits(ids, numbers, centre).astype(np.float64)
        spread = float(raw.std())
        scale = self.signal / spread if spread > 0 else 0.0
        low, high = -40.0, 40.0
        for _ in range(60):
            bias = (low + high) / 2
            if float(np.mean(1 / (1 + np.exp(-(raw * scale + bias))))) < self.base_rate:
                low = bias
            else:
                high = bias
        return centre, scale, bias
