"""How much of a campaign the tests do: random programs, kills, examples of a property.

Numbers in tests are those of CI, which sets ``STOKER_EFFORT=1``; `make test` does a quarter of each campaign, so that
it stays short, and `make soak` and `make kills` do more than CI.
"""

from __future__ import annotations

import os

import pytest

__all__ = ["EFFORT", "in_ci", "scaled"]

EFFORT = float(os.environ.get("STOKER_EFFORT", "0.25"))

#: Of a test that takes long and seldom fails alone.
in_ci = pytest.mark.skipif(EFFORT < 1, reason="takes long; CI sets STOKER_EFFORT=1")


def scaled(number: int) -> int:
    """Return the number of trials to do where CI does ``number``; at least one."""
    return max(1, round(number * EFFORT))
