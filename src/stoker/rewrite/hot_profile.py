"""The profile of a dataset: the hot rows of each table, and the accesses and inputs that they serve.

It is saved as JSON. Its hash is in the manifest of a dataset that is classified with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stoker.base.errors import ConfigError, DataError, errors_as
from stoker.base.files import atomic_file, hash_json
from stoker.base.picture import Grid, Plotted, blank
from stoker.base.settings import Settings, like, setting
from stoker.base.units import format_size, parse_share, parse_size, quoted
from stoker.placement.budget import ReplaySettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT_VERSION = 1
_KIND = "stoker.HotProfile"


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(Settings, panel="Rows"):
    """The arguments of :func:`stoker.profile`, which the command line shares."""

    #: names of before
    FORMER: ClassVar[Mapping[str, str]] = {"budget": "device_memory", "optimizer": "row_optimizer"}

    device_memory: int | str = setting(
        "512MiB", "Memory for hot rows and their optimizer state.", parse=parse_size, panel="Memory"
    )
    model: str = setting("dlrm", "Model of the rows, as for stoker train: it decides the columns.", panel="Model")
    model_options: Mapping[str, Any] = setting(dict, "The model's own options.", panel="Model")
    embedding_dim: int = like(ReplaySettings, "embedding_dim")
    dtype: Literal["float32", "bfloat16"] = like(ReplaySettings, "dtype")
    row_optimizer: str = like(ReplaySettings, "row_optimizer")
    sample: float | str | None = setting(
        None, "Estimate from this share of the training rows (5% in the paper), and compare with the counts.",
        parse=parse_share, panel="Sample",
    )  # fmt: skip
    confidence: float | str = setting(
        0.999, "Confidence of the intervals, such as 99.9%.", parse=parse_share, panel="Sample"
    )
    seed: int = setting(0, "Seed of the sample, 0 or more.", least=0, panel="Sample")


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """The settings of :func:`stoker.profile`."""

    budget: int  # L: bytes for hot rows and their optimizer state
    embedding_dim: int  # columns of each table, unless the model decides them
    dtype: str  # type of the weights
    optimizer: str  # kind of the row optimizer, whose state counts
    sample: float | None  # x: share of the training inputs to read; None: the counts of the vocabulary
    method: str  # "exact" or "chunks"; "stratified" in profiles of earlier versions
    confidence: float  # confidence of the intervals, 0.999 for 99.9 %
    chunks: int  # n
    chunk_rows: int  # m
    seed: int
    model: str = "dlrm"
    model_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sample == 0:
            raise ConfigError("sample is 0, so no rows would be read. Give a share such as 5%.", settings=("sample",))
        if not 0 < self.confidence < 1:
            raise ConfigError(
                f"confidence is {self.confidence:g}; give a share above 0 and below 100 %, such as 99.9%.",
                settings=("confidence",),
            )
        if self.chunks < 2 or self.chunk_rows < 1:
            raise ConfigError(
                f"chunks={self.chunks} and chunk_rows={self.chunk_rows} must be at least 2 and 1.", settings=("chunks",)
            )


@dataclass(frozen=True, kw_only=True)
class HotTable:
    """The hot rows of one table: the ids below ``hot_rows``."""

    name: str
    rows: int
    row_bytes: int  # weights and optimizer state
    accesses: int  # T_z: lookups in an epoch of training
    hot_rows: int  # H: rows in fast memory
    estimate: int  # rows whose share of the accesses reaches the threshold
    low: int  # interval of the estimate
    high: int
    access_share: float  # share of the lookups that hot rows serve
    whole: bool  # under 1 MB, and so hot as a whole
    by_count: bool  # ids are sorted by count, as those of a vocabulary; if not, the hot rows are a prefix, too

    @property
    def hot_bytes(self) -> int:
        """The bytes of the hot rows, with optimizer state."""
        return self.hot_rows * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One threshold, and what is hot with it (FAE, Figure 5)."""

    threshold: float  # t
    hot_bytes: int
    access_share: float  # share of all lookups
    input_share: float  # share of inputs whose ids are all hot


