"""Settings for the bars of extreme batches, sought on validation rows, with seeds that no bar uses.

::

    python -m benchmarks.extreme_search movielens lamb --batch-size 16384 --trials 12 --set row_lr=0.1
    python -m benchmarks.extreme_search --table

A pattern search (Hooke & Jeeves 1961): from the settings of the bar each knob in turn is multiplied and divided by its
factor; what is better is kept, and where no knob helps the factors shrink to their roots. Every side gets the same
number of trials, ``small`` (the reference of batches of 4,096) too. A trial trains once per seed, with as many epochs
as the bar, and is scored by AUC on the validation rows after the last step. The test rows are taken off the dataset
before training. Each trial is a line of the log; one that is there is not trained again, so a search can be stopped
and gone on with. The best settings are printed, and a person writes them into ``extreme_batches``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import stoker
from benchmarks.extreme_batches import CASES, SEEDS, SMALL
from benchmarks.harness import CACHE, Run, Table
from stoker.dataset.dataset import Dataset
from stoker.dataset.split import Split

__all__ = ["KNOBS", "Untested", "main", "search", "table"]

#: what a search turns, and by how much; those that a side does not set stay as they are
KNOBS = {"row_lr": 2.0, "dense_lr": 2.0, "row_weight_decay": 2.0, "row_l2": 2.0, "cow_ratio": 10.0}
FIRST_SEED = 100
_LEAST = 1.2  # a factor that has shrunk below this ends the search


class Untested(Dataset):
    """A dataset without its test rows: what is chosen on it cannot know them."""

    @property
    def splits(self) -> dict[str, Split]:
        return {name: split for name, split in super().splits.items() if name != "test"}


def score(data: Dataset, settings: Mapping[str, Any], seeds: Sequence[int]) -> list[float]:
    """AUC on the validation rows after the last step, for each seed."""
    if set(seeds) & set(range(SEEDS)):
        raise SystemExit(f"seeds {sorted(seeds)}: 0 to {SEEDS - 1} are the bars' own. Take others.")
    found = []
    for seed in seeds:
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            result = stoker.train(
                data, out=Path(folder) / "run", eval_every=10**9, tensorboard=False, display="quiet", seed=seed,
                **settings,
            )  # fmt: skip
        if result.test or result.best_step != result.step:
            raise SystemExit("a trial must see no test rows, and is scored after its last step.")
        found.append(float(result.valid["auc"] or 0.0))
    return found


def _turned(settings: Mapping[str, Any], knob: str, factor: float) -> dict[str, Any]:
    if knob == "cow_ratio":
        ratio, floor = settings["row_cow_clip"]
        return {**settings, "row_cow_clip": [_short(ratio * factor), _short(floor * factor)]}
    return {**settings, knob: _short(settings[knob] * factor)}


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _has(settings: Mapping[str, Any], knob: str) -> bool:
    return bool(settings.get("row_cow_clip" if knob == "cow_ratio" else knob))


def search(
    settings: dict[str, Any],
    value_of: Callable[[dict[str, Any]], float],
    trials: int,
    knobs: Mapping[str, float] = KNOBS,
) -> tuple[dict[str, Any], float]:
    """The best settings found and their value.

    Args:
        settings: where to begin.
        value_of: the value of some settings; more is better.
        trials: how many settings to try, the first among them.
        knobs: name -> factor, each above 1; those that the settings lack or hold at 0 are left alone.
    """
    seen = {_key(settings): value_of(settings)}
    value = seen[_key(settings)]
    factors = {knob: factor for knob, factor in knobs.items() if _has(settings, knob)}
    while factors and min(factors.values()) >= _LEAST:
        moved = False
        for knob, factor in factors.items():
            for way in (factor, 1.0 / factor):
                there = _turned(settings, knob, way)
                if _key(there) not in seen:
                    if len(seen) >= trials:
                        return settings, value
                    seen[_key(there)] = value_of(there)
                if seen[_key(there)] > value:
                    settings, value, moved = there, seen[_key(there)], True
                    break
        if not moved:
            factors = {knob: math.sqrt(factor) for knob, factor in factors.items()}
    return settings, value


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The best trial of every case, means and batch size in the lines of a log, as Markdown."""
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["case"], line["means"], line["batch_size"]), []).append(line)
    rows = []
    for (case, means, batch), trials in sorted(groups.items(), key=lambda item: (item[0][0], item[0][2], item[0][1])):
        top = max(trials, key=lambda line: statistics.mean(line["auc"]))
        known = {**CASES[case].settings, "batch_size": batch}
        own = ", ".join(f"{key} {value}" for key, value in top["settings"].items() if known.get(key) != value)
        rows.append([f"{batch:,}", means, f"{statistics.mean(top['auc']):.4f}", str(len(trials)), case, own])
    columns = ["batch", "by", "validation AUC", "trials", "data", "settings"]
    return Table(title="Best trials", columns=columns, rows=rows).markdown()


def _read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _given(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and print the best settings."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.extreme_search", description=__doc__.split("\n")[0])
    parser.add_argument("case", nargs="?", choices=sorted(CASES))
    parser.add_argument("means", nargs="?", default="small", choices=("small", "lamb", "cowclip"))
    parser.add_argument("--batch-size", type=int, help=f"examples (of small: {SMALL})")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[FIRST_SEED])
    parser.add_argument("--set", type=_given, nargs="+", default=[], metavar="NAME=VALUE", help="where to begin")
    parser.add_argument("--log", type=Path, default=CACHE / "extreme_search.jsonl", help="one line a trial")
    parser.add_argument("--table", action="store_true", help="train nothing; print the best trials of the log")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(_read(options.log)))
        return 0
    if options.case is None:
        parser.error("name a case, or --table")
    case = CASES[options.case]
    data = Untested(case.open(Run.of(quick=False)).path)
    own = {"batch_size": SMALL, **case.small} if options.means == "small" else case.large[options.means]
    settings = {**case.settings, **own, **dict(options.set)}
    if options.batch_size:
        settings["batch_size"] = options.batch_size

    def value_of(trial: dict[str, Any]) -> float:
        plain = json.loads(_key(trial))
        for line in _read(options.log):
            if (line["case"], line["settings"], line["seeds"]) == (options.case, plain, options.seeds):
                return statistics.mean(line["auc"])
        found = score(data, trial, options.seeds)
        line = {
            "case": options.case, "means": options.means, "batch_size": trial["batch_size"], "auc": found,
            "seeds": options.seeds, "settings": plain,
        }  # fmt: skip
        with options.log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        shown = {name: value for name, value in plain.items() if name not in case.settings or name in dict(options.set)}
        print(f"{statistics.mean(found):.5f}  {shown}", flush=True)
        return statistics.mean(found)

    found, value = search(settings, value_of, options.trials)
    print(f"best: {value:.5f} {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
