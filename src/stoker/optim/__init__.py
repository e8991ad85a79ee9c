"""Optimizers for embedding rows and for the dense part, and learning-rate schedules."""

from stoker.optim.dense_lamb import DenseLAMB
from stoker.optim.rows import LAMB, ROW_OPTIMIZERS, SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad
from stoker.optim.schedules import Constant, CosineDecay, OneCycle, PolynomialDecay, Schedule, StepDecay

__all__ = [
    "LAMB",
    "ROW_OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Adam",
    "Constant",
    "CosineDecay",
    "DenseLAMB",
    "OneCycle",
    "PolynomialDecay",
    "RowOptimizer",
    "RowWiseAdagrad",
    "Schedule",
    "StepDecay",
]
