"""Copies of tables: ``state_dict``, ``deepcopy``, pickle. All rows are in memory then; ``stoker.save`` needs less."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from stoker.base.errors import CheckpointError, ConfigError
from stoker.optim import RowOptimizer
from stoker.tables.config import TableConfig
from stoker.tables.group import TableGroup
from stoker.tables.growing.ids import GrowingIds
from stoker.tables.stepping import RowStepper
from stoker.tables.storage import Rows

#: attributes that the constructor creates, which are not copied
_REMADE = (
    "groups", "number", "splitter", "ranks", "raw", "_births", "_joint", "_copied", "group_of", "_staged", "_stepper",
    "_layout", "changes", "_handed", "__weakref__",
)  # fmt: skip
_CLOCK, _ENTRIES = "clock", ("raw_ids", "waiting")  # of growing tables


class GroupByTable(dict[str, TableGroup]):
    """The group of each table, by its name."""

    def __missing__(self, name: str) -> TableGroup:
        raise ConfigError(f"{name!r} is not a table; there are {', '.join(sorted(self))}.")


class CopiedTables(nn.Module):
    """The base of :class:`stoker.EmbeddingTables` that copies them."""

    raw: GrowingIds | None
    handle: nn.Parameter
    tick: int
    groups: list[TableGroup]
    _copied: int | None
    group_of: GroupByTable
    _stepper: RowStepper
    _handed: Sequence[tuple[Tensor, int]] = ()  # tensors with the versions of copies in the last state_dict

    if TYPE_CHECKING:  # of the subclass

        @property
        def optimizer(self) -> RowOptimizer: ...
        @property
        def stored(self) -> tuple[TableConfig, ...]: ...
        def read(self, table: str, chunk_rows: int = ...) -> Iterator[tuple[int, Rows]]: ...
        def write(self, table: str, start: int, rows: Rows | Tensor) -> None: ...

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.handle.is_shared()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.handle.is_cpu and self.handle.is_shared() and not before:
            raise ConfigError(
                "share_memory() shares parameters among processes, but the rows of EmbeddingTables are not parameters: "
                "each process would train rows of its own. Train on several threads of a process, or on ranks "
                "(tables.replicate)."
            )
        return self

    def _replicate_for_data_parallel(self) -> Self:
        raise ConfigError(
            "nn.DataParallel copies a model to each GPU for every batch, but rows of EmbeddingTables are in one place. "
            "Start a process for each GPU and use DistributedDataParallel with tables.replicate(stoker.Replicas())."
        )

    @abstractmethod
    def _made_with(self) -> dict[str, Any]:
        """Return the constructor arguments of these tables."""

    @abstractmethod
    def _make(self, **arguments: Any) -> None:
        """Call the constructor of the tables, also for a subclass with another one."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # parameters and buffers of a subclass
        destination.pop(f"{prefix}handle", None)
        copies: list[Tensor] = []
        for table in self.stored:
            [(_, rows)] = self.read(table.name, table.num_embeddings)
            destination[f"{prefix}{table.name}.weight"] = rows.weight
            for name, tensor in rows.state.items():
                destination[f"{prefix}{table.name}.{name}"] = tensor
            own = self.group_of[table.name].place(table.name)[0].weight.untyped_storage().data_ptr()
            if rows.weight.untyped_storage().data_ptr() != own:
                copies += [each for each in rows.tensors if not each.is_inference()]
        # It shares their versions, not their memory.
        seen = [each.detach().set_(each.new_empty(0).untyped_storage()) for each in copies]
        self._handed = [(each, each._version) for each in seen]
        destination[f"{prefix}tick"] = torch.tensor(self.tick, device="cpu")
        if self.raw is not None:
            destination[f"{prefix}{_CLOCK}"] = torch.tensor(self.raw.clock, device="cpu")
            for name in self.raw.names:
                for waiting, key in enumerate(_ENTRIES):
                    none = torch.empty(0, 5, dtype=torch.int64, device="cpu")
                    parts = self.raw.read(name, waiting=bool(waiting))
                    destination[f"{prefix}{name}.{key}"] = torch.cat([none, *parts])

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        absent_here: list[str] = []
        self._handed = ()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, absent_here, [], error_msgs)
        missing_keys.extend(key for key in absent_here if key != f"{prefix}handle")
        known = {f"{prefix}tick", *(f"{prefix}{name}" for name in (*self._parameters, *self._buffers))}
        state = self.optimizer.state
        for table in self.stored:
            keys = {name: f"{prefix}{table.name}.{name}" for name in ("weight", *state)}
            known.update(keys.values())
            absent = [key for key in keys.values() if key not in state_dict]
            missing_keys.extend(absent)
            if keys["weight"] in absent:
                continue
            own = next(self.read(table.name, 1))[1]  # a row
            given = {"weight": own.weight, **({} if absent else own.state)}
            for name, of_own in given.items():
                shape, wanted = tuple(state_dict[keys[name]].shape), (table.num_embeddings, *of_own.shape[1:])
                if shape != wanted:
                    what = "" if name == "weight" else f": its {name}"
                    error_msgs.append(f"table {table.name!r}{what} has shape {shape}, but {wanted} is expected.")
                    break
            else:
                weight = state_dict[keys["weight"]]
                rows = Rows(weight, {name: state_dict[keys[name]] for name in state}) if not absent else weight
                self.write(table.name, 0, rows)  # weights alone keep the state, as with strict=False in torch
        if f"{prefix}tick" in state_dict:
            self.tick = int(state_dict[f"{prefix}tick"])
        else:
            missing_keys.append(f"{prefix}tick")
        if self.raw is not None:
            both = enumerate(_ENTRIES)
            places = {(name, bool(w)): f"{prefix}{name}.{key}" for w, key in both for name in self.raw.names}
            known.update((clock := f"{prefix}{_CLOCK}", *places.values()))
            if absent := [key for key in (clock, *places.values()) if key not in state_dict]:
                missing_keys.extend(absent)
                if any(f"{prefix}{name}.weight" in state_dict for name in self.raw.names):
                    error_msgs.append("rows of tables that grow need their raw ids, or they would be of other ids.")
            else:
                found = {of: state_dict[key] for of, key in places.items()}
                try:
                    self.raw.load(state_dict[clock].tolist(), {of: iter(t.split(2**20)) for of, t in found.items()})
                except CheckpointError as error:
                    error_msgs.append(str(error))
        parts = tuple(f"{prefix}{name}." for name in self._modules)
        unexpected_keys.extend(
            key for key in state_dict if key.startswith(prefix) and key not in known and not key.startswith(parts)
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy rows, optimizer state and step from ``state_dict``, as :meth:`torch.nn.Module.load_state_dict`.

        Raises:
            RuntimeError: keys or shapes differ (keys only if ``strict``); the message says what to do, if it is known.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            raise RuntimeError("\n\t".join(filter(None, (str(error), self._remedy(state_dict))))) from None

    def _remedy(self, state_dict: Mapping[str, Any]) -> str:
        """Return what to do with a state that is not of these tables with their optimizer; "" if nothing is known."""
        names = [table.name for table in self.stored]
        weights = [key for key in state_dict if key.endswith("weight")]
        found = {key.removeprefix(f"{name}.") for name in names for key in state_dict if key.startswith(f"{name}.")}
        saved, own = found - {"weight", *_ENTRIES}, set(self.optimizer.state)
        if "weight" in found and saved != own:
            of = ", ".join(sorted(saved)) or "nothing"
            return (
                f"the rows were saved by an optimizer that keeps {of}, and {type(self.optimizer).__name__} keeps "
                f"{', '.join(sorted(own)) or 'nothing'}. Make the tables with that optimizer, or take the weights "
                f"alone: tables.write({names[0]!r}, 0, state[{names[0] + '.weight'!r}])."
            )
        if weights and "weight" not in found:
            return (
                f"none of the weights ({', '.join(weights[:3])}) is of a table here ({', '.join(names[:3])}). Write "
                f"those of an nn.EmbeddingBag: tables.write({names[0]!r}, 0, state[{weights[0]!r}])."
            )
        return ""

    def check_copy(self) -> None:
        """Raise an error for a copy whose parameters were averaged: its rows were not."""
        self._check_handed()
        if self._copied == self.tick and bool((self.handle.detach() != 0).any()):
            raise ConfigError(
                "the parameters of this copy of a model were averaged or replaced (AveragedModel, SWA, EMA), but rows "
                "of EmbeddingTables are not parameters and stayed as they were when the copy was made. Average the "
                "dense part alone, or copy the rows of the model that trains with load_state_dict."
            )

    def _check_handed(self) -> None:
        """Raise an error if a loop writes into the last ``state_dict``, whose tensors are no rows."""
        if self._handed and any(seen._version != version for seen, version in self._handed):
            self._handed = ()
            raise ConfigError(
                f"a tensor of state_dict() was changed in place, and the rows of {self._stepper.name} stayed as they "
                "were: rows that are not on the device are copies there. Give the changed state to load_state_dict(); "
                "or, if the model is to stay as it is, change copies: {k: v.clone() for k, v in state.items()}."
            )

    def __copy__(self) -> Self:
        raise ConfigError(
            f"copy.copy of a module shares its parameters, but a copy of {self._stepper.name} would have rows of its "
            "own. Use the same tables in both places, or take copy.deepcopy."
        )

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        if name == "weight":
            first = self.stored[0].name
            raise AttributeError(
                f"{type(self).__name__} has no 'weight': rows of several tables are no parameter. Read them with "
                f"tables.rows({first!r}), and write them with tables.write({first!r}, 0, rows)."
            )
        return super().__getattr__(name)

    def _kept(self) -> dict[str, Any]:
        """Return the state of the module without its rows: hooks, train mode, attributes of subclasses."""
        return {name: value for name, value in self.__dict__.items() if name not in _REMADE}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the tables with rows, state and placement; backing stores are copied chunk by chunk."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made._make(**deepcopy(self._made_with(), memo))
        made.__dict__.update(deepcopy(self._kept(), memo))
        for table in self.stored:
            for start, rows in self.read(table.name):
                made.write(table.name, start, rows)
        made.tick = self.tick
        if self.raw is not None and made.raw is not None:
            both = [(name, waiting) for name in self.raw.names for waiting in (False, True)]
            made.raw.load(self.raw.clock, {of: self.raw.read(of[0], waiting=of[1]) for of in both})
        made._copied = made.tick
        made._stepper.scale, made._stepper.checked = self._stepper.scale, self._stepper.checked
        with torch.no_grad():
            made.handle.zero_()  # an average with another handle would show
        made.handle.grad = None
        made._stepper.keep(made.handle)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and ``torch.save``: all rows, in memory. :func:`stoker.save` needs less."""
        rows = {name: value.clone() for name, value in self.state_dict().items()}
        if (starting := get_spawning_popen()) is not None:  # the rows travel in shared memory, which must outlive this
            vars(starting).setdefault("rows_of_tables", []).append(rows)
        steps = {"scale": self._stepper.scale, "checked": self._stepper.checked}
        return {"made_with": self._made_with(), "kept": self._kept(), "rows": rows, "steps": steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._make(**state["made_with"])
        self.__dict__.update(state["kept"])
        self._stepper.keep(self.handle)
        vars(self._stepper).update(state.get("steps", {}))
        self.load_state_dict(state["rows"])
