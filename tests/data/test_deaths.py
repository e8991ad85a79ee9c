"""A process that dies at any step of making a dataset: what is there is whole, and the next one works."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from campaigns import EFFORT, scaled
from processes import run_python

from stoker.dataset.dataset import Dataset
from stoker.testing import make_dataset

SCHEMA = """
name = "visits"
[label]
column = "label"
[timestamp]
column = "when"
[[feature]]
kind = "mean_target"
name = "rate"
by = ["user"]
[[dense]]
name = "rate"
[[dense]]
name = "price"
fill = "median"
[[categorical]]
name = "item"
[[categorical]]
name = "user"
[split]
rule = "time"
"""


def write_log(path: Path, rows: int, items: int) -> None:
    draw = random.Random(rows)
    lines = [
        f"{draw.randrange(2)},{draw.random():.2f},i{draw.randrange(items)},u{draw.randrange(9)},{n}"
        for n in range(rows)
    ]
    path.write_text("\n".join(["label,price,item,user,when", *lines]) + "\n")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which this system lacks")
@pytest.mark.parametrize(("job", "last", "every"), [("classify", 0, 3), ("prepare", 26, 7), ("reorder", 14, 4)])
def test_a_death_at_any_step(tmp_path: Path, job: str, last: int, every: int) -> None:
    """Of a preparation the last steps, in which datasets change places, and not each of them; ``make kills``: all."""
    every = round(every / EFFORT)
    if "STOKER_KILLS" in os.environ:
        last, every = 0, 1
    make_dataset(tmp_path / "source", rows=60, num_embeddings=(20, 10), shard_rows=30)
    items = 2_000 if job == "reorder" else 5  # smaller tables are not reordered
    write_log(tmp_path / "old.csv", 40 if items < 10 else 2_000, items)
    write_log(tmp_path / "new.csv", 50 if items < 10 else 2_100, items)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    found = run_python(Path(__file__).parent / "dying.py", job, tmp_path, str(last), str(every))
    assert found.returncode == 0, found.stdout + found.stderr
    assert int(found.stdout.split()[-1]) >= scaled(4)
    assert Dataset(tmp_path / "source").verify() > 0
