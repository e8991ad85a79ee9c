"""The full DLRM training step: forward, loss, backward, row update, dense optimizer.

26 tables as in the embedding step, bottom 13-512-256-64-16, top 512-256-1, SGD on the dense part; rows by
SGD and, in a full run, by row-wise Adagrad too. Peers run in fp32.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dlrm_workload import DlrmWorkload, check_model, dense_flops
from benchmarks.harness import Bar, NotRun, Outcome, Run, Table
from benchmarks.machine import limits
from benchmarks.rounds import Contestant, Timings, compare, play
from benchmarks.workload import POOL
from stoker.device import has_bf16_products

__all__ = ["bars"]

TITLES = {"sgd": "SGD", "rowwise_adagrad": "row-wise Adagrad"}


def ours(dtype: str, *, compiled: bool = False) -> Contestant:
    label = "stoker fp32" if dtype == "float32" else "stoker bf16"
    options = {"dense_dtype": dtype, "compile": compiled}
    return Contestant(label=label + (" + compile" if compiled else ""), script="stoker_dlrm.py", options=options)


TORCHREC = Contestant(label="TorchRec DLRM", script="torchrec_dlrm.py", environment="fbgemm")
BAGS = Contestant(label="PyTorch, 26 EmbeddingBags", script="torch_dlrm.py", options={"stacked": False})
STACKED = Contestant(label="PyTorch, one stacked EmbeddingBag", script="torch_dlrm.py", options={"stacked": True})


def optimizers(run: Run) -> list[str]:
    return ["sgd"] if run.quick else ["sgd", "rowwise_adagrad"]


def cases(run: Run) -> dict[str, int]:
    return {f"{TITLES[optimizer]}, batch {batch}": batch for optimizer in optimizers(run) for batch in POOL}


def measure(contestants: Sequence[Contestant], run: Run) -> Timings:
    """All contestants in interleaved rounds, each process checked against the float64 reference."""
    workload = DlrmWorkload.make()
    for optimizer in optimizers(run):
        for batch in POOL:
            workload.reference(optimizer, batch)
    dtypes = {c.label: c.options.get("dense_dtype", "float32") for c in contestants}

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        check_model(label, workload, line["optimizer"], line["batch"], results, line["case"], dtypes[label])

    return play(contestants, workload.config(optimizers(run), list(POOL)), run, check)


@lru_cache(maxsize=1)
def fp32(run: Run) -> Timings:
    """One measurement serves the speed bar and the share bar."""
    peers = [TORCHREC, BAGS] if run.quick else [TORCHREC, BAGS, STACKED]
    return measure([ours("float32"), *peers], run)


def versus(timings: Timings, run: Run, mine: str) -> tuple[float, list[Table], dict[str, dict[str, float]]]:
    """The smaller of the ratios to TorchRec and to plain PyTorch."""
    value, tables, ratios = float("inf"), [], {}
    groups = {"TorchRec": [TORCHREC.label], "plain PyTorch": [BAGS.label, STACKED.label]}
    for name, labels in groups.items():
        present = [label for label in labels if label in timings.seconds]
        smallest, table, found = compare(timings, mine, present, cases(run), f"Full DLRM step against {name}")
        value, ratios[name] = min(value, smallest), found
        tables.append(table)
    return value, tables, ratios


CHECKED = (
    "checked against a float64 DLRM: logits and every change of layers and rows in the first three steps of "
    "every timed process"
)


def step_fp32(run: Run) -> Outcome:
    timings = fp32(run)
    mine = ours("float32").label
    value, tables, ratios = versus(timings, run, mine)
    tables.append(dense_rate(timings, run))
    data = {
        "seconds": timings.seconds,
        "ratios": ratios,
        "versions": timings.versions,
        "extra": timings.extra[mine],
    }
    return Outcome(value=value, tables=tables, notes=[CHECKED], data=data)


def _shares(timings: Timings) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in timings.extra[ours("float32").label]:
        found.setdefault(line["case"], []).append(line)
    return found


def dense_rate(timings: Timings, run: Run) -> Table:
    """The dense part's GFLOP/s against what this machine reaches on products of the same shapes."""
    known = limits(run.quick)
    rows = []
    for case, lines in _shares(timings).items():
        batch = cases(run)[case]
        mlp, interaction = dense_flops(batch)
        dense = float(np.median([line["step"] * (1 - line["rest"]) for line in lines]))
        rate, gemm, big = (mlp + interaction) / dense / 1e9, known[f"gemm_{batch}"], known["gemm_big"]
        rows.append([case, f"{dense * 1e3:.2f}", f"{rate:.0f}", f"{gemm:.0f}", f"{rate / gemm:.0%}", f"{big:.0f}"])
    return Table(
        title="Our fp32 dense part (MLPs, interaction; forward, backward) against the machine's GEMM rate",
        columns=["case", "ms", "GFLOP/s", "GEMM of its shapes", "reached", "largest GEMM"],
        rows=rows,
    )


