"""Checkpoints: complete, checked, atomic, in bounded memory."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import files

import stoker
from stoker.base.errors import CheckpointError
from stoker.base.files import seal
from stoker.dataset.batch import Batch
from stoker.dataset.spec import FeatureSpec
from stoker.models import DLRM
from stoker.testing import make_dataset
from stoker.training.files import checkpoint, loading

SPEC = FeatureSpec.from_sizes(2, [40, 7, 300])
OPTIMIZERS = {
    "sgd": stoker.SGD(lr=0.1),
    "adagrad": stoker.Adagrad(lr=0.1),
    "rowwise_adagrad": stoker.RowWiseAdagrad(lr=0.1),
    "adam": stoker.Adam(lr=0.01, schedule=stoker.CosineDecay(steps=10, warmup=2)),
    "adamw": stoker.AdamW(lr=0.01),
    "momentum_sgd": stoker.MomentumSGD(lr=0.01, nesterov=True),
    "ftrl": stoker.FTRL(lr=0.1, l1=0.01),
}


def build(optimizer: Any = OPTIMIZERS["adam"], **settings: Any) -> DLRM:
    options = {"embedding_dim": 4, "bottom": (4,), "top": (5,), "backend": "reference", **settings}
    return DLRM(SPEC, optimizer=optimizer, **options)


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        dense=torch.randn(16, 2, generator=generator),
        ids=torch.stack([torch.randint(0, n, (16,), generator=generator) for n in (40, 7, 300)], 1),
        labels=torch.randint(0, 2, (16,), generator=generator).float(),
    )


def steps(model: DLRM, dense: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        model.loss(batch(seed)).backward()
        dense.step()
        dense.zero_grad()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = build()
    dense = torch.optim.Adam(model.dense_parameters(), lr=0.01)
    steps(model, dense, range(3))
    return stoker.save(tmp_path / "a", model, dense)


@pytest.mark.slow
@pytest.mark.parametrize("rows", OPTIMIZERS)
@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.Adagrad,
        lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_continues_to_the_bit(tmp_path: Path, rows: str, kind: Any, dtype: Any) -> None:
    model = build(OPTIMIZERS[rows], dtype=dtype)
    dense = kind(model.dense_parameters(), lr=0.01)
    steps(model, dense, range(4))
    stoker.save(tmp_path / "half", model, dense, shard_bytes=200)
    steps(model, dense, range(4, 8))
    stoker.save(tmp_path / "whole", model, dense)

    other = build(OPTIMIZERS[rows], dtype=dtype, seed=0)
    dense = kind(other.dense_parameters(), lr=0.01)
    stoker.load(tmp_path / "half", other, dense)
    steps(other, dense, range(4, 8))
    stoker.save(tmp_path / "resumed", other, dense)
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")


def test_many_small_shards_hold_the_same_rows(tmp_path: Path) -> None:
    model = build()
    stoker.save(tmp_path / "one", model)
    stoker.save(tmp_path / "many", model, shard_bytes=4 * 4 * 3 * 10)
    assert len(list((tmp_path / "many" / "tables").iterdir())) == 4 + 1 + 30
    loaded = stoker.load(tmp_path / "many", backend="reference").model
    for table in model.tables:
        assert torch.equal(loaded.embeddings.rows(table.name), model.embeddings.rows(table.name))


@pytest.mark.slow
def test_the_files_say_nothing_of_place_and_time(saved: Path) -> None:
    text = (saved / "manifest.json").read_text()
    assert str(saved.parent) not in text
    manifest = json.loads(text)
    assert manifest["kind"] == "checkpoint"
    assert not {"time", "device", "backend", "placement"} & set(manifest)
    assert set(files(saved)) == {*manifest["files"], "manifest.json"}


@pytest.mark.slow
@settings(max_examples=scaled(40), deadline=None)
@given(data=st.data())
def test_any_damage_is_named_and_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damage")
    path = stoker.save(folder / "a", build(), shard_bytes=500)
    victim = data.draw(st.sampled_from([name for name in files(path) if name != "manifest.json"]))
    content = bytearray((path / victim).read_bytes())
    how = data.draw(st.sampled_from(["flip", "cut", "grow", "delete"]))
    if how == "flip":
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif how == "grow":
        content += b"\0"
    (path / victim).write_bytes(content)
    if how == "delete":
        (path / victim).unlink()
    with pytest.raises(CheckpointError) as caught:
        stoker.load(path)
    assert victim in str(caught.value)
    if how in ("cut", "grow"):
        assert f"{len(content):,} bytes" in str(caught.value)


@pytest.mark.slow
def test_garbled_newer_and_foreign_manifests(saved: Path, tmp_path: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps(seal({**manifest, "format_version": 99})))
    with pytest.raises(CheckpointError, match=r"format 99.*Update"):
        stoker.load(saved)
    (saved / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        stoker.load(saved)
    data = make_dataset(tmp_path / "data", rows=100)
    with pytest.raises(CheckpointError, match="is a dataset, not a run"):
        stoker.load(data.path)
    (saved / "manifest.json").write_text(json.dumps({"kind": "export"}))
    with pytest.raises(CheckpointError, match=r"is an export, not a run.*raw rows: stoker serve"):
        stoker.load(saved)
    with pytest.raises(CheckpointError, match="does not exist"):
        stoker.load(tmp_path / "nowhere")


@pytest.mark.slow
def test_another_model_is_refused_with_what_differs(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"top: saved \[5\], given \[6\]"):
        stoker.load(saved, build(top=(6,)))
    with pytest.raises(CheckpointError, match="'adam', the model has 'sgd'"):
        stoker.load(saved, build(OPTIMIZERS["sgd"]))
    model = build()
    with pytest.raises(CheckpointError, match="'Adam', not 'SGD'"):
        stoker.load(saved, model, torch.optim.SGD(model.dense_parameters(), lr=0.1))
    other = DLRM(FeatureSpec.from_sizes(2, [40, 7, 301]), embedding_dim=4, bottom=(4,), top=(5,), backend="reference")
    with pytest.raises(CheckpointError, match="table sizes differ"):
        stoker.load(saved, other)


@pytest.mark.slow
def test_a_taken_name_is_refused_and_replaced_on_request(saved: Path) -> None:
    before = files(saved)
    with pytest.raises(CheckpointError, match="exists"):
        stoker.save(saved, build())
    assert files(saved) == before
    model = build(seed=5)
    stoker.save(saved, model, overwrite=True)
    assert torch.equal(stoker.load(saved).model.embeddings.rows("C3"), model.embeddings.rows("C3"))
    assert sorted(entry.name for entry in saved.parent.iterdir()) == ["a"]


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_half_written(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(saved)
    real = os.fsync
    calls = iter(range(100))

    def full(descriptor: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        stoker.save(saved, build(seed=9), overwrite=True)
    assert sorted(entry.name for entry in saved.parent.iterdir()) == ["a"]
    assert files(saved) == before


@pytest.mark.slow
@pytest.mark.parametrize("survives", range(12))
def test_a_kill_while_writing_never_leaves_half_a_checkpoint(
    tmp_path: Path, survives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops at every fsync and rename in turn, without any cleaning up, as a kill does."""
    run = stoker.training.files.rundir.RunDirectory(tmp_path)
    first = stoker.save(run.checkpoint(1), build())
    calls = iter(range(100))

    class Killed(BaseException):
        pass

    def killing(name: str) -> Any:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            if next(calls) == survives:
                raise Killed
            return real(*arguments)

        return call

    monkeypatch.setattr(os, "fsync", killing("fsync"))
    monkeypatch.setattr(os, "replace", killing("replace"))
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *a, **k: None)  # type: ignore[attr-defined]
    try:
        stoker.save(run.checkpoint(2), build(seed=1))
    except Killed:
        pass
    else:
        assert survives >= 9
    monkeypatch.undo()
    newest, problems = run.newest_whole()
    assert not problems
    assert newest in (first, run.checkpoint(2))
    assert (newest == run.checkpoint(2)) == (survives >= 9 or (tmp_path / "checkpoints" / "step_000000002").exists())
    run.prune(5, None)
    assert not list(run.checkpoints.glob("*.tmp*"))


