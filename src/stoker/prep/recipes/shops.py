"""Recipes for logs of positives only: Online Retail's purchases and Taobao's touches, with sampled negatives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from stoker.base.errors import DataError
from stoker.dataset.manifest import SPLITS
from stoker.prep.features.past import lists_of, previous_values
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.recipes import rows as tools
from stoker.prep.recipes.draw import bits, integers, key_of
from stoker.prep.recipes.rows import LOGGED, Histories, Ints, PastCounts, categorical, dense
from stoker.prep.schema import Label, Schema, SequenceColumn
from stoker.prep.source_format import SourceFormat

_RAW = ("InvoiceNo", "StockCode", "Description", "Quantity", "InvoiceDate", "UnitPrice", "CustomerID", "Country")
_DAY = 1_440  # minutes


def online_retail(preset: str = "popular", *, negatives: int = 4, history: int = 20, seed: int = 0) -> Recipe:
    """Online Retail, a year of a British wholesaler: will this customer buy this item?

    Each purchase gets ``negatives``, drawn by popularity ** 0.75 ("popular") or evenly ("uniform") from the items that
    the customer never buys in the whole log and that are on sale at that time.

    "first-purchase" keeps only a customer's first purchase of each item. In the other presets a third of the positives
    repeat an earlier purchase, which no negative does.
    """
    return Recipe(
        name="online-retail",
        description="UCI Online Retail: will this customer buy this item; sampled negatives",
        presets={name: partial(_retail, name) for name in ("popular", "uniform", "first-purchase")},
        preset=preset,
        inputs={
            "invoices": RawInput(
                columns=dict.fromkeys(_RAW, "string"), required=("InvoiceNo", "StockCode", "InvoiceDate")
            )
        },
        derive=partial(_retail_rows, count=negatives, history=history, seed=seed),
        example="stoker prepare online-retail data/online_retail/invoices.parquet --out runs/online_retail",
        source="UCI Machine Learning Repository, Online Retail, D. Chen 2015, CC BY 4.0",
    )


def _retail(preset: str) -> Schema:
    return Schema(
        name=f"online-retail/{preset}",
        label=Label(column="label"),
        dense=(
            *dense(("price", "days_since"), *LOGGED, fill="mean"),
            *dense(("earlier_invoices", "item_popularity", "item_month", "item_week"), *LOGGED),
        ),
        categorical=(
            *categorical(("customer", "item", "country"), "string"),
            *categorical(("hour", "weekday", "month")),
        ),
        sequence=(SequenceColumn(name="bought", table="item", max_length=20),),
        split=tools.split_column(),
    )


def _purchases(raw: pl.LazyFrame) -> pl.DataFrame:
    """Return one row per customer, item and minute, by time and line; without returns, services, unknown customers."""
    customer = pl.col("CustomerID").cast(pl.String).str.strip_suffix(".0")
    item = pl.col("StockCode").cast(pl.String).str.strip_chars().str.to_uppercase()
    when = pl.col("InvoiceDate").cast(pl.String).str.slice(0, 16).str.to_datetime("%Y-%m-%d %H:%M", strict=False)
    return (
        raw.with_row_index("line")
        .filter(
            (pl.col("Quantity").cast(pl.String).cast(pl.Float64, strict=False) > 0)
            & customer.str.contains(r"^\d+$")
            & ~pl.col("InvoiceNo").cast(pl.String).str.starts_with("C")
            & item.str.contains(r"^\d{5}[A-Z]*$")
            & when.is_not_null()
        )
        .select(
            "line",
            customer=customer,
            item=item,
            country=pl.col("Country").cast(pl.String).fill_null("Unspecified"),
            minute=when.dt.epoch("s") // 60,
            price=pl.col("UnitPrice").cast(pl.String).cast(pl.Float64, strict=False).fill_null(0.0),
        )
        .unique(["customer", "item", "minute"], keep="first", maintain_order=True)
        .sort("minute", "line")
        .collect(engine="streaming")
    )


def _retail_rows(
    inputs: Mapping[str, pl.LazyFrame], schema: Schema, *, count: int, history: int, seed: int
) -> pl.LazyFrame:
    """Return purchases in order of time, each followed by its negatives. Memory: 200 bytes a purchase."""
    log = _purchases(inputs["invoices"])
    if log.height == 0:
        raise DataError(
            "no line of the invoices is a purchase: a stock code of five digits, a known customer and a "
            "quantity above 0. Is this the Online Retail file?"
        )
    items = log["item"].unique().sort()
    item = items.search_sorted(log["item"]).to_numpy().astype(np.int64)
    customer, minute = log["customer"].rank("dense").to_numpy().astype(np.int64) - 1, log["minute"].to_numpy()
    past = Histories.find(customer, minute)
    invoice = np.cumsum((past.stop == past.place)[past.order])  # by place: a number for each customer and minute
    earlier, later = (invoice[past.place] - invoice[past.first], invoice[past.end - 1] - invoice[past.place])
    # The last invoice tests, the one before validates; every customer has at least one to train on.
    split = np.where((earlier == 0) | (later > 1), 0, np.where(later == 0, 2, 1))
    last = minute[past.order[np.maximum(past.stop - 1, 0)]]
    days_since = np.where(past.stop > past.first, (minute - last) / _DAY, np.nan)
    _, first = np.unique(customer * len(items) + item, return_index=True)
    preset = schema.name.partition("/")[2]
    positives = np.sort(first) if preset == "first-purchase" else np.arange(len(item))
    others = _never_bought(customer, item, minute, positives, count, seed, evenly=preset == "uniform")
    sold = PastCounts(item, minute)
    paid = (split == 0) & (log["price"].to_numpy() > 0)  # an item's price is the mean over its training purchases
    times = np.bincount(item[paid], minlength=len(items))
    total = np.bincount(item[paid], log["price"].to_numpy()[paid], minlength=len(items))
    price = np.where(times > 0, total / np.maximum(times, 1), np.nan)
    bought = item[past.order]

    def make(start: int, stop: int) -> pl.DataFrame:
        number, code, label = tools.with_negatives(item[positives[start:stop]], others[start:stop])
        row = positives[start:stop][number]
        moment = minute[row]
        flat, lengths = previous_values(bought, past.first[row], past.stop[row], history)
        clock = pl.Series(moment * 60_000).cast(pl.Datetime("ms")).dt
        return pl.DataFrame(
            {
                "label": label,
                "time": moment * 60,
                "customer": log["customer"].gather(row),
                "item": items.gather(code),
                "country": log["country"].gather(row),
                "hour": clock.hour(),
                "weekday": clock.weekday(),
                "month": clock.month(),
                "bought": lists_of(items.gather(flat), lengths),
                "price": pl.Series(price[code]).fill_nan(None),
                "days_since": pl.Series(days_since[row]).fill_nan(None),
                "earlier_invoices": earlier[row],
                "item_popularity": sold.before(code, moment),
                "item_month": sold.before(code, moment, window=28 * _DAY),
                "item_week": sold.before(code, moment, window=7 * _DAY),
                "split": np.array(SPLITS)[split[row]],
            }
        )

    return tools.streamed(len(positives), make, step=16_384)


def _never_bought(
    customer: Ints, item: Ints, minute: Ints, positives: Ints, count: int, seed: int, *, evenly: bool
) -> Ints:
    """Draw items on sale at each positive's time that its customer never buys, [P, count]; -1: none found."""
    times_sold = np.bincount(item).astype(np.float64)
    size = len(times_sold)
    shares = np.cumsum(np.ones_like(times_sold) if evenly else times_sold**0.75)
    shares /= shares[-1]
    # An item that is not on sale would be recognised as a negative by that alone.
    first_sale, last_sale = np.full(size, np.iinfo(np.int64).max), np.full(size, -1)
    np.minimum.at(first_sale, item, minute)
    np.maximum.at(last_sale, item, minute)
    owned = np.unique(customer * size + item)

    def draw(chance: Any, rows: Ints) -> Ints:
        return np.asarray(np.minimum(np.searchsorted(shares, chance, side="right"), size - 1))

    def refused(items: Ints, rows: Ints) -> Any:
        at = positives[rows // count]
        off_sale = (first_sale[items] > minute[at]) | (last_sale[items] < minute[at])
        return off_sale | tools.among(customer[at] * size + items, owned)

    return tools.negatives(seed, len(positives) * count, draw, refused).reshape(-1, count)


WINDOW = 20  # touches before the target
_HISTORY = 200  # last touches of a user that are used
_TRAIN_SHARE = 0.7  # of the users, by the time of their last touch
# From this many touches on, a user gives this many positive points, and as many negative ones.
_POINTS = ((101, 10), (51, 6), (21, 3), (5, 1))
_LEAST = 4  # touches before every target
_GROUP_ROWS = 8_000_000  # log lines in memory at a time, about 200 bytes each
_BATCH = 8_192
_COLUMNS = {"user": "int", "item": "int", "category": "int", "behaviour": "string", "time": "int"}
_TAOBAO: dict[str, Any] = {
    "label": pl.Int8, "user": pl.Int64, "item": pl.Int64, "category": pl.Int64, "items": pl.List(pl.Int64),
    "categories": pl.List(pl.Int64), "position": pl.Float64, "time": pl.Int64, "split": pl.String,
}  # fmt: skip


def taobao(preset: str = "tbsm", *, seed: int = 0) -> Recipe:
    """Taobao UserBehavior: after these 20 touches, does the user touch this item next?

    As for TBSM, with two corrections: no user is in two splits, and no window has a touch as late as its target. The
    last 30 % of users validate and test.
    """
    log = RawInput(
        format=SourceFormat(kind="csv", separator=",", columns=tuple(_COLUMNS), quote=None),
        columns=_COLUMNS,
        required=("user", "item", "category", "time"),
    )
    return Recipe(
        name="taobao",
        description="Taobao UserBehavior: next touched item after a window of 20, negatives never touched",
        presets={"tbsm": _tbsm},
        preset=preset,
        inputs={"log": log},
        derive=partial(_taobao_rows, seed=seed),
        example="stoker prepare taobao UserBehavior.csv --out data/taobao",
        source="Alibaba Tianchi, User Behavior Data from Taobao",
    )


def _tbsm() -> Schema:
    return Schema(
        name="taobao",
        label=Label(column="label"),
        dense=dense(("position",)),
        categorical=categorical(("user", "item", "category")),
        sequence=tuple(
            SequenceColumn(name=name, type="int", table=table, max_length=WINDOW)
            for name, table in (("items", "item"), ("categories", "category"))
        ),
        split=tools.split_column(),
    )


class _Whole(NamedTuple):
    """Facts about the whole log, 16 bytes an item."""

    items: Ints  # distinct items, rising
    categories: Ints  # category of each
    threshold: int  # users whose last touch is not later train
    groups: int  # groups of users that are read one after another


def _taobao_rows(inputs: Mapping[str, pl.LazyFrame], schema: Schema, *, seed: int) -> pl.LazyFrame:
    """Return windows by group of users, then user, then time, with one pass over the log for each 8 M lines."""
    log = inputs["log"].select(pl.col("user", "item", "category", "time").cast(pl.Int64))
    last = log.group_by("user").agg(pl.col("time").max(), pl.len().alias("lines")).collect(engine="streaming")
    if last.height == 0:
        raise DataError("there is no touch in the input.")
    catalogue = log.group_by("item").agg(pl.col("category").min()).collect(engine="streaming").sort("item")
    whole = _Whole(
        items=catalogue["item"].to_numpy(),
        categories=catalogue["category"].to_numpy(),
        threshold=int(last["time"].sort()[max(0, int(np.ceil(_TRAIN_SHARE * last.height)) - 1)]),
        groups=max(1, -(-int(last["lines"].sum()) // _GROUP_ROWS)),
    )
    return tools.from_batches(
        _TAOBAO, lambda: (frame for group in range(whole.groups) for frame in _windows(log, whole, group, seed))
    )


def _windows(log: pl.LazyFrame, whole: _Whole, group: int, seed: int) -> Iterator[pl.DataFrame]:
    if whole.groups > 1:
        log = log.filter(tools.pick(0, "taobao group", "user", whole.groups) == group)
    part = log.collect(engine="streaming").sort("user", "time", "item", "category")
    if part.height == 0:
        return
    user, item, category, time = (part[name].to_numpy() for name in ("user", "item", "category", "time"))
    # Touches of one second have no order: a window ends before its target's second.
    past = Histories.find(user, time)
    first = np.maximum(past.first, past.end - _HISTORY)
    target = _targets(user, past.stop - first, past.end - first, key_of(seed, "taobao target", group))
    other = _untouched(user, item, target, whole, key_of(seed, "taobao negative", group))
    target, other = target[other >= 0], other[other >= 0]
    half = 1 + integers(key_of(0, "taobao half"), user[target], 2)
    split = np.where(time[past.end[target] - 1] <= whole.threshold, 0, half)
    for begin in range(0, len(target), _BATCH):
        positive, negative = target[begin : begin + _BATCH], other[begin : begin + _BATCH]
        at = np.repeat(positive, 2)
        items, lengths = previous_values(item, first[at], past.stop[at], WINDOW)
        categories, _ = previous_values(category, first[at], past.stop[at], WINDOW)
        frame = pl.DataFrame(
            {
                "label": np.tile(np.array([1, 0]), len(positive)),
                "user": user[at],
                "item": np.column_stack([item[positive], whole.items[negative]]).ravel(),
                "category": np.column_stack([category[positive], whole.categories[negative]]).ravel(),
                "items": lists_of(pl.Series(items), lengths),
                "categories": lists_of(pl.Series(categories), lengths),
                "position": (lengths + 1) / (WINDOW + 1),
                "time": time[at],
                "split": np.array(SPLITS)[np.repeat(split[begin : begin + _BATCH], 2)],
            }
        )
        yield frame.cast(pl.Schema(_TAOBAO))


def _targets(user: Ints, before: Ints, length: Ints, key: int) -> Ints:
    """Return the places of positive targets in order: for each user a random choice, more for a longer history."""
    points = np.select([length >= least for least, _ in _POINTS], [count for _, count in _POINTS], 0)
    fit = np.flatnonzero((before >= _LEAST) & (points > 0))
    fit = fit[np.lexsort((bits(key, fit), user[fit]))]
    number = np.arange(len(fit)) - np.searchsorted(user[fit], user[fit])
    return np.sort(fit[number < points[fit]])


def _untouched(user: Ints, item: Ints, target: Ints, whole: _Whole, key: int) -> Ints:
    """Draw for each target an item that its user never touches, as a place in the catalogue; -1 where none is found."""
    _, owner = np.unique(user, return_inverse=True)
    size = len(whole.items)
    touched = np.unique(owner * size + np.searchsorted(whole.items, item))

    def draw(chance: Any, rows: Ints) -> Ints:
        return np.asarray((chance * size).astype(np.int64))

    def refused(items: Ints, rows: Ints) -> Any:
        return tools.among(owner[target[rows]] * size + items, touched)

    return tools.negatives(key, len(target), draw, refused)
