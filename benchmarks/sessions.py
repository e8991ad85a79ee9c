"""From session logs to a ranking, against the way people write it.

The loop of Table 2 in "Accelerating Recommender System Training 15x with RAPIDS": a table of features is prepared for
the model, loaded, trained on for an epoch, its validation rows are scored. The baseline is the authors' own: fastai 1,
which prepares in pandas, reads rows one by one with workers, has dense gradients of embeddings and AdamW, at batch
4,096. Ours takes eight times the batch. What both score must rank the validation click-outs equally well before a time
is shown. The whole loop has the engineering of the features before it, in pandas and by ``stoker prepare``.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.features import log_folder
from benchmarks.harness import CACHE, Bar, NotRun, Outcome, Run, Table, WrongResult
from benchmarks.rounds import Contestant, work

__all__ = ["bars", "mean_reciprocal_rank"]

LINES = {False: 1_515_152, True: 60_000}  # of the log; three pairs each
DIMS = {
    "item": 16, "user_id": 16, "session_id": 16, "platform": 4, "city": 8, "device": 1, "hour": 4, "weekday": 2,
    "current_filters": 8,
}  # fmt: skip
NUMBERS = (
    "price", "rank", "price_rank", "is_last_item", "item_mean", "current_filters_item_mean", "city_item_mean",
    "device_item_mean", "user_id_item_mean", "session_item", "user_item", "item_seen", "item_clicked", "item_shown",
    "step", "seconds_since", "seconds_since_item", "steps_since",
)  # fmt: skip
OURS = Contestant(label="stoker", script="stoker_sessions.py")
PANDAS = Contestant(label="pandas", script="pandas_sessions.py", environment="pandas")
STRONG = Contestant(label="Polars and torch.compile", script="polars_sessions.py")
DUCKDB = replace(STRONG, label="DuckDB and torch.compile", options={"form": "DuckDB"})
FASTAI = Contestant(label="fastai", script="fastai_sessions.py", environment="fastai")
SETTINGS = {
    "batch_size": 32_768, "epochs": 1, "row_optimizer": "rowwise_adagrad", "row_lr": 0.05, "dense_lr": 0.02,
    "schedule": "one-cycle",
}  # fmt: skip
BASELINE = {"dims": DIMS, "numbers": NUMBERS, "lr": 1e-3, "batch": 4096, "workers": 2, "epochs": 1, "seed": 0}
WITHIN = 0.002  # AUC and MRR
EQUAL = 0.003  # of either sign


def mean_reciprocal_rank(scores: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> float:
    """Over the groups that have a positive row; of equal scores the positive one counts as the last."""
    order = np.lexsort((labels, -scores, groups))
    groups, labels = groups[order], labels[order]
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
    sizes = np.diff(np.r_[starts, len(groups)])
    places = np.arange(len(groups)) - np.repeat(starts, sizes) + 1
    return float((1 / places[labels > 0]).mean())


def _seconds(lines: list[dict[str, Any]]) -> dict[str, float]:
    return {line["case"]: line["seconds"] for line in lines if line["event"] == "timed"}


def _extra(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return next(line for line in lines if line["event"] == "extra")


def _tables(run: Run) -> tuple[Path, Path]:
    """The feature table in Parquet, and a small one; made by pandas, kept in the cache."""
    made = []
    for lines in (LINES[run.quick], 3_000):
        path = CACHE / f"trivago_pairs_{lines}.parquet"
        if not path.exists():
            run.log(f"making the feature table of {lines:,} lines")
            beside = path.with_suffix(".tmp")
            work(PANDAS, {"log": str(log_folder(lines, run) / "log.csv"), "out": str(beside)})
            beside.rename(path)
        made.append(path)
    return made[0], made[1]


def _baseline(
    player: Contestant, table: Path, config: dict[str, Any]
) -> tuple[dict[str, float], dict[str, float], int]:
    """Seconds of a baseline's phases, its metrics and its peak memory."""
    from sklearn.metrics import roc_auc_score

    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        lines = work(player, {**config, "results": folder})
        scores = np.load(Path(folder) / "scores.npy")
    valid = pl.read_parquet(table, columns=["split", "label", "clickout"]).filter(pl.col("split") == "valid")
    labels, groups = valid["label"].to_numpy(), valid["clickout"].to_numpy()
    metrics = {"auc": float(roc_auc_score(labels, scores)), "mrr": mean_reciprocal_rank(scores, labels, groups)}
    return _seconds(lines), metrics, _extra(lines)["peak"]


