"""How much of a campaign the tests do: random programs, kills, examples of a property.

Tests give the numbers of a whole campaign. `make test`, and CI, do an eighth of each, `make soak` and `make kills` more
(``STOKER_EFFORT``). Tests marked `slow` take turns (``STOKER_TURN=3/16``: the fourth sixteenth of them): `make test`
runs those of the commit, ``pytest`` alone all of them. The numbered trials of a campaign take turns, too.
"""

from __future__ import annotations

import os
from zlib import crc32

__all__ = ["EFFORT", "in_turn", "numbers", "scaled"]

TURN, TURNS = map(int, os.environ.get("STOKER_TURN", "0/1").split("/"))
EFFORT = float(os.environ.get("STOKER_EFFORT", "0.125"))


def scaled(number: int) -> int:
    """Return the number of trials to do where a whole campaign has ``number``; at least one."""
    return max(1, round(number * EFFORT))


def numbers(campaign: int) -> range:
    """Return the numbers of the trials to do where a whole campaign has ``campaign``: other ones in other turns."""
    count = scaled(campaign)
    first = TURN // TURNS % TURNS * count  # a slow test has its turn by the remainder
    return range(first, first + count)


def in_turn(name: str) -> bool:
    """Return True if this is the turn of a slow test, by its name."""
    return (crc32(name.encode()) - TURN) % TURNS == 0
