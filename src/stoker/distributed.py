"""Training on several processes ("ranks") in your own loop, with the numbers of one process.

``stoker train --ranks`` does the same. ``examples/ranks.py`` is a whole program, and docs/ranks.md tells how it works.
"""

from stoker.tables import Ranks, RanksError
from stoker.tables.ranks.share import Shares
from stoker.training.ranks.sharded import ShardedLoss

__all__ = ["Ranks", "RanksError", "ShardedLoss", "Shares"]
