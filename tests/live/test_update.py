"""Updates with new rows: scored first, trained on once, in order; each log once; only what changed is written."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import hashlib
import json
import math
import os
import shutil
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from days import day, first_run, schema, write_days

import stoker
from stoker.base.errors import CheckpointError, ConfigError, DataError, StokerError
from stoker.base.files import EDGE, seal
from stoker.cli import main
from stoker.live import journal
from stoker.live.journal import _trained, opened
from stoker.live.watch import watch
from stoker.prep.parse.sources import text_edges
from stoker.prep.source_format import SourceFormat
from stoker.serve import scorer as scorer_module
from stoker.training.files import checkpoint, loading
from stoker.training.files.rundir import RunDirectory, find_checkpoint
from stoker.training.files.segments import join
from stoker.training.replica import Replica


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_days(folder / "logs", 4)
    first_run(folder)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy of a run on day 0, its dataset and the logs of four days."""
    shutil.copytree(made, tmp_path / "p")
    config = json.loads((tmp_path / "p/run/config.json").read_text())
    (tmp_path / "p/run/config.json").write_text(json.dumps(seal({**config, "dataset": str(tmp_path / "p/data")})))
    return tmp_path / "p"


def digest(model: Any) -> str:
    """SHA-256 of all rows, with their state, and of the dense part."""
    found = hashlib.sha256()
    for table in model.tables:
        for _, rows in model.embeddings.read(table.name):
            for tensor in rows.tensors:
                found.update(tensor.detach().contiguous().numpy().tobytes())
    for _, tensor in model.dense_tensors():
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def logs(place: Path, *days: int) -> list[Path]:
    return [place / "logs" / f"day_{number}.csv" for number in days]


def contents(run: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file() and p.name != ".lock"
    }


def without_manifest(checkpoint: Path) -> dict[str, bytes]:
    return {name: value for name, value in contents(checkpoint).items() if name != "manifest.json"}


@pytest.mark.slow
def test_an_update_scores_first_then_trains(place: Path) -> None:
    run = place / "run"
    old = stoker.load(run).model
    day_1 = stoker.prepare(files=place / "logs/day_1.csv", like=place / "data", out=place / "day-1")
    expected = stoker.evaluate(old, day_1.test)
    result = stoker.update(run, logs(place, 1))
    assert result.before == expected
    assert (result.number, result.rows, result.step) == (1, 300, stoker.load(place / "run").step)
    new = stoker.load(run)
    assert find_checkpoint(run) == result.checkpoint == run / "checkpoints/update_000001"
    assert new.step == checkpoint.chain(result.checkpoint)[0].manifest["step"] + 5
    assert stoker.evaluate(new.model, day_1.test)["log_loss"] < expected["log_loss"]
    [line] = [json.loads(text) for text in (run / "updates.jsonl").read_text().splitlines()]
    assert (line["rows"], line["before"], line["logs"][0]["name"]) == (300, expected, "day_1.csv")
    assert result.bytes == sum(len(value) for value in without_manifest(result.checkpoint).values())


