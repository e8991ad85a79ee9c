"""The settings of generated logs. The help of the command line reads them, so this module does not import Polars."""

from __future__ import annotations

import os
from dataclasses import dataclass

from stoker.base.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class LogSettings(Settings):
    """The settings of generated rows; :func:`stoker.synthetic.write` explains each."""

    seed: int = setting(0, "Seed of the rows, 0 or more.", least=0)
    universe: int | None = setting(None, "Seed of ids and hidden weights.", unset="--seed", least=0)
    alpha: float = setting(1.05, "Exponent of Zipf's law for ids, 0 to 10. --curve replaces it.", least=0, most=10)
    curve: str | os.PathLike[str] | None = setting(
        None, "Measured skew of ids: globo-articles, book-crossing-books, or a JSON file of a curve."
    )
    drift: float = setting(0.0, "Share of the ids whose frequency changes over the log, 0 to 1.", least=0, most=1)
    scale: float = setting(1.0, "Factor for the number of distinct ids, up to 100.")
    base_rate: float | None = setting(None, "Share of positives.", unset="that of the real log")
    signal: float = setting(
        1.3, "Standard deviation of the true logit, 0 to 5. With 0 labels are random.", least=0, most=5
    )


@dataclass(frozen=True, kw_only=True)
class TextSettings(LogSettings):
    """The settings of a log in a raw format."""

    bad: float | str = setting(0.0, "Share of lines to spoil, such as 0.1%.")
