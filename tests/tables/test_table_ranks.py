"""Ranks hold the rows of one process with the same logical shards, to the bit, and end with one error if one fails.

Most tests run ranks on threads. One group of processes does the same over gloo.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from campaigns import EFFORT, scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import start_process, start_ranks
from ranked import draw, gradient_of, on_threads, share_of
from reductions import join
from torch import Tensor, nn

import stoker
from stoker import (
    Cached,
    Device,
    EmbeddingTables,
    HostPipelined,
    HotCold,
    Mapped,
    TableConfig,
    TensorTrain,
    load,
    optim,
    plan,
    save,
    stage,
)
from stoker.base.errors import CheckpointError, ConfigError
from stoker.ops.tree import Node, nodes_of, shard_bounds, shards_of, tree_sum
from stoker.placement.placement import expect_sent
from stoker.tables import Ranks, RanksError, Replicas
from stoker.tables.autograd import compiled_lookup
from stoker.tables.config import Slotted
from stoker.tables.ranks.divided import DividedGroup

RULES: list[optim.RowOptimizer] = [
    optim.SGD(lr=0.5), optim.SGD(lr=0.5, cow_clip=(0.5, 1e-3)), optim.MomentumSGD(lr=0.2, nesterov=True),
    optim.Adagrad(lr=0.1, clip_norm=0.5), optim.RowWiseAdagrad(lr=0.1, weight_decay=0.1), optim.Adam(lr=0.05),
    optim.Adam(lr=0.05, cow_clip=(0.1, 1e-3)), optim.AdamW(lr=0.05, weight_decay=0.1), optim.FTRL(lr=0.1, l1=0.01),
    optim.LAMB(lr=0.05, weight_decay=0.01), optim.LAMB(lr=0.05, cow_clip=(0.5, 1e-3)),
]  # fmt: skip
PLACES: dict[str, Any] = {
    "device": Device(), "mapped": Mapped(), "cached": Cached(slots=90), "few slots": Cached(slots=12),
    "pipelined": HostPipelined(slots=30), "hot": HotCold(hot={"a": 9, "b": 3}, slots=30),
    "file": Cached(slots=20, home="file"),
}  # fmt: skip
STEPS = 3


def make(rule: optim.RowOptimizer, place: str = "device", *, shards: int = 8, **options: Any) -> EmbeddingTables:
    """Two tables of three features, the second with its own width."""
    kinds = {"pooling": options.pop("pooling", "sum"), "dtype": options.pop("dtype", "float32")}
    padding = options.pop("padding_idx", None)
    tables = [
        TableConfig(name="a", num_embeddings=40, embedding_dim=4, features=("f", "g"), padding_idx=padding, **kinds),
        TableConfig(name="b", num_embeddings=13, embedding_dim=options.pop("width", 4), features=("h",), **kinds),
    ]
    order = ("f", "h", "g")
    return EmbeddingTables(tables, optimizer=rule, features=order, placement=PLACES[place], shards=shards, **options)


def train(tables: EmbeddingTables, seed: int, batch: int, bags: str, how: str = "backward") -> list[Tensor]:
    """Some steps on the examples of this rank's shards; return what was looked up."""
    ranks, found = tables.ranks, []
    optimizer = tables.as_optimizer() if how == "optimizer" else None
    for step in range(STEPS):
        bounds = shard_bounds(batch, tables.shards)
        own = shards_of(ranks.rank, ranks.size, tables.shards) if ranks else range(tables.shards)
        begin, end = bounds[own.start], bounds[own.stop]
        pooled = tables(*share_of(draw(seed + step, batch, bags), begin, end))
        found.append(pooled.detach().clone())
        grad = gradient_of(seed + step, batch, pooled[:1].numel() if end > begin else 0)[begin:end]
        if how == "accumulate":
            with tables.accumulate():
                pooled.backward(grad.view(pooled.shape))
                again = tables(*share_of(draw(seed + step + 99, batch, bags), begin, end))
                again.backward(gradient_of(seed - step, batch, again[:1].numel())[begin:end].view(again.shape))
            continue
        pooled.backward(grad.view(pooled.shape))
        if optimizer is not None:
            torch.nn.utils.clip_grad_norm_([tables.handle], 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return found


def digest(tables: EmbeddingTables) -> dict[str, str]:
    """SHA-256 of each tensor of the state."""
    return {
        name: hashlib.sha256(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in tables.state_dict().items()
        if name != "handle"
    }


PROGRAMS = given(
    seed=st.integers(0, 2**20), rule=st.sampled_from(RULES), place=st.sampled_from(sorted(PLACES)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    bags=st.sampled_from(["single", "jagged", "weighted", "mean", "max"]),
    batch=st.sampled_from([16, 37, 300]), ranks=st.integers(1, 4), width=st.sampled_from([4, 8]),
    how=st.sampled_from(["backward", "accumulate", "optimizer"]), backend=st.sampled_from(["reference", "auto"]),
    more=st.sampled_from([{}, {"steps": {"g": 3}}, {"steps": {"f": 5, "h": 3}}, {"padding_idx": 0}]),
)  # fmt: skip


def options_of(rule: optim.RowOptimizer, dtype: str, bags: str, width: int, backend: str) -> tuple[str, dict[str, Any]]:
    """The bags to draw, and the options of the tables."""
    if backend == "auto" and EFFORT < 1:  # each rule, type, width, and whether lookups have weights is a kernel
        number = next(n for n, each in enumerate(RULES) if each is rule)
        dtype, width = ("float32", "bfloat16")[number % 2], (4, 8)[number // 2 % 2]
        bags = {"single": "weighted", "jagged": "mean"}.get(bags, bags) if number % 3 == 2 else bags
        bags = "jagged" if bags == "weighted" and number % 3 < 2 else bags
    pooling = bags if bags in ("mean", "max") else "sum"
    given = {"pooling": pooling, "dtype": dtype, "width": width, "backend": backend}
    return "jagged" if bags in ("mean", "max") else bags, given


@pytest.mark.slow
@settings(deadline=None, max_examples=scaled(80))
@PROGRAMS
def test_replicated_tables_of_any_number_of_ranks_are_those_of_one_process(
    seed, rule, place, dtype, bags, batch, ranks, width, how, backend, more
):
    bags, options = options_of(rule, dtype, bags, width, backend)
    options |= more
    alone = make(rule, place, **options)
    pooled = train(alone, seed, batch, bags, how)

    def work(group: Ranks) -> Any:
        tables = make(rule, place, **options)
        tables.replicate(group)
        own = train(tables, seed, batch, bags, how)
        return own, digest(tables)

    found = on_threads(ranks, work)
    for step, whole in enumerate(pooled):
        assert torch.equal(torch.cat([own[step] for own, _ in found]), whole)
    for _, each in found:
        assert each == digest(alone)


@pytest.mark.slow
@settings(deadline=None, max_examples=scaled(60))
@PROGRAMS
def test_divided_tables_of_any_number_of_ranks_are_those_of_one_process(
    seed, rule, place, dtype, bags, batch, ranks, width, how, backend, more
):
    bags, options = options_of(rule, dtype, bags, width, backend)
    options |= more
    alone = make(rule, place, **options)
    initial = digest(alone)
    pooled = train(alone, seed, batch, bags, how)

    def work(group: Ranks) -> Any:
        tables = make(rule, place, ranks=group, **options)
        before = digest(tables)
        own = train(tables, seed, batch, bags, how)
        return own, before, digest(tables), sum(group.own.storage.num_rows for group in tables.groups)

    found = on_threads(ranks, work)
    for step, whole in enumerate(pooled):
        assert torch.equal(torch.cat([own[step] for own, *_ in found]), whole)
    for _, before, after, _ in found:
        assert before == initial
        assert after == digest(alone)
    assert sum(rows for *_, rows in found) == 53, "no row is on two ranks"


@pytest.mark.slow
@pytest.mark.parametrize("rule", [optim.Adam(lr=0.1), optim.LAMB(lr=0.1)])
@pytest.mark.parametrize("how", ["backward", "optimizer"])
def test_cores_of_a_tensor_train_step_as_in_one_process(rule: Any, how: str) -> None:
    def one() -> EmbeddingTables:
        table = TableConfig(name="t", num_embeddings=60, embedding_dim=8, features=("f", "h", "g"))
        return EmbeddingTables([table], optimizer=rule, placement=TensorTrain(rank=4), shards=4)

    alone = one()
    train(alone, 5, 20, "single", how)

    def work(group: Ranks) -> Any:
        tables = one()
        tables.replicate(group)
        train(tables, 5, 20, "single", how)
        return digest(tables)

    assert on_threads(3, work) == [digest(alone)] * 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_of_parameters_are_added_by_the_tree_over_shards(ranks: int) -> None:
    leaves = {Node(v, 1): torch.randn(7, generator=torch.Generator().manual_seed(v)) for v in range(8)}
    expected = tree_sum(leaves, Node(0, 8))

    def work(group: Ranks) -> Tensor:
        parts = {node: tree_sum(leaves, node) for node in nodes_of(group.numbers_of(group.rank, 8))}
        return group.add(parts, 8)  # type: ignore[arg-type]

    assert all(torch.equal(each, expected) for each in on_threads(ranks, work))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_any_type_are_averaged(dtype: torch.dtype) -> None:
    def work(group: Ranks) -> Tensor:
        assert isinstance(group, Replicas)
        parameter = nn.Parameter(torch.zeros(10, dtype=dtype))
        parameter.grad = torch.arange(10, dtype=dtype) * (group.rank + 1)
        group.average([parameter], 4)
        return parameter.grad

    for found in on_threads(2, work, Replicas):
        assert found.dtype == dtype
        assert found.tolist() == [1.5 * place for place in range(10)]


def test_ranks_with_gradients_of_other_parameters_are_refused() -> None:
    def work(group: Ranks) -> str:
        assert isinstance(group, Replicas)
        parameters = [nn.Parameter(torch.zeros(6)) for _ in range(3)]
        for each in parameters[: 3 - group.rank]:
            each.grad = torch.ones(6)
        with pytest.raises(RanksError) as caught:
            group.average(parameters, 4)
        return str(caught.value)

    for said in on_threads(2, work, Replicas):
        assert "gradients of 18, 12 numbers" in said


@pytest.mark.slow
def test_a_batch_without_examples_on_all_ranks_moves_nothing() -> None:
    def work(group: Ranks) -> tuple[int, list[float]]:
        assert isinstance(group, Replicas)
        table = TableConfig(name="a", num_embeddings=9, embedding_dim=2)
        tables = EmbeddingTables([table], optimizer=optim.SGD(lr=1.0))
        tables.replicate(group)
        before = tables.rows("a")
        tables(torch.zeros(0, 1, dtype=torch.int64)).sum().backward()
        assert torch.equal(tables.rows("a"), before)
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.zeros(2)
        group.average([parameter], 0)
        return tables.tick, parameter.grad.tolist()

    assert on_threads(2, work, Replicas) == [(1, [0.0, 0.0])] * 2


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("other", [{"lr": 0.2}, {"dim": 8}, {"dtype": "bfloat16"}, {"seed": 1}, {"shards": 8}])
def test_ranks_that_make_other_tables_are_refused(other: dict[str, Any], divided: bool) -> None:
    def work(group: Ranks) -> str:
        given = {"lr": 0.1, "dim": 4, "dtype": "float32", "seed": 0, "shards": 4} | (other if group.rank else {})
        table = TableConfig(name="a", num_embeddings=9, embedding_dim=given["dim"], dtype=given["dtype"])
        made = {"optimizer": optim.SGD(lr=given["lr"]), "seed": given["seed"], "shards": given["shards"]}
        with pytest.raises(ConfigError) as caught:
            EmbeddingTables([table], **made, **({"ranks": group} if divided else {})).replicate(group)
        return str(caught.value)

    for said in on_threads(2, work):
        assert "of rank 1 " in said


def _two(group: Ranks, **given: Any) -> EmbeddingTables:
    tables = [TableConfig(name=name, num_embeddings=9, embedding_dim=4) for name in "abc"]
    return EmbeddingTables(tables, optimizer=optim.SGD(lr=0.1), shards=4, ranks=group, **given)


@pytest.mark.parametrize("what", ["features", "placement"])
def test_ranks_with_other_features_or_groups_of_tables_are_refused(what: str) -> None:
    """Tables that share a placement are a group, and ranks exchange rows group by group."""

    def work(group: Ranks) -> str:
        first = "ab" if group.rank else "ac"
        given: dict[str, Any] = {
            "features": {"features": (first[0], *sorted(set("abc") - {first[0]}, reverse=group.rank == 1))},
            "placement": {"placement": {name: Device() if name in first else Mapped() for name in "abc"}},
        }[what]
        with pytest.raises(ConfigError) as caught:
            _two(group, **given)
        return str(caught.value)

    for said in on_threads(2, work):
        assert "of rank 1 are not made like those of rank 0" in said


@pytest.mark.slow
@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_learning_rate_that_one_rank_sets_is_refused(divided: bool, ranks: int) -> None:
    def work(group: Ranks) -> str:
        tables = _some(group if divided else None)
        if not divided:
            tables.replicate(group)
        tables(_batch(group, 0)).sum().backward()
        if group.rank == 1:
            tables.lr = 0.25
        with pytest.raises(RanksError) as caught:
            tables(_batch(group, 1)).sum().backward()
        return str(caught.value)

    for said in on_threads(ranks, work):
        assert said.startswith(f"the learning rates of the rows are 0.1, 0.25{', 0.1' * (ranks - 2)} on ranks 0 to")


def test_replicas_with_another_optimizer_state_are_refused() -> None:
    def work(group: Ranks) -> str:
        tables = _some()
        if group.rank:
            tables.write("t", 0, tables.groups[0].storage.read(0, 1).map(torch.ones_like))
            tables.write("t", 0, _some().rows("t")[:1])
        with pytest.raises(ConfigError) as caught:
            tables.replicate(group)
        return str(caught.value)

    for said in on_threads(2, work):
        assert said.startswith("the optimizer state of table 't' (")
        assert ") of rank 1 is not that of rank 0, but all ranks must have the same rows" in said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before", "replicated", "averaged", "divided", "divided, other rows"])
@pytest.mark.parametrize("load", [False, True])
def test_rows_that_one_rank_alone_writes_are_noticed(how: str, load: bool) -> None:
    """Also rows behind the first ones, which no batch looks up."""

    def work(group: Ranks) -> str:
        own = {"averaged": group.averaging(2), "before": None, "replicated": None}.get(how, group)
        tables = _some(own, rows=9000)
        if how == "replicated":
            tables.replicate(group)

        def loop() -> None:
            if group.rank or how == "divided, other rows":
                last = torch.full((4, 4), float(group.rank))
                if load:
                    state = _some(rows=9000).state_dict()
                    state["t.weight"][-4:] = last
                    tables.load_state_dict(state)
                else:
                    tables.write("t", 8996, last)
            if how == "before":
                tables.replicate(group)
            for step in range(2):
                tables(_batch(group, step)).sum().backward()

        with pytest.raises((ConfigError, RanksError)) as caught:
            loop()
        return str(caught.value)

    expected = {
        "divided": "t' (to each its own); rank 1: " + ("read" if load else "write") + " table 't' (to",
        "divided, other rows": f"what was written from row {0 if load else 8996} of 't' on of rank 1 is not that",
    }
    for said in on_threads(2, work):
        assert expected.get(how, "table 't' of rank 1 is not that of rank 0") in said


def test_divided_tables_compare_written_rows_once() -> None:
    """When they are written. So they say nothing of them in the next step, in which all rows would be compared."""

    def work(group: Ranks) -> list[int]:
        tables, copies = _some(group), _some()
        copies.replicate(group)
        for each in (tables, copies):
            each.write("t", 2, torch.ones(4, 4))
        return [tables.written, int(copies.written != 0)]

    assert on_threads(2, work) == [[0, 1]] * 2


def test_one_rank_may_write_rows_and_put_them_back() -> None:
    """As for an evaluation of other rows, which replicas do on one rank."""

    def work(group: Ranks) -> dict[str, str]:
        tables = _some()
        tables.replicate(group)
        tables(_batch(group, 0)).sum().backward()
        if group.rank:
            rows = next(iter(tables.read("t")))[1].map(torch.clone)
            tables.write("t", 0, torch.zeros(30, 4))
            tables.write("t", 0, rows)
        tables(_batch(group, 1)).sum().backward()
        return digest(tables)

    first, second = on_threads(2, work)
    assert first == second


def test_replicas_that_round_by_another_seed_are_refused() -> None:
    def work(group: Ranks) -> str:
        table = TableConfig(name="t", num_embeddings=9, embedding_dim=4, dtype="bfloat16")
        tables = EmbeddingTables([table], optimizer=optim.SGD(lr=0.1), seed=group.rank)
        tables.write("t", 0, torch.ones(9, 4))
        with pytest.raises(ConfigError) as caught:
            tables.replicate(group)
        return str(caught.value)

    for said in on_threads(2, work):
        assert "of rank 1 are not made like those of rank 0" in said


def _set_alone(tables: EmbeddingTables, what: str) -> None:
    """Change a setting of one rank."""
    if what == "gradient_scale":
        tables.gradient_scale = 2.0
    elif what == "frozen tables":
        tables.freeze("a")
    elif what == "mode":
        tables.eval()
    elif what == "row optimizer":
        tables.optimizer = replace(tables.optimizer, weight_decay=0.1)
    elif what == "number of shards":
        tables.shards = 8
    elif what == "number of row updates done":
        tables.tick = 7
    else:
        tables.as_optimizer()


ALONE = {
    "gradient_scale": "the factors on the gradients of the rows are 1.0, 2.0",
    "frozen tables": "frozen tables of tables a, b is [] on rank 0, but ['a'] on rank 1; give all ranks the same.",
    "mode": "the mode of tables a, b is train on rank 0, but eval on rank 1",
    "row optimizer": "weight_decay=0.1",
    "number of shards": "the number of shards of tables a, b is 4 on rank 0, but 8 on rank 1",
    "number of row updates done": "the number of row updates done of tables a, b is ",
    "way to step": "tables a, b is in each backward on rank 0, but as_optimizer() on rank 1",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:backward reached EmbeddingTables in eval mode")
@pytest.mark.parametrize("how", ["divided", "replicated", "averaged"])
@pytest.mark.parametrize("what", ALONE)
def test_a_setting_of_one_rank_alone_is_refused_by_name(what: str, how: str) -> None:
    """Ranks would train without an error, and no number would be that of one process."""

    def work(group: Ranks) -> str:
        own = {"divided": {"ranks": group}, "averaged": {"ranks": group.averaging(2)}}.get(how, {})
        tables = EmbeddingTables(
            [TableConfig(name=name, num_embeddings=30, embedding_dim=4) for name in "ab"], shards=4,
            optimizer=optim.Adagrad(lr=0.1), backend="reference", **own,  # type: ignore[arg-type]
        )  # fmt: skip
        if how == "replicated":
            tables.replicate(group)

        def loop() -> None:
            for step in range(6):
                if step == 2 and group.rank == 1:
                    _set_alone(tables, what)
                tables(_batch(group, step)).sum().backward()
            group.numbers("end", [])

        with pytest.raises(RanksError) as caught:
            loop()
        return str(caught.value)

    for said in on_threads(2, work):
        assert ALONE[what] in said


@pytest.mark.parametrize("divided", [True, False])
def test_a_stage_over_another_placement_is_refused_by_name(divided: bool) -> None:
    """Ranks ask each other ahead for rows in slots alone."""

    def work(group: Ranks) -> str:
        own: dict[str, Any] = {"ranks": group} if divided else {}
        tables = _some(placement=Device() if group.rank else Cached(slots=16), **own)
        batches = [_batch(group, step) for step in range(3)]
        if not divided:
            tables.replicate(group)
        with pytest.raises(RanksError) as caught:
            [tables(ids).sum().backward() for ids in stage(batches, tables, lookups=lambda ids: ids)]
        return str(caught.value)

    said = "the placement of tables t is t in slots and the rest in memory on rank 0, but none in slots and the rest"
    for each in on_threads(2, work):
        assert said in each


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["divided", "replicated", "growing"])
@pytest.mark.parametrize("other", [{"lookahead": 5}, {"in_flight": 3}])
def test_a_rank_may_look_farther_ahead_than_the_others(kind: str, other: dict[str, Any]) -> None:
    table = TableConfig(name="t", num_embeddings=30, embedding_dim=4, grow=stoker.Grow() if kind == "growing" else None)

    def work(group: Ranks | None) -> dict[str, str]:
        own: dict[str, Any] = {} if group is None or kind == "replicated" else {"ranks": group}
        place = Device() if kind == "growing" else Cached(slots=24)
        tables = EmbeddingTables(
            [table], optimizer=optim.SGD(lr=0.1), shards=4, placement=place, backend="reference", **own
        )
        if kind == "replicated":
            tables.replicate(group)
        batches = [_batch(group, step)[:, :1].contiguous() for step in range(9)]
        ahead = {"lookahead": 2, "in_flight": 2} | (other if group and group.rank else {})
        for ids in stage(batches, tables, lookups=lambda ids: ids, background=kind == "growing", **ahead):
            tables(ids).square().sum().backward()
        return digest(tables)

    assert on_threads(2, work) == [work(None)] * 2


def test_a_last_batch_without_examples_on_some_ranks_is_a_step_of_averaged_copies() -> None:
    """They have done as many steps as the others."""

    def work(group: Ranks) -> list[int]:
        tables = _some(group.averaging(2))
        for count in (8, 1):  # examples of all
            bounds, own = shard_bounds(count, 4), shards_of(group.rank, 3, 4)
            tables(torch.ones(bounds[own.stop] - bounds[own.start], 2).long()).sum().backward()
        return [tables.tick]

    assert on_threads(3, work) == [[2]] * 3


def test_a_stage_on_one_rank_alone_is_refused() -> None:
    def work(group: Ranks) -> str:
        tables = _some(group, placement=Cached(slots=16))
        batches: Any = [_batch(group, step) for step in range(3)]
        staged = batches if group.rank else stage(batches, tables, lookups=lambda ids: ids)
        with pytest.raises(RanksError) as caught:
            tables(next(iter(staged)))
        return str(caught.value)

    for said in on_threads(2, work):
        assert "rank 0: ask for rows ahead, table 't' (to each its own); rank 1: ask for rows of table 't'" in said
        assert "the number of open stages of tables t is 1 on rank 0, but 0 on rank 1; give all ranks the same" in said


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 3, 4])
@pytest.mark.parametrize("divided", [True, False])
def test_widths_may_be_odd_and_a_batch_may_have_one_row(dim: int, divided: bool) -> None:
    ids = torch.zeros(4, 1, dtype=torch.int64)

    def work(group: Ranks | None) -> dict[str, str]:
        table = TableConfig(name="t", num_embeddings=7, embedding_dim=dim)
        tables = EmbeddingTables(
            [table], optimizer=optim.Adagrad(lr=0.1), shards=4, placement=Cached(slots=4),
            **({"ranks": group} if divided and group else {}),
        )  # fmt: skip
        if group is not None and not divided:
            tables.replicate(group)
        own = ids if group is None else ids[4 * group.rank // group.size : 4 * (group.rank + 1) // group.size]
        for step in stage([own.clone() for _ in range(2)], tables, lookups=lambda ids: ids):
            rows = tables.as_optimizer()
            tables(step).square().sum().backward()
            rows.step()
            rows.zero_grad()
        return digest(tables)

    for ranks in (1, 2, 3, 4):
        assert on_threads(ranks, work) == [work(None)] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("at", ["header", "rows", "between"])
def test_an_interrupt_within_a_message_ends_all_ranks(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop may catch Ctrl-C and go on, while the others wait for the rest of the message."""
    answer = DividedGroup._heard

    def heard(self: DividedGroup, *given: Any) -> Any:
        if self.ranks.rank == 1 and at == "between":
            raise KeyboardInterrupt
        return answer(self, *given)

    monkeypatch.setattr(DividedGroup, "_heard", heard)

    def work(group: Ranks) -> tuple[str, str]:
        tables, said = _some(group), ""
        name = {"header": "gather", "rows": "swap", "between": ""}[at]
        if group.rank == 1:
            end, call = group.wire.end, getattr(group.wire, name, None)

            def ended(why: str) -> RanksError:
                nonlocal said
                said = why
                return end(why)

            def interrupted(*given: Any) -> Any:
                if len(given) == 1:  # the others have the header
                    call(*given)  # type: ignore[misc]
                raise KeyboardInterrupt

            monkeypatch.setattr(group.wire, "end", ended)
            if call is not None:
                monkeypatch.setattr(group.wire, name, interrupted)
        with pytest.raises((KeyboardInterrupt, RanksError)) as caught:
            tables(_batch(group, 0))
        return type(caught.value).__name__, said

    (first, _), (second, said) = on_threads(2, work)
    assert (first, second) == ("RanksError", "KeyboardInterrupt")
    assert said.startswith("rank 1 of 2 was interrupted (KeyboardInterrupt) when it was to ")


def test_an_interrupt_between_the_messages_of_a_sum_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of gradients has two: the second has no header that would say that ranks do different things."""
    send = Ranks.joined

    def joined(self: Ranks, *given: Any) -> Tensor:
        if self.rank == 1:
            raise KeyboardInterrupt
        return send(self, *given)

    monkeypatch.setattr(Ranks, "joined", joined)

    def work(group: Ranks) -> list[str]:
        end, said = group.wire.end, list[str]()
        monkeypatch.setattr(group.wire, "end", lambda why: [said.append(why), end(why)][1])
        with pytest.raises(RanksError):  # noqa: PT012 - the loop of rank 1 goes on
            with suppress(KeyboardInterrupt):
                group.add({Node(group.rank, 1): torch.ones(4)}, 1)
            group.numbers("go on", [group.rank])
        return said

    first, [second] = on_threads(2, work)
    assert first == []
    assert second.startswith("rank 1 of 2 was interrupted (KeyboardInterrupt) when it was to add gradients of param")


def test_two_backwards_of_a_forward_are_those_of_one_process() -> None:
    def work(group: Ranks | None) -> dict[str, str]:
        tables = _some(group)
        out = tables(_batch(group, 0))
        out.square().sum().backward(retain_graph=True)
        out.sum().backward()
        return digest(tables)

    assert on_threads(2, work) == [work(None)] * 2


def test_integers_of_any_size_are_summed() -> None:
    numbers = [2**200 + 7, 0, 2**32 - 1]
    assert (
        on_threads(3, lambda group: group.sums("add", [n * (group.rank + 1) for n in numbers]))
        == [[6 * n for n in numbers]] * 3
    )


@pytest.mark.slow
def test_ranks_send_the_gradients_of_their_rows_and_no_more() -> None:
    def work(group: Ranks) -> tuple[int, int]:
        tables = EmbeddingTables(
            [TableConfig(name="a", num_embeddings=100, embedding_dim=16)], optimizer=optim.SGD(lr=0.1), shards=2
        )
        tables.replicate(group)
        before = group.sent.total() - group.sent["headers"]
        ids = torch.arange(10).view(10, 1) + 5 * group.rank
        tables(torch.cat([ids, ids])).sum().backward()
        return group.sent.total() - group.sent["headers"] - before, 10

    for sent, rows in on_threads(2, work):
        assert sent == rows * 4 * (16 + 4), "a sum is its D values with row, node and count"


@pytest.mark.slow
def test_data_goes_with_its_header_once_all_ranks_know_how_much_comes() -> None:
    sizes = (8, 8, 8, 64, 8, 8, 8, 8, 8)

    def work(group: Ranks | None, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], dict[str, str]]:
        tables, calls, counts = _some(group, rows=300), [], []
        for name in ("gather", "swap") if group else ():
            call = getattr(group.wire, name)
            monkeypatch.setattr(group.wire, name, lambda *given, call=call: [calls.append(1), call(*given)][1])
        for step, size in enumerate(sizes):
            own = shards_of(group.rank, group.size, 4) if group else range(4)
            before = len(calls)
            tables(torch.arange(2 * size).view(-1, 2)[size // 4 * own.start : size // 4 * own.stop]).sum().backward()
            counts.append(len(calls) - before)
            if step == 5:
                tables.rows("t")  # which comes where all expect a lookup
        return counts, digest(tables)

    with pytest.MonkeyPatch.context() as patch:
        alone = work(None, patch)[1]
        # The sizes of the shares, names of rows, rows, gradients: names and gradients need two messages at first.
        assert on_threads(2, lambda group: work(group, patch)) == [([6, 5, 4, 6, 4, 4, 4, 4, 4], alone)] * 2


def test_a_rank_that_fails_ends_the_others_with_its_message() -> None:
    def work(group: Ranks) -> str:
        try:
            if group.rank == 1:
                with group.guard():
                    raise OSError("no space left on the disk")
            group.numbers("count examples", [1])
        except (RanksError, OSError) as error:
            return str(error)
        return ""

    first, second, third = on_threads(3, work)
    assert first == third == "rank 1 stopped: OSError: no space left on the disk"
    assert second == "no space left on the disk"


def test_a_rank_that_fails_to_make_what_it_agreed_to_send_says_so_and_can_go_on() -> None:
    def work(group: Ranks) -> tuple[str, list[Tensor]]:
        parts = [torch.full((2, 3), float(group.rank)) for _ in range(3)]

        def make() -> list[Tensor]:
            if group.rank == 1:
                raise OSError("no space left on the disk")
            return parts

        with pytest.raises((RanksError, OSError)) as caught:
            group.agreed("send rows", make, [24] * 3, [24] * 3)
        return str(caught.value), group.agreed("send rows", lambda: parts, [24] * 3, [24] * 3)

    said, found = zip(*on_threads(3, work), strict=True)
    assert said[0] == said[2] == "rank 1 stopped: OSError: no space left on the disk"
    assert said[1] == "no space left on the disk"
    for each in found:
        assert torch.equal(torch.stack(each), torch.arange(3.0).view(3, 1, 1).expand(3, 2, 3))


@pytest.mark.parametrize("step", ["_heard", "_sent"])
def test_an_owner_that_cannot_answer_ends_the_others_with_its_message(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = getattr(DividedGroup, step)

    def fails(self: DividedGroup, *given: Any) -> Any:
        if self.ranks.rank == 1 and self.failing:  # type: ignore[attr-defined]
            raise OSError("the disk is gone")
        return answer(self, *given)

    monkeypatch.setattr(DividedGroup, step, fails)
    monkeypatch.setattr(DividedGroup, "failing", True, raising=False)

    def work(group: Ranks) -> tuple[str, dict[str, str]]:
        tables = _some(group)
        with pytest.raises((RanksError, OSError)) as caught:
            tables(_batch(group, 0))
        tables.groups[0].failing = False  # type: ignore[attr-defined]
        tables(_batch(group, 0)).square().sum().backward()  # all can go on
        return str(caught.value), digest(tables)

    alone = _some()
    alone(_batch(None, 0)).square().sum().backward()
    said, found = zip(*on_threads(3, work), strict=True)
    assert said[0] == said[2] == "rank 1 stopped: OSError: the disk is gone"
    assert said[1] == "the disk is gone"
    assert found == (digest(alone),) * 3


def test_ranks_that_do_different_things_say_so() -> None:
    def work(group: Ranks) -> str:
        with pytest.raises(RanksError) as caught:
            group.numbers("count examples" if group.rank else "compare rows", [1])
        return str(caught.value)

    for message in on_threads(2, work):
        assert "rank 0: compare rows (to all); rank 1: count examples (to all)" in message


def test_ranks_that_read_for_all_and_for_one_say_so() -> None:
    def work(group: Ranks) -> str:
        tables = _some(group)
        with pytest.raises(RanksError) as caught:
            list(tables.groups[0].read("t", 8, to=1 if group.rank else None))  # type: ignore[call-arg]
        return str(caught.value)

    for message in on_threads(2, work):
        assert "rank 0: read table 't' (to all); rank 1: read table 't' (to each its own)" in message


def test_examples_of_other_shards_are_refused() -> None:
    def work(group: Ranks) -> str:
        tables = make(RULES[0])
        tables.replicate(group)
        pooled = tables(torch.zeros(5 - group.rank, 3).long())
        with pytest.raises(RanksError) as caught:
            pooled.sum().backward()
        return str(caught.value)

    for message in on_threads(2, work):
        assert "rank 0 of 2 has 5 of 9 examples, but its 4 of 8 logical shards are 4" in message


def test_more_ranks_than_shards_are_refused() -> None:
    def work(group: Ranks) -> None:
        with pytest.raises(ConfigError, match="shards=4"):
            make(RULES[0], shards=2).replicate(group)

    on_threads(3, work)


# ---- divided tables


def _some(ranks: Ranks | None = None, rows: int = 30, **options: Any) -> EmbeddingTables:
    table = TableConfig(name="t", num_embeddings=rows, embedding_dim=4, features=("f", "g"))
    given: dict[str, Any] = {"optimizer": optim.Adagrad(lr=0.1), "backend": "reference", "shards": 4, **options}
    return EmbeddingTables([table], ranks=ranks, **given)


def _batch(ranks: Ranks | None, number: int, rows: int = 30) -> Tensor:
    """The own examples of a batch of 8."""
    ids = torch.randint(rows, (8, 2), generator=torch.Generator().manual_seed(number))
    own = shards_of(ranks.rank, ranks.size, 4) if ranks else range(4)
    return ids[2 * own.start : 2 * own.stop]


@pytest.mark.parametrize("rule", [optim.Adagrad(lr=0.1), optim.LAMB(lr=0.1)])
def test_a_table_may_have_fewer_rows_than_ranks(rule: Any) -> None:
    def work(group: Ranks | None) -> dict[str, str]:
        tables = _some(group, rows=2, optimizer=rule)
        for step in range(3):
            tables(_batch(group, step, rows=2)).square().sum().backward()
        return digest(tables)

    assert on_threads(4, work) == [work(None)] * 4


def test_divided_tables_take_the_state_of_one_process_and_go_on() -> None:
    alone = _some(optimizer=optim.Adam(lr=0.1))
    alone(_batch(None, 0)).square().sum().backward()
    state = {name: value.clone() for name, value in alone.state_dict().items()}
    alone(_batch(None, 1)).square().sum().backward()

    def work(group: Ranks) -> dict[str, str]:
        tables = _some(group, optimizer=optim.Adam(lr=0.1), seed=9)
        tables.load_state_dict(state)
        tables(_batch(group, 1)).square().sum().backward()
        return digest(tables)

    assert on_threads(3, work) == [digest(alone)] * 3


def test_a_checkpoint_of_one_process_opens_in_divided_tables(tmp_path: Path) -> None:
    alone = make(optim.Adam(lr=0.1), "cached")
    train(alone, 1, 37, "single")
    save(tmp_path / "saved", torch.nn.ModuleDict({"tables": alone}))
    train(alone, 5, 37, "single")

    def work(group: Ranks) -> dict[str, str]:
        tables = make(optim.Adam(lr=0.1), "cached", ranks=group)
        load(tmp_path / "saved", torch.nn.ModuleDict({"tables": tables}))
        train(tables, 5, 37, "single")
        return digest(tables)

    assert on_threads(3, work) == [digest(alone)] * 3


@pytest.mark.slow
def test_divided_tables_write_the_checkpoint_of_one_process(tmp_path: Path) -> None:
    def work(group: Ranks | None) -> None:
        tables = make(optim.Adam(lr=0.1), "cached", ranks=group)
        train(tables, 1, 37, "single")
        where = tmp_path / ("one" if group is None else "several")
        save(where, torch.nn.ModuleDict({"tables": tables}), shard_bytes=300)
        with pytest.raises(CheckpointError, match="exists"):
            save(where, torch.nn.ModuleDict({"tables": tables}))

    work(None)
    on_threads(3, work)
    one, several = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()}
        for name in ("one", "several")
    )
    assert len(one) > 10
    assert one == several


def test_divided_tables_give_gradients_of_weights_and_keep_frozen_rows() -> None:
    def work(group: Ranks | None) -> tuple[Tensor, dict[str, str]]:
        tables = _some(group)
        ids = _batch(group, 0)
        weights = torch.full(ids.shape, 0.5, requires_grad=True)
        tables(ids, weights=weights).square().sum().backward()
        tables.freeze()
        before = digest(tables)
        tables(_batch(group, 1)).square().sum().backward()
        after = digest(tables)
        assert {name for name in before if before[name] != after[name]} <= {"tick"}
        assert weights.grad is not None
        return weights.grad, before

    grad, rows = work(None)
    found = on_threads(3, work)
    assert torch.equal(torch.cat([each for each, _ in found]), grad)
    assert all(each == rows for _, each in found)


def _drawn(group: Ranks | None, number: int) -> dict[str, Any]:
    """The own examples of a batch of 16 for tables of 400 and 130 rows."""
    ids, offsets, weights = draw(number, 16, "weighted")
    ids = (ids * torch.randint(1, 10, ids.shape, generator=torch.Generator().manual_seed(number))).long()
    own = shards_of(group.rank, group.size, 4) if group else range(4)
    found = share_of((ids, offsets, weights), 4 * own.start, 4 * own.stop)
    return dict(zip(("ids", "offsets", "weights"), found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize(
    ("place", "ahead"),
    [
        pytest.param(place, ahead, marks=[pytest.mark.slow] if ahead and place not in ("cached", "mixed") else [])
        for place in ("cached", "pipelined", "hot", "file", "mixed")
        for ahead in ({}, {"lookahead": 0}, {"lookahead": 3, "in_flight": 2}, {"background": True})
    ],
)
def test_a_stage_brings_what_other_ranks_look_up(divided: bool, place: str, ahead: dict[str, Any]) -> None:
    placement = {
        "cached": Cached(slots=70), "pipelined": HostPipelined(slots=70), "file": Cached(slots=70, home="file"),
        "hot": HotCold(hot={"a": 20, "b": 8}, slots=90), "mixed": {"a": Cached(slots=70), "b": Device()},
    }[place]  # fmt: skip

    def work(group: Ranks | None) -> tuple[dict[str, str], int, int, int]:
        tables = EmbeddingTables(
            [
                TableConfig(name="a", num_embeddings=400, embedding_dim=4, features=("f", "g")),
                TableConfig(name="b", num_embeddings=130, embedding_dim=4, features=("h",)),
            ],
            optimizer=optim.Adagrad(lr=0.1), features=("f", "h", "g"), placement=placement, shards=4,
            ranks=group if divided else None, backend="reference",
        )  # fmt: skip
        if not divided:
            tables.replicate(group)
        stream = [_drawn(group, number) for number in range(24)]
        staged = stage(stream, tables, lookups=lambda batch: tuple(batch.values()), **(ahead if group else {}))
        for batch in staged:
            tables(**batch).square().sum().backward()
        stats = [each.storage.stats for each in tables.groups if isinstance(each.strategy, Slotted)]
        return digest(tables), sum(each.on_demand for each in stats), sum(each.fetched for each in stats), staged._reach

    alone, *_ = work(None)
    for ranks in (2, 4):
        result = on_threads(ranks, work)
        for found, on_demand, fetched, _ in result:
            assert found == alone
            assert on_demand == 0
            assert fetched > 0
        reach = {each for *_, each in result}
        if divided:  # ranks agree how far to look ahead
            assert len(reach) == 1
            assert max(reach) > 10 or place not in ("cached", "file") or "lookahead" in ahead


@pytest.mark.slow
@pytest.mark.parametrize("place", ["device", "cached"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_copies_are_averaged_every_few_steps(ranks: int, place: str) -> None:
    """As cDLRM defines it: each rank steps by the mean over its own examples, then rows are means over ranks."""
    rule = optim.Adagrad(lr=0.1)

    def step(tables: EmbeddingTables, rank: int, number: int, factor: float) -> None:
        bounds, own = shard_bounds(24, 8), shards_of(rank, ranks, 8)
        ids, _, _ = draw(number, 24, "single")
        tables(ids[bounds[own.start] : bounds[own.stop]]).square().sum().mul(factor / 24).backward()

    def work(group: Ranks) -> dict[str, Tensor]:
        tables = make(rule, place, ranks=group.averaging(2))
        for number in range(5):
            step(tables, group.rank, number, 1.0)
        assert tables.averages is not None
        assert tables.averages.pending
        tables.average()
        assert not tables.averages.pending
        return {name: value.clone() for name, value in tables.state_dict().items()}

    copies = [make(rule, "device") for _ in range(ranks)]
    for number in range(5):
        for rank, each in enumerate(copies):
            step(each, rank, number, float(ranks))
        if number in (1, 3, 4):
            found = [each.state_dict() for each in copies]
            means = {
                name: value if not value.is_floating_point() else sum(each[name] for each in found[1:]) + value
                for name, value in found[0].items()
            }
            for each in copies:
                each.load_state_dict({n: v / ranks if v.is_floating_point() else v for n, v in means.items()})
    expected = copies[0].state_dict()
    first, *others = on_threads(ranks, work)
    for name, value in first.items():
        assert torch.allclose(value, expected[name], atol=1e-6), name
        assert all(torch.equal(value, each[name]) for each in others)


def test_copies_refuse_what_they_do_not_do() -> None:
    with pytest.raises(ConfigError, match="average_every is 0"):
        on_threads(2, lambda group: group.averaging(0))
    with pytest.raises(ConfigError, match="averaged and tables that grow"):
        on_threads(2, lambda group: EmbeddingTables(
            [TableConfig(name="a", num_embeddings=8, embedding_dim=4, grow=stoker.Grow())], optimizer=RULES[0],
            shards=8, ranks=group.averaging(2),
        ))  # fmt: skip


def test_copies_sum_nothing_in_replicate() -> None:
    """``replicate`` would sum gradients in each step."""

    def work(group: Ranks) -> None:
        with pytest.raises(ConfigError, match="these ranks average copies"):
            _some().replicate(group.averaging(2))
        _some().replicate(group)

    on_threads(2, work)


def test_a_norm_over_rows_of_a_copy_and_other_parameters_is_refused() -> None:
    """It differs among ranks, so a dense part clipped by it would."""

    def work(group: Ranks) -> None:
        tables, head = _some(group.averaging(2)), nn.Linear(4, 1)
        rows = tables.as_optimizer()
        head(tables(_batch(group, 0)).flatten(1)[:, :4]).sum().backward()
        both = [*head.parameters(), tables.handle]
        with pytest.raises(ConfigError, match="the other parameters would drift apart"):
            nn.utils.clip_grad_norm_(both, 1.0)
        with pytest.raises(ConfigError, match="the other parameters would drift apart"):
            nn.utils.get_total_norm([each.grad for each in both])
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        nn.utils.clip_grad_norm_(tables.handle, 0.01)  # of the copy alone
        rows.step()
        assert tables.tick == 1

    on_threads(2, work)
    on_threads(1, lambda group: _clip_all(_some(group.averaging(2))))


def _clip_all(tables: EmbeddingTables) -> None:
    """One rank has the norm of all."""
    rows, head = tables.as_optimizer(), nn.Linear(4, 1)
    head(tables(torch.tensor([[1, 2]])).flatten(1)[:, :4]).sum().backward()
    nn.utils.clip_grad_norm_([*head.parameters(), tables.handle], 1.0)
    rows.step()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(9, 8), (8, 9), (8, 7), (12, 8), (1, 0)])
def test_copies_of_ranks_that_do_not_step_equally_often_end(steps: tuple[int, int]) -> None:
    """Also if the copy of one rank has nothing to average."""

    def work(group: Ranks) -> str:
        tables = _some(group.averaging(4))

        def loop() -> None:
            for number in range(steps[group.rank]):
                tables(_batch(group, number)).sum().backward()
            tables.average()

        with pytest.raises(RanksError) as caught:
            loop()
        return str(caught.value)

    first, second = on_threads(2, work)
    assert first == second
    assert f"number of row updates done of tables t is {steps[0]} on rank 0, but {steps[1]} on rank 1" in first


def test_copies_that_differ_are_not_saved(tmp_path: Path) -> None:
    def work(group: Ranks) -> None:
        tables = _some(group.averaging(4))
        tables(_batch(group, 0)).sum().backward()
        with pytest.raises(CheckpointError, match=r"differ since their last average\. Call tables\.average\(\) on all"):
            save(tmp_path / "early", tables)
        tables.average()
        save(tmp_path / "whole", tables)

    on_threads(2, work)
    assert [each.name for each in tmp_path.iterdir()] == ["whole"]


def test_the_only_copy_differs_from_none(tmp_path: Path) -> None:
    """A script for several ranks that is tried on one."""

    def work(group: Ranks) -> None:
        tables = _some(group.averaging(4))
        tables(torch.tensor([[1, 2]])).sum().backward()
        save(tmp_path / "early", tables)

    on_threads(1, work)
    assert (tmp_path / "early").is_dir()


def test_rows_that_no_stage_brought_are_counted() -> None:
    def work(group: Ranks) -> list[int]:
        tables, found = _some(group, placement=Cached(slots=16)), []
        for ids in (_batch(group, 0), _batch(group, 0), _batch(group, 1)):
            tables(ids).sum().backward()
            found.append(tables.groups[0].storage.stats.on_demand)
        return found

    rows = [set(_batch(None, number).flatten().tolist()) for number in (0, 1)]
    expected = [
        (len(mine), len(mine), len(mine | more))
        for mine, more in ([{row for row in each if row % 2 == rank} for each in rows] for rank in range(2))
    ]
    assert [tuple(each) for each in on_threads(2, work)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_send_what_the_plan_says_and_have_equal_work(ranks: int) -> None:
    sizes, batch, steps, dim = (30_000, 4_000, 500, 40, 3), 1000, 8, 8
    drawn, counts, tables = [], {}, []
    for number, size in enumerate(sizes):
        weights = np.arange(1, size + 1) ** -1.05
        ids = np.random.default_rng(number).choice(size, steps * batch, p=weights / weights.sum())
        found = np.bincount(ids, minlength=size)
        order = np.argsort(-found, kind="stable")
        drawn.append(np.argsort(order)[ids].reshape(steps, batch))
        tables.append(TableConfig(name=str(number), num_embeddings=size, embedding_dim=dim))
        counts[str(number)] = found[order][::ranks]
    stream = torch.from_numpy(np.stack(drawn, axis=-1))

    class Counted(Ranks):
        served = 0

        def agreed(self, work: str, make: Any, sizes: Sequence[int], got: Sequence[int]) -> list[Tensor]:
            assert work.startswith("send rows")
            self.served += sum(sizes) // (4 * dim)
            return super().agreed(work, make, sizes, got)

    def work(group: Any) -> tuple[dict[str, int], int, int]:
        made = EmbeddingTables(tables, optimizer=optim.SGD(lr=0.1), shards=8, ranks=group, backend="reference")
        own, bounds = shards_of(group.rank, ranks, 8), shard_bounds(batch, 8)
        group.sent.clear()
        for ids in stream:
            made(ids[bounds[own.start] : bounds[own.stop]]).sum().backward()
        return dict(group.sent), group.served, made.groups[0].storage.num_rows

    placement = plan(
        [replace(table, num_embeddings=len(counts[table.name])) for table in tables], counts, batch_size=batch,
        optimizer=optim.SGD(lr=0.1), device_memory="1GiB",
        ids_per_feature={name: float(found.sum()) / batch / steps for name, found in counts.items()},
    )  # fmt: skip
    expected = expect_sent(placement, ranks, 8, parameters=0)
    found = on_threads(ranks, work, Counted)
    for name, what in {"ids": "ask for rows", "rows": "send rows", "gradients": "send gradients"}.items():
        each = [sum(size for work, size in sent.items() if work.startswith(what)) / steps for sent, *_ in found]
        assert sum(each) / ranks == pytest.approx(getattr(expected, name), rel=0.02), name
    for each in ([served for _, served, _ in found], [rows for *_, rows in found]):
        assert max(each) * ranks / sum(each) <= 1.05


def test_ids_of_a_staged_batch_are_those_that_ranks_know() -> None:
    def work(group: Ranks) -> str:
        tables = _some(group, placement=Cached(slots=16))
        stream = iter(stage([_batch(group, step) for step in range(3)], tables, lookups=lambda ids: ids))
        ids = next(stream)
        ids += group.rank
        with pytest.raises((ConfigError, RanksError)) as caught:
            tables(ids)
        return str(caught.value)

    first, second = on_threads(2, work)
    assert "were changed before its lookup" in second
    assert first == f"rank 1 stopped: ConfigError: {second}"


@pytest.mark.parametrize("divided", [True, False])
def test_a_stage_that_fails_on_one_rank_ends_all(divided: bool) -> None:
    def work(group: Ranks) -> str:
        tables = _some(group if divided else None, placement=Cached(slots=16))
        if not divided:
            tables.replicate(group)

        def stream() -> Iterator[Tensor]:
            yield _batch(group, 0)
            if group.rank:
                raise OSError("the disk is gone")
            yield from [_batch(group, 1)] * 20

        with pytest.raises((OSError, RanksError)) as caught:
            next(iter(stage(stream(), tables, lookups=lambda ids: ids)))
        return str(caught.value)

    assert on_threads(2, work) == ["rank 1 stopped: OSError: the disk is gone", "the disk is gone"]


def test_an_id_that_is_no_row_ends_all_ranks() -> None:
    def work(group: Ranks) -> str:
        tables = _some(group)
        with pytest.raises((IndexError, RanksError)) as caught:
            tables(torch.full((4, 2), 30 * group.rank))
        return str(caught.value)

    first, second = on_threads(2, work)
    assert "30" in second
    assert first == f"rank 1 stopped: IndexError: {second}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shards": 1}, "shards=8"), ({"device": "cuda"}, "the device cuda"),
    ],
)  # fmt: skip
def test_divided_tables_refuse_what_they_do_not_do(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        on_threads(2, lambda group: _some(group, **given))


def test_divided_tables_refuse_means_copies_and_other_ranks() -> None:
    with pytest.raises(ConfigError, match="means of Replicas"):
        on_threads(2, _some, Replicas)

    def work(group: Ranks) -> None:
        tables = _some(group)
        for wrong in (
            lambda: deepcopy(tables), lambda: tables.replicate(None), lambda: tables.to("meta"),
            lambda: compiled_lookup(tables, _batch(group, 0), None, None),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match="divided among ranks"):
                wrong()

    on_threads(2, work)


# ---- processes


def _join(rank: int, ranks: int, folder: str, timeout: float = 60.0) -> Ranks:
    """``timeout``: where nobody stops, long enough for a busy machine."""
    join(rank, ranks, f"{folder}/meet")
    return Ranks(timeout=timeout)


def _train_all(rank: int, ranks: int, folder: str) -> None:
    group = _join(rank, ranks, folder)
    found, divided = {}, {}
    for number, rule in enumerate(RULES):
        for place in PLACES if number == 4 else ("device", "pipelined"):
            options: dict[str, Any] = {"width": 8, "dtype": "bfloat16" if number % 2 else "float32"}
            tables = make(rule, place, **options)
            tables.replicate(group)
            train(tables, 7, 37, "weighted")
            found[number, place] = digest(tables)
            if number in (0, 3, 4, 6, 9):
                tables = make(rule, place, ranks=group, **options)
                train(tables, 7, 37, "weighted")
                divided[number, place] = digest(tables)
    torch.save((found, divided), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_processes_write_the_files_of_one(tmp_path: Path) -> None:
    start_ranks(_train_all, 3, str(tmp_path), ranks=3)
    files = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    replicated, divided = files[0]
    assert len(replicated) == len(PLACES) + 2 * (len(RULES) - 1)
    assert len(divided) == len(PLACES) + 2 * 4
    for (number, place), expected in replicated.items():
        alone = make(RULES[number], place, width=8, dtype="bfloat16" if number % 2 else "float32")
        train(alone, 7, 37, "weighted")
        assert expected == digest(alone), (number, place)
        if number in (0, 3, 4, 6, 9):
            assert divided[number, place] == expected, (number, place)
    assert all(each == files[0] for each in files)


def _run_example(rank: int, code: str, environment: dict[str, str], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment, RANK=str(rank))
    os.chdir(folder)
    exec(compile(code, "docs/ranks.md", "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_the_example_of_the_documentation_writes_the_same_rows_on_any_number_of_ranks(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text(encoding="utf-8")
    (code,) = [each for each in re.findall(r"```python\n(.+?)```", page, re.DOTALL) if "ranks=ranks" in each]
    files = []
    for ranks in (1, 2):
        (folder := tmp_path / str(ranks)).mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        start_ranks(_run_example, code, environment, str(folder), ranks=ranks)
        files.append(torch.load(folder / "tables.pt"))
    one, two = files
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert int(one["tick"]) == 20


def _end_one(rank: int, ranks: int, folder: str, number: int) -> None:
    group = _join(rank, ranks, folder, timeout=4.0)
    tables = make(RULES[0])
    tables.replicate(group)
    train(tables, 7, 37, "single")
    if rank == 1:
        time.sleep(6 if number == signal.SIGSTOP else 1)  # longer than others wait for a rank without a heartbeat
        os.kill(os.getpid(), number)
    try:
        train(tables, 8, 37, "single")
    except RanksError as error:
        Path(folder, str(rank)).write_text(str(error))
    dist.destroy_process_group()  # does not wait for the collective


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "message"),
    [(signal.SIGKILL, "rank 1 of 3 ended"), (signal.SIGSTOP, "rank 1 of 3 gave no sign of life for 4 s")],
)
def test_a_rank_that_is_killed_or_stopped_ends_the_others_with_one_message(
    number: int, message: str, tmp_path: Path
) -> None:
    running = [start_process(_end_one, rank, 3, str(tmp_path), number) for rank in range(3)]
    for rank in (0, 2):
        running[rank].join()
    running[1].kill()
    said, same = ((tmp_path / str(rank)).read_text() for rank in (0, 2))
    assert said.startswith(message)  # of the heartbeats, which come long before the group's own limit
    assert said == same
    assert "Start all ranks again" in said


_RAISES = """
import sys, torch
sys.path.insert(0, sys.argv[3])
from reductions import join
from test_table_ranks import make, train
from stoker import optim
from stoker.tables import Ranks
join(int(sys.argv[1]), 3, sys.argv[2] + "/meet")
ranks = Ranks()
tables = make(optim.SGD(lr=0.5), ranks=ranks)
train(tables, 7, 37, "single")
if ranks.rank == 1:
    raise ValueError("label 7 is no click")
train(tables, 8, 37, "single")
"""


@pytest.mark.slow
def test_an_error_in_a_loop_on_one_rank_ends_the_others_with_its_message(tmp_path: Path) -> None:
    """Interpreters of their own: their end is the point."""
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, str(tests.parent)]))}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _RAISES, str(rank), str(tmp_path), str(tests)], env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    first, second, third = (each.communicate()[1] for each in running)
    assert "ValueError: label 7 is no click" in second
    for said in (first, third):
        assert "RanksError: rank 1 of 3 stopped: ValueError: label 7 is no click. Start all ranks again" in said
    assert all(each.returncode for each in running)


