"""A pretended GPU: tensors that say they are on ``cuda:0`` and are on the CPU, and a count of launches and waits.

Operations are counted as a GPU would run them: views and new memory are free, a copy between host and device is not a
launch, anything else is one kernel, but for those of :data:`KERNELS`. The host waits where it must know a value that
the device computes, or copies from or to memory that is not page-locked. Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CUDA", "Pretended", "pretend"]

CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten
#: Operations after which the host knows a value or a size that the device has computed.
READ = {
    _aten.nonzero, _aten.masked_select, _aten._unique2, _aten.unique_consecutive, _aten.unique_dim, _aten.bincount,
    _aten._local_scalar_dense, _aten.equal, _aten.is_nonzero,
}  # fmt: skip
#: Kernels of operations that have not one: a stable sort of int32 makes positions and histograms, and passes over 8
#: bits at a time; a cumulative sum prepares its tiles first.
KERNELS = {_aten.sort: 7, _aten.cumsum: 2}
FREE = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.detach,
    _aten._unsafe_view, _aten.resize_, _aten.record_stream, _aten.lift_fresh, _aten._reshape_alias, _aten.set_,
    _aten._local_scalar_dense,
}  # fmt: skip


class OnDevice(torch.Tensor):
    """A tensor on the device; ``inner`` has its values."""

    inner: torch.Tensor
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(  # for autograd it is on the CPU, which has one queue
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
        )  # fmt: skip
        made.inner = inner
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})[0]

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        given = [*args, *kwargs.values()]
        target = next((torch.device(each) for each in given if isinstance(each, str | torch.device)), CUDA)
        dtype = next((each for each in given if isinstance(each, torch.dtype)), self.dtype)
        if target.type == "cpu":
            return Pretended.now.download(self).to(dtype)
        return self if dtype == self.dtype else super().to(dtype)

    def cpu(self, *_: Any) -> torch.Tensor:  # type: ignore[override]
        return self.to("cpu")

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def record_stream(self, stream: Any) -> None:
        return


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Run an operation on the CPU; return its result, and whether it is one of the device."""
    leaves = pytree.tree_leaves((args, kwargs))
    device = kwargs.get("device")
    there = any(isinstance(each, OnDevice) for each in leaves)
    if device is not None and (not there or func._overloadpacket is _aten._to_copy):  # autograd names its own, the CPU
        there = torch.device(device) == CUDA
    if func._overloadpacket is _aten.copy_:
        there = isinstance(args[0], OnDevice)
    outs = {id(each.inner): each for each in leaves if isinstance(each, OnDevice)}

    def inner(value: Any) -> Any:
        if isinstance(value, OnDevice):
            return value.inner
        return torch.device("cpu") if isinstance(value, torch.device) else value

    given = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "non_blocking")}
    found = func(*pytree.tree_map(inner, args), **pytree.tree_map(inner, given))
    if there:
        found = pytree.tree_map_only(
            torch.Tensor, lambda each: outs[id(each)] if id(each) in outs else OnDevice(each), found
        )
    return found, there


