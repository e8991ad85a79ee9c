"""Ask a server for scores, with the standard library and pyarrow only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
import numpy.typing as npt

from stoker.base.errors import DataError, StokerError

_ARROW = "application/vnd.apache.arrow.stream"


class Client:
    """A server of ``stoker serve``.

    >>> client = stoker.Client("http://localhost:8000")
    >>> client.url, client.version  # client.score(frame) returns scores, and sets the version of the model
    ('http://localhost:8000', {})

    Args:
        url: of the server, such as http://localhost:8000.
        timeout: seconds until an answer must have come.
    """

    def __init__(self, url: str, *, timeout: float = 30.0) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        self.version: Mapping[str, int] = {}  # of the model that gave the last answer

    def score(self, table: Any) -> npt.NDArray[np.float32]:
        """Return the score of each row of a table: Polars, pandas, Arrow.

        Raises:
            DataError: the rows do not fit; the message names the cause.
            StokerError: there is no answer, or the server has too much to do.
        """
        import pyarrow as pa

        from stoker.prep.requests import as_frame

        arrow = as_frame(table).to_arrow()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, arrow.schema) as writer:
            writer.write_table(arrow)
        answer = pa.ipc.open_stream(self._ask("/score", sink.getvalue(), _ARROW)).read_all()
        self.version = {key.decode(): int(value) for key, value in (answer.schema.metadata or {}).items()}
        scores: npt.NDArray[np.float32] = answer["score"].to_numpy()
        return scores

    def topk(self, user: Mapping[str, Any], candidates: Sequence[Mapping[str, Any]], k: int) -> list[tuple[int, float]]:
        """Return the places of the ``k`` best candidates of a user, best first, with their scores.

        Args:
            user: the columns that all rows share.
            candidates: the other columns, an object for each candidate.
            k: how many.
        """
        body = {"user": dict(user), "candidates": [dict(each) for each in candidates], "k": k}
        answer = self._ask_json("/topk", body)
        return list(zip(answer["best"], answer["scores"], strict=True))

    def retrieve(self, users: Sequence[Mapping[str, Any]], k: int = 10) -> list[list[tuple[Any, float]]]:
        """Return the ``k`` best items of the catalogue for each user, best first, with their scores.

        Args:
            users: the columns of a user, an object for each.
            k: how many items.

        Raises:
            DataError: the users do not fit, or the server was started without ``--retrieve``.
            StokerError: there is no answer, or the server has too much to do.
        """
        body = {"users": [dict(each) for each in users], "k": k}
        answer = self._ask_json("/retrieve", body)
        return [list(zip(*each, strict=True)) for each in zip(answer["items"], answer["scores"], strict=True)]

    def _ask_json(self, path: str, body: Any) -> Any:
        answer = json.loads(self._ask(path, json.dumps(body, allow_nan=False).encode(), "application/json"))
        self.version = {key: answer[key] for key in ("update", "step") if key in answer}
        return answer

    def _ask(self, path: str, body: Any, kind: str) -> bytes:
        headers = {"Content-Type": kind, "Accept": kind}
        try:
            with urlopen(Request(self.url + path, bytes(body), headers), timeout=self.timeout) as answer:
                found: bytes = answer.read()
                return found
        except HTTPError as error:
            try:
                cause = str(json.loads(error.read())["error"])
            except (ValueError, KeyError, TypeError):
                cause = error.reason
            raise (StokerError if error.code >= 500 else DataError)(f"{self.url}{path}: {cause}") from error
        except (URLError, TimeoutError, ConnectionError) as error:
            raise StokerError(f"{self.url} gives no answer: {error}. Check that stoker serve runs there.") from error
