"""Write a prepared dataset of generated rows directly, without a raw log, for benchmarks at full scale.

Rows are generated twice. The first pass counts ids, to number them by falling frequency as ``prepare`` does; the second
writes shards. Memory: 12 bytes per table row, and one shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.base.errors import ConfigError, DataError
from stoker.base.settings import with_arguments_of
from stoker.base.units import parse_count
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import describe_file, write_counts, write_generated_manifest
from stoker.dataset.shards import SHARD_ROWS, write_shard
from stoker.dataset.spec import FeatureSpec
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn
from stoker.synthetic.clicks import ClickLog, Curve, IdColumn, NumberColumn, Options
from stoker.synthetic.logs import KAGGLE_SIZES
from stoker.synthetic.settings import LogSettings
from stoker.synthetic.writer import BLOCK, SyntheticTruth, TruthMeter, ordered_blocks


@dataclass(frozen=True)
class SyntheticDatasetArguments(LogSettings):
    """The arguments of :func:`dataset`."""

    out: str | Path
    _: KW_ONLY
    rows: int | str
    valid_rows: int | str = 0
    test_rows: int | str = 0
    sizes: Sequence[int] = KAGGLE_SIZES
    num_dense: int = 13
    sequences: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    missing: float = 0.0
    base_rate: float | None = 0.25
    workers: int | None = None
    if TYPE_CHECKING:
        curve: Curve | str | Path | None = None  # type: ignore[assignment]


@with_arguments_of(SyntheticDatasetArguments)
def dataset(out: str | Path, **given: Any) -> tuple[Dataset, SyntheticTruth]:
    """Write a dataset of generated rows, in order of time: training, then validation, then test rows.

    Its columns are ``I1..`` and ``C1..``. Every table has its full size, even where ids never occur, so that benchmarks
    get the requested number of rows. There are no vocabulary files: the columns count as hash buckets.

    Args:
        out: a directory without a dataset in it.
        rows: training rows, a number or ``"40M"``; ``valid_rows`` and ``test_rows`` are added to them.
        sizes: distinct ids per table; ``num_embeddings`` is one more. Default: Criteo Kaggle's 26 tables.
        num_dense: numeric columns.
        scale: factor on ``sizes``.
        sequences: name -> (table such as ``"C3"``, longest length): a bag of 0 to that many ids of the table. Labels do
            not depend on it.
        alpha, curve, drift, base_rate, signal, seed, universe, workers: as in :func:`stoker.synthetic.write`.
        missing: share of ids that are out of vocabulary (0).

    Returns:
        The opened dataset, and the truth of its last split (saved as ``truth.json``).

    Raises:
        ConfigError: a size is below 1, or a sequence names an unknown table.
        DataError: ``out`` already holds a dataset, or the disk is full.

    >>> data, truth = stoker.synthetic.dataset("generated", rows=2000, valid_rows=1000, sizes=[50, 1000], seed=1)
    >>> len(data.train), len(data.valid), round(truth.best_auc, 2)
    (2000, 1000, 0.8)
    """
    asked, out = SyntheticDatasetArguments(out, **given), Path(out)
    sizes, scale, workers = asked.sizes, asked.scale, asked.workers
    if (out / "manifest.json").exists():
        raise DataError(f"{out} already holds a dataset. Choose another directory, or delete the dataset.")
    splits = {
        "train": parse_count(asked.rows),
        "valid": parse_count(asked.valid_rows),
        "test": parse_count(asked.test_rows),
    }
    splits = {name: count for name, count in splits.items() if count or name == "train"}
    if splits["train"] < 1 or min(sizes) < 1:
        raise ConfigError(f"rows is {asked.rows} and sizes are {tuple(sizes)}. Give numbers above 0.")
    settings = {item.name: getattr(asked, item.name) for item in fields(LogSettings)}
    options = Options(rows=sum(splits.values()), **settings)
    tables = {f"C{i}": max(1, round(size * scale)) for i, size in enumerate(sizes, 1)}
    generator = _Generator(tables, asked.num_dense, asked.missing, dict(asked.sequences or {}), options)
    counts = generator.number_ids(splits["train"], workers)
    entries, meter, start = {}, TruthMeter(), 0
    for name, count in splits.items():
        meter = TruthMeter()
        entries[name] = generator.write_split(out / name, start, start + count, meter, workers)
        start += count
    truth = meter.truth(recipe="synthetic", rows=start, bad=0, seed=asked.seed, task=f"one row of the {name} split")
    truth.save(out / "truth.json")
    schema = generator.schema()
    spec = FeatureSpec(
        dense=schema.dense_names,
        features=tuple(column.feature() for column in schema.features),
        num_embeddings={name: size + 1 for name, size in tables.items()},
    )
    files = {"counts.safetensors": write_counts(out, counts), "truth.json": describe_file(out / "truth.json")}
    write_generated_manifest(
        out, by="stoker.synthetic.dataset", recipe="synthetic", schema=schema.to_dict(), features=spec.to_dict(),
        splits=entries, files=files,
    )  # fmt: skip
    return Dataset(out), truth


class _Generator:
    """Generate rows of a click log with ids numbered by falling frequency, and bags of further ids of its tables."""

    def __init__(
        self, tables: dict[str, int], num_dense: int, missing: float, sequences: dict[str, tuple[str, int]],
        options: Options,
    ) -> None:  # fmt: skip
        for name, (table, longest) in sequences.items():
            if table not in tables or longest < 1:
                raise ConfigError(
                    f"sequence {name!r} has up to {longest} ids of table {table!r}. Give at least 1 id, of a table "
                    f"from C1 to C{len(tables)}."
                )
        ids = [IdColumn(name=name, num_ids=size, missing=missing) for name, size in tables.items()]
        numbers = [NumberColumn(name=f"I{i + 1}") for i in range(num_dense)]
        self.log = ClickLog(ids, numbers, **vars(options))
        self.tables, self.sequences = tables, sequences
        self._samplers = {table: options.sampler(tables[table]) for table, _ in sequences.values()}
        self._id_of: dict[str, NDArray[np.int32]] = {}  # generated id -> row of the table; the last entry is 0

    def number_ids(self, rows: int, workers: int | None) -> dict[str, torch.Tensor]:
        """Set the table row of each generated id: by falling count in the training rows, ties by generated id.

        Return training occurrences by table row; row 0 counts missing ids.
        """
        counted = {name: np.zeros(size + 1, dtype=np.int64) for name, size in self.tables.items()}

        def make(start: int, stop: int) -> list[tuple[str, NDArray]]:
            at = np.arange(start, stop, dtype=np.uint64)
            bags = [(table, values[kept]) for table, values, kept in self._bags(at)]
            return [*zip(self.tables, self.log.draw_ids(at), strict=True), *bags]

        for drawn in ordered_blocks(rows, make, workers):
            for table, values in drawn:
                np.add.at(counted[table], values, 1)  # -1, missing, counts in the last entry
        occurrences = {}
        for table, counts in counted.items():
            order = np.argsort(-counts[:-1], kind="stable")
            self._id_of[table] = np.zeros(len(counts), dtype=np.int32)
            self._id_of[table][order] = np.arange(1, len(counts), dtype=np.int32)
            occurrences[table] = torch.from_numpy(np.append(counts[-1:], counts[order]))
        return occurrences

    def write_split(
        self, folder: Path, start: int, stop: int, meter: TruthMeter, workers: int | None
    ) -> dict[str, object]:
        """Write rows [start, stop) as shards; return the split's entry in the manifest."""

        def make(first: int, last: int) -> tuple[NDArray, dict[str, NDArray]]:
            block = self.log.block(start + first, start + last)
            dense = [np.log1p(np.maximum(values, 0)).astype(np.float32) for values in block.numbers]
            ids = [self._id_of[name][values] for name, values in zip(self.tables, block.ids, strict=True)]
            tensors = {
                "dense": np.stack(dense, axis=1) if dense else np.zeros((last - first, 0), dtype=np.float32),
                "labels": block.labels.astype(np.float32),
                "ids": np.stack(ids, axis=1),
            }
            if self.sequences:
                tensors |= self._jagged(tensors["ids"], np.arange(start + first, start + last, dtype=np.uint64))
            return block.logits, tensors

        shards: list[dict[str, object]] = []
        positives, rows = 0, 0
        pending: list[dict[str, NDArray]] = []
        for logits, tensors in ordered_blocks(stop - start, make, workers):
            meter.add(logits)
            positives, rows = positives + int(tensors["labels"].sum()), rows + len(logits)
            pending.append(tensors)
            if len(pending) == SHARD_ROWS // BLOCK or rows == stop - start:
                whole = {name: np.concatenate([one[name] for one in pending]) for name in tensors}
                if "lengths" in whole:
                    whole["row_offsets"] = np.append(0, np.cumsum(whole["lengths"].sum(axis=1, dtype=np.int64)))
                shards.append(write_shard(folder / f"{len(shards):05d}.safetensors", **whole).to_dict())
                pending = []
        return {"rows": stop - start, "positives": positives, "shards": shards}

    def _bags(self, rows: NDArray[np.uint64]) -> Iterator[tuple[str, NDArray, NDArray[np.bool_]]]:
        """Yield for each sequence its table, generated ids of these rows, and which of them are used, [n, longest]."""
        options = self.log.options
        for name, (table, longest) in self.sequences.items():
            lengths = options.integers(rows, longest + 1, name, "length")
            cells = (rows[:, None] * np.uint64(longest) + np.arange(longest, dtype=np.uint64)).ravel()
            values = self._samplers[table](options.uniform(cells, name)).reshape(-1, longest)
            yield table, values, np.arange(longest) < lengths[:, None]

    def _jagged(self, columns: NDArray, rows: NDArray[np.uint64]) -> dict[str, NDArray]:
        """Return single ids and bags together: flat ids [L], example by example, and lengths [n, F]."""
        ids, kept = [columns], [np.ones(columns.shape, dtype=bool)]
        lengths = [np.ones(columns.shape, dtype=np.int32)]
        for table, values, in_bag in self._bags(rows):
            ids.append(self._id_of[table][values])
            kept.append(in_bag)
            lengths.append(in_bag.sum(axis=1, dtype=np.int32, keepdims=True))
        return {"ids": np.hstack(ids)[np.hstack(kept)], "lengths": np.hstack(lengths)}

    def schema(self) -> Schema:
        """Return the schema with which ``prepare`` would make such a dataset."""
        dense = [DenseColumn(name=column.name, transforms=("log1p",)) for column in self.log.numbers]
        tables = [CategoricalColumn(name=n, type="int", hash_buckets=size) for n, size in self.tables.items()]
        bags = [
            SequenceColumn(name=n, type="int", table=t, hash_buckets=self.tables[t], max_length=longest)
            for n, (t, longest) in self.sequences.items()
        ]
        return Schema(
            name="synthetic", label=Label(column="label"), dense=(*dense,), categorical=(*tables,), sequence=(*bags,)
        )
