"""Click models. A model is one short file: see docs/adding_a_model.md."""

from __future__ import annotations

from stoker.models.base import RecModel
from stoker.models.dcn import DCN
from stoker.models.deepfm import DeepFM
from stoker.models.din import DIN
from stoker.models.dlrm import DLRM
from stoker.models.rankmixer import RankMixer
from stoker.models.registry import MODELS, import_model
from stoker.models.sasrec import SASRec
from stoker.models.sequence import SequenceModel
from stoker.models.tabular import Tabular
from stoker.models.tbsm import TBSM
from stoker.models.two_tower import TwoTower

__all__ = [
    "DCN", "DIN", "DLRM", "MODELS", "TBSM", "DeepFM", "RankMixer", "RecModel", "SASRec", "SequenceModel", "Tabular",
    "TwoTower", "import_model",
]  # fmt: skip
