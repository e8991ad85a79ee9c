"""Describe a click log: its label, its features, their types and fills, the split.

A schema is a frozen value with a content hash (:meth:`Schema.hash`), the same in Python, TOML and YAML. Nothing here
reads data; :func:`stoker.prepare` does.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, cast

from stoker.base.checks import build_part, choice, fail, near, positive, read_mapping
from stoker.base.errors import ConfigError, SchemaError
from stoker.dataset.manifest import SPLITS
from stoker.dataset.spec import Feature, Grow
from stoker.prep.features.base import (
    Derivation,
    RowSteps,
    check_features,
    column_taken,
    feature_from_dict,
    feature_of,
    leading,
    missing_column,
)
from stoker.prep.source_format import SourceFormat

VALUE_TYPES = ("hex", "int", "float", "string")
TIME_TYPES = ("int", "float", "datetime")
TRANSFORMS = ("log1p", "zscore", "minmax")
FITTED_TRANSFORMS = ("zscore", "minmax")
FILLS = ("mean", "median")
OOV_POLICIES = ("reserved", "drop", "error", "grow")
MISSING_POLICIES = ("oov", "category")
FILE_TARGETS = (*SPLITS, "drop", "halves")
RULE_KEYS: dict[str, tuple[str, ...]] = {
    "runs": ("runs",),
    "time": ("train", "valid", "test"),
    "hash": ("train", "valid", "test", "column", "seed"),
    "column": ("column", "values"),
    "leave_last_out": ("column", "min_rows"),
    "files": ("files",),
    "last_touch": ("train", "valid", "test", "column"),
}
COLUMNS = ("dense", "categorical", "sequence")  # keys of a schema with columns of the model
_LABEL_RULE = re.compile(r"""\s*(>=|<=|==|!=|>|<)\s*(?:(['"])(.*)\2|(.+?))\s*""")


@dataclass(frozen=True, kw_only=True)
class Label:
    """The column to predict. Without a rule its values must be 0 or 1. Without a column every row has label 1."""

    column: str = ""  # empty only with ``negatives``
    rule: str | None = None  # e.g. ">= 4", "== 'clickout item'"; true is 1, '5' meets 5.00
    required: ClassVar[bool] = True  # a row without label is a bad line

    def __post_init__(self) -> None:
        if self.rule is not None:
            self.parsed()
            if not self.column:
                fail("label", "column", "is missing: a rule needs the column that it compares")

    def parsed(self) -> tuple[str, float | str] | None:
        """Return operator and operand of the rule, or None if there is no rule."""
        if self.rule is None:
            return None
        match = _LABEL_RULE.fullmatch(self.rule)
        if match is None:
            fail("label", "rule", f"{self.rule!r} is not a comparison. Write for example '>= 4' or \"== 'click'\"")
        operator, quote, text, number = match.groups()
        if quote and operator not in ("==", "!="):
            fail("label", "rule", f"{self.rule!r} orders text. Compare text with == or != only")
        try:
            return operator, text if quote else float(number)
        except ValueError:
            fail("label", "rule", f"{self.rule!r} compares with neither a number nor quoted text")


class OptionalLabel(Label):
    """The label of a log to score: rows, or whole files, may lack it."""

    required: ClassVar[bool] = False


_COMPARING = ("cross", "equal", "pairs")  # features that read texts as they are, and keep no table of them


@dataclass(frozen=True, kw_only=True)
class Timestamp:
    """The time of an example. The split rules time, leave_last_out and last_touch need it."""

    column: str
    type: str = "int"  # int | float | datetime (text, see format)
    format: str | None = None  # strftime pattern for datetime; None: ISO 8601

    def __post_init__(self) -> None:
        choice("timestamp", "type", self.type, TIME_TYPES)


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the model; its name may be a pattern."""

    name: str
    source: str | None = None  # raw column; None: the same name

    @property
    def raw(self) -> str:
        """Name of the raw column."""
        return self.source or self.name

    @property
    def pattern(self) -> bool:
        """Whether the name is a pattern for raw columns: it has ``*`` or ``?``, and there is no ``source``."""
        return self.source is None and ("*" in self.name or "?" in self.name)

    def matches(self, names: Sequence[str]) -> list[str]:
        """Return the ``names`` that match the pattern, in their order; upper and lower case differ."""
        pattern = self.name.replace("[", "[[]")
        return [name for name in names if fnmatchcase(name, pattern)]


@dataclass(frozen=True, kw_only=True)
class DenseColumn(_Column):
    """A number for the model. Steps are applied in this order: fill, clip, transforms."""

    fill: float | str = 0.0  # for missing values: a number, "mean" or "median" of the training rows
    clip_min: float | None = None
    clip_max: float | None = None
    transforms: tuple[str, ...] = ()  # log1p: log(max(x, 0) + 1); zscore, minmax: fitted on training rows, last
    null_flag: bool = False  # add a column NAME_is_null after this one: 1 if the value was missing, else 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", tuple(self.transforms))
        where = f"dense column {self.name!r}"
        for transform in self.transforms:
            choice(where, "transforms", transform, TRANSFORMS)
        if isinstance(self.fill, str):
            choice(where, "fill", self.fill, FILLS, "or a number")
        if any(transform in FITTED_TRANSFORMS for transform in self.transforms[:-1]):
            fail(where, "transforms", f"{list(self.transforms)}: zscore or minmax must be the last one")
        if self.clip_min is not None and self.clip_max is not None and self.clip_min > self.clip_max:
            fail(where, "clip_min", f"{self.clip_min} is above clip_max {self.clip_max}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model's columns made from it."""
        return (self.name, f"{self.name}_is_null") if self.null_flag else (self.name,)

    @property
    def fitted(self) -> bool:
        """Whether the fill or a transform is fitted on training rows."""
        return isinstance(self.fill, str) or bool(self.transforms and self.transforms[-1] in FITTED_TRANSFORMS)


@dataclass(frozen=True, kw_only=True)
class GrowingRows:
    """How the table of columns with ``oov = "grow"`` grows (:class:`stoker.Grow`, docs/dynamic_ids.md)."""

    rows: int | None = None  # with row 0; None: twice the distinct values in training, at least 1,000
    admit: int = 1
    ttl: int | None = None
    evict: str = "lru"  # lru | lfu | none
    candidates: int | None = None

    def __post_init__(self) -> None:
        choice("grow", "evict", self.evict, ("lru", "lfu", "none"))
        for name, least in (("rows", 2), ("admit", 1), ("ttl", 0), ("candidates", 1)):
            positive("grow", name, getattr(self, name), least=least)

    def settings(self) -> Grow:
        """Return the settings of the table."""
        evict: Any = None if self.evict == "none" else self.evict
        return Grow(admit=self.admit, ttl=self.ttl, evict=evict, candidates=self.candidates)


@dataclass(frozen=True, kw_only=True)
class CategoricalColumn(_Column):
    """One id per example.

    Ids count from 1 by falling number of training occurrences; id 0 is for values not in the vocabulary. With
    ``hash_buckets`` there is no vocabulary: the id is 1 + hash(value) % hash_buckets. With ``oov = "grow"`` the id is a
    64-bit hash of the value, for a table that grows while it trains.
    """

    type: str = "string"  # hex (unsigned, up to 16 digits) | int (64 bit) | float | string
    table: str | None = None  # columns with the same table share vocabulary and rows; None: a table of its own
    min_count: int = 1  # training occurrences that a value needs to get an id
    modulo: int | None = None  # int and hex: take the value modulo this before the vocabulary
    hash_buckets: int | None = None
    oov: str = "reserved"  # a value without id: reserved (id 0) | drop (the row) | error | grow (none is without)
    missing: str = "oov"  # an empty field: oov (id 0, whatever ``oov`` says) | category (an id of its own)
    fill: int | float | str | None = None  # alternative: an empty field has this value
    grow: GrowingRows | None = None  # settings of oov = "grow"; None: the defaults
    _kind: ClassVar[str] = "categorical"

    def __post_init__(self) -> None:
        where = f"{self._kind} column {self.name!r}"
        choice(where, "type", self.type, VALUE_TYPES)
        choice(where, "oov", self.oov, OOV_POLICIES)
        choice(where, "missing", self.missing, MISSING_POLICIES)
        positive(where, "min_count", self.min_count)
        positive(where, "modulo", self.modulo)
        positive(where, "hash_buckets", self.hash_buckets)
        if self.hash_buckets is not None and self.hash_buckets >= 2**32:  # codes have at most 32 bits
            fail(where, "hash_buckets", f"{self.hash_buckets:,} is above the maximum {2**32 - 1:,}")
        if self.modulo is not None and self.type not in ("int", "hex"):
            fail(where, "modulo", f"needs type int or hex, not {self.type}. Use hash_buckets for text")
        if self.hash_buckets is not None and self.min_count > 1:
            fail(where, "min_count", "has no effect with hash_buckets. Leave one of them out")
        if self.oov == "grow" and (self.min_count > 1 or self.hash_buckets is not None):
            key = "min_count" if self.min_count > 1 else "hash_buckets"
            fail(
                where,
                key,
                "cannot be combined with oov = 'grow'. Leave it out, or say grow = {admit = 2, rows = 100000}",
            )
        if self.grow is not None and self.oov != "grow":
            fail(where, "grow", f"has no effect with oov = {self.oov!r}. Say oov = 'grow', or leave grow out")
        if self.fill is not None:
            if self.missing != "oov":
                fail(where, "fill", "and missing='category' contradict each other. Leave one of them out")
            wanted = {"hex": (int, str), "int": (int,), "float": (int, float), "string": (str,)}[self.type]
            if not isinstance(self.fill, wanted) or isinstance(self.fill, bool):
                fail(where, "fill", f"{self.fill!r} is not a value of type {self.type}")

    @property
    def table_name(self) -> str:
        """Name of the table that the ids address."""
        return self.table or self.name

    def feature(self) -> Feature:
        """Return the feature that models see."""
        return Feature(name=self.name, table=self.table_name)


@dataclass(frozen=True, kw_only=True)
class SequenceColumn(CategoricalColumn):
    """A list of ids per example: a list column in Parquet and JSON, separated text elsewhere."""

    separator: str = "|"  # between the values of a text field
    max_length: int = 50  # of a list; longer ones are cut
    keep: str = "last"  # which ids of a longer list to keep: last | first
    _kind: ClassVar[str] = "sequence"

    def __post_init__(self) -> None:
        super().__post_init__()
        where = f"sequence column {self.name!r}"
        positive(where, "max_length", self.max_length)
        choice(where, "keep", self.keep, ("last", "first"))
        if self.missing != "oov" or self.fill is not None:
            fail(where, "missing", "does not apply: an empty list is an empty bag")
        if len(self.separator.encode()) != 1:
            fail(where, "separator", f"{self.separator!r} is not one ASCII character")

    def feature(self) -> Feature:
        """Return the feature that models see."""
        return Feature(name=self.name, table=self.table_name, sequence=True, max_length=self.max_length)


_SHARED = ("type", "min_count", "modulo", "hash_buckets")  # the same in columns of one table


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """The rule that splits rows into train, valid and test. docs/prepare.md shows every rule with an example.

    >>> from stoker.prep.schema import SplitRule
    >>> SplitRule(rule="time", train=0.9, valid=0.05, test=0.05).train
    0.9
    """

    rule: str = "hash"
    train: float = 0.8  # shares, for time, hash and last_touch; they must sum to 1
    valid: float = 0.1
    test: float = 0.1
    runs: int = 7  # runs: equal runs of lines; the last is halved in file order, first test then validation
    column: str | None = None  # hash: None hashes the row number; leave_last_out, last_touch: the user
    values: Mapping[str, str] = field(default_factory=dict)  # column: raw value -> train | valid | test | drop
    files: Mapping[str, str] = field(default_factory=dict)  # files: name pattern -> as above, or halves
    min_rows: int = 3  # leave_last_out: users with fewer rows only train
    seed: int = 0  # hash

    def __post_init__(self) -> None:
        choice("split", "rule", self.rule, tuple(RULE_KEYS))
        object.__setattr__(self, "values", dict(self.values))
        object.__setattr__(self, "files", dict(self.files))
        shares = (self.train, self.valid, self.test)
        if "train" in RULE_KEYS[self.rule] and (abs(sum(shares) - 1) > 1e-9 or min(shares) < 0):
            said = " + ".join(f"{share:g}" for share in shares)
            fail("split", "train", f"+ valid + test = {said} = {sum(shares):g}, not 1. Give all three")
        if self.rule in ("column", "leave_last_out", "last_touch") and self.column is None:
            fail("split", "column", f"is missing: rule {self.rule!r} needs the column to split by")
        for key, targets in (("values", (*SPLITS, "drop")), ("files", FILE_TARGETS)):
            if key in RULE_KEYS[self.rule] and not getattr(self, key):
                fail("split", key, f"is missing: rule {self.rule!r} needs it")
            for target in getattr(self, key).values():
                choice("split", key, target, targets)
        positive("split", "runs", self.runs, least=2)
        positive("split", "min_rows", self.min_rows)


@dataclass(frozen=True, kw_only=True)
class Negatives:
    """How to sample rows of label 0 for a log of positive rows, such as purchases (docs/prepare.md).

    A sampled row is a copy of a row of label 1. ``columns`` are those of another row of label 1 in the same split.
    """

    columns: tuple[str, ...] = ()  # raw columns of the item, the first identifies it
    per_positive: int = 4  # sampled rows for each row of label 1; 0: none
    by: str = "popularity"  # popularity: any row alike, so frequent items more often; uniform: any item alike
    seed: int = 0

    def __post_init__(self) -> None:
        choice("negatives", "by", self.by, ("popularity", "uniform"))
        positive("negatives", "per_positive", self.per_positive, least=0)
        positive("negatives", "seed", self.seed, least=0)
        if self.per_positive and not self.columns:
            fail("negatives", "columns", "is missing. Name the columns of the item, the one that identifies it first")

    def outputs_of_item(self, features: Sequence[Derivation]) -> set[str]:
        """Return ``columns`` and the outputs of the features that depend on them only.

        Raises:
            SchemaError: a feature reads the label, or both the item and its row, and so has no value for a sampled row.
        """
        from stoker.prep.features.fitted import MeanTargetEncoding
        from stoker.prep.features.past import Difference, Past, Rank

        items = set(self.columns)
        for feature in features:
            keys = set(feature.inputs)
            if isinstance(feature, MeanTargetEncoding):
                fail(feature.where, "kind", "needs labels, and rows of label 0 are sampled after it. Leave it out")
            if isinstance(feature, Past):
                now = [feature.column] if isinstance(feature, Difference) else []  # of the row itself
                keys = {*feature.by, *now, *([feature.order] if isinstance(feature, Rank) else [])}
            if isinstance(feature, RowSteps) or not keys & items:
                continue
            if not keys <= items:
                some, others = (", ".join(sorted(map(repr, found))) for found in (keys & items, keys - items))
                fail(
                    feature.where, "reads",
                    f"{some} of negatives.columns and {others}: it would have no value for a sampled row. Leave it "
                    "out, or add the others to negatives.columns if they are of the item",
                )  # fmt: skip
            items |= set(feature.outputs)
        return items


@dataclass(frozen=True, kw_only=True)
class Schema:
    """What :func:`stoker.prepare` must know about a log.

    >>> schema = stoker.Schema.from_dict({"label": "clicked", "categorical": [{"name": "item"}]})
    >>> schema.with_feature("count by=item").dense_names
    ('count_item',)
    """

    label: Label = field(default_factory=Label)
    dense: tuple[DenseColumn, ...] = ()
    categorical: tuple[CategoricalColumn, ...] = ()
    sequence: tuple[SequenceColumn, ...] = ()
    split: SplitRule = field(default_factory=SplitRule)
    source: SourceFormat = field(default_factory=SourceFormat)
    timestamp: Timestamp | None = None
    group: str | None = None  # raw column: rows with equal values are one list to rank, e.g. an impression
    negative_keep: float = 1.0  # share of the rows with label 0 to keep, drawn before the split
    seed: int = 0  # of negative_keep
    negatives: Negatives | None = None  # rows of label 0 to sample
    name: str = "custom"
    feature: tuple[Derivation, ...] = ()  # derived columns, in the order they are computed (stoker.features)
    derive: tuple[str, ...] = ()  # features in one line each; they are moved to ``feature``, with their columns
    keep: tuple[str, ...] = ()  # raw columns, or outputs of features, to copy to the scores
    #: raw column -> how a dataset writes its texts (stoker.prep.parse.notation); "": of all others. Not of a file
    notation: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    #: raw columns that features see as text, as in training, although no split reads them. Not of a file either
    as_text: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for text in self.derive:
            for key, more in self._with(text).items():
                object.__setattr__(self, key, more)
        object.__setattr__(self, "derive", ())
        object.__setattr__(self, "feature", tuple(feature.in_groups(self.group or None) for feature in self.feature))
        for key in (*COLUMNS, "keep"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
        if self.feature:
            self._check_features()
        if not (self.dense or self.categorical or self.sequence):
            raise SchemaError("the schema has no feature. Add at least one dense, categorical or sequence column.")
        names = [*self.dense_names, *(column.name for column in self.features)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SchemaError(f"columns {twice} are named twice. Rename one and point `source` at the raw column.")
        if twice := sorted({name for name in self.keep if self.keep.count(name) > 1}):
            fail("schema", "keep", f"names {', '.join(map(repr, twice))} twice. Name each column once")
        for column in self._columns() if self.source.columns else ():  # without a header a pattern matches nothing
            if column.pattern and column.name not in self.source.columns:
                fail(
                    f"column {column.name!r}", "name",
                    "is a pattern, which needs files with a header, and source.columns is for files without one. "
                    "Name each column",
                )  # fmt: skip
        if not 0 < self.negative_keep <= 1:
            fail("schema", "negative_keep", f"{self.negative_keep} is not a share above 0 and up to 1")
        if self.split.rule in ("time", "leave_last_out", "last_touch") and self.timestamp is None:
            fail("split", "rule", f"{self.split.rule!r} needs a [timestamp] with its column")
        if self.group == "":
            fail("schema", "group", "is empty. Name the raw column, or leave it out")
        if self.group is not None and self.split.rule == "hash" and self.split.column is None:
            # A hash of the row number would cut nearly every list; a hash of the group cuts none.
            object.__setattr__(self, "split", replace(self.split, column=self.group))
        self._check_label()
        self._check_negatives()
        self._check_shared_tables()

    def with_feature(self, feature: Derivation | Mapping[str, Any] | str) -> Schema:
        """Return the schema with one more feature, and with a column of the model for each of its outputs.

        Numbers become dense columns (counts and durations as logarithms, all scaled). Texts and buckets become
        categorical columns. Histories become sequences; they share the table of the categorical column that reads the
        same raw column, if there is one.

        Args:
            feature: a feature, plain values with ``kind``, or one line such as ``"mean_target by=city,item"``.

        Raises:
            SchemaError: the feature is invalid or does not fit the others.
        """
        return replace(self, **self._with(feature))

    def _with(self, feature: Derivation | Mapping[str, Any] | str) -> dict[str, Any]:
        made = feature_of(feature)
        raw = getattr(made, "column", None)
        reader = next((column for column in self.features if column.raw == raw), None)
        table = {} if reader is None else {"table": reader.table_name, **{key: getattr(reader, key) for key in _SHARED}}
        parts: dict[str, list[Any]] = {key: [*getattr(self, key)] for key in COLUMNS}
        for name, given in made.model_columns().items():
            if "max_length" in given:
                parts["sequence"].append(SequenceColumn(name=name, **{**given, **table}))
            elif "type" in given:
                parts["categorical"].append(CategoricalColumn(name=name, **given))
            else:
                parts["dense"].append(DenseColumn(name=name, **given))
        return {"feature": [*self.feature, made], **parts}

    def _check_features(self) -> None:
        check_features(self.feature)
        outputs = [output for feature in self.feature for output in feature.outputs]
        dense: list[DenseColumn] = []  # patterns such as ``has_*`` replaced by the outputs that they match
        for column in self.dense:
            names = column.matches(outputs) if column.pattern else []
            dense += [replace(column, name=name) for name in names] or [column]
        object.__setattr__(self, "dense", tuple(dense))
        local = leading(self.feature)
        late = {output: feature for feature in self.feature[local:] for output in feature.outputs}
        keys = {"label": self.label.column, "timestamp": self.timestamp and self.timestamp.column}
        for key, name in {**keys, "split": self.split.column}.items():
            if name in late:
                fail(key, "column", f"{name!r} is made by {late[name].where}, which needs the rows split already")
        present = [*self.source.columns]
        for feature in self.feature if present else ():
            for name in feature.inputs:
                if name not in present:
                    raise missing_column(feature, name, present)
            for name in feature.outputs:
                if name in present:
                    raise column_taken(feature, name, "the lines (source.columns)")
            present += feature.outputs

    def _check_label(self) -> None:
        """Raise :class:`SchemaError` if a column is computed from the label of its own row."""
        from stoker.prep.features.past import Difference, Past

        if not self.label.column and self.negatives is None:
            raise SchemaError(
                "the key 'label' is missing. Name the column to predict. If every row is a positive one, such as a "
                "purchase, there is none: add [negatives], which samples rows of label 0 (docs/prepare.md)."
            )
        leaks = {self.label.column: ""}  # column -> the feature that made it from the label
        for feature in self.feature:
            own = set(feature.inputs)
            if isinstance(feature, Past):  # labels of earlier rows are known, as events or as previous values
                own = {*feature.by, feature.order, *([feature.column] if isinstance(feature, Difference) else [])}
            if own & leaks.keys():
                leaks |= {output: f", from which {feature.where} makes it" for output in feature.outputs}
        for column in self._columns():
            if column.raw == self.label.column and self.label.rule is None:
                fail(
                    f"column {column.name!r}", "source",
                    f"{column.raw!r} is the column of the label, too: a model would read the label from it "
                    "(AUC 1.0). Leave the column out, or give the label another",
                )  # fmt: skip
            if leaks.get(column.raw):
                fail(
                    f"column {column.name!r}", "source",
                    f"{column.raw!r} reveals the label {self.label.column!r}{leaks[column.raw]}: a model would read "
                    "the label from it. Leave the column out",
                )  # fmt: skip

    def _check_negatives(self) -> None:
        if self.negatives is None:
            return
        read = [*(column.raw for column in self._columns()), *self.keep]
        for name in self.negatives.columns:
            if name in (self.label.column, self.timestamp and self.timestamp.column, self.group, self.split.column):
                fail("negatives", "columns", f"names {name!r}, which is not of the item. Leave it out")
            if name not in (*read, *(used for feature in self.feature for used in feature.inputs)):
                fail("negatives", "columns", f"names {name!r}, which nothing in the schema reads.{near(name, read)}")
        self.negatives.outputs_of_item(self.feature)

    def _columns(self) -> tuple[DenseColumn | CategoricalColumn, ...]:
        return (*self.dense, *self.features)

    def leak_warnings(self) -> list[str]:
        """Return a warning for every column that reads the raw column of the label's rule."""
        return [
            f"column {column.name!r} reads {column.raw!r}, from which the rule {self.label.rule!r} makes the label: a "
            "model can read the label from it (AUC near 1.0). Leave the column out of the schema."
            for column in self._columns()
            if column.raw == self.label.column
        ]

    def window_warnings(self) -> list[str]:
        """Return a warning for every window over the datetimes of the log that is shorter than a second."""
        from stoker.prep.features.past import PastCount

        at, counts = self.timestamp, [each for each in self.feature if isinstance(each, PastCount)]
        if at is None or at.type != "datetime":
            return []
        windows = {each.name: each.window for each in counts if each.order == at.column}
        return [
            f"feature {name!r} counts in a window of {window:g} microseconds, the unit of a datetime: less than a "
            f"second. If seconds are meant, write window={1_000_000 * window:.0f}."
            for name, window in windows.items()
            if window is not None and window < 1_000_000
        ]

    def _check_shared_tables(self) -> None:
        first: dict[str, CategoricalColumn] = {}
        for column in self.features:
            other = first.setdefault(column.table_name, column)
            growing = ("oov", "grow") if "grow" in (column.oov, other.oov) else ()
            for key in (*_SHARED, *growing):
                if getattr(column, key) != getattr(other, key):
                    fail(
                        f"column {column.name!r}", key,
                        f"{getattr(column, key)!r} differs from {getattr(other, key)!r} in {other.name!r}, "
                        f"which shares table {column.table_name!r}. Give them the same",
                    )  # fmt: skip

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the model's dense columns, in order, each followed by its null flag, if any."""
        return tuple(name for column in self.dense for name in column.names)

    @property
    def features(self) -> tuple[CategoricalColumn, ...]:
        """Categorical, then sequence columns: the order of ids in every batch."""
        return (*self.categorical, *self.sequence)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Raw columns that the split or the groups read as text. Then features see texts, too."""
        split = self.split.column if "column" in RULE_KEYS[self.split.rule] else None
        return tuple(dict.fromkeys(name for name in (split, self.group, *self.as_text) if name is not None))

    def notation_of_unlisted(self) -> dict[str, str]:
        """Return raw column -> how texts are written of which a dataset keeps no list.

        As the values of conditions on them are. Else, if hash buckets, the split or the groups read them, or a feature
        compares them, as plain values.
        """
        from stoker.prep.parse.notation import PLAIN, notation_of_values

        listed = {one.raw for one in self.features if one.hash_buckets is None}
        listed |= {column for one in self.feature if one.has_table for column in one.inputs}
        compared = {column for one in self.feature if one.kind in _COMPARING for column in one.inputs}
        numbers = {one.raw for one in self.features if one.type in ("int", "float")} & {*self.text_columns}
        texts = {one.raw for one in self.features if one.type not in ("int", "float")}
        unlisted = (({one.raw for one in self.features} | compared) - listed) | (numbers - texts)
        values: dict[str, set[str]] = {}
        for one in self.feature:
            column, some = getattr(one, "tested", ""), getattr(one, "values", ())
            if column and some and column not in listed:
                values.setdefault(column, set()).update(some)
        found = {column: name for column, some in values.items() if (name := notation_of_values(some))}
        return {**dict.fromkeys(unlisted, PLAIN), **found}

    def notation_of(self, column: str) -> str:
        """Return how texts of a raw column are written."""
        return self.notation.get(column, self.notation.get("", ""))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with all defaults; :meth:`from_dict` is the inverse."""
        values = asdict(self)
        del values["derive"], values["notation"], values["as_text"]
        values["feature"] = [feature.to_dict() for feature in self.feature]
        for key in ("feature", "keep"):  # schemas without these keep the hash of earlier versions
            if not values[key]:
                del values[key]
        if self.source.decimal == ".":  # likewise
            del values["source"]["decimal"]
        for column in values["dense"]:
            if not column["null_flag"]:  # likewise
                del column["null_flag"]
        return cast("dict[str, Any]", _plain(values))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "schema") -> Schema:
        """Build a schema from plain values. Raise :class:`SchemaError` with ``where`` for a wrong key or type."""
        return cast(Schema, build_part(cls, values, where, {"label": _label, "split": _split, "feature": _feature}))

    @classmethod
    def from_file(cls, path: str | Path) -> Schema:
        """Load a schema from a TOML or YAML file. Files of ``merge`` features may be next to it."""
        from stoker.prep.features.fitted import Merge

        schema = cls.from_dict(read_mapping(Path(path)), where=str(path))
        folder = Path(path).parent
        features = [one.of_schema(folder) if isinstance(one, Merge) else one for one in schema.feature]
        return replace(schema, feature=tuple(features)) if schema.feature else schema

    def hash(self) -> str:
        """Return the sha256 of the canonical JSON form. Equal schemas have equal hashes."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


def _label(value: Any, where: str) -> Label:
    return cast(Label, build_part(Label, {"column": value} if isinstance(value, str) else value, where))


def _split(value: Any, where: str) -> SplitRule:
    # A manifest has the keys of all rules. In a file, a key of another rule is a mistake.
    rule = value.get("rule", "hash") if isinstance(value, Mapping) else None
    all_keys = {key for keys in RULE_KEYS.values() for key in keys}
    if isinstance(rule, str) and rule in RULE_KEYS and not all_keys <= {*value, "column"}:
        foreign = sorted((set(value) & all_keys) - set(RULE_KEYS[rule]))
        if foreign:
            takes = ", ".join(RULE_KEYS[rule])
            raise SchemaError(f"{where}: {foreign[0]} does not belong to rule {rule!r}, which takes: {takes}.")
    return cast(SplitRule, build_part(SplitRule, value, where))


def _feature(value: Any, where: str) -> Derivation:
    return value if isinstance(value, Derivation) else feature_from_dict(value, where)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None or key == "quote"}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


# For each word: rule of the schema, whether it needs a column, and the numbers that may follow: shares or one setting.
_SPLIT_FORMS: dict[str, tuple[str, bool, str]] = {
    "random": ("hash", False, "shares"),
    "hash": ("hash", True, "shares"),
    "time": ("time", False, "shares"),
    "last_touch": ("last_touch", True, "shares"),
    "leave_last_out": ("leave_last_out", True, "min_rows"),
    "runs": ("runs", False, "runs"),
    "column": ("column", True, ""),
}
_SPLIT_HELP = """\
The forms, with shares of train and valid (the rest is test; after train alone, valid and test halve it):
  random:0.8,0.1                  by chance, row by row
  hash:COLUMN:0.8,0.1             by chance, rows with equal values of the column together
  time:0.8,0.1                    the earliest rows train
  last_touch:COLUMN:0.8,0.1       whole users, the earliest by their last row train
and
  leave_last_out:COLUMN[:ROWS]    each user's last row is test, the one before valid, of users with ROWS (3) or more
  runs[:RUNS]                     equal runs of lines (7), the last is half test, half valid
  column:COLUMN                   by a column that holds train, valid, test or drop"""


def split_of(text: str | SplitRule) -> SplitRule:
    """Parse a split rule from a line such as ``hash:user:0.8,0.1``; return a rule as it is.

    >>> split_of("time:0.9").train, split_of("time:0.9").test
    (0.9, 0.05)

    Raises:
        ConfigError: the line has none of the known forms.
    """
    if isinstance(text, SplitRule):
        return text
    try:
        return SplitRule(**_split_values(text))
    except SchemaError as error:
        raise ConfigError(f"split {text!r}: {error} {_SPLIT_HELP}") from error


def _split_values(text: str) -> dict[str, Any]:
    """Parse the settings of a rule from a line; raise :class:`SchemaError` if it is wrong."""
    word, *given = text.split(":")
    if word not in _SPLIT_FORMS:
        raise SchemaError(f"{word!r} is not a rule.{near(word, list(_SPLIT_FORMS))}")
    rule, column, numbers = _SPLIT_FORMS[word]
    values = _numbers(given[-1]) if len(given) > bool(column) else []  # the name of a column may be a number
    given = given[:-1] if values else given
    if numbers == "shares" and column and len(given) == 1 and not values and _numbers(given[0]):
        raise SchemaError(f"{word} needs a column before its shares.")
    name = ":".join(given)
    if column and not name:
        raise SchemaError(f"{word} needs a column.")
    if name and not column:
        raise SchemaError(f"{name!r} is not a number." if numbers else f"{name!r} is too much.")
    settings: dict[str, Any] = {"rule": rule, "column": name or None}
    if numbers == "shares":
        values = values or [0.8, 0.1]
        if len(values) == 1:
            values.append(round((1 - values[0]) / 2, 12))
        if len(values) == 2:
            values.append(round(1 - sum(values), 12))
        if len(values) > 3 or not all(0 <= value <= 1 for value in values) or abs(sum(values) - 1) > 1e-9:
            raise SchemaError("the shares must be from 0 to 1, and sum to 1 in all.")
        return settings | dict(zip(SPLITS, values, strict=True))
    if len(values) > 1 or any(value != int(value) for value in values) or (values and not numbers):
        raise SchemaError(f"{word} takes {'one whole' if numbers else 'no'} number.")
    if rule == "column":
        settings["values"] = {value: value for value in (*SPLITS, "drop")}
    if values:
        settings[numbers] = int(values[0])
    return settings


def _numbers(text: str) -> list[float]:
    """Return the numbers of a list such as ``0.8,0.1``; an empty list for other texts."""
    with suppress(ValueError):
        found = [float(one) for one in text.split(",")]
        return found if all(map(math.isfinite, found)) else []
    return []
