"""Update a run with the messages of a topic of Kafka: batches of them become files, which :func:`watch` takes.

::

    RUN/stream/TOPIC-000000001.jsonl.gz    a batch; its gzip header has where each partition continues after it

A file appears whole or not at all, and an update uses a file once. So each message is trained on once: what comes next
is written in the newest file, and nothing is committed to Kafka.
"""

from __future__ import annotations

import gzip
import heapq
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from stoker.base.errors import ConfigError, DataError, StokerError, errors_as, require
from stoker.base.files import atomic_file
from stoker.base.remote import url_of
from stoker.dataset.dataset import Dataset
from stoker.live.journal import opened
from stoker.live.settings import POLL
from stoker.live.update import UpdateResult
from stoker.live.watch import watch
from stoker.prep.schema import Schema

_MOST = 100_000  # messages of a batch
_WAIT = 30.0  # seconds for an answer about a topic


def stream(run: str | Path, url: str, *, poll: float = POLL, **settings: Any) -> Iterator[UpdateResult]:
    """Update a run with the messages of a topic of Kafka, and yield each result, without end.

    A message is a row, as a JSON object in UTF-8. Each is trained on once, whenever the process is killed. The messages
    of a partition remain in their order; those of several are merged by their times.

    Args:
        run: as for :func:`stoker.update`.
        url: ``kafka://HOST:PORT,HOST:PORT/TOPIC?NAME=VALUE``, with settings of librdkafka such as
            ``security.protocol``. ``config=FILE`` reads settings from lines ``NAME=VALUE``, for passwords.
        poll: seconds in which messages are collected for an update, at most 100,000.
        settings: as for :func:`stoker.update`.

    Raises:
        ConfigError: the URL is not that of a topic, or the logs of the run are not JSON.
        DataError: Kafka does not answer, or deleted messages that were not read; or as :func:`stoker.update`.
        DependencyError: confluent-kafka is not installed.
    """
    topic = _Topic(run, url)
    try:
        results = topic.closing(watch(run, topic.folder, poll=poll, sleep=topic.fetch, **settings))
        next(results)  # into its block, so that close() of what nobody iterates closes the topic, too
        return results
    except BaseException:
        topic.consumer.close()
        raise


