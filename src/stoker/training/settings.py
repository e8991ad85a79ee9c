"""The settings of a run as keyword arguments: what editors and type checkers know of them.

:class:`stoker.TrainConfig` says what each means; tests/test_typing.py compares names and types.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal, TypedDict

from stoker.ops import BackendName

__all__ = ["MachineSettings", "TrainSettings"]


class MachineSettings(TypedDict, total=False):
    """Settings that leave the numbers of a run alone (device, backend and threads but for rounding)."""

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
