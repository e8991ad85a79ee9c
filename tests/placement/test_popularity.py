"""stoker.profile: hot rows within the budget, near the truth, and said as they are."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.base.errors import ConfigError, DataError, DependencyError
from stoker.base.files import canonical_json, hash_json
from stoker.dataset import gather
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import write_counts, write_manifest
from stoker.dataset.shards import write_shard
from stoker.dataset.spec import Feature, FeatureSpec
from stoker.models import MODELS
from stoker.rewrite import popularity
from stoker.rewrite.hot_profile import CurvePoint, HotProfile
from stoker.rewrite.popularity import true_hot_rows
from stoker.testing import make_dataset

ROW = 68  # bytes: 16 float32 columns and the row-wise sum
ZIPF = 1.1
ROWS = 120_000


def planted(
    path: Path, rows: int, sizes: tuple[int, ...], *, seed: int = 0, shuffle: tuple[int, ...] = (), shards: int = 3
) -> Dataset:
    """One-hot tables with Zipf ids, renumbered by falling count as the preparation does, but for those in
    ``shuffle``."""
    random = np.random.default_rng(seed)
    columns, counts = [], {}
    for place, size in enumerate(sizes):
        mass = np.arange(1, size, dtype=np.float64) ** -ZIPF
        drawn = random.choice(size - 1, rows, p=mass / mass.sum())
        found = np.bincount(drawn, minlength=size - 1)
        order = np.argsort(-found, kind="stable")
        if place in shuffle:
            order = random.permutation(size - 1)
        number = np.empty(size - 1, np.int64)
        number[order] = np.arange(1, size)
        columns.append(number[drawn].astype(np.int32))
        counts[f"C{place + 1}"] = torch.from_numpy(np.concatenate([[0], found[order]]))
    return written(path, np.stack(columns, axis=1), counts, sizes, shards)


def written(
    path: Path, ids: np.ndarray, counts: dict[str, torch.Tensor], sizes: tuple[int, ...], shards: int = 1
) -> Dataset:
    spec = FeatureSpec.from_sizes(1, sizes)
    infos = []
    for number, part in enumerate(np.array_split(np.arange(len(ids)), shards)):
        infos.append(
            write_shard(
                path / "train" / f"{number:05d}.safetensors", dense=np.zeros((len(part), 1), np.float32),
                labels=np.zeros(len(part), np.float32), ids=np.ascontiguousarray(ids[part]),
            ).to_dict()
        )  # fmt: skip
    schema = {"test": spec.to_dict()}
    write_manifest(
        path,
        {
            "schema": schema, "schema_hash": hash_json(schema), "features": spec.to_dict(),
            "splits": {"train": {"rows": len(ids), "positives": 0, "shards": infos}},
            "files": {"counts.safetensors": write_counts(path, counts)},
        },
    )  # fmt: skip
    return Dataset(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Two tables above 1 MB and one below."""
    return planted(tmp_path_factory.mktemp("planted"), ROWS, (40_001, 25_001, 500))


def at_least(counts: torch.Tensor, cut: float) -> int:
    """The prefix of ids that holds all rows with at least so many accesses."""
    known = int((counts[1:] >= max(1, np.ceil(cut))).sum())
    return known + 1 if known else 0


def test_the_exact_profile_is_the_definition(data: Dataset) -> None:
    found = stoker.profile(data, device_memory="1MiB", sample=None)
    assert found.settings.method == "exact"
    for table in found.tables[:2]:
        counts = data.counts[table.name]
        assert table.accesses == ROWS
        assert table.estimate == table.low == table.high == at_least(counts, found.threshold * ROWS)
        assert table.estimate <= table.hot_rows  # ties are taken as far as they fit
        assert counts[table.hot_rows] <= counts[table.estimate - 1]
        assert table.access_share == pytest.approx(int(counts[: table.hot_rows].sum()) / ROWS)
        assert table.by_count
        assert not table.whole
    small = found.tables[2]
    assert (small.whole, small.hot_rows, small.access_share) == (True, 500, 1.0)
    # The budget is full to the last row but one of each table.
    assert 2**20 - 3 * ROW <= found.hot_bytes <= 2**20
    assert found.hot_bytes == sum(found.hot_rows.values()) * ROW
    assert found.access_share == pytest.approx(sum(table.access_share for table in found.tables) / 3)


