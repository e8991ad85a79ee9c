"""How much of a campaign the tests do: random programs, kills, examples of a property.

Tests give the numbers of a whole campaign. `make test` does an eighth of each and leaves out tests marked `slow`, so
that it stays short; CI does a quarter (``STOKER_EFFORT=0.25``) and all tests; `make soak` and `make kills` do more.
"""

from __future__ import annotations

import os

__all__ = ["EFFORT", "scaled"]

EFFORT = float(os.environ.get("STOKER_EFFORT", "0.125"))


def scaled(number: int) -> int:
    """Return the number of trials to do where a whole campaign has ``number``; at least one."""
    return max(1, round(number * EFFORT))
