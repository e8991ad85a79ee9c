"""``prepare(like=, grow=True)``: new values get ids after those that are there, which remain what they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.base.errors import ConfigError
from stoker.prep.schema import Schema

KINDS: dict[str, Any] = {
    "string": st.sampled_from([f"v{n}" for n in range(12)]),
    "int": st.integers(-4, 8),
    "hex": st.sampled_from(["0", "a", "ffffffffffffffff", "8000000000000000", "10", "7"]),
}
ALL = {"rule": "hash", "train": 1.0, "valid": 0.0, "test": 0.0}


def vocabulary(path: Path, table: str = "c") -> list[Any]:
    return pl.read_parquet(path / "vocab" / f"{table}.parquet")["value"].to_list()


def ids(path: Path) -> list[int]:
    return [int(each) for batch in stoker.Dataset(path).test.batches(64) for each in batch.ids.view(-1)]


@pytest.mark.slow
@settings(max_examples=scaled(20), deadline=None)
@given(data=st.data())
def test_a_vocabulary_grows_as_a_dictionary_would(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("grow")
    kind, least = data.draw(st.sampled_from(list(KINDS))), data.draw(st.integers(1, 3))
    days = data.draw(st.lists(st.lists(KINDS[kind], min_size=1, max_size=30), min_size=2, max_size=4))
    column = {"name": "c", "type": kind, "min_count": least}
    schema = Schema.from_dict({"name": "x", "label": "y", "categorical": [column], "split": ALL})
    logs = [pl.DataFrame({"y": [n % 2 for n in range(len(day))], "c": day}) for day in days]
    stoker.prepare(schema, logs[0], out=folder / "0", threads=1)
    known = vocabulary(folder / "0")
    read = (lambda value: int(value, 16)) if kind == "hex" else (lambda value: value)
    for number, day in enumerate(days[1:], 1):
        before = folder / str(number - 1)
        stoker.prepare(files=logs[number], like=before, grow=True, out=folder / str(number), threads=1)
        counts = Counter(map(read, day))
        new = [value for value in counts if value not in known and counts[value] >= least]
        known += sorted(new, key=lambda value: (-counts[value], value))
        made = folder / str(number)
        assert vocabulary(made) == known
        assert ids(made) == [known.index(value) + 1 if value in known else 0 for value in map(read, day)]
        data_ = stoker.Dataset(made)
        assert data_.schema.num_embeddings["c"] == len(known) + 1 == len(data_.counts["c"])
        data_.verify()


def test_hashed_columns_sequences_and_shared_tables(tmp_path: Path) -> None:
    schema = Schema.from_dict(
        {
            "name": "x", "label": "y", "split": ALL,
            "categorical": [{"name": "item", "type": "int"}, {"name": "h", "type": "int", "hash_buckets": 7}],
            "sequence": [{"name": "seen", "type": "int", "table": "item", "max_length": 3}],
        }
    )  # fmt: skip
    first = pl.DataFrame({"y": [0, 1], "item": [1, 2], "h": [1, 2], "seen": [[1], [2, 1]]})
    later = pl.DataFrame({"y": [0, 1], "item": [9, 2], "h": [5, 6], "seen": [[8, 9], [1, 8]]})
    stoker.prepare(schema, first, out=tmp_path / "a")
    stoker.prepare(files=later, like=tmp_path / "a", grow=True, out=tmp_path / "b")
    assert vocabulary(tmp_path / "b", "item") == [1, 2, 8, 9]
    sizes = stoker.Dataset(tmp_path / "b").schema.num_embeddings
    assert sizes == {"item": 5, "h": stoker.Dataset(tmp_path / "a").schema.num_embeddings["h"]}


def test_grow_needs_like(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name it with like"):
        stoker.prepare("criteo", tmp_path / "x", out=tmp_path / "y", grow=True)
