"""Fill fresh memory with not-a-number, so that a kernel that leaves an element unwritten shows in a test.

``torch.empty`` and its kin, ``numpy.empty`` and :class:`stoker.ops.cpu.arena.Arena` give floats that are NaN, on every
device and back end, for the whole process. Integers stay as they come. Kernels that Numba compiles are what they are
elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["fill_fresh_memory"]

_MOST = 2**28  # elements: larger arrays are there for their addresses, and their pages must stay untouched


def _torch_filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def filled(*args: Any, **options: Any) -> torch.Tensor:
        made = make(*args, **options)
        elements = made.numel()  # a symbol while the compiler looks on, which must not be compared
        plain = isinstance(elements, int) and type(made) in (torch.Tensor, torch.nn.Parameter)
        if plain and (made.is_floating_point() or made.is_complex()) and elements <= _MOST:
            with torch.no_grad():
                made.fill_(torch.nan)
        return made

    return filled


def _numpy_filled(make: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    @functools.wraps(make)
    def filled(*args: Any, **options: Any) -> np.ndarray:
        made = make(*args, **options)
        if made.dtype.kind in "fc" and made.size <= _MOST:
            made.fill(np.nan)
        return made

    return filled


def fill_fresh_memory() -> None:
    """Do so from now on."""
    if hasattr(np.empty, "__wrapped__"):  # a worker is a fork of a process that does (workers.py)
        return
    from stoker.ops.cpu.arena import Arena

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (Arena, "empty"),
    ):
        setattr(owner, name, _torch_filled(getattr(owner, name)))
    for name in ("empty", "empty_like"):
        plain = getattr(np, name)
        filled = _numpy_filled(plain)
        try:
            from numba.core.registry import cpu_target
        except ImportError:  # then nothing is compiled
            pass
        else:  # to Numba the new function is the old one
            context = cpu_target.typing_context
            cpu_target.target_context.refresh()
            context.insert_global(filled, context.resolve_value_type(plain))
        setattr(np, name, filled)
