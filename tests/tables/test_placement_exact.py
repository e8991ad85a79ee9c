"""Placement is not a model change: every placed run equals the resident one to the bit.

Cases are drawn in tests/tables/placed.py: traces, capacities, lookahead, depth, optimizers, pooling, groups, types,
copies that arrive late and out of order, batches that do not fit. `make soak` runs 100,000.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from placed import Case, draw, placed_run, resident_run, same

CASES = int(os.environ.get("STOKER_SOAK", "1000"))
BLOCK = 50


@pytest.fixture(autouse=True)
def one_thread():
    """The cases are tiny: threads would only wait for each other. Threads do not change results (tests/ops)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compare(case: Case) -> bool:
    return same(resident_run(case), placed_run(case))


@pytest.mark.parametrize("block", range(-(-CASES // BLOCK)))
def test_a_placed_run_equals_the_resident_one(block):
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        case = draw(seed, backend="auto" if seed % 2 else "reference")
        assert compare(case), f"seed {seed}: the placed run differs: {case.strategy}, {case.optimizer}"


def spans_of_steps(spans: list[tuple[int, int]], steps: int) -> list[list[tuple[int, int]]]:
    """For every step the ids that each example has there: one or none, the newest in the last step."""
    place = [[end - steps + step for _, end in spans] for step in range(steps)]
    return [
        [(at, at + 1) if at >= begin else (begin, begin) for at, (begin, _) in zip(row, spans, strict=True)]
        for row in place
    ]


def bag_run(case: Case) -> dict[str, np.ndarray]:
    """The same training with nn.EmbeddingBag and torch.optim.SGD, on integers: every sum is exact."""
    bags, features = {}, [name for table in case.tables for name in table.features]
    owner = {name: table for table in case.tables for name in table.features}
    for table in case.tables:
        bag = torch.nn.EmbeddingBag(table.num_embeddings, table.embedding_dim, mode="sum", sparse=True)
        rows = torch.arange(table.num_embeddings * table.embedding_dim).view(table.num_embeddings, -1) % 13 - 6.0
        bag.weight.data.copy_(rows)
        bags[table.name] = bag
    optimizer = torch.optim.SGD([bag.weight for bag in bags.values()], lr=1.0)
    for batch, grad in zip(case.batches, case.grads, strict=True):
        size = len(batch)
        offsets = torch.arange(batch.ids.numel() + 1) if batch.offsets is None else batch.offsets
        flat = batch.ids.reshape(-1).long()
        loss, position = torch.zeros(()), 0
        for f, name in enumerate(features):
            spans = [
                (int(offsets[b * len(features) + f]), int(offsets[b * len(features) + f + 1])) for b in range(size)
            ]
            for span in spans_of_steps(spans, case.steps[name]) if name in case.steps else [spans]:
                ids = torch.cat([flat[begin:end] for begin, end in span])
                starts = torch.tensor([0, *np.cumsum([end - begin for begin, end in span])[:-1].tolist()])
                loss = loss + (bags[owner[name].name](ids, starts) * grad[:, position]).sum()
                position += 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: bag.weight.detach().numpy() for name, bag in bags.items()}


@pytest.mark.parametrize("block", range(4))
def test_a_placed_run_equals_embedding_bags_exactly_on_integers(block):
    for seed in range(block * 25, (block + 1) * 25):
        case = draw(seed, integers=True)
        _, found = placed_run(case)
        expected = bag_run(case)
        for table in case.tables:
            parts = [found[key] for key in sorted(
                (key for key in found if key.startswith(f"{table.name}.") and key.count(".") == 1),
                key=lambda key: int(key.split(".")[1]),
            )]  # fmt: skip
            assert np.array_equal(torch.cat(parts).numpy(), expected[table.name]), f"seed {seed}"


def without_fence(storage):
    storage._link.settle = lambda plan: None


def without_protection(storage):
    plan, plan_now = storage.residency.plan, storage.residency.plan_now

    def unprotected(make):
        def made(*given):
            found = make(*given)
            if found is not None:
                storage.residency.release(found.slots, changed=True)
            return found

        return made

    storage.residency.plan, storage.residency.plan_now = unprotected(plan), unprotected(plan_now)
    storage._take_back = lambda slots, changed: None


def without_last_writeback(storage):
    storage.flush = lambda: None


def without_state(storage):
    fetch = storage._link.fetch

    def only_weights(rows, slots):
        before = {name: tensor.clone() for name, tensor in storage.state.items()}
        fetch(rows, slots)
        storage._link.ready()
        for name, tensor in before.items():
            storage.state[name].copy_(tensor)

    storage._link.fetch = only_weights


def without_hot_rows(storage):
    """They are read from home, where they were never written."""
    storage.read = lambda start, stop: (storage.flush(), storage.home.read(start, stop))[1]


@pytest.mark.parametrize(
    "mutation", [without_fence, without_protection, without_last_writeback, without_state, without_hot_rows]
)
def test_the_suite_notices_a_broken_storage(mutation):
    """The proof that the cases above can fail: each safeguard is removed in turn."""
    wrong = 0
    for seed in range(150):
        case = draw(seed)
        try:
            wrong += not same(resident_run(case), placed_run(case, mutation))
        except (AssertionError, IndexError, RuntimeError, KeyError):
            wrong += 1
        if wrong > 2:
            return
    pytest.fail(f"{mutation.__name__} went unnoticed")
