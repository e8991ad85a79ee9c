"""The base of all models: tables, loss, prediction, and a configuration to rebuild the model from.

Legend: B examples, F features, D columns of a table.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn

from stoker.base.checks import check_types
from stoker.base.errors import ConfigError
from stoker.base.settings import checked_arguments, renamed
from stoker.base.units import listed
from stoker.dataset.batch import Batch
from stoker.dataset.spec import FeatureSpec
from stoker.ops import BackendName
from stoker.ops.graphs import DenseGraphs
from stoker.ops.loss import LISTS, binary_cross_entropy, list_loss
from stoker.optim import RowOptimizer, RowWiseAdagrad
from stoker.tables import EmbeddingTables, Ranks, Strategy, TableConfig, TensorTrain, tables_for
from stoker.tables.config import check_strategies

_ROWS = RowWiseAdagrad(lr=0.05)


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The settings of every model, with their defaults."""

    embedding_dim: int = 16
    pooling: Literal["sum", "mean", "max"] = "mean"
    dtype: Literal["float32", "bfloat16"] = "float32"
    matmul: Literal["fp32", "tf32", "bf16"] = "fp32"
    optimizer: RowOptimizer | None = None
    seed: int = 0
    device: torch.device | str = "cpu"
    backend: BackendName = "auto"
    placement: Strategy | Mapping[str, Strategy] | None = None
    tensor_train: Mapping[str, TensorTrain | Mapping[str, Any]] | None = None
    shards: int = 1
    ranks: Ranks | None = None


class ModelSettings(TypedDict, total=False):
    """Keyword settings of :class:`RecModel` that its subclasses pass on, for editors and type checkers."""

    embedding_dim: int
    pooling: Literal["sum", "mean", "max"]
    dtype: Literal["float32", "bfloat16"]
    matmul: Literal["fp32", "tf32", "bf16"]
    optimizer: RowOptimizer | None
    seed: int
    device: torch.device | str
    backend: BackendName
    placement: Strategy | Mapping[str, Strategy] | None
    tensor_train: Mapping[str, TensorTrain | Mapping[str, Any]] | None
    shards: int
    ranks: Ranks | None


class _DensePart(nn.Module):
    """A model's dense part with its parameters and buffers, and without its tables."""

    def __init__(self, model: RecModel) -> None:
        super().__init__()
        for name, child in model.named_children():
            if child is not model.embeddings:
                self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self._model = [model]  # in a list, so that its tables do not become part of this module

    def forward(self, *inputs: Tensor) -> Tensor:
        model = self._model[0]
        return model._logits(model.dense_part, inputs)


