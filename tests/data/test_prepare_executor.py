"""Preparations on executors: the bytes, the messages and the resumed work of threads."""

from __future__ import annotations

import errno
import gzip
import importlib
import os
import pickle
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from prepared import digests
from processes import context

import stoker
from stoker.base.errors import ConfigError, DataError
from stoker.base.ordered import ordered_map
from stoker.prep.parse.frames import BadLine, Field, frame_block
from stoker.prep.parse.ingest import Source
from stoker.prep.parse.quarantine import write_bad_lines
from stoker.prep.prepare import StageProgress, run_prepare
from stoker.prep.rows.raw_rows import _RawSink
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn, SplitRule, Timestamp
from stoker.prep.source_format import SourceFormat
from stoker.prep.stages.parts import checksum

pytestmark = pytest.mark.filterwarnings("ignore:.* have rows in several splits")
SCHEMA = Schema(
    label=Label(column="label"),
    group="list",
    timestamp=Timestamp(column="when", type="int"),
    dense=(DenseColumn(name="price", fill="median", transforms=("log1p", "zscore")), DenseColumn(name="age")),
    categorical=(
        CategoricalColumn(name="item", type="int"),
        CategoricalColumn(name="user", type="string", min_count=2),
        CategoricalColumn(name="hashed", source="user", type="string", hash_buckets=7),
    ),
    sequence=(SequenceColumn(name="seen", type="int", separator="|", max_length=4),),
    split=SplitRule(rule="leave_last_out", column="user", min_rows=3),
)


def write_log(path: Path, rows: int, *, label: str | None = None, items: int = 60) -> Path:
    draw = random.Random(rows)
    lines = ["label,list,when,price,age,item,user,seen"]
    for n in range(rows):
        seen = "|".join(str(draw.randrange(9)) for _ in range(draw.randrange(6)))
        price = draw.choice(["", f"{draw.random() * 50:.2f}"])
        lines.append(f"{draw.randrange(2)},l{n // 4},{n},{price},{draw.randrange(90)},{draw.randrange(items)},"
                     f"u{draw.randrange(40)},{seen}")  # fmt: skip
    lines[rows // 2] = "a line of too few fields" if label is None else label + lines[rows // 2][1:]
    path.write_text("\n".join(lines) + "\n")
    return path


class Pickled(Executor):
    """Threads that get copies of their jobs, as other processes do, so that tests can patch what they do."""

    _max_workers = 2

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        copy = pickle.dumps((work, given, named))

        def run() -> Any:
            function, args, kwargs = pickle.loads(copy)
            return pickle.loads(pickle.dumps(function(*args, **kwargs)))

        return self._pool.submit(run)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


def processes(**options: Any) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, mp_context=context(), **options)


@contextmanager
def dask() -> Iterator[Executor]:
    distributed = pytest.importorskip("distributed", reason="Dask's executor is in the package distributed")
    context()
    with importlib.import_module("dask").config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
        with cluster, distributed.Client(cluster) as client:
            yield client.get_executor()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Dask's own
@pytest.mark.parametrize("kind", [Pickled, lambda: ThreadPoolExecutor(3), processes, dask],
                         ids=["pickled", "threads", "processes", "dask"])  # fmt: skip
def test_any_executor_gives_the_same_bytes(tmp_path: Path, kind: Callable[[], Any]) -> None:
    raw = write_log(tmp_path / "log.csv", 1500)
    whole = run_prepare(SCHEMA, raw, out=tmp_path / "whole", block_bytes=4000)
    with kind() as executor:
        report = run_prepare(SCHEMA, raw, out=tmp_path / "made", block_bytes=4000, executor=executor)
        assert executor.submit(len, "open").result() == 4
    assert digests(tmp_path / "made") == digests(tmp_path / "whole")
    assert (report.rows, report.bad, report.tables) == (whole.rows, 1, whole.tables)


