"""Embedding tables that train themselves: lookup in forward, one update per distinct row inside backward.

Legend: B examples, F features, P positions (:mod:`stoker.tables.steps`), D columns, L ids in all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stoker.errors import ConfigError
from stoker.ops import BackendName, Bags
from stoker.ops.reference import bag_lengths
from stoker.ops.select import select_bags
from stoker.optim import RowOptimizer
from stoker.tables.config import Device, HotCold, Strategy, TableConfig, TensorTrain, feature_order
from stoker.tables.group import TableGroup
from stoker.tables.lease import Lease
from stoker.tables.replicas import Replicas
from stoker.tables.side_by_side import columns_of, side_by_side
from stoker.tables.slotted import SlottedRows
from stoker.tables.steps import StepLayout
from stoker.tables.storage import Rows
from stoker.tables.tensor_train import CompressedGroup, stored_tables
from stoker.units import format_size

__all__ = ["EmbeddingTables"]

#: attributes that the constructor makes, which are not copied
_REMADE = ("groups", "_anchor", "_columns", "_group_of", "_layout", "_layouts", "_runs", "_staged")


class _Lookup(torch.autograd.Function):
    """Pooled lookup whose backward updates the rows in place and returns no gradient for them."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        group: TableGroup,
        lease: Lease | None,
        ids: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
    ) -> Tensor:
        ctx.group, ctx.lease = group, lease
        ctx.bags = Bags(ids, offsets, None if weights is None else weights.detach(), group.mean)
        return group.lookup(ctx.bags, lease)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group: TableGroup = ctx.group
        wanted = group.weight_gradient(ctx.bags, grad, ctx.lease) if ctx.needs_input_grad[5] else None
        group.update(ctx.bags, grad, ctx.lease)
        return None, None, None, None, None, wanted


def _strategies(names: Sequence[str], placement: Strategy | Mapping[str, Strategy] | None) -> list[Strategy]:
    """A strategy for each table."""
    if placement is None or isinstance(placement, Strategy):
        found = [placement or Device()] * len(names)
    else:
        if unknown := sorted(set(placement) - set(names)):
            raise ConfigError(f"the placement names {unknown}, but the tables are {', '.join(names)}.")
        found = [placement.get(name, Device()) for name in names]
    for strategy in found:
        if isinstance(strategy, HotCold) and (unknown := sorted(set(strategy.hot_rows) - set(names))):
            raise ConfigError(f"HotCold names hot rows of {unknown}, but the tables are {', '.join(names)}.")
    return found


