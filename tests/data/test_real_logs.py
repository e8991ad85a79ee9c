"""Everyday logs as people have them: real purchases, clicks, ratings and impressions in the forms that files take.

Online Retail is in the repository; the others are read where they are present.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from processes import context
from recipe_logs import RETAIL, real

import stoker
from stoker.base.errors import DataError, SchemaError
from stoker.cli import main

# The plain back end: every column has a width of its own, and so a kernel to compile.
TABULAR: dict[str, Any] = {"model": "tabular", "batch_size": 256, "backend": "reference", "tensorboard": False}
RETAIL_SCHEMA: dict[str, Any] = {
    "name": "retail",
    "label": "cancelled",
    "timestamp": {"column": "when", "type": "datetime"},
    "split": {"rule": "time"},
    "dense": [{"name": "price", "transforms": ["log1p"]}, {"name": "quantity"}],
    "categorical": [{"name": "item"}, {"name": "customer"}, {"name": "country"}, {"name": "text"}],
}


def retail(every: int = 40) -> pl.DataFrame:
    """Real purchases in order of time: 13,500 of them, or others by ``every``."""
    rows = pl.read_parquet(RETAIL).gather_every(every)
    return rows.select(
        when="InvoiceDate", item="StockCode", text="Description", customer="CustomerID", country="Country",
        quantity="Quantity", price=pl.col("UnitPrice").cast(pl.Float64),
        cancelled=pl.col("InvoiceNo").str.starts_with("C").cast(pl.Int8),
    )  # fmt: skip


def schema(**changes: Any) -> stoker.Schema:
    return stoker.Schema.from_dict(RETAIL_SCHEMA | changes)


def hashes(data: stoker.Dataset) -> list[str]:
    return [shard["sha256"] for name in ("train", "valid", "test") for shard in data.manifest["splits"][name]["shards"]]


def times(data: stoker.Dataset) -> dict[str, Any]:
    return {name: entry["time"] for name, entry in data.manifest["splits"].items()}


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    return int(done.value.code or 0)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    retail().write_csv(tmp_path / "retail.csv")
    return tmp_path / "retail.csv"


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["%m/%d/%Y %H:%M", "%d.%m.%Y %H:%M:%S"])
def test_dates_mean_what_the_format_says(tmp_path: Path, log: Path, pattern: str) -> None:
    plain = stoker.prepare(schema(), log, out=tmp_path / "iso")
    other = tmp_path / "other.csv"
    retail().with_columns(pl.col("when").str.to_datetime().dt.to_string(pattern)).write_csv(other)
    with pytest.raises(DataError) as refused:
        stoker.prepare(schema(), other, out=tmp_path / "guess")
    assert f'format = "{pattern}"' in str(refused.value)
    assert not (tmp_path / "guess").exists()
    when = RETAIL_SCHEMA["timestamp"] | {"format": pattern}
    formatted = stoker.prepare(schema(timestamp=when), other, out=tmp_path / "formatted")
    assert hashes(formatted) == hashes(plain)
    assert times(formatted) == times(plain)
    found = times(plain)
    assert found["train"]["first"].startswith("2010-12-01")
    assert found["train"]["last"] < found["valid"]["first"] <= found["valid"]["last"] < found["test"]["first"]


@pytest.mark.slow
def test_a_column_may_mix_the_forms_of_iso_8601(tmp_path: Path, log: Path) -> None:
    moment = pl.col("when").str.to_datetime()
    number = pl.int_range(pl.len()) % 4
    mixed = retail().with_columns(
        pl.when(number == 0).then(moment.dt.to_string("%Y%m%dT%H%M%S"))
        .when(number == 1).then(moment.dt.to_string("%Y-%m-%dT%H:%M:%SZ"))
        .when(number == 2).then(moment.dt.offset_by("2h").dt.to_string("%Y-%m-%d %H:%M:%S+02:00"))
        .otherwise(pl.col("when"))
    )  # fmt: skip
    mixed.write_csv(tmp_path / "mixed.csv")
    data = stoker.prepare(schema(), tmp_path / "mixed.csv", out=tmp_path / "mixed")
    plain = stoker.prepare(schema(), log, out=tmp_path / "iso")
    assert hashes(data) == hashes(plain)
    assert data.manifest["quarantined"] == 0


def test_inspect_shows_the_times_of_every_split(tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = stoker.prepare(schema(), log, out=tmp_path / "data")
    assert run("inspect", data.path) == 0
    shown = capsys.readouterr().out
    for ends in times(data).values():
        assert ends["first"] in shown
        assert ends["last"] in shown


def with_breaks(rows: pl.DataFrame, column: str) -> pl.DataFrame:
    """Put line breaks and quotes into a text of one row in twelve, as people write reviews."""
    broken = pl.col(column) + '\n"as described", said my son;\r\nI\'d buy it again'
    return rows.with_columns(pl.when(pl.int_range(pl.len()) % 12 == 5).then(broken).otherwise(column).alias(column))


@pytest.mark.slow
def test_line_breaks_in_quoted_fields_are_text(tmp_path: Path) -> None:
    rows = with_breaks(retail(), "text")
    rows.write_csv(tmp_path / "breaks.csv")
    assert pl.read_csv(tmp_path / "breaks.csv", infer_schema=False).height == rows.height
    data = stoker.prepare(schema(), tmp_path / "breaks.csv", out=tmp_path / "csv")
    rows.write_parquet(tmp_path / "breaks.parquet")
    typed = stoker.prepare(schema(), tmp_path / "breaks.parquet", out=tmp_path / "parquet")
    assert data.manifest["quarantined"] == 0
    assert sum(len(split) for split in (data.train, data.valid, data.test)) == rows.height
    assert hashes(data) == hashes(typed)


@pytest.mark.slow
def test_titles_of_real_books_keep_their_quotes_and_line_breaks(tmp_path: Path) -> None:
    files = real("bookcrossing/ratings.parquet", "bookcrossing/books.parquet")
    ratings, books = map(pl.read_parquet, files)
    rows = with_breaks(ratings[::60].join(books, "isbn", maintain_order="left"), "title")
    rows.write_csv(tmp_path / "books.csv")
    data = stoker.prepare(
        stoker.Schema.from_dict({
            "label": {"column": "rating", "rule": ">= 6"},
            "categorical": [{"name": name} for name in ("user_id", "isbn", "title", "author", "publisher")],
        }),
        tmp_path / "books.csv", out=tmp_path / "data",
    )  # fmt: skip
    assert data.manifest["quarantined"] == 0
    assert sum(len(split) for split in (data.train, data.valid, data.test)) == rows.height
    titles = set(pq.read_table(data.path / "vocab" / "title.parquet")["value"].to_pylist())
    assert titles <= set(rows["title"].to_list())
    assert any("\n" in title for title in titles)


@pytest.mark.slow
def test_another_encoding_stops_with_its_remedy(tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = log.read_text(encoding="utf-8").replace("United Kingdom", "Großbritannien")
    (tmp_path / "latin.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError) as refused:
        stoker.prepare(schema(), tmp_path / "latin.csv", out=tmp_path / "data")
    message = str(refused.value)
    assert "broken UTF-8" in message
    assert 'encoding = "latin-1"' in message
    assert message.count("\n") < 10
    data = stoker.prepare(schema(source={"encoding": "latin-1"}), tmp_path / "latin.csv", out=tmp_path / "latin")
    assert data.manifest["quarantined"] == 0
    assert "Großbritannien" in pq.read_table(data.path / "vocab" / "country.parquet")["value"].to_pylist()


def test_columns_that_tell_the_label(tmp_path: Path, log: Path) -> None:
    with pytest.raises(SchemaError, match="cancelled"):
        schema(dense=[{"name": "cancelled"}])
    with pytest.raises(SchemaError, match="cancelled"):
        schema(categorical=[{"name": "item"}, {"name": "gone", "source": "cancelled", "type": "int"}])
    ruled = schema(label={"column": "quantity", "rule": "< 0"})
    with pytest.warns(UserWarning, match="quantity"):
        stoker.prepare(ruled, log)


@pytest.mark.slow
def test_rows_without_labels_are_scored_and_keep_their_names(tmp_path: Path) -> None:
    rows = retail()
    known, new = rows[:-1000], rows[-1000:].drop("cancelled")
    data = stoker.prepare(schema(), known, out=tmp_path / "data")
    new.write_csv(tmp_path / "new.csv")
    run_folder = tmp_path / "run"
    stoker.train(data, out=run_folder, steps=10, **TABULAR)
    out, scores = tmp_path / "new", tmp_path / "scores.parquet"
    keep = ("--keep", "customer", "--keep", "when")
    assert run("prepare", tmp_path / "new.csv", "--like", data.path, *keep, "--out", out) == 0
    assert run("predict", run_folder, "--data", out, "--out", scores) == 0
    table = pl.read_parquet(scores)
    assert table["customer"].to_list() == new["customer"].to_list()
    assert table["when"].cast(pl.Datetime).to_list() == new["when"].str.to_datetime().to_list()
    assert table["score"].is_between(0, 1).all()
    assert table["label"].is_nan().fill_null(True).all()


@pytest.mark.slow
def test_impressions_of_a_second_week_are_scored_without_their_clicks(tmp_path: Path) -> None:
    weeks = real("ebnerd/train_behaviors.parquet", "ebnerd/validation_behaviors.parquet")
    first, second = (
        pl.read_parquet(file)[:1500].explode("article_ids_inview").select(
            "impression_id", "impression_time", "user_id", "device_type", item="article_ids_inview",
            clicked=pl.col("article_ids_inview").is_in("article_ids_clicked").cast(pl.Int8),
        )
        for file in weeks
    )  # fmt: skip
    news = stoker.Schema.from_dict({
        "label": "clicked", "group": "impression_id",
        "timestamp": {"column": "impression_time", "type": "datetime"},
        "categorical": [{"name": name, "type": "int"} for name in ("user_id", "device_type", "item")],
    })  # fmt: skip
    data = stoker.prepare(news, first)
    model = stoker.train(data, out=tmp_path / "run", steps=10, **TABULAR).model
    new = stoker.prepare(files=second.drop("clicked"), like=data.path, keep=("user_id", "impression_time"))
    scores = stoker.predict(model, new.test)
    assert scores.kept is not None
    assert scores.kept["user_id"].to_pylist() == second["user_id"].to_list()
    assert scores.kept["impression_time"].to_pylist() == second["impression_time"].to_list()
    assert len(scores.scores) == second.height


@pytest.mark.slow
@pytest.mark.parametrize("form", ["polars", "lazy", "pandas", "pyarrow", "stream"])
def test_tables_give_the_shards_of_their_file(tmp_path: Path, form: str) -> None:
    rows = retail()
    rows.write_parquet(tmp_path / "rows.parquet")
    forms: dict[str, Callable[[], Any]] = {
        "polars": lambda: rows, "lazy": rows.lazy, "pandas": rows.to_pandas, "pyarrow": rows.to_arrow,
        "stream": lambda: rows.to_arrow().to_reader(max_chunksize=777),
    }  # fmt: skip
    table = stoker.prepare(schema(), forms[form]())
    assert hashes(table) == hashes(stoker.prepare(schema(), tmp_path / "rows.parquet"))


@pytest.mark.slow
def test_logs_datasets_and_runs_at_urls(log: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="URLs are read by fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/retail/log.csv", log.read_bytes())
    try:
        data = stoker.prepare(schema(), "memory://retail/*.csv", out="memory://retail/data")
        assert hashes(data) == hashes(stoker.prepare(schema(), log))
        stoker.train("memory://retail/data", out="memory://retail/run", steps=5, **TABULAR)
        assert memory.exists("/retail/run")
    finally:
        memory.rm("/retail", recursive=True)


def drafted(tmp_path: Path, file: Path) -> stoker.Schema:
    """The schema that ``stoker init`` drafts, with which the log must prepare."""
    assert run("init", file, "--out", tmp_path / "draft.toml") == 0
    assert run("prepare", tmp_path / "draft.toml", file, "--out", tmp_path / "drafted") == 0
    return stoker.Schema.from_dict(tomllib.loads((tmp_path / "draft.toml").read_text(encoding="utf-8")))


@pytest.mark.slow
def test_a_draft_of_real_purchases(tmp_path: Path, log: Path) -> None:
    found = drafted(tmp_path, log)
    assert found.label.column == "cancelled"
    assert found.timestamp is not None
    assert found.timestamp.column == "when"
    assert {"price", "quantity"} <= set(found.dense_names)
    assert {"item", "customer", "country"} <= {column.raw for column in found.features}


def test_a_draft_of_real_news_impressions(tmp_path: Path) -> None:
    (file,) = real("ebnerd/train_behaviors.parquet")
    rows = pl.read_parquet(file)[:400].explode("article_ids_inview")
    clicked = pl.col("article_ids_inview").is_in("article_ids_clicked").cast(pl.Int8).alias("clicked")
    rows.with_columns(clicked).drop("article_ids_clicked", "^next_.*$").write_parquet(tmp_path / "news.parquet")
    found = drafted(tmp_path, tmp_path / "news.parquet")
    assert found.label.column == "clicked"
    assert found.timestamp is not None
    assert found.timestamp.column == "impression_time"
    assert {"user_id", "article_ids_inview"} <= {column.raw for column in found.features}


def test_a_draft_of_real_ratings(tmp_path: Path) -> None:
    (file,) = real("bookcrossing/ratings.parquet")
    pl.read_parquet(file)[:20_000].write_csv(tmp_path / "ratings.csv", separator=";")
    found = drafted(tmp_path, tmp_path / "ratings.csv")
    assert found.label.column == "rating"
    assert found.label.rule is not None
    assert {"user_id", "isbn"} == {column.raw for column in found.features}


@pytest.mark.slow
def test_a_recipe_schema_is_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = real("criteo_tb/day_0_head.tsv.gz")
    assert run("schema", "criteo") == 0
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert run("prepare", tmp_path / "mine.toml", file, "--split", "random:0.8,0.1", "--out", tmp_path / "data") == 0
    data = stoker.Dataset(tmp_path / "data")
    assert data.manifest["schema"]["split"]["rule"] == "hash"
    assert sum(len(split) for split in (data.train, data.valid, data.test)) == 10_000
    recipe = stoker.prepare("criteo", file, split="random:0.8,0.1")
    assert hashes(recipe) == hashes(data)


@pytest.mark.slow
def test_patterns_of_columns_splits_and_histories(tmp_path: Path) -> None:
    (file,) = real("globo/clicks.parquet")
    clicks = pl.read_parquet(file)[:60_000].with_columns(mobile=(pl.col("click_deviceGroup") != 1).cast(pl.Int8))
    news = stoker.Schema.from_dict({
        "label": "mobile",
        "timestamp": {"column": "click_timestamp", "type": "int"},
        "dense": [{"name": "session_s*", "transforms": ["zscore"]}],
        "categorical": [{"name": "click_article_id", "type": "int", "table": "article"}],
        "sequence": [{"name": "read", "type": "int", "table": "article", "max_length": 5}],
        "feature": [{
            "kind": "history", "name": "read", "by": ["user_id"], "order": "click_timestamp",
            "column": "click_article_id", "length": 5,
        }],
    })  # fmt: skip
    data = stoker.prepare(news, clicks, split="leave_last_out:user_id")
    assert data.schema.dense == ("session_start", "session_size")
    assert len(data.test) == clicks.group_by("user_id").len().filter(pl.col("len") >= 3).height
    rows = clicks.with_row_index("row").sort("click_timestamp", maintain_order=True)
    someone = rows.group_by("user_id", maintain_order=True).agg("click_article_id", "click_timestamp")
    count = pl.col("click_timestamp").list.len()
    someone = someone.filter(count >= 3, pl.col("click_timestamp").list.n_unique() == count)
    values = pq.read_table(data.path / "vocab" / "article.parquet")["value"].to_pylist()
    ids = {value: number + 1 for number, value in enumerate(values)}
    expected = {
        tuple(ids.get(article, 0) for article in articles[-6:-1]) for articles in someone["click_article_id"].to_list()
    }
    batch = next(iter(data.test.batches(len(data.test))))
    lists = batch_lists(data, batch, "read")
    assert len(expected) > 500
    assert expected <= lists


def batch_lists(data: stoker.Dataset, batch: Any, name: str) -> set[tuple[int, ...]]:
    """The ids of one feature of every example."""
    names = [feature.name for feature in data.schema.features]
    starts, ends = batch.offsets[:-1], batch.offsets[1:]
    mine = slice(names.index(name), None, len(names))
    bags = zip(starts[mine].tolist(), ends[mine].tolist(), strict=True)
    return {tuple(batch.ids[start:end].tolist()) for start, end in bags}


@pytest.mark.slow
def test_new_days_go_on_from_the_state_of_window_features(tmp_path: Path) -> None:
    rows = retail(20)
    featured = {
        "feature": [{"kind": "past_count", "name": "bought", "by": ["item"], "order": "when"}],
        "dense": [{"name": "bought"}],
    }
    cut = 20_000
    whole = stoker.prepare(schema(**featured, split={"rule": "time", "train": 0.5, "valid": 0.2, "test": 0.3}), rows)
    before = stoker.prepare(schema(**featured), rows[:cut], out=tmp_path / "before")
    after = stoker.prepare(files=rows[cut:], like=before.path)
    given = np.concatenate([dense_column(split) for split in (whole.train, whole.valid, whole.test)])
    assert given.shape == (rows.height,)
    assert (dense_column(after.test) == given[cut:]).all()
    assert given[cut:].max() > 10


def dense_column(split: Any) -> Any:
    """The first dense column of all rows, in file order."""
    return np.concatenate([batch.dense[:, 0].numpy() for batch in split.batches(4096)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda raw: raw.replace(b"\n", b"\r"), "carriage returns"),
        (lambda raw: raw.decode().encode("utf-16"), "UTF-16"),
        (lambda raw: raw[:0], "is empty"),
        (lambda raw: raw.replace(b"cancelled", b"canceled", 1), "cancelled"),
        (lambda raw: raw.split(b"\n", 1)[0] + b"\n", "no usable row"),
    ],
)
def test_a_file_that_cannot_be_right_is_one_short_message(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[bytes], bytes], said: str
) -> None:
    log.write_bytes(spoil(log.read_bytes()))
    lines = ['label = "cancelled"', "[[categorical]]", 'name = "item"']
    (tmp_path / "s.toml").write_text("\n".join(lines))
    assert run("prepare", tmp_path / "s.toml", log, "--out", tmp_path / "data") == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") < 10
    assert len(message) < 1_000
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_ninety_unknown_columns_are_one_short_message(log: Path) -> None:
    many = schema(dense=[{"name": f"affinity_{number}"} for number in range(90)])
    with pytest.raises(DataError) as refused:
        stoker.prepare(many, log)
    assert "90 columns" in str(refused.value)
    assert len(str(refused.value)) < 1_000


@pytest.mark.slow
def test_processes_write_the_bytes_of_threads(tmp_path: Path, log: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=context()) as executor:
        there = stoker.prepare(schema(), log, out=tmp_path / "processes", executor=executor)
    assert hashes(there) == hashes(stoker.prepare(schema(), log, out=tmp_path / "threads"))
