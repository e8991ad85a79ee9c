"""Daily updates against training anew on all days: AUC on the next day, processor time, and bytes written.

A run is trained on the first days of a log and updated with each day after them. On each of the last two days the
updated model, which has seen all days before, is compared with one that is trained on all days before from the start,
with a vocabulary of its own. Both train one pass. Rows of logs without negatives get some: other items that were
bought or read at about the same time. The logs are read from ``STOKER_DATA`` or ``../shared/data``.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import stoker
from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, data_files
from stoker.prep.schema import Schema

__all__ = ["bars"]

SEEDS = 3
COMPARED = 2  # last days
SETTINGS: dict[str, Any] = {
    "batch_size": 1024, "epochs": 1, "model_options": {"bottom": (32, 16), "top": (64, 32)}, "display": "quiet",
    "tensorboard": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log by day: ``read`` returns its rows in order of time, with ``label``, ``time`` (seconds) and ``day``."""

    title: str
    files: tuple[str, ...]
    read: Callable[[list[Path]], pl.DataFrame]
    item: str
    first: int  # days that are trained first
    days: int
    keep_ids: bool = False  # of the updates; chosen by their AUC on the days before those that are compared


@dataclass(frozen=True, kw_only=True)
class Day:
    """What was measured on a day."""

    rows: int
    updated: float  # AUC
    anew: float
    update_seconds: float  # of the processor: prepare, score, train, write
    anew_seconds: float
    share: float  # bytes written, of a whole checkpoint


def _beside(log: pl.DataFrame, item: str, copies: int, reach: int, ahead: int) -> pl.DataFrame:
    """Add ``copies`` negatives to each row: the item of another row near it."""
    random, count = np.random.default_rng(0), len(log)
    parts = [log.with_columns(label=pl.lit(1))]
    for _ in range(copies):
        at = np.clip(np.arange(count) - random.integers(1 - ahead, reach, count), 0, count - 1)
        parts.append(log.with_columns(log[item].gather(at), label=pl.lit(0)))
    return pl.concat(parts).sort("time", maintain_order=True)


