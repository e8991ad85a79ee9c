"""Rows without labels: prepared like a dataset, scored by a model of it, joined to what they came from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from calling import SMALL, call, output

import stoker
from stoker.base.errors import DataError
from stoker.dataset.dataset import Dataset
from stoker.prep.prepare import StageProgress, run_prepare

ROWS, NEW = 3000, 500
SCHEMA = """
[label]
column = "click"

[[dense]]
name = "price"
fill = "mean"

[[categorical]]
name = "item"
type = "int"

[[categorical]]
name = "city"

[split]
rule = "hash"
"""


def log(rows: int = ROWS, *, seed: int = 0) -> pl.DataFrame:
    random = np.random.default_rng(seed)
    item = random.integers(0, 40, rows)
    return pl.DataFrame(
        {
            "user": [f"u{number}" for number in random.integers(0, 90, rows)],
            "click": (random.random(rows) < (item % 2) * 0.8 + 0.1).astype(int),
            "price": random.random(rows).round(3),
            "item": item,
            "city": random.choice(["here", "there"], rows),
        }
    )


@pytest.mark.slow
def test_kept_columns_are_before_the_score(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["prepare", "--like", place / "data", place / "log.csv", "--out", tmp_path / "d", "--keep", "user"]
    assert call(*command, "--keep", "city") == 0
    assert call("predict", place / "run", "--data", tmp_path / "d", "--out", tmp_path / "s.csv") == 0
    scores = pl.read_csv(tmp_path / "s.csv")
    assert scores.columns == ["row", "label", "user", "city", "score"]
    assert scores.select("user", "city").rows() == log().select("user", "city").rows()
    _, shown, _ = output(capsys, "inspect", tmp_path / "d")
    assert "kept columns     user (string), city (string)" in shown
    _, told, _ = output(capsys, "inspect", tmp_path / "d", "--json")
    assert json.loads(told)["keep"] == {"user": "string", "city": "string"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a schema, a log, its dataset and a run of a few steps."""
    path = tmp_path_factory.mktemp("shop")
    (path / "shop.toml").write_text(SCHEMA)
    log().write_csv(path / "log.csv")
    assert call("prepare", path / "shop.toml", path / "log.csv", "--out", path / "data") == 0
    assert call("train", path / "data", "--out", path / "run", *SMALL) == 0
    return path


def shards(data: Path) -> dict[str, bytes]:
    return {str(file.relative_to(data)): file.read_bytes() for file in sorted(data.rglob("*.safetensors"))}


def partly(path: Path, empty: Sequence[bool], **columns: Any) -> pl.DataFrame:
    new = log(len(empty), seed=7)
    new = new.with_columns(click=pl.when(pl.Series(empty)).then(None).otherwise(pl.col("click")))
    new.write_csv(path)
    return new


