"""The tabular model as people write it: an item-wise data set behind a DataLoader with workers, ``nn.Embedding`` with
dense gradients, AdamW.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from worker_tools import argument, say, versions

versions(torch=torch.__version__)


class Rows(Dataset):
    """Examples one by one."""

    def __init__(self, folder, split):
        self.cats, self.conts, self.labels = (
            torch.from_numpy(np.load(folder / f"{split}_{name}.npy")) for name in ("cats", "conts", "labels")
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.cats[index], self.conts[index], self.labels[index]


class TabularModel(nn.Module):
    """Embeddings and batch-normalised numbers, then linear layers with ReLU and batch norm."""

    def __init__(self, sizes, dims, numbers, hidden=(64, 32)):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(rows, dim) for rows, dim in zip(sizes, dims, strict=True))
        self.norm = nn.BatchNorm1d(numbers)
        layers, width = [], sum(dims) + numbers
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU(), nn.BatchNorm1d(size)]
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, cats, conts):
        embedded = [embedding(cats[:, place]) for place, embedding in enumerate(self.embeddings)]
        return self.layers(torch.cat([*embedded, self.norm(conts)], dim=1)).squeeze(1)


def scores_of(model, rows, batch, workers):
    """Of all rows, in order."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(cats, conts) for cats, conts, _ in DataLoader(rows, batch, num_workers=workers)])


def main():
    config = argument()
    torch.set_num_threads(config["threads"])
    torch.manual_seed(config["seed"])
    folder = Path(config["folder"])
    start = time.perf_counter()
    train, valid = Rows(folder, "train"), Rows(folder, "valid")
    model = TabularModel(np.load(folder / "sizes.npy").tolist(), config["dims"], train.conts.shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    loader = DataLoader(train, config["batch"], shuffle=True, num_workers=config["workers"])
    criterion, waited, steps = nn.BCEWithLogitsLoss(), 0.0, 0
    for _ in range(config["epochs"]):
        batches = iter(loader)
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            waited += time.perf_counter() - before
            if batch is None:
                break
            cats, conts, labels = batch
            loss = criterion(model(cats, conts), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    trained = time.perf_counter() - start - waited
    middle = time.perf_counter()
    scores = scores_of(model, valid, config["batch"], config["workers"])
    scored = time.perf_counter() - middle
    np.save(Path(config["results"]) / "scores.npy", scores.numpy())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for case, seconds in (("loading", waited), ("training", trained), ("scoring", scored)):
        say("checked", case=case)
        say("timed", case=case, seconds=seconds)
    say("extra", steps=steps, peak=peak)


if __name__ == "__main__":
    main()
