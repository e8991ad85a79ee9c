"""The raw format of each log as a block renderer: rows in, text or an Arrow table out, and true logits.

A :class:`Source` can be asked for any rows. Click logs (Criteo, Avazu, MovieLens) live here; logs of choices
among shown items and logs of purchases in their own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.base import draw
from stoker.synthetic import text
from stoker.synthetic.clicks import ClickBlock, ClickLog, IdColumn, NumberColumn, Options

__all__ = ["KAGGLE_SIZES", "METADATA", "Part", "Source", "avazu", "criteo", "movielens"]

METADATA = "item metadata"  # the name of Source.metadata among headers
# Rows of the 26 Criteo Kaggle tables when all ids are kept (33.76 M).
KAGGLE_SIZES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306),
    *(10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rendered block of one file."""

    block: text.Bytes | None = None  # lines, see text.joined
    starts: list[int] = field(default_factory=list)  # first byte of each field
    table: Any = None  # or a pyarrow.Table
    logits: NDArray = field(default_factory=lambda: np.zeros(0))  # true logits of the labelled examples
    labels: NDArray | None = None  # labels where they are fixed rather than drawn with that logit


@dataclass(frozen=True, kw_only=True)
class Source:
    """One synthetic log: its files and how to render any rows of them."""

    example: str  # a name for the log, or for its directory
    files: Mapping[str, tuple[int, Callable[[int, int], Part]]]  # "" is the log itself, else a name inside OUT
    task: str
    header: Mapping[str, str] = field(default_factory=dict)  # file -> header line
    metadata: tuple[int, Callable[[int, int], Part]] | None = None  # an optional file about the items
    spoil: Mapping[str, int] = field(default_factory=dict)  # kind of bad line -> the field it spoils (file "" only)


def _click_log(options: Options, ids: list[IdColumn], numbers: list[NumberColumn], base_rate: float) -> ClickLog:
    return ClickLog(ids, numbers, **{**vars(options), "base_rate": options.base_rate or base_rate})


def criteo(options: Options) -> Source:
    """label, I1..I13, C1..C26, tab separated, without header."""
    # Shares of empty fields and of negative counts of the order seen in the public logs.
    empty = (0.45, 0.0, 0.21, 0.22, 0.03, 0.22, 0.04, 0.001, 0.04, 0.45, 0.04, 0.76, 0.22)
    numbers = [
        NumberColumn(name=f"I{i + 1}", largest=(65_000, 20_000, 1_000)[i % 3], missing=share, negative=0.1 * (i == 1))
        for i, share in enumerate(empty)
    ]
    gaps = {3: 0.03, 4: 0.03, 6: 0.12, 12: 0.03, 16: 0.03, 19: 0.44, 20: 0.44, 22: 0.76, 25: 0.44, 26: 0.44}
    ids = [
        IdColumn(name=f"C{i + 1}", num_ids=options.sized(size), missing=gaps.get(i + 1, 0.0))
        for i, size in enumerate(KAGGLE_SIZES)
    ]
    log = _click_log(options, ids, numbers, 0.2562)
    keys = [draw.key_of(options.world, column.name, "value") for column in ids]

    def render(start: int, stop: int) -> Part:
        block = log.block(start, stop)
        fields = [text.whole(block.labels.astype(np.int64))]
        fields += [text.whole(v, gone) for v, gone in zip(block.numbers, block.number_missing, strict=True)]
        fields += [text.hex8(draw.scatter32(key, v), v < 0) for key, v in zip(keys, block.ids, strict=True)]
        return _lines(fields, "\t", block)

    spoil = {"columns": 20, "label": 0, "number": 3, "hex": 15, "utf8": 22}
    return Source(example="criteo.tsv", files={"": (options.rows, render)}, task="one log line", spoil=spoil)


_AVAZU_HEX = {
    "site_id": 4_737,
    "site_domain": 7_745,
    "site_category": 26,
    "app_id": 8_552,
    "app_domain": 559,
    "app_category": 36,
    "device_id": 2_686_408,
    "device_ip": 6_729_486,
    "device_model": 8_251,
}
_AVAZU_INT = {
    "C1": 7,
    "banner_pos": 7,
    "device_type": 5,
    "device_conn_type": 4,
    "C14": 2_626,
    "C15": 8,
    "C16": 9,
    "C17": 435,
    "C18": 4,
    "C19": 68,
    "C20": 172,
    "C21": 60,
}
_AVAZU_COLUMNS = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,"
    "device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)