def test_inputs_are_hot_if_all_their_ids_are(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stoker.profile(data, device_memory="1MiB", sample=None)
    hot = np.array([found.hot_rows[name] for name in ("C1", "C2", "C3")])
    share = np.mean([(shard.ids < hot).all(axis=1).mean() for shard in data.train.shards])
    assert found.inputs == ROWS  # so few that all are looked at
    assert found.input_error == 0
    assert found.input_share == pytest.approx(share)
    monkeypatch.setattr(popularity, "_INPUTS", 20_000)
    sampled = stoker.profile(data, device_memory="1MiB")
    assert sampled.hot_rows == found.hot_rows
    assert sampled.inputs == pytest.approx(20_000, rel=0.01)
    # Rows are independent here, so the error is that of a proportion.
    assert sampled.input_error == pytest.approx((share * (1 - share) / 20_000 * 5 / 6) ** 0.5, rel=0.1)
    assert abs(sampled.input_share - share) < 5 * sampled.input_error + 0.02


def test_the_curve_holds_the_profile_between_its_points(data: Dataset) -> None:
    for sample in (None, 0.2):
        found = stoker.profile(data, device_memory="1MiB", sample=sample)
        assert 6 <= len(found.curve) <= 20
        points = [(p.hot_bytes, p.access_share, p.input_share) for p in found.curve]
        points.insert(
            sum(p.hot_bytes <= found.hot_bytes for p in found.curve),
            (found.hot_bytes, found.access_share, found.input_share),
        )
        for figures in zip(*points, strict=True):
            assert list(figures) == sorted(figures)
        thresholds = [p.threshold for p in found.curve]
        assert thresholds == sorted(thresholds, reverse=True)
        if sample is None:  # of the sampled rows not all were seen
            assert found.curve[-1].access_share == pytest.approx(1.0, abs=1e-3)


def quiet(done: int, total: int) -> None: ...


def test_the_truth_is_of_the_threshold(data: Dataset) -> None:
    """The budget holds for every sample; an estimate from all rows is the truth."""
    for sample in (0.05, 0.3, 1.0):
        found = stoker.profile(data, device_memory="1MiB", sample=sample, chunk_rows=2000)
        assert found.hot_bytes <= 2**20
        truth = true_hot_rows(data, found)
        for table in found.tables[:2]:
            assert truth[table.name] == at_least(data.counts[table.name], found.threshold * ROWS)
            assert (table.estimate == truth[table.name]) == (sample == 1.0)
    assert true_hot_rows(data, stoker.profile(data, device_memory="1GiB")) == dict(data.schema.num_embeddings)


@pytest.mark.slow
def test_chunks_cover_the_sampled_log(data: Dataset) -> None:
    """The published interval speaks of the sampled counts, and holds them."""
    inside = total = 0
    for seed in range(60):
        found = stoker.profile(data, device_memory="512KiB", sample=0.1, chunk_rows=256, seed=seed, confidence=0.99)
        assert found.hot_bytes <= 2**19
        rows = popularity.count_accesses(data, popularity.draw(data.train, 0.1, seed=seed), quiet)
        for table in found.tables[:2]:
            truth = 1 + int((rows[table.name][1:] >= found.threshold * ROWS * 0.1).sum())
            inside += table.low <= truth <= table.high
            total += 1
    assert inside >= 0.95 * total


def test_few_chunks_are_counted_whole(data: Dataset) -> None:
    found = stoker.profile(data, device_memory="512KiB", sample=0.1, chunk_rows=2000)
    rows = popularity.count_accesses(data, popularity.draw(data.train, 0.1, seed=0), quiet)
    for table in found.tables[:2]:
        truth = 1 + int((rows[table.name][1:] >= found.threshold * ROWS * 0.1).sum())
        assert table.estimate == table.low == table.high == truth


def test_all_rows_where_they_fit(data: Dataset) -> None:
    for sample in (None, 0.1):
        found = stoker.profile(data, device_memory="1GiB", sample=sample)
        assert found.hot_rows == dict(data.schema.num_embeddings)
        assert (found.threshold, found.access_share, found.input_share) == (0.0, 1.0, 1.0)
        assert found.hot_bytes == found.total_bytes


def test_small_tables_are_judged_where_the_budget_is_smaller(data: Dataset) -> None:
    found = stoker.profile(data, device_memory=300 * ROW, sample=None)
    assert not any(table.whole for table in found.tables)
    assert 297 * ROW <= found.hot_bytes <= 300 * ROW
    assert 0 < found.hot_rows["C3"] < 500


def test_row_bytes_hold_the_optimizer_state(data: Dataset) -> None:
    adam = stoker.profile(
        data, device_memory="1MiB", sample=None, row_optimizer="adam", embedding_dim=8, dtype="bfloat16"
    )
    assert {table.row_bytes for table in adam.tables} == {8 * 2 + 2 * 8 * 4}
    assert adam.hot_bytes <= 2**20
    assert stoker.profile(data, sample=None, row_optimizer=stoker.SGD(lr=0.1)).tables[0].row_bytes == 64


def test_row_bytes_are_those_of_the_model(data: Dataset, tmp_path: Path) -> None:
    options = {"dims": {"C1": 3}}
    found = stoker.profile(data, device_memory="1MiB", model="tabular", model_options=options)
    sizes = {table.name: table.row_bytes for table in found.tables}
    tables = MODELS["tabular"].tables_from(data.schema, options)
    assert sizes == {table.name: 4 * table.embedding_dim + 4 for table in tables}
    assert sizes["C1"] == 16
    assert len(set(sizes.values())) > 1
    assert found.hot_bytes <= 2**20
    assert found.curve[-1].hot_bytes <= sum(table.rows * table.row_bytes for table in found.tables) == found.total_bytes
    found.save(tmp_path / "hot.json")
    assert HotProfile.load(tmp_path / "hot.json").hash == found.hash != stoker.profile(data, device_memory="1MiB").hash
    with pytest.raises(ConfigError, match="model 'nope' is unknown"):
        stoker.profile(data, model="nope")


def test_the_seed_decides_the_sample(data: Dataset) -> None:
    one, same, other = (stoker.profile(data, device_memory="1MiB", sample=0.05, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.hash == same.hash
    assert other.hash != one.hash


def test_without_numba_the_same(data: Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bags = make_dataset(tmp_path, rows=2000, num_embeddings=(400, 90, 30), sequence={0: 5, 2: 3}, shard_rows=600)
    runs: list[list[HotProfile]] = []
    for make in (popularity.make_gather, gather.NumpyGather):
        monkeypatch.setattr(popularity, "make_gather", make)
        runs.append(
            [stoker.profile(each, device_memory=size, sample=0.3) for each, size in ((data, 2**19), (bags, 9000))]
        )
    assert runs[0] == runs[1]


@pytest.mark.parametrize("rows_at_once", [2**16, 70])
def test_sequences_are_counted(tmp_path: Path, rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(popularity, "_ROWS", rows_at_once)
    bags = make_dataset(tmp_path, rows=3000, num_embeddings=(400, 90, 30), sequence={0: 5, 2: 3}, shard_rows=900)
    every = popularity.draw(bags.train, 1.0, seed=0)
    for name, rows in popularity.count_accesses(bags, every, quiet).items():
        assert rows.tolist() == bags.counts[name].tolist()
    hot = np.array([[5, 5, 5], [200, 60, 30]])
    expected = []
    for shard in bags.train.shards:
        assert shard.lengths is not None
        place = 0
        for lengths in shard.lengths:
            bag = [shard.ids[place + before : place + before + size].tolist() for before, size in
                   zip(np.cumsum(lengths) - lengths, lengths, strict=True)]  # fmt: skip
            place += int(lengths.sum())
            level = 0
            while level < 2 and any(i >= hot[level, f] for f, ids in enumerate(bag) for i in ids):
                level += 1
            expected.append(level)
    assert popularity.first_hot_levels(bags, every, hot, quiet).tolist() == expected
    some = popularity.draw(bags.train, 0.3, seed=1, block_rows=7)
    rows_drawn = [row for a, b in zip(some.starts, some.stops, strict=True) for row in range(a, b)]
    assert popularity.first_hot_levels(bags, some, hot, quiet).tolist() == [expected[row] for row in rows_drawn]


def test_features_that_share_a_table(tmp_path: Path) -> None:
    """Target and history address one table: its counts are of both."""
    spec = FeatureSpec(
        dense=(),
        features=(
            Feature(name="item", table="items"),
            Feature(name="seen", table="items", sequence=True, max_length=2),
        ),
        num_embeddings={"items": 50},
    )
    lengths = np.array([[1, 2], [1, 0], [1, 1]], np.int32)
    ids = np.array([1, 2, 3, 1, 7, 1], np.int32)
    info = write_shard(
        tmp_path / "train" / "00000.safetensors", dense=np.zeros((3, 0), np.float32), labels=np.zeros(3, np.float32),
        ids=ids, lengths=lengths, row_offsets=np.array([0, 3, 4, 6]),
    )  # fmt: skip
    counts = {"items": torch.from_numpy(np.bincount(ids, minlength=50))}
    write_manifest(
        tmp_path,
        {
            "schema": {}, "schema_hash": "0", "features": spec.to_dict(),
            "splits": {"train": {"rows": 3, "positives": 0, "shards": [info.to_dict()]}},
            "files": {"counts.safetensors": write_counts(tmp_path, counts)},
        },
    )  # fmt: skip
    found = stoker.profile(tmp_path, device_memory=2 * ROW, sample=1.0)
    (table,) = found.tables
    assert table.accesses == 6
    assert table.hot_rows == 2  # ids 0 and 1
    assert table.access_share == pytest.approx(3 / 6)
    assert found.input_share == pytest.approx(1 / 3)


def test_ids_without_order_are_noticed(tmp_path: Path) -> None:
    mixed = planted(tmp_path, 40_000, (20_001, 20_002), shuffle=(1,))
    found = stoker.profile(mixed, device_memory="256KiB", sample=0.2)
    assert [table.by_count for table in found.tables] == [True, False]
    exact = stoker.profile(mixed, device_memory="256KiB", sample=None)
    assert [table.by_count for table in exact.tables] == [True, False]
    assert exact.hot_bytes <= 2**18
    # A prefix of ids in no order serves no more than its share of rows, and is said to.
    counts = mixed.counts["C2"].double()
    other = exact.tables[1]
    assert other.access_share == pytest.approx(float(counts[: other.hot_rows].sum() / counts.sum()))


def test_progress_is_told(data: Dataset) -> None:
    seen: list[tuple[str, int, int]] = []
    stoker.profile(data, sample=0.5, progress=lambda *told: seen.append(told))
    assert {what for what, _, _ in seen} == {"reading ids", "comparing"}
    last = [told for told in seen if told[0] == "reading ids"][-1]
    assert last[1] == last[2]


def test_saved_and_loaded(data: Dataset, tmp_path: Path) -> None:
    for sample in (None, 0.1, 1.0):
        found = stoker.profile(data, device_memory="1MiB", sample=sample)
        path = tmp_path / f"{sample}.json"
        found.save(path)
        again = HotProfile.load(path)
        assert again == found
        assert again.hash == found.hash
        assert again.hot_rows == found.hot_rows
        assert HotProfile.from_dict(json.loads(json.dumps(found.to_dict()))).hash == found.hash
    assert (found.schema_hash, found.data_hash) == (data.schema_hash, data.train.data_hash)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.1.json", "1.0.json", "None.json"]


def _edited(change: Any, *, rehash: bool = False) -> Any:
    def edit(text: str) -> str:
        values = json.loads(text)
        change(values)
        if rehash:
            known = {name: value for name, value in values.items() if name not in ("kind", "format_version", "hash")}
            values["hash"] = hashlib.sha256(canonical_json(known).encode()).hexdigest()
        return json.dumps(values)

    return edit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read as a profile"),
        (lambda text: "[" * 100_000, "cannot be read as a profile"),
        (lambda text: "[1, 2]", "not a profile of hot rows"),
        (lambda text: '{"kind": "dataset"}', "not a profile of hot rows"),
        (_edited(lambda v: v.update(format_version=99)), "profile format 99"),
        (_edited(lambda v: v.update(format_version="1")), "format_version"),
        (_edited(lambda v: v.pop("threshold")), "was changed"),
        (_edited(lambda v: v["tables"][0].update(hot_rows=1)), "was changed"),
        (_edited(lambda v: v["tables"][0].update(hot_rows=True)), "was changed"),
        (_edited(lambda v: v.update(tables=3)), "was changed"),
        (_edited(lambda v: v.update(hash=None)), "was changed"),
        (_edited(lambda v: v.pop("curve"), rehash=True), "garbled"),
        (_edited(lambda v: v.update(settings=None), rehash=True), "garbled"),
        (_edited(lambda v: v.update(newer=1), rehash=True), "garbled"),
    ],
)
def test_a_garbled_file_is_refused(data: Dataset, tmp_path: Path, edit: Any, words: str) -> None:
    path = tmp_path / "hot.json"
    stoker.profile(data, sample=None).save(path)
    path.write_text(edit(path.read_text()))
    with pytest.raises(DataError, match=words) as caught:
        HotProfile.load(path)
    assert str(path) in str(caught.value)
    assert f"--out {path}" not in str(caught.value), "a file is not to be replaced"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no profile"):
        HotProfile.load(tmp_path / "no.json")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device_memory": 10}, "less than one row"),
        ({"device_memory": "1XB"}, "unknown unit"),
        ({"sample": 0}, "no rows would be read"),
        ({"sample": 1.5}, "outside 0 to 100"),
        ({"confidence": 1.0}, "below 100 %"),
        ({"chunks": 1}, "at least 2"),
        ({"chunk_rows": 0}, "at least 2 and 1"),
        ({"seed": -1}, "must not be negative"),
        ({"embedding_dim": 0}, "at least 1"),
        ({"dtype": "int8"}, "'int8' is unknown"),
        ({"row_optimizer": "lion"}, "'lion' is unknown"),
    ],
)
def test_settings_out_of_range(data: Dataset, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        stoker.profile(data, **settings)


def test_ids_outside_their_table_are_named(tmp_path: Path) -> None:
    counts = {"C1": torch.tensor([0, 2, 1]), "C2": torch.tensor([0, 3])}
    bad = written(tmp_path, np.array([[1, 1], [1, 1], [3, 1]], np.int32), counts, (3, 2))
    for settings in ({"sample": 1.0}, {"sample": None}):
        with pytest.raises(DataError, match="row 2: feature C1 holds id 3"):
            stoker.profile(bad, **settings)


def test_nothing_to_profile(tmp_path: Path) -> None:
    none = make_dataset(tmp_path / "a", rows=50, num_embeddings=())
    with pytest.raises(DataError, match="no categorical"):
        stoker.profile(none)
    empty = make_dataset(tmp_path / "b", rows=0)
    with pytest.raises(DataError, match="no training rows"):
        stoker.profile(empty)
    with pytest.raises(DataError, match="there is no dataset"):
        stoker.profile(tmp_path / "c")


def test_a_table_that_nobody_accesses(tmp_path: Path) -> None:
    """Its rows are cold, but for the room that is left."""
    bags = make_dataset(tmp_path, rows=500, num_embeddings=(90, 400), sequence={1: 0})
    assert int(bags.counts["C2"].sum()) == 0
    for settings in ({"sample": 1.0}, {"sample": None}):
        found = stoker.profile(bags, device_memory=60 * ROW, **settings)
        assert found.hot_rows["C2"] == 0
        assert 55 <= found.hot_rows["C1"] <= 60
        found = stoker.profile(bags, device_memory=100 * ROW, **settings)
        assert found.access_share > 0.95  # its ids hardly follow the count


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_tiny_datasets(tmp_path: Path, rows: int) -> None:
    ids = np.ones((rows, 2), np.int32)
    counts = {"C1": torch.tensor([0, rows]), "C2": torch.tensor([0, rows, 0])}
    data = written(tmp_path, ids, counts, (2, 3))
    for settings in ({}, {"sample": 1.0}):
        found = stoker.profile(data, device_memory=4 * ROW, **settings)
        assert found.hot_bytes <= 4 * ROW
        assert found.access_share == 1.0


@pytest.mark.slow
def test_the_picture(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stoker.profile(data, device_memory="1MiB", sample=None)
    with pytest.raises(ConfigError, match=r"\.png"):
        found.plot(tmp_path / "curve.gif")
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed here")
    found.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3.0, 4.0, 5.3, 7.5, 26.6), (0.02, 1.0, 900.0), (4.0, 4.5), (1e-4, 1e5)])
def test_labels_of_the_picture_do_not_run_into_each_other(data: Dataset, sizes: tuple[float, ...]) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed here")
    found = stoker.profile(data, device_memory="1MiB", sample=None)
    curve = [
        CurvePoint(threshold=1 / (9 + size), hot_bytes=int(size * 2**20), access_share=0.5, input_share=0.1)
        for size in sizes
    ]
    row = int(sizes[0] * 2**20 / sum(found.hot_rows.values()))  # bytes, so that the hot rows lie on the axis too
    tables = tuple(replace(table, row_bytes=row) for table in found.tables)
    figure = replace(found, curve=tuple(curve), tables=tables).figure()
    figure.canvas.draw()
    axis = figure.axes[1].xaxis
    low, high = figure.axes[1].get_xlim()
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    boxes = [
        tick.label1.get_window_extent() for tick in ticks if tick.label1.get_text() and low <= tick.get_loc() <= high
    ]
    spans = sorted((box.x0, box.x1) for box in boxes)
    assert spans
    assert all(after[0] > before[1] for before, after in pairwise(spans))


def test_without_matplotlib_the_picture_says_so(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DependencyError, match=r"stoker\[plot\]"):
        stoker.profile(data, sample=None).plot(tmp_path / "curve.png")
