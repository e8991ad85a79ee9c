"""docs/start.md, sessions.md and every_day.md, block by block, as a newcomer would run them."""

from __future__ import annotations

import re
import shlex
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import stoker
from stoker.cli import main

DOCS = Path(__file__).parents[1] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="docs/ is not beside these tests: not a checkout")


SERVES = find_spec("aiohttp") and find_spec("prometheus_client")


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block of a page that a reader runs or saves."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```(sh|toml|python)\n(.*?)^```$", text, flags=re.S | re.M)


def run(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command of the page and return what it prints."""
    name, *arguments = shlex.split(command)
    assert name == "stoker"
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert not ended.value.code, f"{command}\n{out}{err}"
    return out + err


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.slow
def test_every_block_of_start_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    said = ""
    for kind, text in blocks_of("start.md"):
        if kind == "python":
            exec(text, scope)
        else:
            said += "".join(run(command, capsys) for command in text.splitlines())
    assert "wrote schema.toml" in said
    assert len(scope["scores"]) == 100
    assert (tmp_path / "scores.parquet").exists()


@pytest.mark.slow
def test_every_block_of_the_session_tutorial_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = blocks_of("sessions.md")
    [schema] = [text for kind, text in blocks if kind == "toml"]
    (tmp_path / "sessions.toml").write_text(schema)
    commands = [line for kind, text in blocks if kind == "sh" for line in text.splitlines()]
    said = {command: run(command, capsys) for command in commands}
    [compared] = [text for command, text in said.items() if command.startswith("stoker compare")]
    assert "MRR" in compared
    assert "only rates has item_rate" in compared
    assert (tmp_path / "scores.parquet").exists()
    [notebook] = [text for kind, text in blocks if kind == "python"]
    exec(notebook, {})
    assert "only rates-in-memory has item_rate" in capsys.readouterr().out


@pytest.mark.slow
def test_every_block_of_every_day_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a thirtieth of the log, so that it stays short."""
    log = pl.read_parquet(DOCS.parent / "data/online_retail/invoices.parquet")
    (tmp_path / "data/online_retail").mkdir(parents=True)
    few = log["CustomerID"].cast(pl.Float64).fill_null(1) % 30 == 0
    log.filter(few).write_parquet(tmp_path / "data/online_retail/invoices.parquet")
    scope: dict[str, Any] = {"stoker": stoker}
    said: dict[str, str] = {}
    with ExitStack() as stack:
        for kind, text in blocks_of("every_day.md"):
            if kind == "toml":
                (tmp_path / "shop.toml").write_text(text)
            elif kind == "sh" and text.endswith("&\n"):
                if SERVES:
                    from tests.serve.test_server import served

                    server = stack.enter_context(served(stoker.Scorer("run", follow=True)))
            elif kind == "sh":
                said |= {command: run(command, capsys) for command in text.splitlines()}
            elif "stoker.Client" not in text:
                exec(text, scope)
            elif SERVES:
                while server.scorer.version["update"] < 1:
                    time.sleep(0.01)
                exec(text.replace("8123", str(server.port)), scope)
                assert scope["client"].version["update"] == 1
                assert scope["served"].tobytes() == scope["offline"].tobytes()
    assert "before training on these rows" in said["stoker update run day_2.csv"]
    assert (tmp_path / "scores.parquet").exists()
    assert scope["follower"].version.number == 2
    assert [piece["rows"] for piece in scope["found"].manifest["tables"][0]["changed"]] == [2]
