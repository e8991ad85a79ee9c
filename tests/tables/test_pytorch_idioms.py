"""Ordinary PyTorch loops around the tables end with the rows of nn.EmbeddingBag and its optimizer, or say why not.

Data are small integers and powers of two, so every sum is exact and results are compared to the bit.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from programs import Fails
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

import stoker
from stoker import Batch, EmbeddingTables, TableConfig
from stoker.tables import accumulation, stepping
from stoker.tables.slots.slotted import SlottedRows
from stoker.tables.storage import Rows

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

ROWS, DIM, FEATURES = 40, 4, 2
PLACEMENTS: dict[str, Any] = {
    "device": None,
    "cached": stoker.Cached(slots=24),
    "few slots": stoker.Cached(slots=9),
    "file": stoker.Cached(slots=24, home="file"),
    "hot and cold": stoker.HotCold(hot={"t": 6}, slots=24),
    "pipelined": stoker.HostPipelined(slots=24),
}


def start() -> Tensor:
    return torch.arange(ROWS * DIM, dtype=torch.float32, device="cpu").view(ROWS, DIM) % 13 - 6


def made(
    where: str = "device", *, lr: float = 0.5, optimizer: Any = None, pooling: Any = "sum", **options: Any
) -> EmbeddingTables:
    table = TableConfig(
        name="t", num_embeddings=ROWS, embedding_dim=DIM, features=("a", "b"), pooling=pooling, **options
    )
    tables = EmbeddingTables([table], optimizer=optimizer or stoker.SGD(lr=lr), placement=PLACEMENTS[where])
    state = next(tables.read("t"))[1].state
    tables.write("t", 0, Rows(start(), {name: torch.zeros_like(t) for name, t in state.items()}))
    return tables


class Bags(nn.Module):
    """What the tables replace."""

    def __init__(self, pooling: str = "sum", padding_idx: int | None = None) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(
            ROWS, DIM, mode=pooling, sparse=pooling != "max", include_last_offset=True, padding_idx=padding_idx
        )
        self.bag.weight.data.copy_(start())

    def forward(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        flat = ids.reshape(-1)
        offsets = torch.arange(len(flat) + 1) if offsets is None else offsets
        return self.bag(flat, offsets, weights).view(-1, FEATURES, DIM)


def batches(count: int = 6, size: int = 4, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, ROWS, (size, FEATURES), generator=generator) for _ in range(count)]


def jagged(count: int = 6, size: int = 4, seed: int = 0, longest: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        lengths = torch.randint(0, longest + 1, (size * FEATURES,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        found.append((torch.randint(0, ROWS, (int(offsets[-1]),), generator=generator), offsets))
    return found


def target(step: int, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(-2, 3, shape, generator=generator).float()


def loss_of(out: Tensor, step: int) -> Tensor:
    """Linear, so that integer rows keep integer gradients."""
    return (out * target(step, out.shape)).sum()


def same_rows(tables: EmbeddingTables, bags: Bags) -> None:
    assert torch.equal(tables.rows("t"), bags.bag.weight.detach())


@pytest.fixture(params=list(PLACEMENTS))
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.slow
def test_gradients_accumulated_over_micro_batches(where: str) -> None:
    tables, bags = made(where), Bags()
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    for turn in range(3):
        with tables.accumulate():
            for step, ids in enumerate(batches(4, seed=turn)):
                (loss_of(tables(ids), step) / 4).backward()
                (loss_of(bags(ids), step) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        same_rows(tables, bags)
    assert tables.tick == 3


def adagrad_of_bags(bags: Bags, turns: int, micro: int) -> None:
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.5, eps=1e-8)
    for turn in range(turns):
        for step, ids in enumerate(batches(micro, seed=turn)):
            loss_of(bags(ids), step).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_accumulation_with_adagrad_as_an_optimizer(where: str) -> None:
    tables, bags = made(where, optimizer=stoker.Adagrad(lr=0.5, eps=1e-8)), Bags()
    rows = tables.as_optimizer()
    for turn in range(3):
        for step, ids in enumerate(batches(3, seed=turn)):
            loss_of(tables(ids), step).backward()
        rows.step()
        rows.zero_grad()
    adagrad_of_bags(bags, 3, 3)
    torch.testing.assert_close(tables.rows("t"), bags.bag.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["one loss", "two backwards"])
def test_two_lookups_in_one_step(where: str, how: str) -> None:
    tables, bags = made(where), Bags()
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    first, second = batches(2)
    if how == "one loss":
        (loss_of(tables(first), 0) + loss_of(tables(second), 1)).backward()
    else:
        with tables.accumulate():
            loss_of(tables(first), 0).backward()
            loss_of(tables(second), 1).backward()
    (loss_of(bags(first), 0) + loss_of(bags(second), 1)).backward()
    optimizer.step()
    same_rows(tables, bags)
    assert tables.tick == 1


@pytest.mark.slow
def test_two_lookups_with_per_sample_weights_that_are_learned(where: str) -> None:
    tables, bags = made(where), Bags()
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    grads = []
    for module in (tables, bags):
        weights = [torch.full((len(ids),), 2.0, requires_grad=True) for ids, _ in jagged(2)]
        total = sum(
            loss_of(module(ids, offsets, each), step)
            for step, ((ids, offsets), each) in enumerate(zip(jagged(2), weights, strict=True))
        )
        total.backward()  # type: ignore[union-attr]
        grads.append([each.grad for each in weights])
    optimizer.step()
    same_rows(tables, bags)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_weight_gradient_after_the_rows_changed_is_refused() -> None:
    tables = made()
    weights = torch.ones(4 * FEATURES, requires_grad=True)
    ids = batches(1)[0]
    offsets = torch.arange(4 * FEATURES + 1)
    early = tables(ids.reshape(-1), offsets, weights)
    loss_of(tables(ids), 0).backward()
    with pytest.raises(RuntimeError, match="changed between this forward and its backward"):
        early.sum().backward()


@pytest.fixture
def scaler() -> Iterator[torch.amp.GradScaler]:
    yield torch.amp.GradScaler("cpu", init_scale=2.0**16)
    gc.collect()


@pytest.mark.slow
def test_a_gradient_scaler_steps_rows_and_dense_part_alike(where: str, scaler: torch.amp.GradScaler) -> None:
    tables, bags = made(where), Bags()
    rows, optimizer = tables.as_optimizer(), torch.optim.SGD(bags.parameters(), lr=0.5)
    for step, ids in enumerate(batches()):
        scaler.scale(loss_of(tables(ids), step)).backward()
        scaler.step(rows)
        scaler.update()
        rows.zero_grad()
        loss_of(bags(ids), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    same_rows(tables, bags)


def test_a_gradient_scaler_skips_a_step_whose_gradient_overflowed(scaler: torch.amp.GradScaler) -> None:
    tables = made()
    rows, before = tables.as_optimizer(), tables.rows("t")
    (scaler.scale(tables(batches(1)[0]).sum()) * float("inf")).backward()
    scaler.step(rows)
    scaler.update()
    rows.zero_grad()
    assert torch.equal(tables.rows("t"), before)
    assert tables.tick == 0
    assert scaler.get_scale() == 2.0**15


def test_a_gradient_scaler_beside_rows_that_step_inside_backward_is_refused(scaler: torch.amp.GradScaler) -> None:
    tables = made()
    before = tables.rows("t")
    with pytest.raises(stoker.ConfigError, match=r"GradScaler is in use.*as_optimizer"):
        scaler.scale(loss_of(tables(batches(1)[0]), 0)).backward()
    assert torch.equal(tables.rows("t"), before)
    tables.step_each_backward()
    loss_of(tables(batches(1)[0]), 0).backward()
    assert tables.tick == 1


def test_a_scaler_that_has_not_scaled_is_no_trouble() -> None:
    scaler = torch.amp.GradScaler("cpu")
    tables = made()
    tables(batches(1)[0]).sum().backward()
    assert (tables.tick, scaler.is_enabled()) == (1, True)


def test_a_scaler_that_is_off_is_no_trouble() -> None:
    tables, scaler = made(), torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(tables(batches(1)[0]), 0)).backward()
    assert tables.tick == 1


def test_gradient_norms_are_clipped_over_rows_and_dense_part() -> None:
    tables, bags = made(), Bags()
    ours, theirs = nn.Linear(FEATURES * DIM, 1), nn.Linear(FEATURES * DIM, 1)
    theirs.load_state_dict(ours.state_dict())
    bags.bag.sparse = False  # clip_grad_norm_ takes no sparse gradients
    model = nn.ModuleDict({"tables": tables, "head": ours})
    plain = nn.ModuleDict({"tables": bags, "head": theirs})
    rows, dense = tables.as_optimizer(), torch.optim.SGD(ours.parameters(), lr=0.5)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step, ids in enumerate(batches()):
        norms = []
        for each, optimizers in ((model, (rows, dense)), (plain, (optimizer,))):
            (each["head"](each["tables"](ids).flatten(1)).square().mean() * (step + 1)).backward()
            norms.append(float(nn.utils.clip_grad_norm_(each.parameters(), 0.5)))
            for one in optimizers:
                one.step()
                one.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        torch.testing.assert_close(tables.rows("t"), bags.bag.weight.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "clip", [lambda p: nn.utils.clip_grad_norm_(p, 1e9), lambda p: nn.utils.clip_grad_value_(p, 1e-31)]
)
def test_clipping_behind_a_step_inside_backward_is_refused(clip: Callable[[Any], Any]) -> None:
    """When the other optimizer steps, or at the next forward if none does."""
    for optimizer in (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), None):
        tables = made()
        loss_of(tables(batches(1)[0]), 0).backward()
        clip(tables.parameters())
        with pytest.raises(stoker.ConfigError, match=r"clipped or unscaled after backward.*as_optimizer"):
            optimizer.step() if optimizer is not None else tables(batches(1)[0])


@pytest.mark.parametrize("to_none", [True, False])
def test_clipping_is_refused_in_any_step(to_none: bool) -> None:
    """Also where the loop has cleared what shows it."""
    tables, (first, *others) = made(), batches(4)
    optimizer = torch.optim.SGD(tables.parameters(), lr=0.5)
    for ids in others:
        loss_of(tables(ids), 0).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    loss_of(tables(first), 0).backward()
    nn.utils.clip_grad_norm_(tables.parameters(), 0.5)
    with pytest.raises(stoker.ConfigError, match="clipped or unscaled after backward"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)
    loss_of(tables(first), 0).backward()
    optimizer.step()
    assert tables.tick == 5


def test_a_scaler_inside_accumulate_is_refused(scaler: torch.amp.GradScaler) -> None:
    tables, ids = made(), batches(1)[0]
    before = tables.rows("t")
    loss = scaler.scale(loss_of(tables(ids), 0))
    with pytest.raises(stoker.ConfigError, match="GradScaler is in use"), tables.accumulate():
        loss.backward()
    assert torch.equal(tables.rows("t"), before)


def test_clipping_inside_accumulate_is_refused() -> None:
    tables, ids = made(), batches(1)[0]
    before = tables.rows("t")

    def step(most: float | None) -> None:
        with tables.accumulate():
            for _ in range(2):
                loss_of(tables(ids), 0).backward()
            if most is not None:
                nn.utils.clip_grad_norm_(tables.parameters(), most)

    with pytest.raises(stoker.ConfigError, match="clipped or unscaled after backward"):
        step(1.0)
    assert torch.equal(tables.rows("t"), before)
    step(None)
    assert tables.tick == 1


def test_a_scaler_that_replaced_another_is_seen() -> None:
    tables, (first, second) = made(), batches(2)
    rows = tables.as_optimizer()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(tables(first), 0)).backward()
    scaler.step(rows)
    rows.zero_grad()
    other = made()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(stoker.ConfigError, match="GradScaler is in use"):
        scaler.scale(loss_of(other(second), 0)).backward()
    del scaler
    gc.collect()


def test_a_gradient_that_was_replaced_behind_a_step_inside_backward_is_refused() -> None:
    tables = made()
    loss_of(tables(batches(1)[0]), 0).backward()
    tables.handle.grad = tables.handle.grad.clone()  # put back
    loss_of(tables(batches(1)[0]), 0).backward()
    tables.handle.grad = tables.handle.grad / 64
    with pytest.raises(stoker.ConfigError, match="clipped or unscaled after backward"):
        tables(batches(1)[0])


def test_a_handle_that_is_replaced_before_a_backward_is_refused_by_the_next_forward() -> None:
    tables = made()
    loss = loss_of(tables(batches(1)[0]), 0)
    tables.handle = nn.Parameter(torch.ones(2, device="meta"))
    loss.backward()
    with pytest.raises(stoker.ConfigError, match=r"\(tables.handle\) was replaced"):
        tables(batches(1)[0])


def test_a_state_without_optimizer_state_gives_its_weights() -> None:
    tables, bags = made(optimizer=stoker.Adagrad(lr=0.5)), made()
    loss_of(bags(batches(1)[0]), 0).backward()
    found = tables.load_state_dict(bags.state_dict(), strict=False)
    assert found.missing_keys == ["t.sum"]
    assert torch.equal(tables.rows("t"), bags.rows("t"))
    with pytest.raises(RuntimeError, match="keeps nothing, and Adagrad keeps sum"):
        tables.load_state_dict(bags.state_dict())


@pytest.mark.slow
def test_a_state_of_some_tables_leaves_the_others() -> None:
    tables = [stoker.TableConfig(name=name, num_embeddings=4, embedding_dim=2) for name in "ab"]
    one, other = (stoker.EmbeddingTables(tables, optimizer=stoker.Adagrad(lr=0.1), seed=seed) for seed in (0, 1))
    one(torch.tensor([[1, 2]])).sum().backward()
    state, before = {k: v for k, v in one.state_dict().items() if not k.startswith("b.")}, other.rows("b")
    del state["tick"]
    found = other.load_state_dict(state, strict=False)
    assert sorted(found.missing_keys) == ["b.sum", "b.weight", "tick"]
    assert torch.equal(other.rows("a"), one.rows("a"))
    assert torch.equal(other.rows("b"), before)
    assert other.tick == 0
    with pytest.raises(RuntimeError, match=r"Missing key.*tick"):
        other.load_state_dict({name: value for name, value in one.state_dict().items() if name != "tick"})


@pytest.mark.parametrize("placement", [None, stoker.Cached(slots=4), stoker.Mapped()])
def test_state_of_another_shape_is_refused(placement: Any) -> None:
    """It would be broadcast where a table has as many rows as columns."""
    table = TableConfig(name="t", num_embeddings=4, embedding_dim=4)
    state = EmbeddingTables([table], optimizer=stoker.RowWiseAdagrad(lr=0.5)).state_dict()
    tables = EmbeddingTables([table], optimizer=stoker.Adagrad(lr=0.5), placement=placement)
    with pytest.raises(RuntimeError, match=r"its sum has shape \(4,\), but \(4, 4\) is expected"):
        tables.load_state_dict(state)


def test_shared_memory_is_refused() -> None:
    with pytest.raises(stoker.ConfigError, match=r"share_memory\(\) shares parameters among processes, but the rows"):
        nn.ModuleList([made()]).share_memory()


def _look_up(tables: EmbeddingTables, said: Any) -> None:
    try:
        with torch.no_grad():
            said.put(tables(torch.tensor([[1, 2]])).sum().item())
    except stoker.ConfigError as error:
        said.put(str(error))


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [stoker.Cached(slots=8), stoker.Cached(slots=8, home="file"), stoker.HostPipelined(slots=8), stoker.Mapped()],
)
def test_forks_look_up_resident_rows_only(placement: Any) -> None:
    """They have the files of the others, which the parent goes on to use, but none of their threads."""
    context = torch.multiprocessing.get_context("fork")
    table = TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, features=("a", "b"))
    for where, wanted in ((None, float), (placement, str)):
        tables = EmbeddingTables([table], optimizer=stoker.SGD(lr=0.5), placement=where)
        tables(batches(1)[0]).sum().backward()
        said = context.SimpleQueue()
        fork = context.Process(target=_look_up, args=(tables, said))
        fork.start()
        found = said.get()
        fork.join()
        assert isinstance(found, wanted), found
        assert where is None or "of which this is a fork" in found
        tables.close()
        tables.close()  # does nothing


def _change(tables: EmbeddingTables, loss: Tensor, said: Any) -> None:
    for change in (
        loss.backward,
        lambda: tables(torch.tensor([[1, 2]])).sum().backward(),
        lambda: tables.write("t4", 0, torch.zeros(ROWS, 4)),
        lambda: tables.load_state_dict(tables.state_dict()),
    ):
        try:
            change()
        except stoker.ConfigError as error:
            said.put(str(error))
        else:
            said.put("changed")


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(4,), (4, 8)])
def test_forks_cannot_change_mapped_rows_which_they_would_share(dims: tuple[int, ...]) -> None:
    configs = [TableConfig(name=f"t{d}", num_embeddings=ROWS, embedding_dim=d, features=(f"a{d}",)) for d in dims]
    configs[0] = replace(configs[0], features=("a", "b") if len(dims) == 1 else ("a",))
    tables = EmbeddingTables(configs, optimizer=stoker.SGD(lr=0.5), placement=stoker.Mapped())
    context, before = torch.multiprocessing.get_context("fork"), tables.rows("t4")
    said = context.SimpleQueue()
    fork = context.Process(target=_change, args=(tables, tables(torch.tensor([[1, 2]])).sum(), said))
    fork.start()
    fork.join()
    for _ in range(4):
        assert "of which this is a fork" in said.get()
    assert torch.equal(tables.rows("t4"), before)


def test_copies_keep_the_scale_of_gradients() -> None:
    tables = made()
    tables.gradient_scale = 0.25
    tables.step_each_backward()
    for found in (copy.deepcopy(tables), pickle.loads(pickle.dumps(tables))):
        assert (found.gradient_scale, found._stepper.checked) == (0.25, False)
    with pytest.raises(stoker.ConfigError, match="call as_optimizer"):
        copy.deepcopy((tables, tables.as_optimizer()))


class _Scaled(EmbeddingTables):
    """With a parameter, a buffer and a layer of its own."""

    def __init__(self) -> None:
        table = TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM)
        super().__init__([table], optimizer=stoker.SGD(lr=0.5))
        self.factor = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(2))
        self.layer = nn.Linear(2, 2)


def test_what_a_subclass_adds_is_saved(tmp_path: Path) -> None:
    one, other = _Scaled(), _Scaled()
    with torch.no_grad():
        one.factor.fill_(5)
        one.seen.fill_(7)
    state = one.state_dict()
    assert set(state) == {"factor", "seen", "t.weight", "tick", "layer.weight", "layer.bias"}
    other.load_state_dict(state)
    stoker.save(tmp_path / "saved", nn.ModuleDict({"tables": one}))
    loaded = nn.ModuleDict({"tables": _Scaled()})
    stoker.load(tmp_path / "saved", loaded)
    for found in (other, copy.deepcopy(one), loaded["tables"]):
        for name, value in found.state_dict().items():
            assert torch.equal(value, state[name]), name
    del state["factor"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "factor"'):
        other.load_state_dict(state | {"seen": one.seen})


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(stoker.ConfigError, match="'u' is not a table; there are t"):
        made().rows("u")
    with pytest.raises(stoker.ConfigError, match=r"table 't': num_embeddings must be a whole number, found 3\.5"):
        TableConfig(name="t", num_embeddings=3.5, embedding_dim=4)  # type: ignore[arg-type]


def test_an_empty_batch_of_max_pooling_joins_another() -> None:
    tables, still = made(pooling="max"), made(pooling="max")
    ids, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3, 4])
    empty = tables(torch.empty(0, dtype=torch.int64), torch.tensor([0]))
    (tables(ids, offsets).sum() + empty.sum()).backward()
    still(ids, offsets).sum().backward()
    assert torch.equal(tables.rows("t"), still.rows("t"))


@pytest.mark.parametrize("driven", [False, True])
def test_a_model_may_move_between_backward_and_step(driven: bool) -> None:
    tables, still = made(), made()
    for each in (tables, still):
        rows = each.as_optimizer() if driven else None
        for ids in batches(3):
            loss_of(each(ids), 0).backward()
            if each is tables:
                each.to("cpu", torch.float32)
                each._apply(torch.clone)
            if rows is not None:
                rows.step()
                rows.zero_grad()
    assert torch.equal(tables.rows("t"), still.rows("t"))
    assert tables.tick == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the rows of EmbeddingTables remain")
@pytest.mark.parametrize("change", [nn.Module.bfloat16, nn.Module.half, nn.Module.double])
@pytest.mark.parametrize("place", ["before forward", "before backward", "between two backwards", "before step"])
@pytest.mark.parametrize("driven", [False, True])
def test_a_model_may_change_its_type_at_any_time(driven: bool, place: str, change: Callable[[Any], Any]) -> None:
    """Rows keep theirs, and step by the same gradients."""
    tables, still = made(), made()
    for each in (tables, still):
        rows = each.as_optimizer() if driven else None

        def at(here: str, each: EmbeddingTables = each) -> None:
            if each is tables and here == place:
                change(each)

        for first, second in zip(batches(3), batches(3, seed=1), strict=True):
            with each.accumulate():
                at("before forward")
                loss = loss_of(each(first), 0)
                at("before backward")
                loss.backward()
                at("between two backwards")
                loss_of(each(second), 1).backward()
                at("before step")
            if rows is not None:
                rows.step()
                rows.zero_grad()
    assert torch.equal(tables.rows("t"), still.rows("t"))
    assert tables.tick == 3


@pytest.mark.parametrize("clip", [False, True])
def test_a_norm_beyond_float32_is_infinite_as_for_parameters(clip: bool) -> None:
    tables, bags = made(), Bags()
    bags.bag.sparse = False
    for module, each in ((tables, tables.as_optimizer()), (bags, torch.optim.SGD(bags.parameters(), lr=0.5))):
        module(torch.tensor([[1, 2], [3, 4]])).backward(torch.full((2, FEATURES, DIM), 3e38))
        if clip:
            assert nn.utils.clip_grad_norm_(module.parameters(), 1.0) == math.inf
        each.step()
    assert tables.rows("t").isfinite().all()
    same_rows(tables, bags)


@pytest.mark.parametrize("into", ["a sum", "an average", "a replacement"])
def test_gradients_of_several_backwards_that_a_loop_puts_together_are_refused(into: str) -> None:
    """As by methods for several tasks, or a running average of gradients."""
    tables, head = made(), nn.Linear(FEATURES * DIM, 1)
    rows = tables.as_optimizer()
    for turn in range(3):
        saved = []
        for ids in batches(2):
            tables.zero_grad()
            head(tables(ids).flatten(1)).sum().backward()
            saved.append(tables.handle.grad.clone())
        if turn == 0:  # as it is
            rows.step()
            continue
        if into == "a sum":
            tables.handle.grad.add_(saved[0])
        else:
            tables.handle.grad = saved[0] + saved[1] if into == "a replacement" else saved[1].lerp(saved[0], 0.25)
        with pytest.raises(stoker.ConfigError, match=r"more than a factor.*sum with the gradient of another"):
            rows.step()
    assert tables.tick == 1


def test_a_step_without_a_gradient_of_the_rows_is_refused_where_pytorch_has_one() -> None:
    tables, ids = made(), batches(1)[0]
    rows = tables.as_optimizer()
    rows.step()
    tables(ids).sum().backward()
    rows.step()
    with pytest.raises(stoker.ConfigError, match=r"earlier step\(\) has used up.*Call zero_grad\(\) after each"):
        rows.step()
    rows.zero_grad()
    tables(ids).sum().backward()
    kept = tables.handle.grad
    rows.zero_grad()
    rows.step()
    tables.handle.grad = kept
    with pytest.raises(stoker.ConfigError, match=r"zero_grad\(\) has dropped before the loop put it back"):
        rows.step()
    tables.zero_grad(set_to_none=False)
    rows.step()
    assert tables.tick == 1


@pytest.mark.parametrize("carried", [1.0, 0.5], ids=["as it is", "as a momentum"])
def test_gradients_that_a_loop_never_clears_are_refused(carried: float) -> None:
    """PyTorch adds each backward to the gradient of the step before."""
    tables = made()
    rows, (first, second) = tables.as_optimizer(), batches(2)
    for ids in (first, second, first):
        rows.zero_grad(set_to_none=False)
        loss_of(tables(ids), 0).backward()
        rows.step()
    before = tables.rows("t")
    tables.handle.grad.mul_(carried)  # type: ignore[union-attr]
    with pytest.raises(stoker.ConfigError, match=r"earlier step\(\) has used up.*PyTorch would use it again"):
        loss_of(tables(second), 1).backward()
    rows.zero_grad()
    rows.step()
    assert torch.equal(tables.rows("t"), before)
    tables.step_each_backward()  # whatever a loop does
    for ids in (first, second):
        loss_of(tables(ids), 1).backward()
        rows.step()
    assert not torch.equal(tables.rows("t"), before)


@pytest.mark.parametrize("factor", [None, math.nan])
def test_a_gradient_of_zeros_that_a_loop_changes_is_refused(factor: float | None) -> None:
    tables = made()
    rows, before = tables.as_optimizer(), tables.rows("t")
    (0 * loss_of(tables(batches(1)[0]), 0)).backward()
    nn.utils.clip_grad_norm_(tables.parameters(), 1.0)
    grad = tables.handle.grad
    assert grad is not None
    grad.add_(1.0) if factor is None else grad.mul_(factor)
    with pytest.raises(stoker.ConfigError, match="more than a factor" if factor is None else "became NaN"):
        rows.step()
    assert torch.equal(tables.rows("t"), before)


@pytest.mark.parametrize("norm", [1, math.inf, "inf"])
def test_clipping_by_another_norm_is_refused(norm: Any) -> None:
    tables, head = made(), nn.Linear(FEATURES * DIM, 1)
    rows = tables.as_optimizer()
    head(tables(batches(1)[0]).flatten(1)).sum().backward()
    with pytest.raises(stoker.ConfigError, match=rf"norm of type {norm}, .* rows of t only the 2-norm is known"):
        nn.utils.clip_grad_norm_([*tables.parameters(), *head.parameters()], 1.0, norm_type=norm)
    nn.utils.clip_grad_norm_(head.parameters(), 1.0, norm_type=norm)
    nn.utils.clip_grad_norm_(tables.parameters(), 1.0, norm_type=2)
    with pytest.raises(stoker.ConfigError, match="only the 2-norm is known"):
        get_total_norm((p.grad for p in tables.parameters()), norm)
    assert get_total_norm(torch.tensor([3.0, -4.0]), 1) == 7
    rows.step()
    assert tables.tick == 1


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["may break", "in one graph"])
def test_compiled_clipping_by_another_norm_is_refused(whole: bool) -> None:
    """Also between averages of copies, where rows have a norm of each rank; gradients are on after the error."""
    tables, head, other = made(), nn.Linear(FEATURES * DIM, 1), nn.Linear(3, 2)
    rows = tables.as_optimizer()
    (head(tables(batches(1)[0]).flatten(1)).sum() + other(torch.ones(3)).sum()).backward()
    both = [*tables.parameters(), *head.parameters()]
    expected = get_total_norm([p.grad for p in both if p.grad is not None])

    def clip(parameters: Any, norm: float) -> Any:
        return torch.compile(
            lambda: nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=norm), backend="eager", fullgraph=whole
        )()

    with pytest.raises(stoker.ConfigError, match="only the 2-norm is known"):
        clip(both, math.inf)
    assert torch.is_grad_enabled()
    assert clip([*other.parameters()], math.inf) == 1
    assert clip(both, 2.0) == expected
    tables.averages = SimpleNamespace(ranks=SimpleNamespace(size=2))  # type: ignore[assignment]
    with pytest.raises(stoker.ConfigError, match="differs among ranks"):
        clip(both, 2.0)
    tables.averages = None
    rows.step()
    assert tables.tick == 1


@pytest.mark.parametrize("driven", [False, True])
def test_a_penalty_on_the_handle_is_refused(driven: bool) -> None:
    tables = made()
    rows = tables.as_optimizer() if driven else None
    before = tables.rows("t")
    loss = loss_of(tables(batches(1)[0]), 0) + sum(each.square().sum() for each in tables.parameters())
    with pytest.raises(stoker.ConfigError, match="the loss depends on the handle of t"):
        loss.backward()
    assert torch.equal(tables.rows("t"), before)
    loss_of(tables(batches(1)[0]), 0).backward()
    if rows is not None:
        rows.step()
    assert tables.tick == 1


@pytest.mark.parametrize("cleared", [False, True])
def test_a_penalty_on_the_handle_is_refused_in_any_step(cleared: bool) -> None:
    """Autograd adds in place to what the step before left in its gradient, if the loop does not clear it."""
    tables = made()
    for ids in batches(2):
        loss = loss_of(tables(ids), 0)
        if cleared and tables.handle.grad is not None:
            tables.handle.grad.zero_()
        loss.backward()
    before = tables.rows("t")
    loss = loss_of(tables(batches(1)[0]), 0) + tables.handle.square().sum()
    with pytest.raises(stoker.ConfigError, match="the loss depends on the handle of t"):
        loss.backward()
    assert torch.equal(tables.rows("t"), before)


def test_optimizers_that_step_less_often_than_the_rows_are_no_mistake() -> None:
    """Rows train alone for some steps, or beside another model, whose optimizer is not for them."""
    tables, head, other = made(), nn.Linear(FEATURES * DIM, 1), nn.Linear(2, 1)
    dense, beside = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (head, other))
    for step, ids in enumerate(batches(6)):
        head.requires_grad_(step not in (2, 3))
        other(torch.ones(2)).sum().backward()
        head(tables(ids).flatten(1)).sum().backward()
        if step not in (2, 3):
            dense.step()
        beside.step()
        dense.zero_grad()
        beside.zero_grad()
    assert tables.tick == 6


@pytest.mark.slow
@pytest.mark.parametrize("how", ["each step", "in turn", "skipped"])
@pytest.mark.parametrize("cleared", ["to none", "to zeros", ""])
def test_a_penalty_that_goes_backward_before_the_rows_is_no_step_of_theirs(how: str, cleared: str) -> None:
    """Its gradients are there when the forward of the rows begins, but the rows took no step with them."""
    tables, head = made(), nn.Sequential(nn.Linear(FEATURES * DIM, 4), nn.Linear(4, 1))
    head[0].bias.requires_grad_(False)
    one, two = (torch.optim.SGD(each.parameters(), lr=0.01) for each in head)
    refused: Any = (
        contextlib.nullcontext()
        if cleared
        else pytest.raises(stoker.ConfigError, match=r"steps once for|of its last step")
    )
    with refused:
        for step, ids in enumerate(batches(8)):
            mine = [one, two] if how == "each step" else [(one, two)[step % 2]] if how == "in turn" else [one]
            if cleared:
                for each in mine:
                    CLEARED[cleared](each)
            sum(p.square().sum() for p in head.parameters()).backward()  # type: ignore[union-attr]
            head(tables(ids).flatten(1)).sum().backward()
            if how != "skipped" or step % 4 != 2:
                for each in mine:
                    each.step()
    assert not cleared or tables.tick == 8


def test_tables_that_are_gone_leave_nothing_on_parameters() -> None:
    """They put nothing on those of other models."""
    other, head = nn.Linear(2, 1), nn.Linear(FEATURES * DIM, 1)
    idle, optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (other, head))
    tables = made()
    for ids in batches(3):
        head(tables(ids).flatten(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not other.weight._backward_hooks
    assert not other.bias._backward_hooks
    hooks = [each for each in (head.weight._backward_hooks, head.bias._backward_hooks) if each]
    assert hooks
    del tables
    gc.collect()
    assert not any(hooks)
    idle.step()


@pytest.mark.parametrize("moved", ["the other model", "the rows"])
def test_models_that_one_thread_began_and_two_go_on_with_are_apart(moved: str) -> None:
    """The optimizer of the other one has stepped in the thread of the rows, and was taken for one of theirs."""
    tables, other = made(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def begin() -> None:
        for ids in batches(2):
            tables(ids).sum().backward()
            other(torch.ones(2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def backward_beside(_: Tensor) -> None:
        pool.submit(lambda: other(torch.ones(2)).sum().backward()).result()

    with ThreadPoolExecutor(1) as before, ThreadPoolExecutor(1) as pool:
        (begin() if moved == "the other model" else before.submit(begin).result())
        pool.submit(optimizer.step).result()
        for ids in batches(3 if moved == "the other model" else 260):
            out = tables(ids)
            out.register_hook(backward_beside)
            out.sum().backward()
        pool.submit(optimizer.step).result()


def test_a_model_that_another_thread_trains_is_left_alone() -> None:
    """Its backwards, which run during those of the rows, are not counted, and nothing is put on its parameters."""
    tables, other = made(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def backward_beside(_: Tensor) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: other(torch.ones(2)).sum().backward()).result()

    for ids in batches(3):
        out = tables(ids)
        out.register_hook(backward_beside)
        out.sum().backward()
    assert not other.weight._backward_hooks
    assert not other.bias._backward_hooks
    assert other.bias.grad == 3
    optimizer.step()


@pytest.mark.parametrize("as_optimizer", [False, True])
def test_models_that_threads_train_give_what_each_gives_alone(as_optimizer: bool) -> None:
    def train(seed: int) -> list[Tensor]:
        tables, head = made(), nn.Linear(FEATURES * DIM, 1)
        with torch.no_grad():
            for each in head.parameters():
                each.fill_(0.1 + seed)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
        rows = [tables.as_optimizer()] if as_optimizer else []
        for ids in batches(40, seed=seed):
            head(tables(ids).flatten(1)).sum().backward()
            if as_optimizer:
                nn.utils.clip_grad_norm_([*head.parameters(), tables.handle], 1.0)
            for each in (optimizer, *rows):
                each.step()
                each.zero_grad()
        return [*tables.state_dict().values(), head.weight]

    alone, interval = [train(seed) for seed in range(4)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for found, expected in zip(pool.map(train, range(4)), alone, strict=True):
                assert all(map(torch.equal, found, expected))
    finally:
        sys.setswitchinterval(interval)


def test_an_error_of_one_of_two_tables_leaves_no_count_behind() -> None:
    one, two, head, ids = made(), made(), nn.Linear(FEATURES * DIM, 1), batches(1)[0]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(2):
        head((one(ids) + two(ids)).flatten(1)).sum().backward()
    with pytest.raises(stoker.ConfigError, match="SGD steps once for 2 backwards"):
        optimizer.step()
    optimizer.zero_grad()
    head((one(ids) + two(ids)).flatten(1)).sum().backward()
    optimizer.step()


def test_an_optimizer_that_shares_the_handle_steps_after_the_rows_or_is_refused() -> None:
    tables, head, ids = made(), nn.Linear(FEATURES * DIM, 1), batches(1)[0]
    dense = torch.optim.SGD([*tables.parameters(), *head.parameters()], lr=0.5)
    rows = tables.as_optimizer()
    for optimizers in ((rows, dense), (dense, rows)):
        head(tables(ids).flatten(1)).sum().backward()
        if optimizers[0] is dense:
            dense.step()
            dense.zero_grad()
            with pytest.raises(stoker.ConfigError, match=r"zero_grad\(\) after the step of SGD, which has the handle"):
                rows.step()
        else:
            for each in optimizers:
                each.step()
                each.zero_grad()
    assert tables.tick == 1
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(head(tables(ids).flatten(1)).sum()).backward()
    scaler.step(rows)
    with pytest.raises(stoker.ConfigError, match="divides the gradient of the rows twice"):
        scaler.step(dense)
    del scaler
    gc.collect()


def test_a_learning_rate_that_is_a_tensor_stays_one() -> None:
    tables, bags, rate = made(), Bags(), torch.tensor(1.0)
    bags.bag.sparse = False
    rows, optimizer = tables.as_optimizer(), torch.optim.SGD(bags.parameters(), lr=1.0)
    for each in (rows, optimizer):
        each.param_groups[0]["lr"] = rate
    for step, ids in enumerate(batches(4)):
        rate.mul_(0.5)
        for module, each in ((tables, rows), (bags, optimizer)):
            loss_of(module(ids), step).backward()
            each.step()
            each.zero_grad()
    same_rows(tables, bags)


def test_a_learning_rate_set_beside_a_scheduler_counts() -> None:
    tables, ids = made(), batches(1)[0]
    rows = tables.as_optimizer()
    for rate in (0.25, 2.0):
        if rate == 0.25:
            tables.lr = rate
        else:
            tables.optimizer = stoker.SGD(lr=rate)
        assert rows.param_groups[0]["lr"] == rate
        tables(ids).sum().backward()
        rows.step()
        rows.zero_grad()
        assert tables.lr == rate
    with pytest.raises(stoker.ConfigError, match="rows of its tables only"):
        rows.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize("size", [1.0, math.inf])
def test_a_change_of_the_gradient_counts_once_though_a_backward_fails(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several processes: a backward begins with what was done to the gradient before it."""
    monkeypatch.setattr(stepping, "_several_processes", lambda: True)
    first, second = batches(2)
    weights = torch.ones(second.numel(), requires_grad=True)
    found = []
    for fails in (False, True):
        tables = made()
        tables.replicate(None)
        rows = tables.as_optimizer()
        loss_of(tables(first), 0).mul(size).backward()
        for _ in range(2):
            nn.utils.clip_grad_norm_(tables.parameters(), 2.0)
            if fails:
                out = tables(second.reshape(-1), torch.arange(second.numel() + 1), Fails.apply(weights))
                with pytest.raises(ZeroDivisionError):
                    out.sum().backward()
            tables.handle.grad.mul_(0.5)
        rows.step()
        found.append(tables.rows("t"))
    torch.testing.assert_close(*found, equal_nan=True)
    assert not torch.equal(found[0], start())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_clipping_a_norm_that_is_not_finite_is_as_for_parameters(bad: float) -> None:
    tables, bags = made(), Bags()
    bags.bag.sparse = False
    rows, optimizer = tables.as_optimizer(), torch.optim.SGD(bags.parameters(), lr=0.5)
    for module, each in ((tables, rows), (bags, optimizer)):
        module(torch.tensor([[1, 2], [3, 4]])).backward(
            torch.tensor([1.0, bad, 1.0, 1.0]).view(2, 2, 1).expand(2, 2, DIM)
        )
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        each.step()
    used = [1, 2, 3, 4]
    rows.zero_grad()
    tables(torch.tensor([[5, 6]])).sum().mul(bad).backward()
    tables.zero_grad(set_to_none=False)
    rows.step()
    assert tables.rows("t")[5:7].isfinite().all()
    assert torch.equal(tables.rows("t")[used].isnan(), bags.bag.weight.detach()[used].isnan())
    torch.testing.assert_close(tables.rows("t")[used], bags.bag.weight.detach()[used], equal_nan=True)


