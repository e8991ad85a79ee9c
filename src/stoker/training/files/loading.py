"""Load a checkpoint into a model or a module: first compare everything, then copy it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stoker.base.errors import CheckpointError, ConfigError, errors_as
from stoker.base.files import canonical_json
from stoker.base.progress import Counted
from stoker.base.units import listed
from stoker.dataset.spec import FeatureSpec
from stoker.models import MODELS, RecModel
from stoker.ops import BackendName
from stoker.optim import RowOptimizer
from stoker.tables.ranks.divided import DividedGroup
from stoker.tables.storage import Rows
from stoker.training.files import module_state
from stoker.training.files.checkpoint import DENSE, Checkpoint, Link, M, read_manifest, reading, restart_changes, verify
from stoker.training.files.module_state import Optimizers
from stoker.training.files.rundir import find_checkpoint, unknown_model, whole_checkpoints
from stoker.training.files.segments import SavedTable
from stoker.training.ranks.first import each_on_first, is_first, on_first
from stoker.training.ranks.sharded import ShardedLoss

if TYPE_CHECKING:
    from stoker.tables import Strategy


_REBUILD = "Build the module as it was built when it was saved."
_SHOWN = 5  # names in a message
_BLOCK = 2**18  # rows that are written at a time


class Resumable(Protocol):
    """A stream of batches that can continue at a saved position."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the saved position."""


@overload
def load(
    directory: str | Path,
    into: None = None,
    optimizer: Optimizers = None,
    stream: Resumable | None = None,
    *,
    extra_state: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    backend: BackendName = "auto",
    placement: Strategy | Mapping[str, Strategy] | None = None,
) -> Checkpoint[RecModel]: ...


@overload
def load(
    directory: str | Path,
    into: M,
    optimizer: Optimizers = None,
    stream: Resumable | None = None,
    *,
    extra_state: Mapping[str, Any] | None = None,
) -> Checkpoint[M]: ...


def load(
    directory: str | Path,
    into: nn.Module | None = None,
    optimizer: Optimizers = None,
    stream: Resumable | None = None,
    *,
    extra_state: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    backend: BackendName = "auto",
    placement: Strategy | Mapping[str, Strategy] | None = None,
) -> Checkpoint[Any]:
    """Load a checkpoint, after a check of every file against its sha256.

    Nothing is changed if the module, an optimizer, the stream or extra state does not fit. If rows of ``into`` are
    divided among ranks, all of them call this, and the first one reads. With ``optimizer`` or
    ``extra_state`` training is resumed: torch's generators get their saved state too, and in a module of your own the
    row optimizers get their saved learning rates and other settings.

    Args:
        directory: the checkpoint, or a run directory, whose best checkpoint is loaded.
        into: the module to load into, wherever its rows are; None builds the saved :class:`RecModel`.
        optimizer: the optimizers to load into, in the form in which they were saved.
        stream: the batches; they continue after the last trained batch.
        extra_state: objects with ``load_state_dict()`` to load into, by their saved names. Other saved values are in
            ``extra_state`` of the result.
        device: of a new model.
        backend: kernels of a new model.
        placement: of the rows of a new model; None: all on the device.

    Raises:
        CheckpointError: a file is missing or damaged, or a module, optimizer, stream or extra state differs from the
            saved one. The message names the difference.

    >>> from stoker.testing import make_dataset
    >>> data = make_dataset("data", rows=1000)
    >>> result = stoker.train(data, out="run", batch_size=64, steps=10, display="quiet")
    >>> found = stoker.load("run")
    >>> found.model.name, found.step
    ('dlrm', 10)
    >>> optimizer = torch.optim.Adam(found.model.dense_parameters(), fused=True)
    >>> stream = data.train.batches(64, seed=0)
    >>> stoker.load("run", found.model, optimizer, stream).step, stream.step  # to continue in your own loop
    (10, 10)
    """
    ranks = None if into is None else module_state.ranks_of(module_state.unwrap(into))
    directory, manifest, dense = on_first(
        ranks, "read a checkpoint", lambda: _open(directory, whole=into is None, shared=ranks is not None)
    )
    if into is None:
        kind = saved_model(directory, manifest)
        module: Any = MODELS[kind].from_config(
            FeatureSpec.from_dict(manifest["features"]), manifest["model"],
            optimizer=RowOptimizer.from_dict(manifest["row_optimizer"]), device=device, backend=backend,
            placement=placement,
        )  # fmt: skip
        if (shards := int(manifest.get("extra", {}).get("settings", {}).get("shards", 1))) > 1:
            module.embeddings.shards = shards  # so that scores are those of the run, to the bit
            ShardedLoss(module)
    else:
        module = module_state.unwrap(into)
    copied = None if is_first(ranks) else dense
    kept = _load_into(module, directory, manifest, optimizer, stream, extra_state, dense=copied)
    return Checkpoint(path=directory, manifest=manifest, model=module if into is None else into, extra_state=kept)