@pytest.mark.slow
def test_saving_and_loading_take_bounded_memory(tmp_path: Path) -> None:
    import tracemalloc

    spec = FeatureSpec.from_sizes(0, [200_000])
    model = DLRM(spec, embedding_dim=32, top=(4,), backend="reference", optimizer=stoker.Adagrad(lr=0.1))
    table = 200_000 * 32 * 4 * 2
    peaks = []
    for shard_bytes in (2**20, 2**22):
        tracemalloc.start()
        stoker.save(tmp_path / str(shard_bytes), model, shard_bytes=shard_bytes)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < table / 4
    stoker.load(tmp_path / str(2**20), model)


def test_what_is_known_of_files_does_not_grow_with_the_number_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_KNOWN", 6)
    monkeypatch.setattr(checkpoint, "_TICK", -1)  # so that new files are noted
    monkeypatch.setattr(checkpoint, "_whole", {})
    for number in range(5):  # four files each
        checkpoint.verify(stoker.save(tmp_path / str(number), build()))
        assert 0 < len(checkpoint._whole) <= 6


def test_stream_position_travels(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", rows=1000, num_embeddings=(40, 7, 300), num_dense=2)
    model = build()
    stream = data.train.batches(32, seed=1)
    iterator = iter(stream)
    for _ in range(5):
        next(iterator)
    stoker.save(tmp_path / "a", model, None, stream)
    rest = [b.dense for b in iterator]
    again = data.train.batches(32, seed=1)
    stoker.load(tmp_path / "a", model, stream=again)
    assert [torch.equal(b.dense, want) for b, want in zip(again, rest, strict=True)] == [True] * len(rest)
    other = build()
    for parameter in other.dense_parameters():
        torch.nn.init.ones_(parameter)
    with pytest.raises(CheckpointError, match="belongs to seed 1"):
        stoker.load(tmp_path / "a", other, stream=data.train.batches(32, seed=2))
    assert all((parameter == 1).all() for parameter in other.dense_parameters())
    stoker.save(tmp_path / "b", model)
    with pytest.raises(CheckpointError, match="without a stream"):
        stoker.load(tmp_path / "b", model, stream=again)
    with pytest.raises(CheckpointError, match="without a dense optimizer"):
        stoker.load(tmp_path / "b", model, torch.optim.Adam(model.dense_parameters()))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_model_that_is_not_finite_is_not_written(tmp_path: Path, bad: float) -> None:
    model = build()
    model.embeddings.write("C3", 5, torch.full((1, 4), bad))
    with pytest.raises(checkpoint.NotFiniteError, match="table 'C3' is no longer finite"):
        stoker.save(tmp_path / "a", model, require_finite=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_rows_that_a_checkpoint_lacks_begin_as_row_0_without_state(tmp_path: Path) -> None:
    model, first = build(), batch(0)
    first.ids[0] = 0
    dense = torch.optim.Adam(model.dense_parameters(), lr=0.01)
    model.loss(first).backward()
    dense.step()
    saved = stoker.save(tmp_path / "a", model, dense)
    larger = DLRM(FeatureSpec.from_sizes(2, [40, 7, 310]), optimizer=OPTIMIZERS["adam"], embedding_dim=4, bottom=(4,),
                  top=(5,), backend="reference")  # fmt: skip
    stoker.track_changes(larger)
    loading.load_larger(saved, larger, torch.optim.Adam(larger.dense_parameters(), lr=0.01))
    [(_, own)], [(_, known)] = (each.embeddings.read("C3", 310) for each in (larger, model))
    for one, other in zip(own.tensors, known.tensors, strict=True):
        assert torch.equal(one[:300], other)
    assert known.state["exp_avg_sq"][0].any(), "row 0 was trained"
    assert torch.equal(own.weight[300:], known.weight[:1].expand(10, -1))
    assert not any(state[300:].any() for state in own.state.values())
    assert larger.embeddings.changes.rows("C3").tolist() == list(range(300, 310))
    table = saved / "tables" / "002.00000.safetensors"
    table.write_bytes(table.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="damaged"):
        loading.load_larger(saved, larger, torch.optim.Adam(larger.dense_parameters(), lr=0.01))


@pytest.mark.slow
def test_files_of_another_checkpoint_than_the_manifest_that_was_read_are_refused(saved: Path) -> None:
    manifest = checkpoint.read_manifest(saved)
    with checkpoint.reading(saved, manifest):
        pass
    with (
        pytest.raises(CheckpointError, match="was replaced while it was read"),
        checkpoint.reading(saved, {**manifest, "step": 0}),
    ):
        pass


@pytest.mark.slow
def test_a_segment_does_not_replace_what_it_needs(tmp_path: Path) -> None:
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=9, embedding_dim=2)], optimizer=stoker.SGD(lr=1.0)
    )
    stoker.track_changes(tables)
    base = stoker.save(tmp_path / "base", tables)
    tables(torch.tensor([[1]])).sum().backward()
    with pytest.raises(CheckpointError, match=r"is one of the checkpoints that a segment after .* needs"):
        stoker.save(base, tables, parent=base, overwrite=True)
    stoker.save(tmp_path / "next", tables, parent=base)
    stoker.load(tmp_path / "next", tables)