class Pretended(TorchDispatchMode):
    """The device, and what it was asked to do since :meth:`start`."""

    now: Pretended

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()  # by line
        self.bytes: Counter[str] = Counter()  # of operands and results, each counted once a launch
        self.clock = 0  # steps of the host
        self.pinned: set[int] = set()
        Pretended.now = self

    def start(self) -> None:
        self.launches.clear()
        self.waits.clear()

    def launch(self, name: str, operands: Any, kernels: int = 1) -> None:
        """Count a launch, and the memory of its operands; an expanded one counts as often as it is read."""
        given = {id(each): each for each in pytree.tree_leaves(operands) if isinstance(each, OnDevice)}
        self.launches[name] += kernels
        self.bytes[name] += sum(each.numel() * each.element_size() for each in given.values())

    def wait(self, why: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # the thread that trains goes on
        frames = [each for each in traceback.extract_stack() if "/stoker/" in each.filename]
        at = f"{frames[-1].filename.split('/stoker/')[1]}:{frames[-1].lineno}" if frames else "?"
        self.waits[f"{at} {why}"] += 1

    def download(self, tensor: OnDevice) -> torch.Tensor:
        self.wait("cpu()")
        return tensor.inner.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func._overloadpacket
        if packet in (_aten._pin_memory, _aten.pin_memory):
            func, args, kwargs = _aten.clone.default, args[:1], {}
        found, there = run(func, args, kwargs)
        if packet in (_aten._pin_memory, _aten.pin_memory) or kwargs.get("pin_memory"):
            self.pinned.add(found.untyped_storage().data_ptr())
        leaves = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        moves = packet in (_aten._to_copy, _aten.copy_) and isinstance(leaves[-1], OnDevice) != isinstance(
            found, OnDevice
        )
        if moves:
            host = leaves[-1] if there else found
            if not kwargs.get("non_blocking", (args[2:] or (False,))[0]):
                self.wait("copy that blocks")
            elif host.untyped_storage().data_ptr() not in self.pinned:
                self.wait("copy of memory that is not page-locked")
            return found
        if not any(isinstance(each, OnDevice) for each in (*leaves, *pytree.tree_leaves(found))):
            return found
        boolean = packet in (_aten.index, _aten.index_put_, _aten.index_put) and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        sized = packet is _aten.repeat_interleave and kwargs.get("output_size") is None
        if packet in READ or boolean or sized:
            self.wait(str(packet).removeprefix("aten."))
        if not func.is_view and packet not in FREE:
            self.launch(str(packet).removeprefix("aten."), (args, kwargs, found), KERNELS.get(packet, 1))
        return found


class _Quiet(TorchDispatchMode):
    """The device in a thread that does not train."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found, _ = run(func, args, kwargs)
        if kwargs.get("pin_memory"):
            Pretended.now.pinned.add(found.untyped_storage().data_ptr())
        return found


def _quiet(*_: Any) -> Any:
    return nullcontext() if threading.current_thread() is threading.main_thread() else _Quiet()


class _Event:
    def __init__(self, **_: Any) -> None:
        self.recorded = Pretended.now.clock

    def record(self, stream: Any = None) -> None:
        self.recorded = Pretended.now.clock

    def query(self) -> bool:
        return Pretended.now.clock > self.recorded + 2

    def synchronize(self) -> None:
        if not self.query():
            Pretended.now.wait("event")


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        return

    def record_event(self) -> _Event:
        return _Event()


class _Kernel:
    """A Triton kernel that takes tensors of the device."""

    def __init__(self, kernel: Any, name: str) -> None:
        self.kernel, self.name = kernel, name

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            Pretended.now.launch(self.name, args)
            inner = [each.inner if isinstance(each, OnDevice) else each for each in args]
            with torch.utils._python_dispatch._disable_current_modes():
                self.kernel[grid](*inner, **kwargs)

        return launch


def pretend(patch: pytest.MonkeyPatch) -> Pretended:
    """Let torch and Triton use a pretended GPU."""
    from stoker import ops
    from stoker.ops.gpu import dense, kernels
    from stoker.tables.links import cuda_link

    main, pinned = _Stream(), cuda_link.Streams.pinned

    def quietly(*given: Any) -> torch.Tensor:
        with _quiet():
            return pinned(*given)

    patch.setattr(cuda_link.Streams, "pinned", quietly)
    patch.setattr(cuda_link, "_PROBE", 1)
    for name, value in {
        "_lazy_init": lambda: None, "Event": _Event, "Stream": _Stream, "current_stream": lambda *_: main,
        "stream": _quiet, "device": lambda *_: nullcontext(),
        "synchronize": lambda *_: Pretended.now.wait("synchronize"), "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (2**30, 2**30), "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0
        ),
    }.items():  # fmt: skip
        patch.setattr(torch.cuda, name, value)
    for module in (kernels, dense):
        for name, value in vars(module).copy().items():
            if name.endswith("_kernel"):
                patch.setattr(module, name, _Kernel(value, name))
    patch.setattr(ops, "_load", cache(ops._load.__wrapped__))  # with an error word of its own
    patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    return Pretended()
