"""The server: scores of `stoker predict` to the bit, updates that are followed, and clients that do not behave."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from http.client import HTTPConnection
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import stoker

pytest.importorskip("aiohttp", reason="the server needs aiohttp")
pytest.importorskip("prometheus_client", reason="the server's metrics need prometheus_client")

from stoker.base.errors import ConfigError
from stoker.cli import app, main
from stoker.prep.requests import as_frame
from stoker.serve.bodies import RequestError, _written, arrow_rows
from stoker.serve.client import _plain
from stoker.serve.server import Server, serve
from stoker.serve.settings import ServeSettings
from stoker.testing import make_daily_run
from tests.campaigns import scaled


@pytest.mark.parametrize("name", ["poll", "read_timeout"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_times_that_end_no_wait_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        ServeSettings(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("wait", 1e300), ("max_body", 0), ("max_body", "0.5")])
def test_settings_by_which_no_request_is_answered_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .*; it must be (0 to 600000|at least 1)\."):
        ServeSettings(**{name: value})


@contextmanager
def served(
    scorer: stoker.Scorer, retriever: stoker.Retriever | None = None, log: Any = None, **settings: Any
) -> Iterator[Server]:
    """Serve in a thread."""
    began = threading.Event()
    found: list[Any] = []
    chosen = ServeSettings(port=0, poll=0.02, **settings)

    async def work() -> None:
        ended = asyncio.Event()
        async with Server(scorer, chosen, retriever, log=log).running() as server:
            found.extend([server, ended, asyncio.get_running_loop()])
            began.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    assert began.wait(60)
    try:
        yield found[0]
    finally:
        found[2].call_soon_threadsafe(found[1].set)
        thread.join(60)


def ask(server: Server, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Return the status and the answer."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    given = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, given, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text[:1] == b"{" else text.decode()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    run = tmp_path_factory.mktemp("served") / "run"
    return run, make_daily_run(run, days=2)


@pytest.mark.slow
def test_requests_of_any_sizes_get_the_scores_of_predict(shop: tuple[Path, Any]) -> None:
    run, [log, _] = shop
    rows = log.select("item", "user")
    data = stoker.prepare(like=run.with_name("run-data"), files=log)
    wanted = stoker.predict(stoker.load(run).model, data.test).scores
    with served(stoker.Scorer(run)) as server:
        client = stoker.Client(f"http://127.0.0.1:{server.port}")

        def work(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(scaled(40)):
                begin = draw.randrange(len(wanted))
                end = min(len(wanted), begin + draw.choice([1, 2, 9, 80, 300]))
                if draw.random() < 0.5:
                    found = client.score(rows[begin:end])
                else:
                    status, answer = ask(server, "/score", {"rows": rows[begin:end].to_dicts()})
                    assert status == 200
                    found = np.array(answer["scores"], np.float32)
                assert found.tobytes() == wanted[begin:end].tobytes()

        together(work, 4)
        user, items = rows.row(0, named=True)["user"], [{"item": item} for item in range(20)]
        best = client.topk({"user": user}, items, 5)
        scores = client.score(rows.head(20).with_columns(item=np.arange(20), user=user))
        assert [place for place, _ in best] == np.argsort(-scores, kind="stable")[:5].tolist()
        alike = [place for place, _ in client.topk({"user": user}, [{"item": 1}, {"item": 2}] * 150, 5)]
        assert alike in ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9]), "among equal candidates the first"
        _, text = ask(server, "/metrics")
        assert 'stoker_requests_total{path="/score",status="200"}' in text


def together(work: Any, count: int) -> None:
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    ("body", "status", "cause"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"rows": [{"item": NaN, "user": 1}]}', 400, "NaN is not a JSON value"),
        ([], 400, "the body is a list"),
        ({"lines": []}, 400, "an object with ['lines']; expected an object with rows"),
        ({"rows": []}, 400, "rows is not a list of one or more objects"),
        ({"rows": [{"item": 1}]}, 422, "the rows lack 'user'"),
        ({"rows": [{"item": 1, "user": 2, "color": 3}]}, 422, "does not know: 'color'"),
        ({"rows": [{"item": 1, "user": 2}, {"item": "x", "user": 2}]}, 422, "row 1: column item: 'x' is not a whole"),
        ({"rows": [{"item": [1], "user": 2}]}, 422, "row 0: column item holds several values"),
        (b" " * 5000, 413, "1,000 are allowed"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_its_cause(
    small: Server, body: Any, status: int, cause: str
) -> None:  # fmt: skip
    found, answer = ask(small, "/score", body)
    assert found == (413 if isinstance(body, bytes) and len(body) > 1000 else status)
    if found == status:
        assert cause in answer["error"]
    assert ask(small, "/score", {"rows": [{"item": 1, "user": 2}]})[0] == 200


@pytest.fixture(scope="module")
def small(shop: tuple[Path, Any]) -> Iterator[Server]:
    with served(stoker.Scorer(shop[0]), max_body="1kB", read_timeout=0.3) as server:
        yield server


def _stream(columns: dict[str, Any], **options: Any) -> bytes:
    table, sink = pa.table(columns), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(use_threads=False, **options)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _texts(*ends: int) -> bytes:
    """Return a stream whose column item is said to have texts with these ends."""
    whole = _stream({"item": pa.array(["1", "2"], pa.large_string()), "user": [1, 2]})
    known = np.array([0, 1, 2]).tobytes()
    assert whole.count(known) == 1
    return whole.replace(known, np.array(ends).tobytes())


@pytest.mark.parametrize(
    ("body", "status", "cause"),
    [
        (_texts(0, 1, 2), 200, ""),
        (_texts(0, 10**12, 2 * 10**12), 400, "larger than values array"),
        (_texts(-(2**40), 0, 2), 400, "Negative offsets"),
        (_texts(0, 2, 1), 400, "non-monotonic"),
        (_stream({"item": [1, 2], "user": [1, 2]})[:-30], 400, "not a valid Arrow stream"),
        (_stream({"item": [1] * 99, "user": [1] * 99}, compression="zstd"), 400, "compressed"),
        (_stream({"item": pa.nulls(10**6), "user": pa.nulls(10**6)}), 413, "1,000,000 rows"),
        (_stream({"item": pa.array(["x" * 300] * 11).dictionary_encode(), "user": [1] * 11}), 413, "11 rows"),
        (_stream({"item": [{"a": 1}], "user": [1]}), 400, "struct"),
    ],
)
def test_arrow_streams_are_checked_before_they_are_read(small: Server, body: bytes, status: int, cause: str) -> None:
    assert len(body) < 3000
    with served(small.scorer, max_body=3000) as server:
        kind = {"Content-Type": "application/vnd.apache.arrow.stream"}
        found, answer = ask(server, "/score", body, **kind)
        assert (found, cause in answer.get("error", "")) == (status, True)
        assert ask(server, "/score", _texts(0, 1, 2), **kind)[0] == 200


def test_bytes_of_values_are_those_of_each_written_out() -> None:
    views = pa.array(["x", "y" * 50, "zz"], pa.string_view())
    for array, size in (
        (pa.array([[1], [2, 3], []]), 3 * 8 + 3), (pa.array([[]] * 9), 9), (pa.array([True] * 80), 80),
        (pa.nulls(5), 5), (pa.array([1, 2], pa.int16()), 4), (views, 53 + 3), (views.slice(1, 1), 50 + 1),
        (pa.DictionaryArray.from_arrays(pa.array([1, 1, 0, None]), views), 51 + 51 + 2 + 4),
    ):  # fmt: skip
        assert _written(array) == size, array.type
    empty = _stream({"item": pa.nulls(10**6)})
    table = pa.ipc.open_stream(empty).read_all().select([])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(RequestError, match="1,000,000 rows take 0 bytes"):
        arrow_rows(bytes(sink.getvalue()), 1000)


class Asked(list[Any]):
    """Requests that have come; then none for a moment, then the end."""

    def get(self, timeout: float | None = None) -> Any:
        if not self and timeout is not None:
            raise Empty
        return self.pop(0) if self else None


@given(sizes=st.lists(st.integers(1, 15), max_size=30), most=st.integers(1, 12))
def test_batches_are_the_requests_in_order_and_not_too_large(sizes: list[int], most: int) -> None:
    server = Server(SimpleNamespace(lock=threading.RLock()), ServeSettings(batch_rows=most))  # type: ignore[arg-type]
    requests = [SimpleNamespace(rows=[{}] * size, since=0.0) for size in sizes]
    server._waiting = Asked(requests)  # type: ignore[assignment]
    batches = list(server._batches())
    assert [id(each) for batch in batches for each in batch] == [id(each) for each in requests]
    for batch in batches:
        assert len(batch) == 1 or sum(len(each.rows) for each in batch) <= most


def test_a_client_that_has_gone_takes_no_answer_of_others(small: Server) -> None:
    loop = asyncio.new_event_loop()
    gone, here = [SimpleNamespace(rows=[{}], scores=loop.create_future()) for _ in range(2)]
    gone.scores.cancel()
    small._deliver([gone, here], [(1, {}), (2, {})])  # type: ignore[list-item]
    assert here.scores.result() == (2, {})
    loop.close()
    assert ask(small, "/score", {"rows": [{"item": 1, "user": 2}], "more": 1})[0] == 400
    assert ask(small, "/nowhere/at/all", {})[0] == 404
    text = small.figures.generate(small.figures.registry).decode()
    assert 'path="other",status="404"' in text
    assert "nowhere" not in text


def test_a_request_that_does_not_fit_is_refused_alone(small: Server) -> None:
    good, bad = [{"item": "1", "user": "2"}], [{"item": "1"}]
    wanted = small.scorer.score_together([good])[0]
    for requests in ([good, bad, good], [bad]):
        for rows, found in zip(requests, small._scored(requests), strict=True):
            if rows is bad:
                assert isinstance(found, RequestError)
                assert found.status == 422
            else:
                assert found[0].tobytes() == wanted.tobytes()
    body = {"user": {"user": 2}, "candidates": [{"item": 1}, {"item": 1, "user": 3}], "k": 1}
    status, answer = ask(small, "/topk", body)
    assert (status, "user and candidates both have ['user']" in answer["error"]) == (400, True)


def test_a_compressed_dictionary_alone_is_not_read() -> None:
    whole = _stream({"item": pa.array(["x" * 10**6]).dictionary_encode()}, compression="zstd")
    schema, dictionary, *_ = pa.ipc.MessageReader.open_stream(whole)
    assert dictionary.type == "dictionary"
    body = b"".join(each.serialize().to_pybytes() for each in (schema, dictionary)) + b"\xff\xff\xff\xff" + bytes(4)
    with pytest.raises(RequestError, match="compressed"):
        arrow_rows(body, 10_000)


def test_damaged_streams_do_not_end_the_process() -> None:
    draw = random.Random(5)
    whole = _stream({
        "a": pa.array(["x", None, "a text of more than twelve bytes"], pa.string_view()), "b": [[1], None, [2, 3]],
        "c": pa.array(["a", "b", None]).dictionary_encode(), "d": [True, None, False],
    })  # fmt: skip
    read = 0
    for _ in range(scaled(2000)):
        damaged = bytearray(whole)
        for _ in range(draw.choice([1, 2, 5])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        with contextlib.suppress(RequestError, stoker.DataError):
            as_frame(arrow_rows(bytes(damaged), 10_000))
            read += 1
    assert read  # some damage is in padding


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", b" 400 "),
        (b"GET /healthz HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n", b" 400 "),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b" 400 "),  # TLS
        (b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", b" 400 "),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", b" 400 "),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n", b" 413 "),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"800\r\n" + b" " * 2048 + b"\r\n",
         b" 413 "),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\n", b" 415 "),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", None),  # then closes its side
    ],
)  # fmt: skip
def test_connections_that_break_the_protocol_are_answered_or_closed(
    small: Server, sent: bytes, answer: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", small.port)) as client:
        client.settimeout(30)
        with contextlib.suppress(ConnectionError):  # the answer may come before all is sent
            client.sendall(sent)
            if answer is None:
                client.shutdown(socket.SHUT_WR)
        assert ask(small, "/score", {"rows": [{"item": 1, "user": 2}]})[0] == 200
        found = client.recv(1000)
        assert found == b"" if answer is None else answer in found.split(b"\r\n")[0]
    assert not [each for each in caplog.records if each.exc_info and answer is None], "tracebacks of what clients do"


def test_an_error_of_ours_is_answered_and_the_next_request_is_scored(
    shop: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As Polars raises it."""

    def fail(_: Any) -> None:
        raise Panic("of a library")

    scorer = stoker.Scorer(shop[0])
    with served(scorer) as server:
        with monkeypatch.context() as patch:
            patch.setattr(scorer, "score_together", fail)
            status, answer = ask(server, "/score", {"rows": [{"item": 1, "user": 2}]})
            assert (status, "Panic: of a library" in answer["error"]) == (500, True)
        assert ask(server, "/score", {"rows": [{"item": 1, "user": 2}]})[0] == 200


