"""A character of a manifest that changes is found when the manifest is read, before it changes a number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.base.errors import ConfigError, StokerError
from stoker.base.files import seal, unseal
from stoker.live.journal import Order, opened
from stoker.serve.export import open_export
from stoker.testing import make_daily_run
from stoker.training.files import checkpoint
from stoker.training.files.rundir import RunDirectory

#: file of a run -> what its readers find in it
READERS: dict[str, Callable[[Path], Any]] = {
    "run-data/manifest.json": lambda file: stoker.Dataset(file.parent).manifest,
    "run/checkpoints/update_000001/manifest.json": lambda file: checkpoint.chain(file.parent)[-1].manifest,
    "run/config.json": lambda file: RunDirectory(file.parent).config(),
    "run/report.json": lambda file: RunDirectory(file.parent).read("report.json"),
    "run/update.json": lambda file: RunDirectory(file.parent).read("update.json"),
    "run/head.json": lambda file: RunDirectory(file.parent).head(),
    "run/updates.jsonl": lambda file: RunDirectory(file.parent).updates(),
    "served/manifest.json": lambda file: open_export(file.parent)[2],
}


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one update, its dataset and its export."""
    top = tmp_path_factory.mktemp("top")
    [log] = make_daily_run(top / "run", days=1)
    stoker.update(top / "run", log)
    stoker.export(top / "run", top / "served")
    with opened(top / "run") as journal:
        journal.begin(Order(2, (), {"rate": 0.25}))
    return top


def known(found: Any, wanted: Any) -> Any:
    """Return the values without a key that was the seal."""
    if isinstance(wanted, list):
        return [known(*pair) for pair in zip(found, wanted, strict=True)]
    return {name: found.get(name) for name in wanted}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_each_altered_byte_is_an_error_or_changes_nothing(top: Path, name: str) -> None:
    file = top / name
    whole, read = file.read_bytes(), READERS[name]
    wanted = read(file)
    assert b'"sha256": "' in whole or b'"sha256":"' in whole
    unnoticed = 0
    try:
        for place in range(len(whole)):
            altered = bytearray(whole)
            altered[place] ^= 1 << place % 8
            file.write_bytes(altered)
            message = ""
            try:
                found = read(file)
            except StokerError as error:
                message = str(error)
            if message:
                assert file.name in message or file.parent.name in message
            else:
                assert known(found, wanted) == wanted
                unnoticed += 1
    finally:
        file.write_bytes(whole)
    assert unnoticed < 20, "the name of the seal, or a space"


@pytest.mark.parametrize("name", READERS)
def test_files_of_earlier_versions_have_no_checksum(top: Path, name: str) -> None:
    file = top / name
    whole = file.read_bytes()
    wanted = READERS[name](file)
    try:
        file.write_text(json.dumps(unseal(whole)) + "\n")
        assert READERS[name](file) == wanted
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("text", ["", "[1]", "5", '{"number": 2, "sha256": "0"}'])
def test_a_damaged_order_of_an_update_is_not_continued(top: Path, text: str) -> None:
    file = top / "run/update.json"
    whole = file.read_bytes()
    try:
        file.write_text(text)
        with opened(top / "run") as journal:
            assert journal.order() is None
    finally:
        file.write_bytes(whole)


def test_who_alters_a_run_is_told_how(top: Path) -> None:
    file = top / "run/config.json"
    whole = file.read_text()
    try:
        lines = whole.replace(str(top / "run-data"), "moved").splitlines()
        file.write_text("\n".join(lines))
        with pytest.raises(ConfigError, match="altered it yourself, delete its line 'sha256'"):
            stoker.update(top / "run", "day.csv")
        file.write_text("\n".join(line for line in lines if '"sha256"' not in line))
        assert RunDirectory(file.parent).config()["dataset"] == "moved"
    finally:
        file.write_text(whole)


def test_values_are_sealed_as_they_are_read() -> None:
    values = {"sizes": {10: 1, 9: (2.5, -0.0)}, "text": "ß\u2028", "sha256": "of an earlier file"}
    for indent in (None, 1):
        text = json.dumps(seal(values), indent=indent, ensure_ascii=indent is None)
        assert unseal(text) == {"sizes": {"10": 1, "9": [2.5, -0.0]}, "text": "ß\u2028"}
    with pytest.raises(ValueError, match="altered"):
        unseal(text.replace("-0.0", "0.0"))
