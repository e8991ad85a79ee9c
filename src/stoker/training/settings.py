"""The settings of a training run in groups, which :class:`stoker.TrainConfig` combines.

This module does not import torch, so that ``--help`` is fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal

from stoker.base.checks import typed
from stoker.base.settings import Settings, Useless, like, setting
from stoker.base.units import parse_size
from stoker.optim import ROW_OPTIMIZERS, RowOptimizerName
from stoker.placement.budget import MemoryBudget, ReplaySettings

SMALLEST, LARGEST = 64, 2048  # examples of a batch; a step is not faster below; above, the learning rates do not fit
BATCHES = f"{SMALLEST} to {LARGEST}, by the training rows"
EPOCHS = 10  # most passes, over a small log
TEST_ROWS = 256, 8192  # on which the hot-cold schedule measures the loss, at least and at most
REPLAYED, RECORDED = 50, 30  # steps of stoker.verify and of stoker.trace
BASELINE_ROWS = 500_000  # most training rows to fit on; more change the weights of a convex model little
#: optimizer -> default learning rate
DENSE_LR = {"sgd": 0.1, "adagrad": 0.01, "adam": 1e-3, "lamb": 0.01}


def plain(value: Any) -> Any:
    """Return an option as JSON reads it: lists for tuples, and Python's numbers for those of NumPy."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [*map(plain, value)] if isinstance(value, list | tuple) else typed(value, None)


def _by_kind(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{rate:g} for {kind}" for kind, rate in rates.items())


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings, panel="Model"):
    """The model.

    >>> ModelConfig(model="dcn", embedding_dim=32).dtype
    'float32'
    """

    model: str = setting(
        "dlrm",
        "dlrm, deepfm, dcn, tbsm, din, sasrec, tabular, rankmixer, two-tower, or the name of a model of your own.",
    )
    embedding_dim: int = like(ReplaySettings, "embedding_dim", panel="")
    model_options: Mapping[str, Any] = setting(dict, 'The model\'s own options, such as {"bottom": (64, 16)}.')
    pooling: Literal["sum", "mean", "max"] = setting("mean", "Pooling of sequence features.")
    dtype: Literal["float32", "bfloat16"] = like(ReplaySettings, "dtype", panel="")
    tt_rank: int | None = setting(None, "Store large tables as tensor trains of this rank. This changes the model.")
    tt_rows: int = setting(
        1_000_000, "Tables with this many rows become tensor trains, if that makes them smaller.", least=1
    )
    tt_cores: int = setting(3, "Cores of a tensor train, 2 to 4.", least=2, most=4)
    tt_own: Mapping[str, int] = setting(
        dict, "TABLE=K: each row of this table has K numbers that no other row has, and all rows share one core."
    )
    matmul: Literal["fp32", "tf32", "bf16"] = setting(
        "fp32", "Precision of matrix products. tf32 is for a GPU; bf16 runs the dense part under autocast."
    )
    compile: bool = setting(False, "Compile the dense part with torch.compile.")
    cuda_graphs: bool = setting(
        False, "Run the dense part as CUDA graphs. Experimental; faster for batches up to about 16384."
    )

    def __post_init__(self) -> None:
        with suppress(TypeError, ValueError):  # pairs are taken, too
            self._set("tt_own", plain(dict(self.tt_own)))
        super().__post_init__()
        self._set("model_options", plain(self.model_options))

    def useless(self) -> Useless:
        yield from super().useless()
        if self.tt_rank is None:
            yield ("tt_rows", "tt_cores"), "without tt_rank no table is a tensor train"


