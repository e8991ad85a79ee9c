"""What to change next and what it would gain, from the files of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stoker.base.units import format_size, listed, plural
from stoker.training.scores.metrics import deciding, merit, metric_names

Record = Mapping[str, Any]
_ENOUGH = 100  # rows of each label, below which figures are little more than chance
_SMALL = 0.01  # share of the log loss that a column without use adds at most, its error included


class Advice(NamedTuple):
    """A change, why, and what it would gain."""

    change: str
    why: str
    gain: str


def advise(run: Record, analysis: Record | None) -> list[Advice]:
    """Return advice, the most valuable first; ``run`` is what :func:`stoker.training.report.page.read` returns."""
    found = [*_epochs(run), *_stalls(run)]
    if analysis is not None:
        likely = run["settings"]["loss"] == "bce"  # else scores are no probabilities
        found += [*(_tables(analysis) if likely else ()), *_unknown(analysis), *_cache(run, analysis)]
        found += _calibration(analysis) if likely else ()
    doubts = weak({"validation": run["valid"], "test": run["test"]}, run["settings"]["loss"])
    return [*doubts, *_baseline(run), *found]


def weak(splits: Mapping[str, Record], loss: str) -> Iterator[Advice]:
    """Say that a model is worse than none, and which figures are little more than chance; ``splits``: the test last."""
    if loss != "bce":  # others rank: their scores are no probabilities, and all rows may be positive
        return
    figures = {name: metrics for name, metrics in splits.items() if metrics}
    for name, metrics in [*figures.items()][-1:]:
        if (entropy := metrics.get("normalized_entropy") or 0) > 1:
            yield Advice(
                "Do not use these scores: train on more rows, for fewer epochs, or with lower learning rates",
                f"the mean label is the better score: the normalized entropy on {name} rows is {entropy:.4f}",
                f"at least {1 - 1 / entropy:.1%} of the log loss",
            )
    for name, metrics in figures.items():
        positives = metrics.get("positives", _ENOUGH)
        few = int(min(positives, metrics.get("rows", 2 * _ENOUGH) - positives))
        if few < _ENOUGH:
            yield Advice(
                f"Hold out more rows for {name}, or use a longer log",
                f"only {plural(few, 'row')} for {name} with the rarer label: a difference of metrics may be chance",
                "figures that tell models apart",
            )


def _baseline(run: Record) -> Iterator[Advice]:
    held_out, words = ("test", "test") if run["test"] else ("valid", "validation")
    figures = {name: auc for name, of in run["baselines"].items() if (auc := of.get(held_out, {}).get("auc"))}
    own = run[held_out].get("auc")
    if not figures or own is None:
        return
    best = max(figures, key=lambda name: figures[name])
    if figures[best] >= own:
        yield Advice(
            _simpler(run, best),
            f"{best} reaches a {words} AUC of {figures[best]:.4f}, this model {own:.4f}",
            f"at least {figures[best] - own:.4f} AUC",
        )


def _simpler(run: Record, better: str) -> str:
    """Return what brings a model closer to the simple one that is better."""
    settings, own = run["settings"], run["test"] or run["valid"]
    if better != "logistic regression" or settings.get("model") != "dlrm" or not own.get("positives"):
        return "Lower the learning rates or the batch size"
    if (settings.get("model_options") or {}).get("linear") is None:
        given = f"--model-option linear={own['positives'] / own['rows']:.3g}"  # the share of label 1
        if (eps := (settings.get("row_options") or {}).get("eps")) is not None:
            given += f" --row-option eps={eps:.3g}"  # by the rules, which do not add it to given options
        return f"Add linear terms ({given}), or try --model dcn"
    return "Lower the rate of the dense part, above all if most columns are ids (--dense-lr 1e-4)"


def _epochs(run: Record) -> Iterator[Advice]:
    curve, metric = run["valid_curve"], run["metric"]
    if len(curve) < 2:
        return
    values = [merit(each, metric) for each in curve]
    best = max(range(len(values)), key=lambda place: values[place])
    if not math.isfinite(values[best]):
        return
    decides = deciding(curve[best], metric)
    words = metric_names(run["k"]).get(decides, decides)
    if best + 1 < len(curve):
        step, epoch, last = curve[best]["step"], curve[best]["epoch"], curve[-1]["step"]
        option = f"--epochs {epoch:.0f}" if epoch == round(epoch) else f"--steps {step}"
        worse = (place for place in range(1, len(values)) if values[place] <= max(values[:place]))
        first = next(worse, 0)
        more = ""
        if first == best + 1 < len(curve) - 1:  # patience ends a run one evaluation after the best
            more = f"; {1 - curve[first]['step'] / last:.0%} with --patience 1"
        yield Advice(
            f"Stop after epoch {epoch:.3g} ({option})",
            f"{words} was best at step {step:,}; no later evaluation was better",
            f"{1 - step / last:.0%} of the training time, the same model{more}",
        )
    elif math.isfinite(before := values[best - 1]) and values[best] - before > (values[best] - values[0]) / 20:
        yield Advice(
            "Train longer (--epochs)",
            f"{words} still improved in the last evaluation, by {values[best] - before:.4f}",
            "not known until it is tried",
        )


def _stalls(run: Record) -> Iterator[Advice]:
    shares = [each["stall_share"] for each in run["losses"] if "stall_share" in each]
    if shares and (share := sum(shares) / len(shares)) > 0.05:
        yield Advice(
            "Give rows more fast memory (--device-memory)",
            f"training waited for rows in {share:.0%} of its time",
            f"at most {share:.0%} of the training time; stoker plan predicts it for each size",
        )


def _tables(analysis: Record) -> Iterator[Advice]:
    costs = {each["name"]: each["bytes"] for each in analysis["tables"]}
    compressed = {each["name"] for each in analysis["tables"] if each.get("compressed")}
    brings: dict[str, list[Record]] = {}
    for each in analysis["columns"]:
        brings.setdefault(each["table"], []).append(each)
    total, (rows, positives) = sum(costs.values()), _counted(analysis)
    if min(positives, rows - positives) < _ENOUGH:
        return
    share = positives / rows
    most = _SMALL * -(share * math.log(share) + (1 - share) * math.log(1 - share))  # of the mean label's log loss
    idle = [
        name for name in sorted(costs, key=lambda name: -costs[name])
        if name in brings and costs[name] > 0.01 * total
        and all(each["loss"] <= 2 * each["error"] <= most - each["loss"] for each in brings[name])
    ]  # fmt: skip
    if idle:
        size, trains = sum(costs[name] for name in idle), ", or tensor trains" if {*idle} - compressed else ""
        yield Advice(
            f"Leave out {listed(idle)}, or make them smaller (min_count in the schema{trains})",
            f"shuffling their ids raises the log loss by less than twice its error, and by less than {_SMALL:.0%}",
            f"{format_size(size)}, {size / total:.0%} of all tables",
        )


def _unknown(analysis: Record) -> Iterator[Advice]:
    # Id 0 is also a missing or rare value: what the training rows have of it tells nothing new.
    new = {each["name"]: (each["unknown"] or 0) - (each.get("unknown_train") or 0) for each in analysis["tables"]}
    if many := [name for name in new if new[name] > 0.2]:
        worst = max(many, key=lambda name: new[name])
        yield Advice(
            "Train more often, or on a longer log",
            f"ids of {worst} are missing or unknown in {new[worst]:.0%} more of the held-out rows than of the training "
            f"rows; above 20 % in {listed(many)}",
            "rows of new ids learn; compare the slices of known and unknown ids",
        )


def _cache(run: Record, analysis: Record) -> Iterator[Advice]:
    cache = analysis["cache"]
    if cache is not None and cache["rates"]["belady"] - cache["rates"]["pinned"] > 0.02:
        yield Advice(
            "Look further ahead (--lookahead, or --epoch-lookahead)",
            f"the best possible cache of this size has a hit rate of {cache['rates']['belady']:.1%}, this strategy "
            f"{cache['rates']['pinned']:.1%}",
            f"{1 - (1 - cache['rates']['belady']) / (1 - cache['rates']['pinned']):.0%} of the fetched rows",
        )


def _calibration(analysis: Record) -> Iterator[Advice]:
    parts: Sequence[Record] = analysis["calibration"]
    rows, positives = _counted(analysis)
    error = sum(abs(each["score"] - each["label"]) * each["rows"] for each in parts) / max(1, rows)
    chance = sum((each["label"] * (1 - each["label"]) * each["rows"]) ** 0.5 for each in parts) / max(1, rows)
    if positives and error > 0.1 * positives / rows + chance:
        yield Advice(
            "Do not use the scores as probabilities before they are calibrated",
            f"scores and labels differ by {error:.4f} on average; the mean label is {positives / rows:.4f}",
            "the ranking does not change; bids and thresholds do",
        )


def _counted(analysis: Record) -> tuple[float, float]:
    """Return the rows of the sample, and those with label 1."""
    parts: Sequence[Record] = analysis["calibration"]
    return sum(each["rows"] for each in parts), sum(each["label"] * each["rows"] for each in parts)
