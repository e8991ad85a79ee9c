"""``stoker.report``: one HTML page about a run, with pictures, that opens offline and can be sent to a colleague."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

import torch

from stoker.base.errors import CheckpointError, ConfigError, DataError
from stoker.base.picture import Grid
from stoker.base.settings import checked_arguments, renamed
from stoker.base.units import format_count, format_size, plural
from stoker.dataset.dataset import Dataset
from stoker.placement.budget import LOOKAHEAD, MemoryBudget
from stoker.training.config import TrainConfig
from stoker.training.files.checkpoint import read_manifest
from stoker.training.files.loading import load
from stoker.training.files.rundir import RunDirectory, read_report, trained
from stoker.training.notes import FORMER
from stoker.training.placing import place_scoring
from stoker.training.report.advice import advise
from stoker.training.report.analysis import FILE, KEYS, analyse
from stoker.training.report.charts import bars, chart, check_page, grid, section, write_page
from stoker.training.scores.metrics import metric_grid, metric_names
from stoker.training.tools.baseline import saved_baselines

_LINES = 40  # of a table
_CACHES = {"belady": "best possible (Belady)", "pinned": "Stoker's", "lru": "least recently used"}
_IDS = {"new": "new ids", "gone": "ids that lost their row", "reused": "reused rows", "known": "ids with a row"}


@checked_arguments
def report(run: str | Path, out: str | Path | None = None, *, again: bool = False) -> Path:
    """Write one HTML page about a run: speed, time, bytes, curves, calibration, slices, tables, and what to change.

    The page is made from the run directory alone. What no record has (what each column brings, calibration, slices, the
    limits of this machine) is measured once, if the dataset is there, and kept in the run as ``analysis.json``.

    Args:
        run: the run directory, finished or not.
        out: the file; None means ``report.html`` in the run. An existing file is replaced.
        again: measure again.

    Returns:
        The file.

    Raises:
        ConfigError: no run there, or ``out`` does not end in .html.
        DataError: files of the run are damaged, or the disk is full.

    >>> from stoker.testing import make_dataset
    >>> result = stoker.train(make_dataset("data", rows=1000), out="run", batch_size=64, steps=10, display="quiet")
    >>> stoker.report("run").name
    'report.html'
    """
    directory = RunDirectory(run)
    found = read(directory)
    target = check_page(directory.path / "report.html" if out is None else Path(out))
    analysis, missing = _analysis(directory, found, again=again)
    write_page(target, found["name"], body(found, analysis, missing))
    return target


def read(directory: RunDirectory) -> dict[str, Any]:
    """Return what the files of a run say: settings, curves, final figures."""
    config = directory.read("config.json")
    settings = TrainConfig().to_dict() | renamed(config["settings"])
    lines = directory.records()
    done = read_report(directory) or {}
    held_out = "test" if done.get("test") else "valid"
    later = _baselines(config["dataset"], held_out, done.get(held_out) or {})
    losses = [each for each in lines if each["kind"] == "train"]
    valid = [each for each in lines if each["kind"] == "valid"]
    best = None if done or (found := directory.best()) is None else int(found.name.removeprefix("step_"))
    shown = next((each for each in valid if each["step"] == best), valid[-1] if valid else {})
    return {
        "path": str(directory.path), "name": directory.path.resolve().name, "dataset": str(config["dataset"]),
        "settings": settings, "metric": str(settings["metric"]), "k": settings["ranking_k"], "losses": losses,
        "valid_curve": valid, "done": done, "test": done.get("test") or {},
        "valid": done.get("valid") or shown, "of_step": done.get("best_step") or shown.get("step"),
        "baselines": later or (done.get("baselines") or {}).get("figures", {}),
        "samples": done.get("samples_per_second") or (losses[-1]["samples_per_second"] if losses else None),
        "updates": directory.updates(),
        "steps": max((int(each["step"]) for each in lines if each["kind"] != "test"), default=0),
    }  # fmt: skip


def _baselines(dataset: str, split: str, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the baselines that the dataset has now, if they are of as many rows as the run's figures; else none."""
    try:
        found = saved_baselines(Dataset(dataset))
    except (DataError, ConfigError):
        return {}
    figures = {} if found is None else found.figures
    rows = {splits.get(split, {}).get("rows") for splits in figures.values()}
    return figures if rows == {own.get("rows")} else {}


