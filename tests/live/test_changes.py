"""Names and records of updates, without a run."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from stoker.base.errors import CheckpointError
from stoker.live.journal import KnownLog, Log, Order, _hash
from stoker.training.files.rundir import RunDirectory


def test_equal_orders_are_equal_as_json() -> None:
    order = Order(1, (Log("a.csv", 3, "x"),), {"rate": 1.0})
    assert order.to_dict() == {
        "number": 1, "logs": [{"name": "a.csv", "bytes": 3, "sha256": "x"}], "settings": {"rate": 1.0}
    }  # fmt: skip


def test_a_known_beginning_is_found(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"abc")
    log, length, found = _hash(path, "log", {})
    assert (log.bytes, length, log.text, found) == (3, 3, "", {})
    digest = log.sha256
    path.write_bytes(b"abcdef")
    known = {size: {digest: KnownLog(shown, "log.gz")} for size, shown in ((3, "a"), (4, "b"), (9, "c"))}
    assert _hash(path, "log", known)[2] == {3: "a"}
    path.write_bytes(gzip.compress(b"abcdef"))
    assert _hash(path, "log", known)[1:] == (6, {3: "a"})
    assert _hash(path, "log2", known)[1:] == (6, {}), "equal rows of another log"
    empty = _hash(Path("/dev/null"), "", {})[0].sha256
    assert _hash(path, "log", {0: {empty: KnownLog("a", "log")}})[2] == {}, "an empty log is the beginning of all"
    path.write_bytes(b"abcdef")
    one = {3: {digest: KnownLog("a", "other", one_row=True)}}
    assert _hash(path, "log", one)[2] == {}, "of one row"
    assert _hash(path, "other", one)[2] == {3: "a"}, "which has grown"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"checkpoint": "../../elsewhere"}'])
def test_a_damaged_head_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "head.json").write_text(text)
    with pytest.raises(CheckpointError, match="garbled"):
        RunDirectory(tmp_path).head()