def test_each_stage_of_an_update_has_its_own_progress(place: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    found = stoker.update(
        place / "run", place / "logs/day_1.csv",
        progress=lambda what, done, total: seen.setdefault(what, []).append((done, total)),
    )  # fmt: skip
    assert seen["scoring new rows"][-1] == (found.rows, found.rows)
    assert {"new rows: reading", "new rows: counting", "new rows: writing"} <= seen.keys()
    assert all(len({total for _, total in steps}) == 1 for steps in seen.values()), "a bar of one unit"
    seen.clear()
    stoker.update(
        place / "run", place / "logs/day_1.csv", progress=lambda *stage: seen.setdefault("all", []).append(stage)
    )
    assert seen["all"][-1][1:] == (1, 1), "or a watch would show it until there are new rows"


@pytest.mark.slow
def test_it_is_a_pass_over_the_rows_in_their_order(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as a loop of one's own, and steps that go on, by which dropout draws what it drops."""
    run, steps, step = place / "run", list[int](), Replica.step
    base = find_checkpoint(run)
    monkeypatch.setattr(Replica, "step", lambda own, batch: [steps.append(batch.step), step(own, batch)][1])
    data = stoker.prepare(files=place / "logs/day_1.csv", like=place / "data", out=place / "day-1")
    model = stoker.load(base, backend="reference").model
    dense = torch.optim.Adam(model.dense_parameters(), lr=1e-3, fused=True)
    stoker.load(base, model, dense)
    model.embeddings.step_each_backward()
    for batch in data.test.batches(64):
        model.loss(batch).backward()
        dense.step()
        dense.zero_grad()
    result = stoker.update(run, logs(place, 1), keep_ids=True)
    assert steps == list(range(stoker.load(base).step, result.step))
    found = stoker.load(result.checkpoint).model
    for (name, one), (_, other) in zip(model.dense_tensors(), found.dense_tensors(), strict=True):
        assert torch.equal(one, other), name
    for table in model.tables:
        assert torch.equal(model.embeddings.rows(table.name), found.embeddings.rows(table.name))


@pytest.mark.slow
def test_window_features_go_on_from_day_to_day(place: Path) -> None:
    run = place / "run"
    for number in (1, 2, 3):
        stoker.update(run, logs(place, number))
    together = pl.concat([pl.read_csv(path) for path in logs(place, 0, 1, 2, 3)])
    together.write_csv(place / "all.csv")
    schema = stoker.Dataset(place / "data").manifest["schema"]
    whole = stoker.prepare(
        stoker.Schema.from_dict(schema), place / "all.csv", out=place / "all", split="time:0.25,0.25"
    )
    # A window count is the only column that depends on rows before; its fitted scale differs.
    own = stoker.Dataset(run / "updates/000003").test
    columns = [column["name"] for column in schema["dense"]]
    at = columns.index("seen")
    ours = torch.cat([batch.dense[:, at].clone() for batch in own.batches(64)])
    theirs = torch.cat([batch.dense[:, at].clone() for batch in whole.test.batches(64)])[-300:]
    assert np.corrcoef(ours, theirs)[0, 1] > 0.99999


@pytest.mark.slow
def test_the_window_state_of_another_day_or_dataset_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, words = place / "run", "has the state of window features of other rows"
    stoker.prepare(files=logs(place, 1), like=place / "data", out=place / "other")
    with pytest.raises(ConfigError, match=f"other {words}"):
        stoker.update(run, logs(place, 2), data=place / "other")
    for number in (1, 2):
        stoker.update(run, logs(place, number), keep_ids=True)
    shutil.rmtree(run / "updates/000002")
    shutil.copytree(run / "updates/000001", run / "updates/000002")  # whole, and of the same vocabulary
    before = contents(run / "checkpoints")
    with pytest.raises(ConfigError, match=f"000002 {words}"):
        stoker.update(run, logs(place, 3))
    with pytest.raises(ConfigError, match=words):
        stoker.Scorer(run)
    with pytest.raises(ConfigError, match=words):
        stoker.export(run, place / "served")
    with pytest.raises(SystemExit):
        main(["predict", str(run), "--data", str(logs(place, 3)[0]), "--out", str(place / "scores.csv")])
    assert words in " ".join(capsys.readouterr().err.split())
    assert contents(run / "checkpoints") == before
    other = stoker.Scorer(stoker.load(run).model, run / "updates/000002")  # on purpose
    assert len(other.score(day(3).drop("click"))) == 300


@pytest.mark.slow
def test_the_first_dataset_does_not_stand_for_that_of_an_update(place: Path) -> None:
    """It lacks the ids that the update brought, which would have the scores of unknown ones."""
    run = place / "run"
    stoker.update(run, logs(place, 1))
    shutil.rmtree(run / "updates/000001")
    with pytest.raises(ConfigError, match="does not fit the model: its num embeddings"):
        stoker.Scorer(run, data=place / "data")
    with pytest.raises(ConfigError, match="does not fit the model: its num embeddings"):
        stoker.export(run, place / "served", data=place / "data")


@pytest.mark.slow
def test_one_update_with_two_logs_is_one_pass(place: Path) -> None:
    found = stoker.update(place / "run", logs(place, 1, 2))
    assert (found.number, found.rows) == (1, 600)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [{"device_memory": "1KiB"}, {"device_memory": "1KiB", "host_memory": "1KiB"}])
def test_any_placement_writes_the_same_files(place: Path, placement: dict[str, Any]) -> None:
    shutil.copytree(place, place.with_name("other"))
    other = place.with_name("other")
    for number in (1, 2):
        stoker.update(place / "run", logs(place, number))
        stoker.update(other / "run", logs(other, number), data=other / "data", **placement)
    for name in ("update_000001", "update_000002"):
        assert contents(place / "run/checkpoints" / name) == contents(other / "run/checkpoints" / name)


@pytest.mark.slow
def test_a_log_is_used_once(place: Path) -> None:
    run = place / "run"
    stoker.update(run, logs(place, 1))
    before = contents(run)
    again = stoker.update(run, logs(place, 1))
    assert (again.rows, again.number, again.notes) == (
        0,
        1,
        [f"{place}/logs/day_1.csv was used by update 1: it is left out"],
    )
    assert contents(run) == before
    shutil.copy(place / "logs/day_1.csv", place / "renamed.csv")
    found = stoker.update(run, [place / "renamed.csv", *logs(place, 2)])
    assert found.rows == 300
    assert found.notes == [f"{place}/renamed.csv was used by update 1 as day_1.csv: it is left out"]
    shutil.copy(place / "logs/day_3.csv", place / "copy.csv")
    found = stoker.update(run, [*logs(place, 3), place / "copy.csv"])
    assert found.rows == 300
    assert "same contents" in found.notes[0]


@pytest.mark.slow
def test_a_log_that_grew_is_refused(place: Path) -> None:
    today = place / "today.csv"
    day(1).write_csv(today)
    stoker.update(place / "run", today)
    with today.open("a") as file:
        file.write(day(2).write_csv(include_header=False))
    with pytest.raises(DataError, match=r"today.csv begins with [\d,]+ bytes on which the run was trained"):
        stoker.update(place / "run", today)
    day(2).write_csv(today)  # another day under the same name
    assert stoker.update(place / "run", today).rows == 300


@pytest.mark.slow
def test_a_log_of_the_dataset_of_the_run_is_left_out(place: Path) -> None:
    run, [base] = place / "run", logs(place, 0)
    shutil.copy(base, place / "renamed.csv")
    found = stoker.update(run, [place / "renamed.csv", *logs(place, 1)])
    assert found.rows == 300
    said = f"{place}/renamed.csv is a log of the dataset that the run was trained on: it is left out"
    assert found.notes[0].startswith(said)
    assert stoker.update(run, base).rows == 0
    (place / "grown.csv").write_text(logs(place, 1)[0].read_text() + day(2).write_csv(include_header=False))
    with pytest.raises(DataError, match=r"grown\.csv begins with"):  # whatever its name
        stoker.update(run, place / "grown.csv")
    with base.open("a") as file:
        file.write(day(2).write_csv(include_header=False))
    with pytest.raises(DataError, match=r"day_0.csv begins with [\d,]+ bytes on which the run was trained"):
        stoker.update(run, base)
    shutil.rmtree(place / "data")  # only the last update is needed to go on
    assert stoker.update(run, logs(place, 2)).rows == 300
    assert "was used by update 2" in stoker.update(run, logs(place, 2)).notes[0]


@pytest.mark.slow
def test_a_log_that_is_compressed_later_is_left_out(place: Path) -> None:
    """As tools that rotate logs do; likewise one that is unpacked, and one of the dataset of the run."""
    run, packed = place / "run", place / "packed"
    packed.mkdir()
    for path in logs(place, 0, 1, 2):
        (packed / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    found = stoker.update(run, [packed / "day_0.csv.gz", *logs(place, 1), packed / "day_1.csv.gz"])
    assert (found.number, found.rows) == (1, 300)
    assert "day_0.csv.gz is a log of the dataset that the run was trained on" in found.notes[0]
    assert "day_1.csv.gz has the same contents as another of these logs" in found.notes[1]
    found = stoker.update(run, packed / "day_1.csv.gz")
    assert (found.rows, found.notes) == (
        0, [f"{packed}/day_1.csv.gz was used by update 1 as day_1.csv: it is left out"],
    )  # fmt: skip
    assert stoker.update(run, packed / "day_2.csv.gz").number == 2
    assert "was used by update 2 as day_2.csv.gz" in stoker.update(run, logs(place, 2)).notes[0]
    for number in (0, 1):
        grown = logs(place, number)[0].read_bytes() + day(3).write_csv(include_header=False).encode()
        (packed / f"day_{number}.csv.gz").write_bytes(gzip.compress(grown))
        with pytest.raises(DataError, match=rf"day_{number}.csv.gz begins with [\d,]+ bytes on which the run was"):
            stoker.update(run, packed / f"day_{number}.csv.gz")
    grown = logs(place, 2)[0].read_bytes() + day(3).write_csv(include_header=False).encode()
    (packed / "day_2.csv").write_bytes(grown)  # used when it was compressed
    (packed / "day_2.csv.gz").write_bytes(gzip.compress(grown))
    for name in ("day_2.csv", "day_2.csv.gz"):
        with pytest.raises(DataError, match=rf"{name} begins with [\d,]+ bytes on which the run was"):
            stoker.update(run, packed / name)


@pytest.mark.slow
def test_a_dataset_of_compressed_logs_knows_them_unpacked(tmp_path: Path) -> None:
    write_days(tmp_path / "logs", 1)
    [log] = logs(tmp_path, 0)
    (tmp_path / "logs/day_0.csv.gz").write_bytes(gzip.compress(log.read_bytes()))
    with pytest.raises(DataError, match=r"day_0.csv.gz is .*day_0.csv, compressed: its rows would count twice"):
        stoker.prepare(schema(tmp_path), sorted((tmp_path / "logs").glob("day_0*")), out=tmp_path / "data")
    text = log.read_bytes()
    header = text.index(b"\n") + 1
    quiet = [tmp_path / "1/quiet.csv", tmp_path / "2/quiet.csv.gz"]
    for path, content in zip(quiet, (text[:header], gzip.compress(text[:header])), strict=True):
        path.parent.mkdir()
        path.write_bytes(content)
    stoker.prepare(schema(tmp_path), [log, *quiet], out=tmp_path / "with quiet hours")
    log.unlink()
    (tmp_path / "logs/day_0.csv.gz").rename(log)  # its bytes say that it is compressed
    first_run(tmp_path)
    log.rename(tmp_path / "logs/day_0.csv.gz")
    log.write_bytes(text)
    run = tmp_path / "run"
    assert "is a log of the dataset" in stoker.update(run, log).notes[0]
    grown = text + day(3).write_csv(include_header=False).encode()
    log.write_bytes(grown)
    with pytest.raises(DataError, match=rf"day_0.csv begins with {len(text):,} bytes on which the run was trained"):
        stoker.update(run, log)
    (tmp_path / "logs/day_0.csv.gz").write_bytes(gzip.compress(grown))
    with pytest.raises(DataError, match=rf"day_0.csv.gz begins with {len(text):,} bytes"):
        stoker.update(run, tmp_path / "logs/day_0.csv.gz")


def test_a_long_compressed_log_is_known_by_both_ends(tmp_path: Path) -> None:
    """Of logs of one name that begin alike, only one that also ends alike, or has grown, has the rows."""
    text = b"time,item\n" + b"1,2\n" * EDGE
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(text))
    entry = {"file": path.name, "bytes": path.stat().st_size, "head": "", "tail": "", "rows": EDGE}
    base = {"sources": [entry | {"text": text_edges(path)}]}
    for name in ("log.csv", "log.csv.gz"):
        for other, known in ((text, True), (text + b"1,3\n", True), (text[:-4] + b"1,3\n", False)):
            (tmp_path / name).write_bytes(gzip.compress(other) if name.endswith(".gz") else other)
            size = (tmp_path / name).stat().st_size
            expected = [size if other == text else len(text)] if known else []
            assert _trained(tmp_path / name, size, len(other), base) == expected


@pytest.mark.slow
def test_logs_of_one_row_are_no_beginnings_of_others(place: Path) -> None:
    """But for a log of the same name, which has grown. Two quiet hours may have equal rows."""
    text = day(1).write_csv().encode()
    ends = [at + 1 for at, byte in enumerate(text) if byte == ord("\n")]
    for number, end in enumerate([*ends[1:3], len(text)]):
        (place / f"{number}h.csv").write_bytes(text[:end])
    run = place / "run"
    assert stoker.update(run, place / "0h.csv").rows == 1
    (place / "renamed.csv").write_bytes(text[: ends[1]])
    assert "was used by update 1 as 0h.csv" in stoker.update(run, place / "renamed.csv").notes[0]
    assert stoker.update(run, place / "1h.csv").rows == 2
    with pytest.raises(DataError, match=r"2h\.csv begins with"):  # two rows are a log
        stoker.update(run, place / "2h.csv")
    (place / "0h.csv").write_bytes(text)
    with pytest.raises(DataError, match=r"0h\.csv begins with"):
        stoker.update(run, place / "0h.csv")


@pytest.mark.slow
def test_files_about_users_and_items_go_with_each_update(tmp_path: Path) -> None:
    stoker.synthetic.write("movielens", 900, tmp_path / "log")
    about = [tmp_path / "log/users.dat", tmp_path / "log/movies.dat"]
    lines = (tmp_path / "log/ratings.dat").read_text().splitlines(keepends=True)
    days = [tmp_path / name / "ratings.dat" for name in ("monday", "tuesday", "wednesday")]
    for number, path in enumerate(days):
        path.parent.mkdir()
        path.write_text("".join(lines[300 * number :][:300]))
    data = stoker.prepare("movielens", [days[0], *about], out=tmp_path / "data")
    run = tmp_path / "run"
    stoker.train(data, out=run, embedding_dim=4, batch_size=64, steps=5, display="quiet").model.embeddings.close()
    for number, path in enumerate(days[1:], 1):
        found = stoker.update(run, [path, *about], keep_ids=True)
        assert (found.number, found.notes) == (number, [])
        like = stoker.prepare(files=[path, *about], like=data.path, out=tmp_path / f"like-{number}").test
        own = stoker.Dataset(run / "updates" / f"{number:06d}").test
        for one, other in zip(own.batches(64), like.batches(64), strict=True):
            assert one.ids.tolist() == other.ids.tolist()
    assert stoker.update(run, [days[2], *about]).rows == 0
    with pytest.raises(DataError, match=r"was prepared with a users file, users\.dat, .* Give such a file too"):
        stoker.prepare(files=days[2], like=data.path)


@pytest.mark.slow
def test_a_held_out_log_of_the_dataset_may_be_trained_on(tmp_path: Path) -> None:
    [base] = write_days(tmp_path / "logs", 0)
    plain = schema(tmp_path).to_dict() | {"feature": [], "dense": [{"name": "price"}]}
    first_run(tmp_path, stoker.Schema.from_dict(plain))
    assert stoker.update(tmp_path / "run", base).rows == 0
    assert stoker.update(tmp_path / "run", base, held_out=True).rows == 900


@pytest.mark.slow
def test_a_day_that_comes_too_late_is_noted(tmp_path: Path) -> None:
    write_days(tmp_path / "logs", 2)
    plain = schema(tmp_path).to_dict() | {"feature": [], "dense": [{"name": "price"}]}
    first_run(tmp_path, stoker.Schema.from_dict(plain))
    assert not stoker.update(tmp_path / "run", logs(tmp_path, 2)).notes
    [note] = stoker.update(tmp_path / "run", logs(tmp_path, 1)).notes
    assert "begin at 1" in note
    assert "before the last row that the model has seen, of 29" in note


def test_another_dataset_than_that_of_the_run_is_refused(place: Path) -> None:
    before = contents(place / "run")
    other = stoker.prepare(schema(place), place / "logs/day_1.csv", out=place / "other")
    with pytest.raises(ConfigError, match="another"):
        stoker.update(place / "run", logs(place, 2), data=other)
    assert {name: value for name, value in contents(place / "run").items() if name in before} == before


def test_rows_of_the_last_moment_are_not_late(place: Path) -> None:
    last = day(0, 900)["when"].max()
    day(1).with_columns(pl.lit(last).alias("when")).write_csv(place / "now.csv")
    assert stoker.update(place / "run", place / "now.csv").notes == []


@pytest.mark.slow
def test_rows_to_predict_go_on_from_the_last_update(place: Path) -> None:
    stoker.update(place / "run", logs(place, 1))
    out = place / "scores.parquet"
    with pytest.raises(SystemExit) as ended:
        main(["predict", str(place / "run"), "--data", str(place / "logs/day_2.csv"), "--out", str(out)])
    assert not ended.value.code
    result = stoker.update(place / "run", logs(place, 2))
    scores = pl.read_parquet(out)
    metrics = stoker.training.StreamingMetrics()
    metrics.update(torch.logit(torch.from_numpy(scores["score"].to_numpy().copy()).double()).float(),
                   torch.from_numpy(scores["label"].to_numpy().copy()))  # fmt: skip
    assert metrics.compute()["auc"] == pytest.approx(result.before["auc"], abs=1e-4)


@pytest.mark.slow
def test_new_ids_get_rows_that_are_copies_of_row_0(place: Path) -> None:
    run = place / "run"
    old = stoker.load(run).model
    known = old.embeddings.rows("item")
    follower, fixed = stoker.Follower(run), stoker.Follower(run, old)
    found = stoker.update(run, logs(place, 3), rate=0.0)
    new = stoker.load(run).model
    rows = new.embeddings.rows("item")
    for (_, one), (_, other) in zip(old.dense_tensors(), new.dense_tensors(), strict=True):
        assert torch.equal(one, other)
    assert len(rows) > len(known)
    assert torch.equal(rows[: len(known)], known), "nothing was learned at a rate of 0"
    assert torch.equal(rows[len(known) :], known[:1].expand(len(rows) - len(known), -1))
    values = pl.read_parquet(run / "updates/000001/vocab/item.parquet")["value"]
    before = pl.read_parquet(place / "data/vocab/item.parquet")["value"]
    assert values[: len(before)].equals(before)
    day_3 = set(day(3)["item"]) - set(before)
    assert set(values[len(before) :]) == day_3
    data = stoker.prepare(files=place / "logs/day_3.csv", like=place / "data", out=place / "fixed")
    assert found.before == stoker.evaluate(old, data.test), "scores are those with row 0"
    assert follower.poll()
    assert torch.equal(follower.model.embeddings.rows("item"), rows)
    with pytest.raises(CheckpointError, match="other numbers of rows"):
        fixed.poll()
    stoker.update(run, logs(place, 4))
    assert follower.poll()
    assert torch.equal(follower.model.embeddings.rows("item"), stoker.load(run).model.embeddings.rows("item"))
    stoker.rollback(run, 0)
    assert follower.poll()
    assert torch.equal(follower.model.embeddings.rows("item"), known)


@pytest.mark.slow
def test_an_updated_run_scores_its_own_dataset(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place / "run"
    for number in (1, 2):
        stoker.update(run, logs(place, number))
    for data in ([], ["--data", str(run / "updates/000002")], ["--device-memory", "8KiB"]):
        with pytest.raises(SystemExit) as ended:
            main(["evaluate", str(run), *data])
        assert not ended.value.code, capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(run), "--data", str(run / "updates/000001")])
    assert ended.value.code == 2, "neither the first dataset nor the last"
    capsys.readouterr()
    for data, noted in ((run / "updates/000002", False), (place / "data", True)):
        with pytest.raises(SystemExit):
            main(["evaluate", str(run), "--data", str(data)])
        assert ("lacks the ids that updates of the run have added" in capsys.readouterr().err) is noted


