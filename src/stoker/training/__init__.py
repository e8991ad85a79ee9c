"""Training: the loop, evaluation, metrics and checkpoints. Names load when first used: settings do not need torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.base.errors import lazily

if TYPE_CHECKING:
    from stoker.training.config import TrainConfig
    from stoker.training.ends import TrainResult
    from stoker.training.files.checkpoint import Checkpoint, save, track_changes
    from stoker.training.files.loading import load
    from stoker.training.files.logs import Logger
    from stoker.training.loop import train
    from stoker.training.progress import Interrupted
    from stoker.training.scores.catalogue import Catalogue
    from stoker.training.scores.evaluation import Scores, evaluate, predict
    from stoker.training.scores.metrics import RankingMetrics, StreamingMetrics
else:
    __getattr__ = lazily(__name__, {
        "config": "TrainConfig", "ends": "TrainResult", "files.checkpoint": "Checkpoint save track_changes",
        "files.loading": "load", "files.logs": "Logger", "loop": "train", "progress": "Interrupted",
        "scores.catalogue": "Catalogue", "scores.evaluation": "Scores evaluate predict",
        "scores.metrics": "RankingMetrics StreamingMetrics",
    })  # fmt: skip

__all__ = [
    "Catalogue", "Checkpoint", "Interrupted", "Logger", "RankingMetrics", "Scores", "StreamingMetrics", "TrainConfig",
    "TrainResult", "evaluate", "load", "predict", "save", "track_changes", "train",
]  # fmt: skip
