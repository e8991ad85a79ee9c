"""The features of pandas_features.py in DuckDB, as its users write them: one query a step, in tables in memory.

Rows are numbered once and sorted once, at the end; tables are dropped after their last use. The limits of memory are
DuckDB's own.
"""

from __future__ import annotations

import duckdb
from features_tools import COLUMNS, COMBINATIONS, FOLDS, KEYS, MOST, SMOOTHING, feature_case, fold_of_rows
from worker_tools import argument, versions

versions(duckdb=duckdb.__version__)
TYPES = {name: {"int": "BIGINT", "string": "VARCHAR"}[kind] for name, kind in COLUMNS.items()}


def count_items(base, columns):
    """Rows of each item with each value of some columns, and their share of the rows with that value."""
    tag, by = "_".join(columns), ", ".join(columns)
    base.execute(
        f"CREATE TABLE items_{tag} AS SELECT {by}, item, count(*) AS count_{tag}, "
        f"count(*) / sum(count(*)) OVER (PARTITION BY {by}) AS share_{tag} FROM touched GROUP BY {by}, item"
    )


def encode(base, key):
    """Mean target of the other folds for each value of a column with the item."""
    base.execute(
        f"CREATE TABLE mean_{key} AS WITH own AS (SELECT {key}, item, fold, sum(label) AS hits, count(*) AS rows "
        f"FROM pairs GROUP BY ALL) SELECT {key}, item, fold, "
        f"(sum(hits) OVER w - hits + {SMOOTHING} * mean) / (sum(rows) OVER w - rows + {SMOOTHING}) AS {key}_item_mean "
        f"FROM own JOIN means USING (fold) WINDOW w AS (PARTITION BY {key}, item)"
    )


