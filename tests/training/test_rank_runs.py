"""Runs on 1 to 4 ranks write the files of one process with the same shards, byte for byte."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from campaigns import EFFORT, numbers
from rank_workers import Warm, Workers
from ranked import on_threads
from small_runs import FILE, assert_same_run, files, records

import stoker
from stoker.base.errors import ConfigError
from stoker.dataset.dataset import Dataset
from stoker.optim import Constant
from stoker.placement.placement import expect_sent
from stoker.tables import Ranks
from stoker.testing import make_dataset
from stoker.training import ends
from stoker.training.config import TrainConfig
from stoker.training.files.rundir import RunDirectory
from stoker.training.placing import place_run
from stoker.training.ranks import sharded, start, together
from stoker.training.ranks.start import check_settings
from stoker.training.ranks.together import compute_part
from stoker.training.report import analysis

RUN: dict[str, Any] = {
    "embedding_dim": 4, "batch_size": 100, "steps": 4, "eval_every": 2, "tensorboard": False, "display": "quiet",
    "dense_clip_norm": 0.5, "shards": 8, "keep_last": 3,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {"bottom": (16,), "top": (24,)},
    "dcn": {"hidden": (16,), "rank": 4},
    "deepfm": {"hidden": (16, 8)},
    "tabular": {"hidden": (16, 8), "dropout": 0.2, "embedding_dropout": 0.1, "dims": {"C1": 8, "C2": 4, "C3": 4}},
    "din": {"history": {"C1": "C2"}, "attention": (8,), "hidden": (16,), "activation": "dice"},
    "tbsm": {"history": {"C1": "C2"}, "top": (16,)},
    "sasrec": {"history": {"C1": "C2"}, "blocks": 1, "hidden": (8,)},
    "rankmixer": {"width": 8, "blocks": 1},
    "two-tower": {"item": ["C3"], "hidden": (8,), "width": 8},
}
PLACES: dict[str, dict[str, Any]] = {
    "resident": {},
    "cached": {"device_memory": "4KiB", "strategy": "cached"},
    "file": {"device_memory": "4KiB", **FILE},
    "pipelined": {"device_memory": "6KiB", "strategy": "host-pipelined"},
    "hot": {"device_memory": "20KiB", "strategy": "hot-cold"},
}  # fmt: skip
ROWS = ("sgd", "momentum_sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl", "lamb")
DENSE = ("sgd", "adagrad", "adam", "lamb")


@pytest.fixture(scope="module")
def workers(data: Dataset) -> Iterator[Workers]:
    cases = zip(range(len(ROWS)), itertools.cycle(MODELS), itertools.cycle(PLACES.values()), strict=False)
    with (
        Warm(data.path, [settings_of(model, n) | place for n, model, place in cases]) as warm,
        Workers(warm) as started,
    ):
        yield started


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("data") / "d"
    return make_dataset(path, rows=800, num_embeddings=(1200, 600, 10), sequence={1: 4})


def settings_of(model: str, number: int) -> dict[str, Any]:
    """The settings of a run: one of 8 row optimizers, with what goes with it."""
    return {
        **RUN, "model": model, "model_options": MODELS[model], "row_optimizer": ROWS[number],
        "dense_optimizer": DENSE[number % 4], "dtype": "bfloat16" if number % 3 == 1 else "float32",
        "pooling": ("sum", "mean", "max")[number % 3], "row_cow_clip": (1.0, 1e-4) if number in (4, 7) else None,
        "metric": "log_loss" if number % 2 else "auc",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "campaign"),
    [(4, 240 if EFFORT >= 0.25 else 480), pytest.param(300, 4, marks=pytest.mark.slow)],  # 60 short ones in CI
)
def test_random_runs_on_ranks_are_those_of_one_process(
    workers: Workers, data: Dataset, tmp_path_factory: pytest.TempPathFactory, steps: int, campaign: int
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    length = {"steps": steps, "eval_every": steps // 2}

    @cache
    def alone(model: str, number: int) -> tuple[Path, Any]:
        out = folder / f"{model}-{number}"
        result = stoker.train(data, out=out, threads=1, **settings_of(model, number) | length)
        return out, (result.step, result.best_step, result.valid, result.test)

    for seed in numbers(campaign):
        draw = random.Random(seed)
        model, number = draw.choice(sorted(MODELS)), draw.randrange(len(ROWS))
        ranks, again = draw.randint(1, 4), draw.randint(1, 4)
        places = [PLACES[draw.choice(sorted(PLACES))] for _ in range(2)]
        threads = draw.randint(1, 2)
        given = settings_of(model, number) | length
        out, what = folder / str(seed), f"seed {seed}: {model}, {ROWS[number]}, {ranks}, {again}, {places}"
        if draw.random() < 0.5:
            found = workers.train(ranks, data.path, out=out, **given, **places[0], threads=threads)
        else:  # and resume with another number
            stopped = workers.train(
                ranks, data.path, out=out, **{**given, "steps": steps // 2}, **places[0], threads=threads
            )
            assert stopped[0][0] == steps // 2, (what, stopped)
            place = {"device_memory": None, "strategy": "auto", "host_memory": None, **places[1]}
            found = workers.train(again, resume=out, steps=steps, display="quiet", threads=1, **place)
        expected, result = alone(model, number)
        assert found == [result] * len(found), (what, found)
        assert files(out / "checkpoints") == files(expected / "checkpoints"), what
        assert_same_run(expected, out, kinds=("valid",))
        rates = [{line["step"]: (line["row_lr"], line["dense_lr"]) for line in records(each, "train")}
                 for each in (expected, out)]  # fmt: skip
        assert rates[0] == rates[1], what
        assert len(records(out, "valid")) == 2, "each record is written once"


@pytest.mark.parametrize(("model", "place"), [("dlrm", {}), ("dcn", {"device_memory": "40KiB", "strategy": "cached"})])
def test_shards_at_once_are_those_one_by_one_on_any_rank(
    workers: Workers, data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, place: dict[str, Any]
) -> None:
    given = {**settings_of(model, 3), "batch_size": 256}  # 32 examples a shard
    for ranks in (1, 2, 3):
        found = workers.train(ranks, data.path, out=tmp_path / str(ranks), **given, **place, threads=2)
        assert found[0][0] == RUN["steps"]
    sizes: set[int] = set()

    def noted(*given: Any) -> Any:
        sizes.add(given[-1])
        return compute_part(*given)

    monkeypatch.setattr(together, "_MOST", 1)
    monkeypatch.setattr(sharded, "compute_part", noted)
    stoker.train(data, out=tmp_path / "alone", threads=1, **given)
    assert sizes == {1}
    for ranks in (1, 2, 3):
        assert files(tmp_path / str(ranks) / "checkpoints") == files(tmp_path / "alone" / "checkpoints"), ranks


class Sometimes:
    """Seconds that are less than others at every second question."""

    def __init__(self) -> None:
        self.asked = itertools.count()

    def __lt__(self, _: float) -> bool:
        return next(self.asked) % 2 == 0


def test_ranks_analyse_a_long_run_by_the_clock_of_the_first(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "_ANALYSED", Sometimes())
    monkeypatch.setattr(ends, "analyse", lambda *given, **more: analysis.analyse(*given, **more | {"seconds": 2}))
    monkeypatch.setattr(analysis, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    given = {**settings_of("dlrm", 3), "threads": 1, "steps": 2}
    on_threads(2, lambda ranks: stoker.train(data, out=tmp_path / "run", ranks=ranks, **given))
    columns = RunDirectory(tmp_path / "run").read(analysis.FILE)["columns"]
    assert 0 < len(columns) < len(data.schema.features) + len(data.schema.dense)


@pytest.mark.slow
def test_what_other_ranks_look_up_is_brought_ahead(workers: Workers, data: Dataset, tmp_path: Path) -> None:
    given = {**settings_of("dlrm", 3), "batch_size": 40, "steps": 6, "eval_every": 6}
    stoker.train(data, out=tmp_path / "alone", **given)
    for ranks in (2, 4):
        for name, place in PLACES.items():
            if name != "resident":
                out = tmp_path / f"{name}{ranks}"
                workers.train(ranks, data.path, out=out, **given, **{**place, "device_memory": "8KiB"})
                assert files(out / "checkpoints") == files(tmp_path / "alone" / "checkpoints")
                assert records(out, "train")[-1]["on_demand_rows_per_step"] == 0, (name, ranks)


@pytest.mark.parametrize("place", ["resident", pytest.param("cached", marks=pytest.mark.slow)])
def test_every_rank_has_the_cores_of_tensor_trains(workers: Workers, data: Dataset, tmp_path: Path, place: str) -> None:
    given = {**settings_of("dlrm", 3), "tt_rank": 2, "tt_rows": 1000, "row_optimizer": "adagrad"}
    assert set(stoker.train(data, out=tmp_path / "alone", **given).model.tensor_train) == {"C1"}
    found = workers.train(2, data.path, out=tmp_path / "run", **{**given, "steps": 2}, **PLACES[place])
    assert found[0][0] == 2, found
    found = workers.train(3, resume=tmp_path / "run", steps=4, display="quiet")
    assert found[0][0] == 4, found
    assert files(tmp_path / "run" / "checkpoints") == files(tmp_path / "alone" / "checkpoints")


@pytest.mark.slow
def test_a_run_sends_what_the_plan_says(workers: Workers, data: Dataset, tmp_path: Path) -> None:
    given = {**settings_of("dlrm", 3), "batch_size": 80, "steps": 16, "eval_every": 16, "log_every": 100}
    kept = {name: value for name, value in given.items() if name != "display"}
    config = stoker.TrainConfig.from_dict(kept | {"device_memory": "1GiB"})
    placement = place_run(config, data, config.make_row_optimizer(Constant()), 2)
    assert placement is not None
    model = config.make_model(data.schema, config.make_row_optimizer(Constant()), None, None)
    expected = expect_sent(placement, 2, 8, sum(each.numel() for each in model.dense_parameters()))
    workers.train(2, data.path, out=tmp_path / "run", **given)
    sent = records(tmp_path / "run", "train")[-1]["sent_mib_per_step"] * 2**20
    assert sent == pytest.approx(expected.total, rel=0.02), expected


@pytest.mark.slow
def test_one_process_goes_on_where_ranks_stopped(workers: Workers, data: Dataset, tmp_path: Path) -> None:
    given = settings_of("tabular", 4)
    stoker.train(data, out=tmp_path / "alone", **given)
    found = workers.train(3, data.path, out=tmp_path / "run", **{**given, "steps": 2})
    assert found[0][0] == 2, found
    loaded = stoker.load(tmp_path / "run")
    assert loaded.model.embeddings.shards == 8
    assert stoker.evaluate(loaded.model, data.valid)["log_loss"] == found[0][2]["log_loss"]
    assert stoker.verify(tmp_path / "run", steps=2, begin="start").identical
    stoker.train(resume=tmp_path / "run", steps=4, display="quiet", device_memory="4KiB", strategy="cached")
    assert files(tmp_path / "run" / "checkpoints") == files(tmp_path / "alone" / "checkpoints")


@pytest.mark.slow
def test_copies_that_are_averaged_go_on_with_the_same_number_of_ranks(
    workers: Workers, data: Dataset, tmp_path: Path
) -> None:
    """Checkpoints at steps 1 and 3 average, too."""
    given = {**settings_of("dlrm", 3), "steps": 4, "average_every": 2, "save_every": 1}
    found = workers.train(2, data.path, out=tmp_path / "whole", **given, **PLACES["cached"])
    assert found[0] == found[1], found
    workers.train(2, data.path, out=tmp_path / "run", **{**given, "steps": 2})
    [said, _] = workers.train(3, resume=tmp_path / "run", steps=4, display="quiet")[:2]
    assert "averages copies of rows on 2 ranks" in said, said
    assert workers.train(2, resume=tmp_path / "run", steps=4, display="quiet") == found
    whole = files(tmp_path / "whole" / "checkpoints")
    assert files(tmp_path / "run" / "checkpoints") == whole
    workers.train(2, data.path, out=tmp_path / "summed", **{**given, "average_every": None})
    assert files(tmp_path / "summed" / "checkpoints") != whole
    with pytest.raises(ConfigError, match="means of copies on several ranks"):
        stoker.train(data, out=tmp_path / "alone", **given)
    with pytest.raises(ConfigError, match="means of copies on several ranks"):
        stoker.verify(tmp_path / "run", steps=1, begin="start")
    assert stoker.evaluate(stoker.load(tmp_path / "run").model, data.valid)["log_loss"] == found[0][2]["log_loss"]


@pytest.mark.slow
def test_hot_and_cold_batches_on_ranks_are_those_of_one_process(
    workers: Workers, data: Dataset, tmp_path: Path
) -> None:
    hot = stoker.classify(data, stoker.profile(data, device_memory="2KiB", embedding_dim=4), tmp_path / "classified")
    given = {**settings_of("dlrm", 3), "batch_size": 40, "steps": 48, "eval_every": 24, "schedule_rows": 4}
    stoker.train(hot, out=tmp_path / "alone", **given)
    swaps = records(tmp_path / "alone", "schedule")
    assert len(swaps) > 2
    found = workers.train(3, hot.path, out=tmp_path / "run", **{**given, "steps": 21}, **PLACES["cached"])
    assert found[0][0] == 21, found
    found = workers.train(2, resume=tmp_path / "run", steps=48, display="quiet")
    assert found[0][0] == 48, found
    expected, written = files(tmp_path / "alone" / "checkpoints"), files(tmp_path / "run" / "checkpoints")
    assert expected == {name: written[name] for name in expected}
    assert [line["loss"] for line in records(tmp_path / "run", "schedule")] == [line["loss"] for line in swaps]


@pytest.mark.slow
def test_shards_default_to_8_and_batches_may_be_smaller_than_shards(
    workers: Workers, data: Dataset, tmp_path: Path
) -> None:
    """The last batch of the epoch has 1 example, so 7 of 8 shards are empty, and 3 of 4 ranks."""
    given = {**settings_of("tabular", 3), "batch_size": 71, "steps": 10, "eval_every": 10}
    rows = len(data.train)
    assert 0 < rows % 71 < 8 or rows == 0, rows
    stoker.train(data, out=tmp_path / "alone", **given)
    found = workers.train(4, data.path, out=tmp_path / "run", **{k: v for k, v in given.items() if k != "shards"})
    assert found[0][0] == 10, found
    assert files(tmp_path / "run" / "checkpoints") == files(tmp_path / "alone" / "checkpoints")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"shards": 2}, "need as many logical shards"),
        ({"shards": 1}, "need as many logical shards"),
        ({"batch_size": "auto"}, "measured in one process"),
        ({"epoch_lookahead": True, "device_memory": "4KiB"}, "without epoch_lookahead"),
        ({"steps": 0}, "steps is 0"),
    ],
)  # fmt: skip
def test_what_does_not_go_is_refused_by_name_on_every_rank(
    more: dict[str, Any], message: str, data: Dataset, tmp_path: Path
) -> None:
    def work(ranks: Ranks) -> str:
        with pytest.raises(ConfigError) as caught:
            stoker.train(data, out=tmp_path / "run", ranks=ranks, **{**settings_of("dlrm", 3), "threads": 1, **more})
        return str(caught.value)

    for said in on_threads(3, work):
        assert message in said
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_test_rows_or_other_bits_of_products_are_refused(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of training would not tell: they are the same, and a rank trusts the products of another."""

    def work(ranks: Ranks) -> str:
        own = Dataset(data.path)
        if ranks.rank == 1 and not products:
            own.manifest["splits"]["test"]["shards"][0]["sha256"] = "of other rows"
        with pytest.raises(ConfigError) as caught:
            stoker.train(own, out=tmp_path / "run", ranks=ranks, **{**settings_of("dlrm", 3), "threads": 1})
        return str(caught.value)

    for products in (False, True):
        if products:
            monkeypatch.setattr(start, "bits_of_products", itertools.count().__next__)
        for said in on_threads(2, work):
            assert said.startswith("the checksum of matrix products is" if products else "the dataset is"), said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("shards", "ranks", "enough"), [(2, 3, 8), (8, 9, 16), (16, 17, 32)])
