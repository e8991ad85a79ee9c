"""The guide of docs/start.md, followed to the letter: from a CSV to scores."""

from __future__ import annotations

import math
import random
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest
from calling import output

import stoker

GUIDE = (Path(__file__).parents[2] / "docs" / "start.md").read_text(encoding="utf-8")


def write_logs(folder: Path, rows: int = 3_000) -> None:
    """A log of the guide's columns, and one of the next day without labels."""
    draw = random.Random(0)
    taste, fame = ([draw.gauss(0, 2) for _ in range(50)] for _ in range(2))
    lines = []
    for row in range(rows):
        user, item = draw.randrange(50), draw.randrange(50)
        clicked = draw.random() < 1 / (1 + math.exp(-taste[user] - fame[item]))
        when = f"{datetime.fromtimestamp(1_756_000_000 + 60 * row, UTC):%Y-%m-%d %H:%M:%S}"
        price = f"{draw.uniform(1, 90):.1f}"
        lines.append(f"{when},u{user},i{item},c{item % 7},{price},{draw.choice(['phone', 'tablet'])},{clicked:d}")
    header = "time,user_id,item_id,category,price,device,clicked"
    (folder / "clicks.csv").write_text("\n".join([header, *lines[:-200]]) + "\n")
    new = [line.rsplit(",", 1)[0] for line in (header, *lines[-200:])]
    (folder / "today.csv").write_text("\n".join(new) + "\n")


def check(folder: Path) -> None:
    new = pl.read_csv(folder / "today.csv")
    scores = pl.read_parquet(folder / "scores.parquet")
    assert scores.columns == ["row", "label", "user_id", "item_id", "score"]
    assert scores.select("user_id", "item_id").equals(new.select("user_id", "item_id"))
    assert scores["label"].null_count() == new.height
    assert scores["score"].is_between(0, 1).all()


@pytest.mark.slow
def test_the_commands_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_logs(tmp_path)
    commands = re.findall(r"^stoker .*$", GUIDE, re.MULTILINE)
    assert [shlex.split(line)[1] for line in commands] == [
        "train", "init", "prepare", "inspect", "train", "prepare", "predict",
    ]  # fmt: skip
    shown = ""
    for line in commands:
        code, told, wrong = output(capsys, *shlex.split(line)[1:])
        assert code == 0, wrong
        shown += told
    assert "unsure" not in (tmp_path / "schema.toml").read_text().split("\n", 4)[-1]
    assert "stoker predict RUN --data today --out scores.parquet" in shown
    auc = re.search(r"AUC *│ *([0-9.]+) │ *([0-9.]+)", shown)
    assert auc is not None
    assert min(map(float, auc.groups())) > 0.6
    check(tmp_path)


@pytest.mark.slow
def test_the_python_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_logs(tmp_path)
    *_, source = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    names: dict[str, object] = {}
    exec(source, names)
    scores = names["scores"]
    assert isinstance(scores, stoker.training.scores.evaluation.Scores)
    assert len(scores.scores) == 200
