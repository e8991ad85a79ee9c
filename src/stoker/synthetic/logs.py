"""Render blocks of each raw format: row numbers in; text or an Arrow table, and true logits out.

A :class:`SyntheticSource` renders any rows of a log. There are three kinds of known truth:

* Clicks (Criteo, Avazu, MovieLens): a label with the probability of :class:`ClickLog`.
* Choices (trivago, EB-NeRD): a user picks one of several shown items, by a softmax over utilities. The utility depends
  on the position, a hidden worth of the item, and how well the item's group suits the user's group. Each shown item is
  one example; its true probability is its softmax share.
* Takings (Taobao, Online Retail, Globo), positives only: with probability ``0.6 * signal / 1.3`` a user takes an item
  of the user's own group, else any item; popular items are more likely in both cases. So the probability of an item
  given the user is known, and with it the best score that tells the taken item from a uniformly drawn one: the ratio
  of the two probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.prep.recipes import ads, draw, lists
from stoker.synthetic.clicks import ClickLog, IdColumn, NumberColumn, Options, Sampler, zipf

METADATA = "item metadata"  # the key of SyntheticSource.metadata in SyntheticSource.header
# Rows of the 26 Criteo Kaggle tables when all ids are kept (33.76 M).
KAGGLE_SIZES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306),
    *(10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
_GROUPS = 32  # of users, and of items

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]  # [n, width], 0 means no character


# Text is made a block at a time: every field is a matrix of bytes of fixed width, in which 0 means no character. The
# fields of a line are next to each other, and one pass over the block drops the zeros. This writes some hundred MB of
# text a second on one core.
_HEX = np.frombuffer(bytes(range(256)).hex().encode(), np.uint16)  # the two digits of each byte


def whole(values: NDArray, missing: NDArray[np.bool_] | None = None) -> Bytes:
    """Write whole numbers of any sign in decimal; nothing where ``missing``."""
    rest = np.abs(values)
    most = int(rest.max(initial=0))
    rest = rest.astype(np.min_scalar_type(most))  # narrow types are divided faster
    width = 4 * -(-len(str(most)) // 4)
    out = np.zeros((len(values), 1 + width), np.uint8)
    out[values < 0, 0] = ord("-")
    for place in range(width, 0, -1):
        higher = rest // 10
        digit = (rest - 10 * higher).astype(np.uint8) + np.uint8(ord("0"))
        out[:, place] = digit if place == width else digit * (rest > 0)
        rest = higher
    if missing is not None:
        out[missing] = 0
    return out if out[:, 0].any() else out[:, 1:]


def hex8(values: NDArray[np.uint32], missing: NDArray[np.bool_] | None = None) -> Bytes:
    """Write eight hexadecimal digits; nothing where ``missing``."""
    out = _HEX[values.astype(">u4").view(np.uint8).reshape(-1, 4)]
    if missing is not None:
        out[missing] = 0
    return out.view(np.uint8)


def chosen(texts: Sequence[str], index: NDArray[np.int64]) -> Bytes:
    """Return ``texts[index]``, for a short list of texts."""
    table = np.array([text.encode() for text in texts])  # NumPy pads to one width with zero bytes
    return table.view(np.uint8).reshape(len(texts), -1)[index]


def constant(text: str, rows: int) -> Bytes:
    """Return the same text for every row."""
    return np.broadcast_to(np.frombuffer(text.encode(), dtype=np.uint8), (rows, len(text.encode())))


def joined(fields: Sequence[Bytes], separator: str) -> tuple[Bytes, list[int]]:
    """Join fields with separators and a line feed at the end; return lines and where each field starts."""
    rows = len(fields[0])
    mark, end = constant(separator, rows), constant("\n", rows)
    columns = [column for field in fields for column in (field, mark)]
    ends = np.cumsum([column.shape[1] for column in columns])
    return np.concatenate([*columns[:-1], end], axis=1), [0, *ends[1:-1:2].tolist()]


@dataclass(frozen=True, kw_only=True)
class RenderedBlock:
    """One rendered block of one file."""

    block: Bytes | None = None  # lines, see joined
    starts: list[int] = field(default_factory=list)  # first byte of each field
    table: Any = None  # a pyarrow.Table, for logs in Parquet
    logits: NDArray = field(default_factory=lambda: np.zeros(0))  # true logits of the labelled examples
    labels: NDArray | None = None  # None: drawn with the probability of the logit


Render = Callable[[int, int], RenderedBlock]


@dataclass(frozen=True, kw_only=True)
class SyntheticSource:
    """The files of a synthetic log, and how to render any rows of them."""

    example: str  # a name for the log, or for its directory
    files: Mapping[str, tuple[int, Render]]  # name -> rows and renderer; "" is the log itself, else a file inside OUT
    task: str  # what an example is
    header: Mapping[str, str] = field(default_factory=dict)  # file -> header line
    metadata: tuple[int, Render] | None = None  # an optional file about the items
    spoil: Mapping[str, int] = field(default_factory=dict)  # kind of bad line -> the field it spoils (file "" only)


def _lines(fields: Sequence[Bytes], separator: str, **truth: NDArray) -> RenderedBlock:
    block, starts = joined(fields, separator)
    return RenderedBlock(block=block, starts=starts, **truth)


def _runs(rows: Ints, sizes: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
    """Return each row's owner (in turns with ``sizes``), its place among the owner's, and their number, [n] each."""
    number = np.repeat(np.arange(len(sizes)), sizes)
    place = np.concatenate([np.arange(size) for size in sizes])
    at = rows % len(number)
    return rows // len(number) * len(sizes) + number[at], place[at], np.array(sizes)[number[at]]


def _click_log(options: Options, ids: list[IdColumn], numbers: list[NumberColumn], base_rate: float) -> ClickLog:
    return ClickLog(ids, numbers, **{**vars(options), "base_rate": options.base_rate or base_rate})


def _criteo(options: Options) -> SyntheticSource:
    """Return the Criteo TSV without header: label, I1..I13, C1..C26."""
    # Shares of empty fields and of negative counts are about those of the public logs.
    empty = (0.45, 0.0, 0.21, 0.22, 0.03, 0.22, 0.04, 0.001, 0.04, 0.45, 0.04, 0.76, 0.22)
    numbers = [
        NumberColumn(name=f"I{i + 1}", largest=(65_000, 20_000, 1_000)[i % 3], missing=share, negative=0.1 * (i == 1))
        for i, share in enumerate(empty)
    ]
    gaps = {3: 0.03, 4: 0.03, 6: 0.12, 12: 0.03, 16: 0.03, 19: 0.44, 20: 0.44, 22: 0.76, 25: 0.44, 26: 0.44}
    ids = [
        IdColumn(name=f"C{i}", num_ids=options.sized(size), missing=gaps.get(i, 0.0))
        for i, size in enumerate(KAGGLE_SIZES, 1)
    ]
    log = _click_log(options, ids, numbers, 0.2562)
    keys = [draw.key_of(options.world, column.name, "value") for column in ids]

    def render(start: int, stop: int) -> RenderedBlock:
        block = log.block(start, stop)
        fields = [whole(block.labels.astype(np.int64))]
        fields += [whole(v, gone) for v, gone in zip(block.numbers, block.number_missing, strict=True)]
        fields += [hex8(draw.scatter32(key, v), v < 0) for key, v in zip(keys, block.ids, strict=True)]
        return _lines(fields, "\t", logits=block.logits)

    spoil = {"columns": 20, "label": 0, "number": 3, "hex": 15, "utf8": 22}
    return SyntheticSource(example="criteo.tsv", files={"": (options.rows, render)}, task="one log line", spoil=spoil)


_AVAZU = {
    "C1": 7, "banner_pos": 7, "site_id": 4_737, "site_domain": 7_745, "site_category": 26, "app_id": 8_552,
    "app_domain": 559, "app_category": 36, "device_id": 2_686_408, "device_ip": 6_729_486, "device_model": 8_251,
    "device_type": 5, "device_conn_type": 4, "C14": 2_626, "C15": 8, "C16": 9, "C17": 435, "C18": 4, "C19": 68,
    "C20": 172, "C21": 60,
}  # fmt: skip


def _avazu(options: Options) -> SyntheticSource:
    """Return the Avazu CSV with its header: ten days from 2014-10-21, in order of time."""
    log = _click_log(options, [IdColumn(name=n, num_ids=options.sized(size)) for n, size in _AVAZU.items()], [], 0.1698)
    key = draw.key_of(options.seed, "id")
    keys = {name: draw.key_of(options.world, name, "value") for name in ads.HEX}

    def render(start: int, stop: int) -> RenderedBlock:
        block = log.block(start, stop)
        rows = np.arange(start, stop)
        hours = np.minimum(rows * 240 // max(options.rows, 1), 239)
        serial = (draw.bits(key, rows) >> np.uint64(2)).astype(np.int64)
        fields = [whole(serial), whole(block.labels.astype(np.int64))]
        fields.append(whole((141_021 + hours // 24) * 100 + hours % 24))
        for name, values in zip(_AVAZU, block.ids, strict=True):
            if name in keys:
                fields.append(hex8(draw.scatter32(keys[name], values)))
            else:
                fields.append(whole(values if name != "C20" else np.where(values, 100_000 + values, -1)))
        return _lines(fields, ",", logits=block.logits)

    return SyntheticSource(
        example="avazu.csv",
        files={"": (options.rows, render)},
        task="one log line",
        header={"": ",".join(("id", "click", "hour", *_AVAZU))},
        spoil={"columns": 6, "label": 1, "number": 2, "utf8": 12},
    )


_GENRES = (
    "Drama", "Comedy", "Action", "Thriller", "Romance", "Horror", "Adventure", "Sci-Fi", "Children's", "Crime", "War",
    "Documentary", "Musical", "Mystery", "Animation", "Western", "Fantasy", "Film-Noir",
)  # fmt: skip


def _movielens(options: Options) -> SyntheticSource:
    """Return ratings.dat, users.dat and movies.dat with ``::`` between fields, in a directory."""
    users = max(12, round(options.rows / 165 * options.scale))
    movies = max(20, round(min(options.rows / 50, 3_883) * options.scale))
    lists = [*_GENRES, *(f"{a}|{b}" for i, a in enumerate(_GENRES) for b in _GENRES[i + 1 : i + 4])]
    of_user = {"gender": 2, "age": 7, "occupation": 21, "zip": max(10, users // 2)}
    of_movie = {"genres": len(lists), "year": 80}
    ids = [IdColumn(name="user", num_ids=users), IdColumn(name="movie", num_ids=movies)]
    ids += [IdColumn(name=name, num_ids=size, of="user") for name, size in of_user.items()]
    ids += [IdColumn(name=name, num_ids=size, of="movie") for name, size in of_movie.items()]
    log = _click_log(options, ids, [], 0.575)

    def attribute(name: str, parents: Ints) -> Ints:
        return options.belonging(parents, (of_user | of_movie)[name], name, "of")

    def ratings(start: int, stop: int) -> RenderedBlock:
        block, rows = log.block(start, stop), np.arange(start, stop)
        low, high = 1 + options.integers(rows, 3, "stars"), 4 + options.integers(rows, 2, "stars")
        when = 956_703_932 + rows * 89_000_000 // max(options.rows, 1)
        columns = (1 + block.ids[0], 1 + block.ids[1], np.where(block.labels, high, low), when)
        return _lines([whole(values) for values in columns], "::", logits=block.logits)

    def user_lines(start: int, stop: int) -> RenderedBlock:
        user = np.arange(start, stop)
        ages = ("1", "18", "25", "35", "45", "50", "56")
        fields = [whole(1 + user), chosen(("F", "M"), attribute("gender", user))]
        fields += [chosen(ages, attribute("age", user)), whole(attribute("occupation", user))]
        return _lines([*fields, whole(10_000 + attribute("zip", user))], "::")

    def movie_lines(start: int, stop: int) -> RenderedBlock:
        movie = np.arange(start, stop)
        title = [constant("Film ", len(movie)), whole(1 + movie), constant(" (", len(movie))]
        title += [whole(1921 + attribute("year", movie)), constant(")", len(movie))]
        genres = chosen(lists, attribute("genres", movie))
        return _lines([whole(1 + movie), np.concatenate(title, axis=1), genres], "::")

    return SyntheticSource(
        example="movielens",
        files={
            "ratings.dat": (options.rows, ratings),
            "users.dat": (users, user_lines),
            "movies.dat": (movies, movie_lines),
        },
        task="one rating; positive is 4 or 5 stars",
    )


class _ShownItems(NamedTuple):
    """Items shown in n choices, at most K each."""

    items: Ints  # [n, K]
    shown: NDArray[np.bool_]  # [n, K]
    chance: NDArray[np.float64]  # [n, K] probability of being picked, 0 where not shown
    picked: Ints  # [n] position

    def logits(self, which: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the true logits of the items in the mask ``which`` [n, K], in order of rows."""
        p = np.clip(self.chance[which], 1e-12, 1 - 1e-12)
        return np.asarray(np.log(p) - np.log1p(-p))


