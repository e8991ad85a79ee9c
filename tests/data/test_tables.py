"""Tables and Arrow streams as input: the same rows give the same dataset, however they come."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pytest

import stoker
from stoker.base.errors import ConfigError, DataError
from stoker.prep import inputs
from stoker.prep.parse.nulls import without_nulls
from stoker.prep.prepare import run_prepare
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule, Timestamp
from tests.data.prepared import digests, quarantine

ROWS = 600
MANIFEST = ("manifest.json",)  # it names the input


def schema() -> Schema:
    return Schema(
        name="shop",
        label=Label(column="label"),
        timestamp=Timestamp(column="when", type="datetime"),
        dense=(DenseColumn(name="price", fill="mean"), DenseColumn(name="cost", fill="mean")),
        categorical=(CategoricalColumn(name="item", type="string"), CategoricalColumn(name="day", type="string")),
        sequence=(SequenceColumn(name="seen", type="int", max_length=4),),
        split=SplitRule(rule="hash", train=0.8, valid=0.1, test=0.1),
    )


def arrow() -> pa.Table:
    """Columns of many Arrow types, with nulls and not-a-numbers."""
    number = np.arange(ROWS)
    price = [None if n % 7 == 0 else float("nan") if n % 11 == 0 else n / 4 for n in number]
    start = datetime.datetime(2024, 3, 30, 22, tzinfo=datetime.UTC)
    return pa.table({
        "label": pa.array(number % 2, pa.int8()),
        "when": pa.array([start + n * datetime.timedelta(minutes=1) for n in range(ROWS)],
                         pa.timestamp("ms", "Europe/Oslo")),
        "price": pa.array(price, pa.float32()),
        "cost": pa.array([Decimal(int(n)) / 8 for n in number], pa.decimal128(12, 3)),
        "item": pa.array([None if n % 13 == 0 else f"item {n % 31}" for n in number], pa.string_view()),
        "day": pa.array([("mo", "tu", "we")[n % 3] for n in number], pa.large_string()).dictionary_encode(),
        "seen": pa.array([None if n % 5 == 0 else [int(n % 9), None, int(n % 4)][: n % 4] for n in number],
                         pa.large_list(pa.int32())),
        "empty": pa.nulls(ROWS),
    })  # fmt: skip


def reader(table: pa.Table, sizes: tuple[int, ...]) -> pa.RecordBatchReader:
    def batches() -> Iterator[pa.RecordBatch]:
        at = turn = 0
        while at < table.num_rows:
            size = sizes[turn % len(sizes)]
            yield from table.slice(at, size).to_batches()
            at, turn = at + size, turn + 1

    return pa.RecordBatchReader.from_batches(table.schema, batches())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of the dataset that is prepared from Parquet."""
    folder = tmp_path_factory.mktemp("parquet")
    pl.DataFrame(pl.from_arrow(arrow())).with_columns(pl.col("day").cast(pl.String)).write_parquet(
        folder / "rows.parquet", row_group_size=100
    )
    run_prepare(schema(), folder / "rows.parquet", out=folder / "out")
    return digests(folder / "out", without=MANIFEST)


class Batch:
    """Anything with the interface of one record batch."""

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        return arrow().combine_chunks().to_batches()[0].__arrow_c_array__(requested_schema)


