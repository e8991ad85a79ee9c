"""Prepared datasets without text in between, for benchmarks at full scale.

Two passes over the same generated rows: the first counts ids, so that they can be numbered by falling
frequency as the preparer does; the second writes shards. Memory: 12 bytes per table row, and one shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.base import draw
from stoker.base.errors import ConfigError, DataError
from stoker.base.units import parse_count
from stoker.base.version import __version__
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import describe_file, hash_schema, write_counts, write_manifest
from stoker.dataset.shards import SHARD_ROWS, write_shard
from stoker.dataset.spec import FeatureSpec
from stoker.prep.schema import CategoricalColumn, DenseColumn, Label, Schema, SequenceColumn
from stoker.synthetic.clicks import ClickBlock, ClickLog, IdColumn, NumberColumn, Options
from stoker.synthetic.curve import Curve
from stoker.synthetic.formats import KAGGLE_SIZES
from stoker.synthetic.truth import SyntheticTruth, TruthMeter
from stoker.synthetic.writer import BLOCK, ordered_blocks

__all__ = ["dataset"]


def dataset(
    out: str | Path,
    *,
    rows: int | str,
    valid_rows: int | str = 0,
    test_rows: int | str = 0,
    sizes: Sequence[int] = KAGGLE_SIZES,
    scale: float = 1.0,
    num_dense: int = 13,
    sequences: Mapping[str, tuple[str, int]] | None = None,
    alpha: float = 1.05,
    curve: Curve | str | Path | None = None,
    drift: float = 0.0,
    missing: float = 0.0,
    base_rate: float = 0.25,
    signal: float = 1.3,
    seed: int = 0,
    workers: int | None = None,
) -> tuple[Dataset, SyntheticTruth]:
    """Write a dataset directory of generated rows: training, then validation, then test, as time goes.

    Columns are ``I1..`` and ``C1..``. Every table keeps its full size, ids that never occur included, so that
    benchmarks see the asked number of rows. There are no vocabulary files: the columns count as hash buckets.

    Args:
        out: a directory without a dataset in it.
        rows: training rows, a number or ``"40M"``; ``valid_rows`` and ``test_rows`` come on top.
        sizes: distinct ids per table; ``num_embeddings`` is one more. Default: Criteo Kaggle's 26 tables.
        scale: factor on ``sizes``.
        sequences: name -> (table such as ``"C3"``, longest length): bags of 0 to that many ids in the
            table's rows. They do not bear on the label.
        alpha, curve, drift, base_rate, signal, seed, workers: as in :func:`stoker.synthetic.write`.
        missing: share of ids that are out of vocabulary (0).

    Returns:
        The opened dataset, and the truth of its last split (saved as ``truth.json``).

    Raises:
        ConfigError: sizes that cannot work, or a sequence on an unknown table.
        DataError: ``out`` holds a dataset already, or the disk is full.
    """
    out = Path(out)
    if (out / "manifest.json").exists():
        raise DataError(f"{out} holds a dataset already. Choose another directory or delete it.")
    splits = {"train": parse_count(rows), "valid": parse_count(valid_rows), "test": parse_count(test_rows)}
    splits = {name: count for name, count in splits.items() if count or name == "train"}
    if splits["train"] < 1 or min(sizes) < 1:
        raise ConfigError(f"a dataset needs training rows and tables, not rows={rows} and sizes {tuple(sizes)}.")
    options = Options(
        rows=sum(splits.values()), seed=seed, alpha=alpha, drift=drift, scale=scale, base_rate=base_rate, signal=signal,
        curve=curve if curve is None or isinstance(curve, Curve) else Curve.load(curve),
    )  # fmt: skip
    names = {f"C{i + 1}": max(1, round(size * scale)) for i, size in enumerate(sizes)}
    generator = _Generator(
        [IdColumn(name=name, num_ids=size, missing=missing) for name, size in names.items()],
        [NumberColumn(name=f"I{i + 1}") for i in range(num_dense)],
        dict(sequences or {}),
        options,
    )
    generator.number_ids(splits["train"], workers)
    entries, meter, start = {}, TruthMeter(), 0
    for name, count in splits.items():
        meter = TruthMeter()
        entries[name] = generator.write_split(out, name, start, start + count, meter, workers)
        start += count
    truth = meter.truth(recipe="synthetic", rows=start, bad=0, seed=seed, task=f"one row of the {name} split")
    truth.save(out / "truth.json")
    schema = generator.schema().to_dict()
    write_manifest(
        out,
        {
            "created_by": "stoker.synthetic.dataset",
            "stoker_version": __version__,
            "recipe": "synthetic",
            "schema": schema,
            "schema_hash": hash_schema(schema),
            "features": generator.spec().to_dict(),
            "dense_stats": {},
            "splits": entries,
            "files": {
                "counts.safetensors": write_counts(out, generator.counts()),
                "truth.json": describe_file(out / "truth.json"),
            },
            "sources": [],
            "quarantined": 0,
        },
    )
    return Dataset(out), truth


class _Generator:
    def __init__(
        self,
        ids: list[IdColumn],
        numbers: list[NumberColumn],
        sequences: dict[str, tuple[str, int]],
        options: Options,
    ) -> None:
        self.log = ClickLog(ids, numbers, **vars(options))
        self.sequences = sequences
        self.sizes = {column.name: column.num_ids for column in ids}
        for name, (table, longest) in sequences.items():
            if table not in self.sizes or longest < 1:
                raise ConfigError(
                    f"sequence {name!r}, up to {longest} ids of table {table!r}: tables are C1..C{len(ids)}."
                )
        self._samplers = {table: options.sampler(self.sizes[table]) for table, _ in sequences.values()}
        self._occurrences: dict[str, NDArray[np.int64]] = {}  # by generated id, the last one counts missing
        self._id_of: dict[str, NDArray[np.int32]] = {}  # generated id -> row of the table, the last one -> 0

    def number_ids(self, rows: int, workers: int | None) -> None:
        """Count generated ids of the training rows and number them by falling count, ties by generated id."""
        counted = {name: np.zeros(size + 1, dtype=np.int64) for name, size in self.sizes.items()}

        def make(start: int, stop: int) -> list[tuple[str, NDArray]]:
            at = np.arange(start, stop, dtype=np.uint64)
            drawn = list(zip(self.sizes, self.log.draw_ids(at), strict=True))
            for name, (table, _) in self.sequences.items():
                values, lengths = self._bags(name, at)
                drawn.append((table, values[np.arange(values.shape[1]) < lengths[:, None]]))
            return drawn

        for drawn in ordered_blocks(rows, make, workers):
            for table, values in drawn:
                np.add.at(counted[table], values, 1)  # -1 is the last place
        for table, counts in counted.items():
            order = np.argsort(-counts[:-1], kind="stable")
            ids = np.zeros(len(counts), dtype=np.int32)
            ids[order] = np.arange(1, len(counts), dtype=np.int32)
            self._id_of[table] = ids
            self._occurrences[table] = np.concatenate([counts[-1:], counts[order]])

    def counts(self) -> dict[str, torch.Tensor]:
        """Training occurrences by table row."""
        return {table: torch.from_numpy(counts) for table, counts in self._occurrences.items()}

    def write_split(
        self, out: Path, split: str, start: int, stop: int, meter: TruthMeter, workers: int | None
    ) -> dict[str, object]:
        """Rows [start, stop) as shards; the split's entry in the manifest."""

        def make(first: int, last: int) -> tuple[ClickBlock, NDArray, NDArray | None, NDArray]:
            block = self.log.block(start + first, start + last)
            dense = [np.log1p(np.maximum(values, 0)) for values in block.numbers]
            matrix = np.stack(dense, axis=1) if dense else np.zeros((last - first, 0))
            ids = [self._id_of[name][values] for name, values in zip(self.sizes, block.ids, strict=True)]
            columns = np.stack(ids, axis=1)
            lengths = None
            if self.sequences:
                columns, lengths = self._jagged(columns, np.arange(start + first, start + last, dtype=np.uint64))
            return block, columns, lengths, matrix.astype(np.float32)

        shards: list[dict[str, object]] = []
        positives = 0
        held: list[tuple[NDArray, NDArray, NDArray, NDArray | None]] = []
        for block, columns, lengths, dense in ordered_blocks(stop - start, make, workers):
            meter.add(block.logits)
            positives += int(block.labels.sum())
            held.append((dense, block.labels.astype(np.float32), columns, lengths))
            if len(held) == SHARD_ROWS // BLOCK or block.start + len(block.labels) == stop:
                shards.append(_write(out / split / f"{len(shards):05d}.safetensors", held))
                held = []
        return {"rows": stop - start, "positives": positives, "shards": shards}

    def _bags(self, name: str, rows: NDArray[np.uint64]) -> tuple[NDArray, NDArray]:
        table, longest = self.sequences[name]
        lengths = draw.integers(draw.key_of(self.log.options.seed, name, "length"), rows, longest + 1)
        cells = (rows[:, None] * np.uint64(longest) + np.arange(longest, dtype=np.uint64)).ravel()
        values = self._samplers[table](draw.uniform(draw.key_of(self.log.options.seed, name), cells))
        return values.reshape(-1, longest), lengths

    def _jagged(self, columns: NDArray[np.int32], rows: NDArray[np.uint64]) -> tuple[NDArray, NDArray]:
        """One-hot ids and bags side by side: flat ids [L], sample-major, and lengths [n, F]."""
        blocks, kept = [columns], [np.ones(columns.shape, dtype=bool)]
        lengths = [np.ones(columns.shape, dtype=np.int32)]
        for name, (table, longest) in self.sequences.items():
            values, size = self._bags(name, rows)
            blocks.append(self._id_of[table][values])
            kept.append(np.arange(longest) < size[:, None])
            lengths.append(size.astype(np.int32)[:, None])
        flat = np.concatenate(blocks, axis=1)[np.concatenate(kept, axis=1)]
        return flat, np.concatenate(lengths, axis=1)

    def spec(self) -> FeatureSpec:
        """What models see."""
        schema = self.schema()
        return FeatureSpec(
            dense=tuple(column.name for column in schema.dense),
            features=tuple(column.feature() for column in schema.features),
            num_embeddings={name: size + 1 for name, size in self.sizes.items()},
        )

    def schema(self) -> Schema:
        """The schema that such a dataset would have been prepared by."""
        return Schema(
            name="synthetic",
            label=Label(column="label"),
            dense=tuple(DenseColumn(name=column.name, transforms=("log1p",)) for column in self.log.numbers),
            categorical=tuple(
                CategoricalColumn(name=n, type="int", hash_buckets=size) for n, size in self.sizes.items()
            ),
            sequence=tuple(
                SequenceColumn(name=n, type="int", table=t, hash_buckets=self.sizes[t], max_length=longest)
                for n, (t, longest) in self.sequences.items()
            ),
        )


def _write(path: Path, held: list[tuple[NDArray, NDArray, NDArray, NDArray | None]]) -> dict[str, object]:
    dense, labels, ids, lengths = zip(*held, strict=True)
    tensors = {"dense": np.concatenate(dense), "labels": np.concatenate(labels), "ids": np.concatenate(ids)}
    if lengths[0] is not None:
        tensors["lengths"] = np.concatenate(lengths)
        ends = np.cumsum(tensors["lengths"].sum(axis=1, dtype=np.int64))
        tensors["row_offsets"] = np.concatenate([[0], ends])
    return write_shard(path, **tensors).to_dict()
