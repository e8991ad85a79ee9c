"""The state of a module and of its optimizers as tensors and JSON values: everything in a checkpoint but the rows."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from stoker.base.errors import CheckpointError
from stoker.optim import RowOptimizer
from stoker.tables import EmbeddingTables, Ranks, TTEmbeddingBag

#: What :func:`stoker.save` takes as optimizers of the dense parameters.
Optimizers: TypeAlias = (
    "torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | Sequence[torch.optim.Optimizer] | None"
)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside ``DistributedDataParallel`` and ``torch.compile``, which put a prefix before names."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def plain_name(name: str) -> str:
    """Return a name without the prefixes of ``torch.compile``."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def tables_in(module: nn.Module) -> dict[str, EmbeddingTables]:
    """Return all tables by their name in ``module``; shared tables have the first of their names."""
    return {name: each for name, each in trained_in(module).items() if isinstance(each, EmbeddingTables)}


def trained_in(module: nn.Module) -> dict[str, EmbeddingTables | TTEmbeddingBag]:
    """Return all submodules with a row optimizer and a count of updates, by name."""
    return {
        plain_name(name): each
        for name, each in module.named_modules()
        if isinstance(each, EmbeddingTables | TTEmbeddingBag)
    }


def ranks_of(module: nn.Module) -> Ranks | None:
    """Return the ranks among which rows of ``module`` are divided; None: each process has all rows."""
    return next((tables.ranks for tables in tables_in(module).values() if tables.divided), None)


def device_of(module: nn.Module) -> torch.device:
    """Return the GPU of ``module``, or the CPU if it uses none."""
    devices = [tables.device for tables in tables_in(module).values()]
    devices += [tensor.device for tensor in (*module.parameters(), *module.buffers())]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


@contextmanager
def _without_rows(module: nn.Module) -> Iterator[None]:
    """Let ``state_dict`` and ``load_state_dict`` skip rows, which may not fit in memory."""
    changed = ("_save_to_state_dict", "_load_from_state_dict")
    found = tables_in(module)
    for name, tables in found.items():
        if any(getattr(type(tables), each) is not getattr(EmbeddingTables, each) for each in changed):
            raise CheckpointError(
                f"{name!r} is a {type(tables).__name__}, which overrides _save_to_state_dict or _load_from_state_dict, "
                "so its rows cannot be skipped. Keep other state in buffers, or in get_extra_state."
            )
    with ExitStack() as undone:
        for tables in found.values():
            for each in changed:
                tables.__dict__[each] = partial(getattr(nn.Module, each), tables)
                undone.callback(tables.__dict__.pop, each)
        yield


def dense_state(module: nn.Module) -> dict[str, Any]:
    """Return ``module.state_dict()`` without rows of tables: parameters, persistent buffers and extra state."""
    handles = {id(each.handle) for each in trained_in(module).values() if hasattr(each, "handle")}
    with _without_rows(module):
        state = module.state_dict(keep_vars=True)
    return {plain_name(name): value for name, value in state.items() if id(value) not in handles}


