"""Plans are integers: the fast planner must make exactly those of the plain one, and both must keep the rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import plain

from stoker.base.errors import ConfigError
from stoker.ops.distinct import to_slots
from stoker.tables.slots import sharded, sharded_kernels
from stoker.tables.slots.fast_residency import ADDRESS, USE, FastResidency
from stoker.tables.slots.residency import FARTHEST, LANDED, NEVER, Residency, SlotPlan
from stoker.tables.slots.sharded import RowsByShard, ShardedResidency, count_shards, join
from stoker.tables.slots.slotted import make_residency


def announced_rows(residency: Residency | ShardedResidency) -> int:
    """Count the distinct rows that announced batches will use."""
    if isinstance(residency, ShardedResidency):
        return sum(map(announced_rows, residency.shards))
    if isinstance(residency, FastResidency):
        directory = residency._directory
        return int(((directory[:, ADDRESS] > 0) & (directory[:, USE] >= 0)).sum())
    return sum(bool(item.uses) for item in residency._rows.values())


def divide(rows: np.ndarray, shards: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Define the kernel."""
    blocks = rows // shards
    shard = (rows ^ sharded._turn(blocks, shards)) & (shards - 1)
    order = np.argsort(shard, kind="stable")
    return blocks[order], order.astype(np.int32), np.searchsorted(shard[order], np.arange(shards + 1))


def merge(
    made: SlotPlan, order: np.ndarray, shard: int, shards: int, first: int, slots: np.ndarray
) -> list[np.ndarray]:
    """Define the kernel."""
    slots[order] = made.slots + first
    fetched, gone = join(made.fetch_rows, shard, shards), join(made.evict_rows, shard, shards)
    return [fetched, made.fetch_slots + first, gone, made.evict_slots + first]


