"""What `prepare(like=...)` takes from a prepared dataset: schema, vocabularies, statistics, fitted features."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from stoker.base.errors import DataError, SchemaError
from stoker.base.units import epoch_unit, listed
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import describe_file
from stoker.dataset.rebuild import UnusableInput
from stoker.prep.features.base import Derivation
from stoker.prep.features.fitted import FittedTable
from stoker.prep.features.past import Past
from stoker.prep.features.store import load_features
from stoker.prep.fit.dense import DenseFit
from stoker.prep.parse.notation import AS_TYPED, BY_VALUE, MIXED, PLAIN, TYPED, agreed, notation_of, written
from stoker.prep.recipe import OWN_SCHEMA, Recipe
from stoker.prep.schema import Schema
from stoker.rewrite.reorder import read_vocabulary

FEATURES = "features"  # folder of the fitted features, within a dataset
NOTATION = "notation"  # key of the manifest: table -> how its texts are written; datasets of 0.1.0 lack it


def times_of(splits: Mapping[str, Any]) -> list[Any]:
    """Return the first and the last time of the rows of a manifest; [] if they have none."""
    found = [split["time"] for split in splits.values() if "time" in split]
    return [min(each["first"] for each in found), max(each["last"] for each in found)] if found else []


def check_unit(known: Sequence[Any], new: Sequence[Any]) -> None:
    """Raise :class:`DataError` if both are first and last times since 1970, in different units."""
    if len(known) != 2 or len(new) != 2 or not all(isinstance(each, int | float) for each in (*known, *new)):
        return
    units = epoch_unit(*known), epoch_unit(*new)
    if None not in units and units[0] != units[1]:
        raise UnusableInput(
            f"the times of the new rows end at {new[1]}, those that the model has seen at {known[1]}: these are "
            f"{units[0]} since 1970, and the new ones {units[1]}. Convert the times of the new rows."
        )


def notation_by_column(
    schema: Schema, tables: Mapping[str, str], fitted_tables: Mapping[str, FittedTable], *, as_typed: bool
) -> dict[str, str]:
    """Return raw column -> how the texts that a dataset knows of it are written.

    Args:
        schema: of the dataset.
        tables: table -> how its texts are written.
        fitted_tables: fitted features, whose tables may have texts of raw columns.
        as_typed: whether 0.1.0 made the dataset, whose floats and times became texts in their own way.
    """
    found: dict[str, set[str]] = {}
    for column in schema.features:
        if column.table_name in tables and (column.type == "string" or tables[column.table_name]):
            found.setdefault(column.raw, set()).add(tables[column.table_name])
    for feature in schema.feature:
        table = fitted_tables[feature.name].table if feature.name in fitted_tables else pl.DataFrame()
        for name in (name for name in feature.inputs if table.schema.get(name) in (pl.String, pl.Float64)):
            texts = table.get_column(name).unique()
            notation, before = notation_of(texts), agreed(found.get(name, set()))
            notation = "" if notation.startswith(TYPED) else notation  # a state changes too often to tell digits
            fits = before and (before.startswith(BY_VALUE) or not notation) and written(texts, before).equals(texts)
            if not fits and (notation or texts.dtype == pl.String):  # 3 next to 2.5 fits
                found.setdefault(name, set()).add(notation)
    known = {column: notation for column, names in found.items() if (notation := agreed(names))}
    known |= {column: f"{PLAIN}|" for column, notation in known.items() if notation == PLAIN}  # known, so no dates
    rest = {"": AS_TYPED} if as_typed else {**schema.notation_of_unlisted(), **dict.fromkeys(found, MIXED)}
    return {**rest, **known}


class Like:
    """What was fitted on the training rows of a dataset, for preparing new rows in the same way.

    Args:
        path: the dataset.
        recipe: the recipe that derived its rows; None: find it by the name in the manifest.
        history: ``"auto"``: window features continue from the stored state; ``"ignore"``: they start empty.
        grow: new values get ids after those of the vocabularies.
        negatives: rows of label 0 are sampled as for the dataset.

    Raises:
        DataError: there is no dataset, no preparation made it, a file is damaged, or the recipe does not exist.
    """

    def __init__(
        self, path: Path, recipe: Recipe | None = None, history: str = "auto", *, grow: bool = False,
        negatives: bool = False,
    ) -> None:  # fmt: skip
        self.data, self.history, self.grow, self.negatives = Dataset(path), history, grow, negatives
        path = self.data.path
        manifest = self.data.manifest
        try:
            self.schema = Schema.from_dict(manifest["schema"], where=f"{path / 'manifest.json'}: schema")
            named, preset = manifest["recipe"]["name"], manifest["recipe"]["preset"]
            stats = manifest["dense_stats"]
            self.dense = [DenseFit(**stats[column.name]) for column in self.schema.dense]
        except (KeyError, TypeError, SchemaError) as error:
            raise DataError(
                f"{path} does not say how it was prepared ({type(error).__name__}: {error}), so nothing can be "
                "prepared like it. Take a dataset that stoker prepare made."
            ) from error
        hashed = {column.table_name for column in self.schema.features if column.hash_buckets is not None}
        if moved := sorted(hashed & (self.data.reordered or {"tables": {}})["tables"].keys()):
            raise DataError(
                f"{path} is reordered, also table {moved[0]}, whose ids are hashes of the values (hash_buckets). New "
                "rows would get the ids of before. Reorder the source without this table, and train on that."
            )
        self.fitted_tables: dict[str, FittedTable] = {}
        for name in manifest.get("files", {}):
            if name.startswith(("vocab/", f"{FEATURES}/features.json")):
                self.check(name)
        if self.schema.feature:
            features, self.fitted_tables = load_features(path / FEATURES)
            if features != self.schema.feature:
                raise DataError(f"{path / FEATURES} holds other features than the manifest. Restore it from a copy.")
        windows = [one for one in self.schema.feature if isinstance(one, Past) and one.has_table]
        stored = {one.name: self.fitted_tables[one.name].table for one in windows if one.name in self.fitted_tables}
        #: state of the window features that the new rows continue
        self.state = stored if history == "auto" else {}
        #: window features that have no stored state although history is "auto"
        self.without_state = [one for one in windows if one.name not in stored] if history == "auto" else []
        as_typed = NOTATION not in manifest
        #: table -> how its texts are written
        self.notations: dict[str, str] = self._read_notations() if as_typed else manifest[NOTATION]
        notation = notation_by_column(self.schema, self.notations, self.fitted_tables, as_typed=as_typed)
        self.schema = replace(self.schema, notation=notation)
        self.recipe = recipe if recipe is not None else self._found(self.schema, named, preset)

    @property
    def times(self) -> list[Any]:
        """The first and the last time of the rows; [] if they have none."""
        return times_of(self.data.manifest["splits"])

    def _read_notations(self) -> dict[str, str]:
        """Return table -> how its texts are written, as the vocabularies of a dataset of 0.1.0 say."""
        texts = {column.table_name for column in self.schema.features if column.type in ("string", "float")}
        known = [table for table in texts if f"vocab/{table}.parquet" in self.data.manifest["files"]]
        return {table: notation_of(self.vocabulary(table).get_column("value")) for table in known}

    def stores_state(self, feature: Derivation) -> bool:
        """Return True if the state of a window feature after the new rows is known and so can be stored."""
        return self.history == "ignore" or feature.name in self.state

    @property
    def warning(self) -> str:
        """The warning about window features that start empty, or an empty text."""
        names = listed([feature.name for feature in self.without_state])
        return names and (
            f"{self.data.path} was prepared by an earlier version of Stoker and stores no state of its window features "
            f"({names}): they are computed from the new rows alone. Prepare it again, so that they continue from its "
            'rows, or pass history="ignore" (--history ignore) if they should start empty.'
        )

    def _found(self, schema: Schema, name: str, preset: str) -> Recipe:
        from stoker.prep import recipes

        if preset == OWN_SCHEMA:
            return Recipe(name=name, description="own schema", presets={OWN_SCHEMA: lambda: schema})  # self: a cycle
        if name not in recipes.names():
            raise DataError(
                f"{self.data.path} was made by the recipe {name!r}, which is none of Stoker's. Pass the recipe in "
                "Python: stoker.prepare(recipe, files, like=..., out=...)."
            )
        return recipes.get(name, preset)

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides the result of a preparation like this dataset."""
        files = self.data.manifest.get("files", {})
        kept = {name: entry["sha256"] for name, entry in files.items() if name.startswith(("vocab/", FEATURES))}
        dense = [vars(item) for item in self.dense]
        found = {"schema_hash": self.data.schema_hash, "files": kept, "dense": dense, "history": self.history}
        return found | {name: True for name in ("grow", "negatives") if getattr(self, name)}

    def check(self, file: str) -> Path:
        """Return the path of a file; raise :class:`DataError` if its bytes are not those of the manifest."""
        path = self.data.path / file
        entry: Mapping[str, Any] = self.data.manifest["files"].get(file, {})
        if describe_file(path) != {key: entry.get(key) for key in ("bytes", "sha256")}:
            raise DataError(
                f"{path} was altered: its sha256 is not the manifest's {str(entry.get('sha256'))[:16]}... Restore it "
                "from a copy, or prepare the dataset again."
            )
        return path

    def copy(self, prefix: str, out: Path, *, without: Sequence[str] = ()) -> dict[str, Any]:
        """Check and copy the files whose names begin with ``prefix``; return their entries for a manifest."""
        entries = {}
        for name, entry in self.data.manifest["files"].items():
            if name.startswith(prefix) and name not in without:
                source = self.check(name)
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).unlink(missing_ok=True)  # after a kill it may be a link to a file of the unfinished work
                shutil.copyfile(source, out / name)
                entries[name] = dict(entry)
        return entries

    def vocabulary(self, table: str) -> Any:
        """Return the vocabulary of a table, a Polars frame (value, count): row i is id i + 1."""
        return read_vocabulary(self.data.path / "vocab" / f"{table}.parquet")
