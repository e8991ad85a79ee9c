"""The start of a run on several ranks: its settings, which all ranks must share, and what is refused."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from stoker.base.device import resolve_device
from stoker.base.errors import ConfigError
from stoker.base.files import hash_json, url_of
from stoker.base.version import __version__
from stoker.dataset.dataset import Dataset
from stoker.tables.ranks.transport import Ranks
from stoker.training.config import TrainConfig
from stoker.training.ranks.together import bits_of_products

SHARDS = 8  # of a run on ranks, at least
#: Settings that ranks need not share: no number depends on them, and no message between ranks.
_OWN = ("threads", "data_memory", "tensorboard")


def find_ranks(ranks: Ranks | None) -> Ranks | None:
    """Return the ranks that train together: those given, else all processes of ``torch.distributed``; None: this one.

    Raises:
        ConfigError: they are :class:`stoker.Replicas`, or no ranks.
    """
    if ranks is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        ranks = Ranks()
    if not isinstance(ranks, Ranks | None) or (ranks is not None and ranks.means):
        raise ConfigError(
            f"ranks is {ranks!r}, and stoker.train divides rows among ranks. Give stoker.distributed.Ranks() in each "
            "process that torchrun starts, or run: stoker train --ranks"
        )
    return ranks


def together(ranks: Ranks | None) -> AbstractContextManager[None]:
    """Return a context whose errors the other ranks get to know."""
    return nullcontext() if ranks is None else ranks.guard()


def shards_for(ranks: int) -> int:
    """Return the logical shards of a run on ranks, unless it has its own number."""
    return max(SHARDS, 1 << (ranks - 1).bit_length())


def with_shards(config: TrainConfig | None, settings: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return the settings of a new run on ranks, with logical shards.

    Raises:
        ConfigError: 1 shard was asked for.
    """
    if "shards" not in settings and (config is None or config.shards == 1):
        return settings | {"shards": shards_for(ranks)}
    return settings


def check_run(config: TrainConfig, data: Dataset, ranks: Ranks) -> None:
    """Check, before work begins, that a run can be trained on ranks, and that all of them have the same one.

    Raises:
        ConfigError: several ranks do not support a setting, or ranks have other settings, data or versions.
    """
    check_settings(config, data, ranks.size)
    _check_same(ranks, {
        **{f"setting {name}": value for name, value in config.to_dict().items() if name not in _OWN},
        "the dataset": hash_json([data.manifest.get(name) for name in ("features", "schema_hash", "files", "splits")]),
        "the version of Stoker": __version__,
        "the version of PyTorch": torch.__version__,
        "the kind of processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "the checksum of matrix products": bits_of_products(),
    })  # fmt: skip


def same_ranks(before: dict[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run to resume.

    Raises:
        ConfigError: its copies of rows were on another number of ranks.
    """
    if "ranks" in now and before.get("ranks", now["ranks"]) != now["ranks"]:
        raise ConfigError(
            f"this run averages copies of rows on {before['ranks']} ranks (average_every): on {now['ranks']} it would "
            f"be another model. Resume it with --ranks {before['ranks']}.",
            settings=("average_every",),
        )
    return before


def check_settings(config: TrainConfig, data: Dataset, ranks: int) -> None:
    """Raise ConfigError for what several ranks do not support yet."""
    no_average = config.tensor_trains(data.schema) or data.schema.grow
    reasons = {
        "shards": config.shards < ranks and f"they need as many logical shards, but the run has {config.shards}. Give "
        f"shards={shards_for(ranks)} to a new run; a run keeps its shards",
        "device": resolve_device(config.device).type != "cpu" and "on CPUs alone yet. Give device='cpu'",
        "average_every": config.average_every is not None and bool(no_average)
        and "not with average_every and tensor trains or tables that grow. Leave one out",
        "epoch_lookahead": config.epoch_lookahead and "without epoch_lookahead. Leave it out",
        "home_path": url_of(config.home_path) is not None and "with rows in memory or in files, not at a URL",
    }  # fmt: skip
    for name, why in reasons.items():
        if why:
            raise ConfigError(f"{ranks} ranks train together: {why}.", settings=(name,))


def _check_same(ranks: Ranks, own: Mapping[str, Any]) -> None:
    """Raise ConfigError if a value differs between ranks."""
    sent = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    first, *others = (json.loads(each.numpy().tobytes()) for each in ranks.gather("compare settings", sent))
    for rank, found in enumerate(others, 1):
        if differ := [name for name, value in first.items() if found[name] != value]:
            raise ConfigError(
                f"{differ[0]} is {first[differ[0]]!r} on rank 0, but {found[differ[0]]!r} on rank {rank}. Start all "
                "ranks with the same command, versions, data, kind of machine and environment (MKL_*, ONEDNN_*)."
            )
