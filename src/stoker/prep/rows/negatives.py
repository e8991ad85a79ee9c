"""Sample rows of label 0 for a log of positive rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import polars as pl

from stoker.dataset.manifest import SPLITS
from stoker.dataset.rebuild import UnusableInput
from stoker.prep.features.base import ROW
from stoker.prep.features.fitted import LABEL
from stoker.prep.parse.dictionaries import hashes_of
from stoker.prep.recipes.draw import bits, key_of
from stoker.prep.recipes.rows import Ints, negatives
from stoker.prep.schema import Negatives

ITEM = "__item"  # hash of the column that identifies the item; null where it is missing
_KEY = "__key"  # the rows with the least keys are in the pool
_MOST = 2**20  # rows of a pool
_SURE = 20  # items of several rows from which a column with one value for each of them is a column of the item


def item_hash(column: str) -> pl.Expr:
    """Return the expression for :data:`ITEM`."""
    found = pl.col(column).cast(pl.String)
    hashed = found.map_batches(lambda texts: pl.Series(hashes_of(texts)), return_dtype=pl.UInt64)
    return pl.when(found.is_not_null()).then(hashed).alias(ITEM)


class NegativeSampler:
    """Add rows of label 0 after each row of label 1.

    A sampled row has the item of a row of label 1 of the same split, and not that of its own row. The draws depend on
    the seed and the number of the row only.

    Args:
        settings: of the schema.
        copied: the columns of the item.
        split: column with the name of the split of each row.
        blocks: all rows, in order, with ``copied``, ``split``, ``__item``, ``__label`` and ``__row``. At most 2**20
            rows of each split, or items if they are drawn uniformly, are kept in memory.

    Raises:
        UnusableInput: a column that is not in ``copied`` depends on the item.
    """

    def __init__(self, settings: Negatives, copied: list[str], split: str, blocks: Iterable[pl.DataFrame]) -> None:
        self._settings, self._copied, self._split = settings, copied, split
        pools = {name: pl.DataFrame() for name in SPLITS}
        key, first = key_of(settings.seed, "pool"), True
        for block in blocks:
            rows = block.filter((pl.col(LABEL) > 0.5) & pl.col(ITEM).is_not_null())
            if first and rows.height:
                self._check(rows)
                first = False
            drawn_by = rows[ROW if settings.by == "popularity" else ITEM].to_numpy()
            rows = rows.with_columns(pl.Series(_KEY, bits(key, drawn_by)))
            for name, pool in pools.items():
                found = pl.concat(
                    [pool, rows.filter(pl.col(split) == name).select(*copied, ITEM, _KEY)], how="diagonal"
                )
                if settings.by == "uniform":
                    found = found.unique(ITEM, keep="first", maintain_order=True)
                pools[name] = found.bottom_k(_MOST, by=_KEY) if found.height > _MOST else found
        pools = {name: pool.sort(_KEY) for name, pool in pools.items()}
        sizes = [pool.height for pool in pools.values()]
        self._pool = pl.concat(pools.values(), how="diagonal")
        self._items = self._pool[ITEM].to_numpy()
        self._ranges = dict(zip(pools, zip(np.cumsum(sizes) - sizes, sizes, strict=True), strict=True))

    def _check(self, rows: pl.DataFrame) -> None:
        """Raise :class:`UnusableInput` if a column of the model has one value for each item, and is not copied."""
        helpers = (*self._copied, self._split, ITEM)
        others = [
            name for name, kind in rows.schema.items()
            if name not in helpers and not name.startswith("__") and not kind.is_nested() and rows[name].n_unique() > 1
        ]  # fmt: skip
        several = rows.group_by(ITEM).agg(pl.len(), *(pl.col(name).n_unique() for name in others))
        several = several.filter(pl.col("len") > 1)
        for name in others if several.height >= _SURE else ():
            if several[name].max() == 1:
                raise UnusableInput(
                    f"negatives.columns lacks {name!r}, which has one value for each {self._settings.columns[0]!r}: "
                    "sampled rows would have that of another item, by which a model would know them. Add it."
                )

    def extended(self, block: pl.DataFrame, number: int) -> pl.DataFrame:
        """Return the rows of a block, each row of label 1 followed by its sampled rows.

        Args:
            block: rows with the columns that the class names, but ``__row``.
            number: number of the first row among all rows.
        """
        own, each = block[ITEM].fill_null(0).to_numpy(), self._settings.per_positive
        sources, drawn = [np.arange(block.height)], [np.arange(block.height)]
        for name, (begin, size) in self._ranges.items():
            chosen = block.select((pl.col(self._split) == name) & (pl.col(LABEL) > 0.5)).to_series()
            rows = np.repeat(np.flatnonzero(chosen.fill_null(False).to_numpy()), each)
            if size:
                taken = self._draw(own[rows], (number + rows) * each + np.arange(len(rows)) % each, begin, size)
                sources.append(rows[taken >= 0])
                drawn.append(block.height + taken[taken >= 0])
        source, place = np.concatenate(sources), np.concatenate(drawn)
        order = np.argsort(source, kind="stable")
        source, place = source[order], place[order]
        sampled = place >= block.height
        items = pl.concat([block.select(self._copied), self._pool[place[sampled] - block.height].select(self._copied)])
        at = source.copy()
        at[sampled] = block.height + np.arange(int(sampled.sum()))
        label = pl.when(pl.Series(sampled)).then(0.0).otherwise(pl.col(LABEL)).alias(LABEL)
        return block[source].with_columns(*items[at].get_columns(), label)

    def _draw(self, own: Ints, numbers: Ints, begin: int, size: int) -> Ints:
        """Return the row of the pool for each sampled row [n], or -1 where only its own item was drawn."""
        return negatives(
            self._settings.seed, len(own),
            lambda chance, _: begin + (chance * size).astype(np.int64),
            lambda places, rows: np.asarray(self._items[places] == own[rows]),
            numbers,
        )  # fmt: skip
