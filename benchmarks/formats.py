"""Preparing logs of other shapes than Criteo's: wide, of UTF-8 text, in Parquet and in JSON lines.

The job is that of benchmarks/prepare.py on generated rows (synthetic): seven runs of lines, six train and the last one
is halved; missing numbers are 0 and become log(max(x, 0) + 1); ids by falling training count, ties by value; a missing
value, or one without training rows, is id 0.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.harness import CACHE, Bar, Outcome, Run, Table
from benchmarks.prepare import check_prepared, read_ours, read_theirs, split_rows
from benchmarks.rounds import Contestant, compare, play

__all__ = ["Shape", "bars", "log_of"]

OURS = Contestant(label="stoker prepare", script="stoker_formats.py")
PEERS = [
    Contestant(label=form, script="frames_formats.py", environment="frames", options={"form": form})
    for form in ("Polars", "Polars streaming", "DuckDB")
]
_SEED = 7


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows and columns of a log, and the file that it is in."""

    name: str
    kind: str  # csv | parquet | jsonl
    rows: int
    dense: int  # columns of numbers
    whole: int  # categorical columns of whole numbers
    text: int  # categorical columns of UTF-8 text
    values: int = 1_000_000  # of each categorical column, at most

    def columns(self) -> dict[str, list[str]]:
        """Names of the columns of each type."""
        counts = {"dense": self.dense, "whole": self.whole, "text": self.text}
        return {kind: [f"{kind}_{number}" for number in range(1, count + 1)] for kind, count in counts.items()}


SHAPES = (
    Shape(name="wide CSV, 100 columns", kind="csv", rows=500_000, dense=50, whole=49, text=0, values=10_000),
    Shape(name="narrow CSV, UTF-8 text", kind="csv", rows=3_000_000, dense=1, whole=0, text=2),
    Shape(name="Parquet", kind="parquet", rows=2_000_000, dense=13, whole=26, text=0),
    Shape(name="JSON lines", kind="jsonl", rows=1_000_000, dense=4, whole=2, text=2),
)


def log_of(shape: Shape, rows: int, run: Run) -> Path:
    """A generated log of ``rows`` rows; kept in the cache."""
    folder = CACHE / f"{shape.name.replace(' ', '_').replace(',', '')}_{rows}"
    path = folder / f"log.{shape.kind}"
    if (folder / "whole").exists():
        return path
    run.log(f"generating {rows:,} rows: {shape.name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    draw = np.random.default_rng(_SEED)

    def missing(series: pl.Series) -> pl.Series:
        return series.set(pl.Series(draw.random(rows) < 0.05), None)

    def ids() -> pl.Series:
        return pl.Series((shape.values * draw.random(rows) ** 4).astype(np.int64) * 2_654_435_761 % 2**31)

    names, data = shape.columns(), {"label": pl.Series(draw.integers(0, 2, rows))}
    data |= {name: missing(pl.Series(draw.gamma(1.0, 20.0, rows).round(2))) for name in names["dense"]}
    data |= {name: missing(ids()) for name in names["whole"]}
    for name in names["text"]:
        data[name] = missing(pl.select(pl.format("größe-{} 東京", ids())).to_series())
    frame = pl.DataFrame(data)
    if shape.kind == "csv":
        frame.write_csv(path)
    elif shape.kind == "parquet":
        frame.write_parquet(path)
    else:
        frame.write_ndjson(path)
    (folder / "whole").touch()
    return path


def versus_frames(run: Run) -> Outcome:
    """Polars, in memory and streaming, and DuckDB, whichever is fastest, in the worst of the shapes."""
    value, tables, memory, data, megabytes = float("inf"), [], [], {}, []
    for shape in SHAPES:
        rows = shape.rows // 10 if run.quick else shape.rows
        log, names = log_of(shape, rows, run), shape.columns()
        categorical = [*names["whole"], *names["text"]]
        kept: dict[str, Any] = {}

        def check(
            label: str,
            line: dict[str, Any],
            results: Path,
            kept: dict[str, Any] = kept,
            columns: tuple[list[str], list[str]] = (names["dense"], categorical),
        ) -> None:
            if label == OURS.label:
                mine = read_ours(results / "out")
                kept.setdefault("ours", mine)
                found = mine
            else:
                found = read_theirs(results / "out", *columns)
            check_prepared(label, kept["ours"], found, same_ids=True, categorical=columns[1])

        config = {
            "log": str(log), "small": str(log_of(shape, 20_000, run)), "rows": split_rows(rows),
            "small_rows": split_rows(20_000), "shape": asdict(shape), "columns": names,
        }  # fmt: skip
        timings = play([OURS, *PEERS], config, run, check, rotate=False)
        case = f"{rows:,} rows"
        ratio, table, ratios = compare(
            timings, OURS.label, [peer.label for peer in PEERS], {case: rows}, f"{shape.name} (synthetic)", unit="s"
        )
        value = min(value, ratio)
        tables.append(table)
        megabytes.append(f"{shape.name} {log.stat().st_size / 1e6:,.0f}")
        memory.append(
            [shape.name, *(f"{max(one['peak'] for one in lines) / 1e6:,.0f}" for lines in timings.extra.values())]
        )
        data[shape.name] = {
            "seconds": timings.seconds, "ratios": ratios, "versions": timings.versions, "extra": timings.extra,
        }  # fmt: skip
    peaks = Table(
        title="Peak resident memory, MB", columns=["log", OURS.label, *(peer.label for peer in PEERS)], rows=memory
    )
    notes = [
        "checked: every number, id and label equals ours, row by row",
        f"files, MB, in the page cache: {', '.join(megabytes)}",
    ]
    return Outcome(value=value, tables=[*tables, peaks], notes=notes, data=data)


def bars() -> list[Bar]:
    """The promise of stoker prepare for logs of every shape."""
    return [
        Bar(
            name="prepare-formats",
            group="prepare-formats",
            title="stoker prepare, wide, text, Parquet and JSON logs (quick: a tenth), against the fastest of Polars "
            "and DuckDB",
            must=1.0,
            rounds=3,
            run=versus_frames,
        )
    ]