def _against_strong(
    run: Run, peer: Contestant = STRONG
) -> tuple[dict[str, list[float]], dict[str, list[float]], list[str]]:
    """Seconds by phase, a value a round, of ours and of a peer with torch.compile, and what is to be said of both.

    Raises:
        WrongResult: the mean AUC or MRR over the rounds, each with a seed of its own, differs by more than allowed.
    """
    table, small = _tables(run)
    config = {"source": str(table), "small": str(small), "dims": DIMS, "numbers": NUMBERS, "settings": SETTINGS}
    seconds: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
    scores: dict[str, list[tuple[float, float]]] = {"auc": [], "mrr": []}
    for seed in range(run.rounds):
        run.log(f"round {seed + 1}/{run.rounds}")
        mine, extra = _stoker(table, small, None, seed)
        other, metrics, peer_peak = _baseline(peer, table, {**config, "seed": seed})
        for side, found in zip(seconds, (mine, other), strict=True):
            for case, value in found.items():
                side.setdefault(case, []).append(value)
        for name, values in scores.items():
            values.append((extra[name], metrics[name]))
    notes = []
    for name, values in scores.items():
        own, theirs = (statistics.mean(side) for side in zip(*values, strict=True))
        each = ", ".join(f"{ours:.4f} {peer:.4f}" for ours, peer in values)
        if abs(own - theirs) > EQUAL:
            raise WrongResult(f"{name} is {own:.4f}, the peer's {theirs:.4f}; by seed, ours and the peer's: {each}")
        notes.append(
            f"mean {name.upper()} of the validation click-outs over {run.rounds} seeds: stoker {own:.4f}, peer "
            f"{theirs:.4f}; they may differ by {EQUAL}. By seed, ours and the peer's: {each}"
        )
    notes += [
        f"peak memory: stoker {extra['peak'] / 2**30:.2f} GiB, peer {peer_peak / 2**30:.2f} GiB",
        f"peer: {peer.label.split()[0]}, codes in memory, batches by index_select, torch.compile, row-wise Adagrad by "
        "hand, fused AdamW; "
        "both train in float32",
    ]
    return *seconds, notes


def _strong(run: Run, cases: tuple[str, ...], peer: Contestant = STRONG) -> Outcome:
    """Time of the given phases over that of a peer with torch.compile, rows by hand."""
    found = _once(peer.label, run, partial(_against_strong, peer=peer))
    ours, theirs = ({case: side[case] for case in cases} for side in found[:2])
    table = _table(*found[:2], "From a feature table to scores (medians)", whole=False)
    data = {"ours": found[0], "theirs": found[1]}
    return Outcome(value=_ratio(ours, theirs), tables=[table], notes=found[2], data=data)


def strong(run: Run) -> Outcome:
    """Time from the feature table to scored rows over that of Polars and torch.compile, rows by hand."""
    return _strong(run, ("preparation", "training"))


def duckdb(run: Run) -> Outcome:
    """Time from the feature table to scored rows over that of DuckDB and torch.compile, rows by hand.

    Raises:
        NotRun: DuckDB is not among our packages, where torch is.
    """
    if find_spec("duckdb") is None:
        raise NotRun("needs duckdb beside torch: make check installs both")
    return _strong(run, ("preparation", "training"), DUCKDB)


def strong_training(run: Run) -> Outcome:
    """Time of loading, training and scoring alone over that of torch.compile, rows by hand."""
    return _strong(run, ("training",))


def _stoker(source: Path, small: Path, preset: str | None, seed: int = 0) -> tuple[dict[str, float], dict[str, Any]]:
    dims = {**DIMS, "filters": 8, "properties": 1} if preset else DIMS
    if preset:
        del dims["current_filters"]
    config = {"source": str(source), "small": str(small), "preset": preset, "dims": dims, "numbers": NUMBERS}
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        lines = work(OURS, {**config, "settings": {**SETTINGS, "seed": seed}, "results": folder})
    return _seconds(lines), _extra(lines)


