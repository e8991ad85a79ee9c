"""What a profile found: how many rows of each table are hot, and what they serve.

A value: plain numbers, saved as JSON, with a hash that data classified by it carries.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.errors import DataError
from stoker.base.files import atomic_file
from stoker.base.picture import blank, check_plot, write_png
from stoker.base.units import format_size, quoted
from stoker.dataset.manifest import canonical_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CurvePoint", "HotProfile", "HotTable", "ProfileSettings", "draw_profile", "plot_profile"]

FORMAT_VERSION = 1
_KIND = "stoker.HotProfile"


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """What :func:`stoker.profile` was asked."""

    budget: int  # L: bytes for hot rows and their optimizer state
    embedding_dim: int  # columns of every table
    dtype: str  # of the weights
    optimizer: str  # kind of the row optimizer, whose state counts
    sample: float | None  # x: share of the training inputs that was read; None: the vocabulary's counts
    method: str  # "stratified", "chunks" or "exact"
    confidence: float  # of the intervals, 0.999 for 99.9 %
    chunks: int  # n
    chunk_rows: int  # m
    seed: int


@dataclass(frozen=True, kw_only=True)
class HotTable:
    """One table. Its hot rows are the ids below ``hot_rows``."""

    name: str
    rows: int
    row_bytes: int  # weights and optimizer state
    accesses: int  # T_z: lookups in an epoch of training
    hot_rows: int  # H: what lies in fast memory
    estimate: int  # rows with at least the threshold's share of the accesses
    low: int  # the interval of the estimate, at the confidence that was asked for
    high: int
    access_share: float  # of the table's lookups that hot rows serve
    whole: bool  # under 1 MB, and therefore hot as a whole
    by_count: (
        bool  # ids follow the count, as those of a vocabulary do; where they do not, the hot rows are a prefix too
    )

    @property
    def hot_bytes(self) -> int:
        """What the hot rows take, with optimizer state."""
        return self.hot_rows * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One threshold and what would be hot at it (FAE, Figure 5)."""

    threshold: float  # t
    hot_bytes: int
    access_share: float  # of all lookups
    input_share: float  # of inputs whose ids are all hot


@dataclass(frozen=True, kw_only=True)
class HotProfile:
    """The hot rows of a dataset's tables within a budget; made by :func:`stoker.profile`.

    Source: FAE (VLDB 2022), section 4.1.
    """

    schema_hash: str  # of the dataset
    data_hash: str  # of its training rows
    settings: ProfileSettings
    threshold: float  # t: share of a table's accesses that makes a row hot; 0 where all rows fit
    tables: tuple[HotTable, ...]
    access_share: float  # of all lookups that hot rows serve
    input_share: float  # of inputs whose ids are all hot
    input_error: float  # standard error of input_share
    inputs: int  # on which input_share was measured
    curve: tuple[CurvePoint, ...]  # by rising hot_bytes

    @property
    def hot_rows(self) -> dict[str, int]:
        """Table -> H: the ids below H are hot."""
        return {table.name: table.hot_rows for table in self.tables}

    @property
    def hot_bytes(self) -> int:
        """What all hot rows take, with optimizer state; never more than the budget."""
        return sum(table.hot_bytes for table in self.tables)

    @property
    def total_bytes(self) -> int:
        """What all rows take, with optimizer state."""
        return sum(table.rows * table.row_bytes for table in self.tables)

    @cached_property
    def hash(self) -> str:
        """sha256 of the profile's canonical JSON, in hex: equal profiles have equal hashes."""
        return hashlib.sha256(canonical_json(self.to_dict()).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"tables": [asdict(t) for t in self.tables], "curve": [asdict(p) for p in self.curve]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HotProfile:
        """Inverse of :meth:`to_dict`.

        Raises:
            DataError: values that no profile has.
        """
        try:
            made = cls(
                **{
                    **_only(cls, values),
                    "settings": ProfileSettings(**_only(ProfileSettings, values["settings"])),
                    "tables": tuple(HotTable(**_only(HotTable, table)) for table in values["tables"]),
                    "curve": tuple(CurvePoint(**_only(CurvePoint, point)) for point in values["curve"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"these values are no profile of hot rows ({type(error).__name__}: {error}).") from error
        if problem := _problem(made):
            raise DataError(f"these values are no profile of hot rows: {problem}.")
        return made

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, whole or not at all.

        Raises:
            DataError: the disk has no room.
            OSError: the file cannot be written.
        """
        values = {"kind": _KIND, "format_version": FORMAT_VERSION, "hash": self.hash, **self.to_dict()}
        with atomic_file(path) as file:
            file.write(json.dumps(values, indent=1, allow_nan=False).encode() + b"\n")

    def plot(self, path: str | Path) -> None:
        """Draw the curve as a PNG: hot bytes by threshold, and what they serve.

        Raises:
            ConfigError: the name does not end in .png.
            DependencyError: matplotlib is not installed.
            DataError: the disk has no room.
        """
        plot_profile(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> HotProfile:
        """Read a profile that :meth:`save` wrote.

        Raises:
            DataError: no such file, another kind of file, a newer or garbled one, or one changed by hand.
        """
        path = Path(path)
        again = f"Make it again with: stoker profile DATASET --out {quoted(path)}"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DataError(f"there is no profile at {path}. {again}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path} cannot be read as a profile ({error}). {again}") from error
        if not isinstance(values, dict) or values.get("kind") != _KIND:
            raise DataError(f"{path} is JSON, but no profile of hot rows. {again}")
        version = values.get("format_version")
        if not isinstance(version, int) or version < 1:
            raise DataError(f"{path} is garbled: its format_version is {version!r}. {again}")
        if version > FORMAT_VERSION:
            raise DataError(
                f"{path} has profile format {version}, this Stoker reads up to {FORMAT_VERSION}. Update Stoker, or "
                "make the profile again with this version."
            )
        try:
            made = cls.from_dict(values)
        except DataError as error:
            raise DataError(f"{path} is garbled: {error} {again}") from error
        if values.get("hash") != made.hash:
            raise DataError(
                f"{path} was changed since it was written: its hash is no longer that of its values. {again}"
            )
        return made


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((float, int), "a number"),
    "float | None": ((float, int, type(None)), "a number or null"),
    "str": ((str,), "a text"),
    "bool": ((bool,), "true or false"),
}


def _only(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, each of its own type."""
    made: dict[str, Any] = {}
    for field in fields(kind):
        value = values[field.name]
        types, words = _TYPES.get(str(field.type), ((), ""))
        if types and type(value) not in types:
            raise TypeError(f"{field.name} is {value!r}, expected {words}")
        made[field.name] = float(value) if float in types and value is not None else value
    return made


def _problem(profile: HotProfile) -> str | None:
    """Why a profile cannot be one; None where it can."""
    for table in profile.tables:
        if not 0 <= table.hot_rows <= table.rows or not 0 <= table.low <= table.high <= table.rows:
            return f"table {table.name} has {table.rows:,} rows, {table.hot_rows:,} of them hot"
        if table.row_bytes < 1 or table.accesses < 0:
            return f"table {table.name} has rows of {table.row_bytes} bytes and {table.accesses:,} accesses"
    shares = [profile.access_share, profile.input_share, *(table.access_share for table in profile.tables)]
    if not all(0 <= share <= 1 for share in shares) or not math.isfinite(profile.threshold):
        return "a share lies outside 0 to 1"
    if len({table.name for table in profile.tables}) < len(profile.tables):
        return "a table occurs twice"
    return None


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