def test_rows_that_train_while_they_are_saved_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=9, embedding_dim=2)], optimizer=stoker.SGD(lr=1.0)
    )
    write = checkpoint._write_files

    def trained(*given: Any, **named: Any) -> Any:
        tables(torch.tensor([[1]])).sum().backward()  # as another thread does
        return write(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_files", trained)
        with pytest.raises(CheckpointError, match=r"trained while .* was written, by another thread"):
            stoker.save(tmp_path / "saved", tables)
    assert not (tmp_path / "saved").exists()


def test_a_segment_after_another_row_optimizer_is_refused(tmp_path: Path) -> None:
    tables = stoker.EmbeddingTables(
        [stoker.TableConfig(name="t", num_embeddings=9, embedding_dim=2)], optimizer=stoker.Adagrad(lr=1.0)
    )
    stoker.track_changes(tables)
    base = stoker.save(tmp_path / "base", tables)
    tables.optimizer = stoker.Adam(lr=0.1)
    tables(torch.tensor([[1]])).sum().backward()
    with pytest.raises(CheckpointError, match=r"the row optimizer was adagrad in .* and is adam now"):
        stoker.save(tmp_path / "next", tables, parent=base)
    stoker.save(tmp_path / "whole", tables)


def test_a_file_that_was_whole_is_read_again_once_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed chooses its checkpoint by checksums, and need not compute them again to load it."""
    at = stoker.save(tmp_path / "c", build())
    count, read, seen = len(json.loads((at / "manifest.json").read_text())["files"]), checkpoint.hash_file, []
    monkeypatch.setattr(checkpoint, "hash_file", lambda path: (seen.append(path), read(path))[1])
    for _ in range(2):  # young files: their times need not change with the next write
        checkpoint.verify(at)
    assert len([path for path in seen if path.name != "manifest.json"]) == 2 * count
    monkeypatch.setattr(checkpoint, "_TICK", 0)
    time.sleep(0.02)
    for expected in (count, 0):
        seen.clear()
        checkpoint.verify(at)
        assert len([path for path in seen if path.name != "manifest.json"]) == expected
    damaged = at / "dense.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"dense.safetensors is damaged"):
        checkpoint.verify(at)
