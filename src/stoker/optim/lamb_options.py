"""What both kinds of LAMB, for rows and for the dense part, take."""

from __future__ import annotations

import math

from stoker.base.errors import ConfigError


def check_lamb(name: str, betas: tuple[float, float], eps: float, min_trust: float, max_trust: float | None) -> None:
    """Raise ConfigError for options out of their range."""
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"{name}(betas={betas}): both must lie in [0, 1).")
    if not (eps >= 0 and math.isfinite(eps)):
        raise ConfigError(f"{name}(eps={eps}) must be finite and not negative.")
    if not (
        0.0 <= min_trust < math.inf and (max_trust is None or (0.0 < max_trust < math.inf and min_trust <= max_trust))
    ):
        raise ConfigError(
            f"{name}(min_trust={min_trust}, max_trust={max_trust}): they bound the trust ratio, so "
            "0 <= min_trust <= max_trust, and max_trust > 0 (None: no bound)."
        )
