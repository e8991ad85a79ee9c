"""What a GPU's memory and its link to the host do at best: copies, and rows from random places.

Rows are moved in both ways that a home in host memory allows: the GPU reads and writes page-locked memory itself, or
the processor gathers rows into a buffer that is then copied.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_tools import Setting, device_view, milliseconds
from benchmarks.harness import Outcome, Table

__all__ = ["limits", "measure"]

ROW_COLUMNS = (16, 128)  # float32 columns of the rows moved


@lru_cache(maxsize=1)
def limits(setting: Setting) -> dict[str, float]:
    """GB/s (1e9 bytes) by name. ``memory`` counts bytes read and written; the others count each byte once."""
    found = {"memory": _memory(setting), **_copies(setting)}
    for columns in ROW_COLUMNS:
        found |= {f"{name} {4 * columns} B": rate for name, rate in _rows(setting, columns).items()}
    return found


def _memory(setting: Setting) -> float:
    source = torch.ones(setting.pick(full=2**28, quick=2**28, tiny=2**16), device=setting.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda _: target.copy_(source), 5, 10, setting.device) / 1e6


def _host(setting: Setting, *shape: int) -> Tensor:
    return torch.zeros(*shape, pin_memory=setting.device.type == "cuda")


def _copies(setting: Setting) -> dict[str, float]:
    """Page-locked copies to and from the device, alone and at the same time on two streams."""
    device, count = setting.device, setting.pick(full=2**27, quick=2**26, tiny=2**14)
    here, there = [_host(setting, count) for _ in range(2)], [torch.zeros(count, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def to_device(_: int) -> None:
        there[0].copy_(here[0], non_blocking=True)

    def to_host(_: int) -> None:
        here[1].copy_(there[1], non_blocking=True)

    def both(turn: int) -> None:
        if not streams:
            to_device(turn)
            to_host(turn)
            return
        now = torch.cuda.current_stream(device)
        for stream, copy in zip(streams, (to_device, to_host), strict=True):
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                copy(turn)
            now.wait_stream(stream)

    def rate(step: Any, moved: int) -> float:
        return moved / milliseconds(step, 3, 4, device) / 1e6

    one = here[0].nbytes
    return {"to device": rate(to_device, one), "to host": rate(to_host, one), "both ways": rate(both, 2 * one)}


def _rows(setting: Setting, columns: int) -> dict[str, float]:
    """Random rows between page-locked memory and the device; both ways of reading must bring the same rows."""
    device, cuda = setting.device, setting.device.type == "cuda"
    count = setting.pick(full=2**29, quick=2**28, tiny=2**14) // columns  # 2 GiB: far more than any cache holds
    moved = setting.pick(full=2**18, quick=2**18, tiny=2**6)
    home = _host(setting, count, columns)
    home.copy_(torch.arange(count, dtype=torch.float32).unsqueeze(1))
    seen = device_view(home.data_ptr(), home.shape, home, device) if cuda else home
    g = torch.Generator().manual_seed(5)
    picks = [torch.randint(0, count, (moved,), generator=g) for _ in range(8)]
    on_device = [ids.to(device) for ids in picks]
    slots, buffer = torch.empty(moved, columns, device=device), _host(setting, moved, columns)

    def read(turn: int) -> None:
        torch.index_select(seen, 0, on_device[turn % 8], out=slots)

    def write(turn: int) -> None:
        seen.index_copy_(0, on_device[turn % 8], slots)

    def gather(turn: int) -> None:
        torch.index_select(home, 0, picks[turn % 8], out=buffer)
        slots.copy_(buffer, non_blocking=True)
        if cuda:
            torch.cuda.current_stream(device).synchronize()  # the buffer is used again

    for way in (read, gather):
        slots.zero_()
        way(0)
        if not torch.equal(slots[:, 0].cpu(), picks[0].to(torch.float32)):
            raise RuntimeError(f"{way.__name__}: wrong rows of {columns} columns from host memory")
    read(0)
    names = {"rows read by the device": read, "rows gathered by the processor": gather}
    found = {name: slots.nbytes / milliseconds(way, 3, 8, device) / 1e6 for name, way in names.items()}
    # Every pick writes the rows that were read last: the home's contents no longer matter.
    return found | {"rows written by the device": slots.nbytes / milliseconds(write, 3, 8, device) / 1e6}


def measure(setting: Setting) -> Outcome:
    """The table of limits; its value is the link's rate both ways."""
    found = limits(setting)
    rows = [[name, f"{rate:,.1f}", _share(name, rate, found)] for name, rate in found.items()]
    table = Table(title="Limits of this machine", columns=["what", "GB/s", "of the link"], rows=rows)
    notes = [
        "memory: a large copy on the device, bytes read and written; copies and rows: page-locked host memory",
        "rows gathered by the processor: torch.index_select into a page-locked buffer, then a copy to the device",
    ]
    return Outcome(value=found["both ways"], tables=[table], notes=notes, data={"gb_s": found})


def _share(name: str, rate: float, found: dict[str, float]) -> str:
    if not name.startswith("rows"):
        return "-"
    return f"{rate / found['to host' if 'written' in name else 'to device']:.0%}"
