"""Probes answer, and a device that is not there is refused in words."""

from __future__ import annotations

import importlib
import mmap
import os
from pathlib import Path

import pytest
import torch
from processes import run_python

from stoker.base import device
from stoker.base.errors import ConfigError


def test_devices() -> None:
    expected = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    assert device.resolve_device() == device.resolve_device("auto") == expected
    assert device.resolve_device("cpu") == torch.device("cpu")
    for name, message in [("gpu", "unknown"), ("mps", "not supported")]:
        with pytest.raises(ConfigError, match=message):
            device.resolve_device(name)


def test_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"sees no GPU here\. Use --device cpu"):
        device.resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.resolve_device("cuda") == torch.device("cuda", 0)
    assert device.resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="has 2 GPUs, counted from 0"):
        device.resolve_device("cuda:2")


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc/stat, which this system lacks")
def test_cores_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    before = device._worked()
    while device._worked() <= before:  # this process works
        pass
    monkeypatch.setattr(device, "cpu_count", lambda: 2)
    for cores, others, found in [(2, 0.4, 0.0), (2, 0.6, 0.6), (64, 61.0, 0.0), (64, 62.5, 62.5)]:
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        monkeypatch.setattr(device, "_worked", iter([1000, 1000 + others]).__next__)
        assert device.contending(0.01) == pytest.approx(found)
    monkeypatch.undo()
    monkeypatch.setattr(device, "_read", lambda path: None)  # not Linux
    assert device.contending(0.01) == 0.0


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs /proc/meminfo, which this system lacks")
def test_memory() -> None:
    total, available, resident, peak = (
        device.total_memory(),
        device.available_memory(),
        device.resident_memory(),
        device.peak_memory(),
    )
    assert None not in (total, available, resident, peak)
    assert 2**28 < available <= total
    assert 2**20 < resident < peak < total
    assert device.device_memory("cpu")[1] == total
    with mmap.mmap(
        -1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as block:  # not from the C library, which may still hold memory that was freed
        block.write(b"x" * 2**26)
        assert device.resident_memory() - resident > 0.9 * 2**26


def test_container_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert device.cpu_count() == 1
    assert device.total_memory() == 1_000_000
    assert device.available_memory() == 600_000
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 50000\nactive_file 40000\n")
    assert device.available_memory() == 650_000, "the system frees idle pages of files"
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert device.cpu_count() >= 1
    assert device.total_memory() != 1_000_000


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "250000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/\n", {"cpu.max": "max 100000"}, 64),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),  # of the group above
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "200000 100000"}, 2),
        ("0::/not/mounted\n", {"cpu.max": "500000 100000"}, 5),  # a container sees its own group as the root
        (
            "5:memory:/a\n4:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"},
            4,
        ),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ("", {}, 64),
    ],
)
def test_processors_of_a_container(
    groups: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mount" / name).write_text(text + "\n")
    monkeypatch.setattr(device, "_CGROUP", tmp_path / "mount")
    monkeypatch.setattr(device, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert device.cpu_count() == cores


def test_preparing_takes_the_processors_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = importlib.import_module("stoker.prep.prepare")
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("300000 100000\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)), raising=False)
    threads = []
    monkeypatch.setattr(prepare, "_run", lambda task, *given, **named: threads.append(task.threads))
    (tmp_path / "log.tsv").write_text("1\n")
    with pytest.raises(AttributeError):  # of the report that is not there
        prepare.prepare("criteo", tmp_path / "log.tsv", out=tmp_path / "out")
    assert threads == [3]


@pytest.mark.parametrize(
    ("environment", "limit"),
    [
        ({}, 7),
        ({"MALLOC_TOP_PAD_": "4096"}, 4096),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.top_pad=0x2000"}, 8192),
        ({"MALLOC_TOP_PAD_": "much"}, 7),
    ],
)
def test_limits_of_the_allocator_from_the_environment(
    environment: dict[str, str], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MALLOC_TOP_PAD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert device._malloc_limit("TOP_PAD", 7) == limit


def test_probes_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_read", lambda path: None)
    assert device.cpu_count() >= 1
    assert device.cpu_model()
    assert device.simd_flags() == ()
    assert device.huge_pages() is None
    assert device.resident_memory() is None
    assert device.total_memory() is None or device.total_memory() > 0


@pytest.mark.slow
def test_freed_memory_is_kept_where_glibc_agrees():
    """In processes of their own: the setting stays until the process ends."""
    code = (
        "import sys, stoker, stoker.base.device as d, torch, resource\n"
        "kept = sys.argv[1] in ('keep', 'return') and d.keep_freed_memory()\n"
        "if sys.argv[1] == 'return': d.return_freed_memory()\n"
        "if sys.argv[1] == 'block': (block := stoker.kept_memory()).__enter__()\n"
        "def step(): return [torch.empty(2**20).fill_(1.0) for _ in range(10)]\n"
        "for _ in range(5): step()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(10): step()\n"
        "faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "print(kept, faults)"
    )
    runs = [run_python("-c", code, mode).stdout.split() for mode in ("keep", "leave", "return", "block")]
    if runs[0][0] == "True" and int(runs[1][1]) > 20_000:  # the C library did return memory
        assert int(runs[0][1]) < int(runs[1][1]) / 2
        assert int(runs[2][1]) > 2 * int(runs[0][1])
        assert int(runs[3][1]) < int(runs[1][1]) / 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_is_not_that_of_the_program_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ru_maxrss`` survives exec: here it is that of a large parent."""
    import resource

    class Inherited:
        ru_maxrss = 2**40

    monkeypatch.setattr(resource, "getrusage", lambda who: Inherited)
    peak = device.peak_memory()
    assert peak is not None
    assert (device.resident_memory() or 0) <= peak < 2**40
