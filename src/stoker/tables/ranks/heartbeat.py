"""Signs of life between ranks, through the store of their process group.

A collective that waits for a stopped process, or for a machine without network, gets no error: it waits for the timeout
of the group, which must exceed the longest time that one rank works alone. So a thread of each rank counts up a number
in the store every second, whatever the rank does. A rank that waits looks at the numbers of the others, and ends when
one of them stands still.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store, _world

from stoker.base.errors import StokerError

_BEAT = 1.0  # seconds
_GONE = 4  # beats without a sign of a rank whose connection was closed
_owners: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()  # heartbeats so far
_AGAIN = "Start all ranks again from the last checkpoint."


class RanksError(StokerError):
    """Ranks that do not work together: one ended, one failed, or they do different work.

    >>> issubclass(stoker.distributed.RanksError, stoker.StokerError)
    True
    """

    told = False  # whether another rank reports it
    lost = False  # whether the process of another rank may be gone


class Heartbeat:
    """The signs of life of a rank, until ``owner`` is garbage.

    Args:
        owner: waits for collectives of the group.
        group: its other ranks have a heartbeat, too.
        timeout: seconds without a sign of life after which a rank is lost.
        polls: whether a wait for a collective may end before it. NCCL would abort the collective; its watchdog is
            what ends the process.
    """

    def __init__(self, owner: object, group: dist.ProcessGroup, timeout: float, *, polls: bool) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._limit = max(_GONE, round(timeout / _BEAT))  # beats of this rank, so that it may be slow itself
        self._poll = (timedelta(seconds=_BEAT),) if polls else ()
        self._seen: list[bytes | None] = [None] * self._size
        self._silent = [0] * self._size  # of each rank: beats without a sign
        self._heard = [time.monotonic()] * self._size  # of each rank: when a sign of it came
        self._beats = 0
        self._pending = self._waits = False  # for a collective; for longer than a beat
        self._lost = False  # whether a connection to another rank was closed
        self._says = self._why = ""  # the rank that reports it, and why all ranks end: what this one says, what all say
        # A connection of its own: other uses of the store may hold the shared one for long.
        store: Any = _get_process_group_store(group)
        _owners[group] = number = _owners.get(group, 0) + 1
        self._store: Any = PrefixStore(f"stoker/{number}", store.clone())
        self._beat()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(group,), name="stoker-heartbeat", daemon=True)
        self._thread.start()
        weakref.finalize(owner, self._end)  # at the latest at exit, which a thread in C++ would make fail
        atexit.register(self._say_why)  # before that

    def check(self) -> None:
        """Raise :class:`RanksError` if all ranks were ended before."""
        if self._why:
            raise self._error()

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective.

        Raises:
            RanksError: another rank is silent, gone, or has ended all of them.
        """
        self._pending = True
        beats, still = self._beats, 0
        while not self._is_done(work):
            self._pending = self._waits = True
            still = still + 1 if beats == self._beats else 0
            beats = self._beats
            if still > self._limit:
                self._why = self._why or self._without_store()
            self.check()
        self._pending = self._waits = False

    def _is_done(self, work: dist.Work) -> bool:
        try:
            work.wait(*self._poll)
        except RuntimeError:
            if not work.is_completed():
                return False
            try:
                work.wait()
            except RuntimeError:
                self._lost = self._waits = True
                self._find(2 * _GONE)
                self.check()
                raise
        return True

    def end(self, why: str) -> RanksError:
        """End all ranks that wait, whatever they wait for; return the error that they raise."""
        self._says = f"0 {why}"
        self._find(_GONE)
        self._why = self._why or self._says
        return self._error()

    def _find(self, beats: int) -> None:
        """Wait some beats for the reason why the ranks end."""
        end = time.monotonic() + beats * _BEAT
        while not self._why and time.monotonic() < end:
            time.sleep(_BEAT / 20)

    def _error(self) -> RanksError:
        if self._rank == 0:
            time.sleep(2 * _BEAT)  # it may keep the store, where the others look for the reason every beat
        reporter, _, why = self._why.partition(" ")
        error = RanksError(why)
        error.told, error.lost = int(reporter) != self._rank, True
        return error

    def _say_why(self) -> None:
        """Tell the other ranks of the exception that ends this process, unless they know it."""
        error = getattr(sys, "last_value", None)
        known = self._why or isinstance(error, RanksError) or getattr(error, "told", False)
        if error is not None and not known and self._thread.is_alive() and not hasattr(sys, "ps1"):
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            self.end(f"rank {self._rank} of {self._size} stopped: {what}. {_AGAIN}")

    def _end(self) -> None:
        atexit.unregister(self._say_why)
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_BEAT)

    # ---- in the thread, as the store may not answer

    def _run(self, group: dist.ProcessGroup) -> None:
        try:
            while not self._stop.wait(_BEAT) and group in _world.pg_map:
                self._beat()
                if self._waits or self._says:
                    self._look()
                self._beats += 1
        except RuntimeError:
            self._why = self._why or self._without_store()
        if self._pending:
            threading.Event().wait()  # keeps the group: closing it, even at exit, would wait for the collective

    def _beat(self) -> None:
        self._store.add(f"alive/{self._rank}", 1)

    def _look(self) -> None:
        """Find out why all ranks end: what one of them says, or that some were alive and no longer are."""
        for rank, seen in enumerate(self._seen):
            found = self._store.get(key) if self._store.check([key := f"alive/{rank}"]) else seen
            self._silent[rank] = 0 if found != seen or found is None else self._silent[rank] + 1
            self._seen[rank] = found
            if not self._silent[rank]:
                self._heard[rank] = time.monotonic()
        silent = [rank for rank in range(self._size) if self._is_silent(rank)]
        if not self._says and silent:
            reporter = next(rank for rank in range(self._size) if rank not in silent)
            self._says = f"{reporter} {self._cause(silent)}"
        if self._says:
            self._why = self._store.compare_set("end", "", self._says).decode()
        elif self._store.check(["end"]):
            self._why = self._store.get("end").decode()

    def _is_silent(self, rank: int) -> bool:
        """Return True for a rank without a sign for so many own beats; half as many do if these take long."""
        beats, limit = self._silent[rank], _GONE if self._lost else self._limit
        late = time.monotonic() - self._heard[rank] > 1.25 * limit * _BEAT
        return beats >= limit or (late and 2 * beats >= limit)

    def _cause(self, silent: Sequence[int]) -> str:
        who = f"rank{'s' * (len(silent) > 1)} {' and '.join(map(str, silent))} of {self._size}"
        if self._lost:
            return f"{who} ended, or the network is down. Look for an error there. {_AGAIN}"
        seconds = f"{self._limit * _BEAT:g} s"
        return f"{who} gave no sign of life for {seconds}: stopped or killed, or the network is down. {_AGAIN}"

    def _without_store(self) -> str:
        return (
            f"{self._rank} rank {self._rank} of {self._size} cannot reach the store of the process group, which rank 0 "
            f"or torchrun keeps: that process ended or stopped, or the network is down. {_AGAIN}"
        )
