"""Segments: only what changed, chained; a base and any prefix of segments are the whole checkpoint, to the byte."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import files
from test_checkpoint import OPTIMIZERS, SPEC, batch, build

import stoker
from stoker.base.errors import CheckpointError
from stoker.base.files import seal, unseal
from stoker.dataset.batch import Batch
from stoker.tables.storage import Rows
from stoker.training.files import checkpoint, segments
from stoker.training.files.segments import SavedTable, join

PLACEMENTS: dict[str, Any] = {
    "device": None,
    "cached": stoker.Cached(slots=60),
    "hot-cold": stoker.HotCold(slots=80, hot={"C1": 5, "C3": 20}),
    "pipelined": stoker.HostPipelined(slots=90),
    "file": stoker.Cached(slots=60, home="file"),
    "mapped": stoker.Mapped(),
}


def narrow(seed: int) -> Batch:
    """A batch that looks up few rows of the large table."""
    found = batch(seed)
    found.ids[:, 2] = found.ids[:, 2] % 7 + 10 * (seed % 20)
    return found


class Training:
    """A model that trains, and saves both whole checkpoints and segments."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.segments = folder, folder / "segments"
        self.model = build(**settings)
        self.dense = torch.optim.Adam(self.model.dense_parameters(), lr=0.01)
        stoker.track_changes(self.model)
        self.paths = [stoker.save(self.segments / "base", self.model, self.dense, shard_bytes=700)]
        self.seed = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model.loss(narrow(self.seed)).backward()
            self.dense.step()
            self.dense.zero_grad()
            self.seed += 1

    def save(self, shard_bytes: int = 700) -> Path:
        name = f"s{len(self.paths)}"
        kept = self.model.embeddings.changes
        self.model.embeddings.changes = None  # a copy of the same moment, which changes no count
        stoker.save(self.folder / "whole" / name, self.model, self.dense, shard_bytes=700)
        self.model.embeddings.changes = kept
        args = self.segments / name, self.model, self.dense
        self.paths.append(stoker.save(*args, parent=self.paths[-1], shard_bytes=shard_bytes))
        return self.paths[-1]


def whole_files(path: Path) -> dict[str, Any]:
    """The files of a checkpoint; its manifest without the mark of what it replaced."""
    found: dict[str, Any] = dict(files(path))
    manifest = unseal(found["manifest.json"])
    manifest.pop("compacted", None)
    return found | {"manifest.json": manifest}


@pytest.mark.slow
@settings(max_examples=scaled(24), deadline=None)
@given(data=st.data())
def test_a_base_and_any_prefix_of_segments_are_the_whole_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place, kind = data.draw(st.sampled_from(list(PLACEMENTS))), data.draw(st.sampled_from(list(OPTIMIZERS)))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    run = Training(tmp_path_factory.mktemp("run"), optimizer=OPTIMIZERS[kind], placement=PLACEMENTS[place], dtype=dtype)
    for steps in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)):
        run.train(steps)
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, 298))
            run.model.embeddings.write("C3", start, torch.full((2, 4), float(steps)))
        run.save(data.draw(st.sampled_from([80, 400, 10_000])))
    run.model.embeddings.close()
    for path in run.paths[1:]:
        copy = run.folder / "joined"
        shutil.copytree(run.segments, copy)
        assert join(copy / path.name) == int(path.name[1:])
        assert whole_files(copy / path.name) == whole_files(run.folder / "whole" / path.name)
        for later in run.paths[1:]:  # also those after the one that was joined
            if int(later.name[1:]) >= int(path.name[1:]):
                assert checkpoint.verify(copy / later.name)
        shutil.rmtree(copy)
    other = build(
        optimizer=OPTIMIZERS[kind], dtype=dtype, placement=PLACEMENTS[data.draw(st.sampled_from(list(PLACEMENTS)))]
    )
    dense = torch.optim.Adam(other.dense_parameters(), lr=0.01)
    stoker.load(run.paths[-1], other, dense)
    stoker.save(run.folder / "again", other, dense, shard_bytes=700)
    assert files(run.folder / "again") == files(run.folder / "whole" / run.paths[-1].name)
    other.embeddings.close()


@pytest.mark.slow
def test_segments_are_those_of_any_placement(tmp_path: Path) -> None:
    found = {}
    for name, place in PLACEMENTS.items():
        run = Training(tmp_path / name, placement=place)
        for steps in (2, 0, 3):
            run.train(steps)
            run.save()
        run.model.embeddings.close()
        found[name] = files(run.segments)
    assert all(each == found["device"] for each in found.values())


