"""How results are shown: as one line, as tables in a notebook or in plain text, and as pictures in a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stoker.base.errors import ConfigError, require
from stoker.base.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Grid(NamedTuple):
    """A table of text cells.

    >>> print(Grid(["strategy", "misses"], [["lru", "120"], ["belady", "95"]]).text())
    strategy  misses
    --------  ------
    lru          120
    belady        95
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    left: Sequence[int] = (0,)  # columns that are aligned to the left; the others are figures

    def text(self) -> str:
        """Return the table as lines of equal width."""
        lines = [self.headings, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [self._line(line, widths) for line in lines]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([*filter(None, [self.title]), shown[0], rule, *shown[1:]])

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        sides = ["<" if place in self.left else ">" for place in range(len(cells))]
        padded = (f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True))
        return "  ".join(padded).rstrip()

    def html(self) -> str:
        """Return the table for a notebook."""

        def line(cells: Sequence[str], tag: str) -> str:
            sides = ["left" if place in self.left else "right" for place in range(len(cells))]
            said = (
                f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>'
                for cell, side in zip(cells, sides, strict=True)
            )
            return f"<tr>{''.join(said)}</tr>"

        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        body = "".join(line(row, "td") for row in self.rows)
        return f"<table>{caption}<thead>{line(self.headings, 'th')}</thead><tbody>{body}</tbody></table>"


class Shown(ABC):
    """Base of results: ``print`` shows one line, a notebook shows tables, and :meth:`report` returns both as text.

    A subclass defines :meth:`summary` and, if one line is not enough, :meth:`grids`.
    """

    @abstractmethod
    def summary(self) -> str:
        """Return the most important figures in one line."""

    def grids(self) -> Sequence[Grid]:
        """Return the figures as tables."""
        return ()

    def report(self) -> str:
        """Return the summary and all tables as plain text."""
        return "\n\n".join([self.summary(), *(grid.text() for grid in self.grids())])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self)[1:-1])}</p>{''.join(grid.html() for grid in self.grids())}"


def check_plot(path: Path) -> None:
    """Refuse a picture that :class:`Plotted` cannot write, before anything is measured."""
    if path.suffix != ".png":
        raise ConfigError(f"{path} does not end in .png. Choose for example {path.parent / 'plot.png'}.")
    require("matplotlib", "the picture needs")


def blank(width: float, height: float) -> Figure:
    """Return an empty picture of the given size in inches; it needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


class Plotted(Shown):
    """Base of results that can be drawn; a subclass defines :meth:`figure`."""

    @abstractmethod
    def figure(self) -> Figure:
        """Return the picture, as Matplotlib's figure."""

    def plot(self, path: str | Path) -> None:
        """Write :meth:`figure` as a PNG.

        Raises:
            ConfigError: the name does not end in .png.
            DependencyError: matplotlib is not installed.
            DataError: the disk has no room.
        """
        check_plot(Path(path))
        with atomic_file(path) as file:
            self.figure().savefig(file, format="png", dpi=120)
