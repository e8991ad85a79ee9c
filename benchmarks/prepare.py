"""Preparing Criteo-format logs: parse, fill, log, fit vocabularies on the training rows, encode, write.

The job is the recipe "criteo", preset "dlrm": seven runs of lines, six train and the last one is halved;
missing numbers are 0 and become log(max(x, 0) + 1); a category is its hexadecimal value, missing is 0; ids
by falling training count, ties by value; values without training rows are id 0. The rows are generated
(synthetic, Zipf 1.05).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, WrongResult
from benchmarks.rounds import Contestant, Timings, compare, play

__all__ = ["bars", "bijective", "check_prepared", "read_ours", "read_theirs", "split_rows"]

DENSE = [f"I{i}" for i in range(1, 14)]
CATEGORICAL = [f"C{i}" for i in range(1, 27)]
SPLITS = ("train", "test", "valid")  # in file order
OURS = Contestant(label="stoker prepare", script="stoker_prepare.py")


def split_rows(rows: int) -> dict[str, int]:
    """Rows of each split: the last seventh is halved."""
    last = rows // 7
    return {"train": rows - last, "test": -(-last // 2), "valid": last // 2}


def log_file(rows: int, run: Run) -> Path:
    """A generated log of ``rows`` lines, beside it one file per split; kept in the cache."""
    import stoker

    path = CACHE / f"criteo_{rows}" / "log.tsv"
    if not (path.parent / "whole").exists():
        run.log(f"generating {rows:,} rows")
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir(parents=True)
        stoker.synthetic.write("criteo", rows, path)
        with path.open("rb") as lines:
            for split, count in split_rows(rows).items():
                with (path.parent / f"{split}.tsv").open("wb") as out:
                    for _ in range(count):
                        out.write(lines.readline())
        (path.parent / "whole").touch()
    return path


def read_ours(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Dense, ids and labels of each split of a dataset of ours."""
    from stoker import Dataset

    found = {}
    splits = Dataset(path).splits
    for name in SPLITS:
        batches = list(splits[name].batches(2**18))
        parts = [(b.dense.numpy(), b.ids.numpy(), b.labels.numpy()) for b in batches if b.labels is not None]
        found[name] = tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return found  # type: ignore[return-value]


