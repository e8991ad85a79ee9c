"""Kernels compile and run where neither the package nor the home directory can be written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import stoker

pytest.importorskip("numba", reason="there is nothing to cache without numba")

_PROGRAM = """
import json, sys
import numpy as np
from stoker.cli.machine import _kernel_cache
from stoker.ops.codegen.native import Kernel, arguments, thread_index
from stoker.ops.cpu.kernels import chosen_ends

def double(p):
    values, count = arguments(p)
    if thread_index(p) == 0:
        for i in range(count):
            values[i] *= 2

values = np.arange(4.0)
kernel = Kernel(double)
kernel.run(values, 3)
ends = np.zeros(3, np.int64)
counted = chosen_ends(np.array([0, 2, 3, 7, 8]), np.array([1]), 2, ends)
compiled = next(iter(kernel._entries.values()))[1]
print(json.dumps({
    "values": values.tolist(), "ends": ends.tolist(), "counted": counted, "found": _kernel_cache(),
    "hits": [sum(chosen_ends.stats.cache_hits.values()), compiled.cache_hits],
}))
"""


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, and a program, whose directories cannot keep a cache: files have the caches' names."""
    site = tmp_path_factory.mktemp("sealed") / "site"
    shutil.copytree(Path(stoker.__file__).parent, site / "stoker", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [site, *(path for path in site.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").write_text("")  # permissions would not stop root
    (site / "program.py").write_text(_PROGRAM)
    return site


def run(site: Path, temporary: Path, **environment: str) -> dict:
    hidden = ("NUMBA_", "XDG_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    kept |= {"PYTHONPATH": str(site), "PYTHONPYCACHEPREFIX": str(site.parent / "modules")}  # parse modules once
    environment = {**kept, "HOME": os.devnull, "TMPDIR": str(temporary), **environment}
    done = subprocess.run(
        [sys.executable, str(site / "program.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["values"] == [0.0, 2.0, 4.0, 3.0]
    assert (result["ends"], result["counted"]) == ([0, 1, 2], 2)
    return result


@pytest.mark.slow
def test_kernels_are_kept_in_the_temporary_directory_until_a_module_changes(sealed: Path, tmp_path: Path) -> None:
    """Kernels are made of functions of other modules, which Numba's own stamp does not see."""
    first, second = run(sealed, tmp_path), run(sealed, tmp_path)
    assert (first["hits"], second["hits"]) == ([0, 0], [1, 1])
    (folder,) = tmp_path.glob("stoker-kernels-*")
    assert Path(first["found"]["path"]).parent == folder
    assert "temporary directory" in first["found"]["why"]
    if hasattr(os, "geteuid"):
        assert folder.stat().st_mode & 0o077 == 0
        assert folder.name == f"stoker-kernels-{os.geteuid()}"
    for module, hits in (("prep/schema.py", [1, 0]), ("ops/rule.py", [0, 0])):  # the program may use any module
        with (sealed / "stoker" / module).open("a") as file:
            file.write("\n")
        assert run(sealed, tmp_path)["hits"] == hits


@pytest.mark.slow
def test_kernels_are_compiled_without_a_cache_where_none_can_be(sealed: Path, tmp_path: Path) -> None:
    user = os.geteuid() if hasattr(os, "geteuid") else os.getenv("USERNAME", "user")
    (tmp_path / f"stoker-kernels-{user}").write_text("not a directory")
    result = run(sealed, tmp_path)
    assert result["found"]["path"] is None
    assert "Set NUMBA_CACHE_DIR" in result["found"]["why"]
    assert result["hits"] == [0, 0]


@pytest.mark.slow
def test_numba_cache_dir_comes_first(sealed: Path, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    result = run(sealed, tmp_path / "tmp", NUMBA_CACHE_DIR=str(tmp_path / "own"))
    assert Path(result["found"]["path"]).is_relative_to(tmp_path / "own")
    assert result["found"]["why"] == "as NUMBA_CACHE_DIR says"
    assert not any((tmp_path / "tmp").iterdir())


def test_processes_that_save_at_once_load_their_own_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second saves while the first does; Numba's own class then gives the second the first one's kernel."""
    from numba.core.caching import IndexDataCacheFile

    from stoker.ops.codegen.jit import _KernelFiles

    first, second = (_KernelFiles(str(tmp_path), "kernel", "stamp") for _ in range(2))
    write, waiting = IndexDataCacheFile._save_data, [second]

    def late(self: IndexDataCacheFile, name: str, data: bytes) -> None:
        while waiting:
            waiting.pop().save("b", "code of b")
        write(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_load_index", lambda self: {})  # both looked before either saved
        patch.setattr(IndexDataCacheFile, "_save_data", late)
        first.save("a", "code of a")
    assert [second.load("a"), first.load("b")] == ["code of a", "code of b"]
    assert _KernelFiles(str(tmp_path), "kernel", "another stamp").load("a") is None


def test_a_kernel_that_cannot_be_saved_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a full disk may need no file there."""
    from numba.core.caching import IndexDataCacheFile

    from stoker.ops.codegen.jit import _KernelFiles

    def full(self: IndexDataCacheFile, name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "_save_data", full)
    kept = _KernelFiles(str(tmp_path), "kernel", "stamp")
    kept.save("a", "code of a")
    assert kept.load("a") is None


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.ops.codegen import jit

    make = jit._temporary.__wrapped__
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = make()
    assert folder is not None
    assert folder.parent == tmp_path
    assert make() == folder
    if hasattr(os, "geteuid"):
        folder.chmod(0o777)
        assert make() is None
        folder.chmod(0o700)
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        (tmp_path / f"{jit.TEMPORARY}{other}").mkdir(mode=0o700)  # not that user's
        assert make() is None
        monkeypatch.undo()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
        assert make() is None

    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert make() is None


def test_other_errors_are_not_swallowed() -> None:
    from stoker.ops.codegen.jit import cached

    def broken(keep: bool) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        cached(broken)
