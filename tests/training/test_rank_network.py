"""Ranks in network namespaces, as on several machines: the files of one process, and an end where the network fails."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import start_process
from small_runs import files

import stoker
from stoker.dataset.dataset import Dataset
from stoker.tables import Ranks
from stoker.testing import make_dataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.harness import NotRun
from benchmarks.network import DEVICE, Network, address, enter

pytestmark = pytest.mark.slow
RANKS = 3
RUN: dict[str, Any] = {
    "embedding_dim": 4, "model_options": {"bottom": (8,), "top": (8,)}, "batch_size": 40, "steps": 6, "eval_every": 6,
    "shards": 4, "tensorboard": False, "display": "quiet", "threads": 1, "device_memory": "12KiB", "strategy": "cached",
}  # fmt: skip


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network(RANKS, delay=1e-3, rate=1e9 / 8)
    except NotRun as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", rows=400, num_embeddings=(300, 100))


def train(rank: int, namespace: str, folder: str, data: str, more: dict[str, Any]) -> None:
    enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address(0)}:29500", rank=rank, world_size=RANKS)
    said = "done"
    try:
        stoker.train(data, out=f"{folder}/run-{rank}", ranks=Ranks(timeout=4), **RUN | more)
    except stoker.StokerError as error:
        said = str(error)
    Path(folder, f"said-{rank}").write_text(said)
    os._exit(0)  # closing a group without network would wait


def start(network: Network, tmp_path: Path, data: Dataset, **more: Any) -> list[Any]:
    return [
        start_process(train, rank, network.namespaces[rank], str(tmp_path), str(data.path), more)
        for rank in range(RANKS)
    ]


def test_ranks_of_several_namespaces_write_the_files_of_one_process(
    network: Network, data: Dataset, tmp_path: Path
) -> None:
    running = start(network, tmp_path, data)
    stoker.train(data, out=tmp_path / "alone", **RUN)
    for each in running:
        each.join()
    assert {(tmp_path / f"said-{rank}").read_text() for rank in range(RANKS)} == {"done"}
    assert files(tmp_path / "run-0" / "checkpoints") == files(tmp_path / "alone" / "checkpoints")
    assert not (tmp_path / "run-1").exists()  # only the first writes, on its own disk


def test_ranks_end_when_the_network_of_one_is_lost(network: Network, data: Dataset, tmp_path: Path) -> None:
    running = start(network, tmp_path, data, steps=100_000, eval_every=4)
    while not (tmp_path / "run-0" / "checkpoints").exists():
        time.sleep(0.05)
    network.cut.add(1)
    for each in running:
        each.join(30)
        assert each.exitcode is not None, "a rank waits for a lost network"
    first, cut, last = ((tmp_path / f"said-{rank}").read_text() for rank in range(RANKS))
    assert first == last
    assert first.startswith("rank 1 of 3 gave no sign of life")
    assert cut.startswith(("rank 1 of 3 cannot reach the store", "ranks 0 and 2 of 3"))
