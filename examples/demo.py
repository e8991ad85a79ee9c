"""What `make demo` runs: real purchases in, a trained and evaluated recommender out, by the commands a user types.

Will this customer buy this item? UCI Online Retail, four sampled negatives a purchase; each customer's last invoice is
the test, the one before it validation. A quarter of the rows fits the memory they are given; the profile says how much
the most popular of them serve. The numbers are those of a run that had all rows, which the last command proves. With
--short, for the tests, training ends after 60 batches.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stoker.base.units import format_duration

ROOT = Path(__file__).parents[1]
DATA, RUN, PROFILE = Path("data/demo"), Path("runs/demo"), Path("runs/demo/hot.json")
PREPARE = f"stoker prepare online-retail data/online_retail/invoices.parquet --out {DATA} --overwrite"
TRAIN = f"stoker train {DATA} --row-optimizer adagrad --row-lr 0.05 --out {RUN}"
SHARE = 0.25  # of the rows, in fast memory; the others are fetched before they are needed


def commands() -> Iterator[str]:
    yield PREPARE
    yield f"stoker baseline {DATA} --rows 100k"
    tables = json.loads((ROOT / DATA / "manifest.json").read_text())["features"]["num_embeddings"]
    row = 2 * 16 * 4  # bytes: 16 weights, 16 sums of Adagrad
    budget = f"--device-memory {int(SHARE * sum(tables.values()) * row) // 1024}KiB"
    yield f"{TRAIN} {'--steps 60 --eval-every 60' if '--short' in sys.argv else '--epochs 2 --eval-every 350'} {budget}"
    yield f"stoker profile {DATA} {budget} --row-optimizer adagrad --exact --out {PROFILE}"
    yield f"stoker evaluate {RUN} --split test"
    yield f"stoker verify {RUN} --steps 20"


def main() -> int:
    console = Console()
    began = time.perf_counter()
    shutil.rmtree(ROOT / RUN, ignore_errors=True)
    for command in commands():
        console.print(f"\n[bold]$ {command}[/bold]", highlight=False, soft_wrap=True)
        done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, check=False)
        if done.returncode:
            return done.returncode
    report = json.loads((ROOT / RUN / "report.json").read_text())
    hot = json.loads((ROOT / PROFILE).read_text())
    simple = [report["baselines"]["figures"][name]["test"] for name in ("logistic regression", "average")]

    table = Table("on purchases never trained on", "this model", "logistic regression", "guessing the average")
    table.title, table.title_justify = "Will this customer buy this item?", "left"
    models = (report["test"], *simple)
    for row in (
        ("AUC", *(f"{model['auc']:.4f}" for model in models)),
        ("log loss", *(f"{model['log_loss']:.4f}" for model in models)),
        ("accuracy", *(f"{model['accuracy']:.2%}" for model in models)),
        (f"lookups of the {SHARE:.0%} hottest rows", f"{hot['access_share']:.1%}"),
        ("purchases that need no other (hot)", f"{hot['input_share']:.1%}"),
        ("training samples/s", f"{report['samples_per_second']:,.0f}"),
        ("the run is in", str(RUN)),
        ("all of it took", format_duration(time.perf_counter() - began)),
    ):
        table.add_row(*row)
    console.print("\n", table, "\n[bold]Try next:[/bold]", sep="")
    for line in (f"predict {RUN} --data {DATA} --out {RUN}/scores.parquet", "prepare --help   # docs/start.md"):
        console.print(f"  .venv/bin/stoker {line}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
