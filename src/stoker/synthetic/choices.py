"""Logs in which somebody picks one of several shown items: clicks at trivago, impressions of EB-NeRD.

The pick is drawn from a softmax over utilities: position, a hidden worth of the item, and how the item's
group suits the user's. Each shown item is one example; its true probability is its softmax share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.base import draw
from stoker.synthetic import text
from stoker.synthetic.clicks import Options
from stoker.synthetic.curve import Sampler, zipf
from stoker.synthetic.formats import METADATA, Part, Source

__all__ = ["ebnerd", "trivago"]

_GROUPS = 32


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """Items shown in n choices, at most K each."""

    items: NDArray[np.int64]  # [n, K]
    shown: NDArray[np.bool_]  # [n, K]
    chance: NDArray[np.float64]  # [n, K] probability of being picked, 0 where not shown
    picked: NDArray[np.int64]  # [n] position

    def logits(self, which: NDArray[np.bool_]) -> NDArray[np.float64]:
        """True logit of every item that is chosen by ``which`` [n, K], in order of rows."""
        p = np.clip(self.chance[which], 1e-12, 1 - 1e-12)
        return np.asarray(np.log(p) - np.log1p(-p))


class _Chooser:
    """Draws what is shown and what is picked for any rows."""

    def __init__(self, options: Options, num_items: int, slots: int, position: float) -> None:
        self.options, self.slots, self.position = options, slots, position
        # Items of slot k are k modulo the number of slots, so that no item is shown twice in one list.
        self.per_slot = max(2, num_items // slots)
        self.sampler = options.sampler(self.per_slot)

    def __call__(self, rows: NDArray[np.int64], users: NDArray[np.int64], counts: NDArray[np.int64]) -> _Shown:
        key, seed, slots = draw.key_of, self.options.seed, self.slots
        cells = (rows[:, None] * slots + np.arange(slots)).ravel()
        rank = self.sampler(draw.uniform(key(seed, "shown"), cells))
        rank = self.options.drifted(rank, np.repeat(rows, slots), self.per_slot, "shown")
        turn = np.argsort(draw.bits(key(seed, "turn"), cells).reshape(-1, slots), axis=1)
        items = rank.reshape(-1, slots) * slots + turn
        shown = np.arange(slots) < counts[:, None]
        utility = self.utility(items, users)
        weight = np.where(shown, np.exp(utility), 0.0)
        chance = weight / weight.sum(axis=1, keepdims=True)
        threshold = draw.uniform(key(seed, "pick"), rows)[:, None]
        picked = np.minimum((np.cumsum(chance, axis=1) <= threshold).sum(axis=1), counts - 1)
        return _Shown(items=items, shown=shown, chance=chance, picked=picked)

    def utility(self, items: NDArray[np.int64], users: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return what the items of each list, [n, K], are worth to the list's user, by position too."""
        key, world = draw.key_of, self.options.world
        worth = draw.normal(key(world, "worth"), items.ravel()).reshape(items.shape).astype(np.float64)
        # How a group of items suits a group of users: one hidden number for each pair of groups.
        group = draw.integers(key(world, "user group"), users, _GROUPS)[:, None] * _GROUPS
        group = group + draw.integers(key(world, "item group"), items.ravel(), _GROUPS).reshape(items.shape)
        taste = draw.normal(key(world, "taste"), group.ravel()).reshape(items.shape).astype(np.float64)
        return np.asarray(self.options.signal * (0.6 * worth + 0.5 * taste - self.position * np.arange(self.slots)))


_SESSIONS = (4, 7, 3, 12, 6, 9, 5, 18)  # rows of eight sessions; the pattern repeats
_ACTIONS = ("interaction item image", "interaction item info", "interaction item rating", "search for item")
_FILTERS = ("", "Sort by Price", "Focus on Distance|Sort by Price", "Best Value", "Very Good Rating|Hotel")
_CITIES = (
    "Sydney, Australia",
    "Lyon, France",
    "Recife, Brazil",
    "Turin, Italy",
    "Tokyo, Japan",
    "Leeds, United Kingdom",
)


