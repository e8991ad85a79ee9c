"""Warnings of a preparation that a new user needs: empty splits, columns of new ids; and remedies for dates."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import stoker
from stoker.base.errors import DataError
from stoker.base.files import hash_edge
from stoker.prep.draft import draft_log
from stoker.prep.prepare import PrepareReport, run_prepare
from stoker.prep.schema import Schema

ROWS = 1000


def report(tmp_path: Path, columns: dict[str, Any], **values: Any) -> PrepareReport:
    frame = pl.DataFrame(
        {"clicked": [i % 2 for i in range(ROWS)], "item": [f"i{i % 10}" for i in range(ROWS)], **columns}
    )
    frame.write_csv(tmp_path / "log.csv")
    schema = Schema.from_dict(
        {
            "label": "clicked",
            "categorical": [{"name": name} for name in ("item", *columns) if name not in ("at", "part")],
            **values,
        }
    )
    return run_prepare(schema, tmp_path / "log.csv", out=tmp_path / "data")


def test_a_column_of_new_ids_is_named(tmp_path: Path) -> None:
    columns = {"session": [f"s{i // 4}" for i in range(ROWS)], "empty": [None, *["x"] * 30, *[None] * (ROWS - 31)]}
    found = report(tmp_path, columns, split={"rule": "runs", "runs": 5})
    (said,) = found.warnings
    assert said.startswith("100.0% of the held-out ids of column 'session' are not in the training rows.")
    assert "leave the column out" in said
    again = run_prepare(
        Schema.from_dict(stoker.Dataset(found.path).manifest["schema"]), tmp_path / "log.csv", out=found.path
    )
    assert again.already
    assert again.warnings == found.warnings


@pytest.mark.parametrize(
    ("split", "empty"),
    [
        ({"rule": "column", "column": "part", "values": {"a": "train", "b": "valid", "c": "test"}}, ["test"]),
        ({"rule": "column", "column": "part", "values": {"a": "train", "b": "train"}}, []),
        ({"rule": "leave_last_out", "column": "part", "min_rows": 2000}, ["valid", "test"]),
    ],
)
def test_a_split_without_rows_is_named(tmp_path: Path, split: dict[str, Any], empty: list[str]) -> None:
    columns = {"part": ["a" if i % 3 else "b" for i in range(ROWS)], "at": [i * (i < 800) for i in range(ROWS)]}
    found = report(tmp_path, columns, split=split, timestamp={"column": "at"})
    assert [said.split(" rows,")[0].rsplit(" ", 1)[1] for said in found.warnings] == empty


def test_a_few_iso_dates_do_not_hide_the_format_of_the_others(tmp_path: Path) -> None:
    when = [f"{1 + i % 12:02d}/{13 + i % 15}/2025 10:{i % 60:02d}" for i in range(ROWS)]
    when[0] = when[500] = "2025-01-14 10:00:00"
    pl.DataFrame({"clicked": [i % 2 for i in range(ROWS)], "when": when}).write_csv(tmp_path / "log.csv")
    (found,) = [one for one in draft_log(tmp_path / "log.csv").columns if one.name == "when"]
    assert found.settings == {"type": "datetime", "format": "%m/%d/%Y %H:%M"}
    assert found.doubts == ["some dates are written in another way, such as '2025-01-14 10:00:00': bad lines"]


def test_dates_among_numbers_get_a_format_as_remedy(tmp_path: Path) -> None:
    columns = {"when": [str(i) if i < 980 else "3/14/2025" for i in range(ROWS)]}
    with pytest.raises(DataError, match=r"set type = .datetime. and format in \[timestamp\]") as caught:
        report(tmp_path, columns, categorical=[{"name": "when", "type": "int"}])
    assert "null_values" not in str(caught.value)


def test_starts_of_sessions_are_times(tmp_path: Path) -> None:
    start = 1_735_689_600_000
    pl.DataFrame(
        {
            "clicked": [i % 2 for i in range(400)], "user": [i % 7 for i in range(400)],
            "session_start": [start + 1000 * (i // 5) for i in range(400)],
            "sessionEnd": [start + 1000 * (i // 5) + 500 for i in range(400)],
            "session_id": [start + i // 5 for i in range(400)],
        }
    ).write_csv(tmp_path / "log.csv")  # fmt: skip
    found = draft_log(tmp_path / "log.csv")
    roles = {column.name: found.role(column) for column in found.columns}
    assert roles["session_start"] == "time"
    assert roles["sessionEnd"] == "left out"
    assert roles["session_id"] == "categorical"


def test_a_window_of_seconds_over_datetimes_is_said(tmp_path: Path) -> None:
    lines = [f"2024-01-0{1 + place % 9} 10:00:00,a,{place % 2}" for place in range(40)]
    (tmp_path / "log.csv").write_text("\n".join(["when,item,bought", *lines]) + "\n")
    values = {
        "name": "shop", "label": "bought", "timestamp": {"column": "when", "type": "datetime"},
        "categorical": [{"name": "item"}], "split": {"rule": "time"},
    }  # fmt: skip
    for window, warns in ((604_800, True), (604_800_000_000, False)):
        schema = stoker.Schema.from_dict(values).with_feature(
            f"past_count name=sold by=item order=when window={window}"
        )
        found = run_prepare(schema, tmp_path / "log.csv", out=tmp_path / str(window)).warnings
        assert any("write window=604800000000" in each for each in found) == warns


def test_an_empty_text_is_missing_wherever_it_is_read(tmp_path: Path) -> None:
    rows = pl.DataFrame({"item": ["a", "", "b", ""] * 30, "bought": [0, 1, 1, 0] * 30})
    rows.write_csv(tmp_path / "log.csv")
    rows.write_parquet(tmp_path / "log.parquet")
    (tmp_path / "log.jsonl").write_text("".join(f'{{"item":"{a}","bought":{b}}}\n' for a, b in rows.rows()))
    values = {
        "name": "shop", "label": "bought", "categorical": [{"name": "item", "missing": "category"}],
        "split": {"rule": "hash", "train": 1.0, "valid": 0.0, "test": 0.0},
    }  # fmt: skip
    schema = Schema.from_dict(values)
    found = []
    for given in (tmp_path / "log.csv", tmp_path / "log.parquet", tmp_path / "log.jsonl", rows):
        data = stoker.prepare(schema, given, out=tmp_path / f"data-{len(found)}")
        found.append([batch.ids.tolist() for batch in data.train.batches(64)])
    assert found == [found[0]] * 4


def test_a_column_without_a_known_value_is_named(tmp_path: Path) -> None:
    """As when JSON lines have its key in upper case, which counts as a missing value in each row."""
    data = stoker.Dataset(report(tmp_path, {"user": [f"u{i % 9}" for i in range(ROWS)]}).path)
    rows = pl.read_csv(tmp_path / "log.csv")
    rows.rename({"user": "User"}).write_ndjson(tmp_path / "new.jsonl")
    found = run_prepare(None, tmp_path / "new.jsonl", like=data, out=tmp_path / "new")
    (said,) = found.warnings
    assert said.startswith("no row has a known value of column 'user'")
    rows.write_ndjson(tmp_path / "new.jsonl")
    assert not run_prepare(None, tmp_path / "new.jsonl", like=data, out=tmp_path / "good").warnings


def test_a_copy_of_a_log_is_named(tmp_path: Path) -> None:
    report(tmp_path, {})
    schema = Schema.from_dict({"label": "clicked", "categorical": [{"name": "item"}]})
    for name, more in (("copy", ""), ("other", "1,i3\n")):
        (tmp_path / f"{name}.csv").write_text((tmp_path / "log.csv").read_text() + more)
    found = run_prepare(schema, [tmp_path / f"{name}.csv" for name in ("copy", "log", "other")], out=tmp_path / "all")
    (said,) = found.warnings
    assert said.startswith("log.csv has the size, the beginning and the end of copy.csv.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "pair"),
    [
        (["136", "136.0", "x"], "1 value of table 'v' is written in two ways, such as '136.0' and '136'"),
        (["136.0", "7", "7.0", "136"], "2 values of table 'v' are written in two ways"),
        (["True", "true", "False"], "1 value of table 'v' is written in two ways, such as '"),
        (["0", "1", "true", "false"], "2 values of table 'v' are written in two ways"),
        (["1e-07", "1.0E-7"], "1 value of table 'v' is written in two ways"),
        (["2024-01-05", "2024-01-05 00:00:00"], "1 value of table 'v' is written in two ways"),
        (["2024-01-05T10:00Z", "2024-01-05 10:00:00+00:00"], "1 value of table 'v' is written in two ways"),
        (["-0.0", "0.0", "1.0"], "1 value of table 'v' is written in two ways"),
        (["-0.00", "0.00", *(f"{n}.25" for n in range(300))], "such as '-0.00' and '0.00'"),
        (["-0.0", "1.0"], ""),
        (["1", "2.0", "3.5"], ""),
        (["0", "1", "2"], ""),
        (["2024-01-05", "2024-01-06 00:00:00"], ""),
        (["1", "1.0", *(f"u{n}" for n in range(400))], ""),  # of many texts, one may happen to be so
    ],
)
def test_one_value_in_two_notations_is_named(tmp_path: Path, texts: list[str], pair: str) -> None:
    """pandas writes 136 as 136.0 on the day that has a missing value."""
    columns = {"v": [texts[n % len(texts)] for n in range(ROWS)]}
    found = report(tmp_path, columns)
    assert [pair in said for said in found.warnings] == ([True] if pair else [])
    schema = Schema.from_dict(stoker.Dataset(found.path).manifest["schema"])
    again = run_prepare(schema, tmp_path / "log.csv", out=found.path)
    assert (again.already, again.warnings) == (True, found.warnings)


def test_one_value_in_two_notations_is_named_where_only_features_read_it(tmp_path: Path) -> None:
    columns = {"v": [["136", "136.0", "x"][n % 3] for n in range(ROWS)], "item": [f"i{n % 9}" for n in range(ROWS)]}
    pl.DataFrame({"clicked": [n % 2 for n in range(ROWS)], **columns}).write_csv(tmp_path / "log.csv")
    values = {"label": "clicked", "categorical": [{"name": "item"}], "derive": ["mean_target by=v", "count by=v,item"]}
    found = run_prepare(Schema.from_dict(values), tmp_path / "log.csv", out=tmp_path / "data")
    (said,) = found.warnings
    assert said.startswith("1 value of column 'v' is written in two ways, such as '136.0' and '136', and each feature")
    again = run_prepare(Schema.from_dict(values), tmp_path / "log.csv", out=tmp_path / "data")
    assert (again.already, again.warnings) == (True, found.warnings)
    new = run_prepare(None, tmp_path / "log.csv", out=tmp_path / "new", like=stoker.Dataset(found.path))
    assert not any("two ways" in said for said in new.warnings)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_log_that_grows_while_it_is_read_is_named(tmp_path: Path, pack: Any) -> None:
    """Its manifest has the size before, so that an update does not take the new rows for used ones."""
    log = tmp_path / "log.csv"
    text = b"clicked,item\n" + b"".join(b"%d,i%d\n" % (n % 2, n % 9) for n in range(ROWS))
    log.write_bytes(pack(text))
    before, more = log.stat().st_size, pack(b"1,new\n")

    def grow(_: Any) -> None:
        if log.stat().st_size == before and (tmp_path / "data/.work/parts").exists():
            with log.open("ab") as file:
                file.write(more)

    schema = Schema.from_dict({"label": "clicked", "categorical": [{"name": "item"}]})
    found = run_prepare(schema, log, out=tmp_path / "data", progress=grow)
    assert found.warnings == [
        f"{log} had {before:,} bytes before it was read and has {before + len(more):,} now: rows at its end may be "
        "missing. Prepare again when it no longer changes."
    ]
    [source] = stoker.Dataset(found.path).manifest["sources"]
    assert source["bytes"] == before
    assert source["tail"] == hash_edge(log, 0, before)
    if pack is gzip.compress:
        edge = hashlib.sha256(text).hexdigest()
        assert source["text"] == {"bytes": len(text), "head": edge, "tail": edge}
