"""Training: the loop, evaluation, metrics and checkpoints."""

from __future__ import annotations

from stoker.training.checkpoint import Checkpoint, load, save
from stoker.training.config import TrainConfig
from stoker.training.evaluation import Scores, evaluate, predict
from stoker.training.interrupt import Interrupted
from stoker.training.loop import TrainResult, train
from stoker.training.metrics import StreamingMetrics
from stoker.training.ranking import RankingMetrics

__all__ = [
    "Checkpoint",
    "Interrupted",
    "RankingMetrics",
    "Scores",
    "StreamingMetrics",
    "TrainConfig",
    "TrainResult",
    "evaluate",
    "load",
    "predict",
    "save",
    "train",
]
