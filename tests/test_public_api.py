"""The front door: names, import time, and what importing needs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import stoker


def test_public_names_are_sorted_and_exist():
    assert stoker.__all__ == sorted(set(stoker.__all__))
    for name in stoker.__all__:
        assert getattr(stoker, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = stoker.nonsense


def test_public_names_are_documented():
    for name in stoker.__all__:
        value = getattr(stoker, name)
        if callable(value):
            assert value.__doc__, f"stoker.{name} has no docstring"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_quick():
    best = min(
        float(run("import time; t = time.perf_counter(); import stoker; print(time.perf_counter() - t)"))
        for _ in range(3)
    )
    assert best < 1.5


def test_training_needs_only_torch_numpy_and_safetensors(tmp_path):
    """Everything else is hidden from the import system; CI also does this in a real bare environment."""
    code = (Path(__file__).parent / "bare_environment.py").read_text()
    hidden = {
        "numba",
        "polars",
        "pyarrow",
        "yaml",
        "rich",
        "typer",
        "tensorboard",
        "pandas",
        "sklearn",
        "triton",
        "zstandard",
    }
    blocked = f"""
        import sys
        from importlib.machinery import PathFinder
        class Bare(PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                return None if name.split(".")[0] in {hidden} else super().find_spec(name, path, target)
        sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
    """
    assert "bare environment: ok" in run(
        textwrap.dedent(blocked) + f"\nsys.argv = ['bare', {str(tmp_path)!r}]\n" + code
    )
