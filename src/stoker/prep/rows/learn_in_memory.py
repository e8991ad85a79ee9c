"""Learned features of rows whose keys fit in memory: numbered once for all, fitted, and worked out for every row.

The texts of a key stay in the files: of each row memory has a code of 4 bytes per column, and per key its number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from stoker.base.ordered import ordered_map
from stoker.prep.features.fitted.keys import Coder, code_column
from stoker.prep.features.learned import LABEL, Learned, LearnedTable, MeanTargetEncoding

__all__ = ["Taught", "learn_in_memory", "memory_to_learn"]

_TRAIN = 0  # code of the split


def memory_to_learn(features: Sequence[Learned], rows: int) -> int:
    """Bytes that :func:`learn_in_memory` takes, about."""
    columns = len({key for feature in features for key in feature.keys})
    folds = len({feature.fold_column for feature in features if isinstance(feature, MeanTargetEncoding)})
    # Codes and folds, then numbers and outputs instead of codes, and what a few features need that are worked on.
    return rows * (4 * (columns + folds) + 16 * len(features) + 48)


@dataclass(frozen=True, kw_only=True)
class Taught:
    """What features learned, and their outputs: those of the rows that taught them, then those of all others."""

    tables: dict[str, LearnedTable]
    outputs: tuple[pl.DataFrame, pl.DataFrame]
    train: npt.NDArray[np.bool_]  # of all rows in order: whether it taught
    starts: Sequence[int]  # first row of every piece, and their end
    before: Sequence[int]  # rows that taught, of all pieces before each

    def piece(self, number: int) -> pl.DataFrame:
        """The outputs of a piece's rows, in order."""
        begin, end = self.starts[number], self.starts[number + 1]
        first, last = self.before[number], self.before[number + 1]
        mine, others = self.outputs[0][first:last], self.outputs[1][begin - first : end - last]
        if not others.height or not mine.height:
            return mine if mine.height else others
        train = self.train[begin:end]
        place = np.empty(end - begin, np.uint32)
        place[train], place[~train] = np.arange(last - first), np.arange(last - first, end - begin)
        return pl.concat([mine, others]).select(pl.all().gather(pl.Series(place)))


def learn_in_memory(
    features: Sequence[Learned], part: Callable[[int], pl.LazyFrame], keys: Path, sizes: Sequence[int], threads: int
) -> Taught:
    """Fit features on training rows and work them out for all rows, as fitting and then attaching them does.

    Args:
        features: whose keys are numbered (:attr:`~stoker.prep.features.learned.Learned.numbered`).
        part: the rows of a piece, with the inputs of the features.
        keys: Arrow file with ``__label`` and ``__split`` of all rows.
        sizes: rows of every piece.
        threads: pieces, and features, that are worked on at a time.
    """
    known = pl.scan_ipc(keys).select(LABEL, "__split").collect()
    train = known.get_column("__split").to_numpy() == _TRAIN
    starts = [0, *accumulate(sizes)]
    before = [0, *np.cumsum([np.count_nonzero(train[a:b]) for a, b in pairwise(starts)]).tolist()]
    count, teaching = starts[-1], before[-1]
    names = list(dict.fromkeys(key for feature in features for key in feature.keys))
    dealt = {one.fold_column: one.fold() for one in features if isinstance(one, MeanTargetEncoding)}
    codes = {name: np.empty(count, np.int32) for name in names}
    folds = {name: np.empty(teaching, np.int32) for name in dealt}
    coder = Coder()

    def read(piece: int) -> None:
        rows = part(piece).select(*names, *dealt.values()).collect()
        begin, first, last = starts[piece], before[piece], before[piece + 1]
        taught = train[begin : starts[piece + 1]]
        other = teaching + begin - first
        for name in names:
            found = coder.add(name, rows.get_column(name))
            codes[name][first:last] = found[taught]
            codes[name][other : other + len(taught) - (last - first)] = found[~taught]
        for name in dealt:
            folds[name][first:last] = rows.get_column(name).to_numpy()[taught]

    for _ in ordered_map(read, range(len(sizes)), threads):
        pass
    labels = known.get_column(LABEL).to_numpy()[train]
    del known
    rows = pl.DataFrame({code_column(name): codes.pop(name) for name in names})
    numbered = coder.number(rows, [one.keys for one in features], add=True, threads=threads, teaching=teaching)
    rows = numbered.select(pl.exclude(rows.columns))  # of all that is read, keys have numbers now
    del numbered
    beside = [pl.Series(LABEL, labels), *(pl.Series(name, values) for name, values in folds.items())]
    teaching_rows = rows[:teaching].with_columns(beside)
    others = rows[teaching:]
    del rows

    def work(feature: Learned) -> tuple[LearnedTable, list[pl.Series], list[pl.Series]]:
        table, mine = feature.learn_encode(teaching_rows, coder)
        table.folds = None  # rows that taught it have their encodings, and folds hold on to rows
        return table, mine, feature.encode(others, table)

    made = list(ordered_map(work, features, threads))
    mine = pl.DataFrame([series for _, some, _ in made for series in some])
    rest = pl.DataFrame([series for _, _, some in made for series in some])
    tables = {one.name: table for one, (table, _, _) in zip(features, made, strict=True)}
    return Taught(tables=tables, outputs=(mine, rest), train=train, starts=starts, before=before)
