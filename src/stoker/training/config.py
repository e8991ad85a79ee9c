"""The settings of a training run, and the model, tables, optimizers and schedule that they define."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import torch

from stoker.base.checks import near
from stoker.base.device import resolve_device
from stoker.base.errors import ConfigError
from stoker.base.settings import Useless
from stoker.base.units import listed
from stoker.dataset.spec import FeatureSpec
from stoker.models import MODELS, RecModel, TwoTower
from stoker.models.registry import check_options, own_options
from stoker.ops.loss import LISTS
from stoker.optim import (
    ROW_OPTIMIZERS,
    Constant,
    CosineDecay,
    DenseLAMB,
    OneCycle,
    PolynomialDecay,
    RowOptimizer,
    Schedule,
    StepDecay,
)
from stoker.placement.budget import MemoryBudget
from stoker.tables import Ranks, Strategy, TableConfig, TensorTrain
from stoker.tables.compressed.tensor_train import stored_tables
from stoker.training.scores.metrics import RECALL
from stoker.training.settings import (
    DENSE_LR,
    DenseConfig,
    MachineConfig,
    ModelConfig,
    OrderConfig,
    RateConfig,
    RowConfig,
    RunConfig,
)

_DENSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "lamb": DenseLAMB,
}


class Scaling(NamedTuple):
    """Factors on learning rates and weight decay, for batches larger or smaller than ``base_batch_size``."""

    row_lr: float = 1.0
    dense_lr: float = 1.0
    row_weight_decay: float = 1.0


_NO_PLACEMENT = (
    " It plans one for a budget: give device_memory='4GiB', and strategy='cached', 'hot-cold' or 'host-pipelined' to "
    "choose how. In a loop of your own, models and EmbeddingTables take placement=stoker.Cached(...)."
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(  # the fields of the last base come first
    MachineConfig, MemoryBudget, RunConfig, RateConfig, DenseConfig, RowConfig, OrderConfig, ModelConfig
):  # fmt: skip
    """All settings of :func:`stoker.train`, the fields of its bases. They and the dataset determine every number.

    Raises:
        ConfigError: a value is out of range, or values contradict each other.

    >>> TrainConfig(model="dcn", device_memory="4GiB").replace(epochs=2).spill
    'parts'
    """

    #: Wrong arguments that users try, and what to give instead.
    INSTEAD: ClassVar[Mapping[str, str]] = {"placement": _NO_PLACEMENT}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in MODELS:
            self._refuse(f"model {self.model!r} is unknown. Choose one of {', '.join(map(repr, MODELS))}.", "model")
        self._check_loss()
        with _refusal("tt_rank", "tt_cores"):
            if self.tt_rank is not None:
                TensorTrain(rank=self.tt_rank, cores=self.tt_cores)
        with _refusal("tt_own"):
            for own in self.tt_own.values():
                TensorTrain(own=own)
        with _refusal(
            "row_optimizer", "row_cow_clip", "row_options", *ROW_OPTIMIZERS[self.row_optimizer].settings.values()
        ):
            self.make_row_optimizer(Constant())

    def _check_loss(self) -> None:
        having = [name for name, model in MODELS.items() if self.loss in model.objectives]
        if self.model not in having:
            self._refuse(
                f"model {self.model!r} has no loss {self.loss!r}, which is of {listed(having)}. Choose another of the "
                "two.",
                "loss", "model",
            )  # fmt: skip
        over = "lists" if self.loss in LISTS else "the items of a batch"
        if self.loss != "bce" and self.shards > 1:
            self._refuse(
                f"loss {self.loss} is over {over}, which {self.shards} shards, or ranks, would cut. Give shards 1 and "
                "one process, or loss bce.",
                "loss", "shards",
            )  # fmt: skip
        if self.loss not in RecModel.objectives and (self.compile or self.cuda_graphs):
            what = "compile" if self.compile else "cuda_graphs"
            self._refuse(f"loss {self.loss} does not use the dense part that {what} makes faster. Leave it out.", what)
        if self.metric in RECALL and not (issubclass(MODELS[self.model], TwoTower) and self.shards == 1):
            self._refuse(
                f"metric {self.metric} is of model two-tower, in one process without shards. Choose auc or log_loss.",
                "metric",
            )

    def useless(self) -> Useless:
        yield from super().useless()
        if MODELS[self.model].mixed_dims:
            yield ("embedding_dim",), f"model {self.model!r} has tables of different widths (option dims)"
        if "lamb" not in (self.row_optimizer, self.dense_optimizer):
            yield ("min_trust", "max_trust"), "only lamb has a trust ratio"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Invert :meth:`to_dict`.

        Raises:
            ConfigError: a setting does not exist (the message names the nearest one), or a value is out of range.
        """
        if "placement" in values:
            raise ConfigError(f"train has no setting 'placement'.{_NO_PLACEMENT}")
        return super().from_dict(values)

    def total_steps(self, epoch: int) -> int:
        """Return the steps of the whole run; ``epoch``: steps of one epoch."""
        return self.epochs * epoch if self.steps is None else self.steps

    def make_schedule(self, total_steps: int) -> Schedule:
        """Return the schedule of both learning rates over a run of ``total_steps``."""
        length = self.decay_steps or max(1, total_steps - self.warmup)
        match self.schedule:
            case "linear":
                return PolynomialDecay(warmup=self.warmup, steps=length, power=1.0)
            case "polynomial":
                return PolynomialDecay(warmup=self.warmup, steps=length, power=2.0)
            case "cosine":
                return CosineDecay(warmup=self.warmup, steps=length)
            case "one-cycle":
                return OneCycle(steps=length, share=self.cycle_rise)
            case "step":
                return StepDecay(warmup=self.warmup, every=self.decay_steps or max(1, total_steps // 3))
            case _:
                return Constant(warmup=self.warmup)

    def dense_factor(self, schedule: Schedule, step: int) -> float:
        """Return the factor on the dense learning rate at ``step``, counted from 0: schedule times dense warm-up."""
        return schedule.factor(step) * min(1.0, (step + 1) / max(1, self.dense_warmup))

    @property
    def scaling(self) -> Scaling:
        """Factors on learning rates and weight decay for this batch size.

        "sqrt" (Krizhevsky 2014) and "linear" (Goyal et al. 2017) scale both rates. "cowclip" (Zheng et al. 2022) keeps
        the rows' rate, scales the dense rate by the root, and the rows' weight decay linearly.
        """
        s = (self.batch_size or self.base_batch_size) / self.base_batch_size
        root = math.sqrt(s)
        known = {"sqrt": Scaling(root, root), "linear": Scaling(s, s), "cowclip": Scaling(1.0, root, s)}
        return known.get(self.lr_scaling, Scaling())

    def make_row_optimizer(self, schedule: Schedule) -> RowOptimizer:
        """Return the row optimizer, its rate scaled to the batch size.

        Raises:
            ConfigError: ``row_options`` names an option that the optimizer does not have.
        """
        scaling = self.scaling
        kind = ROW_OPTIMIZERS[self.row_optimizer]
        lr = kind.default_lr if self.row_lr is None else self.row_lr
        more: dict[str, Any] = {option: getattr(self, setting) for option, setting in kind.settings.items()}
        common = {item.name for item in fields(RowOptimizer)}
        free = [item.name for item in fields(kind) if item.name not in {*common, *more}]
        for name, value in self.row_options.items():
            if name not in free:
                has = f" It has: {', '.join(free)}." if free else ""
                raise ConfigError(f"{self.row_optimizer} has no option {name!r}.{near(name, free)}{has}")
            more[name] = tuple(value) if isinstance(value, list) else value
        return kind(
            lr=lr * scaling.row_lr, schedule=schedule,
            weight_decay=self.row_weight_decay * scaling.row_weight_decay, clip_value=self.row_clip_value,
            clip_norm=self.row_clip_norm, cow_clip=self.row_cow_clip, **more,
        )  # fmt: skip

    def make_dense_optimizer(self, model: RecModel) -> torch.optim.Optimizer:
        """Return the optimizer of the dense part, its rate scaled to the batch size; all but LAMB are fused."""
        lr = (DENSE_LR[self.dense_optimizer] if self.dense_lr is None else self.dense_lr) * self.scaling.dense_lr
        kind: Any = _DENSE_OPTIMIZERS[self.dense_optimizer]
        if self.dense_optimizer == "lamb":
            options: dict[str, Any] = {"min_trust": self.min_trust, "max_trust": self.max_trust}
        else:
            fused = self.dense_optimizer != "adagrad" or model.device.type == "cpu"
            options = {"fused": True} if fused else {"foreach": True}
        optimizer: torch.optim.Optimizer = kind(
            model.dense_parameters(), lr=lr, weight_decay=self.dense_weight_decay, **options
        )
        return optimizer

    def tables(self, spec: FeatureSpec) -> tuple[TableConfig, ...]:
        """Return the tables of the model.

        Raises:
            ConfigError: the model does not have one of ``model_options``.
        """
        kind = MODELS[self.model]
        check_options(kind, self.model_options)
        own = {"embedding_dim": self.embedding_dim, "pooling": self.pooling, "dtype": self.dtype}
        return kind.tables_from(spec, {**self.model_options, **own})

    def tensor_trains(self, spec: FeatureSpec) -> dict[str, TensorTrain]:
        """Return the compressed tables with their shapes; a table that would not get smaller is left out.

        Raises:
            ConfigError: ``tt_own`` names an unknown table, or a table cannot have this shape.
        """
        tables = {table.name: table for table in self.tables(spec)}
        for name in self.tt_own:
            if name not in tables:
                raise ConfigError(
                    f"tt_own names the table {name!r}, which does not exist.{near(name, list(tables))} The tables are "
                    f"{', '.join(tables)}.", settings=("tt_own",),
                )  # fmt: skip
        chosen: dict[str, TensorTrain] = {}
        for name, table in tables.items():
            if name in self.tt_own:
                chosen[name] = TensorTrain(own=self.tt_own[name])
            elif self.tt_rank is not None and table.num_embeddings >= self.tt_rows:
                chosen[name] = TensorTrain(rank=self.tt_rank, cores=self.tt_cores)
        shapes = {name: train.shape_of(tables[name]) for name, train in chosen.items()}
        return {
            name: TensorTrain(shape=shape)
            for name, shape in shapes.items()
            if name in self.tt_own or shape.num_parameters < tables[name].num_embeddings * tables[name].embedding_dim
        }

    def stored_tables(self, spec: FeatureSpec) -> tuple[TableConfig, ...]:
        """Return the tables in memory and files: those of ``spec``, with cores in place of compressed tables."""
        return stored_tables(self.tables(spec), self.tensor_trains(spec))

    def make_model(
        self, spec: FeatureSpec, optimizer: RowOptimizer, placement: Mapping[str, Strategy] | None = None,
        ranks: Ranks | None = None,
    ) -> RecModel:  # fmt: skip
        """Return a new model for a dataset's columns; ``placement`` None: all rows on the device.

        Raises:
            ConfigError: the model does not have one of ``model_options``, or refuses its value.
        """
        kind = MODELS[self.model]
        options: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in self.model_options.items()
        }
        check_options(kind, options)
        if ranks is not None:
            options |= {"ranks": ranks, "shards": self.shards}
        try:
            model = kind(
                spec, embedding_dim=self.embedding_dim, pooling=self.pooling, dtype=self.dtype,
                matmul=self.matmul, optimizer=optimizer, seed=self.seed, device=resolve_device(self.device),
                backend=self.backend, placement=placement, tensor_train=self.tensor_trains(spec), **options,
            )  # fmt: skip
            model.embeddings.shards, model.objective = self.shards, self.loss
            model.embeddings.step_each_backward()  # also where the process has a GradScaler elsewhere
            return model
        except TypeError as error:
            if "unexpected keyword argument" in str(error):
                name = str(error).rsplit("argument", 1)[1].strip(" '")
                raise ConfigError(
                    f"model {self.model!r} has no option {name!r}. It has: {', '.join(own_options(kind))}."
                ) from error
            reason = str(error).partition("\n")[0]  # torch adds a trace of C++
            raise ConfigError(f"model {self.model!r} cannot be built with {options}: {reason}.") from error


@contextmanager
def _refusal(*names: str) -> Iterator[None]:
    """Add the names of settings to an error within the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{names[0]}: {error}", settings=names) from error
