"""Exchange data between ranks. Collectives move data; a rank adds floats itself, in an order that no rank changes.

Before data moves, every rank sends the others the name of its next work, the bytes for each rank, and whether it has
failed. So ranks that do different work, and ranks that stop, end with an error instead of a wait. Steps repeat, so
after each work all ranks know how many bytes came with the next one the last time: that much data goes in the message
of its header, and a second message is needed only for more.

Legend: R ranks.
"""

from __future__ import annotations

import json
import struct
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import fields, is_dataclass
from numbers import Number
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.ops.tree import Node, Shards, nodes_of, shard_bounds, shards_of, tree_sum
from stoker.tables.ranks.heartbeat import Heartbeat, RanksError

_LIMB = 2**32  # integers of any size travel in digits of this base
_LIMBS = 8
_NAME = 6  # int64 of a header for the name of the work
_WORD = 8  # bytes
_INLINE = 8  # int64 of a header for a few numbers, which then need no message of their own
_ROOM = 2**22  # most bytes in the message of a header: for more, a message of their own costs little
_SLACK = 64  # one part in so many more than the most bytes so far, if these were not always the same


class _Rooms:
    """How much data goes in the message of a header."""

    def __init__(self) -> None:
        self.last = ""  # the work of the last header
        self.sizes: dict[str, Tensor] = {}  # [R, R] bytes for the header after a work


_rooms: weakref.WeakKeyDictionary[dist.ProcessGroup, _Rooms] = weakref.WeakKeyDictionary()


class Wire(Protocol):
    """Two collectives on bytes, in which a :class:`RanksError` tells why another rank does not take part."""

    rank: int
    size: int

    def gather(self, value: Tensor) -> Tensor:
        """Return the ``value`` [n] uint8 of every rank [R, n]."""

    def swap(self, sent: Tensor, sizes: Sequence[int], got: Sequence[int]) -> Tensor:
        """Send slices of ``sent`` uint8, ``sizes[r]`` bytes to rank r; return what came, ``got[r]`` bytes of rank r."""

    def end(self, why: str) -> RanksError:
        """End the collectives of all ranks; return the error that they raise."""


