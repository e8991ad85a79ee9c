"""TBSM, DIN and SASRec on logs with histories: they learn from them; placement, stopping and resuming change no bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import small_runs
import torch

import stoker
from stoker import synthetic
from stoker.dataset.dataset import Dataset
from stoker.models import MODELS, SequenceModel
from stoker.testing import make_dataset
from stoker.training.report.analysis import analyse

#: recipe -> rows of the generated log, the pairs of its history, and their steps
LOGS: dict[str, tuple[int, dict[str, str], int]] = {
    "globo": (6_000, {"article": "clicked"}, 20),
    "ebnerd": (800, {"article": "history"}, 20),
    "taobao": (12_000, {"item": "items", "category": "categories"}, 20),
}
SIZES: dict[str, dict[str, Any]] = {
    "tbsm": {"tower": (12,), "attention": (8,), "top": (16,)},
    "din": {"attention": (8,), "hidden": (16,), "activation": "dice"},
    "sasrec": {"heads": 2, "hidden": (8,)},
}
SMALL = {**small_runs.SMALL, "backend": "reference"}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    found = {}
    for name, (rows, _, _) in LOGS.items():
        folder = tmp_path_factory.mktemp(name)
        raw = folder / {"globo": "log.parquet", "taobao": "log.csv"}.get(name, "log")
        synthetic.write(name, rows, raw)
        files = sorted(raw.iterdir()) if raw.is_dir() else [raw]
        found[name] = stoker.prepare(name, files, out=folder / "data")
    return found


@pytest.mark.slow
def test_the_sequences_of_one_history_are_shuffled_together(logs: dict[str, Dataset]) -> None:
    data = logs["taobao"]
    found = analyse(MODELS["din"](data.schema, seed=1), data, stoker.TrainConfig(), rows=300, seconds=600)
    brings = {each["name"]: each["loss"] for each in found["columns"]}
    assert brings.keys() == {feature.name for feature in data.schema.features} | set(data.schema.dense)
    assert brings["items"] == brings["categories"] != 0


@pytest.mark.slow
@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("model", SIZES)
def test_trains_resumes_verifies_and_predicts(logs: dict[str, Dataset], tmp_path: Path, log: str, model: str) -> None:
    data, settings = logs[log], {**SMALL, "model": model, "model_options": SIZES[model], "row_optimizer": "adagrad"}
    whole = stoker.train(data, out=tmp_path / "a", steps=12, device_memory="6KiB", **settings)
    assert isinstance(whole.model, SequenceModel)
    assert (whole.model.history, whole.model.num_steps) == LOGS[log][1:]
    stoker.train(data, out=tmp_path / "b", steps=5, **settings)
    stoker.train(resume=tmp_path / "b", steps=12, display="quiet")
    loaded, resumed = (stoker.load(tmp_path / run / "checkpoints" / "step_000000012").model for run in "ab")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert stoker.verify(tmp_path / "b", steps=4, device_memory="6KiB").identical
    scores = tmp_path / "scores.csv"
    stoker.predict(loaded, data.test, scores)
    assert len(scores.read_text().splitlines()) == len(data.test) + 1
    assert stoker.evaluate(loaded, data.test) == stoker.evaluate(resumed, data.test)


@pytest.mark.slow
@pytest.mark.parametrize("model", SIZES)
def test_learns_from_the_steps(logs: dict[str, Dataset], tmp_path: Path, model: str) -> None:
    """Users of the generated log prefer items of their group: only the history says which, as no user is tested on."""
    settings = {**SMALL, "embedding_dim": 8, "row_optimizer": "adagrad", "backend": "auto"}
    options = {"tbsm": {"tower": (24, 16)}}.get(model, {})
    result = stoker.train(
        logs["taobao"], out=tmp_path / "run", model=model, model_options=options, epochs=6, row_lr=0.1, **{
            name: value for name, value in settings.items() if name != "model_options"
        },
    )  # fmt: skip
    assert result.valid["auc"] is not None
    assert result.valid["auc"] > 0.6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which is not installed here")
@pytest.mark.parametrize("model", SIZES)
def test_compiled_is_near(logs: dict[str, Dataset], model: str) -> None:
    data = logs["taobao"]
    batch = next(iter(data.train.batches(64, seed=0)))
    losses = []
    for compiled in (False, True):
        made = MODELS[model](data.schema, embedding_dim=8, **SIZES[model])
        if compiled:  # that it is one graph is ours; machine code is DLRM's (tests/training/test_loop.py)
            made.compile_dense(backend="aot_eager")
        made.loss(batch).backward()
        losses.append([made.loss(batch).item(), *(p.grad.norm().item() for p in made.dense_parameters())])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_the_command_line_trains_them(
    logs: dict[str, Dataset], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stoker.cli import main

    common = ["--dim", "4", "--steps", "3", "--batch-size", "32", "--no-tensorboard", "--threads", "1"]

    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        return int(caught.value.code or 0), capsys.readouterr().err

    globo = str(logs["globo"].path)
    chosen = ["--model", "tbsm", "--top", "16", "--model-option", "tower=[12]", "--model-option", "inner=dot"]
    assert call("train", globo, "--out", str(tmp_path / "a"), *common, *chosen)[0] == 0
    model = stoker.load(tmp_path / "a").model
    assert model.config()["tower"] == [12]
    assert model.config()["history"] == {"article": "clicked"}
    chosen = ["--model", "din", "--hidden", "16-8", "--model-option", 'history={"article": "clicked"}']
    assert call("train", globo, "--out", str(tmp_path / "b"), *common, *chosen)[0] == 0
    plain = make_dataset(tmp_path / "plain", rows=200, sequence={1: 3})
    code, said = call("train", str(plain.path), "--out", str(tmp_path / "c"), *common, "--model", "din")
    assert code != 0
    assert "C2 share no table with a one-id feature" in " ".join(said.split())
    code, said = call(
        "train", globo, "--out", str(tmp_path / "d"), *common, "--model", "tbsm", "--model-option", "rank=2"
    )
    assert code != 0
    assert "It has: history, bottom, tower, attention, top, inner, position." in " ".join(said.split())