def test_a_gradient_that_is_infinite_may_be_multiplied() -> None:
    """A loop that divides gradients by the number of ranks does so before it looks at them."""
    tables = made()
    rows = tables.as_optimizer()
    tables(torch.tensor([[1, 2]])).sum().mul(math.inf).backward()
    tables.handle.grad.div_(2.0)
    rows.step()
    assert not tables.rows("t")[[1, 2]].isfinite().any()


@pytest.mark.parametrize("norm", [5e38, 6e38])  # of which 0.8, or also 0.6, is infinite in float32
def test_a_norm_that_overflows_is_no_change_of_the_gradient(norm: float) -> None:
    tables, bags = made(), Bags()
    bags.bag.sparse = False
    before, ids, size = tables.rows("t"), torch.tensor([[1, 2]]), norm / math.sqrt(2 * DIM)
    rows = tables.as_optimizer()
    tables.lr = 1e-38
    for module, optimizer in ((tables, rows), (bags, torch.optim.SGD(bags.parameters(), lr=1e-38))):
        (module(ids) * size).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(tables.rows("t"), bags.bag.weight.detach())
    assert not torch.equal(tables.rows("t"), before)
    before = tables.rows("t")
    (tables(ids) * size).sum().backward()
    nn.utils.clip_grad_norm_(tables.parameters(), 1.0)  # multiplies by 0, as with an infinite norm
    rows.step()
    rows.zero_grad()
    assert torch.equal(tables.rows("t"), before)
    (tables(ids) * size).sum().backward()
    tables.handle.grad.div_(2.0)  # the quotient of infinities is not known
    with pytest.raises(stoker.ConfigError, match="changed by more than a factor"):
        rows.step()


