"""Training: the loop, evaluation, metrics and checkpoints."""

from __future__ import annotations

from stoker.training.config import TrainConfig
from stoker.training.ends import TrainResult
from stoker.training.files.checkpoint import Checkpoint, save
from stoker.training.files.loading import load
from stoker.training.loop import train
from stoker.training.progress import Interrupted
from stoker.training.scores.evaluation import Scores, evaluate, predict
from stoker.training.scores.metrics import RankingMetrics, StreamingMetrics

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
