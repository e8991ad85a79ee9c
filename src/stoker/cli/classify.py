"""``stoker classify``: training rows whose ids are all hot, apart from the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.base.bars import Bars
from stoker.base.errors import ConfigError
from stoker.cli.common.options import DataArgument, OneObject, option

__all__ = ["register"]

_PROFILE, _RESULT = "Profile", "Results"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("classify")(classify)


def classify(
    dataset: DataArgument,
    out: Annotated[Path, option(_RESULT, "Directory to make.")],
    profile: Annotated[
        Path | None, option(_PROFILE, "File that stoker profile wrote. (default: a profile is made first)")
    ] = None,
    budget: Annotated[
        str | None, option(_PROFILE, "For hot rows and their optimizer state. (default: 512MiB)", "--device-memory")
    ] = None,
    dim: Annotated[int | None, option(_PROFILE, "Columns of every table. (default: 16)", "--dim")] = None,
    dtype: Annotated[str | None, option(_PROFILE, "Of the tables: float32 or bfloat16. (default: float32)")] = None,
    optimizer: Annotated[
        str | None, option(_PROFILE, "Of the rows; its state lies with them. (default: rowwise_adagrad)")
    ] = None,
    overwrite: Annotated[bool, option(_RESULT, "Replace a dataset that is there.", "--overwrite")] = False,
    as_json: OneObject = False,
) -> None:
    """Write a dataset whose training rows are classified: hot ones first, then cold ones.

    A row is hot if all its ids are hot rows of their tables. Everything else
    of the dataset is linked, not copied. stoker train then trains on batches
    that are all hot or all cold, in the order of a schedule.

    \b
    stoker classify data/criteo --device-memory 512MiB --out data/criteo-hot
    stoker classify data/criteo --device-memory 1GiB --dim 64 --out data/criteo-hot
    stoker classify data/criteo --profile hot.json --out data/criteo-hot --overwrite
    """
    asked: dict[str, Any] = {"budget": budget, "embedding_dim": dim, "dtype": dtype, "optimizer": optimizer}
    given = {name: value for name, value in asked.items() if value is not None}
    if profile is not None and given:
        raise ConfigError(
            "--profile has its own budget, --dim, --dtype and --optimizer. Leave these out, or make another profile "
            "with stoker profile."
        )
    from stoker.base.units import format_duration, format_size, quoted
    from stoker.dataset.dataset import Dataset
    from stoker.rewrite.classified import run_classify
    from stoker.rewrite.hot_profile import HotProfile
    from stoker.rewrite.popularity import profile as run_profile

    data = Dataset(dataset)
    with Bars(quiet=as_json) as bars:
        found = run_profile(data, progress=bars, **given) if profile is None else HotProfile.load(profile)
        report = run_classify(data, found, out, overwrite=overwrite, progress=bars)
    rows = report.hot + report.cold
    if as_json:
        values = {name: value for name, value in vars(report).items() if name != "path"}
        typer.echo(json.dumps({"out": str(out), "profile_hash": found.hash, **values}))
        return
    what = "already classified" if report.reused else f"classified in {format_duration(report.seconds)}"
    typer.echo(f"{out}: {rows:,} training rows {what}")
    typer.echo(f"by profile {found.hash[:16]}, whose hot rows take {format_size(found.hot_bytes)}")
    for kind, count in (("hot", report.hot), ("cold", report.cold)):
        typer.echo(f"{kind:>5}: {count:,} rows ({count / max(1, rows):.2%})")
    typer.echo(f"next: stoker train {quoted(out)} --out RUN")