class RecModel(nn.Module, ABC):
    """A click model: embedding tables, and a dense part over dense columns and pooled rows.

    A subclass has a ``name``, builds its layers and defines :meth:`dense_part`; :meth:`config` adds its own settings.

    >>> class Sum(stoker.RecModel):
    ...     name = "sum"
    ...
    ...     def dense_part(self, dense, embedded):
    ...         return dense.sum(1) + embedded.sum((1, 2))
    >>> model = Sum(stoker.FeatureSpec.from_sizes(num_dense=1, num_embeddings=[10]))
    >>> [table.name for table in model.tables]
    ['C1']

    Args:
        spec: columns and table sizes, from ``Dataset.schema``.
        embedding_dim: columns of every table.
        pooling: how the ids of a sequence feature become one vector: their mean, sum or largest values.
        dtype: type of the rows; optimizer state stays float32.
        matmul: precision of matrix products. "bf16" runs the dense part under autocast (weights stay float32). "tf32"
            is for a GPU, where each forward sets torch's precision of float32 products, which its backward takes, too.
        optimizer: row optimizer; None means row-wise Adagrad with learning rate 0.05.
        seed: of rows and dense parameters.
        device: of rows and dense parameters.
        backend: kernels of the tables (:class:`stoker.EmbeddingTables`).
        placement: where the rows are (:func:`stoker.plan`); None means on the device. Not a part of the model.
        tensor_train: tables whose rows are computed from cores (:class:`stoker.TensorTrain`), by name: this changes the
            model. Tensor trains in ``placement`` are added.
        shards: logical shards of a batch (:class:`stoker.EmbeddingTables`).
        ranks: divide the rows among these processes.
        steps: sequence features that are not pooled (:class:`stoker.EmbeddingTables`), for :class:`SequenceModel`.
        table_dims: columns of every table instead of ``embedding_dim``, from a subclass with :attr:`mixed_dims`.

    Raises:
        ConfigError: settings that cannot work.
    """

    name: ClassVar[str]
    #: The dense part computes each example alone, and the gradients of its parameters with stoker.ops.by_shard.
    shards_at_once: ClassVar[bool] = False
    #: Whether tables may have different numbers of columns; :meth:`dense_part` then gets pooled rows [B, sum of D].
    mixed_dims: ClassVar[bool] = False
    #: The losses that :attr:`objective` may be; those that other models do not have are computed by :meth:`own_loss`.
    objectives: ClassVar[tuple[str, ...]] = ("bce", *LISTS)

    def __init__(
        self,
        spec: FeatureSpec,
        *,
        steps: Mapping[str, int] | None = None,
        table_dims: Mapping[str, int] | None = None,
        **settings: Unpack[ModelSettings],
    ) -> None:
        super().__init__()
        given = ModelArguments(**settings)
        check_types(given, type(self).__name__)
        embedding_dim, placement = given.embedding_dim, given.placement
        if table_dims is not None and not self.mixed_dims:
            raise ConfigError(
                f"model {self.name!r} takes tables of equal width. Leave table_dims out and choose embedding_dim."
            )
        if steps and type(self).inputs is RecModel.inputs:
            raise ConfigError(
                f"model {self.name!r} takes one vector a feature, but steps name {sorted(steps)}. Leave steps out, or "
                "subclass stoker.SequenceModel."
            )
        self.spec = spec
        self.embedding_dim = embedding_dim
        self.pooling = given.pooling
        self.dtype = given.dtype
        self.matmul = given.matmul
        self.seed = given.seed
        columns = embedding_dim if table_dims is None else table_dims
        tables = tables_for(spec, columns, pooling=given.pooling, dtype=given.dtype)
        check_strategies(placement)
        where = {table.name: placement for table in tables} if isinstance(placement, Strategy) else placement or {}
        trains = {name: each for name, each in where.items() if isinstance(each, TensorTrain)}
        for name, each in (given.tensor_train or {}).items():
            trains[name] = each if isinstance(each, TensorTrain) else TensorTrain.from_dict(each)
        self.tensor_train = {table.name: trains[table.name].to_dict(table) for table in tables if table.name in trains}
        self.embeddings = EmbeddingTables(
            tables,
            optimizer=_ROWS if given.optimizer is None else given.optimizer,
            features=[feature.name for feature in spec.features],
            seed=given.seed,
            device=given.device,
            backend=given.backend,
            placement={**where, **trains},
            steps=steps,
            shards=given.shards,
            ranks=given.ranks,
        )
        #: The loss, one of :attr:`objectives`: "bce", or over the lists of batches that hold whole ones, "softmax" or
        #: "bpr", or one that the model alone has. It is not part of the model.
        self.objective = "bce"
        self._compiled: Callable[..., Tensor] | None = None
        self.by_shards: Callable[[RecModel, Batch], Tensor] | None = None  # logits, in a run with logical shards

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls) and cls.__module__.startswith("stoker."):  # models of users are theirs
            cls.__init__ = checked_arguments(cls.__init__)  # type: ignore[method-assign]

    @classmethod
    def table_dims(cls, spec: FeatureSpec, config: Mapping[str, Any]) -> dict[str, int]:
        """Return the columns of every table of the model that :meth:`from_config` would build.

        They are ``embedding_dim``, unless a subclass with :attr:`mixed_dims` overrides this. Settings that are not in
        ``config`` have their defaults.
        """
        return dict.fromkeys((feature.table for feature in spec.features), int(config.get("embedding_dim", 16)))

    @classmethod
    def tables_from(cls, spec: FeatureSpec, config: Mapping[str, Any]) -> tuple[TableConfig, ...]:
        """Return the tables of the model that :meth:`from_config` would build."""
        options = {name: config[name] for name in ("pooling", "dtype") if name in config}
        return tables_for(spec, cls.table_dims(spec, config), **{"pooling": "mean", **options})

    @abstractmethod
    def dense_part(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return logits [B] from :meth:`inputs`: dense columns [B, num_dense] and pooled rows [B, F, D].

        A subclass writes ``dense_part(self, dense, embedded)``.
        """

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Look up the rows of a batch on the model's device; return the arguments of :meth:`dense_part`."""
        return batch.dense, self.embeddings(batch.ids, batch.offsets, batch.weights, time=batch.time)

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        """The tables."""
        return self.embeddings.tables

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.embeddings.device

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return everything but the rows: what a ``torch.optim`` optimizer takes."""
        return [parameter for parameter in self.parameters() if parameter is not self.embeddings.handle]

    def dense_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of everything but the rows: parameters, then buffers."""
        for name, value in (*self.named_parameters(), *self.named_buffers()):
            if value is not self.embeddings.handle:
                yield name, value

    def forward(self, batch: Batch) -> Tensor:
        """Return logits [B] float32."""
        if batch.dense.device != self.device:
            batch = batch.to(self.device)
        if self.by_shards is not None and not torch.is_grad_enabled():
            return self.by_shards(self, batch)
        inputs = self.inputs(batch)
        # Evaluation is not compiled: each of its batch sizes would be compiled, and its numbers should be those of a
        # model loaded from a checkpoint.
        score = self._compiled if self.training and self._compiled is not None else self.dense_part
        return self._logits(score, inputs)

    def _logits(self, score: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        if self.device.type == "cuda" and not torch.compiler.is_exporting():
            torch.set_float32_matmul_precision("high" if self.matmul == "tf32" else "highest")
        if self.matmul != "bf16":
            return score(*inputs)
        cached = not isinstance(score, DenseGraphs)  # weights that are cast outside of a graph are not in it
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=cached):
            logits = score(*inputs)
        return logits.float()

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of :attr:`objective`, a mean; its ``backward`` also updates the rows.

        Raises:
            ConfigError: the objective is over lists, and the batch does not hold whole lists.
            ValueError: the batch has no labels, or not one for each example.
        """
        if batch.labels is None:
            raise ValueError(f"batch {batch.step} has no labels, so it has no loss. Use predict instead.")
        if self.objective not in RecModel.objectives:
            return self.own_loss(batch)
        if self.objective != "bce" and batch.groups is None:
            raise ConfigError(
                f"loss {self.objective} is over lists, and batch {batch.step} does not say which rows are a list. Read "
                "batches with whole_groups=True, or take loss bce."
            )
        logits = self(batch)
        if logits.shape != batch.labels.shape:
            raise ValueError(
                f"batch {batch.step} has labels of shape {list(batch.labels.shape)} for {len(logits)} examples."
            )
        if batch.groups is not None and self.objective != "bce":
            labels, groups = batch.labels.to(logits.device), batch.groups.to(logits.device)
            return list_loss(self.objective, logits, labels, groups)
        return binary_cross_entropy(logits, batch.labels.to(logits.device))

    def own_loss(self, batch: Batch) -> Tensor:
        """Return the loss of an objective that :class:`RecModel` does not have, for a batch with labels."""
        raise ConfigError(f"model {self.name!r} has no loss {self.objective!r}. It has: {listed(self.objectives)}.")

    @torch.no_grad()
    def predict(self, batch: Batch) -> Tensor:
        """Return probabilities [B] float32; changes nothing."""
        return torch.sigmoid(self(batch))

    def compile_dense(self, **options: Any) -> None:
        """Compile the dense part with ``torch.compile``; the tables keep their own kernels.

        Shapes are static by default: the smaller last batch of an epoch compiles once more, and no batch is slower.

        Raises:
            ConfigError: no C++ compiler for a model on the CPU.
        """
        compilers = (os.environ.get("CXX", "g++"), "clang++", "cl")
        if self.device.type == "cpu" and not any(shutil.which(name) for name in compilers):
            raise ConfigError(
                "compiling the dense part needs a C++ compiler, and none was found. Install one "
                "(apt install g++), or leave --compile out."
            )
        self._compiled = torch.compile(self.dense_part, **{"dynamic": False, **options})

    def graph_dense(self) -> None:
        """Run the dense part in training as CUDA graphs, which takes the host one launch a pass. Experimental.

        It pays for batches that the GPU trains faster than the host queues: up to about 16,384 on an H100. The
        operations must not depend on values. Losses equal those without graphs as long as the library chooses the same
        kernels. Batches of up to 4 sizes have graphs, each with its own memory for activations.

        Raises:
            ConfigError: the model is not on a GPU, its dense part is compiled, or it has buffers, such as those of a
                batch norm.
        """
        if self.device.type != "cuda":
            raise ConfigError(f"CUDA graphs need a model on a GPU; this one is on {self.device}. Leave them out.")
        if self._compiled is not None:
            raise ConfigError("the dense part is compiled. Choose torch.compile or CUDA graphs.")
        buffers = [name for name, _ in _DensePart(self).named_buffers()]
        if buffers:
            raise ConfigError(f"CUDA graphs do not serve models with buffers, such as {buffers[0]!r}. Leave them out.")
        self._compiled = DenseGraphs(self, self.dense_part, self.dense_parameters)

    @torch.no_grad()
    def export_dense(self, batch: Batch) -> torch.export.ExportedProgram:
        """Return the dense part, as in evaluation, as a ``torch.export`` program of PyTorch's own operations.

        The program holds the dense parameters and no rows, and runs where Stoker is not installed. It takes what
        :meth:`inputs` returns, such as dense columns [B, num_dense] and pooled rows [B, F, D], for any B of at least 1,
        and returns logits [B] float32, equal to those of the model within rounding.

        >>> model = stoker.DLRM(stoker.FeatureSpec.from_sizes(2, [10, 10]), bottom=(8,), top=(8,))
        >>> batch = stoker.Batch(dense=torch.zeros(4, 2), ids=torch.ones(4, 2, dtype=torch.int64))
        >>> program = model.export_dense(batch)
        >>> torch.export.save(program, "dense.pt2")
        >>> program.module()(*model.inputs(batch)).shape
        torch.Size([4])

        Args:
            batch: an example of at least one row; its values do not matter.

        Raises:
            ConfigError: the batch is empty.
        """
        if not len(batch):
            raise ConfigError("export_dense needs a batch of at least 1 example, and this one has 0. Give it another.")
        training = self.training
        self.eval()
        try:
            inputs = self.inputs(batch.to(self.device))
            if len(batch) == 1:  # torch.export treats a size of 1 as a constant
                inputs = tuple(torch.cat([each, each]) for each in inputs)
            rows = torch.export.Dim("batch", min=1)
            return torch.export.export(_DensePart(self), inputs, dynamic_shapes=(tuple({0: rows} for _ in inputs),))
        finally:
            self.train(training)

    def config(self) -> dict[str, Any]:
        """Return the settings as plain JSON values. Optimizer and device are not part of the model."""
        return {
            "model": self.name,
            "embedding_dim": self.embedding_dim,
            "pooling": self.pooling,
            "dtype": self.dtype,
            "dense_dtype": {"fp32": "float32", "bf16": "bfloat16"}.get(self.matmul, self.matmul),  # its name in files
            "seed": self.seed,
            **({"tensor_train": self.tensor_train} if self.tensor_train else {}),
        }

    @classmethod
    def from_config(cls, spec: FeatureSpec, config: Mapping[str, Any], **options: Any) -> Self:
        """Build the model from :meth:`config`; ``options``: ``optimizer``, ``device``, ``backend``, ``placement``."""
        settings: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in renamed(config).items() if name != "model"
        }
        return cls(spec, **settings, **options)
