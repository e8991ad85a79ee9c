"""A prepared dataset on disk: a directory with a manifest, vocabularies, counts and shards.

The manifest is written last: a dataset with a manifest is whole, without one its preparation was interrupted. Opening
reads the manifest and checks file sizes; shards are mapped when first used. Only torch, numpy and safetensors are
needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stoker.base import remote
from stoker.base.errors import DataError, SchemaError, errors_as
from stoker.base.files import hash_file
from stoker.base.settings import checked_arguments
from stoker.base.units import quoted
from stoker.dataset.manifest import MANIFEST, NEW_IDS, SPLITS, read_manifest, write_manifest
from stoker.dataset.memory import temporary_folder_of
from stoker.dataset.rebuild import rebuilt
from stoker.dataset.rows import made_by
from stoker.dataset.spec import FeatureSpec
from stoker.dataset.split import Split


class Dataset:
    """A dataset directory, opened for reading; or a dataset in memory, as :func:`stoker.prepare` makes one.

    >>> from stoker.testing import make_dataset
    >>> _ = make_dataset("data/tiny", rows=1000)
    >>> data = stoker.Dataset("data/tiny")
    >>> data
    Dataset('data/tiny': train 800, valid 100, test 100 rows)
    >>> stream = data.train.batches(128, seed=0)
    >>> stream
    BatchStream('train', 128 rows a batch, at batch 0 of 7 in epoch 0)
    >>> batch = next(iter(stream))
    >>> batch
    Batch(step 0: 128 examples; dense [128, 4], ids [128, 3], labels [128]; cpu)

    Args:
        path: the directory that ``stoker prepare`` wrote, or its URL, which is downloaded once to the cache.

    Raises:
        DataError: the dataset is missing, unfinished or newer; a file is missing or has the wrong size.
    """

    @checked_arguments
    def __init__(self, path: str | Path) -> None:
        self.url = remote.url_of(path)  # its source, if it was downloaded
        self.path = Path(path) if self.url is None else remote.fetch_sealed(self.url)
        self._folder = temporary_folder_of(self.path)  # of a dataset in memory; this keeps it
        self.manifest = read_manifest(self.path)
        kinds = (KeyError, TypeError, AttributeError, SchemaError)
        with errors_as(DataError, f"{self.path / MANIFEST} is garbled", "Prepare the dataset again.", kinds):
            self.schema = FeatureSpec.from_dict(self.manifest["features"])
            self._splits = {name: self._split(name, entry) for name, entry in self.manifest["splits"].items()}
        for file, entry in self._files():
            self._check(file, entry)

    def __repr__(self) -> str:
        rows = ", ".join(f"{name} {len(split):,}" for name, split in self.splits.items())
        return f"Dataset({'in memory' if self.in_memory else repr(str(self.path))}: {rows} rows)"

    @property
    def in_memory(self) -> bool:
        """Whether it is in temporary files, which are deleted with the last reference to it. :meth:`save` keeps it."""
        return self._folder is not None

    @property
    def features(self) -> NoReturn:
        """Those of :attr:`schema`, which models take."""
        raise AttributeError("a Dataset has no features, its schema has. Write data.schema, as in DLRM(data.schema).")

    def check_labelled(self, done: str) -> None:
        """Raise an error for a dataset that has rows without labels.

        Raises:
            DataError: it has such rows; ``done`` is what cannot be done with it.
        """
        for name, split in self.splits.items():
            if split.labelled < len(split):
                raise DataError(
                    f"{self.path}: {len(split) - split.labelled:,} of the {len(split):,} rows of split {name} have no "
                    f"label, so the dataset cannot be {done}. It was prepared for stoker predict; take the one that it "
                    f"was prepared like, {self.manifest.get('like', {}).get('source', 'with labels')}."
                )

    @property
    def schema_hash(self) -> str:
        """sha256 of the schema of the data and, if it was reordered, of the order of its ids."""
        return str(self.manifest["schema_hash"])

    @property
    def splits(self) -> dict[str, Split]:
        """The splits by name, in the order train, valid, test."""
        return {name: self.split(name) for name in SPLITS if name in self._splits}

    @property
    def train(self) -> Split:
        """The rows to train on; vocabularies and statistics were fitted on them."""
        return self.split("train")

    @property
    def valid(self) -> Split:
        """The rows for choosing settings."""
        return self.split("valid")

    @property
    def test(self) -> Split:
        """The rows for the final figure."""
        return self.split("test")

    @property
    def hot_cold(self) -> Mapping[str, Any] | None:
        """The manifest's record of a dataset that :func:`stoker.classify` wrote, else None.

        ``hot_rows_of_train`` training rows are hot, in the first ``hot_shards`` shards. ``hot_rows`` tells how many
        rows of each table are hot, by the ``profile`` with ``profile_hash``. The source data, with
        ``source_data_hash``, was then at ``source``.
        """
        return self.manifest.get("hot_cold")

    @property
    def groups(self) -> Mapping[str, Any] | None:
        """The manifest's record of a dataset prepared with ``group``, else None.

        ``column`` is the raw column, ``count`` the number of groups over all splits and ``cut`` the number of groups
        with rows in several. :attr:`Split.groups <stoker.dataset.split.Split.groups>` has the numbers of the rows.
        """
        return self.manifest.get("groups")

    @property
    def reordered(self) -> Mapping[str, Any] | None:
        """The manifest's record of a dataset whose ids :func:`stoker.reorder` reordered, else None.

        ``tables`` has the changes of each table, ``settings`` the settings; ``hash`` identifies the order.
        ``source_schema_hash`` and ``source_data_hash`` identify its source, which was then at ``source`` (None: the
        dataset was prepared in that order).
        """
        return self.manifest.get("reordered")

    @cached_property
    def new_ids(self) -> dict[str, Tensor]:
        """The new id of each id in the source of a reordered dataset: table -> [num_embeddings] int64.

        Row ``row`` of a model that was trained on the source becomes row ``new_ids[table][row]``. Tables that kept
        their ids are not in it.

        Raises:
            DataError: the dataset is not reordered, or the file is damaged.
        """
        if self.reordered is None:
            raise DataError(
                f"{self.path} is not reordered. Do so with: stoker reorder {quoted(self.path)} --out DIRECTORY"
            )
        path, found = self._load(NEW_IDS, "Reorder")
        for table, ids in found.items():
            rows = self.schema.num_embeddings.get(table)
            if ids.shape != (rows,) or not torch.equal(ids.sort().values, torch.arange(len(ids))):
                raise DataError(f"{path}: the ids of table {table} are not a permutation. Reorder the dataset again.")
        return found

    @property
    def hot(self) -> Split:
        """The training rows whose ids are all hot.

        Raises:
            DataError: the dataset is not classified.
        """
        return self._parts[0]

    @property
    def cold(self) -> Split:
        """The other training rows.

        Raises:
            DataError: the dataset is not classified.
        """
        return self._parts[1]

    @cached_property
    def _parts(self) -> tuple[Split, Split]:
        known, train = self.hot_cold, self.train.entry
        if known is None:
            raise DataError(
                f"the training rows of {self.path} are not classified into hot and cold ones. Classify them with: "
                f"stoker classify {quoted(self.path)} --device-memory SIZE --out DIRECTORY"
            )
        try:
            shards, rows, positives = (
                int(known[name]) for name in ("hot_shards", "hot_rows_of_train", "hot_positives")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{self.path / MANIFEST} is garbled: its hot_cold is {known!r}. Classify the dataset again."
            ) from error
        hot = {"rows": rows, "positives": positives, "shards": train["shards"][:shards]}
        cold = {"rows": train["rows"] - rows, "positives": train["positives"] - positives}
        cold["shards"] = train["shards"][shards:]
        if "keep" in train:
            hot["keep"], cold["keep"] = train["keep"], {**train["keep"], "first": rows}
        return self._split("hot", hot), self._split("cold", cold)

    def _split(self, name: str, entry: Mapping[str, Any]) -> Split:
        return Split(self.path, name, entry, self.schema, self.manifest)

    def split(self, name: str) -> Split:
        """Return one split by name.

        Raises:
            DataError: the dataset was prepared without it.
        """
        if name not in self._splits:
            raise DataError(f"{self.path} has no split {name!r}, only {', '.join(self._splits)}.")
        return self._splits[name]

    @cached_property
    def counts(self) -> dict[str, Tensor]:
        """Occurrences of each id in training: table -> [num_embeddings] int64 (id 0 = out of vocabulary)."""
        path, counts = self._load("counts.safetensors", "Prepare")
        for table, rows in self.schema.num_embeddings.items():
            if table not in counts or counts[table].shape != (rows,):
                found = list(counts[table].shape) if table in counts else "nothing"
                raise DataError(
                    f"{path}: table {table} has counts {found}, expected [{rows}]. Prepare the dataset again."
                )
        return counts

    def save(self, out: str | Path, *, overwrite: bool = False) -> Dataset:
        """Save this dataset to a directory, with the same bytes as if it had been prepared there.

        If it is in a directory already, the files of the second are hard links to the first, where the disk allows. A
        kill leaves no half-written dataset.

        Args:
            out: directory to make.
            overwrite: replace a dataset at ``out``.

        Returns:
            The dataset at ``out``, opened.

        Raises:
            DataError: ``out`` is taken or cannot be made, the disk has no room, or the working directory ``out``.tmp
                has other files.
        """
        with rebuilt_from(self, Path(out), overwrite=overwrite) as folder:
            write_manifest(folder, self.manifest)
        return Dataset(out)

    def verify(self) -> int:
        """Re-hash every file and check every id against its table.

        Returns:
            The number of files checked.

        Raises:
            DataError: names the first damaged file, the expected and the actual value.
        """
        files = self._files()
        for file, entry in files:
            self._check(file, entry, whole=True)
        for split in self._splits.values():
            split.check_ids()
        return len(files)

    def _files(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return every file, and its entry in the manifest."""
        shards = [shard for split in self._splits.values() for shard in split.entry["shards"]]
        return [(shard["file"], shard) for shard in shards] + list(self.manifest.get("files", {}).items())

    def _check(self, file: str, entry: Mapping[str, Any], *, whole: bool = False) -> None:
        """Compare the size of a file with its entry in the manifest; if ``whole``, its checksum, too."""
        path, digest = self.path / file, entry["sha256"]
        expected, remedy = (
            int(entry["bytes"]),
            f"Restore it from a copy, or {made_by(self.manifest)} the dataset again.",
        )
        with errors_as(DataError, f"{path} is missing; the manifest lists it with {expected:,} bytes", remedy):
            size, digest = hash_file(path) if whole else (path.stat().st_size, digest)
        if size != expected:
            raise DataError(
                f"{path} has {size:,} bytes, the manifest says {expected:,}: it was truncated or altered. {remedy}"
            )
        if digest != entry["sha256"]:
            listed = str(entry["sha256"])[:16]
            raise DataError(f"{path} was altered: sha256 {digest[:16]}..., the manifest says {listed}... {remedy}")

    def _load(self, file: str, command: str) -> tuple[Path, dict[str, Tensor]]:
        """Return the path of a file of tensors, and the tensors; ``command`` makes it again."""
        path = self.path / file
        with errors_as(
            DataError, f"{path} cannot be read", f"{command} the dataset again.", (OSError, SafetensorError)
        ):
            return path, load_file(path)


def rebuilt_from(
    data: Dataset, out: Path, *, splits: Collection[str] = (), files: Collection[str] = (), size: int = 0,
    overwrite: bool,
) -> AbstractContextManager[Path]:  # fmt: skip
    """Return a working directory for another dataset at ``out``, which shares all other files with ``data``.

    Args:
        data: the source.
        out: directory of the new dataset.
        splits: the block writes their shards.
        files: other files that the block writes.
        size: bytes of both.
        overwrite: replace a dataset at ``out``.

    Raises:
        DataError: ``out`` is taken, another process writes it, or the disk has no room.
    """
    anew = {shard["file"] for name in splits for shard in data.split(name).entry["shards"]} | set(files)
    shared = {file: int(entry["bytes"]) for file, entry in data._files() if file not in anew}
    return rebuilt(
        data.path, out, shared=shared, written=[*data.splits, *files], size=size, overwrite=overwrite,
        copy=data.in_memory,
    )  # fmt: skip
