"""The same preparation in Polars and in DuckDB, as their users write it."""

from __future__ import annotations

import duckdb
import polars as pl
from prepare_tools import CATEGORICAL, COLUMNS, DENSE, prepare_case
from worker_tools import argument, versions

config = argument()
versions(polars=pl.__version__, duckdb=duckdb.__version__)


def by_polars(log, rows, out):
    types = {"label": pl.Int8, **dict.fromkeys(DENSE, pl.Float32), **dict.fromkeys(CATEGORICAL, pl.String)}
    frame = (
        pl.scan_csv(log, separator="\t", has_header=False, schema={name: types[name] for name in COLUMNS})
        .with_columns(
            pl.col("label").cast(pl.Float32),
            pl.col(DENSE).fill_null(0).clip(lower_bound=0).log1p(),
            pl.col(CATEGORICAL).str.to_integer(base=16).fill_null(0),  # a missing category is value 0
        )
        .collect(engine="streaming" if config["form"] == "Polars streaming" else "in-memory")
    )
    ids = []
    for name in CATEGORICAL:
        seen = frame[name].head(rows["train"]).value_counts().sort("count", name, descending=[True, False])
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
    types = {"label": "FLOAT", **dict.fromkeys(DENSE, "FLOAT"), **dict.fromkeys(CATEGORICAL, "VARCHAR")}
    values = ", ".join(f"coalesce(cast('0x' || {name} AS UBIGINT), 0) AS {name}" for name in CATEGORICAL)
    numbers = ", ".join(f"cast(ln(greatest(coalesce({name}, 0), 0) + 1) AS FLOAT) AS {name}" for name in DENSE)
    base = duckdb.connect()
    base.execute(f"SET threads = {config['threads']}")
    columns = str({name: types[name] for name in COLUMNS})
    base.execute(
        f"CREATE TABLE log AS SELECT label, {numbers}, {values} "
        f"FROM read_csv('{log}', delim = '\t', header = false, nullstr = '', columns = {columns})"
    )
    for name in CATEGORICAL:
        base.execute(
            f"CREATE TABLE v_{name} AS SELECT {name} AS value, cast(row_number() OVER (ORDER BY count(*) DESC, {name}) "
            f"AS INTEGER) AS id FROM log WHERE rowid < {rows['train']} GROUP BY {name}"
        )
    ids = ", ".join(f"coalesce(v_{name}.id, 0) AS {name}" for name in CATEGORICAL)
    joins = " ".join(f"LEFT JOIN v_{name} ON log.{name} = v_{name}.value" for name in CATEGORICAL)
    out.mkdir()
    start = 0
    for split, count in rows.items():
        base.execute(
            f"COPY (SELECT label, {', '.join(f'log.{name}' for name in DENSE)}, {ids} FROM log {joins} "
            f"WHERE log.rowid >= {start} AND log.rowid < {start + count} ORDER BY log.rowid) "
            f"TO '{out / f'{split}.parquet'}' (FORMAT parquet)"
        )
        start += count
    base.close()


prepare_case(config, by_duckdb if config["form"] == "DuckDB" else by_polars)
