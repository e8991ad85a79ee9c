"""The loss by learning rate as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stoker.data.picture import blank, check_plot, write_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stoker.training.find_lr import Finding

__all__ = ["draw_finding", "plot_finding"]


def plot_finding(finding: Finding, path: Path) -> None:
    """Write the picture as a PNG.

    Raises:
        ConfigError: the name does not end in .png.
        DependencyError: matplotlib is not installed.
        DataError: the disk has no room.
    """
    check_plot(path)
    write_png(draw_finding(finding), path)


def draw_finding(finding: Finding) -> Figure:
    """The picture itself."""
    figure = blank(7, 4)
    axes = figure.subplots()
    name = "row_lr" if finding.which == "rows" else "dense_lr"
    base = finding.row_lr if finding.which == "rows" else finding.dense_lr
    rates = [base * factor for factor in finding.factors]
    axes.plot(rates, finding.losses, linewidth=0.6, color="lightgray", label="loss")
    axes.plot(rates, finding.smoothed, label="smoothed")
    for (rule, factor), style in zip(finding.candidates.items(), ("-", "--"), strict=False):
        found = finding.rates(factor)
        words = ", ".join(f"{key} {value:.2g}" for key, value in found.items())
        axes.axvline(found[name], linestyle=style, linewidth=1, color="gray", label=f"{rule}: {words}")
    low, high = min(finding.smoothed), max(finding.smoothed[: max(1, len(finding.smoothed) // 4)])
    axes.set(xscale="log", xlabel=name, ylabel="loss", ylim=(low - 0.1 * (high - low + 1e-9), high + high - low + 1e-9))
    axes.legend()
    return figure
