"""The server beside those that one would write by hand: FastAPI with eager torch, FastAPI with ONNX Runtime.

All score the same rows of Globo by the same weights over the same Arrow streams, on the same cores as their clients.
The peers find ids in dicts. All have one process with all threads or two with one each, whichever is faster.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

import stoker
from benchmarks.harness import Bar, Crashed, Outcome, Run, Table
from benchmarks.rounds import SCRIPTS, Contestant, peer_python, worker_env
from benchmarks.serving import Shop, ask, cut, load, same, served, shop
from stoker.prep.like import Like

__all__ = ["bars"]

SIZES = (64, 256, 512)
MOST = 20.0  # ms of the p99
OURS = {"Stoker, 1 process": 1, "Stoker, 2 processes": 2}
PEERS = {
    f"FastAPI, {name}, {workers} x {threads}": {"engine": engine, "workers": workers, "threads": threads}
    for name, engine in (("torch", "torch"), ("ONNX Runtime", "onnx"))
    for workers, threads in ((1, 2), (2, 1))
}


def _written(found: Shop) -> dict[str, str]:
    """Write the weights and vocabularies for the peers; return their paths."""
    model = stoker.load(found.run).model
    names = list(found.rows.columns)
    weights = {f"table {name}": model.embeddings.rows(name).float().numpy() for name in names}
    weights |= {name: value.numpy() for name, value in model.state_dict().items() if name.startswith(("top", "const"))}
    like = Like(found.run.with_name("data"))
    words = {name: like.vocabulary(name)["value"].to_list() for name in names}
    paths = {"weights": str(found.run.with_name("peers.npz")), "words": str(found.run.with_name("peers.json"))}
    np.savez(paths["weights"], **weights)  # type: ignore[arg-type]
    Path(paths["words"]).write_text(json.dumps(words))
    return paths


@contextmanager
def _peer(given: dict[str, Any]) -> Iterator[tuple[str, int]]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        at = "127.0.0.1", int(taken.getsockname()[1])
    own = Contestant(label="", script="fastapi_serving.py", environment="serving", threads=given["threads"])
    command = [str(peer_python("serving")), str(SCRIPTS / own.script), json.dumps(given | {"port": at[1]})]
    with subprocess.Popen(command, env=worker_env(own)) as process:
        try:
            for _ in range(1200):
                if process.poll() is not None:
                    raise Crashed(f"{own.script} ended with {process.returncode}")
                try:
                    socket.create_connection(at, 0.1).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield at
        finally:
            process.terminate()


def _near(_: int, scores: Any, wanted: Any) -> bool:
    return bool(np.abs(scores - wanted).max() < 1e-5)


def _rates(at: tuple[str, int], found: Shop, check: Any) -> list[tuple[float, float, float]]:
    """Return rows/s, p50 and p99 in ms for each size of a request."""
    rates = []
    for size in SIZES:
        requests = cut(found, size)
        for _ in range(2):  # both processes of a peer warm up
            ask(HTTPConnection(*at), requests[0][0])
        load(at, requests[:40], check)
        seconds, taken = load(at, requests, check)
        rates.append((len(found.rows) / seconds, statistics.median(taken), float(np.percentile(taken, 99))))
    return rates


def against(run: Run) -> Outcome:
    """Rows/s of ours over those of the best peer, each at its best size with a p99 of at most 20 ms."""
    found = shop(run.quick)
    paths, ratios, lines = _written(found), [], []
    for number in range(run.rounds):
        best = {}
        for label in [*OURS, *PEERS]:
            if label in OURS:
                with served(found.run, workers=OURS[label]) as at:
                    rates = _rates(at, found, same)
            else:
                with _peer(PEERS[label] | paths) as at:
                    rates = _rates(at, found, _near)
            best[label] = max((rate for rate, _, p99 in rates if p99 <= MOST), default=0.0)
            if number == 0:
                lines += [
                    [label, str(size), f"{rate:,.0f}", f"{half:.1f}", f"{p99:.1f}"]
                    for size, (rate, half, p99) in zip(SIZES, rates, strict=True)
                ]
        ratios.append(max(best[label] for label in OURS) / max(best[label] for label in PEERS))
    columns = ["server", "rows a request", "rows/s", "p50, ms", "p99, ms"]
    notes = [f"rounds: {', '.join(f'{each:.2f}x' for each in ratios)}; scores of peers equal within 1e-5"]
    table = Table(title="Servers, first round", columns=columns, rows=lines)
    return Outcome(value=statistics.median(ratios), tables=[table], notes=notes)


def bars() -> list[Bar]:
    """What is asked of the server beside others."""
    title = "rows/s at a p99 of at most 20 ms, of the best of FastAPI with eager torch and with ONNX Runtime"
    return [Bar(name="serve-vs-peers", group="serving", title=title, must=1.3, unit="x", rounds=3, run=against)]
