"""Prepared output equals a naive reference of the rules, on random small logs with bad lines in them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import naive_prepare
import numpy as np
import pytest
from campaigns import scaled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepared import counts, quarantine, rows_of, vocabulary

from stoker.base.errors import DataError
from stoker.prep.fit.split_rules import _update_latest
from stoker.prep.prepare import run_prepare
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule, Timestamp
from stoker.prep.source_format import SourceFormat

NAMES = ["label", "price", "size", "item", "code", "user", "when", "set", "past"]

numbers = st.one_of(
    st.integers(-5, 30).map(str),
    st.floats(-1e6, 1e6, allow_nan=False).map(repr),
    st.sampled_from(["", "", "0.5", "-0.25", "1e3", "123456789012345678", ".5", "7.", "0.1", "+3", "1E-2"]),
)
broken = st.sampled_from(["x", "1.2.3", "nan", "inf", "--1", "1e", "0x1f", "1_0", "é", "1e999", "12345678901234567890"])
items = st.sampled_from(["a", "b", "c", "dd", "é", "Ω1", "long text with spaces", ""])
codes = st.sampled_from(["0", "00", "ff", "FF", "80000000", "ffffffffffffffff", "1f", "", "deadbeef"])
users = st.integers(-3, 6).map(str)
lists = st.lists(st.sampled_from(["1", "2", "30", "-4", "5"]), max_size=5).map("|".join)


@st.composite
def a_line(draw: st.DrawFn) -> bytes:
    fields = [
        draw(st.sampled_from(["0", "1", "2", "5", "3.5"])), draw(numbers), draw(numbers), draw(items),
        draw(codes), draw(users), str(draw(st.integers(0, 9))), draw(st.sampled_from(["tr", "va", "te"])),
        draw(lists),
    ]  # fmt: skip
    fault = draw(st.sampled_from(["", "", "", "", "", "few", "many", "value", "utf8", "blank", "gap", "list"]))
    if fault == "few":
        fields.pop()
    elif fault == "many":
        fields.append("")
    elif fault == "value":
        fields[draw(st.sampled_from([0, 1, 2, 4, 6]))] = draw(broken)
    elif fault == "gap":
        fields[draw(st.sampled_from([0, 6, 5]))] = ""
    elif fault == "list":
        fields[8] = "1|x|2"
    line = ",".join(fields).encode()
    if fault == "utf8":
        line = line.replace(b",", b",\xff", 1)
    if fault == "blank":
        line = b""
    return line + draw(st.sampled_from([b"", b"", b"\r"]))


@st.composite
def a_schema(draw: st.DrawFn) -> Schema:
    rule = draw(st.sampled_from(["runs", "time", "column", "leave_last_out"]))
    split = {
        "runs": SplitRule(rule="runs", runs=draw(st.integers(2, 4))),
        "time": SplitRule(rule="time", train=0.5, valid=0.25, test=0.25),
        "column": SplitRule(rule="column", column="set", values={"tr": "train", "va": "valid", "te": "test"}),
        "leave_last_out": SplitRule(rule="leave_last_out", column="user", min_rows=draw(st.integers(1, 4))),
    }[rule]
    fill = draw(st.sampled_from([0.0, -1.5, "mean", "median"]))
    transforms = draw(st.sampled_from([(), ("log1p",), ("zscore",), ("log1p", "minmax")]))
    shared = draw(st.booleans())
    missing = draw(st.sampled_from(["oov", "category"]))
    return Schema(
        label=Label(column="label", rule=draw(st.sampled_from([">= 3", ">= 3", None]))),
        dense=(
            DenseColumn(name="price", fill=fill, transforms=transforms),
            DenseColumn(name="size", clip_min=draw(st.sampled_from([None, 0.0])), clip_max=20.0),
        ),
        categorical=(
            CategoricalColumn(name="item", min_count=draw(st.integers(1, 3)), missing=missing),
            CategoricalColumn(
                name="code", type="hex", modulo=draw(st.sampled_from([None, 7, 10**6])), fill=0
            ),
            CategoricalColumn(name="user", type="int", table="shared" if shared else None, missing=missing),
        ),
        sequence=(
            SequenceColumn(
                name="past", type="int", table="shared" if shared else None,
                max_length=draw(st.integers(1, 6)),
                keep=draw(st.sampled_from(["last", "first"])),
            ),
        ) if draw(st.booleans()) else (),
        split=split,
        timestamp=Timestamp(column="when"),
        source=SourceFormat(kind="csv", separator=",", columns=tuple(NAMES), quote=None),
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=scaled(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    schema=a_schema(),
    lines=st.lists(a_line(), min_size=1, max_size=40),
    ended=st.booleans(),
    block_bytes=st.sampled_from([64, 300, 2**20]),
    threads=st.sampled_from([1, 3]),
)
def test_prepared_equals_the_naive_reference(
    schema: Schema, lines: list[bytes], ended: bool, block_bytes: int, threads: int
) -> None:
    if lines[-1].rstrip(b"\r") == b"" and not ended:
        lines = [*lines, b"0,1,1,a,0,1,1,tr,1"]
    expected = naive_prepare.prepare(schema, NAMES, lines, ",")
    with tempfile.TemporaryDirectory() as place:
        raw, out = Path(place) / "log.csv", Path(place) / "out"
        raw.write_bytes(b"\n".join(lines) + (b"\n" if ended else b""))

        def run() -> Any:
            return run_prepare(schema, raw, out=out, max_bad="100%", block_bytes=block_bytes, threads=threads)

        if not expected["splits"]["train"]["labels"]:
            with pytest.raises(DataError, match=r"no usable row|no training row"):
                run()
            return
        report = run()
        assert [entry["line"] for entry in quarantine(out)] == expected["bad"]
        assert {entry["file"] for entry in quarantine(out)} <= {str(raw)}
        assert report.bad == len(expected["bad"])
        for split, wanted in expected["splits"].items():
            found = rows_of(out, split)
            assert found["labels"] == wanted["labels"]
            assert found["bags"] == wanted["bags"]
            if wanted["labels"]:
                np.testing.assert_allclose(found["dense"], wanted["dense"], rtol=2e-6, atol=1e-6)
        found_counts = counts(out)
        for table, entries in expected["vocabularies"].items():
            assert vocabulary(out, table) == entries
            assert found_counts[table] == [expected["unknown"][table], *(n for _, n in entries)]


@settings(deadline=None)
@given(
    parts=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-(2**63), -1, 0, 5])), max_size=8), max_size=5
    )
)
def test_the_two_latest_rows_of_users_over_parts(parts: list[list[tuple[int, int]]]) -> None:
    times, rows = np.full((2, 4), np.iinfo(np.int64).min), np.full((2, 4), -1, np.int64)
    seen: list[list[tuple[int, int]]] = [[] for _ in range(4)]
    start = 0
    for part in parts:
        for place, (user, time) in enumerate(part):
            seen[user].append((time, start + place))
        users, when = np.array(part, np.int64).reshape(-1, 2).T
        _update_latest(users, when, start + np.arange(len(part)), times, rows)
        start += len(part)
    for user, found in enumerate(seen):
        expected = [(-(2**63), -1)] * 2 + sorted(found)
        assert list(zip(times[:, user].tolist(), rows[:, user].tolist(), strict=True)) == expected[-2:]
