"""The embedding gradient's share of a training step: with ``nn.Embedding`` and with ours.

"Accelerating Recommender System Training 15x with RAPIDS", section 4, sums the gradient of a row in two steps, partial
sums and then their sums, instead of row by row; on a GPU the kernel's share of the step fell from 70 to 2.3 percent.
Our update does so for the lookups of a batch that are of one row: it sorts them, sums each stretch and updates the
row at once. Both sides train the tabular model on the same batches; rows after a step are compared with those that
index_add gives.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import stoker
from benchmarks import reader
from benchmarks.harness import Bar, Outcome, Run, Table, WrongResult
from stoker.dataset.batch import Batch
from stoker.dataset.spec import FeatureSpec
from stoker.models.tabular import Tabular

__all__ = ["bars"]

BATCH, DIM, HIDDEN = 4096, 16, (64, 32)
_GRADIENT = ("aten::embedding_dense_backward",)
_UPDATE = ("Optimizer.step#AdamW.step", "aten::_fused_adamw_")
_OURS = ("_LookupBackward",)


class Plain(nn.Module):
    """The tabular model with ``nn.Embedding``, gradients dense."""

    def __init__(self, spec: FeatureSpec) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(spec.num_embeddings[f.table], DIM) for f in spec.features)
        self.norm = nn.BatchNorm1d(len(spec.dense))
        layers: list[nn.Module] = []
        width = DIM * len(spec.features) + len(spec.dense)
        for size in HIDDEN:
            layers += [nn.Linear(width, size), nn.ReLU(), nn.BatchNorm1d(size)]
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, batch: Batch) -> Tensor:
        rows = [table(batch.ids[:, place]) for place, table in enumerate(self.tables)]
        logits: Tensor = self.layers(torch.cat([*rows, self.norm(batch.dense)], dim=1)).squeeze(1)
        return logits


def check(spec: FeatureSpec, batch: Batch) -> None:
    """Rows after a step of SGD with whole numbers are the same on both sides.

    Raises:
        WrongResult: one is not.
    """
    tables = [
        stoker.TableConfig(name=name, num_embeddings=n, embedding_dim=DIM) for name, n in spec.num_embeddings.items()
    ]
    mine = stoker.EmbeddingTables(tables, optimizer=stoker.SGD(lr=1.0))
    grad = torch.randint(-8, 8, (len(batch), len(tables), DIM), generator=torch.Generator().manual_seed(0)).float()
    before = [mine.rows(table.name).clone() for table in tables]
    mine(batch.ids).backward(grad)
    for place, (table, old) in enumerate(zip(tables, before, strict=True)):
        expected = torch.zeros_like(old).index_add_(0, batch.ids[:, place].long(), grad[:, place])
        if not torch.allclose(mine.rows(table.name), old - expected, rtol=0, atol=1e-4):
            raise WrongResult(f"rows of {table.name} after a step differ from those that index_add gives")


def _shares(step: Any, batches: list[Batch], names: dict[str, tuple[str, ...]]) -> tuple[dict[str, float], float]:
    """Share of the time of all steps that operators take, and milliseconds a step."""
    for batch in batches[:4]:
        step(batch)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for batch in batches[4:]:
            step(batch)
    events = {event.key: event for event in found.key_averages()}
    whole = sum(event.self_cpu_time_total for event in events.values())
    parts = {
        what: sum(events[key].cpu_time_total for key in keys if key in events) / whole for what, keys in names.items()
    }
    return parts, whole / 1e3 / len(batches[4:])


def gradient(run: Run) -> Outcome:
    """Share of the gradient and the update of rows, theirs over ours."""
    whole = reader.dataset(run)
    spec = whole.schema
    batches = [
        batch for batch, _ in zip(whole.train.batches(BATCH, seed=1), range(16 if run.quick else 44), strict=False)
    ]
    check(spec, batches[0])
    plain = Plain(spec)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    ours = Tabular(spec, dims=dict.fromkeys(spec.num_embeddings, DIM), optimizer=stoker.Adam(lr=1e-3))
    dense = torch.optim.AdamW(ours.dense_parameters(), lr=1e-3, fused=True)
    criterion = nn.BCEWithLogitsLoss()

    def their_step(batch: Batch) -> None:
        criterion(plain(batch), batch.labels).backward()
        adam.step()
        adam.zero_grad()

    def our_step(batch: Batch) -> None:
        ours.loss(batch).backward()
        dense.step()
        dense.zero_grad()

    theirs_found, ours_found = [], []
    for number in range(run.rounds):
        run.log(f"round {number + 1}/{run.rounds}")
        theirs_found.append(_shares(their_step, batches, {"gradient": _GRADIENT, "update": _UPDATE[:1]}))
        ours_found.append(_shares(our_step, batches, {"both": _OURS}))
    middle = statistics.median
    before = middle(parts["gradient"] for parts, _ in theirs_found)
    update = middle(parts["update"] for parts, _ in theirs_found)
    after = middle(parts["both"] for parts, _ in ours_found)
    steps = [middle(ms for _, ms in found) for found in (theirs_found, ours_found)]
    table = Table(
        title=f"Tabular model, {len(spec.features)} tables of {DIM} columns, batch {BATCH:,} (medians)",
        columns=["", "ms a step", "gradient of rows", "their update"],
        rows=[
            ["nn.Embedding, AdamW", f"{steps[0]:.1f}", f"{before:.1%}", f"{update:.1%}"],
            ["ours, Adam", f"{steps[1]:.1f}", f"{after:.1%}", "within"],
        ],
    )
    notes = ["shares by torch's profiler; ours is the gradient and the update of rows in one",
             "checked: rows after a step equal those that index_add gives"]  # fmt: skip
    data = {"before": before, "update": update, "after": after, "milliseconds": steps}
    return Outcome(value=(before + update) * steps[0] / (after * steps[1]), tables=[table], notes=notes, data=data)


def bars() -> list[Bar]:
    """What the gradient of rows takes."""
    return [
        Bar(
            name="embedding-gradient",
            group="gradient",
            title="time of the rows' gradient and update in a step, nn.Embedding over ours",
            must=1.0,
            run=gradient,
        )
    ]