class _TorchWire:
    """A process group of torch.distributed as a :class:`Wire`."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # The group may not take tensors of every device: nccl takes none of the CPU.
        carried = {pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")}
        self.device = torch.device("cpu" if "cpu" in carried else "cuda")
        found = group or dist.distributed_c10d._get_default_group()
        self.rooms = _rooms.setdefault(found, _Rooms())
        self._heartbeat = Heartbeat(self, found, timeout, polls=self.device.type == "cpu")

    def gather(self, value: Tensor) -> Tensor:
        # Gloo's all_gather goes round a ring, with the delay of the network R - 1 times. This has it once.
        same = [len(value)] * self.size
        return self._swap(value.repeat(self.size), same, same).view(self.size, -1)

    def swap(self, sent: Tensor, sizes: Sequence[int], got: Sequence[int]) -> Tensor:
        return self._swap(sent, sizes, got)

    def _swap(self, sent: Tensor, sizes: Sequence[int], got: Sequence[int]) -> Tensor:
        self._heartbeat.check()
        given = sent.to(self.device)
        found = given.new_empty(sum(got))
        self._heartbeat.wait(
            dist.all_to_all_single(found, given, list(got), list(sizes), group=self.group, async_op=True)
        )
        return found.to(sent.device)

    def end(self, why: str) -> RanksError:
        return self._heartbeat.end(why)


class Ranks:
    """The ranks of a process group: each has some of the logical shards of a batch.

    The loss of a rank is the sum over its own examples, divided by the number of examples of all ranks.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> stoker.distributed.Ranks()
    Ranks(rank 0 of 1)
    >>> torch.distributed.destroy_process_group()

    Args:
        group: of ``torch.distributed``; None means all processes.
        timeout: seconds without a sign of life after which a rank is lost: its process is stopped, or the network is
            down. A rank that lives may work alone for longer, up to the timeout of the process group.

    Raises:
        ConfigError: ``torch.distributed`` was not initialised.
    """

    means = False  # whether the loss of a rank is the mean over its own examples
    average_every: int | None = None  # steps between two averages, if each has a copy of all rows (:meth:`averaging`)

    def __init__(self, group: dist.ProcessGroup | Wire | None = None, *, timeout: float = 12.0) -> None:
        if group is None or isinstance(group, dist.ProcessGroup):
            if not dist.is_available() or not dist.is_initialized():
                raise ConfigError(
                    f"{type(self).__name__} needs torch.distributed. Call "
                    "torch.distributed.init_process_group('gloo') first ('nccl' on GPUs), and start the processes with "
                    "torchrun."
                )
            group = _TorchWire(group, timeout)
        self.wire: Wire = group
        self.rank, self.size = group.rank, group.size
        self.settings: list[Callable[[], Mapping[str, str]]] = []  # of tables on these ranks, for messages
        self.unsure = False  # whether ranks have written other rows since their rows were compared
        # Bytes sent to other ranks, by work, without room that stays empty; "headers" come before each message.
        self.sent = Counter[str]()
        self._rooms: _Rooms = vars(group).setdefault("rooms", _Rooms())  # one for all that send through a group

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    def averaging(self, every: int) -> Ranks:
        """Return these ranks for tables of which each has a copy, which are averaged after so many steps (cDLRM).

        ``EmbeddingTables(..., ranks=ranks.averaging(16))`` then depend on the number of ranks: docs/ranks.md.

        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> stoker.distributed.Ranks().averaging(16).average_every
        16
        >>> torch.distributed.destroy_process_group()

        Raises:
            ConfigError: ``every`` is less than 1.
        """
        if every < 1:
            raise ConfigError(f"average_every is {every} steps; give 1 or more.", settings=("average_every",))
        made = copy(self)
        made.average_every = every
        return made

    # ---- shards

    def tree(self, shards: int) -> range:
        """Return the shards of a batch: ``shards``, or one for each rank, up to a power of two, if that is 1."""
        return range(shards if shards > 1 else 1 << (self.size - 1).bit_length())

    def numbers_of(self, rank: int, shards: int) -> range:
        """Return the shards of a rank."""
        return shards_of(rank, self.size, shards) if shards > 1 else range(rank, rank + 1)

    def shards_of(self, sizes: Sequence[int], shards: int) -> Shards:
        """Return the own shards of a batch of which the ranks have ``sizes`` [R] examples.

        Raises:
            RanksError: the ranks have other examples than those of their shards.
        """
        if shards == 1:
            return Shards((0, sizes[self.rank]), self.rank)
        bounds = shard_bounds(sum(sizes), shards)
        for rank, size in enumerate(sizes):
            own = self.numbers_of(rank, shards)
            if (wanted := bounds[own.stop] - bounds[own.start]) != size:
                raise RanksError(
                    f"rank {rank} of {self.size} has {size} of {sum(sizes)} examples, but its {len(own)} of {shards} "
                    f"logical shards are {wanted}. Give every rank the examples of its shards: "
                    f"{bounds[own.start]} to {bounds[own.stop]} of the whole batch."
                )
        own = self.numbers_of(self.rank, shards)
        return Shards(tuple(each - bounds[own.start] for each in bounds[own.start : own.stop + 1]), own.start)

    def add(self, parts: Mapping[Node, Tensor], shards: int) -> Tensor:
        """Return the sum [n] over all shards on every rank; ``parts``: [n] for each node of the own shards.

        A rank adds one slice of the sum; then the slices are gathered.

        Raises:
            RanksError: n or the type is not the same on all ranks.
        """
        nodes = [nodes_of(self.numbers_of(rank, shards)) for rank in range(self.size)]
        own = torch.stack([parts[node] for node in nodes[self.rank]])
        slices = self.slices(own)
        width = slices[self.rank].shape[1]
        work = "add gradients of parameters"

        def added() -> Tensor:
            found: dict[Node, Tensor] = {}
            for mine, values in zip(nodes, sent, strict=True):
                found.update(zip(mine, values.view(len(mine), width), strict=True))
            total = tree_sum(found, Node(0, len(self.tree(shards))))
            assert total is not None
            return total

        with self.whole(work):
            sent, said = self.exchange_noted(work, [each.reshape(-1) for each in slices], [own.shape[1], own.itemsize])
            check_same([length for length, _ in said], [size for _, size in said])
            return self.joined(work, added, [each[0].nbytes for each in slices])

    def slices(self, values: Tensor) -> list[Tensor]:
        """Return the columns of ``values`` [k, n] that each rank adds."""
        length = -(-values.shape[1] // self.size)
        return [values[:, at * length : (at + 1) * length] for at in range(self.size)]

    def check_alike(self, *settings: object) -> None:
        """Check that all ranks made the same tables; numbers of any type may be equal.

        Raises:
            ConfigError: the ``settings`` are not the same on every rank.
        """
        texts = self.numbers("compare settings", [zlib.crc32(plain(settings).encode())])
        if different := [rank for rank, found in enumerate(texts) if found != texts[0]]:
            raise ConfigError(
                f"the tables of rank {different[0]} are not made like those of rank 0. Give all ranks the same tables, "
                "features, optimizer, shards and seed, and one placement to the same tables."
            )

    def check_equal(self, name: str, value: int, work: str = "compare rows") -> None:
        """Check that all ranks have the same ``value``: a number, or the checksum of others.

        Raises:
            ConfigError: they have not.
        """
        values = self.numbers(work, [value])
        if different := [rank for rank, found in enumerate(values) if found != values[0]]:
            raise ConfigError(
                f"{name} of rank {different[0]} is not that of rank 0, but all ranks must have the same rows. Give all "
                "of them the same seed, load the same checkpoint into each, and write the same rows on each."
            )

    def check_step(self, work: str, said: Sequence[Sequence[int]]) -> None:
        """Check what the ranks ``said`` of their next step (:mod:`stoker.tables.ranks.alike`).

        Raises:
            RanksError: it differs.
        """
        rates, scales, settings = ([each[place] for each in said] for place in range(3))
        self.unsure = self.unsure or len({each[3] for each in said}) > 1
        for name, found in (("learning rates", rates), ("factors on the gradients", scales)):
            if len(set(found)) > 1:
                values = ", ".join(str(struct.unpack("<d", struct.pack("<q", bits))[0]) for bits in found)
                raise RanksError(
                    f"the {name} of the rows are {values} on ranks 0 to {self.size - 1}, which are to {work}. Set "
                    "rates, gradient_scale and clipping on all ranks, before the same step."
                )
        if len(set(settings)) > 1:
            why = self._differences() or "settings of their tables differ"
            raise RanksError(f"ranks are to {work}, but {why}.")

    def _differences(self) -> str:
        """Return in words which settings of tables differ, with a remedy, or ""; all ranks call this."""
        own = {name: value for settings in self.settings for name, value in settings().items()}
        text = json.dumps(own).encode()
        length = torch.tensor([len(text)], device="cpu")
        lengths = self._call("compare settings", lambda: self.wire.gather(length.view(torch.uint8)))
        padded = torch.frombuffer(bytearray(text.ljust(int(lengths.view(torch.int64).max()))), dtype=torch.uint8)
        texts = self._call("compare settings", lambda: self.wire.gather(padded))
        first, *others = (json.loads(bytes(each.tolist())) for each in texts)
        found = [
            f"{name} is {value} on rank 0, but {other[name]} on rank {rank}"
            for rank, other in enumerate(others, 1)
            for name, value in first.items()
            if other.get(name, value) != value
        ]
        return "; ".join([*found[:3], "give all ranks the same"]) if found else ""

    # ---- collectives

    def exchange(self, work: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send ``parts[r]`` to rank r; return what each rank sent here. All have the same shape but for the first."""
        return self.exchange_noted(work, parts, ())[0]

    def exchange_noted(
        self, work: str, parts: Sequence[Tensor], own: Sequence[int], whom: str = "each its own"
    ) -> tuple[list[Tensor], list[list[int]]]:
        """Do :meth:`exchange`; return also the int64 numbers that every rank tells all others, at most 8 of each."""
        data = [bytes_of(part) for part in parts]
        sizes = [len(each) for each in data]
        with self.whole(work):
            heard = self._announce(f"{work} (to {whom})", sizes, own, data=data)
            notes = [each[: len(own)] for each in heard.numbers]
            table, had = torch.tensor(heard.sizes, device="cpu"), heard.room
            if not table.any():
                return [part[:0] for part in parts], notes
            self.sent[work] += sum(sizes) - sizes[self.rank]
            found, more = heard.data, (table - had).clamp(min=0).fill_diagonal_(0)  # of own data nothing is sent
            if more.any():
                rest = [each[begin:] for each, begin in zip(data, had[self.rank].tolist(), strict=True)]
                others = self._swap(work, rest, more[:, self.rank].tolist())
                found = [torch.cat([a, b]) if len(a) else b for a, b in zip(found, others, strict=True)]
            found[self.rank] = data[self.rank]
            return _like(parts[0], found), notes

    def agreed(
        self, work: str, make: Callable[[], Sequence[Tensor]], sizes: Sequence[int], got: Sequence[int]
    ) -> list[Tensor]:
        """Do :meth:`exchange` without a header, right after another one that told all ranks what they send now.

        A word before the data says whether its rank has failed to make it.

        Args:
            work: its name.
            make: returns the parts, of ``sizes`` [R] bytes.
            sizes: bytes for each rank.
            got: [R] bytes from each rank.

        Raises:
            Exception: what ``make`` raised.
            RanksError: another rank could not make its parts.
        """
        parts, failed = list[Tensor](), None
        try:
            parts = list(make())
            data = [torch.cat([(own := bytes_of(part)).new_zeros(_WORD), own]) for part in parts]
        except Exception as error:
            failed = error
            size = _WORD * self.size + sum(sizes)
            whole = self._call(work, lambda: torch.ones(size, dtype=torch.uint8, device="cpu"))
            data = list(whole.split([_WORD + size for size in sizes]))
        found = self._swap(work, data, [_WORD + size for size in got])
        self.sent[work] += sum(sizes) - sizes[self.rank]
        self.sent["headers"] += _WORD * (self.size - 1)
        if failed is not None:
            failed.told = True  # type: ignore[attr-defined]
            with suppress(Exception):
                self._announce("", [0] * self.size, error=failed)
            raise failed
        if any(bool(each[0]) for each in found):
            self._announce(work, [0] * self.size)  # raises what the other rank says
        return _like(parts[0], [each[_WORD:] for each in found])

    def joined(self, work: str, make: Callable[[], Tensor], sizes: Sequence[int]) -> Tensor:
        """Return the tensors of all ranks as one, without a header, as :meth:`agreed` does.

        Args:
            work: its name.
            make: returns a tensor of ``sizes[rank]`` bytes.
            sizes: [R] bytes, which all ranks know.
        """
        own = [sizes[self.rank]] * self.size
        return torch.cat(self.agreed(work, lambda: [make()] * self.size, own, sizes))

    def _swap(self, work: str, data: Sequence[Tensor], got: Sequence[int]) -> list[Tensor]:
        """Send ``data`` [R] bytes, ``got`` [R] of which come; return these. What is for this rank is not sent."""
        sizes, wanted = [len(each) for each in data], list(got)
        sizes[self.rank] = wanted[self.rank] = 0
        others = [each for rank, each in enumerate(data) if rank != self.rank]

        def swap() -> Tensor:
            return self.wire.swap(others[0] if len(others) == 1 else torch.cat([data[0][:0], *others]), sizes, wanted)

        found = list(self._call(work, swap).split(wanted))
        found[self.rank] = data[self.rank]
        return found

    def gather(self, work: str, value: Tensor, said: Sequence[int] = ()) -> list[Tensor]:
        """Return the ``value`` of every rank; all have the same shape but for the first.

        Raises:
            RanksError: what the ranks ``said`` of a step differs.
        """
        found, notes = self.exchange_noted(work, [value] * self.size, said, whom="all")
        if said:
            self.check_step(work, notes)
        return found

    def numbers(self, work: str, own: Sequence[int]) -> list[list[int]]:
        """Return the int64 numbers of every rank, equally many of each."""
        heard = self._announce(f"{work} (to all)", [len(own)] * self.size, own[:_INLINE])
        if any(row[0] != len(own) for row in heard.sizes):
            why = self._differences()
            raise RanksError(
                f"ranks {work} for {', '.join(str(row[0]) for row in heard.sizes)} lookups{why and ': '}{why}. All "
                "must call forward and backward equally often."
            )
        if len(own) <= _INLINE:
            return [each[: len(own)] for each in heard.numbers]
        return [each.tolist() for each in self.gather(work, torch.tensor(own, dtype=torch.int64, device="cpu"))]

    def sums(self, work: str, own: Sequence[int]) -> list[int]:
        """Return the sum over ranks of each of the numbers, which are not negative and have up to 256 bits."""
        limbs = [number >> 32 * place & (_LIMB - 1) for number in own for place in range(_LIMBS)]
        found = self.numbers(work, limbs)
        totals = list(map(sum, zip(*found, strict=True)))
        return [
            sum(value << 32 * place for place, value in enumerate(totals[at : at + _LIMBS]))
            for at in range(0, len(totals), _LIMBS)
        ]

    @contextmanager
    def whole(self, work: str) -> Iterator[None]:
        """End all ranks if the block is interrupted, as by Ctrl-C: the others wait for the rest of its messages."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            if not getattr(error, "told", False):  # by a block within this one
                error.told = True  # type: ignore[attr-defined]
                self.wire.end(
                    f"rank {self.rank} of {self.size} was interrupted ({type(error).__name__}) when it was to {work}. "
                    "Start all ranks again from the last checkpoint."
                )
            raise

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Tell the other ranks if the block fails here."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, RanksError) and not getattr(error, "told", False):  # which the others know
                error.told = True  # type: ignore[attr-defined]
                with suppress(Exception):
                    self._announce("", [0] * self.size, error=error)
            raise

    def _announce(
        self, work: str, sizes: Sequence[int], numbers: Sequence[int] = (), error: Exception | None = None,
        data: Sequence[Tensor] = (),
    ) -> _Heard:  # fmt: skip
        """Return what every rank says: ``sizes`` for each, and ``numbers``, of which a header has 8.

        ``data`` [R] bytes for each rank, ``sizes`` of them: what has room goes along.

        Raises:
            RanksError: another rank failed, or does other work.
        """
        name = work.encode()[: 8 * _NAME].ljust(8 * _NAME)
        text = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:2000]
        header = torch.frombuffer(bytearray(name), dtype=torch.uint8)
        inline = [*numbers, *[0] * (_INLINE - len(numbers))]
        own = torch.tensor([zlib.crc32(work.encode()), len(text), *inline, *sizes], dtype=torch.int64, device="cpu")
        sent = torch.cat([header, own.view(torch.uint8)])
        with self.whole(work or "stop"):  # or this rank would not know what has room in the next message
            found, room, came = self._swap_headers(work, sent, data)
            rows = found[:, len(name) :].contiguous().view(torch.int64).tolist()
            if not any(row[1] for row in rows) and len({row[0] for row in rows}) == 1:
                table = torch.tensor([row[2 + _INLINE :] for row in rows], device="cpu")
                self._make_room(work, table if len(data) else torch.zeros_like(table))
        if most := max(row[1] for row in rows):
            padded = torch.frombuffer(bytearray(text.ljust(most)), dtype=torch.uint8)
            texts = self._call(work, lambda: self.wire.gather(padded))
            failed = [(rank, bytes(texts[rank].tolist()).decode(errors="replace").strip()) for rank in range(self.size)]
            raise RanksError("; ".join(f"rank {rank} stopped: {why}" for rank, why in failed if why))
        if len({row[0] for row in rows}) > 1:
            names = [bytes(row[: len(name)].tolist()).decode(errors="replace").strip() for row in found]
            does = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(names))
            why = self._differences()
            raise RanksError(
                f"ranks do different things ({does}){why and ': '}{why}. All of them must do the same in the same "
                "order: equally many batches, lookups, backwards, reads and writes."
            )
        data = [each[: row[2 + _INLINE + self.rank]] for each, row in zip(came, rows, strict=True)]
        return _Heard([row[2 + _INLINE :] for row in rows], [row[2 : 2 + _INLINE] for row in rows], room, data)

    def _swap_headers(self, work: str, header: Tensor, data: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the headers of all ranks [R, n], the room [R, R] for data after each, and what came in it."""
        self.sent["headers"] += len(header) * (self.size - 1)
        room = self._rooms.sizes.get(self._rooms.last)
        if room is None or not room.any():
            nothing = torch.zeros(self.size, self.size, dtype=torch.int64, device="cpu")
            return self._call(work, lambda: self.wire.gather(header)), nothing, [header[:0]] * self.size
        given = data or [header[:0]] * self.size
        start, sent = header.to(given[0].device), list[Tensor]()
        for size, each in zip(room[self.rank].tolist(), given, strict=True):
            sent.append(torch.cat([start, each[:size], start.new_zeros(max(0, size - len(each)))]))
        found = self._swap(work, sent, (room[:, self.rank] + len(header)).tolist())
        return torch.stack([each[: len(header)] for each in found]).cpu(), room, [each[len(header) :] for each in found]

    def _make_room(self, work: str, sizes: Tensor) -> None:
        """Note that a work followed the last one, with ``sizes`` [R, R] bytes of data: all ranks do the same."""
        rooms, before = self._rooms, self._rooms.sizes.get(self._rooms.last, sizes)
        fits = (sizes <= before) & (before - _WORD < 1.5 * sizes)
        room = torch.where(fits, before, sizes + sizes // _SLACK)
        room = torch.where(room <= _ROOM // self.size, (room + _WORD - 1) // _WORD * _WORD, 0)
        rooms.sizes[rooms.last], rooms.last = room.fill_diagonal_(0), work

    def _call(self, work: str, collective: Callable[[], Tensor]) -> Tensor:
        """Call a collective that all ranks have agreed on: if it fails here, all of them end."""
        try:
            return collective()
        except RanksError:
            raise
        except Exception as error:
            why = str(error).partition("\n")[0].partition(" This is typically")[0].rstrip(".") or type(error).__name__
            raise self.wire.end(
                f"rank {self.rank} of {self.size} failed when it was to {work or 'stop'}: {why}. Start all ranks again "
                "from the last checkpoint."
            ) from error


class _Heard(NamedTuple):
    """What all ranks said of their next work."""

    sizes: list[list[int]]  # [R, R] of what each sends to each
    numbers: list[list[int]]
    room: Tensor  # [R, R] bytes of data that there was room for
    data: list[Tensor]  # of each rank: the first bytes for this one


def check_same(lengths: Sequence[int], *others: Sequence[int]) -> None:
    """Raise an error on all ranks if they have gradients of other numbers of parameters, or ``others`` differ.

    Raises:
        RanksError: they do.
    """
    if any(len(set(each)) > 1 for each in (lengths, *others)):
        raise RanksError(
            f"the ranks have gradients of {', '.join(f'{each:,}' for each in lengths)} numbers, or of several types, "
            "so they cannot be added. Build the same model on every rank, and let the loss use all of its parameters."
        )


def bits_of(value: float) -> int:
    """Return the bits of a float64, as an int64."""
    found: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return found


def plain(value: Any) -> str:
    """Return a text that is equal for equal settings: of an object without fields, the name of its type."""
    if isinstance(value, str | None):
        return repr(value)
    if isinstance(value, Number):
        return repr(complex(value))  # type: ignore[call-overload]
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(plain(getattr(value, each.name)) for each in fields(value))})"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(plain, value))}]"
    return type(value).__name__


def checksum(tensors: Iterable[Tensor], *others: object) -> int:
    """Return a number of the bytes of some tensors, and of ``others``."""
    found = zlib.crc32(repr(others).encode())
    for each in tensors:
        found = zlib.crc32(bytes_of(each.detach().cpu()).numpy().data, found)
    return found


def bytes_of(value: Tensor) -> Tensor:
    """Return the bytes of a tensor [n] uint8, in its own memory if it is contiguous."""
    flat = value.contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element is contiguous with any stride


def _like(first: Tensor, found: Sequence[Tensor]) -> list[Tensor]:
    """Return bytes as tensors that differ from ``first`` in the first dimension alone."""
    return [_aligned(each).view(first.dtype).view(-1, *first.shape[1:]) for each in found]


def _aligned(data: Tensor) -> Tensor:
    return data if data.storage_offset() % 8 == 0 else data.clone()