def test_a_lone_client_does_not_wait_for_others(shop: tuple[Path, Any]) -> None:
    with served(stoker.Scorer(shop[0]), wait=100_000) as server:
        for _ in range(3):
            assert ask(server, "/score", {"rows": [{"item": 1, "user": 2}]})[0] == 200


def test_other_paths_and_methods_are_refused(small: Server) -> None:
    assert ask(small, "/nothing")[0] == 404
    for path, allowed in (("/score", "POST"), ("/healthz", "GET,HEAD")):
        connection = HTTPConnection("127.0.0.1", small.port, timeout=60)
        connection.request("DELETE", path)
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Allow"]) == (405, allowed)
        connection.close()
    assert ask(small, "/healthz") == (200, {"status": "ok", "update": 0, "step": 4, "problem": ""})
    arrow = {"Content-Type": "application/vnd.apache.arrow.stream"}
    assert ask(small, "/score", b"no arrow", **arrow)[0] == 400
    client = stoker.Client(f"http://127.0.0.1:{small.port}")
    with pytest.raises(stoker.DataError, match="k is 0, and it must be"):
        client.topk({"user": 1}, [{"item": 2}], 0)
    with pytest.raises(stoker.DataError, match="k is 1000000000000, and it must be a whole number from 1 to 2,147,483"):
        client.topk({"user": 1}, [{"item": 2}], 10**12)
    with pytest.raises(stoker.StokerError, match="gives no answer"):
        stoker.Client("http://127.0.0.1:9").topk({}, [{}], 1)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", b"SSH-2.0-OpenSSH\r\n"])
