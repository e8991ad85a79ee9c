"""Probes answer, and a device that is not there is refused in words."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from stoker import device
from stoker.errors import ConfigError


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
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert device.cpu_count() >= 1
    assert device.total_memory() != 1_000_000


def test_probes_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_read", lambda path: None)
    assert device.cpu_count() >= 1
    assert device.cpu_model()
    assert device.simd_flags() == ()
    assert device.huge_pages() is None
    assert device.resident_memory() is None
    assert device.total_memory() is None or device.total_memory() > 0


def test_freed_memory_is_kept_where_glibc_agrees():
    """In a process of its own: the setting stays until the process ends."""
    import subprocess
    import sys

    code = (
        "import sys, stoker.device as d, torch, resource\n"
        "kept = sys.argv[1] != 'leave' and d.keep_freed_memory()\n"
        "if sys.argv[1] == 'return': d.return_freed_memory()\n"
        "def step(): return [torch.empty(2**22).fill_(1.0) for _ in range(10)]\n"
        "for _ in range(5): step()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(10): step()\n"
        "faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "print(kept, faults)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code, mode], capture_output=True, text=True, check=True).stdout.split()
        for mode in ("keep", "leave", "return")
    ]
    if runs[0][0] == "True" and int(runs[1][1]) > 20_000:  # the C library did return memory
        assert int(runs[0][1]) < int(runs[1][1]) / 2
        assert int(runs[2][1]) > 2 * int(runs[0][1])
