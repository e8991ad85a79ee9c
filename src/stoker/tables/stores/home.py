"""Backing stores: slow memory for every row of a table group, with its optimizer state.

A row that was never stored is a function of (seed, table name, row), so it is computed when it is fetched and takes no
memory: a store of 100 GB costs a bit a row until rows are stored. :class:`stoker.tables.stores.file_home.FileHome` and
:class:`stoker.tables.stores.log_home.LogHome` keep them in files.

Several threads may use a store at once, but not the same row at the same time, unless both only fetch. The caller's
fence keeps a fetch behind a pending store of its row.

Legend: N rows, n rows of one call, D columns, T tables.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.base.device import available_memory, total_memory
from stoker.base.errors import ConfigError, HomeError
from stoker.base.units import format_size
from stoker.ops.cpu.arena import flat
from stoker.ops.reference import GOLDEN, derive_key, uniform
from stoker.ops.space import HAVE_NUMBA
from stoker.tables.config import DTYPES, Slotted, TableConfig
from stoker.tables.storage import Rows, allocate, row_bytes, shapes_of

_LINE = 64  # bytes of a cache line
_PAGE = mmap.PAGESIZE  # page-locking takes whole pages
_PORTABLE, _MAPPED = 1, 2  # flags of cudaHostRegister: locked for every GPU, at an address that it can read
_CHUNK = 2**20  # elements of a chunk in Initial.rows
_KERNEL_STATES = 2  # state tensors that the kernels support; more take the plain path
Arrays = tuple[np.ndarray, ...]
_NOTHING = np.empty(0, dtype=np.int64)
_NO_STATE = np.zeros(1, dtype=np.float32)
_ENTRY = 4  # bytes of the page table of a RAM tier a block
_FRAME = 11  # bytes of bookkeeping of a RAM tier a frame


def tier_bytes(num_rows: int, row_bytes: int, block_rows: int, frames: int = 1) -> int:
    """Return the bytes of a RAM tier over N rows: the page table, and frames of a block each with their bookkeeping."""
    return _ENTRY * -(-num_rows // block_rows) + frames * (block_rows * row_bytes + _FRAME)


@dataclass(frozen=True, kw_only=True, eq=False)
class Initial:
    """The rows that :class:`stoker.tables.group.TableGroup` starts from, before any update.

    They are uniform in [-scale, scale) by table, drawn by counter (:func:`stoker.ops.reference.init_rows`), so a row
    does not depend on when, where or with which others it is computed.
    """

    keys: np.ndarray  # [T] int64, one key of random bits a table
    scales: np.ndarray  # [T] float32, half-width of each table's distribution
    first_row: np.ndarray  # [T + 1] int64, first address of each table; the last is N
    dim: int  # D
    dtype: torch.dtype  # of the weights
    part: tuple[int, int] = (0, 1)  # (first, step): the rows are rows first, first + step, ... of their tables

    @classmethod
    def of(cls, tables: Sequence[TableConfig], seed: int, part: tuple[int, int] = (0, 1)) -> Initial:
        """Return the initial rows of ``tables`` end to end, as in the address space of their group."""
        dim = tables[0].embedding_dim
        skipped = part[0] * dim * GOLDEN  # a key plus this draws the numbers that begin with row part[0]
        keys = [derive_key(seed, "init", table.name) + skipped for table in tables]
        keys = [(key + 2**63) % 2**64 - 2**63 for key in keys]  # as signed 64-bit arithmetic wraps
        first = np.zeros(len(tables) + 1, dtype=np.int64)
        np.cumsum([table.num_embeddings for table in tables], out=first[1:])
        return cls(
            keys=np.array(keys, dtype=np.int64),
            scales=np.array([table.scale for table in tables], dtype=np.float32),
            first_row=first,
            dim=dim,
            dtype=DTYPES[tables[0].dtype],
            part=part,
        )

    @property
    def num_rows(self) -> int:
        """N."""
        return int(self.first_row[-1])

    def label(self, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the table of each address, and the row of the whole table."""
        table = np.searchsorted(self.first_row, addresses, side="right") - 1
        return table, (addresses - self.first_row[table]) * self.part[1] + self.part[0]

    def rows(self, addresses: np.ndarray) -> Tensor:
        """Return initial weights [n, D] of the rows at ``addresses`` [n] int64: the definition, in plain PyTorch."""
        out = torch.empty(len(addresses), self.dim, dtype=self.dtype, device="cpu")
        column = torch.arange(self.dim, device="cpu")
        step = max(1, _CHUNK // self.dim)
        for start in range(0, len(addresses), step):
            part = addresses[start : start + step]
            table = np.searchsorted(self.first_row, part, side="right") - 1
            counter = torch.from_numpy((part - self.first_row[table]) * (self.dim * self.part[1])).unsqueeze(1) + column
            keys, scales = (torch.from_numpy(of[table]).unsqueeze(1) for of in (self.keys, self.scales))
            out[start : start + step] = (uniform(keys, counter) * scales).to(self.dtype)
        return out


class StoredRows:
    """One bit a row: whether it was stored. Memory is taken as bits are set."""

    def __init__(self, num_rows: int) -> None:
        try:
            self.words = np.zeros(-(-num_rows // 64), dtype=np.int64)
        except MemoryError as error:
            raise ConfigError(
                f"a bit for each of {num_rows:,} rows needs {format_size(num_rows / 8)} of memory, which this machine "
                "does not give. Make the tables smaller."
            ) from error
        self._lock = threading.Lock()

    def contains(self, rows: np.ndarray) -> np.ndarray:
        """Return whether each of ``rows`` [n] int64 was stored: [n] bool."""
        found: np.ndarray = ((self.words[rows >> 6] >> (rows & 63)) & 1).astype(bool)
        return found

    def mark(self, rows: np.ndarray) -> None:
        """Record that ``rows`` [n] int64 are stored."""
        with self._lock:  # 64 rows share a word, and threads store different rows at once
            np.bitwise_or.at(self.words, rows >> 6, np.left_shift(np.int64(1), rows & 63))


class Home(ABC):
    """All N rows of one group: weights [N, D] and optimizer state, row by row.

    Args:
        initial: values of rows before they are first stored.
        state: name of each state tensor -> "row" ([N, D] float32) or "scalar" ([N] float32); it starts at zero.
    """

    kind: str  # what it is, such as "memory" or "file", for messages
    is_blocking = False  # whether a fetch or store waits for a device
    cache_bytes: int | None = None  # of the RAM tier over it where a strategy names no size; None: it needs no tier
    in_memory = False  # whether all rows are in main memory, which a GPU may read and no RAM tier would help
    in_files = False  # whether rows are in files of a local directory, which the planner may measure
    block_rows = 1  # consecutive rows that it moves at the cost of one: blocks of a RAM tier over it
    directory: Path | None = None  # of its file
    pinned = False  # whether a GPU can read the rows in place
    threads: int | None = None  # threads of kernels; None means as many as torch uses

    def __init__(self, initial: Initial, state: Mapping[str, str]) -> None:
        unknown = {name: kind for name, kind in state.items() if kind not in ("row", "scalar")}
        if unknown:
            raise ConfigError(f"state kinds {unknown} are unknown. Choose 'row' or 'scalar'.")
        self.initial = initial
        self.state = dict(state)
        self.num_rows = initial.num_rows
        self.dim = initial.dim
        self.dtype = initial.dtype
        self.native = HAVE_NUMBA and len(state) <= _KERNEL_STATES
        self.widths = tuple(self.dim if kind == "row" else 1 for kind in state.values())  # float32 elements a row
        self.stored = StoredRows(self.num_rows)
        # The slots of the last call, which were checked, and their arrays; None if they are not plain memory.
        self._slots: tuple[Rows | None, Arrays | None] = None, None
        self._open = True

    @classmethod
    def of(cls, strategy: Slotted, initial: Initial, state: Mapping[str, str], *, gpu: bool) -> Home:
        """Make a store as ``strategy`` says; ``gpu``: for slots on a GPU."""
        return cls(initial, state)

    @classmethod
    def choose(cls, strategy: Slotted, num_rows: int) -> type[Home]:
        """Return the class for N rows under ``strategy``: this one, or one that suits them better."""
        return cls

    @classmethod
    def place(cls, path: str | None) -> str:
        """Say where the rows are, for a sentence."""
        return f"at {path}" if path else f"in {cls.kind}"

    @staticmethod
    def index_bytes(num_rows: int) -> int:
        """Return the bytes of main memory for the index of a store of N rows."""
        return 0

    @classmethod
    def least_cache(cls, num_rows: int, row_bytes: int) -> int:
        """Return the bytes of the smallest RAM tier that a store of N rows works behind; 0: it needs none."""
        return 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: weights and state."""
        return row_bytes(self.dim, self.dtype, self.state)

    def fetch(self, rows: np.ndarray, target: Rows, places: np.ndarray | None = None) -> None:
        """Copy weights and state of ``rows[i]`` to row ``places[i]`` (None: i) of ``target``, on any device.

        Raises:
            HomeError: the store failed, and ``target`` may have some of the rows; or the store is closed.
            IndexError: a row or a place does not exist.
            ValueError: ``target`` has another width, type or state.
        """
        rows, places, plain = self._check(rows, target, places)
        if len(rows) == 0:
            return
        if plain:
            self._fetch(rows, target, places)
            return
        local = self.empty(len(rows))
        self._fetch(rows, local, None)
        device = target.weight.device
        index: Any = slice(len(rows)) if places is None else torch.from_numpy(places).to(device)
        target[index] = local.map(lambda tensor: tensor.to(device))

    def store(self, rows: np.ndarray, source: Rows, places: np.ndarray | None = None) -> None:
        """Store row ``places[i]`` (None: i) of ``source``, on any device, with its state as ``rows[i]``, all distinct.

        Raises:
            HomeError: the store failed. Some of the rows may be stored, others not; storing all again is safe.
            IndexError: a row or a place does not exist.
            ValueError: ``source`` has another width, type or state.
        """
        rows, places, plain = self._check(rows, source, places)
        if len(rows) == 0:
            return
        if not plain:
            index: Any = slice(len(rows)) if places is None else torch.from_numpy(places).to(source.weight.device)
            source, places = source[index].map(lambda tensor: tensor.cpu().contiguous()), None
        self._store(rows, source, places)

    def read(self, start: int, stop: int) -> Rows:
        """Copy the rows ``start..stop`` in canonical order."""
        rows = self.empty(stop - start)
        self.fetch(np.arange(start, stop, dtype=np.int64), rows)
        return rows

    def write(self, start: int, rows: Rows) -> None:
        """Replace the rows from ``start`` on; ``rows`` may have another float type."""
        state = {name: rows.state[name].detach().to(torch.float32) for name in self.state}
        given = Rows(rows.weight.detach().to(self.dtype), state)
        self.store(np.arange(start, start + len(rows.weight), dtype=np.int64), given)

    def empty(self, count: int, make: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None) -> Rows:
        """Make rows of this store's width, type and state by ``make(shape, dtype)``; None: uninitialised, on CPU."""
        return Rows.make(
            count, self.dim, self.dtype, self.state,
            make or (lambda shape, dtype: torch.empty(shape, dtype=dtype, device="cpu")),
        )  # fmt: skip

    def flush(self) -> None:  # noqa: B027  (memory has nothing to flush)
        """Wait until stored rows have arrived; raise HomeError if they did not."""

    def close(self) -> None:
        """Release the memory or the file; no call may be running, and none may follow."""
        self._open = False
        self._slots = None, None

    @abstractmethod
    def _fetch(self, rows: np.ndarray, target: Rows, places: np.ndarray | None) -> None:
        """Do ``fetch`` after the checks, into contiguous CPU tensors."""

    @abstractmethod
    def _store(self, rows: np.ndarray, source: Rows, places: np.ndarray | None) -> None:
        """Do ``store`` after the checks, from contiguous CPU tensors."""

    def _check(
        self, rows: np.ndarray, side: Rows, places: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None, bool]:
        """Check the indices and return them as contiguous int64, and whether kernels may use ``side`` in place."""
        if not self._open:
            raise HomeError(f"{self!r} is closed. Make a new backing store, or close it after the last use.")
        known, arrays = self._slots
        plain = arrays is not None
        if known is not side:
            self._check_side(side)
            plain = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in side.tensors)
            if places is not None:
                self._slots = side, self._columns(side) if plain else None
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        if places is not None:
            places = np.ascontiguousarray(places, dtype=np.int64)
        count = len(rows) if places is None else len(places)
        if rows.ndim != 1 or count != len(rows):
            raise ValueError(f"{rows.shape} rows and {count} places; there must be one place a row.")
        if count:
            # A negative number is a large one without its sign.
            if rows.view(np.uint64).max() >= self.num_rows:
                bad = rows[(rows < 0) | (rows >= self.num_rows)][0]
                raise IndexError(f"row {bad:,} is not in {self!r}; its rows are 0 to {self.num_rows - 1:,}.")
            last = count - 1 if places is None else places.view(np.uint64).max()
            if last >= len(side.weight):
                low, high = (0, last) if places is None else (int(places.min()), int(places.max()))
                raise IndexError(f"places {low:,} to {high:,} are not in the {len(side.weight):,} rows given.")
        return rows, places, plain

    def _check_side(self, side: Rows) -> None:
        """Raise ValueError if ``side`` has another width, type or state."""
        weight = side.weight
        wanted = shapes_of(self.state, len(weight), self.dim)
        given = {name: tuple(side.state[name].shape) for name in self.state if name in side.state}
        if weight.dim() != 2 or weight.shape[1] != self.dim or weight.dtype != self.dtype or given != wanted:
            raise ValueError(
                f"rows {tuple(weight.shape)} {weight.dtype} with state {given} do not fit {self!r}, "
                f"which needs [n, {self.dim}] {self.dtype} with state {wanted}."
            )
        if any(side.state[name].dtype != torch.float32 for name in self.state):
            raise ValueError("optimizer state must be float32.")

    def _run_kernel(
        self, rows: np.ndarray, words: np.ndarray, store: Arrays, side: Rows, places: np.ndarray | None, *,
        storing: bool,
    ) -> None:  # fmt: skip
        """Copy rows of ``store`` to ``side``, and compute those whose bit in ``words`` is not set; or store them."""
        from stoker.tables.stores.kernels import MOVE

        threads = torch.get_num_threads() if self.threads is None else self.threads
        # Small blocks balance the threads, but a thread restarts its prefetches in each.
        block = min(512, max(64, len(rows) // (4 * threads)))
        threads = min(threads, -(-len(rows) // block))
        widths = (self.dim, *self.widths, *([0] * (_KERNEL_STATES - len(self.widths))))
        initial = (self.initial.first_row, self.initial.keys, self.initial.scales, self.initial.part[1])
        MOVE.run(
            rows, _NOTHING if places is None else places, words, *store, *self._columns(side), *initial,
            storing, *widths, np.zeros(1, dtype=np.int64), block, threads=threads,
        )  # fmt: skip

    def _compute(self, rows: np.ndarray, target: Rows, places: np.ndarray) -> None:
        """Compute initial rows, which were never stored, with state of zero."""
        if self.native:
            self._run_kernel(rows, _NOTHING, self._columns(target), target, places, storing=False)
            return
        index = torch.from_numpy(places)
        target.weight[index] = self.initial.rows(rows)
        for tensor in target.state.values():
            tensor[index] = 0.0

    def _columns(self, rows: Rows) -> Arrays:
        """Return weights and two states as flat arrays, for the kernels."""
        known, arrays = self._slots
        if known is rows and arrays is not None:
            return arrays
        states = [flat(rows.state[name]) for name in self.state]
        return (flat(rows.weight), *states, *([_NO_STATE] * (_KERNEL_STATES - len(states))))

    def __repr__(self) -> str:
        state = "".join(f" + {name}" for name in self.state)
        kind = str(self.dtype).removeprefix("torch.")
        size = format_size(self.num_rows * self.row_bytes)
        return f"{type(self).__name__}({self.num_rows:,} rows x {self.dim} {kind}{state}, {size}{self._details()})"

    def _details(self) -> str:
        return ""


class MemoryHome(Home):
    """Rows in main memory, as :attr:`arrays`: weights [N, D] and each state [N, D] or [N].

    Memory is taken as rows are stored (in whole huge pages, where the system has them), so plan for all of it. ``pin``
    page-locks the arrays, so that a GPU reads and copies them at full speed, and takes all memory at once.
    """

    kind = "memory"
    in_memory = True

    def __init__(
        self, initial: Initial, state: Mapping[str, str], *, pin: bool = False, threads: int | None = None
    ) -> None:
        super().__init__(initial, state)
        if pin and not torch.cuda.is_available():
            raise ConfigError(
                f"MemoryHome(pin=True) was asked for, but torch {torch.__version__} sees no GPU here. "
                "Leave pin=False, or install a CUDA build of torch."
            )
        self.pinned, self.threads = pin, threads
        unit = _PAGE if pin else _LINE
        try:
            self.arrays = self.empty(self.num_rows, lambda shape, dtype: _aligned(shape, dtype, unit))
        except MemoryError as error:
            raise ConfigError(
                f"a backing store of {self.num_rows:,} rows in memory needs "
                f"{format_size(self.num_rows * self.row_bytes)}; this machine has "
                f"{format_size(total_memory() or 0)} and does not give that much. Keep the rows in a file."
            ) from error
        self._memory = self._columns(self.arrays)
        self._locks = [_page_lock(self, tensor) for tensor in self.arrays.tensors] if pin else []

    @classmethod
    def of(cls, strategy: Slotted, initial: Initial, state: Mapping[str, str], *, gpu: bool) -> MemoryHome:
        """Make a store as ``strategy`` says; by default pinned for a GPU if there is enough memory and it works."""
        if strategy.pin is not None:
            return cls(initial, state, pin=strategy.pin)
        home = cls(initial, state)  # this takes no memory yet
        if not gpu or home.num_rows * home.row_bytes > (available_memory() or 0) // 2:
            return home
        home.close()
        try:
            return cls(initial, state, pin=True)
        except ConfigError:
            return cls(initial, state)

    def close(self) -> None:
        super().close()
        if self._locks:
            torch.cuda.synchronize()  # the device may still be reading
        for unlock in self._locks:
            unlock()
        self._locks = []
        self.arrays = self.empty(0)
        self._memory = self._columns(self.arrays)

    def _fetch(self, rows: np.ndarray, target: Rows, places: np.ndarray | None) -> None:
        if self.native:
            self._run_kernel(rows, self.stored.words, self._memory, target, places, storing=False)
            return
        found = self.arrays[torch.from_numpy(rows)]  # state is zero in rows that were never stored
        fresh = ~self.stored.contains(rows)
        if fresh.any():
            found.weight[torch.from_numpy(fresh)] = self.initial.rows(rows[fresh])
        target[slice(len(rows)) if places is None else torch.from_numpy(places)] = found

    def _store(self, rows: np.ndarray, source: Rows, places: np.ndarray | None) -> None:
        if self.native:
            self._run_kernel(rows, self.stored.words, self._memory, source, places, storing=True)
            return
        self.arrays[torch.from_numpy(rows)] = source[slice(len(rows)) if places is None else torch.from_numpy(places)]
        self.stored.mark(rows)

    def _details(self) -> str:
        return ", pinned" if self.pinned else ""


def _aligned(shape: tuple[int, ...], dtype: torch.dtype, unit: int) -> Tensor:
    """Return zeroed lazy memory that shares no ``unit`` of bytes, a power of two: no cache line, or no page."""
    count = int(np.prod(shape, dtype=np.int64))
    memory = allocate((count + 2 * unit // dtype.itemsize,), dtype)
    skip = -memory.data_ptr() % unit // dtype.itemsize
    return memory[skip : skip + count].view(shape)


def _page_lock(owner: Home, tensor: Tensor) -> Callable[[], None]:
    """Page-lock the memory of ``tensor`` until ``owner`` is deleted or the result is called.

    It is registered in place: torch's pinned allocator rounds up to a power of two, too much for a large table.
    """
    cudart: Any = torch.cuda.cudart()
    size = -(-tensor.nbytes // _PAGE) * _PAGE
    code = int(cudart.cudaHostRegister(tensor.data_ptr(), size, _PORTABLE | _MAPPED))
    if code != 0:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # or the next kernel launch would report this error
        raise ConfigError(
            f"page-locking {format_size(tensor.nbytes)} for a pinned backing store failed (CUDA error {code}). "
            "Leave pin=False, raise the memory lock limit (ulimit -l), or keep fewer rows in memory."
        )
    return weakref.finalize(owner, lambda: cudart.cudaHostUnregister(tensor.data_ptr()))
