"""Train a DLRM from Python, stop half-way, continue, evaluate. Runs in under a minute on a laptop.

python examples/train_from_python.py [DATASET]

Without DATASET, which is what stoker prepare wrote, a small made-up one is used.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import stoker
from stoker.testing import make_dataset


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="stoker-"))
    if len(sys.argv) > 1:
        data = stoker.Dataset(sys.argv[1])
    else:
        data = make_dataset(folder / "data", rows=200_000, num_embeddings=(10_000, 500, 20))

    # The whole job in one call: checkpoints, evaluation, TensorBoard and metrics.jsonl lie under `out`.
    settings = {"embedding_dim": 16, "model_options": {"bottom": (64,), "top": (64, 32)}, "batch_size": 1024}
    stoker.train(data, out=folder / "run", epochs=1, **settings)
    result = stoker.train(resume=folder / "run", epochs=2)
    print("test AUC", result.test["auc"], "at step", result.best_step)

    # The same by hand: a model is an nn.Module, a batch is five tensors, and backward() updates the rows.
    model = stoker.DLRM(
        data.schema, embedding_dim=16, bottom=(64,), top=(64, 32), optimizer=stoker.RowWiseAdagrad(lr=0.02)
    )
    optimizer = torch.optim.Adam(model.dense_parameters(), lr=1e-3)
    for batch in data.train.batches(1024, seed=0):
        model.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("by hand, one epoch:", stoker.evaluate(model, data.test)["auc"])

    stoker.save(folder / "by_hand", model, optimizer)
    again = stoker.load(folder / "by_hand").model
    assert stoker.evaluate(again, data.test) == stoker.evaluate(model, data.test)
    print("everything is in", folder)


if __name__ == "__main__":
    main()
