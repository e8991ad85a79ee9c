"""Rows, ids and weights to and from other libraries: Arrow streams, Hugging Face datasets, DLPack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from processes import run_python

import stoker
from stoker.base.errors import ConfigError, DataError
from stoker.dataset.batch import as_tensor
from stoker.tables.storage import Rows

SCHEMA = stoker.Schema.from_dict({
    "label": {"column": "clicked"}, "dense": [{"name": "price"}], "categorical": [{"name": "item"}],
    "sequence": [{"name": "seen", "type": "int"}], "keep": ["item"],
    "split": {"train": 1.0, "valid": 0.0, "test": 0.0},
})  # fmt: skip


def log(rows: int = 300) -> pa.Table:
    return pa.table({
        "clicked": [n % 2 for n in range(rows)], "price": [float(n) for n in range(rows)],
        "item": [f"i{n % 7}" for n in range(rows)], "seen": [list(range(n % 4)) for n in range(rows)],
    })  # fmt: skip


class FakeDataset:
    """As datasets.Dataset behaves: ``data`` is the whole table, ``indices`` say which rows are shown."""

    def __init__(self, data: pa.Table, indices: list[int], format: str | None = None) -> None:
        self.data, self.indices, self.format = data, indices, format
        self.features = SimpleNamespace(arrow_schema=data.schema)

    def with_format(self, format: str) -> FakeDataset:
        return FakeDataset(self.data, self.indices, format)

    def iter(self, batch_size: int) -> Iterator[Any]:
        assert self.format == "arrow"
        for start in range(0, len(self.indices), batch_size):
            yield self.data.take(self.indices[start : start + batch_size])


def test_a_hugging_face_dataset_gives_the_rows_that_it_shows() -> None:
    shown = [250, 3, 4, 17, *range(40, 60)]
    data = stoker.prepare(SCHEMA, FakeDataset(log(), shown))
    assert data.train.batches(50).rows == len(shown)
    assert next(iter(data.train.batches(50))).dense.flatten().tolist() == [float(n) for n in shown]
    with pytest.raises(ConfigError, match="Hugging Face dataset \\(one split of it\\)"):
        stoker.prepare(SCHEMA, {"train": FakeDataset(log(), shown)})


@pytest.mark.parametrize("kind", ["whole", "shuffled", "stream", "generator", "empty"])
def test_real_hugging_face_datasets(kind: str) -> None:
    datasets = pytest.importorskip("datasets", reason="not among the pinned packages. Run: pip install datasets")
    given = datasets.Dataset(log())
    expected = [float(n) for n in range(300)]
    if kind == "shuffled":
        given = given.shuffle(seed=0).select(range(100))
        expected = given["price"][:]
    elif kind == "stream":
        given = given.to_iterable_dataset()
    elif kind == "generator":
        with pytest.raises(DataError, match=r"it has no features\. Make it with features"):
            stoker.prepare(SCHEMA, datasets.IterableDataset.from_generator(log().to_pylist))
        rows = [row | {"seen": [1]} for row in log().to_pylist()]  # datasets cannot type an empty list that comes first
        given = datasets.IterableDataset.from_generator(lambda: rows, features=given.features)
    elif kind == "empty":
        given = datasets.concatenate_datasets([given.select([]), given.select([5])])
        expected = [5.0]
    data = stoker.prepare(SCHEMA, given)
    assert next(iter(data.train.batches(400))).dense.flatten().tolist() == expected
    back = datasets.Dataset(pa.table(data.train))
    assert back["price"][:] == expected


@pytest.mark.slow
def test_a_split_is_an_arrow_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.dataset.split._ARROW_ROWS", 64)
    data = stoker.prepare(SCHEMA, log())
    table = pa.table(data.train)
    assert table.schema.names == ["label", "price", "item", "seen"]
    assert table.schema.types[:2] == [pa.float32()] * 2
    assert table.column("item").num_chunks == 5
    rows = table.to_pylist()
    for number, row in enumerate(rows):
        item = data.train[number]
        ids, lengths = item["ids"].tolist(), item["lengths"].tolist()
        assert [row["label"], row["price"]] == [item["labels"].item(), item["dense"].item()]
        assert ([row["item"]], row["seen"]) == (ids[: lengths[0]], ids[lengths[0] :])
    assert pl.DataFrame(data.train)["price"].to_list() == [row["price"] for row in rows]
    assert pa.table(data.test).num_rows == 0
    # Rows of one id each, without a sequence; labels that are not known; a column named like the label's.
    plain = stoker.Schema.from_dict({"label": {"column": "y"}, "categorical": [{"name": "label"}]})
    logged = pa.table({"y": [1, 0] * 50, "label": ["a", "b", "b", "c"] * 25})
    data = stoker.prepare(plain, logged)
    new = stoker.prepare(files=logged.set_column(0, "y", pa.nulls(100, pa.int64())), like=data.path).test
    found = pa.table(new)
    assert found.schema.names == ["label_", "label"]
    assert found.column("label_").null_count == 100
    assert found.column("label").to_pylist() == [new[n]["ids"].item() for n in range(100)]


def test_scores_are_an_arrow_stream_like_their_file(tmp_path: Path) -> None:
    data = stoker.prepare(SCHEMA, log())
    settings: dict[str, Any] = {"embedding_dim": 4, "batch_size": 64, "steps": 2, "display": "quiet"}
    model = stoker.train(data, out=tmp_path / "run", tensorboard=False, **settings).model
    scores = stoker.predict(model, data.train, tmp_path / "scores.parquet")
    assert pl.DataFrame(scores).equals(pl.read_parquet(tmp_path / "scores.parquet"))
    assert pa.table(scores).schema.names == ["row", "label", "item", "score"]


def tables(**settings: Any) -> stoker.EmbeddingTables:
    configs = [stoker.TableConfig(name=name, num_embeddings=50, embedding_dim=4) for name in ("user", "item")]
    return stoker.EmbeddingTables(configs, **{"optimizer": stoker.Adagrad(lr=0.1), **settings})


class Foreign:
    """An array of a library that speaks DLPack and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **settings: Any) -> Any:
        return self._tensor.__dlpack__(**settings)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


