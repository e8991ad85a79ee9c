"""Rows with a planted click probability: ids by a frequency curve, counts, and a logit made of both.

The logit of a row is a bias, a hidden weight per id and column, a slope per number, and products of hidden
factors for a few pairs of columns. Weights and factors are hashes of the ids, so no table of them is kept.
Bias and scale are set on the first 65,536 rows such that the label has the asked base rate and the logit the
asked spread.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.base.errors import ConfigError
from stoker.prep.recipes import draw
from stoker.synthetic.curve import Curve, Sampler, zipf

__all__ = ["ClickBlock", "ClickLog", "IdColumn", "NumberColumn", "Options"]

_SAMPLE = 65_536  # rows that bias and scale are set on
_PAIRS = 3  # of columns that interact
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


class ClickBlock(NamedTuple):
    """Rows ``start..start + n - 1`` of a log."""

    start: int
    ids: list[NDArray[np.int64]]  # per id column [n], -1 where missing
    numbers: list[NDArray[np.int64]]  # per number column [n]
    number_missing: list[NDArray[np.bool_]]  # [n] each
    logits: NDArray[np.float32]  # [n] the true logit
    labels: NDArray[np.bool_]  # [n]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every log is generated from.

    Raises:
        ConfigError: a setting outside its range.
    """

    rows: int  # length of the log; it fixes how fast ``drift`` goes, in click logs nothing else
    seed: int = 0
    universe: int | None = None  # seed of the hidden weights and of what belongs to an id; None: ``seed``
    alpha: float = 1.05  # exponent of Zipf's law for the ids, where there is no curve
    curve: Curve | str | Path | None = None  # or the name or the file of one
    drift: float = 0.0  # share of the ranks whose id has been replaced by another one at the end of the log
    scale: float = 1.0  # factor on the sizes of the tables
    base_rate: float | None = None  # None: that of the real log
    signal: float = 1.3  # standard deviation of the true logit; 0 plants nothing (best AUC 0.5)

    def __post_init__(self) -> None:
        if isinstance(self.curve, str | Path):
            object.__setattr__(self, "curve", Curve.load(self.curve))
        for name, value, most in (("alpha", self.alpha, 10), ("drift", self.drift, 1), ("signal", self.signal, 5)):
            if not 0 <= value <= most:
                raise ConfigError(f"{name} {value:g} lies outside 0 to {most}.", settings=(name,))
        for name, seed in (("seed", self.seed), ("universe", self.universe or 0)):
            if seed < 0:
                raise ConfigError(f"{name} {seed} is negative. Give 0 or more.", settings=(name,))
        if not 0 < self.scale <= 100:
            raise ConfigError(f"scale {self.scale:g} must be above 0 and at most 100.", settings=("scale",))
        if self.base_rate is not None and not 0 < self.base_rate < 1:
            raise ConfigError(f"base_rate {self.base_rate:g} must lie between 0 and 1, without either.")

    @property
    def world(self) -> int:
        """The seed of what belongs to ids: raw values, attributes, hidden weights."""
        return self.seed if self.universe is None else self.universe

    def uniform(self, rows: NDArray, *names: str) -> NDArray[np.float64]:
        """What rows draw from [0, 1) by the seed and a name, [n]."""
        return draw.uniform(draw.key_of(self.seed, *names), rows)

    def integers(self, rows: NDArray, below: int, *names: str) -> NDArray[np.int64]:
        """What rows draw from [0, below) by the seed and a name, [n]."""
        return draw.integers(draw.key_of(self.seed, *names), rows, below)

    def belonging(self, ids: NDArray, below: int, *names: str) -> NDArray[np.int64]:
        """What belongs to ids in the universe, such as a user's country: whole numbers in [0, below), [n]."""
        return draw.integers(draw.key_of(self.world, *names), ids, below)

    def sampler(self, num_ids: int) -> Sampler:
        """Draws from the curve stretched over ``num_ids``, or from Zipf's law where there is none."""
        curve = self.curve.stretched(num_ids) if isinstance(self.curve, Curve) else zipf(self.alpha, num_ids)
        return Sampler(curve)

    def sized(self, num_ids: int) -> int:
        """``num_ids`` by the scale, at least 3 (or what the real table has)."""
        return max(min(3, num_ids), round(num_ids * self.scale))

    def drifted(
        self, ranks: NDArray[np.int64], rows: NDArray[Any], num_ids: int, *names: str, groups: int = 1
    ) -> NDArray[np.int64]:
        """Return who holds these ranks of ``num_ids`` at these rows, [n].

        A rank changes hands at its own moment, ``drift`` of the ranks over the log; the new holder is far down
        the list, as a new article is, and of the same group: ids of one group are equal modulo ``groups``.
        """
        if not self.drift:
            return ranks
        phase = draw.uniform(draw.key_of(self.world, *names, "phase"), ranks)
        era = np.floor(rows.astype(np.float64) * (self.drift / max(self.rows, 1)) + phase).astype(np.int64)
        stride = groups * max(1, int(num_ids // groups * 0.381966))
        return (ranks + era * stride) % num_ids


class ClickLog:
    """A log that can be read at any row. Equal arguments give equal rows, in pieces of any size.

    Args:
        ids: categorical columns.
        numbers: columns of counts.
        base_rate: share of positives.
        settings: the others of :class:`Options`.
    """

    def __init__(
        self, ids: Sequence[IdColumn], numbers: Sequence[NumberColumn] = (), *, base_rate: float = 0.25, **settings: Any
    ) -> None:
        self.ids, self.numbers, self.base_rate = tuple(ids), tuple(numbers), base_rate
        self.options = Options(base_rate=base_rate, **settings)
        self._position = {column.name: at for at, column in enumerate(self.ids)}
        sizes = {column.num_ids for column in self.ids if column.of is None}
        self._samplers = {size: self.options.sampler(size) for size in sizes}
        self._counts = {column.largest: Sampler(zipf(1.15, column.largest)) for column in self.numbers}
        small = [at for at, column in enumerate(self.ids) if 2 < column.num_ids <= _PAIR_IDS]
        self._pairs = list(zip(small[::2], small[1::2], strict=False))[:_PAIRS]
        # Logs of one universe share bias and scale, so they are set on the rows of the universe's own seed.
        original = copy.copy(self)
        original.options = replace(self.options, seed=self.options.world)
        self._calibration = original._calibrated()  # here, since blocks are made on several threads

    def block(self, start: int, stop: int) -> ClickBlock:
        """Rows [start, stop); may lie past ``rows``."""
        rows = np.arange(start, stop, dtype=np.uint64)
        ids = self.draw_ids(rows)
        numbers, missing = self._draw_numbers(rows)
        centre, scale, bias = self._calibration
        logits = self._raw_logits(ids, numbers, centre) * np.float32(scale) + np.float32(bias)
        labels = self.options.uniform(rows, "label") < 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
        return ClickBlock(start, ids, numbers, missing, logits, labels)

    def draw_ids(self, rows: NDArray[np.uint64], *, still: bool = False) -> list[NDArray[np.int64]]:
        """Ids of every column for these rows, -1 where missing, [n] each; ``still`` leaves the drift out."""
        drawn: list[NDArray[np.int64]] = []
        for column in self.ids:
            if column.of is not None:
                parent = drawn[self._position[column.of]]
                drawn.append(self.options.belonging(parent, column.num_ids, column.name, "of"))
                continue
            rank = self._samplers[column.num_ids](self.options.uniform(rows, column.name))
            if not still and column.num_ids > 2:
                rank = self.options.drifted(rank, rows, column.num_ids, column.name)
            if column.missing:
                rank[self._missing(column.name, column.missing, rows)] = -1
            drawn.append(rank)
        return drawn

    def _draw_numbers(self, rows: NDArray[np.uint64]) -> tuple[list[NDArray], list[NDArray]]:
        values, empty = [], []
        for column in self.numbers:
            value = self._counts[column.largest](self.options.uniform(rows, column.name))
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
        return self.options.uniform(rows, name, "missing") < share

    def _raw_logits(
        self, ids: list[NDArray], numbers: list[NDArray], centre: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        def hidden(kind: str, name: str, values: NDArray) -> NDArray[np.float32]:
            return draw.normal(draw.key_of(self.options.world, name, kind), values)

        total = np.zeros(len((ids or numbers)[0]), dtype=np.float32)
        for column, values in zip(self.ids, ids, strict=True):
            # Rare ids cannot be learnt from one occurrence: the larger the table, the less hangs on it.
            strength = self._strength(column.name) / (1 + np.log10(column.num_ids) / 2)
            total += hidden("weight", column.name, values) * np.float32(strength)
        for number, values, middle in zip(self.numbers, numbers, centre, strict=True):
            shape = np.log1p(np.maximum(values, 0).astype(np.float32)) - middle
            total += shape * np.float32(0.25 * self._strength(number.name))
        for pair in self._pairs:
            left, right = (hidden("factor", self.ids[at].name, ids[at]) for at in pair)
            total += left * right * np.float32(0.4)
        return total

    def _strength(self, name: str) -> float:
        return 0.5 + float(draw.uniform(draw.key_of(self.options.world, name, "strength"), np.zeros(1))[0])

    def _calibrated(self) -> tuple[NDArray[np.float32], float, float]:
        rows = np.arange(_SAMPLE, dtype=np.uint64)
        ids = self.draw_ids(rows, still=True)  # the same planted truth whatever the drift
        numbers, _ = self._draw_numbers(rows)
        means = [np.log1p(np.maximum(values, 0)).mean() for values in numbers]
        centre = np.array(means, dtype=np.float32)
        raw = self._raw_logits(ids, numbers, centre).astype(np.float64)
        spread = float(raw.std())
        scale = self.options.signal / spread if spread > 0 else 0.0
        low, high = -40.0, 40.0
        for _ in range(60):
            bias = (low + high) / 2
            if float(np.mean(1 / (1 + np.exp(-(raw * scale + bias))))) < self.base_rate:
                low = bias
            else:
                high = bias
        return centre, scale, bias
