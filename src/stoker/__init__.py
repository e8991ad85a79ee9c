"""Stoker trains recommendation models whose embedding tables do not fit the accelerator.

On one machine, with the same numbers as a run that had the memory. Names load when first used, so that importing
needs no more than torch, numpy and safetensors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stoker.base.version import __version__

if TYPE_CHECKING:  # what editors and type checkers see; tests/test_typing.py compares these names with those below
    from stoker import optim, synthetic
    from stoker.base.errors import CheckpointError, ConfigError, DataError, SchemaError, StokerError
    from stoker.dataset.batch import Batch
    from stoker.dataset.dataset import Dataset
    from stoker.dataset.spec import Feature, FeatureSpec
    from stoker.models import DCN, DIN, DLRM, TBSM, DeepFM, RecModel, SequenceModel, Tabular
    from stoker.optim import (
        FTRL,
        LAMB,
        SGD,
        Adagrad,
        Adam,
        AdamW,
        Constant,
        CosineDecay,
        DenseLAMB,
        MomentumSGD,
        OneCycle,
        PolynomialDecay,
        RowWiseAdagrad,
        StepDecay,
    )
    from stoker.placement.placement import Placement
    from stoker.placement.planner import plan
    from stoker.placement.replay import replay
    from stoker.prep import features, recipes
    from stoker.prep.draft.draft import draft_schema
    from stoker.prep.prepare import prepare
    from stoker.prep.schema import Schema
    from stoker.rewrite.classified import classify
    from stoker.rewrite.hot_profile import HotProfile
    from stoker.rewrite.id_order import Reordering
    from stoker.rewrite.popularity import profile
    from stoker.rewrite.reorder import reorder
    from stoker.tables import (
        Cached,
        Device,
        EmbeddingTables,
        HostPipelined,
        HotCold,
        Replicas,
        Strategy,
        TableConfig,
        TensorTrain,
        TTEmbeddingBag,
        stage,
        tables_for,
    )
    from stoker.training import TrainConfig, evaluate, load, predict, save, train
    from stoker.training.tools.compare import compare
    from stoker.training.tools.find_lr import find_lr
    from stoker.training.tools.trace import trace
    from stoker.training.tools.verify import verify


# Public name -> module that defines it.
_HOME = {
    "Adagrad": "stoker.optim",
    "Adam": "stoker.optim",
    "AdamW": "stoker.optim",
    "Batch": "stoker.dataset.batch",
    "Cached": "stoker.tables",
    "CheckpointError": "stoker.base.errors",
    "ConfigError": "stoker.base.errors",
    "Constant": "stoker.optim",
    "CosineDecay": "stoker.optim",
    "DCN": "stoker.models",
    "DIN": "stoker.models",
    "DLRM": "stoker.models",
    "DataError": "stoker.base.errors",
    "Dataset": "stoker.dataset.dataset",
    "DeepFM": "stoker.models",
    "DenseLAMB": "stoker.optim",
    "Device": "stoker.tables",
    "EmbeddingTables": "stoker.tables",
    "FTRL": "stoker.optim",
    "Feature": "stoker.dataset.spec",
    "FeatureSpec": "stoker.dataset.spec",
    "HostPipelined": "stoker.tables",
    "HotCold": "stoker.tables",
    "HotProfile": "stoker.rewrite.hot_profile",
    "LAMB": "stoker.optim",
    "MomentumSGD": "stoker.optim",
    "OneCycle": "stoker.optim",
    "Placement": "stoker.placement.placement",
    "PolynomialDecay": "stoker.optim",
    "RecModel": "stoker.models",
    "Replicas": "stoker.tables",
    "RowWiseAdagrad": "stoker.optim",
    "SGD": "stoker.optim",
    "Schema": "stoker.prep.schema",
    "SchemaError": "stoker.base.errors",
    "SequenceModel": "stoker.models",
    "StepDecay": "stoker.optim",
    "Strategy": "stoker.tables",
    "StokerError": "stoker.base.errors",
    "TBSM": "stoker.models",
    "TTEmbeddingBag": "stoker.tables",
    "TableConfig": "stoker.tables",
    "Tabular": "stoker.models",
    "TensorTrain": "stoker.tables",
    "TrainConfig": "stoker.training",
    "classify": "stoker.rewrite.classified",
    "compare": "stoker.training.tools.compare",
    "draft_schema": "stoker.prep.draft.draft",
    "evaluate": "stoker.training",
    "find_lr": "stoker.training.tools.find_lr",
    "load": "stoker.training",
    "plan": "stoker.placement.planner",
    "predict": "stoker.training",
    "Reordering": "stoker.rewrite.id_order",
    "prepare": "stoker.prep.prepare",
    "profile": "stoker.rewrite.popularity",
    "reorder": "stoker.rewrite.reorder",
    "replay": "stoker.placement.replay",
    "save": "stoker.training",
    "stage": "stoker.tables",
    "tables_for": "stoker.tables",
    "trace": "stoker.training.tools.trace",
    "train": "stoker.training",
    "verify": "stoker.training.tools.verify",
}
_MODULES = {
    "features": "stoker.prep.features",
    "optim": "stoker.optim",
    "recipes": "stoker.prep.recipes",
    "synthetic": "stoker.synthetic",
}

__all__ = [  # noqa: RUF022  (in the order of characters)
    "Adagrad",
    "Adam",
    "AdamW",
    "Batch",
    "Cached",
    "CheckpointError",
    "ConfigError",
    "Constant",
    "CosineDecay",
    "DCN",
    "DIN",
    "DLRM",
    "DataError",
    "Dataset",
    "DeepFM",
    "DenseLAMB",
    "Device",
    "EmbeddingTables",
    "FTRL",
    "Feature",
    "FeatureSpec",
    "HostPipelined",
    "HotCold",
    "HotProfile",
    "LAMB",
    "MomentumSGD",
    "OneCycle",
    "Placement",
    "PolynomialDecay",
    "RecModel",
    "Reordering",
    "Replicas",
    "RowWiseAdagrad",
    "SGD",
    "Schema",
    "SchemaError",
    "SequenceModel",
    "StepDecay",
    "StokerError",
    "Strategy",
    "TBSM",
    "TTEmbeddingBag",
    "TableConfig",
    "Tabular",
    "TensorTrain",
    "TrainConfig",
    "__version__",
    "classify",
    "compare",
    "draft_schema",
    "evaluate",
    "features",
    "find_lr",
    "load",
    "optim",
    "plan",
    "predict",
    "prepare",
    "profile",
    "recipes",
    "reorder",
    "replay",
    "save",
    "stage",
    "synthetic",
    "tables_for",
    "trace",
    "train",
    "verify",
]


if not TYPE_CHECKING:  # or type checkers would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        if name not in _HOME:
            raise AttributeError(f"module 'stoker' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
