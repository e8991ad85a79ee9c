"""Training: the loop, evaluation, metrics and checkpoints."""

from __future__ import annotations

from stoker.train.checkpoint import Checkpoint, load, save
from stoker.train.config import TrainConfig
from stoker.train.evaluation import evaluate, predict
from stoker.train.interrupt import Interrupted
from stoker.train.loop import TrainResult, train
from stoker.train.metrics import StreamingMetrics

__all__ = [
    "Checkpoint",
    "Interrupted",
    "StreamingMetrics",
    "TrainConfig",
    "TrainResult",
    "evaluate",
    "load",
    "predict",
    "save",
    "train",
]
