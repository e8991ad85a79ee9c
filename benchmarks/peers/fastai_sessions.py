"""From a feature table to scores with fastai 1, as the RAPIDS team's unoptimized workflow had it.

``TabularList`` with FillMissing, Categorify and Normalize, a DataLoader that reads row by row with workers,
``TabularModel`` with dense gradients, one cycle of AdamW: rapidsai/deeplearning,
RecSys2019/Training/unoptimized_training_workflow_fastai.ipynb.
"""

from __future__ import annotations

import time
from pathlib import Path

import fastai
import numpy as np
import pandas as pd
import torch
from fastai.basic_data import DatasetType, DeviceDataLoader
from fastai.basic_train import Learner
from fastai.tabular import Categorify, FillMissing, Normalize, TabularList, TabularModel
from worker_tools import argument, peak_memory, say, versions

versions(torch=torch.__version__, pandas=pd.__version__, fastai=fastai.__version__)


class Wait:
    """Seconds spent waiting for batches."""

    def __init__(self):
        self.seconds = 0.0
        plain = DeviceDataLoader.__iter__

        def timed(loader):
            batches = plain(loader)
            while True:
                before = time.perf_counter()
                batch = next(batches, None)
                self.seconds += time.perf_counter() - before
                if batch is None:
                    return
                yield batch

        DeviceDataLoader.__iter__ = timed

    def take(self):
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def prepared(config):
    """The table as fastai's data bunch."""
    pairs = pd.read_parquet(config["pairs"])
    pairs["is_valid"] = pairs["split"] == "valid"
    return (
        TabularList.from_df(
            pairs, path=config["results"], cat_names=list(config["dims"]), cont_names=config["numbers"],
            procs=[FillMissing, Categorify, Normalize],
        )
        .split_from_df("is_valid")
        .label_from_df(cols="label")
        .databunch(num_workers=config["workers"], bs=config["batch"], device="cpu")
    )  # fmt: skip


def main():
    config = argument()
    torch.set_num_threads(config["threads"])
    torch.manual_seed(config["seed"])
    wait = Wait()
    start = time.perf_counter()
    data = prepared(config)
    middle = time.perf_counter()
    rows = data.train_ds.x
    # Flags of what was missing are categories, too, after those that were named.
    sizes = [(len(rows.classes[name]) if name in rows.classes else 3, config["dims"].get(name, 3))
             for name in rows.cat_names]  # fmt: skip
    model = TabularModel(emb_szs=sizes, n_cont=len(rows.cont_names), out_sz=2, layers=[64, 32])
    learn = Learner(data, model, loss_func=torch.nn.CrossEntropyLoss(), silent=True, callback_fns=[])
    data.valid_dl, valid = None, data.valid_dl  # it would score the validation rows once more for their loss
    wait.take()
    learn.fit_one_cycle(config["epochs"], config["lr"])
    trained = time.perf_counter()
    loading = wait.take()
    data.valid_dl = valid
    scores = learn.get_preds(DatasetType.Valid)[0][:, 1]
    end = time.perf_counter()
    np.save(Path(config["results"]) / "scores.npy", scores.numpy())
    times = {
        "preparation": middle - start, "loading": loading, "training": trained - middle - loading,
        "scoring": end - trained,
    }  # fmt: skip
    for case, seconds in times.items():
        say("checked", case=case)
        say("timed", case=case, seconds=seconds)
    say("extra", rows=len(rows), peak=peak_memory())


if __name__ == "__main__":
    main()
