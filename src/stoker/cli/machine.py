"""What ``stoker doctor`` finds out. Every probe is guarded: a broken package is a finding, not a crash.

It needs neither Rich nor Typer, so it also works without them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

from stoker.base import device as machine
from stoker.base.errors import install
from stoker.base.units import format_count, format_size

# Package -> what is lost without it; without the first three nothing works.
_PACKAGES = {
    "torch": "",
    "numpy": "",
    "safetensors": "",
    "numba": "fast CPU kernels (training falls back to plain PyTorch)",
    "triton": "GPU kernels",
    "polars": "stoker prepare",
    "pyarrow": "stoker prepare and stoker predict",
    "typer": "the command line",
    "rich": "the command line",
}
# What extras install -> what it is for.
_EXTRAS = {
    "tensorboard": "TensorBoard events", "yaml": "schemas in YAML", "zstandard": ".zst files", "matplotlib": "pictures",
    "fsspec": "files at URLs", "networkit": "reordering by communities", "prometheus_client": "scores over HTTP",
    "usearch": "approximate retrieval", "confluent_kafka": "logs from Kafka",
}  # fmt: skip
# The model of the trial: Criteo's columns, with tables beyond the caches of a processor.
_TRIAL_TABLES, _TRIAL_ROWS, _TRIAL_DIM, _TRIAL_BATCH = 26, 100_000, 16, 2048
_TRIAL_ROW = 4 * (_TRIAL_DIM + 1)  # bytes, with the state of row-wise Adagrad
_KERNELS = {"cpu": "Numba kernels for the CPU", "triton": "Triton kernels for the GPU"}


def examine(*, measure: bool = True) -> dict[str, Any]:
    """Return what matters for training on this machine, as plain JSON values.

    Returns:
        ``verdict`` (sentences with "; " between them), ``ok`` (training can run), ``problems`` (what prevents it) and
        ``advice`` (what would help), each with its remedy, and the findings by topic.
    """
    packages = {name: _version(name) for name in (*_PACKAGES, *_EXTRAS)}
    gpus, compiler, folder, problems, advice = _gpus(), _compiler(), _folder(), [], []
    for name, use in _PACKAGES.items():
        if packages[name] is None and not use:
            problems.append(f"{name} is missing. Install it with: pip install {name}")
        elif packages[name] is None and (name != "triton" or gpus):
            advice.append(f"{name} is missing, it is needed for {use}: pip install {name}")
    if packages["numba"] is not None:
        try:
            importlib.import_module("numba")
        except Exception as error:  # whatever a broken installation raises
            words = f"{type(error).__name__}: {error}"
            advice.append(f"numba is installed but does not load ({words}): pip install --upgrade numba")
    backends = {kind: _backend(kind) for kind in ("cpu", *(["cuda"] if gpus else []))}
    problems += [entry["error"] for entry in backends.values() if "error" in entry]
    if not compiler["usable"]:
        advice.append(f"torch.compile on the CPU will not work: {compiler['why']}")
    if not folder["writable"]:
        problems.append(f"the current directory {folder['path']} is not writable. Change to one that is.")
    trial = _trial("cuda" if gpus else "cpu") if measure and not problems else None
    found = {
        "ok": not problems,
        "problems": problems,
        "advice": advice,
        "system": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cpu": machine.cpu_model(),
            "cores": machine.cpu_count(),
            "simd": list(machine.simd_flags()),
            "memory": machine.total_memory(),
            "memory_available": machine.available_memory(),
            "huge_pages": machine.huge_pages(),
            "folder": folder,
        },
        "gpus": gpus,
        "packages": packages,
        "extras": {use: install(name) for name, use in _EXTRAS.items() if packages[name] is None},
        "backends": backends,
        "kernel_cache": _kernel_cache() if packages["numba"] is not None else None,
        "compiler": compiler,
        "threads": {
            "torch": torch.get_num_threads(),
            **{name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")},
        },
        "bandwidth": _bandwidth() if measure else None,
        "trial": trial,
    }
    return found | {"verdict": _verdict(found)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version("pyyaml" if name == "yaml" else name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    found = []
    try:
        for index in range(torch.cuda.device_count()):
            gpu, (free, total) = torch.cuda.get_device_properties(index), machine.device_memory(f"cuda:{index}")
            capability = f"{gpu.major}.{gpu.minor}"
            found.append({"name": gpu.name, "memory": total, "memory_free": free, "capability": capability})
    except RuntimeError as error:
        found.append({"name": f"unusable: {error}", "memory": 0, "memory_free": 0, "capability": ""})
    return found


def _backend(kind: str) -> dict[str, Any]:
    """Which kernels tables on this kind of device get, tried on one small lookup."""
    try:
        from stoker.ops import get_backend

        name = get_backend("auto", torch.device(kind)).name
    except Exception as error:
        return {"name": None, "why": "", "error": f"no embedding kernels for {kind}: {type(error).__name__}: {error}"}
    plain = f"plain PyTorch, since {'triton' if kind == 'cuda' else 'numba'} is not installed"
    return {"name": name, "why": plain if name == "reference" else _KERNELS.get(name, "")}


def _kernel_cache() -> dict[str, str | None]:
    """Which directory keeps the kernels that Numba compiles, and why this one."""
    try:
        from stoker.ops.codegen.jit import TEMPORARY, cache_directory

        path = cache_directory()
    except Exception as error:  # whatever a broken installation raises
        return {"path": None, "why": f"{type(error).__name__}: {error}"}
    if path is None:
        why = "no directory can be written, so every process compiles its own kernels. Set NUMBA_CACHE_DIR"
    elif os.environ.get("NUMBA_CACHE_DIR") and path.is_relative_to(os.environ["NUMBA_CACHE_DIR"]):
        why = "as NUMBA_CACHE_DIR says"
    elif path.parent.name.startswith(TEMPORARY):
        why = "in the temporary directory, as neither the package nor the home directory can be written"
    elif path.name == "__pycache__":
        why = "next to the package"
    else:
        why = "in the user's cache directory, as the package's cannot be written"
    return {"path": None if path is None else str(path), "why": why}


def _compiler() -> dict[str, Any]:
    """Whether TorchInductor can build CPU code: it needs a C++ compiler and Python's headers."""
    wanted = [os.environ.get("CXX"), "g++", "clang++", "c++", *(["cl"] if sys.platform == "win32" else [])]
    path = next((found for name in wanted if name and (found := shutil.which(name))), None)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if path is None:
        why = "no C++ compiler. On Debian or Ubuntu: apt install g++"
    elif not header.is_file():
        why = f"Python's headers are missing ({header}). On Debian or Ubuntu: apt install python3-dev"
    else:
        why = ""
    return {"path": path, "usable": not why, "why": why}