def test_an_answer_that_breaks_off_or_is_no_http_is_an_error_of_the_server(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def work() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(10_000):
                    pass

        thread = threading.Thread(target=work)
        thread.start()
        with pytest.raises(stoker.StokerError, match="gives no answer"):
            stoker.Client(f"http://127.0.0.1:{other.getsockname()[1]}").topk({"user": 1}, [{"item": 2}], 1)
        thread.join()


def test_a_client_sends_values_of_numpy_and_times_and_names_the_column_of_others(small: Server) -> None:
    client = stoker.Client(f"http://127.0.0.1:{small.port}")
    best = client.topk({"user": np.int64(1)}, [{"item": np.int32(2)}, {"item": np.array(3)}], 1)
    assert best == client.topk({"user": 1}, [{"item": 2}, {"item": 3}], 1)
    for moment in (datetime(2026, 3, 1), np.datetime64("2026-03-01", "ns")):
        with pytest.raises(stoker.DataError, match="column item: '2026-03-01T00:00:00' is not a whole number"):
            client.topk({"user": 1}, [{"item": moment}], 1)
    missing = pl.Series([None], dtype=pl.Datetime("us")).to_pandas()[0]  # NaT
    assert client.topk({"user": missing}, [{"item": 2}], 1) == client.topk({"user": None}, [{"item": 2}], 1)
    for value in (np.inf, b"x"):
        with pytest.raises(stoker.DataError, match=f"column item: {value!r} cannot be sent"):
            client.topk({"user": 1}, [{"item": value}], 1)
        with pytest.raises(stoker.DataError, match=f"column user: {value!r} cannot be sent"):
            client.retrieve([{"user": value}], 1)
    rows = pl.DataFrame({"item": [2, 3]})
    for user, candidates, found in [(1, [{"item": 2}], "user: a value of type int"), ({"user": 1}, 2, "type int"),
                                    ({"user": 1}, rows, "candidates: a value of type Series"),
                                    ({"user": 1}, rows.to_pandas(), "type str")]:  # fmt: skip
        with pytest.raises(stoker.DataError, match=found + " has no names of columns"):
            client.topk(user, candidates, 1)  # type: ignore[arg-type]
    with pytest.raises(stoker.DataError, match=r"users: .*Series.*to_dicts\(\)"):
        client.retrieve(pl.DataFrame({"user": [2, 3]}), 1)  # type: ignore[arg-type]
    assert client.topk({"user": 1}, iter(rows.to_dicts()), 1) == best  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_best_of_objects_have_the_scores_of_a_table(tmp_path: Path) -> None:
    """Decimals, times with a zone and missing numbers mean in JSON what they mean in Arrow."""
    random, n = np.random.default_rng(0), 200
    times = pl.Series([datetime(2026, 3, 1, int(hour)) for hour in random.integers(0, 20, n)])
    log = pl.DataFrame({
        "y": random.integers(0, 2, n), "at": times.dt.replace_time_zone("Europe/Berlin"),
        "price": pl.Series([Decimal(int(cents)) / 100 for cents in random.integers(0, 900, n) // 10 * 5],
                           dtype=pl.Decimal(30, 3)),
        "size": pl.Series([Decimal(int(each)) for each in random.integers(0, 9, n)], dtype=pl.Decimal(10, 2)),
        "cost": random.random(n).round(3),
    })  # fmt: skip
    schema = {"name": "shop", "label": "y", "dense": [{"name": "cost"}, {"name": "level", "source": "price"}],
              "categorical": [{"name": "at"}, {"name": "price"}, {"name": "size", "type": "int"}]}  # fmt: skip
    stoker.prepare(stoker.Schema.from_dict(schema), log, out=tmp_path / "data")
    stoker.train(tmp_path / "data", out=tmp_path / "run", display="quiet", batch_size=8, epochs=3, row_lr=0.5)
    rows = log.drop("y").head(9).with_columns(cost=pl.Series([0.5, None, float("nan")] * 3))
    with served(stoker.Scorer(tmp_path / "run")) as server:
        client = stoker.Client(f"http://127.0.0.1:{server.port}")
        wanted = client.score(rows)
        for objects in (rows.to_dicts(), rows.to_pandas().to_dict("records")):
            best = client.topk({}, objects, len(rows))
            assert [place for place, _ in best] == np.argsort(-wanted, kind="stable").tolist()
            assert np.array([score for _, score in best], np.float32).tobytes() == np.sort(wanted)[::-1].tobytes()


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ("3.10", 3.1), ("5.00", 5), ("-0", 0), ("1E+20", 10**20), ("0.00001", "0.00001"), ("0.1000", 0.1),
        ("123456789012345678.25", "123456789012345678.25"), ("1E-7", "0.0000001"), ("900", 900),
    ],
)  # fmt: skip
def test_a_decimal_is_sent_with_all_its_digits(value: str, sent: Any) -> None:
    assert _plain([Decimal(value)]) == [sent]
    assert type(_plain(Decimal(value))) is type(sent)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_a_narrow_float_is_sent_as_the_number_of_its_text(kind: Any) -> None:
    assert _plain({"a": kind(0.1), "b": np.array([0.1, np.nan, 3], kind)}) == {"a": 0.1, "b": [0.1, None, 3]}


