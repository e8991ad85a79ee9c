"""Placement is not a model change: every placed run equals the resident one to the bit.

Programs are drawn from seeds (tests/tables/placed.py, tests/tables/programs.py): traces, capacities, lookahead, depth,
optimizers, pooling, groups, types, copies that arrive late and out of order, batches that do not fit, and what people
do around the tables: several stages, evaluation inside a loop, kept graphs, changed ids, exceptions, accumulation,
scalers.
`make test` runs the first 125, CI 250; `make soak SEEDS=20000:40000` runs others.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from campaigns import numbers
from checks import check
from placed import draw, placed_run, resident_run, same

from stoker.tables.autograd import Gradient
from stoker.tables.slots.slotted import Queue, SlottedRows
from stoker.tables.stepping import RowStepper
from stoker.tables.storage import Lease, Staged

PROGRAMS = numbers(1000)
BLOCK = 25
FOUND = (2031, 14963)  # programs of `make soak` that failed once


@pytest.fixture(autouse=True)
def one_thread():
    """The cases are tiny: threads would only wait for each other. Threads do not change results (tests/ops)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(len(PROGRAMS) // BLOCK))
def test_a_placed_run_equals_the_resident_one_or_bags_of_pytorch(block):
    for seed in PROGRAMS[block * BLOCK :][:BLOCK]:
        found = check(seed)
        assert not found, f"{found}\nRepeat it with: python tests/soak.py {seed} --show"


@pytest.mark.slow
@pytest.mark.parametrize("seed", FOUND)
def test_programs_that_failed_once(seed):
    assert not check(seed)


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


def with_leases_that_are_never_revoked(patch):
    patch.setattr(SlottedRows, "_revoke_one", lambda storage: False)


def with_revoked_leases_in_use(patch):
    patch.setattr(Lease, "begin", lambda lease: True)
    patch.setattr(Lease, "end", lambda lease: None)


def with_staged_lookups_of_what_was_announced(patch):
    patch.setattr(Staged, "fits", lambda staged, ids, offsets: True)


def with_staged_weights_and_offsets(patch):
    patch.setattr(Lease, "use", lambda lease, bags: None)


def with_leases_for_whatever_ids(patch):
    patch.setattr(Lease, "serves", lambda lease, ids: True)


def with_one_queue_for_all_stages(patch):
    patch.setattr(SlottedRows, "queue", lambda storage: (storage._queues or [Queue(storage)])[0])


def with_a_step_for_each_lookup(patch):
    patch.setattr(RowStepper, "collect", lambda steps, gradient, enclosing: steps.end_backward([gradient], -1))


def with_kept_gradients_of_buffers(patch):
    patch.setattr(Gradient, "kept", lambda gradient: gradient)


STORAGE = [without_fence, without_protection, without_last_writeback, without_state, without_hot_rows]
TABLES = [
    with_leases_that_are_never_revoked, with_revoked_leases_in_use, with_staged_lookups_of_what_was_announced,
    with_staged_weights_and_offsets, with_leases_for_whatever_ids, with_one_queue_for_all_stages,
    with_a_step_for_each_lookup, with_kept_gradients_of_buffers,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [*STORAGE, *TABLES])
def test_the_suite_notices_a_safeguard_that_is_missing(mutation):
    """The proof that the programs above can fail: each safeguard is removed in turn, from the placed run."""
    for seed in dict.fromkeys([1, 3, 11, 17, 23, 42, *range(800)]):  # the first have noticed something once
        case = draw(seed, backend="reference")
        expected, found = resident_run(case), None
        with pytest.MonkeyPatch.context() as patch, suppress(Exception):
            if mutation in TABLES:
                mutation(patch)
            found = placed_run(case, mutation if mutation in STORAGE else None)
        if found is None or not same(expected, found):
            return
    pytest.fail(f"{mutation.__name__} went unnoticed")
