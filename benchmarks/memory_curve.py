"""Training with less and less memory for rows: hit rate, speed and AUC; the picture of README is drawn from it.

``python -m benchmarks memory-curve --out benchmarks/results`` measures, ``python -m benchmarks.memory_curve`` draws
``docs/picture.svg`` from the newest result.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import CACHE, Bar, Crashed, Outcome, Run, Table, WrongResult, latest
from benchmarks.lookahead import globo
from stoker import Dataset

__all__ = ["bars", "draw"]

ROOT = Path(__file__).parents[1]
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)  # of the rows and their optimizer state
DIM, BATCH, STEPS = 64, 8192, 100
ROW_BYTES = DIM * 4 + 4  # float32 columns, and the state of row-wise Adagrad
MAIN = 0.1  # the share that counts


def _train(data: Path, share: float, budget: int, steps: int) -> dict[str, Any]:
    """Train once in a process of its own; return its figures and a hash over the checkpoint's tensors."""
    out = CACHE / "memory_curve_run"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable, "-m", "stoker", "train", str(data), "--out", str(out), "--dim", str(DIM),
        "--batch-size", str(BATCH), "--threads", "2", "--no-tensorboard", "--checkpoint-minutes", "0",
        "--steps", str(steps), "--log-every", "10",
        *([] if share == 1.0 else ["--device-memory", f"{budget // 1024}KiB"]),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Crashed(done.stderr.strip())
    report = json.loads((out / "report.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    hits = [line["hit_rate"] for line in lines if line["kind"] == "train" and "hit_rate" in line]  # every 10 steps
    checkpoint = max((out / "checkpoints").iterdir())
    digest = hashlib.sha256()
    for path in sorted(checkpoint.rglob("*.safetensors")):
        digest.update(path.read_bytes())
    shutil.rmtree(out)
    return {
        "auc": report["test"]["auc"] if report["test"] else report["valid"]["auc"],
        "samples_per_second": report["samples_per_second"],
        "hit_rate": statistics.mean(hits) if hits else 1.0,
        "sha256": digest.hexdigest(),
    }


def curve(run: Run) -> Outcome:
    """Train with each share of the memory in turn, several rounds; all must end with the same files."""
    data: Dataset = globo(run)
    total = sum(data.schema.num_embeddings.values()) * ROW_BYTES
    shares = (1.0, MAIN) if run.quick else SHARES
    found: dict[float, list[dict[str, Any]]] = {share: [] for share in shares}
    for number in range(run.rounds):
        for share in shares:
            run.log(f"round {number + 1}: {share:.0%} of the rows in fast memory")
            found[share].append(_train(data.path, share, int(share * total), 30 if run.quick else STEPS))
            if found[share][-1]["sha256"] != found[1.0][0]["sha256"]:
                raise WrongResult(f"with {share:.0%} of the rows in fast memory the checkpoint differs")
    points = [
        {
            "share": share,
            "bytes": int(share * total),
            "hit_rate": runs[0]["hit_rate"],
            "auc": runs[0]["auc"],
            "speed": statistics.median(
                each["samples_per_second"] / full["samples_per_second"]
                for each, full in zip(runs, found[1.0], strict=True)
            ),
        }
        for share, runs in found.items()
    ]
    rows = []
    for point in points:
        sizes = [f"{point['share']:.0%}", f"{point['bytes'] / 2**20:.0f} MiB"]
        rows.append([*sizes, f"{point['hit_rate']:.2%}", f"{point['speed']:.2f}x", f"{point['auc']:.5f}"])
    table = Table(
        title=f"stoker train on Globo, D {DIM}, batch {BATCH:,}, {STEPS} steps",
        columns=["rows in fast memory", "bytes", "hit rate", "speed", "AUC"],
        rows=rows,
    )
    value = next(point["speed"] for point in points if point["share"] == MAIN)
    return Outcome(
        value=value,
        tables=[table],
        notes=["checked: all tensors of all checkpoints are equal to the bit, in all rounds"],
        data={
            "points": points,
            "ratios": {f"{point['share']:g}": point["speed"] for point in points},
            "runs": {f"{share:g}": runs for share, runs in found.items()},
        },
    )


def bars() -> list[Bar]:
    """Return the bar of training with a tenth of the rows in fast memory."""
    title = "stoker train on Globo with 10 % of the rows in fast memory, against all: samples/s"
    return [Bar(name="memory-curve", group="memory", title=title, must=0.9, rounds=3, run=curve)]


def draw(target: Path) -> None:
    """Draw the newest result: hit rate and speed by memory; the AUC is one number."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams |= {"svg.hashsalt": "stoker", "font.size": 11, "svg.fonttype": "none"}
    newest = [
        (made.get("time", made["date"]), bar)
        for (_, name), (_, made, bar) in latest(ROOT / "benchmarks" / "results").items()
        if name == "memory-curve"
    ]
    _, bar = max(newest, key=lambda each: each[0])
    points = sorted(bar["data"]["points"], key=lambda point: point["share"])
    shares = [100 * point["share"] for point in points]
    figure, axis = plt.subplots(figsize=(8.6, 2.35), layout="constrained")
    axis.plot(shares, [100 * point["hit_rate"] for point in points], "o-", color="#c2410c", label="hit rate")
    axis.plot(shares, [100 * point["speed"] for point in points], "s--", color="#1d4ed8", label="training speed")
    axis.set_xscale("log")
    axis.set_xticks(shares, [f"{share:g} %" for share in shares])
    axis.minorticks_off()
    axis.set_ylim(0, 108)
    axis.set_xlabel("rows in fast memory: the GPU's, or main memory on a CPU")
    axis.set_ylabel("% of all rows there")
    axis.legend(loc="lower right", frameon=False)
    axis.set_title(f"AUC {points[0]['auc']:.4f} at every point: the checkpoints are equal to the bit", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw(ROOT / "docs" / "picture.svg")
