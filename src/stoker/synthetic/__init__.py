"""Logs of any size in the raw format of every recipe, with a planted truth: ``stoker.synthetic``.

>>> truth = stoker.synthetic.write("criteo", "10k", "day_0.tsv.gz", curve="globo-articles", drift=0.3)
>>> round(truth.best_auc, 2)  # no model can do better on this log
0.79

Figures from synthetic logs must say so.
"""

from __future__ import annotations

from stoker.synthetic.clicks import ClickLog, Curve, IdColumn, NumberColumn, Sampler, measure_curve, zipf
from stoker.synthetic.dataset import dataset
from stoker.synthetic.logs import KAGGLE_SIZES, RECIPES
from stoker.synthetic.writer import SyntheticTruth, TruthMeter, write

__all__ = [
    "KAGGLE_SIZES", "RECIPES", "ClickLog", "Curve", "IdColumn", "NumberColumn", "Sampler", "SyntheticTruth",
    "TruthMeter", "dataset", "measure_curve", "write", "zipf",
]  # fmt: skip
