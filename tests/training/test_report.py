"""stoker.report: what it measures, what it advises, and a page that opens offline."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import SMALL
from typer.testing import CliRunner

import stoker
from stoker.base.errors import ConfigError, DataError
from stoker.base.files import seal
from stoker.cli import app
from stoker.dataset.dataset import Dataset
from stoker.ops.tt.shape import TTShape
from stoker.testing import make_dataset
from stoker.training.files.rundir import RunDirectory
from stoker.training.report.advice import advise
from stoker.training.report.analysis import FILE, analyse, shuffled, stored, work_of
from stoker.training.report.charts import bars, chart
from stoker.training.report.page import body, read

VOID = {"meta", "path", "circle", "rect", "polyline"}  # elements without an end


class Page(HTMLParser):
    """Checks that elements are closed in order, and that nothing is loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe"), tag
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(run: Path) -> Page:
    text = stoker.report(run).read_text(encoding="utf-8")
    assert len(text) <= 1_500_000
    assert "http" not in text
    assert "url(" not in text
    assert "nan" not in text.lower().replace("nanny", "")
    return Page(text)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    data = make_dataset(root / "d", rows=3000, num_embeddings=(60, 30, 10))
    stoker.train(data, out=root / "run", **{**SMALL, "epochs": 3, "eval_every": 25, "device_memory": "8KiB"})
    return root


@pytest.mark.slow
def test_the_page_is_made_from_the_run_alone(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "one & <two>"
    shutil.copytree(made / "run", run)
    page = page_of(run)
    said = " ".join(page.words)
    for words in (
        "one & <two>",
        "AUC",
        "C1",
        "hit rate of caches of this size",
        "best possible (Belady)",
        "log loss it saves",
        "device_memory",
    ):
        assert words in said
    analysis = RunDirectory(run).read(FILE)
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(seal(settings | {"dataset": str(tmp_path / "gone")})))
    assert " ".join(page_of(run).words) == said.replace(str(made / "d"), str(tmp_path / "gone"))
    (run / FILE).write_text("{")  # garbled, and the dataset is gone
    assert "Not measured" in " ".join(page_of(run).words)
    (run / "config.json").write_text(json.dumps(settings))
    page_of(run)
    again = RunDirectory(run).read(FILE)
    for name in ("columns", "tables", "calibration", "slices", "cache", "work", "rows", "checkpoint"):
        assert again[name] == analysis[name]


