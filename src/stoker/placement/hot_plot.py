"""The curve of a profile as a picture, after Figure 5 of FAE (VLDB 2022)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stoker.data.picture import blank, check_plot, write_png
from stoker.units import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stoker.placement.hot_profile import HotProfile

__all__ = ["draw_profile", "plot_profile"]


def plot_profile(profile: HotProfile, path: Path) -> None:
    """Write the curve as a PNG: hot bytes by threshold, and the shares that they serve.

    Raises:
        ConfigError: the name does not end in .png.
        DependencyError: matplotlib is not installed.
        DataError: the disk has no room.
    """
    check_plot(path)
    write_png(draw_profile(profile), path)


def draw_profile(profile: HotProfile) -> Figure:
    """The picture itself."""
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = blank(9, 3.6)
    sizes, shares = figure.subplots(1, 2)
    thresholds = [point.threshold for point in profile.curve]
    mib = [point.hot_bytes / 2**20 for point in profile.curve]
    sizes.plot(thresholds, mib, marker="o", markersize=3)
    sizes.axhline(profile.settings.budget / 2**20, linestyle="--", linewidth=1, color="gray")
    sizes.annotate(
        f"budget {format_size(profile.settings.budget)}", (1, profile.settings.budget / 2**20),
        xycoords=("axes fraction", "data"), ha="right", va="bottom", color="gray",
    )  # fmt: skip
    sizes.set(xscale="log", yscale="log", xlabel="threshold (share of a table's accesses)", ylabel="hot rows (MiB)")
    sizes.invert_xaxis()
    shares.plot(mib, [100 * point.access_share for point in profile.curve], marker="o", markersize=3, label="accesses")
    shares.plot(mib, [100 * point.input_share for point in profile.curve], marker="s", markersize=3, label="inputs")
    shares.axvline(profile.hot_bytes / 2**20, linestyle="--", linewidth=1, color="gray")
    shares.set(xscale="log", xlabel="hot rows (MiB)", ylabel="served by hot rows (%)", ylim=(0, 101))
    shares.legend()
    for axis in (sizes.yaxis, shares.xaxis):  # where an axis spans about a decade, default labels run into each other
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,), numticks=9))
        axis.set_major_formatter(lambda mib, _: f"{mib:g}")
        axis.set_minor_formatter(NullFormatter())
    return figure
