"""Values that mean missing are the same in texts and in every type: logs, frames, JSON, Parquet, requests."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import stoker
from stoker.prep.like import Like
from stoker.prep.parse.frames import Field, frame_block
from stoker.prep.parse.json_lines import parsed
from stoker.prep.requests import FittedSchema, RowEncoder


def read(values: Any, kind: str, nulls: list[str], **more: Any) -> list[Any]:
    """Return a column as :func:`frame_block` reads it."""
    item = Field(column="a", kind=kind, **more)
    block = frame_block(pl.DataFrame({"a": values}), [item], typed=True, nulls=nulls)
    assert not block.bad
    return block.columns[item].to_list()


@pytest.mark.parametrize("nulls", [["-1"], ["-1.0"], ["NA", "-1.00"]])
@pytest.mark.parametrize("kind", ["float", "int", "string"])
def test_a_number_is_missing_in_every_type(nulls: list[str], kind: str) -> None:
    numbers: list[Any] = [
        pl.Series([-1, 2]), pl.Series([-1.0, 2.0]), pl.Series([-1, 2], dtype=pl.Float32),
        pl.Series([-1, 2], dtype=pl.Int8), pl.Series([Decimal("-1.00"), Decimal("2.00")]),
        pl.Series(["-1", "2"]), pl.Series(["-1.0", "2"]), pl.Series(["-1.00", "2"]),
        pl.Series(["-1", "2"], dtype=pl.Categorical), pl.Series([b"-1", b"2"]),
    ]  # fmt: skip
    for values in numbers:
        assert read(values, kind, nulls) == [None, "2" if kind == "string" else 2], values.dtype


def test_numbers_mean_missing_as_the_schema_reads_them() -> None:
    assert read(pl.Series([10, 16], dtype=pl.UInt64), "hex", ["10"]) == [10, None], "as the text 10 of the log"
    assert read(pl.Series(["10", "0010", "16"]), "hex", ["10"]) == [None, None, 22]
    assert read(pl.Series([0.1, 2], dtype=pl.Float32), "float", ["0.1"]) == [None, 2]
    assert read(pl.Series(["1.234,0", "1,234"]), "float", ["1.234"], decimal=",") == [None, 1.234]
    assert read(pl.Series([1234.0, 1.234]), "float", ["1.234"], decimal=",") == [None, 1.234]
    assert read(pl.Series([2**63, 2**64 - 1], dtype=pl.UInt64), "string", [str(2**63)]) == [None, str(2**64 - 1)]
    assert read(pl.Series([0, 1]), "int", ["-1", str(2**70), "x"]) == [0, 1]


def test_values_that_mean_missing_may_fit_no_number_of_a_column() -> None:
    """Texts, fractions, exponents, and numbers beyond a type: each means what it can, and fails nowhere."""
    nulls = ["NA", "1.5", "1e3", "-1", "300", str(2**63), str(2**70)]
    assert read(pl.Series([1000, 15, 300, -1]), "int", nulls) == [None, 15, None, None]
    assert read(pl.Series([1, 0], dtype=pl.UInt8), "int", nulls) == [1, 0]
    assert read(pl.Series([2**63, 5], dtype=pl.UInt64), "int", nulls) == [None, 5]
    assert read(pl.Series(["1.50", "7.50", "2"]), "int", ["1.50", "7.50"]) == [None, None, 2]
    assert read(pl.Series([10, 0x300], dtype=pl.UInt64), "hex", nulls) == [10, None]
    assert read(pl.Series([1000.0, 1.5, 15.0]), "float", nulls, decimal=",") == [None, None, 15.0]
    assert read(pl.Series(["1000", "1e3", "1E3"]), "string", nulls) == [None, None, "1E3"]


def test_a_text_with_zeros_before_it_is_no_number() -> None:
    """A missing zip code is no missing price."""
    assert read(pl.Series(["00000", "0"]), "string", ["00000"]) == [None, "0"]
    assert read(pl.Series(["01.00", "1.00.00", "1.001", "1.10"]), "string", ["1", "1.1"]) == [
        "01.00", "1.00.00", "1.001", None
    ]  # fmt: skip
    assert read(pl.Series(["00000", "0"]), "float", ["00000"]) == [None, 0]
    assert read(pl.Series([0, 1]), "float", ["00000"]) == [0, 1]


def test_times_are_no_numbers() -> None:
    times = pl.Series([0, 1]).cast(pl.Datetime("us"))
    assert read(times, "datetime", ["0", "1"]) == [0, 1]
    assert read(pl.Series(["2020", "0"]), "datetime", ["0"]) == ["2020", None]


def test_a_list_of_one_such_value_is_empty() -> None:
    seen: dict[str, Any] = {"separator": "|", "max_length": 1}
    for values in ([[-1], [-1, 2], [2], None], ["-1", "-1|2", "2", None], [["-1.0"], ["-1", "2"], ["2"], []]):
        assert read(pl.Series(values), "string", ["-1"], **seen) == [[], ["2"], ["2"], []]
    assert read(pl.Series([["NA"], ["3"]]), "int", ["NA"], **seen) == [[], [3]]


SCHEMA = {
    "label": "label", "source": {"null_values": ["NA", "-1", "7.0"]}, "keep": ["whole", "text"],
    "categorical": [{"name": "text", "missing": "category"}, {"name": "hashed", "hash_buckets": 9, "source": "text"},
                    {"name": "whole", "type": "int", "missing": "category"}],
    "dense": [{"name": "price", "null_flag": True, "fill": 0.25}],
    "sequence": [{"name": "seen"}],
}  # fmt: skip


@pytest.mark.slow
def test_logs_frames_and_requests_agree(tmp_path: Path) -> None:
    draws = np.random.default_rng(0).integers(-1, 9, (200, 4)).tolist()
    rows = pl.DataFrame({
        "label": [first % 2 for first, *_ in draws], "text": [float(each[0]) for each in draws],
        "whole": [each[1] for each in draws], "price": [float(each[2]) for each in draws],
        "seen": [[each[3]] if each[3] < 4 else [each[3], each[0]] for each in draws],
    })  # fmt: skip
    texts = rows.with_columns(pl.col("text").cast(pl.Int64), pl.col("seen").cast(pl.List(pl.String)).list.join("|"))
    texts.write_csv(tmp_path / "log.csv")
    rows.with_columns(pl.col("whole").cast(pl.Float32)).write_parquet(tmp_path / "new.parquet")
    rows.write_ndjson(tmp_path / "new.jsonl")
    data = stoker.prepare(stoker.Schema.from_dict(SCHEMA), tmp_path / "log.csv", out=tmp_path / "data")
    found = [
        stoker.prepare(files=files, like=data, out=tmp_path / f"new-{number}").test
        for number, files in enumerate([tmp_path / "log.csv", tmp_path / "new.parquet", tmp_path / "new.jsonl", rows])
    ]
    [wanted] = found[0].batches(200)
    assert wanted.offsets is not None
    assert any(price == 0.25 for price in wanted.dense[:, 0].tolist())
    batches = [next(iter(each.batches(200))) for each in found[1:]]
    encoder = RowEncoder(FittedSchema.of(Like(data.path)))
    given = rows.drop("label")
    batches += [encoder.encode(given), encoder.from_objects(parsed(json.dumps(given.to_dicts()).encode()))]
    for batch in batches:
        assert batch.offsets is not None
        assert batch.ids.tolist() == wanted.ids.tolist()
        assert batch.offsets.tolist() == wanted.offsets.tolist()
        assert batch.dense.tolist() == wanted.dense.tolist()
    kept = [pl.DataFrame(each.kept.read()).cast({"whole": pl.Int64}) for each in found if each.kept is not None]
    assert len(kept) == 4
    for each in kept:
        assert each["whole"].to_list() == kept[0]["whole"].to_list()
        assert each["text"].cast(pl.Float64).to_list() == kept[0]["text"].cast(pl.Float64).to_list()


@pytest.mark.parametrize("kind", ["string", "int"])
def test_an_empty_text_in_a_list_is_no_value_as_between_separators(kind: str) -> None:
    """A bag of 1 and of an unknown value is another one."""
    texts = ["1||2", "", None, "|3", "1|2"]
    lists = [["1", "", None, "2"], [""], None, [None, "", "3"], ["", "1", "2"]]
    more: dict[str, Any] = {"separator": "|", "max_length": 2, "keep": "first"}
    wanted = read(pl.Series(texts), kind, [], **more)
    assert wanted == [[str(one) if kind == "string" else one for one in each] for each in ([1, 2], [], [], [3], [1, 2])]
    assert read(pl.Series(lists), kind, [], **more) == wanted
    for inner in (pl.Categorical, pl.Enum(["1", "", "2", "3"])):
        assert read(pl.Series(lists, dtype=pl.List(inner)), kind, [], **more) == wanted
    coded = [None if each is None else [None if one is None else one.encode() for one in each] for each in lists]
    assert read(pl.Series(coded, dtype=pl.List(pl.Binary)), kind, [], **more) == wanted