def job(folder, clock, out):
    base = duckdb.connect()
    base.execute(f"SET threads = {config['threads']}")
    with clock("read csv"):
        base.execute(
            f"CREATE TABLE log AS FROM read_csv('{folder / 'log.csv'}', header = true, delim = ',', columns = {TYPES})"
        )
        base.execute(
            f"CREATE TABLE metadata AS FROM read_csv('{folder / 'item_metadata.csv'}', header = true, delim = ',')"
        )
    with clock("binary features from text"):
        found = base.execute("SELECT DISTINCT unnest(string_split(properties, '|')) FROM metadata ORDER BY 1")
        binary = ", ".join(
            f"cast(contains(properties, '{value}') AS TINYINT) AS \"{value}\"" for (value,) in found.fetchall()
        )
        base.execute(f"CREATE TABLE properties AS SELECT {binary} FROM metadata")
    base.execute(f"COPY properties TO '{out / 'binary.parquet'}' (FORMAT parquet)")
    base.execute("DROP TABLE properties")
    with clock("string comparison and masking"):
        base.execute(
            "CREATE TABLE clicks AS SELECT row_number() OVER (ORDER BY rowid) - 1 AS clickout, user_id, session_id, "
            "city, device, current_filters, reference, impressions, prices FROM log WHERE action_type = 'clickout item'"
        )
    with clock("difference features"):
        base.execute(
            "CREATE TABLE steps AS SELECT action_type = 'clickout item' AS is_click_out, "
            "timestamp - lag(timestamp) OVER w AS seconds_since, lag(reference) OVER w AS last_reference FROM log "
            "WINDOW w AS (PARTITION BY session_id ORDER BY step, rowid) ORDER BY rowid"
        )
    base.execute(f"COPY steps TO '{out / 'log.parquet'}' (FORMAT parquet)")
    base.execute("DROP TABLE steps")
    with clock("constrain string"):
        base.execute(
            "CREATE TABLE touched AS SELECT user_id, session_id, city, cast(reference AS BIGINT) AS item FROM log "
            "WHERE starts_with(action_type, 'interaction') AND reference <> 'unknown'"
        )
    base.execute("DROP TABLE log")
    with clock("count items"):
        for columns in COMBINATIONS:
            count_items(base, columns)
    base.execute("DROP TABLE touched")
    with clock("string column split & expand"):
        base.execute(
            "CREATE TABLE lists AS SELECT * EXCLUDE (impressions, prices), string_split(impressions, '|') AS items, "
            "string_split(prices, '|') AS prices FROM clicks"
        )
    base.execute("DROP TABLE clicks")
    with clock("assign string columns"):
        places = ", ".join(f"items[{k}] AS item_{k}, prices[{k}] AS price_{k}" for k in range(1, MOST + 1))
        base.execute(f"CREATE TABLE wide AS SELECT {places} FROM lists")
    base.execute(f"COPY wide TO '{out / 'wide.parquet'}' (FORMAT parquet)")
    base.execute("DROP TABLE wide")
    with clock("create data pair"):
        base.execute(
            "CREATE TABLE listed AS SELECT clickout, cast(unnest(items) AS BIGINT) AS item, "
            "cast(unnest(prices) AS BIGINT) AS price, unnest(range(1, len(items) + 1)) AS rank, len(items) AS listed, "
            "user_id, session_id, city, device, current_filters, "
            "cast(coalesce(try_cast(reference AS BIGINT), -1) = item AS BIGINT) AS label FROM lists WHERE listed > 1"
        )
    base.execute("DROP TABLE lists")
    with clock("prepare for target encoding"):
        ((count,),) = base.execute("SELECT count(*) FROM listed").fetchall()
        base.register("folds", {"fold": fold_of_rows(count)})
        base.execute(
            "CREATE TABLE pairs AS SELECT * REPLACE (coalesce(current_filters, 'None') AS current_filters) "
            "FROM listed POSITIONAL JOIN folds"
        )
    base.execute("DROP TABLE listed")
    with clock("mean target encoding"):
        base.execute(
            "CREATE TABLE means AS SELECT fold, (sum(sum(label)) OVER () - sum(label)) / "
            "(sum(count(*)) OVER () - count(*)) AS mean FROM pairs GROUP BY fold"
        )
        assert base.execute("SELECT count(*) FROM means").fetchall() == [(FOLDS,)]
        for key in KEYS:
            encode(base, key)
        joins = " ".join(f"LEFT JOIN mean_{key} USING ({key}, item, fold)" for key in KEYS)
        base.execute(
            f"CREATE TABLE encoded AS SELECT clickout, item, price, label, rank, listed, user_id, session_id, city, "
            f"{', '.join(f'{key}_item_mean' for key in KEYS)} FROM pairs {joins}"
        )
    for name in ("pairs", *(f"mean_{key}" for key in KEYS)):
        base.execute(f"DROP TABLE {name}")
    tags = ["_".join(columns) for columns in COMBINATIONS]
    with clock("merge"):
        joins = " ".join(
            f"LEFT JOIN items_{tag} USING ({', '.join(columns)}, item)"
            for tag, columns in zip(tags, COMBINATIONS, strict=True)
        )
        base.execute(
            f"CREATE TABLE merged AS SELECT encoded.* EXCLUDE (user_id, session_id, city), "
            f"{', '.join(f'count_{tag}, share_{tag}' for tag in tags)}, stars "
            f"FROM encoded {joins} LEFT JOIN metadata ON encoded.item = metadata.item_id"
        )
    base.execute("DROP TABLE encoded")
    with clock("difference features"):
        base.execute(
            "CREATE TABLE made AS SELECT *, price - lag(price) OVER (PARTITION BY clickout ORDER BY rank) "
            "AS price_difference, rank() OVER (PARTITION BY clickout ORDER BY price) AS price_rank FROM merged "
            "ORDER BY clickout, merged.rank"
        )
    base.execute(f"COPY made TO '{out / 'pairs.parquet'}' (FORMAT parquet)")
    base.close()
    return count


config = argument()
feature_case(config, job)
