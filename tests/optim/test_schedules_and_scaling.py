"""One cycle, and learning rates that follow the batch size."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker import Adam, CosineDecay, FeatureSpec, OneCycle, PolynomialDecay, StepDecay, TrainConfig, optim
from stoker.base.errors import ConfigError


def combined_cosine(step: int, steps: int, share: float, div: float, final_div: float) -> float:
    """fastai's fit_one_cycle: two SchedCos, put together at ``share``."""

    def cosine(start: float, end: float, at: float) -> float:
        return start + (1 + math.cos(math.pi * (1 - at))) * (end - start) / 2

    at = min(step / max(1, steps - 1), 1.0)
    if at < share:
        return cosine(1 / div, 1.0, at / share)
    return cosine(1.0, 1 / final_div, (at - share) / (1 - share))


@given(
    steps=st.integers(1, 500), share=st.floats(0.01, 0.99), div=st.floats(1, 100), final=st.floats(1, 1e6),
    step=st.integers(0, 600),
)  # fmt: skip
def test_one_cycle_has_its_shape(steps, share, div, final, step):
    cycle = OneCycle(steps=steps, share=share, div=div, final_div=final)
    assert cycle.factor(step) == pytest.approx(combined_cosine(step, steps, share, div, final), rel=1e-9, abs=1e-12)
    assert 0 < cycle.factor(step) <= 1 + 1e-12


def test_one_cycle_begins_peaks_and_ends_where_it_says():
    cycle = OneCycle(steps=101)
    assert cycle.factor(0) == pytest.approx(1 / 25)
    assert cycle.factor(25) == pytest.approx(1.0)
    assert cycle.factor(100) == cycle.factor(5000) == pytest.approx(1e-5)
    factors = [cycle.factor(step) for step in range(101)]
    assert factors == sorted(factors[:26]) + sorted(factors[26:], reverse=True)


def test_decays_begin_after_their_start_and_stay_at_their_end():
    polynomial = PolynomialDecay(warmup=2, start=3, steps=4, power=1.0, end=0.2)
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert [polynomial.factor(step) for step in range(11)] == pytest.approx(expected)
    cosine = CosineDecay(warmup=2, steps=4, end=0.2)
    expected = [0.5, 1.0, 1.0, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5), 0.2, 0.2]
    assert [cosine.factor(step) for step in range(8)] == pytest.approx(expected)
    stairs = StepDecay(warmup=2, every=2, gamma=0.5)
    assert [stairs.factor(step) for step in range(7)] == [0.5, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_one_cycle_comes_back_from_a_checkpoint():
    optimizer = Adam(lr=0.1, schedule=OneCycle(steps=7, share=0.4))
    assert optim.RowOptimizer.from_dict(optimizer.to_dict()) == optimizer


@pytest.mark.parametrize(
    ("options", "words"),
    [({"share": 0.0}, "share"), ({"share": 1.0}, "share"), ({"div": 0.5}, "divided"), ({"warmup": 3}, "own warm-up")],
)
def test_a_cycle_that_is_none(options, words):
    with pytest.raises(ConfigError, match=words):
        OneCycle(steps=10, **options)


@pytest.mark.parametrize(
    ("rule", "rows", "dense", "decay"),
    [("none", 1, 1, 1), ("sqrt", 4, 4, 1), ("linear", 16, 16, 1), ("cowclip", 1, 4, 16)],
)
def test_rates_follow_the_batch_size(rule, rows, dense, decay):
    given = {"row_lr": 0.03, "row_weight_decay": 1e-5, "row_optimizer": "adam"}
    config = TrainConfig(batch_size=16 * 512, base_batch_size=512, lr_scaling=rule, **given)
    made = config.make_row_optimizer(optim.Constant())
    assert made.lr == pytest.approx(0.03 * rows)
    assert made.weight_decay == pytest.approx(1e-5 * decay)
    assert config.scaling.dense_lr == dense
    same = TrainConfig(batch_size=512, base_batch_size=512, lr_scaling=rule, **given)
    assert same.make_row_optimizer(optim.Constant()).lr == 0.03


def test_default_rates_are_scaled_too():
    config = TrainConfig(batch_size=8192, lr_scaling="linear")
    assert config.make_row_optimizer(optim.Constant()).lr == pytest.approx(4 * 0.05)


def test_settings_of_rows_reach_their_optimizer():
    config = TrainConfig(
        row_optimizer="lamb", row_lr=0.3, row_weight_decay=0.1, row_l2=0.2, row_clip_value=2.0, row_clip_norm=3.0,
        row_cow_clip=(1.0, 1e-3), row_options={"eps": 1e-3}, min_trust=0.5, max_trust=4.0,
    )  # fmt: skip
    schedule = StepDecay(every=3)
    assert config.make_row_optimizer(schedule) == optim.LAMB(
        lr=0.3, schedule=schedule, weight_decay=0.1, l2=0.2, clip_value=2.0, clip_norm=3.0, cow_clip=(1.0, 1e-3),
        eps=1e-3, min_trust=0.5, max_trust=4.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "own"), [("sgd", {}), ("adagrad", {}), ("adam", {}), ("lamb", {"min_trust": 0.5, "max_trust": 4.0})]
)
def test_settings_of_the_dense_part_reach_its_optimizer(kind, own):
    config = TrainConfig(
        dense_optimizer=kind, dense_lr=0.3, dense_weight_decay=0.1, batch_size=4, base_batch_size=1,
        lr_scaling="linear", model_options={"bottom": (4,), "top": (4,)}, **own,
    )  # fmt: skip
    model = config.make_model(FeatureSpec.from_sizes(1, [3]), optim.SGD(lr=0.1))
    (group,) = config.make_dense_optimizer(model).param_groups
    wanted = {"lr": 4 * 0.3, "weight_decay": 0.1, **own}
    assert {name: group[name] for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("kind", "to_the_end", "given"),
    [
        ("constant", optim.Constant(warmup=10), optim.Constant(warmup=10)),
        ("linear", PolynomialDecay(warmup=10, steps=90, power=1.0), PolynomialDecay(warmup=10, steps=7, power=1.0)),
        ("polynomial", PolynomialDecay(warmup=10, steps=90), PolynomialDecay(warmup=10, steps=7)),
        ("cosine", CosineDecay(warmup=10, steps=90), CosineDecay(warmup=10, steps=7)),
        ("step", StepDecay(warmup=10, every=33), StepDecay(warmup=10, every=7)),
        ("one-cycle", OneCycle(steps=100, share=0.4), OneCycle(steps=7, share=0.4)),
    ],
)
def test_a_schedule_reaches_the_end_of_the_run_unless_steps_are_given(kind, to_the_end, given):
    config = TrainConfig(schedule=kind, warmup=0 if kind == "one-cycle" else 10, cycle_rise=0.4)
    assert config.make_schedule(100) == to_the_end
    assert config.replace(decay_steps=7).make_schedule(100) == given


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr_scaling": "cubic"}, "lr_scaling 'cubic'"),
        ({"base_batch_size": 0}, "at least 1"),
        ({"schedule": "one-cycle", "warmup": 5}, "one-cycle has its own warm-up"),
        ({"cycle_rise": 1.0}, "between 0 and 1"),
        ({"max_trust": 0.0}, "above 0"),
        ({"min_trust": 2.0, "max_trust": 1.0}, "bound the trust ratio"),
    ],
)
def test_settings_out_of_range(settings, words):
    with pytest.raises(ConfigError, match=words):
        TrainConfig(**settings)
