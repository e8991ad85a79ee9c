"""Stoker's prepare, as the command calls it."""

from __future__ import annotations

from prepare_tools import prepare_case
from worker_tools import argument, versions

import stoker

versions(stoker=stoker.__version__)
prepare_case(argument(), lambda log, rows, out: stoker.prepare("criteo", log, out=out))
