"""Optimizers for embedding rows and for the dense part, and learning-rate schedules."""

from stoker.optim.dense_lamb import DenseLAMB
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
    RowWiseAdagrad,
)
from stoker.optim.schedules import Constant, CosineDecay, OneCycle, PolynomialDecay, Schedule, StepDecay

__all__ = [
    "FTRL", "LAMB", "ROW_OPTIMIZERS", "SGD", "Adagrad", "Adam", "AdamW", "Constant", "CosineDecay", "DenseLAMB",
    "MomentumSGD", "OneCycle", "PolynomialDecay", "RowOptimizer", "RowWiseAdagrad", "Schedule", "StepDecay",
]  # fmt: skip