class Capsule:
    """Anything with the Arrow PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return arrow().__arrow_c_stream__(requested_schema)


@pytest.mark.slow
@pytest.mark.parametrize(
    "table",
    [
        arrow,
        Capsule,
        Batch,
        lambda: pl.from_arrow(arrow()),
        lambda: pl.DataFrame(pl.from_arrow(arrow())).lazy(),
        lambda: reader(arrow(), (1, 170, 3)),
        lambda: reader(arrow(), (ROWS,)),
        lambda: pyarrow.dataset.dataset(arrow()),
        lambda: pyarrow.dataset.dataset(arrow()).scanner(batch_size=64),
        lambda: [arrow().slice(0, 400), pl.from_arrow(arrow().slice(400))],
    ],
    ids=("table", "capsule", "array", "polars", "lazy", "batches", "batch", "dataset", "scanner", "list"),
)
def test_tables_and_streams_give_the_bytes_of_a_parquet_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, str], table: Any
) -> None:
    monkeypatch.setattr("stoker.prep.inputs._GROUP_ROWS", 128)
    data = stoker.prepare(schema(), table(), out=tmp_path / "out")
    assert digests(data.path, without=MANIFEST) == expected


def test_a_duckdb_relation_is_a_table(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="the relation is DuckDB's")
    plain = arrow().drop(["when", "empty"]).set_column(5, "seen", arrow()["seen"])
    chosen = Schema(
        name="shop", label=Label(column="label"), dense=(DenseColumn(name="price", fill="mean"),),
        categorical=(CategoricalColumn(name="item", type="string"),),
    )  # fmt: skip
    found = stoker.prepare(chosen, duckdb.sql("select * from plain"), out=tmp_path / "a")
    same = stoker.prepare(chosen, plain, out=tmp_path / "b")
    assert digests(found.path, without=MANIFEST) == digests(same.path, without=MANIFEST)


def test_blocks_do_not_depend_on_the_batches_of_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.prep.inputs._GROUP_ROWS", 100)
    found = set()
    for sizes in ((1, 170, 3), (64,), (ROWS,)):
        with inputs.files_of(reader(arrow(), sizes)) as given:
            (path,) = given.files
            found.add(path.read_bytes())
            groups = pyarrow.parquet.read_metadata(path)
            assert [groups.row_group(n).num_rows for n in range(groups.num_row_groups)] == [100] * 6
    assert len(found) == 1


def test_bad_rows_are_named_by_table_and_row(tmp_path: Path) -> None:
    frame = pl.DataFrame({"label": [0, 1, 1, 0] * 30, "price": [*["1.5"] * 118, "dear", "2"], "item": ["a"] * 120})
    chosen = Schema(
        name="shop", label=Label(column="label"), dense=(DenseColumn(name="price", fill="mean"),),
        categorical=(CategoricalColumn(name="item", type="string"),),
    )  # fmt: skip
    data = stoker.prepare(chosen, frame, out=tmp_path / "out")
    (bad,) = quarantine(data.path)
    assert (bad["file"], bad["line"]) == ("polars.DataFrame", 119)
    with pytest.raises(DataError, match=r"^polars\.DataFrame 2:119: column price: 'dear' is not a number"):
        stoker.prepare(chosen, [frame.head(100), frame], out=tmp_path / "strict", strict=True)
    with pytest.raises(DataError, match=r"^polars\.DataFrame has no column 'item'"):
        stoker.prepare(chosen, frame.drop("item"))


def test_a_finished_dataset_is_known_again_by_the_rows_of_its_table(tmp_path: Path) -> None:
    def prepared(table: pa.Table) -> bool:
        with inputs.files_of(reader(table, (100,))) as given:
            return run_prepare(schema(), given, out=tmp_path / "out").already

    assert not prepared(arrow())
    assert prepared(arrow())
    with pytest.raises(DataError, match="already holds a dataset"):
        prepared(arrow().slice(1))


@pytest.mark.slow
def test_an_interrupted_preparation_is_not_resumed_with_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, str]
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("stoker.prep.prepare.publish", stop)
        for table in (arrow().slice(300), arrow()):
            with pytest.raises(KeyboardInterrupt, match="kept"):
                stoker.prepare(schema(), table, out=tmp_path / "out")
    with inputs.files_of(arrow()) as given:
        report = run_prepare(schema(), given, out=tmp_path / "out")
    assert report.reused, "the same rows"
    assert digests(tmp_path / "out", without=MANIFEST) == expected
    with monkeypatch.context() as patch:
        patch.setattr("stoker.prep.prepare.publish", stop)
        with pytest.raises(KeyboardInterrupt):
            stoker.prepare(schema(), arrow().slice(300), out=tmp_path / "other")
    with inputs.files_of(arrow()) as given:
        assert not run_prepare(schema(), given, out=tmp_path / "other").reused
    assert digests(tmp_path / "other", without=MANIFEST) == expected


def test_rows_of_a_table_are_prepared_like_a_dataset(tmp_path: Path) -> None:
    data = stoker.prepare(schema(), arrow(), out=tmp_path / "out")
    new = stoker.prepare(files=reader(arrow().drop(["label"]), (100,)), like=data)
    assert len(new.test) == ROWS
    assert new.test.labelled == 0


def test_a_recipe_that_tells_its_files_by_name_wants_files() -> None:
    with pytest.raises(
        ConfigError, match=r"recipe movielens reads several files and .*Pass files, not tables such as po"
    ):
        stoker.prepare("movielens", pl.DataFrame({"a": [1]}))


@pytest.mark.slow
def test_a_recipe_of_one_log_takes_a_table(tmp_path: Path) -> None:
    log = Path("data/online_retail/invoices.parquet")
    frame = pl.read_parquet(log).head(3000)
    frame.write_parquet(tmp_path / "log.parquet")
    run_prepare("online-retail", tmp_path / "log.parquet", out=tmp_path / "a")
    data = stoker.prepare("online-retail", frame, out=tmp_path / "b")
    assert digests(data.path, without=MANIFEST) == digests(tmp_path / "a", without=MANIFEST)


def test_what_is_wrong_with_a_table_is_said_in_one_message(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas", reason="object columns are pandas'")
    with pytest.raises(DataError, match=r"its column 'x' holds values of several types \(int, str\)"):
        stoker.prepare(schema(), pd.DataFrame({"x": ["a", 1, None]}))
    with pytest.raises(DataError, match=r"pandas\.DataFrame cannot be read: .*uplicate column names"):
        stoker.prepare(schema(), pd.DataFrame([[1, 2]], columns=["a", "a"]))
    twice = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(DataError, match=r"pyarrow\.RecordBatchReader cannot be read: .*more than once"):
        stoker.prepare(schema(), pa.RecordBatchReader.from_batches(twice.schema, [twice]))
    with pytest.raises(ConfigError, match="files mixes tables and paths"):
        stoker.prepare(schema(), [arrow(), "rows.parquet"])
    with pytest.raises(ConfigError, match=r"an object of type (generator|map)\. .*pass sorted.*from_batches"):
        stoker.prepare(schema(), tmp_path.glob("*.parquet"))  # type: ignore[arg-type]
    used = reader(arrow(), (ROWS,))
    used.read_all()
    with pytest.raises(
        DataError, match=r"no usable row in pyarrow.RecordBatchReader\. A stream gives its rows only once"
    ):
        stoker.prepare(schema(), used)


@pytest.mark.parametrize(
    ("column", "kind", "said"),
    [
        (pl.Series([{"a": 1, "b": "z"}] * 9), "categorical", r"holds Struct\(.*Make columns of its fields"),
        (pl.Series([[{"a": 1}]] * 9), "sequence", r"holds List\(Struct\(.*Make columns of its fields"),
        (pl.Series([[[1]]] * 9), "sequence", r"holds List\(List\(.*Make columns of its fields"),
        (pl.Series([2**63 + n for n in range(9)], dtype=pl.UInt64), "categorical", 'within 64 bits.* type = "string"'),
        (pl.Series([2**70 + n for n in range(9)], dtype=pl.Int128), "categorical", 'within 64 bits.* type = "string"'),
    ],
    ids=("struct", "structs", "lists", "uint64", "int128"),
)
def test_columns_that_are_no_values_of_a_type(column: pl.Series, kind: str, said: str) -> None:
    frame = pl.DataFrame({"label": [0, 1, 0] * 3, "x": column})
    with pytest.raises(DataError, match=said):
        stoker.prepare(Schema.from_dict({"label": "label", kind: [{"name": "x", "type": "int"}]}), frame)


def test_an_error_of_a_stream_is_not_swallowed() -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield from arrow().to_batches()
        raise RuntimeError("the query failed")

    with pytest.raises(RuntimeError, match="the query failed"):
        stoker.prepare(schema(), pa.RecordBatchReader.from_batches(arrow().schema, broken()))


def test_a_draft_of_a_table_reads_its_first_rows_only() -> None:
    taken = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(1000):
            taken.append(number)
            yield from pa.table({"label": [0, 1] * 50, "item": ["a", "b"] * 50}).to_batches()

    first = next(batches())
    text = stoker.draft_schema(pa.RecordBatchReader.from_batches(first.schema, batches()), rows=100)
    assert "100 rows of pyarrow.RecordBatchReader, not all of its rows" in text
    assert 'stoker.prepare("schema.toml", frame, out="data")' in text
    assert "kind" not in text, "the format of the temporary file is nobody's concern"
    assert len(taken) < 500
    assert 'column = "label"' in text


@pytest.mark.parametrize("kind", [pl.Decimal(10, 2), pl.Float32, pl.Float64])
def test_numbers_that_mean_missing_are_found_whatever_their_type(kind: Any) -> None:
    prices = pl.Series([1.5, -99.9, -99.91, -1, None]).cast(kind)
    found = without_nulls(prices, ["NA", "-99.9", "-1", "1.504"], "float")
    assert found.is_null().to_list() == [False, True, False, True, True]
    assert found.dtype == kind
