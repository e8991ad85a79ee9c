"""Preparation writes the bytes, and training finds the losses, that an earlier version did.

``make.py`` writes ``golden.json``. ``format_1`` holds datasets that Stoker wrote before its rooms were drawn
(2026-11-23), and the log and the schema that they are of.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import make
import pytest

import stoker

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


@pytest.mark.parametrize("recipe", list(make.ROWS))
def test_datasets_have_the_bytes_of_an_earlier_version(recipe: str, tmp_path: Path) -> None:
    wanted = GOLDEN["datasets"][recipe]
    found = make.prepared(tmp_path, recipe)
    if GOLDEN["probe"] != make.probe() or found["log"] != wanted["log"]:
        pytest.skip("NumPy computes other last bits on this machine than where golden.json was written")
    assert found == wanted


@pytest.mark.parametrize("name", list(make.RUNS))
def test_losses_are_those_of_an_earlier_version(name: str, tmp_path: Path) -> None:
    assert make.losses(tmp_path, name) == pytest.approx(GOLDEN["losses"][name], rel=1e-4)


FORMAT_1 = {"prepared": "7eb5821debd449ac", "classified": "e249ea87d2200455", "reordered": "f15a5af34885eb8e"}


@pytest.mark.parametrize("name", FORMAT_1)
def test_datasets_of_an_earlier_version_open(name: str) -> None:
    data = stoker.Dataset(Path(__file__).parent / "format_1" / name)
    assert data.verify() >= 11
    read = hashlib.sha256()
    for _, split in sorted(data.splits.items()):
        for batch in split.batches(64):
            for part in (batch.dense, batch.ids, batch.offsets, batch.labels):
                assert part is not None
                read.update(part.numpy().tobytes())
    assert read.hexdigest()[:16] == FORMAT_1[name]
    assert data.train.groups is not None or name == "classified"


def test_new_rows_are_prepared_like_a_dataset_of_an_earlier_version(tmp_path: Path) -> None:
    """With its vocabularies and fits, and to its rows where they are the same."""
    here = Path(__file__).parent / "format_1"
    shutil.copytree(here / "prepared", tmp_path / "known")
    made = stoker.prepare(None, here / "log.csv", out=tmp_path / "new", like=tmp_path / "known")
    known = stoker.Dataset(tmp_path / "known")
    assert len(made.test) == 240
    for old, new in ((known.train[7], made.test[7]), (known.train[100], made.test[100])):
        assert {key: value.tolist() for key, value in old.items()} == {
            key: value.tolist() for key, value in new.items()
        }
