"""Binary properties from lists in text: "Free WiFi|Pool|Hotel" to columns of 0 and 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from stoker.base.checks import fail, positive
from stoker.base.engine import collect
from stoker.prep.features.base import texts
from stoker.prep.features.learned import Learned, LearnedTable

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Properties"]


@dataclass(frozen=True, kw_only=True)
class Properties(Learned):
    """Columns ``name_1`` ... ``name_<most>``: whether the list in ``column`` holds each of some values.

    Args:
        column: text, pieces between ``separator``.
        values: the values in order. Empty: the ``most`` values in the most training rows, those in equally many rows by
            rising text; where there are fewer, the last columns are 0. The learned table tells which is which.
        most: number of columns where ``values`` is empty.
    """

    kind: ClassVar[str] = "properties"
    column: str
    separator: str = "|"
    values: tuple[str, ...] = ()
    most: int | None = None

    def check(self) -> None:
        if bool(self.values) == (self.most is not None):
            fail(self.where, "values", "and most: give one of the two")
        positive(self.where, "most", self.most)
        texts(self.where, "values", self.values, least=0)
        if not self.separator:
            fail(self.where, "separator", "is empty")

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(f"{self.name}_{number}" for number in range(1, (self.most or len(self.values)) + 1))

    @property
    def types(self) -> dict[str, Any]:
        import polars as pl

        return dict.fromkeys(self.outputs, pl.Int8)

    def learn(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> LearnedTable:
        import polars as pl

        if self.values:
            return LearnedTable(table=pl.DataFrame({"value": list(self.values)}))
        # Distinct texts first: a list that many rows share is split once.
        lists = rows.group_by(pl.col(self.column).cast(pl.String).alias("value")).agg(pl.len().alias("count"))
        pieces = lists.with_columns(pl.col("value").str.split(self.separator).list.unique()).explode("value")
        counted = pieces.filter(pl.col("value").str.len_bytes() > 0).group_by("value").agg(pl.col("count").sum())
        found = collect(counted, engine).sort("count", "value", descending=[True, False])
        return LearnedTable(table=found.head(self.most or 0).cast({"count": pl.Int64}))

    def attach(self, frame: pl.LazyFrame, learned: LearnedTable, train: pl.Expr | None = None) -> pl.LazyFrame:
        import polars as pl

        values = learned.table.get_column("value")

        def marked(series: pl.Series) -> pl.Series:
            return pl.DataFrame(dict(zip(self.outputs, self._marks(series, values), strict=True))).to_struct("__made")

        column = pl.col(self.column).cast(pl.String)
        made = column.map_batches(marked, return_dtype=pl.Struct(self.types), is_elementwise=True)
        return frame.with_columns(made.alias("__made")).unnest("__made")

    def _marks(self, series: pl.Series, values: pl.Series) -> Any:
        """Int8 [columns, n]: each distinct text is looked at once."""
        import polars as pl

        encoded = series.rechunk().to_arrow().dictionary_encode(null_encoding="encode")
        distinct = pl.Series("text", pl.from_arrow(encoded.dictionary), dtype=pl.String)
        pieces = distinct.to_frame().with_row_index("at").select(
            "at", value=pl.col("text").str.split(self.separator)
        ).explode("value")  # fmt: skip
        known = pl.DataFrame({"value": values}).with_row_index("column")
        hits = pieces.join(known, on="value", how="inner")
        marks = np.zeros((len(self.outputs), max(1, len(distinct))), np.int8)
        marks[hits["column"].to_numpy(), hits["at"].to_numpy()] = 1
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        return marks[:, codes]
