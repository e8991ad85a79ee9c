"""Features within a preparation: values against loops, splits, resuming, threads, new rows, damage."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import naive_features as naive
import numpy as np
import polars as pl
import pytest

import stoker
from stoker import features as f
from stoker.base.errors import DataError, SchemaError
from stoker.dataset.dataset import Dataset
from stoker.prep.features import execute
from stoker.prep.prepare import StageProgress, run_prepare
from stoker.prep.rows import featured
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule, Timestamp

SCHEMA = Schema(
    name="sessions",
    label=Label(column="clicked"),
    timestamp=Timestamp(column="when"),
    feature=(
        f.Keep(column="action", values=("click",)),
        f.Pairs(columns=("shown", "prices"), names=("item", "price"), least=2),
        f.Equal(name="clicked", left="item", right="picked"),
        f.TimeParts(name="at", column="when"),
        f.Cross(name="user_item", columns=("user", "item"), buckets=50),
        f.MeanTargetEncoding(name="item_mean", by=("item",), folds=4, smoothing=2, fold_by=("list",)),
        f.CountEncoding(name="cross_count", by=("user_item",)),
        f.SinceLast(name="since", by=("user",), order="when"),
        f.PastCount(name="seen", by=("item",), order="when"),
        f.Rank(name="price_rank", by=("list",), order="price"),
        f.MeanTargetEncoding(name="rank_mean", by=("price_rank",), folds=2, smoothing=1),
        f.Properties(name="has", column="tags", most=3),
    ),
    dense=(
        DenseColumn(name="price", fill="median"), DenseColumn(name="item_mean"), DenseColumn(name="cross_count"),
        DenseColumn(name="since", fill=-1.0), DenseColumn(name="seen", transforms=("zscore",)),
        DenseColumn(name="price_rank"), DenseColumn(name="rank_mean"), DenseColumn(name="has_*"),
    ),
    categorical=(
        CategoricalColumn(name="item"), CategoricalColumn(name="user"), CategoricalColumn(name="at_hour", type="int"),
        CategoricalColumn(name="user_item", type="int"),
    ),
    sequence=(SequenceColumn(name="tags"),),
    split=SplitRule(rule="time", train=0.7, valid=0.2, test=0.1),
)  # fmt: skip


def hash_tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".request"
    }  # fmt: skip


def write_log(path: Path, lines: int, seed: int = 0) -> list[dict[str, Any]]:
    """Lists of shown items, of which one was picked; as text, and as the rows that pairs make."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    with path.open("w") as file:
        file.write("list,user,when,action,shown,prices,picked,tags\n")
        for number in range(lines):
            user, when = f"u{draw.randrange(9)}", 1_000_000 + number * 900 // 2
            action = draw.choice(["click", "click", "click", "look"])
            shown = draw.sample(range(1, 30), draw.randrange(1, 6))
            prices = [draw.choice([10, 20, 30.5]) for _ in shown][: draw.choice([9, 9, 9, 1])]
            tags, picked = draw.choice(["a|b", "b", "", "c|a|d"]), draw.choice(shown)
            fields = [number, user, when, action, "|".join(map(str, shown)), "|".join(map(str, prices)), picked, tags]
            file.write(",".join(map(str, fields)) + "\n")
            if action == "click" and len(shown) > 1:
                prices = prices if len(prices) == len(shown) else [None] * len(shown)
                for item, price in zip(shown, prices, strict=True):
                    rows.append({
                        "list": number, "user": user, "when": when, "item": item, "price": price, "tags": tags,
                        "y": int(item == picked), "user_item": 0,
                    })  # fmt: skip
    for row in rows:
        row["user_item"] = naive.cross(row, ("user", "item"), 50, 0)
    return rows


def read(data: Dataset, split: str) -> tuple[np.ndarray, list[list[int]], np.ndarray]:
    """Dense values, ids of every row and labels, in order."""
    part = data.split(split)
    rows = [part[number] for number in range(len(part))]
    dense = np.array([row["dense"].tolist() for row in rows], np.float32)
    return dense, [row["ids"].tolist() for row in rows], np.array([float(row["labels"]) for row in rows])


