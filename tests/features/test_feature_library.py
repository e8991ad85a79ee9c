"""Every feature against loops over rows; leaks; storage; settings that cannot work."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import naive_features as naive
import numpy as np
import polars as pl
import pytest
from campaigns import scaled
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stoker import features as f
from stoker.base.errors import ConfigError, DataError, DependencyError, SchemaError
from stoker.prep.features.groups import key_codes, sorted_groups
from stoker.prep.features.tables import read_table

SCHEMA = {
    "u": pl.String, "i": pl.Int64, "t": pl.Int64, "x": pl.Float64, "e": pl.Int64, "p": pl.String, "q": pl.String,
    "y": pl.Int64,
}  # fmt: skip
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "u": st.sampled_from(["a", "b", "Zoë", "", None]),
            "i": st.sampled_from([1, 2, -3, None]),
            "t": st.sampled_from([0, 1, 2, 5, 9, 1_541_030_408, None]),
            "x": st.sampled_from([0.0, 1.5, -2.0, 7.0, None]),
            "e": st.sampled_from([0, 1, None]),
            "p": st.sampled_from(["w|p", "p", "", "w|w|h|z", "|h", None]),
            "q": st.sampled_from(["1|2|3", "4", "", None]),
            "y": st.sampled_from([0, 1]),
        }
    ),
    min_size=1,
    max_size=24,
)


def frame(rows: list[naive.Row]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=SCHEMA)


def column(made: pl.LazyFrame, name: str) -> list[Any]:
    return made.collect()[name].to_list()


@pytest.mark.slow
def test_importing_needs_no_polars() -> None:
    code = (
        "import stoker, sys; stoker.features.Cross(columns=('a', 'b'), buckets=9); assert 'polars' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@settings(max_examples=scaled(60), deadline=None)
@given(ROWS)
def test_features_of_the_row_itself(rows: list[naive.Row]) -> None:
    made = f.fit(
        [
            f.Match(name="m", column="u", values=("a", "Zoë")),
            f.Match(name="m2", column="p", pattern="^w"),
            f.Constrain(name="c", column="u", pattern="^[ab]$"),
            f.Constrain(name="c2", column="u", lower=True, max_length=2),
            f.Mask(name="k", column="i", where_column="u", values=("a",)),
            f.Equal(name="eq", left="i", right="q"),
            f.Subtract(name="s", left="x", right="i"),
            f.Divide(name="d", left="x", right="i"),
            f.Split(name="piece", column="p", width=2),
            f.TimeParts(name="at", column="t", parts=tuple(naive.clock(0, 0)), utc_offset=-3.5),
            f.Cross(name="h", columns=("u", "i"), buckets=1000, seed=3),
            f.Cross(name="h2", columns=("h", "m"), buckets=7),
        ],
        frame(rows), label="y",
    ).apply(frame(rows)).collect().rows(named=True)  # fmt: skip
    for row, got in zip(rows, made, strict=True):
        assert got["m"] == (row["u"] in ("a", "Zoë"))
        assert got["m2"] == (row["p"] or "").startswith("w")
        assert got["c"] == (row["u"] if row["u"] in ("a", "b") else None)
        assert got["c2"] == (None if row["u"] is None else row["u"].lower()[:2])
        assert got["k"] == (row["i"] if row["u"] == "a" else None)
        assert got["eq"] == (row["i"] is not None and str(row["i"]) == row["q"])
        assert got["s"] == (None if None in (row["x"], row["i"]) else row["x"] - row["i"])
        assert got["d"] == (None if row["x"] is None or not row["i"] else row["x"] / row["i"])
        pieces = [] if row["p"] is None else row["p"].split("|")
        assert [got["piece_1"], got["piece_2"]] == [*pieces, None, None][:2]
        clock = dict.fromkeys(naive.clock(0, 0)) if row["t"] is None else naive.clock(row["t"], -3.5)
        assert {part: got[f"at_{part}"] for part in clock} == clock
        assert got["h"] == naive.cross(row, ("u", "i"), 1000, 3)
        assert got["h2"] == naive.cross(got, ("h", "m"), 7, 0)


@settings(max_examples=scaled(40), deadline=None)
@given(ROWS, st.integers(1, 3), st.integers(1, 3))
def test_pairs_and_keep(rows: list[naive.Row], most: int, least: int) -> None:
    steps = [
        f.Keep(column="u", values=("a", "b", "")),
        f.Pairs(columns=("p", "q"), names=("item", "price"), rank="place", most=most, least=least),
    ]
    expected = []
    for row in rows:
        if row["u"] not in ("a", "b", "") or row["p"] is None:
            continue
        items = row["p"].split("|")[:most]
        prices = [] if row["q"] is None else row["q"].split("|")[:most]
        prices = prices if len(prices) == len(items) else [None] * len(items)
        if len(items) >= least:
            expected += [
                (row["u"], item, price, place) for place, (item, price) in enumerate(zip(items, prices, strict=True), 1)
            ]
    fitted = f.fit(steps, frame(rows), label="y")
    made = fitted.apply(frame(rows)).collect()
    assert made.select("u", "item", "price", "place").rows() == expected
    assert fitted.apply(frame(rows).lazy()).collect().equals(made)


# What fails is shown as it was drawn: shrinking it runs the lazy paths for minutes.
@pytest.mark.slow
@settings(max_examples=scaled(50), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    ROWS, ROWS, st.sampled_from([2, 3, 5, 300]), st.sampled_from([0.0, 1.0, 20.0]),
    st.sampled_from([(), ("u",), ("u", "t")]),
)  # fmt: skip
def test_learned_features(
    train: list[naive.Row], new: list[naive.Row], folds: int, smoothing: float, fold_by: tuple[str, ...]
) -> None:
    by = ("u", "i")
    encoding = f.MeanTargetEncoding(name="m", by=by, folds=folds, smoothing=smoothing, fold_by=fold_by, seed=5)
    some = [encoding, f.Previous(name="last", by="u", order="t", column="x"), f.CountEncoding(name="n", by=by),
            f.CountEncoding(name="again", by=("u", "n"))]  # fmt: skip
    fitted = f.fit(some, frame(train), label="y")
    settings_ = (by, folds, smoothing, fold_by, 5)
    own, other = fitted.apply_to_training(frame(train)), fitted.apply(frame(new))
    assert column(own, "m") == pytest.approx(naive.mean_target(train, train, *settings_, out_of_fold=True))
    assert column(other, "m") == pytest.approx(naive.mean_target(train, new, *settings_, out_of_fold=False))
    at_once, whole = f.fit_apply(some, frame(train), label="y")
    lazy = f.fit(some, pl.concat([frame(train[k : k + 1]).lazy() for k in range(len(train))]), label="y")
    assert lazy.apply_to_training(frame(train)).collect().equals(whole)
    assert lazy.apply(frame(new)).collect().equals(other.collect())
    assert whole.equals(own.collect())
    assert fitted.apply_to_training(frame(train).lazy()).collect().equals(whole)
    assert at_once.apply(frame(new)).collect().equals(other.collect())
    for one in (at_once, lazy):
        assert all(one.fitted_tables[name].table.equals(table.table) for name, table in fitted.fitted_tables.items())
    for rows, made in ((train, own), (new, other)):
        assert made.select(*SCHEMA).collect().equals(frame(rows))  # rows, order and types as they were
        counts = [sum(all(r[c] == row[c] for c in by) for r in train) for row in rows]
        assert column(made, "n") == counts


@pytest.mark.slow
@settings(max_examples=scaled(80), deadline=None)
@given(
    ROWS, st.sampled_from([("u",), ("u", "i")]), st.sampled_from([None, "e"]), st.sampled_from([None, 1, 4, 2.5]),
    st.integers(1, 4),
)  # fmt: skip
def test_features_of_the_rows_before(
    rows: list[naive.Row], by: tuple[str, ...], events: str | None, window: float | None, length: int
) -> None:
    given_ = {"by": by, "order": "t", "events": events}
    features = [
        f.Previous(name="prev", column="q", **given_),
        f.Previous(name="any", column="q", by=by, order="t"),
        f.Difference(name="diff", column="x", **given_),
        f.SinceLast(name="since", **given_),
        f.PastCount(name="count", window=window, **given_),
        f.History(name="texts", column="q", length=length, **given_),
        f.History(name="reals", column="x", length=length, **given_),
        f.Rank(name="rank", by=by, order="x"),
        f.Rank(name="dense", by=by, order="x", descending=True, method="dense"),
    ]
    made = f.fit(features, frame(rows), label="y").apply(frame(rows)).collect().rows(named=True)
    for at, (row, got) in enumerate(zip(rows, made, strict=True)):
        past = naive.before(rows, at, by, "t", events)
        last = rows[past[-1]] if past else dict.fromkeys(SCHEMA)
        assert got["prev"] == last["q"]
        every = naive.before(rows, at, by, "t", None)
        assert got["any"] == (rows[every[-1]]["q"] if every else None)
        assert got["diff"] == (None if None in (row["x"], last["x"]) else row["x"] - last["x"])
        assert got["since"] == (None if last["t"] is None else row["t"] - last["t"])
        within = [i for i in past if window is None or rows[i]["t"] >= row["t"] - window]
        assert got["count"] == (None if row["t"] is None else len(within))
        for name, source in (("texts", "q"), ("reals", "x")):
            values = [rows[i][source] for i in past if rows[i][source] is not None]
            assert got[name] == (None if row["t"] is None else values[-length:])
        assert got["rank"] == naive.rank(rows, at, by, "x", descending=False, dense=False)
        assert got["dense"] == naive.rank(rows, at, by, "x", descending=True, dense=True)


@settings(max_examples=scaled(40), deadline=None)
@given(ROWS, ROWS)
def test_properties(train: list[naive.Row], new: list[naive.Row]) -> None:
    features = [f.Properties(name="has", column="p", most=3), f.Properties(name="is", column="p", values=("h", "w"))]
    made = f.fit(features, frame(train), label="y").apply(frame(new)).collect().rows(named=True)
    pieces = [set((row["p"] or "").split("|")) - {""} for row in train]
    counts = {piece: sum(piece in own for own in pieces) for own in pieces for piece in own}
    order = sorted(counts, key=lambda piece: (-counts[piece], piece))[:3]
    for row, got in zip(new, made, strict=True):
        own = set((row["p"] or "").split("|"))
        assert [got[f"has_{k}"] for k in (1, 2, 3)] == [int(piece in own) for piece in [*order, None, None, None][:3]]
        assert [got["is_1"], got["is_2"]] == [int("h" in own), int("w" in own)]


def test_merge(tmp_path: Path) -> None:
    meta = tmp_path / "items.csv"
    meta.write_text("item_id,properties,stars\n1,w|p,4.5\n-3,h,\nnone,x,1\n")
    rows = frame([{**dict.fromkeys(SCHEMA), "i": i, "y": 0} for i in (2, 1, None, -3, 1)])
    merge = f.Merge(name="item", on="i", key="item_id", file=str(meta), columns=("properties",), number_columns="stars")
    made = f.fit([merge], rows, label="y").apply(rows).collect()
    assert made["item_properties"].to_list() == [None, "w|p", None, "h", "w|p"]
    assert made["item_stars"].to_list() == [None, 4.5, None, None, 4.5]
    assert made["i"].to_list() == rows["i"].to_list()
    meta.write_text("item_id,properties,stars\n1,w,4\n2,w,4\n1,h,4\n")
    with pytest.raises(DataError, match="2 lines whose item_id another line has"):
        f.fit([merge], rows, label="y")
    meta.write_text("item_id,properties,stars\n1,w,4\n2,w,four\n")
    with pytest.raises(DataError, match=r"items.csv:3: column stars: 'four' is not a number"):
        f.fit([merge], rows, label="y")
    meta.write_text("item_id,property,stars\n1,w,4\n")
    with pytest.raises(DataError, match=r"no column 'properties'.*Did you mean 'property'"):
        f.fit([merge], rows, label="y")


def test_a_table_of_many_blocks_is_read_whole(tmp_path: Path) -> None:
    lines = [f'{n},"city {n * n}, of {n}",{n / 8}' for n in range(40_000)]
    (tmp_path / "many.csv").write_text("id,name,x\n" + "\n".join(lines) + "\n")
    table = read_table(tmp_path / "many.csv", {"x": "float", "name": "string", "id": "int"}, threads=2)
    assert table["id"].to_list() == list(range(40_000))
    assert table["name"].to_list() == [f"city {n * n}, of {n}" for n in range(40_000)]
    assert table["x"].to_list() == [n / 8 for n in range(40_000)]
    with pytest.raises(DataError, match="there is no file"):
        read_table(tmp_path / "none.csv", {"id": "int"})
    lines[10], lines[39_000] = "", "39000,x,many"
    (tmp_path / "many.csv").write_text("id,name,x\n" + "\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"many.csv:39002: column x: 'many' is not a number. Fix the line"):
        read_table(tmp_path / "many.csv", {"x": "float", "id": "int"}, threads=2)


def test_keys_of_many_types_are_grouped() -> None:
    frame = pl.DataFrame({
        "text": ["a", None, "", "a", "b"], "whole": [1, -1, None, 1, 2], "real": [0.5, -0.0, 0.0, 0.5, None],
        "flag": [True, None, False, True, True], "when": [1, 2, 3, 1, None],
        "wide": [-(2**63), 2**63 - 1, 0, -(2**63), 1],
    }).with_columns(pl.col("when").cast(pl.Datetime("us")), big=pl.lit(2**63 + 1, pl.UInt64))  # fmt: skip
    for some in (*([name] for name in frame.columns), frame.columns, ["whole", "text"], ["wide", "wide", "text"]):
        codes, bound = key_codes(frame, some)
        assert int(codes.max()) < bound
        normal = frame.select(pl.col(some)).with_columns(pl.col(pl.Float64) + 0.0).rows()
        for left in range(frame.height):
            assert [codes[left] == code for code in codes] == [normal[left] == row for row in normal]
        [groups] = sorted_groups(codes, bound)
        assert sum(groups.sizes) == frame.height
        assert np.repeat(groups.codes, groups.sizes).tolist() == codes[groups.rows].tolist()
        for name, wanted in (("count", np.ones(5, bool)), ("late", np.arange(5) > 1)):
            found = {"count": groups.sums(wanted), "late": groups.first(wanted)}[name]
            each = np.empty(5, np.int64)
            each[groups.rows] = np.repeat(found, groups.sizes)
            late = [normal.index(row, 2) if row in normal[2:] else 5 for row in normal]
            assert each.tolist() == ([normal.count(row) for row in normal] if name == "count" else late)
    with pytest.raises(DataError, match=r"column 'l' holds List\(Int64\), which cannot be a key"):
        key_codes(pl.DataFrame({"l": [[1]]}), ["l"])


def test_a_table_with_a_key_twice_is_refused() -> None:
    table = pl.DataFrame({"u": ["a", "b", "a"], "count": [1, 2, 3]})
    with pytest.raises(DataError, match="2 of 3 rows of its table have a key that another row has"):
        f.Fitted(features=(f.CountEncoding(name="n", by="u"),), fitted_tables={"n": f.FittedTable(table=table)})


def auc(scores: list[float], labels: list[int]) -> float:
    ranked = sorted(zip(scores, labels, strict=True))
    places: dict[float, list[int]] = {}
    for place, (score, _) in enumerate(ranked, 1):
        places.setdefault(score, []).append(place)
    mean = {score: sum(p) / len(p) for score, p in places.items()}
    positives = sum(labels)
    total = sum(mean[s] for s, y in ranked if y)
    return (total - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))


def naive_encoding(rows: pl.DataFrame, by: str) -> list[float]:
    """What people write first: the mean label of all rows of the key, the row's own among them."""
    return rows.select((pl.col("y").sum().over(by) + 2) / (pl.len().over(by) + 20.0)).to_series().to_list()


