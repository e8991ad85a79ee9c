"""Let a thread that works while requests are answered give Python's lock to other threads.

Python lets a thread keep its lock for 5 ms while others wait, and a score takes the lock again after each operation of
torch. So 10 ms of Python in another thread delay a request by 10 ms or more. A shorter interval for all threads
(``sys.setswitchinterval``) does not help: a score still waits once for each operation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_WORK = 0.0002  # seconds until this thread sleeps
_SLEEP = 0.0015  # long enough for another thread to wake and do some operations


def give_way(busy: Callable[[], bool]) -> None:
    """Sleep often in this thread from now on, at calls of functions.

    Args:
        busy: returns True while others wait for what this thread does, so that it should not sleep.

    >>> import threading
    >>> thread = threading.Thread(target=give_way, args=(lambda: False,))
    >>> thread.start()
    """
    began = time.perf_counter()

    def profiled(frame: object, event: str, argument: object) -> None:
        nonlocal began
        if time.perf_counter() - began > _WORK and not busy():
            time.sleep(_SLEEP)
            began = time.perf_counter()

    sys.setprofile(profiled)
