"""Scores on request: throughput, latency, start, size and accuracy of exports, updates under load.

The model is a DLRM on Globo, one reader in four, trained on ten days; the days after are asked for. Every score of the
server is compared with that of ``stoker.predict``, to the bit, before a time counts. Clients are threads of the same
machine, so that they take their share of it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

import stoker
from benchmarks.every_day import LOGS, SETTINGS
from benchmarks.harness import CACHE, Bar, Crashed, NotRun, Outcome, Run, Table, WrongResult, data_files
from stoker.prep.schema import Schema
from stoker.training.scores.metrics import StreamingMetrics
from stoker.training.scores.tiles import TILE

__all__ = ["bars"]

DIM = 16
CANDIDATES = 256
CLIENTS = 4
_BIG = 2 * 2**30  # bytes of the rows of the export that is started
_START = """
import json, sys, time
begin = time.perf_counter()
import torch
alone = time.perf_counter() - begin
import polars as pl, stoker
scores = stoker.Scorer(sys.argv[1]).score(pl.read_ipc(sys.argv[2]))
from stoker.base.device import peak_memory
print(json.dumps([alone, time.perf_counter() - begin, peak_memory(), float(scores[0])]))
"""


@dataclass(frozen=True, kw_only=True)
class Shop:
    """The trained run, and rows to ask for with their scores."""

    run: Path
    rows: pl.DataFrame
    labels: Any
    offline: Any
    predict: Callable[[], Any]  # does `prepare` and `predict` on the rows


@cache
def shop(quick: bool) -> Shop:
    """Train the model and score the rows of the days after."""
    log = LOGS["globo"]
    rows = log.read(data_files(*log.files))
    names = [name for name in rows.columns if name not in ("time", "day", "label")]
    rows = rows.with_columns(pl.col(names).cast(pl.String)).drop("time")
    schema = Schema.from_dict({
        "name": "served", "label": "label", "categorical": [{"name": name, "min_count": 2} for name in names],
        "split": {"rule": "hash", "train": 0.97, "valid": 0.03, "test": 0.0},
    })  # fmt: skip
    CACHE.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=CACHE))
    stoker.prepare(schema, rows.filter(pl.col("day") < log.first).drop("day"), out=folder / "data")
    settings = {**SETTINGS, "embedding_dim": DIM, "model_options": {"bottom": (512, 256), "top": (512, 256)}}
    stoker.train(folder / "data", out=folder / "run", **settings).model.embeddings.close()
    asked = rows.filter(pl.col("day") >= log.first).drop("day").head(30_000 if quick else 200_000)
    model = stoker.load(folder / "run").model

    def predict() -> Any:
        return stoker.predict(model, stoker.prepare(files=asked, like=folder / "data").test)

    found = predict()
    return Shop(run=folder / "run", rows=asked.drop("label"), labels=found.labels, offline=found.scores,
                predict=predict)  # fmt: skip


@contextmanager
def served(source: Path, **settings: Any) -> Iterator[tuple[str, int]]:
    """Serve in a process; yield the address."""
    if find_spec("prometheus_client") is None:
        raise NotRun("the server needs pip install 'stoker[serve]'")
    options = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "stoker", "serve", str(source), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        line = next((each for each in lines if "http://" in each), "")
        if not line:
            raise Crashed("the server did not start")
        try:
            yield "127.0.0.1", int(line.rsplit(":", 1)[1])
        finally:
            process.terminate()


def _arrow(rows: pl.DataFrame) -> bytes:
    import pyarrow as pa

    table, sink = rows.to_arrow(), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def ask(connection: HTTPConnection, body: bytes) -> tuple[int, Any]:
    """Return the version and the scores of an Arrow request."""
    import pyarrow as pa

    kind = "application/vnd.apache.arrow.stream"
    connection.request("POST", "/score", body, {"Content-Type": kind, "Accept": kind})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise WrongResult(text.decode())
    table = pa.ipc.open_stream(text).read_all()
    return int(table.schema.metadata[b"update"]), table["score"].to_numpy()


def load(
    at: tuple[str, int], requests: list[tuple[bytes, Any]], check: Callable[[int, Any, Any], bool]
) -> tuple[float, list[float]]:
    """Ask with several clients; return the seconds of all, and of each request in milliseconds."""
    left, taken, wrong = iter(requests), list[float](), list[Any]()

    def work() -> None:
        connection = HTTPConnection(*at)
        while not wrong and (one := next(left, None)) is not None:
            began = time.perf_counter()
            version, scores = ask(connection, one[0])
            taken.append(1000 * (time.perf_counter() - began))
            if not check(version, scores, one[1]):
                wrong.append(scores)

    threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong or len(taken) < len(requests):
        raise WrongResult("a served score is not that of predict")
    return time.perf_counter() - began, taken


def same(version: int, scores: Any, wanted: Any) -> bool:
    return version == 0 and scores.tobytes() == wanted.tobytes()


def cut(all_rows: Shop, size: int) -> list[tuple[bytes, Any]]:
    starts = range(0, len(all_rows.rows), size)
    return [(_arrow(all_rows.rows[at : at + size]), all_rows.offline[at : at + size]) for at in starts]


def throughput(run: Run) -> Outcome:
    """Rows a second of the server, of those of `prepare` and `predict` in one go; medians of rounds."""
    found, rounds, offline = shop(run.quick), defaultdict[tuple[int, int], list[tuple[float, ...]]](list), []
    for _ in range(run.rounds):
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            found.predict()
            seconds.append(time.perf_counter() - began)
        offline.append(len(found.rows) / min(seconds))
        for workers in (1, 2):
            with served(found.run, workers=workers) as at:
                for size in (64, 256, 512, 1024, 2048):
                    load(at, cut(found, size)[:20], same)
                    taken, each = load(at, cut(found, size), same)
                    rate = len(found.rows) / taken
                    rounds[workers, size].append((rate, rate / offline[-1], *np.percentile(each, (50, 99))))
    medians = {key: [statistics.median(each) for each in zip(*all_of, strict=True)] for key, all_of in rounds.items()}
    best = max((share for _, share, _, p99 in medians.values() if p99 <= 20), default=0.0)
    lines = [
        [str(workers), str(size), f"{rate:,.0f}",
         f"{share:.2f}x ({min(shares := [each[1] for each in rounds[workers, size]]):.2f}-{max(shares):.2f})",
         f"{p50:.1f}", f"{p99:.1f}"]
        for (workers, size), (rate, share, p50, p99) in medians.items()
    ]  # fmt: skip
    columns = ["processes", "rows a request", "rows/s", "of offline", "p50, ms", "p99, ms"]
    notes = [f"offline: prepare and predict of all rows, {statistics.median(offline):,.0f} rows/s",
             f"{CLIENTS} clients on the same cores"]  # fmt: skip
    return Outcome(value=best, tables=[Table(title="Server", columns=columns, rows=lines)], notes=notes,
                   data={f"{workers} x {size}": each for (workers, size), each in rounds.items()})  # fmt: skip


def candidates(run: Run) -> Outcome:
    """Time of a request of 256 rows, of its products alone."""
    found = shop(run.quick)
    requests = cut(found, CANDIDATES)[: 40 if run.quick else 300]
    model = stoker.load(found.run).model.eval()
    with torch.no_grad():
        inputs = model.inputs(stoker.Scorer(found.run).encoder.encode(found.rows.head(TILE)))
    alone, taken = [], []
    with served(found.run, wait=0) as at:
        connection = HTTPConnection(*at)
        for body, wanted in requests:
            began = time.perf_counter()
            version, scores = ask(connection, body)
            taken.append(1000 * (time.perf_counter() - began))
            if not same(version, scores, wanted):
                raise WrongResult("a served score is not that of predict")
            began = time.perf_counter()
            with torch.no_grad():
                model.dense_part(*inputs)
            alone.append(1000 * (time.perf_counter() - began))
    each = statistics.median(taken), statistics.median(alone)
    table = Table(title="256 candidates", columns=["request, ms", "products, ms"], rows=[[f"{v:.2f}" for v in each]])
    return Outcome(value=each[0] / each[1], tables=[table])


def start(run: Run) -> Outcome:
    """Seconds from the start of a process to its first score, of an export of 2 GiB."""
    size = _BIG // 16 if run.quick else _BIG
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        folder = Path(place)
        rows = size // (4 * DIM)
        log = pl.DataFrame({"label": np.arange(1000) % 2, "item": np.arange(1000)})
        schema = Schema.from_dict({
            "name": "big", "label": "label", "split": {"rule": "hash", "train": 0.9, "valid": 0.1, "test": 0.0},
            "categorical": [{"name": "item", "type": "int", "hash_buckets": rows - 1}],
        })  # fmt: skip
        data = stoker.prepare(schema, log, out=folder / "data")
        stoker.train(data, out=folder / "run", embedding_dim=DIM, batch_size=256, steps=2, row_optimizer="sgd",
                     display="quiet", tensorboard=False).model.embeddings.close()  # fmt: skip
        stoker.export(folder / "run", folder / "served")
        asked = log.select("item").head(10)
        asked.write_ipc(folder / "rows.arrow")
        wanted, taken = float(stoker.Scorer(folder / "served").score(asked)[0]), []
        # Modules are compiled, as pip leaves them; the first process compiles what is not.
        own = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
        own.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(run.rounds + 1):
            ran = subprocess.run([sys.executable, "-c", _START, folder / "served", folder / "rows.arrow"], env=own,
                                 capture_output=True, text=True, check=True)  # fmt: skip
            taken.append(json.loads(ran.stdout.splitlines()[-1]))
            if taken[-1][3] != wanted:
                raise WrongResult("another process has other scores")
        del taken[0]
    torch_alone, first, memory = (statistics.median(one[place] for one in taken) for place in range(3))
    table = Table(title="Start", columns=["first score, s", "of it import torch, s", "peak memory, MiB"],
                  rows=[[f"{first:.2f}", f"{torch_alone:.2f}", f"{memory / 2**20:.0f}"]])  # fmt: skip
    return Outcome(value=first, tables=[table], notes=[f"rows of {size / 2**30:g} GiB in fp32"])


@cache
def exports(quick: bool) -> dict[str, tuple[float, float]]:
    """Return the size and the loss of AUC of each format."""
    found, made = shop(quick), {}

    def auc(scores: Any) -> float:
        metrics = StreamingMetrics()
        metrics.update(torch.logit(torch.from_numpy(scores.copy()).double()), torch.from_numpy(found.labels.copy()))
        return float(metrics.compute()["auc"])

    whole = auc(found.offline)
    for rows in ("fp32", "bf16", "int8", "int4"):
        export = stoker.export(found.run, found.run.with_name(rows), rows=rows, overwrite=True)
        scores = stoker.Scorer(export.path).score(found.rows)
        if rows == "fp32" and scores.tobytes() != found.offline.tobytes():
            raise WrongResult("an export scores otherwise than its run")
        made[rows] = export.row_bytes / export.fp32_bytes, whole - auc(scores)
    return made


def small(run: Run, rows: str, which: int) -> Outcome:
    """Size or loss of AUC of an export."""
    found = exports(run.quick)
    lines = [[name, f"{size:.3f}x", f"{lost:+.6f}"] for name, (size, lost) in found.items()]
    table = Table(title="Exports of the Globo model", columns=["rows", "of fp32", "AUC lost"], rows=lines)
    return Outcome(value=found[rows][which], tables=[table])


def updates(run: Run) -> Outcome:
    """The p99 of requests while updates and roll-backs are applied, of that without."""
    found = shop(run.quick)
    log = LOGS["globo"]
    names = [*found.rows.columns]
    day = log.read(data_files(*log.files)).filter(pl.col("day") == log.first)
    day = day.with_columns(pl.col(names).cast(pl.String)).select("label", *names).head(20_000)
    truth, back = {}, list[float]()
    requests, size = cut(found, 256)[: 100 if run.quick else 600], 256
    asked = found.rows.head(size * len(requests))
    truth[0] = found.offline[: asked.height]
    wanted = [(body, place) for place, (body, _) in enumerate(requests)]

    def check(version: int, scores: Any, place: int) -> bool:
        own = truth[version][place * size : (place + 1) * size]
        return bool(scores.tobytes() == own.tobytes())

    stoker.update(found.run, day)
    truth[1] = stoker.Scorer(found.run).score(asked)
    stoker.rollback(found.run, 0)
    head = found.run / "head.json"
    stoker.update(found.run, day)
    newest = head.read_bytes()
    with served(found.run, poll=0.1) as at:
        connection = HTTPConnection(*at)
        while ask(connection, requests[0][0])[0] != 1:
            time.sleep(0.01)
        load(at, wanted, check)
        version = 1

        def swing(ended: threading.Event, changes: bool) -> None:
            nonlocal version
            own = HTTPConnection(*at)
            while not ended.is_set():
                began = time.perf_counter()
                if changes:
                    version = 1 - version
                    _put(head, newest if version else None)
                while ask(own, requests[0][0])[0] != version or not (changes or ended.is_set()):
                    time.sleep(0.02)
                if changes:
                    back.append(time.perf_counter() - began)

        def p99(*, changes: bool) -> float:
            ended = threading.Event()
            thread = threading.Thread(target=swing, args=(ended, changes))
            thread.start()
            _, taken = load(at, wanted, check)
            ended.set()
            thread.join()
            return float(np.percentile(taken, 99))

        pairs = [(p99(changes=False), p99(changes=True)) for _ in range(run.rounds)]
    head.unlink(missing_ok=True)
    rows = [[f"{still:.1f}", f"{moved:.1f}", f"{moved / still:.2f}"] for still, moved in pairs]
    table = Table(title="Requests of 256 rows", columns=["p99, ms", "while models change", "times"], rows=rows)
    return Outcome(
        value=statistics.median(moved / still for still, moved in pairs), tables=[table], data={"p99": pairs},
        notes=["each answer has the scores of the model it names",
               f"{len(back)} changes, the longest until it was served {max(back, default=0):.2f} s"],
    )  # fmt: skip


def _put(head: Path, content: bytes | None) -> None:
    """Replace a file at once, or delete it."""
    if content is None:
        head.unlink()
    else:
        beside = head.with_suffix(".new")
        beside.write_bytes(content)
        beside.replace(head)


def bars() -> list[Bar]:
    """What is asked of the server and of exports."""
    made: list[tuple[str, str, float, bool, str, Callable[[Run], Outcome]]] = [
        ("serve-throughput", "rows/s over HTTP at a p99 of at most 20 ms, of prepare and predict in one go", 0.85,
         False, "x", throughput),
        ("serve-candidates", "median time of a request of 256 candidates, of the products alone", 1.5, True, "x",
         candidates),
        ("serve-start", "first score after exec, for an export of 2 GiB", 1.5, True, " s", start),
        ("serve-updates", "p99 while updates and roll-backs are applied, of that without", 1.15, True, "x", updates),
        ("export-int8-size", "bytes of rows, int8 of fp32", 0.30, True, "x", lambda run: small(run, "int8", 0)),
        ("export-int4-size", "bytes of rows, int4 of fp32", 0.18, True, "x", lambda run: small(run, "int4", 0)),
        ("export-int8-auc", "AUC lost by int8 rows on Globo", 0.0003, True, "", lambda run: small(run, "int8", 1)),
        ("export-int4-auc", "AUC lost by int4 rows on Globo", 0.001, True, "", lambda run: small(run, "int4", 1)),
    ]  # fmt: skip
    return [
        Bar(name=name, group="serving", title=title, must=must, at_most=most, unit=unit, digits=4, rounds=3, run=work)
        for name, title, must, most, unit, work in made
    ]