def pick(slots: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Define the kernel."""
    return slots[(slots >= start) & (slots < stop)] - start


def same_plans(a: SlotPlan | None, b: SlotPlan | None) -> bool:
    if a is None or b is None:
        return a is b
    # Evicted rows may be named in any order; everything else is fixed.
    gone_a, gone_b = (sorted(zip(p.evict_rows.tolist(), p.evict_slots.tolist(), strict=True)) for p in (a, b))
    return (
        gone_a == gone_b
        and (a.number, a.fence) == (b.number, b.fence)
        and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("slots", "fetch_rows", "fetch_slots"))
    )


@st.composite
def scripts(draw):
    tables = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    total = sum(tables)
    slots = draw(st.integers(1, total))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    steps = []
    for _ in range(draw(st.integers(1, 60))):
        kind = draw(
            st.sampled_from(["announce"] * 4 + ["plan"] * 4 + ["release"] * 4 + ["now", "skip", "cancel", "take"])
        )
        most = max(1, min(slots, total) * draw(st.sampled_from([1, 2, 4])) // 4)
        rows = random.permutation(np.minimum(random.zipf(1.3, most) - 1, total - 1))
        steps.append((kind, np.array(list(dict.fromkeys(rows.tolist())), np.int64), draw(st.booleans())))
    hints = draw(st.sampled_from(["none", "exact", "wrong", "some"]))
    return tables, slots, draw(st.booleans()), draw(st.sampled_from([0, LANDED])), steps, hinted(steps, hints, random)


def next_uses(batches: list[np.ndarray]) -> list[np.ndarray]:
    """For each batch and row: how many batches later it is used again, 0 if it is not."""
    found = []
    for t, rows in enumerate(batches):
        later = [next((s - t for s in range(t + 1, len(batches)) if row in batches[s]), 0) for row in rows.tolist()]
        found.append(np.array(later, np.int32))
    return found


def hinted(steps, kind, random):
    """The hints of each announcement of a script; exact ones are so if nothing is skipped."""
    announced = [rows for what, rows, _ in steps if what == "announce"]
    exact = next_uses(announced)
    wrong = [random.integers(-2, random.choice([2, 5, 2**21]), len(rows)).astype(np.int32) for rows in announced]
    return {
        "none": [None] * len(announced),
        "exact": exact,
        "wrong": wrong,
        "some": [random.choice(np.array([None, a, b], object)) for a, b in zip(exact, wrong, strict=True)],
    }[kind]


class Model:
    """What both residencies inherit, kept apart from them: which batches wait, and when their rows are used next."""

    def __init__(self) -> None:
        self.window: list[tuple[int, list[int], list[int]]] = []  # step, rows, their hinted steps
        self.step = 0
        self.hints: dict[int, int] = {}  # resident row -> hinted step

    def announce(self, rows: np.ndarray, upcoming: np.ndarray | None) -> None:
        hints = [0] * len(rows) if upcoming is None else upcoming.tolist()
        hinted = [self.step + min(hint, FARTHEST) if hint > 0 else NEVER for hint in hints]
        self.window.append((self.step, rows.tolist(), hinted))
        self.step += 1

    def take(self, resident: set[int]) -> None:
        """The first batch was planned or skipped, which left ``resident``: its hints hold for rows in their slots."""
        _, rows, hints = self.window.pop(0)
        self.hints.update(zip(rows, hints, strict=True))
        self.keep(resident)

    def keep(self, resident: set[int]) -> None:
        """Rows that left took their hints along."""
        self.hints = {row: hint for row, hint in self.hints.items() if row in resident}

    def cancel(self) -> None:
        self.window.clear()
        self.hints.clear()

    def next_use(self, row: int) -> int:
        """Its first announced use, or what was hinted, unless that has passed."""
        announced = next((step for step, rows, _ in self.window if row in rows), None)
        hint = self.hints.get(row, NEVER)
        return announced if announced is not None else hint if hint >= self.first else NEVER

    @property
    def first(self) -> int:
        return self.window[0][0] if self.window else self.step

    def check(self, residency: Residency) -> None:
        """A residency says when rows are used next as this one does; outdated hints may be kept for a while."""
        assert residency.announced == len(self.window)
        if residency.transient:  # coming uses make no difference
            assert announced_rows(residency) == 0
            return
        assert announced_rows(residency) == len({row for _, rows, _ in self.window for row in rows})
        if not isinstance(residency, FastResidency):  # shards count blocks of rows
            return
        for row, step in residency._slots[residency.row_in_slot >= 0, :2].tolist():
            said = NEVER if step < 0 or step < self.first else step
            assert said == self.next_use(row)


@pytest.mark.slow
@settings(max_examples=scaled(300), deadline=None)
@given(scripts())
def test_fast_plans_equal_plain_ones_and_keep_the_rules(script):
    check(*script, make_residency)


@pytest.mark.slow
@settings(max_examples=scaled(300), deadline=None)
@given(scripts(), st.sampled_from([2, 4, 8]))
def test_shards_of_either_kind_make_the_same_plans_and_keep_the_rules(script, shards):
    def make(first, slots, *, transient, fast):
        made = ShardedResidency(first, slots, transient=transient, shards=shards)
        if not fast:
            made.shards = plain(made)
            made._divide, made._merge, made._pick = divide, merge, pick
        return made

    check(*script, make)


def check(tables, slots, transient, landing, steps, hints, make):
    """Carry out a script with both residencies that ``make`` returns."""
    left_hints = iter(hints)
    first = np.concatenate([[0], np.cumsum(tables)])
    plain, fast = (make(first, slots, transient=transient, fast=f) for f in (False, True))
    for residency in (plain, fast):
        residency.set_up(landing)
    held: list[tuple[np.ndarray, np.ndarray]] = []  # slots and rows of batches in flight
    content: dict[int, int] = {}  # slot -> row, as the plans say
    changed: set[int] = set()  # slots
    left: dict[int, int] = {}  # row -> plan that wrote it home
    model = Model()
    for kind, rows, flag in steps:
        if kind == "announce":
            upcoming = next(left_hints)
            plain.announce(rows, upcoming)
            fast.announce(rows, upcoming)
            model.announce(rows, upcoming)
        elif kind in ("plan", "now"):
            if kind == "plan" and not plain.announced:
                continue
            wanted = rows if kind == "now" else np.array(model.window[0][1], np.int64)
            a = plain.plan() if kind == "plan" else plain.plan_now(rows)
            planned = fast.plan() if kind == "plan" else fast.plan_now(rows)
            assert same_plans(a, planned)
            if a is None:
                continue
            busy = {slot for slots_, _ in held for slot in slots_.tolist()}
            assert not busy & set(a.evict_slots.tolist()), "a row in flight was evicted"
            for row, slot in zip(a.evict_rows.tolist(), a.evict_slots.tolist(), strict=True):
                assert content[slot] == row
                changed.remove(slot)
                left[row] = a.number
            left_before = dict(left)
            for row, slot in zip(a.fetch_rows.tolist(), a.fetch_slots.tolist(), strict=True):
                assert slot not in busy | changed
                content[slot] = row
                if left.pop(row, -LANDED) > a.number - landing:  # once waited for, it has landed
                    assert a.fence >= left_before[row], "a fetch could overtake a writeback"
            assert [content[slot] for slot in a.slots.tolist()] == wanted.tolist()
            held.append((a.slots, wanted))
        elif kind == "release" and held:
            slots_, _ = held.pop(0)
            for residency in (plain, fast):
                residency.release(slots_, changed=flag)
            changed |= set(slots_.tolist()) if flag else set()
        elif kind == "skip" and plain.announced:
            plain.skip()
            fast.skip()
        elif kind == "cancel":
            plain.cancel()
            fast.cancel()
        elif kind == "take":
            taken = plain.take_changed()
            assert np.array_equal(taken, fast.take_changed())
            assert sorted(taken.tolist()) == sorted(changed)
            again = taken[: flag * len(taken) : 2]  # as if they could not be stored
            for residency in (plain, fast):
                residency.mark_changed(again)
            changed = set(again.tolist())
        resident = set(plain.row_in_slot.tolist())
        if kind in ("plan", "skip") and len(model.window) > plain.announced:
            model.take(resident)
        elif kind == "cancel":
            model.cancel()
        model.keep(resident)
        model.check(fast)
        assert (plain.free, plain.announced) == (fast.free, fast.announced)
        assert announced_rows(plain) == announced_rows(fast)
        assert plain.guesses == fast.guesses
        assert np.array_equal(plain.row_in_slot, fast.row_in_slot)
        assert all(row in (-1, content.get(slot)) for slot, row in enumerate(plain.row_in_slot.tolist()))


def belady_misses(batches: list[np.ndarray], slots: int) -> int:
    """Farthest next use leaves; every batch is a set."""
    resident: set[int] = set()
    misses = 0
    for t, rows in enumerate(batches):
        wanted = set(rows.tolist())
        misses += len(wanted - resident)

        def next_use(row: int, t: int = t) -> int:
            return next((s for s in range(t + 1, len(batches)) if row in batches[s]), 10**9)

        keep = sorted(resident - wanted, key=next_use)
        resident = wanted | set(keep[: max(0, slots - len(wanted))])
    return misses


def drive(
    residency: Residency, batches: list[np.ndarray], lookahead: int, hints: list[np.ndarray] | None = None
) -> int:
    misses, ahead = 0, 0
    for t in range(len(batches)):
        while ahead < len(batches) and ahead <= t + lookahead:
            residency.announce(batches[ahead], None if hints is None else hints[ahead])
            ahead += 1
        plan = residency.plan()
        assert plan is not None
        misses += len(plan.fetch_rows)
        residency.release(plan.slots, changed=True)
    return misses


@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
def test_knowing_the_whole_future_is_optimal(fast):
    random = np.random.default_rng(1)
    for _ in range(20):
        batches = [np.unique(np.minimum(random.zipf(1.2, 12), 100) - 1) for _ in range(40)]
        best = belady_misses(batches, 20)
        assert drive(make_residency([0, 100], 20, fast=fast), batches, 40) == best
        assert drive(make_residency([0, 100], 20, fast=fast), batches, 0) >= best


@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1, 5])
def test_exact_hints_are_as_good_as_the_whole_future(fast, lookahead):
    random = np.random.default_rng(2)
    for _ in range(20):
        batches = [np.unique(np.minimum(random.zipf(1.2, 12), 100) - 1) for _ in range(40)]
        best = belady_misses(batches, 20)
        assert drive(make_residency([0, 100], 20, fast=fast), batches, lookahead, next_uses(batches)) == best


@pytest.mark.parametrize("fast", [False, True])
def test_a_wrong_hint_keeps_no_row_for_ever(fast):
    """Row 99 is said to be used at the very next step, and never is: it leaves once its slot is worth looking at."""
    residency = make_residency([0, 100], 8, fast=fast)
    residency.announce(np.array([99]), np.array([1], np.int32))
    residency.release(residency.plan().slots, changed=True)
    gone = None
    for step in range(40):
        rows = np.array([2 * step % 30, 2 * step % 30 + 1])
        residency.announce(rows, np.full(2, 15, np.int32))  # right: they come again after 15 steps
        plan = residency.plan()
        residency.release(plan.slots, changed=True)
        if 99 in plan.evict_rows.tolist():
            gone = step
            break
    assert gone is not None


@pytest.mark.parametrize("fast", [False, True])
def test_hints_end_with_cancel_and_outlive_a_skipped_batch(fast):
    for how, stays in (("skip", 5), ("cancel", 1)):
        residency = make_residency([0, 10], 3, fast=fast)
        first = residency.plan_now(np.array([1, 5]))
        residency.release(first.slots, changed=True)
        residency.announce(np.array([1, 5]), np.array([9, 2], np.int32))
        getattr(residency, how)()
        plan = residency.plan_now(np.array([2, 3]))  # one of 1 and 5 must leave
        assert residency.row_in_slot.tolist().count(stays) == 1
        assert plan.evict_rows.tolist() == [6 - stays]


@pytest.mark.parametrize("fast", [False, True])
def test_as_many_hints_as_rows(fast):
    residency = make_residency([0, 10], 3, fast=fast)
    with pytest.raises(ConfigError, match="the stream did not give the same batches twice"):
        residency.announce(np.array([1, 5]), np.array([9], np.int32))
    assert residency.announced == 0


@pytest.mark.parametrize("fast", [False, True])
def test_among_rows_without_a_known_use_the_rarest_leaves(fast):
    residency = make_residency([0, 10, 14], 4, fast=fast)
    first = residency.plan_now(np.array([3, 1, 12, 9]))  # rows 3, 1, 9 of the first table, row 2 of the second
    residency.release(first.slots, changed=True)
    second = residency.plan_now(np.array([0, 2, 4]))
    assert second.evict_rows.tolist() == [9, 3, 12] or sorted(second.evict_rows.tolist()) == [3, 9, 12]
    assert residency.row_in_slot.tolist().count(1) == 1


@pytest.mark.parametrize("fast", [False, True])
def test_a_transient_residency_keeps_only_what_is_in_flight(fast):
    residency = make_residency([0, 100], 10, transient=True, fast=fast)
    plan = residency.plan_now(np.arange(5))
    residency.release(plan.slots, changed=True)
    plan = residency.plan_now(np.arange(4, 8))
    assert sorted(plan.evict_rows.tolist()) == [0, 1, 2, 3]
    assert plan.hits == 1


def test_memory_does_not_grow_with_the_table():
    """Two thousand million rows cost a few megabytes until they are touched."""
    residency = make_residency([0, 2 * 10**9], 100, fast=True)
    plan = residency.plan_now(np.array([0, 10**9, 2 * 10**9 - 1]))
    residency.release(plan.slots, changed=True)
    assert residency.plan_now(np.arange(10**9 + 1, 10**9 + 99)).evict_rows.tolist() == [2 * 10**9 - 1]


@pytest.mark.slow
@pytest.mark.parametrize("hints", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_windows_wider_than_the_slots_keep_the_order(seed, hints):
    """Hundreds of batches with far more known uses than slots: keys go stale, the heap overflows and is rebuilt."""
    random = np.random.default_rng(seed)
    first = np.array([0, 300, 340, 700])
    plain, fast = (make_residency(first, 70, fast=f) for f in (False, True))
    flying: list[tuple[np.ndarray, np.ndarray]] = []
    for step in range(400):
        # Now and then the window runs dry, so that the heap is not needed for a while.
        target = 12 if step // 60 % 2 == 0 else 1
        while plain.announced < target:
            rows = np.unique(np.minimum(random.zipf(1.1, 24) - 1, 699) * 37 % 700)
            upcoming = random.integers(0, 200, len(rows)).astype(np.int32) if hints else None
            plain.announce(rows, upcoming)
            fast.announce(rows, upcoming)
        plans = plain.plan(), fast.plan()
        assert same_plans(*plans)
        assert plans[0] is not None
        flying.append((plans[0].slots, plans[1].slots))
        if len(flying) > step % 3:
            for side, slots in zip((plain, fast), flying.pop(0), strict=True):
                side.release(slots, changed=bool(step % 2))
        while len(flying) > 1:
            for side, slots in zip((plain, fast), flying.pop(0), strict=True):
                side.release(slots, changed=True)


def test_more_rows_than_keys_of_the_heap_can_tell_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 68,719,476,736"):
        make_residency([0, 2**36 + 1], 10, fast=True)


@settings(max_examples=scaled(100), deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=4), st.sampled_from([2, 4, 8]))
def test_every_row_is_a_block_of_one_shard(tables, shards):
    first = np.concatenate([[0], np.cumsum(tables)])
    if not first[-1]:
        return
    rows = np.random.default_rng(len(tables)).permutation(first[-1])
    parts, fast = RowsByShard(*divide(rows, shards)), sharded_kernels.divide(rows, shards)
    assert all(np.array_equal(a, b) for a, b in zip(parts, fast, strict=True))
    made = ShardedResidency(first, max(1, first[-1] // 2), transient=False, shards=shards)
    for shard in range(shards):
        own = slice(*parts.begins[shard : shard + 2])
        assert np.array_equal(join(parts.blocks[own], shard, shards), rows[parts.order[own]])
        # The blocks of a shard are 0 to one below their number, table by table as in all.
        blocks, table = np.sort(parts.blocks[own]), np.searchsorted(first, rows[parts.order[own]], side="right")
        assert np.array_equal(blocks, np.arange(made.shards[shard].first_row[-1]))
        inside = np.searchsorted(made.shards[shard].first_row, parts.blocks[own], side="right")
        assert np.array_equal(inside, table)


def test_slots_and_cores_decide_how_many_shards_there_are(monkeypatch):
    slots = (1, 2**17 - 1, 2**17, 2**18, 2**19, 2**30)
    assert [count_shards(each, 2**40, cores=4) for each in slots] == [1, 1, 2, 4, 8, 8]
    assert {count_shards(each, 2**40, cores=3) for each in slots} == {1}
    assert count_shards(95 * 10**5, 10**7, cores=16) == 1  # hardly any row is evicted
    for cores, kind in ((2, FastResidency), (4, ShardedResidency)):
        monkeypatch.setattr(sharded, "_cores", lambda cores=cores: cores)
        assert type(make_residency([0, 2**20], 2**18)) is kind


@pytest.mark.parametrize("fast", [False, True])
def test_shards_plan_a_batch_without_rows(fast):
    made = ShardedResidency(np.array([0, 100]), 40, transient=False, shards=4)
    made.shards = made.shards if fast else plain(made)
    made.announce(np.zeros(0, np.int64))
    made.release(made.plan().slots, changed=True)
    assert made.plan_now(np.arange(5)).hits == 0


@pytest.mark.parametrize("step", [1, 2, 8, 64, 1000, 2**20])
def test_regular_ids_are_spread_over_all_shards(step):
    parts = RowsByShard(*divide(np.arange(8000, dtype=np.int64) * step + 3, 8))
    sizes = np.diff(parts.begins)
    assert sizes.min() > 800
    assert sizes.max() < 1200


def test_shards_miss_hardly_more_than_one_residency():
    random = np.random.default_rng(3)
    batches = [np.unique(random.zipf(1.2, 3000) % 200_000) for _ in range(60)]
    first = np.array([0, 120_000, 200_000])
    one = drive(FastResidency(first, 16_000, transient=False), batches, 8)
    eight = drive(ShardedResidency(first, 16_000, transient=False, shards=8), batches, 8)
    assert one < 0.8 * sum(map(len, batches))
    assert abs(eight / one - 1) < 0.003


def test_a_batch_that_fits_in_all_shards_but_one_changes_nothing():
    made = ShardedResidency(np.array([0, 800]), 160, transient=False, shards=8)
    alone = join(np.arange(30), 5, 8)  # all in one shard of 20 slots
    before = made.plan_now(np.arange(40, 100))
    assert made.plan_now(alone) is None
    made.release(before.slots, changed=True)
    assert made.plan_now(np.arange(40, 100)).hits == 60
    assert made.plan_now(alone[:3]) is not None


def test_threads_make_the_plans_of_one():
    random = np.random.default_rng(4)
    batches = [np.unique(random.zipf(1.2, 2000) % 50_000) for _ in range(20)]
    found = []
    for threads in (1, 4):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            made = ShardedResidency(np.array([0, 50_000]), 8000, transient=False, shards=8)
            plans = []
            for rows in batches:
                made.announce(rows)
                plans.append(made.plan())
                made.release(plans[-1].slots, changed=True)
        finally:
            torch.set_num_threads(before)
        found.append(plans)
    for one, three in zip(*found, strict=True):
        assert same_plans(one, three)
        assert np.array_equal(one.evict_rows, three.evict_rows)


def test_threads_replace_rows_by_slots_as_one_does():
    random = np.random.default_rng(5)
    slots = random.permutation(5000)
    which = random.integers(-30, 5000, (40_000, 4)).astype(np.int32)
    expected = np.where(which < 0, -1 - which, slots[np.maximum(which, 0)] + 30)
    before = torch.get_num_threads()
    torch.set_num_threads(12)
    try:
        found = to_slots(torch.from_numpy(which.copy()), slots, 30)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(found.numpy(), expected)
