"""Prefixes of a tensor-train table that a batch needs: ids in stoker's order against ids by frequency alone.

A prefix is the id without its last digit, ``id // n3``. Counts do not depend on the machine. Before they are believed,
the order must be a bijection and the first batches of the reordered dataset must hold the mapped ids of the source's.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial

import numpy as np

from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, WrongResult
from benchmarks.lookahead import globo
from benchmarks.popularity import book_crossing
from stoker.base.errors import DependencyError
from stoker.dataset.dataset import Dataset
from stoker.dataset.split import Split
from stoker.ops.tt.shape import factorize
from stoker.rewrite.id_order import Reordering
from stoker.rewrite.reorder import run_reorder

__all__ = ["bars"]

BATCH = 4096
DIM = RANK = 16  # of the tensor-train shape whose last factor decides
CASES: Mapping[str, Callable[[Run], Dataset]] = {"Globo": globo, "Book-Crossing": book_crossing}
ORDERS: dict[str, int | None] = {"in order of the log": None, "shuffled, as training reads": 0}  # seed of the order
FIXED = (8, 32, 64, 128)  # 64: rows of 16 float32 in a page of 4 KiB; 128: ids in a block of stoker reorder's report
SHIPPED = "stoker reorder"
METHODS = {
    SHIPPED: Reordering(),
    "first use, in tiers": Reordering(method="first-use"),
    "communities, in tiers": Reordering(method="communities"),
    "communities, as published (a tenth hot)": Reordering(method="communities", spread=math.inf, hot=0.1),
    "bisection without tiers": Reordering(spread=math.inf, hot=0.0),
}
Order = dict[str, np.ndarray]  # table -> new id of each id


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Prefixes per batch: (table, n3, order by) -> mean."""

    batches: int
    means: dict[str, dict[str, dict[str, float]]]  # table -> n3 -> order -> mean

    def total(self, order: str, n3: str = "tensor train") -> float:
        """Of all tables."""
        return sum(means[n3][order] for means in self.means.values())

    def fewer(self, order: str, n3: str = "tensor train") -> float:
        """Percent fewer than by frequency."""
        return 100 * (1 - self.total(order, n3) / self.total("frequency", n3))


def factors(rows: int) -> dict[str, int]:
    """Ids per prefix of a table, by name."""
    return {
        "tensor train": factorize(rows, DIM, RANK).rows[-1],
        "cube root": round(rows ** (1 / 3)),
        **{str(n3): n3 for n3 in FIXED},
    }


@cache
def orders(case: str, run: Run) -> dict[str, Order]:
    """The new ids by every method.

    Raises:
        WrongResult: no bijection, or a dataset that does not hold the mapped ids.
    """
    data, found = CASES[case](run), {}
    out = CACHE / "reordered"
    for name, how in METHODS.items():
        run.log(f"{case}: {name}")
        shutil.rmtree(out, ignore_errors=True)
        try:
            run_reorder(data, out, how=how)
        except DependencyError as missing:
            run.log(str(missing))
            continue
        made = Dataset(out)
        found[name] = {table: ids.numpy() for table, ids in made.new_ids.items()}
        _check(data, made)
    shutil.rmtree(out, ignore_errors=True)
    return found


def _check(data: Dataset, made: Dataset) -> None:
    for table, ids in made.new_ids.items():
        if not np.array_equal(np.sort(ids.numpy()), np.arange(data.schema.num_embeddings[table])) or ids[0] != 0:
            raise WrongResult(f"the order of {table} is no bijection that keeps id 0")
    for seed in ORDERS.values():
        pairs = zip(data.train.batches(BATCH, seed=seed), made.train.batches(BATCH, seed=seed), strict=True)
        for _, (old, new) in zip(range(3), pairs, strict=False):
            for place, feature in enumerate(data.schema.features):
                expected = _ids(old, place)
                if feature.table in made.new_ids:
                    expected = made.new_ids[feature.table].numpy()[expected]
                if not np.array_equal(expected, _ids(new, place)):
                    raise WrongResult(f"{feature.name}: a batch does not hold the mapped ids")


def _ids(batch: object, place: int) -> np.ndarray:
    """The ids of one feature of a batch."""
    ids, offsets = batch.ids.numpy(), batch.offsets  # type: ignore[attr-defined]
    if offsets is None:
        return np.asarray(ids[:, place])
    ends = offsets.numpy()
    features = (len(ends) - 1) // batch.labels.numel()  # type: ignore[attr-defined]
    lengths = np.diff(ends)
    return np.asarray(ids[np.repeat(np.arange(len(lengths)) % features == place, lengths)])


