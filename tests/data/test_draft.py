"""Drafts of schemas: what `stoker init` makes of logs that nobody has described."""

from __future__ import annotations

import gzip
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard
from recipe_logs import generated

import stoker
from stoker import Schema
from stoker.base.errors import ConfigError, DataError, SchemaError
from stoker.cli import main
from stoker.prep.draft import Draft, draft_log
from stoker.prep.schema import Timestamp

ROWS = 400


def write(path: Path, columns: dict[str, Sequence[Any]], separator: str = ",", *, header: bool = True) -> Path:
    lines = [separator.join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join([separator.join(columns)] * header + lines) + "\n", encoding="utf-8")
    return path


def table(**columns: Sequence[Any]) -> dict[str, Sequence[Any]]:
    return {
        "clicked": [int(i % 4 == 0) for i in range(ROWS)],
        "shop": [f"s{i * 7 % 13}" for i in range(ROWS)],
        **columns,
    }


def numbers(step: float, of: int) -> list[float]:
    return [i * 37 % of * step for i in range(ROWS)]


def draft(tmp_path: Path, **columns: Sequence[Any]) -> Draft:
    return draft_log(write(tmp_path / "log.csv", table(**columns)))


def kinds(found: Draft) -> dict[str, str]:
    return {column.name: found.role(column) for column in found.columns}


def settings(found: Draft, kind: str, name: str) -> dict[str, Any]:
    (one,) = [one for one in tomllib.loads(found.text)[kind] if one["name"] == name]
    return {key: value for key, value in one.items() if key != "name"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "values", "kind", "given"),
    [
        ("price", numbers(0.25, 97), "dense", {"transforms": ["zscore"]}),
        ("price", [i % 50 or "" for i in range(ROWS)], "dense", {"fill": "median", "transforms": ["zscore"]}),
        ("views", [1] * 390 + [10_000 + i for i in range(10)], "categorical", {"type": "int"}),
        ("amount", [i % 20 for i in range(390)] + [9_999] * 10, "dense", {"transforms": ["log1p", "zscore"]}),
        ("c", (["" if i % 9 == 0 else i * i for i in range(19)] * 22)[:ROWS], "categorical", {"type": "int"}),
        (
            "c",
            ["" if i % 9 == 0 else i**6 for i in range(40)] * 10,
            "dense",
            {"fill": "median", "transforms": ["log1p", "zscore"]},
        ),
        ("user_id", [1000 + i % 90 for i in range(ROWS)], "categorical", {"type": "int"}),
        ("user_id", [10**25 + i % 90 for i in range(ROWS)], "categorical", {}),
        ("zip", [f"{i % 90:05}" for i in range(ROWS)], "categorical", {}),
        ("user_id", [f"{i % 90}.0" for i in range(ROWS)], "categorical", {"type": "float"}),
        ("site", [f"{(i % 90 + 7) * 2654435761 % 2**32:08x}" for i in range(ROWS)], "categorical", {"type": "hex"}),
        ("note", [f"word {i % 9}" for i in range(ROWS)], "categorical", {}),
        (
            "seen",
            [f"{i % 7}|{i % 11}|{i % 3}" for i in range(ROWS)],
            "sequence",
            {"separator": "|", "type": "int", "max_length": 3},
        ),
        ("seen", [f"N{i % 7} N{i % 11}" for i in range(ROWS)], "sequence", {"separator": " ", "max_length": 2}),
        ("tags", [f"a{i % 7};b{i % 5}" for i in range(ROWS)], "sequence", {"separator": ";", "max_length": 2}),
    ],
)
def test_kinds_of_columns(tmp_path: Path, name: str, values: Sequence[Any], kind: str, given: dict[str, Any]) -> None:
    found = draft(tmp_path, **{name: values})
    assert kinds(found) == {"clicked": "label", "shop": "categorical", name: kind}
    assert settings(found, kind, name) == given
    prepared(tmp_path, tmp_path / "log.csv", found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["USER_ID", "User_Id", "ITEMID", "itemId", "Item", "PRODUCTS", "member", "account", "COUNTRY", "UserNo"]
)
def test_names_of_codes_in_any_case(tmp_path: Path, name: str) -> None:
    found = draft(tmp_path, **{name: [i * i % 211 for i in range(ROWS)]})
    assert kinds(found)[name] == "categorical"
    assert "numbers or codes?" not in found.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (range(ROWS), "a row id"),
        ([f"r{i}" for i in range(ROWS)], "a row id"),
        ([f"some words that nobody wrote before, number {i}".replace(",", "") * 2 for i in range(ROWS)], "free text"),
        (["x"] * ROWS, "the same value in every row read: x"),
        ([""] * ROWS, "no row read has a value"),
        (["[1; 2]", "[3]"] * (ROWS // 2), "written as text"),
    ],
)
def test_columns_that_are_left_out(tmp_path: Path, values: Sequence[Any], reason: str) -> None:
    found = draft(tmp_path, it_id=values)
    assert kinds(found)["it_id"] == "left out"
    (line,) = [line for line in found.text.splitlines() if reason in line]
    assert line.startswith("# [[categorical]]  # ")
    assert '# name = "it_id"' in found.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("label", [0, 1], None),
        ("is_good", [0, 1], None),
        ("label", ["no", "yes"], "== 'yes'"),
        ("label", ["false", "true"], "== 'true'"),
        ("label", [-1, 1], "== 1"),
        ("Geklickt?", ["nein", "ja"], "== 'ja'"),
        ("Clicked?", [1, 2], "== 2"),
        ("label", ["bought", "ignored", "ignored", "ignored"], "== 'bought'"),
        ("rating", [1, 2, 3, 4, 5], ">= 4"),
        ("rating", [i / 2 for i in range(1, 11)], ">= 4"),
        ("score", list(range(1, 11)), ">= 7"),
        ("overall", [1, 2, 3, 4, 5], ">= 4"),
        ("clicks", [0, 1, 2, 3, 4], "> 0"),
        ("event", ["view", "cart", "purchase"], "== 'purchase'"),
    ],
)
def test_labels(tmp_path: Path, name: str, values: Sequence[Any], rule: str | None) -> None:
    column = [values[i % len(values)] for i in range(ROWS)]
    found = draft_log(write(tmp_path / "log.csv", {"item": [f"i{i % 7}" for i in range(ROWS)], name: column}))
    assert found.label == name
    schema = Schema.from_dict(tomllib.loads(found.text))
    assert (schema.label.column, schema.label.rule) == (name, rule)
    assert schema.features[0].name == "item"


