"""Raw logs where a dataset is expected: ``prepare auto``, ``train clicks.csv``, ``predict --data today.csv``."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner, Result

import stoker
from stoker.base.errors import SchemaError, StokerError
from stoker.cli import app

HEADER = "time,user_id,item_id,price"


def lines(first: int, last: int) -> list[str]:
    """Rows a minute apart."""
    return [
        f"2025-08-{1 + i // 1440:02d} {i // 60 % 24:02d}:{i % 60:02d}:00,u{i % 17},i{i % 5},{i % 7}.5"
        for i in range(first, last)
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    labelled = [f"{line},{i * 7 % 3 // 2}" for i, line in enumerate(lines(0, 400))]
    Path("clicks.csv").write_text("\n".join([f"{HEADER},clicked", *labelled]) + "\n")
    Path("today.csv").write_text("\n".join([HEADER, *lines(400, 420)]) + "\n")
    return tmp_path


def call(*arguments: str) -> Result:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 or isinstance(done.exception, StokerError), done.output
    return done


def refused(*arguments: str) -> str:
    done = call(*arguments)
    assert done.exception is not None, done.output
    return str(done.exception)


TRAIN = ("train", "clicks.csv", "--out", "run", "--batch-size", "64", "--dim", "4", "--epochs", "1", "--no-tensorboard")


@pytest.mark.slow
def test_three_commands_from_a_log_to_scores(folder: Path) -> None:
    done = call(*TRAIN)
    assert done.exit_code == 0, done.output
    parts = "label: clicked.", "init clicks.csv", "Dataset clicks-data", "run: run", "for test with the rarer label"
    for part in parts:
        assert part in done.output
    data = stoker.Dataset("clicks-data")
    assert [feature.name for feature in data.schema.features] == ["user_id", "item_id"]
    assert len(data.train) == 320
    done = call("predict", "run", "--data", "today.csv", "--keep", "user_id", "--out", "scores.parquet")
    assert done.exit_code == 0, done.output
    scores = pl.read_parquet("scores.parquet")
    assert scores["user_id"].to_list() == [f"u{i % 17}" for i in range(400, 420)]
    assert scores["label"].is_null().all()
    assert scores["score"].is_between(0, 1).all()
    # The same scores as from a dataset that was prepared by hand.
    stoker.prepare(files="today.csv", like="clicks-data", out="today")
    assert call("predict", "run", "--data", "today", "--out", "other.parquet").exit_code == 0
    assert pl.read_parquet("other.parquet")["score"].to_list() == scores["score"].to_list()
    assert sorted(path.name for path in folder.iterdir() if "data" in path.name) == ["clicks-data"]


@pytest.mark.slow
def test_a_drafted_schema_says_its_doubts_and_what_it_leaves_out(folder: Path) -> None:
    log = [f"{i % 2},u{i % 9},{i % 4 // 2},{'x' * (i % 4 // 2)}" for i in range(400)]
    Path("log.csv").write_text("\n".join(["is_member,user_id,foo,order_id", *log]) + "\n")
    shown = " ".join(call("prepare", "auto", "log.csv", "--out", "data").output.split())
    assert 'unsure: column "is_member": chosen because its values are 0 and 1' in shown
    Path("leak.csv").write_text("\n".join(["other,user_id,clicked,order_id", *log]) + "\n")
    shown = " ".join(call("prepare", "auto", "leak.csv", "--out", "leak").output.split())
    assert "left out: order_id: 'x' in all rows with label 1 and in no others" in shown
    Path("stars.csv").write_text("".join(["rating,user_id\n", *(f"{i % 5 + 1},u{i % 9}\n" for i in range(400))]))
    assert "label: rating >= 4. To change" in call("prepare", "auto", "stars.csv", "--out", "stars").output


@pytest.mark.slow
def test_scores_of_a_log_with_a_bad_line_say_which_line_is_missing(folder: Path) -> None:
    assert call(*TRAIN).exit_code == 0
    rows = lines(400, 420)
    rows[3] = rows[3].rsplit(",", 1)[0] + ",cheap"
    Path("bad.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    shown = call("predict", "run", "--data", "bad.csv", "--keep", "user_id", "--out", "scores.csv").output
    assert "1 bad line of bad.csv left out, the first: bad.csv:5: column price: 'cheap'" in shown
    assert pl.read_csv("scores.csv").height == 19
    Path("clicks-data").rename("moved")
    said = refused("predict", "run", "--data", "bad.csv", "--out", "other.csv")
    assert "If it was moved: stoker prepare --like DATASET bad.csv --out NEW" in said


@pytest.mark.slow
def test_rows_without_label_do_not_stop_a_log_whose_draft_names_them(folder: Path) -> None:
    log = [f"{line},{'' if i % 20 == 0 else i * 7 % 3 // 2}" for i, line in enumerate(lines(0, 400))]
    Path("gaps.csv").write_text("\n".join([f"{HEADER},clicked", *log]) + "\n")
    shown = " ".join(call("train", "gaps.csv", "--out", "run", *TRAIN[4:]).output.split())
    said = "5.0% of the rows have no label: they are bad lines, set aside; with a schema file add --max-bad 6%"
    assert said in shown
    assert "20 bad lines (5.000%) set aside" in shown
    with pytest.warns(UserWarning, match="1 doubt"):
        assert len(stoker.prepare("auto", "gaps.csv").train) == 304
    assert call("init", "gaps.csv").exit_code == 0
    assert "20 of 400 lines are bad (5.000%)" in refused("prepare", "schema.toml", "gaps.csv", "--out", "own")
    assert call("prepare", "schema.toml", "gaps.csv", "--out", "own", "--max-bad", "6%").exit_code == 0
    assert call("prepare", "auto", "gaps.csv", "--out", "common", "--min-count", "2").exit_code == 0
    # Other bad lines count as ever.
    log[360:] = [f"{line},x" for line in log[360:]]
    Path("worse.csv").write_text("\n".join([f"{HEADER},clicked", *log]) + "\n")
    said = refused("train", "worse.csv", "--out", "other", *TRAIN[4:])
    assert "58 of 400 lines are bad (14.500%), more than the 6.000% that max_bad allows by default" in said
    assert "allow more with stoker prepare auto worse.csv --out worse-data --max-bad, such as 15%" in said
    said = refused("predict", "run", "--data", "worse.csv", "--out", "scores.csv")
    assert "allow more with stoker prepare --like" in said
    assert "worse.csv --out NEW --max-bad, such as 11%" in said


@pytest.mark.slow
def test_rows_without_label_and_rows_without_time_are_allowed_together(folder: Path) -> None:
    log = [f"{',' + line.split(',', 1)[1] if i < 56 else line},{'' if i >= 340 else i * 7 % 3 // 2}"
           for i, line in enumerate(lines(0, 400))]  # fmt: skip
    Path("gaps.csv").write_text("\n".join([f"{HEADER},clicked", *log]) + "\n")
    assert call("init", "gaps.csv").exit_code == 0
    draft = Path("schema.toml").read_text()
    for said in ("15.0% of the rows have no label", "14.0% of the rows have no time"):
        assert f"{said}: they are bad lines, set aside; with a schema file add --max-bad 30%" in draft
    # 29 % of the lines are bad, and 0.29 * 400 is less than 116.
    assert call("prepare", "schema.toml", "gaps.csv", "--out", "own", "--max-bad", "29%").exit_code == 0
    assert "bad" in refused("prepare", "schema.toml", "gaps.csv", "--out", "less", "--max-bad", "28.9%")


@pytest.mark.slow
def test_a_second_run_takes_the_dataset_as_it_is(folder: Path) -> None:
    assert call(*TRAIN).exit_code == 0
    manifest = Path("clicks-data/manifest.json").stat().st_mtime_ns
    again = call("train", "clicks.csv", "--out", "other", *TRAIN[4:])
    assert again.exit_code == 0, again.output
    assert "already prepared" in again.output
    assert Path("clicks-data/manifest.json").stat().st_mtime_ns == manifest
    Path("clicks.csv").write_text(Path("clicks.csv").read_text() + f"{lines(500, 501)[0]},1\n")
    changed = refused("train", "clicks.csv", "--out", "third", *TRAIN[4:])
    assert "stoker prepare auto clicks.csv --out clicks-data --overwrite" in changed


@pytest.mark.slow
def test_json_has_one_result_and_no_tables(folder: Path) -> None:
    done = call(*TRAIN, "--json")
    assert done.exit_code == 0, done.output
    assert {"result"} <= {json.loads(line)["kind"] for line in done.stdout.splitlines()}


def test_a_taken_run_directory_is_refused_before_the_log_is_read(folder: Path) -> None:
    Path("run").mkdir()
    Path("run/notes.txt").write_text("mine")
    assert "run exists and is not empty" in refused(*TRAIN)
    assert not Path("clicks-data").exists()
    assert "--out" in refused("train", "clicks.csv")


@pytest.mark.slow
def test_prepare_auto_in_python_and_on_the_command_line(folder: Path) -> None:
    done = call("prepare", "auto", "clicks.csv", "--out", "cli", "--min-count", "2")
    assert done.exit_code == 0, done.output
    made = stoker.prepare("auto", "clicks.csv", out="python")
    assert len(made.train) == 320
    Path("schema.toml").write_text(stoker.draft_schema("clicks.csv"))
    by_hand = stoker.prepare("schema.toml", "clicks.csv", out="hand")
    assert by_hand.manifest["schema_hash"] == made.manifest["schema_hash"]
    frame = pl.read_csv("clicks.csv")
    assert stoker.prepare("auto", frame).train.labelled == 320


def test_a_log_without_a_label_is_refused(folder: Path) -> None:
    with pytest.raises(SchemaError, match=r"looks like a label.*stoker init"):
        stoker.prepare("auto", "today.csv", out="out")
    assert "looks like a label" in refused("train", "today.csv", "--out", "run")
    assert not Path("out").exists()
    Path("twice.csv").write_text("\n".join(["user,user,clicked", *(f"u{i % 9},i{i % 4},{i % 2}" for i in range(400))]))
    said = "looks like a feature: clicked. Several columns are called 'user': left out, as the name does not say which"
    assert said in refused("train", "twice.csv", "--out", "run")


@pytest.mark.slow
def test_dates_that_may_be_read_in_two_ways_are_refused(folder: Path) -> None:
    days = [f"{day},u{n % 9},{n % 2}" for day in ("10/09/2017", "11/07/2017", "12/01/2017") for n in range(50)]
    Path("us.csv").write_text("\n".join(["day,user_id,clicked", *days]) + "\n")
    said = refused("train", "us.csv", "--out", "run")
    assert said.startswith(
        "the dates of column day, such as '10/09/2017', can be read in two ways: format = \"%m/%d/%Y\""
    )
    assert not Path("us-data").exists()
    with pytest.raises(SchemaError, match=r"two ways: .*%d/%m/%Y.*stoker init"):
        stoker.prepare("auto", "us.csv")
    Path("us.csv").write_text("\n".join(["day,user_id,clicked", *days, "12/13/2017,u1,0"]) + "\n")
    with pytest.warns(UserWarning, match="'time' leaves no valid rows"):
        assert len(stoker.prepare("auto", "us.csv").test) == 51


def test_doubts_of_a_draft_are_said(folder: Path) -> None:
    Path("odd.csv").write_text("".join(f"{i % 2},x{i % 9},{i % 3}\n" for i in range(300)))  # no header
    with pytest.warns(UserWarning, match="has 2 doubts: stoker init"):
        stoker.prepare("auto", "odd.csv", out="odd")
    assert call("prepare", "auto", "odd.csv", "--out", "other").output.count("unsure: ") == 2


@pytest.mark.slow
def test_keep_wants_raw_rows(folder: Path) -> None:
    assert call(*TRAIN).exit_code == 0
    assert "stoker prepare --keep" in refused("predict", "run", "--keep", "user_id", "--out", "scores.parquet")