@pytest.mark.slow
def test_every_value_is_that_of_the_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_log(tmp_path / "log.csv", 300)
    monkeypatch.setattr(execute, "PARTITION_ROWS", 100)
    run_prepare(SCHEMA, tmp_path / "log.csv", out=tmp_path / "made", threads=2, block_bytes=3_000)
    data = Dataset(tmp_path / "made")
    assert data.verify() > 0
    cuts = sorted(row["when"] for row in rows)
    at = [cuts[-(-7 * len(rows) // 10)], cuts[-(-9 * len(rows) // 10)]]
    split = ["train" if r["when"] < at[0] else "valid" if r["when"] < at[1] else "test" for r in rows]
    train = [row for row, name in zip(rows, split, strict=True) if name == "train"]
    numbers = [number for number, name in enumerate(split) if name == "train"]
    for row in rows:  # what later features read
        same = [r["price"] for r in rows if r["list"] == row["list"] and r["price"] is not None]
        row["price_rank"] = None if row["price"] is None else 1 + sum(p < row["price"] for p in same)
    # Folds by row go by the number of the row among all rows.
    folds = {id(row): naive.fold_of(n, row, 2, (), 0) for n, row in zip(numbers, train, strict=True)}
    held = {id(row): naive.fold_of(0, row, 4, ("list",), 0) for row in train}

    def mean(row: dict[str, Any], key: str, smoothing: float, fold: dict[int, int], own: bool) -> float:
        seen = [r for r in train if not own or fold[id(r)] != fold[id(row)]]
        overall = sum(r["y"] for r in seen) / len(seen)
        same = [r["y"] for r in seen if r[key] == row[key]]
        return (sum(same) + smoothing * overall) / (len(same) + smoothing)

    prices = sorted(r["price"] for r in train if r["price"] is not None)
    median = (prices[(len(prices) - 1) // 2] + prices[len(prices) // 2]) / 2
    tags = ["a", "b", "c"]  # in the most training rows, then by text
    counts = {tag: sum(tag in r["tags"].split("|") for r in train) for tag in "abcd"}
    tags = sorted(counts, key=lambda tag: (-counts[tag], tag))[:3]
    expected: dict[str, list[list[float]]] = {"train": [], "valid": [], "test": []}
    seen_train = [len(naive.before(rows, n, ("item",), "when", None)) for n in numbers]
    shift, scale = np.mean(seen_train), np.std(seen_train)
    for number, (row, name) in enumerate(zip(rows, split, strict=True)):
        past = naive.before(rows, number, ("user",), "when", None)
        seen = len(naive.before(rows, number, ("item",), "when", None))
        expected[name].append([
            median if row["price"] is None else row["price"],
            mean(row, "item", 2, held, name == "train"),
            sum(r["user_item"] == row["user_item"] for r in train),
            row["when"] - rows[past[-1]]["when"] if past else -1.0,
            (seen - shift) / scale,
            row["price_rank"] or 0.0,
            mean(row, "price_rank", 1, folds, name == "train"),
            *(float(tag in row["tags"].split("|")) for tag in tags),
        ])  # fmt: skip
    for name, values in expected.items():
        dense, _, labels = read(data, name)
        assert labels.tolist() == [r["y"] for r, s in zip(rows, split, strict=True) if s == name]
        np.testing.assert_allclose(dense, np.array(values, np.float32), rtol=1e-5, atol=1e-6)
    hours = pl.read_parquet(tmp_path / "made" / "vocab" / "at_hour.parquet")["value"].to_list()
    assert set(hours) == {row["when"] // 3600 % 24 for row in train}


@pytest.mark.slow
def test_the_same_bytes_for_any_threads_and_file_format(tmp_path: Path) -> None:
    write_log(tmp_path / "log.csv", 250)
    frame = pl.read_csv(tmp_path / "log.csv", schema_overrides={"list": pl.String, "picked": pl.String})
    (frame.with_columns(pl.col("tags").str.split("|"))).drop("tags").with_columns(frame["tags"]).write_parquet(
        tmp_path / "log.parquet"
    )
    made = (DenseColumn(name="since", fill="mean", transforms=("log1p", "zscore")), DenseColumn(name="rank_mean"))
    schema = replace(SCHEMA, dense=(*(c for c in SCHEMA.dense if c.name not in ("since", "rank_mean")), *made))
    made = []
    for name, file, threads in (("a", "log.csv", 1), ("b", "log.csv", 4), ("c", "log.parquet", 2)):
        run_prepare(schema, tmp_path / file, out=tmp_path / name, threads=threads, block_bytes=4_000)
        hashes = hash_tree(tmp_path / name)
        del hashes["manifest.json"]  # names the input file
        made.append((json.loads((tmp_path / name / "manifest.json").read_text())["dense_stats"], hashes))
    assert made[0] == made[1] == made[2]
    assert "features/item_mean.parquet" in made[0][1]
    assert "features/features.json" in made[0][1]


class Stop(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4, 6, 9, 12])
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    write_log(tmp_path / "log.csv", 200)
    monkeypatch.setattr(execute, "PARTITION_ROWS", 256)
    given: dict[str, Any] = {"threads": 1, "block_bytes": 6_000}
    run_prepare(SCHEMA, tmp_path / "log.csv", out=tmp_path / "whole", **given)
    reported = 0

    def kill(progress: StageProgress) -> None:
        nonlocal reported
        reported += 1
        if reported == steps:
            raise Stop

    with pytest.raises(Stop):
        run_prepare(SCHEMA, tmp_path / "log.csv", out=tmp_path / "cut", progress=kill, **given)
    work = tmp_path / "cut" / ".work"
    for path in [path for kind in ("rows/*.part", "features/*.folds", "passes/*.arrow")
                 for path in [*work.glob(kind)][:1]]:  # fmt: skip
        path.write_bytes(path.read_bytes()[:-1])  # the machine lost power while it wrote
    report = run_prepare(SCHEMA, tmp_path / "log.csv", out=tmp_path / "cut", **given)
    assert report.reused > 0 or steps == 1
    assert hash_tree(tmp_path / "cut") == hash_tree(tmp_path / "whole")


@pytest.mark.slow
def test_keys_that_were_damaged_while_a_run_stood_still_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path / "log.csv", 60)
    given: dict[str, Any] = {"threads": 1, "block_bytes": 700}
    run_prepare(SCHEMA, tmp_path / "log.csv", out=tmp_path / "whole", **given)

    def kill(*_: Any) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(featured, "_keys", kill)
        with pytest.raises(Stop):
            run_prepare(SCHEMA, tmp_path / "log.csv", out=tmp_path / "cut", **given)
    first, second, *_ = sorted((tmp_path / "cut" / ".work" / "rows").glob("*.part"))
    first.unlink()
    second.write_bytes(bytes(255 - byte for byte in second.read_bytes()))  # of the same size
    report = run_prepare(SCHEMA, tmp_path / "log.csv", out=tmp_path / "cut", **given)
    assert report.reused > 0
    assert hash_tree(tmp_path / "cut") == hash_tree(tmp_path / "whole")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_log(folder / "log.csv", 250)
    run_prepare(SCHEMA, folder / "log.csv", out=folder / "made", threads=2)
    return folder


@pytest.mark.slow
def test_new_rows_are_prepared_as_the_held_out_ones_were(prepared: Path, tmp_path: Path) -> None:
    before = hash_tree(prepared / "made")
    given = {"files": prepared / "log.csv", "like": prepared / "made", "out": tmp_path / "again"}
    again = stoker.prepare(**given, history="ignore")
    data = Dataset(prepared / "made")
    assert again.verify() > 0
    assert again.schema_hash == data.schema_hash
    assert again.schema == data.schema
    everything = sum(len(split) for split in data.splits.values())
    assert [len(again.split(name)) for name in ("train", "valid", "test")] == [0, 0, everything]
    dense, ids, labels = read(again, "test")
    kept = {name: read(data, name) for name in ("train", "valid", "test")}
    start = len(data.train)
    for name in ("valid", "test"):  # rows are in order of time
        stop = start + len(data.split(name))
        assert np.array_equal(dense[start:stop], kept[name][0])
        assert ids[start:stop] == kept[name][1]
        assert np.array_equal(labels[start:stop], kept[name][2])
        start = stop
    # Training rows differ in the encodings only, which are out of fold there.
    encoded = [list(data.schema.dense).index(name) for name in ("item_mean", "rank_mean")]
    same = np.delete(dense[: len(data.train)], encoded, axis=1) == np.delete(kept["train"][0], encoded, axis=1)
    assert same.all()
    assert (dense[: len(data.train), encoded] != kept["train"][0][:, encoded]).mean() > 0.5
    assert ids[: len(data.train)] == kept["train"][1]
    assert hash_tree(prepared / "made") == before
    for table, counts in data.counts.items():
        assert again.counts[table].equal(counts)


def test_values_that_training_does_not_know(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text(
        "list,user,when,action,shown,prices,picked,tags\n7,nobody,2000000,click,999|1,10|20,999,zzz|a\n"
    )
    data = stoker.prepare(files=tmp_path / "new.csv", like=prepared / "made", out=tmp_path / "new")
    dense, ids, labels = read(data, "test")
    assert labels.tolist() == [1, 0]
    assert [row[:2] for row in ids] == [[0, 0], [ids[1][0], 0]]
    assert ids[1][0] > 0
    facts = f.Fitted.load(prepared / "made" / "features").fitted_tables["item_mean"].facts
    assert dense[0][1] == np.float32(facts["mean"])  # an unknown item has the mean of all


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda made: (made / "features" / "item_mean.parquet").unlink(), "item_mean.parquet is missing"),
        (lambda made: flip(made / "features" / "item_mean.parquet"), "item_mean.parquet was altered: sha256"),
        (lambda made: flip(made / "vocab" / "item.parquet"), "item.parquet was altered: its sha256 is not"),
        (
            lambda made: another_mean(made / "features" / "features.json"),
            "features.json was altered: its sha256 is not",
        ),
    ],
)
def test_a_damaged_dataset_is_no_measure(
    prepared: Path, tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    made = tmp_path / "made"
    shutil.copytree(prepared / "made", made)
    harm(made)
    with pytest.raises(DataError, match=said):
        stoker.prepare(files=prepared / "log.csv", like=made, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))


def another_mean(path: Path) -> None:
    path.write_text(re.sub(r'("mean": 0\.)(\d)', lambda found: f"{found[1]}{9 - int(found[2])}", path.read_text()))


def test_files_that_lack_a_key_column(prepared: Path, tmp_path: Path) -> None:
    frame = pl.read_csv(prepared / "log.csv").rename({"user": "usr"})
    frame.write_csv(tmp_path / "new.csv")
    with pytest.raises(DataError, match=r"new.csv has no column 'user'.*Did you mean 'usr'"):
        stoker.prepare(files=tmp_path / "new.csv", like=prepared / "made", out=tmp_path / "out")


def test_bad_lines_of_features_are_set_aside(tmp_path: Path) -> None:
    write_log(tmp_path / "log.csv", 60)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    lines[3] = "1,u1,notime,click,1|2,3|4,1,a"
    lines[5] = lines[5] + ",more"
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    report = run_prepare(SCHEMA, tmp_path / "log.csv", out=tmp_path / "made")
    assert report.bad == 2
    assert report.lines == 60
    text = (tmp_path / "made" / "quarantine.jsonl").read_text()
    assert '"line": 4' in text or '"line":4' in text
    assert "'notime' is not a whole number" in text


@pytest.mark.slow
def test_a_piece_that_is_no_number_costs_its_line_only(tmp_path: Path) -> None:
    write_log(tmp_path / "log.csv", 60)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    lines[7] = "6,u1,1000000,click,1|2|3,4|cheap|5,1,a"
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    report = run_prepare(SCHEMA, tmp_path / "log.csv", out=tmp_path / "made")
    assert report.bad == 1
    quarantine = json.loads((tmp_path / "made" / "quarantine.jsonl").read_text())
    assert quarantine["line"] == 8
    assert "'cheap' is not a number" in quarantine["reason"]


def test_labels_of_rows_before_may_be_read() -> None:
    seen = f.PastCount(name="clicked", by=("item",), order="when", events="y")
    last = f.Previous(name="last", by=("item",), order="when", column="y")
    columns = tuple(DenseColumn(name=name) for name in ("clicked", "last"))
    assert Schema(label=Label(column="y"), feature=(seen, last), dense=columns).dense == columns


def test_a_column_that_is_not_there_names_who_reads_it(tmp_path: Path) -> None:
    write_log(tmp_path / "log.csv", 20)
    town = replace(SCHEMA, feature=(*SCHEMA.feature, f.CountEncoding(name="n", by=("town",))))
    with pytest.raises(DataError, match=r"no column 'town', which feature 'n' \(count\) reads. It has: list, "):
        run_prepare(town, tmp_path / "log.csv", out=tmp_path / "made")
    typo = replace(SCHEMA, dense=(*SCHEMA.dense, DenseColumn(name="item_maen")))
    with pytest.raises(DataError, match=r"no column 'item_maen'\. It has.* Did you mean 'item_mean'"):
        run_prepare(typo, tmp_path / "log.csv", out=tmp_path / "made")


def test_lines_whose_rows_are_bad_only_when_made(tmp_path: Path) -> None:
    """A line goes with all rows that it makes, under its own number and text and the first reason."""
    lines = ["y,item", "1|0,a|b", "", "1|q|0,c|d|e", "0,f,more", "0|zz|yy,g|h|i", "1,k", "0|3,l|m"]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    schema = Schema(
        name="s", label=Label(column="label"), categorical=(CategoricalColumn(name="shown"),),
        feature=(f.Pairs(columns=("y", "item"), names=("label", "shown")), f.CountEncoding(name="n", by="shown")),
        split=SplitRule(train=1.0, valid=0.0, test=0.0), dense=(DenseColumn(name="n"),),
    )  # fmt: skip
    report = run_prepare(schema, tmp_path / "log.csv", out=tmp_path / "made", max_bad=0.9)
    assert report.bad == 4
    bad = [json.loads(line) for line in (tmp_path / "made" / "quarantine.jsonl").read_text().splitlines()]
    assert [(one["line"], one["text"], one["reason"].split(": ")[-1]) for one in bad] == [
        (4, "1|q|0,c|d|e", "'q' is not a number"), (5, "0,f,more", "more than 2 fields"),
        (6, "0|zz|yy,g|h|i", "'zz' is not a number"), (8, "0|3,l|m", "3 is neither 0 nor 1"),
    ]  # fmt: skip
    data = Dataset(tmp_path / "made")
    assert read(data, "train")[2].tolist() == [1, 0, 1]
    [source] = data.manifest["sources"]
    assert (source["rows"], source["bad"], report.lines) == (2, 4, 6), "lines, not the rows that they make"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[feature]]\nkind = "count"\nby = ["item"]\nname = "item"\n', r"reads its own output 'item'"),
        ('[[feature]]\nkind = "mean_target"\nby = ["user"]\nfolds = 1\n', r"feature\[0\].*folds 1 is below 2"),
        ('[[feature]]\nkind = "nope"\n', r"feature\[0\]: kind 'nope' is not one of"),
        ('[[feature]]\nkind = "count"\nby = ["usr"]\n', r"reads column 'usr'.*Did you mean 'user'"),
        ("feature = 3\n", r"feature must be a list of tables, written \[\[feature\]\]"),
        ('[[feature]]\nkind = "count"\nby = ["user"]\nname = "y"\n', "label: column 'y' is made by feature 'y' "),
        (
            '[[dense]]\nname = "z"\n[[feature]]\nkind = "count"\nby = ["y"]\nname = "yy"\n'
            '[[feature]]\nkind = "difference"\nby = ["user"]\norder = "item"\ncolumn = "yy"\nname = "z"\n',
            r"'z' reveals the label 'y', from which feature 'z' \(difference\) makes it",
        ),
        ('[[dense]]\nname = "has_*"\n[[feature]]\nkind = "count"\nby = ["user"]\n', r"'has_\*': name is a pattern"),
    ],
)
def test_a_schema_file_with_a_mistake(tmp_path: Path, text: str, said: str) -> None:
    head = 'label = "y"\n' if not text.startswith("feature") else 'label = "y"\n' + text
    body = head + '[source]\ncolumns = ["user", "item", "y"]\n[[categorical]]\nname = "user"\n'
    (tmp_path / "s.toml").write_text(body + (text if not text.startswith("feature") else ""))
    with pytest.raises(SchemaError, match=said):
        Schema.from_file(tmp_path / "s.toml")