def _folder() -> dict[str, Any]:
    path = Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=path):
            writable = True
    except OSError:
        writable = False
    return {"path": str(path), "free": shutil.disk_usage(path).free, "writable": writable}


def _bandwidth() -> dict[str, Any]:
    """Streaming copy and random gather of 64-byte rows, in bytes per second, about half a second each."""
    available = machine.available_memory() or 2**30
    rows = min(2**22, available // 8 // 64)  # 256 MiB, beyond any cache, but never a burden
    table = torch.zeros(rows, 16)
    copy = torch.zeros_like(table)
    index = torch.randint(rows, (2**18,))
    out = torch.empty(len(index), 16)
    return {
        "buffer": format_size(table.nbytes),
        "copy": machine.rate("copies", lambda: copy.copy_(table), 2 * table.nbytes),
        "gather_64_byte_rows": machine.rate("reads", lambda: torch.index_select(table, 0, index, out=out), out.nbytes),
    }


def _trial(device: str) -> dict[str, Any]:
    """Train a DLRM with tables like those of a click log for a second, and plan it with a tenth of its rows.

    Returns:
        Its rate with all rows on the device, the share of its rows in a step, and the seconds of the parts of a step
        with a tenth of the rows in fast memory, with the one that bounds it.
    """
    from stoker.dataset.batch import Batch
    from stoker.dataset.spec import FeatureSpec
    from stoker.models.dlrm import DLRM
    from stoker.optim.rows import RowWiseAdagrad
    from stoker.placement.planner import plan
    from stoker.training.step_time import StepTime

    spec, optimizer = FeatureSpec.from_sizes(num_dense=13, num_embeddings=[_TRIAL_ROWS] * _TRIAL_TABLES), RowWiseAdagrad
    model = DLRM(spec, embedding_dim=_TRIAL_DIM, optimizer=optimizer(lr=0.02), device=device)
    ids = torch.randint(_TRIAL_ROWS, (_TRIAL_BATCH, _TRIAL_TABLES), device=device)
    labels = torch.randint(2, (_TRIAL_BATCH,), device=device).float()
    batch = Batch(dense=torch.rand(_TRIAL_BATCH, 13, device=device), ids=ids, labels=labels)

    def rows() -> None:
        found = model.embeddings(batch.ids)
        found.backward(torch.ones_like(found))

    def step() -> None:
        model.loss(batch).backward()
        if device == "cuda":
            torch.cuda.synchronize()

    steps, own = machine.rate("steps", step, 1, 0.8), machine.rate("rows of a step", rows, 1)
    # Counts as in click logs, of 500 batches.
    weights = torch.arange(1, _TRIAL_ROWS + 1, dtype=torch.float64) ** -1.05
    counts = (weights * (500 * _TRIAL_BATCH / weights.sum())).long().clamp_(min=1)
    placement = plan(
        model, {table.name: counts for table in model.tables}, device=device, batch_size=_TRIAL_BATCH,
        device_memory=_TRIAL_TABLES * _TRIAL_ROWS * _TRIAL_ROW // 10,
    )  # fmt: skip
    seconds = StepTime(read=0.0, train=1 / steps, slotted=1 / steps)
    return {
        "samples_per_second": steps * _TRIAL_BATCH, "share_of_rows": min(1.0, steps / own),
        "placed_seconds": seconds.parts(placement), "bound": seconds.bound(placement),
    }  # fmt: skip


def _verdict(found: dict[str, Any]) -> str:
    """Say in one sentence what this machine can train, how fast, and what limits it."""
    if not found["ok"]:
        return f"this machine cannot train yet: {found['problems'][0]}"
    system = found["system"]
    memory, disk = int(0.8 * (system["memory_available"] or 0)), int(0.9 * system["folder"]["free"])
    places = [f"{format_size(memory)} of rows in memory ({format_count(memory / _TRIAL_ROW)} of dim {_TRIAL_DIM})"]
    if disk > memory and system["folder"]["writable"]:
        places.append(f"{format_size(disk)} in files on this disk")
    gpus = [gpu for gpu in found["gpus"] if gpu["memory"]]
    if gpus:
        places.insert(0, f"{format_size(int(0.8 * gpus[0]['memory_free']))} of rows on its GPU")
    said = f"this machine can train models with {' or '.join(places)}"
    if (trial := found["trial"]) is None:
        return said
    of_rows = trial["share_of_rows"]
    limit = f"its rows take {of_rows:.0%}" if of_rows > 0.5 else f"its dense layers take {1 - of_rows:.0%}"
    rate, parts = format_count(trial["samples_per_second"]), trial["placed_seconds"]
    each = [f"{1000 * parts[name]:.1f} ms for {name}" for name in ("the model", "planning", "moving rows")]
    return (
        f"{said}; a DLRM with {_TRIAL_TABLES} tables of dim {_TRIAL_DIM} trains on {rate} samples/s at batch "
        f"{_TRIAL_BATCH:,}, and {limit} of a step; with a tenth of its rows in fast memory a step takes "
        f"{each[0]}, {each[1]} and {each[2]}, so the limit is {trial['bound']}"
    )
