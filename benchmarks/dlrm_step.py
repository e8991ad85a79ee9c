"""The full DLRM training step over a matrix of workloads: forward, loss, backward, row update, dense optimizer.

Plain SGD on the dense part; rows by SGD and by row-wise Adagrad. The worst shape decides, against the fastest peer of
the same precision: PyTorch with rows updated by hand, compiled and not, and, in float32, TorchRec on FBGEMM.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dlrm_workload import DLRM_MATRIX, QUICK_DLRM_MATRIX, DlrmWorkload, check_model
from benchmarks.harness import Bar, NotRun, Outcome, Run, Table
from benchmarks.rounds import Contestant, Timings, compare, play
from stoker.base.device import has_bf16_products

__all__ = ["bars"]

TITLES = {"sgd": "SGD", "rowwise_adagrad": "row-wise Adagrad"}
SECONDS = 1.2  # that a shape is timed for in each process
SHARES = "D 16, one id, Zipf 1.05 sorted"  # shapes whose step is taken apart


def ours(dtype: str, *, compiled: bool = False) -> Contestant:
    label = "stoker fp32" if dtype == "float32" else "stoker bf16"
    options = {"dense_dtype": dtype, "compile": compiled}
    return Contestant(label=label + (" + compile" if compiled else ""), script="stoker_dlrm.py", options=options)


def by_hand(dtype: str, *, compiled: bool, sums: str = "embedding_bag") -> Contestant:
    """Duplicates are summed by ``sums``: unique + index_add_, or a sort and embedding_bag."""
    label = f"torch{'.compile' if compiled else ''}, rows by hand ({'sort' if sums == 'embedding_bag' else 'unique'})"
    options = {"dense_dtype": dtype, "compile": compiled, "sums": sums}
    return Contestant(label=label, script="torch_dlrm.py", options=options)


def peers_of(dtype: str) -> list[Contestant]:
    found = [
        by_hand(dtype, compiled=True),
        by_hand(dtype, compiled=True, sums="index_add"),
        by_hand(dtype, compiled=False),
    ]
    if dtype == "float32":
        found.append(Contestant(label="TorchRec DLRM", script="torchrec_dlrm.py", environment="fbgemm"))
    return found


def optimizers(run: Run) -> list[str]:
    return ["rowwise_adagrad"] if run.quick else list(TITLES)


def cases(run: Run) -> dict[str, int]:
    shapes = QUICK_DLRM_MATRIX if run.quick else DLRM_MATRIX
    return {f"{TITLES[optimizer]}: {s.name}": s.tables.batch for optimizer in optimizers(run) for s in shapes}


def measure(dtype: str, run: Run) -> Timings:
    """All contestants in interleaved rounds, each process checked against the float64 reference."""
    workloads = {}
    for shape in QUICK_DLRM_MATRIX if run.quick else DLRM_MATRIX:
        run.log(f"inputs and reference: {shape.name}")
        workloads[shape.name] = DlrmWorkload.make(shape)
        for optimizer in optimizers(run):
            workloads[shape.name].reference(optimizer)

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        check_model(label, workloads[line["shape"]], line["optimizer"], results / line["left"], dtype)

    config = DlrmWorkload.config(list(workloads.values()), optimizers(run))
    config["seconds"] = SECONDS / 4 if run.quick else SECONDS
    for case in config["cases"]:
        case["shares"] = SHARES in case["name"]
    return play([ours(dtype), ours(dtype, compiled=True), *peers_of(dtype)], config, run, check)


@lru_cache(maxsize=1)
def fp32(run: Run) -> Timings:
    """One measurement serves the speed bar and the share bar."""
    return measure("float32", run)


CHECKED = (
    "checked against a float64 DLRM: logits and every change of layers and rows in the first three steps of "
    "every timed process"
)


def judged(timings: Timings, dtype: str, run: Run) -> Outcome:
    """The better of our two forms by its own worst case, against the fastest peer of each case."""
    forms = [ours(dtype).label, ours(dtype, compiled=True).label]
    labels = [peer.label for peer in peers_of(dtype)]
    found = {form: compare(timings, form, labels, cases(run), f"DLRM step, {form}") for form in forms}
    best = max(forms, key=lambda form: found[form][0])
    value, _, ratios = found[best]
    return Outcome(
        value=value,
        tables=[table for _, table, _ in found.values()],
        notes=[
            CHECKED + (" (within bfloat16 rounding)" if dtype == "bfloat16" else ""),
            f"counts: {best}, on its worst case: {min(ratios, key=lambda case: ratios[case])}",
            "both sides have the same precision; the fastest peer of each case is compared",
        ],
        data={
            "seconds": timings.seconds,
            "ratios": ratios,
            "other form": {form: each[2] for form, each in found.items() if form != best},
            "versions": timings.versions,
            "extra": timings.extra[forms[0]],
        },
    )


def _compiler() -> None:
    if not (shutil.which("g++") or shutil.which("clang++")):
        raise NotRun("torch.compile needs a C++ compiler (apt install g++)")


def step_fp32(run: Run) -> Outcome:
    _compiler()
    return judged(fp32(run), "float32", run)


def step_bf16(run: Run) -> Outcome:
    if not has_bf16_products():
        raise NotRun("a processor with bf16 products (this one would emulate them)")
    _compiler()
    return judged(measure("bfloat16", run), "bfloat16", run)


def step_share(run: Run) -> Outcome:
    _compiler()
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in fp32(run).extra[ours("float32").label]:
        lines.setdefault(line["case"], []).append(line)
    rows, shares = [], {}
    for case, found in lines.items():
        shares[case] = float(np.median([line["rest"] for line in found])) * 100
        parts = {name: float(np.median([line["parts"][name] for line in found])) * 1e3 for name in found[0]["parts"]}
        step = float(np.median([line["step"] for line in found])) * 1e3
        rows.append([case, f"{step:.2f}", *(f"{value:.2f}" for value in parts.values()), f"{shares[case]:.1f} %"])
    columns: Sequence[str] = [
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
    return Outcome(value=max(shares.values()), tables=[table], notes=notes, data={"ratios": shares})


def bars() -> list[Bar]:
    """The full step's bars: the worst shape against the fastest peer of equal precision."""
    title = f"DLRM step, {len(DLRM_MATRIX)} shapes x 2 row optimizers: the worst against the fastest peer"
    return [
        Bar(
            name="dlrm-matrix-fp32",
            group="dlrm-matrix",
            title=f"{title}, fp32",
            must=1.05,
            aim=1.5,
            rounds=3,
            run=step_fp32,
        ),
        Bar(
            name="dlrm-matrix-bf16",
            group="dlrm-matrix",
            title=f"{title}, bf16 dense part on both sides",
            must=1.05,
            aim=1.5,
            rounds=3,
            run=step_bf16,
        ),
        Bar(
            name="dlrm-step-share",
            group="dlrm-matrix",
            title="share of our fp32 step that is neither MLP nor interaction",
            must=5.0,
            at_most=True,
            unit=" %",
            rounds=3,
            run=step_share,
        ),
    ]
