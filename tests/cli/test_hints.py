"""The commands that are printed as hints work as they are, pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from calling import SMALL, call, output

from stoker.base.errors import CheckpointError, ConfigError, DataError
from stoker.base.units import quoted
from stoker.dataset.dataset import Dataset
from stoker.dataset.manifest import write_manifest
from stoker.testing import make_dataset
from stoker.training.files.rundir import RunDirectory, find_checkpoint, open_dataset
from stoker.training.progress import Interrupted


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("my data") / "it's d", rows=1000)


def without(data: Dataset, names: tuple[str, ...], out: Path) -> Dataset:
    """The dataset, with no rows in some splits."""
    made = data.save(out)
    empty = {name: {"rows": 0, "positives": 0, "shards": []} for name in names}
    write_manifest(out, {**made.manifest, "splits": {**made.manifest["splits"], **empty}})
    return Dataset(out)


def hints(out: str) -> list[list[str]]:
    """The commands behind ``next:``, as a shell takes them apart."""
    lines = out[out.index("next: ") :].removeprefix("next: ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


@pytest.mark.slow
@pytest.mark.parametrize("empty", [(), ("test",), ("valid", "test")])
def test_what_train_prints_as_next_works(
    data: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    empty: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = without(data, empty, tmp_path / "it's d").path
    code, out, _ = output(capsys, "train", path, "--out", tmp_path / "my runs" / "a b", *SMALL, "--tensorboard")
    assert code == 0
    commands = hints(out)
    assert [words[:2] for words in commands] == [
        ["stoker", "predict"],
        ["stoker", "baseline"],
        ["stoker", "train"],
        ["tensorboard", "--logdir"],
    ]
    for words in commands[:-1]:
        code, _, error = output(capsys, *words[1:])
        assert code == 0, error
    assert (tmp_path / "scores.parquet").exists()
    assert Path(commands[-1][2]).is_dir()


@pytest.mark.slow
def test_classify_and_reorder_name_a_dataset_that_can_be_trained_on(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"classify": ["--device-memory", "4KiB", "--dim", "4"], "reorder": ["--table", "C1"]}
    for command, more in asked.items():
        code, out, error = output(capsys, command, data.path, "--out", tmp_path / f"a {command}", *more)
        assert code == 0, error
        (words,) = hints(out)
        assert call(*words[1:-1], tmp_path / f"run {command}", *SMALL) == 0


def test_commands_in_messages_are_quoted(data: Dataset, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "my run", {"dataset": str(tmp_path / "gone d")})
    name, dataset = quoted(run.path), quoted(data.path)
    assert name == f"'{run.path}'"
    assert str(Interrupted(2, None, run.path)).endswith(f"stoker train --resume {name}")
    for call_it, kind, said in (
        (run.check_new, ConfigError, f"--resume {name},"),
        (lambda: find_checkpoint(run.path), CheckpointError, f"stoker train --resume {name}"),
        (lambda: find_checkpoint(data.path), CheckpointError, f"--data {dataset}."),
        (lambda: open_dataset(run.path), ConfigError, f"stoker train --resume {name}"),
        (lambda: data.hot, DataError, f"stoker classify {dataset} --device-memory"),
        (lambda: data.new_ids, DataError, f"stoker reorder {dataset} --out"),
        (lambda: Dataset(tmp_path / "no d"), DataError, f"--out {quoted(tmp_path / 'no d')}"),
    ):
        with pytest.raises(kind) as caught:
            call_it()
        assert said in str(caught.value)
