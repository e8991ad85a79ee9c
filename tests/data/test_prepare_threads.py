"""What threads of a preparation do when it ends otherwise."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from prepared import digests

from stoker.prep.prepare import StageProgress, run_prepare
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SplitRule

THREADS = ("stoker-prepare", "stoker-dense", "stoker-groups")
SCHEMA = Schema(
    label=Label(column="label"),
    dense=(DenseColumn(name="price", fill="median", transforms=("zscore",)),),
    categorical=(CategoricalColumn(name="item"), CategoricalColumn(name="user", type="string")),
    split=SplitRule(rule="column", column="day", values={"mo": "train", "tu": "valid"}),
)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["read", "fit", "write"])
def test_none_works_on_after_an_error(tmp_path: Path, stage: str) -> None:
    """The directory is free for the next run, and nothing of the last must write to it."""
    raw = tmp_path / "log.csv"
    lines = [f"{n % 2},u{n % 7},{n % 90},{n},{'tu' if n % 5 == 0 else 'mo'}" for n in range(3000)]
    raw.write_text("\n".join(["label,user,item,price,day", *lines]) + "\n")

    def report(progress: StageProgress) -> None:
        if progress.stage == stage:
            raise RuntimeError(stage)

    with pytest.raises(RuntimeError, match=stage) as kept:  # which keeps what the run was at
        run_prepare(SCHEMA, raw, out=tmp_path / "made", block_bytes=2000, threads=2, progress=report)
    assert kept.tb is not None
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(THREADS)]
    run_prepare(SCHEMA, raw, out=tmp_path / "made", block_bytes=2000, threads=2)
    run_prepare(SCHEMA, raw, out=tmp_path / "whole")
    assert digests(tmp_path / "made") == digests(tmp_path / "whole")
