"""The embedding step: lookup + backward + row update with a given gradient, over a matrix of workloads.

The worst shape decides, against the fastest peer on that shape. Every contestant gets its natural input, made outside
the timed region: ours as the reader gives it, FBGEMM and Intel's extension feature by feature with offsets, plain
PyTorch ids of one stacked table for each width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bar, NotRun, Outcome, Run
from benchmarks.machine import embedding_floor
from benchmarks.rounds import Contestant, compare, peer_python, play
from benchmarks.workload import (
    BETAS,
    CHECKED_STEPS,
    EPS,
    LR,
    MATRIX,
    QUICK_MATRIX,
    EmbeddingWorkload,
    Shape,
    check_rows,
)

__all__ = ["bars"]

OURS = Contestant(label="stoker", script="stoker_embedding.py")
NAMES = {"sgd": "SGD", "adagrad": "Adagrad", "rowwise_adagrad": "row-wise Adagrad", "adam": "Adam"}
IPEX_WRONG = "Intel's extension 2.8 leaves out shapes with tables of 32 columns and more, where its update is wrong"
SECONDS = 0.8  # that a shape is timed for in each process


def peers_of(optimizer: str) -> list[Contestant]:
    """Every strong peer that has the optimizer.

    FBGEMM gains nothing from the second core in some optimizers: the better of one and two threads.
    """
    found = []
    if optimizer != "adam":  # FBGEMM's Adam on the CPU was removed in 1.0
        found += [
            Contestant(
                label=f"FBGEMM TBE, {n} thread{'s' * (n > 1)}",
                script="fbgemm_embedding.py",
                environment="fbgemm",
                threads=n,
            )
            for n in (1, 2)
        ]
    if optimizer in ("sgd", "adagrad"):
        found.append(Contestant(label="Intel extension", script="ipex_embedding.py", environment="ipex"))
    forms = {
        "sgd": ["EmbeddingBag", "index_add", "sort + embedding_bag", "unique + index_add"],
        "adagrad": ["unique + index_add", "sort + embedding_bag"],
        "rowwise_adagrad": ["unique + index_add", "sort + embedding_bag"],
        "adam": ["EmbeddingBag", "unique + index_add", "sort + embedding_bag"],
    }[optimizer]
    names = {"EmbeddingBag": f"stacked EmbeddingBag(sparse) + {'SGD' if optimizer == 'sgd' else 'SparseAdam'}"}
    return found + [
        Contestant(label=names.get(form, f"by hand, {form}"), script="torch_embedding.py", options={"form": form})
        for form in forms
    ]


def present(peers: Sequence[Contestant]) -> tuple[list[Contestant], list[str]]:
    """Split off the peers whose environment cannot be built here, which a note then names.

    Raises:
        NotRun: FBGEMM is missing, the strongest of them.
    """
    found, absent = [], []
    for peer in peers:
        try:
            peer_python(peer.environment)
            found.append(peer)
        except NotRun as missing:
            if peer.environment == "fbgemm":
                raise
            absent.append(f"left out: {peer.label}: {missing}")
    return found, absent


def bar(optimizer: str, run: Run, shapes: Sequence[Shape] | None = None) -> Outcome:
    """One optimizer: the smallest over all shapes of the ratio to the fastest peer."""
    chosen = shapes or (QUICK_MATRIX if run.quick else MATRIX)
    peers, absent = present(peers_of(optimizer))
    workloads = {}
    for shape in chosen:
        run.log(f"inputs and reference: {shape.name}")
        workloads[shape.name] = EmbeddingWorkload.make(shape)
        workloads[shape.name].reference(optimizer)

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        found = dict(np.load(results / line["left"]))
        case = line["case"]
        check_rows(f"{label}, {case}", optimizer, workloads[case].reference(optimizer), found)

    config = {
        "cases": [workload.case() for workload in workloads.values()], "optimizer": optimizer,
        "checked_steps": CHECKED_STEPS, "lr": LR, "eps": EPS, "betas": BETAS,
        "seconds": SECONDS / 4 if run.quick else SECONDS,
    }  # fmt: skip
    timings = play([OURS, *peers], config, run, check)
    cases = {shape.name: shape.batch for shape in chosen}
    title = f"Embedding step, {NAMES[optimizer]}, fp32"
    value, table, ratios = compare(timings, OURS.label, [peer.label for peer in peers], cases, title)
    floor, notes = embedding_floor(
        list(workloads.values()), optimizer, {name: timings.median(OURS.label, name) for name in cases}, run
    )
    worst = min(ratios, key=lambda name: ratios[name])
    return Outcome(
        value=value,
        tables=[table, floor],
        notes=[
            f"the worst shape counts: {worst}; the fastest peer on each shape is compared",
            "checked: changed rows and lookups of the first three steps of every process equal a float64 "
            f"reference {'to the bit' if optimizer == 'sgd' else 'within float32 rounding'}",
            *absent,
            *([IPEX_WRONG] if optimizer in ("sgd", "adagrad") else []),
            *notes,
        ],
        data={"seconds": timings.seconds, "ratios": ratios, "versions": timings.versions, "absent": absent},
    )


MUST = {"sgd": 1.3, "rowwise_adagrad": 2.0}  # of others: no shape on which a peer is faster


def bars() -> list[Bar]:
    """A bar for each optimizer: the worst shape against the fastest peer."""
    return [
        Bar(
            name=f"embedding-matrix-{optimizer.replace('_', '-')}",
            group="embedding-matrix",
            title=f"embedding step with {NAMES[optimizer]}, {len(MATRIX)} shapes: the worst against the fastest peer",
            must=MUST.get(optimizer, 1.0),
            aim=2.0,
            rounds=3,
            run=partial(bar, optimizer),
        )
        for optimizer in NAMES
    ]