class Twice(Pickled):
    """Gives every job to two workers, as a cluster that takes one of them for lost."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        super().submit(work, *given, **named)
        return super().submit(work, *given, **named)


@pytest.mark.slow
def test_jobs_done_twice(tmp_path: Path) -> None:
    raw = write_log(tmp_path / "log.csv", 1500)
    run_prepare(SCHEMA, raw, out=tmp_path / "whole", block_bytes=4000)
    for number in range(3):
        with Twice() as executor:
            run_prepare(SCHEMA, raw, out=tmp_path / str(number), block_bytes=4000, executor=executor)
        shutil.rmtree(tmp_path / str(number) / ".work", ignore_errors=True)  # the late one may have made it again
        assert digests(tmp_path / str(number)) == digests(tmp_path / "whole")


def test_two_workers_make_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = BadLine(line=3, reason="no number", text="x")
    path = tmp_path / "block.bad"
    write_bad_lines(path, [bad])
    whole = path.read_bytes()

    def again() -> Iterator[BadLine]:
        assert path.read_bytes() == whole, "who reads it meanwhile finds it empty"
        yield bad

    write_bad_lines(path, again())
    assert path.read_bytes() == whole
    write, sink = pl.DataFrame.write_parquet, _RawSink([])

    def make() -> dict[str, int]:
        return sink(frame_block(pl.DataFrame({"a": [1.0, 2.0]}), [Field(column="a", kind="float")]), "log", raw)

    def overtaken(*given: Any, **named: Any) -> None:
        write(*given, **named)
        monkeypatch.undo()
        make()

    raw = tmp_path / "block.parquet"
    monkeypatch.setattr(pl.DataFrame, "write_parquet", overtaken)
    assert make() == checksum(raw)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["block.bad", "block.parquet"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gzip", "quoted", "parquet", "jsonl", "frame"])
def test_every_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr("stoker.prep.parse.ingest.PARQUET_ROWS", 70)
    raw, schema = write_log(tmp_path / "log.csv", 600), SCHEMA
    lines = raw.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.count(",") == 7]
    given: Any = tmp_path / "given"
    if form == "gzip":
        given = tmp_path / "given.csv.gz"
        given.write_bytes(gzip.compress(raw.read_bytes()))
    elif form == "quoted":
        given.write_text(whole[0] + "".join(f'"{line[0]}"{line[1:]}' for line in whole[1:]))
        schema = replace(SCHEMA, source=SourceFormat(quote='"'))
    else:
        raw.write_text("".join(whole))
        frame = pl.read_csv(raw)
        given = {"parquet": tmp_path / "given.parquet", "jsonl": tmp_path / "given.jsonl", "frame": frame}[form]
        if form == "parquet":
            frame.write_parquet(given, row_group_size=70)
        elif form == "jsonl":
            frame.write_ndjson(given)
            schema = replace(SCHEMA, sequence=())  # which JSON has as lists
    blocks = Source.blocks
    monkeypatch.setattr(Source, "blocks", lambda source, _: blocks(source, 4000))
    expected = stoker.prepare(schema, given, out=tmp_path / "whole")
    with Pickled() as executor:
        made = stoker.prepare(schema, given, executor=executor)
        made.save(tmp_path / "made")
    found, other = digests(tmp_path / "made"), digests(tmp_path / "whole")
    if form == "frame":  # its temporary file has another stamp, not another name
        assert made.manifest["sources"] == expected.manifest["sources"]
    assert {name: found[name] for name in found if name != ".request"} == {
        name: other[name] for name in other if name != ".request"
    }


@pytest.mark.slow
@pytest.mark.parametrize("form", ["text", "parquet"])
def test_kept_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr("stoker.prep.parse.ingest.PARQUET_ROWS", 70)
    raw = write_log(tmp_path / "log.csv", 900)
    schema = replace(SCHEMA, keep=("list", "price", "when", "label", "seen"))
    if form == "parquet":
        frame = pl.read_csv("\n".join(line for line in raw.read_text().splitlines() if line.count(",") == 7).encode())
        raw = tmp_path / "log.parquet"
        frame.write_parquet(raw, row_group_size=70)
    for name, changed in (("plain", schema), ("featured", schema.with_feature("count by=user"))):
        run_prepare(changed, raw, out=tmp_path / name, block_bytes=4000)
        with Pickled() as executor:
            run_prepare(changed, raw, out=tmp_path / f"{name}-made", block_bytes=4000, executor=executor)
            memory = stoker.prepare(changed, raw, executor=executor)
        assert digests(tmp_path / f"{name}-made") == digests(tmp_path / name)
        for split in stoker.Dataset(tmp_path / name).splits.values():
            assert split.kept is not None
            assert (kept := memory.split(split.name).kept) is not None
            assert kept.read().equals(split.kept.read())
            assert len(kept) == len(split) > 0
            labels = [float(shard.labels[n]) for shard in split.shards for n in range(shard.rows)]
            assert kept.read()["label"].to_pylist() == labels


@pytest.mark.slow
def test_rows_like_those_of_a_dataset_and_reordered_ones(tmp_path: Path) -> None:
    raw = write_log(tmp_path / "log.csv", 4000, items=4000)
    with Pickled() as executor:
        for kwargs in ({"like": tmp_path / "whole"}, {"recipe": SCHEMA, "reorder": True}):
            if "like" in kwargs:
                stoker.prepare(SCHEMA, raw, out=tmp_path / "whole")
            name = next(iter(kwargs))
            stoker.prepare(files=raw, out=tmp_path / f"{name}-threads", **kwargs)  # type: ignore[arg-type]
            stoker.prepare(files=raw, out=tmp_path / name, executor=executor, **kwargs)  # type: ignore[arg-type]
            assert digests(tmp_path / name) == digests(tmp_path / f"{name}-threads")


@pytest.mark.slow
def test_relative_paths_are_those_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(tmp_path / "log.csv", 300)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    stoker.prepare(SCHEMA, "log.csv", out="whole")
    with processes(initializer=os.chdir, initargs=(str(tmp_path / "elsewhere"),)) as executor:
        stoker.prepare(SCHEMA, "log.csv", out="made", executor=executor)
    assert digests(tmp_path / "made") == digests(tmp_path / "whole")  # the quarantine names the file as it was given


@pytest.mark.slow
def test_errors_of_workers_have_the_same_message(tmp_path: Path) -> None:
    numbers = write_log(tmp_path / "numbers.csv", 400, label="7")
    split = replace(SCHEMA, split=SplitRule(rule="column", column="user", values={"u1": "train"}), timestamp=None)
    oov = replace(SCHEMA, categorical=(replace(SCHEMA.categorical[1], min_count=99, oov="error"),))
    with processes() as executor:
        for schema, raw in (
            (SCHEMA, numbers),
            (split, write_log(tmp_path / "log.csv", 300)),
            (oov, tmp_path / "log.csv"),
        ):
            said = []
            for options in ({}, {"executor": executor}):
                with pytest.raises(DataError) as caught:
                    stoker.prepare(schema, raw, out=tmp_path / "out", resume=False, **options)  # type: ignore[arg-type]
                said.append((type(caught.value), str(caught.value)))
            assert said[0] == said[1]


def test_a_full_disk_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_log(tmp_path / "log.csv", 300)

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Pickled() as executor, monkeypatch.context() as patch:
        patch.setattr("stoker.base.files.os.replace", full)
        with pytest.raises(DataError, match=r"no room left on the disk of .*Free some space.*nothing was kept"):
            stoker.prepare(SCHEMA, raw, out=tmp_path / "out", executor=executor)
    assert not (tmp_path / "out").exists()


def test_what_is_no_executor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"executor is a object, not a .* of a Dask client, pass client.get_executor"):
        stoker.prepare(SCHEMA, write_log(tmp_path / "log.csv", 30), executor=object())  # type: ignore[arg-type]


def test_an_executor_that_is_shut_down(tmp_path: Path) -> None:
    raw = write_log(tmp_path / "log.csv", 1500)
    executor = ThreadPoolExecutor(1)

    def stop(_: StageProgress) -> None:
        executor.shutdown(wait=False)

    with pytest.raises(DataError, match=r"the executor.* ended .*after shutdown.*parts are kept"):
        run_prepare(SCHEMA, raw, out=tmp_path / "out", block_bytes=4000, executor=executor, progress=stop)


def test_a_worker_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_log(tmp_path / "log.csv", 300)

    def die(*given: Any, **named: Any) -> None:
        raise BrokenExecutor("a process was terminated abruptly")

    with Pickled() as executor:
        monkeypatch.setattr("stoker.prep.write.publish.write_shard", die)
        with pytest.raises(DataError, match=r"worker of it, ended .*abruptly.*use fewer.*parts are kept"):
            stoker.prepare(SCHEMA, raw, out=tmp_path / "out", executor=executor)
        monkeypatch.undo()
        assert run_prepare(SCHEMA, raw, out=tmp_path / "out", executor=executor).reused > 3


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["read", "fit", "write"])
def test_a_stopped_run_goes_on(tmp_path: Path, stage: str) -> None:
    raw = write_log(tmp_path / "log.csv", 1500)

    def stop(progress: StageProgress) -> None:
        if progress.stage == stage:
            raise KeyboardInterrupt

    with Pickled() as executor:
        with pytest.raises(KeyboardInterrupt, match=r"finished steps? kept"):
            run_prepare(SCHEMA, raw, out=tmp_path / "made", block_bytes=4000, executor=executor, progress=stop)
        kept = digests(tmp_path / "made")
        time.sleep(0.05)
        assert digests(tmp_path / "made") == kept, "a job went on"
        assert run_prepare(SCHEMA, raw, out=tmp_path / "made", block_bytes=4000, executor=executor).reused > 0
    run_prepare(SCHEMA, raw, out=tmp_path / "whole", block_bytes=4000)
    assert digests(tmp_path / "made") == digests(tmp_path / "whole")


def test_jobs_that_have_begun_are_awaited() -> None:
    release, ended = threading.Event(), []

    def work(number: int) -> int:
        if number:
            release.wait(10)
        ended.append(number)
        return number

    with ThreadPoolExecutor(2) as pool:
        results = ordered_map(work, range(50), 1, executor=pool)
        assert next(results) == 0
        threading.Timer(0.1, release.set).start()
        results.close()
        count = len(ended)
        assert 1 < count < 6
        assert pool.submit(len, "open").result() == 4
        assert len(ended) == count