def test_the_name_decides_between_labels_and_other_outcomes_are_left_out(tmp_path: Path) -> None:
    ones = [i % 2 for i in range(ROWS)]
    found = draft(tmp_path, is_mobile=ones, flag=ones, purchased=ones)
    assert kinds(found) == {
        "clicked": "label", "shop": "categorical", "is_mobile": "categorical", "flag": "categorical",
        "purchased": "left out",
    }  # fmt: skip
    assert "other candidates:" in found.text
    assert "reveal the label" in found.text


def test_a_label_without_the_name_of_one_is_doubted_with_its_rivals(tmp_path: Path) -> None:
    ones = [i % 2 for i in range(ROWS)]
    found = draft_log(write(tmp_path / "log.csv", {"item": numbers(1, 90), "odd": ones, "even": ones, "third": ones}))
    assert 'column "odd": chosen because its values are 0 and 1. Or is it "even", "third"?' in next(found.notes)
    assert (
        draft_log(write(tmp_path / "log.csv", {"user": numbers(1, 90), "odd": ones, "skipped": ones})).label
        == "skipped"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ([1_600_000_000 + i * 999 for i in range(ROWS)], {}),
        ([(1_600_000_000 + i * 999) * 1000 for i in range(ROWS)], {}),
        ([1_600_000_000.5 + i for i in range(ROWS)], {"type": "float"}),
        ([f"2017-03-{i % 28 + 1:02}" for i in range(ROWS)], {"type": "datetime"}),
        ([f"2017-03-07T{i % 24:02}:{i % 60:02}:00Z" for i in range(ROWS)], {"type": "datetime"}),
        ([f"{2000 + i // 12 % 24}-{i % 12 + 1:02}" for i in range(ROWS)], {"type": "datetime"}),
        ([f"201703{i % 28 + 1:02}" for i in range(ROWS)], {"type": "datetime"}),
        (
            [f"201703{i % 28 + 1:02}{i % 24:02}1500" for i in range(ROWS)],
            {"type": "datetime", "format": "%Y%m%d%H%M%S"},
        ),
        ([f"201703{i % 28 + 1:02}{i % 24:02}" for i in range(ROWS)], {"type": "datetime", "format": "%Y%m%d%H"}),
        ([f"1410{i % 31 + 1:02}{i % 24:02}" for i in range(ROWS)], {"type": "datetime", "format": "%y%m%d%H"}),
        (
            [f"2017/03/{i % 28 + 1:02} {i % 24:02}:15:00" for i in range(ROWS)],
            {"type": "datetime", "format": "%Y/%m/%d %H:%M:%S"},
        ),
        (
            [f"{i % 28 + 1:02}.03.2017 {i % 24:02}:15" for i in range(ROWS)],
            {"type": "datetime", "format": "%d.%m.%Y %H:%M"},
        ),
    ],
)  # fmt: skip
def test_times(tmp_path: Path, values: Sequence[Any], settings: dict[str, str]) -> None:
    found = draft(tmp_path, event_time=values)
    assert kinds(found)["event_time"] == "time"
    schema = tomllib.loads(found.text)
    assert schema["timestamp"] in ({"column": "event_time", **settings}, {"column": "event_time", "type": "int"})
    assert found.schema().timestamp is not None, "there is no doubt about the dates"
    assert schema["split"]["rule"] == "time"
    prepared(tmp_path, tmp_path / "log.csv", found)