class EmbeddingTables(nn.Module):
    """Replaces ``nn.EmbeddingBag(sparse=True)`` and its optimizer, for any number of tables at once.

    Rows are not parameters: ``backward`` updates them in place, once per distinct row, with duplicate rows summed in
    order of occurrence. Each call of ``forward`` that is followed by ``backward`` is one step of the row optimizer.
    ``to(device)`` moves them; their type is that of their :class:`TableConfig`, which ``half()``, ``double()`` and
    ``to(dtype)`` leave as it is, with a warning.

    Args:
        tables: the tables. Those with equal ``embedding_dim``, pooling and dtype are kept and worked on together.
        optimizer: the row optimizer (:mod:`stoker.optim`).
        features: order of the features in a batch; None means table by table.
        seed: rows start as a function of (seed, table name, row), whatever the device or placement.
        device: where rows are kept.
        backend: kernels: "auto", "reference", "cpu" (Numba) or "triton".
        include_last_offset: whether ``offsets`` ends with the total, as in ``nn.EmbeddingBag``; batches from
            :mod:`stoker.data` do.
        placement: where the rows lie: one strategy for all tables, or by table name; others lie on the device.
        steps: sequence features that are not pooled, and T, the ids they have at most: such a feature gives T vectors,
            one for each id of its bag. A shorter bag stands at the end, behind vectors of zeros.

    Raises:
        ConfigError: no tables, two tables of one name, a feature named twice, or steps of no feature.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        optimizer: RowOptimizer,
        features: Sequence[str] | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        backend: BackendName = "auto",
        include_last_offset: bool = True,
        placement: Strategy | Mapping[str, Strategy] | None = None,
        steps: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        if not tables:
            raise ConfigError("EmbeddingTables needs at least one TableConfig.")
        if not isinstance(optimizer, RowOptimizer):
            raise ConfigError(
                f"optimizer is {optimizer!r}; rows need one of their own, such as stoker.SGD(lr=0.1), "
                "stoker.RowWiseAdagrad(lr=0.05) or stoker.Adam(lr=0.001).",
                settings=("optimizer",),
            )
        names = [table.name for table in tables]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(f"tables {twice} are named twice. Give every table its own name.")
        self.tables = tuple(tables)
        self.features = feature_order(tables, features)
        self.include_last_offset = include_last_offset
        self.seed = seed
        self.groups: list[TableGroup] = []
        self._layout = StepLayout(self.features, steps or {})
        self._layouts: list[StepLayout | None] = []  # of each group; None where it pools all its features
        self._columns: list[Tensor | None] = []  # features of each group; None means all, in order
        self._anchor = torch.zeros((), requires_grad=True)
        self._staged: dict[int, tuple[Tensor, tuple[Lease | None, ...]]] = {}  # by id of the ids tensor, kept alive
        buckets: dict[tuple[int, str, str, Strategy, str], list[TableConfig]] = {}
        for table, strategy in zip(tables, _strategies(names, placement), strict=True):
            alone = table.name if isinstance(strategy, TensorTrain) else ""  # every table has cores of its own
            buckets.setdefault((table.embedding_dim, table.pooling, table.dtype, strategy, alone), []).append(table)
        for (_, _, _, strategy, alone), members in buckets.items():
            owned = {feature for table in members for feature in table.features}
            mine = [feature for feature in self.features if feature in owned]
            # To a group every step is a feature of its own: kernels and placement need not know of sequences.
            self.groups.append(
                (CompressedGroup if alone else TableGroup)(
                    [replace(table, features=self._layout.names(table.features)) for table in members],
                    self._layout.names(mine),
                    optimizer=optimizer,
                    strategy=strategy,
                    seed=seed,
                    device=torch.device(device),
                    backend=backend,
                )
            )
            self._layouts.append(self._layout.of(mine))
            whole = tuple(mine) == self.features
            self._columns.append(None if whole else torch.tensor([self.features.index(name) for name in mine]))
        self._group_of: dict[str, TableGroup] = {}
        for group in self.groups:
            for name in {table.name for table in (*group.tables, *group.stored)}:
                if name in self._group_of:
                    raise ConfigError(
                        f"{name!r} is a table and a core of another: those of a tensor-train table are named "
                        "<table>.core1 and so on. Rename the table."
                    )
                self._group_of[name] = group
        self._runs = self._find_runs()

    @property
    def steps(self) -> dict[str, int]:
        """Features that are not pooled, and how many steps they have."""
        return dict(self._layout.steps)

    @property
    def positions(self) -> dict[str, slice]:
        """Where each feature lies on the second axis of the [B, P, D] that a call returns."""
        return dict(self._layout.slices)

    @property
    def optimizer(self) -> RowOptimizer:
        """The row optimizer."""
        return self.groups[0].optimizer

    @optimizer.setter
    def optimizer(self, optimizer: RowOptimizer) -> None:
        for group in self.groups:
            group.set_optimizer(optimizer)

    @property
    def device(self) -> torch.device:
        """Where the kernels run."""
        return self.groups[0].storage.weight.device

    @property
    def tick(self) -> int:
        """Row-optimizer steps done so far."""
        return self.groups[0].tick

    @tick.setter
    def tick(self, value: int) -> None:
        for group in self.groups:
            group.tick = value

    def forward(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Look up and pool.

        Args:
            ids: [B, F] with one id a bag, or flat [L] with ``offsets``; int32 or int64, local to each table.
            offsets: [B * F + 1] int64, sample-major: bag ``b * F + f`` is ``ids[offsets[i]:offsets[i + 1]]``.
            weights: [L] (or [B, F]) per-sample weights; sum pooling only. May require a gradient.

        Returns:
            [B, P, D] float32 where all tables share one ``embedding_dim``, else [B, sum of D], in feature order. P is F
            where every feature is pooled; one with ``steps`` has as many places, the newest step in the last.

        Raises:
            IndexError: an id lies outside its table.
            ValueError: shapes that do not fit together, or more ids in a bag than steps.
        """
        offsets = self._check(ids, offsets, weights)
        flat = None if weights is None else weights.reshape(-1)
        pooled: list[Tensor] = []
        staged = self._take_staged(ids)
        for index, group in enumerate(self.groups):
            part = self.lookups(index, ids, offsets, flat)
            bags = Bags(*part, group.mean)
            lease = staged[index] if staged else None
            if lease is None or lease.over:
                lease = group.acquire(bags)
            if torch.is_grad_enabled():
                pooled.append(_Lookup.apply(self._anchor, group, lease, *part))  # type: ignore[no-untyped-call]
            else:
                pooled.append(group.lookup(bags, lease))
                if lease is not None:
                    lease.release(changed=False)
        if len(pooled) == 1:
            return pooled[0]
        return self._join(pooled)

    def lookups(
        self, index: int, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What group ``index`` looks up of a batch: (ids, offsets, flat weights), by position."""
        columns, layout = self._columns[index], self._layouts[index]
        part = (ids, offsets, weights) if columns is None else self._select(columns, ids, offsets, weights)
        return part if layout is None else layout.expand(*part)

    def hand_over(self, ids: Tensor, leases: Sequence[Lease | None]) -> None:
        """The next ``forward`` of this very ``ids`` tensor finds its rows in place (:func:`stoker.stage`).

        Args:
            leases: one for each group; None where the batch is fetched on demand.
        """
        self._staged[id(ids)] = (ids, tuple(leases))

    def _take_staged(self, ids: Tensor) -> tuple[Lease | None, ...]:
        _, leases = self._staged.pop(id(ids), (None, ()))
        for group, lease in zip(self.groups, leases, strict=False):
            if lease is not None and isinstance(group.storage, SlottedRows):
                group.storage.hand_out(lease)
        return leases

    def withdraw(self, ids: Tensor) -> None:
        """The batch of :meth:`hand_over` was not used, or is used up: its rows may leave."""
        for lease in self._take_staged(ids):
            if lease is not None:
                lease.release(changed=False)

    def replicate(self, replicas: Replicas) -> None:
        """Train as one of several replicas: each backward updates the rows of all ranks' batches, on every rank.

        All ranks must call ``forward`` and ``backward`` equally often. A copy of the tables is not a replica.

        Raises:
            ConfigError: the ranks have different rows.
        """
        for table in self.tables:
            _, rows = next(iter(self.read(table.name, chunk_rows=1024)))
            replicas.check_equal(f"table {table.name!r}", rows.weight)
        replicas.check_equal("the number of row updates done", torch.tensor(self.tick, device=self.device))
        for group in self.groups:
            group.replicas = replicas

    def close(self) -> None:
        """Bring all rows home and let go of files and threads. The tables are not used afterwards."""
        for group in self.groups:
            group.storage.close()

    def _check(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor | None:
        count = len(self.features)
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids are {ids.dtype}; they must be int32 or int64.")
        if offsets is None:
            if ids.dim() != 2 or ids.shape[1] != count:
                raise ValueError(
                    f"ids have shape {tuple(ids.shape)}; without offsets they must be [B, {count}], one id for each "
                    f"of the features {', '.join(self.features[:4])}{', ...' if count > 4 else ''}."
                )
        else:
            if ids.dim() != 1:
                raise ValueError(f"ids have shape {tuple(ids.shape)}; with offsets they must be flat, [L].")
            if not self.include_last_offset:
                offsets = torch.cat([offsets, offsets.new_tensor([len(ids)])])
            if (len(offsets) - 1) % count or len(offsets) < 1:
                raise ValueError(
                    f"offsets have {len(offsets)} entries; with {count} features they must have a multiple of {count}, "
                    "plus one for the end (or make the tables with include_last_offset=False)."
                )
            wrong = (offsets[0] != 0) | (offsets[-1] != len(ids)) | (bag_lengths(offsets) < 0).any()
            if bool(wrong | self._layout.too_long(offsets) if self._layout.steps else wrong):  # a GPU waits once
                if not bool(wrong):
                    raise ValueError(self._layout.explain(offsets))
                raise ValueError(
                    f"offsets must rise from 0 to the number of ids, {len(ids)}; they do not. If they leave out the "
                    "end, as nn.EmbeddingBag's do by default, make the tables with include_last_offset=False."
                )
        if weights is not None:
            if weights.numel() != ids.numel():
                raise ValueError(f"{weights.numel()} per-sample weights for {ids.numel()} ids; there must be one each.")
            if any(group.mean for group in self.groups):
                raise ValueError(
                    "per-sample weights need sum pooling, as in nn.EmbeddingBag; a table here pools by mean."
                )
        return offsets

    def _select(
        self, columns: Tensor, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The lookups of some features only."""
        count = len(self.features)
        if offsets is None:
            chosen_weights = None if weights is None else columns_of(weights.view(-1, count), columns).reshape(-1)
            return columns_of(ids, columns), None, chosen_weights
        return select_bags(columns, count, ids, offsets, weights)

    def _find_runs(self) -> list[tuple[int, int, int]]:
        """(group, first of its own positions, the one after the last) for each stretch of the output, in order."""
        group_of = {name: index for index, group in enumerate(self.groups) for name in group.space.features}
        taken = [0] * len(self.groups)
        runs: list[tuple[int, int, int]] = []
        for name in self._layout.names(self.features):
            group = group_of[name]
            first, taken[group] = taken[group], taken[group] + 1
            if runs and runs[-1][0] == group:
                runs[-1] = (group, runs[-1][1], first + 1)
            else:
                runs.append((group, first, first + 1))
        return runs

    def _join(self, pooled: list[Tensor]) -> Tensor:
        """Put the positions of all groups side by side, in batch order."""
        if len({group.dim for group in self.groups}) == 1:
            return side_by_side(self._runs, pooled)
        # Columns instead of positions.
        runs = [
            (group, first * self.groups[group].dim, stop * self.groups[group].dim) for group, first, stop in self._runs
        ]
        return side_by_side(runs, [each.flatten(1) for each in pooled])

    def read(self, table: str, chunk_rows: int = 2**18) -> Iterator[tuple[int, Rows]]:
        """Canonical rows of one table as (first row, :class:`Rows`) chunks; the chunks may be views."""
        return self._group_of[table].read(table, chunk_rows)

    def write(self, table: str, start: int, rows: Rows) -> None:
        """Replace canonical rows of one table from row ``start`` on."""
        self._group_of[table].write(table, start, rows)

    def rows(self, table: str) -> Tensor:
        """A copy of one table's weights [num_embeddings, embedding_dim], for looking at and for tests."""
        return torch.cat([rows.weight.detach().clone() for _, rows in self.read(table)])

    @property
    def stored(self) -> tuple[TableConfig, ...]:
        """What files hold, in the order of the tables: each table, or the cores of one that is compressed."""
        trains = {name: group.strategy for name, group in self._group_of.items()}
        return stored_tables(self.tables, {n: each for n, each in trains.items() if isinstance(each, TensorTrain)})

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for table in self.stored:
            [(_, rows)] = self.read(table.name, table.num_embeddings)
            destination[f"{prefix}{table.name}.weight"] = rows.weight
            for name, tensor in rows.state.items():
                destination[f"{prefix}{table.name}.{name}"] = tensor
        destination[f"{prefix}tick"] = torch.tensor(self.tick)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = {f"{prefix}tick"}
        state = self.optimizer.state
        for table in self.stored:
            group = self._group_of[table.name]
            keys = {name: f"{prefix}{table.name}.{name}" for name in ("weight", *state)}
            known.update(keys.values())
            absent = [key for key in keys.values() if key not in state_dict]
            missing_keys.extend(absent)
            if absent:
                continue
            wanted = (table.num_embeddings, table.embedding_dim)
            weight = state_dict[keys["weight"]]
            if tuple(weight.shape) != wanted:
                error_msgs.append(f"table {table.name!r} has shape {tuple(weight.shape)}, but {wanted} is expected.")
                continue
            group.write(table.name, 0, Rows(weight, {name: state_dict[keys[name]] for name in state}))
        if f"{prefix}tick" in state_dict:
            self.tick = int(state_dict[f"{prefix}tick"])
        else:
            missing_keys.append(f"{prefix}tick")
        unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in known)

    def _made_with(self) -> dict[str, Any]:
        """Arguments that make tables like these."""
        return {
            "tables": self.tables,
            "optimizer": self.optimizer,
            "features": self.features,
            "seed": self.seed,
            "device": self.device,
            "backend": self.groups[0].backend_name,
            "include_last_offset": self.include_last_offset,
            "placement": {table.name: self._group_of[table.name].strategy for table in self.tables},
            "steps": self.steps,
        }

    def _kept(self) -> dict[str, Any]:
        """What a module has beside its rows: hooks, whether it trains, attributes of subclasses."""
        return {name: value for name, value in self.__dict__.items() if name not in _REMADE}

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingTables:
        """Tables with the same rows and state, placed alike; homes are copied chunk by chunk."""
        made: EmbeddingTables = type(self).__new__(type(self))
        memo[id(self)] = made
        EmbeddingTables.__init__(made, **deepcopy(self._made_with(), memo))
        made.__dict__.update(deepcopy(self._kept(), memo))
        for table in self.stored:
            for start, rows in self.read(table.name):
                made.write(table.name, start, rows)
        made.tick = self.tick
        return made

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and ``torch.save(model)``. All rows come into memory; :func:`stoker.save` needs no such room."""
        rows = {name: value.clone() for name, value in self.state_dict().items()}
        return {"made_with": self._made_with(), "kept": self._kept(), "rows": rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        EmbeddingTables.__init__(self, **state["made_with"])
        self.__dict__.update(state["kept"])
        self.load_state_dict(state["rows"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingTables:
        """Follow ``module.to(device)``; the rows keep their own dtype."""
        probes = [fn(torch.empty(0, dtype=group.storage.weight.dtype, device=self.device)) for group in self.groups]
        for group, probe in zip(self.groups, probes, strict=True):
            if probe.dtype != group.storage.weight.dtype:
                warnings.warn(
                    f"the rows of EmbeddingTables stay {group.tables[0].dtype}: half(), double() and to(dtype) change "
                    "the rest of a model only. Give TableConfig the dtype that the rows are to have.",
                    stacklevel=3,
                )
                break
        device = probes[0].device
        if device != self.device:
            for group in self.groups:
                group.to(device)
            self._anchor = torch.zeros((), requires_grad=True, device=device)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Tables, rows and bytes for ``print(model)``."""
        rows = sum(table.num_embeddings for table in self.tables)
        size = format_size(sum(group.storage.fast_bytes for group in self.groups))
        return f"{len(self.tables)} tables, {rows:,} rows, {size} with state, {self.optimizer.kind}"
