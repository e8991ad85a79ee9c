"""Tables from finished parts: values that training rows have get ids, and every part the ids behind its codes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stoker.prep.fit.split_rules import PartRows, SplitFile
from stoker.prep.fit.vocabulary import TableBuilder
from stoker.prep.parse.layout import Layout, feature_codes
from stoker.prep.stages.parts import PartFile, made_in, write_part

if TYPE_CHECKING:
    from stoker.prep.like import Like

__all__ = ["build_table", "count_codes", "look_up_table"]

Array = npt.NDArray[Any]


def count_codes(arrays: PartFile, layout: Layout, index: int, chosen: Array | None, size: int) -> npt.NDArray[np.int64]:
    """Return [size] how often each code of a feature occurs in the rows of a part that ``chosen`` [n] marks."""
    if chosen is None:
        return np.zeros(size, np.int64)
    codes, lengths = feature_codes(arrays, layout, index)
    if not chosen.all():
        codes = codes[chosen if lengths is None else np.repeat(chosen, lengths)]
    return np.bincount(codes, minlength=size)


def build_table(
    table: str, layout: Layout, parts: Sequence[PartRows], splits: SplitFile, work: Path, vocabulary: Path
) -> dict[str, Any]:
    """Count a table's values over training rows, number them, write the vocabulary and the ids of every part.

    The returned record (for the journal) says how many rows the table has.
    """
    features = [(i, column) for i, column in enumerate(layout.features) if column.table_name == table]
    first = features[0][1]
    if first.hash_buckets is not None:
        return _count_buckets([i for i, _ in features], first.hash_buckets, layout, parts, splits, work)
    builder = TableBuilder(first.type)
    refs: list[npt.NDArray[np.int32]] = []
    missing, total = 0, 0
    for part in parts:
        chosen = splits.train_rows(part)
        with part.open() as arrays:
            for index, column in features:
                dictionary = _dictionary(arrays, index, column.type)
                size = len(dictionary[-1]) + (column.type != "string")
                counts = count_codes(arrays, layout, index, chosen, size)
                missing += int(counts[0]) if column.missing == "category" else 0
                total += int(counts.sum())
                if column.type == "string":
                    refs.append(builder.add_texts(dictionary[0], dictionary[1], counts[1:]))
                else:
                    refs.append(builder.add_ints(dictionary[0], counts[1:]))
    own = any(column.missing == "category" for _, column in features)
    done = builder.finish(min_count=first.min_count, missing=missing if own else None, total=total)
    with made_in(work.parent, vocabulary) as path:
        done.write(path)
    pieces = []
    for position, entries in enumerate(refs):
        column = features[position % len(features)][1]
        pieces.append(_ids(done.missing_id if column.missing == "category" else 0, done.ids[entries]))
        refs[position] = np.empty(0, np.int32)
    record = _write_ids(work, pieces, done.counts())
    return {**record, "rows": done.num_embeddings, "unknown": done.unknown, "total": total}


def look_up_table(table: str, layout: Layout, parts: Sequence[PartRows], work: Path, like: Like) -> dict[str, Any]:
    """Write the ids of every part in the vocabulary of an earlier dataset, in the form of :func:`build_table`."""
    features = [(i, column) for i, column in enumerate(layout.features) if column.table_name == table]
    first = features[0][1]
    counts = like.data.counts[table].numpy()
    if first.hash_buckets is not None:
        return {**write_part(work, {"counts": counts}), "rows": len(counts)}
    known = like.vocabulary(table, first.type)
    pieces = []
    for part in parts:
        with part.open() as arrays:
            for index, column in features:
                ids = known.ids(*_dictionary(arrays, index, column.type))
                pieces.append(_ids(known.missing_id if column.missing == "category" else 0, ids))
    return {**_write_ids(work, pieces, counts), "rows": known.rows}


def _dictionary(arrays: PartFile, index: int, kind: str) -> tuple[Array, ...]:
    """Return the dictionary of a feature in a part: numbers, or the bytes of texts and where they begin and end."""
    return tuple(arrays[f"{name}.{index}"] for name in (("bytes", "ends") if kind == "string" else ("values",)))


def _ids(missing: int, ids: Array) -> npt.NDArray[np.int32]:
    """Return what a code is looked up in: the id of a missing value, then those of the dictionary."""
    return np.concatenate([[missing], ids]).astype(np.int32)


def _write_ids(work: Path, pieces: Sequence[Array], counts: Array) -> dict[str, Any]:
    """Write one array of ids per part and feature, one after the other, and the counts by id."""
    starts = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    ids = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    return write_part(work, {"ids": ids, "starts": starts, "counts": counts})


def _count_buckets(
    features: Sequence[int], buckets: int, layout: Layout, parts: Sequence[PartRows], splits: SplitFile, work: Path
) -> dict[str, Any]:
    counts = np.zeros(buckets + 1, np.int64)
    for part in parts:
        chosen = splits.train_rows(part)
        if chosen is not None:
            with part.open() as arrays:
                for index in features:
                    counts += count_codes(arrays, layout, index, chosen, buckets + 1)
    record = write_part(work, {"counts": counts})
    return {**record, "rows": buckets + 1, "unknown": int(counts[0]), "total": int(counts.sum())}
