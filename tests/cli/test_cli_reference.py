"""docs/cli.md says what the commands say."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from command_reference import markdown

from stoker.base.settings import Settings, options_of
from stoker.cli import COMMANDS

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_every_command_and_option_is_there() -> None:
    text = markdown()
    for command in COMMANDS:
        assert f"\n## stoker {command}\n" in text
    assert "`--embedding-dim` `--dim`" in text
    assert "needs stoker" not in text


def test_settings_have_one_name_in_python_and_in_commands() -> None:
    markdown()  # loads all commands
    kinds = [Settings]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for item in fields(kind):
            plain = f"--{item.name.replace('_', '-')}"
            one = plain.removesuffix("s")  # of an option that may be given several times
            assert not item.metadata or {plain, one} & set(options_of(item)), f"{kind.__name__}.{item.name}"


def test_every_command_shows_examples() -> None:
    for section in markdown().split("\n## stoker ")[1:]:
        name = section.split("\n", 1)[0]
        assert f"```\nstoker {name} " in section or f"```\nstoker {name}\n" in section


@pytest.mark.skipif(not PAGE.parent.is_dir(), reason="there is no docs folder beside these tests: not a checkout")
def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: make docs"
