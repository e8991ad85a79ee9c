"""The embedding step: lookup + backward + row update with a given gradient [B, F, D].

26 tables with Kaggle-like sizes of 5 M rows together, D 16, Zipf 1.05 ids by falling frequency. Every
contestant gets its natural input, made outside the timed region: ours [B, F] int32 as the reader gives it,
FBGEMM feature-major int64 with offsets, plain PyTorch global int64 ids of one stacked table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bar, Outcome, Run
from benchmarks.machine import embedding_floor
from benchmarks.rounds import Contestant, Timings, compare, play
from benchmarks.workload import POOL, EmbeddingWorkload, check_rows

__all__ = ["bars"]

OURS = Contestant(label="stoker", script="stoker_embedding.py")
NAMES = {"sgd": "SGD", "adagrad": "Adagrad", "rowwise_adagrad": "row-wise Adagrad", "adam": "Adam"}


def fbgemm() -> list[Contestant]:
    """FBGEMM gains nothing from the second core in some optimizers: the better of one and two threads."""
    return [
        Contestant(
            label=f"FBGEMM TBE, {n} thread{'s' * (n > 1)}",
            script="fbgemm_embedding.py",
            environment="fbgemm",
            threads=n,
        )
        for n in (1, 2)
    ]


def torch_forms(optimizer: str, quick: bool) -> list[Contestant]:
    """Plain PyTorch's forms. A quick run leaves out those that were never the fastest in a full one."""
    forms = {
        "sgd": ["EmbeddingBag", "index_add", "sort + embedding_bag", "coalesce", "unique + index_add"],
        "rowwise_adagrad": ["unique + index_add", "sort + embedding_bag", "coalesce"],
        "adam": ["EmbeddingBag", "sort + embedding_bag", "unique + index_add", "coalesce"],
    }[optimizer]
    names = {"EmbeddingBag": f"stacked EmbeddingBag(sparse) + {'SGD' if optimizer == 'sgd' else 'SparseAdam'}"}
    return [
        Contestant(label=names.get(form, f"by hand, {form}"), script="torch_embedding.py", options={"form": form})
        for form in (forms[:2] if quick else forms)
    ]


def measure(optimizer: str, peers: Sequence[Contestant], run: Run) -> tuple[Timings, EmbeddingWorkload]:
    """All contestants in interleaved rounds, every process checked against the float64 reference."""
    workload = EmbeddingWorkload.make()
    batches = list(POOL)
    references = {batch: workload.reference(optimizer, batch) for batch in batches}

    def check(label: str, line: dict[str, Any], results: Path) -> None:
        batch = int(line["case"].split()[1])
        rows, weight, output = (np.load(results / f"{name}_{batch}.npy") for name in ("rows", "weight", "output"))
        check_rows(label, optimizer, references[batch], rows, weight, output)

    return play([OURS, *peers], workload.config(optimizer, batches), run, check), workload


def bar(optimizer: str, against: str, run: Run) -> Outcome:
    """One optimizer against one library: the smaller of the ratios at batch 2048 and 8192."""
    peers = fbgemm() if against == "fbgemm" else torch_forms(optimizer, run.quick)
    timings, workload = measure(optimizer, peers, run)
    cases = {f"batch {batch}": batch for batch in POOL}
    title = f"Embedding step, {NAMES[optimizer]}, 26 tables, 5 M rows, D 16, Zipf 1.05, fp32"
    # The bar names plain PyTorch's form: the stacked sparse EmbeddingBag with its optimizer, or, where torch has no
    # such optimizer, unique + index_add_. The forms written by hand for this benchmark are shown beside it.
    deciding = peers if against == "fbgemm" else peers[:1]
    value, table, ratios = compare(timings, OURS.label, [peer.label for peer in deciding], cases, title)
    tables = [table]
    if others := [peer.label for peer in peers if peer not in deciding]:
        tables.append(compare(timings, OURS.label, others, cases, "The same, against forms written by hand")[1])
    floor, notes = embedding_floor(
        workload, optimizer, {b: timings.median(OURS.label, f"batch {b}") for b in POOL}, run
    )
    return Outcome(
        value=value,
        tables=[*tables, floor],
        notes=[
            "checked: changed rows and lookups of the first three steps of every process equal a float64 "
            f"reference {'to the bit' if optimizer == 'sgd' else 'within float32 rounding'}",
            *notes,
        ],
        data={"seconds": timings.seconds, "ratios": ratios, "versions": timings.versions},
    )


def bars() -> list[Bar]:
    """Embedding bars: (optimizer, against, must, aim) of the roadmap."""
    wanted = [
        ("sgd", "fbgemm", 2.0, 3.0),
        ("rowwise_adagrad", "fbgemm", 1.0, 1.5),
        ("adagrad", "fbgemm", 1.5, 3.0),
        ("sgd", "torch", 3.0, 5.0),
        ("rowwise_adagrad", "torch", 3.0, 5.0),
        ("adam", "torch", 3.0, 5.0),
    ]
    libraries = {
        "fbgemm": "FBGEMM on CPU",
        "torch": "plain PyTorch (one stacked table)",
    }
    return [
        Bar(
            name=f"embedding-{optimizer.replace('_', '-')}-vs-{against}",
            group="embedding",
            title=f"embedding step with {NAMES[optimizer]} against {libraries[against]}",
            must=must,
            aim=aim,
            run=partial(bar, optimizer, against),
        )
        for optimizer, against, must, aim in wanted
    ]
