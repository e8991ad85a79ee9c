"""Write what ``test_golden.py`` compares with: ``python tests/golden/make.py``.

Run it only when files or numbers are meant to change, and say so in CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "data"))

from prepared import digests  # noqa: E402
from recipe_logs import generated  # noqa: E402

import stoker  # noqa: E402
from stoker.testing import make_dataset  # noqa: E402

ROWS = {
    "criteo": 1_000, "avazu": 1_000, "taobao": 4_000, "trivago": 2_000, "movielens": 2_000, "online-retail": 3_000,
    "globo": 2_000, "ebnerd": 600,
}  # fmt: skip
PRESETS_BY_DAY = ("terabyte", "mlperf")  # they split by the names of the day files
RUNS: dict[str, dict[str, Any]] = {
    "resident": {"row_optimizer": "rowwise_adagrad"},
    "cached": {"row_optimizer": "adam", "device_memory": "9KiB", "lookahead": 4},
    "bfloat16": {"row_optimizer": "sgd", "dtype": "bfloat16", "model": "deepfm"},
}


def probe() -> str:
    """A hash of what NumPy computes on this machine: floating-point bytes are compared only where it is the same."""
    values = np.linspace(0.1, 50.0, 4096)
    return hashlib.sha256(b"".join(f(values).tobytes() for f in (np.log1p, np.exp, np.sin, np.log))).hexdigest()


def logs(folder: Path, recipe: str) -> tuple[list[Path], str]:
    """A generated log of the recipe's format and the hash of its bytes."""
    files = generated(folder, recipe, ROWS[recipe], drift=0.3, scale=0.01 if recipe in ("criteo", "avazu") else 1.0)
    return files, hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def prepared(folder: Path, recipe: str) -> dict[str, Any]:
    """The log's hash, and those of all files of the dataset of each preset."""
    files, log = logs(folder, recipe)
    found: dict[str, Any] = {"log": log}
    for preset in stoker.recipes.get(recipe).presets:
        if preset not in PRESETS_BY_DAY:
            out = folder / preset
            stoker.prepare(stoker.recipes.get(recipe, preset), files, out=out, threads=2)
            found[preset] = {name: digest[:16] for name, digest in digests(out).items()}
    return found


def losses(folder: Path, name: str) -> list[float]:
    """The training losses of 50 steps."""
    data = make_dataset(folder / "data", rows=4_000, num_embeddings=(600, 300, 10), sequence={1: 4})
    options: dict[str, Any] = {} if "model" in RUNS[name] else {"model_options": {"bottom": (8,), "top": (8,)}}
    stoker.train(
        data, out=folder / "run", batch_size=64, steps=50, log_every=5, embedding_dim=4, tensorboard=False,
        display="quiet", threads=1, **options, **RUNS[name],
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        (top / "logs").mkdir()
        found = {"probe": probe(), "datasets": {}, "losses": {}}
        for recipe in ROWS:
            (top / recipe).mkdir()
            found["datasets"][recipe] = prepared(top / recipe, recipe)
        for name in RUNS:
            (top / name).mkdir()
            found["losses"][name] = losses(top / name, name)
        (HERE / "golden.json").write_text(json.dumps(found, indent=1) + "\n")
