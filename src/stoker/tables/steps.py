"""Sequence features kept step by step: where their steps lie in a lookup, and how a bag becomes one bag a step.

Legend: B examples, F features, P positions: a feature kept step by step has one for each step, any other has one;
L ids in all, T steps of a feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.ops.reference import bag_lengths

__all__ = ["StepLayout"]


class StepLayout:
    """The positions of some features, in order. The newest step of a feature is always its last position.

    Args:
        features: names, in batch order.
        steps: feature -> T, for those kept step by step.

    Raises:
        ConfigError: a feature that is not there, or no step.
    """

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
        """P."""
        return self._count

    def names(self, features: Iterable[str]) -> tuple[str, ...]:
        """A name for each position of the features: ``seen[0]``, ..., or the feature's own where it is pooled."""
        found: list[str] = []
        for name in features:
            count = self.steps.get(name)
            found += [name] if count is None else [f"{name}[{step}]" for step in range(count)]
        return tuple(found)

    def of(self, features: Sequence[str]) -> StepLayout | None:
        """The layout of some features alone; None where none of them is kept step by step."""
        steps = {name: self.steps[name] for name in features if name in self.steps}
        return StepLayout(features, steps) if steps else None

    def too_long(self, offsets: Tensor) -> Tensor:
        """Whether some bag has more ids than its feature has steps: a bool scalar on the device of ``offsets``."""
        lengths = bag_lengths(offsets).view(-1, len(self.features))
        return torch.stack(
            [(lengths[:, self.features.index(name)] > count).any() for name, count in self.steps.items()]
        ).any()

    def explain(self, offsets: Tensor) -> str:
        """Which bag is too long, in words."""
        lengths = bag_lengths(offsets).view(-1, len(self.features))
        for name, count in self.steps.items():
            column = lengths[:, self.features.index(name)]
            if len(examples := (column > count).nonzero()):
                example = int(examples[0])
                return (
                    f"example {example} has {int(column[example])} ids in feature {name!r}, which is kept for {count} "
                    f"steps. Cut it to its last {count} ids, or give the tables more steps."
                )
        raise AssertionError("no bag is too long")

    def expand(
        self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """A lookup by feature as one by position: (ids [L], offsets [B * P + 1], weights [L]).

        No id moves: the bag of a step is one id of its feature's bag, or none.
        """
        count, flat = len(self.features), ids.reshape(-1)
        if offsets is None:
            offsets = torch.arange(len(flat) + 1, device=ids.device)
        begins, ends = offsets[:-1].view(-1, count), offsets[1:].view(-1, count)
        expanded = torch.empty(len(begins) * len(self) + 1, dtype=torch.int64, device=offsets.device)
        starts = expanded[:-1].view(-1, len(self))
        for place, name in enumerate(self.features):
            mine = slice(place, place + 1)
            if name in self.steps:
                before_end = torch.arange(self.steps[name], 0, -1, device=offsets.device)
                # A step k ids before the end; one that would lie before the bag is missing, and empty.
                torch.maximum(ends[:, mine] - before_end, begins[:, mine], out=starts[:, self.slices[name]])
            else:
                starts[:, self.slices[name]] = begins[:, mine]
        expanded[-1] = offsets[-1]
        return flat, expanded, weights
