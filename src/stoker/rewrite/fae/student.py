"""Quantiles of Student's t distribution, for Equation 4 of FAE (VLDB 2022)."""

from __future__ import annotations

import math
from functools import lru_cache

from stoker.base.errors import ConfigError

__all__ = ["half_width", "t_quantile"]


def _central(angle: float, degrees: int) -> float:
    """P(|T| <= sqrt(degrees) tan(angle)): the finite sums of Abramowitz & Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees % 2:
        term = total = cosine if degrees > 1 else 0.0
        for k in range(3, degrees - 1, 2):
            term *= (k - 1) / k * cosine * cosine
            total += term
        return 2 / math.pi * (angle + sine * total)
    term = total = 1.0
    for k in range(2, degrees - 1, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    return sine * total


@lru_cache(maxsize=256)
def t_quantile(confidence: float, degrees: int) -> float:
    """t such that a t-distributed number lies in [-t, t] with probability ``confidence``: 2.032 for 0.95 and 34.

    Raises:
        ConfigError: a confidence outside (0, 1), or no degree of freedom.
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence is {confidence}; give a share above 0 and below 1, such as 99.9%.")
    if degrees < 1:
        raise ConfigError(f"{degrees} degrees of freedom tell nothing of a deviation; there must be at least 1.")
    low, high = 0.0, math.pi / 2
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def half_width(deviation: float, samples: int, share: float, confidence: float) -> float:
    """Half the interval of a mean (Equation 4): t * sqrt((N - n) / N * s**2 / n).

    Args:
        deviation: s, of the samples.
        samples: n.
        share: n / N, of the population that was sampled.
        confidence: 1 - alpha.
    """
    return t_quantile(confidence, samples - 1) * deviation * math.sqrt(max(0.0, 1 - share) / samples)
