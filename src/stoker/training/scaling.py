"""How learning rates follow the batch size."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["RULES", "Scaling"]

#: names of the rules
RULES = ("none", "sqrt", "linear", "cowclip")


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Factors where a batch has s times the examples that the rates are meant for."""

    row_lr: float = 1.0
    dense_lr: float = 1.0
    row_weight_decay: float = 1.0

    @classmethod
    def of(cls, rule: str, s: float) -> Scaling:
        """The factors of a rule.

        Args:
            rule: "none"; "sqrt" (Krizhevsky 2014) or "linear" (Goyal et al. 2017) for both rates; "cowclip": rows keep
                their rate, the dense rate grows by the root and the rows' weight decay linearly (Zheng et al. 2022).
            s: batch size over the one that the rates are meant for; below 1 for smaller batches.
        """
        if rule == "sqrt":
            return cls(row_lr=math.sqrt(s), dense_lr=math.sqrt(s))
        if rule == "linear":
            return cls(row_lr=s, dense_lr=s)
        if rule == "cowclip":
            return cls(dense_lr=math.sqrt(s), row_weight_decay=s)
        return cls()
