"""From your own log and a schema file to a trained model. Runs in under a minute on a laptop.

python examples/own_logs.py

A made-up CSV of shop visits stands in for your log; examples/own_logs.toml says what its columns mean.
"""

from __future__ import annotations

import csv
import random
import tempfile
from pathlib import Path

import stoker

HERE = Path(__file__).parent


def write_log(path: Path, rows: int = 60_000) -> None:
    """Visits: people buy more at low prices, at night, and of what they bought before."""
    chance = random.Random(0)
    with path.open("w", newline="") as file:
        log = csv.writer(file)
        log.writerow(["time", "user", "item", "recent_items", "price", "hour", "bought"])
        recent: dict[int, list[int]] = {}
        for row in range(rows):
            user, item = int(2000 * chance.random() ** 2), int(500 * chance.random() ** 2)
            price, hour = round(chance.lognormvariate(2, 1), 2), row % 24
            seen = recent.setdefault(user, [])
            score = 1.5 * (item in seen) - 0.1 * price + 0.8 * (hour > 19) + (item % 7 == user % 7)
            bought = int(chance.random() < 1 / (1 + 2.718 ** (1 - score)))
            log.writerow([row, user, item, "|".join(map(str, seen[-10:])), price, hour, bought])
            if bought:
                seen.append(item)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="stoker-"))
    write_log(folder / "visits.csv")
    data = stoker.prepare(HERE / "own_logs.toml", [folder / "visits.csv"], out=folder / "data")
    print(data)
    for model, options in (("dlrm", {"bottom": (32,), "top": (64,)}), ("deepfm", {"hidden": (64,)})):
        result = stoker.train(
            data, out=folder / model, model=model, model_options=options, epochs=3, batch_size=512, patience=2
        )
        print(f"{model}: test AUC {result.test['auc']:.4f}, log loss {result.test['log_loss']:.4f}")
        stoker.predict(result.model, data.test, folder / f"{model}.parquet")
    print("everything is in", folder)


if __name__ == "__main__":
    main()