def test_a_planted_leak_is_not_learned() -> None:
    """A key that says nothing: each is in two rows. Its naive encoding nearly is the label, ours is of no use."""
    rows = pl.DataFrame({"n": range(6_000)}).with_columns(
        k=pl.col("n") // 2, y=pl.col("n").map_elements(lambda n: naive.splitmix(n) % 10 == 0, pl.Boolean).cast(pl.Int8)
    )
    labels = rows["y"].to_list()
    assert auc(naive_encoding(rows, "k"), labels) > 0.95
    encoding = f.MeanTargetEncoding(name="m", by="k", folds=8, smoothing=20)
    ours = column(f.fit([encoding], rows, label="y").apply_to_training(rows), "m")
    assert abs(auc(ours, labels) - 0.5) < 0.06


def test_folds_by_group_close_the_leak_within_a_list() -> None:
    """Lists of five with one click each: the clicks of the others, in other folds, tell that this one has none."""
    rows = pl.DataFrame({"n": range(5_000)}).with_columns(
        session=pl.col("n") // 5, y=(pl.col("n") % 5 == (pl.col("n") // 5) % 5).cast(pl.Int8)
    )
    labels = rows["y"].to_list()

    def reached(**given: Any) -> float:
        encoding = f.MeanTargetEncoding(name="m", by="session", smoothing=5, **given)
        ours = column(f.fit([encoding], rows, label="y").apply_to_training(rows), "m")
        return max(auc(ours, labels), auc([-score for score in ours], labels))

    assert reached() > 0.9
    assert reached(fold_by="session") < 0.55


