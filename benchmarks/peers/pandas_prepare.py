"""The same preparation in pandas: parse to categories once, work on distinct values, write Parquet."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow
from prepare_tools import CATEGORICAL, COLUMNS, DENSE, prepare_case
from worker_tools import argument, versions

config = argument()
versions(pandas=pd.__version__, pyarrow=pyarrow.__version__)


def read(log):
    if config["form"] == "c":
        # Categories are found while parsing: no string per row.
        types = {"label": "int8", **dict.fromkeys(DENSE, "float32"), **dict.fromkeys(CATEGORICAL, "category")}
        return pd.read_csv(log, sep="\t", header=None, names=COLUMNS, dtype=types, low_memory=False)
    types = {
        "label": "int8[pyarrow]",
        **dict.fromkeys(DENSE, "float[pyarrow]"),
        **dict.fromkeys(CATEGORICAL, "string[pyarrow]"),
    }
    return pd.read_csv(
        log, sep="\t", header=None, names=COLUMNS, dtype=types, engine="pyarrow", dtype_backend="pyarrow"
    )


def encode(column, train):
    """Ids by falling training count, ties by value; 0 for what the training rows do not have."""
    if config["form"] == "c":
        codes, texts = column.cat.codes.to_numpy(), column.cat.categories
    else:
        codes, texts = pd.factorize(column, use_na_sentinel=True)
    values = np.array([int(text, 16) for text in texts] + [0], dtype=np.uint64)  # a missing category is value 0
    codes = np.where(codes < 0, len(texts), codes)
    distinct, inverse = np.unique(values, return_inverse=True)
    codes = inverse[codes]
    counts = np.bincount(codes[:train], minlength=len(distinct))
    order = np.lexsort((distinct, -counts))
    known = int((counts > 0).sum())
    ids = np.zeros(len(distinct), dtype=np.int32)
    ids[order[:known]] = np.arange(1, known + 1)
    return ids[codes]


def job(log, rows, out):
    frame = read(log)
    done = {"label": frame["label"].to_numpy(np.float32)}
    for name in DENSE:
        done[name] = np.log1p(frame[name].fillna(0).clip(lower=0).to_numpy(np.float32))
    for name in CATEGORICAL:
        done[name] = encode(frame[name], rows["train"])
    result = pd.DataFrame(done)
    out.mkdir()
    start = 0
    for split, count in rows.items():
        result.iloc[start : start + count].to_parquet(out / f"{split}.parquet", index=False)
        start += count


prepare_case(config, job)
