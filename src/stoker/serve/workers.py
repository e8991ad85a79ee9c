"""Several processes that answer on one socket, each with a model of its own."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, Thread

from stoker.base.errors import ConfigError, StokerError

__all__ = ["GRACE", "listen", "processes"]

_LOST = "stoker-lost"  # a thread whose process ended by itself
GRACE = 6.0  # seconds after Ctrl-C or SIGTERM in which requests that have come are answered
_ENDS = GRACE + 2.0  # seconds in which the first process ends, if Ctrl-C came for all


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, for processes that are forked later.

    Raises:
        StokerError: the address cannot be had.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python repeats the address
        raise StokerError(f"{host}:{port} cannot be served: {reason}. Choose another host or port.") from error


@contextmanager
def processes(count: int) -> Iterator[int]:
    """Run the block in ``count`` processes: this one, which gets 0, and forks of it, which get 1, 2 and so on.

    A fork ends when its block ends, or when this process does, however that ends. If a fork ends first, this process
    gets SIGTERM some seconds later. Call this before any thread computes: threads are not forked.

    Raises:
        ConfigError: this system cannot fork.
        StokerError: a fork ended first.
    """
    if count > 1 and not hasattr(os, "fork"):
        raise ConfigError("several workers need a system that forks, such as Linux. Give workers=1.")
    alive, until = os.pipe()  # nobody writes: its end is that of the first process
    forks, ending = list[int](), Event()
    for number in range(1, count):
        if (fork := os.fork()) == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to all, and the first process ends the others
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # while the block lets it
            os.close(until)
            _then(partial(os.read, alive, 1))
            try:
                yield number
            except Exception as error:
                print(f"error: worker {number}: {error}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        forks.append(fork)
    waiting = [_then(partial(os.waitpid, fork, 0), unless=ending) for fork in forks]
    try:
        yield 0
    finally:
        ending.set()
        for fork in forks:
            with suppress(ProcessLookupError):
                os.kill(fork, signal.SIGTERM)
        for thread in waiting:
            thread.join(_ENDS)
        os.close(alive)
        os.close(until)
    if any(thread.name == _LOST for thread in waiting):
        raise StokerError("a worker process ended, so the server did. Look for its error, or for a lack of memory.")


def _then(wait: Callable[[], object], unless: Event | None = None) -> Thread:
    """End this process as by SIGTERM when ``wait`` returns."""

    def work() -> None:
        with suppress(OSError):
            wait()
        if unless is None or not unless.wait(_ENDS):
            thread.name = _LOST
            os.kill(os.getpid(), signal.SIGTERM)

    thread = Thread(target=work, name="stoker-workers", daemon=True)
    thread.start()
    return thread