def _measured(run: Run, *, whole: bool) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Seconds by phase, a value a round, of both sides; and what is to be said of the results."""
    table, small_table = _tables(run)
    log, small_log = (log_folder(lines, run) / "log.csv" for lines in (LINES[run.quick], 3_000))
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    for number in range(run.rounds):
        run.log(f"round {number + 1}/{run.rounds}: stoker")
        mine, extra = _stoker(log, small_log, "features") if whole else _stoker(table, small_table, None)
        run.log(f"round {number + 1}/{run.rounds}: {'pandas and ' if whole else ''}fastai")
        other: dict[str, float] = {}
        if whole:
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                other = _seconds(work(PANDAS, {"log": str(log), "out": str(Path(folder) / "pairs.parquet")}))
        phases, metrics, peak = _baseline(FASTAI, table, {"pairs": str(table), **BASELINE})
        for side, seconds in ((ours, mine), (theirs, {**other, **phases})):
            for case, value in seconds.items():
                side.setdefault(case, []).append(value)
        for name in ("auc", "mrr"):
            if extra[name] < metrics[name] - WITHIN:
                raise WrongResult(f"{name} is {extra[name]:.4f}, the baseline's {metrics[name]:.4f}")
    notes = [
        f"AUC and MRR of the validation click-outs: fastai {metrics['auc']:.4f}, {metrics['mrr']:.4f}; "
        f"stoker {extra['auc']:.4f}, {extra['mrr']:.4f}",
        f"peak memory: stoker {extra['peak'] / 2**30:.2f} GiB, fastai {peak / 2**30:.2f} GiB without its loader's "
        f"workers: {extra['peak'] / peak:.2f} of it",
        f"{extra['rows']:,} pairs of a generated log; tabular model, one epoch; fastai at batch {BASELINE['batch']:,}; "
        f"stoker: {SETTINGS}",
        f"putting the dataset on disk, with checksums, would take {extra['saved']:.1f} s more",
        f"checked: AUC and MRR are no more than {WITHIN} below the baseline's",
    ]
    return ours, theirs, notes


def _table(ours: dict[str, Any], theirs: dict[str, Any], title: str, whole: bool) -> Table:
    median = statistics.median
    named = {"preparation": "preparation, features included" if whole else "preparation",
             "training": "loading, training, scoring"}  # fmt: skip
    rows = [[case, f"{median(values):.1f}", ""] for case, values in theirs.items()]
    rows += [[f"stoker: {named[case]}", "", f"{median(values):.1f}"] for case, values in ours.items()]
    totals = [f"{median(map(sum, zip(*side.values(), strict=True))):.1f}" for side in (theirs, ours)]
    return Table(title=title, columns=["phase", "baseline s", "stoker s"], rows=[*rows, ["total", *totals]])


def _ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    sides = [[sum(values) for values in zip(*side.values(), strict=True)] for side in (ours, theirs)]
    return statistics.median(b / a for a, b in zip(*sides, strict=True))


_kept: dict[tuple[Any, ...], Any] = {}  # two bars look at one measurement


def _once(name: str, run: Run, measure: Callable[[Run], Any]) -> Any:
    key = (name, run.quick, run.rounds)
    if key not in _kept:
        _kept[key] = measure(run)
    return _kept[key]


def _from_table(run: Run) -> tuple[Any, Any, list[str]]:
    found: tuple[Any, Any, list[str]] = _once("table", run, lambda run: _measured(run, whole=False))
    return found


def end_to_end(run: Run) -> Outcome:
    """Time from the feature table to scored rows, theirs over ours."""
    ours, theirs, notes = _from_table(run)
    table = _table(ours, theirs, "From a feature table to scores (medians)", whole=False)
    return Outcome(value=_ratio(ours, theirs), tables=[table], notes=notes, data={"ours": ours, "theirs": theirs})


def preparation(run: Run) -> Outcome:
    """Time from the feature table to what the loader reads, theirs over ours."""
    ours, theirs, notes = _from_table(run)
    sides = [{"preparation": side["preparation"]} for side in (ours, theirs)]
    text = (
        "fastai: read the table, FillMissing, Categorify, Normalize, in memory; stoker: a dataset in memory, with "
        "vocabularies and lists, too"
    )
    return Outcome(value=_ratio(*sides), notes=[text, *notes[2:]], data={"ours": sides[0], "theirs": sides[1]})


def whole_loop(run: Run) -> Outcome:
    """Time from the log to scored rows, theirs over ours."""
    ours, theirs, notes = _measured(run, whole=True)
    table = _table(ours, theirs, "From a trivago-format log to scores (medians)", whole=True)
    return Outcome(value=_ratio(ours, theirs), tables=[table], notes=notes, data={"ours": ours, "theirs": theirs})


def _bar(name: str, title: str, must: float, aim: float | None, measure: Callable[[Run], Outcome]) -> Bar:
    return Bar(name=name, group="sessions", title=title, must=must, aim=aim, rounds=3, run=measure)


def bars() -> list[Bar]:
    """The promises of the loop."""
    return [
        _bar(
            "sessions-vs-strong",
            "from a feature table to a ranking, against Polars and torch.compile with rows by hand",
            1.3,
            3.0,
            strong,
        ),
        _bar(
            "sessions-vs-duckdb",
            "from a feature table to a ranking, against DuckDB and torch.compile with rows by hand",
            1.0,
            None,
            duckdb,
        ),
        _bar(
            "sessions-training-vs-strong",
            "training on a feature table and scoring, against torch.compile with rows by hand",
            1.3,
            3.0,
            strong_training,
        ),
        _bar(
            "sessions-end-to-end",
            "from a feature table to a ranking, against fastai 1 (Table 2)",
            15.6,
            25.0,
            end_to_end,
        ),
        _bar(
            "sessions-preparation", "preparing a feature table for the model, against fastai 1", 9.6, 20.0, preparation
        ),
        # The paper's two tables together: 3,053.5 + 891.7 s against 316.4 + 57.2.
        _bar(
            "sessions-whole-loop",
            "from a session log to a ranking, against pandas and fastai 1",
            10.6,
            None,
            whole_loop,
        ),
    ]
