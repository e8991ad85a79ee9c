"""Devices, memory and cores of this machine. A probe returns None if it cannot know."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from stoker.base.errors import ConfigError
from stoker.base.progress import Counted

if TYPE_CHECKING:
    import torch

_FEW_THREADS = 16  # allowed on any machine
_keeps = False  # whether glibc keeps freed memory now

_CGROUP = Path("/sys/fs/cgroup")
_GROUPS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_SIMD = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "bf16"),
    *("asimd", "sve"),
)


def resolve_device(name: str | torch.device | None = None) -> torch.device:
    """Return the device to train on: ``name``, or for None and ``"auto"`` the first GPU, else the CPU."""
    import torch

    if name is None or name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown. Use auto, cpu, cuda or cuda:0.") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device {name!s} was asked for, but torch {torch.__version__} sees no GPU here. "
                "Use --device cpu, or install a CUDA build of torch; stoker doctor shows more."
            )
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"device {name!s} was asked for, but this machine has {count} GPUs, counted from 0.")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ConfigError(f"device {name!s} is not supported. Use auto, cpu, cuda or cuda:0.")
    return device


def device_memory(device: torch.device | str) -> tuple[int, int]:
    """Return the (free, total) bytes of a device's memory; of main memory for the CPU."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    return available_memory() or 0, total_memory() or 0


