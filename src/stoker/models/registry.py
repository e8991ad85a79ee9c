"""Models by name."""

from __future__ import annotations

from stoker.models.base import RecModel
from stoker.models.dcn import DCN
from stoker.models.deepfm import DeepFM
from stoker.models.din import DIN
from stoker.models.dlrm import DLRM
from stoker.models.tabular import Tabular
from stoker.models.tbsm import TBSM

#: name -> model, for the command line and for checkpoints; add your own.
MODELS: dict[str, type[RecModel]] = {model.name: model for model in (DLRM, DeepFM, DCN, TBSM, DIN, Tabular)}
