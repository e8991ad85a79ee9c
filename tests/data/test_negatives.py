"""Sampled rows of label 0 for logs of positive rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import stoker
from stoker.base.errors import ConfigError, DataError, SchemaError
from stoker.cli import main
from stoker.dataset.dataset import Dataset
from stoker.prep.prepare import run_prepare
from stoker.prep.schema import Schema

ROWS, EACH = 3000, 3
SCHEMA: dict[str, Any] = {
    "timestamp": {"column": "at"},
    "split": {"rule": "time", "train": 0.6, "valid": 0.2, "test": 0.2},
    "negatives": {"columns": ["song", "artist"], "per_positive": EACH},
    "categorical": [{"name": "user"}, {"name": "song", "type": "int"}, {"name": "artist"}],
    "keep": ["user", "song", "artist", "at"],
}
HISTORY = {"derive": ["history by=user column=song order=at length=4 name=played"]}


def log() -> pl.DataFrame:
    """Return plays; songs below 40 are in the first 60 % of the time, the others after it."""
    draw = np.random.default_rng(0)
    song = np.minimum(draw.zipf(1.3, ROWS), 40) - 1 + 40 * (np.arange(ROWS) >= 0.6 * ROWS)
    return pl.DataFrame(
        {
            "user": [f"u{one}" for one in draw.integers(50, size=ROWS)], "song": song,
            "artist": [f"a{one % 7}" for one in song], "at": np.arange(ROWS),
        }
    )  # fmt: skip


def prepared(out: Path, values: dict[str, Any], files: Any = None, **given: Any) -> Dataset:
    run_prepare(Schema.from_dict(values), _logged(out) if files is None else files, out=out, **given)
    return Dataset(out)


def _logged(out: Path) -> Path:
    path = out.with_name("log.csv")
    if not path.exists():
        log().write_csv(path)
    return path


def kept(data: Dataset, split: str) -> pl.DataFrame:
    rows = data.splits[split]
    labels = np.concatenate([batch.labels.numpy() for batch in rows.batches(512)])
    found = pl.from_arrow(rows.kept.read())
    assert isinstance(found, pl.DataFrame)
    return found.with_columns(pl.Series("label", labels), pl.Series("row", np.arange(len(labels)) // (EACH + 1)))


@pytest.mark.slow
def test_each_row_is_followed_by_others_with_items_of_its_split(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data", SCHEMA)
    given = log()
    for split, (first, last) in {"train": (0, 1800), "valid": (1800, 2400), "test": (2400, 3000)}.items():
        rows, positive = kept(data, split), given[first:last]
        assert rows["label"].to_list() == [1.0, *[0.0] * EACH] * (last - first)
        sampled = rows.filter(pl.col("label") == 0)
        repeated = positive[np.repeat(np.arange(last - first), EACH)]
        for name in ("user", "at"):
            assert sampled[name].to_list() == repeated[name].cast(sampled[name].dtype).to_list()
        assert (sampled["song"] != repeated["song"]).all()
        assert (sampled["artist"] == "a" + (sampled["song"].cast(pl.Int64) % 7).cast(pl.String)).all()
        assert set(sampled["song"]) <= set(positive["song"])  # no item of another split
        # Frequent items are drawn more often.
        share = (positive["song"] == positive["song"].mode()[0]).mean()
        drawn = (sampled["song"] == positive["song"].mode()[0]).mean()
        assert isinstance(share, float)
        assert isinstance(drawn, float)
        assert min(share, drawn) > 0.1
    assert data.manifest["splits"]["train"]["rows"] == 1800 * (EACH + 1)
    again = Schema.from_dict(data.manifest["schema"])
    assert again.negatives is not None
    assert again.negatives.per_positive == EACH
    with pytest.raises(
        ConfigError, match=r"training rows, none with label 0, .*nothing to learn.*negatives.*two-tower"
    ):
        stoker.train(prepared(tmp_path / "only", replaced(per_positive=0)), out=tmp_path / "run", display="quiet")


def replaced(**given: Any) -> dict[str, Any]:
    return {**SCHEMA, "negatives": {**SCHEMA["negatives"], **given}}


def test_uniform_draws_do_not_depend_on_frequency(tmp_path: Path) -> None:
    rows = kept(prepared(tmp_path / "data", replaced(by="uniform")), "train").filter(pl.col("label") == 0)
    counts = rows["song"].value_counts()["count"]
    assert len(counts) == 40
    assert counts.max() < 2 * counts.median()  # type: ignore[operator]


@pytest.mark.slow
def test_the_same_bytes_for_any_blocks_threads_and_formats(tmp_path: Path) -> None:
    values = {**SCHEMA, **HISTORY}
    for name, given in {"one": {"threads": 1}, "two": {"threads": 4, "block_bytes": 5000}}.items():
        prepared(tmp_path / name, values, **given)
    log().write_parquet(tmp_path / "log.parquet")
    prepared(tmp_path / "three", values, tmp_path / "log.parquet")
    shards = [
        {path.name: path.read_bytes() for path in sorted((tmp_path / name / "train").iterdir())}
        for name in ("one", "two", "three")
    ]
    assert shards[0] == shards[1] == shards[2]
    different = prepared(tmp_path / "other", {**values, "negatives": {**SCHEMA["negatives"], "seed": 1}}, threads=1)
    assert (different.path / "train/00000.safetensors").read_bytes() != shards[0]["00000.safetensors"]


@pytest.mark.slow
def test_an_interrupted_preparation_continues_to_the_same_bytes(tmp_path: Path) -> None:
    whole = prepared(tmp_path / "whole", SCHEMA, block_bytes=5000)

    def stop(progress: Any) -> None:
        if progress.stage == "encode" and 0 < progress.done < progress.total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="kept"):
        prepared(tmp_path / "data", SCHEMA, block_bytes=5000, progress=stop)
    again = prepared(tmp_path / "data", SCHEMA, block_bytes=5000)
    assert again.manifest["splits"] == whole.manifest["splits"]


@pytest.mark.slow
def test_window_features_see_rows_of_the_log_only(tmp_path: Path) -> None:
    values = {**SCHEMA, **HISTORY}
    data = prepared(tmp_path / "data", values)
    plain = prepared(tmp_path / "plain", {**values, "negatives": {"per_positive": 0}})
    bags = [[_bags(batch) for batch in found.train.batches(1800)] for found in (data, plain)]
    some, alone = ([bag for batch in found for bag in batch] for found in bags)
    words = [pl.read_parquet(found.path / "vocab/song.parquet")["value"].to_list() for found in (data, plain)]
    named = [[[words[at][one - 1] for one in bag] for bag in found] for at, found in enumerate((some, alone))]
    assert named[0] == [bag for bag in named[1] for _ in range(EACH + 1)]
    assert max(map(len, named[1])) == 4


def _bags(batch: stoker.Batch) -> list[list[int]]:
    """Return the ids of the last feature, the history, of each row."""
    assert batch.offsets is not None
    cuts = batch.offsets.tolist()
    return [batch.ids[cuts[at] : cuts[at + 1]].tolist() for at in range(3, len(cuts) - 1, 4)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"negatives": None}, r"'label' is missing.*\[negatives\]"),
        ({"negatives": {"per_positive": 2}}, "negatives: columns is missing"),
        (
            {"negatives": {"columns": ["songs"]}},
            "names 'songs', which nothing in the schema reads. Did you mean 'song'",
        ),
        ({"negatives": {"columns": ["at"]}}, "names 'at', which is not of the item"),
        ({"negatives": {"columns": ["song"], "by": "popular"}}, "not one of: popularity, uniform"),
        ({"derive": ["mean_target by=user"]}, "mean_target.*needs labels"),
        ({"derive": ["past_count by=user,song order=at"]}, "reads 'song' of negatives.columns and 'user'"),
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, Any], said: str) -> None:
    values = {key: value for key, value in {**SCHEMA, **change}.items() if value is not None}
    with pytest.raises(SchemaError, match=said):
        Schema.from_dict(values)


def test_a_column_of_the_item_that_is_not_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"lacks 'artist', which has one value for each 'song'.*Add it"):
        prepared(tmp_path / "data", replaced(columns=["song"]))


def test_new_rows_are_scored_as_they_are_and_a_two_tower_model_knows_the_item(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data", replaced(per_positive=0))
    log()[:20].write_csv(tmp_path / "new.csv")
    new = stoker.prepare(files=tmp_path / "new.csv", like=data)
    assert len(new.test) == 20
    assert next(iter(new.test.batches(20))).labels.isnan().all()
    result = stoker.train(
        data, out=tmp_path / "run", model="two-tower", loss="in-batch", steps=3, batch_size=64, display="quiet"
    )
    assert result.model.config()["item"] == ["song", "artist"]


def test_the_draft_proposes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _logged(tmp_path / "data")
    text = stoker.draft_schema(tmp_path / "log.csv")
    assert '# [negatives]\n# columns = ["song"]\n# per_positive = 4\n' in text
    with pytest.raises(SystemExit):
        main(["train", str(tmp_path / "log.csv"), "--out", str(tmp_path / "run")])
    assert "uncomment [negatives] there" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("history", [False, True])
def test_new_rows_to_evaluate_get_rows_of_label_0_too(tmp_path: Path, history: bool) -> None:
    data = prepared(tmp_path / "data", {**SCHEMA, **(HISTORY if history else {})})
    plays = log()[-200:].with_columns(pl.col("at") + 200)
    with pytest.warns(UserWarning, match="no row has a known value of column"):  # those of training are others
        new = stoker.prepare(files=plays, like=data, negatives=True)
    rows = kept(new, "test")
    assert rows["label"].to_list() == [1.0, 0.0, 0.0, 0.0] * 200
    own = rows.filter(pl.col("label") == 1)
    assert own["song"].to_list() == plays["song"].to_list()
    drawn = rows.filter(pl.col("label") == 0)
    assert set(drawn["song"]) <= set(plays["song"])
    assert not (drawn["song"] == own["song"].gather(drawn["row"])).any()
    plays.write_csv(tmp_path / "new.csv")
    with pytest.raises(SystemExit, match="0"):
        main(["prepare", str(tmp_path / "new.csv"), "--like", str(data.path), "--negatives", "--out",
              str(tmp_path / "same"), "--keep", "song"])  # fmt: skip
    assert len(Dataset(tmp_path / "same").test) == 200 * (EACH + 1)
    with pytest.raises(ConfigError, match="negatives samples rows as another dataset did: name it with like"):
        stoker.prepare(Schema.from_dict(SCHEMA), plays, out=tmp_path / "z", negatives=True)


@pytest.mark.slow
@pytest.mark.parametrize("each", [0, EACH])
def test_a_run_of_positive_rows_is_updated(tmp_path: Path, each: int) -> None:
    data = prepared(tmp_path / "data", replaced(per_positive=each))
    loss = {"loss": "in-batch"} if not each else {}
    stoker.train(data, out=tmp_path / "run", model="two-tower", steps=3, batch_size=64, display="quiet", **loss)
    plays = log()[-300:].with_columns(pl.col("at") + 300, user=pl.lit("new"))
    found = stoker.update(tmp_path / "run", plays)
    assert found.rows == 300 * (each + 1)
    assert found.step > 3
    assert "new" in stoker.Scorer(tmp_path / "run").encoder.fitted.ids["user"].values(np.array([51])).to_pylist()
