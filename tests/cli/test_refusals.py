"""Bad values and files: one message that names the option as typed, the value and the cause; nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from calling import SMALL, call, output

from stoker.testing import make_dataset

LARGE = 10**22


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, a run and a log."""
    folder = tmp_path_factory.mktemp("place")
    make_dataset(folder / "data", rows=1000)
    assert call("train", folder / "data", "--out", folder / "run", "--steps", 4, *SMALL) == 0
    lines = [f"{i % 3 // 2},u{i % 17},{i % 7}.5" for i in range(400)]
    (folder / "log.csv").write_text("\n".join(["clicked,user,price", *lines]) + "\n")
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("trian data", "there is no command 'trian'. Did you mean 'train'? stoker --help lists the commands."),
        ("train click.csv --out new", "click.csv: it does not exist. Check the name"),
        ("trace run --steps 0", "--steps is 0; give at least 1"),
        ("verify run --steps -2", "--steps is -2; give at least 1"),
        ("profile data --dim 0", "--dim is 0; it must be at least 1"),
        ("profile data --embedding-dim 0", "--embedding-dim is 0; it must be"),
        ("profile data --device-memory x", "--device-memory: size 'x' is not"),
        ("profile data --dtype x", "--dtype 'x' is unknown"),
        ("profile data --sample x", "--sample: share 'x' is not"),
        ("classify data --out new --dim=-1", "--dim is -1; it must be"),
        ("reorder data --out new --hot nan", "--hot is nan; give a share"),
        ("reorder data --out new --spread 0", "--spread is 0.0; a factor"),
        ("reorder data --out new --window 1", "--window is 1; it must be at least 2"),
        (f"reorder data --out new --window {LARGE}", f"--window is {LARGE}; it must be at most"),
        ("reorder data --out new --edges 1", "--edges is 1; it must be at least 1000"),
        ("reorder data --out new --seed -1", "--seed is -1; it must not be negative"),
        ("replay data --slots 0", "--slots is 0; it must be at least 1"),
        ("replay data --slots x", "--slots: count 'x' is not"),
        ("replay data --fraction 2", "--fraction: share '2' is outside"),
        ("replay data --device-memory x", "--device-memory: size 'x' is not"),
        ("replay data --slots 5 --fraction 1%", "--slots, --fraction and --device-memory each"),
        ("replay data --lookahead 0", "--lookahead '0' is not a list"),
        ("replay data --lookahead ,", "--lookahead ',' is not a list"),
        (f"replay data --in-flight {LARGE}", f"--in-flight is {LARGE}; it must be at most"),
        (f"replay data --steps {LARGE}", f"--steps is {LARGE}; it must be at most"),
        ("baseline data --rows 0", "--rows is 0; give at least 1"),
        ("baseline data --rows x", "--rows: count 'x' is not"),
        ("plan data --device-memory 0", "--device-memory is 0; it must be at least 1"),
        ("plan data --threads 0", "--threads: 0 is outside"),
        ("evaluate run --threads 0", "--threads: 0 is outside"),
        (f"predict run --out new.csv --threads {LARGE}", "is outside"),
        ("synthetic criteo --out new.tsv --rows 1e30", "--rows is 1e30, but"),
        ("train data --out new --bottom x", "--bottom 'x' is not a list"),
        ("train data --out new --bottom 8-0", "--bottom '8-0' is not a list"),
        ("train data --out new --tt-rank 4 --tt-cores 9", "--tt-cores is 9; it must be 2 to 4"),
        ("train data --out new --threads 1000000", "--threads is 1000000; it must be 1 to 1024"),
        ("train log.csv --out new --device bogus", "--device 'bogus' is unknown"),
        (f"train data --out new --top {LARGE}", "cannot be built with"),
        ("train data --out new --row-momentum nan", "--row-momentum is nan; it must be finite"),
        ("train data --out new --row-clip-norm -1", "--row-clip-norm is -1.0; it must be finite"),
        ("train data --out new --row-option x", "--row-option 'x' lacks a value"),
        ("synthetic criteo --out new.tsv --rows 5 --alpha 11", "--alpha is 11; it must be 0 to 10"),
        ("synthetic criteo --out new.tsv.zip --rows 5", "with .gz or .zst to compress"),
        ("prepare criteo log.csv --out new --strict --max-bad 1%", "--strict allows no bad line, --max-bad a share"),
        ("prepare --like data log.csv --out new --split random:1", "with --like, all rows"),
        ("init log.csv --out new.toml --rows nan", "--rows is 'nan'."),
        ("find-lr data --seed=x", "--seed is 'x'."),
        ("train data --out new --threads x", "--threads is 'x'. Give a whole number."),
        ("train data --out new --row-lr x", "--row-lr is 'x'. Give a number."),
        ("train data --out new --ranks 0", "--ranks is '0'. Give at least 1."),
        ("train data --out new --data-memory 1e400", "--data-memory is 1e400; it must be at most"),
        ("train log.csv --out new --batch-size 0", "--batch-size is 0"),
        ("train log.csv --out new --batch-size auto --row-lr -1", "--row-lr is -1"),
        ("train log.csv --out new --steps 3 --epochs 2", "give --epochs or --steps, not both"),
        ("train log.csv --resume run", "--resume continues a run on its own dataset. Leave out log.csv"),
    ],
)
def test_a_bad_value_is_named_by_its_option(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, words: str
) -> None:
    before = files(here)
    code, out, err = output(capsys, *command.split())
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err
    assert err.count("\n") == 1
    assert files(here) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words"),
    [
        *((f"{name} run", "run is a run, not a dataset") for name in ("profile", "replay", "baseline", "plan")),
        *((f"{name} run --out new", "run is a run, not a dataset") for name in ("classify", "reorder")),
        ("compare run log.csv", "log.csv is not a run directory"),
        ("compare run run2 --plot log.csv/x.png", "log.csv is not a writable directory"),
        ("compare run run2 --plot kept.png", "kept.png exists"),
        ("init log.csv --out log.csv/x.toml", "log.csv is not a writable directory"),
        *((f"{name} odd", "odd/config.json is garbled") for name in ("verify", "trace", "evaluate", "train --resume")),
        ("compare run odd", "odd/config.json is garbled"),
    ],
)
def test_a_path_of_another_kind_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, words: str
) -> None:
    for copy in ("run2", "odd"):
        shutil.copytree("run", copy, dirs_exist_ok=True)
    Path("odd/config.json").write_text("{}")
    Path("kept.png").touch()
    before = files(here)
    code, out, err = output(capsys, *command.split())
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert files(here) == before


