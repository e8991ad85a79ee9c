"""Rows in objects at a URL: equal to a resident run, within the memory given, whole or an error after any failure."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import scaled
from processes import run_python

import stoker
from stoker.base.errors import ConfigError, DependencyError, HomeError
from stoker.base.units import parse_size
from stoker.cli import main
from stoker.tables.stores import block_home, remote_home
from stoker.tables.stores.home import Initial, MemoryHome, tier_bytes
from stoker.tables.stores.ram_tier import RamTier
from stoker.tables.stores.remote_home import RemoteHome, _machine
from stoker.testing import check_store, make_dataset

SMALL: dict[str, Any] = {
    "embedding_dim": 4, "model_options": {"bottom": (8,), "top": (8,)}, "batch_size": 32, "tensorboard": False,
    "display": "quiet", "steps": 60, "save_every": 30,
}  # fmt: skip
PLACED = {"device_memory": "60KiB", "host_memory": "100KiB", "strategy": "host-pipelined"}  # rows come and go
BLOCK = 4000  # bytes
COMMAND = ["--dim", 4, "--bottom", 8, "--top", 8, "--batch-size", 32, "--no-tensorboard"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteHome, "block_bytes", BLOCK)


@pytest.fixture
def memory() -> Iterator[Any]:
    fsspec = pytest.importorskip("fsspec", reason="stores at URLs need fsspec")
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> stoker.Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=3000, num_embeddings=(9000, 200))


@pytest.fixture(scope="module")
def resident(data: stoker.Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("runs") / "resident"
    stoker.train(data, out=out, **SMALL)
    return checkpoint_files(out)


def checkpoint_files(run: Path) -> dict[str, bytes]:
    """The files of a run's checkpoints, by their place."""
    folder = run / "checkpoints"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def call(*arguments: Any) -> Any:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code or 0


def initial_of(rows: int = 1000) -> Initial:
    return Initial.of([stoker.TableConfig(name="t", num_embeddings=rows, embedding_dim=16)], 0)


def test_the_check_of_stores_finds_one_that_forgets(tmp_path: Path) -> None:
    class Forgets(MemoryHome):
        def _store(self, rows, source, places):
            super()._store(rows[1:], source, None if places is None else places[1:])

    with pytest.raises(AssertionError, match="differ from those stored"):
        check_store(Forgets)


def test_a_name_of_stoker_is_refused_and_an_unknown_one_named() -> None:
    with pytest.raises(ConfigError, match="a store of Stoker is called 'file'"):
        stoker.register_store("file", MemoryHome)
    with pytest.raises(ConfigError, match=r"'cloud' is unknown\. Choose 'memory', 'file'"):
        stoker.Cached(slots=3, home="cloud")
    with pytest.raises(ConfigError, match="needs a URL such as s3://bucket/folder as path, not '/tmp'"):
        RemoteHome.of(stoker.Cached(slots=3, home="remote", path="/tmp"), initial_of(), {}, gpu=False)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["memory", "s3"])
