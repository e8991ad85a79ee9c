"""Click models. A model is one short file: see docs/adding_a_model.md."""

from __future__ import annotations

from stoker.models.base import RecModel
from stoker.models.dcn import DCN
from stoker.models.deepfm import DeepFM
from stoker.models.dlrm import DLRM

__all__ = ["DCN", "DLRM", "MODELS", "DeepFM", "RecModel"]

#: name -> model, for the command line and for checkpoints; add your own.
MODELS: dict[str, type[RecModel]] = {model.name: model for model in (DLRM, DeepFM, DCN)}
