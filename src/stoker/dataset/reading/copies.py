"""Batches copied to a GPU one ahead of the training that uses them."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch

from stoker.dataset.batch import Batch

__all__ = ["copied_ahead"]


def copied_ahead(batches: Iterator[Batch], device: torch.device) -> Generator[Batch, None, None]:
    """The same batches on a GPU: while the caller works on one, the next is copied on a stream of its own.

    Page-locked batches need it to overlap with work; two of them are on the device at a time.
    """
    beside = torch.cuda.Stream(device)
    waiting: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(beside):
            ahead = batch.to(device, non_blocking=True), beside.record_event()
        if waiting is not None:
            yield _arrived(*waiting, device)
        waiting = ahead
    if waiting is not None:
        yield _arrived(*waiting, device)


def _arrived(batch: Batch, event: torch.cuda.Event, device: torch.device) -> Batch:
    """The batch, whose tensors the caller's stream may use and nothing overwrites before it has."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(event)
    for name in ("dense", "ids", "offsets", "weights", "labels"):
        tensor = getattr(batch, name)
        if tensor is not None:
            tensor.record_stream(stream)
    return batch