class _Chooser:
    """Draw the shown items and the picked item of any rows."""

    def __init__(self, options: Options, num_items: int, slots: int, position: float) -> None:
        self.options, self.slots, self.position = options, slots, position
        # An item in slot k equals k modulo the number of slots, so no list shows an item twice.
        self.per_slot = max(2, num_items // slots)
        self.sampler = options.sampler(self.per_slot)

    def __call__(self, rows: Ints, users: Ints, counts: Ints) -> _ShownItems:
        options, slots = self.options, self.slots
        cells = (rows[:, None] * slots + np.arange(slots)).ravel()
        rank = self.sampler(options.uniform(cells, "shown"))
        rank = options.drifted(rank, np.repeat(rows, slots), self.per_slot, "shown")
        turn = np.argsort(draw.bits(draw.key_of(options.seed, "turn"), cells).reshape(-1, slots), axis=1)
        items = rank.reshape(-1, slots) * slots + turn
        shown = np.arange(slots) < counts[:, None]
        weight = np.where(shown, np.exp(self.utility(items, users)), 0.0)
        chance = weight / weight.sum(axis=1, keepdims=True)
        threshold = options.uniform(rows, "pick")[:, None]
        picked = np.minimum((np.cumsum(chance, axis=1) <= threshold).sum(axis=1), counts - 1)
        return _ShownItems(items, shown, chance, picked)

    def utility(self, items: Ints, users: Ints) -> NDArray[np.float64]:
        """Return the utility of each list's items, [n, K], for its user; it falls with the position."""
        options = self.options

        def hidden(name: str, of: Ints) -> NDArray[np.float64]:
            return draw.normal(draw.key_of(options.world, name), of.ravel()).reshape(of.shape).astype(np.float64)

        # How a group of items suits a group of users: one hidden number for each pair of groups.
        group = options.belonging(users, _GROUPS, "user group")[:, None] * _GROUPS
        group = group + options.belonging(items, _GROUPS, "item group")
        value = 0.6 * hidden("worth", items) + 0.5 * hidden("taste", group) - self.position * np.arange(self.slots)
        return np.asarray(options.signal * value)


_SESSIONS = (4, 7, 3, 12, 6, 9, 5, 18)  # rows of eight sessions; the pattern repeats
_ACTIONS = (
    "clickout item", "interaction item image", "interaction item info", "interaction item rating", "search for item",
)  # fmt: skip
_PLATFORMS = ("AU", "BR", "DE", "FR", "IT", "JP", "UK", "US")
_DEVICES = ("mobile", "desktop", "tablet")
_FILTERS = ("", "Sort by Price", "Focus on Distance|Sort by Price", "Best Value", "Very Good Rating|Hotel")
_PLACES = (
    "Sydney, Australia", "Lyon, France", "Recife, Brazil", "Turin, Italy", "Tokyo, Japan", "Leeds, United Kingdom",
)  # fmt: skip
_CITIES = [f'"{place} {n}"' if n else f'"{place}"' for n in range(60) for place in _PLACES]


def _trivago(options: Options) -> SyntheticSource:
    """Return the RecSys Challenge 2019 session CSV: impressions and prices joined by ``|`` in click-out rows."""
    user_of = Sampler(zipf(0.3, max(10, round(options.rows / 22 * options.scale))))
    chooser = _Chooser(options, max(100, round(min(options.rows / 15, 927_000) * options.scale)), 25, 0.08)

    def render(start: int, stop: int) -> RenderedBlock:
        rows = np.arange(start, stop)
        session, place, size = _runs(rows, _SESSIONS)
        user = user_of(options.uniform(session, "user"))
        click = (place == size - 1) | (options.uniform(rows, "click") < 0.05)
        counts = np.minimum(1 + options.integers(rows, 40, "count"), 25)
        shown = chooser(rows, user, counts)
        visible = shown.shown & click[:, None]
        item = shown.items[np.arange(len(rows)), np.where(click, shown.picked, 0)]
        # In a few click-outs the picked item is missing from the list, as in the real log.
        unlisted = options.uniform(rows, "unlisted") < 0.02
        reference = np.where(unlisted & click, chooser.per_slot * chooser.slots + 7, item)
        action = np.where(click, 0, 1 + options.integers(rows, len(_ACTIONS) - 1, "action"))
        fields = [
            hex8(draw.scatter32(1, user)),
            hex8(draw.scatter32(2, session)),
            whole(1_541_030_408 + rows * 518_000 // max(options.rows, 1)),
            whole(place + 1),
            chosen(_ACTIONS, action),
            whole(1 + reference),
            chosen(_PLATFORMS, options.integers(session, len(_PLATFORMS), "platform")),
            chosen(_CITIES, options.integers(session, len(_CITIES), "city")),
            chosen(_DEVICES, options.integers(session, len(_DEVICES), "device")),
            chosen(_FILTERS, options.integers(rows, len(_FILTERS), "filters")),
            _listed(1 + shown.items, visible),
            _listed(40 + options.belonging(shown.items, 260, "price"), visible),
        ]
        return _lines(fields, ",", logits=shown.logits(visible & ~unlisted[:, None] & (counts > 1)[:, None]))

    return SyntheticSource(
        example="trivago.csv",
        files={"": (options.rows, render)},
        task="one shown item of a click-out with two or more candidates and the clicked one among them",
        header={"": ",".join(lists.TRIVAGO), METADATA: "item_id,properties"},
        metadata=(chooser.per_slot * chooser.slots, lambda start, stop: _properties(chooser, start, stop)),
        spoil={"columns": 4, "number": 2, "utf8": 9},
    )


def _listed(values: Ints, shown: NDArray[np.bool_]) -> Bytes:
    """Return the shown numbers of each row, [n, K], joined by ``|``; they must come first in the row."""
    rows, slots = values.shape
    digits = whole(values.ravel(), ~shown.ravel()).reshape(rows, slots, -1)
    bars = np.where(shown, np.uint8(ord("|")), np.uint8(0))
    bars[:, 0] = 0
    return np.concatenate([bars[:, :, None], digits], axis=2).reshape(rows, -1)


_KINDS = ("Hotel", "Hostel", "Motel", "Resort", "Guest House", "Bed & Breakfast", "Apartment", "Boat")
_SETS, _VARIANTS = 24, 6  # of amenities; with 5 classes of stars and 8 kinds, 157 properties as in the real file


def _properties(chooser: _Chooser, start: int, stop: int) -> RenderedBlock:
    """Return ``item_metadata.csv``: stars follow the item's worth, kind its group, amenities its popularity."""
    item, of = np.arange(start, stop), chooser.options.belonging
    worth = draw.normal(draw.key_of(chooser.options.world, "worth"), item)
    stars = np.searchsorted(np.array([-0.84, -0.25, 0.25, 0.84]), worth)
    fields = [chosen([f"{n} Star" for n in range(1, 6)], stars)]
    fields.append(chosen([f"|{kind}" for kind in _KINDS], of(item, _GROUPS, "item group") % len(_KINDS)))
    popularity = np.log2(item // chooser.slots + 1).astype(np.int64)
    for number in range(_SETS):
        usual = of(popularity, _VARIANTS, f"usual amenity {number}")
        other = of(item, _VARIANTS, f"other amenity {number}")
        variant = np.where(of(item, 10, f"is usual {number}") < 7, usual, other)
        absent = of(item, 2, f"amenity {number}") == 0
        names = ["", *(f"|Amenity {number * _VARIANTS + n}" for n in range(1, _VARIANTS + 1))]
        fields.append(chosen(names, np.where(absent, 0, 1 + variant)))
    return _lines([whole(1 + item), np.concatenate(fields, axis=1)], ",")


_MONDAY = 1_684_364_400_000_000  # 2023-05-18 01:00 in microseconds since 1970; two weeks follow
_WEEK = 604_800_000_000
_SLOTS, _HISTORY = 24, 30  # articles of an impression and of a history, at most


def _ebnerd(options: Options) -> SyntheticSource:
    """Return impressions and histories of two weeks as four Parquet files in a directory; rows count impressions."""
    import pyarrow as pa

    users = max(20, round(options.rows / 16 * options.scale))
    articles = max(240, round(min(options.rows / 4, 125_000) * options.scale))
    chooser = _Chooser(options, articles, _SLOTS, 0.03)
    sampler = Sampler(zipf(0.6, users))
    half = options.rows // 2

    def lists(lengths: Ints, values: Any) -> Any:
        return pa.LargeListArray.from_arrays(pa.array(np.append(0, np.cumsum(lengths)), pa.int64()), values)

    def behaviours(first: int) -> Render:
        def render(start: int, stop: int) -> RenderedBlock:
            rows = np.arange(first + start, first + stop)
            user = sampler(options.uniform(rows, "user"))
            shown = chooser(rows, user, 5 + options.integers(rows, _SLOTS - 4, "count"))
            picked = np.arange(len(rows)), shown.picked
            when = _MONDAY + (rows.astype(np.float64) * (2 * _WEEK / max(options.rows, 1))).astype(np.int64)
            reading = (shown.chance[picked] * 100).astype(np.float32)
            unknown = options.belonging(user, 10, "unknown") < 9

            def of_user(name: str, below: int) -> Any:
                return pa.array(options.belonging(user, below, name).astype(np.int8), mask=unknown)

            columns = {
                "impression_id": pa.array(rows.astype(np.uint32)),
                "article_id": pa.nulls(len(rows), pa.int32()),
                "impression_time": pa.array(when, pa.timestamp("us")),
                "read_time": pa.array(reading),
                "scroll_percentage": pa.nulls(len(rows), pa.float32()),
                "device_type": pa.array((1 + options.belonging(user, 3, "device")).astype(np.int8)),
                "article_ids_inview": lists(
                    shown.shown.sum(axis=1), pa.array(1000 + shown.items[shown.shown], pa.int32())
                ),
                "article_ids_clicked": lists(
                    np.ones(len(rows), np.int64), pa.array(1000 + shown.items[picked], pa.int32())
                ),
                "user_id": pa.array((1 + user).astype(np.uint32)),
                "is_sso_user": pa.array(options.belonging(user, 3, "sso") == 0),
                "gender": of_user("gender", 2),
                "postcode": of_user("postcode", 5),
                "age": of_user("age", 10),
                "is_subscriber": pa.array(options.belonging(user, 5, "subscriber") == 0),
                "session_id": pa.array((rows // 3).astype(np.uint32)),
                "next_read_time": pa.array(reading + 1),
                "next_scroll_percentage": pa.array(reading),
            }
            return RenderedBlock(table=pa.table(columns), logits=shown.logits(shown.shown))

        return render

    def histories(start: int, stop: int) -> RenderedBlock:
        user = np.arange(start, stop)
        rows = options.rows + 1 + user  # row numbers that no impression uses
        lengths = 1 + options.integers(user, _HISTORY, "history")
        halves = [chooser(rows * 2 + k, user, np.full(len(user), _SLOTS)).items[:, : _HISTORY // 2] for k in range(2)]
        kept = np.arange(_HISTORY) < lengths[:, None]
        when = np.broadcast_to(_MONDAY - _WEEK * 3 + np.arange(_HISTORY) * (_WEEK // 20), kept.shape)[kept]
        columns = {
            "user_id": pa.array((1 + user).astype(np.uint32)),
            "impression_time_fixed": lists(lengths, pa.array(when, pa.timestamp("us"))),
            "scroll_percentage_fixed": lists(lengths, pa.array(np.full(len(when), 50, dtype=np.float32))),
            "article_id_fixed": lists(lengths, pa.array((1000 + np.hstack(halves)[kept]).astype(np.int32))),
            "read_time_fixed": lists(lengths, pa.array(np.full(len(when), 20, dtype=np.float32))),
        }
        return RenderedBlock(table=pa.table(columns))

    return SyntheticSource(
        example="ebnerd",
        files={
            "train_behaviors.parquet": (half, behaviours(0)),
            "validation_behaviors.parquet": (options.rows - half, behaviours(half)),
            "train_history.parquet": (users, histories),
            "validation_history.parquet": (users, histories),
        },
        task="one shown article of an impression",
    )


_TAKEN = "the taken item against one item drawn uniformly from all, given the user"


class _Taste:
    """Draw items for users by group and popularity, with the probability of each."""

    def __init__(self, options: Options, num_items: float) -> None:
        self.options = options
        self.per_group = max(2, max(320, round(num_items * options.scale)) // _GROUPS)
        self.num_items = self.per_group * _GROUPS
        self.anywhere, self.own = options.sampler(self.num_items), options.sampler(self.per_group)
        self.loyalty = min(0.95, 0.6 * options.signal / 1.3)

    def group(self, users: Ints) -> Ints:
        return self.options.belonging(users, _GROUPS, "group")

    def items(self, rows: Ints, users: Ints) -> tuple[Ints, NDArray, NDArray]:
        """Return the items taken in these rows, and the best logits of taken and of uniformly drawn items, [n] each."""
        options, group = self.options, self.group(users)
        chance = options.uniform(rows, "item")
        loyal = options.uniform(rows, "loyal") < self.loyalty
        taken = np.where(loyal, self.own(chance) * _GROUPS + group, self.anywhere(chance))
        other = options.integers(rows, self.num_items, "other")
        now = options.drifted(taken, rows, self.num_items, groups=_GROUPS)
        return now, self._logit(taken, group), self._logit(other, group)

    def _logit(self, items: Ints, group: Ints) -> NDArray[np.float64]:
        chance = (1 - self.loyalty) * self.anywhere.share(items)
        chance = chance + np.where(items % _GROUPS == group, self.loyalty * self.own.share(items // _GROUPS), 0.0)
        return np.asarray(np.log(np.maximum(chance * self.num_items, 1e-9)))


def _pairs(taken: NDArray, other: NDArray) -> dict[str, Any]:
    """Return the examples of a part: taken items with label 1, then the others with label 0."""
    return {"logits": np.concatenate([taken, other]), "labels": np.repeat([True, False], [len(taken), len(other)])}


_HISTORIES = (2, 5, 13, 30, 60, 120, 250, 520)  # rows of eight users; the pattern repeats


def _taobao(options: Options) -> SyntheticSource:
    """Return the UserBehavior CSV (user, item, category, behaviour, time) without header, grouped by user."""
    taste = _Taste(options, min(options.rows / 25, 4_162_024))
    categories = max(8, min(9_439, taste.num_items // 100))

    def render(start: int, stop: int) -> RenderedBlock:
        rows = np.arange(start, stop)
        user, place, size = _runs(rows, _HISTORIES)
        items, best, other = taste.items(rows, user)
        behaviour = np.minimum(options.integers(rows, 40, "behaviour"), 3)
        when = 1_511_539_200 + options.integers(user, 300_000, "begin") + place * (470_000 // size)
        fields = [whole(1 + user), whole(1 + items)]
        fields += [whole(1 + options.belonging(items, categories, "category"))]
        fields += [chosen(("buy", "cart", "fav", "pv"), behaviour), whole(when)]
        return _lines(fields, ",", **_pairs(best, other))

    spoil = {"columns": 2, "number": 1, "utf8": 3}
    return SyntheticSource(example="taobao.csv", files={"": (options.rows, render)}, task=_TAKEN, spoil=spoil)


_INVOICES = (3, 18, 7, 30, 1, 12, 45, 12)  # lines of eight invoices; the pattern repeats
_COUNTRIES = ("United Kingdom", "Germany", "France", "EIRE", "Spain", "Netherlands", "Belgium")


def _online_retail(options: Options) -> SyntheticSource:
    """Return invoice lines in Parquet, all columns text, with returns, unknown customers and postage."""
    import pyarrow as pa

    customers = max(10, round(options.rows / 100 * options.scale))
    taste = _Taste(options, min(options.rows / 60, 4_070))
    customer_of = Sampler(zipf(0.5, customers))
    services = np.array(["POST", "M", "D", "C2"])
    invoices = max(options.rows * len(_INVOICES) // sum(_INVOICES), 1)

    def render(start: int, stop: int) -> RenderedBlock:
        rows = np.arange(start, stop)
        invoice, _, _ = _runs(rows, _INVOICES)
        customer = customer_of(options.uniform(invoice, "customer"))
        items, best, other = taste.items(rows, customer)
        cancelled = options.uniform(invoice, "cancelled") < 0.02
        unknown = options.uniform(invoice, "unknown") < 0.2
        service = options.uniform(rows, "service") < 0.01
        quantity = 1 + options.integers(rows, 24, "quantity")
        price = 50 + options.belonging(items, 1_500, "price")
        code = np.where(service, services[options.integers(rows, 4, "code")], np.char.mod("%d", 10_000 + items))
        number = np.char.mod("%d", 536_365 + invoice)
        seconds = 1_291_191_960 + invoice * 32_000_000 // invoices
        minutes = (seconds // 60 * 60).astype("datetime64[s]")
        columns = {
            "InvoiceNo": np.where(cancelled, np.char.add("C", number), number),
            "StockCode": code,
            "Description": np.char.add("ITEM ", code),
            "Quantity": np.char.mod("%d", np.where(cancelled, -quantity, quantity)),
            "InvoiceDate": np.char.replace(minutes.astype(str), "T", " "),
            "UnitPrice": np.char.mod("%.2f", price / 100),
            "CustomerID": np.char.mod("%d.0", 12_346 + customer),
            "Country": np.array(_COUNTRIES)[np.minimum(options.belonging(customer, 60, "country"), 6)],
        }
        empty = {"CustomerID": unknown}
        arrays = {
            name: pa.array(values.tolist(), pa.large_string(), mask=empty.get(name)) for name, values in columns.items()
        }
        use = ~(cancelled | unknown | service)
        return RenderedBlock(table=pa.table(arrays), **_pairs(best[use], other[use]))

    return SyntheticSource(example="online-retail.parquet", files={"": (options.rows, render)}, task=_TAKEN)


def _globo(options: Options) -> SyntheticSource:
    """Return clicks in order of time, whole numbers in Parquet; with ``drift`` new articles appear all the time."""
    import pyarrow as pa

    sessions = max(1, options.rows // 3)
    taste = _Taste(options, min(options.rows / 20, 46_033))
    user_of = Sampler(zipf(0.5, max(10, round(options.rows / 9 * options.scale))))
    attributes = {"environment": 3, "deviceGroup": 4, "os": 8, "country": 11, "region": 28, "referrer_type": 7}

    def render(start: int, stop: int) -> RenderedBlock:
        rows = np.arange(start, stop)
        session = rows // 3
        user = user_of(options.uniform(session, "user"))
        items, best, other = taste.items(rows, user)
        begin = 1_506_826_800_000 + session * 1_300_000_000 // sessions
        columns: dict[str, Any] = {"user_id": user, "session_id": begin * 1000 + session % 1000}
        columns |= {"session_start": begin, "session_size": np.minimum(3, options.rows - session * 3)}
        columns |= {"click_article_id": items, "click_timestamp": begin + rows % 3 * 31_013}
        for name, size in attributes.items():
            columns[f"click_{name}"] = 1 + np.minimum(options.belonging(user, size * 4, name) // 2, size - 1)
        table = pa.table({name: pa.array(values.astype(np.int64)) for name, values in columns.items()})
        return RenderedBlock(table=table, **_pairs(best, other))

    return SyntheticSource(example="globo.parquet", files={"": (options.rows, render)}, task=_TAKEN)


RECIPES: dict[str, Callable[[Options], SyntheticSource]] = {
    "criteo": _criteo, "avazu": _avazu, "taobao": _taobao, "trivago": _trivago, "movielens": _movielens,
    "online-retail": _online_retail, "globo": _globo, "ebnerd": _ebnerd,
}  # fmt: skip