def test_what_was_fitted_is_kept_and_checked(tmp_path: Path) -> None:
    rows = frame([{**dict.fromkeys(SCHEMA), "u": u, "i": n % 3, "p": "w|p", "y": n % 2} for n, u in enumerate("abcab")])
    features = [
        f.MeanTargetEncoding(name="m", by=("u",)), f.CountEncoding(by="i"), f.Properties(column="p", most=2),
        f.Cross(name="c", columns=("u", "i"), buckets=9),
    ]  # fmt: skip
    fitted = f.fit(features, rows, label="y")
    fitted.save(tmp_path / "one")
    fitted.save(tmp_path / "two")
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["count_i.parquet", "features.json", "m.parquet", "properties_p.parquet"]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    loaded = f.Fitted.load(tmp_path / "one")
    assert loaded.features == tuple(features)
    assert loaded.apply(rows).collect().equals(fitted.apply(rows).collect())
    with pytest.raises(ConfigError, match=r"feature 'm' .* would be encoded with their own labels. Fit again"):
        loaded.apply_to_training(rows)
    damaged = bytearray((tmp_path / "one" / "m.parquet").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "one" / "m.parquet").write_bytes(bytes(damaged))
    with pytest.raises(DataError, match=r"m.parquet was altered: sha256 .* Restore it from a copy"):
        f.Fitted.load(tmp_path / "one")
    (tmp_path / "two" / "m.parquet").unlink()
    with pytest.raises(DataError, match=r"m.parquet is missing; [\d,]+ bytes were written"):
        f.Fitted.load(tmp_path / "two")
    (tmp_path / "two" / "features.json").write_text("{")
    with pytest.raises(DataError, match=r"features\.json is damaged"):
        f.Fitted.load(tmp_path / "two")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: f.MeanTargetEncoding(by="u", folds=1), "folds 1 is below 2: a training row would be encoded with its"),
        (lambda: f.MeanTargetEncoding(by="u", smoothing=-1.0), "smoothing -1.0 is not a number of rows"),
        (lambda: f.CountEncoding(by=("u", "u")), "by names 'u' twice"),
        (lambda: f.CountEncoding(by=()), "by names 0 columns and needs at least 1"),
        (lambda: f.Cross(columns=("u",), buckets=9), "columns names 1 columns and needs at least 2"),
        (lambda: f.Cross(columns=("u", "i"), buckets=1), "buckets 1 is below 2"),
        (lambda: f.Match(column="u"), "values and pattern: give one of the two"),
        (lambda: f.Match(column="u", pattern="("), "is not a regular expression"),
        (lambda: f.PastCount(by="u", order="t", window=0), "window 0 is not above 0"),
        (lambda: f.Rank(by="u", order="t", method="max"), "method 'max' is not one of: min, dense"),
        (lambda: f.TimeParts(column="t", unit="m"), "unit 'm' is not one of"),
        (lambda: f.Pairs(columns=("p", "q"), names=("item",)), "lists 1 names for 2 columns"),
        (lambda: f.Properties(column="p"), "values and most: give one of the two"),
        (lambda: f.Cross(name="a/b", columns=("u", "i"), buckets=9), "'a/b' cannot name a column and a file"),
        (lambda: f.CountEncoding(name="列" * 80, by="u"), "cannot name a column and a file.*at most 100"),
        (lambda: f.check_features([f.CountEncoding(name="u", by="u")]), "reads its own output 'u'"),
        (
            lambda: f.check_features([f.CountEncoding(by="c"), f.Cross(name="c", columns=("u", "i"), buckets=9)]),
            r"reads 'c', which feature 'c' \(cross\) makes only later",
        ),
        (
            lambda: f.check_features([f.CountEncoding(name="c", by="u"), f.CountEncoding(name="c", by="i")]),
            "makes column 'c', which .* made already",
        ),
        (
            lambda: f.check_features([f.CountEncoding(name="c", by="u"), f.Keep(column="u", values=("a",))]),
            "stands after feature 'c'.*but changes the rows",
        ),
        (lambda: f.feature_from_dict({"kind": "cuont", "by": ["u"]}, "w"), "w: kind 'cuont'.*Did you mean 'count'"),
        (lambda: f.feature_from_dict({"kind": "count", "bye": ["u"]}, "w"), "unknown key 'bye'.*Did you mean 'by'"),
        (
            lambda: f.feature_from_dict({"kind": "count", "by": "u"}, "w"),
            "list of texts such as .*, found 'u'",
        ),
        (lambda: f.feature_from_dict({"by": ["u"]}, "w"), "must be a table with a kind"),
    ],
)
def test_settings_that_cannot_work(make: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        make()


def test_columns_that_are_not_there() -> None:
    rows = frame([{**dict.fromkeys(SCHEMA), "y": 1}])
    with pytest.raises(SchemaError, match=r"reads column 'item', which is neither in the input.*u, i, t"):
        f.fit([f.CountEncoding(by="item")], rows, label="y")
    fitted = f.fit([f.CountEncoding(by="u")], rows, label="y")
    with pytest.raises(SchemaError, match="reads column 'u'"):
        fitted.apply(rows.drop("u"))
    with pytest.raises(ConfigError, match="no label column 'z'"):
        f.fit([f.CountEncoding(by="u")], rows, label="z")


def test_an_engine_that_is_not_there() -> None:
    rows = frame([{**dict.fromkeys(SCHEMA), "y": 1}])
    with pytest.raises(ConfigError, match="engine 'tpu' is not one of: streaming, gpu"):
        f.fit([], rows, label="y", engine="tpu")
    try:
        import cudf_polars  # noqa: F401
    except ImportError:
        with pytest.raises(DependencyError, match=r"pip install polars\[gpu\]"):
            f.fit([f.CountEncoding(by="u")], rows, label="y", engine="gpu")


def test_every_kind_survives_a_schema_file() -> None:
    some: list[f.Derivation] = [
        f.Match(column="u", values=("a",)), f.Constrain(column="u", pattern="a"), f.Equal(left="u", right="p"),
        f.Mask(column="i", where_column="u", values=("a",)), f.Subtract(left="x", right="i"),
        f.Divide(left="x", right="i"), f.Split(column="p", width=2), f.TimeParts(column="t"),
        f.Cross(columns=("u", "i"), buckets=9),
        f.Keep(column="u", pattern="a"), f.Pairs(columns=("p",), names=("item",)),
        f.Previous(by="u", order="t", column="x"), f.Difference(by="u", order="t", column="x"),
        f.History(by="u", order="t", column="i", length=3), f.SinceLast(by="u", order="t", events="e"),
        f.PastCount(by="u", order="t", window=9.0),
        f.Rank(by="u", order="x"), f.MeanTargetEncoding(by=("u", "i")), f.CountEncoding(by="u"),
        f.Merge(on="i", file="x.csv", columns=("p",)), f.Properties(column="p", values=("w",)),
    ]  # fmt: skip
    assert {feature.kind for feature in some} == set(f.KINDS)
    for feature in some:
        assert f.feature_from_dict(feature.to_dict(), "here") == feature


def test_the_feature_of_the_guide_works() -> None:
    page = (Path(__file__).parents[2] / "docs" / "features.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| `") and not line.startswith("| `f.")]
    kinds = {line.split("`")[1] for line in lines}
    assert kinds == set(f.KINDS)
    source = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1]
    try:
        exec(compile(source, "guide", "exec", dont_inherit=True), {"__name__": "guide"})
        assert f.feature_from_dict({"kind": "ratio", "left": "a", "right": "b"}, "w").outputs == ("ratio_a_b",)
    finally:
        del f.KINDS["ratio"]
    for line in lines:  # every example in the table can be made
        feature = eval(line.split("`")[-2], vars(f))
        assert feature.kind == line.split("`")[1]