class _Topic:
    """Reads a topic after what the files of a folder have, and writes the next files."""

    def __init__(self, run: str | Path, url: str) -> None:
        self._kafka = require("confluent_kafka", "a stream of Kafka needs")
        parts = urlsplit(url)
        self.name, settings = parts.path.strip("/"), dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
        if parts.scheme != "kafka" or not parts.netloc or not self.name or "/" in self.name:
            raise ConfigError(f"{url} is not a topic. Write kafka://HOST:PORT/TOPIC.")
        if url_of(run) is not None:
            raise ConfigError(f"{run} is a URL, and files of a stream must stay in the run. Copy it to a local disk.")
        with opened(run) as journal:
            schema = Schema.from_dict(Dataset(journal.dataset).manifest["schema"], where=f"{run}: schema")
            used = [log["name"] for line in journal.lines for log in line["logs"]]
        if schema.source.kind not in ("auto", "jsonl"):
            raise ConfigError(f"the schema of {run} reads {schema.source.kind}, and messages are JSON. Write files "
                              "to a directory, and use --watch.")  # fmt: skip
        self.folder = Path(run) / "stream"
        self.folder.mkdir(exist_ok=True)
        files = sorted(self.folder.glob(f"{self.name}-*.jsonl.gz"))
        self._number, self._next, self._pending = 0, dict[int, int](), False  # the number of the newest file
        if files:
            self._number, self._next = int(files[-1].name[-18:-9]), _read_next(files[-1])
        if lost := sorted(name for name in used if _is_of(name, self.name) and int(name[-18:-9]) > self._number):
            raise DataError(f"{self.folder / lost[-1]} is missing, which says where the topic continues. Put it back.")
        file = settings.pop("config", None)
        with errors_as(ConfigError, f"{file} cannot be read", "Check config= of the URL."):
            lines = [] if file is None else Path(file).read_text(encoding="utf-8").splitlines()
        given = [line.partition("=") for line in lines if line.strip() and not line.startswith("#")]
        settings |= {name.strip(): value.strip() for name, _, value in given}
        own = {"bootstrap.servers": parts.netloc, "group.id": "stoker", "enable.auto.commit": False,
               "auto.offset.reset": "error"}  # fmt: skip
        with self._errors(ConfigError):
            self.consumer = self._kafka.Consumer({**settings, **own})
        self._assigned = False

    def closing(self, results: Iterator[UpdateResult]) -> Iterator[Any]:
        """Yield None, then the results; close the topic after the last."""
        try:
            yield
            yield from results
        finally:
            self.consumer.close()

    def _errors(self, kind: type[StokerError] = DataError) -> AbstractContextManager[None]:
        return errors_as(kind, f"topic {self.name} cannot be read", "", (self._kafka.KafkaException,))

    def fetch(self, seconds: float) -> None:
        """Write the messages of the next ``seconds`` to a file. If one waits to be used, do nothing."""
        if self._pending:
            self._pending = False
            return
        with self._errors():
            self._assign()
        end, count, ends = time.monotonic() + seconds, 0, dict(self._next)
        found: dict[int, list[tuple[int, bytes]]] = {}
        while count < _MOST and (left := end - time.monotonic()) > 0:
            for message in self.consumer.consume(min(1000, _MOST - count), left):
                if message.error() is not None:
                    raise DataError(f"topic {self.name}: {message.error()}.")
                partition, offset = message.partition(), message.offset()
                if offset < ends[partition]:
                    continue
                ends[partition] = offset + 1
                if message.value():  # a message without a value deletes a key
                    row = message.value().replace(b"\r", b" ").replace(b"\n", b" ")
                    found.setdefault(partition, []).append((message.timestamp()[1], row))
                    count += 1
        self._next = ends
        if count:
            self._write(heapq.merge(*(found[each] for each in sorted(found)), key=lambda one: one[0]))
            self._pending = True

    def _assign(self) -> None:
        """Read each partition from its next message; a new one from its first."""
        partitions = self.consumer.list_topics(self.name, _WAIT).topics[self.name].partitions
        if not partitions:
            raise DataError(f"there is no topic {self.name}. Check its name.")
        if self._assigned and len(partitions) <= len(self._next):
            return
        places = []
        for number in sorted(partitions):
            place = self._kafka.TopicPartition(self.name, number)
            first, end = self.consumer.get_watermark_offsets(place, _WAIT)
            wanted = self._next.setdefault(number, first)
            if not first <= wanted <= end:
                raise DataError(
                    f"partition {number} of {self.name} has messages {first:,} to {end:,}, and the next one is "
                    f"{wanted:,}: the others were deleted, or the topic was. Without them, begin again by deleting "
                    f"{self.folder}; what is there then is trained on, also what was before."
                )
            place.offset = wanted
            places.append(place)
        self.consumer.assign(places)
        self._assigned = True

    def _write(self, rows: Iterator[tuple[int, bytes]]) -> None:
        self._number += 1
        path = self.folder / f"{self.name}-{self._number:09d}.jsonl.gz"
        with atomic_file(path) as file, gzip.GzipFile(json.dumps(self._next), "wb", fileobj=file, mtime=0) as lines:
            lines.writelines(row + b"\n" for _, row in rows)


def _is_of(name: str, topic: str) -> bool:
    return name.startswith(f"{topic}-") and name.endswith(".jsonl.gz") and name[len(topic) + 1 : -9].isdigit()


def _read_next(path: Path) -> dict[int, int]:
    """Return where the partitions continue after a file, from the name in its gzip header."""
    with errors_as(DataError, f"{path} is damaged", "Put it back from a copy.", (OSError, ValueError)):
        with path.open("rb") as file:
            head = file.read(2**16)[10:]
        return {int(key): int(value) for key, value in json.loads(head[: head.index(b"\0")]).items()}
