"""``stoker plan`` and ``stoker replay``: where rows would be and what that costs, without training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.errors import ConfigError
from stoker.base.progress import Bars
from stoker.base.units import format_count, format_duration, format_size, parse_count, parse_size
from stoker.cli.options import (
    DataArgument,
    Dim,
    Dtype,
    OneObject,
    Optimizer,
    option,
    printed,
    say,
    show_grids,
    takes,
)
from stoker.placement.budget import MemoryBudget
from stoker.training.settings import MachineConfig, ModelConfig

if TYPE_CHECKING:
    from stoker.dataset.dataset import Dataset
    from stoker.placement.placement import Placement
    from stoker.placement.replay import Replay
    from stoker.training import TrainConfig
    from stoker.training.step_time import StepTime

_TT_RANK = 32  # of tensor trains that are proposed
_FREE_SHARE = 0.8  # of the device's free memory, where no budget is given
_SLOTS, _TRACE = "Fast memory (one of three)", "Batches"


@takes(MemoryBudget, ModelConfig, "batch_size", "row_optimizer", MachineConfig, without=("compile",))
def plan(
    dataset: DataArgument,
    device_memory: str | None = option(
        "Memory", "For rows and their optimizer state, such as 4GiB. (default: 80% of what is free)"
    ),
    *,
    settings: dict[str, Any],
    allow_compression: bool = option(
        "Model", "Also propose tensor trains, which change the model.", "--allow-compression", default=False
    ),
    as_json: OneObject = False,
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
    import torch

    from stoker.base.device import device_memory as memory_of
    from stoker.base.device import resolve_device
    from stoker.optim import Constant
    from stoker.training import TrainConfig
    from stoker.training.files.rundir import open_dataset
    from stoker.training.placing import place_run
    from stoker.training.step_time import measure_step

    if "threads" in settings:
        torch.set_num_threads(settings["threads"])
    if device_memory is None:
        device_memory = str(int(_FREE_SHARE * memory_of(resolve_device(settings.get("device")))[0]))
    limit = str(2**62) if device_memory == "all" else device_memory
    config = TrainConfig.from_dict({**settings, "device_memory": limit})
    data = open_dataset(dataset)
    placement = place_run(config, data, config.make_row_optimizer(Constant()))
    assert placement is not None
    step = measure_step(config, data, placement)
    proposal = _proposal(config, data) if allow_compression else None
    record: dict[str, Any] = {"dataset": str(dataset), **_values(placement, step)}
    if allow_compression:
        record["compressed"] = proposal and {"settings": proposal[0], **_values(*proposal[1:])}
    if printed(record, as_json):
        return
    _show_placement(f"{dataset}, {config.model}", placement, step)
    if proposal:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in proposal[0].items())
        _show_placement(f"\nwith {flags}, which is another model:", *proposal[1:])
    elif allow_compression:
        print("\nTensor trains would save nothing here: the rows fit as they are, or no table gets smaller.")


def _proposal(config: TrainConfig, data: Dataset) -> tuple[dict[str, int], Placement, StepTime] | None:
    """The largest tables as tensor trains, as many as let the others lie on the device: the settings for that."""
    from stoker.optim import Constant
    from stoker.placement.planner import rows_to_compress
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
    return settings, placement, measure_step(proposed, data, placement)


def _values(placement: Placement, step: StepTime) -> dict[str, Any]:
    seconds = {"placed": step.placed(placement), "resident": step.resident, **asdict(step)}
    return {**placement.to_dict(), "step_seconds": seconds}


def _show_placement(title: str, placement: Placement, step: StepTime) -> None:
    say(title)
    say(placement.summary())
    show_grids(placement.grids())
    if placement.choice:
        say(placement.choice)
    if placement.note:
        say(placement.note)
    if not placement.resident:
        fast, beside = (
            sum(getattr(group, name) for group in placement.groups) for name in ("slot_bytes", "beside_bytes")
        )
        say(
            f"rows in fast memory: {format_size(fast)}; finding and planning them: {format_size(beside)} of main memory"
        )
    parts = f"{format_duration(step.slotted)} model, {format_duration(step.read)} reading"
    if placement.resident:
        say(f"expected step: {format_duration(step.resident)} ({parts})")
        return
    parts += f", {format_duration(placement.seconds)} planning and moving"
    say(f"expected step: {format_duration(step.placed(placement))} ({parts})")
    say(f"with all rows on the device: {format_duration(step.resident)}")


def replay(
    dataset: DataArgument,
    fraction: str | None = option(_SLOTS, "Share of all rows, 0.1 or 10%. (default: 10%)"),
    slots: str | None = option(_SLOTS, "Rows, such as 50k."),
    device_memory: str | None = option(_SLOTS, "Bytes for rows and their state, such as 1GiB."),
    lookahead: str = option(None, "Batches whose ids are known ahead, several windows.", default="1,4,16,64,256"),
    in_flight: int = option(None, "Batches whose rows may not leave, the current one included.", default=1),
    batch_size: int = option(_TRACE, "Examples.", default=2048),
    steps: int | None = option(_TRACE, "Batches in all. (default: one epoch)"),
    order: str = option(_TRACE, "shuffled, as in training, or file.", default="shuffled"),
    seed: int = option(_TRACE, "Of the shuffled order.", default=0),
    dim: Dim = 16,
    dtype: Dtype = "float32",
    optimizer: Optimizer = "rowwise_adagrad",
    as_json: OneObject = False,
) -> None:
    """Replay the ids of a dataset through cache strategies, without training.

    Shows how often a row that a batch needs already lies in fast memory, and
    what has to travel: for least recently used (lru), least frequently used
    (lfu), Stoker's lookahead with several windows, the most used rows kept
    for ever (hot-cold), no cache at all (host-pipelined), and the optimum
    that knows all batches (belady), which is what stoker train --foresight
    does.

    \b
    stoker replay data/criteo
    stoker replay data/criteo --device-memory 1GiB --dim 64 --optimizer adam
    stoker replay data/globo --fraction 5% --order file --lookahead 16,64
    stoker replay data/criteo --slots 200k --batch-size 8192 --steps 500 --json
    """
    if order not in ("shuffled", "file"):
        raise ConfigError(f"--order {order!r} is unknown. Choose shuffled or file.")
    try:
        windows = [f"lookahead-{int(part)}" for part in lookahead.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"--lookahead {lookahead!r} is not a list of numbers. Write for example 16,64.") from error
    from stoker.placement.replay import replay as run_replay

    with Bars(quiet=as_json) as bars:
        found = run_replay(
            dataset, slots=None if slots is None else parse_count(slots), fraction=fraction,
            device_memory=device_memory, strategies=["lru", "lfu", *windows, "hot-cold", "host-pipelined", "belady"],
            in_flight=in_flight, batch_size=batch_size, steps=steps, seed=seed if order == "shuffled" else None,
            dim=dim, dtype=dtype, optimizer=optimizer, progress=bars,
        )  # fmt: skip
    if not printed({"dataset": str(dataset), "order": order, **found.to_dict()}, as_json):
        _show_replay(dataset, order, found)


def _show_replay(dataset: Path, order: str, found: Replay) -> None:
    say(
        f"{dataset}: {found.steps:,} batches of {found.batch_size:,} ({order}), {format_count(found.lookups)} lookups "
        f"of {format_count(found.rows_used)} rows; {found.rows_needed / found.steps:,.0f} distinct rows a batch"
    )
    say(
        f"fast memory: {found.slots:,} slots of {found.row_bytes} bytes, {format_size(found.slots * found.row_bytes)}, "
        f"for {found.num_rows:,} rows ({found.slots / found.num_rows:.1%}); the least that works: "
        f"{found.least_slots:,} slots"
    )
    show_grids(found.grids())
    first = found.strategies[0].compulsory
    say(
        "Hit rate: the share of each batch's distinct rows that already lay in a slot. Every miss fetches a row and "
        f"its state; {first:,} are first uses, which no strategy avoids. belady knows all batches, as training with "
        "--foresight does: none misses less."
    )
