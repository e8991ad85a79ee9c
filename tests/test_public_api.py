"""The front door: names, import time, and what importing needs."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import stoker

ROOT = Path(stoker.__file__).parent
LAYERS = {
    "errors": 0, "units": 0, "device": 0, "timeline": 0, "testing": 0,
    "ops": 1,
    "data": 2, "features": 2, "optim": 2, "distributed": 2,
    "tables": 3,
    "placement": 4, "models": 4,
    "training": 5,
    "cli": 6, "__main__": 6, "__init__": 6,
}  # fmt: skip
# testing.py writes small datasets for tests, so it may look up; nothing may import it.
EXEMPT = {"testing"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """First-level parts of stoker that a module imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "stoker" else [f"stoker.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("stoker.")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_go_down(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if own in EXEMPT:
        return
    for other in imported(path) - {"__version__"}:
        assert other in LAYERS, f"{path} imports stoker.{other}, which belongs to no layer"
        assert other not in EXEMPT or own in EXEMPT, f"{path} imports stoker.{other}, which is for tests"
        assert LAYERS[other] <= LAYERS[own], f"{path} imports stoker.{other}, a layer above its own"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_short_and_explained(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 800
    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


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
