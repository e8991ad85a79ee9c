"""What is done faster for rows in memory: the same keys, texts and numbers as elsewhere, to the bit."""

from __future__ import annotations

from pathlib import Path

import naive_features as naive
import numpy as np
import polars as pl
import pytest

from stoker import features as f
from stoker.prep.features.fitted.keys import KeyTable
from stoker.prep.features.tables import read_table

PIECES = ["a", "é", "", "thirteen byte", "a text of more than twelve bytes", "12", ":", "|"]


def draw(count: int, most: int, seed: int) -> list[int]:
    return [naive.splitmix(seed * 1_000_003 + number) % most for number in range(count)]


def drawn_lists(separator: str, seed: int, count: int = 300) -> list[str | None]:
    lengths, pieces = draw(count, 9, seed), iter(draw(9 * count, len(PIECES), seed + 1))
    texts = [separator.join(PIECES[next(pieces)] for _ in range(length)) for length in lengths]
    return [None if number % 11 == 5 else text for number, text in enumerate(texts)]


@pytest.mark.parametrize("separator", ["|", "::", "é", ""])
@pytest.mark.parametrize(("most", "least"), [(1, 1), (3, 2), (25, 1)])
def test_pairs_in_memory_are_those_of_lazy_rows(separator: str, most: int, least: int) -> None:
    """Polars' own splitting and exploding is the reference: texts short and long, missing lists, unequal lengths."""
    rows = pl.DataFrame({
        "a": drawn_lists(separator, 3), "b": drawn_lists(separator, 3)[:200] + drawn_lists(separator, 7)[200:],
        "other": drawn_lists("|", 9), "number": range(300),
    })  # fmt: skip
    step = f.Pairs(columns=("a", "b"), names=("i", "p"), separator=separator, most=most, least=least)
    for some in (rows, rows[7:250], pl.concat([rows[:100], rows[50:]], rechunk=False), rows[:0]):
        made, expected = step.rows_now(some), step.rows(some.lazy()).collect()
        assert made.schema == expected.schema
        assert made.equals(expected)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_keys_of_all_rows_at_once_have_the_same_numbers(width: int) -> None:
    columns = [np.array(draw(4000, 30 + 17 * place, place), np.int32) for place in range(width)]
    by_and_by, at_once = KeyTable(width), KeyTable(width)
    numbers = by_and_by.add(columns)
    assert (at_once.add_all(columns) == numbers).all()
    assert [codes.tolist() for codes in at_once.codes()] == [codes.tolist() for codes in by_and_by.codes()]
    asked = [np.concatenate([codes, codes[::-1], [99_999, -1]]).astype(np.int32) for codes in columns]
    assert (at_once.find(asked) == by_and_by.find(asked)).all()
    more = [codes[:500] + 1 for codes in columns]  # after all at once, some by and by
    assert (at_once.add(more) == by_and_by.add(more)).all()
    assert (at_once.add_all(more) == by_and_by.add(more)).all()
    assert KeyTable(width).add_all([codes[:0] for codes in columns]).tolist() == []


def drawn_rows(count: int) -> pl.DataFrame:
    texts = ["a text of more than twelve bytes", "short", None, "thirteen byte"]
    labels = [(value - 500) / 7 for value in draw(count, 1000, 4)]  # no sum of them is exact
    return pl.DataFrame({
        "t": [texts[value % 4] for value in draw(count, 8, 5)], "u": draw(count, 40, 6), "v": draw(count, 2000, 7),
        "y": labels,
    })  # fmt: skip


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
    assert fitted.apply_to_training(rows).collect().equals(expected)
    only_fitted = f.fit(features, rows, label="y")
    assert only_fitted.apply_to_training(rows).collect().equals(expected)
    for feature in features:
        one, other = fitted.learned[feature.name], lazy.learned[feature.name]
        assert one.table.equals(other.table)
        assert one.facts == other.facts
        if other.folds is not None:
            assert list(one.folds) == list(other.folds)
            assert all(np.array_equal(one.folds[name], other.folds[name]) for name in other.folds)
    fitted.save(tmp_path / "memory")
    lazy.save(tmp_path / "lazy")
    for path in sorted((tmp_path / "lazy").iterdir()):
        assert path.read_bytes() == (tmp_path / "memory" / path.name).read_bytes(), path.name
    assert f.Fitted.load(tmp_path / "memory").apply(new).collect().equals(fitted.apply(new).collect())


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
    held = read["t"].to_arrow(compat_level=pl.CompatLevel.newest()).buffers()[2:]
    assert 1000 < sum(buffer.size for buffer in held) < 20_000  # of 380,000 bytes: those that come again are there once
    frame[:0].write_csv(tmp_path / "none.csv")
    none = read_table(tmp_path / "none.csv", {"t": "string", "n": "int"})
    assert none.schema == {"t": pl.String, "n": pl.Int64}
    assert none.height == 0


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
