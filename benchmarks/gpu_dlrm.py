"""One DLRM trained with its rows in several places, step for step on the same batches: losses first, then times.

The tables are those of MLPerf's DLRM (Criteo 1TB, ids capped at 40 M rows a table) with a lower cap; ids follow a Zipf
law by rank. Row-wise Adagrad on the rows, SGD on the dense part.

Legend: B examples, F features (one table each), D columns, C slots.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import stoker
from benchmarks.gpu_tools import Clock, Setting, synchronize, zipf_ids
from benchmarks.harness import NotRun, WrongResult
from stoker import DLRM, Batch, FeatureSpec, RowWiseAdagrad
from stoker.tables.links.transfer import TransferStats

__all__ = ["DENSE", "Contest", "Measured", "Workload", "moved", "ratio", "release", "same_rows"]

#: rows of MLPerf's 26 tables
MLPERF = (
    40_000_000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40_000_000, 3067956, 405282, 10, 2209, 11938, 155, 4,
    976, 14, 40_000_000, 40_000_000, 40_000_000, 590152, 12973, 108, 36,
)  # fmt: skip
SKEW = 1.05
DENSE = 13  # dense columns
LOOKAHEAD = 64
Range = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tables, model and batches."""

    setting: Setting
    sizes: tuple[int, ...]  # rows of each table
    dim: int  # D
    batches: tuple[int, ...]  # B of the cases
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    plain: bool = False  # made small because rows are planned in plain Python

    @classmethod
    def make(cls, setting: Setting) -> Workload:
        """84 M rows of 128 columns in a full run, 43 GB; a hundredth of them where Numba is missing."""
        plain = importlib.util.find_spec("numba") is None and setting.effort != "tiny"
        cap = setting.pick(full=16_000_000, quick=1_600_000, tiny=3_000) // (100 if plain else 1)
        return cls(
            setting=setting,
            sizes=tuple(min(rows, cap) for rows in MLPERF),
            dim=setting.pick(full=128, quick=128, tiny=8),
            batches=(1024,) if plain else setting.pick(full=(8192, 32768), quick=(32768,), tiny=(32,)),
            bottom=setting.pick(full=(512, 256), quick=(512, 256), tiny=(16,)),
            top=setting.pick(full=(1024, 1024, 512, 256), quick=(1024, 1024, 512, 256), tiny=(16,)),
            plain=plain,
        )

    @property
    def gigabytes(self) -> float:
        """1e9 bytes of all rows, without optimizer state."""
        return sum(self.sizes) * self.dim * 4 / 1e9

    @property
    def title(self) -> str:
        """What is trained, for a table's head."""
        note = " (small: rows are planned in plain Python)" if self.plain else ""
        return f"DLRM, {len(self.sizes)} tables, {sum(self.sizes):,} rows of {self.dim}, {self.gigabytes:.1f} GB{note}"

    def model(self, placement: stoker.Strategy | None = None) -> DLRM:
        """The same model, wherever its rows lie.

        Raises:
            NotRun: its rows do not fit the device.
        """
        device = self.setting.device
        if device.type == "cuda" and placement is None:
            free = torch.cuda.mem_get_info(device)[0] / 1e9
            if free < 1.05 * self.gigabytes + 4:
                raise NotRun(f"{self.gigabytes:.1f} GB of rows do not fit the {free:.1f} GB free on {device}: --quick")
        return DLRM(
            FeatureSpec.from_sizes(DENSE, self.sizes),
            embedding_dim=self.dim,
            bottom=self.bottom,
            top=self.top,
            optimizer=RowWiseAdagrad(lr=0.02),
            device=device,
            placement=placement,
            matmul="tf32",  # as DLRM is trained on GPUs of this kind
        )

    def batch(self, number: int, examples: int, ids: Tensor | None = None) -> Batch:
        """Batch ``number``, the same whenever it is asked for; page-locked for a GPU."""
        g = torch.Generator().manual_seed(1_000_003 * examples + number)
        made = Batch(
            dense=torch.randn(examples, DENSE, generator=g),
            ids=zipf_ids(self.sizes, examples, g, SKEW) if ids is None else ids,
            labels=(torch.rand(examples, generator=g) < 0.25).to(torch.float32),
            step=number,
        )
        return made.pin_memory() if self.setting.device.type == "cuda" else made

    def hot(self, slots: int) -> Iterator[Batch]:
        """Batches that go once through the ``slots`` most frequent rows: what long training leaves in fast memory."""
        low, high = 1, max(self.sizes)
        while low < high:  # the largest prefix of all tables that fits
            middle = (low + high + 1) // 2
            fits = sum(min(rows, middle) for rows in self.sizes) <= slots
            low, high = (middle, high) if fits else (low, middle - 1)
        examples = min(low, self.setting.pick(full=65536, quick=65536, tiny=64) // (32 if self.plain else 1))
        top = torch.tensor([min(rows, low) for rows in self.sizes])
        for number in range(math.ceil(low / examples)):
            rank = torch.arange(number * examples, (number + 1) * examples).unsqueeze(1)
            yield self.batch(number, examples, (rank % top).to(torch.int32))

    def steps(self, examples: int) -> tuple[int, int]:
        """Steps of a round: (warm-up, timed)."""
        if self.setting.effort == "tiny" or self.plain:
            return 2, 4
        return max(8, 2**17 // examples), self.setting.pick(full=2**22, quick=2**20, tiny=0) // examples


@dataclass(kw_only=True)
class Measured:
    """What one contestant did in one round."""

    losses: Tensor  # [steps], warm-up included
    seconds: float = math.nan  # a step
    stall: float = 0.0  # share of the time in which the host waited for rows
    stats: dict[str, float] = field(default_factory=dict)  # TransferStats per timed step

    @property
    def transferred(self) -> float:
        """Bytes of rows moved per step, both ways."""
        return self.stats.get("fetched_bytes", 0.0) + self.stats.get("written_bytes", 0.0)


class Contest:
    """Models of one workload, by name, that all take the same steps.

    Args:
        workload: what they train on.
        models: the first is the one whose losses the others must have, to the bit.
        clock: rounds end when its time is over.
    """

    def __init__(self, workload: Workload, models: dict[str, DLRM], clock: Clock) -> None:
        self.workload, self.models, self.clock = workload, models, clock
        self.dense = {n: torch.optim.SGD(m.dense_parameters(), lr=0.01) for n, m in models.items()}

    def warm(self, batches: Sequence[Batch]) -> None:
        """Untimed steps of everybody."""
        self._same({name: self._train(name, batches, len(batches), 0) for name in self.models})

    def rounds(self, examples: int, most: int, share: float) -> dict[str, list[Measured]]:
        """Up to ``most`` rounds in turn, at least one, until ``share`` of the clock's time is over.

        Raises:
            WrongResult: losses differ.
        """
        warm, timed = self.workload.steps(examples)
        found: dict[str, list[Measured]] = {name: [] for name in self.models}
        for number in range(most):
            if number and self.clock.over(share):
                break
            first = number * (warm + timed)
            batches = [self.workload.batch(first + i, examples) for i in range(warm + timed + LOOKAHEAD)]
            order = list(self.models) if number % 2 == 0 else list(reversed(self.models))
            results = {name: self._train(name, batches, warm, timed) for name in order}
            self._same(results)
            for name, result in results.items():
                found[name].append(result)
        return found

    def staged_alone(self, name: str, examples: int) -> tuple[float, float]:
        """Seconds and bytes fetched per step if rows are planned and moved and nobody trains; no row changes."""
        warm, timed = self.workload.steps(examples)
        batches = [self.workload.batch(10**6 + i, examples) for i in range(warm + timed + LOOKAHEAD)]
        begin = seconds = fetched = 0.0
        for number, _ in enumerate(stoker.stage(batches, self.models[name], lookahead=LOOKAHEAD)):
            if number + 1 == warm:
                synchronize(self.workload.setting.device)
                begin, fetched = time.perf_counter(), _stats(self.models[name])["fetched_bytes"]
            if number + 1 == warm + timed:
                synchronize(self.workload.setting.device)
                seconds = time.perf_counter() - begin
                fetched = _stats(self.models[name])["fetched_bytes"] - fetched
                break
        return seconds / timed, fetched / timed

    def _train(self, name: str, batches: Sequence[Batch], warm: int, timed: int) -> Measured:
        model, dense, device = self.models[name], self.dense[name], self.workload.setting.device
        staged = stoker.stage(batches, model, lookahead=LOOKAHEAD)
        losses: list[Tensor] = []
        found = Measured(losses=torch.empty(0))
        begin = stalled = 0.0
        before = _stats(model)
        for number, batch in enumerate(staged):
            if timed and number == warm:
                synchronize(device)
                begin, stalled, before = time.perf_counter(), staged.stall_seconds, _stats(model)
            loss = model.loss(batch.to(device, non_blocking=True))
            loss.backward()
            dense.step()
            dense.zero_grad()
            losses.append(loss.detach())
            if timed and number + 1 == warm + timed:
                synchronize(device)  # inside the loop: leaving it waits for the staging thread
                seconds = time.perf_counter() - begin
                found.seconds, found.stall = seconds / timed, (staged.stall_seconds - stalled) / seconds
                found.stats = {key: (value - before[key]) / timed for key, value in _stats(model).items()}
                break
        found.losses = torch.stack(losses).cpu()
        return found

    def _same(self, results: dict[str, Measured]) -> None:
        first = next(iter(self.models))
        expected = results[first].losses
        if not bool(torch.isfinite(expected).all()):
            raise WrongResult(f"{first}: losses are not finite")
        for name, result in results.items():
            if not torch.equal(result.losses, expected):
                step = int((result.losses != expected).nonzero()[0])
                raise WrongResult(
                    f"{name}: loss {float(result.losses[step])!r} at step {step} of the round, {first} has "
                    f"{float(expected[step])!r}"
                )


def _stats(model: DLRM) -> dict[str, float]:
    """What the caches of all groups counted so far."""
    total = dict.fromkeys(vars(TransferStats()), 0.0)
    for group in model.embeddings.groups:
        for key, value in vars(copy.copy(getattr(group.storage, "stats", TransferStats()))).items():
            total[key] += value
    return total


def same_rows(models: dict[str, DLRM], batch: Batch) -> int:
    """Compare the rows of a batch and their state in all models, to the bit; the number of rows compared.

    Raises:
        WrongResult: naming the model and the first address that differs.
    """
    names, compared = list(models), 0
    for groups in zip(*(model.embeddings.groups for model in models.values()), strict=True):
        rows = torch.unique(batch.ids.to(torch.int64) + groups[0].space.bases).numpy()
        found = [group.storage.gather(rows) for group in groups]
        for name, other in zip(names[1:], found[1:], strict=True):
            for key, mine in {"weight": found[0].weight, **found[0].state}.items():
                theirs = other.weight if key == "weight" else other.state[key]
                differs = (theirs != mine).reshape(len(rows), -1).any(1)
                if bool(differs.any()):
                    row = int(rows[int(differs.nonzero()[0])])
                    raise WrongResult(f"{name}: {key} of row {row:,} is not that of {names[0]}")
        compared += len(rows)
    return compared


def ratio(base: Sequence[Measured], mine: Sequence[Measured]) -> Range:
    """Throughput of ``mine`` over that of ``base``, round by round: (median, smallest, largest)."""
    each = [a.seconds / b.seconds for a, b in zip(base, mine, strict=True)]
    return statistics.median(each), min(each), max(each)


def moved(results: Sequence[Measured], key: str) -> float:
    """Median over rounds of a figure of :class:`TransferStats` per step."""
    return statistics.median(result.stats[key] for result in results)


def release(models: dict[str, Any]) -> None:
    """Let go of rows before another part asks for as much memory."""
    for model in models.values():
        model.embeddings.close()
    models.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
