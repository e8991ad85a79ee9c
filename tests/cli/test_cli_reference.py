"""docs/cli.md says what the commands say."""

from __future__ import annotations

import inspect
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from calling import output
from command_reference import commands, markdown
from rich.text import Text

from stoker.base.settings import Settings, options_of
from stoker.cli import COMMANDS, main
from stoker.models import DLRM, MODELS, TBSM

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


def test_help_names_every_model_and_the_layers_it_has_by_default() -> None:
    """The help is read without torch, so these are written once more there."""

    def layers(model: type, name: str) -> str:
        return "-".join(map(str, inspect.signature(model).parameters[name].default))

    text = markdown()
    assert f"{', '.join(MODELS)}, or the name of a model of your own." in text
    assert f"Bottom layers of DLRM (default: {layers(DLRM, 'bottom')})" in text
    assert (
        f"Top layers of DLRM (default: {layers(DLRM, 'top')}), or last layers of TBSM (default: {layers(TBSM, 'top')})."
        in text
    )


def test_every_command_shows_examples() -> None:
    for section in markdown().split("\n## stoker ")[1:]:
        name = section.split("\n", 1)[0]
        assert f"```\nstoker {name} " in section or f"```\nstoker {name}\n" in section


def test_help_fits_80_columns_and_shows_every_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich takes a word in brackets for markup and drops it; a switch has no type to show."""
    for command in commands():
        lines = (command.help or "").replace("\b", "").splitlines()
        texts = [*lines, *(each.help for each in command.params if getattr(each, "help", None))]
        assert [text for text in texts if Text.from_markup(text).plain != text] == []
        assert [line for line in lines if len(line) > 78] == []
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert "<bool>" not in capsys.readouterr().out


@pytest.mark.slow
def test_examples_of_logs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^ *stoker (synthetic .*)$", markdown(), re.MULTILINE)
    assert len(examples) >= 5
    for line in examples:
        code, _, wrong = output(capsys, *shlex.split(re.sub(r"--rows \w+", "--rows 500", line)))
        assert code == 0, wrong


@pytest.mark.skipif(not PAGE.parent.is_dir(), reason="there is no docs folder beside these tests: not a checkout")
def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: make docs"
