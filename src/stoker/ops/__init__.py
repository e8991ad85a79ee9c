"""Kernels: one definition in plain PyTorch, and back ends that equal it. PyTorch loads when one is first used."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import TYPE_CHECKING, Literal

from stoker.base.errors import ConfigError, DependencyError, lazily

if TYPE_CHECKING:
    import torch

    from stoker.ops.backend import Backend
    from stoker.ops.rule import RowRule
    from stoker.ops.space import AddressSpace, Bags, Part, Parts, Rounding
else:
    _HOMES = {"backend": "Backend", "rule": "RowRule", "space": "AddressSpace Bags Part Parts Rounding"}
    __getattr__ = lazily(__name__, _HOMES)

__all__ = ["AddressSpace", "Backend", "BackendName", "Bags", "Part", "Parts", "Rounding", "RowRule", "get_backend"]

BackendName = Literal["auto", "reference", "cpu", "triton"]


@cache
def _load(name: str) -> Backend:
    if name == "reference":
        from stoker.ops.backend import Backend

        return Backend()
    package = {"cpu": "numba", "triton": "triton"}.get(name)
    if package is None:
        raise ConfigError(f"backend {name!r} is unknown. Choose 'auto', 'reference', 'cpu' or 'triton'.")
    if importlib.util.find_spec(package) is None:
        raise DependencyError(f"backend {name!r} needs {package}, which is not installed. Run: pip install {package}")
    if name == "cpu":
        from stoker.ops.cpu.backend import CpuBackend

        return CpuBackend()
    from stoker.ops.gpu.backend import TritonBackend

    return TritonBackend()


def get_backend(name: BackendName, device: torch.device) -> Backend:
    """Return the kernels for tables on ``device``; "auto" takes the fastest that is installed.

    Raises:
        ConfigError: the name is unknown, or the back end does not run on this device.
        DependencyError: the back end's package is missing.
    """
    if name == "auto":
        package, wanted = ("triton", "triton") if device.type == "cuda" else ("numba", "cpu")
        return _load(wanted if importlib.util.find_spec(package) is not None else "reference")
    if name == "cpu" and device.type != "cpu":
        raise ConfigError(f"backend 'cpu' cannot work on tables on {device}. Choose 'auto', 'triton' or 'reference'.")
    if name == "triton" and device.type != "cuda" and not (device.type == "cpu" and _interpreting()):
        import torch

        missing = f"these are on {device}" if torch.cuda.is_available() else "no GPU was found"
        raise ConfigError(
            f"backend 'triton' works on tables on a GPU, and {missing}. Choose 'auto', 'cpu' or 'reference'; to try "
            "its kernels on the CPU, slowly, install triton and set TRITON_INTERPRET=1 before the program starts."
        )
    return _load(name)


def _interpreting() -> bool:
    """Return True if the user asked Triton to run its kernels on the CPU."""
    if importlib.util.find_spec("triton") is None:
        return os.environ.get("TRITON_INTERPRET") == "1"  # then only the package is missing
    from stoker.ops.gpu.backend import interpreted

    return interpreted()
