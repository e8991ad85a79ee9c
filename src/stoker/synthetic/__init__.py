"""Write logs of any size in the raw format of every recipe, with a known best AUC.

>>> truth = stoker.synthetic.write("criteo", "10k", "day_0.tsv.gz", curve="globo-articles", drift=0.3)
>>> round(truth.best_auc, 2)  # no model can do better on this log
0.79

Say that a figure is synthetic where you publish one from such a log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.base.errors import lazily

if TYPE_CHECKING:
    from stoker.synthetic.clicks import ClickLog, Curve, IdColumn, NumberColumn, Sampler, measure_curve, zipf
    from stoker.synthetic.logs import KAGGLE_SIZES, RECIPES
    from stoker.synthetic.shards import dataset
    from stoker.synthetic.writer import SyntheticTruth, TruthMeter, write
else:  # names load at first use, for the command line reads only stoker.synthetic.settings
    __getattr__ = lazily(__name__, {
        "clicks": "ClickLog Curve IdColumn NumberColumn Sampler measure_curve zipf", "logs": "KAGGLE_SIZES RECIPES",
        "shards": "dataset", "writer": "SyntheticTruth TruthMeter write",
    })  # fmt: skip

__all__ = [
    "KAGGLE_SIZES", "RECIPES", "ClickLog", "Curve", "IdColumn", "NumberColumn", "Sampler", "SyntheticTruth",
    "TruthMeter", "dataset", "measure_curve", "write", "zipf",
]  # fmt: skip