@pytest.mark.parametrize("kind", [str, int])
def test_hours_in_digits_are_no_dates(tmp_path: Path, kind: type) -> None:
    log = pl.DataFrame(
        {
            "label": [i % 2 for i in range(ROWS)],
            "hour": [kind(f"1410{i % 3 + 20}{i % 24:02}") for i in range(ROWS)],  # as in Avazu
            "date": [kind(f"{i % 21 + 10}102017") for i in range(ROWS)],
        }
    )
    found = draft_log(log)
    assert found.schema().timestamp == Timestamp(column="hour", type="datetime", format="%y%m%d%H")
    assert kinds(found)["date"] == "categorical"
    stoker.prepare(found.schema(), log, out=tmp_path / "data")
    splits = json.loads((tmp_path / "data" / "manifest.json").read_text())["splits"]
    assert splits["train"]["time"]["first"] == "2014-10-20T00:00:00Z"
    assert splits["test"]["time"]["last"] == "2014-10-22T23:00:00Z"


def test_a_date_that_could_be_another_is_unsure(tmp_path: Path) -> None:
    found = draft(tmp_path, day=[f"0{i % 9 + 1}/0{i % 7 + 1}/2017" for i in range(ROWS)])
    assert 'format = "%m/%d/%Y"' in found.text
    assert '# unsure: the dates could also be written as format = "%d/%m/%Y"' in found.text