def test_a_score_that_is_not_a_number_is_no_json(tmp_path: Path) -> None:
    """Float32 has no 1e39. Arrow has not-a-numbers, as the files of ``predict`` have."""
    rows = [{"cost": cost, "item": item, "user": 1} for cost, item in ((2.0, 1), (1e39, 2))]
    log = pl.DataFrame(rows * 50).with_columns(y=pl.Series([0, 1, 1, 0] * 25))
    schema = {"name": "shop", "label": "y", "dense": [{"name": "cost"}],
              "categorical": [{"name": "item", "type": "int"}, {"name": "user", "type": "int"}]}  # fmt: skip
    stoker.prepare(stoker.Schema.from_dict(schema), log.with_columns(cost=2.0), out=tmp_path / "data")
    options = {"model": "two-tower", "model_options": {"item": ("item",)}}
    stoker.train(tmp_path / "data", out=tmp_path / "run", display="quiet", batch_size=8, epochs=1, **options)
    scorer = stoker.Scorer(tmp_path / "run")
    with served(scorer, stoker.Retriever(tmp_path / "run")) as server:
        user, candidates = {"user": 1, "cost": 1e39}, [{"item": 1}, {"item": 2}]
        assert ask(server, "/score", {"rows": rows}) == (
            422, {"error": "row 1: its score is not a number, as a value is too large for the model."}
        )  # fmt: skip
        status, answer = ask(server, "/topk", {"user": user, "candidates": candidates, "k": 1})
        assert status == 422
        assert "row 0: its score is not a number" in answer["error"]
        status, answer = ask(server, "/retrieve", {"users": [{"user": 1, "cost": 2}, user], "k": 1})
        assert (status, answer["error"]) == (
            422,
            "row 1: this user has no vector, as a value is too large for the model.",
        )
        found = stoker.Client(f"http://127.0.0.1:{server.port}").score(pl.DataFrame(rows))
    assert np.isnan(found).tolist() == [False, True]
    assert found.tobytes() == scorer.score(pl.DataFrame(rows)).tobytes()


