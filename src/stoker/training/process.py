"""What a run changes in the process that it runs in, and puts back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stoker.base.device import kept_memory, resolve_device
from stoker.training.config import TrainConfig

__all__ = ["process_settings", "seed_generators"]


@contextmanager
def process_settings(config: TrainConfig) -> Iterator[None]:
    """Set the run's number of threads, seed torch's generators, and let glibc keep freed memory; restore all on exit.

    Generators of the CPU and of the run's device are seeded; no other is touched.
    """
    device = resolve_device(config.device)
    threads = torch.get_num_threads()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), kept_memory():
        seed_generators(config)
        try:
            if config.threads is not None:
                torch.set_num_threads(config.threads)
            yield
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def seed_generators(config: TrainConfig) -> None:
    """Seed torch's generators of the CPU and of the run's device, for models that draw while they train."""
    torch.default_generator.manual_seed(config.seed)
    device = resolve_device(config.device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(config.seed)
