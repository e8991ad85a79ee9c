"""Imports, trains, saves and loads with only torch, numpy and safetensors: python bare_environment.py DIRECTORY."""

import sys
import warnings
from pathlib import Path

warnings.simplefilter("error")

import stoker  # noqa: E402  (warnings are errors before anything is imported)
from stoker.testing import make_dataset  # noqa: E402

out = Path(sys.argv[1])
assert not {"polars", "pyarrow", "numba", "typer", "rich", "yaml"} & set(sys.modules)
make_dataset(out / "data", rows=2000, num_dense=3, num_embeddings=[50, 20], seed=0)
data = stoker.Dataset(out / "data")
result = stoker.train(data, model="dlrm", embedding_dim=4, batch_size=128, epochs=1, tensorboard=False, out=out / "run")
print(result.run, result.test["auc"])
print("bare environment: ok")