@dataclass(frozen=True, kw_only=True, repr=False)
class HotProfile(Plotted):
    """The hot rows of the tables of a dataset within a budget. :func:`stoker.profile` makes it.

    Source: FAE (VLDB 2022), section 4.1.

    >>> from stoker.testing import make_dataset
    >>> found = stoker.profile(make_dataset("data", rows=1000), device_memory="2KiB")
    >>> found.save("hot.json")
    >>> stoker.HotProfile.load("hot.json").hot_rows
    {'C1': 7, 'C2': 13, 'C3': 10}
    """

    schema_hash: str  # hash of the schema of the dataset
    data_hash: str  # hash of its training rows
    settings: ProfileSettings
    threshold: float  # t: share of the accesses to a table that makes a row hot; 0 if all rows fit
    tables: tuple[HotTable, ...]
    access_share: float  # share of all lookups that hot rows serve
    input_share: float  # share of inputs whose ids are all hot
    input_error: float  # standard error of input_share
    inputs: int  # inputs on which input_share was measured
    curve: tuple[CurvePoint, ...]  # by rising hot_bytes

    @property
    def hot_rows(self) -> dict[str, int]:
        """Table -> H: the ids below H are hot."""
        return {table.name: table.hot_rows for table in self.tables}

    @property
    def hot_bytes(self) -> int:
        """The bytes of all hot rows, with optimizer state; never more than the budget."""
        return sum(table.hot_bytes for table in self.tables)

    @property
    def total_bytes(self) -> int:
        """The bytes of all rows, with optimizer state."""
        return sum(table.rows * table.row_bytes for table in self.tables)

    def summary(self) -> str:
        """Return the hot rows, their bytes, and what they serve."""
        rows, hot = sum(table.rows for table in self.tables), sum(self.hot_rows.values())
        return (
            f"{hot:,} of {rows:,} rows are hot ({hot / max(rows, 1):.2%}), {format_size(self.hot_bytes)} of "
            f"{format_size(self.total_bytes)}; they serve {self.access_share:.2%} of the accesses and "
            f"{self.input_share:.2%} of the inputs"
        )

    def grids(self) -> tuple[Grid, Grid]:
        """Return the tables, the largest first, and the curve."""
        tables = [
            [
                each.name, f"{each.rows:,}", f"{each.hot_rows:,}", f"{each.hot_rows / each.rows:.2%}",
                format_size(each.hot_bytes), f"{each.access_share:.2%}",
            ]
            for each in sorted(self.tables, key=lambda each: -each.rows)
        ]  # fmt: skip
        curve = [
            [f"{p.threshold:.2g}", format_size(p.hot_bytes), f"{p.access_share:.1%}", f"{p.input_share:.1%}"]
            for p in self.curve
        ]
        return (
            Grid(["table", "rows", "hot rows", "share", "hot bytes", "accesses"], tables),
            Grid(["threshold", "hot bytes", "accesses", "inputs"], curve, "by threshold"),
        )

    @cached_property
    def hash(self) -> str:
        """The sha256 of the canonical JSON, in hex: equal profiles have equal hashes."""
        return hash_json(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        settings = asdict(self.settings)
        for name, usual in {"model": "dlrm", "model_options": {}}.items():
            if settings[name] == usual:  # profiles of earlier versions lack it: their hashes remain
                del settings[name]
        return asdict(self) | {
            "settings": settings, "tables": [asdict(t) for t in self.tables], "curve": [asdict(p) for p in self.curve],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HotProfile:
        """Make a profile from the values of :meth:`to_dict`.

        Raises:
            DataError: these are not the values of a profile.
        """
        with errors_as(DataError, "these values are not a profile of hot rows", caught=(KeyError, TypeError)):
            made = {
                "settings": ProfileSettings(**values["settings"]),
                "tables": tuple(HotTable(**table) for table in values["tables"]),
                "curve": tuple(CurvePoint(**point) for point in values["curve"]),
            }
            return cls(**{**values, **made})

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, whole or not at all.

        Raises:
            DataError: the disk has no room.
            OSError: the file cannot be written.
        """
        values = {"kind": _KIND, "format_version": FORMAT_VERSION, "hash": self.hash, **self.to_dict()}
        with atomic_file(path) as file:
            file.write(json.dumps(values, indent=1, allow_nan=False).encode() + b"\n")

    def figure(self) -> Figure:
        """Draw the curve: hot bytes by threshold, and what they serve."""
        from matplotlib.ticker import LogLocator, NullFormatter

        figure = blank(9, 3.6)
        sizes, shares = figure.subplots(1, 2)
        thresholds = [point.threshold for point in self.curve]
        mib = [point.hot_bytes / 2**20 for point in self.curve]
        sizes.plot(thresholds, mib, marker="o", markersize=3)
        sizes.axhline(self.settings.budget / 2**20, linestyle="--", linewidth=1, color="gray")
        sizes.annotate(
            f"budget {format_size(self.settings.budget)}", (0.02, self.settings.budget / 2**20),
            xycoords=("axes fraction", "data"), ha="left", va="bottom", color="gray",
        )  # fmt: skip
        sizes.set(xscale="log", yscale="log", xlabel="threshold (share of a table's accesses)", ylabel="hot rows (MiB)")
        sizes.invert_xaxis()
        shares.plot(mib, [100 * point.access_share for point in self.curve], marker="o", markersize=3, label="accesses")
        shares.plot(mib, [100 * point.input_share for point in self.curve], marker="s", markersize=3, label="inputs")
        shares.axvline(self.hot_bytes / 2**20, linestyle="--", linewidth=1, color="gray")
        shares.set(xscale="log", xlabel="hot rows (MiB)", ylabel="served by hot rows (%)", ylim=(0, 101))
        shares.legend()
        for axis in (sizes.yaxis, shares.xaxis):  # if an axis spans about a decade, default labels overlap
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,), numticks=9))
            axis.set_major_formatter(lambda mib, _: f"{mib:g}")
            axis.set_minor_formatter(NullFormatter())
        return figure

    @classmethod
    def load(cls, path: str | Path) -> HotProfile:
        """Read a profile that :meth:`save` wrote.

        Raises:
            DataError: no such file, another kind of file, a newer or garbled one, or one changed by hand.
        """
        path = Path(path)
        again = f"Make one with: stoker profile DATASET --out {'PROFILE.json' if path.exists() else quoted(path)}"
        if not path.exists():
            raise DataError(f"there is no profile at {path}. {again}")
        with errors_as(DataError, f"{path} cannot be read as a profile", again, (OSError, ValueError, RecursionError)):
            values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("kind") != _KIND:
            raise DataError(f"{path} is JSON, but not a profile of hot rows. {again}")
        version = values.get("format_version")
        if not isinstance(version, int) or version < 1:
            raise DataError(f"{path} is garbled: its format_version is {version!r}. {again}")
        if version > FORMAT_VERSION:
            raise DataError(
                f"{path} has profile format {version}, this Stoker reads up to {FORMAT_VERSION}. Update Stoker, or "
                "make the profile again with this version."
            )
        known = {name: value for name, value in values.items() if name not in ("kind", "format_version", "hash")}
        if values.get("hash") != hash_json(known):
            raise DataError(f"{path} was changed after it was written: its hash does not fit its values. {again}")
        try:
            return cls.from_dict(known)
        except DataError as error:
            raise DataError(f"{path} is garbled: {error} {again}") from error
