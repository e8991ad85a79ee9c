"""What all pictures share: a canvas without a display, and a PNG that is whole or not there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stoker.base.errors import ConfigError, require
from stoker.base.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot(path: Path) -> None:
    """Refuse a picture that :func:`write_png` cannot write, before anything is measured.

    Raises:
        ConfigError: its name does not end in .png.
        DependencyError: matplotlib is not installed.
    """
    if path.suffix != ".png":
        raise ConfigError(f"{path} does not end in .png. Choose for example {path.with_suffix('.png')}.")
    require("matplotlib", "the picture needs", "pip install 'stoker[plot]'")


def blank(width: float, height: float) -> Figure:
    """Return an empty picture of so many inches, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_png(figure: Figure, path: Path) -> None:
    """Write a picture.

    Raises:
        DataError: the disk has no room.
    """
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=120)
