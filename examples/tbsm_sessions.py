"""TBSM on news sessions: which article does this reader open next, given the last twenty? Half a minute on a laptop.

python examples/tbsm_sessions.py [CLICKS.parquet]

CLICKS.parquet is Globo.com's "News Portal User Interactions" in one file; one reader in 80 is taken. Without it (the
log may not be passed on) sessions are generated, and the figures say nothing about news.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import polars as pl
import torch

import stoker

HERE = Path(__file__).parents[1]
CLICKS = Path(os.environ.get("STOKER_DATA", HERE.parent / "shared" / "data")) / "globo" / "clicks.parquet"


def sessions(folder: Path) -> Path:
    """A small log of clicks in Globo's format."""
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else CLICKS
    file = folder / "clicks.parquet"
    if given.exists():
        pl.scan_parquet(given).filter(pl.col("user_id") % 80 == 0).sink_parquet(file)
        print("readers of", given)
    else:
        stoker.synthetic.write("globo", 12_000, file)
        print("no", given, "here: the sessions are generated")
    return file


def train(model: stoker.RecModel, data: stoker.Dataset) -> dict[str, float | None]:
    """One epoch; AUC and more on each reader's last click."""
    dense = torch.optim.Adam(model.dense_parameters(), lr=2e-3)
    for batch in data.train.batches(512, seed=0):
        model.loss(batch).backward()  # rows are updated here, those of every step included
        dense.step()
        dense.zero_grad()
    return stoker.evaluate(model, data.test)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="stoker-"))
    data = stoker.prepare("globo", sessions(folder), out=folder / "data")
    tbsm = stoker.TBSM(data.schema, tower=(64, 32), top=(128, 64), optimizer=stoker.Adagrad(lr=0.05))
    print("each step of", tbsm.history, "is a vector:", tbsm.num_steps, "steps")
    batch = next(iter(data.train.batches(4, seed=0)))
    clicked = data.schema.index("clicked")
    print("ids of four histories, oldest first:", batch.padded(clicked, tbsm.num_steps), sep="\n")
    print("TBSM:", train(tbsm, data))

    # The same readers to a model that averages the history.
    dlrm = stoker.DLRM(data.schema, optimizer=stoker.Adagrad(lr=0.05))
    print("DLRM:", train(dlrm, data))

    stoker.save(folder / "tbsm", tbsm)
    again = stoker.load(folder / "tbsm").model
    assert stoker.evaluate(again, data.test) == stoker.evaluate(tbsm, data.test)
    print("everything is in", folder)


if __name__ == "__main__":
    main()