def test_rows_at_a_url_are_those_of_a_resident_run(
    data: stoker.Dataset, resident: dict[str, bytes], tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    fs = request.getfixturevalue(place)
    check_store(
        lambda initial, state: RemoteHome(initial, state, url=f"{place}://bucket/check"),
        rounds=20 if place == "memory" else scaled(20),
    )
    url = f"{place}://bucket/rows"
    result = stoker.train(data, out=tmp_path / "run", **SMALL, **PLACED, home_path=url)
    written = fs.find("bucket/rows")
    assert sum(name.endswith(".rows") for name in written) > 10
    assert checkpoint_files(tmp_path / "run") == resident
    placement = stoker.plan(result.model, **PLACED, home_path=url)
    assert f"at {url} behind 100.0 KiB of memory" in placement.summary()
    result.model.embeddings.close()
    fs.invalidate_cache()
    assert fs.find("bucket") == []


@pytest.mark.slow
@pytest.mark.parametrize("place", ["memory", "file"])
def test_the_command_trains_with_rows_at_a_url_and_resumes_without_them(
    data: stoker.Dataset, resident: dict[str, bytes], tmp_path: Path, place: str, memory: Any, monkeypatch: Any
) -> None:
    saved: list[int] = []
    real = RemoteHome.save
    monkeypatch.setattr(RemoteHome, "save", lambda self, blocks: [saved.extend(blocks), real(self, blocks)][1])
    url = f"{place}://{tmp_path}/rows"
    run = tmp_path / "run"
    limits = ["--device-memory", "60KiB", "--host-memory", "100KiB", "--home", url]
    assert call("train", data.path, "--out", run, *COMMAND, "--save-every", 30, "--steps", 40, *limits) == 0
    assert len(set(saved)) > 10
    saved.clear()
    assert call("train", "--resume", run, "--steps", 60) == 0
    assert len(set(saved)) > 10, "the place is a setting of the run"
    assert {name: content for name, content in checkpoint_files(run).items() if "000060/" in name} == {
        name: content for name, content in resident.items() if "000060/" in name
    }
    assert call("evaluate", run) == 0


@pytest.mark.slow
def test_the_memory_of_a_cache_is_a_bound_down_to_the_smallest_that_works(
    data: stoker.Dataset, resident: dict[str, bytes], tmp_path: Path, memory: Any
) -> None:
    def train(size: int | str, name: str) -> list[RamTier]:
        limits = {**PLACED, "host_memory": size, "home_path": "memory://bucket/rows"}
        model = stoker.train(data, out=tmp_path / name, **SMALL, **limits).model
        assert checkpoint_files(tmp_path / name) == resident
        homes = [group.storage.home for group in model.embeddings.groups if hasattr(group.storage, "home")]
        model.embeddings.close()
        return homes

    with pytest.raises(
        ConfigError, match=r"host_memory, 1\.0 KiB, is too little: rows at memory://bucket/rows"
    ) as told:
        train("1KiB", "refused")
    least = re.search(r"Give at least (\d+KiB) \(--host-memory\)", str(told.value))
    assert least is not None
    assert int(least[1].removesuffix("KiB")) <= 8, "a block, and the page table"
    for size in (least[1], "20KiB", "130KiB"):
        (home,) = train(size, size)
        taken = sum(tensor.nbytes for tensor in home.frames.arrays.tensors) + home._frame_of.nbytes
        assert taken + 11 * home.num_frames <= parse_size(size)
        assert home.num_frames == (parse_size(size) - home._frame_of.nbytes) // (home.block_rows * home.row_bytes + 11)


@pytest.mark.slow
def test_after_a_failure_the_last_checkpoint_is_whole_and_resumes(
    data: stoker.Dataset, resident: dict[str, bytes], tmp_path: Path, memory: Any, monkeypatch: Any
) -> None:
    """Objects that are gone, older or changed, and puts that fail: each is an error, never a checkpoint."""
    real, calls = RemoteHome.save, 0

    def break_one(self: RemoteHome, blocks: dict[int, bytes], how: str, at: int) -> None:
        nonlocal calls
        calls += 1
        before = {block: memory.cat_file(self._name(block)) for block in blocks if memory.exists(self._name(block))}
        if calls >= at and how == "full":
            with self._named("written"):
                raise OSError("no space left")
        real(self, blocks)
        if calls < at or (how == "older" and not before):
            return
        for block in blocks:
            name = self._name(block)
            if how == "gone":
                memory.rm(name)
            elif how == "older":
                memory.pipe_file(name, before.get(block, blocks[block]))
            else:
                memory.pipe_file(name, blocks[block][:-1] + b"x")

    told = {
        "full": "no space left.*resume from the last checkpoint", "gone": "an object is gone", "changed": "other bytes",
        "older": "other bytes than were saved: something has changed it.*resume from the last checkpoint",
    }  # fmt: skip
    for how, words in told.items():
        run, calls = tmp_path / how, 0
        with monkeypatch.context() as patch:
            at = 45  # of 69 or more, as threads meet; the first checkpoint comes before the 40th
            patch.setattr(RemoteHome, "save", lambda self, blocks, how=how, at=at: break_one(self, blocks, how, at))
            with pytest.raises(HomeError, match=f"(?s){words}"):
                stoker.train(data, out=run, **SMALL, **PLACED, home_path="memory://bucket/rows")
        found = checkpoint_files(run)
        assert found
        assert all(resident[name] == content for name, content in found.items()), how
        stoker.train(resume=run, display="quiet").model.embeddings.close()
        assert checkpoint_files(run) == resident


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [1, 40, 50])  # a run saves 65 times or more, as threads meet
def test_after_a_kill_in_a_put_a_run_resumes_to_the_same_checkpoints(
    data: stoker.Dataset, resident: dict[str, bytes], tmp_path: Path, kill_at: int
) -> None:
    pytest.importorskip("fsspec", reason="stores at URLs need fsspec")
    code = """
        import os, signal, sys
        import stoker
        from stoker.tables.stores.remote_home import RemoteHome
        RemoteHome.block_bytes, real, left = int(sys.argv[4]), RemoteHome.save, int(sys.argv[5])
        def save(self, blocks):
            global left
            left -= 1
            if left == 0:
                open(self._name(next(iter(blocks))), "wb").write(b"half of")
                os.kill(os.getpid(), signal.SIGKILL)
            real(self, blocks)
        RemoteHome.save = save
        stoker.train(sys.argv[1], out=sys.argv[2], home_path=sys.argv[3], **eval(sys.argv[6]))
    """
    run, rows = tmp_path / "run", tmp_path / "rows"
    given = [str(data.path), str(run), f"file://{rows}", str(BLOCK), str(kill_at), repr({**SMALL, **PLACED})]
    done = run_python("-c", textwrap.dedent(code), *given)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = rows.iterdir()
    assert all(resident[name] == content for name, content in checkpoint_files(run).items())
    stoker.train(resume=run, display="quiet").model.embeddings.close()
    assert checkpoint_files(run) == resident
    assert not left.exists()
    assert not list(rows.iterdir())


