"""The engine of Polars: the streaming one, or the GPU one if it is installed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from stoker.base.errors import ConfigError, DependencyError
from stoker.base.files import NO_ROOM

if TYPE_CHECKING:
    import polars as pl

ENGINES = ("streaming", "gpu")


def check_engine(engine: str) -> None:
    """Raise an error for an ``engine`` that cannot work here."""
    if engine not in ENGINES:
        raise ConfigError(f"engine {engine!r} is not one of: {', '.join(ENGINES)}.", settings=("engine",))
    if engine == "gpu" and find_spec("cudf_polars") is None:
        raise DependencyError(
            "engine='gpu' needs Polars' GPU engine, the package cudf_polars, which is not installed. "
            "On Linux with an NVIDIA GPU: pip install polars[gpu]; or leave the engine out."
        )


def collect(frame: pl.LazyFrame, engine: str = "streaming") -> pl.DataFrame:
    """Return the rows of the frame. Polars runs steps that the GPU engine does not know on the CPU."""
    import polars as pl

    if engine == "gpu":
        check_engine(engine)
        return frame.collect(engine=pl.GPUEngine(raise_on_fail=False))
    return frame.collect(engine="streaming")


@contextmanager
def full_disk() -> Iterator[None]:
    """Raise :class:`OSError` if Polars reports a full disk, as everything else that writes files does."""
    import polars as pl

    try:
        yield
    except pl.exceptions.PolarsError as error:
        text = str(error).replace("thrift: transport error", "(os error 28)")  # what it says of a footer of Parquet
        for number in NO_ROOM:
            if f"(os error {number})" in text:
                raise OSError(number, os.strerror(number)) from error
        raise


def reason_of(error: Exception) -> str:
    """Return the message of a Polars error in one line, without the query plan that it adds."""
    text = " ".join(str(error).split("This error occurred")[0].split())
    if bad := re.match(r"conversion from `\w+` to `[fiu]\d+` failed in column '(.*)' for .* values: \[(.+?)[],]", text):
        return f"column {bad[1]!r} holds {bad[2]}, which is not a number"
    return text[:400].rstrip(".")