def trivago(options: Options) -> Source:
    """The RecSys Challenge 2019 session CSV: impressions and prices joined by ``|`` in click-out rows."""
    length = sum(_SESSIONS)
    step = np.concatenate([np.arange(1, size + 1) for size in _SESSIONS])
    session_of = np.repeat(np.arange(len(_SESSIONS)), _SESSIONS)
    last = np.concatenate([np.arange(size) == size - 1 for size in _SESSIONS])
    users = max(10, round(options.rows / 22 * options.scale))
    user_of = Sampler(zipf(0.3, users))
    chooser = _Chooser(options, max(100, round(min(options.rows / 15, 927_000) * options.scale)), 25, 0.08)
    cities = [f"{city} {n}" if n else city for n in range(60) for city in _CITIES]

    def render(start: int, stop: int) -> Part:
        rows = np.arange(start, stop)
        seed = options.seed
        session = rows // length * len(_SESSIONS) + session_of[rows % length]
        user = user_of(draw.uniform(draw.key_of(seed, "user"), session))
        click = last[rows % length] | (draw.uniform(draw.key_of(seed, "click"), rows) < 0.05)
        counts = np.minimum(1 + draw.integers(draw.key_of(seed, "count"), rows, 40), 25)
        shown = chooser(rows, user, counts)
        visible = shown.shown & click[:, None]
        item = shown.items[np.arange(len(rows)), np.where(click, shown.picked, 0)]
        # In a few click-outs the picked item is missing from the list, as in the real log.
        unlisted = draw.uniform(draw.key_of(seed, "unlisted"), rows) < 0.02
        reference = np.where(unlisted & click, chooser.per_slot * chooser.slots + 7, item)
        action = np.where(click, 0, 1 + draw.integers(draw.key_of(seed, "action"), rows, len(_ACTIONS)))
        price = 40 + draw.integers(draw.key_of(options.world, "price"), shown.items.ravel(), 260)
        fields = [text.hex8(draw.scatter32(1, user)), text.hex8(draw.scatter32(2, session))]
        fields += [text.whole(1_541_030_408 + rows * 518_000 // max(options.rows, 1))]
        fields += [text.whole(step[rows % length]), text.chosen(("clickout item", *_ACTIONS), action)]
        fields += [text.whole(1 + reference)]
        fields += [text.chosen(("AU", "BR", "DE", "FR", "IT", "JP", "UK", "US"), _of(seed, "platform", session, 8))]
        quoted = [f'"{city}"' for city in cities]
        fields += [text.chosen(quoted, _of(seed, "city", session, len(cities)))]
        fields += [text.chosen(("mobile", "desktop", "tablet"), _of(seed, "device", session, 3))]
        fields += [text.chosen(_FILTERS, _of(seed, "filters", rows, len(_FILTERS)))]
        fields += [_listed(1 + shown.items, visible), _listed(price.reshape(shown.items.shape), visible)]
        lines, starts = text.joined(fields, ",")
        use = visible & ~unlisted[:, None] & (counts > 1)[:, None]
        return Part(block=lines, starts=starts, logits=shown.logits(use))

    header = (
        "user_id,session_id,timestamp,step,action_type,reference,platform,city,device,current_filters,"
        "impressions,prices"
    )
    return Source(
        example="trivago.csv",
        files={"": (options.rows, render)},
        task="one shown item of a click-out with two or more candidates and the clicked one among them",
        header={"": header, METADATA: "item_id,properties"},
        metadata=(chooser.per_slot * chooser.slots, lambda start, stop: _properties(chooser, start, stop)),
        spoil={"columns": 4, "number": 2, "utf8": 9},
    )


_KINDS = ("Hotel", "Hostel", "Motel", "Resort", "Guest House", "Bed & Breakfast", "Apartment", "Boat")
_SETS, _VARIANTS = 24, 6  # of amenities; with 5 classes of stars and 8 kinds, 157 properties as in the real file


def _properties(chooser: _Chooser, start: int, stop: int) -> Part:
    """Lines of ``item_metadata.csv``: stars follow the item's worth, kind its group, amenities its popularity.

    Items whose popularity ranks have the same power of two prefer the same amenity of each set.
    """
    world = chooser.options.world
    item = np.arange(start, stop)
    stars = np.searchsorted(np.array([-0.84, -0.25, 0.25, 0.84]), draw.normal(draw.key_of(world, "worth"), item))
    fields = [text.chosen([f"{n} Star" for n in range(1, 6)], stars)]
    fields.append(text.chosen([f"|{kind}" for kind in _KINDS], _of(world, "item group", item, _GROUPS) % len(_KINDS)))
    popularity = np.log2(item // chooser.slots + 1).astype(np.int64)
    for number in range(_SETS):
        usual = _of(world, f"usual amenity {number}", popularity, _VARIANTS)
        other = _of(world, f"other amenity {number}", item, _VARIANTS)
        variant = np.where(_of(world, f"is usual {number}", item, 10) < 7, usual, other)
        absent = _of(world, f"amenity {number}", item, 2) == 0
        names = ["", *(f"|Amenity {number * _VARIANTS + n}" for n in range(1, _VARIANTS + 1))]
        fields.append(text.chosen(names, np.where(absent, 0, 1 + variant)))
    lines, starts = text.joined([text.whole(1 + item), np.concatenate(fields, axis=1)], ",")
    return Part(block=lines, starts=starts)


def _of(seed: int, name: str, parents: NDArray[np.int64], below: int) -> NDArray[np.int64]:
    return draw.integers(draw.key_of(seed, name), parents, below)


def _listed(values: NDArray[np.int64], shown: NDArray[np.bool_]) -> text.Bytes:
    """Numbers of a row joined by ``|``: [n, K] to text; the shown ones must come first."""
    rows, slots = values.shape
    digits = text.whole(values.ravel(), ~shown.ravel()).reshape(rows, slots, -1)
    bars = np.where(shown, np.uint8(ord("|")), np.uint8(0))
    bars[:, 0] = 0
    return np.concatenate([bars[:, :, None], digits], axis=2).reshape(rows, -1)


def ebnerd(options: Options) -> Source:
    """Impressions and histories of two weeks as four Parquet files in a directory; rows count impressions."""
    slots, history = 24, 30
    users = max(20, round(options.rows / 16 * options.scale))
    articles = max(240, round(min(options.rows / 4, 125_000) * options.scale))
    chooser = _Chooser(options, articles, slots, 0.03)
    sampler = Sampler(zipf(0.6, users))
    half = options.rows // 2

    def behaviours(first: int) -> Any:
        def render(start: int, stop: int) -> Part:
            rows = np.arange(first + start, first + stop)
            user = sampler(draw.uniform(draw.key_of(options.seed, "user"), rows))
            counts = 5 + _of(options.seed, "count", rows, slots - 4)
            shown = chooser(rows, user, counts)
            return Part(table=_impressions(options, rows, user, shown), logits=shown.logits(shown.shown))

        return render

    def histories(start: int, stop: int) -> Part:
        user = np.arange(start, stop)
        rows = options.rows + 1 + user  # a part of the row space that no impression uses
        lengths = 1 + _of(options.seed, "history", user, history)
        parts = [chooser(rows * 2 + k, user, np.full(len(user), slots)) for k in range(2)]
        items = np.concatenate([part.items[:, : history // 2] for part in parts], axis=1)
        return Part(table=_history_table(user, items, lengths))

    return Source(
        example="ebnerd",
        files={
            "train_behaviors.parquet": (half, behaviours(0)),
            "validation_behaviors.parquet": (options.rows - half, behaviours(half)),
            "train_history.parquet": (users, histories),
            "validation_history.parquet": (users, histories),
        },
        task="one shown article of an impression",
    )


_MONDAY = 1_684_364_400_000_000  # 2023-05-18 01:00 in microseconds since 1970; two weeks follow
_WEEK = 604_800_000_000


def _impressions(options: Options, rows: NDArray[np.int64], user: NDArray[np.int64], shown: _Shown) -> Any:
    import pyarrow as pa

    world = options.world
    clicked = shown.items[np.arange(len(rows)), shown.picked]
    when = _MONDAY + (rows.astype(np.float64) * (2 * _WEEK / max(options.rows, 1))).astype(np.int64)
    unknown = _of(world, "unknown", user, 10) < 9

    def listed(values: NDArray, offsets: NDArray) -> Any:
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values, pa.int32()))

    def of_user(name: str, below: int) -> Any:
        return pa.array(_of(world, name, user, below).astype(np.int8), mask=unknown)

    ends = np.concatenate([[0], np.cumsum(shown.shown.sum(axis=1))])
    reading = (shown.chance[np.arange(len(rows)), shown.picked] * 100).astype(np.float32)
    columns = {
        "impression_id": pa.array(rows.astype(np.uint32)),
        "article_id": pa.nulls(len(rows), pa.int32()),
        "impression_time": pa.array(when, pa.timestamp("us")),
        "read_time": pa.array(reading),
        "scroll_percentage": pa.nulls(len(rows), pa.float32()),
        "device_type": pa.array((1 + _of(world, "device", user, 3)).astype(np.int8)),
        "article_ids_inview": listed(1000 + shown.items[shown.shown], ends),
        "article_ids_clicked": listed(1000 + clicked, np.arange(len(rows) + 1)),
        "user_id": pa.array((1 + user).astype(np.uint32)),
        "is_sso_user": pa.array(_of(world, "sso", user, 3) == 0),
        "gender": of_user("gender", 2),
        "postcode": of_user("postcode", 5),
        "age": of_user("age", 10),
        "is_subscriber": pa.array(_of(world, "subscriber", user, 5) == 0),
        "session_id": pa.array((rows // 3).astype(np.uint32)),
        "next_read_time": pa.array(reading + 1),
        "next_scroll_percentage": pa.array(reading),
    }
    return pa.table(columns)


def _history_table(user: NDArray[np.int64], items: NDArray[np.int64], lengths: NDArray[np.int64]) -> Any:
    import pyarrow as pa

    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    kept = np.arange(items.shape[1]) < lengths[:, None]
    when = np.broadcast_to(_MONDAY - _WEEK * 3 + np.arange(items.shape[1]) * (_WEEK // 20), items.shape)
    size = int(lengths.sum())

    def listed(values: Any) -> Any:
        return pa.LargeListArray.from_arrays(offsets, values)

    return pa.table(
        {
            "user_id": pa.array((1 + user).astype(np.uint32)),
            "impression_time_fixed": listed(pa.array(when[kept], pa.timestamp("us"))),
            "scroll_percentage_fixed": listed(pa.array(np.full(size, 50, dtype=np.float32))),
            "article_id_fixed": listed(pa.array((1000 + items[kept]).astype(np.int32))),
            "read_time_fixed": listed(pa.array(np.full(size, 20, dtype=np.float32))),
        }
    )