@pytest.mark.slow
def test_a_bucket_that_is_missing_is_named_and_none_is_made(s3: Any) -> None:
    with pytest.raises(HomeError, match=r"rows at s3://elsewhere/a cannot be kept: there is no such bucket, container"):
        RemoteHome(initial_of(), {}, url="s3://elsewhere/a")
    assert not s3.exists("elsewhere")


@pytest.mark.slow
def test_missing_credentials_are_named(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nowhere")
    s3.clear_instance_cache()
    with pytest.raises(HomeError, match=r"s3://bucket/a cannot be used: .*redentials.*AWS_ACCESS_KEY_ID and"):
        RemoteHome(initial_of(), {}, url="s3://bucket/a")


def test_refused_credentials_are_a_line_of_the_command(
    data: stoker.Dataset, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Forbidden")

    monkeypatch.setattr(type(memory), "pipe_file", refuse)
    limits = ["--device-memory", "60KiB", "--host-memory", "100KiB", "--home", "memory://bucket/rows"]
    assert call("train", data.path, "--out", tmp_path / "run", *COMMAND, *limits) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "memory://bucket/rows cannot be used: Forbidden. Check that you may use it, and the credentials" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/rows", "nothing can be written there"), ("hf://datasets/me/rows", "it keeps each write"),
        ("simplecache::s3://bucket/rows", "a chain of file systems may give back an older object"),
    ],
)  # fmt: skip
def test_urls_on_which_rows_cannot_be_replaced_are_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"rows cannot be kept at {url}: {words}"):
        RemoteHome(initial_of(), {}, url=url)


def test_an_object_that_is_missing_or_changed_is_an_error_that_names_it(memory: Any) -> None:
    home = RemoteHome(initial_of(), {}, url="memory://bucket/rows")
    home.write(0, home.empty(1000))
    name = f"{home.folder}/{0:09d}.rows"
    memory.pipe_file(name, b"short")
    with pytest.raises(HomeError, match=r"in objects at memory://bucket/rows\): block 0 has 5 B and was saved with"):
        home.read(0, 3)
    memory.rm(name)
    with pytest.raises(HomeError, match=r"rows at memory://bucket/rows cannot be read: an object is gone .*0\.rows"):
        home.read(0, 3)
    home.close()