def read_theirs(
    path: Path, numbers: Sequence[str] = DENSE, categorical: Sequence[str] = CATEGORICAL
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The same from a peer's Parquet files, ``<split>*.parquet`` or a directory of that name."""
    found = {}
    for name in SPLITS:
        at = path / name
        frame = pl.read_parquet(at / "*.parquet" if at.is_dir() else path / f"{name}.parquet")
        dense = frame.select(numbers).cast(pl.Float32).to_numpy()
        ids = np.column_stack([frame[c].cast(pl.Int32).to_numpy() for c in categorical])
        found[name] = (dense, ids, frame["label"].cast(pl.Float32).to_numpy())
    return found


def bijective(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether two columns of ids tell the same values apart: each is a function of the other."""
    pairs = len(np.unique(ours.astype(np.int64) << 32 | theirs.astype(np.int64)))
    return bool(pairs == len(np.unique(ours)) == len(np.unique(theirs)))


def check_prepared(
    label: str, ours: Any, theirs: Any, *, same_ids: bool, categorical: Sequence[str] = CATEGORICAL
) -> None:
    """Compare a peer's rows with ours, row by row.

    Raises:
        WrongResult: naming the split and the column.
    """
    for split in SPLITS:
        for what, mine, other in zip(("numbers", "ids", "labels"), ours[split], theirs[split], strict=True):
            if mine.shape != other.shape:
                raise WrongResult(f"{label}: {split} {what} have shape {other.shape}, ours {mine.shape}")
        if not np.array_equal(ours[split][2], theirs[split][2]):
            raise WrongResult(f"{label}: labels of {split} differ from ours")
        if not np.allclose(ours[split][0], theirs[split][0], rtol=1e-5, atol=1e-6):
            raise WrongResult(f"{label}: numbers of {split} differ from ours")
        if same_ids and not np.array_equal(ours[split][1], theirs[split][1]):
            column = int(np.argmax((ours[split][1] != theirs[split][1]).any(axis=0)))
            raise WrongResult(f"{label}: ids of {categorical[column]} in {split} differ from ours")
    if not same_ids:
        for number, column in enumerate(categorical):
            mine = np.concatenate([ours[split][1][:, number] for split in SPLITS])
            other = np.concatenate([theirs[split][1][:, number] for split in SPLITS])
            if not bijective(mine, other):
                raise WrongResult(f"{label}: {column} tells other values apart than ours")


def measure(peers: list[Contestant], rows: int, run: Run, *, same_ids: bool) -> Timings:
    """Ours and the peers on one log; every output is compared with ours."""
    path = log_file(rows, run)
    small = log_file(20_000, run)
    kept: dict[str, Any] = {}

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        if label == OURS.label:
            mine = read_ours(results / "out")
            if "ours" in kept:
                check_prepared(label, kept["ours"], mine, same_ids=True)
            kept["ours"] = mine
        else:
            check_prepared(label, kept["ours"], read_theirs(results / "out"), same_ids=same_ids)

    config = {
        "log": str(path),
        "small": str(small),
        "rows": split_rows(rows),
        "small_rows": split_rows(20_000),
    }
    return play([OURS, *peers], config, run, check, rotate=False)


def outcome(timings: Timings, peers: list[Contestant], rows: int, note: str) -> Outcome:
    case = f"{rows:,} rows"
    value, table, ratios = compare(
        timings,
        OURS.label,
        [peer.label for peer in peers],
        {case: rows},
        "Preparing Criteo-format rows (synthetic)",
        unit="s",
    )
    size = (CACHE / f"criteo_{rows}" / "log.tsv").stat().st_size
    ours = timings.median(OURS.label, case)
    memory = Table(
        title="Peak resident memory and reading speed",
        columns=["contestant", "peak MB", "MB/s of text"],
        rows=[
            [
                label,
                f"{max(line['peak'] for line in lines) / 1e6:,.0f}",
                f"{size / timings.median(label, case) / 1e6:.0f}",
            ]
            for label, lines in timings.extra.items()
        ],
    )
    notes = [
        f"checked: {note}",
        f"{size / 1e6:,.0f} MB of text, in the page cache; {size / ours / 1e6:.0f} MB/s",
    ]
    data = {
        "seconds": timings.seconds,
        "ratios": ratios,
        "versions": timings.versions,
        "extra": timings.extra,
    }
    return Outcome(value=value, tables=[table, memory], notes=notes, data=data)


def versus_pandas(run: Run) -> Outcome:
    """Today's pandas with its own parser and with pyarrow's, whichever is faster."""
    rows = 1_000_000 if run.quick else 5_000_000
    peers = [
        Contestant(
            label=f"pandas, {form} parser",
            script="pandas_prepare.py",
            environment="pandas",
            options={"form": form},
        )
        for form in ("c", "pyarrow")
    ]
    timings = measure(peers, rows, run, same_ids=True)
    return outcome(timings, peers, rows, "every number, id and label equals ours, row by row")


def versus_frames(run: Run) -> Outcome:
    """Polars, in memory and streaming, and DuckDB, whichever is fastest."""
    rows = 500_000 if run.quick else 5_000_000
    peers = [
        Contestant(label=form, script="frames_prepare.py", environment="frames", options={"form": form})
        for form in ("Polars", "Polars streaming", "DuckDB")
    ]
    timings = measure(peers, rows, run, same_ids=True)
    return outcome(timings, peers, rows, "every number, id and label equals ours, row by row")


def versus_nvtabular(run: Run) -> Outcome:
    """NVTabular on the CPU, its files split beforehand, in one process and on two Dask workers."""
    rows = 200_000 if run.quick else 1_000_000
    peers = [
        Contestant(
            label="NVTabular" + (f", {workers} Dask workers" if workers else ""),
            script="nvtabular_prepare.py",
            environment="nvtabular",
            options={"workers": workers},
        )
        for workers in ((0,) if run.quick else (0, 2))
    ]
    timings = measure(peers, rows, run, same_ids=False)
    note = "every number and label equals ours, and ids tell the same values apart, row by row"
    return outcome(timings, peers, rows, note)


def bars() -> list[Bar]:
    """The promises of stoker prepare."""
    return [
        Bar(
            name="prepare-vs-pandas",
            group="prepare",
            title="stoker prepare, 5 M Criteo-format rows (quick: 1 M), against pandas",
            must=3.0,
            aim=6.0,
            run=versus_pandas,
        ),
        Bar(
            name="prepare-vs-frames",
            group="prepare",
            title="stoker prepare, 5 M Criteo-format rows (quick: 500 k), against the fastest of Polars and DuckDB",
            must=1.2,
            aim=1.5,
            rounds=3,
            run=versus_frames,
        ),
        Bar(
            name="prepare-vs-nvtabular",
            group="prepare",
            title="stoker prepare, 1 M Criteo-format rows (quick: 200 k), against NVTabular on CPU",
            must=15.0,
            run=versus_nvtabular,
        ),
    ]
