"""Score rows over HTTP, in JSON or Arrow, in small batches that several requests share.

One thread encodes and scores; the event loop only reads and writes. A batch is what has come while the last one was
scored; if that one had several requests, the next waits up to ``wait`` milliseconds for others. A score does not depend
on the requests that share its batch. If the source is a run, the server follows its updates and roll-backs: a new model
takes effect between two batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from aiohttp import web
from aiohttp.typedefs import Handler

from stoker.base.errors import StokerError, require
from stoker.base.units import parse_size
from stoker.prep.parse.json_lines import parsed
from stoker.serve.background import give_way
from stoker.serve.bodies import RequestError, arrow_rows
from stoker.serve.retrieve import Retrieved, Retriever
from stoker.serve.scorer import ScoreArray, Scorer
from stoker.serve.settings import ServeSettings
from stoker.serve.workers import GRACE

ARROW = "application/vnd.apache.arrow.stream"
_LARGE = 2**18  # bytes of a body that takes more than some milliseconds to read
_ITEMS = 2**17  # that a request may ask for, of all its users
_RARE = 10  # times the pause between two looks for updates, if they fail: each reads and checks whole files
_SWEEP = 1.0  # seconds between two looks at idle connections
RequestRows: TypeAlias = Any  # a list of objects, or an Arrow table


@dataclass
class _Waiting:
    """A request whose rows wait for their scores."""

    rows: RequestRows
    since: float
    scores: asyncio.Future[tuple[ScoreArray, dict[str, Any]]]


class _Figures:
    """What ``/metrics`` shows."""

    def __init__(self) -> None:
        prometheus = require("prometheus_client", "stoker serve needs")
        self.generate, self.registry = prometheus.generate_latest, prometheus.CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # the processes of --workers keep their numbers there
            from prometheus_client.multiprocess import MultiProcessCollector

            MultiProcessCollector(self.registry)  # type: ignore[no-untyped-call]
            own = {"registry": None}
        counter, gauge, histogram = prometheus.Counter, prometheus.Gauge, prometheus.Histogram
        self.requests = counter("stoker_requests", "Requests, by path and status.", ["path", "status"], **own)
        self.rows = counter("stoker_rows", "Rows that were scored.", **own)
        self.users = counter("stoker_users", "Users for whom items were found.", **own)
        self.items = gauge("stoker_items", "Items of the catalogue.", multiprocess_mode="livemin", **own)
        self.seconds = histogram(
            "stoker_seconds", "Time from a whole request to its scores.", **own,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
        )  # fmt: skip
        self.batch = histogram("stoker_batch_rows", "Rows of a batch.", buckets=[4.0**n for n in range(8)], **own)
        self.waiting = gauge("stoker_waiting", "Requests that wait.", multiprocess_mode="livesum", **own)
        self.update = gauge("stoker_update", "Number of the update that is served.", multiprocess_mode="livemin", **own)
        self.changes = counter("stoker_changes", "Times that a process took another model of the run.", **own)


class Server:
    """The application. :meth:`running` serves it.

    ``listening``: a socket to share with other processes; ``log`` is called with a line when another model is served,
    and when one cannot be read.
    """

    def __init__(
        self, scorer: Scorer, settings: ServeSettings | None = None, retriever: Retriever | None = None,
        listening: socket.socket | None = None, log: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.listening, self._log = listening, log or (lambda line: None)
        self.scorer, self.settings, self.retriever = scorer, settings or ServeSettings(), retriever
        self._max_body = parse_size(self.settings.max_body)
        self.figures = _Figures()
        self.problem = ""  # why updates cannot be followed at the moment
        self.port = self.settings.port  # after :meth:`running` began, the one that the system chose for 0
        self._waiting: SimpleQueue[_Waiting | None] = SimpleQueue()  # None: the end
        self._connections: Callable[[], int] = lambda: 0  # how many clients there are
        self._searching = 0  # requests whose items are being found, or wait for it
        self._searcher = ThreadPoolExecutor(1, thread_name_prefix="stoker-retrieve")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="stoker-read")
        owned: Any = scorer.lock  # while requests wait for it, the follower should not sleep
        self._follower = ThreadPoolExecutor(1, "stoker-follow", give_way, (owned._is_owned,))

    def application(self) -> web.Application:
        """Return the routes."""
        app = web.Application(client_max_size=self._max_body, middlewares=[self._answered])
        app.router.add_post("/score", self._score)
        app.router.add_post("/topk", self._topk)
        app.router.add_post("/retrieve", self._retrieve)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        """Serve within the block."""
        runner = web.AppRunner(
            self.application(), access_log=None, keepalive_timeout=60.0,
            auto_decompress=False,  # a few bytes can become any number
            shutdown_timeout=GRACE / 2,  # aiohttp waits twice
        )  # fmt: skip
        await runner.setup()
        self._connections = lambda: len(runner.server.connections) if runner.server else 0
        worker = Thread(target=self._work, args=(asyncio.get_running_loop(),), name="stoker-serve")
        worker.start()
        tasks = [asyncio.create_task(each) for each in (self._sweep(runner), self._poll())]
        try:
            site: web.BaseSite = web.TCPSite(runner, self.settings.host, self.settings.port)
            if self.listening is not None:  # takes one connection at a time, so that others get some
                site = web.SockSite(runner, self.listening, backlog=1)
            try:
                await site.start()
                if self.listening is not None:
                    self.listening.listen(128)
            except OSError as error:
                where = f"{self.settings.host}:{self.settings.port}"
                raise StokerError(f"{where} cannot be served: {error.strerror}. Choose another port.") from error
            self.port = runner.addresses[0][1]
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await runner.cleanup()
            self._waiting.put(None)
            await asyncio.to_thread(worker.join)
            for pool in (self._searcher, self._reader, self._follower):
                pool.shutdown()

    # Requests.

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn errors into answers with their cause."""
        try:
            response = await handler(request)
        except RequestError as error:
            headers = {} if error.retry is None else {"Retry-After": str(error.retry)}
            response = web.json_response({"error": str(error)}, status=error.status, headers=headers)
        except web.HTTPException as error:
            headers = {key: value for key, value in error.headers.items() if key == "Allow"}
            response = web.json_response({"error": error.text or error.reason}, status=error.status, headers=headers)
        known = request.match_info.route.resource is not None
        self.figures.requests.labels(request.path if known else "other", str(response.status)).inc()
        return response

    async def _body(self, request: web.Request) -> bytes:
        limit = self._max_body
        if coding := request.headers.get("Content-Encoding"):
            raise RequestError(415, f"the body is encoded as {coding[:20]!r}. Send it as it is.")
        if (request.content_length or 0) > limit:
            raise RequestError(413, f"the body has {request.content_length:,} bytes, and {limit:,} are allowed.")
        try:
            async with asyncio.timeout(self.settings.read_timeout):
                return await request.read()
        except TimeoutError:
            raise RequestError(408, f"the body did not come within {self.settings.read_timeout:g} s.") from None
        except web.HTTPRequestEntityTooLarge:
            raise RequestError(413, f"the body has more than the {limit:,} bytes that are allowed.") from None
        except ConnectionError as error:  # nobody reads the answer
            raise RequestError(400, f"the body broke off: {error}.") from None

    async def _read(self, read: Callable[..., Any], body: bytes, *more: Any) -> Any:
        """Return what is in a body. A large one is read in a thread, so that others need not wait for it."""
        if len(body) <= _LARGE:
            return read(body, *more)
        return await asyncio.get_running_loop().run_in_executor(self._reader, read, body, *more)

    async def _json(self, request: web.Request, keys: Sequence[str]) -> dict[str, Any]:
        """Return the object in a body, which has some keys and no others."""
        try:
            body = await self._body(request)
            found = await self._read(parsed, body)
            if isinstance(found, dict) and "k" in keys and re.search(rb'"(k|\\u006[bB])"\s*:\s*"', body):
                first: Any = {"object_pairs_hook": lambda pairs: dict(reversed(pairs))}  # of equal keys, as parsed()
                typed = await self._read(lambda text: json.loads(text, **first), body)  # with types
                found |= {"k": json.dumps(typed["k"])} if isinstance(typed.get("k"), str) else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"the body is not JSON: {error}.") from None
        if not isinstance(found, dict) or set(found) != set(keys):
            have = f"an object with {sorted(found)}" if isinstance(found, dict) else f"a {type(found).__name__}"
            raise RequestError(400, f"the body is {have}; expected an object with {', '.join(keys)}.")
        return found

    async def _score(self, request: web.Request) -> web.Response:
        if request.content_type == ARROW:
            rows: RequestRows = await self._read(arrow_rows, await self._body(request), self._max_body)
        else:
            rows = _objects((await self._json(request, ["rows"]))["rows"], "rows")
        scores, version = await self._scores(rows)
        if ARROW in request.headers.get("Accept", ""):
            table = pa.table({"score": scores}).replace_schema_metadata({key: str(v) for key, v in version.items()})
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            return web.Response(body=sink.getvalue().to_pybytes(), content_type=ARROW)
        return web.json_response({"scores": _numbers(scores).tolist(), **version})

    async def _topk(self, request: web.Request) -> web.Response:
        found = await self._json(request, ["user", "candidates", "k"])
        candidates, [user] = _objects(found["candidates"], "candidates"), _objects([found["user"]], "user")
        k = _count(found["k"])
        if both := sorted(set(user).intersection(*[set().union(*candidates)])):
            raise RequestError(400, f"user and candidates both have {both}. Give each column once.")
        scores, version = await self._scores([{**user, **each} for each in candidates])
        best = np.argsort(-_numbers(scores), kind="stable")[:k]
        return web.json_response({"best": best.tolist(), "scores": scores[best].tolist(), **version})

    async def _retrieve(self, request: web.Request) -> web.Response:
        if self.retriever is None:
            raise RequestError(404, "this server finds no items. Start it with --retrieve exact; it takes two towers.")
        found = await self._json(request, ["users", "k"])
        users, k = _objects(found["users"], "users"), min(_count(found["k"]), len(self.retriever))
        if len(users) > self.settings.batch_rows or len(users) * k > _ITEMS:
            raise RequestError(413, f"{len(users):,} users with {k:,} items each, and {self.settings.batch_rows:,} "
                               f"users and {_ITEMS:,} items are allowed.")  # fmt: skip
        self._admit()
        since, loop = time.perf_counter(), asyncio.get_running_loop()
        self._searching += 1
        self.figures.waiting.inc()
        try:
            best = await loop.run_in_executor(self._searcher, _search, self.retriever, users, k)
        finally:
            self._searching -= 1
            self.figures.waiting.dec()
        self.figures.seconds.observe(time.perf_counter() - since)
        self.figures.users.inc(len(users))
        return web.json_response({"items": best.items, "scores": best.scores.tolist(), **best.version})

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", **self.scorer.version, "problem": self.problem})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.figures.generate(self.figures.registry), content_type="text/plain")

    async def _scores(self, rows: RequestRows) -> tuple[ScoreArray, dict[str, Any]]:
        self._admit()
        waiting = _Waiting(rows, time.perf_counter(), asyncio.get_running_loop().create_future())
        self.figures.waiting.inc()  # here, since another process of --workers may answer /metrics
        self._waiting.put(waiting)
        found = await waiting.scores
        self.figures.seconds.observe(time.perf_counter() - waiting.since)
        return found

    def _admit(self) -> None:
        if (before := self._waiting.qsize() + self._searching) >= self.settings.max_waiting:
            raise RequestError(503, f"{before} requests wait already. Try again in a second.", retry=1)

    # Batches.

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Score what waits, batch after batch, in a thread of its own."""
        for batch in self._batches():
            self.figures.waiting.dec(len(batch))
            known = [each for each in batch if not each.scores.cancelled()]  # whose client has not gone
            try:
                found = self._scored([each.rows for each in known])
            except BaseException as error:  # a panic of Polars is not an Exception
                found = [_failed(error)] * len(known)
            loop.call_soon_threadsafe(self._deliver, known, found)

    def _batches(self) -> Iterator[list[_Waiting]]:
        """Yield the requests of each batch, until the server ends."""
        batch: list[_Waiting] = []
        size, shared = 0, False
        each = self._waiting.get()
        while each is not None:
            if batch and size + len(each.rows) > self.settings.batch_rows:
                yield batch
                batch, size, shared = [], 0, len(batch) > 1
            batch.append(each)
            size += len(each.rows)
            left = batch[0].since + self.settings.wait / 1000 - time.perf_counter()
            full = size >= self.settings.batch_rows or len(batch) >= self._connections()  # no other client can ask
            try:
                each = self._waiting.get(timeout=left if shared and not full and left > 0 else 0)
            except Empty:
                yield batch
                batch, size, shared = [], 0, len(batch) > 1
                each = self._waiting.get()

    def _scored(self, requests: Sequence[RequestRows]) -> list[Any]:
        """Return the scores of each request with the version of the model, or its error."""
        scorer = self.scorer
        with scorer.lock:
            version = dict(scorer.version)
            try:
                return [(found, version) for found in scorer.score_together(requests)]
            except Exception as error:
                if len(requests) == 1:
                    return [_failed(error)]
            return [self._scored([rows])[0] for rows in requests]  # one does not fit; the others should not notice

    def _deliver(self, batch: Sequence[_Waiting], found: Sequence[Any]) -> None:
        """Give each request its scores, or its error."""
        self.figures.batch.observe(sum(len(each.rows) for each in batch))
        for each, result in zip(batch, found, strict=True):
            if each.scores.done():
                continue
            if isinstance(result, RequestError):
                each.scores.set_exception(result)
            else:
                each.scores.set_result(result)
                self.figures.rows.inc(len(each.rows))

    # While requests are answered.

    async def _poll(self) -> None:
        """Show what is served, and follow the updates of a run."""
        loop = asyncio.get_running_loop()
        poll, every = (self.scorer if self.retriever is None else self.retriever).poll, self.settings.poll
        pause = every
        while True:
            self.figures.items.set(0 if self.retriever is None else len(self.retriever))
            self.figures.update.set(self.scorer.version.get("update", 0))
            if not self.scorer.follows:
                return
            await asyncio.sleep(pause := min(2 * pause, _RARE * every) if self.problem else every)
            before, problem = self.scorer.version, self.problem
            try:
                if await loop.run_in_executor(self._follower, poll):
                    self.figures.changes.inc()
                    self._note(f"{_named(self.scorer.version)} is served now, before it was {_named(before)}")
                self.problem = ""
            except Exception as error:  # the model is as before; the next look may find the new one whole
                self.problem = str(error) if isinstance(error, StokerError) else f"{type(error).__name__}: {error}"
                if self.problem != problem:
                    self._note(f"{_named(before)} is still served: {self.problem}")

    def _note(self, line: str) -> None:
        with contextlib.suppress(OSError, SystemExit):  # nobody reads the log any more: Rich would end the process
            self._log(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S%z} {line}")

    async def _sweep(self, runner: web.AppRunner) -> None:
        """Close connections on which no whole request has come for too long."""
        idle: dict[Any, tuple[int, float]] = {}  # requests of a connection before, and since when it has no other
        while True:
            await asyncio.sleep(_SWEEP)
            assert runner.server is not None
            now = time.monotonic()
            open_ = [each for each in runner.server.connections if getattr(each, "_current_request", None) is None]
            counts = {each: getattr(each, "_request_count", 0) for each in open_}
            idle = {
                each: found if (found := idle.get(each)) and found[0] == count else (count, now)
                for each, count in counts.items()
            }
            for each, (_, since) in idle.items():
                if now - since > self.settings.read_timeout:
                    each.force_close()


def _named(version: Mapping[str, Any]) -> str:
    return f"update {version['update']} (step {version['step']:,})"


def _failed(error: BaseException) -> RequestError:
    """Return what a client gets for an error of its rows, or of ours."""
    if isinstance(error, StokerError):
        return RequestError(422, str(error))
    traceback.print_exception(error)
    return RequestError(500, f"the rows cannot be scored, {type(error).__name__}: {error}. The server's log has more.")


def _objects(found: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not found or not all(isinstance(row, dict) for row in found):
        raise RequestError(400, f"{what} is not a list of one or more objects, each with the columns of a row.")
    return found


def _numbers(scores: ScoreArray) -> ScoreArray:
    """Return scores that JSON can have."""
    if (odd := np.isnan(scores)).any():
        why = "its score is not a number, as a value is too large for the model"
        raise RequestError(422, f"row {odd.argmax()}: {why}.")
    return scores


def _count(found: Any) -> int:
    text = f"a {type(found).__name__}" if isinstance(found, dict | list) else found
    text = text if isinstance(text, str) else json.dumps(text)
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or not 0 < int(text) <= 2**31:
        raise RequestError(400, f"k is {text[:20]}, and it must be a whole number from 1 to {2**31:,}.")
    return int(text)


def _search(retriever: Retriever, users: list[dict[str, Any]], k: int) -> Retrieved:
    try:
        return retriever.topk(users, k)
    except BaseException as error:  # a panic of Polars is not an Exception
        raise _failed(error) from None


async def serve(server: Server, started: Callable[[Server], None]) -> None:
    """Serve until Ctrl-C or SIGTERM, then answer what has come; call ``started`` when requests are answered."""
    ending = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows
            asyncio.get_running_loop().add_signal_handler(number, ending.set)
    async with server.running():
        started(server)
        await ending.wait()
