"""The accuracy of copies of rows that ranks average every few steps (cDLRM), beside that of one model for all ranks."""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import Crashed, Outcome, Run, Table

__all__ = ["measure_averages"]

RANKS = 4
EVERY = (None, 16, 64)  # None: gradients of rows are summed over ranks in each step
RULES = {"sgd": 10.0, "rowwise_adagrad": 0.05}  # of the rows, with their learning rate; cDLRM takes SGD
ROWS, TABLES = 60_000, (20_000, 5_000, 500, 50)
SETTINGS: dict[str, Any] = {
    "embedding_dim": 8, "model_options": {"bottom": (32, 8), "top": (64,)}, "batch_size": 256, "steps": 384,
    "shards": 4, "tensorboard": False, "display": "quiet", "threads": 1, "keep_last": 1,
    "checkpoint_minutes": 0, "device": "cpu", "log_every": 128, "eval_every": 384,
}  # fmt: skip


def measure_averages(run: Run) -> Outcome:
    """The AUC on test rows that averaging every 16 steps costs under SGD, in percentage points, mean over seeds."""
    seeds = range(1 if run.quick else run.rounds)
    started = multiprocessing.get_context("spawn")  # children of this process, so that their time is not others'
    cases = [(rule, every) for rule in RULES for every in EVERY]
    found: dict[tuple[str, int | None], list[dict[str, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        mine, theirs = started.Pipe()
        running = [
            started.Process(target=_train, args=(rank, folder, list(seeds), run.quick, theirs), daemon=True)
            for rank in range(RANKS)
        ]
        for each in running:
            each.start()
        theirs.close()
        try:
            for seed in seeds:
                for case in cases:
                    found[case].append(mine.recv())
                    run.log(f"seed {seed}, {case}: {found[case][-1]}")
        except EOFError:
            raise Crashed("a rank of the averages' benchmark failed") from None
        finally:
            for each in running:
                each.kill()
                each.join()
    rows, lost = [], {}
    for (rule, every), each in found.items():
        pairs = [100 * (one["auc"] - two["auc"]) for one, two in zip(found[rule, None], each, strict=True)]
        lost[rule, every] = statistics.mean(pairs)
        rows.append([
            rule, "gradients summed each step" if every is None else f"average every {every}",
            *(f"{statistics.mean(one[name] for one in each):.5f}" for name in ("auc", "log_loss")),
            f"{lost[rule, every]:.3f} ({min(pairs):.3f} to {max(pairs):.3f})",
            f"{statistics.mean(one['sent'] for one in each):.3f}",
        ])  # fmt: skip
    table = Table(
        title=f"{RANKS} ranks, {ROWS:,} rows, {len(seeds)} seeds",
        columns=["rows", "mode", "test AUC", "log loss", "AUC lost, points", "MiB sent in a step"], rows=rows,
    )  # fmt: skip
    values = {f"{rule}, {every or 'summed'}": each for (rule, every), each in found.items()}
    return Outcome(value=lost["sgd", 16], tables=[table], data={"values": values})


def _train(rank: int, folder: str, seeds: list[int], quick: bool, pipe: Connection) -> None:
    import json

    import torch
    import torch.distributed as dist

    import stoker
    from stoker.testing import make_dataset

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    if rank == 0:
        make_dataset(f"{folder}/data", rows=ROWS // 20 if quick else ROWS, num_embeddings=TABLES)
    dist.barrier()
    for seed in seeds:
        for (rule, rate), every in itertools.product(RULES.items(), EVERY):
            out, own = Path(folder, f"{seed}-{rule}-{every}"), {"row_optimizer": rule, "row_lr": rate}
            result = stoker.train(f"{folder}/data", out=out, seed=seed, average_every=every, **own, **SETTINGS)
            if rank == 0:
                lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
                sent = [line["sent_mib_per_step"] for line in lines if line["kind"] == "train"]
                kept = {name: result.test[name] for name in ("auc", "log_loss")}
                pipe.send({**kept, "sent": statistics.mean(sent)})
