"""Exports: equal to the run for fp32, small and close for fewer bits, whole or not there, damaged files by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import SafetensorError

import stoker
from stoker.base.files import seal
from stoker.cli import main
from stoker.prep.like import Like
from stoker.prep.schema import Schema
from stoker.serve.export import is_export
from stoker.tables.exported import dequantize, quantize, width_of
from stoker.testing import make_daily_run
from stoker.training.files.rundir import find_checkpoint
from tests.campaigns import scaled
from tests.serve.test_scorer import SCHEMA, log, pieces, run

__all__ = ["run"]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["fp32", "bf16", "int8", "int4"])
def test_an_export_scores_without_its_run(run: Path, tmp_path: Path, rows: str) -> None:
    made = stoker.export(run, tmp_path / rows, rows=rows)
    table, wanted = log(300, 2).drop("bought"), stoker.Scorer(run)
    served = stoker.Scorer(made.path, check=True)
    expected = wanted.score(table)
    found = np.concatenate([served.score(each) for each in pieces(table, [7, 150])])
    if rows == "fp32":
        assert found.tobytes() == expected.tobytes()
    else:
        assert 0 < np.abs(found - expected).max() < {"bf16": 0.002, "int8": 0.004, "int4": 0.05}[rows]
    assert served.score(table).tobytes() == found.tobytes()
    assert made.row_bytes / made.fp32_bytes == width_of(rows, 4) / 16
    assert served.version == wanted.version
    with pytest.raises(stoker.DataError, match="does not know: 'color'"):
        served.score(table.with_columns(color=1))


def test_a_tensor_train_keeps_its_cores(run: Path, tmp_path: Path) -> None:
    data = stoker.Dataset(run.with_name("data"))
    trains = {"item": stoker.TensorTrain(rank=2)}
    model = stoker.DLRM(data.schema, embedding_dim=4, bottom=(8,), top=(8,), placement=trains)
    stoker.save(tmp_path / "step", model)
    stoker.export(tmp_path / "step", tmp_path / "out", data=data.path)
    rows = log(300, 2).drop("bought")
    assert stoker.Scorer(tmp_path / "out").score(rows).tobytes() == stoker.Scorer(model, data).score(rows).tobytes()
    [group] = json.loads((tmp_path / "out/manifest.json").read_text())["groups"]
    assert "item" not in group["tables"]
    with pytest.raises(stoker.ConfigError, match=r"rows='bf16' does not work with tensor trains \(item\)"):
        stoker.export(tmp_path / "step", tmp_path / "small", data=data.path, rows="bf16")
    assert not (tmp_path / "small").exists()


@pytest.mark.slow
def test_tables_that_grow_are_exported_with_their_raw_ids(tmp_path: Path) -> None:
    """Known, waiting, expired and unknown ids score as in the run, also after updates."""

    def rows(number: int, count: int = 300) -> pl.DataFrame:
        random = np.random.default_rng(number)
        return pl.DataFrame({
            "label": random.integers(0, 2, count), "item": random.zipf(1.3, count) % 97 + 20 * number,
            "shop": random.integers(0, 9, count) + number, "rare": random.integers(0, 9, count),
        })  # fmt: skip

    columns = [
        {"name": "item", "oov": "grow", "grow": {"rows": 40, "admit": 2, "ttl": 6}}, {"name": "shop"},
        {"name": "rare", "oov": "grow", "grow": {"admit": 9999}},
    ]  # fmt: skip
    schema = stoker.Schema.from_dict(
        {"label": "label", "split": {"train": 0.7, "valid": 0.15, "test": 0.15}, "categorical": columns}
    )
    run, asked = tmp_path / "run", pl.concat([rows(number) for number in range(4)])
    data = stoker.prepare(schema, rows(0), out=tmp_path / "data")
    stoker.train(
        data, out=run, epochs=1, batch_size=64, embedding_dim=4, model_options={"bottom": (8,), "top": (8,)},
        display="quiet",
    )  # fmt: skip
    for number in (1, 2):
        stoker.update(run, rows(number))
    expected = stoker.Scorer(run).score(asked.drop("label"))
    for kind in ("fp32", "int8"):
        stoker.export(run, tmp_path / kind, rows=kind)
        found = stoker.Scorer(tmp_path / kind, check=True).score(asked.drop("label"))
        assert np.abs(found - expected).max() < (0.01 if kind == "int8" else 1e-30)
    with pytest.raises(stoker.ConfigError, match=r"rows='bf16' does not work with tables that grow \(item, rare\)"):
        stoker.export(run, tmp_path / "bf16", rows="bf16")
    changed = tmp_path / "fp32" / "raw_ids" / "item.safetensors"
    changed.write_bytes(changed.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(stoker.CheckpointError, match=r"item\.safetensors was altered.*or its sha256 differs"):
        stoker.Scorer(tmp_path / "fp32")


@pytest.mark.slow
def test_programs_are_those_of_the_dense_part(tmp_path: Path) -> None:
    make_daily_run(tmp_path / "run")
    stoker.export(tmp_path / "run", tmp_path / "out", pt2=True)
    program = torch.export.load(str(tmp_path / "out" / "dense.pt2")).module()
    assert "dense.pt2" in json.loads((tmp_path / "out/manifest.json").read_text())["files"]
    model = stoker.Scorer(tmp_path / "out", check=True).model
    batch = stoker.Batch(dense=torch.zeros(5, 0), ids=torch.ones(5, 2, dtype=torch.int64))
    torch.testing.assert_close(program(*model.inputs(batch)), model(batch))


def test_an_onnx_model_is_that_of_the_dense_part(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="torch writes ONNX with onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="the exported model runs in ONNX Runtime")
    stoker.export(run, tmp_path / "out", onnx=True)
    scorer = stoker.Scorer(tmp_path / "out", check=True)
    session = runtime.InferenceSession(tmp_path / "out" / "dense.onnx")
    for rows in (1, 7, 256):
        batch = scorer.encoder.encode(log(rows, 3).drop("bought"))
        with torch.no_grad():
            inputs, wanted = scorer.model.inputs(batch), scorer.model(batch)
        given = {each.name: x.numpy() for each, x in zip(session.get_inputs(), inputs, strict=True)}
        torch.testing.assert_close(torch.from_numpy(session.run(None, given)[0]), wanted)


@pytest.mark.slow
def test_an_onnx_model_computes_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime has no products of bfloat16 on a CPU."""
    make_daily_run(tmp_path / "run", matmul="bf16")
    made: list[Any] = []

    class Program:
        def save(self, path: str) -> None:
            Path(path).write_bytes(b"")

    def written(program: Any, **_: Any) -> Program:
        made.append(program)
        return Program()

    monkeypatch.setattr("stoker.serve.export.find_spec", bool)
    monkeypatch.setattr(torch.onnx, "export", written)
    stoker.export(tmp_path / "run", tmp_path / "out", pt2=True, onnx=True)
    made.append(torch.export.load(str(tmp_path / "out" / "dense.pt2")))
    assert ["bfloat16" in str(each.graph) for each in made] == [False, True]
    model = stoker.Scorer(tmp_path / "out").model
    batch = stoker.Batch(dense=torch.zeros(5, 0), ids=torch.ones(5, 2, dtype=torch.int64))
    wanted = model(batch)
    for program, near in zip(made, (1e-2, 1e-6), strict=True):
        assert (program.module()(*model.inputs(batch)) - wanted).abs().max() < near


