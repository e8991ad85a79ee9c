"""What Polars says against a feature, as an error of Stoker's that names the feature, its columns and a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stoker.base.engine import collect, reason_of
from stoker.base.errors import DataError
from stoker.prep.features.base import Derivation

if TYPE_CHECKING:
    import polars as pl

__all__ = ["explained"]


@contextmanager
def explained(
    feature: Derivation | str, waiting: Sequence[tuple[Derivation | str, pl.LazyFrame]] = ()
) -> Iterator[None]:
    """Turn Polars' errors in the block into ones of ``feature``, or of one that it had to wait for.

    Args:
        feature: that is worked out or fitted; or what else, in words.
        waiting: lazy features in order that the block works out, too, each with a frame of its columns.

    Raises:
        DataError: what Polars said, of whom, and what to do.
    """
    from polars.exceptions import PolarsError

    try:
        yield
    except PolarsError as error:
        who, cause = feature, error
        for other, frame in waiting:
            try:
                collect(frame)
            except PolarsError as earlier:
                who, cause = other, earlier
                break
        name = who if isinstance(who, str) else f"{who.where} of {', '.join(map(repr, who.inputs))}"
        raise DataError(f"{name} cannot be worked out: {reason_of(cause)}. {_remedy(who)}") from cause


def _remedy(who: Derivation | str) -> str:
    if isinstance(who, str):
        return "It must be numbers: mend what is none, or leave such rows out."
    if getattr(who, "pattern", None) is not None:
        return "docs/features.md tells what patterns know."
    if who.numbers:
        return f"It wants numbers in {', '.join(map(repr, who.numbers))}: mend what is none, or make it missing."
    return "docs/features.md describes the kinds."
