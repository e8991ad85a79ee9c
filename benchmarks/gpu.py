"""Everything that needs a GPU, in one run of ten minutes: limits, kernels, FBGEMM, placed rows, managed memory.

Needs torch, Triton, NumPy and safetensors; Numba too for the planner's real speed. From the repository's root:

    python benchmarks/gpu.py [--quick] [--skip PART ...] [--json FILE] [--out benchmarks/results]

Each part checks its results before it shows a time. The exit code is 0 if every part ran and reached what it must, 1 if
one is short or wrong, 2 if one could not run. ``--device cpu`` rehearses the script on tiny sizes, Triton interpreted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu_tools import Setting
    from benchmarks.harness import Bar, Outcome, Result

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("limits", "kernels", "fbgemm", "placed", "managed")


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ... or cpu (tiny sizes)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, fewer checks: under two minutes")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that the script works")
    parser.add_argument("--skip", nargs="*", choices=PARTS, default=[], metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--all-kernels", action="store_true", help="check kernels at nine widths: minutes of compiling")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions, date and all figures here")
    parser.add_argument("--out", type=Path, help="directory for gpu_<machine>_<date>.md and .json")
    return parser.parse_args(arguments)


def prepare(given: argparse.Namespace) -> None:
    """What must be settled before torch and Triton are imported."""
    here = str(Path(__file__).resolve().parent)  # where a script's imports are sought first: not for modules' own names
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path != here)]
    if importlib.util.find_spec("stoker") is None:
        sys.path.insert(1, str(ROOT / "src"))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # matrix products of the same bits every time
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"


def missing() -> list[str]:
    """Packages this script could use and does not find, with what that costs."""
    cost = {
        "triton": "no Triton kernels: their part is left out, tables use plain PyTorch",
        "numba": "rows are planned in plain Python: the placed part trains a hundredth of the rows and shows no speed",
    }
    found = [f"{name} is missing: {text}" for name, text in cost.items() if importlib.util.find_spec(name) is None]
    if importlib.util.find_spec("numba") is not None:
        try:
            importlib.import_module("numba")
        except Exception as error:  # it refuses versions of NumPy that it does not know
            found.append(f"numba is installed but cannot be imported, so the placed part will fail: {error}")
    return found


def machine(setting: Setting) -> dict[str, Any]:
    """GPU, processor and versions, and a name for files."""
    import torch

    from benchmarks.machine import describe

    known = describe()
    if setting.device.type == "cuda":
        known["versions"]["cuda"] = str(torch.version.cuda)
        name = torch.cuda.get_device_name(setting.device)
        total = torch.cuda.get_device_properties(setting.device).total_memory
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        return {"GPU": f"{name}, {total / 2**30:.0f} GiB", **known, "slug": f"{slug}_{known['cores']}c"}
    return known


def bars(setting: Setting, skip: Sequence[str]) -> list[Bar]:
    """The parts as bars; only the placed rows have a figure that they must reach."""
    from benchmarks.harness import Bar, NotRun

    def part(name: str) -> Callable[..., Outcome]:
        def run(_: Any) -> Outcome:
            if name in ("kernels", "fbgemm") and importlib.util.find_spec("triton") is None:
                raise NotRun("triton is missing (pip install triton)")
            module: Any = importlib.import_module(f"benchmarks.gpu_{name}")
            outcome: Outcome = module.measure(setting)
            return outcome

        return run

    # Asked of 40 GB of rows and of the planner that people run, not of less.
    asked = 0.95 if setting.effort == "full" and importlib.util.find_spec("numba") else 0.0
    titles = {
        "limits": ("host link, both ways", 0.0, " GB/s"),
        "kernels": ("Triton lookup over the memory's bandwidth", 0.0, "x"),
        "fbgemm": ("a step of MLPerf's tables against FBGEMM (the smallest ratio)", 0.0, "x"),
        "placed": ("DLRM, 5 % of the rows in device memory against all of them (the smallest ratio)", asked, "x"),
        "managed": ("DLRM, rows in managed memory against all in device memory", 0.0, "x"),
    }
    return [
        Bar(name=f"gpu-{name}", group="gpu", title=title, must=must, unit=unit, run=part(name))
        for name, (title, must, unit) in titles.items()
        if name not in skip
    ]


def last_line(result: Result) -> str:
    """Without the figure to reach where none is asked."""
    if result.outcome is None or result.bar.must:
        return result.line
    return f"{result.bar.name}: {result.bar.show(result.outcome.value)} {result.status}"


def against_managed(results: Sequence[Result]) -> dict[str, float]:
    """Throughput of cached rows over that of managed ones by batch size, where both were measured."""
    data = {result.bar.name: result.outcome.data for result in results if result.outcome is not None}
    if not {"gpu-placed", "gpu-managed"} <= set(data):
        return {}
    cached, managed = data["gpu-placed"]["ratios"], data["gpu-managed"]["ratios"]
    return {size: cached[size][0] / managed[size][0] for size in cached if size in managed}


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(arguments)
    prepare(given)
    import torch

    from benchmarks.gpu_tools import Setting
    from benchmarks.harness import Run, body, exit_code, judge, report, write_results

    device = torch.device(given.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print(f"torch {torch.__version__} sees no GPU here. --device cpu rehearses the script.", file=sys.stderr)
            return 2
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    effort: Any = "tiny" if given.tiny or device.type == "cpu" else "quick" if given.quick else "full"
    setting = Setting(device=device, effort=effort, all_kernels=given.all_kernels)
    facts = machine(setting)
    print("\n".join(f"{name}: {value}" for name, value in facts.items() if name not in ("slug", "versions")))
    print(", ".join(f"{name} {value}" for name, value in facts["versions"].items()))
    lacking = missing()
    for line in lacking:
        print(f"note: {line}")
    if effort == "tiny":
        print("tiny sizes: this shows that the script works; its times mean nothing")
    start, run, results = time.perf_counter(), Run.of(quick=effort != "full"), []
    for bar in bars(setting, given.skip):
        print(f"\n{bar.name} ...", flush=True)
        results.append(judge(bar, run))
        print(f"\n{report(results[-1])}\n\n{last_line(results[-1])} [{results[-1].seconds:.0f} s]", flush=True)
        if given.json:  # after each part: what is measured survives whatever a later part does
            found = body(results, "gpu", facts, quick=run.quick)
            extra = {"effort": effort, "missing": lacking, "cached_over_managed": against_managed(results)}
            given.json.write_text(json.dumps(found | extra, indent=1) + "\n")
    for size, factor in against_managed(results).items():
        print(f"cached rows against managed memory, batch {size}: {factor:.2f}x")
    print(f"{time.perf_counter() - start:.0f} s in all")
    if given.out:
        print(f"written: {write_results(results, given.out, 'gpu', facts, quick=run.quick)}")
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