def test_a_client_sends_wide_integers_and_refuses_objects(small: Server) -> None:
    """Arrow has no integers of 128 bits, and of Python objects Polars would send the addresses."""
    client, rows = stoker.Client(f"http://127.0.0.1:{small.port}"), pl.DataFrame({"item": [1, None], "user": [2, 3]})
    wide = rows.with_columns(pl.col("item").cast(pl.Int128))
    assert client.score(wide).tobytes() == small.scorer.score(wide).tobytes() == client.score(rows).tobytes()
    objects = rows.with_columns(user=pl.Series([2, "3"], dtype=pl.Object))
    lists = rows.with_columns(user=pl.Series([[2], [3]], dtype=pl.List(pl.Int128)))
    for odd, kind in ((objects, "Object"), (lists, r"List\(Int128\)")):
        with pytest.raises(stoker.DataError, match=f"column user holds {kind}.*, which cannot be sent"):
            client.score(odd)


def test_slow_clients_are_sent_away_and_others_do_not_notice(small: Server) -> None:
    with socket.create_connection(("127.0.0.1", small.port)) as slow, \
         socket.create_connection(("127.0.0.1", small.port)) as slower:  # fmt: skip
        slow.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        slower.sendall(b"POST /score HT")
        assert ask(small, "/score", {"rows": [{"item": 1, "user": 2}]})[0] == 200
        slow.settimeout(30)
        assert b" 408 " in slow.recv(1000).split(b"\r\n")[0]
        slower.settimeout(30)
        assert slower.recv(1000) == b""


