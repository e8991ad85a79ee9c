"""Runs whose large tables are tensor trains: trained, placed, resumed, scored and verified like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import ROWS, SMALL, assert_same_run, checkpoint_files, records

import stoker
from stoker.base.errors import CheckpointError, ConfigError
from stoker.cli.options import own_numbers
from stoker.placement.placement import row_bytes
from stoker.tables import Cached, TensorTrain
from stoker.testing import make_dataset
from stoker.training import TrainConfig

TRAINS: dict[str, Any] = {**SMALL, "tt_rank": 3, "tt_rows": 500, "steps": 20, "save_every": 5, "log_every": 10}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> stoker.Dataset:
    return make_dataset(tmp_path_factory.mktemp("tt") / "d", rows=1500, num_embeddings=ROWS)


@pytest.mark.slow
def test_a_run_stores_cores_and_goes_on_from_them(data: stoker.Dataset, tmp_path: Path) -> None:
    whole = stoker.train(data, out=tmp_path / "whole", **TRAINS)
    names = [table.name for table in whole.model.embeddings.stored]
    large = [name for name, count in data.schema.num_embeddings.items() if count >= 500]
    assert len(large) == 1
    assert names[:3] == [f"{large[0]}.core{place}" for place in (1, 2, 3)]
    manifest = json.loads((tmp_path / "whole/checkpoints/step_000000020/manifest.json").read_text())
    assert [entry["name"] for entry in manifest["tables"]] == names
    assert list(manifest["model"]["tensor_train"]) == large
    assert sum(entry["num_embeddings"] * entry["embedding_dim"] for entry in manifest["tables"][:3]) < 500 * 4
    part = {**TRAINS, "steps": 10}
    stoker.train(data, out=tmp_path / "parts", **part)
    stoker.train(resume=tmp_path / "parts", steps=20, display="quiet")
    assert checkpoint_files(tmp_path / "parts", 20) == checkpoint_files(tmp_path / "whole", 20)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["placed first", "resident first"])
def test_tables_beside_tensor_trains_may_lie_anywhere(data: stoker.Dataset, tmp_path: Path, order: str) -> None:
    stoker.train(data, out=tmp_path / "resident", **TRAINS)
    config = TrainConfig(**{name: value for name, value in TRAINS.items() if name != "display"})
    stored = config.stored_tables(data.schema)
    state = stoker.RowWiseAdagrad(lr=0.1).state
    cores = sum(t.num_embeddings * row_bytes(t, state) for t in stored if ".core" in t.name)
    rows = sum(t.num_embeddings * row_bytes(t, state) for t in stored if ".core" not in t.name)
    budget = str(cores + rows // 2)
    stoker.train(data, out=tmp_path / "placed", device_memory=budget, **TRAINS)
    assert_same_run(tmp_path / "placed", tmp_path / "resident")
    assert records(tmp_path / "placed", "train")[-1]["hit_rate"] < 1
    first, then = (budget, "all") if order == "placed first" else ("all", budget)
    stoker.train(data, out=tmp_path / "both", **{**TRAINS, "steps": 10, "device_memory": first})
    stoker.train(resume=tmp_path / "both", steps=20, device_memory=then, display="quiet")
    assert checkpoint_files(tmp_path / "both", 20) == checkpoint_files(tmp_path / "resident", 20)
    found = stoker.verify(tmp_path / "placed", steps=5)
    assert found.identical


def test_a_checkpoint_of_cores_builds_its_model_and_refuses_others(data: stoker.Dataset, tmp_path: Path) -> None:
    trained = stoker.train(data, out=tmp_path / "run", **TRAINS).model
    checkpoint = tmp_path / "run/checkpoints/step_000000020"
    loaded = stoker.load(checkpoint).model
    for table in trained.tables:
        assert torch.equal(loaded.embeddings.rows(table.name), trained.embeddings.rows(table.name))
    placed = stoker.load(checkpoint, placement=Cached(slots=40)).model
    assert placed.tensor_train == loaded.tensor_train
    plain = TrainConfig(**{name: v for name, v in SMALL.items() if name != "display"})
    other = plain.make_model(data.schema, stoker.RowWiseAdagrad(lr=0.05))
    with pytest.raises(CheckpointError, match="tensor_train"):
        stoker.load(checkpoint, other)


def test_a_strategy_in_a_placement_is_part_of_the_model(data: stoker.Dataset) -> None:
    name = max(data.schema.num_embeddings, key=data.schema.num_embeddings.__getitem__)
    given = {"embedding_dim": 4, "bottom": (8,), "top": (8,)}
    by_placement = stoker.DLRM(data.schema, placement={name: TensorTrain(rank=3)}, **given)
    by_name = stoker.DLRM(data.schema, tensor_train={name: TensorTrain(rank=3)}, **given)
    assert by_placement.config() == by_name.config()
    again = stoker.DLRM.from_config(data.schema, json.loads(json.dumps(by_name.config())), placement=Cached(slots=50))
    assert again.config() == by_name.config()
    for table in by_name.tables:
        assert torch.equal(again.embeddings.rows(table.name), by_name.embeddings.rows(table.name))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tt_rank": 0}, "tt_rank"),
        ({"tt_rank": 4, "tt_cores": 5}, "2 to 4"),
        ({"tt_own": {"C1": 0}}, "tt_own: .* 0 numbers of its own"),
    ],
)
def test_settings_out_of_range(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainConfig(**settings)


@pytest.mark.slow
def test_rows_may_keep_numbers_of_their_own(data: stoker.Dataset, tmp_path: Path) -> None:
    sizes = data.schema.num_embeddings
    large = max(sizes, key=sizes.__getitem__)
    other = sorted(sizes, key=sizes.__getitem__)[-2]
    both = {**TRAINS, "tt_own": {other: 2}}
    whole = stoker.train(data, out=tmp_path / "whole", **both)
    stored = {table.name: (table.num_embeddings, table.embedding_dim) for table in whole.model.embeddings.stored}
    assert stored[f"{other}.core1"] == (sizes[other], 2)
    assert stored[f"{other}.core2"] == (1, 2 * 4)
    assert f"{large}.core3" in stored
    assert large not in stored
    stoker.train(data, out=tmp_path / "parts", **{**both, "steps": 10})
    stoker.train(resume=tmp_path / "parts", steps=20, display="quiet")
    assert checkpoint_files(tmp_path / "parts", 20) == checkpoint_files(tmp_path / "whole", 20)
    assert stoker.verify(tmp_path / "whole", steps=5).identical
    all_of_them = {**SMALL, "steps": 2, "tt_own": dict.fromkeys(sizes, 1)}
    stoker.train(data, out=tmp_path / "all", **all_of_them)
    with pytest.raises(ConfigError, match="all tables of this run are tensor trains"):
        stoker.verify(tmp_path / "all", steps=1)
    alone = TrainConfig(embedding_dim=4, tt_own={large: 2}).tensor_trains(data.schema)
    assert [train.shape.ranks for train in alone.values() if train.shape] == [(2,)]


def test_own_numbers_that_cannot_be(data: stoker.Dataset) -> None:
    name = next(iter(data.schema.num_embeddings))
    with pytest.raises(ConfigError, match=f"'{name}x', which does not exist. Did you mean '{name}'"):
        TrainConfig(tt_own={f"{name}x": 2}).tensor_trains(data.schema)
    with pytest.raises(ConfigError, match="has 4 columns, so rows with 4 numbers of their own save nothing"):
        TrainConfig(embedding_dim=4, tt_own={name: 4}).tensor_trains(data.schema)


def test_bfloat16_cores_are_refused(data: stoker.Dataset) -> None:
    with pytest.raises(ConfigError, match="float32"):
        TrainConfig(tt_rank=4, tt_rows=500, dtype="bfloat16").tensor_trains(data.schema)


def test_nothing_is_compressed_unless_asked_for(data: stoker.Dataset) -> None:
    assert TrainConfig(tt_rows=1).tensor_trains(data.schema) == {}
    assert np.all([".core" not in table.name for table in TrainConfig(tt_rows=1).stored_tables(data.schema)])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tt_rank": 3}, "tt_rank is ignored: no table of 1,000,000 rows or more gets smaller by rank 3"),
        ({"tt_rank": 300, "tt_rows": 1}, "tt_rank is ignored: no table of 1 rows or more gets smaller by rank 300"),
        ({"tt_rows": 5, "tt_cores": 2}, "tt_rows and tt_cores are ignored: without tt_rank"),
    ],
)
def test_settings_that_compress_nothing_are_told(
    data: stoker.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, int], words: str
) -> None:
    stoker.train(data, out=tmp_path / "run", **{**SMALL, "display": "plain"}, steps=1, **settings)
    assert words in " ".join(capsys.readouterr().err.split())


def test_own_numbers_on_the_command_line() -> None:
    assert own_numbers(["user=2", "a=b=1"]) == {"user": 2, "a=b": 1}
    for text in ("user", "user=", "=2", "user=two", "user=-1"):
        with pytest.raises(ConfigError, match="is not TABLE=K"):
            own_numbers([text])
