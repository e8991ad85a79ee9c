"""Tables from finished parts: values that training rows have get ids, and every part the ids behind its codes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stoker.prep.fit.split_rules import PartRows, SplitFile
from stoker.prep.fit.vocabulary import TableBuilder
from stoker.prep.parse.dictionary_kernels import count_codes
from stoker.prep.parse.layout import Layout, feature_codes
from stoker.prep.schema import CategoricalColumn
from stoker.prep.stages.parts import made_in, write_part

if TYPE_CHECKING:
    from stoker.prep.like import Like

__all__ = ["build_table", "look_up_table"]


def build_table(
    table: str,
    layout: Layout,
    parts: Sequence[PartRows],
    splits: SplitFile,
    work: Path,
    vocabulary: Path,
) -> dict[str, Any]:
    """Count a table's values over training rows, number them, write the vocabulary and the ids of every part.

    The returned record (for the journal) says how many rows the table has.
    """
    features = [i for i, column in enumerate(layout.features) if column.table_name == table]
    columns = [layout.features[i] for i in features]
    if columns[0].hash_buckets is not None:
        return _count_buckets(columns, features, layout, parts, splits, work)
    builder = TableBuilder(columns[0].type)
    refs: list[npt.NDArray[np.int32]] = []
    missing, missing_other, total = 0, 0, 0
    for part in parts:
        chosen = splits.train_rows(part)
        with part.open() as arrays:
            for index, column in zip(features, columns, strict=True):
                size = arrays.size(f"ends.{index}") if column.type == "string" else arrays.size(f"values.{index}") + 1
                counts = np.zeros(size, np.int64)
                if chosen is not None:
                    codes, lengths = feature_codes(arrays, layout, index)
                    count_codes(codes, chosen if lengths is None else np.repeat(chosen, lengths), counts)
                if column.missing == "category":
                    missing += int(counts[0])
                else:
                    missing_other += int(counts[0])
                total += int(counts.sum())
                if column.type == "string":
                    refs.append(builder.add_texts(arrays[f"bytes.{index}"], arrays[f"ends.{index}"], counts[1:]))
                else:
                    refs.append(builder.add_ints(arrays[f"values.{index}"], counts[1:]))
    own = any(column.missing == "category" for column in columns)
    done = builder.finish(min_count=columns[0].min_count, missing=missing if own else None, total=total)
    with made_in(work.parent, vocabulary) as path:
        done.write(path)
    # One array of ids per part and feature, led by the id of a missing value: what a code looks up.
    starts, at = [], 0
    pieces: list[npt.NDArray[np.int32]] = []
    for position, entries in enumerate(refs):
        column = columns[position % len(columns)]
        lead = done.missing_id if column.missing == "category" else 0
        starts.append(at)
        pieces.append(np.concatenate([[lead], done.ids[entries]]).astype(np.int32))
        refs[position] = np.empty(0, np.int32)
        at += len(pieces[-1])
    starts.append(at)
    record = write_part(work, {
        "ids": np.concatenate(pieces) if pieces else np.empty(0, np.int32),
        "starts": np.array(starts, np.int64),
        "counts": done.counts(),
    })  # fmt: skip
    return {**record, "rows": done.num_embeddings, "unknown": done.unknown, "total": total}


def look_up_table(table: str, layout: Layout, parts: Sequence[PartRows], work: Path, like: Like) -> dict[str, Any]:
    """The ids of every part in the vocabulary of an earlier dataset, in the form of :func:`build_table`."""
    features = [i for i, column in enumerate(layout.features) if column.table_name == table]
    columns = [layout.features[i] for i in features]
    counts = like.data.counts[table].numpy()
    if columns[0].hash_buckets is not None:
        return {**write_part(work, {"counts": counts}), "rows": len(counts)}
    known = like.vocabulary(table, columns[0].type)
    starts, pieces = [0], []
    for part in parts:
        with part.open() as arrays:
            for index, column in zip(features, columns, strict=True):
                if column.type == "string":
                    ids = known.ids(arrays[f"bytes.{index}"], arrays[f"ends.{index}"])
                else:
                    ids = known.ids(arrays[f"values.{index}"])
                lead = known.missing_id if column.missing == "category" else 0
                pieces.append(np.concatenate([[lead], ids]).astype(np.int32))
                starts.append(starts[-1] + len(pieces[-1]))
    record = write_part(work, {"ids": np.concatenate(pieces), "starts": np.array(starts, np.int64), "counts": counts})
    return {**record, "rows": known.rows}


def _count_buckets(
    columns: Sequence[CategoricalColumn],
    features: Sequence[int],
    layout: Layout,
    parts: Sequence[PartRows],
    splits: SplitFile,
    work: Path,
) -> dict[str, Any]:
    buckets = columns[0].hash_buckets
    assert buckets is not None
    counts = np.zeros(buckets + 1, np.int64)
    for part in parts:
        chosen = splits.train_rows(part)
        if chosen is None:
            continue
        with part.open() as arrays:
            for index in features:
                codes, lengths = feature_codes(arrays, layout, index)
                count_codes(codes, chosen if lengths is None else np.repeat(chosen, lengths), counts)
    record = write_part(work, {"counts": counts})
    return {**record, "rows": buckets + 1, "unknown": int(counts[0]), "total": int(counts.sum())}