def count(split: Split, found: Mapping[str, Order], seed: int | None, most: int | None) -> Counted:
    """Mean prefixes of the batches of a split, all of them or ``most`` evenly spread over it."""
    tables = list(next(iter(found.values())))
    places = {t: [i for i, f in enumerate(split.schema.features) if f.table == t] for t in tables}
    by = {"frequency": {t: np.arange(split.schema.num_embeddings[t]) for t in tables}, **found}
    sums = {t: {n3: dict.fromkeys(by, 0) for n3 in factors(split.schema.num_embeddings[t])} for t in tables}
    stream = split.batches(BATCH, seed=seed, drop_last=True)
    step = max(1, len(stream) // most) if most else 1
    batches = 0
    for number, batch in enumerate(stream):
        if number % step:
            continue
        batches += 1
        for table in tables:
            ids = np.unique(np.concatenate([_ids(batch, place) for place in places[table]]))
            for n3, width in factors(split.schema.num_embeddings[table]).items():
                for name, order in by.items():
                    sums[table][n3][name] += len(np.unique(order[table][ids] // width))
    means = {t: {n3: {k: v / batches for k, v in by_.items()} for n3, by_ in one.items()} for t, one in sums.items()}
    return Counted(batches=batches, means=means)


@cache
def counted(case: str, order: str, run: Run) -> Counted:
    """Counted once for both bars."""
    found = orders(case, run)
    run.log(f"{case}: counting, {order}")
    return count(CASES[case](run).train, found, ORDERS[order], 30 if run.quick else None)


def _tables(case: str, order: str, found: Counted) -> list[Table]:
    made = []
    for table, means in found.means.items():
        rows = factors(CASES[case](Run()).schema.num_embeddings[table])
        names = list(next(iter(means.values())))
        cells = [
            [name]
            + [
                f"{means[n3][name]:,.0f}"
                + ("" if name == "frequency" else f" ({means[n3][name] / means[n3]['frequency'] - 1:+.1%})")
                for n3 in means
            ]
            for name in names
        ]
        made.append(
            Table(
                title=f"{case}, {table}, {order}: distinct prefixes per batch of {BATCH}, {found.batches:,} batches",
                columns=["ids by", *(f"{n3}: {rows[n3]}" if n3 != str(rows[n3]) else n3 for n3 in means)],
                rows=cells,
            )
        )
    return made


def measure(order: str, run: Run) -> Outcome:
    """The smaller saving of the two data sets, over all their reordered tables."""
    tables, notes, values, data = [], [], [], {}
    for case in CASES:
        found = counted(case, order, run)
        values.append(found.fewer(SHIPPED))
        tables += _tables(case, order, found)
        data[case] = asdict(found)
        others = [
            f"{name} {found.fewer(name):.1f} %" for name in METHODS if name != SHIPPED and name in orders(case, run)
        ]
        notes.append(f"{case}, tables together: {found.fewer(SHIPPED):.1f} % fewer; {', '.join(others)}")
        source = CASES[case](run)
        if ORDERS[order] is None and "test" in source.splits and len(source.test) > BATCH:
            later = count(source.test, orders(case, run), None, 30 if run.quick else None)
            notes.append(f"{case}, test rows, which no order knows: {later.fewer(SHIPPED):.1f} % fewer")
            data[f"{case}, test rows"] = asdict(later)
    notes.append(f"the last factor of the tensor train is that of factorize(rows, {DIM}, {RANK}); it is the bar's")
    notes.append("checked: every order is a bijection; the first batches of the datasets hold the mapped ids")
    if ORDERS[order] is not None:
        notes.append(
            "rows drawn independently touch a block with probability 1 - (1 - p)^n, which is concave in p: of all "
            "orders, that by frequency touches the fewest. Only bags, whose ids come together, leave anything to gain"
        )
    if run.quick:
        notes.append("quick: 30 batches of each")
    return Outcome(value=min(values), tables=tables, notes=notes, data=data)


def bars() -> list[Bar]:
    """Fewer prefixes in either order of the batches."""
    title = "distinct prefixes per batch of 4096, reordered against by frequency, {}; Globo and Book-Crossing"
    return [
        Bar(
            name=name,
            group="reorder",
            title=title.format(order),
            must=10.0,
            aim=25.0,
            unit=" % fewer",
            digits=1,
            run=partial(measure, order),
        )
        for name, order in zip(("reorder-log", "reorder-shuffled"), ORDERS, strict=True)
    ]
