"""Settings of a training run, and what they resolve to for one model and dataset."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from os import PathLike
from typing import Any, Literal, TypedDict, Unpack, get_args, get_origin, get_type_hints

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


class MachineSettings(TypedDict, total=False):
    """Settings that leave the numbers of a run alone (device, backend and threads but for rounding), as keyword
    arguments: what editors and type checkers know of them. :class:`TrainConfig` says what each means."""

    device_memory: str | None
    host_memory: str | None
    home_path: str | PathLike[str] | None
    strategy: Literal["auto", "cached", "hot-cold", "host-pipelined"]
    lookahead: int
    foresight: bool
    in_flight: int | None
    spill: Literal["parts", "refuse"]
    device: str
    backend: BackendName
    threads: int | None


class TrainSettings(MachineSettings, total=False):
    """All settings of a run. ``batch_size="auto"`` is for :func:`stoker.train`."""

    model: str
    embedding_dim: int
    model_options: Mapping[str, Any]
    pooling: Literal["sum", "mean", "max"]
    dtype: Literal["float32", "bfloat16"]
    tt_rank: int | None
    tt_rows: int
    tt_cores: int
    tt_own: Mapping[str, int]
    dense_dtype: Literal["float32", "bfloat16"]
    compile: bool
    batch_size: int | Literal["auto"]
    epochs: int
    steps: int | None
    shuffle_memory: str
    seed: int
    batch_order: Literal["auto", "shuffled", "hot-cold"]
    swap_rate: float
    schedule_rows: int
    row_optimizer: Literal["sgd", "momentum_sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl", "lamb"]
    row_lr: float | None
    row_weight_decay: float
    row_momentum: float
    row_nesterov: bool
    row_beta: float
    row_l1: float
    row_l2: float
    row_clip_value: float | None
    row_clip_norm: float | None
    row_cow_clip: tuple[float, float] | None
    dense_optimizer: Literal["sgd", "adagrad", "adam", "lamb"]
    dense_lr: float | None
    dense_weight_decay: float
    dense_clip_norm: float | None
    min_trust: float
    max_trust: float
    lr_scaling: Literal["none", "sqrt", "linear", "cowclip"]
    base_batch_size: int
    schedule: Literal["constant", "linear", "cosine", "polynomial", "step", "one-cycle"]
    cycle_rise: float
    warmup: int
    dense_warmup: int
    decay_steps: int | None
    eval_every: int | None
    valid_rows: int | None
    metric: Literal["auc", "log_loss", "mrr", "ndcg", "hr", "group_auc"]
    ranking_k: int
    patience: int | None
    save_every: int | None
    checkpoint_minutes: float
    keep_last: int
    log_every: int
    tensorboard: bool
    data_memory: str


#: Settings that leave the numbers of a step alone, so that a replay may change them.
MACHINE = frozenset(MachineSettings.__annotations__)
#: Settings that may change when a run is resumed.
RESUMABLE = MACHINE | {
    "epochs", "steps", "eval_every", "valid_rows", "patience", "save_every", "checkpoint_minutes", "keep_last",
    "log_every", "tensorboard", "data_memory",
}  # fmt: skip
_SIZES = ("device_memory", "host_memory", "shuffle_memory", "data_memory")
_AT_LEAST_ONE = (
    "embedding_dim", "batch_size", "base_batch_size", "tt_rows", "epochs", "schedule_rows", "keep_last", "log_every",
    "ranking_k",
)  # fmt: skip
_AT_LEAST_ONE_OR_NONE = (
    "steps", "decay_steps", "eval_every", "valid_rows", "patience", "save_every", "threads", "in_flight",
)  # fmt: skip
_NOT_NEGATIVE = (
    "row_lr", "dense_lr", "row_weight_decay", "row_beta", "row_l1", "row_l2", "dense_weight_decay", "dense_clip_norm",
    "warmup", "dense_warmup", "checkpoint_minutes",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Factors where a batch has s times the examples that the rates are meant for."""

    row_lr: float = 1.0
    dense_lr: float = 1.0
    row_weight_decay: float = 1.0

    @classmethod
    def by(cls, rule: str, s: float) -> Scaling:
        """The factors of a rule.

        Args:
            rule: "none"; "sqrt" (Krizhevsky 2014) or "linear" (Goyal et al. 2017) for both rates; "cowclip": rows keep
                their rate, the dense rate grows by the root and the rows' weight decay linearly (Zheng et al. 2022).
            s: batch size over the one that the rates are meant for; below 1 for smaller batches.
        """
        root = math.sqrt(s)
        known = {
            "sqrt": cls(row_lr=root, dense_lr=root),
            "linear": cls(row_lr=s, dense_lr=s),
            "cowclip": cls(dense_lr=root, row_weight_decay=s),
        }
        return known.get(rule, cls())


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
        self._set("model_options", options)  # equal to what comes back from JSON, as are those below
        self._set("tt_own", dict(self.tt_own))
        self._set("swap_rate", float(self.swap_rate))
        if self.row_cow_clip is not None:
            self._set("row_cow_clip", tuple(self.row_cow_clip))
        if self.home_path is not None:
            self._set("home_path", os.fspath(self.home_path))
        if self.device_memory == "all":
            self._set("device_memory", None)
        if not isinstance(self.batch_size, int):
            raise ConfigError(
                f"batch_size is {self.batch_size!r}; settings hold a whole number of examples. 'auto' is for "
                "stoker.train.",
                settings=("batch_size",),
            )
        for name, allowed in {"model": tuple(MODELS), **_choices()}.items():
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(
                    f"{name} {value!r} is unknown. Choose one of {', '.join(map(repr, allowed))}.", settings=(name,)
                )
        self._check_numbers()
        if self.schedule == "one-cycle" and self.warmup:
            raise ConfigError(
                f"warmup is {self.warmup}, but one-cycle begins with a warm-up of its own. Leave warmup out, or set "
                "cycle_rise, the share of the steps that it takes.",
                settings=("schedule", "warmup"),
            )
        try:
            if self.tt_rank is not None:
                TensorTrain(rank=self.tt_rank, cores=self.tt_cores)
        except ConfigError as error:
            raise ConfigError(f"tt_rank: {error}", settings=("tt_rank", "tt_cores")) from error
        try:
            for own in self.tt_own.values():
                TensorTrain(own=own)
        except ConfigError as error:
            raise ConfigError(f"tt_own: {error}", settings=("tt_own",)) from error
        for name in _SIZES:
            if (size := getattr(self, name)) is not None and (name, size) != ("data_memory", "auto"):
                try:
                    parse_size(size)
                except ConfigError as error:
                    raise ConfigError(f"{name}: {error}", settings=(name,)) from error
        try:
            self.make_row_optimizer(Constant())
        except ConfigError as error:
            settings = ("row_optimizer", "row_cow_clip", *ROW_OPTIONS.get(self.row_optimizer, {}).values())
            raise ConfigError(f"row_optimizer: {error}", settings=settings) from error

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        """Refuse numbers out of their range."""

        def check(fits: bool, text: str, *names: str) -> None:
            if not fits:
                raise ConfigError(text, settings=names)

        rise, low, high = self.cycle_rise, self.min_trust, self.max_trust
        check(0 < rise < 1, f"cycle_rise is {rise}; it is a share of the steps, between 0 and 1.", "cycle_rise")
        check(
            0 < high < math.inf and 0 <= low <= high,
            f"min_trust is {low} and max_trust {high}; they bound the trust ratio of lamb, so 0 <= min_trust <= "
            "max_trust, and max_trust is finite and above 0.",
            "min_trust",
            "max_trust",
        )
        rate = self.swap_rate
        check(1 <= rate <= 100, f"swap_rate is {rate:g}; it must be 1 to 100 percent.", "swap_rate")
        check(self.seed >= 0, f"seed is {self.seed}; it must not be negative.", "seed")
        ahead = self.lookahead
        check(ahead >= 0, f"lookahead is {ahead}; it must not be a negative number of batches.", "lookahead")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            check(value >= 1, f"{name} is {value}; it must be at least 1.", name)
        for name in _AT_LEAST_ONE_OR_NONE:
            value = getattr(self, name)
            check(value is None or value >= 1, f"{name} is {value}; it must be at least 1, or left out.", name)
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            fits = value is None or (value >= 0 and math.isfinite(value))
            check(fits, f"{name} is {value}; it must be finite and not negative.", name)

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
        return Scaling.by(self.lr_scaling, self.batch_size / self.base_batch_size)

    def make_row_optimizer(self, schedule: Schedule) -> RowOptimizer:
        """The row optimizer, its rate scaled to the batch size."""
        scaling = self.scaling
        lr = _ROW_LR[self.row_optimizer] if self.row_lr is None else self.row_lr
        own = ROW_OPTIONS.get(self.row_optimizer, {})
        more: dict[str, Any] = {option: getattr(self, setting) for option, setting in own.items()}
        return ROW_OPTIMIZERS[self.row_optimizer](
            lr=lr * scaling.row_lr, schedule=schedule,
            weight_decay=self.row_weight_decay * scaling.row_weight_decay, clip_value=self.row_clip_value,
            clip_norm=self.row_clip_norm, cow_clip=self.row_cow_clip, **more,
        )  # fmt: skip

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
                spec, embedding_dim=self.embedding_dim, pooling=self.pooling, dtype=self.dtype,
                dense_dtype=self.dense_dtype, optimizer=optimizer, seed=self.seed, device=resolve_device(self.device),
                backend=self.backend, placement=placement, tensor_train=self.tensor_trains(spec), **options,
            )  # fmt: skip
            model.embeddings.step_each_backward()  # as our loops mean it, whatever scalers the process has elsewhere
            return model
        except TypeError as error:
            if "unexpected keyword argument" in str(error):
                name = str(error).rsplit("argument", 1)[1].strip(" '")
                raise ConfigError(
                    f"model {self.model!r} has no option {name!r}. It has: {', '.join(own_options(kind))}."
                ) from error
            raise ConfigError(f"model {self.model!r} cannot be built with {options}: {error}.") from error


@cache
def _choices() -> dict[str, tuple[str, ...]]:
    """The values of every setting that is one of several, by its annotation."""
    hints = get_type_hints(TrainConfig)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