def _fail_in_a_collective(rank: int, ranks: int, folder: str) -> None:
    group = _join(rank, ranks, folder)
    if rank == 1:
        group.wire.swap = lambda *given: torch.empty(2**60)  # type: ignore[method-assign]  # after all have agreed on it
    with pytest.raises(RanksError, match=r"rank 1 of 3 failed .* to send letters: .*memory"), group.guard():
        group.exchange("send letters", [torch.ones(2)] * ranks)


def test_a_rank_that_fails_in_a_collective_ends_the_others(tmp_path: Path) -> None:
    start_ranks(_fail_in_a_collective, 3, str(tmp_path), ranks=3)


def _reduce(rank: int, ranks: int, folder: str) -> None:
    join(rank, ranks, f"{folder}/meet")
    some = torch.ones(2)
    replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    for reduce in (
        lambda: dist.all_reduce(some), lambda: dist.reduce_scatter(some, [some] * ranks),
        lambda: functional.all_reduce(some, "sum", dist.group.WORLD), lambda: replica(some).sum().backward(),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="may add floats"):
            reduce()
    dist.destroy_process_group()


def test_ranks_of_tests_cannot_add_floats_on_the_way(tmp_path: Path) -> None:
    start_ranks(_reduce, 2, str(tmp_path), ranks=2)
