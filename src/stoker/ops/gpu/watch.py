"""Ids outside their table, found on the device and reported without making the host wait.

Kernels write the position of the first bad id into one word on the device, and every update reads that word
first: from then on nothing is written. The host gets a copy of the word after each call and looks at it
when the next one comes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.ops.bags import Bags
from stoker.ops.gpu.kernels import NO_ERROR
from stoker.ops.space import AddressSpace

_UNREAD = 8  # calls the host may run ahead of the device before it waits for a copy


@dataclass(frozen=True, slots=True)
class _Report:
    copied: torch.cuda.Event | None
    copy: Tensor
    space: AddressSpace
    bags: Bags

    def there(self) -> bool:
        return self.copied is None or self.copied.query()

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class IdWatch:
    """The error word of one device.

    Args:
        device: where the tables lie.
        lazy: report at a later call rather than wait for the device in each; the default on CUDA.
    """

    def __init__(self, device: torch.device, *, lazy: bool | None = None) -> None:
        self.word = torch.full((1,), NO_ERROR, dtype=torch.int64, device=device)
        self.lazy = device.type == "cuda" if lazy is None else lazy
        self._reports: deque[_Report] = deque()

    def post(self, space: AddressSpace, bags: Bags) -> None:
        """After a kernel that checked ``bags``: have its finding copied to the host."""
        if not self.lazy:
            if int(self.word) != NO_ERROR:
                self._raise(int(self.word), space, bags)
            return
        copied: Any = None
        if self.word.device.type == "cuda":
            copy = torch.empty(1, dtype=torch.int64, pin_memory=True)
            copy.copy_(self.word, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        else:
            copy = self.word.clone()
        self._reports.append(_Report(copied, copy, space, bags))

    def poll(self, *, wait: bool = False) -> None:
        """Raise what has been found.

        Args:
            wait: for the device to finish all calls so far, so that nothing is left to find.

        Raises:
            IndexError: an id of an earlier call lay outside its table.
        """
        while self._reports:
            report = self._reports[0]
            if not wait and len(self._reports) <= _UNREAD and not report.there():
                return
            self._reports.popleft().wait()
            if int(report.copy) != NO_ERROR:
                self._raise(int(report.copy), report.space, report.bags)

    def _raise(self, position: int, space: AddressSpace, bags: Bags) -> None:
        self._reports.clear()
        self.word.fill_(NO_ERROR)
        space.check(bags.ids, bags.offsets)
        raise IndexError(
            f"an earlier batch had an id outside its table at position {position:,} of its ids, and the ids "
            "have been overwritten since. Keep a batch unchanged until the next one, or map unseen values to "
            "id 0."
        )
