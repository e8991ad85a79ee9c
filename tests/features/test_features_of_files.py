"""Features of logs in any number of files, some of them empty, against loops: groups that span files and shares."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import naive_features as naive
import polars as pl
import pytest

from stoker import features as f
from stoker.base.errors import DataError, SchemaError
from stoker.prep.features import execute
from stoker.prep.prepare import run_prepare
from stoker.prep.rows import featured
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SplitRule
from stoker.prep.source_format import SourceFormat

LEAST, MOST = -(2**63), 2**63 - 1
COLUMNS = {"u": pl.String, "k": pl.Int64, "t": pl.Int64, "x": pl.Float64, "e": pl.Float64, "y": pl.Int64,
           "part": pl.String}  # fmt: skip


def log(draw: random.Random) -> list[naive.Row]:
    choices: dict[str, list[Any]] = {
        "u": ["a", "b", "Zoë", "日本", "a,b", None], "k": [1, -2, LEAST, MOST, None], "x": [0.0, -0.0, 1.5, 7.25, None],
        "t": [0, 1, 1, 2, 5, LEAST, MOST, MOST - 1, None], "e": [0.0, 1.0, -1.0, None], "y": [0, 1],
        "part": ["in", "in", "new", "no"],
    }  # fmt: skip
    return [{name: draw.choice(some) for name, some in choices.items()} for _ in range(draw.randrange(20, 60))]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "kind"), [(1, "csv"), (2, "parquet"), (3, "csv")])
def test_every_way_of_cutting_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, kind: str) -> None:
    draw = random.Random(seed)
    rows, by, key = log(draw), [("u",), ("x", "u"), ("k", "x")][seed % 3], ("k", "u", "x")[: seed + 1]
    past: dict[str, Any] = {"by": by, "order": "t", "events": "e"}
    features = (
        f.MeanTargetEncoding(name="mean", by=key, folds=3, smoothing=1.0, fold_by=("u", "k")),
        f.CountEncoding(name="count", by=key), f.Previous(name="prev", column="u", **past),
        f.SinceLast(name="since", **past), f.PastCount(name="seen", window=4.5, **past),
        f.Rank(name="rank", by=by, order="t", descending=True, method="dense"),
        f.CountEncoding(name="of_prev", by=("prev",)), f.Cross(name="bucket", columns=("count", "of_prev"), buckets=5),
        f.CountEncoding(name="of_bucket", by=("bucket",)),
    )  # fmt: skip
    schema = Schema(
        name="s", label=Label(column="y"), feature=features, dense=(DenseColumn(name="mean"), DenseColumn(name="x")),
        categorical=(CategoricalColumn(name="k", type="int"), CategoricalColumn(name="t", type="int")),
        split=SplitRule(rule="column", column="part", values={"in": "train", "new": "valid", "no": "drop"}),
    )  # fmt: skip
    frame, cuts = pl.DataFrame(rows, schema=COLUMNS), sorted(draw.randrange(len(rows)) for _ in range(3))
    files = []
    for number, (begin, stop) in enumerate(zip([0, 0, *cuts], [0, *cuts, len(rows)], strict=True)):
        files.append(tmp_path / f"{number}.{kind}")
        part = frame[begin:stop]
        part.write_csv(files[-1]) if kind == "csv" else part.write_parquet(files[-1])
    made: list[pl.DataFrame] = []
    parts = featured._parts

    def kept(task: Any, pieces: Any, passes: Any) -> Any:
        made.append(passes.whole().collect())
        return parts(task, pieces, passes)

    monkeypatch.setattr(featured, "_parts", kept)
    monkeypatch.setattr(execute, "PARTITION_ROWS", 16)
    run_prepare(schema, files, out=tmp_path / "made", threads=2, block_bytes=300)

    train = [row for row in rows if row["part"] == "in"]
    for at, row in enumerate(rows):
        before = naive.before(rows, at, by, "t", "e")
        row["prev"] = rows[before[-1]]["u"] if before else None
        row["since"] = float(row["t"] - rows[before[-1]]["t"]) if before else None
        row["seen"] = None if row["t"] is None else sum(row["t"] - rows[i]["t"] <= 4.5 for i in before)
        row["rank"] = naive.rank(rows, at, by, "t", descending=True, dense=True)
        row["count"] = sum(all(r[c] == row[c] for c in key) for r in train)
        own = row["part"] == "in"
        row["mean"] = naive.mean_target(train, [row], key, 3, 1.0, ("u", "k"), 0, out_of_fold=own)[0]
    for row in rows:
        row["of_prev"] = sum(r["prev"] == row["prev"] for r in train)
        row["bucket"] = naive.cross(row, ("count", "of_prev"), 5, 0)
    for row, got in zip(rows, made[0].rows(named=True), strict=True):
        row["of_bucket"] = sum(r["bucket"] == row["bucket"] for r in train)
        assert got["mean"] == pytest.approx(row["mean"])
        assert [got[f.name] for f in features[1:]] == [row[f.name] for f in features[1:]]


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet", "jsonl", "source"])
def test_a_column_that_a_feature_would_replace(tmp_path: Path, kind: str) -> None:
    """Silently, the city of the log would be the mask of it, wherever another feature or the model reads it."""
    said = r"feature 'city' \(mask\) makes column 'city', which .* have already. Choose another name"
    frame = pl.DataFrame({"y": [1, 0], "shop": ["a", "b"], "u": ["x", "y"], "city": ["Bonn", "Kiel"]})
    file = tmp_path / f"log.{kind}"
    mask = f.Mask(name="city", column="shop", where_column="u", values="x")
    if kind.startswith("csv"):
        text = frame.write_csv().encode()
        file.write_bytes(gzip.compress(text) if kind == "csv.gz" else text)
    else:
        frame.write_parquet(file) if kind == "parquet" else frame.write_ndjson(file)

    def prepare() -> None:
        schema = Schema(
            name="s", label=Label(column="y"), feature=(mask,), categorical=(CategoricalColumn(name="city"),),
            source=SourceFormat(columns=tuple(frame.columns)) if kind == "source" else SourceFormat(),
        )  # fmt: skip
        run_prepare(schema, file, out=tmp_path / "made")

    with pytest.raises(SchemaError, match=said):
        prepare()
    assert not (tmp_path / "made").exists()
    for rows in (frame, frame.lazy()):
        with pytest.raises(SchemaError, match=said):
            f.fit([mask], rows, label="y")
        fitted = f.fit([mask], rows.drop("city"), label="y")
        with pytest.raises(SchemaError, match=said):
            fitted.apply(rows)


def test_a_merged_file_lies_beside_its_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "items.csv").write_text(f"item,stars\na,{len(folder.name)}\n")
    (here / "log.csv").write_text("y,item\n1,a\n0,b\n")
    (there / "shop.toml").write_text(
        'label = "y"\nderive = ["merge name=m on=item file=items.csv number_columns=stars"]\n'
        "[split]\ntrain = 1.0\nvalid = 0.0\ntest = 0.0\n"
    )
    monkeypatch.chdir(here)
    made = {}
    for name in ("both", "working directory"):
        run_prepare(there / "shop.toml", "log.csv", out=tmp_path / name)
        table = pl.read_parquet(tmp_path / name / "features" / "m.parquet")
        made[name] = table["m_stars"].to_list()
        (there / "items.csv").unlink(missing_ok=True)
    assert made == {"both": [5.0], "working directory": [4.0]}
    (here / "items.csv").write_text("item,points\na,5\n")
    with pytest.raises(DataError, match=r"items.csv has no column 'stars'"):
        run_prepare(there / "shop.toml", "log.csv", out=tmp_path / "made")
    (here / "items.csv").unlink()
    with pytest.raises(
        DataError, match=r"feature 'm' \(merge\): there is no file 'items.csv' in .*there or .*here\. Ch"
    ):
        run_prepare(there / "shop.toml", "log.csv", out=tmp_path / "made")
    assert not (tmp_path / "made").exists()
