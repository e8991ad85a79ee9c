"""How many ids got a row, lost theirs or took over another's in each update: counted, kept and shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from days import RUN

import stoker


def log(number: int, rows: int = 300) -> pl.DataFrame:
    random = np.random.default_rng(number)
    return pl.DataFrame({
        "label": random.integers(0, 2, rows), "item": random.zipf(1.3, rows) % 97 + 20 * number,
        "shop": random.integers(0, 9, rows) + number,
    })  # fmt: skip


@pytest.mark.slow
def test_ids_of_each_update_are_counted_and_shown(tmp_path: Path) -> None:
    columns = [{"name": "item", "oov": "grow", "grow": {"rows": 40, "admit": 2, "ttl": 6}}, {"name": "shop"}]
    schema = stoker.Schema.from_dict({
        "label": {"column": "label"}, "split": {"train": 0.7, "valid": 0.15, "test": 0.15}, "categorical": columns
    })  # fmt: skip
    data, run = stoker.prepare(schema, files=log(0), out=tmp_path / "data"), tmp_path / "run"
    settings = {**RUN, "model_options": {"top": (8,)}}
    stoker.train(data, out=run, **settings)
    stoker.train(data, out=tmp_path / "other", **settings)
    models = [stoker.load(run).model]
    for number in (1, 2):
        stoker.update(run, log(number), save_every=None if number == 1 else 3)
        models.append(stoker.load(run).model)
    stoker.compact(run)
    ids = [json.loads(line)["ids"] for line in (run / "updates.jsonl").read_text().splitlines()]
    for found, before, after in zip(ids, models, models[1:], strict=False):
        had, has = (model.embeddings.raw_ids("item").tolist() for model in (before, after))
        assert found["item"] == {
            "new": len({*has} - {*had}), "gone": len({*had} - {*has}), "known": len({*has} - {0}),
            "reused": sum(one != other and one != 0 != other for one, other in zip(had, has, strict=True)),
        }  # fmt: skip
        assert found["item"]["gone"]
        assert found["item"]["reused"]
        sizes = [model.spec.num_embeddings["shop"] for model in (before, after)]
        assert found["shop"] == {"new": sizes[1] - sizes[0], "gone": 0, "reused": 0, "known": sizes[1]}
    page = stoker.report(run).read_text()
    assert "updated 2 times since" in page
    cells = [f"{ids[1]['item'][key]}</td>" for key in ("new", "gone", "reused", "known")]
    row = next(part for part in page.split("<tr>") if ">item<" in part and ">2</td>" in part)
    assert [cell in row for cell in cells] == [True] * 4
    assert "figures are those before all updates" in " ".join(stoker.compare(run, tmp_path / "other").notes)