def cpu_count() -> int:
    """Return the cores this process may use, by its affinity and the quota of a container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min((cores, *_quotas())))


def check_threads(threads: int | None) -> int:
    """Return the number of threads to use; None: one per core."""
    cores = cpu_count()
    most = max(4 * cores, _FEW_THREADS)
    if threads is not None and not 1 <= threads <= most:
        raise ConfigError(
            f"threads: {threads:,} is outside 1 to {most}. This process may use {cores} cores; leave threads out to "
            "use one per core.",
            settings=("threads",),
        )
    return threads or cores


def contending(seconds: float = 0.1) -> float:
    """Return how many cores other programs use, if they leave fewer than this process may use; else 0."""
    before = _worked()
    time.sleep(seconds)
    return contended((_worked() - before) / (100 * seconds))


def contended(others: float) -> float:
    """Return ``others``, cores that other programs use, if they leave fewer than this process may use; else 0."""
    return others if others > 0.5 and others + cpu_count() > (os.cpu_count() or 1) else 0.0


def worked_for_others() -> float:
    """Return the seconds that cores have worked for other processes; only differences count."""
    return _worked() / 100 - time.process_time()


def _worked() -> int:
    """Return how long all cores have worked since the machine started, in hundredths of a second."""
    ticks = [int(each) for each in (_read(Path("/proc/stat")) or "").split()[1:9]]
    return sum(ticks) - sum(ticks[3:5])  # idle, and waiting for a disk


def _quotas() -> Iterator[int]:
    """Yield the whole cores in the quota of this process's control group, and of each group above it."""
    for line in (_read(_GROUPS) or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        group = PurePosixPath(path)
        for one in (group, *group.parents):
            if not controllers:  # version 2
                values = (_read(_CGROUP / str(one).lstrip("/") / "cpu.max") or "").split()
            elif "cpu" in controllers.split(","):
                folder = _CGROUP / "cpu" / str(one).lstrip("/")
                values = [(_read(folder / f"cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")]
            else:
                continue
            if len(values) == 2 and all(value.isdigit() and int(value) for value in values):  # not "max", not -1
                yield int(values[0]) // int(values[1])


def total_memory() -> int | None:
    """Return the bytes of main memory, or of the container's share."""
    return _least(_field(_MEMINFO, "MemTotal") or _sysconf("SC_PHYS_PAGES"), _number(_CGROUP / "memory.max"))


def available_memory() -> int | None:
    """Return the bytes that can still be taken without swapping."""
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    counts = dict(line.split() for line in (_read(_CGROUP / "memory.stat") or "").splitlines())
    idle = int(counts.get("inactive_file", 0))  # page cache, which is freed on demand
    rest = None if limit is None or used is None else max(0, limit - used + idle)
    return _least(_field(_MEMINFO, "MemAvailable") or _sysconf("SC_AVPHYS_PAGES"), rest)


def resident_memory() -> int | None:
    """Return the bytes of resident memory of this process, without mapped files."""
    return _field(Path("/proc/self/status"), "RssAnon")


def peak_memory() -> int | None:
    """Return the bytes of the largest resident set of this program so far, mapped files included."""
    # ``ru_maxrss`` survives exec: a small program that a large one started would report the large one's peak.
    if (peak := _field(Path("/proc/self/status"), "VmHWM")) is not None:
        return peak
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_model() -> str:
    """Return the processor's name."""
    return _cpuinfo("model name", "Model") or platform.processor() or platform.machine()


def simd_flags() -> tuple[str, ...]:
    """Return the vector instruction sets that matter here, such as ``avx2``; empty if the system does not say."""
    flags = _cpuinfo("flags", "Features").split()
    return tuple(name for name in _SIMD if name in flags)


def _cpuinfo(*names: str) -> str:
    """Return Linux's entry under one of these names for the first processor; empty if there is none."""
    lines = (_read(Path("/proc/cpuinfo")) or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def has_bf16_products() -> bool:
    """Return True if the processor multiplies bfloat16; if not, bfloat16 is slower than float32."""
    flags = simd_flags()
    return not flags or any(name in flags for name in ("avx512_bf16", "amx_bf16", "bf16"))


def huge_pages() -> str | None:
    """Return the transparent huge page setting: always, madvise or never."""
    text = _read(Path("/sys/kernel/mm/transparent_hugepage/enabled")) or ""
    return text.partition("[")[2].partition("]")[0] or None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int | None:
    for line in (_read(path) or "").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _sysconf(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def give_back_memory() -> None:
    """Ask glibc to return freed memory to the kernel; elsewhere do nothing.

    Call it between two stages that need memory for different things: it halved the peak of a preparation.
    """
    if trim := _libc("malloc_trim"):
        trim(0)


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed blocks of up to 256 MiB for the next allocation; return True if it agreed.

    By default it returns large blocks to the kernel at every free, and the next step pays for fresh, zeroed
    pages: a tenth to a third of a training step on the CPU. The process then keeps its highest use of such blocks.
    On systems without glibc this does nothing.
    """
    global _keeps
    _keeps = _set_limits(2**28, 2**30, 2**26)
    return _keeps


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep what your loop frees for its next step, instead of giving it back to the kernel (Linux with glibc).

    Fresh pages cost a tenth to a third of a training step on the CPU. :func:`stoker.train` does this by itself. The
    process keeps its highest use until the block ends, or until the process ends if memory was kept before.

    Example:
        >>> import stoker
        >>> with stoker.kept_memory():
        ...     pass  # for batch in batches: loss.backward() ...

    """
    before = _keeps
    keep_freed_memory()
    try:
        yield
    finally:
        if not before:
            return_freed_memory()


def return_freed_memory() -> None:
    """Undo :func:`keep_freed_memory`: large blocks go back to the kernel again as they are freed.

    Limits that the environment sets (``MALLOC_MMAP_THRESHOLD_`` and so on) are set again. glibc no longer adapts the
    others: a block of 4 MiB and more is mapped by itself, and 8 MiB and more of free memory are returned.

    For work whose stages need memory for different things: a preparation after a training in one process took 0.9 GiB
    more, at a peak of 2.2 GiB.
    """
    global _keeps
    if _keeps:
        limits = (("MMAP_THRESHOLD", 2**22), ("TRIM_THRESHOLD", 2**23), ("TOP_PAD", 2**17))
        _keeps = not _set_limits(*(_malloc_limit(name, default) for name, default in limits))


def _malloc_limit(name: str, default: int) -> int:
    """Return this limit of glibc's allocator in bytes, from the environment, or ``default``."""
    tunables = dict(entry.partition("=")[::2] for entry in os.environ.get("GLIBC_TUNABLES", "").split(":"))
    try:
        return int(os.environ.get(f"MALLOC_{name}_") or tunables[f"glibc.malloc.{name.lower()}"], 0)
    except (KeyError, ValueError):
        return default


def _set_limits(map_above: int, trim_above: int, top: int) -> bool:
    """Set three limits of the C library in bytes; return True if it did.

    Larger blocks than the first are mapped separately; more free memory than the second is returned; the third is
    allocated in advance.
    """
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2  # malloc.h
    given = ((mmap_threshold, map_above), (trim_threshold, trim_above), (top_pad, top))
    mallopt = _libc("mallopt")
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in given)


def _libc(name: str) -> Any:
    """Return a function of the C library; None if it has no such function."""
    import ctypes

    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None


def rate(what: str, work: Any, amount: float, seconds: float = 0.4) -> float:
    """Return the best rate of ``work``, which does ``amount``, within some seconds; ``what`` is shown as progress."""
    with Counted(f"measuring {what}", 1, ""):
        work()
        best, end = float("inf"), time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            work()
            best = min(best, time.perf_counter() - start)
    return amount / best
