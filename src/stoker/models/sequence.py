"""The base of models over a history: pairs of target and sequence, and steps with a mask.

Legend: B examples, N dense columns, G pooled features, T steps, S vectors of a step, D columns of a table.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Unpack

import torch
from torch import Tensor

from stoker.base.errors import ConfigError, DataError
from stoker.dataset.batch import Batch
from stoker.dataset.spec import FeatureSpec
from stoker.models.base import ModelSettings, RecModel


class SequenceModel(RecModel):
    """A click model that gets a vector for each step of a history, next to the target.

    A step has S vectors, one for each pair of a target feature and the sequence feature that has its earlier values (an
    item and its category: S = 2). All other features are pooled as in any :class:`RecModel`.

    >>> class LastStep(stoker.SequenceModel):
    ...     name = "last-step"
    ...
    ...     def dense_part(self, dense, embedded, steps, mask):
    ...         return (embedded[:, self.targets] * steps[:, -1]).sum((1, 2))
    >>> item = stoker.Feature(name="item", table="items")
    >>> past = stoker.Feature(name="past", table="items", sequence=True, max_length=5)
    >>> model = LastStep(stoker.FeatureSpec(dense=(), features=(item, past), num_embeddings={"items": 100}))
    >>> dict(model.history)
    {'item': 'past'}

    Args:
        spec: columns and table sizes.
        history: target feature -> sequence feature. None pairs every sequence feature with the one-id feature that
            shares its table.
        settings: those of :class:`RecModel`.

    Raises:
        ConfigError: there is no pair, or the pairs cannot be the steps of one history.
    """

    def __init__(
        self, spec: FeatureSpec, *, history: Mapping[str, str] | None = None, **settings: Unpack[ModelSettings]
    ) -> None:
        pairs = _find_pairs(spec) if history is None else dict(history)
        self.num_steps = _check_pairs(spec, pairs)
        super().__init__(spec, steps=dict.fromkeys(pairs.values(), self.num_steps), **settings)
        # In the order of the batch: a checkpoint keeps the mapping, but not its order.
        self.history = {target: pairs[target] for target in sorted(pairs, key=spec.index)}
        sequences = set(self.history.values())
        self.pooled = tuple(feature.name for feature in spec.features if feature.name not in sequences)
        self.targets = tuple(self.pooled.index(name) for name in self.history)  # their places among the pooled features
        self._sequences = tuple(spec.index(name) for name in self.history.values())
        # Vectors of the output by sequence; pooled features between two sequences are one block, under None.
        names = (feature.name if feature.name in sequences else None for feature in spec.features)
        sizes = ((name, len(list(block))) for name, block in groupby(names))
        self._blocks = [(name, size if name is None else self.num_steps) for name, size in sizes]

    @abstractmethod
    def dense_part(self, dense: Tensor, embedded: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
        """Return the logits [B] of a batch.

        Args:
            dense: [B, N] dense columns.
            embedded: [B, G, D] one vector for each feature of ``self.pooled``; the targets are at ``self.targets``.
            steps: [B, T, S, D], oldest first; the newest step is the last, and missing ones are zeros.
            mask: [B, T] bool, True where there is a step.
        """

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        names, sizes = zip(*self._blocks, strict=True)
        vectors = self.embeddings(batch.ids, batch.offsets, batch.weights, time=batch.time).split(sizes, dim=1)
        of = dict(zip(names, vectors, strict=True))
        pooled = [block for name, block in zip(names, vectors, strict=True) if name is None]
        return (
            batch.dense,
            pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1),
            torch.stack([of[name] for name in self.history.values()], dim=2),
            self._mask(batch),
        )

    def _mask(self, batch: Batch) -> Tensor:
        first, *others = (batch.lengths(place) for place in self._sequences)
        for name, lengths in zip(list(self.history.values())[1:], others, strict=True):
            if not torch.equal(first, lengths):
                example = int((first != lengths).nonzero()[0])
                target, one = next(iter(self.history.items()))
                raise DataError(
                    f"example {example} of batch {batch.step} has {int(first[example])} steps in {one!r} and "
                    f"{int(lengths[example])} in {name!r}. Sequences of one history need a value for every step in "
                    f"each: prepare them from the same events, or keep one of them only: {_option(target, one)}."
                )
        return batch.mask(self._sequences[0], self.num_steps)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "history": self.history}


def _option(target: str, sequence: str) -> str:
    """Return the option that names a pair."""
    return f'model option history={{"{target}": "{sequence}"}}'


def _find_pairs(spec: FeatureSpec) -> dict[str, str]:
    """Pair every sequence with the one-id feature that shares its table: target -> sequence."""
    pairs: dict[str, str] = {}
    for sequence in spec.features:
        targets = [f.name for f in spec.features if not f.sequence and f.table == sequence.table]
        if not sequence.sequence or not targets:
            continue
        if len(targets) > 1 or targets[0] in pairs:
            several = targets if len(targets) > 1 else [pairs[targets[0]], sequence.name]
            raise ConfigError(
                f"{' and '.join(map(repr, several))} share table {sequence.table!r}, so it is not plain which target "
                f"belongs to which sequence. Name them: {_option(targets[0], sequence.name)}."
            )
        pairs[targets[0]] = sequence.name
    if not pairs:
        sequences = [feature.name for feature in spec.features if feature.sequence]
        why = f"{', '.join(sequences)} share no table with a one-id feature" if sequences else "there is no sequence"
        raise ConfigError(
            f"a model over a history needs a sequence of earlier targets, but {why}. Let both columns name one table "
            f"in the schema, name them yourself ({_option('target', 'sequence')}), or choose a model that pools, such "
            "as 'dlrm'."
        )
    return pairs


def _check_pairs(spec: FeatureSpec, pairs: Mapping[str, str]) -> int:
    """Check the pairs and return their T."""
    features = {feature.name: feature for feature in spec.features}
    if not pairs or len(set(pairs.values())) < len(pairs):
        raise ConfigError(f"history is {dict(pairs)}: it needs at least one pair, and each sequence once.")
    for name, wanted in [*((target, False) for target in pairs), *((sequence, True) for sequence in pairs.values())]:
        if name not in features or features[name].sequence != wanted:
            kind = "sequence" if wanted else "one-id"
            those = ", ".join(feature.name for feature in spec.features if feature.sequence == wanted)
            raise ConfigError(f"history names {name!r}, which is not a {kind} feature. Those are: {those or 'none'}.")
    lengths = {name: features[name].max_length for name in pairs.values()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} up to {length}" for name, length in lengths.items())
        target, sequence = next(iter(pairs.items()))
        raise ConfigError(
            f"the sequences of one history differ in length: {said}. Prepare them with one max_length, or keep those "
            f"that belong together: {_option(target, sequence)}."
        )
    return next(iter(lengths.values()))