def test_tables_in_memory(place: Path) -> None:
    assert stoker.update(place / "run", day(1)).rows == 300
    assert stoker.update(place / "run", day(1)).rows == 0


def test_unknown_ids_share_row_0_if_no_rows_are_to_be_added(place: Path) -> None:
    strange = day(1).with_columns(item=pl.lit("never seen"))
    stoker.update(place / "run", strange, keep_ids=True)
    path = find_checkpoint(place / "run")
    [entry] = [each for each in checkpoint.read_manifest(path)["tables"] if each["name"] == "item"]
    assert [(piece["rows"], piece["first"]) for piece in entry["changed"]] == [(1, 0)]


@pytest.mark.slow
def test_rows_without_a_label_are_refused_and_leave_nothing(place: Path) -> None:
    before = contents(place / "run")
    with pytest.raises(DataError, match="300 rows of 300 have no label"):
        stoker.update(place / "run", day(1).drop("click"))
    stoker.update(place / "run", logs(place, 1))
    changed = {name for name, value in contents(place / "run").items() if before.get(name) != value}
    assert not [name for name in changed if not name.startswith(("updates", "checkpoints/update_000001", "head.json"))]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_changes_nothing(place: Path) -> None:
    base = find_checkpoint(place / "run")
    with pytest.raises(StokerError, match="no longer finite"):
        stoker.update(place / "run", logs(place, 1), rate=1e30)
    assert find_checkpoint(place / "run") == base
    assert stoker.update(place / "run", logs(place, 1)).number == 1


