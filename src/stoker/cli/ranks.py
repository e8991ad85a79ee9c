"""``stoker train`` on several processes: start them, join a group of them, end them together."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from stoker.base.device import cpu_count
from stoker.base.errors import ConfigError
from stoker.cli.options import say

if TYPE_CHECKING:
    from stoker.tables import Ranks

typed: list[str] = []  # the arguments of this command
_PIPE = "STOKER_STARTED_BY"  # the end of a pipe whose other end the process has that started this one
_MEET = timedelta(minutes=2)  # for all ranks to start
_ALONE = timedelta(days=1)  # that one rank may work while others wait; lost ranks are found by their heartbeats
# Seconds for the other ranks to end after one has lost another, one has failed, or the first has ended.
_GIVEN_UP, _PATIENCE, _CLOSING = 5.0, 10.0, 60.0
_LOST = 3  # exit code of a rank that lost another one, for the process that started them


def is_started() -> bool:
    """Return True in a process that torchrun or :func:`launch` started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def speaks(error: BaseException | None = None) -> bool:
    """Return True if this process prints its result or an error: of several ranks, the first one does.

    Another one prints an error that the first one does not know. Why a process is gone is best known to :func:`launch`.
    """
    if not is_started():
        return True
    first = os.environ["RANK"] == "0"
    if _PIPE in os.environ and getattr(error, "lost", False):
        return not first
    said = getattr(error, "told", False) or " stopped: " in str(error) or isinstance(error, KeyboardInterrupt)
    return first or (error is not None and not said)


def exit_code(error: BaseException) -> int:
    """Return the exit code of this process for an error of the user."""
    return _LOST if _PIPE in os.environ and getattr(error, "lost", False) else 2


@contextmanager
def joined(wanted: int | None) -> Iterator[Ranks | None]:
    """Yield the ranks of a process that was started as one of ``wanted``; else None."""
    if not is_started():
        yield None
        return
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from stoker.tables import Ranks

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if wanted not in (None, count):
        raise ConfigError(f"--ranks is {wanted}, but {count} processes were started. Leave it out.")
    if _PIPE in os.environ:
        threading.Thread(target=_end_with, args=(int(os.environ[_PIPE]),), daemon=True).start()
    missing: list[int] = []
    try:
        store, _, _ = next(rendezvous("env://", timeout=_MEET))
        keys = [f"stoker/{each}" for each in range(count)]
        store.set(keys[rank], "here")
        with suppress(dist.DistStoreError):
            store.wait(keys, _MEET)
        if missing := [each for each, key in enumerate(keys) if not store.check([key])]:
            raise RuntimeError(f"rank {missing[0]} did not start within {_MEET.total_seconds():g} s")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=_ALONE)
    except (RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        unmet = ConfigError(
            f"rank {rank} of {count} cannot meet the others: {why}. Look at MASTER_ADDR, MASTER_PORT and, if a machine "
            "has several networks, GLOO_SOCKET_IFNAME."
        )
        unmet.told = bool(missing) and 0 not in missing  # type: ignore[attr-defined]
        raise unmet from error
    yield Ranks()
    dist.destroy_process_group()


def _end_with(pipe: int) -> None:
    """End like by SIGTERM when the process that has the other end of the pipe has ended."""
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def launch(ranks: int, dataset: Path | None) -> NoReturn:
    """Run this command in ``ranks`` processes, on ``dataset``; exit as they do."""
    arguments = _arguments(dataset)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reader, writer = os.pipe()
    threads = max(1, cpu_count() // ranks)
    shared = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        _PIPE: str(reader), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }  # fmt: skip
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "stoker", *arguments], pass_fds=[reader], start_new_session=True,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL if rank else None, stderr=errors[rank] if rank else None,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        os.close(reader)

        def forward(number: int, frame: FrameType | None) -> None:
            for each in running:
                each.send_signal(number)

        before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            left = _wait(running)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(writer)
        for each in errors:
            each.seek(0)
        printed = [each.read().decode(errors="replace").strip() for each in errors]
        raise SystemExit(_said([each.returncode for each in running], left, printed))


def _arguments(dataset: Path | None) -> list[str]:
    """Return the arguments of this command, with the dataset of a raw log in its place."""
    from stoker.cli.prepare import is_log

    return [str(dataset) if not each.startswith("-") and is_log(Path(each)) else each for each in typed]


def _wait(running: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for all processes; return those that are ended here, as they do not end soon after one has failed."""
    end = math.inf
    while time.monotonic() < end and (codes := [each.poll() for each in running]).count(None):
        if end == math.inf and (codes[0] is not None or any(codes)):
            end = time.monotonic() + (_GIVEN_UP if _LOST in codes else _PATIENCE if any(codes) else _CLOSING)
        time.sleep(0.05)
    left = [rank for rank, each in enumerate(running) if each.poll() is None]
    for rank in left:
        running[rank].kill()
        running[rank].wait()
    return left


def _said(codes: Sequence[int], left: Sequence[int], printed: Sequence[str]) -> int:
    """Say why ranks failed, unless the first one has said it; return the exit code.

    ``left``: ranks that were ended at last; ``printed``: the errors of each rank but the first one.
    """
    killed = [rank for rank, code in enumerate(codes) if code < 0 and rank not in left]
    own = [rank for rank, code in enumerate(codes) if code > 0 and code != _LOST]
    if own:  # it says why; PyTorch may abort another rank that exits
        if own[0] and (printed[own[0]] or codes[0] >= 0):
            _fail(f"rank {own[0]}: {printed[own[0]].removeprefix('error: ') or 'failed without a message.'}")
        return codes[own[0]]
    if killed:
        number = signal.Signals(-codes[killed[0]])
        memory = ". The system does so when memory runs out" if number == signal.SIGKILL else ""
        _fail(f"{_names(killed)} ended by {number.name}{memory}. Start again with --resume.")
        return 128 + number
    if left:
        _fail(f"{_names(left)} ended, after no sign of life: stopped, or waiting for a disk or memory.")
    elif any(codes):
        _fail(next(filter(None, printed), "ranks lost each other.").removeprefix("error: "))
    return 2 if any(codes) else 0


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))} {'were' if len(ranks) > 1 else 'was'}"


def _fail(message: str) -> None:
    say(f"error: {message}", "red", error=True)
