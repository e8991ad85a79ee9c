"""Ask a server for scores, with the standard library and pyarrow only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import numpy.typing as npt

from stoker.base.errors import DataError, StokerError, require
from stoker.base.settings import checked_arguments

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

    @checked_arguments
    def __init__(self, url: str, *, timeout: float = 30.0) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        self.version: Mapping[str, int] = {}  # of the model that gave the last answer

    def score(self, table: Any) -> npt.NDArray[np.float32]:
        """Return the score of each row of a table: Polars, pandas, Arrow.

        Raises:
            DataError: the rows do not fit; the message names the cause.
            StokerError: there is no answer, or the server has too much to do.
        """
        pa = require("pyarrow", "Client.score needs")
        require("polars", "Client.score needs")
        from stoker.prep.requests import as_arrow

        arrow = as_arrow(table)
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

        Raises:
            DataError: the rows do not fit; the message names the cause.
            StokerError: there is no answer, or the server has too much to do.
        """
        [one], rows = _objects([user], "user", "{'user': 3}"), _objects(candidates, "candidates", "[{'item': 7}]")
        answer = self._ask_json("/topk", {"user": one, "candidates": rows, "k": k}, one, *rows)
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
        rows = _objects(users, "users", "[{'user': 3}]")
        answer = self._ask_json("/retrieve", {"users": rows, "k": k}, *rows)
        return [list(zip(*each, strict=True)) for each in zip(answer["items"], answer["scores"], strict=True)]

    def _ask_json(self, path: str, body: Mapping[str, Any], *rows: Mapping[str, Any]) -> Any:
        answer = json.loads(self._ask(path, _json(body, *rows), "application/json"))
        self.version = {key: answer[key] for key in ("update", "step") if key in answer}
        return answer

    def _ask(self, path: str, body: Any, kind: str) -> bytes:
        headers = {"Content-Type": kind, "Accept": kind}
        try:
            with urlopen(Request(self.url + path, bytes(body), headers), timeout=self.timeout) as answer:
                return bytes(answer.read())
        except HTTPError as error:
            try:
                cause = str(json.loads(error.read())["error"])
            except (ValueError, KeyError, TypeError):
                cause = error.reason
            raise (StokerError if error.code >= 500 else DataError)(f"{self.url}{path}: {cause}") from error
        except (OSError, HTTPException) as error:  # HTTPException: it breaks off, or is none of HTTP
            raise StokerError(f"{self.url} gives no answer: {error}. Check that stoker serve runs there.") from error


def _objects(given: Any, what: str, example: str) -> list[dict[str, Any]]:
    """Return the columns of each row."""
    rows = list(given) if isinstance(given, Iterable) else [given]
    odd = [type(each).__name__ for each in rows if not isinstance(each, Mapping)]
    if not odd:
        return [dict(each) for each in rows]
    raise DataError(
        f"{what}: a value of type {odd[0]} has no names of columns. Give {example}; the rows of a table are "
        "frame.to_dicts() in Polars, and frame.to_dict('records') in pandas."
    )


def _json(body: Mapping[str, Any], *rows: Mapping[str, Any]) -> bytes:
    """Return a body in JSON; an error names the column of its rows."""
    try:
        return json.dumps(_plain(body), allow_nan=False).encode()
    except (TypeError, ValueError):
        for name, value in (pair for row in rows for pair in row.items()):
            try:
                json.dumps(_plain(value), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"column {name}: {value!r} cannot be sent. Give numbers, texts, times or lists of these, and None "
                    "for a missing value."
                ) from error
        raise


def _plain(value: Any) -> Any:
    """Return a value as one that JSON has, which means what it means in a column of :meth:`Client.score`."""
    if isinstance(value, np.generic | np.ndarray) and value.dtype in (np.float16, np.float32):
        value = value.astype(str).astype(float)  # 0.1, not 0.10000000149
    if isinstance(value, np.generic | np.ndarray):  # datetime64[ns] would become numbers
        value = (value.astype("datetime64[us]") if value.dtype.kind == "M" else value).tolist()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float | date) and value != value:
        return None  # NaN, and NaT of pandas
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    if isinstance(value, date):
        return value.isoformat()
    return _number(value) if isinstance(value, Decimal) and value.is_finite() else value


def _number(value: Decimal) -> int | float | str:
    """Return a decimal without zeros at its end; as a text if no float is written with all its digits."""
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    number = float(text) if "." in text else int(text)
    return number if "." not in text or repr(number) == text else text
