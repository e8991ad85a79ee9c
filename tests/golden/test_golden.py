"""Preparation writes the bytes, and training finds the losses, that an earlier version did.

``make.py`` writes ``golden.json``.
"""

from __future__ import annotations

import json
from pathlib import Path

import make
import pytest

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
