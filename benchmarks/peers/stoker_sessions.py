"""From a trivago-format log to scored click-outs, by stoker.prepare, stoker.train and stoker.predict."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch
from worker_tools import argument, say, versions

import stoker

versions(stoker=stoker.__version__, torch=torch.__version__)


def job(log, folder, settings, threads):
    """Seconds of preparing, training and scoring, and the dataset."""
    start = time.perf_counter()
    data = stoker.prepare("trivago", log, out=folder / "data", preset="features")
    middle = time.perf_counter()
    torch.set_num_threads(threads)
    result = stoker.train(
        data, out=folder / "run", model="tabular", display="quiet", tensorboard=False, threads=threads, **settings
    )
    return middle - start, time.perf_counter() - middle, data, result


config = argument()
folder = Path(config["results"])
for name in ("small", "whole"):
    (folder / name).mkdir()
job(config["small"], folder / "small", config["settings"], config["threads"])  # loads and compiles everything
prepared, trained, data, result = job(config["log"], folder / "whole", config["settings"], config["threads"])
for case, seconds in (("preparation", prepared), ("training", trained)):
    say("checked", case=case)
    say("timed", case=case, seconds=seconds)
valid = {name: result.valid[name] for name in ("auc", "mrr")}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
say("extra", peak=peak, steps=result.step, rows=len(data.train) + len(data.valid), **valid)