def test_a_damaged_run_or_another_dataset_is_not_exported(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    for file in sorted(find_checkpoint(tmp_path / "run").rglob("*.safetensors")):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(stoker.CheckpointError, match=f"{file.name} is damaged"):
            stoker.export(tmp_path / "run", tmp_path / "out")
        file.write_bytes(whole)
    data = stoker.prepare(Schema.from_dict(SCHEMA), log(600, 9), out=tmp_path / "data", split="random:0.8,0.1")
    with pytest.raises(stoker.ConfigError, match=r"does not fit the model|with another schema or vocabulary"):
        stoker.export(run, tmp_path / "out", data=data.path)
    assert not (tmp_path / "out").exists()


def test_damage_and_wrong_settings_are_named(run: Path, tmp_path: Path) -> None:
    made = stoker.export(run, tmp_path / "out").path
    with pytest.raises(stoker.ConfigError, match="Choose another name, or pass overwrite=True"):
        stoker.export(run, made)
    with pytest.raises(stoker.ConfigError, match="Choose another name: it is not an export"):
        stoker.export(run, run, overwrite=True)
    with pytest.raises(stoker.ConfigError, match=r"rows 'int3' is unknown. Choose one of 'fp32', 'bf16'"):
        stoker.export(run, tmp_path / "more", rows="int3")
    assert stoker.export(run, made, overwrite=True).path == made
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    manifest = (made / "manifest.json").read_text()
    (made / "manifest.json").write_text(manifest.replace("price", "prize"))
    with pytest.raises(stoker.CheckpointError, match=r"its sha256 is not that of its values\). Export the run again"):
        stoker.Scorer(made)
    for name in ("notation", "times"):
        values = {key: value for key, value in json.loads(manifest).items() if key != name}
        (made / "manifest.json").write_text(json.dumps(seal(values)))
        with pytest.raises(stoker.CheckpointError, match=r"written by an unreleased version of Stoker\. Export"):
            stoker.Scorer(made)
    (made / "manifest.json").write_text(manifest)
    for name in ("rows/0.rows", "vocab/item.arrow", "dense.safetensors"):
        path = made / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(stoker.CheckpointError, match=rf"{name} was altered"):
            stoker.Scorer(made)
        path.write_bytes(whole[:-1] + b"x")
        with pytest.raises(stoker.CheckpointError, match=rf"{name} was altered"):
            stoker.Scorer(made, check=name != "dense.safetensors")  # whose bytes are always compared
        path.unlink()
        with pytest.raises(stoker.CheckpointError, match=rf"{name} is missing"):
            stoker.Scorer(made)
        path.write_bytes(whole)
    assert [is_export(path) for path in (made, run)] == [True, False]


@pytest.mark.slow
def test_inspect_shows_an_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"

    def inspect(*options: str) -> object:
        with pytest.raises(SystemExit) as done:
            main(["inspect", str(out), *options])
        return done.value.code

    with pytest.raises(SystemExit) as done:
        main(["export", "--out", str(out), str(run), "--rows", "int8"])
    assert done.value.code == 0
    capsys.readouterr()
    assert inspect("--verify", "--json") == 0
    found, scorer = json.loads(capsys.readouterr().out), stoker.Scorer(out)
    assert (found["kind"], found["rows"], found["columns"]) == ("export", "int8", scorer.columns)
    assert {name: found[name] for name in scorer.version} == scorer.version
    assert found["bytes"] == sum(path.stat().st_size for path in out.rglob("*.*") if path.name != "manifest.json")
    assert inspect() == 0
    shown = capsys.readouterr().out
    assert ", ".join(scorer.columns) in " ".join(shown.split())
    assert f"update {scorer.version['update']}" in shown
    path = out / "rows/0.rows"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert inspect("--verify") == 2
    assert "rows/0.rows was altered" in "".join(capsys.readouterr().err.split("\n"))


@pytest.mark.skipif(os.name != "posix", reason="files have an owner and a group")
def test_who_may_read_an_export_or_a_checkpoint_may_read_all_of_its_files(run: Path, tmp_path: Path) -> None:
    """Another user serves what was trained here: safetensors makes files that only their owner can read."""
    stoker.export(run, tmp_path / "out")
    files = [each for top in (run, tmp_path / "out") for each in top.rglob("*.*") if each.is_file()]
    assert len({each.name for each in files if each.suffix == ".safetensors"}) > 1
    (tmp_path / "plain").touch()
    assert {each.stat().st_mode for each in files} == {(tmp_path / "plain").stat().st_mode}


@pytest.mark.parametrize(
    "place",
    [
        "stoker.prep.requests.Ids.write",
        "stoker.serve.export.sync_folder",
        "stoker.training.files.checkpoint.save_file",
    ],
)
def test_an_export_that_fails_leaves_nothing(
    run: Path, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        if "save_file" in place:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(place, full)
    with pytest.raises(stoker.CheckpointError, match="cannot be written"):
        stoker.export(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_is_updated_meanwhile_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows would be those of one update, and its features those of another that got the same number."""
    monday, tuesday = make_daily_run(tmp_path / "run")
    stoker.update(tmp_path / "run", monday)
    copied = Like.copy

    def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        stoker.rollback(tmp_path / "run")
        stoker.update(tmp_path / "run", tuesday)
        return copied(*arguments)

    monkeypatch.setattr(Like, "copy", late)
    with pytest.raises(stoker.CheckpointError, match="was replaced while it was read"):
        stoker.export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@settings(max_examples=scaled(200), deadline=None)
@given(
    rows=arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 7)),
                       elements=st.floats(-1e3, 1e3, width=32, allow_subnormal=False)),
    bits=st.sampled_from([4, 8]),
)  # fmt: skip
def test_quantized_rows_are_within_half_a_step(rows: np.ndarray, bits: int) -> None:
    data = quantize(rows, bits)
    found = dequantize(data, rows.shape[1], bits)
    assert data.shape == (len(rows), width_of(f"int{bits}", rows.shape[1]))
    step = (np.maximum(rows.max(1), 0) - np.minimum(rows.min(1), 0)) / (2**bits - 1) * 1.01 + 1e-37
    assert (np.abs(found - rows) <= step[:, None] * 1.01).all()
    assert (found[rows == 0] == 0).all()
    assert (quantize(found, bits) == data).all() or np.abs(
        dequantize(quantize(found, bits), rows.shape[1], bits) - found
    ).max() <= step.max()
