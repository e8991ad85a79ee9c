"""Every row exactly once over all ranks, resumable to the batch, in bounded memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker.dataset.split as reader_module
from stoker.base.errors import CheckpointError, ConfigError, DataError
from stoker.base.files import hash_json
from stoker.dataset.batch import Batch
from stoker.dataset.dataset import Dataset
from stoker.dataset.gather import NumbaGather, NumpyGather, make_gather, new_tensor
from stoker.dataset.manifest import write_manifest
from stoker.dataset.order import EpochOrder
from stoker.dataset.shards import Shard, write_shard
from stoker.dataset.spec import Feature, FeatureSpec
from stoker.dataset.split import prefetched
from stoker.testing import make_dataset

FEATURES = 3


def plain_gather(shards: list[Shard], starts: list[int], *, ids_only: bool = False, threads: int = 1) -> Any:
    """What reads where Numba is missing."""
    return NumpyGather(shards, starts, ids_only=ids_only)


def numbered(path: Path, rows: int, shard_rows: int, *, sequence: bool = False, wide: bool = False) -> Dataset:
    """A dataset whose every value tells the row it belongs to."""
    spec = FeatureSpec(
        dense=("d0", "d1"),
        features=tuple(
            Feature(name=f"f{i}", table=f"f{i}", sequence=sequence and i > 0, max_length=4 if i else 1)
            for i in range(FEATURES)
        ),
        num_embeddings={f"f{i}": 10 * rows + 100 for i in range(FEATURES)},
    )
    shards = []
    for number, start in enumerate(range(0, rows, shard_rows)):
        row = np.arange(start, min(start + shard_rows, rows))
        dense = np.stack((row, -row), axis=1).astype(np.float32)
        lengths = np.stack([np.ones_like(row), row % 4, row // 4 % 4], axis=1).astype(np.int32)
        kind = np.int64 if wide else np.int32
        extra: dict[str, Any] = {}
        if sequence:
            ids = np.repeat(row, lengths.sum(axis=1)).astype(kind)
            extra = {
                "lengths": lengths,
                "row_offsets": np.concatenate(([0], lengths.sum(axis=1).cumsum())).astype(np.int64),
            }
        else:
            ids = (row[:, None] * 10 + np.arange(FEATURES)).astype(kind)
        labels = (row % 2).astype(np.float32)
        file = path / "train" / f"{number:05d}.safetensors"
        shards.append(write_shard(file, dense=dense, labels=labels, ids=ids, **extra).to_dict())
    write_manifest(
        path,
        {
            "features": spec.to_dict(),
            "schema_hash": hash_json({"rows": rows}),
            "splits": {"train": {"rows": rows, "positives": rows // 2, "shards": shards}},
        },
    )
    return Dataset(path)


def rows_of(batch: Batch) -> list[int]:
    """The rows of a batch, after checking that all their values came along."""
    rows = batch.dense[:, 0].long()
    assert torch.equal(batch.dense[:, 1], -batch.dense[:, 0])
    assert torch.equal(batch.labels.long(), rows % 2)
    if batch.offsets is None:
        assert torch.equal(batch.ids.long(), rows[:, None] * 10 + torch.arange(FEATURES))
    else:
        lengths = torch.stack((torch.ones_like(rows), rows % 4, rows // 4 % 4), dim=1)
        assert torch.equal(batch.offsets, torch.cat((torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0))))
        assert np.array_equal(batch.ids.numpy(), np.repeat(rows.numpy(), lengths.sum(dim=1).numpy()))
    return rows.tolist()


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, bool], Dataset]:
    folder = tmp_path_factory.mktemp("numbered")
    made = {}
    for rows, shard_rows, sequence in [
        (1, 1, False),
        (7, 3, False),
        (64, 64, False),
        (500, 70, False),
        (500, 77, True),
        (3000, 1000, True),
        (20_000, 3001, False),
    ]:
        path = folder / f"{rows}_{shard_rows}_{sequence}"
        made[rows, shard_rows, sequence] = numbered(path, rows, shard_rows, sequence=sequence)
    return made


KEYS = st.sampled_from(
    [(1, 1, False), (7, 3, False), (64, 64, False), (500, 70, False), (500, 77, True), (3000, 1000, True)]
)


def same_batch(a: Batch, b: Batch, names: tuple[str, ...]) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in names]
    return a.step == b.step and all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)


@settings(deadline=None, max_examples=scaled(60))
@given(
    key=KEYS,
    batch_size=st.integers(20, 700),
    seed=st.none() | st.integers(0, 10),
    memory=st.integers(400, 200_000),
    start=st.integers(0, 30),
    until=st.none() | st.integers(0, 60),
    ids_only=st.booleans(),
    plain=st.booleans(),
    prefetch=st.sampled_from([0, 2]),
)
def test_the_rest_of_an_epoch_is_what_the_stream_goes_on_with(
    sets: dict[tuple[int, int, bool], Dataset],
    key: tuple[int, int, bool],
    batch_size: int,
    seed: int | None,
    memory: int,
    start: int,
    until: int | None,
    ids_only: bool,
    plain: bool,
    prefetch: int,
) -> None:
    stream = sets[key].train.batches(batch_size, seed=seed, shuffle_memory=memory, prefetch=prefetch, reuse=True)
    start %= 2 * len(stream)
    stream.epoch, stream.position = divmod(start, len(stream))
    state = stream.state_dict()
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            patch.setattr(reader_module, "make_gather", plain_gather)
        rest = stream.rest_of_epoch(until=until, ids_only=ids_only)
        found = list(rest)
    assert len(found) == len(rest)
    assert stream.state_dict() == state
    names = ("ids", "offsets") if ids_only else ("dense", "ids", "offsets", "labels")
    expected = 0
    for batch in stream:
        if until is None or batch.step < until:
            assert same_batch(found[expected], batch, names)
            assert len(found[expected]) == len(batch)
            expected += 1
    assert expected == len(found)
    assert [batch.step for batch in stream.rest_of_epoch(start)] == list(range(start, stream.step))
    if ids_only:
        assert all(batch.dense.shape[1] == 0 and batch.labels is None for batch in found)


@pytest.mark.slow
@settings(deadline=None, max_examples=scaled(150))
@given(
    key=KEYS,
    batch_size=st.integers(1, 700),
    seed=st.none() | st.integers(0, 10),
    memory=st.integers(400, 200_000),
    ranks=st.integers(1, 5),
    drop_last=st.booleans(),
    limit=st.none() | st.integers(1, 4000),
    prefetch=st.sampled_from([0, 0, 2]),
)
def test_every_row_once_over_all_ranks(
    sets: dict[tuple[int, int, bool], Dataset],
    key: tuple[int, int, bool],
    batch_size: int,
    seed: int | None,
    memory: int,
    ranks: int,
    drop_last: bool,
    limit: int | None,
    prefetch: int,
) -> None:
    split = sets[key].train
    rows = len(split) if limit is None else min(limit, len(split))
    batch_size = max(batch_size, rows // 150)  # smaller ones of larger sets take long and show nothing new
    rest = rows % (batch_size * ranks)
    try:
        streams = [
            split.batches(
                batch_size,
                seed=seed,
                shuffle_memory=memory,
                rank=rank,
                world_size=ranks,
                drop_last=drop_last,
                limit=limit,
                prefetch=prefetch,
            )
            for rank in range(ranks)
        ]
    except ConfigError:
        few = rest < ranks and (rows < batch_size * ranks or batch_size == 1)
        assert (drop_last and rows < batch_size * ranks) or (not drop_last and rest and few)
        return
    for _ in range(2):
        batches = [list(stream) for stream in streams]
        assert len({len(b) for b in batches} | {len(stream) for stream in streams}) == 1
        taken = [row for rank in batches for batch in rank for row in rows_of(batch)]
        assert len(taken) == len(set(taken)) == (rows - rest if drop_last else rows)
        assert set(taken) <= set(range(rows))
        sizes = [len(batch) for rank in batches for batch in rank]
        assert min(sizes) >= 1
        assert max(sizes) <= batch_size
        if seed is None and ranks == 1:
            assert taken == list(range(len(taken)))


@settings(deadline=None, max_examples=scaled(60))
@given(
    key=KEYS,
    batch_size=st.integers(1, 300),
    seed=st.none() | st.integers(0, 3),
    memory=st.sampled_from([400, 5000, 10**6]),
    stop=st.integers(0, 700),
    reuse=st.booleans(),
)
def test_resumed_equals_uninterrupted(
    sets: dict[tuple[int, int, bool], Dataset],
    key: tuple[int, int, bool],
    batch_size: int,
    seed: int | None,
    memory: int,
    stop: int,
    reuse: bool,
) -> None:
    batch_size = max(batch_size, key[0] // 150)

    def make() -> reader_module.BatchStream:
        return sets[key].train.batches(batch_size, seed=seed, shuffle_memory=memory, reuse=reuse)

    whole, straight = [], make()
    for _ in range(2):
        whole += [(batch.step, rows_of(batch)) for batch in straight]
    assert [step for step, _ in whole] == list(range(len(whole)))
    stop %= len(whole) + 1
    first, seen = make(), []
    while len(seen) < stop:
        for batch in first:
            seen.append((batch.step, rows_of(batch)))
            if len(seen) == stop:
                break
    second = make()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.step == stop
    for stream in (first, second):
        rest = list(seen)
        while len(rest) < len(whole):
            rest += [(batch.step, rows_of(batch)) for batch in stream]
        assert rest[: len(whole)] == whole


def test_epochs_differ_and_seeds_repeat(sets: dict[tuple[int, int, bool], Dataset]) -> None:
    split = sets[20_000, 3001, False].train

    def order(seed: int, epochs: int = 1, memory: str = "1GiB", prefetch: int = 0) -> list[int]:
        stream = split.batches(512, seed=seed, shuffle_memory=memory, prefetch=prefetch)
        return [[row for batch in stream for row in rows_of(batch)] for _ in range(epochs)][-1]

    assert order(1) == order(1) == order(1, prefetch=3)
    assert order(1, memory="100KiB") == order(1, memory="100KiB")
    distinct = [order(1), order(2), order(1, 2), order(1, memory="100KiB"), order(1, 2, "100KiB")]
    assert len({tuple(rows) for rows in distinct}) == 5


def test_the_pool_is_what_may_be_resident(sets: dict[tuple[int, int, bool], Dataset]) -> None:
    split = sets[20_000, 3001, False].train
    stream = split.batches(100, seed=1, shuffle_memory="64KiB")
    rows = [row for batch in stream for row in rows_of(batch)]
    order = EpochOrder(20_000, pool_rows=int(64 * 1024 // (split.bytes / len(split))), seed=1, epoch=0)
    assert rows == order.take(0, 20_000).tolist()
    assert order.pools == 8
    for start, stop in pairwise(order.pool_starts.tolist()):
        assert (stop - start) * 24 <= 64 * 1024
        assert np.ptp(rows[start:stop]) > 10_000  # each pool's rows come from all over the split


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_kernels_equal_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, sequence: bool, wide: bool
) -> None:
    monkeypatch.setattr("stoker.dataset.kernels._BLOCK", 8)
    pytest.importorskip("numba", reason="the fast gather needs numba; the plain one is tested beside it")
    split = numbered(tmp_path, 1000, 130, sequence=sequence, wide=wide).train
    assert isinstance(make_gather(split.shards, split.starts), NumbaGather)

    def poisoned(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, float("nan") if dtype.is_floating_point else -(2**30), dtype=dtype)

    generator = np.random.default_rng(0)
    for size in (0, 1, 15, 16, 17, 400):
        rows = generator.integers(0, 1000, size)
        fast = NumbaGather(split.shards, split.starts, threads=threads)(rows, poisoned)
        slow = NumpyGather(split.shards, split.starts)(rows, poisoned)
        assert fast.keys() == slow.keys()
        for name, tensor in fast.items():
            assert torch.equal(tensor, slow[name])  # NaN equals nothing: what was not written would show
            assert tensor.dtype == slow[name].dtype
            assert not (tensor == -(2**30)).any()
        assert fast["ids"].dtype == (torch.int64 if wide else torch.int32)
        assert rows_of(Batch(**fast)) == rows.tolist()


def test_without_numba(sets: dict[tuple[int, int, bool], Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    split = sets[3000, 1000, True].train
    expected = [rows_of(batch) for batch in split.batches(100, seed=4)]
    monkeypatch.setattr(reader_module, "make_gather", plain_gather)
    assert [rows_of(batch) for batch in split.batches(100, seed=4)] == expected


@pytest.mark.parametrize("form", [NumpyGather, NumbaGather])
def test_damaged_lengths_are_named_not_followed(tmp_path: Path, form: Any) -> None:
    if form is NumbaGather:
        pytest.importorskip("numba", reason="the fast gather needs numba; the plain one is tested beside it")
    split = numbered(tmp_path, 100, 60, sequence=True).train
    shards = split.shards
    for value in (4, -1, 2**30):
        damaged = shards[1].lengths.copy()
        damaged[20, 1] = value
        object.__setattr__(shards[1], "lengths", damaged)
        with pytest.raises(DataError, match=r"00001\.safetensors, row 20: lengths and row_offsets disagree"):
            form(shards, split.starts)(np.arange(100), lambda name, shape, dtype: torch.zeros(shape, dtype=dtype))


def test_addresses_beyond_two_gigabytes(tmp_path: Path) -> None:
    """A sparse shard of 3.2 GB: rows behind byte 2**31 read back right."""
    columns, rows = 400, 2_000_000
    shape = {
        "dense": (columns * 4, [rows, columns], "F32"),
        "ids": (4, [rows, 1], "I32"),
        "labels": (4, [rows], "F32"),
    }
    header, end = {}, 0
    for name, (width, sizes, kind) in shape.items():
        header[name] = {"dtype": kind, "shape": sizes, "data_offsets": [end, end + width * rows]}
        end += width * rows
    text = json.dumps(header).encode()
    file = tmp_path / "train" / "00000.safetensors"
    file.parent.mkdir()
    base = 8 + len(text)
    wanted = [0, 1_342_177, 1_342_178, 1_999_999]
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(base + end)
        for row in wanted:
            out.seek(base + row * columns * 4)
            out.write(np.full(columns, row, np.float32).tobytes())
            out.seek(base + columns * 4 * rows + row * 4)
            out.write(np.int32(row).tobytes())
    spec = FeatureSpec(
        dense=tuple(f"d{i}" for i in range(columns)),
        features=(Feature(name="f", table="f"),),
        num_embeddings={"f": rows},
    )
    shard = {"file": "train/00000.safetensors", "rows": rows, "bytes": file.stat().st_size, "sha256": ""}
    splits = {"train": {"rows": rows, "positives": 0, "shards": [shard]}}
    write_manifest(tmp_path, {"features": spec.to_dict(), "schema_hash": "", "splits": splits})
    split = Dataset(tmp_path).train
    for form in (NumpyGather, NumbaGather):
        found = form(split.shards, split.starts)(
            np.array(wanted), lambda name, shape, dtype: torch.full(shape, -1, dtype=dtype)
        )
        assert found["ids"][:, 0].tolist() == wanted
        assert found["dense"][:, 0].tolist() == found["dense"][:, -1].tolist() == wanted


def test_batches_are_the_consumers_to_keep(sets: dict[tuple[int, int, bool], Dataset]) -> None:
    kept = list((split := sets[500, 77, True].train).batches(50, seed=1, prefetch=2))
    assert [rows_of(batch) for batch in kept] == [rows_of(b) for b in split.batches(50, seed=1, reuse=True)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_reused_batches_last_until_the_next(sets: dict[tuple[int, int, bool], Dataset], prefetch: int) -> None:
    split = sets[3000, 1000, True].train
    stream = split.batches(64, seed=1, reuse=True, prefetch=prefetch)
    expected, memory = [rows_of(batch) for batch in split.batches(64, seed=1)], set()
    for batch, rows in zip(stream, expected, strict=True):
        time.sleep(0.001)  # gives a thread that would overwrite it the time to do so
        assert rows_of(batch) == rows
        memory.add(batch.dense.data_ptr())
    assert len(memory) <= prefetch + 2


def test_state_of_something_else_is_refused(sets: dict[tuple[int, int, bool], Dataset], tmp_path: Path) -> None:
    split = sets[500, 70, False].train
    state = split.batches(50, seed=1).state_dict()
    other = sets[500, 77, True].train
    for stream, message in [
        (sets[64, 64, False].train.batches(50, seed=1), "another dataset"),
        (other.batches(50, seed=1), "with other rows"),
        (split.batches(50, seed=2), "Pass the same seed"),
        (split.batches(40, seed=1), "Keep batch_size times ranks at 50"),
        (split.batches(50, seed=1, limit=400), "Pass the same limit"),
        (split.batches(50, seed=1, shuffle_memory=4000), "Pass the same shuffle_memory"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            stream.load_state_dict(state)
        assert stream.step == 0
    with pytest.raises(CheckpointError, match="not the state of a batch stream"):
        split.batches(50).load_state_dict({})
    with pytest.raises(CheckpointError, match="drop_last"):
        split.batches(70, drop_last=True).load_state_dict(split.batches(70).state_dict())


def test_another_number_of_ranks_continues(sets: dict[tuple[int, int, bool], Dataset]) -> None:
    split = sets[500, 70, False].train
    one = split.batches(40, seed=1)
    taken = [row for batch, _ in zip(one, range(6), strict=False) for row in rows_of(batch)]
    ranks = [split.batches(20, seed=1, rank=rank, world_size=2) for rank in (0, 1)]
    for stream in ranks:
        stream.load_state_dict(one.state_dict() | {"position": 6})
        taken += [row for batch in stream for row in rows_of(batch)]
    assert sorted(taken[: 6 * 40] + taken[-260:]) == list(range(500))
    late = split.batches(124, seed=1, limit=499)  # 3 rows behind the last full round: 4 ranks deal both anew
    with pytest.raises(CheckpointError, match="Finish the epoch on 1 ranks"):
        split.batches(31, seed=1, limit=499, world_size=4).load_state_dict(late.state_dict() | {"position": 4})


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 10, "rank": 2, "world_size": 2}, "rank 2 is outside"),
        ({"batch_size": 10, "limit": 0}, "limit is 0"),
        ({"batch_size": 10, "prefetch": -1}, "prefetch is -1"),
        ({"batch_size": 10, "shuffle_memory": 5}, "not even one row"),
        ({"batch_size": 65, "drop_last": True}, "fewer than one batch of 65"),
        ({"batch_size": 64, "reuse": True, "pin_memory": True}, "overwrite a batch"),
        ({"batch_size": 1, "world_size": 65}, "cannot be divided among 65 ranks"),
    ],
)
def test_settings_that_cannot_work(
    sets: dict[tuple[int, int, bool], Dataset], settings_: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sets[64, 64, False].train.batches(**settings_)


def test_an_empty_split(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, rows=4)  # 3 train, 0 valid, 1 test
    assert len(dataset.valid) == 0
    assert list(dataset.valid.batches(10)) == []
    assert len(dataset.valid.batches(10, seed=1)) == 0


def test_columns_may_be_missing(tmp_path: Path) -> None:
    for place, sizes in enumerate([{"num_dense": 0}, {"num_embeddings": ()}]):
        split = make_dataset(tmp_path / str(place), rows=50, **sizes).train
        batches = list(split.batches(16, seed=1))
        assert sum(len(batch) for batch in batches) == 40
        assert batches[0].dense.shape == (16, len(split.schema.dense))
        assert batches[0].ids.shape == (16, len(split.schema.features))


def test_an_error_in_the_thread_reaches_the_consumer() -> None:
    def broken() -> Any:
        yield 1
        raise DataError("shard 7 is gone") from OSError("unplugged")

    items = prefetched(broken(), 2)
    assert next(items) == 1
    with pytest.raises(DataError, match="shard 7 is gone") as caught:
        next(items)
    assert isinstance(caught.value.__cause__, OSError)


def test_leaving_early_ends_the_thread(sets: dict[tuple[int, int, bool], Dataset]) -> None:
    stream = sets[20_000, 3001, False].train.batches(10, seed=1, prefetch=2)
    for _ in range(5):
        for _ in stream:
            break
    for thread in threading.enumerate():
        if thread.name == "stoker-reader":
            thread.join()
    assert stream.position == 5  # prefetched but never handed out does not count


def run_python(code: str, path: Path, **kwargs: Any) -> subprocess.Popen[str]:
    source = Path(reader_module.__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(path)],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


@pytest.mark.slow
def test_the_interpreter_ends_with_a_stream_half_read(sets: dict[tuple[int, int, bool], Dataset]) -> None:
    code = """
        import sys
        from stoker.dataset.dataset import Dataset
        stream = iter(Dataset(sys.argv[1]).train.batches(10, seed=1, prefetch=2))
        print(next(stream).step)
    """
    out, err = (process := run_python(code, sets[20_000, 3001, False].path)).communicate(timeout=60)
    assert (process.returncode, out.strip(), err) == (0, "0", "")


@pytest.mark.slow
def test_a_stage_half_read_has_no_thread_when_the_interpreter_ends() -> None:
    """Such a thread may be inside torch, and then the process is aborted: seen in one of 15 scripts."""
    code = """
        import atexit, threading
        atexit.register(lambda: print([each.name for each in threading.enumerate() if "stage" in each.name]))
        import itertools, stoker, torch
        table = stoker.TableConfig(name="t", num_embeddings=100, embedding_dim=2)
        tables = stoker.EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1), placement=stoker.Cached(slots=20))
        batches = (stoker.Batch(dense=torch.zeros(1, 0), ids=torch.tensor([[n % 100]])) for n in itertools.count())
        feed = iter(stoker.stage(batches, tables, lookahead=4, background=True))
        print(next(feed).ids.tolist(), any("stage" in each.name for each in threading.enumerate()))
    """
    out, err = (process := run_python(code, Path())).communicate(timeout=60)
    assert (process.returncode, out.splitlines(), err) == (0, ["[[0]] True", "[]"], "")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals, which this system lacks")
def test_ctrl_c_is_heard_while_waiting_for_a_batch() -> None:
    code = """
        import time
        from stoker.base import ordered
        from stoker.dataset import split as prefetch
        ordered._PATIENCE = 0.2  # seconds for the thread at the end
        def never():
            print("waiting", flush=True)
            time.sleep(10_000)
            yield 1
        next(prefetch.prefetched(never(), 2))
    """
    process = run_python(code, Path())
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert "KeyboardInterrupt" in err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc, which this system lacks")
def test_memory_does_not_grow_with_the_split(tmp_path: Path) -> None:
    """A 128 MB split, shuffled 4 MB at a time: the stream's own memory stays under 8 MB."""
    make_dataset(tmp_path, rows=1_000_000, num_dense=13, num_embeddings=[1000] * 26, shard_rows=2**17)
    code = """
        import sys
        from stoker.dataset.dataset import Dataset
        from stoker.base.device import resident_memory
        data = Dataset(sys.argv[1])
        stream = data.train.batches(2048, seed=1, shuffle_memory="4MiB")
        for batch in stream:
            break
        before, peak = resident_memory(), 0
        for batch in stream:
            peak = max(peak, resident_memory())
        print((peak - before) // 2**20)
    """
    out, err = (process := run_python(code, tmp_path)).communicate(timeout=120)
    assert process.returncode == 0, err
    assert int(out) < 8


