"""Preparing like a dataset: by command, without features, like reordered ones, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import stoker
import stoker.testing
from stoker.base.errors import ConfigError, DataError
from stoker.cli import main
from stoker.prep.recipe import RawInput, Recipe
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule, Timestamp

SCHEMA = Schema(
    name="shop",
    label=Label(column="y"),
    timestamp=Timestamp(column="t"),
    dense=(DenseColumn(name="x", fill="median", transforms=("zscore",)),),
    categorical=(
        CategoricalColumn(name="word", min_count=2, missing="category"), CategoricalColumn(name="hash", hash_buckets=7),
        CategoricalColumn(name="hex", type="hex"), CategoricalColumn(name="real", type="float"),
    ),
    sequence=(SequenceColumn(name="seen", table="hex", type="hex"),),
    split=SplitRule(rule="time", train=0.6, valid=0.2, test=0.2),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("like")
    lines = ["y,t,x,word,hash,hex,real,seen"]
    for n in range(400):
        word = ["a", "bb", "", "ccc", f"w{n}"][n * 7 % 5]
        x = "" if n % 11 == 0 else f"{n % 17 / 4}"
        seen = "|".join(f"{k:x}" for k in range(n % 4))
        lines.append(f"{n % 3 == 0:d},{n},{x},{word},{n % 13},{2**63 + n % 23:x},{n % 5 / 2},{seen}")
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    stoker.prepare(SCHEMA, folder / "log.csv", out=folder / "made")
    return folder


def rows(split: stoker.dataset.split.Split) -> list[tuple[list[float], list[int], list[int], float]]:
    found = []
    for number in range(len(split)):
        row = split[number]
        found.append((row["dense"].tolist(), row["ids"].tolist(), row["lengths"].tolist(), float(row["labels"])))
    return found


@pytest.mark.slow
def test_all_rows_come_out_as_they_were(folder: Path, tmp_path: Path) -> None:
    data = stoker.Dataset(folder / "made")
    again = stoker.prepare(files=folder / "log.csv", like=folder / "made", out=tmp_path / "again")
    assert rows(again.test) == rows(data.train) + rows(data.valid) + rows(data.test)
    assert again.schema_hash == data.schema_hash
    assert again.manifest["dense_stats"] == data.manifest["dense_stats"]
    unknown = again.manifest["unknown"]["test"]["word"]
    assert 0 < unknown[0] < unknown[1] == 400
    third = stoker.prepare(files=folder / "log.csv", like=tmp_path / "again", out=tmp_path / "third")  # of its own kind
    assert rows(third.test) == rows(again.test)


@pytest.mark.slow
def test_like_a_reordered_dataset(folder: Path, tmp_path: Path) -> None:
    ordered = stoker.reorder(folder / "made", out=tmp_path / "ordered", tables=["word", "hex"])
    again = stoker.prepare(files=folder / "log.csv", like=tmp_path / "ordered", out=tmp_path / "again")
    assert again.schema_hash == ordered.schema_hash
    assert rows(again.test) == rows(ordered.train) + rows(ordered.valid) + rows(ordered.test)


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    found = capsys.readouterr()
    return int(caught.value.code or 0), found.out, found.err


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    like = ("prepare", "--like", folder / "made", folder / "log.csv", "--out", tmp_path / "new")
    code, out, _ = call(capsys, *like, "--json")
    assert code == 0
    assert json.loads(out)["rows"] == {"train": 0, "valid": 0, "test": 400}
    code, _, error = call(capsys, *like, "--min-count", "2")
    assert code != 0
    assert "--like takes those of the dataset" in error
    code, _, error = call(capsys, *like, "--preset", "raw", "--overwrite")
    assert code != 0
    assert "leave --preset out" in error
    code, _, error = call(capsys, "prepare", "--like", tmp_path / "none", "x.csv", "--out", tmp_path / "o")
    assert code != 0
    assert "there is no dataset at" in error
    for recipe in ("shop.toml", "trivago"):
        code, _, error = call(capsys, "prepare", recipe, *like[1:])
        assert code != 0
        assert f"Leave {recipe} out" in error


def test_a_model_scores_the_new_rows(folder: Path, tmp_path: Path) -> None:
    result = stoker.train(
        folder / "made", out=tmp_path / "run", model="dlrm", model_options={"bottom": (8,), "top": (8,)},
        embedding_dim=4, batch_size=64, epochs=1, display="quiet", tensorboard=False,
    )  # fmt: skip
    again = stoker.prepare(files=folder / "log.csv", like=folder / "made", out=tmp_path / "again")
    whole = stoker.evaluate(result.model, again.test)
    assert whole["rows"] == 400
    assert np.isfinite(whole["auc"])


def test_what_cannot_be_prepared_like(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a recipe, a schema, or like=DATASET"):
        stoker.prepare(files=folder / "log.csv", out=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"has a schema, so 'criteo' cannot be used as well"):
        stoker.prepare("criteo", folder / "log.csv", like=folder / "made", out=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"has the ids of the other dataset. Leave reorder out"):
        stoker.prepare(files=folder / "log.csv", like=folder / "made", out=tmp_path / "out", reorder=True)
    plain = stoker.testing.make_dataset(tmp_path / "plain", rows=50)
    with pytest.raises(DataError, match="does not say how it was prepared"):
        stoker.prepare(files=folder / "log.csv", like=plain.path, out=tmp_path / "out")


def test_a_recipe_of_ones_own_is_asked_for(folder: Path, tmp_path: Path) -> None:
    schema = Schema(name="own", label=Label(column="y"), categorical=(CategoricalColumn(name="word"),))
    recipe = Recipe(
        name="mine", description="", presets={"only": lambda: schema}, derive=lambda inputs, _: inputs["log"],
        inputs={"log": RawInput(columns={"y": "int", "word": "string"})},
    )  # fmt: skip
    stoker.prepare(recipe, folder / "log.csv", out=tmp_path / "made")
    with pytest.raises(DataError, match=r"made by the recipe 'mine', which is none of Stoker's. Pass the recipe"):
        stoker.prepare(files=folder / "log.csv", like=tmp_path / "made", out=tmp_path / "new")
    new = stoker.prepare(recipe, folder / "log.csv", like=tmp_path / "made", out=tmp_path / "new")
    assert len(new.test) == 400
