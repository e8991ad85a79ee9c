"""UCI Online Retail: will this customer buy this item? A year of a British gift wholesaler's invoices.

The log holds purchases only. A positive row is an item on a customer's invoice; its negatives are items that
the customer never buys in the whole log, were on sale at that moment, and are drawn by popularity ** 0.75.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stoker.base.errors import DataError
from stoker.prep.features.lists import lists_of, previous_values
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.recipes.rows import PastCounts, one_of, streamed
from stoker.prep.recipes.rows import negatives as draw_negatives
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule

__all__ = ["online_retail"]

_RAW = (
    *("InvoiceNo", "StockCode", "Description", "Quantity"),
    *("InvoiceDate", "UnitPrice", "CustomerID", "Country"),
)
_DAY = 1_440  # minutes
_SPLITS = ("train", "valid", "test")
_OUT = {
    "label": pl.Int8,
    "time": pl.Int64,
    "customer": pl.String,
    "item": pl.String,
    "country": pl.String,
    "hour": pl.Int64,
    "weekday": pl.Int64,
    "month": pl.Int64,
    "bought": pl.List(pl.String),
    "price": pl.Float64,
    "days_since": pl.Float64,
    "earlier_invoices": pl.Int64,
    "item_popularity": pl.Int64,
    "item_month": pl.Int64,
    "item_week": pl.Int64,
    "split": pl.String,
}


def _schema(name: str) -> Schema:
    scaled = ("log1p", "zscore")
    return Schema(
        name=f"online-retail/{name}",
        label=Label(column="label"),
        dense=(
            DenseColumn(name="price", fill="mean", transforms=scaled),
            DenseColumn(name="days_since", fill="mean", transforms=scaled),
            DenseColumn(name="earlier_invoices", transforms=scaled),
            DenseColumn(name="item_popularity", transforms=scaled),
            DenseColumn(name="item_month", transforms=scaled),
            DenseColumn(name="item_week", transforms=scaled),
        ),
        categorical=(
            *(CategoricalColumn(name=column, type="string") for column in ("customer", "item", "country")),
            *(CategoricalColumn(name=column, type="int") for column in ("hour", "weekday", "month")),
        ),
        sequence=(SequenceColumn(name="bought", type="string", table="item", max_length=20),),
        split=SplitRule(rule="column", column="split", values={split: split for split in _SPLITS}),
    )


def online_retail(preset: str = "popular", *, negatives: int = 4, history: int = 20, seed: int = 0) -> Recipe:
    """Online Retail with ``negatives`` per purchase, drawn by popularity ("popular") or evenly ("uniform").

    "first-purchase" keeps only a customer's first purchase of each item: otherwise a third of the positives
    repeat an earlier purchase, which by construction no negative does.
    """
    presets = ("popular", "uniform", "first-purchase")
    return Recipe(
        name="online-retail",
        description="UCI Online Retail: will this customer buy this item; sampled negatives",
        presets={name: partial(_schema, name) for name in presets},
        preset=preset,
        inputs={
            "invoices": RawInput(
                columns=dict.fromkeys(_RAW, "string"), required=("InvoiceNo", "StockCode", "InvoiceDate")
            )
        },
        derive=partial(_derive, count=negatives, history=history, seed=seed),
        example="stoker prepare online-retail data/online_retail/invoices.parquet --out runs/online_retail",
        source="UCI Machine Learning Repository, Online Retail, D. Chen 2015, CC BY 4.0",
    )


@dataclass(frozen=True, kw_only=True)
class _Log:
    """Purchases in order of time as arrays [P]; customers and items as codes in the order of their names."""

    customers: pl.Series
    items: pl.Series
    countries: pl.Series
    customer: NDArray[np.int64]
    item: NDArray[np.int64]
    country: NDArray[np.int64]
    minute: NDArray[np.int64]  # since 1970
    price: NDArray[np.float64]
    split: NDArray[np.int64]  # 0 train, 1 valid, 2 test
    earlier_invoices: NDArray[np.int64]
    days_since: NDArray[np.float64]  # NaN on a customer's first invoice
    by_customer: NDArray[np.int64]  # purchase numbers by customer, then time
    history_first: NDArray[np.int64]  # places in by_customer: where the customer's purchases begin
    history_stop: NDArray[np.int64]  # and where those strictly before this moment end
    repeats: NDArray[np.bool_]  # whether the customer bought the item before


def _purchases(raw: pl.LazyFrame) -> pl.DataFrame:
    """One row per customer, item and minute, by time and line; no returns, unknown customers, services."""
    when = pl.col("InvoiceDate").cast(pl.String).str.slice(0, 16)
    return (
        raw.with_row_index("line")
        .select(
            "line",
            customer=pl.col("CustomerID").cast(pl.String).str.strip_suffix(".0"),
            item=pl.col("StockCode").cast(pl.String).str.strip_chars().str.to_uppercase(),
            country=pl.col("Country").cast(pl.String).fill_null("Unspecified"),
            minute=when.str.to_datetime("%Y-%m-%d %H:%M", strict=False).dt.epoch("s") // 60,
            price=pl.col("UnitPrice").cast(pl.String).cast(pl.Float64, strict=False).fill_null(0.0),
            quantity=pl.col("Quantity").cast(pl.String).cast(pl.Float64, strict=False),
            cancelled=pl.col("InvoiceNo").cast(pl.String).str.starts_with("C"),
        )
        .filter(
            (pl.col("quantity") > 0)
            & pl.col("customer").str.contains(r"^\d+$")
            & ~pl.col("cancelled")
            & pl.col("item").str.contains(r"^\d{5}[A-Z]*$")
            & pl.col("minute").is_not_null()
        )
        .unique(["customer", "item", "minute"], keep="first", maintain_order=True)
        .sort("minute", "line")
        .collect(engine="streaming")
    )


def _read(raw: pl.LazyFrame) -> _Log:
    frame = _purchases(raw)
    if frame.height == 0:
        raise DataError(
            "no line of the invoices is a purchase: a stock code of five digits, a known customer and a "
            "quantity above 0. Is this the Online Retail file?"
        )
    customers, customer = _codes(frame["customer"])
    items, item = _codes(frame["item"])
    countries, country = _codes(frame["country"])
    minute = frame["minute"].to_numpy()
    order = np.argsort(customer, kind="stable")
    c, t = customer[order], minute[order]
    places = np.arange(len(c))
    new_customer = np.concatenate([[True], c[1:] != c[:-1]])
    new_invoice = new_customer | np.concatenate([[True], t[1:] != t[:-1]])
    first = np.maximum.accumulate(np.where(new_customer, places, 0))
    stop = np.maximum.accumulate(np.where(new_invoice, places, 0))
    visit = np.cumsum(new_invoice)
    visit -= visit[first]  # number of the customer's invoice, from 0
    visits = np.zeros(len(customers), dtype=np.int64)
    np.maximum.at(visits, c, visit + 1)
    from_end = visits[c] - 1 - visit
    # The last invoice tests, the one before validates, and every customer keeps at least one to train on.
    test, valid = (from_end == 0) & (visits[c] > 1), (from_end == 1) & (visits[c] > 2)
    gap = np.where(stop > first, (t - t[np.maximum(stop - 1, 0)]) / _DAY, np.nan)
    repeats = np.ones(len(item), dtype=bool)
    repeats[np.unique(customer * len(items) + item, return_index=True)[1]] = False
    back = np.empty_like(order)
    back[order] = places
    return _Log(
        customers=customers,
        items=items,
        countries=countries,
        customer=customer,
        item=item,
        country=country,
        minute=minute,
        price=frame["price"].to_numpy(),
        split=np.where(test, 2, np.where(valid, 1, 0))[back],
        earlier_invoices=visit[back],
        days_since=gap[back],
        by_customer=order,
        history_first=first[back],
        history_stop=stop[back],
        repeats=repeats,
    )


def _codes(values: pl.Series) -> tuple[pl.Series, NDArray[np.int64]]:
    names = values.unique().sort()
    return names, np.asarray(names.search_sorted(values).to_numpy(), dtype=np.int64)


def _derive(inputs: Mapping[str, pl.LazyFrame], schema: Schema, *, count: int, history: int, seed: int) -> pl.LazyFrame:
    """Purchases in order of time, each followed by its negatives. Memory: 200 bytes a purchase."""
    log = _read(inputs["invoices"])
    preset = schema.name.partition("/")[2]
    positives = np.arange(len(log.item))
    if preset == "first-purchase":
        positives = positives[~log.repeats]
    others = _negatives(log, positives, count, seed, evenly=preset == "uniform")
    sold = PastCounts(log.item, log.minute)
    price = _training_prices(log)
    bought = log.item[log.by_customer]

    def make(start: int, stop: int) -> pl.DataFrame:
        at = positives[start:stop]
        candidates = np.concatenate([log.item[at][:, None], others[start:stop]], axis=1).ravel()
        kept = candidates >= 0
        row, item = np.repeat(at, count + 1)[kept], candidates[kept]
        minute = log.minute[row]
        flat, lengths = previous_values(bought, log.history_first[row], log.history_stop[row], history)
        clock = pl.Series(minute * 60_000).cast(pl.Datetime("ms")).dt
        return pl.DataFrame(
            {
                "label": np.tile(np.arange(count + 1) == 0, len(at))[kept],
                "time": minute * 60,
                "customer": log.customers.gather(log.customer[row]),
                "item": log.items.gather(item),
                "country": log.countries.gather(log.country[row]),
                "hour": clock.hour(),
                "weekday": clock.weekday(),
                "month": clock.month(),
                "bought": lists_of(log.items.gather(flat), lengths),
                "price": pl.Series(price[item]).fill_nan(None),
                "days_since": pl.Series(log.days_since[row]).fill_nan(None),
                "earlier_invoices": log.earlier_invoices[row],
                "item_popularity": sold.before(item, minute),
                "item_month": sold.before(item, minute, window=28 * _DAY),
                "item_week": sold.before(item, minute, window=7 * _DAY),
                "split": one_of(_SPLITS, log.split[row]),
            }
        )

    return streamed(_OUT, len(positives), make, step=16_384)


def _training_prices(log: _Log) -> NDArray[np.float64]:
    """Mean price of each item over training purchases; NaN for an item without one."""
    paid = (log.split == 0) & (log.price > 0)
    total = np.bincount(log.item[paid], log.price[paid], minlength=len(log.items))
    times = np.bincount(log.item[paid], minlength=len(log.items))
    return np.where(times > 0, total / np.maximum(times, 1), np.nan)


def _negatives(log: _Log, positives: NDArray[np.int64], count: int, seed: int, *, evenly: bool) -> NDArray[np.int64]:
    """Items on sale at each positive's time, never bought by its customer, [P, count]; -1: none found."""
    times_sold = np.bincount(log.item, minlength=len(log.items)).astype(np.float64)
    shares = np.cumsum(np.ones_like(times_sold) if evenly else times_sold**0.75)
    shares /= shares[-1]
    # An item that is not sold yet, or no longer, would be recognised by that alone.
    first_sale = np.full(len(log.items), np.iinfo(np.int64).max)
    last_sale = np.full(len(log.items), -1)
    np.minimum.at(first_sale, log.item, log.minute)
    np.maximum.at(last_sale, log.item, log.minute)
    owned = np.unique(log.customer * len(log.items) + log.item)
    row_of = np.repeat(positives, count)

    def draw(chance: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum(np.searchsorted(shares, chance, side="right"), len(shares) - 1)

    def refused(items: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        at = row_of[rows]
        minute = log.minute[at]
        pair = log.customer[at] * len(log.items) + items
        place = np.minimum(np.searchsorted(owned, pair), len(owned) - 1)
        return np.asarray((owned[place] == pair) | (first_sale[items] > minute) | (last_sale[items] < minute))

    return draw_negatives(seed, len(row_of), draw, refused).reshape(-1, count)
