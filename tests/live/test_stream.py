"""Updates with the messages of a topic of Kafka: each is trained on once, whenever the process ends."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.base.errors import ConfigError, DataError
from stoker.cli import main
from stoker.live.stream import stream
from stoker.testing import make_daily_run


class Kafka:
    """A topic in memory, with what is used of the package confluent_kafka."""

    KafkaException = OSError

    def __init__(self) -> None:
        self.rows: list[list[tuple[int, bytes]]] = [[], []]  # of each partition: time, value
        self.first, self.settings = [0, 0], {}
        self.TopicPartition = lambda topic, partition: SimpleNamespace(topic=topic, partition=partition, offset=-1)

    def Consumer(self, settings: dict[str, Any]) -> Kafka:
        self.settings = settings
        return self

    def list_topics(self, topic: str, timeout: float) -> Any:
        return SimpleNamespace(topics={topic: SimpleNamespace(partitions=dict.fromkeys(range(len(self.rows))))})

    def get_watermark_offsets(self, place: Any, timeout: float) -> tuple[int, int]:
        return self.first[place.partition], len(self.rows[place.partition])

    def assign(self, places: list[Any]) -> None:
        self.at = [place.offset for place in places]

    def consume(self, count: int, timeout: float) -> Iterator[Any]:
        for partition, rows in enumerate(self.rows):
            self.at[partition] = max(self.first[partition], self.at[partition] - 1)  # the last message comes again
            for time, value in rows[self.at[partition] :]:
                offset, self.at[partition] = self.at[partition], self.at[partition] + 1
                yield SimpleNamespace(
                    error=lambda: None, partition=lambda number=partition: number, offset=lambda at=offset: at,
                    value=lambda text=value: text, timestamp=lambda at=time: (1, at),
                )  # fmt: skip

    def close(self) -> None:
        self.settings = {}


def send(kafka: Kafka, rows: list[dict[str, Any]], start: int) -> None:
    for number, row in enumerate(rows, start):
        kafka.rows[row["user"] % 2].append((number, json.dumps(row, indent=1).encode()))


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Kafka:
    found = Kafka()
    monkeypatch.setitem(sys.modules, "confluent_kafka", found)
    return found


@pytest.mark.slow
def test_each_message_is_trained_on_once(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, url = tmp_path / "run", "kafka://here:9092/clicks?client.id=x"
    day = make_daily_run(run, days=1)[0].to_dicts()
    send(kafka, day[:100], 0)
    kafka.rows[0].append((50, None))  # type: ignore[arg-type]
    results = stream(run, url, poll=0.01)
    assert next(results).rows == 100
    assert kafka.settings["bootstrap.servers"], kafka.settings["client.id"] == ("here:9092", "x")
    [file] = (run / "stream").iterdir()
    kept = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert kept == day[:100], "in the order of their times"
    send(kafka, day[:100], 100)  # equal messages are other messages
    assert next(results).rows == 100
    results.close()

    shutil.copytree(run, tmp_path / "whole")
    send(kafka, day[100:], 200)
    with monkeypatch.context() as patch:  # it ends after the file was written, and before it was used
        patch.setattr("stoker.live.watch.update", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(stream(run, url, poll=0.01))
    (run / "stream" / "clicks-000000004.jsonl.gz.tmp").write_bytes(b"cut")
    assert next(stream(run, url, poll=0.01)).number == 3
    assert next(stream(tmp_path / "whole", url, poll=0.01)).rows == 200
    found = [
        {path.name: path.read_bytes() for path in (one / "checkpoints/update_000003").glob("*.safetensors")}
        for one in (run, tmp_path / "whole")
    ]
    assert found[0]
    assert found[0] == found[1], "as if it had not ended"
    lines = [json.loads(line) for line in (run / "updates.jsonl").read_text().splitlines()]
    assert [line["rows"] for line in lines] == [100, 100, 200]

    kafka.rows.append([])  # a partition that is new, and is read from its first message on
    kafka.first = [0, 0, 0]
    results = stream(tmp_path / "whole", url, poll=0.01)
    kafka.rows[2] += [(900, json.dumps(row).encode()) for row in day[:7]]
    assert next(results).rows == 7
    kafka.rows.append([(900, json.dumps(row).encode()) for row in day[7:16]])
    kafka.first.append(0)
    assert next(results).rows == 9, "one that appeared meanwhile"
    results.close()
    rows, kafka.rows = kafka.rows, [[], [], [], []]
    with pytest.raises(DataError, match="partition 0 of clicks has messages 0 to 0, and the next one is"):
        next(stream(run, url, poll=0.01))
    kafka.rows = rows
    kafka.first = [10_000, 0, 0, 0]
    with pytest.raises(DataError, match=r"partition 0 of clicks has messages 10,000 to .* the next one is"):
        next(stream(run, url, poll=0.01))
    (run / "stream/clicks-000000003.jsonl.gz").rename(tmp_path / "away")
    with pytest.raises(DataError, match=r"000000003.jsonl.gz is missing, which says where the topic continues"):
        next(stream(run, url))
    for wrong in ("kafka://here", "http://here/a", "kafka:///clicks", "kafka://here/a/b"):
        with pytest.raises(ConfigError, match="is not a topic"):
            next(stream(run, wrong))
    with pytest.raises(SystemExit):
        main(["update", str(run), "--watch", "x", "--stream", url])
    said = " ".join(capsys.readouterr().err.split())
    assert "either logs, a directory with --watch, or a topic with --stream" in said


def test_a_refused_setting_leaves_no_consumer_open(kafka: Kafka, tmp_path: Path) -> None:
    make_daily_run(tmp_path / "run", days=1)
    for wrong in ({"poll": -1.0}, {"rate": -1.0}, {"data": tmp_path / "nowhere"}):
        with pytest.raises((ConfigError, DataError)):
            stream(tmp_path / "run", "kafka://here:9092/clicks", **wrong)
        assert not kafka.settings
    results = stream(tmp_path / "run", "kafka://here:9092/clicks")
    assert kafka.settings
    results.close()
    assert not kafka.settings, "though nobody has iterated"


def test_a_broker_of_librdkafka(tmp_path: Path) -> None:
    package = pytest.importorskip(
        "confluent_kafka", reason="the test talks to the broker that confluent-kafka simulates"
    )
    producer = package.Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1})
    [broker] = producer.list_topics(timeout=10).brokers.values()
    day = make_daily_run(tmp_path / "run", days=1)[0].to_dicts()
    for row in day:
        producer.produce("clicks", json.dumps(row), key=str(row["user"]))
    producer.flush(10)
    results = stream(tmp_path / "run", f"kafka://{broker.host}:{broker.port}/clicks", poll=1.0)
    assert next(results).rows == len(day)
    results.close()
