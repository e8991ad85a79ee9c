"""Dates in raw logs: one rule for a column, whatever the blocks, files and threads. Times in the manifest."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared import digests, quarantine, rows_of

import stoker
from stoker import features as f
from stoker.base.errors import DataError, SchemaError
from stoker.dataset.dataset import Dataset
from stoker.dataset.summary import describe_dataset
from stoker.prep.parse.moments import UNKNOWN, check_format, read_moments
from stoker.prep.prepare import StageProgress, run_prepare
from stoker.prep.recipe import Recipe
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SplitRule, Timestamp

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
US = ["10/09/2017", "11/07/2017", "12/01/2017", "10/02/2017"]


def schema(format: str | None = None, **changes: Any) -> Schema:
    values = {
        "label": Label(column="label"), "dense": (DenseColumn(name="row"),),
        "split": SplitRule(rule="time", train=0.5, valid=0.25, test=0.25),
        "timestamp": Timestamp(column="when", type="datetime", format=format),
    }  # fmt: skip
    return Schema(**{**values, **changes})


def log(path: Path, texts: list[str]) -> Path:
    lines = [f'{row % 2},{row},"{text}"' for row, text in enumerate(texts)]
    path.write_text("\n".join(["label,row,when", *lines]) + "\n")
    return path


def splits(out: Path) -> dict[str, list[int]]:
    return {name: [int(row[0]) for row in rows_of(out, name)["dense"]] for name in ("train", "valid", "test")}


def times(out: Path) -> dict[str, Any]:
    found = json.loads((out / "manifest.json").read_text())["splits"]
    return {name: split["time"] for name, split in found.items() if "time" in split}


def micros(moment: datetime) -> int:
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - EPOCH) // timedelta(microseconds=1)


def read(texts: list[str | None], pattern: str | None = None) -> list[int | None]:
    found = read_moments(pl.Series(texts, dtype=pl.String), pattern).tolist()
    return [None if moment == UNKNOWN else moment for moment in found]


@st.composite
def iso(draw: st.DrawFn, years: tuple[int, int] = (1, 9999)) -> str:
    """A date, or a date and time, in one of the forms of ISO 8601."""
    moment = draw(st.datetimes(datetime(years[0], 1, 1), datetime(years[1], 12, 31, 23, 59, 59, 999_999)))
    day = f"{moment:%m-%d}".rjust(5)
    text = f"{moment.year:04d}-{day}" if draw(st.booleans()) else f"{moment.year:04d}{moment:%m%d}"
    if draw(st.integers(0, 4)) == 0:
        return text
    colon = draw(st.sampled_from(["", ":"]))
    clock = [f"{moment:%H}", f"{moment:%M}", f"{moment:%S}"][: draw(st.integers(1, 3))]
    text += draw(st.sampled_from(["T", " "])) + colon.join(clock)
    if len(clock) == 3 and draw(st.booleans()):
        digits = draw(st.integers(1, 6))
        text += draw(st.sampled_from([".", ","])) + f"{moment.microsecond:06d}"[:digits]
        text += draw(st.text("0123456789", max_size=4)) if digits == 6 else ""
    hours, minutes = draw(st.integers(0, 23)), draw(st.integers(0, 59))
    sign = draw(st.sampled_from("+-"))
    zones = ["", "Z", f"{sign}{hours:02d}", f"{sign}{hours:02d}:{minutes:02d}", f"{sign}{hours:02d}{minutes:02d}"]
    return text + draw(st.sampled_from(zones))


@pytest.mark.slow
@given(st.lists(iso(), min_size=1, max_size=20))
@settings(max_examples=scaled(300), deadline=None)
def test_every_form_of_iso_8601_is_read_as_python_reads_it(texts: list[str]) -> None:
    assert read(texts) == [micros(datetime.fromisoformat(text)) for text in texts]


def calendar(text: str) -> str:
    """Return a text whose date may be an ordinal one, which Python does not know, with a calendar date."""
    if not re.match(r"\d{4}-\d{3}(?!\d)", text):
        return text
    return f"{datetime.strptime(text[:8], '%Y-%j').date()}{text[8:]}"


@pytest.mark.slow
@given(iso(), st.data())
@settings(max_examples=scaled(500), deadline=None)
def test_what_python_refuses_is_refused(text: str, data: st.DataObject) -> None:
    """One character is changed, left out or put in."""
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.text("0123456789-+:., TZW/", max_size=2))
    text = text[:at] + other + text[at + data.draw(st.integers(0, 1)) :]
    (found,) = read([text])
    # Python knows the end of a day since 3.14, no leap seconds and no months alone.
    if (
        found is not None
        and not re.fullmatch(r"\d{4}-\d\d", text.strip())
        and "24" not in text[8:]
        and "5960" not in text.replace(":", "")
    ):
        assert found == micros(datetime.fromisoformat(calendar(text.strip())))


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("20170307", datetime(2017, 3, 7)),
        (" 2017-03-07\t", datetime(2017, 3, 7)),
        ("2017-03-07t10:15z", datetime(2017, 3, 7, 10, 15)),
        ("2017-03-07T24:00:00", datetime(2017, 3, 8)),
        ("2017-03-07T10:15:00.123456789", datetime(2017, 3, 7, 10, 15, 0, 123_456)),
        ("2016-02-29T00:00:00-00:30", datetime(2016, 2, 29, 0, 30)),
        ("2017-W10-2", datetime(2017, 3, 7)),
        ("2017W102T10:15", datetime(2017, 3, 7, 10, 15)),
        ("2020-W53-7", datetime(2021, 1, 3)),
        ("2017-066", datetime(2017, 3, 7)),
        ("2017-03", datetime(2017, 3, 1)),
        (" 2016-12 ", datetime(2016, 12, 1)),
        ("2017-W10", datetime(2017, 3, 6)),
        ("2020W53", datetime(2020, 12, 28)),
        ("2016-366T10", datetime(2016, 12, 31, 10)),
        ("2016-12-31T23:59:60Z", datetime(2017, 1, 1)),
        ("2017-01-01T08:59:60.5+09:00", datetime(2017, 1, 1, 0, 0, 0, 500_000)),
    ],
)
def test_iso_forms_by_hand(text: str, moment: datetime) -> None:
    assert read([text, None, text]) == [micros(moment), None, micros(moment)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [*US, "7.3.2017", "Mar 7 2017", "1488880000", "2017-3-7", "2017-0307", "201703-07", "201703", "2017", "2017066",
     "2017-13", "2017-00", "2017-3", "2017-03-", "2017-03T10", "2017-03Z", "2017-03 10:15", "0000-01", "2017-W54",
     "2017-W00", "2017-W10T10", "2017-W10-8", "2017-W53-1", "2017-366", "2017-000", "2017-02-29", "1900-02-29",
     "2017-13-01", "2017-00-01", "2017-01-00", "0000-01-01", "2017-03-07T",
     "2017-03-07T1", "2017-03-07T10:1", "2017-03-07T10:1500", "2017-03-07T1015:00", "2017-03-07T10:15:00.",
     "2017-03-07T24:00:01", "2017-03-07T25:00", "2017-03-07T10:60", "2017-03-07T10:15:60", "2017-03-07T10:15+24",
     "2017-03-07T10:15+02:60", "2017-03-07T10:15+2", "2017-03-07T10:15 +02:00", "2017-03-07T10:15 UTC", "2017-03-07Z",
     "2017-03-07  10:15", "2017-03-07T10:15Z2", "", " ", "２０１７-03-07"],
)  # fmt: skip
def test_what_is_not_iso_8601(text: str) -> None:
    assert read([text]) == [None]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("block_bytes", [40, 300, 2**24])
def test_a_mix_of_forms_splits_by_time_whatever_the_blocks_and_threads(
    tmp_path_factory: pytest.TempPathFactory, threads: int, block_bytes: int
) -> None:
    @given(st.lists(iso((1990, 2030)), min_size=8, max_size=40, unique_by=lambda t: micros(datetime.fromisoformat(t))))
    @settings(max_examples=scaled(32), deadline=None)
    def check(texts: list[str]) -> None:
        folder = tmp_path_factory.mktemp("mix")
        files = [log(folder / "1.csv", texts[:5]), log(folder / "2.csv", texts[5:])]
        out = folder / "out"
        run_prepare(schema(), files, out=out, threads=threads, block_bytes=block_bytes, strict=True)
        moments = np.array([micros(datetime.fromisoformat(text)) for text in texts])
        order, cuts = np.argsort(moments), np.ceil(np.array([0, 0.5, 0.75, 1]) * len(texts)).astype(int)
        names = ["train", "valid", "test"]
        for name, begin, end in zip(names, cuts, cuts[1:], strict=False):
            if begin == end:
                continue
            held, ends = (
                rows_of(out, name),
                [EPOCH + timedelta(microseconds=int(moments[order[i]])) for i in (begin, end - 1)],
            )
            assert len(held["labels"]) == end - begin
            assert times(out)[name] == {
                "first": ends[0].isoformat().replace("+00:00", "Z"), "last": ends[1].isoformat().replace("+00:00", "Z"),
            }  # fmt: skip

    check()


def test_lines_of_another_form_than_the_first_of_their_block_are_read(tmp_path: Path) -> None:
    texts = [
        "2017-03-07T10:15:00.5",
        "2017-03-07",
        "20170308",
        "2017-03-07 09:00",
        "2017-03-09T00:00:00+02:00",
        "20170306",
    ]
    run_prepare(schema(), log(tmp_path / "log.csv", texts), out=tmp_path / "out", strict=True)
    assert splits(tmp_path / "out") == {"train": [1, 3, 5], "valid": [0, 2], "test": [4]}
    assert times(tmp_path / "out") == {
        "train": {"first": "2017-03-06T00:00:00Z", "last": "2017-03-07T09:00:00Z"},
        "valid": {"first": "2017-03-07T10:15:00.500000Z", "last": "2017-03-08T00:00:00Z"},
        "test": {"first": "2017-03-08T22:00:00Z", "last": "2017-03-08T22:00:00Z"},
    }


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("block_bytes", [30, 2**24])
def test_a_column_of_months_splits_by_their_first_days(tmp_path: Path, threads: int, block_bytes: int) -> None:
    texts = ["2017-03", "2016-12", "2017-01", "2017", "2017-04", "201702", "2017-02"]
    raw = log(tmp_path / "log.csv", texts)
    run_prepare(schema(), raw, out=tmp_path / "out", threads=threads, block_bytes=block_bytes)
    assert [(bad["line"], bad["reason"]) for bad in quarantine(tmp_path / "out")] == [
        (5, "column when: '2017' is not a date and time in ISO 8601"),
        (7, "column when: '201702' is not a date and time in ISO 8601"),
    ]
    assert splits(tmp_path / "out") == {"train": [1, 2, 6], "valid": [0], "test": [4]}
    assert times(tmp_path / "out")["train"] == {"first": "2016-12-01T00:00:00Z", "last": "2017-02-01T00:00:00Z"}


def test_a_line_that_is_not_iso_8601_is_a_bad_line(tmp_path: Path) -> None:
    texts = ["10/09/2017", "2017-03-07", "20170308", "yesterday", "2017-03-07 09:00", "1488880000"]
    run_prepare(schema(), log(tmp_path / "log.csv", texts), out=tmp_path / "out")
    assert [(bad["line"], bad["reason"]) for bad in quarantine(tmp_path / "out")] == [
        (2, "column when: '10/09/2017' is not a date and time in ISO 8601"),
        (5, "column when: 'yesterday' is not a date and time in ISO 8601"),
        (7, "column when: '1488880000' is not a date and time in ISO 8601"),
    ]


def test_an_interrupted_run_goes_on_by_the_same_rule(tmp_path: Path) -> None:
    texts = ["2017-03-07T10:15:00.5", "2017-03-07", "20170308", "10/09/2017", "2017-03-07 09:00", "20170306"] * 4
    raw, read_so_far = log(tmp_path / "log.csv", texts), []

    def stop(progress: StageProgress) -> None:
        read_so_far.append(progress.done)
        if len(read_so_far) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="finished steps kept"):
        run_prepare(schema(), raw, out=tmp_path / "out", block_bytes=60, threads=1, progress=stop)
    report = run_prepare(schema(), raw, out=tmp_path / "out", block_bytes=60, threads=3)
    assert report.reused > 0
    run_prepare(schema(), raw, out=tmp_path / "once", threads=1)
    assert digests(tmp_path / "out") == digests(tmp_path / "once")


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("block_bytes", [20, 2**24])
def test_us_dates_without_a_format_stop_with_what_to_write(tmp_path: Path, threads: int, block_bytes: int) -> None:
    raw, out = log(tmp_path / "log.csv", ["", *US * 100]), tmp_path / "new" / "out"
    with pytest.raises(DataError) as caught:
        run_prepare(schema(), raw, out=out, threads=threads, block_bytes=block_bytes)
    assert str(caught.value) == (
        f"{raw}:3: column when: '10/09/2017' is not a date and time in ISO 8601 (2017-03-07, "
        "2017-03-07T10:15:00+02:00), nor are the 399 values after it. Say in [timestamp] of the "
        "schema how the column is written: "
        'format = "%m/%d/%Y" or format = "%d/%m/%Y".'
    )
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "say"),
    [
        (["7.3.2017"], 'format = "%d.%m.%Y" or format = "%m.%d.%Y"'),
        (["9/11/2017", "9/25/2017"], 'format = "%m/%d/%Y".'),
        (["9/11/2017", "9/10/2017"], 'format = "%m/%d/%Y" or format = "%d/%m/%Y".'),
        (["25/09/2017", "9/11/2017"], 'format = "%d/%m/%Y"'),
        (["3/7/17 3:05 PM"], 'format = "%m/%d/%y %I:%M %p" or format = "%d/%m/%y %I:%M %p"'),
        (["Mar 7 2017"], 'format = "%b %d %Y"'),
        (["2017/03/07 10:15:00", "2017/03/08 10:15:00"], 'format = "%Y/%m/%d %H:%M:%S".'),
        (["07/Mar/2017:10:15:00 +0200"], 'format = "%d/%b/%Y:%H:%M:%S %z"'),
        (["2017-03-07 10:15:00 UTC"], 'format = "%Y-%m-%d %H:%M:%S UTC"'),
        (["1488880000", "1488880001"], 'type = "int"'),
        (["1488880000.25"], 'type = "float"'),
        (["14102100", "14103023"], 'format = "%y%m%d%H" or format = "%d%m%Y"'),
        (["20170307101500"], 'format = "%Y%m%d%H%M%S" or type = "int"'),
        (["soon"], 'its format, such as format = "%d.%m.%Y %H:%M"'),
    ],
)
def test_what_the_error_proposes_reads_the_column(tmp_path: Path, values: list[str], say: str) -> None:
    raw = log(tmp_path / "log.csv", values)
    with pytest.raises(DataError) as caught:
        run_prepare(schema(), raw, out=tmp_path / "out")
    assert f"how the column is written: {say}" in str(caught.value)
    if say.startswith('format = "'):
        assert None not in read(values, say.split('"')[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "frame"])
def test_typed_files_are_asked_for_a_format_too(tmp_path: Path, kind: str) -> None:
    raw: Any = pl.DataFrame({"label": [0, 1], "row": [0, 1], "when": [None, 1_488_880_000]})
    if kind != "frame":
        file = tmp_path / f"log.{kind}"
        raw.write_parquet(file) if kind == "parquet" else raw.write_ndjson(file)
        raw = file
    with pytest.raises(DataError, match=r':2: column when: \'1488880000\' is not .* written: type = "int"\.$'):
        stoker.prepare(schema(), raw, out=tmp_path / "out")


def test_times_in_another_notation_are_counted_as_one_reason(tmp_path: Path) -> None:
    raw = log(tmp_path / "log.csv", ["2017-03-07", *(f"{day:02}/09/2017" for day in range(1, 31))])
    with pytest.raises(DataError) as caught:
        run_prepare(schema(), raw, out=tmp_path / "out")
    assert "Commonest: 30 x column when: not a date and time in ISO 8601. Times written" in str(caught.value)
    report = run_prepare(schema("%d/%m/%Y"), raw, out=tmp_path / "out", max_bad="5%")
    assert report.reasons == {"column when: not a date and time in the format '%d/%m/%Y'": 1}
    assert "set format in [timestamp]" in report.remedies[0]


def test_values_of_a_second_file_in_another_notation_are_bad_lines(tmp_path: Path) -> None:
    files = [log(tmp_path / "1.csv", ["2017-03-07", "20170308", "2017-03-09"]), log(tmp_path / "2.csv", US)]
    for threads, block_bytes in ((1, 2**24), (4, 20)):
        out = tmp_path / f"out{threads}"
        run_prepare(schema(), files, out=out, threads=threads, block_bytes=block_bytes)
        assert [bad["line"] for bad in quarantine(out)] == [2, 3, 4, 5]
    assert digests(tmp_path / "out1") == digests(tmp_path / "out4")


@pytest.mark.parametrize("block_bytes", [20, 2**24])
def test_a_format_reads_us_dates_and_trains_on_the_past(tmp_path: Path, block_bytes: int) -> None:
    raw = log(tmp_path / "log.csv", [*US, "2017-03-07", "10/09/17", "13/01/2017"])
    run_prepare(schema("%m/%d/%Y"), raw, out=tmp_path / "out", block_bytes=block_bytes, threads=2)
    assert splits(tmp_path / "out") == {"train": [0, 3], "valid": [1], "test": [2]}
    assert times(tmp_path / "out")["test"] == {"first": "2017-12-01T00:00:00Z", "last": "2017-12-01T00:00:00Z"}
    reasons = [bad["reason"] for bad in quarantine(tmp_path / "out")]
    assert len(reasons) == 3
    assert reasons[0] == "column when: '2017-03-07' is not a date and time in the format '%m/%d/%Y'"


@given(st.lists(st.datetimes(datetime(1971, 1, 1), datetime(2060, 1, 1)), min_size=1, max_size=5), st.data())
@settings(max_examples=scaled(100), deadline=None)
def test_a_format_reads_what_python_writes_with_it(moments: list[datetime], data: st.DataObject) -> None:
    dates = ["%m/%d/%Y", "%d.%m.%y", "%b %d, %Y", "%Y%m%d", "%A, %d %B %Y"]
    clocks = ["", "%H", " %I %p", " %H:%M", "T%H:%M:%S", " %H:%M:%S.%f", " %I:%M:%S %p", " %H:%M %z"]
    pattern = data.draw(st.sampled_from(dates)) + data.draw(st.sampled_from(clocks))
    zone = timezone(timedelta(minutes=data.draw(st.integers(-1439, 1439)))) if "%z" in pattern else UTC
    check_format(pattern)
    texts = [moment.replace(tzinfo=zone).strftime(pattern) for moment in moments]
    assert read(texts, pattern) == [micros(datetime.strptime(text, pattern)) for text in texts]


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("%m/%d", "does not tell a date with its year"),
        ("%H:%M", "does not tell a date with its year"),
        ("%Y-%d", "does not tell a date with its year"),
        ("", "does not tell a date with its year"),
        ("%Y-%m-%d %Q", "cannot be used"),
        ("%d.%m.%Y %H:%M %Z", "names the time zone"),
        ("%d.%m.%Y %H:%M:%S,%f", "has %f without a point before it. Write .%f, or %3f"),
    ],
)
def test_formats_that_would_have_to_be_guessed_are_refused(tmp_path: Path, pattern: str, problem: str) -> None:
    raw = log(tmp_path / "log.csv", ["2017-03-07", "2017-03-08"])
    with pytest.raises(SchemaError) as caught:
        run_prepare(schema(pattern), raw, out=tmp_path / "out")
    assert str(caught.value).startswith(f"timestamp: format {pattern!r} {problem}")
    assert not (tmp_path / "out").exists()
    assert read(["07.03.2017 10:15:00,250"], "%d.%m.%Y %H:%M:%S,%3f") == [
        micros(datetime(2017, 3, 7, 10, 15, 0, 250_000))
    ]


def test_hours_and_minutes_without_zeros_are_read() -> None:
    for pattern, text, moment in (
        ("%Y-%m-%d %H:%-M", "2017-03-07 10:5", datetime(2017, 3, 7, 10, 5)),
        ("%Y-%m-%d %-H", "2017-03-07 9", datetime(2017, 3, 7, 9)),
        ("%Y-%m-%d %X", "2017-03-07 10:05:01", datetime(2017, 3, 7, 10, 5, 1)),
    ):
        check_format(pattern)
        assert read([text], pattern) == [micros(moment)]


@pytest.mark.slow
def test_features_and_datasets_like_another_read_times_by_the_same_rule(tmp_path: Path) -> None:
    texts = [
        "2017-03-07T10:15:00.5",
        "2017-03-07",
        "20170308",
        "2017-03-07 09:00",
        "2017-03-09T00:00:00+02:00",
        "20170306",
    ]
    since = f.SinceLast(name="since", by=("user",), order="when")
    features = schema(
        dense=(DenseColumn(name="row"), DenseColumn(name="since", fill=-1.0)), feature=(since,),
        categorical=(CategoricalColumn(name="user"),),
    )  # fmt: skip
    raw = tmp_path / "log.csv"
    raw.write_text("label,row,user,when\n" + "".join(f'1,{row},u,"{text}"\n' for row, text in enumerate(texts)))
    plain = schema(categorical=(CategoricalColumn(name="user"),))
    for name, chosen in (("plain", plain), ("features", features)):
        run_prepare(chosen, raw, out=tmp_path / name, strict=True, block_bytes=60)
    assert times(tmp_path / "features") == times(tmp_path / "plain") != {}
    assert splits(tmp_path / "features") == splits(tmp_path / "plain")
    order = [5, 1, 3, 0, 2, 4]
    moments = [micros(datetime.fromisoformat(texts[row])) for row in order]
    wanted = dict(zip(order, [-1, *np.diff(moments).tolist()], strict=True))
    held = [row for name in ("train", "valid", "test") for row in rows_of(tmp_path / "features", name)["dense"]]
    assert {int(row[0]): row[1] for row in held} == {row: np.float32(gap) for row, gap in wanted.items()}
    run_prepare(None, raw, out=tmp_path / "like", like=tmp_path / "features", history="ignore")
    assert times(tmp_path / "like") == {"test": {"first": "2017-03-06T00:00:00Z", "last": "2017-03-08T22:00:00Z"}}
    raw.write_text("label,row,user,when\n" + "".join(f"1,{row},u,{text}\n" for row, text in enumerate(US)))
    with pytest.raises(DataError, match=r'log\.csv:2: column when: .* format = "%m/%d/%Y"'):
        run_prepare(features, raw, out=tmp_path / "us")


def test_rows_that_a_recipe_derives_are_read_by_the_same_rule(tmp_path: Path) -> None:
    from stoker.prep.recipe import RawInput

    columns = {"label": "int", "row": "int", "when": "string"}
    given = RawInput(files=("*.csv",), columns=columns)
    recipe = Recipe(
        name="mine", description="mine", presets={"own": schema}, inputs={"log": given},
        derive=lambda frames, _: frames["log"],
    )  # fmt: skip
    run_prepare(
        recipe, log(tmp_path / "log.csv", ["20170308", "2017-03-07", "2017-03-09", "20170310"]), out=tmp_path / "out"
    )
    assert splits(tmp_path / "out") == {"train": [0, 1], "valid": [2], "test": [3]}
    with pytest.raises(DataError, match=r"'10/09/2017' is not a date and time in ISO 8601"):
        run_prepare(recipe, log(tmp_path / "log.csv", US), out=tmp_path / "us")


@pytest.mark.parametrize(
    ("kind", "values", "ends"),
    [
        ("int", ["30", "-10", "20", "40"], {"train": (-10, 20), "valid": (30, 30), "test": (40, 40)}),
        ("float", ["0.5", "-1.25", "-0.5", "9e9"], {"train": (-1.25, -0.5), "valid": (0.5, 0.5), "test": (9e9, 9e9)}),
    ],
)  # fmt: skip
def test_times_of_numbers(tmp_path: Path, kind: str, values: list[str], ends: dict[str, tuple[float, float]]) -> None:
    numbers = schema(timestamp=Timestamp(column="when", type=kind))
    run_prepare(numbers, log(tmp_path / "log.csv", values), out=tmp_path / "out")
    assert times(tmp_path / "out") == {name: {"first": first, "last": last} for name, (first, last) in ends.items()}


def test_rows_that_no_split_has_do_not_count_in_its_times(tmp_path: Path) -> None:
    raw = tmp_path / "log.csv"
    raw.write_text("label,row,when,item\n" + "".join(f"1,{i},201703{i:02d},{'ab'[i == 8]}\n" for i in range(1, 9)))
    drops = schema(categorical=(CategoricalColumn(name="item", oov="drop"),))
    run_prepare(drops, raw, out=tmp_path / "out")
    assert times(tmp_path / "out")["test"] == {"first": "2017-03-07T00:00:00Z", "last": "2017-03-07T00:00:00Z"}
    alone = schema(timestamp=None, split=SplitRule(train=1.0, valid=0.0, test=0.0))
    run_prepare(alone, raw, out=tmp_path / "none")
    assert times(tmp_path / "none") == {}


def test_a_dataset_in_memory_and_one_made_of_another_keep_the_times(tmp_path: Path) -> None:
    raw = log(tmp_path / "log.csv", [f"201703{day:02d}" for day in range(1, 21)])
    with_ids = schema(categorical=(CategoricalColumn(name="item", source="row"),))
    run_prepare(with_ids, raw, out=tmp_path / "out")
    stoker.prepare(with_ids, raw).save(tmp_path / "saved")
    assert digests(tmp_path / "saved") == digests(tmp_path / "out")
    wanted = {name: split.get("time") for name, split in describe_dataset(Dataset(tmp_path / "out"))["splits"].items()}
    assert wanted["train"] == {"first": "2017-03-01T00:00:00Z", "last": "2017-03-10T00:00:00Z"}
    stoker.reorder(tmp_path / "out", tmp_path / "reordered", tables=["item"])
    profile = stoker.profile(Dataset(tmp_path / "out"), device_memory="1KiB", embedding_dim=4, sample=None)
    stoker.classify(tmp_path / "out", profile, tmp_path / "classified")
    for name in ("reordered", "classified"):
        assert times(tmp_path / name) == wanted