def test_a_gradient_that_became_nan_is_dropped_with_the_error() -> None:
    tables = made()
    rows, before = tables.as_optimizer(), tables.rows("t")
    tables(torch.tensor([[1, 2]])).sum().backward()
    tables.handle.grad.fill_(math.nan)
    with pytest.raises(stoker.ConfigError, match="became NaN after backward"):
        rows.step()
    rows.step()
    assert torch.equal(tables.rows("t"), before)


def test_a_backward_to_frozen_tables_alone_is_no_step() -> None:
    tables = [stoker.TableConfig(name=f"t{dim}", num_embeddings=4, embedding_dim=dim) for dim in (2, 3)]
    for made_of in (tables[:1], tables):
        found = stoker.EmbeddingTables(made_of, optimizer=stoker.Adam(lr=0.1))
        found.freeze()
        found(torch.zeros(2, len(made_of), dtype=torch.int64)).sum().backward()
        assert found.tick == 0


def test_compiled_autograd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.compiled_autograd as compiled

    tables, ids = made(), batches(1)[0]
    before = tables.rows("t")
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "in_compiled_autograd_region", True)
        with pytest.raises(stoker.ConfigError, match="compiled autograd"):
            tables(ids).sum().backward()
    assert torch.equal(tables.rows("t"), before)


