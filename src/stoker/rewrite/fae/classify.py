"""``stoker.classify``: the training rows of a dataset, hot ones first, as told by a profile."""

from __future__ import annotations

from pathlib import Path

from stoker.base.errors import DataError
from stoker.base.units import quoted
from stoker.dataset.dataset import Dataset
from stoker.rewrite.classified import ClassifyReport, Profiled, Progress
from stoker.rewrite.classified import run_classify as classify_rows
from stoker.rewrite.fae.hot_profile import HotProfile

__all__ = ["classify", "run_classify"]


def classify(
    dataset: Dataset | str | Path,
    profile: HotProfile | str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """Classify the training rows of a dataset: a row is hot if all its ids are hot rows of their tables.

    ``out`` becomes a dataset like any other, with the hot training rows in the first shards and the cold ones in the
    others, each in the order of the source; ``Dataset.hot`` and ``Dataset.cold`` are its parts. Validation and test
    rows, vocabularies and counts are shared with the source as hard links, or copied where the disk has none.

    Source: FAE (VLDB 2022), section 4.2.

    Args:
        dataset: what ``stoker prepare`` wrote.
        profile: of its training rows (:func:`stoker.profile`), or the file where one was saved.
        out: directory to make. One that was classified from the same rows by the same profile is taken as it is.
        overwrite: replace a dataset that is there.
        progress: called with (what, rows done, rows in all).

    Returns:
        The classified dataset, opened.

    Raises:
        DataError: a profile of other data, ``out`` holds something else or was classified by another profile, a damaged
            shard, or a full disk.
    """
    return Dataset(run_classify(dataset, profile, out, overwrite=overwrite, progress=progress).path)


def run_classify(
    dataset: Dataset | str | Path,
    profile: HotProfile | str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ClassifyReport:
    """As :func:`classify`, returning what was done."""
    data = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
    found = profile if isinstance(profile, HotProfile) else HotProfile.load(profile)
    known = data.hot_cold or {}
    if found.schema_hash != data.schema_hash or found.data_hash not in (
        data.train.data_hash,
        known.get("source_data_hash"),  # the same rows in another order
    ):
        where = "the profile" if isinstance(profile, HotProfile) else f"the profile {profile}"
        raise DataError(
            f"{where} was made from other data than {data.path}: its hot rows would be chance there. Make one with: "
            f"stoker profile {quoted(data.path)} --out PROFILE.json"
        )
    wanted = Profiled(hot_rows=found.hot_rows, hash=found.hash, values=found.to_dict())
    return classify_rows(data, wanted, out, overwrite=overwrite, progress=progress)
