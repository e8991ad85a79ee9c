"""The settings of a training run, by what they are about. None of this needs torch: the command line's help reads it.

:class:`stoker.TrainConfig` has them all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from stoker.base.settings import Settings, Useless, setting
from stoker.placement.budget import MemoryBudget

RowOptimizerName = Literal["sgd", "momentum_sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl", "lamb"]

#: row optimizer -> what it alone takes -> the field that holds it
ROW_OPTIONS: dict[str, dict[str, str]] = {
    "momentum_sgd": {"momentum": "row_momentum", "nesterov": "row_nesterov"},
    "ftrl": {"beta": "row_beta", "l1": "row_l1", "l2": "row_l2"},
    "lamb": {"min_trust": "min_trust", "max_trust": "max_trust", "l2": "row_l2"},
}
#: optimizer -> learning rate, where none is given
ROW_LR = {
    "sgd": 0.1, "momentum_sgd": 0.01, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 1e-3, "adamw": 1e-3,
    "ftrl": 0.1, "lamb": 0.02,
}  # fmt: skip
DENSE_LR = {"sgd": 0.1, "adagrad": 0.01, "adam": 1e-3, "lamb": 0.01}


def _by_kind(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{rate:g} for {kind}" for kind, rate in rates.items())


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings, panel="Model"):
    """What is trained."""

    model: str = setting("dlrm", "dlrm, deepfm, dcn, tbsm, din, tabular, or the name of a model of your own.")
    embedding_dim: int = setting(16, "Columns of every table.", least=1, options=("--embedding-dim", "--dim"))
    model_options: Mapping[str, Any] = setting(dict, 'The model\'s own options, such as {"bottom": (64, 16)}.')
    pooling: Literal["sum", "mean", "max"] = setting("mean", "Of sequence features.")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Of the tables.")
    tt_rank: int | None = setting(None, "Large tables as tensor trains of this rank: another, smaller model.")
    tt_rows: int = setting(1_000_000, "Rows of a large table; one that would not get smaller stays as it is.", least=1)
    tt_cores: int = setting(3, "Cores of each, 2 to 4.")
    tt_own: Mapping[str, int] = setting(dict, "TABLE=K: instead, K numbers for each of its rows and one core for all.")
    dense_dtype: Literal["float32", "bfloat16"] = setting("float32", "Of the dense part. bfloat16 is autocast.")
    compile: bool = setting(False, "Compile the dense part.")

    def __post_init__(self) -> None:
        # Equal to what comes back from JSON.
        options = {name: list(v) if isinstance(v, tuple) else v for name, v in self.model_options.items()}
        self._set("model_options", options)
        self._set("tt_own", dict(self.tt_own))
        super().__post_init__()

    def useless(self) -> Useless:
        yield from super().useless()
        if self.tt_rank is None:
            yield ("tt_rows", "tt_cores"), "without a tt rank no table is a tensor train"


@dataclass(frozen=True, kw_only=True)
class OrderConfig(Settings, panel="Optimization"):
    """Which examples, how many at a time, and in which order."""

    batch_size: int = setting(2048, "Examples.", least=1)
    epochs: int = setting(1, "Passes over the training rows.", least=1, resumable=True)
    steps: int | None = setting(None, "Batches in all, instead of epochs.", least=1, resumable=True)
    shuffle_memory: str = setting("1GiB", "Rows shuffled at a time; part of the order, so of the numbers.", size=True)
    seed: int = setting(0, "Of initial values, rounding and the order of rows.", least=0)
    batch_order: Literal["auto", "shuffled", "hot-cold"] = setting(
        "auto", "Order of batches. auto is hot-cold on a classified dataset."
    )
    swap_rate: float = setting(50.0, "R of the hot-cold schedule at the start, 1 to 100 percent.", least=1, most=100)
    schedule_rows: int = setting(8192, "First validation rows whose loss drives that schedule.", least=1)

    def __post_init__(self) -> None:
        self._set("swap_rate", float(self.swap_rate))
        if not isinstance(self.batch_size, int):
            self._refuse(
                f"batch_size is {self.batch_size!r}; settings hold a whole number of examples. 'auto' is for "
                "stoker.train.",
                "batch_size",
            )
        super().__post_init__()

    def useless(self) -> Useless:
        yield from super().useless()
        if self.batch_order == "shuffled":
            yield ("swap_rate", "schedule_rows"), "batches are shuffled, not hot and cold by the schedule"


@dataclass(frozen=True, kw_only=True)
class RowConfig(Settings, panel="Optimization"):
    """The optimizer of the rows."""

    row_optimizer: RowOptimizerName = setting("rowwise_adagrad", "Optimizer of the rows.")
    row_lr: float | None = setting(None, "Learning rate of the rows.", unset=_by_kind(ROW_LR), least=0)
    row_weight_decay: float = setting(0.0, "L2 of touched rows; of adamw and lamb decoupled from the moments.", least=0)
    row_momentum: float = setting(0.9, "Of momentum_sgd.")
    row_nesterov: bool = setting(False, "Of momentum_sgd: Nesterov's momentum.")
    row_beta: float = setting(1.0, "Of ftrl: smooths the first steps.", least=0)
    row_l1: float = setting(0.0, "Of ftrl: the larger, the more weights are exactly 0.", least=0)
    row_l2: float = setting(0.0, "Of ftrl: L2 of the weights. Of lamb: of touched rows, through its moments.", least=0)
    row_clip_value: float | None = setting(None, "Largest absolute value in a row's gradient.")
    row_clip_norm: float | None = setting(None, "Largest norm of a row's gradient.")
    row_cow_clip: tuple[float, float] | None = setting(None, "CowClip of the rows' gradients: r,zeta, such as 1,1e-5.")

    def __post_init__(self) -> None:
        if self.row_cow_clip is not None:
            self._set("row_cow_clip", tuple(self.row_cow_clip))
        super().__post_init__()

    def useless(self) -> Useless:
        yield from super().useless()
        used = ROW_OPTIONS.get(self.row_optimizer, {}).values()
        own = {name for options in ROW_OPTIONS.values() for name in options.values() if name.startswith("row_")}
        yield tuple(sorted(own.difference(used))), f"row optimizer {self.row_optimizer} does not have that"


@dataclass(frozen=True, kw_only=True)
class DenseConfig(Settings, panel="Optimization"):
    """The optimizer of the dense part."""

    dense_optimizer: Literal["sgd", "adagrad", "adam", "lamb"] = setting("adam", "Optimizer of the dense part.")
    dense_lr: float | None = setting(None, "Learning rate of the dense part.", unset=_by_kind(DENSE_LR), least=0)
    dense_weight_decay: float = setting(0.0, "L2 of the dense part; of lamb decoupled from its moments.", least=0)
    dense_clip_norm: float | None = setting(None, "Largest norm over all dense gradients.", least=0)
    min_trust: float = setting(0.0, "Of lamb: least trust ratio; above 0 tables that begin small grow as under Adam.")
    max_trust: float = setting(10.0, "Of lamb: largest trust ratio.")

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.min_trust, self.max_trust
        if not (0 < high < math.inf and 0 <= low <= high):
            self._refuse(
                f"min_trust is {low} and max_trust {high}; they bound the trust ratio of lamb, so 0 <= min_trust <= "
                "max_trust, and max_trust is finite and above 0.",
                "min_trust", "max_trust",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RateConfig(Settings, panel="Optimization"):
    """How learning rates follow the batch size, and how both change over the steps."""

    lr_scaling: Literal["none", "sqrt", "linear", "cowclip"] = setting(
        "none", "Of learning rates with the batch size. With cowclip rows keep theirs."
    )
    base_batch_size: int = setting(2048, "Examples that the learning rates are meant for.", least=1)
    schedule: Literal["constant", "linear", "cosine", "polynomial", "step", "one-cycle"] = setting(
        "constant", "Of both learning rates."
    )
    cycle_rise: float = setting(0.25, "Share of the steps in which one-cycle rises.")
    warmup: int = setting(0, "Steps of linear warm-up.", least=0)
    dense_warmup: int = setting(0, "The same for the dense part alone, on top; CowClip takes an epoch.", least=0)
    decay_steps: int | None = setting(None, "Steps of decay, or between two drops.", unset="to the end", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        rise = self.cycle_rise
        if not 0 < rise < 1:
            self._refuse(f"cycle_rise is {rise}; it is a share of the steps, between 0 and 1.", "cycle_rise")
        if self.schedule == "one-cycle" and self.warmup:
            self._refuse(
                f"warmup is {self.warmup}, but one-cycle begins with a warm-up of its own. Leave warmup out, or set "
                "cycle_rise, the share of the steps that it takes.",
                "schedule", "warmup",
            )  # fmt: skip

    def useless(self) -> Useless:
        yield from super().useless()
        if self.schedule != "one-cycle":
            yield ("cycle_rise",), "only the schedule one-cycle has a rise"


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings, panel="Run"):
    """What a run measures, keeps and writes."""

    eval_every: int | None = setting(None, "Steps between evaluations.", unset="an epoch", least=1, resumable=True)
    valid_rows: int | None = setting(None, "First so many validation rows only.", least=1, resumable=True)
    metric: Literal["auc", "log_loss", "mrr", "ndcg", "hr", "group_auc"] = setting(
        "auc", "What decides which checkpoint is best. All but auc and log_loss need a dataset with groups."
    )
    ranking_k: int = setting(10, "Places of a list that ndcg and hr look at.", least=1)
    patience: int | None = setting(None, "Evaluations without a better metric until it ends.", least=1, resumable=True)
    save_every: int | None = setting(None, "Steps between checkpoints.", unset="eval-every", least=1, resumable=True)
    checkpoint_minutes: float = setting(5.0, "Minutes between checkpoints besides; 0: none.", least=0, resumable=True)
    keep_last: int = setting(2, "Checkpoints kept beside the best.", least=1, resumable=True)
    log_every: int = setting(50, "Steps between lines of metrics.jsonl.", least=1, resumable=True)
    tensorboard: bool | None = setting(None, "Write TensorBoard events.", unset="where it is installed", resumable=True)
    data_memory: str = setting(
        "auto", "For a copy of the training rows in fast memory, such as 2GiB; 0: none; auto: half of what is free on "
        "a GPU whose tables are resident, else none.", size=True, resumable=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MachineConfig(Settings, panel="Machine"):
    """What computes. Of a run's numbers only the rounding depends on it."""

    device: str = setting("auto", "auto, cpu or cuda; auto takes the GPU where there is one.")
    backend: Literal["auto", "reference", "cpu", "triton"] = setting("auto", "Kernels of the tables.")
    threads: int | None = setting(None, "CPU threads.", unset="as many as torch takes", least=1)


#: All settings, in the order of the help.
PARTS: tuple[type[Settings], ...] = (
    ModelConfig, OrderConfig, RowConfig, DenseConfig, RateConfig, RunConfig, MemoryBudget, MachineConfig,
)  # fmt: skip
#: Settings that leave the numbers of a step alone, so that a replay may change them.
MACHINE = frozenset(item.name for part in (MemoryBudget, MachineConfig) for item in fields(part))
#: Settings that may change when a run is resumed.
RESUMABLE = MACHINE | {item.name for part in PARTS for item in fields(part) if item.metadata["resumable"]}