def test_clipping_by_value_is_refused() -> None:
    tables = made()
    rows = tables.as_optimizer()
    loss_of(tables(batches(1)[0]), 0).backward()
    nn.utils.clip_grad_value_(tables.parameters(), 1.0)
    with pytest.raises(stoker.ConfigError, match="clip_value"):
        rows.step()


@pytest.mark.parametrize("size", [1.0, 1e3, 1e4])
def test_noise_is_refused_and_factors_are_not(size: float) -> None:
    """Also noise that is small next to the norm of the gradient; a factor may come as several."""
    tables, plain = made(), made()
    rows, ids = tables.as_optimizer(), batches(1)[0]
    (size * loss_of(tables(ids), 0)).backward()
    for _ in range(8):
        tables.handle.grad.mul_(0.7)
    rows.step()
    plain.gradient_scale = 0.7**8
    (size * loss_of(plain(ids), 0)).backward()
    torch.testing.assert_close(tables.rows("t"), plain.rows("t"))
    rows.zero_grad()
    (size * loss_of(tables(ids), 0)).backward()
    tables.handle.grad.add_(1.0)
    with pytest.raises(stoker.ConfigError, match="by more than a factor"):
        rows.step()


@pytest.mark.parametrize("key", ["weight_decay", "betas", "momentum", "maximize"])
def test_settings_in_param_groups_that_rows_do_not_read_are_refused(key: str) -> None:
    tables = made()
    rows = tables.as_optimizer()
    rows.param_groups[0] |= {"initial_lr": 0.1, "name": "rows", key: 0}  # as schedulers and loops add
    loss_of(tables(batches(1)[0]), 0).backward()
    rows.step()
    rows.zero_grad()
    rows.param_groups[0][key] = 0.5
    loss_of(tables(batches(1)[0]), 0).backward()
    with pytest.raises(stoker.ConfigError, match=f"has {key}, which rows do not read: only lr counts there"):
        rows.step()


def test_accumulation_by_a_closure_is_refused() -> None:
    """As by Lightning, where the last of several backwards runs inside the step."""
    tables, head = made(), nn.Linear(FEATURES * DIM, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    first, *others = batches(6)

    def closure(ids: torch.Tensor, clear: bool) -> torch.Tensor:
        if clear:
            optimizer.zero_grad(set_to_none=ids is first)
        loss = head(tables(ids).flatten(1)).sum()
        loss.backward()
        return loss

    for ids in others:  # one backward for each step
        optimizer.step(lambda ids=ids: closure(ids, True))
        head.weight.grad.add_(0)  # as clipping does, or zero_grad(set_to_none=False)
    closure(first, True)
    with pytest.raises(stoker.ConfigError, match=r"SGD steps once for 2 backwards.*accumulate"):
        optimizer.step(lambda: closure(first, False))
    optimizer.step(lambda: closure(first, True))
    closure(first, True)  # to look at the loss; the closure drops its gradient, and clips its own

    def clipped() -> None:
        closure(first, True)
        nn.utils.clip_grad_norm_(head.parameters(), 0.1)

    optimizer.step(clipped)
    with pytest.raises(stoker.ConfigError, match="SGD steps once for 3 backwards"):
        optimizer.step(lambda: [closure(ids, ids is first) for ids in (first, *others[:2])])


def test_accumulation_behind_steps_inside_backward_is_refused() -> None:
    tables, head = made(), nn.Linear(FEATURES * DIM, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for ids in batches(2):
        head(tables(ids).flatten(1)).sum().backward()
    with pytest.raises(stoker.ConfigError, match=r"SGD steps once for 2 backwards.*accumulate"):
        optimizer.step()
    tables.step_each_backward()
    for ids in batches(2):
        head(tables(ids).flatten(1)).sum().backward()
    optimizer.step()


def test_accumulation_of_sparse_gradients_is_refused() -> None:
    tables, other, ids = made(), nn.EmbeddingBag(ROWS, DIM, sparse=True), batches(1)[0]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for times in (1, 1, 2):
        for _ in range(times):
            (tables(ids).sum(1) * other(ids)).sum().backward()
        with pytest.raises(stoker.ConfigError, match="for 2 backwards") if times > 1 else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()


class Loop:
    """Rows, and a dense part with its optimizer, which a loop steps as it likes."""

    def __init__(self, *, stepped: bool) -> None:
        self.tables, self.head = made(), nn.Linear(FEATURES * DIM, 1)
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=0.1)
        self.ids = batches(1)[0]
        if stepped:
            self.backward()
            self.step()
            self.clear()

    def loss(self) -> Tensor:
        return self.head(self.tables(self.ids).flatten(1)).sum()

    def backward(self, times: int = 1) -> None:
        for _ in range(times):
            self.loss().backward()

    def rows_alone(self) -> None:
        self.head.requires_grad_(False)
        self.backward(2)
        self.head.requires_grad_(True)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.head.parameters(), 0.01)

    def clear(self, *, to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)

    def step(self) -> None:
        self.optimizer.step()


def _both(loop: Loop) -> None:
    for loss in [loop.loss(), loop.loss()]:
        loss.backward()


def _with_a_graph(loop: Loop) -> None:
    """A backward of the rows alone before, whose forward came first, too."""
    losses = [loop.tables(loop.ids).sum(), loop.loss()]
    losses[0].backward()
    losses[1].backward(create_graph=True)


STEPS_OF_ONE: dict[str, Callable[[Loop], Any]] = {
    "after gradients that were all dropped": lambda loop: (loop.backward(2), loop.clear()),
    "after a forward without a backward": lambda loop: (
        loop.backward(), loop.step(), loop.clear(to_none=False), loop.loss(),
    ),
    "with a graph": _with_a_graph,
    "clipped": lambda loop: (loop.backward(), loop.clip()),
    "clipped after rows trained alone": lambda loop: (loop.rows_alone(), loop.backward(), loop.clip()),
    "clipped after rows trained alone and zeros": lambda loop: (
        loop.backward(), loop.clear(to_none=False), loop.rows_alone(), loop.clear(to_none=False), loop.backward(),
        loop.clip(),
    ),
    "clipped after gradients that were dropped": lambda loop: (
        loop.backward(3), loop.clear(), loop.backward(), loop.clip(),
    ),
    "after gradients that became zeros": lambda loop: (
        loop.backward(), loop.clip(), loop.clear(to_none=False), loop.backward(),
    ),
    "of a closure that clips": lambda loop: (
        loop.rows_alone(), loop.optimizer.step(lambda: (loop.clear(), loop.backward(), loop.clip())), loop.clear(),
        loop.backward(),
    ),
}  # fmt: skip
STEPS_OF_SEVERAL: dict[str, Callable[[Loop], Any]] = {
    "two": lambda loop: loop.backward(2),
    "two forwards first": _both,
    "two and clipped": lambda loop: (loop.backward(2), loop.clip()),
    "each clipped": lambda loop: (loop.backward(), loop.clip(), loop.backward(), loop.clip()),
    "two after rows trained alone": lambda loop: (loop.rows_alone(), loop.backward(2), loop.clip()),
    "rows trained alone between them": lambda loop: (loop.backward(), loop.rows_alone(), loop.backward()),
    "two after others that were dropped": lambda loop: (loop.backward(2), loop.clear(), loop.backward(2)),
    "two after zeros": lambda loop: (loop.backward(), loop.clear(to_none=False), loop.backward(2)),
    "two forwards first, after zeros": lambda loop: (loop.backward(), loop.clear(to_none=False), _both(loop)),
    "two forwards first, with a graph": lambda loop: [
        loss.backward(create_graph=True) for loss in (loop.loss(), loop.loss())
    ],
    "with a graph": lambda loop: [loop.loss().backward(create_graph=True) for _ in range(2)],
    "the last in a closure": lambda loop: (loop.backward(), loop.optimizer.step(loop.backward)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("loop", STEPS_OF_ONE)
def test_an_optimizer_that_steps_for_one_backward_is_no_trouble(loop: str, stepped: bool) -> None:
    """However often the rows stepped alone before, and whatever changes its gradients after the backward."""
    made_loop = Loop(stepped=stepped)
    STEPS_OF_ONE[loop](made_loop)
    made_loop.step()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("loop", STEPS_OF_SEVERAL)
def test_an_optimizer_that_steps_for_several_backwards_is_refused(loop: str, stepped: bool) -> None:
    made_loop = Loop(stepped=stepped)

    def run() -> None:
        STEPS_OF_SEVERAL[loop](made_loop)
        made_loop.step()

    with pytest.raises(stoker.ConfigError, match=r"SGD steps once for \d backwards"):
        run()


class Recurrent(nn.Module):
    """Its backward adds up the gradient of a weight over time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(DIM, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, out: Tensor) -> Tensor:
        return self.head(self.layer(out)[0][:, -1])


class Tied(nn.Linear):
    """A layer that is used three times."""

    def __init__(self) -> None:
        super().__init__(FEATURES * DIM, FEATURES * DIM)

    def forward(self, out: Tensor) -> Tensor:
        out = out.flatten(1)
        for _ in range(3):
            out = super().forward(out)
        return out


def _clear_data(optimizer: torch.optim.Optimizer) -> None:
    """As loops did before there was zero_grad()."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None:
            p.grad.data.zero_()


def _clamp(p: Tensor) -> None:
    p.grad.detach().clamp_(-1, 1)  # type: ignore[union-attr]


CLEARED: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "to none": lambda optimizer: optimizer.zero_grad(),
    "to zeros": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "as data": _clear_data,
}


@pytest.mark.slow
@pytest.mark.parametrize("clear", [None, "to none", "to zeros"])
@pytest.mark.parametrize("idle", [False, True], ids=["all step", "one is idle"])
@pytest.mark.parametrize("head", [Recurrent, Tied])
def test_forwards_before_their_backwards(head: Callable[[], nn.Module], idle: bool, clear: str | None) -> None:
    """They are refused if the optimizer steps for both, whatever a backward does within a gradient."""
    tables, layers, kept = made(), head(), nn.Linear(2, 1)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (layers, kept))
    with pytest.raises(stoker.ConfigError, match="SGD steps once for 2") if clear is None else contextlib.nullcontext():
        for first, second in zip(batches(3), batches(3, seed=1), strict=True):
            losses = [layers(tables(ids)).sum() for ids in (first, second)]
            for loss in losses:
                if clear is not None:
                    CLEARED[clear](optimizer)
                loss.backward()
            if not idle:
                other.step()
            optimizer.step()
    assert tables.tick == (2 if clear is None else 6)


@pytest.mark.parametrize("idle", [False, True])
def test_an_optimizer_that_steps_twice_for_one_backward_is_no_trouble(idle: bool) -> None:
    """Also beside another that never steps; a gradient that it then adds to is refused."""
    loop = Loop(stepped=False)
    other = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1) if idle else None
    for _ in range(4):
        loop.clear()
        loop.backward()
        loop.step()
        loop.step()
    loop.backward()
    with pytest.raises(stoker.ConfigError, match="of its last step, too"):
        loop.step()
    del other


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("adds", [False, True], ids=["cleared each time", "added up"])
@pytest.mark.parametrize("first", ["forward", "clear"])
@pytest.mark.parametrize("clear", CLEARED)
@pytest.mark.parametrize("of", ["recurrent", "tied", "clamped", "with a graph", "beside another", "checkpointed"])
def test_an_optimizer_that_steps_every_second_time(of: str, clear: str, first: str, adds: bool) -> None:
    """It is refused if its gradient adds up backwards, whatever changes gradients, and whatever else steps."""
    tables, head, other = made(), Recurrent() if of == "recurrent" else Tied(), nn.Linear(2, 1)
    optimizer, beside = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (head, other))
    if of == "clamped":
        for p in head.parameters():
            p.register_post_accumulate_grad_hook(_clamp)

    def loss(ids: Tensor) -> Tensor:
        out = tables(ids)
        if of == "checkpointed":
            return torch.utils.checkpoint.checkpoint(head, out, use_reentrant=True).sum()
        return head(out).sum()

    def run() -> None:
        for step, ids in enumerate(batches(6)):
            clears = not (adds and step % 2)
            if clears and first == "clear":
                CLEARED[clear](optimizer)
            found = loss(ids)
            if clears and first == "forward":
                CLEARED[clear](optimizer)
            found.backward(create_graph=of == "with a graph")
            if of == "beside another":
                other(torch.ones(2)).sum().backward()
                beside.step()
                beside.zero_grad()
            if step % 2:
                optimizer.step()

    with pytest.raises(stoker.ConfigError, match="SGD steps once for 2") if adds else contextlib.nullcontext():
        run()


