"""Optimizers for embedding rows and for the dense part, and learning-rate schedules. PyTorch loads with DenseLAMB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

    def __getattr__(name: str) -> Any:
        if name != "DenseLAMB":
            raise AttributeError(f"module 'stoker.optim' has no attribute {name!r}")
        from stoker.optim.dense_lamb import DenseLAMB

        return DenseLAMB


__all__ = [
    "FTRL", "LAMB", "ROW_OPTIMIZERS", "SGD", "Adagrad", "Adam", "AdamW", "Constant", "CosineDecay", "DenseLAMB",
    "MomentumSGD", "OneCycle", "PolynomialDecay", "RowOptimizer", "RowOptimizerName", "RowWiseAdagrad", "Schedule",
    "StepDecay", "register_row_optimizer",
]  # fmt: skip
