"""Generate rows with a known click probability: ids by a frequency curve, counts, and a logit made of both.

A curve says how unequal ids are: the share of all occurrences by rank, from Zipf's law or from counts of a real column.
It holds a few dozen aggregate numbers, so a curve can be published where the data it was measured on cannot.

The logit of a row is the sum of a bias, a hidden weight for each id, a slope for each number, and products of hidden
factors for a few pairs of columns. Weights and factors are hashes of the ids, so no table of them is needed. Bias and
scale are fitted on the first 65,536 rows: the labels get the requested base rate, the logits the requested spread.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.base.errors import ConfigError, DataError, errors_as
from stoker.prep.recipes import draw
from stoker.synthetic.settings import LogSettings

_EXACT_HEAD = 4096  # ranks summed one by one; beyond them, an integral approximates the sum (Euler-Maclaurin)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Cumulative share of occurrences at some ranks; between two of them the share of an id falls like 1 / rank.

    Raises:
        ConfigError: ranks or shares do not rise, or do not end at ``num_ids`` and 1.

    >>> curve = stoker.synthetic.Curve.load("globo-articles")
    >>> print(f"{curve.share_of_top(curve.num_ids // 100):.2f} of the clicks are on 1 % of the articles")
    0.68 of the clicks are on 1 % of the articles
    """

    name: str
    num_ids: int  # distinct ids
    ranks: tuple[int, ...]  # rising, 1-based, the last is num_ids
    shares: tuple[float, ...]  # cumulative share of the ids up to that rank, the last is 1
    occurrences: int = 0  # number counted; 0 for a formula

    def __post_init__(self) -> None:
        ranks, shares = np.array(self.ranks), np.array(self.shares)
        fits = len(ranks) == len(shares) > 0 and ranks[0] >= 1 and ranks[-1] == self.num_ids
        if not fits or np.any(np.diff(ranks) <= 0) or np.any(np.diff(shares) < 0) or abs(shares[-1] - 1) > 1e-9:
            raise ConfigError(
                f"curve {self.name!r} is not a cumulative share by rank: its {len(ranks)} ranks must rise to "
                f"num_ids={self.num_ids:,}, and as many shares must rise to 1. Make a curve with measure_curve()."
            )

    def share_of_top(self, num_ids: int) -> float:
        """Return the share of all occurrences on the ``num_ids`` most frequent ids."""
        return float(self.cumulative(np.array([float(num_ids)]))[0])

    def cumulative(self, ranks: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the cumulative share at (fractional, 1-based) ranks; linear in rank below 1 and in log rank above."""
        known = np.array(self.ranks, dtype=np.float64)
        at = np.interp(np.log(np.maximum(ranks, 1.0)), np.log(known), np.array(self.shares))
        return np.asarray(at * np.minimum(ranks, 1.0), dtype=np.float64)

    def stretched(self, num_ids: int) -> Curve:
        """Return the same curve over another number of ids: the top x % keep their share of occurrences."""
        if num_ids == self.num_ids:
            return self
        ranks = _knots(num_ids)
        shares = self.cumulative(ranks * (self.num_ids / num_ids))
        shares[-1] = 1.0
        return _curve(self.name, ranks, shares)

    def save(self, path: str | Path) -> None:
        """Write the curve as JSON."""
        fields = {"name": self.name, "num_ids": self.num_ids, "occurrences": self.occurrences}
        fields |= {"ranks": list(self.ranks), "shares": [round(share, 7) for share in self.shares]}
        Path(path).write_text(json.dumps(fields) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, name: str | Path) -> Curve:
        """Load a curve file by path, or a curve of the package: ``globo-articles``, ``book-crossing-books``.

        Raises:
            ConfigError: neither such a file nor such a curve exists.
            DataError: the file does not contain a curve.
        """
        own = resources.files("stoker.synthetic") / "curves"
        source = own / f"{name}.json"
        if not source.is_file():
            source = Path(name)
        if not source.is_file():
            names = ", ".join(sorted(entry.name.removesuffix(".json") for entry in own.iterdir()))
            raise ConfigError(f"there is no frequency curve {str(name)!r}. Give a file, or one of {names}.")
        kinds, remedy = (KeyError, TypeError, json.JSONDecodeError), "Write one with Curve.save()."
        with errors_as(DataError, f"{source} is not a frequency curve", remedy, kinds):
            fields: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
            return cls(
                name=str(fields["name"]), num_ids=int(fields["num_ids"]), occurrences=int(fields.get("occurrences", 0)),
                ranks=tuple(map(int, fields["ranks"])), shares=tuple(map(float, fields["shares"])),
            )  # fmt: skip


def zipf(alpha: float, num_ids: int) -> Curve:
    """Return the curve of Zipf's law: the share of rank r is proportional to ``r ** -alpha``.

    Raises:
        ConfigError: ``num_ids`` or ``alpha`` is out of range.

    >>> round(zipf(1.05, 1_000_000).share_of_top(10_000), 2)
    0.75
    """
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
    return _curve(f"zipf-{alpha:g}", ranks, mass / mass[-1])


def _curve(name: str, ranks: NDArray, shares: NDArray, occurrences: int = 0) -> Curve:
    values = {"ranks": tuple(ranks.tolist()), "shares": tuple(shares.tolist())}
    return Curve(name=name, num_ids=int(ranks[-1]), occurrences=occurrences, **values)


def measure_curve(counts: Iterable[int] | NDArray, *, name: str = "measured") -> Curve:
    """Return the curve of a column.

    The curve keeps every rank up to 16, and above them ranks that grow by a quarter: about fifty for 50,000 ids.

    Args:
        counts: occurrences of each value in any order, an array or a tensor such as ``dataset.counts["item"]``. Zeros
            are left out.
        name: of the curve.

    Raises:
        DataError: no count is above 0.

    >>> measure_curve([1, 5, 0, 2]).shares
    (0.625, 0.875, 1.0)
    """
    ordered = np.sort(np.asarray(counts, dtype=np.int64).ravel())[::-1]
    ordered = ordered[ordered > 0]
    if len(ordered) == 0:
        raise DataError(f"curve {name!r} cannot be measured: no count is above 0.")
    cumulative = np.cumsum(ordered)
    ranks = _knots(len(ordered), ratio=1.25, exact=16)
    return _curve(name, ranks, cumulative[ranks - 1] / cumulative[-1], int(cumulative[-1]))


class Sampler:
    """Draw ranks from a curve: uniform numbers in, 0-based ranks out, by a search in fewer than 1,000 ranks.

    >>> import numpy as np
    >>> Sampler(zipf(1.0, 1000))(np.array([0.0, 0.5, 0.999]))
    array([  0,  23, 992])
    """

    def __init__(self, curve: Curve) -> None:
        fine = _knots(curve.num_ids)
        self.num_ids = curve.num_ids
        self._low = np.append(0, fine).astype(np.float64)  # segment i is the ranks low[i]..low[i + 1] - 1
        self._cumulative = np.append(0.0, curve.cumulative(fine.astype(np.float64)))
        widths = np.diff(self._cumulative)
        # The search never ends in an empty segment, so its ranks are never drawn.
        self._slope = np.diff(self._low) / np.where(widths > 0, widths, 1.0)

    def __call__(self, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return 0-based ranks for numbers in [0, 1), [n]."""
        segment = np.searchsorted(self._cumulative, uniforms, side="right") - 1
        np.minimum(segment, len(self._slope) - 1, out=segment)
        rank = uniforms - self._cumulative[segment]
        rank *= self._slope[segment]
        rank += self._low[segment]
        ranks: NDArray[np.int64] = rank.astype(np.int64)
        np.minimum(ranks, self.num_ids - 1, out=ranks)
        return ranks

    def share(self, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the probability of each 0-based rank, [n]."""
        segment = np.minimum(np.searchsorted(self._low, ranks, side="right"), len(self._slope)) - 1
        return np.asarray((np.diff(self._cumulative) / np.diff(self._low))[segment])


def _knots(num_ids: int, *, ratio: float = 1.02, exact: int = 256) -> NDArray[np.int64]:
    """Return every rank up to ``exact``, then ranks that grow by ``ratio``, the last one ``num_ids``."""
    steps = max(0, int(np.ceil(np.log(max(num_ids / exact, 1.0)) / np.log(ratio))))
    tail = exact * ratio ** np.arange(1, steps + 1)
    ranks = np.concatenate([np.arange(1, exact + 1), tail.astype(np.int64), [num_ids]])
    return np.unique(np.minimum(ranks, num_ids))


_SAMPLE = 65_536  # rows on which bias and scale are fitted
_PAIRS = 3  # of columns that interact
_PAIR_IDS = 200_000  # columns with more ids are in no pair: each of their pairs would occur once


@dataclass(frozen=True, kw_only=True)
class IdColumn:
    """A categorical column of ``num_ids`` ids."""

    name: str
    num_ids: int
    missing: float = 0.0  # share of empty fields
    of: str | None = None  # another column, whose id determines this one (age of user); None: drawn by itself


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
class Options(LogSettings):
    """The settings of every log, with its number of rows."""

    rows: int  # of the log; in click logs they only set how fast ids drift
    if TYPE_CHECKING:
        curve: Curve | str | Path | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.curve, str | Path):
            object.__setattr__(self, "curve", Curve.load(self.curve))
        if not 0 < self.scale <= 100:
            raise ConfigError(f"scale is {self.scale:g}. Give more than 0 and at most 100.", settings=("scale",))
        if self.base_rate is not None and not 0 < self.base_rate < 1:
            raise ConfigError(f"base_rate is {self.base_rate:g}. Give more than 0 and less than 1.")

    @property
    def world(self) -> int:
        """The seed of everything that an id determines: raw value, attributes, hidden weights."""
        return self.seed if self.universe is None else self.universe

    def uniform(self, rows: NDArray, *names: str) -> NDArray[np.float64]:
        """Return a random number in [0, 1) for each row, [n]; seed and names determine it."""
        return draw.uniform(draw.key_of(self.seed, *names), rows)

    def integers(self, rows: NDArray, below: int, *names: str) -> NDArray[np.int64]:
        """Return a random whole number in [0, below) for each row, [n]; seed and names determine it."""
        return draw.integers(draw.key_of(self.seed, *names), rows, below)

    def belonging(self, ids: NDArray, below: int, *names: str) -> NDArray[np.int64]:
        """Return an attribute of ids, such as a user's country: a whole number in [0, below) each, [n]."""
        return draw.integers(draw.key_of(self.world, *names), ids, below)

    def sampler(self, num_ids: int) -> Sampler:
        """Return a sampler of the curve stretched over ``num_ids``, or of Zipf's law if no curve is set."""
        curve = self.curve.stretched(num_ids) if isinstance(self.curve, Curve) else zipf(self.alpha, num_ids)
        return Sampler(curve)

    def sized(self, num_ids: int) -> int:
        """Return ``num_ids`` times the scale, at least 3 (or ``num_ids``, where that is less)."""
        return max(min(3, num_ids), round(num_ids * self.scale))

    def drifted(
        self, ranks: NDArray[np.int64], rows: NDArray[Any], num_ids: int, *names: str, groups: int = 1
    ) -> NDArray[np.int64]:
        """Return the ids that have these ranks of ``num_ids`` at these rows, [n].

        Over the log, ``drift`` of the ranks get another id, each at its own row. The new id was rare before, as a new
        article is, and is of the same group: ids of a group are equal modulo ``groups``.
        """
        if not self.drift:
            return ranks
        phase = draw.uniform(draw.key_of(self.world, *names, "phase"), ranks)
        era = np.floor(rows.astype(np.float64) * (self.drift / max(self.rows, 1)) + phase).astype(np.int64)
        stride = groups * max(1, int(num_ids // groups * 0.381966))
        return (ranks + era * stride) % num_ids


class ClickLog:
    """A log that can be read at any row. Equal arguments give equal rows, in blocks of any size.

    Args:
        ids: categorical columns.
        numbers: columns of counts.
        base_rate: share of positives.
        settings: ``rows`` and the other settings of :func:`stoker.synthetic.write`.

    >>> log = ClickLog([IdColumn(name="item", num_ids=50)], rows=1000, seed=1)
    >>> log.block(10, 14).ids[0]
    array([ 1, 20,  6, 48])
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
        # Logs of one universe share bias and scale, so they are fitted on the rows of the universe's own seed.
        original = copy.copy(self)
        original.options = replace(self.options, seed=self.options.world)
        self._calibration = original._calibrated()  # not later: several threads make blocks

    def block(self, start: int, stop: int) -> ClickBlock:
        """Return rows [start, stop), which may be beyond ``rows``."""
        rows = np.arange(start, stop, dtype=np.uint64)
        ids = self.draw_ids(rows)
        numbers, missing = self._draw_numbers(rows)
        centre, scale, bias = self._calibration
        logits = self._raw_logits(ids, numbers, centre) * np.float32(scale) + np.float32(bias)
        labels = self.options.uniform(rows, "label") < 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
        return ClickBlock(start, ids, numbers, missing, logits, labels)

    def draw_ids(self, rows: NDArray[np.uint64], *, still: bool = False) -> list[NDArray[np.int64]]:
        """Return the ids of every column for these rows, -1 where missing, [n] each; ``still`` ignores the drift."""
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
            # A model cannot learn rare ids from one occurrence, so weights are smaller in larger tables.
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
        ids = self.draw_ids(rows, still=True)  # the drift does not change the truth
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
