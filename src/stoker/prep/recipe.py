"""What a recipe for a public log says.

A recipe describes the raw files (:class:`RawInput`) and has a schema for each preset. If training rows are not the raw
lines (sampled negatives, joins, exploded lists), it also derives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from stoker.base.checks import near
from stoker.base.errors import ConfigError, SchemaError
from stoker.prep.source_format import SourceFormat

if TYPE_CHECKING:
    import polars as pl

    from stoker.prep.schema import Schema

OWN_SCHEMA = "schema"  # the preset of a recipe that wraps a user's schema
RAW_TYPES = ("hex", "int", "float", "string")

Derive = Callable[[Mapping[str, "pl.LazyFrame"], "Schema"], "pl.LazyFrame"]


@dataclass(frozen=True, kw_only=True)
class RawInput:
    """One kind of raw file that a deriving recipe reads, and the types of its columns.

    Lines with a wrong number of fields or a value of another type go to the quarantine. ``derive`` gets only the named
    columns: hex as UInt64, int as Int64, float as Float64, string as String; an empty field is null. It gets Parquet
    files as they are, with all columns and their own types.
    """

    files: tuple[str, ...] = ("*",)  # patterns of file names; the first input with a match takes the file
    format: SourceFormat = field(default_factory=SourceFormat)
    columns: Mapping[str, str]  # raw column -> hex | int | float | string
    required: tuple[str, ...] = ()  # an empty field here is a bad line
    labels: tuple[str, ...] = ()  # numbers that must be 0 or 1
    optional: bool = False  # whether the recipe works without such a file
    lookup: bool = False  # the file describes users or items: later rows are joined with it again

    def __post_init__(self) -> None:
        for name, kind in self.columns.items():
            if kind not in RAW_TYPES:
                raise SchemaError(f"raw column {name!r}: type {kind!r} is not one of: {', '.join(RAW_TYPES)}.")
        for what, names in (("required columns", self.required), ("labels", self.labels)):
            if unknown := sorted(set(names) - set(self.columns)):
                raise SchemaError(f"{what} {unknown} are not among the raw columns.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A known log: its raw format, its presets, and how its training rows are made.

    Without ``derive`` the training rows are the raw lines, read in the format of ``schema().source``. With ``derive``,
    the raw lines of every input are checked and typed first. ``derive`` then gets one lazy frame per input and returns
    the training rows, to which the schema applies. For the same input it must return the same rows in the same order:
    seed every choice, and sort where order matters. A column may name the split of a row (rule "column"). A list column
    is a sequence.
    """

    name: str
    description: str  # one line for listings
    presets: Mapping[str, Callable[[], Schema]]  # the first is the default
    preset: str | None = None  # the chosen one; None: the first
    inputs: Mapping[str, RawInput] = field(default_factory=dict)  # required with derive
    derive: Derive | None = None
    example: str = ""  # a command line, for help and errors
    source: str = ""  # where the files come from, with licence

    def __post_init__(self) -> None:
        if not self.presets:
            raise SchemaError(f"recipe {self.name!r} has no preset.")
        if self.preset is not None and self.preset not in self.presets:
            raise ConfigError(
                f"recipe {self.name!r} has no preset {self.preset!r}. It has: {', '.join(self.presets)}."
                + near(self.preset, list(self.presets))
            )
        if self.derive is not None and not self.inputs:
            raise SchemaError(f"recipe {self.name!r} derives its rows but describes no raw input.")

    @property
    def preset_name(self) -> str:
        """The chosen preset, or the first."""
        return self.preset or next(iter(self.presets))

    @property
    def command(self) -> str:
        """The command that prepares with it, for the manifest."""
        if self.preset_name == OWN_SCHEMA:
            return f"stoker prepare with the schema {self.name}"
        return f"stoker prepare {self.name} --preset {self.preset_name}"

    def input_of(self, file: str) -> str | None:
        """Return the input that a file of this name is of; None if there is none."""
        found = (name for name, raw in self.inputs.items() if any(fnmatch(file, pattern) for pattern in raw.files))
        return next(found, None)

    def lookups(self, files: Iterable[str]) -> dict[str, str]:
        """Return the names of files that describe users or items, each with the name of its input."""
        found = {file: self.input_of(file) for file in files}
        return {file: name for file, name in found.items() if name is not None and self.inputs[name].lookup}

    def schema(self, preset: str | None = None) -> Schema:
        """Return the schema of ``preset``, or of the chosen preset."""
        return self.with_preset(preset).schema() if preset else self.presets[self.preset_name]()

    def with_preset(self, preset: str | None) -> Recipe:
        """Return the recipe with another preset; raise :class:`ConfigError` if it does not exist."""
        return self if preset is None else replace(self, preset=preset)
