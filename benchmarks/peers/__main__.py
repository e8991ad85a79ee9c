"""``python -m benchmarks.peers build [NAME...]``: one virtual environment per peer under ``.peers``.

Peers are called through their public interface in processes of their own; none is ever a dependency of ours.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ENVIRONMENTS", "Environment", "build", "main"]

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A peer's environment: which Pythons it works with, and how to see that it works."""

    name: str
    oldest: tuple[int, int]
    newest: tuple[int, int]
    smoke: str  # a program that fails where the peer cannot be used


ENVIRONMENTS = (
    Environment(
        name="fbgemm",
        oldest=(3, 10),
        newest=(3, 13),
        smoke="import fbgemm_gpu, torchrec, torchrec.models.dlrm; print(torchrec.__version__)",
    ),
    Environment(
        name="pandas",
        oldest=(3, 11),
        newest=(3, 13),
        smoke="import pandas, pyarrow; print(pandas.__version__)",
    ),
    Environment(
        name="fastai",
        oldest=(3, 11),
        newest=(3, 11),
        smoke="import fastai.tabular; from importlib.metadata import version; print(version('fastai'))",
    ),
    Environment(
        name="nvtabular",
        oldest=(3, 10),
        newest=(3, 11),
        smoke="import nvtabular; from nvtabular import ops; print(nvtabular.__version__)",
    ),
    Environment(
        name="ipex",
        oldest=(3, 10),
        newest=(3, 13),
        smoke="import torch, intel_extension_for_pytorch as ipex; print(ipex.__version__); "
        "from intel_extension_for_pytorch.nn.modules import MergedEmbeddingBagWithSGD",
    ),
    Environment(
        name="frames",
        oldest=(3, 11),
        newest=(3, 13),
        smoke="import polars, duckdb; print(polars.__version__, duckdb.__version__)",
    ),
    Environment(
        name="serving",
        oldest=(3, 11),
        newest=(3, 13),
        smoke="import fastapi, uvicorn, onnxruntime, onnxscript, torch; print(fastapi.__version__)",
    ),
    Environment(
        name="tltorch",
        oldest=(3, 11),
        newest=(3, 13),
        smoke="import tltorch; from importlib.metadata import version; print(version('tensorly-torch'))",
    ),
)


def _version(python: str) -> tuple[int, int] | None:
    """Major and minor version of an interpreter that can make environments, else None."""
    code = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        major, minor = done.stdout.split()
        return int(major), int(minor)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def find_python(oldest: tuple[int, int], newest: tuple[int, int]) -> str | None:
    """An interpreter from ``oldest`` to ``newest``: our own, one on the path, or one that pyenv keeps."""
    names = [f"python3.{minor}" for minor in range(newest[1], oldest[1] - 1, -1)]
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [getattr(sys, "_base_executable", sys.executable)]
    candidates += [found for name in names if (found := shutil.which(name))]
    candidates += [str(path) for name in names for path in sorted(kept.glob(f"*/bin/{name}"), reverse=True)]
    for candidate in candidates:
        version = _version(candidate)
        if version is not None and oldest <= version <= newest:
            return candidate
    return None


def build(environment: Environment, *, again: bool = False) -> str | None:
    """Make one environment; return what is missing where it cannot be made.

    ``built`` is written last, so an interrupted build is never taken for whole.
    """
    target = ROOT / ".peers" / environment.name
    mark = target / "built"
    if mark.exists() and not again:
        return None
    python = find_python(environment.oldest, environment.newest)
    if python is None:
        wanted = " or ".join(
            f"{environment.oldest[0]}.{minor}" for minor in range(environment.oldest[1], environment.newest[1] + 1)
        )
        return f"needs Python {wanted} with venv; none was found on the path or under pyenv"
    print(f"{environment.name}: building with {python}", flush=True)
    shutil.rmtree(target, ignore_errors=True)
    install = [
        str(target / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
    ]
    try:
        subprocess.run([python, "-m", "venv", str(target)], check=True)
        subprocess.run([*install, "-r", str(HERE / f"requirements-{environment.name}.txt")], check=True)
        bare = HERE / f"requirements-{environment.name}-nodeps.txt"
        if bare.exists():
            # Source packages among them build with the setuptools of this environment.
            subprocess.run([*install, "--no-deps", "-r", str(bare)], check=True)
        smoke = [str(target / "bin" / "python"), "-W", "ignore", "-c", environment.smoke]
        done = subprocess.run(smoke, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        what = error.cmd[-1] if error.stderr is None else error.stderr.strip()[-500:]
        return f"{what}: exit code {error.returncode}"
    mark.write_text(done.stdout)
    print(f"{environment.name}: {done.stdout.strip()}", flush=True)
    return None


def main(arguments: list[str] | None = None) -> int:
    """Build all environments, or those named; 0 if all stand, 2 if one is missing."""
    names = [environment.name for environment in ENVIRONMENTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["build"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; none means all")
    parser.add_argument("--again", action="store_true", help="rebuild what stands")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(names)):
        parser.error(f"{unknown} unknown; choose from {names}")
    missing = {}
    for environment in ENVIRONMENTS:
        if not options.names or environment.name in options.names:
            problem = build(environment, again=options.again)
            if problem:
                missing[environment.name] = problem
    for name, problem in missing.items():
        print(f"{name} is missing: {problem}", flush=True)
    return 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