def test_runs_that_cannot_be_updated(place: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        stoker.update(place / "run", place / "nothing.csv")
    (place / "run/report.json").unlink()
    with pytest.raises(ConfigError, match=r"has not ended.*stoker train --resume"):
        stoker.update(place / "run", logs(place, 1))
    with pytest.raises(ConfigError, match="not a run"):
        stoker.update(place / "data", logs(place, 1))


@pytest.mark.slow
def test_training_does_not_resume_an_updated_run(place: Path) -> None:
    stoker.update(place / "run", logs(place, 1))
    with pytest.raises(ConfigError, match=r"was updated with newer rows.*rollback"):
        stoker.train(resume=place / "run", epochs=2)
    stoker.rollback(place / "run", 0)
    stoker.train(resume=place / "run", epochs=2, display="quiet")


@pytest.mark.slow
def test_rollback_and_the_same_day_again(place: Path) -> None:
    run = place / "run"
    for number in (1, 2):
        stoker.update(run, logs(place, number))
    before = contents(run)
    first = stoker.load(run / "checkpoints/update_000001").model.embeddings.rows("item")
    assert stoker.rollback(run).name == "update_000001"
    assert torch.equal(stoker.load(run).model.embeddings.rows("item"), first)
    assert stoker.update(run, logs(place, 2)).number == 2, "its log may be used again"
    assert contents(run) == before
    assert stoker.rollback(run, 0) == checkpoint.chain(run / "checkpoints/update_000001")[0].path
    assert stoker.update(run, logs(place, 1)).number == 1
    with pytest.raises(ConfigError, match="is at update 1, so it cannot go back to update 7"):
        stoker.rollback(run, 7)
    stoker.rollback(run)
    with pytest.raises(ConfigError, match="was not updated"):
        stoker.rollback(run)


@pytest.mark.slow
def test_a_roll_back_goes_to_a_whole_model_of_the_past_alone(place: Path) -> None:
    run = place / "run"
    for number in (1, 2):
        stoker.update(run, logs(place, number))
    with pytest.raises(ConfigError, match="is at update 2, so it cannot go back to update 3"):
        stoker.rollback(run, 3)
    file = min((run / "checkpoints/update_000001/tables").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="it was cut short or altered"):
        stoker.rollback(run, 1)
    assert find_checkpoint(run).name == "update_000002"


@pytest.mark.slow
def test_an_update_that_was_exchanged_is_named(place: Path) -> None:
    """Both were written after one model, so the chain of either is whole; ``head.json`` says which one counts."""
    run, segment, others = place / "run", place / "run/checkpoints/update_000001", place / "others"
    stoker.update(run, logs(place, 2))
    shutil.copytree(segment, others)
    stoker.rollback(run)
    stoker.update(run, logs(place, 1))
    follower, wanted = stoker.Follower(run), contents(segment)
    segment.rename(place / "right")
    others.rename(segment)
    for work in (follower.poll, lambda: stoker.Scorer(run), lambda: stoker.compact(run),
                 lambda: stoker.update(run, logs(place, 3)), lambda: stoker.export(run, place / "out")):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"update_000001 is another checkpoint than the one that .*rollback"):
            work()
    segment.rename(others)
    (place / "right").rename(segment)
    assert not follower.poll()
    assert contents(segment) == wanted
    others.rename(segment.with_name("update_000001.other"))
    assert join(segment) == 1
    assert find_checkpoint(run) == segment, "joined by a compaction that was killed before it wrote head.json"
    shutil.rmtree(segment)
    segment.with_name("update_000001.other").rename(segment)
    assert stoker.rollback(run, 0).name.startswith("step_")
    assert stoker.load(run).step < stoker.update(run, logs(place, 1)).step


