"""Run a Numba kernel on torch's own OpenMP threads.

A second thread pool next to torch's gains nothing: between two matrix products torch's workers spin on the cores that
the pool's threads need (measured: a second thread of ours gained nothing inside a training step). So where torch's
OpenMP is GNU's, it runs the kernels; elsewhere a :class:`stoker.ops.codegen.threads.Team` does. Numba's own
``parallel=True`` is not used: its pools are a third set of threads, and unsafe next to torch's.

A kernel is a Python function of one pointer. It begins with ``a, b, c = arguments(p)`` and may call
``thread_index(p)``. All threads run it with the same arguments and share work through a cursor array (:func:`shared`),
so it works with any number of threads.

Compiling takes a second, most of it Numba's own work on types and code. So a kernel whose two halves vary separately is
two kernels: the first calls the second with :func:`call`, and a change of one does not compile the other again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import _dispatcher, njit, typeof, types
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from stoker.base.progress import compiling
from stoker.ops.codegen.jit import PLAIN, cached, jit, stamped
from stoker.ops.codegen.llvm_memory import fetch_add
from stoker.ops.codegen.threads import kernel_threads, own, team

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BYTE = ir.IntType(8).as_pointer()


def _box(context: Any, kind: types.BaseTuple) -> ir.Type:
    """Return the type behind a kernel's pointer: its arguments, then the number of threads that have arrived."""
    return ir.LiteralStructType([context.get_value_type(kind), _I64])


@intrinsic
def arguments(typingctx, pointer):
    """Return the arguments of the running kernel, as a tuple."""
    signature = pointer.dtype(pointer)

    def codegen(context, b, signature, args):
        box = b.bitcast(args[0], _box(context, signature.return_type).as_pointer())
        value = b.load(cgutils.gep_inbounds(b, box, 0, 0))
        return impl_ret_borrowed(context, b, signature.return_type, value)

    return signature, codegen


@intrinsic
def thread_index(typingctx, pointer):
    """Return the number of this thread, counted from 0; call it once in each kernel."""
    signature = types.int64(pointer)

    def codegen(context, b, signature, args):
        box = b.bitcast(args[0], _box(context, signature.args[0].dtype).as_pointer())
        return b.atomic_rmw("add", cgutils.gep_inbounds(b, box, 0, 1), _I64(1), "monotonic")

    return signature, codegen


@njit(**PLAIN)  # with reference counts, each call would keep the cursor
def shared(cursor, block, count):
    """Yield the items of ``range(count)`` that this thread gets, ``block`` of them at a time."""
    while True:
        start = fetch_add(cursor, block)
        if start >= count:
            return
        for item in range(start, min(start + block, count)):  # noqa: UP028  (Numba knows no yield from)
            yield item


@intrinsic
def call(typingctx, pointer, entry, me, item, count):
    """Call the kernel at address ``entry`` with three numbers and its own arguments, which come after this kernel's."""
    signature = types.void(pointer, types.intp, types.int64, types.int64, types.int64)

    def codegen(context, b, signature, args):
        own = _box(context, signature.args[0].dtype).as_pointer()
        following = b.bitcast(b.gep(b.bitcast(args[0], own), [ir.Constant(_I32, 1)]), _BYTE)
        kind = ir.FunctionType(ir.VoidType(), [_BYTE, _I64, _I64, _I64])
        b.call(b.inttoptr(args[1], kind.as_pointer()), [following, *args[2:]])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _start(typingctx, openmp, entry, threads, index, all_arguments):
    signature = types.void(types.intp, types.intp, types.intp, types.intp, all_arguments)

    def codegen(context, b, signature, args):
        # Each begins at a multiple of eight bytes, the size of its largest members.
        kinds = [_box(context, kind) for kind in signature.args[4]]
        boxes = cgutils.alloca_once(b, ir.LiteralStructType(kinds))
        for which, value in enumerate(cgutils.unpack_tuple(b, args[4])):
            b.store(value, cgutils.gep_inbounds(b, boxes, 0, which, 0))
            b.store(args[3], cgutils.gep_inbounds(b, boxes, 0, which, 1))
        data = b.bitcast(boxes, _BYTE)
        plain = ir.FunctionType(ir.VoidType(), [_BYTE])
        with b.if_else(b.icmp_signed("==", args[0], _I64(0))) as (alone, together):
            with alone:
                b.call(b.inttoptr(args[1], plain.as_pointer()), [data])
            with together:
                # void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags)
                kind = ir.FunctionType(ir.VoidType(), [_BYTE, _BYTE, _I32, _I32])
                function = b.inttoptr(args[0], kind.as_pointer())
                b.call(function, [b.inttoptr(args[1], _BYTE), data, b.trunc(args[2], _I32), _I32(0)])
        return context.get_dummy_value()

    return signature, codegen


