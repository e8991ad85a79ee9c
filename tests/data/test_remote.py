"""URLs as input and output: the same bytes as local files, and nothing half-written is taken for whole."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest

import stoker
from stoker.base import remote
from stoker.base.errors import ConfigError, DataError, DependencyError
from stoker.base.files import url_of
from stoker.prep.inputs import files_of
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema
from stoker.training.scores.evaluation import check_scores_file
from tests.cli.calling import output
from tests.data.prepared import digests, quarantine


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server and the folder that it serves."""
    pytest.importorskip("aiohttp", reason="https:// needs aiohttp")
    folder = tmp_path / "web"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    thread.join()
    server.server_close()


def schema() -> Schema:
    return Schema(
        name="shop", label=Label(column="label"), dense=(DenseColumn(name="price", fill="mean"),),
        categorical=(CategoricalColumn(name="item", type="string"),),
    )  # fmt: skip


def lines(first: int, count: int = 100) -> str:
    return "label,price,item\n" + "".join(f"{n % 2},{n},i{n % 7}\n" for n in range(first, first + count))


def local_days(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for day in (2, 10):
        (folder / f"day_{day}.csv.gz").write_bytes(gzip.compress(lines(day).encode(), mtime=0))


def test_urls_are_told_from_paths() -> None:
    for text in ("s3://b/k", "https://a.b/c?d=e//f", "hf://datasets/a/b.csv", "zip://a.csv::https://h/a.zip"):
        assert url_of(text) == text
    for path in ("data/a.csv", "/data/a", "C:/data", r"C:\data", "a:b", "s3:/b/k", "day_*.csv", 7, None, Path("a/b")):
        assert url_of(path) is None
    assert url_of(Path("s3://b/k")) == "s3://b/k", "as pathlib and the command line have it"
    assert url_of(Path("file:///data/a")) == "file:///data/a"
    assert url_of(Path("memory://a")) == "memory://a"


def test_files_and_patterns_of_urls_are_as_local_ones(tmp_path: Path, memory: Any) -> None:
    local_days(tmp_path / "logs")
    memory.put(str(tmp_path / "logs"), "/bucket/logs", recursive=True)
    expected = stoker.prepare(schema(), str(tmp_path / "logs" / "day_*"), out=tmp_path / "a")
    found = stoker.prepare(schema(), "memory://bucket/logs/day_*", out=tmp_path / "b")
    assert digests(found.path) == digests(expected.path), "also the manifest: it names the files"
    assert [source["file"] for source in found.manifest["sources"]] == ["day_2.csv.gz", "day_10.csv.gz"]


def test_a_file_is_downloaded_once_and_again_when_it_changes(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/b/a.csv", lines(0).encode())
    first = remote.fetch_file("memory://b/a.csv")
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "get_file", None)
        assert remote.fetch_file("memory://b/a.csv") == first
    memory.pipe_file("/b/a.csv", lines(1).encode())
    second = remote.fetch_file("memory://b/a.csv")
    assert second != first
    assert second.read_text() == lines(1)


def test_a_cache_that_cannot_be_written_is_named(memory: Any, cache: Path) -> None:
    memory.pipe_file("/b/log.csv", lines(0).encode())
    cache.touch()
    for given, out in (("memory://b/log.csv", None), (pl.DataFrame({"a": [1]}), "memory://b/data")):
        with pytest.raises(DataError, match=rf"^{cache}.* cannot be written to .*Let STOKER_CACHE name a folder"):
            stoker.prepare(schema(), given, out=out)


def test_a_download_that_breaks_off_leaves_nothing(memory: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe_file("/b/a.csv", lines(0).encode())

    def short(self: Any, path: str, target: str, **_: Any) -> None:
        Path(target).write_bytes(b"label,pri")

    def broken(self: Any, path: str, target: str, **_: Any) -> None:
        short(self, path, target)
        raise ConnectionError("reset by peer")

    for fault, words in ((short, "arrived incomplete"), (broken, "reset by peer")):
        with monkeypatch.context() as patch:
            patch.setattr(type(memory), "get_file", fault)
            with pytest.raises(DataError, match=rf"memory://b/a.csv.*{words}"):
                remote.fetch_file("memory://b/a.csv")
        assert not [path for path in (cache / "files").rglob("*") if path.is_file()]
    assert remote.fetch_file("memory://b/a.csv").read_text() == lines(0)


def test_messages_and_the_quarantine_name_the_url(tmp_path: Path, memory: Any) -> None:
    memory.pipe_file("/b/a.csv", (lines(0) + "1,x,i1\n").encode())
    data = stoker.prepare(schema(), "memory://b/a.csv", out=tmp_path / "a", max_bad=0.1)
    assert quarantine(data.path)[0]["file"] == "memory://b/a.csv"
    with pytest.raises(DataError, match=r"^memory://b/a.csv:102: column price: 'x' is not a number"):
        stoker.prepare(schema(), "memory://b/a.csv", out=tmp_path / "b", strict=True)
    memory.pipe_file("/b/b.csv", b"label,price\n1,2\n")
    with pytest.raises(DataError, match=r"^memory://b/b.csv has no column 'item'"):
        stoker.prepare(schema(), "memory://b/b.csv", out=tmp_path / "b")


def test_urls_that_cannot_be_used_say_why(monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
    for url, words in (
        ("memory://b/none.csv", "there is nothing at memory://b/none.csv"),
        ("memory://b/none_*", "there is no file 'memory://b/none_"),
        ("nosuch://b/a.csv", "fsspec knows no nosuch://"),
    ):
        with pytest.raises(DataError, match=words), files_of(url):
            pass
    with pytest.raises(DataError, match=r"has no manifest.json: it is neither a dataset"):
        stoker.Dataset("memory://b/none")
    with pytest.raises(ConfigError, match="cannot be written to a URL"):
        check_scores_file(Path("s3://b/scores.parquet"))

    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(
        DependencyError, match=r"s3://b/a.csv needs a package .*Install s3fs.*pip install 'stoker\[remote\]'"
    ):
        remote.fetch_file("s3://b/a.csv")


def test_rights_that_are_missing_are_told_with_the_credentials(monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(memory), "info", refuse)
    with pytest.raises(DataError, match=r"memory://b/a.csv cannot be used: Access Denied. Check .* credentials"):
        remote.fetch_file("memory://b/a.csv")


def test_a_dataset_is_prepared_to_a_url_and_opened_from_it(
    tmp_path: Path, memory: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text(lines(0))
    expected = stoker.prepare(schema(), tmp_path / "a.csv", out=tmp_path / "local")
    data = stoker.prepare(schema(), tmp_path / "a.csv", out="memory://bucket/data")
    assert digests(data.path) == digests(expected.path)
    assert data.url == "memory://bucket/data"
    assert not list((cache / "outputs").rglob("*.safetensors")), "it is moved to where it is read"
    shutil.rmtree(cache)
    again = stoker.Dataset("memory://bucket/data")
    assert digests(again.path) == digests(expected.path)
    again.train.check()
    assert stoker.prepare(schema(), tmp_path / "a.csv", out="memory://bucket/data").path == again.path, "known again"
    (tmp_path / "b.csv").write_text(lines(7))
    with pytest.raises(DataError, match=r"^memory://bucket/data already holds a dataset"):
        stoker.prepare(schema(), tmp_path / "b.csv", out="memory://bucket/data")
    new = stoker.prepare(schema(), tmp_path / "b.csv", out="memory://bucket/data", overwrite=True)
    assert new.path != again.path
    monkeypatch.undo()
    names = {name.removeprefix("/bucket/data/") for name in memory.find("/bucket/data")}
    assert names == {str(path.relative_to(new.path)) for path in new.path.rglob("*") if path.is_file()}


def test_an_upload_that_is_killed_is_not_taken_for_whole(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text(lines(0))
    original = type(memory).put_file
    order: list[str] = []

    def failing(self: Any, source: str, target: str, **more: Any) -> None:
        if target.endswith(after):
            raise ConnectionError("gone")
        order.append(target.rpartition("/")[2])
        original(self, source, target, **more)

    for last in ("00000.safetensors", "manifest.json"):
        after = last
        with monkeypatch.context() as patch:
            patch.setattr(type(memory), "put_file", failing)
            with pytest.raises(DataError, match="memory://b/data cannot be used: gone"):
                stoker.prepare(schema(), tmp_path / "a.csv", out="memory://b/data")
        with pytest.raises(DataError, match=r"has no manifest\.json"):
            stoker.Dataset("memory://b/data")
    after = "nothing"
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", failing)
        order.clear()
        assert len(stoker.prepare(schema(), tmp_path / "a.csv", out="memory://b/data").train)
    assert order[-1] == "manifest.json"
    memory.pipe_file("/b/mine/notes.txt", b"mine")
    with pytest.raises(DataError, match=r"memory://b/mine is not empty and no dataset \(notes.txt\)"):
        stoker.prepare(schema(), tmp_path / "a.csv", out="memory://b/mine")


def test_a_damaged_or_hostile_dataset_is_refused(tmp_path: Path, memory: Any, cache: Path) -> None:
    (tmp_path / "a.csv").write_text(lines(0))
    stoker.prepare(schema(), tmp_path / "a.csv", out="memory://b/data")
    shutil.rmtree(cache)
    shard = "/b/data/train/00000.safetensors"
    whole = memory.cat_file(shard)
    memory.pipe_file(shard, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match=r"memory://b/data/train/00000.safetensors arrived incomplete or damaged"):
        stoker.Dataset("memory://b/data")
    memory.rm_file(shard)
    with pytest.raises(DataError, match=r"^memory://b/data/train/00000.safetensors, which manifest.json names, is mis"):
        stoker.Dataset("memory://b/data")
    memory.pipe_file(shard, whole)
    assert len(stoker.Dataset("memory://b/data").train), "the other files were kept"
    manifest = json.loads(memory.cat_file("/b/data/manifest.json"))
    manifest["files"]["../../evil"] = manifest["files"].pop("quarantine.jsonl")
    memory.pipe_file("/b/data/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(DataError, match="which is outside of it"):
        stoker.Dataset("memory://b/data")


@pytest.mark.slow
def test_web_addresses_are_inputs_and_datasets(tmp_path: Path, web: tuple[str, Path]) -> None:
    address, folder = web
    local_days(folder)
    pl.read_csv(folder / "day_2.csv.gz").write_parquet(folder / "a.parquet")
    expected = stoker.prepare(schema(), str(folder / "day_*"), out=tmp_path / "a")
    urls = [f"{address}/day_2.csv.gz", f"{address}/day_10.csv.gz"]
    assert digests(stoker.prepare(schema(), urls, out=tmp_path / "b").path) == digests(expected.path)
    assert digests(stoker.prepare(schema(), f"{address}/day_*", out=tmp_path / "c").path) == digests(expected.path)
    assert len(stoker.prepare(schema(), f"{address}/a.parquet?version=1").train)
    assert "label" in stoker.draft_schema(f"{address}/a.parquet")
    stoker.prepare(schema(), urls, out=folder / "data")
    assert digests(stoker.Dataset(f"{address}/data").path) == digests(folder / "data")
    with pytest.raises(DataError, match=rf"there is nothing at {address}/none.csv"):
        stoker.prepare(schema(), f"{address}/none.csv")
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:1/a\.csv cannot be used: Cannot connect to host"):
        stoker.prepare(schema(), "http://127.0.0.1:1/a.csv")
    with pytest.raises(DataError, match="http:// cannot be written"):
        stoker.prepare(schema(), urls, out=f"{address}/new")


def test_a_changed_web_page_is_noticed(web: tuple[str, Path]) -> None:
    address, folder = web
    (folder / "a.csv").write_text(lines(10))
    first = remote.fetch_file(f"{address}/a.csv")
    (folder / "a.csv").write_text(lines(20))  # as long
    os.utime(folder / "a.csv", (1e9, 1e9))
    assert remote.fetch_file(f"{address}/a.csv") != first


@pytest.mark.slow
def test_the_command_line_takes_urls(tmp_path: Path, web: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    address, folder = web
    local_days(folder)
    out, shop = f"file://{tmp_path}/bucket/data", tmp_path / "shop.toml"

    def run(*arguments: object) -> str:
        code, found, error = output(capsys, *arguments)
        assert code == 0, error
        return found

    run("init", f"{address}/day_2.csv.gz", "--out", shop)
    assert f"Dataset{out}" in "".join(run("prepare", shop, f"{address}/day_*", "--out", out).split())
    assert (tmp_path / "bucket/data/manifest.json").exists()
    assert "already prepared" in run("prepare", shop, f"{address}/day_*", "--out", out)
    assert json.loads(run("inspect", out, "--json"))["splits"]["train"]["rows"]
    run("train", out, "--out", tmp_path / "run", "--steps", 2, "--no-tensorboard")
    run("predict", tmp_path / "run", "--data", f"{address}/day_2.csv.gz", "--keep", "item", "--out", tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text().startswith('"row","label","item","score"\n0,0,"i2",')
    like = run("prepare", "--like", out, f"{address}/day_2.csv.gz", "--out", tmp_path / "new", "--json")
    assert json.loads(like)["rows"]["test"] == 100
    code, _, error = output(capsys, "prepare", shop, f"{address}/none.csv", "--out", tmp_path / "none")
    assert (code, error.strip()) == (2, f"error: there is nothing at {address}/none.csv. Check the URL.")


@pytest.mark.slow
def test_s3_buckets_are_inputs_and_outputs(tmp_path: Path, s3: Any, cache: Path) -> None:
    local_days(tmp_path / "logs")
    s3.put(str(tmp_path / "logs"), "bucket/logs", recursive=True)
    expected = stoker.prepare(schema(), str(tmp_path / "logs" / "day_*"), out=tmp_path / "a")
    made = stoker.prepare(schema(), "s3://bucket/logs/day_*", out="s3://bucket/data")
    assert digests(made.path) == digests(expected.path)
    shutil.rmtree(cache)
    assert digests(stoker.Dataset("s3://bucket/data").path) == digests(expected.path)
    stoker.prepare(schema(), "s3://bucket/logs/day_2*", out="s3://bucket/data", overwrite=True)
    assert len(stoker.Dataset("s3://bucket/data").splits) == 3
    with pytest.raises(DataError, match="there is nothing at s3://bucket/none"):
        stoker.prepare(schema(), "s3://bucket/none.csv")
    with pytest.raises(DataError, match=r"s3://elsewhere/data (cannot be used|.*nothing at)|nothing at s3://elsewhere"):
        stoker.prepare(schema(), tmp_path / "logs" / "day_2.csv.gz", out="s3://elsewhere/data")
    assert not s3.exists("elsewhere"), "no bucket is made"


def test_fsspec_is_imported_for_urls_only() -> None:
    code = "import sys, stoker.base.remote as remote; remote.local_run('a'); sys.exit('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
