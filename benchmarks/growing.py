"""A training step with raw ids against the same step with rows that were known beforehand.

Both models train in turns in one process on the same batches, and their losses must be equal to the bit. The static one
is given the rows that the raw ids get, and starts from their initial rows.

Legend: B rows of a batch, T tables.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import stoker
from benchmarks.harness import Bar, Outcome, Run, Table, WrongResult
from stoker.ops import Bags
from stoker.tables.growing.ids import GrowingIds, InitialRows

__all__ = ["bars"]

TABLES, ROWS, KNOWN = 26, 100_000, 50_000
NEW = 0.01  # of the lookups: raw ids that no batch had before
BLOCK = 4  # steps in turn
MIX = np.uint64(0x9E3779B97F4A7C15)
PLACES = {"on the device": stoker.Device(), "cached, 5 %": stoker.Cached(fraction=0.05)}


def _raw_ids(batch: int, steps: int) -> list[np.ndarray[Any, Any]]:
    """Raw ids [B, T] of each step: popular ones of KNOWN, and some that are new."""
    random, found, fresh = np.random.default_rng(0), [], KNOWN
    for _ in range(steps):
        ids = (KNOWN * random.random((batch, TABLES)) ** 6).astype(np.uint64) + np.uint64(1)
        new = random.random(ids.shape) < NEW
        ids[new] = fresh + 1 + np.arange(new.sum())
        fresh += int(new.sum())
        found.append((ids * MIX).view(np.int64))
    return found


class _Pair:
    """A model with raw ids, and one with rows."""

    def __init__(self, place: stoker.Strategy, batch: int, steps: int) -> None:
        spec = stoker.FeatureSpec.from_sizes(13, [ROWS] * TABLES)
        grown = replace(spec, grow={feature.table: stoker.Grow() for feature in spec.features})
        self.models = []
        for each in (grown, spec):
            torch.manual_seed(0)
            self.models.append(
                stoker.DLRM(each, embedding_dim=16, bottom=(512, 256, 64), top=(512, 256), placement=place)
            )
        self.dense = [torch.optim.Adam(model.dense_parameters(), fused=True) for model in self.models]
        tables = self.models[0].tables
        raw = _raw_ids(batch, steps)
        known = GrowingIds(tables, [feature.name for feature in spec.features])
        every = (np.arange(1, KNOWN + 1, dtype=np.uint64) * MIX).view(np.int64)
        first = [torch.from_numpy(np.repeat(part[:, None], TABLES, 1)) for part in np.array_split(every, 16)]
        for ids in first:
            known.take(None, Bags(ids), None, frozenset())
            self.models[0].embeddings(ids)  # all known ones have rows
        rows = [known.take(None, Bags(torch.from_numpy(ids)), None, frozenset())[0].call.ids for ids in raw]
        for table in tables:
            ids = known.raw_ids(table.name).numpy()
            self.models[1].embeddings.write(table.name, 0, self.models[0].embeddings.rows(table.name))
            fresh = InitialRows([table], 0).make(np.zeros(len(ids) - 1, np.int64), ids[1:], table.embedding_dim)
            self.models[1].embeddings.write(table.name, 1, fresh)
        generator = torch.Generator().manual_seed(0)
        dense = torch.rand(batch, 13, generator=generator)
        labels = (torch.rand(batch, generator=generator) < 0.5).float()
        self.batches = [
            [stoker.Batch(dense=dense, ids=torch.from_numpy(ids), labels=labels) for ids in raw],
            [stoker.Batch(dense=dense, ids=ids.to(torch.int32), labels=labels) for ids in rows],
        ]

    def train(self, which: int, first: int) -> tuple[float, list[float]]:
        """Seconds a step of some steps, and their losses."""
        model, dense, losses = self.models[which], self.dense[which], []
        begin = time.perf_counter()
        for batch in stoker.stage(self.batches[which][first : first + BLOCK], model.embeddings):
            loss = model.loss(batch)
            loss.backward()
            dense.step()
            dense.zero_grad()
            losses.append(float(loss.detach()))
        return (time.perf_counter() - begin) / BLOCK, losses


def step(run: Run) -> Outcome:
    """Seconds with rows over seconds with raw ids, at the worst place and batch size."""
    rows, ratios, data = [], [], {}
    for place, strategy in PLACES.items():
        for batch in (2048,) if run.quick else (2048, 8192):
            blocks = 4 if run.quick else 24
            pair, seconds = _Pair(strategy, batch, BLOCK * (blocks + 1)), []
            for block in range(blocks + 1):
                order = (0, 1) if block % 2 else (1, 0)
                found = {which: pair.train(which, BLOCK * block) for which in order}
                if found[0][1] != found[1][1]:
                    losses = f"{found[0][1]}, with known rows {found[1][1]}"
                    raise WrongResult(f"{place}, batch {batch}: losses {losses}")
                if block:  # the first compiles
                    seconds.append((found[0][0], found[1][0]))
            ratio = statistics.median(static / grown for grown, static in seconds)
            ratios.append(ratio)
            data[f"{place}, {batch}"] = seconds
            shown = [f"{1e3 * statistics.median(each):.1f}" for each in zip(*seconds, strict=True)]
            rows.append([place, f"{batch:,}", *shown, f"{ratio:.3f}"])
            for model in pair.models:
                model.embeddings.close()
    table = Table(
        title="A step of DLRM, ms; ratios are of pairs, and their median",
        columns=["rows", "batch", "raw ids", "known rows", "ratio"], rows=rows,
    )  # fmt: skip
    note = f"{TABLES} tables of {ROWS:,} rows, {KNOWN:,} raw ids known, {NEW:.0%} of the lookups are new raw ids"
    notes = [note, "losses are equal to the bit"]
    return Outcome(value=min(ratios), tables=[table], notes=notes, data={"seconds": data})


def bars() -> list[Bar]:
    """The promise of dynamic ids."""
    title = "a training step with raw ids, against rows known beforehand"
    return [Bar(name="dynamic-ids", group="dynamic-ids", title=title, must=0.95, rounds=1, run=step)]