def _by_day(log: pl.DataFrame) -> pl.DataFrame:
    return log.with_columns(day=(pl.col("time") - log["time"].min()) // 86_400)


def _globo(files: list[Path]) -> pl.DataFrame:
    log = pl.read_parquet(files[0]).sort("click_timestamp").filter(pl.col("user_id") % 4 == 0)
    names = ("environment", "deviceGroup", "os", "country", "region", "referrer_type")
    columns = {name: f"click_{name}" for name in names}
    log = log.select(
        time=pl.col("click_timestamp").cast(pl.Int64) // 1000, user="user_id", item="click_article_id", **columns
    )
    return _by_day(_beside(log, "item", 1, 4000, 0))


def _ebnerd(files: list[Path]) -> pl.DataFrame:
    log = pl.concat([pl.read_parquet(path) for path in files])
    names = ("device_type", "is_sso_user", "is_subscriber", "gender", "age")
    shown, clicked = pl.col("article_ids_inview"), pl.col("article_ids_clicked")
    log = log.select("user_id", "impression_time", *names, shown, clicked).explode("article_ids_inview")
    log = log.select(
        pl.col("impression_time").dt.epoch("s").alias("time"),
        clicked.list.contains(shown).cast(pl.Int64).alias("label"),
        pl.col("user_id").alias("user"), shown.alias("item"), *names,
    )  # fmt: skip
    return _by_day(log.sort("time", maintain_order=True))


def _retail(files: list[Path]) -> pl.DataFrame:
    log = pl.read_parquet(files[0]).filter(pl.col("CustomerID").is_not_null())
    month = pl.col("InvoiceDate").str.slice(0, 7).rank("dense").cast(pl.Int64) - 1
    log = log.select(
        time=pl.col("InvoiceDate").str.to_datetime("%Y-%m-%d %H:%M:%S").dt.epoch("s"), user="CustomerID",
        item="StockCode", country="Country", day=month,
    ).sort("time", maintain_order=True)  # fmt: skip
    return _beside(log, "item", 2, 2000, 2000)


LOGS = {
    "globo": Log(title="Globo, one reader in 4, by day", files=("globo/clicks.parquet",), read=_globo, item="item",
                 first=10, days=15, keep_ids=True),
    "ebnerd": Log(title="EB-NeRD, by day", files=("ebnerd/train_behaviors.parquet",
                                                  "ebnerd/validation_behaviors.parquet"), read=_ebnerd, item="item",
                  first=9, days=14),
    "online-retail": Log(title="Online Retail, by month", files=("online_retail/invoices.parquet",), read=_retail,
                         item="item", first=9, days=13),
}  # fmt: skip


def _schema(log: Log, rows: pl.DataFrame) -> Schema:
    columns = [name for name in rows.columns if name not in ("time", "day", "label")]
    return Schema.from_dict(
        {
            "name": "days", "label": "label", "timestamp": {"column": "time", "type": "int"},
            "categorical": [{"name": name, "type": "string", "min_count": 2} for name in columns],
            "split": {"rule": "hash", "train": 0.97, "valid": 0.03, "test": 0.0},
        }
    ).with_feature(f"past_count name=seen by={log.item} order=time window=86400")  # fmt: skip


def _days(log: Log, folder: Path, seed: int) -> list[Day]:
    rows = log.read(data_files(*log.files))
    schema = _schema(log, rows)
    texts = [name for name in rows.columns if name not in ("time", "day", "label")]
    rows = rows.with_columns(pl.col(texts).cast(pl.String))
    files = [folder / f"day_{day:02d}.parquet" for day in range(log.days)]
    for day, path in enumerate(files):
        rows.filter(pl.col("day") == day).drop("day").write_parquet(path)
    stoker.prepare(schema, files[: log.first], out=folder / "data")
    stoker.train(folder / "data", out=folder / "run", seed=seed, **SETTINGS).model.embeddings.close()
    found = []
    for day in range(log.first, log.days):
        anew, spent = 0.0, 0.0
        if day >= log.days - COMPARED:
            began = time.process_time()
            data = stoker.prepare(schema, files[:day], out=folder / f"data-{day}")
            result = stoker.train(data, out=folder / f"run-{day}", seed=seed, **SETTINGS)
            spent = time.process_time() - began
            anew = stoker.evaluate(result.model, stoker.prepare(files=files[day], like=data).test)["auc"]
            result.model.embeddings.close()
        began = time.process_time()
        made = stoker.update(folder / "run", files[day], keep_ids=log.keep_ids)
        found.append(
            Day(rows=made.rows, updated=made.before["auc"] or 0.5, anew=anew, anew_seconds=spent,
                update_seconds=time.process_time() - began, share=made.bytes / made.whole_bytes)
        )  # fmt: skip
    return found


@cache
def measured(quick: bool) -> dict[str, list[list[Day]]]:
    """Return the days of each seed, by log."""
    found: dict[str, list[list[Day]]] = {}
    for name, log in LOGS.items():
        for seed in range(1 if quick else SEEDS):
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                found.setdefault(name, []).append(_days(log, Path(folder), seed))
    return found


def _outcome(run: Run, choose: Callable[[dict[str, dict[str, float]]], float]) -> Outcome:
    figures, rows = {}, []
    for name, seeds in measured(run.quick).items():
        days = [day for each in seeds for day in each]
        last = [day for each in seeds for day in each[-COMPARED:]]
        mine = {
            "updated": statistics.mean(day.updated for day in last), "anew": statistics.mean(day.anew for day in last),
            "time": sum(day.update_seconds for day in last) / sum(day.anew_seconds for day in last),
            "share": statistics.median(day.share for day in days), "least": min(day.share for day in days),
        }  # fmt: skip
        figures[name] = {**mine, "margin": mine["updated"] - mine["anew"]}
        rows.append([
            LOGS[name].title, f"{statistics.mean(day.rows for day in days):,.0f}", f"{mine['updated']:.4f}",
            f"{mine['anew']:.4f}", f"{figures[name]['margin']:+.4f}", f"{mine['time']:.2f}", f"{mine['share']:.1%}",
            f"{mine['least']:.1%}",
        ])  # fmt: skip
    columns = ["log", "rows a day", "AUC, updated", "trained anew", "margin", "time, of anew", "written, median",
               "least"]  # fmt: skip
    notes = [
        f"AUC: mean of the last {COMPARED} days and of {1 if run.quick else SEEDS} seed(s)",
        "an update prepares, scores and trains a day; training anew prepares and trains all days before",
        "written: of a whole checkpoint",
    ]
    return Outcome(
        value=choose(figures), tables=[Table(title="Daily updates", columns=columns, rows=rows)], notes=notes,
        data={"figures": figures},
    )  # fmt: skip


def bars() -> list[Bar]:
    """What an update may lose, take and write."""
    made: list[tuple[str, str, float, bool, str, Callable[[Any], float]]] = [
        ("daily-auc", "AUC on the next day of a run that is updated daily, less that of one trained anew, least of "
         "three logs", -0.002, False, "", lambda found: min(each["margin"] for each in found.values())),
        ("daily-time", "processor time of a day's update, of training anew on all days, most of three logs", 0.2, True,
         "", lambda found: max(each["time"] for each in found.values())),
        ("daily-bytes", "bytes of a day's update, of a whole checkpoint, median of Globo's days", 0.1, True, "",
         lambda found: float(found["globo"]["share"])),
    ]  # fmt: skip
    return [
        Bar(
            name=name, group="every-day", title=title, must=must, at_most=most, unit=unit, digits=4, rounds=1,
            run=lambda run, choose=choose: _outcome(run, choose),
        )
        for name, title, must, most, unit, choose in made
    ]  # fmt: skip
