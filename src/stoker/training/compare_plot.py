"""Curves of compared runs: in characters for a terminal, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.data.picture import blank, check_plot, write_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stoker.training.compare import Comparison

__all__ = ["MARKS", "curves", "draw_comparison", "plot_comparison", "text_plot"]

MARKS = "abcdefghijklmnopqrstuvwxyz"

Points = list[tuple[float, float]]  # (epoch, value), by rising epoch


def curves(comparison: Comparison) -> dict[str, Points]:
    """Of every run with such records the metric on the validation rows, by epoch."""
    found = {
        run.name: [
            (float(record["epoch"]), float(record[comparison.metric]))
            for record in run.curve
            if record.get(comparison.metric) is not None and "epoch" in record
        ]
        for run in comparison.runs
    }
    return {name: points for name, points in found.items() if points}


def text_plot(points: Mapping[str, Points], marks: Mapping[str, str], *, width: int = 60, height: int = 12) -> str:
    """Curves in characters, a mark for each; "*" where several meet.

    Args:
        points: name -> its points; at least one in all.
        marks: name -> the character that stands for it.
        width: columns between the axis and the right edge.
        height: lines above the axis.
    """
    every = [point for each in points.values() for point in each]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(y for _, y in every), max(y for _, y in every)
    cells = [[" "] * width for _ in range(height)]

    def place(x: float, y: float, mark: str) -> None:
        column = round((x - left) / (right - left) * (width - 1)) if right > left else 0
        row = height - 1 - (round((y - low) / (high - low) * (height - 1)) if high > low else height // 2)
        cells[row][column] = mark if cells[row][column] in (" ", mark) else "*"

    for name, each in points.items():
        for x, y in _filled(each, (right - left) / max(1, width - 1)):
            place(x, y, marks[name])
    digits = 4 if high - low >= 0.001 or high == low else min(9, 3 - math.floor(math.log10(high - low)))
    labels = (
        {0: f"{high:.{digits}f}", height - 1: f"{low:.{digits}f}"} if high > low else {height // 2 - 1: f"{low:.4f}"}
    )
    room = max(map(len, labels.values()))
    lines = [f"{labels.get(row, ''):>{room}} |{''.join(cells[row])}".rstrip() for row in range(height)]
    ends = f"{left:g}", f"{right:g}"
    middle = "epoch".center(max(0, width - sum(map(len, ends))))
    return "\n".join([*lines, f"{'':>{room}} +{'-' * width}", f"{'':>{room}}  {ends[0]}{middle}{ends[1]}"])


def _filled(points: Points, step: float) -> Points:
    """The points, and those on the straight lines between them that are ``step`` apart."""
    made = [points[0]]
    for (x, y), (to, value) in pairwise(points):
        parts = max(1, math.ceil((to - x) / step)) if step > 0 else 1
        made += [(x + (to - x) * k / parts, y + (value - y) * k / parts) for k in range(1, parts + 1)]
    return made


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Write the curves as a PNG.

    Raises:
        ConfigError: the name does not end in .png. DependencyError: matplotlib is not installed.
        DataError: the disk has no room.
    """
    check_plot(path)
    write_png(draw_comparison(comparison), path)


def draw_comparison(comparison: Comparison) -> Figure:
    """The picture itself: training loss and the metric on the validation rows, by epoch."""
    figure = blank(9, 3.6)
    losses, metric = figure.subplots(1, 2)
    measured = curves(comparison)
    for number, run in enumerate(comparison.runs):
        color = f"C{number % 10}"
        train = [(record["epoch"], record["loss"]) for record in run.losses if record.get("loss") is not None]
        if train:
            losses.plot(*_columns(train), color=color, linewidth=1, label=run.name)
        if run.name in measured:
            metric.plot(*_columns(measured[run.name]), color=color, marker="o", markersize=3, label=run.name)
    losses.set(xlabel="epoch", ylabel="training loss")
    metric.set(xlabel="epoch", ylabel=f"{comparison.metric} on validation rows")
    for axes in (losses, metric):
        if axes.get_lines():
            axes.legend()
        else:
            axes.set(xticks=[], yticks=[])
            axes.text(0.5, 0.5, "none was recorded", ha="center", va="center", transform=axes.transAxes)
    return figure


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
