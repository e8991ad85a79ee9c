"""Names and records of updates, without a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.base.errors import CheckpointError
from stoker.live.journal import Log, Order, _hash
from stoker.training.files.rundir import RunDirectory


def test_equal_orders_are_equal_as_json() -> None:
    order = Order(1, (Log("a.csv", 3, "x"),), {"rate": 1.0})
    assert order.to_dict() == {
        "number": 1, "logs": [{"name": "a.csv", "bytes": 3, "sha256": "x"}], "settings": {"rate": 1.0}
    }  # fmt: skip


def test_a_known_beginning_is_found(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"abc")
    size, digest, found = _hash(path, {})
    assert (size, found) == (3, {})
    path.write_bytes(b"abcdef")
    assert _hash(path, {3: {digest: "a"}, 4: {digest: "b"}, 9: {digest: "c"}})[2] == {3: "a"}
    assert _hash(path, {0: {_hash(Path("/dev/null"), {})[1]: "a"}})[2] == {}, "an empty log is the beginning of all"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"checkpoint": "../../elsewhere"}'])
def test_a_damaged_head_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "head.json").write_text(text)
    with pytest.raises(CheckpointError, match="garbled"):
        RunDirectory(tmp_path).head()
