"""Optimizers for embedding rows and for the dense part, and learning-rate schedules. PyTorch loads with DenseLAMB."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.base.errors import lazily
from stoker.optim.rows import (
    FTRL,
    LAMB,
    ROW_OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    MomentumSGD,
    RowOptimizer,
    RowOptimizerName,
    RowWiseAdagrad,
    register_row_optimizer,
)
from stoker.optim.schedules import Constant, CosineDecay, OneCycle, PolynomialDecay, Schedule, StepDecay

if TYPE_CHECKING:
    from stoker.optim.dense_lamb import DenseLAMB
else:
    __getattr__ = lazily(__name__, {"dense_lamb": "DenseLAMB"})

__all__ = [
    "FTRL", "LAMB", "ROW_OPTIMIZERS", "SGD", "Adagrad", "Adam", "AdamW", "Constant", "CosineDecay", "DenseLAMB",
    "MomentumSGD", "OneCycle", "PolynomialDecay", "RowOptimizer", "RowOptimizerName", "RowWiseAdagrad", "Schedule",
    "StepDecay", "register_row_optimizer",
]  # fmt: skip