def test_a_segment_has_the_touched_rows_only(tmp_path: Path) -> None:
    run = Training(tmp_path)
    run.train(1)
    path = run.save()
    [entry] = [each for each in checkpoint.read_manifest(path)["tables"] if each["name"] == "C3"]
    assert sum(piece["rows"] for piece in entry["changed"]) == len(np.unique(narrow(0).ids[:, 2]))
    assert entry["deleted"] == []
    last = run.save()
    assert all(not each["changed"] for each in checkpoint.read_manifest(last)["tables"]), "nothing was trained"


def test_tensor_trains_and_several_widths(tmp_path: Path) -> None:
    for number, (kind, options) in enumerate(
        [
            (stoker.Tabular, {"dims": {"C1": 4, "C2": 2, "C3": 8}}),
            (stoker.DLRM, {"tensor_train": {"C3": stoker.TensorTrain(rank=2)}}),
        ]
    ):
        given_options = (
            {"hidden": (5,)} if kind is stoker.Tabular else {"bottom": (4,), "top": (5,), "embedding_dim": 4}
        )
        model = kind(SPEC, optimizer=stoker.Adam(lr=0.01), **given_options, **options)
        stoker.track_changes(model)
        base = stoker.save(tmp_path / f"{number}a", model)
        model.loss(batch(0)).backward()
        segment = stoker.save(tmp_path / f"{number}b", model, parent=base)
        model.embeddings.changes = None
        whole = stoker.save(tmp_path / f"whole{number}", model)
        assert join(segment) == 1
        assert whole_files(segment) == whole_files(whole)


def test_single_rows_can_be_read_from_a_chain(tmp_path: Path) -> None:
    run = Training(tmp_path)
    for steps in (2, 1, 4):
        run.train(steps)
        run.save()
    links = checkpoint.chain(run.paths[-1])
    saved = SavedTable(links, next(each for each in links[-1].manifest["tables"] if each["name"] == "C3"))
    rows = np.array([0, 1, 2, 71, 140, 299])
    mine = run.model.embeddings.group_of["C3"].gather("C3", rows)
    for one, other in zip(saved.gather(rows).tensors, mine.tensors, strict=True):
        assert torch.equal(one, other)
    assert len(saved.gather(np.empty(0, np.int64)).weight) == 0
    last = np.unique(np.concatenate([narrow(seed).ids[:, 2] for seed in range(3, 7)]))
    assert saved.changed(2).tolist() == last.tolist()
    assert join(run.paths[2]) == 2
    assert [link.path for link in checkpoint.chain(run.paths[3])] == run.paths[2:], "segments after it remain valid"


