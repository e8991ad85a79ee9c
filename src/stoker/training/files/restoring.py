"""Filling a module, its optimizers and extra state from a checkpoint: all is compared first, then put in place."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stoker.base.errors import CheckpointError, ConfigError
from stoker.dataset.manifest import canonical_json
from stoker.models import RecModel
from stoker.optim import RowOptimizer
from stoker.tables import EmbeddingTables
from stoker.tables.storage import Rows
from stoker.training.files.module_state import (
    check_optimizer,
    decode,
    dense_state,
    load_dense_state,
    load_optimizer,
    tables_in,
    trained_in,
)

__all__ = ["Saved", "Tensors"]

_REBUILD = "Build the module as it was built when it was saved."
_SHOWN = 5  # names in a message


class Tensors(Mapping[str, Tensor]):
    """The tensors of an open file, read one by one."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self._names = list(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self.file.get_slice(name).get_shape())


class Saved:
    """What a checkpoint holds, of either format.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        tensors: of its dense part.
    """

    def __init__(self, directory: Path, manifest: Mapping[str, Any], tensors: Tensors) -> None:
        self.directory, self.manifest, self.tensors = directory, manifest, tensors
        self.first = int(manifest["format_version"]) == 1
        self._settings: dict[str, RowOptimizer] = {}  # those that the module does not have yet
        self.trained: dict[str, Any] = manifest.get("trained", {})
        self.optimizers: dict[str, Any] = manifest.get("optimizers", {})
        self.extras: dict[str, Any] = manifest.get("extra_state", {})
        if self.first:
            self.trained = {"embeddings": {name: manifest[name] for name in ("row_optimizer", "tick")}}
            single = manifest["dense_optimizer"]
            self.optimizers = {} if single is None else {"optimizer": {"prefix": "optimizer", **single}}

    def extra_state(self) -> dict[str, Any]:
        """Return what was given as extra state: values, and of objects their ``state_dict()``."""
        return {name: decode(entry["state"], self.tensors) for name, entry in self.extras.items()}

    def check(
        self,
        module: nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        extra_state: Mapping[str, Any] | None,
        *,
        resuming: bool,
    ) -> None:
        """Refuse what does not fit the checkpoint, before anything is changed.

        Raises:
            CheckpointError: naming what differs.
        """
        if self.manifest["model"] is not None and isinstance(module, RecModel):
            self._check_model(module)
        elif self.first:
            raise CheckpointError(
                f"{self.directory} holds a model {self.manifest['model']['model']!r}, but the module given is a "
                f"{type(module).__name__}. Leave it out to build the saved model."
            )
        self._check_tables(module, resuming=resuming)
        self._check_dense(module)
        self._settings = dict(self._other_settings(module)) if resuming and not self.first else {}
        if optimizers and not self.optimizers:
            raise CheckpointError(
                f"{self.directory} was saved without a dense optimizer, so it has no state for one. Load without one."
            )
        if optimizers and set(optimizers) != set(self.optimizers):
            raise CheckpointError(
                f"{self.directory} holds the state of the optimizers {_names(self.optimizers)}; given are "
                f"{_names(optimizers)}. Give all of them in the same form, a dict under the names they were saved with."
            )
        for name, optimizer in optimizers.items():
            what = f"the state of optimizer {name!r} in {self.directory}"
            check_optimizer(what, self.optimizers[name], optimizer, None if self.first else module)
        self._check_extra_state(extra_state or {})
        objects = [name for name, entry in self.extras.items() if entry["object"]]
        left = [name for name in objects if name not in (extra_state or {})]
        if left and (extra_state or (optimizers and extra_state is None)):
            raise CheckpointError(
                f"{self.directory} also holds extra state {_names(left)}, without which training would not go on as "
                "it did. Give those objects too, or extra_state={} to go on without any."
            )

    def fill(
        self,
        module: nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        extra_state: Mapping[str, Any] | None,
    ) -> None:
        """Put everything in place, after :meth:`check`.

        Raises:
            CheckpointError: a file that cannot be read, or an object that refuses its state.
        """
        trained, tables = trained_in(module), tables_in(module)
        for name, row_optimizer in self._settings.items():
            trained[name].optimizer = row_optimizer
        for entry in self.manifest["tables"]:
            self._load_table(entry, tables[entry.get("module", "embeddings")])
        for name, each in tables.items():
            each.tick = int(self.trained[name]["tick"])
        if self.first:
            with torch.no_grad():
                assert isinstance(module, RecModel)
                for name, value in module.dense_tensors():
                    value.copy_(self.tensors[f"model.{name}"])
        else:
            values = {name: decode(value, self.tensors) for name, value in self.manifest["values"].items()}
            load_dense_state(module, values | {name: self.tensors[f"model.{name}"] for name in self._dense_names()})
        for name, optimizer in optimizers.items():
            found = self.optimizers[name]
            load_optimizer(found, found["prefix"], self.tensors, optimizer)
        for name, each in (extra_state or {}).items():
            try:
                each.load_state_dict(decode(self.extras[name]["state"], self.tensors))
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"extra_state[{name!r}], a {type(each).__name__}, does not take the state saved in "
                    f"{self.directory}: {error}. Make it as it was made when it was saved."
                ) from error

    def _check_model(self, model: RecModel) -> None:
        saved: dict[str, Any] = {**self.manifest["model"], "features": self.manifest["features"]}
        mine = json.loads(canonical_json({**model.config(), "features": model.spec.to_dict()}))
        differ = [name for name in sorted({*saved, *mine}) if saved.get(name) != mine.get(name)]
        if differ:
            shown = "; ".join(
                f"{name}: saved {saved.get(name)}, given {mine.get(name)}" for name in differ if name != "features"
            )
            raise CheckpointError(
                f"{self.directory} holds another model: {shown or 'its columns or table sizes differ'}. Leave the "
                "model out to build the saved one, or use its own dataset."
            )

    def _check_tables(self, module: nn.Module, *, resuming: bool) -> None:
        trained = trained_in(module)
        self._same_names("EmbeddingTables and TTEmbeddingBag", self.trained, trained)
        for name, saved in self.trained.items():
            mine, kept = trained[name].optimizer, saved["row_optimizer"]
            kinds = None if kept is None else kept["kind"], None if mine is None else mine.kind
            if kinds[0] != kinds[1]:
                raise CheckpointError(
                    f"{self.directory} holds the state of row optimizer {kinds[0]!r}, the model has {kinds[1]!r} in "
                    f"{name!r}. Build {name!r} with the row optimizer that it was trained with."
                )
        entries = {(entry.get("module", "embeddings"), entry["name"]): entry for entry in self.manifest["tables"]}
        found = {(name, table.name): table for name, each in tables_in(module).items() for table in each.stored}
        self._same_names(
            "tables", {f"{name}.{table}".lstrip("."): 0 for name, table in entries},
            {f"{name}.{table}".lstrip("."): 0 for name, table in found},
        )  # fmt: skip
        for key, entry in entries.items():
            sizes = [(one["num_embeddings"], one["embedding_dim"], one["dtype"]) for one in (entry, vars(found[key]))]
            if sizes[0] != sizes[1]:
                saved_as, given = (f"{rows:,} rows of {dim} columns, {dtype}" for rows, dim, dtype in sizes)
                raise CheckpointError(
                    f"table {key[1]!r} has {saved_as} in {self.directory}, but {given} in the module given. {_REBUILD}"
                )
            seed = self.trained[key[0]].get("seed")
            if resuming and entry["dtype"] == "bfloat16" and seed not in (None, tables_in(module)[key[0]].seed):
                raise CheckpointError(
                    f"{key[0]!r} was trained with seed={seed}, by which its bfloat16 rows are rounded, the one given "
                    f"has seed={tables_in(module)[key[0]].seed}. Build it with seed={seed}."
                )

    def _dense_names(self) -> list[str]:
        return [name.removeprefix("model.") for name in self.tensors if name.startswith("model.")]

    def _check_dense(self, module: nn.Module) -> None:
        if self.first:
            assert isinstance(module, RecModel)
            for name, _ in module.dense_tensors():
                if f"model.{name}" not in self.tensors:
                    raise CheckpointError(f"{self.directory}: the dense part lacks the parameter {name!r}.")
            return
        mine, tensors = dense_state(module), dict.fromkeys(self._dense_names())
        self._same_names("parameters and buffers", {**tensors, **self.manifest["values"]}, mine)
        for name in tensors:
            value, shape = mine[name], self.tensors.shape(f"model.{name}")
            if isinstance(value, Tensor) and not is_lazy(value) and tuple(value.shape) != shape:
                raise CheckpointError(
                    f"{name!r} has shape {shape} in {self.directory}, but {tuple(value.shape)} in the module given. "
                    f"{_REBUILD}"
                )

    def _same_names(self, what: str, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
        lacking, more = [name for name in saved if name not in mine], [name for name in mine if name not in saved]
        if lacking or more:
            sides = (("the module given lacks", lacking), ("the checkpoint lacks", more))
            parts = [f"{words} {_names(names)}" for words, names in sides if names]
            raise CheckpointError(
                f"{self.directory} and the module given have different {what}; {'; '.join(parts)}. {_REBUILD} A table "
                "that was a TensorTrain must be one again."
            )

    def _check_extra_state(self, extra_state: Mapping[str, Any]) -> None:
        if lacking := [name for name in extra_state if name not in self.extras]:
            raise CheckpointError(
                f"{self.directory} has no extra state {_names(lacking)}. It has: {_names(self.extras) or 'none'}."
            )
        for name, each in extra_state.items():
            if not self.extras[name]["object"] or not hasattr(each, "load_state_dict"):
                raise CheckpointError(
                    f"extra_state[{name!r}] cannot be filled in place: "
                    + (
                        f"the {type(each).__name__} given has no load_state_dict()."
                        if self.extras[name]["object"]
                        else "it was saved as a value. Leave it out, and take it from the result's extra_state."
                    )
                )

    def _other_settings(self, module: nn.Module) -> Iterator[tuple[str, RowOptimizer]]:
        """Yield the row optimizers that have other settings in the checkpoint than in ``module``."""
        for name, each in trained_in(module).items():
            saved = self.trained[name]["row_optimizer"]
            if each.optimizer is None or canonical_json(each.optimizer.to_dict()) == canonical_json(saved):
                continue
            try:
                yield name, RowOptimizer.from_dict(saved)
            except (ConfigError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"the row optimizer of {name!r} had other settings when it was saved, {saved}, and cannot be made "
                    f"from them ({error}). Build {name!r} with these settings."
                ) from error

    def _load_table(self, entry: Mapping[str, Any], tables: EmbeddingTables) -> None:
        done = 0
        for shard in entry["shards"]:
            if shard["start"] != done:
                raise CheckpointError(
                    f"{self.directory}: table {entry['name']!r} has no rows {done:,} to {shard['start']:,}."
                )
            path = self.directory / shard["file"]
            try:
                with safe_open(path, framework="pt") as file:
                    found = dict(Tensors(file))
            except SafetensorError as error:
                raise CheckpointError(f"{path} cannot be read ({error}).") from error
            tables.write(entry["name"], done, Rows(found.pop("weight"), found))
            done += int(shard["rows"])
        if done != entry["num_embeddings"]:
            raise CheckpointError(
                f"{self.directory}: table {entry['name']!r} has {done:,} rows in its files, the manifest says "
                f"{entry['num_embeddings']:,}."
            )


def _names(names: Collection[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in islice(names, _SHOWN)) + more