@pytest.mark.slow
def test_a_head_that_is_replaced_while_it_is_followed_is_read_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read = place / "run", RunDirectory.head
    stoker.update(run, logs(place, 1))

    def late(self: RunDirectory) -> Any:
        """Return the head, after which another update gets the name of the one that it names."""
        found = read(self)
        monkeypatch.setattr(RunDirectory, "head", read)
        stoker.rollback(run)
        stoker.update(run, logs(place, 2))
        return found

    monkeypatch.setattr(RunDirectory, "head", late)
    assert find_checkpoint(run).name == "update_000001"
    lines = [json.loads(text) for text in (run / "updates.jsonl").read_text().splitlines()]
    assert [each["logs"][0]["name"] for each in lines] == ["day_2.csv"], "it was replaced"


@pytest.mark.slow
def test_lines_of_updates_that_were_taken_back_are_gone(place: Path) -> None:
    run = place / "run"
    for number in (1, 2, 3):
        stoker.update(run, logs(place, number))
    stoker.rollback(run, 1)
    stoker.update(run, logs(place, 3))
    lines = [json.loads(text) for text in (run / "updates.jsonl").read_text().splitlines()]
    assert [(each["number"], each["logs"][0]["name"]) for each in lines] == [(1, "day_1.csv"), (2, "day_3.csv")]


