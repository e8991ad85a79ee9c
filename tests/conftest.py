"""What all tests share."""

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import all_processes  # noqa: F401
import pytest
import torch
from campaigns import in_turn, scaled
from fresh_memory import fill_fresh_memory
from hypothesis import settings
from workers import fork_workers

from stoker.training import defaults

gc.disable()  # until tests run: modules and tests never become garbage, and looking through them takes seconds

pytest.register_assert_rewrite("small_runs")  # so that what it asserts is shown in full, whoever imports it first

# A shell makes what it starts in the background deaf to Ctrl-C, and so all that is started from there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A pool that compiles for torch.compile imports torch in each of its processes, of every test process.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# How long an example takes says nothing about whether it is right, least of all on a busy machine.
settings.register_profile("stoker", deadline=None, max_examples=scaled(100))
settings.load_profile("stoker")

fill_fresh_memory()

# Batches of tests are tiny: a second thread costs more than it brings, most of all where several processes share the
# cores. Kernels are tested with all threads, and tests about threads set their own number.
ALL_THREADS = torch.get_num_threads()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # each of its tests is slow
KERNELS = Path(__file__).parent / "ops"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    fork_workers(config, len(specs))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kinds: dict[str, list[pytest.Item]] = {"slow": [], "fast": [], "later": []}
    for item in items:
        slow = item.get_closest_marker("slow") or INTERPRETED
        kinds["fast" if not slow else "slow" if in_turn(item.nodeid) else "later"].append(item)
    if kinds["later"]:
        config.hook.pytest_deselected(items=kinds["later"])
    # Each process begins with its share of the slow ones, so that none of them runs alone at the end.
    count = getattr(config, "workerinput", {}).get("workercount", 1)
    chosen = [item for part in range(count) for kind in ("slow", "fast") for item in share(kinds[kind], part, count)]
    # Ranks take seconds to start, so one process has all tests that share them. None takes tests from its beginning.
    items[:] = sorted(chosen, key=lambda item: "workers" not in getattr(item, "fixturenames", ()))


def share(items: list[pytest.Item], part: int, count: int) -> list[pytest.Item]:
    return items[len(items) * part // count : len(items) * (part + 1) // count]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.set_num_threads(ALL_THREADS if KERNELS in item.path.parents else 1)


@pytest.fixture(scope="session", autouse=True)
def one_epoch() -> Iterator[None]:
    """Train on small logs for one epoch where a test gives none, so that it stays short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults, "EPOCHS", 1)
        yield


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket of a local S3 server."""
    pytest.importorskip("s3fs", reason="s3:// needs s3fs")
    server = pytest.importorskip("moto.server", reason="the local S3 server is moto's").ThreadedMotoServer(
        port=0, verbose=False
    )
    server.start()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.get_host_and_port()[1]}"), ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_DEFAULT_REGION", "us-east-1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    import fsspec

    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    with contextlib.suppress(FileNotFoundError):  # moto keeps buckets of earlier servers
        fs.rm("bucket", recursive=True)
    fs.mkdir("bucket")
    yield fs
    fsspec.filesystem("s3").clear_instance_cache()
    server.stop()


@pytest.fixture
def no_cycle_is_found() -> Iterator[None]:
    """Let objects go by counted references alone."""
    gc.disable()
    yield
    gc.enable()
