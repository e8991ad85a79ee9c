"""Optimizers for embedding rows.

A row optimizer is a value: the tables read it and update rows in place after each backward. Its arithmetic is defined
once, in :mod:`stoker.ops.rule`; all constants are rounded to float32 before use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from stoker.base.checks import check_not_negative, check_types
from stoker.base.errors import ConfigError
from stoker.ops.rule import RULES, RowRule, add_rule
from stoker.optim.schedules import SCHEDULES, Constant, Schedule

_T = TypeVar("_T", bound="RowOptimizer")


@dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """The settings of all row optimizers.

    One update of a distinct row, with G the sum of its gradients in order of occurrence: clip each element of G, clip
    the norm of G, clip it by CowClip, add ``weight_decay * w``, then do the optimizer's own step.
    """

    kind: ClassVar[str]
    #: learning rate of runs that give none
    default_lr: ClassVar[float]
    #: option that this kind alone takes -> the setting of a run that holds it; others are in its ``row_options``
    settings: ClassVar[dict[str, str]] = {}
    #: formula of its step where none of :data:`stoker.ops.rule.RULES` is that; see there
    step: ClassVar[Callable[..., Any] | None] = None
    #: name of each state tensor -> "row" ([N, D] float32) or "scalar" ([N] float32)
    state: ClassVar[dict[str, Literal["row", "scalar"]]] = {}

    lr: float
    schedule: Schedule = field(default_factory=Constant)
    weight_decay: float = 0.0  # L2, added to the gradient of touched rows only
    clip_value: float | None = None  # largest absolute value of an element of G
    clip_norm: float | None = None  # largest Euclidean norm of G
    # (r, zeta) of CowClip (Zheng et al. 2022): the norm of G is at most count * max(r * |w|, zeta), where count is how
    # often the row occurs in the batch. The paper takes r = 1, and zeta from 1e-5 to 1e-3.
    cow_clip: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_types(self, type(self).__name__)
        self._check_not_negative("lr", "weight_decay", "clip_value", "clip_norm", *["eps"] * hasattr(self, "eps"))
        check_betas(type(self).__name__, getattr(self, "betas", ()))
        if self.cow_clip is not None:
            if not all(value >= 0 and math.isfinite(value) for value in self.cow_clip):
                raise ConfigError(
                    f"{type(self).__name__}(cow_clip={self.cow_clip}) must be two numbers (r, zeta), finite and not "
                    "negative, such as (1.0, 1e-5)."
                )
            if not any(self.cow_clip):
                raise ConfigError(
                    f"{type(self).__name__}(cow_clip={self.cow_clip}) would clip every gradient to 0. Raise r or zeta."
                )

    def _check_not_negative(self, *names: str) -> None:
        check_not_negative(type(self).__name__, **{name: getattr(self, name) for name in names})

    def rule(self, tick: int) -> RowRule:
        """Return the constants of the update at ``tick``, the number of updates before it."""
        beta1, beta2 = getattr(self, "betas", (0.0, 0.0))
        return RowRule(
            kind=self.kind,
            lr=self.lr * self.schedule.factor(tick),
            eps=getattr(self, "eps", 0.0),
            beta1=beta1,
            beta2=beta2,
            bias1=1.0 - beta1 ** (tick + 1),
            bias2=1.0 - beta2 ** (tick + 1),
            weight_decay=self.weight_decay,
            clip_value=math.inf if self.clip_value is None else self.clip_value,
            clip_norm=math.inf if self.clip_norm is None else self.clip_norm,
            cow_ratio=math.inf if self.cow_clip is None else self.cow_clip[0],
            cow_floor=0.0 if self.cow_clip is None else self.cow_clip[1],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"kind": self.kind, **asdict(self), "schedule": self.schedule.to_dict()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> RowOptimizer:
        """Build the optimizer from :meth:`to_dict`'s values."""
        values = dict(values)
        schedule = dict(values.pop("schedule"))
        kind = values.pop("kind")
        if kind not in ROW_OPTIMIZERS:
            raise ConfigError(f"row optimizer {kind!r} is unknown. Choose one of {sorted(ROW_OPTIMIZERS)}.")
        for name in ("betas", "cow_clip"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return ROW_OPTIMIZERS[kind](schedule=SCHEDULES[schedule.pop("kind")](**schedule), **values)


@dataclass(frozen=True, kw_only=True)
class SGD(RowOptimizer):
    """``w -= lr * G`` for touched rows; for momentum see :class:`MomentumSGD`.

    >>> table = stoker.TableConfig(name="t", num_embeddings=2, embedding_dim=1, init_scale=0.0)
    >>> tables = stoker.EmbeddingTables([table], optimizer=stoker.SGD(lr=0.5))
    >>> for ids in ([0], [0]):
    ...     tables(torch.tensor([ids])).sum().backward()
    >>> tables.rows("t").tolist()
    [[-1.0], [0.0]]
    """

    kind: ClassVar[str] = "sgd"
    default_lr: ClassVar[float] = 0.1


@dataclass(frozen=True, kw_only=True)
class MomentumSGD(RowOptimizer):
    """SGD with momentum; the buffer of a row moves only in the steps that touch the row.

    ``m = momentum * m + G; w -= lr * m``; with ``nesterov``, ``w -= lr * (G + momentum * m)``. A row that every batch
    touches gets the steps of ``torch.optim.SGD`` with dampening 0. In a step that does not touch a row, that optimizer
    still moves it along its buffer. Here the row and its buffer do not move, so each placement updates the same rows.

    Raises:
        ConfigError: a momentum outside [0, 1).

    >>> table = stoker.TableConfig(name="t", num_embeddings=2, embedding_dim=1, init_scale=0.0)
    >>> tables = stoker.EmbeddingTables([table], optimizer=stoker.MomentumSGD(lr=1.0, momentum=0.5))
    >>> for ids in ([0], [0], [1]):
    ...     tables(torch.tensor([ids])).sum().backward()
    >>> tables.rows("t").tolist()
    [[-2.5], [-1.0]]
    """

    kind: ClassVar[str] = "momentum_sgd"
    default_lr: ClassVar[float] = 0.01
    settings: ClassVar[dict[str, str]] = {"momentum": "row_momentum", "nesterov": "row_nesterov"}
    state: ClassVar[dict[str, Literal["row", "scalar"]]] = RULES["momentum"].state
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"MomentumSGD(momentum={self.momentum}) must be in [0, 1), such as 0.9.")

    def rule(self, tick: int) -> RowRule:
        return super().rule(tick)._replace(kind="nesterov" if self.nesterov else "momentum", beta1=self.momentum)


