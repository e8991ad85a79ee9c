"""The steps of the row rules that treat every element of a row alike, on vectors of LLVM.

Each does what :func:`stoker.ops.reference.update_rows` does, in the same order. It takes the constants by name
(:class:`stoker.ops.rule.Constants`), the row, its gradient and its state tensors, and returns the new row and states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.ops.codegen.llvm_vec import Vec

_Constants = Callable[[str], Any]


def _adagrad(c: _Constants, w: Vec, g: Vec, total: Vec) -> tuple[Vec, ...]:
    total = total + g * g
    return w - (g * c("lr")) / (total.sqrt() + c("eps")), total


def _adam(c: _Constants, w: Vec, g: Vec, mean: Vec, square: Vec) -> tuple[Vec, ...]:
    mean = mean * c("beta1") + g * c("rest1")
    square = square * c("beta2") + (g * g) * c("rest2")
    return w * c("keep") - (mean * c("lr")) / (square.sqrt() * c("unbias") + c("eps")), mean, square


def _momentum(c: _Constants, w: Vec, g: Vec, buffer: Vec) -> tuple[Vec, ...]:
    buffer = buffer * c("beta1") + g
    return w - buffer * c("lr"), buffer


def _nesterov(c: _Constants, w: Vec, g: Vec, buffer: Vec) -> tuple[Vec, ...]:
    buffer = buffer * c("beta1") + g
    return w - (g + buffer * c("beta1")) * c("lr"), buffer


def _ftrl(c: _Constants, w: Vec, g: Vec, before: Vec, linear: Vec) -> tuple[Vec, ...]:
    total = before + g * g
    root = total.sqrt()
    fresh = (w * c("eps")).where(linear.compare("==", 0.0), linear)
    linear = fresh.where(before.compare("==", 0.0), linear) + (root - before.sqrt()) * w - g * c("lr")
    above, below = linear - c("l1"), linear + c("l1")
    shrunk = above.where(above.compare(">", 0.0), below.where(below.compare("<", 0.0), linear * 0.0))
    scale = root + c("eps") + c("l2")
    return w.where(scale.compare("==", 0.0), shrunk / scale), total, linear


#: by kind
STEPS: dict[str, Callable[..., tuple[Vec, ...]]] = {
    "adagrad": _adagrad,
    "adam": _adam,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "ftrl": _ftrl,
}
