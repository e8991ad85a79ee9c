"""``stoker plan``: where the tables of a model would lie, what that costs, and how long a step would take."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from stoker.cli.common import options

if TYPE_CHECKING:
    from stoker.dataset.dataset import Dataset
    from stoker.placement.placement import Placement
    from stoker.training import TrainConfig
    from stoker.training.step_time import StepTime

__all__ = ["register"]

_TT_RANK = 32  # of tensor trains that are proposed
_FREE_SHARE = 0.8  # of the device's free memory, where no budget is given


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("plan")(plan)


def plan(
    dataset: options.DataArgument,
    device_memory: Annotated[
        str | None,
        options.option("Memory", "For rows and their optimizer state, such as 4GiB. (default: 80% of what is free)"),
    ] = None,
    host_memory: options.HostMemory = None,
    home_path: options.HomePath = None,
    strategy: options.Strategy = None,
    lookahead: options.Lookahead = None,
    foresight: options.Foresight = None,
    in_flight: options.InFlight = None,
    spill: options.Spill = None,
    model: options.Model = None,
    embedding_dim: options.EmbeddingDim = None,
    bottom: options.Bottom = None,
    top: options.Top = None,
    hidden: options.Hidden = None,
    model_option: options.ModelOption = None,
    dtype: options.Dtype = None,
    tt_rank: options.TTRank = None,
    tt_rows: options.TTRows = None,
    tt_cores: options.TTCores = None,
    tt_own: options.TTOwn = None,
    batch_size: options.BatchSize = None,
    row_optimizer: options.RowOptimizer = None,
    device: options.Device = None,
    backend: options.Backend = None,
    threads: options.Threads = None,
    allow_compression: Annotated[
        bool, options.option("Model", "Also propose tensor trains, which change the model.", "--allow-compression")
    ] = False,
    as_json: options.OneObject = False,
) -> None:
    """Show where the tables of a model would lie, and what to expect, without training it.

    Reads how often each id occurs, measures this machine and a few steps of
    the model for some seconds, and prints strategy, slots, hit rate, traffic
    and step time. stoker train --device-memory takes the same decisions.

    \b
    stoker plan data/criteo --device-memory 1GiB
    stoker plan data/criteo --dim 64 --device-memory 4GiB --batch-size 8192
    stoker plan data/criteo --device-memory 4GiB --host-memory 16GiB --home /fast
    stoker plan data/criteo --device-memory 1GiB --foresight
    stoker plan data/criteo-hot --device-memory 1GiB --strategy hot-cold
    stoker plan data/criteo --device-memory 1GiB --allow-compression
    stoker plan data/criteo --device-memory 1GiB --json
    """
    given = dict(locals())
    for name in ("dataset", "as_json", "allow_compression", "bottom", "top", "hidden", "model_option"):
        given.pop(name)
    settings = {name: value for name, value in given.items() if value is not None}
    if own := options.model_options(bottom, top, hidden, model_option):
        settings["model_options"] = own
    if tt_own:
        settings["tt_own"] = options.own_numbers(tt_own)

    import torch

    from stoker.base.device import device_memory as memory_of
    from stoker.base.device import resolve_device
    from stoker.optim import Constant
    from stoker.training import TrainConfig
    from stoker.training.files.rundir import open_dataset
    from stoker.training.placing import place_run
    from stoker.training.step_time import measure_step

    if threads is not None:
        torch.set_num_threads(threads)
    if device_memory is None:
        settings["device_memory"] = str(int(_FREE_SHARE * memory_of(resolve_device(device))[0]))
    config = TrainConfig.from_dict(settings)
    data = open_dataset(dataset)
    placement = place_run(config, data, config.make_row_optimizer(Constant()))
    if placement is None:  # --device-memory all
        placement = place_run(config.replace(device_memory=str(2**62)), data, config.make_row_optimizer(Constant()))
        assert placement is not None
    step = measure_step(config, data, placement)
    proposal = _proposal(config, data) if allow_compression else None
    if as_json:
        record: dict[str, Any] = {"dataset": str(dataset), **_values(placement, step)}
        if allow_compression:
            record["compressed"] = proposal and {"settings": proposal.settings, **_values(*proposal[1:])}
        print(json.dumps(record))
        return
    _show(f"{dataset}, {config.model}", placement, step)
    if proposal:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in proposal.settings.items())
        _show(f"\nwith {flags}, which is another model:", *proposal[1:])
    elif allow_compression:
        print("\nTensor trains would save nothing here: the rows fit as they are, or no table gets smaller.")


class _Proposal(NamedTuple):
    settings: dict[str, int]
    placement: Placement
    step: StepTime


def _proposal(config: TrainConfig, data: Dataset) -> _Proposal | None:
    """The largest tables as tensor trains, as many as let the others lie on the device."""
    from stoker.base.units import parse_size
    from stoker.optim import Constant
    from stoker.placement.compression import rows_to_compress
    from stoker.tables import TensorTrain
    from stoker.training.placing import place_run
    from stoker.training.step_time import measure_step

    tables = config.tables(data.schema)
    optimizer = config.make_row_optimizer(Constant())
    rank = config.tt_rank or _TT_RANK
    budget = parse_size(config.device_memory or 2**62)
    own = {name: TensorTrain(own=numbers) for name, numbers in config.tt_own.items()}
    rows = rows_to_compress(tables, budget, optimizer.state, rank, config.tt_cores, own)
    if rows is None:
        return None
    settings = {"tt_rank": rank, "tt_rows": rows}
    proposed = config.replace(tt_rank=rank, tt_rows=rows)
    placement = place_run(proposed, data, optimizer)
    assert placement is not None
    return _Proposal(settings, placement, measure_step(proposed, data, placement))


def _values(placement: Placement, step: StepTime) -> dict[str, Any]:
    seconds = {"placed": step.placed(placement), "resident": step.resident, **asdict(step)}
    return {**placement.to_dict(), "step_seconds": seconds}


def _show(title: str, placement: Placement, step: StepTime) -> None:
    from rich.console import Console

    from stoker.base.units import format_duration, format_size

    console = Console()

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    line(title)
    line(placement.summary())
    console.print(placement.report())
    if placement.choice:
        line(placement.choice)
    if placement.note:
        line(placement.note)
    if not placement.resident:
        fast, beside = (
            sum(getattr(group, name) for group in placement.groups) for name in ("slot_bytes", "beside_bytes")
        )
        line(
            f"rows in fast memory: {format_size(fast)}; finding and planning them: {format_size(beside)} of main memory"
        )
    parts = f"{format_duration(step.slotted)} model, {format_duration(step.read)} reading"
    if placement.resident:
        line(f"expected step: {format_duration(step.resident)} ({parts})")
        return
    parts += f", {format_duration(placement.seconds)} planning and moving"
    line(f"expected step: {format_duration(step.placed(placement))} ({parts})")
    line(f"with all rows on the device: {format_duration(step.resident)}")
