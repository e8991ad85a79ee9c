"""``stoker plan``: where the tables of a model would lie, what that costs, and how long a step would take."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.train import HomePath, HostMemory, InFlight, Lookahead, Spill, model_options

if TYPE_CHECKING:
    from stoker.placement.placement import Placement
    from stoker.training.step_time import StepTime

__all__ = ["register"]

_MODEL, _MACHINE = "Model", "Machine"
_FREE_SHARE = 0.8  # of the device's free memory, where no budget is given


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("plan")(plan)


def plan(
    dataset: Annotated[Path, typer.Argument(help="Directory that stoker prepare wrote.")],
    device_memory: Annotated[
        str | None,
        _option("Memory", "For rows and their optimizer state, such as 4GiB. (default: 80% of what is free)"),
    ] = None,
    host_memory: HostMemory = None,
    home_path: HomePath = None,
    lookahead: Lookahead = None,
    in_flight: InFlight = None,
    spill: Spill = None,
    model: Annotated[str | None, _option(_MODEL, "dlrm, deepfm or dcn. (default: dlrm)")] = None,
    embedding_dim: Annotated[
        int | None, _option(_MODEL, "Columns of every table. (default: 16)", "--embedding-dim", "--dim")
    ] = None,
    bottom: Annotated[str | None, _option(_MODEL, "DLRM: bottom layers. (default: 512-256-64)")] = None,
    top: Annotated[str | None, _option(_MODEL, "DLRM: top layers. (default: 512-256)")] = None,
    hidden: Annotated[str | None, _option(_MODEL, "DeepFM, DCN: layers of the MLP.")] = None,
    model_option: Annotated[
        list[str] | None, _option(_MODEL, "Any other option of the model, as name=value; may be repeated.")
    ] = None,
    dtype: Annotated[str | None, _option(_MODEL, "Of the tables: float32 or bfloat16.")] = None,
    batch_size: Annotated[int | None, _option(_MODEL, "Examples. (default: 2048)")] = None,
    row_optimizer: Annotated[
        str | None, _option(_MODEL, "sgd, adagrad, rowwise_adagrad or adam. (default: rowwise_adagrad)")
    ] = None,
    device: Annotated[str | None, _option(_MACHINE, "auto, cpu or cuda.")] = None,
    backend: Annotated[str | None, _option(_MACHINE, "Kernels of the tables: auto, reference, cpu or triton.")] = None,
    threads: Annotated[int | None, _option(_MACHINE, "CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show where the tables of a model would lie, and what to expect, without training it.

    Reads how often each id occurs, measures this machine and a few steps of the model for some seconds, and prints
    strategy, slots, hit rate, traffic and step time. stoker train --device-memory takes the same decisions.

    \b
    stoker plan data/criteo --device-memory 1GiB
    stoker plan data/criteo --dim 64 --device-memory 4GiB --host-memory 16GiB --home /fast/disk --json
    """
    given = dict(locals())
    for name in ("dataset", "as_json", "bottom", "top", "hidden", "model_option"):
        given.pop(name)
    settings = {name: value for name, value in given.items() if value is not None}
    if options := model_options(bottom, top, hidden, model_option):
        settings["model_options"] = options

    import torch

    from stoker.data.dataset import Dataset
    from stoker.device import device_memory as memory_of
    from stoker.device import resolve_device
    from stoker.optim import Constant
    from stoker.training import TrainConfig
    from stoker.training.placing import place_run
    from stoker.training.step_time import measure_step

    if threads is not None:
        torch.set_num_threads(threads)
    if device_memory is None:
        settings["device_memory"] = str(int(_FREE_SHARE * memory_of(resolve_device(device))[0]))
    config = TrainConfig.from_dict(settings)
    data = Dataset(dataset)
    placement = place_run(config, data, config.make_row_optimizer(Constant()))
    if placement is None:  # --device-memory all
        placement = place_run(config.replace(device_memory=str(2**62)), data, config.make_row_optimizer(Constant()))
        assert placement is not None
    step = measure_step(config, data)
    if as_json:
        seconds = {"placed": step.placed(placement), "resident": step.resident, **asdict(step)}
        print(json.dumps({"dataset": str(dataset), **placement.to_dict(), "step_seconds": seconds}))
    else:
        _show(dataset, config.model, placement, step)


def _show(dataset: Path, model: str, placement: Placement, step: StepTime) -> None:
    from rich.console import Console

    from stoker.units import format_duration

    console = Console()

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    line(f"{dataset}, {model}")
    line(placement.summary())
    console.print(placement.report())
    if placement.note:
        line(placement.note)
    parts = f"{format_duration(step.train)} model, {format_duration(step.read)} reading"
    if placement.resident:
        line(f"expected step: {format_duration(step.resident)} ({parts})")
        return
    parts += f", {format_duration(placement.seconds)} planning and moving"
    line(f"expected step: {format_duration(step.placed(placement))} ({parts})")
    line(f"with all rows on the device: {format_duration(step.resident)}")