@pytest.mark.parametrize("sequence", [False, True])
def test_shards_of_very_unequal_sizes(sequence: bool) -> None:
    """As rows in memory come in pieces of the files that they were in."""
    pytest.importorskip("numba", reason="the fast gather needs numba; the plain one is tested beside it")

    def gathered(sizes: list[int]) -> None:
        ends = np.cumsum([0, *sizes])
        shards = []
        for begin, end in pairwise(ends.tolist()):
            values = np.arange(begin, end)
            lengths = (values % 3).astype(np.int32)[:, None] if sequence else None
            offsets = None if lengths is None else np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            ids = values[:, None] if lengths is None else np.repeat(values, lengths[:, 0])
            shards.append(
                Shard(
                    path=Path("piece"),
                    rows=end - begin,
                    dense=values.astype(np.float32)[:, None],
                    labels=np.zeros(end - begin, np.float32),
                    ids=ids,
                    lengths=lengths,
                    row_offsets=offsets,
                )
            )
        fast, slow = NumbaGather(shards, ends.tolist()), NumpyGather(shards, ends.tolist())
        every = np.arange(ends[-1])
        almost = every.copy()  # consecutive but for two rows
        almost[[3, 7]] = almost[[7, 3]]
        for rows in (every[::-7].copy(), every, every[2:-3], every[95:107], every[:1], every[:0], almost):
            ours, theirs = (each(rows, new_tensor) for each in (fast, slow))
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
            assert ours["dense"][:, 0].tolist() == rows.tolist()
            assert ours["ids"].flatten().tolist() == np.repeat(rows, rows % 3 if sequence else 1).tolist()

    gathered([100] * 20)
    gathered([0, 100, *[100] * 9, 90, 110, 0, 5])
    gathered([100, 100, 100, 300])  # only the last is larger
    for sizes in ([1] * 50 + [3000, 2000], [3000, 2000] + [1, 0] * 50, [5, 1] * 20 + [900] + [2] * 30):
        gathered(sizes)