def _analysis(directory: RunDirectory, run: Mapping[str, Any], *, again: bool) -> tuple[dict[str, Any] | None, str]:
    """Return the analysis, made now if it is not there; None with the reason if it cannot be made."""
    if not directory.steps():
        return None, "the run has no checkpoint yet"
    try:
        best = trained(directory)
        if not again and (directory.path / FILE).is_file():
            with suppress(ConfigError):
                kept = directory.read(FILE)
                if kept.get("checkpoint") == best.name and kept.keys() >= KEYS:
                    return kept, ""
        data = Dataset(run["dataset"])
        config = TrainConfig.from_dict(run["settings"])
        given = {name: getattr(config, name) for name in ("device_memory", "host_memory", "home_path")}
        budget = MemoryBudget(**given, lookahead=LOOKAHEAD)
        manifest, cpu = read_manifest(best), torch.device("cpu")
        placement, _ = place_scoring(manifest, data, budget, batch_size=None, device=cpu)  # rows may not fit memory
        model = load(best, placement=placement).model
        found = analyse(model, data, config) | {"checkpoint": best.name}
        model.embeddings.close()
    except (DataError, ConfigError, CheckpointError) as error:
        return None, str(error)
    directory.write(FILE, found)
    return found, ""


def body(run: Mapping[str, Any], analysis: Mapping[str, Any] | None, missing: str = "") -> str:
    """Return what the page shows."""
    parts = [
        f"<h1>{escape(run['name'])}</h1><p>{escape(_about(run, analysis))}</p>", _tiles(run, analysis),
        _advice(run, analysis), section("Curves", _curves(run)), section("Figures", _figures(run)),
        section("Time and bytes of a step", _time(run, analysis)),
    ]  # fmt: skip
    if run["updates"]:
        parts.append(section("Updates", _updates(run)))
    if analysis is None:
        parts.append(section("Tables, calibration, slices", f"<p>Not measured: {escape(missing)}</p>"))
    else:
        likely = run["settings"]["loss"] == "bce"  # else scores are no probabilities, and their log loss says nothing
        parts.append(section(f"What tables cost{' and bring' if likely else ''}", _tables(analysis, likely)))
        if likely:
            parts.append(section("Calibration and slices", _calibration(analysis)))
    usual = [TrainConfig().to_dict(), FORMER, {} if analysis is None else analysis.get("chosen", {})]
    rows = [
        [name, json.dumps(value)]
        for name, value in run["settings"].items()
        if not any(name in each and value == each[name] for each in usual)
    ]
    if rows:
        parts.append(section("Settings that are not defaults", grid(Grid(["setting", "value"], rows, left=(0, 1)))))
    return "".join(parts)


def _about(run: Mapping[str, Any], analysis: Mapping[str, Any] | None) -> str:
    settings, when = run["settings"], next((each["time"] for each in run["losses"][-1:] if "time" in each), None)
    day = "" if when is None else time.strftime(", %Y-%m-%d %H:%M UTC", time.gmtime(when))
    state = "finished" if run["done"] else "not finished"
    if run["updates"]:
        state += f", updated {plural(len(run['updates']), 'time')} since"
    steps = {"figures": run["of_step"], "tables, calibration and slices": analysis and int(analysis["checkpoint"][5:])}
    of = "".join(f"; {words} of step {step:,}" for words, step in steps.items() if step is not None)
    return (
        f"{settings['model']} on {run['dataset']}, {run['steps']:,} steps of {settings['batch_size']}, {state}{day}{of}"
    )


def _tiles(run: Mapping[str, Any], analysis: Mapping[str, Any] | None) -> str:
    test, metrics = run["test"] or run["valid"], "test" if run["test"] else "validation"
    tiles: list[tuple[str, str]] = []
    names = metric_names(run["k"])
    for name, words in sorted(names.items(), key=lambda each: each[0] != run["metric"]):
        if test.get(name) is not None and len(tiles) < 3:
            tiles.append((f"{test[name]:.4f}", f"{words}, {metrics} rows"))
    if run["samples"]:
        tiles.append((format_count(run["samples"]), "samples/s in training"))
        if analysis is not None:
            share = run["samples"] / possible(analysis)
            limit = f"of the limit of {analysis['machine']['name']} (products and reads of rows alone), "
            when = "measured for this page" if share <= 1 else "which was busier when this page measured it: --again"
            tiles.append((f"{share:.0%}", limit + when))
    if rates := [each["hit_rate"] for each in run["losses"] if "hit_rate" in each]:
        tiles.append((f"{sum(rates) / len(rates):.1%}", "of the rows were in fast memory"))
    if analysis is not None:
        tiles.append(
            (format_size(sum(each["bytes"] for each in analysis["tables"])), f"in {len(analysis['tables'])} tables")
        )
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(words)}</span></div>' for value, words in tiles
    )
    return f'<div class="tiles">{shown}</div>'


