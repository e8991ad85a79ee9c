"""Send the figures of a run to Weights & Biases: pip install wandb. With WANDB_MODE=offline it needs no account."""

import tempfile
from collections.abc import Mapping

import wandb

import stoker
from stoker.testing import make_dataset


class WandbLogger:
    def __init__(self, run: wandb.Run) -> None:
        self.run = run
        for kind in ("train", "valid", "test"):  # W&B's own step may not go back, as a resumed run does
            run.define_metric(f"{kind}/*", step_metric="batches")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, "batches": step})

    def close(self) -> None:
        """Leave it to the with block below, which knows whether training failed."""


data = make_dataset(tempfile.mkdtemp() + "/data", rows=20_000)
config = stoker.TrainConfig(embedding_dim=8, batch_size=256, epochs=2, log_every=20)
with wandb.init(project="stoker", config=config.to_dict()) as run:
    result = stoker.train(data, config, out=f"{tempfile.mkdtemp()}/run", loggers=[WandbLogger(run)])
print("test AUC", result.test["auc"], "is in the W&B run", run.id)
