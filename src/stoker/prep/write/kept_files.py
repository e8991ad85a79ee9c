"""The last step of a preparation that keeps raw columns: one Parquet file a split, in the order of its rows."""

from __future__ import annotations

from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stoker.base.checks import near
from stoker.dataset.manifest import describe_file
from stoker.dataset.rebuild import UnusableInput
from stoker.dataset.row_files import kept_file, kept_writer
from stoker.prep.fit.fitting import Fitting
from stoker.prep.parse.frames import common_types
from stoker.prep.parse.ingest import file_columns
from stoker.prep.parse.sources import source_kind
from stoker.prep.stages.task import SPLITS, Task

__all__ = ["write_kept"]


def write_kept(fitting: Fitting, out: Path) -> dict[str, Any]:
    """Write the kept columns of every split that has rows; return the manifest's entries of the files.

    Memory: the rows of a part, and a row group for each split.

    Raises:
        UnusableInput: no JSON line has a key that ``keep`` names. DataError: a full disk.
    """
    task = fitting.task
    types: Any = common_types(_types(fitting))
    empty = pl.DataFrame(schema=types).rename(dict(zip(types, task.schema.keep, strict=True)))
    given = np.zeros(len(types), np.int64)  # values of each column that are not missing
    files = [kept_file(name) for name, rows in zip(SPLITS, fitting.sizes.sum(axis=0), strict=False) if rows]
    with ExitStack() as stack:
        schema = empty.to_arrow(compat_level=pl.CompatLevel.oldest()).schema
        writers = {file: stack.enter_context(kept_writer(out / file, schema)) for file in files}
        for part in fitting.parts:
            with part.open() as arrays:
                rows = pl.read_ipc(arrays["keep"].tobytes()).cast(types)
            rows.columns = empty.columns
            given += rows.height - np.array(rows.null_count().row(0))
            splits = fitting.splits.assign(part)
            for number, name in enumerate(SPLITS):
                chosen = np.flatnonzero(splits == number)
                if len(chosen):
                    table = rows[chosen].to_arrow(compat_level=pl.CompatLevel.oldest())
                    writers[kept_file(name)].write(table)
        for name, count in zip(empty.columns, given.tolist(), strict=True):
            if not count:
                _check_keys(task, name)
    return {file: describe_file(out / file) for file in files}


def _types(fitting: Fitting) -> Any:
    for part in fitting.parts:
        with part.open() as arrays:
            yield pl.read_ipc_schema(BytesIO(arrays["keep"].tobytes()))


def _check_keys(task: Task, name: str) -> None:
    """Refuse a kept column without any value where the reason is that JSON lines have no such key."""
    path, kind = task.files[0], task.schema.source.kind
    made = {output for feature in task.schema.feature for output in feature.outputs}
    if task.like is None and task.recipe.derive is None and name not in made and source_kind(path, kind) == "jsonl":
        keys = file_columns(path, task.schema.source)
        if name not in keys:
            raise UnusableInput(
                f"no line of {path} has a value for {name!r}, which keep names. The first has: {', '.join(keys)}."
                f"{near(name, keys)}"
            )
