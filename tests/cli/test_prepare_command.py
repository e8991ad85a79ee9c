"""``stoker prepare`` on the command line: help, summary, JSON and errors in words."""

from __future__ import annotations

import gzip
import json
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stoker.base import progress
from stoker.base.errors import StokerError
from stoker.cli import app, main
from stoker.prep.stages.parts import Journal

SCHEMA = """
label = "label"
[[dense]]
name = "price"
[[categorical]]
name = "item"
[split]
rule = "runs"
runs = 4
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "shop.toml").write_text(SCHEMA)
    lines = [f"{i % 2},{'abc'[i % 3]},{i}" for i in range(20)]
    (tmp_path / "log.csv").write_text("\n".join(["label,item,price", *lines, "1,a,x"]) + "\n")
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["prepare", *map(str, arguments)])


def test_summary_shows_splits_tables_and_bad_lines(log: Path) -> None:
    done = run(log / "shop.toml", log / "log.csv", "--out", log / "out")
    assert done.exit_code == 0, done.output
    for part in ("train", "15", "item", "1 bad line (", "rows/s", "peak memory"):
        assert part in done.output


def test_a_file_that_breaks_off_is_said_aloud(log: Path) -> None:
    lines = (log / "log.csv").read_bytes().splitlines(keepends=True)
    packed = gzip.compress(lines[0] + b"".join(lines[1:21]) * 200)
    (log / "cut.csv.gz").write_bytes(packed[: len(packed) // 2])
    done = run(log / "shop.toml", log / "cut.csv.gz", "--out", log / "out")
    assert done.exit_code == 0, done.output
    assert f"warning: {log / 'cut.csv.gz'} breaks off at line " in done.output
    (text,) = json.loads(run(log / "shop.toml", log / "cut.csv.gz", "--out", log / "j", "--json").output)["warnings"]
    assert "breaks off" in text


def test_json_and_min_count(log: Path) -> None:
    done = run(log / "shop.toml", log / "log.csv", "--out", log / "out", "--json", "--min-count", 6)
    report = json.loads(done.output)
    assert report["rows"] == {"train": 15, "valid": 2, "test": 3}
    assert report["tables"]["item"]["rows"] == 1
    assert report["bad"] == 1


def test_help_and_recipe_list() -> None:
    shown = run("--help").output
    assert "stoker prepare criteo" in shown
    assert "--max-bad" in shown
    assert "dlrm, nvt" in run("--list").output
    assert {entry["name"] for entry in json.loads(run("--list", "--json").output)} >= {"criteo"}


def test_errors_reach_the_caller_as_stoker_errors(log: Path) -> None:
    for arguments, message in (
        ((log / "shop.toml", log / "log.csv"), "add --out"),
        ((log / "log.csv", "--out", log / "o"), "For a log of your own draft a schema, stoker init LOG"),
        ((log / "shop.toml",), "needs a recipe and files"),
        (("--like", log), "with --like only files"),
        (("critoe", log / "log.csv", "--out", log / "o"), "Did you mean 'criteo'"),
        ((log / "shop.toml", log / "log.csv", "--out", log / "o", "--strict"), r"log.csv:22: column price"),
        ((log / "shop.toml", log / "log.csv", "--out", log / "o", "--max-bad", "lots"), "not a number"),
    ):
        done = run(*arguments)
        assert isinstance(done.exception, StokerError)
        assert message in str(done.exception)


def test_one_of_a_thing_is_no_several(log: Path) -> None:
    (log / "one.csv").write_text("label,item,price\n1,a,1\n")
    (log / "one.toml").write_text(SCHEMA.replace("runs = 4", "runs = 2"))
    done = run(log / "one.toml", log / "one.csv", "--out", log / "out")
    assert done.exit_code == 0, done.output
    assert "1 row in" in done.output


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[object, str]:
    """Exit code and standard error of the whole command line, in one line."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return stopped.value.code, " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_messages_name_options(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("prepare", log / "shop.toml", log / "log.csv", "--out", log / "out")
    code, text = told(capsys, *given, "--max-bad", "lots")
    assert (code, text[:46]) == (2, "error: --max-bad: share 'lots' is not a number")
    for option, value in (("--drift", 2), ("--scale", -1), ("--base-rate", 0), ("--seed", -1), ("--bad", 7)):
        code, text = told(capsys, "synthetic", "criteo", "--rows", 10, "--out", log / "x.tsv", option, value)
        assert (code, text.split(":", 1)[1].split()[0].rstrip(":")) == (2, option)
    code, text = told(capsys, "synthetic", "criteo", "--rows", 10, "--out", log / "log.csv")
    assert code == 2
    assert text.endswith("log.csv is there already. Choose another --out, or pass --overwrite to replace it.")


@pytest.mark.slow
def test_a_log_goes_to_a_file_that_can_be_written(
    log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(log)
    code, text = told(capsys, "synthetic", "criteo", "--rows", 10, "--out", "-")
    assert (code, text[:12]) == (2, "error: --out")
    assert not Path("-").exists()
    code, text = told(capsys, "synthetic", "criteo", "--rows", 10, "--out", log / "log.csv" / "new" / "x.tsv")
    assert code == 2
    assert text.endswith("x.tsv cannot be written (Not a directory). Choose a place that you may write to.")


def test_a_dataset_that_is_there_needs_overwrite(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (log / "shop.toml", log / "log.csv", "--out", log / "out")
    first = run(*given)
    assert first.exit_code == 0
    again = run(*given)
    assert again.exit_code == 0
    rows = [[line for line in done.output.splitlines() if line.startswith("│")] for done in (first, again)]
    assert rows[0] == rows[1] != []
    assert "already prepared from the same files and settings: nothing was done" in " ".join(again.output.split())
    shown = json.loads(run(*given, "--json").output)
    assert shown["already"]
    assert list(shown["rows"]) == ["train", "valid", "test"]
    code, text = told(capsys, "prepare", *given, "--min-count", "2")
    assert code == 2
    assert text.endswith("Choose another directory, or pass --overwrite to replace it.")


@pytest.mark.slow
def test_ctrl_c(log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    add, out = Journal.add, log / "out"

    def stop(self: Journal, name: str, entry: object) -> object:
        if name.startswith("table"):
            raise KeyboardInterrupt
        return add(self, name, entry)  # type: ignore[arg-type]

    monkeypatch.setattr(Journal, "add", stop)
    code, text = told(capsys, "prepare", log / "shop.toml", log / "log.csv", "--out", out)
    assert code == 130
    assert text == (
        f"interrupted; 1 finished step kept in {out / '.work'}. Give the same command again to continue from there."
    )
    code, text = told(capsys, "prepare", log / "shop.toml", log / "log.csv", "--out", out, "--no-resume")
    assert text.endswith("Give the same command again with --resume to continue from there.")
    monkeypatch.setattr("stoker.synthetic.writer._write_file", stop_at_once)
    code, text = told(capsys, "synthetic", "criteo", "--rows", 10, "--out", log / "new" / "x.tsv")
    assert code == 130
    assert text.startswith(f"interrupted; nothing was written to {log / 'new' / 'x.tsv'}.")
    assert not (log / "new").exists()


def stop_at_once(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_dates_that_need_a_format_are_refused_and_read_with_it(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timed = SCHEMA.replace('rule = "runs"\nruns = 4', 'rule = "time"\ntrain = 0.5\nvalid = 0.25\ntest = 0.25')
    (log / "time.toml").write_text(timed + '[timestamp]\ncolumn = "when"\ntype = "datetime"\n')
    days = ["12/01/2017", "10/09/2017", "11/07/2017", "10/02/2017"]
    (log / "us.csv").write_text("label,item,price,when\n" + "".join(f"1,a,2,{day}\n" for day in days))
    code, text = told(capsys, "prepare", log / "time.toml", log / "us.csv", "--out", log / "out")
    assert code == 2
    assert text.startswith(f"error: {log / 'us.csv'}:2: column when: '12/01/2017' is not a date and time in ISO 8601")
    assert text.endswith('how the column is written: format = "%m/%d/%Y" or format = "%d/%m/%Y".')
    assert not (log / "out").exists()
    with (log / "time.toml").open("a") as file:
        file.write('format = "%m/%d/%Y"\n')
    assert main_code("prepare", log / "time.toml", log / "us.csv", "--out", log / "out") == 0
    capsys.readouterr()
    assert main_code("inspect", log / "out", "--json") == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert [splits[name]["time"]["last"] for name in ("train", "valid", "test")] == [
        "2017-10-09T00:00:00Z", "2017-11-07T00:00:00Z", "2017-12-01T00:00:00Z",
    ]  # fmt: skip


def main_code(*arguments: object) -> object:
    """Exit code of the whole command line."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return stopped.value.code or 0


def test_bad_lines_are_summed_up(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (log / "log.csv").read_text().splitlines()
    (log / "log.csv").write_text("\n".join([*lines, "1,a", '1,"a,2', "1"]) + "\n")
    done = run(log / "shop.toml", log / "log.csv", "--out", log / "out")
    place = log / "out" / "quarantine.jsonl"
    assert (
        f"4 bad lines (16.667%) set aside in {place}\n  2 x not 3 fields\n  1 x column price: not a number\n"
        "  1 x quoted field without a closing quote\n  Wrong number of fields: set separator in [source] of the schema,"
    ) in done.output
    assert "\x1b[" not in done.output
    found = json.loads(run(log / "shop.toml", log / "log.csv", "--out", log / "out", "--json").output)
    assert found["reasons"]["not 3 fields"] == 2
    assert len(found["remedies"]) == 3
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    done = run(log / "shop.toml", log / "log.csv", "--out", log / "out")
    assert "\x1b[33m  2 x not 3 fields\x1b[0m" in done.output
    assert "\x1b[1;33m4 bad lines" in done.output


def test_too_many_bad_lines_and_threads_name_options(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (log / "log.csv").open("a") as file:
        file.write("1,a\n" * 20)
    given = ("prepare", log / "shop.toml", log / "log.csv", "--out", log / "out")
    code, text = told(capsys, *given)
    assert code == 2
    assert "more than the 1.000% that --max-bad allows by default" in text
    assert text.endswith("allow more with --max-bad, such as 52%.")
    (log / "log.csv").write_text("label,item,price\n" + ",a,1\n" * 20 + "1,b,2\n" * 20)
    code, text = told(capsys, *given)
    assert "that --max-bad allows by default" in text
    assert text.endswith("To score rows without: stoker prepare --like DATASET.")
    code, text = told(capsys, *given, "--threads", 10_000)
    assert code == 2
    assert text.startswith("error: --threads: 10,000 is outside 1 to ")
    assert "cores; leave --threads out to use one per core." in text


def test_a_leak_by_rule_is_said_aloud(log: Path) -> None:
    (log / "leak.toml").write_text(SCHEMA.replace('label = "label"', 'label = { column = "price", rule = "> 9" }'))
    done = run(log / "leak.toml", log / "log.csv", "--out", log / "out")
    assert done.exit_code == 0, done.output
    assert "warning: column 'price' reads 'price', from which the rule '> 9' makes the label" in done.output


def test_without_a_terminal_progress_is_lines_with_the_time(
    log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    add = Journal.add

    def slowly(self: Journal, name: str, entry: object) -> object:
        time.sleep(0.2)
        return add(self, name, entry)  # type: ignore[arg-type]

    monkeypatch.setattr(Journal, "add", slowly)
    given = ("prepare", str(log / "shop.toml"), str(log / "log.csv"), "--out")
    with pytest.raises(SystemExit):
        main([*given, str(log / "out")])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d (reading|counting|writing): .+ \(\d+%\)", line) for line in lines), lines
    assert re.fullmatch(r"\S+ reading: 153 B of 153 B( .*)? \(100%\)", lines[0])
    with pytest.raises(SystemExit):
        main([*given, str(log / "quiet"), "--json"])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "LINE_SECONDS", 30.0)
    with pytest.raises(SystemExit):
        main([*given, str(log / "short")])
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_bars(log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # to Rich, a terminal
    monkeypatch.setenv("COLUMNS", "140")
    with pytest.raises(SystemExit):
        main(["prepare", str(log / "shop.toml"), str(log / "log.csv"), "--out", str(log / "out")])
    assert "writing" in capsys.readouterr().err
