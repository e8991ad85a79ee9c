"""docs/sessions.md, block by block, as a newcomer would run it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "sessions.md"


@pytest.mark.skipif(not PAGE.exists(), reason="docs/sessions.md is not beside these tests: not a checkout")
def test_every_block_of_the_tutorial_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(sh|toml)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.S | re.M)
    schemas = [text for kind, text in blocks if kind == "toml"]
    assert len(schemas) == 2
    (tmp_path / "sessions.toml").write_text(schemas[0])
    (tmp_path / "rates.toml").write_text(schemas[0] + "\n" + schemas[1])
    said = {}
    for command in (line for kind, text in blocks if kind == "sh" for line in text.splitlines()):
        name, *arguments = shlex.split(command)
        assert name == "stoker"
        done = subprocess.run(
            [sys.executable, "-m", "stoker", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "COLUMNS": "120"},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        said[command] = done.stdout + done.stderr
    [compared] = [text for command, text in said.items() if command.startswith("stoker compare")]
    assert "MRR" in compared
    assert "only rates has item_rate" in compared
    assert (tmp_path / "scores.parquet").exists()
