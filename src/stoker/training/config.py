"""Settings of a training run, and what they resolve to for one model and dataset."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Unpack, get_args

import torch

from stoker.base.checks import near
from stoker.base.device import resolve_device
from stoker.base.errors import ConfigError
from stoker.base.units import parse_size
from stoker.dataset.spec import FeatureSpec
from stoker.models import MODELS, RecModel
from stoker.ops import BackendName
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
from stoker.tables import Strategy, TableConfig, TensorTrain
from stoker.tables.compressed.tensor_train import stored_tables
from stoker.training.model_options import check_options, own_options
from stoker.training.scaling import RULES, Scaling
from stoker.training.scores.metrics import DECIDING
from stoker.training.settings import TrainSettings

__all__ = ["RESUMABLE", "ROW_OPTIONS", "TrainConfig"]

_DENSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "lamb": DenseLAMB,
}
_ROW_LR = {
    "sgd": 0.1, "momentum_sgd": 0.01, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 1e-3, "adamw": 1e-3,
    "ftrl": 0.1, "lamb": 0.02,
}  # fmt: skip
#: row optimizer -> what it alone takes -> the field that holds it
ROW_OPTIONS: dict[str, dict[str, str]] = {
    "momentum_sgd": {"momentum": "row_momentum", "nesterov": "row_nesterov"},
    "ftrl": {"beta": "row_beta", "l1": "row_l1", "l2": "row_l2"},
    "lamb": {"min_trust": "min_trust", "max_trust": "max_trust", "l2": "row_l2"},
}
_DENSE_LR = {"sgd": 0.1, "adagrad": 0.01, "adam": 1e-3, "lamb": 0.01}
_SCHEDULES = ("constant", "linear", "cosine", "polynomial", "step", "one-cycle")


def _choice(name: str, value: str, choices: Any) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name} {value!r} is unknown. Choose one of {', '.join(map(repr, choices))}.", settings=(name,)
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of :func:`stoker.train`. Everything that changes the numbers is here, with its unit.

    Raises:
        ConfigError: a value out of its range.
    """

    model: str = "dlrm"  # a name in stoker.models.MODELS
    embedding_dim: int = 16  # columns of every table
    model_options: Mapping[str, Any] = field(default_factory=dict)  # the model's own, e.g. {"bottom": (64, 16)}
    pooling: Literal["sum", "mean", "max"] = "mean"  # of sequence features
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the tables
    tt_rank: int | None = None  # large tables as tensor trains of this rank: another, smaller model; None: as they are
    tt_rows: int = 1_000_000  # rows from which on a table is large; one that would not get smaller stays as it is
    tt_cores: int = 3  # of each, 2 to 4
    tt_own: Mapping[str, int] = field(default_factory=dict)  # table: numbers that each of its rows keeps for itself
    dense_dtype: Literal["float32", "bfloat16"] = "float32"  # of the dense part (bfloat16: autocast)
    compile: bool = False  # torch.compile for the dense part

    batch_size: int = 2048  # examples
    epochs: int = 1  # passes over the training rows
    steps: int | None = None  # batches in all; None means `epochs` passes
    shuffle_memory: str = "1GiB"  # rows shuffled at a time; part of the order, so part of the numbers
    seed: int = 0  # of initial values, rounding and the order of rows
    batch_order: Literal["auto", "shuffled", "hot-cold"] = "auto"  # "auto": by the schedule on a classified dataset
    swap_rate: float = 50.0  # of that schedule at the start, R in percent of a kind's batches
    schedule_rows: int = 8192  # first validation rows whose loss drives it

    row_optimizer: Literal["sgd", "momentum_sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl", "lamb"] = (
        "rowwise_adagrad"
    )
    # None means 0.1 for sgd and ftrl, 0.01 for momentum_sgd, 0.05 for adagrad and rowwise_adagrad, 1e-3 for adam and
    # adamw, 0.02 for lamb.
    row_lr: float | None = None
    row_weight_decay: float = 0.0  # L2, on touched rows; of adamw and lamb decoupled from the moments
    row_momentum: float = 0.9  # of momentum_sgd
    row_nesterov: bool = False  # of momentum_sgd: Nesterov's momentum
    row_beta: float = 1.0  # of ftrl: smooths the first steps
    row_l1: float = 0.0  # of ftrl: the larger, the more weights are exactly 0
    row_l2: float = 0.0  # of ftrl: L2 of the weights; of lamb: L2 on touched rows, through its moments
    row_clip_value: float | None = None  # largest absolute value in a row's gradient
    row_clip_norm: float | None = None  # largest norm of a row's gradient
    row_cow_clip: tuple[float, float] | None = None  # CowClip's (r, zeta), such as (1.0, 1e-5)
    dense_optimizer: Literal["sgd", "adagrad", "adam", "lamb"] = "adam"
    dense_lr: float | None = None  # None means 0.1 for sgd, 0.01 for adagrad and lamb, 1e-3 for adam
    dense_weight_decay: float = 0.0  # L2; of lamb decoupled from its moments
    dense_clip_norm: float | None = None  # largest norm over all dense gradients
    min_trust: float = 0.0  # of lamb: least trust ratio; above 0 tables that begin small grow as under Adam
    max_trust: float = 10.0  # and the largest
    lr_scaling: Literal["none", "sqrt", "linear", "cowclip"] = "none"  # of rates with batch_size / base_batch_size
    base_batch_size: int = 2048  # examples; the batch size that the learning rates are meant for
    # Of both learning rates.
    schedule: Literal["constant", "linear", "cosine", "polynomial", "step", "one-cycle"] = "constant"
    cycle_rise: float = 0.25  # share of the steps in which one-cycle rises
    warmup: int = 0  # steps of linear warm-up
    dense_warmup: int = (
        0  # steps of a linear warm-up of the dense rate alone, on top of the schedule; CowClip takes an epoch
    )
    decay_steps: int | None = None  # length of the decay, or steps between two drops; None means to the end, or a third

    eval_every: int | None = None  # steps; None means at the end of every epoch
    valid_rows: int | None = None  # the first so many rows of the validation split; None means all
    # What decides which checkpoint is best; all but the first two need a dataset with groups.
    metric: Literal["auc", "log_loss", "mrr", "ndcg", "hr", "group_auc"] = "auc"
    ranking_k: int = 10  # places of a list that ndcg and hr look at
    patience: int | None = None  # evaluations in a row without a better metric before stopping; None means never
    save_every: int | None = None  # steps; None means at every evaluation
    checkpoint_minutes: float = 5.0  # training time that a kill may cost: minutes between checkpoints; 0: never by time
    keep_last: int = 2  # checkpoints kept beside the best one
    log_every: int = 50  # steps between two lines of metrics.jsonl
    tensorboard: bool = True

    # For a copy of the training rows in fast memory, such as "2GiB"; "auto": half of what is free on a GPU whose tables
    # are resident, else none, as the page cache holds what was read; "0": none.
    data_memory: str = "auto"
    device_memory: str | None = None  # for rows and their optimizer state, such as "4GiB"; None or "all": no limit
    host_memory: str | None = None  # for rows that do not fit there; None means 80 % of what is available
    home_path: str | None = None  # directory of the file for rows that do not fit either; None: the temporary one
    # Of tables that do not fit there; "auto": what moves the fewest bytes.
    strategy: Literal["auto", "cached", "hot-cold", "host-pipelined"] = "auto"
    lookahead: int = 64  # batches whose ids are known in advance
    foresight: bool = False  # read the ids of an epoch before its first step, to know the next use of every row
    in_flight: int | None = None  # batches whose rows are on the device at a time; None adapts
    spill: Literal["parts", "refuse"] = "parts"  # batches with more rows than slots

    device: str = "auto"  # "auto" takes the GPU where there is one
    backend: BackendName = "auto"  # kernels of the tables
    threads: int | None = None  # CPU threads; None leaves torch's own number

    def __post_init__(self) -> None:
        options = {name: list(v) if isinstance(v, tuple) else v for name, v in self.model_options.items()}
        object.__setattr__(self, "model_options", options)  # equal to what comes back from JSON
        if self.row_cow_clip is not None:
            object.__setattr__(self, "row_cow_clip", tuple(self.row_cow_clip))
        if not isinstance(self.batch_size, int):
            raise ConfigError(
                f"batch_size is {self.batch_size!r}; settings hold a whole number of examples. 'auto' is for "
                "stoker.train.",
                settings=("batch_size",),
            )
        _choice("model", self.model, MODELS)
        _choice("row_optimizer", self.row_optimizer, ROW_OPTIMIZERS)
        _choice("dense_optimizer", self.dense_optimizer, _DENSE_OPTIMIZERS)
        _choice("schedule", self.schedule, _SCHEDULES)
        _choice("lr_scaling", self.lr_scaling, RULES)
        if not 0 < self.cycle_rise < 1:
            raise ConfigError(
                f"cycle_rise is {self.cycle_rise}; it is a share of the steps, between 0 and 1.",
                settings=("cycle_rise",),
            )
        if self.schedule == "one-cycle" and self.warmup:
            raise ConfigError(
                f"warmup is {self.warmup}, but one-cycle begins with a warm-up of its own. Leave warmup out, or set "
                "cycle_rise, the share of the steps that it takes.",
                settings=("schedule", "warmup"),
            )
        if not (0 < self.max_trust < math.inf and 0 <= self.min_trust <= self.max_trust):
            raise ConfigError(
                f"min_trust is {self.min_trust} and max_trust {self.max_trust}; they bound the trust ratio of lamb, so "
                "0 <= min_trust <= max_trust, and max_trust is finite and above 0.",
                settings=("min_trust", "max_trust"),
            )
        _choice("metric", self.metric, DECIDING)
        _choice("batch_order", self.batch_order, ("auto", "shuffled", "hot-cold"))
        object.__setattr__(self, "swap_rate", float(self.swap_rate))  # equal to what comes back from JSON
        if not 1 <= self.swap_rate <= 100:
            raise ConfigError(f"swap_rate is {self.swap_rate:g}; it must be 1 to 100 percent.", settings=("swap_rate",))
        _choice("pooling", self.pooling, ("sum", "mean", "max"))
        _choice("dtype", self.dtype, ("float32", "bfloat16"))
        _choice("dense_dtype", self.dense_dtype, ("float32", "bfloat16"))
        _choice("backend", self.backend, get_args(BackendName))
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must not be negative.", settings=("seed",))
        object.__setattr__(self, "tt_own", dict(self.tt_own))
        if self.tt_rank is not None:
            try:
                TensorTrain(rank=self.tt_rank, cores=self.tt_cores)
            except ConfigError as error:
                raise ConfigError(f"tt_rank: {error}", settings=("tt_rank", "tt_cores")) from error
        for own in self.tt_own.values():
            try:
                TensorTrain(own=own)
            except ConfigError as error:
                raise ConfigError(f"tt_own: {error}", settings=("tt_own",)) from error
        for name in (
            "embedding_dim",
            "batch_size",
            "base_batch_size",
            "tt_rows",
            "epochs",
            "schedule_rows",
            "keep_last",
            "log_every",
            "ranking_k",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.", settings=(name,))
        _choice("spill", self.spill, ("parts", "refuse"))
        _choice("strategy", self.strategy, ("auto", "cached", "hot-cold", "host-pipelined"))
        if self.home_path is not None:
            object.__setattr__(self, "home_path", os.fspath(self.home_path))  # a Path cannot go into JSON
        if self.device_memory == "all":
            object.__setattr__(self, "device_memory", None)
        for name in ("device_memory", "host_memory", "shuffle_memory", "data_memory"):
            if (size := getattr(self, name)) is not None and (name, size) != ("data_memory", "auto"):
                try:
                    parse_size(size)
                except ConfigError as error:
                    raise ConfigError(f"{name}: {error}", settings=(name,)) from error
        if self.lookahead < 0:
            raise ConfigError(
                f"lookahead is {self.lookahead}; it must not be a negative number of batches.", settings=("lookahead",)
            )
        for name in (
            "steps",
            "decay_steps",
            "eval_every",
            "valid_rows",
            "patience",
            "save_every",
            "threads",
            "in_flight",
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be at least 1, or left out.", settings=(name,)
                )
        for name in (
            "row_lr",
            "dense_lr",
            "row_weight_decay",
            "row_beta",
            "row_l1",
            "row_l2",
            "dense_weight_decay",
            "dense_clip_norm",
            "warmup",
            "dense_warmup",
            "checkpoint_minutes",
        ):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name} is {value}; it must be finite and not negative.", settings=(name,))

        try:
            self.make_row_optimizer(Constant())
        except ConfigError as error:
            settings = ("row_optimizer", "row_cow_clip", *ROW_OPTIONS.get(self.row_optimizer, {}).values())
            raise ConfigError(f"row_optimizer: {error}", settings=settings) from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Inverse of :meth:`to_dict`.

        Raises:
            ConfigError: a setting that does not exist.
        """
        known = {f.name for f in fields(cls)}
        if "placement" in values:
            raise ConfigError(
                "train has no setting 'placement': it plans one for a budget. Give device_memory='4GiB', and strategy="
                "'cached', 'hot-cold' or 'host-pipelined' to choose how. Models and EmbeddingTables take placement="
                "stoker.Cached(...), in a loop of your own."
            )
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"settings {unknown} do not exist. Known are: {', '.join(sorted(known))}.")
        return cls(**values)

    def replace(self, **changes: Unpack[TrainSettings]) -> TrainConfig:
        """The same settings but for ``changes``.

        Raises:
            ConfigError: a setting that does not exist.
        """
        values: dict[str, Any] = dict(changes)
        self.from_dict(values)
        return replace(self, **values)

    def total_steps(self, epoch: int) -> int:
        """Batches of the whole run, where an epoch has ``epoch`` of them."""
        return self.epochs * epoch if self.steps is None else self.steps

    def make_schedule(self, total_steps: int) -> Schedule:
        """The factor on both learning rates over a run of ``total_steps``."""
        length = self.decay_steps or max(1, total_steps - self.warmup)
        match self.schedule:
            case "linear":
                return PolynomialDecay(warmup=self.warmup, steps=length, power=1.0)
            case "polynomial":
                return PolynomialDecay(warmup=self.warmup, steps=length, power=2.0)
            case "cosine":
                return CosineDecay(warmup=self.warmup, steps=length)
            case "one-cycle":
                return OneCycle(steps=self.decay_steps or total_steps, share=self.cycle_rise)
            case "step":
                return StepDecay(warmup=self.warmup, every=self.decay_steps or max(1, total_steps // 3))
            case _:
                return Constant(warmup=self.warmup)

    def dense_factor(self, schedule: Schedule, step: int) -> float:
        """The factor on the dense learning rate at ``step``, counted from 0: that of the schedule, warmed up."""
        return schedule.factor(step) * min(1.0, (step + 1) / max(1, self.dense_warmup))

    @property
    def scaling(self) -> Scaling:
        """Factors on learning rates and weight decay for this batch size."""
        return Scaling.of(self.lr_scaling, self.batch_size / self.base_batch_size)

    def make_row_optimizer(self, schedule: Schedule) -> RowOptimizer:
        """The row optimizer, its rate scaled to the batch size."""
        scaling = self.scaling
        lr = _ROW_LR[self.row_optimizer] if self.row_lr is None else self.row_lr
        own = ROW_OPTIONS.get(self.row_optimizer, {})
        more: dict[str, Any] = {option: getattr(self, setting) for option, setting in own.items()}
        return ROW_OPTIMIZERS[self.row_optimizer](
            lr=lr * scaling.row_lr,
            schedule=schedule,
            weight_decay=self.row_weight_decay * scaling.row_weight_decay,
            clip_value=self.row_clip_value,
            clip_norm=self.row_clip_norm,
            cow_clip=self.row_cow_clip,
            **more,
        )

    def make_dense_optimizer(self, model: RecModel) -> torch.optim.Optimizer:
        """The optimizer of the dense part, in one fused kernel a step but for LAMB; its rate scaled to the batch."""
        lr = (_DENSE_LR[self.dense_optimizer] if self.dense_lr is None else self.dense_lr) * self.scaling.dense_lr
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
        """The tables of the model.

        Raises:
            ConfigError: an option that the model does not take.
        """
        kind = MODELS[self.model]
        check_options(kind, self.model_options)
        own = {"embedding_dim": self.embedding_dim, "pooling": self.pooling, "dtype": self.dtype}
        return kind.tables_from(spec, {**self.model_options, **own})

    def tensor_trains(self, spec: FeatureSpec) -> dict[str, TensorTrain]:
        """The tables that are compressed, with their shapes.

        Raises:
            ConfigError: a table that is not there, or cannot be compressed so.
        """
        tables = {table.name: table for table in self.tables(spec)}
        for name in self.tt_own:
            if name not in tables:
                raise ConfigError(
                    f"tt_own names the table {name!r}, which is not there.{near(name, list(tables))} There are: "
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
        """What lies in memory and in files: the tables of ``spec``, or their cores."""
        return stored_tables(self.tables(spec), self.tensor_trains(spec))

    def make_model(
        self, spec: FeatureSpec, optimizer: RowOptimizer, placement: Mapping[str, Strategy] | None = None
    ) -> RecModel:
        """A fresh model for a dataset's columns, with its rows where ``placement`` says; None: on the device.

        Raises:
            ConfigError: an option that the model does not have, or a value that it does not take.
        """
        kind = MODELS[self.model]
        options: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in self.model_options.items()
        }
        check_options(kind, options)
        try:
            model = kind(
                spec,
                embedding_dim=self.embedding_dim,
                pooling=self.pooling,
                dtype=self.dtype,
                dense_dtype=self.dense_dtype,
                optimizer=optimizer,
                seed=self.seed,
                device=resolve_device(self.device),
                backend=self.backend,
                placement=placement,
                tensor_train=self.tensor_trains(spec),
                **options,
            )
            model.embeddings.step_each_backward()  # as our loops mean it, whatever scalers the process has elsewhere
            return model
        except TypeError as error:
            if "unexpected keyword argument" in str(error):
                name = str(error).rsplit("argument", 1)[1].strip(" '")
                raise ConfigError(
                    f"model {self.model!r} has no option {name!r}. It has: {', '.join(own_options(kind))}."
                ) from error
            raise ConfigError(f"model {self.model!r} cannot be built with {options}: {error}.") from error


#: Settings that may change when a run is resumed: they leave the numbers of a step alone (device, backend
#: and threads but for rounding). Where rows lie is among them.
RESUMABLE = frozenset(
    {
        "epochs", "steps", "eval_every", "valid_rows", "patience", "save_every", "checkpoint_minutes", "keep_last",
        "log_every", "tensorboard", "device", "backend", "threads", "data_memory", "device_memory", "host_memory",
        "home_path", "lookahead", "foresight", "in_flight", "spill", "strategy",
    }
)  # fmt: skip
