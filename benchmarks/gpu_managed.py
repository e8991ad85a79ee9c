"""Rows in CUDA managed memory that the GPU reads over the link, as TorchRec's tables in unified memory are.

The rows get the advice that FBGEMM gives (its ``new_managed_tensor``): they prefer the host and the GPU maps them, so
none migrates. Kernels, model and batches are those of the other placements; only the address of the rows differs.
"""

from __future__ import annotations

import ctypes
import statistics

import torch
from torch import Tensor

from benchmarks.gpu_dlrm import Contest, Measured, Workload, ratio, release, same_rows
from benchmarks.gpu_tools import Clock, Setting, device_view, synchronize
from benchmarks.harness import NotRun, Outcome, Table
from stoker import DLRM

__all__ = ["ManagedMemory", "measure"]

BASE, MANAGED = "all in device memory", "managed memory"
#: from cuda.h
ATTACH_GLOBAL, PREFERRED_LOCATION, ACCESSED_BY, CPU = 1, 3, 5, -1
CONCURRENT_MANAGED_ACCESS = 89


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NotRun(f"managed memory: the CUDA driver's library cannot be loaded ({error})") from error


def _call(name: str, *arguments: object) -> None:
    """A function of the CUDA driver; the context is the one torch made current."""
    driver = _driver()
    function = getattr(driver, name, None)
    if function is None:
        raise NotRun(f"managed memory: this CUDA driver has no {name}")
    code = function(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        raise NotRun(f"managed memory: {name} failed with {(text.value or b'?').decode()} ({code})")


class ManagedMemory:
    """Managed memory on the host's side, readable by the GPU in place, until :meth:`free`.

    Raises:
        NotRun: the driver does not give it, or it is more than the GPU has free: were it to migrate, the GPU could
            thrash or hang.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device
        synchronize(device)
        torch.cuda.empty_cache()  # what torch only holds back counts as free
        free = torch.cuda.mem_get_info(device)[0]
        if nbytes > 0.9 * free:
            raise NotRun(f"{nbytes / 1e9:.1f} GB of managed memory are more than 90 % of the {free / 1e9:.1f} GB free")
        index, able, pointer = torch.cuda.current_device(), ctypes.c_int(), ctypes.c_uint64()
        _call("cuDeviceGetAttribute", ctypes.byref(able), CONCURRENT_MANAGED_ACCESS, index)
        if not able.value:
            raise NotRun("managed memory: this GPU cannot use it at the same time as the processor")
        _call("cuMemAllocManaged", ctypes.byref(pointer), ctypes.c_size_t(nbytes), ATTACH_GLOBAL)
        self.address = int(pointer.value)
        try:
            where = ctypes.c_uint64(self.address), ctypes.c_size_t(nbytes)
            _call("cuMemAdvise", *where, PREFERRED_LOCATION, CPU)
            _call("cuMemAdvise", *where, ACCESSED_BY, index)
        except NotRun:
            self.free()
            raise

    def tensor(self, shape: torch.Size) -> Tensor:
        """All of the memory as float32."""
        return device_view(self.address, shape, self, self.device)

    def free(self) -> None:
        """Give it back; no kernel may still use it."""
        if self.address:
            synchronize(self.device)
            _call("cuMemFree_v2", ctypes.c_uint64(self.address))
            self.address = 0


def move_to_managed(model: DLRM, device: torch.device) -> list[ManagedMemory]:
    """Rows and state of a model whose rows lie on the device move to managed memory, which is returned."""
    held: list[ManagedMemory] = []

    def moved(tensor: Tensor) -> Tensor:
        held.append(ManagedMemory(tensor.nbytes, device))
        there = held[-1].tensor(tensor.shape)
        there.copy_(tensor)
        return there

    try:
        for group in model.embeddings.groups:
            group.storage.weight = moved(group.storage.weight)
            group.storage.state = {name: moved(tensor) for name, tensor in group.storage.state.items()}
    except NotRun:
        for memory in held:
            memory.free()
        raise
    return held


def measure(setting: Setting) -> Outcome:
    """The value is the smallest throughput of managed rows over rows in device memory.

    Raises:
        NotRun: no GPU, or no managed memory.
        WrongResult: losses or rows differ.
    """
    device = setting.device
    if device.type != "cuda":
        raise NotRun("managed memory needs a CUDA device")
    clock = Clock(setting.pick(full=120.0, quick=20.0, tiny=20.0))
    workload = Workload.make(setting)
    models = {BASE: workload.model()}
    held: list[ManagedMemory] = []
    try:
        models[MANAGED] = workload.model()
        held = move_to_managed(models[MANAGED], device)
        torch.cuda.empty_cache()
        return _compare(workload, models, clock)
    finally:
        release(models)
        for memory in held:
            memory.free()


def _compare(workload: Workload, models: dict[str, DLRM], clock: Clock) -> Outcome:
    contest = Contest(workload, models, clock)
    contest.warm(list(workload.hot(sum(workload.sizes) // 20)))
    cases: dict[int, dict[str, list[Measured]]] = {}
    for number, examples in enumerate(workload.batches):
        share = 0.4 + 0.6 * (number + 1) / len(workload.batches)
        cases[examples] = contest.rounds(examples, workload.setting.pick(full=3, quick=2, tiny=2), share)
    compared = same_rows(models, workload.batch(0, workload.batches[-1]))
    rows, speeds, ratios = [], {}, {}
    for examples, found in cases.items():
        speed = {n: examples / statistics.median(r.seconds for r in results) for n, results in found.items()}
        speeds[str(examples)], ratios[str(examples)] = speed, ratio(found[BASE], found[MANAGED])
        median, low, high = ratios[str(examples)]
        cells = [f"{speed[name]:,.0f}" for name in (BASE, MANAGED)]
        rows.append([f"batch {examples}", *cells, f"{median:.3f}x", f"{low:.3f} to {high:.3f}"])
    table = Table(
        title=f"Managed memory: {workload.title}",
        columns=["case", "device: samples/s", "managed: samples/s", "ratio", "range"],
        rows=rows,
    )
    return Outcome(
        value=min(median for median, _, _ in ratios.values()),
        tables=[table],
        notes=[
            f"equal to the bit: the losses of all steps, and {compared:,} rows with their state at the end",
            "rows and state prefer the host and are mapped by the GPU, as FBGEMM advises for tables in managed memory",
        ],
        data={"samples_per_second": speeds, "ratios": ratios},
    )
