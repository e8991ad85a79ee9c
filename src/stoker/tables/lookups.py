"""Split a call's ids, offsets and weights into the lookups of each group, and join the outputs.

Everything is checked here before it reaches a kernel, both in a call and in a stage that looks ahead.

Legend: B examples, F features, P positions: a feature kept step by step has one for each step, any other has one;
D columns, L ids in all, T steps of a feature.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stoker.base.errors import ConfigError
from stoker.ops import AddressSpace, Backend, Bags
from stoker.ops.reference import bag_lengths
from stoker.ops.select import columns_of, keep_ids, offsets_fit, select_bags
from stoker.ops.space import SlotSpace, make_space, slot_space
from stoker.tables.config import TableConfig

_NO_PADDING = torch.iinfo(torch.int64).min  # no padding
_FEWEST = 16  # binary digits of the slots in a roomy space


def version_of(ids: Tensor) -> int:
    """Return how often torch has changed ``ids`` in place; 0 for tensors of inference mode, which keep no count."""
    return 0 if ids.is_inference() else ids._version


def equal_ids(one: Tensor, other: Tensor) -> bool:
    """Return True if ids or offsets are equal. ``torch.equal`` takes 20 times as long as NumPy on a CPU."""
    if one.is_cpu and other.is_cpu:
        return one.shape == other.shape and bool((one.numpy() == other.numpy()).all())
    return torch.equal(one, other)


def copy_ids(ids: Tensor) -> Tensor:
    """Copy ids or offsets. On a CPU ``clone()`` takes 40 microseconds between kernels."""
    return torch.from_numpy(ids.numpy().copy()) if ids.device.type == "cpu" else ids.clone()


def roomy_space(space: AddressSpace, slots: int) -> SlotSpace:
    """Return a space of at least that many slots: few spaces are made, whose limits a device gets once."""
    return slot_space(space, 1 << max(_FEWEST, (slots - 1).bit_length()))


class Lookups(NamedTuple):
    """The lookups of one group in a batch."""

    bags: Bags
    space: AddressSpace  # addressed by the ids of ``bags``


def offsets_of(bags: Bags) -> Tensor:
    """Return the offsets, also where every bag has one id."""
    return torch.arange(bags.ids.numel() + 1, device=bags.ids.device) if bags.offsets is None else bags.offsets


def keep_lookups(bags: Bags, keep: Tensor) -> Bags:
    """Return only the lookups that ``keep`` [L] marks, in their bags. A mean still divides by all ids of its bag."""
    weights, offsets = bags.weights, bags.offsets
    if bags.mean and offsets is not None:
        lengths = bag_lengths(offsets)
        weights = torch.repeat_interleave(torch.ones_like(lengths, dtype=torch.float32) / lengths.clamp(min=1), lengths)
    return Bags(*keep_ids(keep, bags.ids, offsets, weights), False, shards=bags.shards)


def examples_of(bags: Bags, features: int, start: int, stop: int) -> Bags:
    """Return the lookups of examples ``start..stop``."""
    if bags.offsets is None:
        weights = None if bags.weights is None else bags.weights.view(-1, features)[start:stop].reshape(-1)
        return Bags(bags.ids[start:stop], None, weights, bags.mean)
    offsets = bags.offsets[start * features : stop * features + 1]
    begin, end = int(offsets[0]), int(offsets[-1])
    weights = None if bags.weights is None else bags.weights[begin:end]
    return Bags(bags.ids[begin:end], offsets - begin, weights, bags.mean)


def without_tables(lookups: Lookups, names: Collection[str]) -> Lookups:
    """Return the lookups without those in some tables."""
    bags, space = lookups
    keep = torch.tensor([space.names[table] not in names for table in space.table_of], device=bags.ids.device)
    keep = keep.repeat(bags.batch_size(len(space.features)))
    if bags.offsets is not None:
        keep = torch.repeat_interleave(keep, bag_lengths(bags.offsets))
    return Lookups(keep_lookups(bags, keep), space)


class StepLayout:
    """The positions of some features, in order. The newest step of a feature is always its last position."""

    def __init__(self, features: Sequence[str], steps: Mapping[str, int]) -> None:
        if unknown := sorted(set(steps) - set(features)):
            raise ConfigError(f"steps name {unknown}, but the features are {', '.join(features)}.")
        for name, count in steps.items():
            if count < 1:
                raise ConfigError(f"steps of feature {name!r} are {count}; it must have at least 1.")
        self.features = tuple(features)
        self.steps = dict(steps)
        self.slices: dict[str, slice] = {}  # feature -> its positions
        begin = 0
        for name in features:
            self.slices[name] = slice(begin, begin + steps.get(name, 1))
            begin = self.slices[name].stop
        self._count = begin

    def __len__(self) -> int:
        """Return P."""
        return self._count

    @property
    def widths(self) -> list[int]:
        """Return the number of positions of each feature."""
        return [where.stop - where.start for where in self.slices.values()]

    def names(self, features: Iterable[str]) -> tuple[str, ...]:
        """Name each position of the features: ``seen[0]``, ..., or the name of the feature if it is pooled."""
        found: list[str] = []
        for name in features:
            count = self.steps.get(name)
            found += [name] if count is None else [f"{name}[{step}]" for step in range(count)]
        return tuple(found)

    def check(self, offsets: Tensor) -> None:
        """Raise ValueError for a bag with more ids than its feature has steps."""
        lengths = bag_lengths(offsets).view(-1, len(self.features))
        places = [self.features.index(name) for name in self.steps]
        if not bool((lengths[:, places] > lengths.new_tensor(list(self.steps.values()))).any()):
            return  # one wait for a GPU, for any number of features
        for name, count in self.steps.items():
            column = lengths[:, self.features.index(name)]
            if len(examples := (column > count).nonzero()):
                example = int(examples[0])
                raise ValueError(
                    f"example {example} has {int(column[example])} ids in feature {name!r}, which is kept for {count} "
                    f"steps. Cut it to its last {count} ids, or give the tables more steps."
                )

    def expand(self, bags: Bags) -> Bags:
        """Turn a lookup by feature into one by position, with offsets [B * P + 1].

        No id moves: the bag of a step is one id of its feature's bag, or none.
        """
        count, offsets = len(self.features), offsets_of(bags)
        begins, ends = offsets[:-1].view(-1, count), offsets[1:].view(-1, count)
        expanded = torch.empty(len(begins) * len(self) + 1, dtype=torch.int64, device=offsets.device)
        starts = expanded[:-1].view(-1, len(self))
        for place, name in enumerate(self.features):
            mine = slice(place, place + 1)
            if name in self.steps:
                before_end = torch.arange(self.steps[name], 0, -1, device=offsets.device)
                # A step k ids before the end; a step before the bag is missing, so empty.
                torch.maximum(ends[:, mine] - before_end, begins[:, mine], out=starts[:, self.slices[name]])
            else:
                starts[:, self.slices[name]] = begins[:, mine]
        expanded[-1] = offsets[-1]
        return bags._replace(ids=bags.ids.reshape(-1), offsets=expanded)


class GroupLookups:
    """The lookups of one group: its tables with the features they own, of all ``features`` in batch order.

    ``steps``: sequence features that are not pooled, and their number of steps.
    """

    def __init__(self, features: Sequence[str], tables: Sequence[TableConfig], steps: Mapping[str, int]) -> None:
        self.tables = tuple(tables)
        self.count = len(features)
        owned = {feature for table in tables for feature in table.features}
        self.features = tuple(name for name in features if name in owned)
        self.pooling = tables[0].pooling
        self.layout = StepLayout(self.features, {name: steps[name] for name in self.features if name in steps})
        self.space = self._space_of(self.layout)
        places = [features.index(name) for name in self.features]
        self._columns = None if len(places) == len(features) else tuple(places)
        self._spaces: dict[tuple[int, ...], AddressSpace] = {}  # for max pooling, by the steps of each feature
        self._layouts: dict[AddressSpace, StepLayout] = {self.space: self.layout}
        owner = {feature: table for table in tables for feature in table.features}
        padding = [owner[name].padding_row for name in self.features]
        self._padding = None
        if any(row is not None for row in padding):
            self._padding = torch.tensor([_NO_PADDING if row is None else row for row in padding], device="cpu")

    @property
    def is_plain(self) -> bool:
        """Whether kernels can pool a call's bags as they are."""
        return self._padding is None and self.pooling != "max" and not self.layout.steps

    def _space_of(self, layout: StepLayout) -> AddressSpace:
        return make_space(
            [table.name for table in self.tables],
            [table.num_embeddings for table in self.tables],
            [layout.names(table.features) for table in self.tables],
            layout.names(self.features),
        )

    def select(self, call: Bags) -> Lookups:
        """Return the lookups of this group; ``call`` as from :meth:`Splitter.check`, its weights flat."""
        bags = Bags(call.ids, call.offsets, call.weights, self.pooling == "mean")
        if self._columns is not None and call.offsets is not None:
            bags = Bags(*select_bags(self._columns, self.count, call.ids, call.offsets, call.weights), bags.mean)
        elif self._columns is not None:
            weights = call.weights
            if weights is not None:
                weights = columns_of(weights.view(-1, self.count), self._columns).reshape(-1)
            bags = Bags(columns_of(call.ids, self._columns), None, weights, bags.mean)
        # Only now take out padding: so steps keep their places.
        if self._padding is not None and not self.layout.steps:
            bags = self._without_padding(self._padding, bags)
        space = self.space
        if self.pooling == "max" and bags.offsets is not None:
            space = self._unpooled(bags.offsets)
        if (layout := self._layouts[space]).steps:
            bags = layout.expand(bags)
        if self._padding is not None and self.layout.steps:
            widths = torch.tensor(layout.widths, device="cpu")
            bags = self._without_padding(self._padding.repeat_interleave(widths), bags)
        return Lookups(bags, space)

    @staticmethod
    def _without_padding(padding: Tensor, bags: Bags) -> Bags:
        """Return bags without padding; ``padding``: the padding id of each feature or position."""
        ids, offsets, padding = bags.ids, bags.offsets, padding.to(bags.ids.device)
        if offsets is not None:
            padding = padding.repeat((len(offsets) - 1) // len(padding))
            padding = torch.repeat_interleave(padding, bag_lengths(offsets))
        keep = ((ids != padding) | (padding == _NO_PADDING)).reshape(-1)
        return bags if bool(keep.all()) else Bags(*keep_ids(keep, ids, offsets, bags.weights), bags.mean)

    def _unpooled(self, offsets: Tensor) -> AddressSpace:
        """Return a space where each id of a bag has its own position: kernels can only sum."""
        longest = bag_lengths(offsets).view(-1, len(self.features))
        most = longest.amax(0).tolist() if len(longest) else [1] * len(self.features)
        # Powers of two, so that few spaces are made.
        return self._wide(
            self.layout.steps.get(name, 1 << max(0, count - 1).bit_length())
            for name, count in zip(self.features, most, strict=True)
        )

    def _wide(self, steps: Iterable[int]) -> AddressSpace:
        """Return the space in which the features have ``steps`` positions."""
        wanted = tuple(steps)
        if wanted not in self._spaces:
            layout = StepLayout(self.features, dict(zip(self.features, wanted, strict=True)))
            space = self._spaces[wanted] = self._space_of(layout)
            self._layouts[space] = layout
        return self._spaces[wanted]

    def pool(self, out: Tensor, lookups: Lookups) -> Tensor:
        """Return [B, P, D] from the kernels' output: the same, except for max pooling."""
        if lookups.space is self.space:
            return out
        assert lookups.bags.offsets is not None
        layout = self._layouts[lookups.space]
        present = (bag_lengths(lookups.bags.offsets) > 0).view(-1, len(layout), 1)
        parts = []
        for name, where in layout.slices.items():
            if name in self.layout.steps:
                parts.append(out[:, where])
                continue
            # A bag is at the end of its positions; the first of equal ids wins, as in nn.EmbeddingBag.
            largest = out[:, where].masked_fill(~present[:, where], -torch.inf).max(dim=1, keepdim=True).values
            parts.append(largest.masked_fill(~present[:, where].any(dim=1, keepdim=True), 0.0))
        return torch.cat(parts, dim=1)

    def pool_gradient(self, out: Tensor, lookups: Lookups, grad: Tensor) -> Tensor:
        """Return the gradient of ``out`` from that of :meth:`pool`'s result: for compiled code, without autograd."""
        assert lookups.bags.offsets is not None
        layout, found = self._layouts[lookups.space], torch.zeros_like(out)
        present = (bag_lengths(lookups.bags.offsets) > 0).view(-1, len(layout), 1)
        for name, where in layout.slices.items():
            mine = grad[:, self.layout.slices[name]]
            if name not in self.layout.steps:
                masked = out[:, where].masked_fill(~present[:, where], -torch.inf)
                place = masked.max(dim=1, keepdim=True).indices
                mine = torch.zeros_like(masked).scatter_(1, place, mine)
            found[:, where] = mine
        return found

    def joined(self, many: Sequence[tuple[Lookups, Tensor]]) -> tuple[Lookups, Tensor]:
        """Join several lookups and their gradients [B, P, D], in order."""
        if len(many) == 1:
            return many[0]
        if len({each.space for each, _ in many}) > 1:
            many = self._widened(many)
        space, bags = many[0][0].space, [each.bags for each, _ in many]
        grad = torch.cat([grad for _, grad in many])
        if len({each.mean for each in bags}) > 1:  # some have weights in place of their mean
            everything = torch.ones((), dtype=torch.bool, device=grad.device)
            bags = [keep_lookups(each, everything.expand(each.ids.numel())) if each.mean else each for each in bags]
        weights = None
        if any(each.weights is not None for each in bags):
            weights = torch.cat(
                [torch.ones(each.ids.numel(), device=grad.device) if each.weights is None else each.weights.reshape(-1)
                 for each in bags]
            )  # fmt: skip
        kind = torch.int32 if all(each.ids.dtype == torch.int32 for each in bags) else torch.int64
        ids = torch.cat([each.ids.reshape(-1).to(kind) for each in bags])
        ends, before = [torch.zeros(1, dtype=torch.int64, device=ids.device)], 0
        for each in bags:
            ends.append(offsets_of(each)[1:] + before)
            before += each.ids.numel()
        return Lookups(Bags(ids, torch.cat(ends), weights, bags[0].mean), space), grad

    def _widened(self, many: Sequence[tuple[Lookups, Tensor]]) -> list[tuple[Lookups, Tensor]]:
        """Give lookups of max pooling equally many positions, with empty ones in front, and offsets."""
        layouts = [self._layouts[each.space] for each, _ in many]
        space = self.space
        if self.pooling == "max":
            space = self._wide(map(max, zip(*(layout.widths for layout in layouts), strict=True)))
        wide = self._layouts[space]
        found = []
        for (each, grad), layout in zip(many, layouts, strict=True):
            batch, dim = len(grad), grad.shape[2]
            offsets = offsets_of(each.bags)
            starts = offsets[:-1].view(batch, grad.shape[1])
            wide_starts = starts.new_empty(batch, len(wide))
            wide_grad = grad.new_zeros(batch, len(wide), dim)
            for name in self.features:
                mine, theirs = layout.slices[name], wide.slices[name]
                front = (theirs.stop - theirs.start) - (mine.stop - mine.start)
                wide_starts[:, theirs.start : theirs.start + front] = starts[:, mine.start : mine.start + 1]
                wide_starts[:, theirs.start + front : theirs.stop] = starts[:, mine]
                wide_grad[:, theirs.start + front : theirs.stop] = grad[:, mine]
            ends = torch.cat([wide_starts.reshape(-1), offsets[-1:]])
            bags = Bags(each.bags.ids.reshape(-1), ends, each.bags.weights, each.bags.mean)
            found.append((Lookups(bags, space), wide_grad))
        return found


class Splitter:
    """Check calls and split them by group; ``steps`` is the layout of all features."""

    def __init__(
        self, features: Sequence[str], groups: Sequence[GroupLookups], steps: StepLayout, *, include_last_offset: bool
    ) -> None:
        self.features, self.groups, self.layout = tuple(features), tuple(groups), steps
        self.include_last_offset = include_last_offset  # whether offsets end with the number of ids
        self._most = tuple(steps.steps.get(name, 2**62) for name in features)  # ids in a bag
        self._dims = [group.tables[0].embedding_dim for group in groups]
        self._runs = self._find_runs()
        self._shape: tuple[int, ...] = len(self.layout), self._dims[0]  # of the output of an example
        if len(set(self._dims)) > 1:  # columns instead of positions
            self._shape = (sum(len(group.layout) * dim for group, dim in zip(groups, self._dims, strict=True)),)
            self._runs = [(g, first * self._dims[g], stop * self._dims[g]) for g, first, stop in self._runs]

    def check(
        self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None, backend: Backend | None = None
    ) -> Bags:
        """Check a call before the kernels; return it with offsets [B * F + 1] int64, or None.

        ``backend`` checks what offsets contain; it may report that at a later call (:meth:`Backend.check_offsets`).
        Kernels check the ids themselves when they read them.
        """
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
            offsets = self._check_offsets(ids, offsets)
            check = partial(self._check_contents, offsets, len(ids))
            if backend is None:
                check()
            else:
                backend.check_offsets(offsets, len(ids), self._most, check)
        if weights is not None:
            if weights.numel() != ids.numel():
                raise ValueError(f"{weights.numel()} per-sample weights for {ids.numel()} ids; there must be one each.")
            if not weights.is_floating_point():
                raise ValueError(f"per-sample weights are {weights.dtype}; they must be floating-point numbers.")
            if weights.device != ids.device:
                raise ValueError(f"weights are on {weights.device}, but ids on {ids.device}. Move one of them.")
            for group in self.groups:
                if group.pooling != "sum":
                    raise ValueError(
                        "per-sample weights need sum pooling, as in nn.EmbeddingBag; "
                        f"table {group.tables[0].name!r} pools by {group.pooling}."
                    )
        return Bags(ids, offsets, weights)

    def _check_offsets(self, ids: Tensor, offsets: Tensor) -> Tensor:
        count = len(self.features)
        if ids.dim() != 1:
            raise ValueError(f"ids have shape {tuple(ids.shape)}; with offsets they must be flat, [L].")
        if offsets.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1:
            raise ValueError(
                f"offsets are {offsets.dtype} of shape {tuple(offsets.shape)}; they must be one row of int64 or int32."
            )
        if offsets.device != ids.device:
            raise ValueError(f"offsets are on {offsets.device}, but ids on {ids.device}. Move one of them.")
        offsets = offsets.to(torch.int64)
        if not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_tensor([len(ids)])])
        if (len(offsets) - 1) % count or len(offsets) < 1:
            raise ValueError(
                f"offsets have {len(offsets)} entries; with {count} features they must have a multiple of {count}, "
                "plus one for the end (or make the tables with include_last_offset=False)."
            )
        return offsets

    def _check_contents(self, offsets: Tensor, count: int) -> None:
        if not offsets_fit(offsets, count):
            raise ValueError(
                f"offsets must rise from 0 to the number of ids, {count}; they do not. If they leave out the "
                "end, as nn.EmbeddingBag's do by default, make the tables with include_last_offset=False."
            )
        if self.layout.steps:
            self.layout.check(offsets)

    def split(self, call: Bags) -> list[Lookups]:
        """Return the lookups of each group in a call, which has passed :meth:`check`."""
        if call.weights is not None:
            call = call._replace(weights=call.weights.reshape(-1))
        return [group.select(call) for group in self.groups]

    def join(self, pooled: Sequence[Tensor]) -> Tensor:
        """Join the outputs [B, P, D] of all groups, in the order of the features."""
        if len(pooled) == 1:
            return pooled[0]
        if len(set(self._dims)) == 1:
            return side_by_side(self._runs, pooled)
        return side_by_side(self._runs, [each.flatten(1) for each in pooled])

    def apart(self, grad: Tensor) -> list[Tensor]:
        """Return the gradient of each group's output, from that of :meth:`join`."""
        if len(self.groups) == 1:
            return [grad]
        parts = apart(self._runs, grad)
        if grad.dim() == 3:
            return parts
        return [part.unflatten(1, (-1, dim)) for part, dim in zip(parts, self._dims, strict=True)]

    def output_shape(self, batch: int | torch.SymInt) -> tuple[int | torch.SymInt, ...]:
        """Return the shape of :meth:`join`'s output."""
        return batch, *self._shape

    def _find_runs(self) -> list[tuple[int, int, int]]:
        """Return (group, first of its own positions, the one after the last) for each run of the output, in order."""
        group_of = {
            name: index for index, group in enumerate(self.groups) for name in group.layout.names(group.features)
        }
        runs, taken = [], [0] * len(self.groups)
        for group, names in groupby(self.layout.names(self.features), key=lambda name: group_of[name]):
            first, taken[group] = taken[group], taken[group] + len(list(names))
            runs.append((group, first, taken[group]))
        return runs


