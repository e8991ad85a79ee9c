"""Three days of a click log: train on the first, update on the second, and keep a server's model in step.

Tastes change from day to day here, so that a model of yesterday grows old.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import polars as pl

import stoker


def log_of(day: int, rows: int = 20_000) -> pl.DataFrame:
    """A log with a click, a user and an item a row; each day half of the items become another kind."""
    random = np.random.default_rng(day)
    user, item = random.integers(0, 200, rows), random.zipf(1.2, rows) % 500
    kind = np.random.default_rng(0).integers(0, 2, (2, 500))[day // 2 * (np.arange(500) % 2), np.arange(500)]
    clicked = random.random(rows) < np.where((user + kind[item]) % 2 == 0, 0.8, 0.2)
    return pl.DataFrame({"clicked": clicked.astype(int), "user": user, "item": item})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        columns = [{"name": name, "type": "int"} for name in ("user", "item")]
        schema = stoker.Schema.from_dict({"name": "clicks", "label": "clicked", "categorical": columns})
        data = stoker.prepare(schema, log_of(1), out=place / "data")
        stoker.train(
            data, out=place / "run", model_options={"bottom": (16,), "top": (32,)}, batch_size=256, epochs=5,
            row_optimizer="adagrad", row_lr=0.1, display="quiet",
        )  # fmt: skip
        server = stoker.Follower(place / "run")  # in another process, as a rule
        for day in (2, 3):
            found = stoker.update(place / "run", log_of(day))
            auc = found.before["auc"] or 0.0
            print(f"day {day}: AUC of the model before {auc:.3f}, loss while it learned the day {found.loss:.3f}")
            assert server.poll()
            print(f"       the server has update {server.version.number}")
        print(f"rolled back to {stoker.rollback(place / 'run').name}; the server follows: {server.poll()}")
        print("the checkpoint", stoker.compact(place / "run").summary().partition(" ")[2])


if __name__ == "__main__":
    main()
