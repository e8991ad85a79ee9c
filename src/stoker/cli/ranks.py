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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, NoReturn

from stoker.base.device import cpu_count
from stoker.base.errors import ConfigError
from stoker.cli.options import say

if TYPE_CHECKING:
    from stoker.tables import Ranks

typed: list[str] = []  # the arguments of this command
_PIPE = "STOKER_STARTED_BY"  # the end of a pipe whose other end the process has that started this one
_PATIENCE = 30.0  # seconds for the other ranks to end after the first one has


def is_started() -> bool:
    """Return True in a process that torchrun or :func:`launch` started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def speaks(error: BaseException | None = None) -> bool:
    """Return True if this process prints its result or an error: of several ranks, the first one does.

    Another one prints an error that the first one does not know.
    """
    if not is_started() or os.environ["RANK"] == "0":
        return True
    said = getattr(error, "told", False) or " stopped: " in str(error) or isinstance(error, KeyboardInterrupt)
    return error is not None and not said


@contextmanager
def joined(wanted: int | None) -> Iterator[Ranks | None]:
    """Yield the ranks of a process that was started as one of them; else None.

    Raises:
        ConfigError: there are other than ``wanted`` ones, or they cannot meet.
    """
    if not is_started():
        yield None
        return
    import torch.distributed as dist

    from stoker.tables import Ranks

    count = int(os.environ["WORLD_SIZE"])
    if wanted not in (None, count):
        raise ConfigError(f"--ranks is {wanted}, but {count} processes were started. Leave it out.")
    if _PIPE in os.environ:
        threading.Thread(target=_end_with, args=(int(os.environ[_PIPE]),), daemon=True).start()
    try:
        dist.init_process_group("gloo")
    except (RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"rank {os.environ['RANK']} of {count} cannot meet the others: {why}. Look at MASTER_ADDR, MASTER_PORT "
            "and, if a machine has several networks, GLOO_SOCKET_IFNAME."
        ) from error
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
            _wait(running)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(writer)
        raise SystemExit(_said(running, errors))


def _arguments(dataset: Path | None) -> list[str]:
    """Return the arguments of this command, with the dataset of a raw log in its place."""
    from stoker.cli.prepare import is_log

    return [str(dataset) if not each.startswith("-") and is_log(Path(each)) else each for each in typed]


def _wait(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all processes; once the first rank has ended or one has failed, the others get some time to end, too."""
    end = math.inf
    while time.monotonic() < end and (codes := [each.poll() for each in running]).count(None):
        if end == math.inf and (codes[0] is not None or any(codes)):
            end = time.monotonic() + _PATIENCE
        time.sleep(0.05)
    for rank, each in enumerate(running):
        if each.poll() is None:
            say(f"rank {rank} did not end within {_PATIENCE:g} s of the others, and is ended now.", "red", error=True)
            each.kill()
            each.wait()


def _said(running: Sequence[subprocess.Popen[bytes]], errors: Sequence[IO[bytes]]) -> int:
    """Say which rank failed, if the first one did not; return the exit code."""
    first = running[0].returncode
    for rank, each in enumerate(running):
        if each.returncode < 0:
            say(f"rank {rank} was ended by {signal.Signals(-each.returncode).name}.", "red", error=True)
    if first <= 0:
        for rank, each in enumerate(running):
            if each.returncode > 0:
                errors[rank].seek(0)
                say(f"rank {rank}: {errors[rank].read().decode(errors='replace').strip()}", "red", error=True)
    codes = [first, *(each.returncode for each in running)]
    code = next((each for each in codes if each), 0)
    return code if code >= 0 else 128 - code
