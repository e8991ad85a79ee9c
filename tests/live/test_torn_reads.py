"""Reads while updates are published and rolled back are of one version. ``make soak`` reads 10 million rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from torn_reads import PLACEMENTS, make, read


@pytest.mark.slow
def test_no_read_is_torn_while_updates_are_published_and_rolled_back(tmp_path: Path) -> None:
    run = make(tmp_path / "made", 2000)
    for name in ("device", "cached"):
        found = read(run, PLACEMENTS[name], 50_000, changes=8)
        assert found.torn == 0, name
        assert found.versions > 1, name
        assert found.caught_up, name