@pytest.mark.slow
def test_a_busy_client_is_not_taken_for_an_idle_one(shop: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the connections may come between two of its requests."""
    monkeypatch.setattr("stoker.serve.server._SWEEP", 0.01)
    looks = list[int]()

    def now() -> float:
        looks.append(1)
        return float(len(looks))  # a second a look

    with served(stoker.Scorer(shop[0]), read_timeout=60.0) as server:
        monkeypatch.setattr("stoker.serve.server.time", SimpleNamespace(monotonic=now, perf_counter=time.perf_counter))
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.auto_open = 0  # a closed connection is not opened again
        connection.connect()
        while len(looks) < 150:
            connection.request("GET", "/healthz")
            assert connection.getresponse().read()
        while len(looks) < 400:  # nothing is asked
            time.sleep(0.01)
        assert connection.sock.recv(1) == b"", "it is closed"
        connection.close()


def test_too_much_work_is_refused(shop: tuple[Path, Any]) -> None:
    scorer = stoker.Scorer(shop[0])
    with served(scorer, max_waiting=1, wait=0) as server:
        found: list[int] = []
        scorer.lock.acquire()  # nothing is scored
        threads = []
        try:
            while 503 not in found:
                threads.append(threading.Thread(
                    target=lambda: found.append(ask(server, "/score", {"rows": [{"item": 1, "user": 2}]})[0])
                ))  # fmt: skip
                threads[-1].start()
                threads[-1].join(0.05)
        finally:
            scorer.lock.release()
        for thread in threads:
            thread.join()
        assert set(found) == {200, 503}


@pytest.mark.skipif(sys.platform == "win32", reason="the loop takes no signals there")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_that_has_come_is_answered_before_the_server_ends(
    shop: tuple[Path, Any], number: signal.Signals
) -> None:
    scorer, threads, found = stoker.Scorer(shop[0]), list[threading.Thread](), list[Any]()
    score = scorer.score_together

    def slow(requests: Any) -> Any:
        os.kill(os.getpid(), number)
        time.sleep(0.1)  # the server notices, and waits
        return score(requests)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt  # as the command line has it

    def started(server: Server) -> None:
        body = {"rows": [{"item": 1, "user": 2}]}
        threads.append(threading.Thread(target=lambda: found.append(ask(server, "/score", body))))
        threads[0].start()

    scorer.score_together = slow  # type: ignore[method-assign]
    before = signal.signal(number, stop)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(Server(scorer, ServeSettings(port=0)), started))
    finally:
        signal.signal(number, before)
    threads[0].join(60)
    assert [status for status, _ in found] == [200]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_does_not_begin_if_an_import_lost_its_end(
    shop: tuple[Path, Any], number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Losing(stoker.Scorer):
        def warm_up(self) -> str:
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), number)
                time.sleep(5)
            return ""

    monkeypatch.setattr("stoker.serve.scorer.Scorer", Losing)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(shop[0]), "--port", "0"])
    assert ended.value.code == 128 + number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert "serving" not in capsys.readouterr().out


@pytest.mark.slow
def test_an_error_of_the_system_does_not_end_following(tmp_path: Path) -> None:
    [day] = make_daily_run(tmp_path / "run")[:1]
    scorer = stoker.Scorer(tmp_path / "run", follow=True)
    poll, problems = scorer.poll, list[str]()

    def failing() -> bool:
        problems.append(server.problem)
        if len(problems) < 3:
            raise OSError(24, "Too many open files")
        return poll()

    scorer.poll = failing  # type: ignore[method-assign]
    stoker.update(tmp_path / "run", day)
    with served(scorer) as server:
        wait_for(stoker.Client(f"http://127.0.0.1:{server.port}"), day.select("item", "user"), 1)
        while server.problem:
            pass
    assert problems[1:3] == ["OSError: [Errno 24] Too many open files"] * 2


def test_looks_for_updates_that_fail_are_said_once_and_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, lines = list[float](), list[str]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 9:
            raise asyncio.CancelledError

    def poll() -> bool:
        if len(pauses) < 7:
            raise OSError("damaged")
        return False

    scorer: Any = SimpleNamespace(lock=threading.RLock(), version={"update": 0, "step": 1}, follows=True, poll=poll)
    server = Server(scorer, ServeSettings(poll=0.5), log=lines.append)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(server._poll())
    assert pauses == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 0.5, 0.5]
    assert len(lines) == 1


@pytest.mark.slow
def test_each_change_of_the_model_is_a_line_of_the_log_and_is_counted(tmp_path: Path) -> None:
    run, lines = tmp_path / "run", list[str]()
    [day] = make_daily_run(run, days=1)
    step = stoker.load(run).step

    def log(line: str) -> None:
        lines.append(line.split(" ", 2)[2])  # without the time
        raise BrokenPipeError if len(lines) < 2 else SystemExit  # nobody reads it

    def wait(count: int) -> None:
        for _ in range(1000):
            if len(lines) == count:
                return
            threading.Event().wait(0.02)

    with served(stoker.Scorer(run, follow=True), log=log) as server:
        last = stoker.update(run, day).step
        wait(1)
        stoker.rollback(run)
        wait(2)
        (run / "head.json").write_text("{")
        wait(3)
        (run / "head.json").unlink()
        while server.problem:
            pass
        _, text = ask(server, "/metrics")
    then, now = f"update 0 (step {step:,})", f"update 1 (step {last:,})"
    assert lines[:2] == [f"{now} is served now, before it was {then}", f"{then} is served now, before it was {now}"]
    assert lines[2].startswith(f"{then} is still served: {run / 'head.json'} is garbled")
    assert len(lines) == 3
    assert "stoker_changes_total 2.0" in text


@pytest.mark.slow
def test_updates_and_roll_backs_are_followed_without_torn_scores(tmp_path: Path) -> None:
    run = tmp_path / "run"
    days = make_daily_run(run, days=2)
    rows = days[1].select("item", "user").head(50)
    truth = {0: stoker.Scorer(run).score(rows).tobytes()}
    scorer = stoker.Scorer(run, follow=True)
    with served(scorer) as server:
        client = stoker.Client(f"http://127.0.0.1:{server.port}")
        seen: list[tuple[int, bytes]] = []
        ended = threading.Event()

        def watch() -> None:
            own = stoker.Client(client.url)
            while not ended.is_set():
                scores = own.score(rows)
                seen.append((own.version["update"], scores.tobytes()))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            for number, day in enumerate(days, 1):
                stoker.update(run, day)
                truth[number] = stoker.Scorer(run).score(rows).tobytes()
                wait_for(client, rows, number)
            stoker.rollback(run)
            wait_for(client, rows, 1)
        finally:
            ended.set()
            thread.join()
        assert {number for number, _ in seen} >= {0, 1, 2}
        assert all(scores == truth[number] for number, scores in seen)


@pytest.mark.slow
def test_scores_are_not_torn_while_a_model_is_followed_in_another_thread(tmp_path: Path) -> None:
    run = tmp_path / "run"
    days = make_daily_run(run, days=1)
    rows = days[0].select("item", "user").head(5)
    scorer, ended = stoker.Scorer(run, follow=True), threading.Event()
    truth = {scorer.score(rows).tobytes()}
    stoker.update(run, days[0])
    truth.add(stoker.Scorer(run).score(rows).tobytes())
    head = run / "head.json"
    newest, seen = head.read_bytes(), set[bytes]()

    def follow() -> None:
        while not ended.is_set():
            head.unlink()
            scorer.poll()
            head.with_suffix(".new").write_bytes(newest)
            head.with_suffix(".new").replace(head)
            scorer.poll()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        for _ in range(scaled(4000)):
            seen.add(scorer.score(rows).tobytes())
    finally:
        ended.set()
        thread.join()
    assert seen == truth
    assert len(truth) == 2


@pytest.mark.slow
def test_each_process_keeps_its_figures_whoever_is_asked_for_them(tmp_path: Path) -> None:
    [day] = make_daily_run(tmp_path / "run", days=1)
    scorer = stoker.Scorer(tmp_path / "run", follow=True)
    with served(scorer, batch_rows=1) as server:

        def wait(name: str, value: float) -> None:
            for _ in range(1000):
                if server.figures.registry.get_sample_value(name) == value:
                    return
                threading.Event().wait(0.02)
            raise AssertionError(name)

        stoker.update(tmp_path / "run", day)
        wait("stoker_update", 1.0)
        with scorer.lock:
            body = {"rows": [{"item": 1, "user": 2}]}
            threads = [threading.Thread(target=ask, args=(server, "/score", body)) for _ in range(3)]
            for thread in threads:
                thread.start()
            wait("stoker_waiting", 2.0)  # one is being scored
        for thread in threads:
            thread.join()
        wait("stoker_waiting", 0.0)


def wait_for(client: stoker.Client, rows: Any, number: int) -> None:
    while client.score(rows) is not None and client.version["update"] != number:
        pass


@pytest.mark.slow
def test_items_are_found_while_a_run_is_updated(tmp_path: Path) -> None:
    options = {"model": "two-tower", "model_options": {"item": ("item",)}, "loss": "in-batch"}
    [day] = make_daily_run(tmp_path / "run", days=1, **options)
    retriever = stoker.Retriever(tmp_path / "run", follow=True)
    with served(retriever.scorer, retriever, batch_rows=4) as server:
        client = stoker.Client(f"http://127.0.0.1:{server.port}")

        def check(update: int) -> None:
            wanted = stoker.Retriever(tmp_path / "run").topk(day.head(2).select("user"), k=5)
            found = client.retrieve(day.head(2).select("user").to_dicts(), k=5)
            assert [[item for item, _ in each] for each in found] == wanted.items
            np.testing.assert_allclose([[score for _, score in each] for each in found], wanted.scores, rtol=1e-6)
            assert client.version["update"] == update

        def wait(update: int) -> None:
            for _ in range(1000):
                if client.retrieve([{"user": 1}], k=1) and client.version["update"] == update:
                    return
                threading.Event().wait(0.02)

        check(0)
        stoker.update(tmp_path / "run", day.with_columns(item=day["item"] + 15))
        wait(1)
        check(1)
        stoker.rollback(tmp_path / "run")
        wait(0)
        check(0)
        for body, status, cause in (
            ({"users": [{"user": 1}]}, 400, "expected an object with users, k"),
            ({"users": [], "k": 1}, 400, "users is not a list of one or more objects"),
            ({"users": [{"user": 1}], "k": int("9" * 999)}, 400, "k is 99999999999999999999, and it must be a whole"),
            ({"users": [{"user": 1}], "k": "3"}, 400, 'k is "3", and it must be a whole number from 1'),
            (rb'{"users": [{"user": 1}], "\u006b": "3"}', 400, 'k is "3", and'),
            (rb'{"users": [{"user": 1}], "\u006B" : "3", "k": 3}', 400, 'k is "3", and'),
            ({"users": [{"user": 1}], "k": 3.0}, 400, "k is 3.0, and"),
            ({"users": [{"user": 1}], "k": True}, 400, "k is true, and"),
            ({"users": [{"user": 1, "k": "x"}], "k": 3}, 422, "does not know: 'k'"),
            (b'{"users": [{}], "k": ' + b"[" * 980 + b"]" * 980 + b" " * 2**18 + b"}", 400, "k is a list, and"),
            ({"users": [{}], "k": 1}, 422, "the rows lack 'user'. They have: no columns; they need: user."),
            ({"users": [{"user": 1}] * 5, "k": 1}, 413, "4 users and 131,072 items are allowed"),
            ({"users": [{"age": 1}], "k": 1}, 422, "the rows lack 'user'"),
            ({"users": [{"user": "x"}], "k": 1}, 422, "'x' is not a whole"),
        ):
            found, answer = ask(server, "/retrieve", body)
            assert (found, cause in answer["error"]) == (status, True), answer
        assert ask(server, "/retrieve", b'{"users": [{"user": 1}], "k": 3, "k": "x"}')[0] == 200, "the first k counts"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stoker.serve.server._ITEMS", 7)
            found, answer = ask(server, "/retrieve", {"users": [{"user": 1}] * 4, "k": 2})
            assert (found, "7 items are allowed" in answer["error"]) == (413, True), answer
        server._searching += server.settings.max_waiting
        with pytest.raises(stoker.StokerError, match="256 requests wait already") as caught:
            client.retrieve([{"user": 1}])
        assert caught.type is stoker.StokerError, "the rows are fine"
        server._searching -= server.settings.max_waiting
        text = ask(server, "/metrics")[1]
        assert f"stoker_items {len(retriever)}.0" in text
        assert 'stoker_requests_total{path="/retrieve",status="422"} 4.0' in text
    with served(retriever.scorer) as server:
        assert ask(server, "/retrieve", {"users": [{"user": 1}], "k": 1})[0] == 404


def test_the_collector_skips_what_a_server_has_loaded(shop: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    async def run_server(*_: object) -> None:
        found.append((gc.isenabled(), gc.get_freeze_count() > 10_000))

    monkeypatch.setattr("stoker.serve.server.serve", run_server)
    monkeypatch.setattr("stoker.serve.scorer.Scorer.warm_up", lambda _: "row 0 lacks its time")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    try:
        ran = CliRunner().invoke(app, ["serve", str(shop[0])])
    finally:
        gc.unfreeze()
    assert (ran.exit_code, found) == (0, [(True, True)]), ran.output
    assert "the first requests load the kernels" in ran.output


def test_rows_that_do_not_fit_memory_are_refused_with_a_way_out(
    shop: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("stoker.base.device.total_memory", lambda: 1000)
    ran = CliRunner().invoke(app, ["serve", str(shop[0])])
    assert "but this machine has 1000 B of memory. Serve an export" in str(ran.exception), ran.output


def test_the_limit_of_a_body_may_have_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    ran = CliRunner().invoke(app, ["serve", str(tmp_path), "--max-body", "1MiB"])
    assert "is neither a checkpoint nor a run" in str(ran.exception), ran.output


def test_a_taken_port_is_said_before_the_model_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = CliRunner().invoke(app, ["serve", str(tmp_path / "nothing"), "--port", where.split(":")[1]])
    assert (
        str(ran.exception) == f"{where} cannot be served: {os.strerror(errno.EADDRINUSE)}. Choose another host or port."
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forks")
def test_workers_answer_on_one_socket_and_end_together(shop: tuple[Path, Any]) -> None:
    run, [log, _] = shop
    rows = log.select("item", "user").head(40)
    command = [sys.executable, "-u", "-m", "stoker", "serve", str(run), "--workers", "2", "--port", "0"]
    for how in ("SIGTERM", "a worker is killed"):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            line = next(each for each in process.stdout if "http://" in each)
            wanted = stoker.Scorer(run).score(rows)
            for _ in range(8):
                assert np.array_equal(stoker.Client(line.split()[-1]).score(rows), wanted)
            found = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            forks = [int(each) for each in found.read_text().split()] if found.exists() else []
            connection = HTTPConnection("127.0.0.1", int(line.rsplit(":", 1)[1]))
            connection.request("GET", "/metrics")
            assert "stoker_rows_total 320.0" in connection.getresponse().read().decode()
            connection.close()
            if how == "SIGTERM" or not forks:
                process.terminate()
            else:
                os.kill(forks[0], signal.SIGKILL)
            assert process.wait(60) == (2 if how == "a worker is killed" and forks else 0)
            assert ("a worker process ended" in process.stdout.read()) == (process.returncode == 2)
            assert not [each for each in forks if Path(f"/proc/{each}").exists()]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forks")
@pytest.mark.parametrize("kernels", [0, 3])  # lines about them before the end comes
def test_workers_that_end_while_they_load_leave_nothing_and_speak_once(
    shop: tuple[Path, Any], tmp_path: Path, kernels: int
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-u", "-m", "stoker", "serve", str(shop[0]), "--workers", "2", "--port", "0"]
    own = {**os.environ, "TMPDIR": str(temporary), "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own) as process:
        assert process.stdout is not None
        until = time.monotonic() + 60
        while not list(temporary.iterdir()) and time.monotonic() < until:
            time.sleep(0.01)
        lines = list[str]()
        while len(lines) < kernels and not any("serving" in line for line in lines):  # a quick machine says less
            lines.append(process.stdout.readline())
        process.terminate()
        process.wait(60)
        lines += process.stdout
    assert not list(temporary.iterdir())
    done = [line.split(" done in ")[0] for line in lines if "done in" in line]
    assert len(done) == len(set(done)), lines
    assert lines.count("interrupted\n") <= 1, lines