def cells(line: str) -> list[str]:
    return line.replace("│", " ").split()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_a_log_without_label_column_is_prepared_and_scored(
    place: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = log(NEW, seed=7)
    whole.write_csv(tmp_path / "whole.csv")
    file = tmp_path / f"new.{suffix}"
    {"csv": pl.DataFrame.write_csv, "parquet": pl.DataFrame.write_parquet, "jsonl": pl.DataFrame.write_ndjson}[suffix](
        whole.drop("click"),
        file,
    )
    code, out, _ = output(capsys, "prepare", file, "--like", place / "data", "--out", tmp_path / "new")
    assert code == 0
    assert "500 rows without label" in out
    assert ["test", "500", "-", "-"] in [cells(line)[:4] for line in out.splitlines()], "not 0 positive rows"
    _, shown, _ = output(capsys, "inspect", tmp_path / "new")
    assert ["test", "500", "-", "-"] in [cells(line)[:4] for line in shown.splitlines()]
    assert call("prepare", "--like", place / "data", tmp_path / "whole.csv", "--out", tmp_path / "whole") == 0
    entry = Dataset(tmp_path / "new").manifest["splits"]["test"]
    assert (entry["rows"], entry["labelled"], entry["positives"]) == (NEW, 0, 0)
    for name in ("new", "whole"):
        run = ["--data", tmp_path / name, "--out", tmp_path / f"{name}.scores.parquet"]
        assert call("predict", place / "run", *run) == 0
    new, known = pl.read_parquet(tmp_path / "new.scores.parquet"), pl.read_parquet(tmp_path / "whole.scores.parquet")
    assert new["score"].equals(known["score"])
    assert new["label"].null_count() == NEW
    assert known["label"].to_list() == whole["click"].to_list()
    assert call("predict", place / "run", "--data", tmp_path / "new", "--out", tmp_path / "scores.csv") == 0
    assert (tmp_path / "scores.csv").read_text().splitlines()[1].startswith("0,,0.")


@pytest.mark.slow
def test_an_evaluation_takes_the_rows_with_labels_only(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = [number % 5 < 2 for number in range(NEW)]
    new = partly(tmp_path / "new.csv", empty)
    new.drop_nulls("click").write_csv(tmp_path / "known.csv")
    for name in ("new", "known"):
        assert call("prepare", "--like", place / "data", tmp_path / f"{name}.csv", "--out", tmp_path / name) == 0
    entry = Dataset(tmp_path / "new").manifest["splits"]["test"]
    assert (entry["labelled"], entry["positives"]) == (300, new["click"].sum())
    assert "labelled" not in Dataset(tmp_path / "known").manifest["splits"]["test"]
    found = {}
    capsys.readouterr()
    for name in ("new", "known"):
        code, out, _ = output(capsys, "evaluate", place / "run", "--data", tmp_path / name, "--json")
        assert code == 0
        found[name] = {key: value for key, value in json.loads(out).items() if key not in ("checkpoint", "split")}
    assert found["new"]["rows"] == 300
    assert found["new"] == pytest.approx(found["known"], rel=1e-6)
    code, out, _ = output(capsys, "evaluate", place / "run", "--data", tmp_path / "new")
    assert "200 of 500 rows of split test have no label and are left out" in out
    _, out, _ = output(capsys, "inspect", tmp_path / "new")
    assert "200 rows of test" in out
    _, out, _ = output(capsys, "inspect", tmp_path / "new", "--json")
    test = json.loads(out)["splits"]["test"]
    assert test["labelled"] == 300
    assert test["share"] == pytest.approx(new["click"].mean())
    scores = stoker.predict(stoker.load(place / "run", device="cpu").model, Dataset(tmp_path / "new").test)
    assert scores.labels is not None
    assert np.isnan(scores.labels).tolist() == empty


@pytest.mark.slow
def test_lists_are_ranked_by_their_rows_with_labels(place: Path, tmp_path: Path) -> None:
    schema = stoker.Schema.from_file(place / "shop.toml")
    grouped = stoker.Schema.from_dict({**schema.to_dict(), "group": "user"})
    data = stoker.prepare(grouped, place / "log.csv", out=tmp_path / "data")
    stoker.train(data, out=tmp_path / "run", steps=3, batch_size=256, embedding_dim=4, display="quiet")
    model = stoker.load(tmp_path / "run", device="cpu").model
    new = partly(tmp_path / "new.csv", [number % 3 == 0 for number in range(NEW)])
    new.drop_nulls("click").write_csv(tmp_path / "known.csv")
    found = [
        stoker.evaluate(model, stoker.prepare(files=tmp_path / f"{name}.csv", like=data.path).test, batch_size=64)
        for name in ("new", "known")
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6, nan_ok=True)


def test_what_needs_labels_is_refused_by_name(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partly(tmp_path / "new.csv", [True] * NEW)
    assert call("prepare", "--like", place / "data", tmp_path / "new.csv", "--out", tmp_path / "new") == 0
    code, _, err = output(capsys, "evaluate", place / "run", "--data", tmp_path / "new")
    assert code == 2
    assert "no row of split test has a label" in err
    assert "stoker predict" in err
    for command in (["train", tmp_path / "new", "--out", tmp_path / "x"], ["find-lr", tmp_path / "new"]):
        code, _, err = output(capsys, *command)
        assert code == 2
        assert "500 of the 500 rows of split test have no label, so the dataset cannot be trained on" in " ".join(
            err.split()
        )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kept", ["column", "fields"])
def test_training_rows_need_labels(place: Path, tmp_path: Path, kept: str) -> None:
    new = log(NEW)
    new = new.drop("click") if kept == "column" else new.with_columns(click=pl.lit(None))
    new.write_csv(tmp_path / "new.csv")
    with pytest.raises(DataError, match=r"click.* To score rows without: stoker prepare --like DATASET"):
        run_prepare(place / "shop.toml", tmp_path / "new.csv", out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_files_agree_on_the_label_column(place: Path, tmp_path: Path) -> None:
    log(NEW).write_csv(tmp_path / "a.csv")
    log(NEW).drop("click").write_csv(tmp_path / "b.csv")
    with pytest.raises(DataError, match=r"b\.csv has no column 'click', but .*a\.csv has"):
        run_prepare(None, [tmp_path / "a.csv", tmp_path / "b.csv"], like=place / "data", out=tmp_path / "x")


def test_labels_that_are_there_must_still_be_0_or_1(place: Path, tmp_path: Path) -> None:
    new = log(NEW).with_columns(click=pl.Series([None, "2", "x"] + ["1"] * (NEW - 3)))
    new.write_csv(tmp_path / "new.csv")
    report = run_prepare(None, tmp_path / "new.csv", like=place / "data", out=tmp_path / "x", max_bad="1%")
    assert (report.bad, report.rows["test"], report.labelled["test"]) == (2, NEW - 2, NEW - 3)


def test_neither_threads_nor_blocks_nor_memory_change_a_byte(place: Path, tmp_path: Path) -> None:
    partly(tmp_path / "new.csv", [number % 7 == 0 for number in range(NEW)])
    for number, (threads, block) in enumerate([(1, 2**20), (4, 2000)]):
        run_prepare(
            None, tmp_path / "new.csv", like=place / "data", out=tmp_path / str(number), threads=threads,
            block_bytes=block,
        )  # fmt: skip
    stoker.prepare(files=tmp_path / "new.csv", like=place / "data").save(tmp_path / "2")
    manifests = [Dataset(tmp_path / str(number)).manifest["splits"] for number in range(3)]
    assert manifests[0] == manifests[1] == manifests[2]
    assert shards(tmp_path / "0") == shards(tmp_path / "1") == shards(tmp_path / "2")


def test_an_interrupted_preparation_goes_on_with_the_same_counts(place: Path, tmp_path: Path) -> None:
    partly(tmp_path / "new.csv", [number % 7 == 0 for number in range(NEW)])
    given: dict[str, Any] = {"like": place / "data", "threads": 1, "block_bytes": 2000}
    run_prepare(None, tmp_path / "new.csv", out=tmp_path / "whole", **given)

    def stop(progress: StageProgress) -> None:
        if progress.stage == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="kept"):
        run_prepare(None, tmp_path / "new.csv", out=tmp_path / "again", progress=stop, **given)
    report = run_prepare(None, tmp_path / "new.csv", out=tmp_path / "again", **given)
    assert report.reused
    assert report.labelled["test"] == NEW - len(range(0, NEW, 7))
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (tmp_path / "whole" / "manifest.json").read_bytes()


@pytest.mark.slow
def test_rules_make_no_label_of_nothing(tmp_path: Path) -> None:
    stars = log().with_columns(stars=pl.col("click") * 4 + 1, act=pl.col("click").replace_strict({0: "see", 1: "buy"}))
    stars.write_csv(tmp_path / "log.csv")
    for rule, column in ((">= 4", "stars"), ("== 'buy'", "act"), ("!= 'see'", "act")):
        folder = tmp_path / f"{column}{len(rule)}{rule[0] == '!'}"
        schema = stoker.Schema.from_dict(
            {"label": {"column": column, "rule": rule}, "categorical": [{"name": "item", "type": "int"}]}
        )
        data = stoker.prepare(schema, tmp_path / "log.csv", out=folder / "data")
        new = stars[:NEW].with_columns(
            pl.when(pl.int_range(NEW) % 2 == 0).then(None).otherwise(pl.col(column)).alias(column)
        )
        new.write_csv(folder / "new.csv")
        found = stoker.prepare(files=folder / "new.csv", like=data.path)
        labels = np.concatenate([shard.labels for shard in found.test.shards])
        assert np.isnan(labels[::2]).all()
        assert labels[1::2].tolist() == stars["click"][1:NEW:2].to_list()
        stars[:NEW].drop(column).write_csv(folder / "none.csv")
        assert stoker.prepare(files=folder / "none.csv", like=data.path).test.labelled == 0


def test_a_column_that_the_model_reads_too_must_be_there(tmp_path: Path) -> None:
    log().rename({"item": "stars"}).write_csv(tmp_path / "log.csv")
    schema = stoker.Schema.from_dict(
        {"label": {"column": "stars", "rule": ">= 20"}, "dense": [{"name": "stars"}, {"name": "price"}]}
    )
    with pytest.warns(UserWarning, match="from which the rule"):
        data = stoker.prepare(schema, tmp_path / "log.csv", out=tmp_path / "data")
    log().drop("item").write_csv(tmp_path / "new.csv")
    with pytest.raises(DataError, match="has no column 'stars'"):
        stoker.prepare(files=tmp_path / "new.csv", like=data.path)


def test_negatives_are_sampled_and_rows_without_label_kept(place: Path, tmp_path: Path) -> None:
    schema = stoker.Schema.from_dict({**stoker.Schema.from_file(place / "shop.toml").to_dict(), "negative_keep": 0.3})
    data = stoker.prepare(schema, place / "log.csv", out=tmp_path / "data")
    log(NEW).drop("click").write_csv(tmp_path / "new.csv")
    assert len(stoker.prepare(files=tmp_path / "new.csv", like=data.path).test) == NEW


@pytest.mark.slow
def test_features_are_worked_out_for_rows_without_label(place: Path, tmp_path: Path) -> None:
    schema = stoker.Schema.from_file(place / "shop.toml").with_feature("mean_target by=item,city")
    data = stoker.prepare(schema, place / "log.csv", out=tmp_path / "data")
    whole = log(NEW, seed=7)
    whole.write_csv(tmp_path / "whole.csv")
    whole.drop("click").write_csv(tmp_path / "new.csv")
    whole.with_columns(click=pl.lit(None)).write_csv(tmp_path / "empty.csv")
    found = [stoker.prepare(files=tmp_path / f"{name}.csv", like=data.path).test for name in ("whole", "new", "empty")]
    assert [split.labelled for split in found] == [NEW, 0, 0]
    for split in found[1:]:
        assert np.array_equal(split.shards[0].dense, found[0].shards[0].dense)
        assert np.array_equal(split.shards[0].ids, found[0].shards[0].ids)


@pytest.mark.slow
def test_the_test_logs_of_public_data_have_no_label(tmp_path: Path) -> None:
    """Those of Criteo and Avazu: of one the column is missing in lines without header."""
    from stoker.synthetic import write

    for name, file in (("criteo", "train.txt"), ("avazu", "train.csv")):
        folder = tmp_path / name
        folder.mkdir()
        write(name, 2000, folder / file)
        data = stoker.prepare(name, folder / file, out=folder / "data")
        lines = (folder / file).read_text().splitlines()
        mark, place = ("\t", 0) if name == "criteo" else (",", 1)
        cut = [mark.join(part for at, part in enumerate(line.split(mark)) if at != place) for line in lines]
        (folder / f"test{file[5:]}").write_text("\n".join(cut) + "\n")
        new = stoker.prepare(files=folder / f"test{file[5:]}", like=data.path).test
        same = stoker.prepare(files=folder / file, like=data.path).test
        assert (len(new), new.labelled) == (2000, 0)
        assert np.array_equal(new.shards[0].ids, same.shards[0].ids)


@pytest.mark.slow
def test_pairs_without_rating_are_scored(tmp_path: Path) -> None:
    from stoker.synthetic import write

    write("movielens", 2000, tmp_path / "ml")
    data = stoker.prepare("movielens", str(tmp_path / "ml" / "*.dat"), out=tmp_path / "data")
    same = stoker.prepare(files=str(tmp_path / "ml" / "*.dat"), like=data.path).test
    ratings = tmp_path / "ml" / "ratings.dat"
    rows = [line.split("::") for line in ratings.read_text().splitlines()]
    ratings.write_text("".join(f"{user}::{movie}::{time}\n" for user, movie, _, time in rows))
    found = [stoker.prepare(files=str(tmp_path / "ml" / "*.dat"), like=data.path).test]
    ratings.unlink()
    pairs = {"user": 0, "movie": 1, "time": 3}
    pl.DataFrame({name: [int(row[at]) for row in rows] for name, at in pairs.items()}).write_parquet(
        tmp_path / "ml" / "ratings.parquet"
    )
    found += [stoker.prepare(files=str(tmp_path / "ml" / "*s.*"), like=data.path).test]
    for new in found:
        assert (len(new), new.labelled) == (len(rows), 0)
        assert np.array_equal(new.shards[0].ids, same.shards[0].ids)
