"""Calls the command line within this process, as a user types it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stoker.base import progress
from stoker.cli import main

progress._SOON = math.inf  # what is said on a slow first run is tested in test_compiling.py

#: a model that trains in no time
SIZES = ["--dim", "4", "--bottom", "8", "--top", "8"]
SMALL = [*SIZES, "--batch-size", "64", "--backend", "reference", "--no-tensorboard"]


def call(*arguments: Any) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    code = caught.value.code
    return code if isinstance(code, int) else 0


def output(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    capsys.readouterr()
    code = call(*arguments)
    found = capsys.readouterr()
    return code, found.out, found.err
