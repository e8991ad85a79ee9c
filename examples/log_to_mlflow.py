"""Send the figures of a run to MLflow, where mlflow ui shows them: pip install mlflow."""

import tempfile
from collections.abc import Mapping

import mlflow

import stoker
from stoker.testing import make_dataset


class MLflowLogger:
    def log(self, step: int, values: Mapping[str, float]) -> None:
        mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """Leave it to the with block below, which knows whether training failed."""


data = make_dataset(tempfile.mkdtemp() + "/data", rows=20_000)
config = stoker.TrainConfig(embedding_dim=8, batch_size=256, epochs=2, log_every=20)
with mlflow.start_run() as run:
    mlflow.log_params(config.to_dict())
    result = stoker.train(data, config, out=f"{tempfile.mkdtemp()}/run", loggers=[MLflowLogger()])
print("test AUC", result.test["auc"], "is in the MLflow run", run.info.run_id)