_Runs = Sequence[tuple[int, int, int]]


def side_by_side(runs: _Runs, pooled: Sequence[Tensor]) -> Tensor:
    """Join runs of ``pooled``, [B, P, ...] each with its own P, along the second dimension: [B, sum of P, ...].

    ``runs`` are (which of ``pooled``, first, stop); those of one tensor cover it, in its own order.
    """
    joined: Tensor = _Join.apply(runs, *pooled)  # type: ignore[no-untyped-call]
    return joined


def apart(runs: _Runs, joined: Tensor) -> list[Tensor]:
    """Invert :func:`side_by_side`: return [B, P, ...] of each tensor."""
    parts: list[list[Tensor]] = [[] for _ in range(1 + max(group for group, _, _ in runs))]
    widths = [stop - first for _, first, stop in runs]
    for (group, _, _), part in zip(runs, joined.split(widths, dim=1), strict=True):
        parts[group].append(part)  # the runs of a group keep its order
    # One run needs no copy: its readers take any strides.
    return [each[0] if len(each) == 1 else torch.cat(each, dim=1) for each in parts]


class _Join(torch.autograd.Function):
    """Runs of several tensors joined along the second dimension.

    With autograd's own slicing, every run would have a gradient as large as its whole tensor, to be summed.
    """

    @staticmethod
    def forward(ctx: Any, runs: _Runs, *pooled: Tensor) -> Tensor:
        ctx.runs = runs
        return torch.cat([pooled[group][:, first:stop] for group, first, stop in runs], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        joined = apart(ctx.runs, gradient.to_dense() if gradient.is_sparse else gradient)
        return None, *(each if want else None for each, want in zip(joined, needed, strict=True))
