"""Logs of positives only: Taobao behaviour, Online Retail invoices, Globo clicks.

Every user belongs to one of 32 groups, every item too. With probability ``0.6 * signal / 1.3`` a user takes
an item of the own group, else any item, by popularity each time. The chance of an item given the user is
therefore known, and so is the best score for telling the taken item from a uniformly drawn one: the ratio of
the two chances.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.base import draw
from stoker.synthetic import text
from stoker.synthetic.clicks import Options
from stoker.synthetic.curve import Sampler, zipf
from stoker.synthetic.formats import Part, Source

__all__ = ["globo", "online_retail", "taobao"]

_GROUPS = 32
_TASK = "the taken item against one item drawn uniformly from all, given the user"


class _Taste:
    """Draws items for users by group and popularity, and knows how likely each was."""

    def __init__(self, options: Options, num_items: int) -> None:
        self.options = options
        self.per_group = max(2, num_items // _GROUPS)
        self.num_items = self.per_group * _GROUPS
        self.anywhere = options.sampler(self.num_items)
        self.own = options.sampler(self.per_group)
        self.loyalty = min(0.95, 0.6 * options.signal / 1.3)

    def group(self, users: NDArray[np.int64]) -> NDArray[np.int64]:
        return draw.integers(draw.key_of(self.options.world, "group"), users, _GROUPS)

    def items(self, rows: NDArray[np.int64], users: NDArray[np.int64]) -> tuple[NDArray, NDArray, NDArray]:
        """Items taken in these rows, then the best logits of taken and of uniformly drawn items, [n] each."""
        seed = self.options.seed
        group = self.group(users)
        chance = draw.uniform(draw.key_of(seed, "item"), rows)
        loyal = draw.uniform(draw.key_of(seed, "loyal"), rows) < self.loyalty
        taken = np.where(loyal, self.own(chance) * _GROUPS + group, self.anywhere(chance))
        other = draw.integers(draw.key_of(seed, "other"), rows, self.num_items)
        held = self.options.drifted(taken, rows, self.num_items, groups=_GROUPS)
        return held, self._logit(taken, group), self._logit(other, group)

    def _logit(self, items: NDArray[np.int64], group: NDArray[np.int64]) -> NDArray[np.float64]:
        chance = (1 - self.loyalty) * self.anywhere.share(items)
        chance = chance + np.where(items % _GROUPS == group, self.loyalty * self.own.share(items // _GROUPS), 0.0)
        return np.asarray(np.log(np.maximum(chance * self.num_items, 1e-9)))


def _pairs(taken: NDArray, other: NDArray) -> tuple[NDArray, NDArray]:
    labels = np.concatenate([np.ones(len(taken), dtype=bool), np.zeros(len(other), dtype=bool)])
    return np.concatenate([taken, other]), labels


_HISTORIES = (2, 5, 13, 30, 60, 120, 250, 520)  # rows of eight users; the pattern repeats


def taobao(options: Options) -> Source:
    """UserBehavior CSV (user, item, category, behaviour, time) without header, grouped by user."""
    length = sum(_HISTORIES)
    user_of = np.repeat(np.arange(len(_HISTORIES)), _HISTORIES)
    place = np.concatenate([np.arange(size) for size in _HISTORIES])
    size_of = np.repeat(np.array(_HISTORIES), _HISTORIES)
    taste = _Taste(options, max(320, round(min(options.rows / 25, 4_162_024) * options.scale)))
    categories = max(8, min(9_439, taste.num_items // 100))

    def render(start: int, stop: int) -> Part:
        rows = np.arange(start, stop)
        at = rows % length
        user = rows // length * len(_HISTORIES) + user_of[at]
        items, best, other = taste.items(rows, user)
        category = draw.integers(draw.key_of(options.world, "category"), items, categories)
        behaviour = np.minimum(draw.integers(draw.key_of(options.seed, "behaviour"), rows, 40), 3)
        begin = draw.integers(draw.key_of(options.seed, "begin"), user, 300_000)
        when = 1_511_539_200 + begin + place[at] * (470_000 // size_of[at])
        fields = [text.whole(1 + user), text.whole(1 + items), text.whole(1 + category)]
        fields += [text.chosen(("buy", "cart", "fav", "pv"), behaviour), text.whole(when)]
        lines, starts = text.joined(fields, ",")
        logits, labels = _pairs(best, other)
        return Part(block=lines, starts=starts, logits=logits, labels=labels)

    spoil = {"columns": 2, "number": 1, "utf8": 3}
    return Source(example="taobao.csv", files={"": (options.rows, render)}, task=_TASK, spoil=spoil)


_INVOICES = (3, 18, 7, 30, 1, 12, 45, 12)  # lines of eight invoices; the pattern repeats
_COUNTRIES = ("United Kingdom", "Germany", "France", "EIRE", "Spain", "Netherlands", "Belgium")


def online_retail(options: Options) -> Source:
    """Invoice lines with all columns as text, in Parquet: returns, unknown customers and postage included."""
    length = sum(_INVOICES)
    invoice_of = np.repeat(np.arange(len(_INVOICES)), _INVOICES)
    customers = max(10, round(options.rows / 100 * options.scale))
    taste = _Taste(options, max(320, round(min(options.rows / 60, 4_070) * options.scale)))
    customer_of = Sampler(zipf(0.5, customers))
    services = np.array(["POST", "M", "D", "C2"])

    def render(start: int, stop: int) -> Part:
        import pyarrow as pa

        seed = options.seed
        rows = np.arange(start, stop)
        invoice = rows // length * len(_INVOICES) + invoice_of[rows % length]
        customer = customer_of(draw.uniform(draw.key_of(seed, "customer"), invoice))
        items, best, other = taste.items(rows, customer)
        cancelled = draw.uniform(draw.key_of(seed, "cancelled"), invoice) < 0.02
        unknown = draw.uniform(draw.key_of(seed, "unknown"), invoice) < 0.2
        service = draw.uniform(draw.key_of(seed, "service"), rows) < 0.01
        quantity = 1 + draw.integers(draw.key_of(seed, "quantity"), rows, 24)
        seconds = 1_291_191_960 + invoice * 32_000_000 // max(options.rows * len(_INVOICES) // length, 1)
        price = 50 + draw.integers(draw.key_of(options.world, "price"), items, 1_500)
        code = np.where(
            service,
            services[draw.integers(draw.key_of(seed, "code"), rows, 4)],
            np.char.mod("%d", 10_000 + items),
        )
        number = np.char.mod("%d", 536_365 + invoice)
        of_country = draw.integers(draw.key_of(options.world, "country"), customer, 60)
        country = np.array(_COUNTRIES)[np.minimum(of_country, 6)]
        minutes = (seconds // 60 * 60).astype("datetime64[s]")
        columns = {
            "InvoiceNo": np.where(cancelled, np.char.add("C", number), number),
            "StockCode": code,
            "Description": np.char.add("ITEM ", code),
            "Quantity": np.char.mod("%d", np.where(cancelled, -quantity, quantity)),
            "InvoiceDate": np.char.replace(minutes.astype(str), "T", " "),
            "UnitPrice": np.char.mod("%.2f", price / 100),
            "CustomerID": np.char.mod("%d.0", 12_346 + customer),
            "Country": country,
        }
        empty = {"CustomerID": unknown}
        arrays = {
            name: pa.array(values.tolist(), pa.large_string(), mask=empty.get(name)) for name, values in columns.items()
        }
        use = ~(cancelled | unknown | service)
        logits, labels = _pairs(best[use], other[use])
        return Part(table=pa.table(arrays), logits=logits, labels=labels)

    return Source(example="online-retail.parquet", files={"": (options.rows, render)}, task=_TASK)


def globo(options: Options) -> Source:
    """Clicks in order of time, whole numbers in Parquet; with ``drift`` new articles come up all the time."""
    sessions = max(1, options.rows // 3)
    users = max(10, round(options.rows / 9 * options.scale))
    taste = _Taste(options, max(320, round(min(options.rows / 20, 46_033) * options.scale)))
    user_of = Sampler(zipf(0.5, users))
    attributes = {
        "environment": 3,
        "deviceGroup": 4,
        "os": 8,
        "country": 11,
        "region": 28,
        "referrer_type": 7,
    }

    def render(start: int, stop: int) -> Part:
        import pyarrow as pa

        seed = options.seed
        rows = np.arange(start, stop)
        session = rows // 3
        user = user_of(draw.uniform(draw.key_of(seed, "user"), session))
        items, best, other = taste.items(rows, user)
        begin = 1_506_826_800_000 + session * 1_300_000_000 // sessions
        columns: dict[str, Any] = {"user_id": user, "session_id": begin * 1000 + session % 1000}
        columns |= {"session_start": begin, "session_size": np.minimum(3, options.rows - session * 3)}
        columns |= {"click_article_id": items, "click_timestamp": begin + rows % 3 * 31_013}
        for name, size in attributes.items():
            few = np.minimum(draw.integers(draw.key_of(options.world, name), user, size * 4) // 2, size - 1)
            columns[f"click_{name}"] = 1 + few
        logits, labels = _pairs(best, other)
        table = pa.table({name: pa.array(values.astype(np.int64)) for name, values in columns.items()})
        return Part(table=table, logits=logits, labels=labels)

    return Source(example="globo.parquet", files={"": (options.rows, render)}, task=_TASK)