@pytest.mark.parametrize("command", ["evaluate run", "predict run --out new.csv"])
def test_another_dataset_is_refused_before_the_model_is_loaded(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    make_dataset(here / "other", rows=1000, num_dense=7)
    monkeypatch.setattr("stoker.training.files.loading.load", None)
    code, out, err = output(capsys, *command.split(), "--data", "other")
    assert (code, out) == (2, "")
    assert "other does not fit the model: its dense are" in err


def test_columns_of_one_name_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{i % 3 // 2},u{i % 17},v{i % 5},{i % 7}.5" for i in range(400)]
    Path("twice.csv").write_text("\n".join(["clicked,user,user,price", *lines]) + "\n")
    for command in ("init twice.csv --out twice.toml --overwrite", "prepare auto twice.csv --out twice --overwrite"):
        code, out, _ = output(capsys, *command.split())
        assert code == 0
        assert "several columns are called 'user': left out" in out


@pytest.mark.slow
def test_scores_as_json_count_the_bad_lines(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("train", "log.csv", "--out", "from-log", "--steps", 2, *SMALL) == 0
    Path("today.csv").write_text(Path("log.csv").read_text() + "1,u3\n")
    for data, bad in (("today.csv", 1), ("log-data", 0)):
        code, out, _ = output(capsys, "predict", "from-log", "--data", data, "--out", f"{data}.parquet", "--json")
        assert code == 0
        assert json.loads(out)["bad_lines"] == bad