@pytest.mark.slow
@pytest.mark.parametrize("placement", [stoker.Device(), stoker.Cached(fraction=0.9)], ids=["device", "cached"])
@pytest.mark.parametrize("wrap", [np.asarray, Foreign], ids=["numpy", "foreign"])
def test_lookups_of_other_libraries_train_the_same_bits(wrap: Any, placement: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    ours, theirs = tables(placement=placement), tables(placement=placement)
    for _ in range(5):
        lengths = torch.randint(3, (16,), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = torch.randint(50, (int(offsets[-1]),), generator=draw)
        weights = torch.rand(len(ids), generator=draw)
        one, other = ours(ids, offsets, weights), theirs(wrap(ids), wrap(offsets), wrap(weights))
        assert torch.equal(one, other)
        one.square().sum().backward()
        other.square().sum().backward()
    for name in ("user", "item"):
        assert torch.equal(ours.rows(name), theirs.rows(name))
        assert np.array_equal(np.from_dlpack(theirs.rows(name)), ours.rows(name).numpy())
    bag = stoker.TTEmbeddingBag(1000, 16, rank=4, seed=0)
    ids, offsets = torch.arange(10), torch.tensor([0, 4])
    assert torch.equal(bag(ids, offsets), bag(wrap(ids), wrap(offsets)))


def test_ids_of_numpy_may_change_between_forward_and_backward() -> None:
    ours, theirs = tables(), tables()
    ids = np.array([[1, 2], [3, 4]])
    one, other = ours(torch.from_numpy(ids.copy())), theirs(ids)
    ids[:] = 7
    one.sum().backward()
    other.sum().backward()
    assert torch.equal(ours.rows("user"), theirs.rows("user"))


def test_arrays_become_tensors_of_the_same_memory_where_they_can() -> None:
    ids = np.arange(12).reshape(6, 2)
    assert as_tensor(ids).data_ptr() == ids.ctypes.data
    read_only = ids.copy()
    read_only.flags.writeable = False
    for array in (ids[::2], ids[:, 1], ids[::-1], ids[:, ::-1], read_only, ids.astype(np.int32), np.float32(ids)):
        assert np.array_equal(as_tensor(array).numpy(), array)
    with pytest.raises(TypeError, match="list is neither a tensor nor an array"):
        tables()([[1, 2]])
    with pytest.raises(BufferError):
        as_tensor(ids.astype(">i8"))
    with pytest.raises(ValueError, match="must be int32 or int64"):
        tables()(ids.astype(np.int16))


def test_a_batch_takes_arrays() -> None:
    given = {"dense": np.ones((2, 1), np.float32), "ids": np.array([[1], [2]]), "labels": np.zeros(2, np.float32)}
    batch = stoker.Batch(**given)
    assert all(isinstance(each, torch.Tensor) for each in batch.tensors().values())
    assert batch.ids.data_ptr() == given["ids"].ctypes.data
    spec = stoker.FeatureSpec.from_sizes(1, [10])
    model = stoker.DLRM(spec, embedding_dim=4, bottom=(4,), top=(4,), backend="reference")
    same = stoker.Batch(**{name: torch.from_numpy(each) for name, each in given.items()})
    assert torch.equal(model(batch), model(same))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("placement", [stoker.Device(), stoker.Cached(fraction=0.5)], ids=["device", "cached"])
def test_weights_alone_are_written_and_keep_the_state(placement: Any, dtype: Any) -> None:
    config = stoker.TableConfig(name="t", num_embeddings=20, embedding_dim=4, dtype=dtype)
    made = stoker.EmbeddingTables([config], optimizer=stoker.Adagrad(lr=0.1), placement=placement)
    made(torch.arange(8).unsqueeze(1)).square().sum().backward()
    [(_, before)] = made.read("t", 20)
    before = before.map(torch.clone)
    vectors = np.random.default_rng(0).standard_normal((5, 4))
    made.write("t", 3, vectors)
    [(_, after)] = made.read("t", 20)
    assert torch.equal(after.weight[3:8], torch.from_numpy(vectors).to(after.weight.dtype))
    assert torch.equal(after.weight[8:], before.weight[8:])
    assert torch.equal(after.state["sum"], before.state["sum"])
    assert bool(after.state["sum"].any())
    pooled = made(np.array([[3]]))
    assert torch.equal(pooled[0, 0], after.weight[3].float())
    for start in (16, -1):
        with pytest.raises(IndexError, match="do not fit table 't' of 20 rows"):
            made.write("t", start, vectors)
    with pytest.raises(ValueError, match=r"weights \[n, 4\] are expected, not \[2, 1\]"):
        made.write("t", 0, np.ones((2, 1), np.float32))
    made.write("t", 0, Rows(after.weight[:2].float(), {name: each[:2] for name, each in after.state.items()}))


def test_rows_on_the_device_leave_without_a_copy() -> None:
    made = tables()
    [(_, rows)] = made.read("user")
    view = np.from_dlpack(rows.weight)
    before = view.copy()
    made(np.array([[1, 2]])).sum().backward()
    assert not np.array_equal(view[1], before[1])  # a step is seen: no copy was made
    assert np.array_equal(view[2:], before[2:])
    cached = tables(placement=stoker.Cached(fraction=0.9))
    [(_, rows)] = cached.read("user")
    copied = rows.weight.clone()
    cached(np.array([[1, 2]])).sum().backward()
    assert torch.equal(rows.weight, copied)


def test_an_array_with_steps_backwards_does_not_end_the_process() -> None:
    code = (
        "import numpy as np; from stoker.dataset.batch import as_tensor; print(as_tensor(np.arange(4)[::-1]).tolist())"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "[3, 2, 1, 0]", done.stderr