def test_too_few_shards_are_refused_with_a_number_that_suffices(
    shards: int, ranks: int, enough: int, data: Dataset
) -> None:
    with pytest.raises(ConfigError, match=f"the run has {shards}. Give shards={enough} to a new run"):
        check_settings(TrainConfig(shards=shards), data, ranks)


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("growing")
    draw = np.random.default_rng(0)
    names = ["click", "x", "item", "user", "recent", "at"]
    with (folder / "a.csv").open("w") as out:
        print(*names, sep=",", file=out)
        for second in range(1500):
            item, user = second // 10 + draw.geometric(0.04), draw.integers(0, 60)
            recent = "|".join(f"i{each}" for each in second // 10 + draw.geometric(0.04, draw.integers(0, 4)))
            print(int((item + user) % 3 == 0), draw.random(), f"i{item}", user, recent, second, sep=",", file=out)
    grow = {"rows": 80, "admit": 2, "evict": "lru"}
    schema = stoker.Schema.from_dict({
        "label": "click", "dense": [{"name": "x"}],
        "categorical": [
            {"name": "item", "oov": "grow", "grow": grow, "table": "items"},
            {"name": "user", "type": "int", "oov": "grow", "grow": {"rows": 50, "evict": "lfu"}},
        ],
        "sequence": [{"name": "recent", "oov": "grow", "grow": grow, "table": "items", "max_length": 3}],
    })  # fmt: skip
    return stoker.prepare(schema, folder / "a.csv", out=folder / "data")


def test_random_runs_of_tables_that_grow_are_those_of_one_process(
    workers: Workers, growing: Dataset, tmp_path: Path
) -> None:
    room = {"device_memory": "8KiB"}  # in which the rows of a batch fit
    placed = {name: place | room if "device_memory" in place else place for name, place in PLACES.items()}
    for seed in numbers(20):
        draw = random.Random(seed)
        model, number = draw.choice(["dlrm", "deepfm", "din"]), draw.choice([0, 1, 2, 3, 4])
        ranks, again = draw.randint(1, 4), draw.randint(1, 4)
        places = [placed[draw.choice(sorted(placed))] for _ in range(2)]
        options = {"history": {"item": "recent"}} if model == "din" else MODELS[model]
        given = {**settings_of("dlrm", number), "steps": 8, "eval_every": 4, "dtype": "float32", "batch_size": 40}
        given |= {"model": model, "model_options": options}
        out, alone, what = tmp_path / f"{seed}", tmp_path / f"{seed}-alone", (seed, model, ranks, again, places)
        if draw.random() < 0.5:
            found = workers.train(ranks, growing.path, out=out, **given, **places[0], threads=1)
        else:
            stopped = workers.train(ranks, growing.path, out=out, **{**given, "steps": 4}, **places[0], threads=1)
            assert stopped[0][0] == 4, (what, stopped)
            place = {"device_memory": None, "strategy": "auto", "host_memory": None, **places[1]}
            found = workers.train(again, resume=out, steps=8, display="quiet", threads=1, **place)
        result = stoker.train(growing, out=alone, threads=1, **given)
        assert found == [(result.step, result.best_step, result.valid, result.test)] * len(found), (what, found)
        assert files(out / "checkpoints") == files(alone / "checkpoints"), what
        assert any("raw_ids" in name for name in map(str, files(out / "checkpoints")))
        assert all(each.get("on_demand_rows_per_step", 0) == 0 for each in records(out, "train")), what
