"""Training runs in processes of their own, which may be killed at any moment.

Importing and loading kernels takes seconds, a run of a hundred tiny steps less. So one server process, itself a fork
(tests/processes.py), does one run to have everything in memory, and then forks a child for each further one. No thread
of that run is left: none would survive a fork.

A kill, or another signal, comes by the clock, or a few moments after the n-th call of a function (:data:`EVENTS`),
which may lie in the middle of what it calls.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from campaigns import numbers
from processes import context, start_process

__all__ = ["EVENTS", "Ended", "Server", "kill_numbers"]

#: What a run does, by what is called in it.
EVENTS = ("checkpoint", "rename", "staging", "writeback", "step")


def kill_numbers(default: int) -> range:
    """The kills to do: those of the environment's ``STOKER_KILLS=100:120``, or those of a campaign of ``default``."""
    first, _, last = os.environ.get("STOKER_KILLS", "all").partition(":")
    return range(int(first), int(last)) if last else numbers(default)


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    signal: int  # 0: by itself; below 0: by itself, with the exit status -signal
    seconds: float
    events: dict[str, int]  # calls, where it ended by itself
    messages: str  # standard error

    @property
    def killed(self) -> bool:
        return self.signal == signal.SIGKILL


class Server:
    """The process that forks; runs lie on the CPU. A context manager.

    Args:
        folder: for messages.
        given: arguments of ``stoker.train`` for a first run, which is done in this process.
        settings: keyword arguments of it.
    """

    def __init__(self, folder: Path, *given: Any, **settings: Any) -> None:
        self._messages = folder / "messages.txt"
        self._orders, theirs = context().Pipe()
        self._process = start_process(_serve, theirs, self._messages, folder / "events.json")
        theirs.close()
        self._ask({"given": given, "settings": settings})

    def run(
        self,
        *given: Any,
        after: float | None = None,
        event: str | None = None,
        number: int = 0,
        delay: float = 0.0,
        begun: Path | None = None,
        kill: int = signal.SIGKILL,
        loop: bool = False,
        **settings: Any,
    ) -> Ended:
        """``stoker.train`` with these arguments in a child.

        Args:
            given: positional arguments.
            after: kill it after so many seconds, from when the file ``begun`` is there.
            kill: by this signal.
            loop: run :func:`own_loop` instead.
            event: or kill it ``delay`` seconds after call ``number`` of this event.
            settings: keyword arguments.
        """
        order = {"given": given, "settings": settings, "after": after, "event": event, "number": number, "delay": delay}
        order |= {"begun": begun, "kill": int(kill), "loop": loop}
        ended = Ended(**self._ask(order), messages=self._messages.read_text())
        assert ended.signal in (0, kill, -128 - kill), ended.messages
        return ended

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        self._orders.send(order)
        found: dict[str, Any] = self._orders.recv()  # EOFError: the server has ended
        return found

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._orders.close()
        self._process.join(30)


#: Of :func:`own_loop`. No checkpoint "last" is written at it: a run resumed after it would go on to the stream's end.
LAST_STEP = 75


def own_loop(path: str, *, out: str, home: str | None) -> None:
    """A loop of one's own, continued where it was killed: accumulation, a scaler, evaluation inside, checkpoints.

    Args:
        path: of the dataset.
        out: for the checkpoints "last" and "final".
        home: for a file with the rows that are not cached; None keeps all rows on the device.
    """
    import torch

    import stoker

    data, last = stoker.Dataset(path), Path(out) / "last"
    torch.manual_seed(0)
    placement = None if home is None else stoker.Cached(slots=150, home="file", path=home, host_memory="12KiB")
    model = stoker.DLRM(
        data.schema, embedding_dim=4, bottom=(8,), top=(8,), optimizer=stoker.Adagrad(lr=0.1), placement=placement
    )
    dense, rows = torch.optim.Adam(model.dense_parameters(), lr=0.01), model.embeddings.as_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=5)
    stream = data.train.batches(32, seed=0)
    if last.exists():
        stoker.load(last, into=model, optimizer=dense, stream=stream, extra_state={"scaler": scaler})
    staged = stoker.stage(stream, model, lookahead=4)
    for batch in staged:
        scaler.scale(model.loss(batch) / 2).backward()
        if batch.step % 2:
            for optimizer in (dense, rows):
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        if batch.step % 10 == 9:
            stoker.evaluate(model, data.valid, batch_size=64, lookahead=2)
            model.train()
            stoker.save(last, model, dense, staged, extra_state={"scaler": scaler}, overwrite=True)
        if batch.step == LAST_STEP:
            break
    stoker.save(Path(out) / "final", model, dense, staged, extra_state={"scaler": scaler}, overwrite=True)
    model.embeddings.close()


def _serve(orders: Connection, messages: Path, events: Path) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import stoker

    order = orders.recv()
    stoker.train(*order["given"], **order["settings"]).model.embeddings.close()
    assert threading.active_count() == 1
    orders.send({})
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        events.unlink(missing_ok=True)
        begin, begun, kill = time.monotonic(), None, order["kill"]
        child = os.fork()
        if child == 0:
            _child(order, messages, events)
        ended = 0
        while not ended:
            ended, status = os.waitpid(child, os.WNOHANG)
            if begun is None and (order["begun"] is None or os.path.exists(order["begun"])):
                begun = time.monotonic()
            if not ended and None not in (order["after"], begun, kill) and time.monotonic() - begun >= order["after"]:
                os.kill(child, kill)
                kill = None
            time.sleep(0.0005)
        found = json.loads(events.read_text()) if events.exists() else {}
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)
        orders.send({"signal": number, "seconds": time.monotonic() - begin, "events": found})


def _child(order: dict[str, Any], messages: Path, events: Path) -> None:
    descriptor = os.open(messages, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    os.dup2(descriptor, 1)
    code = 1
    import stoker

    try:
        counts = _watch(order)
        if order["loop"]:
            own_loop(*order["given"], **order["settings"])
        else:
            stoker.train(*order["given"], **order["settings"]).model.embeddings.close()
        events.write_text(json.dumps(counts))
        code = 0
    except stoker.training.Interrupted as stopped:
        print(stopped, file=sys.stderr)
        code = stopped.exit_code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _watch(order: dict[str, Any]) -> Counter[str]:
    """Count the events from here on, and die ``order["delay"]`` seconds after the one that was ordered."""
    from stoker.models import RecModel
    from stoker.tables.slots.slotted import Queue
    from stoker.tables.stores.file_home import FileHome
    from stoker.tables.stores.home import MemoryHome
    from stoker.tables.stores.log_home import LogHome
    from stoker.training.files import checkpoint

    counts: Counter[str] = Counter()

    def watch(owner: Any, name: str, event: str) -> None:
        real = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            if event == order["event"] and counts[event] == order["number"]:
                threading.Timer(order["delay"], os.kill, (os.getpid(), signal.SIGKILL)).start()
            counts[event] += 1
            return real(*given, **named)

        setattr(owner, name, call)

    watch(checkpoint._Writer, "write", "checkpoint")
    watch(os, "replace", "rename")
    watch(Queue, "stage", "staging")
    watch(FileHome, "_store", "writeback")
    watch(LogHome, "_store", "writeback")
    watch(MemoryHome, "_store", "writeback")
    watch(RecModel, "loss", "step")
    return counts
