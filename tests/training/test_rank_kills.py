"""A rank may be killed at any moment: the others end with one message, and any number of ranks goes on to the bit."""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killing import kill_numbers
from rank_workers import Warm, Workers
from reductions import join
from small_runs import FILE, files

import stoker
from stoker.dataset.dataset import Dataset
from stoker.testing import make_dataset

RUN: dict[str, Any] = {
    "embedding_dim": 4, "model_options": {"bottom": (8,), "top": (8,)}, "batch_size": 40, "steps": 10, "eval_every": 4,
    "save_every": 2, "shards": 4, "tensorboard": False, "display": "quiet", "threads": 1, "row_optimizer": "adam",
    "device_memory": "12KiB", "strategy": "cached",
}  # fmt: skip
LONGEST = 0.5  # seconds from the first file of a run to the last
PATIENCE = 30.0


@pytest.fixture(scope="module")
def warm(data: Dataset) -> Iterator[Warm]:
    with Warm(data.path, [RUN]) as made:
        yield made


@pytest.fixture(scope="module")
def workers(warm: Warm) -> Iterator[Workers]:
    with Workers(warm, 3) as started:
        yield started


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=400, num_embeddings=(300, 100))


@pytest.fixture(scope="module")
def whole(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The checkpoints of a run that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    stoker.train(data, out=out, **RUN)
    return files(out / "checkpoints")


def train(rank: int, ranks: int, folder: str, data: str, **more: Any) -> None:
    join(rank, ranks, f"{folder}/meet")
    begun, said = time.monotonic(), ""
    try:
        stoker.train(data, out=f"{folder}/run", **{**RUN, **more})
    except Exception as error:
        said = str(error)
    Path(folder, f"said-{rank}").write_text(said or f"done in {time.monotonic() - begun:.1f} s")
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("number", kill_numbers(32))
def test_a_killed_rank_loses_nothing(
    number: int, warm: Warm, workers: Workers, data: Dataset, whole: dict[str, bytes], tmp_path: Path
) -> None:
    draw = random.Random(number)
    ranks, again = draw.randint(2, 3), draw.randint(1, 3)
    victim, delay = draw.randrange(ranks), draw.uniform(0, LONGEST)
    running = [warm.start(train, rank, ranks, str(tmp_path), str(data.path)) for rank in range(ranks)]
    while not (tmp_path / "run" / "config.json").exists():
        time.sleep(0.001)
    time.sleep(delay)
    running[victim].kill()
    for each in running:
        each.join(PATIENCE)
        assert each.exitcode is not None, "a rank waits for one that is gone"
    for rank in range(ranks):
        if rank != victim:
            said = (tmp_path / f"said-{rank}").read_text()
            assert said.startswith(("done", f"rank {victim} of {ranks} ended")), said
    found = workers.train(again, resume=tmp_path / "run", display="quiet")
    assert [each[0] for each in found] == [RUN["steps"]] * again, found
    assert files(tmp_path / "run" / "checkpoints") == whole


def train_on_a_full_disk(rank: int, ranks: int, folder: str, data: str, full: int) -> None:
    if rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
    train(rank, ranks, folder, data, **(FILE | {"device_memory": "4KiB"} if full else {}))


@pytest.mark.parametrize("full", [0, 1])  # the first rank has no space for a checkpoint, the second one for its rows
def test_a_full_disk_of_one_rank_ends_all_with_its_message(
    full: int, warm: Warm, data: Dataset, tmp_path: Path
) -> None:
    running = [warm.start(train_on_a_full_disk, rank, 2, str(tmp_path), str(data.path), full) for rank in range(2)]
    for each in running:
        each.join(PATIENCE)
        assert each.exitcode is not None, "a rank waits for one that has failed"
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert "File too large" in said[full], said
    assert "could not be written" in said[0] or full, said
    assert "(ulimit -f)" in said[full], said
    assert said[full] in said[1 - full]
