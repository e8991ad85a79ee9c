"""NVTabular's workflow on the CPU. Its input is split into files beforehand, outside the clock."""

from __future__ import annotations

import numpy as np
import nvtabular as nvt
import pandas as pd
from nvtabular import ops
from prepare_tools import CATEGORICAL, COLUMNS, DENSE, prepare_case
from worker_tools import argument, versions

config = argument()


def job(log, rows, out):
    out.mkdir()
    types = {"label": np.float32, **dict.fromkeys(DENSE, np.float32), **dict.fromkeys(CATEGORICAL, str)}
    options = {
        "engine": "csv",
        "names": COLUMNS,
        "sep": "\t",
        "dtype": types,
        "part_size": "64MB",
        "cpu": True,
    }
    # A path of its own for each job: Dask workers keep vocabularies in memory by path, also those of the warm-up.
    vocabularies = out / f"vocabularies_{sum(rows.values())}"
    categories = CATEGORICAL >> ops.Categorify(out_path=str(vocabularies))
    numbers = DENSE >> ops.FillMissing(0) >> ops.Clip(min_value=0) >> ops.LogOp()
    workflow = nvt.Workflow(categories + numbers + ["label"])
    files = {split: nvt.Dataset(str(log.parent / f"{split}.tsv"), **options) for split in rows}
    workflow.fit(files["train"])
    for split, data in files.items():
        workflow.transform(data).to_parquet(str(out / split), preserve_files=False)


def main():
    client = None
    if config["workers"]:
        from dask.distributed import Client

        client = Client(n_workers=config["workers"], threads_per_worker=1, dashboard_address=None)
    versions(nvtabular=nvt.__version__, pandas=pd.__version__)
    prepare_case(config, job)
    if client is not None:
        client.close()


if __name__ == "__main__":
    main()