def possible(analysis: Mapping[str, Any]) -> float:
    """Return the samples/s of a step that does only its products and reads of rows, one after the other."""
    machine, work = analysis["machine"], analysis["work"]
    return float(1 / (work["operations"] / machine["operations"] + work["row_bytes"] / machine["row_bytes"]))


def _advice(run: Mapping[str, Any], analysis: Mapping[str, Any] | None) -> str:
    rows = [[each.change, each.why, each.gain] for each in advise(run, analysis)]
    shown = grid(Grid(["change", "why", "gain"], rows, left=(0, 1, 2))) if rows else "<p>Nothing stands out.</p>"
    return section("What to change next", shown)


def _curves(run: Mapping[str, Any]) -> str:
    words = metric_names(run["k"]).get(run["metric"], run["metric"])
    loss = [(each["epoch"], each["loss"]) for each in run["losses"] if "epoch" in each]
    pairs = [(each["epoch"], each[run["metric"]]) for each in run["valid_curve"] if each.get(run["metric"]) is not None]
    rate = [(each["epoch"], each["samples_per_second"]) for each in run["losses"] if "epoch" in each]
    same = run["settings"]["loss"] == "bce"  # else the loss of training is another than the log loss
    valid = [
        (each["epoch"], each["log_loss"]) for each in run["valid_curve"] if same and each.get("log_loss") is not None
    ]
    drawn = [chart({"training": loss, "validation": valid}, "loss by epoch"),
             chart({"validation": pairs}, f"{words} by epoch"),
             chart({"samples/s": rate}, "samples/s by epoch", least=0.0)]  # fmt: skip
    return f'<div class="pair">{"".join(drawn)}</div>'


def _figures(run: Mapping[str, Any]) -> str:
    columns = {name: run[name] for name in ("valid", "test") if run[name]}
    split = "test" if run["test"] else "valid"
    columns |= {f"{name}, {split}": of[split] for name, of in run["baselines"].items() if of.get(split)}
    return grid(metric_grid(columns)) if columns else "<p>No evaluation yet.</p>"


def _time(run: Mapping[str, Any], analysis: Mapping[str, Any] | None) -> str:
    spent: dict[str, float] = {}
    steps = 0.0
    for each in run["losses"]:
        if "stage_seconds" in each:
            steps += 1
            size = each.get("seconds_per_step", 0.0)
            total = sum(each["stage_seconds"].values()) or 1.0
            for name, seconds in each["stage_seconds"].items():
                spent[name] = spent.get(name, 0.0) + size * seconds / total
    shown = []
    if steps:
        each_step = {name: 1000 * value / steps for name, value in spent.items()}
        shown.append(bars(each_step, "ms of a step, by stage and over all threads"))
        moved = "fetched_mib_per_step"
        fetched = [(each["epoch"], each[moved]) for each in run["losses"] if moved in each]
        hits = [(each["epoch"], 100 * each["hit_rate"]) for each in run["losses"] if "hit_rate" in each]
        shown += [
            chart({"fetched": fetched}, "MiB of rows fetched in a step", least=0.0),
            chart({"hit rate": hits}, "hit rate, %"),
        ]
    if analysis is not None:
        machine, work, size = analysis["machine"], analysis["work"], run["settings"]["batch_size"]
        if run["samples"] and isinstance(size, int):
            parts = {
                "products at full speed": 1000 * size * work["operations"] / machine["operations"],
                "rows at full speed": 1000 * size * work["row_bytes"] / machine["row_bytes"],
            }  # fmt: skip
            parts["everything else"] = max(0.0, 1000 * size / run["samples"] - sum(parts.values()))
            shown.append(bars(parts, f"ms of a step, against the limits of {machine['name']}, measured for this page"))
        if (cache := analysis["cache"]) is not None:
            rates = {_CACHES.get(name, name): 100 * value for name, value in cache["rates"].items()}
            shown.append(bars(rates, f"hit rate of caches of this size, %, over {cache['steps']:,} batches"))
    return f'<div class="pair">{"".join(shown)}</div>' if shown else "<p>All rows were in fast memory.</p>"


