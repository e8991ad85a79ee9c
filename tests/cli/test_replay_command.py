"""``stoker replay`` as a user types it."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from calling import output

import stoker
from stoker.base import progress
from stoker.cli.options import show_table
from stoker.dataset.dataset import Dataset
from stoker.testing import make_dataset

SMALL = ["--batch-size", "50", "--fraction", "30%"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("d"), rows=1000, num_embeddings=(400, 100, 5))


def test_a_person_sees_a_table_by_hit_rate(
    data: Dataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 1e9)  # however busy the machine is
    monkeypatch.setenv("COLUMNS", "140")
    code, out, err = output(capsys, "replay", data.path, *SMALL)
    assert (code, err) == (0, "")
    rates = [float(rate) for rate in re.findall(r"│\s+([\d.]+)% │\s+[\d.]+% │", out)]
    assert len(rates) == 12
    assert rates == sorted(rates, reverse=True)
    assert re.search(r"belady\s+│.*\+0\.0%", out)
    for words in (
        "16 batches of 50 (shuffled)",
        "152 slots of 68 bytes",
        "lookahead-256",
        "pinned",
        "Hit rate: the share",
    ):
        assert words in out


def test_a_script_reads_what_the_function_returns(data: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(
        capsys, "replay", data.path, "--batch-size", 40, "--slots", "0.15k", "--lookahead", "2,8", "--in-flight", 2,
        "--json", "--order", "file", "--steps", 11, "--dim", 8, "--row-optimizer", "adam", "--dtype", "bfloat16",
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)
    names = ["lru", "lfu", "lookahead-2", "lookahead-8", "adaptive", "pinned", "hot-cold", "host-pipelined", "belady"]
    expected = stoker.replay(
        data, slots=150, strategies=names, in_flight=2, batch_size=40, seed=None, steps=11, embedding_dim=8,
        row_optimizer="adam", dtype="bfloat16",
    )  # fmt: skip
    assert found.pop("dataset") == str(data.path)
    assert found.pop("order") == "file"
    assert found == json.loads(json.dumps(expected.to_dict()))
    assert found["row_bytes"] == 16 + 64
    _, other, _ = output(capsys, "replay", data.path, *SMALL, "--seed", 3, "--json")
    assert json.loads(other)["strategies"] != found["strategies"]


def test_device_memory(data: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = output(capsys, "replay", data.path, "--batch-size", 20, "--device-memory", "16KiB", "--json")
    assert json.loads(out)["slots"] == 16_384 // 68


def test_batches_are_as_large_as_in_training(data: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = output(capsys, "replay", data.path, "--fraction", "60%", "--json")
    assert json.loads(out)["batch_size"] == 64


@pytest.mark.slow
def test_slow_work_shows_a_bar(
    data: Dataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # to Rich, a terminal
    monkeypatch.setenv("COLUMNS", "140")
    _, _, err = output(capsys, "replay", data.path, *SMALL)
    assert "reading ids" in err
    assert "lru" in err
    assert "16 of 16" in err
    _, _, err = output(capsys, "replay", data.path, *SMALL, "--json")
    assert err == ""


def test_lines_without_a_terminal_do_not_repeat_a_stage_that_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    bars = progress.Bars(quiet=False)
    reports = iter([("reading ids", 3, 5), ("reading ids", 5, 5), (), (), ("lru", 1, 5), ()])

    def wait(_: float) -> bool:
        report = next(reports, None)
        if report:
            bars(*report)
        return report is None

    bars._ended = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    bars._print_lines()
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["reading ids: 3 of 5 (60%)", "reading ids: 5 of 5 (100%)", *["lru: 1 of 5 (20%)"] * 2]


def test_the_rate_of_a_stage_that_is_done_does_not_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress.Bars(quiet=False) as bars:
        for done in (0, 2000):
            bars("reading", done, 3000, "rows")
            (task,) = bars._bar.tasks
            task.start_time = task.get_time() - 4
        assert re.fullmatch(r"2,000 of 3,000 rows  (500|49\d)/s  2\.0 s left", str(bars._bar.columns[-1].render(task)))
        bars("reading", 3000, 3000, "rows")
        task.start_time -= 1000
        assert re.fullmatch(r"3,000 of 3,000 rows  (750|74\d)/s", str(bars._bar.columns[-1].render(task)))


def test_each_thread_shows_its_own_work(capsys: pytest.CaptureFixture[str]) -> None:
    """Of two blocks that overlap, as of two runs, the one that began first leaves nothing behind."""
    began, ended = threading.Event(), threading.Event()

    def first() -> None:
        with progress.showing(lambda *work: print("first", *work)):
            began.set()
            ended.wait(60)

    thread = threading.Thread(target=first)
    with progress.showing(lambda *work: print("second", *work)):
        thread.start()
        began.wait(60)
        progress.Counted("reading", 9, "rows").add(4)
    ended.set()
    thread.join()
    progress.Counted("reading", 9, "rows").add(5)
    assert capsys.readouterr().out == "second reading 4 9 rows\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--order", "sorted"], "'sorted' is unknown"),
        (["--lookahead", "4,x"], "'4,x' is not a list of numbers"),
        (["--lookahead", "0"], "at least 1"),
        (["--slots", "5", "--fraction", "0.1"], "Give one of them"),
        (["--slots", "5", "--batch-size", "50"], "Give at least"),
        (["--device-memory", "1XB"], "unknown unit"),
    ],
)
def test_mistakes_are_one_paragraph(
    data: Dataset, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = output(capsys, "replay", data.path, *arguments)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_a_missing_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "replay", tmp_path / "no")
    assert code == 2
    assert "there is no dataset" in " ".join(err.split())


def test_numbers_of_a_large_log_are_whole_on_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    numbers = ["39.01%", "89.32%", "13,717,152", "+238.8%", "244.3", "1,244.2", "1,256", "1,150.2"]
    headings = stoker.replay([[0]], slots=1, strategies=["lru"]).grids()[0].headings
    show_table(None, headings, [["host-pipelined", *numbers]], whole=(0,))
    line = next(line for line in capsys.readouterr().out.splitlines() if "host" in line)
    assert line.split() == ["host-pipelined", *numbers]
    assert len(line) <= 80


def test_a_long_word_leaves_room_for_other_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    show_table(None, ["table", "path", "value", "rows"], [["items", "/long" * 20, "価格" * 4, "12"]])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("table", "items", "12"))
    show_table(None, ["table", "value", "rows"], [["items" * 9, "価格" * 4, "12"]])
    assert "価格" * 4 in capsys.readouterr().out, "a character may take two cells"
    monkeypatch.setenv("COLUMNS", "80")
    word = "rowwise_adagrad"
    show_table(
        None, ["", "a", "b", "c"], [["x" * 31, "[1.0, 1e-05]", word, word], ["", "1", "[64, 32]", "1"]], whole=(0,)
    )
    assert capsys.readouterr().out.count(word) == 2, "columns move together before words break"
