"""``TTEmbeddingBag``: ``nn.EmbeddingBag`` over tensor-train cores, for any model.

Legend: N rows, D columns, L ids, B bags, U distinct ids of a batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from stoker.base.checks import check_types
from stoker.base.errors import ConfigError
from stoker.base.settings import method_with_arguments_of
from stoker.base.units import format_count
from stoker.dataset.batch import as_tensor
from stoker.ops import BackendName, get_backend
from stoker.ops.reference import add_in_order
from stoker.ops.tt.lookup import decompose, expand, fill_core, gradients, take
from stoker.ops.tt.shape import TTShape
from stoker.ops.tt.trie import Trie, build_trie
from stoker.optim import RowOptimizer
from stoker.tables.autograd import check_export, check_modes
from stoker.tables.compressed.tensor_train import check_cores, update_slices
from stoker.tables.config import TableConfig, TensorTrain
from stoker.tables.stepping import Remedies, RowStepper, new_handle

_REMEDIES = Remedies(
    step="Make the bag without optimizer: its cores are then parameters like others, for an optimizer of torch's",
    scaler="",
    ranks="Make the bag without optimizer: its cores are then parameters, whose gradients are averaged",
)


class _DistinctRows(torch.autograd.Function):
    """The rows [U, D] of a trie. The backward returns the gradients of the cores, or updates them in place."""

    @staticmethod
    def forward(ctx: Any, bag: TTEmbeddingBag, trie: Trie, anchor: Tensor | None, *cores: Tensor) -> Tensor:
        ctx.bag, ctx.trie, ctx.tick = bag, trie, bag.tick
        ctx.trains, ctx.enclosing = bag.training, bag._stepper.enclosing()
        ctx.save_for_backward(*cores)
        ctx.values = expand(cores, ctx.trie)
        rows: Tensor = ctx.values.rows
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cores, bag = ctx.saved_tensors, ctx.bag
        if ctx.tick != bag.tick or ctx.values.rows.dtype != cores[0].dtype:
            raise RuntimeError(
                "the cores of a TTEmbeddingBag were changed between this forward and its backward, and the gradient "
                "depends on them as they were: another backward, or another type (half()), came between. Do the "
                "forward again, or join the losses in one backward."
            )
        slices = gradients(cores, ctx.trie, ctx.values, grad.contiguous())
        if bag.optimizer is not None:
            if not ctx.needs_input_grad[2]:
                pass  # frozen
            elif ctx.trains:
                bag._stepper.collect(_CoreSlices(slices), ctx.enclosing)
            else:
                warnings.warn(
                    "backward reached a TTEmbeddingBag in eval mode: its cores were not updated. Call train() to train "
                    "them, or requires_grad_(False) to say that they are not meant to change.",
                    stacklevel=2,
                )
            return (None,) * (3 + len(cores))
        wanted = []
        for core, (digits, values) in zip(cores, slices, strict=True):
            whole = torch.zeros_like(core)
            whole[digits] = values
            wanted.append(whole)
        return None, None, None, *wanted


@_disable_dynamo
def _uncompiled(bag: TTEmbeddingBag, *given: Tensor | None) -> Tensor:
    """Call the bag inside ``torch.compile``: the graph breaks here, because its shapes depend on the ids."""
    return bag.forward(*given)  # type: ignore[arg-type]


class _CoreSlices(NamedTuple):
    """Distinct slices of each core, and their gradients."""

    cores: list[tuple[Tensor, Tensor]]

    def kept(self) -> _CoreSlices:
        """Return the same: it needs no copy for later."""
        return self


@dataclass(frozen=True, kw_only=True)
class CoreArguments:
    """What a :class:`TTEmbeddingBag` takes besides the arguments of ``nn.EmbeddingBag``."""

    rank: int | tuple[int, ...] = 32
    cores: int = 3
    own: int | None = None
    shape: TTShape | None = None
    std: float = 1.0
    seed: int | None = None
    optimizer: RowOptimizer | None = None
    backend: BackendName = "auto"


@dataclass(frozen=True)
class BagArguments(CoreArguments):
    """The arguments of :class:`TTEmbeddingBag`."""

    num_embeddings: int
    embedding_dim: int
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    mode: str = "mean"
    sparse: bool = False
    _weight: Tensor | None = None
    include_last_offset: bool = False
    padding_idx: int | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class PretrainedArguments(CoreArguments):
    """The arguments of :meth:`TTEmbeddingBag.from_pretrained`."""

    embeddings: Tensor
    freeze: bool = True
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    mode: str = "mean"
    sparse: bool = False
    include_last_offset: bool = False
    padding_idx: int | None = None
    _: KW_ONLY
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None


class TTEmbeddingBag(nn.Module):
    """Replace ``nn.EmbeddingBag``: the same arguments, the same call, a fraction of the memory (EL-Rec, SC 2022).

    Rows are products of slices of small cores, so they depend on each other: this is another model. Rows of a batch
    with the same prefix share its product, and gradients are summed per distinct row before they reach the cores.

    Cores are parameters, for any ``torch.optim`` optimizer, clipping and accumulation of gradients. With ``optimizer``
    they take one step at the end of each backward instead, slice by slice, unless ``requires_grad_(False)`` freezes
    them. Then they have no gradient to clip or, under ``DistributedDataParallel``, to average; :meth:`accumulate` makes
    one step of several backwards. Loops that would silently mean something else raise an error that names the cause, as
    in :class:`stoker.EmbeddingTables`.

    >>> bag = stoker.TTEmbeddingBag(1_000_000, 16, rank=8, mode="sum", seed=0)
    >>> bag(torch.tensor([[3, 5], [3, 7]])).shape
    torch.Size([2, 16])
    >>> sum(core.numel() for core in bag.parameters())  # instead of 16 million
    12456

    Args:
        num_embeddings: N.
        embedding_dim: D.
        max_norm: only the default is possible, as for the next two.
        norm_type: see ``max_norm``.
        scale_grad_by_freq: see ``max_norm``.
        mode: "sum" or "mean".
        sparse: has no effect; gradients are as large as the cores, which are small.
        _weight: [N, D] a table to start from, compressed as by :meth:`from_dense`.
        include_last_offset: whether ``offsets`` ends with the number of ids.
        padding_idx: an id that counts as absent.
        device: of the cores.
        dtype: of the cores.
        rank: of all cuts between cores, or of each.
        cores: 2 to 4.
        own: instead of both, numbers that each row has alone, next to one common core [own, D]: for rows with little
            in common, such as users. D / own times smaller.
        shape: factors and ranks, instead of those of :func:`stoker.ops.tt.shape.factorize`.
        std: of the elements of a fresh row (``nn.EmbeddingBag`` has 1).
        seed: of the cores; None draws one from torch's generator, so it depends on ``torch.manual_seed``, and no two
            tables are equal.
        optimizer: a row optimizer (:mod:`stoker.optim`) that updates the cores inside backward.
        backend: kernels of those updates: "auto", "reference", "cpu" (Numba) or "triton".

    Raises:
        ConfigError: an argument has an impossible value.
    """

    @method_with_arguments_of(BagArguments)
    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__()
        asked = BagArguments(*given, **settings)
        if asked.optimizer is not None:
            check_cores(asked.optimizer, "TTEmbeddingBag")
        check_types(asked, "TTEmbeddingBag")
        num_embeddings, embedding_dim, mode, std = asked.num_embeddings, asked.embedding_dim, asked.mode, asked.std
        padding_idx, device, dtype, optimizer = asked.padding_idx, asked.device, asked.dtype, asked.optimizer
        if asked.max_norm is not None or asked.scale_grad_by_freq:
            raise ConfigError(
                "TTEmbeddingBag has neither max_norm nor scale_grad_by_freq: rows are computed, and changing one "
                "changes others. Leave them out; clip gradients instead."
            )
        if mode not in ("sum", "mean"):
            raise ConfigError(f"TTEmbeddingBag pools by 'sum' or 'mean', not {mode!r}.")
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ConfigError(f"padding_idx is {padding_idx}, but the table has {num_embeddings:,} rows.")
            padding_idx %= num_embeddings
        if not 0 < std < math.inf:
            raise ConfigError(
                f"std is {std}; it must be finite and above 0: cores of zeros have no gradient and never learn."
            )
        dtype = dtype or (torch.get_default_dtype() if optimizer is None else torch.float32)
        if optimizer is not None and dtype != torch.float32:
            raise ConfigError(f"cores that are updated inside backward are float32, not {dtype}.")
        table = TableConfig(name="tt", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.mode, self.padding_idx, self.include_last_offset = mode, padding_idx, asked.include_last_offset
        self.shape = TensorTrain(rank=asked.rank, cores=asked.cores, own=asked.own, shape=asked.shape).shape_of(table)
        self.optimizer, self.backend, self.std = optimizer, asked.backend, std
        self._make_steps()
        self.import_error: float | None = None  # relative, if made from a table
        self.tick = 0  # updates inside backward
        made = [torch.empty(size, device=device, dtype=dtype) for size in self.shape.core_shapes]
        self.cores = nn.ParameterList([nn.Parameter(core) for core in made])
        for place, core in enumerate(made):
            for name, kind in {} if optimizer is None else optimizer.state.items():
                size = (len(core), core[0].numel()) if kind == "row" else (len(core),)
                self.register_buffer(f"state_{place}_{name}", torch.zeros(size, dtype=torch.float32, device=device))
        if asked._weight is None:
            self.reset_parameters(asked.seed)
        else:
            self._import(asked._weight.detach())

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw new cores, and clear the optimizer state; ``seed`` as for the constructor."""
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        for place, core in enumerate(self.cores):
            fill_core(core, seed, "tt", self.shape, place, self.std * 3**0.5)
        for state in self.buffers():
            state.zero_()
        self.tick, self.import_error = 0, None

    @torch.no_grad()
    def _import(self, weight: Tensor) -> None:
        if weight.shape != (self.num_embeddings, self.embedding_dim):
            raise ConfigError(
                f"the table given is {tuple(weight.shape)}, but {self.num_embeddings:,} rows of {self.embedding_dim} "
                "columns are asked for."
            )
        for core, values in zip(self.cores, decompose(weight, self.shape), strict=True):
            core.copy_(values)
        off = sum(
            float((rows - weight[start : start + len(rows)]).double().square().sum()) for start, rows in self.dense()
        )
        total = float(weight.double().square().sum())
        self.import_error = (off / total) ** 0.5 if total else 0.0

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up and pool, as ``nn.EmbeddingBag`` does.

        Args:
            input: ids [L] with ``offsets``, or [B, n] bags of n; int32 or int64.
            offsets: [B], or [B + 1] with ``include_last_offset``: where each bag begins.
            per_sample_weights: like ``input``; only with mode "sum".

        Returns:
            [B, D].

        Raises:
            IndexError: an id is outside the table.
            ValueError: ids are not integers, or offsets do not fit them.
            ConfigError: cores with an optimizer were converted to another type than float32, or only some of them are
                frozen; or the call is inside
                torch.export, torch.func or torch.jit.trace.
        """
        if torch.compiler.is_compiling():
            check_export()
            return _uncompiled(self, input, offsets, per_sample_weights)
        check_modes()
        input, offsets = as_tensor(input, copy=True), None if offsets is None else as_tensor(offsets, copy=True)
        if per_sample_weights is not None:
            per_sample_weights = as_tensor(per_sample_weights, copy=True)
        if self.include_last_offset and offsets is not None and len(offsets) and int(offsets[-1]) != input.numel():
            raise ValueError(f"the last offset is {int(offsets[-1])}, but there are {input.numel()} ids.")
        ids = input.reshape(-1).to(torch.int64) if input.dtype == torch.int32 else input.reshape(-1)
        wanted = ids.cpu()  # the host finds the rows: ids on a GPU make it wait
        self._check(wanted)
        padding = None
        if self.padding_idx is None:
            distinct, inverse = torch.unique(wanted, return_inverse=True)
            rows, places = self._rows(distinct)
            inverse = places[inverse].to(ids.device)
            if input.dim() == 2 and input.shape[1] == 1 and offsets is None and per_sample_weights is None:
                return take(rows, inverse)
        else:  # a row after the others: nothing is computed for it, and no slice counts as used
            real = wanted != self.padding_idx
            distinct, inverse = torch.unique(wanted[real], return_inverse=True)
            rows, places = self._rows(distinct)
            padding = len(rows)
            inverse = torch.full_like(wanted, padding).masked_scatter(real, places[inverse]).to(ids.device)
            rows = nn.functional.pad(rows, (0, 0, 0, 1))
        pooled: Tensor = nn.functional.embedding_bag(
            inverse.view(input.shape), rows, None if offsets is None else offsets.to(torch.int64), mode=self.mode,
            per_sample_weights=per_sample_weights, include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip
        return pooled

    def _rows(self, distinct: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows, and where among them are those at ``distinct`` ids, which are on the host."""
        if self.optimizer is not None and self.cores[0].dtype != torch.float32:
            raise ConfigError(
                f"the cores are {self.cores[0].dtype} now, but with an optimizer they are updated inside backward, in "
                "float32. Turn them back (.float()), or make the bag without optimizer."
            )
        updates = self.optimizer is not None and self.training and torch.is_grad_enabled()
        if updates and len({core.requires_grad for core in self.cores}) > 1:
            raise ConfigError(
                "some cores are frozen (requires_grad=False) and others are not, but with an optimizer all of them are "
                "updated inside backward. Freeze the bag as a whole, or make it without optimizer."
            )
        trained = self.optimizer is not None and self.cores[0].requires_grad
        if trained and torch.is_grad_enabled() and self.training:
            self._stepper.check()
        anchor = self.handle if trained else None
        trie, _ = build_trie(distinct, self.shape, self.cores[0]).on(self.cores[0].device)
        rows: Tensor = _DistinctRows.apply(self, trie, anchor, *self.cores)  # type: ignore[no-untyped-call]
        return rows, trie.places

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "optimizer" and name in vars(self):
            if type(value) is not type(self.optimizer):
                raise ConfigError(
                    f"this TTEmbeddingBag was made with optimizer {type(self.optimizer).__name__}, which cannot become "
                    f"{type(value).__name__}: it keeps other state. Make another bag with that optimizer, and take the "
                    "cores: bag.load_state_dict(old.state_dict(), strict=False)."
                )
            if value is not None:
                check_cores(value, "TTEmbeddingBag")
        super().__setattr__(name, value)

    def _make_steps(self) -> None:
        # Not registered: it stands for cores, which are in parameters() already.
        object.__setattr__(self, "handle", new_handle("cpu"))
        self._stepper = RowStepper(self, "a TTEmbeddingBag", _REMEDIES)
        self._stepper.keep(self.handle)

    def accumulate(self) -> AbstractContextManager[None]:
        """Make one step of the cores from all backwards in the block: see :meth:`stoker.EmbeddingTables.accumulate`."""
        return self._stepper.accumulate()

    def step_each_backward(self) -> None:
        """Declare each backward one step: see :meth:`stoker.EmbeddingTables.step_each_backward`."""
        self._stepper.checked = False

    def exchange(self, gradients: list[_CoreSlices]) -> list[_CoreSlices]:
        """Return the gradients unchanged: there is only one rank."""
        return gradients

    def apply_gradients(self, gradients: Sequence[_CoreSlices], scale: float) -> None:
        """Take one step with the sum of ``gradients``; ``scale`` is 1, as a bag has no ``gradient_scale``."""
        assert self.optimizer is not None
        slices, rule = self._sum(gradients), self.optimizer.rule(self.tick)
        for place, (core, (digits, grad)) in enumerate(zip(self.cores, slices.cores, strict=True)):
            state = {name: self.get_buffer(f"state_{place}_{name}") for name in self.optimizer.state}
            backend = get_backend(self.backend, core.device)
            update_slices(backend, core.data.view(len(core), -1), state, digits, grad.flatten(1), rule)
        self.tick += 1

    def _sum(self, gradients: Sequence[_CoreSlices]) -> _CoreSlices:
        """Sum slices of all gradients in order, each slice once."""
        if len(gradients) == 1:
            return gradients[0]
        found = []
        for parts in zip(*(each.cores for each in gradients), strict=True):
            digits, which = torch.unique(torch.cat([each for each, _ in parts]), return_inverse=True)
            grads = torch.cat([grad for _, grad in parts])
            found.append((digits, add_in_order(grads.new_zeros(len(digits), *grads.shape[1:]), which, grads)))
        return _CoreSlices(found)

    def _check(self, ids: Tensor) -> None:
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids are {ids.dtype}; they must be int32 or int64.")
        if ids.numel():
            low, high = (int(value) for value in torch.aminmax(ids))
            if low < 0 or high >= self.num_embeddings:
                wrong = low if low < 0 else high
                raise IndexError(f"id {wrong} is outside the table of {self.num_embeddings:,} rows.")

    @classmethod
    def from_dense(
        cls, weight: Tensor, *, rank: int | tuple[int, ...] = 32, cores: int = 3, own: int | None = None,
        shape: TTShape | None = None, **options: Any,
    ) -> TTEmbeddingBag:  # fmt: skip
        """Compress a trained table [N, D] by TT-SVD (:func:`stoker.ops.tt.lookup.decompose`).

        ``import_error`` of the result is the relative error ``|rows - weight| / |weight|`` (Frobenius). ``options`` are
        the other arguments of the constructor.

        Raises:
            ConfigError: an argument has an impossible value, or a cut is too large to decompose.
        """
        count, dim = weight.shape
        options = {"device": weight.device, "dtype": weight.dtype, **options}
        return cls(count, dim, rank=rank, cores=cores, own=own, shape=shape, _weight=weight, **options)

    @classmethod
    @method_with_arguments_of(PretrainedArguments)
    def from_pretrained(cls, *given: Any, **settings: Any) -> TTEmbeddingBag:
        """Call :meth:`from_dense` with the arguments of ``nn.EmbeddingBag.from_pretrained``; ``freeze``: no training.

        Raises:
            ConfigError: as for :meth:`from_dense`, or an optimizer for frozen cores.
        """
        asked = vars(PretrainedArguments(*given, **settings))
        embeddings, freeze = asked.pop("embeddings"), asked.pop("freeze")
        if freeze and asked["optimizer"] is not None:
            raise ConfigError("frozen cores take no optimizer. Give freeze=False, or leave the optimizer out.")
        kept = {name: value for name, value in asked.items() if name not in ("device", "dtype") or value is not None}
        made = cls.from_dense(embeddings, **kept)
        if freeze:
            made.requires_grad_(False)
        return made

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "a TTEmbeddingBag has no weight: its rows are products of its cores and never exist together. cores "
                "are its parameters, dense() gives rows in chunks, from_dense and from_pretrained start from a table."
            )
        return super().__getattr__(name)

    @torch.no_grad()
    def dense(self, chunk_rows: int = 2**16) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows as (first row, [n, D]) chunks, for export."""
        device = self.cores[0].device
        for start in range(0, self.num_embeddings, chunk_rows):
            stop = min(start + chunk_rows, self.num_embeddings)
            trie, _ = build_trie(torch.arange(start, stop, device="cpu"), self.shape, self.cores[0]).on(device)
            yield start, trie.in_order(expand(list(self.cores), trie).rows)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_stepper", "handle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._make_steps()

    def get_extra_state(self) -> Tensor:
        """Return the number of updates, for schedules and the bias correction; as a tensor, like all that is saved."""
        return torch.tensor(self.tick, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        self.tick = int(state)

    def extra_repr(self) -> str:
        rows, size = format_count(self.num_embeddings), self.shape.num_parameters
        return (
            f"{rows} x {self.embedding_dim}, mode={self.mode!r}, rows {self.shape.rows}, cols {self.shape.cols}, "
            f"ranks {self.shape.ranks}, {self.num_embeddings * self.embedding_dim / size:.1f} times smaller"
        )
