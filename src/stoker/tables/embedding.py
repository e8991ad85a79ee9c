"""Embedding tables with their own optimizer: lookup in forward, one update per distinct row after backward.

Legend: B examples, F features, P positions (:mod:`stoker.tables.lookups`), D columns, L ids in all.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.base.settings import method_with_arguments_of
from stoker.base.units import format_size, plural
from stoker.dataset.batch import as_tensor
from stoker.ops import Bags
from stoker.ops.tree import Shards, check_shards
from stoker.optim import RowOptimizer
from stoker.tables.arguments import TablesArguments
from stoker.tables.autograd import Forward, Gradient, Lookup, check_export, check_modes, compiled_lookup, register
from stoker.tables.changes import ChangedRows
from stoker.tables.compressed.tensor_train import CompressedGroup, stored_tables
from stoker.tables.config import Strategy, TableConfig, TensorTrain, feature_order, strategies_of
from stoker.tables.copied import CopiedTables, GroupByTable
from stoker.tables.group import TableGroup, joint_of
from stoker.tables.growing.births import Births
from stoker.tables.growing.ids import Grown, growing_ids
from stoker.tables.lookups import GroupLookups, Lookups, Splitter, StepLayout, copy_ids, version_of, without_tables
from stoker.tables.ranks.alike import check_alike, compare_written, said
from stoker.tables.ranks.averages import Averages
from stoker.tables.ranks.divided import DividedGroup
from stoker.tables.ranks.share import Share
from stoker.tables.ranks.transport import Ranks, checksum
from stoker.tables.shards import by_shard, in_shards
from stoker.tables.slots.slotted import SlottedRows
from stoker.tables.stepping import RowStepper, TableOptimizer, new_handle
from stoker.tables.storage import Lease, Rows, Staged, release_all

_numbers = itertools.count()


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of ids share memory that NumPy can change."""
    return one.device.type == "cpu" and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class EmbeddingTables(CopiedTables):
    """Replaces ``nn.EmbeddingBag(sparse=True)`` and its optimizer, for any number of tables at once.

    Rows are not parameters. At the end of each ``backward``, each distinct row takes one step of the row optimizer, in
    place, with its gradients from all lookups and losses summed in order of occurrence.
    :meth:`accumulate` makes one step of several backwards; with :meth:`as_optimizer` rows step in ``step()``, with
    torch's gradient scalers, clipping and schedulers. In eval mode, and after ``requires_grad_(False)`` or
    :meth:`freeze`, rows do not change. Loops that would silently mean something else raise an error that names the
    cause (docs/pytorch.md).

    ``to(device)`` moves the rows. Their type is that of their :class:`TableConfig`; ``half()``, ``double()`` and
    ``to(dtype)`` warn and do not change it. ``parameters()`` has one parameter, :attr:`handle`, that stands for the
    rows.

    Args:
        tables: the tables. Those with equal ``embedding_dim``, pooling and dtype form one group.
        optimizer: the row optimizer (:mod:`stoker.optim`).
        features: order of the features in a batch; None means table by table.
        seed: rows start as a function of (seed, table name, row) on any device, under any placement.
        device: of the kernels, and of rows without a placement.
        backend: kernels: "auto", "reference", "cpu" (Numba) or "triton".
        include_last_offset: whether ``offsets`` ends with the total, as in ``nn.EmbeddingBag``; batches from
            :mod:`stoker.dataset` do.
        placement: where the rows are: one strategy for all tables, or by table name; others are on the device.
        steps: sequence features that are not pooled, and T, the most ids in a bag: such a feature gives T vectors, one
            for each id. A shorter bag is at the end, after vectors of zeros.
        shards: logical shards of a batch, a power of two. The gradient of a row is summed within each shard, then over
            shards by a binary tree (docs/ranks.md). The shards of several backwards of one step are joined.
        ranks: divide the rows among these processes, which train as one (:meth:`replicate`): row i is with rank i % R.
            Experimental; all ranks then read and write together (docs/ranks.md).

    Raises:
        ConfigError: there are no tables, two tables of one name, a feature named twice, steps of an unknown feature, or
            tables that grow with what they cannot do yet.

    Example:
        >>> tables = stoker.EmbeddingTables(
        ...     [stoker.TableConfig(name="user", num_embeddings=1000, embedding_dim=8)],
        ...     optimizer=stoker.Adagrad(lr=0.1), placement=stoker.Cached(fraction=0.1),
        ... )
        >>> pooled = tables(torch.tensor([[3], [5], [3]]))  # [B, F, D]
        >>> pooled.shape
        torch.Size([3, 1, 8])
        >>> pooled.square().mean().backward()  # rows 3 and 5 take a step here
        >>> tables.tick
        1
    """

    @method_with_arguments_of(TablesArguments)
    def __init__(self, tables: Sequence[TableConfig], **given: Any) -> None:
        super().__init__()
        asked = TablesArguments(tables, **given)
        optimizer, device = asked.optimizer, asked.device
        if not tables:
            raise ConfigError("EmbeddingTables needs at least one TableConfig.")
        names = [table.name for table in tables]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(f"tables {twice} are named twice. Give every table its own name.")
        strategies = strategies_of(names, asked.placement)
        if asked.ranks is not None:
            asked.check_divided()
        self.tables = tuple(tables)
        asked.check_growing()
        self.features = feature_order(tables, asked.features)
        self.include_last_offset = asked.include_last_offset
        self.shards = asked.shards
        self.seed = seed = asked.seed
        self.groups: list[TableGroup] = []
        self.number = next(_numbers)  # compiled code finds these tables by it
        register(self)
        self.handle = new_handle(device)  # stands for the rows in parameters(); its value is not used
        self._stepper = RowStepper(self, ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""))
        self._stepper.keep(self.handle)
        self._frozen: frozenset[str] = frozenset()
        self.ranks: Ranks | None = None  # that train together
        self.divided = asked.ranks is not None  # whether each has some of the rows, though all have cores
        self.written = 0  # a checksum of rows written since ranks compared theirs
        self.open_stages = 0  # loops over stages of these tables that have begun
        self.share: Share | None = None  # while a model looks up the examples of this rank
        self.changes: ChangedRows | None = None  # rows that changed since a checkpoint
        self._copied: int | None = None  # of a copy: the steps when it was made
        self._layout = StepLayout(self.features, asked.steps or {})
        self._staged: dict[int, Staged] = {}  # by id of the ids tensor
        lookups: list[GroupLookups] = []
        buckets: dict[tuple[int, str, str, Strategy, str], list[TableConfig]] = {}
        for table, strategy in zip(tables, strategies, strict=True):
            alone = table.name if isinstance(strategy, TensorTrain) else ""  # every table has its own cores
            buckets.setdefault((table.embedding_dim, table.pooling, table.dtype, strategy, alone), []).append(table)
        for (_, _, _, strategy, alone), members in buckets.items():
            lookups.append(GroupLookups(self.features, members, self._layout.steps))
            # For a group every step is a feature: kernels and placement need no code for sequences.
            kind: Any = CompressedGroup if alone else TableGroup
            if asked.ranks is not None and not alone and asked.ranks.average_every is None:  # all have the cores
                kind = partial(DividedGroup, asked.ranks)
            self.groups.append(
                kind(
                    members, lookups[-1].space, optimizer=optimizer, strategy=strategy, seed=seed,
                    device=torch.device(device), backend=asked.backend,
                )
            )  # fmt: skip
        self.splitter = Splitter(self.features, lookups, self._layout, include_last_offset=asked.include_last_offset)
        self._joint = joint_of(self.groups, self.splitter)
        self.group_of = GroupByTable()
        for group in self.groups:
            for name in {table.name for table in (*group.tables, *group.stored)}:
                if name in self.group_of:
                    raise ConfigError(
                        f"{name!r} is a table and a core of another: those of a tensor-train table are named "
                        "<table>.core1 and so on. Rename the table."
                    )
                self.group_of[name] = group
        self.raw = growing_ids(self.tables, self.features)  # which raw id has which row
        self._births = Births(self.raw, self.groups, seed)
        self.averages: Averages | None = None  # of copies on ranks
        if asked.ranks is not None:
            self.replicate(asked.ranks)
            if asked.ranks.average_every is not None:
                self.averages = Averages(asked.ranks, self.groups)

    @property
    def steps(self) -> dict[str, int]:
        """Features that are not pooled, and their number of steps."""
        return dict(self._layout.steps)

    @property
    def positions(self) -> dict[str, slice]:
        """The place of each feature on the second axis of the output [B, P, D]."""
        return dict(self._layout.slices)

    @property
    def optimizer(self) -> RowOptimizer:
        """The row optimizer."""
        return self.groups[0].optimizer

    @optimizer.setter
    def optimizer(self, optimizer: RowOptimizer) -> None:
        if not isinstance(optimizer, RowOptimizer):
            raise ConfigError(
                f"optimizer is {optimizer!r}; rows need one of their own, such as stoker.SGD(lr=0.1). For an optimizer "
                "that torch's schedulers and scalers can drive, take tables.as_optimizer()."
            )
        kept = optimizer.kind == self.optimizer.kind
        for group in self.groups:
            group.check_optimizer(optimizer)
        for group in self.groups:
            group.set_optimizer(optimizer)
        if self._joint and not kept:
            self._joint.locate()
        self._stepper.take_lr(optimizer.lr)

    @property
    def lr(self) -> float:
        """The learning rate of the row optimizer; may be set between steps."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer = replace(self.optimizer, lr=value)

    @property
    def gradient_scale(self) -> float:
        """Factor on gradients of rows before they are used; 1 by default."""
        return self._stepper.scale

    @gradient_scale.setter
    def gradient_scale(self, value: float) -> None:
        self._stepper.scale = float(value)

    @property
    def frozen(self) -> frozenset[str]:
        """The tables that do not train (:meth:`freeze`)."""
        return self._frozen

    @property
    def device(self) -> torch.device:
        """The device of the kernels."""
        return self.groups[0].storage.weight.device

    @property
    def shards(self) -> int:
        """Logical shards of a batch; may be set between steps."""
        return self._shards

    @shards.setter
    def shards(self, value: int) -> None:
        check_shards(value)
        self._shards = value

    def shards_of(self, batch: int) -> Shards | None:
        """Return the shards of a batch of this size; None if it is one. Of a rank's examples, the own ones."""
        if self._shards == 1:
            return None
        return Shards.of(batch, self._shards) if self.share is None else self.share.shards

    @property
    def tick(self) -> int:
        """Row-optimizer steps done so far."""
        return self.groups[0].tick

    @tick.setter
    def tick(self, value: int) -> None:
        for group in self.groups:
            group.tick = value

    def accumulate(self) -> AbstractContextManager[None]:
        """Make one step of the row optimizer from all backwards in the block, at its end; none after an exception.

        This equals ``nn.EmbeddingBag`` with gradients accumulated over micro-batches. The caller scales losses, as
        there: ``(loss / 4).backward()`` four times for the mean.

        Example:
            >>> table = stoker.TableConfig(name="user", num_embeddings=9, embedding_dim=4)
            >>> tables = stoker.EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1))
            >>> with tables.accumulate():
            ...     for ids in (torch.tensor([[1]]), torch.tensor([[2]])):
            ...         tables(ids).sum().backward()
            >>> tables.tick
            1
        """
        return self._stepper.accumulate()

    def as_optimizer(self, *, in_backward: bool = False) -> TableOptimizer:
        """Return the optimizer of the rows as a torch optimizer: rows step when ``step()`` is called.

        From then on gradients of rows are summed until ``step()`` and dropped by ``zero_grad()``, like those of
        parameters. ``GradScaler.step``, ``clip_grad_norm_(model.parameters(), ...)`` and learning-rate schedulers work
        with it. A second call returns the same optimizer.

        Args:
            in_backward: rows still step inside backward; the optimizer only serves learning-rate schedulers.

        Example:
            >>> table = stoker.TableConfig(name="user", num_embeddings=9, embedding_dim=4)
            >>> tables = stoker.EmbeddingTables([table], optimizer=stoker.SGD(lr=0.1))
            >>> rows = tables.as_optimizer()
            >>> schedule = torch.optim.lr_scheduler.StepLR(rows, step_size=1, gamma=0.5)
            >>> tables(torch.tensor([[1]])).sum().backward()
            >>> rows.step(); rows.zero_grad(); schedule.step()
            >>> tables.tick, rows.param_groups[0]["lr"]
            (1, 0.05)
        """
        return self._stepper.drive(in_backward=in_backward)

    def step_each_backward(self) -> None:
        """Declare that each backward is one step of the rows: scalers, clipping and accumulation raise no error."""
        self._stepper.checked = False

    def freeze(self, *tables: str) -> None:
        """Stop training these tables from the next backward on; without names, all tables.

        Raises:
            ConfigError: a name is not that of a table.
        """
        self._frozen |= self._named(tables)

    def unfreeze(self, *tables: str) -> None:
        """Train these tables again; without names, all tables.

        Raises:
            ConfigError: a name is not that of a table.
        """
        self._frozen -= self._named(tables)

    def _named(self, tables: Iterable[str]) -> frozenset[str]:
        own = {table.name for table in self.tables}
        if unknown := sorted(set(tables) - own):
            raise ConfigError(f"{unknown} are not tables; there are {', '.join(sorted(own))}.")
        return frozenset(tables) or frozenset(own)

    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None, *, time: int | None = None
    ) -> Tensor:
        """Look up and pool.

        Args:
            ids: [B, F] with one id a bag, or flat [L] with ``offsets``; int32 or int64, local to each table. All three
                may be arrays of other libraries with ``__dlpack__``; they are copied.
            offsets: [B * F + 1] int64, sample-major: bag ``b * F + f`` is ``ids[offsets[i]:offsets[i + 1]]``.
            weights: [L] (or [B, F]) per-sample weights; sum pooling only. May require a gradient.
            time: of the batch, for tables that grow and forget by time instead of steps (docs/dynamic_ids.md).

        Returns:
            [B, P, D] float32 if all tables share one ``embedding_dim``, else [B, sum of D], in feature order. P is F if
            every feature is pooled; a feature with ``steps`` has as many places, the newest step last.

        Raises:
            IndexError: an id is outside its table.
            ValueError: shapes do not fit together, or a bag has more ids than steps.
            ConfigError: the row steps of this loop would mean something else (docs/pytorch.md), or a time is missing.
        """
        if torch.compiler.is_compiling():
            check_export()
            return compiled_lookup(self, ids, offsets, weights)
        ids = as_tensor(ids, copy=True)  # what only torch can change
        offsets = None if offsets is None else as_tensor(offsets, copy=True)
        weights = None if weights is None else as_tensor(weights, copy=True)
        if ids.device != self.device:
            raise ValueError(
                f"ids are on {ids.device}, but the tables on {self.device}. Move the batch: ids.to(tables.device)."
            )
        check_modes(weights)
        handle = self._stepper.check_handle(self._parameters["handle"])
        call = self.splitter.check(ids, offsets, weights, self.groups[0].backend)
        trains = torch.is_grad_enabled() and handle.requires_grad
        if trains and self.training:
            self._stepper.check()
            self._check_handed()
        else:
            self.check_copy()
        leases, copy, grown = self._take_staged(call)
        given: tuple[Tensor, Tensor | None] | None = (ids, copy)
        if self.raw is not None:
            grows = trains and self.training
            call, leases = self._births.rows_of(
                call, leases, grown, time, self._frozen, grows=grows, ranks=self.ranks, share=self.share
            )
            given = None  # rows are in memory of their own
        weighted = torch.is_grad_enabled() and weights is not None and weights.requires_grad
        if joint := None if weighted else self._joint:
            many, leases = [Lookups(call, joint.space)], [None]
        else:
            many = self.splitter.split(call)
        if trains or weighted:
            found: Sequence[Tensor] = Lookup.apply(
                handle, self, many, leases, given, *[each.bags.weights for each in many]
            )  # type: ignore[no-untyped-call]
        else:
            found = self.look_up(many, leases)
            release_all(leases)
        if joint:
            (out,) = found
            return out
        return self.splitter.join(
            [group.pool(out, each) for group, out, each in zip(self.splitter.groups, found, many, strict=True)]
        )

    def look_up(
        self, many: Sequence[Lookups], leases: list[Lease | None], given: tuple[Tensor, Tensor | None] | None = None
    ) -> list[Tensor]:
        """Return the output of each group [B, P, D], or of all; acquire the leases that are missing in ``leases``.

        ``given``, for a backward: the caller's ids, which NumPy may change until then, and a copy if there is one.
        """
        if self._joint and many[0].space is self._joint.space:
            return [self._joint.lookup(many[0].bags)]
        found = []
        for index, lookups in enumerate(many):
            if (lease := leases[index]) is not None:
                lease.use(lookups.bags)
            else:
                leases[index] = lease = self.groups[index].acquire(lookups)
            mine = lookups.bags.ids
            if given is not None and lease is not None and lease.can_end and _same_memory(mine, given[0]):
                ids, copy = given
                lease.ids = copy_ids(mine) if copy is None or mine.numel() < ids.numel() else copy
            found.append(self.groups[index].lookup(lookups, lease))
        return found

    def kept(self, many: Sequence[Lookups]) -> list[Bags]:
        """Return lookups as they are when their rows step, whatever the caller does to the batch meanwhile."""
        if self._joint and many[0].space is self._joint.space:
            return [self._joint.kept(many[0].bags)]
        return [each.bags for each in many]

    @property
    def born(self) -> int:
        """Return the number of the last step of tables that grow."""
        return self._births.step

    @property
    def versions(self) -> list[int]:
        """Return the number of changes of each group's rows so far."""
        return [group.version for group in self.groups]

    def backward_of(
        self, index: int, lookups: Lookups, grad: Tensor, lease: Lease | None, forward: Forward, *, rows: bool,
        weights: bool,
    ) -> Tensor | None:  # fmt: skip
        """Collect the gradient of a lookup in group ``index``, or in all; return that of its per-sample weights.

        The lease is that of the forward; ``rows`` and ``weights``: whether these need a gradient.

        Raises:
            RuntimeError: the rows have changed since, and the gradient depends on them.
        """
        if self._joint and lookups.space is self._joint.space:
            index = -1
        group = self.groups[index]
        if forward.versions[index] != group.version and (weights or isinstance(group, CompressedGroup)):
            raise RuntimeError(
                f"the rows of table {group.tables[0].name!r} were changed between this forward and its backward, and "
                "the gradient depends on them as they were: another backward, optimizer step or write came between. "
                "Do the forward again, or join the losses in one backward."
            )
        if lease is not None and not lease.serves(lookups.bags.ids):
            lease.release(changed=False)
            lease = group.acquire(lookups)
        wanted = group.weight_gradient(lookups, grad, lease) if weights else None
        if rows and forward.trains:
            self._collect(
                Gradient(index, lookups, grad, lease, shards=forward.shards, born=forward.born), forward.enclosing
            )
        elif rows:
            warnings.warn(
                "backward reached EmbeddingTables in eval mode: rows were not updated. Call train() to train them, or "
                "requires_grad_(False) to say that they are not meant to change.",
                stacklevel=2,
            )
        return wanted

    def backward_of_call(
        self, grad: Tensor, call: Bags, forward: Forward, *, rows: bool, weights: bool
    ) -> Tensor | None:
        """Do :meth:`backward_of` for all groups of a call, given the gradient of its output, with new leases."""
        ids, given = call.ids, call.weights
        total = places = None
        if given is not None and weights:
            total = torch.zeros(given.numel(), dtype=torch.float32, device=given.device)
            places = self.splitter.split(call._replace(weights=torch.arange(len(total), device=ids.device)))
        grads = self.splitter.apart(grad)
        for index, lookups in enumerate(self.splitter.split(call)):
            group, pooling, mine = self.groups[index], self.splitter.groups[index], grads[index]
            if lookups.space is not pooling.space:  # max pooling: find which id was largest
                mine = pooling.pool_gradient(group.lookup(lookups, group.acquire(lookups)), lookups, mine)
            wanted = self.backward_of(index, lookups, mine, group.acquire(lookups), forward, rows=rows, weights=weights)
            if places is not None and total is not None and wanted is not None:
                at = places[index].bags.weights
                assert at is not None
                total[at] = wanted.view(-1)
        return None if total is None or given is None else total.view_as(given).to(given.dtype)

    def exchange(self, gradients: list[Gradient]) -> list[Gradient]:
        """Return the gradients with their shards of the batch of all ranks (:meth:`replicate`)."""
        if (ranks := self.ranks) is None:
            return gradients
        if self.averages is not None:  # as if the examples of a rank were the whole batch
            return [each.scaled(ranks.size)._replace(shards=None) for each in gradients]
        if gradients and all(each.shards for each in gradients):  # all ranks know how many examples each has
            return gradients
        found, gradients = [], self._apart(gradients)  # other replicas may have their rows elsewhere
        counts = ranks.numbers("count examples", [len(each.grad) for each in gradients])
        for each, *sizes in zip(gradients, *counts, strict=True):
            own = each.scaled(sizes[ranks.rank] / max(1, sum(sizes))) if ranks.means else each
            found.append(own._replace(shards=ranks.shards_of(sizes, self.shards)))
        return found

    def apply_gradients(self, gradients: Sequence[Gradient], scale: float) -> None:
        """Take one step of the row optimizer with the sum of ``gradients`` times ``scale``."""
        if self.raw is not None and any(each.born != self.born for each in gradients):
            self._births.check(self._apart(gradients))
        tick, alone, shards = self.tick + 1, gradients[0], self.shards_of(gradients[0].grad.shape[0])
        joint, ranks = None if self.ranks else self._joint, self._summed
        own = said(self, scale) if ranks else []
        rule = joint.rule(shards is not None) if joint and alone.group < 0 and len(gradients) == 1 else None
        if joint and rule:
            self._check_unchanged(alone)
            joint.update(in_shards(alone.lookups, shards), alone.grad if scale == 1.0 else alone.grad * scale, rule)
        else:
            steps = [
                (group, lookups, grad, lease if ranks else lease or group.acquire(lookups))
                for group, lookups, grad, lease in self._sums(gradients)
            ]  # of all groups, so that an error comes before the first row steps
            for group, lookups, grad, lease in steps:
                grad = grad if scale == 1.0 else grad * scale
                if self.averages is not None:
                    self.averages.note(group, lookups)
                if ranks is None:
                    group.update(lookups, grad, lease)
                else:
                    group.step_together(ranks, lookups, grad, ranks.tree(self.shards), lease, own)
        for group in self.groups:
            group.tick = tick  # also in groups without a gradient: files keep one number
        if self.averages is not None and tick % (self.averages.ranks.average_every or 1) == 0:
            self.average()
        compare_written(ranks, self)

    @property
    def _summed(self) -> Ranks | None:
        """The ranks over which the gradients of a step are summed."""
        return None if self.averages is not None else self.ranks

    def average(self) -> None:
        """Average the copies of ranks now (:meth:`stoker.distributed.Ranks.averaging`); all ranks call this."""
        if self.averages is not None:
            self.averages.average(said(self, self.gradient_scale))
            compare_written(self.averages.ranks, self)

    def gradient_norm(self, gradients: Sequence[Gradient]) -> float:
        """Return the Euclidean norm of the gradient of all rows."""
        total, own = 0.0, said(self, self.gradient_scale) if self._summed else []
        for group, lookups, grad, _ in self._sums(gradients, release=False):
            if (ranks := self._summed) is None:
                total += group.gradient_norm_squared(lookups, grad)
            else:
                total += group.norm_squared(group.sums_of(ranks, lookups, grad, ranks.tree(self.shards), own))
        return math.sqrt(total)

    def _sums(
        self, gradients: Sequence[Gradient], *, release: bool = True
    ) -> Iterator[tuple[TableGroup, Lookups, Tensor, Lease | None]]:
        """Yield each group that has gradients, with their sum."""
        gradients = self._apart(gradients)
        for index, group in enumerate(self.groups):
            if mine := [each for each in gradients if each.group == index]:
                yield group, *self._sum(mine, release=release)

    def _apart(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return gradients of one group each."""
        found = []
        for each in gradients:
            if each.group >= 0:
                found.append(each)
                continue
            self._check_unchanged(each)
            grads, many = self.splitter.apart(each.grad), self.splitter.split(each.lookups.bags)
            pairs = enumerate(zip(many, grads, strict=True))
            found += [Gradient(group, *mine, None, shards=each.shards, born=each.born) for group, mine in pairs]
        return found

    def _check_unchanged(self, found: Gradient) -> None:
        """Raise RuntimeError if a gradient was changed in place since its backward."""
        if found.version != -1 and found.version != found.grad._version:
            raise RuntimeError(
                f"the gradient of an output of table {self.groups[found.group].tables[0].name!r} was changed in place "
                "between its backward and the step of the rows. Give backward() a new tensor: grad.clone()."
            )

    def _sum(self, mine: Sequence[Gradient], *, release: bool) -> tuple[Lookups, Tensor, Lease | None]:
        """Sum gradients of one group; raise RuntimeError if one was changed in place since its backward."""
        for each in mine:
            self._check_unchanged(each)
        shards = [own for each in mine if (own := each.shards or self.shards_of(each.grad.shape[0]))]
        if len(mine) == 1:
            return in_shards(mine[0].lookups, shards[0] if shards else None), mine[0].grad, mine[0].lease
        many, joined = [(each.lookups, each.grad) for each in mine], None
        if shards:
            many, joined = by_shard(many, shards)
        lookups, grad = self.splitter.groups[mine[0].group].joined(many)
        if release:
            release_all(each.lease for each in mine)
        return in_shards(lookups, joined), grad, None

    def _collect(self, found: Gradient, enclosing: int) -> None:
        """Keep a gradient for the step of the rows, without frozen tables."""
        if self._frozen and (frozen := self._frozen.intersection(found.lookups.space.names)):
            release_all([found.lease])
            if found.group < 0:
                for each in self._apart([found]):
                    self._collect(each, enclosing)
                return
            if frozen.issuperset(found.lookups.space.names):
                return
            found = found._replace(lookups=without_tables(found.lookups, frozen), lease=None)
        self._stepper.collect(found, enclosing)

    def hand_over(
        self, ids: Tensor, offsets: Tensor | None, leases: Sequence[Lease | None],
        copies: tuple[Tensor, Tensor | None] | None, grown: Grown | None = None,
    ) -> None:  # fmt: skip
        """Keep leases for the next ``forward`` with this same ``ids`` tensor (:func:`stoker.stage`).

        There is a lease for each group, None if the batch is fetched on demand. ``copies`` are the ids, and offsets as
        checked, when the batch was announced; None if only torch can have changed them since, which counts versions.
        ``grown`` is the step of tables that grow.
        """
        if copies is None and ids.is_inference():  # its changes are not counted
            copies = copy_ids(ids), None if offsets is None else copy_ids(offsets)
        self._staged[id(ids)] = Staged(ids, version_of(ids), offsets, copies, tuple(leases), grown)

    def _take_staged(self, call: Bags) -> tuple[list[Lease | None], Tensor | None, Grown | None]:
        """Return the leases of a staged batch, a copy of its ids, and its step; release them if it is another batch."""
        found = self._staged.pop(id(call.ids), None) if self._staged else None
        if found is None or not found.fits(call.ids, call.offsets):
            release_all(() if found is None else found.leases)
            if found is not None and self.divided and self.ranks is not None:
                with self.ranks.guard():
                    raise ConfigError(
                        "the ids or offsets of a staged batch were changed before its lookup, but the ranks among "
                        "which the rows are divided know the others. Change them in the stream that stage() is given."
                    )
            return [None] * len(self.groups), None, None
        for group, lease in zip(self.groups, found.leases, strict=True):
            if lease is not None and isinstance(group.storage, SlottedRows):
                group.storage.hand_out(lease)
        return list(found.leases), None if found.copies is None else found.copies[0], found.grown

    def withdraw(self, ids: Tensor) -> None:
        """Release the leases of :meth:`hand_over`: the batch was not used, or is done."""
        found = self._staged.pop(id(ids), None)
        release_all(() if found is None else found.leases)
        if self.raw is not None and found is not None and found.grown is not None:
            self.raw.forget([found.grown])

    def ahead(self, call: Bags, time: int | None, share: Share | None) -> Grown | None:
        """Give rows to the raw ids of a batch that comes later; None if no table grows. ``call`` has been checked."""
        return self._births.ahead(call, time, self._frozen, grows=self.training, ranks=self.ranks, share=share)

    def replicate(self, replicas: Ranks | None) -> None:
        """Train as one of several replicas: each backward updates the rows of all ranks' batches, on every rank.

        All ranks must call ``forward`` and ``backward`` equally often. A copy of the tables is not a replica. With
        logical ``shards``, any number of ranks gives the same rows, to the bit: each takes the examples of its shards.

        Args:
            replicas: :class:`stoker.Replicas` if the loss of a rank is the mean over its own examples;
                :class:`stoker.distributed.Ranks` if it is their sum, divided by the examples of all ranks. None means
                that this rank trains its own rows, which other ranks need not have.

        Raises:
            ConfigError: the ranks have different rows, tables, optimizers or shards.
        """
        self._stepper.alone = True
        if self.divided and (replicas is None or self.ranks is not None):
            raise ConfigError("the rows of these tables are divided among ranks: they train with these ranks alone.")
        if replicas is not None:
            check_alike(replicas, self)
        self.ranks = replicas

    def close(self) -> None:
        """Write all rows to their backing store, close files and end threads. The tables cannot be used afterwards."""
        for group in self.groups:
            group.storage.close()

    def read(self, table: str, chunk_rows: int = 2**18) -> Iterator[tuple[int, Rows]]:
        """Yield canonical rows of one table as (first row, :class:`Rows`) chunks.

        Chunks of rows that are on the device are views, which later steps change: do not write to them.
        """
        self.check_copy()
        return self.group_of[table].read(table, chunk_rows)

    def write(self, table: str, start: int, rows: Rows | Tensor) -> None:
        """Replace canonical rows of one table from row ``start`` on.

        Args:
            table: its name.
            start: the first row.
            rows: weights with optimizer state, or weights [n, D] alone, which leave the state as it is: a tensor, or an
                array with ``__dlpack__``.
        """
        given = rows if isinstance(rows, Rows) else as_tensor(rows)
        self.group_of[table].write(table, start, given)
        if self.ranks is not None and not isinstance(self.group_of[table], DividedGroup):  # which has compared them
            self.written = checksum(given.tensors if isinstance(given, Rows) else [given], self.written, table, start)

    def rows(self, table: str) -> Tensor:
        """Return a copy of the weights of one table [num_embeddings, embedding_dim]."""
        return torch.cat([rows.weight.detach().clone() for _, rows in self.read(table)])

    def raw_ids(self, table: str) -> Tensor:
        """Return the raw id of each row of a table that grows: [num_embeddings] int64, 0 for a row without one.

        Raises:
            ConfigError: the table does not grow.
        """
        if self.raw is None or table not in self.raw.names:
            raise ConfigError(f"table {table!r} does not grow: give its TableConfig grow=stoker.Grow().")
        return self.raw.raw_ids(table)

    @property
    def stored(self) -> tuple[TableConfig, ...]:
        """The contents of files, in the order of the tables: each table, or its cores if it is compressed."""
        groups = {table.name: self.group_of[table.name] for table in self.tables}
        trains = {name: each.strategy for name, each in groups.items() if isinstance(each.strategy, TensorTrain)}
        return stored_tables(self.tables, trains)

    def _made_with(self) -> dict[str, Any]:
        """Return the constructor arguments of these tables."""
        if self.divided:
            raise ConfigError(
                "tables whose rows are divided among ranks cannot be copied or pickled. Take their state_dict() on "
                "every rank, and load it into other tables."
            )
        return {
            "tables": self.tables,
            "optimizer": self.optimizer,
            "features": self.features,
            "seed": self.seed,
            "device": self.device,
            "backend": self.groups[0].backend_name,
            "include_last_offset": self.include_last_offset,
            "placement": {table.name: self.group_of[table.name].strategy for table in self.tables},
            "steps": self.steps,
            "shards": self.shards,
        }

    def _make(self, **arguments: Any) -> None:
        EmbeddingTables.__init__(self, **arguments)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingTables:
        """Follow ``module.to(device)``; the rows keep their dtype."""
        probes = [fn(torch.empty(0, dtype=group.storage.weight.dtype, device=self.device)) for group in self.groups]
        for group, probe in zip(self.groups, probes, strict=True):
            if probe.dtype != group.storage.weight.dtype:
                warnings.warn(
                    f"the rows of EmbeddingTables remain {group.tables[0].dtype}: half(), double() and to(dtype) "
                    "change the rest of a model only. Give TableConfig the dtype that the rows are to have.",
                    stacklevel=3,
                )
                break
        if (device := probes[0].device) != self.device:
            for group in self.groups:
                group.to(device)
            self._joint = joint_of(self.groups, self.splitter)
            if self.changes is not None:
                self.changes.link(self._joint)
        own = self.handle, self.handle.grad

        def moved(tensor: Tensor) -> Tensor:  # the handle keeps its type, as the rows do, and its place in graphs
            made = fn(tensor)
            return tensor.to(made.device) if tensor.dtype != made.dtype and any(tensor is t for t in own) else made

        super()._apply(moved, recurse)
        self._stepper.keep(self.handle)
        return self

    def extra_repr(self) -> str:
        """Name tables, rows, bytes, and where the rows are, for ``print(model)``."""
        rows = sum(table.num_embeddings for table in self.tables)
        size = format_size(sum(group.storage.fast_bytes for group in self.groups))
        lines = [f"{plural(len(self.tables), 'table')}, {rows:,} rows, {size} with state, {self.optimizer.kind}"]
        for group in self.groups:
            names = [table.name for table in group.tables]
            shown = ", ".join(names[:4]) + (f", ... ({len(names)} tables)" if len(names) > 4 else "")
            where = type(group.strategy).__name__
            if isinstance(storage := group.storage, SlottedRows):
                hot = f", {storage.num_hot:,} of them hot" if storage.num_hot else ""
                where += (
                    f", {storage.num_slots:,} slots for {storage.num_rows:,} rows{hot}, backed by {storage.home.kind}"
                )
            lines.append(f"{shown}: {group.dim} columns, {where}, on {group.storage.weight.device}")
        return "\n".join(lines)
