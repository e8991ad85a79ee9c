"""Features by partitions of their keys, and rows in memory, against all rows at once and rows in files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from campaigns import EFFORT
from test_featured_datasets import SCHEMA, hash_tree, write_log

import stoker
from stoker import features as f
from stoker.prep.features import execute
from stoker.prep.parse.ingest import Source
from stoker.prep.prepare import run_prepare
from stoker.prep.schema import DenseColumn, SplitRule
from stoker.prep.stages.parts import Journal

MORE = (
    f.MeanTargetEncoding(name="both_mean", by=("user", "item"), folds=3),
    f.MeanTargetEncoding(name="three_mean", by=("user", "item", "at_hour"), folds=300, smoothing=0),
    f.CountEncoding(name="both", by=("user", "item")),
    f.Divide(name="share", left="both", right="both_mean"),  # of the row itself, between fitted ones
    f.CountEncoding(name="tags_count", by=("tags",)),
    f.MeanTargetEncoding(name="of_counts", by=("both", "share"), folds=2),
)
ALL = replace(
    SCHEMA,
    feature=(*SCHEMA.feature, *MORE),
    dense=(*SCHEMA.dense, *(DenseColumn(name=feature.name) for feature in MORE)),
)
DROPPED = replace(ALL, split=SplitRule(rule="column", column="user", values={
    "u0": "valid", "u1": "test", "u2": "drop", "u3": "drop", **{f"u{n}": "train" for n in range(4, 9)},
}))  # fmt: skip
NONE_HELD_OUT = replace(ALL, split=SplitRule(rule="hash", train=1.0, valid=0.0, test=0.0))


def in_partitions(patch: pytest.MonkeyPatch, rows: int = 17, few: int = 0) -> None:
    """Let partitions have so many rows; ``few``: keys of a table that is searched anew for each block."""
    patch.setattr(execute, "PARTITION_ROWS", rows)
    patch.setattr(execute, "_FEW_KEYS", few)


SCHEMAS = {"time": ALL, "dropped": DROPPED, "train": NONE_HELD_OUT}
CUTS = list(product(SCHEMAS, [1, 3], [0, 5, 10**6]))
if EFFORT < 1:  # a third of them, with each schema twice, each number of threads and each limit
    CUTS = [cut for number, cut in enumerate(CUTS) if (number + number // 6) % 3 == 0]
elif EFFORT == 1:  # half of them, with each pair of a schema, threads and a limit; `make soak` does all
    CUTS = [cut for number, cut in enumerate(CUTS) if (number // 6 + number // 3 + number % 3) % 2 == 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "threads", "few"),
    [pytest.param(*cut, marks=pytest.mark.slow if number % 2 else ()) for number, cut in enumerate(CUTS)],
)
def test_the_same_bytes_by_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, threads: int, few: int
) -> None:
    schema = SCHEMAS[name]
    write_log(tmp_path / "log.csv", 90)
    run_prepare(schema, tmp_path / "log.csv", out=tmp_path / "whole", threads=threads, block_bytes=2_000)
    used: list[int] = []
    by_key = execute.by_key

    def counted(*given: Any) -> Any:
        used.append(given[-1])
        return by_key(*given)

    monkeypatch.setattr(execute, "by_key", counted)
    in_partitions(monkeypatch, few=few)
    run_prepare(schema, tmp_path / "log.csv", out=tmp_path / "parts", threads=threads, block_bytes=2_000)
    assert set(used) == {17}
    assert hash_tree(tmp_path / "whole") == hash_tree(tmp_path / "parts")
    rows = tmp_path / "rows.csv"
    write_log(rows, 50)
    for made, limit in (("in_parts", 17), ("at_once", 10**6)):
        in_partitions(monkeypatch, limit, few)
        stoker.prepare(None, rows, like=tmp_path / "parts", out=tmp_path / made, history="ignore")
    assert hash_tree(tmp_path / "in_parts") == hash_tree(tmp_path / "at_once")


class Stop(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("first", ["whole", "parts"])
@pytest.mark.parametrize("damage", [False, True])
def test_a_run_goes_on_with_larger_or_smaller_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, damage: bool
) -> None:
    """Above all, no training row is encoded with its own label."""
    write_log(tmp_path / "log.csv", 60)
    settings: dict[str, Any] = {"threads": 1, "block_bytes": 2_000}
    run_prepare(ALL, tmp_path / "log.csv", out=tmp_path / "whole", **settings)
    whole = hash_tree(tmp_path / "whole")
    added, add = 0, Journal.add
    # In less than a whole campaign every second stop; those of the other start are in between.
    for steps in range(5 - damage + 5 * (EFFORT < 1 and first == "parts"), 40, 10 if EFFORT < 1 else 5):
        with monkeypatch.context() as patch:
            added = 0

            def counted(journal: Journal, *given: Any, most: int = steps) -> Any:
                nonlocal added
                added += 1
                if added > most:
                    raise Stop
                return add(journal, *given)

            patch.setattr(Journal, "add", counted)
            if first == "parts":
                in_partitions(patch)
            try:
                run_prepare(ALL, tmp_path / "log.csv", out=tmp_path / "cut", **settings)
                break
            except Stop:
                pass
        if damage:
            for path in sorted((tmp_path / "cut" / ".work" / "passes").glob("*.arrow"))[-1:]:
                path.write_bytes(path.read_bytes()[:-1])
        with monkeypatch.context() as patch:
            if first == "whole":
                in_partitions(patch)
            run_prepare(ALL, tmp_path / "log.csv", out=tmp_path / "cut", overwrite=True, **settings)
        assert hash_tree(tmp_path / "cut") == whole, steps
        stoker.Dataset(tmp_path / "cut").verify()
        shutil.rmtree(tmp_path / "cut")
    assert added > 15


@pytest.mark.slow
def test_rows_in_memory_are_those_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks follow each other in the same memory."""
    write_log(tmp_path / "log.csv", 300)
    names = [f"a user whose name is longer than a view holds, {number}" for number in range(9)]
    text = (tmp_path / "log.csv").read_text()
    for number, name in enumerate(names):
        text = text.replace(f",u{number},", f',"{name}",')
    (tmp_path / "log.csv").write_text(text)
    stoker.prepare(ALL, tmp_path / "log.csv", out=tmp_path / "files")
    blocks = Source.blocks
    monkeypatch.setattr(Source, "blocks", lambda source, _: blocks(source, 2_000))
    data = stoker.prepare(ALL, tmp_path / "log.csv", threads=2)
    data.save(tmp_path / "memory")
    assert hash_tree(tmp_path / "memory") == hash_tree(tmp_path / "files")