def test_a_schema_keeps_its_features_in_files(prepared: Path) -> None:
    data = Dataset(prepared / "made")
    again = Schema.from_dict(data.manifest["schema"])
    assert again.feature == SCHEMA.feature
    assert again.hash() == SCHEMA.hash()


@pytest.mark.slow
@pytest.mark.parametrize("fold_by", [None, "item"])
def test_target_encodings_of_grouped_rows_are_folded_by_the_group(tmp_path: Path, fold_by: str | None) -> None:
    """Lists of five with one click each: where a list is in several folds, its encoding tells which row was clicked."""
    lines = [f"{n // 5},{n % 7},{int(n % 5 == n // 5 % 5)}" for n in range(4_000)]
    (tmp_path / "log.csv").write_text("\n".join(["list,item,clicked", *lines]) + "\n")
    schema = Schema(label=Label(column="clicked"), group="list", categorical=(CategoricalColumn(name="item"),))
    schema = schema.with_feature("mean_target by=list" + ("" if fold_by is None else f" fold_by={fold_by}"))
    assert Schema.from_dict(schema.to_dict()) == schema
    (feature,) = schema.feature
    assert feature.to_dict()["fold_by"] == [fold_by or "list"]
    dense, _, labels = read(stoker.prepare(schema, tmp_path / "log.csv"), "train")
    clicked, other = dense[labels == 1, 0], dense[labels == 0, 0]
    auc = np.mean(clicked[:, None] > other) + np.mean(clicked[:, None] == other) / 2
    assert (abs(auc - 0.5) < 0.05) == (fold_by is None), auc


def test_a_group_given_later_folds_target_encodings() -> None:
    plain = [one.to_dict()["fold_by"] for one in SCHEMA.feature if isinstance(one, f.MeanTargetEncoding)]
    assert plain == [["list"], []], "every row by itself"
    grouped = replace(SCHEMA, group="user")
    assert [one.fold_by for one in grouped.feature if isinstance(one, f.MeanTargetEncoding)] == [("list",), ("user",)]
