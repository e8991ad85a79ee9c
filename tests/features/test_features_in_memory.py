"""What is done faster for rows in memory: the same keys, texts and numbers as elsewhere, to the bit."""

from __future__ import annotations

from pathlib import Path

import naive_features as naive
import polars as pl
import pytest

from stoker import features as f
from stoker.base.errors import ConfigError
from stoker.prep.features import execute
from stoker.prep.features.tables import read_table

PIECES = ["a", "é", "", "thirteen byte", "a text of more than twelve bytes", "12", ":", "|"]


def draw(count: int, most: int, seed: int) -> list[int]:
    return [naive.splitmix(seed * 1_000_003 + number) % most for number in range(count)]


def drawn_rows(count: int) -> pl.DataFrame:
    texts = ["a text of more than twelve bytes", "short", None, "thirteen byte"]
    labels = [(value - 500) / 8 for value in draw(count, 1000, 4)]  # all sums of them are exact
    return pl.DataFrame({
        "t": [texts[value % 4] for value in draw(count, 8, 5)], "u": draw(count, 40, 6), "v": draw(count, 2000, 7),
        "y": labels,
    })  # fmt: skip


@pytest.mark.slow
def test_what_rows_in_memory_teach_is_what_lazy_ones_do(tmp_path: Path) -> None:
    """Encodings, tables, sums by fold and saved files, bit for bit; keys that begin alike are numbered once."""
    rows, new = drawn_rows(6000), drawn_rows(9000)[3000:].with_columns(pl.col("u") + 3)
    features = [
        *(f.MeanTargetEncoding(name=f"m{n}", by=by, folds=5, smoothing=smoothing) for n, (by, smoothing) in enumerate(
            [(("t",), 20.0), (("u", "v"), 0.0), (("t", "u"), 3.0), (("t", "u", "v"), 1.0)])),
        *(f.CountEncoding(name=f"c{n}", by=by) for n, by in enumerate(
            [("t",), ("t", "u"), ("t", "u", "v"), ("v", "u")])),
    ]  # fmt: skip
    lazy = f.fit(features, rows.lazy(), label="y")
    expected = lazy.apply_to_training(rows.lazy()).collect()
    fitted, made = f.fit_apply(features, rows, label="y")
    assert made.equals(expected)
    assert fitted.apply(new).collect().equals(lazy.apply(new.lazy()).collect())
    with pytest.raises(ConfigError, match="not those of the folds"):
        fitted.apply_to_training(rows)
    only_fitted = f.fit(features, rows, label="y")
    assert only_fitted.apply_to_training(rows).collect().equals(expected)
    for feature in features:
        one, other = fitted.fitted_tables[feature.name], lazy.fitted_tables[feature.name]
        assert one.table.equals(other.table)
        assert one.facts == other.facts
    fitted.save(tmp_path / "memory")
    lazy.save(tmp_path / "lazy")
    for path in sorted((tmp_path / "lazy").iterdir()):
        assert path.read_bytes() == (tmp_path / "memory" / path.name).read_bytes(), path.name
    assert f.Fitted.load(tmp_path / "memory").apply(new).collect().equals(fitted.apply(new).collect())


@pytest.mark.slow
@pytest.mark.parametrize("few", [0, 100, 10**6])
def test_rows_in_memory_by_partitions(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    rows = drawn_rows(2000).with_columns(o=pl.Series(draw(2000, 50, 9)))
    features = [
        f.MeanTargetEncoding(name="m", by=("t", "u"), folds=5), f.CountEncoding(name="c", by=("v", "u")),
        f.MeanTargetEncoding(name="n", by="t", fold_by="u"), f.Previous(name="p", by="u", order="o", column="t"),
        f.History(name="h", by=("u", "v"), order="o", column="t"), f.CountEncoding(name="again", by=("c", "p")),
    ]  # fmt: skip
    whole, expected = f.fit_apply(features, rows, label="y")
    monkeypatch.setattr(execute, "PARTITION_ROWS", 170)
    monkeypatch.setattr(execute, "_FEW_KEYS", few)
    fitted, made = f.fit_apply(features, pl.concat([rows[:700], rows[700:]]), label="y")
    assert made.equals(expected)
    for name, one in whole.fitted_tables.items():
        assert fitted.fitted_tables[name].table.equals(one.table)
        assert fitted.fitted_tables[name].facts == one.facts


def test_tables_of_many_blocks_come_in_one_piece(tmp_path: Path) -> None:
    """Rows that grow shorter, so that the room guessed from the first blocks is too small; texts once and again."""
    long = ["a text of more than twelve bytes", "x" * 400, "thirteen byte", "short", ""]
    texts = [long[value % 5] + ("!" * (value % 3)) for value in draw(4000, 1000, 8)] + ["y"] * 90_000
    frame = pl.DataFrame({"t": texts, "n": range(len(texts)), "x": [value / 4 for value in range(len(texts))]})
    frame = frame.with_columns(pl.when(pl.col("n") % 7 > 0).then("n"), t=pl.when(pl.col("t") != "").then("t"))
    frame.write_csv(tmp_path / "many.csv")
    read = read_table(tmp_path / "many.csv", {"x": "float", "t": "string", "n": "int"})
    assert read.equals(frame.select("x", "t", "n"))
    assert read.n_chunks("all") == [1, 1, 1]


def test_tables_of_no_block_have_no_rows(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_bytes(b"")
    pl.DataFrame(schema={"t": pl.String, "n": pl.Int64, "h": pl.String, "x": pl.Float64}).write_parquet(
        tmp_path / "none.parquet"
    )
    for name in ("none.jsonl", "none.parquet"):
        read = read_table(tmp_path / name, {"t": "string", "n": "int", "h": "hex", "x": "float"})
        assert read.schema == {"t": pl.String, "n": pl.Int64, "h": pl.UInt64, "x": pl.Float64}
        assert read.height == 0


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_texts_of_a_table_of_any_kind(tmp_path: Path, kind: str) -> None:
    frame = pl.DataFrame({"t": ["a", None, "a text that no view holds", "a"], "n": [1, 2, None, 4]})
    write = {"csv": frame.write_csv, "jsonl": frame.write_ndjson, "parquet": frame.write_parquet}[kind]
    write(tmp_path / f"texts.{kind}")
    assert read_table(tmp_path / f"texts.{kind}", {"t": "string", "n": "int"}).equals(frame)


@pytest.mark.parametrize("kind", [pl.Decimal(10, 2), pl.Int128, pl.Int64, pl.Float32])
def test_previous_values_of_any_numbers(kind: pl.DataType) -> None:
    rows = pl.DataFrame({"n": pl.Series([3, 5, 7], dtype=pl.Int64).cast(kind), "u": [1, 2, 1], "y": [0, 1, 0]})
    made = f.fit_apply([f.Previous(name="p", column="n", by=("u",), order="y")], rows, label="y")[1]
    assert made["p"].equals(pl.Series("p", [None, None, None], dtype=made["n"].dtype))
    rows = rows.with_columns(o=pl.int_range(3))
    made = f.fit_apply([f.Previous(name="p", column="n", by=("u",), order="o")], rows, label="y")[1]
    assert made["p"].dtype == made["n"].dtype
    assert made["p"].cast(pl.Int64).to_list() == [None, None, 3]
