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
    from stoker.prep.draft import draft_schema
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


# Module -> the public names that it defines.
_NAMES = {
    "stoker.base.errors": "CheckpointError ConfigError DataError SchemaError StokerError",
    "stoker.dataset.batch": "Batch",
    "stoker.dataset.dataset": "Dataset",
    "stoker.dataset.spec": "Feature FeatureSpec",
    "stoker.models": "DCN DIN DLRM DeepFM RecModel SequenceModel TBSM Tabular",
    "stoker.optim": (
        "Adagrad Adam AdamW Constant CosineDecay DenseLAMB FTRL LAMB MomentumSGD OneCycle PolynomialDecay "
        "RowWiseAdagrad SGD StepDecay"
    ),
    "stoker.placement.placement": "Placement",
    "stoker.placement.planner": "plan",
    "stoker.placement.replay": "replay",
    "stoker.prep.draft": "draft_schema",
    "stoker.prep.prepare": "prepare",
    "stoker.prep.schema": "Schema",
    "stoker.rewrite.classified": "classify",
    "stoker.rewrite.hot_profile": "HotProfile",
    "stoker.rewrite.popularity": "profile",
    "stoker.rewrite.id_order": "Reordering",
    "stoker.rewrite.reorder": "reorder",
    "stoker.tables": (
        "Cached Device EmbeddingTables HostPipelined HotCold Replicas Strategy TTEmbeddingBag TableConfig "
        "TensorTrain stage tables_for"
    ),
    "stoker.training": "TrainConfig evaluate load predict save train",
    "stoker.training.tools.compare": "compare",
    "stoker.training.tools.find_lr": "find_lr",
    "stoker.training.tools.trace": "trace",
    "stoker.training.tools.verify": "verify",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = {
    "features": "stoker.prep.features",
    "optim": "stoker.optim",
    "recipes": "stoker.prep.recipes",
    "synthetic": "stoker.synthetic",
}

__all__ = [  # noqa: RUF022  (in the order of characters)
    "Adagrad", "Adam", "AdamW", "Batch", "Cached", "CheckpointError", "ConfigError", "Constant", "CosineDecay",
    "DCN", "DIN", "DLRM", "DataError", "Dataset", "DeepFM", "DenseLAMB", "Device", "EmbeddingTables", "FTRL",
    "Feature", "FeatureSpec", "HostPipelined", "HotCold", "HotProfile", "LAMB", "MomentumSGD", "OneCycle",
    "Placement", "PolynomialDecay", "RecModel", "Reordering", "Replicas", "RowWiseAdagrad", "SGD", "Schema",
    "SchemaError", "SequenceModel", "StepDecay", "StokerError", "Strategy", "TBSM", "TTEmbeddingBag", "TableConfig",
    "Tabular", "TensorTrain", "TrainConfig", "__version__", "classify", "compare", "draft_schema", "evaluate",
    "features", "find_lr", "load", "optim", "plan", "predict", "prepare", "profile", "recipes", "reorder", "replay",
    "save", "stage", "synthetic", "tables_for", "trace", "train", "verify",
]  # fmt: skip


if not TYPE_CHECKING:  # or type checkers would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        if name not in _HOME:
            raise AttributeError(f"module 'stoker' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return value


def __dir__() -> list[str]:
    return __all__
