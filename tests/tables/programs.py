"""Random programs of what people do around the tables, and what carries them out.

A program is rounds of turns. A turn takes a batch of the main stream, looks it up in some way, and does a backward or
not; acts come before it, between forward and backward, and after it. :class:`Run` carries a program out on tables,
placed or resident, or on what stands in for ``nn.EmbeddingBag`` and ``torch.optim.SGD`` (tests/tables/bags.py). What it
notes must be the same for all of them: outputs, gradients of weights, errors, and the rows in the end.
"""

from __future__ import annotations

import copy
import gc
import math
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from bags import Bags
from torch import Tensor

from stoker import Batch, EmbeddingTables, stage
from stoker.tables.storage import Rows

__all__ = ["Rereadable", "Round", "Run", "Turn", "draw_rounds"]

Act = tuple[Any, ...]  # a name of ACTS and arguments

LONGEST = 3  # ids in a bag: there are slots for as many in each bag of an example
LOOKUPS = ("other ids", "other weights", "other offsets", "ids changed by torch", "ids changed by numpy", "a view")
BACKWARDS = ("later", "joined", "apart", "twice", "never", "failing", "by another thread")
ACTS = (
    "peek", "evaluate", "evaluate staged", "side", "side staged", "stream fails", "body fails", "backward fails",
    "eval backward", "read", "write", "lr", "freeze", "copy", "close one left open",
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One batch of the main stream."""

    lookup: str = ""  # one of LOOKUPS, or as it comes
    late: str = ""  # by what its ids change between forward and backward: "torch" or "numpy"
    backward: str = ""  # one of BACKWARDS, or at once
    reuse: bool = False  # whether ids and weights are filled with others behind the backward
    before: tuple[Act, ...] = ()
    between: tuple[Act, ...] = ()
    after: tuple[Act, ...] = ()


@dataclass(frozen=True)
class Round:
    """Turns, and how rows step: as backwards do, or once for all of them."""

    turns: tuple[Turn, ...]
    ends: str = ""  # "accumulate", "accumulate and fail", "clear", "overflow"
    clip: float = 0.0  # norm; 0: none


def draw_acts(random: np.random.Generator, batches: int, tables: int, often: float) -> tuple[Act, ...]:
    """Some of ACTS with their arguments."""
    found: list[Act] = []
    while random.random() < often:
        name = str(random.choice(ACTS))
        first, count = int(random.integers(batches)), int(random.integers(1, 5))
        if name.startswith("evaluate"):
            found.append((name, first, count, str(random.choice(["", "break", "left open"]))))
        elif name.startswith("side"):
            found.append((name, int(random.integers(2))))
        elif name in ("stream fails", "body fails"):
            found.append((name, first, count, bool(random.random() < 0.5)))
        elif name in ("write", "freeze", "read"):
            found.append((name, int(random.integers(tables))))
        elif name == "lr":
            found.append((name, float(random.choice([0.25, 0.5, 1.0]))))
        elif name == "copy" and random.random() < 0.7:
            continue
        else:
            found.append((name, first))
    return tuple(found)


def draw_rounds(random: np.random.Generator, batches: int, tables: int, mode: str) -> list[Round]:
    """A program over all batches."""
    wild = float(random.choice([0.0, 0.1, 0.3]))
    found, left = [], batches
    while left:
        many = mode != "backward" or random.random() < wild
        count = min(left, int(random.integers(1, 4)) if many else 1)
        left -= count
        turns = []
        for _ in range(count):
            acts = [draw_acts(random, batches, tables, wild / 2) for _ in range(3)]
            turns.append(
                Turn(
                    str(random.choice(LOOKUPS)) if random.random() < wild else "",
                    str(random.choice(["torch", "numpy"])) if random.random() < wild / 2 else "",
                    str(random.choice(BACKWARDS)) if random.random() < wild else "",
                    bool(random.random() < wild),
                    *acts,
                )
            )
        ends = ""
        if many:
            ends = str(random.choice(["accumulate", "accumulate", "accumulate and fail"]))
            if mode != "backward":
                ends = str(random.choice(["", "", "", "clear", "accumulate", "overflow"]))
        found.append(Round(tuple(turns), ends, 0.5 if mode == "optimizer" and random.random() < 0.3 else 0.0))
    return found


class Fails(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("in backward")


def fresh(batch: Batch) -> Batch:
    """A batch in memory of its own, as a reader gives it."""
    given = {n: getattr(batch, n) for n in ("ids", "offsets", "weights")}
    return replace(batch, **{name: None if each is None else each.clone() for name, each in given.items()})


class Rereadable:
    """Batches that can be read twice, in epochs of three; one may fail."""

    def __init__(self, batches: list[Batch], fails: int | None = None) -> None:
        self.batches, self.fails = batches, fails

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.batches):
            if number == self.fails:
                raise KeyError("no more")
            yield fresh(batch)

    def rest_of_epoch(self, step: int, *, ids_only: bool) -> list[Batch]:
        return self.batches[step : step // 3 * 3 + 3]


class Erratic:
    """A window that changes at random, whatever plans say."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    @property
    def batches(self) -> int:
        return int(self.random.integers(0, 12))

    def judge(self, guessed: bool, known: int) -> None:
        pass


class Run:
    """Carries out the program of ``case`` on ``tables``.

    ``values`` are the tensors that were seen, ``notes`` errors, norms and counts.
    """

    def __init__(self, case: Any, tables: Any, background: bool) -> None:
        self.case, self.tables, self.background = case, tables, background
        self.values: list[Tensor] = []
        self.notes: list[Any] = []
        self.later: list[tuple[Tensor, Tensor | None]] = []  # losses whose backward waits, with their weights
        self.open: list[Iterator[Batch]] = []  # left by loops
        self.sides: dict[tuple[int, bool], Iterator[Batch]] = {}
        self.frozen: set[str] = set()
        self.turns = 0
        self.call = tables
        if case.compiled:
            self.call = torch.compile(lambda *given: tables(*given), fullgraph=True, backend="aot_eager", dynamic=True)
        self.factor = 1.0  # of losses: infinity for a gradient that overflows
        self.rows = tables.as_optimizer() if case.mode != "backward" else None
        self.scaler = torch.amp.GradScaler(case.device, init_scale=2.0**8, growth_interval=2)
        self.scaler = self.scaler if case.mode == "scaler" else None
        tables.gradient_scale = case.scale

    def __call__(self) -> None:
        case = self.case
        feed: Iterator[Batch] = iter(Rereadable(case.batches))
        if case.staged:
            feed = iter(
                self.stage(
                    Rereadable(case.batches),
                    case.lookahead,
                    in_flight=case.in_flight,
                    epoch_lookahead=case.epoch_lookahead,
                )
            )
        for each in case.rounds:
            try:
                with self.steps(each):
                    for number, turn in enumerate(each.turns):
                        overflows = each.ends == "overflow" and number == len(each.turns) - 1
                        self.factor = math.inf if overflows and self.scaler is not None else 1.0
                        self.turn(turn, next(feed))
                        self.factor = 1.0
                    if each.ends == "accumulate and fail":
                        raise KeyError("in accumulate")
            except KeyError as error:
                self.notes.append(str(error))
            self.end(each)
        assert next(feed, None) is None
        self.later.clear()
        if isinstance(self.tables, EmbeddingTables):
            self.notes.append(f"ticks: {self.tables.tick}")
            self.tables.step_each_backward()  # these tables are done: what other optimizers do is not their business
        else:
            self.notes.append("ticks")
        scaler, self.scaler = self.scaler and weakref.ref(self.scaler), None
        if scaler is not None and scaler() is not None:
            gc.collect()  # rows that step inside backward refuse to where a scaler is about

    def stage(self, stream: Iterable[Batch], lookahead: int | None, **given: Any) -> Iterable[Batch]:
        """The stream, staged where there is something to stage; sometimes with a window that changes at random."""
        if not isinstance(self.tables, EmbeddingTables):
            return stream
        staged = stage(stream, self.tables, lookahead=lookahead, background=self.background, **given)
        if self.case.seed % 4 == 2:
            staged.ahead = Erratic(self.case.seed)
        return staged

    def steps(self, each: Round) -> AbstractContextManager[None]:
        return self.tables.accumulate() if each.ends.startswith("accumulate") else nullcontext()

    def end(self, each: Round) -> None:
        """What an optimizer does behind a round."""
        if self.rows is None:
            return
        if each.clip:
            norm = torch.nn.utils.clip_grad_norm_(self.tables.parameters(), each.clip)
            self.notes.append(float(norm))
        if each.ends != "clear":
            if self.scaler is not None:
                if any(p.grad is not None for p in self.tables.parameters()):  # a scaler wants something to look at
                    self.scaler.step(self.rows)
                    self.scaler.update()
                    self.notes.append(self.scaler.get_scale())
            else:
                self.rows.step()
        self.rows.zero_grad()

    def lookup(self, batch: Batch, weights: Tensor | None = None) -> Tensor:
        out = self.call(batch.ids, batch.offsets, batch.weights if weights is None else weights)
        self.values.append(out.detach().clone())
        return out

    def loss(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor | None]:
        """A loss whose gradient does not depend on the rows, and the weights that want a gradient."""
        weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
        out = self.lookup(batch, weights)
        target = self.case.target(seed, out.shape).to(out.device)
        if self.case.autocast:
            head = self.case.target(seed + 1, torch.Size([1, out[0].numel()])) if len(out) else None
            if head is not None:
                with torch.autocast(self.case.device, torch.bfloat16):
                    scores = torch.nn.functional.linear(out.flatten(1), head.to(out.device))
                return (scores.float() * target.flatten(1)[:, :1]).sum(), weights
        return (out * target).sum(), weights

    def backward(self, losses: list[tuple[Tensor, Tensor | None]], *, keep: bool = False, thread: bool = False) -> None:
        """One backward of the sum; if it fails, its error is noted."""
        total = sum(loss for loss, _ in losses)
        assert isinstance(total, Tensor)
        total = total if self.scaler is None else self.scaler.scale(total)
        total = total * self.factor
        bags = self.tables if isinstance(self.tables, Bags) else None
        before = [] if bags is None else bags.before_backward()
        failed = ""

        def work() -> None:
            nonlocal failed
            try:
                total.backward(retain_graph=keep)
            except (RuntimeError, ZeroDivisionError) as error:
                failed = f"{type(error).__name__}: {error}"

        if thread:
            other = threading.Thread(target=work)
            other.start()
            other.join()
        else:
            work()
        if bags is not None:
            bags.after_backward(before, failed=bool(failed))
        if failed:
            self.notes.append(failed)
        elif self.factor == 1.0:
            self.values += [each.grad.clone() for _, each in losses if each is not None and each.grad is not None]

    def turn(self, turn: Turn, batch: Batch) -> None:
        """Take one batch of the main stream."""
        self.turns += 1
        seed = 10 * self.turns
        if self.case.device != "cpu":
            batch = batch.to(self.case.device)
        self.do(turn.before)
        batch = self.changed(turn.lookup, batch)
        try:
            mine = self.loss(batch, seed)
        except (IndexError, ValueError) as error:
            if turn.lookup != "other offsets":  # which give ids to other tables
                raise
            self.notes.append(f"{type(error).__name__}: {error}")
            return
        self.do(turn.between)
        if self.turns - 1 in self.case.peeks:
            self.do_peek(self.turns + 2, staged=False)
        if turn.late == "torch" and batch.ids.numel():
            batch.ids.div_(2, rounding_mode="floor")
        elif turn.late == "numpy" and self.case.device == "cpu":
            batch.ids.numpy()[...] //= 2
        if turn.backward == "later":
            self.later.append(mine)
        elif turn.backward == "joined":
            later, self.later = self.later, []
            self.backward([*later, mine])
        elif turn.backward == "apart":
            later, self.later = self.later, []
            for each in (mine, *later):
                self.backward([each])
        elif turn.backward == "twice":
            self.backward([mine], keep=True)
            self.backward([mine])
        elif turn.backward == "failing":
            early, _ = self.loss(batch, seed + 2)
            self.backward([(Fails.apply(early), None), mine])
        elif turn.backward != "never":
            self.backward([mine], thread=turn.backward == "by another thread")
        if turn.reuse and turn.backward not in ("later", "never"):
            batch.ids.div_(2, rounding_mode="floor")
            if mine[1] is not None:
                mine[1].detach().mul_(2)
        self.do(turn.after)

    def changed(self, how: str, batch: Batch) -> Batch:
        """The batch as it is looked up."""
        ids, size = batch.ids, batch.ids.numel()
        if how == "other ids":
            return replace(batch, ids=ids // 2)
        if how == "ids changed by torch":
            ids.div_(2, rounding_mode="floor")
        elif how == "ids changed by numpy" and self.case.device == "cpu":
            ids.numpy()[...] //= 2
        elif how == "a view":
            return replace(batch, ids=ids.view(ids.shape))
        elif how == "other weights" and batch.weights is not None:
            return replace(batch, weights=batch.weights * 2)
        elif how == "other offsets" and batch.offsets is not None and self.case.device == "cpu":  # a GPU tells later
            moved = (batch.offsets + 1).clamp(max=size)
            moved[0] = 0
            if int(torch.cat([moved, moved.new_tensor([size])]).diff().max()) > LONGEST:  # slots may not hold it
                return batch
            return replace(batch, offsets=moved)
        return batch

    def do(self, acts: tuple[Act, ...]) -> None:
        for name, *given in acts:
            getattr(self, "do_" + name.removesuffix(" staged").replace(" ", "_"))(
                *given, staged=name.endswith("staged")
            )

    def some(self, first: int, count: int = 1) -> list[Batch]:
        batches = self.case.batches
        return [batches[(first + n) % len(batches)] for n in range(count)]

    def do_peek(self, first: int, staged: bool) -> None:
        with torch.no_grad():
            self.lookup(fresh(self.some(first)[0]).to(self.case.device))

    def do_evaluate(self, first: int, count: int, ends: str, staged: bool) -> None:
        stream: Any = Rereadable(self.some(first, count))
        loop = iter(self.stage(stream, 3) if staged else stream)
        for number, batch in enumerate(loop):
            with torch.no_grad():
                self.lookup(batch.to(self.case.device))
            if ends and number == count // 2:
                if ends == "left open":
                    self.open.append(loop)
                break

    def do_side(self, number: int, staged: bool) -> None:
        """Train with the next batch of another stream over the same tables."""
        for _ in range(2):
            loop = self.sides.get((number, staged))
            if loop is None:
                stream: Any = Rereadable(self.some(number * 3, 4))
                loop = self.sides[number, staged] = iter(self.stage(stream, 2, in_flight=2) if staged else stream)
            batch = next(loop, None)
            if batch is not None:
                self.backward([self.loss(batch.to(self.case.device), number)])
                return
            del self.sides[number, staged]

    def do_stream_fails(self, first: int, count: int, train: bool, staged: bool) -> None:
        """A stream that fails behind some batches, staged."""
        try:
            for batch in self.stage(Rereadable(self.some(first, 4), fails=count), 2):
                if train:
                    self.backward([self.loss(batch.to(self.case.device), first)])
        except KeyError as error:
            self.notes.append(str(error))

    def do_body_fails(self, first: int, count: int, train: bool, staged: bool) -> None:
        """A staged loop whose body fails between forward and backward."""
        try:
            for number, batch in enumerate(self.stage(Rereadable(self.some(first, count + 1)), 2)):
                loss = self.loss(batch.to(self.case.device), first)
                if number == count // 2:
                    raise ZeroDivisionError
                if train:
                    self.backward([loss])
        except ZeroDivisionError:
            self.notes.append("body failed")

    def do_backward_fails(self, first: int, staged: bool) -> None:
        one, two = (fresh(each).to(self.case.device) for each in self.some(first, 2))
        early, _ = self.loss(one, first)
        self.backward([(Fails.apply(early), None), self.loss(two, first)])

    def do_eval_backward(self, first: int, staged: bool) -> None:
        self.tables.eval()
        loss, _ = self.loss(fresh(self.some(first)[0]).to(self.case.device), first)
        bags = self.tables if isinstance(self.tables, Bags) else None
        before = [] if bags is None else bags.before_backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward()  # type: ignore[no-untyped-call]
        if bags is not None:
            bags.after_backward(before, failed=True)
        self.tables.train()

    def do_read(self, table: int, staged: bool) -> None:
        self.values.append(self.tables.rows(self.case.tables[table].name))

    def do_write(self, table: int, staged: bool) -> None:
        name = self.case.tables[table].name
        start, rows = [(start, rows) for start, rows in self.tables.read(name, 9)][-1]
        weight = (torch.arange(rows.weight.numel()).view(rows.weight.shape) % 5 - 2).to(rows.weight.dtype)
        state = {each: tensor.cpu().clone() for each, tensor in rows.state.items()}
        self.tables.write(name, start, Rows(weight, state))

    def do_lr(self, rate: float, staged: bool) -> None:
        if self.rows is None:
            self.tables.lr = rate
        else:
            self.rows.param_groups[0]["lr"] = rate

    def do_freeze(self, table: int, staged: bool) -> None:
        name = self.case.tables[table].name
        (self.tables.unfreeze if name in self.frozen else self.tables.freeze)(name)
        self.frozen ^= {name}

    def do_copy(self, first: int, staged: bool) -> None:
        if not isinstance(self.tables, EmbeddingTables) or self.case.device != "cpu":
            return
        other = copy.deepcopy(self.tables)
        with torch.no_grad():
            batch = self.some(first)[0]
            other(batch.ids, batch.offsets, batch.weights)
        other.close()

    def do_close_one_left_open(self, first: int, staged: bool) -> None:
        if self.open:
            self.open.pop(first % len(self.open)).close()  # type: ignore[attr-defined]
