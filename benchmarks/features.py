"""The feature table of the RecSys Challenge 2019 solution, on generated trivago-format rows, against
pandas, Polars and DuckDB.

The steps are the rows of Table 1 in "Accelerating Recommender System Training 15x with RAPIDS", where a GPU was 9.7
times as fast as pandas. The baseline is what notebooks have: vectorised, no apply, no loop over rows; its target
encoding fits and merges fold by fold. All results are compared before a time is shown.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.harness import CACHE, Bar, Outcome, Run, Table, WrongResult
from benchmarks.peers.features_tools import PROPERTIES, STEPS
from benchmarks.rounds import Contestant, compare, play

__all__ = ["bars", "check_same"]

OURS = Contestant(label="stoker.features", script="stoker_features.py")
PANDAS = Contestant(label="pandas", script="pandas_features.py", environment="pandas")
POLARS = Contestant(label="Polars", script="polars_features.py", environment="frames")
DUCKDB = Contestant(label="DuckDB", script="duckdb_features.py", environment="frames")
PAIRS_PER_LINE = 3.3  # about, of a generated log


def log_folder(lines: int, run: Run) -> Path:
    """A generated log and item metadata with 157 properties; kept in the cache."""
    import stoker

    folder = CACHE / f"trivago_log_{lines}"
    if not (folder / "whole").exists():
        run.log(f"generating {lines:,} lines")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        stoker.synthetic.write("trivago", lines, folder / "log.csv")
        items = max(100, lines // 15)
        draw = np.random.default_rng(0)
        chance = 0.3 / np.arange(1, PROPERTIES + 1) ** 0.4
        with (folder / "item_metadata.csv").open("w") as file:
            file.write("item_id,properties,stars\n")
            for item in range(1, items + 1):
                held = np.flatnonzero(draw.random(PROPERTIES) < chance)
                text = "|".join(f"Property {number:03d}" for number in held) or "Property 000"
                file.write(f"{item},{text},{item % 5 + 1}\n")
        (folder / "whole").touch()
    return folder


def check_same(ours: Path, theirs: Path) -> None:
    """Compare all files of both contestants, value by value.

    Raises:
        WrongResult: naming the file, the column and the first row that differ.
    """
    for path in sorted(ours.glob("*.parquet")):
        mine, other = pl.read_parquet(path), pl.read_parquet(theirs / path.name)
        if mine.height != other.height or not set(other.columns) <= set(mine.columns):
            raise WrongResult(f"{path.name}: {other.shape} with {other.columns[:5]}, ours {mine.shape}")
        for name in mine.columns:
            if name not in other.columns:  # a list shorter than 25 everywhere
                if mine[name].null_count() < mine.height:
                    raise WrongResult(f"{path.name}: column {name} is ours alone")
                continue
            a, b = mine[name], other[name]
            if a.dtype.is_numeric() or b.dtype.is_numeric():
                x, y = (s.cast(pl.Float64).fill_null(float("nan")).to_numpy() for s in (a, b))
                same = np.isclose(x, y, rtol=1e-9, atol=1e-12, equal_nan=True)
            else:
                same = a.cast(pl.String).eq_missing(b.cast(pl.String)).to_numpy()
            if not same.all():
                row = int(np.argmin(same))
                raise WrongResult(f"{path.name}: {name} of row {row:,} is {b[row]!r}, ours {a[row]!r}")


def versus(peer: Contestant, run: Run) -> Outcome:
    """Ours and a peer on one log, step by step."""
    pairs = 200_000 if run.quick else 5_000_000
    log = log_folder(round(pairs / PAIRS_PER_LINE), run)
    small = log_folder(3_000, run)
    kept = CACHE / "features_ours"

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        if line["case"] != "total":
            return
        if label == OURS.label:
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(results / "out", kept)
        else:
            check_same(kept, results / "out")

    config = {"log": str(log), "small": str(small)}
    timings = play([OURS, peer], config, run, check, rotate=False)
    shutil.rmtree(kept, ignore_errors=True)
    found = int(timings.extra[OURS.label][0]["pairs"])
    value, table, ratios = compare(
        timings, OURS.label, [peer.label], {"total": found}, "Feature engineering (synthetic log)", unit="s"
    )
    steps = []
    for step in (*STEPS, "total"):
        ours, theirs = timings.median(OURS.label, step), timings.median(peer.label, step)
        steps.append([step, f"{theirs:.3f}", f"{ours:.3f}", f"{theirs / ours:.1f}" if ours > 1e-4 else "-"])
    rows = Table(
        title="The rows of Table 1 (medians)", columns=["step", f"{peer.label} s", "ours s", "faster by"], rows=steps
    )
    peaks = ", ".join(
        f"{label} {max(line['peak'] for line in lines) / 1e6:,.0f} MB" for label, lines in timings.extra.items()
    )
    notes = [
        f"checked: every column of every step equals that of {peer.label}, row by row",
        f"{found:,} pairs; peak memory: {peaks}",
    ]
    data = {"seconds": timings.seconds, "ratios": ratios, "versions": timings.versions, "extra": timings.extra}
    return Outcome(value=value, tables=[table, rows], notes=notes, data=data)


def memory(run: Run) -> Outcome:
    """Peak memory of Polars over that of ours, for the same features."""
    found = versus(POLARS, run)
    peaks = {label: max(line["peak"] for line in lines) for label, lines in found.data["extra"].items()}
    return replace(found, value=peaks[POLARS.label] / peaks[OURS.label])


def bars() -> list[Bar]:
    """The promises of stoker.features."""
    return [
        Bar(
            name="features-vs-pandas",
            group="features",
            title="features of 5 M pairs of a trivago-format log (quick: 200 k), against pandas",
            must=6.0,
            aim=9.7,
            run=partial(versus, PANDAS),
        ),
        Bar(
            name="features-vs-polars",
            group="features",
            title="features of 5 M pairs of a trivago-format log (quick: 200 k), against Polars",
            must=1.0,
            rounds=3,
            run=partial(versus, POLARS),
        ),
        Bar(
            name="features-vs-duckdb",
            group="features",
            title="features of 5 M pairs of a trivago-format log (quick: 200 k), against DuckDB",
            must=1.0,
            rounds=3,
            run=partial(versus, DUCKDB),
        ),
        Bar(
            name="features-memory",
            group="features",
            title="peak memory of Polars over ours, for the features of 5 M pairs (quick: 200 k)",
            must=2.0,
            rounds=3,
            run=memory,
        ),
    ]
