"""docs/sessions.md, block by block, as a newcomer would run it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from stoker.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "sessions.md"


@pytest.mark.skipif(not PAGE.exists(), reason="docs/sessions.md is not beside these tests: not a checkout")
def test_every_block_of_the_tutorial_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    blocks = re.findall(r"^```(sh|toml|python)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.S | re.M)
    [schema] = [text for kind, text in blocks if kind == "toml"]
    (tmp_path / "sessions.toml").write_text(schema)
    said = {}
    for command in (line for kind, text in blocks if kind == "sh" for line in text.splitlines()):
        name, *arguments = shlex.split(command)
        assert name == "stoker"
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        assert not ended.value.code, f"{command}\n{out}{err}"
        said[command] = out + err
    [compared] = [text for command, text in said.items() if command.startswith("stoker compare")]
    assert "MRR" in compared
    assert "only rates has item_rate" in compared
    assert (tmp_path / "scores.parquet").exists()
    [notebook] = [text for kind, text in blocks if kind == "python"]
    exec(notebook, {})
    assert "only rates-in-memory has item_rate" in capsys.readouterr().out