def test_scattered_rows_are_gathered_without_opening_a_file_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A roll-back of a million rows must not read the row numbers of a segment a million times."""
    run = Training(tmp_path)
    for steps in (2, 1):
        run.train(steps)
        run.save()
    links = checkpoint.chain(run.paths[-1])
    saved = SavedTable(links, next(each for each in links[-1].manifest["tables"] if each["name"] == "C3"))
    seen = Counter[Path]()
    opened = segments._opened
    monkeypatch.setattr(segments, "_opened", lambda path: (seen.update([path]), opened(path))[1])
    rows = np.array([0, 75, 150, 225, 299])
    mine = run.model.embeddings.group_of["C3"].gather("C3", rows)
    for one, other in zip(saved.gather(rows).tensors, mine.tensors, strict=True):
        assert torch.equal(one, other)
    assert max(seen.values()) == 2


@pytest.mark.slow
def test_each_row_of_a_chain_can_be_read_alone(tmp_path: Path) -> None:
    """Also the first and the last row of a file of a segment."""
    run = Training(tmp_path)
    for _ in range(2):
        run.train(1)
        run.save(80)
    links = checkpoint.chain(run.paths[-1])
    saved = SavedTable(links, next(each for each in links[-1].manifest["tables"] if each["name"] == "C3"))
    mine = run.model.embeddings.rows("C3")
    assert all(torch.equal(saved.read(row, row + 1).weight, mine[row : row + 1]) for row in range(300))


def test_a_row_that_is_in_no_file_is_named(tmp_path: Path) -> None:
    """Of a segment that made a table larger, but lacks some of the new rows."""
    run = Training(tmp_path)
    run.train(1)
    links = checkpoint.chain(run.save())
    entry = next(each for each in links[-1].manifest["tables"] if each["name"] == "C3")
    larger = SavedTable(links, {**entry, "num_embeddings": 310})
    assert len(larger.read(290, 300).weight) == 10
    with pytest.raises(CheckpointError, match="s1 has no row 300 of table 'C3'"):
        larger.read(290, 310)


@pytest.mark.parametrize("place", PLACEMENTS)
def test_scattered_rows_read_back(tmp_path: Path, place: str) -> None:
    model = build(placement=PLACEMENTS[place])
    model.loss(batch(0)).backward()
    group = model.embeddings.group_of["C3"]
    rows = np.array([0, 7, 19, 20, 21, 250])
    before = group.gather("C3", rows)
    values = before.map(lambda tensor: torch.rand_like(tensor))
    group.scatter("C3", rows, values)
    model.loss(batch(1))  # rows come and go
    found = [Rows(rows_.weight.clone(), {n: s.clone() for n, s in rows_.state.items()})
             for _, rows_ in model.embeddings.read("C3")]  # fmt: skip
    whole = torch.cat([each.weight for each in found])
    assert torch.equal(whole[rows], values.weight)
    for name in values.state:
        assert torch.equal(torch.cat([each.state[name] for each in found])[rows], values.state[name])
    model.embeddings.close()


def chained(folder: Path) -> Training:
    run = Training(folder)
    for _ in range(3):
        run.train(1)
        run.save()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flip", "cut", "delete"])
@pytest.mark.parametrize("name", ["base", "s1", "s2", "s3"])
def test_torn_files_are_named(tmp_path: Path, name: str, how: str) -> None:
    path = chained(tmp_path).segments / name
    victim = sorted((path / "tables").iterdir())[-1]
    content = bytearray(victim.read_bytes())
    if how == "delete":
        victim.unlink()
    else:
        content[-1] ^= 1
        victim.write_bytes(content[:-3] if how == "cut" else content)
    for reader in (stoker.load, checkpoint.verify, join):
        with pytest.raises(CheckpointError, match=f"{name}/tables"):
            reader(tmp_path / "segments" / "s3")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["base", "s1", "s2"])
def test_missing_segments_are_named(tmp_path: Path, name: str) -> None:
    run = chained(tmp_path)
    shutil.rmtree(run.segments / name)
    with pytest.raises(CheckpointError, match=f"{name} is missing.*only the rows that changed"):
        stoker.load(run.paths[-1])


@pytest.mark.slow
def test_exchanged_and_rewritten_segments_are_named(tmp_path: Path) -> None:
    run = chained(tmp_path / "a")
    one, two = run.segments / "s1", run.segments / "s2"
    one.rename(one.with_name("x"))
    two.rename(one)
    one.with_name("x").rename(two)
    with pytest.raises(CheckpointError, match="another checkpoint than the one that s3 was written after"):
        stoker.load(run.paths[-1])
    run = chained(tmp_path / "b")
    run.train(1)
    stoker.save(run.segments / "s2", run.model, overwrite=True)
    with pytest.raises(CheckpointError, match="s2 is another checkpoint"):
        stoker.load(run.paths[-1])
    manifest = json.loads((run.segments / "base" / "manifest.json").read_text())
    (run.segments / "base" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="base is another checkpoint"):
        stoker.load(run.segments / "s1")


def test_a_segment_that_would_not_be_complete_is_refused(tmp_path: Path) -> None:
    run = chained(tmp_path)
    with pytest.raises(CheckpointError, match="are tracked since another checkpoint"):
        stoker.save(run.segments / "x", run.model, run.dense, parent=run.segments / "s1")
    with pytest.raises(CheckpointError, match="not in the folder"):
        stoker.save(tmp_path / "x", run.model, run.dense, parent=run.paths[-1])
    other = stoker.load(run.paths[-1]).model
    with pytest.raises(CheckpointError, match="are not tracked"):
        stoker.save(run.segments / "x", other, parent=run.paths[-1])
    assert not (run.segments / "x").exists()
    stoker.track_changes(other)
    stoker.load(run.paths[-1], other)
    stoker.save(run.segments / "x", other, parent=run.paths[-1])


def test_a_manifest_that_names_a_file_elsewhere_does_not_leave_the_folder(tmp_path: Path) -> None:
    run = chained(tmp_path)
    path = run.paths[-1] / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["parent"]["name"] = "../../elsewhere"
    path.write_text(json.dumps(seal(manifest)))
    with pytest.raises(CheckpointError, match="segments/elsewhere is missing"):
        stoker.load(run.paths[-1])


def test_moving_to_another_device_keeps_the_marks() -> None:
    model = stoker.Tabular(SPEC, dims={"C1": 4, "C2": 2, "C3": 8}, hidden=(5,), optimizer=stoker.SGD(lr=0.1))
    stoker.track_changes(model)
    model.loss(batch(0)).backward()
    changes = model.embeddings.changes
    assert changes is not None
    before = {table.name: changes.rows(table.name).tolist() for table in model.tables}
    changes.link(model.embeddings._joint)
    model.loss(batch(0)).backward()
    assert {table.name: changes.rows(table.name).tolist() for table in model.tables} == before
    assert before["C2"] == np.unique(batch(0).ids[:, 1]).tolist()
