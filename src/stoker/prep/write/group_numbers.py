"""The last step of a preparation with groups: the number of every row's list, and which lists a split rule cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.base.units import plural
from stoker.dataset.row_files import GroupWriter, group_file, write_group_file
from stoker.prep.fit.fitting import Fitting
from stoker.prep.fit.vocabulary import TableBuilder
from stoker.prep.schema import Schema
from stoker.prep.stages.task import SPLITS

__all__ = ["Groups", "cut_warning", "write_groups"]

Groups = tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, Any]]  # what write_groups returns


def write_groups(fitting: Fitting, out: Path) -> Groups:
    """Write the groups of every split that has rows.

    Memory: about 60 bytes per group, besides what a part takes.

    Returns:
        The manifest's ``groups`` (column, how many there are, how many are ``cut`` over several splits), the entry of
        every split's, and those of the files.
    """
    builder = TableBuilder("string")
    entries: list[npt.NDArray[np.int32]] = []  # of each part, by code
    for part in fitting.parts:
        with part.open() as arrays:
            ends = arrays["ends.group"]
            entries.append(builder.add_texts(arrays["bytes.group"], ends, np.ones(len(ends) - 1, np.int64)))
    known = builder.entries
    del builder
    seen = np.zeros(known, np.uint8)  # in which splits, bit by bit
    of_splits: dict[str, dict[str, Any]] = {}
    files: dict[str, Any] = {}
    for number, name in enumerate(SPLITS):
        rows = int(fitting.sizes[:, number].sum())
        if not rows:
            continue
        writer = GroupWriter(known)

        def numbers(number: int = number, writer: GroupWriter = writer) -> Iterator[npt.NDArray[np.int32]]:
            for part in fitting.parts:
                if not fitting.sizes[part.index, number]:
                    continue
                chosen = fitting.splits.rows(part, number)
                with part.open() as arrays:
                    names = entries[part.index][arrays["codes.group"][chosen] - 1]
                    labels = arrays["labels"][chosen]
                yield writer.add(names, labels)

        files[group_file(name)] = write_group_file(out / group_file(name), rows, numbers())
        seen |= writer.seen.astype(np.uint8) << number
        of_splits[name] = {**writer.summary(), "file": group_file(name)}
    cut = int(np.count_nonzero(seen & (seen - 1)))  # more than one bit
    summary = {"column": fitting.task.schema.group, "count": int((seen > 0).sum()), "cut": cut}
    return summary, of_splits, files


def cut_warning(schema: Schema, groups: dict[str, Any]) -> str | None:
    """What to say where a split rule separates rows of one list; None where it does not."""
    if not groups["cut"]:
        return None
    return (
        f"{groups['cut']:,} of {plural(groups['count'], 'group')} ({groups['cut'] / groups['count']:.1%}) by "
        f"column {groups['column']!r} have rows in several splits, as the split rule {schema.split.rule!r} does not "
        "keep them together: ranking metrics then see a part of each such list, and training rows tell about the "
        f'others. To keep lists whole, split with rule = "hash" and column = "{groups["column"]}".'
    )
