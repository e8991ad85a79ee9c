"""``stoker profile`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calling import output

import stoker
from stoker.base import progress
from stoker.dataset.dataset import Dataset
from stoker.rewrite.popularity import true_hot_rows
from stoker.testing import make_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("d"), rows=6000, num_embeddings=(20_000, 300, 5))


def test_a_person_sees_tables_totals_and_the_curve(
    data: Dataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = output(capsys, "profile", data.path, "--device-memory", "256KiB")
    assert code == 0
    expected = stoker.profile(data, device_memory="256KiB")
    for table in expected.tables:
        (cells,) = [line.split() for line in out.splitlines() if line.startswith(f" {table.name} ")]
        assert cells[2] == f"{table.hot_rows:,}"
    assert "whole" in out
    assert f"they serve {expected.access_share:.2%} of the accesses" in out
    assert f"threshold: {expected.threshold:.3g}" in out
    assert "this profile" in out
    assert "█" in out
    code, out, _ = output(capsys, "profile", data.path)
    assert "0: all rows fit" in out


def test_a_script_reads_what_the_function_returns(
    data: Dataset, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = output(
        capsys, "profile", data.path, "--device-memory", "200KiB", "--dim", 8, "--dtype", "bfloat16",
        "--row-optimizer", "adam", "--sample", 0.3, "--confidence", "99%", "--seed", 4,
        "--out", tmp_path / "hot.json",
        "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    expected = stoker.profile(
        data, device_memory="200KiB", embedding_dim=8, dtype="bfloat16", row_optimizer="adam", sample=0.3,
        confidence=0.99, seed=4,
    )  # fmt: skip
    found = json.loads(out)
    assert found.pop("dataset") == str(data.path)
    assert found.pop("hash") == expected.hash
    assert found.pop("expected")["batch_size"] == 64
    assert found == json.loads(json.dumps(expected.to_dict()))
    assert stoker.HotProfile.load(tmp_path / "hot.json") == expected


def test_counts_are_the_default(data: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--exact"]):
        _, out, _ = output(capsys, "profile", data.path, *arguments, "--device-memory", "200KiB", "--json")
        assert json.loads(out)["settings"]["method"] == "exact"
        _, out, _ = output(capsys, "profile", data.path, *arguments, "--device-memory", "200KiB")
        assert "from the vocabulary's counts" in out
        assert "truth" not in out


def test_slow_work_shows_a_bar(
    data: Dataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    _, _, err = output(capsys, "profile", data.path, "--sample", "50%")
    assert "reading ids" in err
    _, _, err = output(capsys, "profile", data.path, "--json")
    assert err == ""


def test_an_estimate_is_shown_beside_the_truth(data: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("profile", data.path, "--device-memory", "256KiB", "--sample", "5%", "--confidence", "99%")
    sampled = stoker.profile(data, device_memory="256KiB", sample=0.05, confidence=0.99)
    truth = true_hot_rows(data, sampled)
    judged = [table for table in sampled.tables if not table.whole]
    _, out, _ = output(capsys, *arguments)
    lines = [line.split() for line in out.splitlines()]
    for table in judged:
        off = f"{table.estimate / truth[table.name] - 1:+.1%}"
        cells = [f"{table.estimate:,}", f"{table.low:,}-{table.high:,}", f"{truth[table.name]:,}", off]
        assert [table.name, *cells] in lines
    assert "by the counts of all rows; 99% intervals" in out


@pytest.mark.slow
def test_the_picture(data: Dataset, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed here")
    code, out, _ = output(capsys, "profile", data.path, "--device-memory", "200KiB", "--plot", tmp_path / "curve.png")
    assert code == 0
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert "wrote" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--exact", "--sample", "5%"], "Leave out one of them"),
        (["--confidence", "99%"], "Give --sample, such as 5%, or leave out --confidence"),
        (["--device-memory", "8"], "--device-memory 8 B is less than one row"),
        (["--sample", "0"], "--sample is 0"),
        (["--sample", "nan"], "--sample: share 'nan' is not a number from 0 to 100 %"),
        (["--sample", "-1e-3"], "--sample: share '-1e-3' is not a number from 0 to 100 %"),
        (["--sample", "5%", "--confidence", "1.5"], "--confidence: share '1.5' is outside 0 to 100 %"),
        (["--sample", "5%", "--confidence", "100%"], "below 100 %"),
        (["--seed", "-1"], "must not be negative"),
        (["--plot", "curve.jpg"], "does not end in .png"),
    ],
)
def test_mistakes_are_one_paragraph(
    data: Dataset, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = output(capsys, "profile", data.path, *arguments)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_files_are_not_replaced(data: Dataset, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    there = tmp_path / "hot.json"
    there.write_text("mine")
    code, _, err = output(capsys, "profile", data.path, "--out", there)
    assert (code, there.read_text()) == (2, "mine")
    assert "exists" in err


def test_ids_without_order_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Rows of a table whose frequent ids come last."""
    made = make_dataset(tmp_path, rows=4000, num_embeddings=(30_000,), shard_rows=4000)
    shard = made.path / made.train.entry["shards"][0]["file"]
    source = made.train.shards[0]
    from stoker.dataset.manifest import write_counts, write_manifest
    from stoker.dataset.shards import write_shard

    turned = write_shard(shard, dense=source.dense, labels=source.labels, ids=29_999 - source.ids)
    made.manifest["splits"]["train"]["shards"] = [turned.to_dict()]
    counts = {"C1": made.counts["C1"].flip(0)}
    made.manifest["files"] = {"counts.safetensors": write_counts(made.path, counts)}
    write_manifest(made.path, made.manifest)
    for arguments in (["--exact"], ["--sample", "100%"]):
        code, out, _ = output(capsys, "profile", made.path, "--device-memory", "100KiB", *arguments)
        assert code == 0
        assert "ids of C1 are not sorted by count" in out