def test_a_store_that_failed_is_safe_to_repeat(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some objects of the call are new and some old, and parts of blocks are read from both."""
    home = RemoteHome(initial_of(), {}, url="memory://bucket/rows")
    old, new = (home.empty(1000).map(lambda tensor, n=n: tensor.fill_(n)) for n in (1.0, 2.0))
    home.write(0, old)
    real = type(memory).pipe_file

    def fail(fs: Any, path: str, *given: Any, **options: Any) -> None:
        if path.endswith("3.rows"):
            raise OSError("reset by peer")
        real(fs, path, *given, **options)

    some = np.arange(1, 1000, 2)
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "pipe_file", fail)
        with pytest.raises(HomeError, match="reset by peer"):
            home.store(some, new, some)
    assert torch.equal(home.read(0, 1000).weight[::2], old.weight[::2])
    home.store(some, new, some)
    got = home.read(0, 1000).weight
    assert torch.equal(got[::2], old.weight[::2])
    assert torch.equal(got[1::2], new.weight[1::2])
    home.close()


def test_few_blocks_move_at_once(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in flight is no part of the memory of a cache, so it has a bound."""
    monkeypatch.setattr(block_home, "_AT_ONCE", 3 * BLOCK)
    home, moved = RemoteHome(initial_of(), {}, url="memory://bucket/rows"), []
    for name in ("load", "save"):
        real = getattr(home, name)
        monkeypatch.setattr(home, name, lambda blocks, real=real: [moved.append(len(blocks)), real(blocks)][1])
    tier = RamTier(home, memory=tier_bytes(1000, home.row_bytes, home.block_rows, frames=20))
    rows = tier.empty(1000)
    tier.write(0, rows)
    tier.fetch(np.arange(1000), rows)
    tier.store(np.arange(0, 1000, 2), rows)
    tier.flush()
    assert max(moved) == 3
    assert sum(moved) >= 3 * 17, "17 blocks are written, read, and written again"
    tier.close()


def test_whole_blocks_are_stored_without_loading_them(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteHome, "block_bytes", 640)
    home = RemoteHome(initial_of(95), {}, url="memory://bucket/rows")
    monkeypatch.setattr(home, "load", None)
    home.write(0, home.empty(95))
    home.write(90, home.empty(5))
    home.close()


@pytest.mark.slow
def test_folders_that_a_kill_left_are_removed_and_others_are_not(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="stores at URLs need fsspec")
    code = """
        import os, signal, sys
        from stoker import TableConfig
        from stoker.tables.stores.home import Initial
        from stoker.tables.stores.remote_home import RemoteHome
        initial = Initial.of([TableConfig(name="t", num_embeddings=10, embedding_dim=4)], 0)
        home = RemoteHome(initial, {}, url=sys.argv[1])
        home.write(0, home.empty(10))
        if sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    url = f"file://{tmp_path}/rows"
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), url, "exit"], check=True)
    for _ in range(2):
        assert run_python("-c", textwrap.dedent(code), url, "kill").returncode == -signal.SIGKILL
    left = list((tmp_path / "rows").iterdir())
    assert len(left) == 1, "the last one that was killed"
    assert {path.name for path in left[0].iterdir()} == {"owner.txt", "000000000.rows"}
    assert left[0].name.startswith(f"stoker-home_{_machine()}_")
    (tmp_path / "rows" / "mine").mkdir()
    (tmp_path / "rows" / "stoker-home_other-machine_1_abc").mkdir()
    first, second = (RemoteHome(initial_of(), {}, url=url) for _ in range(2))
    names = {"mine", "stoker-home_other-machine_1_abc", *(os.path.basename(home.folder) for home in (first, second))}
    assert {path.name for path in (tmp_path / "rows").iterdir()} == names
    for home in (first, second):
        home.close()


@pytest.mark.slow
@pytest.mark.usefixtures("no_cycle_is_found")
def test_objects_go_with_the_last_reference(s3: Any) -> None:
    for _ in range(2):
        home = RemoteHome(initial_of(), {}, url="s3://bucket/rows")
        del home  # else it might go in a thread of fsspec, which cannot remove them
        s3.invalidate_cache()
        assert not s3.find("bucket/rows")


def test_objects_that_cannot_be_removed_where_the_collector_runs_are_at_exit(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = RemoteHome(initial_of(), {}, url="memory://bucket/rows")
    home.write(0, home.empty(1000))
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "rm", lambda *_, **__: 1 / 0)  # as in a thread of fsspec
        del home
    assert memory.find("/bucket/rows")
    remote_home._remove(*remote_home._folders)
    assert not memory.find("/bucket/rows")
    assert not [folder for folder, fs in remote_home._folders.items() if fs is memory]


def test_without_fsspec_a_url_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(DependencyError, match=r"pip install 'stoker\[remote\]'"):
        RemoteHome(initial_of(), {}, url="s3://bucket/rows")