@pytest.mark.slow
def test_dates_of_the_whole_sample_say_which_number_is_the_day(tmp_path: Path) -> None:
    """The first 1,000 different times are of the first five days."""
    times = [f"{1 + i // 200:02}.03.2017 {i % 200 // 60:02}:{i % 60:02}" for i in range(4_000)]
    shops, clicks = [f"s{i % 13}" for i in range(4_000)], [i % 4 // 3 for i in range(4_000)]
    found = draft_log(write(tmp_path / "log.csv", {"time": times, "shop": shops, "clicked": clicks}))
    timestamp = found.schema().timestamp
    assert timestamp is not None
    assert timestamp.format == "%d.%m.%Y %H:%M"


def test_texts_that_mean_missing_are_found_next_to_decimal_commas(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    prices = ("n/a" if i % 20 == 0 else f"{i % 70},{i % 9}" for i in range(ROWS))
    log.write_text("price;shop;clicked\n" + "".join(f"{each};s{i % 5};{i % 2}\n" for i, each in enumerate(prices)))
    found = draft_log(log)
    assert (found.unsure, kinds(found)["price"]) == (0, "dense")
    prepared(tmp_path, log, found)


def test_users_and_groups_are_proposed_in_comments(tmp_path: Path) -> None:
    found = draft(
        tmp_path, user_id=[i % 30 for i in range(ROWS)], session_id=[f"q{i // 5}" for i in range(ROWS)],
        ts=[1_600_000_000 + i for i in range(ROWS)],
    )  # fmt: skip
    assert '# group = "session_id"' in found.text
    assert '# rule = "leave_last_out"\n# column = "user_id"' in found.text
    changed = found.text.replace('rule = "time"', "#", 1).replace("# rule", "rule").replace("# column", "column")
    changed = "\n".join(line for line in changed.splitlines() if not line.startswith(("train", "valid", "test")))
    assert Schema.from_dict(tomllib.loads(changed)).split.column == "user_id"


def test_without_a_label_the_draft_has_a_commented_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path / "log.csv", {"shop": [f"s{i % 9}" for i in range(50)], "sex": ["m", "f"] * 25})
    with pytest.raises(SystemExit) as done:
        main(["init", str(log), "--out", str(tmp_path / "s.toml")])
    assert not done.value.code
    assert "no column looks like a label" in capsys.readouterr().out
    text = (tmp_path / "s.toml").read_text()
    assert "# [label]" in text
    assert '# columns with two values: "sex"' in text
    Schema.from_dict(
        tomllib.loads(
            text.replace("# [label]", "[label]").replace('# column = "?"', 'column = "sex"\nrule = "== \'m\'"')
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("separator", [",", "\t", ";", "|", "::", "\x01"])
@pytest.mark.parametrize("header", [True, False])
def test_separators_and_headers(tmp_path: Path, separator: str, header: bool) -> None:
    log = write(tmp_path / "log.dat", table(price=numbers(0.25, 97)), separator, header=header)
    schema = Schema.from_dict(tomllib.loads(draft_log(log).text))
    assert (schema.source.separator or ",") == separator
    assert schema.source.columns == (() if header else ("c1", "c2", "c3"))
    assert schema.label.column == ("clicked" if header else "c1")


@pytest.mark.slow
@pytest.mark.parametrize("header", ["clicked;Preis (€);Neu?", "clicked;# Käufe & Co.;shop", "clicked;;;shop"])
def test_headers_with_signs_or_blanks_are_headers(tmp_path: Path, header: str) -> None:
    names = header.split(";")
    rows = [";".join([str(i % 2), *(f"v{i * place % 9}" for place in range(1, len(names)))]) for i in range(ROWS)]
    (tmp_path / "log.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    found = draft_log(tmp_path / "log.csv")
    assert [column.name for column in found.columns] == [name for name in names if name]
    assert found.label == "clicked"
    assert prepared(tmp_path, tmp_path / "log.csv", found).train


@pytest.mark.slow
def test_numbers_with_a_decimal_comma_are_no_lists(tmp_path: Path) -> None:
    columns = table(
        Preis=[f"{i % 9}.{i % 90 + 100},{i % 7}5" for i in range(ROWS)], item_ids=["3,5", "7,9"] * (ROWS // 2)
    )
    for separator, kind, said in ((";", "dense", 'decimal = ","'), ("\t", "dense", 'decimal = ","'),
                                  ("|", "left out", 'decimal = "," in [source] reads numbers')):  # fmt: skip
        found = draft_log(write(tmp_path / "log.csv", columns, separator))
        assert kinds(found) == {"clicked": "label", "shop": "categorical", "Preis": kind, "item_ids": "sequence"}
        assert said in found.text


@pytest.mark.parametrize("found", ["order", "status", "paid"])
def test_columns_that_tell_the_label_are_left_out(tmp_path: Path, found: str) -> None:
    clicked = table()["clicked"]
    values = {
        "order": [f"o{i}" if bought else "" for i, bought in enumerate(clicked)],
        "status": ["done" if bought else "open" if i % 3 else "new" for i, bought in enumerate(clicked)],
        "paid": [i + 0.5 if bought else 0 for i, bought in enumerate(clicked)],
    }[found]
    drawn = draft(tmp_path, **{found: values, "nearly": [values[1], *values[1:]]})
    assert kinds(drawn)[found] == "left out"
    assert kinds(drawn)["nearly"] != "left out"
    assert "in no others: it reveals the label" in drawn.text


def test_columns_without_a_value_of_both_labels_are_left_out(tmp_path: Path) -> None:
    clicked = table()["clicked"]
    outcome = [
        ("won", "kept")[i // 4 % 2] if bought else ("lost", "left", "")[i % 3] for i, bought in enumerate(clicked)
    ]
    few = [f"x{i % 40}" for i in range(ROWS)]  # 40 values want 120 rows of each label: 100 could be chance
    drawn = draft(tmp_path, outcome=outcome, nearly=[outcome[1], *outcome[1:]], few=few)
    assert kinds(drawn) == {
        "clicked": "label", "shop": "categorical", "outcome": "left out", "nearly": "categorical", "few": "categorical",
    }  # fmt: skip
    assert "left out: outcome: no value is in rows of both labels: it reveals the label" in drawn.notes
    alone = draft_log(write(tmp_path / "alone.csv", {"clicked": clicked, "outcome": outcome}))
    with pytest.raises(SchemaError, match=r"like a feature: clicked, outcome \(no value is in rows of both labels: it"):
        alone.schema()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_numbers_that_are_not_finite_are_a_doubt(tmp_path: Path, kind: str) -> None:
    price = numbers(0.25, 97)
    for few, doubt in ((1, "1 of 400 values are not numbers, such as 'inf': bad lines"), (40, "40 of 400 values are")):
        frame = pl.DataFrame(table(price=[float("inf")] * few + price[few:], none=[float("inf")] * ROWS))
        getattr(frame, f"write_{kind}")(tmp_path / f"log.{kind}")
        found = draft_log(tmp_path / f"log.{kind}")
        assert any(doubt in note for note in found.notes), found.text
        assert kinds(found)["price"] == ("categorical" if (kind, few) == ("csv", 40) else "dense")
        assert kinds(found)["none"] == "left out"


def test_a_label_with_one_value_is_not_offered_as_a_feature(tmp_path: Path) -> None:
    found = draft_log(write(tmp_path / "log.csv", table(clicked=[0] * ROWS)))
    assert found.label == "clicked"
    assert "Left out" not in found.text


def frames(path: Path) -> list[Path]:
    columns = {**table(price=numbers(0.25, 97)), "seen": [[i % 7, i % 5] for i in range(ROWS)]}
    frame = pl.DataFrame(columns)
    frame.write_parquet(path / "a.parquet")
    frame.write_ndjson(path / "a.jsonl")
    text = frame.with_columns(pl.col("seen").cast(pl.List(pl.String)).list.join("|")).write_csv().encode()
    (path / "a.csv").write_bytes(text)
    (path / "a.csv.gz").write_bytes(gzip.compress(text))
    (path / "b.log.zst").write_bytes(zstandard.ZstdCompressor().compress(text))
    (path / "a.data").write_bytes((path / "a.parquet").read_bytes())
    (path / "b.data").write_bytes((path / "a.jsonl").read_bytes())
    return sorted(path.iterdir())


@pytest.mark.slow
def test_every_format_gives_the_same_columns(tmp_path: Path) -> None:
    for file in frames(tmp_path):
        found = draft_log(file)
        assert kinds(found) == {"clicked": "label", "shop": "categorical", "price": "dense", "seen": "sequence"}, file
        assert prepared(tmp_path, file, found).manifest["splits"], file


def prepared(tmp_path: Path, log: Path, found: Draft) -> stoker.Dataset:
    (tmp_path / "schema.toml").write_text(found.text, encoding="utf-8")
    data = stoker.prepare(tmp_path / "schema.toml", log)
    assert sum(len(split) for split in (data.train, data.valid, data.test)) == found.rows
    return data


def test_rows_bound_what_is_read_and_files_share_them(tmp_path: Path) -> None:
    logs = [write(tmp_path / f"{name}.csv", table()) for name in "ab"]
    assert draft_log(logs[0], rows=50).rows == 50
    assert "not all of its rows" in draft_log(logs[0], rows=50).text
    assert draft_log(logs[0], rows=ROWS).text.count("not all") == 0
    assert draft_log(logs, rows=50).rows == 50
    assert draft_log(logs).rows == 2 * ROWS
    with pytest.raises(ConfigError, match="rows=0"):
        draft_log(logs, rows=0)
    write(tmp_path / "b.csv", {"x": [1], "y": [2]})
    with pytest.raises(DataError, match=r"b.csv has the columns x, y, but .*a.csv has clicked, shop"):
        draft_log(logs)


def test_bad_lines_are_rows_that_were_looked_at_and_doubts_come_once(tmp_path: Path) -> None:
    lines = ["no json", *(json.dumps({"click": i % 2, "shop": f"s{i % 5}"}) for i in range(40))]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    found = draft_log(tmp_path / "a.jsonl", rows=21)
    assert found.rows == 20
    assert "1 line with other fields than the rest" in found.text
    assert "not all of its rows" in found.text
    assert draft_log(tmp_path / "a.jsonl", rows=41).text.count("not all") == 0
    logs = [tmp_path / f"{name}.csv" for name in "ab"]
    for log in logs:
        log.write_text("click,shop,dup,dup\n" + "".join(f"{i % 2},s{i % 5},1,2\n" for i in range(40)))
    assert draft_log(logs).text.count("several columns are called 'dup'") == 1


MESSY = """\ufeffid;clicked;Preis (EUR);when;tags;a/b;constant;"name";city;weight;dup;dup
"""


def messy(path: Path) -> Path:
    lines = [
        f"{i};{i % 3 // 2};{'NULL' if i % 9 == 0 else i % 50 / 4};{i % 28 + 1}.3.2017 10:15;"
        f"x{i % 5}|y{i % 3};k{i % 4};1;"
        f'"Smith; ""J"" {i % 6}";Kö"ln{i % 5};{i % 40 if i != 77 else "heavy"};1;2'
        for i in range(300)
    ]
    lines[40] = "broken;line"
    lines[50] = ""
    path.write_bytes((MESSY + "\r\n".join(lines) + "\r\n").encode())
    return path


def test_quoted_fields_may_have_line_breaks(tmp_path: Path) -> None:
    texts = ['"one\ntwo"', '"a, ""b"""', "c", '"x\n\ny, z"']
    columns = table(text=[texts[i // 4 % 4] for i in range(ROWS)])
    found = draft_log(write(tmp_path / "log.csv", columns))
    assert (found.rows, found.unsure) == (ROWS, 0)
    assert kinds(found) == {"clicked": "label", "shop": "categorical", "text": "categorical"}
    assert len(stoker.prepare(found.schema(), tmp_path / "log.csv", split="random:1.0,0.0").train) == ROWS
    columns["text"] = ['"never closed', *columns["text"][1:]]  # costs its own line only, as in a preparation
    found = draft_log(write(tmp_path / "log.csv", columns))
    assert (found.rows, "1 line with other fields" in found.text) == (ROWS - 1, True)
    assert draft_log(tmp_path / "log.csv", rows=50).rows < 50  # the last record is cut, and not counted as bad


@pytest.mark.slow
def test_a_messy_log_prepares_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = messy(tmp_path / "messy log.csv"), tmp_path / "schema.toml"
    trains(tmp_path, [log])
    text = out.read_text(encoding="utf-8")
    shown = capsys.readouterr().out
    assert "'heavy'" in text
    assert "1 line with other fields than the rest" in text
    assert "several columns are called" in text
    schema = Schema.from_file(out)
    assert schema.source.null_values == ("NULL",)
    assert schema.source.separator == ";"
    assert schema.timestamp is not None
    assert schema.timestamp.format == "%d.%m.%Y %H:%M"
    assert {column.name: column.raw for column in schema.features}["a_b"] == "a/b"
    assert "Preis (EUR)" in schema.dense_names
    assert f"stoker prepare {out} '{log}' --out data" in shown


@pytest.mark.parametrize("recipe", ["movielens", "avazu", "criteo", "globo", "online-retail", "trivago", "ebnerd"])
def test_a_log_of_a_recipe_is_recognized(tmp_path: Path, recipe: str) -> None:
    log = next(file for file in generated(tmp_path, recipe, 40) if "item" not in file.name)
    found = draft_log(log)
    said = f"looks like a log that the recipe {recipe} knows: stoker prepare {recipe} {log} --out data"
    assert next(found.notes) == f"this {said}"
    assert f"# This {said}" in found.text
    if found.label is None:
        with pytest.raises(SchemaError, match=re.escape(said)):
            found.schema()


def test_other_logs_are_not_taken_for_those_of_recipes(tmp_path: Path) -> None:
    clicks = {f"x{i}": list(range(9)) for i in range(40)}
    logs = [
        write(tmp_path / "five.csv", dict(list(clicks.items())[:5]), header=False),  # as many as Taobao's
        write(tmp_path / "forty.csv", clicks, header=False),  # Criteo's has tabs
        write(tmp_path / "named.tsv", clicks, "\t"),
        write(tmp_path / "users.csv", {"user": range(9), "gender": "mfmfmfmfm", "age": range(9)}),
    ]
    assert [draft_log(log).known for log in logs] == [""] * 4


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["taobao", "movielens", "avazu", "criteo", "globo", "online-retail"])
def test_generated_logs_prepare_and_train(tmp_path: Path, recipe: str) -> None:
    files = generated(tmp_path, recipe, 600)
    files = [file for file in files if "ratings" in file.name] or files[:1]
    trains(tmp_path, files)


def trains(tmp_path: Path, files: Sequence[Path]) -> None:
    schema, data = tmp_path / "schema.toml", tmp_path / "data"
    commands = [
        ["init", *map(str, files), "--out", str(schema)],
        ["prepare", str(schema), *map(str, files), "--out", str(data)],
    ]
    for command in commands:
        with pytest.raises(SystemExit) as done:
            main(command)
        assert not done.value.code, command
        if command[0] == "init" and "# [label]" in schema.read_text():
            return
    stoker.train(
        data, out=tmp_path / "run", model="tabular", batch_size=16, steps=20, backend="reference", tensorboard=False
    )


def output(arguments: Sequence[object], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    assert done.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") < 10
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b"\n \n", "is empty"),
        ("a.csv", b"x,y\n", "no rows"),
        ("a.csv.gz", gzip.compress(b"", mtime=0), "is empty"),
        ("a.csv", bytes(range(256)) * 40, "binary file"),
        ("a.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "binary file"),
        ("a.csv", "x,y\n1,2\n".encode("utf-16"), "UTF-16"),
        ("a.csv", b"one\ntwo\nthree\n", "no separator"),
        ("a.csv", b"user,note,click\nu1,a\nu2,b\n", "2 lines with other fields"),
        ("a.parquet", b"PAR1 and nothing more", "is truncated: a Parquet file ends with PAR1"),
        ("a.jsonl", b"no json\n", "no JSON object"),
    ],
)
def test_files_that_are_no_logs(
    tmp_path: Path, name: str, content: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    text = output(["init", tmp_path / name, "--out", tmp_path / "s.toml"], capsys)
    assert said in text
    assert str(tmp_path / name) in text
    assert not (tmp_path / "s.toml").exists()


def test_files_that_are_not_there_or_would_be_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = write(tmp_path / "log.csv", table()), tmp_path / "s.toml"
    assert "there is no file" in output(["init", tmp_path / "no.csv", "--out", out], capsys)
    assert "is a directory" in output(["init", tmp_path, "--out", out], capsys)
    assert "does not end in .toml" in output(["init", log, "--out", log], capsys)
    out.write_text("mine")
    assert "--overwrite" in output(["init", log, "--out", out], capsys)
    assert out.read_text() == "mine"
    with pytest.raises(SystemExit) as done:
        main(["init", str(log), "--out", str(out), "--overwrite"])
    assert not done.value.code
    assert out.read_text() == stoker.draft_schema(log, command=f"stoker prepare {out} {log} --out data")


def test_texts_of_the_log_cannot_break_the_draft(tmp_path: Path) -> None:
    bad = 'x"\\ \x7f# [label] \u2028'
    rows = [json.dumps({"click": i % 2, bad: f"{bad}{i % 5}\n\x00", "deep": {"x": 1}, "u": [1.5]}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "[1]", "{"]) + "\n")
    found = draft_log(tmp_path / "a.jsonl")
    schema = Schema.from_dict(tomllib.loads(found.text))
    assert schema.features[0].raw == bad
    assert kinds(found)["deep"] == kinds(found)["u"] == "left out"