def test_names_of_before_of_fitted_features_still_work() -> None:
    with pytest.warns(FutureWarning, match="Learned is now called Fittable"):
        base = f.Learned  # type: ignore[attr-defined]
    with pytest.warns(FutureWarning, match="LearnedTable is now called FittedTable"):
        table = f.LearnedTable  # type: ignore[attr-defined]

    @dataclass(frozen=True, kw_only=True)
    class Largest(base):  # type: ignore[misc]
        kind: ClassVar[str] = "largest"
        column: str

        @property
        def inputs(self) -> tuple[str, ...]:
            return (self.column,)

        def learn(self, rows: pl.LazyFrame, *, engine: str = "streaming") -> Any:
            return table(table=rows.select(pl.col(self.column).max().alias("most")).collect())

        def attach(self, frame: pl.LazyFrame, learned: Any, train: pl.Expr | None = None) -> pl.LazyFrame:
            return frame.with_columns(pl.lit(learned.table["most"][0]).alias(self.name))

    try:
        rows = pl.DataFrame({"x": [3, 7], "y": [0, 1]})
        fitted = f.fit([Largest(column="x")], rows, label="y")
        assert fitted.apply(rows).collect()["largest_x"].to_list() == [7, 7]
        assert fitted.learned is fitted.fitted_tables
    finally:
        del f.KINDS["largest"]
    with pytest.raises(AttributeError, match="no attribute 'Learner'"):
        f.Learner  # type: ignore[attr-defined]  # noqa: B018
