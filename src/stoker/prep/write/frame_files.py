"""Tables in memory as input: those of Polars, pandas and PyArrow are written to temporary Parquet files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from stoker.base.errors import ConfigError, DataError
from stoker.prep.parse.sources import FRAME

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Input", "Table", "files_of"]


class Table(Protocol):
    """A table in memory: a frame of Polars or pandas, or a PyArrow table."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


Input: TypeAlias = "str | os.PathLike[str] | Table | pl.LazyFrame"

_KINDS = {
    "polars": ("DataFrame", "LazyFrame"), "pandas": ("DataFrame",), "pyarrow": ("Table", "RecordBatch"),
}  # fmt: skip


@contextmanager
def files_of(given: Any) -> Iterator[list[Any]]:
    """Return the names in ``given``, with a Parquet file in place of each table in memory; the files go with the block.

    Args:
        given: a path, a pattern or a table, or several of them.

    Raises:
        ConfigError: something that is neither. DataError: no room for the files, or a column that Parquet cannot hold.
    """
    several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    items = list(given) if several else [given]
    for item in items:
        if _package_of(item) is None and not (isinstance(item, str) or hasattr(item, "__fspath__")):
            raise ConfigError(
                f"files holds a {type(item).__module__}.{type(item).__qualname__}. Pass paths, patterns, or tables of "
                "Polars, pandas or PyArrow.", settings=("files",),
            )  # fmt: skip
    if all(_package_of(item) is None for item in items):
        yield items
        return
    with tempfile.TemporaryDirectory(prefix="stoker-frame-") as folder:
        names = []
        for number, item in enumerate(items):
            package = _package_of(item)
            names.append(item if package is None else _write(item, package, Path(folder) / f"table_{number}{FRAME}"))
        yield names


def _package_of(item: Any) -> str | None:
    """Return the package whose table this is, or None."""
    package = type(item).__module__.partition(".")[0]
    return package if type(item).__name__ in _KINDS.get(package, ()) else None


def _write(table: Any, package: str, path: Path) -> Path:
    import polars as pl

    try:
        if package == "pandas":
            frame = pl.from_pandas(table).lazy()
        elif package == "pyarrow":
            frame = pl.DataFrame(pl.from_arrow(table)).lazy()
        else:
            frame = table.lazy()
        texts = [name for name, kind in frame.collect_schema().items() if kind in (pl.Categorical, pl.Enum)]
        frame.with_columns(pl.col(texts).cast(pl.String)).sink_parquet(path, maintain_order=True, compression="lz4")
    except OSError as error:
        raise DataError(
            f"the table cannot be written to {path.parent} ({error.strerror or error}). "
            "Let TMPDIR name a disk with room."
        ) from error
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        raise DataError(
            f"the {package} table cannot be read ({error}). Give its columns plain types: numbers, "
            "texts, lists of these."
        ) from error
    return path