@pytest.mark.slow
def test_rows_are_placed_as_in_the_run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 100 GiB that trained in 4 GiB must not be loaded whole."""
    seen = list[set[str]]()

    def watched(model: Any, *given: Any) -> dict[str, Any]:
        seen.append({type(group.strategy).__name__ for group in model.embeddings.groups})
        return analyse(model, *given)

    monkeypatch.setattr("stoker.training.report.page.analyse", watched)
    figures = []
    for name, memory in (("whole", None), ("placed", "1KiB")):
        run = tmp_path / name
        stoker.train(Dataset(made / "d"), out=run, **{**SMALL, "steps": 5, "device_memory": memory})
        stoker.report(run, again=True)
        found = RunDirectory(run).read(FILE)
        figures.append((found["calibration"], found["slices"]))
    assert figures[0] == figures[1]
    assert seen[0] == {"Device"}
    assert seen[1] - {"Device"}, "no rows are in slots or in a file"


@pytest.mark.slow
def test_a_run_faster_than_the_measured_limit_has_a_reason(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    stoker.report(run)
    analysis = RunDirectory(run).read(FILE)
    for operations, words in ((1e30, "measured for this page"), (1.0, "which was busier when this page measured it")):
        machine = {"name": "CPU", "operations": operations, "row_bytes": 1e30}
        RunDirectory(run).write(FILE, analysis | {"machine": machine})
        said = " ".join(page_of(run).words)
        assert f"of the limit of CPU (products and reads of rows alone), {words}" in said


@pytest.mark.slow
def test_without_test_rows_baselines_are_those_of_validation_rows(tmp_path: Path) -> None:
    ids = torch.randint(1, 20, (1000,), generator=torch.Generator().manual_seed(0))
    schema = {"label": "label", "split": {"train": 0.8, "valid": 0.2, "test": 0}, "categorical": [{"name": "C1"}]}
    frame = pl.DataFrame({"label": (ids % 2).tolist(), "C1": ids.tolist()})
    data = stoker.prepare(stoker.Schema.from_dict(schema), frame, out=tmp_path / "d")
    stoker.train(data, out=tmp_path / "run", **SMALL)
    found = stoker.baseline(data)
    said = " ".join(page_of(tmp_path / "run").words)
    assert "logistic regression, valid" in said
    assert f"{found.figures['logistic regression']['valid']['auc']:.4f}" in said


@pytest.mark.slow
def test_baselines_made_after_the_run_are_shown(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "d", rows=1000, num_embeddings=(20, 10))
    stoker.train(data, out=tmp_path / "run", **SMALL)
    assert "logistic regression" not in " ".join(page_of(tmp_path / "run").words)
    found = stoker.baseline(data)
    said = " ".join(page_of(tmp_path / "run").words)
    assert f"{found.figures['logistic regression']['test']['auc']:.4f}" in said
    other = make_dataset(tmp_path / "other", rows=2000, num_embeddings=(20, 10))
    stoker.baseline(other)
    shutil.rmtree(tmp_path / "d")
    other.path.rename(tmp_path / "d")  # another dataset in its place
    assert read(RunDirectory(tmp_path / "run"))["baselines"] == {}


def test_a_run_that_is_not_finished_has_a_page(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    best = RunDirectory(run).read("report.json")["best_step"]
    of = f"figures of step {best}; tables, calibration and slices of step {best}"
    shown = read(RunDirectory(run))["valid"]
    assert of in " ".join(page_of(run).words)
    (run / "report.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:  # an evaluation after the best one
        file.write(json.dumps({**read(RunDirectory(run))["valid_curve"][-1], "step": 999, "auc": 0.1}) + "\n")
    assert read(RunDirectory(run))["valid_curve"][-1]["auc"] == 0.1
    assert read(RunDirectory(run))["valid"]["auc"] == shown["auc"], "of the best checkpoint"
    assert of in " ".join(page_of(run).words)
    (run / "metrics.jsonl").write_text("")
    shutil.rmtree(run / "checkpoints")
    said = " ".join(page_of(run).words)
    assert "not finished" in said
    assert "the run has no checkpoint yet" in said


@pytest.mark.slow
def test_columns_that_tell_the_label_save_log_loss_and_others_do_not(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 20, (2000, 2), generator=generator)
    frame = {"label": (ids[:, 0] % 2).tolist(), "tells": ids[:, 0].tolist(), "idle": ids[:, 1].tolist()}
    schema = stoker.Schema.from_dict({
        "label": {"column": "label"}, "split": {"train": 0.6, "valid": 0.2, "test": 0.2},
        "categorical": [{"name": "tells"}, {"name": "idle"}],
    })  # fmt: skip
    import polars as pl

    data = stoker.prepare(schema, files=pl.DataFrame(frame), out=tmp_path / "d")
    result = stoker.train(data, out=tmp_path / "run", batch_size=32, epochs=3, threads=1, display="quiet")
    found = analyse(result.model, data, stoker.TrainConfig(), seconds=60)
    by = {each["name"]: each for each in found["columns"]}
    assert by["tells"]["loss"] > 0.5
    assert abs(by["idle"]["loss"]) < 0.05
    assert found["rows"] == len(data.valid)
    assert sum(each["rows"] for each in found["calibration"]) == found["rows"]


@pytest.mark.slow
def test_slices_have_the_values_of_the_log(tmp_path: Path) -> None:
    import polars as pl

    draw = torch.Generator().manual_seed(0)
    place, more = torch.randint(3, (3000,), generator=draw), torch.randint(60, (3000,), generator=draw)
    frame = pl.DataFrame({
        "label": (more % 2).tolist(), "place": [["top", None, "side"][each] for each in place.tolist()],
        "slot": (place * 7).tolist(), "more": more.tolist(),
    })  # fmt: skip
    columns = [{"name": "place"}, {"name": "slot", "type": "int", "hash_buckets": 4}, {"name": "more", "type": "int"}]
    schema = {"label": "label", "split": {"train": 0.5, "valid": 0.4, "test": 0.1}, "categorical": columns}
    data = stoker.prepare(stoker.Schema.from_dict(schema), frame, out=tmp_path / "d")
    model = stoker.train(data, out=tmp_path / "run", batch_size=64, steps=2, threads=1, display="quiet").model
    found = analyse(model, data, stoker.TrainConfig(), seconds=-1)
    names = {each["slice"] for each in found["slices"]}
    assert {"place missing or unknown", "place = top", "place = side"} <= names
    assert {name for name in names if name.startswith("slot")} <= {f"slot = id {number}" for number in range(1, 5)}
    assert not any(name.startswith("place = id") for name in names)
    shares = {each["name"]: each["unknown_train"] for each in found["tables"]}
    assert shares["more"] == 0
    assert shares["place"] == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.slow
def test_settings_that_the_rows_decide_are_not_called_given(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "d", rows=1500, num_embeddings=(9,) * 16)  # wide: linear terms
    stoker.train(data, out=tmp_path / "run", steps=2, seed=3, embedding_dim=4, threads=1, display="quiet")
    said = page_of(tmp_path / "run").words
    assert said[said.index("Settings that are not defaults") : -1][3::2] == [
        "embedding_dim",
        "steps",
        "seed",
        "threads",
    ]


@pytest.mark.slow
def test_no_time_leaves_columns_out(made: Path) -> None:
    model, data = stoker.load(made / "run").model, stoker.Dataset(made / "d")
    assert analyse(model, data, stoker.TrainConfig(), seconds=-1)["columns"] == []


@given(st.data())
def test_shuffled_moves_whole_bags_of_one_feature(data: st.DataObject) -> None:
    rows, features = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    feature = data.draw(st.integers(0, features - 1))
    order = data.draw(st.permutations(range(rows)))
    longest = data.draw(st.integers(0, 3))
    bags = [[data.draw(st.lists(st.integers(0, 9), max_size=longest)) for _ in range(features)] for _ in range(rows)]
    flat = [value for row in bags for bag in row for value in bag]
    offsets = torch.tensor([0, *[len(bag) for row in bags for bag in row]]).cumsum(0)
    batch = stoker.Batch(
        dense=torch.zeros(rows, 0), ids=torch.tensor(flat, dtype=torch.int64), offsets=offsets,
        weights=torch.arange(len(flat)).float(),
    )  # fmt: skip
    found = shuffled(batch, [feature], torch.tensor(order))
    assert found.offsets is not None
    assert found.weights is not None
    for row in range(rows):
        for each in range(features):
            source = order[row] if each == feature else row
            begin, end = (int(found.offsets[row * features + each + more]) for more in (0, 1))
            assert found.ids[begin:end].tolist() == bags[source][each]
            assert [flat[int(place)] for place in found.weights[begin:end]] == bags[source][each]


def test_bytes_of_tensor_trains_are_those_of_their_cores() -> None:
    spec = stoker.FeatureSpec.from_sizes(1, [1000, 10])
    model = stoker.DLRM(spec, bottom=(4,), top=(4,), tensor_train={"C1": stoker.TensorTrain(rank=4)})
    group = next(each for each in model.embeddings.groups if each.tables[0].name == "C1")
    kept = [part for core in group.storage.cores for part in (core.weight, *core.state.values())]
    assert stored(model, model.tables[0]) == sum(part.nbytes for part in kept)
    assert stored(model, model.tables[1]) == 10 * 17 * 4


def test_products_of_each_token_are_work() -> None:
    model = stoker.RankMixer(stoker.FeatureSpec.from_sizes(0, [10, 10]), embedding_dim=4, width=8)
    batch = stoker.Batch(dense=torch.zeros(1, 0), ids=torch.ones(1, 2, dtype=torch.int64))
    tokens = 2 * 4 * 8 + model.blocks[0].first.weight.numel() * 2 * len(model.blocks)
    assert work_of(model, batch)["operations"] == 6 * (tokens + 8)


def test_products_of_each_step_of_a_history_are_work() -> None:
    item = stoker.Feature(name="item", table="items")
    past = stoker.Feature(name="past", table="items", sequence=True, max_length=5)
    spec = stoker.FeatureSpec(dense=(), features=(item, past), num_embeddings={"items": 10})
    model = stoker.SASRec(spec, embedding_dim=4, blocks=2, hidden=(8,))
    batch = stoker.Batch(dense=torch.zeros(1, 0), ids=torch.tensor([7, 3, 5]), offsets=torch.tensor([0, 1, 3]))
    # The first block: projections of 5 steps, products of 5 x 5 steps. The last one has one question.
    wide = 5 * (3 * 4 * 4 + 2 * 4 * 4) + 2 * 5 * 5 * 4
    assert work_of(model, batch)["operations"] >= 6 * wide
    assert work_of(model, batch)["operations"] > 12 * sum(each.numel() for each in model.dense_parameters())


def test_products_and_slices_of_tensor_trains_are_work() -> None:
    spec = stoker.FeatureSpec.from_sizes(0, [1000])
    model = stoker.DLRM(spec, embedding_dim=8, top=(4,), tensor_train={"C1": stoker.TensorTrain(rank=4)})
    shape = TTShape(**{name: tuple(each) for name, each in model.tensor_train["C1"].items()})
    ids = [0, 1, 7, 7, 998, 999]
    batch = stoker.Batch(dense=torch.zeros(len(ids), 0), ids=torch.tensor(ids)[:, None])
    plain = work_of(stoker.DLRM(spec, embedding_dim=8, top=(4,)), batch)
    products, moved = 0, len(ids) * 8 * 4
    for place, (_, left, width) in enumerate(shape.core_shapes):
        if place:
            prefixes = {tuple(_digits(i, shape.rows)[: place + 1]) for i in ids}
            products += len(prefixes) * math.prod(shape.cols[:place]) * left * width
        core = model.embeddings.groups[0].storage.cores[place]
        slice_bytes = core.weight[0].nbytes
        with_state = slice_bytes + sum(each[0].nbytes for each in core.state.values())
        moved += len({_digits(i, shape.rows)[place] for i in ids}) * (slice_bytes + 2 * with_state)
    found = work_of(model, batch)
    assert found["operations"] == pytest.approx(plain["operations"] + 6 * products / len(ids))
    assert found["row_bytes"] == pytest.approx(moved / len(ids))


def _digits(row: int, factors: tuple[int, ...]) -> list[int]:
    found = []
    for count in reversed(factors):
        row, digit = divmod(row, count)
        found.append(digit)
    return found[::-1]


@pytest.mark.slow
def test_a_run_that_ranks_shows_what_decides_and_no_log_loss_as_its_loss(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", rows=1000)
    settings = {"model": "two-tower", "model_options": {"item": ("C1",)}, "loss": "in-batch", "metric": "recall_50"}
    stoker.train(data, out=tmp_path / "run", batch_size=64, epochs=1, display="quiet", tensorboard=False, **settings)
    text = stoker.report(tmp_path / "run").read_text()
    [tiles] = re.findall('<div class="tiles">.*?</div></div>', text)
    assert re.findall("<span>([^,]*), test rows", tiles) == ["recall@50", "AUC", "recall@10"]
    [curve] = re.findall("<figcaption>loss by epoch.*?</figure>", text)
    assert "validation" not in curve
    assert not re.findall("log loss<|normalized entropy|accuracy<|Calibration", text)
    assert "log loss it saves" not in text, "of scores that are no probabilities"
    update = {"number": 1, "rows": 70, "before": {"auc": 0.6, "log_loss": None, "recall_50": 0.25}, "ids": {}}
    said = body(read(RunDirectory(tmp_path / "run")) | {"updates": [update]}, None)
    assert "recall@50 before" in said
    assert "log loss before" not in said


def test_names_of_curves_wrap_and_a_single_value_is_said_once() -> None:
    names = ["a run whose name is long", "another one with an even longer name"]
    drawn = chart({name: [(0.0518, 0.7), (2.0, 0.8)] for name in names}, "AUC")
    [caption] = re.findall("<figcaption>.*</figcaption>", drawn)  # HTML, which wraps: texts of SVG ran over each other
    assert all(name in caption for name in names)
    assert re.findall("<text[^>]*>([^<]*)<", drawn) == ["0.7", "0.8", "0.05", "2"]
    many = chart({str(number): [(0.0, 0.0), (1.0, 1.0)] for number in range(8)}, "AUC")
    assert sorted(map(int, re.findall(r"stroke=.hsl\((\d+) ", many))) == [50, 100, 145, 175, 290, 330]  # not 211 nor 21
    assert re.findall("<text[^>]*>([^<]*)<", chart({"AUC": [(1200.0, 0.7935)]}, "AUC")) == ["0.7935", "1,200"]


def test_long_bars_have_whole_numbers() -> None:
    assert re.findall("start[^>]*>([^<]*)<", bars({"a": 12345.6, "b": 0.1234}, "ms")) == ["12,346", "0.123"]


QUIET: dict[str, Any] = {
    "baselines": {}, "test": {"auc": 0.7}, "valid": {}, "valid_curve": [], "losses": [], "metric": "auc", "k": 10,
    "settings": {"loss": "bce"},
}  # fmt: skip


def analysed(**changes: Any) -> dict[str, Any]:
    fine: dict[str, Any] = {
        "tables": [{"name": "C1", "bytes": 100, "unknown": 0.0}], "cache": None,
        "columns": [{"name": "C1", "table": "C1", "loss": 0.1, "error": 0.01}],
        "calibration": [{"score": 0.3, "label": 0.3, "rows": 1000}],
    }  # fmt: skip
    return fine | changes


SETTINGS = {"loss": "bce", "model": "dlrm", "model_options": {}}
WORSE: dict[str, Any] = {
    "baselines": {"logistic regression": {"test": {"auc": 0.72}}},
    "test": {"auc": 0.7, "positives": 200, "rows": 1000},
}  # fmt: skip


def curve(*values: float) -> list[dict[str, float]]:
    """Evaluations after each epoch of 10 steps."""
    return [{"auc": value, "step": 10 * place, "epoch": place} for place, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("run", "analysis", "change", "gain"),
    [
        ({"baselines": {"average": {"test": {"auc": 0.72}}}}, {}, "Lower the learning rates", "0.0200 AUC"),
        (
            {"test": {}, "valid": {"auc": 0.7}, "baselines": {"average": {"valid": {"auc": 0.72}}}},
            {}, "Lower the learning rates", "0.0200 AUC",
        ),
        (
            {"valid_curve": [{"auc": 0.8, "step": 10, "epoch": 1}, {"auc": 0.7, "step": 40, "epoch": 4}]},
            {}, "Stop after epoch 1 (--epochs 1)", "75% of the training time",
        ),
        (  # patience ends at step 30, one evaluation after the best
            {"valid_curve": curve(0.7, 0.8, 0.7, 0.7)},
            {}, "Stop after epoch 2", "50% of the training time, the same model; 25% with --patience 1",
        ),
        ({"valid_curve": curve(0.7, 0.6, 0.8, 0.7)}, {}, "Stop after epoch 3", "25% of the training time, the same"),
        (
            {"valid_curve": [{"auc": 0.8, "step": 5, "epoch": 0.5}, {"auc": 0.7, "step": 10, "epoch": 1}]},
            {}, "(--steps 5)", "50%",
        ),
        (WORSE | {"settings": SETTINGS}, {}, "Add linear terms (--model-option linear=0.2)", "0.0200 AUC"),
        (
            WORSE | {"settings": SETTINGS | {"row_options": {"eps": 0.0015625}}}, {},
            "(--model-option linear=0.2 --row-option eps=0.00156)", "0.0200 AUC",
        ),
        (
            WORSE | {"settings": SETTINGS | {"model_options": {"linear": 0.2}}}, {},
            "Lower the rate of the dense part, above all", "0.0200 AUC",
        ),
        (
            {"valid_curve": [{"auc": 0.7, "step": 10, "epoch": 1}, {"auc": 0.8, "step": 40, "epoch": 4}]},
            {}, "Train longer", "not known",
        ),
        ({"test": {"normalized_entropy": 1.25}}, {}, "Do not use these scores", "20.0% of the log loss"),
        ({"valid": {"rows": 500, "positives": 42}}, {}, "Hold out more rows for validation", "figures that tell"),
        ({"losses": [{"stall_share": 0.2}, {"stall_share": 0.4}]}, {}, "more fast memory", "at most 30%"),
        ({}, {"columns": [{"name": "C1", "table": "C1", "loss": 0, "error": 0.001}]}, "schema, or tensor", "100 B"),
        (
            {}, {"columns": [{"name": "C1", "table": "C1", "loss": 0, "error": 0.001}],
                 "tables": [{"name": "C1", "bytes": 100, "unknown": 0.0, "compressed": True}]},
            "Leave out C1, or make them smaller (min_count in the schema)", "100 B, 100%",
        ),
        ({}, {"tables": [{"name": "C1", "bytes": 100, "unknown": 0.3}]}, "Train more often", "new ids"),
        ({}, {"cache": {"rates": {"belady": 0.8, "pinned": 0.6}}}, "Look further ahead", "50% of the fetched"),
        ({}, {"calibration": [{"score": 0.5, "label": 0.3, "rows": 1000}]}, "as probabilities", "bids and thresholds"),
    ],
)  # fmt: skip
def test_advice(run: dict[str, Any], analysis: dict[str, Any], change: str, gain: str) -> None:
    [found] = advise(QUIET | run, analysed(**analysis))
    assert change in found.change
    assert gain in found.gain


def test_charts_write_short_numbers_and_titles_that_wrap() -> None:
    drawn = chart({"rate": [(0.0, 9000.0), (1.0, 11_780.0)]}, "samples/s by epoch")
    assert ">11.78 k</text>" in drawn  # 1.178e+04 was wider than its margin
    assert ">9000</text>" in drawn
    for each in (drawn, bars({"rows at full speed": 2.0}, "samples/s by epoch")):
        assert "<figcaption>samples/s by epoch</figcaption>" in each


def test_advice_names_the_metric_that_decided() -> None:
    one_class = {"auc": None, "rows": 500, "positives": 0}
    for metric, more in (("auc", one_class), ("log_loss", {"auc": 0.6})):
        for losses, said in (
            ((0.5, 0.7), "log loss was best at step 10; no later evaluation was better"),
            ((0.5, 0.5), "log loss was best at step 10; no later evaluation was better"),
            ((0.5, math.nan), "log loss was best at step 10; no later evaluation was better"),
            ((0.7, 0.5), "improved .* 0.2000"),
        ):
            curve = [{"log_loss": loss, "step": 10 * place, "epoch": place, **more}
                     for place, loss in enumerate(losses, 1)]  # fmt: skip
            [found] = advise(QUIET | {"valid_curve": curve, "metric": metric}, None)
            assert re.search(said, found.why), found
            assert "log loss" in found.why
    nothing = [{"auc": None, "log_loss": None, "step": step, "epoch": step} for step in (1, 2)]
    assert advise(QUIET | {"valid_curve": nothing}, None) == []


@pytest.mark.slow
def test_a_run_without_validation_rows_is_measured(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    log = pl.DataFrame({"y": random.integers(0, 2, 300), "item": random.integers(0, 9, 300)})
    schema = stoker.Schema.from_dict({"name": "log", "label": "y", "categorical": [{"name": "item", "type": "int"}]})
    data = stoker.prepare(schema, log, out=tmp_path / "all", split="random:1,0")
    stoker.train(data, out=tmp_path / "run", **SMALL)
    said = " ".join(page_of(tmp_path / "run").words)
    assert "Measured on 300 train rows" in said
    assert "no checkpoint" not in said


@pytest.mark.slow
def test_raw_ids_are_not_called_known(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    users = pl.Series(random.integers(0, 500, 1000)).set(pl.Series(random.random(1000) < 0.5), None)
    log = pl.DataFrame({"y": random.integers(0, 2, 1000), "user": users, "item": random.integers(0, 50, 1000)})
    columns = [{"name": "user", "type": "int", "oov": "grow", "grow": {"rows": 8}}, {"name": "item", "type": "int"}]
    schema = stoker.Schema.from_dict({"name": "log", "label": "y", "categorical": columns})
    data = stoker.prepare(schema, log, out=tmp_path / "data", split="random:0.5,0.5")
    stoker.train(data, out=tmp_path / "run", **SMALL)
    stoker.report(tmp_path / "run")
    found = RunDirectory(tmp_path / "run").read(FILE)
    assert {each["name"]: each["unknown"] is None for each in found["tables"]} == {"user": True, "item": False}
    assert not [each for each in found["slices"] if each["slice"].startswith("user")]


def test_a_run_without_faults_gets_no_advice() -> None:
    assert advise(QUIET, analysed()) == []
    assert advise(QUIET, analysed(tables=[{"name": "C1", "bytes": 1, "unknown": 0.9, "unknown_train": 0.8}])) == []
    assert advise(QUIET, None) == []
    assert advise(QUIET | {"valid_curve": curve(0.7, 0.75, 0.752)}, None) == []  # hardly better
    ranks = {"settings": {"loss": "in-batch"}, "test": {"rows": 500, "positives": 500}}
    assert advise(QUIET | ranks, None) == []
    odd = {"calibration": [{"score": 0.5, "label": 0.3, "rows": 1000}],
           "columns": [{"name": "C1", "table": "C1", "loss": 0, "error": 0.001}]}  # fmt: skip
    assert len(advise(QUIET, analysed(**odd))) == 2
    assert advise(QUIET | ranks, analysed(**odd)) == []


def test_advice_wants_figures_that_are_no_chance() -> None:
    unsure = [{"name": "C1", "table": "C1", "loss": 0.001, "error": 0.01}]
    assert advise(QUIET, analysed(columns=unsure)) == []
    few = [{"score": 0.4, "label": 0.3, "rows": 10}]
    idle = [{"name": "C1", "table": "C1", "loss": 0.001, "error": 0.001}]
    assert advise(QUIET, analysed(columns=idle, calibration=few)) == []


def test_charts_of_one_point_and_of_none() -> None:
    assert chart({"a": []}, "nothing") == ""
    Page(f"<html>{chart({'a': [(1.0, 2.0)]}, 'one')}</html>")
    Page(f"<html>{bars({'a': 0.0}, 'zero')}</html>")
    long = chart({"a": [(float(place), 1.0) for place in range(100_000)]}, "long")
    assert len(long) < 10_000


@pytest.mark.slow
def test_the_command(made: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["report", str(made / "run"), "--out", str(tmp_path / "a.html"), "--json"])
    assert json.loads(done.stdout)["out"] == str(tmp_path / "a.html")
    Page((tmp_path / "a.html").read_text(encoding="utf-8"))
    with pytest.raises(ConfigError, match=r"a\.pdf does not end in \.html"):
        stoker.report(made / "run", tmp_path / "a.pdf")
    with pytest.raises(ConfigError, match="is not a run directory"):
        stoker.report(tmp_path / "none")
    shutil.copytree(made / "run", tmp_path / "other")
    both = ["compare", str(made / "run"), str(tmp_path / "other"), "--page", str(tmp_path / "both.html")]
    assert runner.invoke(app, both).exit_code == 0
    said = " ".join(Page((tmp_path / "both.html").read_text(encoding="utf-8")).words)
    assert "Best validation figures" in said


def test_read_takes_the_best_figures_of_a_finished_run(made: Path) -> None:
    directory = RunDirectory(made / "run")
    assert read(directory)["valid"] == directory.read("report.json")["valid"]


@pytest.mark.slow
def test_files_that_are_not_what_a_run_writes(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    stoker.report(run)
    analysis = RunDirectory(run).read(FILE)
    RunDirectory(run).write(FILE, {"checkpoint": analysis["checkpoint"]})  # of another version
    page_of(run)
    assert RunDirectory(run).read(FILE).keys() == analysis.keys()
    for text, kind in (("[]", ConfigError), ("{}", DataError)):
        (run / "report.json").write_text(text)
        for ask in (lambda: stoker.report(run), lambda: stoker.compare(run, made / "run")):
            with pytest.raises(kind, match=r"report\.json"):
                ask()