@dataclass(frozen=True, kw_only=True)
class Adagrad(RowOptimizer):
    """``s += G*G; w -= lr * G / (sqrt(s) + eps)`` (Duchi et al. 2011).

    >>> table = stoker.TableConfig(name="t", num_embeddings=2, embedding_dim=1, init_scale=0.0)
    >>> tables = stoker.EmbeddingTables([table], optimizer=stoker.Adagrad(lr=1.0))
    >>> for ids in ([0], [0]):
    ...     tables(torch.tensor([ids])).sum().backward()
    >>> tables.rows("t")
    tensor([[-1.7071],
            [ 0.0000]])
    """

    kind: ClassVar[str] = "adagrad"
    default_lr: ClassVar[float] = 0.05
    state: ClassVar[dict[str, Literal["row", "scalar"]]] = RULES["adagrad"].state
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(RowOptimizer):
    """``s += mean(G*G); w -= lr / (sqrt(s) + eps) * G``: one number of state a row (as in FBGEMM and DLRM).

    >>> table = stoker.TableConfig(name="t", num_embeddings=2, embedding_dim=1, init_scale=0.0)
    >>> tables = stoker.EmbeddingTables([table], optimizer=stoker.RowWiseAdagrad(lr=1.0))
    >>> for ids in ([0], [0]):
    ...     tables(torch.tensor([ids])).sum().backward()
    >>> tables.rows("t")
    tensor([[-1.7071],
            [ 0.0000]])
    """

    kind: ClassVar[str] = "rowwise_adagrad"
    default_lr: ClassVar[float] = 0.05
    state: ClassVar[dict[str, Literal["row", "scalar"]]] = RULES["rowwise_adagrad"].state
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class Adam(RowOptimizer):
    """Adam (Kingma & Ba 2015, Algorithm 1); the moments of a row move only in the steps that touch the row.

    The bias correction counts all steps, as in ``torch.optim.SparseAdam``.

    >>> table = stoker.TableConfig(name="t", num_embeddings=2, embedding_dim=1, init_scale=0.0)
    >>> tables = stoker.EmbeddingTables([table], optimizer=stoker.Adam(lr=0.5, eps=0.0))
    >>> for ids in ([0], [0]):
    ...     tables(torch.tensor([ids])).sum().backward()
    >>> tables.rows("t").tolist()
    [[-1.0], [0.0]]
    """

    kind: ClassVar[str] = "adam"
    default_lr: ClassVar[float] = 1e-3
    state: ClassVar[dict[str, Literal["row", "scalar"]]] = RULES["adam"].state
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), for touched rows: ``w *= 1 - lr * weight_decay``.

    The decay does not enter the moments, and the step of :class:`Adam` follows. A row that every batch touches gets the
    steps of ``torch.optim.AdamW``; a row that a batch does not touch does not decay in that step. ``lr`` is the rate
    after the schedule.

    Raises:
        ConfigError: ``lr * weight_decay`` above 1, which would change the sign of every weight.

    >>> table = stoker.TableConfig(name="t", num_embeddings=2, embedding_dim=1, init_scale=0.0)
    >>> tables = stoker.EmbeddingTables([table], optimizer=stoker.AdamW(lr=0.5, weight_decay=0.5))
    >>> for ids in ([0], [0]):
    ...     tables(torch.tensor([ids])).sum().backward()
    >>> tables.rows("t").tolist()
    [[-0.875], [0.0]]
    """

    kind: ClassVar[str] = "adamw"
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr * self.weight_decay > 1.0:
            raise ConfigError(
                f"AdamW(lr={self.lr}, weight_decay={self.weight_decay}): their product is "
                f"{self.lr * self.weight_decay:g}, so that decay would turn the sign of every weight. Lower one of "
                "them until the product is at most 1."
            )

    def rule(self, tick: int) -> RowRule:
        rule = super().rule(tick)
        return rule._replace(kind="adam", weight_decay=0.0, keep=1.0 - rule.lr * rule.weight_decay)


@dataclass(frozen=True, kw_only=True)
class FTRL(RowOptimizer):
    """FTRL-Proximal (McMahan et al. 2013, Algorithm 1), for each element of a touched row.

    With n the sum of squared gradients and z the sum that the paper keeps, ``lr`` is its alpha::

        n' = n + G * G;  z += G - (sqrt(n') - sqrt(n)) / lr * w
        w = 0 where |z| <= l1, else -(z - sign(z) * l1) / ((beta + sqrt(n')) / lr + l2)

    The paper begins with w = 0. Here the beta term of the denominator pulls towards the first weight of the row: so
    embeddings do not all drop to 0 in their first step. Rows that begin with zeros (``init_scale=0``) follow the paper.
    The state is ``sum`` = n and ``linear`` = -lr * z, so a change of the rate does not rescale the weights. A schedule
    acts on the gradient's term; l1 and l2 always go with ``lr``.

    Args:
        beta: smooths the first steps; 1 in the paper.
        l1: the larger, the more weights are exactly 0.
        l2: pulls weights towards 0.

    Raises:
        ConfigError: a value that is negative or not finite.

    >>> table = stoker.TableConfig(name="t", num_embeddings=2, embedding_dim=1, init_scale=0.0)
    >>> tables = stoker.EmbeddingTables([table], optimizer=stoker.FTRL(lr=1.0, l1=2.0, l2=1.0))
    >>> for ids in ([0], [0], [0], [0], [1]):
    ...     tables(torch.tensor([ids])).sum().backward()
    >>> tables.rows("t")
    tensor([[-0.5179],
            [-0.0000]])
    """

    kind: ClassVar[str] = "ftrl"
    default_lr: ClassVar[float] = 0.1
    settings: ClassVar[dict[str, str]] = {"beta": "row_beta", "l1": "row_l1", "l2": "row_l2"}
    state: ClassVar[dict[str, Literal["row", "scalar"]]] = RULES["ftrl"].state
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_not_negative("beta", "l1", "l2")

    def rule(self, tick: int) -> RowRule:
        return super().rule(tick)._replace(eps=self.beta, l1=self.lr * self.l1, l2=self.lr * self.l2)


@dataclass(frozen=True, kw_only=True)
class LAMB(RowOptimizer):
    """LAMB (You et al. 2020, Algorithm 2) where a layer is a table: ``w -= lr * trust * u`` for each touched row.

    u is Adam's direction plus ``weight_decay * w``, with moments that move only in the steps that touch the row.
    ``l2 * w`` is added to the gradient, so it enters the moments, as ``weight_decay`` of other row optimizers. The
    trust ratio is the norm of the whole table over that of u, within bounds; rows that are not touched have u = 0. It
    is 1 if one of the norms is 0. Both are exact sums (:mod:`stoker.ops.lamb`), so they do not depend on where rows
    are. The first update after a table is made or loaded reads all its rows once.

    >>> table = stoker.TableConfig(name="t", num_embeddings=2, embedding_dim=1, init_scale=1.0)
    >>> tables = stoker.EmbeddingTables([table], optimizer=stoker.LAMB(lr=0.5))
    >>> for ids in ([0], [0]):
    ...     tables(torch.tensor([ids])).sum().backward()
    >>> tables.rows("t")
    tensor([[0.2017],
            [0.2745]])
    """

    kind: ClassVar[str] = "lamb"
    default_lr: ClassVar[float] = 0.02
    settings: ClassVar[dict[str, str]] = {"min_trust": "min_trust", "max_trust": "max_trust", "l2": "row_l2"}
    state: ClassVar[dict[str, Literal["row", "scalar"]]] = RULES["lamb"].state
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    min_trust: float = 0.0
    max_trust: float | None = 10.0  # None: no bound
    l2: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_not_negative("l2")
        check_trust("LAMB", self.min_trust, self.max_trust)

    def rule(self, tick: int) -> RowRule:
        rule, most = super().rule(tick), math.inf if self.max_trust is None else self.max_trust
        # The l2 term goes through the moments, so it is added to the gradient.
        return rule._replace(min_trust=self.min_trust, max_trust=most, weight_decay=self.l2, l2=self.weight_decay)


#: by kind; :func:`register_row_optimizer` adds others
ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    each.kind: each for each in (SGD, MomentumSGD, Adagrad, RowWiseAdagrad, Adam, AdamW, FTRL, LAMB)
}

#: the same names, for type checkers
RowOptimizerName = Literal["sgd", "momentum_sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl", "lamb"]


def register_row_optimizer(made: type[_T]) -> type[_T]:
    """Make a row optimizer of your own known by its ``kind`` to :func:`stoker.train`, checkpoints and commands.

    If the class has a formula as ``step``, :meth:`RowOptimizer.rule` asks for it by the same ``kind``.

    Raises:
        ConfigError: the kind is that of another class, or there is no default learning rate.

    >>> import stoker, torch
    >>> from dataclasses import dataclass
    >>> @stoker.optim.register_row_optimizer
    ... @dataclass(frozen=True, kw_only=True)
    ... class SignSGD(stoker.optim.RowOptimizer):
    ...     kind, default_lr = "sign_sgd", 0.01
    ...     @staticmethod
    ...     def step(x, c, w, g):
    ...         return (w - x.where(g > 0.0, c.lr, x.where(g < 0.0, -c.lr, g)),)
    >>> stoker.TrainConfig(row_optimizer="sign_sgd").make_row_optimizer(stoker.Constant()).lr
    0.01
    >>> del stoker.optim.ROW_OPTIMIZERS["sign_sgd"]
    """
    known = ROW_OPTIMIZERS.get(made.kind)
    if known is not None and (known.__module__, known.__qualname__) != (made.__module__, made.__qualname__):
        raise ConfigError(
            f"{made.__qualname__} has the kind {made.kind!r}, which is that of {known.__module__}:{known.__qualname__}."
            " Give it another one: checkpoints say which row optimizer they hold by its kind."
        )
    if not hasattr(made, "default_lr"):
        raise ConfigError(f"{made.__qualname__} has no default_lr, the learning rate of runs that give none. Add one.")
    if made.step is not None:
        add_rule(made.kind, made.step, made.state)
    ROW_OPTIMIZERS[made.kind] = made
    return made


def check_betas(owner: str, betas: tuple[float, ...]) -> None:
    """Raise ConfigError for a decay of moments outside [0, 1)."""
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"{owner}(betas={betas}): both must be in [0, 1).")


def check_trust(name: str, min_trust: float, max_trust: float | None) -> None:
    """Raise ConfigError for bounds of LAMB's trust ratio out of their range."""
    fits = max_trust is None or (0.0 < max_trust < math.inf and min_trust <= max_trust)
    if not (fits and 0.0 <= min_trust < math.inf):
        raise ConfigError(
            f"{name}(min_trust={min_trust}, max_trust={max_trust}): they bound the trust ratio, so "
            "0 <= min_trust <= max_trust, and max_trust > 0 (None: no bound)."
        )
