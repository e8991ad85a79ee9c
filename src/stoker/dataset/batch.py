"""One batch of examples, as a model takes it.

Legend: B examples, F features (categorical and sequence columns in schema order), L ids in all, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.dlpack import from_dlpack

_TENSORS = "dense", "ids", "offsets", "weights", "labels", "groups"  # of a batch


def as_tensor(array: Any, *, copy: bool = False) -> Tensor:
    """Return a tensor in the memory of an array that has ``__dlpack__``, such as one of NumPy, CuPy or JAX.

    It is a copy if ``copy`` says so, and where torch cannot address that memory: negative strides, or what an old NumPy
    keeps read-only. A tensor is returned as it is.

    Raises:
        TypeError: it has no ``__dlpack__``.
    """
    if isinstance(array, Tensor):
        return array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(
            f"{type(array).__name__} is neither a tensor nor an array with __dlpack__. {_instead_of(array)}"
        )
    if any(step < 0 for step in getattr(array, "strides", None) or ()):
        array = array.copy()  # torch 2.13 aborts the process
    try:
        tensor = from_dlpack(array)
    except BufferError:
        tensor = from_dlpack(array.copy())
    return tensor.clone() if copy else tensor


def _instead_of(given: Any) -> str:
    if hasattr(given, "ids"):
        return "Give its parts: tables(batch.ids, batch.offsets, batch.weights)."
    if isinstance(given, dict):
        return "Give one tensor [B, F], with a column for each feature in the order of the tables."
    return "Give torch.tensor(...) of it."


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Examples in the layout that :class:`stoker.EmbeddingTables` and every model take.

    Ids are rows of each feature's own table (not global addresses). Bags are sample-major: bag ``b * F + f`` has the
    ids of feature ``f`` in example ``b``. Arrays of other libraries (NumPy, CuPy, JAX) become tensors of the same
    memory, by DLPack.

    >>> offsets = torch.tensor([0, 1, 3, 4, 4])
    >>> batch = stoker.Batch(dense=torch.zeros(2, 1), ids=torch.tensor([7, 3, 5, 9]), offsets=offsets)
    >>> batch.lengths(1)  # of the second feature: ids 3 and 5, then none
    tensor([2, 0])
    >>> batch.padded(1, steps=3)
    tensor([[0, 3, 5],
            [0, 0, 0]])
    >>> batch
    Batch(step 0: 2 examples; dense [2, 1], ids [4], offsets [5]; cpu)
    """

    dense: Tensor  # [B, num_dense] float32
    ids: Tensor  # [B, F] int32/int64 where every bag has exactly one id, else flat [L]
    offsets: Tensor | None = None  # None, or [B * F + 1] int64: bag i is ids[offsets[i]:offsets[i + 1]]
    weights: Tensor | None = None  # None, or [L] float32 per-sample weights (sum pooling only)
    labels: Tensor | None = None  # [B] float32 in {0, 1}, NaN for rows without; None when predicting
    groups: Tensor | None = None  # None, or [B] int64 rising from 0: the list of each row, in batches of whole lists
    step: int = 0  # position in the stream, counted from 0 over all epochs
    time: int | None = None  # for tables that forget raw ids by time (docs/dynamic_ids.md)

    def __post_init__(self) -> None:
        given: tuple[Any, ...] = self.dense, self.ids, self.offsets, self.weights, self.labels, self.groups
        for name, value in zip(_TENSORS, given, strict=True):
            if value is not None and not isinstance(value, Tensor):
                object.__setattr__(self, name, as_tensor(value))

    def __len__(self) -> int:
        return self.dense.shape[0]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self.tensors().items())
        return f"Batch(step {self.step}: {len(self):,} examples; {shapes}; {self.ids.device})"

    def lengths(self, feature: int) -> Tensor:
        """Count the ids in the bags of one feature: [B] int64. ``feature`` is its place among the features."""
        if self.offsets is None:
            return torch.ones(len(self), dtype=torch.int64, device=self.ids.device)
        return self._bags(self.offsets.diff())[:, feature]

    def bags(self, feature: int) -> tuple[Tensor, Tensor]:
        """Return the ids of one feature, example by example [L], and where the bag of each begins and ends [B + 1]."""
        offsets = pad(self.lengths(feature).cumsum(0), (1, 0))
        if self.offsets is None:
            return self.ids[:, feature], offsets
        lengths = self.offsets.diff()
        mine = torch.zeros_like(lengths, dtype=torch.bool)
        self._bags(mine)[:, feature] = True
        return self.ids[torch.repeat_interleave(mine, lengths)], offsets

    def mask(self, feature: int, steps: int) -> Tensor:
        """Return which of the last ``steps`` steps a sequence feature has: [B, T] bool, missing steps first."""
        before_end = torch.arange(steps, 0, -1, device=self.ids.device)
        return self.lengths(feature).unsqueeze(1) >= before_end

    def padded(self, feature: int, steps: int, *, fill: int = 0) -> Tensor:
        """Return the last ``steps`` ids of a sequence feature: [B, T], after ``fill`` if there are fewer.

        For ``nn.Embedding`` and the like: :class:`stoker.EmbeddingTables` with ``steps`` needs no padded ids.
        """
        offsets = torch.arange(self.ids.numel() + 1, device=self.ids.device) if self.offsets is None else self.offsets
        before_end = torch.arange(steps, 0, -1, device=self.ids.device)
        places = self._bags(offsets[1:])[:, feature].unsqueeze(1) - before_end
        mask = self.mask(feature, steps)
        flat = torch.cat([self.ids.reshape(-1), self.ids.new_tensor([fill])])
        return flat[places.masked_fill(~mask, self.ids.numel())]

    def _bags(self, values: Tensor) -> Tensor:
        """Return one value a bag as [B, F]; without examples, F is not known and large enough."""
        return values.view(len(self), -1) if len(self) else values.new_empty(0, 2**31)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, without those that are None."""
        found = {name: getattr(self, name) for name in _TENSORS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the same batch on ``device``; itself if it is already there."""
        here = self.tensors()
        moved: dict[str, Any] = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in here.items()}
        return self if all(moved[name] is tensor for name, tensor in here.items()) else replace(self, **moved)

    def pin_memory(self) -> Batch:
        """Return the same batch in page-locked memory, so that copies to a GPU can overlap with work."""
        pinned: dict[str, Any] = {name: tensor.pin_memory() for name, tensor in self.tensors().items()}
        return replace(self, **pinned)
