"""Logs of several shapes prepared in Polars and in DuckDB, as their users write it."""

from __future__ import annotations

import duckdb
import polars as pl
from prepare_tools import prepare_case
from worker_tools import argument, versions

config = argument()
versions(polars=pl.__version__, duckdb=duckdb.__version__)
KIND, NAMES = config["shape"]["kind"], config["columns"]
CATEGORICAL = [*NAMES["whole"], *NAMES["text"]]


def scan(log):
    types = {"label": pl.Int8, **dict.fromkeys(NAMES["dense"], pl.Float32)}
    types |= {**dict.fromkeys(NAMES["whole"], pl.Int64), **dict.fromkeys(NAMES["text"], pl.String)}
    if KIND == "parquet":
        return pl.scan_parquet(log)
    if KIND == "csv":
        return pl.scan_csv(log, schema=types)
    # Of JSON Polars reads no numbers of 8 bits.
    return pl.scan_ndjson(log, schema=types | {"label": pl.Int64} | dict.fromkeys(NAMES["dense"], pl.Float64))


def by_polars(log, rows, out):
    frame = (
        scan(log)
        .with_columns(
            pl.col("label").cast(pl.Float32),
            pl.col(NAMES["dense"]).cast(pl.Float32).fill_null(0).clip(lower_bound=0).log1p(),
        )
        .collect(engine="streaming" if config["form"] == "Polars streaming" else "in-memory")
    )
    ids = []
    for name in CATEGORICAL:
        seen = frame[name].head(rows["train"]).drop_nulls().value_counts().sort("count", name, descending=[True, False])
        known = seen.select(name, pl.int_range(1, len(seen) + 1, dtype=pl.Int32).alias("id"))
        joined = frame.select(name).join(known, on=name, how="left", maintain_order="left")
        ids.append(joined["id"].fill_null(0).alias(name))
    frame = frame.with_columns(ids)
    out.mkdir()
    start = 0
    for split, count in rows.items():
        frame.slice(start, count).write_parquet(out / f"{split}.parquet")
        start += count


def by_duckdb(log, rows, out):
    types = {"label": "FLOAT", **dict.fromkeys(NAMES["dense"], "FLOAT")}
    types |= {**dict.fromkeys(NAMES["whole"], "BIGINT"), **dict.fromkeys(NAMES["text"], "VARCHAR")}
    numbers = ", ".join(f"cast(ln(greatest(coalesce({name}, 0), 0) + 1) AS FLOAT) AS {name}" for name in NAMES["dense"])
    columns = str(types)
    sources = {
        "csv": f"read_csv('{log}', header = true, nullstr = '', columns = {columns})",
        "parquet": f"read_parquet('{log}')",
        "jsonl": f"read_json('{log}', format = 'newline_delimited', columns = {columns})",
    }
    base = duckdb.connect()
    base.execute(f"SET threads = {config['threads']}")
    base.execute(
        f"CREATE TABLE log AS SELECT cast(label AS FLOAT) AS label, {numbers}, {', '.join(CATEGORICAL)} "
        f"FROM {sources[KIND]}"
    )
    for name in CATEGORICAL:
        base.execute(
            f"CREATE TABLE v_{name} AS SELECT {name} AS value, cast(row_number() OVER (ORDER BY count(*) DESC, {name}) "
            f"AS INTEGER) AS id FROM log WHERE rowid < {rows['train']} AND {name} IS NOT NULL GROUP BY {name}"
        )
    ids = ", ".join(f"coalesce(v_{name}.id, 0) AS {name}" for name in CATEGORICAL)
    joins = " ".join(f"LEFT JOIN v_{name} ON log.{name} = v_{name}.value" for name in CATEGORICAL)
    out.mkdir()
    start = 0
    for split, count in rows.items():
        base.execute(
            f"COPY (SELECT label, {', '.join(f'log.{name}' for name in NAMES['dense'])}, {ids} FROM log {joins} "
            f"WHERE log.rowid >= {start} AND log.rowid < {start + count} ORDER BY log.rowid) "
            f"TO '{out / f'{split}.parquet'}' (FORMAT parquet)"
        )
        start += count
    base.close()


prepare_case(config, by_duckdb if config["form"] == "DuckDB" else by_polars)
