"""``stoker.verify``: identical where the storage is right; where it is broken, the very value is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_runs
import torch
from small_runs import checkpoint_files

import stoker
from stoker.base.errors import CheckpointError, ConfigError
from stoker.dataset.dataset import Dataset
from stoker.models import MODELS
from stoker.tables.links.transfer import DirectLink
from stoker.tables.slots.slotted import SlottedRows
from stoker.tables.stores.home import MemoryHome
from stoker.testing import make_dataset
from stoker.training import TrainConfig
from stoker.training.files.rundir import RunDirectory
from stoker.training.replica import find_section
from stoker.training.tools.verify import Verification

ROWS = (600, 300, 40)
SMALL = {**small_runs.SMALL, "backend": "reference"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=2000, num_embeddings=ROWS, sequence={1: 3})


@pytest.fixture(scope="module")
def run(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 steps of a run that has all rows on the device, with checkpoints at 10, 20, 30 and 40."""
    out = tmp_path_factory.mktemp("runs") / "a"
    stoker.train(data, out=out, steps=40, save_every=10, eval_every=40, keep_last=9, row_optimizer="adam", **SMALL)
    return out


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(file.relative_to(path)): (file.stat().st_mtime_ns, file.read_bytes() if file.is_file() else b"")
        for file in sorted(path.rglob("*"))
    }


@pytest.mark.slow
@pytest.mark.parametrize("epoch_lookahead", [False, True])
@pytest.mark.parametrize("home", ["memory", "file"])
def test_placed_and_resident_are_identical(run: Path, tmp_path: Path, home: str, epoch_lookahead: bool) -> None:
    before, drawn = contents(run), torch.get_rng_state()
    settings: dict[str, Any] = {"in_flight": 2, "epoch_lookahead": epoch_lookahead}
    if home == "file":
        settings |= {**small_runs.FILE, "home_path": str(tmp_path)}
    found: Verification = stoker.verify(run, steps=12, **settings)
    assert found.difference is None
    assert found.identical
    assert (found.begin, found.steps) == (20, 12)
    assert found.checkpoint == run / "checkpoints" / "step_000000020"
    assert found.placement.endswith(f"rows in {home}")
    assert found.all_rows == sum(ROWS)
    assert found.touched_rows > 12 * 32
    # Every touched row carries a weight and two moments of 4 columns, before and after; in the end all rows do.
    rows = 12 * (2 * found.touched_rows + found.all_rows)
    assert found.values > rows
    assert contents(run) == before, "the run directory is only read"
    assert torch.equal(torch.get_rng_state(), drawn)


class Dropping(stoker.DLRM):
    """Drops what torch's generator says."""

    name = "dropping"

    def dense_part(self, dense: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return super().dense_part(dense, torch.nn.functional.dropout(embedded, 0.3, self.training))


@pytest.mark.slow
def test_what_a_model_draws_follows_from_the_seed(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "dropping", Dropping)
    runs, settings = (tmp_path / "a", tmp_path / "b"), {**SMALL, "model": "dropping", "save_every": 5}
    for number, run in enumerate(runs):
        torch.manual_seed(number)
        stoker.train(data, out=run, steps=10, **settings)
    assert checkpoint_files(runs[0]) == checkpoint_files(runs[1])
    shutil.rmtree(RunDirectory(runs[1]).checkpoint(10))
    torch.manual_seed(7)
    stoker.train(resume=runs[1], display="quiet")
    assert checkpoint_files(runs[0]) == checkpoint_files(runs[1])
    assert stoker.verify(runs[0], steps=5, device_memory="4KiB").identical, "both replays draw the same"


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"row_optimizer": "sgd"}, {"dtype": "bfloat16", "row_optimizer": "adagrad"}])
def test_a_run_with_its_own_budget(data: Dataset, tmp_path: Path, settings: dict[str, Any]) -> None:
    stoker.train(data, out=tmp_path / "run", steps=10, device_memory="4KiB", **SMALL, **settings)
    found = stoker.verify(tmp_path / "run")
    assert found.identical
    assert (found.begin, found.steps, found.checkpoint) == (0, 10, None)


def test_where_to_begin(run: Path) -> None:
    assert find_section(run, steps=1).begin == 30
    assert find_section(run, steps=10).begin == 30
    assert find_section(run, steps=11).begin == 20
    assert find_section(run, steps=25).begin == 10
    assert find_section(run, steps=3, begin="start").checkpoint is None
    found = stoker.verify(run, steps=15, begin=30)
    assert (found.begin, found.steps) == (30, 10), "no more than the run has"


def test_a_damaged_checkpoint_is_passed_over(data: Dataset, tmp_path: Path) -> None:
    stoker.train(data, out=tmp_path / "run", steps=12, save_every=4, eval_every=12, keep_last=9, **SMALL)
    dense = tmp_path / "run" / "checkpoints" / "step_000000008" / "dense.safetensors"
    dense.write_bytes(dense.read_bytes()[:-1])
    assert stoker.verify(tmp_path / "run", steps=4).begin == 4
    with pytest.raises(CheckpointError, match="cut short"):
        stoker.verify(tmp_path / "run", steps=4, begin=8)