def load_dense_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the result of :func:`dense_state` into ``module``; the caller has compared the names."""
    with _without_rows(module):
        mine = module.state_dict(keep_vars=True)  # also handles of rows, which keep their value
        try:
            module.load_state_dict({name: state.get(plain_name(name), value) for name, value in mine.items()})
        except RuntimeError as error:
            raise CheckpointError(f"{type(module).__name__} refuses the saved values: {error}") from error


def encode(where: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` for JSON, and add its tensors to ``tensors``. Plain JSON values do not change.

    Args:
        where: name of the value, for messages.
        value: of None, bool, int, float, str, list, tuple, dict, ``collections.Counter`` and tensors.
        tensors: gets the tensors, each under a new name.

    >>> encode("state", {"lr": 0.1, "betas": (0.9, 0.99)}, {})
    {'$dict': [['lr', 0.1], ['betas', {'$tuple': [0.9, 0.99]}]]}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and type(value).__module__ != "numpy":
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise CheckpointError(f"{where} is a tensor with layout {value.layout}. Save value.to_dense() instead.")
        name = f"value.{len(tensors):05d}"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, list):
        return [encode(f"{where}[{place}]", each, tensors) for place, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(f"{where}[{place}]", each, tensors) for place, each in enumerate(value)]}
    if isinstance(value, dict):
        simple = not isinstance(value, Counter) and all(isinstance(key, str) and key[:1] != "$" for key in value)
        if simple and sorted(value) == list(value):  # the manifest sorts keys, so it would lose another order
            return {key: encode(f"{where}[{key!r}]", each, tensors) for key, each in value.items()}
        pairs = [
            [encode(f"a key of {where}", key, tensors), encode(f"{where}[{key!r}]", each, tensors)]
            for key, each in value.items()
        ]
        return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
    kind = type(value)
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: it holds tensors, JSON "
        "values, tuples, and objects whose state_dict() is made of these. Save a tensor or a number instead "
        "(torch.from_numpy, .item()), or leave it out."
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Invert :func:`encode`."""
    if isinstance(value, list):
        return [decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    kind, inner = next(iter(value.items()), ("", None))
    match kind:
        case "$float":
            return float(str(inner))
        case "$tensor":
            return tensors[str(inner)]
        case "$tuple":
            return tuple(decode(inner, tensors))
        case "$dict" | "$counter":
            pairs = dict(decode(inner, tensors))
            return Counter(pairs) if kind == "$counter" else pairs
    return {key: decode(each, tensors) for key, each in value.items()}


def named_optimizers(optimizer: Optimizers) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by name: a single one as "optimizer", those of a list by their position."""
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        named = {str(name): each for name, each in optimizer.items()}
    elif isinstance(optimizer, Sequence):
        named = {str(place): each for place, each in enumerate(optimizer)}
    else:
        named = {"optimizer": optimizer}
    for name, each in named.items():
        if isinstance(given := cast(object, each), RowOptimizer):
            raise CheckpointError(
                f"optimizer {name!r} is the row optimizer {given.kind!r}, whose state is saved with the rows. Give the "
                "torch.optim optimizers of the dense parameters only."
            )
        if not isinstance(given, torch.optim.Optimizer):
            raise CheckpointError(
                f"optimizer {name!r} is a {type(given).__name__}, not a torch.optim.Optimizer. Give other objects with "
                "a state_dict(), such as schedulers and GradScaler, in extra_state."
            )
    return named


def optimizer_values(
    optimizer: torch.optim.Optimizer, prefix: str, tensors: dict[str, Tensor], module: nn.Module | None = None
) -> dict[str, Any]:
    """Return the state of an optimizer but its tensors; add those to ``tensors``, with names after ``prefix``.

    The result also has the names of the parameters in ``module``; None: format 1, which has no names.
    """
    whole = optimizer.state_dict()
    values: dict[str, Any] = {"kind": type(optimizer).__name__, "param_groups": whole["param_groups"], "state": {}}
    for index, entries in whole["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}.{index}.{name}"] = value
            else:
                values["state"].setdefault(str(index), {})[name] = encode(
                    f"state {name!r} of the optimizer", value, tensors
                )
    if module is None:
        plain: dict[str, Any] = json.loads(json.dumps(values, default=_plain))
        return plain
    values["param_groups"] = [
        {key: encode(f"setting {key!r} of the optimizer", value, tensors) for key, value in group.items()}
        for group in values["param_groups"]
    ]
    return {**values, "parameters": _parameter_names(optimizer, module)}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise CheckpointError(f"the dense optimizer has a setting of type {type(value).__name__}, which cannot be saved.")


def _parameter_names(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[list[str | None]]:
    """Return the names of an optimizer's parameters, by group; None for a parameter that is not in ``module``."""
    names = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]


def check_optimizer(what: str, values: Mapping[str, Any], optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Check that an optimizer is like the saved one; ``what`` names the saved state in messages."""
    if values["kind"] != type(optimizer).__name__:
        raise CheckpointError(f"{what} is of {values['kind']!r}, not {type(optimizer).__name__!r}.")
    sizes = [len(group["params"]) for group in values["param_groups"]]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != mine:
        raise CheckpointError(
            f"{what} has groups of {sizes} parameters, but the optimizer given has groups of {mine}. Make it as it was "
            "made when it was saved."
        )
    both = values.get("parameters", []), _parameter_names(optimizer, module)  # format 1 has no names
    pairs = enumerate(zip(*map(chain.from_iterable, both), strict=False))
    if differing := next(((place, pair) for place, pair in pairs if pair[0] != pair[1]), None):
        place, (saved, given) = differing
        raise CheckpointError(
            f"{what} has {saved!r} as parameter {place}, but the optimizer given has {given!r} there and would get the "
            "state of the other. Give it its parameters in the order in which they were saved."
        )


def load_optimizer(
    values: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Load the result of :func:`optimizer_values` into an optimizer, after :func:`check_optimizer`."""
    state: dict[int, dict[str, Any]] = {
        int(index): {name: decode(value, tensors) for name, value in entries.items()}
        for index, entries in values["state"].items()
    }
    for name in sorted(name for name in tensors if name.startswith(f"{prefix}.")):
        index, key = name.removeprefix(f"{prefix}.").split(".", 1)
        state.setdefault(int(index), {})[key] = tensors[name]
    groups = [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()}
        for group in decode(values["param_groups"], tensors)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
