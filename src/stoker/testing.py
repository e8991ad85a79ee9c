"""Small valid datasets for tests and examples, and what every backing store promises, as a check of your own.

Legend: n rows, F features, L ids in all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from stoker.base.settings import with_arguments_of

if TYPE_CHECKING:
    import polars as pl

    from stoker.dataset.dataset import Dataset
    from stoker.tables.stores.home import Home

__all__ = ["check_store", "make_daily_run", "make_dataset"]

_SPLITS = {"train": 0.8, "valid": 0.1, "test": 0.1}  # shares of the rows


@dataclass(frozen=True)
class MakeDatasetArguments:
    """The arguments of :func:`make_dataset`."""

    path: str | Path
    _: KW_ONLY
    rows: int
    num_dense: int = 4
    num_embeddings: Sequence[int] = (50, 20, 10)
    sequence: Mapping[int, int] | None = None
    seed: int = 0
    shard_rows: int = 2**20
    id_type: str = "int32"
    group_rows: int | None = None


@with_arguments_of(MakeDatasetArguments)
def make_dataset(path: str | Path, **given: Any) -> Dataset:
    """Write a dataset whose labels can be learnt, and open it.

    Every row of every table and every dense column has a hidden weight. The label is drawn from the logistic function
    of their sum, so a model that learns the weights is much better than the base rate (the best possible AUC is about
    0.9). Ids are skewed: low ids are frequent, as the preparation assigns them.

    >>> from stoker.testing import make_dataset
    >>> make_dataset("data/tiny", rows=1000)
    Dataset('data/tiny': train 800, valid 100, test 100 rows)

    Args:
        path: directory to write, made if missing.
        rows: rows of all splits together: 80 % train, 10 % valid, 10 % test.
        num_dense: dense columns ``I1..``, standard normal.
        num_embeddings: rows of the tables ``C1..``, one feature each.
        sequence: feature position -> max_length, for the features that are bags of 0..max_length ids.
        seed: same seed, same bytes.
        shard_rows: rows per shard.
        id_type: ``"int32"`` or ``"int64"``.
        group_rows: mean rows of a list to rank (:attr:`Split.groups <stoker.dataset.split.Split.groups>`), scattered
            over the split; None: a dataset without groups. The rows do not depend on it.
    """
    from stoker.dataset.dataset import Dataset
    from stoker.dataset.manifest import write_counts, write_generated_manifest
    from stoker.dataset.shards import write_shard
    from stoker.dataset.spec import Feature, FeatureSpec
    from stoker.rewrite.derived import table_ids

    asked, path = MakeDatasetArguments(path, **given), Path(path)
    rows, num_dense, num_embeddings, shard_rows = asked.rows, asked.num_dense, asked.num_embeddings, asked.shard_rows
    lengths = dict(asked.sequence or {})
    generator = np.random.default_rng(asked.seed)
    names = [f"C{i + 1}" for i in range(len(num_embeddings))]
    spec = FeatureSpec(
        dense=tuple(f"I{i + 1}" for i in range(num_dense)),
        features=tuple(
            Feature(name=name, table=name, sequence=i in lengths, max_length=lengths.get(i, 1))
            for i, name in enumerate(names)
        ),
        num_embeddings=dict(zip(names, num_embeddings, strict=True)),
    )
    hidden = [generator.normal(0, 2 / np.sqrt(len(names)), size) for size in num_embeddings]
    slope = generator.normal(0, 1 / np.sqrt(max(num_dense, 1)), num_dense)
    counts = {name: torch.zeros(size, dtype=torch.int64) for name, size in spec.num_embeddings.items()}
    splits: dict[str, Any] = {}
    taken = 0
    for name, share in _SPLITS.items():
        size = rows - taken if name == "test" else round(rows * share)
        size, taken = min(size, rows - taken), taken + min(size, rows - taken)
        splits[name] = {"rows": size, "positives": 0, "shards": []}
        for number, start in enumerate(range(0, size, shard_rows)):
            shard = _shard(generator, min(shard_rows, size - start), spec, hidden, slope, asked.id_type)
            info = write_shard(path / name / f"{number:05d}.safetensors", **shard)
            splits[name]["shards"].append(info.to_dict())
            splits[name]["positives"] += int(shard["labels"].sum())
            for table in counts if name == "train" else ():
                ids, _ = table_ids(shard["ids"], shard.get("lengths"), spec, table)
                counts[table] += torch.from_numpy(np.bincount(ids, minlength=len(counts[table])))
    grouped: dict[str, Any] = {}
    files: dict[str, Any] = {}
    if asked.group_rows is not None:
        grouped["groups"] = {"column": "group", "count": 0, "cut": 0}
        for name, split in splits.items():
            if split["rows"]:
                files |= _group(path, name, split, asked.group_rows, asked.seed)
                grouped["groups"]["count"] += split["groups"]["count"]
    schema = {"made_by": "stoker.testing", **spec.to_dict()}
    write_generated_manifest(
        path, by="stoker.testing.make_dataset", recipe="testing", schema=schema, features=spec.to_dict(), splits=splits,
        files={"counts.safetensors": write_counts(path, counts), **files}, stoker_version="test", **grouped,
    )  # fmt: skip
    return Dataset(path)


def make_daily_run(path: str | Path, days: int = 2, rows: int = 300, **settings: Any) -> list[pl.DataFrame]:
    """Train a run on the log of a day, and return the logs of the days after it.

    Args:
        path: of the run; its dataset is next to it.
        days: logs to return.
        rows: of each log.
        settings: of :class:`stoker.TrainConfig`, such as another model.

    >>> from stoker.testing import make_daily_run
    >>> [tuesday] = make_daily_run("run", days=1)
    >>> tuesday.columns
    ['click', 'item', 'user']
    """
    import polars as pl

    from stoker.prep.prepare import prepare
    from stoker.prep.schema import Schema
    from stoker.training import train

    random = np.random.default_rng(0)
    item, user = random.integers(0, 20, (days + 1, rows)), random.integers(0, 9, (days + 1, rows))
    logs = [pl.DataFrame({"click": (i + u) % 3 // 2, "item": i, "user": u}) for i, u in zip(item, user, strict=True)]
    columns = [{"name": name, "type": "int"} for name in ("item", "user")]
    schema = Schema.from_dict({"name": "days", "label": "click", "categorical": columns})
    data = prepare(schema, logs[0], out=Path(path).with_name(f"{Path(path).name}-data"), split="random:0.8,0.1")
    small = {"embedding_dim": 4, "batch_size": 64, "epochs": 1, "tensorboard": False}
    own = {} if "model" in settings else {"model_options": {"bottom": (8,), "top": (8,)}}
    train(data, out=path, display="quiet", **{**small, **own, **settings}).model.embeddings.close()
    return logs[1:]


def check_store(make: Callable[..., Home], *, rounds: int = 60, seed: int = 0) -> None:
    """Check that a backing store of your own gives rows back as they were stored, to the bit.

    Random fetches, stores, reads and writes go to the store and to a plain table; then to the store behind a RAM tier
    of three blocks.

    Args:
        make: called with the initial rows and the state tensors, as the class of a store is; returns a new store.
        rounds: calls of each store.
        seed: of the random calls.

    Raises:
        AssertionError: rows differ.

    >>> from stoker.tables.stores.home import MemoryHome
    >>> check_store(MemoryHome)
    """
    from stoker.tables.config import TableConfig
    from stoker.tables.stores.home import Initial, tier_bytes
    from stoker.tables.stores.ram_tier import RamTier

    wide = 5  # columns
    cases: Any = ((3, "float32", {}), (16, "bfloat16", {"a": "row", "b": "scalar"}), (0, "float32", {}))
    for dim, dtype, state in cases:
        dim = dim or wide
        tables = [TableConfig(name=str(rows), num_embeddings=rows, embedding_dim=dim, dtype=dtype) for rows in (1, 99)]
        initial, random = Initial.of(tables, seed), np.random.default_rng(seed)
        for tier in (False, True):
            home = make(initial, state)
            wide = max(wide, getattr(home, "block_bytes", 0) // 20)  # in the last round a block has five rows
            if tier:
                home = RamTier(home, memory=tier_bytes(home.num_rows, home.row_bytes, home.block_rows, frames=3))
            plain = home.empty(home.num_rows).map(torch.Tensor.zero_)
            plain.weight[:] = initial.rows(np.arange(home.num_rows))
            for number in range(rounds if dim < 20 else rounds // 3):
                rows = random.permutation(home.num_rows)[: random.integers(0, 30)]
                begin, end = np.sort(random.integers(0, home.num_rows + 1, 2)).tolist()
                places, side = random.permutation(40)[: len(rows)], home.empty(40)
                for tensor in side.tensors:
                    tensor.copy_(torch.from_numpy(random.standard_normal(tuple(tensor.shape))))
                if number % 4 == 0:
                    home.store(rows, side, places)
                    plain[torch.from_numpy(rows)] = side[torch.from_numpy(places)]
                elif number % 4 == 1:
                    home.write(begin, side[: min(40, end - begin)])
                    plain[begin : min(begin + 40, end)] = side[: min(40, end - begin)]
                else:
                    home.fetch(rows, side, places)
                    pairs = [(side[torch.from_numpy(places)], plain[torch.from_numpy(rows)])]
                    pairs.append((home.read(begin, end), plain[begin:end]))
                    for got, wanted in pairs:
                        same = all(map(torch.equal, got.tensors, wanted.tensors))
                        assert same, f"rows of {home!r} differ from those stored, in call {number} of seed {seed}"
            home.flush()
            home.close()


def _group(path: Path, name: str, split: dict[str, Any], mean: int, seed: int) -> dict[str, Any]:
    """Write the groups of a split, record them in its entry, and return the entry of the file."""
    from safetensors.numpy import load_file

    from stoker.dataset.row_files import GroupWriter, group_file, write_group_file

    rows, groups = split["rows"], max(1, split["rows"] // mean)
    names = np.random.default_rng([seed, *name.encode()]).integers(0, groups, rows)
    labels = np.concatenate([load_file(path / shard["file"])["labels"] for shard in split["shards"]])
    writer = GroupWriter(groups)
    written = write_group_file(path / group_file(name), rows, [writer.add(names, labels)])
    split["groups"] = {**writer.summary(), "file": group_file(name)}
    return {group_file(name): written}


def _shard(
    generator: np.random.Generator, rows: int, spec: Any, hidden: list[npt.NDArray[np.float64]],
    slope: npt.NDArray[np.float64], id_type: str,
) -> dict[str, npt.NDArray[Any]]:  # fmt: skip
    dense = generator.normal(size=(rows, len(slope))).astype(np.float32)
    score = dense @ slope
    lengths = np.ones((rows, len(hidden)), np.int32)
    columns = []
    for place, (feature, weights) in enumerate(zip(spec.features, hidden, strict=True)):
        if feature.sequence:
            lengths[:, place] = generator.integers(0, feature.max_length + 1, rows)
        total = int(lengths[:, place].sum())
        ids = (len(weights) * generator.random(total) ** 2).astype(id_type)  # density falls as 1 / sqrt(id)
        owner = np.repeat(np.arange(rows), lengths[:, place])
        score += np.bincount(owner, weights=weights[ids], minlength=rows) / np.maximum(lengths[:, place], 1)
        columns.append(ids)
    labels = (generator.random(rows) < 1 / (1 + np.exp(-2 * score))).astype(np.float32)
    shard = {"dense": dense, "labels": labels}
    if spec.one_hot:
        return shard | {"ids": np.stack(columns, axis=1) if columns else np.zeros((rows, 0), id_type)}
    starts = np.cumsum(lengths.reshape(-1), dtype=np.int64).reshape(lengths.shape) - lengths
    flat = np.empty(int(lengths.sum()), id_type)
    for place, ids in enumerate(columns):
        run = np.cumsum(lengths[:, place]) - lengths[:, place]  # where the bag of each row starts in its column
        shift = np.repeat(starts[:, place] - run, lengths[:, place])
        flat[np.arange(len(ids)) + shift] = ids
    row_offsets = np.concatenate(([0], np.cumsum(lengths.sum(axis=1), dtype=np.int64)))
    return shard | {"ids": flat, "lengths": lengths, "row_offsets": row_offsets}
