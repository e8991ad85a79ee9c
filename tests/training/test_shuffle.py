"""The Shuffle Scheduler: every branch of Equation 5, its limits, and which batches follow each other."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.errors import ConfigError
from stoker.training.shuffle import Segment, ShuffleScheduler


def rates(losses: list[float], **settings: float) -> list[float]:
    """R behind each of these losses."""
    scheduler = ShuffleScheduler(**settings)  # type: ignore[arg-type]
    scheduler.begin(1000, 1000)
    scheduler.next_segment()
    found = []
    for loss in losses:
        before, decision = scheduler.rate, scheduler.swap(loss)
        assert decision.rate_before == before
        assert decision.rate_after == scheduler.rate
        found.append(scheduler.rate)
        scheduler.next_segment()
    return found


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.7], [50]),  # nothing to compare with
        ([0.7, 0.6, 0.5, 0.4], [50, 50, 50, 50]),  # it falls, but not yet four times in a row
        ([0.7, 0.6, 0.5, 0.4, 0.3], [50, 50, 50, 50, 100]),  # four times
        ([0.7, 0.8], [50, 25]),  # worse
        ([0.7, 0.7], [50, 25]),  # as printed, equal is worse
        ([0.7, 0.8, 0.7, 0.8], [50, 25, 25, 12.5]),  # compared with the last swap, not with the best one
        ([0.7, 0.6, 0.5, 0.6, 0.5, 0.4, 0.3], [50, 50, 50, 25, 25, 25, 25]),  # the row is broken
        ([0.7, 0.6, 0.5, 0.6, 0.5, 0.4, 0.3, 0.2], [50, 50, 50, 25, 25, 25, 25, 50]),
        ([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1], [50, 50, 50, 50, 100, 100, 100, 100, 100]),  # the highest
        ([0.1 * i for i in range(1, 9)], [50, 25, 12.5, 6.25, 3.125, 1.5625, 1, 1]),  # the lowest
        ([0.7, math.nan, 0.6, 0.5], [50, 25, 25, 25]),  # not finite is worse, and no measure for the next one
        ([0.7, math.inf, 0.6, 0.7], [50, 25, 25, 12.5]),
    ],
)
def test_equation_5(losses: list[float], expected: list[float]) -> None:
    assert rates(losses) == expected


def test_the_count_begins_anew_when_the_rate_has_doubled() -> None:
    falling = [1 - 0.01 * i for i in range(14)]
    assert rates(falling, rate=10) == [10] * 4 + [20] * 4 + [40] * 4 + [80] * 2
    assert rates(falling[:5], patience=2, rate=10) == [10, 10, 20, 20, 40]


def test_from_the_lowest_rate_it_doubles_to_two() -> None:
    assert rates([0.9, 0.8, 0.7, 0.6, 0.5], rate=1) == [1, 1, 1, 1, 2]
    assert rates([0.9, 1.0], rate=1) == [1, 1]


def test_every_decision_says_why() -> None:
    scheduler = ShuffleScheduler(rate=1.5)
    scheduler.begin(100, 100)
    scheduler.next_segment()
    said = [scheduler.swap(loss).why for loss in (0.5, 0.6, 0.7, 0.6, 0.5, 0.4, 0.3)]
    assert said == [
        "the first loss", "the loss did not fall", "the loss did not fall, but the rate is the lowest",
        "the loss fell, 1 of 4 in a row", "the loss fell, 2 of 4 in a row", "the loss fell, 3 of 4 in a row",
        "the loss fell, 4 of 4 in a row",
    ]  # fmt: skip
    top = ShuffleScheduler(rate=100, patience=1)
    top.begin(5, 5)
    top.next_segment()
    top.swap(0.5)
    decision = top.swap(0.4)
    assert decision.why == "the loss fell, 1 of 1 in a row, but the rate is the highest"
    assert (decision.swap, decision.after, decision.loss) == (2, "cold", 0.4)
    assert top.swap(math.nan).to_dict()["loss"] is None


def epoch(scheduler: ShuffleScheduler, epochs: int = 1) -> list[tuple[str, int]]:
    """The runs of so many epochs, at a rate that nobody changes."""
    found = []
    for _ in range(10_000):
        segment = scheduler.next_segment()
        if scheduler.epoch == epochs:
            return found
        found += segment.runs
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("rate", "cold", "hot", "expected"),
    [
        (100, 7, 3, [("cold", 7), ("hot", 3)]),  # all cold ones, then all hot ones
        (50, 7, 4, [("cold", 4), ("hot", 2), ("cold", 3), ("hot", 2)]),
        (25, 8, 4, [("cold", 2), ("hot", 1)] * 4),
        (30, 10, 10, [("cold", 3), ("hot", 3)] * 3 + [("cold", 1), ("hot", 1)]),
        (1, 3, 3, [("cold", 1), ("hot", 1)] * 3),  # alternating
        (1, 7, 3, [("cold", 3), ("hot", 1), ("cold", 2), ("hot", 1), ("cold", 2), ("hot", 1)]),
        (1, 2, 5, [("cold", 1), ("hot", 3), ("cold", 1), ("hot", 2)]),
        (2, 40, 4, [("cold", 10), ("hot", 1)] * 4),  # one batch of the rarer kind at least, and as much of the other
        (50, 9, 0, [("cold", 9)]),
        (1, 0, 9, [("hot", 9)]),
    ],
)
def test_segments_of_an_epoch(rate: float, cold: int, hot: int, expected: list[tuple[str, int]]) -> None:
    scheduler = ShuffleScheduler(rate)
    scheduler.begin(cold, hot)
    assert epoch(scheduler) == expected


def test_at_the_lowest_rate_a_segment_is_a_hundredth_of_both_kinds() -> None:
    scheduler = ShuffleScheduler(1)
    scheduler.begin(400, 1000)
    first = scheduler.next_segment()
    assert first.kind == "mixed"
    assert first.runs == (
        ("cold", 1),
        ("hot", 3),
        ("cold", 1),
        ("hot", 2),
        ("cold", 1),
        ("hot", 3),
        ("cold", 1),
        ("hot", 2),
    )
    assert "".join(kind[0] for kind in first.kinds()) == "chhhchhchhhchh"
    assert len(first) == 14
    assert scheduler.due


def test_what_is_left_is_split_anew_when_the_rate_changes() -> None:
    scheduler = ShuffleScheduler(50)
    scheduler.begin(40, 20)
    assert scheduler.next_segment() == Segment(runs=(("cold", 20),))
    scheduler.swap(0.5)
    assert scheduler.next_segment() == Segment(runs=(("hot", 10),))
    scheduler.swap(0.6)  # R(25): a quarter of the 20 cold and 10 hot ones that are left
    assert [scheduler.next_segment().runs[0] for _ in range(4)] == [("cold", 5), ("hot", 3), ("cold", 5), ("hot", 2)]
    scheduler.swap(0.5)
    assert scheduler.next_segment().runs == (("cold", 5),)
    scheduler.swap(0.6)  # R(12.5) of 5 cold and 5 hot ones: a batch each, the hot ones' turn
    assert scheduler.left == {"cold": 5, "hot": 5}
    assert [scheduler.next_segment().runs[0] for _ in range(3)] == [("hot", 1), ("cold", 1), ("hot", 1)]


def test_when_a_loss_is_due() -> None:
    scheduler = ShuffleScheduler(100)
    scheduler.begin(3, 2)
    assert not scheduler.due  # nothing was trained
    assert scheduler.next_segment().kind == "cold"
    assert scheduler.due
    assert scheduler.next_segment().kind == "hot"
    assert scheduler.due  # cold ones follow, of the next epoch
    one = ShuffleScheduler()
    one.begin(5, 0)
    one.next_segment()
    assert not one.due  # nothing else ever follows
    mixed = ShuffleScheduler(1)
    mixed.begin(2, 2)
    mixed.next_segment()
    assert mixed.due


@pytest.mark.parametrize(
    "settings", [{"rate": 0}, {"rate": 101}, {"rate": 5, "low": 6}, {"patience": 0}, {"high": 101}]
)
def test_settings_out_of_range(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ShuffleScheduler(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nothing to schedule"):
        ShuffleScheduler().begin(0, 0)


@given(
    st.integers(0, 60),
    st.integers(0, 60),
    st.floats(1, 100),
    st.lists(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)), min_size=1, max_size=30),
    st.integers(1, 4),
)
def test_every_epoch_hands_out_every_batch_once(
    cold: int, hot: int, rate: float, losses: list[float], epochs: int
) -> None:
    """Whatever the losses say; and a scheduler restored at any moment goes on in the same way."""
    if not cold + hot:
        return
    scheduler = ShuffleScheduler(rate, patience=2)
    scheduler.begin(cold, hot)
    given_out: list[Counter[str]] = []
    last: Segment | None = None
    number = 0
    while True:
        scheduler = restored(scheduler, cold, hot)
        due = scheduler.due
        if due:
            scheduler.swap(losses[number % len(losses)])
            number += 1
        segment = restored(scheduler, cold, hot).next_segment()
        assert scheduler.next_segment() == segment
        assert len(segment) > 0
        if last is not None:
            assert due == ("mixed" in (last.kind,) or last.kind != next(segment.kinds()))
        if scheduler.epoch == len(given_out):
            if scheduler.epoch == epochs:
                break
            given_out.append(Counter())
            assert next(segment.kinds()) == ("cold" if cold else "hot")
        given_out[-1].update(segment.kinds())
        assert given_out[-1] == {kind: count for kind, count in scheduler.done.items() if count}
        last = segment
    for epoch_given in given_out:
        assert (epoch_given["cold"], epoch_given["hot"]) == (cold, hot)


def restored(scheduler: ShuffleScheduler, cold: int, hot: int) -> ShuffleScheduler:
    other = ShuffleScheduler()
    other.begin(cold + 1, hot)
    other.load_state_dict(json.loads(json.dumps(scheduler.state_dict(), allow_nan=False)))
    assert other.state_dict() == scheduler.state_dict()
    return other