def load_larger(
    directory: Path, model: RecModel, optimizer: torch.optim.Optimizer, stream: Resumable | None = None
) -> None:
    """Load a checkpoint into a model whose tables may have more rows, as :func:`load` does for equal ones.

    The new rows start as copies of row 0, which their ids had until then, with state of zero. They count as changed.
    """
    manifest = read_manifest(directory)
    verify(directory)
    _load_into(model, directory, manifest, optimizer, stream, None, larger=True)


def _load_into(
    module: nn.Module, directory: Path, manifest: Mapping[str, Any], optimizer: Optimizers, stream: Resumable | None,
    extra_state: Mapping[str, Any] | None, *, larger: bool = False, dense: bytes | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Load a checkpoint that was verified, whose file ``dense`` has, if it is not here; return its extra state."""
    optimizers = module_state.named_optimizers(optimizer)
    resuming = optimizer is not None or extra_state is not None
    with ExitStack() as stack:
        links = stack.enter_context(reading(directory, manifest)) if dense is None else []
        tensors = _FileTensors(stack.enter_context(_dense_file(directory / DENSE, dense)))
        saved = _Saved(directory, manifest, tensors, module, links, larger=larger)
        saved.check(optimizers, extra_state, resuming=resuming)
        if stream is not None:  # first: it may refuse its position
            if manifest["stream"] is None:
                raise CheckpointError(f"{directory} was saved without a stream, so it has no data position.")
            stream.load_state_dict(manifest["stream"])
        saved.fill(optimizers, extra_state or {})
        if resuming:
            torch.set_rng_state(tensors["generator.cpu"])
            if (on := module_state.device_of(module)).type == "cuda" and "generator.cuda" in tensors:
                torch.cuda.set_rng_state(tensors["generator.cuda"], on)
        restart_changes(module, directory)
        saved.mark_new_rows()
        return {name: module_state.decode(entry["state"], tensors) for name, entry in saved.extras.items()}


def _open(directory: str | Path, *, whole: bool, shared: bool) -> tuple[Path, dict[str, Any], bytes | None]:
    """Check a checkpoint; return its path, its manifest, and its dense part if it is ``shared`` with other ranks."""
    path = find_checkpoint(directory)
    manifest = read_manifest(path)
    try:
        verify(path)
    except CheckpointError as error:
        if not whole:
            raise
        raise CheckpointError(f"{error} {whole_checkpoints(path)}") from error
    return path, manifest, (path / DENSE).read_bytes() if shared else None


@contextmanager
def _dense_file(path: Path, data: bytes | None) -> Iterator[Any]:
    """Open the file of the dense part: at ``path``, or a copy of ``data``, which the first rank has read."""
    with ExitStack() as stack:
        if data is not None:
            path = Path(stack.enter_context(TemporaryDirectory())) / DENSE
            path.write_bytes(data)
        yield stack.enter_context(safe_open(path, framework="pt"))


@contextmanager
def dense_part(links: Sequence[Link], module: nn.Module) -> Iterator[Callable[[], None]]:
    """Open all but the rows of a checkpoint, whose files were checked; yield what copies it into a module.

    The module has loaded one like it. The files may be deleted after this was entered.
    """
    path, manifest, _ = links[-1]
    with safe_open(path / DENSE, framework="pt") as file:
        saved = _Saved(path, manifest, _FileTensors(file), module_state.unwrap(module), links)
        saved.raw_ids = {name: {key: [*parts] for key, parts in saved.read_raw_ids(name)} for name in saved.tables}
        yield saved.fill_dense


def saved_model(directory: Path, manifest: Mapping[str, Any]) -> str:
    """Return the name of the :class:`RecModel` in a checkpoint."""
    if manifest["model"] is None:
        raise CheckpointError(
            f"{directory} holds a {manifest['class']}, a module that only your own code can build. Build it, and give "
            f"it: stoker.load({str(directory)!r}, into=module)."
        )
    kind = str(manifest["model"]["model"])
    if kind not in MODELS:
        raise CheckpointError(f"{directory} holds a model {kind!r}, unknown here. {unknown_model(directory, kind)}")
    return kind


class _FileTensors(Mapping[str, Tensor]):
    """The tensors of an open file, read when they are needed."""

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
        """Return the shape of a tensor without reading it."""
        return tuple(self.file.get_slice(name).get_shape())


class _Saved:
    """The contents of a checkpoint of either format, and the module to load it into."""

    def __init__(
        self, directory: Path, manifest: Mapping[str, Any], tensors: _FileTensors, module: nn.Module,
        links: Sequence[Link], *, larger: bool = False,
    ) -> None:  # fmt: skip
        self.directory, self.manifest, self.tensors, self.module = directory, manifest, tensors, module
        self.chain = links  # the checkpoints that it consists of; only the first of several ranks has them
        # of tables that grow, where they were read before
        self.raw_ids: dict[str, Mapping[tuple[str, bool], Iterable[Tensor]]] = {}
        self.mine, self.tables = module_state.trained_in(module), module_state.tables_in(module)
        self.first = "trained" not in manifest
        self.entries = manifest["tables"]  # as they were saved
        if larger:
            self.manifest = self._enlarged(manifest)
        self.trained: dict[str, Any] = manifest.get("trained", {})
        self.optimizers: dict[str, Any] = manifest.get("optimizers", {})
        self.extras: dict[str, Any] = manifest.get("extra_state", {})
        if self.first:
            self.trained = {"embeddings": {name: manifest[name] for name in ("row_optimizer", "tick")}}
            single = manifest["dense_optimizer"]
            self.optimizers = {} if single is None else {"optimizer": {"prefix": "optimizer", **single}}
        self.dense = [name.removeprefix("model.") for name in tensors if name.startswith("model.")]
        self.values: dict[str, Any] = manifest.get("values", {})  # of the dense part, all but tensors
        self.settings: dict[str, RowOptimizer] = {}  # saved row optimizers whose settings differ from the module's

    def check(
        self, optimizers: Mapping[str, torch.optim.Optimizer], extra_state: Mapping[str, Any] | None, *, resuming: bool
    ) -> None:
        """Check that the module and all arguments fit the checkpoint, before anything is changed."""
        if self.manifest["model"] is not None and isinstance(self.module, RecModel):
            self._check_model(self.module)
        elif self.first:
            raise CheckpointError(
                f"{self.directory} holds a model {self.manifest['model']['model']!r}, but the module given is a "
                f"{type(self.module).__name__}. Leave it out to build the saved model."
            )
        self._check_tables(resuming=resuming)
        self._check_dense()
        if resuming and not self.first:
            self.settings = dict(self._other_settings())
        if optimizers and not self.optimizers:
            raise CheckpointError(
                f"{self.directory} was saved without a dense optimizer, so it has no state for one. Load without one."
            )
        if optimizers and set(optimizers) != set(self.optimizers):
            raise CheckpointError(
                f"{self.directory} holds the state of the optimizers {_names(self.optimizers)}; given are "
                f"{_names(optimizers)}. Give all of them in the form in which they were saved, a dict with these names."
            )
        for name, optimizer in optimizers.items():
            what = f"the state of optimizer {name!r} in {self.directory}"
            module_state.check_optimizer(what, self.optimizers[name], optimizer, self.module)
        self._check_extra_state(extra_state or {})
        left = [name for name, entry in self.extras.items() if entry["object"] and name not in (extra_state or {})]
        if left and (extra_state or (optimizers and extra_state is None)):
            raise CheckpointError(
                f"{self.directory} also holds extra state {_names(left)}, without which training would continue "
                "differently. Give those objects too, or extra_state={} to continue without any."
            )

    def fill(self, optimizers: Mapping[str, torch.optim.Optimizer], extra_state: Mapping[str, Any]) -> None:
        """Copy everything into the module and the arguments, after :meth:`check`."""
        for name, row_optimizer in self.settings.items():
            self.mine[name].optimizer = row_optimizer
        with Counted("reading rows", sum(int(entry["num_embeddings"]) for entry in self.entries), "rows") as counted:
            for entry in self.entries:
                self._load_table(entry, counted)
        self.fill_dense()
        for name, optimizer in optimizers.items():
            found = self.optimizers[name]
            module_state.load_optimizer(found, found["prefix"], self.tensors, optimizer)
        for name, each in extra_state.items():
            what = f"extra_state[{name!r}], a {type(each).__name__}, refuses the state saved in {self.directory}"
            remedy, kinds = "Make it as it was made when it was saved.", (KeyError, RuntimeError, TypeError, ValueError)
            with errors_as(CheckpointError, what, remedy, kinds):
                each.load_state_dict(module_state.decode(self.extras[name]["state"], self.tensors))

    def fill_dense(self) -> None:
        """Copy what is neither rows nor optimizers: parameters, buffers and counts of updates."""
        for name, tables in self.tables.items():
            tables.tick = int(self.trained[name]["tick"])
            if tables.raw is not None:
                clock = next(entry["clock"] for entry in self._entries_of(name) if "clock" in entry)
                tables.raw.load(clock, self.raw_ids.get(name, dict(self.read_raw_ids(name))))
        if self.first:
            assert isinstance(self.module, RecModel)
            with torch.no_grad():
                for name, value in self.module.dense_tensors():
                    value.copy_(self.tensors[f"model.{name}"])
        else:
            values = {name: module_state.decode(value, self.tensors) for name, value in self.values.items()}
            module_state.load_dense_state(
                self.module, values | {name: self.tensors[f"model.{name}"] for name in self.dense}
            )

    def _check_model(self, model: RecModel) -> None:
        saved: dict[str, Any] = {**self.manifest["model"], "features": self.manifest["features"]}
        mine = json.loads(canonical_json({**model.config(), "features": model.spec.to_dict()}))
        if differ := [name for name in sorted({*saved, *mine}) if saved.get(name) != mine.get(name)]:
            shown = "; ".join(
                f"{name}: saved {saved.get(name)}, given {mine.get(name)}" for name in differ if name != "features"
            )
            raise CheckpointError(
                f"{self.directory} holds another model: {shown or 'its columns or table sizes differ'}. Leave the "
                "model out to build the saved one, or use its own dataset."
            )

    def _check_tables(self, *, resuming: bool) -> None:
        self._same_names("EmbeddingTables and TTEmbeddingBag", self.trained, self.mine)
        for name, saved in self.trained.items():
            mine, kept = self.mine[name].optimizer, saved["row_optimizer"]
            kinds = None if kept is None else kept["kind"], None if mine is None else mine.kind
            if kinds[0] != kinds[1]:
                raise CheckpointError(
                    f"{self.directory} holds the state of row optimizer {kinds[0]!r}, the model has {kinds[1]!r} in "
                    f"{name!r}. Build {name!r} with the row optimizer that it was trained with."
                )
        entries = {(entry.get("module", "embeddings"), entry["name"]): entry for entry in self.manifest["tables"]}
        found = {(name, table.name): table for name, each in self.tables.items() for table in each.stored}
        names = [[f"{name}.{table}".lstrip(".") for name, table in keys] for keys in (entries, found)]
        self._same_names("tables", *names)
        for key, entry in entries.items():
            sizes = [(one["num_embeddings"], one["embedding_dim"], one["dtype"]) for one in (entry, vars(found[key]))]
            if sizes[0] != sizes[1]:
                saved_as, given = (f"{rows:,} rows of {dim} columns, {dtype}" for rows, dim, dtype in sizes)
                raise CheckpointError(
                    f"table {key[1]!r} has {saved_as} in {self.directory}, but {given} in the module given. {_REBUILD}"
                )
            if ("clock" in entry) != (found[key].grow is not None):
                kinds = "grows", "does not"
                first, second = kinds if "clock" in entry else reversed(kinds)
                raise CheckpointError(
                    f"table {key[1]!r} {first} in {self.directory}, but {second} in the module given. {_REBUILD}"
                )
            seed, own = self.trained[key[0]].get("seed"), self.tables[key[0]].seed
            does = "rows of new ids are drawn" if "clock" in entry else "its bfloat16 rows are rounded"
            if resuming and ("clock" in entry or entry["dtype"] == "bfloat16") and seed not in (None, own):
                raise CheckpointError(
                    f"{key[0]!r} was trained with seed={seed}, by which {does}, but the module "
                    f"given has seed={own}. Build it with seed={seed}."
                )

    def _check_dense(self) -> None:
        mine: dict[str, Any] = module_state.dense_state(self.module)
        if self.first:
            assert isinstance(self.module, RecModel)
            mine = dict(self.module.dense_tensors())
        self._same_names("parameters and buffers", [*self.dense, *self.values], mine)
        for name in self.dense:
            value, shape = mine[name], self.tensors.shape(f"model.{name}")
            if isinstance(value, Tensor) and not is_lazy(value) and tuple(value.shape) != shape:
                raise CheckpointError(
                    f"{name!r} has shape {shape} in {self.directory}, but {tuple(value.shape)} in the module given. "
                    f"{_REBUILD}"
                )

    def _same_names(self, what: str, saved: Collection[str], mine: Collection[str]) -> None:
        lacking, more = [name for name in saved if name not in mine], [name for name in mine if name not in saved]
        if lacking or more:
            sides = (("the module given lacks", lacking), ("the checkpoint lacks", more))
            parts = [f"{words} {_names(names)}" for words, names in sides if names]
            raise CheckpointError(
                f"{self.directory} and the module given have different {what}; {'; '.join(parts)}. {_REBUILD} A table "
                "that was a TensorTrain must be a TensorTrain again."
            )

    def _check_extra_state(self, extra_state: Mapping[str, Any]) -> None:
        if lacking := [name for name in extra_state if name not in self.extras]:
            raise CheckpointError(
                f"{self.directory} has no extra state {_names(lacking)}. It has: {_names(self.extras) or 'none'}."
            )
        for name, each in extra_state.items():
            if not self.extras[name]["object"]:
                problem = "it was saved as a value. Leave it out, and take it from the result's extra_state."
            elif not hasattr(each, "load_state_dict"):
                problem = f"the {type(each).__name__} given has no load_state_dict()."
            else:
                continue
            raise CheckpointError(f"extra_state[{name!r}] cannot be filled in place: {problem}")

    def _other_settings(self) -> Iterator[tuple[str, RowOptimizer]]:
        """Yield the saved row optimizers whose settings differ from those of the module."""
        for name, each in self.mine.items():
            saved = self.trained[name]["row_optimizer"]
            if each.optimizer is None or canonical_json(each.optimizer.to_dict()) == canonical_json(saved):
                continue
            what = f"the row optimizer of {name!r} was saved with other settings, {saved}, and cannot be made from them"
            remedy, kinds = f"Build {name!r} with these settings.", (ConfigError, KeyError, TypeError)
            with errors_as(CheckpointError, what, remedy, kinds):
                yield name, RowOptimizer.from_dict(saved)

    def _load_table(self, entry: Mapping[str, Any], counted: Counted) -> None:
        tables, name = self.tables[entry.get("module", "embeddings")], entry["name"]
        group = tables.group_of[name]
        if not isinstance(group, DividedGroup):

            def saved() -> Iterator[tuple[int, Rows]]:
                return SavedTable(self.chain, entry).chunks()

            whole = on_first(tables.ranks, f"read {name!r}", lambda: list(saved())) if tables.divided else saved()
            for start, rows in whole:
                tables.write(name, start, rows)
                counted.add(len(rows.weight))
            for start, stop in self._new_rows(entry):
                row = group.gather(name, np.zeros(stop - start, np.int64))
                state = {each: torch.zeros_like(value) for each, value in row.state.items()}
                tables.write(name, start, Rows(row.weight, state))
            return
        kept: list[Rows] = []  # of the first rank

        def starts() -> Iterator[int]:
            for start, rows in SavedTable(self.chain, entry).chunks():
                kept.append(rows)
                yield start

        for begin in each_on_first(tables.ranks, f"read table {name!r}", starts):
            counted.add(len(kept[0].weight) if kept else 0)
            group.spread(name, begin, kept.pop() if kept else None)

    def _new_rows(self, entry: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
        """Yield blocks of the rows of a table that the saved one did not have."""
        stored = self.tables[entry.get("module", "embeddings")].stored
        last = next(table.num_embeddings for table in stored if table.name == entry["name"])
        for start in range(int(entry["num_embeddings"]), last, _BLOCK):
            yield start, min(start + _BLOCK, last)

    def mark_new_rows(self) -> None:
        """Note the rows that the checkpoint does not have as changed since."""
        for entry in self.entries:
            if (changes := self.tables[entry.get("module", "embeddings")].changes) is not None:
                for start, stop in self._new_rows(entry):
                    changes.write(entry["name"], start, stop)

    def _enlarged(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the manifest as if the tables had the rows of the module's, where these are more."""
        found = {(name, table.name): table for name, each in self.tables.items() for table in each.stored}

        def more(entry: Mapping[str, Any]) -> dict[str, Any]:
            mine = found.get((entry.get("module", "embeddings"), entry["name"]))
            rows = int(entry["num_embeddings"])
            return {**entry, "num_embeddings": rows if mine is None else max(rows, mine.num_embeddings)}

        tables = [more(entry) for entry in manifest["tables"]]
        features = dict(manifest["features"])
        sizes = {entry["name"]: entry["num_embeddings"] for entry in tables}
        features["num_embeddings"] = {name: sizes.get(name, rows) for name, rows in features["num_embeddings"].items()}
        return {**manifest, "tables": tables, "features": features}

    def read_raw_ids(self, module: str) -> Iterator[tuple[tuple[str, bool], Iterable[Tensor]]]:
        """Yield the entries of raw ids of the tables that grow, by (table, whether they wait)."""
        tables = self.tables[module]
        for entry in self._entries_of(module):
            for waiting in (False, True) if "clock" in entry else ():
                parts = partial(self._raw_ids, entry, waiting)
                ranks, name = tables.ranks if tables.divided else None, entry["name"]
                yield (name, waiting), each_on_first(ranks, f"read the raw ids of table {name!r}", parts)

    def _raw_ids(self, entry: Mapping[str, Any], waiting: bool) -> Iterator[Tensor]:
        return SavedTable(self.chain, entry).raw_ids(waiting=waiting)

    def _entries_of(self, module: str) -> list[Any]:
        return [each for each in self.manifest["tables"] if each.get("module", "embeddings") == module]


def _names(names: Collection[str]) -> str:
    return listed([repr(name) for name in names], _SHOWN)
