"""Recipes for lists in which one item is clicked: hotels of trivago, articles of Globo and EB-NeRD.

Engineered features follow "Accelerating Recommender System Training 15x with RAPIDS" (RecSys Challenge 2019), section
2.1: pairs, earlier interactions, ranks, out-of-fold target encoding, metadata. For news, the events of window features
are the clicked rows of earlier lists, so no feature uses the click of its own list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from stoker.base.errors import DataError
from stoker.dataset.manifest import SPLITS
from stoker.prep import features as f
from stoker.prep.features.past import lists_of, previous_values
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.recipes import rows as tools
from stoker.prep.recipes.draw import key_of, uniform
from stoker.prep.recipes.rows import LOGGED, Histories, Ints, PastCounts, categorical, dense
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule
from stoker.prep.source_format import SourceFormat

_MOST_ITEMS = 25  # further listed items of a click-out are ignored
_PROPERTIES = 157  # distinct properties in the challenge's item_metadata.csv
_ENCODED = ("current_filters", "city", "device", "user_id")  # each with the item
_CATEGORIES = ("user_id", "session_id", "platform", "city", "device")
_SESSION_TEXTS = (*_CATEGORIES, "current_filters")
TRIVAGO = (
    *("user_id", "session_id", "timestamp", "step", "action_type", "reference", "platform", "city", "device"),
    *("current_filters", "impressions", "prices"),
)


def trivago(preset: str = "raw") -> Recipe:
    """Sessions of trivago, a row for each listed item of a click-out; every fifth click-out validates.

    "features" adds earlier interactions, ranks and target encodings; "metadata" adds a column for each property of
    items. Both read ``item_metadata.csv`` next to the log: "features" as a sequence, if the file is given.
    """
    csv = SourceFormat(kind="csv", separator=",")
    return Recipe(
        name="trivago",
        description="trivago RecSys 2019: listed items of click-outs, label = the clicked one ",
        presets={"raw": _raw, "features": _featured, "metadata": partial(_featured, "metadata")},
        preset=preset,
        inputs={
            "metadata": RawInput(
                files=("*metadata*",),
                format=csv,
                columns={"item_id": "int", "properties": "string"},
                required=("item_id",),
                optional=True,
                lookup=True,
            ),
            "log": RawInput(
                format=csv,
                columns={name: "int" if name in ("timestamp", "step") else "string" for name in TRIVAGO},
                required=("user_id", "session_id", "action_type"),
            ),
        },
        derive=_trivago_rows,
        example="stoker prepare trivago train.csv --out data/trivago",
        source="trivago, RecSys Challenge 2019",
    )


def _raw() -> Schema:
    return Schema(
        name="trivago",
        label=Label(column="label"),
        group="clickout",
        dense=(
            DenseColumn(name="price", fill="median", null_flag=True, transforms=LOGGED),
            *dense(("rank",), "zscore"),
            *dense(("step",), *LOGGED),
        ),
        categorical=(*categorical(("item",)), *categorical(_CATEGORIES, "string")),
        sequence=(SequenceColumn(name="filters", source="current_filters", max_length=30),),
        split=tools.split_column(("train", "valid")),
    )


def _featured(name: str = "features") -> Schema:
    """Return the schema of "features", or of "metadata", which adds a column of 0 and 1 for each property."""
    session: dict[str, Any] = {"by": ("session_id",), "events": "event"}
    item: dict[str, Any] = {"by": ("session_id", "item"), "events": "event"}
    folds: dict[str, Any] = {"folds": 8, "fold_by": ("clickout",)}
    encoded = tuple(f"{column}_item_mean" for column in _ENCODED)
    features = (
        f.TimeParts(name="local", column="timestamp"),
        f.Previous(name="last_item", column="item", order="moment", **session),
        f.Difference(name="steps_since", column="step", order="moment", **session),
        f.SinceLast(name="seconds_since", order="timestamp", **session),
        f.SinceLast(name="seconds_since_item", order="timestamp", **item),
        f.PastCount(name="session_item", order="moment", **item),
        f.PastCount(name="user_item", by=("user_id", "item"), order="timestamp", events="event"),
        f.PastCount(name="item_seen", by=("item",), order="timestamp", events="event"),
        f.PastCount(name="item_clicked", by=("item",), order="timestamp", events="click"),
        f.Rank(name="price_rank", by=("clickout",), order="price"),
        f.Equal(name="is_last_item", left="item", right="last_item"),
        f.CountEncoding(name="item_shown", by=("item",)),
        f.MeanTargetEncoding(name="item_mean", by=("item",), **folds),
        *(f.MeanTargetEncoding(name=f"{column}_item_mean", by=(column, "item"), **folds) for column in _ENCODED),
    )
    binary = name == "metadata"
    properties = (f.Properties(name="property", column="properties", most=_PROPERTIES),) if binary else ()
    return Schema(
        name=f"trivago/{name}",
        label=Label(column="label"),
        group="clickout",
        feature=(*features, *properties),
        dense=(
            DenseColumn(name="price", fill="median", null_flag=True, transforms=LOGGED),
            *dense(("rank", "price_rank", "is_last_item", "item_mean", *encoded), "zscore"),
            *dense(("session_item", "user_item", "item_seen", "item_clicked", "item_shown", "step"), *LOGGED),
            *dense(("seconds_since", "seconds_since_item", "steps_since"), *LOGGED, fill=1e6),
            *dense(("property_*",) if binary else ()),
        ),
        categorical=(
            *categorical(("item",)),
            *categorical(_CATEGORIES, "string"),
            CategoricalColumn(name="hour", source="local_hour", type="int"),
            CategoricalColumn(name="weekday", source="local_weekday", type="int"),
        ),
        sequence=(
            SequenceColumn(name="filters", source="current_filters", max_length=30),
            *(() if binary else (SequenceColumn(name="properties", max_length=_PROPERTIES),)),
        ),
        split=SplitRule(
            rule="column", column="split", values={"train": "train", "valid": "valid", "interaction": "drop"}
        ),
    )


def _trivago_rows(inputs: Mapping[str, pl.LazyFrame], schema: Schema) -> pl.LazyFrame:
    """Return the items of click-outs with at least two and, for features, interactions with items, in the log's order.

    ``clickout`` is the number of the click-out, from 0; ``moment`` is the number of the line. Interactions are the
    events of window features and belong to no split. Streaming.
    """
    is_click = pl.col("action_type") == "clickout item"
    none = pl.lit([], dtype=pl.List(pl.String))
    listed = pl.col("impressions").str.split("|").list.head(_MOST_ITEMS)
    prices = pl.col("prices").str.split("|").list.head(_MOST_ITEMS)
    touched = pl.col("reference").str.contains(r"^[0-9]+$") if schema.feature else pl.lit(False)
    size, rank = pl.col("size"), pl.col("rank")
    rows = (
        inputs["log"]
        .with_row_index("moment")
        # A single item cannot be ranked; prices of another number than the items cannot be paired.
        .with_columns(item=pl.when(is_click & (listed.list.len() > 1)).then(listed).otherwise(none))
        .with_columns(
            moment=pl.col("moment").cast(pl.Int64),
            clickout=pl.when(is_click).then(is_click.cast(pl.Int64).cum_sum() - 1),
            size=pl.col("item").list.len(),
            prices=pl.when(prices.list.len() == pl.col("item").list.len()).then(prices),
            item=pl.when(touched).then(pl.concat_list("item", "reference")).otherwise(pl.col("item")),
        )
        .filter(pl.col("item").list.len() > 0)
        .with_columns(rank=pl.int_ranges(1, pl.col("item").list.len().cast(pl.Int64) + 1))
        .explode("item", "rank")
    )
    shown = rank <= size  # else the item that was touched
    split = pl.when(pl.col("clickout") % 5 == 0).then(pl.lit("valid")).otherwise(pl.lit("train"))
    made = rows.select(
        *("moment", "timestamp", "step", *_SESSION_TEXTS),
        event=(~shown).cast(pl.Int8),
        click=(is_click & ~shown).cast(pl.Int8),
        clickout=pl.when(shown).then(pl.col("clickout")),
        rank=pl.when(shown).then(rank),
        label=((pl.col("item") == pl.col("reference")) & shown).fill_null(False).cast(pl.Int8),
        item=pl.col("item").cast(pl.Int64, strict=False),
        price=pl.col("prices").list.get(rank - 1, null_on_oob=True).cast(pl.Float64, strict=False),
        split=pl.when(shown).then(split).otherwise(pl.lit("interaction")),
    )
    if "metadata" not in inputs or not schema.feature:
        return made.with_columns(properties=pl.lit(None, pl.String))
    known = inputs["metadata"].select(item=pl.col("item_id").cast(pl.Int64), properties="properties")
    return made.join(known.unique("item", keep="first"), on="item", how="left", maintain_order="left")


_HOUR = 3_600_000  # milliseconds, as Globo's times
_DAY = 86_400  # seconds, as EB-NeRD's times


def _news(name: str, numbers: Sequence[str], categories: Sequence[str], history: str) -> Schema:
    return Schema(
        name=name,
        label=Label(column="label"),
        dense=dense(numbers, *LOGGED),
        categorical=categorical(categories),
        sequence=(SequenceColumn(name=history, type="int", table="article", max_length=20),),
        split=tools.split_column(),
    )


def _with_features(schema: Schema, *, group: str, context: Sequence[str], differ: str, popular: str) -> Schema:
    """Return the schema with engineered features; rows have user, session, article, time and label.

    Args:
        schema: the schema without them.
        group: column with the number of the list.
        context: columns that are target encoded together with the article, besides the last article of the session.
        differ: column whose change since the session's last click is a feature.
        popular: column by which the articles of a list are ranked.
    """
    clicks: dict[str, Any] = {"order": "time", "events": "label"}
    encoded: dict[str, Any] = {"folds": 8, "fold_by": (group,)}
    means = {f"{column}_article_mean": (column, "article") for column in ("last_article", *context)}
    features = (
        f.Previous(name="last_article", by=("session",), column="article", **clicks),
        f.Difference(name=f"{differ}_change", by=("session",), column=differ, **clicks),
        f.SinceLast(name="since_click", by=("session",), **clicks),
        f.SinceLast(name="since_user_click", by=("user",), **clicks),
        f.SinceLast(name="since_article", by=("user", "article"), **clicks),
        f.PastCount(name="session_clicks", by=("session",), **clicks),
        f.PastCount(name="session_article", by=("session", "article"), **clicks),
        f.PastCount(name="user_article", by=("user", "article"), **clicks),
        f.PastCount(name="article_clicked", by=("article",), **clicks),
        f.PastCount(name="article_listed", by=("article",), order="time"),
        f.Divide(name="click_rate", left="article_clicked", right="article_listed"),
        f.Rank(name="popularity_rank", by=(group,), order=popular, descending=True),
        f.Equal(name="is_last_article", left="article", right="last_article"),
        f.CountEncoding(name="article_rows", by=("article",)),
        f.MeanTargetEncoding(name="article_mean", by=("article",), **encoded),
        *(f.MeanTargetEncoding(name=name, by=by, **encoded) for name, by in means.items()),
    )
    counts = ("session_clicks", "session_article", "user_article", "article_clicked", "article_listed", "article_rows")
    since = ("since_click", "since_user_click", "since_article")
    numbers = (
        *schema.dense,
        *dense(counts, *LOGGED),
        *dense(("popularity_rank", "is_last_article", "click_rate", "article_mean", *means), "zscore"),
        DenseColumn(name=f"{differ}_change", transforms=("zscore",), null_flag=True),
        *dense(since, *LOGGED, fill="median", null_flag=True),
    )
    categories = (*schema.categorical, *categorical(("last_article",)))
    return replace(schema, group=group, feature=features, dense=numbers, categorical=categories)


_WHO = ("user_id", "session_id", "click_article_id", "click_timestamp")
_CONTEXT = {
    "environment": "click_environment", "device": "click_deviceGroup", "os": "click_os", "country": "click_country",
    "region": "click_region", "referrer": "click_referrer_type",
}  # fmt: skip


def globo(
    preset: str = "leave-last-out",
    *,
    negatives: int | None = None,
    history: int = 20,
    window_hours: float = 6,
    seed: int = 0,
) -> Recipe:
    """Globo clicks with ``negatives`` per click (2; 4 with features) from the articles of the last ``window_hours``.

    The log has clicks only. A negative is the article of a random click of the last hours, so an article is drawn as
    often as it is being read. If negatives were drawn evenly, or by popularity over the whole log, their age alone
    would give them away.

    "leave-last-out" tests on each user's last click and validates on the one before. "session-hash" splits whole
    sessions 80/10/10 at random. "progressive" splits by time; most test clicks then go to articles without training
    rows. "features" ranks: a click and its negatives are one list, split as in "leave-last-out", with engineered
    features. Lists of an article's first click are in no split: all negatives have been clicked before, so age, clicks
    and listings would give the click away.
    """
    return Recipe(
        name="globo",
        description="Globo.com news clicks with negatives from the same hours and the last 20 clicks",
        presets={name: partial(_globo, name) for name in ("leave-last-out", "session-hash", "progressive", "features")},
        preset=preset,
        inputs={"clicks": RawInput(columns=dict.fromkeys((*_WHO, *_CONTEXT.values()), "int"), required=_WHO)},
        derive=partial(_globo_rows, count=negatives, most=history, window=int(window_hours * _HOUR), seed=seed),
        example="stoker prepare globo clicks.parquet --out data/globo",
        source="Globo.com, News Portal User Interactions; academic use",
    )


def _globo(preset: str) -> Schema:
    categories = ("user", "article", *_CONTEXT, "hour", "weekday")
    schema = _news(f"globo/{preset}", ("last_hour", "age_hours"), categories, "clicked")
    if preset != "features":
        return schema
    return _with_features(
        replace(schema, split=tools.split_column((*SPLITS, "drop"))), group="click",
        context=("region", "device", "referrer"), differ="age_hours", popular="last_hour",
    )  # fmt: skip


def _globo_rows(
    inputs: Mapping[str, pl.LazyFrame], schema: Schema, *, count: int | None, most: int, window: int, seed: int
) -> pl.LazyFrame:
    """Return clicks in order of time, each followed by its negatives. Memory: about 300 bytes a click."""
    ranked = bool(schema.feature)
    count = (4 if ranked else 2) if count is None else count
    log = (
        inputs["clicks"]
        .select(pl.col(*_WHO).cast(pl.Int64), *(pl.col(old).cast(pl.Int64).alias(new) for new, old in _CONTEXT.items()))
        .sort("click_timestamp", "user_id", "click_article_id", "session_id", maintain_order=True)
        .collect(engine="streaming")
    )
    if log.height == 0:
        raise DataError("there is no click in the input.")
    user, session, article, time = (log[name].to_numpy() for name in _WHO)
    past = Histories.find(user, time)
    split = _globo_splits(schema.name.partition("/")[2], session, past, seed)
    others = _recent_articles(user, article, time, count, window, seed, of_lists=ranked)
    clicks = PastCounts(article, time)
    names, birth = np.unique(article, return_index=True)  # clicks are in order of time
    born = time[birth]
    if ranked:  # drop first clicks: all negatives have been clicked before
        split = np.where(born[np.searchsorted(names, article)] < time, split, len(SPLITS))
    clicked = article[past.order]

    def make(begin: int, end: int) -> pl.DataFrame:
        number, item, label = tools.with_negatives(article[begin:end], others[begin:end])
        row = begin + number
        when = time[row]
        flat, lengths = previous_values(clicked, past.first[row], past.stop[row], most)
        clock = pl.Series(when).cast(pl.Datetime("ms")).dt
        return pl.DataFrame(
            {
                "label": label,
                "user": user[row],
                "article": item,
                **{name: log[name].gather(row) for name in _CONTEXT},
                "hour": clock.hour(),
                "weekday": clock.weekday(),
                "clicked": lists_of(pl.Series(flat), lengths),
                "last_hour": clicks.before(item, when, window=_HOUR),
                # 0 at an article's first click, and nowhere else
                "age_hours": (when - born[np.searchsorted(names, item)]) / _HOUR,
                "click": row,
                "session": session[row],
                "time": when,
                "split": np.array([*SPLITS, "drop"])[split[row]],
            }
        )

    return tools.streamed(log.height, make, step=16_384)


def _globo_splits(preset: str, session: Ints, past: Histories, seed: int) -> Ints:
    """Return 0 train, 1 valid or 2 test for each click in order of time."""
    if preset in ("leave-last-out", "features"):
        later = past.end - 1 - past.place
        # Users with fewer than three clicks would have nothing left to train on.
        return np.where((past.end - past.first < 3) | (later > 1), 0, 2 - later)
    if preset == "session-hash":
        share = uniform(key_of(seed, "globo session"), session)
    else:
        share = np.arange(len(session)) / len(session)
    return np.where(share < 0.8, 0, np.where(share < 0.9, 1, 2))


def _recent_articles(
    user: Ints, article: Ints, time: Ints, count: int, window: int, seed: int, *, of_lists: bool
) -> Ints:
    """Draw articles clicked in the window before, but never by the user, [clicks, count]; -1 where none is found.

    With ``of_lists`` only the click's own article is refused, and an article is in a list once. Articles that the user
    has read may then be listed, as on a page: otherwise a feature that knows them would give the click away.
    """
    _, user = np.unique(user, return_inverse=True)
    names, code = np.unique(article, return_inverse=True)
    read = np.unique(user * len(names) + code)
    oldest = np.searchsorted(time, time - window)
    width = np.searchsorted(time, time) - oldest

    def draw(chance: Any, rows: Ints) -> Ints:
        at = rows // count
        place = np.minimum(oldest[at] + (chance * width[at]).astype(np.int64), len(code) - 1)
        return np.where(width[at] > 0, code[place], -1)

    def refused(items: Ints, rows: Ints) -> Any:
        at = rows // count
        return items == code[at] if of_lists else (items >= 0) & tools.among(user[at] * len(names) + items, read)

    drawn = tools.negatives(seed, len(time) * count, draw, refused).reshape(-1, count)
    if of_lists:
        for place in range(1, count):
            drawn[(drawn[:, :place] == drawn[:, place, None]).any(axis=1), place] = -1
    return np.where(drawn >= 0, names[np.maximum(drawn, 0)], -1)


# No feature: next_read_time and next_scroll_percentage are known only after the click; read_time and scroll_percentage
# describe the page of the list, but are written when the reader leaves it.
_READER = ("is_subscriber", "is_sso_user", "gender", "age", "postcode")
_NUMBERS = ("impression_id", "device_type", "user_id", "session_id", *_READER)
_TEXTS = ("impression_time", "article_ids_inview", "article_ids_clicked")
_HISTORIES = {"user_id": "int", "article_id_fixed": "string", "impression_time_fixed": "string"}


def ebnerd(preset: str = "weeks", *, history: int = 20) -> Recipe:
    """EB-NeRD: week 1 trains, impressions of week 2 validate or test by a hash of their number.

    "weeks" counts clicks and views of the last day, "ids" does not. "features" ranks: an impression is one list, with
    engineered features.
    """
    log: dict[str, Any] = {"columns": {**dict.fromkeys(_NUMBERS, "int"), **dict.fromkeys(_TEXTS, "string")}}
    past: dict[str, Any] = {"columns": _HISTORIES, "optional": True, "lookup": True}
    return Recipe(
        name="ebnerd",
        description="EB-NeRD news impressions, one row per shown article; week 1 trains, week 2 tests",
        presets={name: partial(_ebnerd, name) for name in ("weeks", "ids", "features")},
        preset=preset,
        inputs={
            "train": RawInput(files=("*train*behaviors*",), **log),
            "later": RawInput(files=("*validation*behaviors*",), **log),
            "train_history": RawInput(files=("*train*history*",), **past),
            "later_history": RawInput(files=("*validation*history*",), **past),
        },
        derive=partial(_ebnerd_rows, most=history),
        example="stoker prepare ebnerd 'ebnerd/*.parquet' --out data/ebnerd",
        source="Ekstra Bladet News Recommendation Dataset, RecSys Challenge 2024; research use",
    )


def _ebnerd(preset: str) -> Schema:
    numbers = ("shown",) if preset == "ids" else ("shown", "recent_clicks", "recent_views")
    categories = ("user", "article", "device", *_READER, "hour", "weekday", "position")
    schema = _news(f"ebnerd/{preset}", numbers, categories, "history")
    if preset != "features":
        return schema
    context = ("device", "is_subscriber", "age")
    return _with_features(schema, group="impression", context=context, differ="position", popular="recent_clicks")


def _ebnerd_rows(inputs: Mapping[str, pl.LazyFrame], schema: Schema, *, most: int) -> pl.LazyFrame:
    """Return shown articles in order of time. Impressions are in memory; their rows are made in batches."""
    log, past = _impressions(inputs, most)

    def counts(column: str) -> PastCounts:
        flat = log.select(column, "second").explode(column).drop_nulls()
        return PastCounts(flat[column].to_numpy(), flat["second"].to_numpy())

    views, clicks = counts("article_ids_inview"), counts("article_ids_clicked")

    def make(start: int, stop: int) -> pl.DataFrame:
        part = log.slice(start, stop - start)
        clock = part["impression_time"].dt
        rows = part.select(
            *("week", "half", "second", "article_ids_clicked", *_READER),
            impression="impression_id",
            user="user_id",
            session="session_id",
            device="device_type",
            article="article_ids_inview",
            position=pl.int_ranges(pl.col("article_ids_inview").list.len()),
            shown=pl.col("article_ids_inview").list.len(),
            hour=clock.hour(),
            weekday=clock.weekday(),
            history=past.gather(part["past"]),
        ).explode("article", "position")
        article, second = rows["article"].to_numpy(), rows["second"].to_numpy()
        return rows.select(
            *("impression", "user", "session", "article", "device", *_READER, "hour", "weekday", "position", "shown"),
            "history",
            label=pl.col("article_ids_clicked").list.contains(pl.col("article")),
            time="second",
            recent_clicks=pl.Series(clicks.before(article, second, window=_DAY)),
            recent_views=pl.Series(views.before(article, second, window=_DAY)),
            split=np.array(SPLITS)[rows.select(pl.col("week") * (1 + pl.col("half"))).to_series().to_numpy()],
        )

    return tools.streamed(log.height, make, step=4096)


def _impressions(inputs: Mapping[str, pl.LazyFrame], most: int) -> tuple[pl.DataFrame, pl.Series]:
    """Return both weeks in order of time, and lists of the articles that users read before; the first list is empty.

    The impressions have more columns: ``week`` and ``half`` (0 or 1), ``second``, and ``past``, the list's number.
    """
    lists = [pl.Series("article", [[]], dtype=pl.List(pl.Int64))]
    weeks = []
    for week, name in enumerate(("train", "later")):
        part = inputs[name].select(
            *(name for name in (*_NUMBERS, *_TEXTS) if name not in _READER), pl.col(_READER).cast(pl.Int64)
        )
        if part.collect_schema()["article_ids_inview"].base_type() is not pl.List:
            raise DataError("article_ids_inview is not a list column. EB-NeRD's behaviours come as Parquet files.")
        known = pl.DataFrame(schema={"user": pl.Int64, "past": pl.Int64})
        if f"{name}_history" in inputs:
            first = part.filter(pl.col("article_ids_inview").list.len() > 0).select(pl.col("impression_time").min())
            read = (
                inputs[f"{name}_history"]
                .select(
                    user=pl.col("user_id").cast(pl.Int64),
                    article=pl.col("article_id_fixed").cast(pl.List(pl.Int64)),
                    time="impression_time_fixed",
                )
                .explode("article", "time")
                .filter(pl.col("time") < first.collect().item())
                .sort("user", "time", maintain_order=True)
                .group_by("user", maintain_order=True)
                .agg(pl.col("article").tail(most))
                .collect(engine="streaming")
            )
            number = sum(map(len, lists)) + pl.int_range(pl.len(), dtype=pl.Int64)
            known = read.select("user", past=number)
            lists.append(read["article"])
        part = part.with_columns(pl.lit(week).alias("week"), user=pl.col("user_id").cast(pl.Int64))
        weeks.append(part.join(known.lazy(), on="user", how="left", maintain_order="left").drop("user"))
    log = (
        pl.concat(weeks)
        .filter(pl.col("article_ids_inview").list.len() > 0)
        .with_columns(
            pl.col("article_ids_inview", "article_ids_clicked").cast(pl.List(pl.Int64)),
            pl.col("past").fill_null(0),
            second=pl.col("impression_time").dt.epoch("s"),
            half=tools.pick(0, "ebnerd split", "impression_id", 2),
        )
        .sort("second", "week", "impression_id", maintain_order=True)
        .collect(engine="streaming")
    )
    if log.height == 0:
        raise DataError("there is no impression in the input.")
    return log, pl.concat(lists)