@dataclass(frozen=True, kw_only=True)
class OrderConfig(Settings, panel="Optimization"):
    """The batches: their size, number and order.

    >>> OrderConfig(batch_size=512).seed
    0
    """

    # Batch size and epochs are None only until ``stoker.training.defaults.complete`` replaces them.
    batch_size: int = setting(None, "Examples per batch.", unset=BATCHES, least=1)
    epochs: int = setting(
        None, "Passes over the training rows.", unset=f"1 to {EPOCHS}, by the training rows", least=1, resumable=True
    )
    loss: Literal["bce", "softmax", "bpr", "in-batch"] = setting(
        "bce", "Loss. bce is binary cross entropy of each row; softmax and bpr are over the lists of a dataset with "
        "groups, in batches of whole lists; in-batch, of two-tower, is over the items of the batch.",
    )  # fmt: skip
    steps: int | None = setting(None, "Batches to train, instead of epochs.", least=1, resumable=True)
    shards: int = setting(
        1, "Logical shards of a batch, a power of two such as 8: results then do not depend on the number of threads. "
        "Changes the numbers.", least=1, most=1024,
    )  # fmt: skip
    average_every: int | None = setting(
        None, "On ranks, each has a copy of all rows, and copies are averaged after this many steps, as cDLRM does. "
        "This changes the model, which then depends on the number of ranks.", least=1, unset="rows are divided",
    )  # fmt: skip
    shuffle_memory: str = setting("1GiB", "Rows that are shuffled at a time. Changes the order.", parse=parse_size)
    seed: int = setting(0, "Seed of initial weights, rounding and the order of rows.", least=0)
    batch_order: Literal["auto", "shuffled", "hot-cold"] = setting(
        "auto", "Order of batches. auto takes hot-cold on a classified dataset, else shuffled."
    )
    swap_rate: float = setting(
        50.0, "Swap rate R at the start of the hot-cold schedule, 1 to 100 percent.", least=1, most=100
    )
    schedule_rows: int = setting(
        None, "Validation rows on which the hot-cold schedule measures the loss: at most 1 for each 50 trained rows.",
        unset=f"{TEST_ROWS[0]} to {TEST_ROWS[1]}, by the training rows", least=1,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if isinstance(size := vars(self)["batch_size"], str):
            self._refuse(f"batch_size is {size!r}; give a whole number. 'auto' is for stoker.train.", "batch_size")
        super().__post_init__()
        self._set("swap_rate", float(self.swap_rate))
        if self.shards & (self.shards - 1):
            self._refuse(f"shards is {self.shards}; it must be a power of two, such as 8.", "shards")

    def useless(self) -> Useless:
        yield from super().useless()
        if self.batch_order == "shuffled":
            yield ("swap_rate", "schedule_rows"), "batches are shuffled, not hot and cold by the schedule"


@dataclass(frozen=True, kw_only=True)
class RowConfig(Settings, panel="Optimization"):
    """The optimizer of the rows."""

    row_optimizer: RowOptimizerName = setting(
        "rowwise_adagrad", "Optimizer of the rows.", choices=lambda: ROW_OPTIMIZERS
    )
    row_lr: float | None = setting(
        None, "Learning rate of the rows.", least=0,
        unset=_by_kind({kind: each.default_lr for kind, each in ROW_OPTIMIZERS.items()}),
    )  # fmt: skip
    row_weight_decay: float = setting(0.0, "L2 penalty of touched rows. adamw and lamb decouple it.", least=0)
    row_momentum: float = setting(0.9, "Momentum of momentum_sgd.", least=0)
    row_nesterov: bool = setting(False, "Nesterov momentum, for momentum_sgd.")
    row_beta: float = setting(1.0, "beta of ftrl. It smooths the first steps.", least=0)
    row_l1: float = setting(0.0, "L1 penalty of ftrl. A larger one makes more weights exactly 0.", least=0)
    row_l2: float = setting(0.0, "L2 penalty of ftrl, or of lamb, where it enters the moments.", least=0)
    row_clip_value: float | None = setting(None, "Clip each value of a row's gradient to this size.", least=0)
    row_clip_norm: float | None = setting(None, "Clip the gradient of each row to this norm.", least=0)
    row_options: Mapping[str, Any] = setting(
        dict, "Other option of the row optimizer, as name=value.", options=("--row-option",)
    )
    row_cow_clip: tuple[float, float] | None = setting(None, "CowClip for row gradients, as r,zeta: 1,1e-5.")

    def __post_init__(self) -> None:
        with suppress(TypeError):  # an array is taken, too
            self._set("row_cow_clip", tuple(vars(self)["row_cow_clip"]))
        super().__post_init__()
        self._set("row_options", plain(self.row_options))

    def useless(self) -> Useless:
        yield from super().useless()
        used = ROW_OPTIMIZERS[self.row_optimizer].settings.values()
        own = {name for each in ROW_OPTIMIZERS.values() for name in each.settings.values() if name.startswith("row_")}
        yield tuple(sorted(own.difference(used))), f"row optimizer {self.row_optimizer} does not have that"


@dataclass(frozen=True, kw_only=True)
class DenseConfig(Settings, panel="Optimization"):
    """The optimizer of the dense part."""

    dense_optimizer: Literal["sgd", "adagrad", "adam", "lamb"] = setting("adam", "Optimizer of the dense part.")
    dense_lr: float | None = setting(None, "Learning rate of the dense part.", unset=_by_kind(DENSE_LR), least=0)
    dense_weight_decay: float = setting(0.0, "L2 penalty of the dense part. lamb decouples it.", least=0)
    dense_clip_norm: float | None = setting(None, "Clip the norm of all dense gradients together.", least=0)
    min_trust: float = setting(0.0, "Least trust ratio of lamb. Above 0, small tables grow as under Adam.")
    max_trust: float = setting(10.0, "Largest trust ratio of lamb.")

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.min_trust, self.max_trust
        if not (0 < high < math.inf and 0 <= low <= high):
            self._refuse(
                f"min_trust is {low}, max_trust is {high}; they bound the trust ratio of lamb. Give 0 <= min_trust <= "
                "max_trust, and a finite max_trust above 0.",
                "min_trust", "max_trust",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RateConfig(Settings, panel="Optimization"):
    """How learning rates depend on the batch size and on the step."""

    lr_scaling: Literal["none", "sqrt", "linear", "cowclip"] = setting(
        "none", "How learning rates grow with the batch size. cowclip leaves the rate of the rows alone."
    )
    base_batch_size: int = setting(2048, "Batch size for which the learning rates are given.", least=1)
    schedule: Literal["constant", "linear", "cosine", "polynomial", "step", "one-cycle"] = setting(
        "constant", "Schedule of both learning rates."
    )
    cycle_rise: float = setting(0.25, "Share of the steps in which one-cycle raises the rates.")
    warmup: int = setting(0, "Steps of linear warm-up.", least=0)
    dense_warmup: int = setting(
        0, "More warm-up steps for the dense part only. The CowClip paper takes an epoch.", least=0
    )
    decay_steps: int | None = setting(
        None, "Steps of the decay, or between two drops of step.", unset="to the end", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rise = self.cycle_rise
        if not 0 < rise < 1:
            self._refuse(f"cycle_rise is {rise}; it is a share of the steps, between 0 and 1.", "cycle_rise")
        if self.schedule == "one-cycle" and self.warmup:
            self._refuse(
                f"warmup is {self.warmup}, but one-cycle has its own warm-up. Leave warmup out, or set cycle_rise, the "
                "share of the steps in which the rates rise.",
                "schedule", "warmup",
            )  # fmt: skip

    def useless(self) -> Useless:
        yield from super().useless()
        if self.schedule != "one-cycle":
            yield ("cycle_rise",), "only the schedule one-cycle has a rise"


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings, panel="Run"):
    """Evaluations, checkpoints and logs of a run."""

    eval_every: int | None = setting(None, "Steps between evaluations.", unset="an epoch", least=1, resumable=True)
    valid_rows: int | None = setting(
        None, "Evaluate on this many validation rows, the first ones.", least=1, resumable=True
    )
    metric: Literal["auc", "log_loss", "mrr", "ndcg", "hr", "group_auc", "recall_10", "recall_50", "recall_100"] = (
        setting(
            "auc",
            "Metric that chooses the best checkpoint. mrr, ndcg, hr and group_auc need a dataset "
            "with groups, recall_10 to recall_100 model two-tower.",
        )
    )
    ranking_k: int = setting(10, "k of the metrics nDCG@k and hit rate@k.", least=1)
    patience: int | None = setting(
        None, "Stop after this many evaluations without a better metric.", least=1, resumable=True,
        unset="those of 2 epochs, unless epochs are given",
    )  # fmt: skip
    save_every: int | None = setting(None, "Steps between checkpoints.", unset="eval-every", least=1, resumable=True)
    checkpoint_minutes: float = setting(5.0, "Also save after this many minutes; 0: never.", least=0, resumable=True)
    keep_last: int = setting(2, "Latest checkpoints to keep, in addition to the best.", least=1, resumable=True)
    log_every: int = setting(50, "Steps between training records in metrics.jsonl.", least=1, resumable=True)
    tensorboard: bool | None = setting(None, "Write TensorBoard events.", unset="if it is installed", resumable=True)
    data_memory: str = setting(
        "auto", "Memory for a copy of the training rows, such as 2GiB; 0: no copy; auto: half of the free memory of "
        "a GPU whose tables are resident, else no copy.", parse=parse_size, resumable=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MachineConfig(Settings, panel="Machine"):
    """The machine. These settings change the results of a run only by rounding."""

    device: str = setting("auto", "auto, cpu or cuda. auto takes the GPU if there is one.")
    backend: Literal["auto", "reference", "cpu", "triton"] = setting("auto", "Kernels of the tables.")
    threads: int | None = setting(None, "CPU threads.", unset="as many as torch uses", least=1, most=1024)


@dataclass(frozen=True, kw_only=True)
class RangeTest(Settings, panel="Range test"):
    """The range test of :func:`stoker.find_lr`."""

    lr_steps: int = setting(200, "Batches of the range test.", least=20)
    low: float = setting(1e-3, "First factor of the learning rates.")
    high: float = setting(1e3, "Last factor.")
    which: Literal["both", "rows", "dense"] = setting("both", "Rates that rise.")
    smoothing: float = setting(0.9, "Weight of earlier steps in the smoothed loss.")
    trial_steps: int | None = setting(
        None, "Batches of each trial.", unset="5 times lr-steps, at most an epoch", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.low < self.high < math.inf:
            self._refuse(
                f"low is {self.low:g} and high is {self.high:g}; rates rise from low to high. Give 0 < low < high.",
                "low", "high",
            )  # fmt: skip
        if not 0 <= self.smoothing < 1:
            self._refuse(f"smoothing is {self.smoothing}; it is the weight of earlier steps, in [0, 1).", "smoothing")


#: All settings, in the order of the help.
PARTS: tuple[type[Settings], ...] = (
    ModelConfig, OrderConfig, RowConfig, DenseConfig, RateConfig, RunConfig, MemoryBudget, MachineConfig,
)  # fmt: skip
#: Settings that do not change the numbers of a step. A replay may change them.
MACHINE = frozenset(item.name for part in (MemoryBudget, MachineConfig) for item in fields(part))
#: Settings that may change when a run is resumed.
RESUMABLE = MACHINE | {item.name for part in PARTS for item in fields(part) if item.metadata["resumable"]}
