"""How much of a campaign the tests do: random programs, kills, examples of a property.

Tests give the numbers of a whole campaign. `make test` does an eighth of each, so that it stays short, CI a quarter
(``STOKER_EFFORT=0.25``), and `make soak` and `make kills` do several times as many.
"""

from __future__ import annotations

import os

import pytest

__all__ = ["EFFORT", "in_ci", "scaled"]

EFFORT = float(os.environ.get("STOKER_EFFORT", "0.125"))

#: Of a test that takes long and seldom fails alone.
in_ci = pytest.mark.skipif(EFFORT < 0.25, reason="takes long; CI sets STOKER_EFFORT=0.25")


def scaled(number: int) -> int:
    """Return the number of trials to do where a whole campaign has ``number``; at least one."""
    return max(1, round(number * EFFORT))
