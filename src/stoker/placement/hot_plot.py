"""The curve of a profile as a picture, after Figure 5 of FAE (VLDB 2022)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stoker.data.shards import atomic_file
from stoker.errors import ConfigError, DependencyError
from stoker.units import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stoker.placement.hot_profile import HotProfile

__all__ = ["check_plot", "draw_profile", "plot_profile"]


def check_plot(path: Path) -> None:
    """Refuse a picture that :func:`plot_profile` cannot write, before anything is measured.

    Raises:
        ConfigError: its name does not end in .png.
        DependencyError: matplotlib is not installed.
    """
    if path.suffix != ".png":
        raise ConfigError(f"{path} does not end in .png. Choose for example {path.with_suffix('.png')}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise DependencyError(
            "the picture needs matplotlib, which is not installed. Run: pip install 'stoker[plot]'"
        ) from error


def plot_profile(profile: HotProfile, path: Path) -> None:
    """Write the curve as a PNG: hot bytes by threshold, and the shares that they serve.

    Raises:
        ConfigError: the name does not end in .png.
        DependencyError: matplotlib is not installed.
        DataError: the disk has no room.
    """
    check_plot(path)
    figure = draw_profile(profile)
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


def draw_profile(profile: HotProfile) -> Figure:
    """The picture itself."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
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
