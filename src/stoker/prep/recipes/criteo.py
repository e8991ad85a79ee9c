"""Criteo display advertising logs (Kaggle and Terabyte): label, 13 integers, 26 hexadecimal categories.

The rules are those of the public DLRM scripts, except that vocabularies are fitted on training rows only.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.prep.recipe import Recipe
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SplitRule
from stoker.prep.source_format import SourceFormat

__all__ = ["CATEGORICAL", "COLUMNS", "DENSE", "criteo"]

DENSE = tuple(f"I{i}" for i in range(1, 14))
CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *DENSE, *CATEGORICAL)

_SOURCE = SourceFormat(kind="csv", separator="\t", columns=COLUMNS, quote=None)
_RUNS = SplitRule(rule="runs", runs=7)
# Days 0 to 22 train; day 23 is halved into test and validation.
_DAYS = SplitRule(rule="files", files={"day_23*": "halves", "day_*": "train"})


def _categorical(*, modulo: int | None = None) -> tuple[CategoricalColumn, ...]:
    return tuple(CategoricalColumn(name=name, type="hex", fill=0, modulo=modulo) for name in CATEGORICAL)


def _schema(
    dense: Sequence[DenseColumn],
    *,
    split: SplitRule = _RUNS,
    modulo: int | None = None,
    negative_keep: float = 1.0,
) -> Schema:
    return Schema(
        name="criteo",
        source=_SOURCE,
        label=Label(column="label"),
        dense=tuple(dense),
        categorical=_categorical(modulo=modulo),
        split=split,
        negative_keep=negative_keep,
    )


def _log() -> list[DenseColumn]:
    return [DenseColumn(name=name, fill=0.0, transforms=("log1p",)) for name in DENSE]


def _dlrm() -> Schema:
    return _schema(_log())


def _nvt() -> Schema:
    return _schema([DenseColumn(name=name, fill=0.0, clip_min=0.0, transforms=("zscore",)) for name in DENSE])


def _terabyte() -> Schema:
    return _schema(_log(), split=_DAYS, modulo=10_000_000, negative_keep=0.125)


def _mlperf() -> Schema:
    return _schema(_log(), split=_DAYS, modulo=40_000_000)


def criteo(preset: str = "dlrm") -> Recipe:
    """Criteo Kaggle ("dlrm", "nvt") or Terabyte ("terabyte": 0.875 of the negatives dropped; "mlperf")."""
    return Recipe(
        name="criteo",
        description="Criteo display advertising: 13 integers, 26 categories, tab separated",
        presets={"dlrm": _dlrm, "nvt": _nvt, "terabyte": _terabyte, "mlperf": _mlperf},
        preset=preset,
        example="stoker prepare criteo train.txt --out data/criteo",
        source="Criteo AI Lab; the Terabyte logs are CC BY-NC-SA 4.0",
    )
