"""A feature table prepared for training in Polars and in DuckDB, as their users write it."""

from __future__ import annotations

import numpy as np
import polars as pl
import torch

PLAIN = ("rank", "price_rank", "is_last_item")  # as are the means: not counts, so without a logarithm


def by_polars(source, dims, numbers):
    """Codes [rows, tables] (0: not among the training rows), numbers [rows, columns], labels, whether a row trains."""
    frame = pl.read_parquet(source, columns=[*dims, *numbers, "label", "split"])
    train = (frame["split"] == "train").to_numpy()
    codes, sizes = [], []
    for name in dims:
        column = frame[name]
        text = column.dtype == pl.String
        found = column.cast(pl.Categorical).to_physical() if text else column.rank("dense") - 1
        raw = found.fill_null(found.max() + 1).to_numpy().astype(np.int64)
        seen = np.zeros(raw.max() + 1, dtype=np.int64)
        seen[raw[train]] = 1
        place = np.cumsum(seen) * seen
        codes.append(place[raw])
        sizes.append(int(seen.sum()) + 1)
    wanted, flags = [], []
    for name in numbers:
        column = pl.col(name).cast(pl.Float32)
        if name == "price" or "since" in name:
            flags.append(column.is_null().cast(pl.Float32).alias(f"{name}_null"))
            column = column.fill_null(column.filter(pl.col("split") == "train").median())
        column = column.fill_null(0)
        if name not in PLAIN and not name.endswith("_mean"):
            column = column.clip(lower_bound=0).log1p()
        learned = column.filter(pl.col("split") == "train")
        wanted.append(((column - learned.mean()) / (learned.std() + 1e-7)).alias(name))
    values = np.ascontiguousarray(frame.select(*wanted, *flags).to_numpy(), dtype=np.float32)
    labels = frame["label"].cast(pl.Float32).to_numpy().copy()
    return torch.from_numpy(np.column_stack(codes)), torch.from_numpy(values), torch.from_numpy(labels), train, sizes


def by_duckdb(source, dims, numbers, threads):
    """Codes [rows, tables] (0: not among the training rows), numbers [rows, columns], labels, whether a row trains."""
    import duckdb

    base = duckdb.connect()
    base.execute(f"SET threads = {threads}")
    late = [name for name in numbers if name == "price" or "since" in name]
    raw = ", ".join(f"cast({name} AS FLOAT) AS n_{name}" for name in numbers)
    base.execute(
        f"CREATE TABLE pairs AS SELECT {', '.join(dims)}, {raw}, "
        f"cast(label AS FLOAT) AS label, split = 'train' AS train FROM read_parquet('{source}')"
    )
    medians = ", ".join(f"median(n_{name}) AS m_{name}" for name in late)
    base.execute(f"CREATE TABLE medians AS SELECT {medians} FROM pairs WHERE train")

    def number(name):
        value = f"coalesce(n_{name}, {f'm_{name}' if name in late else 0})"
        return value if name in PLAIN or name.endswith("_mean") else f"ln(1 + greatest({value}, 0))"

    filled = ", ".join(f"cast({number(name)} AS FLOAT) AS n_{name}" for name in numbers)
    flags = ", ".join(f"cast(n_{name} IS NULL AS FLOAT) AS null_{name}" for name in late)
    base.execute(
        f"CREATE TABLE filled AS SELECT {', '.join(dims)}, {filled}, {flags}, label, train "
        "FROM pairs CROSS JOIN medians"
    )
    base.execute("DROP TABLE pairs")
    statistics = ", ".join(f"avg(n_{n}) AS mean_{n}, stddev_samp(n_{n}) + 1e-7 AS std_{n}" for n in numbers)
    base.execute(f"CREATE TABLE statistics AS SELECT {statistics} FROM filled WHERE train")
    for name in dims:
        base.execute(
            f"CREATE TABLE v_{name} AS SELECT {name} AS value, cast(row_number() OVER () AS BIGINT) AS id "
            f"FROM filled WHERE train GROUP BY {name}"
        )
    sizes = [base.execute(f"SELECT count(*) + 1 FROM v_{name}").fetchall()[0][0] for name in dims]
    codes = [f"coalesce(v_{name}.id, 0) AS {name}" for name in dims]
    joins = " ".join(f"LEFT JOIN v_{name} ON filled.{name} IS NOT DISTINCT FROM v_{name}.value" for name in dims)
    scaled = [f"cast((n_{name} - mean_{name}) / std_{name} AS FLOAT) AS n_{name}" for name in numbers]
    kept = [*scaled, *(f"null_{name}" for name in late)]
    found = base.execute(
        f"SELECT {', '.join([*codes, *kept])}, label, train FROM filled {joins} CROSS JOIN statistics "
        "ORDER BY filled.rowid"
    ).fetchnumpy()
    base.close()
    columns = [*(f"n_{name}" for name in numbers), *(f"null_{name}" for name in late)]
    values = np.column_stack([found[name] for name in columns]).astype(np.float32, copy=False)
    ids = np.column_stack([found[name] for name in dims])
    labels = torch.from_numpy(np.ascontiguousarray(found["label"]))
    return torch.from_numpy(ids), torch.from_numpy(values), labels, np.asarray(found["train"], bool), sizes