def step_share(run: Run) -> Outcome:
    timings = fp32(run)
    rows, worst = [], 0.0
    for case, lines in _shares(timings).items():
        rest = float(np.median([line["rest"] for line in lines])) * 100
        parts = {name: float(np.median([line["parts"][name] for line in lines])) * 1e3 for name in lines[0]["parts"]}
        worst = max(worst, rest)
        step = float(np.median([line["step"] for line in lines])) * 1e3
        rows.append([case, f"{step:.2f}", *(f"{value:.2f}" for value in parts.values()), f"{rest:.1f} %"])
    columns = [
        "case",
        "step ms",
        "lookup",
        "row update",
        "loss",
        "dense optimizer",
        "neither MLP nor interaction",
    ]
    table = Table(title="Where our fp32 step's time goes (ms)", columns=columns, rows=rows)
    notes = [CHECKED, "each part timed inside the step; the worst case counts"]
    return Outcome(value=worst, tables=[table], notes=notes, data={"extra": timings.extra[ours("float32").label]})


def step_bf16(run: Run) -> Outcome:
    if not has_bf16_products():
        raise NotRun("a processor with bf16 products (this one would emulate them)")
    forms = [ours("bfloat16")]
    if shutil.which("g++") or shutil.which("clang++"):
        forms.append(ours("bfloat16", compiled=True))
    peers = [TORCHREC, BAGS] if run.quick else [TORCHREC, BAGS, STACKED]
    timings = measure([*forms, *peers], run)
    found = {}
    for form in forms:
        found[form.label] = versus(timings, run, form.label)
    best = max(found, key=lambda label: found[label][0])
    tables = [table for label in found for table in found[label][1]]
    notes = [CHECKED + " (ours within bfloat16 rounding)", f"counts: {best}"]
    if len(forms) == 1:
        notes.append("no C++ compiler: the compiled form was left out")
    return Outcome(
        value=found[best][0],
        tables=tables,
        notes=notes,
        data={
            "seconds": timings.seconds,
            "ratios": {k: v[2] for k, v in found.items()},
            "versions": timings.versions,
        },
    )


def bars() -> list[Bar]:
    """The full step's bars."""
    return [
        Bar(
            name="dlrm-step-fp32",
            group="dlrm-step",
            title="full DLRM step in fp32 against TorchRec on FBGEMM and plain PyTorch (the smaller ratio)",
            must=1.05,
            run=step_fp32,
        ),
        Bar(
            name="dlrm-step-share",
            group="dlrm-step",
            title="share of our fp32 step that is neither MLP nor interaction",
            must=5.0,
            at_most=True,
            unit=" %",
            run=step_share,
        ),
        Bar(
            name="dlrm-step-bf16",
            group="dlrm-step",
            title="full DLRM step with a bf16 dense part against the same peers in fp32",
            must=2.0,
            aim=2.5,
            run=step_bf16,
        ),
    ]
