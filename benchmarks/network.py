"""Ranks in network namespaces of one machine, joined by a slow network: how much of a step waits for it.

A relay stands in for ``tc qdisc ... netem``, which not every kernel has: each rank has a namespace with a tunnel, and
the relay passes packets on after the delay, at the rate of each sender. It needs root and ``/dev/net/tun``. Packets are
large (60,000 bytes), so that it can keep up: TCP's window opens at once, and headers cost nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import multiprocessing
import os
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from benchmarks.harness import Crashed, NotRun, Outcome, Run, Table

__all__ = ["DEVICE", "Network", "address", "enter", "measure_network"]

DEVICE = "ranks0"
_NEWNET = 0x40000000
_MTU = 60_000
_SETIFF, _NO_PI, _TUN = 0x400454CA, 0x1000, 0x0001
_SET_FLAGS, _SET_ADDRESS, _SET_NETMASK, _SET_MTU, _UP = 0x8914, 0x8916, 0x891C, 0x8922, 0x1
_libc = ctypes.CDLL(None, use_errno=True)


def address(rank: int) -> str:
    """Return the address of a rank."""
    return f"10.77.0.{rank + 1}"


def enter(namespace: str) -> None:
    """Move this thread, and those that it will start, to a namespace of :attr:`Network.namespaces`."""
    with open(namespace) as file:
        if _libc.setns(file.fileno(), _NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


class Network:
    """Namespaces of some ranks, and the relay between them. A context manager.

    Args:
        ranks: how many.
        delay: seconds from one rank to another.
        rate: bytes a second that a rank may send; 0 means any.

    Raises:
        NotRun: the kernel or the rights of this user do not allow it.
    """

    def __init__(self, ranks: int, delay: float = 0.0, rate: float = 0.0) -> None:
        self.delay, self.rate, self.cut = delay, rate, set[int]()  # ranks whose packets are lost
        self.namespaces: list[str] = []
        self._tunnels: list[int] = []
        self._files: list[int] = []
        self._stop = False
        failures: list[OSError] = []

        def make(rank: int) -> None:
            try:
                self._make(rank)
            except OSError as error:
                failures.append(error)

        for rank in range(ranks):  # a namespace belongs to a thread until a process enters it
            thread = threading.Thread(target=make, args=(rank,))
            thread.start()
            thread.join()
        if failures:
            self._close()
            raise NotRun(f"network namespaces: root and /dev/net/tun ({failures[0]})")
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._thread.start()

    def _make(self, rank: int) -> None:
        if _libc.unshare(_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot make a network namespace")
        self._files.append(file := os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        self.namespaces.append(f"/proc/{os.getpid()}/fd/{file}")
        self._tunnels.append(tunnel := os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        name = DEVICE.encode().ljust(16, b"\0")
        fcntl.ioctl(tunnel, _SETIFF, name + struct.pack("H", _TUN | _NO_PI) + bytes(22))

        def ipv4(text: str) -> bytes:
            return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            fcntl.ioctl(made, _SET_ADDRESS, name + ipv4(address(rank)))
            fcntl.ioctl(made, _SET_NETMASK, name + ipv4("255.255.255.0"))
            fcntl.ioctl(made, _SET_MTU, name + struct.pack("i", _MTU) + bytes(12))
            for each in (name, b"lo".ljust(16, b"\0")):
                fcntl.ioctl(made, _SET_FLAGS, each + struct.pack("H", _UP) + bytes(14))

    def _relay(self) -> None:
        poll, numbers = select.poll(), {tunnel: rank for rank, tunnel in enumerate(self._tunnels)}
        for tunnel in self._tunnels:
            poll.register(tunnel, select.POLLIN)
        free = [0.0] * len(numbers)  # when each rank has sent what it gave
        due: list[tuple[float, int, int, bytes]] = []
        count = 0
        while not self._stop:
            wait = max(0.0, due[0][0] - time.perf_counter()) if due else 0.1
            for tunnel, _ in poll.poll(wait * 1e3):
                packet, sender = os.read(tunnel, _MTU + 100), numbers[tunnel]
                receiver = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the end of an IPv4 address
                if not 0 <= receiver < len(free) or {sender, receiver} & self.cut:
                    continue
                free[sender] = max(free[sender], time.perf_counter()) + (len(packet) / self.rate if self.rate else 0)
                heapq.heappush(due, (free[sender] + self.delay, count := count + 1, receiver, packet))
            while due and due[0][0] <= time.perf_counter():
                _, _, receiver, packet = heapq.heappop(due)
                with suppress(OSError):  # a full queue loses it, as elsewhere
                    os.write(self._tunnels[receiver], packet)

    def _close(self) -> None:
        for file in (*self._tunnels, *self._files):
            os.close(file)

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop = True
        self._thread.join()
        self._close()


RANKS, BATCH, TABLES, ROWS, DIM = 4, 1024, 8, 20_000, 16
GIGABIT, MILLISECOND = 1e9 / 8, 1e-3
BLOCKS, STEPS, SKIPPED = 6, 16, 3  # slow and fast blocks in turns; steps of one, of which the first are not timed


def measure_network(run: Run) -> Outcome:
    """The exposed communication of a step with lookahead 16, of that with lookahead 1: what the slow network adds."""
    added: dict[int, list[float]] = {1: [], 16: []}
    steps: dict[str, list[float]] = {}
    for number in range(run.rounds):
        for lookahead in (1, 16) if number % 2 else (16, 1):
            run.log(f"round {number + 1}/{run.rounds}: lookahead {lookahead}")
            fast, slow = _times(lookahead)
            added[lookahead].append(slow - fast)
            steps.setdefault(f"lookahead {lookahead}, no delay", []).append(fast)
            steps.setdefault(f"lookahead {lookahead}, 1 Gbit/s and 1 ms", []).append(slow)
    value = statistics.median(b / a for a, b in zip(added[1], added[16], strict=True))
    rows = [[name, f"{statistics.median(each) * 1e3:.1f}"] for name, each in steps.items()]
    rows += [[f"lookahead {name}: exposed", f"{statistics.median(each) * 1e3:.1f}"] for name, each in added.items()]
    table = Table(title=f"A step of {RANKS} ranks", columns=["case", "ms"], rows=rows)
    return Outcome(value=value, tables=[table], data={"seconds": steps})


def _times(lookahead: int) -> tuple[float, float]:
    """Return the seconds of a step in a fast network, and in the slow one."""
    started = multiprocessing.get_context("spawn")  # children of this process, so that their time is not others'
    with Network(RANKS) as network:
        mine, theirs = started.Pipe()
        running = [
            started.Process(target=_train, args=(rank, network.namespaces[rank], lookahead, theirs), daemon=True)
            for rank in range(RANKS)
        ]
        for each in running:
            each.start()
        theirs.close()
        try:
            while isinstance(told := mine.recv(), str):
                network.delay, network.rate = (MILLISECOND, GIGABIT) if told == "slow" else (0.0, 0.0)
        except EOFError:
            raise Crashed("a rank of the network's benchmark failed") from None
        finally:
            for each in running:
                each.kill()
                each.join()
    return told["fast"], told["slow"]


def _batches(count: int) -> Iterator[Any]:
    import torch

    import stoker

    generator = torch.Generator().manual_seed(0)
    for step in range(count):
        ids = (torch.rand(BATCH, TABLES, generator=generator).pow(3) * ROWS).long()  # low ids are frequent
        dense = torch.rand(BATCH, 13, generator=generator)
        yield stoker.Batch(dense=dense, ids=ids, labels=(ids[:, 0] % 2).float(), step=step)


def _train(rank: int, namespace: str, lookahead: int, pipe: Connection) -> None:
    enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    import torch
    import torch.distributed as dist

    import stoker

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address(0)}:29500", rank=rank, world_size=RANKS)
    ranks = stoker.distributed.Ranks()
    model = stoker.DLRM(
        stoker.FeatureSpec.from_sizes(13, [ROWS] * TABLES), embedding_dim=DIM, bottom=(64, 32), top=(64,),
        optimizer=stoker.RowWiseAdagrad(lr=0.05), placement=stoker.Cached(fraction=0.2), shards=8, ranks=ranks,
    )  # fmt: skip
    dense = torch.optim.SGD(model.dense_parameters(), lr=0.05)
    loss_of = stoker.distributed.ShardedLoss(model)
    times: dict[str, list[float]] = {"fast": [], "slow": []}
    shares = stoker.distributed.Shares(_batches(2 * BLOCKS * STEPS), ranks, 8)
    begin = time.perf_counter()
    for batch in stoker.stage(shares, model, lookahead=lookahead):
        block, place = divmod(batch.step, STEPS)
        loss_of(batch).backward()
        dense.step()
        dense.zero_grad()
        if block and place >= SKIPPED:
            times[("fast", "slow")[block % 2]].append(time.perf_counter() - begin)
        if rank == 0 and place == STEPS - 1:
            pipe.send(("slow", "fast")[block % 2])
        begin = time.perf_counter()
    if rank == 0:
        # Others may use the cores: the lower quartile is of steps that they left alone.
        pipe.send({name: sorted(each)[len(each) // 4] for name, each in times.items()})
    model.embeddings.close()
    dist.destroy_process_group()
