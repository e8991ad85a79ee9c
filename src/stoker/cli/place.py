"""``stoker plan`` and ``stoker replay``: predict the place of rows and its cost, without training."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.errors import ConfigError
from stoker.base.progress import Bars
from stoker.base.units import format_count, format_duration, format_size, parse_size
from stoker.cli.options import DataArgument, Json, option, printed, say, show_grids, takes
from stoker.placement.budget import MemoryBudget, ReplaySettings
from stoker.training.settings import MachineConfig, ModelConfig

if TYPE_CHECKING:
    from stoker.dataset.dataset import Dataset
    from stoker.placement.placement import Placement, Sent
    from stoker.placement.replay import Replay
    from stoker.training import TrainConfig
    from stoker.training.step_time import StepTime

_TT_RANK = 32  # of the proposed tensor trains
_LINKS = {"1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
_FREE_SHARE = 0.8  # of the device's free memory, where no budget is given


@takes(MemoryBudget, ModelConfig, "batch_size", "row_optimizer", MachineConfig, without=("compile",))
def plan(
    dataset: DataArgument,
    device_memory: str | None = option(
        "Memory", "Memory for rows and their optimizer state, such as 4GiB. (default: 80% of what is free)"
    ),
    *,
    settings: dict[str, Any],
    ranks: int | None = option(
        "Model", "Plan for one of R processes that divide the rows (stoker train --ranks).", metavar="R", min=1
    ),
    allow_compression: bool = option(
        "Model", "Also propose tensor trains. They change the model.", "--allow-compression", default=False
    ),
    as_json: Json = False,
) -> None:
    """Predict where rows would be, and the time of a step.

    Reads the counts of the ids, and measures this machine and a few steps of
    the model for some seconds. Prints the strategy of each table, slots, hit
    rate, traffic and the time of a step. stoker train makes the same decisions.

    \b
    stoker plan data/criteo --device-memory 1GiB
    stoker plan data/criteo --dim 64 --device-memory 4GiB --batch-size 8192
    stoker plan data/criteo --device-memory 4GiB --host-memory 16GiB --home /fast
    stoker plan data/criteo --device-memory 1GiB --epoch-lookahead
    stoker plan data/criteo-hot --device-memory 1GiB --strategy hot-cold
    stoker plan data/criteo --device-memory 1GiB --allow-compression
    stoker plan data/criteo --device-memory 1GiB --ranks 4
    stoker plan data/criteo --device-memory 1GiB --json
    """
    import torch

    from stoker.base.device import check_threads, resolve_device
    from stoker.base.device import device_memory as memory_of
    from stoker.optim import Constant
    from stoker.placement.placement import expect_sent
    from stoker.training import TrainConfig
    from stoker.training.defaults import complete
    from stoker.training.files.rundir import open_dataset
    from stoker.training.placing import place_run
    from stoker.training.ranks.start import check_settings, shards_for
    from stoker.training.step_time import measure_step

    if "threads" in settings:
        torch.set_num_threads(check_threads(settings["threads"]))
    if device_memory is None:
        device_memory = str(int(_FREE_SHARE * memory_of(resolve_device(settings.get("device")))[0]))
    limit = str(2**62) if device_memory == "all" else device_memory
    data = open_dataset(dataset)
    size = ranks or 1
    settings = {**settings, "device_memory": limit} | ({"shards": shards_for(size)} if size > 1 else {})
    config = complete(TrainConfig.from_dict(settings), data)
    if size > 1:
        check_settings(config, data, size)
        if allow_compression:
            raise ConfigError("--ranks does not go with --allow-compression. Plan tensor trains with --tt-rank.")
    part = config.replace(batch_size=max(1, config.batch_size // size), shards=max(1, config.shards // size))
    with Bars(quiet=as_json, at_once=True):
        placement = place_run(config, data, config.make_row_optimizer(Constant()), size)
        assert placement is not None
        step = measure_step(part if size > 1 else config, data, placement)
        proposal = _proposal(config, data) if allow_compression else None
        record: dict[str, Any] = {"dataset": str(dataset), **_values(placement, step)}
    sent = expect_sent(placement, size, config.shards, step.parameters) if size > 1 else None
    if sent:
        record |= {"ranks": size, "shards": config.shards, "sent_bytes": {**asdict(sent), "total": sent.total}}
    if allow_compression:
        record["compressed"] = proposal and {"settings": proposal[0], **_values(*proposal[1:])}
    if printed(record, as_json):
        return
    _show_placement(f"{dataset}, {config.model}" + (f", one of {size} ranks" if sent else ""), placement, step)
    if sent:
        _show_sent(sent, config.shards)
    if proposal:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in proposal[0].items())
        _show_placement(f"\nwith {flags} (another model):", *proposal[1:])
    elif allow_compression:
        print("\nTensor trains would save nothing: all rows fit already, or no table would be smaller.")


def _show_sent(sent: Sent, shards: int) -> None:
    parts = ", ".join(f"{format_size(size)} {name}" for name, size in asdict(sent).items())
    times = " or ".join(f"{format_duration(8 * sent.total / rate)} at {name}" for name, rate in _LINKS.items())
    say(f"a rank sends {format_size(sent.total)} a step with {shards} shards ({parts}): in addition {times}")


def _proposal(config: TrainConfig, data: Dataset) -> tuple[dict[str, int], Placement, StepTime] | None:
    """Return settings that compress the fewest largest tables so that all fit, with placement and time, or None."""
    from stoker.optim import Constant
    from stoker.placement.planner import rows_to_compress
    from stoker.tables import TensorTrain
    from stoker.training.placing import place_run
    from stoker.training.step_time import measure_step

    tables, optimizer = config.tables(data.schema), config.make_row_optimizer(Constant())
    rank = config.tt_rank or _TT_RANK
    budget = parse_size(config.device_memory or 2**62)
    own = {name: TensorTrain(own=numbers) for name, numbers in config.tt_own.items()}
    rows = rows_to_compress(tables, budget, optimizer.state, rank, config.tt_cores, own)
    if rows is None:
        return None
    settings = {"tt_rank": rank, "tt_rows": rows}
    proposed = config.replace(**settings)
    placement = place_run(proposed, data, optimizer)
    assert placement is not None
    return settings, placement, measure_step(proposed, data, placement)


def _values(placement: Placement, step: StepTime) -> dict[str, Any]:
    seconds = {"placed": step.placed(placement), "resident": step.resident, **asdict(step)}
    del seconds["parameters"]
    return {**placement.to_dict(), "step_seconds": seconds, "bound": step.bound(placement)}


def _show_placement(title: str, placement: Placement, step: StepTime) -> None:
    say(title)
    say(placement.summary())
    show_grids(placement.grids())
    for text in filter(None, (placement.choice, placement.note)):
        say(text)
    if not placement.resident:
        fast = sum(group.slot_bytes for group in placement.groups)
        bookkeeping = sum(group.bookkeeping_bytes for group in placement.groups)
        say(f"rows in fast memory: {format_size(fast)}; bookkeeping: {format_size(bookkeeping)} of main memory")
    each = step.parts(placement)
    parts = ", ".join(f"{format_duration(seconds)} {name}" for name, seconds in each.items() if seconds)
    if placement.resident:
        say(f"expected step: {format_duration(step.resident)} ({parts})")
        return
    say(f"expected step: {format_duration(step.placed(placement))} ({parts}), bound by {step.bound(placement)}")
    say(f"a step with all rows on the device: {format_duration(step.resident)}")


@takes(ReplaySettings, "batch_size")
def replay(
    dataset: DataArgument,
    *,
    settings: dict[str, Any],
    lookahead: str = option("Batches", "Windows of the lookahead, in batches.", default="1,4,16,64,256"),
    order: str = option("Batches", "Order of the rows: shuffled, as in training, or file.", default="shuffled"),
    as_json: Json = False,
) -> None:
    """Compare cache strategies on the ids of a dataset.

    Prints hit rates and traffic without training. lru evicts the least
    recently used row, lfu the least frequently used one. lookahead-64 knows
    the next 64 batches, adaptive as many as in training, and pinned also pins
    most slots. belady knows all batches, as stoker train --epoch-lookahead, and
    has the fewest misses. hot-cold pins the most used rows and keeps no other.
    host-pipelined keeps no row.

    \b
    stoker replay data/criteo
    stoker replay data/criteo --device-memory 1GiB --dim 64 --row-optimizer adam
    stoker replay data/globo --fraction 5% --order file --lookahead 16,64
    stoker replay data/criteo --slots 200k --batch-size 8192 --steps 500 --json
    """
    if order not in ("shuffled", "file"):
        raise ConfigError(f"--order {order!r} is unknown. Choose shuffled or file.")
    if not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", lookahead := lookahead.replace(" ", "")):
        raise ConfigError(f"--lookahead {lookahead!r} is not a list of numbers, at least 1. Write for example 16,64.")
    windows = [f"lookahead-{int(part)}" for part in lookahead.split(",")]
    from stoker.placement.replay import replay as run_replay
    from stoker.training.defaults import batch_for
    from stoker.training.files.rundir import open_dataset

    data = open_dataset(dataset)
    settings.setdefault("batch_size", batch_for(len(data.train)))  # as stoker train
    if order == "file":
        settings["seed"] = None
    strategies = ["lru", "lfu", *windows, "adaptive", "pinned", "hot-cold", "host-pipelined", "belady"]
    with Bars(quiet=as_json) as bars:
        found = run_replay(data, strategies=strategies, progress=bars, **settings)
    if not printed({"dataset": str(dataset), "order": order, **found.to_dict()}, as_json):
        _show_replay(dataset, order, found)


def _show_replay(dataset: Path, order: str, found: Replay) -> None:
    say(
        f"{dataset}: {found.steps:,} batches of {found.batch_size:,} ({order}), {format_count(found.lookups)} lookups "
        f"of {format_count(found.rows_used)} rows; {found.rows_needed / found.steps:,.0f} distinct rows a batch"
    )
    say(
        f"fast memory: {found.slots:,} slots of {found.row_bytes} bytes, {format_size(found.slots * found.row_bytes)}, "
        f"for {found.num_rows:,} rows ({found.slots / found.num_rows:.1%}); the minimum is "
        f"{found.least_slots:,} slots"
    )
    show_grids(found.grids())
    first = found.strategies[0].compulsory
    say(
        "Hit rate: the share of the distinct rows of each batch that are in a slot already. Every miss fetches a row "
        "and its state. KiB are those of a step; ahead: the most batches whose ids were known, MiB: their memory. "
        f"{first:,} misses are first uses, which no strategy avoids. belady knows all batches, as "
        "training with --epoch-lookahead does, and has the fewest misses."
    )