def avazu(options: Options) -> Source:
    """The Avazu CSV with its header: ten days from 2014-10-21, in order of time."""
    names = _AVAZU_COLUMNS.split(",")[3:]
    sizes = _AVAZU_HEX | _AVAZU_INT
    ids = [IdColumn(name=name, num_ids=options.sized(sizes[name])) for name in names]
    log = _click_log(options, ids, [], 0.1698)
    key = draw.key_of(options.seed, "id")
    keys = {name: draw.key_of(options.world, name, "value") for name in names}

    def render(start: int, stop: int) -> Part:
        block = log.block(start, stop)
        rows = np.arange(start, stop)
        hours = np.minimum(rows * 240 // max(options.rows, 1), 239)
        serial = (draw.bits(key, rows) >> np.uint64(2)).astype(np.int64)
        fields = [text.whole(serial), text.whole(block.labels.astype(np.int64))]
        fields.append(text.whole((141_021 + hours // 24) * 100 + hours % 24))
        for name, values in zip(names, block.ids, strict=True):
            if name in _AVAZU_HEX:
                fields.append(text.hex8(draw.scatter32(keys[name], values)))
            else:
                fields.append(text.whole(values if name != "C20" else np.where(values, 100_000 + values, -1)))
        return _lines(fields, ",", block)

    spoil = {"columns": 6, "label": 1, "number": 2, "utf8": 12}
    return Source(
        example="avazu.csv",
        files={"": (options.rows, render)},
        task="one log line",
        header={"": _AVAZU_COLUMNS},
        spoil=spoil,
    )


_GENRES = (
    *(
        "Drama",
        "Comedy",
        "Action",
        "Thriller",
        "Romance",
        "Horror",
        "Adventure",
        "Sci-Fi",
        "Children's",
        "Crime",
    ),
    *("War", "Documentary", "Musical", "Mystery", "Animation", "Western", "Fantasy", "Film-Noir"),
)


def movielens(options: Options) -> Source:
    """ratings.dat, users.dat and movies.dat with ``::`` between fields, in a directory."""
    users = max(12, round(options.rows / 165 * options.scale))
    movies = max(20, round(min(options.rows / 50, 3_883) * options.scale))
    lists = [*_GENRES, *(f"{a}|{b}" for i, a in enumerate(_GENRES) for b in _GENRES[i + 1 : i + 4])]
    of_user = {"gender": 2, "age": 7, "occupation": 21, "zip": max(10, users // 2)}
    of_movie = {"genres": len(lists), "year": 80}
    ids = [IdColumn(name="user", num_ids=users), IdColumn(name="movie", num_ids=movies)]
    ids += [IdColumn(name=name, num_ids=size, of="user") for name, size in of_user.items()]
    ids += [IdColumn(name=name, num_ids=size, of="movie") for name, size in of_movie.items()]
    log = _click_log(options, ids, [], 0.575)
    stars = draw.key_of(options.seed, "stars")

    def attribute(name: str, parents: NDArray[np.int64]) -> NDArray[np.int64]:
        size = (of_user | of_movie)[name]
        return draw.integers(draw.key_of(options.world, name, "of"), parents, size)

    def ratings(start: int, stop: int) -> Part:
        block = log.block(start, stop)
        rows = np.arange(start, stop)
        low, high = 1 + draw.integers(stars, rows, 3), 4 + draw.integers(stars, rows, 2)
        fields = [text.whole(1 + block.ids[0]), text.whole(1 + block.ids[1])]
        fields += [text.whole(np.where(block.labels, high, low))]
        fields += [text.whole(956_703_932 + rows * 89_000_000 // max(options.rows, 1))]
        return _lines(fields, "::", block)

    def user_lines(start: int, stop: int) -> Part:
        user = np.arange(start, stop)
        ages = ("1", "18", "25", "35", "45", "50", "56")
        fields = [text.whole(1 + user), text.chosen(("F", "M"), attribute("gender", user))]
        fields += [text.chosen(ages, attribute("age", user)), text.whole(attribute("occupation", user))]
        fields += [text.whole(10_000 + attribute("zip", user))]
        return _lines(fields, "::")

    def movie_lines(start: int, stop: int) -> Part:
        movie = np.arange(start, stop)
        rows = stop - start
        title = [text.constant("Film ", rows), text.whole(1 + movie), text.constant(" (", rows)]
        title += [text.whole(1921 + attribute("year", movie)), text.constant(")", rows)]
        genres = text.chosen(lists, attribute("genres", movie))
        return _lines([text.whole(1 + movie), np.concatenate(title, axis=1), genres], "::")

    return Source(
        example="movielens",
        files={
            "ratings.dat": (options.rows, ratings),
            "users.dat": (users, user_lines),
            "movies.dat": (movies, movie_lines),
        },
        task="one rating; positive is 4 or 5 stars",
    )


def _lines(fields: list[text.Bytes], separator: str, block: ClickBlock | None = None) -> Part:
    lines, starts = text.joined(fields, separator)
    return Part(block=lines, starts=starts, logits=np.zeros(0) if block is None else block.logits)