def batches_of(run: Path, data: Dataset) -> list[Any]:
    values = TrainConfig.from_dict(RunDirectory(run).read("config.json")["settings"])
    stream = data.train.batches(values.batch_size, seed=values.seed, shuffle_memory=values.shuffle_memory)
    return list(stream)


@pytest.mark.slow
@pytest.mark.parametrize("staged", [True, False])
def test_a_lost_writeback_is_found(run: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch, staged: bool) -> None:
    """The row and the first step that could have noticed."""
    lost: list[tuple[str, int]] = []

    def break_it(self: DirectLink, number: int, rows: Any, slots: Any) -> None:
        if not lost and number >= 5 and self.home.num_rows > 100:
            storage = next(one for one in storages if one.home is self.home)
            address = int(rows[0])
            table = int(np.searchsorted(storage.space.first_row, address, side="right")) - 1
            lost.append((storage.space.names[table], address - int(storage.space.first_row[table])))
            rows, slots = rows[1:], slots[1:]
        self.home.store(rows, self.slots, slots)

    storages: list[SlottedRows] = []
    made = SlottedRows.__init__

    def remember(self: SlottedRows, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        storages.append(self)

    monkeypatch.setattr(SlottedRows, "__init__", remember)
    monkeypatch.setattr(DirectLink, "write_back", break_it)
    if not staged:
        monkeypatch.setattr("stoker.training.scheduled.staged", lambda batches, model, config, **named: batches)
    found = stoker.verify(run, steps=40, begin="start")
    assert lost, "something was to be lost"
    difference = found.difference
    assert difference is not None
    assert not found.identical
    assert difference.what == "row"
    assert (difference.table, difference.id) == lost[0]
    assert difference.placed != difference.resident
    # It is named where the first batch wants the row back: as that step finds it.
    number = list(data.schema.num_embeddings).index(str(difference.table))
    users = []
    for batch in batches_of(run, data)[: found.begin + 40]:
        assert batch.offsets is not None
        owner = np.repeat(np.arange(len(batch.offsets) - 1), np.diff(batch.offsets.numpy())) % len(ROWS)
        if (batch.ids.numpy()[owner == number] == difference.id).any():
            users.append(batch.step)
    assert difference.when == "before"
    assert difference.step in users
    assert difference.step == found.steps, "later steps are not done"
    assert f"before step {difference.step}: table {difference.table!r}, id {difference.id}" in str(difference)


def test_a_row_that_only_the_end_can_see(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def close_to_right(self: MemoryHome, start: int, stop: int) -> Any:
        rows = read(self, start, stop)
        if self.num_rows > 100:
            rows.weight[-1, 2] += 1
        return rows

    read = MemoryHome.read
    monkeypatch.setattr(MemoryHome, "read", close_to_right)
    difference = stoker.verify(run, steps=3).difference
    assert difference is not None
    assert (difference.when, difference.what, difference.name, difference.column) == ("end", "row", "weight", 2)
    assert difference.placed == pytest.approx(difference.resident + 1)
    assert difference.step == 32


def test_a_wrong_update_is_found_after_its_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the state of a row, which the loss does not show yet."""
    lease_release = SlottedRows._take_back

    def alter(self: SlottedRows, slots: Any, changed: bool) -> None:
        if changed and self.num_rows > 100:
            self.state["exp_avg_sq"][slots[0], 1] += 1
        lease_release(self, slots, changed)

    monkeypatch.setattr(SlottedRows, "_take_back", alter)
    difference = stoker.verify(run, steps=3).difference
    assert difference is not None
    assert (difference.when, difference.name, difference.column) == ("after", "exp_avg_sq", 1)
    assert difference.step == 30


def test_a_wrong_loss_is_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = SlottedRows.acquire

    def alter(self: SlottedRows, bags: Any, space: Any) -> Any:
        bags.ids[0] = 0
        return lookup(self, bags, space)

    monkeypatch.setattr(SlottedRows, "acquire", alter)
    monkeypatch.setattr("stoker.training.scheduled.staged", lambda batches, model, config, **named: batches)
    difference = stoker.verify(run, steps=2).difference
    assert difference is not None
    assert difference.what == "loss"
    assert "loss: placed" in str(difference)


def test_mistakes(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds all rows"):
        stoker.verify(run, device_memory="1GiB")
    with pytest.raises(ConfigError, match="holds all rows"):
        stoker.verify(run, device_memory="all")
    with pytest.raises(ConfigError, match="takes no argument"):
        stoker.verify(run, batch_size=64)
    with pytest.raises(ConfigError, match="at least 1"):
        stoker.verify(run, steps=0)
    with pytest.raises(ConfigError, match="is not a run directory"):
        stoker.verify(tmp_path)
    with pytest.raises(CheckpointError, match="It has: 10, 20, 30, 40"):
        stoker.verify(run, begin=15)
    with pytest.raises(ConfigError, match="no step follows"):
        stoker.verify(run, begin=40)


def test_too_little_memory_for_all_rows(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.training.tools.verify.memory_of", lambda device: (1000, 2000))
    with pytest.raises(ConfigError, match="needs all rows resident, too"):
        stoker.verify(run)
