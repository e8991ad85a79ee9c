"""The tabular model of fastai (Howard et al. 2018, ``fastai.tabular`` v1).

The RAPIDS team used it in the RecSys Challenge 2019 (Rabhi et al., "Accelerating Recommender System Training 15x with
RAPIDS").

Legend: B examples, F features, N dense columns, D_f columns of the table of feature f.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from stoker.base.errors import ConfigError
from stoker.dataset.batch import Batch
from stoker.dataset.spec import FeatureSpec
from stoker.models.base import ModelSettings, RecModel
from stoker.models.layers import BatchNorm, dense_generator, parts
from stoker.ops.mlp import ALIGN, is_fast, mlp, normed_mlp
from stoker.ops.reference import derive_key


def fastai_columns(rows: int, most: int = 600) -> int:
    """Return the columns for a table of ``rows``: min(600, round(1.6 rows^0.56)) (fastai's ``emb_sz_rule``)."""
    return min(most, round(1.6 * math.pow(rows, 0.56)))


class Tabular(RecModel):
    """Embeddings whose width depends on the table, batch-normalised dense columns, and linear layers.

    Each layer has ReLU, batch norm and dropout, in this order. In training batch norm takes the moments of the batch,
    so the step of an example depends on the others in its batch. In evaluation, and for a batch of one row, it takes
    the running moments, which checkpoints keep. Dropout depends on the seed, the step of the rows and the number of the
    batch (``Batch.step``), not on torch's generator: a resumed or replayed run drops the same values. A GPU drops other
    values than a CPU.

    >>> spec = stoker.FeatureSpec.from_sizes(num_dense=2, num_embeddings=[1000, 50])
    >>> model = stoker.Tabular(spec, hidden=(8,))
    >>> {table.name: table.embedding_dim for table in model.tables}
    {'C1': 77, 'C2': 14}

    Args:
        spec: columns and table sizes.
        hidden: outputs of the layers, without the single output of the last.
        dims: table -> columns; other tables follow fastai's rule. ``embedding_dim`` has no effect.
        max_dim: most columns by the rule.
        dropout: share of values dropped after every layer, or one share for each layer.
        embedding_dropout: share of the values of embeddings that is dropped.
        settings: those of :class:`RecModel`.

    Raises:
        ConfigError: a share outside [0, 1), columns of a table that does not exist, or below 1.
    """

    name: ClassVar[str] = "tabular"
    mixed_dims: ClassVar[bool] = True

    def __init__(
        self,
        spec: FeatureSpec,
        *,
        hidden: Sequence[int] = (64, 32),
        dims: Mapping[str, int] | None = None,
        max_dim: int = 600,
        dropout: float | Sequence[float] = 0.0,
        embedding_dropout: float = 0.0,
        **settings: Unpack[ModelSettings],
    ) -> None:
        columns = self.table_dims(spec, {"dims": dims, "max_dim": max_dim})
        super().__init__(spec, table_dims=columns, **settings)
        self.dims, self.max_dim = columns, max_dim
        self.hidden_sizes = tuple(hidden)
        shares = tuple(dropout) if isinstance(dropout, Sequence) else (float(dropout),) * len(self.hidden_sizes)
        if len(shares) != len(self.hidden_sizes):
            raise ConfigError(
                f"dropout has {len(shares)} shares for {len(self.hidden_sizes)} layers. Give one for each."
            )
        for share in (*shares, embedding_dropout):
            if not 0 <= share < 1:
                raise ConfigError(f"dropout is {share}. Give a share of at least 0 and below 1.")
        self.dropout, self.embedding_dropout = shares, float(embedding_dropout)
        self.embedded = sum(columns[feature.table] for feature in spec.features)
        generator = dense_generator(self.seed, "tabular")
        self.dense_norm = BatchNorm(len(spec.dense)) if spec.dense else None
        sizes = (self.embedded + len(spec.dense), *self.hidden_sizes, 1)
        self.layers = nn.ModuleList(_linear(*pair, generator) for pair in pairwise(sizes))
        self.norms = nn.ModuleList(BatchNorm(size) for size in self.hidden_sizes)
        self.to(self.device)

    @classmethod
    def table_dims(cls, spec: FeatureSpec, config: Mapping[str, Any]) -> dict[str, int]:
        given = config.get("dims") or {}
        if not isinstance(given, Mapping) or not all(isinstance(columns, int) for columns in given.values()):
            raise ConfigError(f'dims is {given!r}, not columns by table such as {{"hotel": 16}}.', settings=("dims",))
        tables = dict.fromkeys(feature.table for feature in spec.features)
        if unknown := sorted(set(given) - set(tables)):
            raise ConfigError(f"dims names {unknown}, but the tables are {', '.join(tables)}.", settings=("dims",))
        most = int(config.get("max_dim", 600))
        return {table: int(given.get(table, fastai_columns(spec.num_embeddings[table], most))) for table in tables}

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return dense columns [B, N], embeddings [B, sum of D_f] and, in training, the factors of dropout.

        There are factors for the embeddings and each layer, if their share is above 0.
        """
        dense, embedded = super().inputs(batch)
        return dense, embedded.flatten(1), *self._masks(batch)

    def _masks(self, batch: Batch) -> list[Tensor]:
        if not (self.training and torch.is_grad_enabled()):
            return []
        widths = ((self.embedding_dropout, self.embedded), *zip(self.dropout, self.hidden_sizes, strict=True))
        if not any(share for share, _ in widths):
            return []
        shards, tick = self.embeddings.shards_of(len(batch)), self.embeddings.tick
        # Batches of one step of the rows, or of frozen rows, differ by their own numbers.
        of: tuple[int | str, ...] = (tick,) if batch.step in (0, tick) else (tick, "batch", batch.step)
        if shards is None:
            return self._drawn(len(batch), widths, *of)
        pairs = zip(shards.numbers, pairwise(shards.bounds), strict=True)
        drawn = [self._drawn(stop - start, widths, *of, number) for number, (start, stop) in pairs]
        return [torch.cat(each) for each in zip(*drawn, strict=True)]

    def _drawn(self, rows: int, widths: Sequence[tuple[float, int]], *of: int | str) -> list[Tensor]:
        generator = torch.Generator(self.device)
        generator.manual_seed(derive_key(self.seed, "dropout", *of) & (2**63 - 1))
        drawn = ((share, torch.rand(rows, n, generator=generator, device=self.device)) for share, n in widths if share)
        return [(values >= share) / (1 - share) for share, values in drawn]

    def dense_part(self, dense: Tensor, embedded: Tensor, *masks: Tensor) -> Tensor:
        weights, biases = parts(self.layers)
        norms = [self.dense_norm, *self.norms]
        if not masks and not dense.requires_grad and is_fast(embedded, weights):
            of_batch = [isinstance(norm, BatchNorm) and norm.count(dense.shape[0]) for norm in norms]
            return normed_mlp(embedded, dense, (weights, biases), norms, of_batch)
        left = list(masks)

        def dropped(x: Tensor, share: float) -> Tensor:
            return x * left.pop(0) if share and left else x

        x = dropped(embedded, self.embedding_dropout)
        if self.dense_norm is not None:
            numbers = self.dense_norm(dense)
            spare = numbers.new_zeros(x.shape[0], -(x.shape[1] + numbers.shape[1]) % ALIGN)
            x = torch.cat([x, numbers, spare], dim=1)
        for layer, (norm, share) in enumerate(zip(self.norms, self.dropout, strict=True)):
            x = dropped(norm(mlp(x, weights[layer : layer + 1], biases[layer : layer + 1], relu_last=True)), share)
        return mlp(x, weights[-1:], biases[-1:], relu_last=False).squeeze(1)

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "hidden": list(self.hidden_sizes),
            "dims": dict(self.dims),
            "max_dim": self.max_dim,
            "dropout": list(self.dropout),
            "embedding_dropout": self.embedding_dropout,
        }


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """Make torch's own linear layer: weights and biases uniform in +-sqrt(1 / inputs)."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    bound = inputs**-0.5
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        layer.bias.uniform_(-bound, bound, generator=generator)
    return layer