@jit
def _launch(openmp, entry, threads, index, all_arguments):
    _start(openmp, entry, threads, index, all_arguments)


@cache
def _gomp_parallel() -> int:
    """Return the address of ``GOMP_parallel`` in the OpenMP library that torch has loaded, or 0."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
        if len(paths) != 1 or "OpenMP" not in torch.__config__.parallel_info():
            return 0
        function = ctypes.CDLL(paths.pop()).GOMP_parallel
    except (OSError, AttributeError, IndexError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _kinds(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a key that differs for values of other types, and for arrays that are not contiguous."""
    return tuple([(v.dtype.num, v.ndim, v.flags.num) if isinstance(v, np.ndarray) else type(v) for v in values])


# Numba's own function, in C, takes a tenth of the time; its module is not public.
_fingerprint: Callable[[tuple[Any, ...]], Any] = getattr(_dispatcher, "compute_fingerprint", _kinds)

_several: dict[Any, np.ndarray] = {}  # what Kernel.entries() returned


class _Callback(CFunc):
    """Numba's callback; it reports that it compiles, but not that it is loaded from disk."""

    def _compile_uncached(self) -> Any:
        with compiling(self.__name__.strip("_")):
            return super()._compile_uncached()  # type: ignore[misc]


class Kernel:
    """A kernel for any argument types; compiled when it first runs, and kept on disk.

    Args:
        function: of one pointer; of a pointer and three int64 if other kernels call it.
        called: other kernels call it.
        allocates: it makes arrays of its own.
    """

    def __init__(self, function: Callable[..., None], *, called: bool = False, allocates: bool = False) -> None:
        self._function = function
        self._numbers = [types.int64] * 3 if called else []
        self._options: dict[str, Any] = {} if allocates else PLAIN
        self._compiled: dict[tuple[Any, ...], tuple[int, Any]] = {}  # by Numba's types
        self._entries: dict[Any, tuple[int, Any]] = {}  # the same, by their fingerprints

    def entry(self, *values: Any) -> int:
        """Return the address of the code for arguments of these types."""
        key = _fingerprint(values)
        known = self._entries.get(key)
        if known is None:
            if strided := [n for n, v in enumerate(values) if isinstance(v, np.ndarray) and not v.flags.c_contiguous]:
                raise ValueError(
                    f"arguments {strided} of {self._function.__name__} are strided. Copy them: .contiguous()."
                )
            kinds = tuple(typeof(value) for value in values)
            known = self._compiled.get(kinds)
            if known is None:
                signature = types.void(types.CPointer(types.Tuple(kinds)), *self._numbers)
                # Keep the object: it owns the code at the address.
                compiled: Any = cached(lambda keep: self._compile(signature, keep))
                known = self._compiled[kinds] = (int(compiled.address), compiled)
            self._entries[key] = known
        return known[0]

    def _compile(self, signature: Any, keep: bool) -> Any:
        options = {"error_model": "numpy", **self._options}
        made = _Callback(self._function, (signature.args, signature.return_type), locals={}, options=options)
        if keep:  # numba.cfunc would read the cache before the stamp is set
            made.enable_caching()
        stamped(made).compile()
        return made

    @staticmethod
    def entries(kernels: tuple[Kernel, ...], values: tuple[Any, ...]) -> np.ndarray:
        """Return the addresses of the code of several kernels that take the same arguments, int64."""
        key = kernels, _fingerprint(values)
        known = _several.get(key)
        if known is None:
            known = _several[key] = np.array([kernel.entry(*values) for kernel in kernels])
        return known

    def run(self, *values: Any, after: tuple[tuple[Any, ...], ...] = (), threads: int | None = None) -> None:
        """Run on ``threads`` threads (None: as many as torch uses); arrays must be C-contiguous.

        ``after`` are the arguments of the kernel that this one calls, and of the one that that one calls.
        """
        entry = self.entry(*values)
        size = kernel_threads() if threads is None else max(1, threads)
        if size == 1:
            _launch(0, entry, 1, 0, (values, *after))
        elif not getattr(own, "size", 0) and (gomp := _gomp_parallel()):
            _launch(gomp, entry, size, 0, (values, *after))
        else:
            team(size).run(_launch, [(0, entry, 1, index, (values, *after)) for index in range(size)])
