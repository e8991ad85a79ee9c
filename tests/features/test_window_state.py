"""Window features of rows that go on from a dataset, against those of one log; and histories as sequences."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from campaigns import numbers, scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from test_featured_datasets import hash_tree
from test_like_datasets import rows as rows_of
from test_look_back import FEATURES, log

import stoker
from stoker import features as f
from stoker.base.errors import ConfigError, DataError, SchemaError
from stoker.cli import main
from stoker.models.din import DIN
from stoker.prep.features import execute
from stoker.prep.features.base import ROW
from stoker.prep.features.past import WEIGHT, Past, compute_all
from stoker.prep.prepare import run_prepare
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule

LASTING = [
    *(feature for feature in FEATURES if feature.has_table),
    f.PastCount(name="18", by="item", order="when", window=2.5, events="event"),
    f.PastCount(name="19", by="user", order="real", window=1.0),
    f.PastCount(name="20", by="user", order="when", window=1e30),
    f.PastCount(name="21", by="bool", order="day", events="event"),
    f.Difference(name="22", column="real", by="bool", order="moment", events="event"),
    f.SinceLast(name="23", by="bool", order="code", events="real"),
]


def test_what_has_a_state() -> None:
    assert {feature.kind for feature in FEATURES if not feature.has_table} == {"rank"}


def after(feature: Past, stored: pl.DataFrame | None, part: pl.DataFrame) -> tuple[pl.Series, pl.DataFrame]:
    """The feature of rows that follow a state, and the state after them, as a preparation works them out."""
    frame = part.with_row_index(ROW).with_columns(pl.col(ROW).cast(pl.Int64), pl.lit(1, pl.Int64).alias(WEIGHT))
    count = 0 if stored is None else stored.height
    if stored is not None:
        stored = stored.with_columns(pl.int_range(-count, 0, dtype=pl.Int64).alias(ROW))
        frame = pl.concat([stored, frame.select(stored.columns)])
    states: dict[str, list[pl.DataFrame]] = {feature.name: []}
    made = compute_all(frame, [feature], states, count)
    return made[count:].to_series(), states[feature.name][0].sort(ROW).drop(ROW)


@settings(max_examples=scaled(60), deadline=None)
@given(st.integers(1, 60), st.lists(st.integers(0, 60), min_size=1, max_size=3), st.sampled_from(LASTING))
def test_rows_that_follow_have_the_values_of_one_log(count: int, cuts: list[int], feature: Past) -> None:
    """Cuts fall between rows, so that those of one moment may be on both sides."""
    rows = log(count)
    keyed = rows.with_columns(n=pl.col(feature.order).fill_nan(None) if feature.order == "real" else feature.order)
    rows = keyed.sort("n", nulls_last=count % 2 == 0, maintain_order=True).drop("n")
    expected = compute_all(rows, [feature]).to_series()
    edges = sorted({0, *(cut for cut in cuts if cut < count), count})
    stored, made = None, []
    for start, stop in pairwise(edges):
        values, stored = after(feature, stored, rows[start:stop])
        made.append(values)
    assert pl.concat(made).equals(expected, null_equal=True)
    assert stored is not None
    assert stored.equals(after(feature, None, rows)[1]), "the state is that of one log, too"


@pytest.mark.slow
@pytest.mark.parametrize("feature", LASTING, ids=lambda feature: f"{feature.name}-{feature.kind}")
def test_a_state_is_small(feature: Past) -> None:
    """As many rows as the features look at and the moment that may go on, whatever the length of the log."""
    rows = log(2_000)
    state = after(feature, None, rows)[1]
    groups = rows.select(feature.by).n_unique()
    if isinstance(feature, f.PastCount) and feature.window is not None:
        assert not state.select(pl.struct(*feature.by, feature.order).is_duplicated()).to_series().any()
    else:
        assert state.height <= 2 * groups * getattr(feature, "depth", 1)
    assert 0 < state.height <= rows.height


def test_rows_that_are_older_are_refused() -> None:
    feature = f.Previous(name="last", by=("u",), order="t", column="x", events="e")
    old = pl.DataFrame({"u": ["a", "b", "a"], "t": [5, 9, 7], "x": [1, 2, 3], "e": [1, 1, 0]})
    stored = after(feature, None, old)[1]
    same = pl.DataFrame({"u": ["a", "c", "b", "a"], "t": [5, 0, 9, None], "x": [4, 5, 6, 7], "e": [1, 1, 1, 1]})
    assert after(feature, stored, same)[0].to_list() == [None] * 4  # of the last moment, of a new group, without moment
    with pytest.raises(
        DataError, match=r"u = 'b' has t = 8, before the last such row of None \(t = 9\).*--history ignore"
    ):
        after(feature, stored, same.with_columns(t=pl.Series([6, 0, 8, 9])))


SCHEMA = Schema(
    name="shop",
    label=Label(column="y"),
    feature=(
        f.Difference(name="rise", by="user", order="t", column="price"),
        f.SinceLast(name="since", by=("user", "item"), order="t", events="y"),
        f.PastCount(name="seen", by="user", order="t"),
        f.PastCount(name="lately", by="item", order="t", window=7),
        f.CountEncoding(name="shown", by="item"),
        f.Previous(name="seen_before", by="item", order="t", column="seen"),
        f.History(name="items", by="user", order="t", column="item", length=3),
        f.History(name="bought", by="user", order="t", column="item", events="y", length=2),
        f.Rank(name="rank", by="visit", order="price"),
    ),
    dense=tuple(DenseColumn(name=name, fill=-1.0)
                for name in ("rise", "since", "seen", "lately", "shown", "seen_before", "rank")),
    categorical=(CategoricalColumn(name="item", type="int", hash_buckets=1_000),),
    sequence=(
        SequenceColumn(name="items", type="int", table="item", hash_buckets=1_000),
        SequenceColumn(name="bought", type="int", table="item", hash_buckets=1_000, max_length=2),
    ),
    split=SplitRule(rule="hash", train=0.8, valid=0.1, test=0.1),
)  # fmt: skip
HEADER = "user,item,t,price,visit,y"


def lines_of(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    times = sorted(draw.randrange(count // 3) for _ in range(count))
    return [
        f"{draw.choice(['a', 'b', 'Zoë', ''])},{draw.randrange(6)},{t},{draw.choice([1, 2.5, ''])},v{n},"
        f"{draw.randrange(2)}"
        for n, t in enumerate(times)
    ]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return path


@pytest.mark.slow
def test_values_of_a_dataset_are_those_of_loops(tmp_path: Path) -> None:
    lines = lines_of(90, 1)
    made = stoker.prepare(replace(SCHEMA, split=SplitRule(rule="hash", train=1.0, valid=0.0, test=0.0)),
                          write(tmp_path / "log.csv", lines), out=tmp_path / "made")  # fmt: skip
    seen: list[list[str]] = [line.split(",") for line in lines]
    item_ids = [int(made.train[n]["ids"][0]) for n in range(len(lines))]
    for n, fields in enumerate(seen):
        past = [k for k in range(n) if seen[k][0] == fields[0] and int(seen[k][2]) < int(fields[2])]
        bought = [k for k in past if seen[k][5] == "1"]
        row = made.train[n]
        lengths = row["lengths"].tolist()
        assert lengths == [1, min(3, len(past)), min(2, len(bought))]
        wanted = [item_ids[k] for k in past[-3:]] + [item_ids[k] for k in bought[-2:]]
        assert row["ids"].tolist()[1:] == wanted
        assert row["dense"].tolist()[2] == len(past)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "partition"), [(seed, (10**6, 16)[seed % 2]) for seed in numbers(32)])
def test_new_rows_of_a_dataset_have_the_values_of_one_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, partition: int
) -> None:
    lines = lines_of(150, seed)
    draw = random.Random(seed)
    first, second = sorted(draw.sample(range(30, 140), 2))
    files = [write(tmp_path / f"{n}.csv", some) for n, some in enumerate((lines[:first], lines[first:second],
                                                                           lines[second:]))]  # fmt: skip
    stoker.prepare(SCHEMA, files[0], out=tmp_path / "day0")
    whole = stoker.prepare(files=write(tmp_path / "log.csv", lines), like=tmp_path / "day0", out=tmp_path / "whole",
                           history="ignore")  # fmt: skip
    monkeypatch.setattr(execute, "PARTITION_ROWS", partition)
    monkeypatch.setattr(execute, "_FEW_KEYS", 0)
    day1 = stoker.prepare(files=files[1], like=tmp_path / "day0", out=tmp_path / "day1", threads=2)
    assert rows_of(day1.test) == rows_of(whole.test)[first:second]
    day2 = stoker.prepare(files=files[2], like=tmp_path / "day1", threads=1)  # in memory, from the state after day 1
    assert rows_of(day2.test) == rows_of(whole.test)[second:]
    assert day1.verify() > 0
    states = {path.name: path.read_bytes() for path in (tmp_path / "whole" / "features").iterdir()}
    later = stoker.prepare(files=files[2], like=tmp_path / "day1", out=tmp_path / "day2", threads=3)
    assert rows_of(later.test) == rows_of(day2.test)
    assert {path.name: path.read_bytes() for path in (tmp_path / "day2" / "features").iterdir()} == states
    assert "seen.parquet" in states
    assert "rank.parquet" not in states


@pytest.mark.slow
def test_the_state_is_the_same_for_any_partitions_and_is_covered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "log.csv", lines_of(200, 5))
    run_prepare(SCHEMA, file, out=tmp_path / "a", threads=1)
    monkeypatch.setattr(execute, "PARTITION_ROWS", 17)
    run_prepare(SCHEMA, file, out=tmp_path / "b", threads=3, block_bytes=1_000)
    assert hash_tree(tmp_path / "a") == hash_tree(tmp_path / "b")
    index = json.loads((tmp_path / "a" / "features" / "features.json").read_text())
    names = {"rise", "since", "seen", "lately", "shown", "seen_before", "items", "bought"}
    assert set(index["files"]) == {f"{name}.parquet" for name in names}
    files = stoker.Dataset(tmp_path / "a").manifest["files"]
    assert {f"features/{name}.parquet" for name in names} <= set(files)
    path = tmp_path / "a" / "features" / "seen.parquet"
    path.write_bytes(path.read_bytes()[:-9] + b"damaged!!")
    with pytest.raises(DataError, match=r"seen.parquet was altered: sha256"):
        stoker.prepare(files=file, like=tmp_path / "a", out=tmp_path / "new")


class Stop(Exception):
    pass


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(120, 6)
    old, new = write(tmp_path / "old.csv", lines[:70]), write(tmp_path / "new.csv", lines[70:])
    stoker.prepare(SCHEMA, old, out=tmp_path / "made")
    given: dict[str, Any] = {"files": new, "like": tmp_path / "made", "threads": 1}
    stoker.prepare(out=tmp_path / "whole", **given)

    def stop(progress: Any) -> None:
        if progress.stage == "encode":
            raise Stop

    with pytest.raises(Stop):
        stoker.prepare(out=tmp_path / "cut", progress=stop, **given)
    report = run_prepare(None, out=tmp_path / "cut", **given)
    assert report.reused > 0
    assert hash_tree(tmp_path / "cut") == hash_tree(tmp_path / "whole")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    found = capsys.readouterr()
    return int(caught.value.code or 0), found.out, found.err


@pytest.mark.slow
def test_older_rows_need_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(90, 7)
    log = write(tmp_path / "log.csv", lines)
    made = stoker.prepare(SCHEMA, log, out=tmp_path / "made")
    given = ("prepare", log, "--like", tmp_path / "made", "--out", tmp_path / "new")
    code, _, error = run(capsys, *given)
    assert code != 0
    assert "(past_count): a new row with " in error or "(difference): a new row with" in error
    assert f"before the last such row of {tmp_path / 'made'} (t = " in " ".join(error.split())
    assert "--history ignore" in error
    assert len(error.strip().splitlines()) < 10
    assert not (tmp_path / "new").exists()
    code, out, _ = run(capsys, *given, "--history", "ignore", "--json")
    assert code == 0
    assert json.loads(out)["warnings"] == []
    new = stoker.Dataset(tmp_path / "new")
    assert len(new.test) == sum(map(len, made.splits.values()))
    files = [name for name in new.manifest["files"] if name.startswith("features/")]
    assert {name: new.manifest["files"][name] for name in files} == {
        name: made.manifest["files"][name] for name in files
    }
    for history, like in (("ignor", tmp_path / "made"), ("ignore", None)):
        with pytest.raises(ConfigError, match='history is "auto" or, with like, "ignore"'):
            stoker.prepare(None if like else SCHEMA, log, like=like, out=tmp_path / "no", history=history)


@pytest.mark.slow
def test_a_finished_dataset_of_another_history_is_not_taken(tmp_path: Path) -> None:
    lines = lines_of(60, 8)
    old, new = write(tmp_path / "old.csv", lines[:30]), write(tmp_path / "new.csv", lines[30:])
    stoker.prepare(SCHEMA, old, out=tmp_path / "made")
    given: dict[str, Any] = {"files": new, "like": tmp_path / "made", "out": tmp_path / "new"}
    stoker.prepare(**given)
    assert run_prepare(None, **given).already
    with pytest.raises(DataError, match="overwrite"):
        stoker.prepare(**given, history="ignore")


@pytest.mark.slow
def test_a_dataset_without_state_begins_anew_with_a_warning(tmp_path: Path) -> None:
    lines = lines_of(60, 9)
    old, new = write(tmp_path / "old.csv", lines[:30]), write(tmp_path / "new.csv", lines[30:])
    stoker.prepare(SCHEMA, old, out=tmp_path / "made")
    without_state(tmp_path / "made")
    report = run_prepare(None, new, like=tmp_path / "made", out=tmp_path / "new")
    [warning] = report.warnings
    assert (
        "made was prepared by an earlier version of Stoker and stores no state of its window features (rise, "
        in warning
    )
    quiet = run_prepare(None, new, like=tmp_path / "made", out=tmp_path / "ignored", history="ignore")
    assert quiet.warnings == []
    made, ignored = (rows_of(stoker.Dataset(tmp_path / name).test) for name in ("new", "ignored"))
    assert made == ignored
    [warning] = run_prepare(None, new, like=tmp_path / "new", out=tmp_path / "again").warnings
    assert "stores no state" in warning, "what went before is still not known"


def without_state(folder: Path) -> None:
    """Make a dataset what an earlier version made."""
    from stoker.dataset.manifest import describe_file, write_manifest

    path = folder / "features" / "features.json"
    index = json.loads(path.read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in [name for name in index["files"] if name != "shown.parquet"]:
        del index["files"][name], index["facts"][name.removesuffix(".parquet")], manifest["files"][f"features/{name}"]
        (folder / "features" / name).unlink()
    path.write_text(json.dumps(index))
    manifest["files"]["features/features.json"] = describe_file(path)
    write_manifest(folder, manifest)


@pytest.mark.slow
def test_state_goes_with_reordered_and_copied_datasets(tmp_path: Path) -> None:
    lines = lines_of(120, 10)
    old, new = write(tmp_path / "old.csv", lines[:60]), write(tmp_path / "new.csv", lines[60:])
    schema = replace(SCHEMA, categorical=(CategoricalColumn(name="item", type="int"),), sequence=())
    stoker.prepare(schema, old, out=tmp_path / "made")

    def dense(like: Path) -> list[list[float]]:
        test = stoker.prepare(files=new, like=like).test
        return [test[n]["dense"].tolist() for n in range(len(test))]

    expected = dense(tmp_path / "made")
    stoker.reorder(tmp_path / "made", out=tmp_path / "ordered", tables=["item"])
    shutil.copytree(tmp_path / "made", tmp_path / "copy")
    stoker.prepare(schema, old).save(tmp_path / "saved")
    for name in ("ordered", "copy", "saved"):
        assert dense(tmp_path / name) == expected, name


def test_columns_of_another_type(tmp_path: Path) -> None:
    frame = pl.DataFrame({"u": ["a", "a", "b"], "t": [1, 2, 3], "x": [1, 2, 3], "y": [0, 1, 0]})
    schema = Schema(
        name="s", label=Label(column="y"), dense=(DenseColumn(name="last"),),
        feature=(f.Previous(name="last", by="u", order="t", column="x"),),
        split=SplitRule(rule="hash", train=1.0, valid=0.0, test=0.0),
    )  # fmt: skip
    state = pl.DataFrame({"u": ["a"], "t": [2], "x": [1.5]})
    types = {"u": pl.String(), "t": pl.Float64(), "x": pl.Int64()}
    with pytest.raises(DataError, match=r"'last' \(previous\): column 'x' is Int64 in the new rows and Float64 in the"):
        execute._as_new(schema.feature[0], state, types)  # type: ignore[arg-type]
    cast = execute._as_new(schema.feature[0], state, {**types, "x": pl.Float64()})  # type: ignore[arg-type]
    assert cast.to_dicts() == [{"u": "a", "t": 2.0, "x": 1.5, ROW: -1}]
    made = stoker.prepare(schema, frame)
    new = frame.with_columns(pl.col("t").cast(pl.Float64) + 2, pl.col("x").cast(pl.Int16))
    assert stoker.prepare(files=new, like=made.path).test[0]["dense"].tolist() == [2.0]


def test_features_that_store_tables_have_names_of_their_own() -> None:
    features = (f.Properties(name="has", column="p", values=("x",)), f.PastCount(name="has", by="u", order="t"))
    with pytest.raises(
        SchemaError, match=r"feature 'has' \(past_count\): name is that of feature 'has' \(properties\)"
    ):
        f.check_features(features)


def test_a_history_in_one_line_is_a_sequence_of_the_same_table(tmp_path: Path) -> None:
    plain = Schema(
        name="s", label=Label(column="y"),
        categorical=(CategoricalColumn(name="target", source="item", type="int", min_count=2),),
    )  # fmt: skip
    schema = plain.with_feature("history by=user order=t column=item length=4")
    assert schema.sequence == (
        SequenceColumn(name="history_user_item_t", type="int", table="target", min_count=2, max_length=4),
    )
    other = plain.with_feature("history name=prices by=user order=t column=price")
    assert other.sequence == (SequenceColumn(name="prices", type="string", max_length=20),)
    data = stoker.prepare(schema, write(tmp_path / "log.csv", lines_of(120, 11)), out=tmp_path / "made")
    assert data.schema.features[1].sequence
    longest = max(data.train[n]["lengths"].tolist()[1] for n in range(len(data.train)))
    assert longest == 4
    assert DIN(data.schema, embedding_dim=4).history == {"target": schema.sequence[0].name}


@pytest.mark.parametrize(("given", "said"), [({"length": 0}, "length 0 is below 1"), ({"column": "user"}, None)])
def test_settings_of_histories(given: dict[str, Any], said: str | None) -> None:
    settings_ = {"by": ("user",), "order": "t", "column": "item", **given}
    if said is None:
        assert f.History(**settings_).inputs == ("user", "t")
        return
    with pytest.raises(SchemaError, match=said):
        f.History(**settings_)


def test_a_history_of_lists_is_refused() -> None:
    rows = pl.DataFrame({"u": ["a"], "t": [1], "l": [["x"]], "y": [0]})
    feature = f.History(name="h", by="u", order="t", column="l")
    with pytest.raises(DataError, match=r"'h' \(history\) reads column 'l' of List\(String\), but needs single values"):
        f.fit([feature], rows, label="y").apply(rows)


def test_missing_and_no_rows() -> None:
    feature = f.History(name="h", by="u", order="t", column="x", length=2)
    rows = pl.DataFrame({"u": ["a"] * 5, "t": [1, 2, 2, 3, None], "x": [1.0, float("nan"), 2.0, None, 5.0]})
    assert compute_all(rows, [feature])["h"].to_list() == [[], [1.0], [1.0], [1.0, 2.0], None]
    assert compute_all(rows[:0], [feature]).schema == {"h": pl.List(pl.Float64)}
    assert after(feature, None, rows[:0])[1].shape == (0, 3)
