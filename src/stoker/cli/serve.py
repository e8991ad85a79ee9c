"""Commands that serve a model: export, serve."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.base.errors import ConfigError, install, require
from stoker.base.progress import Bars
from stoker.base.progress import listening as kernels
from stoker.base.units import format_size, quoted
from stoker.cli.options import Json, MovedData, printed, say, takes
from stoker.serve.settings import ExportSettings, ServeSettings

if TYPE_CHECKING:
    from stoker.serve.server import Server


@takes(ExportSettings)
def export(
    run: Annotated[Path, typer.Argument(help="Run directory or checkpoint.")],
    out: Annotated[Path | None, typer.Argument(help="Directory to write. Required, here or as --out.")] = None,
    out_option: Annotated[Path | None, typer.Option("--out", hidden=True)] = None,
    data: MovedData = None,
    *,
    settings: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Write a model that serves without its run and its dataset.

    Rows are mapped when they are needed, so serving starts quickly. int8 takes
    at most 0.3 of the bytes of fp32, int4 0.18 (16 columns and more).

    \b
    stoker export runs/a served
    stoker export runs/a served --rows int8 --overwrite
    """
    from stoker.serve.export import export as run_export

    target = out or out_option
    if target is None or (out and out_option):
        raise ConfigError("stoker export takes one directory to write. Write for example stoker export runs/a served.")
    with Bars(quiet=as_json):
        found = run_export(run, target, data=data, **settings)
    if not printed({"path": str(found.path), "rows": found.rows, "row_bytes": found.row_bytes}, as_json):
        say(found.summary())


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep what the block makes, without looking through it for garbage, then or later."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@takes(ServeSettings)
def serve(
    source: Annotated[Path, typer.Argument(help="Run directory or export.")],
    data: MovedData = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Score rows over HTTP until Ctrl-C.

    POST /score takes {"rows": [{"item": 7, ...}, ...]} or an Arrow stream, POST
    /topk {"user": {...}, "candidates": [{...}, ...], "k": 10}. With --retrieve,
    POST /retrieve takes {"users": [{...}, ...], "k": 10} and finds items among
    all. GET /healthz, GET /metrics. Scores of a run equal those of stoker
    predict to the bit. The server follows updates and roll-backs of the run.

    \b
    stoker serve runs/a
    stoker serve served --host 0.0.0.0 --port 80
    stoker serve runs/two_tower --retrieve exact
    stoker serve served --workers 4
    """
    from stoker.serve.workers import listen, processes

    chosen = ServeSettings.from_dict(settings)
    with _ends() as asked:
        if chosen.workers == 1:
            listen(chosen.host, chosen.port).close()  # before the model loads, which may take long
            _serve(source, data, chosen, asked)
            return
        with TemporaryDirectory(prefix="stoker-serve-") as folder, listen(chosen.host, chosen.port) as listening:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # before prometheus_client is imported
            _load_modules()
            with processes(chosen.workers) as number:
                _serve(source, data, chosen, asked, listening, speaks=number == 0)


@contextmanager
def _ends() -> Iterator[list[KeyboardInterrupt]]:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt; yield those that came, since an import may lose the error."""
    asked = list[KeyboardInterrupt]()

    def stop(number: int, _: object) -> None:
        asked.append(KeyboardInterrupt())
        vars(asked[-1])["exit_code"] = 128 + number  # of the command line
        raise asked[-1]

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _check_memory(run: Path, workers: int) -> None:
    """Raise :class:`ConfigError` if the rows of a run, a copy for each process, do not fit memory."""
    from stoker.base.device import total_memory
    from stoker.training.files.checkpoint import chain
    from stoker.training.files.rundir import find_checkpoint

    files = chain(find_checkpoint(run))[0].manifest["files"].values()
    needed, most = workers * sum(entry["bytes"] for entry in files), total_memory()
    if most is not None and needed > most:
        copies = f" in {workers} processes" if workers > 1 else ""
        raise ConfigError(
            f"the rows of {run} take {format_size(needed)}{copies}, but this machine has {format_size(most)} of "
            f"memory. Serve an export, whose rows are mapped: stoker export {quoted(run)} OUT, then stoker serve OUT"
        )


def _load_modules() -> None:
    """Import what serves, so that forked processes share it."""
    for module in ("aiohttp", "prometheus_client"):
        require(module, "stoker serve needs", install("prometheus_client"))
    with _no_collections():
        import torch  # noqa: F401

        import stoker.serve.retrieve
        import stoker.serve.server  # noqa: F401


def _serve(
    source: Path, data: Path | None, chosen: ServeSettings, asked: list[KeyboardInterrupt],
    listening: socket.socket | None = None, *, speaks: bool = True,
) -> None:  # fmt: skip
    """Serve in this process until Ctrl-C or SIGTERM; ``asked``: those that came before."""
    _load_modules()
    import asyncio

    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // chosen.workers))
    reported = nullcontext() if speaks else kernels(lambda line: None)
    with _no_collections(), Bars(quiet=not speaks), reported:
        from stoker.serve.export import is_export
        from stoker.serve.retrieve import Retriever
        from stoker.serve.scorer import Scorer
        from stoker.serve.server import Server
        from stoker.serve.server import serve as run_server

        if of_run := not is_export(source):
            _check_memory(source, chosen.workers)
        data, retriever = data if of_run else None, None
        if chosen.retrieve != "off":
            retriever = Retriever(source, data, approximate=chosen.retrieve == "approximate", follow=of_run)
        scorer = Scorer(source, data, follow=of_run) if retriever is None else retriever.scorer
        if (problem := scorer.warm_up()) and speaks:
            say(f"note: the first requests load the kernels, since no row could be scored before them: {problem}")

    if asked:
        raise asked[0]

    def started(server: Server) -> None:
        if speaks:
            say(f"serving {source} (update {scorer.version['update']}) at http://{chosen.host}:{server.port}")

    with suppress(KeyboardInterrupt):  # where the loop takes no signals
        asyncio.run(run_server(Server(scorer, chosen, retriever, listening, say if speaks else None), started))
    if speaks:
        say("stopped")
