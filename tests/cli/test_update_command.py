"""``stoker update``, ``rollback`` and ``compact``, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calling import output

from stoker.live.watch import watch
from stoker.testing import make_daily_run


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    """The logs of three days after the one that a run was trained on."""
    paths = [tmp_path / f"day_{number}.csv" for number in (1, 2, 3)]
    for path, log in zip(paths, make_daily_run(tmp_path / "run", days=3), strict=True):
        log.write_csv(path)
    return paths


@pytest.mark.slow
def test_days_of_a_run(logs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    code, out, err = output(capsys, "update", run, *logs[:2])
    assert code == 0, err
    assert "before training on these rows" in " ".join(out.split())
    assert "update 1: trained on 600 rows" in out
    code, out, _ = output(capsys, "update", run, logs[0], logs[2], "--json", "--rate", "0.5")
    assert code == 0
    record = json.loads(out)
    assert (record["number"], record["rows"], record["checkpoint"]) == (2, 300, str(run / "checkpoints/update_000002"))
    assert [note.rsplit("/", 1)[-1] for note in record["notes"]] == ["day_1.csv was used by update 1: it is left out"]
    code, out, _ = output(capsys, "update", run, logs[2])
    assert code == 0, "a script may simply run it again"
    assert "nothing new" in out
    code, out, _ = output(capsys, "inspect", run, "--verify")
    assert code == 0
    assert "only what changed since update_000001" in out
    assert "day_1.csv, day_2.csv" in out
    code, out, _ = output(capsys, "rollback", run, "--json")
    assert json.loads(out) == {"run": str(run), "checkpoint": str(run / "checkpoints/update_000001")}
    for command, words in (("rollback", "it cannot go back to update 9. Give a number from 0 to 0."),
                           ("compact", "updates up to 9 cannot be joined. Give a number from 1 to 1.")):  # fmt: skip
        code, _, err = output(capsys, command, run, "--to", "9")
        assert (code, " ".join(err.split())) == (2, f"error: {run} is at update 1, so {words}")
    code, out, _ = output(capsys, "compact", run)
    assert "is whole now, 1 segment joined" in out


def test_mistakes(logs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    for wrong in (["update", run], ["update", run, logs[0], "--watch", tmp_path]):
        code, _, err = output(capsys, *wrong)
        assert code == 2
        assert "either logs, a directory with --watch, or a topic" in err
    code, _, err = output(capsys, "update", run, logs[0], "--rate", "-1")
    assert code == 2
    assert "--rate" in err
    code, _, err = output(capsys, "rollback", run)
    assert code == 2
    assert "was not updated" in err
    code, _, err = output(capsys, "update", tmp_path / "run-data", logs[0])
    assert code == 2
    assert "is a dataset, not a run directory" in err


@pytest.mark.slow
def test_a_watch_says_what_it_waits_for(
    logs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter([None, None, KeyboardInterrupt])

    def sleep(seconds: float) -> None:
        assert seconds == 3.5
        if end := next(waits):
            raise end

    incoming = tmp_path / "incoming"
    incoming.mkdir()
    logs[0].rename(incoming / "day_1.csv")
    monkeypatch.setitem(watch.__kwdefaults__, "sleep", sleep)
    code, out, err = output(capsys, "update", tmp_path / "run", "--watch", incoming, "--poll", "3.5")
    assert code == 130
    assert f"waiting for new rows of {incoming}, checked every 3.5 s; Ctrl-C ends this" in err.replace("\n", "")
    assert "update 1: trained on 300 rows" in out
    run = tmp_path / "run"
    for asked, words in (
        ([run, "--watch", incoming, "--poll", "-1"], "--poll is -1; it must be a number of seconds above 0"),
        ([run, "--watch", incoming, "--rate", "-1"], "--rate"),
        ([run, "--watch", tmp_path / "nowhere"], "nowhere is not a directory"),
        ([run, "--stream", "kafka://nowhere"], "error: "),
        ([tmp_path / "nowhere", "--watch", incoming], "nowhere is not a run directory: it has no config.json"),
        ([tmp_path / "run-data", "--watch", incoming], "run-data is a dataset, not a run directory"),
    ):
        code, _, err = output(capsys, "update", *asked)
        assert (code, words in err.replace("\n", " "), "waiting for" in err) == (2, True, False), err
    for path, words in (("run-data/manifest.json", "run-data"), ("run/report.json", "has not ended")):
        (tmp_path / path).rename(tmp_path / "away")
        (run / "head.json").unlink(missing_ok=True)  # as before the first update
        code, _, err = output(capsys, "update", run, "--watch", incoming)
        assert (code, words in err.replace("\n", " "), "waiting for" in err) == (2, True, False), err
        (tmp_path / "away").rename(tmp_path / path)
