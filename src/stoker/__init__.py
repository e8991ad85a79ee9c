"""Stoker trains recommendation models whose embedding tables do not fit the accelerator.

It does so on one machine, with the same numbers as a run that had the memory. A name loads when it is first used, so
importing needs only torch, numpy and safetensors. ``__init__.pyi`` lists the names.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from stoker.base.errors import load as _load
from stoker.base.version import __version__ as __version__

# Name -> the module that defines it.
_HOME = {
    alias.name: str(node.module)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = list(sorted(_HOME))


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}")
    module = _HOME[name]
    if module in ("stoker", "stoker.prep"):  # packages that are public themselves
        return _load(f"{module}.{name}", f"stoker.{name}")
    value = globals()[name] = getattr(_load(module, f"stoker.{name}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