@pytest.mark.parametrize("adds", [False, True])
def test_a_head_that_is_checkpointed_apart_from_the_thread_that_looks_up(adds: bool) -> None:
    """Nothing but its step shows that the optimizer is of these rows: a backward inside theirs writes its gradients."""
    tables, head = made(), nn.Linear(FEATURES * DIM, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)

    def run() -> None:
        for step, ids in enumerate(batches(6)):
            out = torch.utils.checkpoint.checkpoint(
                head, pool.submit(tables, ids).result().flatten(1), use_reentrant=True
            )
            out.sum().backward()
            if step % 2 or not adds:
                optimizer.step()
                optimizer.zero_grad()

    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(stoker.ConfigError, match="SGD steps once for 2") if adds else contextlib.nullcontext(),
    ):
        run()


def test_an_optimizer_whose_gradients_are_never_cleared_is_refused() -> None:
    """Parameters would add up the gradients of all steps, and rows do not."""
    tables, head = made(), nn.Linear(FEATURES * DIM, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    first, *others = batches(4)
    head(tables(first).flatten(1)).sum().backward()
    optimizer.step()
    head(tables(first).flatten(1)).sum().backward()
    with pytest.raises(stoker.ConfigError, match=r"SGD steps with gradients of its last step, too.*Call zero_grad\(\)"):
        optimizer.step()
    for ids in others:
        optimizer.zero_grad()
        head(tables(ids).flatten(1)).sum().backward()
        optimizer.step()
    assert len(tables._stepper._accumulation.followed(optimizer).watched or {}) == 1


def test_a_loop_in_step_is_watched_at_one_parameter_and_other_models_at_none() -> None:
    tables, head, other = made(), nn.Sequential(nn.Linear(FEATURES * DIM, 4), nn.Linear(4, 1)), nn.Linear(2, 1)
    optimizer, beside = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (head, other))
    for ids in batches(3):
        head(tables(ids).flatten(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(3):
        other(torch.ones(2)).sum().backward()
        beside.step()
    followed = tables._stepper._accumulation.followed
    assert list(followed(optimizer).watched or {}) == [head[0].bias]
    assert not followed(beside).watched


def test_threads_that_share_a_model_are_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients add up while both train; when one has gone, they are watched again."""
    monkeypatch.setattr(stepping, "_ALONE", 3)
    tables, head = made(), nn.Linear(FEATURES * DIM, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)

    def backward(ids: Tensor) -> None:
        head(tables(ids).flatten(1)).sum().backward()

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        for ids in batches(3):
            for each in (one, two):
                each.submit(backward, ids).result()
            for each in (one, two):
                each.submit(optimizer.step).result()
            optimizer.zero_grad()
        for ids in batches(4):
            one.submit(backward, ids).result()
            one.submit(optimizer.step).result()
            optimizer.zero_grad()
        for ids in batches(2):
            one.submit(backward, ids).result()
        with pytest.raises(stoker.ConfigError, match="SGD steps once for 2 backwards"):
            one.submit(optimizer.step).result()


def test_accumulation_in_another_model_is_no_trouble() -> None:
    """Rows that train alone, and after them a model that has nothing to do with them."""
    tables, other = made(), nn.Linear(2, 1)
    for ids in batches(3):
        loss_of(tables(ids), 0).backward()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        other(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_one_step_a_backward_is_no_trouble_whatever_else_steps() -> None:
    tables, head = made(), nn.Linear(FEATURES * DIM, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for ids in batches(4):
        head(tables(ids).flatten(1)).sum().backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.slow
@pytest.mark.parametrize("in_backward", [False, True])
def test_schedulers_drive_the_learning_rate(where: str, in_backward: bool) -> None:
    tables, bags = made(where), Bags()
    rows, optimizer = tables.as_optimizer(in_backward=in_backward), torch.optim.SGD(bags.parameters(), lr=0.5)
    schedules = [torch.optim.lr_scheduler.StepLR(each, step_size=2, gamma=0.5) for each in (rows, optimizer)]
    for step, ids in enumerate(batches()):
        for module, each, schedule in zip((tables, bags), (rows, optimizer), schedules, strict=True):
            loss_of(module(ids), step).backward()
            each.step()
            each.zero_grad()
            schedule.step()
    same_rows(tables, bags)
    assert tables.lr == 0.125


def test_the_learning_rate_can_be_set_and_keeps_the_state() -> None:
    tables = made(optimizer=stoker.Adagrad(lr=0.5))
    loss_of(tables(batches(1)[0]), 0).backward()
    state = next(tables.read("t"))[1].state["sum"].clone()
    tables.lr = 0.25
    assert tables.optimizer.lr == 0.25
    assert torch.equal(next(tables.read("t"))[1].state["sum"], state)
    with pytest.raises(stoker.ConfigError, match="as_optimizer"):
        tables.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # type: ignore[assignment]


@pytest.mark.slow
def test_a_gradient_scale(where: str) -> None:
    tables, bags = made(where), Bags()
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    tables.gradient_scale = 0.25
    for step, ids in enumerate(batches(2)):
        loss_of(tables(ids), step).backward()
        (loss_of(bags(ids), step) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    same_rows(tables, bags)


@pytest.mark.parametrize(
    "clear",
    [
        lambda rows, model: rows.zero_grad(),
        lambda rows, model: model.zero_grad(),
        lambda rows, model: model.zero_grad(set_to_none=False),
    ],
)
def test_cleared_gradients_are_not_used(clear: Callable[[Any, Any], None]) -> None:
    tables, bags = made(), Bags()
    rows, optimizer = tables.as_optimizer(), torch.optim.SGD(bags.parameters(), lr=0.5)
    first, second = batches(2)
    loss_of(tables(first), 0).backward()
    clear(rows, tables)
    rows.step()
    assert tables.tick == 0
    loss_of(tables(second), 1).backward()
    rows.step()
    loss_of(bags(second), 1).backward()
    optimizer.step()
    same_rows(tables, bags)


def test_frozen_rows_stay() -> None:
    for freeze in (lambda t: t.requires_grad_(False), lambda t: t.freeze(), lambda t: t.freeze("t")):
        tables = made()
        freeze(tables)
        head = nn.Linear(FEATURES * DIM, 1)
        head(tables(batches(1)[0]).flatten(1)).sum().backward()
        assert torch.equal(tables.rows("t"), start())
        tables.requires_grad_(True).unfreeze()
        head(tables(batches(1)[0]).flatten(1)).sum().backward()
        assert not torch.equal(tables.rows("t"), start())
    with pytest.raises(stoker.ConfigError, match="are not tables; there are t"):
        tables.freeze("nothing")


@pytest.mark.slow
@pytest.mark.parametrize("driven", [False, True])
def test_rows_that_are_frozen_before_their_backward_stay(driven: bool, where: str) -> None:
    tables, bags = made(where), Bags()
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    rows = tables.as_optimizer() if driven else None
    for step, ids in enumerate(batches(4)):
        for module in (tables, bags):
            loss = loss_of(module(ids), step)
            module.requires_grad_(step != 1)
            loss.backward()
            module.requires_grad_(True)
        for each in (optimizer, rows) if rows is not None else (optimizer,):
            each.step()
            each.zero_grad()
        same_rows(tables, bags)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("placement", [None, stoker.Cached(slots=12), stoker.Cached(slots=40)])
def test_one_frozen_table_of_several(placement: Any, mean: bool) -> None:
    """Also with an optimizer that would move rows of zero gradient."""
    configs = [
        TableConfig(name=name, num_embeddings=20, embedding_dim=4, pooling="mean" if mean else "sum") for name in "ab"
    ]
    optimizer = stoker.Adam(lr=0.1, weight_decay=0.1)
    frozen, free = (EmbeddingTables(configs, optimizer=optimizer, placement=each) for each in (placement, None))
    frozen.freeze("a")
    before = frozen.rows("a")
    for ids, offsets in jagged(4):
        for tables in (frozen, free):
            tables(ids % 20, offsets).square().sum(dim=2)[:, 1].sum().backward()
    assert torch.equal(frozen.rows("a"), before)
    assert torch.equal(frozen.rows("b"), free.rows("b"))


@pytest.mark.slow
def test_steps_are_counted_for_frozen_groups_too() -> None:
    """Files keep one number of steps, and tables that are thawed go on from it."""
    configs = [
        TableConfig(name="a", num_embeddings=9, embedding_dim=2),
        TableConfig(name="b", num_embeddings=9, embedding_dim=4),
    ]
    tables = EmbeddingTables(configs, optimizer=stoker.Adam(lr=0.1))
    tables.freeze("a")
    for _ in range(3):
        tables(torch.tensor([[1, 2]])).sum().backward()
    assert [group.tick for group in tables.groups] == [3, 3]


def test_ids_on_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ids are on meta, but the tables on cpu. Move"):
        made()(torch.zeros(2, FEATURES, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match=r"weights are on meta, but ids on cpu. Move"):
        made()(torch.zeros(2, FEATURES, dtype=torch.int64), weights=torch.ones(2, FEATURES, device="meta"))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_what_is_frozen_is_decided_by_each_backward(pooling: Any) -> None:
    """As with requires_grad: gradients of a time when a table was frozen do not exist when it is thawed."""
    configs = [TableConfig(name=name, num_embeddings=20, embedding_dim=4, pooling=pooling) for name in "ab"]
    found = []
    for whole in (False, True):
        tables = EmbeddingTables(configs, optimizer=stoker.SGD(lr=0.5))
        rows = tables.as_optimizer()
        for step, (ids, offsets) in enumerate(jagged(3)):
            frozen = step == 1
            out = tables(ids % 20, offsets)
            if frozen and not whole:
                tables.freeze("a")
            (
                loss_of(out[:, 1:], step)
                if frozen and whole
                else loss_of(out[:, 1:], step) + (loss_of(out[:, :1], step))
            ).backward()
            tables.unfreeze()
        tables.handle.grad.mul_(0.25)  # type: ignore[union-attr]
        rows.step()
        found.append((tables.rows("a"), tables.rows("b")))
    assert torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(found[0][0], found[1][0])


def test_gradients_of_a_time_when_all_was_frozen_are_not_there() -> None:
    tables = made()
    rows = tables.as_optimizer()
    tables.freeze()
    loss_of(tables(batches(1)[0]), 0).backward()
    tables.unfreeze()
    rows.step()
    assert torch.equal(tables.rows("t"), start())


def test_eval_mode_keeps_rows_and_says_so() -> None:
    tables = made().eval()
    out = tables(batches(1)[0])
    with pytest.warns(UserWarning, match="eval mode: rows were not updated"):
        out.square().sum().backward()
    assert torch.equal(tables.rows("t"), start())


def test_saliency_by_autograd_grad_changes_nothing() -> None:
    tables, head = made(), nn.Linear(FEATURES * DIM, 1)
    embedded = tables(batches(1)[0])
    (gradient,) = torch.autograd.grad(head(embedded.flatten(1)).sum(), embedded)
    assert gradient.shape == embedded.shape
    assert torch.equal(tables.rows("t"), start())


def test_averaged_models_are_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"tables": made(), "head": nn.Linear(2, 1)})
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.module["tables"](batches(1)[0])  # nothing is averaged yet
    averaged.update_parameters(model)
    with pytest.raises(stoker.ConfigError, match="averaged or replaced"):
        averaged.module["tables"].eval()(batches(1)[0])
    with pytest.raises(stoker.ConfigError, match="averaged or replaced"):  # the rows of when the copy was made
        model.load_state_dict(averaged.module.state_dict())
    with pytest.raises(stoker.ConfigError, match="averaged or replaced"):
        stoker.save(tmp_path / "averaged", averaged)
    by_hand = copy.deepcopy(model).eval()
    for mine, theirs in zip(by_hand.parameters(), model.parameters(), strict=True):
        mine.data.lerp_(theirs.data, 0.01)
    with pytest.raises(stoker.ConfigError, match="averaged or replaced"):
        by_hand["tables"](batches(1)[0])


@pytest.mark.parametrize("change", ["average", "copy"])
def test_rows_behind_a_cache_that_a_loop_changes_through_their_state_are_refused(where: str, change: str) -> None:
    """As an EMA of all entries of two states, or a target network; rows on the device are views, as in PyTorch."""
    tables, bags = made(where), Bags()
    averaged, plain = copy.deepcopy(tables).eval(), copy.deepcopy(bags).eval()
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    ids = batches(1)[0]

    def update(of: nn.Module, by: nn.Module) -> dict[str, Tensor]:
        state = of.state_dict()
        for mine, theirs in zip(state.values(), by.state_dict().values(), strict=False):
            if mine.is_floating_point():
                mine.copy_(theirs if change == "copy" else mine.lerp(theirs, 0.5))
        return state

    for module in (tables, bags):
        loss_of(module(ids), 0).backward()
    optimizer.step()
    state, _ = update(averaged, tables), update(plain, bags)
    if where != "device":
        with pytest.raises(stoker.ConfigError, match="changed in place, and the rows of t stayed"):
            averaged(ids)
        averaged.load_state_dict(state)
    assert torch.equal(averaged(ids), plain(ids))
    own = {name: value.clone().zero_() for name, value in tables.state_dict().items()}
    assert torch.equal(tables(ids), bags(ids))
    averaged.load_state_dict(own)
    assert not averaged(ids).any()


def test_rows_whose_state_was_changed_do_not_train() -> None:
    tables, ids = made("cached"), batches(1)[0]
    for value in tables.state_dict().values():
        value.zero_()
    with pytest.raises(stoker.ConfigError, match=r"Give the changed state to load_state_dict"):
        tables(ids)
    with torch.inference_mode():
        tables.state_dict()["t.weight"].zero_()
    loss_of(tables(ids), 0).backward()
    assert tables.tick == 1


def test_a_shallow_copy_is_refused() -> None:
    """It would not share rows, as PyTorch's would."""
    tables = made()
    with pytest.raises(stoker.ConfigError, match=r"copy.copy of a module shares its parameters, but .* of t "):
        copy.copy(tables)
    assert copy.copy(nn.ModuleDict({"tables": tables}))["tables"] is tables


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # forward_ad of torch 2.14 calls it
@pytest.mark.parametrize("graph", [False, True])
def test_weights_with_a_tangent_are_refused(graph: bool) -> None:
    tables, [(ids, offsets)] = made(), jagged(1)
    forward_ad = torch.autograd.forward_ad
    with torch.set_grad_enabled(graph), forward_ad.dual_level():
        weights = torch.ones(len(ids))
        tables(ids, offsets, weights)
        with pytest.raises(stoker.ConfigError, match="per-sample weights have a tangent"):
            tables(ids, offsets, forward_ad.make_dual(weights, weights))


@pytest.mark.parametrize("placement", [None, stoker.Cached(slots=24)], ids=["device", "cached"])
def test_sparse_gradients_of_outputs(placement: Any) -> None:
    """Rows that were looked up serve as the table of a second lookup, whose gradient is sparse."""
    widths = {"t": 4, "u": 2}
    configs = [TableConfig(name=name, num_embeddings=ROWS, embedding_dim=dim) for name, dim in widths.items()]
    tables = EmbeddingTables(configs, optimizer=stoker.SGD(lr=0.5), placement=placement)
    expected = {name: tables.rows(name) for name in widths}
    out = tables(torch.tensor([[1, 2], [3, 4], [5, 6]]))
    nn.functional.embedding(torch.tensor([0, 2, 2]), out, sparse=True).sum().backward()
    for name, places in (("t", [1, 5]), ("u", [2, 6])):
        expected[name][places] -= torch.tensor([[0.5], [1.0]])
        assert torch.equal(tables.rows(name), expected[name])


def test_a_step_of_the_rows_inside_their_backward_is_refused() -> None:
    """A hook on the handle runs before it is whole: rows stepped by the gradient of the backward before."""
    tables, ids = made(), batches(1)[0]
    rows, before = tables.as_optimizer(), tables.rows("t")
    hook = tables.handle.register_post_accumulate_grad_hook(lambda _: rows.step())
    with pytest.raises(stoker.ConfigError, match=r"step\(\) of the rows of t was called inside their backward"):
        loss_of(tables(ids), 0).backward()
    assert torch.equal(tables.rows("t"), before)
    hook.remove()
    loss_of(tables(ids), 0).backward()
    rows.step()
    assert tables.tick == 1


def test_lbfgs_over_the_handle_is_refused() -> None:
    """Its step of each parameter depends on the gradients of all."""
    tables, head, ids = made(), nn.Linear(FEATURES * DIM, 1), batches(1)[0]
    rows = tables.as_optimizer()
    both, alone = (torch.optim.LBFGS([*head.parameters(), *more], lr=0.1) for more in (tables.parameters(), ()))

    def closure() -> float:
        both.zero_grad()
        loss = head(tables(ids).flatten(1)).square().mean()
        loss.backward()
        return loss.item()

    with pytest.raises(stoker.ConfigError, match="LBFGS has the handle of t among its parameters"):
        both.step(closure)
    alone.step(closure)
    rows.step()
    assert tables.tick == 1


def test_a_copy_trains_on_its_own() -> None:
    model = nn.ModuleDict({"tables": made(), "head": nn.Linear(FEATURES * DIM, 1)})
    other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    for ids in batches(3):
        other["head"](other["tables"](ids).flatten(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    other.eval()["tables"](batches(1)[0])
    assert torch.equal(model["tables"].rows("t"), start())


def test_graphs_that_are_kept_pin_no_slots() -> None:
    """Logits collected without no_grad, and used after all."""
    tables, bags = made("few slots"), Bags()
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    kept = [tables(ids) for ids in batches(6, size=3)]
    theirs = [bags(ids) for ids in batches(6, size=3)]
    sum(loss_of(out, step) for step, out in enumerate(kept)).backward()  # type: ignore[union-attr]
    sum(loss_of(out, step) for step, out in enumerate(theirs)).backward()  # type: ignore[union-attr]
    optimizer.step()
    same_rows(tables, bags)


def test_an_example_with_more_rows_than_slots_says_what_helps() -> None:
    tables = EmbeddingTables(
        [TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM)],
        optimizer=stoker.SGD(lr=1.0),
        placement=stoker.Cached(slots=3),
    )
    with pytest.raises(stoker.StokerError, match=r"one example needs 4 .*Give more memory") as error:
        tables(torch.arange(4), torch.tensor([0, 4]))
    assert "spill" not in str(error.value)


def test_ids_changed_between_forward_and_backward_are_refused(where: str) -> None:
    tables, ids = made(where), batches(1)[0]
    out = tables(ids)
    ids[0, 0] = (ids[0, 0] + 1) % ROWS
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert torch.equal(tables.rows("t"), start())


@pytest.mark.slow
def test_a_backward_that_fails_moves_no_row(where: str) -> None:
    tables, bags = made(where), Bags()
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    first, second = batches(2)
    weights = torch.ones(4 * FEATURES, requires_grad=True)
    out = tables(first.reshape(-1), torch.arange(4 * FEATURES + 1), Fails.apply(weights))
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    assert torch.equal(tables.rows("t"), start())
    loss_of(tables(second), 1).backward()
    loss_of(bags(second), 1).backward()
    optimizer.step()
    same_rows(tables, bags)


@pytest.mark.parametrize("driven", [False, True])
def test_a_step_that_one_group_refuses_moves_no_row_of_another(driven: bool) -> None:
    """Each lookup fits the slots of the second group, but not both together."""
    configs = [TableConfig(name=f"t{dim}", num_embeddings=ROWS, embedding_dim=dim) for dim in (4, 8)]
    few = stoker.Cached(slots=6, spill="refuse")
    tables = EmbeddingTables(configs, optimizer=stoker.Adam(lr=0.5), placement={"t8": few})
    rows = tables.as_optimizer() if driven else None
    before = {name: tensor.clone() for name, tensor in tables.state_dict().items()}
    first, second = (torch.arange(5 * i, 5 * i + 5).view(5, 1).expand(5, 2) for i in range(2))
    loss = tables(first).sum() + tables(second).sum()
    if rows:
        loss.backward()
    with pytest.raises(stoker.StokerError, match="needs 10 distinct rows"):
        rows.step() if rows else loss.backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tables.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("early", [False, True])
def test_another_default_type_changes_nothing(dtype: torch.dtype, early: bool) -> None:
    """The gradient of the handle keeps its precision: clipping is as exact as with float32."""
    found, usual = [], torch.get_default_dtype()
    try:
        for other in (False, True):
            torch.set_default_dtype(dtype if other and early else usual)
            tables = made(optimizer=stoker.SGD(lr=0.5))
            torch.set_default_dtype(dtype if other else usual)
            rows = tables.as_optimizer()
            for step, ids in enumerate(batches(3)):
                (tables(ids) * (torch.arange(4, dtype=torch.float32) + step)).sum().backward()
                torch.nn.utils.clip_grad_norm_([tables.handle], 3.0)
                rows.step()
                rows.zero_grad()
            found.append(tables.rows("t"))
    finally:
        torch.set_default_dtype(usual)
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_another_default_device_changes_nothing(where: str, pooling: str) -> None:
    """Tables are where they are told to be, and what they keep in main memory stays there."""
    found, pairs = [], jagged()
    for device in ("cpu", "meta"):
        torch.set_default_device(device)
        try:
            tables = copy.deepcopy(made(where, optimizer=stoker.Adam(lr=0.5), pooling=pooling, padding_idx=1))
            rows = tables.as_optimizer()
            for ids, offsets in stoker.stage(pairs, tables, lookups=lambda pair: pair):
                tables(ids, offsets).square().sum().backward()
                rows.step()
                rows.zero_grad()
            found.append(tables.state_dict())
        finally:
            torch.set_default_device("cpu")
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())


@pytest.mark.parametrize("staged", [False, True])
def test_rows_whose_plan_was_interrupted_are_refused(staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan says where rows will be. After Ctrl-C between it and their moves, other rows are there."""
    tables, (first, second) = made("few slots"), batches(2)
    loss_of(tables(first), 0).backward()
    residency, stage = tables.groups[0].storage.residency, stoker.stage([second], tables, lookups=lambda ids: ids)

    def interrupted(plan: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            plan(*given)
            raise KeyboardInterrupt

        return call

    name = "plan" if staged else "plan_now"
    monkeypatch.setattr(residency, name, interrupted(getattr(residency, name)))
    with pytest.raises(KeyboardInterrupt):
        next(iter(stage)) if staged else tables(second)
    monkeypatch.undo()
    for use in (lambda: tables(second), lambda: tables.rows("t")):
        with pytest.raises(stoker.StokerError, match=r"rows could not be moved earlier \(KeyboardInterrupt\)"):
            use()


def test_an_update_that_is_interrupted_before_its_lease_ends_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows were not marked as changed, so they were lost when they left their slots."""
    tables, bags, ids = made("few slots"), Bags(), batches(1)[0]
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    backend = tables.groups[0].backend
    update = backend.update

    def interrupted(*given: Any) -> None:
        update(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(backend, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loss_of(tables(ids), 0).backward()
    monkeypatch.undo()
    gc.collect()
    loss_of(bags(ids), 0).backward()
    optimizer.step()
    same_rows(tables, bags)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [stoker.SGD, stoker.LAMB])
def test_slots_whose_return_is_interrupted_are_returned_once(
    late: bool, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else updated rows would be lost, or the slots would have rows of two batches."""
    tables, plain = (made(where, optimizer=kind(lr=0.5)) for where in ("cached", "device"))
    take_back, calls = SlottedRows._take_back, []

    def interrupted(*given: Any) -> None:
        calls.append(1)
        if late or len(calls) > 1:
            take_back(*given)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(SlottedRows, "_take_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loss_of(tables(batches(1)[0]), 0).backward()
    monkeypatch.undo()
    assert tables.groups[0].storage.available == 24
    tables.tick = 1
    for step, ids in enumerate(batches()):
        loss_of(plain(ids), step).backward()
        if step:
            loss_of(tables(ids), step).backward()
    assert torch.equal(tables.rows("t"), plain.rows("t"))


def test_an_exception_inside_accumulate_drops_its_gradients() -> None:
    tables = made()

    def interrupted() -> None:
        with tables.accumulate():
            loss_of(tables(batches(1)[0]), 0).backward()
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert tables.tick == 0
    assert torch.equal(tables.rows("t"), start())


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_that_accumulate_within_each_other_are_one_step(fails: bool) -> None:
    tables, bags = made(), Bags()
    first, second = batches(2)
    with tables.accumulate():
        loss_of(tables(first), 0).backward()
        with contextlib.suppress(KeyError), tables.accumulate():
            loss_of(tables(second), 1).backward()
            if fails:
                raise KeyError
        assert tables.tick == 0
    for step, ids in enumerate((first, second)):
        loss_of(bags(ids), step).backward()
    torch.optim.SGD(bags.parameters(), lr=0.5).step()
    same_rows(tables, bags)
    assert tables.tick == 1


def test_an_optimizer_for_a_scheduler_alone_leaves_a_block_its_gradients() -> None:
    tables, bags = made(), Bags()
    rows, (first, second) = tables.as_optimizer(in_backward=True), batches(2)
    with tables.accumulate():
        for ids in (first, second):
            loss_of(tables(ids), 0).backward()
            rows.step()
            rows.zero_grad()
            loss_of(bags(ids), 0).backward()
        assert tables.tick == 0
    torch.optim.SGD(bags.parameters(), lr=0.5).step()
    same_rows(tables, bags)
    assert tables.tick == 1


def test_gradients_that_wait_are_not_lost_by_another_way_to_step() -> None:
    tables, ids = made(), batches(1)[0]
    with tables.accumulate():
        loss_of(tables(ids), 0).backward()
        with pytest.raises(stoker.ConfigError, match="would lose them"):
            tables.as_optimizer()
    rows = tables.as_optimizer()
    loss_of(tables(ids), 0).backward()
    with pytest.raises(stoker.ConfigError, match="would lose them"):
        tables.as_optimizer(in_backward=True)
    tables.as_optimizer().step()
    rows.zero_grad()
    tables.as_optimizer(in_backward=True)
    assert tables.tick == 2


def test_a_closure_of_the_rows_has_gradients() -> None:
    tables, bags, ids = made(), Bags(), batches(1)[0]
    rows = tables.as_optimizer()

    def closure(module: Any) -> Tensor:
        loss = loss_of(module(ids), 0)
        loss.backward()
        return loss

    found = rows.step(lambda: closure(tables))  # type: ignore[arg-type, return-value]
    assert found == torch.optim.SGD(bags.parameters(), lr=0.5).step(lambda: closure(bags))
    same_rows(tables, bags)


@pytest.mark.slow
def test_rows_whose_gradient_is_zero_step_as_by_themselves() -> None:
    """A momentum moves them, whoever drives the steps."""
    alone, driven = (made(optimizer=stoker.MomentumSGD(lr=0.5, momentum=0.5)) for _ in range(2))
    rows, ids = driven.as_optimizer(), batches(1)[0]
    for factor in (1.0, 0.0, 0.0):
        before = driven.rows("t")
        for tables in (alone, driven):
            loss_of(tables(ids), 0).mul(factor).backward()
        rows.step()
        rows.zero_grad()
        assert torch.equal(driven.rows("t"), alone.rows("t"))
        assert not torch.equal(driven.rows("t"), before)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(where: str, reentrant: bool) -> None:
    tables, bags = made(where), Bags()
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    for step, ids in enumerate(batches(2)):
        seed = torch.ones(1, requires_grad=True)

        def section(seed: Tensor, ids: Tensor = ids) -> Tensor:
            return tables(ids) * seed

        loss_of(torch.utils.checkpoint.checkpoint(section, seed, use_reentrant=reentrant), step).backward()
        loss_of(bags(ids), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    same_rows(tables, bags)


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_activation_checkpoints_are_one_step(reentrant: bool) -> None:
    tables, bags = made(), Bags()
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    first, second = batches(2)
    seed = torch.ones(1, requires_grad=True)
    total = torch.zeros(())
    for step, ids in enumerate((first, second)):
        out = torch.utils.checkpoint.checkpoint(
            lambda seed, ids: tables(ids) * seed, seed, ids, use_reentrant=reentrant
        )
        total = total + loss_of(out, step)
    total.backward()
    (loss_of(bags(first), 0) + loss_of(bags(second), 1)).backward()
    optimizer.step()
    same_rows(tables, bags)
    assert tables.tick == 1


@pytest.mark.slow
@pytest.mark.parametrize("longest", [1, 5])
def test_max_pooling(where: str, longest: int) -> None:
    if where == "few slots":
        longest = 1
    tables, bags = made(where, pooling="max"), Bags("max")
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    for turn in range(2):
        with tables.accumulate():
            for step, (ids, offsets) in enumerate(jagged(3, seed=turn, longest=longest)):
                mine, theirs = tables(ids, offsets), bags(ids, offsets)
                assert torch.equal(mine, theirs)
                loss_of(mine, step).backward()
                loss_of(theirs, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    same_rows(tables, bags)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [0, -1])
def test_padding_idx(where: str, pooling: Any, padding: int) -> None:
    tables, bags = made(where, pooling=pooling, padding_idx=padding), Bags(pooling, padding_idx=padding)
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    absent = padding % ROWS
    for step, (ids, offsets) in enumerate(jagged(3, longest=2)):
        ids = torch.where(ids % 3 == 0, absent, ids)
        mine, theirs = tables(ids, offsets), bags(ids, offsets)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        loss_of(mine, step).backward()
        loss_of(theirs, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(tables.rows("t"), bags.bag.weight.detach(), rtol=1e-6, atol=1e-6)
    one = torch.tensor([[absent, 1], [2, absent]])
    torch.testing.assert_close(tables(one), bags(one), rtol=1e-6, atol=1e-6)


def test_a_wrong_padding_idx_is_refused() -> None:
    with pytest.raises(stoker.ConfigError, match="padding_idx is 40"):
        made(padding_idx=40)
    with pytest.raises(stoker.ConfigError, match="pooling 'min'"):
        made(pooling="min")


@pytest.mark.parametrize("wrong", ["cached", {"t": "cached"}, 7])
def test_a_placement_that_is_no_strategy_is_refused(wrong: Any) -> None:
    with pytest.raises(stoker.ConfigError, match=r"not a strategy. Give .*Cached\(fraction=0.1\)"):
        EmbeddingTables(
            [TableConfig(name="t", num_embeddings=4, embedding_dim=2)], optimizer=stoker.SGD(lr=1.0), placement=wrong
        )


def test_print_says_where_rows_are() -> None:
    assert "Cached, 24 slots for 40 rows, backed by file, on cpu" in repr(made("file"))
    assert "HotCold, 24 slots for 40 rows, 6 of them hot, backed by memory" in repr(made("hot and cold"))
    assert "Device, on cpu" in repr(made())


@pytest.mark.slow
def test_autocast(where: str) -> None:
    tables, bags = made(where), Bags()
    ours, theirs = nn.Linear(FEATURES * DIM, 1), nn.Linear(FEATURES * DIM, 1)
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    for ids in batches(3):
        with torch.autocast("cpu", torch.bfloat16):
            mine, other = ours(tables(ids).flatten(1)), theirs(bags(ids).flatten(1))
        mine.float().sum().backward()
        other.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(tables.rows("t"), bags.bag.weight.detach(), rtol=1e-5, atol=1e-5)


class TwoTables(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.head = nn.Linear(FEATURES * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.tables(ids).flatten(1) * 2))


@pytest.mark.slow
@pytest.mark.parametrize("placed", ["device", "cached"])
def test_compiled_whole_without_a_graph_break(placed: str) -> None:
    torch.manual_seed(0)
    plain, model = TwoTables(made("device")), TwoTables(made(placed))
    model.head.load_state_dict(plain.head.state_dict())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for ids in batches(4):
        for each in (compiled, plain):
            each(ids).square().mean().backward()
    torch.testing.assert_close(model.tables.rows("t"), plain.tables.rows("t"))
    assert model.tables.tick == plain.tables.tick == 4
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler imports modules of torch that warn
def test_compiled_steps_of_optimizers_log_nothing_of_the_rows() -> None:
    """The compiler calls what steps or checks the rows as it is, and does not try to compile it."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    (log := logging.getLogger("torch._dynamo")).addHandler(handler)
    try:
        for driven in (False, True):
            torch._dynamo.reset()
            model = TwoTables(made())
            steps = [torch.optim.SGD(model.head.parameters(), lr=0.1)]
            steps += [model.tables.as_optimizer()] if driven else []
            step = torch.compile(
                lambda steps=steps: [(each.step(), each.zero_grad()) for each in steps], backend="eager"
            )
            for ids in batches(3):
                model(ids).sum().backward()
                step()
            assert model.tables.tick == 3
    finally:
        log.removeHandler(handler)
        torch._dynamo.reset()
    assert [each for each in said if "will be ignored" not in each] == []  # torch's profiler says so of any optimizer


@pytest.mark.slow
def test_compiled_with_bags_and_learned_weights() -> None:
    plain, tables = made(), made()
    compiled = torch.compile(
        lambda i, o, w: (tables(i, o, w) * 3).sum(dim=(1, 2)), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for step, (ids, offsets) in enumerate(jagged(4)):
        weights = [torch.full((len(ids),), 2.0, requires_grad=True) for _ in range(2)]
        outs = [compiled(ids, offsets, weights[0]), (plain(ids, offsets, weights[1]) * 3).sum(dim=(1, 2))]
        for out in outs:
            (out * (step + 1)).sum().backward()
        assert torch.equal(weights[0].grad, weights[1].grad)
    assert torch.equal(tables.rows("t"), plain.rows("t"))
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_with_max_pooling_and_several_groups() -> None:
    """Of different widths, with padding."""
    configs = [
        TableConfig(name="a", num_embeddings=ROWS, embedding_dim=4, pooling="max", padding_idx=3),
        TableConfig(name="b", num_embeddings=ROWS, embedding_dim=2),
    ]
    plain, tables = (EmbeddingTables(configs, optimizer=stoker.SGD(lr=0.5)) for _ in range(2))
    compiled = torch.compile(lambda i, o: tables(i, o) * 3, fullgraph=True, backend="aot_eager", dynamic=True)
    for ids, offsets in jagged(4):
        assert torch.equal(compiled(ids, offsets), plain(ids, offsets) * 3)
        compiled(ids, offsets).sum().backward()
        (plain(ids, offsets) * 3).sum().backward()
    assert torch.equal(tables.rows("a"), plain.rows("a"))
    assert torch.equal(tables.rows("b"), plain.rows("b"))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [
    lambda tables, ids: (tables(ids) + tables(ids)).sum(),
    lambda tables, ids: tables(ids).square().sum() + tables(ids.clone()).square().sum(),
    lambda tables, ids: (2 * tables(ids) + 3 * tables(ids.flip(0))).sum(),
])  # fmt: skip
def test_compiled_lookups_that_are_equal_both_count(loss: Callable[[EmbeddingTables, Tensor], Tensor]) -> None:
    plain, tables = made(), made()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ids in batches(3):
        compiled(tables, ids).backward()
        loss(plain, ids).backward()
    assert torch.equal(tables.rows("t"), plain.rows("t"))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler writes C++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("driven", [False, True])
def test_compiled_code_may_reuse_the_memory_of_a_gradient(driven: bool) -> None:
    """Inductor writes other results into it before the rows step."""

    def loss(tables: EmbeddingTables, ids: Tensor, hidden: Tensor, one: Tensor, other: Tensor) -> Tensor:
        known = torch.relu(torch.relu(hidden @ one) @ other)
        return ((known * tables(ids).flatten(1)).sum(1) - 1).square().sum()

    plain, tables = made(), made()
    compiled = torch.compile(loss, fullgraph=True, dynamic=False)
    width = FEATURES * DIM
    weights = [torch.randint(-2, 3, (width, width)).float().requires_grad_() for _ in range(2)]
    before = plain.rows("t").clone()
    rows = [each.as_optimizer() for each in (plain, tables)] if driven else []
    for ids in batches(2):
        hidden = torch.randint(-2, 3, (len(ids), width)).float()
        for each, call in ((plain, loss), (tables, compiled)):
            call(each, ids, hidden, *weights).backward()
        for each in rows:
            each.step()
            each.zero_grad()
    assert not torch.equal(plain.rows("t"), before)
    torch.testing.assert_close(tables.rows("t"), plain.rows("t"))
    torch._dynamo.reset()


def test_the_operators_are_as_torch_wants_them() -> None:
    tables, (ids, offsets) = made(), jagged(1)[0]
    arguments = (tables.handle, ids, offsets, None, tables.number, False)
    torch.library.opcheck(torch.ops.stoker.look_up, arguments, test_utils=("test_schema", "test_faketensor"))


def staged(stream: Any, tables: EmbeddingTables, **options: Any) -> Any:
    return stoker.stage(stream, tables, lookups=lambda ids: ids, **options)


def run(tables: EmbeddingTables, stream: Any, steps: Iterator[int] | None = None) -> None:
    for step, ids in enumerate(stream):
        loss_of(tables(ids), step).backward()


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_evaluation_inside_a_staged_loop(where: str, background: bool) -> None:
    """Staged itself, over the same tables."""
    tables, plain = made(where), made()
    found = []
    for turn, (module, stream) in enumerate(
        ((tables, staged(batches(8), tables, lookahead=4, background=background)), (plain, batches(8)))
    ):
        scores = []
        for step, ids in enumerate(stream):
            loss_of(module(ids), step).backward()
            if step % 2:
                others = batches(3, seed=9)
                with torch.no_grad():
                    for other in others if turn else staged(others, module, lookahead=4, background=background):
                        scores.append(module(other).clone())
        found.append(scores)
    assert torch.equal(tables.rows("t"), plain.rows("t"))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_two_stages_that_take_turns(where: str, background: bool) -> None:
    tables, plain = made(where), made()
    streams = [staged(batches(6, seed=seed), tables, lookahead=3, background=background) for seed in (1, 2)]
    for step, pair in enumerate(zip(*streams, strict=True)):
        for ids in pair:
            loss_of(tables(ids), step).backward()
    for step, pair in enumerate(zip(batches(6, seed=1), batches(6, seed=2), strict=True)):
        for ids in pair:
            loss_of(plain(ids), step).backward()
    assert torch.equal(tables.rows("t"), plain.rows("t"))


@pytest.mark.slow
def test_an_iterator_that_was_left_open(where: str) -> None:
    """As in a notebook whose cell was interrupted."""
    tables, plain = made(where), made()
    left = iter(staged(batches(6, seed=3), tables, lookahead=4))
    loss_of(tables(next(left)), 0).backward()
    loss_of(plain(batches(6, seed=3)[0]), 0).backward()
    run(tables, staged(batches(6, seed=4), tables, lookahead=4))
    run(plain, batches(6, seed=4))
    loss_of(tables(next(left)), 1).backward()
    loss_of(plain(batches(6, seed=3)[1]), 1).backward()
    assert torch.equal(tables.rows("t"), plain.rows("t"))


def test_one_stage_read_by_two_loops_at_a_time() -> None:
    tables, plain = made("cached"), made()
    both = staged(batches(5), tables, lookahead=2)
    for step, (first, second) in enumerate(zip(both, both, strict=True)):
        for ids in (first, second):
            loss_of(tables(ids), step).backward()
    for step, ids in enumerate(batches(5)):
        for _ in range(2):
            loss_of(plain(ids), step).backward()
    assert torch.equal(tables.rows("t"), plain.rows("t"))


def given(ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Batch:
    return Batch(dense=torch.zeros((len(offsets) - 1) // FEATURES, 0), ids=ids, offsets=offsets, weights=weights)


@pytest.mark.slow
def test_a_staged_lookup_uses_the_weights_and_offsets_it_is_given(where: str) -> None:
    tables, plain = made(where), made()
    for module, stream in (
        (tables, stoker.stage([given(*each) for each in jagged()], tables, lookahead=3)),
        (plain, [given(*each) for each in jagged()]),
    ):
        for step, batch in enumerate(stream):
            weights = torch.full((len(batch.ids),), float(step), requires_grad=True)
            offsets = batch.offsets
            if step % 2:  # every bag but the first gives its ids to the one before it
                offsets = torch.cat([offsets[:1], offsets[2:], offsets[-1:]])
            loss_of(module(batch.ids, offsets, weights), step).backward()
    assert torch.equal(tables.rows("t"), plain.rows("t"))


@pytest.mark.slow
@pytest.mark.parametrize("through", ["torch", "numpy", "another tensor"])
def test_ids_changed_after_staging_are_looked_up_as_they_are(where: str, through: str) -> None:
    tables, plain = made(where), made()
    for module, stream in ((tables, staged(batches(), tables, lookahead=3)), (plain, batches())):
        for step, ids in enumerate(stream):
            if through == "torch":
                ids.add_(1).remainder_(ROWS)
            elif through == "numpy":
                ids.numpy()[:] = (ids.numpy() + 1) % ROWS
            else:
                ids = (ids + 1) % ROWS
            loss_of(module(ids), step).backward()
    assert torch.equal(tables.rows("t"), plain.rows("t"))


def test_streams_that_use_their_buffers_again_are_refused(tmp_path: Any) -> None:
    from stoker.testing import make_dataset

    make_dataset(tmp_path / "data", rows=64, num_dense=1, num_embeddings=[20], seed=0)
    data = stoker.Dataset(tmp_path / "data")
    model = stoker.DLRM(data.schema, embedding_dim=4, bottom=(4,), top=(4,), placement=stoker.Cached(slots=10))
    with pytest.raises(stoker.ConfigError, match="reuse=True"):
        stoker.stage(data.train.batches(8, reuse=True), model)
    tables, buffer = made("cached"), torch.zeros(4, FEATURES, dtype=torch.int64)

    def stream() -> Iterator[Tensor]:
        for ids in batches():
            buffer.numpy()[:] = ids.numpy()
            yield buffer

    with pytest.raises(stoker.ConfigError, match=r"overwrote the ids of batch 0 .*tensors of their own"):
        run(tables, staged(stream(), tables, lookahead=3))


def test_what_stage_cannot_read_is_refused() -> None:
    tables = made("cached")
    with pytest.raises(stoker.ConfigError, match=r"gives a tuple.*lookups=lambda item: item\[0\]"):
        next(iter(stoker.stage([(batches(1)[0], 1)], tables)))
    with pytest.raises(stoker.ConfigError, match="holds 0"):
        stoker.stage(batches(), nn.Linear(1, 1))
    with pytest.raises(stoker.ConfigError, match="holds 2"):
        stoker.stage(batches(), nn.ModuleList([made(), made()]))
    with pytest.raises(stoker.ConfigError, match="lookups gave str"):
        next(iter(stoker.stage([1], tables, lookups=lambda item: "ids")))
    model = nn.ModuleDict({"rows": tables})
    assert [
        tuple(item["ids"].shape)
        for item in stoker.stage([{"ids": batches(1)[0]}], model, lookups=lambda item: item["ids"])
    ] == [(4, 2)]


@pytest.mark.slow
def test_batches_of_a_dataloader_with_workers(where: str) -> None:
    tables, plain = made(where), made()
    loader = torch.utils.data.DataLoader(torch.stack(batches(8, size=1)).flatten(0, 1), batch_size=2, num_workers=1)
    run(tables, staged(loader, tables, lookahead=2))
    run(plain, loader)
    assert torch.equal(tables.rows("t"), plain.rows("t"))


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_stream_that_fails_does_so_behind_the_batches_before_it(where: str, background: bool) -> None:
    """As without a stage, which looks ahead."""
    tables, plain = made(where), made()

    def stream() -> Iterator[Tensor]:
        yield from batches(5)
        raise OSError("the disk is gone")

    for module, feed in ((tables, staged(stream(), tables, lookahead=3, background=background)), (plain, stream())):
        with pytest.raises(OSError, match="the disk is gone"):
            run(module, feed)
        assert module.tick == 5
    assert torch.equal(tables.rows("t"), plain.rows("t"))


@pytest.mark.slow
@pytest.mark.parametrize("from_stage", [False, True])
def test_ids_changed_by_numpy_between_forward_and_backward(where: str, from_stage: bool) -> None:
    """No version tells. nn.EmbeddingBag updates the rows of the new ids."""
    tables, plain = made(where), made()
    bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
    bag.weight.data.copy_(start())
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.5)
    feed = staged(batches(), tables, lookahead=2) if from_stage else batches()
    for module, stream in ((tables, feed), (plain, batches()), (bag, batches())):
        for step, ids in enumerate(stream):
            flat = ids.view(-1, 1) if module is bag else ids
            out = module(flat)
            ids.numpy()[:] = (ids.numpy() + 1) % ROWS
            loss_of(out.view(-1, FEATURES, DIM), step).backward()
            if module is bag:
                optimizer.step()
                optimizer.zero_grad()
    assert torch.equal(tables.rows("t"), plain.rows("t"))
    assert torch.equal(plain.rows("t"), bag.weight.detach())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["accumulate", "optimizer", "accumulate with an optimizer"])
def test_buffers_that_are_filled_again_between_micro_batches(where: str, how: str) -> None:
    """With other ids, offsets and weights, before rows step."""
    tables, bags = made(where), Bags()
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    rows = None if how == "accumulate" else tables.as_optimizer()
    ids, offsets = torch.zeros(8, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    weights = torch.zeros(8, requires_grad=True)

    def micro_batches(module: Any) -> None:
        for step, new in enumerate(batches(3)):
            ids.copy_(new.reshape(-1))
            offsets.copy_((torch.arange(9) + step).clamp(max=8) * (torch.arange(9) > 0))
            with torch.no_grad():
                weights.fill_(float(step))
            loss_of(module(ids, offsets, weights), step).backward()
        ids.zero_()

    for module in (tables, bags):
        with contextlib.nullcontext() if how == "optimizer" or module is bags else tables.accumulate():
            micro_batches(module)
    if rows is not None:
        rows.step()
    optimizer.step()
    same_rows(tables, bags)
    assert tables.tick == 1


def test_a_gradient_changed_in_place_before_rows_step_is_refused() -> None:
    tables, grad = made(), torch.ones(4, FEATURES, DIM)
    rows = tables.as_optimizer()
    tables(batches(1)[0]).backward(grad)
    grad.zero_()
    with pytest.raises(RuntimeError, match="changed in place between its backward and the step"):
        rows.step()


class _Buffered(torch.autograd.Function):
    """A loss of another library, whose gradients are all in one buffer."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, buffer: Tensor, factor: float) -> Tensor:
        ctx.buffer, ctx.factor = buffer, factor
        return factor * out.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.buffer.numpy()[:] = ctx.factor
        return ctx.buffer, None, None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["one backward", "accumulate", "as_optimizer"])
def test_a_gradient_in_a_buffer_of_numpy_is_kept(where: str, how: str) -> None:
    tables, still = made(where), made()
    buffer, pairs = torch.from_numpy(np.zeros((4, FEATURES, DIM), np.float32)), list(enumerate(batches(2), 1))
    rows = tables.as_optimizer() if how == "as_optimizer" else None
    with tables.accumulate():
        losses = [_Buffered.apply(tables(ids), buffer, factor) for factor, ids in pairs]  # type: ignore[no-untyped-call]
        for loss in [losses[0] + losses[1]] if how == "one backward" else losses:
            loss.backward()
        buffer.numpy()[:] = 9.0
    if rows is not None:
        rows.step()
    sum((factor * still(ids).sum() for factor, ids in pairs), torch.zeros(())).backward()
    assert torch.equal(tables.rows("t"), still.rows("t"))


def test_padding_in_the_middle_of_a_sequence_keeps_the_steps_around_it() -> None:
    """As nn.Embedding does; a mask of the batch knows no padding."""
    table = TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, padding_idx=0)
    tables = EmbeddingTables([table], optimizer=stoker.SGD(lr=0.5), steps={"t": 3})
    ids, offsets = torch.tensor([5, 0, 7, 8, 0]), torch.tensor([0, 3, 5])
    out, rows = tables(ids, offsets), tables.rows("t")
    zero = torch.zeros(DIM)
    assert torch.equal(out, torch.stack([torch.stack([rows[5], zero, rows[7]]), torch.stack([zero, rows[8], zero])]))


@pytest.mark.slow
@pytest.mark.parametrize("order", [("a0", "a1", "b0"), ("a0", "b0", "a1")], ids=["side by side", "interleaved"])
@pytest.mark.parametrize("examples", [1, 3])
@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("placement", [None, stoker.Cached(slots=9)], ids=["resident", "cached"])
def test_ids_changed_by_numpy_before_backward(
    order: tuple[str, ...], examples: int, jagged: bool, placement: Any
) -> None:
    """Where a call has several groups, the rows that were looked up step, whatever becomes of the caller's ids."""
    configs = [
        TableConfig(name="a", num_embeddings=ROWS, embedding_dim=4, features=("a0", "a1")),
        TableConfig(name="b", num_embeddings=ROWS, embedding_dim=2, features=("b0",)),
    ]
    found = []
    for change in (False, True):
        tables = EmbeddingTables(configs, optimizer=stoker.SGD(lr=0.5), placement=placement, features=order)
        ids = torch.tensor([[3, 5, 2]]).repeat(examples, 1)
        offsets = torch.arange(ids.numel() + 1) if jagged else None
        out = tables(ids.reshape(-1) if jagged else ids, offsets)
        if change:
            ids.numpy()[:] = 7
        out.sum().backward()
        found.append([tables.rows(name) for name in "ab"])
        tables.close()
    assert all(torch.equal(*rows) for rows in zip(*found, strict=True))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("view", [lambda w: torch.stack([w, -w], dim=1)[:, 0], lambda w: w[:1].expand(len(w))])
def test_weights_that_are_strided(backend: Any, view: Callable[[Tensor], Tensor]) -> None:
    """Also one number for all ids: nothing beyond it is read."""
    ((ids, offsets),) = jagged(1)
    found = []
    for change in (lambda w: w.contiguous(), lambda w: w):
        tables = EmbeddingTables(
            [TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, features=("a", "b"))],
            optimizer=stoker.SGD(lr=0.5), backend=backend,
        )  # fmt: skip
        weights = change(view(torch.arange(1.0, len(ids) + 1))).requires_grad_()
        out = tables(ids, offsets, weights)
        out.square().sum().backward()
        found.append((out.detach(), weights.grad, tables.rows("t")))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_smallest_id_is_refused_beside_a_table_with_padding() -> None:
    configs = [TableConfig(name="a", num_embeddings=9, embedding_dim=4, padding_idx=0)]
    configs.append(TableConfig(name="b", num_embeddings=9, embedding_dim=4))
    tables = EmbeddingTables(configs, optimizer=stoker.SGD(lr=0.5))
    with pytest.raises(IndexError, match="feature 'b'"):
        tables(torch.tensor([[0, torch.iinfo(torch.int64).min]]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("placement", [None, stoker.Cached(slots=9)])
def test_weights_of_other_types_with_several_groups(dtype: torch.dtype, placement: Any) -> None:
    """As attention gives them under autocast."""
    configs = [TableConfig(name=name, num_embeddings=ROWS, embedding_dim=dim) for name, dim in (("a", 4), ("b", 2))]
    tables = EmbeddingTables(configs, optimizer=stoker.SGD(lr=0.5), placement=placement)
    ids, offsets = jagged(1, longest=3)[0]
    weights = torch.full((len(ids),), 2.0)
    with torch.no_grad():
        assert torch.equal(tables(ids, offsets, weights.to(dtype)), tables(ids, offsets, weights))


@pytest.mark.slow
def test_compiled_saliency_in_eval_mode_is_no_clipping() -> None:
    tables = made()
    compiled = torch.compile(lambda ids: tables(ids) * 2, fullgraph=True, backend="aot_eager")
    compiled(batches(1)[0]).sum().backward()
    before = tables.rows("t")
    tables.eval()
    loss = compiled(batches(1)[0]).sum()
    with pytest.warns(UserWarning, match="eval mode"):
        loss.backward()
    assert torch.equal(tables.rows("t"), before)
    tables.train()
    compiled(batches(1)[0]).sum().backward()
    assert tables.tick == 2
    torch._dynamo.reset()


def test_messages_of_first_hours_say_what_to_write_instead() -> None:
    """What people try who know nn.EmbeddingBag."""

    def make(optimizer: stoker.RowOptimizer) -> stoker.EmbeddingTables:
        names = ["user", "item"]
        return stoker.EmbeddingTables(
            [stoker.TableConfig(name=name, num_embeddings=10, embedding_dim=4) for name in names], optimizer=optimizer
        )

    tables, ids = make(stoker.SGD(lr=0.1)), torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"tables\(batch\.ids, batch\.offsets, batch\.weights\)"):
        tables(stoker.Batch(dense=torch.zeros(2, 1), ids=ids))
    with pytest.raises(TypeError, match="a column for each feature"):
        tables({"user": ids[:, 0], "item": ids[:, 1]})
    with pytest.raises(TypeError, match=r"Give torch\.tensor\(\.\.\.\) of it"):
        tables(ids.tolist())
    assert not hasattr(tables, "weight")
    with pytest.raises(AttributeError, match=r"tables\.rows\('user'\)"):
        _ = tables.weight
    other = make(stoker.Adam(lr=0.1)).state_dict()
    with pytest.raises(RuntimeError, match=r"keeps exp_avg, exp_avg_sq, and SGD keeps nothing.*tables\.write\('user'"):
        tables.load_state_dict(other)
    tables.write("user", 0, other["user.weight"])
    bag = torch.nn.EmbeddingBag(10, 4)
    with pytest.raises(RuntimeError, match=r"tables\.write\('user', 0, state\['weight'\]\)"):
        tables.load_state_dict(bag.state_dict())
    # Without strict, keys may differ, as for any module.
    loaded = stoker.EmbeddingTables(tables.tables, optimizer=stoker.SGD(lr=0.1), seed=1)
    found = torch.nn.Sequential(loaded).load_state_dict({f"0.{k}": v for k, v in other.items()}, strict=False)
    assert len(found.unexpected_keys) == 4
    assert torch.equal(loaded.rows("item"), other["item.weight"])
    assert loaded.load_state_dict(bag.state_dict(), strict=False).missing_keys == ["user.weight", "item.weight", "tick"]


@pytest.mark.parametrize("own", [0.0, 1.0])
def test_a_look_at_a_sharded_gradient_asks_no_other_rank(own: float) -> None:
    """Ranks look at different moments, as Python frees optimizers, so they would wait for each other for ever."""

    class Sharded(Tensor):
        """As a DTensor: what reads a value of all ranks is a collective."""

        def to_local(self) -> Tensor:
            return torch.tensor([0.0, own])

        def any(self, *_: Any) -> Tensor:
            raise AssertionError("a collective")

    assert accumulation._any(torch.ones(4).as_subclass(Sharded)) == bool(own)