def _updates(run: Mapping[str, Any]) -> str:
    """Return how good the model was on each update's rows before it had seen them, and which ids came and went."""
    lines, all_names = run["updates"], metric_names(run["k"])
    shown = {name for each in lines for name, value in each["before"].items() if value is not None}
    names = {name: all_names[name] for name in (run["metric"], "auc", "log_loss") if name in shown & {*all_names}}
    curves = {
        words: [(float(each["number"]), each["before"][name]) for each in lines if each["before"].get(name) is not None]
        for name, words in names.items()
    }
    drawn = [chart({words: points}, f"{words} on new rows, by update") for words, points in curves.items()]
    total = {number: _sum(each.get("ids", {})) for number, each in enumerate(lines)}
    came = {
        words: [(float(each["number"]), float(total[place][key])) for place, each in enumerate(lines) if total[place]]
        for key, words in (("new", "got a row"), ("gone", "lost theirs"), ("reused", "rows reused"))
    }
    drawn.append(chart(came, "ids of all tables, by update", least=0.0))
    rows = [
        [f"{each['number']}", f"{each['rows']:,}", *(_number(each["before"].get(name)) for name in names), table,
         *(f"{ids[key]:,}" for key in _IDS)]
        for each in reversed(lines) for table, ids in (each.get("ids") or {"": dict.fromkeys(_IDS, 0)}).items()
    ]  # fmt: skip
    headings = ["update", "rows", *(f"{words} before" for words in names.values()), "table", *_IDS.values()]
    table = grid(Grid(headings, rows[:_LINES], left=(headings.index("table"),)))
    return (
        "<p>Before an update, the model is tested on the new rows. Everything else on this page is about the model "
        f'before all updates.</p><div class="pair">{"".join(drawn)}</div>{table}{_left_out(len(rows))}'
    )


def _sum(tables: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the counts of all tables together; none if they were not counted."""
    return {key: sum(each[key] for each in tables.values()) for key in _IDS} if tables else {}


def _tables(analysis: Mapping[str, Any], likely: bool) -> str:
    """Return what each table costs and, if scores are probabilities, the log loss that each column saves."""
    brings: dict[str, list[Mapping[str, Any]]] = {}
    for each in analysis["columns"] if likely else ():
        brings.setdefault(each["table"] or each["name"], []).append(each)

    def gain(name: str) -> list[str]:
        said = ", ".join(f"{each['loss']:+.5f} ± {each['error']:.5f}" for each in brings.get(name, []))
        return [said or "not measured"] if likely else []

    saves = ["log loss it saves"] if likely else []
    order = sorted(analysis["tables"], key=lambda each: -each["bytes"])
    rows = [
        [each["name"], f"{each['rows']:,}", f"{each['dim']}", format_size(each["bytes"]), f"{each['lookups']:.2f}",
         f"{each['distinct']:.1%}", "-" if each["unknown"] is None else f"{each['unknown']:.2%}", *gain(each["name"])]
        for each in order[:_LINES]
    ]  # fmt: skip
    headings = ["table", "rows", "dim", "with state", "ids a row", "distinct", "missing or unknown", *saves]
    found = grid(Grid(headings, rows)) + _left_out(len(order))
    dense = [each for each in analysis["columns"] if likely and each["table"] is None]
    if best := sorted(dense, key=lambda each: -each["loss"])[:_LINES]:
        found += grid(Grid(["dense column", *saves], [[each["name"], *gain(each["name"])] for each in best]))
    what = ": the log loss that shuffling a column adds, with its standard error" if likely else ""
    return f"<p>Measured on {analysis['rows']:,} {analysis['split']} rows{what}.</p>{found}"


def _calibration(analysis: Mapping[str, Any]) -> str:
    points = [(each["score"], each["label"]) for each in analysis["calibration"]]
    high = max(max(point) for point in points)
    order = sorted(analysis["slices"], key=lambda each: each["log_loss"], reverse=True)
    shown = [
        [each["slice"], f"{each['rows']:,}", *(_number(each[key]) for key in ("auc", "log_loss", "calibration"))]
        for each in order
    ]
    table = grid(Grid(["slice", "rows", "AUC", "log loss", "calibration"], shown[:_LINES])) + _left_out(len(shown))
    drawn = chart({"labels": points, "exact": [(0.0, 0.0), (high, high)]}, "mean label by mean score", least=0.0)
    return f'<div class="pair"><div>{drawn}</div><div>{table if shown else "<p>No slice has 100 rows.</p>"}</div></div>'


def _number(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.4f}"


def _left_out(count: int) -> str:
    return f"<p>{count - _LINES:,} more are left out.</p>" if count > _LINES else ""