@pytest.mark.slow
def test_compacting_changes_no_number(place: Path) -> None:
    shutil.copytree(place, place.with_name("other"))
    run, other = place / "run", place.with_name("other") / "run"
    for each in (run, other):
        for number in (1, 2):
            stoker.update(each, logs(place, number), data=place / "data")
    found = stoker.compact(run)
    assert (found.joined, found.checkpoint.name) == (2, "update_000002")
    more = dataclasses.replace(found, freed=-2048)
    assert more.summary().endswith("update_000002 is whole now, 2 segments joined, 2.0 KiB more than before")
    assert find_checkpoint(run) == found.checkpoint
    assert [path.name for path in sorted((run / "updates").iterdir())] == ["000002"]
    assert stoker.compact(run).joined == 0
    with pytest.raises(CheckpointError, match=r"update_000001 is missing: it was joined to a later update"):
        stoker.rollback(run, 1)
    for each in (run, other):
        stoker.update(each, logs(place, 3))
        join(each / "checkpoints/update_000003")
    one, two = (without_manifest(each / "checkpoints/update_000003") for each in (run, other))
    assert one == two
    assert (run / "updates.jsonl").read_bytes() == (other / "updates.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["update_000001", "000001"])
def test_updates_that_a_full_disk_keeps_are_deleted_by_the_next_compaction(
    place: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = place / "run"
    for number in (1, 2):
        stoker.update(run, logs(place, number), data=place / "data")
    before = stoker.load(run).model.embeddings.rows("user")

    def failing(real: Any) -> Any:
        def call(path: Any, *given: Any, **more: Any) -> Any:
            if Path(path).name == what:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(path, *given, **more)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing(os.replace))
        patch.setattr(shutil, "rmtree", failing(shutil.rmtree))
        with pytest.raises(
            CheckpointError, match=r"is whole, but the updates before .* \(No space left .* again: that del"
        ):
            stoker.compact(run)
    assert torch.equal(stoker.load(run).model.embeddings.rows("user"), before)
    assert stoker.compact(run).joined == 0
    assert [path.name for path in sorted((run / "updates").iterdir())] == ["000002"]
    assert [path.name for path in (run / "checkpoints").glob("update_*")] == ["update_000002"]
    assert torch.equal(stoker.load(run).model.embeddings.rows("user"), before)


@pytest.mark.slow
def test_compacting_some_updates_leaves_the_later_ones(place: Path) -> None:
    run = place / "run"
    for number in (1, 2, 3):
        stoker.update(run, logs(place, number), save_every=2 if number == 2 else None)
    before = stoker.load(run).model.embeddings.rows("user")
    (run / "updates/000004.new").mkdir()  # of a preparation that was killed
    found = stoker.compact(run, 2)
    assert found.joined == 4, "with the segments within update 2, which are deleted"
    assert sorted(path.name for path in found.checkpoint.parent.glob("update_*")) == ["update_000002", "update_000003"]
    assert len(checkpoint.chain(find_checkpoint(run))) == 2
    assert torch.equal(stoker.load(run).model.embeddings.rows("user"), before)
    assert stoker.rollback(run).name == "update_000002"


@pytest.mark.slow
def test_a_follower_has_the_model_of_the_run(place: Path) -> None:
    run = place / "run"
    follower = stoker.Follower(run)
    placed = stoker.Follower(run, placement=stoker.Cached(slots=30))

    def check(number: int) -> None:
        truth = stoker.load(run).model
        for each in (follower, placed):
            assert each.version.number == number
            for table in truth.tables:
                assert torch.equal(each.model.embeddings.rows(table.name), truth.embeddings.rows(table.name))
            for (name, one), (_, two) in zip(each.model.dense_tensors(), truth.dense_tensors(), strict=True):
                assert torch.equal(one, two), name

    assert not follower.poll()
    for number in (1, 2):
        stoker.update(run, logs(place, number))
        assert follower.poll()
        assert placed.poll()
        check(number)
    stoker.rollback(run, 0)
    assert follower.poll()
    assert placed.poll()
    check(0)
    stoker.update(run, logs(place, 3))
    assert follower.poll()
    assert placed.poll()
    check(1)
    stoker.compact(run)
    assert not follower.poll(), "the same model"
    assert follower.version.manifest == checkpoint.hash_manifest(find_checkpoint(run))
    stoker.update(run, logs(place, 4))
    assert follower.poll()
    assert placed.poll()
    check(2)


@pytest.mark.slow
def test_a_follower_goes_back_row_by_row(place: Path) -> None:
    """Where no table became larger, for which the model would be loaded anew."""
    run = place / "run"
    stoker.update(run, logs(place, 1), keep_ids=True)
    follower = stoker.Follower(run)
    model, before = follower.model, digest(follower.model)
    stoker.update(run, logs(place, 2), keep_ids=True)
    file = min((run / "checkpoints/update_000002/tables").iterdir())
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged"):
        follower.poll()
    assert digest(model) == before
    file.write_bytes(whole)
    assert follower.poll()
    assert digest(model) == digest(stoker.load(run).model) != before
    stoker.rollback(run)
    assert follower.poll()
    assert follower.model is model
    assert digest(model) == before


def test_a_follower_keeps_its_model_if_an_update_is_damaged(place: Path) -> None:
    follower = stoker.Follower(place / "run")
    before = follower.model.embeddings.rows("item")
    path = stoker.update(place / "run", logs(place, 1)).checkpoint
    victim = sorted((path / "tables").iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="was cut short or altered"):
        follower.poll()
    assert torch.equal(follower.model.embeddings.rows("item"), before)
    assert follower.version.number == 0


@pytest.mark.slow
def test_segments_within_an_update_give_the_same_model(place: Path) -> None:
    shutil.copytree(place, place.with_name("other"))
    other = place.with_name("other") / "run"
    whole = stoker.update(place / "run", logs(place, 1))
    parts = stoker.update(other, logs(place, 1), save_every=2, data=place / "data")
    assert len(checkpoint.chain(parts.checkpoint)) == 4
    for path in (whole.checkpoint, parts.checkpoint):
        join(path)
    one, two = contents(whole.checkpoint), contents(parts.checkpoint)
    assert {n: v for n, v in one.items() if n != "manifest.json"} == {
        n: v for n, v in two.items() if n != "manifest.json"
    }


def stopped(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run whose first update was stopped after it wrote a segment of its own."""
    kept: list[Path] = []

    def save(*given: Any, **settings: Any) -> Path:
        if kept:
            raise KeyboardInterrupt
        kept.append(own(*given, **settings))
        return kept[0]

    with monkeypatch.context() as patch:
        own = checkpoint.save
        patch.setattr(checkpoint, "save", save)
        with pytest.raises(KeyboardInterrupt, match="the run is as before"):
            stoker.update(place / "run", logs(place, 1), save_every=2)
    assert kept[0].name.startswith("update_000001_")
    return place / "run"


@pytest.mark.slow
def test_a_stopped_update_goes_on_from_its_segment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the rows of new ids that no step has reached yet."""
    shutil.copytree(place, place.with_name("other"))
    other = place.with_name("other") / "run"
    run = stopped(place, monkeypatch)
    found = stoker.update(run, logs(place, 1), save_every=2)
    expected = stoker.update(other, logs(place, 1), save_every=2, data=place / "data")
    assert (found.rows, found.loss) == (300, expected.loss)
    assert contents(run / "checkpoints") == contents(other / "checkpoints")


@pytest.mark.slow
def test_another_update_takes_nothing_of_a_stopped_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(place, place.with_name("other"))
    other = place.with_name("other") / "run"
    run = stopped(place, monkeypatch)
    for each in (run, other):
        assert stoker.update(each, logs(place, 2), data=place / "data").number == 1
    assert contents(run / "checkpoints") == contents(other / "checkpoints")


@pytest.mark.slow
def test_a_directory_is_watched(place: Path) -> None:
    incoming = place / "incoming"
    incoming.mkdir()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            (incoming / "day_1.csv.part").write_bytes((place / "logs/day_1.csv").read_bytes())
            (incoming / ".hidden").write_text("x")
        elif len(slept) == 2:
            assert not (place / "run/head.json").exists(), "not while it is written"
            (incoming / "day_1.csv.part").rename(incoming / "day_1.csv")
        elif len(slept) == 3:
            assert not (place / "run/head.json").exists(), "not before it has stayed the same"
        elif len(slept) == 5:
            for number in (2, 3):
                shutil.copy(place / f"logs/day_{number}.csv", incoming / f"day_{number}.csv")
        assert len(slept) < 12

    results = watch(place / "run", incoming, poll=3.0, sleep=sleep)
    assert next(results).rows == 300
    assert next(results).rows == 600
    assert set(slept) == {3.0}
    with pytest.raises(DataError, match="is not a directory"):
        next(watch(place / "run", place / "nowhere"))
    for poll in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="must be a number of seconds above 0"):
            next(watch(place / "run", incoming, poll=poll))


@pytest.mark.slow
def test_a_file_that_is_written_while_another_is_used_is_not_taken_half(place: Path) -> None:
    incoming, whole, slept = place / "incoming", (place / "logs/day_2.csv").read_bytes(), list[float]()
    incoming.mkdir()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            shutil.copy(place / "logs/day_1.csv", incoming)
        elif len(slept) == 2:  # the next check finds day 1 unchanged, and this
            (incoming / "day_2.csv").write_bytes(whole[: whole.index(b"\n", len(whole) // 2) + 1])
        elif len(slept) == 3:
            (incoming / "day_2.csv").write_bytes(whole)
        assert len(slept) < 8

    results = watch(place / "run", incoming, sleep=sleep)
    assert [next(results).rows for _ in range(2)] == [300, 300]


@pytest.mark.parametrize(("owner", "name", "after"), [(Path, "stat", 1), (journal, "_hash", 0), (journal, "_hash", 1)])
def test_a_file_that_goes_ends_no_watch(
    place: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int
) -> None:
    incoming, call, slept = place / "incoming", getattr(owner, name), list[float]()
    incoming.mkdir()
    gone = incoming / "day_1.csv"
    shutil.copy(place / "logs/day_1.csv", gone)

    def going(path: Path, *more: Any, **settings: Any) -> Any:
        goes = path == gone and slept and os.path.exists(gone)
        if goes and not after:
            os.unlink(gone)
        found = call(path, *more, **settings)
        if goes and after:
            os.unlink(gone)
        return found

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            assert not gone.exists()
            shutil.copy(place / "logs/day_2.csv", incoming)
        assert len(slept) < 8

    monkeypatch.setattr(owner, name, going)
    assert next(watch(place / "run", incoming, sleep=sleep)).rows == 300
    [line] = [json.loads(text) for text in (place / "run/updates.jsonl").read_text().splitlines()]
    assert [log["name"] for log in line["logs"]] == ["day_2.csv"]


def test_a_watch_waits_while_another_process_changes_the_run(place: Path) -> None:
    (place / "incoming").mkdir()
    shutil.copy(place / "logs/day_1.csv", place / "incoming")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            locked.enter_context(RunDirectory(place / "run").locked())
        elif len(slept) == 2:
            locked.close()
        assert len(slept) < 8

    with ExitStack() as locked:
        assert next(watch(place / "run", place / "incoming", sleep=sleep)).rows == 300


def test_files_that_appear_together_are_in_the_order_of_their_numbers(place: Path) -> None:
    (place / "incoming").mkdir()
    rows = day(1)
    for number in (10, 9, 1, 11, 2, 30):
        rows[5 * number : 5 * number + 5].write_csv(place / "incoming" / f"part-{number}.csv")
    assert next(watch(place / "run", place / "incoming", sleep=lambda _: None, keep_ids=True)).rows == 30
    [line] = [json.loads(text) for text in (place / "run/updates.jsonl").read_text().splitlines()]
    assert [log["name"] for log in line["logs"]] == [f"part-{number}.csv" for number in (1, 2, 9, 10, 11, 30)]


@pytest.mark.slow
def test_files_without_rows_end_no_watch(place: Path) -> None:
    incoming, log, slept = place / "incoming", pl.read_csv(place / "logs/day_2.csv"), list[float]()
    incoming.mkdir()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            (incoming / "empty.csv").touch()
            (incoming / "empty.csv.gz").write_bytes(gzip.compress(b""))
            log.head(0).write_csv(incoming / "header.csv")
            log.head(0).write_parquet(incoming / "table.parquet")
            shutil.copy(place / "logs/day_1.csv", incoming)
        elif len(slept) == 3:
            log.write_csv(incoming / "header.csv")
        assert len(slept) < 8

    results = watch(place / "run", incoming, sleep=sleep)
    with pytest.warns(UserWarning, match="left out until they change, since they have no rows: ") as warned:
        found = [next(results).rows for _ in range(2)]
    assert found == [300, 300]
    assert "empty.csv," not in str(warned[0].message), "it has no header"
    assert all(name in str(warned[0].message) for name in ("empty.csv.gz", "header.csv", "table.parquet"))


@pytest.mark.slow
def test_a_row_without_a_header_that_cannot_be_read_ends_a_watch(tmp_path: Path) -> None:
    """Its only line is no header, so that the log has a row: it is not left out as a log without one."""
    day(0, 900).write_csv(tmp_path / "day_0.csv", include_header=False)
    columns = replace(schema(tmp_path), source=SourceFormat(columns=tuple(day(0).columns)))
    (tmp_path / "logs").mkdir()
    (tmp_path / "day_0.csv").rename(tmp_path / "logs/day_0.csv")
    run, incoming = first_run(tmp_path, columns), tmp_path / "incoming"
    incoming.mkdir()
    (incoming / "day_1.csv").write_text("maybe,1001,i1,u1,0.5\n")
    with pytest.raises(DataError, match="The only line is bad"):
        next(watch(run, incoming, sleep=lambda _: None))
    (incoming / "day_1.csv").write_text("1,1001,i1,u1,0.5\n")
    assert next(watch(run, incoming, sleep=lambda _: None)).rows == 1


@pytest.mark.slow
def test_damaged_records_are_named(place: Path) -> None:
    run = place / "run"
    for number in (1, 2):
        stoker.update(run, logs(place, number))
    lines = (run / "updates.jsonl").read_bytes().splitlines(keepends=True)
    (run / "updates.jsonl").write_bytes(lines[1])
    with pytest.raises(DataError, match="would not be recognised"):
        stoker.update(run, logs(place, 3))
    (run / "updates.jsonl").write_bytes(b"{" + lines[0] + lines[1])
    with pytest.raises(DataError, match=r"updates.jsonl is garbled"):
        stoker.update(run, logs(place, 3))
    (run / "updates.jsonl").write_bytes(lines[0] + lines[1] + lines[1][:9])
    assert stoker.update(run, logs(place, 3)).number == 3, "what a kill cut is left out"
    (run / "head.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"head.json is garbled"):
        stoker.load(run)


@pytest.mark.slow
def test_logical_shards_adam_and_a_schedule(tmp_path: Path) -> None:
    write_days(tmp_path / "logs", 1)
    first_run(tmp_path, row_optimizer="adam", shards=2, schedule="cosine", dtype="bfloat16", warmup=2, dense_warmup=100)
    found = stoker.update(tmp_path / "run", logs(tmp_path, 1), rate=0.5)
    assert found.rows == 300
    assert stoker.load(tmp_path / "run").model.embeddings.shards == 2
    manifest = checkpoint.read_manifest(found.checkpoint)
    assert manifest["row_optimizer"]["schedule"] == {"kind": "constant", "warmup": 0}
    [group] = manifest["dense_optimizer"]["param_groups"]
    assert group["lr"] == group["initial_lr"] == 0.5e-3


@pytest.mark.slow
def test_a_kill_between_two_renames_is_repaired(place: Path) -> None:
    run = place / "run"
    for number in (1, 2):
        stoker.update(run, logs(place, number))
    for name in ("update_000001", "update_000002"):
        (run / "checkpoints" / name).rename(run / "checkpoints" / f"{name}.tmp-old")
        assert stoker.load(run).path.name.startswith("update_000002")
        assert stoker.update(run, logs(place, 1, 2)).rows == 0
        assert (run / "checkpoints" / name).exists()
    shutil.copytree(run / "checkpoints/update_000002", run / "checkpoints/update_000002.tmp-old")
    assert stoker.update(run, logs(place, 1)).rows == 0
    assert not list((run / "checkpoints").glob("*.tmp*"))
    assert stoker.compact(run).joined == 2
    assert stoker.rollback(run, 0).name.startswith("step_")


@pytest.mark.slow
def test_a_follower_takes_back_an_update_whose_name_another_one_got(place: Path) -> None:
    """Between two polls the files of the update that the follower has were replaced."""
    run, few, many = place / "run", place / "few.csv", place / "many.csv"
    old, new = (pl.read_csv(log) for log in logs(place, 0, 1))
    for column in ("user", "item"):  # no new ids, for which the model would be loaded anew
        new = new.filter(pl.col(column).is_in(old[column].implode()))
    new.write_csv(many)
    new.head(5).write_csv(few)
    had = stoker.update(run, [many]).checkpoint
    follower = stoker.Follower(run)
    stoker.rollback(run, 0)
    assert stoker.update(run, [few]).checkpoint == had
    assert follower.poll()
    assert digest(follower.model) == digest(stoker.load(run).model)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "back"), [("dense_part", False), ("load", False), ("load", True)])
def test_files_that_are_replaced_while_they_are_read_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, what: str, back: bool
) -> None:
    run = place / "run"
    follower = stoker.Follower(run)
    stoker.update(run, logs(place, 1), keep_ids=True)
    before, read = digest(follower.model), getattr(loading, what)

    def replaced(*arguments: Any) -> Any:
        monkeypatch.setattr(loading, what, read)
        stoker.rollback(run, 0)
        with torch.enable_grad():  # it is called where rows are copied
            stoker.update(run, logs(place, 2), keep_ids=True)
        return read(*arguments)

    if what == "load":  # all rows, as if files of the model had gone
        monkeypatch.setattr(follower, "_changes", lambda links: None)
    monkeypatch.setattr(loading, what, replaced)
    with pytest.raises(CheckpointError, match="was replaced while it was read"):
        follower.poll()
    assert follower.version.number == 0
    assert (digest(follower.model) == before) == (what != "load")
    if back:
        stoker.rollback(run)  # to the model whose version the follower has, but not all of its rows
    monkeypatch.undo()
    assert follower.poll()
    assert digest(follower.model) == digest(stoker.load(run).model)


def test_rows_of_an_update_may_go_while_they_are_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read = place / "run", scorer_module.newest_rows
    follower = stoker.Scorer(run, follow=True)
    features = stoker.update(run, logs(place, 1)).checkpoint.parent.with_name("updates") / "000001/features"

    def gone(*arguments: Any) -> Any:
        """Return the rows, which the next update deletes."""
        monkeypatch.setattr(scorer_module, "newest_rows", read)
        found = read(*arguments)
        stoker.rollback(run)
        with opened(run) as journal:
            journal.discard()
        return found

    (features / "features.json").rename(place / "kept")
    with pytest.raises(DataError, match=r"features.json is missing"):
        follower.poll()
    (place / "kept").rename(features / "features.json")
    monkeypatch.setattr(scorer_module, "newest_rows", gone)
    with pytest.raises(CheckpointError, match="was replaced while it was read"):
        follower.poll()
    assert not features.exists()
    assert not follower.poll(), "the model that it has"


def test_a_compaction_while_a_chain_is_read_is_no_missing_segment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, link_of = place / "run", checkpoint.Link.of
    for number in (1, 2):
        found = stoker.update(run, logs(place, number)).checkpoint

    def compacted(path: Path) -> Any:
        """Return the link, whose parent a compaction deletes."""
        monkeypatch.setattr(checkpoint.Link, "of", link_of)
        first = link_of(path)
        stoker.compact(run)
        return first

    monkeypatch.setattr(checkpoint.Link, "of", compacted)
    assert [link.path for link in checkpoint.chain(found)] == [found]


@pytest.mark.slow
def test_a_follower_polls_while_the_run_changes(place: Path) -> None:
    """Whatever it has between two polls is one whole version; a change in the middle of a poll is a named error."""
    run = place / "run"
    follower = stoker.Follower(run)
    seen: dict[str, set[str]] = {follower.version.manifest: {digest(follower.model)}}
    ended, errors, refused = threading.Event(), [], []

    def poll() -> None:
        while not ended.is_set():
            try:
                follower.poll()
            except CheckpointError as error:
                refused.append(str(error))
            except BaseException as error:
                errors.append(error)
                return
            seen.setdefault(follower.version.manifest, set()).add(digest(follower.model))

    thread = threading.Thread(target=poll)
    thread.start()
    truth = {}
    try:
        for number in (1, 2, 3):
            path = stoker.update(run, logs(place, number)).checkpoint
            truth[checkpoint.hash_manifest(path)] = digest(stoker.load(path).model)
        stoker.rollback(run)
        truth[checkpoint.hash_manifest(stoker.load(run).path)] = digest(stoker.load(run).model)
        stoker.update(run, logs(place, 4))
        stoker.compact(run)
        stoker.rollback(run, 0)
        stoker.update(run, logs(place, 1))
    finally:
        ended.set()
        thread.join()
    assert not errors, errors
    assert all(len(each) == 1 for each in seen.values()), "two models of one version"
    assert all(truth.get(version, model) == model for version, (model,) in seen.items())
    follower.poll()
    assert digest(follower.model) == digest(stoker.load(run).model)


@pytest.mark.slow
def test_logs_that_do_not_fit_are_refused_by_name_and_the_run_is_as_before(place: Path) -> None:
    run, good = place / "run", day(1)
    stoker.update(run, logs(place, 1))
    head, text = contents(run)["head.json"], day(2).write_csv().encode()
    for name, log, cause in [
        ("no price", good.drop("price"), "has no column 'price'"),
        ("no item", good.drop("item"), "has no column 'item'"),
        ("words", good.with_columns(price=pl.lit("dear")), "'dear' is not a number"),
        ("lists", good.with_columns(item=pl.concat_list("item")), "column item holds lists"),
        ("labels", good.with_columns(click=pl.lit(2)), "2 is neither 0 nor 1"),
        ("clock back", day(0), "before the last such row of"),
        ("empty.csv", b"", "is empty"),
        ("cut.csv.gz", gzip.compress(text)[:-30], r"cut.csv.gz breaks off at line \d+, so rows are lost"),
    ]:
        given: Any = log
        if isinstance(log, bytes):
            given = place / name
            given.write_bytes(log)
        with pytest.raises(DataError, match=cause):
            stoker.update(run, given)
        assert contents(run)["head.json"] == head, name
    (place / "cut.csv").write_bytes(text[:-3])
    found = stoker.update(run, place / "cut.csv")
    assert (found.number, found.rows) == (2, 300)
    assert "has no newline at its end" in " ".join(found.notes)
    (place / "bad.csv").write_bytes(day(3).write_csv().encode() + b"1,2\n")
    assert "1 line bad and left out" in " ".join(stoker.update(run, place / "bad.csv").notes)


@pytest.mark.slow
def test_a_full_disk_leaves_the_run_as_before(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, sync, left = place / "run", os.fsync, [0]
    shutil.copytree(run, place / "whole")
    stoker.update(place / "whole", logs(place, 1))

    def full(number: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No room left")
        sync(number)

    monkeypatch.setattr(os, "fsync", full)
    for stop in (1, 3):
        left[0] = stop
        with pytest.raises(StokerError, match=r"(?i)no room left"):
            stoker.update(run, logs(place, 1))
        assert not (run / "head.json").exists()
    monkeypatch.setattr(Path, "open", opening(Path.open))
    with pytest.raises(CheckpointError, match=r"updates.jsonl cannot be written \(No room left\)"):
        stoker.update(run, logs(place, 1))
    monkeypatch.undo()
    stoker.update(run, logs(place, 1))
    assert contents(run / "checkpoints") == contents(place / "whole/checkpoints")


def opening(call: Any) -> Any:
    """Path.open on a disk that is full for one file."""

    def opened(path: Path, *given: Any, **more: Any) -> Any:
        if path.name == "updates.jsonl":
            raise OSError(errno.ENOSPC, "No room left")
        return call(path, *given, **more)

    return opened


@pytest.mark.slow
def test_a_log_that_begins_with_another_of_the_same_update_is_refused(place: Path) -> None:
    """Its rows would be trained on twice. A header alone is no log that others begin with."""
    run, text = place / "run", day(1).write_csv().encode()
    (place / "10h.csv").write_bytes(text[: text.index(b"\n", 4000) + 1])
    (place / "11h.csv").write_bytes(text)
    with pytest.raises(
        DataError, match=r"11h.csv begins with all [\d,]+ bytes of .*10h.csv, whose rows would count twice"
    ):
        stoker.update(run, [place / "11h.csv", place / "10h.csv"])
    header = text[: text.index(b"\n") + 1]
    (place / "12h.csv").write_bytes(header)
    assert stoker.update(run, [place / "12h.csv", place / "11h.csv"]).rows == 300
    found = stoker.update(run, logs(place, 2))  # begins with the bytes of 12h.csv
    assert (found.number, found.rows) == (2, 300)


@pytest.mark.slow
def test_a_tabular_model_keeps_its_columns_while_its_tables_grow(tmp_path: Path) -> None:
    """Its columns follow from the number of rows, which a new model of the same settings would count anew."""

    def rows(first: int, last: int) -> pl.DataFrame:
        return pl.DataFrame({"y": [i % 2 for i in range(300)], "item": [f"i{first + i % last}" for i in range(300)]})

    schema = stoker.Schema.from_dict({"label": "y", "categorical": [{"name": "item"}]})
    data = stoker.prepare(schema, rows(0, 20), out=tmp_path / "data")
    stoker.train(data, out=tmp_path / "run", model="tabular", epochs=1, batch_size=64, display="quiet")
    dims = stoker.load(tmp_path / "run").model.config()["dims"]
    stoker.update(tmp_path / "run", rows(15, 40))
    model = stoker.load(tmp_path / "run").model
    assert model.config()["dims"] == dims
    assert model.spec.num_embeddings["item"] > 40
