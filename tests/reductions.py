"""Ranks of tests: in them every collective that adds raises an error, below Python, where DDP comes by, too."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["forbid_reductions", "join"]

# Besides reductions, the list form of all-to-all, which gloo does not have.
BANNED = (
    "allreduce_", "allreduce_coalesced_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_", "alltoall_",
)  # fmt: skip
_library: list[torch.library.Library] = []


def forbid_reductions() -> None:
    """Make each collective that adds raise an error, for ever."""
    if _library:
        return
    _library.append(torch.library.Library("c10d", "IMPL"))

    def refuse(*given: Any) -> None:
        raise AssertionError("a collective that may add floats")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of kernels that are replaced
        for name in BANNED:
            for key in ("CPU", "CUDA"):
                _library[0].impl(name, refuse, key, allow_override=True)


def join(rank: int, ranks: int, meet: str) -> None:
    """Join a process group of gloo that meets at a new file; nothing may add in this process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    forbid_reductions()
